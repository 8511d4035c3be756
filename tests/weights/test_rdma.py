"""NIXL: a receiver reads the holder's memory, here over whatever UCX finds on this machine; without NIXL it takes TCP."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace

import pytest
import structlog

from scavenger.errors import ConfigError, WeightsError
from scavenger.protocol import keys, messages
from scavenger.weights import manifest as manifests
from scavenger.weights import pull, rdma
from scavenger.weights import source as source_module
from scavenger.weights.channel import SharedContext
from scavenger.weights.channel_rdma import RdmaChannel
from scavenger.weights.engine_store import Store
from scavenger.weights.manifest import Manifest
from scavenger.weights.memory import Buffer
from scavenger.weights.pull import Pull
from scavenger.weights.source import WeightServer
from scavenger.weights.transfer import TransferLimits
from tests.weights.test_shared_version import published, shared, sources

MISSING = "NIXL is not installed: pip install '.[nixl]' in a clone (its wheels are for Linux, and bring UCX)"
needs_nixl = pytest.mark.skipif(not rdma.installed(), reason=MISSING)


def version(nbytes: int = 1 << 20) -> tuple[Manifest, Buffer]:
    buffer = Buffer(nbytes)
    buffer.view[:] = os.urandom(nbytes)
    table = manifests.layout({"w": ("bfloat16", (nbytes // 2,))})
    return manifests.seal(1, table, manifests.hashes_of(buffer.view, 1 << 14), chunk_nbytes=1 << 14), buffer


@pytest.fixture
def source() -> Iterator[WeightServer]:
    with WeightServer(local=False, nixl=True) as made:
        yield made


def pulled(manifest: Manifest, *given: object, deadline_s: float = 20.0) -> Pull:
    work = Pull(manifest, keys.generate(), limits=TransferLimits(stall_s=2.0, backoff_s=0.01))
    work.offer(given)  # type: ignore[arg-type]
    asyncio.run(work.finish(deadline_s))
    return work


@needs_nixl
def test_every_byte_comes_by_nixl_and_is_checked(source: WeightServer) -> None:
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
    with WeightServer(local=False, nixl=True) as one, sources(manifest, blob) as others:
        given = published(manifest, blob, [one, *others[1:]])
        assert [address.nixl for address in given] == [True, False, False]
        assert pulled(manifest, *given).buffer.view == blob
        assert one.stats.parts == 0


@needs_nixl
def test_a_holder_that_dies_is_replaced_and_a_wrong_token_reaches_nothing(source: WeightServer) -> None:
    manifest, buffer = version()
    address = source.publish(manifest, buffer)
    wrong = type(address)(address.endpoint, "", bytes(32), "", True, True)
    with pytest.raises(WeightsError, match="not served here under this token"):
        pulled(manifest, wrong, deadline_s=1.0)
    channel = RdmaChannel.connect(address, manifest, 2.0)
    into = memoryview(bytearray(manifest.chunk_nbytes))
    channel.ask(3)
    assert channel.reply(into, lambda: None) is not None
    assert into == buffer.view[3 << 14 : 4 << 14]
    waiting = threading.Thread(target=source.close)
    waiting.start()
    waiting.join(10.0)
    channel.ask_have()
    with pytest.raises(OSError):
        channel.reply(into, lambda: None)
    channel.close()
    channel.end()
    with WeightServer(local=False) as other:
        assert pulled(manifest, address, other.publish(manifest, buffer)).buffer.view == buffer.view


def test_without_nixl_a_receiver_takes_tcp_and_says_so_and_a_publisher_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifest, buffer = version()

    def missing(*_: object) -> rdma.Agent:
        raise WeightsError("NIXL cannot be imported: not here", "install it")

    monkeypatch.setattr(rdma, "shared", missing)
    monkeypatch.setattr(pull, "_log", structlog.get_logger())
    with WeightServer(local=False) as plain:
        address = plain.publish(manifest, buffer)
        told = type(address)(address.endpoint, "", address.token, "", True, True)
        with structlog.testing.capture_logs() as logs:
            assert pulled(manifest, told).buffer.view == buffer.view
        assert {line["event"] for line in logs} == {"weights.no_nixl"}
    with pytest.raises(WeightsError, match="NIXL cannot be imported"):
        WeightServer(nixl=True)


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


class NixlFault(Exception):
    """NIXL's own exceptions are neither `OSError` nor one of ours."""


class StandIn:
    """In place of NIXL's agent, where NIXL is not installed: metadata and connecting work, no byte comes, and `broken` calls raise."""

    broken: frozenset[str] = frozenset()
    state = "PROC"

    def __init__(self, *_: object) -> None:
        self.calls: list[str] = []
        self.registered: set[int] = set()
        self.during: Callable[[], object] = lambda: None  # what a collector does within a registration

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.broken:
            raise NixlFault(f"{name}: NIXL_ERR_BACKEND")

    def register_memory(self, _pieces: object, _kind: str) -> int:
        self._call("register_memory")
        self.during()
        self.registered.add(len(self.calls))
        return len(self.calls)

    def deregister_memory(self, registered: int) -> None:
        self._call("deregister_memory")
        self.registered.remove(registered)

    def get_partial_agent_metadata(self, *_: object) -> bytes:
        return b"metadata"

    def add_remote_agent(self, _metadata: bytes) -> bytes:
        self._call("add_remote_agent")
        return b"peer"

    def get_xfer_descs(self, *_: object) -> str:
        return "descs"

    def initialize_xfer(self, *_: object) -> str:
        return "handle"

    def transfer(self, _handle: str) -> str:
        return self.state

    def check_xfer_state(self, _handle: str) -> str:
        return self.state

    def release_xfer_handle(self, _handle: str) -> None:
        self._call("release_xfer_handle")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> dict[str, rdma.Agent]:
    """This process's agents, with the stand-in for NIXL; what is known of it is its interface, not how it fails."""
    module = ModuleType("nixl._api")
    vars(module).update(nixl_agent=StandIn, nixl_agent_config=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "nixl", ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", module)
    agents = {role: rdma.Agent() for role in ("serve", "read")}
    monkeypatch.setattr(rdma, "shared", agents.__getitem__)
    monkeypatch.setattr(rdma, "installed", lambda: True)
    for owner in (pull, rdma):
        monkeypatch.setattr(owner, "_log", structlog.get_logger())
    return agents


@pytest.mark.parametrize(
    ("broken", "state", "reason"),
    [
        ({"register_memory"}, "PROC", "cannot use this process's memory: NixlFault"),
        ({"release_xfer_handle", "deregister_memory"}, "PROC", "no chunk for 0.2 s"),
        ({"release_xfer_handle"}, "DONE", "cannot be released"),
        (set(), "PROC", "no chunk for 0.2 s"),
        (set(), "ERR", "the transfer ended as ERR"),
    ],
)
def test_where_nixl_connects_and_then_carries_nothing_tcp_does_and_nixl_is_not_tried_again(
    stand_in: dict[str, rdma.Agent],
    monkeypatch: pytest.MonkeyPatch,
    broken: set[str],
    state: str,
    reason: str,
) -> None:
    """With a stand-in for NIXL's agent."""
    manifest, buffer = version()
    second, other = version()
    second = manifests.seal(2, second.tensors, second.chunk_hashes, chunk_nbytes=second.chunk_nbytes)
    reads: StandIn = stand_in["read"]._agent
    monkeypatch.setattr(reads, "broken", frozenset(broken))
    monkeypatch.setattr(reads, "state", state)
    store = Store(
        keys.generate(),
        lambda _s: None,
        lambda: "127.0.0.1",
        limits=TransferLimits(stall_s=0.2, backoff_s=0.01),
    )
    try:
        with WeightServer(local=False, nixl=True) as source, structlog.testing.capture_logs() as logs:
            address = source.publish(manifest, buffer)
            assert address.nixl
            assert (
                asyncio.run(store.get(manifest, messages.UseWeights(1, b"m", (address,)), 10.0)).view
                == buffer.view
            )
            assert source.stats.parts >= len(manifest.chunk_hashes)
            tried = len(reads.calls)
            assert tried
            later = source.publish(second, other)
            assert (
                asyncio.run(store.get(second, messages.UseWeights(2, b"m", (later,)), 10.0)).view
                == other.view
            )
            assert len(reads.calls) == tried, "NIXL was not used again"
    finally:
        store.close()
    told = [line["reason"] for line in logs if line["event"] == "weights.nixl_failed"]
    assert len(told) == 1
    assert reason in told[0]
    assert not reads.registered or "deregister_memory" in broken


def test_of_two_threads_with_which_nixl_fails_at_once_one_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = pull.FailedEndpoints()
    source = messages.WeightSource("tcp://127.0.0.1:1", "", bytes(32), "", True, True)
    one, other = (
        pull.ConnectionFactory(source, keys.generate(), SharedContext(), 1.0, failed) for _ in range(2)
    )
    told: list[str] = []

    def warning(event: str, **_: object) -> None:
        told.append(event)
        if len(told) == 1:
            other.nixl_failed("no chunk")  # while this thread reports

    monkeypatch.setattr(pull, "_log", SimpleNamespace(warning=warning))
    one.nixl_failed("no chunk")
    assert told == ["weights.nixl_failed"]


def test_memory_that_nixl_will_not_lend_is_told_and_goes_by_tcp(
    stand_in: dict[str, rdma.Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for NIXL's agent."""
    manifest, buffer = version()
    monkeypatch.setattr(stand_in["serve"]._agent, "broken", frozenset({"register_memory"}))
    monkeypatch.setattr(source_module, "_log", structlog.get_logger())
    store = Store(
        keys.generate(),
        lambda _s: None,
        lambda: "127.0.0.1",
        limits=TransferLimits(stall_s=0.2, backoff_s=0.01),
    )
    try:
        with WeightServer(local=False, nixl=True) as source, structlog.testing.capture_logs() as logs:
            address = source.publish(manifest, buffer)
            assert (
                asyncio.run(store.get(manifest, messages.UseWeights(1, b"m", (address,)), 10.0)).view
                == buffer.view
            )
            assert source.stats.failed
    finally:
        store.close()
    told = [line["reason"] for line in logs if line["event"] == "weights.nixl_not_exposed"]
    assert told
    assert "NIXL cannot lend this memory: NixlFault" in told[0]


def test_a_pull_that_ends_while_nixl_reads_says_nothing_against_nixl(stand_in: dict[str, rdma.Agent]) -> None:
    """With a stand-in for NIXL's agent."""
    manifest, buffer = version()
    with WeightServer(local=False, nixl=True) as source:
        work = Pull(manifest, keys.generate(), limits=TransferLimits(stall_s=30.0))
        address = source.publish(manifest, buffer)
        work.offer([address])
        with pytest.raises(WeightsError, match=r"not complete after 0\.3 s"):
            asyncio.run(work.finish(0.3))
    assert "release_xfer_handle" in stand_in["read"]._agent.calls
    assert address.endpoint not in work.no_nixl


def test_a_buffer_that_a_collector_ends_within_a_registration_is_deregistered_and_nobody_waits_for_ever(
    stand_in: dict[str, rdma.Agent],
) -> None:
    """With a stand-in for NIXL's agent."""
    agent = stand_in["serve"]
    nixl: StandIn = agent._agent
    buffers = [Buffer(10), Buffer(10)]
    agent.expose(buffers[0], [(0, 10)])
    nixl.during = lambda: (
        buffers.pop(0) and None
    )  # the last reference goes here, as with a cycle that is collected
    kept = buffers[1]
    done = threading.Thread(target=agent.expose, args=(kept, [(0, 10)]), daemon=True)
    done.start()
    done.join(5.0)
    assert not done.is_alive(), "it waits for its own lock"
    nixl.during = lambda: None
    agent.expose(kept, [(0, 10)])
    assert nixl.calls == ["register_memory", "register_memory", "deregister_memory"]
    assert len(nixl.registered) == 1
    del kept
    buffers.clear()
    assert not nixl.registered, (
        "memory that nobody uses is not kept from the system until a next version comes"
    )
