"""The checks on the site at large: versions, visibility, clocks, rates, GPUs, MPI. Pure: facts in, one finding each.

Boundary: pure rules, one subject.
"""

from __future__ import annotations

import re

from scavenger.cluster import reach
from scavenger.cluster.slurm import commands
from scavenger.doctor.facts import Missing, SiteFacts, SiteRequirements
from scavenger.doctor.findings import Level, SiteFinding
from scavenger.errors import ClusterError

#: The oldest Slurm that this release was run with.
OLDEST = (22, 5)
#: munge refuses a credential that is older (its default), and later than so much clocks make trouble for begin times.
MUNGE_TTL_S = 300.0
SKEW_S = 5.0
#: What slurmctld counts of one whole poll, which is two commands of two requests each (docs/slurm-states.md).
REQUESTS_PER_POLL = 4
DEFAULT_BUCKET, DEFAULT_REFILL, DEFAULT_PERIOD_S = 30.0, 2.0, 1.0
#: What PrivateData may hide without making us take GPUs that other users' jobs wait for.
HARMLESS_PRIVATE = {"accounts", "cloud", "events", "usage", "users"}
#: What it refuses to show at all, where of jobs and reservations it leaves those of others out: no poll succeeds then.
NEEDED_PRIVATE = {"nodes", "partitions"}


def major_minor(version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise Missing(f"{version!r} is no version")
    return int(match[1]), int(match[2])


def version(facts: SiteFacts, wanted: SiteRequirements) -> SiteFinding:
    theirs, ours = facts.version, facts.text("client").split()[-1:]
    if not ours:
        raise Missing("sinfo --version printed nothing")
    if major_minor(ours[0]) > major_minor(theirs):
        observed = f"this host's commands are of Slurm {ours[0]}, newer than the controller's {theirs}: they cannot talk to it"
        return SiteFinding(
            "version",
            Level.PROBLEM,
            observed,
            "install the controller's version of Slurm's commands on this host",
        )
    if major_minor(theirs) < OLDEST:
        observed = f"Slurm {theirs} is older than 22.05, the oldest that this release was run with"
        return SiteFinding(
            "version",
            Level.WARNING,
            observed,
            "run with --dry-run first and compare its decisions with squeue",
        )
    return SiteFinding("version", Level.OK, f"Slurm {theirs}, this host's commands {ours[0]}")


def pyslurm(facts: SiteFacts, wanted: SiteRequirements) -> SiteFinding:
    theirs = facts.version
    if not facts.pyslurm:
        return SiteFinding(
            "pyslurm", Level.OK, 'not installed: the daemon uses Slurm\'s commands (backend = "auto")'
        )
    leave_out = "leave it out (pip uninstall pyslurm): the commands do the same"
    if major_minor(facts.pyslurm) != major_minor(theirs):
        observed = f"pyslurm {facts.pyslurm} does not match Slurm {theirs}: X.Y must be equal, or it ends its process"
        build = "build this Slurm's with scripts/build-pyslurm (pip's is another release)"
        return SiteFinding("pyslurm", Level.WARNING, observed, f"{build}, or {leave_out}")
    if facts.pyslurm_unfit:
        observed = f"the daemon uses Slurm's commands instead: {facts.pyslurm_unfit}"
        return SiteFinding("pyslurm", Level.WARNING, observed, leave_out)
    return SiteFinding("pyslurm", Level.OK, f"{facts.pyslurm} matches Slurm {theirs} and reads this site")


def private_data(facts: SiteFacts, wanted: SiteRequirements) -> SiteFinding:
    hidden = sorted(set(facts.words("PrivateData")) - HARMLESS_PRIVATE)
    if not hidden:
        return SiteFinding("private data", Level.OK, "the whole queue is visible to every user")
    reader = wanted.viewer or wanted.daemon_user or wanted.user
    if admin := _admin(facts, "admin"):
        observed = (
            f"PrivateData={','.join(hidden)}, and {reader} is {admin}: it sees the whole queue all the same"
        )
        if wanted.viewer:
            return SiteFinding("private data", Level.OK, f"{observed}, and shows it to the daemon alone")
        return SiteFinding(
            "private data",
            Level.OK,
            f"{observed}, and may cancel any job; docs/site.md says what needs less (cluster.view_socket)",
        )
    if NEEDED_PRIVATE & set(hidden):
        observed = f"PrivateData hides {', '.join(hidden)} from {reader}: the daemon cannot see idle GPUs, and does not start"
        remedy = (
            f"take {', '.join(sorted(NEEDED_PRIVATE & set(hidden)))} out of PrivateData in slurm.conf, or let a process of an operator "
            "read the queue for the daemon (cluster.view_socket, docs/site.md): nothing less than an operator sees them, who may "
            "also cancel every job"
        )
        return SiteFinding("private data", Level.PROBLEM, observed, remedy)
    if hidden == ["reservations"]:
        observed = "PrivateData hides reservations: engines leave a node once one has begun there, as the node's state says, not before"
        remedy = "take reservations out of PrivateData in slurm.conf, or give the harvest partition a short MaxTime"
        return SiteFinding("private data", Level.WARNING, observed, remedy)
    observed = f"PrivateData hides {', '.join(hidden)} of other users: GPUs that their pending jobs wait for would look idle to us"
    remedy = (
        f"take {', '.join(hidden)} out of PrivateData in slurm.conf, which gives no user a right (slurmdbd.conf has its own: it may "
        "stay); or let only named users into the partition (AllowAccounts), or set harvest.sole_user = true: then it is harvested "
        "without seeing who waits; or let a small process of another user, who sees every job, read the queue for the daemon and do "
        "nothing else (scripts/scavenger-slurm-view.service, cluster.view_socket); or make "
        f"{reader} coordinator of the accounts whose jobs wait there (sacctmgr add coordinator account=NAME names={reader}), with "
        "harvest.sees_all_jobs = true: it may then cancel these accounts' jobs. Make the user of daemon or engines no operator: that "
        "may cancel every job (docs/site.md)"
    )
    return SiteFinding("private data", Level.WARNING, observed, remedy)


def _admin(facts: SiteFacts, question: str) -> str:
    """The level of a user in slurmdbd where it is one that may do more than others, else ""."""
    level = facts.answers.get(question)
    admin = level.text.strip().rpartition("|")[2] if level is not None and not level.error else ""
    return admin if admin.lower() in ("operator", "administrator", "admin") else ""


def engines_user(facts: SiteFacts, wanted: SiteRequirements) -> SiteFinding:
    """Whether a process that escapes from an engine can read the daemon's keys and all owners' samples, or cancel others' jobs."""
    daemon = wanted.daemon_user or wanted.user
    facts.text("config")  # a Slurm that does not answer has not said who is an operator
    if admin := _admin(facts, "engines admin"):
        observed = f"engines run as {wanted.user}, which is {admin}: a process that escapes from one may cancel every job of the site"
        remedy = (
            f"sacctmgr modify user {wanted.user} set adminlevel=none; what reads the queue instead: cluster.view_socket "
            "(docs/site.md)"
        )
        return SiteFinding("engines' user", Level.WARNING, observed, remedy)
    if wanted.user != daemon:
        observed = (
            f"engines run as {wanted.user}, and the daemon as {daemon}: they cannot read its keys and ledger"
        )
        return SiteFinding("engines' user", Level.OK, observed)
    observed = f"engines run as {daemon}, as the daemon does: a process that escapes from one can read its keys and ledger"
    if not wanted.shared:
        return SiteFinding(
            "engines' user", Level.OK, f"{observed}, which are this user's own (daemon.public_dir is not set)"
        )
    remedy = "run engines as a user of their own: cluster.submit_socket, scripts/scavenger-slurm-submit.service (docs/site.md)"
    return SiteFinding("engines' user", Level.WARNING, observed, remedy)


def clock(facts: SiteFacts, wanted: SiteRequirements) -> SiteFinding:
    skew_s = facts.asked_at - facts.controller_at
    if abs(skew_s) >= MUNGE_TTL_S:
        observed = (
            f"this host's clock is {skew_s:+.0f} s off the controller's: munge refuses "
            f"credentials that are over {MUNGE_TTL_S:g} s apart"
        )
        return SiteFinding("clock", Level.PROBLEM, observed, "synchronise both with NTP")
    if abs(skew_s) > SKEW_S:
        observed = f"this host's clock is {skew_s:+.0f} s off the controller's: begin times and the ages of observations are wrong by that"
        return SiteFinding("clock", Level.WARNING, observed, "synchronise both with NTP")
    return SiteFinding(
        "clock", Level.OK, "this host's clock and the controller's agree to within a few seconds"
    )


def rate_limit(facts: SiteFacts, wanted: SiteRequirements) -> SiteFinding:
    most_a_min = REQUESTS_PER_POLL * 60.0 / min(wanted.fast_poll_interval_s, wanted.poll_interval_s)
    rhythm = f"every {wanted.poll_interval_s:g} s, and every {wanted.fast_poll_interval_s:g} s while something is expected"
    asks = f"a poll of the daemon is 2 commands, {REQUESTS_PER_POLL} requests, {rhythm}; cluster.max_rpc_per_min bounds their average"
    if facts.option("SlurmctldParameters", "rl_enable") is None:
        return SiteFinding("rate limit", Level.OK, f"Slurm limits no user's RPCs (no rl_enable); {asks}")
    refill, period_s = (
        _number(facts, "rl_refill_rate", DEFAULT_REFILL),
        _number(facts, "rl_refill_period", DEFAULT_PERIOD_S),
    )
    allowed, bucket = 60.0 * refill / period_s, _number(facts, "rl_bucket_size", DEFAULT_BUCKET)
    observed = f"rl_enable: {allowed:g} RPCs a minute and user, {bucket:g} at once; {asks}"
    if allowed < 2 * most_a_min or bucket < 2 * REQUESTS_PER_POLL:
        return SiteFinding(
            "rate limit",
            Level.WARNING,
            observed,
            "raise cluster.fast_poll_interval_s and cluster.poll_interval_s, or the site's rl_* parameters",
        )
    return SiteFinding("rate limit", Level.OK, observed)


def _number(facts: SiteFacts, name: str, default: float) -> float:
    text = facts.option("SlurmctldParameters", name)
    if text is None:
        return default
    if not text.isdigit() or not int(text):
        raise Missing(f"SlurmctldParameters has {name}={text!r}")
    return float(text)


def gpus(facts: SiteFacts, wanted: SiteRequirements) -> SiteFinding:
    facts.partition(wanted.partition)
    here = [node for node in facts.nodes if wanted.partition in node.partitions]
    have = [node for node in here if node.gpus and wanted.gpu_type in ("", node.gpu_type)]
    kind = f"gpu:{wanted.gpu_type}" if wanted.gpu_type else "gpu"
    if not have:
        types = ", ".join(sorted({node.gpu_type or "without a type" for node in here if node.gpus})) or "none"
        observed = f"no node of partition {wanted.partition} has a GRES {kind} (its GPU types: {types})"
        remedy = (
            "name a type that is there in harvest.gpu_type, or ask for GresTypes=gpu and Gres= on the nodes"
        )
        return SiteFinding("gpus", Level.PROBLEM, observed, remedy)
    observed = f"{sum(node.gpus for node in have)} GPUs ({kind}) on {len(have)} nodes of partition {wanted.partition}"
    if "gres/gpu" not in facts.words("AccountingStorageTRES"):
        observed += (
            "; AccountingStorageTRES lacks gres/gpu, so what jobs hold is read from what they asked for"
        )
        return SiteFinding(
            "gpus",
            Level.WARNING,
            observed,
            "AccountingStorageTRES=gres/gpu, for exact figures of who holds what",
        )
    return SiteFinding("gpus", Level.OK, observed)


def mpi(facts: SiteFacts, wanted: SiteRequirements) -> SiteFinding:
    found = set(re.findall(r"[a-z_0-9]+", facts.text("mpi").partition("...")[2]))
    flavours = sorted(word for word in found if word.startswith(("pmi", "openmpi", "cray")))
    observed = f"srun --mpi offers {', '.join(flavours) or 'nothing but none'}"
    if not any(word.startswith("pmix") for word in flavours):
        remedy = "none needed if mpirun starts them; else Slurm's pmix plugin, which Debian's 26.05 lacks"
        return SiteFinding(
            "mpi", Level.WARNING, f"{observed}; training jobs start their ranks with mpirun", remedy
        )
    return SiteFinding(
        "mpi", Level.OK, f"{observed}; training jobs use pmix or pmi2, where it makes one world, else mpirun"
    )


def purge(facts: SiteFacts, wanted: SiteRequirements) -> SiteFinding:
    age_s, need_s = facts.seconds("MinJobAge"), wanted.poll_interval_s + wanted.absent_s
    if age_s and age_s < need_s:
        observed = f"MinJobAge={age_s:g}: jobs that ended leave the queue before we look again, so how they ended is not seen"
        return SiteFinding(
            "job purge", Level.WARNING, observed, f"lower cluster.poll_interval_s, or MinJobAge={need_s:.0f}"
        )
    return SiteFinding(
        "job purge",
        Level.OK,
        f"MinJobAge={age_s:g}: ended jobs stay in the queue for longer than it takes us to look again",
    )


def address(facts: SiteFacts, wanted: SiteRequirements) -> SiteFinding:
    """As far as names tell; what a firewall closes is for the test job to try."""
    inside = facts.partition(wanted.partition).nodes
    others = reach.elsewhere(facts.node_hosts, inside, wanted.host, facts.own_addresses)
    if why := reach.unreachable(wanted.listen, wanted.advertise, wanted.host, others):
        return SiteFinding(
            "daemon address", Level.PROBLEM, f"{why}; the daemon refuses to start", reach.REMEDY
        )
    if why := reach.doubted(wanted.listen, wanted.advertise, wanted.host, others):
        return SiteFinding("daemon address", Level.WARNING, why, f"without one: {reach.REMEDY}")
    at = reach.announced(wanted.listen, wanted.advertise, wanted.host)
    where = f"{len(others)} nodes on other hosts" if others else "nodes, all of them on this host,"
    return SiteFinding(
        "daemon address", Level.OK, f"the daemon announces itself at {at}, to {where} of {wanted.partition}"
    )


def queue(facts: SiteFacts, wanted: SiteRequirements) -> SiteFinding:
    """Whether what the daemon polls can be read: nodes and jobs, as this release of Slurm prints them."""
    release = facts.version
    remedy = "report it with the output of `squeue -O` and `scontrol show node`; until then the daemon harvests nothing here"
    try:
        jobs = facts.queue()
        nodes = commands.parse_nodes(facts.text("nodes"))
    except ClusterError as error:
        observed = f"what Slurm {release} says of its queue cannot be read: {error.cause}"
        return SiteFinding("queue", Level.PROBLEM, observed, remedy)
    unread = {one.field: one.value for job in jobs for one in job.unread}
    unread |= {one.field: one.value for node in nodes if node.usable for one in node.unread}
    if unread:
        fields = ", ".join(f"{field} = {value!r}" for field, value in sorted(unread.items()))
        observed = (
            f"{len(jobs)} jobs are read; of Slurm {release} these are not, and count as unknown: {fields}"
        )
        return SiteFinding("queue", Level.WARNING, observed, remedy.partition(";")[0])
    return SiteFinding(
        "queue", Level.OK, f"{len(jobs)} jobs and {len(nodes)} nodes of Slurm {release} are read"
    )
