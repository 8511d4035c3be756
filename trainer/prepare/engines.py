"""Asks the engines' own code what it would refuse: models that transformers cannot build, and what the reference engine computes.

The one place of `prepare` that knows `rollout`; starts no engine. Importing it takes seconds (torch, transformers).
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from rollout.engines.decoder import build_model, read_config
from rollout.engines.published import layout, parse_config
from rollout.engines.vllm.setup import refuse_unknown_experts
from scavenger.errors import ConfigError


def check_buildable(config_json: str) -> None:
    """Raises `EngineError` where transformers cannot build the model."""
    layout(parse_config(config_json))


def empty_model(config_json: str) -> Any:
    """The model without any weights, to be asked for its layers. Raises `EngineError` where transformers cannot build it."""
    with torch.device("meta"):
        return build_model(parse_config(config_json), torch.bfloat16, "meta")


def check_reference(config_json: str) -> None:
    """Raises `EngineError` for a model that the reference engine does not compute."""
    read_config(config_json)


def check_vllm_model(config_json: str) -> None:
    """Raises `EngineError` for a model whose weights are not known to be found again in vLLM."""
    refuse_unknown_experts(parse_config(config_json))


def check_vllm_options(options: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for an option that vLLM's own class does not have, or whose value is of another type."""
    if not options:
        return
    from vllm.engine import arg_utils  # seconds of imports

    fields = {field.name: field.type for field in dataclasses.fields(arg_utils.AsyncEngineArgs)}
    for name, value in options.items():
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1)
            raise ConfigError(
                f"engine.vllm.{name} is no engine argument of this vLLM",
                f"did you mean {near[0]}?" if near else "see vLLM's page on engine arguments",
            )
        try:
            one = type("One", (), {"__annotations__": {name: fields[name]}})  # vLLM writes some types as text
            adapter = TypeAdapter(get_type_hints(one, vars(arg_utils))[name])
        except (NameError, PydanticUserError):
            continue  # a type that only vLLM can tell: the engine says what is wrong
        try:
            adapter.validate_python(value, strict=True)
        except ValidationError as error:
            raise ConfigError(
                f"engine.vllm.{name} = {value!r}: {error.errors()[0]['msg']}",
                "see vLLM's page on engine arguments",
            ) from error
