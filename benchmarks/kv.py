"""Seconds to the first token of a sample that moved, with its KV blocks and without: two engines, side by side, in one run.

    python benchmarks/kv.py [--tokens 256 1024 4096] [--rounds 7] [--hidden 512] [--layers 8] [--turns] [--engine vllm]

The sample has so many tokens on the first engine. Without: the second engine is given it and prefills. With: the first engine copies its
blocks out and hashes them, the second fetches them over CURVE from another socket of this machine, checks every byte, and decodes. The time
runs from the order to leave to the first new token, both halves included. The reference engine, or vLLM, in float32, one CPU thread each;
each round does both, in turns, with prompts that no engine has seen. Prints each ratio's median and spread.

`--turns`: of an agent's turn whose prompt is all that the turn before had, on the first engine, and 64 tokens that a tool said. The time
runs from when the second engine is given it; what the first engine kept it kept before, while the tool worked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from rollout.engines.base import EngineHost
from rollout.engines.registry import builder
from rollout.kv import KvMover
from scavenger.protocol import keys
from scavenger.protocol.messages import EngineSpec, KvSource, SampleKey, Sampling
from scavenger.protocol.worker.events import KeepKv, KvLoaded, Request, TurnKvKept
from scavenger.weights import manifest as manifests

WITHIN_S = 60.0
#: Tokens that a tool said.
TOOL = 64


def spec_of(options: argparse.Namespace) -> EngineSpec:
    text = json.dumps(
        {
            "model_type": "qwen3",
            "hidden_size": options.hidden,
            "intermediate_size": 3 * options.hidden,
            "num_hidden_layers": options.layers,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "vocab_size": 1024,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        }
    )
    return EngineSpec(options.engine, text, "float32", 2, max(options.tokens) + TOOL + 64, move_kv=True)


def weights(spec: EngineSpec) -> list[Any]:
    """Random ones; the same for both engines."""
    from rollout.engines.decoder import build_model, read_config

    torch.manual_seed(0)
    model = build_model(read_config(spec.model_config), torch.float32, "cpu")
    tensors = {
        name: ("float32", tuple(p.shape), memoryview(bytearray(p.detach().numpy().tobytes())))
        for name, p in model.named_parameters()
    }
    return manifests.views(*manifests.build(1, tensors))


def request(handle: int, tokens: int) -> Request:
    # Another one for each: vLLM finds a prompt that it has seen in its cache.
    prompt = tuple(1 + (place * 7 + handle * 13) % 1000 for place in range(tokens - 4))
    return Request(handle, prompt, (), 40, Sampling(40), 1, SampleKey("train", 0, 0, 0))


async def first_token(engine: Any) -> tuple[int, ...]:
    while True:
        for delta in await engine.next():
            if delta.token_ids:
                return tuple(delta.token_ids)


class Sides:
    """The engine that a sample leaves and the one that it goes to, each with what a worker has beside it."""

    def __init__(self, engines: list[Any], spec: EngineSpec) -> None:
        self.engines = engines
        self.loaded: list[KvLoaded] = []
        self.kept = asyncio.Event()
        self.movers = [
            KvMover(
                engine,
                spec,
                "run",
                keys.generate(),
                "127.0.0.1",
                report=self._said,
                taken=lambda _event: None,
                on_fault=lambda fault: sys.exit(str(fault)),
                clock=time.monotonic,
            )
            for engine in engines
        ]
        for mover in self.movers:
            mover.loaded(1, b"root")

    def _said(self, event: KvLoaded | TurnKvKept) -> None:
        if isinstance(event, KvLoaded):
            self.loaded.append(event)
        elif event.fault:
            sys.exit(event.fault)
        else:
            self.kept.set()

    async def begun(self, handle: int, tokens: int) -> tuple[int, ...]:
        """A sample on the first engine, with so many tokens."""
        one = self.engines[0]
        made: tuple[int, ...] = ()
        await one.add(request(handle, tokens))
        while len(made) < 4:
            made += await first_token(one)
        return made

    async def finished(self, handle: int, tokens: int) -> tuple[int, ...]:
        """A turn on the first engine with so many tokens, of which its mover keeps what it left. What it had."""
        one, holder = self.engines[0], self.movers[0]
        asked = replace(request(handle, tokens), max_new_tokens=4, leaves_kv=True)
        await one.add(asked)
        made: tuple[int, ...] = ()
        while len(made) < 4:
            made += await first_token(one)
        order = KeepKv(handle, tokens - 1, "", of_turn=True)
        assert holder.expects(order)
        self.kept.clear()
        await holder.keep(order)
        await self.kept.wait()
        return (*asked.prompt, *made)

    async def behind(self, handle: int, tokens: int, with_kv: bool) -> float:
        """Seconds from the next turn's lease elsewhere to its first token."""
        before = await self.finished(handle, tokens)
        (_, other), (holder, reader) = self.engines, self.movers
        turn = replace(request(handle, tokens), prompt=(*before, *range(1, 1 + TOOL)))
        began = time.monotonic()
        if with_kv:
            turn = replace(turn, kv=KvSource(holder.source, handle, tokens - 1, WITHIN_S))
            assert reader.begins(turn)
            found = await reader.fetched(turn)
            assert found is not None, self.loaded[-1].fault
            assert not reader.is_over(handle)
            await other.add_with_kv(turn, found)
        else:
            await other.add(turn)
        await first_token(other)
        seconds = time.monotonic() - began
        await other.abort([handle])
        reader.used((handle,))
        holder.drop((handle,))
        return seconds

    async def moved(self, handle: int, tokens: int, with_kv: bool) -> float:
        """Seconds from the order to leave to the next token elsewhere."""
        made = await self.begun(handle, tokens)
        left = replace(request(handle, tokens), accepted=made[:4], max_new_tokens=20)
        (one, other), (holder, reader) = self.engines, self.movers
        began = time.monotonic()
        if with_kv:
            await holder.keep(KeepKv(handle, tokens - 1, ""))
        await one.abort([handle])
        if with_kv:
            left = replace(left, kv=KvSource(holder.source, handle, tokens - 1, WITHIN_S))
            assert reader.begins(left)
            found = await reader.fetched(left)
            assert found is not None, self.loaded[-1].fault
            assert not reader.is_over(handle)
            await other.add_with_kv(left, found)
        else:
            await other.add(left)
        await first_token(other)
        seconds = time.monotonic() - began
        await other.abort([handle])
        return seconds


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    spec, rows, handle = spec_of(options), [], 0
    engines = [await builder(options.engine)(spec, EngineHost("run")) for _ in range(2)]
    for engine in engines:
        await engine.load(1, weights(spec))
    sides = Sides(engines, spec)
    for tokens in options.tokens:
        pairs = []
        for number in range(options.rounds + 1):  # the first is not counted: caches grow in it
            found = {}
            for with_kv in (number % 2 == 0, number % 2 == 1):
                handle += 1
                play = sides.behind if options.turns else sides.moved
                found[with_kv] = await play(handle, tokens, with_kv)
            pairs.append((found[False], found[True]))
        ratios = sorted(without / with_kv for without, with_kv in pairs[1:])
        rows.append(
            {
                "tokens": tokens,
                "nbytes": sides.loaded[-1].nbytes,
                "prefilled_s": statistics.median(without for without, _ in pairs[1:]),
                "with_blocks_s": statistics.median(with_kv for _, with_kv in pairs[1:]),
                "ratio": statistics.median(ratios),
                "least": ratios[0],
                "most": ratios[-1],
            }
        )
        print(
            f"{tokens:>6} tokens, {rows[-1]['nbytes'] / 1e6:.1f} MB: prefilled {rows[-1]['prefilled_s']:.4f} s, with its blocks "
            f"{rows[-1]['with_blocks_s']:.4f} s; ratio {rows[-1]['ratio']:.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]",
            flush=True,
        )
    for mover in sides.movers:
        mover.close()
    for engine in engines:
        await engine.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--turns", action="store_true")
    parser.add_argument("--engine", choices=("reference", "vllm"), default="reference")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of vLLM's processes
    asyncio.run(measure(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
