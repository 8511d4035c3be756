"""From completed groups to rows that can be trained: rewards, advantages and what becomes of each sample. Rank 0 only.

Owns the outcome of a sample: consumed, filtered (its group says nothing), masked (no usable reward or tokens), each with its reason,
which quotes neither prompt nor completion: the ledger shows it to people who may see neither.
Nothing is left out silently (I6). Rows depend on the groups of the advantage's scope (the group alone, or the step's), never on their
arrival (I7).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from tokenizers import Tokenizer

from scavenger.config import AlgorithmSection, RewardSection
from scavenger.errors import RewardError, RewardTimeout, WireError
from scavenger.protocol import messages
from trainer.algorithms.advantages import Advantages, overlong_penalty
from trainer.algorithms.rewards import Reward
from trainer.algorithms.rows import Counted, resolve
from trainer.data.batching import TrainRow
from trainer.data.prompts import PromptTask

#: Why a completion that the length limit ended is not trained (`algorithm.on_length = "mask"`).
ENDED_BY_LENGTH = "ended by the length limit"
#: Between two looks at rewards that are waited for without end: an infinite wait is none that a lock takes.
WAIT_S = 60.0


class Scorer(Protocol):
    """What calls the reward function: `rewards.RewardRunner`, or the function itself. It is waited for, unless it is a `Submits`."""

    @property
    def version(self) -> str:
        """Of the function that gave the last reward."""

    def score(self, prompt: str, completion: str, meta: dict[str, Any]) -> float: ...


@runtime_checkable
class Submits(Protocol):
    """A scorer that works beside its caller: `reward_pool.RewardPool`."""

    def submit(
        self, prompt: str, completions: Sequence[str], meta: dict[str, Any], step: int = 0
    ) -> list[Future[Reward]]:
        """A future reward for each completion. Those of an earlier step go first."""


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """`rows` are in the order of the samples' indices; empty when there is nothing to train."""

    group_id: int
    prompt_index: int
    rows: tuple[TrainRow, ...]
    outcomes: tuple[messages.SampleOutcome, ...]
    rewards: tuple[float, ...]  # of the usable samples
    lengths: tuple[int, ...]  # completion tokens of the usable samples
    informative: bool
    counted: Counted  # in the step's denominator
    parts: tuple[Mapping[str, float], ...] = ()  # as in `Judged`


@dataclass(frozen=True, slots=True)
class Judged:
    """A group with (sample, reward, "") of each sample in index order; NaN and the reason where there is no usable reward."""

    group: messages.GroupDone
    samples: tuple[tuple[messages.DoneSample, float, str], ...]
    parts: tuple[
        Mapping[str, float], ...
    ] = ()  # of the samples that were scored now by several functions, or by one that gives parts


@dataclass(frozen=True, slots=True)
class _Pending:
    """A group that is being scored: the reward to come of each sample in index order, None where none was asked for."""

    group: messages.GroupDone
    samples: tuple[tuple[messages.DoneSample, Future[Reward] | None], ...]

    def waiting(self) -> list[Future[Reward]]:
        return [future for _, future in self.samples if future is not None and not future.done()]


def _ignore(judged: Judged) -> None:
    pass


class Scoring:
    """Scores the groups of one run: `begin` each as it comes, `take_scored` when it may be done. `say`: a line for each masked sample."""

    def __init__(
        self,
        scorer: Scorer,
        tokenizer: Tokenizer,
        reward: RewardSection,
        algorithm: AlgorithmSection,
        say: Callable[[str], None],
        max_tokens: int = 1,
        seen: Callable[[Judged], None] = _ignore,
    ) -> None:
        """`seen`: told of each group as it was scored."""
        self._seen = seen
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._mask_errors = reward.on_reward_error == "mask"
        self.recipe = resolve(algorithm, max_tokens)
        self._say = say
        self._reported: set[str] = set()
        self._late = 0
        self._pending: dict[int, _Pending] = {}  # by group

    @property
    def version(self) -> str:
        """Of the function that gave the rewards: recorded ones are taken only of the same."""
        return self._scorer.version

    def begin(self, group: messages.GroupDone) -> None:
        """Have a group scored, once. `take_scored` gives it when that is done.

        A reward that an earlier attempt recorded is taken as it is, if the same version of the function gave it; else the sample is
        scored again, which is said once.
        """
        if group.group_id in self._pending:
            return
        samples = sorted(group.samples, key=lambda sample: sample.index)
        asked = [sample for sample in samples if sample.error is None and not self._is_recorded(sample)]
        for sample in asked:
            if sample.reward is not None and not math.isnan(sample.reward):
                self._report_rescored(sample)
        completions = [self._text(sample.tokens) for sample in asked]
        futures = self._submit(self._text(group.prompt), completions, json.loads(group.meta), group.step)
        found = dict(zip((sample.sample_id for sample in asked), futures, strict=True))
        self._pending[group.group_id] = _Pending(
            group, tuple((sample, found.get(sample.sample_id)) for sample in samples)
        )

    def is_pending(self, groups: Collection[int]) -> bool:
        """Whether any of these groups was begun and not taken."""
        return not self._pending.keys().isdisjoint(groups)

    def take_scored(self, groups: Collection[int], timeout_s: float = 0.0) -> list[Judged]:
        """Those of `groups` that are scored, each given once; waits up to `timeout_s` for the first.

        A `RewardTimeout` is a reward of 0, which is said and counted. Raises any other `RewardError` unless errors are masked.
        """
        mine = [one for number, one in self._pending.items() if number in groups]
        deadline = time.monotonic() + timeout_s
        while True:
            waiting = {one.group.group_id: one.waiting() for one in mine}
            scored = [one for one in mine if not waiting[one.group.group_id]]
            left = deadline - time.monotonic()
            if scored or not mine or left <= 0:
                break
            wait(
                [future for futures in waiting.values() for future in futures],
                min(left, WAIT_S),
                FIRST_COMPLETED,
            )
        for one in scored:
            del self._pending[one.group.group_id]
        return [self._judged(one) for one in scored]

    def _judged(self, pending: _Pending) -> Judged:
        samples = tuple((sample, *self._result(sample, found)) for sample, found in pending.samples)
        good = [
            found.result() for _, found in pending.samples if found is not None and found.exception() is None
        ]
        judged = Judged(pending.group, samples, tuple(reward.parts for reward in good if reward.parts))
        self._seen(judged)
        return judged

    def rewards(self, group: messages.GroupDone) -> list[tuple[messages.DoneSample, float, str]]:
        """(sample, reward, "") of each sample in index order, waited for; reward NaN and the reason where it is masked."""
        return list(self.judge(group).samples)

    def _submit(
        self, prompt: str, completions: Sequence[str], meta: dict[str, Any], step: int
    ) -> list[Future[Reward]]:
        if isinstance(self._scorer, Submits):
            return self._scorer.submit(prompt, completions, meta, step)
        futures: list[Future[Reward]] = []
        for completion in completions:
            futures.append(Future())
            try:
                futures[-1].set_result(Reward(self._scorer.score(prompt, completion, meta)))
            except RewardTimeout as error:
                futures[-1].set_result(Reward(0.0, late=error))
            except RewardError as error:
                futures[-1].set_exception(error)
        return futures

    def _is_recorded(self, sample: messages.DoneSample) -> bool:
        return (
            sample.reward is not None
            and not math.isnan(sample.reward)
            and sample.reward_version == self.version
        )

    def _result(self, sample: messages.DoneSample, found: Future[Reward] | None) -> tuple[float, str]:
        if sample.error is not None:
            return self._masked(sample, f"poisoned: {sample.error}")
        if found is None:
            assert sample.reward is not None
            return sample.reward, ""
        try:
            reward = found.result()
            if reward.late is not None:
                self._late += 1
                what = "a part of its reward that is" if reward.parts else "a reward of"
                self._say(f"sample {sample.sample_id} gets {what} 0: {reward.late.log_text}")
            return reward.value, ""
        except RewardError as error:
            if not self._mask_errors:
                raise RewardError(
                    f"sample {sample.sample_id}: {error.cause}", error.remedy, quoted=error.quoted
                ) from error
            return self._masked(sample, error.cause, error.log_text)

    def take_late(self) -> int:
        """How many rewards of 0 were given at a deadline since this was last asked. Those that were recorded earlier are not among them."""
        late, self._late = self._late, 0
        return late

    def _report_rescored(self, sample: messages.DoneSample) -> None:
        if sample.reward_version not in self._reported:
            self._reported.add(sample.reward_version)
            before = (
                f"{sample.reward_version!r} gave"
                if sample.reward_version
                else "a version that was not noted gave"
            )
            self._say(
                f"scored again by {self.version!r}: sample {sample.sample_id} and others whose recorded reward {before}"
            )

    def _masked(self, sample: messages.DoneSample, reason: str, log_text: str = "") -> tuple[float, str]:
        self._say(f"sample {sample.sample_id} is masked: {log_text or reason}")
        return math.nan, reason

    def _text(self, tokens: bytes) -> str:
        text: str = self._tokenizer.decode(list(messages.unpack_tokens(tokens)), skip_special_tokens=True)
        return text

    def judge(self, group: messages.GroupDone) -> Judged:
        """The rewards of one group, with which advantages can be made, waited for."""
        self.begin(group)
        return self.take_scored((group.group_id,), math.inf)[0]

    def score(self, group: messages.GroupDone) -> ScoredGroup:
        """Rewards, advantages, rows and outcomes of one training group, where advantages need no other."""
        return self.settle([self.judge(group)])[0]

    def settle(self, judged: Sequence[Judged]) -> list[ScoredGroup]:
        """Advantages, rows and outcomes of the groups of one scope: one group, or all of a step in the order of their prompts."""
        recipe = self.recipe
        scope = [(self._shaped(one), torch.tensor([not why for _, _, why in one.samples])) for one in judged]
        found = recipe.algorithm.advantages(scope, recipe.scale)
        return [
            self._scored(one, advantages, usable)
            for one, advantages, (_, usable) in zip(judged, found, scope, strict=True)
        ]

    def _shaped(self, judged: Judged) -> torch.Tensor:
        """What advantages are made of: the rewards, lowered near the length limit where the run wants that."""
        recipe = self.recipe
        values = []
        for sample, reward, why in judged.samples:
            penalty = 0.0
            if recipe.on_length == "overlong-shape":
                penalty = overlong_penalty(
                    messages.token_count(sample.tokens), recipe.max_tokens, recipe.overlong_buffer_tokens
                )
            values.append(0.0 if why else reward + penalty)
        return torch.tensor(values, dtype=torch.float64)

    def _scored(self, judged: Judged, found: Advantages, usable: torch.Tensor) -> ScoredGroup:
        group, recipe = judged.group, self.recipe
        trained = found.informative or (recipe.kl_coef > 0 and bool(usable.any()) and not recipe.dynamic)
        outcomes, rows, counted = [], [], Counted()
        for (sample, reward, why), advantage in zip(judged.samples, found.values.tolist(), strict=True):
            if why:
                outcomes.append(
                    messages.SampleOutcome(sample.sample_id, "masked", math.nan, 0.0, messages.words(why))
                )
                continue
            cut = recipe.on_length == "mask" and sample.finish == "length"
            replaced = recipe.dynamic and not found.informative
            if (recipe.algorithm.masked_count or not cut) and not replaced:
                counted += Counted(1, messages.token_count(sample.tokens))
            if cut:
                outcomes.append(
                    messages.SampleOutcome(
                        sample.sample_id, "masked", reward, 0.0, ENDED_BY_LENGTH, self.version
                    )
                )
                continue
            kind = "consumed" if trained else "filtered"
            outcomes.append(
                messages.SampleOutcome(
                    sample.sample_id, kind, reward, advantage, "" if trained else found.reason, self.version
                )
            )
            if trained:
                rows.append(_row(group, sample, advantage))
        kept = [(sample, reward) for sample, reward, why in judged.samples if not why]
        return ScoredGroup(
            group.group_id,
            group.prompt_index,
            tuple(rows),
            tuple(outcomes),
            tuple(reward for _, reward in kept),
            tuple(messages.token_count(sample.tokens) for sample, _ in kept),
            found.informative,
            counted,
            judged.parts,
        )


def _row(group: messages.GroupDone, sample: messages.DoneSample, advantage: float) -> TrainRow:
    if not sample.tokens or len(sample.tokens) != len(sample.logprobs):
        raise WireError(
            f"sample {sample.sample_id} came with {len(sample.tokens)} bytes of tokens and {len(sample.logprobs)} of logprobs"
        )
    return TrainRow(sample.sample_id, group.prompt, sample.tokens, sample.logprobs, advantage)


def specs(
    prompts: Sequence[PromptTask],
    *,
    n: int,
    sampling: messages.Sampling,
    offset: int = 0,
    mark: dict[str, Any] | None = None,
) -> list[messages.GroupSpec]:
    """What to generate for these prompts. `offset` sets the prompt indices of a second use in the same step apart."""
    return [
        messages.GroupSpec(
            p.index + offset,
            messages.pack_tokens(p.tokens),
            n,
            sampling,
            json.dumps(p.meta | (mark or {}), sort_keys=True),
        )
        for p in prompts
    ]
