"""One MPI rank of a test: `mpirun -n N python offload_program.py MODEL OUT`.

Trains all weights, then adapters, with training state that stays and with such that goes away. Ends with status 0 where both are the same
bit by bit, checkpoints too.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from rollout.engines import account
from rollout.engines.account import Shared
from scavenger.config import AlgorithmSection, LoraSection, OptimizerSection, TrainerSection
from tests.trainer.rows import make_group
from trainer.algorithms.rows import resolve
from trainer.checkpoint.saving import Saver
from trainer.data.batching import balanced
from trainer.loop.comm import connect, disconnect, join
from trainer.model.learner import Learner
from trainer.model.memory import RankGpu
from trainer.model.sharding import local_of


def main(model: str, out: str) -> None:
    comm = connect(5.0)
    mesh, folder = join(comm), Path(out)
    rank = comm.rank
    gpu = Shared(account.create(folder / f"gpu-{rank}", 10**9), rank, f"rank {rank}")
    saver = Saver()
    for kind, lora in {"all": LoraSection(), "lora": LoraSection(rank=2, alpha=4.0)}.items():
        found = {}
        for mode in ("never", "always"):
            learner = Learner(
                Path(model),
                mesh,
                recipe=resolve(AlgorithmSection(), 8),
                optimizer=OptimizerSection(lr=1e-3, weight_decay=0.1),
                temperature=0.7,
                deterministic=False,
                trainer=TrainerSection(offload=mode),  # type: ignore[arg-type]
                lora=lora,
                gpu=RankGpu(gpu),
            )
            said: list[object] = []
            for step in range(3):
                held = learner.release()
                learner.take_back()
                for micros in balanced(
                    [make_group(6 * step + n) for n in range(6)], budget=60, ranks=comm.size
                ):
                    said.append(learner.train(micros[rank]))
                    learner.release()
                    learner.take_back()
                said.append(learner.update(8.0, 1e-3))
            assert (held == 0) is (mode == "always"), (kind, mode, held)
            learner.release()
            path = folder / f"{kind}-{mode}"
            path.mkdir(exist_ok=True)
            saver.begin(learner.state(), path)
            saver.wait()
            learner.state_to_load()
            found[mode] = (said, {name: local_of(value).clone() for name, value in learner.state().items()})
            assert all(isinstance(value, DTensor) for value in learner.state().values())
        (said, stayed), (again, went) = found["never"], found["always"]
        assert said == again, kind
        assert all(torch.equal(stayed[name], went[name]) for name in stayed), kind
        files = [
            {
                (file.name, key): value
                for file in (folder / f"{kind}-{mode}").glob("*.safetensors")
                for key, value in load_file(file).items()
            }
            for mode in found
        ]
        assert files[0].keys() == files[1].keys() != set()
        assert all(torch.equal(value, files[1][name]) for name, value in files[0].items()), kind
    disconnect()


if __name__ == "__main__":
    main(*sys.argv[1:])
