"""Which weights a model's folder holds, as a digest that a checkpoint notes, so that a resume sees that they were exchanged.

Owns what of the files is read: of each its header (names, types, shapes), and the middle of each tensor. That is a few MB of a model of
100 GB. Sizes and headers alone are the same for every fine-tune of a model. Times of change are not of the content: a copy of the folder
would be another model. Samples of every tensor meet whatever trains any of them; what differs outside of all samples is not seen.

Boundary: the only reader of a weight file's bytes by the file format; the program knows the digest alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from blake3 import blake3

from scavenger.errors import ConfigError
from trainer.model.sharded_load import weight_files

#: Bytes from the middle of one tensor.
SAMPLE_NBYTES = 1024
#: Tensors of one file at most, evenly spread: a mixture of experts may have a hundred thousand.
MAX_SAMPLES = 1024
#: safetensors refuses a longer header.
MAX_HEADER_NBYTES = 100_000_000


def digest(folder: Path) -> str:
    """In hex, of the weights alone; "" where the folder has none. Raises `ConfigError` where they cannot be read."""
    whole = blake3()
    try:
        paths = [path for path in weight_files(folder) if path.is_file()]
        for path in paths:
            with path.open("rb") as file:
                whole.update(_of_file(file))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"model.path: {folder} cannot be read: {error}", "copy the model's whole folder again"
        ) from error
    return whole.hexdigest(16) if paths else ""


def _of_file(file: BinaryIO) -> bytes:
    """Digest of a safetensors file's header and samples. The format: 8 bytes of length, the header as JSON, the tensors' bytes."""
    size = int.from_bytes(file.read(8), "little")
    if size > MAX_HEADER_NBYTES:
        raise ValueError(f"{file.name}: a header of {size:,} bytes")
    header = file.read(size)
    tensors: dict[str, dict[str, Any]] = msgspec.json.decode(header, type=dict[str, dict[str, Any]])
    places = sorted(
        (int(of["data_offsets"][0]), int(of["data_offsets"][1]))
        for name, of in tensors.items()
        if name != "__metadata__"
    )
    found = blake3(header)
    for first, end in places[:: -(-len(places) // MAX_SAMPLES) or 1]:
        file.seek(8 + size + max(first, (first + end - SAMPLE_NBYTES) // 2))
        found.update(file.read(min(SAMPLE_NBYTES, end - first)))
    return found.digest()
