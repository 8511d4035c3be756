"""Texts that end a sample, matched over the whole sample by the worker: an engine sees only what was generated under one lease.

Owns an engine around another one, and the matcher. Only completions of runs with `sampling.stop` are looked at; their tokenizer comes with
the weights (`scavenger.weights.files`), and the engine within gets the weights alone. Reads no file. Knows no daemon.

The tokenizer is the run's word, and native code parses it: it is opened in a process of its own first (`tokenizer_trial`). One that fails
there is refused with its version, which stops the run; an engine that died of it would blame its node.

Boundary: an engine around any engine, and a pure matcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from rollout.engines import tokenizer_trial
from rollout.engines.around import Around
from rollout.engines.base import Engine, Kv, Lends, MovesKv, Weight
from scavenger.errors import EngineError, describe
from scavenger.protocol.worker.events import Delta, Request
from scavenger.weights import files

#: Tokenizers that are opened for one borrower in a loan. A run has one.
MOST_BORROWED = 2
_REMEDY = "run engines and trainer with one release of tokenizers, or use sampling.stop_token_ids"
_NO_TOKENIZER = "the version's tokenizer.json, which sampling.stop needs, is no tokenizer here"


def _of_library(error: BaseException) -> bool:
    """Whether the tokenizers library raised it: a panic of its native code is no `Exception`."""
    return isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"


@contextlib.contextmanager
def _library(cause: str) -> Iterator[None]:
    """Every error of the library becomes `EngineError`."""
    try:
        yield
    except BaseException as error:
        if not _of_library(error):
            raise
        raise EngineError(cause, _REMEDY, quoted=str(error)) from error


async def _try_out(data: bytes, cpu_s: int) -> None:
    """Open the tokenizer in a process under limits, one of them `cpu_s` CPU seconds. Raises `EngineError` where that does not end well."""
    script = Path(tokenizer_trial.__file__)
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        str(script),
        str(cpu_s),
        env=environment,
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    said = b""
    try:
        async with asyncio.timeout(2 * tokenizer_trial.WALL_S):  # it ends itself sooner
            with contextlib.suppress(ConnectionError):  # it has ended: its exit code says how
                process.stdin.write(data)
                await process.stdin.drain()
            process.stdin.close()
            said = await process.stdout.read(2000)
            await process.wait()
    except TimeoutError:
        said = b"it takes too long"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0 or said != tokenizer_trial.PASSED:
        code = process.returncode or 0
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise EngineError(
            f"{_NO_TOKENIZER}: a process that opened it ended with {how}",
            "publish the model's own tokenizer.json; " + _REMEDY,
            quoted=said.decode(errors="replace"),
        )


class Matcher:
    """Finds the first stop text in one sample's completion, token by token; special tokens have no text.

    `accepted` tokens were searched under earlier leases. Of them only the end counts: as many as can hold the beginning of a stop text.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str], least: int, accepted: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._least = least
        self._longest = max(map(len, stops))
        self._stream = DecodeStream(skip_special_tokens=True)
        self._text = ""
        tail = accepted[-(4 * self._longest + 16) :]
        self.length = len(accepted) - len(tail)
        self.found = False
        for token in tail:
            self.found = self.feed(
                token
            )  # the last lease's: it may have ended the sample, and its end was lost

    def feed(self, token: int) -> bool:
        """The next token; whether it completes a stop text. Raises `EngineError` where the tokenizer fails."""
        self.length += 1
        try:
            piece = self._stream.step(self._tokenizer, token)
        except BaseException as error:
            if not _of_library(error):
                raise
            raise EngineError(
                "the tokenizer that came with the weights cannot decode this completion, which sampling.stop needs",
                _REMEDY,
                quoted=str(error),
            ) from error
        if not piece:
            return False
        text = self._text + piece
        # No whole stop text stays in the buffer, lest one that came before `least` tokens be found later.
        self._text = text[-(self._longest - 1) :] if self._longest > 1 else ""
        return self.length >= self._least and any(stop in text for stop in self._stops)


class Stopping(Around):
    """`base.Engine` that ends samples at their stop texts. The token that completes one is the sample's last. `borrowed`: it is of a run
    that borrows slots. To open a tokenizer holds up all that is in this process: then few are opened, and none that takes long."""

    def __init__(self, engine: Engine, *, borrowed: bool = False) -> None:
        super().__init__(engine)
        self._openable = MOST_BORROWED if borrowed else math.inf
        self._open_cpu_s = tokenizer_trial.BORROWED_CPU_S if borrowed else tokenizer_trial.CPU_S
        self._tokenizer: Tokenizer | None = None
        self._digest = ""  # of the tokenizer's bytes
        self._matchers: dict[int, Matcher] = {}

    async def add(self, request: Request) -> None:
        with self._matched(request):
            await self._engine.add(request)

    @contextlib.contextmanager
    def _matched(self, request: Request) -> Iterator[None]:
        """A request that is taken within is matched from now on."""
        matcher = self._matcher(request) if request.sampling.stop else None
        yield
        if matcher is not None:
            self._matchers[request.handle] = matcher

    def _matcher(self, request: Request) -> Matcher:
        if self._tokenizer is None:
            raise EngineError(
                "the weights came without the tokenizer.json, which sampling.stop needs",
                f"publish its bytes as the tensor {files.TOKENIZER!r} of each version, or use sampling.stop_token_ids",
            )
        how = request.sampling
        return Matcher(self._tokenizer, how.stop, how.min_tokens, request.accepted)

    async def next(self) -> list[Delta]:
        while True:
            deltas = await self._engine.next()
            if not self._matchers:
                return deltas
            ended: dict[int, int] = {}
            kept = [self._cut(delta, ended) for delta in deltas if delta.handle not in ended]
            if ended:
                await self._ends(ended)
                await self._engine.abort(ended)
            if kept:
                return kept

    async def _ends(self, ended: Mapping[int, int]) -> None:
        """These are about to be aborted. The length of each completion by handle; 0: it failed."""

    def _cut(self, delta: Delta, ended: dict[int, int]) -> Delta:
        matcher = self._matchers.get(delta.handle)
        if matcher is None:
            return delta
        try:
            last = (
                0
                if matcher.found
                else next((n for n, token in enumerate(delta.token_ids, 1) if matcher.feed(token)), None)
            )
        except EngineError as error:  # the sample fails, and the engine goes on
            del self._matchers[delta.handle]
            ended[delta.handle] = 0
            return Delta(delta.handle, (), (), (), error=describe(error))
        if last is None or delta.error is not None:
            if delta.finish or delta.error:
                del self._matchers[delta.handle]
            return delta
        del self._matchers[delta.handle]
        ended[delta.handle] = matcher.length
        return Delta(
            delta.handle,
            delta.token_ids[:last],
            delta.logprobs[:last],
            delta.raw_logprobs[:last],
            "stop",
            routing=delta.routing[: last * len(delta.routing) // len(delta.token_ids)],
        )

    async def abort(self, handles: Iterable[int]) -> None:
        gone = tuple(handles)
        for handle in gone:
            self._matchers.pop(handle, None)
        await self._engine.abort(gone)

    async def load(self, version: int, tensors: Iterable[Weight], *, summed: bool = False) -> bytes:
        self._matchers.clear()
        weights = [*tensors]
        found = [one for one in weights if files.is_file(one.name)]
        await self._take_tokenizer(found[0] if found else None)
        if found:
            weights = [one for one in weights if not files.is_file(one.name)]
        return await self._engine.load(version, weights, summed=summed)

    async def _take_tokenizer(self, published: Weight | None) -> None:
        """Once for all versions that bring the same: it is seconds of work for a large one."""
        if published is not None and not 0 < published.nbytes <= files.MAX_TOKENIZER_NBYTES:
            raise EngineError(
                f"the version's tokenizer.json has {published.nbytes:,} bytes, not 1 to {files.MAX_TOKENIZER_NBYTES:,}",
                "publish the model's own tokenizer.json",
            )
        data = published.data if published is not None else memoryview(b"")
        digest = files.digest(data)
        if digest == self._digest:
            return
        self._tokenizer, self._digest = None, ""
        if published is not None:
            if self._openable <= 0:
                raise EngineError(
                    "the version brings another tokenizer.json than one before, and this engine opens no more of them in a loan",
                    "publish the same tokenizer.json with each version",
                )
            self._openable -= 1
            copied = bytes(data)
            await _try_out(copied, self._open_cpu_s)
            with _library(_NO_TOKENIZER):
                self._tokenizer = Tokenizer.from_buffer(copied)
        self._digest = digest

    async def sleep(self) -> None:
        self._matchers.clear()
        await self._engine.sleep()

    async def forget(self, run: str) -> None:
        self._matchers.clear()
        self._tokenizer, self._digest = None, ""
        await self._engine.forget(run)

    async def close(self) -> None:
        await self._engine.close()


class StoppingMover(Stopping):
    """The same around an engine that moves KV blocks (`base.MovesKv`)."""

    def __init__(self, engine: Engine, moves: MovesKv) -> None:
        super().__init__(engine)
        self._moves = moves
        self._leaving: dict[int, int] = {}  # that are matched and leave their blocks: tokens of their prompts
        self._left: dict[int, Kv] = {}  # of those that a stop text ended, until they are taken

    def kv_layout(self) -> str:
        return self._moves.kv_layout()

    def kv_tokens(self, tokens: int) -> int:
        return self._moves.kv_tokens(tokens)

    def kv_token_nbytes(self) -> int:
        return self._moves.kv_token_nbytes()

    async def take_kv(self, handle: int, tokens: int) -> Kv | None:
        self._leaving.pop(handle, None)
        left = self._left.pop(handle, None)
        if left is not None:
            return left if len(left.tokens) == self.kv_tokens(tokens) else None
        return await self._moves.take_kv(handle, tokens)

    async def add_with_kv(self, request: Request, kv: Kv) -> None:
        with self._matched(request):
            await self._moves.add_with_kv(request, kv)

    @contextlib.contextmanager
    def _matched(self, request: Request) -> Iterator[None]:
        with super()._matched(request):
            yield
        if request.leaves_kv and request.handle in self._matchers:
            self._leaving[request.handle] = len(request.prompt)

    async def _ends(self, ended: Mapping[int, int]) -> None:
        for handle, length in ended.items():
            prompt = self._leaving.get(handle, 0)
            found = await self._moves.take_kv(handle, prompt + length - 1) if prompt and length else None
            # It may have been aborted meanwhile, or other weights may have been loaded.
            wanted = self._leaving.pop(handle, None) is not None
            if found is not None and wanted:
                self._left[handle] = found

    async def abort(self, handles: Iterable[int]) -> None:
        gone = tuple(handles)
        for handle in gone:
            self._leaving.pop(handle, None)
            self._left.pop(handle, None)
        await super().abort(gone)

    async def load(self, version: int, tensors: Iterable[Weight], *, summed: bool = False) -> bytes:
        self._forget_left()
        return await super().load(version, tensors, summed=summed)

    async def sleep(self) -> None:
        self._forget_left()
        await super().sleep()

    async def forget(self, run: str) -> None:
        self._forget_left()
        await super().forget(run)

    def _forget_left(self) -> None:
        self._leaving.clear()
        self._left.clear()


class StoppingLender(Stopping):
    """The same around an engine that lends slots (`base.Lends`). A borrower's samples end by the borrower's own texts and tokenizer."""

    def __init__(self, engine: Engine, lends: Lends) -> None:
        super().__init__(engine)
        self._lends = lends

    def borrow(self, slots: int) -> Engine:
        return Stopping(self._lends.borrow(slots), borrowed=True)

    def recall(self) -> None:
        self._lends.recall()
