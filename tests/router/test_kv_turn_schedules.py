"""Random schedules of what turns leave: branches, rewritten histories, new weights, engines that leave or die. No wrong block is loaded.

The engines are the bench's; what they keep, verify and load goes by the engines' own checks (`protocol.kv`). Every event is audited.
Planted bugs show that blocks of another branch would be found.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import msgspec
import pytest

from scavenger.protocol import kv
from scavenger.protocol.kv import KvBinding, KvHeader
from scavenger.protocol.messages import (
    DropKv,
    EndEpisode,
    FetchKv,
    Goodbye,
    KvKept,
    KvOffer,
    KvTried,
    Lease,
    OpenTurn,
    Sampling,
    UseWeights,
    WeightsLoaded,
    WeightSource,
    pack_tokens,
    unpack_tokens,
)
from scavenger.router.core import kv_turns, state
from scavenger.router.core.events import JobGone
from scavenger.router.core.prefixes import BLOCK
from scavenger.router.core.state import Turn
from tests.router import blocks, harness
from tests.router.blocks import FATES, KeptBlocks
from tests.router.harness import Bench, root, token

SCHEDULES, MOVES = 90, 80
GATEWAY, RUN, HISTORY, TOKENS = 90, "r", "h", 8
#: Turns behind it pass the end of a block: of a rewritten history the router finds what it kept to there.
FIRST = [5] * (BLOCK - 6)


@dataclass
class Engine:
    """One on the bench. `kept`: by number, what it keeps of turns."""

    conn: int
    version: int = -1
    kept: dict[int, KeptBlocks] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)


class Episodes:
    """Agents that go on from any turn of theirs, on engines that come and go."""

    def __init__(self, seed: int, faults: bool) -> None:
        self.rng, self.faults = random.Random(seed), faults
        self.bench = Bench()
        self.bench.open()
        self.bench.publish()
        self.version = 1
        self.engines: dict[int, Engine] = {}
        self.conns = iter(range(11, 1000))
        self.numbers = iter(range(1, 100_000))
        self.texts: dict[str, list[list[int]]] = {"e": [FIRST], "f": [FIRST]}  # prompts and completions
        self.asked = 0
        self.seen: Counter[str] = Counter()
        self.bench.router.core.runs["r"].kv.rates.prefills.note(BLOCK, 1.0)

    def source(self, conn: int) -> WeightSource:
        return blocks.source_of(conn)

    # ------------------------------------------------------------ what happens

    def join(self) -> None:
        conn = next(self.conns)
        self.bench.hello(conn)
        self.engines[conn] = Engine(conn)
        self.load(self.engines[conn])

    def load(self, engine: Engine) -> None:
        """What it was asked to; its requests and what it kept are gone."""
        for order in self.bench.take(engine.conn, UseWeights):
            if order.version != engine.version and not order.more:
                engine.version = order.version
                engine.leases.clear()
                engine.kept.clear()
                self.bench.say(engine.conn, WeightsLoaded(order.version, root(order.version)))

    def ask(self) -> None:
        """The next turn: behind any turn of the episode (the last ones mostly), or behind a part of one."""
        episode = self.rng.choice("ef")
        texts = self.texts[episode]
        text = texts[-1] if self.rng.random() < 0.5 else self.rng.choice(texts)
        if self.rng.random() < 0.2:
            text = text[: -self.rng.randint(1, 10)]
        self.asked += 1
        prompt = [*text, *(self.rng.randint(1, 2) for _ in range(self.rng.choice((1, 2, 2, 12))))]
        name = self.asked.to_bytes(32, "big")
        body = OpenTurn(episode, name, name, pack_tokens(prompt), self.rng.randint(1, 2), Sampling(TOKENS))
        self.bench.call(body, conn=GATEWAY, attempt=0)

    def generate(self) -> None:
        for engine in list(self.engines.values()):
            self.load(engine)
            for lease in self.bench.leases(engine.conn):
                self.begin(engine, lease)
            for number in (n for m in self.bench.take(engine.conn, DropKv) for n in m.numbers):
                engine.kept.pop(number, None)
            for order in self.bench.take(engine.conn, FetchKv):
                self.fetch(engine, order)
            for sample_id, lease in list(engine.leases.items()):
                if self.rng.random() < 0.6:
                    self.finish(engine, lease)
                    del engine.leases[sample_id]

    def begin(self, engine: Engine, lease: Lease) -> None:
        engine.leases[lease.sample_id] = lease
        if lease.kv is None:
            return
        text = (*unpack_tokens(lease.prompt), *unpack_tokens(lease.accepted))
        assert 0 < lease.kv.tokens < len(text), "nothing is left to compute"
        expected = self.binding(lease.version, text[: lease.kv.tokens])
        found = self.read(lease.kv.source, lease.kv.number)
        why = "nothing came" if found is None else blocks.fault(found, expected)
        self.seen[why or "loaded"] += 1
        if found is not None and not why:
            assert blocks.right(found, lease.version, text[: lease.kv.tokens]), (
                f"sample {lease.sample_id}: its engine goes on from another branch's blocks"
            )
        nbytes = blocks.TOKEN_NBYTES * lease.kv.tokens
        self.bench.say(
            engine.conn, KvTried(lease.sample_id, lease.epoch, lease.kv.tokens, nbytes, 0.001, why)
        )

    def finish(self, engine: Engine, lease: Lease) -> None:
        done = len(lease.accepted) // 4
        self.bench.chunk(engine.conn, lease, done, TOKENS - done)
        said = [token(lease.sample_id, i) for i in range(TOKENS)]
        text = [*unpack_tokens(lease.prompt), *said]
        sample = self.bench.router.core.samples.get(lease.sample_id)
        if sample is not None and sample.group.turn is not None:
            self.texts[sample.group.turn.episode.name].append(text)
        if lease.leaves_kv:
            made = self.binding(lease.version, text[:-1])
            self.keep(engine, lease.sample_id, lease.epoch, blocks.blocks_of(made, text[:-1]))

    def keep(self, engine: Engine, sample_id: int, epoch: int, found: KeptBlocks) -> None:
        number = next(self.numbers)
        engine.kept[number] = found
        offer = KvOffer(sample_id, epoch, number, found.header.binding.tokens, blocks.TOKEN_NBYTES)
        self.bench.say(engine.conn, KvKept((offer,), self.source(engine.conn)))

    def fetch(self, engine: Engine, order: FetchKv) -> None:
        found = self.leaving.get((order.order.source.endpoint, order.order.number))
        why = "nothing came" if found is None else self.fault_of_other(engine, found, order.order.tokens)
        self.seen[f"fetched {why}".strip()] += 1
        nbytes = blocks.TOKEN_NBYTES * order.order.tokens
        self.bench.say(
            engine.conn, KvTried(order.sample_id, order.epoch, order.order.tokens, nbytes, 0.001, why)
        )
        if found is not None and not why:
            self.keep(engine, order.sample_id, order.epoch, found)

    def fault_of_other(self, engine: Engine, found: KeptBlocks, tokens: int) -> str:
        own = msgspec.structs.replace(self.binding(engine.version, ()), tokens=tokens)
        return kv.mismatch_of_other(found.header, own, blocks.TOKEN_NBYTES)

    def leave(self) -> None:
        """With notice: what it keeps is there for a moment yet."""
        if len(self.engines) > 1:
            engine = self.engines.pop(self.rng.choice(list(self.engines)))
            endpoint = self.source(engine.conn).endpoint
            self.leaving.update({(endpoint, n): found for n, found in engine.kept.items()})
            self.bench.say(engine.conn, Goodbye("preempted", True))

    def die(self) -> None:
        if self.engines:
            conn = self.rng.choice(list(self.engines))
            del self.engines[conn]
            self.bench.handle(JobGone(f"job{conn}", 0, "preempted", crashed=False))

    def publish(self) -> None:
        """Other weights, between two turns or while some wait; engines load them when they are asked to."""
        self.version += 1
        reply = self.bench.publish(self.version, self.version - 1)
        assert reply is not None

    def end(self) -> None:
        episode = self.rng.choice("ef")
        self.bench.call(EndEpisode(episode), conn=GATEWAY, attempt=0)
        self.texts[episode] = [FIRST]

    # ------------------------------------------------------------ blocks

    leaving: dict[tuple[str, int], KeptBlocks]

    def binding(self, version: int, tokens: tuple[int, ...] | list[int]) -> KvBinding:
        return blocks.binding(RUN, HISTORY, version, root(version), tokens)

    def read(self, source: WeightSource, number: int) -> KeptBlocks | None:
        """As they are, mostly; else late, corrupt, of another version, or another turn's of this engine."""
        holder = next((e for e in self.engines.values() if self.source(e.conn) == source), None)
        if holder is None:
            return None
        others = [found for other, found in holder.kept.items() if other != number]
        same_length = [
            found
            for found in others
            if number in holder.kept
            and found.header.binding.tokens == holder.kept[number].header.binding.tokens
        ]
        fate = self.rng.choice(FATES) if self.faults and self.rng.random() < 0.7 else "kept"
        self.seen[fate] += 1
        other = next(iter(same_length or others), None)
        return blocks.on_the_way(holder.kept.get(number), fate, other)


def play(seed: int, *, faults: bool = True) -> Episodes:
    found = Episodes(seed, faults)
    found.leaving = {}
    moves = (found.join, found.ask, found.generate, found.leave, found.die, found.publish, found.end)
    found.join()
    for _ in range(MOVES):
        found.rng.choices(moves, (2, 10, 12, 2, 1, 0.5, 0.5))[0]()
    return found


@pytest.fixture(autouse=True)
def long_context(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = msgspec.structs.replace(harness.SPEC, context_length=1 << 14)
    monkeypatch.setattr(harness, "SPEC", spec)


@pytest.mark.parametrize("part", range(3))
def test_random_schedules_of_what_turns_leave(part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(part, SCHEDULES, 3):
        seen.update(play(seed).seen)
    for what in ("loaded", "fetched", "late", "corrupt", "another version", "another sample"):
        assert seen[what] >= 5, f"the schedules have hardly any {what}: {seen}"


def test_blocks_of_another_branch_that_are_accepted_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the reader compares all but the digest of the tokens."""
    honest = kv.mismatch

    def of_any_branch(header: KvHeader, expected: KvBinding, nbytes: int) -> str:
        bound = msgspec.structs.replace(header.binding, digest=expected.digest)
        return honest(msgspec.structs.replace(header, binding=bound), expected, nbytes)

    monkeypatch.setattr(kv, "mismatch", of_any_branch)
    assert "another branch's blocks" in _found()


def test_a_router_that_names_a_prefix_which_is_none_makes_engines_refuse_it_and_no_token_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted: the router takes the nearest turn for a prefix, however much of it the prompt begins with."""
    honest = state.ancestors

    def whole(samples: dict[int, object], turn: Turn) -> object:
        return ((sample, 1 << 20) for sample, _ in honest(samples, turn))  # type: ignore[arg-type]  # the fault is planted

    def refused() -> int:
        return sum(play(seed, faults=False).seen["the blocks are of another digest"] for seed in range(12))

    assert refused() == 0
    monkeypatch.setattr(kv_turns, "ancestors", whole)
    assert refused() > 3


def _found(most: int = 60) -> str:
    """The words of the check that finds the bug first."""
    for seed in range(most):
        try:
            play(seed)
        except AssertionError as error:
            return str(error)
    return ""
