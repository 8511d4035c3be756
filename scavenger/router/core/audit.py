"""What must hold between the core's tables after every event, recounted from scratch. Pure; for tests and for a suspicious admin.

Boundary: invariants recounted; it changes nothing.
"""

from __future__ import annotations

from collections import Counter

from scavenger.policy.interface import Standard
from scavenger.router.core import (
    kv_turns,
    policy_driver,
    policy_view,
    samples,
    siblings,
    staleness,
    turns,
    worker_counts,
)
from scavenger.router.core.state import ActiveRun, Group, Sample, Worker
from scavenger.router.core.tables import Core
from scavenger.router.core.transitions import MEMORY_ALLOWED, DeliveryStatus, SampleStatus, WorkerStatus


def check(core: Core) -> None:
    """Raise AssertionError when the tables contradict each other, or when something is due that was not done."""
    for sample in core.samples.values():
        _check_sample(core, sample)
    for worker in core.workers.values():
        _check_worker(core, worker)
    _check_jobs(core)
    for run in core.runs.values():
        _check_run(core, run)
    for group in core.groups.values():
        if staleness.is_bounded(group) and not group.orphaned:
            _check_ages(group)
        holders = Counter(s.worker_id for s in group.samples if s.worker_id)
        assert group.holders == holders, f"group {group.id}: held by {group.holders}, leases are of {holders}"
        open_ones = sum(not s.done for s in group.samples)
        assert group.unfinished == open_ones, (
            f"group {group.id}: {group.unfinished} counted as not done, {open_ones} are"
        )


def _check_ages(group: Group) -> None:
    """No sample will be trained beyond k, whatever comes of its lease."""
    for sample in group.samples:
        assert sum(tokens for _, tokens in staleness.mixture(sample)) == sample.accepted, (
            f"sample {sample.id}: of some of its tokens the version is not known"
        )
        leased = sample.status in (SampleStatus.LEASED, SampleStatus.UNCONFIRMED)
        used = [version for version, _ in staleness.mixture(sample)] + [sample.lease_version] * leased
        for version in used:
            found = staleness.fault(group.run, group.step, version)
            assert not found or sample.error is not None, f"sample {sample.id}: {found}"


def _check_sample(core: Core, sample: Sample) -> None:
    leased = sample.status in (SampleStatus.LEASED, SampleStatus.UNCONFIRMED)
    assert leased == bool(sample.worker_id), (
        f"sample {sample.id}: {sample.status} with worker {sample.worker_id}"
    )
    if leased:
        assert core.workers[sample.worker_id].leases.get(sample.id) is sample, (
            f"sample {sample.id}: lease not held"
        )
    queued = sample.id in sample.queue
    assert queued == (sample.status is SampleStatus.QUEUED), (
        f"sample {sample.id}: {sample.status}, in queue: {queued}"
    )
    assert sample.durable <= sample.accepted <= sample.group.sampling.max_tokens, (
        f"sample {sample.id}: lengths out of order"
    )
    assert core.groups.get(sample.group.id) is sample.group, f"sample {sample.id}: its group is forgotten"
    known = sample.cached_view
    assert known is None or known == policy_view.fresh_view(sample), (
        f"sample {sample.id} changed since policies saw it: {known}"
    )


def _check_jobs(core: Core) -> None:
    """An engine, with all that it holds, is of one run at a time."""
    run_of: dict[str, str] = {}
    for worker in core.workers.values():
        intent_id = worker.process.intent_id
        before = run_of.setdefault(intent_id, worker.run.name) if intent_id else worker.run.name
        assert before == worker.run.name, (
            f"the engine of job {intent_id} works for two runs: {before} and {worker.run.name}"
        )


def _check_worker(core: Core, worker: Worker) -> None:
    waiting = sum(end - start for start, end in worker.backlog.ranges.values())
    assert waiting == worker.backlog.tokens, f"worker {worker.id}: {worker.backlog}, {waiting} tokens wait"
    most = siblings.most_waiting(core)
    assert waiting <= most, f"worker {worker.id}: {waiting} siblings' tokens wait, over {most}"
    seen = worker.cached_slots
    assert seen is None or seen.leases == len(worker.leases), (
        f"worker {worker.id}: its leases changed since policies saw it: {seen}"
    )
    for sample in worker.leases.values():
        assert sample.group.run is worker.run, (
            f"worker {worker.id} of run {worker.run.name} holds sample {sample.id} of run {sample.group.run.name}"
        )
        assert sample.worker_id == worker.id, (
            f"worker {worker.id} holds sample {sample.id} of worker {sample.worker_id}"
        )
    for sample_id, asked in worker.yielding.items():
        held = worker.leases.get(sample_id)
        assert held is not None, f"worker {worker.id} is to give sample {sample_id} back and does not hold it"
        assert held.epoch == asked.epoch, (
            f"worker {worker.id} is to give back an older lease of sample {sample_id}"
        )
    status, memory = worker.status, worker.memory.state
    allowed = MEMORY_ALLOWED.get(status, frozenset())  # none for one that is new or gone: it is in no table
    assert memory in allowed, f"worker {worker.id} is {status}, and its memory is {memory}"
    if worker.conn is not None:
        assert core.by_conn.get(worker.conn) is worker, (
            f"worker {worker.id}: connection {worker.conn} is not its own"
        )
    assert worker.run.workers.get(worker.id) is worker, f"worker {worker.id} is not among its run's"


def _check_run(core: Core, run: ActiveRun) -> None:
    held = [sample for worker in run.workers.values() for sample in worker.leases.values()]
    leased = Counter(sample.lease_version for sample in held)
    of_turns = Counter(sample.lease_version for sample in held if sample.group.turn is not None)
    assert (run.leased, run.turns.leased) == (leased, of_turns), (
        f"run {run.id}: leases by version are counted as {run.leased}, {run.turns.leased} of turns, and are {leased}, {of_turns}"
    )
    contradictions = [*kv_turns.check(core, run)]
    assert not contradictions, f"run {run.id}: {contradictions}"
    waiting = {s.id for s in run.queue}
    versions = {core.samples[i].group.version for i in waiting}
    assert run.queue.versions() == versions, f"run {run.id}: the queue's versions"
    assert {s.id for v in versions for s in run.queue.waiting(v)} == waiting, (
        f"run {run.id}: the queue's order lacks samples"
    )
    _check_turns(core, run)
    _check_deliveries(run)
    for worker_id in run.agreement.suspects.keys() & run.workers.keys():
        wrong = run.workers[worker_id]
        assert wrong.status is WorkerStatus.DRAINING, (
            f"worker {worker_id} was set aside and is {wrong.status}"
        )
        assert not wrong.leases, f"worker {worker_id} was set aside and holds samples {sorted(wrong.leases)}"
    if run.ended:
        return
    memory = worker_counts.memory_of(run)
    assert run.reserved.memory_changed or run.reserved.counted_memory == memory, (
        f"run {run.id}: its memory is counted as {run.reserved.counted_memory}, and is {memory}"
    )
    sizes = worker_counts.fleet_sizes(run)
    assert run.due.changed_workers or run.cached.sizes == sizes, (
        f"run {run.id}: its fleet is counted as {run.cached.sizes}, and is {sizes}"
    )
    if run.cached.serving is not None and not run.due.changed_workers:
        version, serving = run.cached.serving
        assert serving == samples.serving(run, version), f"run {run.id}: who serves version {version}"
    if isinstance(run.policy, Standard):  # others may hold samples back
        assert not policy_driver.placements(core, run), f"run {run.id}: samples could be placed and were not"
    wanted = samples.target_version(run)
    for worker in run.workers.values():
        idle = (
            worker.conn is not None
            and not worker.leases
            and worker.engine.lease_limit != 0  # without, it is asked for nothing
            and worker.status in (WorkerStatus.READY, WorkerStatus.LOADING)
        )
        if idle and not worker.weights.failures and run.weights.available(wanted):
            assert worker.weights.asked == wanted, (
                f"worker {worker.id} was asked for {worker.weights.asked}, wanted is {wanted}"
            )


def _check_deliveries(run: ActiveRun) -> None:
    """What is kept is due, with its rows; a run that takes no steps keeps nothing."""
    kept = run.deliveries.by_id.values()
    assert not (kept and run.settings.serves_only), (
        f"run {run.id} takes no steps, and deliveries are kept for it"
    )
    for one in kept:
        assert one.status is DeliveryStatus.DUE, f"delivery {one.id} is {one.status} and is kept"
        assert one.rows, f"delivery {one.id} is due without its rows"
    if run.ended:
        assert not run.deliveries.due(), f"run {run.id} has ended, and something is due to it"
    wanted = run.deliveries.wanted
    if wanted is not None:
        most = max(wanted.count, len(wanted.have))
        assert len(run.deliveries.held) <= most, f"run {run.id} was sent more groups than it wants"


def _check_turns(core: Core, run: ActiveRun) -> None:
    answers = sum(len(c.answer) for e in run.turns.episodes.values() for c in e.tools.values())
    assert run.turns.answer_bytes == answers, (
        f"run {run.id}: {run.turns.answer_bytes} bytes of tools' answers counted, {answers} are kept"
    )
    assert run.turns.ended_known or not (run.turns.episodes or run.turns.ended), (
        f"run {run.id} was closed, and has episodes before the names of those that ended are read"
    )
    assert len(run.turns.ended) <= turns.MAX_ENDED_EPISODES, f"run {run.id}: too many names of episodes"
    kept = [group for episode in run.turns.episodes.values() for group in episode.turns.values()]
    assert run.turns.groups == len(kept), (
        f"run {run.id}: {run.turns.groups} turns counted, {len(kept)} are kept"
    )
    unsettled = {g.id for g in kept if not (g.done and g.durable)}
    assert run.turns.open.keys() == unsettled, (
        f"run {run.id}: turns {sorted(run.turns.open)} count as open, and {sorted(unsettled)} are"
    )
    waiting = {s.id for s in run.turns.queue.waiting()}
    versions = {core.samples[i].group.version for i in waiting}
    assert run.turns.queue.versions() == versions, f"run {run.id}: the versions that its turns wait for"
    for group in kept:
        assert group.turn is not None, f"group {group.id} is no turn"
        assert core.groups.get(group.id) is group, f"turn {group.id} is forgotten"
    if not run.ended:
        held = (
            run.turns.queue.held_since
        )  # for engines whose queues change with time: looked at with each tick
        assert held.keys() <= waiting, f"run {run.id}: samples wait for a cache and are not queued"
        left = [
            p for p in turns.placements(core, run, core.now) if p.sample.id not in held and not p.chosen.waits
        ]
        assert not left, f"run {run.id}: samples of turns could be placed and were not"
