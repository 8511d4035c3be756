"""Which jobs of environment workers to submit and to cancel. Pure: a function of its arguments that returns its reasons.

An environment worker takes CPUs and memory, and no GPU. Engines come first: of each node so much is left as engines on its idle GPUs
would take. Other users come before both: a job of theirs that waits, whatever for, and could start if our environment workers were gone,
gets their place at once; until it has started none is submitted for a node that it could use. A worker that is told to leave says goodbye,
and its episodes are played elsewhere, so that nothing is drained.

    stop, time limits, reservations, drained nodes  --> workers that leave, as engines do (`drain`)
    other users who wait                            --> workers that leave
    what no run wants, or the cap does not allow    --> workers that leave, waiting ones first
    what runs still want, where CPUs are idle       --> one job each, for one node

Knows no key and no script. Not here: headroom, standby jobs, a benefit of starting; shares of owners.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scavenger.cluster.model import ClusterView, Job, Node
from scavenger.harvest.decide.actions import (
    Cancel,
    CancelPending,
    DrainAllocated,
    DrainKind,
    HarvestCode,
    HarvestLimits,
    OurJob,
    Submit,
)
from scavenger.harvest.decide.decide import harvesting_closed
from scavenger.harvest.decide.drain import cancel_overdue, ending
from scavenger.harvest.decide.free_capacity import begins
from scavenger.harvest.decide.other_users import NOT_FOR_GPUS, scan_queue
from scavenger.harvest.decide.start import blackout_near, preempted_enough
from scavenger.policy.fleet_size import EnvironmentDemand


@dataclass(frozen=True, slots=True)
class EnvironmentLimits:
    """`most`: jobs at once, over all runs, pending ones included. `cpus`, `memory_mb`: of each."""

    most: int
    cpus: int
    memory_mb: int


@dataclass(frozen=True, slots=True)
class EnvironmentDecision:
    """`reason` explains the whole; `code` why nothing more was submitted."""

    actions: tuple[Submit | CancelPending | Cancel, ...]
    reason: str
    code: HarvestCode


@dataclass(slots=True)
class _Idle:
    """What a node has for us now."""

    cpus: int
    memory_mb: int


def decide_environments(
    view: ClusterView,
    demand: Sequence[EnvironmentDemand],
    jobs: Sequence[OurJob],
    engines: Mapping[str, int],
    limits: HarvestLimits,
    most: EnvironmentLimits,
    now: float,
) -> EnvironmentDecision:
    """What to do about our environment workers' jobs, given one poll. `engines`: GPUs that our engines hold, by node."""
    age = now - view.observed_at
    if age > limits.stale_s:
        why = f"the last observation is {age:.0f} s old (over {limits.stale_s:g} s): nothing is decided on it"
        return EnvironmentDecision((), why, HarvestCode.STALE_VIEW)
    ours = sorted(jobs, key=lambda job: job.intent_id)
    actions: list[Submit | CancelPending | Cancel] = [
        one for one in cancel_overdue(ours, limits, now) if not isinstance(one, DrainAllocated)
    ]
    staying = _undecided(ours, actions)
    closed = harvesting_closed(limits, now)
    if closed:
        actions += [_gone(job, closed[1], closed[0]) for job in staying]
        return _decision(demand, ours, actions, closed[1], closed[0])
    queue, _ = scan_queue(view, frozenset(job.job_id for job in ours if job.job_id), limits, now)
    actions += [one for one in ending(view, queue, staying, limits, now) if isinstance(one, Cancel)]
    staying = _undecided(ours, actions)
    yielded, shut = _for_other_users(view, staying, engines, limits, most, now)
    actions += yielded
    staying = _undecided(ours, actions)
    actions += _beyond(demand, staying, most)
    staying = _undecided(ours, actions)
    started, why, code = _starts(view, demand, ours, staying, shut | queue.plans.keys(), limits, most, now)
    return _decision(demand, ours, [*actions, *started], why, code)


def _undecided(jobs: Sequence[OurJob], actions: Sequence[Submit | CancelPending | Cancel]) -> list[OurJob]:
    decided = {action.intent_id for action in actions if not isinstance(action, Submit)}
    return [job for job in jobs if job.drain_kind is DrainKind.NO and job.intent_id not in decided]


def _gone(job: OurJob, why: str, code: HarvestCode) -> CancelPending | Cancel:
    return CancelPending(job.intent_id, why, code) if job.waits else Cancel(job.intent_id, why, code)


def _decision(
    demand: Sequence[EnvironmentDemand],
    jobs: Sequence[OurJob],
    actions: Sequence[Submit | CancelPending | Cancel],
    why: str,
    code: HarvestCode,
) -> EnvironmentDecision:
    run, wait = sum(not job.waits for job in jobs), sum(job.waits for job in jobs)
    words = [f"{sum(one.workers for one in demand)} environment workers wanted, {run} run, {wait} wait"]
    counts = Counter(type(action).__name__ for action in actions)
    words += [f"{count} x {name}" for name, count in sorted(counts.items())]
    return EnvironmentDecision(tuple(actions), "; ".join([*words, *([why] if why else [])]), code)


# ---------------------------------------------------------------- other users


def _for_other_users(
    view: ClusterView,
    staying: Sequence[OurJob],
    engines: Mapping[str, int],
    limits: HarvestLimits,
    most: EnvironmentLimits,
    now: float,
) -> tuple[list[CancelPending | Cancel], frozenset[str]]:
    """Workers that leave for others' pending jobs, and the nodes for which none is submitted meanwhile.

    Whether such a job may preempt us makes no difference: a worker that leaves costs its run some seconds, and Slurm's own preemption
    more. A job counts that could start with the GPUs of our engines and the CPUs of our environment workers; one that could not waits
    for something else.
    """
    inside = view.partition(limits.partition)
    nodes = {node.name: node for node in view.nodes if node.usable}
    held = Counter(job.node for job in staying if not job.waits)
    mine = {job.job_id for job in staying}
    leaving: dict[str, str] = {}
    shut: set[str] = set()
    kinds = set[tuple[str, int, int, int, bool]]()  # a queue has few, and each is looked at once
    for job in view.jobs:
        if not _waits(job, now) or job.job_id in mine or job.name.startswith("scv-"):
            continue
        short = job.reason == "Resources"
        kind = (job.partition, job.n_nodes, job.cpus, job.gpus, short)
        if kind in kinds:
            continue
        kinds.add(kind)
        reach = frozenset[str]().union(
            *(part.nodes for part in view.partitions if part.up and part.name in job.partition.split(","))
        )
        if inside is None or not reach & inside.nodes:
            continue
        there = [nodes[name] for name in sorted(reach & nodes.keys())]
        could = [node.name for node in there if _fits(job, node, held, engines, most)]
        if len(could) < job.n_nodes:
            continue
        shut.update(could)
        # Where Slurm finds too little although CPUs and GPUs are there, memory is what lacks, and our workers may have it.
        room = [
            node
            for node in there
            if _fits(job, node, {}, engines, most) and not (short and held.get(node.name, 0))
        ]
        if len(room) < job.n_nodes:
            why = f"job {job.job_id} of another user waits ({job.reason}) and could start there"
            leaving |= dict.fromkeys(could, why)
    gone = [
        _gone(job, leaving[node], HarvestCode.OTHER_USERS_PENDING)
        for job in staying
        if (node := job.pinned if job.waits else job.node) in leaving
    ]
    return gone, frozenset(shut)


def _waits(job: Job, now: float) -> bool:
    """Whether more CPUs or GPUs could start it now."""
    return job.waits and job.eligible_time <= now and not job.reason.startswith(NOT_FOR_GPUS)


def _fits(
    job: Job, node: Node, held: Mapping[str, int], engines: Mapping[str, int], most: EnvironmentLimits
) -> bool:
    """Whether its share of one node is there, our jobs gone. Its memory is not known: what is ours of a node may be all that it lacks."""
    cpus = node.cpus - node.cpus_allocated + held.get(node.name, 0) * most.cpus
    gpus = node.idle_gpus + engines.get(node.name, 0)
    # An engine's CPUs are its own affair: where its GPUs are counted, so may they be.
    return cpus >= -(-job.cpus // job.n_nodes) and gpus >= -(-job.gpus // job.n_nodes)


# ---------------------------------------------------------------- what runs want


def _beyond(
    demand: Sequence[EnvironmentDemand], staying: Sequence[OurJob], most: EnvironmentLimits
) -> list[CancelPending | Cancel]:
    """What no run wants, or is over the cap: those that wait first, then the youngest."""
    wanted = {one.run_id: one.workers for one in demand}
    left, total, found = dict(wanted), most.most, []
    for job in sorted(staying, key=lambda job: (job.waits, job.started_at, job.intent_id)):
        if left.get(job.run_id, 0) > 0 and total > 0:
            left[job.run_id] -= 1
            total -= 1
        elif left.get(job.run_id, 0) <= 0:
            run = "its run wants no more environment workers"
            found.append(_gone(job, run, HarvestCode.NO_DEMAND))
        else:
            cap = f"harvest.max_environment_workers = {most.most}"
            found.append(_gone(job, cap, HarvestCode.MAX_ENVIRONMENTS))
    return found


def _starts(
    view: ClusterView,
    demand: Sequence[EnvironmentDemand],
    ours: Sequence[OurJob],
    staying: Sequence[OurJob],
    shut: frozenset[str],
    limits: HarvestLimits,
    most: EnvironmentLimits,
    now: float,
) -> tuple[list[Submit], str, HarvestCode]:
    """One job after another, to the run that has the fewest, while there is a node for it. And why no more."""
    have = Counter(job.run_id for job in staying)
    total, pending = len(ours), sum(job.waits for job in ours)
    idle = _idle(view, ours, shut, limits, most, now)
    found: list[Submit] = []
    while asking := [one for one in demand if have[one.run_id] < one.workers]:
        if total >= most.most:
            why = f"harvest.max_environment_workers = {most.most} is reached (leaving ones count)"
            return found, why, HarvestCode.MAX_ENVIRONMENTS
        if pending >= limits.caps.max_pending:
            why = f"harvest.max_pending = {limits.caps.max_pending} environment workers wait"
            return found, why, HarvestCode.MAX_PENDING
        if why := preempted_enough(limits):
            return found, why, HarvestCode.PREEMPTIONS
        if why := blackout_near(limits, now):
            return found, why, HarvestCode.BLACKOUT
        if now < limits.restrictions.not_before:
            return found, limits.restrictions.not_before_reason, HarvestCode.BACKOFF
        node = max(idle, key=lambda name: (idle[name].cpus, name), default="")
        if not node:
            code = HarvestCode.OTHER_USERS_PENDING if shut else HarvestCode.NO_CAPACITY
            return found, "no node has idle CPUs for one more, those of engines left aside", code
        chosen = min(asking, key=lambda one: (have[one.run_id], one.run_id))
        found.append(_submit(chosen, node, idle[node], limits, most))
        have[chosen.run_id] += 1
        total, pending = total + 1, pending + 1
        _take(idle, node, most)
    code = HarvestCode.SERVED if demand else HarvestCode.NO_RUN
    return found, "", code


def _submit(
    want: EnvironmentDemand, node: str, idle: _Idle, limits: HarvestLimits, most: EnvironmentLimits
) -> Submit:
    why = f"{node} has {idle.cpus} idle CPUs beyond those of engines, and run {want.run} wants {want.workers} environment workers"
    return Submit(
        want.run_id,
        want.run,
        limits.partition,
        0,
        why,
        nodelist=(node,),
        cpus=most.cpus,
        memory_mb=most.memory_mb,
        owner=want.owner,
        environment=want.file,
    )


def _idle(
    view: ClusterView,
    ours: Sequence[OurJob],
    shut: frozenset[str],
    limits: HarvestLimits,
    most: EnvironmentLimits,
    now: float,
) -> dict[str, _Idle]:
    """By node, what is idle beyond what engines on its idle GPUs would take: of nodes that could hold one more worker."""
    part = view.partition(limits.partition)
    if part is None or not part.up:
        return {}
    soon = {name for name, at in begins(view, now).items() if at < now + limits.job.min_life_s}
    out = {name for name, _ in (*limits.restrictions.quarantined, *limits.restrictions.drained)}
    found = {}
    for node in sorted(view.nodes, key=lambda node: node.name):
        if node.name not in part.nodes - shut - soon - out or not node.usable:
            continue
        cpus = node.cpus - node.cpus_allocated - node.idle_gpus * limits.job.cpus
        memory_mb = node.memory_mb - node.memory_allocated_mb
        engine_mb = limits.job.memory_mb or (node.memory_mb // node.gpus if node.gpus else 0)
        found[node.name] = _Idle(cpus, memory_mb - node.idle_gpus * engine_mb)
    for job in ours:
        if job.waits and job.pinned in found:
            found[job.pinned].cpus -= most.cpus
            found[job.pinned].memory_mb -= most.memory_mb
    return {name: one for name, one in found.items() if _holds(one, most)}


def _holds(one: _Idle, most: EnvironmentLimits) -> bool:
    return one.cpus >= most.cpus and one.memory_mb >= most.memory_mb


def _take(idle: dict[str, _Idle], node: str, most: EnvironmentLimits) -> None:
    idle[node].cpus -= most.cpus
    idle[node].memory_mb -= most.memory_mb
    if not _holds(idle[node], most):
        del idle[node]
