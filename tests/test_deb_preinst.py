"""What the Debian package refuses before it is unpacked: the script itself, over a root of the test's own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

PREINST = Path(__file__).resolve().parents[1] / "scripts/deb/preinst"
pytestmark = pytest.mark.skipif(shutil.which("dpkg-query") is None, reason="dpkg is not here")
PACKAGE = """Package: scavenger
Status: install ok installed
Architecture: all
Maintainer: nobody <nobody@example.org>
Version: 1
Description: a package

"""


def preinst(root: Path, what: str) -> subprocess.CompletedProcess[str]:
    (root / "dpkg/info").mkdir(parents=True, exist_ok=True)
    (root / "dpkg/updates").mkdir(exist_ok=True)
    (root / "dpkg/status").touch()
    where = {"PATH": "/usr/bin:/bin", "DPKG_ROOT": str(root), "DPKG_ADMINDIR": str(root / "dpkg")}
    return subprocess.run(["sh", str(PREINST), what], env=where, capture_output=True, text=True)


def test_a_folder_that_pip_filled_is_not_mixed_with_the_package(tmp_path: Path) -> None:
    assert preinst(tmp_path, "install").returncode == 0, "nothing is there"
    (tmp_path / "opt/scavenger/bin").mkdir(parents=True)
    refused = preinst(tmp_path, "install")
    assert refused.returncode == 1
    assert "Move it away" in refused.stderr
    assert preinst(tmp_path, "upgrade").returncode == 0


def test_the_package_s_own_folder_and_an_empty_one_are_none(tmp_path: Path) -> None:
    (tmp_path / "opt/scavenger").mkdir(parents=True)
    assert preinst(tmp_path, "install").returncode == 0
    (tmp_path / "opt/scavenger/bin").mkdir()
    preinst(tmp_path, "upgrade")  # makes dpkg's folder
    (tmp_path / "dpkg/status").write_text(PACKAGE)
    (tmp_path / "dpkg/info/scavenger.list").write_text("/.\n/opt\n/opt/scavenger\n/opt/scavenger/bin\n")
    found = preinst(tmp_path, "install")
    assert found.returncode == 0, found.stderr
