"""pyslurm's process: found and explained, bounded, and a named failed observation when it hangs, ends or talks nonsense.

The process here imports a stand-in package of that name, so that it can be made to misbehave; what the real one says is `test_contract`'s.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog
from packaging.specifiers import SpecifierSet

from scavenger.cluster import choose, processes
from scavenger.cluster.error_kind import ErrorKind
from scavenger.cluster.model import JobState
from scavenger.cluster.pyslurm import client
from scavenger.cluster.pyslurm import messages as wire
from scavenger.cluster.pyslurm.client import PyslurmCluster, mismatch, unfit
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm import text as slurm_text
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.config import ClusterSection, DaemonConfig, DaemonSection
from scavenger.errors import ClusterUnavailable, ConfigError
from tests import slurm_faults
from tests.cluster.test_slurm_cluster import no_descriptors
from tests.clusters import wait_for

ROOT = Path(__file__).resolve().parents[2]
NODE = {
    "name": "n1",
    "state": "MIXED+DRAIN",
    "gres": ["gpu:h100:4"],
    "gres_used": ["gpu:h100:3(IDX:0-2)"],
    "partitions": ["p"],
    "cpus": 64,
    "alloc_cpus": 3,
    "real_memory": 1000,
    "alloc_mem": 10,
}
JOB = {
    "job_id": 7,
    "user_id": os.getuid(),
    "partition": "p",
    "account": "physics",
    "job_state": "FAILED",
    "state_reason": "None",
    "name": None,
    "comment": "c",
    "nodes": "n1",
    "sched_nodes": "",
    "num_nodes": 1,
    "num_cpus": 2,
    "num_tasks": 1,
    "priority": 5,
    "restart_cnt": 1,
    "submit_time": 1,
    "eligible_time": 1,
    "start_time": 2,
    "end_time": 3,
    "time_limit": 60,
    "exit_code": "3:9",
    "tres_alloc_str": "cpu=1",
    "tres_per_job": None,
    "tres_per_node": "gres:gpu:h100:2",
    "tres_per_socket": None,
    "tres_per_task": None,
    "array_task_str": None,
}
FAKE = f"""
import os, sys, time
way = os.environ.get("WAY", "")
given = os.environ.get("PYSLURM_VERSION", "22.5.3")
if way == "no import":
    raise ImportError("libslurm.so.38: cannot open shared object file")
print("what pyslurm prints must not get into the replies", flush=True)

class PyslurmError(Exception): ...

class Table:
    def __init__(self, rows): self.rows = rows
    def get(self):
        if way == "hang": time.sleep(600)
        if way == "exit": sys.stderr.write("fatal: Could not establish a configuration source\\n"); os._exit(1)
        if way == "refuse": raise ValueError("Unable to contact slurm controller (connect failure)", 1800)
        if way == "other release": return {{"n": {{}}}}
        return self.rows

class One:
    def __init__(self, **fields): self.__dict__.update(fields)

class Jobs:
    @staticmethod
    def load():
        return {{7: One(id=7, requeue_count=1, state="FAILED", exit_code=3, exit_code_signal=0)}}

def node(): return Table({{"n1": {NODE!r}}})
def job(): return Table({{7: {JOB!r}}})
def version(): return given

__version__ = given
if not given.startswith("22"): version = sys  # a module of that name, as since 23.2
if given.startswith("25"): del node, job
"""


COMMAND = r"""#!/bin/sh
case "$*" in
    *version*) echo slurm-wlm 22.05.8 ;;
    *partition*) echo "PartitionName=p GraceTime=0 MaxTime=UNLIMITED Nodes=n1 PriorityTier=1 PreemptMode=REQUEUE State=UP" ;;
    *reservation*) echo "No reservations in the system" ;;
    *config*) printf '%s\n' "ClusterName = c" "KillWait = 30 sec" "MessageTimeout = 10 sec" "PreemptType = preempt/none" \
                             "SLURM_VERSION = 22.05.8" ;;
esac
"""


def install(folder: Path, slurm: str = "22.05.8") -> None:
    """The stand-in package, and commands for what is asked of them."""
    (folder / "pyslurm.py").write_text(FAKE)
    for name in ("sbatch", "scontrol"):
        (folder / name).write_text(COMMAND.replace("22.05.8", slurm))
        (folder / name).chmod(0o755)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., PyslurmCluster]]:
    """Clusters whose process imports the stand-in, made to behave in a way; all are closed."""
    install(tmp_path)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    clusters = []

    def make(
        way: str = "", timeout_s: float = 20.0, clock: Callable[[], float] = time.monotonic
    ) -> PyslurmCluster:
        env = {
            **os.environ,
            "PATH": path,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
            "WAY": way,
        }
        clusters.append(PyslurmCluster(SlurmCluster(env), timeout_s, clock=clock))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()


def test_a_view_comes_through_the_process_and_costs_what_is_counted(
    made: Callable[..., PyslurmCluster],
) -> None:
    cluster = made()
    view = cluster.view()
    [node], [job], [part] = view.nodes, view.jobs, view.partitions
    assert (node.gpus, node.gpus_allocated, node.usable, node.states) == (4, 3, False, {"mixed", "drain"})
    assert (job.state, job.gpus, job.gpus_by_node, job.restart_count, job.time_limit_s) == (
        JobState.FAILED,
        2,
        (("n1", 2),),
        1,
        3600,
    )
    assert job.account == "physics"
    assert job.exit_code == 3, (
        "the signal that pyslurm 22.5 carries over from another record is not this job's"
    )
    assert (part.max_time_s, part.grace_s, part.up) == (float("inf"), 0, True)
    counts = cluster.rpc.counts()
    assert [counts[name] for name in ("node_info", "partition_info", "build_info", "job_info")] == [
        1,
        2,
        1,
        2,
    ]
    before = cluster.rpc.total
    assert cluster.jobs() == view.jobs
    assert cluster.rpc.total == before + 1, "the exit code is remembered: it is asked for once"
    assert (cluster.info().version, cluster.info().backend) == ("22.05.8", "pyslurm")


def test_a_hung_process_is_a_failed_observation_ends_and_is_started_again_after_a_pause(
    made: Callable[..., PyslurmCluster],
) -> None:
    cluster = made("hang", timeout_s=0.3)
    cluster.start()
    pid = cluster.pid
    with pytest.raises(ClusterUnavailable, match="no answer within") as caught:
        cluster.view()
    assert caught.value.error_kind == ErrorKind.BACKEND
    assert processes.read_proc(pid) is None
    with pytest.raises(ClusterUnavailable, match="started again in 1 s"):
        cluster.view()
    assert cluster.pid == 0


def test_a_process_that_was_killed_is_noticed_and_another_one_takes_over(
    made: Callable[..., PyslurmCluster],
) -> None:
    clock = Clock()
    cluster = made(clock=clock)
    cluster.view()
    first = cluster.pid
    os.kill(first, signal.SIGKILL)
    with pytest.raises(ClusterUnavailable) as caught:
        cluster.view()
    assert caught.value.error_kind == ErrorKind.BACKEND
    clock.now += 1.1
    assert cluster.view().nodes
    assert cluster.pid != first


def test_the_pause_doubles_to_its_bound_and_a_good_answer_ends_that(
    made: Callable[..., PyslurmCluster],
) -> None:
    clock = Clock()
    cluster = made("exit", clock=clock)
    pauses = []
    for _ in range(8):
        with pytest.raises(ClusterUnavailable, match="Could not establish a configuration source"):
            cluster.view()
        with pytest.raises(ClusterUnavailable, match="started again in") as caught:
            cluster.view()
        pauses.append(float(caught.value.cause.partition("started again in ")[2].split()[0]))
        clock.now += pauses[-1]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert client.MAX_PAUSE_S == 60


def test_what_slurm_refuses_is_told_in_its_words_and_costs_no_process(
    made: Callable[..., PyslurmCluster],
) -> None:
    cluster = made("refuse")
    for _ in range(2):
        with pytest.raises(ClusterUnavailable, match="Unable to contact slurm controller") as caught:
            cluster.view()
        assert caught.value.error_kind == ErrorKind.DOWN
    pid = cluster.pid
    with pytest.raises(ClusterUnavailable):
        cluster.view()
    assert cluster.pid == pid != 0


def test_records_of_another_release_fail_the_observation(made: Callable[..., PyslurmCluster]) -> None:
    with pytest.raises(ClusterUnavailable, match="not as this version has it") as caught:
        made("other release").view()
    assert caught.value.error_kind == ErrorKind.PARTIAL


def test_a_pyslurm_that_cannot_be_imported_says_why(made: Callable[..., PyslurmCluster]) -> None:
    with pytest.raises(ClusterUnavailable, match=r"libslurm\.so\.38") as caught:
        made("no import").start()
    assert caught.value.error_kind == ErrorKind.BACKEND


def test_a_process_that_cannot_be_started_is_a_failed_observation(
    made: Callable[..., PyslurmCluster],
) -> None:
    clock = Clock()
    cluster = made(clock=clock)
    with (
        no_descriptors(),
        pytest.raises(ClusterUnavailable, match="cannot be started: Too many open files") as caught,
    ):
        cluster.view()
    assert caught.value.error_kind == ErrorKind.BACKEND
    clock.now += 1.1
    assert cluster.view().nodes


def test_descriptors_beyond_those_of_select_are_read_all_the_same(
    made: Callable[..., PyslurmCluster],
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    taken = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while taken[-1] < 1024:
            taken.append(os.open(os.devnull, os.O_RDONLY))
        assert made().view().nodes
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_that_no_signal_ends_is_not_waited_for(
    made: Callable[..., PyslurmCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "END_S", 0.2)
    cluster = made("hang", timeout_s=0.3)
    cluster.start()
    pid = cluster.pid
    with (
        monkeypatch.context() as patched
    ):  # as one that the kernel holds in a file system: killed, and still there
        patched.setattr(processes, "kill_trees", lambda roots: ())
        with pytest.raises(ClusterUnavailable, match="no answer within"):
            cluster.view()
    assert cluster.pid == 0
    processes.kill_trees([pid])

    def reaped() -> bool:
        cluster.close()
        return processes.read_proc(pid) is None

    wait_for("it is reaped", reaped)


def test_closing_ends_the_process(made: Callable[..., PyslurmCluster]) -> None:
    cluster = made()
    cluster.start()
    pid = cluster.pid
    cluster.close()
    cluster.close()
    assert processes.read_proc(pid) is None


@pytest.mark.parametrize(
    ("ours", "slurm", "why"),
    [
        ("22.5.3", "22.05.8", ""),
        ("25.11.2", "22.05.8", "is for Slurm 25.11, and this is Slurm 22.05.8"),
        ("24.11.0", "24.11.5", ""),
        ("24.5.1", "24.11.5", "is for Slurm 24.05, and this is Slurm 24.11.5"),
        ("22.5.3", "", "no version"),
        ("v2", "22.05.8", "no version"),
    ],
)
def test_only_the_pyslurm_of_this_slurm_will_do(ours: str, slurm: str, why: str) -> None:
    said = mismatch(ours, slurm)
    assert why in said
    assert bool(said) == bool(why)


def test_the_extra_is_met_only_by_releases_that_have_what_is_read() -> None:
    """pip's newest one would be installed, refused at each start, and never used."""
    setup = (Path(__file__).parents[2] / "setup.py").read_text(encoding="utf-8")
    (asked,) = re.findall(r'^    "pyslurm": \["pyslurm(.*)"\],$', setup, re.M)
    releases = SpecifierSet(asked).filter(["21.8.1", "22.5.3", "24.11.0", "25.5.0", "25.11.2"])
    assert list(releases) == ["22.5.3", "24.11.0"]


def test_without_a_pyslurm_the_reason_names_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "no pyslurm is installed for /" in unfit("22.05.8")


@pytest.mark.parametrize(
    ("version", "slurm", "way", "why"),
    [
        ("22.5.3", "22.05.8", "", ""),
        ("24.11.0", "24.11.5", "", ""),
        ("24.11.0", "24.11.5", "refuse", ""),  # a controller that is silent says nothing of the records
        ("25.11.1", "22.05.8", "", "is for Slurm 25.11"),
        ("25.11.1", "25.11.4", "", "pyslurm 25.11.1 has no node and no job, which are read"),
        ("24.11.0", "24.11.5", "other release", "pyslurm's record is not as this version has it: KeyError"),
        ("24.11.0", "24.11.5", "no import", "libslurm.so.38"),
    ],
)
def test_auto_takes_the_pyslurm_that_reads_this_site_and_says_why_where_not(
    version: str, slurm: str, way: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, slurm)
    monkeypatch.setenv("PYSLURM_VERSION", version)
    monkeypatch.setenv("WAY", way)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    config = DaemonConfig(daemon=DaemonSection(state_dir=tmp_path))
    with structlog.testing.capture_logs() as logs:
        cluster = choose.backend(config)
    cluster.close()
    [line] = logs
    assert line["chosen"] == ("slurm" if why else "pyslurm")
    assert (why or version) in line["reason"]
    if why:
        demanded = config.model_copy(update={"cluster": ClusterSection(backend="pyslurm")})
        with pytest.raises(ConfigError, match=re.escape(why) + r"(.|\n)*scripts/build-pyslurm"):
            choose.backend(demanded)


@pytest.mark.parametrize(("text", "count"), [("", 1), ("0-3", 4), ("0-9:2,20%4", 6), ("7", 1), ("1,3,5", 3)])
def test_a_pending_array_is_as_many_jobs_as_it_has_tasks(text: str, count: int) -> None:
    assert slurm_text.count_tasks(text) == count


@pytest.mark.parametrize("text", ["0-3,...", "x", "3-1", "0-99999999", "0-9:0", ","])
def test_a_list_of_tasks_that_is_cut_off_or_malformed_is_no_observation(text: str) -> None:
    with pytest.raises(ClusterUnavailable):
        slurm_text.count_tasks(text)


def test_bytes_that_are_no_reply_and_lengths_over_the_bound_are_refused() -> None:
    for body in (
        b"",
        b"\x00",
        wire.frame(wire.PyslurmRequest(1, "view"))[4:],
        wire.frame(wire.RowsReply(1))[4:-1],
    ):
        with pytest.raises(ClusterUnavailable):
            wire.decode_reply(body)
    with pytest.raises(ClusterUnavailable, match="bound"):
        wire.length_of(b"\xff\xff\xff\xff")


@pytest.mark.slurm
@pytest.mark.pyslurm
def test_the_real_one_is_unavailable_while_the_controller_hangs_and_recovers_by_itself(
    slurm_sandbox: SlurmSandbox,
) -> None:
    cluster = PyslurmCluster(SlurmCluster(slurm_sandbox.env), timeout_s=10.0)
    try:
        cluster.view()
        pid = cluster.pid
        slurm_faults.freeze_controller(slurm_sandbox)
        try:
            with pytest.raises(ClusterUnavailable) as caught:
                cluster.jobs()
            assert caught.value.error_kind == ErrorKind.NO_REPLY
        finally:
            slurm_faults.thaw_controller(slurm_sandbox)

        def answers() -> bool:
            try:
                return bool(cluster.view().nodes)
            except ClusterUnavailable:
                return False

        wait_for("it answers again", answers)
        assert cluster.pid == pid, "libslurm gave up by itself: the process had no need to end"
    finally:
        cluster.close()
