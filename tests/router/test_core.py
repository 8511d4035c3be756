"""The router's core, one promise a test. The bench commits at once unless the test turns `auto` off."""

from __future__ import annotations

import math

import msgspec
import pytest

from scavenger.router.events import Identity, IntentRevoked, JobGone, TrainerCalled
from scavenger.router.placement import Slots, Waiting, place
from scavenger.router.state import TRANSITIONS, IllegalTransition, SampleStatus
from scavenger.wire import (
    Accepted,
    Ack,
    Asleep,
    Assign,
    Call,
    Chunk,
    Chunks,
    CloseRun,
    Denied,
    Drain,
    Fleet,
    Goodbye,
    GoodbyeAck,
    GroupDone,
    GroupSpec,
    Heartbeat,
    HeartbeatAck,
    Held,
    HelloAgain,
    Lease,
    Ok,
    Ping,
    Pong,
    PublishVersion,
    RecordCheckpoint,
    Rejected,
    Reply,
    Revoke,
    RunOpened,
    RunStopped,
    SampleFailed,
    Sampling,
    SetReserved,
    Sleep,
    SubmitGroups,
    UseWeights,
    Wake,
    WeightsFailed,
    WeightsLoaded,
    Welcome,
    pack_logprobs,
    pack_tokens,
)
from tests.router.harness import SOURCE, SPEC, Bench, chunk_of, open_body, root, specs, started

W1, W2 = 11, 12


def one_lease(**options: object) -> tuple[Bench, Lease]:
    """A bench with one sample of 8 tokens, leased to W1."""
    bench = started(n=1, **options)  # type: ignore[arg-type]
    (lease,) = bench.join(W1)
    return bench, lease


def finish_all(bench: Bench, conn: int, leases: list[Lease]) -> None:
    for lease in leases:
        bench.chunk(conn, lease, len(lease.accepted) // 4, 8 - len(lease.accepted) // 4, "length")


# ---------------------------------------------------------------- I1: what is accepted


def refused(bench: Bench, conn: int, chunk: Chunk, reason: str) -> None:
    """The chunk changes nothing, is counted, is written down with its reason, and its worker is told to drop the lease."""
    accepted = {i: bytes(s.tokens) for i, s in bench.router.core.samples.items()}
    before = len(bench.events("chunk_refused"))
    bench.say(conn, Chunks((chunk,)))
    assert {i: bytes(s.tokens) for i, s in bench.router.core.samples.items()} == accepted
    assert reason in bench.events("chunk_refused")[before].reason
    assert bench.router.core.counters["chunk_refused"] == before + 1
    assert (chunk.sample_id, chunk.epoch) in bench.take(conn, Revoke)[0].leases


def test_a_chunk_of_a_stale_epoch_changes_nothing() -> None:
    bench, lease = one_lease()
    refused(bench, W1, chunk_of(lease.sample_id, lease.epoch - 1, 1, 0, 2), "stale epoch 0")
    assert bench.sample(lease.sample_id).status is SampleStatus.LEASED


def test_a_gap_is_refused_and_the_sample_leased_again_without_blame() -> None:
    bench, lease = one_lease()
    bench.chunk(W1, lease, 0, 2)
    refused(bench, W1, chunk_of(lease.sample_id, lease.epoch, 1, 3, 1), "gap: offset 3, accepted 2")
    sample = bench.sample(lease.sample_id)
    assert (sample.epoch, sample.accepted, sample.failures) == (2, 2, 0)


def test_an_exact_resend_is_a_no_op_that_is_acked() -> None:
    bench, lease = one_lease()
    bench.chunk(W1, lease, 0, 3)
    bench.take(W1, Ack)
    bench.chunk(W1, lease, 0, 3)
    assert bench.sample(lease.sample_id).accepted == 3
    assert bench.take(W1, Ack) == [Ack((Held(lease.sample_id, 1, 3),))]


def test_a_resend_that_goes_on_is_taken_from_where_it_is_new() -> None:
    bench, lease = one_lease()
    bench.chunk(W1, lease, 0, 3)
    bench.chunk(W1, lease, 1, 5)
    assert bench.sample(lease.sample_id).accepted == 6
    assert bench.ledger.samples[lease.sample_id].tokens == chunk_of(lease.sample_id, 1, 1, 0, 6).tokens


@pytest.mark.parametrize("field", ["tokens", "logprobs", "raw_logprobs", "finish"])
def test_a_resend_that_differs_ends_the_lease(field: str) -> None:
    bench, lease = one_lease()
    bench.chunk(W1, lease, 0, 3)
    good = chunk_of(lease.sample_id, 1, 1, 0, 2)
    wrong = msgspec.structs.replace(good, **{field: "stop" if field == "finish" else b"\x00" * 8})
    bench.say(W1, Chunks((wrong,)))
    assert len(bench.events("resend_differs")) == 1
    assert bench.sample(lease.sample_id).epoch == 2
    assert bench.sample(lease.sample_id).accepted == 3


def test_a_chunk_of_another_weight_version_is_refused() -> None:
    bench, lease = one_lease()
    refused(bench, W1, chunk_of(lease.sample_id, lease.epoch, 2, 0, 2), "weight version 2, the lease names 1")


def test_tokens_over_the_budget_are_refused() -> None:
    bench, lease = one_lease()
    refused(bench, W1, chunk_of(lease.sample_id, lease.epoch, 1, 0, 9), "over the budget of 8 tokens")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["logprobs", "raw_logprobs"])
def test_logprobs_that_are_not_finite_are_refused(value: float, field: str) -> None:
    bench, lease = one_lease()
    chunk = msgspec.structs.replace(chunk_of(lease.sample_id, 1, 1, 0, 2), **{field: pack_logprobs([-1.0, value])})
    refused(bench, W1, chunk, "logprobs that are not finite")
    assert bench.sample(lease.sample_id).failures == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens": b"\x00" * 7}, "malformed"),
        ({"logprobs": b""}, "malformed"),
        ({"offset": -1}, "malformed"),
        ({"tokens": b"", "logprobs": b"", "raw_logprobs": b""}, "no tokens"),
        ({"tokens": pack_tokens([1, -1])}, "negative"),
        ({"finish": "tired"}, "unknown finish"),
        ({"finish": "length"}, "below the budget"),
    ],
)
def test_a_chunk_that_no_engine_should_make_is_refused(change: dict[str, object], reason: str) -> None:
    bench, lease = one_lease()
    refused(bench, W1, msgspec.structs.replace(chunk_of(lease.sample_id, 1, 1, 0, 2), **change), reason)


def test_a_chunk_of_the_wrong_worker_changes_nothing() -> None:
    bench, lease = one_lease()
    bench.join(W2)
    refused(bench, W2, chunk_of(lease.sample_id, lease.epoch, 1, 0, 2), "no lease")
    assert bench.sample(lease.sample_id).worker_id == 1


def test_a_chunk_of_an_unknown_sample_is_refused() -> None:
    bench, _ = one_lease()
    refused(bench, W1, chunk_of(99, 1, 1, 0, 2), "unknown sample")


def test_a_finish_may_come_after_its_tokens() -> None:
    bench, lease = one_lease()
    bench.chunk(W1, lease, 0, 3)
    bench.say(W1, Chunks((Chunk(lease.sample_id, 1, 3, 1, b"", b"", b"", "stop"),)))
    assert bench.sample(lease.sample_id).status is SampleStatus.COMPLETE


# ---------------------------------------------------------------- I2: durable first


def test_nothing_is_leased_acked_replied_or_delivered_before_its_commit() -> None:
    bench = Bench(auto=False)
    bench.call(open_body())
    assert bench.mail.get(1, []) == []
    bench.settle()
    assert isinstance(bench.answer(1), RunOpened)
    bench.attempt = 1
    assert bench.publish() is None
    assert bench.submit(groups=specs(1, 1)) is None
    bench.settle()
    assert [isinstance(bench.answer(i), (Ok, Accepted)) for i in (2, 3)] == [True, True]
    bench.hello(W1)
    assert bench.take(W1, Welcome) == []
    assert bench.take(W1, UseWeights) == [], "orders come behind the welcome"
    bench.settle()
    bench.say(W1, WeightsLoaded(1, root(1)))
    assert bench.leases(W1) == []
    bench.settle()
    (lease,) = bench.leases(W1)
    bench.chunk(W1, lease, 0, 8, "length")
    assert bench.take(W1, Ack) == []
    assert bench.take(1, GroupDone) == []
    bench.commit()
    assert bench.take(W1, Ack)[0].durable[0].length == 8
    assert bench.take(1, GroupDone) == [], "that it was delivered is written first"
    bench.commit()
    assert len(bench.take(1, GroupDone)) == 1


def test_an_ack_names_only_what_its_own_commit_covers() -> None:
    bench, lease = one_lease()
    bench.auto = False
    bench.chunk(W1, lease, 0, 2)
    bench.chunk(W1, lease, 2, 2)
    bench.commit(1)
    assert [a.durable[0].length for a in bench.take(W1, Ack)] == [2]
    bench.commit()
    assert [a.durable[0].length for a in bench.take(W1, Ack)] == [4]


# ---------------------------------------------------------------- I3: attempts and replays


def test_a_new_attempt_fences_the_old() -> None:
    bench = started()
    bench.trainer = 2
    bench.open(job_id=2)
    answer = bench.call(Ping(), attempt=1, conn=1)
    assert isinstance(answer, Denied)
    assert answer.code == "stale"
    assert isinstance(bench.call(Ping(), attempt=2, conn=2), Pong)


def consumed_step(**options: object) -> Bench:
    """Step 1 was consumed, no checkpoint covers it."""
    bench = started(**options)  # type: ignore[arg-type]
    finish_all(bench, W1, bench.join(W1))
    assert isinstance(bench.commit_step(1, [1, 2]), Ok)
    bench.take(1, GroupDone)
    return bench


@pytest.mark.parametrize("restarted", [False, True])
def test_a_replay_with_equal_weights_is_delivered_again_and_generates_nothing(restarted: bool) -> None:
    bench = consumed_step()
    if restarted:
        bench.restart()
    bench.open(resume_step=0)
    bench.publish(2, root_of=1)
    answer = bench.submit(version=2)
    assert answer == Accepted((1,))
    (done,) = bench.take(1, GroupDone)
    assert [s.sample_id for s in done.samples] == [1, 2]
    assert done.version == 2
    assert done.samples[0].reward == 1.0
    assert bench.ledger.samples[1].ends == ["consumed", "reopened"]
    assert isinstance(bench.commit_step(1, [1, 2], version=2), Ok)


def test_a_replay_with_other_weights_supersedes_and_generates_anew() -> None:
    bench = consumed_step()
    bench.open(resume_step=0)
    bench.publish(2)
    assert bench.submit(version=2) == Accepted((2,))
    assert bench.take(1, GroupDone) == []
    assert bench.ledger.samples[1].state == "superseded"
    assert bench.ledger.groups[2].take == 1
    assert {s.group.version for s in bench.router.core.samples.values()} == {2}


def test_an_unfinished_sample_goes_on_under_equal_weights() -> None:
    bench, lease = one_lease()
    bench.chunk(W1, lease, 0, 3)
    bench.open(resume_step=0)
    bench.publish(2, root_of=1)
    assert bench.submit(version=2, groups=specs(1, 1)) == Accepted((1,))
    assert bench.sample(lease.sample_id).accepted == 3
    bench.chunk(W1, lease, 3, 5, "length")
    assert len(bench.take(1, GroupDone)) == 1


def test_what_an_older_attempt_left_is_not_delivered_unasked_even_after_a_restart() -> None:
    bench = started()
    leases = bench.join(W1)
    bench.open(resume_step=0)
    finish_all(bench, W1, leases)
    assert bench.take(1, GroupDone) == []
    bench.restart()
    bench.attach()
    assert bench.take(1, GroupDone) == []


def test_what_an_older_attempt_left_and_nobody_asked_for_is_superseded_by_the_commit_of_its_step() -> None:
    bench = started(prompts=2, n=1)
    bench.open(resume_step=0)
    bench.publish(2, root_of=1)
    bench.submit(version=2, groups=specs(1, 1))
    bench.hello(W1)
    bench.say(W1, WeightsLoaded(2, root(1)))
    finish_all(bench, W1, bench.leases(W1))
    assert isinstance(bench.commit_step(1, [1], version=2), Ok)
    assert bench.ledger.samples[2].state == "superseded"
    assert bench.router.core.samples == {}


def test_a_repeated_opening_is_the_same_attempt_while_the_ledger_is_read() -> None:
    bench = Bench(auto=False)
    bench.call(open_body())
    bench.commit()
    bench.call(open_body(), conn=2)
    bench.settle()
    assert bench.ledger.runs[1]["attempt"] == 1
    assert isinstance(bench.answer(2, 2), RunOpened)


# ---------------------------------------------------------------- I5, I6: budgets, poison


def test_one_budget_holds_over_all_leases() -> None:
    bench, lease = one_lease()
    bench.chunk(W1, lease, 0, 5)
    bench.join(W2)
    bench.say(W1, Goodbye("SIGTERM", True))
    (moved,) = bench.leases(W2)
    assert (moved.sample_id, moved.epoch, len(moved.accepted), moved.sampling) == (1, 2, 20, lease.sampling)
    assert moved.key == lease.key
    refused(bench, W2, chunk_of(1, 2, 1, 5, 4), "over the budget")
    (again,) = bench.leases(W2)
    bench.chunk(W2, again, 5, 3)
    assert bench.ledger.samples[1].finish == "length"
    assert bench.take(1, GroupDone)[0].samples[0].moves == 2


def test_a_sample_that_killed_engines_on_enough_nodes_stops_the_run_with_its_id() -> None:
    bench = started(n=1, poison_after=2)
    (lease,) = bench.join(W1)
    bench.join(W2)
    bench.say(W1, SampleFailed(1, lease.epoch, "CUDA error"))
    (lease,) = bench.leases(W2)
    bench.say(W2, SampleFailed(1, lease.epoch, "CUDA error"))
    (stopped,) = bench.take(1, RunStopped)
    assert "sample 1 failed 2 times on 2 node(s)" in stopped.reason
    assert bench.ledger.samples[1].state == "poisoned"
    bench.attach(wants=(1,), conn=3)
    assert len(bench.take(3, RunStopped)) == 1, "a trainer that was away learns of it"


def test_a_poisoned_sample_is_masked_and_its_group_delivered() -> None:
    bench = started(n=2, poison_after=1, on_poison="mask")
    leases = bench.join(W1)
    bench.say(W1, SampleFailed(leases[0].sample_id, leases[0].epoch, "CUDA error"))
    finish_all(bench, W1, leases[1:])
    (done,) = bench.take(1, GroupDone)
    assert [s.error is None for s in done.samples] == [False, True]
    assert isinstance(bench.commit_step(1, [2]), Ok), "a masked sample needs no outcome"


def test_a_sample_never_returns_to_a_node_where_it_failed_while_another_serves() -> None:
    bench = started(n=1)
    (lease,) = bench.join(W1, node="a")
    bench.join(W2, node="b")
    bench.say(W1, SampleFailed(1, lease.epoch, "NaN"))
    assert bench.leases(W1) == []
    assert [x.sample_id for x in bench.leases(W2)] == [1]


def test_a_site_of_one_node_poisons_after_three_times_as_many_failures() -> None:
    bench = started(n=1, poison_after=2)
    leases = bench.join(W1)
    for _ in range(6):
        (lease,) = leases
        assert bench.ledger.samples[1].state == "open"
        bench.say(W1, SampleFailed(1, lease.epoch, "NaN"))
        leases = bench.leases(W1)
    assert leases == []
    assert bench.ledger.samples[1].state == "poisoned"


def test_a_poisoned_sample_is_generated_anew_by_the_next_attempt() -> None:
    bench = started(n=1, poison_after=1)
    (lease,) = bench.join(W1)
    bench.say(W1, SampleFailed(1, lease.epoch, "NaN"))
    bench.open(resume_step=0)
    bench.publish(2, root_of=1)
    assert bench.submit(version=2, groups=specs(1, 1)) == Accepted((2,))


def test_a_crash_that_slurm_reports_is_counted_against_the_samples_it_held() -> None:
    bench, lease = one_lease()
    bench.handle(JobGone(f"job{W1}", 0, "FAILED", crashed=True))
    assert bench.sample(lease.sample_id).failures == 1
    assert bench.sample(lease.sample_id).status is SampleStatus.QUEUED


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


def test_an_unknown_connection_is_asked_to_greet_again() -> None:
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
    bench.say(W1, Asleep())
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
    for _ in range(4):
        bench.now += 1
        bench.say(W1, Heartbeat((), 0, 1))
    assert [x.epoch for x in bench.leases(W1)] == [2]
    assert bench.take(W1, HeartbeatAck)[-1].generation == 1


def test_a_worker_that_cannot_load_is_asked_again_and_at_last_drained() -> None:
    bench = started()
    bench.hello(W1)
    for _ in range(5):
        assert len(bench.take(W1, UseWeights)) == 1
        bench.say(W1, WeightsFailed(1, "hash mismatch"))
        bench.tick(1.5)
    assert "hash mismatch" in bench.take(W1, Drain)[0].reason


def test_weights_under_another_root_are_refused_and_the_worker_leaves() -> None:
    bench = started()
    bench.hello(W1)
    bench.say(W1, WeightsLoaded(1, b"forged"))
    assert bench.leases(W1) == []
    assert len(bench.take(W1, Drain)) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"protocol": 99}, "protocol 99"),
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
        from scavenger.router.events import HelloReceived

        bench.hello(W1)
        hello = msgspec.structs.replace(_hello_of(bench), kind="reserved")
        bench.handle(HelloReceived(50, Identity("worker", "k", "r", "j"), hello))
        assert "cannot greet with the key of a worker" in bench.take(50, Rejected)[0].reason
        return
    bench.hello(50, **change)  # type: ignore[arg-type]
    (answer,) = bench.take(50, Rejected)
    assert reason in answer.reason
    assert not answer.retry
    assert len(bench.events("hello_refused")) == 1


def _hello_of(bench: Bench):  # type: ignore[no-untyped-def]
    from scavenger.wire import WorkerHello

    return WorkerHello(1, "harvested", "r", "s", 0, 1, "n", 1, "reference", "0", 1)


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


# ---------------------------------------------------------------- calls


def test_every_call_may_be_repeated() -> None:
    bench = started(n=1)
    assert isinstance(bench.publish(), Ok)
    assert bench.submit(groups=specs(1, 1)) == bench.submit(groups=specs(1, 1)) == Accepted((1,))
    assert len(bench.ledger.groups) == 1
    finish_all(bench, W1, bench.join(W1))
    for _ in range(2):
        assert isinstance(bench.commit_step(1, [1]), Ok)
        assert isinstance(bench.call(RecordCheckpoint(1, 1, root(1), "/c")), Ok)
        assert isinstance(bench.call(SetReserved(False)), Ok)
        assert isinstance(bench.attach(), Ok)
        assert isinstance(bench.call(Ping()), Pong)
    assert bench.ledger.samples[1].ends == ["consumed"]
    for _ in range(2):
        assert isinstance(bench.call(CloseRun("finished")), Ok)
    assert sum(type(r).__name__ == "RunEnded" for r in bench.ledger.log) == 1
    assert len(bench.take(W1, Drain)) == 1


@pytest.mark.parametrize(
    ("samples", "reason"), [([1], "1 samples of step 1 have no outcome"), ([1, 2, 2], "twice"), ([1, 2, 9], "does not belong")]
)
def test_a_commit_must_name_each_sample_of_its_step_exactly_once(samples: list[int], reason: str) -> None:
    bench = started()
    finish_all(bench, W1, bench.join(W1))
    answer = bench.commit_step(1, samples)
    assert isinstance(answer, Denied)
    assert reason in answer.reason
    assert bench.ledger.samples[1].state == "complete"
    assert isinstance(bench.commit_step(1, [1, 2]), Ok)


def test_a_commit_of_unfinished_samples_or_impossible_outcomes_is_refused() -> None:
    bench = started()
    assert isinstance(bench.commit_step(1, [1, 2]), Denied)
    finish_all(bench, W1, bench.join(W1))
    assert isinstance(bench.commit_step(1, [1, 2], outcome="evaluated"), Denied)
    assert isinstance(bench.commit_step(7, [1, 2]), Denied)


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ((GroupSpec(0, pack_tokens([1] * 60), 2, Sampling(8)),), "over the engine's context of 64"),
        ((GroupSpec(0, b"", 2, Sampling(8)),), "has no tokens"),
        ((GroupSpec(0, pack_tokens([1]), 0, Sampling(8)),), "asks for 0 samples"),
        ((GroupSpec(0, pack_tokens([1]), 1, Sampling(0)),), "of 0 tokens"),
        ((GroupSpec(0, pack_tokens([1]), 10**6, Sampling(8)),), "answers may make a message of"),
        (specs(1) + specs(1), "names a prompt twice"),
    ],
)
def test_prompts_that_cannot_be_generated_are_refused_with_a_remedy(groups: tuple[GroupSpec, ...], reason: str) -> None:
    bench = started()
    before = dict(bench.ledger.groups)
    answer = bench.submit(step=2, groups=groups)
    assert isinstance(answer, Denied)
    assert reason in answer.reason
    assert answer.remedy
    assert bench.ledger.groups == before


def test_steps_that_are_over_versions_that_were_used_and_ended_runs_take_nothing_more() -> None:
    bench = consumed_step()
    assert "not after the last committed one" in bench.submit(step=1).reason  # type: ignore[union-attr]
    assert "was used before" in bench.publish(1, root_of=5).reason  # type: ignore[union-attr]
    assert "was not published" in bench.submit(step=2, version=9).reason  # type: ignore[union-attr]
    bench.call(CloseRun("finished"))
    assert "has ended" in bench.submit(step=2).reason  # type: ignore[union-attr]


def test_only_the_owner_may_act_as_a_trainer() -> None:
    bench = started()
    for who in (Identity("worker", "k", "r", "j"), Identity("owner", "another")):
        bench.handle(TrainerCalled(60, who, Call(1, "r", 1, Ping())))
        bench.handle(TrainerCalled(60, who, Call(2, "r", 0, open_body())))
    answers = [m.body for m in bench.take(60, Reply)]
    assert [a.code for a in answers] == ["not-owner"] * 4  # type: ignore[union-attr]
    assert bench.ledger.runs[1]["attempt"] == 1


def test_a_run_is_not_opened_again_as_another_one() -> None:
    bench = started()
    bench.call(replace_seed(8), conn=3)
    assert "seed 8" in bench.take(3, Reply)[0].body.reason  # type: ignore[union-attr]
    bench.call(open_body(5), conn=3)
    assert "the ledger ends at 0" in bench.take(3, Reply)[0].body.reason  # type: ignore[union-attr]


def replace_seed(seed: int):  # type: ignore[no-untyped-def]
    return msgspec.structs.replace(open_body(), seed=seed)


def test_a_call_over_an_unattached_connection_is_asked_to_attach() -> None:
    bench = started()
    for body in (Ping(), SubmitGroups(2, 1, "train", specs(1)), PublishVersion(2, 1, b"r", b"m", SOURCE)):
        assert bench.call(body, conn=9) is None
        assert len(bench.take(9, HelloAgain)) == 1


def test_the_trainer_hears_of_every_change_of_its_fleet() -> None:
    bench = started()
    bench.take(1, Fleet)
    bench.hello(W1)
    bench.hello(W2, kind="reserved")
    assert bench.take(1, Fleet)[-1] == Fleet(0, 1, 0, 2, 0), "a harvested worker that loads is no capacity yet"
    bench.say(W2, WeightsLoaded(1, root(1)))
    bench.say(W1, WeightsLoaded(1, root(1)))
    bench.tick()
    assert bench.take(1, Fleet)[-1] == Fleet(1, 1, 0, 2, 2)
    bench.say(W1, Goodbye("SIGTERM", True))
    assert bench.take(1, Fleet)[-1].harvested == 0
    bench.tick(3)
    assert bench.take(1, Fleet) == []


def test_demand_says_how_many_engines_are_of_use_and_why() -> None:
    bench = Bench()
    assert bench.router.demand(bench.now) == []
    bench.open()

    def demand() -> tuple[int, str]:
        (wanted,) = bench.router.demand(bench.now)
        return wanted.engines, wanted.reason

    assert demand() == (0, "no weights are published yet")
    bench.publish()
    bench.submit(groups=specs(2, 2))
    assert demand()[0] == 4
    bench.submit(groups=specs(8, 2))
    assert demand()[0] == 8, "run.max_engines"
    bench.open(harvest=False)
    assert demand() == (0, "run.harvest = false")
    bench.open()
    bench.call(CloseRun("finished"))
    assert demand() == (0, "the run is over")


# ---------------------------------------------------------------- the table, placement


STEPS = sorted({step for _, step in TRANSITIONS})


@pytest.mark.parametrize("status", list(SampleStatus))
@pytest.mark.parametrize("step", STEPS)
def test_an_illegal_step_of_a_sample_raises_and_changes_nothing(status: SampleStatus, step: str) -> None:
    bench = started(n=1)
    sample = bench.sample(1)
    sample.status = status
    if (status, step) in TRANSITIONS:
        sample.step(step)
        assert sample.status is TRANSITIONS[(status, step)]
        return
    sample.group.run.dirty = False
    with pytest.raises(IllegalTransition, match=rf"sample 1 is {status} and cannot {step}"):
        sample.step(step)
    assert sample.status is status
    assert not sample.group.run.dirty


def test_placement_fills_the_fleet_evenly_and_breaks_ties_by_id() -> None:
    waiting = [Waiting(i) for i in range(5)]
    assert list(place(waiting, [Slots(2, 0, 2), Slots(1, 0, 2)])) == [(0, 1), (1, 2), (2, 1), (3, 2)]
    assert list(place(waiting, [Slots(1, 3, 4), Slots(2, 0, 4)]))[:2] == [(0, 2), (1, 2)]


def test_placement_waits_for_a_healthy_node_rather_than_returning_to_a_failed_one() -> None:
    sick, well = Slots(1, 0, 4, "sick"), Slots(2, 4, 4, "well")
    assert list(place([Waiting(7, frozenset({"sick"})), Waiting(8)], [sick, well])) == [(8, 1)]
    assert list(place([Waiting(7, frozenset({"sick"}))], [sick])) == [(7, 1)]


def test_samples_with_tokens_go_first() -> None:
    bench = started(prompts=2, n=2)
    leases = bench.join(W1)
    bench.chunk(W1, leases[-1], 0, 2)
    bench.say(W1, Goodbye("SIGTERM", True))
    moved = bench.join(W2)
    assert moved[0].sample_id == leases[-1].sample_id


def test_leases_of_long_samples_travel_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scavenger.router.samples.ASSIGN_BYTES", 30)
    bench = started(prompts=2, n=2)
    bench.hello(W1)
    bench.say(W1, WeightsLoaded(1, root(1)))
    assert [len(m.leases) for m in bench.take(W1, Assign)] == [2, 2]


def test_a_worker_is_never_given_more_than_its_batch() -> None:
    bench = started(prompts=5, n=2)
    assert len(bench.join(W1)) == SPEC.max_batch
    assert len(bench.join(W2)) == SPEC.max_batch
    assert len(bench.take(W2, Assign)) == 0


