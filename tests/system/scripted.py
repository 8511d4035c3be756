"""A trainer without a model, on `scavenger.client`, for faults that need no learning.

It publishes given weights, submits prompts and takes what comes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from scavenger import config as configs
from scavenger.client import Client, Run
from scavenger.protocol import messages
from scavenger.weights import manifest as manifests
from scavenger.weights.manifest import Manifest
from scavenger.weights.source import WeightServer
from tests.system.play import DEADLINE_S

PROMPT = messages.pack_tokens([3, 1, 4, 1, 5, 9, 10])


def build(model: Path, version: int, *, broken: bool = False) -> tuple[Manifest, memoryview]:
    """The model's weights as a version. `broken`: one weight is not a number, so that no logit is."""
    tensors = load_file(model / "model.safetensors")
    if broken:
        name = next(name for name in sorted(tensors) if "norm" in name)
        tensors[name] = np.full_like(tensors[name], np.nan)
    return manifests.build(
        version, {name: ("float32", value.shape, value.data) for name, value in tensors.items()}
    )


@contextmanager
def opened(run_toml: Path, job_id: int = 0) -> Iterator[Run]:
    """The run of a run.toml, opened as its trainer does."""
    from trainer.__main__ import engine_spec

    config = configs.read_run(run_toml)
    tokenizer = str(config.model.path / "tokenizer.json")
    with Client.connect(config.run.state_dir) as client:
        yield client.open_run(
            config, engine=engine_spec(config), tokenizer=tokenizer, resume_step=0, job_id=job_id
        )


def publish(run: Run, source: WeightServer, model: Path, step: int, *, broken: bool = False) -> int:
    manifest, blob = build(model, run.next_version, broken=broken)
    run.publish(step, manifest, source.publish(manifest, blob))
    return manifest.version


def submit(
    run: Run, step: int, version: int, *, prompts: int = 1, samples: int = 2, tokens: int = 6
) -> set[int]:
    how = messages.Sampling(tokens)
    return set(
        run.submit(
            step, version, [messages.GroupSpec(index, PROMPT, samples, how) for index in range(prompts)]
        )
    )


def collect(run: Run, waiting: set[int], deadline_s: float = DEADLINE_S) -> list[messages.GroupDone]:
    """Poll until all these groups are here. Raises what the daemon stops the run with."""
    end = time.monotonic() + deadline_s
    found: list[messages.GroupDone] = []
    while len(found) < len(waiting):
        assert time.monotonic() < end, f"{len(found)} of {len(waiting)} groups came within {deadline_s:g} s"
        found += [group for group in run.poll(0.1) if group.group_id in waiting]
    return found


def commit(run: Run, step: int, version: int, groups: Sequence[messages.GroupDone]) -> None:
    """Take the step with every sample that has tokens; the others are masked."""
    outcomes = [
        messages.SampleOutcome(
            s.sample_id, "masked" if s.error else "consumed", 0.0 if s.error else 1.0, 0.0, s.error or ""
        )
        for group in groups
        for s in group.samples
    ]
    run.commit(step, version, outcomes, {"reward": 1.0, "loss": 0.0})
