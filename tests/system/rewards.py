"""A reward that a random model gets partly right, so that every step has a gradient."""

from __future__ import annotations

from typing import Any


def even_share(prompt: str, completion: str, meta: dict[str, Any]) -> float:
    """Share of even digits among the completion's characters; 0 for an empty completion."""
    return sum(c in "02468" for c in completion) / len(completion) if completion else 0.0


def quotes(prompt: str, completion: str, meta: dict[str, Any]) -> float:
    """A judge that fails with the completion in its words, as many do."""
    raise ValueError(f"SWORDFISH: cannot judge {completion!r} of {prompt!r}")
