"""The job script: quoted rendering, and on real schedulers: goodbye, exit 75, requeue, the same job again; cancelled is cancelled."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scavenger import resources
from scavenger.cluster.local.client import LocalCluster, LocalServer
from scavenger.cluster.model import Job, JobFlag, JobSpec, JobState
from scavenger.cluster.port import Cluster
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.errors import ConfigError
from scavenger.harvest.execute.job_script import TEMPLATE, JobScript, render
from scavenger.protocol import keys, messages
from tests.clusters import wait_for
from tests.rollout.daemon import FakeDaemon

models = pytest.importorskip("tests.rollout.models", reason="the reference engine needs the [trainer] extra")
SERVER, ME = keys.generate(), keys.generate()


def script(backend: str = "local", **changes: str) -> str:
    values = {
        "python": sys.executable,
        "state_dir": "/state",
        "key": "/state/a.key",
        "run": "run",
        "engine": "reference",
        **changes,
    }
    return render(resources.text(TEMPLATE), JobScript(backend=backend, **values))  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["slurm", "local"])
@pytest.mark.parametrize("nasty", ["a b", "$(touch /tmp/x)", "';echo x;'", "`id`", 'a"b', "--flag", "$HOME"])
def test_every_value_reaches_the_script_as_one_word(backend: str, nasty: str, tmp_path: Path) -> None:
    text = script(backend, state_dir=nasty, key=nasty, run=nasty, engine=nasty, local_dir=nasty)
    head = text.partition("worker=")[2].partition("\n")[0]
    show = f"worker={head}\nprintf '%s\\0' \"${{worker[@]}}\""
    words = subprocess.run(["bash", "-c", show], capture_output=True, check=True).stdout.decode().split("\0")
    assert words[:-1] == [
        sys.executable,
        "-m",
        "rollout",
        "--state-dir",
        nasty,
        "--key",
        nasty,
        "--kind",
        "harvested",
        "--run",
        nasty,
        "--engine",
        nasty,
    ]
    assert subprocess.run(["bash", "-n"], input=text.encode(), check=False).returncode == 0


def test_a_bad_template_or_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="one line"):
        script(run="a\nb")
    job = JobScript("local", "python", "s", "k", "r", "reference")
    with pytest.raises(ConfigError, match="'secret' is undefined"):
        render("#!/bin/bash\n{{ secret }}", job)
    with pytest.raises(ConfigError, match="first line"):
        render("echo {{ run | quote }}", job)


def test_the_script_names_no_secret_and_no_address() -> None:
    text = script("slurm")
    assert "tcp://" not in text
    assert ME.secret not in text


def test_a_job_that_waits_for_slurm_outlives_a_squeue_that_fails(tmp_path: Path) -> None:
    path = tmp_path / "asked"
    squeue = f"echo asked >> {path}\ncase $(grep -c asked {path}) in 2) exit 1 ;; 4) echo COMPLETING ;; *) echo RUNNING ;; esac"
    for name, body in {"srun": "exit 75", "squeue": squeue, "sleep": "exit 0"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    text = script("slurm", after_drain="wait")
    done = subprocess.run(
        ["bash", "-c", text], env=environ, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 75
    assert path.read_text().count("asked") == 4, "until Slurm took the job"


def test_a_job_that_may_not_be_put_back_does_not_ask_twice(tmp_path: Path) -> None:
    """Slurm's words for a job with Requeue=0. While the script asks others wait for its GPUs."""
    bodies = {"srun": "exit 75", "squeue": "echo RUNNING"}
    bodies["scontrol"] = "echo Requested operation is presently disabled for job 7 >&2; exit 1"
    for name, body in bodies.items():
        (tmp_path / name).write_text(f"#!/bin/sh\ncd {tmp_path}\necho {name} $1 >> called\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", "-c", script("slurm")], env=environ, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 75
    assert "presently disabled" in done.stderr
    assert (tmp_path / "called").read_text().splitlines() == [
        "srun --ntasks=1",
        "squeue -h",
        "scontrol requeue",
    ]


@pytest.mark.parametrize("after_drain", ["requeue", "wait"])
@pytest.mark.parametrize("when", ["srun", "squeue"])
def test_a_job_that_the_scheduler_ends_itself_leaves_at_once(
    tmp_path: Path, after_drain: str, when: str
) -> None:
    """GraceTime 0: Slurm's signal reaches the script, and the squeue that it may be running, which dies of it."""
    shell = 'kill -TERM "$(cat shell)"; kill -KILL $$'
    bodies = {"srun": "exit 75", "squeue": "echo RUNNING", "scontrol": "exit 0", "sleep": "exit 0"}
    bodies |= {"srun": 'kill -TERM "$(cat shell)"; exit 75'} if when == "srun" else {"squeue": shell}
    for name, body in bodies.items():
        (tmp_path / name).write_text(f"#!/bin/sh\ncd {tmp_path}\necho {name}$1 >> called\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    text = f"echo $$ > {tmp_path}/shell\n" + script("slurm", after_drain=after_drain)
    done = subprocess.run(
        ["bash", "-c", text], env=environ, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 143, (
        "Slurm has its own word for the end by then; of another's signal it is the truth"
    )
    assert "ended by SIGTERM" in done.stderr
    called = (tmp_path / "called").read_text().split()
    assert not [one for one in called if one.startswith("scontrol")]
    assert sum(one.startswith("squeue") for one in called) == (0 if when == "srun" else 1)
    assert not {"sleep1", "sleep10"} & set(called), "others wait"


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_to_the_script_alone_puts_the_job_back(tmp_path: Path, signals: int) -> None:
    """`kill`, or `scancel --batch`: the engine has no signal, and by Slurm's own word the job runs. The requeue then signals both."""
    shell = 'kill -TERM "$(cat shell)"\n'
    bodies = {
        "srun": f"trap 'exit 75' TERM\necho $$ > engine\n{(shell + 'sleep 0.2' + chr(10)) * signals}while :; do sleep 0.05; done",
        "squeue": "echo RUNNING",
        "scontrol": f'{shell}kill -TERM "$(cat engine)"',
    }
    for name, body in bodies.items():
        (tmp_path / name).write_text(f"#!/bin/sh\ncd {tmp_path}\necho {name} $1 >> called\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    text = f"echo $$ > {tmp_path}/shell\n" + script("slurm")
    done = subprocess.run(
        ["bash", "-c", text], env=environ, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 143
    assert "not the scheduler's: the job puts itself back" in done.stderr
    assert "ended by SIGTERM (worker's code 75)" in done.stderr
    assert (tmp_path / "called").read_text().splitlines() == [
        "srun --ntasks=1",
        "squeue -h",
        "scontrol requeue",
    ]


@pytest.mark.parametrize("code", [0, 69, 70, 72, 78])
def test_the_job_ends_with_its_workers_code(tmp_path: Path, code: int) -> None:
    (tmp_path / "srun").write_text(f"#!/bin/sh\nexit {code}\n")
    (tmp_path / "srun").chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    assert (
        subprocess.run(["bash", "-c", script("slurm")], env=environ, timeout=90, check=False).returncode
        == code
    )


@pytest.mark.parametrize(
    ("python", "said", "code"),
    [
        ("/nowhere/python", "/nowhere/python", 72),
        ("#!/bin/sh\nexit 3\n", "", 72),
        ('#!/bin/sh\n[ "$1" = -c ] || exit 3\n', "", 3),
        (f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n', "No module named", 72),
    ],
    ids=["not there", "does not run", "imports it", "lacks it"],
)
def test_a_python_that_cannot_import_the_worker_ends_the_job_as_one_that_cannot_start(
    tmp_path: Path, python: str, said: str, code: int
) -> None:
    """That is the set-up's fault. What ends a worker that can be imported keeps its code."""
    if python.startswith("#!"):
        (tmp_path / "python").write_text(python)
        (tmp_path / "python").chmod(0o755)
        python = str(tmp_path / "python")
    environ = {**os.environ, "SCAVENGER_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", "-c", script(python=python)],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


class Site:
    """A cluster to run the script on."""

    def __init__(self, cluster: Cluster, backend: str, folder: Path, local_dir: str = "") -> None:
        self.cluster = cluster
        self.state_dir = folder / "state"
        self.output = folder / "job.out"
        key = folder / "worker.key"
        keys.write_keypair(key, ME)
        self.state_dir.mkdir(mode=0o700)
        self.script = script(backend, state_dir=str(self.state_dir), key=str(key), local_dir=local_dir)

    def submit(self, partition: str) -> int:
        return self.cluster.submit(
            JobSpec(
                "engine",
                "ours",
                partition,
                self.script,
                gpus=1,
                nodelist=("node1",),
                output=str(self.output),
                time_s=600,
            )
        )

    def take_the_node_back(self) -> int:
        sleep = "#!/bin/bash\nexec sleep 300\n"
        return self.cluster.submit(
            JobSpec("other", "theirs", "normal", sleep, gpus=4, nodelist=("node1",), time_s=600)
        )

    def job(self, job_id: int) -> Job | None:
        return next((job for job in self.cluster.view().jobs if job.job_id == job_id), None)

    async def until(self, what: str, condition: Callable[[], bool]) -> None:
        await asyncio.to_thread(wait_for, what, condition, 90.0)


@pytest.fixture(params=[pytest.param("slurm", marks=pytest.mark.slurm), "local"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Site:
    if request.param == "slurm":
        sandbox: SlurmSandbox = request.getfixturevalue("slurm_sandbox")
        return Site(SlurmCluster(sandbox.env), "slurm", tmp_path)
    local: LocalCluster = request.getfixturevalue("local_cluster")
    server: LocalServer = request.getfixturevalue("local_server")
    return Site(local, "local", tmp_path, str(server.dir))


async def registered(daemon: FakeDaemon) -> messages.WorkerHello:
    """A worker that has read its welcome, which its first heartbeat shows: one that leaves before has nothing to say goodbye to."""
    hello = await daemon.expect(messages.WorkerHello, 90.0)
    daemon.welcome = messages.Welcome(1, 1, "run", models.spec(), 0.5, 50.0, 8)
    daemon.beats.clear()
    daemon.send(daemon.welcome)
    await daemon.beat(90.0)
    return hello


@pytest.mark.parametrize("partition", ["scavenge", "scavenge0"], ids=["grace", "no-grace"])
def test_a_preempted_engine_says_goodbye_and_its_job_comes_back(site: Site, partition: str) -> None:
    async def main() -> None:
        with FakeDaemon(site.state_dir, SERVER, {ME.public}) as daemon:
            job_id = site.submit(partition)
            hello = await registered(daemon)
            assert (hello.job_id, hello.incarnation, hello.node, hello.gpus) == (job_id, 0, "node1", 1)
            other = site.take_the_node_back()
            goodbye = await daemon.expect(messages.Goodbye, 90.0)
            assert goodbye.notice
            daemon.send(messages.GoodbyeAck())
            await site.until("the other user's job runs", lambda: _is(site.job(other), JobState.RUNNING))
            await site.until("the engine's job waits", lambda: _is(site.job(job_id), JobState.PENDING))
            site.cluster.cancel((other,))
            again = await registered(daemon)
            assert (again.job_id, again.incarnation) == (job_id, 1)
            assert again.session != hello.session
            assert _is(site.job(job_id), JobState.RUNNING)

    asyncio.run(main())


def test_a_cancelled_engine_never_comes_back(site: Site) -> None:
    async def main() -> int:
        with FakeDaemon(site.state_dir, SERVER, {ME.public}) as daemon:
            job_id = site.submit("scavenge")
            await registered(daemon)
            site.cluster.cancel((job_id,))
            await daemon.expect(messages.Goodbye, 90.0)
            daemon.send(messages.GoodbyeAck())
            await site.until("the job has ended", lambda: _ended(site.job(job_id)))
            return job_id

    job = site.job(asyncio.run(main()))
    assert job is None or job.state is JobState.CANCELLED


def test_a_drained_engines_job_ends_completed(site: Site) -> None:
    async def main() -> int:
        with FakeDaemon(site.state_dir, SERVER, {ME.public}) as daemon:
            job_id = site.submit("scavenge")
            await registered(daemon)
            daemon.send(messages.Drain("surplus"))
            await daemon.expect(messages.Goodbye, 90.0)
            daemon.send(messages.GoodbyeAck())
            await site.until("the job has ended", lambda: _ended(site.job(job_id)))
            return job_id

    job = site.job(asyncio.run(main()))
    assert job is None or job.state is JobState.COMPLETED


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("whom", "state", "restarts"), [("--batch", JobState.PENDING, 1), ("--full", JobState.FAILED, 0)]
)
def test_a_signal_by_hand_is_no_scheduler_s(
    slurm_sandbox: SlurmSandbox, tmp_path: Path, whom: str, state: JobState, restarts: int
) -> None:
    """To the script alone: the job puts itself back. To all of it: it has ended, by a signal. The engine is a stand-in."""
    engine, output, cluster = tmp_path / "python", tmp_path / "job.out", SlurmCluster(slurm_sandbox.env)
    engine.write_text("#!/bin/bash\ntrap 'exit 75' TERM\necho ready\nwhile :; do sleep 0.1; done\n")
    engine.chmod(0o755)
    text = script("slurm", python=str(engine))
    job_id = cluster.submit(
        JobSpec(
            "engine", "ours", "scavenge", text, gpus=1, nodelist=("node1",), output=str(output), time_s=600
        )
    )

    def now() -> Job:
        return next(job for job in cluster.view().jobs if job.job_id == job_id)

    wait_for("its engine works", lambda: output.exists() and "ready" in output.read_text())
    slurm_sandbox.run("scancel", "--signal=TERM", whom, str(job_id))
    wait_for(f"the job is {state}", lambda: _is(now(), state))
    assert now().restart_count == restarts
    assert state is JobState.PENDING or now().exit_code == 143


def _is(job: Job | None, state: JobState) -> bool:
    return job is not None and job.state is state and JobFlag.COMPLETING not in job.flags


def _ended(job: Job | None) -> bool:
    live = (JobState.PENDING, JobState.RUNNING, JobState.SUSPENDED)
    return job is None or (job.state not in live and JobFlag.COMPLETING not in job.flags)
