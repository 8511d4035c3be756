"""examples/trl_grpo.py: TRL's own trainer, with a real daemon and a real engine."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scavenger.protocol import keys
from scavenger.protocol.messages import unpack_logprobs, unpack_tokens
from tests.router.edge import LiveDaemon
from trainer.tasks import sort

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("trl") is None, reason='trl is not installed: pip install ".[trl]"'
    ),
    pytest.mark.long,
    pytest.mark.timeout(600),
]
ROOT = Path(__file__).resolve().parents[2]
STEPS, PROMPTS, SAMPLES = 2, 3, 4
# TRL imports vLLM where there is one, which takes longer than all the rest, and generates nothing here.
WITHOUT_VLLM = "import runpy, sys; sys.modules['vllm'] = None; sys.argv[:] = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


@contextmanager
def an_engine(daemon: LiveDaemon) -> Iterator[None]:
    key = daemon.state_dir / "worker.key"
    argv = [sys.executable, "-m", "rollout", "--state-dir", str(daemon.state_dir), "--key", str(key)]
    keys.write_keypair(key, daemon.worker_key("j", "trl"))
    with (daemon.state_dir / "worker.log").open("wb") as log:
        started = subprocess.Popen([*argv, "--kind", "harvested", "--run", "trl"], stdout=log, stderr=log)
    try:
        yield
    finally:
        started.kill()
        started.wait()


def write_run(folder: Path, model: Path, state_dir: Path) -> Path:
    rows = [sort.prompt_task(0, index) for index in range(12)]
    (folder / "data.jsonl").write_text(
        "".join(json.dumps({"prompt": text, "answer": meta["answer"]}) + "\n" for text, meta in rows)
    )
    path = folder / "run.toml"
    path.write_text(f"""
[run]
name = "trl"
steps = {STEPS}
state_dir = "{state_dir}"
out_dir = "out"
[model]
path = "{model}"
context_length = 24
[data]
task = "jsonl"
path = "data.jsonl"
prompts_per_step = {PROMPTS}
samples_per_prompt = {SAMPLES}
[sampling]
max_tokens = 8
[reward]
function = "tests.system.rewards:even_share"
[optimizer]
lr = 1e-3
[checkpoint]
every = 1
[weights]
dtype = "float32"
""")
    return path


def test_trl_trains_on_what_engines_generated_and_every_step_is_committed(
    model_folder: Path, tmp_path: Path
) -> None:
    with LiveDaemon(tmp_path / "state") as daemon, an_engine(daemon):
        run = write_run(tmp_path, model_folder, daemon.state_dir)
        argv = [sys.executable, "-c", WITHOUT_VLLM, str(ROOT / "examples" / "trl_grpo.py"), str(run)]
        environ = os.environ | {
            "TRL_EXPERIMENTAL_SILENCE": "1",
            "HF_DATASETS_CACHE": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": "1",
            # As Python puts a script's own folder there, which `run_path` does not.
            "PYTHONPATH": os.pathsep.join([str(ROOT / "examples"), str(ROOT)]),
        }
        done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, (
            done.stderr[-3000:] + (daemon.state_dir / "worker.log").read_text()[-2000:]
        )
        steps = daemon.query(
            "SELECT step, version FROM steps WHERE purpose = 'train' AND rewound_by IS NULL ORDER BY step"
        )
        assert [tuple(row) for row in steps] == [(1, 1), (2, 2)]
        samples = daemon.query("SELECT state, reward, finish FROM samples")
        assert [row[0] for row in samples] == ["consumed"] * STEPS * PROMPTS * SAMPLES
        assert all(row[1] is not None for row in samples)
        roots = daemon.query("SELECT root FROM weight_versions ORDER BY version")
        assert len({row[0] for row in roots}) == STEPS + 1, "the weights did not change"
        assert [row[0] for row in daemon.query("SELECT state FROM runs")] == ["finished"]
        _agree(daemon, model_folder)


def _agree(daemon: LiveDaemon, folder: Path) -> None:
    """The first step's recorded logprobs are those of the published weights."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows: list[Any] = daemon.query(
        "SELECT g.prompt, c.tokens, c.logprobs FROM chunks c JOIN samples s ON s.sample_id = c.sample_id "
        "JOIN groups g ON g.group_id = s.group_id WHERE g.step = 1 AND c.start_len = 0"
    )
    assert rows
    for prompt, tokens, logprobs in rows:
        first, answer = list(unpack_tokens(prompt)), list(unpack_tokens(tokens))
        with torch.no_grad():
            found = torch.log_softmax(
                model(torch.tensor([first + answer])).logits[0, len(first) - 1 : -1], -1
            )
        exact = found.gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()
        assert max(abs(a - b) for a, b in zip(exact, unpack_logprobs(logprobs), strict=True)) < 1e-4
