"""A group spread over engines: how many tokens a verification makes with its siblings' tokens from the other engines, and without.

Played for `benchmarks/speculation.py --spread` in virtual time on recorded completions: the daemon's own router and payload store, the
workers' own sessions, the engines' own tables of drafts. An engine makes a pass every `pass_s` and then has of each of its samples what
the draft had right of the recorded tokens, and one more. Flushes (0.1 s) and the router's ticks (0.25 s) delay what siblings say. Not
played: what a pass of more positions costs, and the choice of a draft's length: it is `draft` wherever there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rollout.engines.speculation.groups import Groups, group_of
from scavenger.protocol.messages import (
    Call,
    EngineSpec,
    GroupSpec,
    OpenRun,
    PublishVersion,
    Sampling,
    SiblingTokens,
    SubmitGroups,
    WeightSource,
    WorkerHello,
    encode,
    pack_tokens,
)
from scavenger.protocol.worker import events as ev
from scavenger.protocol.worker.session import Session
from scavenger.router.core.events import (
    Committed,
    CoreTick,
    Fill,
    HelloReceived,
    HistoryRead,
    PeerIdentity,
    ReadHistory,
    RouterEvent,
    Send,
    TrainerCalled,
    Write,
)
from scavenger.router.core.machine import Router
from scavenger.router.core.payloads import PayloadStore
from scavenger.router.core.state import RouterLimits
from scavenger.router.edge.pipeline import checked, filled
from scavenger.router.edge.server import TICK_S
from tests.router.harness import OWNER, open_body

TRAINER, FIRST = 1, 10
#: (group, index of the sample in it) -> its tokens.
Completions = Mapping[tuple[int, int], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Spread:
    """`engines` of `slots` samples each, that make a pass every `pass_s` and draft `draft` tokens at most.

    `taken_after`: when so many samples are complete, the first engine is preempted with notice and a fresh one joins, which alone is
    counted then. 0: none is.
    """

    engines: int
    slots: int
    pass_s: float
    draft: int
    sibling_bytes_per_s: float
    taken_after: int = 0


@dataclass(slots=True)
class Found:
    """Of all samples: tokens behind each lease's first, passes that made them, bytes of messages with siblings' tokens."""

    tokens: int = 0
    passes: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    @property
    def mean(self) -> float:
        """Tokens a verification."""
        return self.tokens / max(self.passes, 1)


@dataclass(slots=True)
class _Running:
    answer: tuple[int, ...]
    length: int
    fresh: bool = True  # its next token comes with the prefill


@dataclass(slots=True)
class _Engine:
    conn: int
    who: PeerIdentity
    session: Session
    groups: Groups = field(default_factory=Groups)
    running: dict[int, _Running] = field(default_factory=dict)


class SpreadRun:
    """One step of a run: `prompts[i]` is the i-th group's, with as many samples as `completions` has of it."""

    def __init__(
        self,
        prompts: Sequence[tuple[int, ...]],
        completions: Completions,
        stops: tuple[int, ...],
        most: int,
        spread: Spread,
    ) -> None:
        self._completions, self._spread = completions, spread
        self.found = Found()
        self._now = 1000.0
        self._store = PayloadStore(1 << 30)
        limits = RouterLimits(sibling_bytes_per_s=spread.sibling_bytes_per_s)
        self._router = Router(limits, 1, self._store)
        self._engines: dict[int, _Engine] = {}
        self._calls = 0
        context = most + max(map(len, prompts))
        engine = EngineSpec("reference", "{}", "float32", spread.slots, context, speculation="group")
        source = (WeightSource("tcp://127.0.0.1:1", "key", b"token"),)
        self._call(msgspec.structs.replace(open_body(), engine=engine))
        self._call(PublishVersion(1, 0, b"root", b"manifest", source))
        for number in range(spread.engines):
            self._join(FIRST + number)
        how = Sampling(most, stop_token_ids=stops)
        sizes = [sum(group == number for group, _ in completions) for number in range(len(prompts))]
        groups = [
            GroupSpec(i, pack_tokens(prompt), n, how)
            for i, (prompt, n) in enumerate(zip(prompts, sizes, strict=True))
        ]
        self._call(SubmitGroups(1, 1, "train", tuple(groups)))
        self._left = len(completions)
        self._take_at = self._left - spread.taken_after if spread.taken_after else -1

    def play(self) -> Found:
        """To the last sample's end."""
        tick = began = self._now
        while self._left:
            self._now += self._spread.pass_s
            if self._now >= tick:
                tick += TICK_S
                self._handle(CoreTick())
            if self._left <= self._take_at:
                self._take_at = -1
                self.found = Found()
                self._feed(self._engines[FIRST], ev.Terminate("SIGTERM"))
                self._join(FIRST + self._spread.engines)
            for engine in self._engines.values():
                # All drafts of a pass are made before it, from what was said until then.
                drafts = {handle: self._draft(engine, handle) for handle in engine.running}
                deltas = [self._pass(engine, handle, draft) for handle, draft in drafts.items()]
                self._feed(engine, ev.Generated(tuple(deltas)) if deltas else ev.WorkerTick())
            if self._now - began > 1e5:
                raise SystemExit(f"{self._left} samples do not end")
        self.found.seconds = self._now - began
        return self.found

    def _draft(self, engine: _Engine, handle: int) -> tuple[int, ...]:
        one = engine.running[handle]
        most = 0 if one.fresh else len(one.answer) - one.length - 1
        return engine.groups.draft(handle, min(self._spread.draft, most)).tokens

    def _pass(self, engine: _Engine, handle: int, draft: tuple[int, ...]) -> ev.Delta:
        one = engine.running[handle]
        left = one.answer[one.length :]
        right = next((i for i, token in enumerate(draft) if token != left[i]), len(draft))
        made = left[: right + 1]
        engine.groups.extend(handle, made)
        if not one.fresh:
            self.found.tokens += len(made)
            self.found.passes += 1
        one.fresh, one.length = False, one.length + len(made)
        finish = None
        if one.length == len(one.answer):
            held = engine.session.work.leases.of_handle(handle)
            assert held is not None
            finish = "length" if one.length == held.lease.sampling.max_tokens else "stop"
            self._end(engine, handle)
            self._left -= 1
        zeros = (0.0,) * len(made)
        return ev.Delta(handle, made, zeros, zeros, finish)

    # ---------------------------------------------------------------- the daemon

    def _call(self, body: Any) -> None:
        self._calls += 1
        attempt = 0 if isinstance(body, OpenRun) else 1
        self._handle(TrainerCalled(TRAINER, OWNER, Call(self._calls, "r", attempt, body)))

    def _handle(self, event: RouterEvent) -> None:
        """And commit at once what it writes."""
        events = [event]
        while events:
            for action in self._router.handle(events.pop(0), self._now):
                match action:
                    case Write(ticket=ticket):
                        events.append(Committed(ticket))
                    case ReadHistory(run_id=run_id, attempt=attempt):
                        events.append(HistoryRead(run_id, attempt, ()))
                    case Send(conn=conn, message=message):
                        self._deliver(conn, message)
                    case Fill(conn=conn):
                        self._deliver(conn, filled(self._store, action))

    def _deliver(self, conn: int, message: Any) -> None:
        engine = self._engines.get(conn)
        if engine is None or message is None:
            return
        if isinstance(message, SiblingTokens):
            self.found.nbytes += len(encode(message))
        self._feed(engine, ev.Received(message))

    # ---------------------------------------------------------------- the engines

    def _join(self, conn: int) -> None:
        me = ev.WorkerIdentity("harvested", "r", f"s{conn}", 0, conn, f"n{conn}", 1, "reference", "0", 1)
        who = PeerIdentity("worker", f"key-{conn}", "r", f"job{conn}")
        engine = self._engines[conn] = _Engine(conn, who, Session(me, ev.WorkerLimits(), self._now))
        self._feed(engine, ev.Connected())

    def _feed(self, engine: _Engine, event: ev.WorkerEvent) -> None:
        events = [event]
        while events:
            for action in engine.session.handle(events.pop(0), self._now):
                match action:
                    case ev.SendMessage(message=WorkerHello() as hello):
                        self._handle(HelloReceived(engine.conn, engine.who, hello))
                    case ev.SendMessage(message=message):
                        self._handle(checked(engine.conn, message))
                    case ev.LoadWeights(weights=weights):
                        events.append(ev.Loaded(weights.version, b"root", 0.0, 0.0))
                    case ev.Add(request=request):
                        self._add(engine, request)
                    case ev.Abort(handles=handles):
                        for handle in handles:
                            self._end(engine, handle)
                    case ev.HearSiblings(said=said, over=over):
                        for one in said:
                            name = group_of(one.group.key, one.group.prompt)
                            engine.groups.hear(name, one.group.prompt, one.index, one.offset, one.token_ids)
                        for group in over:
                            engine.groups.drop(group_of(group.key, group.prompt))

    def _add(self, engine: _Engine, request: ev.Request) -> None:
        key = request.key
        answer = self._completions[key.prompt, key.index]
        engine.running[request.handle] = _Running(answer, len(request.accepted))
        name = group_of(key, request.prompt)
        engine.groups.enter(request.handle, name, key.index, request.prompt, request.accepted)

    def _end(self, engine: _Engine, handle: int) -> None:
        if engine.running.pop(handle, None) is not None:
            engine.groups.leave(handle)
