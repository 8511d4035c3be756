"""What the demo trains and how: the run.toml it writes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """Sizes of the demo. `pace` mimics a large model's decode rate, so that preemption strikes in the middle of samples."""

    steps: int = 60
    seed: int = 0
    prompts_per_step: int = 32
    samples_per_prompt: int = 8
    eval_problems: int = 256
    max_batch: int = 96
    pace: float = 4.0
    lr: float = 2e-4
    warmup_steps: int = 5
    window: float = 0.35
    deterministic: bool = True


def run_document(
    settings: DemoSettings, *, name: str, state_dir: Path, out_dir: Path, model: Path, max_engines: int
) -> dict[str, dict[str, Any]]:
    """The `run.toml` of the demo."""
    return {
        "run": {
            "name": name, "seed": settings.seed, "steps": settings.steps, "state_dir": state_dir, "out_dir": out_dir,
            "deterministic": settings.deterministic, "max_engines": max_engines,
        },
        "model": {"path": model, "context_length": 32},
        "data": {"task": "sort", "prompts_per_step": settings.prompts_per_step, "samples_per_prompt": settings.samples_per_prompt},
        "sampling": {"max_tokens": 7, "temperature": 1.0},
        "engine": {"name": "reference", "max_batch": settings.max_batch, "pace": settings.pace},
        "optimizer": {"lr": settings.lr, "warmup_steps": settings.warmup_steps, "betas": [0.9, 0.99]},
        "reserved": {"workers": 1, "window": settings.window, "wake_after_s": 2.0},
        "checkpoint": {"every": 20, "keep": 2},
        "eval": {"problems": settings.eval_problems},
        "weights": {"dtype": "float32"},
    }  # fmt: skip
