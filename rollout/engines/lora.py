"""The arithmetic of low-rank adapters (LoRA, Hu et al., arXiv 2106.09685): W = W0 + scale * B A. Trainer and engines compute it alike.

Owns the rounding: equal inputs give equal bits on every machine, in whatever order its BLAS sums, with or without fused multiply-add, by
rows or whole. A GPU and a CPU that sum in plain float64 differ in last bits, and of 7e9 weights some of those would outlive the rounding;
a checksum of merged weights that trainer and engines compare can do without them. So both factors are cut into slices of so few bits that
every product of two slices is exact in float64, sums of `rank` numbers included (Ozaki et al., Numerical Algorithms 59, 2012): an element
is an integer times a power of two that belongs to B's row or A's column. What is left out is 2^-45 of the largest product for float32
factors (two slices), 2^-68 for float64 (three). The product is rounded once to the adapters' own type, in which W0 is added; what the
caller stores is rounded once more. Must know nothing but torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

MANTISSA = 53  # bits of float64
_SLICES = {torch.float32: 2, torch.float64: 3}
_VALUES = {"cpu": 1 << 18}  # merged at a time: temporaries that stay in a core's cache
_MANY = 1 << 24  # elsewhere: enough to keep a GPU busy


def merged(base: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """W0 [out, in] with A [rank, in] and B [out, rank], in the adapters' dtype: float32 or float64. Rows of W0 and B may come alone."""
    slices, bits = _SLICES[down.dtype], (MANTISSA - (down.shape[0] - 1).bit_length()) // 2
    left, right = _cut(up.double(), 1, bits, slices), _cut(down.double(), 0, bits, slices)
    found = torch.empty(base.shape, dtype=down.dtype, device=base.device)
    together = max(1, _VALUES.get(base.device.type, _MANY) // max(1, base.shape[1]))
    for start in range(0, base.shape[0], together):
        rows = slice(start, start + together)
        change = _product([part[rows] for part in left], right).mul_(scale)
        torch.add(base[rows].to(down.dtype), change.to(down.dtype), out=found[rows])
    return found


def _product(left: list[Tensor], right: list[Tensor]) -> Tensor:
    """Of what was cut: each matrix product is exact; they are added in one order, the smallest first."""
    slices = len(left)
    pairs = sorted(
        ((i, j) for i in range(slices) for j in range(slices - i)), key=lambda pair: (-sum(pair), pair)
    )
    first, *rest = (left[i] @ right[j] for i, j in pairs)
    for other in rest:
        first += other
    return first


def _cut(whole: Tensor, dim: int, bits: int, slices: int) -> list[Tensor]:
    """Tensors that add up to `whole`, or nearly; of each, every element is an integer of `bits` bits times one power of two along `dim`."""
    parts = []
    for _ in range(slices):
        largest = whole.abs().amax(dim, keepdim=True)
        power = torch.where(
            largest > 0, largest / torch.frexp(largest).mantissa, 1.0
        )  # the division is exact: 2^exponent
        unit = power * 2.0**-bits
        parts.append(torch.round(whole / unit) * unit)
        whole = whole - parts[-1]
    return parts
