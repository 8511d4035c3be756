"""Some ranks of a test, over gloo and without MPI: `python load_program.py RANKS OUT KIND=FOLDER...`. They are forked after the imports,
which take longer than all else.

Each folder is loaded ("lora" in the kind: with adapters; "wide": in float64), what lies in the shards is gathered, and rank 0 leaves it in
OUT/KIND.safetensors. `memory-sharded=FOLDER` and `memory-whole=FOLDER`: loads alone, by ranges or (as 0.2 did) every rank
the whole model, and leaves the host memory that it took at its peak, and what it keeps, in OUT/KIND-RANK.json. `publish-sharded=FOLDER` and
`publish-gathered=FOLDER`: likewise of one version in bfloat16, each rank's own share or (as before 0.2) all of it gathered to rank 0.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from scavenger.config import AlgorithmSection, LoraSection, OptimizerSection
from scavenger.weights import manifest as manifests
from trainer.algorithms.rows import resolve
from trainer.loop.publish import Publisher
from trainer.model import adapters, sharded_load
from trainer.model.learner import Learner, load_model
from trainer.model.sharding import reshard, shard

LORA = LoraSection(rank=4, targets=("q_proj", "v_proj"))


def learner_of(folder: Path, mesh: DeviceMesh, kind: str) -> Learner:
    return Learner(
        folder,
        mesh,
        recipe=resolve(AlgorithmSection(kl_coef=0.1 if "reference" in kind else 0.0), 8),
        optimizer=OptimizerSection(lr=1e-3),
        temperature=1.0,
        deterministic="wide" in kind,
        lora=LORA if "lora" in kind else LoraSection(),
    )


def contents(model: Any) -> dict[str, torch.Tensor]:
    """Parameters whole and buffers; a collective."""
    found = {name: adapters.whole(value).clone() for name, value in model.named_parameters()}
    return found | {name: value.clone() for name, value in model.named_buffers()}


def memory(field: str) -> int:
    """Bytes that /proc says of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def load(folder: Path, mesh: DeviceMesh, kind: str) -> Any:
    wide = "wide" in kind
    dtype = torch.float64 if wide else torch.float32
    rest: dict[str, Any] = {"compute": dtype, "deterministic": wide, "recompute": False}
    if "whole" in kind:
        model = load_model(folder, dtype)
        shard(model, mesh, **rest)
        return model
    model, plan = sharded_load.begin(folder, dtype)
    if "lora" in kind:
        adapters.inject(model, LORA)
    plan.empty(model)
    shard(model, mesh, **rest)
    plan.fill(model, torch.device("cpu"))
    return model


def measured(folder: Path, mesh: DeviceMesh, kind: str) -> dict[str, float]:
    """The peak beyond what the process had before, the bytes of the shards that it keeps, and seconds."""
    gc.collect()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    before = memory("VmRSS")
    started = time.perf_counter()
    model = load(folder, mesh, kind)
    seconds = time.perf_counter() - started
    peak = memory("VmHWM") - before
    dist.barrier()
    return {
        "peak": peak,
        "seconds": seconds,
        "kept": sum(adapters.own(value).nbytes for value in model.parameters()),
    }


def published(folder: Path, mesh: DeviceMesh, kind: str) -> dict[str, float]:
    """The same of a version's making; what a rank keeps is its share of the bytes."""
    learner = learner_of(folder, mesh, kind)
    nobody: Any = None  # nothing is offered
    publisher, total = Publisher(nobody), 2 * sum(value.numel() for value in learner.model.parameters())
    gc.collect()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    started = time.perf_counter()
    if "gathered" in kind:
        shapes = {name: ("bfloat16", tuple(value.shape)) for name, value in learner.model.named_parameters()}
        places = {tensor.name: tensor for tensor in manifests.layout(shapes)}
        blob = memoryview(bytearray(total if mesh.get_rank() == 0 else 0))
        for name, value in learner.model.named_parameters():
            found = adapters.whole(value).to(torch.bfloat16)
            if blob:
                raw: Any = found.contiguous().view(-1).view(torch.uint8)
                blob[places[name].offset : places[name].offset + places[name].nbytes] = memoryview(
                    raw.numpy()
                )
            del found
        manifests.hashes_of(blob, manifests.CHUNK_NBYTES)
    else:
        publisher.make(learner, "bfloat16")
    seconds = time.perf_counter() - started
    peak = memory("VmHWM") - before
    dist.barrier()
    return {"peak": peak, "seconds": seconds, "kept": total / mesh.size()}


def rank(number: int, size: int, out: Path, jobs: list[str]) -> None:
    store = dist.FileStore(str(out / "store"), size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=number, world_size=size)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
    for job in jobs:
        kind, _, folder = job.partition("=")
        if kind.startswith(("memory", "publish")):
            measure = measured if kind.startswith("memory") else published
            found = measure(Path(folder), mesh, kind)
            (out / f"{kind}-{number}.json").write_text(json.dumps(found))
            continue
        model = load(Path(folder), mesh, kind)
        places = [adapters.own(value).data_ptr() for value in model.parameters()]
        model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
        reshard(model)
        assert places == [adapters.own(value).data_ptr() for value in model.parameters()], "moved"
        held = contents(model)
        if number == 0:
            save_file(held, out / f"{kind}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


def main(size: int, out: Path, jobs: list[str]) -> int:
    torch.set_num_threads(1)
    forked = multiprocessing.get_context("fork")
    ranks = [forked.Process(target=rank, args=(number, size, out, jobs)) for number in range(size)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    return max(abs(one.exitcode or 0) for one in ranks)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
