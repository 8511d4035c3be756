"""The account of GPU memory: takes and gives of several processes, a capacity that holds, and rows that die with their process."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from rollout.engines import account
from rollout.engines.account import OverCapacity, Row, Shared, Uncounted
from tests.gpu_account import other_process


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return account.create(tmp_path / "gpu", 1000)


def test_what_is_taken_is_in_the_table_until_it_is_given_back(path: Path) -> None:
    one = Shared(path, 0, "rank 0")
    one.take("weights", 300)
    one.take("weights", 100)
    one.hold("optimizer", 200)
    one.give("weights", 150)
    pid = os.getpid()
    assert one.table() == (
        Row(0, "rank 0", pid, "weights", 250, 400),
        Row(0, "rank 0", pid, "optimizer", 200, 200),
    )
    assert (one.own(), one.capacity, one.counts) == (450, 1000, True)
    with pytest.raises(ValueError, match="gives back 251 bytes of weights, and holds 250"):
        one.give("weights", 251)
    one.close()
    assert Shared(path, 0, "rank 0").table() == ()


def test_more_than_the_gpu_has_is_refused_with_both_parties_tables_and_changes_nothing(path: Path) -> None:
    with other_process(path, "one.take('weights', 500); one.take('cache', 200)") as engine:
        rank = Shared(path, 0, "rank 0")
        rank.hold("weights", 300)
        with pytest.raises(OverCapacity) as refused:
            rank.hold("step", 1)
        for line in (
            f"GPU 0 has 1,000 bytes, of which 1,000 are held: rank 0 (process {os.getpid()}) wants 1 more for its step",
            f"engine 0 (process {engine.pid}): 700 = weights 500, cache 200",
            f"rank 0 (process {os.getpid()}): 300 = weights 300",
        ):
            assert line in str(refused.value)
        assert account.refusals(path).read_text() == f"{refused.value}\n", (
            "kept, whatever becomes of the error"
        )
        assert (rank.own(), rank.of_other_processes()) == (300, 700)
        Shared(path, 1, "rank 1").take("weights", 1000)  # another GPU


def test_the_memory_of_a_process_that_is_gone_is_free(path: Path) -> None:
    rank = Shared(path, 0, "rank 0")
    rank.take("weights", 100)
    with other_process(path, "one.take('weights', 900)"), pytest.raises(OverCapacity):
        rank.take("step", 100)
    rank.take("step", 900)
    assert [row.who for row in rank.table()] == ["rank 0", "rank 0"]


def test_what_an_engine_took_at_most_is_remembered_while_it_sleeps(path: Path) -> None:
    with other_process(path, "one.take('weights', 500); one.give('weights', 500)"):
        rank = Shared(path, 0, "rank 0")
        assert (rank.of_other_processes(), Shared(path, 1, "rank 1").of_other_processes()) == (500, 0)


def test_two_processes_that_take_at_once_lose_no_byte(path: Path) -> None:
    account.create(path, 10**9)
    begin = path.with_name("begin")
    program = f"""
import threading, time
def go():
    while not Path({str(begin)!r}).exists():
        time.sleep(0.001)
    for _ in range(2000):
        one.take("a", 1)
threading.Thread(target=go).start()
"""
    with other_process(path, program, "rank 0"), other_process(path, program, "rank 1"):
        begin.touch()
        rank, deadline = Shared(path, 0, "rank 9"), time.monotonic() + 60
        while sum(row.nbytes for row in rank.table()) < 4000:
            assert time.monotonic() < deadline, rank.table()
            time.sleep(0.01)
        assert [row.nbytes for row in rank.table()] == [2000, 2000]


def test_nothing_is_counted_where_there_is_neither_a_gpu_nor_a_file() -> None:
    found = account.opened({}, 0, "rank 0")
    if isinstance(found, Uncounted) and not found.capacity:
        found.take("weights", 10**15)
        assert (found.own(), found.of_other_processes(), found.table(), found.counts) == (0, 0, (), False)


def test_an_engine_s_gpus_are_those_that_its_slot_has(path: Path) -> None:
    gpus = account.of_engine({account.VARIABLE: str(path), "SCAVENGER_SLOT": "2", "SCAVENGER_GPUS": "4"})
    for number, gpu in enumerate(gpus):
        gpu.take("weights", 10 + number)
    held = [(row.gpu, row.who, row.nbytes) for row in gpus[0].table()]
    assert held == [(8, "engine 2", 10), (9, "engine 2", 11), (10, "engine 2", 12), (11, "engine 2", 13)]
    assert [gpu.own() for gpu in gpus] == [10, 11, 12, 13]
