"""NIXL: a receiver reads the holder's memory, here over whatever UCX finds on this machine; without NIXL it takes TCP."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import pytest
import structlog

from scavenger import keys
from scavenger.errors import ConfigError, WeightsError
from scavenger.weights import manifest as manifests
from scavenger.weights import opener, rdma
from scavenger.weights.channel_rdma import RdmaChannel
from scavenger.weights.manifest import Manifest
from scavenger.weights.memory import Buffer
from scavenger.weights.pull import Pull
from scavenger.weights.source import WeightSource
from scavenger.weights.transfer import Limits
from tests.weights.test_shared_version import published, shared, sources

MISSING = "NIXL is not installed: pip install 'scavenger[nixl]' (its wheels are for Linux, and bring UCX)"
needs_nixl = pytest.mark.skipif(not rdma.installed(), reason=MISSING)


def version(nbytes: int = 1 << 20) -> tuple[Manifest, Buffer]:
    buffer = Buffer(nbytes)
    buffer.view[:] = os.urandom(nbytes)
    table = manifests.layout({"w": ("bfloat16", (nbytes // 2,))})
    return manifests.seal(1, table, manifests.hashes_of(buffer.view, 1 << 14), chunk_nbytes=1 << 14), buffer


@pytest.fixture
def source() -> Iterator[WeightSource]:
    with WeightSource(local=False, nixl=True) as made:
        yield made


def pulled(manifest: Manifest, *given: object, deadline_s: float = 20.0) -> Pull:
    work = Pull(manifest, keys.generate(), limits=Limits(stall_s=2.0, backoff_s=0.01))
    work.offer(given)  # type: ignore[arg-type]
    asyncio.run(work.finish(deadline_s))
    return work


@needs_nixl
def test_every_byte_comes_by_nixl_and_is_checked(source: WeightSource) -> None:
    manifest, buffer = version()
    address = source.publish(manifest, buffer)
    assert address.nixl
    assert pulled(manifest, address).buffer.view == buffer.view
    assert source.stats.parts == 0, "not one chunk was sent"
    buffer.view[5] = buffer.view[5] ^ 1
    with pytest.raises(WeightsError, match="does not have the manifest's hash"):
        pulled(manifest, address)


@needs_nixl
def test_ranks_are_read_by_nixl_too_and_only_where_they_have_something() -> None:
    manifest, blob = shared(1, ranks=3)
    with WeightSource(local=False, nixl=True) as one, sources(manifest, blob) as others:
        given = published(manifest, blob, [one, *others[1:]])
        assert [address.nixl for address in given] == [True, False, False]
        assert pulled(manifest, *given).buffer.view == blob
        assert one.stats.parts == 0


@needs_nixl
def test_a_holder_that_dies_is_replaced_and_a_wrong_token_reaches_nothing(source: WeightSource) -> None:
    manifest, buffer = version()
    address = source.publish(manifest, buffer)
    wrong = type(address)(address.endpoint, "", bytes(32), "", True, True)
    with pytest.raises(WeightsError, match="not served here under this token"):
        pulled(manifest, wrong, deadline_s=1.0)
    channel = RdmaChannel.connect(address, manifest, 2.0)
    into = memoryview(bytearray(manifest.chunk_nbytes))
    channel.ask(3)
    assert channel.answer(into, lambda: None) is not None
    assert into == buffer.view[3 << 14 : 4 << 14]
    waiting = threading.Thread(target=source.close)
    waiting.start()
    waiting.join(10.0)
    channel.ask_have()
    with pytest.raises(OSError):
        channel.answer(into, lambda: None)
    channel.close()
    channel.end()
    with WeightSource(local=False) as other:
        assert pulled(manifest, address, other.publish(manifest, buffer)).buffer.view == buffer.view


def test_without_nixl_a_receiver_takes_tcp_and_says_so_and_a_publisher_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, buffer = version()

    def missing(*_: object) -> rdma.Agent:
        raise WeightsError("NIXL cannot be imported: not here", "install it")

    monkeypatch.setattr(rdma, "shared", missing)
    monkeypatch.setattr(opener, "_log", structlog.get_logger())
    with WeightSource(local=False) as plain:
        address = plain.publish(manifest, buffer)
        told = type(address)(address.endpoint, "", address.token, "", True, True)
        with structlog.testing.capture_logs() as logs:
            assert pulled(manifest, told).buffer.view == buffer.view
        assert {line["event"] for line in logs} == {"weights.no_nixl"}
    with pytest.raises(WeightsError, match="NIXL cannot be imported"):
        WeightSource(nixl=True)


def test_nixl_and_encryption_exclude_each_other() -> None:
    from scavenger.config import RunConfig

    sections = {
        "run": {"name": "r", "steps": 1, "state_dir": "/s", "out_dir": "/o"},
        "model": {"path": "/m", "context_length": 24},
        "sampling": {"max_tokens": 8},
        "weights": {"nixl": True, "encrypt": True},
    }
    with pytest.raises((ConfigError, ValueError), match="set one of them"):
        RunConfig.model_validate(sections)
