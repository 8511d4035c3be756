"""Causal attention over samples packed into one line, which never looks over a sample's border. Registered with transformers as `PACKED`.

On a GPU, in a 16-bit type and where this torch has it, one call of its variable-length flash attention; else `scaled_dot_product_attention`
once a sample, causal and without a mask. Either way nothing is computed for padding or across borders. Knows no model and no batch.
Boundary: one attention kernel, which knows no model.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from scavenger.errors import ConfigError

PACKED = "scavenger_packed"
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
    asked = [name for name in _UNKNOWN if more.get(name) is not None]
    borders = more.get("cu_seq_lens_q")
    if borders is None or asked:
        what = (
            f"asks attention for {asked[0]}"
            if asked
            else "does not hand the samples' borders to its attention"
        )
        raise ConfigError(
            f"{type(module).__name__} {what}: its samples cannot be packed", "set trainer.packing = false"
        )
    window = more.get("sliding_window")
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and _varlen() is not None:
        return _flash(query, key, value, borders, more["max_length_q"], scaling, window), None
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


def _stacked(part: Tensor, samples: int) -> Tensor:
    """[1, H, S * T, D] of S samples of one length -> [S, H, T, D]."""
    return part[0].reshape(part.shape[1], samples, -1, part.shape[3]).transpose(0, 1)


def _one(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    length = query.shape[2]
    mask = None
    if window is not None and length > window:
        position = torch.arange(length, device=query.device)
        gap = position[:, None] - position[None, :]
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
    borders: Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    left = -1 if window is None else window - 1
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    found: Tensor = _varlen()(
        query,
        key,
        value,
        borders,
        borders,
        longest,
        longest,
        scale=scaling,
        window_size=(left, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return found.unsqueeze(0)


def no_mask(*_: Any, **__: Any) -> None:
    """Borders say what a mask would."""


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, no_mask)
