"""The reference engine: torch + transformers in the worker's own process, correct first, fast enough for a CPU demo.

Owns the asyncio face of `decoder.Decoder`: one executor thread computes, the event loop never blocks; pacing. Knows no socket.

**Where a sample's tokens come from.** The draw for completion position p of a sample is the inverse CDF, in float64 and in id order,
of the model's distribution at a uniform that depends on (run seed, sample key, p) alone (`sampling.Draws`). So with equal
logits, a sample's tokens do not depend on the engine, the batch, or how often it moved.

**Rounding.** Logits are not bit-equal across batch shapes or between prefill and decode: BLAS picks kernels by shape and sums in
another order. `dtype="float64"` is the deterministic mode: everything is computed in float64 (RMSNorm too, which transformers
rounds through float32; the rotary table's float32 values are the same number for a position wherever it is computed), which
leaves differences of about 1e-15 in each step of the CDF. A draw flips only when its uniform falls into such a gap: with a
probability of about 1e-13 a token for a hundred likely tokens, so a run of 1e9 tokens has a chance of 1e-4 to see one flip.
Weights published as float32 or bfloat16 are upcast exactly. In float32 and bfloat16 the promise is distributional only.

**Temperature 0** is greedy; its sampling distribution is certain, hence its `logprobs` are 0.0. `raw_logprobs` are the model's.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

from rollout.engines import account, checksum
from rollout.engines.base import EngineHost, EngineInfo, Kv, Weight, refuse_impossible
from rollout.engines.decoder import DTYPES, Decoder
from rollout.engines.lanes import OWN
from scavenger.errors import EngineError, describe
from scavenger.protocol.messages import EngineSpec
from scavenger.protocol.worker.events import Delta, HearSiblings, Request, Speculated

P = ParamSpec("P")
T = TypeVar("T")
NAME = "reference"


async def build(spec: EngineSpec, host: EngineHost) -> ReferenceEngine:
    """Build the model in the engine's own thread, without weights. It computes on one GPU. Raises `EngineError`."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="engine")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # What a pass costs on a CPU that other processes share is the time it computed, not the time it waited for its turn.
    clock = time.perf_counter if device == "cuda" else time.thread_time
    gpu = account.of_engine(os.environ)[0] if host.sleeps else None  # it shares it with a trainer
    try:
        decoder = await asyncio.get_running_loop().run_in_executor(
            executor, lambda: Decoder(spec, device, sleeps=host.sleeps, gpu=gpu, clock=clock)
        )
    except BaseException:
        executor.shutdown(wait=False)
        raise
    return ReferenceEngine(spec, decoder, executor)


class ReferenceEngine:
    """`base.Engine` over a `Decoder`.

    With `pace` all running samples advance together, one token each, at most `pace` times a second, as in a large model's
    decode loop; requests join at the next beat.
    """

    def __init__(self, spec: EngineSpec, decoder: Decoder, executor: ThreadPoolExecutor) -> None:
        self._spec = spec
        self._decoder = decoder
        self._executor = executor
        self._beat_s = 1.0 / spec.pace if spec.pace > 0 else 0.0
        self._next_beat = 0.0
        self._live: dict[int, int] = {}  # handle -> its lane
        #: That run and leave their KV blocks, or are finished and have left them.
        self._leaves: set[int] = set()
        self._joining: list[Request] = []
        self._joining_kv: dict[int, Kv] = {}
        self._cancelled: list[int] = []
        self._heard: list[HearSiblings] = []
        self._work = asyncio.Event()
        self._iterations = 0
        self._usable = False
        self._asleep = False

    def info(self) -> EngineInfo:
        spec = self._spec
        cache = spec.max_batch * spec.context_length  # a slot for each
        return EngineInfo(
            NAME,
            spec.max_batch,
            spec.context_length,
            self._decoder.vocab_size,
            cache_tokens=cache,
            device=self._decoder.own_device,
            gpu_nbytes=self._decoder.gpu_nbytes,
        )

    async def load(self, version: int, tensors: Iterable[Weight], *, summed: bool = False) -> bytes:
        self._forget_lane(OWN)
        self._usable = False
        sums = await self._compute(self._decoder.load, tensors, summed=summed)
        self._usable = True
        return checksum.digest(sums) if sums else b""

    def borrowers(self) -> frozenset[int]:
        return self._decoder.borrowers

    async def load_beside(self, lane: int, tensors: Iterable[Weight]) -> None:
        self._forget_lane(lane)
        await self._compute(self._decoder.load_beside, lane, tensors)

    async def add_beside(self, lane: int, request: Request) -> None:
        if lane not in self._decoder.borrowers or self._asleep:
            raise EngineError("the engine is asleep" if self._asleep else "the engine holds no weights")
        self._join(request, lane)

    async def drop(self, lane: int) -> None:
        self._forget_lane(lane)
        await self._compute(self._decoder.drop_lane, lane)

    async def add(self, request: Request) -> None:
        if not self._usable or self._asleep:
            raise EngineError("the engine is asleep" if self._asleep else "the engine holds no weights")
        self._join(request, OWN)

    def _join(self, request: Request, lane: int) -> None:
        refuse_impossible(request, self._spec.context_length, self._decoder.vocab_size)
        self._live[request.handle] = lane
        if request.leaves_kv:
            self._leaves.add(request.handle)
        self._joining.append(request)
        self._work.set()

    def kv_layout(self) -> str:
        return f"{NAME} {self._spec.dtype} {'x'.join(map(str, self._decoder.kv_shape))}"

    def kv_tokens(self, tokens: int) -> int:
        return tokens

    def kv_token_nbytes(self) -> int:
        layers, heads, width = self._decoder.kv_shape
        return 2 * layers * heads * width * DTYPES[self._spec.dtype].itemsize

    async def take_kv(self, handle: int, tokens: int) -> Kv | None:
        if handle not in self._live:  # one that runs may end, and leave its blocks, before it is aborted
            if handle not in self._leaves:
                return None
            self._leaves.discard(handle)
        return await self._compute(self._decoder.take_kv, handle, tokens)

    async def add_with_kv(self, request: Request, kv: Kv) -> None:
        await self.add(request)
        self._joining_kv[request.handle] = kv

    async def abort(self, handles: Iterable[int]) -> None:
        handles = frozenset(handles)
        gone = [handle for handle in handles if self._live.pop(handle, None) is not None]
        left = (self._leaves & handles).difference(gone)
        self._leaves -= handles
        self._joining = [r for r in self._joining if r.handle not in gone]
        self._cancelled += gone
        if not self._live:
            self._work.clear()
        if left:
            await self._compute(self._decoder.drop_left, left)

    async def next(self) -> list[Delta]:
        while True:
            await self._work.wait()
            if self._beat_s:
                await asyncio.sleep(max(0.0, self._next_beat - time.monotonic()))
                if not self._work.is_set():
                    continue
                self._next_beat = time.monotonic() + self._beat_s
            joining, self._joining = self._joining, []
            cancelled, self._cancelled = self._cancelled, []
            heard, self._heard = self._heard, []
            with_kv, self._joining_kv = self._joining_kv, {}
            lanes = {
                one.handle: self._live[one.handle]
                for one in joining
                if self._live.get(one.handle, OWN) != OWN
            }
            deltas = await self._compute(self._decoder.step, joining, cancelled, heard, with_kv, lanes)
            self._iterations += 1
            fresh = [d for d in deltas if d.handle in self._live]
            for delta in fresh:
                if delta.finish or delta.error:
                    del self._live[delta.handle]
            self._leaves.difference_update(d.handle for d in fresh if d.error)
            if not self._live:
                self._work.clear()
            if fresh:
                return fresh

    async def sleep(self) -> None:
        self._forget_all()
        self._asleep = True
        await self._compute(self._decoder.offload)

    async def wake(self) -> None:
        await self._compute(self._decoder.restore)
        self._asleep = False

    async def bytes_held(self) -> Sequence[int]:
        return [await self._compute(self._decoder.bytes_held)]

    def progress(self) -> int:
        return self._iterations

    def speculated(self) -> Speculated:
        return self._decoder.speculated

    async def hear(self, news: HearSiblings) -> None:
        if self._spec.speculation != "none":
            self._heard.append(news)

    async def forget(self, run: str) -> None:
        self._forget_all()
        self._usable = False
        self._heard.clear()
        await self._compute(self._decoder.forget)
        self._cancelled.clear()  # their rows are gone, and another run's requests may get the same numbers
        self._next_beat, self._iterations, self._asleep = 0.0, 0, False

    async def close(self) -> None:
        self._forget_all()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _forget_all(self) -> None:
        self._cancelled += self._live
        self._live.clear()
        self._leaves.clear()
        self._joining.clear()
        self._joining_kv.clear()
        self._work.clear()

    def _forget_lane(self, lane: int) -> None:
        gone = {handle for handle, of in self._live.items() if of == lane}
        self._live = {handle: of for handle, of in self._live.items() if of != lane}
        self._joining = [request for request in self._joining if request.handle not in gone]
        self._cancelled += gone
        for handle in gone:
            self._joining_kv.pop(handle, None)
        if lane == OWN:
            self._leaves.clear()
        if not self._live:
            self._work.clear()

    async def _compute(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run in the engine's thread. What torch or transformers raise there, whatever it is, means that the engine cannot go on."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"the engine failed: {describe(error)}", quoted=str(error)) from error
