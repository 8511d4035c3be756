"""`python -m trainer.export RUN.toml OUT [--checkpoint auto|DIR] [--step N] [--dtype ...] [--merged] [--local]`: a checkpoint as a
Hugging Face folder, that of a run of adapters as peft's adapter folder.

Owns the way from shards to whole tensors under the model's own names, adapters merged or by themselves, in one process and without a
rank. What comes out is checked: in the type that the run published (adapters: in any), its root hash must be the one that the checkpoint's
version had, so these are the very weights that the engines sampled with. Started by `scavenger checkpoint export`. It needs memory for the
model twice, no GPU.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterable
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
from scavenger.weights import files
from scavenger.weights import manifest as manifests
from scavenger.weights.manifest import Adapter, Manifest
from scavenger.weights.memory import Buffer
from trainer.arguments import add_layers
from trainer.checkpoint import checkpoint
from trainer.checkpoint.checkpoint import CheckpointState
from trainer.loop.publish import DTYPES, table_of
from trainer.model import adapters
from trainer.model.learner import load_model


def restored(config: RunConfig, path: Path, state: CheckpointState) -> Any:
    """The model with the checkpoint's parameters, whole, on the CPU. Raises `ConfigError` when the checkpoint is of another model."""
    model = load_model(config.model.path, torch.float64 if state.dtype == "float64" else torch.float32)
    if config.lora.rank:
        adapters.inject(model, config.lora)
    parameters = {
        f"model.{name}": parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    checkpoint.check_shapes(path, {name: tuple(value.shape) for name, value in parameters.items()})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what is wanted
        load(parameters, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    return model


def sealed(model: Any, version: int, dtype: str, tokenizer: bytes = b"") -> tuple[Manifest, Buffer]:
    """The version that these weights are, adapters merged, with the tokenizer that it held beside them."""
    shapes = adapters.shapes(model)
    return _sealed(version, shapes, adapters.merged(model, shapes), dtype, tokenizer=tokenizer)


def adapters_root(config: RunConfig, model: Any, state: CheckpointState, tokenizer: bytes = b"") -> bytes:
    """Root of the version that holds this model's adapters, with its base, as `ranks.Ranks` publishes them."""
    base, of = adapters.shapes(model), adapters.trained_shapes(model)
    stored = adapters.stored_dtype(config.model.path)
    under, _ = _sealed(0, base, adapters.pristine(model, base), stored, tokenizer=tokenizer)
    adapter = manifests.Adapter(under.root, config.lora.alpha / config.lora.rank, state.weights_dtype)
    return _sealed(0, of, adapters.trained(model, of), state.dtype, adapter)[0].root


def _sealed(
    version: int,
    shapes: dict[str, tuple[int, ...]],
    values: Iterable[tuple[str, Tensor]],
    dtype: str,
    adapter: Adapter | None = None,
    *,
    tokenizer: bytes = b"",
) -> tuple[Manifest, Buffer]:
    """As `publish.Publisher` makes it."""
    table = table_of(shapes, dtype, tokenizer)
    buffer = Buffer(sum(tensor.nbytes for tensor in table))
    by_name = {tensor.name: tensor for tensor in table}
    for name, value in values:
        raw: Any = _flat(value.to(DTYPES[dtype]))
        buffer.view[by_name[name].offset : by_name[name].offset + by_name[name].nbytes] = memoryview(
            raw.numpy()
        )
    if tokenizer:
        buffer.view[by_name[files.TOKENIZER].offset :] = tokenizer
    size = manifests.chunk_nbytes_of(buffer.nbytes)
    return manifests.seal(
        version, table, manifests.hashes_of(buffer.view, size), chunk_nbytes=size, adapter=adapter
    ), buffer


def _flat(value: Tensor) -> Tensor:
    return value.contiguous().view(-1).view(torch.uint8)


def choose(out_dir: Path, chosen: str, step: int | None) -> Path:
    """The checkpoint to export: a folder, that of a step, or the newest. Raises `ConfigError` where there is none, or two are named."""
    if step is not None and chosen != "auto":
        raise ConfigError(f"--step {step} and --checkpoint {chosen} name two checkpoints", "give one of them")
    if step is not None:
        steps = checkpoint.steps(out_dir)
        if step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise ConfigError(
                f"{checkpoint.folder(out_dir)} holds no complete checkpoint of step {step}; there is {there}",
                "checkpoint.every and checkpoint.keep say which are kept",
            )
        return checkpoint.folder(out_dir) / checkpoint.name(step)
    path = checkpoint.select(out_dir, chosen)
    if path is not None:
        return path
    tried = checkpoint.found(out_dir / "local")
    raise ConfigError(
        f"{checkpoint.folder(out_dir)} holds no complete checkpoint",
        "a try with --local has some: add --local" if tried else "name one with --checkpoint DIR",
    )


def export(
    config: RunConfig, out: Path, chosen: str, dtype: str, *, step: int | None = None, merged: bool = False
) -> str:
    """Write `out`; returns what is told of it. `dtype` "" = the type that the run publishes, of adapters the one they are trained in.

    `merged`: adapters put into the whole model.
    """
    path = choose(config.run.out_dir, chosen, step)
    state = checkpoint.read_state(path)
    model = restored(config, path, state)
    if config.lora.rank and not merged:
        return export_adapters(config, model, path, state, out, dtype or state.dtype)
    dtype = dtype or config.weights.dtype
    known = bool(state.root) and (state.adapters if config.lora.rank else dtype == state.weights_dtype)
    tokenizer = files.read_tokenizer(config.model.path) if known and state.tokenizer else b""
    root = adapters_root(config, model, state, tokenizer) if config.lora.rank and known else b""
    manifest, blob = sealed(model, state.version, dtype, b"" if config.lora.rank else tokenizer)
    root = root or manifest.root
    _compare(path, state, root.hex() if known else state.root)
    exporting.write(manifest, blob.view, out, config.model.path)
    what = "the whole model, adapters merged" if config.lora.rank else "the whole model"
    summary = f"wrote {out}: {what}, of {path.name}, {len(exporting.weights_of(manifest))} tensors in {dtype}, root {manifest.root.hex()}"
    if known:
        return (
            f"{summary}, adapters and base as published" if config.lora.rank else f"{summary}, as published"
        )
    why = (
        "its adapters were published merged, by an older release"
        if config.lora.rank
        else "its version was published in another type"
    )
    return f"{summary}; not compared with what was published: {why}"


def _compare(path: Path, state: CheckpointState, root: str) -> None:
    """Raises `WeightsError` unless the checkpoint makes the weights that were published."""
    if root != state.root:
        raise WeightsError(
            f"{path} makes weights with root {root}, and its version was published with {state.root}",
            "its files were damaged, or model.path is another model now: export another checkpoint",
        )


def export_adapters(
    config: RunConfig, model: Any, path: Path, state: CheckpointState, out: Path, dtype: str
) -> str:
    """Write the adapters alone, as peft and vLLM read them."""
    known = bool(state.root) and state.adapters
    tokenizer = files.read_tokenizer(config.model.path) if known and state.tokenizer else b""
    _compare(path, state, adapters_root(config, model, state, tokenizer).hex() if known else state.root)
    values = {
        name: value.to(DTYPES[dtype]).contiguous()
        for name, value in adapters.trained(model, adapters.trained_shapes(model))
    }
    with exporting.new_folder(out) as folder:
        adapters.write(folder, values, config.lora, config.model.path)
        exporting.copy_companions(
            config.model.path, folder, without=("config.json", "generation_config.json")
        )
    summary = (
        f"wrote {out}: an adapter folder (LoRA, rank {config.lora.rank}, alpha {config.lora.alpha:g}), of {path.name}, {len(values)} "
        f"tensors in {dtype}, for {config.model.path}; --merged writes the whole model"
    )
    return f"{summary}; as published" if known else summary


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.export", description="Write a checkpoint as a Hugging Face folder."
    )
    parser.add_argument("config", type=Path, help="run.toml")
    parser.add_argument("out", type=Path, help="the new folder")
    parser.add_argument(
        "--checkpoint", default="auto", metavar="auto|DIR", help="default: the newest of run.out_dir"
    )
    parser.add_argument(
        "--dtype",
        default="",
        choices=["", *DTYPES],
        help="default: weights.dtype of the run; of adapters the type that they are trained in",
    )
    add_layers(parser)
    parser.add_argument("--step", type=int, default=None, help="the checkpoint of this step")
    parser.add_argument("--merged", action="store_true", help="adapters: the whole model with them merged")
    parser.add_argument("--local", action="store_true", help="the checkpoints of a try with --local")
    options = parser.parse_args(argv)
    try:
        config = configs.read_run(options.config, options.over, options.set)
        if options.local:
            run = config.run.model_copy(update={"out_dir": config.run.out_dir / "local"})
            config = config.model_copy(update={"run": run})
        chosen, step = options.checkpoint, options.step
        print(export(config, options.out, chosen, options.dtype, step=step, merged=options.merged))
    except ScavengerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
