"""What the demo trains and how: the run.toml it writes. Pure.

The other users of the demo's cluster: what they submit, when, and for how long. Pure; the driver submits it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class DemoArrival:
    """An ordinary job: `gpus` on `node` for `run_s`, submitted `at_s` after the start."""

    at_s: float
    node: str
    gpus: int
    run_s: float


def arrivals(
    nodes: Sequence[str], gpus_per_node: int, *, every_s: float, run_s: float, seed: int
) -> Iterator[DemoArrival]:
    """A million arrivals, on average one every `every_s`; they hit one node after another, mostly whole nodes.

    A job takes a whole node or all but one GPU of it, so that it meets whatever runs there; it goes on long enough that the engine
    has to come back elsewhere.
    """
    rng = random.Random(seed)
    at_s = 0.0
    for index in range(1_000_000):
        at_s += every_s * rng.uniform(0.6, 1.4)
        node = nodes[index % len(nodes)]
        yield DemoArrival(at_s, node, gpus_per_node - (rng.random() < 0.25), run_s * rng.uniform(0.7, 1.3))


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """Sizes of the demo. `pace` mimics a large model's decode rate, so that preemption strikes in the middle of samples."""

    steps: int = 60
    seed: int = 0
    prompts_per_step: int = 32
    samples_per_prompt: int = 8
    eval_prompts: int = 256
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
            "name": name,
            "seed": settings.seed,
            "steps": settings.steps,
            "state_dir": state_dir,
            "out_dir": out_dir,
            "deterministic": settings.deterministic,
            "max_engines": max_engines,
        },
        "model": {"path": model, "context_length": 32},
        "data": {
            "task": "sort",
            "prompts_per_step": settings.prompts_per_step,
            "samples_per_prompt": settings.samples_per_prompt,
        },
        "sampling": {"max_tokens": 7, "temperature": 1.0},
        "engine": {"name": "reference", "max_batch": settings.max_batch, "pace": settings.pace},
        "optimizer": {"lr": settings.lr, "warmup_steps": settings.warmup_steps, "betas": [0.9, 0.99]},
        "reserved": {"workers": 1, "window": settings.window, "wake_after_s": 2.0},
        "checkpoint": {"every": 20, "keep": 2},
        "eval": {"prompts": settings.eval_prompts},
        "weights": {"dtype": "float32"},
    }
