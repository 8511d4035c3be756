"""Where the prompts of an episode have been before: each of its turns begins with what an earlier one had, and that is stored once. Pure.

    prompt of a new turn    p p p p p p p p p p p p p p p p p p p p p p p p p
                                        |               |
                        every BLOCK tokens, and wherever a prompt or a completion ended: the digest of all before
                                                        |
    Prefixes: digest -> (sample, length)      the longest that is known: its parent, and how much of it

A digest names all tokens before it, so that one look-up compares a whole prefix and no token is kept. Ends are found exactly, and where
an agent rewrote its history, what it kept is found to the last whole block.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

#: Tokens between two digests within a prompt or a completion.
BLOCK = 512
#: Of one episode. Beyond them nothing new is found, and prompts are stored with what they share.
MAX_BLOCKS = 16_384
MAX_ENDS = 8_192


class Parent(NamedTuple):
    """A sample, and how many tokens of its prompt and completion a prompt begins with. Sample 0: none."""

    sample_id: int
    length: int


NO_PARENT = Parent(0, 0)


class Point(NamedTuple):
    """The digest of the first `length` tokens of something. `is_end`: it ends there."""

    length: int
    digest: bytes
    is_end: bool


class TokenHash:
    """Tokens as they come, packed int32, and the digests at their blocks."""

    __slots__ = ("_hash", "length")

    def __init__(self) -> None:
        self._hash, self.length = sha256(), 0

    def copy(self) -> TokenHash:
        """Goes on from here by itself."""
        other = TokenHash()
        other._hash, other.length = self._hash.copy(), self.length
        return other

    def grow(self, tokens: bytes, ends: Sequence[int] = ()) -> list[Point]:
        """Add tokens; the digests at whole blocks, and at those of the lengths `ends` (ascending) that they reach."""
        begin, end, points = self.length, self.length + len(tokens) // 4, []
        view, at = memoryview(tokens), begin
        stops = set(range((begin // BLOCK + 1) * BLOCK, end + 1, BLOCK))
        stops.update(ends[bisect_left(ends, begin + 1) : bisect_left(ends, end + 1)])
        for stop in sorted(stops):
            self._hash.update(view[4 * (at - begin) : 4 * (stop - begin)])
            at = stop
            points.append(Point(stop, self._hash.digest(), False))
        self._hash.update(view[4 * (at - begin) :])
        self.length = end
        return points

    def end(self) -> Point:
        """It ends here."""
        return Point(self.length, self._hash.digest(), True)


class Prefixes:
    """What is known of an episode's prompts and completions."""

    __slots__ = ("_at", "_blocks", "_ends")

    def __init__(self) -> None:
        self._at: dict[bytes, Parent] = {}
        self._ends: list[int] = []  # lengths at which something ended, ascending, each once
        self._blocks = 0

    def __len__(self) -> int:
        return len(self._at)

    def read(self, prompt: bytes) -> tuple[TokenHash, list[Point], Parent]:
        """A prompt: its hash, to go on with, its points, and with what it begins."""
        read = TokenHash()
        points = [point for point in read.grow(prompt, self._ends) if point.length < read.length]
        points.append(read.end())
        for point in reversed(points):
            parent = self._at.get(point.digest)
            if parent is not None:
                return read, points, parent
        return read, points, NO_PARENT

    def ended_by(self, digest: bytes) -> Parent:
        """The sample whose prompt and completion have this digest."""
        return self._at.get(digest, NO_PARENT)

    def add(self, sample_id: int, points: Sequence[Point]) -> None:
        """The sample's prompt and completion have these points. Who had them first keeps them."""
        for length, digest, is_end in points:
            if not (self._note_end(length) if is_end else length % BLOCK == 0):
                continue
            if digest not in self._at and (is_end or self._blocks < MAX_BLOCKS):
                self._at[digest] = Parent(sample_id, length)
                self._blocks += not is_end

    def _note_end(self, length: int) -> bool:
        """Whether prompts are looked up at this length."""
        at = bisect_left(self._ends, length)
        if at < len(self._ends) and self._ends[at] == length:
            return True
        if len(self._ends) >= MAX_ENDS:
            return False
        insort(self._ends, length)
        return True
