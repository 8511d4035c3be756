"""TRL's AsyncGRPOTrainer on harvested GPUs: rollouts through the run's gateway, weights by our client. How to: docs/your-trainer.md.

    pip install ".[trl,gateway]" vllm                # TRL's rollout worker refuses to start without vLLM, which generates nothing here
    scavenger gateway run.toml --logprobs-mode processed_logprobs &
    python examples/trl_async_grpo.py run.toml

The trainer, its rollout worker and its loss are TRL's own. Passed in are a `weight_transfer`, for which TRL has an argument, and the
gateway's URL as `vllm_server_base_url`. Needs a GPU, as TRL's trainer does. The daemon of `run.state_dir` runs, and engines come as for any
run. What is used of run.toml: as by trl_grpo.py, but each row's `prompt` becomes a user's message. One training process.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from datasets import load_dataset
from publishing import DaemonRun, gateway_key
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from scavenger.config import RunConfig, read_run
from scavenger.weights import files

#: The name of this trainer at its gateway, and so of the episodes that its calls are turns of.
CLIENT = "trl"


class Fleet(DaemonRun):
    """One run of a daemon as TRL sees it: a `weight_transfer`, and a callback that knows which step is which.

    TRL calls this callback before its own, which syncs the weights.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config, files.read_tokenizer(config.model.path))
        self._step = self._committed = 0

    # ---------------------------------------------------------------- TRL's WeightTransferProtocol

    def init_weight_transfer(self) -> None:
        """TRL loaded its checkpoint, and has called `on_train_begin`."""
        self.open(self._step)

    def pause(self) -> None:
        """Engines go on: each token's logprob is of the weights that made it, and these correct for the difference."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish what TRL streams."""
        self.publish(self._step, dict(iterator))

    def resume(self) -> None:
        """Nothing was paused."""

    def destroy(self) -> None:
        """`__exit__` says how the run ended."""

    # ---------------------------------------------------------------- TRL's callbacks

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """`state.global_step` is that of the checkpoint which TRL resumed from, or 0."""
        self._step = self._committed = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._step = state.global_step

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """TRL logs a step once its weights are synced, and again at the end. The step's samples are turns at the gateway: none is named."""
        if self._step > self._committed:
            said = {name: value for name, value in (logs or {}).items() if "/" not in name}
            metrics = {name: float(value) for name, value in said.items() if isinstance(value, int | float)}
            self.run.commit(self._step, self._version - 1, [], metrics)
            self._committed = self._step


def gateway_url(config: RunConfig) -> str:
    """Where this host's gateway of the run listens, with this trainer's key as the password: TRL can send a key in no other way."""
    endpoint, key = gateway_key(config, CLIENT)
    where = urlsplit(endpoint)
    return f"{where.scheme}://{CLIENT}:{key}@{where.netloc}"


def without_key(url: str) -> str:
    where = urlsplit(url)
    return f"{where.scheme}://{where.netloc.rpartition('@')[2]}"


@dataclass(frozen=True)
class Reward:
    """The run's `module:function`, (prompt, completion, meta) -> float, as TRL calls reward functions. TRL pickles it for its worker."""

    name: str
    __name__ = "reward"  # TRL asks its reward functions for one

    def __call__(
        self, prompts: list[list[dict[str, str]]], completions: list[list[dict[str, str]]], **columns: Any
    ) -> list[float]:
        module, _, function = self.name.partition(":")
        judge = getattr(importlib.import_module(module), function)
        metas = [{key: values[place] for key, values in columns.items()} for place in range(len(prompts))]
        return [
            float(judge(prompt[-1]["content"], completion[-1]["content"], meta))
            for prompt, completion, meta in zip(prompts, completions, metas, strict=True)
        ]


def async_config(config: RunConfig, url: str) -> AsyncGRPOConfig:
    """Weights are published after every step, which the commits rely on."""
    n, gpu = config.data.samples_per_prompt, torch.cuda.is_available()
    return AsyncGRPOConfig(
        output_dir=str(config.run.out_dir),
        vllm_server_base_url=url,
        weight_sync_steps=1,
        per_device_train_batch_size=n,
        num_generations=n,
        gradient_accumulation_steps=config.data.prompts_per_step,
        max_inflight_tasks=2 * n * config.data.prompts_per_step,
        token_budget=0,
        max_completion_length=config.sampling.max_tokens,
        temperature=config.sampling.temperature,
        max_steps=config.run.steps,
        learning_rate=config.optimizer.lr,
        max_grad_norm=config.optimizer.clip_norm,
        seed=config.run.seed,
        bf16=gpu,
        use_cpu=not gpu,
        gradient_checkpointing=config.trainer.activation_checkpointing,
        save_steps=config.checkpoint.every,
        save_total_limit=config.checkpoint.keep,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )


def make_trainer(config: RunConfig, fleet: Fleet) -> AsyncGRPOTrainer:
    """TRL's trainer, unchanged."""
    data = load_dataset("json", data_files=str(config.data.path), split="train")
    url = gateway_url(config)
    args = async_config(config, url)
    trainer = AsyncGRPOTrainer(
        model=str(config.model.path),
        args=args,
        train_dataset=data.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]}),
        processing_class=AutoTokenizer.from_pretrained(config.model.path, local_files_only=True),
        reward_funcs=Reward(config.reward.function),
        callbacks=[fleet],
        weight_transfer=fleet,
    )
    args.vllm_server_base_url = without_key(url)  # the worker has the key; checkpoints and trackers get none
    if trainer.accelerator.num_processes > 1:
        raise SystemExit("this example trains in one process")
    return trainer


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("config", type=Path, help="run.toml")
    parser.add_argument("--resume", type=Path, help="go on from this checkpoint of TRL's")
    options = parser.parse_args(argv)
    config = read_run(options.config)
    with Fleet(config) as fleet:
        trainer = make_trainer(config, fleet)
        trainer.train(resume_from_checkpoint=str(options.resume) if options.resume else None)
    print(json.dumps({"steps": trainer.state.global_step}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
