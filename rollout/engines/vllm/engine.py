"""vLLM in the worker's process: its asynchronous engine behind `base.Engine`.

Owns one `AsyncLLM` (whose core is a process of its own), one task a request, and the order in which weights are replaced. Knows no daemon.
`setup` has vLLM's settings and the reason for each, `core` the calls to its process, `worker` what runs there, `sampling` what is vLLM's
and what is ours of a request, `blocks` which KV blocks may be given out, `drafts` what siblings elsewhere wrote; docs/engines.md what an
admin needs.

vLLM is imported by `build`, in the engine's own thread, which lives as long as the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import structlog
import torch

from rollout.engines import account, checksum, merging, published, slices
from rollout.engines.base import EngineHost, EngineInfo, Kv, Weight, refuse_impossible
from rollout.engines.checksum import NOTHING, Sum
from rollout.engines.merging import Merged
from rollout.engines.vllm import setup
from rollout.engines.vllm.blocks import KvBlocks
from rollout.engines.vllm.core import Core, failed
from rollout.engines.vllm.drafts import SiblingDrafts
from rollout.engines.vllm.proposer import request_name
from rollout.engines.vllm.sampling import delta_of, params_of
from rollout.engines.vllm.setup import MemoryFiles
from rollout.engines.vllm.worker import Routed
from scavenger.errors import SUSPECT_MEMORY, EngineError, WeightsDiffer, describe
from scavenger.protocol.messages import EngineSpec
from scavenger.protocol.worker.events import Delta, HearSiblings, Request, Speculated

NAME = "vllm"
OWN = 0  # the lane of the run whose engine it is
BEHIND = 1 << 30  # priority of other runs' requests: those of the run whose engine it is come first
_log = structlog.get_logger(__name__)


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
        self._streams: dict[int, asyncio.Task[None]] = {}
        self._ready: list[Delta] = []
        self._work = asyncio.Event()
        self._core = Core(llm, self._work.set)
        self._blocks = KvBlocks(self._core)
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
        self._drafts = SiblingDrafts(self._core, layout.vocab_size, on=spec.speculation != "none")

    async def prepare(self) -> None:
        """Watch the core, and put our hooks into it."""
        self._core.watch()
        spec = self._spec
        await self._core.rpc("scavenger_hook", True, spec.pace, spec.routing, spec.speculation == "group")
        if setup.moves_kv(spec, self._host):
            await self._blocks.ask_shape()
        await self._divide()
        if self._gpus[0].counts:
            self._taken = await self._core.rpc("scavenger_bytes_taken")
            self._hold(self._taken)

    async def _divide(self) -> None:
        """Ask each rank which parts of the published tensors it keeps; what it keeps is all that it reads, and what it answers for."""
        shapes = {names[0]: self._layout.shapes[names[0]] for names in self._layout.tied}
        kept = await self._core.rpc("scavenger_probe", shapes)
        self._lacking = sorted(name for name in shapes if not any(name in one for one in kept))
        places = {name: [one.get(name, []) for one in kept] for name in shapes}
        self._copies = {name: slices.copies(shape, places[name]) for name, shape in shapes.items()}
        of = {name: slices.shares(shape, places[name]) for name, shape in shapes.items()}
        shares = [{name: each[rank] for name, each in of.items()} for rank in range(len(kept))]
        await self._core.rpc("scavenger_share", shares)

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
                        await self._core.resume()
                    raise
                if self._spec.keep_cache or self._lanes:  # no request finds what is cached of older weights
                    await self._core.resume()
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
            scale, numbers = adapters[0].scale, self._numbers()
            taken = sum(
                await self._core.rpc("scavenger_adapt", memory.paths, given, scale, self._loras, numbers)
            )
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
        await self._pause_to_load()
        with await self._in_thread(MemoryFiles, views) as memory:
            said = await self._core.rpc("scavenger_load", memory.paths, memory.table, memory.merges, version)
        replies = [LoadReply(*reply) for reply in said]
        self._verify(version, replies)
        self._version, self._held = version, [reply.kept for reply in replies]
        sums = _added(reply.published for reply in replies)
        return checksum.digest({names[name]: value for name, value in sums.items()})

    async def _pause_to_load(self) -> None:
        if self._lanes:  # other runs' requests go on behind it
            await self._core.pause("keep", clear_cache=False)
            return
        await self._core.pause("abort", clear_cache=not self._spec.keep_cache)

    async def _resume_with_clean_cache(self) -> None:
        """Zero the cache, forget its prefixes, let requests run. What runs is computed again, in other blocks: those of before, which are
        zeroed, are given out no more."""
        self._blocks.wiped()
        await self._core.rpc("scavenger_wipe")
        await self._core.call(self._llm.reset_prefix_cache(reset_running_requests=True))
        await self._core.resume()

    async def _cleanse(self, name: str) -> None:
        """After a request met NaN, which ends it: the next request that has its cache blocks would meet it too, so they are zeroed before
        any is computed. All others are computed again, nothing else of them changes. One wipe serves all that met NaN before it began."""
        self._met_nan.add(name)
        async with self._weights_lock:
            if name not in self._met_nan:
                return
            await self._core.pause("keep", clear_cache=False)
            ended, self._met_nan = sorted(self._met_nan), set()
            await self._core.call(self._llm.abort(ended))
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
                await self._core.pause("keep", clear_cache=False)
                number = await self._beside_base(lane, adapters)
                self._serial += 1
                self._lanes[lane] = LentLane(f"lent-{self._serial}", number, base, self._base_digest)
            except BaseException:  # it does not fit, or the call was cancelled: nothing of it stays
                if self._core.fault is None:
                    await self._drop_others()
                raise
            finally:  # samples of all other lanes wait for this
                if self._core.fault is None:
                    await self._core.resume()

    async def _empty(self, lane: int) -> LentLane | None:
        """End the lane's requests, and take its weights from it; returns what it had. Where requests of it ran, nothing is computed from
        before they end until their cache blocks are zeroed: the next request that has them would read what this run left there."""
        if not self._streams_of(lane):
            return self._lanes.pop(lane, None)
        await self._core.pause("keep", clear_cache=False)
        try:
            before = self._lanes.pop(lane, None)  # with the requests: none of it begins in between
            await self._end_streams(lane)
        finally:  # samples of all other lanes wait for this
            if self._core.fault is None:
                await self._resume_with_clean_cache()
        return before

    async def _drop_others(self) -> None:
        """Adapters that no request may name."""
        await self._core.rpc("scavenger_drop_adapters", self._numbers())

    async def add_beside(self, lane: int, request: Request) -> None:
        if lane not in self._lanes:
            raise EngineError("the engine holds no weights")
        self._lane_of[request.handle] = lane
        try:
            self._begin(request, None)
        except BaseException:  # refused
            self._lane_of.pop(request.handle, None)
            raise

    async def drop(self, lane: int) -> None:
        async with self._weights_lock:  # behind a load of it that is under way
            if self._core.fault is not None:
                self._lanes.pop(lane, None)
                await self._end_streams(lane)
                return
            await self._core.pause("keep", clear_cache=False)
            try:
                self._lanes.pop(lane, None)
                await self._end_streams(lane)
                await self._drop_others()
            finally:  # samples of all other lanes wait for this
                if self._core.fault is None:
                    await self._resume_with_clean_cache()

    # ------------------------------------------------------------ requests

    def kv_layout(self) -> str:
        return self._blocks.layout

    def kv_tokens(self, tokens: int) -> int:
        return self._blocks.whole(tokens)

    def kv_token_nbytes(self) -> int:
        return self._blocks.token_nbytes

    async def take_kv(self, handle: int, tokens: int) -> Kv | None:
        stream = self._streams.get(handle)
        return await self._blocks.take(handle, None if stream is None else stream.get_name(), tokens)

    async def add_with_kv(self, request: Request, kv: Kv) -> None:
        self._begin(request, kv)

    async def add(self, request: Request) -> None:
        self._begin(request, None)

    def _begin(self, request: Request, brings: Kv | None) -> None:
        # What another run has in its lane is there while this run's own version is replaced.
        if self._asleep or not (self._usable or request.handle in self._lane_of):
            raise EngineError("the engine is asleep" if self._asleep else "the engine holds no weights")
        refuse_impossible(request, self._spec.context_length, self._layout.vocab_size)
        # What vLLM does not take must be refused here: from the stream it would end the engine, with every lease on it.
        params = params_of(request)
        blocks = self._blocks.begins(request, brings, leaves=request.handle not in self._lane_of)
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
        self._blocks.drop(gone)
        self._ready = [delta for delta in self._ready if delta.handle not in gone]
        if not self._ready and self._core.fault is None:
            self._work.clear()

    async def next(self) -> list[Delta]:
        while True:
            if self._core.fault is not None:
                raise self._core.fault
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
            delta = delta_of(
                request.handle, output.outputs[0], position, greedy=greedy, raw_column=raw_column
            )
            if delta is None:
                continue
            self._blocks.were_read(request.handle)
            if delta.error is not None:
                self._blocks.spoiled(request.handle)  # nor until then: another engine would meet NaN too
                try:
                    await asyncio.shield(self._cleanse(name))
                except asyncio.CancelledError:
                    await self._llm.abort(name)  # who ends it drops what it is computed with next
                    raise
            if self._spec.routing and delta.token_ids:
                given = len(request.prompt) + position  # each token's row is of the position before it
                delta = replace(delta, routing=await self._routed(name, given - 1, len(delta.token_ids)))
            position += len(delta.token_ids)
            self._blocks.wrote(request.handle, delta.token_ids)
            if delta.error or delta.finish:
                self._blocks.finished(request.handle)
            self._made += 1
            self._ready.append(delta)
            self._work.set()
            if delta.error or delta.finish:
                await self._drafts.ask()
                return

    def _salt(self, request: Request) -> str:
        """Names entries of the prefix cache: those of this version, or of samples that were begun with a version, whatever made them. In
        another history of the ledger the same numbers are other weights; those of another run have a name that no one else has."""
        if (lane := self._lanes.get(self._lane_of.get(request.handle, OWN))) is not None:
            return lane.name
        where = f"{self._host.run}/{request.history}"
        begun = request.begun_version
        return f"{where}/{self._version}" if begun < 0 else f"{where}/begun/{begun}"

    async def _routed(self, name: str, first: int, count: int) -> bytes:
        """Which experts so many tokens of a request went to, from a position on. Raises `EngineError` where vLLM does not say."""
        wanted = range(first, first + count)
        async with self._routing_lock:
            if not all(position in self._routes.get(name, {}) for position in wanted):
                (found, *_) = await self._core.rpc("scavenger_routing")
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
        self._blocks.ended(handle, aborted=task.cancelled())
        self._routes.pop(task.get_name(), None)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._core.fail(failed(error))

    async def _end_streams(self, lane: int | None = None) -> None:
        """Of this lane; None: of all. Tokens of a lane's requests that have ended may still be fetched."""
        streams = self._streams_of(lane)
        await self.abort(streams)
        await asyncio.gather(*streams.values(), return_exceptions=True)
        if lane in (None, OWN):
            self._blocks.drop_left()  # of the run's own, finished ones among them: no other lane's are left
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
            await self._core.call(self._llm.sleep(level=1))
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
            await self._core.call(self._llm.wake_up())
            await self._find_again()
            if self._lora is not None:
                await self._adapt(self._version, self._adapters)  # from host memory: they were elsewhere too
        else:
            # First the weights alone: the cache's memory is not needed while they are replaced.
            await self._core.call(self._llm.wake_up(["weights"]))
            version, views, names, due = pending
            if await self._put_in(version, views, names) != due and due:
                raise EngineError(
                    f"version {version} was merged once more, and came out otherwise",
                    "suspect the node's memory",
                )
            await self._core.call(self._llm.wake_up(["kv_cache"]))
        await self._resume_with_clean_cache()  # what the trainer left in that memory is in the cache's now
        self._asleep = False

    async def _find_again(self) -> None:
        """Raises `WeightsDiffer` unless each rank holds what it did when its version was verified: it was elsewhere meanwhile."""
        if not self._held:
            return  # nothing was loaded, and nothing is generated
        found = await self._core.rpc("scavenger_held")
        if not all(
            checksum.same(_sums(now), _sums(then)) for now, then in zip(found, self._held, strict=True)
        ):
            cause = f"version {self._version} did not come out of sleep as it went into it"
            raise WeightsDiffer(cause, f"the engine is started anew; {SUSPECT_MEMORY}")

    async def bytes_held(self) -> Sequence[int]:
        if self._gpus[0].counts:
            return [gpu.own() for gpu in self._gpus]
        found: list[int] = await self._core.rpc("scavenger_bytes_held")
        return found

    async def forget(self, run: str) -> None:
        await self._end_streams()
        await self._drafts.stop()  # what is still to be told is of the run's samples
        await self._blocks.settled()
        if self._asleep:
            await self._core.call(self._llm.wake_up())
        self._usable, self._asleep, self._pending = False, False, None
        async with self._weights_lock:
            await self._core.pause("abort", clear_cache=True)
            shapes = {names[0]: self._layout.shapes[names[0]] for names in self._layout.tied}
            speculates = self._spec.speculation == "group"
            await self._core.rpc("scavenger_forget", shapes, speculates)
            await self._core.call(self._llm.reset_prefix_cache(reset_running_requests=True))
        self._drop_all(run)

    def _drop_all(self, run: str) -> None:
        """What this process has of the run. Numbers of requests and adapters go on: none is given twice."""
        self._host = replace(self._host, run=run)  # it is in the names of cached prefixes
        self._version, self._held = -1, []
        self._base, self._base_digest, self._adapters, self._lora = None, b"", (), None
        self._lanes.clear()
        self._lane_of.clear()
        self._ready, self._made = [], 0
        self._drafts.forget()
        self._work.clear()
        self._routes = {}
        self._blocks.wiped()

    def progress(self) -> int:
        return self._made

    def speculated(self) -> Speculated:
        return self._drafts.speculated

    async def hear(self, news: HearSiblings) -> None:
        self._drafts.hear(news)

    async def close(self) -> None:
        self._core.fail(EngineError("the engine is closed"))
        self._core.kill()
        for stream in self._streams.values():
            stream.cancel()
        self._blocks.drop_left()
        self._drafts.cancel()
        shutil.rmtree(self._folder, ignore_errors=True)
        with contextlib.suppress(RuntimeError):  # closed twice
            await asyncio.get_running_loop().run_in_executor(self._executor, self._shut_down)
        self._executor.shutdown(wait=False)

    def _shut_down(self) -> None:
        """vLLM's own tidying up, of processes that are dead already."""
        self._llm.shutdown(timeout=0)

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, function, *args)


def _gpu_nbytes() -> int:
    """Memory of one GPU as its driver says: this process computes on none, and shall take no memory there. 0 = there is none."""
    from vllm.platforms import current_platform

    return int(current_platform.get_device_total_memory()) if current_platform.is_cuda() else 0


def _sums(answer: dict[str, Any]) -> dict[str, Sum]:
    return {name: Sum(int(value, 16), numel, finite) for name, (value, numel, finite) in answer.items()}


def _added(answers: Iterable[dict[str, Any]]) -> dict[str, Sum]:
    """Of ranks that summed a share each."""
    found: dict[str, Sum] = {}
    for answer in answers:
        for name, of in _sums(answer).items():
            found[name] = found.get(name, NOTHING) + of
    return found
