"""Whether a partition may be harvested at all: jobs in it must never be in another user's way. Pure.

Refuses what is wrong for as long as the site is configured so; what may pass (a partition set down for an hour) is the policy's affair.
"""

from __future__ import annotations

from collections.abc import Sequence

from scavenger.cluster.model import ClusterInfo, Partition, PreemptMode, Qos
from scavenger.errors import ConfigError

_EXAMPLE = "PreemptType=preempt/partition_prio, and for the partition: PreemptMode=REQUEUE PriorityTier=1 (other partitions higher)"


def check(info: ClusterInfo, partitions: Sequence[Partition], name: str, qos: str = "") -> None:
    """Raise `ConfigError`, naming cause and remedy, unless jobs in partition `name` give way to every other job on its nodes.

    `qos` is `harvest.qos`: where Slurm preempts by QOS it, not the partition's tier, decides who gives way. It may have a PreemptMode and a
    PreemptExemptTime of its own. What slurmdbd has not told (`ClusterInfo.qos` is None) is not checked.
    """
    part = next((p for p in partitions if p.name == name), None)
    if part is None:
        known = ", ".join(sorted(p.name for p in partitions)) or "none"
        raise ConfigError(
            f"harvest.partition = {name!r}: cluster {info.name} has no such partition",
            f"it has: {known}; how to make one that all others may preempt: docs/admin.md",
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
    ours = _find_qos(info, qos)
    _check_mode(info, part, ours)
    _check_exempt_time(info, qos, ours)
    if info.preempts_by == "qos":
        _check_qos(info, qos, ours)
    else:
        _check_tier(part, partitions)


def _find_qos(info: ClusterInfo, name: str) -> Qos | None:
    """None: `name` is "", or the site's QOS are not known."""
    if not name or info.qos is None:
        return None
    found = next((qos for qos in info.qos if qos.name == name), None)
    if found is None:
        known = ", ".join(qos.name for qos in info.qos) or "none"
        raise ConfigError(
            f"harvest.qos = {name!r}: cluster {info.name} has no such QOS",
            f"it has: {known}; how to make one that all others may preempt: docs/admin.md",
        )
    return found


def _check_mode(info: ClusterInfo, part: Partition, qos: Qos | None) -> None:
    _check_one_mode(
        part.preempt_mode,
        f"harvest.partition = {part.name!r}",
        f"choose a preemptible partition, or ask the admin for {_EXAMPLE}",
        # a QOS with a mode of its own overrides that of the partition, but for OFF
        suspends=info.preempts_by != "qos" or qos is None or qos.preempt_mode is None,
    )
    if info.preempts_by == "qos" and qos is not None and qos.preempt_mode is not None:
        remedy = f"ask the admin for: sacctmgr modify qos {qos.name} set preemptmode=requeue"
        _check_one_mode(qos.preempt_mode, f"harvest.qos = {qos.name!r}", remedy)


def _check_one_mode(mode: PreemptMode, whose: str, remedy: str, *, suspends: bool = True) -> None:
    if mode is PreemptMode.OFF:
        why = "is not preemptible (PreemptMode=OFF); harvested jobs would block other users' jobs"
        raise ConfigError(f"{whose} {why}", remedy)
    if mode is PreemptMode.SUSPEND and suspends:
        raise ConfigError(
            f"{whose} suspends what it preempts; a suspended engine keeps its GPU memory", remedy
        )


def _check_exempt_time(info: ClusterInfo, name: str, qos: Qos | None) -> None:
    exempt_s, whose = info.exempt_s, f"cluster {info.name}"
    if qos is not None and qos.exempt_s is not None:
        exempt_s, whose = qos.exempt_s, f"QOS {qos.name}"
    if not exempt_s or (name and qos is None):  # a QOS that is not known may have 0
        return
    raise ConfigError(
        f"{whose} has PreemptExemptTime = {exempt_s:g} s: no job can preempt harvested jobs for that long, so other users' jobs would wait",
        "ask the admin for PreemptExemptTime=-1 in slurm.conf, or a QOS of our own with PreemptExemptTime=00:00:00 (harvest.qos)",
    )


def _check_qos(info: ClusterInfo, name: str, qos: Qos | None) -> None:
    if not name:
        why = f"cluster {info.name} preempts by QOS, and harvest.qos is empty; harvested jobs would block other users' jobs"
        raise ConfigError(why, "set harvest.qos to a QOS that other users' QOS may preempt")
    if qos is not None and not any(name in other.preempts and other.name != name for other in info.qos or ()):
        raise ConfigError(
            f"harvest.qos = {name!r}: no QOS of cluster {info.name} may preempt it; harvested jobs would block other users' jobs",
            f"ask the admin for: sacctmgr modify qos normal set preempt+={name}",
        )


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
