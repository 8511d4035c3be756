"""RMSNorm in the model's own dtype, for the engine and the trainer alike: they agree on logits only while they compute one function.

Owns that one replacement. Imports nothing of ours, so that the trainer may share it without knowing an engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


def wide_norms(model: nn.Module) -> None:
    """Let every RMSNorm compute in the model's own dtype: transformers' rounds through float32, which would throw float64 away."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.forward = _wide(module)


def _wide(norm: Any) -> Callable[[Tensor], Tensor]:
    return lambda hidden: F.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)
