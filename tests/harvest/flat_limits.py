"""`HarvestLimits` from flat keywords: a test names the two or three limits that it is about."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from scavenger.harvest.decide.actions import (
    Caps,
    HarvestLimits,
    Headroom,
    JobLimits,
    JobPlacement,
    Restrictions,
    YieldLimits,
)

_GROUPS: dict[str, tuple[type[Any], dict[str, str]]] = {
    "caps": (Caps, {}),
    "headroom": (
        Headroom,
        {f"headroom_{name}": name for name in ("gpus", "per_node", "by_type", "by_partition")},
    ),
    "job": (JobLimits, {"cpus_per_engine": "cpus", "memory_mb_per_engine": "memory_mb"}),
    "yielding": (
        YieldLimits,
        {"other_users_window_s": "window_s", "yield_after_s": "after_s", "same_tier_yield_s": "same_tier_s"},
    ),
    "placement": (JobPlacement, {}),
    "restrictions": (Restrictions, {}),
}


def limits_with(base: HarvestLimits | str = "", /, **flat: Any) -> HarvestLimits:
    """`base` with some limits changed, each called as in the configuration; a new one of this partition where `base` is a name."""
    own: dict[str, Any] = {}
    of_group: dict[str, dict[str, Any]] = {group: {} for group in _GROUPS}
    for name, value in flat.items():
        for group, (kind, renamed) in _GROUPS.items():
            field = renamed.get(name, name)
            if field in {f.name for f in fields(kind)} and (field == name) == (name not in renamed):
                of_group[group][field] = value
                break
        else:
            own[name] = value
    if isinstance(base, HarvestLimits):
        groups = {group: replace(getattr(base, group), **changed) for group, changed in of_group.items()}
        return replace(base, **groups, **own)
    made = {group: _GROUPS[group][0](**changed) for group, changed in of_group.items()}
    return HarvestLimits(own.pop("partition", base), **made, **own)
