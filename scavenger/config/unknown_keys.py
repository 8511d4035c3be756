"""What an error says about a key that does not exist: its new name, the name that it has here, or the nearest one. Pure.

Boundary: other names of keys, and what an error says of them; it reads no file.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import get_args

from pydantic import BaseModel

#: Keys of earlier versions, and their names now. The values and their units are the same.
RENAMED = {
    "cluster.observe_s": "cluster.poll_interval_s",
    "cluster.quick_s": "cluster.fast_poll_interval_s",
    "cluster.observe_floor_s": "cluster.min_poll_interval_s",
    "harvest.courtesy_window_s": "harvest.other_users_window_s",
    "harvest.courtesy_after_s": "harvest.yield_after_s",
    "harvest.peer_yield_s": "harvest.same_tier_yield_s",
    "harvest.outlast": "harvest.min_expected_life",
    "harvest.least_life_s": "harvest.min_runtime_s",
    "harvest.spares": "harvest.standby_jobs",
    "harvest.leave": "harvest.after_drain",
    "eval.problems": "eval.prompts",
}

#: What other trainers, vLLM and Slurm call a key.
SYNONYMS = {
    "algorithm.beta": "algorithm.kl_coef",
    "algorithm.clip_ratio": "algorithm.clip_low",
    "algorithm.epsilon": "algorithm.clip_low",
    "checkpoint.save_steps": "checkpoint.every",
    "data.batch_size": "data.prompts_per_step",
    "data.group_size": "data.samples_per_prompt",
    "data.num_generations": "data.samples_per_prompt",
    "engine.gpu_memory_utilization": "engine.gpu_memory_share",
    "engine.max_num_seqs": "engine.max_batch",
    "engine.tensor_parallel_size": "run.gpus_per_engine",
    "harvest.gres": "harvest.gpu_type",
    "model.max_model_len": "model.context_length",
    "optimizer.learning_rate": "optimizer.lr",
    "optimizer.max_grad_norm": "optimizer.clip_norm",
    "sampling.max_completion_length": "sampling.max_tokens",
    "sampling.max_new_tokens": "sampling.max_tokens",
}

#: What other trainers call a key, in whatever section it is written: their files have other sections, or none.
ELSEWHERE = {
    "actor_lr": "optimizer.lr",
    "adam_betas": "optimizer.betas",
    "base_model": "model.path",
    "beta": "algorithm.kl_coef",
    "checkpoint_every": "checkpoint.every",
    "clip_eps": "algorithm.clip_low",
    "clip_grad": "optimizer.clip_norm",
    "clip_ratio": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high",
    "clip_ratio_low": "algorithm.clip_low",
    "cliprange": "algorithm.clip_low",
    "dataset": "data.path",
    "dataset_name": "data.path",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "eval_every": "eval.every",
    "eval_interval": "eval.every",
    "eval_steps": "eval.every",
    "gpu_memory_utilization": "engine.gpu_memory_share",
    "grad_clip": "optimizer.clip_norm",
    "gradient_checkpointing": "trainer.activation_checkpointing",
    "gradient_clipping": "optimizer.clip_norm",
    "group_size": "data.samples_per_prompt",
    "init_kl_coef": "algorithm.kl_coef",
    "kl_loss_coef": "algorithm.kl_coef",
    "learning_rate": "optimizer.lr",
    "lora_alpha": "lora.alpha",
    "lora_rank": "lora.rank",
    "lr_scheduler_type": "optimizer.schedule",
    "max_completion_length": "sampling.max_tokens",
    "max_grad_norm": "optimizer.clip_norm",
    "max_model_len": "model.context_length",
    "max_new_tokens": "sampling.max_tokens",
    "max_num_seqs": "engine.max_batch",
    "max_response_length": "sampling.max_tokens",
    "max_seq_len": "model.context_length",
    "max_steps": "run.steps",
    "max_train_steps": "run.steps",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "n_samples_per_prompt": "data.samples_per_prompt",
    "num_generations": "data.samples_per_prompt",
    "num_rollouts": "data.samples_per_prompt",
    "output_dir": "run.out_dir",
    "reward_fn": "reward.function",
    "reward_func": "reward.function",
    "reward_funcs": "reward.functions",
    "rollout_batch_size": "data.prompts_per_step",
    "save_interval": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "system_prompt": "data.system",
    "tensor_parallel_size": "run.gpus_per_engine",
    "total_steps": "run.steps",
    "train_batch_size": "data.prompts_per_step",
    "warmup": "optimizer.warmup_steps",
    "weight_decay_rate": "optimizer.weight_decay",
}

#: From this similarity on (`difflib`: 1 = equal) a name is taken for another one misspelt.
SIMILAR = 0.7


def hint(model: type[BaseModel], place: Sequence[str | int], value: object = None) -> str:
    """What to write instead of the unknown key at `place` of a file of `model`; "" where nothing is near.

    `value`: what the file says there. Of a section that does not exist its own keys are looked up too.
    """
    name = ".".join(str(part) for part in place)
    if name in RENAMED:
        return f"it was renamed: write {RENAMED[name]}"
    if name in SYNONYMS:
        return f"write {SYNONYMS[name]}"
    *above, key = [str(part) for part in place]
    if len(above) <= 1 and _exists(model, ELSEWHERE.get(key, "")):
        return f"write {ELSEWHERE[key]}"
    section: type[BaseModel] | None = model
    for part in above:
        if section is not None and not part.isdecimal():
            section = _section(section, part)
    near = difflib.get_close_matches(key, section.model_fields if section else (), n=1, cutoff=SIMILAR)
    if near:
        return f"did you mean {'.'.join([*above, near[0]])}?"
    if not above and isinstance(value, dict):
        found = [(f"{key}.{inner}", _inside(model, inner)) for inner in value]
        told = ", ".join(f"{inner} is {home}" for inner, home in found if home)
        return f"there is no such section; {told}" if told else ""
    if len(above) > 1:
        return ""
    homes = _homes(model, key)
    return f"did you mean {' or '.join(homes)}?" if homes else ""


def _homes(model: type[BaseModel], key: str) -> list[str]:
    """The sections that have a key of this name, with it."""
    sections = ((home, _section(model, home)) for home in model.model_fields)
    return [
        f"{home}.{key}" for home, section in sections if section is not None and key in section.model_fields
    ]


def _inside(model: type[BaseModel], key: str) -> str:
    """Where a key of a section that does not exist belongs; "" where that is not known."""
    if _exists(model, ELSEWHERE.get(key, "")):
        return ELSEWHERE[key]
    return " or ".join(_homes(model, key))


def _exists(model: type[BaseModel], name: str) -> bool:
    home, _, key = name.partition(".")
    section = _section(model, home) if home in model.model_fields else None
    return section is not None and key in section.model_fields


def _section(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    """The section, or the table of a list, that stands at `key`."""
    kind = model.model_fields[key].annotation
    kinds = (part for part in (kind, *get_args(kind)) if isinstance(part, type))
    return next((part for part in kinds if issubclass(part, BaseModel)), None)
