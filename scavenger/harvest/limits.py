"""How configuration becomes what tracker and policy may do. Pure."""

from __future__ import annotations

from scavenger.config import DaemonConfig
from scavenger.harvest.health import Health, HealthRules
from scavenger.harvest.pace import PaceRules
from scavenger.harvest.policy import Limits
from scavenger.harvest.tracker import Rules


def rules_of(config: DaemonConfig, uid: str, user: str) -> Rules:
    harvest = config.harvest
    return Rules(uid, user, config.cluster.absent_s, HealthRules(harvest.quarantine_after, harvest.quarantine_s, harvest.backoff_s))


def pace_of(config: DaemonConfig) -> PaceRules:
    section = config.cluster
    return PaceRules(section.observe_s, section.quick_s, section.observe_floor_s, section.max_rpc_per_min)


def limits_of(config: DaemonConfig, health: Health, leave_s: float, now: float) -> Limits:
    """What the configuration and the nodes' health allow now."""
    harvest, cluster = config.harvest, config.cluster
    not_before, why = health.backoff()
    return Limits(
        partition=harvest.partition,
        max_engines=harvest.max_engines,
        max_pending=harvest.max_pending,
        headroom_gpus=harvest.headroom_gpus,
        gpu_type=harvest.gpu_type,
        cpus_per_engine=harvest.cpus_per_engine,
        memory_mb_per_engine=harvest.memory_mb_per_engine,
        stale_s=max(2 * cluster.observe_s, cluster.command_timeout_s),
        horizon_s=cluster.observe_s,
        leave_s=leave_s,
        quarantined=health.quarantined(now),
        not_before=not_before,
        not_before_reason=why,
    )
