"""Made-up groups of rows of different lengths."""

from __future__ import annotations

import random

from scavenger import wire
from trainer.batching import Row


def make_group(number: int, size: int = 4, prompt_tokens: int = 7, most: int = 8) -> tuple[Row, ...]:
    draw = random.Random(number)
    rows = []
    for index in range(size):
        length = draw.randint(1, most)
        rows.append(
            Row(
                number * size + index,
                wire.pack_tokens([draw.randrange(2, 13) for _ in range(prompt_tokens)]),
                wire.pack_tokens([draw.randrange(1, 13) for _ in range(length)]),
                wire.pack_logprobs([draw.uniform(-4, -1) for _ in range(length)]),
                draw.uniform(-2, 2),
            )
        )
    return tuple(rows)
