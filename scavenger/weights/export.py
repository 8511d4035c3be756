"""A published version as a standard Hugging Face checkpoint: safetensors files with their index, and the model's own small files.

Owns the file layout. Knows no socket and no torch. Bytes are checked against the manifest as they are written: what comes out is what
the engines had, or nothing comes out.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from scavenger.errors import WeightsError
from scavenger.weights import files
from scavenger.weights import manifest as manifests
from scavenger.weights.manifest import Manifest, Tensor

#: safetensors' names of our dtypes.
SAFETENSORS_DTYPE = {
    "float64": "F64",
    "int64": "I64",
    "float32": "F32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
}
SHARD_NBYTES = 5 << 30  # what Hugging Face's tools cut at
#: Small files of a model folder that make weights usable; nothing that holds code.
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
)


def weights_of(manifest: Manifest) -> tuple[Tensor, ...]:
    """The version's tensors that are weights."""
    return tuple(tensor for tensor in manifest.tensors if not files.is_file(tensor.name))


def header(tensors: tuple[Tensor, ...], metadata: dict[str, str]) -> bytes:
    """What stands before the data of a safetensors file: 8 bytes of length, then JSON, padded so that the data is aligned."""
    base = tensors[0].offset if tensors else 0
    document: dict[str, Any] = {"__metadata__": {"format": "pt"} | metadata}
    for tensor in tensors:
        offsets = [tensor.offset - base, tensor.offset - base + tensor.nbytes]
        document[tensor.name] = {
            "dtype": SAFETENSORS_DTYPE[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _files(tensors: tuple[Tensor, ...], shard_nbytes: int) -> Iterator[tuple[Tensor, ...]]:
    """Consecutive tensors without a gap, each file below `shard_nbytes` unless one tensor alone is larger."""
    group: list[Tensor] = []
    for tensor in tensors:
        gap = group and tensor.offset != group[-1].offset + group[-1].nbytes
        if gap or (group and tensor.offset + tensor.nbytes - group[0].offset > shard_nbytes):
            yield tuple(group)
            group = []
        group.append(tensor)
    yield tuple(group)


def write(
    manifest: Manifest,
    blob: memoryview,
    out: Path,
    model: Path | None = None,
    *,
    shard_nbytes: int = SHARD_NBYTES,
) -> Path:
    """Write the version to the new (or empty) folder `out`, with the small files of the folder `model`. Nothing is left behind on an error.

    A tokenizer.json that the version holds is written as that file.

    Raises `WeightsError` when `out` holds anything, a byte is not the manifest's, or `model` is no Hugging Face folder.
    """
    if manifest.adapter is not None:
        raise WeightsError(
            f"version {manifest.version} holds adapters alone, of base {manifest.adapter.base.hex()}",
            "export the checkpoint, which merges them: scavenger checkpoint export RUN.toml OUT",
        )
    if model is not None and not (model / "config.json").is_file():
        raise WeightsError(
            f"{model} holds no config.json", "give the folder of the Hugging Face model that was trained"
        )
    if manifests.hashes_of(blob, manifest.chunk_nbytes) != manifest.chunk_hashes:
        raise WeightsError(
            f"the bytes of version {manifest.version} are not its manifest's",
            "they were damaged; export another version",
        )
    with new_folder(out) as part:
        _write_tensors(manifest, blob, part, shard_nbytes)
        if model is not None:
            copy_companions(model, part)
        for tensor in manifest.tensors:
            if tensor.name == files.TOKENIZER:
                (part / "tokenizer.json").write_bytes(blob[tensor.offset : tensor.offset + tensor.nbytes])
    return out


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `out` as a whole; nothing is left behind on an error.

    Raises `WeightsError` when `out` is there and is not an empty folder.
    """
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise WeightsError(f"{out} exists and is not an empty folder", "name a new or an empty folder")
    part = out.with_name(f".{out.name}.part{os.getpid()}")
    part.mkdir(parents=True)
    try:
        yield part
        part.rename(out)  # over an empty folder too
    finally:
        shutil.rmtree(part, ignore_errors=True)


def copy_companions(model: Path, folder: Path, without: Collection[str] = ()) -> None:
    """The small files of a model's folder, as far as it has them."""
    for name in COMPANIONS:
        if name not in without and (model / name).is_file():
            shutil.copyfile(model / name, folder / name)


def _write_tensors(manifest: Manifest, blob: memoryview, folder: Path, shard_nbytes: int) -> None:
    weights = weights_of(manifest)
    groups = list(_files(weights, shard_nbytes))
    names = ["model.safetensors"]
    if len(groups) > 1:
        names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    about = {"version": str(manifest.version), "root": manifest.root.hex()}
    for name, group in zip(names, groups, strict=True):
        with (folder / name).open("wb") as file:
            file.write(header(group, about))
            if group:
                file.write(blob[group[0].offset : group[-1].offset + group[-1].nbytes])
            file.flush()
            os.fsync(file.fileno())
    if len(groups) > 1:
        where = {tensor.name: name for name, group in zip(names, groups, strict=True) for tensor in group}
        total = sum(tensor.nbytes for tensor in weights)
        index = {"metadata": {"total_size": total} | about, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
