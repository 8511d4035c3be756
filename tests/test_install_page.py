"""The commands of docs/install.md, typed as they stand, in a copy of the clone: with pip, uv and pipx, from a wheel.

Those of the package are run by tests/system/test_deb.py, the clone's by every run of scripts/bootstrap and by scripts/slurm-matrix
--quickstart. `/opt/scavenger` is a folder of the test's. uv and pipx come from the package index. Pythons beside this one are those that
are found here (PATH, pyenv, uv); those of Debian 13 and testing: `scripts/slurm-matrix 24.11 26.05 -- tests/test_install_page.py`.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import pytest

import scavenger
from tests.test_daemon_start import running, site

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/install.md").read_text(encoding="utf-8")
MAX_MB = 150
HEADING = "With pip, uv or pipx"
#: Blocks that this file runs, by their first words.
WHEEL, PIP, TRAINING, CARRIED, OFFLINE, HASHES, UV, PIPX = range(8)
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def blocks(heading: str) -> list[str]:
    section = re.split(rf"^## {heading}$", PAGE, flags=re.MULTILINE)[1].split("\n## ")[0]
    return re.findall(r"^```\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def run(text: str, clone: Path, place: Path, **more: str) -> str:
    """Run a block in bash, as a person types it, where nothing but the copy of the clone is of ours."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {"HOME": str(place.parent), "XDG_CACHE_HOME": str(place.parent / "cache")} | more
    done = subprocess.run(
        ["bash", "-euc", text.replace("/opt/scavenger", str(place))],
        cwd=clone,
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the clone's files, with the wheel of the page's first command in dist/."""
    folder = tmp_path_factory.mktemp("clone")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout.split(b"\0")
    for name in filter(None, map(os.fsdecode, listed)):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    run(blocks(HEADING)[WHEEL], folder, folder / "none/place")
    return folder


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of uv's and pipx's programs."""
    folder = tmp_path_factory.mktemp("tools")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    subprocess.run([folder / "bin/pip", "install", "--quiet", "uv", "pipx"], check=True, timeout=300)
    return folder / "bin"


def searched(tools: Path, *first: Path) -> str:
    return os.pathsep.join([*map(str, first), str(tools), os.environ["PATH"]])


def test_every_command_of_the_page_belongs_to_a_test() -> None:
    assert len(blocks(HEADING)) == 8
    assert len(blocks("Debian and Ubuntu")) == 8, (
        "tests/system/test_deb.py and test_deb_first_engine.py run them"
    )
    assert blocks("From a clone") == [
        "./scripts/quickstart             # from a bare machine to a finished run, nothing asked\n"
    ]
    assert not [
        one
        for title in ("Containers: Apptainer, Podman, pyxis", "An environment module")
        for one in blocks(title)
    ]
    named = set(re.findall(r"scavenger-([\d.]+)-py3", PAGE)) | set(re.findall(r"scavenger_([\d.]+)_", PAGE))
    assert named == {scavenger.__version__}


def interpreter(version: str, tools: Path) -> Path:
    """This one, or one that is found here and whole; without any the test is skipped."""
    if version == ".".join(map(str, sys.version_info[:2])):
        return Path(sys.executable).resolve()
    on_path = shutil.which(f"python{version}")
    found = [Path(on_path)] if on_path else []
    found += sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python"))
    for one in found:
        probe = (
            f"import sys, venv, ensurepip, sqlite3, ssl; assert '%d.%d' % sys.version_info[:2] == '{version}'"
        )
        if subprocess.run([one, "-c", probe], capture_output=True, timeout=60, check=False).returncode == 0:
            return one
    argv = [str(tools / "uv"), "python", "find", "--managed-python", "--no-project", version]
    managed = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    if managed.returncode != 0:
        pytest.skip(f"no Python {version} here: neither on PATH, nor pyenv's, nor uv's")
    return Path(managed.stdout.strip())


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("version", PYTHONS)
def test_each_python_starts_a_daemon_without_torch_and_under_150_mb(
    clone: Path, tools: Path, tmp_path: Path, version: str
) -> None:
    place = tmp_path / "opt"
    base = blocks(HEADING)[PIP].replace("[top,web]", "")
    base = base.replace("python3 -m venv ", f"{interpreter(version, tools)} -m venv --without-pip ")
    base = base.replace("/opt/scavenger/bin/pip", f"{sys.executable} -m pip --python /opt/scavenger")
    assert str(sys.executable) in base
    began = time.monotonic()
    said = run(base, clone, place)
    took = time.monotonic() - began
    assert scavenger.__version__ in said
    assert "No broken requirements" in said
    names = {path.name.split("-")[0] for path in place.glob(f"lib/python{version}/site-packages/*.dist-info")}
    assert "scavenger" in names
    assert not {"torch", "transformers", "tokenizers"} & names
    config = site(tmp_path)
    program = ("env", "-u", "PYTHONPATH", str(place / "bin/scavenger"))
    with running(config, argv=(*program, "daemon", "--config", str(config))) as daemon:
        daemon.until("serving")
        status = subprocess.run(
            [*program, "status", "--config", str(config)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert status.returncode == 0, status.stdout + status.stderr
        daemon.process.terminate()
        assert daemon.ended() == 0, daemon.stderr
    assert "Warning" not in daemon.stderr, "a new Python deprecates something"
    size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file() and not path.is_symlink())
    print(f"Python {version}: {size / 1e6:.0f} MB with bytecode, {took:.0f} s")
    assert size < MAX_MB * 1e6


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_pip_installs_what_the_page_says(clone: Path, tmp_path: Path) -> None:
    said = run(blocks(HEADING)[PIP], clone, tmp_path / "opt")
    assert scavenger.__version__ in said
    assert "No broken requirements" in said


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_folder_of_wheels_is_all_that_a_host_without_internet_needs(clone: Path, tmp_path: Path) -> None:
    place, nowhere = tmp_path / "opt", "http://127.0.0.1:9"
    run(blocks(HEADING)[CARRIED], clone, place)
    run(
        blocks(HEADING)[OFFLINE],
        clone,
        place,
        PIP_INDEX_URL=nowhere,
        PIP_FIND_LINKS="",
        http_proxy=nowhere,
        https_proxy=nowhere,
    )
    said = run("/opt/scavenger/bin/scavenger version; /opt/scavenger/bin/pip check", clone.parent, place)
    assert scavenger.__version__ in said
    assert "No broken requirements" in said


#: An extra that a page has installed by itself: the page, and what the extra brings.
EXTRAS = {
    "otel": ("docs/admin.md", "opentelemetry.sdk.trace, opentelemetry.exporter.otlp.proto.http"),
    "gateway": ("docs/agents.md", "starlette, uvicorn, tokenizers"),
    "trl": ("docs/your-trainer.md", "trl, datasets, accelerate"),
}


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_is_installed_as_its_page_says(clone: Path, tmp_path: Path, extra: str) -> None:
    page, brings = EXTRAS[extra]
    (line,) = re.findall(
        rf"^(pip install \S.*\[{extra}\].?)(?:\s+#.*)?$", (ROOT / page).read_text(), re.MULTILINE
    )
    place = tmp_path / "opt"
    run(f"{sys.executable} -m venv /opt/scavenger", clone, place)
    (site,) = place.glob("lib/python3*/site-packages")
    if extra == "trl":  # torch is this environment's: its gigabytes are pip's affair
        (site / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(f"/opt/scavenger/bin/{line}", clone, place)
    where = run(
        f"/opt/scavenger/bin/python -c 'import scavenger, {brings}; print(scavenger.__file__)'",
        clone.parent,
        place,
    )
    assert Path(where.strip()).is_relative_to(site.resolve())


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_pip_installs_known_files_and_no_others(clone: Path, tmp_path: Path) -> None:
    text = blocks(HEADING)[HASHES]
    said = run(text, clone, tmp_path / "opt")
    assert scavenger.__version__ in said
    assert "No broken requirements" in said
    make, install, *_ = text.splitlines()
    known = (clone / "requirements-daemon.txt").read_text()
    (clone / "changed.txt").write_text(re.sub(r"(?<=sha256:)[0-9a-f]{8}", "0" * 8, known))
    changed = install.replace("requirements-daemon.txt", "changed.txt")
    assert changed != install
    said = run(f"{make}\n! {changed} 2>&1", clone, tmp_path / "other")
    assert "DO NOT MATCH THE HASHES" in said


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_uv_installs_what_the_page_says(clone: Path, tools: Path, tmp_path: Path) -> None:
    said = run(blocks(HEADING)[UV], clone, tmp_path / "opt", PATH=searched(tools))
    assert said.strip() == scavenger.__version__


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_pipx_runs_it_and_installs_its_command(clone: Path, tools: Path, tmp_path: Path) -> None:
    mine = {"PIPX_HOME": str(tmp_path / "pipx"), "PIPX_BIN_DIR": str(tmp_path / "bin")}
    said = run(blocks(HEADING)[PIPX], clone, tmp_path / "opt", PATH=searched(tools, tmp_path / "bin"), **mine)
    assert [line for line in said.splitlines() if line == scavenger.__version__] == [
        scavenger.__version__
    ] * 2
    assert (tmp_path / "bin/scavenger").exists()


@pytest.mark.long
@pytest.mark.mpi
@pytest.mark.timeout(1200)
def test_the_wheel_plays_the_demo_without_a_clone(
    clone: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Torch and what else training needs is this environment's: installed anew, it is a matter of gigabytes and of pip."""
    place = tmp_path / "opt"
    install, demo = blocks(HEADING)[TRAINING].splitlines()
    assert install.endswith("[trainer,math]'")
    run(
        f"{sys.executable} -m venv --without-pip /opt/scavenger\n"
        f"{sys.executable} -m pip --python /opt/scavenger install --no-deps dist/*.whl",
        clone,
        place,
    )
    (site,) = place.glob("lib/python3*/site-packages")
    (site / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    away = Path(tempfile.mkdtemp(prefix="scv-"))  # sockets' paths may have 107 bytes
    request.addfinalizer(functools.partial(shutil.rmtree, away))
    where = run(f"{place}/bin/python -c 'import scavenger, trainer; print(trainer.__file__)'", away, place)
    assert Path(where.strip()).is_relative_to(site.resolve())
    demo, _, _ = demo.partition("#")  # local: Slurm's own demo is tests/system's
    said = run(f"{demo} --backend local --steps 3 --out out", away, place)
    assert (away / "out").is_dir()
    print(said[-1500:])
    assert "reward" in said
