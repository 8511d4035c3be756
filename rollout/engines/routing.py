"""Which experts a token went to: recorded where it is generated, and repeated where it is trained (router replay).

A mixture of experts trains best on the experts that generated: engine and trainer round differently, and where two experts' scores are
close, each may choose another. Owns how choices are packed, where a transformers model makes them, and how scores follow from given ones.
Knows no engine, no loss and no message.

A token's row is that of the position whose logits it was drawn from: the prompt's last for the first token, and so on. So each generated
token has one, whoever generated the token before, and those are all positions that a loss reads. Prompts are routed anew.

    row   [layers with experts, experts a token], each one byte, or two (little-endian) where there are more than 256
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

MANY = 256


def _qwen3(router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    scores = functional.softmax(logits, dtype=torch.float, dim=-1).gather(1, chosen)
    if router.norm_topk_prob:
        scores = scores / scores.sum(dim=-1, keepdim=True)
    return scores.to(logits.dtype)


def _gpt_oss(_router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    return functional.softmax(logits.gather(1, chosen), dim=1, dtype=logits.dtype)


#: transformers' routers, and how the scores of chosen experts follow from all logits. Each returns (logits, scores, chosen).
ROUTERS: Mapping[str, Callable[[Any, Tensor, Tensor], Tensor]] = MappingProxyType(
    {"Qwen3MoeTopKRouter": _qwen3, "GptOssTopKRouter": _gpt_oss}
)
#: config.json's `model_type` of the models that have them.
KNOWN = ("qwen3_moe", "gpt_oss")


def routers(model: nn.Module) -> list[nn.Module]:
    """In the order of the layers."""
    return [module for module in model.modules() if type(module).__name__ in ROUTERS]


def pack(chosen: Tensor, experts: int) -> list[bytes]:
    """`chosen` [n, layers, k] -> n rows."""
    stored = chosen.cpu().numpy().astype("u1" if experts <= MANY else "<u2")
    return [row.tobytes() for row in stored]


class Recorder:
    """Notes what a model's routers choose. For a model that computes one batch at a time."""

    def __init__(self, model: nn.Module, experts: int) -> None:
        self._experts = experts
        self._found: list[Tensor] = []
        for router in routers(model):
            router.register_forward_hook(self._note)

    def _note(self, _router: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        self._found.append(output[2])

    def last(self, lines: int, count: int = 1) -> list[list[bytes]]:
        """Of the last pass, the last `count` positions of each of so many lines."""
        found, self._found = self._found, []
        rows = [one.view(lines, -1, one.shape[-1])[:, -count:].flatten(0, 1) for one in found]
        packed = pack(torch.stack(rows, dim=1), self._experts)
        return [packed[start : start + count] for start in range(0, len(packed), count)]

    def forget(self) -> None:
        self._found = []
