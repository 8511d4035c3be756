"""The test job's script, run by bash on this machine: what it says of a Python that is slow."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from scavenger.doctor import probe


def said_by(place: probe.ProbePlace, python: Path) -> str:
    """What the job says of this Python, until it goes on to the network."""
    text = probe.script(place, str(python), "127.0.0.1", 1, engines=())
    job = subprocess.Popen(["bash", "-c", text], stdin=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 60.0
    try:
        while "slurmctld=" not in place.read():
            assert time.monotonic() < deadline, place.read()
            time.sleep(0.05)  # between two polls of a condition
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    return place.read()


def test_a_python_that_does_not_answer_in_time_is_called_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "IMPORT_S", 1.0)
    said = tmp_path / probe.SAID

    def read() -> str:
        return said.read_text() if said.exists() else ""

    place = probe.ProbePlace(tmp_path, said, tmp_path, read, lambda _job: ("RUNNING", "", 0))
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    assert "python=its imports took longer than 1 s\n" in said_by(place, python)
    said.unlink()
    python.write_text("#!/bin/sh\necho 'ModuleNotFoundError: rollout' >&2\nexit 1\n")
    assert "python=ModuleNotFoundError: rollout\n" in said_by(place, python)
