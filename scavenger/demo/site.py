"""A whole site on one machine: a private Slurm (or the local backend), a state directory, a daemon in a process of its own.

Owns the order in which they start and stop, and that nothing of them is left afterwards. Used by the demo and by the tests. Knows nothing
of what is trained.

Boundary: processes, folders and a Slurm are started and ended here; tests and benchmarks use it too.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from scavenger import resources, toml
from scavenger.cluster.layout import ClusterLayout, demo_layout
from scavenger.cluster.local.client import LocalCluster, LocalServer
from scavenger.cluster.model import JobSpec
from scavenger.cluster.port import Cluster
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.errors import ClusterError, ClusterUnavailable, ScavengerError
from scavenger.protocol import keys

#: A daemon starts its Python first, a second or two of CPU time: on a busy machine that took 95 s. One that ends is reported at once.
START_S = 300.0
OWNER = "owner"


@dataclass(frozen=True)
class SiteOptions:
    """What differs between the demo and the tests. `daemon`, `router`, `harvest` and `cluster` override keys of `scavenger.toml`."""

    backend: str  # "slurm" | "local"
    dir: Path
    layout: ClusterLayout = field(default_factory=demo_layout)
    poll_interval_s: float = 0.5
    max_engines: int = 3
    daemon: Mapping[str, Any] = field(default_factory=dict)
    harvest: Mapping[str, Any] = field(default_factory=dict)
    cluster: Mapping[str, Any] = field(default_factory=dict)
    ledger: str = ""  # SQLAlchemy URL; empty = SQLite in the state directory
    router: Mapping[str, Any] = field(default_factory=dict)
    daemon_module: str = "scavenger"  # what `python -m` starts as the daemon


def daemon_document(
    options: SiteOptions, state_dir: Path, local_dir: Path | None
) -> dict[str, dict[str, Any]]:
    """The `scavenger.toml` of such a site. Pure."""
    cluster: dict[str, Any] = {
        "backend": options.backend,
        "poll_interval_s": options.poll_interval_s,
        "fast_poll_interval_s": options.poll_interval_s,
        "absent_s": 2.0,
        "min_poll_interval_s": 0.0,
        "max_rpc_per_min": 60_000.0,  # the Slurm is ours alone
    }
    if local_dir is not None:
        cluster["local_dir"] = str(local_dir)
    # Its GPUs are taken back every few seconds: at a price no engine would earn its start, and none would be asked for.
    router = {"harvested_gpu_price": 0.0}
    # Slurm places the engines: filled up node by node, they would all be lost to each of the few large jobs that are played here.
    harvest = {
        "partition": "scavenge",
        "max_engines": options.max_engines,
        "max_pending": 2,
        "time_limit_s": 1800.0,
        "placement": "slurm",
    }
    return {
        "daemon": {
            "state_dir": str(state_dir),
            **({"ledger": options.ledger} if options.ledger else {}),
            **options.daemon,
        },
        "router": {**router, **options.router},
        "cluster": {**cluster, **options.cluster},
        "harvest": {**harvest, **options.harvest},
    }


def not_started(status: int | None, waited_s: float, state_dir: Path, log: Path) -> ScavengerError:
    """What became of a daemon that has not announced itself: `status` is that of its process, None while it runs. Reads its log's end."""
    awaited = f"it announced itself in {state_dir / 'rendezvous.json'}"
    if status is None:
        cause = f"the daemon did not start: it still runs, and {waited_s:.0f} s were waited until {awaited}"
        remedy = f"its log: {log}; on a busy machine try again when it has less to do"
    else:
        how = f"with exit status {status}" if status >= 0 else f"by signal {-status}"
        cause = f"the daemon did not start: it ended {how} after {waited_s:.1f} s, before {awaited}"
        remedy = f"its log: {log}"
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    return ScavengerError(
        f"{cause}; its log's end:\n{tail}" if tail.strip() else f"{cause}; its log is empty", remedy
    )


class DemoSite:
    """A running site, as a context manager. Everything that it started has ended when the block is left, also after Ctrl-C."""

    def __init__(self, options: SiteOptions, tell: Callable[[str], None] | None = None) -> None:
        """`tell` is told each second what is waited for."""
        self.options = options
        self._tell = tell or (lambda phase: None)
        self.dir = options.dir.resolve()
        self.state_dir = self.dir / "state"
        self.config_path = self.dir / "scavenger.toml"
        self._sandbox: SlurmSandbox | None = None
        self._local: LocalServer | None = None
        self._daemon: subprocess.Popen[bytes] | None = None
        self._cluster: Cluster | None = None

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> Self:
        self.dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        local_dir = None
        if self.options.backend == "slurm":
            self._sandbox = SlurmSandbox(self.options.layout)
            self._sandbox.start()
            self._cluster = SlurmCluster(self._sandbox.env)
        else:
            local_dir = self.dir / "cluster"
            self._local = LocalServer(local_dir, self.options.layout)
            self._local.start()
            self._cluster = LocalCluster(local_dir)
        keys.init_state(self.state_dir, OWNER)
        self.config_path.write_text(toml.dumps(daemon_document(self.options, self.state_dir, local_dir)))
        self.start_daemon()
        return self

    @property
    def cluster(self) -> Cluster:
        if self._cluster is None:
            raise ScavengerError("the site is not running")
        return self._cluster

    @property
    def sandbox(self) -> SlurmSandbox:
        """The private Slurm; only with `backend = "slurm"`."""
        if self._sandbox is None:
            raise ScavengerError("this site runs on the local backend")
        return self._sandbox

    @property
    def ledger_url(self) -> str:
        return self.options.ledger or f"sqlite:///{self.state_dir / 'ledger.sqlite3'}"

    @property
    def env(self) -> dict[str, str]:
        """The environment for programs that talk to this site."""
        base = dict(self._sandbox.env) if self._sandbox is not None else dict(os.environ)
        return {**base, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

    # ---------------------------------------------------------------- the daemon

    def start_daemon(self, *options: str) -> None:
        """Start the daemon and wait until it has announced itself."""
        before = self.generation
        self.spawn_daemon(*options)
        assert self._daemon is not None
        began, told = time.monotonic(), -1
        while self.generation == before:
            status, waited_s = self._daemon.poll(), time.monotonic() - began
            if int(waited_s) != told:
                told = int(waited_s)
                self._tell(f"the cluster is up; the daemon has been starting for {told} s")
            if status is not None or waited_s > START_S:
                raise not_started(status, waited_s, self.state_dir, self.dir / "daemon.log")
            time.sleep(0.02)  # polls the rendezvous file

    def spawn_daemon(self, *options: str) -> subprocess.Popen[bytes]:
        """Start a daemon, which becomes the site's, without waiting for it. An earlier one that still runs is the caller's to end."""
        argv = [
            sys.executable,
            "-m",
            self.options.daemon_module,
            "daemon",
            "--config",
            str(self.config_path),
            "--die-with-stdin",
            *options,
        ]
        with (self.dir / "daemon.log").open("ab") as log:
            # a session of its own: a Ctrl-C at the terminal reaches only the program that uses the site
            self._daemon = subprocess.Popen(
                argv, env=self.env, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        return self._daemon

    @property
    def generation(self) -> int:
        """That of the daemon which announced itself last; 0 before the first."""
        try:
            return keys.read_rendezvous(self.state_dir).generation
        except ScavengerError:
            return 0

    @property
    def serving(self) -> bool:
        """Whether the daemon that was started last has announced itself, and none after it."""
        try:
            return keys.read_rendezvous(self.state_dir).pid == self.daemon_pid
        except ScavengerError:
            return False

    @property
    def daemon(self) -> subprocess.Popen[bytes]:
        """The process of the daemon that was started last."""
        if self._daemon is None:
            raise ScavengerError("the daemon is not running")
        return self._daemon

    @property
    def daemon_pid(self) -> int:
        return self.daemon.pid

    # ---------------------------------------------------------------- jobs

    def submit_training(self, run_toml: Path, *, ranks: int = 2, env: Mapping[str, str] | None = None) -> int:
        """Submit the training job to the reserved partition, on Slurm as a user does: `sbatch scripts/train.sbatch RUN.toml`."""
        script = str(resources.path("scripts/train.sbatch"))
        environment = {"SCAVENGER_PYTHON": sys.executable, "SCAVENGER_RANKS": str(ranks), **(env or {})}
        log = str(self.dir / "train.log")
        if self._sandbox is not None:
            argv = [
                "sbatch",
                "--parsable",
                "--partition=reserved",
                f"--ntasks={ranks}",
                f"--gpus-per-node={ranks}",
                f"--output={log}",
            ]
            argv += [script, str(run_toml)]
            done = subprocess.run(
                argv,
                env=self.env | environment,
                cwd=self.dir,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            if done.returncode != 0:
                raise ClusterError(f"sbatch refused the training job: {done.stderr.strip()}")
            return int(done.stdout)
        shared = ("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM")
        spec = JobSpec(
            name="train",
            comment="",
            partition="reserved",
            gpus=ranks,
            tasks=ranks,
            requeue=False,
            output=log,
            workdir=str(self.dir),
            script=f"#!/bin/bash\nexec bash {shlex.quote(script)} {shlex.quote(str(run_toml))}\n",
            environment={name: self.env[name] for name in shared} | environment,
        )
        return self.cluster.submit(spec)

    def submit_other(self, seconds: float, gpus: int, node: str = "", name: str = "other") -> int:
        """Another user's ordinary job in `normal`, which preempts ours."""
        spec = JobSpec(
            name=name,
            comment="",
            partition="normal",
            script=f"#!/bin/bash\nexec sleep {seconds:.2f}\n",
            gpus=gpus,
            requeue=False,
            nodelist=(node,) if node else (),
            workdir=str(self.dir),
            output="/dev/null",
        )
        return self.cluster.submit(spec)

    # ---------------------------------------------------------------- the end

    def stop(self) -> None:
        """End everything, in the reverse order; may be repeated."""
        if self._daemon is not None:
            self.end_daemon(self._daemon)
            self._daemon = None
        if self._cluster is not None:
            with contextlib.suppress(
                ClusterError, ClusterUnavailable
            ):  # it is thrown away next, with all its jobs
                self._cluster.close()
            self._cluster = None
        if self._local is not None:
            self._local.stop()
            self._local = None
        if self._sandbox is not None:
            self._sandbox.stop()
            self._sandbox = None

    @staticmethod
    def end_daemon(daemon: subprocess.Popen[bytes]) -> None:
        """SIGTERM (SIGKILL after a while), and wait; also for one that has ended already."""
        if daemon.poll() is None:
            daemon.send_signal(signal.SIGCONT)
            daemon.terminate()
        try:
            daemon.wait(15)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
        if daemon.stdin is not None:
            daemon.stdin.close()
