"""A group that the filter left out is trained after all when an engine is set aside whose samples kept it out."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scavenger.protocol import messages
from tests.trainer.step_prompts import of_step
from tests.trainer.test_step import SAMPLING, make_config
from tests.trainer.test_streaming import LR, MAX_TOKENS, Recorded, Reward
from tests.trainer.toy import ToyRanks
from trainer.__main__ import group_filter
from trainer.algorithms.scoring import Scoring
from trainer.data.prompts import PromptSource, open_tokenizer
from trainer.loop.step import Stepper, StepResult

WRONG, GOOD = 7, 8


class Mixed(Recorded):
    """Every third sample is of two engines, of which one is reported wrong with the first groups."""

    wrong = True

    def _answer(self, *given: Any) -> Any:
        made = super()._answer(*given)
        samples = []
        for one in made.samples:
            count = messages.token_count(one.tokens)
            of_good = ((GOOD, count),) if one.sample_id % 3 or count < 2 else ((WRONG, 1), (GOOD, count - 1))
            samples.append(msgspec.structs.replace(one, spans=of_good))
        return msgspec.structs.replace(made, samples=tuple(samples))

    def report_agreement(self, step: int, spans: Any) -> tuple[messages.Suspect, ...]:
        return (messages.Suspect(WRONG, "n7", "wrong"),) if self.wrong else ()


def play(
    folder: Path, algorithm: dict[str, Any], rule: dict[str, Any], seed: int, *, known: bool
) -> tuple[ToyRanks, StepResult]:
    """One step. `known`: the engine is a suspect before anything came."""
    config = make_config(
        folder, run={"deterministic": False}, algorithm=algorithm, optimizer={"lr": LR}, data=rule
    )
    tokenizer = open_tokenizer(folder)
    prompts = of_step(PromptSource(config, tokenizer), 1)
    scoring = Scoring(
        Reward(prompts[2].text),
        tokenizer,
        config.reward,
        config.algorithm,
        lambda line: None,
        MAX_TOKENS,
        rule=group_filter(config),
    )
    scoring.suspects = {WRONG} if known else set()
    ranks, run = ToyRanks(1, scoring.recipe), Mixed(random.Random(seed), (1,))
    run.wrong = not known
    stepper = Stepper(config, run, ranks, scoring, SAMPLING)  # type: ignore[arg-type]  # toys for MPI and the daemon
    return ranks, stepper.step(1, 1, prompts)


@pytest.mark.parametrize("rule", [{"filter_mean_max": 0.9}, {"filter_mean_min": 0.9}, {}])
@pytest.mark.parametrize(
    "algorithm",
    [{"name": "grpo"}, {"name": "reinforce++"}, {"name": "dapo", "dynamic_sampling": False}],
    ids=lambda one: one["name"],
)
def test_a_step_with_a_filter_ends_as_if_it_never_had_the_samples_of_an_engine_set_aside(
    model_folder: Path, algorithm: dict[str, Any], rule: dict[str, Any]
) -> None:
    compared = 0
    for seed in range(6):
        ranks, found = play(model_folder, algorithm, rule, seed, known=False)
        others, known = play(model_folder, algorithm, rule, seed, known=True)
        assert found.outcomes == known.outcomes
        if ranks.gradients and others.gradients:
            compared += 1
            away = float((ranks.gradients[0] - others.gradients[0]).norm() / others.gradients[0].norm())
            assert away < 1e-6
    assert compared > 2
