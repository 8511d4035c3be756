"""The budget of a whole episode: turns, tokens and seconds, over all its agents and policies, across a restart of the daemon."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from scavenger.ledger import records as rec
from scavenger.protocol.messages import (
    CloseRun,
    Denied,
    EndEpisode,
    OpenTurn,
    ReplyBody,
    RunOpened,
    TurnAccepted,
    TurnTokens,
)
from scavenger.router.core.events import JobGone
from tests.router import two_policies
from tests.router.harness import Bench
from tests.router.memory_ledger import StoredLedger
from tests.router.test_turns import GATEWAY, W1, W2, ask, finish, text
from tests.router.two_policies import TwoRuns


def budgeted(bench: Bench, **budget: float) -> Bench:
    """A bench whose run is open with this budget (`turns`, `tokens`, `s`), with an engine."""
    bench.open(budget={f"budget_{key}": value for key, value in budget.items()})
    bench.publish()
    bench.join(W1)
    return bench


def asked(bench: Bench, body: OpenTurn) -> ReplyBody | None:
    return bench.call(body, conn=GATEWAY, attempt=0)


def refused(reply: ReplyBody | None) -> tuple[str, str]:
    assert isinstance(reply, Denied), reply
    return reply.code, reply.reason


def whole_turn(bench: Bench, request: str, tokens: int = 8, conn: int = W1) -> int:
    """Ask for a turn of as many tokens and have it generated. The most tokens that its engine was told."""
    assert isinstance(asked(bench, ask(request, tokens=tokens)), TurnAccepted)
    [lease] = bench.leases(conn)
    most = lease.sampling.max_tokens
    finish(bench, conn, lease, 0, most)
    return most


def test_an_episode_has_its_turns_and_no_further_one_and_another_has_its_own() -> None:
    bench = budgeted(Bench(), turns=2)
    whole_turn(bench, "a")
    whole_turn(bench, "b")
    assert refused(asked(bench, ask("c"))) == (
        "budget",
        "episode 'e' has used up its budget, data.budget_turns = 2",
    )
    again = asked(bench, ask("b"))
    assert isinstance(again, TurnAccepted)
    assert again.known, "what was generated is answered for as long as the episode is open"
    assert isinstance(asked(bench, ask("c", episode="f")), TurnAccepted)


def test_the_last_turn_has_the_tokens_that_are_left() -> None:
    bench = budgeted(Bench(), tokens=11)
    assert whole_turn(bench, "a") == 8
    assert whole_turn(bench, "b") == 3
    assert text(bench.take(GATEWAY, TurnTokens)[-1:])[3] == "length"
    assert refused(asked(bench, ask("c"))) == (
        "budget",
        "episode 'e' has used up its budget, data.budget_tokens = 11",
    )


def test_turns_that_are_open_at_once_do_not_wait_for_each_other_and_what_they_have_counts() -> None:
    bench = budgeted(Bench(), tokens=10)
    assert isinstance(asked(bench, ask("a")), TurnAccepted)
    [a] = bench.leases(W1)
    bench.chunk(W1, a, 0, 4)
    assert isinstance(asked(bench, ask("b")), TurnAccepted)
    [b] = bench.leases(W1)
    assert (a.sampling.max_tokens, b.sampling.max_tokens) == (8, 6)
    finish(bench, W1, a, 4)
    finish(bench, W1, b, 0, 6)
    assert refused(asked(bench, ask("c")))[0] == "budget"


def test_a_turn_leaves_what_it_did_not_have() -> None:
    bench = budgeted(Bench(), tokens=10)
    assert isinstance(asked(bench, ask("a")), TurnAccepted)
    [a] = bench.leases(W1)
    bench.chunk(W1, a, 0, 3, finish="stop")
    assert whole_turn(bench, "b") == 7


def test_samples_of_one_turn_share_what_is_left_and_a_least_number_of_tokens_is_within_it() -> None:
    bench = budgeted(Bench(), tokens=7)
    body = ask("a", n=2)
    body = msgspec.structs.replace(body, sampling=msgspec.structs.replace(body.sampling, min_tokens=6))
    assert isinstance(asked(bench, body), TurnAccepted)
    for lease in bench.leases(W1):
        assert (lease.sampling.max_tokens, lease.sampling.min_tokens) == (3, 3)


def test_after_its_seconds_no_turn_begins_and_one_that_is_open_goes_on() -> None:
    bench = budgeted(Bench(), s=30)
    assert isinstance(asked(bench, ask("a")), TurnAccepted)
    [lease] = bench.leases(W1)
    bench.now += 31
    assert refused(asked(bench, ask("b"))) == (
        "budget",
        "episode 'e' has used up its budget, data.budget_s = 30",
    )
    finish(bench, W1, lease)
    assert text(bench.take(GATEWAY, TurnTokens))[3] == "length"
    assert isinstance(asked(bench, ask("b", episode="f")), TurnAccepted)


@pytest.mark.parametrize(
    ("budget", "why"), [({"tokens": 8}, "tokens = 8"), ({"turns": 1}, "turns = 1"), ({"s": 9}, "s = 9")]
)
def test_a_restarted_daemon_knows_what_was_had(tmp_path: Path, budget: dict[str, float], why: str) -> None:
    bench = Bench()
    bench.ledger = StoredLedger(f"sqlite:///{tmp_path / 'ledger.sqlite3'}")
    budgeted(bench, **budget)
    whole_turn(bench, "a")
    bench.now += 10
    bench.restart()
    bench.publish()
    assert refused(asked(bench, ask("b"))) == (
        "budget",
        f"episode 'e' has used up its budget, data.budget_{why}",
    )
    assert isinstance(asked(bench, ask("b", episode="f")), TurnAccepted)
    bench.ledger.close()


def test_a_moved_turn_keeps_its_share_and_an_episode_that_ended_is_over() -> None:
    bench = budgeted(Bench(), tokens=10)
    whole_turn(bench, "a")
    assert isinstance(asked(bench, ask("b")), TurnAccepted)
    [lease] = bench.leases(W1)
    bench.chunk(W1, lease, 0, 1)
    bench.join(W2)
    bench.handle(JobGone("job11", 0, "preempted", crashed=False))
    [moved] = bench.leases(W2)
    assert (moved.sampling.max_tokens, len(moved.accepted)) == (2, 4)
    bench.call(EndEpisode("e"), conn=GATEWAY, attempt=0)
    assert refused(asked(bench, ask("c")))[0] == "ended"


def test_it_is_of_the_run_that_plays_and_counts_what_other_policies_say() -> None:
    bench = TwoRuns()
    body = two_policies.open_body("r")
    bench.begin("s")
    opened = bench.of("r", msgspec.structs.replace(body, budget_turns=2))
    assert isinstance(opened, RunOpened)
    bench.attempts["r"] = opened.attempt
    bench.announce("r", 0)
    bench.announce("s", 0)
    bench.engine(11, "r")
    bench.engine(12, "s")
    mine, other, third = (two_policies.ask("e", policy, n) for policy, n in (("", 0), ("s", 0), ("s", 1)))
    assert isinstance(bench.of("r", mine, conn=GATEWAY), TurnAccepted)
    assert isinstance(bench.of("r", other, conn=GATEWAY), TurnAccepted)
    assert refused(bench.of("r", third, conn=GATEWAY))[0] == "budget"


def test_turns_that_are_asked_of_the_other_run_by_itself_are_in_the_same_budget() -> None:
    bench = TwoRuns()
    bench.begin("s")
    opened = bench.of("r", msgspec.structs.replace(two_policies.open_body("r"), budget_turns=2))
    assert isinstance(opened, RunOpened)
    bench.attempts["r"] = opened.attempt
    bench.announce("r", 0)
    bench.announce("s", 0)
    assert isinstance(bench.of("r", two_policies.ask("e"), conn=GATEWAY), TurnAccepted)
    assert isinstance(bench.of("s", two_policies.ask("e", "", 7), conn=GATEWAY), TurnAccepted)
    assert refused(bench.of("s", two_policies.ask("e", "", 8), conn=GATEWAY))[0] == "budget"
    assert isinstance(bench.of("s", two_policies.ask("f", "", 9), conn=GATEWAY), TurnAccepted)


def two_budgeted(bench: TwoRuns, **budget: float) -> TwoRuns:
    """`r` plays with this budget, and `s` answers for one of its agents; each has an engine."""
    bench.begin("s")
    opened = bench.of("r", two_policies.open_body("r", budget=budget))
    assert isinstance(opened, RunOpened)
    bench.attempts["r"] = opened.attempt
    for run, conn in (("r", 11), ("s", 12)):
        bench.announce(run, 0)
        bench.engine(conn, run)
    return bench


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(
    ("budget", "why"), [({"turns": 2}, "turns = 2"), ({"tokens": 6}, "tokens = 6")], ids=["turns", "tokens"]
)
def test_what_a_policy_had_whose_run_has_ended_stays_spent(
    tmp_path: Path, budget: dict[str, float], why: str, restarts: bool
) -> None:
    bench = TwoRuns()
    bench.ledger = StoredLedger(f"sqlite:///{tmp_path / 'ledger.sqlite3'}")
    two_budgeted(bench, **budget)
    assert isinstance(bench.of("r", two_policies.ask("e"), GATEWAY), TurnAccepted)
    assert isinstance(bench.of("r", two_policies.ask("e", "s"), GATEWAY), TurnAccepted)
    [unfinished] = bench.leases(12)
    bench.chunk(12, unfinished, 0, 2)
    bench.generate(11)
    bench.of("s", CloseRun("failed", "its trainer ended"))
    if restarts:
        bench.restart()
    assert refused(bench.of("r", two_policies.ask("e", number=1), GATEWAY)) == (
        "budget",
        f"episode 'e' has used up its budget, data.budget_{why}",
    )
    assert isinstance(bench.of("r", two_policies.ask("f"), GATEWAY), TurnAccepted)
    bench.ledger.close()


def test_a_policy_s_part_that_its_own_gateway_ends_stays_spent_and_is_counted_once() -> None:
    bench = two_budgeted(TwoRuns(), turns=3)
    for policy in ("", "s"):
        assert isinstance(bench.of("r", two_policies.ask("e", policy), GATEWAY), TurnAccepted)
    for _ in range(2):
        bench.of("s", EndEpisode("e"), GATEWAY, attempt=0)
    assert isinstance(bench.of("r", two_policies.ask("e", number=1), GATEWAY), TurnAccepted)
    assert refused(bench.of("r", two_policies.ask("e", number=2), GATEWAY))[0] == "budget"


def test_nothing_is_kept_of_an_episode_that_ends_with_all_its_parts() -> None:
    bench = two_budgeted(TwoRuns(), turns=9)
    for policy in ("", "s"):
        assert isinstance(bench.of("r", two_policies.ask("e", policy), GATEWAY), TurnAccepted)
    bench.of("r", EndEpisode("e"), GATEWAY, attempt=0)
    assert not [one for one in bench.ledger.log if isinstance(one, rec.EpisodeSpent)]


def test_more_samples_than_tokens_that_are_left_are_refused_and_fewer_are_not() -> None:
    bench = budgeted(Bench(), tokens=3)
    code, why = refused(asked(bench, ask("a", n=4)))
    assert (code, why) == ("invalid", "4 samples, and 3 tokens are left of the budget of episode 'e'")
    assert isinstance(asked(bench, ask("a", n=1)), TurnAccepted)
