"""Deaths of engines that change hands, as the owner of a run could use them: whom they blame, and who has to wait."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from scavenger.cluster.model import Job, JobState
from scavenger.harvest.decide.actions import ChangeHands, DrainAllocated, DrainKind, HandsRules
from scavenger.harvest.decide.drain import HANDS_S
from scavenger.ledger import records as rec
from scavenger.router.core.events import WorkerLife
from tests.harvest.test_hands import HANDS, decided, of_run, wants
from tests.harvest.watch import Watch, running

MALLORY, ALICE = 1, 2  # runs, and owners
DIED, NOT_BUILT = 71, 70  # exit codes


class Site(Watch):
    """Engines of run `MALLORY` on one node after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker.health.owners = {MALLORY: "mallory", ALICE: "alice"}
        self.now = 1000.0
        self._names: Iterator[int] = iter(range(1, 1000))

    def starts(self, node: str) -> Job:
        """An engine of run `MALLORY` that works there."""
        n = next(self._names)
        intent = f"scv-{n:016x}"
        self.submit(intent, n, at=self.now)
        job = running(intent, n, nodes=(node,), start_time=self.now)
        self.see(self.now + 1, job)
        self.hear(job, MALLORY)
        self.now += 10
        return job

    def hear(self, job: Job, *runs: int, here: bool = True, ready: bool = True) -> None:
        """The engine of this job worked for all of these runs, and is there for the last one."""
        lives = [
            WorkerLife(job.name, 0, job.nodes[0], self.now + n, self.now + n, False, True, run, self.now + n)
            for n, run in enumerate(runs)
        ]
        last = replace(lives[-1], here=here, ready=ready, ready_at=self.now + len(runs) if ready else 0.0)
        self.tracker.heard([*lives[:-1], last])

    def dies(self, job: Job, code: int = DIED) -> None:
        self.now += 5
        self.see(self.now, replace(job, state=JobState.FAILED, exit_code=code, end_time=self.now))

    def quarantined(self) -> list[str]:
        return [node for node, _ in self.tracker.health.quarantined(self.now)]

    @property
    def blamed(self) -> list[int]:
        return [one.run_id for one in self.of(rec.EngineDied)]

    def waits(self, run_id: int) -> bool:
        return self.tracker.health.backoff_of(run_id)[0] > self.now


def test_engines_that_die_on_their_way_to_another_owner_s_run_do_not_count_as_that_owner_s() -> None:
    """Deaths in one owner's runs close two nodes at most, those of two owners any number: so Mallory's engines would die on the way to
    Alice, whose run has worked long."""
    site = Site()
    alice = site.starts("hers")
    site.tracker.changes_hands(alice.name, ALICE, "key", site.now)
    site.now += 1
    site.hear(alice, MALLORY, ALICE)
    for node in [f"node{n}" for n in range(6)]:
        for _ in range(3):
            job = site.starts(node)
            site.tracker.changes_hands(job.name, ALICE, "key", site.now)
            site.now += 1
            site.hear(job, MALLORY, here=False)
            site.dies(job)
    assert set(site.blamed) == {MALLORY}
    assert len(site.quarantined()) <= 2
    assert not site.waits(ALICE)


def test_one_that_registered_for_its_new_run_and_died_between_two_polls_is_that_run_s() -> None:
    site = Site()
    job = site.starts("node1")
    site.tracker.changes_hands(job.name, ALICE, "key", site.now)
    site.now += 1
    site.hear(job, MALLORY, here=False)
    site.now += 1
    site.hear(job, MALLORY, ALICE, here=False, ready=False)
    site.dies(job)
    assert site.blamed == [ALICE]


def test_an_engine_of_another_s_proves_nothing_for_the_run_that_it_goes_on_for() -> None:
    """It is ready, has samples, and lived long, of the run that it leaves."""
    site = Site()
    job = site.starts("node1")
    site.now += 3600
    site.tracker.changes_hands(job.name, ALICE, "key", site.now)
    site.hear(job, MALLORY)
    site.tracker.works([job.name])
    site.see(site.now, job)
    assert ALICE not in site.tracker.health._proven
    site.now += 1
    site.hear(job, MALLORY, ALICE, ready=False)
    site.see(site.now, job)
    assert ALICE not in site.tracker.health._proven
    site.hear(job, MALLORY, ALICE)
    assert ALICE in site.tracker.health._proven


def test_an_engine_that_dies_at_once_in_its_new_run_makes_that_run_s_owner_wait() -> None:
    """However long its job has worked for others: else a run whose weights kill engines would be given one after the other."""
    site = Site()
    job = site.starts("node1")
    site.now += 3600
    site.tracker.changes_hands(job.name, ALICE, "key", site.now)
    site.now += 1
    site.hear(job, MALLORY, ALICE)
    site.dies(job)
    assert site.waits(ALICE)
    assert not site.waits(MALLORY)


def test_an_engine_that_cannot_be_built_anew_blames_the_run_s_set_up_and_no_node() -> None:
    site = Site()
    for _ in range(3):
        job = site.starts("node1")
        site.tracker.works([job.name])
        site.tracker.changes_hands(job.name, ALICE, "key", site.now, builds=True)
        site.now += 1
        site.hear(job, MALLORY, ALICE, ready=False)
        site.dies(job, NOT_BUILT)
    assert site.quarantined() == []
    assert site.tracker.health.on_trial(ALICE)
    assert not site.tracker.health.on_trial(MALLORY)
    proof = site.starts("node1")
    site.tracker.changes_hands(proof.name, ALICE, "key", site.now)
    site.now += 1
    site.hear(proof, MALLORY, ALICE)
    assert not site.tracker.health.on_trial(ALICE), "one that changed hands since, and works, proves it"


def test_a_run_whose_engine_does_not_get_away_gives_no_more_of_them_on_for_an_hour() -> None:
    """A tokenizer that takes minutes to open holds an engine in mid-load: each change of hands would cost the next run two minutes."""
    site, lost = Site(), 0
    tracker = site.tracker
    for _ in range(40):
        job = site.starts("node1")
        mine = [replace(of_run(int(job.name[4:], 16), MALLORY), intent_id=job.name)]
        rules = HandsRules(stuck=tracker.stuck(site.now))
        found = decided(mine, [wants(0, MALLORY), wants(1, ALICE)], replace(HANDS, hands=rules)).actions
        if any(isinstance(one, ChangeHands) for one in found):
            tracker.changes_hands(job.name, ALICE, "key", site.now)
            site.now += HANDS_S
            tracker.revoke(job.name, DrainKind.CANCELLED, "it has not registered", site.now)
            lost += 1
        else:
            (drain,) = (one for one in found if isinstance(one, DrainAllocated))
            assert "had not got away after 120 s" in drain.reason
            site.now += 60.0
        site.see(site.now, replace(job, state=JobState.CANCELLED, end_time=site.now))
    assert lost == 1
    assert tracker.stuck(site.now + 3601.0) == {}


def test_an_engine_that_is_ended_on_its_way_before_its_time_holds_nothing_against_its_run() -> None:
    """Another user takes its node."""
    site = Site()
    job = site.starts("node1")
    site.tracker.changes_hands(job.name, ALICE, "key", site.now)
    site.tracker.revoke(job.name, DrainKind.CANCELLED, "another user's job waits", site.now + HANDS_S - 1)
    assert site.tracker.stuck(site.now + HANDS_S) == {}
