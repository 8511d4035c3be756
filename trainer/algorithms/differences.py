"""How far trainer and engine are apart at each token, as the ledger keeps it of a share of a step's groups: which groups, and what of them.

d = proximal - behaviour, in nats, packed float16: 11 bits of it, so a small difference is as exact as a large one. Which groups follows
from the seed, the step and the prompts alone, never from arrival; the groups of one share are among those of every larger one. Pure.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from scavenger.protocol.messages import MAX_CALL_SAMPLES, MAX_DIFFERENCES_BYTES, TokenDifferences
from trainer.data.batching import Micro, TrainRow

#: The greatest float16.
MOST = 65504.0


def packed(micro: Micro, difference: Tensor) -> list[bytes]:
    """Of each row of a micro-batch. `difference`: d of all trained tokens, row by row."""
    values = difference.detach().clamp(-MOST, MOST).to(torch.float16).cpu()
    return [of_row.numpy().tobytes() for of_row in torch.split(values, [row.trained for row in micro.rows])]


def most(share: float, groups: int) -> int:
    """How many groups of a step are kept."""
    return math.ceil(share * groups)


def first(seed: int, step: int, prompts: Iterable[int], count: int) -> list[int]:
    """The `count` prompts whose groups are kept, in the order in which they are."""

    def place(prompt: int) -> bytes:
        return hashlib.blake2b(f"differences/{seed}/{step}/{prompt}".encode(), digest_size=8).digest()

    return sorted(prompts, key=lambda prompt: (place(prompt), prompt))[:count]


def reported(groups: Sequence[Sequence[TrainRow]], values: Mapping[int, bytes]) -> list[TokenDifferences]:
    """What the daemon is told of these groups: whole ones, as far as one message holds them. `values`: by row."""
    found: list[TokenDifferences] = []
    left = MAX_DIFFERENCES_BYTES
    for group in groups:
        of_group = [
            one for row in group if row.sample_id in values for one in of_row(row, values[row.sample_id])
        ]
        left -= sum(len(one.values) for one in of_group)
        if left < 0 or len(found) + len(of_group) > MAX_CALL_SAMPLES:
            break
        found += of_group
    return found


def of_row(row: TrainRow, values: bytes) -> list[TokenDifferences]:
    """Of a sample; or of each of an episode's turns that the row trains, named by the digest of the tokens up to its end, with the
    episode's own number as `sample_id`."""
    if row.episode < 0:
        return [TokenDifferences(row.sample_id, values, mean(values))] if values else []
    found, at, mask = [], 0, row.mask or bytes([1]) * (len(row.completion) // 4)
    read, upto = hashlib.sha256(row.prompt), 0
    for begin, end in spells(mask):
        read.update(row.completion[4 * upto : 4 * end])
        upto, taken = end, values[2 * at : 2 * (at + end - begin)]
        at += end - begin
        found.append(TokenDifferences(row.episode, taken, mean(taken), read.digest()))
    return found


def spells(mask: bytes) -> list[tuple[int, int]]:
    """(begin, end) of each run of ones."""
    found, at = list[tuple[int, int]](), 0
    while (begin := mask.find(1, at)) >= 0:
        at = mask.find(0, begin)
        at = len(mask) if at < 0 else at
        found.append((begin, at))
    return found


def mean(values: bytes) -> float:
    """Of the absolute values that are numbers; 0 where none is."""
    found = torch.frombuffer(bytearray(values), dtype=torch.float16).double().abs()
    found = found[torch.isfinite(found)]
    return float(found.mean()) if found.numel() else 0.0
