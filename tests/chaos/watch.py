"""A witness of its own: reads the ledger all the while and remembers every committed token that it saw.

What it saw, it saw in a transaction of a reader, so it was committed. Knows nothing of what the daemon believes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import sqlalchemy as sa

from scavenger.errors import LedgerError
from scavenger.ledger import store

CHECK_INTERVAL_S = 0.1
_CHUNKS = sa.text("SELECT id, sample_id, epoch, start_len, tokens FROM chunks WHERE id > :last ORDER BY id")
_LENGTHS = sa.text(
    "SELECT sample_id, accepted_len, epoch FROM samples WHERE state = 'open' AND accepted_len > 0"
)


@dataclass
class Sighting:
    """One sample as it was seen: its tokens, the epoch of the last chunk that made it longer, the greatest accepted length."""

    tokens: bytearray = field(default_factory=bytearray)
    epoch: int = 0
    accepted: int = 0


class Sightings:
    """All that was seen, and what was wrong with it as it came. Pure."""

    def __init__(self) -> None:
        self.samples: dict[int, Sighting] = {}
        self.last_id = 0
        self.tokens = 0
        self.looks = 0
        self.wrong: list[str] = []

    def chunk(self, row_id: int, sample: int, epoch: int, start: int, tokens: bytes) -> None:
        seen = self.samples.setdefault(sample, Sighting())
        self.last_id = max(self.last_id, row_id)
        length = len(seen.tokens) // 4
        if start > length:
            self.wrong.append(f"sample {sample}: a chunk begins at {start}, {length} tokens were there")
            return
        again = tokens[: 4 * (length - start)]
        if bytes(seen.tokens[4 * start : 4 * start + len(again)]) != again:
            self.wrong.append(
                f"sample {sample}: other tokens at {start} under epoch {epoch} than before under {seen.epoch}"
            )
        if new := tokens[len(again) :]:
            if epoch < seen.epoch:
                self.wrong.append(
                    f"sample {sample}: epoch {epoch} added tokens at {start} after epoch {seen.epoch} had"
                )
            seen.tokens += new
            seen.epoch = epoch
            self.tokens += len(new) // 4

    def length(self, sample: int, accepted: int, epoch: int) -> None:
        seen = self.samples.setdefault(sample, Sighting())
        if accepted < seen.accepted:
            self.wrong.append(f"sample {sample}: {accepted} tokens accepted, {seen.accepted} before")
        seen.accepted = max(seen.accepted, accepted)

    def lost(self, final: Iterable[tuple[int, str, bytes]]) -> tuple[int, list[str]]:
        """Tokens that were seen and are not there at the end, given (sample, state, tokens) of all samples; and which."""
        there = {sample: (state, tokens) for sample, state, tokens in final}
        count, found = 0, []
        for sample, seen in sorted(self.samples.items()):
            state, tokens = there.get(sample, ("missing", b""))
            kept = _common(bytes(seen.tokens), tokens)
            missing = max(len(seen.tokens) // 4, seen.accepted) - kept
            if missing and state != "superseded":
                count += missing
                found.append(
                    f"sample {sample} ({state}): {missing} of {len(seen.tokens) // 4} tokens seen are not there"
                )
        return count, found


def _common(one: bytes, other: bytes) -> int:
    """Tokens that both begin with."""
    length = min(len(one), len(other)) // 4
    return next((n for n in range(length) if one[4 * n : 4 * n + 4] != other[4 * n : 4 * n + 4]), length)


class Watcher:
    """A thread that looks at the ledger until it is closed. A ledger that cannot be read now is looked at again."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher")
        self._lock = threading.Lock()
        self.seen = Sightings()
        self.blind = 0  # looks in vain
        self.failure: BaseException | None = None
        self.progress_at = time.monotonic()

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def tokens(self) -> int:
        """Tokens committed so far, those of superseded samples too."""
        with self._lock:
            return self.seen.tokens

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    self.look()
                except (sa.exc.DBAPIError, LedgerError):  # away, or no tables yet
                    self.blind += 1
                self._stop.wait(CHECK_INTERVAL_S)
        except BaseException as error:
            self.failure = error
            raise

    def look(self) -> None:
        engine = store.open_readonly(self._url)
        try:
            with engine.connect() as connection, connection.begin():
                # Lengths first: in PostgreSQL each statement sees what is committed by then, and chunks may only be more.
                lengths = connection.execute(_LENGTHS).all()
                chunks = connection.execute(_CHUNKS, {"last": self.seen.last_id}).all()
        finally:
            engine.dispose()
        with self._lock:
            before = self.seen.tokens
            for row_id, sample, epoch, start, tokens in chunks:
                self.seen.chunk(row_id, sample, epoch, start, bytes(tokens))
            for sample, accepted, epoch in lengths:
                self.seen.length(sample, accepted, epoch)
            self.seen.looks += 1
            if self.seen.tokens > before:
                self.progress_at = time.monotonic()
