"""Whether ranks can share the tokens of a model's samples (`trainer.context_parallel`), asked of the code that the run itself uses.

Importing it takes seconds (torch, transformers); `check` does so only where that is wished.
Boundary: one question about a model's folder.
"""

from __future__ import annotations

import torch

from scavenger.config import RunConfig
from trainer.model import context, sharded_load
from trainer.model.attention import PACKED


def check_model(config: RunConfig) -> None:
    """Raises `ConfigError` where they cannot. Reads heads of files only."""
    model, _ = sharded_load.begin(config.model.path, torch.bfloat16, PACKED)
    context.check_model(model, config.trainer.context_parallel)
