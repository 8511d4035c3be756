"""`scavenger doctor` as a user sees it: where no Slurm answers, and with the local backend."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from scavenger import toml
from scavenger.cli import main
from scavenger.cluster.local.client import LocalServer
from scavenger.doctor import findings
from scavenger.doctor.rules import run
from tests.doctor.site import WANTED, site

#: Whatever the terminal: nothing of a failure is told more often.
ONCE = 1


def doctor(path: Path, *more: str) -> tuple[int, str]:
    done = CliRunner().invoke(main.app, ["doctor", "--config", str(path), *more])
    return done.exit_code, done.output


def written(folder: Path, partition: str = "scavenge", **cluster: object) -> Path:
    path = folder / "scavenger.toml"
    document: dict[str, Any] = {"daemon": {"state_dir": folder}, "harvest": {"partition": partition}}
    document |= {"cluster": cluster} if cluster else {}
    path.write_text(toml.dumps(document))
    return path


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's commands are there, say which controller does not answer, and note that they were asked."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("scontrol", "sinfo", "squeue", "srun", "sacctmgr", "sbatch"):
        program = programs / name
        text = f'#!/bin/sh\necho "{name} $*" >>"{tmp_path}/asked"\necho "slurm_load: Unable to contact slurm controller" >&2\nexit 1\n'
        program.write_text(text)
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return tmp_path / "asked"


def test_a_slurm_that_does_not_answer_is_one_line_with_a_remedy_and_is_asked_once(
    broken: Path, tmp_path: Path
) -> None:
    code, observed = doctor(written(tmp_path), "--submit")
    assert code == 1
    assert observed.count("Unable to contact") == ONCE, observed
    assert observed.count("scontrol ping") == ONCE
    flat = " ".join(observed.split())
    assert f"not checked: {', '.join(name for name, _ in run.RULES)}" in flat
    assert len(observed.splitlines()) <= 10
    assert broken.read_text().splitlines() == ["scontrol show config"], (
        "each further command would take its deadline, too"
    )
    code, observed = doctor(written(tmp_path), "--format", "json")
    told = json.loads(observed)["findings"]
    assert [one["check"] for one in told] == [name for name, _ in run.RULES], "programs get every check"
    assert len({one["missing"] for one in told}) == 1


def test_a_host_without_slurm_s_commands_is_told_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, observed = doctor(written(tmp_path))
    assert (code, observed.count("PATH"), observed.count("no scontrol")) == (1, 1, 1), observed


def test_checks_that_lack_different_things_are_told_apart() -> None:
    told = findings.lines(run.judge(site({"JobRequeue": None, "MinJobAge": None}), WANTED))
    assert not any("not checked" in line for line in told if "compute" not in line), told
    assert sum("no JobRequeue" in line for line in told) == sum("no MinJobAge" in line for line in told) == 1


@pytest.fixture
def local_server(tmp_path: Path) -> Iterator[LocalServer]:
    """Of the demo's layout: one harvest partition."""
    with LocalServer(tmp_path / "local") as server:
        yield server


def test_the_local_backend_is_asked_what_it_can_answer_and_slurm_nothing(
    broken: Path, tmp_path: Path, local_server: LocalServer
) -> None:
    path = written(tmp_path, backend="local", local_dir=local_server.dir)
    code, observed = doctor(path, "--format", "json")
    told = json.loads(observed)["findings"]
    assert (code, [one["check"] for one in told]) == (
        0,
        ["local backend", "preemption", "gpus", "partition limits"],
    ), told
    assert not broken.exists(), "no Slurm command was run"
    code, observed = doctor(written(tmp_path, "reserved", local_dir=local_server.dir))
    assert (code, "problem  preemption" in observed) == (2, True), observed
    code, observed = doctor(written(tmp_path, "scavengers", local_dir=local_server.dir))
    assert (code, "no such partition" in " ".join(observed.split())) == (2, True), observed
    assert "leave --submit out" in str(
        CliRunner().invoke(main.app, ["doctor", "--config", str(path), "--submit"]).exception
    )


def test_a_local_backend_that_nobody_serves_is_a_problem_with_its_remedy(tmp_path: Path) -> None:
    code, observed = doctor(written(tmp_path, backend="local", local_dir=tmp_path / "nobody"))
    assert (code, observed.startswith("problem  local backend"), "->" in observed) == (2, True, True), (
        observed
    )
