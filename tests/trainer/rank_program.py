"""One MPI rank of a test: `mpirun -n N python rank_program.py MODEL OUT`. Starting ranks is slow, so one launch does it all.

Rank 0 trains made-up groups twice from the same weights, in two orders of arrival, and keeps the norm, the loss parts and the weights'
root; begins a checkpoint with all ranks, and takes another step while it is written; then says nothing for two seconds while rank 1
counts the CPU seconds that its waiting takes. `rank_program.py MODEL OUT again`: all ranks load that checkpoint and write it anew to
OUT/again.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from scavenger.config import AlgorithmSection, OptimizerSection
from scavenger.protocol import keys
from scavenger.weights.pull import pull
from scavenger.weights.source import WeightServer
from tests.trainer.published import Kept
from tests.trainer.rows import make_group
from trainer.algorithms.rows import resolve
from trainer.checkpoint import checkpoint
from trainer.data.batching import balanced, one_per_group, rounds
from trainer.loop.comm import Comm, connect, disconnect, join
from trainer.loop.publish import Publisher
from trainer.loop.ranks import Ranks, serve
from trainer.model.learner import Learner

GROUPS, WIDTH = 6, 15
PACKED_OPTIMIZER = OptimizerSection(lr=1e-3, clip_norm=0.5, weight_decay=0.1)


def train(ranks: Ranks, seed: int) -> dict[str, object]:
    groups = [make_group(number) for number in range(GROUPS)]
    random.Random(seed).shuffle(groups)
    stats = [
        one
        for micros in rounds(one_per_group(groups, width=WIDTH), ranks.size)
        for one in ranks.train(micros)
    ]
    norm = ranks.update(float(len(stats)), 1e-3)
    manifest = ranks.build_version(1, "float64")
    parts = [msgspec.to_builtins(one) for one in sorted(stats, key=lambda one: one.sample_id)]
    return {"norm": norm, "root": manifest.root.hex(), "stats": parts}


def packed_step(comm: Comm, mesh: DeviceMesh, model: str, out: Path) -> dict[str, object]:
    """One step as a run takes it: packed float32, fused AdamW, GSPO. Rank 0 returns its figures and leaves the weights."""
    recipe = resolve(AlgorithmSection(name="gspo"), 8)
    learner = Learner(
        Path(model), mesh, recipe=recipe, optimizer=PACKED_OPTIMIZER, temperature=1.0, deterministic=False
    )
    with WeightServer() as source:
        if comm.rank == 0:
            return packed_lead(Ranks(comm, learner, Publisher(source)), out)
        serve(comm, learner, Publisher(source))
        return {}


def packed_lead(ranks: Ranks, out: Path) -> dict[str, object]:
    stats = [
        one
        for micros in balanced([make_group(n) for n in range(GROUPS)], budget=60, ranks=ranks.size)
        for one in ranks.train(micros)
    ]
    norm = ranks.update(float(len(stats)), PACKED_OPTIMIZER.lr)
    manifest = ranks.build_version(1, "float32")
    blob = asyncio.run(pull(manifest, ranks.offer(manifest), keys.generate(), 20.0))
    (out / "packed.bin").write_bytes(blob.view)
    ranks.stop()
    return {"norm": norm, "loss": sum(one.loss for one in stats) / len(stats), "samples": len(stats)}


def save(ranks: Ranks, out: Path, root: object) -> dict[str, object]:
    """A checkpoint of the present state, with a whole step while it is written; keeps the root of the weights after that."""
    state = checkpoint.CheckpointState(1, 1, str(root), GROUPS, 0, ranks.updates_taken, "float64", 1)
    ranks.save(checkpoint.prepare(out, 1, 1))
    later = train(ranks, 7)["root"]
    ranks.wait_saved()
    checkpoint.complete(out, state)
    return {"later": later}


def together(comm: Comm, learner: Learner, act: Callable[[Ranks], dict[str, object]]) -> dict[str, object]:
    """What rank 0 does with all ranks; the others get nothing to keep."""
    if comm.rank:
        serve(comm, learner, Publisher(Kept()))
        return {}
    ranks = Ranks(comm, learner, Publisher(Kept()))
    found = act(ranks)
    ranks.stop()
    return found


def shards(learner: Learner, out: Path, rank: int) -> None:
    """This rank's own part of every tensor, as it is, beside the checkpoint: what the checkpoint is compared with."""
    local = {
        name: value.to_local().contiguous()
        for name, value in learner.state().items()
        if isinstance(value, DTensor)
    }
    save_file({name: value.clone() for name, value in local.items()}, out / f"rank-{rank}.safetensors")


def again(model: str, out: Path) -> None:
    """Load what another number of ranks wrote, and write it anew."""
    comm = connect(idle_poll_ms=5.0)
    learner = make_learner(model, join(comm))
    if comm.rank == 0:
        ranks = Ranks(comm, learner, Publisher(Kept()))
        path = checkpoint.found(out)[0]
        state = checkpoint.read_state(path)
        ranks.load(path, state.updates_taken)
        ranks.save(checkpoint.prepare(out / "again", 1, 1))
        ranks.wait_saved()
        checkpoint.complete(out / "again", state)
        ranks.stop()
    else:
        serve(comm, learner, Publisher(Kept()))
    disconnect()


def make_learner(model: str, mesh: DeviceMesh) -> Learner:
    return Learner(
        Path(model),
        mesh,
        recipe=resolve(AlgorithmSection(), 8),
        optimizer=OptimizerSection(lr=1e-3),
        temperature=1.0,
        deterministic=True,
    )


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
    found = []
    for seed in (5, 6):
        learner = make_learner(model, mesh)
        found.append(together(comm, learner, partial(train, seed=seed)))
    shards(learner, Path(out), comm.rank)
    later = together(comm, learner, partial(save, out=Path(out), root=found[-1].get("root")))
    packed = packed_step(comm, mesh, model, Path(out))
    disconnect()
    idle_cpu_s = idle(comm)
    if comm.rank == 0:
        kept = {"ranks": comm.size, "steps": found, "packed": packed, "idle_cpu_s": idle_cpu_s} | later
        (Path(out) / "found.json").write_text(json.dumps(kept))


if __name__ == "__main__":
    if sys.argv[3:] == ["again"]:
        again(sys.argv[1], Path(sys.argv[2]))
    else:
        main(*sys.argv[1:])
