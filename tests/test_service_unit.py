"""scripts/scavenger.service is a unit that systemd takes, and one that it calls well hardened."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UNIT = Path(__file__).resolve().parents[1] / "scripts/scavenger.service"
MOST_EXPOSURE = 2.0


@pytest.fixture
def analyze() -> str:
    found = shutil.which("systemd-analyze")
    if found is None:
        pytest.skip("systemd-analyze is not installed here (Debian: apt-get install systemd)")
    return found


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def test_systemd_finds_nothing_wrong_with_the_unit(analyze: str, tmp_path: Path) -> None:
    # verify looks for the program, which is not installed where tests run
    copy = tmp_path / "scavenger.service"
    text = UNIT.read_text()
    assert "/opt/scavenger/bin/scavenger daemon" in text
    copy.write_text(text.replace("/opt/scavenger/bin/scavenger", sys.executable))
    done = run(analyze, "verify", "--man=no", str(copy))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_misspelt_line_would_be_found(analyze: str, tmp_path: Path) -> None:
    copy = tmp_path / "scavenger.service"
    copy.write_text(UNIT.read_text().replace("/opt/scavenger/bin/scavenger", sys.executable).replace("ProtectClock=yes", "ProtectClok=yes"))
    assert "ProtectClok" in run(analyze, "verify", "--man=no", str(copy)).stderr


def test_the_unit_s_exposure_is_low(analyze: str) -> None:
    done = run(analyze, "security", "--offline=true", "--no-pager", str(UNIT))
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze has no --offline (it came with 250)")
    match = re.search(r"Overall exposure level for \S+: (\d+\.\d+)", done.stdout)
    assert match is not None, done.stdout + done.stderr
    assert float(match[1]) <= MOST_EXPOSURE


def test_the_unit_keeps_what_the_daemon_relies_on() -> None:
    settings = dict(line.split("=", 1) for line in UNIT.read_text().splitlines() if re.match(r"^[A-Z]\w+=", line))
    assert settings["Type"] == "notify"
    assert settings["WatchdogSec"].isdigit(), "the daemon pings three times in that"
    assert settings["ExecReload"].endswith("-HUP $MAINPID")
    assert settings["StateDirectory"] == "scavenger"
    assert settings["RestartPreventExitStatus"] == "2 4", "a refused configuration or a fenced daemon is not started again"
    assert {"AF_UNIX", "AF_INET", "AF_INET6"} == set(settings["RestrictAddressFamilies"].split()), "munge, slurmctld, workers"
