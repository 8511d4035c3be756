"""A whole run on an environment of `verifiers`: daemon, gateway, a real engine, environment workers in another interpreter, the trainer.

Where the tests' own Python has no `verifiers`, the interpreter named by SCAVENGER_VERIFIERS_PYTHON is taken; without either they are
skipped. The test marked `long` makes such an interpreter, and so is never skipped where the package index can be reached.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from scavenger.protocol import keys
from tests.gateway.conftest import write_model
from tests.router.edge import LiveDaemon
from tests.trainer.episodes.interpreters import needs_verifiers, python_with_verifiers
from trainer import tiny

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = "counting_env"
STEPS, PROMPTS, SAMPLES, TURNS = 2, 2, 4, 3


def write_talker(folder: Path) -> Path:
    """A tiny decoder over single characters, with a chat template."""
    write_model(folder)
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    config = tiny.model_config(hidden=32, layers=2) | {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": size,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "max_position_embeddings": 512,
    }
    (folder / "config.json").write_text(json.dumps(config))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    parameters = {name: value.detach().contiguous() for name, value in model.named_parameters()}
    save_file(parameters, folder / "model.safetensors", {"format": "pt"})
    return folder


@contextmanager
def an_engine(daemon: LiveDaemon) -> Iterator[None]:
    key = daemon.state_dir / "worker.key"
    argv = [sys.executable, "-m", "rollout", "--state-dir", str(daemon.state_dir), "--key", str(key)]
    keys.write_keypair(key, daemon.worker_key("j", "agents"))
    with (daemon.state_dir / "worker.log").open("wb") as log:
        started = subprocess.Popen([*argv, "--kind", "harvested", "--run", "agents"], stdout=log, stderr=log)
    try:
        yield
    finally:
        started.kill()
        started.wait()


def write_run(
    folder: Path, model: Path, state_dir: Path, python: str, harness: str = "", more: str = ""
) -> Path:
    path = folder / "run.toml"
    path.write_text(f"""
[run]
name = "agents"
steps = {STEPS}
state_dir = "{state_dir}"
out_dir = "out"
[model]
path = "{model}"
context_length = 400
[data]
environment = "{ENVIRONMENT}"
environment_args = {{ taskset = {{ tasks = 5, turns = {TURNS} }}, agent = {{ harness = {{ id = "{ENVIRONMENT}"{harness} }} }} }}
environment_python = "{python}"
renderer = {{ name = "default" }}
prompts_per_step = {PROMPTS}
samples_per_prompt = {SAMPLES}
{more}
[sampling]
max_tokens = 8
[optimizer]
lr = 1e-2
[checkpoint]
every = 1
[eval]
prompts = 1
[weights]
dtype = "float32"
""")
    return path


def train(run: Path, seconds: float = 1000) -> subprocess.CompletedProcess[str]:
    """The trainer as a job's only rank."""
    here = str(Path(__file__).parent)
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), here]),
        "SCAVENGER_BACKEND": "local",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, "-m", "trainer", str(run)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def check_trained(daemon: LiveDaemon, folder: Path, done: subprocess.CompletedProcess[str]) -> None:
    """Every step was taken with its episodes, whose rows are what the engines said."""
    log = (daemon.state_dir / "worker.log").read_text()[-1500:]
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}\n{log}"
    steps = daemon.query(
        "SELECT step FROM steps WHERE purpose = 'train' AND rewound_by IS NULL ORDER BY step"
    )
    assert [row[0] for row in steps] == list(range(1, STEPS + 1))
    states = daemon.query(
        "SELECT e.name, s.state, s.reward FROM episodes e JOIN turns u ON u.episode_id = e.episode_id "
        "JOIN samples s ON s.group_id = u.group_id"
    )
    names = {str(row[0]) for row in states}
    played = {name for name in names if name.startswith("train-")}
    assert len(played) >= STEPS * PROMPTS * SAMPLES
    assert {row[1] for row in states if str(row[0]) in played} <= {"consumed", "filtered", "surplus"}
    assert any(row[1] == "consumed" and row[2] is not None for row in states)
    assert not daemon.query("SELECT 1 FROM episodes WHERE state = 'open'")
    for line in metrics_of(folder):
        assert line["turns_mean"] == TURNS
        assert line["mismatch_max"] < 1e-3, "the trainer's logprobs of masked-in tokens are the engine's"
        assert 0 < line["tokens_trained"] <= line["tokens"]
        assert line["reward_answers"] == TURNS
        assert line["reward_digits"] == pytest.approx(line["reward"])
    roots = daemon.query("SELECT root FROM weight_versions")
    assert len({row[0] for row in roots}) == STEPS + 1, "the weights did not change"
    assert [row[0] for row in daemon.query("SELECT state FROM runs")] == ["finished"]


@needs_verifiers
@pytest.mark.timeout(1200)
def test_a_run_trains_on_an_environment_of_several_turns(tmp_path: Path) -> None:
    with LiveDaemon(tmp_path / "state") as daemon, an_engine(daemon):
        model = write_talker(tmp_path / "model")
        run = write_run(tmp_path, model, daemon.state_dir, str(python_with_verifiers()))
        check_trained(daemon, tmp_path, train(run))


@needs_verifiers
@pytest.mark.timeout(1200)
def test_a_lost_environment_worker_costs_no_token(tmp_path: Path) -> None:
    """Killed within an episode: its recorded turns are played to it again, and the ledger has each call once."""
    with LiveDaemon(tmp_path / "state") as daemon, an_engine(daemon):
        model = write_talker(tmp_path / "model")
        killed = f', die_once = "{tmp_path / "killed"}"'
        run = write_run(tmp_path, model, daemon.state_dir, str(python_with_verifiers()), killed)
        done = train(run)
        assert (tmp_path / "killed").exists()
        assert "an environment worker ended (exit status -9)" in done.stdout
        check_trained(daemon, tmp_path, done)
        calls = daemon.query("SELECT episode_id, count(*) FROM turns GROUP BY episode_id")
        assert {row[1] for row in calls} == {TURNS}, (
            "no call was generated twice, and no episode had another life"
        )
        assert not daemon.query("SELECT 1 FROM samples WHERE state = 'surplus'")


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_the_same_in_an_interpreter_that_is_made_for_it(tmp_path: Path) -> None:
    """As docs/environments.md says: a venv of its own, with the extra `verifiers`."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "envs")], check=True)
    pip = [str(tmp_path / "envs" / "bin" / "python"), "-m", "pip", "install", "-q", f"{ROOT}[verifiers]"]
    installed = subprocess.run(pip, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"no package index that has verifiers 0.4: {installed.stderr.strip().splitlines()[-1:]}")
    with LiveDaemon(tmp_path / "state") as daemon, an_engine(daemon):
        model = write_talker(tmp_path / "model")
        killed = f', die_once = "{tmp_path / "killed"}"'
        run = write_run(tmp_path, model, daemon.state_dir, pip[0], killed)
        done = train(run)
        assert (tmp_path / "killed").exists()
        check_trained(daemon, tmp_path, done)
