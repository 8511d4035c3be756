"""Pure: Slurm's compressed host lists, 'gpu[01-03,7],login1' -> names."""

from __future__ import annotations

import re
from functools import lru_cache

from scavenger.errors import ClusterUnavailable

_LIMIT = 100_000


@lru_cache(256)
def planned(text: str) -> tuple[str, ...]:
    """`expand`, remembered: all waiting tasks of an array show the same nodes, and most plans are those of the look before."""
    return tuple(expand(text))


def expand(text: str) -> list[str]:
    """Names in the order written, zero padding kept. Raises `ClusterUnavailable` on a malformed or absurdly long list."""
    names = [name for item in _split(text) for name in _expand_item(item)]
    if len(names) > _LIMIT:
        raise ClusterUnavailable(f"a host list of {len(names)} names: {text[:80]!r}")
    return names


def _split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    items = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if ",".join(items) != text:
        raise ClusterUnavailable(f"malformed host list {text[:80]!r}")
    return items


def _expand_item(item: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", item)
    if match is None:
        return [item]
    head, tails = item[:match.start()], _expand_item(item[match.end():])
    return [f"{head}{number}{tail}" for part in match[1].split(",") for number in _numbers(part) for tail in tails]


def _numbers(part: str) -> list[str]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
    if match is None:
        raise ClusterUnavailable(f"malformed host range {part[:40]!r}")
    low, high = int(match[1]), int(match[2] or match[1])
    if high < low or high - low > _LIMIT:
        raise ClusterUnavailable(f"malformed host range {part[:40]!r}")
    return [str(number).zfill(len(match[1])) for number in range(low, high + 1)]
