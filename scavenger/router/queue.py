"""The samples of a run that wait for a worker, by weight version and in the order in which they shall be placed. Pure.

Owns the order (`placement.priority`) and keeps it as samples come and go: one that comes or goes alone costs no scan of the others, and
many at once (a fleet is lost, a step is submitted) cost one scan together. A sample's version and length must not change while it waits:
take it out first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence, Set
from typing import TYPE_CHECKING

from scavenger.router import placement

if TYPE_CHECKING:
    from scavenger.router.state import Sample

Key = tuple[bool, int, int, int]
#: Above this share of the queue a scan costs less than to find each sample by itself.
_MANY = 1 / 16


def _key(sample: Sample) -> Key:
    group = sample.group
    return placement.priority(sample.accepted, group.step, group.id, sample.id)


class Queue:
    """A sorted list of keys for each version, and those that came since it was sorted."""

    def __init__(self) -> None:
        self._samples: dict[int, Sample] = {}
        self._order: dict[int, list[Key]] = {}
        self._fresh: dict[int, list[Key]] = {}
        self.came = 0  # samples that ever came

    def add(self, sample: Sample) -> None:
        self._samples[sample.id] = sample
        self.came += 1
        version = sample.group.version
        fresh = self._fresh.get(version)
        if fresh is None:
            fresh = self._fresh[version] = []
        fresh.append(_key(sample))

    def discard(self, sample: Sample) -> None:
        """Take a sample out; does nothing when it does not wait."""
        if self._samples.pop(sample.id, None) is None:
            return
        version, key = sample.group.version, _key(sample)
        order = self._sorted(version)
        at = bisect_left(order, key)
        assert order[at] == key, f"sample {sample.id} changed while it waited"
        del order[at]
        if not order:
            del self._order[version]

    def discard_all(self, samples: Sequence[Sample]) -> None:
        """Take samples out, all of which wait for the same version."""
        if not samples:
            return
        version = samples[0].group.version
        order = self._sorted(version)
        if len(samples) < len(order) * _MANY:
            for sample in samples:
                self.discard(sample)
            return
        for sample in samples:
            del self._samples[sample.id]
        left = [key for key in order if key[3] in self._samples]
        assert len(left) == len(order) - len(samples), "samples changed while they waited"
        if left:
            self._order[version] = left
        else:
            del self._order[version]

    def versions(self) -> Set[int]:
        """Versions that samples wait for."""
        return self._order.keys() | self._fresh.keys() if self._fresh else self._order.keys()

    def waiting(self, version: int) -> Iterator[Sample]:
        """The samples that wait for a version, first come those to be placed first."""
        for key in self._sorted(version):
            yield self._samples[key[3]]

    def waits_for(self, sample_id: int, version: int) -> bool:
        """Whether a sample waits, and for this version."""
        sample = self._samples.get(sample_id)
        return sample is not None and sample.group.version == version

    def _sorted(self, version: int) -> list[Key]:
        fresh = self._fresh.pop(version, None)
        order = self._order.get(version, [])
        if fresh:
            self._order[version] = order
            if len(fresh) < len(order) * _MANY:
                for key in fresh:
                    insort(order, key)
            else:
                order += fresh
                order.sort()
        return order

    def __contains__(self, sample_id: object) -> bool:
        return sample_id in self._samples

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._samples.values())
