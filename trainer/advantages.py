"""Advantages of the samples of one group. Pure functions over tensors; knows no model, batch or rank.

Scope is the group: nothing here needs another group, so a step may stream (I7).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Below this standard deviation the rewards of a group are equal: they say nothing about which answer is better.
MIN_STD = 1e-6


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """`values` [n] float64, 0 for masked samples. `informative` is False when no sample of the group is better than another."""

    values: Tensor
    informative: bool
    reason: str


def group_normalised(rewards: Tensor, usable: Tensor, *, scale_by_std: bool) -> GroupAdvantages:
    """GRPO (Shao et al., arXiv 2402.03300, §4.1.2): A_i = (r_i - mean(r)) / std(r), over the usable samples of one group.

    rewards: [n] float64; usable: [n] bool (False: masked, gets 0 and does not count). `scale_by_std=False` leaves the division
    out (Dr. GRPO, Liu et al., arXiv 2503.20783, eq. 3). std is the sample deviation (n - 1), as GRPO's authors use.
    """
    values = torch.zeros_like(rewards, dtype=torch.float64)
    count = int(usable.sum())
    if count < 2:
        return GroupAdvantages(values, False, f"{count} usable sample(s): nothing to compare")
    kept = rewards[usable].to(torch.float64)
    deviation = float(kept.std(unbiased=True))
    if deviation < MIN_STD:
        return GroupAdvantages(values, False, f"zero variance: every reward is {float(kept[0]):g}")
    centred = kept - kept.mean()
    values[usable] = centred / deviation if scale_by_std else centred
    return GroupAdvantages(values, True, "informative")
