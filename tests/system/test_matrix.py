"""The releases of Slurm that are not installed here, each in a root file system of the Debian that has it (`scripts/slurm-matrix`).

The cluster contract, doctor on a healthy site, harvesting, accounting, and on the newest a whole run that loses engines in three ways; with
`long` also all that depends on Slurm, and the quickstart as a newcomer types it.
"""

from __future__ import annotations

import html
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from scavenger.demo.session import DemoSettings
from tests.conftest import required

ROOT = Path(__file__).resolve().parents[2]
UNAVAILABLE = 69
#: What the root file system costs where there is none yet, and what may be waited for another run that makes it.
pytestmark = [pytest.mark.matrix, pytest.mark.timeout(3000)]
RELEASES = {"bookworm": "22.05", "trixie": "24.11", "forky": "26.05"}


def codename() -> str:
    """Of this machine's Debian, whose Slurm all other tests run on."""
    path = Path("/etc/os-release")
    text = path.read_text() if path.exists() else ""
    found = re.search(r"^VERSION_CODENAME=(\w+)", text, re.MULTILINE)
    return found[1] if found else ""


def played(release: str, folder: Path, *options: str) -> str:
    """The log of a release's run. Raises or skips with its last lines where it did not pass."""
    argv = [str(ROOT / "scripts/slurm-matrix"), *options, "--logs", str(folder), release]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            said, _ = process.communicate()
        except BaseException:  # by the test's time limit: what it started ends too
            os.killpg(process.pid, signal.SIGKILL)
            raise
    path = folder / f"{release}.log"
    log = path.read_text(errors="replace") if path.exists() else ""
    last = "\n".join(log.splitlines()[-100:])
    if process.returncode == UNAVAILABLE and "matrix" not in required():
        pytest.skip(f"no root file system with Slurm {release} could be made: {last[-300:]}")
    assert process.returncode == 0, f"{said}\n{last}"
    return f"{said}\n{log}"


@pytest.mark.parametrize("release", [release for name, release in RELEASES.items() if name != codename()])
def test_another_release_of_slurm_passes(
    release: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    log = played(release, tmp_path, "--gate")
    record_property("told", log.splitlines()[0].rpartition("; ")[0])
    assert re.search(r"^=* ?\d+ passed", log, re.MULTILINE)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("release", [release for name, release in RELEASES.items() if name != codename()])
def test_all_that_depends_on_slurm_passes_on_another_release(
    release: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    log = played(release, tmp_path)
    record_property("told", log.splitlines()[0].rpartition("; ")[0])
    assert re.search(r"^=* ?\d+ passed", log, re.MULTILINE)


@pytest.mark.long
@pytest.mark.parametrize("release", RELEASES.values())
def test_the_quickstart_on_each_release_survives_preemptions_and_says_so(
    release: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """As a newcomer types it, on that Debian: the report has all steps, engines that were lost, and what others waited."""
    played(release, tmp_path, "--quickstart")
    page = (tmp_path / f"{release}.html").read_text()
    report = {name: html.unescape(value) for name, value in re.findall(r"<th>(.*?)</th><td>(.*?)</td>", page)}
    record_property("told", f"quickstart on Slurm {release}: {report}")
    assert report["cluster"] == "slurm"
    assert int(report["optimizer steps"]) == DemoSettings().steps
    assert int(report["engines lost"].split()[0]) > 0
    assert int(report["tokens salvaged"].split(",", 1)[0]) > 0
    assert "each delivered exactly once" in report["training samples"]
    assert float(report["other users waited"].split()[0]) < 30.0
