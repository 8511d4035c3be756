"""Which GPUs are divided among runs by value, and what becomes of it: `policy.division` over one poll's facts. Pure.

    FreeCapacity + GPUs of engines that leave for no other user --FreeSpace--> policy.division.divide --> Division

Owns the translation. A job of ours that waits keeps what it waits for; GPUs that an engine gives up for another user are not counted.

Boundary: `policy.division`, which knows no job and no site's limits; pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from scavenger.harvest.decide.actions import DrainKind, HarvestCode, HarvestLimits, OurJob
from scavenger.harvest.decide.free_capacity import FreeCapacity, nodes_of, waits_for
from scavenger.policy.division import Bid, Division, DivisionRules, HeldEngine, divide
from scavenger.policy.fleet_size import Demand

#: Why an engine leaves whose GPUs another of ours may take.
_OURS_AGAIN = (HarvestCode.DIVISION, HarvestCode.OVER_SHARE, HarvestCode.NO_DEMAND, HarvestCode.WRONG_SIZE)
#: An engine that has not registered so long after its start is taken for another run like any other.
REGISTERS_S = 120.0


def divide_by_value(
    wanted: Sequence[Demand],
    engines: Sequence[OurJob],
    free: Callable[[], FreeCapacity],
    limits: HarvestLimits,
    rules: DivisionRules,
    most_engines: int,
    now: float,
) -> Division:
    """The engines of each run. `wanted`: demand, by run id. `engines`: ours but for standby jobs, in order; those that leave included."""
    sizes = {want.run_id: (want.gpus, want.nodes_per_engine) for want in wanted}
    staying = [
        job
        for job in engines
        if job.drain_kind is DrainKind.NO and sizes.get(job.run_id) == (job.gpus, job.n_nodes)
    ]
    held = [_held(job, now) for job in staying]
    kept = {job.intent_id for job in staying}
    coming = [job for job in engines if job.intent_id not in kept and not job.waits and _ours_again(job)]
    since = dict(limits.waiting_since)
    shares = {rule.owner: rule.share for rule in limits.owners}
    bids = [
        Bid(
            want.run_id,
            want.run,
            want.engines,
            want.gpus_per_engine,
            want.owner,
            shares.get(want.owner, 1),
            want.benefit,
            want.nodes_per_engine,
            max(0.0, now - since.get(want.run_id, now)),
        )
        for want in wanted
    ]
    space = FreeSpace(free(), limits, wanted, engines, coming)
    return divide(bids, held, space, rules, most_engines, limits.caps.max_gpus)


def _held(job: OurJob, now: float) -> HeldEngine:
    age_s = max(0.0, now - job.started_at) if job.started_at else 0.0
    return HeldEngine(
        job.intent_id,
        job.run_id,
        "" if job.waits else job.node,
        job.gpus,
        age_s,
        # While it changes hands it serves nobody: taken on the way, it would end for nothing (`drain.HANDS_S` bounds that).
        fixed=job.waits or job.n_nodes > 1 or job.changing_since > 0,
        registers_s=0.0 if job.connected else max(0.0, REGISTERS_S - age_s),
    )


def _ours_again(job: OurJob) -> bool:
    """Whether it leaves for no other user, or is about to leave because its run has no use for it."""
    return job.drain_kind is DrainKind.NO or job.why_draining in _OURS_AGAIN


class FreeSpace:
    """`policy.division.Space` over one count of free capacity, which it uses up. `coming`: engines whose GPUs come free for us."""

    def __init__(
        self,
        free: FreeCapacity,
        limits: HarvestLimits,
        wanted: Sequence[Demand],
        engines: Sequence[OurJob],
        coming: Sequence[OurJob],
    ) -> None:
        self._free, self._job = free, limits.job
        shut = {*free.closed, *free.drained, *free.booked, *free.expected}
        self._open = frozenset(free.resources.keys() - shut)
        only = {rule.owner: nodes_of(rule, free.nodes.values()) for rule in limits.owners}
        self._of_run = {want.run_id: only.get(want.owner) for want in wanted}
        self._closed: set[str] = set()
        for job in engines:
            if job.waits and job.drain_kind is DrainKind.NO:
                free.promise(waits_for(job, limits), job.gpus)
                free.keep(waits_for(job, limits), job.gpus)
        gone: Counter[str] = Counter()
        for job in coming:
            for node in job.nodes:
                gone[node] += job.gpus_on_node
        for node, gpus in sorted(gone.items()):
            self.give_up(node, gpus)

    def take(self, bid: Bid, nodes: frozenset[str] | None = None) -> tuple[str, ...] | None:
        allowed = self.open(bid) if nodes is None else self.open(bid) & nodes
        place = self._free.take(bid.gpus, self._job.cpus, self._job.memory_mb, None, allowed, bid.n_nodes)
        return None if place is None else place.nodes

    def give_up(self, node: str, gpus: int) -> None:
        if node in self._open:
            self._free.give_up(node, gpus, self._job.cpus, self._job.memory_mb)

    def idle(self, node: str) -> int:
        space = self._free.resources.get(node)
        return space.gpus if space is not None and node in self._open - self._closed else 0

    def open(self, bid: Bid) -> frozenset[str]:
        only = self._of_run.get(bid.run_id)
        found = self._open if only is None else self._open & only
        return found - self._closed

    def close(self, node: str) -> None:
        self._closed.add(node)

    @property
    def gpus(self) -> int:
        return sum(self._free.resources[name].gpus for name in self._open - self._closed)
