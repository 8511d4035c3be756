"""`scripts/build-pyslurm` says what is wrong before it compiles for minutes; the building itself takes too long for a test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/build-pyslurm"
READY = shutil.which("cc") is not None and (Path(sysconfig.get_path("include")) / "Python.h").exists()
pytestmark = pytest.mark.skipif(
    not READY, reason="no C compiler or no Python.h here, which the script asks for first"
)


def host(
    folder: Path, headers: str = "0x160508", commands: str = "slurm-wlm 22.05.8", release: str = "22.5"
) -> dict[str, str]:
    """A host with such headers and commands of Slurm, and a source of pyslurm for that release in `source`."""
    for name in ("include/slurm", "lib", "bin", "source/pyslurm"):
        (folder / name).mkdir(parents=True)
    (folder / "include/slurm/slurm.h").write_text("")
    (folder / "include/slurm/slurm_version.h").write_text(f"#define SLURM_VERSION_NUMBER {headers}\n")
    (folder / "lib/libslurm.so").write_text("")
    (folder / "bin/scontrol").write_text(f'#!/bin/sh\n[ -r "$SLURM_CONF" ] && echo "{commands}"\n')
    (folder / "bin/scontrol").chmod(0o755)
    (folder / "source/setup.py").write_text(
        "" if release.startswith("24") else f'SLURM_RELEASE = "{release}"\n'
    )
    (folder / "source/pyslurm/version.py").write_text(f'__version__ = "{release}.0"\n')
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    return {
        **os.environ,
        "PATH": path,
        "SLURM_INCLUDE_DIR": str(folder / "include"),
        "SLURM_LIB_DIR": str(folder / "lib"),
    }


def refused(env: dict[str, str], *argv: str) -> str:
    """What it says: the cause and a remedy, on stderr alone, and nothing is left behind."""
    scratch = Path(env["SLURM_LIB_DIR"]).with_name("tmp")
    scratch.mkdir(exist_ok=True)
    env = {**env, "TMPDIR": str(scratch), "PIP_NO_INDEX": "1"}
    done = subprocess.run(
        [SCRIPT, "--python", sys.executable, *argv],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert list(scratch.iterdir()) == []
    assert len(done.stderr.splitlines()) >= 2
    return done.stderr


@pytest.mark.parametrize(
    ("different", "said"),
    [
        ({"headers": "0x190b04", "commands": "slurm 25.11.4", "release": "25.11"}, "has no node() and job()"),
        ({"headers": "none"}, "say no version"),
        ({"commands": "slurm 24.11.5"}, "are Slurm 22.5's, and the commands here are slurm 24.11.5's"),
        ({"release": "23.2"}, "this source is for Slurm 23.2"),
        ({"release": "24.11"}, "this source is for Slurm 24.11"),
    ],
)
def test_a_slurm_that_does_not_fit_is_named(tmp_path: Path, different: dict[str, str], said: str) -> None:
    assert said in refused(host(tmp_path, **different), "--source", str(tmp_path / "source"))


def test_what_is_missing_is_named_with_where_to_get_it(tmp_path: Path) -> None:
    env = host(tmp_path)
    (tmp_path / "nothing").mkdir()
    for key, said in (("SLURM_INCLUDE_DIR", "no headers of Slurm"), ("SLURM_LIB_DIR", "no library of Slurm")):
        lacking = refused({**env, key: str(tmp_path / "nothing/here")}, "--source", str(tmp_path / "source"))
        assert said in lacking
        assert "apt-get install libslurm-dev" in lacking
    assert "it has no setup.py" in refused(env, "--source", str(tmp_path / "nothing"))
    assert "is no folder" in refused(env, "--source", str(tmp_path / "nowhere"))
    assert "no Python at /nowhere/python" in refused(env, "--python", "/nowhere/python")
    assert "unknown option --help" in refused(env, "--help")
    subprocess.run(["git", "init", "--quiet", "--bare", tmp_path / "clone"], check=True)
    assert "pyslurm has no release for Slurm 22.5 in" in refused(env, "--source", str(tmp_path / "clone"))
