"""The arithmetic of low-rank adapters (LoRA, Hu et al., arXiv 2106.09685): W = W0 + scale * B A. Trainer and engines compute it alike.

Owns the rounding. B A is summed in float64 and rounded once to the adapters' own type, in which W0 is added; what the caller stores is
rounded once more. What order a machine's BLAS sums in, and whether it fuses, lies some 29 bits below the first rounding of float32: so
numbers of threads and cuts of rows change nothing. Must know nothing but torch.
"""

from __future__ import annotations

from torch import Tensor


def merged(base: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """W0 [out, in] with A [rank, in] and B [out, rank], in the adapters' dtype."""
    change = (up.double() @ down.double()).mul_(scale)
    return base.to(down.dtype) + change.to(down.dtype)
