"""Where tokens are: beside the core, within bounds; evicted and read back without a difference, and never compared or sent unread."""

from __future__ import annotations

import math

import msgspec
import pytest

from scavenger.protocol.messages import (
    Ack,
    Assign,
    Attach,
    Call,
    Chunk,
    Chunks,
    Goodbye,
    GroupDone,
    Held,
    Revoke,
    pack_logprobs,
    pack_tokens,
)
from scavenger.router.core import samples
from scavenger.router.core.events import Fill, TrainerCalled, WorkerSent
from scavenger.router.core.payloads import FLAT_BYTES, ColdPayload, PayloadStore, fill_group, fill_leases
from scavenger.router.edge import pipeline
from scavenger.router.edge.pipeline import payload_faults
from tests.router import schedule
from tests.router.harness import OWNER, chunk_of, payload, root, specs
from tests.router.moves import W1, W2, consumed_step, one_lease

# ---------------------------------------------------------------- the store


def stored(bound: int, *chunks: Chunk) -> PayloadStore:
    store = PayloadStore(bound)
    for chunk in chunks:
        store.append(chunk.sample_id, chunk.offset, chunk)
    return store


def test_what_is_not_durable_is_never_evicted() -> None:
    store = stored(0, chunk_of(1, 1, 1, 0, 4), chunk_of(1, 1, 1, 4, 4))
    store.trim()
    assert store.take(1, 8) == payload(1, 0, 8)
    store.durable(1, 4)
    assert (store.start(1), store.evictions, store.nbytes) == (4, 1, FLAT_BYTES + 4 * 12)
    assert store.same(1, chunk_of(1, 1, 1, 4, 4), 4)
    store.durable(1, 8)
    assert (store.start(1), store.nbytes) == (None, 0)


def test_the_bound_holds_and_the_longest_untouched_go_first() -> None:
    bound = 3 * (FLAT_BYTES + 96)
    store = PayloadStore(bound)
    for sample_id in (1, 2, 3):
        store.append(sample_id, 0, chunk_of(sample_id, 1, 1, 0, 8))
        store.durable(sample_id, 8)
    store.append(1, 8, chunk_of(1, 1, 1, 8, 1))
    store.durable(1, 9)  # touched: 2 is the oldest now
    assert [store.start(i) for i in (1, 2, 3)] == [0, None, 0]
    assert store.nbytes <= bound
    store.cool([1])
    store.append(4, 0, chunk_of(4, 1, 1, 0, 8))
    store.durable(4, 8)
    assert [store.start(i) for i in (1, 3, 4)] == [None, 0, 0], (
        "what was delivered goes before what is in flight"
    )


def test_a_payload_that_was_read_back_joins_with_what_came_since() -> None:
    store = stored(0, chunk_of(1, 1, 1, 0, 5))
    store.durable(1, 5)
    store.append(1, 5, chunk_of(1, 1, 1, 5, 2))
    assert not store.has(1, 7)
    store.load(1, payload(1, 0, 5), 7)
    assert store.take(1, 7) == payload(1, 0, 7)
    assert store.same(1, chunk_of(1, 1, 1, 3, 4), 4)
    store.trim()
    assert store.start(1) == 5


def test_a_payload_that_was_overtaken_while_it_was_read_is_not_loaded() -> None:
    """Read at 5 tokens; then three more were accepted, committed and evicted: there would be a gap."""
    store = stored(0, chunk_of(1, 1, 1, 0, 8))
    store.durable(1, 8)
    store.load(1, payload(1, 0, 5), 8)
    assert store.start(1) is None
    store.append(1, 8, chunk_of(1, 1, 1, 8, 2))
    store.load(1, payload(1, 0, 5), 10)
    assert store.start(1) == 8


def test_tokens_that_are_not_in_memory_are_neither_compared_nor_sent() -> None:
    store = stored(0, chunk_of(1, 1, 1, 0, 4))
    store.durable(1, 4)
    with pytest.raises(ColdPayload, match="sample 1: tokens from 0 on are to be compared"):
        store.same(1, chunk_of(1, 1, 1, 0, 4), 4)
    with pytest.raises(ColdPayload, match="sample 1: its first 4 tokens are to be sent"):
        store.take(1, 4)


def test_a_chunk_that_leaves_a_gap_in_memory_is_a_bug() -> None:
    store = stored(1000, chunk_of(1, 1, 1, 0, 4))
    with pytest.raises(AssertionError, match="kept up to 4, a chunk was accepted at 5"):
        store.append(1, 5, chunk_of(1, 1, 1, 5, 1))


def test_a_dropped_sample_takes_no_memory() -> None:
    store = stored(10_000, chunk_of(1, 1, 1, 0, 4))
    store.durable(1, 4)
    store.drop(1)
    store.drop(1)
    store.durable(1, 4)
    assert (store.nbytes, store.start(1)) == (0, None)


def test_messages_are_filled_with_as_many_tokens_as_the_core_said() -> None:
    store = stored(10_000, chunk_of(1, 1, 1, 0, 6))
    bench, lease = one_lease()
    (with_tokens,) = fill_leases(Assign((lease,)), (4,), store)
    assert with_tokens == msgspec.structs.replace(lease, accepted=payload(1, 0, 4)[0])
    bench.chunk(W1, lease, 0, 8, "length")
    (done,) = bench.take(1, GroupDone)
    (again,) = fill_group(done, (3,), store).samples
    assert (again.tokens, again.logprobs, again.raw_logprobs, again.routing) == payload(1, 0, 3)


# ---------------------------------------------------------------- eviction and the core


def test_a_moved_sample_whose_tokens_were_evicted_goes_with_all_of_them() -> None:
    bench, lease = one_lease()
    bench.payload_bytes = bench.store.bound = 0
    bench.chunk(W1, lease, 0, 5)
    assert bench.store.start(1) is None
    bench.join(W2)
    bench.say(W1, Goodbye("SIGTERM", True))
    (moved,) = bench.leases(W2)
    assert moved.accepted == payload(1, 0, 5)[0]
    assert bench.read_back == 1


@pytest.mark.parametrize("restarted", [False, True])
def test_a_group_whose_tokens_are_in_the_ledger_only_is_delivered_whole(restarted: bool) -> None:
    bench, lease = one_lease()
    bench.store.bound = bench.payload_bytes = 0
    bench.chunk(W1, lease, 0, 5)
    bench.chunk(W1, lease, 5, 3, "length")
    if restarted:
        bench.restart()
        bench.attach(wants=(1,))
    bench.attach(wants=(1,), conn=3)
    (done,) = bench.take(3, GroupDone)
    assert (done.samples[0].tokens, done.samples[0].logprobs, done.samples[0].raw_logprobs, b"") == payload(
        1, 0, 8
    )
    assert bench.read_back >= 1
    assert bench.store.nbytes == 0, "not kept after it was sent"


def test_a_replay_delivers_what_the_ledger_has() -> None:
    bench = consumed_step()
    bench.restart()
    bench.open(resume_step=0)
    bench.publish(2, root_of=1)
    bench.submit(version=2)
    (done,) = bench.take(1, GroupDone)
    assert [(s.tokens, s.logprobs, s.raw_logprobs, s.routing) for s in done.samples] == [
        payload(1, 0, 8),
        payload(2, 0, 8),
    ]
    assert bench.read_back == 2


def test_an_exact_resend_of_evicted_tokens_is_a_no_op_that_is_acked() -> None:
    bench, lease = one_lease()
    bench.store.bound = 0
    bench.chunk(W1, lease, 0, 3)
    bench.take(W1, Ack)
    bench.chunk(W1, lease, 0, 3)
    assert bench.read_back == 1
    assert bench.take(W1, Ack) == [Ack((Held(1, 1, 3),))]
    assert bench.events("resend_differs") == []
    bench.chunk(W1, lease, 1, 5)
    assert bench.sample(1).accepted == 6
    assert bench.ledger.samples[1].tokens == payload(1, 0, 6)[0]


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("field", ["tokens", "logprobs", "raw_logprobs"])
def test_a_differing_resend_of_evicted_tokens_ends_the_lease(field: str, restarted: bool) -> None:
    bench, lease = one_lease()
    bench.store.bound = bench.payload_bytes = 0
    bench.chunk(W1, lease, 0, 3)
    if restarted:
        bench.restart()
        bench.hello(W1, held=(Held(1, 1, 3),), loaded=1, loaded_root=root(1))
    bench.say(W1, Chunks((msgspec.structs.replace(chunk_of(1, 1, 1, 0, 2), **{field: b"\x00" * 8}),)))
    assert bench.read_back == 2, "to be compared, and to be leased anew"
    assert len(bench.events("resend_differs")) == 1
    assert (1, 1) in bench.take(W1, Revoke)[0].leases
    assert bench.sample(1).failures == 1


def test_a_resend_by_who_does_not_hold_the_lease_reads_nothing() -> None:
    bench, lease = one_lease()
    bench.store.bound = 0
    bench.chunk(W1, lease, 0, 3)
    bench.join(W2)
    bench.chunk(W2, lease, 0, 3)
    bench.say(W1, Chunks((chunk_of(1, 9, 1, 0, 2),)))
    assert bench.read_back == 0
    assert len(bench.events("chunk_refused")) == 2


def test_a_message_for_samples_that_were_forgotten_is_dropped() -> None:
    bench, lease = one_lease()
    bench.store.bound = 0
    bench.chunk(W1, lease, 0, 8, "length")
    bench.auto = False
    call = Call(99, "r", 1, Attach("r", (), (1,)))
    bench.router.handle(TrainerCalled(5, OWNER, call), bench.now)
    bench.router.core.committed(10**9)
    found = [a for a in bench.router.core.finish_event() if isinstance(a, Fill)]
    assert [a.lengths for a in found] == [(8,)]
    assert pipeline.lacking_message(bench.router.core, bench.store, found[0]) == {1: 8}
    samples.supersede(bench.router.core, bench.router.core.groups[1], "another attempt")
    assert pipeline.lacking_message(bench.router.core, bench.store, found[0]) == {}
    assert pipeline.filled(bench.store, found[0]) is None


def test_of_many_leases_only_those_of_forgotten_samples_are_left_out() -> None:
    """Two samples move in one message while their tokens are read; one of the two is superseded meanwhile."""
    bench, lease = one_lease()
    bench.submit(step=2, groups=specs(1, 1))
    (other,) = bench.leases(W1)
    bench.store.bound = 0
    for x in (lease, other):
        bench.chunk(W1, x, 0, 5)
    moved = Fill(W2, Assign((lease, other)), (5, 5))
    core, store = bench.router.core, bench.store
    assert pipeline.lacking_message(core, store, moved) == {1: 5, other.sample_id: 5}
    samples.supersede(core, core.groups[1], "another attempt")
    assert pipeline.lacking_message(core, store, moved) == {other.sample_id: 5}, (
        "what was forgotten is not read"
    )
    bench._load({other.sample_id: 5})
    assert pipeline.lacking_message(core, store, moved) == {}
    message = pipeline.filled(store, moved)
    assert isinstance(message, Assign)
    assert [(x.sample_id, x.accepted) for x in message.leases] == [
        (other.sample_id, payload(other.sample_id, 0, 5)[0])
    ]


# ---------------------------------------------------------------- values


def test_faults_are_found_at_their_places_among_sound_chunks() -> None:
    good = [chunk_of(i, 1, 1, 0, 4) for i in range(6)]
    assert payload_faults(good) is None
    assert payload_faults([]) is None
    bad = list(good)
    bad[1] = msgspec.structs.replace(good[1], logprobs=pack_logprobs([-1.0, math.nan, -1.0, -1.0]))
    bad[2] = msgspec.structs.replace(good[2], tokens=pack_tokens([1, 2, 3, -4]))
    bad[4] = msgspec.structs.replace(good[4], raw_logprobs=pack_logprobs([0.5, -1.0, -1.0, -math.inf]))
    bad[5] = msgspec.structs.replace(good[5], raw_logprobs=pack_logprobs([0.5, -1.0, -1.0, -1.0]))
    assert payload_faults(bad) == {
        1: "logprobs that are not finite",
        2: "a negative token id",
        4: "logprobs that are not finite",
        5: "a positive logprob",
    }


@pytest.mark.parametrize("lengths", [(7, 9), (5, 3), (6, 6)])
def test_chunks_of_odd_lengths_hide_no_fault_between_them(lengths: tuple[int, int]) -> None:
    """Joined, these would be whole again, and what stands between them would be read at the wrong place."""
    first, last = lengths
    odd = [msgspec.structs.replace(chunk_of(1, 1, 1, 0, 2), tokens=b"\x01" * n) for n in (first, last)]
    negative = msgspec.structs.replace(chunk_of(2, 1, 1, 0, 1), tokens=pack_tokens([-256]))
    assert payload_faults([odd[0], negative, odd[1]]) == {1: "a negative token id"}


def test_a_logprob_that_rounding_made_positive_is_sound() -> None:
    assert (
        payload_faults(
            [msgspec.structs.replace(chunk_of(1, 1, 1, 0, 2), logprobs=pack_logprobs([0.0, 1e-7]))]
        )
        is None
    )


def test_a_fault_refuses_its_chunk_and_no_other_of_the_message() -> None:
    bench, _ = one_lease()
    bench.submit(step=2, groups=specs(1, 1))
    (other,) = bench.leases(W1)
    bad = msgspec.structs.replace(chunk_of(1, 1, 1, 0, 2), logprobs=pack_logprobs([-1.0, math.nan]))
    bench.say(W1, Chunks((bad, chunk_of(other.sample_id, 1, 1, 0, 2))))
    assert (bench.sample(1).accepted, bench.sample(other.sample_id).accepted) == (0, 2)
    assert bench.sample(1).failures == 1
    assert [e.reason for e in bench.events("chunk_refused")] == ["logprobs that are not finite"]


def test_lengths_leases_and_budgets_come_before_values() -> None:
    """A late chunk is refused as late, whatever is in it: it is no engine's fault."""
    bench, _ = one_lease()
    bench.handle(WorkerSent(W1, Chunks((chunk_of(1, 9, 1, 0, 2),)), {0: "a positive logprob"}))
    assert [e.reason for e in bench.events("chunk_refused")] == ["stale epoch 9, the lease is 1"]
    assert bench.sample(1).failures == 0


# ---------------------------------------------------------------- the schedules see it (and bugs of the store: `plants`)


def test_the_bench_would_see_a_resend_that_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unchecked resend: the schedules' workers hardly lie in one of evicted tokens."""
    monkeypatch.setattr(PayloadStore, "same", lambda *_: True)
    with pytest.raises(AssertionError):
        test_a_differing_resend_of_evicted_tokens_ends_the_lease("tokens", False)


def test_the_schedules_evict_and_read_back() -> None:
    assert sum(schedule.run(seed, 200).daemon.read_back for seed in range(10)) > 100
