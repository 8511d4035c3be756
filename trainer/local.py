"""The whole loop in one process, for debugging: `python -m trainer run.toml --local`. No daemon, no Slurm, no MPI.

Owns a stand-in for `scavenger.client.Run` that drives one engine directly, and one for the weights source. Groups complete in the order
in which the engine finishes them. Engine and trainer take turns, so generating in advance gains nothing, and a load of weights ends what an
engine holds: steps that are asked for in advance (`algorithm.max_off_policy_steps`) wait for their turn here. What happens is told to a
small ledger of the try's own, for people to read; no start reads it back.
One try at a time has a folder.
Boundary: debugging without a daemon; nothing else of the trainer knows of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from rollout.engines import merging
from rollout.engines.base import Engine, EngineHost, Weight
from rollout.engines.registry import builder
from scavenger.errors import ConfigError, EngineError
from scavenger.protocol import messages
from scavenger.protocol.worker.events import Delta, Request
from scavenger.weights import manifest as manifests
from scavenger.weights.manifest import Manifest
from scavenger.weights.memory import Buffer

#: In a try's folder: locked while the try runs, and who that is.
LOCK = "lock"


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep a try's folder to this process: two at once would train the same steps twice, and one would take the other's ledger.

    Raises `ConfigError` while another process has it. A file system without locks keeps nobody away.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                file.seek(0)
                raise ConfigError(
                    f"another try runs in {folder} ({file.read().strip() or 'of a process that is not known'})",
                    "wait for it or end it by Ctrl-C, or give this one a folder of its own: --set run.out_dir=OTHER",
                ) from error
            print(
                f"{folder}: this file system has no locks ({error.strerror}); do not start two tries here",
                flush=True,
            )
        else:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
            file.flush()
        yield


class LocalSource:
    """Keeps the bytes of the newest version, and of its base, where `LocalRun` finds them."""

    def __init__(self) -> None:
        self.blob: memoryview = memoryview(b"")
        self.base: tuple[Manifest, memoryview] | None = None  # what adapters are merged with
        self._newest: Manifest | None = None

    def publish(
        self, manifest: Manifest, blob: Buffer, chunks: Sequence[int] | None = None
    ) -> messages.WeightSource:
        newest = self._newest
        if newest is not None and manifest.adapter is not None and newest.root == manifest.adapter.base:
            self.base = (newest, self.blob)
        self.blob, self._newest = blob.view, manifest
        return messages.WeightSource("inproc", "", b"")


class Ledger(Protocol):
    """`scavenger.ledger.local_run.LocalLedger`, or nothing at all."""

    attempt: int
    next_version: int

    def published(self, step: int, manifest: Manifest, nbytes: int) -> None: ...
    def submitted(self, step: int, version: int, spec: messages.GroupSpec, purpose: str) -> tuple[int, int]:
        """The group's id, and that of its first sample."""

    def finished(self, sample: messages.DoneSample, version: int) -> None: ...
    def delivered(self, group: int) -> None: ...
    def committed(
        self,
        step: int,
        version: int,
        outcomes: Sequence[messages.SampleOutcome],
        metrics: Mapping[str, float],
        purpose: str,
        decisions: Sequence[messages.DataDecision] = (),
        differences: Sequence[messages.TokenDifferences] = (),
    ) -> None: ...
    def checkpointed(
        self, step: int, version: int, root: bytes, path: str, kept: Sequence[int] | None
    ) -> None: ...
    def ended(self, state: str, reason: str) -> None: ...
    def close(self) -> None: ...


class Unrecorded:
    """In the place of a ledger where there can be none: it only counts. A new start is a first attempt."""

    def __init__(self) -> None:
        self.attempt = self.next_version = 1
        self._groups = self._samples = 0

    def submitted(self, step: int, version: int, spec: messages.GroupSpec, purpose: str) -> tuple[int, int]:
        first = self._samples + 1
        self._groups, self._samples = self._groups + 1, self._samples + spec.n
        return self._groups, first

    def published(self, step: int, manifest: Manifest, nbytes: int) -> None:
        """As all that follows: nothing is kept."""

    def finished(self, sample: messages.DoneSample, version: int) -> None: ...
    def delivered(self, group: int) -> None: ...
    def committed(
        self,
        step: int,
        version: int,
        outcomes: Sequence[messages.SampleOutcome],
        metrics: Mapping[str, float],
        purpose: str,
        decisions: Sequence[messages.DataDecision] = (),
        differences: Sequence[messages.TokenDifferences] = (),
    ) -> None: ...
    def checkpointed(
        self, step: int, version: int, root: bytes, path: str, kept: Sequence[int] | None
    ) -> None: ...
    def ended(self, state: str, reason: str) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class _Group:
    id: int
    step: int
    version: int
    purpose: str
    spec: messages.GroupSpec
    open: int
    samples: list[messages.DoneSample] = field(default_factory=list)


@dataclass(slots=True)
class _Sample:
    id: int
    index: int
    group: _Group
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    routing: bytearray = field(default_factory=bytearray)


class LocalRun:
    """One engine behind the interface of `scavenger.client.Run`. A step's samples begin once the step before it is committed."""

    def __init__(
        self, engine: messages.EngineSpec, source: LocalSource, seed: int, ledger: Ledger | None = None
    ) -> None:
        self._ledger = ledger or Unrecorded()
        self.attempt, self.last_step, self.next_version = self._ledger.attempt, 0, self._ledger.next_version
        self.fleet = messages.Fleet(0, 1, 0, 0, 0)
        self.pass_rates: tuple[tuple[int, int, int, int], ...] = ()  # no start reads the ledger of a try back
        self.reserved_order = 0
        self._source = source
        self._seed = seed
        self._loop = asyncio.new_event_loop()
        self._engine: Engine = self._loop.run_until_complete(builder(engine.name)(engine, EngineHost()))
        self._next: asyncio.Task[list[Delta]] | None = None
        self._samples: dict[int, _Sample] = {}
        self._done: list[messages.GroupDone] = []
        self._version = 0  # that the engine has
        self._step: int | None = (
            None  # whose samples the engine generates; None: of no step, until one is asked for
        )
        self._later: dict[
            int, list[tuple[_Group, int]]
        ] = {}  # step -> its groups, each with its first sample's id

    def publish(self, step: int, manifest: Manifest, *sources: messages.WeightSource) -> None:
        own = manifests.views(manifests.decode(manifests.encode(manifest)), self._source.blob)
        views: Sequence[Weight] = own
        if manifest.adapter is not None:
            assert self._source.base is not None
            views = merging.views(manifest, own, *self._source.base)
        found = self._loop.run_until_complete(
            self._engine.load(manifest.version, views, summed=bool(manifest.merged))
        )
        merging.refuse_other(manifest, found)
        self._version, self.next_version = manifest.version, manifest.version + 1
        self._ledger.published(step, manifest, len(self._source.blob))

    def submit(
        self, step: int, version: int, groups: Sequence[messages.GroupSpec], purpose: str = "train"
    ) -> tuple[int, ...]:
        return tuple(self._submit(step, version, spec, purpose) for spec in groups)

    def _submit(self, step: int, version: int, spec: messages.GroupSpec, purpose: str) -> int:
        number, first = self._ledger.submitted(step, version, spec, purpose)
        group = _Group(number, step, version, purpose, spec, spec.n)
        if purpose == "train":
            self._step = step if self._step is None else self._step
            if step > self._step:
                self._later.setdefault(step, []).append((group, first))
                return group.id
        self._begin(group, first)
        return group.id

    def _begin(self, group: _Group, first: int) -> None:
        """With the weights that the engine has now."""
        spec, group.version = group.spec, self._version
        for index in range(spec.n):
            sample = _Sample(first + index, index, group)
            self._samples[sample.id] = sample
            key = messages.SampleKey(group.purpose, group.step, spec.prompt_index, index)
            request = Request(
                sample.id,
                messages.unpack_tokens(spec.prompt),
                (),
                spec.sampling.max_tokens,
                spec.sampling,
                self._seed,
                key,
            )
            self._loop.run_until_complete(self._engine.add(request))

    def poll(self, timeout_s: float) -> list[messages.GroupDone]:
        deadline = time.monotonic() + timeout_s
        while self._samples and not self._done:
            self._loop.run_until_complete(self._advance(max(0.0, deadline - time.monotonic())))
            if time.monotonic() >= deadline:
                break
        said = self._engine.speculated()
        self.fleet = msgspec.structs.replace(
            self.fleet, drafted=said.drafted, accepted=said.accepted, verifications=said.verifications
        )
        done, self._done = self._done, []
        return done

    async def _advance(self, timeout_s: float) -> None:
        self._next = self._next or asyncio.ensure_future(self._engine.next())
        finished, _ = await asyncio.wait([self._next], timeout=timeout_s)
        if finished:
            deltas, self._next = self._next.result(), None
            for delta in deltas:
                self._take(delta)

    def _take(self, delta: Delta) -> None:
        sample = self._samples[delta.handle]
        if delta.error is not None:
            raise EngineError(
                f"sample {sample.id}: {delta.error}", "with a daemon it would be tried on another engine"
            )
        sample.tokens += delta.token_ids
        sample.logprobs += delta.logprobs
        sample.raw_logprobs += delta.raw_logprobs
        sample.routing += delta.routing
        if delta.finish is None:
            return
        del self._samples[delta.handle]
        group = sample.group
        done = messages.DoneSample(
            sample.id,
            sample.index,
            messages.pack_tokens(sample.tokens),
            messages.pack_logprobs(sample.logprobs),
            messages.pack_logprobs(sample.raw_logprobs),
            delta.finish,
            0,
            by_reserved=len(sample.tokens),
            routing=bytes(sample.routing),
        )
        group.samples.append(done)
        self._ledger.finished(done, group.version)
        group.open -= 1
        if group.open == 0:
            spec = group.spec
            self._ledger.delivered(group.id)
            self._done.append(
                messages.GroupDone(
                    group.id,
                    group.step,
                    group.version,
                    group.purpose,
                    spec.prompt_index,
                    spec.prompt,
                    spec.meta,
                    tuple(group.samples),
                )
            )

    def set_reserved(self, awake: bool, bytes_held: int = 0) -> None:
        """The engine shares this process, and never runs while something else does."""
        self.reserved_order += 1
        self.fleet = msgspec.structs.replace(
            self.fleet,
            reserved_awake=int(awake),
            reserved_asleep=int(not awake),
            order=self.reserved_order,
            asleep=() if awake else ("0",),
        )

    def end_reserved(self, names: Sequence[str], reason: str) -> None:
        """It ends with this process."""

    def trained(
        self, step: int, groups: int, tokens: int, seconds: float, scored: int = -1, reward_s: float = 0.0
    ) -> None:
        """Not used here: no daemon plans by it."""

    def defer_late(self, step: int, groups: Sequence[int]) -> tuple[int, ...]:
        """None: a step has no other step's engines to wait for."""
        return ()

    def report_agreement(self, step: int, spans: Sequence[messages.SpanSums]) -> tuple[messages.Suspect, ...]:
        """There is one engine, and nothing to compare it with."""
        return ()

    def commit(
        self,
        step: int,
        version: int,
        outcomes: Sequence[messages.SampleOutcome],
        metrics: dict[str, float],
        purpose: str = "train",
        decisions: Sequence[messages.DataDecision] = (),
        differences: Sequence[messages.TokenDifferences] = (),
    ) -> None:
        self._ledger.committed(step, version, outcomes, metrics, purpose, decisions, differences)
        if purpose == "train":
            self.last_step = step
            self._step = min(self._later, default=None)
            for group, first in self._later.pop(self._step, ()) if self._step is not None else ():
                self._begin(group, first)

    def checkpoint(
        self, step: int, version: int, root: bytes, path: str, kept: Sequence[int] | None = None
    ) -> None:
        self._ledger.checkpointed(step, version, root, path, kept)

    def close_run(self, state: str, reason: str = "") -> None:
        self._ledger.ended(state, reason)

    def close(self) -> None:
        self._ledger.close()
        if self._next is not None:
            self._next.cancel()
        self._loop.run_until_complete(self._engine.close())
        self._loop.close()
