"""Process 1 of a box. Starts processes as its owner tells it to, opens files and sockets for it, and ends the box at a limit.

    owner --> {"id", "do": "run" | "signal" | "read" | "write" | "listen" | "connect", …}, descriptors    one packet each
    owner <-- {"id", …}, a descriptor                                                                      the reply
              {"id", "exit"}                                                                               a process ended
              {"over": LIMIT, "why"}                                                                       then it ends, and so does the box

Files and sockets are opened here and used by the owner: so a path means what it means in the box, and a port is one of the box's network.
Process 1 cannot be killed, stopped or traced from within the box, and when it ends, the kernel ends all others.

Started as `python -I -S inside.py CONTROL_FD LIMITS_JSON`. Standard library only: it knows no package and runs before any.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import stat
import sys
import time
from typing import Any, NoReturn

#: Between two looks at the processes, and at how many were started since.
LOOK_S, COUNT_S = 0.25, 0.05
#: Between two looks.
MOST_REAPED = 256
MOST_PACKET = 1 << 16
#: A file of the box takes memory beside what is in it.
BYTES_OF_A_FILE = 4096
NICE = 10
#: Where relative paths begin (`plan.WORK`).
WORK = "/tmp/work"
#: Files that one process has open; sockets of the whole box: what they buffer is the kernel's memory, which no process has.
MOST_OPEN, MOST_SOCKETS = 1024, 1024
_PR_SET_DUMPABLE = 4
#: What a process takes, of /proc/PID/status, without files, which are the kernel's cache or counted as disk. Page tables are among it: a
#: mapping that is only read takes nothing else.
HELD = (b"RssAnon:", b"RssShmem:", b"VmSwap:", b"VmPTE:", b"HugetlbPages:")


class Over(Exception):
    """A limit is reached: its name, and what was found."""

    def __init__(self, limit: str, why: str) -> None:
        super().__init__(why)
        self.limit = limit


def used(pids: list[str]) -> tuple[int, float]:
    """(bytes of memory of all processes but this one, CPU seconds of all). A process may end while it is looked at."""
    memory, ticks = 0, 0
    hertz = os.sysconf("SC_CLK_TCK")
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            ticks += sum(int(fields[place]) for place in (11, 12, 13, 14))
            if pid != "1":
                memory += memory_of(pid)
        except (OSError, IndexError, ValueError):
            continue
    return memory, ticks / hertz


def memory_of(pid: str) -> int:
    """Bytes that a process takes. Where its first thread has ended, which holds nothing then, another one tells. Raises `OSError`."""
    found = _held(f"/proc/{pid}/status")
    threads = os.listdir(f"/proc/{pid}/task") if found is None else []
    for thread in threads:
        with contextlib.suppress(OSError):
            found = _held(f"/proc/{pid}/task/{thread}/status")
        if found is not None:
            break
    return found or 0


def _held(path: str) -> int | None:
    """None: there is no memory, or none any more."""
    with open(path, "rb") as file:
        held = [line.split() for line in file if line.startswith(HELD)]
    return sum(int(line[1]) << 10 for line in held) if held else None


def sockets() -> int:
    """Of all processes of the box: its network has no others."""
    with open("/proc/net/sockstat", "rb") as file:
        return int(file.readline().split()[2])


class Watch:
    """The limits of all processes together."""

    def __init__(self, limits: dict[str, float], now: float) -> None:
        self._limits, self._began, self._looked_at = limits, now, now
        self._last_pid = 0

    def look(self, now: float, alone: bool) -> None:
        """Raises `Over`. Looks at every process at times, and at once when many were started since the last look."""
        limits = self._limits
        if limits["seconds"] and now - self._began > limits["seconds"]:
            raise Over("seconds", f"it was open for over {limits['seconds']:g} s")
        with open("/proc/loadavg", "rb") as file:
            last = int(file.read().split()[-1])
        many = last - self._last_pid > limits["processes"] / 2 or last < self._last_pid
        if not many and (alone or now - self._looked_at < LOOK_S):
            return
        self._last_pid, self._looked_at = last, now
        pids = [name for name in os.listdir("/proc") if name.isdigit()]
        # Before any of them is read: a fork bomb of root, whom RLIMIT_NPROC does not bind, doubles while a thousand are.
        if len(pids) - 1 > limits["processes"]:
            raise Over("processes", f"{len(pids) - 1} processes, over the limit of {limits['processes']:g}")
        memory, cpu = used(pids)
        if memory > limits["memory_mb"] * (1 << 20):
            raise Over(
                "memory", f"{memory >> 20:,} MiB of memory, over the limit of {limits['memory_mb']:,g}"
            )
        if limits["cpu_s"] and cpu > limits["cpu_s"]:
            raise Over("cpu", f"{cpu:.1f} s of CPU time, over the limit of {limits['cpu_s']:g}")
        if (opened := sockets()) > MOST_SOCKETS:
            raise Over("memory", f"{opened:,} sockets are open, over the limit of {MOST_SOCKETS:,}")
        for folder in ("/tmp", "/dev/shm"):
            found = os.statvfs(folder)
            files, most = (
                found.f_files - found.f_ffree,
                max(1024, int(limits["disk_mb"]) * (1 << 20) // BYTES_OF_A_FILE),
            )
            if files > most:
                raise Over("disk", f"{files:,} files in {folder}, over the limit of {most:,}")


class Inside:
    def __init__(self, control: socket.socket, limits: dict[str, float]) -> None:
        self._control, self._limits = control, limits
        self._running: dict[int, int] = {}  # pid -> id of what started it
        self._watch = Watch(limits, time.monotonic())

    def serve(self) -> None:
        """Until the owner hangs up. Raises `Over`."""
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        while True:
            watched: list[Any] = [self._control, wake]
            ready, _, _ = select.select(watched, [], [], COUNT_S if self._running else LOOK_S)
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
            self._reap()
            self._watch.look(time.monotonic(), not self._running)
            if self._control in ready and not self._take():
                return

    def _take(self) -> bool:
        data, fds, _flags, _ = socket.recv_fds(self._control, MOST_PACKET, 8)
        if not data:
            return False
        try:
            asked = json.loads(data)
            self._do(asked, fds)
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _say(self, fds: list[int] | None = None, **message: Any) -> None:
        with contextlib.suppress(
            BrokenPipeError, ConnectionResetError
        ):  # the owner is gone, and this process goes next
            socket.send_fds(self._control, [json.dumps(message).encode()], fds or [])

    def _do(self, asked: dict[str, Any], fds: list[int]) -> None:
        number, what = asked["id"], asked["do"]
        try:
            if what == "run":
                with open(fds[0], "rb", closefd=False) as file:
                    spec = json.loads(file.read())
                pid = self._start(spec, fds[1:4])
                self._running[pid] = number
                self._say(id=number, pid=pid)
                return
            if what == "signal":
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(asked["pid"], asked["signal"])
                self._say(id=number)
                return
            opened = self._opened(asked)
            try:
                self._say([opened], id=number)
            finally:
                os.close(opened)
        except OSError as error:
            self._say(id=number, error=f"{error.strerror or error}", errno=error.errno or 0)

    def _opened(self, asked: dict[str, Any]) -> int:
        what = asked["do"]
        if what in ("listen", "connect"):
            there = ("127.0.0.1", int(asked["port"]))
            made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                made.setblocking(False)
                if what == "listen":
                    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    made.bind(there)
                    made.listen(128)
                else:
                    with contextlib.suppress(BlockingIOError):
                        made.connect(there)
            except OSError:
                made.close()
                raise
            return made.detach()
        path = os.path.join(WORK, asked["path"])
        if what == "write":
            os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        else:
            flags = os.O_RDONLY
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(0, f"{asked['path']} is no plain file")
        return fd

    def _start(self, spec: dict[str, Any], fds: list[int]) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            self._become(spec, fds)
        finally:
            os._exit(127)

    def _become(self, spec: dict[str, Any], fds: list[int]) -> NoReturn:
        signal.set_wakeup_fd(-1)
        for name in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT):
            signal.signal(name, signal.SIG_DFL)
        os.setsid()
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
        os.closerange(3, 1 << 16)
        memory, disk = int(self._limits["memory_mb"]) << 20, int(self._limits["disk_mb"]) << 20
        processes = int(self._limits["processes"])
        for what, most in (
            (resource.RLIMIT_DATA, memory),
            (resource.RLIMIT_FSIZE, disk),
            (resource.RLIMIT_NPROC, processes),
            (resource.RLIMIT_NOFILE, MOST_OPEN),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_MEMLOCK, 1 << 20),
            (resource.RLIMIT_MSGQUEUE, 0),
        ):
            _, hard = resource.getrlimit(what)
            bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(what, (bound, bound))
        if self._limits["cpu_s"]:
            seconds = max(1, int(self._limits["cpu_s"]) + 1)
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        os.nice(NICE)
        try:
            os.chdir(spec["cwd"] or WORK)
            os.execvpe(spec["argv"][0], spec["argv"], spec["env"])
        except OSError as error:
            os.write(2, f"{spec['argv'][0]}: {error.strerror}\n".encode())
            os._exit(126 if isinstance(error, PermissionError) else 127)

    def _reap(self) -> None:
        for _ in range(
            MOST_REAPED
        ):  # a fork bomb leaves orphans faster than they are reaped, and the limits come first
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            number = self._running.pop(pid, None)
            if number is not None:
                self._say(id=number, exit=os.waitstatus_to_exitcode(status))


def main() -> int:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    control = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    inside = Inside(control, json.loads(sys.argv[2]))
    inside._say(ready=True)
    try:
        inside.serve()
    except Over as over:
        # At once: while Python words the reason and ends, a fork bomb would go on to double.
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        inside._say(over=over.limit, why=str(over))
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
