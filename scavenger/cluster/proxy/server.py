"""A process that asks Slurm for the daemon, as a Unix user of its own: `scavenger slurm-proxy`.

    daemon --socket--> role submit, as the engines' user    submits, cancels and requeues jobs of this user; engines' keys and logs
           --socket--> role view, as a user who sees all    nodes, queue and accounting; it changes nothing

One request a connection, from one Unix user, by the kernel's word. Nothing of a request is an option of a command or part of a path that
was not checked. What is another user's Slurm itself refuses: this process has no right that its user has not.

Boundary: the process; the daemon has `client`.

Owns the socket, who may use it, and what each role takes. Threads: files may hang with the file system they are on, and a cancellation does
not wait for them, nor do they take all room. What finds no room is refused at once as busy.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from scavenger.cluster import framing, job_logs
from scavenger.cluster.error_kind import ErrorKind
from scavenger.cluster.model import ClusterInfo, JobSpec
from scavenger.cluster.port import Cluster
from scavenger.cluster.proxy import messages as wire
from scavenger.cluster.slurm import runner
from scavenger.cluster.unix_users import own_user
from scavenger.errors import ClusterError, ClusterUnavailable, ConfigError, ScavengerError, SubmitUnknown
from scavenger.protocol import keys

log = structlog.get_logger()

#: How long a client that said something may take to say the rest.
REQUEST_S = 10.0
MOST_CLIENTS = 16
#: Of these, so many may be at files: where those hang, the rest is there for Slurm.
MOST_AT_FILES = 4
#: A key or an empty log of a job that the daemon did not name as alive stays for so long: its name may have been under way.
KEEP_S = 600.0
_NAME = re.compile(wire.JOB_NAME)
_MOST_SCRIPT = 256 * 1024
#: A script may carry options of sbatch: all of ours come from the specification. It reads those of other batch systems too, and of each
#: the line's beginning alone.
_DIRECTIVE = re.compile(r"^#(SBATCH|SLURM|PBS|BSUB)", re.M)


@dataclass(frozen=True, slots=True)
class EngineJobRules:
    """What jobs role submit takes. `partitions`: none named = any that Slurm lets the user use."""

    folder: Path
    partitions: frozenset[str] = frozenset()

    def check(self, spec: JobSpec) -> None:
        """Raises `ClusterError`."""
        wanted = (str(log_path(self.folder, spec.name)), str(self.folder))
        if not _NAME.match(spec.name):
            raise ClusterError(f"a job may not be called {spec.name!r}: engines' jobs are scv-...")
        if self.partitions and spec.partition not in self.partitions:
            raise ClusterError(
                f"partition {spec.partition!r} is none of {', '.join(sorted(self.partitions))}",
                "name it in --partition of scavenger slurm-proxy, or change harvest.partition",
            )
        if (spec.output, spec.workdir) != wanted:
            raise ClusterError(
                f"job {spec.name} writes {spec.output} in {spec.workdir}, and only {wanted[0]} is allowed",
                "cluster.engines_dir and --dir of scavenger slurm-proxy must be one path",
            )
        if spec.environment:
            raise ClusterError(f"job {spec.name} brings environment variables: engines' jobs need none")
        if len(spec.script) > _MOST_SCRIPT or not spec.script.startswith("#!"):
            raise ClusterError(f"the script of job {spec.name} is too long, or begins without #!")
        if found := _DIRECTIVE.search(spec.script):
            raise ClusterError(
                f"the script of job {spec.name} has {found[0]} lines, which could change any option",
                "take them out of harvest.job_template: options come from [harvest]",
            )


class SubmitRole:
    """Role submit. `allow` raises for a job that is not taken. Its folder holds `workers/NAME.key` and `logs/NAME.log`."""

    def __init__(self, cluster: Cluster, folder: Path, allow: Callable[[JobSpec], None]) -> None:
        self._cluster, self._folder, self._allow = cluster, folder, allow
        self._user = own_user()
        self._slurm, self._tidying = threading.Lock(), threading.Lock()
        self._at_files = threading.Semaphore(MOST_AT_FILES)
        self.requests = wire.submit_requests

    def answer(self, request: wire.Request) -> wire.ProxyAnswer:
        """What came of the request, with what it cost Slurm. Raises `ScavengerError` and `OSError` where that is nothing."""
        match request:
            case wire.Identify():
                return wire.ProxyAnswer(wire.Identity("submit", self._user, str(self._folder)))
            case wire.PutKey() | wire.ReadLog() | wire.Tidy():
                return wire.ProxyAnswer(self._file(request))
            case _:
                with self._slurm:
                    return counted(self._cluster, lambda: self._act(request))

    def _file(self, request: wire.PutKey | wire.ReadLog | wire.Tidy) -> wire.Reply:
        with contextlib.ExitStack() as taken:
            self._take(self._at_files, f"{MOST_AT_FILES} requests are", taken)
            match request:
                case wire.PutKey(intent, pair):
                    keys.write_keypair(keys.worker_key_path(self._folder, intent), pair)
                case wire.ReadLog(name):
                    return wire.LogReply(job_logs.end_of(log_path(self._folder, name)))
                case wire.Tidy(live, most_bytes):
                    self._take(self._tidying, "another Tidy is", taken)
                    self._tidy(frozenset(live), most_bytes)
        return wire.DoneReply()

    def _take(self, room: threading.Semaphore | threading.Lock, by: str, taken: contextlib.ExitStack) -> None:
        """Never waits: what has it may hang. Raises `ClusterUnavailable`."""
        if not room.acquire(blocking=False):
            raise ClusterUnavailable(
                f"{by} busy in {self._folder}",
                "where that lasts its file system hangs: mend or mount it again",
                error_kind=ErrorKind.BACKEND,
            )
        taken.callback(room.release)

    def _act(self, request: wire.Request) -> wire.Reply:
        match request:
            case wire.SubmitJob(spec):
                self._allow(spec)
                job_id = self._cluster.submit(spec)
                log.info("job submitted", job=job_id, name=spec.name, partition=spec.partition)
                return wire.SubmitReply(job_id)
            case wire.CancelJobs(job_ids):
                self._cluster.cancel(job_ids)
                log.info("jobs cancelled", jobs=job_ids)
            case wire.RequeueJob(job_id):
                self._cluster.requeue(job_id)
            case wire.ReleaseJob(job_id, node):
                self._cluster.release(job_id, node)
            case _:
                raise ClusterError(f"role submit takes no {type(request).__name__}")
        return wire.DoneReply()

    def _tidy(self, live: frozenset[str], most_bytes: int) -> None:
        ended = time.time() - KEEP_S
        for path in (*(self._folder / "workers").glob("scv-*.key"), *(self._folder / "logs").glob("*.log")):
            if path.stem not in live:
                with contextlib.suppress(FileNotFoundError):
                    seen = path.lstat()
                    if seen.st_mtime < ended and (path.suffix == ".key" or not seen.st_size):
                        path.unlink()
        job_logs.bound(self._folder / "logs", {f"{name}.log" for name in live}, most_bytes)


class ViewRole:
    """Role view. `sees_all`: whether PrivateData hides no job from this user, as far as is known."""

    def __init__(self, cluster: Cluster, sees_all: Callable[[], bool] = lambda: False) -> None:
        self._cluster, self._sees_all = cluster, sees_all
        self._user = own_user()
        self._slurm = threading.Lock()
        self.requests = wire.view_requests

    def answer(self, request: wire.Request) -> wire.ProxyAnswer:
        """What came of the request, a failure too, with what it cost Slurm."""
        with self._slurm:
            return counted(self._cluster, lambda: self._read(request))

    def _read(self, request: wire.Request) -> wire.Reply:
        match request:
            case wire.Identify():
                return wire.Identity("view", self._user)
            case wire.GetInfo():
                return wire.InfoReply(self._info())
            case wire.GetView():
                return wire.ViewReply(self._cluster.view())
            case wire.GetJobs():
                return wire.JobsReply(self._cluster.jobs())
            case wire.GetAccounting(job_ids):
                return wire.AccountingReply(self._cluster.accounting(job_ids))
        raise ClusterError(f"role view takes no {type(request).__name__}")

    def _info(self) -> ClusterInfo:
        info = self._cluster.info()
        if "jobs" in info.private and self._sees_all():
            return replace(info, private=info.private - {"jobs"})  # what is private to whom the daemon asks
        return info


class OperatorCheck:
    """Whether slurmdbd has this process's user as operator or above, to whom PrivateData hides nothing. A yes is remembered."""

    def __init__(self, env: Mapping[str, str], timeout_s: float) -> None:
        self._env, self._timeout_s, self._known = env, timeout_s, False
        self._user = own_user()

    def __call__(self) -> bool:
        argv = ["sacctmgr", "--noheader", "--parsable2", "show", "user", self._user, "format=AdminLevel"]
        if not self._known:
            with contextlib.suppress(ClusterError):
                said = runner.asked(argv, self._env, self._timeout_s).stdout.strip().lower()
                self._known = said in ("operator", "administrator")
        return self._known


def log_path(folder: Path, name: str) -> Path:
    return folder / "logs" / f"{name}.log"


def prepare(folder: Path) -> None:
    """The folder of engines' keys and logs. Raises `ConfigError` where it is not this user's alone."""
    for path in (folder, folder / "workers", folder / "logs"):
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            seen = path.lstat()
        except OSError as error:
            raise ConfigError(
                f"--dir {folder}: {error}", f"install -d -o {own_user()} -m 0700 {folder}"
            ) from error
        if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid() or seen.st_mode & 0o077:
            raise ConfigError(
                f"{path} is not a folder of {own_user()} alone", f"install -d -o {own_user()} -m 0700 {path}"
            )


def check_separate(allowed: pwd.struct_passwd, uid: int) -> None:
    """Raises `ConfigError` where nothing would be kept apart."""
    if uid in (0, allowed.pw_uid):
        who = "root" if uid == 0 else f"{allowed.pw_name}, as the daemon"
        raise ConfigError(
            f"this process runs as {who}",
            "start it as a user of its own: User= in scripts/scavenger-slurm-submit.service",
        )


class ProxyListener:
    """The socket of a role, which one Unix user may connect to."""

    def __init__(self, path: Path, allowed: pwd.struct_passwd, role: SubmitRole | ViewRole) -> None:
        self._path, self._allowed, self._role = path, allowed, role
        self._room = threading.Semaphore(MOST_CLIENTS)
        self._socket: socket.socket | None = None

    def open(self) -> None:
        """Raises `ConfigError` where it cannot listen there."""
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(self._path)) == 0:
                    raise ConfigError(f"another process serves {self._path}", "end that one first")
            self._path.unlink(missing_ok=True)
            self._socket = socket.socket(socket.AF_UNIX)
            before = os.umask(0o117)
            try:
                self._socket.bind(str(self._path))
            finally:
                os.umask(before)
            os.chown(self._path, -1, self._allowed.pw_gid)
            self._socket.listen(MOST_CLIENTS)
        except OSError as error:
            raise ConfigError(
                f"--socket {self._path}: {error}",
                "name a folder that this user may write, and make it a member of the daemon's group "
                "(SupplementaryGroups=)",
            ) from error

    def serve(self) -> None:
        """Answer requests until the process ends."""
        assert self._socket is not None  # by `open`
        while True:
            client, _ = self._socket.accept()
            uid = framing.peer_uid(client)
            if uid != self._allowed.pw_uid:
                log.warning("refused", uid=uid, reason=f"only {self._allowed.pw_name} may connect")
                _turn_away(client, wire.FailedReply("refused", f"uid {uid} may not ask this"))
            elif not self._room.acquire(blocking=False):
                log.warning("busy", requests=MOST_CLIENTS)
                _turn_away(client, wire.FailedReply("busy", f"{MOST_CLIENTS} others are under way"))
            else:
                threading.Thread(target=self._serve_one, args=(client,), daemon=True).start()

    def _serve_one(self, client: socket.socket) -> None:
        try:
            with client:
                try:
                    answer = self._role.answer(self._request(client))
                except (ScavengerError, OSError) as error:
                    answer = wire.ProxyAnswer(failed(error))
                if isinstance(answer.reply, wire.FailedReply):
                    log.warning("failed", reason=answer.reply.cause)
                client.settimeout(REQUEST_S)
                client.sendall(framing.frame(answer))
        except OSError as error:
            log.warning("the daemon did not take the reply", reason=str(error))
        finally:
            self._room.release()

    def _request(self, client: socket.socket) -> wire.Request:
        """Raises `ClusterUnavailable` and `OSError`."""
        deadline = time.monotonic() + REQUEST_S
        return framing.receive(client, self._role.requests, wire.MAX_REQUEST_BYTES, "the daemon", deadline)

    def close(self) -> None:
        if self._socket is None:
            return  # another process serves there
        with contextlib.suppress(OSError):  # it never listened
            self._socket.shutdown(socket.SHUT_RDWR)  # a thread that waits in `serve` is woken
        self._socket.close()
        self._path.unlink(missing_ok=True)


def _turn_away(client: socket.socket, reply: wire.FailedReply) -> None:
    """Without reading what it asks, and without waiting for it."""
    with client, contextlib.suppress(OSError):
        client.settimeout(0)
        client.send(framing.frame(wire.ProxyAnswer(reply)))


def counted(cluster: Cluster, act: Callable[[], wire.Reply]) -> wire.ProxyAnswer:
    """What `act` did, or how it failed, and the requests to slurmctld meanwhile: its own where no other one asks Slurm beside it."""
    before = cluster.rpc.counts()
    try:
        reply = act()
    except (ScavengerError, OSError) as error:
        reply = failed(error)
    spent = {name: n - before.get(name, 0) for name, n in cluster.rpc.counts().items()}
    return wire.ProxyAnswer(reply, {name: n for name, n in spent.items() if n})


def failed(error: ScavengerError | OSError) -> wire.FailedReply:
    """An error as the client raises it again. Pure."""
    if isinstance(error, SubmitUnknown):
        return wire.FailedReply("unknown", error.cause, error.remedy)
    if isinstance(error, ClusterUnavailable):
        return wire.FailedReply("unavailable", error.cause, error.remedy, error.error_kind)
    if isinstance(error, ScavengerError):
        return wire.FailedReply("refused", error.cause, error.remedy)
    return wire.FailedReply("refused", str(error))


@contextlib.contextmanager
def listening(path: Path, allowed: pwd.struct_passwd, role: SubmitRole | ViewRole) -> Iterator[ProxyListener]:
    listener = ProxyListener(path, allowed, role)
    try:
        listener.open()
        yield listener
    finally:
        listener.close()
