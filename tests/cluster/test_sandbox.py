"""The private Slurm starts, loses jobs and nodes on request, and leaves nothing behind, however its user ends."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from scavenger.cluster import processes
from scavenger.cluster.layout import decode_layout, demo_layout, encode_layout
from scavenger.cluster.model import JobSpec, JobState
from scavenger.cluster.port import Cluster
from scavenger.cluster.pyslurm.client import PyslurmCluster
from scavenger.cluster.sandbox import accounting, sandbox
from scavenger.cluster.sandbox import sandbox as sandbox_nodes
from scavenger.cluster.sandbox.conf import SandboxLocation, cred_expire_s, gres_conf, slurm_conf
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.errors import ClusterError, ClusterUnavailable, ConfigError, SubmitUnknown
from tests import slurm_faults
from tests.clusters import unfinished, wait_for
from trainer import mpi_settings

ROOT = Path(__file__).resolve().parents[2]
SLEEPER = "#!/bin/bash\nsetsid sleep 4321 &\nsrun sleep 4321\n"


def sleepers(below: int) -> list[int]:
    return [
        pid
        for pid in processes.descendants(below, processes.snapshot())
        if "sleep 4321" in processes.title(pid)
    ]


@pytest.mark.slurm
def test_a_sandbox_ends_with_a_user_that_was_killed() -> None:
    code = (
        "import sys\nfrom scavenger.cluster.sandbox.sandbox import SlurmSandbox\n"
        "box = SlurmSandbox().start()\n"
        f"box.run('sbatch', '-p', 'scavenge', '-o', '/dev/null', stdin={SLEEPER!r})\n"
        "print(box.dir, box.ready.pid, flush=True)\nsys.stdin.read()\n"
    )
    user = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert user.stdout is not None
    try:
        folder, pid = user.stdout.readline().split()
        wait_for("the job runs", lambda: len(sleepers(int(pid))) >= 2)
        table = processes.snapshot()
        everything = {p: table[p].start for p in (int(pid), *processes.descendants(int(pid), table))}
    finally:
        user.kill()
        user.communicate()

    def gone() -> bool:
        now = processes.snapshot()
        return not any(
            p in now and now[p].start == start and now[p].state != "Z" for p, start in everything.items()
        )

    wait_for("every daemon, step and job process is gone", gone, 60)
    wait_for("the folder is gone", lambda: not Path(folder).exists(), 5)


@pytest.mark.slurm
def test_killing_a_jobs_steps_leaves_none_of_its_processes_and_slurm_puts_it_back(
    slurm_sandbox: SlurmSandbox,
) -> None:
    cluster = SlurmCluster(slurm_sandbox.env)
    job_id = cluster.submit(
        JobSpec(name="s", comment="", partition="scavenge", script=SLEEPER, nodelist=("node3",))
    )
    wait_for("the job's processes run", lambda: len(sleepers(slurm_sandbox.ready.pid)) >= 2)
    assert len(slurm_faults.kill_steps(slurm_sandbox, job_id)) >= 4
    wait_for("they are gone", lambda: not sleepers(slurm_sandbox.ready.pid), 2)
    slurm_faults.down_node(slurm_sandbox, "node3")

    def back() -> bool:
        (job,) = (job for job in cluster.view().jobs if job.job_id == job_id)
        return job.state is JobState.PENDING and job.restart_count == 1

    wait_for("Slurm has put the job back", back)


@pytest.mark.slurm
def test_a_controller_that_hangs_is_unavailable_and_a_submission_to_it_is_unknown(
    slurm_sandbox: SlurmSandbox,
) -> None:
    patient, hasty = SlurmCluster(slurm_sandbox.env), SlurmCluster(slurm_sandbox.env, timeout_s=0.5)
    slurm_faults.freeze_controller(slurm_sandbox)
    try:
        with pytest.raises(ClusterUnavailable):
            hasty.view()
        with pytest.raises(SubmitUnknown):
            hasty.submit(JobSpec(name="s", comment="intent 77", partition="scavenge", script=SLEEPER))
    finally:
        slurm_faults.thaw_controller(slurm_sandbox)
    # the request was on its way: this is why a caller looks for its intent before it submits again
    wait_for("the job turns up", lambda: any(job.comment == "intent 77" for job in patient.view().jobs))


def received(sandbox: SlurmSandbox) -> dict[str, int]:
    """What slurmctld has counted so far, by request, in our counter's words. sdiag's own question is left out."""
    ours = {
        "REQUEST_NODE_INFO": "node_info",
        "REQUEST_PARTITION_INFO": "partition_info",
        "REQUEST_JOB_INFO": "job_info",
        "REQUEST_BUILD_INFO": "build_info",
        "REQUEST_SUBMIT_BATCH_JOB": "submit",
        "REQUEST_KILL_JOB": "kill",
        "REQUEST_JOB_REQUEUE": "requeue",
    }
    text = sandbox.run("sdiag").partition("statistics by message type")[2].partition("statistics by user")[0]
    found = dict(re.findall(r"(REQUEST_\w+) *\( *\d+\) count:(\d+)", text))
    return {name: int(found.get(word, 0)) for word, name in ours.items()}


@pytest.mark.slurm
@pytest.mark.parametrize("kind", ["slurm", pytest.param("pyslurm", marks=pytest.mark.pyslurm)])
def test_our_count_of_rpcs_is_the_controllers_own_and_jobs_cost_none(
    slurm_sandbox: SlurmSandbox, kind: str
) -> None:
    cluster: Cluster = SlurmCluster(slurm_sandbox.env)
    if kind == "pyslurm":
        cluster = PyslurmCluster(SlurmCluster(slurm_sandbox.env))
    slurm_sandbox.run(
        "sbatch", "-p", "normal", "-a", "0-299", "-o", "/dev/null", stdin="#!/bin/bash\nsleep 60\n"
    )
    before = received(slurm_sandbox)
    try:
        cluster.info()
        assert len(unfinished(cluster.view())) >= 300
        after_one = cluster.rpc.total
        cluster.view()
        assert cluster.rpc.total - after_one == 4, "an observation, once the partitions are known"
        cluster.jobs()
        ids = [
            cluster.submit(JobSpec(name="s", comment="", partition="scavenge", script=SLEEPER))
            for _ in range(2)
        ]
        cluster.cancel(tuple(ids))
    finally:
        cluster.close()
    counted = cluster.rpc.counts()
    ours = {name: counted.get(name, 0) for name in before}

    def theirs() -> dict[str, int]:
        after = received(slurm_sandbox)
        return {name: after[name] - before[name] for name in after}

    # slurmctld counts a request after it has answered it
    with contextlib.suppress(AssertionError):
        wait_for("slurmctld has counted the last one", lambda: theirs() == ours, 10.0)
    assert theirs() == ours


@pytest.mark.slurm
@pytest.mark.mpi
def test_mpi_ranks_find_each_other_under_srun(slurm_sandbox: SlurmSandbox, tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    listed = subprocess.run(
        ["srun", "--mpi=list"], capture_output=True, text=True, env=slurm_sandbox.env, check=True
    )
    if "pmix" not in listed.stdout + listed.stderr:
        pytest.skip("this Slurm was built without its PMIx plugin; the trainer's launcher takes mpirun there")
    out = tmp_path / "out"
    installed = mpi_settings.library(
        subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
    )
    program = "from mpi4py import MPI; c = MPI.COMM_WORLD; print(c.allreduce(c.rank + 1), c.size)"
    script = f"#!/bin/bash\nsrun --mpi=pmix {sys.executable} -c '{program}'\n"
    cluster = SlurmCluster(slurm_sandbox.env)
    job_id = cluster.submit(
        JobSpec(
            name="mpi",
            comment="",
            partition="reserved",
            script=script,
            gpus=4,
            tasks=2,
            output=str(out),
            environment=dict(mpi_settings.candidates(installed)[0].environ),
        )
    )
    wait_for("the job is over", lambda: job_id not in unfinished(cluster.view()))
    printed = out.read_text().splitlines()
    # Open MPI 5 notes there that TCP reaches nobody where it finds shared memory.
    assert [line for line in printed if not line.startswith("[")] == ["3 2", "3 2"]


def test_no_slurm_commands_on_path_is_an_error_with_its_remedy() -> None:
    with pytest.raises(ClusterError, match=r"no scontrol on this host's PATH\n  remedy: .*local"):
        SlurmCluster({"PATH": "/nonexistent"}).view()


def test_a_machine_without_slurm_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_search_path", lambda: "/nonexistent")
    with pytest.raises(ClusterError, match=r"no munged, slurmctld.*\n  remedy: apt-get install"):
        SlurmSandbox().start()


def test_the_services_end_one_by_one_each_while_the_next_is_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a process that, told to end, notes its name after a while: told all at once, munged would be first."""
    monkeypatch.setattr(sandbox, "_PLUGINS", (str(tmp_path),))
    daemons = sandbox._Daemons(demo_layout(), tmp_path)
    (tmp_path / "log").mkdir()
    try:
        for name, slow in (("munged", 0.0), ("slurmdbd", 0.4), ("mariadbd", 0.2)):
            text = f"trap 'sleep {slow}; echo {name} >>{tmp_path}/ended; exit' TERM; echo >{tmp_path}/{name}; while :; do sleep 0.02; done"
            daemons.spawn(name, "sh", "-c", text)
        daemons.wait_for(
            "traps",
            time.monotonic() + 20,
            lambda: all((tmp_path / name).exists() for name in daemons.children),
        )
        daemons._end_services()
        assert (tmp_path / "ended").read_text().split() == ["slurmdbd", "mariadbd", "munged"]
        assert all(child.poll() is not None for child in daemons.children.values())
    finally:
        for child in daemons.children.values():
            child.kill()
            child.wait()
        daemons._ports.close()


def test_a_node_that_does_not_come_up_is_named_with_its_slurmds_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "_PLUGINS", (str(tmp_path),))
    monkeypatch.setattr(sandbox_nodes, "ask", lambda _env, _names: {"node2": "unknown"})
    daemons = sandbox._Daemons(demo_layout(), tmp_path)
    (tmp_path / "log").mkdir()
    (tmp_path / "log/slurmd.node2.log").write_text(
        "slurmd: fatal: Unable to bind listen port (20003): Address already in use\n"
    )
    try:
        with pytest.raises(ClusterError, match="no idle nodes") as caught:
            sandbox_nodes.wait(daemons, time.monotonic())
    finally:
        daemons._ports.close()
    assert (
        "node2: unknown\nthe end of node2's slurmd log:\n  slurmd: fatal: Unable to bind"
        in caught.value.cause
    )


class _NoDaemons:
    """For accounting: programs from a folder, and daemons that need not be started."""

    def __init__(self, folder: Path) -> None:
        self.layout, self.dir = demo_layout(), folder
        self.site = SandboxLocation(str(folder), "host", "me", "/plugins", 20000, 20010)
        self.env = {"PATH": os.pathsep.join([str(folder), "/usr/bin", "/bin"])}

    def spawn(self, name: str, *argv: str) -> None:
        pass

    def wait_for(self, what: str, deadline: float, condition: Callable[[], bool]) -> None:
        pass


@pytest.mark.parametrize("name", ["mariadb-install-db", "sacctmgr"])
@pytest.mark.parametrize(
    ("text", "words"),
    [("exec sleep 60", "gave no answer within 0.5 s"), ("echo no room >&2; exit 1", ": no room")],
)
def test_an_accounting_that_cannot_be_made_is_an_error_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, words: str
) -> None:
    monkeypatch.setattr(accounting, "INSTALL_S" if name != "sacctmgr" else "SACCTMGR_S", 0.5)
    (tmp_path / "etc").mkdir()
    for program in ("mariadb-install-db", "mariadbd", "slurmdbd", "sacctmgr"):
        (tmp_path / program).write_text(f"#!/bin/sh\n{text if program == name else 'exit 0'}\n")
        (tmp_path / program).chmod(0o755)
    with pytest.raises(ClusterError, match=f"^{name}.*{words}"):
        accounting.start(_NoDaemons(tmp_path), time.monotonic() + 20)


def test_a_configuration_says_what_the_layout_says() -> None:
    layout = demo_layout(nodes=3, gpus=2, grace_s=2.5)
    site = SandboxLocation("/d", "host", "me", "/plugins", 20000)
    text = slurm_conf(layout, site)
    assert "NodeName=node2 NodeHostname=host NodeAddr=127.0.0.1 Port=20003 " in text
    assert (
        "PartitionName=scavenge Nodes=node1,node2 Default=NO MaxTime=INFINITE DefaultTime=60 PriorityTier=1 "
        "PreemptMode=REQUEUE GraceTime=3 LLN=YES State=UP" in text
    )
    assert "cred_expire=5" in text  # anything below is refused by slurmd, which then takes 120
    assert gres_conf(layout, site).count("File=/d/dev/nvidia[0-1]") == 3
    assert cred_expire_s(demo_layout(requeue_delay_s=30)) == 29


def test_a_layout_survives_its_own_json_and_a_bad_one_is_refused() -> None:
    layout = demo_layout()
    assert decode_layout(encode_layout(layout)) == layout
    for bad in (
        "{",
        '{"nodes": []}',
        encode_layout(layout).replace('"node1"', '"node9"', 1),
        '{"nodes":["a b"]}',
    ):
        with pytest.raises(ConfigError):
            decode_layout(bad)
