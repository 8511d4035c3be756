"""Whether ranks can share the tokens of a model's samples (`trainer.context_parallel`) and cut its layers (`trainer.tensor_parallel`), and
samples their prefixes (`trainer.share_prefixes`). The code that the run itself uses is asked.

Importing it takes seconds (torch, transformers); `check` does so only where that is wished.
Boundary: one question about a model's folder.
"""

from __future__ import annotations

import torch

from scavenger.config import RunConfig
from trainer.model import attention, context, sharded_load, tensor_parallel
from trainer.model.attention import PACKED


def check_model(config: RunConfig) -> None:
    """Raises `ConfigError` where they cannot. Reads heads of files only."""
    model, _ = sharded_load.begin(config.model.path, torch.bfloat16, PACKED)
    trainer = config.trainer
    if trainer.tensor_parallel > 1:
        tensor_parallel.check_model(model, trainer.tensor_parallel)
    if trainer.context_parallel > 1:
        context.check_model(model, trainer.context_parallel, trainer.tensor_parallel)
    if trainer.share_prefixes and not config.run.deterministic:
        attention.check_model(model)
