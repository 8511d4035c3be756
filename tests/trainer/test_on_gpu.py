"""What only a GPU shows of the learner: its kernels and its copies give what the CPU gives. Skipped without one; tiny sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from rollout.engines import lora
from scavenger.config import AlgorithmSection, OptimizerSection, TrainerSection
from tests.trainer.rows import make_group
from trainer.algorithms.rows import resolve
from trainer.data.batching import pack
from trainer.model import attention
from trainer.model.learner import Learner
from trainer.model.offload import nbytes_of

pytestmark = pytest.mark.gpu


def test_merged_weights_have_the_same_bits_on_the_gpu() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(300, 200, generator=generator).bfloat16()
    down, up = torch.randn(16, 200, generator=generator), torch.randn(300, 16, generator=generator)
    on_gpu = lora.merged(base.cuda(), down.cuda(), up.cuda(), 2.0)
    assert torch.equal(on_gpu.cpu(), lora.merged(base, down, up, 2.0))


def test_packed_samples_do_not_see_one_another_in_the_gpu_s_kernel() -> None:
    lengths = [5, 64, 17]
    generator = torch.Generator("cuda").manual_seed(0)
    heads: list[Any] = [
        torch.randn(1, count, sum(lengths), 64, generator=generator, device="cuda", dtype=torch.bfloat16)
        for count in (4, 2, 2)
    ]
    borders = torch.tensor([0, 5, 69, 86], dtype=torch.int32, device="cuda")
    attend: Any = attention.packed_attention
    together, _ = attend(
        torch.nn.Identity(), *heads, None, scaling=0.125, **attention.borders_of(borders, max(lengths))
    )
    for start, stop in zip(borders.tolist(), borders.tolist()[1:], strict=False):
        query, key, value = (part[:, :, start:stop].float().cpu() for part in heads)
        alone = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=0.125, enable_gqa=True
        )
        torch.testing.assert_close(
            together[:, start:stop].float().cpu(), alone.transpose(1, 2), rtol=2e-2, atol=2e-2
        )


def test_state_that_was_away_gives_the_same_steps_and_leaves_the_gpu(
    model_folder: Path, mesh: DeviceMesh
) -> None:
    """The same bits: what returns from pinned memory is there before a kernel reads it."""

    def steps(mode: str) -> list[float]:
        rank = Learner(
            model_folder,
            mesh,
            recipe=resolve(AlgorithmSection(), 8),
            optimizer=OptimizerSection(lr=1e-3),
            temperature=1.0,
            deterministic=True,
            trainer=TrainerSection(offload=mode),  # type: ignore[arg-type]
        )
        norms = []
        for step in range(3):
            for micro in pack([make_group(4 * step + n) for n in range(4)], budget=60):
                rank.train(micro)
                rank.release()
                assert (nbytes_of(rank.model.parameters()) == 0) == (mode == "always")
            norms.append(rank.update(100.0, 1e-3))
        return norms

    assert steps("always") == steps("never")
