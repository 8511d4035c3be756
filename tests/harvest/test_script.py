"""The job of one engine: named after its intent, quoted, with no secret in it."""

from __future__ import annotations

import subprocess
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from scavenger import keys
from scavenger.config import ClusterSection, DaemonConfig, DaemonSection, HarvestSection
from scavenger.errors import ConfigError
from scavenger.harvest.policy import Submit
from scavenger.harvest.script import job_spec, read_template

INTENT = "scv-000000000000000a"
SUBMIT = Submit(1, "my run; touch oops", "scavenge", 2, "because", exclude=("node3",))


def config(state_dir: Path) -> DaemonConfig:
    harvest = HarvestSection(cpus_per_engine=3, account="guests", qos="scavenger", time_limit_s=600)
    return DaemonConfig(daemon=DaemonSection(state_dir=state_dir), cluster=ClusterSection(local_dir=state_dir / "c"), harvest=harvest)


@pytest.mark.parametrize("backend", ["slurm", "local"])
def test_the_shipped_template_makes_a_valid_script_without_secrets(tmp_path: Path, backend: str) -> None:
    state_dir = tmp_path / "it's $HOME"
    pair = keys.generate("run", INTENT)
    keys.write_keypair(keys.worker_key_path(state_dir, INTENT), pair)
    spec = job_spec(config(state_dir), read_template(None), backend, "feedbeef", INTENT, SUBMIT)
    done = subprocess.run(["bash", "-n"], input=spec.script, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert pair.secret not in repr(astuple(spec))
    assert "tcp://" not in spec.script
    assert "'my run; touch oops'" in spec.script
    assert ("srun" in spec.script) == (backend == "slurm")


def test_the_intent_is_in_name_and_comment_and_the_limits_are_the_configured_ones(tmp_path: Path) -> None:
    spec = job_spec(config(tmp_path), read_template(None), "slurm", "feedbeef", INTENT, SUBMIT)
    assert (spec.name, spec.comment) == (INTENT, f"scavenger:feedbeef:{INTENT}")
    assert (spec.partition, spec.gpus, spec.cpus_per_task, spec.exclude) == ("scavenge", 2, 3, ("node3",))
    assert (spec.requeue, spec.account, spec.qos, spec.time_s) == (True, "guests", "scavenger", 600)


@pytest.mark.parametrize("backend", ["slurm", "local"])
@pytest.mark.parametrize("engine", ["reference", "vllm"])
def test_the_job_imports_the_run_s_engine(tmp_path: Path, backend: str, engine: str) -> None:
    spec = job_spec(config(tmp_path), read_template(None), backend, "feedbeef", INTENT, replace(SUBMIT, engine=engine))
    (worker,) = [line for line in spec.script.splitlines() if line.startswith("worker=")]
    assert worker.removesuffix(")").split()[-2:] == ["--engine", engine]


def test_a_template_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="job_template"):
        read_template(tmp_path / "nothing.j2")
