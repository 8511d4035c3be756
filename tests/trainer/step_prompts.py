"""The prompts of one step where none is replaced: what `PromptSource.take` gives a trainer that began at prompt 0."""

from __future__ import annotations

from trainer.data.prompts import PromptSource, PromptTask


def of_step(source: PromptSource, step: int) -> list[PromptTask]:
    """`step` is counted from 1."""
    per_step = source._config.data.prompts_per_step
    return source.take((step - 1) * per_step, per_step)
