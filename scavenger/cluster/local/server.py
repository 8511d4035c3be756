"""The local backend's server: `scheduler` driving real processes on this machine.

Boundary: a process of its own behind a socket; IO.

Owns job processes (each script in a session of its own), their signals and the control socket in a 0700 folder. All
decisions are the scheduler's. One asyncio loop, one thread. When it stops, no job process is left. Linux only (pidfd,
/proc).
"""

from __future__ import annotations

import asyncio
import os
import pwd
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from scavenger.asyncio_helpers import within
from scavenger.cluster import framing, processes
from scavenger.cluster.layout import ClusterLayout
from scavenger.cluster.local import messages as wire
from scavenger.cluster.local.client import socket_path
from scavenger.cluster.local.scheduler import (
    Action,
    Ended,
    Event,
    Exited,
    JobCancellation,
    JobRelease,
    JobRequeue,
    JobSignal,
    JobSubmission,
    NodeDown,
    NodeUp,
    Scheduler,
    SchedulerTick,
    Signal,
    Start,
    Submitted,
)
from scavenger.cluster.model import ClusterInfo, JobSpec
from scavenger.cluster.slurm.commands import job_environment
from scavenger.errors import ClusterError

_JOB_BASE = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
_REQUEST_S = 10.0
_MAX_SLEEP_S = 3600.0
_CANNOT_START = 127


@dataclass(slots=True)
class _Running:
    """One incarnation of a job: its leader process (a session of its own), and the descriptor that says when it ends."""

    job_id: int
    restart_count: int
    process: subprocess.Popen[bytes]
    pidfd: int


class LocalClusterServer:
    """One local cluster. Everything here is synchronous, so an event and all its actions are one indivisible step."""

    def __init__(self, base: Path, layout: ClusterLayout) -> None:
        self.dir = base
        self.scheduler = Scheduler(layout)
        self.user = pwd.getpwuid(os.getuid()).pw_name
        self._running: dict[int, _Running] = {}
        self._wake = asyncio.Event()

    # ---- events and actions

    def apply(self, event: Event) -> tuple[Action, ...]:
        """Step the scheduler and perform what it says. Raises `ClusterError` when it refuses."""
        actions = self.scheduler.step(event, time.time())
        for action in actions:
            match action:
                case Start():
                    self._start(action)
                case Signal():
                    self._signal(action)
                case Ended():
                    self._script(action.job_id).unlink(missing_ok=True)
        self._wake.set()
        return actions

    def _start(self, action: Start) -> None:
        loop = asyncio.get_running_loop()
        try:
            process = self._launch(action)
        except (OSError, ClusterError) as error:
            sys.stderr.write(f"local cluster: job {action.job_id} could not start: {error}\n")
            loop.call_soon(self.apply, Exited(action.job_id, action.restart_count, _CANNOT_START))
            return
        running = _Running(action.job_id, action.restart_count, process, os.pidfd_open(process.pid))
        self._running[action.job_id] = running
        loop.add_reader(running.pidfd, self._leader_ended, running)

    def _launch(self, action: Start) -> subprocess.Popen[bytes]:
        spec, script = action.spec, self._script(action.job_id)
        node, gpus = action.gpus[0]
        script.parent.mkdir(mode=0o700, exist_ok=True)
        script.write_text(spec.script)
        script.chmod(0o700)
        workdir = Path(spec.workdir or self.dir)
        output = workdir / expand_output(spec.output, action.job_id, spec.name, node)
        # the interpreter is named here, so that a folder mounted noexec will do
        argv = [*shlex.split(spec.script.partition("\n")[0].removeprefix("#!")), str(script)]
        with open(output, "ab") as log:
            return subprocess.Popen(
                argv,
                env=self._environment(spec, action, node, gpus),
                cwd=workdir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _environment(self, spec: JobSpec, action: Start, node: str, gpus: tuple[int, ...]) -> dict[str, str]:
        base = {key: os.environ[key] for key in _JOB_BASE if key in os.environ}
        devices = ",".join(map(str, gpus))
        return (
            base
            | job_environment(spec)
            | {
                "SCAVENGER_BACKEND": "local",
                "SCAVENGER_CLUSTER_DIR": str(self.dir),
                "SCAVENGER_NODE": node,
                "SCAVENGER_JOB_ID": str(action.job_id),
                "SCAVENGER_RESTART_COUNT": str(action.restart_count),
                "SCAVENGER_GPUS": devices,
                "CUDA_VISIBLE_DEVICES": devices,
            }
        )

    def _script(self, job_id: int) -> Path:
        return self.dir / "jobs" / f"{job_id}.sh"

    def _leader_ended(self, running: _Running) -> None:
        """The script has ended, and with it the job: what it left behind is killed before its GPUs are given away."""
        asyncio.get_running_loop().remove_reader(running.pidfd)
        os.close(running.pidfd)
        self._kill(running)
        code = running.process.wait()  # at once: a pidfd is readable when its process has ended
        del self._running[running.job_id]
        processes.reap({other.process.pid for other in self._running.values()})
        self.apply(Exited(running.job_id, running.restart_count, code if code >= 0 else 128 - code))

    def _signal(self, action: Signal) -> None:
        running = self._running.get(action.job_id)
        if running is None or running.restart_count != action.restart_count:
            return  # it could not start, and its Exited is on the way
        leader, members = running.process.pid, _members(running)
        match action.notice:
            case JobSignal.STEPS:
                steps = [pid for pid in members if pid != leader]
                processes.send(
                    steps or [leader], signal.SIGTERM
                )  # a script that exec'ed its worker is the worker
            case JobSignal.TERM:
                processes.send(members, signal.SIGTERM)
            case JobSignal.KILL:
                self._kill(running)

    def _kill(self, running: _Running) -> tuple[int, ...]:
        members = _members(running)
        processes.send(members, signal.SIGKILL)
        return members

    # ---- requests

    async def serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_S):
                _check_peer(writer.get_extra_info("socket"))
                (length,) = framing.HEADER.unpack(await reader.readexactly(framing.HEADER.size))
                if length > wire.MAX_REQUEST_BYTES:
                    raise ClusterError(f"a request of {length} bytes is too large")
                writer.write(framing.frame(self._reply_to(await reader.readexactly(length))))
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            pass  # the client went away or sent half a request: nothing was done for it
        except ClusterError as error:
            writer.write(framing.frame(wire.RefusedReply(error.cause, error.remedy)))
        finally:
            writer.close()

    def _reply_to(self, data: bytes) -> wire.Reply:
        try:
            return self._do(wire.request_decoder.decode(data))
        except msgspec.DecodeError as error:
            return wire.RefusedReply(f"malformed request: {error}", "")
        except ClusterError as error:
            return wire.RefusedReply(error.cause, error.remedy)

    def _do(self, request: wire.Request) -> wire.Reply:
        match request:
            case wire.GetInfo():
                return wire.InfoReply(self._info())
            case wire.GetView():
                return wire.ViewReply(self.scheduler.view(time.time()))
            case wire.SubmitJob():
                job_environment(request.spec)
                actions = self.apply(JobSubmission(request.spec, self.user))
                return wire.SubmitReply(next(a.job_id for a in actions if isinstance(a, Submitted)))
            case wire.CancelJobs():
                for job_id in request.job_ids:
                    if job_id in self.scheduler.jobs:
                        self.apply(JobCancellation(job_id))
                return wire.DoneReply()
            case wire.RequeueJob():
                self.apply(JobRequeue(request.job_id))
                return wire.DoneReply()
            case wire.ReleaseJob():
                self.apply(JobRelease(request.job_id, request.node))
                return wire.DoneReply()
            case wire.SetNode():
                self.apply(NodeUp(request.node) if request.up else NodeDown(request.node))
                return wire.DoneReply()
            case wire.KillProcesses():
                running = self._running.get(request.job_id)
                return wire.KillReply(self._kill(running) if running else ())

    def _info(self) -> ClusterInfo:
        layout = self.scheduler.layout
        return ClusterInfo(
            name=layout.cluster_name,
            backend="local",
            version="1",
            preempt_type="preempt/partition_prio",
            kill_wait_s=layout.kill_wait_s,
            message_timeout_s=0.0,
            user=self.user,
        )

    # ---- life

    async def run_clock(self) -> None:
        """Send a `SchedulerTick` whenever something is due."""
        while True:
            self._wake.clear()
            delay = min(_MAX_SLEEP_S, self.scheduler.next_wakeup() - time.time())
            if delay > 0:
                await within(self._wake, delay)
                continue
            self.apply(SchedulerTick())

    async def end_jobs(self) -> None:
        """Kill every job process, and what escaped its session: as their reaper we inherit it."""
        for running in self._running.values():
            asyncio.get_running_loop().remove_reader(running.pidfd)
        while True:
            left = processes.descendants(os.getpid(), processes.snapshot())
            if not left:
                return
            processes.kill_trees(left)
            processes.reap(set())
            await asyncio.sleep(0.01)


def _members(running: _Running) -> tuple[int, ...]:
    """Processes of a job: its leader's session, all below it, and orphans that left both but carry the job's variable.

    The leader must not have been reaped, so that its pid is still its own.
    """
    leader, table = running.process.pid, processes.snapshot()
    mark = f"SCAVENGER_JOB_ID={running.job_id}"
    session = {pid for pid, proc in table.items() if proc.session == leader}
    orphans = {
        pid for pid, proc in table.items() if proc.ppid == os.getpid() and processes.has_variable(pid, mark)
    }
    roots = {leader, *session, *orphans}
    below = {pid for root in roots for pid in processes.descendants(root, table)}
    return tuple(sorted((roots | below) & table.keys()))


def _check_peer(sock: socket.socket) -> None:
    """The folder's mode keeps others out already; the kernel's word on who is there costs nothing more."""
    uid = framing.peer_uid(sock)
    if uid != os.getuid():
        raise ClusterError(f"user {uid} may not use this cluster")


def expand_output(pattern: str, job_id: int, name: str, node: str) -> str:
    """Slurm's %j, %x, %N and %% in an output file's name."""
    parts = pattern.split("%%")
    values = (("%j", str(job_id)), ("%A", str(job_id)), ("%x", name.replace("/", "_")), ("%N", node))
    for key, value in values:
        parts = [part.replace(key, value) for part in parts]
    return "%".join(parts)


def serve(base: Path, layout: ClusterLayout, *, die_with_stdin: bool) -> None:
    """Run until SIGTERM, SIGINT, SIGHUP or, if asked, end of file on stdin. Prints one line when it is ready."""
    base = base.resolve()
    base.mkdir(parents=True, exist_ok=True, mode=0o700)
    base.chmod(0o700)
    processes.become_subreaper()
    asyncio.run(_serve(base, layout, die_with_stdin))


async def _serve(base: Path, layout: ClusterLayout, die_with_stdin: bool) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(sig, stop.set)
    if die_with_stdin:
        loop.add_reader(0, lambda: None if os.read(0, 4096) else stop.set())
    path = Path(socket_path(base))
    if _serve_connection(path):
        raise ClusterError(f"a local cluster already runs in {base}", "use another folder, or stop that one")
    path.unlink(missing_ok=True)
    server = LocalClusterServer(base, layout)
    listener = await asyncio.start_unix_server(server.serve_client, path)
    clock = asyncio.create_task(server.run_clock())
    stopped = asyncio.create_task(stop.wait())
    try:
        sys.stdout.write(f"local cluster ready in {base}\n")
        sys.stdout.flush()
        await asyncio.wait({clock, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if clock.done():
            clock.result()  # a fault in the scheduler is a bug: show it
    finally:
        clock.cancel()
        listener.close()
        await server.end_jobs()
        path.unlink(missing_ok=True)


def _serve_connection(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0
