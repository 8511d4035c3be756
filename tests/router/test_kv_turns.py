"""KV blocks that finished turns leave: kept where that is quicker, named to the turns behind them, and handed on by who leaves."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from scavenger.ledger import records as rec
from scavenger.protocol import engine_options
from scavenger.protocol.messages import (
    Drain,
    DropKv,
    EndEpisode,
    FetchKv,
    Goodbye,
    GoodbyeAck,
    KvKept,
    KvOffer,
    KvTried,
    Lease,
    Message,
    WeightsLoaded,
    WeightSource,
)
from scavenger.router.core import audit, kv_moves, kv_turns
from scavenger.router.core.state import KvMoves
from tests.router import harness
from tests.router.harness import root
from tests.router.memory_ledger import Ledger
from tests.router.test_prefixes import GATEWAY, Agent

PROMPT = list(range(1, 301))
TOOL = [7] * 20
#: Of the first turn: all but the last of its 300 and 8 tokens.
LEFT = 307


def there(conn: int) -> WeightSource:
    return WeightSource(f"tcp://n{conn}:5", f"key{conn}", b"token")


class Turns:
    """An agent of one episode, on engines that keep what its turns leave."""

    def __init__(self) -> None:
        self.agent = Agent(Ledger())
        self.bench = self.agent.bench
        self.moves.rates.prefills.note(LEFT, 1.0)

    @property
    def moves(self) -> KvMoves:
        return self.bench.router.core.runs["r"].kv

    def ask(self, tokens: list[int], conn: int = 11) -> Lease:
        self.agent.ask(tokens)
        (lease,) = self.bench.leases(conn)
        return lease

    def say(self, lease: Lease, conn: int = 11) -> list[int]:
        """The whole completion, and what the engine keeps of it."""
        self.bench.chunk(conn, lease, 0, 8)
        said = [harness.token(lease.sample_id, i) for i in range(8)]
        if lease.leaves_kv:
            self.keeps(lease, conn)
        return said

    def keeps(self, lease: Lease, conn: int, number: int = 0, less: int = 1) -> None:
        tokens = len(lease.prompt) // 4 + 8 - less
        offer = KvOffer(lease.sample_id, lease.epoch, number or lease.sample_id, tokens, 64)
        self.bench.say(conn, KvKept((offer,), there(conn)))

    def got(self, conn: int, kind: type[Message]) -> list[Message]:
        return [*self.bench.take(conn, kind)]

    def decisions(self, action: str) -> list[rec.Decision]:
        return [
            r
            for r in self.bench.ledger.log
            if isinstance(r, rec.Decision) and r.policy == "kv" and r.action == action
        ]


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Turns]:
    monkeypatch.setattr(harness, "SPEC", msgspec.structs.replace(harness.SPEC, context_length=4096))
    found = Turns()
    yield found
    audit.check(found.bench.router.core)


def after_a_tool_call(turns: Turns, conn: int = 11) -> tuple[list[int], Lease]:
    """What the first turn had, and the lease of the second."""
    said = turns.say(turns.ask(PROMPT))
    before = [*PROMPT, *said]
    return before, turns.ask([*before, *TOOL], conn)


def test_the_next_turn_s_lease_names_what_the_turn_before_left(turns: Turns) -> None:
    _, lease = after_a_tool_call(turns)
    assert lease.kv is not None
    assert (lease.kv.source, lease.kv.number, lease.kv.tokens) == (there(11), 1, LEFT)
    assert lease.leaves_kv
    (keeps,) = turns.decisions("keep")
    assert "tokens are predicted to take" in keeps.reason
    assert len(turns.decisions("transfer")) == 1


def test_an_engine_that_took_the_next_turn_of_another_s_is_told_where_they_are(turns: Turns) -> None:
    said = turns.say(turns.ask(PROMPT))
    turns.bench.join(12)
    turns.bench.say(11, Goodbye("preempted", True))  # nobody was told to fetch them before 12 was ready
    (order,) = turns.got(12, FetchKv)
    assert isinstance(order, FetchKv)
    assert (order.order.source, order.order.number, order.order.tokens) == (there(11), 1, LEFT)
    assert order.order.within_s <= 0.5
    (ack,) = turns.got(11, GoodbyeAck)
    assert isinstance(ack, GoodbyeAck)
    assert ack.wanted == (1,)
    turns.bench.say(12, KvTried(1, order.epoch, LEFT, 64 * LEFT, 0.01))
    turns.bench.say(12, KvKept((KvOffer(1, order.epoch, 40, LEFT, 64),), there(12)))
    assert turns.moves.rates.transfer_s(64 * LEFT) == 0.01
    lease = turns.ask([*PROMPT, *said, *TOOL], 12)
    assert lease.kv is not None
    assert (lease.kv.source, lease.kv.number) == (there(12), 40)
    (handed,) = turns.decisions("hand-over")
    assert "1 of 1 turns' blocks go to other engines" in handed.reason
    assert (turns.moves.turns_kept, turns.moves.turns_handed) == (2, 1)


def test_a_prefix_that_the_prompt_does_not_begin_with_is_not_named(turns: Turns) -> None:
    """An agent that rewrote its history, and another branch from the same turn."""
    before, lease = after_a_tool_call(turns)
    turns.say(lease)
    rewritten = turns.ask([*before[:-1], 99, *TOOL])
    assert rewritten.kv is None
    branch = turns.ask([*before, 8, 8, 8])
    assert branch.kv is not None
    assert (branch.kv.number, branch.kv.tokens) == (1, LEFT), "the nearest that both begin with"


def test_what_other_weights_made_is_not_named(turns: Turns) -> None:
    said = turns.say(turns.ask(PROMPT))
    turns.bench.publish(2, 1)
    turns.bench.say(11, WeightsLoaded(2, root(2)))
    lease = turns.ask([*PROMPT, *said, *TOOL])
    assert lease.version == 2
    assert lease.kv is None
    assert turns.moves.turns == {}


def test_an_engine_that_has_the_prefix_in_its_cache_is_sent_nowhere(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_options, "keeps_prefixes", lambda _name, _options: True)
    _, lease = after_a_tool_call(turns)
    assert lease.kv is None
    assert 1 in turns.moves.turns


@pytest.mark.parametrize(
    ("name", "gpus", "leaves"), [("vllm", 1, True), ("vllm", 2, False), ("reference", 2, True)]
)
def test_an_engine_that_cannot_leave_blocks_is_not_asked_for_them(
    name: str, gpus: int, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM over several GPUs has them spread over these."""
    monkeypatch.setattr(
        harness, "SPEC", msgspec.structs.replace(harness.SPEC, name=name, context_length=4096)
    )
    turns = Turns()
    worker = next(w for w in turns.bench.router.core.workers.values() if w.conn == 11)
    worker.gpus = gpus
    assert turns.ask(PROMPT).leaves_kv is leaves
    assert len(turns.decisions("keep")) == leaves


def test_turns_whose_prefill_is_quicker_leave_nothing(turns: Turns) -> None:
    turns.moves.rates.prefills.means.clear()
    turns.moves.rates.transfers.note(64 * LEFT, 5.0)
    turns.moves.token_nbytes = 64
    lease = turns.ask(PROMPT)
    assert not lease.leaves_kv
    (said,) = turns.decisions("forget")
    assert "turns' blocks are not kept" in said.reason


@pytest.mark.parametrize("what", ["another length", "another epoch", "another worker", "not a turn"])
def test_what_is_no_whole_turn_of_this_engine_is_not_kept(turns: Turns, what: str) -> None:
    lease = turns.ask(PROMPT)
    turns.bench.chunk(11, lease, 0, 8)
    turns.bench.join(12)
    changed = {"another epoch": {"epoch": 9}, "not a turn": {"sample_id": 77}}.get(what, {})
    lease = msgspec.structs.replace(lease, **changed)
    conn = 12 if what == "another worker" else 11
    turns.keeps(lease, conn, 5, less=2 if what == "another length" else 1)
    assert turns.moves.turns == {}
    assert turns.got(conn, DropKv) == [DropKv((5,))], "it need not keep them"


def test_who_keeps_too_much_drops_what_is_least_worth(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    """First what a later turn left too, though it is the newest."""
    monkeypatch.setattr(kv_turns, "TURNS_NBYTES", 64 * 1200)
    other = turns.say(turns.ask([9, *PROMPT[1:]]))
    assert other
    before, lease = after_a_tool_call(turns)
    turns.say(lease)
    assert list(turns.moves.turns) == [1, 2, 3]
    third = turns.ask([5, *PROMPT[1:]])
    turns.say(third)
    assert list(turns.moves.turns) == [1, 3, 4]
    assert turns.got(11, DropKv) == [DropKv((2,))]
    assert before


def test_an_episode_that_ends_frees_what_its_turns_left(turns: Turns) -> None:
    after_a_tool_call(turns)
    turns.bench.call(EndEpisode("e"), conn=GATEWAY, attempt=0)
    assert turns.moves.turns == {}
    assert turns.got(11, DropKv) == [DropKv((1,))]


def test_a_reader_that_did_not_find_them_is_the_last_that_is_sent_there(turns: Turns) -> None:
    before, lease = after_a_tool_call(turns)
    turns.bench.say(11, KvTried(lease.sample_id, lease.epoch, LEFT, 64 * LEFT, 0.01, "no such blocks"))
    assert 1 not in turns.moves.turns
    assert turns.ask([*before, 8, 8, 8]).kv is None


def test_an_engine_that_leaves_alone_or_broken_hands_nothing_over(turns: Turns) -> None:
    turns.say(turns.ask(PROMPT))
    turns.bench.join(12)
    turns.bench.say(11, Goodbye("CUDA error", False, failed=True))
    assert turns.got(12, FetchKv) == []
    assert turns.got(11, GoodbyeAck) == [GoodbyeAck()]
    assert turns.moves.turns == {}


def test_who_would_come_too_late_is_not_sent(turns: Turns) -> None:
    turns.moves.rates.transfers.note(64 * LEFT, 0.5)
    turns.say(turns.ask(PROMPT))
    assert 1 in turns.moves.turns, "quicker than a prefill"
    turns.bench.join(12)
    turns.bench.say(11, Goodbye("preempted", True))
    assert turns.got(12, FetchKv) == []
    (said,) = turns.decisions("hand-over")
    assert "their engine is gone in 0.4000 s" in said.reason


def test_an_engine_that_is_to_fetch_them_and_dies_or_fails_leaves_nothing_behind(turns: Turns) -> None:
    turns.say(turns.ask(PROMPT))
    turns.bench.join(12)
    turns.bench.say(11, Goodbye("preempted", True))
    (order,) = turns.got(12, FetchKv)
    assert isinstance(order, FetchKv)
    turns.bench.say(12, KvTried(1, order.epoch, LEFT, 0, 0.4, "the blocks did not come within 0.400 s"))
    assert turns.moves.handed == {}
    (event,) = turns.bench.events("kv_refused")
    assert "did not come" in event.reason


def test_what_a_fetch_is_said_to_have_taken_is_bounded(turns: Turns) -> None:
    turns.say(turns.ask(PROMPT))
    turns.bench.join(12)
    turns.bench.say(11, Goodbye("preempted", True))
    (order,) = turns.got(12, FetchKv)
    assert isinstance(order, FetchKv)
    turns.bench.say(12, KvTried(1, order.epoch, LEFT, 64 * LEFT, 1e9))
    assert {took for _, took in turns.moves.rates.transfers.means.values()} == {kv_moves.MOST_REPORTED_S}


def test_a_drained_engine_is_as_one_that_is_preempted(turns: Turns) -> None:
    turns.say(turns.ask(PROMPT))
    turns.bench.join(12)
    turns.bench.say(11, Goodbye("drained", True))
    assert len(turns.got(12, FetchKv)) == 1
    assert turns.got(11, Drain) == []
