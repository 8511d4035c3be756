"""Pulling a version over real sockets: complete and verified, or an error with its reason."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import pytest
import zmq

from scavenger import keys, wire
from scavenger.errors import WeightsError
from scavenger.weights import manifest as manifests
from scavenger.weights.manifest import Manifest
from scavenger.weights.protocol import TOKEN_NBYTES, Get, NoSuch, decode_answer, encode
from scavenger.weights.pull import pull
from scavenger.weights.source import SEND_QUEUE, WeightSource
from scavenger.weights.transfer import Limits

QUICK = Limits(window=4, stall_s=0.3, backoff_s=0.01, backoff_max_s=0.05)
ME = keys.generate()


def version(number: int, nbytes: int = 300_000, chunk_nbytes: int = 4096) -> tuple[Manifest, bytearray]:
    data = os.urandom(nbytes // 8 * 8)
    half = len(data) // 8 * 4
    tensors = {
        "a": ("float32", (half // 4,), memoryview(data)[:half]),
        "b": ("bfloat16", ((len(data) - half) // 2,), memoryview(data)[half:]),
    }
    return manifests.build(number, tensors, chunk_nbytes=chunk_nbytes)


@pytest.fixture
def source() -> Iterator[WeightSource]:
    with WeightSource() as made:
        yield made


def get(manifest: Manifest, *sources: wire.WeightSource, deadline_s: float = 10.0, limits: Limits = QUICK) -> bytearray:
    return asyncio.run(pull(manifest, sources, ME, deadline_s, limits=limits))


def test_a_pulled_version_is_the_published_one(source: WeightSource) -> None:
    manifest, blob = version(1)
    assert get(manifest, source.publish(manifest, blob)) == blob
    assert source.stats.parts == len(manifest.chunk_hashes)


def test_a_version_without_bytes_needs_no_source() -> None:
    manifest, _ = manifests.build(1, {})
    assert get(manifest) == bytearray()


def test_several_receivers_pull_at_once(source: WeightSource) -> None:
    manifest, blob = version(1)
    address = source.publish(manifest, blob)

    async def all_of_them() -> list[bytearray]:
        return await asyncio.gather(*(pull(manifest, [address], keys.generate(), 10.0) for _ in range(5)))

    assert asyncio.run(all_of_them()) == [blob] * 5


def test_an_older_version_is_served_until_two_newer_ones_are_published(source: WeightSource) -> None:
    published = [(m, b, source.publish(m, b)) for m, b in (version(1), version(2))]
    for manifest, blob, address in published:
        assert get(manifest, address) == blob
    source.publish(*version(3))
    with pytest.raises(WeightsError, match="not served here"):
        get(published[0][0], published[0][2])
    assert get(published[1][0], published[1][2]) == published[1][1]


def test_a_retired_version_is_refused(source: WeightSource) -> None:
    manifest, blob = version(1)
    address = source.publish(manifest, blob)
    source.retire(1)
    with pytest.raises(WeightsError, match="version 1 is not served here"):
        get(manifest, address)


def test_a_wrong_token_is_refused(source: WeightSource) -> None:
    manifest, blob = version(1)
    address = source.publish(manifest, blob)
    with pytest.raises(WeightsError, match="under this token"):
        get(manifest, wire.WeightSource(address.endpoint, address.server_key, bytes(TOKEN_NBYTES)))
    assert source.stats.parts == 0
    assert source.stats.refused > 0


def test_publishing_a_version_again_needs_the_same_weights(source: WeightSource) -> None:
    manifest, blob = version(1)
    assert source.publish(manifest, blob) == source.publish(manifest, blob)
    with pytest.raises(WeightsError, match="published with other weights"):
        source.publish(*version(1))


def test_a_flipped_byte_is_never_returned(source: WeightSource) -> None:
    manifest, blob = version(1)
    rotten = bytearray(blob)
    rotten[100_000] ^= 1
    with pytest.raises(WeightsError, match="does not have the manifest's hash"):
        get(manifest, source.publish(manifest, rotten))


def test_a_source_with_a_flipped_byte_is_outvoted_by_an_honest_one(source: WeightSource) -> None:
    manifest, blob = version(1)
    rotten = bytearray(blob)
    for i in range(0, len(rotten), 5000):
        rotten[i] ^= 1
    with WeightSource() as liar:
        assert get(manifest, liar.publish(manifest, rotten), source.publish(manifest, blob)) == blob


def test_nobody_listening_is_an_error_at_the_deadline(source: WeightSource) -> None:
    manifest, blob = version(1)
    address = source.publish(manifest, blob)
    source.close()
    with pytest.raises(WeightsError, match=r"not complete after 1 s: 0 of \d+ chunks"):
        get(manifest, address, deadline_s=1.0)


def test_a_source_that_cannot_be_addressed_does_not_stop_the_others(source: WeightSource) -> None:
    manifest, blob = version(1)
    address = source.publish(manifest, blob)
    assert get(manifest, wire.WeightSource("tcp://", address.server_key, address.token), address) == blob


def test_an_interface_that_this_host_does_not_have_is_refused_with_the_key_to_set() -> None:
    for listen in ("192.0.2.1", "no such host"):
        with pytest.raises(WeightsError, match=r"set weights\.listen"):
            WeightSource(listen)


class Faulty:
    """A source that serves `parts` chunks and then is silent, closing its socket or not."""

    def __init__(self, blob: bytes | bytearray, manifest: Manifest, parts: int, *, close: bool) -> None:
        self._blob, self._manifest, self._parts, self._close = blob, manifest, parts, close
        self.served = threading.Event()
        public, secret = zmq.curve_keypair()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.CURVE_SERVER, 1)
        self._router.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.RCVTIMEO, 5000)
        port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self.address = wire.WeightSource(f"tcp://127.0.0.1:{port}", public.decode(), bytes(TOKEN_NBYTES))
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        from scavenger.weights.protocol import Part, decode_request

        for _ in range(self._parts):
            peer, frame = self._router.recv_multipart()
            request = decode_request(frame)
            start, stop = self._manifest.chunk_range(request.chunk)
            self._router.send_multipart([peer, encode(Part(request.version, request.chunk)), bytes(self._blob[start:stop])])
        self.served.set()
        if not self._close:
            self._done.wait(20)
        self._router.close(linger=200)
        self._context.term()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()


@pytest.mark.parametrize("close", [True, False], ids=["killed", "silent"])
def test_a_source_lost_midway_is_replaced_by_another(source: WeightSource, close: bool) -> None:
    manifest, blob = version(1)
    lost = Faulty(blob, manifest, 10, close=close)
    try:
        assert get(manifest, lost.address, source.publish(manifest, blob)) == blob
    finally:
        lost.stop()


def test_a_source_lost_midway_without_another_is_an_error_that_counts(source: WeightSource) -> None:
    manifest, blob = version(1)
    lost = Faulty(blob, manifest, 10, close=True)
    try:
        with pytest.raises(WeightsError, match=rf"10 of {len(manifest.chunk_hashes)} chunks arrived"):
            get(manifest, lost.address, deadline_s=1.5)
    finally:
        lost.stop()


def test_garbage_is_counted_and_a_stalled_receiver_holds_nobody_up(source: WeightSource) -> None:
    manifest, blob = version(1, nbytes=1 << 22, chunk_nbytes=1 << 16)
    address = source.publish(manifest, blob)
    context = zmq.Context()
    staller = context.socket(zmq.DEALER)
    staller.curve_serverkey = address.server_key.encode()
    staller.curve_publickey, staller.curve_secretkey = ME.public.encode(), ME.secret.encode()
    staller.setsockopt(zmq.RCVHWM, 1)
    staller.setsockopt(zmq.RCVBUF, 4096)
    staller.linger = 0
    staller.connect(address.endpoint)
    try:
        staller.send(b"not a request")
        staller.send_multipart([b"two", b"frames"])
        for _ in range(20):  # asks for 80 MB and reads none of it
            for chunk in range(len(manifest.chunk_hashes)):
                staller.send(encode(Get(1, address.token, chunk)))
        assert get(manifest, address) == blob
        stats = source.stats
        assert stats.malformed == 2
        assert stats.dropped > 0
        # What was queued for it, and what the kernel took, is all it could ever make us hold.
        assert stats.parts - len(manifest.chunk_hashes) < 20 * len(manifest.chunk_hashes)
        assert SEND_QUEUE * manifest.chunk_nbytes < 1 << 24
    finally:
        staller.close()
        context.term()


def test_a_chunk_outside_the_version_is_refused(source: WeightSource) -> None:
    manifest, blob = version(1)
    address = source.publish(manifest, blob)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.curve_serverkey = address.server_key.encode()
    socket.curve_publickey, socket.curve_secretkey = ME.public.encode(), ME.secret.encode()
    socket.linger, socket.rcvtimeo = 0, 5000
    socket.connect(address.endpoint)
    try:
        for chunk in (-1, len(manifest.chunk_hashes)):
            socket.send(encode(Get(1, address.token, chunk)))
            assert decode_answer(socket.recv()) == NoSuch(1, chunk, "the version has no such chunk")
    finally:
        socket.close()
        context.term()
