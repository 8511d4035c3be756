"""Samples that an engine gave back to load newer weights, and that go on there, where their KV cache is (`algorithm.kv = "keep"`). Pure.

    switch  --Yield-->  given back, queued  --its engine has loaded-->  leased there again, before any other sample
                              |
                              +-- its engine is gone, or takes longer than RETURN_S -->  anybody's

A sample that waits so is placed by no policy. `ActiveRun.returning` has those that wait: sample -> (worker, since when).
"""

from __future__ import annotations

from collections.abc import Iterable

from scavenger.policy.interface import SamplePlacement
from scavenger.router.core import decision_log, samples
from scavenger.router.core.state import ActiveRun, Sample, Worker
from scavenger.router.core.tables import Core
from scavenger.router.core.transitions import WorkerStatus

#: So long a sample waits for its engine at most. A load takes seconds once the bytes are there; to prefill takes less than that elsewhere.
RETURN_S = 10.0


def expect(run: ActiveRun, worker: Worker, given: Iterable[Sample], now: float) -> None:
    """These samples are asked back from a worker that is about to load, and return to it."""
    if run.settings.keeps_cache:
        run.returning.update({sample.id: (worker.id, now) for sample in given})


def expire(core: Core, run: ActiveRun) -> None:
    """Forget those that wait in vain: anybody may take them."""
    for sample_id, (worker_id, since) in list(run.returning.items()):
        sample, worker = core.samples.get(sample_id), run.workers.get(worker_id)
        if (
            sample is None
            or worker is None
            or core.now - since > RETURN_S
            or not _loads(worker)
            or not (sample.id in run.queue or sample.worker_id == worker_id)
        ):
            del run.returning[sample_id]


def _loads(worker: Worker) -> bool:
    if worker.conn is None or worker.suspect:
        return False
    return worker.status is WorkerStatus.LOADING or (
        worker.status is WorkerStatus.READY and worker.weights.switches
    )


def lease_returning(core: Core, worker: Worker) -> None:
    """A worker has loaded: lease it what returns to it. Not while somebody waits for an evaluation, and not in the place of turns."""
    run = worker.run
    mine = [sample_id for sample_id, (worker_id, _) in run.returning.items() if worker_id == worker.id]
    free = worker.most_leases - len(worker.leases) - len(run.turns.queue)
    able: list[Sample] = []
    for sample_id in sorted(mine):
        del run.returning[sample_id]
        sample = core.samples.get(sample_id)
        if (
            sample is not None
            and len(able) < free
            and sample_id in run.queue
            and samples.may_generate(worker, sample.group)
        ):
            able.append(sample)
    if able and run.progress.newest[0] == "train" and not (run.stopped or run.ended):
        for sample in able:
            run.queue.discard(sample)
        samples.lease(core, worker, able)
        core.count("returned", len(able))
        why = (
            f"begun on worker {worker.id}, which has its KV cache and loaded version {worker.weights.loaded}"
        )
        decision_log.placed(core, run, [SamplePlacement(sample.id, worker.id, why) for sample in able])
