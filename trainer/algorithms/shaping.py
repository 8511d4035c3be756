"""What becomes of answers that the length limit ended. Pure; knows no tensor, group or model."""

from __future__ import annotations


def overlong_penalty(length: int, max_tokens: int, buffer_tokens: int) -> float:
    """DAPO's soft overlong punishment (Yu et al., arXiv 2503.14476, eq. 13), which is added to the reward.

    0 up to `max_tokens - buffer_tokens`, then falling linearly to -1 at `max_tokens`.
    """
    start = max_tokens - buffer_tokens
    if length <= start:
        return 0.0
    return max(-1.0, (start - length) / buffer_tokens)
