"""Who is sent where: by load, then node, then switch; the dead and the finished leave at once."""

from __future__ import annotations

import random

import pytest

from scavenger.protocol.messages import WeightSource
from scavenger.weights.directory import PEERS, Directory, refused

PUBLISHER = (WeightSource("tcp://trainer:1", "", b"t"),)


def engine(number: int, complete: bool = True) -> WeightSource:
    return WeightSource(f"tcp://engine{number}:1", "", b"t", complete=complete)


def endpoints(directory: Directory, worker: int, node: str, peers: int = PEERS) -> list[str]:
    return [source.endpoint for source in directory.choose(1, worker, node, PUBLISHER, peers).sources]


def test_a_first_receiver_has_the_publisher_alone() -> None:
    choice = Directory().choose(1, 5, "a", PUBLISHER)
    assert choice.sources == PUBLISHER
    assert choice.reason == "1 of the publisher, 0 of 0 engines, 0 on its node"


def test_the_least_loaded_comes_first_then_the_node_then_the_switch() -> None:
    directory = Directory({"a": "s1", "b": "s1", "c": "s2"})
    for worker, node in ((1, "c"), (2, "b"), (3, "a")):
        directory.add_holder(1, worker, node, engine(worker))
    assert endpoints(directory, 10, "a", 1)[1:] == ["tcp://engine3:1"]  # same node
    assert endpoints(directory, 11, "a", 1)[1:] == [
        "tcp://engine2:1"
    ]  # that one has a reader now: same switch
    assert endpoints(directory, 12, "a", 1)[1:] == ["tcp://engine1:1"]
    directory.settled(11)
    assert endpoints(directory, 13, "c", 1)[1:] == ["tcp://engine2:1"]  # load goes before nearness


def test_nobody_is_sent_to_itself_and_the_dead_leave_at_once() -> None:
    directory = Directory()
    directory.add_holder(1, 1, "a", engine(1))
    directory.add_holder(1, 2, "a", engine(2))
    assert endpoints(directory, 1, "a") == ["tcp://trainer:1", "tcp://engine2:1"]
    before = directory.revision(1)
    directory.gone(2)
    assert directory.revision(1) > before
    assert endpoints(directory, 1, "a") == ["tcp://trainer:1"]
    assert directory.available(1)
    directory.gone(1)
    assert not directory.available(1)


def test_a_part_of_a_version_is_served_on_and_is_not_the_version() -> None:
    directory = Directory()
    directory.add_holder(1, 1, "a", engine(1, complete=False))
    assert endpoints(directory, 2, "a") == ["tcp://trainer:1", "tcp://engine1:1"]
    assert not directory.available(1)
    assert directory.last_holder(1) is None
    directory.add_holder(1, 1, "a", engine(1))
    assert directory.available(1)
    assert directory.last_holder(1) == 1
    directory.add_holder(1, 2, "a", engine(2))
    assert directory.last_holder(1) is None
    directory.drop(1, 1)
    assert directory.last_holder(1) == 2


@pytest.mark.parametrize("seed", range(10))
def test_receivers_spread_over_holders_whatever_comes_and_goes(seed: int) -> None:
    rng = random.Random(seed)
    directory = Directory()
    holders = set(range(20))
    for worker in holders:
        directory.add_holder(1, worker, f"n{worker % 5}", engine(worker))
    sent: dict[int, list[str]] = {}
    for receiver in range(100, 160):
        if rng.random() < 0.2 and len(holders) > 8:
            lost = rng.choice(sorted(holders))
            holders.discard(lost)
            directory.gone(lost)
            sent = {who: [to for to in where if to != f"tcp://engine{lost}:1"] for who, where in sent.items()}
        if sent and rng.random() < 0.3:
            done = rng.choice(sorted(sent))
            del sent[done]
            directory.settled(done)
        before = [sum(f"tcp://engine{h}:1" in where for where in sent.values()) for h in sorted(holders)]
        sent[receiver] = endpoints(directory, receiver, f"n{receiver % 5}")[1:]
        assert len(sent[receiver]) == PEERS
        loads = dict(zip((f"tcp://engine{h}:1" for h in sorted(holders)), before, strict=True))
        assert max(loads[to] for to in sent[receiver]) <= sorted(before)[PEERS - 1]  # the six least loaded


def test_a_file_is_refused_and_so_is_the_clear_where_weights_are_encrypted() -> None:
    disk = WeightSource("file:///home/other/version-1/weights.bin", "", b"")
    for encrypt in (False, True):
        assert "file ///home/other" in refused(disk, encrypt)
        assert not refused(WeightSource("tcp://engine1:1", "key", b"t"), encrypt)
    assert not refused(engine(1), encrypt=False)
    assert "in the clear" in refused(engine(1), encrypt=True)


def test_who_serves_in_the_clear_is_no_holder_once_the_run_encrypts() -> None:
    directory = Directory()
    directory.add_holder(1, 1, "a", engine(1))
    directory.add_holder(1, 2, "a", WeightSource("tcp://engine2:1", "key", b"t"))
    before = directory.revision(1)
    directory.refuse_clear()
    assert endpoints(directory, 9, "a") == ["tcp://trainer:1", "tcp://engine2:1"]
    assert directory.revision(1) > before
