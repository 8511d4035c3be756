"""The checks of a site, in the order in which they are told. Pure. Owns the order, and what becomes of a check whose facts are missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scavenger.doctor import rules_limits, rules_preempt, rules_site
from scavenger.doctor.facts import Facts, Missing, Wanted
from scavenger.doctor.findings import Finding, Level

Rule = Callable[[Facts, Wanted], Finding]

#: The check's name, as its findings carry it, and the rule.
RULES: tuple[tuple[str, Rule], ...] = (
    ("version", rules_site.version),
    ("pyslurm", rules_site.pyslurm),
    ("clock", rules_site.clock),
    ("preemption", rules_preempt.preemption),
    ("preempt mode", rules_preempt.preempt_mode),
    ("exempt time", rules_preempt.exempt_time),
    ("notice", rules_preempt.notice_given),
    ("hung worker", rules_preempt.hung_worker),
    ("requeue", rules_preempt.requeue),
    ("requeue delay", rules_preempt.requeue_delay),
    ("qos", rules_limits.qos),
    ("private data", rules_site.private_data),
    ("gpus", rules_site.gpus),
    ("partition limits", rules_limits.partition_limits),
    ("enforce limits", rules_limits.enforce_limits),
    ("exclusive nodes", rules_limits.exclusive),
    ("shape", rules_limits.shape),
    ("rate limit", rules_site.rate_limit),
    ("job purge", rules_site.purge),
    ("mpi", rules_site.mpi),
    ("compute node", rules_limits.compute_node),
)


def judge(facts: Facts, wanted: Wanted) -> Sequence[Finding]:
    """Every check, each with a finding: one whose facts could not be had is unknown, with the reason."""
    found = []
    for name, rule in RULES:
        try:
            found.append(rule(facts, wanted))
        except Missing as error:
            found.append(Finding(name, Level.UNKNOWN, f"it could not be asked: {error}", error.remedy, str(error)))
    return tuple(found)
