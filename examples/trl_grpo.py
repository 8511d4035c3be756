"""TRL's GRPOTrainer on harvested GPUs: its rollout hook asks Scavenger for completions. What any trainer needs: docs/your-trainer.md.

    pip install ".[trl]"
    python examples/trl_grpo.py run.toml

The daemon of `run.state_dir` runs, and engines come as for any run (`run.max_engines` harvested ones at most). What is used of run.toml:
[run], [model], [sampling], [engine], [weights], [checkpoint], data.path (JSONL with `prompt`, `answer` and more columns),
data.prompts_per_step and samples_per_prompt, reward.function, optimizer.lr and clip_norm. One training process.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from publishing import DaemonRun
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from scavenger.config import RunConfig, read_run
from scavenger.protocol import messages
from scavenger.weights import files


class Scavenged(DaemonRun):
    """A run as TRL sees it: a `rollout_func`, a reward function that is recorded, and a callback that publishes and commits."""

    def __init__(self, config: RunConfig, reward: Any) -> None:
        super().__init__(config, files.read_tokenizer(config.model.path) if config.sampling.stop else b"")
        self._reward = reward
        self._samples: list[int] = []
        self._rewards: list[float] = []
        self.__name__ = "scavenged"  # TRL asks its reward functions for one

    # ---------------------------------------------------------------- what TRL calls

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """`state.global_step` is that of the checkpoint which TRL resumed from, or 0."""
        self.open(state.global_step)
        self.publish(state.global_step, dict(model.named_parameters()))
        self.run.set_reserved(True)

    def rollout(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """TRL's `rollout_func`: `prompts` holds each prompt `num_generations` times in a row; so does what comes back."""
        n, tokenizer = trainer.num_generations, trainer.processing_class
        step = trainer.state.global_step + 1
        sampling = self._sampling(trainer.eos_token_ids)
        ids = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts[::n]]
        groups = [
            messages.GroupSpec(place, messages.pack_tokens(one), n, sampling) for place, one in enumerate(ids)
        ]
        waiting = set(self.run.submit(step, self._version, groups))
        done: dict[int, messages.GroupDone] = {}
        while waiting:
            for group in self.run.poll(timeout_s=0.5):
                waiting.remove(group.group_id)
                done[group.prompt_index] = group
        ordered = [
            sample
            for place in range(len(ids))
            for sample in sorted(done[place].samples, key=lambda one: one.index)
        ]
        self._samples = [sample.sample_id for sample in ordered]
        return {
            "prompt_ids": [one for one in ids for _ in range(n)],
            "completion_ids": [list(messages.unpack_tokens(sample.tokens)) for sample in ordered],
            "logprobs": [list(messages.unpack_logprobs(sample.logprobs)) for sample in ordered],
        }

    def __call__(self, prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        """TRL's reward function: the user's, and what it gave is kept for the ledger."""
        self._rewards = [
            float(value) for value in self._reward(prompts=prompts, completions=completions, **columns)
        ]
        return self._rewards

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        generated_by = self._version
        self.publish(state.global_step, dict(model.named_parameters()))
        advantages = _advantages(self._rewards, self._config.data.samples_per_prompt)
        outcomes = [
            messages.SampleOutcome(sample, "consumed", reward, advantage)
            for sample, reward, advantage in zip(self._samples, self._rewards, advantages, strict=True)
        ]
        self.run.commit(
            state.global_step, generated_by, outcomes, {"reward": statistics.fmean(self._rewards)}
        )

    # ----------------------------------------------------------------

    def _sampling(self, ends: Sequence[int]) -> messages.Sampling:
        chosen = self._config.sampling
        return messages.Sampling(
            chosen.max_tokens,
            chosen.temperature,
            stop_token_ids=chosen.stop_token_ids or tuple(ends),
            stop=chosen.stop,
        )


def _advantages(rewards: Sequence[float], n: int) -> list[float]:
    """As GRPO defines them (arXiv 2402.03300, section 4.1.2), for the ledger: TRL computes its own from the same rewards."""
    found = []
    for start in range(0, len(rewards), n):
        group = rewards[start : start + n]
        mean, spread = statistics.fmean(group), statistics.stdev(group)
        found += [(reward - mean) / (spread + 1e-4) for reward in group]
    return found


def reward_of(name: str) -> Any:
    """The run's `module:function`, (prompt, completion, meta) -> float, as TRL calls reward functions: with every column of the data."""
    module, _, function = name.partition(":")
    judge = getattr(importlib.import_module(module), function)

    def rewards(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        rows = {
            key: values
            for key, values in columns.items()
            if isinstance(values, list) and len(values) == len(prompts)
        }
        metas = [{key: values[place] for key, values in rows.items()} for place in range(len(prompts))]
        return [judge(*one) for one in zip(prompts, completions, metas, strict=True)]

    return rewards


def grpo_config(config: RunConfig) -> GRPOConfig:
    """One call of `rollout` an optimizer step, whatever the micro-batches: all that the commits rely on."""
    n, gpu = config.data.samples_per_prompt, torch.cuda.is_available()
    return GRPOConfig(
        output_dir=str(config.run.out_dir),
        per_device_train_batch_size=n,
        num_generations=n,
        gradient_accumulation_steps=config.data.prompts_per_step,
        max_completion_length=config.sampling.max_tokens,
        temperature=config.sampling.temperature,
        max_steps=config.run.steps,
        learning_rate=config.optimizer.lr,
        max_grad_norm=config.optimizer.clip_norm,
        seed=config.run.seed,
        beta=0.0,
        bf16=gpu,
        use_cpu=not gpu,
        gradient_checkpointing=config.trainer.activation_checkpointing,
        save_steps=config.checkpoint.every,
        save_total_limit=config.checkpoint.keep,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("config", type=Path, help="run.toml")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in run.out_dir"
    )
    options = parser.parse_args(argv)
    config = read_run(options.config)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        config.model.path, dtype=torch.float32, local_files_only=True
    )
    data = load_dataset("json", data_files=str(config.data.path), split="train")
    with Scavenged(config, reward_of(config.reward.function)) as scavenged:
        trainer = GRPOTrainer(
            model=model,
            args=grpo_config(config),
            train_dataset=data,
            processing_class=tokenizer,
            reward_funcs=scavenged,
            rollout_func=scavenged.rollout,
            callbacks=[scavenged],
        )
        if trainer.accelerator.num_processes > 1:
            raise SystemExit("this example trains in one process")
        trainer.train(resume_from_checkpoint=options.resume or None)
    print(json.dumps({"steps": trainer.state.global_step}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
