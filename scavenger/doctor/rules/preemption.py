"""The checks on preemption of our jobs: modes, notice, requeue, and how long other users' jobs wait. Pure: facts in, one finding each.

Boundary: pure rules, one subject.
"""

from __future__ import annotations

from scavenger.cluster import partition_check
from scavenger.cluster.model import ClusterInfo, PreemptMode
from scavenger.cluster.preemption_notice import LIMIT_CHECK_S, PreemptionNotice, notice
from scavenger.doctor.facts import Missing, SiteFacts, SiteRequirements
from scavenger.doctor.findings import Level, SiteFinding
from scavenger.errors import ConfigError

#: Below so many seconds of notice an engine may not get its last tokens away and its job put back.
SHORT_NOTICE_S = 3.0
#: A hung engine that holds its GPUs for longer is worth the admin's attention.
LONG_WAIT_S = 120.0
#: A requeued job that waits longer is of little use; a fresh one starts at once.
LONG_REQUEUE_S = 60.0
DEFAULT_CRED_EXPIRE_S = 120.0
#: How an engine's job ends when it was preempted (scripts/rollout.sbatch.j2).
EXITS_OF_PREEMPTED = (75, 143)


def preemption(facts: SiteFacts, wanted: SiteRequirements) -> SiteFinding:
    info = ClusterInfo(
        facts.value("ClusterName"),
        "slurm",
        facts.version,
        facts.value("PreemptType"),
        facts.seconds("KillWait"),
        facts.seconds("MessageTimeout"),
        wanted.user,
    )
    try:
        partition_check.check(info, facts.partitions, wanted.partition, wanted.qos)
    except ConfigError as error:
        return SiteFinding("preemption", Level.PROBLEM, error.cause, error.remedy)
    if facts.preempts_by == "qos":
        return SiteFinding(
            "preemption",
            Level.OK,
            f"PreemptType=preempt/qos: QOS {wanted.qos!r} decides who takes our GPUs; see line qos",
        )
    part = facts.partition(wanted.partition)
    observed = (
        f"by partition: {part.name} has PriorityTier={part.priority_tier}, below all "
        f"others on its nodes; any job of theirs takes ours"
    )
    return SiteFinding("preemption", Level.OK, observed)


def preempt_mode(facts: SiteFacts, wanted: SiteRequirements) -> SiteFinding:
    mode = _mode(facts, wanted)
    if mode == PreemptMode.REQUEUE:
        return SiteFinding(
            "preempt mode",
            Level.OK,
            "REQUEUE: a preempted engine's job keeps its id and its place in the queue",
        )
    if mode == PreemptMode.CANCEL:
        observed = "CANCEL: preempted jobs end and never come back; the daemon submits fresh ones, which wait in the queue anew"
        return SiteFinding(
            "preempt mode",
            Level.WARNING,
            observed,
            "PreemptMode=REQUEUE on the partition (or QOS) keeps their place",
        )
    if mode == PreemptMode.SUSPEND:
        observed = (
            "SUSPEND: a stopped engine keeps its GPU's memory, so the job that preempts it cannot use the GPU"
        )
        return SiteFinding(
            "preempt mode", Level.PROBLEM, observed, "set PreemptMode=REQUEUE on the partition (or QOS)"
        )
    return SiteFinding(
        "preempt mode", Level.PROBLEM, f"{mode}: our jobs are not preempted at all", "set PreemptMode=REQUEUE"
    )


def _mode(facts: SiteFacts, wanted: SiteRequirements) -> str:
    if facts.preempts_by == "qos":
        ours = next((one for one in facts.qos if one.name == wanted.qos), None)
        if ours is not None and ours.preempt_mode is not None:
            return ours.preempt_mode.value
    return facts.partition(wanted.partition).preempt_mode.value


def notice_of(facts: SiteFacts, wanted: SiteRequirements) -> PreemptionNotice:
    return notice(facts.grace_s(wanted), facts.seconds("KillWait"), facts.seconds("MessageTimeout"))


def preemption_notice(facts: SiteFacts, wanted: SiteRequirements) -> SiteFinding:
    grace_s, got = facts.grace_s(wanted), notice_of(facts, wanted)
    how = f"GraceTime={grace_s:g}, KillWait={facts.seconds('KillWait'):g}, MessageTimeout={facts.seconds('MessageTimeout'):g}"
    observed = f"engines (under srun) get SIGTERM at once and SIGKILL {got.least_s:g} s later at the earliest ({how})"
    if got.least_s < SHORT_NOTICE_S:
        observed += "; a loss without notice costs at most one flush interval of tokens"
        return SiteFinding(
            "notice", Level.WARNING, observed, "raise KillWait, or give the partition a GraceTime of 10 s"
        )
    return SiteFinding("notice", Level.OK, f"{observed}; they leave in under a second")


def hung_worker(facts: SiteFacts, wanted: SiteRequirements) -> SiteFinding:
    got = notice_of(facts, wanted)
    stuck_s = facts.seconds("UnkillableStepTimeout")
    observed = (
        f"an engine that ignores SIGTERM holds its GPUs for {got.most_s:g} s at most (checks of limits every {LIMIT_CHECK_S:g} s); one "
        f"that SIGKILL does not end (a hung driver or file system) until Slurm drains the node after UnkillableStepTimeout={stuck_s:g} s"
    )
    if got.most_s > LONG_WAIT_S:
        return SiteFinding(
            "hung worker",
            Level.WARNING,
            observed,
            "lower the partition's GraceTime: engines leave in under a second anyway",
        )
    return SiteFinding("hung worker", Level.OK, observed)


def exempt_time(facts: SiteFacts, wanted: SiteRequirements) -> SiteFinding:
    exempt_s = facts.seconds("PreemptExemptTime") if facts.value("PreemptExemptTime") != "-1" else 0.0
    where = "PreemptExemptTime"
    ours = (
        next((one for one in facts.qos if one.name == wanted.qos), None)
        if wanted.qos and facts.accounting
        else None
    )
    if ours is not None and ours.exempt_s is not None:
        exempt_s, where = ours.exempt_s, f"PreemptExemptTime of QOS {ours.name}"
    if not exempt_s:
        return SiteFinding(
            "exempt time", Level.OK, "PreemptExemptTime=0: our jobs may be preempted from their first second"
        )
    observed = f"{where} = {exempt_s:g} s: no job can preempt ours for that long after their start, so other users' jobs would wait"
    return SiteFinding(
        "exempt time",
        Level.PROBLEM,
        observed,
        "PreemptExemptTime=-1 in slurm.conf, or 00:00:00 on a QOS of our own (harvest.qos)",
    )


def requeue(facts: SiteFacts, wanted: SiteRequirements) -> SiteFinding:
    held = [code for code in EXITS_OF_PREEMPTED if code in _codes(facts.words("RequeueExitHold"))]
    if held:
        observed = f"RequeueExitHold has {held}, with which a preempted engine's job may end: Slurm would hold it in the queue for ever"
        return SiteFinding("requeue", Level.PROBLEM, observed, "take 75 and 143 out of RequeueExitHold")
    if facts.value("JobRequeue") == "0":
        observed = "JobRequeue=0: jobs are not requeued by default; ours ask for it with --requeue, which overrides that"
        return SiteFinding("requeue", Level.OK, observed)
    return SiteFinding(
        "requeue", Level.OK, "JobRequeue=1: a preempted job may be put back; ours say --requeue as well"
    )


def _codes(words: tuple[str, ...]) -> set[int]:
    found: set[int] = set()
    for word in words:
        first, _, last = word.partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            found |= set(range(int(first), int(last or first) + 1))
    return found


def requeue_delay(facts: SiteFacts, wanted: SiteRequirements) -> SiteFinding:
    text = facts.option("AuthInfo", "cred_expire")
    if text is not None and not text.isdigit():
        raise Missing(f"AuthInfo has cred_expire={text!r}, which is no number")
    delay_s = (float(text) if text is not None else DEFAULT_CRED_EXPIRE_S) + 1
    how = f"cred_expire={text}" if text is not None else f"no cred_expire, so {DEFAULT_CRED_EXPIRE_S:g} s"
    observed = f"a requeued job may start again after {delay_s:g} s at the earliest (AuthInfo: {how})"
    if delay_s > LONG_REQUEUE_S:
        remedy = "nothing is wrong; AuthInfo=cred_expire=30 shortens it where the nodes' clocks agree to within that"
        return SiteFinding(
            "requeue delay", Level.WARNING, f"{observed}; GPUs that come back sooner stay idle for us", remedy
        )
    return SiteFinding("requeue delay", Level.OK, observed)
