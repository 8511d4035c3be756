"""Asks the engines' own code what it would refuse: the weights that a model must have, and what the reference engine computes.

The one place of `prepare` that knows `rollout`; starts no engine. Importing it takes seconds (torch, transformers).
"""

from __future__ import annotations

from typing import Any

import torch

from rollout.engines.decoder import build_model, read_config
from rollout.engines.published import layout, parse_config


def wanted_weights(config_json: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's weights, tied ones once. Raises `EngineError` where transformers cannot build it."""
    found = layout(parse_config(config_json))
    return {names[0]: found.shapes[names[0]] for names in found.tied}


def empty_model(config_json: str) -> Any:
    """The model without any weights, to be asked for its layers. Raises `EngineError` where transformers cannot build it."""
    with torch.device("meta"):
        return build_model(parse_config(config_json), torch.bfloat16, "meta")


def check_reference(config_json: str) -> None:
    """Raises `EngineError` for a model that the reference engine does not compute."""
    read_config(config_json)
