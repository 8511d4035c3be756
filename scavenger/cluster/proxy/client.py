"""`port.Cluster` where others ask Slurm for the daemon (`server`): jobs are the engines' user's, the queue is what another user sees.

Boundary: the daemon's ends of the sockets; IO.

Owns one connection a request, so that it outlives the restart of either side. A process that is not there, or ends in the middle, is a
Slurm that does not answer: `ClusterUnavailable`. What it replies is typed and bounded, and else not trusted.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from scavenger.cluster import framing, port
from scavenger.cluster.error_kind import ErrorKind
from scavenger.cluster.model import ClusterInfo, ClusterView, Job, JobLife, JobSpec
from scavenger.cluster.port import RpcCounter
from scavenger.cluster.proxy import messages as wire
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.cluster.unix_users import own_user, uid_of
from scavenger.config import DaemonConfig
from scavenger.errors import ClusterError, ClusterUnavailable, ConfigError, SubmitUnknown
from scavenger.protocol import keys

R = TypeVar("R")
#: A poll is four commands, one after the other, and others may come first.
COMMANDS = 5
#: Between two attempts at a socket whose queue of connections is full.
RECONNECT_S = 0.05


class Line(Protocol):
    """Somebody who asks Slurm for the daemon, and is asked one thing at a time."""

    @property
    def rpc(self) -> RpcCounter: ...

    def ask(self, request: wire.Request, kind: type[R]) -> R:
        """Raises `ClusterError` as `port.Cluster` does."""
        ...


class ProxyLine:
    """A socket's client. `user`: of the process that listens there.

    It is looked up here and never again: a directory service that fails later is no fault of a request. Raises `ConfigError`.
    """

    def __init__(self, role: wire.Role, path: Path, user: str, timeout_s: float) -> None:
        self._role, self._path, self._user, self._timeout_s = role, path, user, COMMANDS * timeout_s
        self._uid = uid_of(user)
        self.rpc = RpcCounter()

    def ask(self, request: wire.Request, kind: type[R]) -> R:
        """Raises `ClusterError` as `port.Cluster` does."""
        return reply_in(self._exchange(request), request, kind, self._who, self.rpc)

    @property
    def _who(self) -> str:
        return f"scavenger slurm-proxy --role {self._role}"

    def _exchange(self, request: wire.Request) -> wire.ProxyAnswer:
        data, sent, deadline = framing.frame(request), False, time.monotonic() + self._timeout_s
        if len(data) > wire.MAX_REQUEST_BYTES:
            raise ClusterError(f"a request of {len(data)} bytes is too large", "shorten the job script")
        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(self._timeout_s)
                self._connect(sock, deadline)
                self._check_peer(sock)
                sent = True
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    sock.sendall(data)  # where it was refused unread, the reply says why
                most_bytes = wire.MAX_REPLY_BYTES[self._role]
                return framing.receive(sock, wire.answers, most_bytes, self._who, deadline)
        except (OSError, ClusterUnavailable) as error:
            cause = f"{self._who} does not answer at {self._path}: {error}"
            if sent and isinstance(request, wire.SubmitJob):
                raise SubmitUnknown(cause) from error
            unit = "scavenger-slurm-submit" if self._role == "submit" else "scavenger-slurm-view"
            raise _not_done(request, cause, f"systemctl status {unit}") from error

    def _connect(self, sock: socket.socket, deadline: float) -> None:
        """Others' connections may fill the listener's queue; the kernel then refuses ours instead of letting it wait."""
        while True:
            try:
                sock.connect(str(self._path))
                return
            except BlockingIOError:
                if time.monotonic() + RECONNECT_S > deadline:
                    raise
                time.sleep(RECONNECT_S)

    def _check_peer(self, sock: socket.socket) -> None:
        """No other process is sent keys, or believed. Raises `ClusterError`."""
        uid = framing.peer_uid(sock)
        if uid != self._uid:
            key = "engines_user" if self._role == "submit" else "view_user"
            raise ClusterError(
                f"uid {uid} listens at {self._path}, and not {self._user}",
                f"cluster.{key} is the user of the process there: User= of its unit",
            )


def reply_in(
    answer: wire.ProxyAnswer, request: msgspec.Struct, kind: type[R], who: str, rpc: RpcCounter
) -> R:
    """The reply, or the error that it tells; what it cost Slurm is added to `rpc`. Raises `ClusterError` as `port.Cluster` does."""
    most = wire.most_rpc(request)
    known = answer.rpc.keys() <= port.REQUESTS
    if known and all(0 <= count <= most for count in answer.rpc.values()):  # polls are paced by it
        rpc.add(answer.rpc)
    reply = answer.reply
    if isinstance(reply, kind):
        return reply
    if not isinstance(reply, wire.FailedReply):
        raise ClusterUnavailable(f"{who} replies {type(reply).__name__} to {type(request).__name__}")
    if reply.kind == "unknown":
        raise SubmitUnknown(reply.cause)
    if reply.kind == "busy":
        raise _not_done(request, f"{who} did not take the request: {reply.cause}", reply.remedy)
    if reply.kind == "unavailable":
        raise ClusterUnavailable(reply.cause, reply.remedy, error_kind=reply.error_kind or ErrorKind.BACKEND)
    raise ClusterError(reply.cause, reply.remedy)


def _not_done(request: msgspec.Struct, cause: str, remedy: str) -> ClusterError:
    """Of a request that did nothing. A submission is refused then: there is no job to look for."""
    if isinstance(request, wire.SubmitJob):
        return ClusterError(cause, remedy)
    return ClusterUnavailable(cause, remedy, error_kind=ErrorKind.BACKEND)


class EnginesUser:
    """The engines' user, by its process: what lies in its folder."""

    def __init__(self, line: Line, folder: Path) -> None:
        self._line, self._folder = line, folder

    def put_key(self, pair: keys.KeyPair) -> None:
        self._line.ask(wire.PutKey(pair.intent, pair), wire.DoneReply)

    def end_of_log(self, name: str) -> bytes:
        return self._line.ask(wire.ReadLog(name), wire.LogReply).end[-wire.LOG_BYTES :]

    def tidy(self, live: Collection[str], most_bytes: int) -> None:
        """Keys and logs of jobs that are not `live` go: keys and empty logs after some minutes, logs when all are too many."""
        self._line.ask(wire.Tidy(tuple(sorted(live)), most_bytes), wire.DoneReply)

    def check(self) -> None:
        """Raises `ConfigError` when its folder is another."""
        folder = self._line.ask(wire.Identify(), wire.Identity).folder
        if Path(folder).resolve() != self._folder:
            raise ConfigError(
                f"cluster.engines_dir = {str(self._folder)!r}, and scavenger slurm-proxy has --dir {folder}",
                "give both one path",
            )


class ProxyCluster:
    """See the module. `own`: for what no process is named."""

    def __init__(
        self, own: SlurmCluster, view: ProxyLine | None, submit: ProxyLine | None, jobs_user: str
    ) -> None:
        self._own, self._view, self._submit, self._user = own, view, submit, jobs_user
        for line in (view, submit):
            if line is not None:
                line.rpc = own.rpc

    @property
    def rpc(self) -> RpcCounter:
        return self._own.rpc

    def info(self) -> ClusterInfo:
        line = self._view
        info = self._own.info() if line is None else line.ask(wire.GetInfo(), wire.InfoReply).info
        return replace(info, user=self._user)

    def view(self) -> ClusterView:
        line = self._view
        return self._own.view() if line is None else line.ask(wire.GetView(), wire.ViewReply).view

    def jobs(self) -> tuple[Job, ...]:
        line = self._view
        return self._own.jobs() if line is None else line.ask(wire.GetJobs(), wire.JobsReply).jobs

    def submit(self, spec: JobSpec) -> int:
        line = self._submit
        return (
            self._own.submit(spec)
            if line is None
            else line.ask(wire.SubmitJob(spec), wire.SubmitReply).job_id
        )

    def cancel(self, job_ids: tuple[int, ...]) -> None:
        if self._submit is None:
            self._own.cancel(job_ids)
        else:
            self._submit.ask(wire.CancelJobs(job_ids), wire.DoneReply)

    def requeue(self, job_id: int) -> None:
        if self._submit is None:
            self._own.requeue(job_id)
        else:
            self._submit.ask(wire.RequeueJob(job_id), wire.DoneReply)

    def release(self, job_id: int, node: str) -> None:
        if self._submit is None:
            self._own.release(job_id, node)
        else:
            self._submit.ask(wire.ReleaseJob(job_id, node), wire.DoneReply)

    def accounting(self, job_ids: tuple[int, ...]) -> tuple[JobLife, ...]:
        line = self._view
        if line is None:
            return self._own.accounting(job_ids)
        return line.ask(wire.GetAccounting(job_ids), wire.AccountingReply).lives if job_ids else ()

    def close(self) -> None:
        """Nothing is held between calls."""


def over(config: DaemonConfig, own: SlurmCluster) -> SlurmCluster | ProxyCluster:
    """`own`, or what asks the processes that the configuration names."""
    lines = view_line(config), submit_line(config)
    return ProxyCluster(own, *lines, jobs_user(config)) if any(lines) else own


def jobs_user(config: DaemonConfig) -> str:
    """The Unix user of engines' jobs."""
    return config.cluster.engines_user or own_user()


def submit_line(config: DaemonConfig) -> ProxyLine | None:
    c = config.cluster
    return (
        None
        if c.submit_socket is None
        else ProxyLine("submit", c.submit_socket, c.engines_user, c.command_timeout_s)
    )


def view_line(config: DaemonConfig) -> ProxyLine | None:
    c = config.cluster
    return (
        None if c.view_socket is None else ProxyLine("view", c.view_socket, c.view_user, c.command_timeout_s)
    )


def engines_user_of(config: DaemonConfig) -> EnginesUser | None:
    """None where engines run as the daemon's user."""
    line = submit_line(config)
    return None if line is None else EnginesUser(line, config.engines_home)
