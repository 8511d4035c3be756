"""What a rank takes of its GPU while it trains: `python memory_program.py OUT NAME...`, by the account, in the tests' cases.

The trainer's own learner, rank 0 of so many: torch's "fake" process group takes part in no communication, so one process has exactly the
tensors that a rank of that many has (their values mean nothing, and nothing looks at them). Leaves {case: {phase: bytes}} in OUT.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from rollout.engines.account import Row
from scavenger.config import AlgorithmSection, LoraSection, OptimizerSection, TrainerSection
from scavenger.protocol import messages
from tests.trainer.memory_cases import CASES, Case
from trainer.algorithms.rows import resolve
from trainer.data.batching import Micro, TrainRow
from trainer.model.learner import Learner
from trainer.model.memory import RankGpu

PROMPT = 8


@dataclass
class Counted:
    """The account of a GPU of any size, which remembers the most that was held at once."""

    rows: dict[str, int] = field(default_factory=dict)
    most: int = 0
    counts: bool = True
    capacity: int = 1 << 50

    def take(self, purpose: str, nbytes: int) -> None:
        self.hold(purpose, self.rows.get(purpose, 0) + nbytes)

    def give(self, purpose: str, nbytes: int) -> None:
        self.take(purpose, -nbytes)

    def hold(self, purpose: str, nbytes: int) -> None:
        self.rows[purpose] = nbytes
        self.most = max(self.most, self.own())

    def alone(self) -> None: ...

    def own(self) -> int:
        return sum(self.rows.values())

    def of_other_processes(self) -> int:
        return 0

    def table(self) -> tuple[Row, ...]:
        return ()

    def reset(self) -> None:
        self.most = self.own()


class Unchecked(Learner):
    def _check_packing(self) -> None: ...


def write_model(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))


def micro(case: Case) -> Micro:
    """All rows together have the case's tokens for each rank that shares them."""
    all_tokens = case.tokens * case.context
    rows = []
    for number in range(case.rows):
        answer = all_tokens // case.rows - PROMPT
        tokens = messages.pack_tokens([3 + place % 11 for place in range(PROMPT + answer)])
        logprobs = messages.pack_logprobs([-2.0] * answer)
        rows.append(TrainRow(number, tokens[: 4 * PROMPT], tokens[4 * PROMPT :], logprobs, 0.5))
    return Micro(tuple(rows), all_tokens // case.rows if case.padded else 0)


def measured(case: Case) -> dict[str, int]:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.ranks)
    mesh, gpu = init_device_mesh("cpu", (case.ranks,), mesh_dim_names=("data",)), Counted()
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), case.config)
        # Ranks that share a sample compare their logprobs at the start, which no fake group can.
        kind = Learner if case.context == 1 else Unchecked
        learner = kind(
            Path(name),
            mesh,
            recipe=resolve(AlgorithmSection(kl_coef=0.1 if case.reference else 0.0), 8),
            optimizer=OptimizerSection(lr=1e-3),
            temperature=1.0,
            deterministic=case.exact,
            trainer=TrainerSection(
                offload="always",
                compute_dtype="bfloat16" if case.compute == 2 else "float32",
                activation_checkpointing=case.recompute,
                head_chunk_tokens=case.head_chunk,
                packing=not case.padded,
                tensor_parallel=case.tensor,
                replicas=case.replicas,
                context_parallel=case.context,
            ),
            lora=LoraSection(rank=case.lora_rank, targets=case.targets) if case.lora_rank else LoraSection(),
            gpu=RankGpu(gpu),
        )
    found = {"load": gpu.own()}
    found["generate"] = learner.release()
    learner.take_back()
    found["to_training"] = gpu.own()
    learner.train(micro(case))
    learner.release()  # what torch keeps for reuse is given back, and the gradients go and come too
    found["generate"] = max(found["generate"], gpu.own())
    learner.take_back()
    gpu.reset()
    learner.train(micro(case))
    found["step"] = gpu.most
    learner.release()
    learner.take_back()
    gpu.reset()
    learner.update(8.0, 1e-3)
    found["optimizer"] = gpu.most
    return found


def main(argv: list[str]) -> None:
    disable_progress_bar()
    out, *names = argv
    Path(out).write_text(json.dumps({name: measured(CASES[name]) for name in names}))


if __name__ == "__main__":
    main(sys.argv[1:])
