"""What the core promises of workers, and of itself after a restart. The bench commits at once unless a test turns `auto` off."""

from __future__ import annotations

import ast
from pathlib import Path

import msgspec
import pytest

from scavenger.protocol.messages import (
    PROTOCOL,
    Ack,
    Asleep,
    Chunks,
    Drain,
    Fleet,
    Goodbye,
    GoodbyeAck,
    GroupDone,
    Heartbeat,
    HeartbeatAck,
    Held,
    HelloAgain,
    Message,
    Rejected,
    Revoke,
    SetReserved,
    Sleep,
    UseWeights,
    Wake,
    WeightsFailed,
    WeightsLoaded,
    Welcome,
)
from scavenger.router.core import workers
from scavenger.router.core.events import IntentRevoked, JobGone, PeerIdentity, WorkerLife
from scavenger.router.core.row_budget import REFUSALS_LOGGED
from scavenger.router.core.transitions import (
    WORKER_TRANSITIONS,
    IllegalTransition,
    SampleStatus,
    WorkerStatus,
    WorkerStep,
)
from tests.router.harness import Bench, chunk_of, root, started
from tests.router.moves import W1, W2, finish_all, one_lease, refused

# ---------------------------------------------------------------- workers


def test_a_silent_worker_is_first_suspect_then_dead_and_its_samples_move_with_their_tokens() -> None:
    bench, lease = one_lease()
    bench.chunk(W1, lease, 0, 3)
    bench.tick(5.0)
    assert bench.router.core.workers[1].suspect
    assert bench.sample(1).status is SampleStatus.LEASED
    bench.submit(step=2)
    assert bench.leases(W1) == [], "no new leases for a suspect"
    bench.say(W1, Heartbeat((Held(1, 1, 3),), 0, 1))
    assert len(bench.leases(W1)) == 2, "heard again: it serves on"
    bench.tick(13.0)
    assert bench.router.core.workers == {}
    assert (bench.sample(1).status, bench.sample(1).accepted) == (SampleStatus.QUEUED, 3)


def test_of_each_harvested_engine_it_is_known_when_it_was_heard_first_and_last_also_once_it_is_gone() -> None:
    """That is when its job held GPUs, whatever a poll of Slurm saw of it."""
    bench, _ = one_lease()
    joined_at, intent = bench.now, bench.router.core.workers[1].process.intent_id
    bench.tick(5.0)
    bench.say(W1, Heartbeat((), 0, 1))
    heard_at = bench.now
    assert workers.lives(bench.router.core) == [
        WorkerLife(
            intent,
            0,
            bench.router.core.workers[1].node,
            joined_at,
            heard_at,
            here=True,
            ready=True,
            run_id=1,
            ready_at=joined_at,
        )
    ]
    bench.tick(13.0)
    [life] = workers.lives(bench.router.core)
    assert (life.here, life.joined_at, life.seen_at) == (False, joined_at, heard_at), (
        "not when it was given up"
    )


def test_an_engine_that_a_restarted_daemon_has_not_heard_shows_nothing() -> None:
    bench, _ = one_lease()
    bench.restart()
    assert workers.lives(bench.router.core) == []
    bench.tick(16.0)
    assert bench.router.core.workers == {}, "it did not come back"
    assert workers.lives(bench.router.core) == []


def test_silence_while_the_daemon_itself_stood_still_is_nobodys_death() -> None:
    bench, _ = one_lease()
    bench.tick()
    bench.now += 60.0
    bench.tick()
    assert not bench.router.core.workers[1].suspect


def test_a_goodbye_is_acked_after_its_tokens_are_durable_and_loses_none() -> None:
    bench, lease = one_lease()
    bench.auto = False
    bench.chunk(W1, lease, 0, 5)
    bench.say(W1, Goodbye("SIGTERM", True))
    assert bench.take(W1, GoodbyeAck) == []
    bench.settle()
    assert len(bench.take(W1, GoodbyeAck)) == 1
    (left,) = [r for r in bench.ledger.log if type(r).__name__ == "WorkerLeft"]
    assert (left.salvaged, left.regenerated, left.notice) == (5, 0, True)  # type: ignore[attr-defined]
    bench.auto = True
    bench.say(W1, Heartbeat((), 0, 1))
    assert bench.take(W1, HelloAgain) == [], "one that left is not asked to come again"
    bench.say(W1, Goodbye("SIGTERM", True))
    assert len(bench.take(W1, GoodbyeAck)) == 1, "the ack may have been lost"


def test_a_later_incarnation_proves_the_earlier_one_dead_and_a_leftover_is_turned_away() -> None:
    bench = started(n=1)
    (lease,) = bench.join(W1, intent="j", session="old")
    bench.chunk(W1, lease, 0, 2)
    (moved,) = bench.join(W2, intent="j", session="new", incarnation=1)
    assert (moved.epoch, len(moved.accepted)) == (2, 8)
    bench.say(W1, Chunks((chunk_of(1, 1, 1, 2, 1),)))
    assert len(bench.take(W1, HelloAgain)) == 1
    bench.hello(W1, intent="j", session="old", held=(Held(1, 1, 3),))
    (answer,) = bench.take(W1, Rejected)
    assert "later incarnation" in answer.reason
    assert bench.sample(1).epoch == 2


def test_a_gone_job_moves_its_samples_at_once_but_never_those_of_a_later_incarnation() -> None:
    bench = started(n=1)
    bench.join(W1, intent="j", incarnation=1)
    bench.handle(JobGone("j", 0, "PREEMPTED", False))
    assert bench.sample(1).status is SampleStatus.LEASED
    bench.handle(JobGone("j", 1, "PREEMPTED", False))
    assert bench.sample(1).status is SampleStatus.QUEUED


def test_a_zombie_whose_lease_moved_changes_nothing_and_is_told_to_drop_it() -> None:
    bench, lease = one_lease()
    bench.chunk(W1, lease, 0, 2)
    bench.tick(13.0)
    (moved,) = bench.join(W2)
    bench.chunk(W2, moved, 2, 1)
    bench.chunk(W1, lease, 2, 3)
    assert len(bench.take(W1, HelloAgain)) == 1
    bench.hello(W1, held=(Held(1, 1, 5),), loaded=1)
    assert bench.take(W1, Revoke)[0].leases == ((1, 1),)
    refused(bench, W1, chunk_of(1, 1, 1, 2, 3), "no lease")
    assert bench.sample(1).accepted == 3


def test_an_unknown_connection_is_asked_to_register_again() -> None:
    bench = started()
    bench.say(77, Heartbeat((), 0, -1))
    assert len(bench.take(77, HelloAgain)) == 1


def test_the_same_session_comes_back_over_a_new_connection_with_all_it_holds() -> None:
    bench, lease = one_lease()
    bench.chunk(W1, lease, 0, 2)
    bench.hello(99, session=f"s{W1}", intent=f"job{W1}", held=(Held(1, 1, 4),), loaded=1)
    assert bench.take(99, Welcome)[0].worker_id == 1
    assert bench.take(99, Ack)[0].durable == (Held(1, 1, 2),)
    bench.chunk(99, lease, 2, 2)
    assert (bench.sample(1).epoch, bench.sample(1).accepted) == (1, 4)


def test_reserved_workers_sleep_with_every_token_flushed_and_wake_again() -> None:
    bench = started(n=1)
    (lease,) = bench.join(W1, kind="reserved")
    bench.call(SetReserved(False))
    assert len(bench.take(W1, Sleep)) == 1
    bench.chunk(W1, lease, 0, 4)
    bench.join(W2)
    bench.say(W1, Asleep(1, 512))
    (moved,) = bench.leases(W2)
    assert len(moved.accepted) == 16
    assert bench.take(1, Fleet)[-1].reserved_asleep == 1
    bench.say(W2, Goodbye("SIGTERM", True))
    assert bench.leases(W1) == []
    bench.call(SetReserved(True))
    assert len(bench.take(W1, Wake)) == 1
    (lease,) = bench.leases(W1)
    bench.chunk(W1, lease, 4, 4, "length")
    assert len(bench.take(1, GroupDone)) == 1


def test_lost_sleep_drain_and_weights_orders_are_repeated_at_heartbeats() -> None:
    bench = started(n=1)
    bench.hello(W1, kind="reserved")
    bench.take(W1, UseWeights)
    bench.now += 6
    bench.say(W1, Heartbeat((), 0, -1))
    assert len(bench.take(W1, UseWeights)) == 1
    bench.say(W1, WeightsLoaded(1, root(1)))
    bench.call(SetReserved(False))
    bench.take(W1, Sleep)
    bench.say(W1, Heartbeat((), 0, 1))
    assert len(bench.take(W1, Sleep)) == 1
    bench.hello(W2)
    bench.handle(IntentRevoked(f"job{W2}", "surplus"))
    bench.take(W2, Drain)
    bench.say(W2, Heartbeat((), 0, -1))
    assert len(bench.take(W2, Drain)) == 1


def test_a_lost_assignment_is_repaired_by_heartbeats_but_not_before_it_was_sent() -> None:
    bench = started(n=1)
    bench.hello(W1)
    bench.auto = False
    bench.say(W1, WeightsLoaded(1, root(1)))
    for _ in range(8):  # the disk stalls: the lease is not even sent
        bench.now += 1
        bench.say(W1, Heartbeat((), 0, 1))
    assert bench.sample(1).epoch == 1
    bench.auto = True
    bench.settle()
    bench.leases(W1)  # and now it is lost on its way
    before = bench.take(W1, HeartbeatAck)[-1].number
    for _ in range(8):  # a slow worker: its heartbeats were sent before it could have heard of the lease
        bench.now += 1
        bench.say(W1, Heartbeat((), 0, 1, heard=before))
    assert bench.sample(1).epoch == 1, "time proves nothing"
    bench.say(W1, Heartbeat((), 0, 1, heard=bench.take(W1, HeartbeatAck)[0].number))
    assert [x.epoch for x in bench.leases(W1)] == [2], (
        "it heard what was sent after the lease, and does not hold it"
    )


def test_a_worker_that_registers_to_say_goodbye_gets_no_lease() -> None:
    bench = started(n=1)
    bench.hello(W1, leaving=True)
    bench.say(W1, WeightsLoaded(1, root(1)))
    assert bench.leases(W1) == []
    bench.say(W1, Goodbye("SIGTERM", True))
    assert len(bench.take(W1, GoodbyeAck)) == 1


def test_a_worker_that_cannot_load_is_asked_again_and_at_last_drained() -> None:
    bench = started()
    bench.hello(W1)
    for _ in range(5):
        assert len(bench.take(W1, UseWeights)) == 1
        bench.say(W1, WeightsFailed(1, "hash mismatch"))
        bench.tick(1.5)
    assert "hash mismatch" in bench.take(W1, Drain)[0].reason


@pytest.mark.parametrize(
    ("kind", "message", "within"),
    [
        ("weights_failed", WeightsFailed(1, "hash mismatch"), REFUSALS_LOGGED + 5),
        ("weights_refused", WeightsLoaded(1, b"forged"), REFUSALS_LOGGED + 5),
        ("weights_loaded", WeightsLoaded(1, root(1)), 2 * REFUSALS_LOGGED + 10),
        ("stale_leases", None, REFUSALS_LOGGED + 5),
        ("chunk_refused", Chunks((chunk_of(1, 99, 1, 0, 2),)), REFUSALS_LOGGED + 5),
    ],
)
def test_one_key_does_not_fill_the_ledgers_events_however_often_it_registers_and_another_is_still_heard(
    kind: str, message: Message | None, within: int
) -> None:
    bench, times = started(), 500
    for n in range(times):
        if message is None or n % 250 == 0:
            bench.hello(W1, session=f"s{n}", held=(Held(1, 77, 3),) if message is None else ())
        if message is not None:
            bench.say(W1, message)
    assert REFUSALS_LOGGED <= len(bench.events(kind)) <= within
    if kind != "stale_leases":
        assert bench.router.core.counters[kind] == times, "all are counted"
    before = len(bench.events(kind))
    bench.hello(W2, held=(Held(1, 77, 3),) if message is None else ())
    if message is not None:
        bench.say(W2, message)
    assert len(bench.events(kind)) == before + 1


def test_weights_under_another_root_are_refused_and_the_worker_leaves() -> None:
    bench = started()
    bench.hello(W1)
    bench.say(W1, WeightsLoaded(1, b"forged"))
    assert bench.leases(W1) == []
    assert len(bench.take(W1, Drain)) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"run": "other"}, "minted for another run"),
        ({"kind": "reserved"}, ""),
        ({"incarnation": 2**63}, "values that cannot be"),
        ({"job_id": -1}, "values that cannot be"),
        ({"node": "x" * 300}, "values that cannot be"),
    ],
)
def test_a_hello_that_cannot_be_is_refused_with_its_reason(change: dict[str, object], reason: str) -> None:
    bench = started()
    if "kind" in change:
        from scavenger.router.core.events import HelloReceived

        bench.hello(W1)
        hello = msgspec.structs.replace(_hello_of(bench), kind="reserved")
        bench.handle(HelloReceived(50, PeerIdentity("worker", "k", "r", "j"), hello))
        assert "cannot register with the key of a worker" in bench.take(50, Rejected)[0].reason
        return
    bench.hello(50, **change)  # type: ignore[arg-type]
    (answer,) = bench.take(50, Rejected)
    assert reason in answer.reason
    assert not answer.retry
    assert len(bench.events("hello_refused")) == 1


@pytest.mark.parametrize("protocol", [PROTOCOL - 1, PROTOCOL + 1])
def test_a_worker_of_another_protocol_is_drained_with_the_reason(protocol: int) -> None:
    """Refused, its job would end as failed, and its node would be quarantined after three such jobs."""
    bench = started(n=1)
    bench.hello(50, protocol=protocol)
    (answer,) = bench.take(50, Drain)
    assert f"protocol {protocol}: this daemon speaks {PROTOCOL}; run workers" in answer.reason
    assert "one release" in answer.reason
    assert bench.take(50, Rejected) == []
    assert bench.leases(50) == []
    assert len(bench.events("hello_refused")) == 1


def test_a_reserved_engine_of_another_protocol_is_refused_with_the_remedy() -> None:
    bench = started(n=1)
    bench.hello(50, kind="reserved", slot="0", protocol=PROTOCOL - 1)
    (refused,) = bench.take(50, Rejected)
    assert f"this daemon speaks {PROTOCOL}" in refused.reason
    assert refused.remedy == "run workers and daemon of one release"
    assert not refused.retry


def _hello_of(bench: Bench):  # type: ignore[no-untyped-def]
    from scavenger.protocol.messages import WorkerHello

    return WorkerHello(PROTOCOL, "harvested", "r", "s", 0, 1, "n", 1, "reference", "0", 1)


# ---------------------------------------------------------------- restarts


def test_after_a_restart_the_same_session_goes_on_where_it_was() -> None:
    bench, lease = one_lease()
    bench.chunk(W1, lease, 0, 3)
    bench.restart()
    assert bench.sample(1).status is SampleStatus.UNCONFIRMED
    bench.hello(30, session=f"s{W1}", intent=f"job{W1}", held=(Held(1, 1, 5),), loaded=1)
    assert bench.sample(1).status is SampleStatus.LEASED
    bench.chunk(30, lease, 3, 5, "length")
    bench.attach(wants=(1,))
    (done,) = bench.take(1, GroupDone)
    assert done.samples[0].tokens == chunk_of(1, 1, 1, 0, 8).tokens


def test_demand_names_the_run_s_engine() -> None:
    bench, _lease = one_lease()
    (run,) = bench.router.core.runs.values()
    run.engine = msgspec.structs.replace(run.engine, name="vllm")
    (wanted,) = bench.router.demand(bench.now)
    assert wanted.engine == "vllm"


def test_after_a_restart_in_mid_step_as_many_engines_are_wanted_as_before() -> None:
    """Otherwise those that are at work would be given back, and wanted again at the next step."""
    bench, _lease = one_lease()
    (before,) = bench.router.demand(bench.now)
    bench.restart()
    (after,) = bench.router.demand(bench.now)
    assert after.engines == before.engines > 0


def test_after_a_restart_a_session_that_stays_away_loses_its_leases_at_the_next_epoch() -> None:
    bench, lease = one_lease()
    bench.chunk(W1, lease, 0, 3)
    bench.restart()
    bench.attach(wants=(1,))
    bench.publish()
    assert bench.join(W2) == []
    for _ in range(int(bench.limits.reconnect_s) - 1):
        bench.tick(1)
        bench.say(W2, Heartbeat((), 0, 1))
    assert bench.leases(W2) == []
    bench.tick(2)
    (moved,) = bench.leases(W2)
    assert (moved.epoch, len(moved.accepted)) == (2, 12)


def test_tokens_that_were_not_committed_are_gone_with_the_daemon_and_come_again() -> None:
    bench, lease = one_lease()
    bench.auto = False
    bench.chunk(W1, lease, 0, 3)
    bench.restart()
    bench.auto = True
    assert bench.sample(1).accepted == 0
    bench.hello(30, session=f"s{W1}", intent=f"job{W1}", held=(Held(1, 1, 3),), loaded=1)
    bench.chunk(30, lease, 0, 3)
    assert bench.sample(1).accepted == 3


def test_a_group_is_delivered_once_over_restarts_and_reconnections() -> None:
    bench = started(n=1)
    finish_all(bench, W1, bench.join(W1))
    assert len(bench.take(1, GroupDone)) == 1
    bench.restart()
    bench.attach(have=(1,))
    bench.tick(3)
    assert bench.take(1, GroupDone) == []
    bench.attach(wants=(1,), conn=5)
    assert len(bench.take(5, GroupDone)) == 1, "it was lost on its way"


# ---------------------------------------------------------------- a reserved engine's slot


def in_slot(bench: Bench, conn: int, session: str, held: tuple[Held, ...] = ()) -> list[Rejected]:
    bench.hello(conn, kind="reserved", session=session, slot="0", held=held)
    return bench.take(conn, Rejected)


@pytest.mark.parametrize("silent", [False, True])
def test_an_engine_that_lost_its_slot_is_refused_and_evicts_nobody(silent: bool) -> None:
    """Two live engines would evict each other for ever, and each eviction would be counted against the samples."""
    bench = started(n=1)
    assert len(bench.join(W1, kind="reserved", session="old", slot="0")) == 1
    if silent:
        bench.tick(13.0)
    assert len(bench.join(W2, kind="reserved", session="new", slot="0")) == 1
    assert bench.sample(1).failures == 1
    for conn in (30, 31):
        (refusal,) = in_slot(bench, conn, "old", (Held(1, 1, 0),))
        assert (refusal.retry, "another engine has its slot" in refusal.reason) == (False, True)
    assert (bench.sample(1).failures, bench.sample(1).status) == (1, SampleStatus.LEASED)
    assert [w.process.session for w in bench.router.core.workers.values()] == ["new"]
    assert in_slot(bench, 32, "new", (Held(1, 2, 0),)) == [], "it has the slot, and may come back"
    assert bench.sample(1).status is SampleStatus.LEASED


def test_evictions_are_remembered_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scavenger.router.core.registration.MAX_EVICTED", 3)
    bench = started(n=1)
    for number in range(8):
        assert in_slot(bench, 40 + number, f"s{number}") == []
    assert list(bench.router.core.runs["r"].reserved.evicted) == ["s4", "s5", "s6"]


def test_one_key_does_not_fill_the_ledger_with_refused_hellos() -> None:
    bench = started()
    for _ in range(350):
        bench.hello(W1, protocol=99, kind="reserved")
    assert len(bench.events("hello_refused")) == REFUSALS_LOGGED + 1
    assert bench.router.core.counters["hello_refused"] == 350


# ---------------------------------------------------------------- the table


@pytest.mark.parametrize("status", list(WorkerStatus))
@pytest.mark.parametrize("step", list(WorkerStep))
def test_an_illegal_step_of_a_worker_raises_and_changes_nothing(
    status: WorkerStatus, step: WorkerStep
) -> None:
    bench = started(n=1)
    bench.join(W1)
    worker = bench.router.core.workers[1]
    worker.status = status
    if step in WORKER_TRANSITIONS[status]:
        worker.transition(step)
        assert worker.status is WORKER_TRANSITIONS[status][step]
        return
    with pytest.raises(IllegalTransition, match=rf"worker 1 is {status} and cannot {step}"):
        worker.transition(step)
    assert worker.status is status


def test_every_status_and_every_step_of_a_worker_is_in_the_table_and_what_is_gone_stays_gone() -> None:
    assert set(WORKER_TRANSITIONS) == set(WorkerStatus)
    assert {status for status, to in WORKER_TRANSITIONS.items() if not to} == {WorkerStatus.GONE}
    assert {step for to in WORKER_TRANSITIONS.values() for step in to} == set(WorkerStep)
    reached = {after for to in WORKER_TRANSITIONS.values() for after in to.values()}
    assert reached == set(WorkerStatus) - {WorkerStatus.NEW}


def test_nothing_but_a_legal_step_sets_a_status_or_a_memory() -> None:
    folder = Path(workers.__file__).parent
    setters: set[tuple[str, str]] = set()
    for path in sorted(folder.glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                setters |= {
                    (path.stem, function.name)
                    for node in ast.walk(function)
                    if isinstance(node, ast.Attribute)
                    and isinstance(node.ctx, ast.Store)
                    and node.attr in ("status", "memory", "state")
                }
    assert setters == {("state", "transition"), ("state", "transition_memory")}
