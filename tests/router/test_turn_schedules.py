"""Random schedules of episodes: engines die, the daemon restarts, commits are late, calls repeat. What a gateway sees always holds.

Every event is audited by the bench; what is sent to a gateway is compared with what was durable when it was sent. Planted bugs show that
these checks find them.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable

import pytest

from scavenger.ledger import records as rec
from scavenger.protocol.messages import Denied, EndEpisode, Held, Lease, Reply, TurnTokens, WeightsLoaded
from scavenger.router.core import episode_budget, restore, samples, turns
from scavenger.router.core.events import JobGone, RouterAction, Send
from scavenger.router.core.state import EpisodeBudget, EpisodeSpent, Group, Sample
from scavenger.router.core.tables import Core
from tests.router.harness import Bench, root
from tests.router.test_turns import GATEWAY, ask

SCHEDULES, MOVES = 150, 60
#: Of an episode, in every other schedule: one turn of two samples with 8 tokens each, and most of another one.
BUDGET = {"budget_turns": 2, "budget_tokens": 21}


class Played(Bench):
    """A bench that checks each message to a gateway against the ledger as it is then."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: dict[tuple[bytes, int], bytes] = {}  # what gateways were shown of each request's samples
        self.ends = 0
        self.refused = 0  # turns over their episode's budget

    def perform(self, actions: list[RouterAction]) -> None:
        actions = self.filled(actions)
        for action in actions:
            if isinstance(action, Send) and isinstance(action.message, TurnTokens):
                self._shown(action.message)
        super().perform(actions)

    def _shown(self, m: TurnTokens) -> None:
        row = self.ledger.samples[m.sample_id]
        begin = 4 * m.offset
        assert row.tokens[begin : begin + len(m.tokens)] == m.tokens, (
            "tokens were shown before they were durable"
        )
        if m.finish:
            assert row.state in ("complete", "served"), "an end was shown before it was durable"
            assert len(row.tokens) == begin + len(m.tokens), "an end was shown before all its tokens"
            self.ends += 1
        key = (m.request, m.index)
        seen = self.shown.get(key, b"")
        mine = m.tokens[: max(0, len(seen) - begin)]
        assert seen[begin : begin + len(mine)] == mine, (
            "a gateway was shown two different tokens at one place"
        )
        if begin <= len(seen) < begin + len(m.tokens):
            self.shown[key] = seen[:begin] + m.tokens


def play(seed: int, moves: int = MOVES) -> Played:
    rng = random.Random(seed)
    bench, budget = Played(), BUDGET if seed % 2 else {}
    bench.open(budget=budget)
    bench.publish()
    bench.auto = False
    leases: dict[int, dict[int, tuple[Lease, int]]] = {}  # connection -> sample -> lease, tokens sent
    conns = iter(range(11, 10_000))

    def join() -> None:
        conn = next(conns)
        bench.hello(conn)
        bench.settle()
        bench.say(conn, WeightsLoaded(1, root(1)))
        leases[conn] = {}

    def chunk() -> None:
        for conn, held in leases.items():
            for lease in bench.leases(conn):
                held[lease.sample_id] = (lease, len(lease.accepted) // 4)
            for sample_id, (lease, sent) in list(held.items()):
                n = rng.randint(0, 3)
                most = lease.sampling.max_tokens
                end = min(most, sent + n)
                if end > sent:
                    back = rng.randint(0, 1) if sent > len(lease.accepted) // 4 else 0  # a resend
                    bench.chunk(conn, lease, sent - back, end - sent + back)
                    held[sample_id] = (lease, end)
                if end == most:
                    del held[sample_id]

    def call(request: str = "", episode: str = "") -> None:
        body = ask(
            request or str(rng.randint(0, 3)),
            episode=episode or rng.choice("ef"),
            n=2,
            have=(rng.randint(0, 3),),
        )
        bench.call(body, conn=GATEWAY + rng.randint(0, 2), attempt=0)

    def end() -> None:
        episode = rng.choice("ef")
        if rng.random() < 0.2:
            bench.call(EndEpisode(episode), conn=GATEWAY, attempt=0)

    def lose() -> None:
        if leases:
            conn = rng.choice(list(leases))
            del leases[conn]
            bench.handle(JobGone(f"job{conn}", 0, "preempted", crashed=rng.random() < 0.1))

    def restart() -> None:
        if rng.random() < 0.3:
            bench.settle()
            bench.restart()
            bench.settle()
            for conn, held in list(leases.items()):  # they register again under their leases
                named = tuple(Held(i, lease.epoch, sent) for i, (lease, sent) in held.items())
                if rng.random() < 0.4:
                    named = ()  # a stale one: it says that it holds nothing, and goes on all the same
                bench.hello(conn, held=named, loaded=1, loaded_root=root(1))
            bench.settle()
            for turn in list(bench.router.core.runs["r"].turns.open.values()):  # and gateways ask again
                assert turn.turn is not None
                for request in "0123":
                    if ask(request, episode=turn.turn.episode.name).request == turn.turn.request:
                        call(request, turn.turn.episode.name)
            bench.settle()

    def commit() -> None:
        if bench.writes:
            bench.commit(rng.randint(1, len(bench.writes)))

    for _ in range(moves):
        rng.choices((join, chunk, call, end, lose, restart, commit), (2, 8, 6, 1, 2, 2, 6))[0]()
    bench.settle()
    join()
    for _ in range(40):  # what is open comes to its end, with one engine and no more faults
        chunk()
        bench.settle()
        bench.tick(1.0)
    for mail in (bench.mail.get(GATEWAY + i, []) for i in range(3)):
        for reply in (m.body for m in mail if isinstance(m, Reply)):
            assert not isinstance(reply, Denied) or reply.code in (
                "ended",
                *(("budget", "invalid") if budget else ()),
            )
            bench.refused += isinstance(reply, Denied) and reply.code == "budget"
    requests = [t.request for t in bench.ledger.turns.values()]
    assert len(requests) == len(set(requests)), "a request was generated twice"
    if budget:
        _check_budget(bench)
    return bench


def _check_budget(bench: Played) -> None:
    """By the ledger's records, in their order: no turn may have more than was left when it was asked for."""
    made: dict[int, rec.GroupCreated] = {}
    episodes: dict[int, int] = {}  # group -> episode
    turns_of: Counter[int] = Counter()
    tokens_of: Counter[int] = Counter()
    for record in bench.ledger.log:
        if isinstance(record, rec.GroupCreated):
            made[record.group_id] = record
        elif isinstance(record, rec.TurnBegun):
            episode = episodes[record.group_id] = record.episode_id
            turns_of[episode] += 1
            assert turns_of[episode] <= BUDGET["budget_turns"], "an episode has turns over its budget"
            group = made[record.group_id]
            most = group.n * json.loads(group.sampling)["max_tokens"]
            left = BUDGET["budget_tokens"] - tokens_of[episode]
            assert most <= left, "a turn may have more tokens than are left: over its budget"
        elif isinstance(record, rec.ChunkAccepted):
            group_id = bench.ledger.samples[record.sample_id].group_id
            tokens_of[episodes[group_id]] += len(record.tokens) // 4


@pytest.mark.parametrize("part", range(5))
def test_random_schedules_of_episodes(part: int) -> None:
    ends = refused = 0
    for seed in range(part, SCHEDULES, 5):
        found = play(seed)
        ends, refused = ends + found.ends, refused + found.refused
    assert ends > 100, "the schedules reach hardly any end"
    assert refused > 10, "the schedules reach hardly any budget"


def _found(most: int = 60) -> str:
    """The words of the check that finds the bug first."""
    for seed in range(most):
        try:
            play(seed)
        except AssertionError as error:
            return str(error)
    return ""


def test_an_answer_before_it_is_durable_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = samples.finish

    def at_once(core: Core, sample: Sample, reason: str) -> None:
        honest(core, sample, reason)
        if sample.group.turn is not None:
            for conn in sample.group.turn.followers:
                core.send(
                    conn,
                    TurnTokens(
                        sample.group.turn.request,
                        sample.id,
                        sample.index,
                        sample.durable,
                        b"",
                        b"",
                        b"",
                        1,
                        reason,
                    ),
                )

    monkeypatch.setattr(samples, "finish", at_once)
    assert "before it was durable" in _found()


def test_a_turn_that_is_generated_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = turns.restore

    def forgetful(core: Core, turn: object, group: object, *rest: object) -> None:
        honest(core, turn, group, *rest)  # type: ignore[arg-type]
        group.run.turns.groups -= 1  # type: ignore[attr-defined]
        del turn.episode.turns[turn.request]  # type: ignore[attr-defined]
        group.run.turns.open.pop(group.id, None)  # type: ignore[attr-defined]

    monkeypatch.setattr(turns, "restore", forgetful)
    assert "twice" in _found()


def test_a_stale_engine_s_stream_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that no commit holds: a late chunk of an engine that lost its lease is passed on."""
    honest = samples.refuse_chunk

    def leaky(core: Core, worker: object, chunk: object, sample: Sample | None, fault: object) -> None:
        if sample is not None and sample.group.turn is not None:
            for conn in sample.group.turn.followers:
                message = TurnTokens(
                    sample.group.turn.request,
                    sample.id,
                    sample.index,
                    chunk.offset,  # type: ignore[attr-defined]
                    b"\1\1\1\1" * max(1, len(chunk.tokens) // 4),  # type: ignore[attr-defined]
                    b"",
                    b"",
                    1,
                )
                core.send(conn, message)
        honest(core, worker, chunk, sample, fault)  # type: ignore[arg-type]

    monkeypatch.setattr(samples, "refuse_chunk", leaky)
    assert _found(300) != ""  # few schedules have a chunk so late


def test_a_budget_that_a_restart_forgets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore, "budget_of", lambda _config: EpisodeBudget())
    assert "over its budget" in _found()


def test_a_budget_that_counts_no_open_turn_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = episode_budget.spent_by

    def of_whole_turns(groups: Iterable[Group], before: EpisodeSpent) -> EpisodeSpent:
        return honest([group for group in groups if not group.unfinished], before)

    monkeypatch.setattr(episode_budget, "spent_by", of_whole_turns)
    assert "over its budget" in _found()
