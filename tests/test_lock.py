"""requirements-daemon.txt: what setup.py and constraints.txt say, with hashes, for each Python that is supported. scripts/lock makes it."""

from __future__ import annotations

import re
import runpy
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import setuptools
from packaging.markers import Marker
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements-daemon.txt"
#: As scripts/lock names them.
EXTRAS = {"top", "web", "postgres", "otel"}
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}$")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, tuple[str, str, list[str]]]:
    """Of each package its version, its marker and its hashes."""
    found: dict[str, tuple[str, str, list[str]]] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        said = line.removesuffix(" \\").strip()
        if line.startswith(" "):
            assert HASH.match(said), line
            found[name][2].append(said)
            continue
        pin, _, marker = said.partition(" ; ")
        name, _, version = pin.partition("==")
        assert version, f"{line}: no version"
        assert name not in found, f"{name} stands there twice"
        found[name] = (version, marker, [])
    return found


def here(minor: int) -> dict[str, str]:
    """An environment, as markers see it: CPython on Linux."""
    return {
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "os_name": "posix",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "python_version": f"3.{minor}",
        "python_full_version": f"3.{minor}.0",
        "extra": "",
    }


def applies(marker: str, minor: int) -> bool:
    return not marker or Marker(marker).evaluate(here(minor))


@pytest.mark.parametrize("minor", [11, 12, 13, 14])
def test_its_versions_are_those_of_the_constraints(minor: int) -> None:
    lines = (line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    pinned = {
        canonical(name): version for name, _, version in (line.partition("==") for line in lines if line)
    }
    locked = {
        name: version
        for name, (version, marker, _) in pins(LOCK.read_text()).items()
        if applies(marker, minor)
    }
    assert len(locked) > 50
    assert {name: pinned.get(name) for name in locked} == locked, "run scripts/lock"


def test_every_package_has_hashes() -> None:
    assert [name for name, (_, _, hashes) in pins(LOCK.read_text()).items() if not hashes] == []


def asked(declared: dict[str, Any]) -> set[str]:
    """Names of everything that a daemon with its tools requires: setup.py's words, then those of the packages that are installed here."""
    lines = [
        *declared["install_requires"],
        *(line for extra in EXTRAS for line in declared["extras_require"][extra]),
    ]
    todo = [(canonical(one.name), frozenset(one.extras)) for one in map(Requirement, lines)]
    found: dict[str, set[str]] = {}
    while todo:
        name, extras = todo.pop()
        if name in found and extras <= found[name]:
            continue
        found[name] = found.get(name, set()) | extras
        for line in metadata.requires(name) or ():
            one = Requirement(line)
            wanted = {"", *found[name]}
            if one.marker is None or any(
                one.marker.evaluate({**here(11), "extra": extra}) for extra in wanted
            ):
                todo.append((canonical(one.name), frozenset(one.extras)))
    return set(found)


def test_it_has_all_that_a_daemon_requires_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    declared: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **given: declared.update(given))
    runpy.run_path(str(ROOT / "setup.py"))
    locked = {name for name, (_, marker, _) in pins(LOCK.read_text()).items() if applies(marker, 11)}
    needed = asked(declared)
    assert {"tokenizers", "psycopg-binary", "opentelemetry-proto", "textual", "uvicorn"} <= needed
    assert needed == locked, "run scripts/lock"
    assert not {"torch", "transformers", "mpi4py"} & locked
