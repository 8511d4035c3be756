"""Seer's synchronous scheduler with speculation (Qin et al., arXiv 2511.14617), after the paper's abstract and published summaries. Pure.

    divided rollout       a sample is generated in chunks; after each it goes back to one queue for all engines, and its KV is in a pool
                          that every engine reads. So a chunk may go on anywhere without a prefill.
    context-aware order   the first sample of each group is its probe: probes go first, of these the one with the fewest tokens. Then
                          samples of the group that is expected to be longest: a group's estimate is its longest completion that ended, and
                          one of which none ended counts as the longest.
    grouped speculation   drafts come from all siblings, wherever they ran

No code of it is published, and the text of the paper was not at hand whole. What is open is decided in its favour: the pool costs nothing,
an engine takes the sample that the order names as soon as it has a slot, a lost engine costs the chunk alone, and reserved GPUs change
between generating and training at once (`asynchronous_run.synchronous`). `chunk_tokens` is given; the best of several counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.baselines.asynchronous import Counts, Queued, Waiting


@dataclass(frozen=True, slots=True)
class Seer:
    chunk_tokens: int = 2048
    name: str = "Seer"
    prefills: bool = False  # nothing runs when weights come

    def admit(self, counts: Counts) -> int:
        """A step's groups at once, when the step before it is trained."""
        return max(0, (counts.version + 1) * counts.batch - counts.accepted - counts.running)

    def pick(self, waiting: Sequence[Waiting], longest: Mapping[int, int]) -> int:
        probes = [place for place, one in enumerate(waiting) if not one.index]
        if probes:
            return min(probes, key=lambda place: (waiting[place].generated, waiting[place].group))
        return max(
            range(len(waiting)),
            key=lambda place: (longest.get(waiting[place].group, math.inf), -waiting[place].group, -place),
        )

    def cancel(self, ages: Mapping[int, int], counts: Counts) -> Sequence[int]:
        return ()

    def too_old(self, began: int, counts: Counts) -> bool:
        return False

    def first(self, queued: Sequence[Queued]) -> Sequence[Queued]:
        return queued

    def overflow(self, counts: Counts) -> int:
        return 0
