"""What a peer that is let in and misbehaves can make: rows in the ledger and entries in memory, both bounded."""

from __future__ import annotations

import msgspec
import pytest

from scavenger.ledger import records as rec
from scavenger.protocol.messages import Call, Denied, Heartbeat, Ok, RecordCheckpoint, Rejected
from scavenger.router.core import registration, steps
from scavenger.router.core import tables as core_module
from scavenger.router.core.events import TrainerCalled
from scavenger.router.core.row_budget import PEER_EVERY_S, REFUSALS_LOGGED
from tests.router.harness import OWNER, Bench, open_body, root, specs, started
from tests.router.moves import W1, W2, finish_all


def rows(bench: Bench, kind: type[rec.Record]) -> int:
    return sum(isinstance(record, kind) for record in bench.ledger.log)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(core_module, "PEER_BURST", 20)
    return 20


def test_a_worker_that_registers_as_a_new_one_for_ever_makes_rows_at_a_low_rate_and_stops_no_other(
    few: int,
) -> None:
    bench = started()
    for n in range(200):
        bench.hello(W1, session=f"s{n}")
    assert rows(bench, rec.WorkerJoined) == few
    assert rows(bench, rec.WorkerLeft) < few
    assert bench.take(W1, Rejected)[-1].retry, "it is not turned away for ever"
    assert bench.router.core.counters["hello_refused"] == 200 - few
    bench.hello(W2)
    assert rows(bench, rec.WorkerJoined) == few + 1
    bench.tick(PEER_EVERY_S, step=PEER_EVERY_S)
    bench.hello(W1, session="patient")
    assert rows(bench, rec.WorkerJoined) == few + 2


def test_each_reserved_engine_of_an_owner_has_its_own_budget_and_a_committed_step_renews_it(few: int) -> None:
    bench = started(n=2)
    for slot in range(2 * few):
        bench.hello(100 + slot, kind="reserved", slot=str(slot))
    assert rows(bench, rec.WorkerJoined) == 2 * few, "a large run, or a sweep of many, is no flood"
    for n in range(3 * few):
        bench.hello(100, kind="reserved", slot="0", session=f"again{n}")
    assert rows(bench, rec.WorkerJoined) == 3 * few - 1, "one that is started again and again is"
    assert bench.take(100, Rejected)[-1].retry
    leases = bench.join(W1)
    finish_all(bench, W1, leases)
    assert isinstance(bench.commit_step(1, [lease.sample_id for lease in leases]), Ok)
    before = rows(bench, rec.WorkerJoined)
    bench.hello(100, kind="reserved", slot="0", session="after a step")
    assert rows(bench, rec.WorkerJoined) == before + 1


def test_an_owner_whose_engines_name_ever_new_slots_makes_rows_at_a_low_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registration, "OWNER_BURST", 20)
    bench = started()
    for n in range(100):
        bench.hello(100 + n, kind="reserved", slot=f"slot{n}")
    assert rows(bench, rec.WorkerJoined) == 20
    assert bench.router.core.counters["hello_refused"] == 80


def test_a_worker_that_falls_silent_and_comes_back_for_ever_is_told_of_less_and_less() -> None:
    bench = Bench()
    bench.open()
    bench.publish()
    bench.join(W1)
    silent_s = bench.router.core.limits.suspect_s + 0.5
    times = 4 * REFUSALS_LOGGED
    for _ in range(times):
        bench.tick(silent_s)
        bench.say(W1, Heartbeat((), 0, 1))
    assert bench.router.core.counters["worker_suspect"] == bench.router.core.counters["worker_back"] == times
    for kind in ("worker_suspect", "worker_back"):
        assert len(bench.events(kind)) == REFUSALS_LOGGED + 2, kind  # the first 100, and at 200 and 400


@pytest.mark.parametrize("what", ["open", "publish", "checkpoint"])
def test_a_trainer_that_commits_nothing_makes_rows_at_a_low_rate(few: int, what: str) -> None:
    bench = started()
    kinds: dict[str, type[rec.Record]] = {
        "open": rec.AttemptGranted,
        "publish": rec.VersionPublished,
        "checkpoint": rec.CheckpointRecorded,
    }
    kind, refused = kinds[what], 0
    before = len(bench.ledger.log)
    for n in range(100):
        if what == "open":
            granted = rows(bench, rec.AttemptGranted)
            bench.open()
            refused += rows(bench, rec.AttemptGranted) == granted
        elif what == "publish":
            refused += isinstance(bench.publish(n + 2), Denied)
        else:
            refused += isinstance(bench.call(RecordCheckpoint(0, 1, root(1), f"/c{n}")), Denied)
    assert few - 2 <= rows(bench, kind) <= few + 1, (
        "what is within the bound is done, with the one that it was started with"
    )
    assert refused >= 100 - few
    assert len(bench.ledger.log) - before <= 4 * few
    assert bench.router.core.counters["calls_refused"] == refused


def test_what_writes_no_row_is_not_charged(few: int) -> None:
    """A trainer whose daemon restarts announces its versions again; one that asks in vain has made nothing."""
    bench = started()
    for _ in range(3 * few):
        assert isinstance(bench.publish(1), Ok)
        assert isinstance(bench.publish(0), Denied)  # a number that was used
        bench.call(msgspec.structs.replace(open_body(), seed=8))  # another run of that name
    assert isinstance(bench.publish(2), Ok)
    assert "calls_refused" not in bench.router.core.counters


def test_runs_of_one_owner_are_charged_apart_and_new_ones_are_bounded(few: int) -> None:
    bench = started()
    core = bench.router.core
    for n in range(2, 100):
        body = msgspec.structs.replace(open_body(), run=f"r{n}")
        bench.handle(TrainerCalled(50 + n, OWNER, Call(n, f"r{n}", 0, body)))
    assert rows(bench, rec.RunCreated) == len(core.runs) == few
    assert core.counters["calls_refused"] == 99 - few
    said = bench.answer(99, 149)
    assert isinstance(said, Denied)
    assert "runs of this owner" in said.reason
    for n in range(2 * few):
        bench.call(RecordCheckpoint(0, 1, root(1), f"/c{n}"))
    assert rows(bench, rec.CheckpointRecorded) == few - 1, "and its first version"
    bench.handle(TrainerCalled(52, OWNER, Call(200, "r2", 0, msgspec.structs.replace(open_body(), run="r2"))))
    assert core.runs["r2"].attempt == 2, "another run is not held to account"


def test_a_committed_step_makes_room_again(few: int) -> None:
    bench = started(n=2)
    leases = bench.join(W1)
    for n in range(few):
        bench.call(RecordCheckpoint(0, 1, root(1), f"/c{n}"))
    said = bench.call(RecordCheckpoint(0, 1, root(1), "/one-more"))
    assert isinstance(said, Denied)
    assert "no step was committed" in said.reason
    finish_all(bench, W1, leases)
    assert isinstance(bench.commit_step(1, [lease.sample_id for lease in leases]), Ok)
    assert isinstance(bench.call(RecordCheckpoint(0, 1, root(1), "/now")), Ok)


def test_groups_that_are_open_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "MAX_OPEN_GROUPS", 5)
    bench = started()
    assert not isinstance(bench.submit(step=2, groups=specs(4)), Denied)
    before = rows(bench, rec.GroupCreated)
    assert not isinstance(bench.submit(step=2, groups=specs(4)), Denied), "a repeat makes none"
    said = bench.submit(step=3, groups=specs(1))
    assert isinstance(said, Denied)
    assert "groups are open" in said.reason
    assert rows(bench, rec.GroupCreated) == before


def test_what_is_remembered_of_keys_is_bounded_and_the_newest_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core_module, "MAX_KEYS", 8)
    core = started().router.core
    for n in range(100):
        core.count_refusal(f"key{n}")
        core.charge_row(f"key{n}")
    assert list(core.nonsense) == [f"key{n}" for n in range(92, 100)]
    assert len(core._budgets) == 8
    core.count_refusal("key92")
    core.count_refusal("new")
    assert "key92" in core.nonsense, "who goes on is not forgotten for it"
