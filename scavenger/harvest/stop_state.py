"""What holds besides the configuration when the policy is asked: the kill switch, `scavenger drain`, and whether others' jobs are seen.

Two files stop harvesting while they are there: the site's `harvest.stop_file`, which an admin may write without knowing us, and the state
directory's `drain`, which the command writes. One whose first word is "now" does not wait for engines to drain. A file that is there and
cannot be read stops harvesting too, and so do files that give no answer within `cluster.fast_poll_interval_s`
(`waiting.patience_s`).

Owns these files and the events that tell of a change. Decides nothing.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from scavenger.asyncio_helpers import patience_s
from scavenger.cluster.model import ClusterInfo, ClusterView
from scavenger.config import DaemonConfig
from scavenger.harvest.decide.decide import Decision, Limits
from scavenger.harvest.limits import Stop, hidden_jobs, limits_of
from scavenger.harvest.stop_files import StopFiles
from scavenger.harvest.track.tracker import Tracker
from scavenger.ledger import records as rec
from scavenger.protocol import keys

DRAIN = "drain"
HOUR_S = 3600.0
_MOST_BYTES = 500


def drain_path(state_dir: Path) -> Path:
    return state_dir / DRAIN


def drain(state_dir: Path, reason: str, *, at_once: bool) -> None:
    """Have the daemon of this state directory give everything back, and submit nothing until `resume`."""
    keys.write_private(
        drain_path(state_dir), f"{'now' if at_once else 'drain'} {' '.join(reason.split())}\n".encode()
    )


def resume(state_dir: Path) -> bool:
    """Undo `drain`. False when nothing was drained."""
    path = drain_path(state_dir)
    there = path.exists()
    path.unlink(missing_ok=True)
    return there


def read_stop(path: Path | None, what: str) -> Stop | None:
    """What a stop file says; None when there is none."""
    if path is None:
        return None
    try:
        return _ordered(path, what)
    except OSError as error:
        return Stop(f"{what} ({path}) cannot be read: {error.strerror}")


def _ordered(path: Path, what: str) -> Stop | None:
    """The same, of a file that can be read. Raises OSError."""
    try:
        text = _beginning(path)
    except FileNotFoundError:
        return None
    word, _, reason = " ".join(text.split()).partition(" ")
    said = reason if word in ("now", "drain") else f"{word} {reason}".strip()
    return Stop(f"{what}{f': {said}' if said else ''}", at_once=word == "now")


def _beginning(path: Path) -> str:
    """Never waits for a writer, as opening a FIFO would. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        return os.read(descriptor, _MOST_BYTES).decode("utf-8", "replace")
    finally:
        os.close(descriptor)


class StopState:
    """See the module. `config` is asked each time: a reload may change it. `events` is for the ledger; whoever takes them empties it."""

    def __init__(self, config: Callable[[], DaemonConfig]) -> None:
        self._config = config
        self.files = StopFiles(_ordered)
        self.events: list[rec.Event] = []
        self.seen: Stop | None = None  # as of the last `poll`
        self.decided_on: Stop | None = None  # as of the last `limits`
        self.hidden = ""  # why others' jobs cannot be seen
        self.blind = False  # and some of those could not preempt us: nothing is harvested
        self.concluded = ""  # the last decision's reason, for `scavenger status`
        self._could_start: dict[int, float] = {}
        self._looking: asyncio.Future[None] | None = (
            None  # never two at once: each would hold a thread where the files hang
        )
        self._asked_at = 0.0  # when it began (the loop's time)

    def poll(self) -> None:
        """Read the files. They may lie on a file system that hangs: not for the event loop. Of two that in the greater hurry holds."""
        config = self._config()
        stop = self.files.poll(config.harvest.stop_file, "the stop file")
        drained = self.files.poll(drain_path(config.daemon.state_dir), "scavenger drain")
        self.files.answered()
        self.seen = (
            drained
            if drained is not None and (stop is None or (drained.at_once and not stop.at_once))
            else stop
        )

    @property
    def changed(self) -> bool:
        """Whether somebody stopped or resumed harvesting since the last decision; asking has a thread look again for the next time."""
        self._begin()
        if self._left_s() <= 0:
            self.files.no_answer()
        return self.seen != self.decided_on

    async def poll_now(self) -> None:
        """Have the files read in a thread, and know the answer, or that there is none in time."""
        if (
            older := self._looking
        ) is not None and not older.done():  # it may have missed what was written meanwhile
            await asyncio.wait([older], timeout=self._left_s())
        poll = self._begin()
        await asyncio.wait([poll], timeout=self._left_s())
        if poll.done():
            poll.result()
        else:
            self.files.no_answer()

    def _begin(self) -> asyncio.Future[None]:
        """The look under way, or a new one."""
        loop = asyncio.get_running_loop()
        if self._looking is None or self._looking.done():
            self._asked_at = loop.time()
            self._looking = loop.run_in_executor(None, self.poll)
        return self._looking

    def _left_s(self) -> float:
        """How long the look under way may still take."""
        return max(
            0.0,
            self._asked_at
            + patience_s(self._config().cluster.fast_poll_interval_s)
            - asyncio.get_running_loop().time(),
        )

    def limits(
        self, view: ClusterView, info: ClusterInfo, tracker: Tracker, drain_notice_s: float, now: float
    ) -> Limits:
        """What is allowed now, by the last `poll`."""
        config, harvest = self._config(), self._config().harvest
        self._note_stop(self.seen, now)
        self._note_hidden(hidden_jobs(info, view, harvest.sees_all_jobs, now), now)
        part = view.partition(harvest.partition)
        limits = limits_of(
            config,
            tracker.health,
            drain_notice_s,
            now,
            user=info.user,
            stop=self.decided_on,
            hidden=self.hidden,
            restricted=part is not None and part.restricted,
            preempted_last_hour=tracker.preempted_since(now - HOUR_S),
            could_start_since=tuple(self._could_start.items()),
            by_qos=info.preempts_by == "qos",
            plan_step_s=info.plan_step_s,
        )
        self.blind = limits.blind
        hold = self.files.hold
        return limits if not hold else replace(limits, not_before=math.inf, not_before_reason=hold)

    def decided(self, decision: Decision, now: float) -> None:
        """Remember who could start if our engines left, and since when: Slurm gets a while to see to it itself."""
        self._could_start = {job_id: self._could_start.get(job_id, now) for job_id in decision.could_start}
        self.concluded = decision.reason

    def _note_stop(self, stop: Stop | None, now: float) -> None:
        if stop != self.decided_on:
            kind, why = (
                ("harvest_resumed", "nothing stops it any more")
                if stop is None
                else ("harvest_stopped", stop.reason)
            )
            self.events.append(rec.Event(kind, 0, self._config().harvest.partition, why, "{}", now))
        self.decided_on = stop

    def _note_hidden(self, hidden: str, now: float) -> None:
        if bool(hidden) != bool(self.hidden):
            kind, why = ("courtesy_off", hidden) if hidden else ("courtesy_on", "others' jobs are seen")
            self.events.append(rec.Event(kind, 0, self._config().harvest.partition, why, "{}", now))
        self.hidden = hidden
