"""A test that needs a service says so by a marker. Where the service is missing the test is skipped with the reason, unless
`SCAVENGER_REQUIRE` (comma-separated; set by .ci/run) names the service: then the test fails, so that CI cannot pass by
skipping. What was skipped for want of a service is told again at the end, one line a service."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from scavenger.cluster.pyslurm.client import unfit
from scavenger.cluster.sandbox import accounting
from tests.private_postgres import programs

SLURM = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol")


@pytest.fixture(autouse=True)
def logging_as_at_first() -> Iterator[None]:
    """A command that is tested in this process says where it logs to; the next test's log is its own."""
    yield
    structlog.reset_defaults()


def search_path() -> str:
    """PATH, where Debian keeps daemons, and this venv."""
    return os.pathsep.join(
        [os.environ.get("PATH", ""), "/usr/sbin", "/sbin", str(Path(sys.executable).parent)]
    )


def lacks(*programs: str) -> str:
    """Names the programs that are not on `search_path`; empty when none."""
    missing = [program for program in programs if shutil.which(program, path=search_path()) is None]
    return f"no {', '.join(missing)} here" if missing else ""


def lacks_root_on_debian() -> str:
    """Root file systems are made by Debian's tools and entered as root."""
    return "" if os.geteuid() == 0 and Path("/etc/debian_version").exists() else "not root on Debian here"


@functools.cache
def lacks_pyslurm() -> str:
    """Why no test can use pyslurm here, or "". slurmd tells its version without the slurm.conf that every command wants."""
    if lacks("slurmd"):
        return lacks("slurmd")
    said = subprocess.run(
        [shutil.which("slurmd", path=search_path()) or "slurmd", "-V"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    return unfit(said.split()[-1] if said.split() else "")


@functools.cache
def lacks_bubblewrap() -> str:
    """Why bubblewrap makes no sandbox here, or ""."""
    if lacks("bwrap"):
        return lacks("bwrap")
    argv = ["bwrap", "--unshare-all", "--unshare-user", "--ro-bind", "/", "/", "true"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return f"user namespaces are refused: {done.stderr.strip()}" if done.returncode else ""


def faketime() -> Path | None:
    """The library that moves a process's clock."""
    return next(iter(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")), None)


SERVICES: dict[str, Callable[[], str]] = {
    "slurm": lambda: lacks(*SLURM),
    "mpi": lambda: lacks("mpirun"),
    "pyslurm": lacks_pyslurm,
    "postgres": lambda: (
        "" if os.environ.get("SCAVENGER_TEST_PG") or programs() else "no PostgreSQL server here"
    ),
    "vllm": lambda: "" if importlib.util.find_spec("vllm") else "no vLLM here",
    "accounting": lambda: accounting.missing(search_path()),
    "site": lambda: lacks_root_on_debian() or lacks("mmdebstrap", "systemd-nspawn", "bindfs", "nft"),
    "matrix": lambda: lacks_root_on_debian() or lacks("mmdebstrap"),
    "faketime": lambda: "" if faketime() else "no libfaketime here",
    "containers": lambda: lacks("ch-run") if lacks("apptainer") else "",
    "browser": lambda: lacks("chromium"),
    "sandbox": lacks_bubblewrap,
    "prometheus": lambda: lacks("prometheus"),
    "gpu": lambda: "" if Path("/dev/nvidia0").exists() else "no NVIDIA GPU here",
}


def required() -> set[str]:
    return {name.strip() for name in os.environ.get("SCAVENGER_REQUIRE", "").split(",") if name.strip()}


def pytest_configure(config: pytest.Config) -> None:
    unknown = required() - SERVICES.keys()
    if unknown:
        raise pytest.UsageError(f"SCAVENGER_REQUIRE names {sorted(unknown)}; known are {sorted(SERVICES)}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs come first, and beside them one release of the matrix: they mostly wait, and are to have begun before what mostly computes
    is over. The other release begins when about as much is left for the other processes as it takes.
    """

    def place(item: pytest.Item) -> int:
        lane = _lane(item.nodeid)
        if lane in _ORDER:
            return _ORDER[lane]
        return 2 if lane < "tests/simulate" else 4

    items.sort(key=place)


_ORDER = {"runs": 0, "release": 1, "newest release": 3}


def _lane(nodeid: str) -> str:
    """Whole runs are one after another; all else is file by file. Each release of the matrix is a lane of its own."""
    path, _, name = nodeid.partition("::")
    if path == "tests/system/test_matrix.py":
        return "newest release" if "26.05" in name else "release"
    return "runs" if path.startswith("tests/system/") else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whole runs one after another in one process; the other takes the rest, file by file, then both do.

    Not `--dist loadgroup`: xdist 3.8 hands its groups on in node ids that pytest 9.2 makes anew.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):  # type: ignore[misc]  # xdist's schedulers are untyped
        def _split_scope(self, nodeid: str) -> str:
            return _lane(nodeid)

    config.option.loadscopereorder = False  # by the number of tests, which says nothing of their time
    return Lanes(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for service, missing in SERVICES.items():
        if item.get_closest_marker(service) is None:
            continue
        reason = missing()
        if reason and service in required():
            pytest.fail(
                f"SCAVENGER_REQUIRE asks for {service}: {reason} (scripts/bootstrap --tests installs it)",
                pytrace=False,
            )
        if reason:
            script = (
                "scripts/build-pyslurm builds it"
                if service == "pyslurm"
                else "scripts/bootstrap --tests installs it"
            )
            pytest.skip(f"needs {service}: {reason}; {script} on Debian and Ubuntu as root")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> Iterator[None]:
    """Last, because it must not be overlooked: which services were missing, and what tests have to tell (`told`)."""
    yield
    skipped: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        needs, _, _ = reason.removeprefix("Skipped: ").partition(";")
        if needs.startswith("needs "):
            skipped[needs] = skipped.get(needs, 0) + 1
    told = [
        text
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, text in getattr(report, "user_properties", ())
        if name == "told" and report.when == "call"
    ]
    for needs, count in sorted(skipped.items()):
        terminalreporter.write_line(
            f"NOT RUN: {count} {'test' if count == 1 else 'tests'}, {needs}", yellow=True, bold=True
        )
    for text in told:
        terminalreporter.write_line(text)
