"""KV blocks that move between simulated engines: what each keeps, and when what others ask of it is there, in virtual time.

The decision is the router's own (`router.core.kv_moves`, `policy.kv`), fed with what simulated engines report; here is only what the bytes
take, as `rollout.kv` moves them: copied out one sample after the other, over both engines' interfaces at the rate of one reader's
connection, checked, and copied in. Transfers of one engine have its interface one after the other. Weights that are pulled at that moment
are left out of it.

Boundary: seconds and bytes of blocks; which blocks move is decided elsewhere.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from scavenger.policy.kv import SET_UP_S
from scavenger.protocol.kv import MOST_NBYTES

#: Tokens of a block: whole ones move.
BLOCK = 16
#: Seconds for which an engine that is told to leave stays for readers: `WorkerLimits.kv_s`.
STAYS_S = 0.45


class Fetched(NamedTuple):
    """When a reader has the blocks, or knows that it will not, and why not."""

    at_s: float
    fault: str = ""


@dataclass(slots=True)
class _Holder:
    """What an engine keeps, by number, the oldest first: (bytes, when they are copied out)."""

    kept: OrderedDict[int, tuple[int, float]] = field(default_factory=OrderedDict)
    copied_s: float = 0.0  # when it has copied out all that it was told to
    sent_s: float = 0.0  # when its interface is free
    received_s: float = 0.0
    coming: dict[int, int] = field(default_factory=dict)  # handle -> bytes on their way here
    gone_s: float = math.inf


class KvTransfers:
    """Of one run. `connection_bytes_s`: of a reader's connection, its cipher included; `host_bytes_s`: of an engine's GPU, to and from
    its host."""

    def __init__(self, connection_bytes_s: float, host_bytes_s: float) -> None:
        self._rate, self._host = connection_bytes_s, host_bytes_s
        self._holders: dict[str, _Holder] = {}

    def _of(self, engine: str) -> _Holder:
        return self._holders.setdefault(engine, _Holder())

    def keep(self, engine: str, number: int, nbytes: int, now: float) -> None:
        """An engine is told to copy a sample's blocks out."""
        mine = self._of(engine)
        if nbytes > MOST_NBYTES:
            return
        mine.copied_s = max(mine.copied_s, now) + nbytes / self._host
        mine.kept[number] = nbytes, mine.copied_s
        while sum(held for held, _ in mine.kept.values()) > MOST_NBYTES:
            mine.kept.popitem(last=False)

    def clear(self, engine: str) -> None:
        """Other weights are loaded there."""
        self._of(engine).kept.clear()

    def leaves(self, engine: str, now: float) -> None:
        self._of(engine).gone_s = now + STAYS_S

    def fetch(
        self, reader: str, handle: int, holder: str, number: int, nbytes: int, within_s: float, now: float
    ) -> Fetched:
        """A reader asks for a sample's blocks; call `over` with its handle when they have come, or not."""
        mine, theirs = self._of(reader), self._of(holder)
        if nbytes + sum(mine.coming.values()) > MOST_NBYTES:
            return Fetched(now, "no memory for what comes")
        known = theirs.kept.get(number)
        if known is None or known[0] < nbytes:
            return Fetched(now + SET_UP_S, "not kept")
        mine.coming[handle] = nbytes
        ready = known[1]
        if reader == holder:
            done = max(now, ready)
        else:
            begins = max(now + SET_UP_S, ready, theirs.sent_s, mine.received_s)
            done = begins + nbytes / self._rate
            if done > min(now + within_s, theirs.gone_s):
                return Fetched(now + within_s, "late")
            theirs.sent_s = mine.received_s = done
        del theirs.kept[number]
        return Fetched(done + nbytes / self._host)

    def over(self, reader: str, handle: int) -> None:
        self._of(reader).coming.pop(handle, None)
