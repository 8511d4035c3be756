"""Whether a sample that moves takes its KV blocks along, or is prefilled again where it goes; and which turns' blocks are kept. Pure.

    transfer_s < prefill_s      the blocks go along         both predicted from what was measured in this run
    else                        its tokens are prefilled

Nothing that was not measured is guessed in the transfer's favour: a prefill costs a fast engine's time until one was measured, and a link
carries `PRIOR_LINK` until weights or blocks crossed it. Both are kept by size (powers of two), because each has a part that does not grow
with it: a prefill of a length that was never seen counts as the longest shorter one at least takes, a transfer as the size above it does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

#: Seconds to prefill a token until one was measured: a fast engine's.
PRIOR_PREFILL_S = 2e-5
#: Bytes a second of a link on which nothing was measured: the slowest network of a cluster.
PRIOR_LINK = 1.25e8
#: Seconds until the first byte comes: connection, handshake and header.
SET_UP_S = 0.005
#: Weight of a new measurement that is faster than what is known of its size, and of one that is slower, in which other work may be.
FASTER, SLOWER = 0.3, 0.1
#: A reader waits for so many predicted times at most, then it prefills; and for no longer than `MOST_WAIT_S`.
PATIENCE = 2.0
LEAST_WAIT_S, MOST_WAIT_S = 0.1, 10.0


@dataclass(slots=True)
class BySize:
    """Mean size and seconds of what was measured, by the power of two of its size."""

    means: dict[int, tuple[float, float]] = field(default_factory=dict)

    def note(self, size: int, seconds: float) -> None:
        """Something of this size took so long."""
        if size <= 0 or seconds <= 0:
            return
        key = size.bit_length()
        known = self.means.get(key)
        if known is None:
            self.means[key] = (float(size), seconds)
            return
        mean, took = known
        weight = FASTER if seconds / size < took / mean else SLOWER
        self.means[key] = (mean + weight * (size - mean), took + weight * (seconds - took))

    def least(self, size: int) -> float | None:
        """Seconds that this size takes at least, by what was measured; None: nothing was."""
        key = size.bit_length()
        if key in self.means:
            return _scaled(self.means[key], size)
        longer = [other for other in self.means if other > key]
        if longer:  # of a longer one a token costs less: what every one costs is shared by more
            return _scaled(self.means[min(longer)], size)
        return self.means[max(self.means)][1] if self.means else None

    def most(self, size: int) -> float | None:
        """Seconds that this size takes at most, by what was measured; None: nothing was."""
        key = size.bit_length()
        if key in self.means:
            return max(_scaled(self.means[key], size), self.means[key][1])
        longer = [other for other in self.means if other > key]
        if longer:
            return self.means[min(longer)][1]
        return _scaled(self.means[max(self.means)], size) if self.means else None


def _scaled(mean: tuple[float, float], size: int) -> float:
    return mean[1] * size / mean[0]


@dataclass(slots=True)
class KvRates:
    """What was measured of a run: prefills by tokens, transfers of blocks by bytes, and the best bytes a second of a pull of weights."""

    prefills: BySize = field(default_factory=BySize)
    transfers: BySize = field(default_factory=BySize)
    link: float = PRIOR_LINK

    def weights_pulled(self, nbytes: int, seconds: float) -> None:
        """A whole version came over the run's network."""
        if nbytes > 0 and seconds > 0:
            self.link = max(self.link, nbytes / seconds)

    def prefill_s(self, tokens: int) -> float:
        """Predicted seconds to prefill so many tokens."""
        known = self.prefills.least(tokens)
        return tokens * PRIOR_PREFILL_S if known is None else known

    def transfer_s(self, nbytes: int) -> float:
        """Predicted seconds until so many bytes of blocks have come."""
        known = self.transfers.most(nbytes)
        return SET_UP_S + nbytes / self.link if known is None else known


class KeptTurn(NamedTuple):
    """Blocks that an engine keeps of a finished turn. `superseded`: a turn behind it left its own, which hold these too. `at`: Unix s."""

    sample_id: int
    tokens: int
    nbytes: int
    at: float
    superseded: bool


class KvDecision(NamedTuple):
    """`take`: the blocks go along, and are waited for `within_s` at most. `transfer_s`, `prefill_s`: predicted. `ahead`: bytes that have
    the same way before them."""

    take: bool
    reason: str
    tokens: int
    nbytes: int
    transfer_s: float
    prefill_s: float
    within_s: float
    ahead: int = 0

    def inputs(self) -> Mapping[str, float]:
        """Its numbers, for the ledger."""
        return {
            "tokens": self.tokens,
            "nbytes": self.nbytes,
            "transfer_s": round(self.transfer_s, 6),
            "prefill_s": round(self.prefill_s, 6),
            "within_s": round(self.within_s, 6),
            "ahead": self.ahead,
        }


def decide(
    tokens: int, token_nbytes: int, rates: KvRates, ahead: int = 0, stays_s: float = math.inf
) -> KvDecision:
    """Of a sample whose engine has the entries of so many tokens, `token_nbytes` bytes each. `ahead`: bytes of other samples that are on
    their way from that engine, or to the reader: they share the way, and these come last. `stays_s`: for which that engine is there yet."""
    nbytes = tokens * token_nbytes
    transfer_s, prefill_s = rates.transfer_s(nbytes + ahead), rates.prefill_s(tokens)
    take = transfer_s < min(prefill_s, stays_s)
    what = "the blocks go along" if take else "prefilled again"
    than = "less than" if transfer_s < prefill_s else "no less than"
    gone = f", and their engine is gone in {stays_s:.4f} s" if stays_s <= transfer_s < prefill_s else ""
    reason = (
        f"{what}, {nbytes} bytes of {tokens} tokens{f' behind {ahead} bytes' if ahead else ''} are predicted to take {transfer_s:.4f} s, "
        f"{than} the {prefill_s:.4f} s of a prefill{gone}"
    )
    within_s = min(
        MOST_WAIT_S, max(LEAST_WAIT_S, stays_s), max(LEAST_WAIT_S, PATIENCE * transfer_s, prefill_s)
    )
    return KvDecision(take, reason, tokens, nbytes, transfer_s, prefill_s, within_s, ahead)


def keep_turn(tokens: int, token_nbytes: int, rates: KvRates) -> KvDecision:
    """Of a turn that will have about so many tokens when it is finished: whether its blocks are kept for the turns behind it. They are
    where another engine would have them sooner than a prefill; `token_nbytes` is 0 until an engine said it."""
    decided = decide(tokens, token_nbytes, rates)
    what = "turns' blocks are kept" if decided.take else "turns' blocks are not kept"
    than = "less than" if decided.take else "no less than"
    reason = (
        f"{what}, about {decided.nbytes} bytes of {tokens} tokens are predicted to take {decided.transfer_s:.4f} s to another engine, "
        f"{than} the {decided.prefill_s:.4f} s of a prefill"
    )
    return decided._replace(reason=reason)


def by_value(kept: Iterable[KeptTurn], rates: KvRates) -> list[KeptTurn]:
    """The most valuable first: what no later turn's blocks hold too, then what saves most seconds of prefill a byte, then the newest."""

    def value(one: KeptTurn) -> tuple[bool, float, float, int]:
        saved = rates.prefill_s(one.tokens) / max(1, one.nbytes)
        return one.superseded, -saved, -one.at, -one.sample_id

    return sorted(kept, key=value)
