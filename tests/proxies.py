"""Processes of other users that ask Slurm for the daemon: as threads of a test or, for root, as processes of other accounts."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from scavenger.cluster.proxy.client import ProxyCluster, ProxyLine
from scavenger.cluster.proxy.server import ProxyListener, SubmitRole, ViewRole
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.errors import ScavengerError
from tests.clusters import wait_for

#: Accounts that every Debian has, and nothing runs as.
ENGINES, DAEMON, VIEWER, STRANGER = "games", "news", "list", "backup"


@contextlib.contextmanager
def served(path: Path, role: SubmitRole | ViewRole) -> Iterator[Path]:
    """In a thread of this process, for this user."""
    listener = ProxyListener(path, pwd.getpwuid(os.getuid()), role)
    listener.open()
    thread = threading.Thread(target=_serve, args=(listener,), daemon=True)
    thread.start()
    try:
        yield path
    finally:
        listener.close()
        thread.join(10)


def _serve(listener: ProxyListener) -> None:
    with contextlib.suppress(OSError):  # closed
        listener.serve()


@contextlib.contextmanager
def proxied(env: dict[str, str], folder: Path) -> Iterator[ProxyCluster]:
    """A cluster whose every request goes through a socket. Any job is taken, as the contract's are no engines'."""
    eyes, hands = SlurmCluster(env), SlurmCluster(env)
    user = pwd.getpwuid(os.getuid()).pw_name
    with (
        served(folder / "view", ViewRole(eyes)) as view,
        served(folder / "submit", SubmitRole(hands, folder, lambda _spec: None)) as submit,
    ):
        yield ProxyCluster(
            SlurmCluster({"PATH": "/nonexistent"}),
            ProxyLine("view", view, user, 20.0),
            ProxyLine("submit", submit, user, 20.0),
            user,
        )


@dataclass
class Process:
    """A child with the rights of an account and no others. What it needs was imported before: it may not read this Python."""

    user: str
    pid: int

    def end(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0


def start_as(user: str, work: Callable[[], object], *groups: str) -> Process:
    child = os.fork()
    if child == 0:
        try:
            _become(user, groups)
            work()
        except BaseException:  # noqa: BLE001  whatever it is, this process must not go on as a test
            traceback.print_exc()
        os._exit(1)
    return Process(user, child)


def do_as(user: str, work: Callable[[], object], *groups: str) -> str:
    """What `work` returned, as text, or the error that a user would read, in a process of that account."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = ""
        try:
            _become(user, groups)
            said = str(work())
        except ScavengerError as error:
            said = f"{type(error).__name__}: {error}"
        except BaseException:  # noqa: BLE001  the same
            said = traceback.format_exc()
        os.write(writing, said.encode()[:60_000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        said = file.read().decode()
    os.waitpid(child, 0)
    return said


def _become(user: str, groups: tuple[str, ...]) -> None:
    account = pwd.getpwnam(user)
    os.setgroups([pwd.getpwnam(name).pw_gid for name in groups])
    os.setgid(account.pw_gid)
    os.setuid(account.pw_uid)
    os.umask(0o077)


def listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


@contextlib.contextmanager
def listening_as(user: str, path: Path, make: Callable[[], SubmitRole | ViewRole]) -> Iterator[Process]:
    """A process of `user` that serves the daemon's, as `scavenger slurm-proxy` does; its socket is there."""

    def work() -> None:
        listener = ProxyListener(path, pwd.getpwnam(DAEMON), make())
        listener.open()
        listener.serve()

    process = start_as(user, work, DAEMON)
    try:
        wait_for(f"{path} is served", lambda: listens(path), 20.0)
        yield process
    finally:
        process.end()
