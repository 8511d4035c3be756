"""docs/gpu.md: its table of what fits is what `scavenger init` and its `--check` work out.

python -m tests.test_gpu_page      # prints the table, to be put into the page
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scavenger.config.run import LoraSection
from scavenger.sizing import fit, phases
from scavenger.sizing.shape import ModelShape
from scavenger.sizing.training import GB, TrainJob
from tests.public_models import MODELS
from trainer.prepare import sizes

ROOT = Path(__file__).resolve().parents[1]
PROMPT, COMPLETION = 1024, 8192
GPUS = {"H100, A100 of 80 GB": 80.0, "H200 of 141 GB": 141.0}
#: Of one node, then whole nodes.
COUNTS = (1, 2, 4, 8, 16, 32, 64)
#: Those that do not fit one GPU whole.
WITH_ADAPTERS = ("8B", "14B", "32B", "30B-A3B")
#: Host memory of a node of eight GPUs; a part of a node has its part.
NODE_GB = 2000.0


def row(name: str, shape: ModelShape, gpu: str, gpu_gb: float, lora_rank: int = 0) -> str:
    """With the fewest GPUs that fit, a reserved engine on each. `lora_rank` 0: all weights are trained."""
    targets = LoraSection().targets
    for count in COUNTS:
        asked = sizes.SizingRequest(
            shape,
            "vllm",
            min(count, 8),
            max(1, count // 8),
            gpu_gb,
            PROMPT,
            COMPLETION,
            PROMPT + COMPLETION,
            512,
            NODE_GB / 8 * min(count, 8),
        )
        found = sizes.choose(asked)
        job = TrainJob(
            ranks=count,
            gpu_gb=gpu_gb,
            micro_tokens=found.micro_tokens,
            checkpointing=found.checkpointing,
            trained=shape.adapters(lora_rank, targets) if lora_rank else shape.parameters,
            lora_rank=lora_rank,
            targets=targets if lora_rank else (),
            reference=False,
            reserved=True,
            engine_share=found.share,
            engine_gpus=found.engine_gpus,
            reserved_gpus=found.reserved_gpus,
            reserved_workers=found.reserved,
            longest=PROMPT + COMPLETION,
            head_chunk=1024,
            per_node=min(count, 8),
        )
        if fit.problem(shape, job)[0]:
            continue
        asks = fit.need(shape, job)
        cells = [
            name,
            gpu,
            f"{count}",
            f"{asks.states:.1f}",
            f"{asks.step:.1f}, {found.micro_tokens:,} tokens{', recomputed' * found.checkpointing}",
            f"{phases.node_nbytes(shape, job) / GB:.0f}",
            f"{found.engine_gpus} x {found.share:.2f}",
            f"{found.reserved} of {found.reserved_gpus}",
            f"{found.max_batch}",
            f"{found.memory_mb / 1024:.0f} GiB, {found.cpus}",
        ]
        return f"| {' | '.join(cells)} |"
    return f"| {name} | {gpu} | more than {COUNTS[-1]} | | | | | | | |"


def table(lora_rank: int = 0) -> str:
    rows = (
        row(name, shape, gpu, gb, lora_rank)
        for name, shape in MODELS.items()
        for gpu, gb in GPUS.items()
        if not lora_rank or name in WITH_ADAPTERS
    )
    return "\n".join(rows)


@pytest.mark.parametrize("lora_rank", [0, 16])
def test_the_table_is_what_init_works_out(lora_rank: int) -> None:
    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    assert table(lora_rank) in page, "put in what this file prints"


if __name__ == "__main__":
    print(table(), table(16), sep="\n\n")
