"""Nodes, engines and runs one by one, as the status file has them for `scavenger top`. Pure; copies that outlive the moment.

    last poll, our jobs            --nodes_of-->    NodeGpus    whose each GPU of a node is
    router's workers, `life_s`     --engines_of-->  EngineNow   what each engine does
    router's run                   --runs_of-->     RunNow      how far its step is, and in which phase

Owns the records and where each figure comes from. Decides nothing, and changes nothing in what it reads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from scavenger.cluster.model import ClusterView, Node
from scavenger.harvest.decide.actions import DrainKind, OurJob
from scavenger.harvest.decide.free_capacity import gpus_of_nodes
from scavenger.policy.idle_gpus import Idle, node_class
from scavenger.protocol.train_step import StepPhase
from scavenger.router.core import worker_counts
from scavenger.router.core.state import ActiveRun, Worker

#: Between two steps, or before the first: nothing of a step is asked for.
BETWEEN, EVALUATES = "between", "evaluate"


class NodeGpus(msgspec.Struct, frozen=True, omit_defaults=True):
    """One node's GPUs by who has them; they add up to all of them. `draining`: harvested, and to be released.

    `out`: where no job may start. `why`: Slurm's words for that, or why it gets no engine.
    """

    name: str
    reserved: int = 0
    other_users: int = 0
    harvested: int = 0
    draining: int = 0
    idle: int = 0
    out: int = 0
    why: str = ""


class EngineNow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One worker. `state`: a `WorkerStatus`, or "suspect". `tokens_held`: of its leases, prompts included, of the
    `cache_tokens` that its KV cache has room for (0: it does not know). Times: Unix seconds.

    `life_s`: for how long its GPUs are expected to stay ours yet; None: not known. `ends_at`: of its job's time limit; 0: none is known.
    """

    worker_id: int
    run: str
    kind: str
    node: str
    gpus: int
    job_id: int
    state: str
    version: int
    samples: int
    tokens_per_s: float
    tokens_held: int = 0
    cache_tokens: int = 0
    joined_at: float = 0.0
    life_s: float | None = None
    ends_at: float = 0.0


class RunNow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One open run. `step`, `purpose`: submitted last. `phase`: a `StepPhase`, "between" steps, or "evaluate".

    `samples_open` of `samples` are not complete. `groups_trained`: of this step. `window_reason`: the policy's, for the phase.
    """

    run: str
    purpose: str
    step: int
    phase: str
    samples: int
    samples_open: int
    groups_trained: int
    last_step: int
    version: int
    submitted_at: float
    trainer_seen_at: float
    window_reason: str = ""


@dataclass(frozen=True, slots=True)
class JobOutlook:
    """What is known of the future of a job's GPUs. As in `EngineNow`."""

    life_s: float | None
    ends_at: float


def nodes_of(
    view: ClusterView,
    partition: str,
    our_job_ids: frozenset[int],
    jobs: Iterable[OurJob],
    closed: Mapping[str, str],
) -> tuple[NodeGpus, ...]:
    """By name. `closed`: nodes that get no engine, with the reason."""
    leaving: defaultdict[str, int] = defaultdict(int)
    for job in jobs:
        if not job.waits and job.drain_kind is not DrainKind.NO:
            leaving[job.node] += job.gpus
    found = []
    for use in gpus_of_nodes(view, partition, our_job_ids):
        node = use.node
        why = "" if node.usable else ", ".join(sorted(node.states))
        why = "; ".join(filter(None, (why, closed.get(node.name, ""))))
        if not use.inside:
            found.append(NodeGpus(node.name, reserved=node.gpus, why=why))
            continue
        draining = min(leaving[node.name], use.harvested)
        idle = use.rest if node.usable else 0
        found.append(
            NodeGpus(
                node.name,
                other_users=use.other_users,
                harvested=use.harvested - draining,
                draining=draining,
                idle=idle,
                out=use.rest - idle,
                why=why,
            )
        )
    return tuple(sorted(found, key=lambda one: one.name))


def outlooks(
    jobs: Iterable[OurJob], view: ClusterView | None, idle: Idle, now: float
) -> dict[str, JobOutlook]:
    """By intent, of jobs that hold GPUs: how long such GPUs last, by the survival curve of the node's class, and the job's own end."""
    if view is None:
        return {}
    nodes: dict[str, Node] = {node.name: node for node in view.nodes}
    listed = {job.job_id: job for job in view.jobs}
    found = {}
    for one in jobs:
        if one.waits:
            continue
        job, node = listed.get(one.job_id), nodes.get(one.node)
        ends_at = job.end_time if job is not None and job.end_time > now else 0.0
        curve = idle.curves.get(node_class(node)) if node is not None else None
        life_s = None
        if curve is not None:
            # Ours hold those that came free first. One that was free before the first poll has no known age.
            since = [at for at in idle.since.get(one.node, ())[:1] if at > float("-inf")]
            life_s = curve.expected_s(0.0, max(0.0, now - since[0]) if since else 0.0)
            life_s = min(life_s, ends_at - now) if ends_at else life_s
        found[one.intent_id] = JobOutlook(life_s, ends_at)
    return found


def engines_of(runs: Iterable[ActiveRun], outlook: Mapping[str, JobOutlook]) -> tuple[EngineNow, ...]:
    """The workers of open runs, by id."""
    found = [
        _engine(worker, outlook.get(worker.process.intent_id))
        for run in runs
        if not run.ended
        for worker in run.workers.values()
    ]
    return tuple(sorted(found, key=lambda one: one.worker_id))


def _engine(worker: Worker, outlook: JobOutlook | None) -> EngineNow:
    held = sum(len(sample.group.prompt) // 4 + sample.accepted for sample in worker.leases.values())
    return EngineNow(
        worker.id,
        worker.run.name,
        worker.kind,
        worker.place,
        worker.gpus,
        worker.process.job_id,
        "suspect" if worker.suspect else worker.status.value,
        worker.weights.loaded,
        len(worker.leases),
        worker.engine.tokens_per_s,
        held,
        worker.engine.cache_tokens,
        worker.joined_at,
        outlook.life_s if outlook is not None else None,
        outlook.ends_at if outlook is not None else 0.0,
    )


def runs_of(runs: Iterable[ActiveRun]) -> tuple[RunNow, ...]:
    """Open runs, by name."""
    return tuple(sorted((_run(run) for run in runs if not run.ended), key=lambda one: one.run))


def _run(run: ActiveRun) -> RunNow:
    progress = run.progress
    purpose, step = progress.newest
    groups = [g for g in run.by_key.values() if (g.purpose, g.step) == (purpose, step)]
    unfinished = sum(group.unfinished for group in groups)
    trained = progress.trained.groups if progress.trained is not None and progress.trained.step == step else 0
    memory = worker_counts.memory_of(run)
    return RunNow(
        run.name,
        purpose,
        step,
        phase_of(
            purpose,
            asked=progress.submitted_at > 0 and bool(groups),
            reserved=bool(memory.asleep or memory.holding),
            awake=run.reserved.awake,
            holding=bool(memory.holding),
            trained=trained > 0,
            unfinished=unfinished > 0,
        ),
        progress.samples,
        unfinished,
        trained,
        progress.last_committed,
        max(run.weights.versions, default=0),
        progress.submitted_at,
        run.trainer.seen_at,
        run.decisions.window_reason,
    )


def phase_of(
    purpose: str, *, asked: bool, reserved: bool, awake: bool, holding: bool, trained: bool, unfinished: bool
) -> str:
    """The phase of the train-step state machine, by what the daemon was told and sees.

    `asked`: groups of the step are here. `reserved`: there are engines on the trainer's GPUs, which are to be `awake` or still `holding`
    their memory. `trained`: groups of this step were.
    """
    if not asked:
        return BETWEEN
    if purpose != "train":
        return EVALUATES
    if reserved and awake and unfinished:
        phase = StepPhase.WAKE if trained else StepPhase.SEED
    elif reserved and not awake and holding:
        phase = StepPhase.SLEEP
    else:
        phase = StepPhase.TRAIN if unfinished else StepPhase.FINISH
    return str(phase.value)
