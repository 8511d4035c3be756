"""What one engine's process holds of its run's versions: it pulls them, and serves on what it holds.

Owns the process's pulls and its own source of weights. Knows no engine and no daemon: `say` carries what it serves to the caller, which
keeps the directory. Runs on one event loop. It holds the version that was asked for last, those that it was told to keep, and what arrived
of one that could not be completed, which is where the next try of the same weights begins.
Boundary: what one engine's process holds of its run's weights.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence, Set

import structlog

from scavenger.errors import ScavengerError, WeightsError
from scavenger.protocol import messages
from scavenger.protocol.keys import KeyPair
from scavenger.weights import delta, rdma
from scavenger.weights import manifest as manifests
from scavenger.weights.choice import RateBook
from scavenger.weights.delta_store import Chains
from scavenger.weights.directory import in_clear
from scavenger.weights.manifest import Manifest
from scavenger.weights.memory import Buffer, MemoryPool
from scavenger.weights.pace import NodePace
from scavenger.weights.pull import Apply, FailedEndpoints, Pull
from scavenger.weights.source import WeightServer
from scavenger.weights.source_zmq import end_process
from scavenger.weights.transfer import TransferLimits

ANNOUNCE_S = 0.5  # a pull that takes longer serves others while it runs
KEEP = 8  # more than it can be told to keep at a time
RELAYED_STEPS = 4
RELAYED_SHARE = 0.25  # of a version's bytes, that deltas which came are kept in beside it
_log = structlog.get_logger(__name__)


def _allowed(sources: Sequence[messages.WeightSource], encrypt: bool) -> list[messages.WeightSource]:
    """The sources that may be read from: weights of an encrypted run are never requested in the clear."""
    clear = [source.endpoint for source in sources if encrypt and in_clear(source)]
    if clear:
        _log.warning(
            "weights.clear_source",
            sources=clear,
            reason="weights.encrypt is set, and they serve in the clear",
        )
    return [source for source in sources if source.endpoint not in clear]


def _holders_of(
    manifest: Manifest, weights: messages.UseWeights
) -> tuple[tuple[messages.WeightSource, ...], int]:
    """The named holders of these weights, and the number under which they hold them: those that are to be used, or their base.

    A base may have got another number since its pull began; an older daemon does not say its root.
    """
    base = weights.base
    if weights.version == manifest.version:
        return weights.sources, weights.version
    if base is not None and (base.root == manifest.root if base.root else base.version == manifest.version):
        return base.sources, base.version
    return (), manifest.version


class Store:
    """`address` gives the interface on which others reach this process; it may fail, and then nothing is served. None: nothing is
    to be served."""

    def __init__(
        self,
        keypair: KeyPair,
        say: Callable[[messages.Serving], None],
        address: Callable[[], str] | None,
        *,
        limits: TransferLimits | None = None,
        announce_s: float = ANNOUNCE_S,
        clock: Callable[[], float] = time.monotonic,
        pace: NodePace | None = None,
        on_fault: Callable[[WeightsError], None] = end_process,
    ) -> None:
        """`pace`: how fast it may fetch; closed with the store. `on_fault`: called, from another thread, when what it serves from fails."""
        self._keypair = keypair
        self._on_fault = on_fault
        self._say = say
        self._address = address
        self._limits = limits
        self._announce_s = announce_s
        self._clock = clock
        self._source: WeightServer | None = None
        self._encrypted = False  # whether that one is
        self._complete: dict[int, tuple[Manifest, Buffer]] = {}  # complete and verified
        self._served: dict[int, bytes] = {}  # version -> root
        self._pull: Pull | None = None  # under way, or unfinished
        self._pool = MemoryPool(most=1)
        self._relay = Chains(RELAYED_STEPS)  # for engines that follow from the same version as this one
        self._pace = pace or NodePace()
        self._no_nixl = FailedEndpoints()
        self._more: messages.UseWeights | None = None  # further holders that were named last
        self.rates = RateBook()  # measured by all pulls of this process
        self.apply: Apply | None = None  # in place of `delta.apply_chain`
        self.chosen = ""  # how the last version came, and why
        self.verify_s = 0.0  # thread seconds that the last version's hashes took
        self._one = asyncio.Lock()  # a pull that was cancelled ends before the next begins

    async def get(self, manifest: Manifest, weights: messages.UseWeights, deadline_s: float) -> Buffer:
        """Every byte of the version, verified. Raises `WeightsError`; what arrived until then is kept for the next try."""
        async with self._one:
            self.verify_s = 0.0
            return await self._get(manifest, weights, deadline_s)

    async def get_base(
        self, manifest: Manifest, weights: messages.UseWeights, deadline_s: float
    ) -> tuple[Manifest, Buffer]:
        """What the adapters of `manifest` are merged with: here already, or pulled as any version. Raises `WeightsError`.

        It stays until a version of another base is asked for; so does what is held beside it, until `get` asks for the adapters.
        """
        assert manifest.adapter is not None
        self.verify_s = 0.0  # nothing is hashed for a base that is here
        root, base_weights = manifest.adapter.base, weights.base
        if base_weights is None:
            here = next((held for held in self._complete.values() if held[0].root == root), None)
            if here is None:
                cause = f"version {manifest.version} needs the weights of root {root.hex()}, and no holder of them was named"
                raise WeightsError(
                    cause, "the trainer publishes the base before its adapters, and again when it reconnects"
                )
            return here
        base = manifests.decode(base_weights.manifest)
        if base.root != root:
            cause = f"version {manifest.version} is of the base {root.hex()}, and what was named as its base is {base.root.hex()}"
            raise WeightsError(cause, "publish the base that the adapters were trained on")
        keep = (*weights.keep, *self._complete)
        asked = messages.UseWeights(
            base.version, base_weights.manifest, base_weights.sources, keep, encrypt=weights.encrypt
        )
        return base, await self.get(base, asked, deadline_s)

    async def _get(self, manifest: Manifest, weights: messages.UseWeights, deadline_s: float) -> Buffer:
        for version, (held, buffer) in self._complete.items():
            # Published again under another number, pulled ahead, or asked for again.
            if held.root == manifest.root:
                self._release({version, manifest.version, *weights.keep})
                return self._keep(manifest, buffer, weights)
        work = self._pull
        if work is None or work.manifest.root != manifest.root:
            newest = next(
                (
                    held
                    for _, held in sorted(self._complete.items(), reverse=True)
                    if delta.same_layout(held[0], manifest)
                ),
                None,
            )
            work = self._pull = None  # what arrived of another version is of no use
            memory = self._pool.take(manifest.total_nbytes)
            self._relay.bound(int(RELAYED_SHARE * manifest.total_nbytes))
            work = self._pull = Pull(
                manifest,
                self._keypair,
                limits=self._limits,
                clock=self._clock,
                base=newest,
                buffer=memory,
                no_nixl=self._no_nixl,
                relay=self._relay,
                pace=self._pace,
                rates=self.rates,
                apply=self.apply,
            )
        else:
            work.again(manifest)
        work.offer(_allowed(weights.sources, weights.encrypt))
        if self._more is not None:
            self._offer(work, self._more, weights.encrypt)
        partial = asyncio.get_running_loop().call_later(self._announce_s, self._serve_partial, work, weights)
        try:
            buffer = await work.finish(deadline_s + self._pace.longest_s(manifest.total_nbytes))
        finally:
            partial.cancel()
            self.verify_s, self.chosen = work.verify_s, work.choice.reason
        self._pull, work.base = None, None
        self._release({manifest.version, *weights.keep})
        return self._keep(manifest, buffer, weights)

    def loaded(self, nbytes: int, seconds: float) -> None:
        """The engine took a version: predictions have the time in them."""
        self.rates.loading = self.rates.loading.measured(nbytes, seconds)

    async def recheck(self, roots: Set[bytes]) -> list[int]:
        """Hash what is held of these once more, and let go of what is not as published any more: the next `get` pulls it, to other memory.

        Returns the versions let go. What is as published stays: were the trainer the one who erred, all engines would pull all of it again.
        """
        held = [
            (manifest, buffer, buffer.view)
            for manifest, buffer in self._complete.values()
            if manifest.root in roots
        ]
        wrong: list[Buffer] = []
        for manifest, buffer, view in held:
            found = await asyncio.to_thread(manifests.hashes_of, view, manifest.chunk_nbytes)
            if found != manifest.chunk_hashes and not any(buffer is other for other in wrong):
                wrong.append(buffer)
        gone = sorted(
            version for version, (_, buffer) in self._complete.items() if any(buffer is one for one in wrong)
        )
        _log.warning(
            "weights.rechecked",
            versions=sorted(manifest.version for manifest, _, _ in held),
            not_as_published=gone,
        )
        for version in gone:
            del self._complete[version]  # and its memory is not for another version
        self._withdraw(gone)
        return gone

    def offer(self, weights: messages.UseWeights) -> None:
        """Add holders of the version that is being pulled, or will be next."""
        self._more = weights
        if self._pull is not None:
            self._offer(self._pull, weights, weights.encrypt)

    def _offer(self, work: Pull, named: messages.UseWeights, encrypt: bool) -> None:
        sources, number = _holders_of(work.manifest, named)
        work.offer(_allowed(sources, encrypt), number)

    def close(self) -> None:
        self._pace.close()
        if self._source is not None:
            self._source.close()
            self._source = None

    def forget(self) -> None:
        """Let go of every byte that it holds, once it is closed: the process goes on for another run."""
        self._complete, self._served, self._pull, self._more = {}, {}, None, None
        self._pool, self._relay = MemoryPool(most=1), Chains(RELAYED_STEPS)
        self.rates, self.chosen = RateBook(), ""

    # ---------------------------------------------------------------- serving

    def _keep(self, manifest: Manifest, buffer: Buffer, weights: messages.UseWeights) -> Buffer:
        """Keep a verified version for use, whether or not it can be passed on."""
        self._complete[manifest.version] = (manifest, buffer)
        try:
            self._serve_on(manifest, buffer, weights)
        except WeightsError as error:
            _log.warning("weights.not_served_on", reason=str(error))
            if self._source is not None:
                self._withdrawn(self._source)  # the next version is served by a new one
        return buffer

    def _serve_on(self, manifest: Manifest, buffer: Buffer, weights: messages.UseWeights) -> None:
        source = self._serving(weights)
        if source is None:
            return
        if self._served.get(manifest.version) != manifest.root:
            source.withdraw(manifest.version)  # another history's weights of the same number
        source_entry = source.publish(manifest, buffer)
        source.completed(manifest.version)
        self._report(messages.Serving(manifest.version, manifest.root, source_entry))

    def _serve_partial(self, work: Pull, weights: messages.UseWeights) -> None:
        source, manifest = self._serving(weights), work.manifest
        if source is None or work is not self._pull:
            return
        source.withdraw(manifest.version)
        try:
            source_entry = source.publish_empty(manifest, work.buffer, work.coming)
        except WeightsError as error:
            _log.warning("weights.not_served_on", reason=str(error))
            return
        # From here on each chunk is told as it comes; those before are looked up. A chunk told twice does no harm.
        work.arrived = lambda chunk: source.arrived(manifest.version, chunk)
        for chunk in work.here():
            source.arrived(manifest.version, chunk)
        self._report(messages.Serving(manifest.version, manifest.root, source_entry))

    def _report(self, serving: messages.Serving) -> None:
        self._served[serving.version] = serving.root
        self._say(serving)

    def _serving(self, weights: messages.UseWeights) -> WeightServer | None:
        """This process's own source, encrypted where the run's are. None where it cannot have one: it then only receives.

        What the run wants is told beside the sources: a disk, or the memory of a neighbour, does not show it.
        """
        if self._address is None:
            return None
        again = (
            self._withdrawn(self._source)
            if self._source is not None and weights.encrypt and not self._encrypted
            else []
        )
        if self._source is None:
            encrypt = weights.encrypt or any(source.server_key for source in weights.sources)
            try:
                nixl = any(source.nixl for source in weights.sources) and rdma.installed()
                self._source = WeightServer(
                    self._address(),
                    keep=KEEP,
                    encrypt=encrypt,
                    nixl=nixl,
                    deltas=self._relay,
                    on_fault=self._on_fault,
                )
                self._encrypted = encrypt
            except (ScavengerError, OSError) as error:
                _log.warning("weights.not_served_on", reason=str(error))
        if self._source is not None:
            for manifest, buffer in again:
                self._report(
                    messages.Serving(manifest.version, manifest.root, self._source.publish(manifest, buffer))
                )
        return self._source

    def _withdrawn(self, source: WeightServer) -> list[tuple[Manifest, Buffer]]:
        """End our source: it stopped, or the run began to encrypt and nothing more leaves this process in the clear.

        Returns what is to be served anew.
        """
        for version, root in self._served.items():
            self._say(messages.Serving(version, root, None))
        source.close()
        self._source, served, self._served = None, self._served, {}
        return [held for version, held in self._complete.items() if version in served]

    def _release(self, keep: set[int]) -> None:
        """Drop every version but these, and report that to the directory."""
        for version in [version for version in {*self._complete, *self._served} if version not in keep]:
            over = self._complete.pop(version, None)
            if over is not None and not any(buffer is over[1] for _, buffer in self._complete.values()):
                self._pool.put_back(over[1])
            self._withdraw([version])

    def _withdraw(self, versions: Sequence[int]) -> None:
        for version in versions:
            root = self._served.pop(version, None)
            if root is not None and self._source is not None:
                self._source.withdraw(version)
                self._say(messages.Serving(version, root, None))
