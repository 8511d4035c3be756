"""Router replay on its way: which experts a token went to travels, waits, is compared and comes back with the token."""

from __future__ import annotations

import msgspec

from scavenger.protocol.messages import Chunk, Chunks, Denied, Lease, Welcome
from scavenger.protocol.worker.events import Delta
from scavenger.protocol.worker.work import LeaseTable, TokenBuffer, Work
from scavenger.router.core.payloads import FLAT_BYTES, PayloadStore
from scavenger.router.core.runs import _open_fault
from scavenger.router.core.samples import chunk_fault
from tests.router.harness import SPEC, Bench, chunk_of, open_body
from tests.router.moves import W1, one_lease

WIDTH = 3


def routed(offset: int, n: int) -> bytes:
    return bytes(part for i in range(offset, offset + n) for part in (i, 100 + i, 200))


def with_routing(sample_id: int, epoch: int, offset: int, n: int) -> Chunk:
    return msgspec.structs.replace(chunk_of(sample_id, epoch, 1, offset, n), routing=routed(offset, n))


def leased() -> tuple[Bench, Lease]:
    bench, lease = one_lease()
    run = bench.sample(lease.sample_id).group.run
    run.engine = msgspec.structs.replace(run.engine, routing=WIDTH)
    return bench, lease


def test_a_chunk_without_its_routing_is_refused_and_so_is_one_with_another_width() -> None:
    bench, lease = leased()
    sample, worker = bench.sample(lease.sample_id), bench.router.core.by_conn[W1]
    whole = with_routing(lease.sample_id, lease.epoch, 0, 2)
    assert chunk_fault(whole, sample, worker) is None
    for routing in (b"", routed(0, 1), routed(0, 2) + b"x"):
        fault = chunk_fault(msgspec.structs.replace(whole, routing=routing), sample, worker)
        assert fault is not None
        assert fault.engine
        assert f"routing of {len(routing)} bytes, 3 a token are due" in fault.reason


def test_a_run_that_asks_for_no_routing_takes_none() -> None:
    bench, lease = one_lease()
    fault = chunk_fault(
        with_routing(lease.sample_id, lease.epoch, 0, 2),
        bench.sample(lease.sample_id),
        bench.router.core.by_conn[W1],
    )
    assert fault is not None
    assert "0 a token are due" in fault.reason


def test_what_is_new_of_a_resend_has_its_own_routing_and_a_differing_one_is_found() -> None:
    bench, lease = leased()
    store = bench.store
    bench.say(W1, _chunks(with_routing(lease.sample_id, lease.epoch, 0, 3)))
    bench.say(W1, _chunks(with_routing(lease.sample_id, lease.epoch, 1, 4)))
    assert bench.sample(lease.sample_id).accepted == 5
    assert store.take(lease.sample_id, 5)[3] == routed(0, 5)
    other = msgspec.structs.replace(
        with_routing(lease.sample_id, lease.epoch, 3, 2), routing=routed(3, 1) + b"\0\0\0"
    )
    bench.say(W1, _chunks(other))
    assert bench.sample(lease.sample_id).epoch > lease.epoch, "a resend that differs ends the lease"


def _chunks(*chunks: Chunk) -> Chunks:
    return Chunks(chunks)


def test_routing_is_evicted_and_comes_back_with_its_tokens() -> None:
    store = PayloadStore(0)
    store.append(1, 0, with_routing(1, 1, 0, 5))
    assert store.nbytes == FLAT_BYTES + 5 * (12 + WIDTH)
    whole = store.take(1, 5)
    store.durable(1, 2)
    store.trim()
    assert (store.start(1), store.nbytes) == (2, FLAT_BYTES + 3 * (12 + WIDTH))
    assert store.same(1, with_routing(1, 1, 3, 2), 2)
    assert not store.same(1, msgspec.structs.replace(with_routing(1, 1, 3, 2), routing=routed(0, 2)), 2)
    store.load(1, whole, 5)
    assert store.take(1, 5) == whole
    assert store.take(1, 4)[3] == routed(0, 4)
    store.check({1: (5, 2)})


def test_a_worker_keeps_routing_until_it_is_durable_and_sends_it_again() -> None:
    _, lease = one_lease()
    table = LeaseTable(TokenBuffer)
    held = table.take(lease)
    for offset, n in ((0, 2), (2, 3)):
        tokens = tuple(range(offset, offset + n))
        told = tuple(-1.0 for _ in tokens)
        held.extend(Delta(held.handle, tokens, told, told, routing=routed(offset, n)))
        table.changed(held)
    (first,) = table.chunks(3)
    assert (first.offset, first.routing) == (0, routed(0, 3))
    table.acked(held, 2)
    table.rewind()
    (again,) = table.chunks(99)
    assert (again.offset, again.routing) == (2, routed(2, 3))


def test_a_message_holds_fewer_tokens_where_each_has_more_bytes() -> None:
    work = Work(1200, 0.0)
    assert work._tokens_a_message() == 1200
    welcome = Welcome(1, 1, "r", msgspec.structs.replace(SPEC, routing=108), 1.0, 10.0, 10)
    work.welcomed(welcome, 0.0)
    assert work._tokens_a_message() == 120


def test_a_run_cannot_change_its_routing_half_way() -> None:
    bench, lease = leased()
    refusal = _open_fault(bench.sample(lease.sample_id).group.run, open_body())
    assert isinstance(refusal, Denied)
    assert "0 bytes a token for its experts, its samples have 3" in refusal.reason
