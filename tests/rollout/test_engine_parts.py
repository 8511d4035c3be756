"""The parts of the engines that need no engine: checksums of weights, seeds of leases, stop texts, what a version must hold."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from rollout.engines import stopping
from rollout.engines.base import EngineInfo, Kv, Weight
from rollout.engines.stopping import Matcher, Stopping, StoppingMover
from rollout.engines.vllm.sampling import lease_seed
from scavenger.errors import EngineError
from scavenger.protocol.messages import SampleKey, Sampling
from scavenger.protocol.worker.events import Delta, Request
from scavenger.weights import files
from scavenger.weights import manifest as manifests
from scavenger.weights.manifest import TensorView

torch = pytest.importorskip("torch", reason="the engines need the [trainer] extra")
models = pytest.importorskip("tests.rollout.models")
checksum = pytest.importorskip("rollout.engines.checksum")
published = pytest.importorskip("rollout.engines.published")
sort = pytest.importorskip("trainer.tasks.sort")

# ---------------------------------------------------------------- seeds

KEY = SampleKey("train", 3, 5, 1)


def test_every_lease_has_a_seed_of_its_own_and_always_the_same() -> None:
    places = [(step, prompt, index) for step in (1, 2) for prompt in (0, 1) for index in range(8)]
    keys = [SampleKey(purpose, *place) for purpose in ("train", "eval") for place in places]
    seeds = {lease_seed(seed, key, accepted) for seed in (0, 1) for key in keys for accepted in (0, 1, 7)}
    assert len(seeds) == 2 * len(keys) * 3
    assert all(0 <= seed < 2**63 - 1 for seed in seeds)
    assert lease_seed(7, KEY, 0) == 3965738676063495186, (
        "another seed for the same lease would change what a rerun samples"
    )


# ---------------------------------------------------------------- checksums


def sums(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: checksum.checksum(tensor) for name, tensor in tensors.items()}


def weights() -> dict[str, Any]:
    torch.manual_seed(0)
    shapes = {"l.q_proj": (8, 4), "l.k_proj": (4, 4), "l.v_proj": (4, 4), "l.norm": (4,), "embed": (7, 4)}
    return {f"{name}.weight": torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}


PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
TIED = {"lm_head.weight": "embed.weight"}


def fused(given: dict[str, Any]) -> dict[str, Any]:
    qkv = torch.cat([given[f"l.{part}.weight"] for part in PACKED["qkv_proj"]])
    padded = torch.cat([given["embed.weight"], torch.zeros(57, 4, dtype=torch.bfloat16)])
    return {
        "l.qkv_proj.weight": qkv.t(),
        "l.norm.weight": given["l.norm.weight"],
        "embed.weight": padded,
        "lm_head.weight": padded,
    }


def test_fused_padded_packed_and_tied_weights_are_recognised() -> None:
    assert checksum.faults(sums(weights()), [sums(fused(weights()))], PACKED, TIED, {}) == []


@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        ("l.qkv_proj.weight", "l.q_proj.weight"),
        ("lm_head.weight", "embed.weight"),
        ("l.norm.weight", "l.norm.weight"),
    ],
)
def test_one_altered_element_is_found(parameter: str, words: str) -> None:
    held = fused(weights())
    changed = held[parameter].contiguous().clone()
    changed.view(torch.int16).reshape(-1)[3] ^= 1
    wrong = checksum.faults(sums(weights()), [sums(held | {parameter: changed})], PACKED, TIED, {})
    assert len(wrong) == 1
    assert parameter in wrong[0]
    assert words in wrong[0]


def test_a_tensor_that_nothing_holds_and_one_of_nobody_are_found() -> None:
    held = fused(weights())
    del held["l.norm.weight"]
    assert checksum.faults(sums(weights()), [sums(held)], PACKED, TIED, {}) == [
        "l.norm.weight is held by no parameter"
    ]
    held["bias"] = torch.ones(3)
    assert "bias is not made of published tensors" in checksum.faults(
        sums(weights()), [sums(held)], PACKED, TIED, {}
    )


def test_slices_of_all_ranks_make_the_whole_and_key_value_heads_may_lie_on_several() -> None:
    given = weights()
    q, k, v = (given[f"l.{part}.weight"] for part in PACKED["qkv_proj"])
    ranks = []
    for rank in range(4):  # two key-value heads of two rows: each lies on two ranks
        head = rank // 2
        own = {
            "l.qkv_proj.weight": torch.cat(
                [q[2 * rank : 2 * rank + 2], k[2 * head : 2 * head + 2], v[2 * head : 2 * head + 2]]
            )
        }
        rows = torch.zeros(2, 4, dtype=torch.bfloat16)
        mine = given["embed.weight"][2 * rank : 2 * rank + 2]
        rows[: len(mine)] = mine
        ranks.append(sums(own | {"l.norm.weight": given["l.norm.weight"], "embed.weight": rows}))
    copies = {"l.k_proj.weight": 2, "l.v_proj.weight": 2, "l.norm.weight": 4}
    assert checksum.faults(sums(given), ranks, PACKED, TIED, copies) == []
    ranks[3], ranks[0] = ranks[0], ranks[0]
    assert len(checksum.faults(sums(given), ranks, PACKED, TIED, copies)) == 2


def test_stages_hold_their_own_layers_and_tied_embeddings_lie_on_the_first_and_the_last() -> None:
    given = weights()
    held = fused(given)
    stages = [
        sums({name: held[name] for name in ("embed.weight", "l.qkv_proj.weight")}),
        sums({name: held[name] for name in ("embed.weight", "lm_head.weight", "l.norm.weight")}),
    ]
    copies = {"embed.weight": 2}
    assert checksum.faults(sums(given), stages, PACKED, TIED, copies) == []
    assert checksum.faults(
        sums(given), [stages[0], stages[1] | {"lm_head.weight": checksum.NOTHING}], PACKED, TIED, copies
    ) == ["lm_head.weight does not hold embed.weight"]
    assert checksum.faults(sums(given), stages[:1], PACKED, TIED, {}) == [
        "l.norm.weight is held by no parameter"
    ]


def test_what_is_not_a_number_agrees_only_with_what_is_not() -> None:
    sick = weights()
    sick["l.k_proj.weight"][0, 0] = torch.nan
    assert checksum.faults(sums(sick), [sums(fused(sick))], PACKED, TIED, {}) == []
    assert checksum.faults(sums(weights()), [sums(fused(sick))], PACKED, TIED, {}) != []


def test_a_packed_copy_that_was_not_renewed_is_found() -> None:
    worker = pytest.importorskip("rollout.engines.vllm.worker")
    model = torch.nn.Module()
    model.head = torch.nn.Linear(4, 6, bias=False)
    kept = model.head.weight.detach().clone()
    model.head.cpu_linear = lambda x, _weight, _bias: x @ kept.t()
    before = worker.held(model)["head.weight"]
    assert before == (f"{checksum.checksum(kept).value:x}", 24, True)
    with torch.no_grad():
        model.head.weight.add_(1.0)
    assert worker.held(model)["head.weight"] == ("0", 0, True)


# ---------------------------------------------------------------- what a version must hold


@pytest.mark.parametrize("tie", [True, False])
def test_a_version_of_the_model_is_taken_and_any_other_refused(tie: bool) -> None:
    text = models.config_text(tie_word_embeddings=tie)
    of = published.layout(published.parse_config(text))
    views = models.views(models.plain_model(text))
    assert [v.name for v in published.checked(of, views)] == sorted(v.name for v in views)
    assert of.vocab_size == 29
    head = type(views[0])("lm_head.weight", "float32", (29, 32), bytes(29 * 32 * 4))
    if tie:
        with pytest.raises(EngineError, match="tied to another one and differs"):
            published.checked(of, [*views, head])
    with pytest.raises(EngineError, match=r"1 weights are missing, the first is 'model\.norm\.weight'"):
        published.checked(of, [v for v in views if v.name != "model.norm.weight"])


# ---------------------------------------------------------------- stop texts


class Fixed:
    """An engine that answers each request with given tokens, in deltas of given sizes."""

    def __init__(self, tokens: list[int], size: int = 1) -> None:
        self.tokens, self.size = tokens, size
        self.queue: list[Delta] = []
        self.aborted: list[int] = []

    def info(self) -> EngineInfo:
        return EngineInfo("fixed", 1, 99, 99)

    async def add(self, request: Request) -> None:
        left = self.tokens[len(request.accepted) :]
        for start in range(0, len(left), self.size):
            ids = tuple(left[start : start + self.size])
            last = start + self.size >= len(left)
            self.queue.append(
                Delta(request.handle, ids, (-1.0,) * len(ids), (-2.0,) * len(ids), "length" if last else None)
            )

    async def next(self) -> list[Delta]:
        return [self.queue.pop(0)]

    async def abort(self, handles: Any) -> None:
        self.aborted += handles

    async def load(self, version: int, tensors: Iterable[Weight], *, summed: bool = False) -> bytes:
        self.loaded = [weight.name for weight in tensors]
        return b"digest"


class FixedMover(Fixed):
    """One that gives out blocks of whatever it is asked for, while the request runs."""

    def kv_layout(self) -> str:
        return "fixed"

    def kv_tokens(self, tokens: int) -> int:
        return tokens

    def kv_token_nbytes(self) -> int:
        return 1

    async def take_kv(self, handle: int, tokens: int) -> Kv | None:
        text = (1, *self.tokens)[:tokens]
        return None if handle in self.aborted else Kv(text, memoryview(bytes(tokens)))

    async def add_with_kv(self, request: Request, kv: Kv) -> None:
        await self.add(request)


def views_with(tokenizer: bytes) -> list[TensorView]:
    """What a version of one weight holds, and the tokenizer beside it where there is one."""
    tensors = {"w": ("float32", (1,), memoryview(bytes(4)))}
    if tokenizer:
        tensors[files.TOKENIZER] = (files.DTYPE, (len(tokenizer),), memoryview(tokenizer))
    return manifests.views(*manifests.build(1, tensors))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    sort.write_tokenizer(tmp_path)
    return tmp_path / "tokenizer.json"


def ids(tokenizer: Path, text: str) -> list[int]:
    return list(Tokenizer.from_file(str(tokenizer)).encode(text).ids)


def answer(
    tokenizer: Path, text: str, how: Sampling, accepted: int = 0, size: int = 1
) -> tuple[list[Delta], Fixed]:
    tokens = ids(tokenizer, text)
    inner = Fixed(tokens, size)
    engine = Stopping(inner)  # type: ignore[arg-type]

    async def main() -> list[Delta]:
        await engine.load(1, views_with(tokenizer.read_bytes()))
        await engine.add(Request(1, (1,), tuple(tokens[:accepted]), len(tokens) - accepted, how, 0, KEY))
        made: list[Delta] = []
        while not made or made[-1].finish is None:
            made += await engine.next()
        return made

    return asyncio.run(main()), inner


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("accepted", range(8))
def test_a_stop_text_ends_the_sample_wherever_it_was_moved(tokenizer: Path, accepted: int, size: int) -> None:
    made, inner = answer(tokenizer, "0123>4567890", Sampling(99, stop=("3>45", "90")), accepted, size)
    tokens = [t for d in made for t in d.token_ids]
    assert tokens == ids(tokenizer, "0123>45")[accepted:]
    assert made[-1].finish == "stop"
    assert inner.aborted == [1]
    assert all(len(d.token_ids) == len(d.logprobs) == len(d.raw_logprobs) for d in made)


@pytest.mark.parametrize("leaves", [True, False])
def test_a_turn_that_a_stop_text_ends_leaves_the_blocks_of_what_was_kept_of_it(
    tokenizer: Path, leaves: bool
) -> None:
    """The engine within goes on with it, and is told to forget it."""
    tokens = ids(tokenizer, "0123>4567890")
    inner = FixedMover(tokens, 100)
    engine = StoppingMover(inner, inner)  # type: ignore[arg-type]  # has what is asked of it alone
    how = Sampling(99, stop=("3>45",))
    asked = Request(1, (1,), tuple(tokens[:2]), 9, how, 0, KEY, leaves_kv=leaves)

    async def main() -> None:
        await engine.load(1, views_with(tokenizer.read_bytes()))
        await engine.add(asked)
        assert (await engine.next())[-1].finish == "stop"
        assert inner.aborted == [1]
        kept = (1, *ids(tokenizer, "0123>4"))
        found = await engine.take_kv(1, len(kept))
        assert found == (Kv(kept, memoryview(bytes(len(kept)))) if leaves else None)
        assert await engine.take_kv(1, len(kept)) is None, "taken once"
        inner.aborted.clear()
        await engine.add(asked)
        await engine.next()
        await engine.abort([1])
        assert await engine.take_kv(1, len(kept)) is None

    asyncio.run(main())


def test_what_a_stop_text_ends_leaves_nothing_where_it_is_aborted_while_its_blocks_are_taken(
    tokenizer: Path,
) -> None:
    inner = FixedMover(ids(tokenizer, "0123>4567890"), 100)
    engine = StoppingMover(inner, inner)  # type: ignore[arg-type]  # has what is asked of it alone
    taken = inner.take_kv

    async def aborted_meanwhile(handle: int, tokens: int) -> Kv | None:
        found = await taken(handle, tokens)
        await engine.abort([handle])
        return found

    async def main() -> None:
        await engine.load(1, views_with(tokenizer.read_bytes()))
        await engine.add(Request(1, (1,), (), 11, Sampling(99, stop=("3>45",)), 0, KEY, leaves_kv=True))
        inner.take_kv = aborted_meanwhile  # type: ignore[method-assign]  # for this call
        assert (await engine.next())[-1].finish == "stop"
        assert engine._left == {}

    asyncio.run(main())


def test_a_stop_text_before_min_tokens_is_no_end_and_is_not_found_later(tokenizer: Path) -> None:
    made, _ = answer(tokenizer, "01201234", Sampling(99, stop=("012",), min_tokens=5))
    assert [t for d in made for t in d.token_ids] == ids(tokenizer, "012012")
    made, _ = answer(tokenizer, "01245678", Sampling(99, stop=("012",), min_tokens=4))
    assert made[-1].finish == "length"


def test_a_sample_without_the_text_goes_on_to_its_length(tokenizer: Path) -> None:
    made, inner = answer(tokenizer, "0123456", Sampling(99, stop=("65",)))
    assert (made[-1].finish, inner.aborted) == ("length", [])
    assert len([t for d in made for t in d.token_ids]) == 7


def test_the_end_of_a_long_accepted_text_is_enough_to_find_the_stop_text(tokenizer: Path) -> None:
    tokens = ids(tokenizer, "0" * 3000 + "12")
    matcher = Matcher(Tokenizer.from_file(str(tokenizer)), ["0123"], 0, tokens)
    assert not matcher.found
    assert matcher.feed(ids(tokenizer, "3")[0])


STOP = Request(1, (1,), (), 1, Sampling(9, stop=("x",)), 0, KEY)


def test_the_tokenizer_is_taken_out_of_the_weights_and_opened_once_for_versions_that_bring_the_same(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[bytes] = []

    class Counted:
        @staticmethod
        def from_buffer(data: bytes) -> Tokenizer:
            opened.append(data)
            return Tokenizer.from_buffer(data)

    monkeypatch.setattr(stopping, "Tokenizer", Counted)
    first = tokenizer.read_bytes()
    other = first.replace(b"\n", b" \n", 1)
    inner = Fixed([1])
    engine = Stopping(inner)  # type: ignore[arg-type]

    async def main() -> None:
        for version, data in enumerate((first, first, other), 1):
            assert await engine.load(version, views_with(data)) == b"digest"
            assert inner.loaded == ["w"], "the engine gets weights alone"
            await engine.add(STOP)
        assert opened == [first, other]
        await engine.load(4, views_with(b""))
        with pytest.raises(
            EngineError, match=r"came without the tokenizer\.json(.|\n)*'files/tokenizer\.json'"
        ):
            await engine.add(STOP)
        await engine.add(dataclasses.replace(STOP, sampling=Sampling(9)))

    asyncio.run(main())


def test_a_tokenizer_that_cannot_be_opened_or_is_too_large_is_refused_with_its_version(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Stopping(Fixed([1]))  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="is no tokenizer here"):
        asyncio.run(engine.load(1, views_with(b"{}")))
    with pytest.raises(EngineError, match="came without"):
        asyncio.run(engine.add(STOP))
    monkeypatch.setattr(files, "MAX_TOKENIZER_NBYTES", 100)
    with pytest.raises(EngineError, match=r"has [\d,]+ bytes, not 1 to 100"):
        asyncio.run(engine.load(2, views_with(tokenizer.read_bytes())))
    empty = TensorView(files.TOKENIZER, files.DTYPE, (0,), memoryview(b""))
    with pytest.raises(EngineError, match="has 0 bytes"):
        asyncio.run(engine.load(3, [empty]))
