"""Looks at the daemon's parts on the event loop, and makes one `metrics.Reading` of what they hold. Changes nothing in them.

Owns where each figure comes from. A reading costs a pass over the runs' workers and groups, so it is taken every few seconds and not for
every scrape.

Boundary: the daemon's parts are read here alone; `metrics` knows only figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from scavenger import __version__
from scavenger.ledger.faults import WriterState
from scavenger.observe.metrics import KV_OUTCOMES, Reading, RunReading, StatusMetrics, read
from scavenger.observe.status import Status
from scavenger.observe.tally import Tally
from scavenger.policy.fleet_size import Demand
from scavenger.router.core import worker_counts
from scavenger.router.core.state import ActiveRun
from scavenger.router.core.tables import Core
from scavenger.router.core.transitions import SampleStatus


def take(
    status: Status,
    core: Core,
    tally: Tally,
    lag_s: float,
    demand: Sequence[Demand],
    rpcs: Mapping[str, Mapping[str, int]],
    quarantined: Mapping[str, int],
) -> Reading:
    """One reading. `status`: what the daemon says of itself at this moment. `lag_s`: of the ledger. `rpcs`: sent to Slurm, by cluster and
    kind. `quarantined`: nodes, by cluster; "" = the daemon's own."""
    s = status
    wanted = {d.run: d.engines for d in demand}
    return read(
        StatusMetrics(
            s.at,
            __version__,
            s.generation,
            s.started_at,
            s.ledger_state == WriterState.OK,
            lag_s,
            s.backlog_records,
            s.backlog_bytes,
            s.wal_bytes,
            s.wal_blocked,
            s.payload_bytes,
            s.payload_bound_bytes,
            tally,
            runs=tuple(_run(run, wanted.get(run.name, 0)) for run in core.runs.values() if not run.ended),
            quarantined=quarantined,
            rpcs=rpcs,
        )
    )


def _run(run: ActiveRun, wanted: int) -> RunReading:
    engines = Counter(
        (worker.kind, "suspect" if worker.suspect else worker.status.value) for worker in run.workers.values()
    )
    samples: Counter[str] = Counter(
        {status.value: 0 for status in SampleStatus if status not in (SampleStatus.NEW, SampleStatus.ENDED)}
    )
    progress_at = run.progress.submitted_at
    for group in run.by_key.values():
        for sample in group.samples:
            if sample.status is not SampleStatus.ENDED:
                samples[sample.status.value] += 1
                progress_at = max(progress_at, sample.chunk_at)
    return RunReading(
        run.name,
        engines,
        samples,
        wanted,
        max(run.weights.versions, default=0),
        run.progress.last_committed,
        progress_at,
        run.trainer.seen_at,
        max(worker_counts.pauses(run), default=0.0),
        run.speculated,
        run.siblings_sent,
        {how: getattr(run.kv, how) for how in KV_OUTCOMES},
        run.kv.tokens,
        run.kv.nbytes,
    )
