"""Random schedules of two policies: the daemon and both trainers restart, engines die, calls repeat, commits are late.

The ledger of the bench refuses a turn that is delivered twice or to another policy, and a state that no table allows. What is sent to the
other trainer is compared with what is durable then, and at the end each delivery was taken by one step that stands. Planted bugs show that
these checks find them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from scavenger.ledger import records as rec
from scavenger.protocol.messages import CloseRun, DeliveredGroup, Denied, EndEpisode, Message, Reply
from scavenger.router.core import deliveries, turns
from scavenger.router.core.events import JobGone, RouterAction, Send
from scavenger.router.core.state import ActiveRun, EpisodeSpent
from scavenger.router.core.tables import Core
from tests.ledger.conftest import new_database
from tests.ledger.conftest import postgres as postgres
from tests.router.memory_ledger import Ledger, StoredLedger
from tests.router.two_policies import GATEWAY, OTHER, TwoRuns, ask

SCHEDULES, MANY, MOVES = 12, 300, 70
#: Of an episode, in every other schedule: both policies ask for up to three turns of 4 tokens.
BUDGET = {"turns": 3, "tokens": 10}


class Watched(TwoRuns):
    """A bench that checks each group sent to the other trainer against the ledger as it is then."""

    def refused(self) -> int:
        """Turns over their episode's budget."""
        replies = (m.body for m in self.mail.get(GATEWAY, []) if isinstance(m, Reply))
        return sum(isinstance(one, Denied) and one.code == "budget" for one in replies)

    def perform(self, actions: list[RouterAction]) -> None:
        for action in actions:
            if isinstance(action, Send) and isinstance(action.message, DeliveredGroup):
                for one in action.message.episodes:
                    row = self.ledger.deliveries.get(one.delivery_id)
                    assert row is not None, "a delivery was sent before it was durable"
                    assert (row.state, row.episode, row.reward) == ("due", one.episode, one.reward)
        super().perform(actions)


class Play:
    """One schedule. `whole`: episodes that both policies have spoken in; `open_steps`: of the other trainer, those with a checkpoint."""

    def __init__(self, seed: int, ledger: Ledger | None = None) -> None:
        self.rng = random.Random(seed)
        self.bench = Watched()
        self.bench.ledger = ledger or self.bench.ledger
        self.bench.begin("s", ahead=8)
        self.bench.announce("s", 0)
        self.budget = BUDGET if seed % 2 else {}
        self.bench.begin("r", ahead=8, budget=self.budget)
        self.bench.announce("r", 0)
        self.bench.auto = False
        self.engines: dict[int, str] = {}
        self.conns = iter(range(11, 10_000))
        self.numbers = iter(range(10_000))
        self.asked: list[str] = []
        self.delivered: list[str] = []
        self.here: dict[int, DeliveredGroup] = {}
        self.step = self.saved = 0  # of `s`
        self.player_step = 0

    # ---- moves

    def join(self) -> None:
        conn, run = next(self.conns), self.rng.choice("rs")
        self.bench.settle()
        self.bench.engine(conn, run)
        self.bench.settle()
        self.engines[conn] = run

    def call(self) -> None:
        episode = (
            f"e{next(self.numbers)}"
            if self.rng.random() < 0.6 or not self.asked
            else self.rng.choice(self.asked)
        )
        self.asked.append(episode)
        for policy in self.rng.sample(["", "s"], 2):
            self.bench.of("r", ask(episode, policy), GATEWAY)

    def go_on(self) -> None:
        """Further turns of episodes that have some."""
        for episode in self.rng.sample(self.asked[-4:], min(3, len(self.asked))):
            for policy in self.rng.sample(["", "s"], 2):
                self.bench.of("r", ask(episode, policy, self.rng.randint(1, 2)), GATEWAY)

    def generate(self) -> None:
        self.bench.generate(*self.engines)

    def deliver(self) -> None:
        for episode in self.rng.sample(self.asked, min(3, len(self.asked))):
            if self._is_whole(episode):
                self.bench.deliver(self.bench.share(episode, reward=self.rng.random()))
                self.delivered.append(episode)

    def again(self) -> None:
        """The trainer of `r` restarts, and hands over what it may have handed over."""
        if self.rng.random() < 0.5:
            self.bench.settle()
            self.bench.begin("r", self.player_step, ahead=8, budget=self.budget)
            self.bench.settle()
            self.bench.attempts["r"] = self.bench.router.core.runs["r"].attempt
            self.bench.attach_again("r")
        for episode in self.delivered[-3:]:
            self.bench.deliver(self.bench.share(episode))

    def train(self) -> None:
        self._look()
        if self.here and self.rng.random() < 0.7:
            some = self.rng.sample(sorted(self.here), self.rng.randint(1, len(self.here)))
            self.bench.settle()
            if all(row.state == "due" for i in some for row in self._rows(i)):
                self.step += 1
                self.bench.train(self.step, *(self.here[i] for i in some))
                self.bench.settle()
                for i in some:
                    del self.here[i]
                self.bench.announce("s", self.step)
        if self.rng.random() < 0.4:
            self.saved = self.step
            self.bench.checkpoint("s", self.step)
        self._want()

    def other_trainer_restarts(self) -> None:
        if self.rng.random() < 0.4:
            self.bench.settle()
            self._begin_other()

    def other_run_ends(self) -> None:
        """Episodes of both policies go on without it, until it is opened again."""
        if self.rng.random() < 0.3:
            self.bench.settle()
            self.bench.of("s", CloseRun("stopped"))
            for conn in [conn for conn, run in self.engines.items() if run == "s"]:
                del self.engines[conn]
                self.bench.handle(JobGone(f"job{conn}", 0, "ended", crashed=False))
            self.go_on()
            self.bench.settle()
            self._begin_other()

    def _begin_other(self) -> None:
        self.bench.begin("s", self.saved, ahead=8)
        self.bench.settle()
        self.bench.attempts["s"] = self.bench.router.core.runs["s"].attempt
        self.step, self.here = self.saved, {}
        self.bench.take(OTHER, DeliveredGroup)
        self.bench.announce("s", self.step)
        self._want()

    def settle_episode(self) -> None:
        if self.delivered and self.rng.random() < 0.3:
            self.bench.settle()
            self.player_step += 1
            ended = self.rng.choice(self.delivered)
            self.bench.settle_episodes(self.player_step, ended)
        elif self.asked and self.rng.random() < 0.1:
            self.bench.of("r", EndEpisode(self.rng.choice(self.asked)), GATEWAY, attempt=0)

    def lose(self) -> None:
        if self.engines:
            conn = self.rng.choice(sorted(self.engines))
            del self.engines[conn]
            self.bench.handle(JobGone(f"job{conn}", 0, "preempted", crashed=False))

    def restart(self) -> None:
        """The daemon dies with what is not durable; everybody connects again."""
        if self.rng.random() < 0.4:
            self.bench.restart()
            self.bench.settle()
            self.engines.clear()
            for run in "rs":
                self.bench.attempts[run] = self.bench.router.core.runs[run].attempt
                self.bench.attach_again(run)
            self._want()

    def commit(self) -> None:
        if self.bench.writes:
            self.bench.commit(self.rng.randint(1, len(self.bench.writes)))

    # ---- what they need

    def _is_whole(self, episode: str) -> bool:
        """Its turn of the other policy is complete in the ledger."""
        request = ask(episode, "s").request
        turn = next((t for t in self.bench.ledger.turns.values() if t.request == request), None)
        return turn is not None and any(
            row.group_id == turn.group_id and row.state == "complete"
            for row in self.bench.ledger.samples.values()
        )

    def _rows(self, group: int) -> list[Any]:
        return [self.bench.ledger.deliveries[one.delivery_id] for one in self.here[group].episodes]

    def _look(self) -> None:
        for group in self.bench.take(OTHER, DeliveredGroup):
            self.here[group.group_id] = group

    def _want(self) -> None:
        self._look()
        for group in self.bench.want(self.step + 1, 6, tuple(self.here)):
            self.here[group.group_id] = group

    def to_the_end(self) -> Watched:
        self.go_on()
        self.bench.settle()
        for run in "rs":
            self.bench.engine(conn := next(self.conns), run)
            self.engines[conn] = run
        for _ in range(12):
            self.bench.settle()
            self.generate()
            self.deliver()
            self.train()
            self.bench.tick(1.0)
        return self.bench


def play(seed: int, moves: int = MOVES, ledger: Ledger | None = None) -> Watched:
    one = Play(seed, ledger)
    names = (
        one.join,
        one.call,
        one.generate,
        one.deliver,
        one.again,
        one.train,
        one.other_trainer_restarts,
        one.go_on,
        one.other_run_ends,
        one.settle_episode,
        one.lose,
        one.restart,
        one.commit,
    )
    for _ in range(moves):
        one.rng.choices(names, (2, 6, 8, 5, 2, 5, 1, 3, 1, 2, 1, 2, 6))[0]()
    bench = one.to_the_end()
    requests = [t.request for t in bench.ledger.turns.values()]
    assert len(requests) == len(set(requests)), "a request was generated twice"
    if one.budget:
        check_budget(bench)
    return bench


@dataclass
class Had:
    """Of one episode of `r`, by both policies."""

    turns: int = 0
    tokens: int = 0


def check_budget(bench: Watched) -> None:
    """By the ledger's records, in their order: no turn may have more than was left when it was asked for, whichever run had it."""
    player = bench.router.core.runs["r"].id
    of: dict[int, Had] = {}  # episode, of either run
    by_name: dict[str, Had] = {}
    made: dict[int, rec.GroupCreated] = {}
    groups: dict[int, Had] = {}
    for record in bench.ledger.log:
        if isinstance(record, rec.EpisodeBegun):
            if record.run_id == player:
                by_name[record.name] = Had()
            of[record.episode_id] = by_name[record.name]
        elif isinstance(record, rec.GroupCreated):
            made[record.group_id] = record
        elif isinstance(record, rec.TurnBegun):
            had = groups[record.group_id] = of[record.episode_id]
            had.turns += 1
            assert had.turns <= BUDGET["turns"], "an episode has turns over its budget"
            group = made[record.group_id]
            most = group.n * json.loads(group.sampling)["max_tokens"]
            assert most <= BUDGET["tokens"] - had.tokens, "a turn may have more than is left: over its budget"
        elif isinstance(record, rec.ChunkAccepted):
            groups[bench.ledger.samples[record.sample_id].group_id].tokens += len(record.tokens) // 4


def counts(bench: Watched) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in bench.ledger.deliveries.values():
        found[row.state] = found.get(row.state, 0) + 1
    return found


def test_random_schedules_of_two_policies() -> None:
    taken = refused = 0
    for seed in range(SCHEDULES):
        bench = play(seed)
        taken, refused = taken + counts(bench).get("consumed", 0), refused + bench.refused()
    assert taken > 3 * SCHEDULES, "the schedules train hardly anything"
    assert refused > SCHEDULES, "the schedules reach hardly any budget"


@pytest.mark.long
@pytest.mark.parametrize("part", range(3))
def test_many_random_schedules_of_two_policies(part: int) -> None:
    for seed in range(SCHEDULES + part, MANY, 3):
        play(seed)


def over_a_real_ledger(seed: int, url: str) -> int:
    """A restarted daemon and a resumed trainer read what the database says. Returns how many deliveries a step took."""
    with closing(StoredLedger(url)) as ledger:
        bench = play(seed, ledger=ledger)
        told, known = ledger.snapshot(), Ledger.snapshot(ledger)
        assert (told.deliveries, told.next_delivery_id) == (known.deliveries, known.next_delivery_id)
        assert sorted(told.episodes, key=str) == sorted(known.episodes, key=str)
        assert sorted(told.turns, key=str) == sorted(known.turns, key=str)
        return counts(bench).get("consumed", 0)


def test_random_schedules_of_two_policies_hold_over_sqlite(tmp_path: Path) -> None:
    taken = [over_a_real_ledger(seed, f"sqlite:///{tmp_path / f'{seed}.sqlite3'}") for seed in range(6)]
    assert sum(taken) > 12, "the schedules train hardly anything"


@pytest.mark.postgres
def test_random_schedules_of_two_policies_hold_over_postgres(postgres: sa.URL) -> None:
    taken = [over_a_real_ledger(seed, new_database(postgres)) for seed in range(3)]
    assert sum(taken) > 6, "the schedules train hardly anything"


@pytest.mark.long
@pytest.mark.postgres
@pytest.mark.timeout(3600)
def test_many_random_schedules_of_two_policies_hold_over_both_databases(
    tmp_path: Path, postgres: sa.URL
) -> None:
    taken = 0
    for seed in range(2_000, 2_100):
        taken += over_a_real_ledger(seed, f"sqlite:///{tmp_path / f'{seed}.sqlite3'}")
        taken += over_a_real_ledger(seed, new_database(postgres))
    assert taken > 600, "the schedules train hardly anything"


def found_in(most: int = 40) -> str:
    """The words of the check that finds the bug first."""
    for seed in range(most):
        try:
            play(seed)
        except AssertionError as error:
            return str(error)
    return ""


def test_a_turn_that_is_delivered_to_the_wrong_policy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = deliveries._make

    def astray(core: Core, run: ActiveRun, other: ActiveRun, *rest: Any) -> None:
        honest(core, run, run if core.next_delivery_id % 3 == 0 else other, *rest)

    monkeypatch.setattr(deliveries, "_make", astray)
    assert "delivered to another" in found_in()


def test_a_turn_that_is_delivered_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted daemon that does not know what it has delivered."""
    honest = turns.restore_episodes

    def forgetful(core: Core, runs: Mapping[int, ActiveRun], snapshot: Any) -> Any:
        found = honest(core, runs, snapshot)
        for run in runs.values():
            for episode in run.turns.episodes.values():
                episode.delivered = False
        return found

    monkeypatch.setattr(turns, "restore_episodes", forgetful)
    assert "delivered twice" in found_in()


def test_a_budget_that_forgets_an_ended_policy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_keep_spent", lambda *_: None)
    assert "over its budget" in found_in()


def test_a_restart_that_forgets_what_an_ended_policy_had_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = turns.restore_episodes

    def forgetful(core: Core, runs: Mapping[int, ActiveRun], snapshot: Any) -> Any:
        found = honest(core, runs, snapshot)
        for run in runs.values():
            for episode in run.turns.episodes.values():
                episode.spent = EpisodeSpent()
        return found

    monkeypatch.setattr(turns, "restore_episodes", forgetful)
    assert "over its budget" in found_in(400)


def test_a_delivery_before_it_is_durable_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Core.send_durable

    def hasty(core: Core, conn: int | None, message: Message) -> None:
        (core.send if isinstance(message, DeliveredGroup) else lambda c, m: honest(core, c, m))(conn, message)

    monkeypatch.setattr(Core, "send_durable", hasty)
    assert "before it was durable" in found_in()
