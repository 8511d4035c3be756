"""Agents that know nothing of us, as `verifiers` starts them: programs of others, which call a shell, through our gateway to a real engine.

The model is made by hand, so that it does the task: it calls the shell, and once it has read an answer it says another thing. All else is
real: the trainer, its gateway, a reference engine, the environment worker, the harness that uv installs from the package index.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from scavenger.protocol.messages import unpack_tokens
from tests.router.edge import LiveDaemon
from tests.trainer.episodes.interpreters import needs_verifiers, python_with_verifiers
from tests.trainer.episodes.test_whole_run import an_engine, metrics_of, train
from trainer import tiny
from trainer.prepare.smallest import CHAT_SPECIAL, CHAT_TEMPLATE, CHAT_TOKENS, byte_tokenizer

pytestmark = [needs_verifiers, pytest.mark.long, pytest.mark.timeout(1800)]
ENVIRONMENT = "shell_env"
SAMPLES, CONTEXT = 2, 12_288
END = CHAT_SPECIAL[0]
#: What ends mini-swe-agent's episode: the first line of a command's output.
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SAID = "It is done."


def call_of(command: str) -> str:
    """A call of the shell, as both programs name it."""
    return "\n" + json.dumps({"name": "bash", "arguments": {"command": command}}) + "\n"


WRITES, SUBMITS = call_of("echo 42 > done; cat done"), call_of(SUBMIT)


@torch.no_grad()
def write_agent(folder: Path, later: dict[str, str]) -> Path:
    """A model that calls the shell. `later`: at the token, its one key, it says the other once it has read a tool's answer.

    One layer. Its attention is the mean over all that it reads, and writes a channel of its own where that holds `</tool_response>`; the
    head has what follows each token, and what follows with that channel.
    """
    folder.mkdir()
    made = byte_tokenizer()
    made.add_special_tokens(list(CHAT_SPECIAL))
    made.add_tokens([*CHAT_TOKENS, *(AddedToken(text, normalized=False) for text in (WRITES, SUBMITS, SAID))])
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": CHAT_TEMPLATE}))
    at = dict(made.get_vocab())
    at["\n"] = made.encode("\n").ids[0]
    read, hidden = made.get_vocab_size(), 320
    assert read < hidden
    config = tiny.model_config(hidden, 1) | {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": read,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": at[END],
        "pad_token_id": at[END],
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.fill_(1.0 if "norm" in name else 0.0)
    model.get_input_embeddings().weight[:] = torch.eye(read, hidden)
    attention, head = model.model.layers[0].self_attn, model.get_output_embeddings().weight
    attention.v_proj.weight[0, at["</tool_response>"]] = 1.0
    attention.o_proj.weight[read, 0] = 2000.0  # the mean is over thousands of tokens
    [(where, instead)] = later.items()
    head[at[instead], read] = 6.0
    for token, follows in {
        "\n": "<tool_call>",
        "<tool_call>": WRITES,
        WRITES: "</tool_call>",
        SUBMITS: "</tool_call>",
        "</tool_call>": END,
        SAID: END,
    }.items():
        head[at[follows], at[token]] = 10.0 if token == where else 1000.0
    parameters = {name: value.detach().contiguous() for name, value in model.named_parameters()}
    save_file(parameters, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_run(folder: Path, model: Path, state_dir: Path, harness: str) -> Path:
    path = folder / "run.toml"
    path.write_text(f"""
[run]
name = "agents"
steps = 1
state_dir = "{state_dir}"
out_dir = "out"
[model]
path = "{model}"
context_length = {CONTEXT}
[data]
environment = "{ENVIRONMENT}"
environment_args = {{ agent = {{ harness = {{ id = "{harness}" }} }} }}
environment_python = "{python_with_verifiers()}"
renderer = {{ name = "qwen3" }}
prompts_per_step = 1
samples_per_prompt = {SAMPLES}
[sampling]
max_tokens = 16
[optimizer]
lr = 1e-6
[eval]
every = 0
[weights]
dtype = "float32"
""")
    return path


def install(program: str) -> None:
    """What the harness would have uv install at its first episode; else no test. `program`: Python that prints its script."""
    python = Path(str(python_with_verifiers()))
    uv = shutil.which("uv") or shutil.which("uv", path=str(python.parent))
    if uv is None:
        pytest.skip("no program uv, which installs the programs of harnesses")
    script = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(script)
        file.flush()
        argv = [uv, "sync", "--script", file.name, "-q", "--no-config"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no package index that has the harness's program: {done.stderr.strip()[-300:]}")


def said(daemon: LiveDaemon, model: Path) -> dict[str, list[str]]:
    """By episode the words of its turns, in their order."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    rows: Any = daemon.query(
        "SELECT e.name, u.number, c.tokens FROM episodes e JOIN turns u ON u.episode_id = e.episode_id "
        "JOIN samples s ON s.group_id = u.group_id JOIN chunks c ON c.sample_id = s.sample_id "
        "ORDER BY e.name, u.number, c.start_len"
    )
    turns: dict[tuple[str, int], list[int]] = {}
    for name, number, tokens in rows:
        turns.setdefault((name, number), []).extend(unpack_tokens(tokens))
    found: dict[str, list[str]] = {}
    for (name, _), ids in turns.items():
        found.setdefault(name, []).append(tokenizer.decode(ids, skip_special_tokens=False))
    return found


def play(folder: Path, harness: str, later: dict[str, str]) -> dict[str, list[str]]:
    """One step of a run whose episodes the harness plays: what the model said in each, which is trained and rewarded."""
    model = write_agent(folder / "model", later)
    with LiveDaemon(folder / "state") as daemon, an_engine(daemon):
        done = train(write_run(folder, model, daemon.state_dir, harness))
        log = (daemon.state_dir / "worker.log").read_text()[-1500:]
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{log}"
        turns = said(daemon, model)
        rows: Any = daemon.query(
            "SELECT e.state, s.reward, u.parent_id <> 0, u.number FROM episodes e JOIN turns u ON u.episode_id = e.episode_id "
            "JOIN samples s ON s.group_id = u.group_id"
        )
        assert {tuple(row)[:2] for row in rows} == {("ended", 1.0)}, (rows, turns, done.stdout[-3000:])
        assert all(bool(goes_on) == (number > 1) for _, _, goes_on, number in rows)
    [step] = metrics_of(folder)
    assert step["turns_mean"] == step["reward_answers"] == 2
    assert step["branches_mean"] == 1, "the second turn goes on from the first: one row"
    assert len(turns) == SAMPLES
    return turns


def test_the_harness_bash_plays_episodes_through_the_gateway(tmp_path: Path) -> None:
    install("from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE as source; print(source)")
    turns = play(tmp_path, "bash", {"\n": SAID})
    assert set(map(tuple, turns.values())) == {(f"<tool_call>{WRITES}</tool_call>{END}", f"{SAID}{END}")}


def test_mini_swe_agent_plays_episodes_through_the_gateway(tmp_path: Path) -> None:
    install(
        "from verifiers.v1.harnesses.mini_swe_agent import harness as it;"
        "print(it.PROGRAM_SOURCE.replace('{version}', it.MiniSWEAgentHarnessConfig().version))"
    )
    turns = play(tmp_path, ENVIRONMENT, {"<tool_call>": SUBMITS})
    assert set(map(tuple, turns.values())) == {
        (f"<tool_call>{WRITES}</tool_call>{END}", f"<tool_call>{SUBMITS}</tool_call>{END}")
    }
