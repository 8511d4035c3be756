"""What an engine is sent of its samples' siblings on other engines: deltas, behind its leases, within the bound, and nothing else."""

from __future__ import annotations

import msgspec
import pytest

from scavenger.errors import WireError
from scavenger.protocol.messages import (
    KEEP_SIBLINGS_S,
    MAX_SIBLING_TOKENS,
    Goodbye,
    Heartbeat,
    SampleFailed,
    SiblingTokens,
    WeightsLoaded,
    decode_to_worker,
    encode,
    pack_tokens,
    squeeze_tokens,
    unpack_tokens,
    unsqueeze_tokens,
)
from scavenger.protocol.messages import Held as HeldLease
from scavenger.router.core import siblings
from scavenger.router.core.siblings import SiblingBacklog
from scavenger.router.core.state import RouterLimits
from tests.router.harness import SPEC, Bench, open_body, root, specs, token
from tests.router.moves import W1, W2

W3 = W2 + 1
#: (sample, offset, its tokens) of all pieces that came.
Told = list[tuple[int, int, tuple[int, ...]]]


def begun(
    bytes_per_s: float = 4000.0,
    *,
    speculation: str = "group",
    prompts: int = 1,
    n: int = 8,
    max_tokens: int = 64,
) -> Bench:
    """A run with a step of `prompts` groups, whose engines hold four samples each."""
    bench = Bench(limits=RouterLimits(sibling_bytes_per_s=bytes_per_s), payload_bytes=1 << 20)
    engine = msgspec.structs.replace(SPEC, speculation=speculation, context_length=100_000)
    bench.call(msgspec.structs.replace(open_body(), engine=engine))
    bench.attempt += 1
    bench.publish()
    bench.submit(groups=specs(prompts, n, max_tokens))
    return bench


def told(bench: Bench, conn: int) -> Told:
    found: Told = []
    for message in bench.take(conn, SiblingTokens):
        count = sum(piece.count for piece in message.pieces)
        tokens, at = unpack_tokens(unsqueeze_tokens(message.tokens, count)), 0
        for piece in message.pieces:
            found.append((piece.sample_id, piece.offset, tokens[at : at + piece.count]))
            at += piece.count
    return found


def truth(sample_id: int, start: int, end: int) -> tuple[int, ...]:
    return tuple(token(sample_id, i) for i in range(start, end))


def heard(bench: Bench, *conns: int, seconds: float = 0.25) -> None:
    """Time passes, and these workers are heard of."""
    for conn in conns:
        bench.say(conn, Heartbeat((), 1, 1))
    bench.tick(seconds)


def test_an_engine_gets_what_its_samples_siblings_say_elsewhere_once() -> None:
    bench = begun()
    first, second = bench.join(W1), bench.join(W2)
    assert len(first) == len(second) == 4
    bench.chunk(W1, first[0], 0, 3)
    bench.tick(0.25)
    assert told(bench, W2) == [(first[0].sample_id, 0, truth(first[0].sample_id, 0, 3))]
    assert told(bench, W1) == [], "its own samples it has"
    bench.chunk(W1, first[0], 3, 2)
    bench.chunk(W1, first[0], 5, 1)
    bench.chunk(W2, second[1], 0, 2)
    bench.tick(0.25)
    assert told(bench, W2) == [(first[0].sample_id, 3, truth(first[0].sample_id, 3, 6))]
    assert told(bench, W1) == [(second[1].sample_id, 0, truth(second[1].sample_id, 0, 2))]
    bench.tick(1.0)
    assert told(bench, W1) == told(bench, W2) == []


def test_what_an_engine_had_of_a_group_is_not_remembered_for_longer_than_it_counts() -> None:
    bench = begun(prompts=4, n=1)
    for lease in bench.join(W1):
        bench.chunk(W1, lease, 0, 3, finish="stop")
        heard(bench, W1, seconds=KEEP_SIBLINGS_S)
    [worker] = bench.router.core.workers.values()
    assert len(worker.backlog.left) == 1


@pytest.mark.parametrize("off", ["speculation", "rate"])
def test_nothing_is_sent_where_it_is_off(off: str) -> None:
    bench = begun(0.0 if off == "rate" else 4000.0, speculation="none" if off == "speculation" else "group")
    first = bench.join(W1)
    bench.join(W2)
    bench.chunk(W1, first[0], 0, 3)
    bench.tick(1.0)
    assert told(bench, W2) == []
    assert all(not worker.backlog.ranges for worker in bench.router.core.workers.values())


def test_an_engine_without_a_live_sample_of_the_group_gets_nothing() -> None:
    bench = begun(prompts=2, n=4)
    first, second = bench.join(W1), bench.join(W2)
    assert {x.key.prompt for x in first} != {x.key.prompt for x in second}
    groups = {x.key.prompt for x in second}
    alone = next((x for x in first if x.key.prompt not in groups), None)
    for lease in first:
        bench.chunk(W1, lease, 0, 3)
    bench.tick(1.0)
    assert {bench.sample(i).group.prompt_index for i, _, _ in told(bench, W2)} <= groups
    assert alone is None or not bench.sample(alone.sample_id).group.holders.get(2)


def test_the_siblings_of_a_moved_sample_follow_it_those_that_are_finished_too() -> None:
    bench = begun(n=8)
    first, second = bench.join(W1), bench.join(W2)
    bench.join(W3)
    bench.chunk(W1, first[0], 0, 64, "length")
    bench.chunk(W1, first[1], 0, 7)
    bench.chunk(W2, second[0], 0, 5)
    bench.tick(0.25)
    assert told(bench, W3) == []
    bench.say(W1, Goodbye("SIGTERM", notice=True))
    moved = bench.leases(W3)
    assert {x.sample_id for x in moved} == {x.sample_id for x in first[1:]}
    bench.tick(0.25)
    assert sorted(told(bench, W3)) == [
        (first[0].sample_id, 0, truth(first[0].sample_id, 0, 64)),
        (second[0].sample_id, 0, truth(second[0].sample_id, 0, 5)),
    ]
    bench.chunk(W3, moved[0], len(moved[0].accepted) // 4, 2)
    bench.tick(0.25)
    assert told(bench, W3) == []


@pytest.mark.parametrize(("away_s", "start"), [(1.0, 7), (KEEP_SIBLINGS_S, 0)])
def test_an_engine_whose_last_sample_of_a_group_just_left_is_sent_what_it_lacks(
    away_s: float, start: int
) -> None:
    """As when it loads new weights; later it has forgotten, and is sent all."""
    bench = begun(n=5)
    first = bench.join(W1)
    (own,) = bench.join(W2)
    bench.chunk(W1, first[0], 0, 7)
    heard(bench, W1, W2)
    assert told(bench, W2) == [(first[0].sample_id, 0, truth(first[0].sample_id, 0, 7))]
    bench.chunk(W2, own, 0, 64, "length")
    bench.chunk(W1, first[0], 7, 2)
    for _ in range(int(away_s)):
        heard(bench, W1, W2, seconds=1.0)
    assert told(bench, W2) == []
    bench.say(W1, SampleFailed(first[1].sample_id, first[1].epoch, "no memory"))
    assert [lease.sample_id for lease in bench.leases(W2)] == [first[1].sample_id]
    heard(bench, W1, W2)
    found = {sample_id: (at, at + len(tokens)) for sample_id, at, tokens in told(bench, W2)}
    assert found.pop(own.sample_id, None) == (None if start else (0, 64))
    assert found == {first[0].sample_id: (start, 9)}


def test_tokens_stand_behind_the_lease_that_asks_for_them() -> None:
    """Its commit is late: what was said before it is not sent first, for the worker would drop it."""
    bench = begun(n=5)
    first = bench.join(W1)
    for lease in first:
        bench.chunk(W1, lease, 0, 3)
    bench.auto = False
    bench.hello(W2)
    bench.commit()
    bench.say(W2, WeightsLoaded(1, root(1)))
    bench.tick(0.5)
    assert told(bench, W2) == []
    assert bench.leases(W2) == []
    bench.commit()
    kinds = [type(m).__name__ for m in bench.mail[W2] if type(m).__name__ in ("Assign", "SiblingTokens")]
    assert kinds[:1] == ["Assign"]
    assert "SiblingTokens" in kinds


def test_no_more_is_sent_than_the_bound_says() -> None:
    bench = begun(bytes_per_s=400.0, n=8, max_tokens=4000)  # 100 tokens a second
    first = bench.join(W1)
    bench.join(W2)
    bench.tick(0.0)
    counts = []
    for second in range(6):
        for lease in first:
            bench.chunk(W1, lease, 60 * second, 60)
        heard(bench, W1, W2, seconds=1.0)
        counts.append(sum(len(tokens) for _, _, tokens in told(bench, W2)))
    assert counts[0] <= 200, "what one second may carry at once, and that second's"
    assert all(90 <= count <= 110 for count in counts[1:])
    backlog = bench.router.core.workers[bench.router.core.by_conn[W2].id].backlog
    assert backlog.tokens <= siblings.most_waiting(bench.router.core) == 400
    assert bench.router.core.counters["sibling_tokens_dropped"] > 0


def test_what_came_first_is_dropped_first() -> None:
    backlog = SiblingBacklog()
    assert backlog.note(1, 0, 4, 10) == 0
    assert backlog.note(2, 0, 4, 10) == 0
    assert backlog.note(1, 4, 7, 10) == 1
    assert dict(backlog.ranges) == {1: (1, 7), 2: (0, 4)}
    assert backlog.note(3, 5, 15, 10) == 10
    assert dict(backlog.ranges) == {3: (5, 15)}
    assert backlog.note(4, 0, 25, 10) == 25
    assert dict(backlog.ranges) == {4: (15, 25)}
    assert backlog.tokens == 10


def test_an_engine_that_says_nothing_is_sent_nothing() -> None:
    """Its queue would fill with drafts, and real messages would be dropped."""
    bench = begun(n=8, max_tokens=4000)
    first = bench.join(W1)
    bench.join(W2)
    bench.tick(3.0)
    bench.chunk(W1, first[0], 0, 3)
    bench.tick(0.25)
    assert told(bench, W2) == []
    heard(bench, W2)
    assert told(bench, W2) == [(first[0].sample_id, 0, truth(first[0].sample_id, 0, 3))]


def test_after_a_restart_what_is_sent_is_right_or_absent() -> None:
    bench = begun(n=8)
    first, second = bench.join(W1, session="a"), bench.join(W2, session="b")
    bench.chunk(W1, first[0], 0, 3)
    bench.restart()
    bench.attach()
    for conn, session, leases in ((W1 + 50, "a", first), (W2 + 50, "b", second)):
        held = tuple(
            HeldLease(x.sample_id, x.epoch, 3 if x.sample_id == first[0].sample_id else 0) for x in leases
        )
        old = conn - 50
        bench.hello(conn, session=session, intent=f"job{old}", node=f"n{old}", held=held, loaded=1)
    bench.tick(0.25)
    assert told(bench, W2 + 50) == []
    bench.chunk(W1 + 50, first[0], 3, 2)
    bench.tick(0.25)
    assert told(bench, W2 + 50) == [(first[0].sample_id, 3, truth(first[0].sample_id, 3, 5))]


def test_tokens_that_left_memory_are_left_out() -> None:
    """Drafts are worth no read of the ledger."""
    bench = begun(n=5)
    bench.store.bound = 0
    first = bench.join(W1)
    bench.chunk(W1, first[0], 0, 3)
    read = bench.read_back
    bench.join(W2)
    bench.tick(0.25)
    assert told(bench, W2) == []
    assert bench.read_back == read


def test_one_message_holds_no_more_than_its_bound() -> None:
    bench = begun(bytes_per_s=1e6, n=5, max_tokens=3 * MAX_SIBLING_TOKENS)
    first = bench.join(W1)
    bench.chunk(W1, first[0], 0, 2 * MAX_SIBLING_TOKENS + 5)
    bench.join(W2)
    bench.tick(0.25)
    sizes = [sum(piece.count for piece in m.pieces) for m in bench.mail[W2] if isinstance(m, SiblingTokens)]
    assert sizes == [MAX_SIBLING_TOKENS, MAX_SIBLING_TOKENS, 5]
    for message in bench.take(W2, SiblingTokens):
        assert decode_to_worker(encode(message)) == message


def test_squeezed_tokens_are_bounded_and_come_back() -> None:
    packed = pack_tokens([*range(1000), 2**31 - 1, 150_000] * 4)
    squeezed = squeeze_tokens(packed)
    assert len(squeezed) < len(packed) / 4
    assert unsqueeze_tokens(squeezed, len(packed) // 4) == packed
    for data, tokens in (
        (squeezed, 4007),
        (squeezed, 4009),
        (b"garbage", 1),
        (squeezed[:-20], 4008),
        (b"", 3),
    ):
        with pytest.raises(WireError):
            unsqueeze_tokens(data, tokens)
    bomb = squeeze_tokens(bytes(4 * 10_000_000))
    with pytest.raises(WireError):
        unsqueeze_tokens(bomb, MAX_SIBLING_TOKENS)
