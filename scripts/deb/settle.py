"""Makes a virtual environment that was filled in one folder ready for another: `settle.py VENV PLACE`. scripts/build-deb runs it.

Of its programs only `scavenger` and Python stay. What only a test or a compiler reads goes, as do debug symbols and the client of a model
hub that `tokenizers` asks for (to download, which the daemon never does). No path of the folder it was made in is left, and bytecode is
checked by no time stamp: two builds are the same bytes. Each `RECORD` says what is there, so that `importlib.metadata` and an audit agree.
"""

from __future__ import annotations

import base64
import compileall
import csv
import hashlib
import py_compile
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

KEPT = {"scavenger", "python", "python3", f"python3.{sys.version_info.minor}"}
#: The client of a model hub, and what only it asks for.
HUB = (
    "huggingface_hub",
    "hf_xet",
    "httpx2",
    "httpcore2",
    "truststore",
    "fsspec",
    "filelock",
    "tqdm",
    "PyYAML",
)
SOURCES = {".pyi", ".pyx", ".pxd", ".c", ".h", ".a"}
#: Runs without bytecode: what the daemon never imports, or only `scavenger top` does.
UNCOMPILED = re.compile(
    r"/site-packages/(pygments|textual|rollout|trainer|sqlalchemy/dialects/(mysql|oracle|mssql))/"
)


def settle(venv: Path, place: Path) -> None:
    for program in sorted((venv / "bin").iterdir()):
        if program.name not in KEPT:
            program.unlink()
    starter = venv / "bin/scavenger"
    starter.write_text(starter.read_text().replace(str(venv), str(place)))
    settings = venv / "pyvenv.cfg"
    settings.write_text(
        "".join(line for line in settings.read_text().splitlines(True) if not line.startswith("command"))
    )
    (site,) = venv.glob("lib/python3.*/site-packages")
    _prune(site)
    for record in sorted(site.glob("*.dist-info/RECORD")):
        (record.parent / "direct_url.json").unlink(missing_ok=True)
        _mend(record, site)
    (venv / "lib64").unlink(missing_ok=True)
    compileall.compile_dir(
        site,
        quiet=2,
        rx=UNCOMPILED,
        stripdir=str(venv),
        prependdir=str(place),
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )


def _prune(site: Path) -> None:
    for name in HUB:
        _remove(site, name)
    for folder in [
        *site.glob("numpy/**/tests"),
        *site.glob("numpy/f2py"),
        *site.glob("numpy/distutils"),
        site / "alembic/testing",
        site / "sqlalchemy/testing",
    ]:
        shutil.rmtree(folder)
    (site / "numpy/testing/print_coercion_tables.py").unlink(missing_ok=True)  # a program
    for path in [one for one in site.rglob("*") if one.suffix in SOURCES]:
        path.unlink()
    for path in sorted(site.rglob("*.so")):
        # Those with libraries of their own beside them, and these, were changed by auditwheel: strip would break them.
        package = path.relative_to(site).parts[0].removesuffix(".libs")
        if not (site / f"{package}.libs").exists():
            subprocess.run(
                ["strip", "--strip-debug", "--enable-deterministic-archives", str(path)], check=True
            )


def _remove(site: Path, name: str) -> None:
    """Every file of a distribution, and the folders that are empty then."""
    (found,) = metadata.distributions(name=name, path=[str(site)])
    parents = set()
    for file in found.files or ():
        path = site / file
        if path.resolve().is_relative_to(site):
            path.unlink(missing_ok=True)
            parents.update(one for one in path.parents if one.is_relative_to(site) and one != site)
    for folder in sorted(parents, key=lambda one: -len(one.parts)):
        if folder.exists() and not any(folder.iterdir()):
            folder.rmdir()


def _mend(record: Path, site: Path) -> None:
    rows = []
    for name, digest, size in csv.reader(record.read_text(encoding="utf-8").splitlines()):
        path = site / name
        if not path.exists():
            continue
        if digest:
            content = path.read_bytes()
            hashed = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            rows.append((name, f"sha256={hashed}", str(len(content))))
        else:
            rows.append((name, digest, size))
    with record.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(sorted(rows))


if __name__ == "__main__":
    settle(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
