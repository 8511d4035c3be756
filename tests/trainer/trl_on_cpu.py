"""`examples/trl_async_grpo.py` where there is no GPU. Two things stand for one: its name, which TRL's trainer asks for, and its kernel.

TRL 1.16 attends over packed rows by FlashAttention 3 and nothing else. It registers that with transformers under a name of its own; here
the same attention is registered in torch. TRL is as it was installed.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))


#: How long TRL's rollout worker may take to import vLLM (s); TRL's own 300 is too few for a machine that is busy with other tests.
START_S = 1500


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Each segment of the row over the keys of its path, causal. query: [1, heads, tokens, size]; returns [1, tokens, heads, size]."""
    queries, keys, found = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist(), []
    for q, q_end, k, k_end in zip(queries, queries[1:], keys, keys[1:], strict=False):
        path = tree_kv_index[k:k_end]
        seen = torch.ones(q_end - q, len(path), dtype=torch.bool).tril(len(path) - (q_end - q))
        found.append(
            scaled_dot_product_attention(
                query[:, :, q:q_end],
                key[:, :, path],
                value[:, :, path],
                attn_mask=seen,
                scale=scaling,
                enable_gqa=True,
            )
        )
    return torch.cat(found, 2).transpose(1, 2), None


def main() -> None:
    from transformers import AttentionInterface
    from trl.experimental.async_grpo.packing import TREE_ATTENTION

    from scavenger.config import read_run

    trl_async_grpo = importlib.import_module("trl_async_grpo")  # of examples/, which is no package

    torch.cuda.get_device_name = lambda device=None: "cpu"
    config = read_run(Path(sys.argv[1]))
    with trl_async_grpo.Fleet(config) as fleet:
        trainer = trl_async_grpo.make_trainer(config, fleet)
        AttentionInterface.register(TREE_ATTENTION, attend)
        trainer.rollout_worker._child_ready_timeout = START_S
        trainer.train()


if __name__ == "__main__":
    main()
