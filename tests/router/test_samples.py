"""What the core promises of samples: I1, I2, I3, I5, I6, and the table of their states. The bench commits at once unless told."""

from __future__ import annotations

import math

import msgspec
import pytest

from scavenger.policy.placement import QueuedSamples, Slots, place
from scavenger.protocol.messages import (
    Accepted,
    Ack,
    Assign,
    Chunk,
    Chunks,
    Denied,
    Goodbye,
    GroupDone,
    Held,
    Ok,
    Ping,
    Pong,
    RunOpened,
    RunStopped,
    SampleFailed,
    UseWeights,
    WeightsLoaded,
    Welcome,
    pack_logprobs,
    pack_tokens,
)
from scavenger.router.core.events import JobGone
from scavenger.router.core.row_budget import REFUSALS_LOGGED
from scavenger.router.core.transitions import SAMPLE_TRANSITIONS, IllegalTransition, SampleStatus, SampleStep
from tests.router.harness import SPEC, Bench, chunk_of, open_body, root, specs, started
from tests.router.moves import W1, W2, consumed_step, finish_all, one_lease, refused

# ---------------------------------------------------------------- I1: what is accepted


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
    chunk = msgspec.structs.replace(
        chunk_of(lease.sample_id, 1, 1, 0, 2), **{field: pack_logprobs([-1.0, value])}
    )
    refused(bench, W1, chunk, "logprobs that are not finite")
    assert bench.sample(lease.sample_id).failures == 1


def test_a_positive_logprob_is_refused() -> None:
    bench, lease = one_lease()
    chunk = msgspec.structs.replace(
        chunk_of(lease.sample_id, 1, 1, 0, 2), logprobs=pack_logprobs([-1.0, 0.5])
    )
    refused(bench, W1, chunk, "a positive logprob")


def test_a_worker_that_is_refused_all_the_time_does_not_fill_the_ledger() -> None:
    bench, lease = one_lease()
    stale = chunk_of(lease.sample_id, 9, 1, 0, 2)
    for _ in range(250):
        bench.say(W1, Chunks((stale,)))
    assert len(bench.events("chunk_refused")) == REFUSALS_LOGGED + 1
    assert bench.router.core.counters["chunk_refused"] == 250


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
    assert bench.ledger.groups[2].retry == 1
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


# ---------------------------------------------------------------- the table, placement


@pytest.mark.parametrize("status", list(SampleStatus))
@pytest.mark.parametrize("step", list(SampleStep))
def test_an_illegal_step_of_a_sample_raises_and_changes_nothing(
    status: SampleStatus, step: SampleStep
) -> None:
    bench = started(n=1)
    sample = bench.sample(1)
    sample.status = status
    if step in SAMPLE_TRANSITIONS[status]:
        sample.transition(step)
        assert sample.status is SAMPLE_TRANSITIONS[status][step]
        return
    sample.group.run.due.fleet = False
    with pytest.raises(IllegalTransition, match=rf"sample 1 is {status} and cannot {step}"):
        sample.transition(step)
    assert sample.status is status
    assert not sample.group.run.due.fleet


def test_placement_fills_the_fleet_evenly_and_breaks_ties_by_id() -> None:
    waiting = [QueuedSamples(i) for i in range(5)]
    assert list(place(waiting, [Slots(2, 0, 2), Slots(1, 0, 2)])) == [(0, 1), (1, 2), (2, 1), (3, 2)]
    assert list(place(waiting, [Slots(1, 3, 4), Slots(2, 0, 4)]))[:2] == [(0, 2), (1, 2)]


def test_placement_waits_for_a_healthy_node_rather_than_returning_to_a_failed_one() -> None:
    sick, well = Slots(1, 0, 4, "sick"), Slots(2, 4, 4, "well")
    assert list(place([QueuedSamples(7, frozenset({"sick"})), QueuedSamples(8)], [sick, well])) == [(8, 1)]
    assert list(place([QueuedSamples(7, frozenset({"sick"}))], [sick])) == [(7, 1)]


def test_samples_with_tokens_go_first() -> None:
    bench = started(prompts=2, n=2)
    leases = bench.join(W1)
    bench.chunk(W1, leases[-1], 0, 2)
    bench.say(W1, Goodbye("SIGTERM", True))
    moved = bench.join(W2)
    assert moved[0].sample_id == leases[-1].sample_id


def test_leases_of_long_samples_travel_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scavenger.router.core.samples.ASSIGN_BYTES", 30)
    bench = started(prompts=2, n=2)
    bench.hello(W1)
    bench.say(W1, WeightsLoaded(1, root(1)))
    assert [len(m.leases) for m in bench.take(W1, Assign)] == [2, 2]


def test_a_worker_is_never_given_more_than_its_batch() -> None:
    bench = started(prompts=5, n=2)
    assert len(bench.join(W1)) == SPEC.max_batch
    assert len(bench.join(W2)) == SPEC.max_batch
    assert len(bench.take(W2, Assign)) == 0
