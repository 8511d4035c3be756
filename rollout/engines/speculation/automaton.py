"""A suffix automaton of several token sequences that grow side by side: what followed a sample's last tokens elsewhere, and how often.

Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985), in its form for a trie: each sequence grows at a state of
its own. Pure; knows tokens alone.

A state stands for all contexts that end at the same places; `length` is the longest's. What a sequence has said so far begins where the
sequence began, so it is the longest of its state whatever the others say, and the chain of suffix links from there names its suffixes,
longest first. So the longest suffix that has a continuation is found without a search.

Boundary: a data structure of sequences; it knows no samples.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

ROOT = 0
_NONE = -1
#: Contexts of one place that are counted, the longest first. A text that repeats one token has as many as it is long.
COUNTED = 256


class SuffixAutomaton:
    """States are numbers. At most two a token and one; 20 bytes each, and a dict for one that has several continuations."""

    def __init__(self) -> None:
        self._length = array("i", [0])
        self._link = array("i", [_NONE])
        self._count = array("i", [0])  # places at which its contexts end
        # Most states have one continuation: it lies here, and all of them in `_more` where there are several.
        self._token = array("i", [_NONE])
        self._target = array("i", [_NONE])
        self._more: dict[int, dict[int, int]] = {}

    def __len__(self) -> int:
        """States."""
        return len(self._length)

    def length(self, state: int) -> int:
        """Of the longest context that it stands for, in tokens."""
        return self._length[state]

    def count(self, state: int) -> int:
        """Places at which its contexts were seen."""
        return self._count[state]

    def link(self, state: int) -> int:
        """The state of the longest suffix that is another state's; -1 of `ROOT`."""
        return self._link[state]

    def extend(self, state: int, tokens: Iterable[int], *, count: bool = True) -> int:
        """The sequence at `state` goes on with `tokens` (ids from 0); returns where it then is. A sequence begins at `ROOT`, or where
        another one was: both share what was before.

        `count`: whether these places count, which they do not for tokens that the same sequence brought before.
        """
        for token in tokens:
            state = self._step(state, token)
            if count:
                self._add(state)
        return state

    def successors(self, state: int) -> Iterator[tuple[int, int]]:
        """(token, state) of each continuation."""
        if (several := self._more.get(state)) is not None:
            yield from several.items()
        elif (token := self._token[state]) != _NONE:
            yield token, self._target[state]

    def longest_continued(self, state: int) -> int:
        """Of a sequence at `state`, the longest suffix that has a continuation; `ROOT` where not even the empty one has."""
        token, link = self._token, self._link
        while token[state] == _NONE and state != ROOT:
            state = link[state]
        return state

    def likeliest(self, state: int) -> tuple[int, int, int] | None:
        """(token, state, places) of the most frequent continuation, of equals that with the smallest id; None where there is none."""
        count = self._count
        if (several := self._more.get(state)) is not None:
            most = max(several.items(), key=lambda one: (count[one[1]], -one[0]))
            return most[0], most[1], count[most[1]]
        if (token := self._token[state]) == _NONE:
            return None
        target = self._target[state]
        return token, target, count[target]

    def continued(self, state: int) -> int:
        """Places at which its contexts were seen and something followed."""
        if state in self._more:
            return sum(self._count[target] for target in self._more[state].values())
        return self._count[self._target[state]] if self._token[state] != _NONE else 0

    def _add(self, state: int) -> None:
        count, link = self._count, self._link
        for _ in range(COUNTED):
            if state <= ROOT:
                return
            count[state] += 1
            state = link[state]

    def _step(self, last: int, token: int) -> int:
        length = self._length
        known = self._next(last, token)
        if known != _NONE:
            # Another sequence said it; if in longer contexts alone, this one is a state of its own.
            return known if length[known] == length[last] + 1 else self._split(last, token, known)
        made = self._new(length[last] + 1)
        state = last
        while state != _NONE and (known := self._next(state, token)) == _NONE:
            self._set(state, token, made)
            state = self._link[state]
        if state == _NONE:
            self._link[made] = ROOT
        elif length[known] == length[state] + 1:
            self._link[made] = known
        else:
            self._link[made] = self._split(state, token, known)
        return made

    def _split(self, state: int, token: int, known: int) -> int:
        """`known` follows `state` and others that are no suffixes of its contexts: a copy takes the shorter ones."""
        copy = self._new(self._length[state] + 1)
        self._link[copy], self._count[copy] = self._link[known], self._count[known]
        self._token[copy], self._target[copy] = self._token[known], self._target[known]
        if known in self._more:
            self._more[copy] = dict(self._more[known])
        self._link[known] = copy
        while state != _NONE and self._next(state, token) == known:
            self._set(state, token, copy)
            state = self._link[state]
        return copy

    def _new(self, length: int) -> int:
        self._length.append(length)
        self._link.append(_NONE)
        self._count.append(0)
        self._token.append(_NONE)
        self._target.append(_NONE)
        return len(self._length) - 1

    def _next(self, state: int, token: int) -> int:
        if self._token[state] == token:
            return self._target[state]
        several = self._more.get(state)
        return several.get(token, _NONE) if several is not None else _NONE

    def _set(self, state: int, token: int, target: int) -> None:
        first = self._token[state]
        if first in (_NONE, token):
            self._token[state], self._target[state] = token, target
        elif state not in self._more:
            self._more[state] = {first: self._target[state]}
        if state in self._more:
            self._more[state][token] = target
