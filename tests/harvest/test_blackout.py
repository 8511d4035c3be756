"""Dated blackouts, caps by partition and GRES type, and what single owners may use: pure, and on the local backend."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scavenger.cluster.model import JobState, Partition, PreemptMode
from scavenger.config import Blackout, DaemonConfig, HarvestSection, OwnersSection
from scavenger.harvest.decide.actions import (
    BlackoutTime,
    Cancel,
    CancelPending,
    DrainAllocated,
    HarvestCode,
    HarvestDecision,
    HarvestLimits,
    OurJob,
    OwnerRule,
    Submit,
)
from scavenger.harvest.decide.decide import allot, decide
from scavenger.harvest.decide.drain import leave_for_blackout_at
from scavenger.harvest.limits import blackouts, limits_of, owner_rules
from scavenger.harvest.track.node_health import Health, HealthRules
from scavenger.ledger import records as rec
from scavenger.policy.fleet_size import Demand
from scavenger.router.core.events import IntentRevoked
from tests.harvest.conftest import world  # noqa: F401  a fixture
from tests.harvest.flat_limits import limits_with
from tests.harvest.test_policy import demand, mine, submits
from tests.harvest.views import PARTITIONS, node, ours, view
from tests.harvest.world import World, running, until

NOW = 100_000.0
#: Asked to leave at 90 s before a blackout; no engine starts in the 600 s before that.
LIMITS = limits_with(
    "scavenge", max_engines=8, max_pending=4, drain_before_s=30.0, min_life_s=630.0, horizon_s=60.0
)


def dark(begins_in: float, lasts: float = 3600.0) -> HarvestLimits:
    return replace(LIMITS, blackouts=(BlackoutTime(NOW + begins_in, NOW + begins_in + lasts, "exams"),))


def decided(limits: HarvestLimits, jobs: Sequence[OurJob] = (), want: int = 3) -> HarvestDecision:
    listed = [
        ours(job.intent_id, job.job_id, JobState.PENDING if job.waits else JobState.RUNNING) for job in jobs
    ]
    return decide(view(NOW, listed), [demand(want)], jobs, limits, NOW)


def test_long_before_a_blackout_engines_start_and_slurm_ends_them_in_time() -> None:
    found = submits(decided(dark(7200)))
    assert len(found) == 3
    assert {one.most_s for one in found} == {7200 - 30.0}, "should the daemon be away"
    assert {one.most_s for one in submits(decided(LIMITS))} == {0.0}


@pytest.mark.parametrize(("begins_in", "starts"), [(600 + 90, True), (600 + 90 - 1, False)])
def test_no_engine_starts_that_would_not_have_its_least_life_before(begins_in: float, starts: bool) -> None:
    found = decided(dark(begins_in))
    assert bool(submits(found)) == starts
    assert found.code is (HarvestCode.OWN_PENDING if starts else HarvestCode.BLACKOUT)
    if not starts:
        assert "a blackout begins in 689 s (exams): no engine would live for long enough" in found.reason


def test_what_waits_is_cancelled_before_a_blackout_and_what_runs_stays() -> None:
    jobs = [mine(1, node="node1"), mine(2, waits=True)]
    found = decided(dark(300), jobs)
    assert [(type(action), action.code) for action in found.actions if not isinstance(action, Submit)] == [
        (CancelPending, HarvestCode.BLACKOUT)
    ]


def test_engines_are_drained_before_a_blackout_begins() -> None:
    jobs = [mine(1, node="node1"), mine(2, node="node1", connected=False)]
    assert leave_for_blackout_at(dark(90).blackouts[0], LIMITS) == NOW
    found = decided(dark(90), jobs)
    assert [(type(action), action.code) for action in found.actions] == [
        (Cancel, HarvestCode.BLACKOUT),
        (DrainAllocated, HarvestCode.BLACKOUT),
    ]
    assert "a blackout begins in 90 s (exams)" in found.actions[-1].reason  # type: ignore[union-attr]
    assert decided(dark(91), jobs).actions == ()


def test_nothing_is_harvested_in_a_blackout_and_all_is_after_it() -> None:
    found = decided(dark(-10), [mine(1, node="node1")])
    assert [action.code for action in found.actions] == [HarvestCode.BLACKOUT]  # type: ignore[union-attr]
    assert (found.code, "a blackout is on (exams)" in found.reason) == (HarvestCode.BLACKOUT, True)
    assert submits(decided(LIMITS))


@given(st.floats(-5000, 5000), st.lists(st.booleans(), max_size=6))
def test_whatever_is_there_no_engine_of_ours_is_asked_for_or_kept_in_a_blackout(
    begins_in: float, waits: list[bool]
) -> None:
    jobs = [mine(n, waits=waiting, node="" if waiting else "node1") for n, waiting in enumerate(waits)]
    found = decided(dark(begins_in, 10_000.0), jobs)
    gone = {action.intent_id for action in found.actions if not isinstance(action, Submit)}
    if begins_in <= 90:
        assert gone == {job.intent_id for job in jobs}
        assert not submits(found)
    elif begins_in < 690:
        assert not submits(found)


# ---------------------------------------------------------------- as it is written


def harvest(**keys: Any) -> HarvestSection:
    return HarvestSection.model_validate(keys)


def test_a_blackout_is_of_the_zone_that_it_names_or_of_the_file_s() -> None:
    begins = datetime(2026, 12, 24, 17, tzinfo=UTC).timestamp()
    naive = {"start": "2026-12-24T18:00:00", "end": "2026-12-27T08:00:00", "reason": "holidays"}
    aware = {"start": "2026-12-24T18:00:00+01:00", "end": "2026-12-27T07:00:00Z"}
    berlin = harvest(timezone="Europe/Berlin", blackout=[naive])
    (one,) = blackouts(berlin, begins - 1e6)
    assert (one.start, one.end - one.start) == (begins, 62 * 3600)
    assert one.words == "from 2026-12-24 18:00 to 2026-12-27 08:00 Europe/Berlin: holidays"
    (other,) = blackouts(harvest(blackout=[aware]), begins - 1e6)
    assert (other.start, other.end) == (one.start, one.end)
    assert [b.start for b in blackouts(harvest(blackout=[naive]), begins)] == [begins + 3600], "UTC"
    assert blackouts(berlin, one.end) == (), "it is over"
    two = harvest(
        timezone="Europe/Berlin",
        blackout=[naive, {"start": "2026-12-01T00:00:00", "end": "2026-12-02T00:00:00"}],
    )
    assert [b.start for b in blackouts(two, 0.0)] == sorted(b.start for b in blackouts(two, 0.0))


@pytest.mark.parametrize(
    "wrong",
    [
        {"start": "2026-12-24T18:00:00", "end": "2026-12-24T18:00:00"},
        {"start": "2026-12-24T18:00:00Z", "end": "2026-12-24T18:30:00+01:00"},
    ],
)
def test_a_blackout_that_ends_before_it_begins_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="is not after its start"):
        harvest(blackout=[wrong])


def test_a_time_that_clocks_show_twice_or_never_makes_the_blackout_longer_and_not_shorter() -> None:
    def span(start: str, end: str) -> tuple[datetime, datetime]:
        (one,) = blackouts(harvest(timezone="Europe/Berlin", blackout=[{"start": start, "end": end}]), 0.0)
        return datetime.fromtimestamp(one.start, UTC), datetime.fromtimestamp(one.end, UTC)

    back = span("2026-10-25T02:15:00", "2026-10-25T02:30:00")
    assert back == (datetime(2026, 10, 25, 0, 15, tzinfo=UTC), datetime(2026, 10, 25, 1, 30, tzinfo=UTC)), (
        "from the first 02:15 to the second 02:30"
    )
    forward = span("2026-03-29T02:30:00", "2026-03-29T03:15:00")
    assert forward[0] <= datetime(2026, 3, 29, 1, tzinfo=UTC), "before the hour that is left out"
    assert forward[1] == datetime(2026, 3, 29, 1, 15, tzinfo=UTC)
    exact = span("2026-10-25T02:15:00+01:00", "2026-10-25T02:30:00+01:00")
    assert exact == (datetime(2026, 10, 25, 1, 15, tzinfo=UTC), back[1]), "an offset leaves no choice"
    for wrong in ("2026-10-25T02:15:00", "2026-10-25T02:10:00"):
        with pytest.raises(ValueError, match="is not after its start"):
            span("2026-10-25T02:15:00", wrong)


def test_the_limits_of_an_hour_have_the_file_s_blackouts_caps_and_owners() -> None:
    config = DaemonConfig.model_validate(
        {
            "daemon": {"state_dir": "/s"},
            "harvest": {
                "max_gpus_by_partition": {"normal": 2},
                "max_gpus_by_type": {"h100": 3},
                "blackout": [{"start": "2030-01-01T00:00:00Z", "end": "2030-01-02T00:00:00Z"}],
            },
            "owners": {"share_of": {"ada": 3}, "gpu_types_of": {"bob": ["a100"]}},
        }
    )
    found = limits_of(config, Health(HealthRules(3, 600.0, 5.0)), 30.0, 0.0)
    assert (found.caps.by_partition, found.caps.by_type) == ((("normal", 2),), (("h100", 3),))
    assert len(found.blackouts) == 1
    assert found.owners == (OwnerRule("ada", 3), OwnerRule("bob", 1, frozenset({"a100"})))
    assert owner_rules(OwnersSection()) == ()


# ---------------------------------------------------------------- caps and owners


def two_kinds() -> Any:
    """Node3 is an a100, and the only one of partition `small`."""
    nodes = [node("node1"), node("node2"), replace(node("node3"), gpu_type="a100")]
    nodes[2] = replace(nodes[2], partitions=nodes[2].partitions | {"small"})
    small = Partition("small", frozenset({"node3"}), 20, PreemptMode.OFF, 0.0, float("inf"))
    return replace(view(NOW, (), nodes), partitions=(*PARTITIONS, small))


def asked(limits: HarvestLimits, jobs: Sequence[OurJob] = (), *wants: Demand) -> HarvestDecision:
    return decide(two_kinds(), list(wants) or [demand(9)], jobs, limits, NOW)


MANY = limits_with("scavenge", max_engines=20, max_pending=20, pin=True)


def by_node(found: HarvestDecision) -> dict[str, int]:
    places = [one.nodelist[0] for one in submits(found)]
    return {name: places.count(name) for name in sorted(set(places))}


@pytest.mark.parametrize("cap", [{"by_partition": (("small", 1),)}, {"by_type": (("a100", 1),)}])
def test_a_cap_bounds_what_we_hold_there_and_nothing_else(cap: dict[str, Any]) -> None:
    assert by_node(asked(MANY, (), demand(12))) == {"node1": 4, "node2": 4, "node3": 4}
    found = asked(limits_with(MANY, **cap), (), demand(12))
    assert by_node(found) == {"node1": 4, "node2": 4, "node3": 1}
    assert found.code is HarvestCode.PER_PARTITION
    assert "(1)" in found.reason
    assert "max_gpus_by_" in found.reason
    unpinned = asked(limits_with(MANY, pin=False, **{key: ((name, 0),) for key, ((name, _),) in cap.items()}))
    assert {one.exclude for one in submits(unpinned)} == {("node3",)}


CAPPED = [{"by_partition": (("small", 1),)}, {"by_type": (("a100", 1),)}]


@pytest.mark.parametrize("cap", CAPPED)
def test_where_slurm_chooses_no_more_jobs_may_start_under_a_cap_than_it_allows(cap: dict[str, Any]) -> None:
    limits = limits_with(MANY, pin=False, **cap)
    assert [one.exclude for one in submits(asked(limits, (), demand(12)))].count(()) == 1
    waiting = mine(1, waits=True)
    found = submits(asked(limits, [waiting], demand(12)))
    assert len(found) == 7, "two nodes less what waits"
    assert {one.exclude for one in found} == {("node3",)}, "the one that waits may start there"


@pytest.mark.parametrize("cap", CAPPED)
def test_a_job_that_waits_for_a_busy_node_counts_against_its_caps(cap: dict[str, Any]) -> None:
    """As one that Slurm requeued. It may go to another node under the same cap, and with an engine there it is too much."""
    cluster = two_kinds()
    fourth = replace(cluster.nodes[2], name="node4")
    full = replace(cluster.nodes[2], gpus_allocated=4)
    parts = [
        replace(one, nodes=one.nodes | {"node4"}) if "node3" in one.nodes else one
        for one in cluster.partitions
    ]
    waiting = mine(1, waits=True, pinned="node3", since=NOW)
    queued = ours(waiting.intent_id, waiting.job_id)
    limits = limits_with(MANY, fresh_after_s=60.0, **cap)

    def played(*jobs: OurJob, since: float = NOW, **seen: Any) -> HarvestDecision:
        nodes = (*cluster.nodes[:2], full, fourth)
        now = replace(cluster, **{"nodes": nodes, "partitions": tuple(parts), "jobs": (queued,), **seen})
        return decide(now, [demand(12)], [replace(waiting, since=since), *jobs], limits, NOW)

    assert by_node(played()) == {"node1": 4, "node2": 4}
    moved = played(since=NOW - 100.0)
    assert by_node(moved) == {"node1": 4, "node2": 4, "node4": 1}
    assert [one.code for one in moved.actions if isinstance(one, CancelPending)] == [HarvestCode.FRESH]
    engine = mine(2, node="node4")
    there = {"nodes": ("node4",), "gpus_by_node": (("node4", 1),)}
    both = (queued, ours(engine.intent_id, engine.job_id, JobState.RUNNING, **there))
    (cancelled,) = [one for one in played(engine, jobs=both).actions if isinstance(one, CancelPending)]
    assert (cancelled.intent_id, cancelled.code) == (waiting.intent_id, HarvestCode.PER_PARTITION)
    assert "(1): 1 GPUs of ours are there" in cancelled.reason


def test_an_owner_s_engines_start_on_its_types_and_partitions_only() -> None:
    want = replace(demand(9), owner="ada")
    a100 = replace(MANY, owners=(OwnerRule("ada", gpu_types=frozenset({"a100"})),))
    found = asked(a100, (), want)
    assert by_node(found) == {"node3": 4}
    assert (found.code, "an owner may not use" in found.reason) == (HarvestCode.PER_OWNER_NODES, True)
    other = replace(demand(4, run_id=2), owner="bob")
    assert [one.run_id for one in submits(asked(a100, (), want, other))].count(2) == 4, "others go on"
    small = replace(MANY, owners=(OwnerRule("ada", partitions=frozenset({"small"})),))
    assert by_node(asked(small, (), want)) == {"node3": 4}
    unpinned = asked(limits_with(small, pin=False), (), want)
    assert {one.exclude for one in submits(unpinned)} == {("node1", "node2")}


def test_shares_give_turns() -> None:
    wants = [replace(demand(9, run_id=n), owner=owner) for n, owner in ((1, "ada"), (2, "bob"), (3, "bob"))]
    assert allot(wants, 8) == {1: 4, 2: 2, 3: 2}
    assert allot(wants, 8, None, {"ada": 3}) == {1: 6, 2: 1, 3: 1}
    assert allot(wants, 1, None, {"bob": 5}) == {1: 1, 2: 0, 3: 0}, "of equals the first"
    assert allot(wants, 30, None, {"ada": 3}) == {1: 9, 2: 9, 3: 9}, "a share takes nothing that nobody wants"
    limits = replace(limits_with("scavenge", max_engines=4, max_pending=4), owners=(OwnerRule("ada", 3),))
    jobs = [mine(n, node="node1", run_id=2) for n in range(4)]
    found = decide(
        view(NOW, [ours(j.intent_id, j.job_id, JobState.RUNNING) for j in jobs]), wants[:2], jobs, limits, NOW
    )
    why = [action.reason for action in found.actions if isinstance(action, DrainAllocated)]
    assert len(why) == 3
    assert "run run2 may use 1 engines (owners.share_of: bob has 1)" in why[0]


FOUR = limits_with("scavenge", max_engines=4, max_pending=4, pin=True)
ADA, BOB = replace(demand(9), owner="ada"), replace(demand(9, run_id=2), owner="bob")


def played(rule: OwnerRule, *jobs: OurJob, taken: int = 0) -> HarvestDecision:
    """Bob's engines and ada's on two kinds of nodes, of whose only a100 other users hold `taken` GPUs."""
    shown = []
    for one in jobs:
        where = {"nodes": (one.node,), "gpus_by_node": ((one.node, one.gpus),)}
        shown.append(ours(one.intent_id, one.job_id, JobState.RUNNING, **where))
    held = Counter(one.node for one in jobs)
    cluster = two_kinds()
    nodes = [
        replace(one, gpus_allocated=held[one.name] + (taken if one.name == "node3" else 0))
        for one in cluster.nodes
    ]
    cluster = replace(cluster, nodes=tuple(nodes), jobs=tuple(shown))
    return decide(cluster, [ADA, BOB], jobs, replace(FOUR, owners=(rule,)), NOW)


def drained(found: HarvestDecision) -> list[str]:
    return [action.intent_id for action in found.actions if isinstance(action, DrainAllocated)]


V100, A100 = (OwnerRule("ada", 3, gpu_types=frozenset({kind})) for kind in ("v100", "a100"))


@pytest.mark.parametrize(("rule", "taken"), [(V100, 0), (A100, 4)])
def test_who_may_use_no_node_with_room_takes_nobody_s_turn(rule: OwnerRule, taken: int) -> None:
    """There is no such node, or it is full with other users' jobs."""
    four = [mine(n, node="node1", run_id=2, owner="bob") for n in range(4)]
    assert not drained(played(rule, *four, taken=taken))
    assert [one.run_id for one in submits(played(rule, taken=taken))] == [2, 2, 2, 2]


def test_engines_are_drained_where_who_needs_their_node_may_start() -> None:
    busy = [mine(n, node="node1", run_id=2, owner="bob") for n in range(3)]
    there = mine(3, node="node3", run_id=2, owner="bob", leases=9)
    found = played(A100, *busy, there, taken=3)
    assert drained(found) == [there.intent_id], "one, though ada has three turns of four"
    hers = mine(4, node="node3", run_id=1, owner="ada")
    after = played(A100, *busy, hers, taken=3)
    assert not after.actions, "and that is stable"
    assert len(drained(played(A100, *busy, there))) == 3, "three GPUs are idle there: any will do"


def test_an_engine_that_runs_where_its_owner_may_start_no_more_stays() -> None:
    hers = mine(0, node="node1", run_id=1, owner="ada")
    found = played(V100, hers)
    assert not drained(found)
    assert [one.run_id for one in submits(found)] == [2, 2, 2]


# ---------------------------------------------------------------- on the local backend


def test_engines_are_gone_before_a_blackout_begins_and_come_back_after_it(world: World) -> None:  # noqa: F811
    begins = datetime.now(UTC) + timedelta(seconds=6)
    dates = Blackout(start=begins, end=begins + timedelta(seconds=4), reason="a course")

    async def play() -> None:
        world.want(2)
        harvester = world.harvester(
            drain_notice_s=1.0, drain_before_s=0.5, min_runtime_s=0.5, time_limit_s=600.0, blackout=(dates,)
        )
        async with running(harvester):
            await until("two engines hold GPUs", lambda: len(world.of(rec.AllocationStarted)) == 2)
            await until("both are gone", lambda: len(world.of(rec.AllocationEnded)) == 2)
            assert time.time() < begins.timestamp(), "before it begins"
            before = len(world.of(rec.JobIntended))
            await until("it is on", lambda: time.time() > begins.timestamp() + 2)
            assert not world.jobs(), "nothing is there"
            assert len(world.of(rec.JobIntended)) == before
            await until("they come back", lambda: len(world.of(rec.AllocationStarted)) == 4)
            assert time.time() >= dates.end.timestamp()

    asyncio.run(play())
    assert any("a course" in one.reason for one in world.of(rec.Decision))


def test_engines_leave_for_a_blackout_while_slurm_does_not_answer(world: World) -> None:  # noqa: F811
    begins = datetime.now(UTC) + timedelta(seconds=6)
    dates = Blackout(start=begins, end=begins + timedelta(hours=1), reason="maintenance of slurmctld")

    async def play() -> None:
        world.want(1)
        harvester = world.harvester(
            drain_notice_s=1.0, drain_before_s=0.5, min_runtime_s=0.5, time_limit_s=600.0, blackout=(dates,)
        )
        async with running(harvester):
            await until("it holds", lambda: world.of(rec.AllocationStarted))
            world.cluster.fail_view = True
            await until("it is not seen", lambda: world.events("cluster_unavailable"))
            assert not world.of(IntentRevoked), "the blackout is not near yet"
            await until("it is asked to leave", lambda: world.of(IntentRevoked))
            assert time.time() < begins.timestamp(), "before it begins"

    asyncio.run(play())
    (asked,) = world.acted("drain")
    assert (asked.code, "maintenance of slurmctld" in asked.reason) == ("blackout", True)
    assert "Slurm does not answer" in asked.reason
