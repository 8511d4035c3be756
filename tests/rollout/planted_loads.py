"""A vLLM worker whose loads go wrong on demand, and that shows its bytes. Runs in vLLM's own processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any

from rollout.engines.vllm.worker import Extension as Ours

EXTENSION = "tests.rollout.planted_loads.Extension"


class Extension(Ours):
    def plant(self, fault: str) -> None:
        """`fault`: what befalls experts on their way into vLLM: "swapped", "missing", "withheld"; "" = nothing."""
        runner = self.model_runner
        plain = getattr(runner, "plain_reload", None) or runner.reload_weights
        runner.plain_reload = plain
        runner.reload_weights = lambda weights_iterator: plain(
            weights_iterator=_altered(weights_iterator, fault)
        )

    def raw_hashes(self) -> dict[str, str]:
        """Of every parameter's bytes as the forward pass reads them, its place in the tensor counted in."""
        model = self.model_runner.get_model()
        return {
            name: blake2b(value.detach().contiguous().numpy().tobytes()).hexdigest()
            for name, value in model.named_parameters()
        }


def _altered(weights: Iterable[tuple[str, Any]], fault: str) -> Iterator[tuple[str, Any]]:
    held: dict[str, tuple[str, Any]] = {}
    for name, tensor in weights:
        whole, one = name.endswith("layers.1.mlp.experts.down_proj"), _expert_of(name)
        if whole and fault == "swapped":
            yield name, tensor[[1, 0, *range(2, len(tensor))]]
        elif whole and fault == "missing":
            yield name, tensor[:-1]
        elif whole and fault == "withheld":
            continue
        elif one is not None and fault == "swapped" and one in (0, 1):
            held[f"{one}"] = (name, tensor)
            if len(held) == 2:
                (first, a), (second, b) = held.values()
                yield from ((first, b), (second, a))
        elif (one == 3 and fault == "missing") or (one is not None and fault == "withheld"):
            continue
        else:
            yield name, tensor


def _expert_of(name: str) -> int | None:
    """Of GPT-OSS's experts, which are given one by one."""
    before, _, after = name.partition("layers.1.mlp.experts.")
    index, _, parameter = after.partition(".")
    return int(index) if before and index.isdigit() and parameter == "w2_weight" else None
