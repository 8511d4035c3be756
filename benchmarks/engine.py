"""Tokens a second of our worker with vLLM against the same vLLM driven bare: the same requests, one round of each after the other.

    python benchmarks/engine.py [--requests 128] [--tokens 256] [--batch 64] [--rounds 5] [--hidden 128] [--layers 4]

Bare: `AsyncLLM.generate` for each request, in this process; whatever comes is thrown away. Ours: the real worker process, which takes
leases from a socket and sends its tokens over it; this process says what a daemon says and acknowledges. Engine, arguments, weights,
prompts, seeds and sampling parameters are equal, every completion has `--tokens` tokens. A round is timed from the first request to the
last token. Prints each pair's ratio, and the median and spread of all; the goal is a median of at least 0.95. Needs vLLM, with or without a
GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollout.engines.base import EngineHost
from rollout.engines.vllm import engine as engines
from rollout.engines.vllm.sampling import params_of
from scavenger.protocol import keys, messages
from scavenger.protocol.messages import EngineSpec, Held, Lease, SampleKey, Sampling, pack_tokens
from scavenger.protocol.worker.events import Request
from scavenger.weights import manifest as manifests
from scavenger.weights.source import WeightServer
from tests.rollout.daemon import FakeDaemon

GOAL = 0.95
PROMPT = 16
START_S = 600.0


def spec_of(options: argparse.Namespace) -> EngineSpec:
    text = json.dumps(
        {
            "model_type": "qwen3",
            "hidden_size": options.hidden,
            "intermediate_size": 3 * options.hidden,
            "num_hidden_layers": options.layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": options.vocab,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        }
    )
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    return EngineSpec("vllm", text, dtype, options.batch, PROMPT + options.tokens)


def weights(spec: EngineSpec) -> tuple[manifests.Manifest, memoryview, int]:
    values = json.loads(spec.model_config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(values.pop("model_type"), **values), dtype=torch.float32
    )
    named = dict(model.named_parameters())
    table = {
        n: ("float32", tuple(p.shape), memoryview(bytearray(p.detach().contiguous().numpy().tobytes())))
        for n, p in named.items()
    }
    return *manifests.build(1, table), sum(p.numel() for p in named.values())


def prompt(index: int, vocab: int) -> tuple[int, ...]:
    return tuple((index * 7919 + i * 31) % vocab for i in range(PROMPT))


async def bare_round(engine: engines.VllmEngine, options: argparse.Namespace, first: int) -> float:
    """Seconds for all requests; `first` numbers them, so that no round repeats another's."""
    from vllm import TokensPrompt

    async def one(index: int) -> int:
        how = Sampling(options.tokens)
        request = Request(
            index, prompt(index, options.vocab), (), options.tokens, how, 1, SampleKey("train", 0, index, 0)
        )
        tokens = 0
        given = TokensPrompt(prompt_token_ids=list(request.prompt), cache_salt="bench/1")
        async for output in engine._llm.generate(given, params_of(request), f"bare-{index}"):
            tokens += len(output.outputs[0].token_ids)
        return tokens

    began = time.monotonic()
    made = await asyncio.gather(*(one(first + i) for i in range(options.requests)))
    took = time.monotonic() - began
    assert sum(made) == options.requests * options.tokens, "bare vLLM ended a completion early"
    return took


async def worker_round(daemon: FakeDaemon, options: argparse.Namespace, first: int) -> float:
    leases = [
        Lease(
            i,
            1,
            1,
            pack_tokens(prompt(i, options.vocab)),
            b"",
            Sampling(options.tokens),
            1,
            SampleKey("train", 0, i, 0),
        )
        for i in range(first, first + options.requests)
    ]
    lengths = {lease.sample_id: 0 for lease in leases}
    left = options.requests * options.tokens
    began = time.monotonic()
    daemon.send(messages.Assign(tuple(leases)))
    while left:
        durable = []
        for chunk in (await daemon.expect(messages.Chunks, START_S)).chunks:
            length = chunk.offset + len(chunk.tokens) // 4
            left -= max(0, length - lengths[chunk.sample_id])
            lengths[chunk.sample_id] = max(length, lengths[chunk.sample_id])
            durable.append(Held(chunk.sample_id, 1, length))
        daemon.send(messages.Ack(tuple(durable)))
    return time.monotonic() - began


async def measure(options: argparse.Namespace, folder: Path) -> list[tuple[float, float]]:
    spec = spec_of(options)
    manifest, blob, count = weights(spec)
    server, me = keys.generate(), keys.generate()
    keys.write_keypair(folder / "worker.key", me)
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        "SCAVENGER_GPUS": "1",
    }
    argv = [sys.executable, "-m", "rollout", "--state-dir", str(folder), "--key", str(folder / "worker.key")]
    argv += ["--kind", "harvested", "--run", "bench", "--engine", "vllm"]
    with (
        FakeDaemon(folder, server, {me.public}) as daemon,
        WeightServer() as source,
        open(folder / "worker.log", "wb") as log,
    ):
        worker = await asyncio.create_subprocess_exec(*argv, env=environment, stdout=log, stderr=log)
        bare: Any = None
        try:
            await daemon.expect(messages.WorkerHello, START_S)
            daemon.send(messages.Welcome(1, 1, "bench", spec, 1.0, 100.0, 32))
            daemon.send(messages.UseWeights(1, manifests.encode(manifest), (source.publish(manifest, blob),)))
            await daemon.expect(messages.WeightsLoaded, START_S)
            bare = await engines.build(spec, EngineHost("bench"))
            await bare.load(1, manifests.views(manifest, blob))
            print(
                f"{count / 1e6:.2f} M parameters, {options.requests} completions of {options.tokens} tokens, {options.batch} at once"
            )
            rounds, first = [], 0
            for number in range(options.rounds + 1):
                order = (0, 1) if number % 2 else (1, 0)  # whoever goes second finds warmer caches
                took = [0.0, 0.0]
                for which in order:
                    took[which] = await (
                        worker_round(daemon, options, first) if which else bare_round(bare, options, first)
                    )
                first += options.requests
                total = options.requests * options.tokens
                if number:  # the first round warms both up
                    rounds.append((total / took[0], total / took[1]))
                    bare_s, ours_s = rounds[-1]
                    print(
                        f"round {number}: bare {bare_s:8.0f} tok/s, worker {ours_s:8.0f} tok/s, {ours_s / bare_s:.3f}",
                        flush=True,
                    )
            return rounds
        finally:
            if bare is not None:
                await bare.close()
            if worker.returncode is None:
                worker.kill()
            await worker.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    defaults = {
        "requests": 128,
        "tokens": 256,
        "batch": 64,
        "rounds": 5,
        "hidden": 128,
        "layers": 4,
        "vocab": 4096,
    }
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        rounds = asyncio.run(measure(options, Path(folder)))
    ratios = sorted(ours / bare for bare, ours in rounds)
    median = statistics.median(ratios)
    judged = "met" if median >= GOAL else "missed"
    print(
        f"worker / bare: median {median:.3f}, spread {ratios[0]:.3f} to {ratios[-1]:.3f}; goal {GOAL}: {judged}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
