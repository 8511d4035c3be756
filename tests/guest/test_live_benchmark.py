"""The load generator asks whether or not it is answered, and what `benchmarks/serving_live.py` counts of the replies."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("httpx2", reason="needs the extra [gateway]")

from benchmarks import open_loop, serving_live
from benchmarks.open_loop import Asked, Reply
from scavenger.policy.serving import Objective
from scavenger.simulate.serving import requests_within, windows_within


@contextmanager
def server(together: int, short: int = 0) -> Iterator[str]:
    """Streams a token at a time, once `together` requests are there. Leaves out `short` tokens of each reply."""
    there = threading.Barrier(together)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            there.wait(10.0)
            self.send_response(200)
            self.end_headers()
            for token in range(asked["sampling_params"]["max_tokens"] - short):
                part = {"choices": [{"token_ids": [token]}]}
                self.wfile.write(f"data: {json.dumps(part)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_words: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}"
        finally:
            listening.shutdown()
            thread.join()


def test_a_request_is_sent_when_it_is_due_though_none_before_it_is_answered() -> None:
    asked = [Asked(0.01 * n, (1, 2), 3) for n in range(4)]
    with server(together=4) as url:
        replies = asyncio.run(open_loop.play(url, asked))
    assert [reply.failed for reply in replies] == [""] * 4
    assert [sum(tokens for _, tokens in reply.gaps) for reply in replies] == [2] * 4
    assert all(reply.first_s is not None and reply.ended_s >= reply.asked.at_s for reply in replies)


def test_a_reply_of_too_few_tokens_has_failed() -> None:
    with server(together=1, short=1) as url:
        (reply,) = asyncio.run(open_loop.play(url, [Asked(0.0, (1,), 3)]))
    assert reply.failed == "2 tokens came where 3 were asked for"


def test_arrivals_have_their_phases_rates_and_the_same_seed_gives_the_same() -> None:
    phases = [(100.0, 2.0), (50.0, 20.0), (50.0, 0.0), (100.0, 2.0)]
    asked = open_loop.poisson(phases, seed=3)
    assert asked == open_loop.poisson(phases, seed=3)
    assert asked != open_loop.poisson(phases, seed=4)
    times = [one.at_s for one in asked]
    assert times == sorted(times)
    counts = [
        sum(start <= at < end for at in times)
        for start, end in ((0, 100), (100, 150), (150, 200), (200, 300))
    ]
    assert counts[2] == 0
    for count, mean in zip((counts[0], counts[1], counts[3]), (200, 1000, 200), strict=True):
        assert abs(count - mean) < 5 * math.sqrt(mean)


def test_a_round_is_counted_by_the_second_and_what_failed_is_late() -> None:
    objective = Objective(0.5, 0.1)
    good = Reply(Asked(0.2, (1,), 3), first_s=0.1, gaps=[(0.05, 2)], ended_s=0.4)
    slow = Reply(Asked(1.2, (1,), 2), first_s=0.6, gaps=[(0.01, 1)], ended_s=1.9)
    failed = Reply(Asked(3.1, (1,), 2), failed="reset", ended_s=3.2)
    out = serving_live.outcome_of([good, slow, failed], 4.0, leases=[(0.5, 2.5), (0.0, 1.0)])
    assert requests_within(out, objective) == pytest.approx(1 / 3)
    assert windows_within(out, objective, every=1) == (1, 3)
    assert [interval.sample_s for interval in out.intervals[:4]] == pytest.approx([1.5, 1.0, 0.5, 0.0])


def test_a_request_that_waits_over_the_end_of_a_second_is_judged_by_its_latency() -> None:
    over = Reply(Asked(0.9, (1,), 1), first_s=0.3, ended_s=1.2)
    out = serving_live.outcome_of([over], 3.0)
    assert windows_within(out, Objective(0.5), every=1) == (1, 1)
    assert windows_within(out, Objective(0.2), every=1) == (0, 1)
