"""`scavenger doctor --harvest-one`: each stage of an engine's life, what it says where one fails, and that nothing stays."""

from __future__ import annotations

import errno
import getpass
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from scavenger import toml
from scavenger.cli.main import app
from scavenger.cluster.layout import ClusterLayout, PartitionLayout
from scavenger.cluster.local.client import LocalCluster, LocalServer
from scavenger.cluster.model import JobSpec, PreemptMode
from scavenger.cluster.proxy import server
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.config import DaemonConfig
from scavenger.doctor import canary
from scavenger.errors import SubmitUnknown
from scavenger.harvest.limits import drain
from tests.clusters import unfinished, wait_for
from tests.harvest.world import spec
from tests.proxies import served

pytest.importorskip("torch", reason="the reference engine needs the [trainer] extra")
STAGES = ["checked", "submitted", "started", "connected", "loaded", "generated", "drained", "cleaned up"]


def harmless() -> ClusterLayout:
    nodes = ("node1", "node2")
    low = PartitionLayout(name="scavenge", nodes=nodes, priority_tier=1, preempt_mode=PreemptMode.REQUEUE)
    return ClusterLayout(
        nodes=nodes,
        gpus=1,
        kill_wait_s=1.0,
        partitions=(PartitionLayout(name="normal", nodes=nodes, priority_tier=10), low),
    )


@pytest.fixture(scope="module")
def sandbox() -> Iterator[SlurmSandbox]:
    with SlurmSandbox(harmless()) as made:
        yield made


def ask(
    folder: Path,
    *more: str,
    daemon: dict[str, Any] | None = None,
    cluster: dict[str, Any] | None = None,
    **harvest: Any,
) -> Result:
    path, state = folder / "scavenger.toml", folder / "state"
    written(folder, daemon=daemon, cluster=cluster, **harvest)
    done = CliRunner().invoke(
        app, ["doctor", "--config", str(path), "--harvest-one", "--format", "json", *more]
    )
    assert list(state.iterdir()) == [], "its folder is gone"
    return done


def written(
    folder: Path,
    *,
    daemon: dict[str, Any] | None = None,
    cluster: dict[str, Any] | None = None,
    **harvest: Any,
) -> Path:
    path, state = folder / "scavenger.toml", folder / "state"
    state.mkdir(mode=0o700, exist_ok=True)
    sections = {
        "daemon": {"state_dir": state, **(daemon or {})},
        "cluster": cluster or {},
        "harvest": {"partition": "scavenge", **harvest},
    }
    path.write_text(toml.dumps({name: keys for name, keys in sections.items() if keys}))
    return path


def told(done: Result) -> dict[str, dict[str, str]]:
    text = done.output[done.output.index('{\n  "exit_code"') :]
    return {one["check"]: one for one in json.loads(text)["findings"]}


def test_without_slurm_an_engine_is_harvested_from_the_local_backend(tmp_path: Path) -> None:
    with LocalServer(tmp_path / "local", harmless()):
        done = ask(tmp_path, cluster={"backend": "local", "local_dir": tmp_path / "local"})
        assert done.exit_code == 0, done.output
        found = told(done)
        assert list(found) == STAGES
        assert {one["level"] for one in found.values()} == {"ok"}
        assert "8 tokens" in found["generated"]["observed"]
        cluster = LocalCluster(tmp_path / "local")
        assert not unfinished(cluster.view())
        cluster.close()


def test_a_job_template_that_ends_at_once_fails_at_the_stage_that_it_reached(tmp_path: Path) -> None:
    template = tmp_path / "own.j2"
    template.write_text("#!/bin/bash\necho 'rollout: no such module' >&2\nexit 72\n")
    with LocalServer(tmp_path / "local", harmless()):
        done = ask(
            tmp_path, cluster={"backend": "local", "local_dir": tmp_path / "local"}, job_template=template
        )
    assert done.exit_code == 2
    stage, last = list(told(done).values())[-2:]
    assert stage["check"] in ("started", "connected")
    assert "exit code 72: what it needs is missing" in stage["observed"]
    assert "its log ends: no such module" in stage["observed"]
    assert "--submit" in stage["remedy"]
    assert (last["check"], last["level"]) == ("cleaned up", "ok")


def test_an_engine_that_finds_no_daemon_is_told_with_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canary, "CONNECT_S", 4.0)
    template = tmp_path / "own.j2"
    template.write_text("#!/bin/bash\nexec sleep 60\n")
    with LocalServer(tmp_path / "local", harmless()):
        done = ask(
            tmp_path,
            daemon={"listen": "0.0.0.0", "advertise": "nowhere.invalid"},
            cluster={"backend": "local", "local_dir": tmp_path / "local"},
            job_template=template,
        )
        assert done.exit_code == 2
        connected = told(done)["connected"]
        assert "its engine did not reach tcp://nowhere.invalid:" in connected["observed"]
        assert "daemon.advertise" in connected["remedy"]
        cluster = LocalCluster(tmp_path / "local")
        wait_for("its job is cancelled", lambda: not unfinished(cluster.view()))
        cluster.close()


def test_a_partition_that_would_be_in_others_way_is_refused_though_nothing_is_harvested_yet(
    tmp_path: Path,
) -> None:
    with LocalServer(tmp_path / "local", harmless()):
        done = ask(
            tmp_path,
            cluster={"backend": "local", "local_dir": tmp_path / "local"},
            partition="normal",
            enabled=False,
        )
        cluster = LocalCluster(tmp_path / "local")
        assert not cluster.jobs(), "nothing was submitted"
        cluster.close()
    assert done.exit_code == 2
    assert "not preemptible" in told(done)["checked"]["observed"]


def test_while_harvesting_is_stopped_no_engine_is_harvested(tmp_path: Path) -> None:
    (tmp_path / "stop").write_text("drain power cut")
    with LocalServer(tmp_path / "local", harmless()):
        done = ask(
            tmp_path,
            cluster={"backend": "local", "local_dir": tmp_path / "local"},
            enabled=False,
            stop_file=tmp_path / "stop",
        )
        cluster = LocalCluster(tmp_path / "local")
        assert not cluster.jobs(), "nothing was submitted"
        cluster.close()
    assert done.exit_code == 1, "nothing is wrong with the site"
    assert "the stop file: power cut" in told(done)["checked"]["observed"]


NOW = datetime(2026, 11, 24, 12, tzinfo=UTC)


def dark(begins: datetime) -> dict[str, Any]:
    return {"blackout": [{"start": begins, "end": begins + timedelta(hours=1), "reason": "exams"}]}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, ""),
        (dark(NOW - timedelta(minutes=30)), "a blackout is on"),
        (dark(NOW + timedelta(minutes=1)), "nothing may be harvested now: a blackout begins in 60 s"),
        (dark(NOW + timedelta(minutes=14)), "a blackout begins in 840 s"),
        (dark(NOW + timedelta(minutes=20)), ""),
        ({"max_engines": 0}, "harvest.max_engines is 0 now"),
        ({"schedule": [{"hours": "8-18", "max_gpus": 0}]}, "harvest.max_gpus is 0 now"),
        ({"schedule": [{"hours": "18-8", "max_gpus": 0}]}, ""),
    ],
)
def test_what_keeps_a_daemon_from_harvesting_keeps_a_canary_too(
    tmp_path: Path, keys: dict[str, Any], said: str
) -> None:
    sections = {"daemon": {"state_dir": tmp_path}, "harvest": {"enabled": False, **keys}}
    found = canary.stopped(DaemonConfig.model_validate(sections), NOW.timestamp())
    assert said in found
    assert bool(said) == bool(found)


def test_a_stop_that_cannot_be_read_is_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Path, **_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    config = DaemonConfig.model_validate({"daemon": {"state_dir": tmp_path}})
    with monkeypatch.context() as broken:
        broken.setattr(Path, "stat", fails)
        assert "is not known" in canary.stopped(config, NOW.timestamp())


def test_what_scavenger_drain_stopped_is_stopped(tmp_path: Path) -> None:
    config = DaemonConfig.model_validate({"daemon": {"state_dir": tmp_path}})
    assert canary.stopped(config, 0.0) == ""
    drain(tmp_path, "three at night", at_once=False)
    assert "scavenger drain: three at night" in canary.stopped(config, 0.0)


# ---------------------------------------------------------------- what it leaves, and what it takes


SLEEPS = "#!/bin/bash\nexec sleep 60\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_canary_that_is_told_to_end_takes_its_job_and_folder_with_it(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "own.j2").write_text(SLEEPS)
    with LocalServer(tmp_path / "local", harmless()):
        path = written(
            tmp_path,
            cluster={"backend": "local", "local_dir": tmp_path / "local"},
            job_template=tmp_path / "own.j2",
        )
        argv = [sys.executable, "-m", "scavenger", "doctor", "--config", str(path), "--harvest-one"]
        asked = subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # under nohup it would be ignored
        )
        cluster = LocalCluster(tmp_path / "local")
        try:
            wait_for("its job runs", lambda: any(job.has_gpus_allocated for job in cluster.jobs()))
            asked.send_signal(number)
            said, _ = asked.communicate(timeout=30)
        finally:
            asked.kill()
            asked.wait()
        assert "job and folder are gone" in said
        assert asked.returncode > 0, "it did not die of the signal"
        wait_for("its job is cancelled", lambda: not unfinished(cluster.view()))
        cluster.close()
    assert list((tmp_path / "state").iterdir()) == []


@pytest.mark.parametrize("reached", [True, False])
def test_a_job_whose_submission_got_no_answer_is_looked_for_and_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reached: bool
) -> None:
    (tmp_path / "own.j2").write_text(SLEEPS)
    submit, names = LocalCluster.submit, []

    def lost(self: LocalCluster, spec: JobSpec) -> int:
        names.append(spec.name)
        if reached:
            submit(self, spec)
        raise SubmitUnknown("sbatch gave no answer within 20 s")

    monkeypatch.setattr(LocalCluster, "submit", lost)
    monkeypatch.setattr(canary, "FIND_S", 0.5)
    with LocalServer(tmp_path / "local", harmless()):
        done = ask(
            tmp_path,
            cluster={"backend": "local", "local_dir": tmp_path / "local"},
            job_template=tmp_path / "own.j2",
        )
        cluster = LocalCluster(tmp_path / "local")
        assert len(cluster.jobs()) == (1 if reached else 0)
        wait_for("it is cancelled", lambda: not unfinished(cluster.view()))
        cluster.close()
    found = told(done)
    assert "sbatch gave no answer" in found["submitted"]["observed"]
    last = found["cleaned up"]
    assert last["level"] == ("ok" if reached else "warning")
    if not reached:
        assert f"perhaps job {names[0]}" in last["observed"]
        assert f"scancel --name={names[0]}" in last["remedy"]


def test_folders_of_canaries_that_were_killed_are_removed_by_the_next(tmp_path: Path) -> None:
    now = time.time()
    for name, age_s in (("canary-0123abcd", 3600.0), ("canary-00000000", 60.0), ("canary-of-mine", 3600.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "key").touch()
        os.utime(tmp_path / name, (now - age_s, now - age_s))
    canary.sweep(tmp_path, now)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["canary-00000000", "canary-of-mine"]
    canary.sweep(tmp_path / "nowhere", now)
    old = tmp_path / "state" / "canary-89abcdef"
    old.mkdir(parents=True)
    os.utime(old, (now - 3600.0, now - 3600.0))
    with LocalServer(tmp_path / "local", harmless()):
        ask(
            tmp_path, cluster={"backend": "local", "local_dir": tmp_path / "local"}, partition="normal"
        )  # it looks that the folder is gone


def test_the_daemon_s_port_stays_free_unless_the_canary_is_to_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canary, "CONNECT_S", 1.0)
    (tmp_path / "own.j2").write_text(SLEEPS)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with LocalServer(tmp_path / "local", harmless()):

        def tried(*more: str) -> dict[str, dict[str, str]]:
            return told(
                ask(
                    tmp_path,
                    *more,
                    daemon={"port": port},
                    cluster={"backend": "local", "local_dir": tmp_path / "local"},
                    job_template=tmp_path / "own.j2",
                )
            )

        found = tried()
        assert f":{port}" not in found["checked"]["observed"]
        assert f"daemon.port = {port} alone? Then add --daemon-port" in found["connected"]["remedy"]
        found = tried("--daemon-port")
        assert f"tcp://127.0.0.1:{port}" in found["checked"]["observed"]
        assert "--daemon-port" not in found["connected"]["remedy"]
        with socket.create_server(("127.0.0.1", port)):
            found = tried("--daemon-port")
        assert f"cannot listen on 127.0.0.1 port {port}" in found["checked"]["observed"]
        assert "leave --daemon-port out" in found["checked"]["remedy"]


@pytest.mark.slurm
def test_on_slurm_an_engine_is_harvested_beside_what_holds_the_daemon_s_port(
    sandbox: SlurmSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", sandbox.env["SLURM_CONF"])
    monkeypatch.setenv("PATH", sandbox.env["PATH"])
    with socket.create_server(("127.0.0.1", 0)) as daemon:
        done = ask(tmp_path, daemon={"port": daemon.getsockname()[1]})
    assert done.exit_code == 0, done.output
    found = told(done)
    assert list(found) == STAGES
    assert "on node" in found["started"]["observed"]
    wait_for("its job has ended", lambda: not unfinished(SlurmCluster(sandbox.env).view()))


@pytest.mark.slurm
def test_on_slurm_an_engine_is_harvested_by_the_process_of_the_engines_user(
    sandbox: SlurmSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That they are two users is `tests/cluster/test_proxy.py`'s: there no engine can be imported."""
    monkeypatch.setenv("SLURM_CONF", sandbox.env["SLURM_CONF"])
    monkeypatch.setenv("PATH", sandbox.env["PATH"])
    engines, public, hands = tmp_path / "engines", tmp_path / "public", SlurmCluster(sandbox.env)
    server.prepare(engines)
    role = server.SubmitRole(hands, engines, server.EngineJobRules(engines, frozenset({"scavenge"})).check)
    with tempfile.TemporaryDirectory(prefix="scv-") as short, served(Path(short) / "submit", role) as at:
        cluster = {"submit_socket": at, "engines_user": getpass.getuser(), "engines_dir": engines}
        found = told(ask(tmp_path, daemon={"public_dir": public}, cluster=cluster))
        assert "start the daemon once" in found["checked"]["remedy"]
        public.mkdir()
        done = ask(tmp_path, daemon={"public_dir": public}, cluster=cluster)
    assert done.exit_code == 0, done.output
    assert list(told(done)) == STAGES
    assert list(public.iterdir()) == [], "its folder is gone"
    assert sorted(path.parent.name for path in engines.rglob("scv-*")) == ["logs", "workers"]
    wait_for("its job has ended", lambda: not unfinished(SlurmCluster(sandbox.env).view()))


@pytest.mark.slurm
def test_on_slurm_a_python_without_torch_fails_where_the_engine_is_built(
    sandbox: SlurmSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", sandbox.env["SLURM_CONF"])
    monkeypatch.setenv("PATH", sandbox.env["PATH"])
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: cannot open shared object file')\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = ask(tmp_path, python=str(python))
    assert done.exit_code == 2
    loaded = told(done)["loaded"]
    assert "its engine could not be built" in loaded["observed"]
    assert "libtorch.so" in loaded["observed"]


@pytest.mark.slurm
def test_where_every_gpu_is_busy_nothing_is_said_against_the_site(
    sandbox: SlurmSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", sandbox.env["SLURM_CONF"])
    monkeypatch.setenv("PATH", sandbox.env["PATH"])
    monkeypatch.setattr(canary, "START_S", 6.0)
    cluster = SlurmCluster(sandbox.env)
    theirs = [
        cluster.submit(spec("normal", gpus=1, nodelist=(name,), workdir="/tmp"))
        for name in ("node1", "node2")
    ]
    wait_for(
        "others have all",
        lambda: len([job for job in cluster.jobs() if job.nodes and job.has_gpus_allocated]) == 2,
    )
    done = ask(tmp_path)
    cluster.cancel(tuple(theirs))
    assert done.exit_code == 1, done.output
    assert "found no idle GPU within 6 s" in told(done)["started"]["observed"]
    wait_for("all is over", lambda: not unfinished(cluster.view()))
