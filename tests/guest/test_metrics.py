"""What a service's page of metrics says: vLLM's and SGLang's names, differences of histograms, and pages that cannot be."""

from __future__ import annotations

import importlib.util
import itertools
import math
import runpy
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scavenger.errors import ConfigError
from scavenger.guest import metrics
from scavenger.guest.metrics import Histogram, ServiceError, parse
from scavenger.guest.service import ServiceGone, fetch, metrics_url
from scavenger.guest.window import Window
from scavenger.policy.serving import Objective, objective_of
from scavenger.simulate import serving
from tests.guest.service import service

BOUNDS = (0.1, 0.5, math.inf)


def page(
    prefix: str = "vllm",
    names: tuple[str, str] = ("num_requests_waiting", "num_requests_running"),
    tpot: str = "inter_token_latency",
) -> str:
    """Two engines behind one server."""
    lines = [f"# TYPE {prefix}:{name} gauge" for name in names]
    lines += [f'{prefix}:{name}{{engine="{n}"}} {n + 1}.0' for name in names for n in (0, 1)]
    lines += [f"# TYPE {prefix}:generation_tokens_total counter", f"{prefix}:generation_tokens_total 7e3"]
    for name in ("time_to_first_token", tpot):
        lines.append(f"# TYPE {prefix}:{name}_seconds histogram")
        for n in (0, 1):
            label = f'engine="{n}"'
            lines += [
                f'{prefix}:{name}_seconds_bucket{{{label},le="{le}"}} {count}'
                for le, count in (("0.1", 2), ("0.5", 5), ("+Inf", 6))
            ]
            lines += [
                f"{prefix}:{name}_seconds_count{{{label}}} 6",
                f"{prefix}:{name}_seconds_sum{{{label}}} 2.5",
            ]
    return "\n".join([*lines, 'vllm:cache_config_info{a="} broken"} 1', ""])


@pytest.mark.parametrize(
    ("prefix", "names", "tpot", "server"),
    [
        ("vllm", ("num_requests_waiting", "num_requests_running"), "inter_token_latency", "vLLM"),
        ("vllm", ("num_requests_waiting", "num_requests_running"), "time_per_output_token", "vLLM"),
        ("sglang", ("num_queue_reqs", "num_running_reqs"), "inter_token_latency", "SGLang"),
    ],
)
def test_both_servers_pages_are_read_over_all_their_engines(
    prefix: str, names: tuple[str, str], tpot: str, server: str
) -> None:
    read = parse(page(prefix, names, tpot).encode())
    assert (read.server, read.waiting, read.running, read.tokens) == (server, 3, 3, 7000.0)
    assert read.ttft == read.tpot == Histogram(BOUNDS, (4.0, 10.0, 12.0))


@pytest.mark.vllm
def test_the_names_are_those_of_the_vllm_that_is_installed() -> None:
    found = importlib.util.find_spec("vllm")  # read, not imported: that takes seconds
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parent / "v1" / "metrics"
    source, names = (folder / "loggers.py").read_text(), metrics.SERVERS[0]
    for name in (
        names.waiting,
        names.running,
        names.tokens.removesuffix("_total"),
        names.ttft,
        names.tpot[0],
    ):
        assert f'"{name}"' in source, name
    buckets = runpy.run_path(str(folder / "buckets.py"))
    assert (*buckets["TIME_TO_FIRST_TOKEN_BUCKETS"], math.inf) == serving.TTFT_BOUNDS
    assert (*buckets["INTER_TOKEN_LATENCY_BUCKETS"], math.inf) == serving.TPOT_BOUNDS


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (b"", "have no vllm:num_requests_waiting or sglang:num_queue_reqs"),
        (b"<html>not found</html>", "have no vllm"),
        (b"\xff\xfe", "no UTF-8"),
        (b"x" * (metrics.MAX_PAGE_BYTES + 1), "more than"),
        (page().replace(" 2.0", " nan").encode(), "is \\[1.0, nan\\]"),
        (page().replace(" 2.0", " two").encode(), "cannot be parsed"),
        (page().replace('le="+Inf"} 6', 'le="+Inf"} 1').encode(), "no histogram"),
        (page().replace('engine="1",le="0.1"', 'engine="1",le="0.2"').encode(), "no histogram"),
        (
            page().replace("inter_token", "between_token").encode(),
            "has no histogram vllm:inter_token_latency_seconds",
        ),
        ((page() + "vllm:num_requests_waiting 1\n" * (metrics.MAX_LINES + 1)).encode(), "lines"),
    ],
)
def test_a_page_that_cannot_be_is_refused_with_the_reason(wrong: bytes, why: str) -> None:
    with pytest.raises(ServiceError, match=why):
        parse(wrong)


def test_a_quantile_is_interpolated_within_its_bucket_and_never_too_small() -> None:
    # 90 within 0.1 s, 99 within 0.5 s: the 95th lies (95 - 90) / 9 of the way.
    known = Histogram(BOUNDS, (90.0, 99.0, 100.0))
    assert known.quantile(0.95) == pytest.approx(0.1 + 0.4 * 5 / 9)
    assert known.quantile(0.45) == pytest.approx(0.05)
    assert known.quantile(0.995) == math.inf
    assert Histogram().quantile(0.99) is None


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.001, 0.9), min_size=1, max_size=40), st.lists(st.floats(0.001, 0.9), max_size=40))
def test_the_difference_of_two_readings_is_what_came_between(
    between: list[float], before: list[float]
) -> None:
    bounds = (*[n / 10 for n in range(1, 10)], math.inf)

    def counted(values: list[float]) -> Histogram:
        return Histogram(bounds, tuple(float(sum(value <= bound for value in values)) for bound in bounds))

    early, late = counted(before), counted(before + between)
    assert late.since(early) == counted(between)
    found = late.since(early).quantile(0.99)
    exact = sorted(between)[math.ceil(0.99 * len(between)) - 1]
    assert found is not None
    assert exact - 0.1 <= found <= exact + 0.1 + 1e-9
    assert early.since(late) == early, "it was started again: all that it has is new"


def test_a_window_has_the_p99_of_half_a_minute_and_the_median_of_the_last_second() -> None:
    window, counts = Window(3.0), [0.0, 0.0, 0.0]
    views = []
    for second, slow in enumerate((0, 9, 0, 0, 0, 0)):
        counts = [counts[0] + 10 - slow, counts[1] + 10, counts[2] + 10]
        histogram = Histogram(BOUNDS, tuple(counts))
        read = metrics.ServiceReading("vLLM", histogram, histogram, 0, 1, 1.0)
        views.append(window.view(float(second), read, peak=4 if second == 1 else 0))
    assert views[0] is None
    found = [(view.ttft_p99_s, view.ttft_now_s, view.samples) for view in views[1:] if view is not None]
    assert [p99 is not None and p99 > 0.1 for p99, _, _ in found] == [True, True, True, False, False]
    assert [now is not None and now > 0.1 for _, now, _ in found] == [True, False, False, False, False]
    assert [samples for *_, samples in found] == [4, 4, 4, 0, 0]


def test_a_window_begins_anew_where_nothing_was_read_for_longer_than_it_lasts() -> None:
    """Its process was stopped for ten minutes, in which the service was slow: that says nothing of the last seconds."""
    window = Window(3.0)
    fast, slow = Histogram(BOUNDS, (10.0, 10.0, 10.0)), Histogram(BOUNDS, (10.0, 99.0, 99.0))
    for second, histogram in ((0.0, fast), (1.0, fast), (601.0, slow)):
        view = window.view(second, metrics.ServiceReading("vLLM", histogram, histogram, 0, 1, 1.0), peak=0)
    assert view is None
    later = Histogram(BOUNDS, (20.0, 109.0, 109.0))
    view = window.view(602.0, metrics.ServiceReading("vLLM", later, later, 0, 1, 1.0), peak=2)
    assert view is not None
    assert view.ttft_p99_s is not None
    assert view.ttft_p99_s < 0.1
    assert view.samples == 2


def test_a_window_that_begins_anew_has_what_came_since_its_newest_reading() -> None:
    window, counts = Window(30.0), [0.0, 0.0, 0.0]
    found = []
    for second, slow in enumerate((0, 9, 9, 0, 0)):
        counts = [counts[0] + 10 - slow, counts[1] + 10, counts[2] + 10]
        histogram = Histogram(BOUNDS, tuple(counts))
        found.append(
            window.view(
                float(second), metrics.ServiceReading("vLLM", histogram, histogram, 0, 1, 1.0), peak=4
            )
        )
        if second == 2:
            window.begin_anew()
    late = [view is not None and view.ttft_p99_s is not None and view.ttft_p99_s > 0.1 for view in found]
    assert late == [False, True, True, False, False]
    assert found[3] is not None, "the reading is there to compare with"


def test_histograms_with_other_bounds_are_not_compared() -> None:
    window, found = Window(30.0), []
    many = Histogram(BOUNDS, (1e6, 1e6, 1e6))  # since the server began
    more = Histogram(BOUNDS, (1e6, 1e6 + 9, 1e6 + 9))
    other = Histogram((0.5, math.inf), (1e6, 1e6))
    for second, histogram in enumerate((many, other, more, other)):
        reading = metrics.ServiceReading("vLLM", histogram, histogram, 0, 1, 1.0)
        found.append(window.view(float(second), reading, peak=0))
    assert found[:2] == [None, None]
    assert found[2] is not None, "its like is in the window yet"
    assert found[2].ttft_p99_s is not None
    assert found[2].ttft_p99_s > BOUNDS[0], "of the 9 alone"
    assert found[3] is not None
    assert found[3].ttft_p99_s is None


def test_now_is_a_second_also_where_readings_come_more_often() -> None:
    window = Window(30.0)
    found = []
    for tenth in range(14):
        # One late token in the newest tenth of a second, ten early ones in each before.
        counts = (10.0 * tenth, 10.0 * tenth + (tenth == 13), 10.0 * tenth + (tenth == 13))
        histogram = Histogram(BOUNDS, counts if tenth < 13 else (120.0, 121.0, 121.0))
        found.append(
            window.view(tenth / 10, metrics.ServiceReading("vLLM", histogram, histogram, 0, 1, 1.0), peak=0)
        )
    assert found[-1] is not None
    assert found[-1].ttft_now_s is not None
    assert found[-1].ttft_now_s <= 0.1


def test_a_real_servers_page_is_fetched_and_a_service_that_ended_is_told_from_one_that_is_another() -> None:
    with service() as beside:
        url = metrics_url(beside.url)
        beside.wait(3)
        read = next(read for _ in itertools.count() if (read := fetch(url, 5.0)).tokens > 3)
        assert (read.server, read.waiting) == ("vLLM", 3)
        assert read.ttft.quantile(0.99) == pytest.approx(0.05, rel=0.02)
    with pytest.raises(ServiceGone, match="nothing listens"):
        fetch(url, 5.0)


@pytest.mark.parametrize(
    "wrong", ["127.0.0.1:8000", "ftp://host/", "http://", "http://host/?a=b", "file:///etc/passwd"]
)
def test_an_address_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="no address"):
        metrics_url(wrong)
    assert metrics_url("http://host:1/metrics") == metrics_url("http://host:1/") == "http://host:1/metrics"


def test_an_objective_is_read_as_its_owner_writes_it() -> None:
    assert objective_of("ttft_p99=500ms tpot_p99=60ms") == Objective(0.5, 0.06)
    assert objective_of("tpot_p99=0.5s") == Objective(None, 0.5)
    for wrong in (
        "",
        "ttft_p99=500",
        "ttft_p95=500ms",
        "ttft_p99=-1ms",
        "ttft_p99=0ms",
        "ttft_p99=1s ttft_p99=2s",
    ):
        with pytest.raises(ConfigError, match="objective"):
            objective_of(wrong)


# ---------------------------------------------------------------- a page that does not end


@contextmanager
def dripping(head: bytes, piece: bytes) -> Iterator[str]:
    """The address of a server that sends `head`, and then `piece` again and again for as long as it is read."""
    over = threading.Event()

    def serve(listening: socket.socket) -> None:
        peer, _ = listening.accept()
        with peer:
            peer.sendall(head)
            while not over.wait(0.05):
                try:
                    peer.sendall(piece)
                except OSError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/metrics"
        finally:
            over.set()
            thread.join()


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", b"#"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", b"#"),
        (b"HTTP/1.1 200 OK\r\n", b"a"),
        (b"", b"H"),
    ],
    ids=["page", "page of a known length", "headers", "status"],
)
def test_a_page_that_drips_is_given_up_in_time(head: bytes, piece: bytes) -> None:
    with dripping(head, piece) as url:
        began = time.monotonic()
        with pytest.raises(ServiceError, match=r"no whole page within 0\.5 s") as found:
            fetch(url, 0.5)
        assert time.monotonic() - began < 5, "and not when the server is through"
        assert isinstance(found.value.__cause__, OSError), (
            "it may come yet: that is not another server's page"
        )


def test_a_redirect_is_not_followed() -> None:
    head = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\nContent-Length: 0\r\n\r\n"
    with dripping(head, b"") as url, pytest.raises(ServiceError, match="replied 302"):
        fetch(url, 5.0)
