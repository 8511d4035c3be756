"""vLLM's online fp8 on a CPU: its own loading and reloading of quantised layers, with torch in place of the two kernels that CPUs lack.

Runs in vLLM's own processes, before they build the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.model_executor.layers.quantization.online import fp8

from rollout.engines.vllm.worker import Extension as Ours

EXTENSION = "tests.rollout.planted_fp8.Extension"


class _Ops:
    @staticmethod
    def scaled_fp8_quant(weight: Any, scale: Any) -> tuple[Any, Any]:
        return (weight / scale).to(torch.float8_e4m3fn), scale


class _Kernel:
    def process_weights_after_loading(self, layer: Any) -> None:
        pass


def _apply(_method: Any, layer: Any, x: Any, bias: Any = None) -> Any:
    return torch.nn.functional.linear(x, layer.weight.t().to(x.dtype) * layer.weight_scale.to(x.dtype), bias)


module: Any = fp8
module.ops = _Ops
module.init_fp8_linear_kernel = lambda **_: _Kernel()
module.Fp8PerTensorOnlineLinearMethod.apply = _apply


class Extension(Ours):
    def plant(self, withheld: str) -> None:
        """Tensors whose names end so do not reach vLLM."""
        runner = self.model_runner
        plain = getattr(runner, "plain_reload", None) or runner.reload_weights
        runner.plain_reload = plain
        runner.reload_weights = lambda weights_iterator: plain(
            weights_iterator=_without(weights_iterator, withheld)
        )

    def dtypes(self) -> dict[str, str]:
        return {name: str(value.dtype) for name, value in self.model_runner.get_model().named_parameters()}


def _without(weights: Iterable[tuple[str, Any]], withheld: str) -> Iterator[tuple[str, Any]]:
    return ((name, tensor) for name, tensor in weights if not withheld or not name.endswith(withheld))
