"""Tensors of a micro-batch. Knows rows and tensors, no model.

Three layouts. *Padded*: one sample a line, all of one width, for deterministic runs, where a group's gradient must not depend on its
company. *Packed*: all samples in one line, each with positions from 0, and no padding at all. *Branched*: as packed, but a prefix that
samples share is there once. What the loss needs is flat in all: the trained tokens of one sample after another. Observations between them
are seen by the model, and are nothing to the loss.
Boundary: tensors of a micro-batch; pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from trainer.data import prefixes
from trainer.data.batching import Micro, TrainRow


@dataclass(frozen=True, slots=True)
class Batch:
    """`inputs` [L, T] int64; `positions` [1, T] and `borders` [S + 1] int32 where samples are packed, else None.

    Branched: `seen` [K] int64 are the places in the line that each piece between borders sees, its own last; `seen_borders` [S + 1] int32
    their shares of it, `longest_seen` the largest. Else None and 0.

    The rest is flat over trained tokens: `at` [N] their predecessors' places in the flattened inputs, `targets` [N] the tokens
    themselves, `row` [N] whose they are, `behaviour` and `proximal` [N] (`proximal` None: not computed). `advantages` [B].
    `turn_advantages` [N]: of each token its turn's, where a row has turns with advantages of their own; a row without has its advantage
    there. None: no row has any. `routing` [N, bytes a token] (None: not recorded). `others` [B]: trained tokens in other rows of the same
    sample (None: there are none).
    """

    inputs: Tensor
    positions: Tensor | None
    borders: Tensor | None
    longest: int
    at: Tensor
    targets: Tensor
    row: Tensor
    behaviour: Tensor
    proximal: Tensor | None
    advantages: Tensor
    routing: Tensor | None = None
    others: Tensor | None = None
    turn_advantages: Tensor | None = None
    seen: Tensor | None = None
    seen_borders: Tensor | None = None
    longest_seen: int = 0

    def to(self, device: torch.device) -> Batch:
        moved: dict[str, Any] = {
            name: value.to(device)
            for name in self.__slots__
            if isinstance(value := getattr(self, name), Tensor)
        }
        return replace(self, **moved)


def padded(micro: Micro, dtype: torch.dtype) -> Batch:
    """Rows padded on the right to the micro-batch's width. Causal attention never looks right, so padding needs no mask."""
    width = micro.width - 1
    inputs = torch.zeros(len(micro.rows), width, dtype=torch.int64)
    for line, row in enumerate(micro.rows):
        text = _ids(row.prompt + row.completion)[:-1]
        inputs[line, : len(text)] = text
    return _batch(micro, dtype, inputs, [line * width + _before(row) for line, row in enumerate(micro.rows)])


def packed(micro: Micro, dtype: torch.dtype) -> Batch:
    """Rows one after another in a single line. The last token of each predicts nothing and is left out."""
    texts = [_ids(row.prompt + row.completion) for row in micro.rows]
    texts = [text[:-1] if len(text) > 1 else text for text in texts]
    lengths = torch.tensor([len(text) for text in texts])
    borders = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    positions = torch.cat([torch.arange(len(text)) for text in texts]).unsqueeze(0)
    at = [start + _before(row) for start, row in zip(borders[:-1].tolist(), micro.rows, strict=True)]
    return _batch(micro, dtype, torch.cat(texts).unsqueeze(0), at, positions, borders.to(torch.int32))


def branched(micro: Micro, dtype: torch.dtype) -> Batch:
    """As `packed`, with each prefix that rows share once. A row's path: where in the line its tokens are, whichever row brought them.

    A row that adds nothing has no piece of the line: its tokens predict what they do for a row before.
    """
    rows = micro.rows
    pieces: list[Tensor] = []
    positions: list[Tensor] = []
    seen: list[Tensor] = []
    paths: dict[int, Tensor] = {}
    path, length = torch.zeros(0, dtype=torch.int64), 0
    for place, begin in prefixes.branches(rows):
        own = _ids(prefixes.text_of(rows[place]))[begin:]
        path = paths[place] = torch.cat([path[:begin], torch.arange(length, length + len(own))])
        length += len(own)
        if len(own):
            pieces.append(own)
            positions.append(torch.arange(begin, len(path)))
            seen.append(path)
    batch = _batch(
        micro,
        dtype,
        torch.cat(pieces).unsqueeze(0),
        [paths[place][_before(row)] for place, row in enumerate(rows)],
        torch.cat(positions).unsqueeze(0),
        _borders(pieces),
    )
    return replace(
        batch,
        longest=max(len(piece) for piece in pieces),
        seen=torch.cat(seen),
        seen_borders=_borders(seen),
        longest_seen=max(len(path) for path in seen),
    )


def _borders(pieces: Sequence[Tensor]) -> Tensor:
    return torch.tensor([0, *accumulate(len(piece) for piece in pieces)], dtype=torch.int32)


def _ids(tokens: bytes) -> Tensor:
    return torch.frombuffer(bytearray(tokens), dtype=torch.int32).to(torch.int64)


def _batch(
    micro: Micro,
    dtype: torch.dtype,
    inputs: Tensor,
    at: list[Tensor],
    positions: Tensor | None = None,
    borders: Tensor | None = None,
) -> Batch:
    rows = micro.rows
    places = [_places(row) for row in rows]
    known = any(row.proximal for row in rows)
    return Batch(
        inputs=inputs,
        positions=positions,
        borders=borders,
        longest=max(max(row.tokens - 1, 1) for row in rows),
        at=torch.cat(at),
        targets=torch.cat(
            [
                _ids(row.completion)[place] if row.completion else torch.zeros(0, dtype=torch.int64)
                for row, place in zip(rows, places, strict=True)
            ]
        ),
        row=torch.cat([torch.full((len(place),), position) for position, place in enumerate(places)]),
        behaviour=_floats([row.behaviour for row in rows], torch.float32, dtype),
        proximal=_floats([row.proximal for row in rows], torch.float64, dtype) if known else None,
        advantages=torch.tensor([row.advantage for row in rows], dtype=dtype),
        routing=_routing(rows),
        others=torch.tensor([row.others for row in rows], dtype=dtype)
        if any(row.others for row in rows)
        else None,
        turn_advantages=torch.cat([_turn_advantages(row, dtype) for row in rows])
        if any(row.turns for row in rows)
        else None,
    )


def _turn_advantages(row: TrainRow, dtype: torch.dtype) -> Tensor:
    turns = row.turns or ((row.trained, row.advantage),)
    if sum(tokens for tokens, _ in turns) != row.trained:
        raise ValueError(f"row {row.sample_id}: its turns are not its {row.trained} trained tokens")
    return torch.cat([torch.full((tokens,), advantage, dtype=dtype) for tokens, advantage in turns])


def _routing(rows: Sequence[TrainRow]) -> Tensor | None:
    joined = bytearray(b"".join(row.routing for row in rows))
    tokens = sum(row.trained for row in rows)
    if not joined or len(joined) % tokens:
        return None
    return torch.frombuffer(joined, dtype=torch.uint8).view(tokens, -1)


def _before(row: TrainRow) -> Tensor:
    """Of each trained token the place in its row whose output predicts it: of the first completion token the prompt's last."""
    return len(row.prompt) // 4 - 1 + _places(row)


def _places(row: TrainRow) -> Tensor:
    """Which tokens of the completion are trained."""
    if not row.mask:
        return torch.arange(len(row.completion) // 4)
    if len(row.mask) * 4 != len(row.completion):
        raise ValueError(
            f"row {row.sample_id}: a mask of {len(row.mask)} for {len(row.completion) // 4} tokens"
        )
    return torch.frombuffer(bytearray(row.mask), dtype=torch.uint8).nonzero()[:, 0]


def _floats(parts: list[bytes], stored: torch.dtype, dtype: torch.dtype) -> Tensor:
    joined = b"".join(parts)
    return (
        torch.frombuffer(bytearray(joined), dtype=stored).to(dtype) if joined else torch.zeros(0, dtype=dtype)
    )
