"""An engine that changes hands: what the core orders, and that no token and no key of one run counts for the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from scavenger.policy.interface import Fact, WorkerLost
from scavenger.protocol.messages import PROTOCOL as VERSION
from scavenger.protocol.messages import (
    Call,
    CallBody,
    ChangeRun,
    Chunks,
    Drain,
    Goodbye,
    GoodbyeAck,
    Heartbeat,
    Held,
    HelloAgain,
    Lease,
    OpenRun,
    PublishVersion,
    Rejected,
    SubmitGroups,
    WeightsLoaded,
    Welcome,
    WorkerHello,
)
from scavenger.router.core import workers
from scavenger.router.core.events import (
    HelloReceived,
    IntentHandedOver,
    IntentRevoked,
    JobGone,
    PeerIdentity,
    TrainerCalled,
)
from scavenger.router.core.transitions import SampleStatus, WorkerStatus
from tests.router.harness import OWNER, SOURCE, Bench, chunk_of, open_body, root, specs

INTENT = "scv-1"
FIRST, SECOND = 11, 12  # connections of the one process, before and after
TRAINERS = {"a": 1, "b": 2}
ORDER = IntentHandedOver(INTENT, "key-b", "run b gains more")


class TwoRuns(Bench):
    """Runs `a` and `b` of two owners, each with samples that wait."""

    def __init__(self) -> None:
        super().__init__()
        for run in TRAINERS:
            self.of(run, structs.replace(open_body(), run=run), attempt=0)
            self.of(run, PublishVersion(1, 0, root(1), b"manifest", (SOURCE,)))
            self.of(run, SubmitGroups(1, 1, "train", specs(1, 2)))

    def of(self, run: str, body: CallBody, attempt: int = 1) -> None:
        self.call_id += 1
        owner = owner_of(run)
        self.handle(TrainerCalled(TRAINERS[run], owner, Call(self.call_id, run, attempt, body)))

    def register(self, conn: int, run: str, session: str, incarnation: int = 0, **how: object) -> None:
        who = PeerIdentity("worker", f"key-{run}", run, INTENT)
        said = WorkerHello(VERSION, "harvested", run, session, incarnation, 7, "n1", 1, "reference", "0", 1)
        self.handle(HelloReceived(conn, who, structs.replace(said, **how)))

    def serve(self, conn: int, run: str, session: str, **how: int) -> list[Lease]:
        self.register(conn, run, session, **how)
        self.say(conn, WeightsLoaded(1, root(1)))
        return self.leases(conn)

    def working(self) -> list[Lease]:
        """An engine of `a` in mid-sample: of its first sample three tokens are durable."""
        leases = self.serve(FIRST, "a", "s1")
        self.chunk(FIRST, leases[0], 0, 3)
        return leases

    def states(self, run: str) -> list[tuple[SampleStatus, int]]:
        mine = self.router.core.runs[run].id
        return [(s.status, s.accepted) for s in self.router.core.samples.values() if s.group.run.id == mine]


def owner_of(run: str) -> PeerIdentity:
    return PeerIdentity("owner", f"{OWNER.public_key}-{run}")


def test_the_engine_leaves_one_run_with_all_its_tokens_and_works_for_the_other() -> None:
    bench = TwoRuns()
    leases = bench.working()
    bench.handle(ORDER)
    assert bench.take(FIRST, ChangeRun) == [ChangeRun("key-b", "run b gains more")]
    assert bench.router.core.workers[1].status is WorkerStatus.HANDING_OVER
    bench.chunk(FIRST, leases[0], 3, 2)  # what it still had
    bench.say(FIRST, Goodbye("run b gains more", notice=False))
    assert len(bench.take(FIRST, GoodbyeAck)) == 1
    assert bench.states("a") == [(SampleStatus.QUEUED, 5), (SampleStatus.QUEUED, 0)]
    given = bench.serve(SECOND, "b", "s2")
    assert [lease.sample_id for lease in given] == [
        s.id for s in bench.router.core.samples.values() if s.group.run.name == "b"
    ]
    (worker,) = bench.router.core.workers.values()
    assert (worker.run.name, worker.id, worker.process.intent_id) == ("b", 2, INTENT)


def test_it_gets_no_leases_while_it_changes_hands_and_the_order_is_repeated() -> None:
    bench = TwoRuns()
    bench.working()
    bench.handle(ORDER)
    bench.take(FIRST, ChangeRun)
    bench.of("a", SubmitGroups(2, 1, "train", specs(1, 2)))
    assert bench.leases(FIRST) == []
    bench.say(FIRST, Heartbeat((Held(1, 1, 3), Held(2, 1, 0)), 0, 1))
    assert len(bench.take(FIRST, ChangeRun)) == 1
    bench.handle(ORDER)
    assert bench.take(FIRST, ChangeRun) == []


def test_after_a_reconnection_in_between_the_order_is_repeated_and_the_job_goes_on() -> None:
    bench = TwoRuns()
    bench.working()
    bench.handle(ORDER)
    bench.take(FIRST, ChangeRun)
    bench.register(13, "a", "s1", held=(Held(1, 1, 3),), loaded_version=1, loaded_root=root(1), leaving=True)
    assert bench.take(13, Drain) == []
    assert len(bench.take(13, ChangeRun)) == 1


def test_other_users_come_first_an_engine_that_changes_hands_may_still_be_drained() -> None:
    bench = TwoRuns()
    bench.working()
    bench.handle(ORDER)
    bench.handle(IntentRevoked(INTENT, "other users wait"))
    assert bench.router.core.workers[1].status is WorkerStatus.DRAINING
    assert bench.take(FIRST, Drain) == [Drain("other users wait")]
    bench.handle(ORDER)
    assert bench.router.core.workers[1].status is WorkerStatus.DRAINING, "it never turns back"


def test_a_goodbye_that_was_lost_is_made_good_by_the_registration_for_the_other_run() -> None:
    bench = TwoRuns()
    bench.working()
    bench.handle(ORDER)
    bench.serve(SECOND, "b", "s2")
    assert [w.run.name for w in bench.router.core.workers.values()] == ["b"]
    assert bench.states("a") == [(SampleStatus.QUEUED, 3), (SampleStatus.QUEUED, 0)]


@pytest.mark.parametrize("said", ["chunks", "heartbeat", "old key"])
def test_nothing_that_the_old_worker_says_late_counts(said: str) -> None:
    bench = TwoRuns()
    leases = bench.working()
    bench.handle(ORDER)
    bench.say(FIRST, Goodbye("", notice=False))
    theirs = bench.serve(SECOND, "b", "s2")
    before = (bench.states("a"), bench.states("b"))
    if said == "chunks":  # under the old connection, and forged under the new one
        bench.chunk(FIRST, leases[0], 3, 2)
        bench.say(SECOND, Chunks((chunk_of(leases[0].sample_id, leases[0].epoch, 1, 3, 2),)))
    elif said == "heartbeat":
        bench.say(FIRST, Heartbeat((Held(leases[0].sample_id, 1, 5),), 3, 1))
    else:
        who = PeerIdentity("worker", "key-b", "b", INTENT)
        hello = WorkerHello(VERSION, "harvested", "a", "s3", 0, 7, "n1", 1, "reference", "0", 1)
        bench.handle(HelloReceived(14, who, hello))
        assert "another run" in bench.take(14, Rejected)[0].reason
    assert (bench.states("a"), bench.states("b")) == before
    assert bench.take(FIRST, HelloAgain) == []
    assert {
        s.worker_id for s in bench.router.core.samples.values() if s.id in {x.sample_id for x in theirs}
    } == {2}


def test_one_that_is_not_there_yet_and_one_that_hosts_bound_leave_for_good() -> None:
    bench = TwoRuns()
    bench.working()
    bench.restart()
    assert bench.router.core.workers[1].status is WorkerStatus.AWAY
    bench.handle(ORDER)
    assert bench.router.core.workers[1].status is WorkerStatus.DRAINING
    guest = TwoRuns()
    guest.register(FIRST, "a", "s1", lease_limit=2)
    guest.handle(ORDER)
    assert len(guest.take(FIRST, Drain)) == 1


def test_both_lives_of_an_engine_that_changed_hands_are_recorded_with_their_runs() -> None:
    bench = TwoRuns()
    bench.working()
    bench.handle(ORDER)
    bench.say(FIRST, Goodbye("", notice=False))
    bench.serve(SECOND, "b", "s2")
    lives = [(life.intent_id, life.run_id, life.here) for life in workers.lives(bench.router.core)]
    assert lives == [(INTENT, 1, False), (INTENT, 2, True)]
    bench.handle(JobGone(INTENT, 0, "preempted", False))
    assert bench.router.core.workers == {}


def test_it_is_not_counted_as_a_preemption() -> None:
    lost: list[Fact] = []
    bench = TwoRuns()
    bench.working()
    run = bench.router.core.runs["a"]
    observe = run.policy.observe
    run.policy.observe = lambda fact, now: (lost.append(fact), observe(fact, now))[1]  # type: ignore[method-assign, func-returns-value]
    bench.handle(ORDER)
    bench.say(FIRST, Goodbye("", notice=False))
    assert [fact.preempted for fact in lost if isinstance(fact, WorkerLost)] == [False]


def test_the_welcome_names_the_run_of_the_new_key() -> None:
    bench = TwoRuns()
    bench.working()
    bench.handle(ORDER)
    bench.say(FIRST, Goodbye("", notice=False))
    bench.register(SECOND, "b", "s2")
    assert [(w.run, w.worker_id) for w in bench.take(SECOND, Welcome)] == [("b", 2)]


def hands_of(*bodies: OpenRun) -> list[str]:
    """What the demand of runs that were opened with these says of their engines."""
    bench = TwoRuns()
    core = bench.router.core
    core.limits = replace(core.limits, vllm_options=("kv_offloading_size",))
    for run, body in zip(TRAINERS, bodies, strict=True):
        bench.of(run, structs.replace(body, run=run, resume_step=0), attempt=0)
    hands = {want.run: want.hands for want in bench.router.demand(bench.now)}
    return [hands[run] for run in TRAINERS]


def test_a_run_s_demand_says_whether_and_with_whom_its_engines_change_hands() -> None:
    plain = open_body()
    first, second = hands_of(plain, plain)
    assert first == second != ""
    assert hands_of(plain, structs.replace(plain, isolation="process")) == [first, ""]


def test_engines_of_vllm_change_hands_unless_they_have_options_that_not_every_run_may_set() -> None:
    def vllm(options: str) -> OpenRun:
        body = open_body()
        return structs.replace(body, engine=structs.replace(body.engine, name="vllm", options=options))

    first, second = hands_of(vllm('{"block_size": 32}'), vllm('{"block_size": 32}'))
    assert first == second != ""
    first, second = hands_of(vllm('{"block_size": 32}'), vllm('{"block_size": 16}'))
    assert first != second
    assert hands_of(vllm('{"kv_offloading_size": 4}'), vllm('{"kv_offloading_size": 4}')) == ["", ""]
