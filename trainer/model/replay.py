"""Router replay (`algorithm.router_replay`): tokens go to the experts that the engine chose when it generated them.

Owns what a run needs for it, asked by `init --check` and at the start, and how recorded choices take the place of a model's own. Which
modules choose, and how a choice is packed, `rollout.engines.routing` says for engines and trainer alike.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rollout.engines.routing import KNOWN, MANY, ROUTERS, routers
from scavenger.config import RunConfig
from scavenger.errors import ConfigError, EngineError
from scavenger.protocol.messages import MAX_MESSAGE_BYTES, MAX_ROUTING
from scavenger.sizing.shape import of_config

TOKEN_NBYTES = 12  # an id and two logprobs
ENVELOPE_NBYTES = 1 << 20


def routing_nbytes(config: RunConfig) -> int:
    """Bytes of each generated token that say which experts it went to. Raises `ConfigError` where a run cannot have them."""
    values = _read(config.model.path / "config.json")
    kind, width = str(values.get("model_type")), of_config(values).routing_nbytes
    if kind not in KNOWN or not width:
        raise ConfigError(
            f"algorithm.router_replay = true: model_type {kind!r} has no experts whose choice can be repeated",
            f"set it to false, or train a model of {' or '.join(KNOWN)}",
        )
    if width > MAX_ROUTING:
        raise ConfigError(
            f"algorithm.router_replay = true: {width:,} bytes a token say its experts, {MAX_ROUTING:,} at most",
            "set it to false",
        )
    group = config.data.samples_per_prompt * config.sampling.max_tokens * (TOKEN_NBYTES + width)
    if group > MAX_MESSAGE_BYTES - ENVELOPE_NBYTES:
        raise ConfigError(
            f"algorithm.router_replay = true: a group of {config.data.samples_per_prompt} completions of {config.sampling.max_tokens:,} "
            f"tokens has {group / 2**20:,.0f} MiB with {width} bytes a token for its experts, a message {MAX_MESSAGE_BYTES / 2**20:,.0f}",
            "lower sampling.max_tokens or data.samples_per_prompt, or set it to false",
        )
    return width


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path: {path}: {error}", "give the folder of a Hugging Face model"
        ) from error


class Replay:
    """Makes a model's routers choose what was recorded, at the positions that were; elsewhere they choose by themselves. Gradients reach
    the routers as ever, by the scores of the chosen.

    What `use` says holds until it says otherwise: a layer may be computed again in the backward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        found = routers(model)
        if not found:
            raise ConfigError(
                f"algorithm.router_replay = true: {type(model).__name__} has no experts whose choice can be repeated",
                f"set it to false, or train a model of {' or '.join(KNOWN)}",
            )
        some: Any = found[0]
        self._shape = len(found), int(some.top_k)
        self._itemsize = 1 if some.num_experts <= MANY else 2
        self._experts = int(some.num_experts)
        self._chosen: Tensor | None = None  # [positions, layers, k], -1: not recorded
        for layer, router in enumerate(found):
            router.register_forward_hook(partial(self._forced, layer))

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return self._shape[0] * self._shape[1] * self._itemsize

    def use(self, rows: Tensor | None, at: Tensor, positions: int) -> None:
        """`rows` [n, width] bytes, of `at` [n] among so many positions. None: of none.

        Raises `EngineError` for rows that are not this model's.
        """
        self._chosen = None
        if not len(at):
            return
        if rows is None or rows.shape != (len(at), self.width):
            has = "no routing" if rows is None else f"routing of {tuple(rows.shape)} bytes"
            raise EngineError(
                f"a micro-batch of {len(at)} tokens came with {has}, {self.width} bytes a token are due",
                "samples of before algorithm.router_replay was set have none: begin a new run",
            )
        packed = rows.cpu().numpy().tobytes()
        values = np.frombuffer(packed, "u1" if self._itemsize == 1 else "<u2").astype(np.int64)
        found = torch.from_numpy(values).view(len(at), *self._shape).to(at.device)
        if int(found.max()) >= self._experts:
            raise EngineError(
                f"an engine names expert {int(found.max())}, the model has {self._experts}",
                "run trainer and engines with one model",
            )
        chosen = torch.full((positions, *self._shape), -1, device=at.device)
        chosen[at] = found
        self._chosen = chosen

    def off(self) -> None:
        self._chosen = None

    def _forced(
        self, layer: int, router: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        if self._chosen is None:
            return None
        logits, scores, own = output
        recorded = self._chosen[:, layer]
        chosen = torch.where(recorded >= 0, recorded, own)
        found = ROUTERS[type(router).__name__](router, logits, chosen)
        return logits, found.to(scores.dtype), chosen
