"""The run's own daemon: it serves before the ranks start, is started again when it ends, and never outlives the job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from scavenger import config as configs
from scavenger import toml
from scavenger.errors import ConfigError, Refused
from scavenger.protocol import keys
from trainer import embedded
from trainer.embedded import EmbeddedDaemon

ROOT = Path(__file__).resolve().parents[2]


def run_toml(folder: Path, state_dir: str = "state", **daemon: object) -> Path:
    keys.init_state(folder / "state", "ada")
    document: dict[str, Any] = {
        "daemon": {"state_dir": folder / state_dir},
        "cluster": {"backend": "local", "local_dir": folder / "cluster"},
        "harvest": {"enabled": False},
    }
    (folder / "scavenger.toml").write_text(toml.dumps(document))
    path = folder / "run.toml"
    run: dict[str, Any] = {
        "run": {"name": "r", "steps": 1, "state_dir": "state", "out_dir": "out"},
        "daemon": {"embedded": True, **daemon},
        "model": {"path": "m", "context_length": 24},
        "sampling": {"max_tokens": 8},
    }
    path.write_text(toml.dumps(run))
    return path


def test_its_configuration_is_the_one_beside_the_run_s_and_must_name_the_run_s_state_directory(
    tmp_path: Path,
) -> None:
    config = configs.read_run(run_toml(tmp_path))
    assert config.daemon.config == tmp_path / "scavenger.toml"
    embedded.check(config)
    with pytest.raises(ConfigError, match="name one directory in both"):
        embedded.check(configs.read_run(run_toml(tmp_path, state_dir="elsewhere")))


def stand_in(folder: Path) -> Path:
    """For Python: the real one for `-m scavenger`, a sleeper for ranks and engines."""
    fake = folder / "python"
    fake.write_text(
        f'#!/bin/sh\ncase "$2" in scavenger) echo $$ > {folder}/daemon.pid; exec {sys.executable} "$@";; esac\n'
        f"echo $$ > {folder}/$2.new; mv {folder}/$2.new {folder}/$2; exec sleep 60\n"
    )
    fake.chmod(0o755)
    return fake


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def until(what: str, condition: object, timeout_s: float = 150.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)  # between two looks at the condition


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_serves_before_the_ranks_start_and_ends_with_the_job(
    number: signal.Signals, tmp_path: Path
) -> None:
    path = run_toml(tmp_path)
    environ = dict(os.environ) | {
        "SCAVENGER_PYTHON": str(stand_in(tmp_path)),
        "SCAVENGER_BACKEND": "local",
        "PYTHONPATH": str(ROOT),
    }
    environ.pop("SCAVENGER_RANKS", None)
    job = subprocess.Popen([sys.executable, "-m", "trainer.launch", str(path)], env=environ)
    try:
        until("a rank runs", (tmp_path / "trainer").exists)
        daemon = keys.read_rendezvous(tmp_path / "state").pid
        assert daemon == int((tmp_path / "daemon.pid").read_text())
        if number is signal.SIGTERM:  # and it is started again when it ends
            os.kill(daemon, signal.SIGKILL)
            until("another daemon serves", lambda: keys.read_rendezvous(tmp_path / "state").pid != daemon)
            daemon = keys.read_rendezvous(tmp_path / "state").pid
        job.send_signal(number)
        assert job.wait(100) in (143, -9)
        until("the daemon is gone", lambda: not running(daemon))
    finally:
        if job.poll() is None:
            job.kill()
            job.wait()
    left_a_copy = (tmp_path / "state/ledger-carried.sqlite3").exists()
    assert left_a_copy, "it ended well, also when its launcher was killed"


def test_one_that_cannot_start_ends_the_job_with_its_reason(tmp_path: Path) -> None:
    config = configs.read_run(run_toml(tmp_path))
    assert config.daemon.config is not None
    config.daemon.config.write_text("[daemon]\nno_such_key = 1\n")
    log = tmp_path / "out/daemon.log"
    own = EmbeddedDaemon(
        sys.executable,
        config.daemon.config,
        config.run.state_dir,
        os.environ | {"PYTHONPATH": str(ROOT)},
        log,
    )
    with pytest.raises(Refused, match="its configuration cannot be used"):
        own.start()
    own.stop()
    assert "no_such_key" in log.read_text()
