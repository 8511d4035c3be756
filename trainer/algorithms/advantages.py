"""Advantages from rewards, and DAPO's length penalty. Pure functions; knows no model, batch or rank.

A function takes the groups of a scope and returns one `Advantages` a group. Scope "group": each group is computed from itself alone, so
a step may stream (I7). Scope "batch": all groups of the step are needed, in the order of their prompts, so training waits for the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

#: Below this standard deviation rewards are equal: they say nothing about which completion is better.
MIN_STD = 1e-6


@dataclass(frozen=True, slots=True)
class Advantages:
    """`values` [n] float64, 0 for unusable samples. `informative` is False when no sample is better than another.

    `of_turns`: where turns are rewarded, by the turn's number, as `values`; `values` is then of the whole rewards, and `informative` says
    whether a turn of any sample is better than another.
    """

    values: Tensor
    informative: bool
    reason: str
    of_turns: Mapping[int, Tensor] = field(default_factory=dict)


#: (rewards [n] float64, usable [n] bool) of one group each -> one `Advantages` a group.
Groups = Sequence[tuple[Tensor, Tensor]]
Scope = Callable[[Groups, bool], list[Advantages]]
#: Of each sample of a group: by the number of a turn, which part of the sample's reward it earned. Empty: its turns are not rewarded.
TurnRewards = Sequence[Mapping[int, float]]


def grpo(rewards: Tensor, usable: Tensor, scale: bool) -> Advantages:
    """GRPO (Shao et al., arXiv 2402.03300, §4.1.2): A_i = (r_i - mean(r)) / std(r), over the usable samples of one group.

    rewards: [n] float64; usable: [n] bool (False: gets 0 and does not count). `scale=False` leaves the division out (Dr. GRPO, Liu et al.,
    arXiv 2503.20783, eq. 3). std is the sample deviation (n - 1), as GRPO's authors use.
    """
    kept, deviation, why = _compared(rewards, usable)
    if why:
        return Advantages(torch.zeros_like(rewards, dtype=torch.float64), False, why)
    centred = kept - kept.mean()
    return _placed(centred / deviation if scale else centred, usable)


def leave_one_out(rewards: Tensor, usable: Tensor, scale: bool) -> Advantages:
    """RLOO (Ahmadian et al., arXiv 2402.14740, eq. 6): A_i = r_i - mean of the others' rewards. `scale` must be False."""
    if scale:
        raise ValueError("leave-one-out advantages are not divided by a deviation")
    kept, _, why = _compared(rewards, usable)
    if why:
        return Advantages(torch.zeros_like(rewards, dtype=torch.float64), False, why)
    count = len(kept)
    return _placed(kept - (kept.sum() - kept) / (count - 1), usable)


def batch_normalised(groups: Groups, scale: bool) -> list[Advantages]:
    """REINFORCE++ (Hu et al., arXiv 2501.03262, eq. 8): A_i = (r_i - mean(r)) / std(r) over all usable samples of the step."""
    return _over_batch(
        [rewards.to(torch.float64) for rewards, _ in groups], [usable for _, usable in groups], scale
    )


def batch_normalised_over_baseline(groups: Groups, scale: bool) -> list[Advantages]:
    """REINFORCE++-baseline (Hu et al., arXiv 2501.03262, §"w/ baseline"): minus the group's mean, then normalised over the batch."""
    centred = []
    for rewards, usable in groups:
        kept = rewards[usable].to(torch.float64)
        centred.append(rewards.to(torch.float64) - (kept.mean() if len(kept) else 0.0))
    return _over_batch(centred, [usable for _, usable in groups], scale)


def each(function: Callable[[Tensor, Tensor, bool], Advantages]) -> Scope:
    """Scope "group": every group by itself."""
    return lambda groups, scale: [function(rewards, usable, scale) for rewards, usable in groups]


def to_go(rewards: Tensor, turns: TurnRewards, number: int) -> Tensor:
    """What each sample earned from this turn on: its whole reward less what its turns before earned. [n] float64

    Turns' rewards are parts of a sample's reward r; what they leave of it is the outcome's, and is earned after the last turn. So this is
    the reward-to-go G_k = sum of the rewards of turns j >= k + the outcome's, without discount (Sutton & Barto, *Reinforcement Learning*,
    2nd ed., eq. 3.8 and §13.3). Of a sample that ended before turn k it is the outcome's part.
    """
    before = [math.fsum(reward for turn, reward in one.items() if turn < number) for one in turns]
    return rewards.to(torch.float64) - torch.tensor(before, dtype=torch.float64)


def with_turns(scope: Scope, groups: Groups, turns: Sequence[TurnRewards], scale: bool) -> list[Advantages]:
    """`scope`'s advantages, and where turns are rewarded those of each turn: the same function of what was earned from turn k on.

    So a turn is compared with the turns of its number in the other samples of the scope, as in turn-group normalisation (A^2TGPO, Chen et
    al., arXiv 2605.06200: "each (prompt, turn-index) group"). What it is compared with depends on the prompt and the turn's number, never
    on what was said in it: a baseline (Sutton & Barto, §13.4). Samples that ended before are among them, so each turn has as many to
    compare with. Two identities follow: a first turn has the advantage of the whole reward; and where all turns earn 0, every turn has.
    """
    found = scope(groups, scale)
    if not any(one for group in turns for one in group):
        return found
    for number in sorted({number for group in turns for one in group for number in one}):
        from_here = [
            (to_go(rewards, of_group, number), usable)
            for (rewards, usable), of_group in zip(groups, turns, strict=True)
        ]
        there = scope(from_here, scale)
        found = [
            _joined(one, number, at) if any(number in of_sample for of_sample in of_group) else one
            for one, at, of_group in zip(found, there, turns, strict=True)
        ]
    return found


def _joined(one: Advantages, number: int, at: Advantages) -> Advantages:
    informative = one.informative or at.informative
    reason = one.reason if one.informative == informative else at.reason
    return replace(one, informative=informative, reason=reason, of_turns={**one.of_turns, number: at.values})


def _compared(rewards: Tensor, usable: Tensor) -> tuple[Tensor, float, str]:
    """Usable rewards of a group, their deviation, and why they compare nothing ("" = they do)."""
    kept = rewards[usable].to(torch.float64)
    if len(kept) < 2:
        return kept, 0.0, f"{len(kept)} usable sample(s): nothing to compare"
    deviation = float(kept.std(unbiased=True))
    return (
        kept,
        deviation,
        f"zero variance: every reward is {float(kept[0]):g}" if not deviation >= MIN_STD else "",
    )


def _placed(found: Tensor, usable: Tensor) -> Advantages:
    values = torch.zeros(len(usable), dtype=torch.float64)
    values[usable] = found
    return Advantages(values, True, "informative")


def _over_batch(values: Sequence[Tensor], usable: Sequence[Tensor], scale: bool) -> list[Advantages]:
    """Normalise over the batch. The values are sorted before they are summed, so that no order of groups shows in the last bit."""
    kept = torch.cat([value[mask] for value, mask in zip(values, usable, strict=True)]).sort().values
    deviation = float(kept.std(unbiased=True)) if len(kept) > 1 else 0.0
    if not deviation >= MIN_STD:
        why = f"zero variance over the batch of {len(kept)} usable sample(s)"
        return [Advantages(torch.zeros_like(value), False, why) for value in values]
    mean = kept.mean()
    return [
        _placed((value[mask] - mean) / (deviation if scale else 1.0), mask)
        for value, mask in zip(values, usable, strict=True)
    ]


def overlong_penalty(length: int, max_tokens: int, buffer_tokens: int) -> float:
    """DAPO's soft overlong punishment (Yu et al., arXiv 2503.14476, eq. 13), which is added to the reward.

    0 up to `max_tokens - buffer_tokens`, then falling linearly to -1 at `max_tokens`.
    """
    start = max_tokens - buffer_tokens
    if length <= start:
        return 0.0
    return max(-1.0, (start - length) / buffer_tokens)
