"""What a run publishes for its engines: the config of a transformers model, and its weights by the names that transformers gives them.

Owns the check that a version holds exactly the weights of the run's model, made before any engine is touched. Computes nothing: the model
stands on torch's meta device.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from rollout.engines.base import Weight
from scavenger.errors import EngineError
from scavenger.weights.manifest import TensorView

STORED = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def parse_config(text: str) -> Any:
    """A transformers config from the text of a config.json. Raises `EngineError`; never runs code that the text names."""
    try:
        values = json.loads(text)
        model_type = values.pop("model_type")
        return AutoConfig.for_model(model_type, **values)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise EngineError(
            f"the model's config.json cannot be used: {error}", "pass the config.json of a causal LM"
        ) from error


@dataclass(frozen=True, slots=True)
class PublishedLayout:
    """The weights of a model. `shapes`: by every name; `tied`: names of one tensor, the first is the one that engines are given."""

    shapes: dict[str, tuple[int, ...]]
    tied: tuple[tuple[str, ...], ...]

    @property
    def vocab_size(self) -> int:
        return self.shapes[self.tied[0][0]][0]


def layout(config: Any) -> PublishedLayout:
    """The names and shapes that a version of this model must have. Raises `EngineError` where transformers cannot build it."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except (ValueError, TypeError) as error:
        raise EngineError(
            f"transformers cannot build this model: {error}", "use a causal LM that it knows"
        ) from error
    named = dict(model.named_parameters(remove_duplicate=False))
    groups: dict[int, list[str]] = defaultdict(list)
    for name, parameter in named.items():
        groups[id(parameter)].append(name)
    embeddings = id(model.get_input_embeddings().weight)
    first = tuple(groups.pop(embeddings))
    return PublishedLayout(
        {name: tuple(p.shape) for name, p in named.items()}, (first, *map(tuple, groups.values()))
    )


def names(of: PublishedLayout, views: Sequence[Weight]) -> dict[str, str]:
    """By the name that engines are given: the one under which a tied weight was published, of all others their own."""
    own = {view.name for view in views}
    return {tied[0]: next((name for name in tied if name in own), tied[0]) for tied in of.tied}


def checked(of: PublishedLayout, views: Sequence[Weight]) -> list[Weight]:
    """The views under the names that engines are given, tied ones once. Raises `EngineError` unless they are the model's, all of them."""
    by_name = {view.name: view for view in views}
    for view in views:
        shape = of.shapes.get(view.name)
        if shape != view.shape or view.dtype not in STORED:
            fits = "is unknown to the model" if shape is None else f"is {view.dtype}{view.shape}, not {shape}"
            raise EngineError(f"weight {view.name!r} {fits}", "publish weights of the run's own model")
    missing = sorted(names[0] for names in of.tied if not any(name in by_name for name in names))
    if missing:
        raise EngineError(
            f"{len(missing)} weights are missing, the first is {missing[0]!r}", "publish all weights"
        )
    chosen: list[Weight] = []
    for names in of.tied:
        given = [by_name[name] for name in names if name in by_name]
        if len(given) > 1 and any(other.data != given[0].data for other in given[1:]):
            raise EngineError(
                f"weight {given[1].name!r} is tied to another one and differs from it", "publish it once"
            )
        same = given[0].name == names[0]  # what is made when it is read is not read here
        chosen.append(given[0] if same else _renamed(given[0], names[0]))
    return sorted(chosen, key=lambda view: view.name)


def _renamed(weight: Weight, name: str) -> TensorView:
    if isinstance(weight, TensorView):
        return replace(weight, name=name)  # where it lies
    return TensorView(name, weight.dtype, weight.shape, weight.data)
