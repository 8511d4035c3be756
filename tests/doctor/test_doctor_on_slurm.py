"""`scavenger doctor` on a real Slurm: what it asks, what its test job finds, and that nothing of it stays."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from scavenger import toml
from scavenger.cli.main import app
from scavenger.cluster.layout import ClusterLayout, PartitionLayout
from scavenger.cluster.model import JobState, PreemptMode
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.config import DaemonConfig
from scavenger.doctor import collect, probe
from scavenger.doctor.facts import SiteRequirements
from scavenger.doctor.findings import Level, SiteFinding
from scavenger.doctor.rules import run
from scavenger.errors import ConfigError
from scavenger.protocol import keys
from tests.clusters import unfinished, wait_for
from tests.harvest.world import spec

pytestmark = pytest.mark.slurm


@pytest.fixture
def environment(slurm_sandbox: SlurmSandbox, monkeypatch: pytest.MonkeyPatch) -> SlurmSandbox:
    """This process's commands reach the private Slurm."""
    monkeypatch.setenv("SLURM_CONF", slurm_sandbox.env["SLURM_CONF"])
    monkeypatch.setenv("PATH", slurm_sandbox.env["PATH"])
    return slurm_sandbox


def config(state_dir: Path, **harvest: object) -> DaemonConfig:
    return DaemonConfig.model_validate(
        {"daemon": {"state_dir": state_dir}, "harvest": {"partition": "scavenge", **harvest}}
    )


def on_node(sandbox: SlurmSandbox, settings: DaemonConfig, *others: str) -> SiteFinding:
    """What the test job's finding is. `others`: ports that it is to reach too."""
    wanted = SiteRequirements("scavenge")
    facts = collect.gather(wanted, env=sandbox.env)
    said = probe.run(settings, sandbox.env, controllers=facts.controllers, others=others)
    facts = dataclasses.replace(facts, probe=said)
    return next(one for one in run.judge(facts, wanted) if one.check == "compute node")


def test_a_healthy_site_has_no_unknown_but_what_only_a_job_can_tell(slurm_sandbox: SlurmSandbox) -> None:
    wanted = SiteRequirements("reserved", user="me")
    found = {one.check: one.level for one in run.judge(collect.gather(wanted, env=slurm_sandbox.env), wanted)}
    assert [check for check, level in found.items() if level is Level.UNKNOWN] == ["compute node"]
    assert found["preemption"] is found["preempt mode"] is Level.PROBLEM, (
        "nobody preempts the partition reserved"
    )
    assert {
        found[check] for check in ("version", "clock", "partition limits", "job purge", "exclusive nodes")
    } == {Level.OK}
    pmix = "pmix" in slurm_sandbox.run("srun", "--mpi=list")  # Debian builds its Slurm 26.05 without
    assert found["mpi"] is (Level.OK if pmix else Level.WARNING)


def test_the_test_job_tells_of_its_node_and_leaves_nothing(
    slurm_sandbox: SlurmSandbox, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as answers, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        ports = [f"127.0.0.1:{one.getsockname()[1]}" for one in (answers, silent)]
        one = on_node(slurm_sandbox, config(tmp_path), *ports)
    assert one.level is Level.OK, one
    assert f"1 of 2 further ports answered, {ports[1]} refused" in one.observed
    assert list(tmp_path.iterdir()) == [], "its folder is gone"
    wait_for("its job has ended", lambda: not unfinished(SlurmCluster(slurm_sandbox.env).view()))


def test_a_node_without_our_python_or_way_to_our_port_is_a_problem_with_its_remedy(
    slurm_sandbox: SlurmSandbox, tmp_path: Path
) -> None:
    settings = config(tmp_path, python="/nowhere/python")
    settings = settings.model_copy(
        update={"daemon": settings.daemon.model_copy(update={"advertise": "127.0.0.2"})}
    )
    one = on_node(slurm_sandbox, settings)
    assert one.level is Level.PROBLEM
    assert "/nowhere/python" in one.observed
    assert "127.0.0.2" in one.observed
    assert "harvest.python" in one.remedy
    assert "daemon.advertise" in one.remedy
    assert "requeue:" not in one.observed


def test_a_python_without_what_the_engines_import_is_a_problem_with_the_module_s_name(
    slurm_sandbox: SlurmSandbox, tmp_path: Path
) -> None:
    """The test's Python, for which a module stands in the place of torch that cannot be imported."""
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: cannot open shared object file')\n")
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH="{tmp_path}:$PYTHONPATH" exec {sys.executable} "$@"\n', encoding="utf-8"
    )
    python.chmod(0o755)
    one = on_node(slurm_sandbox, config(tmp_path / "state", python=str(python)))
    assert one.level is Level.PROBLEM, one
    assert re.search(
        r"on node\d+, engine reference: \S+ cannot import torch: ImportError: libtorch", one.observed
    )
    assert "engine vllm: " in one.observed
    assert "scavenger[trainer]" in one.remedy
    assert "python:" not in one.observed, "the Python itself has our release"


def test_the_engines_python_is_looked_for_where_the_engine_runs(
    slurm_sandbox: SlurmSandbox, tmp_path: Path
) -> None:
    """What stands for the container here is a command with a mark in its environment."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$MARK" = "in it" ] && exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    outside = on_node(slurm_sandbox, config(tmp_path / "state", python=str(python)))
    assert outside.level is Level.PROBLEM, outside
    inside = config(tmp_path / "state", python=str(python), container="env 'MARK=in it'")
    assert on_node(slurm_sandbox, inside).level is Level.OK
    nowhere = on_node(slurm_sandbox, config(tmp_path / "state", container="/nowhere/apptainer exec x"))
    assert nowhere.level is Level.PROBLEM
    assert "/nowhere/apptainer" in nowhere.observed


def test_a_job_that_the_partition_refuses_is_told_with_slurm_s_words(
    slurm_sandbox: SlurmSandbox, tmp_path: Path
) -> None:
    one = on_node(slurm_sandbox, config(tmp_path, gpu_type="a100"))
    assert one.level is Level.PROBLEM
    assert "sbatch" in one.observed
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_json_and_ends_with_the_worst_finding_s_code(
    environment: SlurmSandbox, tmp_path: Path
) -> None:
    path = tmp_path / "scavenger.toml"
    path.write_text(
        toml.dumps(
            {
                "daemon": {"state_dir": tmp_path / "state"},
                "harvest": {"partition": "scavenge", "gpu_type": "a100"},
            }
        )
    )
    done = CliRunner().invoke(app, ["doctor", "--config", str(path), "--format", "json"])
    told = json.loads(done.output)
    assert done.exit_code == told["exit_code"] == 2
    assert {"check": "gpus", "level": "problem"}.items() <= next(
        one for one in told["findings"] if one["check"] == "gpus"
    ).items()
    assert not (tmp_path / "state").exists(), "it writes nothing"


def harmless() -> ClusterLayout:
    nodes = ("node1", "node2")
    low = PartitionLayout(name="scavenge", nodes=nodes, priority_tier=1, preempt_mode=PreemptMode.REQUEUE)
    return ClusterLayout(
        nodes=nodes, partitions=(PartitionLayout(name="normal", nodes=nodes, priority_tier=10), low)
    )


def test_a_daemon_that_its_nodes_could_not_reach_is_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The private Slurm's nodes are all on this host, where loopback does. One moves to another host, as far as scontrol says."""
    path, state = tmp_path / "scavenger.toml", tmp_path / "state"
    state.mkdir(mode=0o700)
    keys.write_keypair(keys.server_key_path(state), keys.generate())

    def checked(listen: str) -> Result:
        daemon = {"state_dir": state, "listen": listen}
        path.write_text(toml.dumps({"daemon": daemon, "harvest": {"partition": "scavenge"}}))
        return CliRunner().invoke(app, ["check-config", str(path)])

    with SlurmSandbox(harmless()) as sandbox:
        monkeypatch.setenv("SLURM_CONF", sandbox.env["SLURM_CONF"])
        monkeypatch.setenv("PATH", sandbox.env["PATH"])
        done = checked("127.0.0.1")
        assert done.exit_code == 0, done.output
        moved = r"s/^\(NodeName=node2 .*\)NodeAddr=[^ ]* NodeHostName=[^ ]*/\1NodeAddr=10.0.0.9 NodeHostName=gpu9/"
        real = shutil.which("scontrol", path=sandbox.env["PATH"])
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin/scontrol").write_text(f"#!/bin/sh\n{real} \"$@\" | sed '{moved}'\n")
        (tmp_path / "bin/scontrol").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{sandbox.env['PATH']}")
        done = checked("127.0.0.1")
        assert done.exit_code == 2
        assert "daemon.listen = '127.0.0.1' is each host's own address, and node node2 is not" in done.output
        assert 'listen = "0.0.0.0"' in done.output
        started = subprocess.run(
            [sys.executable, "-m", "scavenger", "daemon", "--config", str(path)],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert started.returncode == 2, "a restart would not help: the unit does not try again"
        assert "node node2 is not on this host" in started.stderr
        assert list(state.glob("*.sqlite3")) == [], "nothing began"
        assert checked("0.0.0.0").exit_code == 0


@pytest.mark.accounting
def test_a_partition_whose_preemption_suspends_is_refused_at_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, state = tmp_path / "scavenger.toml", tmp_path / "state"
    state.mkdir(mode=0o700)
    keys.write_keypair(keys.server_key_path(state), keys.generate())
    path.write_text(toml.dumps({"daemon": {"state_dir": state}, "harvest": {"partition": "scavenge"}}))
    suspends = {
        "settings": {"PreemptMode": "SUSPEND,GANG"},
        "partitions": [
            msgspec.structs.replace(part, preempt_mode=PreemptMode.SUSPEND)
            if part.name == "scavenge"
            else part
            for part in harmless().partitions
        ],
    }
    with SlurmSandbox(msgspec.structs.replace(harmless(), accounting=True, **suspends)) as sandbox:
        for command, asked in (
            ("check-config", [path]),
            ("daemon", ["--config", path]),
            ("doctor", ["--config", path]),
        ):
            done = subprocess.run(
                [sys.executable, "-m", "scavenger", command, *map(str, asked)],
                cwd=Path(__file__).parents[2],
                env={**os.environ, **sandbox.env},
                capture_output=True,
                text=True,
                timeout=90,
                check=False,
            )
            told = " ".join((done.stdout + done.stderr).split())
            assert done.returncode == 2, told
            assert re.search("keeps its GPU('s)? memory", told), told
        assert SlurmCluster(sandbox.env).jobs() == (), "nothing was submitted"


def test_a_host_without_slurm_is_told_so_in_every_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["doctor", "--partition", "scavenge"])
    assert done.exit_code == 1, done.output
    assert "there is no scontrol on this host's PATH" in " ".join(done.output.split())
    assert os.listdir(tmp_path) == []


def test_a_site_s_file_is_drafted_once_the_lines_that_it_asked_for_are_in_slurm_conf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`scavenger init --site` on a Slurm with one partition, that nobody may preempt, of the lowest tier by Slurm's defaults."""
    nodes = ("node1", "node2")
    normal = PartitionLayout(name="normal", nodes=nodes, priority_tier=1)
    with SlurmSandbox(ClusterLayout(nodes=nodes, partitions=(normal,))) as sandbox:
        conf = Path(sandbox.env["SLURM_CONF"])
        monkeypatch.setenv("SLURM_CONF", str(conf))
        monkeypatch.setenv("PATH", sandbox.env["PATH"])
        refused = CliRunner().invoke(app, ["init", str(tmp_path / "site"), "--site"])
        assert isinstance(refused.exception, ConfigError)
        assert not (tmp_path / "site").exists(), "nothing is written before something fits"
        lines = [line.strip() for line in refused.exception.remedy.splitlines()[1:]]
        assert [line.split()[0] for line in lines] == ["PartitionName=scavenge"]
        with conf.open("a") as file:
            file.write("\n".join(lines) + "\n")
        sandbox.run("scontrol", "reconfigure")
        wait_for(
            "it has the partition",
            lambda: "PartitionName=scavenge" in sandbox.run("scontrol", "show", "partition"),
        )

        done = CliRunner().invoke(app, ["init", str(tmp_path / "site"), "--site"])
        assert done.exit_code == 0, done.exception
        path = tmp_path / "site/scavenger.toml"
        read = DaemonConfig.model_validate(tomllib.loads(path.read_text()))
        assert (read.harvest.partition, read.harvest.cpus_per_engine) == ("scavenge", 8)
        assert read.daemon.public_dir == tmp_path / "site/public"
        assert "# PriorityTier 0, below every other partition" in path.read_text()
        assert "owners.groups or owners.users: who may train" in done.output
        assert CliRunner().invoke(app, ["check-config", str(path)]).exit_code == 0
        found = run.judge(
            collect.gather(SiteRequirements("scavenge", cpus=8)), SiteRequirements("scavenge", cpus=8)
        )
        assert [one for one in found if one.level is Level.PROBLEM] == []
        view = SlurmCluster(sandbox.env)
        ours = view.submit(spec("scavenge", gpus=4, nodelist=("node1",), workdir="/tmp"))
        wait_for("it runs", lambda: ours in running(view))
        theirs = view.submit(spec("normal", gpus=4, nodelist=("node1",), workdir="/tmp"))
        wait_for("the other users' job has its GPUs", lambda: theirs in running(view), 60.0)


def running(cluster: SlurmCluster) -> set[int]:
    return {job.job_id for job in cluster.jobs() if job.state is JobState.RUNNING}
