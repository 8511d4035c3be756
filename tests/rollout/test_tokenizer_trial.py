"""A tokenizer.json that a run publishes ends no engine: it is opened in a process of its own first, and its panics fail samples."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from rollout.engines import stopping, tokenizer_trial
from rollout.engines.base import EngineInfo, Weight
from rollout.engines.stopping import Matcher, Stopping
from scavenger.errors import EngineError
from scavenger.protocol.messages import SampleKey, Sampling
from scavenger.protocol.worker.events import Delta, Request
from scavenger.weights import files
from scavenger.weights.manifest import TensorView

SMALL = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}


def published(model: dict[str, Any] = SMALL, **parts: Any) -> bytes:
    empty = dict.fromkeys(
        ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    )
    return json.dumps({"version": "1.0", "added_tokens": [], **empty, "model": model} | parts).encode()


def unigram(*tokens: str) -> dict[str, Any]:
    vocab = [["<unk>", 0.0], *([token, -1.0] for token in tokens)]
    return {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": False}


def view(data: bytes) -> TensorView:
    return TensorView(files.TOKENIZER, files.DTYPE, (len(data),), memoryview(data))


STRIP = published(decoder={"type": "Strip", "content": "a", "start": 2**63, "stop": 2**63})
# As many tokens before it, and longer, as are tried; its regular expression takes exponentially long for it.
ODD = "a" * 30 + "!"
LONGER = [f"{n:02}" + "b" * 40 for n in range(tokenizer_trial.TRIED)]
SHORTER = [f"{n:02}" for n in range(tokenizer_trial.TRIED)]
REGEX = published(
    {
        "type": "WordLevel",
        "vocab": {token: n for n, token in enumerate([*SHORTER, ODD, *LONGER])},
        "unk_token": "00",
    },
    decoder={"type": "Replace", "pattern": {"Regex": "^(a|a|aa)+$"}, "content": "x"},
)


class Inner:
    """An engine that answers with the given deltas."""

    def __init__(self, *deltas: Delta) -> None:
        self.deltas = [*deltas]
        self.loaded: list[int] = []
        self.aborted: list[int] = []

    def info(self) -> EngineInfo:
        return EngineInfo("inner", 1, 99, 99)

    async def add(self, request: Request) -> None:
        pass

    async def next(self) -> list[Delta]:
        deltas, self.deltas = self.deltas, []
        return deltas

    async def abort(self, handles: Iterable[int]) -> None:
        self.aborted += handles

    async def load(self, version: int, tensors: Iterable[Weight], *, summed: bool = False) -> bytes:
        self.loaded.append(version)
        return b""


def engine_of(inner: Inner) -> Stopping:
    return Stopping(inner)  # type: ignore[arg-type]


def request(handle: int, accepted: tuple[int, ...] = ()) -> Request:
    return Request(handle, (1,), accepted, 9, Sampling(9, stop=("zz",)), 0, SampleKey("train", 1, 1, handle))


CHARSMAP = base64.b64encode(b"\xff\xff\xff\xff" + bytes(10)).decode()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (STRIP, "ended with exit code 1: PanicException"),
        (published(unigram("a" * 5000)), "ended with exit code 1: ValueError: a token has 5,000 characters"),
        (published(unigram("a" * 200_000)), "ended with signal 11"),
        (
            published(normalizer={"type": "Precompiled", "precompiled_charsmap": CHARSMAP}),
            "ended with signal 6",
        ),
    ],
    ids=["panic", "long", "stack", "claims-8-GiB"],
)
def test_a_tokenizer_that_would_end_the_engine_is_refused_with_its_version(data: bytes, words: str) -> None:
    inner = Inner()
    engine = engine_of(inner)
    with pytest.raises(EngineError, match=r"is no tokenizer here: a process that opened it") as refused:
        asyncio.run(engine.load(1, [view(data)]))
    assert words in refused.value.log_text
    assert not inner.loaded
    asyncio.run(engine.load(2, [view(published())]))
    assert inner.loaded == [2], "the engine lives, and takes the next"


def test_a_tokenizer_that_takes_too_much_memory_is_refused() -> None:
    numbers = random.Random(1)
    long = [f"{numbers.getrandbits(32):08x}" * 500 for _ in range(1000)]
    with pytest.raises(EngineError, match="ended with signal 6"):
        asyncio.run(engine_of(Inner()).load(1, [view(published(unigram(*long)))]))


def test_a_tokenizer_that_takes_too_long_is_refused_and_its_process_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(tokenizer_trial, "__file__", str(script))
    monkeypatch.setattr(tokenizer_trial, "WALL_S", 0.1)
    with pytest.raises(EngineError, match="ended with signal 9") as refused:
        asyncio.run(engine_of(Inner()).load(1, [view(published())]))
    assert "takes too long" in refused.value.log_text


def test_a_tokenizer_is_tried_once_for_versions_that_bring_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[bytes] = []
    real = stopping._try_out

    async def counted(data: bytes) -> None:
        tried.append(data)
        await real(data)

    monkeypatch.setattr(stopping, "_try_out", counted)
    engine = engine_of(Inner())
    first, other = published(), published(decoder={"type": "Fuse"})

    async def main() -> None:
        for version, data in enumerate((first, first, other), 1):
            await engine.load(version, [view(data)])

    asyncio.run(main())
    assert tried == [first, other]


def test_a_panic_while_a_completion_is_decoded_is_an_error_of_the_engine() -> None:
    with pytest.raises(EngineError, match="cannot decode this completion"):
        Matcher(Tokenizer.from_buffer(STRIP), ["zz"], 0, ()).feed(0)


def test_a_completion_that_the_tokenizer_cannot_decode_fails_alone() -> None:
    odd, plain = len(SHORTER), 0
    deltas = [Delta(n, (token,), (-1.0,), (-1.0,)) for n, token in ((1, odd), (2, plain), (1, plain))]
    inner = Inner(*deltas)
    engine = engine_of(inner)

    async def main() -> list[Delta]:
        await engine.load(1, [view(REGEX)])
        await engine.add(request(1))
        await engine.add(request(2))
        with pytest.raises(EngineError, match="cannot decode this completion"):
            await engine.add(request(3, accepted=(odd,)))
        return await engine.next()

    failed, went_on = asyncio.run(main())
    assert (failed.handle, failed.token_ids) == (1, ())
    assert "cannot decode this completion" in (failed.error or "")
    assert "Onig" not in (failed.error or ""), "foreign words stay in the process"
    assert went_on == deltas[1]
    assert inner.aborted == [1]
