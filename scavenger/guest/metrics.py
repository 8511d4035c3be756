"""What an inference service says of itself at /metrics: its latencies and its queue, by the names of vLLM, SGLang and our proxy. Pure.

A histogram counts since the server began. What an interval's requests met is the difference of two readings, `since`. A quantile of it is
interpolated within a bucket as Prometheus's `histogram_quantile` does; beyond the last bound it is infinite, so that it is never too small.

Owns the names and the arithmetic. Opens no connection. The text format is `prometheus_client`'s to parse.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from scavenger.errors import ScavengerError

#: A page of a server with hundreds of adapters and engines has under 1 MB.
MAX_PAGE_BYTES = 8 * 2**20
#: Lines that are looked at, of the metrics that are asked for.
MAX_LINES = 20_000


class ServiceError(ScavengerError):
    """A service's metrics could not be read, or are not those of a server that is known."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative counts by upper bound in seconds, the last bound infinite. Both have one length; no bound: nothing was ever counted."""

    bounds: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()

    @property
    def total(self) -> float:
        return self.counts[-1] if self.counts else 0.0

    def since(self, earlier: Histogram) -> Histogram:
        """What was counted since. A server that was started again counts from 0: then it is all that this reading has."""
        if self.bounds != earlier.bounds:
            return self
        counts = tuple(now - before for now, before in zip(self.counts, earlier.counts, strict=True))
        restarted = any(count < 0 for count in counts)
        return self if restarted else Histogram(self.bounds, counts)

    def quantile(self, share: float) -> float | None:
        """The time within which this share of what was counted lies; None: nothing was counted.

        Source: Prometheus, `histogram_quantile` for classic histograms, but for the last bucket, where that returns its lower bound.
        """
        if not 0 < share <= 1:
            raise ValueError(f"share {share} is not in (0, 1]")
        if self.total <= 0:
            return None
        rank = share * self.total
        place = next(n for n, count in enumerate(self.counts) if count >= rank)
        upper = self.bounds[place]
        if math.isinf(upper):
            return math.inf
        lower, below = (self.bounds[place - 1], self.counts[place - 1]) if place else (0.0, 0.0)
        return lower + (upper - lower) * (rank - below) / (self.counts[place] - below)


@dataclass(frozen=True, slots=True)
class ServiceReading:
    """One reading of /metrics, over all engines and models of the server. `tokens`: that it generated since it began. `oldest_s`: age of
    the oldest request that has no token yet; 0 where the server does not say it."""

    server: str
    ttft: Histogram
    tpot: Histogram
    waiting: int
    running: int
    tokens: float
    oldest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Names:
    """`tpot`: the first that is there. Counters as the text has them. `oldest`: "" where the server has none."""

    server: str
    waiting: str
    running: str
    tokens: str
    ttft: str
    tpot: tuple[str, ...]
    oldest: str = ""

    @property
    def all(self) -> frozenset[str]:
        buckets = (f"{name}_bucket" for name in (self.ttft, *self.tpot))
        return frozenset((self.waiting, self.running, self.tokens, self.oldest, *buckets)) - {""}


#: What `proxy.py` says of the service behind it.
PROXY = _Names(
    "scavenger guest-proxy",
    "scavenger_service_requests_waiting",
    "scavenger_service_requests_running",
    "scavenger_service_generation_tokens_total",
    "scavenger_service_time_to_first_token_seconds",
    ("scavenger_service_inter_token_latency_seconds",),
    "scavenger_service_oldest_waiting_seconds",
)

#: vLLM 0.32, vllm/v1/metrics/loggers.py; releases before 0.10 called the time between tokens `time_per_output_token_seconds`. SGLang:
#: docs.sglang.io, "Production Metrics", of a server with --enable-metrics; its older releases had `time_per_output_token_seconds` too.
#: Both count the time between two tokens there, once a token, while they come: a request's own mean is counted only when it is over.
SERVERS = (
    _Names(
        "vLLM",
        "vllm:num_requests_waiting",
        "vllm:num_requests_running",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds",
        ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    ),
    _Names(
        "SGLang",
        "sglang:num_queue_reqs",
        "sglang:num_running_reqs",
        "sglang:generation_tokens_total",
        "sglang:time_to_first_token_seconds",
        ("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
    ),
    PROXY,
)


def parse(page: bytes) -> ServiceReading:
    """A reading of the page of a vLLM or SGLang server, or of our proxy. Raises `ServiceError`: too large, malformed, of no such server."""
    if len(page) > MAX_PAGE_BYTES:
        raise ServiceError(
            f"the service's metrics have more than {MAX_PAGE_BYTES} bytes", "name the server's own /metrics"
        )
    try:
        lines = page.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ServiceError(
            f"the service's metrics are no UTF-8 text: {error}", "name the server's own /metrics"
        ) from error
    for names in SERVERS:
        found = _samples(lines, names)
        if names.waiting in found and names.running in found:
            return _reading(found, names)
    wanted = " or ".join(names.waiting for names in SERVERS if names is not PROXY)
    raise ServiceError(
        f"the service's metrics have no {wanted}",
        "name the address of a vLLM server, or of an SGLang server that was started with --enable-metrics",
    )


def _samples(lines: Iterable[str], names: _Names) -> Mapping[str, Sequence[Sample]]:
    """The samples asked for, by their names in the text. Other lines are not looked at: a server has many."""
    wanted = names.all
    kept = [line for line in lines if _name_of(line) in wanted]
    if len(kept) > MAX_LINES:
        raise ServiceError(
            f"the service's metrics have {len(kept)} lines of {names.server}'s latencies and queue",
            f"at most {MAX_LINES} are read; name one server's own /metrics",
        )
    found: dict[str, list[Sample]] = {}
    try:
        for family in text_string_to_metric_families("\n".join(kept) + "\n"):
            for sample in family.samples:
                found.setdefault(sample.name, []).append(sample)
    except (ValueError, KeyError, IndexError) as error:
        raise ServiceError(
            f"the service's metrics of {names.server} cannot be parsed: {str(error)[:200]}",
            "name the server's own /metrics, which has Prometheus's text format",
        ) from error
    return found


def _name_of(line: str) -> str:
    for place, char in enumerate(line):
        if char in "{ ":
            return line[:place]
    return ""


def _reading(found: Mapping[str, Sequence[Sample]], names: _Names) -> ServiceReading:
    tokens = _sum(found[names.tokens], names) if names.tokens in found else 0.0
    ttft = _histogram(found.get(f"{names.ttft}_bucket", ()), names)
    tpot = next(
        (_histogram(found[f"{name}_bucket"], names) for name in names.tpot if f"{name}_bucket" in found),
        Histogram(),
    )
    # Some servers name a histogram with its first value only. One that never comes is not a service without latency.
    for histogram, missing in ((ttft, names.ttft), (tpot, names.tpot[0])):
        if not histogram.bounds and tokens > 1:
            raise ServiceError(
                f"the service has generated {tokens:.0f} tokens and has no histogram {missing}",
                f"this release knows {names.server}'s metrics by that name; report the server's release",
            )
    waiting, running = (round(_sum(found[name], names)) for name in (names.waiting, names.running))
    oldest_s = _sum(found[names.oldest], names) if names.oldest in found else 0.0
    return ServiceReading(names.server, ttft, tpot, waiting, running, tokens, oldest_s)


def _sum(samples: Sequence[Sample], names: _Names) -> float:
    """Of all engines, models and ranks that the server has."""
    values = [sample.value for sample in samples]
    if not all(0 <= value < math.inf for value in values):
        raise ServiceError(
            f"the service's {samples[0].name} is {values[:4]}",
            f"a {names.server} server counts from 0 on there",
        )
    return sum(values)


def _histogram(samples: Sequence[Sample], names: _Names) -> Histogram:
    counts: dict[float, float] = {}
    series: dict[float, int] = {}
    for sample in samples:
        bound = _bound(sample.labels.get("le", ""))
        counts[bound] = counts.get(bound, 0.0) + sample.value
        series[bound] = series.get(bound, 0) + 1
    if not counts:
        return Histogram()
    bounds = tuple(sorted(counts))
    summed = tuple(counts[bound] for bound in bounds)
    grows = 0 <= summed[0] <= summed[-1] < math.inf and list(summed) == sorted(summed)
    if any(map(math.isnan, bounds)) or bounds[-1] != math.inf or not grows or len(set(series.values())) != 1:
        shown = str(dict(zip(bounds, summed, strict=True)))[:300]
        raise ServiceError(
            f"the service's {samples[0].name} are no histogram's: counts by bound {shown}",
            f"a {names.server} server has counts that grow with their bounds, the last bound +Inf, the same bounds in each series",
        )
    return Histogram(bounds, summed)


def _bound(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
