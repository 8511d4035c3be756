"""Deltas are bit-exact or of no effect."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
import sys
import threading
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard

from scavenger.errors import WeightsError, WireError
from scavenger.protocol import keys, messages
from scavenger.weights import delta, protocol
from scavenger.weights import manifest as manifests
from scavenger.weights.delta_store import Chains, Encoder
from scavenger.weights.manifest import Manifest
from scavenger.weights.memory import Buffer
from scavenger.weights.protocol import ChunkPart
from scavenger.weights.pull import Pull, _Stream
from scavenger.weights.source import WeightServer
from scavenger.weights.transfer import TransferLimits
from tests.weights.pulling import link_of

CHUNK = 1 << 14


def bytes_of(seed: int, nbytes: int) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def changed(data: bytes, share: float, seed: int, width: int = 2) -> bytes:
    """So many of the items, moved by a few last bits."""
    rng = np.random.default_rng(seed)
    items = np.frombuffer(data, dtype=f"<u{width}").copy()
    places = rng.random(len(items)) < share
    items[places] ^= rng.integers(1, 4, places.sum()).astype(items.dtype)
    return items.tobytes()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.0, 1e-4, 0.01, 0.3, 1.0])
def test_a_delta_gives_back_every_bit(width: int, share: float) -> None:
    old = bytes_of(1, CHUNK)
    new = changed(old, share, 2, width)
    made = delta.encode(memoryview(old), memoryview(new), width)
    out = memoryview(bytearray(CHUNK))
    delta.apply_chain(memoryview(old), memoryview(delta.chain([made])), out)
    assert out == new
    if share <= 0.01:
        assert len(made) < CHUNK / 20


def test_nan_payloads_signed_zeros_and_the_first_and_last_item_survive() -> None:
    old = np.zeros(CHUNK // 2, dtype="<u2")
    new = old.copy()
    new[[0, 1, 700, -1]] = [0x8000, 0x7FC1, 0xFFFF, 0x0001]
    out = memoryview(bytearray(CHUNK))
    before, after = memoryview(old.tobytes()), memoryview(new.tobytes())
    delta.apply_chain(before, memoryview(delta.chain([delta.encode(before, after, 2)])), out)
    assert out == after


@pytest.mark.parametrize("items", [1, 2, 3, 4, 5, 1023])
def test_a_count_of_items_that_is_no_multiple_of_four_and_changes_of_every_size_survive(items: int) -> None:
    rng = np.random.default_rng(items)
    for width in (1, 2, 4, 8):
        before, after = memoryview(rng.bytes(items * width)), memoryview(rng.bytes(items * width))
        out = memoryview(bytearray(items * width))
        made = delta.encode(before, after, width)
        assert made[1] == 0, "all items' changes"
        delta.apply_chain(before, memoryview(delta.chain([made])), out)
        assert out == after


def test_steps_of_one_size_cost_a_bit_or_two_an_item_whatever_share_of_them_shows() -> None:
    """As an optimizer's step does: float32 masters move by the learning rate, up or down, and are cast to bfloat16."""
    rng = np.random.default_rng(0)
    masters = rng.normal(0, 0.02, 1 << 18).astype(np.float32)
    before, after = (
        memoryview((values.view("<u4") >> 16).astype("<u2").tobytes())
        for values in (masters, masters + rng.choice(np.array([-2e-5, 2e-5], np.float32), len(masters)))
    )
    made, out = delta.encode(before, after, 2), memoryview(bytearray(len(before)))
    delta.apply_chain(before, memoryview(delta.chain([made])), out)
    assert out == after
    share = np.mean(np.frombuffer(before, "<u2") != np.frombuffer(after, "<u2"))
    assert share > 0.2
    assert len(made) < 0.1 * len(before)


def bfloat16(values: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    bits = values.view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def step(size: float, rows: float) -> tuple[memoryview, memoryview]:
    """An optimizer's step from masters that were bfloat16, up or down, of so large a share of the rows."""
    rng = np.random.default_rng(0)
    masters = (bfloat16(rng.normal(0, 0.02, 1 << 18).astype(np.float32)).astype("<u4") << 16).view("<f4")
    some = np.repeat(rng.random(len(masters) >> 8) < rows, 256)
    moved = masters + np.float32(size) * rng.choice(np.array([-1, 1], np.float32), len(masters)) * some
    return memoryview(bfloat16(masters).tobytes()), memoryview(bfloat16(moved).tobytes())


@pytest.mark.parametrize(
    ("size", "rows", "changed_share", "form", "bytes_share"),
    [
        (3e-7, 1.0, (0.003, 0.008), "few", 0.006),
        (3e-6, 1.0, (0.03, 0.045), "all", 0.006),
        (1e-3, 0.02, (0.012, 0.025), "few", 0.009),
        (1e-5, 1.0, (0.1, 0.2), "all", 0.02),
    ],
)
def test_the_shorter_form_is_kept_wherever_it_depends_on_which_items_moved(
    size: float, rows: float, changed_share: tuple[float, float], form: str, bytes_share: float
) -> None:
    before, after = step(size, rows)
    made, out = delta.encode(before, after, 2), memoryview(bytearray(len(before)))
    delta.apply_chain(before, memoryview(delta.chain([made])), out)
    assert out == after
    share = np.mean(np.frombuffer(before, "<u2") != np.frombuffer(after, "<u2"))
    assert changed_share[0] < share < changed_share[1]
    assert ("few" if made[1] else "all") == form
    assert len(made) < bytes_share * len(before)


@pytest.mark.parametrize("share", [0.005, 0.5])
@pytest.mark.parametrize("seed", range(40))
def test_garbage_is_refused_or_makes_other_bytes_but_never_more(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    old = bytes_of(1, CHUNK)
    good = bytearray(
        delta.chain([delta.encode(memoryview(old), memoryview(changed(old, share, seed)), 2)] * 2)
    )
    for _ in range(20):
        bad = bytearray(good)
        bad[int(rng.integers(len(bad)))] ^= int(rng.integers(1, 256))
        bad = bad[: int(rng.integers(1, len(bad) + 1))]
        out = memoryview(bytearray(CHUNK))
        try:
            delta.apply_chain(memoryview(old), memoryview(bad), out)
        except WeightsError:
            continue
        assert len(out) == CHUNK


def test_more_positions_than_are_ever_made_are_refused() -> None:
    """Links that change nothing cost time: their number of positions is bounded as an honest one's is."""
    items = CHUNK // 2
    for count, refused in ((int(delta.MANY * items), False), (int(delta.MANY * items) + 1, True)):
        packed = zstandard.ZstdCompressor().compress(bytes(count * 3))
        link = memoryview(delta.chain([struct.pack("<BBI", 2, 1, count) + packed]))
        with pytest.raises(WeightsError, match="positions") if refused else contextlib.nullcontext():
            delta.apply_chain(memoryview(bytes(CHUNK)), link, memoryview(bytearray(CHUNK)))


def test_a_bomb_is_refused() -> None:
    packed = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    for gap_width, count in ((1, 1), (1, CHUNK // 2), (0, 0), (0, CHUNK // 2)):
        bomb = struct.pack("<BBI", 2, gap_width, count) + packed
        with pytest.raises(WeightsError):
            delta.apply_chain(
                memoryview(bytes(CHUNK)), memoryview(delta.chain([bomb])), memoryview(bytearray(CHUNK))
            )


def test_a_head_that_counts_other_large_changes_than_there_are_is_refused() -> None:
    old, new = memoryview(bytes(8)), memoryview(bytes([9, 0] * 4))
    fours = zstandard.ZstdCompressor().compress(
        bytes([3]) + bytes([1, 1, 0, 0])
    )  # one large change in the fours, two of them told
    with pytest.raises(WeightsError, match="1 large changes, its head says 2"):
        delta.apply_chain(
            old,
            memoryview(delta.chain([struct.pack("<BBI", 2, 0, 2) + fours])),
            memoryview(bytearray(len(new))),
        )


@pytest.mark.parametrize("named", [True, False])
def test_a_bomb_is_refused_before_memory_is_taken_for_it(named: bool) -> None:
    """The library allots what a frame names, beyond `max_output_size`; and one that names nothing is none of ours."""
    packed = zstandard.ZstdCompressor(write_content_size=named).compress(bytes(1 << 26))
    bomb = memoryview(delta.chain([struct.pack("<BBI", 2, 1, CHUNK // 2) + packed]))
    old, out = memoryview(bytes(CHUNK)), memoryview(bytearray(CHUNK))
    tracemalloc.start()
    try:
        with pytest.raises(WeightsError, match=f"a delta of {1 << 26 if named else -1} bytes"):
            delta.apply_chain(old, bomb, out)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("failure", [WeightsError("no delta"), MemoryError()])
def test_a_delta_that_cannot_be_unpacked_costs_the_base_and_not_the_pull(
    monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    versions = history(2)

    def fails(*_: object) -> None:
        raise failure

    with WeightServer(local=False, deltas=4) as source:
        for manifest, buffer in versions:
            source.publish(manifest, buffer)
            source.wait_deltas()
        monkeypatch.setattr(delta, "apply_chain", fails)
        assert fetch(versions[0], versions[1][0], source, versions[1][1]).base is None


def test_a_delta_of_a_chunk_that_was_not_asked_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    (first, one), (second, _) = history(2)
    work = Pull(second, keys.generate(), base=(first, one))
    stream = _Stream(
        work, work.transfer.add_holder(0, 0.0), messages.WeightSource("tcp://127.0.0.1:1", "", b"")
    )
    monkeypatch.setattr(delta, "apply_chain", lambda *_: pytest.fail("it was unpacked"))
    with pytest.raises(WireError, match="not asked for"):
        stream._take(ChunkPart(second.version, 3, 100, delta=True))
    assert work.base is not None


def version(number: int, data: bytes) -> tuple[Manifest, Buffer]:
    manifest, blob = manifests.build(
        number, {"w": ("bfloat16", (len(data) // 2,), memoryview(data))}, chunk_nbytes=CHUNK
    )
    buffer = Buffer(len(blob))
    buffer.view[:] = blob
    return manifest, buffer


def history(count: int, share: float = 0.01, chunks: int = 16) -> list[tuple[Manifest, Buffer]]:
    data = bytes_of(0, CHUNK * chunks)
    made = [version(1, data)]
    for number in range(2, count + 1):
        data = changed(data, share, number)
        made.append(version(number, data))
    return made


def fetch(
    base: tuple[Manifest, Buffer] | None,
    target: Manifest,
    source: WeightServer,
    buffer: Buffer,
    link: float = 1e6,
) -> Pull:
    """Over connections of `link` bytes a second, as far as the receiver knows: by 1e6, deltas are what comes first."""
    limits = TransferLimits(stall_s=1.0, backoff_s=0.01)
    work = Pull(target, keys.generate(), limits=limits, base=base, rates=link_of(link))

    async def main() -> None:
        work.offer([source.publish(target, buffer)])
        await work.finish(10.0)

    asyncio.run(main())
    assert work.buffer.view == buffer.view
    return work


@pytest.mark.parametrize("encrypt", [False, True])
def test_a_receiver_with_an_earlier_version_is_sent_what_changed(encrypt: bool) -> None:
    versions = history(4)
    with WeightServer(local=False, deltas=4, encrypt=encrypt) as source:
        for manifest, buffer in versions:
            source.publish(manifest, buffer)
            source.wait_deltas()
        newest, buffer = versions[-1]
        one = fetch(versions[2], newest, source, buffer)
        assert one.deltas == len(newest.chunk_hashes)
        assert one.nbytes < newest.total_nbytes / 15
        three = fetch(versions[0], newest, source, buffer)  # a joiner three versions behind: a chain
        assert three.deltas == len(newest.chunk_hashes)
        assert one.nbytes < three.nbytes < newest.total_nbytes / 5
        assert fetch(None, newest, source, buffer).deltas == 0


def test_a_chain_that_would_not_pay_is_not_sent() -> None:
    versions = history(5, share=0.6)
    with WeightServer(local=False, deltas=4) as source:
        for manifest, buffer in versions:
            source.publish(manifest, buffer)
            source.wait_deltas()
        newest, buffer = versions[-1]
        chunks = len(newest.chunk_hashes)
        assert fetch(versions[3], newest, source, buffer).deltas == chunks
        assert fetch(versions[0], newest, source, buffer).deltas == chunks, (
            "0.73 of the bytes, on a slow link"
        )
        assert fetch(versions[0], newest, source, buffer, link=1e9).deltas == 0, "and not on a fast one"


def test_a_base_that_is_not_what_its_manifest_says_costs_time_and_nothing_else() -> None:
    versions = history(2)
    versions[0][1].view[100] ^= 1
    spoiled = (versions[0][0], Buffer(versions[0][1].nbytes))
    spoiled[1].view[:] = bytes(versions[0][1].nbytes)
    versions[0][1].view[100] ^= 1
    with WeightServer(local=False, deltas=4) as source:
        for manifest, buffer in versions:
            source.publish(manifest, buffer)
            source.wait_deltas()
        work = fetch(spoiled, versions[1][0], source, versions[1][1])
        assert work.base is None
        assert work.transfer.corrupt == 0


def test_what_is_not_encoded_yet_is_sent_whole_and_another_layout_has_no_deltas() -> None:
    (first, one), (second, two) = history(2)
    chains = Chains(4)
    encoder = Encoder(chains)
    encoder.published(first, one.view)
    assert chains.find(first.root, second.root, 0, CHUNK) is None
    encoder.published(second, two.view)
    encoder.wait()
    assert chains.find(first.root, second.root, 0, CHUNK) is not None
    assert chains.find(b"unknown", second.root, 0, CHUNK) is None
    other, blob = manifests.build(
        3, {"v": ("bfloat16", (CHUNK // 2,), memoryview(bytes(CHUNK)))}, chunk_nbytes=CHUNK
    )
    encoder.published(other, blob)
    encoder.wait()
    assert chains.find(second.root, other.root, 0, CHUNK) is None


def test_weights_that_come_back_lead_nobody_round_for_ever() -> None:
    (first, one), (second, two) = history(2)
    chains = Chains(4)
    encoder = Encoder(chains)
    for manifest, buffer in ((first, one), (second, two), (first, one)):  # A, B, A again
        encoder.published(manifest, buffer.view)
        encoder.wait()
    answers: list[bytes | None] = []
    asking = threading.Thread(
        target=lambda: answers.append(chains.find(b"unknown", first.root, 0, CHUNK)), daemon=True
    )
    asking.start()
    asking.join(5.0)
    chains._steps.clear()  # ends it where it goes on
    assert answers == [None]
    assert not asking.is_alive()


def test_the_way_back_to_weights_that_were_is_found() -> None:
    (first, one), (second, two) = history(2)
    chains = Chains(4)
    encoder = Encoder(chains)
    for manifest, buffer in ((first, one), (second, two), (first, one)):
        encoder.published(manifest, buffer.view)
        encoder.wait()
    assert chains.find(second.root, first.root, 0, CHUNK) is not None
    assert chains.find(first.root, second.root, 0, CHUNK) is not None


def test_only_the_last_steps_are_kept() -> None:
    versions = history(6)
    chains = Chains(2)
    encoder = Encoder(chains)
    for manifest, buffer in versions:
        encoder.published(manifest, buffer.view)
        encoder.wait()
    roots = [manifest.root for manifest, _ in versions]
    assert chains.find(roots[3], roots[5], 0, CHUNK) is not None
    assert chains.find(roots[2], roots[5], 0, CHUNK) is None


def link(nbytes: int) -> bytes:
    return delta.chain([bytes(nbytes - 4)])


def test_what_came_is_given_on_from_where_it_came_and_as_a_chain_with_what_came_before() -> None:
    relay = Chains(2)
    relay.add(b"a", b"b", 0, link(10))
    relay.add(b"b", b"c", 0, link(20))
    relay.add(b"b", b"c", 1, link(30))
    assert relay.find(b"b", b"c", 1, 1000) == link(30)
    assert relay.find(b"a", b"c", 0, 1000) == link(10) + link(20)
    assert relay.find(b"a", b"c", 1, 1000) is None, "of this chunk the first step did not come as a delta"
    assert relay.find(b"a", b"c", 0, 33) is None, "more than it is worth"
    relay.add(b"c", b"d", 0, link(10))
    assert relay.find(b"a", b"b", 0, 1000) is None, "two steps are kept"
    relay.add(b"x", b"d", 1, link(10))
    assert relay.find(b"c", b"d", 0, 1000) is None, "the way to it is another now"


def test_what_is_given_on_is_bounded_in_bytes_and_in_links() -> None:
    relay = Chains(3, nbytes=100)
    relay.add(b"a", b"b", 0, link(60))
    relay.add(b"b", b"c", 0, link(60))
    assert relay.find(b"a", b"b", 0, 1000) is None, "the oldest went"
    assert relay.find(b"b", b"c", 0, 1000) is not None
    relay.add(b"b", b"c", 1, link(60))
    assert relay.find(b"b", b"c", 1, 1000) is None, "beyond the bound nothing is kept"
    most = Chains(3)
    for parent, root in ((b"a", b"b"), (b"b", b"c")):
        most.add(parent, root, 0, link(8) * (delta.MOST_LINKS - 2))
    assert delta.links(link(8) * 6) == 6
    assert most.find(b"b", b"c", 0, 1000) is not None
    assert most.find(b"a", b"c", 0, 1000) is None, "a receiver refuses longer chains"


def test_the_links_of_a_chain_of_millions_are_not_counted_to_the_end() -> None:
    assert delta.links(bytes(4 << 20)) == delta.MOST_LINKS + 1
    assert delta.links(bytes(4 * delta.MOST_LINKS)) == delta.MOST_LINKS
    assert delta.links(b"\xff" * 8) == 1, "cut off"


def test_what_is_made_here_is_bounded_as_what_came_is() -> None:
    versions = history(3)
    roots = [manifest.root for manifest, _ in versions]

    def made(room: int) -> list[list[bytes | None]]:
        """Of both steps, each chunk's."""
        chains = Chains(4, room)
        encoder = Encoder(chains)
        for manifest, buffer in versions:
            encoder.published(manifest, buffer.view)
            encoder.wait()
        return [
            [chains.find(*step, chunk, CHUNK) for chunk in range(16)] for step in itertools.pairwise(roots)
        ]

    first, second = (sum(len(one or b"") for one in step) for step in made(1 << 20))
    oldest, newest = made(max(first, second))
    assert oldest == [None] * 16, "the oldest went"
    assert None not in newest
    oldest, newest = made(second // 2)
    assert oldest == [None] * 16
    assert 6 <= 16 - newest.count(None) <= 8, "beyond the bound nothing is kept"


def test_many_threads_that_add_keep_the_count_of_bytes_and_the_bound() -> None:
    chains = Chains(2, nbytes=100_000)
    start, interval = threading.Barrier(4), sys.getswitchinterval()

    def add(number: int) -> None:
        start.wait(10.0)
        for chunk in range(number, 2000, 4):
            chains.add(b"a", b"b", chunk, link(100))
            if chunk % 100 == number:
                chains.begin(b"x", bytes([number]))

    threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    sys.setswitchinterval(1e-6)  # they take turns within a line
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
    finally:
        sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in threads)
    assert (
        0
        < chains._nbytes
        == sum(len(one) for step in chains._steps.values() for one in step.chunks.values())
        <= 100_000
    )


def test_a_request_is_proven_with_the_weights_that_it_names() -> None:
    token = bytes(range(32))
    asked = protocol.decode_request(protocol.get(token, 1, 2, b"parent"))
    assert protocol.proven(asked, token)
    for other in (b"", b"paren", b"other"):
        assert not protocol.proven(msgspec.structs.replace(asked, parent=other), token)
    assert protocol.proven(protocol.decode_request(protocol.get(token, 1, 2)), token)
