"""What a model's folder says of itself: architecture, sizes, what ends a completion, chat template. Reads JSON and safetensors' heads only.

Knows no torch, so that drafting a run takes no second. Whether transformers can build the model is `check`'s question.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scavenger.errors import ConfigError
from trainer.data.prompts import stop_tokens

HEAD = struct.Struct("<Q")
MOST_HEAD_NBYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """`parameters`: values in the weight files, tied ones once. `end`: the token ids that end a completion, and the file that says so.

    `chat`: the chat template's text, "" for none. `shapes`: of every tensor in the weight files.
    """

    folder: Path
    model_type: str
    architecture: str
    context: int
    vocabulary: int
    parameters: int
    end: tuple[int, ...]
    end_source: str
    chat: str
    shapes: dict[str, tuple[int, ...]]
    config: dict[str, Any]


def read_facts(folder: Path) -> ModelFacts:
    """Raises `ConfigError` naming what is missing."""
    if not folder.is_dir():
        raise ConfigError(
            f"model.path: there is no folder {folder}",
            "give the folder of a Hugging Face model; nothing is downloaded",
        )
    config = read_json(
        folder / "config.json", "it is the folder of a Hugging Face model, with config.json in it"
    )
    if "auto_map" in config:
        raise ConfigError(
            f"model.path: {folder} brings its own code ({', '.join(sorted(config['auto_map']))}), which is never run",
            "take a model whose architecture transformers has",
        )
    for key in ("model_type", "vocab_size"):
        if key not in config:
            raise ConfigError(
                f"model.path: {folder / 'config.json'} has no {key!r}",
                "give a causal LM's folder, not a part of one",
            )
    shapes = weight_shapes(folder)
    end, source = _end(folder)
    return ModelFacts(
        folder,
        str(config["model_type"]),
        str((config.get("architectures") or ["?"])[0]),
        int(config.get("max_position_embeddings") or 0),
        int(config["vocab_size"]),
        sum(math.prod(shape) for shape in shapes.values()),
        end,
        source,
        _chat_template(folder),
        shapes,
        config,
    )


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """The object in a JSON file. Raises `ConfigError`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path.parent} holds no {path.name}", remedy) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}", remedy) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no object", remedy)
    return found


def weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Of every tensor in `model.safetensors`, or in the shards that its index names. Reads heads only. Raises `ConfigError`."""
    index = folder / "model.safetensors.index.json"
    remedy = (
        "copy the whole folder; weights in other formats are converted with transformers' save_pretrained"
    )
    if index.is_file():
        names = sorted(set(read_json(index, remedy).get("weight_map", {}).values()))
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        raise ConfigError(f"model.path: {folder} lacks {', '.join(missing) or 'weights'}", remedy)
    return {tensor: shape for name in names for tensor, shape in _head(folder / name).items()}


def _head(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes in one safetensors file: 8 bytes of length, then JSON."""
    try:
        with path.open("rb") as file:
            (length,) = HEAD.unpack(file.read(HEAD.size))
            if length > MOST_HEAD_NBYTES:
                raise ValueError(f"a head of {length} bytes")
            head = json.loads(file.read(length))
        return {name: tuple(entry["shape"]) for name, entry in head.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ConfigError(
            f"{path} is no safetensors file: {error}", "copy it again: a clone without git-lfs holds pointers"
        ) from error


def _end(folder: Path) -> tuple[tuple[int, ...], str]:
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file() and read_json(folder / name, "").get("eos_token_id") not in (None, []):
            return stop_tokens(folder, ()), name
    return (), ""


def _chat_template(folder: Path) -> str:
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        return alone.read_text(encoding="utf-8")
    if not (folder / "tokenizer_config.json").is_file():
        return ""
    found = (
        read_json(folder / "tokenizer_config.json", "save the model's tokenizer again").get("chat_template")
        or ""
    )
    if isinstance(found, list):  # several, by name
        found = next((one["template"] for one in found if one.get("name") == "default"), "")
    return str(found)
