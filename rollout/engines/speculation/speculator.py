"""What an engine asks for drafts: it tells which samples run, what they said and how passes went, and gets drafts. Pure: time is told.

enter, extend, leave      the samples of the running batch and their tokens
hear, drop                what their siblings said on other engines, and when that is no longer needed
propose                   before a pass: a draft of each sample, cut to the length that pays, and why
verified, passed          after it: what was accepted, how long it took
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from rollout.engines.speculation.groups import DraftTokens, Groups
from rollout.engines.speculation.length import Acceptance, DraftLength, PassTime, draft_length
from scavenger.protocol.worker.events import Speculated

MAX_DRAFT = 16  # tokens of one draft
FIRST_DRAFT = 4  # tokens of a draft that is made before any paid; longer ones are made as shorter ones pay
#: Where drafts did not pay, none is made for 1, 2, 4, ... passes, so many at most, or until half of the rows are gone.
MAX_PAUSE = 32


@dataclass(frozen=True, slots=True)
class Proposal:
    """By handle, the draft of each sample that has one; the decision that cut them."""

    drafts: Mapping[Hashable, DraftTokens]
    decision: DraftLength


class Speculator:
    """Of one engine. `floor_s`: as in `PassTime`; `padded`: as in `draft_length`."""

    def __init__(
        self,
        groups: Groups | None = None,
        floor_s: float = 0.0,
        max_draft: int = MAX_DRAFT,
        *,
        padded: bool = True,
    ) -> None:
        self.groups = groups if groups is not None else Groups()
        self.total = Speculated()
        self._max_draft = max_draft
        self._padded = padded
        self._acceptance = Acceptance()
        self._time = PassTime(floor_s)
        self._depth = FIRST_DRAFT
        self._pause = self._pausing = 0  # passes: how long the last pause was to be, what is left of it
        self._pause_rows = 0  # samples of the pass for which it began

    def enter(
        self, handle: Hashable, name: Hashable, index: int, prompt: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """As in `Groups`."""
        self.groups.enter(handle, name, index, prompt, accepted)

    def extend(self, handle: Hashable, tokens: Sequence[int]) -> None:
        """As in `Groups`."""
        self.groups.extend(handle, tokens)

    def leave(self, handle: Hashable) -> None:
        """As in `Groups`."""
        self.groups.leave(handle)

    def hear(
        self, name: Hashable, prompt: Sequence[int] | None, index: int, offset: int, tokens: Sequence[int]
    ) -> None:
        """As in `Groups`."""
        self.groups.hear(name, prompt, index, offset, tokens)

    def drop(self, name: Hashable) -> None:
        """As in `Groups`."""
        self.groups.drop(name)

    def rests(self, rows: int) -> bool:
        """Whether the next pass, over so many samples, gets no drafts: they did not pay lately. Its samples' tokens may come later."""
        return self._pausing > 0 and 2 * rows > self._pause_rows

    def propose(self, room: Mapping[Hashable, int]) -> Proposal:
        """For a pass over these samples. `room`: by handle, how many drafted tokens may be verified, by the sample's own limits."""
        if self.rests(len(room)):
            self._pausing -= 1
            return Proposal(
                {}, DraftLength(0, float(len(room)), f"drafts did not pay: {self._pausing} passes more")
            )
        found: dict[Hashable, DraftTokens] = {}
        for handle, most in room.items():
            draft = self.groups.draft(handle, min(most, self._depth, self._max_draft))
            if draft.tokens:
                found[handle] = draft
        chance = self._acceptance.chance
        chances = [[chance(one) for one in draft.frequency] for draft in found.values()]
        decision = draft_length(chances, len(room), self._time, padded=self._padded)
        if not found:
            return Proposal({}, decision)
        if not decision.length:
            self._pause = min(MAX_PAUSE, 2 * self._pause or 1)
            self._pausing, self._pause_rows, self._depth = self._pause, len(room), FIRST_DRAFT
            return Proposal({}, decision)
        self._pause = self._pausing = 0
        self._depth = max(FIRST_DRAFT, 2 * decision.length)
        return Proposal({handle: _cut(draft, decision.length) for handle, draft in found.items()}, decision)

    def verified(self, draft: DraftTokens, accepted: int) -> None:
        """Of a draft that a pass verified, the first `accepted` tokens were right."""
        self._acceptance.judged(draft.frequency, accepted)
        total = self.total
        self.total = Speculated(
            total.drafted + len(draft.tokens), total.accepted + accepted, total.verifications + 1
        )

    def passed(self, positions: int, seconds: float) -> None:
        """A decode pass over so many positions, padding among them, took so long."""
        self._acceptance.age()
        self._time.measured(positions, seconds)


def _cut(draft: DraftTokens, length: int) -> DraftTokens:
    if len(draft.tokens) <= length:
        return draft
    return DraftTokens(draft.tokens[:length], draft.frequency[:length], draft.context)
