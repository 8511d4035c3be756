"""Whether a partition may be harvested at all: jobs in it must never be in another user's way. Pure.

Refuses what is wrong for as long as the site is configured so; what may pass (a partition set down for an hour) is the policy's affair.
"""

from __future__ import annotations

from collections.abc import Sequence

from scavenger.cluster.model import ClusterInfo, Partition, PreemptMode
from scavenger.errors import ConfigError

_EXAMPLE = "PreemptType=preempt/partition_prio, and for the partition: PreemptMode=REQUEUE PriorityTier=1 (the others' tiers higher)"


def check(info: ClusterInfo, partitions: Sequence[Partition], name: str, qos: str = "") -> None:
    """Raise `ConfigError`, naming cause and remedy, unless jobs in partition `name` give way to every other job on its nodes.

    `qos` is `harvest.qos`: where Slurm preempts by QOS it, not the partition's tier, decides who gives way, and the site's admin set it up.
    It may have a PreemptExemptTime of its own, in place of the cluster's; `scavenger doctor` asks for that.
    """
    part = next((p for p in partitions if p.name == name), None)
    if part is None:
        known = ", ".join(sorted(p.name for p in partitions)) or "none"
        raise ConfigError(
            f"harvest.partition = {name!r}: cluster {info.name} has no such partition", f"it has: {known}"
        )
    if not part.nodes:
        raise ConfigError(
            f"harvest.partition = {name!r}: the partition has no nodes",
            "add the nodes whose idle GPUs may be used",
        )
    if info.preempts_by == "none":
        why = f"harvest.partition = {name!r}: cluster {info.name} preempts nothing (PreemptType={info.preempt_type})"
        raise ConfigError(
            f"{why}; harvested jobs would block other users' jobs", f"ask the admin for {_EXAMPLE}"
        )
    if part.preempt_mode is PreemptMode.OFF:
        why = f"harvest.partition = {name!r} is not preemptible (PreemptMode=OFF); harvested jobs would block other users' jobs"
        raise ConfigError(why, f"choose a preemptible partition, or ask the admin for {_EXAMPLE}")
    if part.preempt_mode is PreemptMode.SUSPEND:
        why = (
            f"harvest.partition = {name!r} suspends what it preempts; a suspended engine keeps its GPU memory"
        )
        raise ConfigError(why, "set PreemptMode=REQUEUE on the partition")
    if info.exempt_s and not qos:
        why = f"PreemptExemptTime = {info.exempt_s:g} s: nobody can preempt harvested jobs for that long, so others would wait"
        remedy = "PreemptExemptTime=-1 in slurm.conf, or a QOS of our own with PreemptExemptTime=00:00:00 (harvest.qos)"
        raise ConfigError(f"cluster {info.name} has {why}", f"ask the admin for {remedy}")
    if info.preempts_by == "qos":
        if not qos:
            why = f"cluster {info.name} preempts by QOS, and harvest.qos is empty; harvested jobs would block other users' jobs"
            raise ConfigError(why, "set harvest.qos to a QOS that the others' QOS may preempt")
        return
    _check_tier(part, partitions)


def _check_tier(part: Partition, partitions: Sequence[Partition]) -> None:
    shared = sorted(
        (p for p in partitions if p.name != part.name and p.up and p.nodes & part.nodes), key=lambda p: p.name
    )
    not_above = [p.name for p in shared if p.priority_tier <= part.priority_tier]
    if not_above:
        raise ConfigError(
            f"harvest.partition = {part.name!r} has PriorityTier={part.priority_tier}, which is not below that of "
            f"{', '.join(not_above)} on the same nodes; users there could not take the GPUs back",
            f"lower the PriorityTier of {part.name}, or raise theirs",
        )
