"""Made-up groups of rows of different lengths."""

from __future__ import annotations

import random

from scavenger.protocol import messages
from trainer.data.batching import TrainRow


def make_group(number: int, size: int = 4, prompt_tokens: int = 7, most: int = 8) -> tuple[TrainRow, ...]:
    draw = random.Random(number)
    rows = []
    for index in range(size):
        length = draw.randint(1, most)
        rows.append(
            TrainRow(
                number * size + index,
                messages.pack_tokens([draw.randrange(2, 13) for _ in range(prompt_tokens)]),
                messages.pack_tokens([draw.randrange(1, 13) for _ in range(length)]),
                messages.pack_logprobs([draw.uniform(-4, -1) for _ in range(length)]),
                draw.uniform(-2, 2),
            )
        )
    return tuple(rows)
