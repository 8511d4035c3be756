"""Whether a run's engines merge its adapters into their weights, or keep them beside their base (`lora.serve`).

Also whether this Python has the engine at all.

Owns what of a run's configuration decides it; `scavenger.weights.choice.serving` has the arithmetic. Imports no torch: `init --check` says
it too.
"""

from __future__ import annotations

import importlib.util
import json
import sys

from scavenger.config import RunConfig
from scavenger.errors import ConfigError
from scavenger.sizing import shape
from scavenger.weights.choice import AdapterSetting, serving

#: Of adapters that vLLM 0.32 keeps beside their base.
MOST_RANK = 512


def refuse_missing_engine(config: RunConfig) -> None:
    """Raises `ConfigError` where this Python lacks the run's engine: it would be noticed only once the model is loaded."""
    if config.engine.name == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f'engine.name = "vllm", and {sys.executable} has no vLLM',
            "install scavenger there with its extra vllm (and where harvest.python runs), "
            'or take the built-in engine, for tiny models: engine.name = "reference", for a try --set engine.name=reference',
        )


def adapters_beside_base(config: RunConfig, model_config: str, device: str) -> tuple[bool, str]:
    """And why; nothing is to be said of a run without adapters. `device`: "cuda" or "cpu". Raises `ConfigError` where they cannot be."""
    lora = config.lora
    if not lora.rank:
        return False, ""
    impossible = _impossible(config)
    if impossible:
        if lora.serve == "unmerged":
            raise ConfigError(f"lora.serve = 'unmerged': {impossible}", 'set lora.serve = "merged"')
        return False, f"merged: {impossible}"
    if lora.serve == "auto" and config.engine.name == "reference":
        return False, "merged: the reference engine keeps adapters beside their base only where it is told to"
    if lora.serve != "auto":
        return lora.serve == "unmerged", f"{lora.serve}, as it is set"
    model = shape.of_config(json.loads(model_config))
    value_nbytes = 2 if device == "cuda" else 4
    layers = model.layers * len(lora.targets)
    setting = AdapterSetting(
        model.parameters,
        value_nbytes * model.parameters,
        layers,
        config.sampling.max_tokens / 2,
        device,
        config.run.engine_gpus,
    )
    found = serving(setting)
    return found.unmerged, found.reason


def _impossible(config: RunConfig) -> str:
    if config.run.nodes_per_engine > 1:
        return "an engine over several nodes merges"
    if config.engine.name == "vllm" and config.lora.rank > MOST_RANK:
        return f"vLLM keeps adapters of rank {MOST_RANK} at most beside their base"
    if config.algorithm.router_replay:
        return "algorithm.router_replay was not tried with adapters beside their base"
    if config.engine.vllm.get("quantization"):
        return "engine.vllm.quantization was not tried with adapters beside their base"
    return ""
