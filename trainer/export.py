"""`python -m trainer.export RUN.toml OUT [--checkpoint auto|DIR] [--dtype ...]`: a checkpoint as a Hugging Face folder.

Owns the way from shards to whole tensors under the model's own names, adapters merged, in one process and without a rank. What comes out
is checked: in the type that the run published, its root hash must be the one that the checkpoint's version had, so these are the very
weights that the engines sampled with. Started by `scavenger checkpoint export`. It needs memory for the model twice, and no GPU.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from scavenger import config as configs
from scavenger.config import RunConfig
from scavenger.errors import ConfigError, ScavengerError, WeightsError
from scavenger.weights import export as exporting
from scavenger.weights import manifest as manifests
from scavenger.weights.manifest import Manifest
from scavenger.weights.memory import Buffer
from trainer import adapters, checkpoint
from trainer.checkpoint import State
from trainer.model import load_model
from trainer.publish import DTYPES


def restored(config: RunConfig, path: Path, state: State) -> Any:
    """The model with the checkpoint's parameters, whole, on the CPU. Raises `ConfigError` when the checkpoint is of another model."""
    model = load_model(config.model.path, torch.float64 if state.dtype == "float64" else torch.float32)
    if config.lora.rank:
        adapters.inject(model, config.lora)
    held = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    stored: dict[str, Any] = dict(HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata)
    wrong = [name for name, value in held.items() if name not in stored or tuple(stored[name].size) != tuple(value.shape)]
    wrong += [name for name in stored if name.startswith("model.") and name not in held]
    if wrong:
        raise ConfigError(
            f"{path} does not hold the parameters of {config.model.path}, first: {wrong[0].removeprefix('model.')}",
            "give the run.toml that the checkpoint was written under: its model.path and its [lora]",
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what is wanted
        load(held, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    return model


def sealed(model: Any, version: int, dtype: str) -> tuple[Manifest, Buffer]:
    """The version that these weights are, as `publish.Publisher` makes it."""
    shapes = {name: (dtype, shape) for name, shape in adapters.shapes(model).items()}
    table = manifests.layout(shapes)
    buffer = Buffer(sum(tensor.nbytes for tensor in table))
    place = {tensor.name: tensor for tensor in table}
    for name, value in adapters.merged(model, shapes):
        raw: Any = _flat(value.to(DTYPES[dtype]))
        buffer.view[place[name].offset : place[name].offset + place[name].nbytes] = memoryview(raw.numpy())
    size = manifests.chunk_nbytes_of(buffer.nbytes)
    return manifests.seal(version, table, manifests.hashes_of(buffer.view, size), chunk_nbytes=size), buffer


def _flat(value: Tensor) -> Tensor:
    return value.contiguous().view(-1).view(torch.uint8)


def export(config: RunConfig, out: Path, chosen: str, dtype: str) -> str:
    """Write `out`; returns what is told of it. `dtype` "" = the type that the run publishes."""
    path = checkpoint.select(config.run.out_dir, chosen)
    if path is None:
        raise ConfigError(f"{checkpoint.folder(config.run.out_dir)} holds no complete checkpoint", "name one with --checkpoint DIR")
    state = checkpoint.read_state(path)
    dtype = dtype or config.weights.dtype
    manifest, blob = sealed(restored(config, path, state), state.version, dtype)
    known = bool(state.root) and dtype == state.weights_dtype
    same = manifest.root.hex() == state.root
    if known and not same and not config.lora.rank:
        raise WeightsError(
            f"{path} makes weights with root {manifest.root.hex()}, and its version was published with {state.root}",
            "its files were damaged, or model.path is another model now: export another checkpoint",
        )
    exporting.write(manifest, blob.view, out, config.model.path)
    told = f"wrote {out}: {path.name}, {len(manifest.tensors)} tensors in {dtype}, root {manifest.root.hex()}"
    if known and same:
        return f"{told}, as published"
    why = "adapters were merged on this machine, which may round otherwise" if known else "its version was published in another type"
    return f"{told}; not compared with what was published: {why}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.export", description="Write a checkpoint as a Hugging Face folder.")
    parser.add_argument("config", type=Path, help="run.toml")
    parser.add_argument("out", type=Path, help="the new folder")
    parser.add_argument("--checkpoint", default="auto", metavar="auto|DIR", help="default: the newest of run.out_dir")
    parser.add_argument("--dtype", default="", choices=["", *DTYPES], help="default: weights.dtype of the run")
    options = parser.parse_args(argv)
    try:
        print(export(configs.read_run(options.config), options.out, options.checkpoint, options.dtype))
    except ScavengerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
