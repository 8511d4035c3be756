"""The samples of a run that wait for a worker, by weight version and in the order in which they shall be placed. Pure.

Owns the order (`placement.priority`) and keeps it as samples come and go, so that granting one lease costs no scan of the others.
A sample's version and length must not change while it waits: take it out first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import TYPE_CHECKING

from scavenger.router import placement

if TYPE_CHECKING:
    from scavenger.router.state import Sample

Key = tuple[bool, int, int, int]


def _key(sample: Sample) -> Key:
    return placement.priority(sample.accepted, sample.group.step, sample.group.id, sample.id)


class Queue:
    """A sorted list of keys for each version."""

    def __init__(self) -> None:
        self._samples: dict[int, Sample] = {}
        self._order: dict[int, list[Key]] = {}

    def add(self, sample: Sample) -> None:
        self._samples[sample.id] = sample
        insort(self._order.setdefault(sample.group.version, []), _key(sample))

    def discard(self, sample: Sample) -> None:
        """Take a sample out; does nothing when it does not wait."""
        if self._samples.pop(sample.id, None) is None:
            return
        version = sample.group.version
        order, key = self._order[version], _key(sample)
        at = bisect_left(order, key)
        assert order[at] == key, f"sample {sample.id} changed while it waited"
        del order[at]
        if not order:
            del self._order[version]

    def versions(self) -> set[int]:
        """Versions that samples wait for."""
        return set(self._order)

    def waiting(self, version: int) -> Iterator[Sample]:
        """The samples that wait for a version, first come those to be placed first."""
        for key in self._order.get(version, ()):
            yield self._samples[key[-1]]

    def __contains__(self, sample_id: object) -> bool:
        return sample_id in self._samples

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._samples.values())
