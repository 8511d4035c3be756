"""Several policies in one environment: turns go to the run that answers for their agent, and to its trainer once, whatever restarts."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from scavenger.protocol.messages import (
    Call,
    CloseRun,
    CommitStep,
    DeliveredGroup,
    DeliveredRow,
    DeliveryOutcome,
    Denied,
    EndEpisode,
    EpisodeShare,
    EpisodesOver,
    Ok,
    OpenRun,
    RowTurn,
    RunOpened,
    TurnAccepted,
    TurnAdvantage,
    pack_tokens,
)
from scavenger.router.core import deliveries
from scavenger.router.core.events import PeerIdentity, TrainerCalled
from scavenger.router.core.state import Delivery
from scavenger.router.core.transitions import DeliveryStep, IllegalTransition
from tests.router import harness
from tests.router.memory_ledger import StoredLedger
from tests.router.two_policies import GATEWAY, OTHER, TOKENS, TwoRuns, ask, begun, open_body, opened, played


def states(bench: TwoRuns) -> list[str]:
    return [one.state for _, one in sorted(bench.ledger.deliveries.items())]


def test_a_turn_is_generated_by_the_run_that_answers_for_its_agent() -> None:
    bench = opened()
    played(bench, "e")
    by_run = {run: bench.ledger.turns[turn].run_id for run, turn in _turns(bench).items()}
    names = {made["created"].run_id: made["created"].name for made in bench.ledger.runs.values()}  # type: ignore[attr-defined]  # its rows are records of many kinds
    assert {run: names[run_id] for run, run_id in by_run.items()} == {"": "r", "s": "s"}


def _turns(bench: TwoRuns) -> dict[str, int]:
    found = {t.request: i for i, t in bench.ledger.turns.items()}
    return {policy: found[ask("e", policy).request] for policy in ("", "s")}


def test_a_turn_of_a_policy_that_is_not_this_owner_s_or_not_there_is_refused_by_name() -> None:
    bench = opened()
    reply = bench.of("r", ask("e", "nobody"), GATEWAY)
    assert isinstance(reply, Denied)
    assert "'nobody'" in reply.reason
    other_owner = PeerIdentity("owner", "another key")
    body = msgspec.structs.replace(open_body("r"), run="t", policies=("s",))
    bench.call_id += 1
    bench.handle(TrainerCalled(7, other_owner, Call(bench.call_id, "t", 0, body)))
    denied = bench.answer(bench.call_id, 7)
    assert isinstance(denied, Denied)
    assert (denied.code, "'s'" in denied.reason) == ("not-owner", True)


def test_a_run_whose_policy_does_not_take_its_episodes_is_not_opened() -> None:
    bench = TwoRuns()
    bench.of("s", msgspec.structs.replace(open_body("s"), episodes_of="x"))
    denied = bench.begin("r")
    assert isinstance(denied, Denied)
    assert "data.episodes_of" in denied.remedy


def with_vocabulary(run: str, digest: str) -> OpenRun:
    body = open_body(run)
    return msgspec.structs.replace(body, engine=msgspec.structs.replace(body.engine, vocabulary=digest))


@pytest.mark.parametrize(("first", "then"), [("s", "r"), ("r", "s")])
def test_policies_with_different_tokenizers_are_refused_when_a_run_is_opened(first: str, then: str) -> None:
    """The environment hands tokens of one model to the other: to another vocabulary they are other words."""
    bench = TwoRuns()
    bench.of("s", with_vocabulary("s", "one" if first == "s" else ""))
    if first == "r":
        bench.of("r", with_vocabulary("r", "one"))
    denied = bench.of(then, with_vocabulary(then, "other"))
    assert isinstance(denied, Denied)
    assert "different tokenizers" in denied.reason
    assert f"'{first}'" in denied.reason
    bench.restart()
    denied = bench.of(then, with_vocabulary(then, "other"))
    assert isinstance(denied, Denied), "a restarted daemon knows it too"
    assert isinstance(bench.of(then, with_vocabulary(then, "one")), RunOpened)


def test_a_policy_that_has_ended_is_refused_and_named() -> None:
    bench = opened()
    bench.of("s", CloseRun("finished"))
    denied = bench.of("r", ask("e", "s"), GATEWAY)
    assert isinstance(denied, Denied)
    assert "'s'" in denied.reason
    assert "has ended" in denied.reason
    assert isinstance(bench.of("r", ask("e"), GATEWAY), TurnAccepted), "its own turns go on"


def test_what_a_policy_said_is_delivered_to_its_trainer_once() -> None:
    bench = opened()
    played(bench, "e", "f")
    assert bench.deliver(bench.share("e", 0, 0.25), bench.share("f", 1, 0.75)) == Ok()
    [group] = bench.want()
    assert [(one.episode, one.reward) for one in group.episodes] == [("e", 0.25), ("f", 0.75)]
    assert bench.deliver(bench.share("e", 0, 0.25), bench.share("f", 1, 0.75)) == Ok(), "said again"
    assert bench.want(have=(group.group_id,)) == []
    assert bench.train(1, group) == Ok()
    assert bench.train(1, group) == Ok(), "the commit is repeated"
    assert states(bench) == ["consumed", "consumed"]
    bench.settle_episodes(1, "e", "f")
    assert bench.deliver(bench.share("e"), bench.share("f")) == Ok()
    assert len(bench.ledger.deliveries) == 2


def test_what_a_run_said_that_has_ended_since_stops_no_other_run() -> None:
    bench = opened()
    played(bench, "e")
    share = bench.share("e")
    bench.of("s", CloseRun("failed"))
    assert bench.deliver(share) == Ok()
    assert bench.ledger.deliveries == {}


def test_what_a_run_said_that_is_just_being_opened_again_stops_no_other_run() -> None:
    bench = opened()
    played(bench, "e")
    share = bench.share("e")
    bench.of("s", CloseRun("failed"))
    bench.restart()
    bench.attach_again("r")
    bench.auto = False
    bench.begin("s")
    bench.commit()
    assert bench.reads, "which of its episodes ended is not known yet"
    assert bench.deliver(share) == Ok()
    assert bench.ledger.deliveries == {}


def test_nothing_is_sent_before_it_is_durable() -> None:
    bench = opened()
    played(bench, "e")
    bench.want()
    bench.auto = False
    bench.deliver(bench.share("e"))
    assert bench.take(OTHER, DeliveredGroup) == []
    bench.settle()
    assert len(bench.take(OTHER, DeliveredGroup)) == 1


def test_tokens_of_another_policy_are_refused() -> None:
    bench = opened()
    played(bench, "e")
    share = bench.share("e")
    other = DeliveredRow(share.rows[0].prompt, pack_tokens([1, 2, 3, 4]), b"", share.rows[0].behaviour)
    denied = bench.deliver(msgspec.structs.replace(share, rows=(other,)))
    assert isinstance(denied, Denied)
    mine = msgspec.structs.replace(share, used=(ask("e").request,))
    assert isinstance(bench.deliver(mine), Denied)
    assert bench.ledger.deliveries == {}


@pytest.mark.parametrize("mask", [b"\1", b"\1\1\1\0", b"\2\1\1\1"])
def test_a_row_with_a_mask_of_other_tokens_is_refused(mask: bytes) -> None:
    bench = opened()
    played(bench, "e")
    share = bench.share("e")
    row = msgspec.structs.replace(share.rows[0], mask=mask)
    assert isinstance(bench.deliver(msgspec.structs.replace(share, rows=(row,))), Denied)


@pytest.mark.parametrize("stored", [False, True])
def test_a_restart_of_the_daemon_delivers_the_same(stored: bool, tmp_path: Path) -> None:
    bench = TwoRuns()
    if stored:
        bench.ledger = StoredLedger(f"sqlite:///{tmp_path}/ledger.db")
    bench = begun(bench)
    played(bench, "e", "f")
    bench.deliver(bench.share("e"), prompt=0)
    bench.deliver(bench.share("f"), prompt=1)
    before = bench.want()
    bench.restart()
    bench.attach_again("s")
    assert bench.want() == before
    assert bench.train(1, before[0]) == Ok()
    bench.restart()
    bench.attach_again("s")
    assert bench.want(2) == before[1:]
    bench.attach_again("r")
    assert bench.deliver(bench.share("e")) == Ok()
    assert states(bench) == ["consumed", "due"]


@pytest.mark.parametrize("restarts", [False, True])
def test_a_trainer_that_goes_back_is_given_again_what_the_later_steps_took(restarts: bool) -> None:
    bench = opened(ahead=2)
    played(bench, "e", "f")
    bench.deliver(bench.share("e"))
    bench.deliver(bench.share("f"), prompt=1)
    first, second = bench.want()
    bench.train(1, first)
    bench.checkpoint("s", 1)
    bench.train(2, second)
    if restarts:
        bench.restart()
    bench.begin("s", 1)
    assert bench.want(2) == [second]
    assert states(bench) == ["consumed", "due"]


@pytest.mark.parametrize("stored", [False, True])
def test_what_a_step_took_is_in_the_ledger_alone(stored: bool, tmp_path: Path) -> None:
    """Until its checkpoint, which may be far: the daemon's memory does not grow with the steps between."""
    bench = TwoRuns()
    if stored:
        bench.ledger = StoredLedger(f"sqlite:///{tmp_path}/ledger.db")
    bench = begun(bench, ahead=2)
    played(bench, "e", "f")
    bench.deliver(bench.share("e"), bench.share("f", 1))
    [group] = bench.want()
    bench.train(1, group)
    run = bench.router.core.runs["s"]
    assert run.deliveries.by_id == {}
    bench.restart()
    run = bench.router.core.runs["s"]
    assert run.deliveries.by_id == {}
    bench.begin("s", 0)
    assert bench.want(1) == [group], "with all its rows, from the ledger"


def test_a_rewind_takes_back_no_more_than_may_be_due(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = opened(ahead=2)
    played(bench, "e", "f")
    bench.deliver(bench.share("e"))
    bench.deliver(bench.share("f"), prompt=1)
    first, second = bench.want()
    bench.train(1, first)
    bench.train(2, second)
    rows = {i: one.rows for i, one in bench.ledger.deliveries.items()}
    whole = bench.ledger.taken_deliveries
    monkeypatch.setattr(
        bench.ledger,
        "taken_deliveries",
        lambda run_id, after: tuple(
            msgspec.structs.replace(one, rows=b"" if one.delivery_id == 1 else rows[one.delivery_id])
            for one in whole(run_id, after)
        ),
    )
    bench.begin("s", 0)
    assert bench.want(1) == [second]
    assert states(bench) == ["dropped", "due"]


def test_what_an_older_attempt_took_is_fenced() -> None:
    bench = opened()
    played(bench, "e")
    bench.deliver(bench.share("e"))
    [group] = bench.want()
    bench.begin("s")
    bench.attempts["s"] -= 1
    denied = bench.train(1, group)
    assert isinstance(denied, Denied)
    assert denied.code == "stale"
    assert states(bench) == ["due"]


def test_a_slow_trainer_does_not_get_what_is_too_old() -> None:
    bench = opened(ahead=0)
    played(bench, "e")
    bench.deliver(bench.share("e"))
    assert bench.want(2) == []
    assert states(bench) == ["stale"]


def test_the_oldest_are_dropped_when_too_many_are_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "MAX_DUE_GROUPS", 2)
    bench = opened()
    played(bench, "a", "b", "c", "d")
    bench.deliver(bench.share("a"))
    [held] = bench.want(count=1)
    for episode in "bcd":
        bench.deliver(bench.share(episode))
    assert states(bench) == ["due", "dropped", "due", "due"] or states(bench) == [
        "due",
        "dropped",
        "dropped",
        "due",
    ]
    assert bench.train(1, held) == Ok(), "what the trainer has is not dropped"


def test_a_run_that_takes_no_steps_is_served_alone() -> None:
    bench = opened(steps=0)
    played(bench, "e")
    assert bench.deliver(bench.share("e")) == Ok()
    assert bench.want() == []
    assert states(bench) == ["served"]


def test_the_other_trainer_is_told_that_no_further_episode_comes() -> None:
    bench = opened()
    played(bench, "e")
    bench.deliver(bench.share("e"))
    assert len(bench.want()) == 1
    bench.of("r", CloseRun("finished"))
    [over] = bench.take(OTHER, EpisodesOver)
    assert over.source == "r"


def test_an_episode_that_ends_takes_no_turn_of_any_policy() -> None:
    bench = opened()
    played(bench, "e")
    bench.of("r", EndEpisode("e"), GATEWAY, attempt=0)
    for policy in ("", "s"):
        denied = bench.of("r", ask("e", policy, 1), GATEWAY)
        assert isinstance(denied, Denied)
        assert denied.code == "ended"
    assert not bench.router.core.runs["s"].turns.episodes


def test_an_illegal_step_of_a_delivery_is_refused() -> None:
    one = Delivery(1, 1, "r", 1, 0, 0, "e", 1.0, 1, ())
    with pytest.raises(IllegalTransition):
        one.transition(DeliveryStep.TAKE)
    one.transition(DeliveryStep.DELIVER)
    one.transition(DeliveryStep.TAKE)
    with pytest.raises(IllegalTransition):
        one.transition(DeliveryStep.TAKE)


def test_engines_of_a_policy_stay_while_the_run_that_plays_has_a_trainer() -> None:
    bench = opened()
    bench.tick(700.0, step=50.0)
    other, player = bench.router.core.runs["s"], bench.router.core.runs["r"]
    player.trainer.seen_at = bench.now
    assert deliveries.seen_at(bench.router.core, other) == bench.now


def test_a_run_of_another_owner_that_took_the_name_tells_nothing() -> None:
    """`s` waits for `r`, which another owner opens and ends."""
    bench = TwoRuns()
    bench.begin("s")
    bench.announce("s", 0)
    other_owner = PeerIdentity("owner", "another key")
    theirs = msgspec.structs.replace(open_body("r"), policies=())
    bench.of("r", theirs, conn=7, who=other_owner)
    bench.attempts["r"] = 1
    bench.want()
    bench.of("r", CloseRun("finished"), conn=7, who=other_owner)
    assert bench.router.core.runs["r"].ended
    assert bench.take(OTHER, EpisodesOver) == []


def test_nothing_is_sent_for_a_step_that_was_taken() -> None:
    """What comes between a commit and the next wish would be of weights that are too old for the step that trains it."""
    bench = opened(ahead=0)
    played(bench, "e", "f")
    bench.deliver(bench.share("e"))
    [group] = bench.want(1, 1)
    assert bench.train(1, group) == Ok()
    bench.deliver(bench.share("f"), prompt=1)
    assert bench.take(OTHER, DeliveredGroup) == []
    assert bench.want(2, 1) == []
    assert states(bench) == ["consumed", "stale"]


def test_what_a_trainer_may_have_is_not_dropped_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "MAX_DUE_GROUPS", 2)
    bench = opened()
    played(bench, "a", "b", "c")
    bench.deliver(bench.share("a"))
    bench.deliver(bench.share("b"), prompt=1)
    [held] = bench.want(count=1)
    bench.restart()
    bench.attach_again("r")
    bench.deliver(bench.share("c"), prompt=2)
    bench.attach_again("s")
    bench.want(count=1, have=(held.group_id,))
    assert bench.train(1, held) == Ok()


def test_a_run_that_takes_episodes_plays_none() -> None:
    bench = TwoRuns()
    denied = bench.of("s", msgspec.structs.replace(open_body("s"), policies=("t",)))
    assert isinstance(denied, Denied)
    assert "plays none" in denied.reason


# ---------------------------------------------------------------- turns that are rewarded


def with_turns(share: EpisodeShare, *rewards: float) -> EpisodeShare:
    """Each of its rows is one turn."""
    rows = tuple(
        msgspec.structs.replace(row, turns=(RowTurn(number, TOKENS, reward),))
        for number, (row, reward) in enumerate(zip(share.rows, rewards, strict=True))
    )
    return msgspec.structs.replace(share, rows=rows)


def test_delivered_turns_carry_their_rewards_which_are_durable_and_the_same_after_a_restart(
    tmp_path: Path,
) -> None:
    bench = TwoRuns()
    bench.ledger = StoredLedger(f"sqlite:///{tmp_path}/ledger.db")
    begun(bench)
    played(bench, "e")
    bench.of("r", ask("e", "s", 1), GATEWAY)
    bench.generate(12)
    assert bench.deliver(with_turns(bench.share("e", turns=2), 0.25, -1.0)) == Ok()
    [before] = bench.want()
    assert [turn.reward for row in before.episodes[0].rows for turn in row.turns] == [0.25, -1.0]
    turns = [bench.ledger.samples[bench.sample_of(ask("e", "s", n))].group_id for n in range(2)]
    assert bench.ledger.turn_rewards == dict(zip(turns, (0.25, -1.0), strict=True))
    bench.restart()
    bench.attach_again("s")
    [after] = bench.want()
    assert after == before
    assert all(turn.group in turns for row in after.episodes[0].rows for turn in row.turns)
    assert bench.train(1, after) == Ok()
    assert bench.ledger.delivered_advantages == dict(zip(turns, (0.5, -2.0), strict=True))
    assert recorded(tmp_path) == [(turns[0], 0.5), (turns[1], -2.0)]
    bench.begin("s", 0)  # from the checkpoint before
    assert bench.ledger.delivered_advantages == {}
    assert recorded(tmp_path) == [(turns[0], None), (turns[1], None)]
    bench.ledger.close()


def recorded(folder: Path) -> list[tuple[int, float | None]]:
    """Delivered turns and their advantages, as a person reads them."""
    with closing(sqlite3.connect(folder / "ledger.db")) as connection:
        return connection.execute(
            "SELECT group_id, advantage FROM v_delivered_turns ORDER BY group_id"
        ).fetchall()


def test_an_advantage_of_no_turn_of_the_delivery_is_left_out_and_the_step_is_taken() -> None:
    bench = opened()
    played(bench, "e")
    assert bench.deliver(with_turns(bench.share("e"), 0.25)) == Ok()
    [group] = bench.want()
    [one] = group.episodes
    said = (TurnAdvantage(0, 0.5), TurnAdvantage(7, 9.0))
    taken = DeliveryOutcome(one.delivery_id, "consumed", one.reward, 0.5, turns=said)
    reply = bench.of("s", CommitStep(1, bench.versions["s"], "train", (), {}, deliveries=(taken,)))
    assert reply == Ok()
    assert list(bench.ledger.delivered_advantages.values()) == [0.5]


def test_delivered_turns_with_equal_tokens_have_their_own_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "token", lambda _sample, position: position)
    bench = TwoRuns()
    begun(bench)
    played(bench, "e")
    bench.of("r", ask("e", "s", 1), GATEWAY)
    bench.generate(12)
    assert bench.deliver(with_turns(bench.share("e", turns=2), 0.25, -1.0)) == Ok()
    assert list(bench.ledger.turn_rewards.values()) == [0.25, -1.0]


@pytest.mark.parametrize(
    ("turns", "why"),
    [
        ((RowTurn(0, TOKENS - 1, 1.0),), "turns of 3 tokens in a row that trains 4"),
        ((RowTurn(0, 1, 1.0), RowTurn(1, TOKENS - 1, 1.0)), "rewards a turn that is none of those"),
        ((RowTurn(0, 2, 1.0), RowTurn(0, TOKENS - 2, 1.0)), "a turn is in two places"),
    ],
)
def test_rewards_of_turns_that_the_policy_did_not_say_are_refused(
    turns: tuple[RowTurn, ...], why: str
) -> None:
    bench = opened()
    played(bench, "e")
    share = bench.share("e")
    wrong = msgspec.structs.replace(share, rows=(msgspec.structs.replace(share.rows[0], turns=turns),))
    reply = bench.deliver(wrong)
    assert isinstance(reply, Denied)
    assert why in reply.reason
    assert not bench.ledger.turn_rewards
