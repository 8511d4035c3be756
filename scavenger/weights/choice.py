"""Whole chunks, deltas or nothing yet: which of them has a version here first, by predicted seconds; and adapters merged or not. Pure.

Owns the rates that predictions rest on, each a stated default until it was measured, and the two decisions: the receiver's (`choose`) and
the publisher's, whether to make deltas at all (`encoding_pays`). No clock, socket or thread: seconds come in as arguments.

    wire     bytes that cross the network / what the connections carry together, at most `pull_mb_per_s`
    work     whole bytes x (hashing + applying, once a step) / (one thread's rate x threads)
    seconds  max(wire, work) + loading: a connection's next chunks arrive while its thread works

What a rate says was measured in use, so it has in it whatever else the machine did then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

#: Until there is a measurement. The link: 1 Gbit/s, all connections together. The others: one core of 2.x GHz.
LINK_NBYTES_PER_S = 125e6
HASHING_NBYTES_PER_S = 4e9
APPLYING_NBYTES_PER_S = 0.15e9
LOADING_NBYTES_PER_S = 2e9
ENCODING_NBYTES_PER_S = 0.2e9
_KEPT = 0.95  # of the older measurements, with each new one: the last twenty or so decide
#: A publisher that found deltas not worth it makes those of one version in so many all the same, so that its figures stay true.
TRIED_AGAIN = 8
REPORTS = 16  # receivers whose rates a publisher keeps


class Form(Enum):
    """How a version comes here."""

    FULL = "full"
    DELTA = "delta"
    NOTHING_YET = "nothing-yet"


@dataclass(frozen=True, slots=True)
class MeasuredRate:
    """Bytes a second: `default` until something was measured, then total bytes over total seconds, newer ones weighing more."""

    default: float
    nbytes: float = 0.0
    seconds: float = 0.0
    count: int = 0

    @property
    def per_s(self) -> float:
        return self.nbytes / self.seconds if self.count else self.default

    def measured(self, nbytes: float, seconds: float) -> MeasuredRate:
        """With one more measurement. What took no time or had no bytes says nothing."""
        if nbytes <= 0 or seconds <= 0:
            return self
        return replace(
            self,
            nbytes=_KEPT * self.nbytes + nbytes,
            seconds=_KEPT * self.seconds + seconds,
            count=self.count + 1,
        )

    def __str__(self) -> str:
        how = f"{self.count} measured" if self.count else "assumed"
        mb_per_s = self.per_s / 1e6
        return f"{mb_per_s:,.0f} MB/s ({how})" if mb_per_s >= 100 else f"{mb_per_s:.3g} MB/s ({how})"


@dataclass(frozen=True, slots=True)
class Rates:
    """What a receiver can do. `link`: all its connections together; hashing and applying: one of its `threads`. No bound: 0."""

    link: MeasuredRate = MeasuredRate(LINK_NBYTES_PER_S)
    hashing: MeasuredRate = MeasuredRate(HASHING_NBYTES_PER_S)
    applying: MeasuredRate = MeasuredRate(APPLYING_NBYTES_PER_S)
    loading: MeasuredRate = MeasuredRate(LOADING_NBYTES_PER_S)
    threads: int = 1
    bound_nbytes_per_s: float = 0.0

    @property
    def wire(self) -> float:
        return (
            min(self.link.per_s, self.bound_nbytes_per_s) if self.bound_nbytes_per_s > 0 else self.link.per_s
        )


@dataclass(frozen=True, slots=True)
class DeltaOffer:
    """Deltas from the receiver's version to the wanted one. `nbytes`: of all of them, with whole chunks where there is none.

    `steps`: versions in between, each of which is applied. `pending_s`: until the last is made; 0 = all are.
    """

    nbytes: float
    steps: int = 1
    pending_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PullChoice:
    """`full_s`, `delta_s`: predicted seconds from now until the engine has it; `delta_s` without what is waited for, None = no offer."""

    form: Form
    full_s: float
    delta_s: float | None
    reason: str


def predicted_s(full_nbytes: float, wire_nbytes: float, rates: Rates, steps: int = 0) -> float:
    """Seconds until a version of `full_nbytes` is loaded of which `wire_nbytes` cross the network, in deltas of `steps` versions."""
    threads = max(1, rates.threads)
    work_s = full_nbytes / rates.hashing.per_s + steps * full_nbytes / rates.applying.per_s
    return max(wire_nbytes / rates.wire, work_s / threads) + full_nbytes / rates.loading.per_s


def at_once_s(
    full_nbytes: float, offer: DeltaOffer, delta_s: float, rates: Rates, ahead_nbytes: float
) -> float:
    """Seconds where deltas are asked for before all are made: what is not made comes whole, `ahead_nbytes` of it at least, for so much is
    asked for at once. The rest comes as deltas behind it."""
    loading_s = full_nbytes / rates.loading.per_s
    whole_s = max(offer.pending_s, min(ahead_nbytes, full_nbytes) / rates.wire)
    left = max(0.0, 1.0 - whole_s * rates.wire / full_nbytes) if full_nbytes else 0.0
    return whole_s + left * (delta_s - loading_s) + loading_s


def choose(
    full_nbytes: float,
    offer: DeltaOffer | None,
    rates: Rates,
    *,
    ahead_nbytes: float = 0.0,
    waited_s: float = 0.0,
    most_wait_s: float = 0.0,
) -> PullChoice:
    """What to ask for now. `ahead_nbytes`: what all connections ask for at once. `waited_s`: that it has waited for this version's deltas
    so far; it waits `most_wait_s` in all at most, and never longer than the whole version would take."""
    full_s = predicted_s(full_nbytes, full_nbytes, rates)
    if offer is None:
        return PullChoice(Form.FULL, full_s, None, f"full in {full_s:.3g} s: no delta from what is here")
    delta_s = predicted_s(full_nbytes, min(offer.nbytes, full_nbytes), rates, offer.steps)
    share = offer.nbytes / full_nbytes if full_nbytes else 1.0
    facts = (
        f"full {full_s:.3g} s, delta {delta_s:.3g} s ({share:.1%} of the bytes, {offer.steps} versions); "
        f"link {rates.link}, apply {rates.applying} x {rates.threads}"
    )
    if delta_s >= full_s:
        return PullChoice(Form.FULL, full_s, delta_s, f"full: {facts}")
    if offer.pending_s <= 0:
        return PullChoice(Form.DELTA, full_s, delta_s, f"delta: {facts}")
    mixed_s = at_once_s(full_nbytes, offer, delta_s, rates, ahead_nbytes)
    pending = f"all made in {offer.pending_s:.3g} s, at once {mixed_s:.3g} s"
    waited_for = offer.pending_s + delta_s < min(full_s, mixed_s)
    if waited_for and waited_s + offer.pending_s <= min(most_wait_s, full_s):
        return PullChoice(Form.NOTHING_YET, full_s, delta_s, f"nothing yet: {pending}; {facts}")
    return PullChoice(Form.DELTA, full_s, delta_s, f"deltas as far as they are made: {pending}; {facts}")


@dataclass(frozen=True, slots=True)
class ReceiverReport:
    """What one receiver measured (bytes a second, 0 = not yet), and how long after its publication it came for a version."""

    link: float
    applying: float
    late_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EncodingChoice:
    encode: bool
    reason: str


def encoding_pays(
    full_nbytes: float,
    own_nbytes: float,
    share: float,
    encoding: MeasuredRate,
    reports: Sequence[ReceiverReport],
    skipped: int = 0,
) -> EncodingChoice:
    """Whether any receiver has the next version sooner if its deltas are made. `own_nbytes`: this rank's part, which it encodes while the
    others encode theirs; a receiver's rates are of all ranks together. `share`: what its deltas were of its part the last time.

    `skipped`: versions in a row whose deltas were not made. Without figures they are made: that is how there come to be some.
    """
    if not encoding.count or not reports:
        return EncodingChoice(True, "no figures yet")
    if skipped >= TRIED_AGAIN:
        return EncodingChoice(True, f"{skipped} versions without: tried again")
    made_s, best = own_nbytes / encoding.per_s, 0.0
    for report in reports:
        rates = Rates(
            link=_said(report.link, LINK_NBYTES_PER_S),
            applying=_said(report.applying, APPLYING_NBYTES_PER_S),
            threads=1,
        )
        full_s = predicted_s(full_nbytes, full_nbytes, rates)
        delta_s = predicted_s(full_nbytes, share * full_nbytes, rates, 1) + max(0.0, made_s - report.late_s)
        best = max(best, full_s - delta_s)
    facts = f"making them takes {made_s:.3g} s ({encoding}); of {len(reports)} receivers"
    if best > 0:
        return EncodingChoice(True, f"{facts} one saves {best:.3g} s")
    return EncodingChoice(False, f"{facts} none has the version sooner")


def _said(rate: float, default: float) -> MeasuredRate:
    return MeasuredRate(rate if rate > 0 else default)


#: Weights a second that a GPU, and a core, merges, casts and sums (docs/weights.md, *Merged weights are verified*; the GPU's is counted).
MERGING_PER_S = {"cuda": 12e9, "cpu": 1 / 34e-9}
#: Bytes a second that decoding reads weights with: of a GPU, and of a core.
READING_NBYTES_PER_S = {"cuda": 2e12, "cpu": 5e9}
#: What keeping adapters beside their base adds to a decode iteration: of its time, and for each layer with an adapter. Assumed.
UNMERGED_SHARE = 0.05
UNMERGED_LAYER_S = {"cuda": 10e-6, "cpu": 40e-6}
#: Merging is verified by a digest, and what is kept beside its base is not: as much as this it must gain.
LEAST_GAINED_S = 1.0


@dataclass(frozen=True, slots=True)
class AdapterSetting:
    """What decides whether a run's adapters are merged. `weights`: of the model. `layers`: with an adapter. `tokens`: of a completion that
    a step waits for. `gpus`: of an engine."""

    weights: int
    nbytes: int
    layers: int
    tokens: float
    device: str
    gpus: int = 1


@dataclass(frozen=True, slots=True)
class ServingChoice:
    """`merged_s`, `unmerged_s`: that a version costs before or while it is generated with."""

    unmerged: bool
    merged_s: float
    unmerged_s: float
    reason: str


def serving(of: AdapterSetting) -> ServingChoice:
    """Whether engines keep adapters beside their base: each version then loads at once, and each token takes longer."""
    gpus = max(1, of.gpus)
    merged_s = of.weights / gpus / MERGING_PER_S[of.device] + of.nbytes / gpus / LOADING_NBYTES_PER_S
    token_s = of.nbytes / gpus / READING_NBYTES_PER_S[of.device]
    unmerged_s = of.tokens * (token_s * UNMERGED_SHARE + of.layers * UNMERGED_LAYER_S[of.device])
    unmerged = merged_s - unmerged_s >= LEAST_GAINED_S
    facts = f"merging and loading {merged_s:.3g} s a version, beside the base {unmerged_s:.3g} s over {of.tokens:,.0f} tokens"
    return ServingChoice(
        unmerged, merged_s, unmerged_s, f"{'beside the base' if unmerged else 'merged'}: {facts}"
    )


@dataclass(slots=True)
class RateBook:
    """What one process measured of pulls: per connection to each host, and per thread. Not thread-safe: the caller has a lock."""

    hashing: MeasuredRate = MeasuredRate(HASHING_NBYTES_PER_S)
    applying: MeasuredRate = MeasuredRate(APPLYING_NBYTES_PER_S)
    loading: MeasuredRate = MeasuredRate(LOADING_NBYTES_PER_S)
    connections: dict[str, MeasuredRate] = field(default_factory=dict)  # host -> one connection to it
    assumed_link_nbytes_per_s: float = LINK_NBYTES_PER_S

    def delivered(self, host: str, nbytes: int, seconds: float) -> None:
        """One connection to `host` delivered whole chunks of `nbytes` in `seconds`."""
        known = self.connections.get(host, MeasuredRate(self.assumed_link_nbytes_per_s))
        self.connections[host] = known.measured(nbytes, seconds)

    def rates(self, hosts: Sequence[str], cores: int, bound_nbytes_per_s: float = 0.0) -> Rates:
        """Of a pull with one connection for each of `hosts` (a host may come several times).

        An unmeasured host adds nothing to those that were measured. Threads share the cores; a rate measured in use has that in it.
        """
        known = [rate for host in hosts if (rate := self.connections.get(host)) is not None]
        count = min((rate.count for rate in known), default=0)
        link = MeasuredRate(self.assumed_link_nbytes_per_s)
        if count:
            link = replace(link, nbytes=sum(rate.per_s for rate in known), seconds=1.0, count=count)
        threads = len(hosts) if self.applying.count else min(len(hosts), cores)
        return Rates(link, self.hashing, self.applying, self.loading, max(1, threads), bound_nbytes_per_s)
