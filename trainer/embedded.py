"""The run's own daemon: started on the training job's first node, looked after, and ended with the job. For a site that has none.

Owns that process. It dies with the launcher however that ends: its standard input is a pipe of ours, and the kernel signals it. Knows
nothing of what the daemon does: it is an argv, and a rendezvous file that names it once it serves.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from scavenger import config as configs
from scavenger.backoff import backoff_s
from scavenger.config import RunConfig
from scavenger.errors import AuthError, ConfigError, DaemonUnavailable, Refused
from scavenger.protocol import keys
from trainer.reserved import die_with_parent

#: A daemon that ended so is not started again: its configuration cannot be used, or another one has the ledger.
FINAL = {2: "its configuration cannot be used", 4: "another daemon has this ledger or state directory"}
START_S = 300.0  # its Python alone took 95 s on a busy machine
#: It cancels its harvested jobs and commits what it has.
STOP_S = 45.0
FIRST_BACKOFF_S, MOST_BACKOFF_S = 1.0, 30.0
STEADY_S = 60.0
POLL_S = 0.05


def check(config: RunConfig) -> None:
    """Raises `ConfigError` unless the daemon's configuration is for this run's state directory."""
    path = config.daemon.config
    assert path is not None
    theirs, ours = configs.read_daemon(path).daemon.state_dir, config.run.state_dir
    if theirs.resolve() != ours.resolve():
        raise ConfigError(
            f"daemon.config = {str(path)!r} has daemon.state_dir = {str(theirs)!r}, and the run has run.state_dir = {str(ours)!r}",
            "name one directory in both: the run meets its daemon there",
        )


def check_address(config: RunConfig) -> None:
    """Raises `ConfigError` where the configuration announces one host's name: the node that the job starts on is not known before."""
    path = config.daemon.config
    assert path is not None
    theirs = configs.read_daemon(path)
    local = theirs.cluster.backend == "local" or theirs.cluster.local_dir is not None
    if theirs.daemon.advertise and not local:
        raise ConfigError(
            f"{path} has daemon.advertise = {theirs.daemon.advertise!r}, and the run's own daemon runs on whichever node the job gets: "
            "engines would look for it on that host",
            'take daemon.advertise out, with daemon.listen = "0.0.0.0": the node\'s own name is announced',
        )


class EmbeddedDaemon:
    """See the module. `log`: where it says what it does."""

    def __init__(
        self, python: str, config: Path, state_dir: Path, environ: Mapping[str, str], log: Path
    ) -> None:
        self._argv = [
            python,
            "-m",
            "scavenger",
            "daemon",
            "--config",
            str(config),
            "--die-with-stdin",
            "--for-run",
        ]
        self._environ, self._state_dir, self._log = dict(environ), state_dir, log
        self._ends = 0  # in a row, each after less than `STEADY_S`
        self._start_at = self._started_at = 0.0
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it serves. Raises `Refused` when it will not, `DaemonUnavailable` when it does not in time."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._spawn(time.monotonic())
        deadline = time.monotonic() + START_S
        while not self._serves():
            assert self.process is not None
            code = self.process.poll()
            if code is not None:
                raise Refused(f"the run's own daemon did not start: {_why(code)}", f"its log: {self._log}")
            if time.monotonic() > deadline:
                raise DaemonUnavailable(
                    f"the run's own daemon did not serve within {START_S:g} s", f"its log: {self._log}"
                )
            time.sleep(POLL_S)  # between two looks at the rendezvous file

    def tend(self, now: float) -> None:
        """Start it again when it ended, with growing waits. Raises `Refused` when that cannot help. `now`: monotonic seconds."""
        if self.process is None:
            if now >= self._start_at:
                self._spawn(now)
            return
        code = self.process.poll()
        if code is None:
            return
        self._let_go()
        if code in FINAL:
            raise Refused(f"the run's own daemon ended: {_why(code)}", f"its log: {self._log}")
        self._ends = 1 if now - self._started_at >= STEADY_S else self._ends + 1
        wait = backoff_s(FIRST_BACKOFF_S, MOST_BACKOFF_S, self._ends)
        print(f"launch: the run's daemon {_why(code)}; again in {wait:g} s", flush=True)
        self._start_at = now + wait

    def stop(self) -> None:
        """SIGTERM, and SIGKILL after `STOP_S`. May be called twice."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._let_go()

    def _spawn(self, now: float) -> None:
        descriptor = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self.process = subprocess.Popen(
                self._argv,
                env=self._environ,
                stdin=subprocess.PIPE,
                stdout=descriptor,
                stderr=descriptor,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        finally:
            os.close(descriptor)
        self._started_at = now

    def _serves(self) -> bool:
        assert self.process is not None
        try:
            return keys.read_rendezvous(self._state_dir).pid == self.process.pid
        except (DaemonUnavailable, AuthError):
            return False

    def _let_go(self) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process = None


def _why(code: int) -> str:
    return FINAL.get(code, f"ended with status {code}")
