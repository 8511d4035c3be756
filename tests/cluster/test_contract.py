"""What every `Cluster` must do, checked on a real Slurm and on the local backend by the same tests."""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from scavenger.cluster.local.client import LocalCluster
from scavenger.cluster.model import ClusterView, Job, JobFlag, JobSpec, JobState, PreemptMode
from scavenger.cluster.port import Cluster
from scavenger.cluster.pyslurm.client import PyslurmCluster
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.errors import ClusterError
from tests import slurm_faults
from tests.clusters import wait_for
from tests.proxies import proxied

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Backend:
    """A cluster, and what a job script calls things on it."""

    cluster: Cluster
    lose_node: Callable[[str], None]
    resume_node: Callable[[str], None]
    job_id: str
    restarts: str
    step: str  # what stands before a command that is to get notice of a preemption
    state: str
    requeue: str

    def job(self, job_id: int) -> Job:
        return find(self.cluster.view(), job_id)


ON_SLURM = [pytest.mark.slurm]
ON_PYSLURM = [pytest.mark.slurm, pytest.mark.pyslurm]


@pytest.fixture(
    params=[
        pytest.param("slurm", marks=ON_SLURM),
        pytest.param("pyslurm", marks=ON_PYSLURM),
        pytest.param("proxy", marks=ON_SLURM),
        "local",
    ]
)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    if request.param == "local":
        local: LocalCluster = request.getfixturevalue("local_cluster")
        tool = f"{sys.executable} -m scavenger.cluster.local.client"
        yield Backend(
            local,
            local.down_node,
            local.resume_node,
            "$SCAVENGER_JOB_ID",
            "$SCAVENGER_RESTART_COUNT",
            "",
            f"{tool} state $SCAVENGER_JOB_ID",
            f"{tool} requeue $SCAVENGER_JOB_ID",
        )
        return
    sandbox: SlurmSandbox = request.getfixturevalue("slurm_sandbox")
    cluster: Cluster = SlurmCluster(sandbox.env)
    if request.param == "pyslurm":
        cluster = PyslurmCluster(SlurmCluster(sandbox.env))
    stack = contextlib.ExitStack()
    if request.param == "proxy":
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="scv-"))  # a socket's path is short
        cluster = stack.enter_context(proxied(sandbox.env, Path(folder)))
    try:
        yield Backend(
            cluster,
            functools.partial(slurm_faults.lose_node, sandbox),
            functools.partial(slurm_faults.resume_node, sandbox),
            "$SLURM_JOB_ID",
            "${SLURM_RESTART_COUNT:-0}",
            "srun",
            "squeue -h -t all -o %T -j $SLURM_JOB_ID",
            "scontrol requeue $SLURM_JOB_ID",
        )
    finally:
        cluster.close()
        stack.close()


def find(view: ClusterView, job_id: int) -> Job:
    return next(job for job in view.jobs if job.job_id == job_id)


def spec(
    script: str,
    *,
    partition: str = "scavenge0",
    gpus: int = 1,
    node: str = "",
    output: Path | None = None,
    comment: str = "ours",
    **more: object,
) -> JobSpec:
    return JobSpec(
        name="test",
        comment=comment,
        partition=partition,
        script="#!/bin/bash\n" + script + "\n",
        gpus=gpus,
        nodelist=(node,) if node else (),
        output=str(output or "/dev/null"),
        workdir="/tmp",
        environment={"PYTHONPATH": str(ROOT)},
        **more,  # type: ignore[arg-type]
    )  # type: ignore[arg-type]


def until(
    backend: Backend, job_id: int, state: JobState, *, restarts: int = 0, timeout_s: float = 90.0
) -> Job:
    """Wait until the job is plainly in the state: no flag, and so no processes of an earlier life."""

    def holds() -> bool:
        job = backend.job(job_id)
        return job.state is state and job.restart_count == restarts and not job.flags

    wait_for(f"job {job_id} is {state} after {restarts} restarts", holds, timeout_s)
    return backend.job(job_id)


def test_a_job_runs_and_completes(backend: Backend, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job_id = backend.cluster.submit(
        spec(f'echo "$CUDA_VISIBLE_DEVICES/{backend.restarts}"', gpus=2, output=out)
    )
    job = until(backend, job_id, JobState.COMPLETED)
    assert (job.gpus, job.exit_code, job.restart_count, job.partition) == (2, 0, 0, "scavenge0")
    assert job.user == backend.cluster.info().user
    assert out.read_text() == "0,1/0\n"


def test_a_script_that_fails_is_failed_with_its_exit_code(backend: Backend) -> None:
    assert until(backend, backend.cluster.submit(spec("exit 3")), JobState.FAILED).exit_code == 3


def test_an_environment_reaches_the_job_and_nothing_else_does(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_DAEMON", "x")
    monkeypatch.setenv("SLURM_JOB_ID", "4242")
    out = tmp_path / "out"
    script = f'echo "$GREETING,$SECRET_OF_THE_DAEMON,{backend.job_id}"'
    job_id = backend.cluster.submit(
        JobSpec(
            name="e",
            comment="",
            partition="normal",
            script="#!/bin/bash\n" + script + "\n",
            output=str(out),
            workdir="/tmp",
            environment={"GREETING": "hello, $HOME \"'"},
        )
    )
    until(backend, job_id, JobState.COMPLETED)
    assert out.read_text() == f"hello, $HOME \"',,{job_id}\n"


@pytest.mark.parametrize(
    "bad",
    [
        spec("true", partition="nowhere"),
        spec("true", gpus=99),
        spec("true", node="node0"),  # not a node of that partition
        JobSpec(name="x", comment="", partition="normal", script="no interpreter"),
        JobSpec(
            name="x", comment="", partition="normal", script="#!/bin/bash\n", environment={"SLURM_CONF": "/x"}
        ),
    ],
    ids=["partition", "gpus", "node", "script", "environment"],
)
def test_a_submission_that_cannot_be_is_refused(backend: Backend, bad: JobSpec) -> None:
    with pytest.raises(ClusterError):
        backend.cluster.submit(bad)


def test_a_comment_is_found_again_whatever_it_holds(backend: Backend) -> None:
    comment = '{"intent": "a|b %i é \'q\' = x",  "run": 7}'
    job_id = backend.cluster.submit(spec("sleep 60", comment=comment))
    assert backend.job(job_id).comment == comment
    assert backend.job(job_id).name == "test"


def test_a_view_counts_gpus_by_node_and_owner(backend: Backend) -> None:
    view = backend.cluster.view()
    assert {node.name: (node.gpus, node.idle_gpus) for node in view.nodes} == {
        f"node{i}": (4, 4) for i in range(4)
    }
    ids = [
        backend.cluster.submit(spec("sleep 60", gpus=count, node=node))
        for count, node in ((3, "node1"), (2, "node2"))
    ]
    for job_id in ids:
        until(backend, job_id, JobState.RUNNING)
    view = backend.cluster.view()
    assert {node.name: node.idle_gpus for node in view.nodes} == {
        "node0": 4,
        "node1": 1,
        "node2": 2,
        "node3": 4,
    }
    assert find(view, ids[0]).gpus_by_node == (("node1", 3),)
    assert find(view, ids[0]).nodes == ("node1",)
    assert find(view, ids[0]).has_gpus_allocated


def test_a_job_that_completes_holds_its_gpus_until_it_is_gone(backend: Backend, tmp_path: Path) -> None:
    """Slurm's own figures of a node drop them at once."""
    out = tmp_path / "out"
    script = "trap 'sleep 1; exit' TERM\necho ready\nsleep 60 & wait"
    job_id = backend.cluster.submit(spec(script, gpus=3, node="node1", output=out))
    wait_for("it listens for the signal", lambda: out.exists() and "ready" in out.read_text())
    until(backend, job_id, JobState.RUNNING)
    backend.cluster.cancel((job_id,))
    completing = 0
    while (job := find(view := backend.cluster.view(), job_id)).has_gpus_allocated:
        completing += JobFlag.COMPLETING in job.flags
        assert [node.idle_gpus for node in view.nodes if node.name == "node1"] == [1], job
    assert completing
    wait_for("its GPUs are idle", lambda: all(node.idle_gpus == 4 for node in backend.cluster.view().nodes))


def test_a_view_shows_partitions_as_they_are_configured(backend: Backend) -> None:
    parts = {part.name: part for part in backend.cluster.view().partitions}
    assert parts["reserved"].nodes == {"node0"}
    assert (parts["scavenge"].preempt_mode, parts["scavenge"].grace_s) == (PreemptMode.REQUEUE, 10)
    assert (parts["normal"].preempt_mode, parts["normal"].priority_tier) == (PreemptMode.OFF, 10)
    assert parts["scavenge"].priority_tier < parts["normal"].priority_tier < parts["reserved"].priority_tier
    assert backend.cluster.info().preempt_type == "preempt/partition_prio"


def test_cancelling_ends_pending_and_running_jobs_and_ignores_unknown_ones(backend: Backend) -> None:
    running = backend.cluster.submit(spec("sleep 60", gpus=4, node="node1"))
    until(backend, running, JobState.RUNNING)
    waiting = backend.cluster.submit(spec("sleep 60", gpus=4, node="node1"))
    wait_for("the second job waits", lambda: backend.job(waiting).reason == "Resources")
    assert backend.job(waiting).waits
    backend.cluster.cancel((waiting, running, 999_999))
    for job_id in (running, waiting):
        until(backend, job_id, JobState.CANCELLED)
    backend.cluster.cancel((running,))  # already over: no error


def test_a_higher_tier_takes_the_gpus_and_the_job_comes_back_under_its_own_id(
    backend: Backend, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    victim = backend.cluster.submit(
        spec(f"echo life {backend.restarts}\nsleep 60", gpus=4, node="node1", output=out)
    )
    until(backend, victim, JobState.RUNNING)
    wait_for("its first life has written", lambda: out.is_file() and "life" in out.read_text())
    taker = backend.cluster.submit(spec("sleep 0.5", partition="normal", gpus=1, node="node1"))
    until(backend, victim, JobState.PENDING, restarts=1)
    until(backend, taker, JobState.COMPLETED)
    assert backend.job(taker).start_time - backend.job(taker).submit_time < 5
    until(backend, victim, JobState.RUNNING, restarts=1)
    wait_for("both lives have written", lambda: out.read_text().count("life") == 2)
    assert [line for line in out.read_text().splitlines() if line.startswith("life")] == ["life 0", "life 1"]


# What scripts/rollout.sbatch.j2 does, in small: leave on the notice, and put the job back unless it is being ended.
LEAVES = """
echo life {restarts}
{step} sh -c 'echo step; exec sleep 60'
state=$({state})
echo state $state
if [ "$state" = RUNNING ]; then {requeue}; fi
exit 0
"""


def leaver(backend: Backend) -> str:
    return LEAVES.format(
        restarts=backend.restarts, step=backend.step, state=backend.state, requeue=backend.requeue
    )


def test_a_job_that_leaves_in_the_grace_and_requeues_itself_comes_back(
    backend: Backend, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    job = spec(leaver(backend), partition="scavenge", gpus=4, node="node1", output=out)
    victim = backend.cluster.submit(job)
    wait_for("the step has started", lambda: out.exists() and "step" in out.read_text())
    until(backend, victim, JobState.RUNNING)
    taker = backend.cluster.submit(spec("sleep 0.5", partition="normal", gpus=1, node="node1"))

    def put_back() -> bool:
        found = backend.job(victim)
        assert found.state is not JobState.COMPLETED, out.read_text()
        return found.restart_count == 1

    # it waits for some seconds only, which a busy machine may not see
    wait_for("it is put back", put_back)
    until(backend, taker, JobState.COMPLETED)
    # it left at once: the other job did not wait for the grace of 10 s
    assert backend.job(taker).start_time - backend.job(taker).submit_time < 10
    assert "state RUNNING" in out.read_text()
    until(backend, victim, JobState.RUNNING, restarts=1)


def test_a_cancelled_job_does_not_put_itself_back(backend: Backend, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job_id = backend.cluster.submit(spec(leaver(backend), partition="scavenge", gpus=4, output=out))
    wait_for("the step has started", lambda: out.exists() and "step" in out.read_text())
    until(backend, job_id, JobState.RUNNING)
    backend.cluster.cancel((job_id,))
    assert until(backend, job_id, JobState.CANCELLED).restart_count == 0


def test_a_lost_node_puts_its_job_back_without_notice(backend: Backend, tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = f"trap 'echo noticed; exit' TERM\necho life {backend.restarts}\nsleep 60 & wait"
    job_id = backend.cluster.submit(spec(script, gpus=4, node="node2", output=out))
    wait_for("it runs", lambda: out.exists() and "life 0" in out.read_text())
    backend.lose_node("node2")
    lost = until(backend, job_id, JobState.PENDING, restarts=1)
    assert lost.nodes == ()
    assert "noticed" not in out.read_text()
    node = next(node for node in backend.cluster.view().nodes if node.name == "node2")
    assert (node.usable, node.idle_gpus) == (False, 0)
    backend.resume_node("node2")
    until(backend, job_id, JobState.RUNNING, restarts=1)


def test_the_jobs_alone_are_those_of_the_view(backend: Backend) -> None:
    running = backend.cluster.submit(spec("sleep 60", gpus=4, node="node1"))
    waiting = backend.cluster.submit(spec("sleep 60", gpus=4, node="node1"))
    until(backend, running, JobState.RUNNING)
    wait_for("the second job waits", lambda: backend.job(waiting).reason == "Resources")

    def reads_agree() -> bool:
        view = backend.cluster.view()
        alone = {job.job_id: job for job in backend.cluster.jobs()}
        return all(timeless(alone[job_id]) == timeless(find(view, job_id)) for job_id in (running, waiting))

    def timeless(job: Job) -> Job:
        return replace(job, start_time=0.0, end_time=0.0)

    # the scheduler may plan the waiting job anew between two reads
    wait_for("both reads fall between two of the scheduler's passes", reads_agree)


def test_requeue_puts_a_running_job_back_and_refuses_a_pending_one(backend: Backend) -> None:
    job_id = backend.cluster.submit(spec("sleep 60"))
    until(backend, job_id, JobState.RUNNING)
    backend.cluster.requeue(job_id)
    until(backend, job_id, JobState.PENDING, restarts=1)
    with pytest.raises(ClusterError):
        backend.cluster.requeue(job_id)
    assert JobFlag.REQUEUE_HOLD not in backend.job(job_id).flags


def test_a_job_that_begins_far_away_is_released_to_a_node_and_a_running_one_is_not(backend: Backend) -> None:
    job_id = backend.cluster.submit(spec("sleep 60", begin_s=30 * 86_400.0))
    wait_for("it waits for its time", lambda: backend.job(job_id).reason == "BeginTime", 90.0)
    assert backend.job(job_id).eligible_time > time.time() + 29 * 86_400
    backend.cluster.release(job_id, "node2")
    assert until(backend, job_id, JobState.RUNNING).nodes == ("node2",)
    with pytest.raises(ClusterError):
        backend.cluster.release(job_id, "node1")
