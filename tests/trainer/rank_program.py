"""One MPI rank of a test: `mpirun -n N python rank_program.py MODEL OUT MODE`. Rank 0 trains made-up groups, or idles.

MODE `train:SEED`: six groups in an order that the seed shuffles, deterministic; OUT gets the norm, the loss parts and the weights' root.
MODE `idle`: rank 0 says nothing for two seconds; OUT gets the CPU seconds that rank 1 used meanwhile.
MODE `resume:DIR`: train as SEED 0, save to DIR with all ranks.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import msgspec

from scavenger.config import AlgorithmSection, OptimizerSection
from tests.trainer.rows import make_group
from trainer import checkpoint
from trainer.batching import one_per_group, rounds
from trainer.comm import Comm, connect, join, leave
from trainer.model import Learner
from trainer.ranks import Ranks, serve

GROUPS, WIDTH = 6, 15


def train(ranks: Ranks, seed: int) -> dict[str, object]:
    groups = [make_group(number) for number in range(GROUPS)]
    random.Random(seed).shuffle(groups)
    stats = [one for micros in rounds(one_per_group(groups, width=WIDTH), ranks.size) for one in ranks.train(micros)]
    norm = ranks.update(sum(one.tokens for one in stats), 1e-3)
    manifest, _ = ranks.build_version(1, "float64")
    parts = [msgspec.to_builtins(one) for one in sorted(stats, key=lambda one: one.sample_id)]
    return {"norm": norm, "root": manifest.root.hex(), "stats": parts}


def lead(comm: Comm, learner: Learner, mode: str) -> dict[str, object]:
    ranks = Ranks(comm, learner)
    kind, _, value = mode.partition(":")
    found: dict[str, object] = {}
    if kind == "train":
        found = train(ranks, int(value))
    elif kind == "resume":
        found = train(ranks, 0)
        out = Path(value)
        ranks.save(checkpoint.prepare(out, 1))
        state = checkpoint.State(1, 1, str(found["root"]), GROUPS, 0, ranks.updates_taken, "float64")
        checkpoint.complete(out, state, keep=2)
    ranks.stop()
    return found


def idle(comm: Comm, out: Path) -> None:
    """Only rank 1's own clock counts: everything it does between two frames is waiting."""
    if comm.rank == 0:
        comm.send([b"start"] * comm.size)
        time.sleep(2.0)
        comm.send([b"stop"] * comm.size)
        (used,) = comm.replies()
        out.write_text(json.dumps({"cpu_s": float(used)}))
        return
    comm.receive()
    before = time.process_time()
    comm.receive()
    comm.reply(str(time.process_time() - before).encode())


def main(model: str, out: str, mode: str) -> None:
    comm = connect(idle_poll_ms=5.0)
    if mode == "idle":
        idle(comm, Path(out))
        return
    learner = Learner(
        Path(model), join(comm), algorithm=AlgorithmSection(), optimizer=OptimizerSection(lr=1e-3), temperature=1.0, deterministic=True
    )
    if comm.rank == 0:
        Path(out).write_text(json.dumps({"ranks": comm.size} | lead(comm, learner, mode)))
    else:
        serve(comm, learner)
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
