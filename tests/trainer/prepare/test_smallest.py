"""`scavenger init FOLDER --tiny`: a run that can be submitted as it is, with a model that is made in place and learns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from scavenger.cli.main import app
from scavenger.config import read_run
from tests.trainer.prepare.hand import ROOT
from trainer.data.prompts import open_tokenizer
from trainer.prepare import __main__ as program
from trainer.prepare import check, smallest
from trainer.tasks import sort


def make(folder: Path, *more: str) -> int:
    return program.main(["tiny", str(folder), *more])


@pytest.mark.parametrize("gpus", [0, 1])
def test_nothing_stops_it_as_it_was_written(gpus: int, site: Path, tmp_path: Path) -> None:
    folder = tmp_path / "first"
    assert make(folder, f"--state-dir={site}", "--partition=big", f"--gpus={gpus}") == 0
    script = (folder / "train.sbatch").read_text()
    assert "#SBATCH --partition=big\n" in script
    assert ("#SBATCH --gpus-per-node=1\n" in script) is bool(gpus)
    assert subprocess.run(["bash", "-n", str(folder / "train.sbatch")], check=False).returncode == 0
    found = list(check.check(folder / "run.toml", check.gpus_of(script)))
    assert [one.problem for one in found if one.problem] == []
    config = read_run(folder / "run.toml")
    assert (config.run.name, config.run.state_dir) == ("first", site)
    assert sum(path.stat().st_size for path in (folder / "model").iterdir()) < 2**20


def test_files_that_are_there_stay_and_an_unknown_site_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make(tmp_path / "first") == 0
    assert "SET THIS" in (tmp_path / "first" / "run.toml").read_text()
    assert "run.state_dir: NOT KNOWN, must be set" in capsys.readouterr().out
    assert make(tmp_path / "first") == 2
    assert "exist already" in capsys.readouterr().err
    assert make(tmp_path / "first", "--force") == 0
    assert make(tmp_path / "no name") == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "m", "--data", "d"], "leave --model out"),
        (["--environment", "builtin:calculator"], "python -m trainer.tiny make --task calculator"),
        (["--reward", "a:b", "--nodes", "2"], "--nodes, --reward"),
        (["--site"], "--site"),
    ],
)
def test_options_that_it_would_ignore_are_refused(words: list[str], said: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["init", str(tmp_path / "first"), "--tiny", *words], terminal_width=200)
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("│", "").split())
    assert not (tmp_path / "first").exists()


def test_with_data_of_a_user_s_own_it_makes_a_model_that_reads_any_text(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = ["3+4=", "Grüße, 漢字 \u200d🙂\n\tEnde"]
    rows = [{"question": said[at % 2], "level": at % 3} for at in range(200)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tmp_path / "mine"
    (folder / "model").mkdir(parents=True)
    (folder / "spread.py").write_text(
        "def digits(prompt, completion, meta):\n    return len(completion) / 100\n"
    )
    words = [f"--data={tmp_path}/own.jsonl", "--prompt-field=question", "--reward=spread:digits"]
    given = ["draft", str(folder), "--tiny", *words, "--engine=reference", "--gpus=1", f"--state-dir={site}"]
    assert program.main(given) == 0
    tokenizer = open_tokenizer(folder / "model")
    for text in said:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text
    found = list(check.check(folder / "run.toml", check.gpus_of((folder / "train.sbatch").read_text())))
    assert [one.problem for one in found if one.problem] == []
    config = read_run(folder / "run.toml")
    assert config.optimizer.lr == 5e-3, "random weights do not move at 1e-6"
    assert config.sampling.max_tokens == 16, "no answers: nothing is known of their lengths"
    *_, advice, last = capsys.readouterr().out.splitlines()
    assert "credit in parts" in advice
    assert "--local" in last


def test_the_command_makes_a_model_for_data_of_a_user_s_own(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"question": "3+4=", "answer": "7"}\n' * 100)
    words = ["init", str(tmp_path / "mine"), "--tiny", "--data", str(tmp_path / "own.jsonl"), "--gpus=0"]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "SCAVENGER_BACKEND": "local"}
    argv = [sys.executable, "-m", "scavenger", *words, "--reward", "trainer.verifiers:exact"]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    config = read_run(tmp_path / "mine/run.toml")
    assert (config.model.path, config.engine.name) == (tmp_path / "mine/model", "reference")
    assert config.data.path == tmp_path / "own.jsonl"
    assert config.sampling.max_tokens == 11, "a digit and little more"


def test_with_an_environment_it_makes_a_model_that_converses_and_has_tools(
    site: Path, tmp_path: Path
) -> None:
    from scavenger.gateway.dialects import parse_chat
    from scavenger.gateway.prompts import ModelFolder

    folder = tmp_path / "mine"
    words = ["--tiny", "--environment=words", "--environment-python=/envs/bin/python", "--gpus=0"]
    assert program.main(["draft", str(folder), *words, "--engine=reference", f"--state-dir={site}"]) == 0
    config = read_run(folder / "run.toml")
    assert (config.data.environment, config.data.renderer) == ("words", {"name": "qwen3"})
    assert config.model.context_length >= 4096
    made, special = ModelFolder(config.model.path, ()), [*smallest.CHAT_SPECIAL, *smallest.CHAT_TOKENS]
    assert all(len(made.tokens(token)) == 1 for token in special), "what the renderer needs is one token each"
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = {"type": "function", "id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    said = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "2 é"},
    ]
    text = made.render(parse_chat({"messages": said, "tools": [tool]}, made.vocabulary))
    for part in (
        '"name": "add"',
        '<tool_call>\n{"name": "add"',
        "<|im_start|>tool\n2 é<|im_end|>\n<|im_start|>assistant\n",
    ):
        assert part in text
    assert made.text(made.tokens(text), skip_special_tokens=False) == text
    assert made.ends == (made.tokens("<|im_end|>")[0],)


def test_the_reward_gives_a_part_for_each_right_digit_and_none_for_more_of_them() -> None:
    meta = {"answer": "012357"}
    given = {
        said: sort.closeness("305712>", said, meta) for said in ("012357", "012", "", "000000", "0123570")
    }
    assert given == {"012357": 1.0, "012": 0.5, "": 0.0, "000000": 1 / 6, "0123570": 6 / 7}


def test_its_prompts_and_completions_fit_into_its_context() -> None:
    prompt, meta = sort.prompt_task(1, 0)
    assert len(prompt) + len(meta["answer"]) + 1 <= smallest.CONTEXT_TOKENS


@pytest.mark.long
def test_it_learns_within_its_steps(site: Path, tmp_path: Path) -> None:
    """From the command to the last step, in one process: the reward at the end is well above that of random weights."""
    environ = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "SCAVENGER_BACKEND": "local",
    }
    folder = tmp_path / "first"
    words = ["init", str(folder), "--tiny", "--gpus=0", f"--state-dir={site}"]
    for argv in (["-m", "scavenger", *words], ["-m", "trainer", str(folder / "run.toml"), "--local"]):
        done = subprocess.run(
            [sys.executable, *argv], env=environ, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr
    assert open_tokenizer(folder / "model").get_vocab_size() == len(sort.ALPHABET)
    lines = (folder / "out" / "local" / "metrics.jsonl").read_text().splitlines()
    rewards = [one["reward"] for one in map(json.loads, lines) if one["kind"] == "train"]
    assert len(rewards) == smallest.STEPS
    assert sum(rewards[-5:]) / 5 > 1.5 * sum(rewards[:3]) / 3, rewards


def test_what_the_chat_model_says_comes_back_from_a_harness_as_the_same_tokens(tmp_path: Path) -> None:
    smallest.make_chat_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    made = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    prompt = "<|im_start|>user\nGrüße, 質問: <tool_call>\n<|im_end|>\n<|im_start|>assistant\n"
    heard = made.encode(prompt + smallest.CHAT_SAID).ids
    with torch.no_grad():
        chances = model(torch.tensor([heard])).logits[0].softmax(-1)
    vocabulary = made.get_vocab()
    said = {vocabulary[sign] for sign in (*smallest.CHAT_SAID, "<|im_end|>")}
    others = sorted(set(range(made.get_vocab_size())) - said)
    assert chances[:, others].sum(-1).max() < 1e-6, "whatever it read before"
    assert chances[:, sorted(said)].min() > 1e-3, "it says all of these, and ends"
    tokens = [vocabulary[sign] for sign in smallest.CHAT_SAID]
    assert made.encode(made.decode(tokens).strip()).ids == tokens
