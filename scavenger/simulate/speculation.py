"""What grouped speculation makes of a simulated engine's pass: acceptance by siblings, how long a draft is, tokens a second. Pure.

`engine.speculation = "group"` of a live run, whose engines draft from what siblings said (`rollout.engines.speculation`), there or on other
engines: the simulated daemon sends that as the live one does (`router.core.siblings`). A pass of b samples with d drafted tokens each reads
weights and KV once and computes b (1 + d) positions. A drafted token is accepted with probability p if all before it were, so a pass makes

    E(d) = (1 - p^(d + 1)) / (1 - p)

tokens a sample on average (Leviathan et al., arXiv 2211.17192, eq. 1). p is what the measured E at the longest draft says, by the
number of siblings that are done and that the engine knows. Chosen is the live engine's d: that with the most tokens a second, if it
promises `MARGIN` times those without.

What is not simulated: samples of one batch gain alike (their mean), siblings that run beside a sample count for nothing, and vLLM's passes
lose no overlap with their scheduling. Knows no samples and no time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from scavenger.errors import ConfigError

#: As `rollout.engines.speculation.length`: drafts must promise so many times the tokens a second.
MARGIN = 1.1


@dataclass(frozen=True, slots=True)
class AcceptanceCurve:
    """`points`: (siblings that are done, tokens a verification of a draft of `draft` tokens), in the order of the siblings; between them a
    straight line, beyond the last its value. `row_s`: what an engine takes to draft for a sample, beside the pass."""

    name: str
    points: tuple[tuple[float, float], ...]
    draft: int = 16
    row_s: float = 0.0

    def __post_init__(self) -> None:
        siblings, tokens = [at for at, _ in self.points], [made for _, made in self.points]
        if not siblings or siblings != sorted(set(siblings)) or self.draft < 1:
            raise ConfigError(
                f"acceptance {self.name!r}: siblings {siblings}, drafts of {self.draft} tokens",
                "give at least one point, in the order of the siblings, and drafts of 1 token or more",
            )
        if not all(1 <= made <= self.draft + 1 for made in tokens):
            raise ConfigError(
                f"acceptance {self.name!r}: {tokens} tokens a verification with drafts of {self.draft}",
                f"each is 1 to {self.draft + 1}",
            )

    def longest(self, siblings: float) -> float:
        """Tokens a verification of the longest draft."""
        before = self.points[0]
        for point in self.points:
            if point[0] >= siblings:
                if point[0] == before[0]:
                    return point[1]
                share = (siblings - before[0]) / (point[0] - before[0])
                return before[1] + share * (point[1] - before[1])
            before = point
        return before[1]

    def chance(self, siblings: float) -> float:
        """p: that a drafted token is accepted if all before it were."""
        return _chance(self.longest(siblings), self.draft)

    def tokens(self, siblings: float, draft: int) -> float:
        """E: of a draft of so many tokens."""
        return made(self.chance(siblings), draft)


def made(chance: float, draft: int) -> float:
    """1 + p + ... + p^draft."""
    return math.fsum(chance**place for place in range(draft + 1))


@functools.lru_cache(maxsize=4096)
def _chance(tokens: float, draft: int) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if made(middle, draft) < tokens else (low, middle)
    return (low + high) / 2


#: Measured by `benchmarks/speculation.py` (docs/benchmarks-archive.md): a task with checked answers, free text. 9 to 20 ms for 256 drafts
#: (docs/engines.md) are 57 us each in the middle.
CHECKED = AcceptanceCurve("checked", ((0, 1.10), (1, 7.84), (3, 8.97), (7, 9.18), (15, 9.28)), row_s=57e-6)
TEXT = AcceptanceCurve("text", ((0, 1.09), (1, 1.15), (3, 1.23), (7, 1.32), (15, 1.42)), row_s=57e-6)
#: Published by Seer (arXiv 2511.14617): mean acceptance length 1.70 without references to 2.53 with 15. What its drafts cost is not
#: known: nothing, here.
SEER = AcceptanceCurve("seer", ((0, 1.70), (15, 2.53)), draft=8)
CURVES = {one.name: one for one in (CHECKED, TEXT, SEER)}


@dataclass(frozen=True, slots=True)
class Draft:
    """Of one pass: drafted tokens of each sample, and what each makes on average."""

    length: int
    tokens: float


NO_DRAFT = Draft(0, 1.0)


def choose(curve: AcceptanceCurve, siblings: float, rows: int, pass_s: Sequence[float]) -> Draft:
    """`pass_s[d]`: seconds of a pass of `rows` samples with d drafted tokens each, d from 0 to the longest draft; without `row_s`, which
    the live engine does not see either."""
    chance = curve.chance(siblings)
    plain = best = rows / pass_s[0]
    found, tokens = NO_DRAFT, 1.0
    for length in range(1, min(curve.draft, len(pass_s) - 1) + 1):
        tokens += chance**length
        rate = rows * tokens / pass_s[length]
        if rate > best and rate > plain * MARGIN:
            best, found = rate, Draft(length, tokens)
    return found
