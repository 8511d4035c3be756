"""The harvester on a real local cluster when it is stopped, ended or fenced, and when ledger, files or scheduler hang."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from pathlib import Path

import pytest

from scavenger import asyncio_helpers
from scavenger.cluster.model import JobSpec, JobState
from scavenger.errors import Fenced
from scavenger.harvest import limits as harvest_limits
from scavenger.harvest.limits import drain, resume
from scavenger.harvest.pace import PollKind
from scavenger.ledger import records as rec
from scavenger.router.core.events import IntentRevoked
from tests.harvest.world import World, running, until


def test_what_is_stopped_while_slurm_takes_its_time_with_each_job_is_not_submitted_further(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        world.want(4)
        harvester = world.harvester(max_pending=4)
        submit = world.cluster.submit

        def slow(spec: JobSpec) -> int:
            drain(
                world.state_dir, "three at night", at_once=False
            )  # somebody stops harvesting during the first sbatch
            return submit(spec)

        monkeypatch.setattr(world.cluster, "submit", slow)
        async with running(harvester):
            await until("the stop is seen", lambda: world.events("harvest_stopped"))
            assert len(world.of(rec.JobIntended)) == 1
            resume(world.state_dir)
            monkeypatch.setattr(world.cluster, "submit", submit)
            await until("all four are there", lambda: len(world.of(rec.JobSubmitted)) >= 4)

    asyncio.run(play())


def test_what_was_seen_too_long_ago_is_not_submitted_on_further(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.pace |= {"command_timeout_s": 0.4}

    async def play() -> None:
        world.want(4)
        submit, hung = world.cluster.submit, threading.Event()

        def slow(spec: JobSpec) -> int:
            hung.wait(0.5)
            return submit(spec)

        monkeypatch.setattr(world.cluster, "submit", slow)
        async with running(world.harvester(max_pending=4)):
            await until("all four are submitted", lambda: len(world.of(rec.JobSubmitted)) == 4)

    asyncio.run(play())
    said = [type(one) for one in world.said if isinstance(one, rec.ClusterPolled | rec.JobIntended)]
    assert (rec.JobIntended, rec.JobIntended) not in itertools.pairwise(said), "a look before each"


def test_a_stop_file_that_comes_and_goes_is_obeyed_at_once_and_resuming_waits_for_the_budget(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.pace |= {"poll_interval_s": 600.0, "max_rpc_per_min": 10.0}
    world.cluster.whole_cost = 150  # the first look spends what was saved up

    async def play() -> None:
        harvester = world.harvester()
        due, bys = harvester._pace.next, []

        def asked(now: float, *, by: float, **more: bool) -> tuple[float, PollKind]:
            bys.append((harvester.stop_state.stop_read is not None, by <= now))
            return due(now, by=by, **more)

        monkeypatch.setattr(harvester._pace, "next", asked)
        async with running(harvester):
            await until("it looks", lambda: world.of(rec.ClusterPolled))
            drain(world.state_dir, "three at night", at_once=False)
            await until("it stops, whatever that costs", lambda: world.events("harvest_stopped"))
            resume(world.state_dir)
            await until(
                "it knows",
                lambda: harvester.stop_state.stop_read is None and harvester.stop_state.poll_and_compare(),
            )
            n = len(bys)
            await until("and waits", lambda: len(bys) > n + 1)
        assert (True, True) in bys
        assert not any(at_once for stopped, at_once in bys[n:] if not stopped)
        assert not world.events("harvest_resumed")

    asyncio.run(play())


def test_an_ended_daemon_stops_within_a_moment_while_the_scheduler_hangs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> float:
        world.want(1)
        harvester = world.harvester()
        stop, hung = asyncio.Event(), threading.Event()
        task = asyncio.create_task(harvester.run(stop))
        await until("it looks", lambda: world.of(rec.ClusterPolled))
        seen = world.cluster.view
        monkeypatch.setattr(world.cluster, "view", lambda: (hung.wait(30.0), seen())[1])
        harvester.poke()
        await asyncio.sleep(0.5)
        began = time.monotonic()
        stop.set()
        await harvester.shutdown(cancel=False)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        hung.set()
        return time.monotonic() - began

    assert asyncio.run(play()) < 20.0, "the scheduler hangs for 30 s"


def test_a_stalled_ledger_gets_no_submission_and_keeps_no_engine_from_leaving(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio_helpers, "LEAST_S", 0.2)

    async def play() -> None:
        world.want(1)
        async with running(world.harvester(drain_notice_s=0.3)):
            await until("it holds", lambda: world.of(rec.AllocationStarted))
            world.stalled = True
            world.want(2)
            await until("a second one is refused", lambda: world.events("submit_refused"))
            world.want(0)  # it does not listen: it is cancelled
            await until("it is gone", lambda: not world.jobs())
            world.stalled = False
            world.want(1)
            await until("one runs again", lambda: world.jobs(JobState.RUNNING))

    asyncio.run(play())
    refused = {event.subject for event in world.events("submit_refused")}
    submitted = {one[1] for one in world.said if isinstance(one, tuple) and one[0] == "submit"}
    assert not refused & submitted
    assert refused <= {ended.intent_id for ended in world.of(rec.JobEnded)}, (
        "an intent that becomes durable after all is closed"
    )
    assert len(world.events("ledger_stalled")) == len(world.events("ledger_back")) == 1


def test_a_daemon_that_was_fenced_while_its_ledger_stalled_cancels_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio_helpers, "LEAST_S", 0.2)

    async def play() -> None:
        world.connected = False  # so that it is cancelled at once
        world.want(1)
        harvester = world.harvester()
        task = asyncio.create_task(harvester.run(asyncio.Event()))
        await until("it holds", lambda: world.of(rec.AllocationStarted))
        world.stalled = True
        world.want(0)
        await until("it is to be cancelled", lambda: world.acted("cancel"))
        world.fenced = True
        with pytest.raises(Fenced):
            await task
        world.fenced = False
        await harvester.shutdown(cancel=False)

    asyncio.run(play())
    assert len(world.jobs()) == 1
    assert not [one for one in world.said if isinstance(one, tuple) and one[0] == "cancel"]


def test_stop_files_that_give_no_answer_stop_no_engine_and_after_a_while_none_is_submitted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio_helpers, "LEAST_S", 0.3)
    monkeypatch.setattr(harvest_limits, "KEEP_S", 1.0)
    hung, looks = threading.Event(), []

    async def play() -> None:
        world.want(1)
        harvester = world.harvester(drain_notice_s=0.2)
        reads = harvester.stop_state.poll

        def hangs() -> None:
            looks.append(1)
            hung.wait(30.0)
            reads()

        async with running(harvester):
            await until("it holds", lambda: world.of(rec.AllocationStarted))
            monkeypatch.setattr(harvester.stop_state, "poll", hangs)
            await until("it is known that nothing is known", lambda: harvester.stop_state.files.paused)
            assert "no answer" in harvester.stop_state.files.unread
            world.want(2)
            await until(
                "nothing is submitted for that", lambda: "no answer" in harvester.stop_state.concluded
            )
            assert len(world.jobs(JobState.RUNNING)) == 1, "the engine stays"
            assert len(looks) == 1, "one thread waits, not one for each look"
            hung.set()
            await until("the second runs", lambda: len(world.jobs(JobState.RUNNING)) == 2)
            assert not harvester.stop_state.files.unread

    try:
        asyncio.run(play())
    finally:
        hung.set()
    assert not world.events("harvest_stopped")


def test_a_stop_file_acts_on_connected_engines_while_slurm_does_not_answer(
    world: World, tmp_path: Path
) -> None:
    async def play() -> None:
        world.want(1)
        async with running(world.harvester(stop_file=tmp_path / "stop")):
            await until("it holds", lambda: world.of(rec.AllocationStarted))
            world.cluster.fail_view = True
            await until("it is not seen", lambda: world.events("cluster_unavailable"))
            (tmp_path / "stop").write_text("drain power cut")
            await until("it is asked to leave", lambda: world.of(IntentRevoked))
            assert world.cluster.fail_view

    asyncio.run(play())
    assert len(world.of(IntentRevoked)) == 1
    assert "power cut" in world.acted("drain")[0].reason
    assert world.acted("drain")[0].code == "stopped"
