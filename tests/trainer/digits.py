"""A reward for untrained models, in a module of its own: the process that calls it imports nothing else."""

from __future__ import annotations

from typing import Any


def first_digits(prompt: str, completion: str, meta: dict[str, Any]) -> float:
    """A reward that an untrained model meets sometimes, so that there is something to learn."""
    return float(sum(char in meta["answer"] for char in completion))
