"""The checks of a site, in the order in which they are printed. Pure. Owns the order, and the finding of a check whose facts are missing.

Boundary: pure; the order of the rules, without IO.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scavenger.doctor.facts import Missing, SiteFacts, SiteRequirements
from scavenger.doctor.findings import Level, SiteFinding
from scavenger.doctor.rules import limits, preemption, site

Rule = Callable[[SiteFacts, SiteRequirements], SiteFinding]

#: The check's name, as its findings carry it, and the rule.
RULES: tuple[tuple[str, Rule], ...] = (
    ("version", site.version),
    ("queue", site.queue),
    ("pyslurm", site.pyslurm),
    ("clock", site.clock),
    ("preemption", preemption.preemption),
    ("preempt mode", preemption.preempt_mode),
    ("exempt time", preemption.exempt_time),
    ("notice", preemption.preemption_notice),
    ("hung worker", preemption.hung_worker),
    ("requeue", preemption.requeue),
    ("requeue delay", preemption.requeue_delay),
    ("qos", limits.qos),
    ("account limits", limits.account_limits),
    ("private data", site.private_data),
    ("engines' user", site.engines_user),
    ("gpus", site.gpus),
    ("partition limits", limits.partition_limits),
    ("enforce limits", limits.enforce_limits),
    ("exclusive nodes", limits.exclusive),
    ("shape", limits.shape),
    ("daemon address", site.address),
    ("rate limit", site.rate_limit),
    ("job purge", site.purge),
    ("mpi", site.mpi),
    ("compute node", limits.compute_node),
)


def judge(facts: SiteFacts, wanted: SiteRequirements) -> Sequence[SiteFinding]:
    """One finding for each check. A check whose facts are missing is `UNKNOWN`, with the reason."""
    found = []
    for name, rule in RULES:
        try:
            found.append(rule(facts, wanted))
        except Missing as error:
            found.append(
                SiteFinding(name, Level.UNKNOWN, f"it could not be asked: {error}", error.remedy, str(error))
            )
    return tuple(found)
