"""Episodes whose agents are programs in containers of Apptainer: real `verifiers`, a real image, a real gateway; a scripted engine.

The image holds a few programs of this host and its Python. It is made without root, without a network, and without a base image.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.gateway.conftest import LiveGateway, worker
from tests.gateway.conftest import live as live  # the fixture
from tests.trainer.episodes.interpreters import needs_verifiers
from tests.trainer.episodes.test_played import SAMPLES, TURNS, check_rows, one_group, pool, setup
from tests.trainer.episodes.test_played import found_by_name as found_by_name  # a fixture
from tests.trainer.episodes.test_played import model as model  # a fixture
from trainer.episodes import wire

pytestmark = [
    needs_verifiers,
    pytest.mark.skipif(shutil.which("apptainer") is None, reason="no apptainer here"),
    pytest.mark.long,
    pytest.mark.timeout(600),
]
#: What `verifiers` runs in a container, besides the agent's Python.
PROGRAMS = ("sh", "env", "cp", "mkdir", "cat", "rm", "test", "kill")
HARNESS = "contained_env"


def libraries_of(files: list[Path]) -> set[Path]:
    """Of programs and modules of C, with the loader, as the system's own loader finds them."""
    told = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True, check=False).stdout
    return {Path(found) for found in re.findall(r"(?:=> |^\s+)(/\S+) \(0x", told, re.MULTILINE)}


def tree_of(folder: Path) -> Path:
    """A root file system: programs, their libraries, and at /agent this interpreter with the standard library."""
    for name in ("dev", "etc", "proc", "root", "sys", "tmp", "var/tmp", "usr/bin", "agent/lib"):
        (folder / name).mkdir(parents=True)
    for name in ("passwd", "group", "resolv.conf", "hosts"):
        (folder / "etc" / name).touch()
    (folder / "bin").symlink_to("usr/bin")
    programs = [Path(str(shutil.which(name))).resolve() for name in PROGRAMS]
    for name, program in zip(PROGRAMS, programs, strict=True):
        shutil.copy(program, folder / "usr/bin" / name)
    python, standard = Path(os.path.realpath(sys.executable)), Path(os.__file__).parent
    (folder / "agent/bin").mkdir()
    shutil.copy(python, folder / "agent/bin/python")
    (folder / "agent/python").write_text(
        '#!/bin/sh\nLD_LIBRARY_PATH=/agent/lib exec /agent/bin/python "$@"\n'
    )
    (folder / "agent/python").chmod(0o755)
    home = folder / "agent/lib" / standard.name
    without = shutil.ignore_patterns(
        "test", "tests", "idlelib", "site-packages", "dist-packages", "ensurepip", "config-*", "*.pyc"
    )
    shutil.copytree(standard, home, ignore=without)
    modules = list(home.glob("lib-dynload/*.so"))
    for library in libraries_of([*programs, python, *modules]):
        # What lies below a home is hidden by the container's own.
        known = library.parts[1] in ("lib", "lib64", "usr")
        place = folder / str(library)[1:] if known else folder / "agent/lib" / library.name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, place)
    return folder


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("image")
    argv = ["apptainer", "build", str(folder / "agent.sif"), str(tree_of(folder / "tree"))]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    yield folder / "agent.sif"
    for name in instances(folder / "agent.sif"):  # those of a worker that was killed
        subprocess.run(["apptainer", "instance", "stop", "--force", name], check=True, capture_output=True)


def contained(live: LiveGateway, model: Path, image: Path, hidden: Path, **harness: Any) -> wire.Setup:
    """That of `test_played`, with the agent in a container, which must not see `hidden`."""
    hidden.touch()
    given = setup(live, model, hidden=str(hidden), **harness)
    args = json.loads(given.arguments)
    args["agent"]["harness"]["id"] = HARNESS
    args["agent"]["runtime"] = {"type": "apptainer", "image": str(image)}
    return msgspec.structs.replace(given, arguments=json.dumps(args))


def instances(image: Path) -> set[str]:
    """Names of the containers of this image that run: others may be another test's, or another user's of this account."""
    told = subprocess.run(["apptainer", "instance", "list", "--json"], capture_output=True, check=True).stdout
    return {one["instance"] for one in json.loads(told)["instances"] if one["img"] == str(image)}


@pytest.fixture(autouse=True)
def a_variable_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCAVENGER_OF_THE_HOST", "1")


def test_an_agent_in_a_container_has_its_turns_in_the_ledger(
    live: LiveGateway, model: Path, image: Path, tmp_path: Path
) -> None:
    with worker(live.daemon), pool(contained(live, model, image, tmp_path / "hidden")) as playing:
        run, group = one_group(live, playing)
        check_rows(live, run, group)
        assert live.count("turns") == TURNS * SAMPLES
    assert not instances(image), "a container outlives its episode"


@pytest.mark.sandbox
def test_a_lost_worker_s_episode_goes_on_in_another_container(
    live: LiveGateway, model: Path, image: Path, tmp_path: Path
) -> None:
    """Also: `data.sandbox` leaves a role with a runtime of its own alone."""
    killed = tmp_path / "killed"
    box = wire.Sandbox(512, 32, 8, 1, 1000.0, hidden=(str(tmp_path),))
    given = contained(live, model, image, tmp_path / "hidden", die_once=str(killed))
    with worker(live.daemon), pool(msgspec.structs.replace(given, sandbox=box)) as playing:
        run, group = one_group(live, playing)
        assert killed.exists()
        assert playing.losses == 1
        check_rows(live, run, group)
    assert live.count("turns") == TURNS * SAMPLES, "each call is in the ledger once"
    assert live.count("samples") == TURNS * SAMPLES
    assert len(instances(image)) <= SAMPLES, "only the killed worker's are left"
