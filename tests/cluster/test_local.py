"""The local backend's processes: who is signalled, what is left behind, and what garbage on its socket does."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scavenger.cluster import framing, processes
from scavenger.cluster.local import messages
from scavenger.cluster.local.client import LocalCluster, LocalServer
from scavenger.cluster.local.server import expand_output
from scavenger.cluster.model import Job, JobSpec, JobState
from scavenger.errors import ClusterError, ClusterUnavailable
from tests.clusters import layout_for_tests, wait_for

ROOT = Path(__file__).resolve().parents[2]


def spec(script: str, partition: str = "scavenge0", **more: object) -> JobSpec:
    return JobSpec(name="test", comment="", partition=partition, script=f"#!/bin/bash\n{script}\n", **more)  # type: ignore[arg-type]


def job(cluster: LocalCluster, job_id: int) -> Job:
    return next(job for job in cluster.view().jobs if job.job_id == job_id)


def below(server: LocalServer, command: str) -> list[int]:
    table = processes.snapshot()
    return [
        p
        for p in processes.descendants(server.pid, table)
        if table[p].state != "Z" and command in processes.title(p)
    ]


def wrote(path: Path, text: str) -> None:
    wait_for(f"{path.name} holds {text!r}", lambda: path.exists() and text in path.read_text())


def test_a_grace_reaches_the_steps_and_not_the_batch_shell(
    local_cluster: LocalCluster, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    step = 'trap "echo step got it; exit 5" TERM; echo up; while :; do sleep 0.05; done'
    script = f"trap 'echo shell got it' TERM\nbash -c '{step}'\necho step said $?"
    victim = local_cluster.submit(spec(script, "scavenge", gpus=4, nodelist=("node1",), output=str(out)))
    wrote(out, "up")
    local_cluster.submit(spec("sleep 0.1", "normal", gpus=1, nodelist=("node1",)))
    wait_for("the job has ended", lambda: job(local_cluster, victim).state is JobState.COMPLETED)
    assert "step got it" in out.read_text()
    assert "step said 5" in out.read_text()
    assert "shell got it" not in out.read_text()


def test_a_job_that_is_one_process_gets_the_notice_itself(
    local_cluster: LocalCluster, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    victim = local_cluster.submit(
        spec("echo up; exec sleep 60", "scavenge", gpus=4, nodelist=("node1",), output=str(out))
    )
    wrote(out, "up")
    local_cluster.submit(spec("sleep 0.1", "normal", gpus=1, nodelist=("node1",)))
    wait_for("the job has ended", lambda: job(local_cluster, victim).state is JobState.FAILED)
    assert job(local_cluster, victim).exit_code == 128 + signal.SIGTERM


def test_a_job_that_ignores_term_is_killed_after_killwait(
    local_cluster: LocalCluster, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    stubborn = local_cluster.submit(
        spec("trap '' TERM\necho up\nwhile :; do sleep 0.05; done", output=str(out))
    )
    wrote(out, "up")
    started = time.monotonic()
    local_cluster.cancel((stubborn,))
    wait_for("it is gone", lambda: job(local_cluster, stubborn).state is JobState.CANCELLED)
    assert time.monotonic() - started > 5.8, "not before KillWait is over, 6 s"


def test_what_a_script_leaves_behind_ends_with_its_job(local_server: LocalServer) -> None:
    cluster = local_server.cluster()
    script = "sleep 4322 &\nsetsid sleep 4322 &\n(setsid setsid sleep 4322 &)\nsleep 0.3"
    left = cluster.submit(spec(script))
    wait_for("its three children run", lambda: len(below(local_server, "sleep 4322")) == 3)
    wait_for("the script has ended", lambda: job(cluster, left).state is JobState.COMPLETED)
    wait_for("its children are gone", lambda: not below(local_server, "sleep 4322"), 2)


def test_processes_killed_behind_the_schedulers_back_end_the_job_as_failed(
    local_cluster: LocalCluster, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    killed = local_cluster.submit(spec("echo up\nsleep 60 & sleep 60", output=str(out)))
    wrote(out, "up")
    wait_for("all three run", lambda: len(local_cluster.kill_job_processes(killed)) > 0)
    wait_for("the job has failed", lambda: job(local_cluster, killed).state is JobState.FAILED)
    assert job(local_cluster, killed).exit_code == 137


def test_a_script_that_cannot_start_fails_and_the_server_goes_on(local_cluster: LocalCluster) -> None:
    bad = JobSpec(name="x", comment="", partition="normal", script="#!/no/such/interpreter\n")
    for broken in (bad, spec("true", output="/no/such/folder/out"), spec("true", workdir="/no/such/folder")):
        job_id = local_cluster.submit(broken)
        wait_for("it failed", lambda job_id=job_id: job(local_cluster, job_id).state is JobState.FAILED)  # type: ignore[misc]


def test_a_server_and_its_jobs_end_with_a_user_that_was_killed(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom scavenger.cluster.local.client import LocalServer\n"
        "from scavenger.cluster.model import JobSpec\n"
        "server = LocalServer(Path(sys.argv[1])).start()\n"
        "script = '#!/bin/bash\\nsetsid sleep 4323 & sleep 4323'\n"
        "server.cluster().submit(JobSpec(name='x', comment='', partition='scavenge', script=script))\n"
        "print(server.pid, flush=True)\nsys.stdin.read()\n"
    )
    argv = [sys.executable, "-c", code, str(tmp_path / "c")]
    user = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert user.stdout is not None
    try:
        pid = int(user.stdout.readline())
        wait_for("the job runs", lambda: len(processes.descendants(pid, processes.snapshot())) >= 3)
        table = processes.snapshot()
        everything = {p: table[p].start for p in (pid, *processes.descendants(pid, table))}
    finally:
        user.kill()
        user.communicate()

    def gone() -> bool:
        now = processes.snapshot()
        return not any(
            p in now and now[p].start == start and now[p].state != "Z" for p, start in everything.items()
        )

    wait_for("the server and the job are gone", gone, 60)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0",
        b"\xff\xff\xff\xff",
        b"\0\0\0\x04abcd",
        framing.HEADER.pack(1 << 30),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_garbage_on_the_socket_is_refused_and_the_server_goes_on(
    local_server: LocalServer, data: bytes
) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        sock.connect(str(local_server.dir / messages.SOCKET_NAME))
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        sock.recv(4096)
    assert local_server.cluster().view().jobs == ()


def test_the_folder_of_the_socket_is_the_users_alone(local_server: LocalServer) -> None:
    assert local_server.dir.stat().st_mode & 0o777 == 0o700


def test_a_second_server_in_the_same_folder_is_refused(local_server: LocalServer) -> None:
    with pytest.raises(ClusterError):
        LocalServer(local_server.dir, layout_for_tests()).start()
    assert local_server.cluster().view().jobs == ()


def test_no_server_is_unavailable_and_not_empty(tmp_path: Path) -> None:
    with pytest.raises(ClusterUnavailable, match="no local cluster answers"):
        LocalCluster(tmp_path).view()
    with pytest.raises(ClusterError, match="no local cluster answers") as found:
        LocalCluster(tmp_path).submit(JobSpec("n", "", "p", "#!/bin/sh\n"))
    assert type(found.value) is ClusterError, "it was not sent: there is no job to look for"


def test_output_names_are_filled_in_as_slurm_does() -> None:
    assert expand_output("a/%x-%j.%N%%j", 7, "n/m", "node1") == "a/n_m-7.node1%j"
