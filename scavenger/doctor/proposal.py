"""What a new site's scavenger.toml can take from Slurm: values with their reasons, and what is left for the admin. Pure.

Owns the choice. Knows nothing of files; `collect` asks Slurm, `cli/init` writes.

Boundary: pure rules; `rules/` judge a site's file, this drafts it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from scavenger.cluster import partition_check
from scavenger.cluster.model import ClusterInfo, Node, Partition, PreemptMode, Qos
from scavenger.doctor.facts import Missing, SiteFacts
from scavenger.errors import ConfigError

#: CPUs that one engine uses well: more of a GPU's share stay with the node.
MOST_CPUS = 8
#: `harvest.time_limit_s` where the partition allows it.
TIME_LIMIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Proposed:
    """One key of scavenger.toml (`harvest.partition`), its value, and what of the site it follows from."""

    key: str
    value: str | int | float | bool
    why: str


@dataclass(frozen=True, slots=True)
class Proposal:
    """`open`: what Slurm cannot know, one sentence each with its key."""

    keys: tuple[Proposed, ...]
    open: tuple[str, ...]

    def value(self, key: str) -> str | int | float | bool | None:
        return next((one.value for one in self.keys if one.key == key), None)


def propose(facts: SiteFacts, user: str, partition: str = "", lacks: Sequence[str] = ()) -> Proposal:
    """Raises `ConfigError` where no partition, or not `partition`, may be harvested: its remedy has lines for slurm.conf. Raises `Missing`
    where Slurm did not answer. `user`: of the daemon. `partition`: one that the admin chose, "" for the best. `lacks`: what engines import
    and the daemon's own Python has not."""
    info = _info(facts, user)
    qos = _choose_qos(info)
    part, why = _choose_partition(facts, info, qos, partition)
    nodes = [node for node in facts.nodes if node.name in part.nodes and node.gpus]
    keys = [Proposed("harvest.partition", part.name, why)]
    if qos is not None:
        above = ", ".join(other.name for other in info.qos or () if qos.name in other.preempts)
        keys.append(Proposed("harvest.qos", qos.name, f"Slurm preempts by QOS, and {above} may preempt it"))
    keys += _sizes(part, nodes)
    if facts.config.get("AuthType") == "auth/munge":
        why = "Slurm has AuthType=auth/munge: a user who joins shows by MUNGE who it is"
        keys.append(Proposed("owners.proof", "munge", why))
    to_do = ["owners.groups or owners.users: who may train; only the daemon's user until one is set"]
    if lacks:
        to_do.insert(
            0,
            "harvest.python: an environment on the compute nodes with [trainer], or harvest.container: this Python has no "
            + " and no ".join(lacks),
        )
    account, left = _account(facts, part, user, by_qos=qos is not None)
    keys += account
    to_do += left
    keys += _privacy(facts, info, user)
    if "jobs" in info.private and not any(one.key == "harvest.sees_all_jobs" for one in keys):
        to_do.append(
            f"harvest.sees_all_jobs: PrivateData hides other users' jobs from {user}, so nothing is harvested until "
            f"it sees them (docs/site.md: what needs the least right) or the partition is the daemon's alone (harvest.sole_user)"
        )
    gpus = sum(node.gpus for node in nodes)
    to_do.append(f"harvest.max_engines: 4 to begin with; the partition has {gpus} GPUs on {len(nodes)} nodes")
    return Proposal(tuple(keys), tuple(to_do))


def _info(facts: SiteFacts, user: str) -> ClusterInfo:
    private = frozenset(facts.words("PrivateData")) if "PrivateData" in facts.config else frozenset()
    return ClusterInfo(
        facts.value("ClusterName"),
        "slurm",
        facts.version,
        facts.value("PreemptType"),
        facts.seconds("KillWait"),
        facts.seconds("MessageTimeout"),
        user,
        exempt_s=facts.seconds("PreemptExemptTime") if facts.value("PreemptExemptTime") != "-1" else 0.0,
        private=private,
        accounting=facts.accounting,
        qos=facts.qos if facts.accounting else None,
    )


# ---------------------------------------------------------------- what is harvested


def _choose_qos(info: ClusterInfo) -> Qos | None:
    """Where Slurm preempts by QOS: one that another may preempt at once. None elsewhere. Raises `ConfigError`."""
    if info.preempts_by != "qos":
        return None
    found = [
        qos
        for qos in info.qos or ()
        if any(qos.name in other.preempts for other in info.qos or ())
        and not qos.preempts
        and not qos.exempt_s
        and qos.preempt_mode not in (PreemptMode.SUSPEND, PreemptMode.OFF)
    ]
    if not found:
        raise ConfigError(
            f"cluster {info.name} preempts by QOS, and no QOS may be preempted by another without delay",
            "sacctmgr add qos scavenge PreemptMode=requeue GraceTime=10 UsageFactor=0; sacctmgr modify qos normal set preempt+=scavenge",
        )
    return min(found, key=lambda qos: (qos.usage_factor, qos.name))


def _choose_partition(
    facts: SiteFacts, info: ClusterInfo, qos: Qos | None, wanted: str
) -> tuple[Partition, str]:
    parts = facts.partitions
    gpus = {part.name: _gpus(part, facts.nodes) for part in parts}
    refused: dict[str, str] = {}
    fit: list[Partition] = []
    for part in parts:
        try:
            partition_check.check(info, parts, part.name, qos.name if qos is not None else "")
        except ConfigError as error:
            refused[part.name] = error.cause
            continue
        if gpus[part.name]:
            fit.append(part)
        else:
            refused[part.name] = f"partition {part.name!r} has no GPUs"
    if wanted:
        fit = [part for part in fit if part.name == wanted]
        if not fit and wanted not in refused:
            partition_check.check(info, parts, wanted)  # raises: there is no such partition
        refused = {wanted: refused[wanted]} if wanted in refused else {}
    if not fit:
        raise ConfigError(
            "; ".join(refused[name] for name in sorted(refused)), _slurm_conf(facts, info, gpus)
        )
    displaced = {part.name for part in fit if qos is not None or _is_displaced(part, parts)}
    best = min(
        fit, key=lambda part: (part.name not in displaced, -gpus[part.name], part.priority_tier, part.name)
    )
    how = (
        f"PriorityTier {best.priority_tier}, below every other partition on its nodes"
        if qos is None
        else "its jobs are preempted by QOS"
    )
    others = sorted(part.name for part in fit if part is not best and part.name in displaced)
    more = f"; {', '.join(others)} would do as well" if others else ""
    return best, f"{how}; {gpus[best.name]} GPUs; preempted jobs: {best.preempt_mode}{more}"


def _is_displaced(part: Partition, parts: Sequence[Partition]) -> bool:
    """Whether another partition's jobs preempt those of this one: on nodes of its own only its own users ask for its GPUs."""
    return any(other.priority_tier > part.priority_tier and other.nodes & part.nodes for other in parts)


def _gpus(part: Partition, nodes: Sequence[Node]) -> int:
    return sum(node.gpus for node in nodes if node.name in part.nodes) if part.up else 0


def _slurm_conf(facts: SiteFacts, info: ClusterInfo, gpus: dict[str, int]) -> str:
    """Lines for slurm.conf that make a partition fit for harvesting, over the nodes of the one with the most GPUs."""
    if not any(gpus.values()):
        return "no partition that is up has a node with GPUs: see `sinfo -o '%P %a %G %D'`"
    most = max(sorted(gpus), key=lambda name: gpus[name])
    nodes = facts.partition_words(most).get("Nodes", "")
    part = facts.partition(most)
    shared = [other.priority_tier for other in facts.partitions if other.nodes & part.nodes]
    tier = min(shared) - 1
    lines = []
    if info.preempts_by != "partition_prio":
        lines.append("PreemptType=preempt/partition_prio")
    if "REQUEUE" not in facts.value("PreemptMode").upper():
        lines.append("PreemptMode=REQUEUE")
    if info.exempt_s:
        lines.append("PreemptExemptTime=-1")
    lines.append(
        f"PartitionName=scavenge Nodes={nodes} PriorityTier={max(tier, 0)} PreemptMode=REQUEUE GraceTime=10 MaxTime=1-0"
    )
    raised = sorted(
        other.name
        for other in facts.partitions
        if other.nodes & part.nodes and other.priority_tier <= max(tier, 0)
    )
    more = f", raise PriorityTier of {', '.join(raised)} to 1" if raised else ""
    alone = "with AllowAccounts= or AllowGroups= of the daemon's user alone (docs/admin.md)"
    return (
        f"add to slurm.conf{more}, {alone}, `scontrol reconfigure`, and run this again:\n    "
        + "\n    ".join(lines)
    )


# ---------------------------------------------------------------- what a job asks for


def _sizes(part: Partition, nodes: Sequence[Node]) -> list[Proposed]:
    found = []
    types = Counter[str]()
    for node in nodes:
        types[node.gpu_type] += node.gpus
    if len(types) > 1:
        kind, count = min(types.items(), key=lambda one: (-one[1], one[0]))
        rest = ", ".join(
            f"{n} {name or 'without a type'}" for name, n in sorted(types.items()) if name != kind
        )
        if kind:
            found.append(
                Proposed(
                    "harvest.gpu_type",
                    kind,
                    f"most of the GPUs ({count}); {rest} stay unused, leave it out to use all",
                )
            )
        nodes = [node for node in nodes if node.gpu_type == kind]
    share = min((node.cpus // node.gpus for node in nodes), default=1)
    cpus = max(1, min(share, MOST_CPUS))
    found.append(
        Proposed(
            "harvest.cpus_per_engine",
            cpus,
            f"a GPU's share of its node's CPUs is {share}, and an engine uses {MOST_CPUS} at most",
        )
    )
    if part.max_time_s < TIME_LIMIT_S:
        found.append(Proposed("harvest.time_limit_s", part.max_time_s, f"MaxTime of {part.name}"))
    return found


# ---------------------------------------------------------------- who pays, who sees


def _account(
    facts: SiteFacts, part: Partition, user: str, *, by_qos: bool
) -> tuple[list[Proposed], list[str]]:
    """The account of engines' jobs, and the QOS that they have there unless another is chosen (`by_qos`: one was)."""
    if not facts.accounting:
        return [], []
    enforced = any(
        word.startswith(("associations", "limits", "qos", "safe"))
        for word in facts.words("AccountingStorageEnforce")
    )
    try:
        rows = [line.split("|") for line in facts.text("accounts").split()]
    except Missing as missing:
        return [], [f"harvest.account: slurmdbd was not read ({missing})"]
    defaults = {
        account: rest[0] if rest else "" for account, *rest in rows
    }  # each account, and its default QOS
    accounts = tuple(defaults)
    allowed = facts.partition_words(part.name).get("AllowAccounts", "ALL")
    may = [name for name in accounts if allowed == "ALL" or name in allowed.split(",")]
    if not accounts:
        if not enforced:
            return [], []
        return [], [
            f"harvest.account: Slurm enforces associations, and {user} has none: "
            f"sacctmgr add account scavenger; sacctmgr add user {user} account=scavenger"
        ]
    if not may:
        return [], [
            f"harvest.account: {part.name} has AllowAccounts={allowed}, and {user} is in {', '.join(accounts)}"
        ]
    found = [
        Proposed(
            "harvest.account",
            may[0],
            f"{user} is in it" + (f", and in {', '.join(may[1:])}" if may[1:] else ""),
        )
    ]
    if not by_qos and (default := defaults[may[0]]):
        found.append(
            Proposed("harvest.qos", default, f"{user}'s default there; doctor checks the one that is named")
        )
    return found, []


def _privacy(facts: SiteFacts, info: ClusterInfo, user: str) -> list[Proposed]:
    """PrivateData hides other users' jobs from all but operators."""
    if "jobs" not in info.private or not facts.accounting:
        return []
    try:
        level = facts.text("admin").strip().rpartition("|")[2]
    except Missing:
        return []
    if level not in ("Operator", "Administrator"):
        return []
    return [Proposed("harvest.sees_all_jobs", True, f"PrivateData=jobs, and {user} is {level} in slurmdbd")]
