"""examples/prime_rl.py: prime-rl's orchestrator and environment server as they are installed, a real daemon, gateway and engine.

prime-rl is not on PyPI and needs Python 3.12: `SCAVENGER_PRIME_RL_PYTHON` names one that has it (docs/your-trainer.md). Two kernels'
packages that its imports name, and nothing here calls, stand as names; so does its trainer, which needs GPUs (prime_rl_side).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scavenger.protocol import keys
from tests.router.edge import LiveDaemon

PYTHON = os.environ.get("SCAVENGER_PRIME_RL_PYTHON", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="SCAVENGER_PRIME_RL_PYTHON names no Python that has prime-rl"),
    pytest.mark.long,
    pytest.mark.timeout(2400),
]
ROOT = Path(__file__).resolve().parents[2]
SIDE = Path(__file__).with_name("prime_rl_side")
STEPS, PROMPTS, SAMPLES = 4, 4, 4
#: prime-rl's imports take minutes where a machine is busy.
DEADLINE_S = 2000.0
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
#: What prime-rl's orchestrator imports and never calls: for its trainer's attention, and for weights over NCCL.
NAMES = {
    "flash_attn/__init__.py": "",
    "flash_attn/flash_attn_interface.py": "_flash_attn_varlen_forward = _flash_attn_varlen_backward = None\n"
    "_flash_attn_forward = _flash_attn_backward = None\n",
    "flash_attn-2.8.3.dist-info/METADATA": "Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n",
    "flash_attn-2.8.3.dist-info/top_level.txt": "flash_attn\n",
    "vllm/__init__.py": "",
    "vllm/distributed/__init__.py": "",
    "vllm/distributed/utils.py": "StatelessProcessGroup = None\n",
    "vllm/distributed/device_communicators/__init__.py": "",
    "vllm/distributed/device_communicators/pynccl.py": "PyNcclCommunicator = None\n",
}


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.5)


@contextlib.contextmanager
def process(log: Path, *argv: str, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        started = subprocess.Popen(
            argv,
            stdout=file,
            stderr=file,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | environ,
            start_new_session=True,  # prime-rl's processes end with the test
        )
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def write_run(folder: Path, model: Path) -> Path:
    (folder / "data.jsonl").write_text(json.dumps({"prompt": "123456>", "answer": "123456"}) + "\n")
    (folder / "out").mkdir()
    settings = json.loads((model / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (folder / "model").mkdir()
    for file in model.iterdir():
        (folder / "model" / file.name).write_bytes(file.read_bytes())
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    path = folder / "run.toml"
    path.write_text(f"""
[run]
name = "prime"
steps = {STEPS}
state_dir = "{folder / "state"}"
out_dir = "out"
[model]
path = "{folder / "model"}"
context_length = 24
[data]
task = "jsonl"
path = "data.jsonl"
prompts_per_step = {PROMPTS}
samples_per_prompt = {SAMPLES}
[sampling]
max_tokens = 8
[engine]
name = "reference"
max_batch = 8
[reward]
function = "tests.system.rewards:even_share"
[weights]
dtype = "float32"
""")
    return path


def write_prime(folder: Path, gateway: int, admin: int) -> str:
    """prime-rl's own configuration. Returns the command that starts its processes."""
    server = f"tcp://127.0.0.1:{free_port()}"
    agent = """
[{0}.taskset]
id = "scavenger_even"
[{0}.agent.harness]
id = "scavenger_even"
[{0}.agent.runtime]
type = "subprocess"
"""
    (folder / "env.toml").write_text(f"""
output_dir = "{folder / "prime"}"
[serve]
address = "{server}"
[serve.pool]
type = "static"
num_workers = 1
{agent.format("env")}""")
    (folder / "orchestrator.toml").write_text(f"""
output_dir = "{folder / "prime"}"
max_steps = {STEPS}
batch_size = {PROMPTS * SAMPLES}
group_size = {SAMPLES}
seq_len = 64
[model]
name = "{folder / "model"}"
[model.client]
base_url = "http://127.0.0.1:{gateway}/v1"
admin_base_url = ["http://127.0.0.1:{admin}"]
api_key_var = "SCAVENGER_API_KEY"
[renderer]
name = "default"
[rollout_transport]
type = "filesystem"
[concurrency]
min_inflight = {PROMPTS * SAMPLES}
max_inflight = {PROMPTS * SAMPLES}
[train.sampling]
max_completion_tokens = 8
[[train.source]]
name = "even"
[train.source.serve]
address = "{server}"
{agent.format("train.source.env")}""")
    for name, text in NAMES.items():
        path = folder / "imports" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    programs = Path(PYTHON).parent
    trainer = f"{PYTHON} {SIDE / 'stand_in_trainer.py'} {folder / 'model'} {folder / 'prime'} {STEPS} {folder / 'report.jsonl'}"
    return (
        f"export PYTHONPATH={SIDE}:{folder / 'imports'} PATH={programs}:$PATH HF_HUB_OFFLINE=1 WANDB_MODE=disabled\n"
        f"env-server @ {folder / 'env.toml'} & {trainer} & orchestrator @ {folder / 'orchestrator.toml'}"
    )


def test_prime_rl_s_orchestrator_takes_its_steps_from_harvested_engines(
    model_folder: Path, tmp_path: Path
) -> None:
    run = write_run(tmp_path, model_folder)
    gateway, admin = free_port(), free_port()
    command = write_prime(tmp_path, gateway, admin)
    log = tmp_path / "prime.log"
    with contextlib.ExitStack() as leaving:
        daemon = leaving.enter_context(LiveDaemon(tmp_path / "state"))
        key = daemon.state_dir / "engine.key"
        keys.write_keypair(key, daemon.worker_key("job-engine", "prime"))
        argv = (sys.executable, "-m", "rollout", "--state-dir", str(daemon.state_dir), "--key", str(key))
        leaving.enter_context(
            process(tmp_path / "engine.log", *argv, "--kind", "harvested", "--run", "prime")
        )
        argv = (sys.executable, "-m", "scavenger", "gateway", str(run), "--port", str(gateway))
        leaving.enter_context(
            process(tmp_path / "gateway.log", *argv, "--logprobs-mode", "processed_logprobs")
        )
        wait_for((tmp_path / "out" / f"gateway.{socket.gethostname()}.json").exists)
        script = (sys.executable, str(ROOT / "examples/prime_rl.py"), str(run), "--port", str(admin))
        example = leaving.enter_context(
            process(log, *script, "--output-dir", str(tmp_path / "prime"), "--", "sh", "-c", command)
        )
        assert example.wait(DEADLINE_S) == 0, log.read_text()[-6000:]
        steps = daemon.query("SELECT step, version FROM steps ORDER BY step")
        versions = daemon.query("SELECT count(DISTINCT root) FROM weight_versions")
        states = [row[0] for row in daemon.query("SELECT state FROM runs")]
        used = daemon.query("SELECT count(DISTINCT version) FROM leases")
    reports = [json.loads(line) for line in (tmp_path / "report.jsonl").read_text().splitlines()]

    assert len(reports) >= STEPS - 1, "the orchestrator wrote no batches"
    assert reports[0]["furthest"] < 1e-3, "the first weights generated the first batch"
    drawn = [tuple(sample) for sample in reports[0]["samples"]]
    assert len(set(drawn)) > PROMPTS, "the rollouts of a group are draws of their own"
    assert states == ["finished"]
    assert [row[0] for row in steps] == list(range(1, len(steps) + 1))
    assert len(steps) >= STEPS - 2
    assert int(str(versions[0][0])) == len(steps) + 1
    assert int(str(used[0][0])) > 1, "later weights generated too"
