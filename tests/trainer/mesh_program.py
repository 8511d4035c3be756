"""Some ranks of a test, over gloo: `python mesh_program.py RANKS OUT KIND=MODEL...` takes one step on ranks divided in several ways.

They are forked after the imports, which take longer than all else; frames go through pipes in the place of MPI. Of each kind (see `KINDS`)
rank 0 leaves in OUT/KIND-RANKS the step's gradients before the update, the weights as engines pull them after it, the checkpoint that all
ranks wrote, and in found.json the figures, with the logprobs that a later mini-batch would be trained with.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from scavenger.config import AlgorithmSection, LoraSection, OptimizerSection, TrainerSection
from scavenger.errors import ConfigError
from scavenger.protocol import keys, messages
from scavenger.weights import manifest as manifests
from scavenger.weights.pull import pull
from scavenger.weights.source import WeightServer
from tests.trainer.rows import make_group
from trainer.algorithms.rows import resolve
from trainer.checkpoint import checkpoint
from trainer.data import batching, prefixes
from trainer.data.batching import Micro, TrainRow
from trainer.loop.comm import Comm, disconnect, join
from trainer.loop.publish import Publisher
from trainer.loop.ranks import Ranks, serve
from trainer.model import adapters
from trainer.model.context import Context
from trainer.model.learner import Learner

GROUPS, BUDGET = 5, 60
OPTIMIZER = OptimizerSection(lr=1e-3, clip_norm=0.5, weight_decay=0.1)


@dataclass(frozen=True, slots=True)
class Kind:
    """What is trained on the ranks, and how they are divided (`trainer.*`)."""

    trainer: dict[str, Any]
    algorithm: AlgorithmSection = field(default_factory=lambda: AlgorithmSection(name="gspo"))
    lora: LoraSection = field(default_factory=LoraSection)


REFERENCE = AlgorithmSection(name="grpo", kl_coef=0.1, kl_reference="start")
LORA = LoraSection(rank=4, alpha=8.0)
KINDS = {
    "plain": Kind({}),
    "replicas-2": Kind({"replicas": 2}),
    "replicas-4": Kind({"replicas": 4}),
    "context-2": Kind({"context_parallel": 2}),
    "context-4": Kind({"context_parallel": 4}),
    "replicas-2-context-2": Kind(
        {"replicas": 2, "context_parallel": 2, "activation_checkpointing": True, "offload": "always"}
    ),
    "tensor-2": Kind({"tensor_parallel": 2}),
    "tensor-2-replicas-2": Kind({"tensor_parallel": 2, "replicas": 2}),
    "tensor-2-context-2": Kind(
        {"tensor_parallel": 2, "context_parallel": 2, "activation_checkpointing": True, "offload": "always"}
    ),
    "tensor-2-whole-head": Kind({"tensor_parallel": 2, "head_chunk_tokens": 0}),
    "tensor-2-lora": Kind({"tensor_parallel": 2}, REFERENCE, LORA),
    "tensor-2-experts": Kind({"tensor_parallel": 2}),
    "plain-reference": Kind({}, REFERENCE),
    "replicas-2-reference": Kind({"replicas": 2}, REFERENCE),
    "context-2-reference": Kind({"context_parallel": 2, "head_chunk_tokens": 0}, REFERENCE),
    "plain-lora": Kind({}, REFERENCE, LORA),
    "replicas-2-lora": Kind({"replicas": 2}, REFERENCE, LORA),
    "replicas-2-context-2-lora": Kind({"replicas": 2, "context_parallel": 2}, REFERENCE, LORA),
    "plain-experts": Kind({}),
    "replicas-2-context-2-experts": Kind({"replicas": 2, "context_parallel": 2}),
    "replicas-2-prefixes": Kind({"replicas": 2, "share_prefixes": True}),
    "tensor-2-prefixes": Kind({"tensor_parallel": 2, "share_prefixes": True}),
    "context-2-lost": Kind({"context_parallel": 2}),
}
LOST = "context-2-lost"
LONG, LONG_TOKENS = "long", 8192


def make_learner(model: Path, mesh: DeviceMesh, kind: str) -> Learner:
    of = KINDS[kind]
    return Learner(
        model,
        mesh,
        recipe=resolve(of.algorithm, 24),
        optimizer=OPTIMIZER,
        temperature=0.8,
        deterministic=False,
        trainer=TrainerSection(**of.trainer),
        lora=of.lora,
    )


def groups() -> list[tuple[TrainRow, ...]]:
    """Of samples that are longer and shorter than a rank's piece of the line."""
    return [make_group(number, most=4 if number % 2 else 24) for number in range(GROUPS)]


def train(ranks: Ranks, kind: str) -> dict[str, Any]:
    """The gradients of a step, after logprobs were computed as for a later mini-batch."""
    balanced = prefixes.balanced if kind.endswith("prefixes") else batching.balanced
    found: dict[int, list[float]] = {}
    for micros in balanced(groups()[:2], budget=BUDGET, ranks=ranks.data_parallel):
        for sample_id, packed in ranks.proximal(micros).items():
            found[sample_id] = torch.frombuffer(bytearray(packed), dtype=torch.float64).tolist()
    stats = [
        one
        for micros in balanced(groups(), budget=BUDGET, ranks=ranks.data_parallel)
        for one in ranks.train(micros)
    ]
    ranks.release()
    ranks.take_back()
    stats.sort(key=lambda one: one.sample_id)
    return {"stats": msgspec.to_builtins(stats), "proximal": found}


def update(ranks: Ranks, out: Path) -> dict[str, Any]:
    """The step, a checkpoint of it, and what engines pull."""
    norm = ranks.update(float(GROUPS * 4), OPTIMIZER.lr)
    state = checkpoint.CheckpointState(1, 1, "", GROUPS, 0, ranks.updates_taken, "float32", 1)
    ranks.save(checkpoint.prepare(out, 1, 1))
    ranks.wait_saved()
    checkpoint.complete(out, state)
    if ranks.trains_adapters:
        ranks.offer(ranks.build_base(1))
    manifest = ranks.build_version(2, "float32")
    sources = ranks.offer(manifest)
    blob = asyncio.run(pull(manifest, sources, keys.generate(), 20.0))
    weights = {
        tensor.name: torch.frombuffer(
            bytearray(blob.view[tensor.offset : tensor.offset + tensor.nbytes]), dtype=torch.float32
        ).reshape(tensor.shape)
        for tensor in manifest.tensors
    }
    save_file(weights, out / "weights.safetensors")
    return {"norm": norm, "sources": len(sources), "merged": manifest.merged.hex()}


def gradients(learner: Learner) -> dict[str, Tensor]:
    """Whole; a collective."""
    learner.state_to_load()  # where they were away, they are back now
    found = {}
    for name, parameter in learner.trained().items():
        assert parameter.grad is not None
        found[name] = adapters.whole(parameter.grad).clone()
    return found


def step(comm: Comm, mesh: DeviceMesh, model: Path, kind: str, out: Path) -> None:
    """On all ranks."""
    learner = make_learner(model, mesh, kind)
    out.mkdir(parents=True, exist_ok=True)
    with WeightServer() as source:
        publisher = Publisher(source)
        ranks = Ranks(comm, learner, publisher)
        if comm.rank:
            serve(comm, learner, publisher)
            gradients(learner)
            serve(comm, learner, publisher)
            together(comm)
            return
        found = train(ranks, kind)
        ranks.stop()
        save_file(gradients(learner), out / "gradients.safetensors")
        found |= update(ranks, out)
        ranks.stop()
        (out / "found.json").write_text(json.dumps(found))
        together(comm)


def together(comm: Comm) -> None:
    """No rank ends its source before all were pulled from."""
    if comm.rank:
        comm.receive()
    else:
        comm.send([b""] * comm.size)


class Pipes:
    """`Comm` over pipes between forked processes."""

    def __init__(self, rank: int, size: int, ends: Sequence[Connection]) -> None:
        self.rank, self.size = rank, size
        self._ends = ends  # rank 0: to each other rank; the others: to rank 0

    def send(self, frames: Sequence[bytes]) -> None:
        for end, frame in zip(self._ends, frames[1:], strict=True):
            end.send_bytes(frame)

    def receive(self, check: Callable[[], None] = lambda: None) -> bytes:
        check()
        return self._ends[0].recv_bytes()

    def reply(self, frame: bytes) -> None:
        self._ends[0].send_bytes(frame)

    def replies(self) -> list[bytes]:
        return [end.recv_bytes() for end in self._ends]

    def share(self, frame: bytes) -> bytes:
        if self.rank:
            return self.receive()
        self.send([frame] * self.size)
        return frame

    def abort(self, code: int) -> None:
        os._exit(code)


def rank(comm: Comm, out: Path, jobs: Sequence[str]) -> None:
    manifests.CHUNK_NBYTES = 4096  # so that chunks lie across ranks' shards as those of a large model do
    mesh = join(comm)
    for job in jobs:
        kind, _, model = job.partition("=")
        into = out / f"{kind}-{comm.size}"
        if kind == LOST:
            lost(comm, mesh, Path(model), into)
        elif kind == LONG:
            long(comm, mesh, Path(model), into)
        else:
            step(comm, mesh, Path(model), kind, into)
    disconnect()


def lost(comm: Comm, mesh: DeviceMesh, model: Path, out: Path) -> None:
    """What crosses between ranks goes nowhere: every rank refuses the model, and rank 0 keeps its words."""
    exchange, Context._exchange = Context._exchange, lambda self, parts: parts  # type: ignore[method-assign]
    try:
        make_learner(model, mesh, LOST)
        said = ""
    except ConfigError as error:
        said = str(error)
    Context._exchange = exchange  # type: ignore[method-assign]
    if comm.rank == 0:
        out.mkdir(parents=True)
        (out / "found.json").write_text(json.dumps(said))


def long(comm: Comm, mesh: DeviceMesh, model: Path, out: Path) -> None:
    """One sample of `LONG_TOKENS` over all ranks: bytes that a rank takes at most to train it, and its figures."""
    section = TrainerSection(context_parallel=comm.size, micro_batch_tokens=LONG_TOKENS)
    recipe = resolve(AlgorithmSection(name="grpo"), LONG_TOKENS)
    learner = Learner(
        model, mesh, recipe=recipe, optimizer=OPTIMIZER, temperature=1.0, deterministic=False, trainer=section
    )
    (row,) = make_group(1, size=1, prompt_tokens=LONG_TOKENS - 3000, most=1)
    draw = random.Random(2)
    row = msgspec.structs.replace(
        row,
        completion=messages.pack_tokens([draw.randrange(1, 13) for _ in range(3000)]),
        behaviour=messages.pack_logprobs([-2.5] * 3000),
    )
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    (stats,) = learner.train(Micro((row,), 0))
    peak = memory("VmHWM") - before
    norm = learner.update(1.0, 1e-3)
    if comm.rank:
        comm.reply(json.dumps(peak).encode())
        return
    peaks = [peak, *(json.loads(frame) for frame in comm.replies())]
    out.mkdir(parents=True)
    (out / "found.json").write_text(json.dumps({"peak": max(peaks), "loss": stats.loss, "norm": norm}))


def memory(what: str) -> int:
    """Bytes, as /proc says it of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def main(size: int, out: Path, jobs: Sequence[str]) -> int:
    torch.set_num_threads(1)
    forked = multiprocessing.get_context("fork")
    pairs = [forked.Pipe() for _ in range(1, size)]
    comms = [Pipes(0, size, [near for near, _ in pairs])]
    comms += [Pipes(number, size, [far]) for number, (_, far) in enumerate(pairs, start=1)]
    ranks = [forked.Process(target=rank, args=(comm, out, jobs)) for comm in comms]
    for one in ranks:
        one.start()
    running = list(ranks)
    while running:
        wait([one.sentinel for one in running])
        running = [one for one in running if one.exitcode is None]
        if any(one.exitcode for one in ranks):  # the others may wait for it
            for one in running:
                one.kill()
    return max(abs(one.exitcode or 0) for one in ranks)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
