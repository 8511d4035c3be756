"""How the trainer's logprobs agree with those of each engine that took part in a sample: sums over its tokens, for the daemon to compare.

d = proximal - behaviour, in nats, detached. What follows from the sums is the daemon's to say (`scavenger.policy.agreement`). Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from scavenger.protocol.messages import SpanSums
from trainer.algorithms.surrogates import per_sample
from trainer.data.batching import Micro, TrainRow

#: (tokens, sum of d, of |d|, of exp(d) - d - 1) of one span.
SpanAgreement = tuple[int, float, float, float]
#: What a message may say of one span at most; a logprob of -inf would be beyond.
MOST = 1e9


def by_span(difference: Tensor, cuts: Sequence[int]) -> list[SpanAgreement]:
    """Of consecutive spans of `cuts` tokens. `difference` = d: [N], N the sum of `cuts`."""
    lengths = torch.tensor(cuts, dtype=torch.int64)
    span = torch.repeat_interleave(torch.arange(len(cuts)), lengths).to(difference.device)
    values = difference.detach().to(torch.float64)
    parts = (values, values.abs(), torch.exp(values) - values - 1.0)
    sums = torch.stack([per_sample(part, span, len(cuts)) for part in parts], dim=1).tolist()
    return [(tokens, *of_span) for tokens, of_span in zip(cuts, sums, strict=True)]


def of_micro(micro: Micro, difference: Tensor) -> dict[int, tuple[SpanAgreement, ...]]:
    """By sample id, of each of a row's `cuts`. `difference`: d of all trained tokens, row by row."""
    cuts = [row.cuts or (row.trained,) for row in micro.rows]
    sums = iter(by_span(difference, [cut for of_row in cuts for cut in of_row]))
    taken = [tuple(next(sums) for _ in of_row) for of_row in cuts]
    return {row.sample_id: found if row.cuts else () for row, found in zip(micro.rows, taken, strict=True)}


def of_row(row: TrainRow) -> tuple[SpanAgreement, ...]:
    """Of a row whose proximal logprobs were computed."""
    if not row.cuts:
        return ()
    proximal = torch.frombuffer(bytearray(row.proximal), dtype=torch.float64)
    behaviour = torch.frombuffer(bytearray(row.behaviour), dtype=torch.float32)
    return tuple(by_span(proximal - behaviour, row.cuts))


def report(
    found: Mapping[int, Sequence[SpanAgreement]], workers: Mapping[int, Sequence[tuple[int, int]]]
) -> list[SpanSums]:
    """What the daemon is told. `found`: by sample; `workers`: (worker, tokens) of each span of it. Sums that are no numbers are left out:
    where they come from the trainer, its gradients are none either.
    """
    spans = []
    for sample_id in sorted(found):
        for (worker_id, _), (tokens, signed, absolute, k3) in zip(
            workers[sample_id] if found[sample_id] else (), found[sample_id], strict=True
        ):
            if tokens and math.isfinite(signed):
                spans.append(
                    SpanSums(
                        sample_id,
                        worker_id,
                        tokens,
                        min(max(signed, -MOST), MOST),
                        min(absolute, MOST),
                        min(max(k3, 0.0), MOST),
                    )
                )
    return spans
