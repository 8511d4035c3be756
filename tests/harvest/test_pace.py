"""When the watcher looks: often enough, never more than the site allows, and ever less often at one that does not answer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from scavenger.cluster.error_kind import ErrorKind, error_kind_of
from scavenger.harvest.pace import MAX_RETRY_S, SAVED_MIN, PaceRules, PollKind, PollPace

RULES = PaceRules(poll_interval_s=60.0, fast_poll_interval_s=15.0, floor_s=5.0, max_rpc_per_min=4.0)
COST = {PollKind.FULL: 4, PollKind.JOBS: 1}
EVEN = lambda: 0.5  # noqa: E731  intervals as they are written


def play(
    seconds: float,
    rules: PaceRules = RULES,
    *,
    expecting: bool = False,
    moved: bool = False,
    at_rest: bool = False,
    draw: Callable[[], float] = EVEN,
    extra: int = 0,
) -> list[tuple[float, PollKind]]:
    """The looks of `seconds`, the first at 0; `extra` requests follow each whole one."""
    pace = PollPace(rules, draw, 0.0)
    now, poll, looks = 0.0, PollKind.FULL, []
    while now <= seconds:
        looks.append((now, poll))
        pace.polled(poll, COST[poll], now)
        pace.spent(extra if poll is PollKind.FULL else 0, now)
        now, poll = pace.next(now, expecting=expecting, moved=moved, at_rest=at_rest)
    return looks


def rpcs(looks: Sequence[tuple[float, PollKind]]) -> int:
    return sum(COST[poll] for _, poll in looks)


def test_quiet_looks_come_every_observe_s_and_at_rest_a_third_as_often() -> None:
    assert play(300) == [(60.0 * n, PollKind.FULL) for n in range(6)]
    assert play(400, at_rest=True) == [(180.0 * n, PollKind.FULL) for n in range(3)]
    hour = play(3600, at_rest=True)
    seldom = 3600 / 300 + 3600 / 300 + 3600 / 900  # partitions, reservations, configuration
    assert (rpcs(hour) + seldom) / 60 < 2.0, "at rest less than two requests a minute"


def test_what_is_expected_is_looked_for_quickly_while_rpcs_are_saved_up() -> None:
    looks = play(120, expecting=True)
    assert [at for at, _ in looks[:5]] == [0, 15, 30, 45, 60]


@pytest.mark.parametrize(
    "mood", [{"expecting": True}, {"moved": True}, {"expecting": True, "moved": True}, {}]
)
@pytest.mark.parametrize("most", [2.0, 4.0, 30.0])
def test_over_ten_minutes_the_average_stays_below_what_the_site_allows_whatever_happens(
    mood: dict[str, Any], most: float
) -> None:
    looks = play(4 * 3600, replace(RULES, max_rpc_per_min=most), **mood)
    for start in range(0, 3 * 3600, 300):
        spent = rpcs([(at, poll) for at, poll in looks if start <= at < start + 600 * 2])
        # what was saved beforehand, what was earned meanwhile, and the look that began before
        assert spent <= most * SAVED_MIN + most * 20 + COST[PollKind.FULL]
    hour = rpcs([(at, poll) for at, poll in looks if at >= 3 * 3600])
    regular = rpcs(play(3600, replace(RULES, max_rpc_per_min=1e9)))
    assert hour <= max(most * 60, regular / 2) + COST[PollKind.FULL]


def test_a_look_at_the_queue_alone_is_taken_where_a_whole_one_is_too_dear() -> None:
    looks = play(3600, replace(RULES, max_rpc_per_min=6.0), expecting=True)
    kinds = [poll for at, poll in looks if at > 1800]
    assert kinds.count(PollKind.JOBS) > kinds.count(PollKind.FULL) > 0


@pytest.mark.parametrize("most", [4.0, 5.0, 6.0, 12.0])
def test_looks_at_the_queue_are_never_at_the_expense_of_the_regular_ones_which_decide(most: float) -> None:
    whole = [
        at
        for at, poll in play(3600, replace(RULES, max_rpc_per_min=most), expecting=True)
        if poll is PollKind.FULL
    ]
    assert max(later - before for before, later in itertools.pairwise(whole)) <= 60.0 + 1e-6


def test_other_rules_hold_at_once() -> None:
    pace = PollPace(replace(RULES, max_rpc_per_min=60.0), EVEN, 0.0)
    pace.obey(RULES, 0.0)
    pace.spent(int(RULES.max_rpc_per_min * SAVED_MIN), 0.0)
    pace.polled(PollKind.FULL, 4, 0.0)
    due, _ = pace.next(0.0, expecting=False, moved=True, at_rest=False)
    assert due >= 60.0, "what was saved up under the larger limit is gone"


def test_the_budget_puts_the_regular_look_off_by_one_interval_at_most() -> None:
    gaps = [b - a for (a, _), (b, _) in itertools.pairwise(play(7200, replace(RULES, max_rpc_per_min=0.5)))]
    assert max(gaps) <= 120.0
    assert max(gaps) > 100.0


def test_a_promise_is_kept_whatever_it_costs() -> None:
    pace = PollPace(replace(RULES, max_rpc_per_min=0.1), EVEN, 0.0)
    pace.polled(PollKind.FULL, 4, 0.0)
    assert pace.next(1.0, expecting=False, moved=False, at_rest=True, by=20.0) == (20.0, PollKind.FULL)
    assert pace.next(1.0, expecting=False, moved=False, at_rest=True, by=1.0) == (5.0, PollKind.FULL), (
        "the site's floor holds"
    )


def test_submissions_are_counted_and_put_quick_looks_off() -> None:
    busy, idle = play(1200, expecting=True, extra=20), play(1200, expecting=True)
    assert len(busy) < len(idle)


def test_submissions_never_put_off_the_regular_looks() -> None:
    """A daemon that submitted as its fleet was preempted polled after 118 and 128 s where 60 were promised."""
    looks = play(3600, RULES, extra=20, expecting=True)
    whole = [at for at, poll in looks if poll is PollKind.FULL]
    assert max(later - before for before, later in itertools.pairwise(whole)) <= 60.0 + 1e-6


def test_no_two_looks_are_closer_than_the_floor() -> None:
    eager = PaceRules(poll_interval_s=1.0, fast_poll_interval_s=0.1, floor_s=10.0, max_rpc_per_min=1e6)
    moods: list[dict[str, Any]] = [{"expecting": True}, {"moved": True}, {}]
    for mood in moods:
        gaps = [b - a for (a, _), (b, _) in itertools.pairwise(play(200, eager, **mood))]
        assert min(gaps) >= 9.0


def test_intervals_are_stretched_by_chance_a_tenth_at_most() -> None:
    draws = itertools.cycle([0.0, 0.25, 0.5, 0.75, 0.999])
    gaps = {round(b - a, 1) for (a, _), (b, _) in itertools.pairwise(play(3000, draw=lambda: next(draws)))}
    assert len(gaps) > 3
    assert all(54.0 <= gap <= 66.0 + 3 for gap in gaps)


def test_failures_double_the_wait_to_a_bound_and_one_success_ends_that() -> None:
    pace = PollPace(RULES, EVEN, 0.0)
    waits, now = [], 0.0
    for _ in range(7):
        waits.append(pace.failed(ErrorKind.NO_REPLY, 1, now))
        due, poll = pace.next(now, expecting=True, moved=True, at_rest=False)
        assert (due, poll) == (now + waits[-1], PollKind.FULL), "neither demand nor expectation asks sooner"
        now = due
    assert waits == [15, 30, 60, 120, 240, MAX_RETRY_S, MAX_RETRY_S]
    pace.polled(PollKind.FULL, 4, now)
    assert pace.failures == 0
    assert pace.next(now, expecting=False, moved=False, at_rest=False)[0] <= now + 2 * 60


def test_where_slurm_asks_for_fewer_requests_the_first_wait_is_a_whole_interval() -> None:
    pace = PollPace(RULES, EVEN, 0.0)
    assert [pace.failed(ErrorKind.RATE_LIMITED, 1, 0.0) for _ in range(3)] == [60, 120, 240]


def test_a_clock_that_was_set_back_saves_nothing_up() -> None:
    pace = PollPace(RULES, EVEN, 1000.0)
    pace.polled(PollKind.FULL, 200, 1000.0)
    due, _ = pace.next(0.0, expecting=True, moved=False, at_rest=False)
    assert math.isfinite(due)
    assert due > 0


@pytest.mark.parametrize(
    ("words", "error_kind"),
    [
        ("slurm_load_jobs error: Rate limit exceeded, please retry momentarily", ErrorKind.RATE_LIMITED),
        (
            "error: If munged is up, restart with --num-threads=10 ... Protocol authentication error",
            ErrorKind.AUTH,
        ),
        ("slurm_load_jobs error: Slurm backup controller in standby mode", ErrorKind.FAILING_OVER),
        ("slurm_load_jobs error: Socket timed out on send/recv operation", ErrorKind.NO_REPLY),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", ErrorKind.DOWN),
        ("Zero Bytes were transmitted or received", ErrorKind.NO_REPLY),
        ("Header lengths are longer than data received", ErrorKind.PARTIAL),
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
            None,
        ),
        ("scontrol: error: Access/permission denied", None),
    ],
)
def test_slurms_complaints_have_names_and_refusals_have_none(
    words: str, error_kind: ErrorKind | None
) -> None:
    assert error_kind_of(words) is error_kind


@pytest.mark.parametrize("fails", [False, True])
def test_commands_that_fail_take_no_more_from_regular_polls_than_others(fails: bool) -> None:
    """Eighty requests of submissions, of which the last one failed, put no regular poll off."""
    pace = PollPace(RULES, EVEN, 0.0)
    pace.polled(PollKind.FULL, COST[PollKind.FULL], 0.0)
    if fails:
        pace.failed(ErrorKind.NO_REPLY, 80, 0.0, polling=False)
    else:
        pace.spent(80, 0.0)
    polls: list[float] = []
    for _ in range(10):
        due, poll = pace.next(polls[-1] if polls else 0.0, expecting=False, moved=False, at_rest=False)
        polls.append(due)
        pace.polled(poll, COST[poll], due)
    gaps = [b - a for a, b in itertools.pairwise(polls)]
    assert set(gaps) == {60.0}


# ---------------------------------------------------------------- behind what was promised


def ready(now: float = 0.0, rules: PaceRules = RULES) -> PollPace:
    """One whole poll was made at `now`."""
    pace = PollPace(rules, EVEN, now)
    pace.begins(now)
    pace.polled(PollKind.FULL, 4, now)
    return pace


def following(pace: PollPace, now: float, **mood: bool) -> tuple[float, PollKind]:
    return pace.next(now, **{"expecting": False, "moved": False, "at_rest": False, **mood})


def test_polls_that_come_as_promised_are_not_behind() -> None:
    pace = ready()
    assert pace.behind(1000.0) == "", "nothing was promised yet"
    for minute in range(1, 5):
        following(pace, 60.0 * minute)
        pace.begins(60.0 * minute)
        assert pace.behind(60.0 * minute + 1) == ""
        pace.polled(PollKind.FULL, 4, 60.0 * minute + 1)
    following(pace, 300.0, at_rest=True)
    assert pace.behind(400.0) == "", "at rest every three minutes are promised"


def test_a_budget_that_is_spent_is_named_until_a_poll_comes_in_time() -> None:
    rules = replace(RULES, max_rpc_per_min=1.0)
    pace = ready(rules=rules)
    for _ in range(2):  # more than ten minutes' worth
        pace.polled(PollKind.FULL, 8, 0.0)
    due, poll = following(pace, 1.0)
    assert (due, poll) == (120.0, PollKind.FULL), "by an interval at most"
    for second in range(2, 120):
        following(pace, float(second))
    why = "the RPC budget is spent (cluster.max_rpc_per_min = 1)"
    assert pace.behind(119.0) == f"119 s since the last whole poll where 66 s were promised: {why}"
    pace.begins(120.0)
    pace.polled(PollKind.FULL, 4, 121.0)
    following(pace, 130.0)
    assert pace.behind(130.0) == f"121 s since the last whole poll where 66 s were promised: {why}", (
        "it was late"
    )


def test_a_slow_slurmctld_is_told_from_the_budget() -> None:
    pace = ready()
    following(pace, 59.0)
    pace.begins(60.0)
    assert pace.behind(100.0).endswith("66 s were promised: slurmctld is slow: the poll took 40 s")
    pace.polled(PollKind.FULL, 4, 110.0)
    pace.acted(95.0)
    following(pace, 205.0)
    pace.begins(206.0)
    assert pace.behind(207.0).endswith("slurmctld is slow: commands after the last poll took 95 s")
    pace.polled(PollKind.FULL, 4, 208.0)
    following(pace, 260.0)
    pace.begins(262.0)
    pace.polled(PollKind.FULL, 4, 263.0)
    assert pace.behind(264.0) == "", "one came in time"


def test_a_slurm_that_fails_and_fast_polls_without_a_budget_are_behind_too() -> None:
    pace = ready()
    following(pace, 60.0)
    pace.begins(60.0)
    pace.failed(ErrorKind.NO_REPLY, 1, 80.0)
    assert pace.behind(100.0).endswith("Slurm failed 1 times in a row")
    pace = ready()
    pace.spent(60, 0.0)
    following(pace, 10.0, expecting=True)
    assert pace.behind(10.0) == ""
    assert pace.behind(40.0) == (
        "something is expected, and the last poll was 40 s ago instead of 16 s: "
        "the RPC budget is spent (cluster.max_rpc_per_min = 4)"
    )
