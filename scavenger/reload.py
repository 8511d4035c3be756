"""What a changed scavenger.toml changes in a daemon that runs, and what only a restart does. Pure.

Owns the list of keys that may change live. Whatever is not on it needs a restart: that is said by name, and the old value stays in force.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from scavenger.config import SECRETS, DaemonConfig

#: Read afresh each time they are used: `harvest.driver` asks its configuration at every cycle.
LIVE = frozenset({
    "cluster.max_rpc_per_min",
    "cluster.observe_floor_s",
    "cluster.observe_s",
    "cluster.quick_s",
    "harvest.account",
    "harvest.constraint",
    "harvest.container",
    "harvest.courtesy_after_s",
    "harvest.courtesy_window_s",
    "harvest.cpus_per_engine",
    "harvest.drain_before_s",
    "harvest.fresh_after_s",
    "harvest.gpu_type",
    "harvest.headroom_by_partition",
    "harvest.headroom_by_type",
    "harvest.headroom_gpus",
    "harvest.headroom_per_node",
    "harvest.job_template",
    "harvest.least_life_s",
    "harvest.leave",
    "harvest.max_engines",
    "harvest.max_gpus",
    "harvest.max_gpus_per_node",
    "harvest.max_gpus_per_user",
    "harvest.max_pending",
    "harvest.max_preemptions_per_hour",
    "harvest.memory_mb_per_engine",
    "harvest.nice",
    "harvest.outlast",
    "harvest.peer_yield_s",
    "harvest.placement",
    "harvest.pull_mb_per_s",
    "harvest.python",
    "harvest.qos",
    "harvest.schedule",
    "harvest.sees_all_jobs",
    "harvest.sole_user",
    "harvest.spares",
    "harvest.stop_file",
    "harvest.time_limit_s",
    "harvest.time_min_s",
    "harvest.time_stagger",
    "harvest.timezone",
    "harvest.wckey",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Change:
    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return self.key if self.key in SECRETS else f"{self.key}: {self.before!r} -> {self.after!r}"


@dataclass(frozen=True, slots=True)
class Plan:
    """`config` has the live changes and no other."""

    config: DaemonConfig
    live: tuple[Change, ...]
    restart: tuple[Change, ...]


def plan(now: DaemonConfig, wanted: DaemonConfig) -> Plan:
    changes = tuple(_changes(now, wanted))
    live = tuple(change for change in changes if change.key in LIVE)
    updates: dict[str, dict[str, Any]] = {}
    for change in live:
        section, _, key = change.key.partition(".")
        updates.setdefault(section, {})[key] = change.after
    made = now.model_copy(update={name: getattr(now, name).model_copy(update=keys) for name, keys in updates.items()})
    return Plan(made, live, tuple(change for change in changes if change.key not in LIVE))


def _changes(now: DaemonConfig, wanted: DaemonConfig) -> Iterator[Change]:
    for section in sorted(type(now).model_fields):
        before, after = getattr(now, section), getattr(wanted, section)
        for key in sorted(type(before).model_fields):
            if getattr(before, key) != getattr(after, key):
                yield Change(f"{section}.{key}", getattr(before, key), getattr(after, key))
