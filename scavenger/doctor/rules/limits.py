"""The checks on what the partition, the QOS and the nodes let our jobs be. Pure: facts in, one finding each."""

from __future__ import annotations

import math
from collections.abc import Mapping

from scavenger.doctor.facts import SLOW_IMPORTS, Association, Missing, SiteFacts, SiteRequirements
from scavenger.doctor.findings import Level, SiteFinding
from scavenger.harvest.decide.free_capacity import NO_MEMORY_MB


def partition_limits(facts: SiteFacts, wanted: SiteRequirements) -> SiteFinding:
    row, part = facts.partition_words(wanted.partition), facts.partition(wanted.partition)
    refused = []
    if not part.up:
        refused.append(f"State={row.get('State')}")
    for key, value, name in (
        ("AllowAccounts", wanted.account, "harvest.account"),
        ("AllowQos", wanted.qos, "harvest.qos"),
    ):
        allowed = row.get(key, "ALL")
        if allowed not in ("ALL", "(null)") and value not in allowed.split(","):
            refused.append(f"{key}={allowed}, and {name} is {value!r}")
    for key, value, name in (
        ("DenyAccounts", wanted.account, "harvest.account"),
        ("DenyQos", wanted.qos, "harvest.qos"),
    ):
        if value and value in row.get(key, "").split(","):
            refused.append(f"{key} has {name} = {value!r}")
    if row.get("RootOnly") == "YES":
        refused.append("RootOnly=YES")
    if row.get("ReqResv") == "YES":
        refused.append("ReqResv=YES: only jobs in a reservation may start")
    if row.get("MinNodes", "0").isdigit() and int(row.get("MinNodes", "0")) > 1:
        refused.append(f"MinNodes={row['MinNodes']}, and an engine's job has one node")
    if refused:
        observed = f"partition {part.name} would not take our jobs: {'; '.join(refused)}"
        return SiteFinding(
            "partition limits",
            Level.PROBLEM,
            observed,
            "change the partition, or the key of [harvest] that is named",
        )
    if part.max_time_s < wanted.time_limit_s:
        observed = f"MaxTime of {part.name} is {part.max_time_s / 60:g} min, harvest.time_limit_s is {wanted.time_limit_s / 60:g} min"
        return SiteFinding(
            "partition limits", Level.PROBLEM, observed, f"harvest.time_limit_s = {part.max_time_s:g}"
        )
    most = "no limit of time" if math.isinf(part.max_time_s) else f"{part.max_time_s / 60:g} min at most"
    groups = row.get("AllowGroups", "ALL")
    more = "" if groups == "ALL" else f"; AllowGroups={groups} must have {wanted.user}"
    observed = f"partition {part.name} is up, {most}, ours ask for {wanted.time_limit_s / 60:g} min{more}"
    return SiteFinding("partition limits", Level.OK, observed)


def enforce_limits(facts: SiteFacts, wanted: SiteRequirements) -> SiteFinding:
    value = facts.value("EnforcePartLimits") or "NO"
    if value == "NO":
        observed = "EnforcePartLimits=NO: a job that no partition lets start is accepted and stays pending; harvest.max_pending bounds ours"
        return SiteFinding(
            "enforce limits",
            Level.WARNING,
            observed,
            "compare the lines partition limits and shape; nothing else would tell",
        )
    return SiteFinding(
        "enforce limits",
        Level.OK,
        f"EnforcePartLimits={value}: what cannot start is refused when it is submitted",
    )


def exclusive(facts: SiteFacts, wanted: SiteRequirements) -> SiteFinding:
    row = facts.partition_words(wanted.partition)
    why = []
    if row.get("OverSubscribe", "").startswith("EXCLUSIVE"):
        why.append("OverSubscribe=EXCLUSIVE")
    if row.get("ExclusiveUser") == "YES":
        why.append("ExclusiveUser=YES")
    if row.get("Exclusive", "NO") != "NO":  # 26.05 has one word for all of them: NODE, USER or TOPO
        why.append(f"Exclusive={row['Exclusive']}")
    if facts.value("SelectType").endswith("linear"):
        why.append("SelectType=select/linear")
    if why:
        observed = f"{', '.join(why)}: an engine's job takes a whole node, however few GPUs it needs, and a preemption takes all of it"
        remedy = "OverSubscribe=NO and ExclusiveUser=NO (in 26.05: Exclusive=NO) on the harvest partition"
        return SiteFinding("exclusive nodes", Level.WARNING, observed, remedy)
    return SiteFinding(
        "exclusive nodes", Level.OK, "nodes are shared: an engine takes its own GPUs, CPUs and memory only"
    )


def shape(facts: SiteFacts, wanted: SiteRequirements) -> SiteFinding:
    """An engine of one GPU shall fit beside others: no more CPUs and memory than its GPU's share of a node."""
    facts.partition(wanted.partition)
    here = [
        node
        for node in facts.nodes
        if wanted.partition in node.partitions and node.gpus and wanted.gpu_type in ("", node.gpu_type)
    ]
    if not here:
        raise Missing(f"no node of partition {wanted.partition} shows GPUs")
    bare = [node for node in here if node.memory_mb // node.gpus < NO_MEMORY_MB]
    poor = [node for node in here if node not in bare and wanted.memory_mb > node.memory_mb // node.gpus]
    slow = [node for node in here if wanted.cpus > node.cpus // node.gpus]
    memory = (
        f"{wanted.memory_mb} MiB"
        if wanted.memory_mb
        else "the default memory"
        if bare
        else "its GPUs' share of a node's memory"
    )
    asks = f"an engine asks for {wanted.cpus} CPU{'s' if wanted.cpus > 1 else ''} and {memory}"
    if poor:
        share = f"{poor[0].memory_mb // poor[0].gpus} MiB on {poor[0].name}"
        observed = f"{asks}; a GPU's share is {share}: GPUs of {len(poor)} nodes get no engine"
        return SiteFinding(
            "shape",
            Level.WARNING,
            observed,
            "lower harvest.memory_mb_per_engine to a GPU's share, or set it to 0",
        )
    share = f"{slow[0].cpus // slow[0].gpus} CPUs on {slow[0].name}" if slow else ""
    if slow and not wanted.pinned:
        observed = f"{asks}; a GPU's share is {share}: our engines would strand GPUs of {len(slow)} nodes"
        return SiteFinding("shape", Level.WARNING, observed, "lower harvest.cpus_per_engine to a GPU's share")
    if slow:
        asks += f"; on {len(slow)} nodes it gets its GPU's share instead, {share}"
    row = facts.partition_words(wanted.partition)
    allocated = "MEMORY" in facts.value("SelectTypeParameters").upper()
    if bare and not wanted.memory_mb and row.get("DefMemPerNode") == "UNLIMITED" and allocated:
        observed = f"{asks}, as {bare[0].name} has no RealMemory, and DefMemPerNode is UNLIMITED: an engine takes a whole node's memory"
        return SiteFinding(
            "shape",
            Level.PROBLEM,
            observed,
            "configure RealMemory, or set harvest.memory_mb_per_engine to a GPU's share",
        )
    return SiteFinding("shape", Level.OK, f"{asks}: within a GPU's share of every node")


def probe_memory_mb(facts: SiteFacts, wanted: SiteRequirements) -> int:
    """Memory for a test job that fits where an engine would: what is configured, else the least share of a GPU; 0 = Slurm's default."""
    try:
        shares = [
            node.memory_mb // node.gpus
            for node in facts.nodes
            if wanted.partition in node.partitions and node.gpus
        ]
    except Missing:
        return wanted.memory_mb
    least = min(shares, default=0)
    return wanted.memory_mb or (least if least >= NO_MEMORY_MB else 0)


def qos(facts: SiteFacts, wanted: SiteRequirements) -> SiteFinding:
    if not facts.accounting:
        return SiteFinding(
            "qos",
            Level.OK,
            "no slurmdbd: no QOS, no associations, and harvesting counts in no user's fair share",
        )
    if not wanted.qos:
        if facts.preempts_by == "qos":
            observed = "Slurm preempts by QOS and harvest.qos is empty"
            return SiteFinding(
                "qos", Level.PROBLEM, observed, "set harvest.qos to the QOS that other users' QOS may preempt"
            )
        observed = "harvest.qos is empty: GPU time of engines counts in the fair share of their account"
        return SiteFinding(
            "qos", Level.WARNING, observed, "a QOS with UsageFactor=0 (docs/admin.md) keeps it free"
        )
    ours = next((one for one in facts.qos if one.name == wanted.qos), None)
    if ours is None:
        return SiteFinding(
            "qos",
            Level.PROBLEM,
            f"there is no QOS {wanted.qos!r}",
            "sacctmgr add qos, as docs/admin.md has it",
        )
    above = sorted(one.name for one in facts.qos if ours.name in one.preempts)
    if facts.preempts_by == "qos" and not above:
        observed = f"no QOS may preempt {ours.name!r}: other users' jobs would wait for our engines"
        return SiteFinding(
            "qos", Level.PROBLEM, observed, f"sacctmgr modify qos normal set preempt+={ours.name}"
        )
    others = sorted(one.name for one in facts.qos if one.name != ours.name and ours.name not in one.preempts)
    observed = f"QOS {ours.name}" + (f" may be preempted by {', '.join(above)}" if above else "")
    observed += "".join(f", {key}={value}" for key, value in ours.limits)
    if facts.preempts_by == "qos" and others:
        observed += f"; jobs of QOS {', '.join(others)} may not preempt it, and would wait"
        return SiteFinding(
            "qos", Level.WARNING, observed, f"sacctmgr modify qos {','.join(others)} set preempt+={ours.name}"
        )
    if ours.limits and not set(facts.words("AccountingStorageEnforce")) & {"limits", "safe", "all"}:
        observed += "; AccountingStorageEnforce has no `limits`, so Slurm enforces none of these"
        remedy = "AccountingStorageEnforce=limits,qos in slurm.conf (for all users), or bound it by harvest.max_gpus alone"
        return SiteFinding("qos", Level.WARNING, observed, remedy)
    if ours.usage_factor:
        observed += f"; UsageFactor={ours.usage_factor:g}, so harvesting counts in its account's fair share"
        return SiteFinding(
            "qos", Level.WARNING, observed, f"sacctmgr modify qos {ours.name} set usagefactor=0"
        )
    return SiteFinding("qos", Level.OK, f"{observed}; UsageFactor=0: harvesting lowers no user's fair share")


def account_limits(facts: SiteFacts, wanted: SiteRequirements) -> SiteFinding:
    """A limit that other users share is used up by engines, and no preemption gives it back."""
    name = "account limits"
    if not facts.accounting:
        return SiteFinding(name, Level.OK, "no slurmdbd: no account has a limit")
    enforced = set(facts.words("AccountingStorageEnforce"))
    if not enforced & {"limits", "qos", "safe", "associations", "all"}:
        return SiteFinding(
            name, Level.OK, "AccountingStorageEnforce has no limits: none of an account is enforced"
        )
    default = facts.text("engines admin").strip().split("|")
    account = wanted.account.lower() or (default[1] if len(default) == 3 else "")  # as slurmdbd has it
    found = facts.associations
    own = [one for one in found if one.user == wanted.user and one.account == account]
    if not own:
        observed = f"user {wanted.user} is not in account {account!r}, and Slurm enforces associations: it takes no job of ours"
        remedy = f"sacctmgr add user {wanted.user} account={account or 'scavenger'}; harvest.account names another one"
        return SiteFinding(name, Level.PROBLEM, observed, remedy)
    parents = {one.account: one for one in found if not one.user}
    above = []
    while (one := parents.get(account)) is not None and one not in above:
        above.append(one)
        account = one.parent
    told = [f"{key}={value} of {wanted.user} in it" for one in own for key, value in one.limits]
    told += [f"{key}={value} of account {one.account}" for one in above for key, value in one.limits]
    if not told:
        return SiteFinding(name, Level.OK, f"account {own[0].account} has no limit")
    observed = (
        f"account {own[0].account}: {', '.join(told)}; more engines are not asked for than that lets start"
    )
    for one in above:
        shared = [f"{key}={value}" for key, value in one.limits if key.startswith("Grp")]
        users = sorted(
            {
                other.user
                for other in found
                if other.user not in ("", wanted.user) and _is_below(other.account, one.account, parents)
            }
        )
        if shared and users:
            some = ", ".join(users[:3]) + (f" and {len(users) - 3} more" if len(users) > 3 else "")
            observed += (
                f"; {', '.join(shared)} of account {one.account} is also that of {some}, whose jobs would wait for our engines: "
                "Slurm preempts for GPUs, not for a limit"
            )
            remedy = f"an account of its own, beside {one.account}, for {wanted.user} (harvest.account)"
            return SiteFinding(name, Level.WARNING, observed, remedy)
    return SiteFinding(name, Level.OK, observed)


def _is_below(account: str, ancestor: str, parents: Mapping[str, Association]) -> bool:
    seen = set[str]()
    while account != ancestor and account in parents and account not in seen:
        seen.add(account)
        account = parents[account].parent
    return account == ancestor


def compute_node(facts: SiteFacts, wanted: SiteRequirements) -> SiteFinding:
    """What the test job found on its node: `--submit`."""
    probe = facts.probe
    if probe is None:
        facts.text("config")  # where Slurm does not answer no job was or could be tried
        observed = "ports, the state directory, Python and its engines on the compute nodes were not tried"
        return SiteFinding(
            "compute node",
            Level.UNKNOWN,
            observed,
            "scavenger doctor --submit runs a short job that tries them",
        )
    if probe.remedy:  # it has one of its own where nothing was found out
        return SiteFinding("compute node", Level.UNKNOWN, probe.error, probe.remedy)
    if probe.error:
        remedy = "see its own words; squeue and sacct tell more of the job"
        if "nvalid account" in probe.error:
            user = wanted.user or "USER"
            remedy = f"sacctmgr show assoc user={user}; if it is there, slurmctld read it before it knew {user}: scontrol reconfigure"
        return SiteFinding("compute node", Level.PROBLEM, probe.error, remedy)
    told = dict(line.split("=", 1) for line in probe.text.splitlines() if "=" in line)
    where, wrong = f"on {told.get('node', 'its node')}", [name for name in PROBED if told.get(name) != "ok"]
    causes = [f"{name}: {told.get(name, 'the job did not say')}" for name in wrong]
    remedies = [SLOW if is_slow(told.get(name, "")) else PROBED[name] for name in wrong]
    engines = {name.partition(".")[2]: why for name, why in told.items() if name.startswith("engine.")}
    fit = [name for name, why in engines.items() if why == "ok"]
    unfit = [f"engine {name}: {why}" for name, why in engines.items() if why != "ok"]
    if told.get("python") == "ok" and (not fit or wanted.engine not in ("", *fit)):
        causes += unfit or ["engines: the job did not say whether any can be imported"]
        lacking = [why for name, why in engines.items() if why != "ok" and wanted.engine in ("", name)]
        if any(map(is_slow, lacking)):
            remedies.append(SLOW)
        if not lacking or not all(map(is_slow, lacking)):
            remedies.append(NO_ENGINE)
    ports = {key.removeprefix("reach "): said for key, said in told.items() if key.startswith("reach ")}
    if closed := [at for at, said in ports.items() if said not in ("ok", "refused")]:
        causes.append(f"{', '.join(closed)} cannot be reached: a firewall, or no such host")
        remedies.append(CLOSED)
    if causes:
        return SiteFinding(
            "compute node", Level.PROBLEM, f"{where}, {'; '.join(causes)}", "; ".join(remedies)
        )
    did = (
        "was given a GPU, sees the state directory and our Python, imported what the engine "
        f"{' and '.join(fit)} needs, reached this host's port and slurmctld, started a step and could requeue itself"
    )
    silent = [at for at, said in ports.items() if said == "refused"]
    if ports:
        did += f"; {len(ports) - len(silent)} of {len(ports)} further ports answered"
    if silent:  # a firewall that rejects looks the same
        did += f", {', '.join(silent)} refused: no process listens there now, or a firewall rejects; ask again while a run trains"
    rest = f" (only runs that name another engine would fail: {'; '.join(unfit)})" if unfit else ""
    return SiteFinding("compute node", Level.OK, f"{where} a job of ours {did}{rest}")


def is_slow(why: str) -> bool:
    """Whether the test job gave up waiting for these imports: nothing is known to be missing."""
    return why.startswith(SLOW_IMPORTS)


NO_ENGINE = (
    "install what is missing into that Python on every compute node: scavenger[trainer] for engine reference, scavenger[vllm] for vllm; "
    "or name the Python that has it in harvest.python (or its container in harvest.container)"
)
SLOW = (
    "ask again: files are read faster the second time; where it stays slow the node is busy, or the file system of that Python is slow: "
    "put the environment on a faster one, or into an image (harvest.container)"
)
CLOSED = "let compute nodes reach the daemon's port and the weights' ports of training nodes (docs/admin.md, Firewall)"
#: What a probe says "ok" of, with the remedy where it does not.
PROBED = {
    "state_dir": "mount daemon.state_dir on the compute nodes, readable for the daemon's user (with cluster.submit_socket: "
    "daemon.public_dir and cluster.engines_dir, for cluster.engines_user)",
    "python": "install scavenger there at the same path, or set harvest.python",
    "port": "set daemon.listen, daemon.advertise and daemon.port to what the firewall lets compute nodes reach",
    "slurmctld": "let compute nodes reach SlurmctldPort: without it no engine can put itself back into the queue",
    "step": "let srun and slurmd of a node reach each other (SlurmdPort, SrunPortRange): engines run under srun",
    "gpu": "GRES: the job asked for a GPU and was given none",
    "requeue": "let users requeue their own jobs (JobRequeue, no job_submit plugin that forbids it)",
}
