"""Which engine lends slots to which run's samples, and when a loan ends. Pure.

    runs whose samples wait for a slot, the one first that one more engine would save most
      + engines of other runs that have slots to spare, that run's first whose last engine saves least
      --both share, one base, equal settings, half of the batch free, no sample of the lender's waits--> BeginLoan
    a loan --the lender needs the slots, the borrower has no sample, one no longer shares, fewer may be lent, it never came--> EndLoan

Owns the rule. What is lent is never more than `harvest.lend_slots`, and never more than half of an engine's batch; an engine has one
borrower, and a run borrows of one engine. Loans that are short, one after the other, make their two owners wait, or two runs of one. A
loan is worth no engine's start or end: the number of engines is decided before, as if there were no loans.

Boundary: between engines of one run and samples of another; who has how many engines is decided elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from scavenger.backoff import backoff_s
from scavenger.harvest.decide.actions import (
    BeginLoan,
    DrainKind,
    EndLoan,
    LendingRules,
    Loan,
    LoanPair,
    LoanPause,
    OurJob,
    loan_pair,
)
from scavenger.harvest.decide.hands import on_nodes_of
from scavenger.harvest.decide.start import StartFacts
from scavenger.policy.division import UNKNOWN, savings
from scavenger.policy.fleet_size import Demand
from scavenger.protocol.messages import LENT_INTENT

#: A borrower that is not there so long after the order does not come any more.
REGISTERS_S = 120.0
#: A loan ends no sooner for want of samples: while the borrower trains it may have none, and the next loan would pull its base again.
HOLD_S = 60.0
#: After its end the key of a borrower is let in for so long: it says goodbye.
LEAVES_S = 10.0
NO_PAUSE = LoanPause(0, 0.0)
#: What came to nothing is not tried again sooner.
BARRED_S = 600.0
#: A loan that ends sooner was short: the borrower had hardly pulled its base. After one more in a row these two runs wait, and each further
#: time twice as long, at most `BARRED_S`.
SHORT_S = 120.0
PAUSE_S = 60.0


def decide_loans(
    facts: StartFacts, demand: Sequence[Demand], staying: Sequence[OurJob], rules: LendingRules
) -> list[BeginLoan | EndLoan]:
    """What to do about loans. `demand`: of all runs. `staying`: engines that nothing else was decided about."""
    now = facts.now
    wants = {want.run_id: want for want in demand}
    jobs = {job.intent_id: job for job in staying}
    have = Counter(job.run_id for job in facts.engines if not job.waits and job.drain_kind is DrainKind.NO)
    found: list[BeginLoan | EndLoan] = []
    for intent_id, loan in sorted(rules.loans.items()):
        if loan.ended_at or (job := jobs.get(intent_id)) is None:
            continue  # the loan ends with the engine
        held = rules.held.get(lent(intent_id))
        if loan.slots > rules.slots:
            why = f"harvest.lend_slots is {rules.slots}, and {loan.slots} slots were lent to run {loan.run}"
            found.append(EndLoan(intent_id, why))
            continue
        of = wants.get(job.run_id)
        comes = of.queued // max(1, have[of.run_id]) if of is not None else 0  # to this engine, of what waits
        if why := _over(loan, of, wants.get(loan.run_id), held, job.leases + comes, now):
            before = rules.paused.get(loan.pair)
            found.append(ended(intent_id, loan, why, before, now, came_to_nothing=held is None))
    if rules.slots <= 0:
        return found
    served = Counter(loan.run_id for loan in rules.loans.values() if not loan.ended_at)
    free = [job for job in staying if job.intent_id not in rules.loans]
    for want in sorted(demand, key=lambda one: (-saving(one, have[one.run_id] + 1), one.run_id)):
        if not want.shares or not want.engines or not want.queued or served[want.run_id]:
            continue
        offers = [
            (saving(wants[job.run_id], have[job.run_id]), job.leases, job.intent_id, job)
            for job in free
            if _may(job, want, wants.get(job.run_id), rules, facts)
        ]
        if not offers:
            continue
        last, _, _, job = min(offers, key=lambda one: one[:3])
        of = wants[job.run_id]
        slots = min(rules.slots, want.max_batch // 2)
        why = (
            f"{slots} slots of an engine of run {of.run} are lent to run {want.run}: {want.queued} samples of run {want.run} wait, and one "
            f"engine more would save it {saving(want, have[want.run_id] + 1):.3g} GPU-s a GPU-s; the engine has {job.leases} of "
            f"{of.max_batch} samples, none of run {of.run} waits, and its last engine saves it {last:.3g}"
        )
        found.append(BeginLoan(job.intent_id, want.run_id, want.run, slots, why))
        free.remove(job)
    return found


def ended(
    intent_id: str, loan: Loan, why: str, before: LoanPause | None, now: float, *, came_to_nothing: bool
) -> EndLoan:
    """The end of a loan. Where it was short, as the one before, these two owners wait, or these two runs of one. `before`: what is held
    against them."""
    if now - loan.since >= SHORT_S and not came_to_nothing:
        return EndLoan(intent_id, why)
    short = 1 + (before.short if before is not None else 0)
    pause_s = backoff_s(PAUSE_S, BARRED_S, short - 1) if short > 1 else 0.0
    if pause_s:
        of = "runs" if loan.owners[0] == loan.owners[1] else "owners"
        why += f"; {short} loans of these two {of} in a row were over within {SHORT_S:g} s or came to nothing: none for {pause_s:g} s"
    return EndLoan(intent_id, why, came_to_nothing, short, pause_s)


def _pair(of: Demand, want: Demand) -> LoanPair:
    return loan_pair((of.run_id, want.run_id), (of.owner, want.owner))


def lent(intent_id: str) -> str:
    """The intent of the borrower of this one's engine."""
    return f"{LENT_INTENT}{intent_id}"


def saving(want: Demand, engines: int) -> float:
    """What the last of so many engines saves the run, in GPU-seconds of its own a GPU and second; of a run of which nothing is known 1/n,
    as where GPUs are divided."""
    if engines <= 0:
        return 0.0
    known = savings(want.benefit, engines)
    if want.benefit is None or not known:
        return UNKNOWN / engines
    return known[-1] * want.benefit.run_gpus / want.gpus


def _may(job: OurJob, want: Demand, of: Demand | None, rules: LendingRules, facts: StartFacts) -> bool:
    """Whether this engine, which is run `of`'s, may lend slots to run `want`."""
    return (
        of is not None
        and of.run_id != want.run_id
        and of.shares == want.shares
        and job.gpus == want.gpus
        and job.n_nodes == 1
        and job.connected
        and not job.waits
        and not job.standby
        and not job.changing_since
        and not of.queued
        and of.max_batch > 1
        and 2 * job.leases <= of.max_batch
        and rules.barred.get((job.intent_id, want.run_id), 0.0) <= facts.now
        and rules.paused.get(_pair(of, want), NO_PAUSE).until <= facts.now
        and on_nodes_of(want.owner, job.node, facts)
    )


def _over(
    loan: Loan, of: Demand | None, want: Demand | None, held: tuple[int, float] | None, busy: int, now: float
) -> str:
    """Why the loan ends; "" while it lasts. `busy`: samples of the run whose engine it is that are in it, or about to be."""
    if not want or not want.engines:
        return f"run {loan.run}, to which {loan.slots} slots were lent, wants no engine, or is not open"
    if of is None or not of.shares or of.shares != want.shares:
        return f"one of the two runs no longer shares engines; {loan.slots} slots were lent to run {loan.run}"
    if held is None:
        never = now - loan.since >= REGISTERS_S
        return f"no engine of run {loan.run} is in the slots that were lent to it" if never else ""
    if of.queued and busy > of.max_batch - loan.slots:
        # When a step begins samples wait for weights, and not for slots.
        return (
            f"run {of.run}, whose engine this is, needs the slots: {of.queued} samples of it wait, and with its part of them the engine "
            f"would have {busy} in {of.max_batch - loan.slots}"
        )
    leases, idle_since = held
    if not want.queued and not leases and now - max(loan.since, idle_since) >= HOLD_S:
        return f"run {want.run} has had no sample in the slots that were lent to it for {HOLD_S:g} s, and none waits"
    return ""
