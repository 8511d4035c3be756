"""Environments of the `verifiers` package: with the real one (extra `[verifiers]`) where it is installed, and what is refused without."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scavenger.config import read_run
from scavenger.errors import ConfigError, RewardError
from tests.trainer.prepare.hand import draft, refused
from trainer.algorithms.rewards import RewardRunner
from trainer.data import environments

ROOT = Path(__file__).resolve().parents[2]
FUNCTION = "trainer.data.environments:reward"
real = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None, reason='no verifiers here: pip install ".[verifiers]"'
)

#: As those of the hub are: a module with a `load_environment`.
SUMS = """
import os
import verifiers as vf
from datasets import Dataset

class Drifting(vf.SingleTurnEnv):
    async def get_prompt_messages(self, state):
        return [*state["prompt"], vf.UserMessage(content=os.environ.get("SUMS_MORE", "Be short."))]

def right(parser, completion, answer, **kwargs):
    return parser.parse_answer(completion) == answer

async def easy(prompt, completion, info, state):
    assert state["trajectory"][0]["completion"][-1].content == completion[-1].content
    assert [turn.role for turn in prompt] == ["system", "user", "assistant", "user"]
    return info["level"]

def short(completion):
    return int(completion[-1]["content"].removeprefix("<answer>").removesuffix("</answer>")) < 100

def best(completions):
    return [1.0 for _ in completions]

def sums(count, level=1):
    return Dataset.from_list([{"question": f"{n} + {n}?", "answer": str(2 * n), "info": {"level": level}} for n in range(count)])

def load_environment(kind="plain", count=3):
    parser = vf.XMLParser(["answer"], answer_field="answer")
    one = {"dataset": sums(count), "system_prompt": "Add."}
    if kind == "tools":
        return vf.ToolEnv(tools=[], **one)
    if kind == "several turns":
        class Turns(vf.MultiTurnEnv):
            async def env_response(self, messages, state, **kwargs):
                return []
        return Turns(max_turns=3, **one)
    if kind == "judge":
        return vf.SingleTurnEnv(rubric=vf.JudgeRubric(judge_client=object()), **one)
    if kind == "group":
        return vf.SingleTurnEnv(rubric=vf.Rubric(funcs=[best]), **one)
    if kind == "math":
        return vf.SingleTurnEnv(rubric=vf.MathRubric(), **one)
    if kind == "drifting":
        return Drifting(rubric=vf.Rubric(funcs=[lambda: 1.0]), **one)
    if kind == "both":
        return vf.EnvGroup([load_environment("math", 1), load_environment("drifting", 1)])
    assert kind == "plain", "no such kind"
    few = [{"role": "user", "content": "7 + 7?"}, {"role": "assistant", "content": "<answer>14</answer>"}]
    rubric = vf.Rubric(funcs=[right, easy, short], weights=[1.0, 0.25, 0.5], parser=parser)
    return vf.SingleTurnEnv(eval_dataset=sums(2, level=2), few_shot=few, parser=parser, rubric=rubric, **one)
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "their_sums.py").write_text(SUMS)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    )
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    return tmp_path


def written(folder: Path, kind: str, *more: str) -> list[dict[str, Any]]:
    """The training rows that the command writes."""
    words = ["their-sums", str(folder), "--args", json.dumps({"kind": kind}), *more]
    done = subprocess.run(
        [sys.executable, "-m", "trainer.data.environments", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return read(folder / "train.jsonl")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def runner(kind: str, **options: Any) -> RewardRunner:
    options = {"environment": "their-sums", "args": {"kind": kind}} | options
    return RewardRunner(FUNCTION, timeout_s=30.0, retries=0, options=options, start_timeout_s=200.0)


@real
def test_rows_hold_the_prompts_that_the_environment_sends_and_rewards_are_its_rubric_s(hub: Path) -> None:
    rows = written(hub / "rows", "plain")
    assert [row["answer"] for row in rows] == ["0", "2", "4"]
    assert rows[1]["prompt"] == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "7 + 7?"},
        {"role": "assistant", "content": "<answer>14</answer>"},
        {"role": "user", "content": "1 + 1?"},
    ]
    held_out = read(hub / "rows" / "test.jsonl")
    assert [row["verifiers"]["input"]["info"] for row in held_out] == [{"level": 2}] * 2
    with runner("plain") as rewards:
        assert rewards.score("", "<answer>2</answer>", rows[1]) == 1.75
        assert rewards.score("", "<answer>3</answer>", rows[1]) == 0.75
        assert rewards.score("", "<answer>300</answer>", rows[1]) == 0.25
        assert rewards.score("", "<answer>2</answer>", held_out[1]) == 2.0
        with pytest.raises(RewardError, match="it raised ValueError: invalid literal for int"):
            rewards.score("", "two", rows[1])
        with pytest.raises(RewardError, match="no row of 'their-sums'"):
            rewards.score("", "two", {"answer": "2"})
        version = rewards.version
    (hub / "their_sums.py").write_text(SUMS.replace("< 100", "< 1000"))
    with runner("plain", on_error="zero") as rewards:
        assert rewards.score("", "two", rows[1]) == 0.25, "as the package has it"
        assert rewards.score("", "<answer>300</answer>", rows[1]) == 0.75
        assert rewards.version != version


@real
def test_what_the_environment_adds_to_a_prompt_is_written_and_must_be_added_again(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = written(hub / "rows", "both")
    assert [row["prompt"][-1]["content"] for row in rows] == ["0 + 0?", "Be short."], (
        "a group of environments"
    )
    with runner("both") as rewards:
        assert rewards.score("", "\\boxed{0}", rows[0]) == 1.0
        assert rewards.score("", "\\boxed{1}", rows[0]) == 0.0
        assert rewards.score("", "", rows[1]) == 1.0
    monkeypatch.setenv("SUMS_MORE", "Be long.")
    with runner("both") as rewards, pytest.raises(RewardError, match="another prompt of this row"):
        rewards.score("", "", rows[1])


@real
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("tools", "is a ToolEnv, which may take several turns"),
        ("several turns", "is a Turns, which may take several turns"),
        ("judge", "asks a judge model"),
        ("group", "the function best judges those of a group together"),
        ("none", "cannot be loaded with args = .*no such kind"),
    ],
)
def test_an_environment_that_is_not_supported_is_refused_before_the_first_reward(
    hub: Path, kind: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{why}[\s\S]*remedy: "), runner(kind):
        pass


@real
def test_an_environment_that_is_not_installed_is_refused_and_written_rows_stay(hub: Path) -> None:
    with (
        pytest.raises(
            ConfigError,
            match=r"'no-such-env' cannot be loaded.*ModuleNotFoundError[\s\S]*install its package",
        ),
        runner("", environment="no-such-env"),
    ):
        pass
    (hub / "rows").mkdir()
    (hub / "rows" / "train.jsonl").write_text("{}\n")
    words = [sys.executable, "-m", "trainer.data.environments", "their-sums", str(hub / "rows")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, read(hub / "rows" / "train.jsonl")) == (2, [{}])
    assert "exist already" in done.stderr
    assert len(written(hub / "rows", "plain", "--force")) == 3


@pytest.mark.parametrize("version", ["0.1.11", "0.1.14", "0.1.15.dev3"])
def test_the_classic_api_is_supported(version: str) -> None:
    environments.check_version(version)


@pytest.mark.parametrize(
    ("version", "why"),
    [
        (None, "has no verifiers package"),
        ("0.1.10", "too old"),
        ("0.1.9.post3", "too old"),
        ("0.2.0", "another"),
        ("1.0", "another"),
    ],
)
def test_other_releases_are_refused_with_what_to_install(version: str | None, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"{why}[\s\S]*pip install 'verifiers>=0.1.11,<0.2'"):
        environments.check_version(version)


@pytest.fixture
def rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python that says that it has the rewritten package."""
    (tmp_path / "verifiers-0.4.0.dist-info").mkdir()
    (tmp_path / "verifiers-0.4.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: verifiers\nVersion: 0.4.0\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))


@pytest.mark.usefixtures("rewritten")
def test_a_package_that_does_not_fit_is_told_with_its_remedy_before_a_job_is_submitted(
    tmp_path: Path, model_folder: Path
) -> None:
    with (
        pytest.raises(ConfigError, match=r"verifiers 0\.4\.0 has another API[\s\S]*remedy: pip install"),
        runner("plain"),
    ):
        pass
    row = {
        "prompt": "2>",
        "answer": "4",
        "verifiers": {"environment": "their-sums", "args": {}, "sent": "0", "input": {}},
    }
    (tmp_path / "data.jsonl").write_text((json.dumps(row) + "\n") * 9)
    assert draft(tmp_path / "run", model_folder, tmp_path / "data.jsonl") == 0
    assert "has another API" in refused(tmp_path / "run" / "run.toml")["reward"]


@pytest.mark.parametrize(
    ("turn", "why"),
    [
        ({"role": "user", "content": [{"type": "image_url"}]}, "not text"),
        ({"role": "tool", "content": "4", "tool_call_id": "1"}, "'tool' with tools"),
        ({"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}, "'assistant' with tools"),
    ],
)
def test_turns_that_no_chat_template_renders_as_text_are_refused(turn: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        environments._turns([{"role": "user", "content": "2 + 2?", "tool_calls": None}, turn])


def test_turns_are_written_without_what_is_empty_and_a_bare_text_as_text() -> None:
    turn = {"role": "user", "content": "2 + 2?"}
    assert environments._turns([turn | {"tool_calls": None}]) == [turn]
    assert environments._turns([{"role": "text", "content": "2 + 2 ="}]) == "2 + 2 ="


def test_a_run_of_written_rows_is_drafted_with_their_environment(tmp_path: Path, model_folder: Path) -> None:
    args = {"split": 'ha"rd', "levels": [1, 2.5], "more": {"shuffle it": True, "none": None}}
    carried = {"environment": "their-sums", "args": args, "sent": "0", "input": {}}
    row = {"prompt": [{"role": "user", "content": "2"}], "answer": "$4$", "verifiers": carried}
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    assert draft(tmp_path / "run", model_folder, tmp_path) == 0
    found = read_run(tmp_path / "run" / "run.toml")
    assert found.reward.function == FUNCTION
    assert 'options = { environment = "their-sums", args = {' in (tmp_path / "run" / "run.toml").read_text()
    assert found.reward.options == {
        "environment": "their-sums",
        "args": args | {"more": {"shuffle it": True}},
    }
    assert (found.data.system, found.eval.path) == ("", tmp_path / "test*.jsonl"), (
        "the environment has a system turn of its own"
    )
