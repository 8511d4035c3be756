"""Which run is to be played: what a `run.toml` says of it, and what it does not say and has to be assumed. Pure but for `read_model`.

Owns the translation and what is told about it. Knows nothing of how a run is played.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scavenger.config import RunConfig
from scavenger.errors import ConfigError
from scavenger.simulate.decode import GpuDatasheet, Model
from scavenger.simulate.lengths import Lengths, Lognormal, Sampled
from scavenger.sizing import training

#: A model's sizes, and what config.json calls them.
SHAPE_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
}


@dataclass(frozen=True, slots=True)
class RunAssumptions:
    """What no `run.toml` says: how many GPUs train (`sbatch` does), and how long completions are.

    `sigma`, `capped_share`: of the lognormal completion lengths; `sampled`: lengths in their stead, from `origin`. `correlation` within a
    group and `drift`, the change of log length a step, hold for both.
    """

    reserved_gpus: int
    prompt_tokens: int = 512
    sigma: float = 0.8
    capped_share: float = 0.05
    correlation: float = 0.5
    drift: float = 0.0
    sampled: tuple[int, ...] = ()
    origin: str = ""

    def lengths(self, cap: int) -> Lengths:
        """Of completions of up to so many tokens."""
        if self.sampled:
            return Sampled(self.sampled, cap, self.correlation, drift=self.drift)
        return Lognormal.with_capped_share(self.sigma, cap, self.capped_share, self.correlation, self.drift)


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """What a run's training job does live: settings of `run.toml`, not of a published system. Seconds, tokens, shares of a GPU's memory.

    `forwards`: passes of each sample without gradients, for the reference model and for later mini-batches.
    """

    offload: training.Mode = "auto"
    memory_share: float = 0.9
    recompute: bool = False
    forwards: int = 0
    round_tokens: int = 8192
    wake_after_s: float = 5.0
    sleep_timeout_s: float = 60.0

    def offloads(self, state_nbytes: float, gpu: GpuDatasheet) -> bool:
        """Whether `state_nbytes` of training state leave a GPU while engines have it: the trainer's own rule."""
        engine, capacity = self.memory_share * gpu.memory_bytes, gpu.memory_bytes
        return training.offloads(self.offload, resident=state_nbytes, engine=engine, capacity=capacity)


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """A run to play, in the simulator's terms."""

    name: str
    model: Model
    gpu: GpuDatasheet
    reserved_gpus: int
    gpus_per_engine: int
    most_engines: int
    prompts: int
    samples: int
    prompt_tokens: int
    lengths: Lengths
    max_batch: int
    training: TrainingSettings = TrainingSettings()

    def summary(self) -> str:
        """The setting in one line: what every figure assumes."""
        return (
            f"{self.model.name} on {self.reserved_gpus} reserved {self.gpu.name}, at most {self.most_engines} harvested engines of "
            f"{self.gpus_per_engine}, {self.prompts} prompts x {self.samples} up to {self.lengths.cap:,} tokens"
        )


def of_run(config: RunConfig, model: Model, gpu: GpuDatasheet, assumed: RunAssumptions) -> SimulationPlan:
    """The plan of a `run.toml`. `most_engines` is 0 where the run may not harvest."""
    each = config.run.gpus_per_engine
    if config.run.nodes_per_engine > 1:
        raise ConfigError(
            f"run.nodes_per_engine = {config.run.nodes_per_engine}: the simulated fleet has engines of one node",
            "simulate with 1; how fast an engine over several nodes decodes has not been measured",
        )
    if assumed.reserved_gpus < 1:
        raise ConfigError(
            f"{assumed.reserved_gpus} reserved GPUs",
            "a run needs GPUs to train on: --reserved-gpus N, what its sbatch asks for",
        )
    return SimulationPlan(
        name=config.run.name,
        model=model,
        gpu=gpu,
        reserved_gpus=assumed.reserved_gpus,
        gpus_per_engine=each,
        most_engines=config.run.max_engines if config.run.harvest else 0,
        prompts=config.data.prompts_per_step,
        samples=config.data.samples_per_prompt,
        prompt_tokens=assumed.prompt_tokens,
        lengths=assumed.lengths(config.sampling.max_tokens),
        max_batch=config.engine.max_batch,
        training=TrainingSettings(
            config.trainer.offload,
            config.engine.gpu_memory_share,
            config.trainer.activation_checkpointing,
            int(config.algorithm.kl_coef > 0) + int(config.algorithm.updates_per_step > 1),
            config.trainer.micro_batch_tokens,
            config.reserved.wake_after_s,
            config.reserved.sleep_timeout_s,
        ),
    )


def assumptions(plan: SimulationPlan, assumed: RunAssumptions) -> tuple[str, ...]:
    """What to know before a figure is believed."""
    if isinstance(plan.lengths, Lognormal):
        mean = f"{plan.lengths.mean():,.0f} tokens on average"
        summary = f"lognormal with sigma {assumed.sigma:g}, {assumed.capped_share:.0%} reach the cap, {mean}"
    else:
        summary = f"drawn from the {len(assumed.sampled):,} of {assumed.origin}, up to the cap"
    drift = f", {assumed.drift:+.1%} longer each step" if assumed.drift else ""
    return (
        f"assumed: {assumed.reserved_gpus} GPUs train; completion lengths are {summary}{drift}, correlation {assumed.correlation:g} within "
        f"a group; prompts have {assumed.prompt_tokens} tokens",
    )


def read_model(folder: Path) -> Model:
    """The model of a Hugging Face folder, by its config.json. Raises `ConfigError` naming what is missing."""
    path = folder / "config.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}",
            "name a preset with --model, or run this where the model is",
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", "name a preset with --model") from error
    return parse_model(found, folder.name, path)


def parse_model(found: dict[str, Any], name: str, path: Path) -> Model:
    """A dense model by the keys of its config.json; those of experts are refused, since their cost is another."""
    if any("expert" in key for key in found):
        raise ConfigError(
            f"{path} describes a mixture of experts, which the simulator does not know",
            "name a dense preset with --model",
        )
    derived = dict(found)
    derived.setdefault("num_key_value_heads", found.get("num_attention_heads"))
    heads, hidden = found.get("num_attention_heads"), found.get("hidden_size")
    if derived.get("head_dim") is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        derived["head_dim"] = hidden // heads
    shape = {ours: derived.get(theirs) for ours, theirs in SHAPE_KEYS.items()}
    wrong = [SHAPE_KEYS[ours] for ours, value in shape.items() if not isinstance(value, int) or value < 1]
    if wrong:
        raise ConfigError(f"{path} has no {', '.join(wrong)}", "name a preset with --model")
    return Model(
        name=name,
        tied=bool(found.get("tie_word_embeddings", False)),
        **{key: int(value) for key, value in shape.items() if value},
    )
