"""The recipes of examples/containers and examples/modules: what they copy, install and promise, and that both containers hold the same.

The quick tests read them. Long ones build them, for CPUs, with each builder that is there: the Containerfile with Buildah (Debian's
charliecloud brings it) or Podman, the definition with Apptainer, which is in no Debian 12 or 13. Their base is made by mmdebstrap, since
no image registry is reached.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import scavenger
from tests.test_resources import copied_clone, wheel_of

ROOT = Path(__file__).resolve().parents[1]
CONTAINERFILE = ROOT / "examples/containers/Containerfile"
DEFINITION = ROOT / "examples/containers/scavenger.def"
MODULE = ROOT / "examples/modules/scavenger.lua"
INSTRUCTIONS = {"ARG", "FROM", "RUN", "COPY", "ENV", "CMD"}
SECTIONS = {"files", "post", "environment", "test", "runscript"}
#: What `pip wheel` puts into dist/, as the recipes' heads say.
WHEEL = "dist/scavenger-0-py3-none-any.whl"


def instructions(text: str) -> list[tuple[str, str]]:
    """Name and arguments of each instruction; lines that end in a backslash are joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined)]


def sections(text: str) -> dict[str, str]:
    """Text of each section of an Apptainer definition by name; "": its head."""
    found, name = {"": ""}, ""
    for line in text.splitlines():
        if line.startswith("%"):
            name = line[1:].strip()
            assert name not in found, f"%{name} stands twice"
            found[name] = ""
        elif not line.lstrip().startswith("#"):
            found[name] += line + "\n"
    return found


def runs() -> dict[str, str]:
    """Every shell text of both recipes."""
    parts = sections(DEFINITION.read_text())
    found = {f"%{name}": parts[name] for name in SECTIONS - {"files"}}
    shells = [rest for name, rest in instructions(CONTAINERFILE.read_text()) if name == "RUN"]
    return found | {f"RUN {number}": text for number, text in enumerate(shells)}


def installed(text: str) -> set[str]:
    """Packages of `apt-get install`."""
    (words,) = re.findall(r"apt-get install (.*?)(?:&&|\n|$)", text)
    return {word for word in shlex.split(words) if not word.startswith("-")}


def extras(text: str) -> set[str]:
    (named,) = re.findall(r"\[([a-z,]+)\]\"|^ARG EXTRAS=([a-z,]+)$", text, re.MULTILINE)
    return set("".join(named).split(","))


def known_extras() -> set[str]:
    source = (ROOT / "setup.py").read_text()
    return set(re.findall(r'^    "(\w+)": ', source[source.index("EXTRAS = {") :], re.MULTILINE))


def copied() -> Iterator[tuple[str, str]]:
    """(what, to where) of both recipes."""
    for name, rest in instructions(CONTAINERFILE.read_text()):
        if name == "COPY":
            *sources, target = rest.split()
            yield from ((source, target) for source in sources)
    words = sections(DEFINITION.read_text())["files"].split()
    yield from zip(words[::2], words[1::2], strict=True)


def test_the_containerfile_has_known_instructions_in_their_order() -> None:
    found = instructions(CONTAINERFILE.read_text())
    names = [name for name, _ in found]
    assert set(names) <= INSTRUCTIONS
    assert names[: names.index("FROM")] == ["ARG"], "only ARG may stand before FROM"
    assert names.count("CMD") == 1
    assert "ADD" not in names
    (cmd,) = [rest for name, rest in found if name == "CMD"]
    assert cmd.startswith("["), "without a shell, so that signals reach the program"


def test_the_definition_has_known_sections_and_a_base() -> None:
    parts = sections(DEFINITION.read_text())
    assert set(parts) == SECTIONS | {""}
    head = dict(line.split(": ") for line in parts[""].splitlines() if line)
    assert head == {"Bootstrap": "docker", "From": "debian:12-slim"}
    assert parts["post"].lstrip().startswith("set -e"), "a step that failed ends the build"


def test_both_recipes_make_the_same_image() -> None:
    container, definition = CONTAINERFILE.read_text(), DEFINITION.read_text()
    joined = " ".join(rest for name, rest in instructions(container) if name == "RUN")
    assert installed(joined) == installed(sections(definition)["post"]) >= {"python3-venv", "openmpi-bin"}
    assert extras(container) == extras(sections(definition)["post"]) == {"trainer", "vllm", "math"}
    assert extras(container) <= known_extras()
    assert "docker.io/library/debian:12-slim" in container


def test_what_they_copy_is_there_and_lies_where_they_install_it_from() -> None:
    found = list(copied())
    assert {source for source, _ in found} == {"constraints.txt", "dist/scavenger-*.whl"}
    for source, target in found:
        assert fnmatch.fnmatch(WHEEL, source) or (ROOT / source).is_file(), source
        assert target.startswith("/usr/src/scavenger")


@pytest.mark.parametrize("name", sorted(runs()))
def test_their_shell_is_sound(name: str) -> None:
    text = runs()[name]
    done = subprocess.run(["sh", "-n"], input=text, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not re.search(r"\b(sudo|curl|wget)\b|apt-get upgrade|chmod 777", text)


def test_a_misspelt_shell_would_be_found() -> None:
    done = subprocess.run(["sh", "-n"], input="if true; fi", capture_output=True, text=True, check=False)
    assert done.returncode != 0


def test_the_program_that_they_start_is_the_one_that_is_installed() -> None:
    assert "scavenger = scavenger.cli.main:main" in (ROOT / "setup.py").read_text()
    for path in (CONTAINERFILE, DEFINITION):
        assert "/opt/scavenger/bin" in path.read_text()


def test_the_module_says_where_the_environment_is_and_nothing_else_of_this_machine() -> None:
    """That Lmod loads it: tests/system/test_deb.py."""
    text = MODULE.read_text()
    code = [line for line in text.splitlines() if line and not line.startswith("--")]
    assert 'local base = "/opt/scavenger"' in code
    assert 'prepend_path("PATH", pathJoin(base, "bin"))' in code


class Buildah:
    """Images in a folder of the test's: files alone, without overlays or another user's storage."""

    def __init__(self, folder: Path) -> None:
        self._argv = ["buildah", "--root", str(folder / "images"), "--runroot", str(folder / "run")]
        self._env = {**os.environ, "STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot"}

    def __call__(self, *arguments: str | Path, timeout_s: float = 120.0) -> str:
        done = subprocess.run(
            [*self._argv, *map(str, arguments)],
            env=self._env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout.strip()


def of_this_host(folder: Path) -> Iterator[str]:
    """How a build reaches the package indexes as this host does: a pip.conf of its own, and the files and folders that pip reads."""
    listed = [sys.executable, "-m", "pip", "config", "list"]
    printed = subprocess.run(listed, capture_output=True, text=True, timeout=60, check=True).stdout
    named = {Path(one) for one in re.findall(r"/[^\s,'\"]+", printed) if not one.endswith("/simple")}
    for path in sorted(named | {Path("/etc/resolv.conf")}):
        if path.exists() and not path.is_relative_to(
            "/etc/ssl"
        ):  # certificates are the image's own to install
            yield f"--volume={path}:{path}:ro"
    keys = {
        name.removeprefix("PIP_").lower().replace("_", "-"): value
        for name, value in os.environ.items()
        if name.startswith("PIP_")
    }
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")
    if certificates.exists():
        keys["cert"] = "/run/host.crt"
        yield f"--volume={certificates}:/run/host.crt:ro"
    (folder / "pip.conf").write_text(
        "[global]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items())
    )
    yield f"--volume={folder}/pip.conf:/etc/pip.conf:ro"


def base_of(target: Path) -> Path:
    """In place of the recipes' base: a Debian 12 as a tar file, or as a folder."""
    made = [
        "mmdebstrap",
        "--quiet",
        "--variant=minbase",
        "--dpkgopt=force-unsafe-io",
        "bookworm",
        str(target),
    ]
    subprocess.run(made, check=True, capture_output=True, timeout=900)
    return target


def context_of(folder: Path) -> Path:
    """A clone with its wheel: from what a recipe is built."""
    copied_clone(folder)
    wheel_of(folder, folder / "dist")
    return folder


def said(*argv: str | Path, timeout_s: float = 600.0, **more: Any) -> str:
    """What a builder printed at last. Raises with all of it when it fails."""
    done = subprocess.run(
        list(map(str, argv)), capture_output=True, text=True, timeout=timeout_s, check=False, **more
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.timeout(3600)
def test_buildah_makes_an_image_that_trains(tmp_path: Path) -> None:
    if shutil.which("buildah") is None:
        pytest.skip("no buildah here")
    base = base_of(tmp_path / "base.tar")
    buildah = Buildah(tmp_path)
    holder = buildah("from", "scratch")
    buildah("add", "--quiet", holder, base, "/", timeout_s=600)
    buildah("commit", "--quiet", "--rm", holder, "localhost/base", timeout_s=600)

    context = context_of(tmp_path / "clone")
    arguments = ["--build-arg=BASE=localhost/base", "--build-arg=EXTRAS=trainer", "--network=host"]
    buildah(
        "build",
        *arguments,
        *of_this_host(tmp_path),
        f"--file={context / CONTAINERFILE.relative_to(ROOT)}",
        "--tag=scavenger-engine",
        context,
        timeout_s=3000,
    )
    engine = buildah("from", "scavenger-engine", timeout_s=600)
    try:
        assert buildah("run", engine, "scavenger", "version") == scavenger.__version__
        assert scavenger.__version__ in buildah("run", engine, "scavenger", "--version")
        assert buildah("run", engine, "python", "-c", IMPORTS).endswith("rank 0 of 1")
        assert "scavenger" not in buildah("run", engine, "ls", "/usr/src"), "the wheel's copy is gone"
    finally:
        buildah("rm", engine)
        buildah("rmi", "--all", "--force")


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.timeout(3600)
def test_podman_makes_an_image_that_trains(tmp_path: Path) -> None:
    if shutil.which("podman") is None:
        pytest.skip("no podman here (Debian: podman)")
    podman: list[str | Path] = [
        "podman",
        "--root",
        tmp_path / "images",
        "--runroot",
        tmp_path / "run",
        "--storage-driver=vfs",
    ]
    said(*podman, "import", base_of(tmp_path / "base.tar"), "localhost/base")
    context = context_of(tmp_path / "clone")
    named = [
        "--build-arg=BASE=localhost/base",
        "--build-arg=EXTRAS=trainer",
        "--network=host",
        "--isolation=chroot",
    ]
    recipe = context / CONTAINERFILE.relative_to(ROOT)
    built: list[str | Path] = [
        *named,
        *of_this_host(tmp_path),
        f"--file={recipe}",
        "--tag=scavenger-engine",
        context,
    ]
    said(*podman, "build", *built, timeout_s=3000)
    try:
        run: list[str | Path] = [*podman, "run", "--rm", "--network=host", "scavenger-engine"]
        assert scavenger.__version__ in said(*run, "scavenger", "--version")
        assert said(*run, "python", "-c", IMPORTS).endswith("rank 0 of 1")
    finally:
        said(*podman, "rmi", "--all", "--force")


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.timeout(3600)
def test_apptainer_makes_an_image_that_trains(tmp_path: Path) -> None:
    if shutil.which("apptainer") is None:
        pytest.skip("no apptainer here")
    context, image = context_of(tmp_path / "clone"), tmp_path / "scavenger.sif"
    recipe = tmp_path / "scavenger.def"
    text = DEFINITION.read_text().replace("[trainer,vllm,math]", "[trainer]")
    head = "Bootstrap: docker\nFrom: debian:12-slim\n"
    assert head in text
    recipe.write_text(text.replace(head, f"Bootstrap: localimage\nFrom: {base_of(tmp_path / 'base')}\n"))
    binds = [f"--bind={one.removeprefix('--volume=')}" for one in of_this_host(tmp_path)]
    said("apptainer", "build", *binds, image, recipe, cwd=context, timeout_s=3000)
    run: list[str | Path] = ["apptainer", "exec", "--no-home", "--contain", image]
    assert scavenger.__version__ in said(*run, "scavenger", "--version")
    assert said(*run, "python", "-c", IMPORTS).endswith("rank 0 of 1")


IMPORTS = """
import rollout.engines.reference, torch, trainer.loop.step
from mpi4py import MPI
assert trainer.loop.step.__file__.startswith("/opt/scavenger/")
print("rank", MPI.COMM_WORLD.Get_rank(), "of", MPI.COMM_WORLD.Get_size())
"""
