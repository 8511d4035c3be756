"""I7 for every row: the gradient of a step does not depend on the order of arrival, nor on the ranks, and is that of one big batch.

The one big batch is written anew here, sample by sample from the papers' equations, and shares nothing with the trainer but the rewards.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from scavenger.config import RunConfig
from scavenger.errors import ConfigError, StaleSamples
from scavenger.protocol import messages
from tests.trainer.step_prompts import of_step
from tests.trainer.test_step import SAMPLING, RecordedRun, make_config
from tests.trainer.toy import ToyRanks, table
from trainer.algorithms.rows import ROWS, resolve
from trainer.algorithms.scoring import Scoring
from trainer.data.batching import mini_batch_of
from trainer.data.prompts import PromptSource, open_tokenizer
from trainer.loop.step import Stepper, StepResult

MAX_TOKENS, LR, CAP = 8, 40.0, 1.05
#: (name, further settings of the row). Masks, KL and shapes are in, so that each denominator is put to the test.
CASES: list[tuple[str, dict[str, Any]]] = [
    (name, {"dynamic_sampling": False} if ROWS[name].dynamic else {}) for name in ROWS
] + [
    ("grpo", {"on_length": "mask", "kl_coef": 0.1}),
    (
        "dapo",
        {
            "dynamic_sampling": False,
            "on_length": "mask",
            "importance": "mask",
            "importance_cap": CAP,
            "importance_floor": 0.02,
        },
    ),
    ("dapo", {"dynamic_sampling": False, "on_length": "overlong-shape", "overlong_buffer_tokens": 4}),
    ("cispo", {"kl_coef": 0.2, "kl_estimator": "k2"}),
]


class Recorded(RecordedRun):
    """Answers that ran into the limit say so; remembers the groups."""

    def submit(
        self, step: int, version: int, groups: Sequence[messages.GroupSpec], purpose: str = "train"
    ) -> tuple[int, ...]:
        ids = super().submit(step, version, groups, purpose)
        self.all = sorted(self._groups, key=lambda group: group.prompt_index)
        return ids

    def _answer(self, step: int, version: int, spec: messages.GroupSpec) -> messages.GroupDone:
        made = super()._answer(step, version, spec)
        ended = [
            msgspec.structs.replace(s, finish="length" if len(s.tokens) == 4 * MAX_TOKENS else "stop")
            for s in made.samples
        ]
        return msgspec.structs.replace(made, samples=tuple(ended))


class Reward:
    """By the answer alone; one prompt's answers are all worth the same."""

    version = "r"

    def __init__(self, flat: str) -> None:
        self._flat = flat

    def score(self, prompt: str, completion: str, meta: dict[str, Any]) -> float:
        return 1.0 if prompt == self._flat else float(len(completion) % 3)


def play(
    folder: Path, seed: int, size: int, settings: dict[str, Any], context: int = 1
) -> tuple[ToyRanks, Recorded, StepResult, RunConfig]:
    config = make_config(
        folder,
        run={"deterministic": False},
        algorithm=settings,
        optimizer={"lr": LR},
        trainer={"micro_batch_tokens": 40 + 10 * (seed % 3), "packing": seed % 2 == 0}
        | ({"context_parallel": context} if context > 1 else {}),
    )
    tokenizer = open_tokenizer(folder)
    prompts = of_step(PromptSource(config, tokenizer), 1)
    scoring = Scoring(
        Reward(prompts[2].text), tokenizer, config.reward, config.algorithm, lambda line: None, MAX_TOKENS
    )
    ranks, run = (
        ToyRanks(size, scoring.recipe, context),
        Recorded(random.Random(seed), [(1,), (0,), (3, 0, 2)][seed % 3]),
    )
    result = Stepper(config, run, ranks, scoring, SAMPLING).step(1, 1, prompts)  # type: ignore[arg-type]
    return ranks, run, result, config


# ---------------------------------------------------------------- the same by hand


def logprobs(weights: Tensor, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Of the answer's tokens under the table."""
    before = [*prompt, *answer][len(prompt) - 1 : -1]
    return torch.stack(
        [weights[last].log_softmax(0)[token] for last, token in zip(before, answer, strict=True)]
    )


def by_hand(
    folder: Path,
    groups: Sequence[messages.GroupDone],
    rewards: dict[int, float],
    name: str,
    settings: dict[str, Any],
) -> list[Tensor]:
    """The gradients of all updates of the step: one big batch an update."""
    updates = settings.get("updates_per_step", 1)
    place = mini_batch_of(0, 1, [group.prompt_index for group in groups], updates)
    found, weights = [], table(0)
    credit = advantages_by_hand(groups, rewards, name, settings)
    for update in range(updates):
        leaf = weights.clone().requires_grad_()
        loss = loss_by_hand(
            leaf, [group for group in groups if place[group.prompt_index] == update], credit, name, settings
        )
        loss.backward()
        assert leaf.grad is not None
        found.append(leaf.grad)
        weights = weights - LR * leaf.grad
    return found


def advantages_by_hand(
    groups: Sequence[messages.GroupDone], rewards: dict[int, float], name: str, settings: dict[str, Any]
) -> dict[int, float]:
    shaped = dict(rewards)
    if settings.get("on_length") == "overlong-shape":
        start = MAX_TOKENS - 4
        for group in groups:
            for sample in group.samples:
                shaped[sample.sample_id] += min(0.0, (start - len(sample.tokens) // 4) / 4)
    credit = {}
    for group in groups:
        values = {sample.sample_id: shaped[sample.sample_id] for sample in group.samples}
        for sample_id, value in values.items():
            others = [other for key, other in values.items() if key != sample_id]
            if name == "rloo":
                credit[sample_id] = value - mean(others)
            elif name == "reinforce++":
                credit[sample_id] = value
            else:
                credit[sample_id] = value - mean(values.values())
        if name not in ("dr_grpo", "rloo", "reinforce++", "reinforce++-baseline"):
            deviation = stdev(values.values())
            credit |= {key: credit[key] / deviation if deviation > 1e-6 else 0.0 for key in values}
    if name.startswith("reinforce++"):
        middle, deviation = mean(credit.values()), stdev(credit.values())
        credit = {key: (value - middle) / deviation for key, value in credit.items()}
    return credit


def loss_by_hand(
    weights: Tensor,
    groups: Sequence[messages.GroupDone],
    credit: dict[int, float],
    name: str,
    settings: dict[str, Any],
    first: Tensor | None = None,
) -> Tensor:
    """`first`: the weights at the step's start; None = the table that all begin with."""
    first = table(0) if first is None else first
    losses, lengths, count = [], [], 0
    for group in groups:
        prompt = messages.unpack_tokens(group.prompt)
        for sample in group.samples:
            answer = messages.unpack_tokens(sample.tokens)
            current, start = logprobs(weights, prompt, answer), logprobs(first, prompt, answer)
            behaviour = torch.tensor(messages.unpack_logprobs(sample.logprobs), dtype=torch.float64)
            reference = logprobs(table(1), prompt, answer)
            each, kept = token_losses(
                current, start, behaviour, reference, credit[sample.sample_id], name, settings
            )
            trained = any(credit[s.sample_id] for s in group.samples) or settings.get("kl_coef", 0.0) > 0
            if settings.get("on_length") == "mask" and sample.finish == "length":
                each, kept = each * 0, kept * 0
            elif not trained:
                kept = torch.ones_like(kept)  # no gradient, so no mask was computed: it counts whole
            counted = float(kept.sum()) if name == "dapo" else float(len(answer))
            losses.append((each.sum(), len(answer)))
            lengths.append(counted)
            count += 1
    if name in ("grpo", "gspo"):
        return torch.stack([loss / length for loss, length in losses]).sum() / count
    total = torch.stack([loss for loss, _ in losses]).sum()
    if name == "dr_grpo":
        return total / (count * MAX_TOKENS)
    return total / (count if name == "rloo" else sum(lengths))


def token_losses(
    current: Tensor,
    start: Tensor,
    behaviour: Tensor,
    reference: Tensor,
    credit: float,
    name: str,
    settings: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    ratio = (current - start).exp()
    engine = (start - behaviour).exp()
    kept = torch.ones_like(engine)
    if settings.get("importance") == "mask":
        kept = ((engine <= CAP) & (engine >= settings["importance_floor"])).double()
        engine = engine * kept
    else:
        engine = engine.clamp(max=2.0)
    if name == "gspo":
        ratio = (current - start).mean().exp().expand_as(current)
    low, high = {"gspo": (3e-4, 4e-4), "dapo": (0.2, 0.28), "cispo": (1.0, 4.0)}.get(name, (0.2, 0.2))
    held = ratio.clamp(1 - low, 1 + high)
    loss = (
        -held.detach() * credit * current
        if name == "cispo"
        else -torch.minimum(ratio * credit, held * credit)
    )
    gap = reference - current
    divergence = gap**2 / 2 if settings.get("kl_estimator") == "k2" else gap.exp() - gap - 1
    return engine * loss + settings.get("kl_coef", 0.0) * divergence * kept, kept


# ---------------------------------------------------------------- and both together


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize(
    ("name", "more"), CASES, ids=lambda case: case if isinstance(case, str) else "+".join(case) or "plain"
)
def test_the_gradient_is_that_of_one_big_batch_in_any_order_on_any_ranks(
    model_folder: Path, name: str, more: dict[str, Any], updates: int
) -> None:
    settings = {"name": name, "updates_per_step": updates} | more
    expected: list[Tensor] = []
    for seed in range(20):
        ranks, run, result, config = play(model_folder, seed, (1, 2, 4)[seed % 3], settings)
        rewards = {outcome.sample_id: outcome.reward for outcome in result.outcomes}
        expected = expected or by_hand(model_folder, run.all, rewards, name, settings)
        assert len(ranks.gradients) == updates
        for got, want in zip(ranks.gradients, expected, strict=True):
            assert float((got - want).norm() / want.norm()) < 1e-9
    assert resolve(config.algorithm, MAX_TOKENS).algorithm.name == name


def test_what_each_case_puts_to_the_test_does_happen(model_folder: Path) -> None:
    """The made-up answers hold filtered groups, clipped ratios, masked tokens and answers ended by length."""
    _, run, result, _ = play(model_folder, 0, 1, {"name": "dapo", "updates_per_step": 2} | CASES[9][1])
    assert result.metrics["groups_filtered"] == 1
    assert 0 < result.metrics["masked_fraction"] < 1
    assert result.metrics["clip_fraction"] > 0
    assert any(
        outcome.reason == "ended by the length limit" and outcome.reward == outcome.reward
        for outcome in result.outcomes
    )
    assert any(sample.finish == "length" for group in run.all for sample in group.samples)


# ---------------------------------------------------------------- a step in advance


class Ahead(Recorded):
    """Answers of two steps at once, mixed as `draw` mixes them. What was drawn under old weights has their logprobs."""

    def __init__(self, draw: random.Random, harvested: Sequence[int]) -> None:
        super().__init__(draw, harvested)
        self.by_step: dict[int, list[messages.GroupDone]] = {}

    def submit(
        self, step: int, version: int, groups: Sequence[messages.GroupSpec], purpose: str = "train"
    ) -> tuple[int, ...]:
        before = self._groups
        ids = super().submit(step, version, groups, purpose)
        self.by_step[step] = self.all
        self._groups += before
        self._draw.shuffle(self._groups)
        return ids

    def _answer(self, step: int, version: int, spec: messages.GroupSpec) -> messages.GroupDone:
        made = super()._answer(step, version, spec)
        prompt, samples = messages.unpack_tokens(spec.prompt), []
        for sample in made.samples:
            drawn = logprobs(table(0), prompt, messages.unpack_tokens(sample.tokens)).tolist()
            packed = messages.pack_logprobs(drawn)
            # version 1 has the weights after 0 steps
            whole = ((version, 0, len(drawn)),)
            samples.append(msgspec.structs.replace(sample, logprobs=packed, versions=whole))
        return msgspec.structs.replace(made, samples=tuple(samples))


AHEAD: list[tuple[str, dict[str, Any]]] = [("grpo", {}), ("dapo", {"dynamic_sampling": False})]
AHEAD += [("gspo", {}), ("cispo", {}), ("reinforce++", {})]
AHEAD += [("grpo", {"importance": "mask", "importance_cap": CAP, "importance_floor": 0.02})]


@pytest.mark.parametrize(
    ("name", "more"), AHEAD, ids=lambda case: case if isinstance(case, str) else "+".join(case) or "plain"
)
def test_a_step_of_older_samples_is_corrected_and_in_no_order_differs_from_one_big_batch(
    model_folder: Path, name: str, more: dict[str, Any]
) -> None:
    """Both steps' samples are drawn from the first weights. The second step is trained by the weights after the first: the policy ratio
    is against those, and what lies between them and the samples' is the detached weight."""
    settings = {"name": name, "max_off_policy_steps": 1} | more
    expected: Tensor | None = None
    for seed in range(6):
        config = make_config(
            model_folder,
            run={"deterministic": False},
            algorithm=settings,
            optimizer={"lr": LR},
            trainer={"micro_batch_tokens": 40 + 10 * (seed % 3), "packing": seed % 2 == 0},
        )
        tokenizer = open_tokenizer(model_folder)
        prompts = PromptSource(config, tokenizer)
        scoring = Scoring(
            Reward(""), tokenizer, config.reward, config.algorithm, lambda line: None, MAX_TOKENS
        )
        ranks, run = (
            ToyRanks((1, 2, 4)[seed % 3], scoring.recipe),
            Ahead(random.Random(seed), [(1,), (0,), (3, 0, 2)][seed % 3]),
        )
        stepper = Stepper(config, run, ranks, scoring, SAMPLING)  # type: ignore[arg-type]
        stepper.ask(1, 1, of_step(prompts, 1))
        stepper.ask(2, 1, of_step(prompts, 2))
        first = stepper.step(1, 1, of_step(prompts, 1))
        weights = ranks.weights
        second = stepper.step(2, 1, of_step(prompts, 2))
        assert (first.metrics["staleness_max"], second.metrics["staleness_mean"]) == (0.0, 1.0)
        assert first.metrics["mismatch_max"] < 1e-5
        assert (
            first.metrics["mismatch_p99"]
            == 0.0
            < 1e-3
            < second.metrics["mismatch_p99"]
            <= second.metrics["mismatch_max"]
        )
        assert second.metrics["mismatch_max"] > 1e-2, "the samples are old"
        fresh, old = (one.metrics["effective_fraction"] for one in (first, second))
        assert 1 - 1e-6 < fresh <= 1
        assert 0 < old < 1 - 1e-6
        rewards = {outcome.sample_id: outcome.reward for outcome in second.outcomes}
        if expected is None:
            leaf = weights.clone().requires_grad_()
            credit = advantages_by_hand(run.by_step[2], rewards, name, settings)
            loss_by_hand(leaf, run.by_step[2], credit, name, settings, first=weights).backward()
            expected = leaf.grad
        assert expected is not None
        assert float((ranks.gradients[1] - expected).norm() / expected.norm()) < 1e-6


def test_a_step_whose_samples_are_too_far_from_its_weights_is_not_taken(model_folder: Path) -> None:
    config = make_config(
        model_folder,
        run={"deterministic": False},
        algorithm={"max_off_policy_steps": 1, "max_staleness_kl": 1e-5},
        optimizer={"lr": LR},
    )
    tokenizer = open_tokenizer(model_folder)
    prompts = PromptSource(config, tokenizer)
    scoring = Scoring(Reward(""), tokenizer, config.reward, config.algorithm, lambda line: None, MAX_TOKENS)
    ranks, run = ToyRanks(1, scoring.recipe), Ahead(random.Random(3), (1,))
    stepper = Stepper(config, run, ranks, scoring, SAMPLING)  # type: ignore[arg-type]
    stepper.ask(1, 1, of_step(prompts, 1))
    stepper.ask(2, 1, of_step(prompts, 2))
    stepper.step(1, 1, of_step(prompts, 1))
    weights = ranks.weights.clone()
    with pytest.raises(StaleSamples, match=r"step 2: .*max_staleness_kl = 1e-05; the step was not taken"):
        stepper.step(2, 1, of_step(prompts, 2))
    assert torch.equal(ranks.weights, weights)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"importance": "off"}, "needs the correction.*allow_uncorrected = true"),
        ({"allow_uncorrected": True}, "nothing to allow"),
        ({"importance": "off", "max_off_policy_steps": 0, "allow_uncorrected": True}, "nothing to allow"),
        ({"name": "dapo"}, "known only once it is over"),
        ({"dynamic_sampling": True}, "known only once it is over"),
        ({"max_off_policy_steps": 17}, "less than or equal to 16"),
    ],
)
def test_steps_in_advance_are_refused_where_they_are_not_exact(
    model_folder: Path, settings: dict[str, Any], why: str
) -> None:
    def start() -> None:
        config = make_config(
            model_folder, run={"deterministic": False}, algorithm={"max_off_policy_steps": 1} | settings
        )
        resolve(config.algorithm, MAX_TOKENS)

    with pytest.raises((ValueError, ConfigError), match=why):
        start()


def test_a_deterministic_run_and_one_without_harvested_engines_take_no_step_in_advance(
    model_folder: Path,
) -> None:
    for run, why in (
        ({"deterministic": True}, "after a restart"),
        ({"deterministic": False, "harvest": False}, "no engine generates"),
    ):
        with pytest.raises(ValueError, match=why):
            make_config(model_folder, run=run, algorithm={"max_off_policy_steps": 1})


def test_ranks_that_share_samples_get_a_micro_batch_together_with_room_for_each(model_folder: Path) -> None:
    """Four ranks, two for each sample: two micro-batches a round, of up to twice a rank's tokens; the sums are the same."""
    apart, _, one, _ = play(model_folder, 0, 4, {"name": "grpo"})
    shared, _, other, config = play(model_folder, 0, 4, {"name": "grpo"}, context=2)
    each = config.trainer.micro_batch_tokens
    assert apart.largest <= each < shared.largest <= 2 * each
    assert torch.allclose(shared.gradients[0], apart.gradients[0], atol=1e-12)
    assert other.metrics["loss"] == pytest.approx(one.metrics["loss"], rel=1e-12)
