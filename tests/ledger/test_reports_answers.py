"""Reports over small histories whose answers are counted by hand, alike on both databases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from scavenger.cluster.model import JobState, Reservation
from scavenger.harvest.decide.actions import BlackoutTime, OwnerRule
from scavenger.harvest.decide.decide import HarvestCode, HarvestDecision, HarvestLimits, OurJob, decide
from scavenger.ledger import records as r
from scavenger.ledger.read.reader import read_snapshot
from scavenger.ledger.store import open_engine
from scavenger.policy.fleet_size import Benefit, Demand
from scavenger.policy.forecast.survival import prior
from scavenger.policy.idle_gpus import Idle, node_class
from tests.harvest.flat_limits import limits_with
from tests.harvest.views import job, node, ours, view
from tests.ledger.examples import CONFIG, T0, chunk, group, moved_group, prologue, written
from tests.ledger.test_reports import answers

DAY = "2026-09-21"


def written_until(url: str, submissions: Sequence[Sequence[r.Record]], now: float) -> None:
    """A ledger whose last commit was at `now`."""
    written(url, submissions)
    engine = open_engine(url)
    with engine.connect() as connection:
        connection.execute(sa.text("UPDATE generations SET committed_at = :now"), {"now": now})
        connection.commit()
    engine.dispose()


def picked(rows: Sequence[dict[str, Any]], *columns: str) -> list[tuple[Any, ...]]:
    return [tuple(row[column] for column in columns) for row in rows]


def run(run_id: int, name: str, owner_key: str) -> r.RunCreated:
    return r.RunCreated(run_id, name, owner_key, 17, CONFIG, "{}", "/models/tokenizer.json", T0)


def engine(
    worker_id: int, intent_id: str, node: str, run_id: int = 1, incarnation: int = 0
) -> r.WorkerJoined:
    return r.WorkerJoined(
        worker_id, run_id, "harvested", intent_id, f"s{worker_id}", incarnation, 600, node, 1, "vllm", T0
    )


def held(
    intent_id: str, gpus: int, from_s: float, to_s: float | None, why: str = "preempted", run_id: int = 1
) -> list[r.Record]:
    """A job that held `gpus` from one to another second after T0."""
    records: list[r.Record] = [
        r.JobIntended(intent_id, run_id, "scavenge", gpus, "key", T0),
        r.JobSubmitted(intent_id, 700 + int(intent_id[1:]), T0),
        r.AllocationStarted(intent_id, 0, 700 + int(intent_id[1:]), "n5", gpus, T0 + from_s),
    ]
    return records if to_s is None else [*records, r.AllocationEnded(intent_id, 0, why, T0 + to_s)]


# ---------------------------------------------------------------- now


def flight() -> list[list[r.Record]]:
    """Six open samples: 11, 12 and 41 at worker 2; 42 lost its engine; 31 and 32 were never leased."""
    return [
        prologue(),
        moved_group()[:8],
        [
            r.WorkerLeft(1, "silent", False, 1, 5, 2, T0 + 8),
            group(30, 31, 2, 2, 1),
            group(40, 41, 2, 2, 1),
            r.LeaseGranted(41, 1, 2, 1, 0, T0 + 100),
            r.LeaseGranted(42, 1, 1, 1, 0, T0 + 20),
            r.LeaseEnded(42, 1, "worker left", 0, 0, T0 + 50),
            chunk(41, 1, 0, 2, 2, at=T0 + 290),
        ],
    ]


def test_what_is_in_flight_is_told_by_run_node_and_job(url: str) -> None:
    written_until(url, flight(), T0 + 300)
    assert picked(
        answers(url, "in_flight"),
        "run",
        "kind",
        "node",
        "job_id",
        "engines",
        "samples",
        "accepted_tokens",
        "oldest_lease_s",
        "most_moves",
    ) == [
        ("sorting", "reserved", "n0", 100, 1, 3, 11, 294, 1),
        ("sorting", "waiting", "", None, 0, 3, 0, None, 0),
    ]


def test_who_holds_what_lease(url: str) -> None:
    written_until(url, flight(), T0 + 300)
    columns = (
        "sample_id",
        "epoch",
        "worker_id",
        "node",
        "job_id",
        "tokens_when_granted",
        "accepted_tokens",
        "lease_age_s",
        "last_tokens_unix_s",
    )
    assert picked(answers(url, "open_leases"), *columns) == [
        (12, 1, 2, "n0", 100, 0, 4, 294, T0 + 7),
        (11, 2, 2, "n0", 100, 5, 5, 291, None),
        (41, 1, 2, "n0", 100, 0, 2, 200, T0 + 290),
    ]


def test_a_sample_stalls_when_no_token_comes_for_two_minutes(url: str) -> None:
    written_until(url, flight(), T0 + 300)
    columns = (
        "sample_id",
        "state",
        "accepted_tokens",
        "since_unix_s",
        "silent_s",
        "worker_id",
        "worker_end_reason",
        "lease_end_reason",
    )
    assert picked(answers(url, "stalled_samples"), *columns) == [
        (12, "leased", 4, T0 + 7, 293, 2, "", ""),
        (11, "leased", 5, T0 + 9, 291, 2, "", ""),
        (42, "waits for an engine", 0, T0 + 50, 250, 1, "silent", "worker left"),
    ]


def test_no_sample_stalls_before_its_two_minutes(url: str) -> None:
    written_until(url, flight(), T0 + 120)
    assert answers(url, "stalled_samples") == []


# ---------------------------------------------------------------- GPU-hours, waste and speed


def fleet() -> list[list[r.Record]]:
    """Ada's run held 2 GPUs for 30 minutes (100 tokens) and four starts for nothing; the other user's run holds 4 GPUs."""
    return [
        [
            run(1, "sorting", "KEY-A"),
            run(2, "adding", "KEY-B"),
            r.Event("owner_enrolled", 0, "KEY-A", "adam", "{}", T0),
            r.Event("owner_enrolled", 0, "KEY-A", "ada", "{}", T0 + 1),
            *held("i1", 2, 0, 1800),
            engine(1, "i1", "n5"),
            *held("i2", 1, 100, 3700, "failed"),  # no engine ever joined
            *held("i3", 1, 200, 260),  # an engine without a sample
            engine(3, "i3", "n5"),
            r.WorkerLeft(3, "goodbye", True, 0, 0, 0, T0 + 259),
            *held("i4", 2, 300, 330, "cancelled"),  # an engine with a sample, but without a token
            engine(4, "i4", "n5"),
            *held("i5", 4, 0, None, run_id=2),
            engine(5, "i5", "n5", run_id=2),
            r.JobIntended("i6", 1, "scavenge", 1, "key", T0),
            r.JobSubmitted("i6", 706, T0 + 5),
            r.JobEnded("i6", "CANCELLED", "given back: its run has no demand", T0 + 50),
            r.JobIntended("i7", 1, "scavenge", 1, "key", T0),
            r.JobEnded("i7", "LOST", "the submission never arrived", T0 + 60),
            r.JobIntended("i8", 1, "scavenge", 1, "key", T0),  # still wanted: no waste yet
            group(10, 11, 2, 1, 1),
            r.LeaseGranted(11, 1, 1, 1, 0, T0 + 10),
            chunk(11, 1, 0, 100, 1),
            r.LeaseEnded(11, 1, "finished", 100, 0, T0 + 90),
            r.LeaseGranted(12, 1, 4, 1, 0, T0 + 310),
            r.LeaseEnded(12, 1, "worker left", 0, 0, T0 + 330),
        ]
    ]


def test_gpu_hours_are_told_by_user(url: str) -> None:
    written_until(url, fleet(), T0 + 900)
    assert picked(
        answers(url, "harvested_gpu_hours_by_user"),
        "owner",
        "run",
        "allocations",
        "gpu_hours",
        "wasted_gpu_hours",
        "tokens",
    ) == [("ada", "sorting", 4, 2.0333, 1.0333, 100), ("KEY-B", "adding", 1, 1, 0, 0)]
    days = answers(url, "harvested_gpu_hours_by_day")
    assert picked(days, "day_utc", "node", "owner", "allocations", "gpu_hours") == [
        (DAY, "n5", "KEY-B", 1, 1),
        (DAY, "n5", "ada", 4, 2.0333),
    ]


def changed_hands() -> list[list[r.Record]]:
    """An engine of run 1 works for run 2 after 600 s, and for run 1 again after 900 s; its job is preempted after 1800 s. The first part
    brought a token, the others none."""
    i5 = held("i5", 1, 0, 1800)
    return [
        [run(1, "sorting", "KEY-A"), run(2, "adding", "KEY-B")],
        [r.VersionPublished(n, 1, 0, 1, b"root1", b"m", 1, T0) for n in (1, 2)],
        i5[:-1],
        [
            engine(1, "i5", "n5"),
            group(10, 11, 1, 1, 1),
            r.LeaseGranted(11, 1, 1, 1, 0, T0 + 10),
            chunk(11, 1, 0, 1, 1, at=T0 + 11),
            r.LeaseEnded(11, 1, "handed over", 1, 0, T0 + 600),
            r.WorkerLeft(1, "run adding gains more", False, 1, 1, 0, T0 + 600),
            r.JobChangedHands("i5", 2, "key2", 1, T0, T0 + 600),
            engine(2, "i5", "n5", run_id=2),
        ],
        [
            r.WorkerLeft(2, "run sorting gains more", False, 0, 0, 0, T0 + 900),
            r.JobChangedHands("i5", 1, "key3", 2, T0 + 600, T0 + 900),
            engine(3, "i5", "n5"),
            r.WorkerLeft(3, "SIGTERM", True, 0, 0, 0, T0 + 1799),
            i5[-1],
        ],
    ]


def test_gpu_hours_of_an_engine_that_changed_hands_are_each_run_s_own(url: str) -> None:
    written_until(url, changed_hands(), T0 + 3600)
    columns = ("owner", "run", "allocations", "gpu_hours", "wasted_gpu_hours", "tokens")
    assert picked(answers(url, "harvested_gpu_hours_by_user"), *columns) == [
        ("KEY-A", "sorting", 2, 0.4167, 0.25, 1),
        ("KEY-B", "adding", 1, 0.0833, 0.0833, 0),
    ]
    days = answers(url, "harvested_gpu_hours_by_day")
    assert picked(days, "owner", "allocations", "gpu_hours") == [("KEY-A", 2, 0.4167), ("KEY-B", 1, 0.0833)]
    cost = answers(url, "run_cost")
    assert picked(cost, "run", "harvested_gpu_hours", "wasted_gpu_hours", "harvested_tokens") == [
        ("sorting", 0.4167, 0.25, 1),
        ("adding", 0.0833, 0.0833, 0),
    ]
    assert picked(answers(url, "harvested_gpu_hours_by_account"), "owner", "gpu_hours") == [
        ("KEY-A", 0.4167),
        ("KEY-B", 0.0833),
    ]


def test_only_the_last_engine_of_a_job_that_changed_hands_was_lost(url: str) -> None:
    written_until(url, changed_hands(), T0 + 3600)
    assert picked(answers(url, "lost_engines"), "worker_id", "run", "notice") == [(3, "sorting", "notice")]
    assert picked(answers(url, "preemptions"), "job_id", "notice") == [(705, "notice")]
    assert picked(answers(url, "lost_engines_by_cause"), "allocation_end_reason", "engines") == [
        ("preempted", 1)
    ]
    assert picked(answers(url, "gpu_release"), "worker_id") == [(3,)]


def test_a_restarted_daemon_knows_for_whom_a_job_works_and_since_when(url: str) -> None:
    written(url, changed_hands()[:-1])
    opened = open_engine(url)
    [found] = [one for one in read_snapshot(opened).jobs if one.intended.intent_id == "i5"]
    opened.dispose()
    assert (found.intended.run_id, found.intended.worker_key, found.run_since) == (2, "key2", T0 + 600)


def test_gpu_hours_are_told_by_user_and_account(url: str) -> None:
    """Run 1 went on under another account; run 3's training job has none; of run 2's nothing was seen."""
    records: list[r.Record] = [
        r.TrainingJobStarted(1, 800, "ada", 1, 4, T0 - 10, "physics"),
        r.TrainingJobEnded(1, 800, T0 + 150),
        r.TrainingJobStarted(1, 801, "ada", 1, 4, T0 + 150, "chemistry"),
        run(3, "counting", "KEY-C"),
        r.TrainingJobStarted(3, 802, "eve", 1, 4, T0 + 500),
        *held("i9", 3, 0, 900, run_id=3),  # before the job that was seen: its account all the same
    ]
    written_until(url, [*fleet(), records], T0 + 900)
    columns = ("owner", "account", "runs", "allocations", "gpu_hours", "wasted_gpu_hours", "tokens")
    assert picked(answers(url, "harvested_gpu_hours_by_account"), *columns) == [
        ("ada", "physics", 1, 2, 2, 1, 100),
        ("KEY-B", "unknown", 1, 1, 1, 0, 0),
        ("KEY-C", "none", 1, 1, 0.75, 0.75, 0),
        ("ada", "chemistry", 1, 2, 0.0333, 0.0333, 0),
    ]


def test_wasted_starts_say_how_far_they_got_and_what_they_cost(url: str) -> None:
    written_until(url, fleet(), T0 + 9000)
    columns = (
        "job_id",
        "owner",
        "gpu_seconds",
        "furthest_stage",
        "allocation_end_reason",
        "worker_end_reason",
        "job_reason",
    )
    assert picked(answers(url, "wasted_starts"), *columns) == [
        (706, "ada", 0, "never started", "", "", "given back: its run has no demand"),
        (0, "ada", 0, "never submitted", "", "", "the submission never arrived"),
        (703, "ada", 60, "engine joined, got no sample", "preempted", "goodbye", ""),
        (704, "ada", 60, "engine got samples, generated no token", "cancelled", "", ""),
        (702, "ada", 3600, "had GPUs, no engine joined", "failed", "", ""),
    ]


def leased(
    sample_id: int, worker_id: int, from_s: float, to_s: float | None, n_tokens: int, version: int = 1
) -> list[r.Record]:
    records: list[r.Record] = [r.LeaseGranted(sample_id, 1, worker_id, version, 0, T0 + from_s)]
    if n_tokens:
        records.append(chunk(sample_id, 1, 0, n_tokens, worker_id, version))
    return (
        records
        if to_s is None
        else [*records, r.LeaseEnded(sample_id, 1, "finished", n_tokens, 0, T0 + to_s)]
    )


def test_throughput_counts_the_time_in_which_an_engine_has_leases_once(url: str) -> None:
    submission = [
        run(1, "sorting", "KEY-A"),
        engine(1, "i1", "n5"),
        engine(2, "i2", "n5"),
        group(10, 11, 6, 1, 1),
        *leased(11, 1, 0, 10, 100),
        *leased(12, 1, 5, 15, 50),  # 5 s of it with the one before
        *leased(13, 1, 6, 8, 0),  # within both
        *leased(14, 1, 20, 30, 30),
        *leased(15, 2, 0, 5, 20),  # the other engine of the node
        *leased(16, 2, 50, None, 40, version=2),
    ]
    written_until(url, [submission], T0 + 60)
    columns = (
        "version",
        "node",
        "engines",
        "leases",
        "tokens",
        "busy_s",
        "engine_tokens_per_s",
        "sample_tokens_per_s",
    )
    assert picked(answers(url, "throughput"), *columns) == [
        (1, "n5", 2, 5, 200, 30, 6.7, 5.4),  # busy 15 + 10 + 5 s; leases of 10 + 10 + 2 + 10 + 5 s
        (2, "n5", 1, 1, 40, 10, 4, 4),
    ]


# ---------------------------------------------------------------- the cluster

LIMITS = limits_with("scavenge", max_engines=8, max_pending=4)
SIX = Demand(1, "sorting", 6, 1, "6 are useful")
NODES = (node("node0"), node("node1", 2), node("node2", 4), node("node3", 4))


def mine(waits: bool) -> OurJob:
    return OurJob("scv-1", 1, 101, 1, waits, connected=not waits)


def why_none(
    demand: Sequence[Demand], jobs: Sequence[OurJob] = (), limits: HarvestLimits = LIMITS, **cluster: Any
) -> HarvestDecision:
    """What the policy says where it does nothing."""
    seen = view(T0, cluster.get("others", ()), cluster.get("nodes", NODES))
    found = decide(
        replace(seen, reservations=cluster.get("reservations", ())),
        demand,
        jobs,
        limits,
        cluster.get("now", T0),
    )
    assert found.actions == ()
    return found


OURS = ours("scv-1", 101, JobState.RUNNING)
LARGE = job(9, gpus=8, n_nodes=2, start_time=T0 + 50, planned=("node1", "node2"))
BOOKED = Reservation("course", frozenset({"node1"}), T0 + 50, T0 + 900)
AGES = Idle({}, {node_class(node("node1")): prior()}, 0.985)
FULL = (node("node0"), *(node(f"node{n}", 4) for n in (1, 2, 3)))
REASONS = [
    (why_none([]), "no run is open"),
    (why_none([replace(SIX, engines=0)]), "no run wants engines"),
    (why_none([replace(SIX, engines=1)], [mine(False)]), "every wanted engine runs"),
    (why_none([replace(SIX, engines=1)], [mine(True)]), "our own pending jobs are to take them"),
    (why_none([SIX], now=T0 + 61), "the poll was too old to decide on"),
    (why_none([SIX], limits=limits_with(LIMITS, max_engines=1), jobs=[mine(False)]), "limit max_engines"),
    (why_none([SIX], limits=limits_with(LIMITS, max_pending=1), jobs=[mine(True)]), "limit max_pending"),
    (why_none([SIX], limits=limits_with(LIMITS, partition="nowhere")), "the partition is down"),
    (
        why_none([SIX], limits=limits_with(LIMITS, not_before=T0 + 9, not_before_reason="job 3 FAILED")),
        "backing off after failures",
    ),
    (why_none([SIX], limits=limits_with(LIMITS, headroom_gpus=4)), "limit headroom_gpus"),
    (
        why_none([SIX], limits=limits_with(LIMITS, quarantined=(("node1", "dies"),))),
        "their nodes are quarantined",
    ),
    (why_none([SIX], others=[job(1), job(2)]), "other users' pending jobs may take them"),
    (why_none([replace(SIX, gpus_per_engine=4)]), "no node has free capacity for a whole engine"),
    (why_none([SIX], nodes=FULL), "no node has free capacity for a whole engine"),
    (why_none([SIX], limits=limits_with(LIMITS, max_gpus=1), jobs=[mine(False)]), "limit max_gpus"),
    (
        why_none([SIX], limits=limits_with(LIMITS, max_gpus_per_user=1, user="scavenger"), others=[OURS]),
        "limit max_gpus_per_user",
    ),
    (
        why_none([replace(SIX, owner="ada", owner_gpus=1)], [replace(mine(False), owner="ada")]),
        "limit owners.max_gpus",
    ),
    (
        why_none(
            [SIX], [mine(True)], others=[replace(OURS, state=JobState.PENDING, reason="QOSMaxGRESPerUser")]
        ),
        "a limit of our QOS or account in Slurm",
    ),
    (
        why_none([SIX], limits=limits_with(LIMITS, max_preemptions_per_hour=1, preempted_last_hour=1)),
        "limit max_preemptions_per_hour",
    ),
    (
        why_none([SIX], limits=limits_with(LIMITS, stop="the stop file")),
        "harvesting is stopped (stop file or drain)",
    ),
    (
        why_none([SIX], limits=limits_with(LIMITS, hidden="PrivateData", blind=True)),
        "other users' jobs are hidden, and some could not preempt ours",
    ),
    (
        why_none([SIX], limits=limits_with(LIMITS, min_life_s=60), reservations=[BOOKED]),
        "a reservation begins soon on their nodes",
    ),
    (
        why_none([SIX], limits=limits_with(LIMITS, min_life_s=60), others=[LARGE]),
        "Slurm keeps their nodes for larger jobs that it expects soon",
    ),
    (
        why_none([SIX], [mine(False)], limits_with(LIMITS, max_gpus_per_node=1), others=[OURS]),
        "limit max_gpus_per_node",
    ),
    (
        why_none([SIX], [mine(False)], limits_with(LIMITS, by_type=(("h100", 1),)), others=[OURS]),
        "limit max_gpus_by_partition or max_gpus_by_type",
    ),
    (
        why_none(
            [replace(SIX, owner="ada")],
            limits=limits_with(LIMITS, owners=(OwnerRule("ada", gpu_types=frozenset({"v100"})),)),
        ),
        "owners.gpu_types_of or partitions_of: not nodes of the owners that want engines",
    ),
    (
        why_none([SIX], limits=limits_with(LIMITS, blackouts=(BlackoutTime(T0 + 20, T0 + 900, "exams"),))),
        "a dated blackout ([[harvest.blackout]])",
    ),
    (
        why_none([replace(SIX, benefit=Benefit(1e-9, 8.0, 1, 60.0))], limits=limits_with(LIMITS, idle=AGES)),
        "not idle for long enough to outlast a start, or not worth one",
    ),
    (
        why_none([SIX], limits=limits_with(LIMITS, beyond_link=True)),
        "runs without weights.encrypt: no engines beyond the link",
    ),
]


def test_idle_gpu_hours_are_explained_by_what_the_policy_said(url: str) -> None:
    """The report knows the policy's codes: here they come from the policy itself, and each with which it does nothing is there."""
    acting = {
        HarvestCode.WANTED,
        HarvestCode.WRONG_SIZE,
        HarvestCode.OVER_SHARE,
        HarvestCode.HELD,
        HarvestCode.REQUEUED,
        HarvestCode.OVERDUE,
        HarvestCode.SHUTDOWN,
    }
    acting |= {
        HarvestCode.SAME_TIER_JOB,
        HarvestCode.QOS,
        HarvestCode.VOLUNTARY_PREEMPTION,
        HarvestCode.ENDING,
        HarvestCode.NODE_DRAINED,
        HarvestCode.FRESH,
        HarvestCode.STANDBY,
        HarvestCode.DIVISION,
        HarvestCode.HANDED_OVER,
        HarvestCode.LENT,
        HarvestCode.MAX_ENVIRONMENTS,  # of environment workers, which take no GPU
    }
    assert {decision.code for decision, _ in REASONS} == set(HarvestCode) - acting
    records: list[r.Record] = []
    for n, (said, _) in enumerate(REASONS):
        at = T0 + 60.0 * n
        records += [
            r.ClusterPolled(2, 1, 6, 4, 0, 0, at),
            r.Decision("harvest", "none", "", "?", "{}", at + 1, said.code),
        ]
    written_until(url, [records], T0 + 60 * len(REASONS))
    expected: dict[str, float] = {}
    for _, reason in REASONS:
        expected[reason] = expected.get(reason, 0) + 2 / 60
    found = {row["reason"]: row["idle_gpu_hours"] for row in answers(url, "idle_gpu_hours")}
    assert found == {reason: pytest.approx(hours, abs=1e-4) for reason, hours in expected.items()}


def test_idle_gpu_hours_of_before_codes_show_the_words(url: str) -> None:
    records = [
        r.ClusterPolled(2, 1, 6, 4, 0, 0, T0),
        r.Decision("harvest", "none", "", "no run is open", "{}", T0 + 1),
    ]
    written_until(url, [records], T0 + 60)
    (row,) = answers(url, "idle_gpu_hours")
    assert (row["reason"], row["example_reason"]) == (
        "the decision has no code (see example_reason)",
        "no run is open",
    )


def test_idle_gpu_hours_count_between_observations(url: str) -> None:
    records = [
        r.ClusterPolled(3, 0, 6, 4, 0, 0, T0),  # 60 s, before any decision
        r.ClusterPolled(3, 0, 6, 4, 0, 0, T0 + 60),  # 60 s while jobs are submitted
        r.Decision("harvest", "submit", "i1", "run sorting: 6 are useful; 3 GPUs idle", "{}", T0 + 61),
        r.ClusterPolled(0, 3, 6, 4, 0, 0, T0 + 120),  # nothing is idle
        r.ClusterPolled(1, 2, 6, 4, 0, 0, T0 + 180),
        r.Decision(
            "harvest", "cancel", "i1", "its run has no demand; no engine of it is connected", "{}", T0 + 181
        ),
        r.ClusterPolled(6, 0, 6, 4, 0, 0, T0 + 240),  # then nobody looks for an hour
        r.Decision("harvest", "none", "", "too old", "{}", T0 + 2000, HarvestCode.STALE_VIEW),
        r.ClusterPolled(6, 0, 6, 4, 0, 0, T0 + 3840),
    ]
    written_until(url, [records], T0 + 3840)
    assert picked(answers(url, "idle_gpu_hours"), "day_utc", "reason", "polls", "idle_gpu_hours") == [
        (DAY, "not observed: for over 300 s the daemon or Slurm was away (idle as last seen)", 1, 5.5),
        (
            DAY,
            "engines were being drained",
            2,
            0.5167,
        ),  # of the hour the first 300 s, and not what was decided after them
        (DAY, "jobs for them were being submitted", 1, 0.05),
        (DAY, "nothing was decided yet", 1, 0.05),
    ]


def test_others_wait_in_hours(url: str) -> None:
    records = [
        r.ClusterPolled(0, 3, 6, 4, 0, 0, T0),
        r.ClusterPolled(0, 3, 6, 4, 0, 2, T0 + 60),
        r.ClusterPolled(0, 0, 9, 4, 0, 1, T0 + 120),
        r.ClusterPolled(0, 1, 8, 4, 0, 0, T0 + 180),
    ]
    written_until(url, [records], T0 + 1800)  # the last one counts for 300 s
    columns = (
        "day_utc",
        "observed_hours",
        "not_observed_hours",
        "other_users_waiting_hours",
        "other_users_waiting_while_harvesting_hours",
        "harvested_gpu_hours_meanwhile",
        "most_jobs_waiting",
    )
    assert picked(answers(url, "other_users_waiting"), *columns) == [
        (DAY, 0.1333, 0.3667, 0.0333, 0.0167, 0.05, 2)
    ]


def test_a_wait_between_polls_that_are_far_apart_counts_its_300_s(url: str) -> None:
    """SQLite divides whole numbers to whole numbers: 300 s were 0 hours there."""
    written_until(url, [[r.ClusterPolled(0, 3, 6, 4, 0, 2, T0)]], T0 + 1800)
    columns = (
        "other_users_waiting_hours",
        "other_users_waiting_while_harvesting_hours",
        "harvested_gpu_hours_meanwhile",
    )
    assert picked(answers(url, "other_users_waiting"), *columns) == [(0.0833, 0.0833, 0.25)]


# ---------------------------------------------------------------- who waited, what it cost, which nodes


def test_who_waited_is_a_list(url: str) -> None:
    records: list[r.Record] = [
        r.OtherUserWaits(900, "bob", "gpu,long", 4, T0 - 3600, T0 - 60, T0),  # eligible a minute ago
        r.OtherUserWaited(900, T0 - 3600, "started", T0 + 30, 8, 360.0, T0 + 30),
        r.OtherUserWaits(901, "eve", "gpu", 1, T0, T0, T0 + 60),
        r.OtherUserWaited(901, T0, "cancelled", None, 2, 120.0, T0 + 120),
        r.OtherUserWaits(902, "bob", "gpu", 1, T0 + 100, T0 + 100, T0 + 120, harvested_gpus=1),
        r.OtherUserWaits(903, "bob", "gpu", 1, T0 + 100, T0 + 100, T0 + 120),  # without us: not in this list
        r.OtherUserWaited(77, T0, "started", T0 + 30, 8, 360.0, T0 + 30),  # of no wait: stops nothing
    ]
    written_until(url, [records], T0 + 700)
    columns = ("job_id", "user_name", "partition", "gpus", "submitted_unix_s", "started_unix_s", "outcome")
    rows = answers(url, "other_users_waits")
    assert picked(rows, *columns) == [
        (900, "bob", "gpu,long", 4, T0 - 3600, T0 + 30, "started"),
        (901, "eve", "gpu", 1, T0, None, "cancelled"),
        (902, "bob", "gpu", 1, T0 + 100, None, "waits"),
    ]
    figures = ("waited_s", "most_harvested_gpus_meanwhile", "harvested_gpu_hours_meanwhile")
    assert picked(rows, *figures) == [(90, 8, 0.1), (120, 2, 0.0333), (600, 1, 0)]


def test_what_a_run_cost_is_told_with_its_reserved_gpus(url: str) -> None:
    """Run 1 had a training job of four GPUs twice; run 2's trainer is no Slurm job: its reserved engine counts."""
    reserved = r.WorkerJoined(90, 2, "reserved", "", "s90", 0, 0, "n0", 2, "vllm", T0)
    records: list[r.Record] = [
        r.TrainingJobStarted(1, 800, "ada", 2, 4, T0),
        r.TrainingJobEnded(1, 800, T0 + 900),
        r.TrainingJobStarted(1, 800, "ada", 2, 4, T0 + 1800),  # requeued, and it goes on
        reserved,
        r.WorkerLeft(90, "drained", True, 0, 0, 0, T0 + 450),
        r.StepCommitted(1, 1, "train", 1, 1, "{}", T0 + 50),
        r.StepCommitted(1, 2, "train", 1, 1, "{}", T0 + 60),
    ]
    written_until(url, [*fleet(), records], T0 + 2700)
    columns = ("run", "owner", "steps", "reserved_gpu_hours", "reserved_from", "allocations")
    rows = answers(url, "run_cost")
    assert picked(rows, *columns) == [
        ("sorting", "ada", 2, 2, "training jobs", 4),
        ("adding", "KEY-B", 0, 0.25, "reserved engines", 1),
    ]
    by_user = {row["run"]: row for row in answers(url, "harvested_gpu_hours_by_user")}
    for row in rows:
        said = by_user[row["run"]]
        assert row["harvested_gpu_hours"] == said["gpu_hours"]
        assert row["wasted_gpu_hours"] == said["wasted_gpu_hours"]
        assert row["harvested_tokens"] == said["tokens"]
    harvested = rows[0]["harvested_gpu_hours"]
    assert isinstance(harvested, float)
    assert rows[0]["gpu_hours_per_step"] == round((2 + harvested) / 2, 4)


def test_runs_of_one_training_job_share_its_gpus(url: str) -> None:
    """Runs 1 and 2 are of job 800; once it is requeued run 1 alone is."""
    records: list[r.Record] = [
        r.TrainingJobStarted(1, 800, "ada", 8, 64, T0),
        r.TrainingJobStarted(2, 800, "ada", 8, 64, T0),
        r.TrainingJobEnded(1, 800, T0 + 900),
        r.TrainingJobEnded(2, 800, T0 + 900),
        r.TrainingJobStarted(1, 800, "ada", 8, 64, T0 + 1800),
    ]
    written_until(url, [*fleet(), records], T0 + 2700)
    assert picked(answers(url, "run_cost"), "run", "reserved_gpu_hours") == [
        ("sorting", 8 + 16),
        ("adding", 8),
    ]


def test_gpus_of_a_job_that_is_recorded_anew_are_counted_once(url: str) -> None:
    """A daemon that did not harvest ended the row; the next one found the job as it began."""
    records: list[r.Record] = [
        r.TrainingJobStarted(1, 800, "ada", 1, 4, T0),
        r.TrainingJobEnded(1, 800, T0 + 900),
        r.TrainingJobStarted(1, 800, "ada", 1, 4, T0),
        r.TrainingJobEnded(1, 800, T0 + 1800),
    ]
    written_until(url, [*fleet(), records], T0 + 2700)
    assert picked(answers(url, "run_cost"), "run", "reserved_gpu_hours")[0] == ("sorting", 2)


def test_idle_gpu_hours_are_explained_by_what_was_decided_on_their_cluster(url: str) -> None:
    records = [
        r.ClusterPolled(3, 0, 6, 4, 0, 0, T0),
        r.Decision("harvest", "none", "", "no", "{}", T0 + 1, HarvestCode.NO_DEMAND),
        r.ClusterPolled(6, 0, 6, 4, 0, 0, T0 + 2, cluster="b"),
        r.Decision("harvest", "none", "", "no", "{}", T0 + 3, HarvestCode.STOPPED, cluster="b"),
        r.ClusterPolled(0, 3, 6, 4, 0, 0, T0 + 60),
        r.ClusterPolled(0, 6, 6, 4, 0, 0, T0 + 62, cluster="b"),
    ]
    written_until(url, [records], T0 + 62)
    columns = ("cluster", "reason", "idle_gpu_hours")
    assert picked(answers(url, "idle_gpu_hours"), *columns) == [
        ("", "no run wants engines", 0.05),
        ("b", "harvesting is stopped (stop file or drain)", 0.1),
    ]
    for report in ("decisions", "decisions_with_reasons", "harvest_decisions"):
        assert picked(answers(url, report), "cluster", "code") == [("", "no_demand"), ("b", "stopped")]


def test_nodes_of_one_name_on_two_clusters_are_two(url: str) -> None:
    def died(cluster: str, at: float) -> r.EngineDied:
        return r.EngineDied("n7", 1, f"i{at}", 501, 0, 1, "FAILED", 2.0, T0 + at, cluster=cluster)

    there = r.JobIntended("i2", 1, "scavenge", 1, "key", T0, cluster="b")
    records: list[r.Record] = [
        *(died("", at) for at in (1.0, 2.0, 3.0)),
        died("b", 4.0),
        r.NodeQuarantined("n7", "why", T0 + 600, T0 + 5),
        r.NodeQuarantined("n7", "why", T0 + 700, T0 + 5, cluster="b"),
        r.NodeReleased("n7", T0 + 6),
        there,
        r.AllocationStarted("i2", 0, 9, "n7", 1, T0),
    ]
    written_until(url, [records], T0 + 10)
    columns = ("cluster", "node", "failures", "allocations", "quarantined_until_unix_s")
    assert picked(answers(url, "bad_nodes"), *columns) == [
        ("", "n7", 3, 0, None),
        ("b", "n7", 1, 1, T0 + 700),
    ]


def test_bad_nodes_are_one_report(url: str) -> None:
    def died(node: str, code: int | None, at: float, run_id: int = 1) -> r.EngineDied:
        return r.EngineDied(node, run_id, f"i{at}", 501, 0, code, f"FAILED after {at:.0f} s", 2.0, T0 + at)

    records: list[r.Record] = [
        *(died("n7", code, at) for at, code in enumerate((9, 1, None, 137))),
        died("n7", 1, 10, run_id=2),
        *(died("n9", 1, at) for at in range(20, 30)),  # as many as are written at once
        died("n8", 1, 5),
        r.NodeQuarantined("n7", "3 engines died on it", T0 + 600, T0 + 11),
        r.NodeQuarantined("n8", "3 engines died on it", T0 + 600, T0 + 11),
        r.NodeReleased("n8", T0 + 12),
        *held("i1", 1, 0, 5, "failed"),
    ]
    written_until(url, [records], T0 + 100)
    rows = answers(url, "bad_nodes")
    columns = (
        "node",
        "failures",
        "allocations",
        "runs_that_failed",
        "quarantines",
        "quarantined_until_unix_s",
    )
    assert picked(rows, *columns) == [
        ("n9", 10, 0, 1, 0, None),
        ("n7", 5, 0, 2, 1, T0 + 600),
        ("n8", 1, 0, 1, 1, None),
    ]
    assert picked(rows, "last_exit_codes")[1] == ("1, 137, unknown",)
    assert rows[1]["last_reasons"] == "FAILED after 10 s | FAILED after 3 s | FAILED after 2 s"
    assert rows[1]["last_failure_unix_s"] == T0 + 10
    written_until(url, [[r.Heartbeat(T0)]], T0 + 700)
    assert [row["quarantined_until_unix_s"] for row in answers(url, "bad_nodes")] == [None] * 3, "it is over"
