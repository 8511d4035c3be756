"""Causal attention over samples packed into one line, which never looks over a sample's border. Registered with transformers as `PACKED`.

On a GPU, in a 16-bit type and where this torch has it, one call of its variable-length flash attention; else `scaled_dot_product_attention`
once a sample, causal and without a mask. Either way nothing is computed for padding or across borders.

`BRANCHED` is the same where samples share prefixes that are in the line once: each piece of the line attends to the places that it sees,
its own last, whose keys are gathered for it. Knows no batch, and of a model only whether it may be asked for this.
Boundary: attention's kernels.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from scavenger.errors import ConfigError

PACKED = "scavenger_packed"
BRANCHED = "scavenger_branched"
#: Layers that see other tokens through attention alone.
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
#: What some models ask of attention and this one does not do.
_UNKNOWN = ("softcap", "s_aux", "position_bias")


def borders_of(lengths: Tensor, longest: int) -> dict[str, Any]:
    """The keyword arguments of a model's forward that carry the borders to `packed_attention`; `lengths` are cumulative, [S + 1] int32."""
    return {
        "cu_seq_lens_q": lengths,
        "cu_seq_lens_k": lengths,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def branches_of(
    lengths: Tensor, longest: int, seen: Tensor, seen_lengths: Tensor, longest_seen: int
) -> dict[str, Any]:
    """As `borders_of`, for `branched_attention`: `seen` are the places that each piece sees, `seen_lengths` cumulative as `lengths`."""
    return {
        "cu_seq_lens_q": lengths,
        "cu_seq_lens_k": seen_lengths,
        "max_length_q": longest,
        "max_length_k": longest_seen,
        "seen_places": seen,
    }


def unlike(model: Any) -> str:
    """Why what a token sees of others is not all ours to say; "" where it is. The model may be without weights."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS
    if getattr(model, "_is_stateful", False):
        kinds.add("recurrent")
    if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
        return "its attention has sinks"
    if getattr(config, "attn_logit_softcapping", None):
        return "its attention caps scores"
    return f"{', '.join(sorted(kinds))} layers see other tokens by themselves" if kinds else ""


def check_model(model: Any) -> None:
    """Raises `ConfigError` for a model whose samples cannot share prefixes. It may be without weights."""
    if why := unlike(model):
        raise ConfigError(
            f"trainer.share_prefixes = true: samples of {type(model).__name__} cannot share prefixes: {why}",
            "set trainer.share_prefixes = false",
        )


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, H_kv, T, D] -> [1, T, H, D]. Raises `ConfigError` for a model that needs something else."""
    borders = more.get("cu_seq_lens_q")
    if why := _fault(more, borders):
        raise ConfigError(
            f"{type(module).__name__} {why}: its samples cannot be packed", "set trainer.packing = false"
        )
    assert borders is not None
    window = more.get("sliding_window")
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and _varlen() is not None:
        same = (borders, borders, more["max_length_q"], more["max_length_q"])
        return _flash(query, key, value, same, scaling, window), None
    edges = borders.tolist()
    lengths = {stop - start for start, stop in pairwise(edges)}
    if (
        len(lengths) == 1 and len(edges) > 2
    ):  # one call for all: a call a sample costs more than short samples do
        query, key, value = (_stacked(part, len(edges) - 1) for part in (query, key, value))
        return _one(query, key, value, scaling, window).transpose(1, 2).flatten(0, 1).unsqueeze(0), None
    pieces = [
        _one(query[:, :, start:stop], key[:, :, start:stop], value[:, :, start:stop], scaling, window)
        for start, stop in pairwise(edges)
    ]
    return torch.cat(pieces, dim=2).transpose(1, 2), None


def branched_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Shapes as `packed_attention`. Raises `ConfigError` for a model that needs something else."""
    borders, seen = more.get("cu_seq_lens_q"), more.get("seen_places")
    if why := _fault(more, borders if seen is not None else None):
        raise ConfigError(
            f"{type(module).__name__} {why}: its samples cannot share prefixes",
            "set trainer.share_prefixes = false",
        )
    assert borders is not None
    assert seen is not None
    window, seen_borders = more.get("sliding_window"), more["cu_seq_lens_k"]
    key, value = (part.index_select(2, seen) for part in (key, value))
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and _varlen() is not None:
        lengths = (borders, seen_borders, more["max_length_q"], more["max_length_k"])
        return _flash(query, key, value, lengths, scaling, window), None
    pieces = [
        _one(query[:, :, start:stop], key[:, :, first:last], value[:, :, first:last], scaling, window)
        for (start, stop), (first, last) in zip(
            pairwise(borders.tolist()), pairwise(seen_borders.tolist()), strict=True
        )
    ]
    return torch.cat(pieces, dim=2).transpose(1, 2), None


def _fault(more: Mapping[str, Any], borders: Tensor | None) -> str:
    """What a model asks of attention that is not done, or does not say."""
    asked = [name for name in _UNKNOWN if more.get(name) is not None]
    if asked:
        return f"asks attention for {asked[0]}"
    return "" if borders is not None else "does not hand the samples' borders to its attention"


def _stacked(part: Tensor, samples: int) -> Tensor:
    """[1, H, S * T, D] of S samples of one length -> [S, H, T, D]."""
    return part[0].reshape(part.shape[1], samples, -1, part.shape[3]).transpose(0, 1)


def _one(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """The queries are those of the last keys."""
    length, before = key.shape[2], key.shape[2] - query.shape[2]
    window = length if window is None else min(window, length)
    mask = None
    if window < length or before:
        position = torch.arange(length, device=query.device)
        gap = position[before:, None] - position[None, :]
        mask = (gap >= 0) & (gap < window)
    gqa = query.shape[1] != key.shape[1]
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa
    )


def _varlen() -> Any:
    """torch's variable-length flash attention, if this torch's takes what is needed here."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"scale", "window_size", "enable_gqa"} <= set(known) else None


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: tuple[Tensor, Tensor, int, int],
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """`lengths`: of queries and keys, cumulative, and the longest of each. Flash attention aligns the last query with the last key."""
    left = -1 if window is None else window - 1
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    found: Tensor = _varlen()(
        query,
        key,
        value,
        *lengths,
        scale=scaling,
        window_size=(left, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return found.unsqueeze(0)


def no_mask(*_: Any, **__: Any) -> None:
    """Borders say what a mask would."""


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, no_mask)
AttentionInterface.register(BRANCHED, branched_attention)
AttentionMaskInterface.register(BRANCHED, no_mask)
