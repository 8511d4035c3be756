"""The file of a model's folder that travels with its weights: engines, which run as another user, read nothing of the folder.

Owns its name among a version's tensors, its bound, and how a trainer reads it. A run with `sampling.stop` publishes its `tokenizer.json` as
one more tensor of bytes, in every version that holds whole weights (adapters: in their base). So each of its bytes is hash-checked, and the
root covers it: equal roots end samples at the same texts. Engines take it out before they load the rest; an export makes a file of it.
"""

from __future__ import annotations

from pathlib import Path

import blake3

from scavenger.errors import ConfigError

TOKENIZER = "files/tokenizer.json"  # parameters have no slash in their names
DTYPE = "uint8"
MAX_TOKENIZER_NBYTES = 64 << 20  # an engine keeps its bytes beside the weights; the largest in use have 35 MB


def is_file(name: str) -> bool:
    """Whether a tensor of a version is a file's bytes and no weight."""
    return name == TOKENIZER


def digest(data: bytes | memoryview) -> str:
    """Of a file's bytes, in hex; "" of no file."""
    return blake3.blake3(data).hexdigest() if data else ""


def read_tokenizer(folder: Path) -> bytes:
    """The bytes of a model's tokenizer.json, to be published. Raises `ConfigError` when it cannot be read or is over the bound."""
    path = folder / "tokenizer.json"
    try:
        nbytes = path.stat().st_size
        data = path.read_bytes() if nbytes <= MAX_TOKENIZER_NBYTES else b""
    except OSError as error:
        raise ConfigError(
            f"{path}, which sampling.stop needs, cannot be read: {error}",
            "save the model's fast tokenizer there",
        ) from error
    if not 0 < len(data) <= MAX_TOKENIZER_NBYTES:
        raise ConfigError(
            f"{path} has {nbytes:,} bytes; with sampling.stop it goes to every engine, and may have 1 to {MAX_TOKENIZER_NBYTES:,}",
            "save the model's own tokenizer there, or use sampling.stop_token_ids",
        )
    return data
