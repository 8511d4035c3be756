"""The budget of samples beside an inference service: what each reading does to it, and what holds in any order of readings."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scavenger.errors import ConfigError
from scavenger.policy.serving import (
    CUTS,
    Objective,
    ServiceView,
    ServingDecision,
    ServingRules,
    ServingState,
    Verdict,
    begin,
    decide,
    first_read,
    slacks,
)

OBJECTIVE = Objective(ttft_p99_s=0.5, tpot_p99_s=0.06)
RULES = ServingRules(
    most=16,
    margin=0.1,
    raise_slack=0.2,
    steady_s=3.0,
    ease_every_s=10.0,
    raise_step=2,
    raise_every_s=1.0,
    burst_waiting=3,
    hold_s=5.0,
    hold_most_s=40.0,
    forgive_s=60.0,
    ceiling_cut=0.5,
    probe_s=4.0,
    blind_s=5.0,
)


def view(
    ttft: float | None = 0.1, tpot: float | None = 0.01, waiting: int = 0, samples: int = 0
) -> ServiceView:
    """Medians are a fifth of the p99s."""
    now = [None if value is None else value / 5 for value in (ttft, tpot)]
    return ServiceView(ttft, tpot, waiting, 4, samples, now[0], now[1])


class Service:
    """A policy that is asked each second; the engine generates as many samples as it may."""

    def __init__(self, rules: ServingRules = RULES) -> None:
        self.rules, self.now = rules, 0.0
        self.state: ServingState = begin(rules, 0.0)

    def ask(self, seen: ServiceView | None) -> ServingDecision:
        self.now += 1.0
        if seen is not None:
            seen = replace(seen, samples=self.state.budget)
        decision = decide(self.state, seen, OBJECTIVE, self.rules, self.now)
        self.state = decision.state
        return decision

    def quiet(self, seconds: int) -> ServingDecision:
        for _ in range(seconds):
            decision = self.ask(view())
        return decision


def test_slack_is_what_is_left_of_each_objective() -> None:
    assert slacks(view(0.125, 0.045), OBJECTIVE) == pytest.approx((0.75, 0.25))
    assert slacks(view(None, None), OBJECTIVE) == (1.0, 1.0)
    assert slacks(view(0.125, 0.045), Objective(tpot_p99_s=0.09)) == (None, pytest.approx(0.5))
    # Requests that nobody has begun for a second will have at least that TTFT.
    assert slacks(view(None, 0.045), OBJECTIVE, waited_s=1.0) == pytest.approx((-1.0, 0.25))


def test_an_objective_of_nothing_and_rules_that_cannot_be_are_refused() -> None:
    for stated in ((None, None), (0.0, None), (None, -1.0), (math.inf, 0.1)):
        with pytest.raises(ConfigError, match="objective"):
            Objective(*stated)
    for wrong in ({"most": 0}, {"margin": 1.0}, {"raise_slack": 0.9}, {"hold_s": 50.0}, {"ceiling_cut": 1.0}):
        with pytest.raises(ConfigError, match="cannot be"):
            replace(RULES, **wrong)


def test_it_sleeps_until_there_has_been_slack_for_long_enough_and_then_grows_by_steps() -> None:
    service = Service()
    found = [service.ask(view()) for _ in range(13)]
    assert [one.budget for one in found] == [0, 0, 0, 2, 4, 6, 8, 10, 12, 14, 16, 16, 16]
    assert found[2].verdict is Verdict.STEADYING
    assert found[3].verdict is Verdict.RAISED
    assert found[12].verdict is Verdict.FULL
    assert (
        found[3].reason
        == "p99 TTFT 100 of 500 ms, p99 TPOT 10 of 60 ms, 4 run, 0 wait: slack 0.80, the budget grows from 0 to 2"
    )
    assert found[3].inputs["prefill_slack"] == pytest.approx(0.8)
    assert found[3].inputs["budget_before"] == 0


def test_what_raises_it_and_what_lowers_it_are_apart() -> None:
    service = Service()
    service.quiet(6)
    for ttft in (0.36, 0.44, 0.36, 0.44):  # slack 0.28 and 0.12: between the margin and what raises
        kept = service.ask(view(ttft))
        assert (kept.verdict, kept.budget) == (Verdict.KEPT, 6)
    eased = service.ask(view(0.46))  # slack 0.08
    assert (eased.verdict, eased.budget) == (Verdict.EASED, 3)
    assert service.ask(view(0.46)).budget == 3, "the window has the same latencies in it for a while"
    assert service.ask(view(0.36)).budget == 3
    service.now += RULES.ease_every_s
    assert service.ask(view(0.46)).budget == 1


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        (view(0.5), Verdict.SLOW),
        (view(0.1, 0.061), Verdict.SLOW),
        (view(waiting=3), Verdict.BURST),
        (ServiceView(0.3, 0.01, 0, 4, 0, ttft_now_s=0.46), Verdict.BURST),
        (ServiceView(0.3, 0.01, 0, 4, 0, tpot_now_s=0.055), Verdict.BURST),
        (ServiceView(math.inf, None, 0, 4, 0), Verdict.SLOW),
    ],
)
def test_a_burst_and_a_slow_service_cut_it_at_once(seen: ServiceView, verdict: Verdict) -> None:
    service = Service()
    service.quiet(9)
    assert service.state.budget == 12
    cut = service.ask(seen)
    assert (cut.budget, cut.verdict) == (0, verdict)
    assert "cut from 12 to 0 for 5 s at least" in cut.reason
    assert cut.state.ceiling == 6


def test_requests_that_nobody_begins_are_late_before_any_latency_is_counted() -> None:
    service = Service()
    service.quiet(5)
    cut = service.ask(ServiceView(0.1, 0.01, 1, 4, 0, ttft_now_s=None, tpot_now_s=0.01))
    assert cut.verdict is Verdict.SLOW
    assert cut.inputs["waited_s"] == 1.0
    assert "none begun for 1.0 s" in cut.reason


def test_how_long_requests_wait_is_not_counted_from_before_a_pause() -> None:
    """The guest was stopped for a minute. In the second after it a request came, and has no token yet."""
    service = Service()
    budget = service.quiet(8).budget
    assert budget > 0
    paused = first_read(service.state, service.now + 60.0)
    waits = view(None, waiting=1, samples=budget)
    found = decide(paused, waits, OBJECTIVE, RULES, service.now + 60.2)
    assert found.inputs["waited_s"] == pytest.approx(0.2)
    assert found.budget >= budget
    assert decide(service.state, waits, OBJECTIVE, RULES, service.now + 60.2).budget == 0


def test_cuts_soon_after_each_other_are_held_twice_as_long_each_and_later_ones_are_not() -> None:
    service, holds = Service(), []
    for _ in range(5):
        service.quiet(int(service.state.hold_s) + 10)
        holds.append(service.ask(view(waiting=9)).state.hold_s)
    assert holds == [5.0, 10.0, 20.0, 40.0, 40.0]
    service.quiet(120)
    assert service.ask(view(waiting=9)).state.hold_s == 5.0


def test_the_ceiling_is_probed_upward_only_where_it_was_reached_and_held() -> None:
    service = Service()
    service.quiet(9)
    service.ask(view(waiting=9))
    assert service.state.ceiling == 6
    seen = [service.ask(view()).budget for _ in range(20)]
    # Held for 5 s, then by steps to the ceiling; from there a step each 4 s.
    assert seen == [0, 0, 0, 0, 2, 4, 6, 6, 6, 6, 6, 8, 8, 8, 8, 8, 10, 10, 10, 10]


def test_a_service_that_is_slow_without_us_blames_nobody() -> None:
    service = Service()
    service.quiet(9)
    before = replace(service.state, budget=0)
    late = decide(before, view(5.0, 1.0, waiting=50, samples=0), OBJECTIVE, RULES, service.now + 1)
    assert late.verdict is Verdict.SLOW_ALONE
    assert late.budget == 0
    assert (late.state.ceiling, late.state.hold_s, late.state.held_until) == (
        before.ceiling,
        before.hold_s,
        before.held_until,
    )
    # Nor one that might have generated and did not.
    idle = decide(service.state, view(5.0, samples=0), OBJECTIVE, RULES, service.now + 1)
    assert idle.verdict is Verdict.SLOW_ALONE
    assert idle.budget == 0
    assert idle.state.ceiling == service.state.ceiling


def test_what_a_cut_left_in_the_window_is_not_a_second_cut() -> None:
    service = Service()
    service.quiet(9)
    first = service.ask(view(0.6))
    still = replace(view(0.6, samples=12), generating=12)
    again = decide(first.state, still, OBJECTIVE, RULES, service.now + 1)
    assert again.verdict is Verdict.SLOW
    assert "cut before" in again.reason
    assert replace(again.state, read_at=0.0) == replace(first.state, read_at=0.0)


def test_the_window_begins_anew_once_when_the_samples_of_a_cut_have_ended() -> None:
    service = Service()
    service.quiet(9)
    assert not service.ask(replace(view(0.6), generating=8)).window_anew
    assert not service.ask(replace(view(0.6), generating=2)).window_anew, "they run yet"
    ended = service.ask(view(0.6))
    assert ended.window_anew
    assert ended.budget == 0
    held_until = ended.state.held_until
    assert not service.ask(view()).window_anew, "once a cut"
    while service.now + 1 < held_until:
        assert service.ask(view()).budget == 0, "a new window does not shorten the hold"
    assert service.quiet(2).budget > 0
    assert not service.quiet(3).window_anew


def test_a_raise_begins_no_window() -> None:
    """The engine was slow to stop, and has a budget again: what it generates now is no cut's."""
    service = Service()
    service.quiet(9)
    service.ask(replace(view(0.6), generating=8))
    while service.state.budget == 0:
        assert not service.ask(replace(view(), generating=1)).window_anew
    assert not service.ask(view()).window_anew


def test_the_oldest_request_without_a_token_counts_before_it_is_late() -> None:
    service = Service()
    service.quiet(9)
    assert service.ask(replace(view(), oldest_s=0.4)).budget > 0
    cut = service.ask(replace(view(), oldest_s=0.5))
    assert (cut.verdict, cut.budget) == (Verdict.SLOW, 0)
    assert "the oldest has no token for 500 ms" in cut.reason


def test_a_service_that_cannot_be_read_is_given_nothing_after_a_while() -> None:
    service = Service()
    service.quiet(6)
    assert [service.ask(None).budget for _ in range(6)] == [6, 6, 6, 6, 0, 0]
    assert service.ask(None).verdict is Verdict.BLIND
    assert service.ask(view()).budget == 0, "slack is waited for again"


def test_it_says_of_a_service_that_never_came_that_it_was_not_read_yet() -> None:
    service = Service()
    assert "not read yet" in service.ask(None).reason
    service.ask(view())
    assert "last read" in service.ask(None).reason


latencies = st.one_of(st.none(), st.floats(0.0, 2.0), st.just(math.inf))
views = st.builds(
    ServiceView, latencies, latencies.map(lambda s: s if s is None else s / 10), st.integers(0, 6), st.integers(0, 50),
    st.just(0), latencies, latencies.map(lambda s: s if s is None else s / 10),
)  # fmt: skip
readings = st.lists(st.tuples(st.one_of(st.none(), views, st.just(view())), st.floats(0.1, 4.0)), max_size=60)


@settings(max_examples=60, deadline=None)
@given(readings)
def test_in_any_order_of_readings_it_admits_into_slack_only(
    given_readings: list[tuple[ServiceView | None, float]],
) -> None:
    now, state = 0.0, begin(RULES, 0.0)
    for seen, seconds in given_readings:
        now += seconds
        seen = None if seen is None else replace(seen, samples=state.budget)
        before = state
        decision = decide(before, seen, OBJECTIVE, RULES, now)
        state = decision.state
        assert 0 <= state.budget <= state.ceiling <= RULES.most
        assert RULES.hold_s <= state.hold_s <= RULES.hold_most_s
        assert decision.reason
        assert all(not math.isnan(value) for value in decision.inputs.values())
        if decision.verdict in CUTS:
            assert state.budget == 0
        if state.budget > before.budget:
            assert decision.verdict is Verdict.RAISED
            assert state.budget - before.budget <= RULES.raise_step
            assert seen is not None
            assert seen.waiting == 0
            assert (
                min(s for s in slacks(seen, OBJECTIVE) if s is not None) >= RULES.margin + RULES.raise_slack
            )
            assert now >= before.held_until
            assert now - before.raised_at >= RULES.raise_every_s
            assert before.steady_at is not None
            assert now - before.steady_at >= RULES.steady_s
        if seen is not None and (
            min(s for s in slacks(seen, OBJECTIVE) if s is not None) <= 0 or seen.waiting >= 3
        ):
            assert state.budget == 0
        if seen is not None and not seen.samples:
            assert state.ceiling >= before.ceiling
            assert state.held_until == before.held_until


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.one_of(st.none(), views), st.floats(0.1, 4.0)), max_size=30))
def test_with_slack_again_it_opens_within_a_bounded_time(
    given_readings: list[tuple[ServiceView | None, float]],
) -> None:
    """After anything whatsoever: the longest hold, the time of steady slack, and two readings."""
    now, state = 0.0, begin(RULES, 0.0)
    for seen, seconds in given_readings:
        now += seconds
        state = decide(state, seen, OBJECTIVE, RULES, now).state
    opened = now + RULES.hold_most_s + RULES.steady_s + 2
    while state.budget == 0 and now < opened:
        now += 1.0
        state = decide(state, view(), OBJECTIVE, RULES, now).state
    assert state.budget > 0
