"""How vLLM calls the weights that a run publishes: renamed modules, fused projections, and experts that lie in one tensor.

Owns the table of what is made of what. Pure; knows names alone, no tensor and no vLLM.

A parameter of vLLM is told under the published name, or, where several are fused, under that of one of them with the fused module's name in
place of its own: `checksum.sources` finds the parts. An expert's rows are told apart: `NAME[expert]`. A checksum is blind to permutations
inside one tensor, and two experts that changed places are no more than that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

#: The module of vLLM's that holds a layer's routed experts.
INNER = ".routed_experts."
#: How transformers calls a layer's experts, each kind one tensor whose first side counts them, and how vLLM does.
_EXPERTS = {
    ".experts.gate_up_proj": ".experts.routed_experts.w13_weight",
    ".experts.down_proj": ".experts.routed_experts.w2_weight",
    ".experts.gate_up_proj_bias": ".experts.routed_experts.w13_bias",
    ".experts.down_proj_bias": ".experts.routed_experts.w2_bias",
}
#: config.json's `model_type` of the mixtures of experts whose every tensor is known to be found again in vLLM.
KNOWN_EXPERTS = ("qwen3_moe", "gpt_oss")


def expert(name: str, index: int) -> str:
    """The name of one expert's rows."""
    return f"{name}[{index}]"


def streamed(name: str, index: int) -> str:
    """One expert's rows as vLLM's GPT-OSS takes them from files that hold each expert for itself."""
    for theirs, mine in _EXPERTS.items():
        if name.endswith(theirs):
            return f"{name.removesuffix(theirs)}.experts.{index}.{mine.rpartition('.')[2]}"
    raise ValueError(f"{name} is not of experts")


def published_names(
    parameters: Collection[str],
    published: Collection[str],
    rename: Callable[[str], str | None],
    packed: Mapping[str, Sequence[str]],
) -> dict[str, str]:
    """By vLLM's parameter, the published name under which it is told. What is not in it has vLLM's own name, or no source.

    `rename`: vLLM's own mapping of the model's weights, without its fused modules. `packed`: fused module -> its parts.
    """
    found: dict[str, str] = {}
    for name in published:
        mine = rename(_of_experts(name))
        if mine is None:
            continue
        mine = _inner(mine)
        if mine in parameters:
            found[mine] = name
            continue
        for fused, parts in packed.items():
            for part in parts:
                whole = mine.replace(f".{part}.", f".{fused}.")
                if whole != mine and whole in parameters:
                    found[whole] = name.replace(f".{part}.", f".{fused}.")
    return found


def _of_experts(name: str) -> str:
    for theirs, mine in _EXPERTS.items():
        if name.endswith(theirs):
            return name.removesuffix(theirs) + mine
    return name


def _inner(name: str) -> str:
    """vLLM's tables of some models leave the inner module out."""
    if INNER in name or ".experts.w" not in name:
        return name
    return name.replace(".experts.", f".experts{INNER}", 1)
