"""What cannot work is refused at the command line: one clear text with its remedy, no traceback, an exit code, and nothing started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import structlog

from scavenger import toml
from scavenger.cli import main
from scavenger.cluster.local.client import LocalServer
from scavenger.protocol import keys
from scavenger.protocol.worker.events import EXIT_CANNOT_START
from trainer import launch

BAD_CONFIG, REFUSED = 2, 1


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """The daemon command configures the log for its process, which here is the tests'."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    keys.init_state(tmp_path / "state", "owner")
    return tmp_path / "state"


def _daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **sections: Mapping[str, Any]) -> int:
    """`scavenger daemon` with this scavenger.toml; its exit code."""
    path = tmp_path / "scavenger.toml"
    path.write_text(toml.dumps({"daemon": {"state_dir": tmp_path / "state"}, **sections}))
    monkeypatch.setattr(sys, "argv", ["scavenger", "daemon", "--config", str(path)])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return int(ended.value.code or 0)


def _said(capsys: pytest.CaptureFixture[str], *texts: str) -> None:
    error = capsys.readouterr().err
    assert "Traceback" not in error
    for text in texts:
        assert text in error


def test_no_slurm_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _daemon(tmp_path, monkeypatch, cluster={"backend": "slurm"}) == BAD_CONFIG
    _said(capsys, "no Slurm on this host: sbatch is not on PATH", "remedy:", 'backend = "local"')


@pytest.mark.parametrize(
    ("partition", "said"),
    [
        ("scavange", ("has no such partition", "it has: normal, reserved, scavenge, scavenge0")),
        ("normal", ("is not preemptible (PreemptMode=OFF)", "would block other users' jobs", "remedy:")),
        ("scavenge", ("PriorityTier=1, which is not below that of scavenge0",)),
    ],
)
def test_a_partition_whose_jobs_could_be_in_the_way(
    partition: str,
    said: tuple[str, ...],
    tmp_path: Path,
    local_server: LocalServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = {"backend": "local", "local_dir": local_server.dir}
    assert _daemon(tmp_path, monkeypatch, cluster=cluster, harvest={"partition": partition}) == BAD_CONFIG
    _said(capsys, f"harvest.partition = '{partition}'", *said)
    assert not (tmp_path / "state" / "ledger.sqlite3").exists()


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"observe_seconds": 5}, "unknown key 'cluster.observe_seconds'"),
        ({"poll_interval_s": -5}, "cluster.poll_interval_s = -5: Input should be greater than 0"),
        (
            {"backend": "kubernetes"},
            "cluster.backend = 'kubernetes': Input should be 'auto', 'slurm', 'pyslurm' or 'local'",
        ),
    ],
)
def test_a_key_or_value_of_scavenger_toml(
    section: dict[str, Any],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _daemon(tmp_path, monkeypatch, cluster=section) == BAD_CONFIG
    _said(capsys, f"{tmp_path / 'scavenger.toml'}: {said}", "docs/config.md")


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"step": 5}, "unknown key 'run.step'"),
        ({"steps": -1}, "run.steps = -1: Input should be greater than or equal to 0"),
        ({"name": "../up"}, "run.name = '../up': String should match pattern"),
    ],
)
def test_a_key_or_value_of_run_toml(
    section: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    run = {"name": "r", "steps": 1, "state_dir": "state", "out_dir": "out", **section}
    path.write_text(
        toml.dumps({"run": run, "model": {"path": "m", "context_length": 32}, "sampling": {"max_tokens": 8}})
    )
    assert launch.main([str(path)]) == BAD_CONFIG
    _said(capsys, f"{path}: {said}")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda key: key.chmod(0o644), ("can be read by others", "chmod 600")),
        (lambda key: key.unlink(), ("does not exist", "scavenger init")),
        (lambda key: key.write_bytes(b"{}"), ("is not a key file", "scavenger init")),
    ],
)
def test_a_key_file_that_is_readable_by_others_missing_or_none(
    spoil: Any,
    said: tuple[str, ...],
    tmp_path: Path,
    state_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The daemon's, and a worker's."""
    cluster = {"backend": "local", "local_dir": tmp_path}
    for key in (keys.server_key_path(state_dir), keys.owner_key_path(state_dir)):
        spoil(key)
    assert _daemon(tmp_path, monkeypatch, cluster=cluster, harvest={"enabled": False}) == BAD_CONFIG
    _said(capsys, str(keys.server_key_path(state_dir)), *said)

    key = keys.owner_key_path(state_dir)
    argv = [
        sys.executable,
        "-m",
        "rollout",
        "--state-dir",
        str(state_dir),
        "--key",
        str(key),
        "--kind",
        "reserved",
        "--run",
        "r",
    ]
    worker = subprocess.run(
        argv, capture_output=True, text=True, timeout=60, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert worker.returncode == EXIT_CANNOT_START, (
        "no refusal of the daemon's: it may be so on this node alone"
    )
    assert f"rollout: {key}" in worker.stderr
    assert "Traceback" not in worker.stderr


def test_a_ledger_of_a_newer_release(
    tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sqlite3

    with sqlite3.connect(state_dir / "ledger.sqlite3") as connection:
        connection.executescript(
            "CREATE TABLE alembic_version (version_num TEXT); INSERT INTO alembic_version VALUES ('9999')"
        )
    connection.close()
    assert (
        _daemon(
            tmp_path,
            monkeypatch,
            cluster={"backend": "local", "local_dir": tmp_path},
            harvest={"enabled": False},
        )
        == BAD_CONFIG
    )
    _said(capsys, "revision 9999, which this release does not know", "a newer release has upgraded it")


def test_a_report_of_a_ledger_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scavenger.toml"
    path.write_text(toml.dumps({"daemon": {"state_dir": tmp_path / "nowhere"}}))
    for command in (["ledger", "check"], ["ledger", "report", "runs"], ["samples", "r", "--step", "1"]):
        monkeypatch.setattr(sys, "argv", ["scavenger", *command, "--config", str(path)])
        with pytest.raises(SystemExit) as ended:
            main.main()
        assert ended.value.code == REFUSED
        _said(capsys, "ledger.sqlite3")
        assert not (tmp_path / "nowhere").exists()
