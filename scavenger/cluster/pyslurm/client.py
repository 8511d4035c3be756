"""Slurm through pyslurm in a process of its own: observations come from there, and what changes jobs goes by Slurm's commands.

Boundary: the helper process that loads Slurm's library; IO.

Owns that process: it is started when first needed, given a deadline for every answer, ended when it misses one, and started again after a
pause that doubles. All of that is one named failed observation (`ErrorKind.BACKEND`), never a hung daemon. Whether a pyslurm may be used
here at all, and why not, is `unfit`. Never imports pyslurm.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import math
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import structlog

from scavenger.cluster import processes
from scavenger.cluster.error_kind import ErrorKind, error_kind_of
from scavenger.cluster.model import ClusterInfo, ClusterView, Job, JobLife, JobSpec
from scavenger.cluster.port import RpcCounter
from scavenger.cluster.pyslurm import messages as wire
from scavenger.cluster.pyslurm import rows as read
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.errors import ClusterUnavailable

log = structlog.get_logger()

#: How long a process that was killed, or closed its end, is waited for.
END_S = 5.0
#: An import takes 0.1 s; on a busy file system of a cluster, long.
START_S = 30.0
MAX_PAUSE_S = 60.0
_KEPT_WORDS = 2000
# What one request costs, as sdiag counts it: `node().get()` loads configuration and partitions too.
_NODES = {"node_info": 1, "partition_info": 1, "build_info": 1}
_JOBS = {"job_info": 1}


def unfit(slurm_version: str) -> str:
    """Why pyslurm cannot be used with this Slurm, or "". Imports nothing: only the process that will use it does."""
    if importlib.util.find_spec("pyslurm") is None:
        return f"no pyslurm is installed for {sys.executable}"
    try:
        version = importlib.metadata.version("pyslurm")
    except importlib.metadata.PackageNotFoundError:
        return "the pyslurm on the path says no version"
    return mismatch(version, slurm_version)


def mismatch(pyslurm_version: str, slurm_version: str) -> str:
    """Why this pyslurm does not fit this Slurm, or "". X.Y must be the same: the library's structures change with it."""
    ours, theirs = _x_y(pyslurm_version), _x_y(slurm_version)
    if ours is None or theirs is None:
        return f"pyslurm {pyslurm_version} or Slurm {slurm_version} has no version that can be compared"
    if ours != theirs:
        return f"pyslurm {pyslurm_version} is for Slurm {ours[0]}.{ours[1]:02d}, and this is Slurm {slurm_version}"
    return ""


def _x_y(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return None if match is None else (int(match[1]), int(match[2]))


class PyslurmCluster:
    """`port.Cluster` with pyslurm's eyes and the commands' hands. Not for several threads at once (as every backend).

    What is asked for seldom (configuration, partitions) and what changes jobs goes by the commands.
    """

    def __init__(
        self, commands: SlurmCluster, timeout_s: float = 20.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._commands = commands
        self._child = Child(commands.environment, timeout_s, clock)

    @property
    def rpc(self) -> RpcCounter:
        return self._commands.rpc

    @property
    def pid(self) -> int:
        """Of the process that has pyslurm; 0 while there is none."""
        return self._child.pid

    def start(self) -> str:
        """Start the process now and return pyslurm's version.

        Raises `ClusterUnavailable` when it cannot be imported there, or lacks a call that is made.
        """
        return self._child.start()

    def unreadable(self) -> str:
        """What of the site's own records cannot be read, or "": asked once, and a Slurm that does not answer says nothing of them."""
        try:
            self.view()
        except ClusterUnavailable as error:
            return error.cause if error.error_kind == ErrorKind.PARTIAL else ""
        return ""

    def info(self) -> ClusterInfo:
        return replace(self._commands.info(), backend="pyslurm")

    def view(self) -> ClusterView:
        self.rpc.add(_NODES)
        rows = self._rows("view")
        return self._commands.view_of(read.read_nodes(rows.nodes), read.read_jobs(rows.jobs))

    def jobs(self) -> tuple[Job, ...]:
        return read.read_jobs(self._rows("jobs").jobs)

    def _rows(self, what: Literal["view", "jobs"]) -> wire.RowsReply:
        self.rpc.add(_JOBS)
        reply = self._child.ask(what)
        self.rpc.add(reply.more_rpcs)
        return reply

    def submit(self, spec: JobSpec) -> int:
        return self._commands.submit(spec)

    def cancel(self, job_ids: tuple[int, ...]) -> None:
        self._commands.cancel(job_ids)

    def requeue(self, job_id: int) -> None:
        self._commands.requeue(job_id)

    def release(self, job_id: int, node: str) -> None:
        self._commands.release(job_id, node)

    def accounting(self, job_ids: tuple[int, ...]) -> tuple[JobLife, ...]:
        return self._commands.accounting(job_ids)

    def close(self) -> None:
        """End the process."""
        self._child.end()


class Child:
    """The process, and its patience: one request at a time, each with a deadline."""

    def __init__(self, env: dict[str, str], timeout_s: float, clock: Callable[[], float]) -> None:
        # the whole list of an array's tasks, not its first 64 characters
        self._env = {**env, "SLURM_BITSTR_LEN": "0"}
        self._timeout_s, self._clock = timeout_s, clock
        self._process: subprocess.Popen[bytes] | None = None
        self._lost: list[subprocess.Popen[bytes]] = []  # killed, and not gone yet
        self._version = ""
        self._words = b""  # the last of what it wrote to stderr
        self._number = 0
        self._failures = 0
        self._not_before = 0.0

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def start(self) -> str:
        if self._process is not None and self._process.poll() is not None:
            self._failed(f"pyslurm's process had ended with status {self._process.returncode}")
        if self._process is None:
            self._spawn()
        return self._version

    def ask(self, what: Literal["view", "jobs"]) -> wire.RowsReply:
        """One request and its answer. Raises `ClusterUnavailable`; after a missed deadline or a broken pipe the process is gone."""
        self.start()
        self._number += 1
        number = self._number
        try:
            self._write(wire.frame(wire.PyslurmRequest(number, what)))
            reply = self._read(self._timeout_s)
        except ClusterUnavailable as error:
            raise self._failed(error.cause) from error
        if isinstance(reply, wire.Failed) and reply.number == number:
            self._failures = 0  # the process is well; it is Slurm that is not
            error_kind = (
                ErrorKind.PARTIAL if reply.malformed else error_kind_of(reply.words) or ErrorKind.NO_REPLY
            )
            raise ClusterUnavailable(f"pyslurm: {reply.words}", error_kind=error_kind)
        if not isinstance(reply, wire.RowsReply) or reply.number != number:
            raise self._failed(f"pyslurm's process answered {type(reply).__name__} to request {number}")
        self._failures = 0
        return reply

    def _spawn(self) -> None:
        wait_s = self._not_before - self._clock()
        if wait_s > 0:
            cause = f"pyslurm's process failed {self._failures} times, and is started again in {wait_s:.0f} s: {self._last_words()}"
            raise ClusterUnavailable(cause, error_kind=ErrorKind.BACKEND)
        argv = [
            sys.executable,
            "-P",
            "-m",
            "scavenger.cluster.pyslurm.process",
        ]  # no modules of the folder that we run in
        # a session of its own: Ctrl-C is for the daemon, which then closes the pipe
        try:
            self._process = subprocess.Popen(
                argv,
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:  # no process, memory or descriptor left
            raise self._failed(f"pyslurm's process cannot be started: {error.strerror}") from error
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        try:
            hello = self._read(START_S)
        except ClusterUnavailable as error:
            raise self._failed(error.cause) from error
        if not isinstance(hello, wire.Hello):
            raise self._failed(f"pyslurm's process began with {type(hello).__name__}")
        if hello.lacks:
            raise self._failed(
                f"pyslurm {hello.version} has no {' and no '.join(hello.lacks)}, which are read"
            )
        self._version = hello.version

    def _failed(self, cause: str) -> ClusterUnavailable:
        """End the process and remember when it may be started again."""
        if self._process is not None:
            self._drain()
        self.end()
        self._failures += 1
        self._not_before = self._clock() + min(MAX_PAUSE_S, 2.0 ** (self._failures - 1))
        words = self._last_words()
        return ClusterUnavailable(
            f"{cause}; its last words: {words}" if words else cause, error_kind=ErrorKind.BACKEND
        )

    def end(self) -> None:
        self._lost = [
            lost for lost in self._lost if lost.poll() is None
        ]  # those that went meanwhile are reaped
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            try:
                processes.kill_trees([process.pid])
            except (
                OSError
            ):  # no descriptor left to read /proc with: it has no children that would outlive it for long
                process.kill()
        try:
            process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:  # the kernel holds it (a file system that hangs)
            self._lost.append(process)
            log.warning("pyslurm's process was killed and is still there", pid=process.pid)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    # ---------------------------------------------------------------- the pipes

    def _write(self, data: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            os.write(
                self._process.stdin.fileno(), data
            )  # a request is smaller than what a pipe takes at once
        except (BrokenPipeError, BlockingIOError) as error:
            raise ClusterUnavailable(f"pyslurm's process takes no request: {error}") from error

    def _read(self, timeout_s: float) -> wire.Reply:
        deadline = self._clock() + timeout_s
        length = wire.length_of(self._exactly(wire.HEADER.size, deadline, timeout_s))
        return wire.decode_reply(self._exactly(length, deadline, timeout_s))

    def _exactly(self, nbytes: int, deadline: float, timeout_s: float) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        out, err = self._process.stdout.fileno(), self._process.stderr.fileno()
        data = bytearray()
        poll = (
            select.poll()
        )  # select() refuses descriptors from 1024 on, which a daemon with many workers has
        for descriptor in (out, err):
            poll.register(descriptor, select.POLLIN)
        while len(data) < nbytes:
            ready = {
                descriptor
                for descriptor, _ in poll.poll(math.ceil(1000.0 * max(0.0, deadline - self._clock())))
            }
            if err in ready and not self._drain():
                poll.unregister(err)  # it closed its stderr: only the replies are left
            if out in ready:
                try:
                    part = os.read(out, min(1 << 20, nbytes - len(data)))
                except BlockingIOError:
                    continue
                if not part:
                    raise ClusterUnavailable(f"pyslurm's process {_ending(self._process)}")
                data += part
            elif not ready or self._clock() >= deadline:  # what only complains does not answer
                raise ClusterUnavailable(
                    f"pyslurm gave no answer within {timeout_s:g} s, and its process was ended"
                )
        return bytes(data)

    def _drain(self) -> bool:
        """Keep the end of what the process wrote to stderr. False when it has closed that."""
        assert self._process is not None
        assert self._process.stderr is not None
        while True:
            try:
                part = os.read(self._process.stderr.fileno(), 1 << 16)
            except BlockingIOError:
                return True
            if not part:
                return False
            self._words = (self._words + part)[-_KEPT_WORDS:]

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._words.decode(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else ""


def _ending(process: subprocess.Popen[bytes]) -> str:
    try:
        return f"ended (status {process.wait(timeout=END_S)})"
    except subprocess.TimeoutExpired:
        return "closed its output and goes on"
