"""How configuration becomes what tracker and policy may do. Pure.

Owns the reading of the week's hours.
"""

from __future__ import annotations

import datetime
import zoneinfo
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scavenger.config import DaemonConfig, Hours
from scavenger.harvest.decide.decide import Limits
from scavenger.harvest.pace import PaceRules
from scavenger.harvest.track.node_health import Health, HealthRules
from scavenger.harvest.track.tracker import Rules

_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


@dataclass(frozen=True, slots=True)
class Stop:
    """Why everything is to leave; `at_once`: without draining."""

    reason: str
    at_once: bool = False


def rules_of(config: DaemonConfig, uid: str, user: str) -> Rules:
    harvest = config.harvest
    return Rules(
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
    by_qos: bool = False,
    plan_step_s: float = 60.0,
) -> Limits:
    """What the configuration and the nodes' health allow now. `restricted`: only named users may use the harvest partition."""
    not_before, why = health.backoff()
    return replace(
        _configured(config, now),
        drain_notice_s=drain_notice_s,
        could_start_since=could_start_since,
        by_qos=by_qos,
        plan_step_s=plan_step_s,
        user=user,
        stop=stop.reason if stop is not None else "",
        stop_now=stop is not None and stop.at_once,
        hidden=hidden,
        blind=bool(hidden) and not (restricted or config.harvest.sole_user),
        preempted_last_hour=preempted_last_hour,
        quarantined=health.quarantined(now),
        not_before=not_before,
        not_before_reason=why,
    )


def _configured(config: DaemonConfig, now: float) -> Limits:
    """What the configuration alone allows at this hour."""
    harvest, cluster = config.harvest, config.cluster
    hours = hours_now(harvest.schedule, harvest.timezone, now)
    return Limits(
        partition=harvest.partition,
        max_engines=harvest.max_engines if hours is None or hours.max_engines is None else hours.max_engines,
        max_gpus=harvest.max_gpus if hours is None or hours.max_gpus is None else hours.max_gpus,
        max_pending=harvest.max_pending,
        max_gpus_per_node=harvest.max_gpus_per_node,
        max_gpus_per_user=harvest.max_gpus_per_user,
        headroom_gpus=harvest.headroom_gpus,
        headroom_per_node=harvest.headroom_per_node,
        headroom_by_type=tuple(sorted(harvest.headroom_by_type.items())),
        headroom_by_partition=tuple(sorted(harvest.headroom_by_partition.items())),
        gpu_type=harvest.gpu_type,
        cpus_per_engine=harvest.cpus_per_engine,
        memory_mb_per_engine=harvest.memory_mb_per_engine,
        stale_s=stale_s(config),
        horizon_s=cluster.poll_interval_s,
        other_users_window_s=harvest.other_users_window_s,
        yield_after_s=harvest.yield_after_s,
        same_tier_yield_s=harvest.same_tier_yield_s,
        drain_before_s=harvest.drain_before_s,
        min_life_s=min(harvest.min_runtime_s, harvest.time_limit_s) + harvest.drain_before_s,
        fresh_after_s=harvest.fresh_after_s,
        standby_jobs=harvest.standby_jobs,
        pin=harvest.placement == "node"
        and not harvest.constraint,  # which nodes have the features is Slurm's to know
        max_preemptions_per_hour=harvest.max_preemptions_per_hour,
    )


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
