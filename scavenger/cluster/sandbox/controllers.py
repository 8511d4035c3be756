"""slurmctld of a private Slurm: one, or two of which the second stands by.

Boundary: the controllers' processes; IO.

Owns how they are started, told apart, held down and started again. Two can be had on one machine because each gets a hostname of its own
(a UTS namespace) that is a loopback address, and listens there only. The other daemons, and what the configuration says besides, are the
sandbox's.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from scavenger.cluster import processes
from scavenger.cluster.layout import ClusterLayout
from scavenger.cluster.sandbox.conf import CONTROLLER_HOSTS, SandboxLocation
from scavenger.cluster.sandbox.ports import listens

FIRST, BACKUP = "slurmctld", "slurmctld.backup"


class ControllersHost(Protocol):
    """What of the sandbox is needed here."""

    layout: ClusterLayout
    dir: Path
    conf: Path
    site: SandboxLocation

    @property
    def children(self) -> Mapping[str, subprocess.Popen[bytes]]: ...
    def spawn(self, name: str, *argv: str, hostname: str = "") -> None: ...
    def wait_for(self, what: str, deadline: float, condition: Callable[[], bool]) -> None: ...


def missing() -> str:
    """Why no two controllers can run here, in one line; empty when they can."""
    argv = [
        sys.executable,
        "-c",
        "from scavenger.cluster import processes; processes.take_hostname('127.0.0.2')",
    ]
    said = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False).stderr.strip()
    return f"no two controllers here: {said.splitlines()[-1]}" if said else ""


def start(daemons: ControllersHost, deadline: float) -> None:
    """Start the controllers and wait until the first one listens; the second has another pid file, and else the same configuration."""
    _spawn(daemons, FIRST, "-c")  # without the state of an earlier life
    daemons.wait_for("slurmctld's port", deadline, lambda: listens(daemons.site.port))
    if daemons.layout.backup:
        own = (
            daemons.conf.read_text()
            .replace("/run/slurmctld.pid", "/run/backup.pid")
            .replace("/log/slurmctld.log", "/log/backup.log")
        )
        _backup_conf(daemons).write_text(own)
        _spawn(daemons, BACKUP)
        daemons.wait_for("backup's port", deadline, lambda: listens(daemons.site.port, CONTROLLER_HOSTS[1]))


def revive(daemons: ControllersHost) -> set[str]:
    """Start again, as a unit would, with the saved state: the controllers that were killed and are not held. Their names."""
    names = [FIRST, BACKUP] if daemons.layout.backup else [FIRST]
    killed = {
        name
        for name in names
        if daemons.children[name].poll() == -signal.SIGKILL and not hold_path(daemons.dir).exists()
    }
    for name in killed:
        _spawn(daemons, name)
    return killed


def hold_path(base: Path) -> Path:
    """While this file exists `revive` starts no controller: it stays down, as on a host that lost its power."""
    return base / "run/hold"


def pid_of(sandbox: int, conf: str) -> int:
    """The pid of the controller that runs with this configuration below the sandbox's process; 0 while there is none."""
    titles = {pid: processes.title(pid) for pid in processes.descendants(sandbox, processes.snapshot())}
    return next((pid for pid, title in titles.items() if "slurmctld -D" in title and title.endswith(conf)), 0)


def _backup_conf(daemons: ControllersHost) -> Path:
    return daemons.conf.with_name("slurm-backup.conf")


def _spawn(daemons: ControllersHost, name: str, *more: str) -> None:
    conf, host = daemons.conf, ""
    if daemons.layout.backup:
        conf = _backup_conf(daemons) if name == BACKUP else conf
        host = CONTROLLER_HOSTS[name == BACKUP]
    daemons.spawn(name, "slurmctld", "-D", *more, "-f", str(conf), hostname=host)
