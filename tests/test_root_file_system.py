"""Root file systems of other Debian releases are shared by all clones: whoever comes first makes one, and nobody removes one in use."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.matrix

#: Makes a root file system by a command that notes each call; then holds it as long as a file is not there.
SCRIPT = """
set -euo pipefail
. "$ROOT/scripts/root-file-system"
kept_system trixie "$KEY" sh -c "$MAKER" sh || exit 69
echo "$base"
[ -z "$HOLD" ] || { touch "$HOLD.held"; while [ ! -e "$HOLD" ]; do sleep 0.05; done; }
"""
MAKER = 'echo made >> "$COUNT"; sleep 0.5; mkdir "$2"; touch "$2/whole"'


def asks(cache: Path, key: str, maker: str = MAKER, hold: Path | None = None) -> subprocess.Popen[str]:
    cache.mkdir(exist_ok=True)
    env = {
        "root": str(ROOT),
        "cache": str(cache),
        "ROOT": str(ROOT),
        "KEY": key,
        "MAKER": maker,
        "COUNT": str(cache / "count"),
        "HOLD": str(hold or ""),
    }
    return subprocess.Popen(
        ["bash", "-c", SCRIPT], env={**os.environ, **env}, stdout=subprocess.PIPE, text=True
    )


def made(cache: Path, key: str) -> Path:
    process = asks(cache, key)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return Path(said.strip())


def test_two_at_once_make_one(tmp_path: Path) -> None:
    processes = [asks(tmp_path / "cache", "a") for _ in range(3)]
    said = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    (base,) = said
    assert (Path(base) / "whole").exists()
    assert (tmp_path / "cache/count").read_text().split() == ["made"]


def test_one_that_could_not_be_made_is_not_there_and_is_made_by_the_next(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    failed = asks(cache, "a", maker='mkdir "$2"; touch "$2/half"; exit 3')
    failed.communicate(timeout=60)
    assert failed.returncode == 69
    assert not (cache / "trixie-a").exists()
    assert [path.name for path in made(cache, "a").iterdir()] == ["whole"]


def test_what_nobody_uses_goes_but_the_one_before(tmp_path: Path) -> None:
    cache, hold = tmp_path / "cache", tmp_path / "hold"
    holder = asks(cache, "held", hold=hold)
    deadline = time.monotonic() + 60
    while not hold.with_name("hold.held").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for key in ("a", "b", "c"):
        made(cache, key)
    left = {path.name for path in cache.iterdir() if path.is_dir()}
    assert left == {"trixie-held", "trixie-b", "trixie-c"}
    hold.touch()
    holder.communicate(timeout=60)
    made(cache, "c")
    assert {path.name for path in cache.iterdir() if path.is_dir()} == {"trixie-b", "trixie-c"}


def test_the_callers_folder_for_temporary_files_is_not_asked_for_inside(tmp_path: Path) -> None:
    """It is on this machine alone: with pam_tmpdir, or on a login node, every `mktemp` in there would fail."""
    for folder in ("proc", "sys", "dev"):
        (tmp_path / "root" / folder).mkdir(parents=True)
    script = (
        '. "$1/scripts/root-file-system"; mount_system "$2"; env | grep -E "^(TMPDIR|TMP|TEMP)=" || echo none'
    )
    apart = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]
    done = subprocess.run(
        [*apart, "bash", "-euc", script, "bash", str(ROOT), str(tmp_path / "root")],
        env={**os.environ, "TMPDIR": str(tmp_path), "TMP": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "none\n"), done.stderr


def test_a_mirror_that_cannot_be_reached_is_no_failure_of_the_release(tmp_path: Path) -> None:
    """What cannot be fetched is told as that, by an exit status of its own: the next release is tried all the same."""
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin/mmdebstrap"
    fake.write_text("#!/bin/sh\necho 'E: no mirror can be reached' >&2\nexit 25\n")
    fake.chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "SCAVENGER_SLURM_CACHE": str(tmp_path / "cache"),
    }
    argv = [str(ROOT / "scripts/slurm-matrix"), "--gate", "24.11", "26.05"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 69
    assert re.findall(r"^Slurm (\S+) \(\w+\): NOT RUN", done.stdout, re.MULTILINE) == ["24.11", "26.05"]
    assert "no mirror can be reached" in (tmp_path / "cache/26.05.log").read_text()
