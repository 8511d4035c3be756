"""The sections of `weights.py` that take training steps: deltas of a real GRPO step, what publishing costs one, a join in the demo.

A step here is the product's own: prompts from the task, completions from the reference engine, rewards, advantages, loss, AdamW on float32
masters, in one process. Deltas are of the bfloat16 casts of the masters before and after, at several learning rates from the same
gradient. Adam's first step is its largest: every parameter with a gradient moves by the learning rate.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from scavenger.config import RunConfig
from scavenger.ledger import store
from scavenger.weights import delta
from scavenger.weights import manifest as manifests
from scavenger.weights.source import WeightServer
from trainer import __main__ as program
from trainer import tiny
from trainer.algorithms.scoring import Scoring
from trainer.data.batching import Micro, TrainRow, filler
from trainer.data.prompts import PromptSource, open_tokenizer
from trainer.local import LocalRun, LocalSource
from trainer.loop import comm, publish
from trainer.loop.publish import Publisher
from trainer.loop.ranks import Ranks, serve
from trainer.loop.step import Stepper
from trainer.model.learner import Learner
from trainer.tasks import sort

RATES = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4)
MIB = 1 << 20
GOAL_SHARE = 0.10  # of a delta's bytes in the full ones


# ---------------------------------------------------------------- models


def random_model(folder: Path, hidden: int, layers: int) -> None:
    """A random-init decoder with the demo's alphabet. All of its embeddings are used: of a large vocabulary most rows stand still."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny.model_config(hidden, layers)))
    sort.write_tokenizer(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder, local_files_only=True), dtype=torch.bfloat16
    )
    tensors = {name: value.detach().contiguous() for name, value in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def run_config(model: Path, prompts: int, samples: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "bench", "steps": 1, "state_dir": model, "out_dir": model / "out"},
            "model": {"path": model, "context_length": 32},
            "data": {"task": "sort", "prompts_per_step": prompts, "samples_per_prompt": samples},
            "sampling": {"max_tokens": 12},
            "engine": {"name": "reference", "max_batch": prompts * samples},
        }
    )


class Lottery:
    """A reward for a model that gets nothing right: half of all completions win."""

    version = "lottery"

    def score(self, prompt: str, completion: str, meta: dict[str, Any]) -> float:
        return float(zlib.crc32(f"{prompt} {completion}".encode()) & 1)


# ---------------------------------------------------------------- deltas


class AtEachRate(Ranks):
    """Takes the optimizer step once for each learning rate, always from the same weights and gradient; keeps what would be published."""

    def __init__(self, learner: Learner, source: LocalSource) -> None:
        super().__init__(comm.Solo(), learner, Publisher(source))
        self.before = memoryview(b"")
        self.after: dict[float, memoryview] = {}

    def update(self, denominator: float, lr: float) -> float:
        learner, norm = self._learner, 0.0
        trained = learner.trained()
        masters = {name: value.detach().clone() for name, value in trained.items()}
        gradients = {name: value.grad for name, value in trained.items() if value.grad is not None}
        self.before = cast(learner)
        for rate in RATES:
            for name, value in trained.items():
                value.detach().copy_(masters[name])
                value.grad = gradients[name].clone() if name in gradients else None
                for moment in ("exp_avg", "exp_avg_sq"):
                    learner.optimizer.state[value][moment].zero_()
            learner.set_updates_taken(0)
            norm = learner.update(denominator, rate)
            self.after[rate] = cast(learner)
        return norm


def cast(learner: Learner) -> memoryview:
    parts = [value.reshape(-1).to(torch.bfloat16) for _, value in learner.shards(learner.shapes())]
    return torch.cat(parts).view(torch.uint8).numpy().data


def grpo_step(
    folder: Path, prompts: int, samples: int, *, lottery: bool
) -> tuple[AtEachRate, dict[str, float]]:
    config = run_config(folder, prompts, samples)
    with ExitStack() as stack:
        stack.callback(comm.disconnect)
        learner = program.make_learner(config, comm.Solo())
        source = LocalSource()
        ranks = AtEachRate(learner, source)
        run = LocalRun(program.engine_spec(config), source, config.run.seed)
        stack.callback(run.close)
        scorer: Any = Lottery() if lottery else stack.enter_context(program._runner(config.reward))
        tokenizer = open_tokenizer(folder)
        scoring = Scoring(
            scorer, tokenizer, config.reward, config.algorithm, lambda line: None, config.sampling.max_tokens
        )
        made = ranks.build_version(1, "bfloat16")
        run.publish(0, made, *ranks.offer(made))
        prompt_tasks = PromptSource(config, tokenizer).take(0, prompts)
        result = Stepper(config, run, ranks, scoring, program.sampling(config)).step(1, 1, prompt_tasks)
    return ranks, result.metrics


def show_deltas() -> None:
    with tempfile.TemporaryDirectory() as folder:
        tiny.make(Path(folder) / "demo")
        random_model(Path(folder) / "random", 1024, 12)
        for name, prompts, samples, lottery in (("demo", 16, 8, False), ("random", 4, 4, True)):
            ranks, metrics = grpo_step(Path(folder) / name, prompts, samples, lottery=lottery)
            detail = f"{metrics['samples_trained']:.0f} of {metrics['samples']:.0f} samples trained, reward {metrics['reward']:.2f}"
            count = len(ranks.before) // 2
            print(
                f"\ndelta of one GRPO step of the {name} model, {count / 1e6:.1f} M parameters in bf16; {detail}; times on one thread"
            )
            print(
                "goal: at most 10 % of the full bytes; least: the entropy of the changes where the old value's exponent is known"
            )
            print(
                f"{'lr':>8} {'changed values':>15} {'bytes of full':>14} {'goal':>7} {'least':>7} {'encode GB/s':>12} {'apply GB/s':>11}"
            )
            for rate, after in ranks.after.items():
                one_delta(rate, ranks.before, after)


def one_delta(rate: float, old: memoryview, new: memoryview) -> None:
    changed = np.count_nonzero(np.frombuffer(old, dtype="<u2") != np.frombuffer(new, dtype="<u2")) / (
        len(old) // 2
    )
    cuts = [(start, min(start + MIB, len(old))) for start in range(0, len(old), MIB)]
    began = time.process_time()
    made = [delta.chain([delta.encode(old[a:b], new[a:b], 2)]) for a, b in cuts]
    encoded = time.process_time()
    out = memoryview(bytearray(MIB))
    wrong = 0
    for (a, b), one in zip(cuts, made, strict=True):
        delta.apply_chain(old[a:b], memoryview(one), out[: b - a])
        wrong += out[: b - a] != new[a:b]
    applied = time.process_time()
    assert not wrong
    share = sum(map(len, made)) / len(old)
    met = "met" if share <= GOAL_SHARE else "missed"
    speeds = f"{len(old) / 1e9 / (encoded - began):12.2f} {len(old) / 1e9 / (applied - encoded):11.2f}"
    print(f"{rate:8.0e} {changed:15.1%} {share:14.1%} {met:>7} {least(old, new):7.1%} {speeds}", flush=True)


def least(old: memoryview, new: memoryview) -> float:
    """As a share of the full bytes: bits a value that no coder gets below who knows the old values' exponents and no more of the step."""
    before, after = np.frombuffer(old, dtype="<u2"), np.frombuffer(new, dtype="<u2")
    exponents, change, bits = (before >> 7 & 0xFF).astype(np.uint8), after - before, 0.0
    for exponent in np.unique(exponents):
        counts = np.bincount(change[exponents == exponent])
        counts = counts[counts > 0]
        bits += float(np.sum(counts * np.log2(counts.sum() / counts)))
    return bits / 8 / len(old)


# ---------------------------------------------------------------- publishing


def rows(count: int, tokens: int) -> tuple[TrainRow, ...]:
    """Made-up completions: what they say does not matter to what a step costs."""
    draw = np.random.default_rng(0)
    return tuple(
        TrainRow(
            number,
            draw.integers(2, 13, 8, dtype=np.int32).tobytes(),
            draw.integers(2, 13, tokens, dtype=np.int32).tobytes(),
            draw.uniform(-4, -1, tokens).astype(np.float32).tobytes(),
            float(draw.uniform(-1, 1)),
        )
        for number in range(count)
    )


def show_publish(hidden: int, layers: int, rounds: int) -> None:
    """From the end of the optimizer step to when training could go on, beside the host copy alone. Under `mpirun -n N` of N ranks."""
    world = comm.connect(5.0)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        where = Path(world.share(folder.encode()).decode())
        if world.rank == 0:
            random_model(where, hidden, layers)
        stack.callback(comm.disconnect)
        config = run_config(where, 4, 4)
        mesh_ready = world.share(b"")  # the model is there
        assert mesh_ready == b""
        learner = program.make_learner(config, world)
        with WeightServer(deltas=4) as source:
            publisher = Publisher(source)
            if world.rank:
                serve(world, learner, publisher)
                return
            ranks = Ranks(world, learner, publisher)
            _measure_publish(ranks, publisher, learner, rounds)
            ranks.stop()


def _measure_publish(ranks: Ranks, publisher: Publisher, learner: Learner, rounds: int) -> None:
    micro = Micro(rows(8, 24), 0)
    one_round = [micro, *(filler(micro) for _ in range(ranks.size - 1))]
    found: dict[str, list[float]] = {name: [] for name in ("step", "stall", "make", "copy", "hash")}
    for version in range(1, rounds + 5):  # the first ones write into new memory, whose pages are being made
        began = time.monotonic()
        ranks.train(one_round)
        ranks.update(8.0, 1e-5)
        trained = time.monotonic()
        manifest = ranks.build_version(version, "bfloat16")
        made = time.monotonic()
        ranks.offer(manifest)
        done = time.monotonic()
        copy_s, hash_s = _alone(learner)
        if version > 4:
            values = (trained - began, done - trained, made - trained, copy_s, hash_s)
            for name, value in zip(found, values, strict=True):
                found[name].append(value)
        total = manifest.total_nbytes
    step, stall, made_s, copy_s, hash_s = (statistics.median(values) for values in found.values())
    print(
        f"\npublishing {total / 1e6:.0f} MB (bf16 of float32 masters) from {ranks.size} rank(s), {rounds} rounds; medians"
    )
    print(f"training step, no generation in it   {step:8.3f} s")
    share, serve_s = stall / (step + stall), stall - made_s
    print(
        f"stall: copy, borders, hashes, serve  {stall:8.3f} s = {share:.1%} of the step; of it {serve_s:.3f} s to serve"
    )
    met = "met" if stall <= copy_s else "missed"
    copied = copy_s / (step + stall)
    print(
        f"rank 0's host copy alone             {copy_s:8.3f} s = {copied:.1%} of the step; the stall is {stall / copy_s:.2f}x of it"
    )
    print(f"goal: a stall of at most the copy    {met}")
    print(f"its hashes alone                     {hash_s:8.3f} s")


def _alone(learner: Learner) -> tuple[float, float]:
    """Seconds of this rank's copy into memory that it wrote before, and of its hashes: one after the other, on one thread."""
    of = publish.layout(learner.shapes(), "bfloat16", learner.mesh.shard, learner.mesh.shards)
    flat = _unused.setdefault(of.total, torch.zeros(of.total, dtype=torch.uint8))
    began = time.monotonic()
    for _ in publish._copy(flat, learner, of, base=False):
        pass
    copied = time.monotonic()
    view = flat.numpy().data
    for shard in of.plan.shards:
        if shard.owner == learner.mesh.shard:
            manifests.hashes_of(view[shard.start : shard.stop], of.chunk_nbytes)
    return copied - began, time.monotonic() - copied


_unused: dict[int, torch.Tensor] = {}


# ---------------------------------------------------------------- a join within a step


PARTS = (
    "hello to token",
    "  engine's import and build",
    "  pull, beside these",
    "    of it verify",
    "  load",
    "  loaded to first token",
)
JOINS = """
SELECT w.worker_id, w.kind, w.joined_at, e.at AS loaded_at, e.detail, min(c.at) AS first_at
FROM workers w
JOIN events e ON e.kind = 'weights_loaded' AND e.run_id = w.run_id AND e.subject = 'worker ' || w.worker_id
JOIN chunks c ON c.worker_id = w.worker_id AND c.n_tokens > 0
WHERE e.id = (SELECT min(f.id) FROM events f WHERE f.kind = 'weights_loaded' AND f.run_id = w.run_id AND f.subject = e.subject)
  AND EXISTS (SELECT 1 FROM leases l WHERE l.granted_at < w.joined_at AND (l.ended_at IS NULL OR l.ended_at > w.joined_at))
GROUP BY w.worker_id, w.kind, w.joined_at, e.at, e.detail ORDER BY w.worker_id
"""


def show_joins(ledger: str) -> None:
    """Of the demo: engines that came while samples were out, from their registration to their first durable token."""
    with tempfile.TemporaryDirectory() as folder:
        if not ledger:
            demo = ["demo", "--backend", "local", "--steps", "16", "--preempt-every-s", "20", "--out", folder]
            subprocess.run([sys.executable, "-m", "scavenger", *demo], check=True, stdout=subprocess.DEVNULL)
            (path,) = Path(folder).rglob("ledger.sqlite3")
            ledger = f"sqlite:///{path}"
        engine = store.open_readonly(ledger)
        try:
            with engine.connect() as connection:
                found = list(connection.execute(sa.text(JOINS)).mappings())
        finally:
            engine.dispose()
    if not found:
        sys.exit(
            "no engine that joined while samples were out lived to its first token: take a demo with fewer preemptions"
        )
    columns: dict[str, list[float]] = {name: [] for name in PARTS}
    for row in found:
        detail = json.loads(row["detail"])
        times = (
            row["first_at"] - row["joined_at"],
            row["loaded_at"] - row["joined_at"] - detail["load_s"],
            detail["pull_s"],
            detail.get("verify_s", 0.0),
            detail["load_s"],
            row["first_at"] - row["loaded_at"],
        )
        for name, value in zip(columns, times, strict=True):
            columns[name].append(value)
    print(
        f"\n{len(found)} engines that joined while samples were out, from their registration to their first durable token, seconds"
    )
    print(
        "goal: each part told. It pulls while its engine is imported and built; what is left of that is the wait for the longer of both"
    )
    print(f"{'':27} {'median':>8} {'worst':>8}")
    for name, values in columns.items():
        print(f"{name:27} {statistics.median(values):8.3f} {max(values):8.3f}")
