"""Whether the training job's ranks can be divided as `[trainer]` says, and whether the model allows it. Starts nothing.

Owns the check of `trainer.replicas` and `trainer.context_parallel`; each question is asked of the code that the run itself uses.
Boundary: the check of how ranks are divided.
"""

from __future__ import annotations

from scavenger.config import RunConfig
from trainer.model.mesh import divide


def check(config: RunConfig, ranks: int) -> str:
    """`ranks`: of the training job, 0 = not known. Raises `ConfigError`."""
    context = config.trainer.context_parallel
    if context > 1:
        import torch  # seconds of imports: only where ranks share samples

        from trainer.model import context as contexts
        from trainer.model import sharded_load
        from trainer.model.attention import PACKED

        model, _ = sharded_load.begin(config.model.path, torch.bfloat16, PACKED)
        contexts.check_model(model, context)
    if not ranks:
        return "train.sbatch does not say how many: not looked at"
    return str(divide(ranks, config.trainer))
