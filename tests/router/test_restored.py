"""After an older ledger was restored, its numbers name other things than before: nothing that was said under them may count (I1, I8)."""

from __future__ import annotations

import copy

import pytest

from scavenger.protocol.messages import (
    Ack,
    Attach,
    Denied,
    Heartbeat,
    Held,
    Ok,
    Revoke,
    UseWeights,
    WeightsLoaded,
    Welcome,
)
from scavenger.router.core.machine import Router
from scavenger.router.core.payloads import PayloadStore
from scavenger.router.core.transitions import SampleStatus
from tests.router.harness import Bench, open_body, root, specs, started
from tests.router.moves import W1, one_lease


def restore(bench: Bench, ledger: object, timeline: str = "after") -> None:
    """The daemon dies; the ledger is put back to `ledger`; a daemon starts on that, in another history."""
    bench.ledger = ledger  # type: ignore[assignment]
    bench.generation += 1
    bench.writes, bench.reads, bench.mail = [], [], {}
    bench.store = PayloadStore(bench.store.bound)
    bench.router = Router(bench.limits, bench.generation, bench.store, timeline, restored=True)
    bench.perform(bench.router.restore(bench.ledger.snapshot(), bench.now))


def back(bench: Bench, conn: int, **how: object) -> None:
    bench.hello(conn, session=f"s{W1}", intent=f"job{W1}", **how)  # type: ignore[arg-type]


# ---------------------------------------------------------------- workers


@pytest.mark.parametrize(
    "ledger", ["before", ""], ids=["of the history before", "of no history: no daemon had welcomed it"]
)
def test_a_lease_of_the_other_history_is_void_though_its_numbers_are_those_of_an_open_one(
    ledger: str,
) -> None:
    bench, lease = one_lease()
    bench.chunk(W1, lease, 0, 2)
    backup = copy.deepcopy(bench.ledger)
    bench.chunk(W1, lease, 2, 3)  # acknowledged, hence gone from the worker: nobody has these tokens any more
    restore(bench, backup)
    assert bench.sample(1).status is SampleStatus.UNCONFIRMED
    back(bench, 30, held=(Held(1, 1, 5),), loaded=1, loaded_root=root(1), ledger=ledger)
    assert bench.take(30, Welcome)[0].ledger == "after"
    assert bench.take(30, Revoke)[0].leases == ((1, 1),)
    assert bench.take(30, Ack) == []
    (again,) = bench.leases(30)
    assert (again.epoch, len(again.accepted)) == (2, 8)
    assert "another history" in bench.events("stale_leases")[0].reason


def test_a_lease_of_this_history_goes_on_after_a_further_restart() -> None:
    bench, _ = one_lease()
    restore(bench, bench.ledger)
    back(bench, 30, held=(Held(1, 1, 5),), ledger="after")
    assert bench.sample(1).status is SampleStatus.LEASED
    assert bench.take(30, Revoke) == []


@pytest.mark.parametrize("said", [b"other weights", b""], ids=["another root", "no root"])
def test_a_loaded_version_counts_only_with_its_root_hash(said: bytes) -> None:
    """Version 1 of the other history is not this one's: the worker must load, whatever its heartbeats say."""
    bench = started(n=1)
    bench.hello(W1, loaded=1, loaded_root=said)
    assert bench.leases(W1) == []
    assert [m.version for m in bench.take(W1, UseWeights)] == [1]
    bench.say(W1, Heartbeat((), 0, 1))
    assert bench.leases(W1) == [], "a heartbeat proves nothing"
    bench.say(W1, WeightsLoaded(1, root(1)))
    assert len(bench.leases(W1)) == 1


def test_a_loaded_version_with_the_ledger_s_root_is_believed() -> None:
    bench = started(n=1)
    bench.hello(W1, loaded=1, loaded_root=root(1))
    assert len(bench.leases(W1)) == 1
    assert bench.take(W1, UseWeights) == []


# ---------------------------------------------------------------- trainers


def test_a_trainer_of_the_other_history_is_refused_though_its_attempt_was_granted_again() -> None:
    bench = started(n=1)
    backup = copy.deepcopy(bench.ledger)
    bench.open(0)
    restore(bench, backup)
    bench.open(0)
    assert bench.router.core.runs["r"].attempt == 2
    for ledger in ("before", ""):
        answer = bench.call(Attach("r", (), (), ledger), attempt=2, conn=9)
        assert isinstance(answer, Denied)
        assert (answer.code, "start the training job again" in answer.remedy) == ("restored", True)
    assert bench.router.core.runs["r"].trainer.conn == 1, "the newer trainer keeps its run"
    assert isinstance(bench.call(Attach("r", (), (), "after"), attempt=2), Ok)


def test_a_run_that_the_restored_ledger_never_heard_of_is_no_reason_to_wait() -> None:
    bench = Bench()
    empty = copy.deepcopy(bench.ledger)
    bench.open()
    restore(bench, empty)
    answer = bench.call(Attach("r", (), (), "before"))
    assert isinstance(answer, Denied)
    assert answer.code == "restored"


def test_a_checkpoint_ahead_of_the_ledger_is_refused_with_the_step_that_it_ends_at() -> None:
    bench = started(n=1)
    answer = bench.call(open_body(5), attempt=0)
    assert isinstance(answer, Denied)
    assert (answer.code, answer.last_step) == ("ahead", 0)
    assert "older checkpoint" in answer.remedy


def test_a_step_that_the_other_history_took_is_taken_again_under_the_same_numbers() -> None:
    bench = started(n=2)
    backup = copy.deepcopy(bench.ledger)
    for lease in bench.join(W1):
        bench.chunk(W1, lease, 0, 8, "length")
    assert isinstance(bench.commit_step(1, [1, 2]), Ok)
    restore(bench, backup)
    bench.open(0)
    assert isinstance(bench.publish(2, root_of=1), Ok)
    bench.submit(version=2, groups=specs(1, 2))
    back(bench, 30, loaded=1, loaded_root=root(1), ledger="before")
    bench.say(30, WeightsLoaded(2, root(1)))
    for lease in bench.leases(30):
        bench.chunk(30, lease, 0, 8, "length")
    assert isinstance(bench.commit_step(1, [1, 2], 2), Ok)
    assert bench.ledger.consumed == {1: 1, 2: 1}


def test_a_run_that_a_ledger_never_had_begins_at_its_checkpoint_s_step_also_after_a_restart() -> None:
    """The ledger was lost, or a person goes on under another run.name."""
    bench = Bench()
    bench.open(5)
    bench.restart()
    assert bench.router.core.runs["r"].progress.last_committed == 5
    bench.open(5)
    assert bench.router.core.runs["r"].attempt == 2
    bench.publish(1, step=5)
    assert not isinstance(bench.submit(step=6), Denied)
