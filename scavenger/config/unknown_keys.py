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

#: From this similarity on (`difflib`: 1 = equal) a name is taken for another one misspelt.
SIMILAR = 0.7


def hint(model: type[BaseModel], place: Sequence[str | int]) -> str:
    """What to write instead of the unknown key at `place` of a file of `model`; "" where nothing is near."""
    name = ".".join(str(part) for part in place)
    if name in RENAMED:
        return f"it was renamed: write {RENAMED[name]}"
    if name in SYNONYMS:
        return f"write {SYNONYMS[name]}"
    *above, key = [str(part) for part in place]
    section: type[BaseModel] | None = model
    for part in above:
        if section is not None and not part.isdecimal():
            section = _section(section, part)
    near = difflib.get_close_matches(key, section.model_fields if section else (), n=1, cutoff=SIMILAR)
    if near:
        return f"did you mean {'.'.join([*above, near[0]])}?"
    if len(above) != 1:
        return ""
    # The right key in the wrong section.
    homes = [
        home for home in model.model_fields if (other := _section(model, home)) and key in other.model_fields
    ]
    return f"did you mean {' or '.join(f'{home}.{key}' for home in homes)}?" if homes else ""


def _section(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    """The section, or the table of a list, that stands at `key`."""
    kind = model.model_fields[key].annotation
    kinds = (part for part in (kind, *get_args(kind)) if isinstance(part, type))
    return next((part for part in kinds if issubclass(part, BaseModel)), None)
