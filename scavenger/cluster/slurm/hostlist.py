"""Pure: Slurm's compressed host lists, 'gpu[01-03,7],login1' -> names."""

from __future__ import annotations

import re
from functools import lru_cache

from scavenger.errors import ClusterUnavailable
from scavenger.parsing import whole

_LIMIT = 100_000
#: A name's characters (DNS has 255), and its ranges in brackets: Slurm's own programs write two.
_LONGEST, _RANGES = 255, 8
#: What stands outside brackets. Anything else is in no node's name: the answer is damaged, or of an unknown release.
_NAME = re.compile(r"[\w.-]*", re.ASCII)


@lru_cache(256)
def planned(text: str) -> tuple[str, ...]:
    """`expand`, remembered: all waiting tasks of an array show the same nodes, and most plans are those of the look before."""
    return tuple(expand(text))


def expand(text: str) -> list[str]:
    """Names in the order written, zero padding kept. Raises `ClusterUnavailable` on a malformed or absurdly long list."""
    names: list[str] = []
    for item in _split(text):
        names += _expand_item(item)
        if len(names) > _LIMIT:
            raise _too_long(text)
    return names


def _split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    items = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if ",".join(items) != text:
        raise ClusterUnavailable(f"malformed host list {text[:80]!r}")
    return items


def _expand_item(item: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", item)
    if len(item if match is None else item[: match.start()]) > _LONGEST or item.count("[") > _RANGES:
        raise ClusterUnavailable(f"malformed host list {item[:80]!r}")
    if not _NAME.fullmatch(item if match is None else item[: match.start()]):
        raise ClusterUnavailable(f"a host's name cannot be {item[:80]!r}")
    if match is None:
        return [item]
    # the tails are within the limit, and so is each part: what is held before the product is checked is small
    head, tails, numbers = item[: match.start()], _expand_item(item[match.end() :]), list[str]()
    for part in match[1].split(","):
        numbers += _numbers(part)
        if len(numbers) * len(tails) > _LIMIT:
            raise _too_long(item)
    return [f"{head}{number}{tail}" for number in numbers for tail in tails]


def _numbers(part: str) -> list[str]:
    first, dash, last = part.partition("-")
    low, high = whole(first), whole(last if dash else first)
    if low is None or high is None or high < low or high - low > _LIMIT:
        raise ClusterUnavailable(f"malformed host range {part[:40]!r}")
    return [str(number).zfill(len(first)) for number in range(low, high + 1)]


def _too_long(text: str) -> ClusterUnavailable:
    return ClusterUnavailable(f"a host list of more than {_LIMIT:,} names: {text[:80]!r}")
