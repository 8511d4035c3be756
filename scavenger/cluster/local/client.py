"""The local backend's client and handle: `port.Cluster` over real processes on this machine, with no Slurm.

    python -m scavenger.cluster.local.client serve --dir D --layout JSON     run the server (see `local_server`)
    python -m scavenger.cluster.local.client requeue --dir D JOBID           a job script puts itself back
    python -m scavenger.cluster.local.client state --dir D JOBID             what `squeue -h -j JOBID -o %T` would print

Owns the client side of the control socket. Knows nothing of scheduling.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from scavenger.cluster import framing
from scavenger.cluster.error_kind import ErrorKind
from scavenger.cluster.layout import ClusterLayout, decode_layout, demo_layout, encode_layout
from scavenger.cluster.local import messages as wire
from scavenger.cluster.model import ClusterInfo, ClusterView, Job, JobLife, JobSpec
from scavenger.cluster.port import RpcCounter
from scavenger.errors import ClusterError, ClusterUnavailable, ScavengerError, SubmitUnknown

_R = TypeVar("_R")
_MAX_SOCKET_PATH = 100  # the kernel's limit is 108 bytes
_START_S = 300.0  # a Python starts: on a busy machine that took 95 s


def socket_path(base: Path) -> str:
    path = str(base / wire.SOCKET_NAME)
    if len(path.encode()) > _MAX_SOCKET_PATH:
        raise ClusterError(f"the path of the control socket is too long: {path}", "choose a shorter folder")
    return path


class LocalCluster:
    """`port.Cluster` over a running local server. One connection a call, so it outlives neither side's restart."""

    def __init__(self, base: Path | str, timeout_s: float = 10.0) -> None:
        self._path = socket_path(Path(base))
        self._timeout_s = timeout_s
        self.rpc = RpcCounter()  # stays empty: there is no Slurm controller to ask

    def info(self) -> ClusterInfo:
        return self._ask(wire.GetInfo(), wire.InfoReply).info

    def view(self) -> ClusterView:
        return self._ask(wire.GetView(), wire.ViewReply).view

    def jobs(self) -> tuple[Job, ...]:
        return self.view().jobs

    def submit(self, spec: JobSpec) -> int:
        here = replace(spec, workdir=spec.workdir or os.getcwd())
        return self._ask(wire.SubmitJob(here), wire.SubmitReply).job_id

    def cancel(self, job_ids: tuple[int, ...]) -> None:
        self._ask(wire.CancelJobs(job_ids), wire.DoneReply)

    def requeue(self, job_id: int) -> None:
        self._ask(wire.RequeueJob(job_id), wire.DoneReply)

    def release(self, job_id: int, node: str) -> None:
        self._ask(wire.ReleaseJob(job_id, node), wire.DoneReply)

    def accounting(self, job_ids: tuple[int, ...]) -> tuple[JobLife, ...]:
        return ()  # it keeps none

    def close(self) -> None:
        """Nothing is held between calls."""

    def down_node(self, name: str) -> None:
        """Lose a node: its jobs are killed with no notice and requeued."""
        self._ask(wire.SetNode(name, False), wire.DoneReply)

    def resume_node(self, name: str) -> None:
        self._ask(wire.SetNode(name, True), wire.DoneReply)

    def kill_job_processes(self, job_id: int) -> tuple[int, ...]:
        """SIGKILL every process of a job, behind the scheduler's back; return their pids."""
        return self._ask(wire.KillProcesses(job_id), wire.KillReply).pids

    def _ask(self, request: wire.Request, kind: type[_R]) -> _R:
        reply = self._exchange(request)
        if isinstance(reply, wire.RefusedReply):
            raise ClusterError(reply.cause, reply.remedy)
        if not isinstance(reply, kind):
            raise ClusterUnavailable(
                f"the local cluster answered {type(reply).__name__} to {type(request).__name__}"
            )
        return reply

    def _exchange(self, request: wire.Request) -> wire.Reply:
        data, sent, deadline = framing.frame(request), False, time.monotonic() + self._timeout_s
        if len(data) > wire.MAX_REQUEST_BYTES:
            raise ClusterError(
                f"a request of {len(data)} bytes is too large", "shorten the job script or its environment"
            )
        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(self._timeout_s)
                sock.connect(self._path)
                sent = True
                sock.sendall(data)
                return wire.receive_reply(sock, deadline)
        except (OSError, ClusterUnavailable) as error:
            if sent and isinstance(request, wire.SubmitJob):
                raise SubmitUnknown(f"the local cluster gave no answer to a submission: {error}") from error
            if isinstance(error, ClusterUnavailable):
                raise
            cause = f"no local cluster answers at {self._path}: {error}"
            remedy = "start one: python -m scavenger.cluster.local.client serve --dir DIR"
            if isinstance(request, wire.SubmitJob):  # it was not sent: there is no job to look for
                raise ClusterError(cause, remedy) from error
            raise ClusterUnavailable(
                cause,
                remedy,
                error_kind=ErrorKind.NO_REPLY if isinstance(error, TimeoutError) else ErrorKind.DOWN,
            ) from error


class LocalServer:
    """A running local cluster as a context manager. It and all its jobs end with this process, however that ends."""

    def __init__(self, base: Path, layout: ClusterLayout | None = None) -> None:
        self.dir = base
        self.layout = layout or demo_layout()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        argv = [
            sys.executable,
            "-m",
            "scavenger.cluster.local.client",
            "serve",
            "--dir",
            str(self.dir),
            "--layout",
            encode_layout(self.layout),
            "--die-with-stdin",
        ]
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._process = process
        assert process.stdout is not None
        said = select.select([process.stdout], [], [], _START_S)[0]
        if not said or not process.stdout.readline():
            self.stop()
            how = f"within {_START_S:g} s" if not said else f"and ended (exit status {process.returncode})"
            raise ClusterError(
                f"the local cluster in {self.dir} did not say that it is ready {how}",
                "its own message, if it had one, is above",
            )
        return self

    def stop(self) -> None:
        """End the server and every job process. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        finally:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()

    def cluster(self, timeout_s: float = 10.0) -> LocalCluster:
        return LocalCluster(self.dir, timeout_s)

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ClusterError(
                "the local cluster is not running", "use LocalServer as a context manager, or start()"
            )
        return self._process.pid

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def job_state(view: ClusterView, job_id: int) -> str:
    """The word `squeue -o %T` prints for a job: its flag while it is completing; empty when it is not listed."""
    job = next((job for job in view.jobs if job.job_id == job_id), None)
    return "" if job is None else "+".join(sorted(job.flags)) or str(job.state)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scavenger.cluster.local.client")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("serve", "requeue", "cancel", "state"):
        sub = commands.add_parser(name)
        sub.add_argument("--dir", type=Path, default=os.environ.get("SCAVENGER_CLUSTER_DIR"))
        if name == "serve":
            sub.add_argument("--layout", default="", help="JSON; default: the demo's")
            sub.add_argument("--die-with-stdin", action="store_true")
        else:
            sub.add_argument("job_id", type=int)
    return parser


def main() -> int:
    parser = _parser()
    args = parser.parse_args()
    if args.dir is None:
        parser.error("--dir is required outside a job")
    try:
        if args.command == "serve":
            from scavenger.cluster.local.server import (
                serve,
            )  # a job script that requeues itself need not load asyncio

            serve(
                Path(args.dir),
                decode_layout(args.layout) if args.layout else demo_layout(),
                die_with_stdin=args.die_with_stdin,
            )
            return 0
        cluster = LocalCluster(Path(args.dir))
        if args.command == "requeue":
            cluster.requeue(args.job_id)
        elif args.command == "cancel":
            cluster.cancel((args.job_id,))
        else:
            sys.stdout.write(job_state(cluster.view(), args.job_id) + "\n")
    except ScavengerError as error:
        sys.stderr.write(f"{args.command}: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
