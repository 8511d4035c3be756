"""Engines of one node fetch weights no faster together than they may, whatever happens to the file that they share."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import struct
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from scavenger.protocol import keys, messages
from scavenger.weights.engine_store import Store
from scavenger.weights.pace import MOST_DEBT_S, ByteRateLimit, NodePace
from scavenger.weights.source import WeightServer
from tests.weights.test_store import LIMITS, version


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_two_engines_share_one_bucket_that_holds_a_tenth_of_a_second(tmp_path: Path) -> None:
    clock = Clock()
    first, second = (NodePace(1e7, tmp_path, clock) for _ in range(2))
    assert first.owe(1_000_000) == pytest.approx(0.0), "what was saved up"
    assert second.owe(10_000_000) == pytest.approx(1.0), "the other engine has used it"
    assert first.owe(5_000_000) == pytest.approx(1.5)
    clock.now += 1.0
    assert second.owe(0) == pytest.approx(0.5), "time pays"
    clock.now += 100.0
    assert second.owe(1_000_000) == pytest.approx(0.0), "and no more than the tenth is saved up"
    first.close()
    second.close()


def test_a_source_s_own_bucket_is_the_same_one_without_a_file() -> None:
    clock = Clock()
    pace = ByteRateLimit(1e7, clock)
    assert [round(pace.owe(1_000_000), 6) for _ in range(2)] == [0.0, 0.1]
    clock.now += 100.0
    assert pace.owe(11_000_000) == pytest.approx(1.0)
    ended = threading.Event()
    ended.set()
    pace.take(1 << 40, ended)  # an hour's worth, and it is closed
    assert not ByteRateLimit().bounded


@pytest.mark.parametrize(
    "content",
    [b"", b"abc", struct.pack("<d", float("nan")), struct.pack("<d", 1000.0 + 2 * MOST_DEBT_S), b"x" * 99],
)
def test_a_file_that_says_nothing_costs_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / f"scavenger-pull-{os.getuid()}").write_bytes(content)
    pace = NodePace(1e7, tmp_path, Clock())
    assert pace.owe(10_000_000) <= 1.0 + 1e-6
    pace.close()


def test_nobody_waits_for_a_process_that_was_stopped_with_the_file(tmp_path: Path) -> None:
    pace = NodePace(1e7, tmp_path, Clock())
    with (tmp_path / f"scavenger-pull-{os.getuid()}").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        began = time.monotonic()
        assert [round(pace.owe(10_000_000), 6) for _ in range(2)] == [0.9, 1.9], "it keeps to the bound alone"
        assert time.monotonic() - began < 5.0
    pace.close()


def test_a_link_in_the_file_s_place_is_not_followed(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"precious")
    (tmp_path / f"scavenger-pull-{os.getuid()}").symlink_to(theirs)
    pace = NodePace(1e7, tmp_path, Clock())
    assert pace.owe(10_000_000) == pytest.approx(0.9)
    assert theirs.read_bytes() == b"precious"
    pace.close()


def test_a_file_that_cannot_be_written_leaves_each_engine_its_own_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a full /dev/shm, for which a `pwrite` that fails stands here."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("scavenger.weights.pace.os.pwrite", full)
    pace = NodePace(1e7, tmp_path, Clock())
    waits = [pace.owe(1_000_000) for _ in range(3)]
    assert [round(late - early, 6) for early, late in pairwise(waits)] == [0.1, 0.1], (
        "a pull goes on, as fast as the bound lets it"
    )
    pace.close()


def test_a_file_with_another_name_too_is_not_written(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    os.link(victim, tmp_path / f"scavenger-pull-{os.getuid()}")
    pace = NodePace(1e7, tmp_path, Clock())
    pace.owe(10_000_000)
    pace.close()
    assert victim.read_bytes() == b"precious"


def test_without_a_bound_there_is_no_file_and_no_wait(tmp_path: Path) -> None:
    NodePace(0.0, tmp_path).take(1 << 40, threading.Event())
    assert not list(tmp_path.iterdir())


def test_two_pulls_at_once_take_as_long_as_their_bytes_cost_together(tmp_path: Path) -> None:
    rate = 2e6

    async def main() -> float:
        manifest, blob = version(1)
        paces = [NodePace(rate, tmp_path) for _ in range(2)]
        stores = [
            Store(keys.generate(), lambda _: None, lambda: "127.0.0.1", limits=LIMITS, pace=pace)
            for pace in paces
        ]
        try:
            with WeightServer(local=False) as trainer:  # as one on another machine
                weights = messages.UseWeights(1, b"m", (trainer.publish(manifest, blob),))
                began = time.monotonic()
                got = await asyncio.gather(
                    *(store.get(manifest, weights, 0.1) for store in stores)
                )  # a bound is no failure
                took_s = time.monotonic() - began
            assert [one.view == blob for one in got] == [True, True]
        finally:
            for store in stores:
                store.close()
        return took_s

    # The last chunk of each of four connections a pull is here before it is paid for; a tenth of a second was saved up.
    least_s = (2 * (1 << 19) - 8 * (1 << 14)) / rate - 0.1
    assert asyncio.run(main()) > least_s
