"""Random schedules of whole episodes: agents with tools, played by environment workers through gateways, while all of them die.

    a life of an episode  = naming.Calls, naming.ToolCalls and branches.rows_of, as a worker has them, around an agent of a few lines
    the daemon            = the router's core on the bench of `tests/router`: commits are late, it restarts, engines and gateways are lost
    tools                 = of the world: they answer otherwise each time, late, twice, or to nobody

What must hold is checked by name as it happens and at the end. Planted bugs show that each check finds its own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
from collections.abc import Generator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import msgspec
import pytest

from scavenger.protocol.messages import (
    AnswerTool,
    AskTool,
    CommitStep,
    Denied,
    EpisodeOutcome,
    Held,
    Lease,
    Ok,
    OpenTurn,
    Reply,
    ReplyBody,
    Sampling,
    ToolState,
    TurnAccepted,
    TurnTokens,
    WeightsLoaded,
    named_request,
    pack_tokens,
    unpack_tokens,
)
from scavenger.router.core import samples, tools
from scavenger.router.core.events import JobGone, RouterAction, Send
from scavenger.router.core.state import Episode, Sample
from scavenger.router.core.tables import Core
from tests.router.harness import root
from tests.router.test_turn_schedules import Played
from tests.router.test_turns import GATEWAY
from trainer.episodes import branches, naming
from trainer.episodes.naming import Calls, Setting, ToolCalls
from trainer.episodes.tools import digest_of

#: In CI, and with `--long`.
SCHEDULES, MANY = 2_000, 10_000
MOVES, TURNS, TOKENS = 24, 3, 3
EPISODES = ("e", "f")


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One message of a played episode, as `branches` wants it. `call`: of the model's, which call said it."""

    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    call: str = ""


def observed(tokens: tuple[int, ...]) -> Node:
    return Node(tokens, (False,) * len(tokens), ())


class World:
    """Tools with effects: what was asked of them, by episode, agent, content and number; each answer is another one."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.asked: dict[tuple[str, str], int] = {}

    def ask(self, life: str, call: str, *, external: bool) -> bytes:
        times = self.asked[life, call] = self.asked.get((life, call), 0) + 1
        assert times == 1 or not external, f"a tool was asked twice: {call} of {life}"
        return b"%d" % self.rng.randint(1, 9)


class Chronicle(Played):
    """The bench, which also checks what gateways are told of tools against the ledger as it is then."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[tuple[int, str], bytes] = {}  # (episode, call) -> the answer that somebody was shown

    def perform(self, actions: list[RouterAction]) -> None:
        for action in actions:
            if isinstance(action, Send) and isinstance(action.message, Reply):
                body = action.message.body
                if isinstance(body, ToolState) and body.state == "new":
                    asked = self.asking.get(action.message.id)
                    assert asked is None or self._recorded(asked) is not None, (
                        "a tool was to be asked before that was durable"
                    )
                if isinstance(body, ToolState) and body.state == "answered":
                    self._answered(self.asking.get(action.message.id), body.answer)
        super().perform(actions)

    asking: dict[int, AskTool | AnswerTool]

    def _recorded(self, body: AskTool | AnswerTool) -> Any:
        ids = {e.episode_id for e in self.ledger.episodes.values() if e.name == body.episode}
        return next(
            (c for c in self.ledger.tool_calls.values() if c.call == body.call and c.episode_id in ids), None
        )

    def _answered(self, body: AskTool | AnswerTool | None, answer: bytes) -> None:
        if body is None:
            return
        call = self._recorded(body)
        durable = call.answer if call is not None else None
        assert durable == answer, "a tool's answer was shown before it was durable"
        seen = self.told.setdefault((call.episode_id, call.call), answer)
        assert seen == answer, "a tool's recorded answer was replaced"


@dataclass(slots=True)
class Ask:
    """What a life waits for: a call that it repeats until it is answered."""

    body: OpenTurn | AskTool | AnswerTool
    id: int = 0
    conn: int = 0


@dataclass(slots=True)
class Life:
    """One life of an episode's environment and its agent. A generator plays it: it yields what it asks, and is sent the answers."""

    name: str
    setting: Setting
    external: bool
    asker: bytes
    world: World
    calls: Calls = field(default_factory=Calls)
    tools: ToolCalls = field(default_factory=ToolCalls)
    paths: list[list[Node]] = field(default_factory=list)
    used: list[str] = field(default_factory=list)
    ended: naming.End | None = None
    over: bool = False
    waits: Ask | None = None
    play: Generator[Any, Any, None] = field(init=False)

    def __post_init__(self) -> None:
        self.play = self._played()

    def _played(self) -> Generator[Any, Any, Any]:
        path = [observed((1, 2, len(self.name)))]
        for turn in range(TURNS):
            said = yield from self._model(path)
            if self.ended is not None:
                return
            path = [*path, said]
            if turn + 1 < TURNS:
                asked = said.token_ids[0] % 3
                for _ in range(asked):
                    answer = yield from self._tool(f"{said.token_ids[0] % 2}")
                    if self.ended is not None:
                        return
                    path = [*path, observed(tuple(answer))]
                path = [*path, observed((50 + turn,))]
                if said.token_ids[0] % 4 == 3:  # it writes its history anew after what it said last
                    self.paths.append(path)
                    path = [*path[: path.index(said) + 1], observed((70 + turn,))]
        self.paths.append(path)
        self.over = True

    def _model(self, path: list[Node]) -> Generator[Any, Any, Any]:
        call = self.calls.next(0)
        prompt = pack_tokens([token for node in path for token in node.token_ids])
        while True:
            request = named_request(self.name, call.name)
            reply = yield OpenTurn(self.name, request, sha256(prompt).digest(), prompt, 1, Sampling(TOKENS))
            if isinstance(reply, tuple):
                self.calls.answered(call)
                self.used.append(call.name)
                return Node(reply, (True,) * len(reply), (-0.5,) * len(reply), call.name)
            assert isinstance(reply, Denied), reply
            if reply.code == "ended":
                self.ended = naming.End(True, "ended", gone=True)
                return None
            assert reply.code == "conflict", reply
            assert not self.external, (
                f"an episode whose tools are asked once came to another call: {call.name}"
            )
            found = self.calls.conflict(call, self.setting)
            if isinstance(found, naming.End):
                self.ended = found
                return None
            call = self.calls.branched(call)

    def _tool(self, argument: str) -> Generator[Any, Any, Any]:
        digest = digest_of("s", "t", argument)
        number = self.tools.take(0, digest)
        call = f"0.{digest}.{number}"
        if self.external:
            state = yield AskTool(self.name, call, "s.t", self.asker)
            if isinstance(state, Denied) or state.state == "open":
                self.ended = naming.End(False, "in doubt", final=True)
                return b""
            answer = state.answer
            if state.state == "new":
                mine = self.world.ask(self.name, call, external=True)
                yield "the tool works"
                state = yield AnswerTool(self.name, call, mine)
                if isinstance(state, Denied):
                    self.ended = naming.End(True, "ended", gone=True)
                    return b""
                answer = state.answer
        else:
            answer = self.world.ask(self.name, call, external=False)
        self.tools.give_back(0, digest, number, shown=True)
        return answer


class Schedule:
    """One schedule: what is there, and the moves that chance makes of it."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.bench = bench = Chronicle()
        bench.asking = {}
        bench.open()
        bench.publish()
        bench.auto = False
        self.world = World(rng)
        self.external = seed % 2 == 0
        setting: Setting = "branch" if self.external else rng.choice(("branch", "restart", "fail"))
        self.setting = setting
        self.leases: dict[int, dict[int, tuple[Lease, int]]] = {}
        self.conns = itertools.count(11)
        self.gateway = GATEWAY
        self.held: dict[
            bytes, dict[int, tuple[bytes, str]]
        ] = {}  # a gateway's memory: request -> sample -> tokens, finish
        self.read: dict[int, int] = {}  # how much of each connection's mail was read
        self.replies: dict[int, ReplyBody] = {}
        self.numbers = dict.fromkeys(EPISODES, 0)
        self.lives = {name: self._life(name) for name in EPISODES}
        self.earlier: list[str] = []
        self.strays: list[AnswerTool] = []  # answers of workers that are gone, on their way
        self.replays = 0

    def _life(self, base: str) -> Life:
        name = f"{base}.{self.numbers[base]}"
        return Life(name, self.setting, self.external, self.rng.randbytes(16), self.world)

    # ---------------------------------------------------------------- moves

    def join(self) -> None:
        conn = next(self.conns)
        self.bench.hello(conn)
        self.bench.settle()
        self.bench.say(conn, WeightsLoaded(1, root(1)))
        self.leases[conn] = {}

    def chunk(self) -> None:
        bench, rng = self.bench, self.rng
        for conn, held in self.leases.items():
            for lease in bench.leases(conn):
                held[lease.sample_id] = (lease, len(lease.accepted) // 4)
            for sample_id, (lease, sent) in list(held.items()):
                end = min(lease.sampling.max_tokens, sent + rng.randint(0, 3))
                if end > sent:
                    bench.chunk(conn, lease, sent, end - sent)
                    held[sample_id] = (lease, end)
                if end == lease.sampling.max_tokens:
                    del held[sample_id]

    def step(self) -> None:
        self._step(self.rng.choice(EPISODES))

    def _step(self, base: str) -> None:
        """A life makes its next call, repeats one, or takes an answer that is here."""
        life = self.lives[base]
        if life.over:
            return
        if life.ended is not None:
            if life.ended.again:  # another life, under another name
                self.earlier.append(life.name)
                self.numbers[base] += 1
                self.lives[base] = self._life(base)
            return
        self._read()
        if life.waits is None:
            self._sent(life, next(life.play, None))
            return
        answer = self._answer(life.waits)
        if answer is None:
            if self.rng.random() < 0.4:  # again: calls may be repeated
                self._call(life.waits)
            return
        life.waits = None
        with contextlib.suppress(StopIteration):
            self._sent(life, life.play.send(answer))

    def _sent(self, life: Life, asked: Any) -> None:
        if asked == "the tool works":
            if (
                self.rng.random() < 0.2
            ):  # its worker dies before it answers: the answer may come late, or never
                following = next(life.play)
                assert isinstance(following, AnswerTool)
                self.strays += [following] * self.rng.randint(0, 3)
                self._lose(life.name.partition(".")[0])
                return
            asked = next(life.play)
        if asked is None:
            return
        life.waits = Ask(asked)
        self._call(life.waits)

    def _call(self, ask: Ask) -> None:
        body = ask.body
        if isinstance(body, OpenTurn):
            have = self.held.get(body.request, {})
            body = msgspec.structs.replace(body, have=(len(have.get(0, (b"", ""))[0]) // 4,))
        ask.conn, ask.id = self.gateway, self.bench.call_id + 1
        if isinstance(body, AskTool | AnswerTool):
            self.bench.asking[ask.id] = body
        self.bench.call(body, conn=self.gateway, attempt=0)

    def _answer(self, ask: Ask) -> Any:
        reply = self.replies.get(ask.id)
        if isinstance(reply, Denied | ToolState):
            return reply
        if isinstance(reply, TurnAccepted) and isinstance(ask.body, OpenTurn):
            tokens, finish = self.held.get(ask.body.request, {}).get(0, (b"", ""))
            return tuple(unpack_tokens(tokens)) if finish else None
        return None

    def _read(self) -> None:
        mail = self.bench.mail.get(self.gateway, [])
        for message in mail[self.read.get(self.gateway, 0) :]:
            if isinstance(message, Reply):
                self.replies[message.id] = message.body
            elif isinstance(message, TurnTokens) and message.error is None:
                held = self.held.setdefault(message.request, {})
                tokens, finish = held.get(message.index, (b"", ""))
                if message.offset <= len(tokens) // 4:
                    tokens = tokens[: 4 * message.offset] + message.tokens
                    held[message.index] = (tokens, message.finish or finish)
        self.read[self.gateway] = len(mail)

    def lose_environment(self) -> None:
        base = self.rng.choice(EPISODES)
        if not self.lives[base].over and self.lives[base].ended is None:
            self._lose(base)

    def _lose(self, base: str) -> None:
        """Its worker dies. Another plays the episode again, under its name; what was asked may still be answered."""
        self.replays += 1
        self.lives[base] = self._life(base)

    def lose_gateway(self) -> None:
        """What it knew is gone; its successor is asked the same again."""
        self.gateway += 1
        self.held, self.replies = {}, {}

    def stray(self) -> None:
        """A late answer of a worker that is gone, perhaps the second one."""
        if self.strays:
            body = self.strays.pop(self.rng.randrange(len(self.strays)))
            if self.rng.random() < 0.5:
                body = AnswerTool(body.episode, body.call, body.answer + b"0")  # or another one
            self.bench.asking[self.bench.call_id + 1] = body
            self.bench.call(body, conn=self.gateway, attempt=0)

    def lose_engine(self) -> None:
        if self.leases:
            conn = self.rng.choice(list(self.leases))
            del self.leases[conn]
            self.bench.handle(JobGone(f"job{conn}", 0, "preempted", crashed=False))

    def confuse_engine(self) -> None:
        """One registers again, says that it holds nothing, and goes on with what it was given before."""
        if self.leases:
            conn = self.rng.choice(list(self.leases))
            self.bench.hello(conn, loaded=1, loaded_root=root(1))

    def restart(self) -> None:
        """The daemon dies with what was not committed; its successor has what the ledger has."""
        if self.rng.random() > 0.4:
            return
        bench = self.bench
        bench.restart()
        bench.settle()
        self.read = {}
        self.lose_gateway()  # its connection is gone, and what it had was of a daemon that knew more
        for conn, held in list(self.leases.items()):
            named = tuple(Held(i, lease.epoch, sent) for i, (lease, sent) in held.items())
            if self.rng.random() < 0.4:
                named = ()
            bench.hello(conn, held=named, loaded=1, loaded_root=root(1))
        bench.settle()

    def commit(self) -> None:
        if self.bench.writes:
            self.bench.commit(self.rng.randint(1, len(self.bench.writes)))

    # ---------------------------------------------------------------- all of it

    def run(self) -> None:
        moves = (
            self.join,
            self.chunk,
            self.step,
            self.lose_environment,
            self.lose_gateway,
            self.stray,
            self.lose_engine,
            self.confuse_engine,
            self.restart,
            self.commit,
        )
        for _ in range(MOVES):
            self.rng.choices(moves, (2, 7, 16, 2, 1, 4, 2, 2, 2, 8))[0]()
        self.bench.settle()
        faults = (
            self.lose_environment,
            self.lose_gateway,
            self.stray,
            self.stray,
            self.lose_engine,
            self.confuse_engine,
        )
        for number in range(
            200
        ):  # what is open comes to its end, all but losses in good order, and then without any
            if all(
                life.over or (life.ended is not None and not life.ended.again) for life in self.lives.values()
            ):
                break
            if number < 30 and self.rng.random() < 0.35:
                self.rng.choice(faults)()
            if not self.leases or number % 20 == 0:  # one that says nothing for long is lost
                self.join()
            for base in EPISODES:
                self._step(base)
            self.chunk()
            self.bench.settle()
            self.bench.tick(1.0, step=1.0)
        self._check()

    def _check(self) -> None:
        bench = self.bench
        requests = [turn.request for turn in bench.ledger.turns.values()]
        assert len(requests) == len(set(requests)), "a turn was generated twice"
        bench.attach()
        bench.settle()
        outcomes = []
        for life in self.lives.values():
            assert life.over or life.ended is not None, f"episode {life.name} came to no end"
            taken = self._trained(life) if life.over else ()
            outcomes.append(
                EpisodeOutcome(life.name, "consumed" if life.over else "masked", 1.0, 0.5, "", "v", taken)
            )
        outcomes += [EpisodeOutcome(name, "masked", 0.0, 0.0, "another life") for name in self.earlier]
        for _ in range(2):  # the commit may be repeated
            reply = bench.call(CommitStep(1, 1, "train", (), {}, tuple(outcomes)))
            bench.settle()
            reply = reply or bench.answer(bench.call_id)
            assert isinstance(reply, Ok), reply
        ended = [row.state for i, row in sorted(bench.ledger.samples.items())]
        used = sum(len(outcome.used) for outcome in outcomes)
        assert ended.count("consumed") == used, (
            f"{ended.count('consumed')} turns are consumed, {used} were trained"
        )
        assert "open" not in ended, "a turn is open after its episode ended"

    def _trained(self, life: Life) -> tuple[bytes, ...]:
        """Each turn of the episode is trained once, with the tokens that the ledger has of it."""
        rows = branches.rows_of(life.paths)
        trained: list[int] = []
        for row in rows:
            mask = row.mask or b"\1" * (len(row.completion) // 4)
            trained += [token for token, one in zip(unpack_tokens(row.completion), mask, strict=True) if one]
        calls = [call.name for _, call in sorted(life.calls.taken.items())]
        wanted: list[int] = []
        for name in calls:
            request = named_request(life.name, name)
            group = next(t.group_id for t in self.bench.ledger.turns.values() if t.request == request)
            wanted += [
                t
                for row in self.bench.ledger.samples.values()
                if row.group_id == group
                for t in unpack_tokens(row.tokens)
            ]
        assert len(trained) <= len(wanted), (
            f"a branch is trained twice: {len(trained)} tokens of {len(wanted)}"
        )
        assert sorted(trained) == sorted(wanted), "what is trained is not what the ledger has"
        return tuple(named_request(life.name, name) for name in calls)


def play(seed: int) -> Schedule:
    schedule = Schedule(seed)
    schedule.run()
    return schedule


PARTS = 8


def played(seeds: range) -> None:
    found = [play(seed) for seed in seeds]
    whole = sum(life.over for schedule in found for life in schedule.lives.values())
    doubts = sum(
        life.ended is not None and life.ended.final for schedule in found for life in schedule.lives.values()
    )
    assert whole > len(found), "hardly any episode comes to its end"
    assert sum(schedule.replays for schedule in found) > len(found) / 2, "hardly any environment is lost"
    assert sum(life.name[-1] != "0" for schedule in found for life in schedule.lives.values()) > 0, (
        "none begins anew"
    )
    assert doubts > 0, "no tool's call is ever in doubt"
    assert sum(len(life.paths) > 1 for schedule in found for life in schedule.lives.values()) > 0, (
        "none branches"
    )


@pytest.mark.parametrize("part", range(PARTS))
def test_random_schedules_of_whole_episodes(part: int) -> None:
    each = SCHEDULES // PARTS
    played(range(part * each, (part + 1) * each))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_many_more_random_schedules_of_whole_episodes(part: int) -> None:
    each = (MANY - SCHEDULES) // PARTS
    played(range(SCHEDULES + part * each, SCHEDULES + (part + 1) * each))


# ---------------------------------------------------------------- planted bugs


def _found(most: int = 300) -> str:
    """The words of the check that finds the bug first."""
    for seed in range(most):
        try:
            play(seed)
        except AssertionError as error:
            return str(error)
    return ""


def test_a_tool_that_is_asked_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks is told to ask, as long as no answer is known."""
    honest = tools.asked

    def forgetful(core: Core, run: Any, episode: Episode, body: AskTool) -> ReplyBody:
        found = honest(core, run, episode, body)
        return ToolState("new") if isinstance(found, ToolState) and found.state == "open" else found

    monkeypatch.setattr(tools, "asked", forgetful)
    assert "a tool was asked twice" in _found()


def test_a_tool_that_is_asked_before_that_is_durable_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Core.send_durable

    def at_once(core: Core, conn: int | None, message: Any) -> None:
        early = isinstance(message, Reply) and isinstance(message.body, ToolState)
        (core.send if early else honest.__get__(core))(conn, message)

    monkeypatch.setattr(Core, "send_durable", at_once)
    assert "before" in _found()


def test_an_answer_that_is_replaced_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = tools.answered

    def obliging(core: Core, run: Any, episode: Episode, body: AnswerTool) -> ReplyBody:
        found = honest(core, run, episode, body)
        return ToolState("answered", body.answer) if isinstance(found, ToolState) else found

    monkeypatch.setattr(tools, "answered", obliging)
    assert "answer was" in _found()


def test_a_turn_that_is_answered_before_it_is_durable_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = samples.finish

    def at_once(core: Core, sample: Sample, reason: str) -> None:
        honest(core, sample, reason)
        turn = sample.group.turn
        for conn in turn.followers if turn is not None else ():
            assert turn is not None
            end = TurnTokens(turn.request, sample.id, sample.index, sample.durable, b"", b"", b"", 1, reason)
            core.send(conn, end)

    monkeypatch.setattr(samples, "finish", at_once)
    assert "before it was durable" in _found()


def test_a_stale_epoch_s_stream_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = samples.refuse_chunk

    def leaky(core: Core, worker: Any, chunk: Any, sample: Sample | None, fault: Any) -> None:
        turn = sample.group.turn if sample is not None else None
        for conn in turn.followers if turn is not None else ():
            assert turn is not None
            assert sample is not None
            tokens = b"\1\1\1\1" * max(1, len(chunk.tokens) // 4)
            core.send(
                conn, TurnTokens(turn.request, sample.id, sample.index, chunk.offset, tokens, b"", b"", 1)
            )
        honest(core, worker, chunk, sample, fault)

    monkeypatch.setattr(samples, "refuse_chunk", leaky)
    assert "were durable" in _found()


def test_a_branch_that_is_trained_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = branches._row
    monkeypatch.setattr(branches, "_row", lambda path, seen, earned: honest(path, set(), earned))
    assert "a branch is trained twice" in _found()


def test_a_life_that_names_its_calls_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools' calls that are named by the life that asks, and not by what is asked."""
    lives = itertools.count()
    honest = ToolCalls.take

    def otherwise(calls: ToolCalls, agent: int, digest: str) -> int:
        if not calls.shown and not calls.held:
            calls.shown[agent, digest] = set(range(next(lives)))
        return honest(calls, agent, digest)

    monkeypatch.setattr(ToolCalls, "take", otherwise)
    assert "came to another call" in _found()


if __name__ == "__main__":
    for one in range(int(os.environ.get("SEEDS", "100"))):
        play(one)
