"""Adapters in a vLLM engine, merged into its weights or kept beside their base: seconds a version, tokens a second, and agreement.

    python benchmarks/adapters.py [--hidden 512] [--layers 4] [--vocabulary 16000] [--versions 4] [--tokens 64] [--batch 16]

Two engines on this CPU, in float32, take the same versions in turns: the first merges (before), the second keeps A and B beside the base
that it loaded once (after). Each then generates the same greedy completions. A version's seconds are from its bytes on this node to the
engine that may generate. What `scavenger.weights.choice.serving` predicts for these sizes is printed beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place).resolve() != HERE)]
# Of this process and those that vLLM starts.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(HERE.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
)
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402  after the path, as all that follows

from benchmarks.many import spread  # noqa: E402
from benchmarks.ranks import RANK, Held, config_of, pulled, versions  # noqa: E402
from rollout.engines import merging, published  # noqa: E402
from rollout.engines.base import EngineHost  # noqa: E402
from rollout.engines.vllm import engine as vllm  # noqa: E402
from scavenger.protocol.messages import EngineSpec, SampleKey, Sampling  # noqa: E402
from scavenger.protocol.worker.events import Request  # noqa: E402
from scavenger.weights import manifest as manifests  # noqa: E402
from scavenger.weights.choice import AdapterSetting, serving  # noqa: E402

NAMES = ("merged", "unmerged")  # before, after
Answer = tuple[tuple[int, ...], tuple[float, ...]]


def drawn(base: Held, shapes: dict[str, tuple[int, ...]], version: int) -> Held:
    generator = torch.Generator().manual_seed(version)
    tensors = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in shapes.items()}
    return pulled(version, tensors, manifests.Adapter(base[0].root, 2.0, "float32"))


async def generated(engine: Any, batch: int, tokens: int) -> tuple[dict[int, Answer], float]:
    """Greedy completions, and tokens a second."""
    began, found, open_ = time.monotonic(), {}, set(range(batch))
    for index in range(batch):
        how = Sampling(tokens, temperature=0.0)
        await engine.add(
            Request(index, (3 + index, 5, 7, 11), (), tokens, how, 1, SampleKey("train", 0, index, 0))
        )
    parts: dict[int, tuple[list[int], list[float]]] = {index: ([], []) for index in range(batch)}
    while open_:
        for delta in await engine.next():
            parts[delta.handle][0].extend(delta.token_ids)
            parts[delta.handle][1].extend(delta.raw_logprobs)
            if delta.finish or delta.error:
                open_.discard(delta.handle)
    found = {index: (tuple(ids), tuple(logprobs)) for index, (ids, logprobs) in parts.items()}
    return found, batch * tokens / (time.monotonic() - began)


async def measured(options: argparse.Namespace) -> list[dict[str, float]]:
    text = config_of(options.hidden, options.layers, options.vocabulary)
    base, first = versions(text)
    shapes = {tensor.name: tensor.shape for tensor in first[0].tensors}
    spec = EngineSpec("vllm", text, "float32", options.batch, 128)
    beside = EngineSpec("vllm", text, "float32", options.batch, 128, adapter_rank=RANK)
    engines = {
        name: await vllm.build(one, EngineHost("bench"))
        for name, one in zip(NAMES, (spec, beside), strict=True)
    }
    runs = []
    try:
        for version in range(2, options.versions + 3):
            adapters = drawn(base, shapes, version)
            row: dict[str, float] = {"bytes": float(adapters[0].total_nbytes)}
            answers = {}
            for name, engine in engines.items():
                began = time.monotonic()
                views = merging.views(
                    adapters[0], manifests.views_in(*adapters), base[0], base[1].view, base[1]
                )
                await engine.load(version, views)
                row[f"{name}_load"] = time.monotonic() - began
                answers[name], row[f"{name}_rate"] = await generated(engine, options.batch, options.tokens)
            row["difference"], row["equal"] = agreement(answers["merged"], answers["unmerged"])
            if version > 2:  # the first one imports, and loads the base
                runs.append(row)
    finally:
        for engine in engines.values():
            await engine.close()
    weights = sum(
        math.prod(shape) for shape in published.layout(published.parse_config(text)).shapes.values()
    )
    predicted = serving(AdapterSetting(weights, 4 * weights, 7 * options.layers, options.tokens, "cpu"))
    print(
        f"{weights / 1e6:.0f} M weights, adapters of rank {RANK}: {runs[0]['bytes'] / 1e6:.1f} MB a version; predicted: {predicted.reason}"
    )
    return runs


def agreement(one: dict[int, Answer], other: dict[int, Answer]) -> tuple[float, float]:
    """The largest difference of logprobs up to the first other token, and the share of tokens up to there."""
    worst, same, of = 0.0, 0, 0
    for index, (ids, logprobs) in one.items():
        theirs, their_logprobs = other[index]
        alike = next((i for i, (a, b) in enumerate(zip(ids, theirs, strict=True)) if a != b), len(ids))
        pairs = list(zip(logprobs, their_logprobs, strict=True))[:alike]
        worst = max([worst, *(abs(a - b) for a, b in pairs)])
        same, of = same + alike, of + len(ids)
    return worst, same / of


def column(runs: Sequence[dict[str, float]], key: str) -> list[float]:
    return [run[key] for run in runs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    for name, default in (
        ("hidden", 512),
        ("layers", 4),
        ("vocabulary", 16000),
        ("versions", 4),
        ("tokens", 64),
        ("batch", 16),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own
        runs = asyncio.run(measured(options))
    for label, name in zip(("before", "after"), NAMES, strict=True):
        loads, rates = column(runs, f"{name}_load"), column(runs, f"{name}_rate")
        print(
            f"{label:7} {name:9} seconds until a version may generate {spread(loads, 3)}; tokens a second {spread(rates, 0)}"
        )
    loads = [run["merged_load"] / run["unmerged_load"] for run in runs]
    rates = [run["unmerged_rate"] / run["merged_rate"] for run in runs]
    print(f"before / after: seconds {spread(loads)}; after / before: tokens a second {spread(rates)}")
    equal, worst = statistics.mean(column(runs, "equal")), max(column(runs, "difference"))
    print(f"equal greedy tokens {equal:.1%}; logprobs differ by {worst:.1e} at most")
    if options.json:
        options.json.write_text(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
