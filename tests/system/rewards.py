"""A reward that a random model gets partly right, so that every step has a gradient."""

from __future__ import annotations

from typing import Any


def even_share(prompt: str, answer: str, meta: dict[str, Any]) -> float:
    """Share of even digits among the answer's characters; 0 for an empty answer."""
    return sum(c in "02468" for c in answer) / len(answer) if answer else 0.0


def quotes(prompt: str, answer: str, meta: dict[str, Any]) -> float:
    """A judge that fails with the answer in its words, as many do."""
    raise ValueError(f"SWORDFISH: cannot judge {answer!r} of {prompt!r}")
