"""What coexists, phase by phase: every component of a rank's GPU and of its share of the host, in bytes. Pure arithmetic.

    load -> publish -> [ generate -> to_training -> forward -> backward -> optimizer -> publish -> to_generating ] -> ...

`to_training` and `to_generating` are the toggles between reserved engines and training on the same GPUs: who comes waits until the other's
memory is free, so a toggle holds one of them and what never leaves. Components of the device are counted as the account of the GPU's memory
measures them; of the host, weights are certain, and what processes take beside them (`RANK_NBYTES`, `engine.PROCESS_MB`) is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass

from scavenger.sizing import engine as engines
from scavenger.sizing import training
from scavenger.sizing.engine import PublishedSize
from scavenger.sizing.shape import ModelShape
from scavenger.sizing.training import GB, Moment, TrainJob

PHASES = ("load", "generate", "to_training", "forward", "backward", "optimizer", "publish", "to_generating")
TRAINING = ("forward", "backward", "optimizer")
#: Of a rank's process: Python, torch and CUDA's libraries, pinned staging. Assumed.
RANK_NBYTES = 4 * 10**9
#: A rank serves two versions of the weights while a third is written (docs/weights.md), and a quarter of one as deltas.
VERSIONS, DELTAS = 3, 0.25
#: Of weight files that are mapped while they are read (`trainer.model.sharded_load`).
_MAPPED = 8 << 20


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """What one component takes in one phase: bytes of a rank's GPU, and of its host for one rank."""

    phase: str
    component: str
    device: int
    host: int


def table(shape: ModelShape, job: TrainJob) -> tuple[MemoryRow, ...]:
    """All that is there in each phase, by rank. A micro-batch counts at its most in either direction."""
    return tuple(row for phase in PHASES for row in _phase(shape, job, phase) if row.device or row.host)


def device_nbytes(rows: tuple[MemoryRow, ...], phase: str) -> int:
    return sum(row.device for row in rows if row.phase == phase)


def host_nbytes(rows: tuple[MemoryRow, ...], phase: str) -> int:
    return sum(row.host for row in rows if row.phase == phase)


def node_nbytes(shape: ModelShape, job: TrainJob) -> int:
    """Of the host of a training node, in the phase that takes most."""
    rows = table(shape, job)
    return job.node_ranks * max(host_nbytes(rows, phase) for phase in PHASES)


def stays(shape: ModelShape, job: TrainJob) -> bool:
    """Whether training state stays on the GPU while reserved engines generate."""
    if not job.reserved:
        return True
    resident, capacity = training.states(shape, job).nbytes, job.gpu_gb * GB
    return not training.offloads(
        job.offload, resident=resident, engine=job.engine_share * capacity, capacity=capacity
    )


def published(shape: ModelShape, job: TrainJob) -> PublishedSize:
    """What engines hold: the model, and with adapters their base."""
    whole = job.published * shape.parameters
    return PublishedSize(whole, whole if job.lora_rank else 0)


def _phase(shape: ModelShape, job: TrainJob, phase: str) -> list[MemoryRow]:
    states, kept = training.states(shape, job), stays(shape, job)
    here = kept or phase != "generate"
    gradients = states.gradients if phase != "load" else 0
    rows = [
        MemoryRow(phase, "weights", states.weights if here else 0, 0),
        MemoryRow(phase, "reference model", states.reference if here else 0, 0),
        MemoryRow(phase, "optimizer", states.optimizer if here else 0, 0),
        MemoryRow(phase, "gradients", gradients if here else 0, 0),
        MemoryRow(
            phase,
            "engine",
            _engine_device(job) if phase == "generate" else 0,
            _engine_host(shape, job, phase),
        ),
        MemoryRow(phase, "process", 0, RANK_NBYTES + (_MAPPED if phase == "load" else 0)),
    ]
    if phase != "load":
        rows += [
            MemoryRow(phase, "published versions", 0, _versions(shape, job)),
            MemoryRow(phase, "place of states that leave", 0, 0 if kept else states.nbytes),
        ]
    if phase == "publish":  # as large as what is trained of the weights, which a gradient is too
        rows.append(MemoryRow(phase, "checkpoint under way", 0, states.gradients + states.optimizer))
    moment = _most(shape, job, phase)
    if moment is not None:
        rows += [
            MemoryRow(phase, "gathered layers", moment.gathered, 0),
            MemoryRow(phase, "gradients being summed", moment.reduced, 0),
            MemoryRow(phase, "activations", moment.activations, 0),
            MemoryRow(phase, "output head", moment.head, 0),
        ]
    return rows


def _most(shape: ModelShape, job: TrainJob, phase: str) -> Moment | None:
    """The forward pass ends with the head, whose gradients are made at once; layers go back after it."""
    names = {"forward": ("head",), "backward": ("backward", "reduce")}.get(phase, ())
    found = [moment for moment in training.moments(shape, job) if moment.name in names]
    return max(found, key=lambda moment: moment.nbytes, default=None)


def _engine_device(job: TrainJob) -> int:
    return int(job.engine_share * job.gpu_gb * GB) if job.reserved else 0


def _engine_host(shape: ModelShape, job: TrainJob, phase: str) -> int:
    """A rank's share of the reserved engines of its node. Asleep, an engine's weights wait in host memory besides."""
    if not job.reserved or phase == "load":
        return 0
    version = published(shape, job)
    asleep = version.nbytes if phase != "generate" else 0
    each = (engines.engine_host_mb(version, job.engine, job.reserved_gpus) << 20) + asleep
    return each * reserved_on_node(job) // job.node_ranks


def reserved_on_node(job: TrainJob) -> int:
    """Reserved engines on the node that has most of them."""
    places = job.node_ranks // job.reserved_gpus
    nodes = -(-job.ranks // job.node_ranks)
    return min(places, -(-job.reserved_workers // nodes)) if job.reserved_workers else places


def _versions(shape: ModelShape, job: TrainJob) -> int:
    """A rank's share of what it serves, where it is of the first replica: versions of all weights, or of the adapters and their base."""
    version, base = (job.trained, shape.parameters) if job.lora_rank else (shape.parameters, 0)
    return int(job.published * (base + (VERSIONS + DELTAS) * version) / job.shards)
