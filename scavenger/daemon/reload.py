"""What a changed scavenger.toml changes in a daemon that runs, and what only a restart does. Pure.

`scavenger.config.site.LIVE` lists the keys that may change live; every other key that changed needs a restart:
it is reported by name, and the old value stays in force.

Boundary: the comparison of two configurations; no IO.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from scavenger.config import SECRETS, DaemonConfig
from scavenger.config.site import LIVE


@dataclass(frozen=True, slots=True)
class Change:
    """One key whose value differs; a secret's value is never printed."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return self.key if self.key in SECRETS else f"{self.key}: {self.before!r} -> {self.after!r}"


@dataclass(frozen=True, slots=True)
class ReloadPlan:
    """`config`: the one in force from now on, with the live changes only. `restart`: changes that wait for a restart."""

    config: DaemonConfig
    live: tuple[Change, ...]
    restart: tuple[Change, ...]


def plan(now: DaemonConfig, wanted: DaemonConfig) -> ReloadPlan:
    """What changes at once and what needs a restart, between the configuration in force and the one that the file has now."""
    changes = tuple(_changes(now, wanted))
    live = tuple(change for change in changes if change.key in LIVE)
    updates: dict[str, dict[str, Any]] = {}
    for change in live:
        section, _, key = change.key.partition(".")
        updates.setdefault(section, {})[key] = change.after
    made = now.model_copy(
        update={name: getattr(now, name).model_copy(update=keys) for name, keys in updates.items()}
    )
    return ReloadPlan(made, live, tuple(change for change in changes if change.key not in LIVE))


def _changes(now: DaemonConfig, wanted: DaemonConfig) -> Iterator[Change]:
    for section in sorted(type(now).model_fields):
        before, after = getattr(now, section), getattr(wanted, section)
        for key in sorted(type(before).model_fields):
            if getattr(before, key) != getattr(after, key):
                yield Change(f"{section}.{key}", getattr(before, key), getattr(after, key))
