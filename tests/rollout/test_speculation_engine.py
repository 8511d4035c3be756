"""Grouped speculation in the reference engine: what it makes is what it makes without. Planted bugs show that these tests see one.

vLLM's own rejection sampling keeps distributions, not tokens: `test_speculation_vllm.py`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from rollout.engines.base import EngineHost
from rollout.engines.speculation.groups import DraftTokens, Groups
from scavenger.protocol.messages import SampleKey, Sampling
from scavenger.protocol.worker.events import Delta, Request, Speculated

torch = pytest.importorskip("torch", reason="the engines need the [trainer] extra")
models = pytest.importorskip("tests.rollout.models")
from rollout.engines import decoder as decoders  # noqa: E402  needs torch, as all that follows
from rollout.engines.registry import builder  # noqa: E402
from tests.rollout.test_engine_contract import finish  # noqa: E402
from tests.rollout.test_experts import model_of, text_of, views_of  # noqa: E402

SAMPLES = 8
#: As sharp as a trained model's: siblings say the same for a while, and then do not.
SHARP = Sampling(max_tokens=48, temperature=0.12)
TRUNCATED = Sampling(48, 0.15, 0.9, 4, stop_token_ids=(5,), min_tokens=7)


def asked(how: Sampling, groups: int = 2, tokens: int = 48) -> list[Request]:
    """`groups` prompts, eight samples of each."""
    return [
        Request(
            handle,
            (1, 2, 3 + handle // SAMPLES),
            (),
            tokens,
            how,
            11,
            SampleKey("train", 3, handle // SAMPLES, handle % SAMPLES),
        )
        for handle in range(groups * SAMPLES)
    ]


def always_deep(patch: pytest.MonkeyPatch) -> None:
    """All that is drafted is verified: how long a pass took on this machine decides nothing."""
    from rollout.engines.speculation import speculator
    from rollout.engines.speculation.length import DraftLength

    def all_of_it(chances: Any, rows: int, _time: Any, *, padded: bool) -> DraftLength:
        return DraftLength(max(map(len, chances), default=0), float(rows), "the test says so")

    patch.setattr(speculator, "draft_length", all_of_it)


def play(
    requests: list[Request],
    speculation: str,
    *,
    dtype: str = "float64",
    max_batch: int = 6,
    model: Any = None,
) -> tuple[dict[int, Delta], Speculated]:
    text = models.config_text()
    model = models.plain_model(text, seed=5) if model is None else model
    spec = replace(models.spec(text, dtype=dtype, max_batch=max_batch), speculation=speculation)

    async def main() -> tuple[dict[int, Delta], Speculated]:
        engine = await builder("reference")(spec, EngineHost("run"))
        await engine.load(1, models.views(model))
        made = await finish(engine, *requests)
        total = engine.speculated()
        await engine.close()
        return made, total

    return asyncio.run(main())


def tokens_of(made: dict[int, Delta]) -> dict[int, Any]:
    return {handle: (one.token_ids, one.finish, one.error) for handle, one in made.items()}


@pytest.mark.parametrize("how", [SHARP, TRUNCATED], ids=["plain", "truncated"])
def test_speculation_changes_no_token_and_no_logprob(monkeypatch: pytest.MonkeyPatch, how: Sampling) -> None:
    always_deep(monkeypatch)
    plain, nothing = play(asked(how), "none")
    drafted, total = play(asked(how), "group")
    assert nothing == Speculated()
    assert total.accepted > 50, "drafts were accepted"
    assert total.drafted - total.accepted > 50, "and drafts were refused"
    assert tokens_of(drafted) == tokens_of(plain)
    for handle, one in plain.items():
        for column in ("logprobs", "raw_logprobs"):
            assert getattr(drafted[handle], column) == pytest.approx(getattr(one, column), abs=1e-12)
    if how is TRUNCATED:
        assert {one.finish for one in plain.values()} == {"stop", "length"}


def test_fewer_passes_make_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each verification makes a token more than it accepts."""
    always_deep(monkeypatch)
    requests = asked(Sampling(max_tokens=48, temperature=0.0), 1)
    made, total = play(requests, "group", max_batch=1)
    assert len({one.token_ids for one in made.values()}) == 1, "greedy siblings say the same"
    others = (SAMPLES - 1) * 48
    assert total.drafted - total.accepted < 16, "the first alone guessed wrong, from its own text"
    assert total.accepted + total.verifications <= 48 + others
    assert total.accepted > 0.8 * others


def test_a_sample_that_comes_with_tokens_goes_on_as_it_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    always_deep(monkeypatch)
    whole, _ = play(asked(SHARP, 1), "none")
    rest = [
        Request(one.handle, one.prompt, whole[one.handle].token_ids[:cut], 48 - cut, SHARP, 11, one.key)
        for one, cut in zip(asked(SHARP, 1), (0, 1, 5, 12, 20, 33, 46, 47), strict=True)
    ]
    moved, total = play(rest, "group")
    assert total.accepted > 10
    assert {h: rest[h].accepted + one.token_ids for h, one in moved.items()} == {
        h: one.token_ids for h, one in whole.items()
    }


def test_drafts_up_to_the_end_of_the_context_stay_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are padded to the longest draft, also those that have no more room: their padding touches nothing."""
    always_deep(monkeypatch)
    greedy = Sampling(max_tokens=125, temperature=0.0)
    requests = [
        Request(i, (1, 2, 3), (), 125 if i % 2 else 60, greedy, 11, SampleKey("train", 3, 0, i))
        for i in range(4)
    ]
    plain, _ = play(requests, "none", max_batch=4)
    ends = {i: one.token_ids for i, one in plain.items()}
    late = [
        Request(
            10 + i, (1, 2, 3), ends[1][: 118 + i], 125 - 118 - i, greedy, 11, SampleKey("train", 3, 0, 4 + i)
        )
        for i in range(7)
    ]
    drafted, total = play([*requests, *late], "group", max_batch=11)
    assert total.accepted > 0
    assert {i: drafted[i].token_ids for i in range(4)} == ends
    assert all(drafted[10 + i].token_ids == ends[1][118 + i :] for i in range(7))


def test_what_stands_behind_a_refused_draft_does_not_poison_the_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A draft may name a token that the model cannot take. It is refused, and its NaN in the cache must not stay."""
    always_deep(monkeypatch)
    model = models.plain_model(models.config_text(tie_word_embeddings=False), seed=5)
    with torch.no_grad():
        model.get_input_embeddings().weight[28] = torch.nan
    text = models.config_text(tie_word_embeddings=False)
    requests = asked(Sampling(max_tokens=30, temperature=0.5), 1, 30)

    async def main(speculation: str) -> tuple[dict[int, Delta], Speculated]:
        spec = replace(models.spec(text, max_batch=4), speculation=speculation)
        engine = await builder("reference")(spec, EngineHost("run"))
        await engine.load(1, models.views(model))
        found = await finish(engine, *requests)
        total = engine.speculated()
        await engine.close()
        return found, total

    plain, _ = asyncio.run(main("none"))
    healthy = {h for h, one in plain.items() if one.error is None}
    assert healthy
    monkeypatch.setattr(
        Groups, "draft", lambda _self, _handle, most: DraftTokens((28, 28)[:most], (0.5, 0.5)[:most], 3)
    )
    drafted, total = asyncio.run(main("group"))
    assert total.drafted > 50
    assert tokens_of(drafted) == tokens_of(plain)


def test_experts_are_told_of_each_token_that_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    always_deep(monkeypatch)
    text, model = text_of("qwen3_moe"), model_of("qwen3_moe")
    requests = [
        Request(i, (1, 2, 3), (), 20, Sampling(20, 0.0 if i < 2 else 0.3), 11, SampleKey("train", 3, 0, i))
        for i in range(5)
    ]

    async def main(speculation: str) -> tuple[dict[int, Delta], Speculated]:
        spec = replace(models.spec(text, dtype="float32", max_batch=3), routing=4, speculation=speculation)
        engine = await builder("reference")(spec, EngineHost("run"))
        await engine.load(1, views_of(model))
        found = await finish(engine, *requests)
        total = engine.speculated()
        await engine.close()
        return found, total

    plain, _ = asyncio.run(main("none"))
    drafted, total = asyncio.run(main("group"))
    assert total.accepted > 10
    assert {h: (one.token_ids, one.routing) for h, one in drafted.items()} == {
        h: (one.token_ids, one.routing) for h, one in plain.items()
    }


def test_an_engine_drafts_from_what_siblings_said_under_the_version_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """New weights end requests, not what was said: it is a guess under any version, and verified under the new one."""
    always_deep(monkeypatch)
    text = models.config_text()
    greedy = Sampling(max_tokens=40, temperature=0.0)

    async def main(speculation: str) -> tuple[dict[int, Delta], Speculated]:
        spec = replace(models.spec(text, max_batch=4), speculation=speculation)
        engine = await builder("reference")(spec, EngineHost("run"))
        await engine.load(1, models.views(models.plain_model(text, seed=5)))
        await finish(engine, *asked(greedy, 1, 40))
        before = engine.speculated()
        await engine.load(2, models.views(models.plain_model(text, seed=6)))
        found = await finish(engine, *asked(greedy, 1, 40))
        after = engine.speculated()
        await engine.close()
        return found, Speculated(after.drafted - before.drafted, after.accepted - before.accepted, 0)

    plain, _ = asyncio.run(main("none"))
    drafted, total = asyncio.run(main("group"))
    assert total.drafted > 0
    assert tokens_of(drafted) == tokens_of(plain)


# ---------------------------------------------------------------- planted bugs


def accepted_unverified(patch: pytest.MonkeyPatch) -> None:
    """The engine believes drafts."""
    patch.setattr(decoders, "accepts", lambda draft, place, _token: place < len(draft.tokens))


def last_draft_accepted_unverified(patch: pytest.MonkeyPatch) -> None:
    """It compares all but the last drafted token."""
    plain = decoders.accepts
    patch.setattr(
        decoders,
        "accepts",
        lambda draft, place, token: place == len(draft.tokens) - 1 or plain(draft, place, token),
    )


def drawn_at_the_first_position(patch: pytest.MonkeyPatch) -> None:
    """Each position of a draft is drawn with the first one's random number."""
    sample = decoders.Decoder._sample

    def same_number(self: Any, logits: Any, first: int, drafts: Any) -> Any:
        for row in self._rows[first:]:
            uniform = type(row.draws).uniform(row.draws, row.position)
            row.draws = type("Stuck", (), {"uniform": lambda _self, _place, at=uniform: at})()
        found = sample(self, logits, first, drafts)
        from rollout.engines.sampling import Draws

        for row in self._rows[first:]:
            row.draws = Draws(row.request.seed, row.request.key)
        return found

    patch.setattr(decoders.Decoder, "_sample", same_number)


@pytest.mark.parametrize(
    "plant", [accepted_unverified, last_draft_accepted_unverified, drawn_at_the_first_position]
)
def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, plant: Any) -> None:
    always_deep(monkeypatch)
    plain, _ = play(asked(SHARP), "none")
    plant(monkeypatch)
    drafted, total = play(asked(SHARP), "group")
    assert total.drafted > 0
    assert tokens_of(drafted) != tokens_of(plain)


def test_a_planted_draft_of_another_group_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes no token, as no draft can; that it is another group's, the groups' own test sees."""
    from rollout.engines.speculation import groups
    from tests.rollout.test_speculation import test_another_groups_tokens_are_no_draft as named

    named()
    monkeypatch.setattr(groups, "group_of", lambda key, _prompt: (key.purpose, key.step))
    with pytest.raises(AssertionError):
        named()
