"""The harvester on a real local cluster: jobs are processes, preemption is real; ledger and router are lists."""

from __future__ import annotations

import asyncio
import getpass
import itertools
import stat
import time
from dataclasses import replace
from typing import Any

import pytest

from scavenger.cluster.model import ClusterView, JobLife, JobState, PreemptMode
from scavenger.config import DaemonConfig
from scavenger.errors import ClusterError, ClusterUnavailable, ConfigError
from scavenger.harvest import harvester as polling
from scavenger.harvest.decide.actions import Loan, comment_of
from scavenger.harvest.decide.lending import LEAVES_S, lent
from scavenger.harvest.track.waits import OtherUsersWaits
from scavenger.ledger import records as rec
from scavenger.observe import status
from scavenger.policy.fleet_size import Benefit, Demand
from scavenger.policy.forecast.survival import prior
from scavenger.policy.idle_gpus import Idle, Idling, node_class
from scavenger.protocol import keys
from scavenger.router.core.events import IntentRevoked, JobGone, PeerIdentity, SlotsLent
from tests.harvest.world import UID, World, running, spec, until

DIES = "#!/bin/bash\nexit 3\n"
BARE = """#!/bin/bash
echo "rollout: engine 'reference' cannot be imported: No module named 'torch'" >&2
echo "  remedy: install its extra" >&2
exit 70
"""


def test_idle_gpus_are_harvested_and_the_intent_is_durable_before_the_job_exists(world: World) -> None:
    async def play() -> None:
        world.want(3)
        async with running(world.harvester()):
            await until("three engines run", lambda: len(world.jobs(JobState.RUNNING)) == 3)
            await until("the ledger has their holds", lambda: len(world.of(rec.AllocationStarted)) == 3)
            assert len(world.of(rec.JobIntended)) == 3

    asyncio.run(play())
    for intended in world.of(rec.JobIntended):
        order = [
            next(
                n
                for n, one in enumerate(world.said)
                if isinstance(one, kind) and one.intent_id == intended.intent_id
            )
            for kind in (rec.JobIntended, rec.JobSubmitted, rec.JobObserved)
        ]
        submit = world.said.index(("submit", intended.intent_id))
        assert order[0] < submit < order[1] < order[2]
        path = keys.worker_key_path(world.state_dir, intended.intent_id)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert keys.read_keypair(path).public == intended.worker_key
        assert world.allowed[intended.worker_key] == PeerIdentity(
            "worker", intended.worker_key, "run", intended.intent_id
        )
    pinned = {intended.intent_id: (intended.pinned,) for intended in world.of(rec.JobIntended)}
    assert {job.name: job.nodes for job in world.jobs()} == pinned, (
        "the node that was chosen is in the ledger"
    )
    assert len(world.jobs()) == 3, "without cancel the jobs stay for the next daemon"
    assert all(job.comment == comment_of(UID, job.name, "run") for job in world.jobs())
    polled = world.of(rec.ClusterPolled)[-1]
    assert (polled.gpus_harvested, polled.gpus_idle, polled.gpus_other_users) == (3, 1, 0)
    assert (polled.gpus_reserved, polled.gpus_unusable) == (0, 0)


@pytest.mark.parametrize("ahead_s", [600.0, -600.0], ids=["ahead", "behind"])
def test_a_clock_that_is_ten_minutes_off_ends_no_engine_and_dates_no_hold_wrongly(
    world: World, ahead_s: float
) -> None:
    """Slurm's times are then in our past or future: an engine would look overdue, or its hold ten minutes long."""
    world.ahead_s = ahead_s

    async def play() -> None:
        world.want(4)
        async with running(world.harvester(drain_notice_s=0.5)):
            await until("four engines hold GPUs", lambda: len(world.of(rec.AllocationStarted)) == 4)
            n = len(world.of(rec.ClusterPolled))
            await until("and are looked at", lambda: len(world.of(rec.ClusterPolled)) > n + 3)
            assert not [one for one in world.said if isinstance(one, tuple) and one[0] == "cancel"], (
                "nothing happened but time"
            )
            assert (world.of(IntentRevoked), world.of(rec.AllocationEnded)) == ([], [])
            theirs = world.site.submit(spec())
            await until(
                "they get their GPUs", lambda: theirs in [job.job_id for job in world.jobs(JobState.RUNNING)]
            )
            await until("two engines were preempted", lambda: len(world.of(rec.AllocationEnded)) == 2)
            world.want(0)
            await until("the others leave when nobody wants them", lambda: len(world.of(rec.JobEnded)) >= 4)

    asyncio.run(play())
    assert [end.reason for end in world.of(rec.AllocationEnded)][:2] == ["preempted"] * 2
    began = {
        (allocation.intent_id, allocation.restart_count): allocation.at
        for allocation in world.of(rec.AllocationStarted)
    }
    for end in world.of(rec.AllocationEnded):
        assert 0 <= end.at - began[end.intent_id, end.restart_count] < 120
        assert abs(end.at - time.time() - ahead_s) < 120, "in our clock"


def test_a_template_that_makes_no_script_is_refused_at_start(world: World) -> None:
    with pytest.raises(ConfigError, match="#!"):
        world.harvester(template="echo no interpreter")
    with pytest.raises(ConfigError, match="secret"):
        world.harvester(template="#!/bin/bash\necho {{ secret }}")


def test_a_preempted_engine_is_told_to_the_router_and_comes_back_under_the_same_id(world: World) -> None:
    async def play() -> None:
        world.want(1)
        async with running(world.harvester()):
            await until("an engine runs", lambda: world.jobs(JobState.RUNNING))
            [mine] = world.jobs()
            await until("it is observed", lambda: world.of(rec.AllocationStarted))
            theirs = [world.site.submit(spec()) for _ in range(2)]
            await until("the router knows", lambda: world.of(JobGone))
            await until(
                "it waits", lambda: [job for job in world.jobs(JobState.PENDING) if job.job_id == mine.job_id]
            )
            world.site.cancel(tuple(theirs))
            await until(
                "it holds again", lambda: [h.restart_count for h in world.of(rec.AllocationStarted)] == [0, 1]
            )
            assert [job.job_id for job in world.jobs(JobState.RUNNING)] == [mine.job_id]

    asyncio.run(play())
    [gone] = world.of(JobGone)
    assert (gone.incarnation, gone.crashed) == (0, False)
    assert [end.reason for end in world.of(rec.AllocationEnded)] == ["preempted"]
    assert len(world.of(rec.JobIntended)) == 1, "the requeued job serves the demand"


def test_with_the_budget_spent_the_queue_alone_is_looked_at_and_a_preemption_brings_a_whole_look_at_once(
    world: World,
) -> None:
    # looks at the queue cost nothing here, whole ones 50: after twelve of them the 600 that are saved up at first are spent
    world.pace |= {"poll_interval_s": 60.0, "max_rpc_per_min": 60.0}
    world.cluster.whole_cost = 50

    async def play() -> None:
        world.site.submit(spec(gpus=2, nodelist=("node1",)))
        world.site.submit(spec(gpus=1, nodelist=("node2",)))
        world.want(1)
        async with running(world.harvester()):
            await until("an engine runs", lambda: world.of(rec.AllocationStarted))
            world.want(0)  # it does not listen, so that its leave is expected from now on
            await until("it is asked to leave", lambda: world.of(IntentRevoked))
            await until("only the queue is looked at", lambda: world.cluster.looks[-5:] == ["jobs"] * 5)
            whole, samples = world.cluster.looks.count("full"), len(world.of(rec.ClusterPolled))
            assert whole == samples <= 12
            world.site.submit(spec(gpus=1, nodelist=("node2",)))
            await until("the router knows, long before poll_interval_s", lambda: world.of(JobGone))
            assert world.cluster.looks.count("full") == whole + 1
            await until("it was seen completing, or gone", lambda: world.of(rec.AllocationEnded))

    asyncio.run(play())
    assert [end.reason for end in world.of(rec.AllocationEnded)] == ["requeued"], "we had asked it to leave"


def test_with_demand_gone_pending_jobs_are_cancelled_and_engines_drained(world: World) -> None:
    async def play() -> None:
        world.site.submit(spec(gpus=2, nodelist=("node1",)))
        world.want(2)
        async with running(world.harvester(drain_notice_s=0.5)):
            await until("two engines run", lambda: len(world.of(rec.AllocationStarted)) == 2)
            world.want(0)
            await until("both are drained", lambda: len(world.of(IntentRevoked)) == 2)
            # these engines do not listen: after the grace they are cancelled
            await until(
                "both have left", lambda: not [job for job in world.jobs() if job.partition == "scavenge"]
            )
            await until("both are closed", lambda: len(world.of(rec.JobEnded)) == 2)

    asyncio.run(play())
    assert len(world.acted("drain")) == 2
    assert len(world.acted("cancel")) == 2
    assert world.allowed == {}
    assert not list((world.state_dir / "workers").glob("*.key"))
    assert {end.reason for end in world.of(rec.AllocationEnded)} == {"cancelled"}


def test_an_engine_that_never_connected_is_cancelled_at_once_when_nobody_wants_it(world: World) -> None:
    async def play() -> None:
        world.connected = False
        world.want(1)
        async with running(world.harvester()):
            await until("it runs", lambda: world.of(rec.AllocationStarted))
            world.want(0)
            await until("it is gone", lambda: not world.jobs())

    asyncio.run(play())
    assert world.of(IntentRevoked) == []


def test_a_cluster_that_fails_for_a_while_is_an_event_with_back_off_and_costs_no_job(world: World) -> None:
    async def play() -> None:
        world.want(2)
        async with running(world.harvester()):
            await until("two engines run", lambda: len(world.of(rec.AllocationStarted)) == 2)
            world.cluster.fail_view = True
            await until(
                "a failure", lambda: world.events("cluster_unavailable")
            )  # a look that had begun before may still decide
            world.want(0)  # nothing is decided on a cluster that is not seen
            await until("three failures", lambda: len(world.events("cluster_unavailable")) == 3)
            before = len(world.of(rec.ClusterPolled))
            world.want(2)
            world.cluster.fail_view = False
            await until("it is seen again", lambda: len(world.of(rec.ClusterPolled)) > before)

    asyncio.run(play())
    events = world.events("cluster_unavailable")
    gaps = [b.at - a.at for a, b in itertools.pairwise(events)]
    assert gaps[0] >= 0.1
    assert gaps[1] >= 0.2
    assert len(world.events("cluster_back")) == 1
    assert not [one for one in world.said if isinstance(one, tuple) and one[0] == "cancel"]
    assert (world.of(rec.JobEnded), world.of(JobGone), len(world.jobs())) == ([], [], 2)


def test_a_loan_to_a_run_that_was_closed_ends_also_while_no_poll_succeeds(world: World) -> None:
    async def play() -> None:
        world.want(1)
        harvester = world.harvester()
        async with running(harvester):
            await until("an engine runs", lambda: len(world.of(rec.AllocationStarted)) == 1)
            world.cluster.fail_view = True
            await until("polls fail", lambda: harvester.polls_fail)
            (intent_id,) = harvester.tracker.intents
            harvester.session._loans[intent_id] = Loan(2, "closed", 4, time.time(), lender=1)
            told = IntentRevoked(lent(intent_id), "run closed, to which 4 slots were lent, is not open")
            await until("its borrower is told", lambda: world.of(IntentRevoked) == [told])
            world.ahead_s += LEAVES_S
            await until("nothing is lent", lambda: not harvester.session._loans)
            assert world.of(SlotsLent) == [SlotsLent(intent_id, "", "", 0, "the loan is over")]

    asyncio.run(play())


def test_status_says_that_polls_fail_and_why_until_one_does_not(world: World) -> None:
    async def play() -> None:
        harvester = world.harvester()
        async with running(harvester):
            await until("it has seen the site", lambda: world.of(rec.ClusterPolled))
            world.cluster.fail_view = True
            world.want(1)
            await until("polls fail", lambda: harvester.polls_fail)
            taken = status.take(harvester, time.time())
            assert taken is not None
            assert "in a row failed, the last: slurmctld does not answer" in taken.polls_fail
            world.cluster.fail_view = False
            await until("one does not", lambda: not harvester.polls_fail)

    asyncio.run(play())


def test_a_job_script_that_dies_at_once_on_every_node_backs_off_and_no_node_is_blamed(world: World) -> None:
    async def play() -> None:
        world.want(1)
        async with running(world.harvester(template=DIES, quarantine_after=2, max_engines=1)):
            await until("the first node may be to blame", lambda: world.events("node_quarantined"), 30.0)
            await until("the second one shows that it is not", lambda: world.events("node_released"), 30.0)
            n = len(world.of(rec.AllocationEnded))
            await until("it is tried again", lambda: len(world.of(rec.AllocationEnded)) > n, 30.0)

    asyncio.run(play())
    [quarantined] = world.events("node_quarantined")
    assert "exit code 3" in quarantined.reason
    assert any("died at once" in decision.reason for decision in world.acted("none"))
    assert all(event.crashed for event in world.of(JobGone))
    assert {ended.reason for ended in world.of(rec.AllocationEnded)} == {"failed"}


def test_where_no_engine_can_begin_the_reason_is_told_and_one_at_a_time_is_tried(world: World) -> None:
    """As the worker does where its Python lacks torch. On both nodes, and with a quarantine after the first death."""

    async def play() -> None:
        world.want(4)
        harvester = world.harvester(template=BARE, quarantine_after=1, backoff_s=0.3)
        async with running(harvester):
            await until("the first wave failed", lambda: len(world.events("engine_cannot_start")) >= 3, 30.0)
            await until("its engines are gone", lambda: not world.jobs())
            n = len(world.of(rec.JobIntended))
            await until("it is tried again", lambda: len(world.of(rec.JobIntended)) > n, 30.0)
            assert len(world.of(rec.JobIntended)) == n + 1, "one is tried"
            taken = status.take(harvester, time.time())
            assert taken is not None
            assert "No module named 'torch'. Remedy: " in taken.set_up
            changed = world.config(BARE, quarantine_after=1, backoff_s=0.3, max_engines=3)
            harvester.reconfigure(changed)
            assert harvester.tracker.health.set_up_fault() == "", "what is set up now was not tried"

    asyncio.run(play())
    assert not world.events("node_quarantined")
    reasons = {event.reason.partition(": ")[2] for event in world.events("engine_cannot_start")}
    assert reasons == {
        "its engine could not be built (exit code 70): engine 'reference' cannot be imported: No module named 'torch'"
    }
    assert any("engines cannot start" in decision.reason for decision in world.acted("none"))


def test_a_submission_without_an_answer_is_found_by_its_comment_and_not_repeated(world: World) -> None:
    async def play() -> None:
        world.cluster.lose_answer = True
        world.want(1)
        async with running(world.harvester()):
            await until("it is adopted", lambda: world.of(rec.JobSubmitted))
            await until("it holds", lambda: world.of(rec.AllocationStarted))

    asyncio.run(play())
    assert len(world.of(rec.JobIntended)) == 1
    assert len(world.events("submit_unknown")) == 1
    assert len(world.jobs()) == 1


def test_a_run_whose_name_no_job_can_carry_holds_up_no_other(world: World) -> None:
    """A run is never opened under such a name; a ledger of an earlier release may have one."""

    async def play() -> None:
        world.demand = [Demand(1, "a b", 1, 1, "useful"), Demand(2, "fine", 1, 1, "useful")]
        async with running(world.harvester()):
            await until("the other runs", lambda: world.of(rec.AllocationStarted))
            polls = len(world.of(rec.ClusterPolled))
            await until("it is polled on and on", lambda: len(world.of(rec.ClusterPolled)) > polls + 3)

    asyncio.run(play())
    assert {intended.run_id for intended in world.of(rec.JobIntended)} == {2}
    assert len(world.events("run_name_refused")) == 1


def test_a_refused_submission_says_why_and_backs_off(world: World) -> None:
    async def play() -> None:
        world.cluster.refuse = "Invalid account"
        world.want(1)
        async with running(world.harvester(backoff_s=60.0)):
            await until("refused", lambda: world.events("submit_refused"))
            await until("it says so", lambda: any("Invalid account" in d.reason for d in world.acted("none")))

    asyncio.run(play())
    assert len(world.of(rec.JobIntended)) == 1
    assert [ended.state for ended in world.of(rec.JobEnded)] == ["REFUSED"]
    assert world.allowed == {}


def test_a_key_that_the_engines_user_does_not_get_refuses_its_submission_and_backs_off(world: World) -> None:
    """`sbatch` never ran: a job that may exist would be looked for, and would take the place of another that waits."""
    config = world.config

    def with_a_proxy_that_is_away(template: str, **harvest: Any) -> DaemonConfig:
        made = config(template, **harvest)
        proxy = {
            "submit_socket": world.state_dir / "nobody-listens",
            "engines_user": getpass.getuser(),
            "engines_dir": world.state_dir.parent / "engines",
        }
        daemon = made.daemon.model_copy(update={"public_dir": world.state_dir.parent / "public"})
        return made.model_copy(update={"cluster": made.cluster.model_copy(update=proxy), "daemon": daemon})

    async def play() -> None:
        world.want(1)
        async with running(world.harvester(backoff_s=60.0)):
            await until("refused", lambda: world.events("submit_refused"))
            polls = len(world.of(rec.ClusterPolled))
            await until("it polls on", lambda: len(world.of(rec.ClusterPolled)) > polls + 3)

    world.config = with_a_proxy_that_is_away  # type: ignore[method-assign]
    asyncio.run(play())
    [event] = world.events("submit_refused")
    assert "its key cannot be written" in event.reason
    assert "does not answer" in event.reason
    assert [ended.state for ended in world.of(rec.JobEnded)] == ["REFUSED"]
    assert not world.events("submit_unknown")
    assert not [said for said in world.said if isinstance(said, tuple) and said[0] == "submit"]
    assert world.allowed == {}


def test_a_restarted_daemon_adopts_its_jobs_cancels_strangers_and_leaves_others_alone(world: World) -> None:
    async def play() -> None:
        world.want(1)
        async with running(world.harvester()):
            await until("it holds", lambda: world.of(rec.AllocationStarted))
        [intended] = world.of(rec.JobIntended)
        [submitted] = world.of(rec.JobSubmitted)
        stranger = "scv-00000000ffffffff"
        port = world.site
        lost = port.submit(spec("scavenge", 1, name=stranger, comment=comment_of(UID, stranger)))
        other = port.submit(
            spec(
                "scavenge",
                1,
                name="scv-00000000eeeeeeee",
                comment=comment_of("00000000", "scv-00000000eeeeeeee"),
            )
        )
        keys.write_keypair(keys.worker_key_path(world.state_dir, "scv-00000000dddddddd"), keys.generate())

        world.said.clear()
        world.allowed.clear()
        second = world.harvester()
        second.restore(
            [rec.OpenIntent(intended, submitted.job_id, "RUNNING", 0, "node1", True, time.time(), 0)]
        )
        assert world.allowed[intended.worker_key].run == "run"
        assert not keys.worker_key_path(world.state_dir, "scv-00000000dddddddd").exists()
        async with running(second):
            await until("the stranger is cancelled", lambda: lost not in {job.job_id for job in world.jobs()})
            n = len(world.of(rec.ClusterPolled))
            await until("two more looks", lambda: len(world.of(rec.ClusterPolled)) > n + 1)
        assert {job.job_id for job in world.jobs()} == {submitted.job_id, other}
        assert world.of(rec.JobIntended) == world.of(rec.AllocationStarted) == world.of(JobGone) == []
        assert [event.subject for event in world.events("orphaned_job_cancelled")] == [f"job {lost}"]

    asyncio.run(play())


def test_a_shutdown_with_cancel_leaves_no_job(world: World) -> None:
    async def play() -> None:
        world.want(4)
        async with running(world.harvester(), cancel=True):
            await until("four engines run", lambda: len(world.jobs(JobState.RUNNING)) == 4)

    asyncio.run(play())
    assert world.jobs() == []


@pytest.mark.parametrize(
    ("partition", "said"), [("nowhere", "no such partition"), ("normal", "not preemptible")]
)
def test_a_partition_that_may_not_be_harvested_stops_the_daemon_with_the_reason(
    world: World, partition: str, said: str
) -> None:
    async def play() -> None:
        world.want(1)
        await world.harvester(partition=partition).run(asyncio.Event())

    with pytest.raises(ConfigError, match=said):
        asyncio.run(play())
    assert world.jobs() == []


def test_a_quiet_cluster_adds_no_decision_per_look(world: World) -> None:
    async def play() -> None:
        async with running(world.harvester()):
            await until("ten looks", lambda: len(world.of(rec.ClusterPolled)) >= 10)

    asyncio.run(play())
    assert len(world.of(rec.Decision)) == 1
    assert "no run is open" in world.of(rec.Decision)[0].reason
    assert world.of(rec.Decision)[0].code == "no_run"


def test_a_gpu_that_is_not_worth_a_start_is_left_idle_and_the_record_says_by_which_figures(
    world: World,
) -> None:
    """Ages come from the looks of this very daemon; the curve is given: to learn one takes a hundred lives."""
    worth = Benefit(1e-9, 8.0, 1, 60.0)
    harvester = world.harvester()

    def known(share: float, now: float) -> Idle:
        ages = Idling.known(harvester.session.idling, share, now)
        assert {name: len(since) for name, since in ages.since.items()} == {"node1": 2, "node2": 2}
        return replace(ages, curves={node_class(node): prior() for node in world.site.view().nodes})

    harvester.session.idling.known = known  # type: ignore[method-assign]  # it knows a curve at once

    async def play() -> None:
        world.demand = [Demand(1, "run", 1, 1, "one is useful", benefit=worth)]
        async with running(harvester):
            await until("a decision", lambda: world.of(rec.Decision))
            assert not world.jobs()
            world.demand = [Demand(1, "run", 1, 1, "one is very useful", benefit=replace(worth, saving=0.5))]
            harvester.poke()
            await until("an engine", lambda: world.jobs(JobState.RUNNING))

    asyncio.run(play())
    left, taken = world.of(rec.Decision)[0], world.acted("submit")[0]
    assert (left.action, left.code) == ("none", "settling")
    assert "not worth its start" in left.inputs
    assert "one more saves 50.00% of a step" in taken.reason
    assert "from 0 s on" in taken.inputs


def test_a_partition_that_stops_being_preemptible_gets_its_engines_withdrawn(world: World) -> None:
    async def play() -> None:
        world.want(2)
        async with running(world.harvester()):
            await until("two engines run", lambda: len(world.of(rec.AllocationStarted)) == 2)
            seen = world.cluster.view

            def changed() -> ClusterView:
                view = seen()
                off = tuple(replace(part, preempt_mode=PreemptMode.OFF) for part in view.partitions)
                return replace(view, partitions=off)

            world.cluster.view = changed  # type: ignore[method-assign]
            await until("both are drained", lambda: len(world.of(IntentRevoked)) == 2)

    asyncio.run(play())
    [event] = world.events("partition_refused")
    assert "not preemptible" in event.reason
    assert "not preemptible" in world.acted("drain")[0].inputs


def test_a_slurm_that_preempts_nothing_any_more_gets_its_engines_withdrawn(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partition still says PreemptMode=REQUEUE; the site's PreemptType was changed (scontrol reconfigure does that)."""
    monkeypatch.setattr(polling, "INFO_S", 0.3)

    async def play() -> None:
        world.want(2)
        async with running(world.harvester()):
            await until("two engines run", lambda: len(world.of(rec.AllocationStarted)) == 2)
            none = replace(world.cluster.info(), preempt_type="preempt/none")
            monkeypatch.setattr(world.cluster, "info", lambda: none)
            await until("both are drained", lambda: len(world.of(IntentRevoked)) == 2)

    asyncio.run(play())
    [event] = world.events("partition_refused")
    assert "preempts nothing" in event.reason


def test_files_of_a_closed_job_that_cannot_be_removed_end_nothing(world: World) -> None:
    async def play() -> None:
        world.want(1)
        async with running(world.harvester()):
            await until("an engine runs", lambda: world.of(rec.AllocationStarted))
            workers = world.state_dir / "workers"
            workers.rename(world.state_dir / "elsewhere")
            workers.write_text("the file system answers with errors")
            world.want(0)
            world.site.cancel(tuple(job.job_id for job in world.jobs()))
            await until("it is closed", lambda: world.of(rec.JobEnded))
            assert world.allowed == {}, "its key opens nothing"
            n = len(world.of(rec.ClusterPolled))
            await until("looks go on", lambda: len(world.of(rec.ClusterPolled)) > n)

    asyncio.run(play())


def test_a_worker_whose_key_is_lost_is_withdrawn_after_a_restart(world: World) -> None:
    async def play() -> None:
        world.want(1)
        async with running(world.harvester()):
            await until("it holds", lambda: world.of(rec.AllocationStarted))
        [intended], [submitted] = world.of(rec.JobIntended), world.of(rec.JobSubmitted)
        keys.worker_key_path(world.state_dir, intended.intent_id).unlink()
        world.said.clear()
        second = world.harvester(drain_notice_s=0.2)
        second.restore(
            [rec.OpenIntent(intended, submitted.job_id, "RUNNING", 0, "node1", True, time.time(), 0)]
        )
        async with running(second):
            await until("it is cancelled", lambda: world.acted("cancel"))
            await until("another one runs", lambda: world.of(rec.AllocationStarted))

    asyncio.run(play())
    assert len(world.events("worker_key_missing")) == 1


def test_a_job_that_slurm_does_not_release_is_cancelled_and_a_fresh_one_goes_there(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And there are no standby jobs from then on."""

    def refuses(job_id: int, node: str) -> None:
        raise ClusterError(f"Access/permission denied for job {job_id}")

    monkeypatch.setattr(world.cluster, "release", refuses)

    async def play() -> None:
        theirs = [world.site.submit(spec(gpus=1, nodelist=("node1",), workdir="/tmp")) for _ in range(2)]
        await until(
            "others hold node1",
            lambda: sum("node1" in job.nodes for job in world.jobs(JobState.RUNNING)) == 2,
        )
        world.want(3)
        async with running(world.harvester(standby_jobs=1, max_pending=4), cancel=True):
            await until("node2 is ours", lambda: len(world.of(rec.AllocationStarted)) == 2)
            world.site.cancel((theirs[0],))
            await until("and what one of them left", lambda: len(world.of(rec.AllocationStarted)) == 3)
            await until("the spare is closed", lambda: world.of(rec.JobEnded))
        world.site.cancel((theirs[1],))

    asyncio.run(play())
    [refused] = world.events("release_refused")
    assert "Access/permission denied" in refused.reason
    assert [decision.code for decision in world.acted("cancel_pending")] == ["standby"]
    assert [decision.code for decision in world.acted("submit")].count("standby") == 1


def test_accounting_that_fails_is_an_event_and_stops_neither_looks_nor_submissions(world: World) -> None:
    """An engine came and went between two looks, and slurmdbd does not answer; then it does."""
    asked: list[tuple[int, ...]] = []
    down, info = [True], world.cluster.info

    def accounting(job_ids: tuple[int, ...]) -> tuple[JobLife, ...]:
        asked.append(job_ids)
        if down:
            raise ClusterUnavailable("sacct: slurmdbd is down")
        [intended], [start], [end] = (
            world.of(rec.JobIntended),
            world.of(rec.AllocationStarted)[:1],
            world.of(rec.AllocationEnded)[:1],
        )
        return (
            JobLife(
                job_ids[0], intended.intent_id, "PREEMPTED", intended.at, start.at, end.at, ("node9",), 1
            ),
            JobLife(job_ids[0], intended.intent_id, "RUNNING", end.at, end.at + 0.5, 0.0, ("node1",), 1),
        )

    world.cluster.info = lambda: replace(info(), accounting=True)  # type: ignore[method-assign]
    world.cluster.accounting = accounting  # type: ignore[method-assign]

    async def play() -> None:
        world.want(1)
        async with running(world.harvester()):
            await until("it is submitted", lambda: world.of(rec.JobSubmitted))
        [submitted], [intended] = world.of(rec.JobSubmitted), world.of(rec.JobIntended)
        await until("it runs", lambda: world.jobs(JobState.RUNNING))
        world.cluster.requeue(submitted.job_id)
        await until(
            "it was put back and runs again",
            lambda: [job.restart_count for job in world.jobs(JobState.RUNNING)] == [1],
        )
        world.said[:] = [
            one for one in world.said if not isinstance(one, rec.AllocationStarted | rec.AllocationEnded)
        ]
        second = world.harvester()
        second.restore(
            [rec.OpenIntent(intended, submitted.job_id, "PENDING", 0, "", False, free_since=intended.at)]
        )
        async with running(second, cancel=True):
            await until("it says so", lambda: world.events("accounting_unavailable"))
            n = len(world.of(rec.ClusterPolled))
            await until("looks go on", lambda: len(world.of(rec.ClusterPolled)) > n + 2)
            assert len(asked) == 1, "what does not answer is left alone for a while"
            down.clear()
            second._account_at = 0.0
            await until("it is corrected", lambda: world.of(rec.AllocationCorrected))
            assert second.tracker.to_account() == ()

    asyncio.run(play())
    [corrected] = world.of(rec.AllocationCorrected)
    assert (corrected.restart_count, corrected.node) == (0, "node9")


def test_another_user_s_wait_beside_our_engines_is_recorded(world: World) -> None:
    """Two whole nodes are asked for; one of them is somebody else's, so that the job waits though we hold the other."""

    async def play() -> None:
        first = world.site.submit(spec())
        await until("their job holds a node", lambda: world.jobs(JobState.RUNNING))
        world.want(2)
        harvester = world.harvester()
        # The local cluster gives every job the user of this test.
        harvester.session.waits = OtherUsersWaits("nobody")
        async with running(harvester):
            await until("two engines hold GPUs", lambda: len(world.of(rec.AllocationStarted)) == 2)
            second = world.site.submit(spec(nodes=2))
            await until("its wait is seen", lambda: world.of(rec.OtherUserWaits))
            [wait] = world.of(rec.OtherUserWaits)
            assert (wait.job_id, wait.partition, wait.gpus) == (second, "normal", 4)
            polls = len(world.of(rec.ClusterPolled))
            await until("it is polled again", lambda: len(world.of(rec.ClusterPolled)) > polls + 1)
            assert len(world.of(rec.OtherUserWaits)) == 1, "one wait is one row"
            world.site.cancel((first,))
            await until("it starts", lambda: world.of(rec.OtherUserWaited))

    asyncio.run(play())
    [waited] = world.of(rec.OtherUserWaited)
    assert (waited.outcome, waited.harvested_gpus) == ("started", 2)
    assert waited.harvested_gpu_s > 0
    assert abs(waited.at - time.time()) < 60


def test_a_restarted_daemon_releases_the_nodes_whose_failures_it_forgets(world: World) -> None:
    world.harvester().restore([], quarantined=["node1"])
    assert [one.node for one in world.of(rec.NodeReleased)] == ["node1"]
