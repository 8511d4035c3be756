"""`scavenger doctor` on a real Slurm: what it asks, what its test job finds, and that nothing of it stays."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scavenger import toml
from scavenger.cli.main import app
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.config import DaemonConfig
from scavenger.doctor import collect, probe
from scavenger.doctor.facts import Wanted
from scavenger.doctor.findings import Finding, Level
from scavenger.doctor.rules import run
from tests.clusters import unfinished, wait_for

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


def on_node(sandbox: SlurmSandbox, settings: DaemonConfig) -> Finding:
    """What the test job's finding is."""
    wanted = Wanted("scavenge")
    facts = dataclasses.replace(
        collect.gather(wanted, env=sandbox.env), probe=probe.run(settings, sandbox.env)
    )
    return next(one for one in run.judge(facts, wanted) if one.check == "compute node")


def test_a_healthy_site_has_no_unknown_but_what_only_a_job_can_tell(slurm_sandbox: SlurmSandbox) -> None:
    wanted = Wanted("reserved", user="me")
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
    one = on_node(slurm_sandbox, config(tmp_path))
    assert one.level is Level.OK, one
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


def test_a_host_without_slurm_is_told_so_in_every_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["doctor", "--partition", "scavenge"])
    assert done.exit_code == 1, done.output
    assert "there is no scontrol on this host's PATH" in " ".join(done.output.split())
    assert os.listdir(tmp_path) == []
