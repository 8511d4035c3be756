"""A box as its owner sees it: start it, run programs in it, read and write its files, reach its ports and let it reach chosen ones of ours.

    Box.start --> bwrap … python inside.py <-- packets with descriptors --> this object
    run, start_process      standard streams are pipes of the owner's
    let_reach(port)         a port of the host's loopback, under the same number in the box
    reach(port)             a port of the box, under a number of the host's loopback

A limit, or the owner's `end`, ends the box with all that runs in it; `ended` says why, and every later call raises `BoxEnded`. What comes
out of a box is what its processes like to send: packets are bounded and typed, descriptors are used only as plain files and as sockets.

Boundary: asyncio, processes, descriptors. Knows nothing of who asks, or why.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scavenger.errors import ConfigError
from trainer.sandbox import filter as seccomp
from trainer.sandbox import plan as plans
from trainer.sandbox.plan import Limits, Plan

PROGRAM = Path(__file__).with_name("inside.py")
START_S, ENDING_S = 30.0, 20.0
#: Between hanging up on process 1, which ends then, and ending bubblewrap, which ends it.
KILL_S = 2.0
#: After a command's own end: for what its children still write to its output.
DRAIN_S = 0.5
READ = 64 << 10
MOST_PACKET = 1 << 16
#: Connections of one port that are open at once: each takes two descriptors of its owner, which has other boxes. Beyond, they are closed.
MOST_CONNECTIONS = 64
#: Accepted at once: so many more are open until those beyond are closed.
MOST_ACCEPTED = 32
REMEDY = 'install bubblewrap (0.8 or later) where environment workers run, allow user namespaces there, or set data.sandbox = "none"'


_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class BoxEnded(Exception):
    """The box is over. `limit`: which limit ended it; "" = none did."""

    def __init__(self, limit: str, why: str) -> None:
        super().__init__(f"the sandbox ended: {why}")
        self.limit = limit


@dataclass(frozen=True, slots=True)
class Ended:
    limit: str
    why: str


@dataclass(frozen=True, slots=True)
class Done:
    """Of a command that ended."""

    exit_code: int
    stdout: bytes
    stderr: bytes


def found() -> str:
    """bubblewrap's program. Raises `ConfigError` where it cannot make a box."""
    program = shutil.which("bwrap")
    if program is None:
        raise ConfigError('data.sandbox = "bubblewrap": no program bwrap here', REMEDY)
    said = subprocess.run(
        [program, "--version"], capture_output=True, text=True, check=False, timeout=START_S
    )
    plans.check_version(said.stdout)
    if os.uname().machine not in seccomp.REFUSED:
        raise ConfigError(
            f'data.sandbox = "bubblewrap": no table of system calls for {os.uname().machine}',
            f'known are {", ".join(seccomp.REFUSED)}; set data.sandbox = "none"',
        )
    return program


def fault_here() -> str:
    """Why no box can be made on this machine; "" = one was made, and a program ran in it."""

    async def tried() -> None:
        readable = {sys.prefix, os.path.realpath(sys.prefix), sys.base_prefix, str(PROGRAM.parent)}
        box = Box(Plan(Limits(seconds=START_S), tuple(sorted(readable))), found())
        await box.start()
        try:
            done = await box.run([sys.executable, "-I", "-S", "-c", ""], {})
        finally:
            await box.stop()
        if done.exit_code:
            raise ConfigError(f"{sys.executable} does not work in a box", REMEDY)

    try:
        asyncio.run(tried())
    except (ConfigError, BoxEnded, OSError, subprocess.TimeoutExpired) as error:
        cause = error.cause if isinstance(error, ConfigError) else str(error)
        return cause.removeprefix('data.sandbox = "bubblewrap": ')
    return ""


class Running:
    """A process of a box. Its streams are the owner's."""

    def __init__(
        self, box: Box, pid: int, exited: asyncio.Future[int], stdin: int, stdout: int, stderr: int
    ) -> None:
        self._box, self.pid, self._exited = box, pid, exited
        self.stdin_fd, self.stdout_fd, self.stderr_fd = stdin, stdout, stderr

    async def wait(self) -> int:
        """Its exit code, negative for a signal's. Raises `BoxEnded`."""
        return await asyncio.shield(self._exited)

    @property
    def exit_code(self) -> int | None:
        done = self._exited.done() and not self._exited.cancelled() and self._exited.exception() is None
        return self._exited.result() if done else None

    async def signal(self, number: int) -> None:
        """To it and to what it started."""
        if not self._exited.done():
            await self._box.asked("signal", pid=self.pid, signal=number)


class Box:
    """`await start()`, use, `await stop()`. `readable`, `hidden` and limits are the plan's."""

    def __init__(self, plan: Plan, bwrap: str, python: str = sys.executable) -> None:
        self._plan, self._bwrap, self._python = plan, bwrap, python
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._replies: dict[int, asyncio.Future[tuple[dict[str, Any], list[int]]]] = {}
        self._exits: dict[int, asyncio.Future[int]] = {}
        self._next = 1
        self._ready: asyncio.Future[None] | None = None
        self._servers: dict[tuple[str, int], asyncio.base_events.Server] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._kill_later: asyncio.TimerHandle | None = None
        self._said = b""
        self._errors: asyncio.Task[bytes] | None = None
        self.environment: dict[str, str] = {}
        self.ended: Ended | None = None

    # ---------------------------------------------------------------- its life

    async def start(self) -> None:
        """Raises `ConfigError` where bubblewrap makes no box here."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        given = [
            _memory("filter", seccomp.program(os.uname().machine)),
            _memory("passwd", plans.account()),
            _memory("group", plans.group()),
        ]
        limits = self._plan.limits
        said = {
            "memory_mb": limits.memory_mb,
            "processes": limits.processes,
            "disk_mb": limits.disk_mb,
            "cpu_s": limits.cpu_s,
            "seconds": limits.seconds,
        }
        program = [self._python, "-I", "-S", "-B", str(PROGRAM), str(theirs.fileno()), json.dumps(said)]
        real = {path: os.path.realpath(path) for path in plans.candidates(self._plan) if os.path.exists(path)}
        self._control, self._ready = ours, loop.create_future()
        self.environment = plans.environment(os.environ)
        try:
            argv = plans.arguments(
                self._plan, real, program, filter_fd=given[0], passwd_fd=given[1], group_fd=given[2]
            )
            self._process = await asyncio.create_subprocess_exec(
                self._bwrap,
                *argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(*given, theirs.fileno()),
                start_new_session=True,
                env={},
            )
        finally:
            theirs.close()
            for fd in given:
                os.close(fd)
        assert self._process.stderr is not None
        self._errors = asyncio.create_task(_tail(self._process.stderr))
        loop.add_reader(ours.fileno(), self._came)
        try:
            async with asyncio.timeout(START_S):
                await self._ready
        except (BoxEnded, TimeoutError) as error:
            await self.stop()
            raise ConfigError(
                "data.sandbox: bubblewrap makes no box here",
                REMEDY,
                quoted=self._said.decode(errors="replace"),
            ) from error

    def end(self, limit: str, why: str) -> None:
        """It is over, with all that runs in it. The first reason stays."""
        if self.ended is not None:
            return
        self.ended = Ended(limit, why)
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
        # bubblewrap ends once nothing of the box is left: it is ended itself only where process 1 does not hear that it is over.
        self._kill_later = asyncio.get_running_loop().call_later(KILL_S, self.kill)
        for server in self._servers.values():
            server.close()
        for connection in self._connections:
            connection.cancel()
        waiting: list[asyncio.Future[Any]] = [
            *self._replies.values(),
            *self._exits.values(),
            *([self._ready] if self._ready else []),
        ]
        self._replies, self._exits = {}, {}
        for future in waiting:
            if not future.done():
                future.set_exception(BoxEnded(limit, why))
                future.exception()  # nobody may be waiting for it

    async def stop(self) -> None:
        """End it, and wait until nothing of it is left. May be repeated."""
        self.end("", "its owner ended it")
        if self._process is not None:
            async with asyncio.timeout(ENDING_S):
                await self._process.wait()
        if self._kill_later is not None:
            self._kill_later.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        if self._errors is not None:
            self._said, self._errors = await self._errors, None

    def kill(self) -> None:
        """Without an event loop: at the interpreter's end."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    # ---------------------------------------------------------------- what is asked of its process 1

    async def asked(
        self, what: str, fds: Sequence[int] = (), **more: Any
    ) -> tuple[dict[str, Any], list[int]]:
        """One request and its reply. Raises `BoxEnded`, and `OSError` of what could not be done there."""
        if self.ended is not None:
            raise BoxEnded(self.ended.limit, self.ended.why)
        assert self._control is not None
        number, self._next = self._next, self._next + 1
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        packet = json.dumps({"id": number, "do": what, **more}).encode()
        if len(packet) > MOST_PACKET:
            del self._replies[number]
            raise OSError(36, "a path that long")
        try:
            await self._sent(packet, list(fds))
            message, came = await reply
        finally:
            self._replies.pop(number, None)
        if "error" in message:
            _close(came)
            raise OSError(int(message.get("errno", 0)), str(message["error"])[:500])
        return message, came

    async def _sent(self, packet: bytes, fds: list[int]) -> None:
        assert self._control is not None
        while True:
            try:
                socket.send_fds(self._control, [packet], fds)
                return
            except BlockingIOError:
                await asyncio.sleep(
                    0.005
                )  # its process 1 reads as fast as it can: no event tells of room in the queue
            except OSError:
                self.end("", "its process 1 is gone")
            if self.ended is not None:
                raise BoxEnded(self.ended.limit, self.ended.why)

    def _came(self) -> None:
        assert self._control is not None
        while self.ended is None:
            try:
                data, fds, _, _ = socket.recv_fds(self._control, MOST_PACKET, 8)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self.end("", "its process 1 is gone")
                return
            try:
                self._heard(json.loads(data), fds)
            except (ValueError, TypeError, AttributeError, KeyError):
                _close(fds)
                self.end("", "its process 1 said what nobody understands")
                return

    def _heard(self, message: dict[str, Any], fds: list[int]) -> None:
        if "over" in message:
            self.end(str(message["over"])[:32], str(message.get("why", ""))[:500])
        elif "exit" in message:
            number = int(message["id"])
            exited = self._exits.get(number)
            if exited is not None and not exited.done():
                exited.set_result(int(message["exit"]))
            if number not in self._replies:  # else whoever started it has not taken it yet
                self._exits.pop(number, None)
        elif "ready" in message:
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(None)
        else:
            number = int(message["id"])
            if "pid" in message:
                self._exits[number] = asyncio.get_running_loop().create_future()
            reply = self._replies.get(number)
            if reply is not None and not reply.done():
                reply.set_result((message, fds))
                return
        _close(fds)

    # ---------------------------------------------------------------- programs

    async def start_process(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        stdin: int | None = None,
        output: int | None = None,
        cwd: str = "",
    ) -> Running:
        """Start a program. `stdin`, `output`: descriptors that it gets; without, pipes, whose other ends are the result's."""
        spec = {"argv": list(argv), "env": {**self.environment, **env}, "cwd": cwd}
        ours, theirs = [-1, -1, -1], [-1, -1, -1]
        made: list[int] = []
        try:
            for place, given in enumerate((stdin, output, output)):
                if given is not None:
                    theirs[place] = given
                    continue
                reads, writes = os.pipe2(os.O_CLOEXEC)
                mine, its = (writes, reads) if place == 0 else (reads, writes)
                ours[place], theirs[place] = mine, its
                made.append(its)
            file = _memory("spec", json.dumps(spec).encode())
            made.append(file)
            message, fds = await self.asked("run", [file, *theirs])
            _close(fds)
        except BaseException:
            _close([fd for fd in ours if fd >= 0])
            raise
        finally:
            _close(made)
        number, pid = int(message["id"]), int(message["pid"])
        exited = self._exits.get(number)
        if exited is None:  # the box ended meanwhile
            _close([fd for fd in ours if fd >= 0])
            ended = self.ended or Ended("", "its process 1 is gone")
            raise BoxEnded(ended.limit, ended.why)
        if exited.done():
            self._exits.pop(number, None)
        return Running(self, pid, exited, *ours)

    async def run(self, argv: Sequence[str], env: Mapping[str, str]) -> Done:
        """Run a program to its end, without input. Raises `BoxEnded`; more output than the limit ends the box."""
        empty = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            running = await self.start_process(argv, env, stdin=empty)
        finally:
            os.close(empty)
        most = self._plan.limits.output_mb << 20
        out, err = bytearray(), bytearray()

        def counted() -> None:
            if len(out) + len(err) > most:
                self.end("output", f"a command wrote over {most >> 20:,} MiB of output")

        readers = [
            asyncio.create_task(_collected(fd, into, counted))
            for fd, into in ((running.stdout_fd, out), (running.stderr_fd, err))
        ]
        try:
            code = await running.wait()
            await asyncio.wait(readers, timeout=DRAIN_S)
            if self.ended is not None:
                raise BoxEnded(self.ended.limit, self.ended.why)
        except asyncio.CancelledError:
            with contextlib.suppress(BoxEnded, OSError):
                await asyncio.shield(running.signal(9))
            raise
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
        return Done(code, bytes(out), bytes(err))

    # ---------------------------------------------------------------- files

    async def opened(self, path: str, how: str) -> int:
        """A descriptor of a plain file, `how` = "read" or "write". Raises `OSError`, `BoxEnded`."""
        _, fds = await self.asked(how, path=path)
        if len(fds) != 1 or not stat.S_ISREG(os.fstat(fds[0]).st_mode):
            _close(fds)
            raise OSError(0, f"{path} is no plain file")
        return fds[0]

    async def read(self, path: str, most: int | None = None) -> bytes:
        """The file, or its first `most` bytes."""
        fd = await self.opened(path, "read")
        most = self._plan.limits.disk_mb << 20 if most is None else most
        with os.fdopen(fd, "rb") as file:
            return await asyncio.to_thread(file.read, most)

    async def write(self, path: str, data: bytes) -> None:
        fd = await self.opened(path, "write")
        with os.fdopen(fd, "wb") as file:
            await asyncio.to_thread(file.write, data)

    # ---------------------------------------------------------------- ports

    async def let_reach(self, port: int) -> None:
        """Connections within the box to 127.0.0.1:`port` go to the host's. May be repeated."""
        if ("out", port) in self._servers:
            return
        _, fds = await self.asked("listen", port=port)
        listening = _socket(fds)

        async def there() -> _Stream:
            return await asyncio.open_connection("127.0.0.1", port)

        self._servers["out", port] = await asyncio.start_server(
            self._through(there), sock=listening, backlog=MOST_ACCEPTED
        )

    async def reach(self, port: int) -> int:
        """A port of the host's loopback that leads to the box's `port`. May be repeated."""
        if ("in", port) not in self._servers:

            async def there() -> _Stream:
                _, fds = await self.asked("connect", port=port)
                return await asyncio.open_connection(sock=_socket(fds))

            self._servers["in", port] = await asyncio.start_server(
                self._through(there), "127.0.0.1", 0, backlog=MOST_ACCEPTED
            )
        bound: int = self._servers["in", port].sockets[0].getsockname()[1]
        return bound

    def _through(
        self, there: Callable[[], Awaitable[_Stream]]
    ) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        """What becomes of a connection: its bytes go to one that `there` makes, and back, until the box ends."""
        mine: set[asyncio.Task[None]] = set()

        async def pumped(one: _Stream) -> None:
            try:
                await _pumped(one, await there())
            except (OSError, BoxEnded):
                one[1].close()

        async def through(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if len(mine) >= MOST_CONNECTIONS or self.ended is not None:
                writer.close()
                return
            task = asyncio.create_task(pumped((reader, writer)))
            for tasks in (mine, self._connections):
                tasks.add(task)
                task.add_done_callback(tasks.discard)

        return through


async def _pumped(one: _Stream, other: _Stream) -> None:
    """Bytes both ways until both ends are done."""

    async def copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(READ):
                writer.write(data)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()

    try:
        await asyncio.gather(copied(one[0], other[1]), copied(other[0], one[1]))
    except asyncio.CancelledError:
        for _, writer in (one, other):
            writer.transport.abort()
        raise
    finally:
        for _, writer in (one, other):
            writer.close()


async def _collected(fd: int, into: bytearray, counted: Callable[[], None]) -> None:
    """All that comes of a pipe, which is closed then."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0)
    )
    try:
        while data := await reader.read(READ):
            into += data
            counted()
    finally:
        transport.close()


async def _tail(reader: asyncio.StreamReader, most: int = 4096) -> bytes:
    """The last of what it says."""
    said = b""
    while data := await reader.read(most):
        said = (said + data)[-most:]
    return said


def _memory(name: str, data: bytes) -> int:
    """A file in memory that stands at its beginning."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    with os.fdopen(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _socket(fds: list[int]) -> socket.socket:
    """The one socket that came. Raises `OSError` for anything else."""
    if len(fds) != 1 or not stat.S_ISSOCK(os.fstat(fds[0]).st_mode):
        _close(fds)
        raise OSError(0, "no socket came")
    made = socket.socket(fileno=fds[0])
    made.setblocking(False)
    return made


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
