"""SQL, job templates and migrations are found from a clone and from an installed wheel; what wheel and source distribution hold."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from scavenger import resources
from scavenger.errors import ScavengerError

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("scavenger", "rollout", "trainer")
SHIPPED = ["sql/**/*.sql", "scripts/*.j2", "scripts/*.sbatch", "scripts/*.service", "examples/**/*.toml"]
SHIPPED += [
    f"{package}/**/*.{suffix}" for package in PACKAGES for suffix in ("py", "mako", "html", "j2", "ini")
]


def shipped() -> list[str]:
    found = {path.relative_to(ROOT).as_posix() for pattern in SHIPPED for path in ROOT.glob(pattern)}
    return sorted(found)


def tracked() -> list[str]:
    """The clone's files, without those of hidden folders and what git ignores."""
    argv = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    names = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [name for name in names if name and not name.startswith(".") and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, so that no `build/` of an earlier day is in what is built from it and none is left in the clone."""
    copy = tmp_path_factory.mktemp("source")
    copied_clone(copy)
    return copy


def copied_clone(folder: Path) -> None:
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)


def wheel_of(source: Path, folder: Path) -> Path:
    pip(["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(source)])
    (built,) = folder.glob("scavenger-*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_of(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def unpacked_sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a packager gets: the source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    program = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    argv = [sys.executable, "-c", program, str(folder)]
    done = subprocess.run(argv, cwd=source, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("scavenger-*.tar.gz")
    with tarfile.open(built) as archive:
        archive.extractall(folder, filter="data")
    return folder / built.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site-packages")
    pip(["install", "--no-deps", "--no-index", "--target", str(target), str(wheel)])
    return target


def pip(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_clone_finds_its_own_files() -> None:
    assert [resources.path(name) for name in shipped()] == [ROOT / name for name in shipped()]
    assert resources.path("scripts") == ROOT / "scripts"


def test_an_installed_wheel_finds_every_file_that_the_clone_has(installed: Path, tmp_path: Path) -> None:
    program = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); from scavenger import resources; "
        "print(json.dumps({name: str(resources.path(name)) for name in json.load(sys.stdin)}))"
    )
    # -P and another folder: neither the clone nor the current directory may answer for the wheel.
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, str(installed)],
        input=json.dumps(shipped()),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found = {name: Path(where) for name, where in json.loads(done.stdout).items()}
    assert all(where.is_relative_to(installed.resolve()) for where in found.values())
    assert [name for name, where in found.items() if where.read_bytes() != (ROOT / name).read_bytes()] == []


def test_a_wheel_holds_only_our_packages_and_its_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == set(PACKAGES)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name]


def test_a_source_distribution_has_the_clone_s_files_and_makes_the_same_wheel(
    unpacked_sdist: Path, wheel: Path, tmp_path: Path
) -> None:
    found = {
        path.relative_to(unpacked_sdist).as_posix() for path in unpacked_sdist.rglob("*") if path.is_file()
    }
    made = {name for name in found if name in ("PKG-INFO", "setup.cfg") or ".egg-info/" in name}
    assert sorted(found - made) == sorted(tracked()), "MANIFEST.in says what is in it"
    again = wheel_of(unpacked_sdist, tmp_path)
    assert contents(again) == contents(wheel)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.parametrize("relative", ["../setup.py", "/etc/passwd", "", "sql/../../x"])
def test_a_path_outside_the_repository_is_refused(relative: str) -> None:
    with pytest.raises(ScavengerError, match="not below the repository's root"):
        resources.path(relative)


def test_a_missing_resource_says_what_to_do() -> None:
    with pytest.raises(ScavengerError, match=r"lacks 'sql/no_such\.sql'(?s:.*)remedy"):
        resources.path("sql/no_such.sql")
