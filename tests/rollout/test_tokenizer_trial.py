"""A tokenizer.json that a run publishes ends no engine: it is opened in a process of its own first, and its panics fail samples."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from rollout.engines import stopping, tokenizer_trial
from rollout.engines.base import EngineInfo, Weight
from rollout.engines.stopping import Matcher, Stopping, StoppingLender
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


def in_turn(*decoders: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "decoders": [*decoders]}


def view(data: bytes) -> TensorView:
    return TensorView(files.TOKENIZER, files.DTYPE, (len(data),), memoryview(data))


STRIP = published(decoder={"type": "Strip", "content": "a", "start": 2**63, "stop": 2**63})
REGEX = {"type": "Replace", "pattern": {"Regex": "(x|xa)(a|a)*y"}, "content": ""}
LONGER = {"type": "Replace", "pattern": {"String": "x"}, "content": "xx"}
SPACES = {"type": "BPEDecoder", "suffix": ""}
# What Llama's has: bytes, and a character for each that is a space.
PLAIN: list[dict[str, Any]] = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
]
# Each token alone is a text; "a" and "bb" together are one that does not begin with "a".
CHANGES = published(
    {"type": "WordLevel", "vocab": {"a": 0, "bb": 1}, "unk_token": "a"},
    decoder=in_turn({"type": "Fuse"}, {"type": "Replace", "pattern": {"String": "ab"}, "content": "z"}),
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
        (published(decoder=REGEX), "a decoder searches with a regular expression"),
        (published(decoder=in_turn(in_turn(LONGER))), "a decoder replaces a text by a longer one"),
        (published(decoder=in_turn(SPACES)), "a decoder BPEDecoder puts a space before every character"),
        (published(decoder=in_turn(*[{"type": "Fuse"}] * 17)), "it has 17 decoders; 16 are the most"),
    ],
    ids=["panic", "long", "stack", "claims-8-GiB", "regex", "longer", "spaces", "many"],
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

    async def counted(data: bytes, cpu_s: int) -> None:
        assert cpu_s == tokenizer_trial.CPU_S
        tried.append(data)
        await real(data, cpu_s)

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
    a, b = 0, 1
    deltas = [Delta(n, (token,), (-1.0,), (-1.0,)) for n, token in ((1, b), (2, a), (1, a))]
    inner = Inner(*deltas)
    engine = engine_of(inner)

    async def main() -> list[Delta]:
        await engine.load(1, [view(CHANGES)])
        await engine.add(request(1, accepted=(a,)))
        await engine.add(request(2))
        with pytest.raises(EngineError, match="cannot decode this completion"):
            await engine.add(request(3, accepted=(a, b)))
        return await engine.next()

    failed, went_on = asyncio.run(main())
    assert (failed.handle, failed.token_ids) == (1, ())
    assert "cannot decode this completion" in (failed.error or "")
    assert "prefix" not in (failed.error or ""), "foreign words stay in the process"
    assert went_on == deltas[1]
    assert inner.aborted == [1]


def test_the_decoders_of_models_are_taken() -> None:
    inner = Inner()
    engine = engine_of(inner)
    decoders = (None, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}, in_turn(*PLAIN))

    async def main() -> None:
        for version, decoder in enumerate(decoders, 1):
            await engine.load(version, [view(published(decoder=decoder))])

    asyncio.run(main())
    assert inner.loaded == [1, 2, 3]


class Lender(Inner):
    def borrow(self, _slots: int) -> Inner:
        return Inner()


def test_a_borrower_s_versions_bring_few_tokenizers_in_a_loan_and_one_that_does_not_change_is_taken() -> None:
    lender = Lender()
    guest = StoppingLender(lender, lender).borrow(2)  # type: ignore[arg-type]  # has what is asked of it alone
    kinds = [published(decoder=decoder) for decoder in (None, *PLAIN[1:3])]

    async def main() -> None:
        for version, data in enumerate((kinds[0], kinds[0], kinds[1], kinds[1]), 1):
            await guest.load(version, [view(data)])
        for data in (kinds[2], kinds[0]):
            with pytest.raises(EngineError, match="opens no more of them in a loan"):
                await guest.load(5, [view(data)])

    asyncio.run(main())


def test_a_borrower_s_tokenizer_that_takes_long_to_open_is_refused_before_the_lender_s_samples_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizer_trial, "BORROWED_CPU_S", 1)
    large = published(
        {"type": "WordLevel", "vocab": {f"t{n}": n for n in range(1_000_000)}, "unk_token": "t0"}
    )
    lender = Lender()
    own = StoppingLender(lender, lender)  # type: ignore[arg-type]  # has what is asked of it alone
    with pytest.raises(EngineError, match=f"ended with signal {signal.SIGXCPU.value}"):
        asyncio.run(own.borrow(2).load(1, [view(large)]))
    asyncio.run(own.load(1, [view(large)]))
    assert lender.loaded == [1], "a run's own may take longer"
