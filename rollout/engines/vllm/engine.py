"""vLLM in the worker's process: its asynchronous engine behind `base.Engine`.

Owns one `AsyncLLM` (whose core is a process of its own), one task a request, and the order in which weights are replaced. Knows no daemon.
`setup` has vLLM's settings and the reason for each, `worker` what runs in vLLM's own processes, docs/engines.md what an admin needs.

vLLM is imported by `build`, in the engine's own thread, which lives as long as the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import mmap
import os
import shutil
import signal
import struct
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import structlog
import torch

from rollout.engines import account, checksum, merging, published, slices
from rollout.engines.base import EngineHost, EngineInfo, Kv, Weight, refuse_impossible
from rollout.engines.checksum import NOTHING, Sum
from rollout.engines.merging import Merged
from rollout.engines.vllm import setup
from rollout.engines.vllm.leaving import LeavingKv
from rollout.engines.vllm.proposer import Heard, group_name, request_name
from rollout.engines.vllm.setup import MemoryFiles
from rollout.engines.vllm.worker import Routed
from scavenger.errors import SUSPECT_MEMORY, EngineError, WeightsDiffer, describe
from scavenger.protocol.messages import EngineSpec, SampleKey
from scavenger.protocol.worker.events import NOT_SPECULATED, Delta, HearSiblings, Request, Speculated

NAME = "vllm"
MAX_NEWS = 64  # messages with siblings' tokens that wait while vLLM's process does something else; then the oldest is dropped
ASK_SPECULATED_S = 1.0  # between two questions to vLLM's process what speculation did
OWN = 0  # the lane of the run whose engine it is
BEHIND = 1 << 30  # priority of other runs' requests: those of the run whose engine it is come first
CALL_S = 300.0  # what one call to all ranks may take
_SEED_PERSON = b"scavenger-lease1"  # names this construction; another one must use another name
_log = structlog.get_logger(__name__)


def lease_seed(seed: int, key: SampleKey, accepted: int) -> int:
    """The seed of one lease, in [0, 2^63 - 1), as `torch.Generator.manual_seed` takes it. `accepted`: tokens accepted before. Pure.

    vLLM's generator starts over with each request. With one seed per sample, a moved sample's next tokens would be drawn from the numbers
    of its first ones; without a seed, every engine would draw the same. So the seed is a hash of the run's seed, the sample's key and
    `accepted`, and no two leases share a stream.
    """
    purpose = key.purpose.encode()
    # Length-prefixed text and fixed-width integers: two different keys never encode to the same bytes.
    data = (
        struct.pack(">I", len(purpose))
        + purpose
        + struct.pack(">qqqqq", seed, key.step, key.prompt, key.index, accepted)
    )
    return int.from_bytes(blake2b(data, digest_size=8, person=_SEED_PERSON).digest(), "big") % (2**63 - 1)


async def build(spec: EngineSpec, host: EngineHost) -> VllmEngine:
    """Start vLLM with random weights; it serves after the first `load`. Raises `EngineError`."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="vllm")
    try:
        llm, layout, folder = await asyncio.get_running_loop().run_in_executor(executor, _start, spec, host)
    except EngineError:
        executor.shutdown(wait=False)
        raise
    except Exception as error:
        executor.shutdown(wait=False)
        raise EngineError(
            f"vLLM did not start: {describe(error)}",
            "its own words are in the worker's log; docs/engines.md has the usual causes",
            quoted=str(error),
        ) from error
    engine = VllmEngine(spec, host, llm, layout, folder, executor)
    try:
        await engine.prepare()
    except BaseException:
        await engine.close()
        raise
    return engine


def _start(spec: EngineSpec, host: EngineHost) -> tuple[Any, published.PublishedLayout, Path]:
    gpu = torch.cuda.is_available()
    values, layout, config = setup.checked_config(spec)
    folder = setup.prepare_environment(gpu, host)
    try:
        (folder / "config.json").write_text(json.dumps(values))
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        chosen = setup.arguments(spec, host, folder, config, gpu)
        if "kv_transfer_config" in chosen:
            from vllm.config import KVTransferConfig

            chosen["kv_transfer_config"] = KVTransferConfig(**chosen["kv_transfer_config"])
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**chosen))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return llm, layout, folder


class LoadReply(NamedTuple):
    """What one rank says of a load, as `worker.Extension.scavenger_load` returns it. Checksums by parameter, as numbers.

    `cast`: of its share of what was published, in the engine's types, of experts by expert; `held`: of what the rank holds now; `packed`:
    fused module -> its parts; `published`: of its share as it was published; `kept`: of what the rank holds, as it can be asked for again;
    `read_nbytes`: what it read of the memory that all ranks share.
    """

    cast: Any
    held: Any
    packed: Mapping[str, Sequence[str]]
    published: Any
    kept: Any
    read_nbytes: int = 0


class PendingWeights(NamedTuple):
    """Weights that came while the engine slept. `digest`: of what adapters were merged into, b"" = nothing was."""

    version: int
    views: list[Weight]
    names: dict[str, str]
    digest: bytes


class LentLane(NamedTuple):
    """Another run's adapters. `name`: of this load, never that of another; `lora`: their number in vLLM, None: it has the base alone.
    `base`: theirs, which was found to be the one in place, whose digest is `digest`."""

    name: str
    lora: int | None
    base: Sequence[Weight]
    digest: bytes


class VllmEngine:
    """`base.Engine` and `base.SharesBatch` over an `AsyncLLM`."""

    def __init__(
        self,
        spec: EngineSpec,
        host: EngineHost,
        llm: Any,
        layout: published.PublishedLayout,
        folder: Path,
        executor: ThreadPoolExecutor,
    ) -> None:
        self._spec = spec
        self._host = host
        self._llm = llm
        self._layout = layout
        self._folder = folder
        self._executor = executor
        self._cores: dict[int, int] = {}  # a core process's pidfd -> its pid
        self._streams: dict[int, asyncio.Task[None]] = {}
        self._ready: list[Delta] = []
        self._work = asyncio.Event()
        self._fault: EngineError | None = None
        self._faulted = asyncio.Event()
        self._serial = 0
        self._made = 0
        self._version = -1
        self._copies: dict[str, int] = {}  # of a published tensor, on how many ranks each element lies
        self._lacking: list[str] = []  # published tensors for which no rank has a parameter
        self._held: list[Any] = []  # what each rank held of it when it was verified
        self._weights_lock = asyncio.Lock()
        self._stages = int(setup.options_of(spec).get("pipeline_parallel_size", 1))
        self._base: list[Weight] | None = None  # that is in place, if adapters are kept beside it
        self._base_digest = b""
        self._adapters: Sequence[Merged] = ()
        self._loras = 0  # adapters that were put in place so far
        self._lora: int | None = None  # the number of those that requests are computed with
        self._lanes: dict[int, LentLane] = {}  # of other runs that have slots here
        self._lane_of: dict[int, int] = {}  # handle -> its lane; none: the run's own
        self._met_nan: set[str] = (
            set()
        )  # requests, by their names in vLLM, whose cache blocks are not zeroed yet
        self._usable = False
        self._asleep = False
        # Where a file stands for the GPUs: what each rank of this engine takes of its own, awake.
        self._gpus = account.of_engine(os.environ) if host.sleeps else (account.Uncounted(),)
        self._taken: list[dict[str, int]] = []
        self._gpu_nbytes = self._gpus[0].capacity if self._gpus[0].counts else _gpu_nbytes()
        self._pending: PendingWeights | None = None  # arrived while asleep
        self._routing_lock = asyncio.Lock()
        self._routes: Routed = {}  # by the name that a request has here
        self._speculated = NOT_SPECULATED  # as vLLM's process said last
        self._ask_speculated_at = 0.0
        self._news: deque[HearSiblings] = deque(
            maxlen=MAX_NEWS
        )  # of siblings elsewhere, not yet told to vLLM's process
        self._telling: asyncio.Task[None] | None = None
        self._kv_shape = ("", 0, 0)  # of the blocks that move: layout, bytes a token, tokens a block
        self._leaving = LeavingKv()  # of requests that leave their blocks when they are finished
        self._texts: dict[int, list[int]] = {}  # of requests that run, where their blocks may be asked for
        self._brought: dict[
            int, int
        ] = {}  # handle -> descriptor of the memory with the blocks that it brought
        self._letting_go: set[asyncio.Task[None]] = set()  # of such memory, whose requests were aborted
        self._introduced: set[str] = set()  # groups whose prompt that process was told

    async def prepare(self) -> None:
        """Watch the core, and put our hooks into it."""
        loop = asyncio.get_running_loop()
        for process in self._llm.engine_core.resources.engine_manager.processes:
            # Of our own: vLLM closes the process's sentinel when it notices first, and would leave calls unanswered.
            pidfd = os.pidfd_open(process.pid)
            self._cores[pidfd] = process.pid
            loop.add_reader(pidfd, self._core_died, pidfd)
        await self._call(
            self._llm.collective_rpc(
                "scavenger_hook",
                CALL_S,
                (True, self._spec.pace, self._spec.routing, self._spec.speculation == "group"),
            )
        )
        if setup.moves_kv(self._spec, self._host):
            (self._kv_shape,) = await self._call(self._llm.collective_rpc("scavenger_kv_shape", CALL_S))
        await self._divide()
        if self._gpus[0].counts:
            self._taken = await self._call(self._llm.collective_rpc("scavenger_bytes_taken", CALL_S))
            self._hold(self._taken)

    async def _divide(self) -> None:
        """Ask each rank which parts of the published tensors it keeps; what it keeps is all that it reads, and what it answers for."""
        shapes = {names[0]: self._layout.shapes[names[0]] for names in self._layout.tied}
        kept = await self._call(self._llm.collective_rpc("scavenger_probe", CALL_S, (shapes,)))
        self._lacking = sorted(name for name in shapes if not any(name in one for one in kept))
        places = {name: [one.get(name, []) for one in kept] for name in shapes}
        self._copies = {name: slices.copies(shape, places[name]) for name, shape in shapes.items()}
        of = {name: slices.shares(shape, places[name]) for name, shape in shapes.items()}
        shares = [{name: each[rank] for name, each in of.items()} for rank in range(len(kept))]
        await self._call(self._llm.collective_rpc("scavenger_share", CALL_S, (shares,)))

    def info(self) -> EngineInfo:
        spec, cache = self._spec, self._llm.vllm_config.cache_config
        held = int(cache.num_gpu_blocks or 0) * int(cache.block_size or 0)  # as vLLM found room for
        return EngineInfo(
            NAME,
            spec.max_batch,
            spec.context_length,
            self._layout.vocab_size,
            self._host.gpus,
            cache_tokens=held,
            gpu_nbytes=self._gpu_nbytes,
        )

    # ------------------------------------------------------------ weights

    async def load(self, version: int, tensors: Iterable[Weight], *, summed: bool = False) -> bytes:
        await self._end_streams(OWN if self._lanes else None)
        self._usable, self._pending = False, None
        own = list(tensors)
        views = published.checked(self._layout, own)
        names = published.names(self._layout, own)
        if self._asleep:
            # The GPU is the trainer's: they are put in place by `wake`, which finds the same there or fails.
            found = await self._in_thread(merging.digest, views, names) if summed else b""
            self._pending = PendingWeights(version, views, names, found)
        else:
            async with self._weights_lock:
                try:
                    found = await self._put_in(version, views, names)
                except BaseException:  # it does not fit, or the call was cancelled
                    if self._lanes:  # other runs' samples wait for no version of this one
                        await self._call(self._llm.resume_generation())
                    raise
                if self._spec.keep_cache or self._lanes:  # no request finds what is cached of older weights
                    await self._call(self._llm.resume_generation())
                else:
                    await self._resume_with_clean_cache()
        self._usable = True
        return found if summed else b""

    async def _put_in(self, version: int, views: Sequence[Weight], names: Mapping[str, str]) -> bytes:
        """Pause, replace, verify; returns the digest of the new. What is cached is of the old: next is `_resume_with_clean_cache`.

        Adapters that are kept beside their base are put beside it, and the base is replaced where another one is there.
        """
        if not self._spec.adapter_rank:
            return await self._load_memory(version, views, names)
        base, adapters = merging.apart(views)
        if self._base is None or not merging.same_memory(self._base, base):
            if self._lanes and not await self._holds(base, names):
                self._lanes.clear()  # they are computed with the base that is about to go
                await self._end_streams()
            if not self._lanes:
                self._base = None  # until it is there whole
                self._base_digest = await self._load_memory(version, base, names)
            self._base = base
        await self._pause_to_load()
        await self._adapt(version, adapters)
        return b"" if adapters else self._base_digest

    async def _holds(self, base: Sequence[Weight], names: Mapping[str, str]) -> bool:
        """Whether just this base is in place."""
        if self._base is None:
            return False
        return bool(await self._in_thread(merging.digest, base, names) == self._base_digest)

    async def _adapt(self, version: int, adapters: Sequence[Merged]) -> None:
        self._version, self._adapters = version, adapters
        self._lora = None
        self._lora = await self._beside_base(version, adapters)

    async def _beside_base(self, version: int, adapters: Sequence[Merged]) -> int | None:
        """Put adapters beside the base; those that no lane has any more go. Returns their number; None where there are none."""
        if not adapters:
            return None
        self._loras += 1  # never that of a version before: requests name it
        parts = [part for one in adapters for part in one.parts[1:]]
        with await self._in_thread(MemoryFiles, parts) as memory:
            rows = [tuple(row) for _, *row in memory.table]
            layers = [one.name.removesuffix(".weight") for one in adapters]
            given = list(zip(layers, rows[::2], rows[1::2], strict=True))
            call = self._llm.collective_rpc(
                "scavenger_adapt",
                CALL_S,
                (memory.paths, given, adapters[0].scale, self._loras, self._numbers()),
            )
            taken = sum(await self._call(call))
        ranks = self._host.gpus // self._stages
        if taken != len(layers) * ranks:
            cause = f"version {version} has adapters for {len(layers)} layers, and vLLM has a place for {taken / ranks:g} of them"
            raise EngineError(cause, 'set lora.serve = "merged"')
        return self._loras

    def _numbers(self) -> list[int]:
        """Of adapters that requests may name."""
        return [
            number
            for number in (self._lora, *(lane.lora for lane in self._lanes.values()))
            if number is not None
        ]

    async def _load_memory(self, version: int, views: Sequence[Weight], names: Mapping[str, str]) -> bytes:
        """Pause, replace, verify."""
        if self._lacking:
            cause = f"vLLM's model has no parameter for {len(self._lacking)} weights, the first is {self._lacking[0]!r}"
            raise EngineError(cause, "docs/engines.md says which models it takes")
        llm = self._llm
        await self._pause_to_load()
        with await self._in_thread(MemoryFiles, views) as memory:
            given = (memory.paths, memory.table, memory.merges, version)
            said = await self._call(llm.collective_rpc("scavenger_load", CALL_S, given))
        replies = [LoadReply(*reply) for reply in said]
        self._verify(version, replies)
        self._version, self._held = version, [reply.kept for reply in replies]
        sums = _added(reply.published for reply in replies)
        return checksum.digest({names[name]: value for name, value in sums.items()})

    async def _pause_to_load(self) -> None:
        if self._lanes:  # other runs' requests go on behind it
            await self._call(self._llm.pause_generation(mode="keep", clear_cache=False))
            return
        await self._call(self._llm.pause_generation(mode="abort", clear_cache=not self._spec.keep_cache))

    async def _resume_with_clean_cache(self) -> None:
        """Zero the cache, forget its prefixes, let requests run. What runs is computed again, in other blocks: those of before, which are
        zeroed, are given out no more."""
        self._texts.clear()
        await self._call(self._llm.collective_rpc("scavenger_wipe", CALL_S))
        await self._call(self._llm.reset_prefix_cache(reset_running_requests=True))
        await self._call(self._llm.resume_generation())

    async def _cleanse(self, name: str) -> None:
        """After a request met NaN, which ends it: the next request that has its cache blocks would meet it too, so they are zeroed before
        any is computed. All others are computed again, nothing else of them changes. One wipe serves all that met NaN before it began."""
        self._met_nan.add(name)
        async with self._weights_lock:
            if name not in self._met_nan:
                return
            await self._call(self._llm.pause_generation(mode="keep", clear_cache=False))
            ended, self._met_nan = sorted(self._met_nan), set()
            await self._call(self._llm.abort(ended))
            await self._resume_with_clean_cache()

    def _verify(self, version: int, replies: Sequence[LoadReply]) -> None:
        """Raises `EngineError` unless every parameter, as it is read by the forward pass, holds what was published for it."""
        cast, packed = _added(reply.cast for reply in replies), replies[0].packed
        tied = {name: names[0] for names in self._layout.tied for name in names}
        held = [_sums(reply.held) for reply in replies]
        wrong = checksum.faults(cast, held, packed, tied, self._copies)
        if wrong:
            cause = (
                f"version {version} does not sit in the engine as published: {wrong[0]} ({len(wrong)} in all)"
            )
            raise WeightsDiffer(cause, f"it is loaded again; {SUSPECT_MEMORY}")
        whole = checksum.total(cast.values())
        _log.info(
            "engine.verified",
            version=version,
            checksum=f"{whole.value:016x}",
            elements=whole.numel,
            parameters=len(replies[0].held),
            read_nbytes=[reply.read_nbytes for reply in replies],
        )

    # ------------------------------------------------------------ other runs' adapters

    def borrowers(self) -> frozenset[int]:
        return frozenset(self._lanes)

    async def load_beside(self, lane: int, tensors: Iterable[Weight]) -> None:
        async with self._weights_lock:
            before = await self._empty(lane)
            own = list(tensors)
            views, names = published.checked(self._layout, own), published.names(self._layout, own)
            base, adapters = merging.apart(views)
            merging.refuse_larger(adapters, self._spec.adapter_rank)
            known = (
                before is not None
                and before.digest == self._base_digest
                and merging.same_memory(before.base, base)
            )
            if self._asleep or self._base is None or not (known or await self._holds(base, names)):
                raise EngineError(
                    "the run that borrows slots has another base than the run whose engine this is",
                    "only runs of one base model share an engine",
                )
            try:
                await self._call(self._llm.pause_generation(mode="keep", clear_cache=False))
                number = await self._beside_base(lane, adapters)
                self._serial += 1
                self._lanes[lane] = LentLane(f"lent-{self._serial}", number, base, self._base_digest)
            except BaseException:  # it does not fit, or the call was cancelled: nothing of it stays
                if self._fault is None:
                    await self._drop_others()
                raise
            finally:  # samples of all other lanes wait for this
                if self._fault is None:
                    await self._call(self._llm.resume_generation())

    async def _empty(self, lane: int) -> LentLane | None:
        """End the lane's requests, and take its weights from it; returns what it had. Where requests of it ran, nothing is computed from
        before they end until their cache blocks are zeroed: the next request that has them would read what this run left there."""
        if not self._streams_of(lane):
            return self._lanes.pop(lane, None)
        await self._call(self._llm.pause_generation(mode="keep", clear_cache=False))
        try:
            before = self._lanes.pop(lane, None)  # with the requests: none of it begins in between
            await self._end_streams(lane)
        finally:  # samples of all other lanes wait for this
            if self._fault is None:
                await self._resume_with_clean_cache()
        return before

    async def _drop_others(self) -> None:
        """Adapters that no request may name."""
        await self._call(self._llm.collective_rpc("scavenger_drop_adapters", CALL_S, (self._numbers(),)))

    async def add_beside(self, lane: int, request: Request) -> None:
        if lane not in self._lanes:
            raise EngineError("the engine holds no weights")
        self._lane_of[request.handle] = lane
        try:
            await self._begin(request, None)
        except BaseException:  # refused, or the call was cancelled
            self._lane_of.pop(request.handle, None)
            raise

    async def drop(self, lane: int) -> None:
        async with self._weights_lock:  # behind a load of it that is under way
            if self._fault is not None:
                self._lanes.pop(lane, None)
                await self._end_streams(lane)
                return
            await self._call(self._llm.pause_generation(mode="keep", clear_cache=False))
            try:
                self._lanes.pop(lane, None)
                await self._end_streams(lane)
                await self._drop_others()
            finally:  # samples of all other lanes wait for this
                if self._fault is None:
                    await self._resume_with_clean_cache()

    # ------------------------------------------------------------ requests

    def kv_layout(self) -> str:
        return self._kv_shape[0]

    def kv_tokens(self, tokens: int) -> int:
        block = self._kv_shape[2]
        return tokens // block * block if block else 0

    def kv_token_nbytes(self) -> int:
        return self._kv_shape[1]

    async def take_kv(self, handle: int, tokens: int) -> Kv | None:
        stream, count, known = self._streams.get(handle), self.kv_tokens(tokens), self._texts.get(handle)
        if self._leaving.has(handle):
            return await self._leaving.take(
                handle, count, count * self.kv_token_nbytes(), self._between_passes
            )
        if stream is None or known is None or not 0 < count <= len(known):
            return None
        nbytes = count * self.kv_token_nbytes()
        fd = os.memfd_create("scavenger-kv", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            path = f"/proc/{os.getpid()}/fd/{fd}"
            (taken,) = await self._call(
                self._llm.collective_rpc("scavenger_take_kv", CALL_S, (stream.get_name(), count, path))
            )
            # A mapping keeps the memory when its descriptor is closed.
            return Kv(tuple(known[:count]), memoryview(mmap.mmap(fd, nbytes))) if taken else None
        finally:
            os.close(fd)

    async def _between_passes(self) -> None:
        """Once vLLM's process is between two passes."""
        await self._call(self._llm.collective_rpc("scavenger_kv_shape", CALL_S))

    async def add_with_kv(self, request: Request, kv: Kv) -> None:
        fd = os.memfd_create("scavenger-kv", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, kv.data.nbytes)
            setup.write_at(fd, kv.data, 0)
            await self._begin(request, {"path": f"/proc/{os.getpid()}/fd/{fd}", "tokens": len(kv.tokens)})
        except BaseException:  # a cancelled call too: no request has the descriptor, and none would close it
            os.close(fd)
            raise
        self._brought[request.handle] = fd

    async def add(self, request: Request) -> None:
        await self._begin(request, None)

    async def _begin(self, request: Request, brought: dict[str, Any] | None) -> None:
        """`brought`: where vLLM's connector finds the entries of its first tokens."""
        # What another run has in its lane is there while this run's own version is replaced.
        if self._asleep or not (self._usable or request.handle in self._lane_of):
            raise EngineError("the engine is asleep" if self._asleep else "the engine holds no weights")
        refuse_impossible(request, self._spec.context_length, self._layout.vocab_size)
        # What vLLM does not take must be refused here: from the stream it would end the engine, with every lease on it.
        params = _params(request)
        blocks = dict(brought or {})
        if self._kv_shape[2]:
            self._texts[request.handle] = [*request.prompt, *request.accepted]
            if request.leaves_kv and request.handle not in self._lane_of:
                blocks |= self._leaving.ask(request.handle)
        if blocks:
            params.extra_args = {"kv_transfer_params": blocks}
        self._serial += 1
        drafts = self._spec.speculation != "none"
        name = request_name(self._serial, request.key, request.prompt) if drafts else str(self._serial)
        stream = asyncio.create_task(self._stream(request, params, name), name=name)
        self._streams[request.handle] = stream
        stream.add_done_callback(lambda task: self._ended(request.handle, task))

    async def abort(self, handles: Iterable[int]) -> None:
        gone = set(handles)
        for handle in gone & self._streams.keys():
            self._streams.pop(handle).cancel()
            self._lane_of.pop(handle, None)
        self._leaving.drop(gone)
        self._ready = [delta for delta in self._ready if delta.handle not in gone]
        if not self._ready and self._fault is None:
            self._work.clear()

    async def next(self) -> list[Delta]:
        while True:
            if self._fault is not None:
                raise self._fault
            if self._ready:
                ready, self._ready = self._ready, []
                self._work.clear()
                return ready
            await self._work.wait()

    async def _stream(self, request: Request, params: Any, name: str) -> None:
        """One request from its first token to its end, by its name in vLLM. Cancelling it aborts the request there."""
        from vllm import TokensPrompt

        how = request.sampling
        # A cached prompt of another run or version is never found.
        prompt = TokensPrompt(
            prompt_token_ids=[*request.prompt, *request.accepted], cache_salt=self._salt(request)
        )
        with_adapters: Any = None
        lane = self._lanes.get(self._lane_of.get(request.handle, OWN))
        lora, of = (self._lora, f"version-{self._version}") if lane is None else (lane.lora, lane.name)
        if lora is not None:
            from vllm.lora.request import LoRARequest

            with_adapters = LoRARequest(of, lora, "memory")
        position, greedy, raw_column = len(request.accepted), how.temperature == 0, bool(params.logprobs)
        # A sample that was moved goes first, and of several the one that has the most to lose.
        first = -position if lane is None else BEHIND - position
        made = self._llm.generate(prompt, params, name, lora_request=with_adapters, priority=first)
        async for output in made:
            delta = _delta(request.handle, output.outputs[0], position, greedy=greedy, raw_column=raw_column)
            if delta is None:
                continue
            if (fd := self._brought.pop(request.handle, None)) is not None:
                os.close(fd)  # they are in vLLM's cache, or were computed: it opens them once
            if delta.error is not None:
                self._texts.pop(request.handle, None)  # nor until then: another engine would meet NaN too
                try:
                    await asyncio.shield(self._cleanse(name))
                except asyncio.CancelledError:
                    await self._llm.abort(name)  # who ends it drops what it is computed with next
                    raise
            if self._spec.routing and delta.token_ids:
                given = len(request.prompt) + position  # each token's row is of the position before it
                delta = replace(delta, routing=await self._routed(name, given - 1, len(delta.token_ids)))
            position += len(delta.token_ids)
            if request.handle in self._texts:
                self._texts[request.handle] += delta.token_ids
            if delta.error or delta.finish:
                text = () if delta.error else self._texts.get(request.handle, ())
                self._leaving.finished(request.handle, text)
            self._made += 1
            self._ready.append(delta)
            self._work.set()
            if delta.error or delta.finish:
                await self._note_speculated()
                return

    def _salt(self, request: Request) -> str:
        """Names entries of the prefix cache: those of this version, or of samples that were begun with a version, whatever made them. In
        another history of the ledger the same numbers are other weights; those of another run have a name that no one else has."""
        if (lane := self._lanes.get(self._lane_of.get(request.handle, OWN))) is not None:
            return lane.name
        where = f"{self._host.run}/{request.history}"
        begun = request.begun_version
        return f"{where}/{self._version}" if begun < 0 else f"{where}/begun/{begun}"

    async def _note_speculated(self) -> None:
        """Ask vLLM's process what speculation did, once in a while."""
        now = asyncio.get_running_loop().time()
        if self._spec.speculation == "none" or now < self._ask_speculated_at:
            return
        self._ask_speculated_at = now + ASK_SPECULATED_S
        (told, *_) = await self._call(self._llm.collective_rpc("scavenger_speculated", CALL_S))
        self._speculated = Speculated(*told)

    async def _routed(self, name: str, first: int, count: int) -> bytes:
        """Which experts so many tokens of a request went to, from a position on. Raises `EngineError` where vLLM does not say."""
        wanted = range(first, first + count)
        async with self._routing_lock:
            if not all(position in self._routes.get(name, {}) for position in wanted):
                (found, *_) = await self._call(self._llm.collective_rpc("scavenger_routing", CALL_S))
                for request, rows in found.items():
                    # vLLM appends letters of its own to a request's name.
                    self._routes.setdefault(request.partition("-")[0], {}).update(rows)
            mine = self._routes.get(name, {})
            lacking = [position for position in wanted if position not in mine]
            if lacking:
                raise EngineError(
                    f"vLLM does not say which experts the token at position {lacking[0]} went to",
                    "set algorithm.router_replay = false",
                )
            return b"".join(mine.pop(position) for position in wanted)

    def _ended(self, handle: int, task: asyncio.Task[None]) -> None:
        if self._streams.get(handle) is task:
            del self._streams[handle]
            self._lane_of.pop(handle, None)
        self._texts.pop(handle, None)
        if (fd := self._brought.pop(handle, None)) is not None and not task.cancelled():
            os.close(fd)
        elif fd is not None:
            letting_go = asyncio.create_task(self._let_go(fd))
            self._letting_go.add(letting_go)
            letting_go.add_done_callback(self._letting_go.discard)
        self._routes.pop(task.get_name(), None)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(_died(error))

    async def _let_go(self, fd: int) -> None:
        """Of an aborted request, which vLLM may have scheduled and not begun. A call is answered behind the abort, and then nothing opens
        the memory any more: closed before, its path would name nothing, or another request's blocks."""
        try:
            with contextlib.suppress(EngineError):  # it died: whoever reads next hears of that
                await self._between_passes()
        finally:
            os.close(fd)

    async def _end_streams(self, lane: int | None = None) -> None:
        """Of this lane; None: of all. Tokens of a lane's requests that have ended may still be fetched."""
        streams = self._streams_of(lane)
        await self.abort(streams)
        await asyncio.gather(*streams.values(), return_exceptions=True)
        if lane in (None, OWN):
            self._leaving.drop_all()  # of the run's own, finished ones among them: no other lane's are left
        if lane is None:
            self._ready.clear()

    def _streams_of(self, lane: int | None) -> dict[int, asyncio.Task[None]]:
        return {
            handle: stream
            for handle, stream in self._streams.items()
            if lane is None or self._lane_of.get(handle, OWN) == lane
        }

    # ------------------------------------------------------------ sleep, life and death

    async def sleep(self) -> None:
        await self._end_streams()
        self._asleep = True
        async with self._weights_lock:
            await self._call(self._llm.sleep(level=1))
        self._hold([dict.fromkeys(taken, 0) for taken in self._taken])

    def _hold(self, taken: Sequence[Mapping[str, int]]) -> None:
        """Of each rank's GPU. Raises `EngineError` where one has not so much left."""
        try:
            for gpu, of_rank in zip(self._gpus, taken, strict=bool(taken)):  # empty: nothing is counted
                for purpose, nbytes in of_rank.items():
                    gpu.hold(purpose, nbytes)
        except account.OverCapacity as error:
            raise EngineError("the GPU's memory is not free", quoted=str(error)) from error

    async def wake(self) -> None:
        self._hold(self._taken)
        pending, self._pending = self._pending, None
        if pending is None:
            await self._call(self._llm.wake_up())
            await self._find_again()
            if self._lora is not None:
                await self._adapt(self._version, self._adapters)  # from host memory: they were elsewhere too
        else:
            # First the weights alone: the cache's memory is not needed while they are replaced.
            await self._call(self._llm.wake_up(["weights"]))
            version, views, names, due = pending
            if await self._put_in(version, views, names) != due and due:
                raise EngineError(
                    f"version {version} was merged once more, and came out otherwise",
                    "suspect the node's memory",
                )
            await self._call(self._llm.wake_up(["kv_cache"]))
        await self._resume_with_clean_cache()  # what the trainer left in that memory is in the cache's now
        self._asleep = False

    async def _find_again(self) -> None:
        """Raises `WeightsDiffer` unless each rank holds what it did when its version was verified: it was elsewhere meanwhile."""
        if not self._held:
            return  # nothing was loaded, and nothing is generated
        found = await self._call(self._llm.collective_rpc("scavenger_held", CALL_S))
        if not all(
            checksum.same(_sums(now), _sums(then)) for now, then in zip(found, self._held, strict=True)
        ):
            cause = f"version {self._version} did not come out of sleep as it went into it"
            raise WeightsDiffer(cause, f"the engine is started anew; {SUSPECT_MEMORY}")

    async def bytes_held(self) -> Sequence[int]:
        if self._gpus[0].counts:
            return [gpu.own() for gpu in self._gpus]
        found: list[int] = await self._call(self._llm.collective_rpc("scavenger_bytes_held", CALL_S))
        return found

    async def forget(self, run: str) -> None:
        await self._end_streams()
        if self._telling is not None:
            self._telling.cancel()  # what it still tells is of the run's samples
            await asyncio.gather(self._telling, return_exceptions=True)
        await asyncio.gather(*self._letting_go, return_exceptions=True)
        if self._asleep:
            await self._call(self._llm.wake_up())
        self._usable, self._asleep, self._pending = False, False, None
        async with self._weights_lock:
            await self._call(self._llm.pause_generation(mode="abort", clear_cache=True))
            shapes = {names[0]: self._layout.shapes[names[0]] for names in self._layout.tied}
            speculates = self._spec.speculation == "group"
            await self._call(self._llm.collective_rpc("scavenger_forget", CALL_S, (shapes, speculates)))
            await self._call(self._llm.reset_prefix_cache(reset_running_requests=True))
        self._drop_all(run)

    def _drop_all(self, run: str) -> None:
        """What this process has of the run. Numbers of requests and adapters go on: none is given twice."""
        self._host = replace(self._host, run=run)  # it is in the names of cached prefixes
        self._version, self._held = -1, []
        self._base, self._base_digest, self._adapters, self._lora = None, b"", (), None
        self._lanes.clear()
        self._lane_of.clear()
        self._ready, self._made, self._speculated = [], 0, NOT_SPECULATED
        self._work.clear()
        self._routes = {}
        self._texts.clear()
        self._news.clear()
        self._introduced.clear()

    def progress(self) -> int:
        return self._made

    def speculated(self) -> Speculated:
        return self._speculated

    async def hear(self, news: HearSiblings) -> None:
        if self._spec.speculation == "none":
            return
        self._news.append(news)
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell())

    async def _tell(self) -> None:
        """Beside the requests, none of which waits for it. A dead core is noticed by them."""
        with contextlib.suppress(EngineError):
            while self._news:
                said, over = self._named(self._news.popleft())
                await self._call(self._llm.collective_rpc("scavenger_hear", CALL_S, (said, over)))

    def _named(self, news: HearSiblings) -> tuple[list[Heard], list[str]]:
        said: list[Heard] = []
        for one in news.said:
            # A draft goes through the model before it is verified: it must be of this vocabulary.
            if one.token_ids and min(one.token_ids) >= 0 and max(one.token_ids) < self._layout.vocab_size:
                name = group_name(one.group.key, one.group.prompt)
                prompt = None if name in self._introduced else one.group.prompt
                self._introduced.add(name)
                said.append((name, prompt, one.index, one.offset, one.token_ids))
        over = [group_name(group.key, group.prompt) for group in news.over]
        self._introduced.difference_update(over)
        return said, over

    async def close(self) -> None:
        self._fail(EngineError("the engine is closed"))
        loop = asyncio.get_running_loop()
        for pidfd, pid in self._cores.items():
            loop.remove_reader(pidfd)
            os.close(pidfd)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._cores.clear()
        for stream in self._streams.values():
            stream.cancel()
        self._leaving.drop_all()
        if self._telling is not None:
            self._telling.cancel()
        shutil.rmtree(self._folder, ignore_errors=True)
        with contextlib.suppress(RuntimeError):  # closed twice
            await loop.run_in_executor(self._executor, self._shut_down)
        self._executor.shutdown(wait=False)

    def _shut_down(self) -> None:
        """vLLM's own tidying up, of processes that are dead already."""
        self._llm.shutdown(timeout=0)

    def _core_died(self, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        pid = self._cores.pop(pidfd)
        self._fail(
            EngineError(
                f"vLLM's core (process {pid}) ended by itself", "its last words are in the worker's log"
            )
        )

    def _fail(self, error: EngineError) -> None:
        if self._fault is None:
            self._fault = error
        self._faulted.set()
        self._work.set()

    async def _call(self, call: Coroutine[Any, Any, Any]) -> Any:
        """A call to the core. What it raises means that the engine cannot go on; so does the core's death, after which none is answered."""
        answer, death = asyncio.ensure_future(call), asyncio.ensure_future(self._faulted.wait())
        try:
            await asyncio.wait((answer, death), return_when=asyncio.FIRST_COMPLETED)
            if self._fault is not None:
                raise self._fault
            return await answer
        except EngineError:
            raise
        except Exception as error:
            raise _died(error) from error
        finally:
            answer.cancel()
            death.cancel()

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, function, *args)


def _gpu_nbytes() -> int:
    """Memory of one GPU as its driver says: this process computes on none, and shall take no memory there. 0 = there is none."""
    from vllm.platforms import current_platform

    return int(current_platform.get_device_total_memory()) if current_platform.is_cuda() else 0


def _died(error: BaseException) -> EngineError:
    return (
        error
        if isinstance(error, EngineError)
        else EngineError(f"vLLM failed: {describe(error)}", quoted=str(error))
    )


def _sums(answer: dict[str, Any]) -> dict[str, Sum]:
    return {name: Sum(int(value, 16), numel, finite) for name, (value, numel, finite) in answer.items()}


def _added(answers: Iterable[dict[str, Any]]) -> dict[str, Sum]:
    """Of ranks that summed a share each."""
    found: dict[str, Sum] = {}
    for answer in answers:
        for name, of in _sums(answer).items():
            found[name] = found.get(name, NOTHING) + of
    return found


def _params(request: Request) -> Any:
    """vLLM's sampling parameters of what is left of a sample. Budgets are less what is accepted; the seed is the lease's own.

    Raises `EngineError` for those that vLLM does not take.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    how, accepted = request.sampling, len(request.accepted)
    least = max(0, how.min_tokens - accepted)
    # Where nothing is scaled, cut or forbidden the sampling distribution is the model's, and one logprob is both.
    plain = how.top_p == 1 and how.top_k == 0 and least == 0 and how.temperature in (0, 1)
    try:
        return SamplingParams(
            n=1,
            temperature=how.temperature,
            top_p=how.top_p if how.temperature > 0 else 1.0,
            top_k=how.top_k if how.temperature > 0 else 0,
            seed=lease_seed(request.seed, request.key, accepted),
            max_tokens=request.max_new_tokens,
            min_tokens=min(least, request.max_new_tokens),
            stop_token_ids=list(how.stop_token_ids),
            ignore_eos=True,  # what ends a sample is the run's list, not the config's
            logprobs=0 if plain else 1,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
    except Exception as error:  # of whatever type this release of vLLM refuses them with
        raise EngineError(
            f"vLLM does not take temperature {how.temperature}, top_p {how.top_p}, top_k {how.top_k}: {describe(error)}",
            "temperature must be 0 to 2, top_p above 0",
            quoted=str(error),
        ) from error


def _delta(handle: int, answer: Any, position: int, *, greedy: bool, raw_column: bool) -> Delta | None:
    """What a chunk of vLLM's output says; None when nothing. A logprob that is not finite ends the request there."""
    ids, found = answer.token_ids, answer.logprobs
    finish = answer.finish_reason
    if finish == "abort":
        return None  # by us: no consumer is left
    if finish is not None and finish not in ("stop", "length"):
        return Delta(handle, (), (), (), error=f"vLLM ended the request: {finish}")
    if not ids:
        return Delta(handle, (), (), (), finish) if finish else None
    width = 2 if raw_column else 1
    used = found.logprobs[::width]
    raw = found.logprobs[1::2] if raw_column else used
    bad = next(
        (
            i
            for i, (x, y) in enumerate(zip(used, raw, strict=True))
            if not (math.isfinite(x) and math.isfinite(y))
        ),
        None,
    )
    if bad is not None:
        return Delta(
            handle, (), (), (), error=f"the logits at answer position {position + bad} are not finite"
        )
    if greedy:
        used = [0.0] * len(ids)  # certain of the arg max
    return Delta(handle, tuple(ids), tuple(used), tuple(raw), finish)
