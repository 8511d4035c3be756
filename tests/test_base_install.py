"""What `pip install scavenger` brings without any extra: enough for a daemon, no torch, under 150 MB."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import scavenger
from tests.test_architecture import base_distributions
from tests.test_gpu_benchmark import hiding

ROOT = Path(__file__).resolve().parents[1]
MAX_MB = 150
#: What a daemon and its admin's commands import.
PROGRAM = """
import scavenger.cli.main, scavenger.daemon.main, scavenger.doctor, scavenger.simulate.replay, scavenger.top.feed, scavenger.web.export
scavenger.cli.main.app(["{word}", *{options}])
"""


def brought() -> dict[str, metadata.Distribution]:
    """The distributions of `BASE` and what those require, by name, as they are installed here."""
    found: dict[str, metadata.Distribution] = {}
    asked = sorted(base_distributions())
    while asked:
        name = re.sub(r"[-_.]+", "-", asked.pop()).lower()
        if name not in found:
            found[name] = metadata.distribution(name)
            asked += [
                re.split(r"[\s<>=!~;\[(]", line)[0]
                for line in found[name].requires or ()
                if "extra ==" not in line and _applies(line)
            ]
    return found


def _applies(requirement: str) -> bool:
    """Whether an environment marker holds here. Those of other systems and of older Pythons name packages that are not installed."""
    try:
        metadata.distribution(re.split(r"[\s<>=!~;\[(]", requirement)[0])
    except metadata.PackageNotFoundError:
        assert ";" in requirement, f"{requirement} is required, and not installed"
        return False
    return True


def nbytes(one: metadata.Distribution) -> int:
    files = {Path(str(file.locate())) for file in one.files or ()}
    return sum(path.stat().st_size for path in files if path.is_file())


def test_it_has_no_torch_and_is_under_150_mb() -> None:
    found = brought()
    assert not {"torch", "transformers", "mpi4py", "tokenizers", "zstandard"} & found.keys()
    sizes = {name: nbytes(one) for name, one in found.items()}
    assert sizes["numpy"] > 10e6, "files are counted"
    ours = sum(
        path.stat().st_size
        for package in ("scavenger", "rollout", "trainer")
        for path in (ROOT / package).rglob("*.py")
    )
    largest = sorted(sizes.items(), key=lambda one: -one[1])[:6]
    # Our own bytecode is about as large as the source.
    assert sum(sizes.values()) + 2 * ours < MAX_MB * 1e6, largest


@pytest.mark.parametrize(
    ("word", "options", "said"),
    [
        ("version", [], scavenger.__version__),
        ("check-config", ["{path}"], "A daemon that starts with it now"),
        ("config", ["show", "{path}"], "state_dir"),
    ],
)
def test_its_commands_import_nothing_else(tmp_path: Path, word: str, options: list[str], said: str) -> None:
    path = tmp_path / "scavenger.toml"
    path.write_text(f'[daemon]\nstate_dir = "{tmp_path}/state"\n[cluster]\nbackend = "local"\n')
    known = {"scavenger", *brought()}
    modules = {
        module for module, names in metadata.packages_distributions().items() if not _known(names, known)
    }
    assert {"torch", "tokenizers", "zstandard"} <= modules
    code = hiding(*sorted(modules)) + PROGRAM.format(
        word=word, options=[one.format(path=path) for one in options]
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert said in done.stdout, done.stderr[-2000:]


def _known(names: list[str], known: set[str]) -> bool:
    return any(re.sub(r"[-_.]+", "-", name).lower() in known for name in names)


def test_what_an_error_says_to_install_is_an_extra_of_ours_and_needs_no_clone() -> None:
    """An environment made of a wheel has no clone beside it; in both `scavenger[EXTRA]` adds to what is installed."""
    extras = set(metadata.metadata("scavenger").get_all("Provides-Extra") or ())
    named = set[str]()
    for part in ("scavenger", "trainer", "rollout"):
        for path in (ROOT / part).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            named |= set(re.findall(r"pip install \W*scavenger\[(\w+)\]", text))
            assert not re.search(r"pip install \W*\.\[", text), f"{path}: of a clone alone"
    assert {"lora", "parquet", "web"} <= named <= extras
