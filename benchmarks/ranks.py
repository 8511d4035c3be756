"""A version on its way from a node's memory into the tensor-parallel ranks of one vLLM engine: all of it to each, or its own part.

    python benchmarks/ranks.py [--ranks 2] [--hidden 512] [--layers 4] [--vocabulary 16000] [--repeats 3] [--json FILE]

One engine, on this CPU; loads before and after take turns. Before: the version is copied into a file, and each rank reads, merges and sums
all of it (`baselines/whole_load.py`). After: it stays where it was pulled, and each rank reads the parts that its model's loaders keep.
The version came once to the node in both. Memory is what the processes of the engine and this one take at the most beyond what they have
at rest (PSS: a page that several map counts once), over the version's bytes; the version as it was pulled is in both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place).resolve() != HERE)]
# Of this process and those that vLLM starts.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(HERE.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
)
os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil  # type: ignore[import-untyped]  # noqa: E402  after the path, as all that follows
import torch  # noqa: E402

from benchmarks.many import spread  # noqa: E402
from rollout.engines import merging, published  # noqa: E402
from rollout.engines.base import EngineHost  # noqa: E402
from rollout.engines.vllm import engine as vllm  # noqa: E402
from rollout.engines.vllm import setup  # noqa: E402
from rollout.engines.vllm.core import CALL_S  # noqa: E402
from scavenger.protocol.messages import EngineSpec  # noqa: E402
from scavenger.weights import manifest as manifests  # noqa: E402
from scavenger.weights.manifest import Manifest  # noqa: E402
from scavenger.weights.memory import Buffer  # noqa: E402

Held = tuple[Manifest, Buffer]
RANK = 16  # of the adapters
GOAL = 0.6  # bytes that one of two ranks reads


def config_of(hidden: int, layers: int, vocabulary: int) -> str:
    heads = hidden // 64
    return json.dumps(
        {
            "model_type": "llama",
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "intermediate_size": 4 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": max(2, heads // 4),
            "head_dim": 64,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
    )


def pulled(version: int, tensors: dict[str, torch.Tensor], adapter: manifests.Adapter | None = None) -> Held:
    """As a pull leaves it: in a file without a name."""
    entries = {}
    for name, value in tensors.items():
        raw: Any = value.contiguous().view(-1).view(torch.uint8)
        entries[name] = (str(value.dtype).removeprefix("torch."), tuple(value.shape), memoryview(raw.numpy()))
    buffer = Buffer(sum(value.nbytes for value in tensors.values()))
    manifest, _ = manifests.build(version, entries, blob=buffer.view, adapter=adapter)
    return manifest, buffer


def versions(text: str) -> tuple[Held, Held]:
    """A base in bfloat16, and adapters beside each of its linear layers."""
    torch.manual_seed(0)
    shapes = published.layout(published.parse_config(text)).shapes
    base = {name: (torch.randn(shape) * 0.02).bfloat16() for name, shape in shapes.items()}
    adapters = {}
    for name, shape in shapes.items():
        if "_proj" in name:
            layer = name.removesuffix(".weight")
            adapters[f"{layer}.lora_A.weight"] = torch.randn(RANK, shape[1]) * 0.02
            adapters[f"{layer}.lora_B.weight"] = torch.randn(shape[0], RANK) * 0.02
    whole = pulled(1, base)
    return whole, pulled(2, adapters, manifests.Adapter(whole[0].root, 2.0, "bfloat16"))


class Peak:
    """The most memory of this process and all below it, sampled."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._ended = threading.Event()

    def taken(self) -> int:
        found = 0
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            with contextlib.suppress(OSError, psutil.Error):
                text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
                found += 1024 * int(
                    next(line for line in text.splitlines() if line.startswith("Pss:")).split()[1]
                )
        return found

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        self.nbytes = 0
        self._ended.clear()

        def watch() -> None:
            while not self._ended.wait(0.01):
                self.nbytes = max(self.nbytes, self.taken())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            self._ended.set()
            watcher.join()


def cpu_s() -> float:
    """Of this process and all below it; the watcher's own is in it, the same before and after."""
    found = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            found += sum(process.cpu_times()[:2])
    return found


async def load(engine: Any, version: int, views: Sequence[Any], *, whole: bool) -> tuple[int, float]:
    """As `VllmEngine.load` does. Returns the most bytes that a rank read, and the seconds."""
    began = time.monotonic()
    await engine._llm.pause_generation(mode="abort")
    with setup.MemoryFiles(views) as memory:
        given = (memory.paths, memory.table, memory.merges)
        said = await engine._llm.collective_rpc(
            "scavenger_load_whole" if whole else "scavenger_load", CALL_S, given
        )
    replies = [vllm.LoadReply(*one) for one in said]
    if whole:  # each summed all
        replies[1:] = [reply._replace(cast={}, published={}) for reply in replies[1:]]
    engine._verify(version, replies)
    return max(reply.read_nbytes for reply in replies), time.monotonic() - began


def bare(views: Sequence[Any]) -> list[Any]:
    """Views that say nothing of where they lie: they are copied to a file, as all were."""

    def one(view: Any) -> Any:
        if isinstance(view, merging.Merged):
            base, *adapter = (replace(part, memory=None) for part in view.parts)
            return merging.Merged(base, view.dtype, (adapter[0], adapter[1], view.scale) if adapter else None)
        return replace(view, memory=None)

    return [one(view) for view in views]


async def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    text = config_of(options.hidden, options.layers, options.vocabulary)
    base, adapters = versions(text)
    setup.EXTENSION = "benchmarks.baselines.whole_load.Extension"
    spec = EngineSpec("vllm", text, "bfloat16", 4, 64)
    engine = await vllm.build(spec, EngineHost("bench", options.ranks))
    found = []
    try:
        given: dict[str, Sequence[Any]] = {
            "all weights": manifests.views_in(*base),
            "adapters": merging.views(
                adapters[0], manifests.views_in(*adapters), base[0], base[1].view, base[1]
            ),
        }
        peak = Peak()
        for kind, views in given.items():
            own = published.checked(engine._layout, views)
            for repeat in range(options.repeats + 1):
                for whole in (True, False):
                    at_rest, cpu = peak.taken(), cpu_s()
                    with peak.watched():
                        nbytes, seconds = await load(engine, repeat, bare(own) if whole else own, whole=whole)
                    if repeat:  # the first one makes pages and imports
                        found.append(
                            {
                                "kind": kind,
                                "whole": whole,
                                "read": nbytes / base[0].total_nbytes,
                                "memory": max(0, peak.nbytes - at_rest) / base[0].total_nbytes,
                                "seconds": seconds,
                                "cpu": cpu_s() - cpu,
                            }
                        )
    finally:
        await engine.close()
    print(f"{base[0].total_nbytes / 1e6:.0f} MB of weights in bfloat16, {options.ranks} ranks, one node")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=16000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own
        runs = asyncio.run(measured(options))
    for kind in dict.fromkeys(run["kind"] for run in runs):
        of = {
            whole: [run for run in runs if run["kind"] == kind and run["whole"] == whole]
            for whole in (True, False)
        }
        for name, whole in (("before", True), ("after", False)):
            figures = "; ".join(
                f"{what} {spread([run[key] for run in of[whole]])}"
                for what, key in (
                    ("read by a rank", "read"),
                    ("host memory", "memory"),
                    ("seconds", "seconds"),
                    ("CPU", "cpu"),
                )
            )
            print(f"{kind:12} {name:7} {figures}   (of the version's bytes)")
        for key in ("read", "memory", "seconds", "cpu"):
            ratios = [a[key] / max(b[key], 1e-9) for a, b in zip(of[True], of[False], strict=True)]
            print(f"{kind:12} before / after: {key} {spread(ratios)}")
        most = max(run["read"] for run in of[False])
        print(
            f"{kind:12} goal {GOAL} of the bytes for one of two ranks: {'met' if most <= GOAL else 'MISSED'}"
        )
    if options.json:
        options.json.write_text(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
