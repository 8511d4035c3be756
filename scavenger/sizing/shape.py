"""A decoder's sizes: what its config.json says of them, and the weights that follow. Pure.

Knows grouped-query attention, gated feed-forwards, and experts of which each token goes to some. What a config.json does not say is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

#: The names under which configurations give the number of experts, how many of them take a token, and their width.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_CHOSEN = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token")
_EXPERT_INNER = ("moe_intermediate_size", "expert_intermediate_size")
#: Model types whose queries and keys are normalised by heads.
_HEAD_NORMS = ("qwen3", "gemma3", "olmoe", "glm4_moe")
#: Sides of a decoder layer's projections, by name: in and out, in the words of `ModelShape.sides`.
_PROJECTIONS = {
    "q_proj": ("hidden", "queries"),
    "k_proj": ("hidden", "keys"),
    "v_proj": ("hidden", "keys"),
    "o_proj": ("queries", "hidden"),
    "gate_proj": ("hidden", "inner"),
    "up_proj": ("hidden", "inner"),
    "down_proj": ("inner", "hidden"),
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """`parameters` in all, tied ones once; `inner`: the width of a dense feed-forward. Heads of 0 are not known.

    `experts` of each of `sparse_layers`, `chosen` of them for a token, each `expert_inner` wide; `shared_inner`: of those that take all
    tokens. `head_norms`: queries and keys are normalised. `capped`: logits go through a tanh (Gemma's soft cap).
    """

    parameters: int
    layers: int
    hidden: int
    inner: int
    vocabulary: int
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    tied: bool = False
    head_norms: bool = False
    experts: int = 0
    chosen: int = 0
    expert_inner: int = 0
    shared_inner: int = 0
    sparse_layers: int = 0
    capped: bool = False

    @property
    def queries(self) -> int:
        """Width of a token's queries in one layer."""
        return self.heads * self.head_dim or self.hidden

    @property
    def keys(self) -> int:
        """Width of its keys, and of its values."""
        return self.kv_heads * self.head_dim or self.hidden

    @property
    def routing_nbytes(self) -> int:
        """What says which experts a token went to: a byte each, two where there are more than 256; 0 without experts."""
        return self.sparse_layers * self.chosen * (1 if self.experts <= 256 else 2)

    @property
    def root(self) -> int:
        """Weights outside of the layers: embeddings, output head, the last norm."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def layer(self) -> int:
        """Weights of the largest layer."""
        mean = max(0, self.parameters - self.root) // max(1, self.layers)
        mixed = 0 < self.sparse_layers < self.layers
        return max(self._layer(sparse=True), self._layer(sparse=False)) if mixed else mean

    def _layer(self, *, sparse: bool) -> int:
        attention = 2 * self.hidden * (self.queries + self.keys)
        norms = 2 * self.hidden + 2 * self.head_dim * self.head_norms
        if not sparse:
            return attention + norms + 3 * self.hidden * self.inner
        experts = 3 * self.hidden * (self.experts * self.expert_inner + self.shared_inner)
        return attention + norms + experts + self.hidden * self.experts

    @property
    def whole(self) -> int:
        """Weights that tensor parallelism does not cut: norms and routers."""
        norms = self.layers * (2 * self.hidden + 2 * self.head_dim * self.head_norms) + self.hidden
        return norms + self.sparse_layers * self.experts * self.hidden

    def slice(self, ranks: int) -> ModelShape:
        """What one of so many ranks of tensor parallelism computes: its heads, its part of each width, its experts and the tokens that go
        to them on average, its entries of the vocabulary."""
        if ranks == 1:
            return self
        return replace(
            self,
            parameters=self.whole + (self.parameters - self.whole) // ranks,
            inner=self.inner // ranks,
            vocabulary=self.vocabulary // ranks,
            heads=self.heads // ranks,
            kv_heads=self.kv_heads // ranks,
            experts=self.experts // ranks,
            chosen=-(-self.chosen // ranks),
            shared_inner=self.shared_inner // ranks,
        )

    def adapters(self, rank: int, targets: tuple[str, ...]) -> int:
        """Weights of adapters of this rank beside every layer that a target names. Experts, which are no linear layers, have none."""
        widths = {"hidden": self.hidden, "queries": self.queries, "keys": self.keys, "inner": self.inner}
        each = ((self._with(target), _PROJECTIONS.get(target, ("hidden", "hidden"))) for target in targets)
        return sum(count * rank * sum(widths[side] for side in sides) for count, sides in each)

    def whole_adapters(self, rank: int, targets: tuple[str, ...]) -> int:
        """Of these the weights that tensor parallelism does not cut: the side of each that faces the hidden width."""
        return sum(self._with(target) for target in targets) * rank * self.hidden

    def _with(self, target: str) -> int:
        """Layers that a target is in."""
        dense = "inner" in _PROJECTIONS.get(target, ())
        return self.layers - self.sparse_layers if dense else self.layers


def of_config(config: Mapping[str, Any], parameters: int = 0) -> ModelShape:
    """The sizes that a Hugging Face config.json gives. `parameters`: as the weight files have them; 0: by the sizes."""
    text = config.get("text_config")
    c: Mapping[str, Any] = text if isinstance(text, Mapping) and "hidden_size" in text else config
    hidden, heads, layers = (
        _int(c, "hidden_size"),
        _int(c, "num_attention_heads"),
        _int(c, "num_hidden_layers"),
    )
    experts = _int(c, *_EXPERTS)
    inner = _int(c, "intermediate_size") or 4 * hidden
    kind = str(c.get("model_type") or config.get("model_type") or "")
    shape = ModelShape(
        parameters,
        layers,
        hidden,
        inner,
        _int(c, "vocab_size") or _int(config, "vocab_size"),
        heads,
        _int(c, "num_key_value_heads") or heads,
        _int(c, "head_dim") or hidden // max(1, heads),
        tied=bool(config.get("tie_word_embeddings", c.get("tie_word_embeddings", False))),
        head_norms=kind.startswith(_HEAD_NORMS),
        experts=experts,
        chosen=_int(c, *_CHOSEN) if experts else 0,
        expert_inner=(_int(c, *_EXPERT_INNER) or inner) if experts else 0,
        shared_inner=_shared(c) if experts else 0,
        sparse_layers=_sparse(c, layers) if experts else 0,
        capped=bool(c.get("final_logit_softcapping")),
    )
    return shape if parameters else _counted(shape)


def _counted(shape: ModelShape) -> ModelShape:
    dense = shape.layers - shape.sparse_layers
    total = shape.root + dense * shape._layer(sparse=False) + shape.sparse_layers * shape._layer(sparse=True)
    return replace(shape, parameters=total)


def _shared(c: Mapping[str, Any]) -> int:
    """Width of the experts that take every token, all together."""
    if wide := _int(c, "shared_expert_intermediate_size"):
        return wide
    return _int(c, "n_shared_experts") * _int(c, *_EXPERT_INNER)


def _sparse(c: Mapping[str, Any], layers: int) -> int:
    """How many layers have experts."""
    if first := _int(c, "first_k_dense_replace"):
        return max(0, layers - first)
    every, dense = max(1, _int(c, "decoder_sparse_step")), c.get("mlp_only_layers") or ()
    return sum((number + 1) % every == 0 and number not in dense for number in range(layers))


def _int(c: Mapping[str, Any], *names: str) -> int:
    return next((int(c[name]) for name in names if isinstance(c.get(name), int)), 0)
