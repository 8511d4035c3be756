"""A private, throw-away, real Slurm on one machine, as the current user.

`SlurmSandbox` is the handle: it starts `python -m scavenger.cluster.sandbox.sandbox` and talks to it over two pipes. The helper
(`serve`) owns the daemons. It is a process of its own because it adopts and reaps orphaned job steps, which must not reap children of the
program that uses it; and it ends everything when its stdin closes, so the cluster dies with its user even when that was
killed with SIGKILL. Nothing is written outside the sandbox's folder.

Knows nothing of harvesting or training. Slurm must be installed (see `missing_slurm`).

Which nodes of a private Slurm are out, and what they say of it.

Owns the reading of `scontrol show node` for that, and the words of an error: the node, Slurm's state and reason, and the end of its
slurmd's log. Knows nothing of how daemons are started.
"""

from __future__ import annotations

import argparse
import functools
import os
import pwd
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Protocol, Self

import msgspec

from scavenger.cluster import processes
from scavenger.cluster.layout import ClusterLayout, decode_layout, demo_layout, encode_layout
from scavenger.cluster.sandbox import accounting, controllers
from scavenger.cluster.sandbox.conf import SandboxLocation, gres_conf, slurm_conf
from scavenger.cluster.sandbox.ports import take_ports
from scavenger.cluster.slurm import runner
from scavenger.cluster.slurm.commands import nodes_argv, parse_nodes
from scavenger.errors import ClusterError, ClusterUnavailable, ScavengerError

#: Last lines of a slurmd's log that an error quotes.
_LINES = 8
#: Nodes that an error quotes: where all are out, one says enough.
_QUOTED = 2
_REASON = re.compile(r" Reason=(.*?)(?: \[|$)")


class NodesHost(Protocol):
    """What of the sandbox is needed here."""

    layout: ClusterLayout
    dir: Path
    env: dict[str, str]

    def wait_for(self, what: str, deadline: float, condition: Callable[[], bool]) -> None: ...


def out(shown: str, names: Sequence[str]) -> dict[str, str]:
    """Nodes of `names` where no job can start, and in what state and for what reason, from `scontrol show node`'s one-line records.

    Raises `ClusterUnavailable` on an answer that is cut off.
    """
    reasons = {
        line.split(None, 1)[0].removeprefix("NodeName="): _REASON.search(line)
        for line in shown.splitlines()
        if line.strip()
    }
    nodes = {node.name: node for node in parse_nodes(shown)}
    found = {}
    for name in names:
        node = nodes.get(name)
        if node is None:
            found[name] = "not listed"
        elif not node.usable:
            why = reasons[name]
            found[name] = "+".join(sorted(node.states)) + (f", {why[1]}" if why is not None else "")
    return found


def ask(env: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """`out` as Slurm has it now; every node where it does not answer, which is its state while it starts."""
    done = runner.asked(nodes_argv(), env, 20.0)
    try:
        return out(done.stdout, names)
    except ClusterUnavailable as error:
        return dict.fromkeys(names, runner.words(done) or error.cause)


def describe_missing(missing: Mapping[str, str], logs: Path) -> str:
    """One line a node, then the end of the logs of the first of them."""
    lines = [f"{name}: {words}" for name, words in sorted(missing.items())]
    for name in sorted(missing)[:_QUOTED]:
        lines.append(f"the end of {name}'s slurmd log:")
        lines += tail(logs, name)
    return "\n".join(lines)


def tail(logs: Path, name: str) -> list[str]:
    """The last lines that a node's slurmd wrote, to its log or, before that was open, to its output."""
    for path in (logs / f"slurmd.{name}.log", logs / f"slurmd.{name}.out"):
        if path.exists() and (lines := path.read_text(errors="replace").splitlines()):
            return [f"  {line}" for line in lines[-_LINES:]]
    return ["  (it wrote nothing)"]


def wait(daemons: NodesHost, deadline: float) -> None:
    """Until a job could start on every node of the layout. Raises `ClusterError` with those that are out, and their slurmds' words."""
    names = daemons.layout.nodes
    try:
        daemons.wait_for("idle nodes", deadline, lambda: not ask(daemons.env, names))
    except ClusterError as error:
        raise ClusterError(
            f"{error.cause}\n{describe_missing(ask(daemons.env, names), daemons.dir / 'log')}"
        ) from error


def check(env: Mapping[str, str], names: Sequence[str], logs: Path) -> None:
    """Raises `ClusterError` when a node is out: what is measured on the rest says little of the whole."""
    if missing := ask(env, names):
        raise ClusterError(
            f"{len(missing)} of {len(names)} nodes are out:\n{describe_missing(missing, logs)}"
        )


INSTALL = (
    "apt-get install -y --no-install-recommends munge slurmctld slurmd slurm-client slurm-wlm-basic-plugins"
)
_BINARIES = (
    "munged",
    "slurmctld",
    "slurmd",
    "slurmstepd",
    "sinfo",
    "scontrol",
    "sbatch",
    "squeue",
    "scancel",
)
_PLUGINS = (
    "/usr/lib/x86_64-linux-gnu/slurm-wlm",
    "/usr/lib/aarch64-linux-gnu/slurm-wlm",
    "/usr/lib64/slurm",
    "/usr/lib/slurm",
    "/usr/local/lib/slurm",
)
#: Ten daemons that start side by side; a busy machine takes its time.
_START_S = 120.0


def _search_path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin", "/usr/local/sbin"])


def missing_slurm() -> str:
    """Why no private Slurm can run here, in one line; empty when it can."""
    absent = [name for name in _BINARIES if shutil.which(name, path=_search_path()) is None]
    if absent:
        return f"Slurm is not installed here: no {', '.join(absent)} on PATH"
    if not any(os.path.isdir(path) for path in _PLUGINS):
        return f"Slurm's plugins are not installed here: none of {', '.join(_PLUGINS)}"
    return ""


def slurm_environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` without the variables by which an outer Slurm (or its user) would steer daemons and commands."""
    steering = ("SLURM", "SBATCH", "SALLOC", "SQUEUE", "SINFO", "SCANCEL", "SCONTROL", "PMI", "OMPI_")
    return {key: value for key, value in base.items() if not key.startswith(steering)}


class Ready(msgspec.Struct, frozen=True):
    """The one line a sandbox prints when every node is idle. `daemons` maps a name ('slurmctld', 'slurmd.node0') to a pid."""

    conf: str
    dir: str
    pid: int
    daemons: dict[str, int]


class SlurmSandbox:
    """A running private Slurm, as a context manager. Commands run with `env=sandbox.env` reach it and no other."""

    def __init__(self, layout: ClusterLayout | None = None, *, keep_dir: Path | None = None) -> None:
        self.layout = layout or demo_layout()
        self._keep_dir = keep_dir
        self._process: subprocess.Popen[bytes] | None = None
        self._ready: Ready | None = None

    @property
    def ready(self) -> Ready:
        if self._ready is None:
            raise ClusterError(
                "the private Slurm is not running", "use SlurmSandbox as a context manager, or start()"
            )
        return self._ready

    @property
    def dir(self) -> Path:
        return Path(self.ready.dir)

    @property
    def env(self) -> dict[str, str]:
        """An environment for Slurm commands and for programs that run them."""
        return {**slurm_environment(os.environ), "SLURM_CONF": self.ready.conf, "PATH": _search_path()}

    def start(self) -> Self:
        """Boot the cluster and wait until every node is idle. Raises `ClusterError` with Slurm's words if it does not."""
        why = missing_slurm()
        if why:
            raise ClusterError(why, INSTALL)
        argv = [
            sys.executable,
            "-m",
            "scavenger.cluster.sandbox.sandbox",
            "--layout",
            encode_layout(self.layout),
        ]
        if self._keep_dir is not None:
            argv += ["--dir", str(self._keep_dir)]
        # a session of its own: a Ctrl-C at the terminal reaches the user's program, which then closes the pipe
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._process = process
        try:
            assert process.stdout is not None
            line = _read_line(process.stdout, _START_S + 10)
            if not line:
                raise ClusterError(
                    f"the private Slurm did not start (exit status {process.wait(10)})",
                    "its own message is above; scripts/slurm-sandbox --dir DIR keeps the daemons' logs",
                )
            self._ready = msgspec.json.decode(line, type=Ready)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End every daemon, step and job process and remove the folder. Idempotent."""
        process, self._process, self._ready = self._process, None, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        finally:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def run(self, *argv: str, stdin: str | None = None, check: bool = True) -> str:
        """Run one Slurm command against this cluster and return its output. Raises `ClusterError` with its words."""
        done = subprocess.run(
            argv,
            env=self.env,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=self.dir,
        )
        if check and done.returncode != 0:
            raise ClusterError(f"{argv[0]}: {done.stderr.strip() or done.returncode}")
        return done.stdout

    def check_nodes(self) -> None:
        """Raises `ClusterError`, naming the nodes that are out and what their slurmds say, unless a job could start on every one."""
        check(self.env, self.layout.nodes, self.dir / "log")

    @property
    def controller_pid(self) -> int:
        """That of the slurmctld which runs now; 0 while one that was killed has not been started again."""
        return controllers.pid_of(self.ready.pid, self.ready.conf)


def _read_line(pipe: IO[bytes], timeout_s: float) -> bytes:
    """One line from a pipe, or b'' at end of file or when the deadline passes."""
    deadline, data = time.monotonic() + timeout_s, b""
    while not data.endswith(b"\n"):
        if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return b""
        byte = os.read(pipe.fileno(), 1)
        if not byte:
            return b""
        data += byte
    return data


class _Daemons:
    """The daemons of one sandbox: every one a direct child in the foreground, so that teardown is exact."""

    def __init__(self, layout: ClusterLayout, base: Path) -> None:
        self.layout, self.dir = layout, base
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self._ports = take_ports(len(layout.nodes) + 3)  # for as long as the daemons live
        port = self._ports.first
        plugins = next(path for path in _PLUGINS if os.path.isdir(path))
        user = pwd.getpwuid(os.getuid()).pw_name
        self.site = SandboxLocation(
            str(base), socket.gethostname().split(".")[0], user, plugins, port, port + len(layout.nodes) + 1
        )
        self.conf = base / "etc/slurm.conf"
        self.env = {**slurm_environment(os.environ), "SLURM_CONF": str(self.conf), "PATH": _search_path()}

    def write_files(self) -> None:
        for name in ("etc", "run", "log", "state", "dev", "munge"):
            (self.dir / name).mkdir(parents=True, exist_ok=True)
        for node in self.layout.nodes:
            for name in ("spool", "tmp"):
                (self.dir / name / node).mkdir(parents=True, exist_ok=True)
        for gpu in range(max(self.layout.node(name).gpus for name in self.layout.nodes)):
            link = self.dir / "dev" / f"nvidia{gpu}"
            link.unlink(missing_ok=True)
            link.symlink_to("/dev/null")
        key = self.dir / "munge/munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        self.conf.write_text(slurm_conf(self.layout, self.site))
        (self.dir / "etc/gres.conf").write_text(gres_conf(self.layout, self.site))
        (self.dir / "etc/cgroup.conf").write_text("CgroupAutomount=no\n")

    def spawn(self, name: str, *argv: str, hostname: str = "") -> None:
        binary = shutil.which(argv[0], path=self.env["PATH"])
        assert binary is not None
        with open(self.dir / "log" / f"{name}.out", "ab") as log:
            self.children[name] = subprocess.Popen(
                [binary, *argv[1:]],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=functools.partial(processes.as_daemon, hostname),
            )  # this process has one thread

    def start(self) -> None:
        run, munge = self.dir / "run", self.dir / "munge"
        deadline = time.monotonic() + _START_S
        self.spawn(
            "munged",
            "munged",
            "--foreground",
            "--force",
            "--num-threads=4",
            f"--key-file={munge}/munge.key",
            f"--socket={run}/munge.socket",
            f"--pid-file={run}/munged.pid",
            f"--log-file={self.dir}/log/munged.log",
            f"--seed-file={munge}/munge.seed",
        )
        self.wait_for("munged's socket", deadline, lambda: (run / "munge.socket").exists())
        if self.layout.has_accounting:
            accounting.start(self, deadline)
        controllers.start(self, deadline)  # a slurmd that finds no controller sleeps for a whole second
        stepd = shutil.which("slurmstepd", path=self.env["PATH"])
        for node in self.layout.nodes:
            self.spawn(f"slurmd.{node}", "slurmd", "-D", "-N", node, "-f", str(self.conf), "-d", str(stepd))
        wait(self, deadline)

    def wait_for(self, what: str, deadline: float, condition: Callable[[], bool]) -> None:
        while not condition():
            dead = [name for name, child in self.children.items() if child.poll() is not None]
            if dead:
                raise ClusterError(f"{', '.join(dead)} ended while starting:\n{self.errors(dead[0])}")
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"the private Slurm has no {what} after {_START_S:.0f} s:\n{self.errors('slurmctld')}"
                )
            time.sleep(0.01)

    def errors(self, name: str) -> str:
        """The last error lines of a daemon's own log."""
        files = [self.dir / "log" / f"{name}{suffix}" for suffix in (".log", ".out")]
        text = "\n".join(path.read_text(errors="replace") for path in files if path.exists())
        return "\n".join([line for line in text.splitlines() if re.search("fatal|error", line, re.I)][-5:])

    def stop(self) -> None:
        """Controller first (a throw-away cluster needs no orderly end), then nodes, then every step and what it runs."""
        self._end([name for name in self.children if name.startswith("slurmctld")], signal.SIGKILL)
        self._end([name for name in self.children if name.startswith("slurmd.")], signal.SIGTERM)
        own = {child.pid for child in self.children.values()}
        while True:  # steps, and what they started, are our descendants: we are their reaper
            left = [p for p in processes.descendants(os.getpid(), processes.snapshot()) if p not in own]
            if not left:
                break
            processes.kill_trees(left)
            processes.reap(own)
            time.sleep(0.01)
        self._end_services()
        self._ports.close()

    def _end_services(self) -> None:
        """One by one: slurmdbd hands the database what it still holds, and munge, which vouches for all of them, goes last."""
        for name in (*accounting.DAEMONS, "munged"):
            self._end([name], signal.SIGTERM)

    def _end(self, names: list[str], sig: signal.Signals) -> None:
        alive = [child for name, child in self.children.items() if name in names and child.poll() is None]
        for child in alive:
            child.send_signal(signal.SIGCONT)  # a frozen daemon would not act on the next signal
            child.send_signal(sig)
        for child in alive:
            try:
                child.wait(5)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


class _Stop(Exception):
    """A signal asked the sandbox to end."""


def _raise_stop(signum: int, frame: FrameType | None) -> None:
    raise _Stop(signal.Signals(signum).name)


def serve(layout: ClusterLayout, base: Path, *, watch_stdin: bool) -> None:
    """Boot, print one line of JSON (`Ready`), and run until SIGTERM, SIGINT, SIGHUP or, with `watch_stdin`, end of file."""
    processes.become_subreaper()
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(sig, _raise_stop)
    daemons = _Daemons(layout, base)
    try:
        daemons.write_files()
        daemons.start()
        pids = {name: child.pid for name, child in daemons.children.items()}
        sys.stdout.buffer.write(
            msgspec.json.encode(Ready(str(daemons.conf), str(base), os.getpid(), pids)) + b"\n"
        )
        sys.stdout.flush()
        _watch(daemons, watch_stdin)
    except _Stop:
        return
    finally:
        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(sig, signal.SIG_IGN)
        daemons.stop()


def _watch(daemons: _Daemons, watch_stdin: bool) -> None:
    reported: set[str] = set()
    while True:
        readable = select.select([0] if watch_stdin else [], [], [], 0.25)[0]
        if readable and not os.read(0, 4096):
            return
        for name, child in daemons.children.items():
            if child.poll() is not None and name not in reported:
                reported.add(name)
                sys.stderr.write(
                    f"sandbox: {name} ended with status {child.returncode}\n{daemons.errors(name)}\n"
                )
        reported -= controllers.revive(daemons)
        processes.reap({child.pid for child in daemons.children.values() if child.returncode is None})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slurm-sandbox", description="Run a private Slurm until stdin closes or Ctrl-C."
    )
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=4, help="fake GPUs a node")
    parser.add_argument("--cpus", type=int, default=64, help="CPUs a node claims")
    parser.add_argument(
        "--grace", type=float, default=10.0, help="GraceTime of the partition 'scavenge', seconds"
    )
    parser.add_argument(
        "--requeue-delay", type=float, default=6.0, help="seconds a requeued job waits, at least 6"
    )
    parser.add_argument("--layout", default="", help="a whole layout as JSON; replaces the options above")
    parser.add_argument(
        "--dir", type=Path, default=None, help="use and keep this folder (default: a temporary one)"
    )
    parser.add_argument("--ignore-stdin", action="store_true", help="go on when stdin closes")
    return parser


def main() -> int:
    args = _parser().parse_args()
    try:
        why = missing_slurm()
        if why:
            raise ClusterError(why, INSTALL)
        layout = (
            decode_layout(args.layout)
            if args.layout
            else demo_layout(
                nodes=args.nodes,
                gpus=args.gpus,
                cpus=args.cpus,
                grace_s=args.grace,
                requeue_delay_s=args.requeue_delay,
            )
        )
        if args.dir is not None:
            serve(layout, args.dir.resolve(), watch_stdin=not args.ignore_stdin)
            return 0
        base = Path(tempfile.mkdtemp(prefix="slurm-sandbox-")).resolve()
        try:
            serve(layout, base, watch_stdin=not args.ignore_stdin)
        finally:
            shutil.rmtree(base)
    except ScavengerError as error:
        sys.stderr.write(f"slurm-sandbox: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
