"""One MPI rank of a test: `mpirun -n N python rank_program.py MODEL OUT`. Starting ranks is slow, so one launch does it all.

Rank 0 trains made-up groups twice from the same weights, in two orders of arrival, and keeps the norm, the loss parts and the weights'
root; saves a checkpoint with all ranks; then says nothing for two seconds while rank 1 counts the CPU seconds that its waiting takes.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import msgspec
from torch.distributed.device_mesh import DeviceMesh

from scavenger.config import AlgorithmSection, OptimizerSection
from tests.trainer.rows import make_group
from trainer import checkpoint
from trainer.algorithms.rows import resolve
from trainer.batching import balanced, one_per_group, rounds
from trainer.comm import Comm, connect, join, leave
from trainer.model import Learner
from trainer.ranks import Ranks, serve

GROUPS, WIDTH = 6, 15
PACKED_OPTIMIZER = OptimizerSection(lr=1e-3, clip_norm=0.5, weight_decay=0.1)


def train(ranks: Ranks, seed: int) -> dict[str, object]:
    groups = [make_group(number) for number in range(GROUPS)]
    random.Random(seed).shuffle(groups)
    stats = [one for micros in rounds(one_per_group(groups, width=WIDTH), ranks.size) for one in ranks.train(micros)]
    norm = ranks.update(float(len(stats)), 1e-3)
    manifest, _ = ranks.build_version(1, "float64")
    parts = [msgspec.to_builtins(one) for one in sorted(stats, key=lambda one: one.sample_id)]
    return {"norm": norm, "root": manifest.root.hex(), "stats": parts}


def packed_step(comm: Comm, mesh: DeviceMesh, model: str, out: Path) -> dict[str, object]:
    """One step as a run takes it: packed float32, fused AdamW, GSPO. Rank 0 returns its figures and leaves the weights."""
    recipe = resolve(AlgorithmSection(name="gspo"), 8)
    learner = Learner(Path(model), mesh, recipe=recipe, optimizer=PACKED_OPTIMIZER, temperature=1.0, deterministic=False)
    if comm.rank:
        serve(comm, learner)
        return {}
    ranks = Ranks(comm, learner)
    stats = [one for micros in balanced([make_group(n) for n in range(GROUPS)], budget=60, ranks=ranks.size) for one in ranks.train(micros)]
    norm = ranks.update(float(len(stats)), PACKED_OPTIMIZER.lr)
    _, blob = ranks.build_version(1, "float32")
    (out / "packed.bin").write_bytes(blob.view)
    ranks.stop()
    return {"norm": norm, "loss": sum(one.loss for one in stats) / len(stats), "samples": len(stats)}


def save(ranks: Ranks, out: Path, root: object) -> None:
    ranks.save(checkpoint.prepare(out, 1))
    checkpoint.complete(out, checkpoint.State(1, 1, str(root), GROUPS, 0, ranks.updates_taken, "float64"))


def idle(comm: Comm) -> float:
    """CPU seconds of rank 1 between two frames: all it does there is wait."""
    if comm.rank == 0:
        comm.send([b"start"] * comm.size)
        time.sleep(2.0)
        comm.send([b"stop"] * comm.size)
        return float(comm.replies()[0])
    comm.receive()
    before = time.process_time()
    comm.receive()
    comm.reply(str(time.process_time() - before).encode())
    return 0.0


def main(model: str, out: str) -> None:
    comm = connect(idle_poll_ms=5.0)
    mesh = join(comm)
    found: list[dict[str, object]] = []
    for seed in (5, 6):
        learner = Learner(
            Path(model),
            mesh,
            recipe=resolve(AlgorithmSection(), 8),
            optimizer=OptimizerSection(lr=1e-3),
            temperature=1.0,
            deterministic=True,
        )
        if comm.rank == 0:
            ranks = Ranks(comm, learner)
            found.append(train(ranks, seed))
            save(ranks, Path(out), found[-1]["root"])
            ranks.stop()
        else:
            serve(comm, learner)
    packed = packed_step(comm, mesh, model, Path(out))
    leave()
    idle_cpu_s = idle(comm)
    if comm.rank == 0:
        (Path(out) / "found.json").write_text(json.dumps({"ranks": comm.size, "steps": found, "packed": packed, "idle_cpu_s": idle_cpu_s}))


if __name__ == "__main__":
    main(*sys.argv[1:])
