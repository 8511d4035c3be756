"""What the harvester may do now: the configuration at this hour, the stop files, `scavenger drain`, and whether other users' jobs are seen.

    scavenger.toml --limits_of--> HarvestLimits of this hour  --+
    stop file, drain file --StopState.poll-------------> +--> StopState.limits --> decide
    hidden jobs, polls that fell behind ---------------> +

Files in `drained-nodes`, named after nodes, keep engines off these: `scavenger drain --node` writes them.

Two files stop harvesting while they are there: the site's `harvest.stop_file`, which an admin may write without knowing us, and the state
directory's `drain`, which the command writes. One whose first word is "now" does not wait for engines to drain.

A file that cannot be read now (no descriptor is left, the disk or its server fails, no reply within `cycle_timeout_s`) is no stop:
what was last known holds for `KEEP_S`. After that a file that is known to be there stops harvesting, whatever is in it; while not even that
is known nothing more is submitted, and the engines that run stay. A file that is there and will not be readable by waiting (its mode, a
folder) stops at once: a person put it there.

Owns these files, that rule, its log and the events that report a change. Decides nothing about jobs. `limits_of` and `hours_now` are pure.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import math
import os
import re
import stat
import time
import zoneinfo
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import structlog

from scavenger.asyncio_helpers import cycle_timeout_s
from scavenger.cluster.model import ClusterInfo, ClusterView
from scavenger.config import DaemonConfig, HarvestSection, Hours, OwnersSection
from scavenger.errors import ConfigError
from scavenger.harvest.decide.actions import (
    BlackoutTime,
    Caps,
    HandsRules,
    HarvestDecision,
    HarvestLimits,
    Headroom,
    JobLimits,
    JobPlacement,
    LendingRules,
    OwnerRule,
    Restrictions,
    YieldLimits,
)
from scavenger.harvest.decide.other_users import gpus_by_node
from scavenger.harvest.pace import PaceRules
from scavenger.harvest.track.node_health import Health, HealthRules
from scavenger.harvest.track.tracker import Tracker, TrackerRules
from scavenger.ledger import records as rec
from scavenger.policy.division import DivisionRules
from scavenger.protocol import keys

_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


@dataclass(frozen=True, slots=True)
class Stop:
    """Why everything is to leave; `at_once`: without draining."""

    reason: str
    at_once: bool = False


def rules_of(config: DaemonConfig, uid: str, user: str) -> TrackerRules:
    harvest = config.harvest
    return TrackerRules(
        uid,
        user,
        config.cluster.absent_s,
        HealthRules(harvest.quarantine_after, harvest.quarantine_s, harvest.backoff_s),
    )


def pace_of(config: DaemonConfig) -> PaceRules:
    section = config.cluster
    return PaceRules(
        section.poll_interval_s,
        section.fast_poll_interval_s,
        section.min_poll_interval_s,
        section.max_rpc_per_min,
    )


def stale_s(config: DaemonConfig) -> float:
    """On what was seen longer ago nothing is decided, and nothing more is submitted."""
    return max(2 * config.cluster.poll_interval_s, config.cluster.command_timeout_s)


def limits_of(
    config: DaemonConfig,
    health: Health,
    drain_notice_s: float,
    now: float,
    *,
    user: str = "",
    stop: Stop | None = None,
    hidden: str = "",
    restricted: bool = False,
    preempted_last_hour: int = 0,
    could_start_since: tuple[tuple[int, float], ...] = (),
    drained: Mapping[str, str] = MappingProxyType({}),
    by_qos: bool = False,
    plan_step_s: float = 60.0,
    beyond_link: bool = False,
) -> HarvestLimits:
    """What the configuration and the nodes' health allow now. `restricted`: only named users may use the harvest partition.
    `beyond_link`: the cluster is a further one."""
    harvest, cluster = config.harvest, config.cluster
    hours = hours_now(harvest.schedule, harvest.timezone, now)
    not_before, why = health.backoff()
    return HarvestLimits(
        partition=harvest.partition,
        caps=Caps(
            max_engines=harvest.max_engines
            if hours is None or hours.max_engines is None
            else hours.max_engines,
            max_pending=harvest.max_pending,
            max_gpus=harvest.max_gpus if hours is None or hours.max_gpus is None else hours.max_gpus,
            max_gpus_per_node=harvest.max_gpus_per_node,
            max_nodes_per_engine=harvest.max_nodes_per_engine,
            max_gpus_per_user=harvest.max_gpus_per_user,
            max_preemptions_per_hour=harvest.max_preemptions_per_hour,
            by_partition=tuple(sorted(harvest.max_gpus_by_partition.items())),
            by_type=tuple(sorted(harvest.max_gpus_by_type.items())),
        ),
        headroom=Headroom(
            gpus=harvest.headroom_gpus,
            per_node=harvest.headroom_per_node,
            by_type=tuple(sorted(harvest.headroom_by_type.items())),
            by_partition=tuple(sorted(harvest.headroom_by_partition.items())),
        ),
        job=JobLimits(
            gpu_type=harvest.gpu_type,
            cpus=harvest.cpus_per_engine,
            memory_mb=harvest.memory_mb_per_engine,
            drain_before_s=harvest.drain_before_s,
            min_life_s=min(harvest.min_runtime_s, harvest.time_limit_s) + harvest.drain_before_s,
        ),
        yielding=YieldLimits(
            horizon_s=cluster.poll_interval_s,
            window_s=harvest.other_users_window_s,
            after_s=harvest.yield_after_s,
            same_tier_s=harvest.same_tier_yield_s,
            by_qos=by_qos,
            plan_step_s=plan_step_s,
            could_start_since=could_start_since,
        ),
        placement=JobPlacement(
            # which nodes have the features of a constraint is Slurm's to know
            pin=harvest.placement == "node" and not harvest.constraint,
            standby_jobs=harvest.standby_jobs,
            fresh_after_s=harvest.fresh_after_s,
        ),
        restrictions=Restrictions(
            stop=stop.reason if stop is not None else "",
            stop_now=stop is not None and stop.at_once,
            hidden=hidden,
            blind=bool(hidden) and not (restricted or harvest.sole_user),
            quarantined=health.quarantined(now),
            not_before=not_before,
            not_before_reason=why,
            preempted_last_hour=preempted_last_hour,
            doubted=health.doubted(now),
            drained=tuple(sorted(drained.items())),
        ),
        beyond_link=beyond_link,
        owners=owner_rules(config.owners),
        blackouts=blackouts(harvest, now),
        division=division_rules(harvest),
        hands=hands_rules(harvest),
        lending=None if beyond_link else LendingRules(harvest.lend_slots),
        user=user,
        stale_s=stale_s(config),
        drain_notice_s=drain_notice_s,
    )


def hands_rules(harvest: HarvestSection) -> HandsRules | None:
    """None: no engine changes hands. All jobs of a daemon are one Unix user's; whom Slurm accounts them to may be each run's owner."""
    if not harvest.change_hands:
        return None
    by_owner = "{owner}" in harvest.account or "{owner}" in harvest.wckey
    return HandsRules(by_owner=by_owner, models=harvest.change_models)


def division_rules(harvest: HarvestSection) -> DivisionRules | None:
    """None: by shares."""
    if harvest.division == "shares":
        return None
    return DivisionRules(harvest.division_floor, harvest.division_wait_s, harvest.division_hold_s)


def owner_rules(owners: OwnersSection) -> tuple[OwnerRule, ...]:
    """Of each owner that the file names."""
    types, parts = owners.gpu_types_of, owners.partitions_of
    return tuple(
        OwnerRule(
            name,
            owners.share_of.get(name, 1),
            frozenset(types[name]) if name in types else None,
            frozenset(parts[name]) if name in parts else None,
        )
        for name in sorted(owners.share_of.keys() | types.keys() | parts.keys())
    )


def blackouts(harvest: HarvestSection, now: float) -> tuple[BlackoutTime, ...]:
    """Those that are not over, the first to begin first."""
    found = []
    for one in harvest.blackout:
        start, end = harvest.span(one)
        if now < end:
            words = f"from {one.start:%Y-%m-%d %H:%M} to {one.end:%Y-%m-%d %H:%M}"
            zone = f" {harvest.timezone}" if one.start.tzinfo is None else f" ({one.start:%z})"
            found.append(BlackoutTime(start, end, f"{words}{zone}{f': {one.reason}' if one.reason else ''}"))
    return tuple(sorted(found, key=lambda one: (one.start, one.end)))


def hours_now(schedule: Sequence[Hours], timezone: str, now: float) -> Hours | None:
    """The first entry that holds now. One over midnight belongs to the day on which it begins."""
    zone = (
        datetime.UTC if timezone == "UTC" else zoneinfo.ZoneInfo(timezone)
    )  # UTC needs no database of zones
    at = datetime.datetime.fromtimestamp(now, zone)
    for entry in schedule:
        start, end = (int(part) for part in entry.hours.split("-"))
        if start < end:
            if start <= at.hour < end and _on(entry.days, at.weekday()):
                return entry
        elif (at.hour >= start and _on(entry.days, at.weekday())) or (
            at.hour < end and _on(entry.days, (at.weekday() - 1) % 7)
        ):
            return entry
    return None


def _on(days: str, weekday: int) -> bool:
    first, _, last = days.partition("-")
    low, high = _DAYS.index(first), _DAYS.index(last or first)
    return low <= weekday <= high if low <= high else weekday >= low or weekday <= high


log = structlog.get_logger()

#: Jobs that ended so lately may still explain GPUs that the nodes showed as taken.
_LATELY_S = 120.0
#: How long what was last known holds.
KEEP_S = 60.0
#: Errors of a file that is there which say nothing of the file: the next poll may read it.
PASSING = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOBUFS,
        errno.EIO,
        errno.ESTALE,
        errno.EAGAIN,
        errno.EINTR,
        errno.ETIMEDOUT,
        errno.EREMOTEIO,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENOTCONN,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.ENODEV,
        errno.ENXIO,
    }
)


class StopFiles:
    """`read` says what a stop file (path, what it is called) orders, None where there is none, and raises OSError.

    `unread`: why one cannot be read now, "" when all can.
    """

    def __init__(
        self, read: Callable[[Path, str], Stop | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read, self._clock = read, clock
        self._known: dict[Path, Stop | None] = {}
        self._failing: dict[Path, tuple[float, str]] = {}  # since when, and why
        self._silent_since: float | None = None
        self._asked: set[Path] = set()
        self.unread = ""

    @property
    def paused(self) -> str:
        """Why nothing may be submitted; "" = it may. Not known for `KEEP_S`, or since the start: whether it is stopped."""
        since = [at for at, _ in self._failing.values()]
        if self._silent_since is not None:
            since.append(self._silent_since)
        return self.unread if since and self._clock() - min(since) >= KEEP_S else ""

    def poll(self, path: Path | None, what: str) -> Stop | None:
        """What holds of one file now."""
        if path is None:
            return None
        self._asked.add(path)
        try:
            there = self._is_there(path)
            stop = self._read(path, what) if there else None
        except OSError as error:
            return self._not_read(path, what, error)
        self._known[path] = stop
        self._failing.pop(path, None)
        self._tell()
        return stop

    def answered(self) -> None:
        """All files were polled. One that is none of them any more, after a reload, holds nothing up."""
        self._silent_since = None
        self._failing = {path: failing for path, failing in self._failing.items() if path in self._asked}
        self._asked.clear()
        self._tell()

    def no_answer(self) -> None:
        """A poll takes too long: what was last known holds."""
        if self._silent_since is None:
            self._silent_since = self._clock() - (0.0 if self._known else KEEP_S)
        self._tell()

    @staticmethod
    def _is_there(path: Path) -> bool:
        """Takes no descriptor: that none is left does not hide that there is no file. Raises OSError."""
        try:
            path.stat()
        except FileNotFoundError:
            return False
        return True

    def _not_read(self, path: Path, what: str, error: OSError) -> Stop | None:
        why, there = f"{what} ({path}) cannot be read: {error.strerror}", True
        try:
            there = self._is_there(path)
        except OSError:
            there = False  # not known
        now = self._clock()
        since = self._failing.get(path, (now if path in self._known else now - KEEP_S, ""))[0]
        if there and (error.errno not in PASSING or now - since >= KEEP_S):
            self._known[path] = Stop(why)
            if error.errno not in PASSING:
                self._failing.pop(path, None)
                self._tell()
                return self._known[path]
        self._failing[path] = (since, why)
        self._tell()
        return self._known.get(path)

    def _tell(self) -> None:
        whys = [why for _, why in self._failing.values()]
        if self._silent_since is not None:
            whys.append("the stop files cannot be read: no answer")
        unread = "; ".join(whys)
        if unread and unread != self.unread:
            log.warning(
                "stop file unread",
                reason=unread,
                holds=f"what was last known, for {KEEP_S:g} s",
                remedy="see to the file system, or to the limit on open files",
            )
        elif self.unread and not unread:
            log.info("stop files are read again")
        self.unread = unread


DRAIN, DRAINED_NODES = "drain", "drained-nodes"
#: What may name a node in a file's name: Slurm's own names of nodes, and no path.
_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
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


def drain_node(state_dir: Path, node: str, reason: str) -> None:
    """Have engines leave this node, and none start there until `resume_node`. Raises `ConfigError` for what is no node's name."""
    keys.write_private(_node_path(state_dir, node), f"{' '.join(reason.split())}\n".encode())


def resume_node(state_dir: Path, node: str) -> bool:
    """Undo `drain_node`. False when it was not drained."""
    path = _node_path(state_dir, node)
    there = path.exists()
    path.unlink(missing_ok=True)
    return there


def drained_nodes(state_dir: Path) -> dict[str, str]:
    """Nodes that `drain_node` named, with what to say of them. Raises OSError."""
    try:
        names = sorted(os.listdir(state_dir / DRAINED_NODES))
    except FileNotFoundError:
        return {}
    found = {}
    for name in filter(_NODE_NAME.fullmatch, names):
        with contextlib.suppress(FileNotFoundError):
            said = " ".join(_beginning(state_dir / DRAINED_NODES / name).split())
            found[name] = f"{name} is drained by scavenger drain --node{f': {said}' if said else ''}"
    return found


def _node_path(state_dir: Path, node: str) -> Path:
    if not _NODE_NAME.fullmatch(node):
        raise ConfigError(f"{node!r} is no node's name", "name one as `sinfo -N` does")
    return state_dir / DRAINED_NODES / node


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


def hidden_jobs(info: ClusterInfo, view: ClusterView, sees_all: bool, now: float) -> str:
    """Why we cannot know who waits, or "".

    With PrivateData=jobs only an operator sees other users' jobs. Seeing some, and none missing, proves it.
    """
    if "jobs" not in info.private or sees_all:
        return ""
    explained: dict[str, int] = {}
    seen = False
    for job in view.jobs:
        seen = seen or job.user != info.user
        if job.has_gpus_allocated or now - job.end_time < _LATELY_S:
            for node, gpus in gpus_by_node(job):
                explained[node] = explained.get(node, 0) + gpus
    unexplained = sum(max(0, node.gpus_allocated - explained.get(node.name, 0)) for node in view.nodes)
    if unexplained:
        return f"PrivateData hides jobs: {unexplained} GPUs are taken by jobs that {info.user} may not see"
    return "" if seen else f"PrivateData hides jobs: {info.user} sees no other user's job"


class StopState:
    """See the module. `config` is asked each time: a reload may change it. `events` is for the ledger; the caller empties it.
    `beyond_link`: the cluster is a further one."""

    def __init__(self, config: Callable[[], DaemonConfig], *, beyond_link: bool = False) -> None:
        self._config, self._beyond_link = config, beyond_link
        self.files = StopFiles(_ordered)
        self.events: list[rec.Event] = []
        self.stop_read: Stop | None = None  # as of the last `poll`
        self.stop_in_force: Stop | None = None  # as of the last `update_limits`
        self.drained_nodes: dict[str, str] = {}  # by node, why: as of the last `poll` that could read it
        self.drained_in_force: dict[str, str] = {}  # as of the last `update_limits`
        self.hidden = ""  # why other users' jobs cannot be seen
        self.blind = False  # and some of those could not preempt us: nothing is harvested
        self.concluded = ""  # the last decision's reason, for `scavenger status`
        self.concluded_public = ""  # the same without names, for every user of the site
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
        with contextlib.suppress(OSError):  # unreadable: what was last known holds
            self.drained_nodes = drained_nodes(config.daemon.state_dir)
        self.stop_read = (
            drained
            if drained is not None and (stop is None or (drained.at_once and not stop.at_once))
            else stop
        )

    def poll_and_compare(self) -> bool:
        """Whether harvesting, or a node, was stopped or resumed since the last decision; a thread polls again for the next time."""
        self._begin()
        if self._left_s() <= 0:
            self.files.no_answer()
        return self.changed

    @property
    def changed(self) -> bool:
        """Whether the files order something else than at the last `update_limits`."""
        return self.stop_read != self.stop_in_force or self.drained_nodes != self.drained_in_force

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
        """The poll under way, or a new one."""
        loop = asyncio.get_running_loop()
        if self._looking is None or self._looking.done():
            self._asked_at = loop.time()
            self._looking = loop.run_in_executor(None, self.poll)
        return self._looking

    def _left_s(self) -> float:
        """How long the poll under way may still take."""
        return max(
            0.0,
            self._asked_at
            + cycle_timeout_s(self._config().cluster.fast_poll_interval_s)
            - asyncio.get_running_loop().time(),
        )

    def update_limits(
        self, view: ClusterView, info: ClusterInfo, tracker: Tracker, drain_notice_s: float, now: float
    ) -> HarvestLimits:
        """What is allowed now, by the last `poll`; what that changes is noted here, and in `events`."""
        config, harvest = self._config(), self._config().harvest
        self._note_stop(self.stop_read, now)
        self._note_drained(now)
        self._note_hidden(hidden_jobs(info, view, harvest.sees_all_jobs, now), now)
        part = view.partition(harvest.partition)
        limits = limits_of(
            config,
            tracker.health,
            drain_notice_s,
            now,
            user=info.user,
            stop=self.stop_in_force,
            hidden=self.hidden,
            restricted=part is not None and part.restricted,
            preempted_last_hour=tracker.preempted_since(now - HOUR_S),
            could_start_since=tuple(self._could_start.items()),
            drained=self.drained_in_force,
            by_qos=info.preempts_by == "qos",
            plan_step_s=info.plan_step_s,
            beyond_link=self._beyond_link,
        )
        self.blind = limits.restrictions.blind
        paused = self.files.paused
        if not paused:
            return limits
        return replace(
            limits, restrictions=replace(limits.restrictions, not_before=math.inf, not_before_reason=paused)
        )

    def decided(self, decision: HarvestDecision, now: float) -> None:
        """Remember who could start if our engines left, and since when: Slurm gets a while to see to it itself."""
        self._could_start = {job_id: self._could_start.get(job_id, now) for job_id in decision.could_start}
        self.concluded, self.concluded_public = decision.reason, decision.public

    def _note_stop(self, stop: Stop | None, now: float) -> None:
        if stop != self.stop_in_force:
            kind, why = (
                ("harvest_resumed", "nothing stops it any more")
                if stop is None
                else ("harvest_stopped", stop.reason)
            )
            self.events.append(rec.Event(kind, 0, self._config().harvest.partition, why, "{}", now))
        self.stop_in_force = stop

    def _note_drained(self, now: float) -> None:
        before, drained = self.drained_in_force, self.drained_nodes
        for node in sorted(before.keys() | drained.keys()):
            if before.get(node) != drained.get(node):
                kind, why = (
                    ("node_drained", drained[node])
                    if node in drained
                    else ("node_undrained", "engines may start there again")
                )
                self.events.append(rec.Event(kind, 0, node, why, "{}", now))
        self.drained_in_force = drained

    def _note_hidden(self, hidden: str, now: float) -> None:
        if bool(hidden) != bool(self.hidden):
            kind, why = (
                ("voluntary_preemption_off", hidden)
                if hidden
                else ("voluntary_preemption_on", "other users' jobs are seen")
            )
            self.events.append(rec.Event(kind, 0, self._config().harvest.partition, why, "{}", now))
        self.hidden = hidden
