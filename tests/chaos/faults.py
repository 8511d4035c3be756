"""How a fault is done and when it is over: one class for each that lasts. A kill is over at once.

Each ends by what can be observed (its leases moved, a newer daemon serves, the daemon says why it stalls), and not before its `away_s`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from scavenger.cluster.model import JobState
from scavenger.demo.site import DemoSite
from scavenger.errors import Fenced
from tests.chaos.choose import Process
from tests.chaos.parts import is_there, variable
from tests.chaos.proxy import Proxy
from tests.system import play

#: A stopped or cut-off part comes back after so long even when nothing took its place.
PATIENCE_S = 12.0
#: A daemon must find within this that its generation is superseded, and end; it may wait for its database meanwhile.
FENCED_S = 60.0


class Lasting(Protocol):
    """A fault that goes on. `over` is asked often; `end` is called once, also when the run fails."""

    def over(self) -> bool: ...

    def end(self) -> None: ...


def engine_left(site: DemoSite, process: Process) -> bool:
    """Whether the ledger says that this engine is gone or holds nothing."""
    job = variable(process.pid, "SCAVENGER_JOB_ID") or "0"
    held = (
        "SELECT count(*) FROM workers w JOIN leases l ON l.worker_id = w.worker_id AND l.ended_at IS NULL "
        f"WHERE w.left_at IS NULL AND w.job_id = {int(job)} AND w.kind = '{process.name.split()[0]}'"
    )
    return play.ask(site, held) == [(0,)]


@dataclass
class Stopped:
    """A process that does not run and is not gone: a zombie, until its leases moved."""

    site: DemoSite
    process: Process
    away_s: float
    since: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def over(self) -> bool:
        lasted = time.monotonic() - self.since
        if lasted < self.away_s or lasted > PATIENCE_S or not is_there(self.process):
            return lasted >= self.away_s
        return self.process.part != "engine" or engine_left(self.site, self.process)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # another fault killed it meanwhile
            if is_there(self.process):
                os.kill(self.process.pid, signal.SIGCONT)


@dataclass
class StoppedDaemon:
    """A stalled daemon beside its successor: it wakes when the other serves (or cannot start for it), and must end as fenced."""

    site: DemoSite
    first: subprocess.Popen[bytes]
    since: float = field(default_factory=time.monotonic)
    woken_at: float = 0.0
    generation: int = 0

    def __post_init__(self) -> None:
        self.generation = self.site.generation
        os.kill(self.first.pid, signal.SIGSTOP)

    def superseded(self) -> bool:
        return self.site.generation > self.generation

    def over(self) -> bool:
        """First the successor, then the end of the first. Raises AssertionError when it does not end, or otherwise than fenced."""
        now = time.monotonic()
        if not self.woken_at:
            if self.superseded() or now - self.since > PATIENCE_S or self.first.poll() is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.first.pid, signal.SIGCONT)
                self.woken_at = now
            return False
        code = self.first.poll()
        assert code is not None or now - self.woken_at < FENCED_S, (
            f"a superseded daemon still runs after {FENCED_S:g} s"
        )
        assert code in (None, Fenced.exit_code, -signal.SIGKILL), (
            f"a superseded daemon ended with status {code}"
        )
        return code is not None

    def end(self) -> None:
        self.site.end_daemon(self.first)


@dataclass
class StoppedTrainer:
    """A hung rank 0 beside the job that was submitted in its place: it wakes when the other has the run, and must end as outdated."""

    site: DemoSite
    process: Process
    job: int
    since: float = field(default_factory=time.monotonic)
    woken_at: float = 0.0
    attempts: int = 0

    def __post_init__(self) -> None:
        self.attempts = self._attempts()
        os.kill(self.process.pid, signal.SIGSTOP)

    def _attempts(self) -> int:
        rows = play.ask(self.site, "SELECT count(*) FROM attempts")
        return int(rows[0][0]) if rows else 0

    def over(self) -> bool:
        """First the successor's attempt, then the end of the job. Raises AssertionError when it completes or goes on."""
        now = time.monotonic()
        if not self.woken_at:
            if (
                self._attempts() > self.attempts
                or now - self.since > 2 * PATIENCE_S
                or not is_there(self.process)
            ):
                self.end()
                self.woken_at = now
            return False
        seen = play.job(self.site, self.job)
        ended = seen is not None and seen.state in play.ENDED and not seen.flags
        assert ended or now - self.woken_at < 2 * FENCED_S, (
            f"an outdated training job still runs after {2 * FENCED_S:g} s"
        )
        assert seen is None or seen.state is not JobState.COMPLETED, "an outdated training job completed"
        return ended

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # another fault killed it meanwhile
            if is_there(self.process):
                os.kill(self.process.pid, signal.SIGCONT)


@dataclass
class Hole:
    """Processes whose connections to the daemon stay open while nothing passes."""

    proxy: Proxy
    process: Process
    away_s: float
    deliver: bool
    since: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.proxy.hole((self.process.pid,))

    def over(self) -> bool:
        return time.monotonic() - self.since > 0.5 + 1.5 * self.away_s

    def end(self) -> None:
        self.proxy.heal(deliver=self.deliver)


@dataclass
class FullDisk:
    """The file system of the state directory without a free block, until the daemon says so or a while has passed."""

    site: DemoSite
    away_s: float
    since: float = field(default_factory=time.monotonic)
    said: int = 0

    def __post_init__(self) -> None:
        self.said = self._stalls()
        fill(self.ballast)

    @property
    def ballast(self) -> Path:
        return self.site.state_dir / "ballast"

    def _stalls(self) -> int:
        return (self.site.dir / "daemon.log").read_text(errors="replace").count("STALLED_DISK_FULL")

    def over(self) -> bool:
        lasted = time.monotonic() - self.since
        return lasted > self.away_s and (lasted > PATIENCE_S or self._stalls() > self.said)

    def end(self) -> None:
        self.ballast.unlink(missing_ok=True)


def fill(ballast: Path) -> None:
    """Take every block that is left."""
    with (
        ballast.open("wb", buffering=0) as file,
        contextlib.suppress(OSError),
    ):  # somebody else took a block meanwhile
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(ballast.parent).free)
    while (left := shutil.disk_usage(ballast.parent).free) > 0:
        with ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):  # as above
            file.write(bytes(left))
