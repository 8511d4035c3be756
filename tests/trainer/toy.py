"""A policy of one table (the next token's logits given the last token), and ranks that train it: the stepper's whole way without a network.

`ToyRanks` stands in for `trainer.loop.ranks.Ranks`: each rank, or group of `context`, sums the gradients of its own micro-batches,
and the sums are added at the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from trainer.algorithms import differences
from trainer.algorithms.agreement import of_micro
from trainer.algorithms.loss import Tokens, policy_loss, token_logprobs
from trainer.algorithms.rows import Recipe
from trainer.data.batching import Micro
from trainer.data.collate import Batch, packed, padded
from trainer.model.learner import RowStats

VOCABULARY = 16


def table(seed: int) -> Tensor:
    return torch.randn(
        VOCABULARY, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def laid_out(micro: Micro) -> Batch:
    return (padded if micro.width else packed)(micro, torch.float64)


class ToyRanks:
    updates_taken = 0

    def __init__(self, size: int, recipe: Recipe, context: int = 1) -> None:
        self.size, self.data_parallel = size, size // context
        self.largest = 0  # tokens of a micro-batch
        self.weights = table(0)
        self.reference = table(1)
        self.gradients: list[Tensor] = []
        self._recipe = recipe
        self._sums = [torch.zeros_like(self.weights) for _ in range(size)]

    def _logprobs(self, weights: Tensor, batch: Batch) -> Tensor:
        return token_logprobs(weights[batch.inputs.flatten()[batch.at]], batch.targets, 1.0)

    def release(self) -> int:
        return 0  # it holds no memory of a GPU

    def note_engines(self) -> None: ...
    def take_back(self) -> None: ...

    def train(self, one_round: Sequence[Micro]) -> list[RowStats]:
        assert len(one_round) == self.data_parallel
        found = []
        for rank, micro in enumerate(one_round):
            self.largest = max(self.largest, micro.computed_tokens)
            batch, weights = laid_out(micro), self.weights.clone().requires_grad_()
            current = self._logprobs(weights, batch)
            proximal = current.detach() if batch.proximal is None else batch.proximal
            reference = self._logprobs(self.reference, batch)
            terms = policy_loss(
                Tokens(current, proximal, batch.behaviour, batch.row, batch.advantages, reference),
                self._recipe,
            )
            terms.loss.backward()
            assert weights.grad is not None
            self._sums[rank] += weights.grad
            parts = (
                terms.losses,
                terms.kl,
                terms.clipped,
                terms.mismatch_k3,
                terms.mismatch_max,
                terms.truncated,
                terms.entropy,
                terms.weight,
                terms.weight_squares,
            )
            agreement = of_micro(micro, proximal - batch.behaviour)
            apart = differences.packed(micro, proximal - batch.behaviour)
            for place, row in enumerate(micro.rows):
                if row.sample_id >= 0:
                    values: list[Any] = [float(part[place]) for part in parts]
                    bins = tuple(terms.mismatch_bins[place].tolist())
                    one = RowStats(row.sample_id, int(terms.tokens[place]), int(terms.kept[place]), *values)
                    found.append(
                        msgspec.structs.replace(
                            one,
                            mismatch_bins=bins,
                            agreement=agreement.get(row.sample_id, ()),
                            difference=apart[place],
                        )
                    )
        return found

    def proximal(self, one_round: Sequence[Micro]) -> dict[int, bytes]:
        found = {}
        for micro in one_round:
            batch = laid_out(micro)
            completions = self._logprobs(self.weights, batch).split(
                [len(row.completion) // 4 for row in micro.rows]
            )
            found |= {
                row.sample_id: one.numpy().tobytes()
                for row, one in zip(micro.rows, completions, strict=True)
                if row.sample_id >= 0
            }
        return found

    def discard(self) -> None:
        self._sums = [torch.zeros_like(self.weights) for _ in range(self.size)]

    def update(self, denominator: float, lr: float) -> float:
        self.gradients.append(torch.stack(self._sums).sum(0) / denominator)
        self.weights = self.weights - lr * self.gradients[-1]
        self._sums = [torch.zeros_like(self.weights) for _ in range(self.size)]
        return float(self.gradients[-1].norm())
