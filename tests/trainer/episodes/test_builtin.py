"""The environment that is built in: its tasks and tool, what it refuses, and episodes of it in a real worker. Without `verifiers`."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scavenger.config import RunConfig
from scavenger.errors import ConfigError
from scavenger.protocol.messages import RowTurn
from trainer import tiny
from trainer.episodes import builtin
from trainer.episodes.opening import cause_first, rehearsed, remedy_of, setup_of
from trainer.episodes.worker import said_of
from trainer.tasks import calculator, proposer_solver
from trainer.tasks.calculator import Ended, Observation


def config(model: Path, **data: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "r", "steps": 2, "state_dir": "/s", "out_dir": "/o"},
            "model": {"path": model, "context_length": 64},
            "sampling": {"max_tokens": 6},
            "data": {"environment": "builtin:calculator", **data},
        }
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the environment's tokenizer: no worker opens more of a model."""
    calculator.write_tokenizer(tmp_path)
    return tmp_path


def ids(text: str, *, ended: bool = True) -> list[int]:
    return [calculator.ALPHABET.index(char) for char in text] + [tiny.EOS_ID] * ended


def test_who_adds_one_number_after_another_has_the_reward_and_who_forgets_one_has_not() -> None:
    for number in range(50):
        terms = calculator.task(number)
        *calls, answer = calculator.turns_of(terms)
        displays = [calculator.replied(terms, turn, call) for turn, call in enumerate(calls, 1)]
        assert displays == [Observation(f"{sum(terms[: n + 2]):02d}>") for n in range(len(calls))]
        assert calculator.replied(terms, len(calls) + 1, answer) == Ended(1.0)
        wrong = f"={(sum(terms) + 1) % 100:02d}"
        assert calculator.replied(terms, 1, wrong) == Ended(0.0)


@pytest.mark.parametrize("said", ["", "7+23", "07+23+11", "99+01", "=7", "=100", "\u0660\u0661+02"])
def test_what_is_neither_a_sum_of_two_digits_nor_an_answer_costs_a_turn(said: str) -> None:
    assert calculator.replied((7, 23, 11, 19), 1, said) == Observation(f"{calculator.REFUSED}>")
    assert calculator.replied((7, 23, 11, 19), calculator.MOST_TURNS, said) == Ended(0.0, "max_turns")


def test_models_are_warmed_up_with_none_of_the_environment_s_tasks() -> None:
    tasks = {calculator.task(number) for number in range(calculator.TASKS)}
    assert not tasks & {calculator.task(number, warm_up=True) for number in range(20_000)}
    assert len(tasks) > calculator.TASKS * 0.95


def test_a_demonstration_trains_what_the_model_says_and_nothing_else() -> None:
    tokens, mask = tiny.demonstrated(3, 0.99)
    text = "".join(calculator.ALPHABET[token] for token, mine in zip(tokens, mask, strict=True) if mine)
    terms = calculator.task(3, warm_up=True)
    assert text == "".join(f"{said}<eos>" for said in calculator.turns_of(terms))
    guessed = tiny.demonstrated(3, 0.0)
    forgot = tiny.demonstrated(3, tiny.GUESSES)
    assert len(guessed[0]) < len(forgot[0]) < len(tokens)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"environment": "builtin:chess"}, "'builtin:chess' is not built in"),
        ({"environment_args": {"terms": 3}}, "data.environment_args does not go with"),
        ({"renderer": {"name": "qwen3"}}, "data.renderer does not go with"),
        ({"effects": "external"}, "data.effects does not go with"),
        ({"sandbox": "bubblewrap"}, "data.sandbox does not go with"),
    ],
)
def test_what_means_nothing_to_it_is_refused(data: dict[str, Any], why: str, model: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        builtin.check(setup_of(config(model, **data), "http://here"))


def test_an_episode_is_played_by_a_worker_and_its_rows_are_the_model_s_own_tokens(model: Path) -> None:
    """A model that always calls the calculator: five turns, of which the ends are what it said."""
    tasks, played, _ = rehearsed(config(model), ids("01+02"), print)
    assert tasks.count == calculator.TASKS
    assert (played.reward, played.finish, played.stopped_by) == (0.0, "length", "max_turns")
    assert played.calls == tuple(f"0.{n}" for n in range(calculator.MOST_TURNS))
    [row] = played.branches
    assert list(array("i", row.prompt)) == ids(calculator.prompt(calculator.task(0)), ended=False)
    whole, mask = list(array("i", row.completion)), list(row.mask)
    said, heard = ids("01+02"), ids("03>", ended=False)
    assert whole == [*((said + heard) * (calculator.MOST_TURNS - 1)), *said]
    assert mask == [*(([1] * len(said) + [0] * len(heard)) * (calculator.MOST_TURNS - 1)), *([1] * len(said))]
    assert row.trained == len(said) * calculator.MOST_TURNS == len(array("f", row.behaviour))


def test_a_right_answer_is_rewarded_and_limits_of_the_run_end_an_episode(model: Path) -> None:
    answer = f"={sum(calculator.task(0)):02d}"
    _, played, _ = rehearsed(config(model), ids(answer), print)
    assert (played.reward, played.finish, len(played.calls), played.parts["answered"]) == (
        1.0,
        "stop",
        1,
        1.0,
    )
    _, played, _ = rehearsed(config(model, episode_turns=2), ids("01+02"), print)
    assert (played.reward, played.stopped_by, len(played.calls)) == (0.0, "max_turns", 2)
    _, played, _ = rehearsed(config(model, episode_tokens=7), ids("01+02"), print)
    assert (played.stopped_by, len(played.calls)) == ("max_output_tokens", 2)


def test_where_steps_are_rewarded_each_number_added_and_the_right_answer_earn_a_quarter() -> None:
    terms = (7, 23, 11, 19)
    assert calculator.step_rewards(terms, calculator.turns_of(terms)) == [0.25, 0.25, 0.25, 0.25]
    assert calculator.step_rewards(terms, ["=60"]) == [0.25]
    assert calculator.step_rewards(terms, ["07+23", "07+23", "30+19", "30+11", "=41"]) == [
        0.25,
        0,
        0,
        0.25,
        0,
    ]
    assert calculator.step_rewards(terms, []) == []


def test_an_environment_that_rewards_steps_says_what_each_turn_earned_and_the_other_does_not(
    model: Path,
) -> None:
    """The model says its first step again and again: it earns once."""
    terms = calculator.task(0)
    step = ids(f"{terms[0]:02d}+{terms[1]:02d}")
    _, played, _ = rehearsed(config(model, environment="builtin:calculator-steps"), step, print)
    [row] = played.branches
    expected = [0.25, 0.0, 0.0, 0.0, 0.0]
    assert row.turns == tuple(RowTurn(n, len(step), reward) for n, reward in enumerate(expected))
    assert played.reward == 0.25
    _, same, _ = rehearsed(config(model), step, print)
    assert same.branches == (msgspec.structs.replace(row, turns=()),)
    assert same.reward == 0.0


def test_a_model_without_its_characters_is_refused_before_the_run_starts(model: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {k: v for k, v in tokenizer["model"]["vocab"].items() if k != "+"}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="has no tokens for"):
        rehearsed(config(model), ids("="), print)


@pytest.mark.parametrize(
    ("error", "helps"),
    [
        (
            "RuntimeError: failed to prepare uv script: curl: (6) Could not resolve host: astral.sh",
            "pip install uv",
        ),
        (
            "502 - Cannot use chat template functions because tokenizer.chat_template is not set",
            "chat template",
        ),
        ("502 - DefaultRenderer does not support tools. Choose a model-specific", "data.renderer"),
        ("502 - Special token '<|im_start|>' not found in tokenizer vocabulary", "another model"),
        ("KeyError: 'answer'", "look at data.environment_args"),
    ],
)
def test_the_remedy_of_a_failed_rehearsal_follows_from_its_words(error: str, helps: str) -> None:
    assert helps in remedy_of(f"HarnessError: Traceback\n{error}\n")


def test_a_failed_rehearsal_says_its_cause_first_and_its_traceback_once() -> None:
    trace = "Traceback (most recent call last):\n  File x\nHarnessError: exited 1: Traceback\n  File y\n502 - no tools\n"
    said = said_of("exited 1: Traceback\n  File y\n502 - no tools", trace)
    assert (said.count("File y"), said.count("File x")) == (1, 1)
    first, *rest = cause_first(said).splitlines()
    assert first == "502 - no tools"
    assert rest == trace.splitlines()[:-1]
    assert "why" in said_of("why", "Traceback")
    assert cause_first("") == ""


def test_settings_of_verifiers_environments_are_not_looked_at(model: Path) -> None:
    setup = setup_of(config(model), "http://here")
    builtin.check(msgspec.structs.replace(setup, environment="chess", arguments='{"a": 1}'))


# ---------------------------------------------------------------- two agents


def two(model: Path, **data: Any) -> RunConfig:
    return config(model, environment="builtin:proposer-solver", **data)


def test_rewards_of_the_proposer_and_the_solver() -> None:
    assert proposer_solver.rewards("+", None) == {"proposer": 0.0}
    assert proposer_solver.rewards("3", "4") == {"proposer": 1.0, "solver": 1.0}
    assert proposer_solver.rewards("9", "0") == {"proposer": 1.0, "solver": 1.0}
    assert proposer_solver.rewards("3", "5") == {"proposer": 0.5, "solver": 0.5}
    assert proposer_solver.rewards("3", ">") == {"proposer": 0.5, "solver": 0.0}
    assert proposer_solver.asked("12") == ""


def test_what_an_agent_of_another_run_says_is_apart_from_what_this_run_trains(model: Path) -> None:
    """A model that always says 3: the proposal is a digit, and the answer to it is wrong."""
    _, played, _ = rehearsed(two(model, policies={"solver": {"run": "s"}}), ids("3", ended=False), print)
    [other] = played.others
    assert (played.reward, other.run, other.reward) == (0.5, "s", 0.5)
    assert (played.calls, other.calls) == (("0.0",), ("1.0",))
    text = [calculator.ALPHABET[token] for token in array("i", other.branches[0].prompt)]
    assert "".join(text) == ">3"


def test_without_another_run_both_agents_are_trained_by_this_one(model: Path) -> None:
    _, played, _ = rehearsed(two(model), ids("3", ended=False), print)
    assert (played.others, played.calls, len(played.branches)) == ((), ("0.0", "1.0"), 2)


def test_an_agent_that_the_environment_does_not_have_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="'judge', which is no agent"):
        builtin.check(setup_of(two(model, policies={"judge": {"run": "s"}}), "http://here"))
