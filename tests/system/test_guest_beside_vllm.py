"""A guest beside a real `vllm serve` that real requests load: its budget, its end, and that the service never notices the latter two.

Nothing is mocked: a tiny model made here, vLLM's server, a daemon, `scavenger guest` with a vLLM engine, and Poisson arrivals.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("httpx2", reason="needs the extra [gateway]")

from benchmarks import agents, open_loop, serving_live
from benchmarks.open_loop import Asked, Reply
from scavenger.guest.service import fetch, metrics_url
from tests.system import guests, play
from tests.system.guests import holds, hosted, said

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore"),
]
START_S = 600.0  # of a server or an engine, on a busy machine
MOST = 4
#: The service runs two requests at once: more of them wait, which is what a burst is, however fast the machine is.
SERVICE = argparse.Namespace(sessions=2, turns=1, tokens=112, hidden=64, layers=2)
#: So far off that only a burst cuts.
OBJECTIVE = "ttft_p99=100s tpot_p99=40s"
OPTIONS = ("--engine", "vllm", "--most", str(MOST), "--poll", "0.5")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    agents.write_model(folder, SERVICE)
    return folder


class Load:
    """Poisson arrivals from a thread of its own, until `end`."""

    def __init__(self, url: str, rate: float) -> None:
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(1, "load")
        asked = open_loop.poisson([(START_S, rate)], seed=1)
        self._replies = self._pool.submit(lambda: asyncio.run(open_loop.play(url, asked, self._over)))

    def end(self) -> list[Reply]:
        """Every reply, once the last one is whole."""
        self._over.set()
        self._pool.shutdown()
        return self._replies.result()


@contextmanager
def loaded(url: str, rate: float) -> Iterator[Load]:
    load = Load(url, rate)
    try:
        yield load
    finally:
        load.end()


def failures(replies: list[Reply]) -> list[str]:
    return [reply.failed for reply in replies if reply.failed]


def last_budget(log: Path) -> int:
    budgets = [line["budget"] for line in said(log) if "budget" in line]
    return int(budgets[-1]) if budgets else 0


def cuts(log: Path) -> list[dict[str, Any]]:
    return [line for line in said(log) if line.get("verdict") == "burst" and "is cut from" in line["reason"]]


def engine_of(process: Any) -> list[psutil.Process]:
    """The guest's worker, and the processes of its vLLM."""
    found = psutil.Process(process.pid).children(recursive=True)
    assert found, "the guest has no engine"
    return found


def ended(processes: list[psutil.Process]) -> bool:
    """Also of one that nobody has waited for: whoever had started it is gone."""
    return not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes)


def test_its_budget_falls_under_load_rises_when_the_service_idles_and_it_ends_with_the_service(
    tmp_path: Path, model: Path
) -> None:
    log = tmp_path / "guest.out"
    with (
        agents.vllm_alone(model, tmp_path, SERVICE) as service,
        guests.supplied(tmp_path / "site", model, context=128, tokens=96, most=MOST) as site,
        hosted(site, service.url, log, *OPTIONS, objective=OBJECTIVE) as process,
    ):
        play.wait_for("the guest's vLLM to generate", lambda: play.busy(site), START_S)
        play.wait_for("all that it may hold", lambda: last_budget(log) == MOST, START_S)

        with loaded(service.url, rate=40.0) as load:
            play.wait_for("a burst to cut it", lambda: cuts(log), START_S)
            play.wait_for("the guest to give all samples back", lambda: holds(site) == 0)
            replies = load.end()
        assert failures(replies) == []
        assert replies

        play.wait_for("its budget to rise again", lambda: last_budget(log) > 0, START_S)
        play.wait_for("it to hold samples again", lambda: 0 < holds(site) <= MOST)
        with loaded(service.url, rate=2.0) as load:  # little beside what it can do: it stays
            engine = engine_of(process)
            play.wait_for("it to generate", lambda: play.busy(site))
            assert failures(load.end()) == []

        for pid in service.pids:
            psutil.Process(pid).send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, "the service has ended, and its guest has not"
        report = said(log)[-1]["report"]
        assert report["tokens"] > 0
        assert report["cuts"] >= 1
        assert report["kills"] == 0, "it did not free its memory in time"
        play.wait_for("its engine's processes to end", lambda: ended(engine))
        play.wait_for("the daemon to know", lambda: not play.workers(site))


def test_a_guest_that_is_killed_under_load_costs_the_service_no_request(tmp_path: Path, model: Path) -> None:
    log = tmp_path / "guest.out"
    with (
        agents.vllm_alone(model, tmp_path, SERVICE) as service,
        guests.supplied(tmp_path / "site", model, context=128, tokens=96, most=MOST) as site,
        hosted(site, service.url, log, *OPTIONS, objective=OBJECTIVE) as process,
    ):
        play.wait_for("the guest's vLLM to generate", lambda: play.busy(site), START_S)
        engine = engine_of(process)
        with loaded(service.url, rate=2.0) as load:
            metrics = metrics_url(service.url)
            play.wait_for("a request to run", lambda: fetch(metrics, 10.0).running > 0, every_s=0.01)
            process.send_signal(signal.SIGKILL)
            process.wait(10)
            play.wait_for("its engine's processes to end", lambda: ended(engine))
            play.wait_for("its worker to have said goodbye", lambda: not play.workers(site))
            after = [Asked(0.5 * n, (1, 2, 3), 16) for n in range(5)]
            assert failures(asyncio.run(open_loop.play(service.url, after))) == []
            asked = load.end()
        assert asked
        assert failures(asked) == []


@pytest.mark.parametrize("proxy", [(), ("--proxy",)], ids=["metrics", "proxy"])
def test_the_benchmark_plays_each_arm_and_says_what_came_of_it(
    capsys: pytest.CaptureFixture[str], proxy: tuple[str, ...]
) -> None:
    sizes = ("--hidden", "64", "--layers", "2", "--most", "2", "--factor", "5")
    serving_live.main(["--rounds", "1", "--seconds", "8", *sizes, *proxy])
    said = capsys.readouterr().out
    for arm in serving_live.ARMS:
        assert re.search(rf"round 1 {arm} *: [0-9]+ requests, 0 failed", said), said
    assert re.search("free: points of time lost: .* slack used: .* tokens: median [1-9]", said), said
    assert re.search("goal, .*(met|missed)", said), said
