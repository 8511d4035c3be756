"""Pulling a version over real sockets: complete and verified, or an error with its reason."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import msgspec
import pytest
import zmq

from scavenger.errors import WeightsError
from scavenger.protocol import keys, messages
from scavenger.weights import manifest as manifests
from scavenger.weights import pull as pull_module
from scavenger.weights.channel import POLL_S, FileChannel
from scavenger.weights.memory import Buffer
from scavenger.weights.protocol import TOKEN_NBYTES, AvailableChunks
from scavenger.weights.pull import Pull, pull
from scavenger.weights.source import WeightServer
from scavenger.weights.transfer import TransferLimits
from scavenger.weights.version_store import VersionStore
from tests.weights.pulling import ME, QUICK, get, parts_sent, version


def test_a_pulled_version_is_the_published_one(source: WeightServer) -> None:
    manifest, blob = version(1)
    assert get(manifest, source.publish(manifest, blob)) == blob
    assert parts_sent(source, len(manifest.chunk_hashes)) == len(manifest.chunk_hashes)


def test_a_version_without_bytes_needs_no_source() -> None:
    manifest, _ = manifests.build(1, {})
    assert get(manifest) == b""


def test_several_receivers_pull_at_once(source: WeightServer) -> None:
    manifest, blob = version(1)
    address = source.publish(manifest, blob)

    async def all_of_them() -> list[Buffer]:
        return await asyncio.gather(*(pull(manifest, [address], keys.generate(), 10.0) for _ in range(5)))

    assert [buffer.view for buffer in asyncio.run(all_of_them())] == [blob] * 5


def test_an_older_version_is_served_until_two_newer_ones_are_published(source: WeightServer) -> None:
    published = [(m, b, source.publish(m, b)) for m, b in (version(1), version(2))]
    for manifest, blob, address in published:
        assert get(manifest, address) == blob
    source.publish(*version(3))
    with pytest.raises(WeightsError, match="not served here"):
        get(published[0][0], published[0][2])
    assert get(published[1][0], published[1][2]) == published[1][1]


def test_a_retired_version_is_refused(source: WeightServer) -> None:
    manifest, blob = version(1)
    address = source.publish(manifest, blob)
    source.retire(1)
    with pytest.raises(WeightsError, match="version 1 is not served here"):
        get(manifest, address)


def test_a_wrong_token_is_refused(source: WeightServer) -> None:
    manifest, blob = version(1)
    address = source.publish(manifest, blob)
    with pytest.raises(WeightsError, match="under this token"):
        get(manifest, messages.WeightSource(address.endpoint, address.server_key, bytes(TOKEN_NBYTES)))
    assert source.stats.parts == 0
    assert source.stats.refused > 0


def test_publishing_a_version_again_needs_the_same_weights(source: WeightServer) -> None:
    manifest, blob = version(1)
    assert source.publish(manifest, blob) == source.publish(manifest, blob)
    with pytest.raises(WeightsError, match="published with other weights"):
        source.publish(*version(1))


def test_a_flipped_byte_is_never_returned(source: WeightServer) -> None:
    manifest, blob = version(1)
    rotten = bytearray(blob)
    rotten[100_000] ^= 1
    with pytest.raises(WeightsError, match="does not have the manifest's hash"):
        get(manifest, source.publish(manifest, rotten))


def test_a_source_with_a_flipped_byte_is_outvoted_by_an_honest_one(source: WeightServer) -> None:
    manifest, blob = version(1)
    rotten = bytearray(blob)
    for i in range(0, len(rotten), 5000):
        rotten[i] ^= 1
    with WeightServer() as liar:
        assert get(manifest, liar.publish(manifest, rotten), source.publish(manifest, blob)) == blob


def test_nobody_listening_is_an_error_at_the_deadline(source: WeightServer) -> None:
    manifest, blob = version(1)
    address = source.publish(manifest, blob)
    source.close()
    with pytest.raises(WeightsError, match=r"not complete after 1 s: 0 of \d+ chunks"):
        get(manifest, address, deadline_s=1.0)


@pytest.mark.parametrize(("nbytes_per_s", "comes"), [(1.5e6, True), (0.3e6, False)])
def test_a_pull_that_is_slow_earns_the_time_that_it_needs_and_one_that_trickles_does_not(
    nbytes_per_s: float, comes: bool
) -> None:
    """Of two seconds, so that a machine that stands still for one changes nothing."""
    manifest, blob = version(1, nbytes=4_500_000, chunk_nbytes=1 << 15)
    one = TransferLimits(streams=1)
    with WeightServer(local=False, nbytes_per_s=nbytes_per_s) as source:
        address, began = source.publish(manifest, blob), time.monotonic()
        if comes:
            assert get(manifest, address, deadline_s=2.0, limits=one) == blob
            assert time.monotonic() - began > 2.0, "it came in more time than it was given"
            return
        with pytest.raises(WeightsError, match=r"not complete after \d\.\d+ s: \d+ of 138 chunks"):
            get(manifest, address, deadline_s=2.0, limits=one)
        assert time.monotonic() - began < 0.8 * len(blob) / nbytes_per_s, "long before it would all be here"


@pytest.mark.parametrize(
    "endpoint", ["tcp://", *(f"tcp://127.0.0.1:{port}" for port in ("1", "²", "99999", "9" * 5000))]
)
def test_a_source_that_cannot_be_addressed_does_not_stop_the_others(
    source: WeightServer, endpoint: str
) -> None:
    """An engine's word is passed on: what it says its address is may be anything."""
    manifest, blob = version(1)
    address = source.publish(manifest, blob)
    assert get(manifest, messages.WeightSource(endpoint, address.server_key, address.token), address) == blob


@pytest.mark.parametrize("key", ["x", "ä" * 40, "~" * 40])
def test_a_key_that_is_none_costs_its_holder_and_leaves_no_context_behind(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """An engine's word is passed on: what it says its key is may be anything."""
    manifest, blob = version(1)
    made, real = list[zmq.Context[zmq.Socket[bytes]]](), zmq.Context

    def context() -> zmq.Context[zmq.Socket[bytes]]:
        made.append(real())
        return made[-1]

    with WeightServer(encrypt=True) as source:
        address = source.publish(manifest, blob)
        monkeypatch.setattr(zmq, "Context", context)
        wrong = messages.WeightSource(address.endpoint, key, address.token)
        assert get(manifest, wrong, address) == blob
        with pytest.raises(WeightsError, match="cannot be used"):
            get(manifest, wrong, deadline_s=0.5)
    assert made
    assert all(one.closed for one in made)


RACE = """
import os, threading, time
import zmq
from zmq.utils import garbage

if ours := {ours}:
    import scavenger.weights.source_zmq
made, real, run = [], zmq.Context, garbage.GarbageCollectorThread.run

def until(count):
    deadline = time.monotonic() + 30.0
    while not ours and len(made) < count and time.monotonic() < deadline:
        time.sleep(0.001)

class Slow(real):
    def __init__(self, *args, **kwargs):
        made.append(self)
        until(2)
        super().__init__(*args, **kwargs)

def later(self):
    until(1)
    run(self)

def sends(number):
    with real() as context, context.socket(zmq.PUSH) as a, context.socket(zmq.PULL) as b:
        a.bind(f"inproc://{{number}}")
        b.connect(f"inproc://{{number}}")
        a.send(bytes(100_000), copy=False)
        b.recv(copy=False)

garbage.zmq.Context, garbage.GarbageCollectorThread.run = Slow, later
threads = [threading.Thread(target=sends, args=(number,)) for number in range(2)]
threads[0].start()
while garbage.gc.thread is None or not garbage.gc.thread.is_alive():
    time.sleep(0.001)
threads[1].start()
for thread in threads:
    thread.join()
print(len(made), flush=True)
os._exit(0)  # with two, pyzmq waits at the exit for the one that nobody reaches any more
"""


def test_two_threads_that_send_first_make_no_two_collectors_of_sent_memory() -> None:
    """pyzmq's own are made where they are first asked for; without ours the same program makes two."""
    for ours, made in ((False, "2"), (True, "0")):
        done = subprocess.run(
            [sys.executable, "-c", RACE.format(ours=ours)],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert done.stdout.strip() == made


def test_an_interface_that_this_host_does_not_have_is_refused_with_the_key_to_set() -> None:
    for listen in ("192.0.2.1", "no such host"):
        with pytest.raises(WeightsError, match=r"set weights\.listen"):
            WeightServer(listen)


def test_a_neighbour_is_handed_the_memory_and_checks_it_all_the_same(tcp: WeightServer) -> None:
    manifest, blob = version(1)
    buffer = Buffer(len(blob))
    buffer.view[:] = blob
    address = tcp.publish(manifest, buffer)
    assert get(manifest, address) == blob
    assert tcp.stats.mapped > 0
    assert tcp.stats.parts == 0
    buffer.view[5000] ^= 1
    with pytest.raises(WeightsError, match="does not have the manifest's hash"):
        get(manifest, address)
    elsewhere = messages.WeightSource(address.endpoint, "", address.token, "another-machine:x")
    buffer.view[5000] ^= 1
    assert get(manifest, elsewhere) == blob
    assert parts_sent(tcp, len(manifest.chunk_hashes)) == len(manifest.chunk_hashes)


def test_a_neighbour_without_the_token_gets_no_memory(tcp: WeightServer) -> None:
    manifest, blob = version(1)
    buffer = Buffer(len(blob))
    address = tcp.publish(manifest, buffer)
    with pytest.raises(WeightsError, match="under this token"):
        get(manifest, messages.WeightSource(address.endpoint, "", bytes(TOKEN_NBYTES), address.local))
    assert tcp.stats.mapped == 0


def test_receivers_serve_each_other_while_they_pull(tcp: WeightServer) -> None:
    """Two receivers of a slow publisher: each chunk leaves the publisher about once."""
    manifest, blob = version(1, nbytes=1 << 20, chunk_nbytes=1 << 13)
    count = len(manifest.chunk_hashes)

    async def both() -> tuple[Buffer, Buffer]:
        with WeightServer(local=False) as first, WeightServer(local=False) as second:
            works = [Pull(manifest, ME, limits=QUICK, seed=seed) for seed in (1, 2)]
            held = [
                one.publish_empty(manifest, work.buffer)
                for one, work in zip((first, second), works, strict=True)
            ]
            works[0].arrived = lambda chunk: first.arrived(1, chunk)
            works[1].arrived = lambda chunk: second.arrived(1, chunk)
            works[0].offer([publisher, held[1]])
            works[1].offer([publisher, held[0]])
            return tuple(await asyncio.gather(*(work.finish(20.0) for work in works)))  # type: ignore[return-value]

    with WeightServer(local=False, nbytes_per_s=1 << 20) as slow:
        publisher = slow.publish(manifest, blob)
        one, two = asyncio.run(both())
        assert one.view == two.view == blob
        assert slow.stats.parts < 1.5 * count


def test_a_neighbour_that_is_slow_to_say_what_it_has_is_waited_for(
    tcp: WeightServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that took longer than one look was lost: the reader spun until it gave the connection up."""
    manifest, blob = version(1, nbytes=1 << 16)
    buffer = Buffer(len(blob))
    buffer.view[:] = blob
    address = tcp.publish_empty(manifest, buffer)
    channel = FileChannel.neighbour(address, manifest, 5.0)
    may_answer, real = threading.Event(), VersionStore.reply

    def slow(store: VersionStore, *args: Any) -> Any:
        may_answer.wait(5.0)
        return real(store, *args)

    monkeypatch.setattr(VersionStore, "reply", slow)
    into = memoryview(bytearray(manifest.chunk_nbytes))
    channel.ask_have()
    began = time.monotonic()
    assert channel.reply(into, lambda: None) is None
    assert channel.reply(into, lambda: None) is None
    assert time.monotonic() - began >= POLL_S, "it waits, and does not spin"
    may_answer.set()
    until = time.monotonic() + 5.0
    while (reply := channel.reply(into, lambda: None)) is None:
        assert time.monotonic() < until
    assert isinstance(reply, AvailableChunks)
    assert not reply.complete
    channel.close()


def test_a_busy_neighbour_is_waited_for_before_its_memory_is_read_over_the_network(
    tcp: WeightServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, blob = version(1)
    buffer = Buffer(len(blob))
    buffer.view[:] = blob
    address = tcp.publish(manifest, buffer)
    find = VersionStore.find

    def busy(store: VersionStore, *args: Any) -> Any:
        time.sleep(3 * POLL_S)
        return find(store, *args)

    monkeypatch.setattr(VersionStore, "find", busy)
    assert get(manifest, address, limits=TransferLimits()) == blob
    assert tcp.stats.parts == 0


@pytest.mark.parametrize("leads", ["delivers", "delivers nothing"])
def test_an_engine_reads_what_another_of_its_node_fetches(
    leads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte leaves the publisher once for both; and twice where the one that was to fetch them does not."""
    monkeypatch.setattr(pull_module, "LED_NBYTES", 1)
    manifest, blob = version(1, nbytes=1 << 20, chunk_nbytes=1 << 13)
    count = len(manifest.chunk_hashes)

    async def both() -> tuple[Buffer, Buffer]:
        leader, follower = Pull(manifest, ME, limits=QUICK), Pull(manifest, ME, limits=QUICK)
        with WeightServer() as source:
            held = source.publish_empty(manifest, leader.buffer)
            if leads == "delivers":
                leader.arrived = lambda chunk: source.arrived(1, chunk)
            follower.offer([msgspec.structs.replace(publisher, last=True)])
            leader.offer([publisher])
            follower.offer([msgspec.structs.replace(publisher, last=True), held])
            return tuple(await asyncio.gather(leader.finish(20.0), follower.finish(20.0)))  # type: ignore[return-value]

    with WeightServer(local=False, nbytes_per_s=1 << 20) as slow:
        publisher = slow.publish(manifest, blob)
        one, two = asyncio.run(both())
        assert one.view == two.view == blob
        sent = parts_sent(slow, count)
        assert sent == count if leads == "delivers" else sent > 1.5 * count


@pytest.mark.parametrize("encrypt", [False, True])
def test_a_source_serves_at_the_port_that_a_firewall_lets_through(encrypt: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with WeightServer(port=port, encrypt=encrypt, local=False) as source:
        assert source.endpoint == f"tcp://127.0.0.1:{port}"
        with pytest.raises(WeightsError, match=f"cannot bind 127.0.0.1, port {port}") as error:
            WeightServer(port=port, encrypt=encrypt, local=False)
        assert "weights.port" in error.value.remedy
