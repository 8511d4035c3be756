"""What a daemon's restart may not forget of a run whose trainer resumed, stopped, gave samples up, or ended (I2, I3)."""

from __future__ import annotations

from scavenger.ledger import records as rec
from scavenger.protocol.messages import (
    Accepted,
    CloseRun,
    Denied,
    GroupDone,
    Ok,
    Rejected,
    RunStopped,
    SampleFailed,
)
from tests.router.harness import Bench, specs, started
from tests.router.moves import W1, consumed_step, finish_all


def takes(bench: Bench) -> list[int]:
    return [g.retry for g in bench.ledger.groups.values()]


def test_a_restart_after_a_resume_offers_again_what_the_older_attempt_consumed() -> None:
    """Step 1 consumed; attempt 2 resumes from step 0; the daemon restarts; attempt 2 attaches and submits step 1."""
    bench = consumed_step()
    bench.open(resume_step=0)
    bench.restart()
    bench.attach()
    bench.publish(2, root_of=1)
    assert bench.submit(version=2) == Accepted((1,))
    (done,) = bench.take(1, GroupDone)
    assert [s.sample_id for s in done.samples] == [1, 2]
    assert bench.ledger.consumed == {}
    assert isinstance(bench.commit_step(1, [1, 2], 2), Ok)
    assert bench.ledger.consumed == {1: 1, 2: 1}
    assert len(bench.ledger.groups) == 1


def test_a_restart_does_not_offer_again_what_the_present_attempt_consumed() -> None:
    bench = consumed_step()
    bench.restart()
    bench.attach()
    assert bench.router.core.groups == {}
    answer = bench.submit(version=1)
    assert isinstance(answer, Denied)
    assert isinstance(bench.commit_step(1, [1, 2]), Ok), "a repeat of what was answered before"


def test_takes_go_on_after_a_restart() -> None:
    bench = consumed_step()
    bench.open(resume_step=0)
    bench.publish(2)
    assert bench.submit(version=2) == Accepted((2,)), "other weights: another retry"
    bench.open(resume_step=0)
    bench.publish(3)
    bench.submit(version=3)
    bench.open(resume_step=0)
    bench.publish(4)
    bench.restart()
    bench.attach()
    bench.publish(4)
    bench.submit(version=4)
    assert takes(bench) == [0, 1, 2, 3]


def test_takes_go_on_where_every_take_was_given_up_before_the_restart() -> None:
    bench = started(n=1)
    bench.submit(step=2)
    bench.call(CloseRun("stopped"))
    bench.restart()
    bench.open(resume_step=0)
    bench.publish(2)
    bench.submit(version=2)
    assert takes(bench) == [0, 0, 1]


def test_the_newest_group_of_a_prompt_counts_not_the_highest_take() -> None:
    from scavenger.router.core.restore import _newest_retries

    def state(group_id: int, retry: int) -> rec.OpenGroup:
        return rec.OpenGroup(
            rec.GroupCreated(group_id, 1, "train", 1, 0, retry, 1, b"", 0, 1, "{}", "", 0.0), 1, ()
        )

    (newest,) = _newest_retries((state(3, 0), state(2, 1)))
    assert newest.created.group_id == 3


def test_a_group_whose_every_sample_is_masked_comes_to_its_trainer_after_a_restart() -> None:
    bench = started(n=2, poison_after=1, on_poison="mask")
    for lease in bench.join(W1):
        bench.say(W1, SampleFailed(lease.sample_id, lease.epoch, "CUDA error"))
    bench.take(1, GroupDone)
    bench.restart()
    bench.attach(wants=(1,))
    (done,) = bench.take(1, GroupDone)
    assert all("CUDA error" in str(s.error) for s in done.samples)
    assert isinstance(bench.commit_step(1, []), Ok)
    bench.restart()
    bench.attach()
    assert bench.router.core.groups == {}, "its step was taken"


def test_a_stop_keeps_its_cause_and_remedy_over_reattaching_and_a_restart() -> None:
    bench = started(n=1, poison_after=1)
    (lease,) = bench.join(W1)
    bench.say(W1, SampleFailed(1, lease.epoch, "CUDA error"))
    (first,) = bench.take(1, RunStopped)
    assert "CUDA error" in first.reason
    assert "scavenger samples r --step 1" in first.remedy
    bench.attach(wants=(1,), conn=3)
    bench.restart()
    bench.attach(wants=(1,), conn=4)
    assert bench.take(4, RunStopped) == [first]
    assert bench.router.demand(bench.now)[0].engines == 0


def test_a_stop_of_an_older_attempt_stops_no_newer_one_after_a_restart() -> None:
    bench = started(n=1, poison_after=1)
    (lease,) = bench.join(W1)
    bench.say(W1, SampleFailed(1, lease.epoch, "CUDA error"))
    bench.open(resume_step=0)
    bench.restart()
    bench.attach()
    assert bench.take(1, RunStopped) == []
    bench.publish(2, root_of=1)
    assert bench.submit(version=2, groups=specs(1, 1)) == Accepted((2,)), "generated anew"


def test_an_ended_run_stays_ended_after_a_restart_and_can_be_opened_again() -> None:
    bench = consumed_step()
    bench.call(CloseRun("finished"))
    bench.restart()
    assert bench.router.core.runs["r"].ended
    assert bench.router.demand(bench.now)[0].engines == 0
    bench.hello(50)
    assert "has ended" in bench.take(50, Rejected)[0].reason
    bench.attach()
    assert isinstance(bench.submit(step=2), Denied)
    bench.open(resume_step=0)
    bench.publish(2, root_of=1)
    assert bench.submit(version=2) == Accepted((1,)), "what it consumed is offered again"
    finish_all(bench, 60, bench.join(60, 2))
