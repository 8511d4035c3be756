"""From completed groups to rows that can be trained: rewards, advantages and what becomes of each sample. Rank 0 only.

Owns the outcome of a sample: consumed, filtered (its group says nothing), masked (no usable reward or tokens), each with its reason,
which quotes neither prompt nor answer: the ledger shows it to people who may see neither.
Nothing is left out silently (I6). Rows depend on the groups of the advantage's scope (the group alone, or the step's), never on their
arrival (I7).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer

from scavenger import wire
from scavenger.config import AlgorithmSection, RewardSection
from scavenger.errors import LateAnswer, RewardError, WireError
from trainer.algorithms.advantages import Advantages
from trainer.algorithms.rows import Counted, resolve
from trainer.algorithms.shaping import overlong_penalty
from trainer.batching import Row
from trainer.data import Problem

#: Why an answer that the length limit ended is not trained (`algorithm.on_length = "mask"`).
ENDED_BY_LENGTH = "ended by the length limit"


class Scorer(Protocol):
    """What calls the reward function: `rewards.RewardRunner`, or the function itself in the single-process mode."""

    @property
    def version(self) -> str:
        """Of the function that gave the last reward."""

    def score(self, prompt: str, answer: str, meta: dict[str, Any]) -> float: ...


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """`rows` are in the order of the samples' indices; empty when there is nothing to train."""

    group_id: int
    prompt_index: int
    rows: tuple[Row, ...]
    outcomes: tuple[wire.SampleOutcome, ...]
    rewards: tuple[float, ...]  # of the usable samples
    lengths: tuple[int, ...]  # answer tokens of the usable samples
    informative: bool
    counted: Counted  # in the step's denominator


@dataclass(frozen=True, slots=True)
class Judged:
    """A group with (sample, reward, "") of each sample in index order; NaN and the reason where there is no usable reward."""

    group: wire.GroupDone
    samples: tuple[tuple[wire.DoneSample, float, str], ...]


class Scoring:
    """Scores the groups of one run. `say` gets one line for each masked sample."""

    def __init__(
        self,
        scorer: Scorer,
        tokenizer: Tokenizer,
        reward: RewardSection,
        algorithm: AlgorithmSection,
        say: Callable[[str], None],
        max_tokens: int = 1,
    ) -> None:
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._mask_errors = reward.on_reward_error == "mask"
        self.recipe = resolve(algorithm, max_tokens)
        self._say = say
        self._told: set[str] = set()
        self._late = 0

    @property
    def version(self) -> str:
        """Of the function that gave the rewards: recorded ones are taken only of the same."""
        return self._scorer.version

    def rewards(self, group: wire.GroupDone) -> list[tuple[wire.DoneSample, float, str]]:
        """(sample, reward, "") of each sample in index order; reward NaN and the reason where it is masked.

        A reward that an earlier attempt recorded is taken as it is, if the same version of the function gave it; else the sample is
        scored again, which is said once. A `LateAnswer` is a reward of 0, which is said and counted. Raises any other `RewardError`
        unless errors are masked.
        """
        prompt = self._text(group.prompt)
        meta = json.loads(group.meta)
        return [(sample, *self._reward(sample, prompt, meta)) for sample in sorted(group.samples, key=lambda s: s.index)]

    def _reward(self, sample: wire.DoneSample, prompt: str, meta: dict[str, Any]) -> tuple[float, str]:
        if sample.error is not None:
            return self._masked(sample, f"poisoned: {sample.error}")
        if sample.reward is not None and not math.isnan(sample.reward):
            if sample.reward_version == self.version:
                return sample.reward, ""
            self._tell_rescored(sample)
        try:
            return self._scorer.score(prompt, self._text(sample.tokens), meta), ""
        except LateAnswer as error:
            self._late += 1
            self._say(f"sample {sample.sample_id} gets a reward of 0: {error.log_text}")
            return 0.0, ""
        except RewardError as error:
            if not self._mask_errors:
                raise RewardError(f"sample {sample.sample_id}: {error.cause}", error.remedy, quoted=error.quoted) from error
            return self._masked(sample, error.cause, error.log_text)

    def take_late(self) -> int:
        """How many rewards of 0 were given at a deadline since this was last asked. Those that were recorded earlier are not among them."""
        late, self._late = self._late, 0
        return late

    def _tell_rescored(self, sample: wire.DoneSample) -> None:
        if sample.reward_version not in self._told:
            self._told.add(sample.reward_version)
            before = f"{sample.reward_version!r} gave" if sample.reward_version else "a version that was not noted gave"
            self._say(f"scored again by {self.version!r}: sample {sample.sample_id} and others whose recorded reward {before}")

    def _masked(self, sample: wire.DoneSample, reason: str, log_text: str = "") -> tuple[float, str]:
        self._say(f"sample {sample.sample_id} is masked: {log_text or reason}")
        return math.nan, reason

    def _text(self, tokens: bytes) -> str:
        text: str = self._tokenizer.decode(list(wire.unpack_tokens(tokens)), skip_special_tokens=True)
        return text

    def judge(self, group: wire.GroupDone) -> Judged:
        """The rewards of one training group, with which advantages can be made."""
        return Judged(group, tuple(self.rewards(group)))

    def score(self, group: wire.GroupDone) -> ScoredGroup:
        """Rewards, advantages, rows and outcomes of one training group, where advantages need no other."""
        return self.settle([self.judge(group)])[0]

    def settle(self, judged: Sequence[Judged]) -> list[ScoredGroup]:
        """Advantages, rows and outcomes of the groups of one scope: one group, or all of a step in the order of their prompts."""
        recipe = self.recipe
        scope = [(self._shaped(one), torch.tensor([not why for _, _, why in one.samples])) for one in judged]
        found = recipe.row.advantages(scope, recipe.scale)
        return [self._scored(one, advantages, usable) for one, advantages, (_, usable) in zip(judged, found, scope, strict=True)]

    def _shaped(self, judged: Judged) -> torch.Tensor:
        """What advantages are made of: the rewards, lowered near the length limit where the run wants that."""
        recipe = self.recipe
        values = []
        for sample, reward, why in judged.samples:
            penalty = 0.0
            if recipe.on_length == "overlong-shape":
                penalty = overlong_penalty(len(sample.tokens) // 4, recipe.max_tokens, recipe.overlong_buffer_tokens)
            values.append(0.0 if why else reward + penalty)
        return torch.tensor(values, dtype=torch.float64)

    def _scored(self, judged: Judged, found: Advantages, usable: torch.Tensor) -> ScoredGroup:
        group, recipe = judged.group, self.recipe
        trained = found.informative or (recipe.kl_coef > 0 and bool(usable.any()) and not recipe.dynamic)
        outcomes, rows, counted = [], [], Counted()
        for (sample, reward, why), advantage in zip(judged.samples, found.values.tolist(), strict=True):
            if why:
                outcomes.append(wire.SampleOutcome(sample.sample_id, "masked", math.nan, 0.0, wire.words(why)))
                continue
            cut = recipe.on_length == "mask" and sample.finish == "length"
            replaced = recipe.dynamic and not found.informative
            if (recipe.row.masked_count or not cut) and not replaced:
                counted += Counted(1, len(sample.tokens) // 4)
            if cut:
                outcomes.append(wire.SampleOutcome(sample.sample_id, "masked", reward, 0.0, ENDED_BY_LENGTH, self.version))
                continue
            kind = "consumed" if trained else "filtered"
            outcomes.append(wire.SampleOutcome(sample.sample_id, kind, reward, advantage, "" if trained else found.reason, self.version))
            if trained:
                rows.append(_row(group, sample, advantage))
        kept = [(sample, reward) for sample, reward, why in judged.samples if not why]
        return ScoredGroup(
            group.group_id, group.prompt_index, tuple(rows), tuple(outcomes), tuple(reward for _, reward in kept),
            tuple(len(sample.tokens) // 4 for sample, _ in kept), found.informative, counted,
        )  # fmt: skip


def _row(group: wire.GroupDone, sample: wire.DoneSample, advantage: float) -> Row:
    if not sample.tokens or len(sample.tokens) != len(sample.logprobs):
        raise WireError(f"sample {sample.sample_id} came with {len(sample.tokens)} bytes of tokens and {len(sample.logprobs)} of logprobs")
    return Row(sample.sample_id, group.prompt, sample.tokens, sample.logprobs, advantage)


def specs(
    problems: Sequence[Problem], *, n: int, sampling: wire.Sampling, offset: int = 0, mark: dict[str, Any] | None = None
) -> list[wire.GroupSpec]:
    """What to generate for these problems. `offset` sets the prompt indices of a second use in the same step apart."""
    return [
        wire.GroupSpec(p.index + offset, wire.pack_tokens(p.tokens), n, sampling, json.dumps(p.meta | (mark or {}), sort_keys=True))
        for p in problems
    ]
