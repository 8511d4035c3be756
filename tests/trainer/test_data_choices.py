"""Filter, curriculum and replay in a step and in a run: what is trained, what is recorded, and that a restart chooses the same."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from scavenger.config import RunConfig
from scavenger.protocol import messages
from tests.trainer.step_prompts import of_step
from tests.trainer.test_datasets import problems_of, write
from tests.trainer.test_step import SAMPLING, make_config
from tests.trainer.test_streaming import (
    LR,
    MAX_TOKENS,
    Ahead,
    Recorded,
    Reward,
    advantages_by_hand,
    loss_by_hand,
)
from tests.trainer.toy import ToyRanks, table
from trainer.__main__ import group_filter
from trainer.algorithms.scoring import Scoring
from trainer.data.prompts import PromptSource, open_tokenizer
from trainer.loop import run as loop
from trainer.loop.step import Stepper

# ---------------------------------------------------------------- filter


@pytest.mark.parametrize("name", ["grpo", "dapo", "rloo", "reinforce++"])
def test_a_step_with_a_filter_is_one_big_batch_without_the_filtered_groups(
    model_folder: Path, name: str
) -> None:
    settings = {"name": name, "dynamic_sampling": False} if name == "dapo" else {"name": name}
    expected: torch.Tensor | None = None
    for seed in range(3):
        config = make_config(
            model_folder,
            run={"deterministic": False},
            algorithm=settings,
            optimizer={"lr": LR},
            data={"filter_min_spread": 0.5, "filter_mean_max": 1.2},
        )
        tokenizer = open_tokenizer(model_folder)
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
        ranks, run = ToyRanks(1 + seed % 2, scoring.recipe), Recorded(random.Random(seed), (1,))
        result = Stepper(config, run, ranks, scoring, SAMPLING).step(1, 1, prompts)  # type: ignore[arg-type]  # toys for MPI and the daemon
        why = {outcome.sample_id // 10: outcome.reason for outcome in result.outcomes}
        outside = {prompt for prompt, reason in why.items() if "data.filter_" in reason}
        assert {reason.partition(" data.")[2].split(" ")[0] for reason in why.values() if reason} == {
            "filter_min_spread",
            "filter_mean_max",
        }, "both bounds take something out"
        [said] = result.decisions
        assert (said.policy, said.taken, said.left_out) == ("filter", 6 - len(outside), len(outside))
        assert said.inputs == {"min_spread": 0.5, "max_mean": 1.2}
        assert result.metrics["groups_outside"] == len(outside)
        rewards = {outcome.sample_id: outcome.reward for outcome in result.outcomes}
        inside = [group for group in run.all if group.prompt_index not in outside]
        if expected is None:
            leaf = table(0).clone().requires_grad_()
            loss_by_hand(
                leaf, inside, advantages_by_hand(inside, rewards, name, settings), name, settings
            ).backward()
            expected = leaf.grad
        assert expected is not None
        assert float((ranks.gradients[0] - expected).norm() / expected.norm()) < 1e-6


# ---------------------------------------------------------------- replay


def two_steps(
    model_folder: Path, groups: int, seed: int = 0, **algorithm: Any
) -> tuple[ToyRanks, Ahead, list[Any], torch.Tensor]:
    """Two steps whose samples are all of the first weights; the weights between them."""
    config = make_config(
        model_folder,
        run={"deterministic": False},
        algorithm={"name": "grpo", "max_off_policy_steps": 1} | algorithm,
        optimizer={"lr": LR},
        data={"replay_groups": groups},
    )
    tokenizer = open_tokenizer(model_folder)
    prompts = PromptSource(config, tokenizer)
    scoring = Scoring(Reward(""), tokenizer, config.reward, config.algorithm, lambda line: None, MAX_TOKENS)
    ranks, run = ToyRanks(1, scoring.recipe), Ahead(random.Random(seed), (1,))
    stepper = Stepper(config, run, ranks, scoring, SAMPLING)  # type: ignore[arg-type]  # toys for MPI and the daemon
    for step in (1, 2):
        stepper.ask(step, 1, of_step(prompts, step))
    first = stepper.step(1, 1, of_step(prompts, 1))
    weights = ranks.weights
    return ranks, run, [first, stepper.step(2, 1, of_step(prompts, 2))], weights


@pytest.mark.parametrize(
    "importance", [{}, {"importance": "mask", "importance_cap": 1.05, "importance_floor": 0.02}]
)
def test_a_replayed_group_is_trained_with_its_own_advantages_and_corrected_for_its_age(
    model_folder: Path, importance: dict[str, Any]
) -> None:
    for seed in range(3):
        ranks, run, (first, second), weights = two_steps(model_folder, 2, seed, **importance)
        assert [one.policy for one in first.decisions] == ["replay"]
        assert (first.decisions[0].taken, first.metrics["groups_replayed"]) == (0, 0.0)
        [said] = second.decisions
        assert said.taken == second.metrics["groups_replayed"] == 2
        assert said.inputs["max_age"] == said.inputs["oldest"] == 1.0
        assert second.metrics["staleness_mean"] == second.metrics["staleness_max"] == 1.0
        tokens = sum(len(sample.tokens) // 4 for group in run.by_step[2] for sample in group.samples)
        assert second.metrics["tokens_trained"] > tokens, "the replayed ones are trained beside its own"
        own = {outcome.sample_id for outcome in second.outcomes}
        replayed = [group for group in run.by_step[1] if group.group_id in said.groups]
        assert len(replayed) == 2
        assert own.isdisjoint(sample.sample_id for group in replayed for sample in group.samples), (
            "a sample is consumed once"
        )
        rewards = {o.sample_id: o.reward for result in (first, second) for o in result.outcomes}
        groups = [*run.by_step[2], *replayed]
        settings = {"name": "grpo"} | importance
        leaf = weights.clone().requires_grad_()
        credit = advantages_by_hand(groups, rewards, "grpo", settings)
        loss_by_hand(leaf, groups, credit, "grpo", settings, first=weights).backward()
        assert leaf.grad is not None
        assert float((ranks.gradients[1] - leaf.grad).norm() / leaf.grad.norm()) < 1e-6


def test_those_with_the_most_signal_are_replayed_and_none_twice(model_folder: Path) -> None:
    *_, (first, second), _ = two_steps(model_folder, 2)
    signal: dict[int, float] = {}
    for outcome in first.outcomes:
        signal[100 + outcome.sample_id // 10] = signal.get(100 + outcome.sample_id // 10, 0.0) + abs(
            outcome.advantage
        )
    best = sorted(signal, key=lambda group: (-signal[group], group))[:2]
    assert list(second.decisions[0].groups) == best


def test_without_replay_nothing_is_kept_and_nothing_said(model_folder: Path) -> None:
    *_, results, _ = two_steps(model_folder, 0)
    assert [one.decisions for one in results] == [(), ()]


# ---------------------------------------------------------------- curriculum

K, STEPS = 1, 8


class Class:
    """A loop's run, ranks, scoring and stepper in one: each row has its own pass rate, which never changes. Commits are kept as the ledger
    keeps them."""

    trains_adapters, tokenizer, version, updates_taken = False, "", "judge", 0

    def __init__(self, attempt: int = 1, pass_rates: tuple[tuple[int, int, int, int], ...] = ()) -> None:
        self.attempt, self.next_version, self.pass_rates = attempt, 1, pass_rates
        self.asked: dict[int, list[int]] = {}
        self.decisions: dict[int, tuple[messages.DataDecision, ...]] = {}
        self.recorded: list[tuple[int, int, int, int]] = []
        self._tasks: dict[int, list[Any]] = {}

    def build_version(self, version: int, dtype: str) -> Any:
        return SimpleNamespace(version=version, root=b"\x01")

    def offer(self, made: Any) -> tuple[Any, ...]:
        return ()

    def publish(self, *args: Any) -> None:
        self.next_version += 1

    def set_reserved(self, awake: bool) -> None: ...
    def begin(self, group: Any) -> None: ...
    def ask(self, step: int, version: int, prompts: Sequence[Any], more: Any) -> None:
        self.asked[step] = [one.index for one in prompts]
        self._tasks[step] = list(prompts)

    def step(self, step: int, version: int, prompts: Sequence[Any], more: Any) -> Any:
        rewards = {one.index: tuple(float(i < int(one.meta["answer"])) for i in range(4)) for one in prompts}
        self.recorded += [(step, index, int(sum(of)), 4) for index, of in rewards.items()]
        return SimpleNamespace(
            metrics={}, outcomes=(), phase_log=(), late=(), decisions=(), differences=(), rewards=rewards
        )

    def commit(
        self,
        step: int,
        version: int,
        outcomes: Any,
        metrics: Any,
        purpose: str = "train",
        decisions: Any = (),
        differences: Any = (),
    ) -> None:
        self.decisions[step] = tuple(decisions)


def run_steps(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, script: Class, after: int, cursor: int
) -> loop.Loop:
    monkeypatch.setattr(loop, "Stepper", lambda *args: script)
    nothing: Any = SimpleNamespace(
        step=lambda *a: None,
        evaluation=lambda *a: None,
        say=print,
        begin=lambda *a: None,
        advance=lambda: None,
        take_seconds=lambda: 0.0,
        finish=lambda: None,
    )
    parts: Any = script
    made = loop.Loop(
        config,
        parts,
        parts,
        parts,
        problems_of(config),
        SAMPLING,
        nothing,
        loop.RunStart(after, cursor=cursor),
    )
    made._checkpoints = nothing
    made._checkpoint = lambda: None  # type: ignore[method-assign]  # nothing is written here
    made.run()
    return made


def test_a_run_passes_over_what_is_solved_and_after_a_restart_takes_the_same_prompts(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        tmp_path / "rows.jsonl",
        [{"prompt": f"1{number % 10}", "answer": str(number % 5)} for number in range(10)],
    )
    config = RunConfig.model_validate(
        {
            "run": {"name": "r", "steps": STEPS, "state_dir": "s", "out_dir": tmp_path},
            "model": {"path": model_folder, "context_length": 24},
            "sampling": {"max_tokens": 8},
            "data": {"task": "jsonl", "path": tmp_path / "rows.jsonl", "prompts_per_step": 3}
            | {"curriculum_min": 0.25, "curriculum_max": 0.75, "curriculum_rest": 1},
            "algorithm": {"max_off_policy_steps": K},
        }
    )
    whole = Class()
    run_steps(config, monkeypatch, whole, 0, 0)
    assert whole.asked[1] + whole.asked[2] == [0, 1, 2, 3, 4, 5], "nothing is measured yet"
    taken = [index for step in range(1, STEPS + 1) for index in whole.asked[step]]
    rows = problems_of(config)
    trained_by = {index: step for step, of in whole.asked.items() for index in of}
    first = {rows.take(index, 1)[0].meta["row"]: trained_by[index] for index in range(10)}
    over = 0
    for index in range(10, 20):
        meta = rows.take(index, 1)[0].meta
        step = trained_by.get(index, 0)
        extreme = meta["answer"] in ("0", "4")
        if not step:
            over += 1
            assert extreme, "a prompt that is neither easy nor hard was passed over"
        elif extreme:
            assert first[meta["row"]] > step - 1 - K, "it was known to be too easy or too hard"
    assert over >= 2
    assert any(index >= 20 for index in taken), "and a third, in which all are measured again"
    said = [one for step in range(1, STEPS + 1) for one in whole.decisions[step]]
    assert [one.policy for one in said] == ["curriculum"] * STEPS
    assert sum(one.left_out for one in said) == taken[-1] + 1 - len(taken)
    assert said[-1].inputs["until_step"] == STEPS - 1 - K
    for after in range(1, STEPS):
        known = tuple(one for one in whole.recorded if one[0] <= after)
        again = Class(2, known[::-1])
        cursor = 0 if after == 0 else max(whole.asked[after]) + 1
        run_steps(config, monkeypatch, again, after, cursor)
        assert again.asked == {step: of for step, of in whole.asked.items() if step > after}, after


def test_the_wire_carries_what_was_decided() -> None:
    one = messages.DataDecision("replay", 1, 2, {"limit": 3.0}, (7,))
    body = messages.CommitStep(1, 1, "train", (), {}, decisions=(one,))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=messages.CommitStep) == body
    assert json.loads(msgspec.json.encode(one))["policy"] == "replay"
