"""What siblings said on other engines changes no token: it is injected as the daemon would send it, and as no honest daemon does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import pytest
from msgspec.structs import replace

from rollout.engines.base import Engine, EngineHost
from rollout.engines.speculation.groups import Groups, group_of
from scavenger.protocol.messages import (
    KEEP_SIBLINGS_S,
    Assign,
    Lease,
    Revoke,
    SampleKey,
    Sampling,
    SiblingPiece,
    SiblingTokens,
    UseWeights,
    pack_tokens,
    squeeze_tokens,
)
from scavenger.protocol.worker.events import Add, HearSiblings, Loaded, LogNote, Speculated, WorkerAction
from scavenger.protocol.worker.work import Work
from tests.router.drafts import FORGED, Truths

torch = pytest.importorskip("torch", reason="the engines need the [trainer] extra")
models = pytest.importorskip("tests.rollout.models")
from rollout.engines import decoder as decoders  # noqa: E402  needs torch, as all that follows
from rollout.engines.registry import builder  # noqa: E402
from tests.rollout.test_engine_contract import finish  # noqa: E402
from tests.rollout.test_speculation_engine import always_deep  # noqa: E402

SAMPLES, TOKENS = 6, 24
#: As sharp as a trained model's: siblings say the same for a while, and then do not.
SHARP = Sampling(TOKENS, temperature=0.12)
VOCAB = 1 << 20  # more than any model here has
PROMPTS = ((1, 2, 3), (1, 2, 4))
Forge = Callable[[Lease, "Answers"], Sequence[SiblingTokens]]
Answers = dict[SampleKey, tuple[int, ...]]


def leases(prompt: int, indices: Sequence[int]) -> tuple[Lease, ...]:
    return tuple(
        Lease(
            100 * prompt + i,
            1,
            1,
            pack_tokens(PROMPTS[prompt]),
            b"",
            SHARP,
            11,
            SampleKey("train", 3, prompt, i),
        )
        for i in indices
    )


def at_work(now: float = 0.0) -> Work:
    """A worker's state with version 1 loaded."""
    work = Work(4096, now)
    work.use_weights(UseWeights(1, b"", ()), now)
    work.loaded(Loaded(1, b"root", 0.0, 0.0), now)
    return work


def drafts_of(work: Work, sent: Sequence[SiblingTokens]) -> list[HearSiblings]:
    actions = [action for message in sent for action in work.siblings(message, 0.0)]
    assert all(isinstance(action, HearSiblings | LogNote) for action in actions)
    return [action for action in actions if isinstance(action, HearSiblings)]


class OneEngine:
    """A reference engine in a loop of its own, for many plays: each forgets the last one's groups."""

    def __init__(self, speculation: str) -> None:
        text = models.config_text()
        self._spec = replace(models.spec(text, max_batch=SAMPLES), speculation=speculation)
        self._runner = asyncio.Runner()
        self._engine = self._runner.run(self._build())
        self._runner.run(self._engine.load(1, models.views(models.plain_model(text, seed=5))))

    async def _build(self) -> Engine:
        return await builder("reference")(self._spec, EngineHost("run"))

    def play(self, given: Sequence[Lease], sent: Sequence[SiblingTokens] = ()) -> tuple[Answers, Speculated]:
        """The completions of these leases, and what drafts came to, where the engine is told of siblings before its first pass."""
        work = at_work()
        adds = [action for action in work.assign(Assign(tuple(given)), 0.0) if isinstance(action, Add)]
        news = drafts_of(work, sent)
        for lease in given:
            work.revoked(Revoke(((lease.sample_id, lease.epoch),), "played"), 0.0)
        over = [action for action in work.beat(1, KEEP_SIBLINGS_S, 5.0) if isinstance(action, HearSiblings)]
        return self._runner.run(self._play(adds, news, over))

    async def _play(
        self, adds: Sequence[Add], news: Sequence[HearSiblings], over: Sequence[HearSiblings]
    ) -> tuple[Answers, Speculated]:
        engine, before = self._engine, self._engine.speculated()
        for one in news:
            await engine.hear(one)
        made = await finish(engine, *(add.request for add in adds))
        for one in over:
            await engine.hear(one)
        assert not any(one.error for one in made.values())
        after = engine.speculated()
        total = Speculated(
            *(getattr(after, f) - getattr(before, f) for f in ("drafted", "accepted", "verifications"))
        )
        return {add.request.key: made[add.request.handle].token_ids for add in adds}, total

    def close(self) -> None:
        self._runner.run(self._engine.close())
        self._runner.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[OneEngine]:
    """It verifies all that is drafted."""
    with pytest.MonkeyPatch.context() as patch:
        always_deep(patch)
        one = OneEngine("group")
        yield one
        one.close()


@pytest.fixture(scope="module")
def answers() -> Answers:
    """Of both groups, without speculation."""
    plain = OneEngine("none")
    found = plain.play([lease for prompt in range(len(PROMPTS)) for lease in leases(prompt, range(SAMPLES))])[
        0
    ]
    plain.close()
    return found


def told(key: SampleKey, tokens: Sequence[int], offset: int = 0) -> SiblingTokens:
    return SiblingTokens((SiblingPiece.of(0, key, offset, len(tokens)),), squeeze_tokens(pack_tokens(tokens)))


def elsewhere(answers: Answers) -> list[SiblingTokens]:
    """What the second half of the first group said, in pieces of seven tokens."""
    return [
        told(key, tokens[start : start + 7], start)
        for key, tokens in answers.items()
        if key.prompt == 0 and key.index >= SAMPLES // 2
        for start in range(0, TOKENS, 7)
    ]


def half(answers: Answers) -> Answers:
    return {k: v for k, v in answers.items() if k.prompt == 0 and k.index < SAMPLES // 2}


def test_siblings_elsewhere_are_drafts_and_change_no_token(engine: OneEngine, answers: Answers) -> None:
    """The same leases make the same tokens in fewer passes."""
    greedy = [replace(lease, sampling=Sampling(TOKENS, 0.0)) for lease in leases(0, (0,))]
    alone, before = engine.play(greedy)
    together, after = engine.play(greedy, [told(SampleKey("train", 3, 0, 7), alone[greedy[0].key])])
    assert alone == together
    assert after.accepted > before.accepted
    assert after.accepted >= 0.7 * TOKENS
    mine = leases(0, range(SAMPLES // 2))
    found, total = engine.play(mine, elsewhere(answers))
    assert found == half(answers)
    assert total.accepted > 0


def _forged(name: str) -> Forge:
    def forge(lease: Lease, answers: Answers) -> Sequence[SiblingTokens]:
        other = answers[replace(lease.key, prompt=1)]
        message = FORGED[name](Truths(lease, answers[lease.key], other, tuple(elsewhere(answers))))
        return [message] if message is not None else []

    return forge


def _out_of_order(_lease: Lease, answers: Answers) -> Sequence[SiblingTokens]:
    return elsewhere(answers)[::-1]


def _twice(_lease: Lease, answers: Answers) -> Sequence[SiblingTokens]:
    return [message for message in elsewhere(answers) for _ in range(2)]


def _beyond_the_vocabulary(lease: Lease, answers: Answers) -> Sequence[SiblingTokens]:
    tokens = answers[lease.key]
    return [told(replace(lease.key, index=7), [token for i in tokens for token in (i, VOCAB)])]


def _more_than_a_message_holds(lease: Lease, answers: Answers) -> Sequence[SiblingTokens]:
    piece = SiblingPiece.of(0, replace(lease.key, index=7), 0, 2**31 - 1)
    return [SiblingTokens((piece, piece), squeeze_tokens(pack_tokens(answers[lease.key])))]


INJECTED: dict[str, Forge] = {
    **{name: _forged(name) for name in FORGED},
    "out of order": _out_of_order,
    "twice": _twice,
    "beyond the vocabulary": _beyond_the_vocabulary,
    "more than a message holds": _more_than_a_message_holds,
}


@pytest.mark.parametrize("name", INJECTED)
def test_an_injected_message_changes_no_token(engine: OneEngine, answers: Answers, name: str) -> None:
    mine = leases(0, range(SAMPLES // 2))
    sent = [message for lease in mine for message in INJECTED[name](lease, answers)]
    assert sent
    assert engine.play(mine, sent)[0] == half(answers)


def test_a_planted_bug_that_believes_what_was_sent_is_found(
    engine: OneEngine, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoders, "accepts", lambda draft, place, _token: place < len(draft.tokens))
    mine = leases(0, range(SAMPLES // 2))
    sent = [message for lease in mine for message in INJECTED["wrong"](lease, answers)]
    assert engine.play(mine, sent)[0] != half(answers)


# ---------------------------------------------------------------- the worker's side, without an engine


def of_kind(actions: Sequence[WorkerAction]) -> list[HearSiblings]:
    return [action for action in actions if isinstance(action, HearSiblings)]


def test_a_worker_hands_on_what_a_running_sample_asks_for_and_nothing_else() -> None:
    work = at_work()
    sibling = told(SampleKey("train", 3, 0, 7), (5, 6))
    assert work.siblings(sibling, 0.0) == []
    work.assign(Assign(leases(0, (0, 1))), 0.0)
    (found,) = of_kind(work.siblings(sibling, 0.0))
    assert [(one.group.prompt, one.index, one.offset, one.token_ids) for one in found.said] == [
        (PROMPTS[0], 7, 0, (5, 6))
    ]
    assert of_kind(work.siblings(told(SampleKey("train", 3, 1, 7), (5, 6)), 0.0)) == []


def test_a_group_is_forgotten_a_while_after_its_last_sample_here_is_over() -> None:
    work = at_work()
    work.assign(Assign((*leases(0, (0, 1)), *leases(1, (0,)))), 0.0)
    work.siblings(told(SampleKey("train", 3, 0, 7), (5, 6)), 0.0)
    work.revoked(Revoke(((0, 1),), "moved"), 0.0)
    assert of_kind(work.beat(1, 1.0, 5.0)) == []
    work.revoked(Revoke(((1, 1),), "moved"), 1.0)
    assert of_kind(work.beat(2, 2.0, 5.0)) == []
    (gone,) = of_kind(work.beat(3, 1.0 + KEEP_SIBLINGS_S, 5.0))
    assert [(group.key.prompt, group.prompt) for group in gone.over] == [(0, PROMPTS[0])]
    assert of_kind(work.beat(4, 90.0, 5.0)) == []


def test_what_is_heard_counts_once_and_goes_with_its_group() -> None:
    groups, key = Groups(), SampleKey("train", 3, 0, 0)
    name = group_of(key, (1, 2))
    groups.hear(name, (1, 2), 3, 0, (7, 8, 9))
    groups.enter("a", name, 0, (1, 2), ())
    groups.extend("a", (7, 8))
    before = groups.draft("a", 4)
    assert before.tokens == (9,)
    groups.hear(name, (1, 2), 3, 0, (7, 8, 9))  # again
    groups.hear(name, (1, 2), 3, 1, (8,))  # late
    groups.hear(name, (1, 2), 0, 0, (4, 4, 4))  # of the sample that is here
    assert groups.draft("a", 4) == before
    groups.hear(name, (1, 2), 3, 2, (9, 10))  # overlaps
    assert groups.draft("a", 4).tokens == (9, 10)
    groups.enter("b", name, 3, (1, 2), (7, 8, 9, 10))  # that sibling moves here
    assert groups.draft("a", 4).tokens == (9, 10)
    groups.drop(name)
    assert len(groups) == 1, "its samples are generated here"
    groups.leave("a")
    groups.leave("b")
    groups.drop(name)
    assert (len(groups), groups.tokens) == (0, 0)
    groups.hear(name, None, 3, 4, (11,))
    assert len(groups) == 0, "what is told of no group that is known is dropped"


def test_what_is_heard_is_bounded_with_all_groups() -> None:
    groups = Groups(max_tokens=64)
    for prompt in range(20):
        key = SampleKey("train", 3, prompt, 0)
        groups.hear(group_of(key, (1,)), (1,), 0, 0, tuple(range(2, 32)))
        assert groups.tokens <= 64
    groups.enter("a", "live", 0, (1, 2), ())
    for start in range(0, 600, 30):
        groups.hear("live", None, 1, start, tuple(range(30)))
        assert groups.tokens <= 64
