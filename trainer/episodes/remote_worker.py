"""An environment worker in a job of its own, on any host of the site: `scavenger environment-worker run.toml`.

    rank 0's pool <--socket under CURVE--> this process <--pipes--> the worker's process (`worker`), as rank 0 starts its own
                                                |                       | model calls
                                                +-- starts -->  a gateway of the run, on loopback --> the daemon

It reads where the pool listens, and the key pair, from the run's `environment-workers.json`, which only the run's user can read. It passes
messages on, and understands those alone that concern itself. When rank 0 goes, it ends what it plays and waits for the next training job of
the run. On SIGTERM it says goodbye: what it plays is played elsewhere at once.

Exit codes, as rollout workers' (`scavenger.protocol.worker.events`): 69 no training job came, 72 the environment does not work here,
75 told to leave, 78 refused.

Boundary: a socket, two child processes and their pipes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from scavenger import __version__
from scavenger.asyncio_helpers import within
from scavenger.backoff import backoff_s
from scavenger.errors import AuthError, ConfigError, ScavengerError, WireError
from scavenger.protocol import keys
from scavenger.protocol.messages.common import MAX_MESSAGE_BYTES
from scavenger.protocol.worker.events import EXIT_CANNOT_START, EXIT_NO_DAEMON, EXIT_PREEMPTED, EXIT_REFUSED
from trainer.algorithms.rewards import LENGTH, framed
from trainer.episodes import remote, wire
from trainer.episodes.gateway import RunGateway
from trainer.episodes.pool import PROGRAM, worker_environ

WAIT_S = 600.0
#: Rank 0 has this long to answer a Hello.
ANSWER_S = 10.0
LOOK_S = 1.0
ENDING_S = 5.0
#: Ends of the worker's process, or of the gateway's, in a row: then it does not work here.
MOST_VAIN = 5


@dataclass(frozen=True, slots=True)
class Ended:
    """Why a session is over. `code`: this process's exit code; None: it joins again, or waits for the next training job."""

    reason: str
    code: int | None = None
    vain: bool = False  # its worker's process ended before it had played anything


def say(line: str) -> None:
    print(f"environment worker: {line}", flush=True)


def place(environ: Mapping[str, str]) -> tuple[str, str]:
    """Host and job, as the scheduler calls them; a job of the local backend has the second names."""
    host = environ.get("SLURMD_NODENAME") or environ.get("SCAVENGER_NODE") or socket.gethostname()
    return host, environ.get("SLURM_JOB_ID") or environ.get("SCAVENGER_JOB_ID", "")


class Gateway(Protocol):
    """`trainer.episodes.gateway.RunGateway`, of this process's own."""

    endpoint: str

    @property
    def starts(self) -> int: ...
    def check(self) -> None: ...


def own_gateway(access: remote.WorkerAccess) -> RunGateway:
    return RunGateway(None, access.arguments, say, Path(access.folder))


class RemoteWorker:
    """`run` until it is over. `stop` may be set at any time. `beat_s`, `lease_s`: as rank 0's."""

    def __init__(
        self,
        file: Path,
        *,
        wait_s: float = WAIT_S,
        argv: Sequence[str] = PROGRAM,
        beat_s: float = wire.BEAT_S,
        lease_s: float = wire.LEASE_S,
        gateway: Callable[[remote.WorkerAccess], AbstractContextManager[Gateway]] = own_gateway,
    ) -> None:
        self._file, self._wait_s, self._argv = file, wait_s, argv
        self._beat_s, self._lease_s, self._gateway = beat_s, lease_s, gateway
        self.stop = asyncio.Event()

    async def run(self) -> int:
        """The exit code."""
        tries, vain, until = 0, 0, time.monotonic() + self._wait_s
        while not self.stop.is_set():
            access = remote.access_in(self._file)
            if access is not None:
                joined, ended = await self._session(access)
                say(ended.reason)
                if ended.code is not None:
                    return ended.code
                vain = vain + 1 if ended.vain else 0
                if vain >= MOST_VAIN:
                    return EXIT_CANNOT_START
                tries = 0 if joined and not ended.vain else tries + 1
                until = time.monotonic() + self._wait_s if joined else until
            if time.monotonic() > until:
                say(f"no training job opened {self._file} within {self._wait_s:g} s")
                return EXIT_NO_DAEMON
            await within(self.stop, backoff_s(0.2, LOOK_S, max(1, tries)))
        return EXIT_PREEMPTED

    async def _session(self, access: remote.WorkerAccess) -> tuple[bool, Ended]:
        """Join, and play until it is over. Whether rank 0 took it, and why it is over."""
        context = zmq.asyncio.Context()
        link = context.socket(zmq.DEALER)
        try:
            for option, value in (
                (zmq.RECONNECT_IVL, -1),  # a connection that broke ends the session, at both ends
                (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
                (zmq.LINGER, remote.LINGER_MS),
            ):
                link.setsockopt(option, value)
            keys.secure(link, access.server_key, keys.KeyPair(access.public, access.secret))
            link.connect(access.endpoint)
            hello = wire.Hello(__version__, *place(os.environ))
            await link.send(wire.encode(hello))
            answer = await self._answer(link)
            if not isinstance(answer, wire.Setup):
                return False, _refusal(answer, access.endpoint)
            say(f"joined run {access.run} at {access.endpoint}")
            return True, await self._joined(access, link, answer)
        except (WireError, zmq.ZMQError) as error:
            return False, Ended(f"rank 0 at {access.endpoint}: {error}")
        finally:
            link.close()
            await asyncio.to_thread(context.term)  # for as long as its last words need, `LINGER_MS` at most

    async def _answer(self, link: zmq.asyncio.Socket) -> wire.ToRemote | None:
        """None: rank 0 says nothing, or this worker is to leave. One that is busy, and says that it is there, has as long as it needs."""
        until = time.monotonic() + ANSWER_S
        while not self.stop.is_set() and (left := until - time.monotonic()) > 0:
            if await link.poll(min(left, self._beat_s) * 1000):
                found = wire.to_remote(await link.recv())
                if not isinstance(found, wire.Alive):
                    return found
                until = time.monotonic() + ANSWER_S
                await link.send(wire.encode(wire.Alive()))  # else it is taken for lost
        return None

    async def _joined(
        self, access: remote.WorkerAccess, link: zmq.asyncio.Socket, setup: wire.Setup
    ) -> Ended:
        with self._gateway(access) as gateway:
            played = _Played(link, self._beat_s, self._lease_s)
            process = await asyncio.create_subprocess_exec(
                access.python,
                *self._argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=worker_environ(access.python),
            )
            try:
                played.to_process(process, msgspec.structs.replace(setup, endpoint=gateway.endpoint))
                ended = await self._first_end(played, process, gateway)
            finally:
                await _over(process)
            return ended

    async def _first_end(
        self, played: _Played, process: asyncio.subprocess.Process, gateway: Gateway
    ) -> Ended:
        """Until the first of them ends. Rank 0 is told why, unless it is the one."""
        parts = {
            asyncio.create_task(self._told_to_leave()),
            asyncio.create_task(played.from_rank_0(process)),
            asyncio.create_task(played.from_process(process)),
            asyncio.create_task(played.beat()),
            asyncio.create_task(_kept(gateway)),
        }
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            ended = min((task.result() for task in done), key=lambda one: one.code is None)
            # A scheduler signals all processes of a job in no order: the worker's may have gone before this one was told.
            if process.returncode == -signal.SIGTERM and await within(self.stop, LOOK_S):
                ended = await self._told_to_leave()
            if not played.rank_0_is_gone:
                with contextlib.suppress(TimeoutError):  # its connection broke
                    async with asyncio.timeout(remote.LINGER_MS / 1000):
                        failed = ended.code != EXIT_PREEMPTED
                        await played.tell(wire.Goodbye(ended.reason[:1000], failed))
            return ended
        finally:
            for task in parts:
                task.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def _told_to_leave(self) -> Ended:
        await self.stop.wait()
        return Ended("it was told to leave", EXIT_PREEMPTED)


class _Played:
    """One session's messages, both ways."""

    def __init__(self, link: zmq.asyncio.Socket, beat_s: float, lease_s: float) -> None:
        self._link, self._beat_s, self._lease_s = link, beat_s, lease_s
        self._any = False  # an episode was played to its end
        self.rank_0_is_gone = False

    async def tell(self, message: wire.FromRemote) -> None:
        await self._link.send(wire.encode(message))

    def to_process(self, process: asyncio.subprocess.Process, message: wire.Setup | wire.Play) -> None:
        assert process.stdin is not None
        process.stdin.write(framed(wire.encode(message)))

    async def from_rank_0(self, process: asyncio.subprocess.Process) -> Ended:
        """Pass on what is to be played."""
        while await self._link.poll(self._lease_s * 1000):
            message = wire.to_remote(await self._link.recv())
            match message:
                case wire.Setup() | wire.Play():
                    self.to_process(process, message)
                case wire.Leave():
                    self.rank_0_is_gone = True
                    return Ended("the training job has ended, or its episodes have")
                case wire.Refused():
                    self.rank_0_is_gone = True
                    return _refusal(message, "")
        self.rank_0_is_gone = True
        return Ended(f"rank 0 was silent for {self._lease_s:g} s")

    async def from_process(self, process: asyncio.subprocess.Process) -> Ended:
        """Pass on what was played."""
        assert process.stdout is not None
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
                frame = await process.stdout.readexactly(length)
                message = wire.to_trainer.decode(frame)
                self._any |= isinstance(message, wire.Played)
                if len(frame) > MAX_MESSAGE_BYTES and isinstance(message, wire.Played):
                    why = f"what it said has {len(frame):,} bytes, over the limit of {MAX_MESSAGE_BYTES:,}"
                    frame = wire.encode(wire.Played(message.episode, error=why, final=message.final))
                await self._link.send(frame)
        code = await process.wait()
        return Ended(f"the worker's process ended with exit status {code}", vain=not self._any)

    async def beat(self) -> Ended:
        while True:
            await self.tell(wire.Alive())
            await asyncio.sleep(self._beat_s)


async def _kept(gateway: Gateway) -> Ended:
    """Start the gateway again where it ended."""
    while gateway.starts <= MOST_VAIN:
        await asyncio.sleep(LOOK_S)
        gateway.check()
    return Ended("its gateway does not stay: look at its words above", EXIT_CANNOT_START)


def _refusal(answer: wire.ToRemote | None, endpoint: str) -> Ended:
    if isinstance(answer, wire.Refused):
        words = f"rank 0 refused this worker: {answer.reason}"
        words += f"; {answer.remedy}" if answer.remedy else ""
        return Ended(words, None if answer.again else EXIT_REFUSED)
    return Ended(f"rank 0 did not answer at {endpoint}")


async def _over(process: asyncio.subprocess.Process) -> None:
    """Its pipe is closed, and it ends; or it is killed."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        async with asyncio.timeout(ENDING_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _run(worker: RemoteWorker) -> int:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop.set)
    return await worker.run()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.episodes.remote_worker", allow_abbrev=False)
    parser.add_argument("file", type=Path, help=f"the run's {remote.FILE}")
    parser.add_argument(
        "--wait", type=float, default=WAIT_S, help="seconds without a training job after which it ends"
    )
    options = parser.parse_args(argv)
    try:
        return asyncio.run(_run(RemoteWorker(options.file, wait_s=options.wait)))
    except ScavengerError as error:
        print(f"environment worker: {error}", file=sys.stderr, flush=True)
        return EXIT_REFUSED if isinstance(error, AuthError | ConfigError) else error.exit_code


if __name__ == "__main__":
    sys.exit(main())
