"""An engine that lends slots: what the core orders, and that neither run's tokens and keys count for the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from scavenger.protocol.messages import (
    LENT_INTENT,
    Chunks,
    Drain,
    Goodbye,
    Heartbeat,
    Held,
    Lease,
    LendSlots,
    OpenRun,
    Rejected,
    Revoke,
    WeightsLoaded,
    WorkerHello,
)
from scavenger.protocol.messages import PROTOCOL as VERSION
from scavenger.router.core import guests
from scavenger.router.core.events import (
    HelloReceived,
    IntentHandedOver,
    IntentRevoked,
    JobGone,
    PeerIdentity,
    SlotsLent,
)
from scavenger.router.core.transitions import SampleStatus
from tests.router.harness import chunk_of, open_body, root
from tests.router.test_handing_over import FIRST, INTENT, ORDER, SECOND, TRAINERS, TwoRuns

LENT = f"{LENT_INTENT}{INTENT}"
LOAN = SlotsLent(INTENT, "key-lent", "b", 1, "samples of run b wait")
ORDERED = LendSlots("key-lent", "b", 1, "samples of run b wait")
OVER = SlotsLent(INTENT, "", "", 0, "the loan is over")


class Lending(TwoRuns):
    """An engine of `a` in mid-sample, in one of whose slots `b` generates."""

    def __init__(self) -> None:
        super().__init__()
        self.hers = self.working()
        self.handle(LOAN)

    def borrow(self, session: str = "s2", slots: int = 1) -> list[Lease]:
        who = PeerIdentity("worker", "key-lent", "b", LENT)
        hello = WorkerHello(VERSION, "harvested", "b", session, 0, 7, "n1", 1, "reference", "0", 1)
        self.handle(HelloReceived(SECOND, who, structs.replace(hello, lease_limit=slots)))
        self.say(SECOND, WeightsLoaded(1, root(1)))
        return self.leases(SECOND)

    def beat(self, lends: str) -> None:
        held = tuple(Held(lease.sample_id, lease.epoch, 3 * (n == 0)) for n, lease in enumerate(self.hers))
        self.say(FIRST, Heartbeat(held, 1, 1, lends=lends))


def test_the_order_is_repeated_until_a_heartbeat_names_its_key() -> None:
    bench = Lending()
    assert bench.take(FIRST, LendSlots) == [ORDERED]
    bench.beat("")
    assert bench.take(FIRST, LendSlots) == [ORDERED]
    bench.beat("key-lent")
    assert bench.take(FIRST, LendSlots) == []
    bench.handle(OVER)
    over = bench.take(FIRST, LendSlots)
    assert [(one.public_key, one.slots) for one in over] == [("", 0)]
    bench.beat("key-lent")
    assert bench.take(FIRST, LendSlots) == over
    bench.beat("")
    assert bench.take(FIRST, LendSlots) == []


def test_what_a_run_held_against_a_borrower_goes_with_its_key() -> None:
    bench = Lending()
    bench.borrow()
    of_b = bench.router.core.runs["b"]
    assert list(of_b.guests) == [LENT]
    of_b.guests[LENT].refused = "3 samples failed on it"
    hello = WorkerHello(VERSION, "harvested", "b", "s9", 0, 7, "n1", 1, "reference", "0", 1)
    bench.handle(HelloReceived(15, PeerIdentity("worker", "key-lent", "b", LENT), hello))
    (refused,) = bench.take(15, Rejected)
    assert (refused.reason, refused.remedy) == (
        "the key to these lent slots is refused: 3 samples failed on it",
        guests.LENT,
    )
    bench.handle(OVER)
    assert not of_b.guests


def test_a_daemon_that_restarted_ends_what_it_did_not_lend() -> None:
    bench = Lending()
    bench.take(FIRST, LendSlots)
    bench.restart()
    held = (Held(1, 1, 3), Held(2, 1, 0))
    bench.register(15, "a", "s1", held=held, loaded_version=1, loaded_root=root(1))
    bench.say(15, Heartbeat(held, 1, 1, lends="key-lent"))
    assert [one.public_key for one in bench.take(15, LendSlots)] == [""]


def test_the_borrower_is_a_worker_of_its_own_run_and_holds_no_more_than_its_slots() -> None:
    bench = Lending()
    (lease,) = bench.borrow()
    assert bench.router.core.samples[lease.sample_id].group.run.name == "b"
    assert {w.run.name for w in bench.router.core.workers.values()} == {"a", "b"}
    assert bench.states("a")[0] == (SampleStatus.LEASED, 3), "hers go on"
    lender, borrower = sorted(bench.router.core.workers.values(), key=lambda w: w.id)
    assert (lender.bounded, borrower.bounded) == (False, True)


def test_no_token_counts_that_comes_over_the_other_run_s_connection() -> None:
    """What a worker process would do that gives one run's tokens to the other: planted, and refused either way."""
    bench = Lending()
    (his,) = bench.borrow()
    hers = bench.hers[0]
    before = bench.states("a"), bench.states("b")
    bench.say(FIRST, Chunks((chunk_of(his.sample_id, his.epoch, 1, 0, 2),)))
    bench.say(SECOND, Chunks((chunk_of(hers.sample_id, hers.epoch, 1, 3, 2),)))
    assert (bench.states("a"), bench.states("b")) == before
    bench.chunk(SECOND, his, 0, 2)
    bench.chunk(FIRST, hers, 3, 1)
    assert bench.states("b")[0] == (SampleStatus.LEASED, 2)
    assert bench.states("a")[0] == (SampleStatus.LEASED, 4)


def test_the_borrower_s_key_opens_nothing_of_the_lender_s_run() -> None:
    bench = Lending()
    who = PeerIdentity("worker", "key-lent", "b", LENT)
    hello = WorkerHello(VERSION, "harvested", "a", "s3", 0, 7, "n1", 1, "reference", "0", 1)
    bench.handle(HelloReceived(14, who, hello))
    assert "another run" in bench.take(14, Rejected)[0].reason


def test_at_the_loan_s_end_the_borrower_leaves_with_all_its_tokens_and_the_lender_stays() -> None:
    bench = Lending()
    (his,) = bench.borrow()
    bench.chunk(SECOND, his, 0, 2)
    bench.handle(IntentRevoked(LENT, "samples of run a wait"))
    assert bench.take(SECOND, Drain) == [Drain("samples of run a wait")]
    assert bench.take(FIRST, Drain) == []
    bench.chunk(SECOND, his, 2, 1)
    bench.say(SECOND, Goodbye("samples of run a wait", notice=False))
    assert bench.states("b")[0] == (SampleStatus.QUEUED, 3)
    assert bench.states("a")[0] == (SampleStatus.LEASED, 3)


@pytest.mark.parametrize("gone", [INTENT, LENT])
def test_either_worker_may_be_lost_without_the_other_s_samples(gone: str) -> None:
    bench = Lending()
    (his,) = bench.borrow()
    bench.chunk(SECOND, his, 0, 2)
    bench.handle(JobGone(gone, 0, "preempted", False))
    states = {run: bench.states(run)[0] for run in TRAINERS}
    assert states == {
        "a": (SampleStatus.QUEUED if gone == INTENT else SampleStatus.LEASED, 3),
        "b": (SampleStatus.QUEUED if gone == LENT else SampleStatus.LEASED, 2),
    }
    assert bench.take(FIRST, Revoke) == []


@pytest.mark.parametrize(
    "lends", ["ordered", "over before a heartbeat", "until its heartbeat says so", "no more"]
)
def test_what_ends_an_engine_while_it_lends_is_not_held_against_the_lender_s_samples(lends: str) -> None:
    bench = Lending()
    bench.borrow()
    lent = lends != "no more"
    if lends in ("until its heartbeat says so", "no more"):
        bench.beat("key-lent")
    if lends != "ordered":
        bench.handle(OVER)
    if not lent:
        bench.beat("")
    bench.handle(JobGone(INTENT, 0, "exit code 1", True))
    hers = [bench.sample(lease.sample_id) for lease in bench.hers]
    assert {sample.failures for sample in hers} == {0 if lent else 1}
    assert {sample.status for sample in hers} == {SampleStatus.QUEUED}


def test_an_engine_that_leaves_or_changes_hands_is_not_asked_to_lend() -> None:
    for leaves in (IntentRevoked(INTENT, "other users wait"), replace(ORDER)):
        bench = TwoRuns()
        bench.working()
        assert isinstance(leaves, IntentRevoked | IntentHandedOver)
        bench.handle(leaves)
        bench.handle(LOAN)
        assert bench.take(FIRST, LendSlots) == []


def shares_of(*bodies: OpenRun, versions: bool = True) -> list[str]:
    bench = TwoRuns()
    for run, body in zip(TRAINERS, bodies, strict=True):
        bench.of(run, structs.replace(body, run=run, resume_step=0), attempt=0)
    if not versions:
        for known in bench.router.core.runs.values():
            known.weights.versions.clear()
    found = {want.run: want for want in bench.router.demand(bench.now)}
    return [found[run].shares for run in TRAINERS]


def test_a_run_s_demand_says_with_whom_its_samples_may_be_in_one_batch() -> None:
    body = open_body()
    spec = structs.replace(body.engine, adapter_rank=4, speculation="none", move_kv=False, shared=True)
    both = structs.replace(body, engine=spec)
    first, second = shares_of(both, both)
    assert first == second != ""
    assert shares_of(both, structs.replace(both, engine=structs.replace(spec, shared=False))) == [first, ""]
    assert shares_of(both, structs.replace(both, isolation="process")) == [first, ""]
    assert shares_of(both, structs.replace(both, engine=body.engine)) == [first, ""], "it merges"
    other = structs.replace(both, engine=structs.replace(spec, adapter_rank=8))
    assert len(set(shares_of(both, other))) == 2
    assert shares_of(both, both, versions=False) == ["", ""], "whose base is not known yet"


def test_the_demand_counts_samples_that_wait() -> None:
    bench = TwoRuns()
    assert [want.queued for want in bench.router.demand(bench.now)] == [2, 2]
    bench.working()
    assert [(want.queued, want.max_batch > 0) for want in bench.router.demand(bench.now)] == [
        (0, True),
        (2, True),
    ]
