"""How a token is drawn: the sample's own random numbers, the sampling distribution, the inverse CDF.

Owns the definition of a draw. Pure: nothing here depends on time, on the batch or on a generator's state.

Boundary: the definition of a draw; pure.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from scavenger.protocol.messages import SampleKey, Sampling

_DRAW_PERSON = b"scavenger-draw-1"  # names this construction; another one must use another name


class Draws:
    """The random numbers of one sample. `uniform(p)` is in [0, 1), has 53 bits and depends on (seed, key, p) alone."""

    __slots__ = ("_prefix",)

    def __init__(self, seed: int, key: SampleKey) -> None:
        purpose = key.purpose.encode()
        # Length-prefixed text and fixed-width integers: two different keys never encode to the same bytes.
        fields = struct.pack(">qqqq", seed, key.step, key.prompt, key.index)
        self._prefix = blake2b(
            struct.pack(">I", len(purpose)) + purpose + fields, digest_size=8, person=_DRAW_PERSON
        )

    def uniform(self, position: int) -> float:
        """The number for the sample's completion token at `position` (0 = first)."""
        state = self._prefix.copy()
        state.update(struct.pack(">q", position))
        return (int.from_bytes(state.digest(), "big") >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token a row. `bad[i]` marks a row whose logits have no distribution (NaN, +inf, nothing allowed)."""

    tokens: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    bad: list[bool]


def sampling_logprobs(logits: Tensor, sampling: Sequence[Sampling]) -> Tensor:
    """Log of the sampling distribution: `[n, vocab]` float64 from float64 logits, in the order temperature, top-k, top-p.

    Rows with temperature 0 are the distribution that is certain of the arg max (the smallest id among equals), and so are those whose
    temperature is so near 0 that no logit divided by it is a number.
    """
    device = logits.device
    temperature = torch.tensor(
        [s.temperature if s.temperature > 0 else 1.0 for s in sampling], dtype=torch.float64, device=device
    )
    scaled = logits / temperature[:, None]
    overflows = (~torch.isfinite(scaled.amax(-1))).tolist()
    for i, how in enumerate(sampling):
        if how.temperature == 0 or overflows[i]:
            certain = torch.full_like(scaled[i], -torch.inf)
            certain[int(logits[i].argmax())] = 0.0
            scaled[i] = certain
        elif how.top_k > 0 or how.top_p < 1:
            scaled[i] = _truncate(scaled[i], how)
    return torch.log_softmax(scaled, dim=-1)


def _truncate(scaled: Tensor, how: Sampling) -> Tensor:
    """Keep the `top_k` likeliest tokens, then the fewest of these whose mass reaches `top_p`; ties go to smaller ids."""
    ordered, order = torch.sort(scaled, descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if how.top_k > 0:
        keep[how.top_k :] = False
    if how.top_p < 1:
        mass = torch.softmax(ordered.masked_fill(~keep, -torch.inf), dim=-1)
        keep &= mass.cumsum(-1) - mass < how.top_p
    keep[0] = True
    allowed = torch.empty_like(keep)
    allowed[order] = keep
    return scaled.masked_fill(~allowed, -torch.inf)


def draw(
    logits: Tensor, sampling: Sequence[Sampling], uniforms: Sequence[float], positions: Sequence[int]
) -> SampledTokens:
    """Draw one token a row from `[n, vocab]` logits: the first id, in id order, at which the CDF passes the uniform.

    `positions`: how many tokens each row's sample has already; below `min_tokens` no stop token is drawn.
    """
    wide = logits.double()
    # Finite exactly when no logit is NaN or +inf and at least one is finite.
    bad = ~torch.isfinite(torch.logsumexp(wide, dim=-1))
    wide = torch.where(bad[:, None], torch.zeros_like(wide), wide)
    raw = torch.log_softmax(wide, dim=-1)
    # The common case (temperature 1, nothing truncated) needs no second pass.
    held_off = [i for i, s in enumerate(sampling) if positions[i] < s.min_tokens and s.stop_token_ids]
    plain = not held_off and all(s.temperature == 1 and s.top_k == 0 and s.top_p == 1 for s in sampling)
    if held_off:
        wide = wide.clone()
        for i in held_off:
            wide[i, list(sampling[i].stop_token_ids)] = -torch.inf
    used = raw if plain else sampling_logprobs(wide, sampling)
    mass = used.exp()
    cdf = mass.cumsum(-1)
    target = torch.tensor(uniforms, dtype=torch.float64, device=wide.device)[:, None] * cdf[:, -1:]
    chosen = torch.searchsorted(cdf, target, right=True)
    # target may round up to the whole mass: the last token that has any is then meant.
    last = wide.shape[-1] - 1 - (mass.flip(-1) > 0).to(torch.int8).argmax(-1, keepdim=True)
    chosen = torch.minimum(chosen, last)
    return SampledTokens(
        chosen[:, 0].tolist(),
        used.gather(1, chosen)[:, 0].tolist(),
        raw.gather(1, chosen)[:, 0].tolist(),
        bad.tolist(),
    )
