"""Process trees as /proc shows them: who descends from whom, which session a process is in, and ending them exactly.

Owns signalling of processes that are not our own children. Knows nothing of jobs, Slurm or schedulers. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
from collections.abc import Iterable
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWUTS, _CLONE_NEWUSER = 0x04000000, 0x10000000


@dataclass(frozen=True, slots=True)
class Proc:
    """One line of the process table. `start` (clock ticks since boot) tells a reused pid from the process we meant."""

    pid: int
    ppid: int
    session: int
    state: str
    start: int


def read_proc(pid: int) -> Proc | None:
    """The process's table entry, or None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            text = stat.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # the command in parentheses may hold anything
    return Proc(
        pid=pid, ppid=int(fields[1]), session=int(fields[3]), state=fields[0].decode(), start=int(fields[19])
    )


def snapshot() -> dict[int, Proc]:
    """Every process on this machine, by pid."""
    procs = (read_proc(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {proc.pid: proc for proc in procs if proc is not None}


def descendants(root: int, table: dict[int, Proc]) -> tuple[int, ...]:
    """Pids below `root`, parents before children, without `root` itself."""
    children: dict[int, list[int]] = {}
    for proc in table.values():
        children.setdefault(proc.ppid, []).append(proc.pid)
    found: list[int] = []
    stack = sorted(children.get(root, ()), reverse=True)
    while stack:
        pid = stack.pop()
        found.append(pid)
        stack.extend(sorted(children.get(pid, ()), reverse=True))
    return tuple(found)


def title(pid: int) -> str:
    """The process's command line, arguments separated by blanks; empty when it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as cmdline:
            return cmdline.read().replace(b"\0", b" ").strip().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def has_variable(pid: int, entry: str) -> bool:
    """Whether the process was started with `NAME=value` in its environment; False when it is gone or not ours."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            return entry.encode() in environ.read().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def send(pids: Iterable[int], sig: signal.Signals) -> None:
    """Signal each process that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sig)


def kill_trees(roots: Iterable[int]) -> tuple[int, ...]:
    """SIGKILL the trees under `roots`, at once and with no notice; return the pids that were signalled.

    Stops every process before it kills any, so that none can start a child or run a handler in between.
    """
    table = snapshot()
    pids = tuple(
        pid for root in sorted(set(roots)) for pid in (root, *descendants(root, table)) if pid in table
    )
    send(pids, signal.SIGSTOP)
    table = snapshot()
    pids = tuple(sorted({*pids, *(pid for root in pids for pid in descendants(root, table))}))
    send(pids, signal.SIGKILL)
    return pids


def reap(keep: set[int]) -> None:
    """Collect ended processes that we adopted, leaving the statuses of `keep` to their parents' code."""
    while True:
        try:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if info is None or info.si_pid in keep:
            return
        os.waitpid(info.si_pid, 0)


def become_subreaper() -> None:
    """Make orphaned grandchildren ours instead of init's, so that teardown can find them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(sig: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when its parent ends. For use between fork and exec."""
    _prctl(_PR_SET_PDEATHSIG, int(sig))


def as_daemon(hostname: str = "") -> None:
    """Between fork and exec: ended with its parent, and under this hostname if one is given."""
    if hostname:
        take_hostname(hostname)
    die_with_parent()  # last: a new namespace's credentials would undo it


def take_hostname(name: str) -> None:
    """A hostname of this process's own, which no other process on the machine sees. For use between fork and exec, with one thread.

    Without root it needs a user namespace, in which the user id stays the same. Raises `OSError` where the kernel allows neither.
    """
    uid, gid = os.getuid(), os.getgid()
    if _LIBC.unshare(_CLONE_NEWUTS | (_CLONE_NEWUSER if uid else 0)) != 0:
        raise OSError(ctypes.get_errno(), "no namespace for a hostname may be made here")
    socket.sethostname(name)
    if uid:
        for file, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{file}", "w", encoding="ascii") as out:
                out.write(text)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded once: die_with_parent runs after a fork
