"""Estimators of KL(current || reference) from sampled tokens (Schulman 2020, "Approximating KL divergence"). Pure, over flat tensors.

All are unbiased or nearly so as *values*. As losses they differ (Tang & Munos, arXiv 2506.09477): differentiated through `current`,
k2 has the KL's own gradient, k3 that of the reverse direction to second order, and k1 a gradient whose mean is zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def k1(current: Tensor, reference: Tensor) -> Tensor:
    """current - reference: unbiased, of either sign."""
    return current - reference


def k2(current: Tensor, reference: Tensor) -> Tensor:
    """(current - reference)^2 / 2: biased, >= 0; its gradient is the KL's."""
    return 0.5 * (current - reference) ** 2


def k3(current: Tensor, reference: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = reference - current: unbiased, >= 0. GRPO's (arXiv 2402.03300, eq. 4)."""
    difference = reference - current
    return torch.exp(difference) - difference - 1.0


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
