"""A step that was taken with episodes: their turns end with it, once; all of it is repeatable, and a rewind gives nothing twice."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

from scavenger.errors import WireError
from scavenger.ledger import records as rec
from scavenger.protocol.messages import (
    Call,
    CommitStep,
    Denied,
    EpisodeOutcome,
    Lease,
    Ok,
    OpenTurn,
    ReplyBody,
    Sampling,
    TurnAccepted,
    TurnOutcome,
    decode_to_daemon,
    encode,
    named_request,
    pack_tokens,
)
from tests.router import harness
from tests.router.harness import Bench
from tests.router.memory_ledger import StoredLedger

GATEWAY, W1 = 90, 11
PROMPT = pack_tokens([5, 6, 7])


def opened() -> Bench:
    bench = Bench()
    bench.open()
    bench.publish()
    bench.join(W1)
    return bench


def ask(bench: Bench, name: str, episode: str = "e", *, whole: bool = True) -> Lease:
    """A turn of the episode, by the name that its caller gives it."""
    body = OpenTurn(
        episode, named_request(episode, name), sha256(name.encode()).digest(), PROMPT, 1, Sampling(8)
    )
    assert isinstance(bench.call(body, conn=GATEWAY, attempt=0), TurnAccepted)
    [lease] = bench.leases(W1)
    bench.chunk(W1, lease, 0, 8 if whole else 3)
    return lease


def took(episode: str, *names: str, outcome: str = "consumed", reason: str = "") -> EpisodeOutcome:
    used = tuple(named_request(episode, name) for name in names)
    return EpisodeOutcome(episode, outcome, 1.0, 0.5, reason, "v", used)


def commit(
    bench: Bench, *episodes: EpisodeOutcome, step: int = 1, purpose: str = "train"
) -> ReplyBody | None:
    return bench.call(CommitStep(step, 1, purpose, (), {"reward": 1.0}, episodes))


def test_the_turns_that_a_step_took_are_consumed_and_the_others_are_surplus() -> None:
    bench = opened()
    kept, left, unfinished = ask(bench, "0.0"), ask(bench, "0.1"), ask(bench, "0.2", whole=False)
    other = ask(bench, "0.1~1")
    assert commit(bench, took("e", "0.0", "0.1~1")) == Ok()
    samples = bench.ledger.samples
    assert [samples[x.sample_id].state for x in (kept, left, unfinished, other)] == [
        "consumed",
        "surplus",
        "surplus",
        "consumed",
    ]
    assert (samples[kept.sample_id].reward, samples[kept.sample_id].step) == (1.0, 1)
    assert {e.state for e in bench.ledger.episodes.values()} == {"ended"}
    assert not bench.router.core.samples
    assert bench.router.core.runs["r"].progress.last_committed == 1


def test_a_commit_that_is_repeated_changes_nothing() -> None:
    bench = opened()
    lease = ask(bench, "0.0")
    assert commit(bench, took("e", "0.0")) == Ok()
    before = replace(bench.ledger.samples[lease.sample_id])
    assert commit(bench, took("e", "0.0")) == Ok()
    assert bench.ledger.samples[lease.sample_id] == before
    ask(bench, "0.0", "of-eval")
    assert commit(bench, took("of-eval", "0.0", outcome="evaluated"), purpose="eval") == Ok()
    assert commit(bench, took("of-eval", "0.0", outcome="evaluated"), purpose="eval") == Ok()


def test_an_ended_episode_takes_no_turn_more() -> None:
    bench = opened()
    ask(bench, "0.0")
    commit(bench, took("e", "0.0"))
    body = OpenTurn("e", named_request("e", "0.0"), sha256(b"0.0").digest(), PROMPT, 1, Sampling(8))
    refused = bench.call(body, conn=GATEWAY, attempt=0)
    assert isinstance(refused, Denied)
    assert refused.code == "ended"


def test_an_episode_that_asked_for_nothing_is_in_the_ledger_with_its_reason() -> None:
    bench = opened()
    assert commit(bench, took("lost", outcome="masked", reason="failed: ToolError")) == Ok()
    [episode] = bench.ledger.episodes.values()
    assert (episode.name, episode.state) == ("lost", "ended")
    assert isinstance(bench.call(CommitStep(1, 1, "train", (), {}, ()), attempt=1), Ok)


@pytest.mark.parametrize(
    ("episodes", "why"),
    [
        ((took("e", "0.0"), took("e", "0.0")), "names an episode twice"),
        ((took("e", "0.9"),), "a turn that it does not have"),
        ((took("e", "0.1"),), "a turn that it does not have, or not whole"),
        ((took("e", "0.0", outcome="served"),), "cannot be 'served'"),
        ((took("unknown", "0.0"),), "a turn that it does not have"),
    ],
)
def test_a_commit_that_cannot_be_is_refused_and_changes_nothing(
    episodes: tuple[EpisodeOutcome, ...], why: str
) -> None:
    bench = opened()
    lease = ask(bench, "0.0")
    ask(bench, "0.1", whole=False)
    refused = commit(bench, *episodes)
    assert isinstance(refused, Denied)
    assert why in refused.reason
    assert bench.ledger.samples[lease.sample_id].state == "complete"
    assert bench.router.core.runs["r"].progress.last_committed == 0


def test_an_episode_that_ended_otherwise_is_in_no_step() -> None:
    bench = opened()
    ask(bench, "0.0")
    ask(bench, "0.0", "other")
    commit(bench, took("e", "0.0"))
    refused = commit(bench, took("e", "0.0"), took("other", "0.0"), step=2)
    assert isinstance(refused, Denied)
    assert "has ended, and was not taken by step 2" in refused.reason


def test_a_trainer_that_goes_back_plays_such_a_step_again_and_finds_the_daemon_sound(tmp_path: Path) -> None:
    """Its turns are of an ended episode: they are not offered again, and no restart of the daemon brings them back."""
    bench = Bench()
    bench.ledger = StoredLedger(f"sqlite:///{tmp_path / 'ledger.sqlite3'}")
    bench.open()
    bench.publish()
    bench.join(W1)
    ask(bench, "0.0")
    assert commit(bench, took("e", "0.0")) == Ok()
    bench.open(resume_step=0)
    assert bench.router.core.runs["r"].progress.last_committed == 0
    bench.restart()
    assert not bench.router.core.samples
    body = OpenTurn("e", named_request("e", "0.0"), sha256(b"0.0").digest(), PROMPT, 1, Sampling(8))
    refused = bench.call(body, conn=GATEWAY, attempt=0)
    assert isinstance(refused, Denied)
    assert refused.code == "ended"
    bench.ledger.close()


def test_the_wire_carries_it() -> None:
    body = CommitStep(1, 1, "train", (), {}, (took("e", "0.0"),))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=CommitStep)
    assert again == body


# ---------------------------------------------------------------- turns that are rewarded


def turn_of(bench: Bench, lease: Lease, reward: float, advantage: float) -> TurnOutcome:
    """As a trainer names it: by the tokens of its prompt and completion."""
    tokens = bench.ledger.samples[lease.sample_id].tokens
    return TurnOutcome(sha256(PROMPT + bytes(tokens)).digest(), reward, advantage)


def test_rewarded_turns_are_in_the_ledger_with_what_each_earned_and_its_own_advantage() -> None:
    bench = opened()
    one, two, plain = ask(bench, "0.0"), ask(bench, "0.1"), ask(bench, "0.2")
    turns = (turn_of(bench, two, -1.0, 0.75), turn_of(bench, one, 0.25, -0.5))
    body = msgspec.structs.replace(took("e", "0.0", "0.1", "0.2"), turns=turns)
    assert commit(bench, body) == Ok()
    ends = {end.sample_id: end for end in bench.ledger.log if isinstance(end, rec.SampleEnded)}
    found = [ends[lease.sample_id] for lease in (one, two, plain)]
    assert [(end.reward, end.advantage) for end in found] == [(1.0, -0.5), (1.0, 0.75), (1.0, 0.5)]
    groups = [bench.ledger.samples[lease.sample_id].group_id for lease in (one, two)]
    assert bench.ledger.turn_rewards == dict(zip(groups, (0.25, -1.0), strict=True))
    assert commit(bench, body) == Ok(), "repeated"
    assert sum(isinstance(one, rec.TurnRewarded) for one in bench.ledger.log) == 2
    assert not bench.events("turn_rewards_left_out")


def test_turns_with_equal_tokens_have_their_own_rewards_in_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(harness, "token", lambda _sample, position: position)
    bench = opened()
    one, two = ask(bench, "0.0"), ask(bench, "0.1")
    turns = (turn_of(bench, one, 0.25, -0.5), turn_of(bench, two, 0.5, 0.75))
    assert turns[0].turn == turns[1].turn
    assert commit(bench, msgspec.structs.replace(took("e", "0.0", "0.1"), turns=turns)) == Ok()
    ends = {end.sample_id: end.advantage for end in bench.ledger.log if isinstance(end, rec.SampleEnded)}
    assert [ends[lease.sample_id] for lease in (one, two)] == [-0.5, 0.75]
    assert list(bench.ledger.turn_rewards.values()) == [0.25, 0.5]
    assert not bench.events("turn_rewards_left_out")


def test_a_reward_of_no_turn_that_the_step_took_is_left_out_and_an_event_says_so() -> None:
    bench = opened()
    one, left = ask(bench, "0.0"), ask(bench, "0.1")
    unknown = TurnOutcome(b"x" * 32, 1.0, 1.0)
    turns = (unknown, turn_of(bench, left, 1.0, 1.0), turn_of(bench, one, 0.25, -0.5))
    body = msgspec.structs.replace(took("e", "0.0"), turns=(*turns, turns[-1]))
    assert commit(bench, body) == Ok(), "a step does not fail for it"
    assert [one.reward for one in bench.ledger.log if isinstance(one, rec.TurnRewarded)] == [0.25]
    [event] = bench.events("turn_rewards_left_out")
    assert "3 of 4 rewards" in event.reason


@pytest.mark.parametrize(
    "wrong",
    [
        TurnOutcome(b"short", 1.0, 1.0),
        TurnOutcome(b"x" * 32, float("nan"), 1.0),
        TurnOutcome(b"x" * 32, 1.1e13, 1.0),
    ],
)
def test_a_turn_s_outcome_that_cannot_be_is_no_message(wrong: TurnOutcome) -> None:
    good = CommitStep(1, 1, "train", (), {}, (took("e", "0.0"),))
    decode_to_daemon(encode(Call(1, "r", 1, good)))
    body = CommitStep(1, 1, "train", (), {}, (msgspec.structs.replace(took("e"), turns=(wrong,)),))
    with pytest.raises(WireError):
        decode_to_daemon(encode(Call(1, "r", 1, body)))
