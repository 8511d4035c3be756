"""Which samples are siblings, and what of their tokens is kept: one automaton a group, bounded over all groups. Pure.

A group's automaton holds its prompt once; each sample goes on from there, whether it is generated here (`enter`, `extend`) or what it said
on another engine is told (`hear`). Only its own group's automaton ever drafts for a sample.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from rollout.engines.speculation.automaton import ROOT, SuffixAutomaton
from scavenger.protocol.messages import SampleKey

#: Tokens of all groups together. Text takes 60 to 100 bytes of host memory a token here.
MAX_TOKENS = 1 << 19
#: Of several contexts that fit, those that are this long at least are worth a draft: a single token says little.
MIN_CONTEXT = 2
_NEW = -1


def group_of(key: SampleKey, prompt: Sequence[int]) -> Hashable:
    """What names the group of a sample: its siblings have the same purpose, step, number of the prompt, and prompt."""
    return key.purpose, key.step, key.prompt, tuple(prompt)


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """A guess at a sample's next tokens. `frequency[i]`: how often `tokens[i]` followed where `tokens[:i]` had, in (0, 1).

    `context`: tokens of the sample that the guess is made from.
    """

    tokens: tuple[int, ...] = ()
    frequency: tuple[float, ...] = ()
    context: int = 0


NO_DRAFT = DraftTokens()


@dataclass(slots=True)
class Group:
    """What one group's samples said. `at`: where each sample that is generated now is in it."""

    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    start: int = _NEW  # after the prompt
    tokens: int = 0
    at: dict[Hashable, int] = field(default_factory=dict)  # by the engine's handle of the sample
    index: dict[Hashable, int] = field(default_factory=dict)  # `SampleKey.index`, by the same
    #: By index: how many tokens of the sample's completion are known, and where they end in the automaton.
    known: dict[int, tuple[int, int]] = field(default_factory=dict)

    def begin(self, prompt: Sequence[int]) -> int:
        """Where a sample's completion begins. Takes the prompt at its first call."""
        if self.start == _NEW:
            self.start = self.automaton.extend(ROOT, prompt)
            self.tokens += len(prompt)
        return self.start

    def enter(self, handle: Hashable, index: int, accepted: Sequence[int]) -> None:
        """A sample is generated here, with so many tokens. Those that are known of it are not counted again."""
        counted = min(self.known.get(index, (0, 0))[0], len(accepted))
        state = self.automaton.extend(self.start, accepted[:counted], count=False)
        self.at[handle] = self.automaton.extend(state, accepted[counted:])
        self.index[handle] = index
        self.known[index] = len(accepted), self.at[handle]
        self.tokens += len(accepted)

    def extend(self, handle: Hashable, tokens: Sequence[int]) -> None:
        """The sample got these tokens here."""
        self.at[handle] = state = self.automaton.extend(self.at[handle], tokens)
        index = self.index[handle]
        self.known[index] = self.known.get(index, (0, 0))[0] + len(tokens), state
        self.tokens += len(tokens)

    def hear(self, index: int, offset: int, tokens: Sequence[int]) -> None:
        """A sample said `tokens` elsewhere, from `offset` of its completion on. What is known of it changes nothing. Behind a gap its
        context is empty."""
        length, state = self.known.get(index, (0, self.start))
        end = offset + len(tokens)
        if end <= length or index in self.index.values():
            return
        new = tokens[max(0, length - offset) :]
        if offset > length:
            state = ROOT
        self.known[index] = end, self.automaton.extend(state, new)
        self.tokens += len(new)

    def leave(self, handle: Hashable) -> None:
        """The sample is no longer generated here."""
        del self.at[handle], self.index[handle]

    def forget(self) -> None:
        """All that was said so far; its samples go on from nothing."""
        self.automaton, self.start, self.tokens = SuffixAutomaton(), ROOT, 0
        self.at = dict.fromkeys(self.at, ROOT)
        self.known.clear()

    def draft(self, handle: Hashable, most: int) -> DraftTokens:
        """At most `most` tokens that followed the longest suffix of the sample that was followed by anything, the most frequent first."""
        automaton = self.automaton
        state = automaton.longest_continued(self.at[handle])
        context = automaton.length(state)
        tokens: list[int] = []
        frequency: list[float] = []
        while len(tokens) < most and automaton.length(state) >= MIN_CONTEXT:
            found = automaton.likeliest(state)
            if found is None:
                # The end of what a sibling said so far: a shorter context may go on.
                state = automaton.longest_continued(state)
                continue
            token, following, places = found
            tokens.append(token)
            # Of n places at which something followed; one place more stands for all that was not seen (Laplace).
            frequency.append(max(places, 1) / (automaton.continued(state) + 1))
            state = following
        return DraftTokens(tuple(tokens), tuple(frequency), context) if tokens else NO_DRAFT


class Groups:
    """The groups of one engine. The least recently used one that generates nothing is dropped first; a group that alone fills the memory
    begins anew."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._groups: OrderedDict[Hashable, Group] = OrderedDict()
        self._of: dict[Hashable, Group] = {}  # by handle
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def tokens(self) -> int:
        """Kept now, of all groups."""
        return self._tokens

    def enter(
        self, handle: Hashable, name: Hashable, index: int, prompt: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """A sample is generated from now on. `name`: of its group (`group_of`); `index`: its place there; `accepted`: tokens of its
        completion that there were before."""
        group = self._group(name)
        before = group.tokens
        group.begin(prompt)
        group.enter(handle, index, accepted)
        self._of[handle] = group
        self._grew(group, group.tokens - before)

    def extend(self, handle: Hashable, tokens: Sequence[int]) -> None:
        """The sample got these tokens."""
        group = self._of.get(handle)
        if group is None or not tokens:
            return
        group.extend(handle, tokens)
        self._grew(group, len(tokens))

    def leave(self, handle: Hashable) -> None:
        """The sample is no longer generated here; what it said stays for its siblings."""
        group = self._of.pop(handle, None)
        if group is not None:
            group.leave(handle)

    def hear(
        self, name: Hashable, prompt: Sequence[int] | None, index: int, offset: int, tokens: Sequence[int]
    ) -> None:
        """A sample of the group said this on another engine. `prompt`: of a group that may be new here; None: it is dropped if it is."""
        if prompt is None and name not in self._groups:
            return
        group = self._group(name)
        before = group.tokens
        if prompt is not None:
            group.begin(prompt)
        group.hear(index, offset, tokens)
        self._grew(group, group.tokens - before)

    def drop(self, name: Hashable) -> None:
        """No sample of the group is generated here any more, nor will be soon: forget what was said, unless one is."""
        group = self._groups.get(name)
        if group is not None and not group.at:
            self._tokens -= self._groups.pop(name).tokens

    def draft(self, handle: Hashable, most: int) -> DraftTokens:
        """A guess at the sample's next `most` tokens."""
        group = self._of.get(handle)
        return group.draft(handle, most) if group is not None and most > 0 else NO_DRAFT

    def _group(self, name: Hashable) -> Group:
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = Group()
        self._groups.move_to_end(name)
        return group

    def _grew(self, grown: Group, by: int) -> None:
        self._tokens += by
        if self._tokens <= self._max_tokens:
            return
        for name in [name for name, group in self._groups.items() if not group.at]:
            self._tokens -= self._groups.pop(name).tokens
            if self._tokens <= self._max_tokens:
                return
        # All that is left is being generated: the groups that were begun first give up what they know, this one last.
        for group in [*(g for g in self._groups.values() if g is not grown), grown]:
            self._tokens -= group.tokens
            group.forget()
            if self._tokens <= self._max_tokens:
                return
