"""A session that a test talks to as daemon, engine and clock at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from scavenger.protocol import messages
from scavenger.protocol.messages import Chunk, EngineSpec, Lease, SampleKey, Sampling, pack_tokens
from scavenger.protocol.worker.events import (
    Connected,
    Delta,
    Generated,
    Loaded,
    Received,
    SendMessage,
    WorkerAction,
    WorkerEvent,
    WorkerIdentity,
    WorkerLimits,
    WorkerPhase,
    WorkerTick,
)
from scavenger.protocol.worker.session import Session

ME = WorkerIdentity("harvested", "run", "5e55", 0, 17, "node1", 1, "reference", "0", 99)
SPEC = EngineSpec("reference", "{}", "float64", 8, 128)
WELCOME = messages.Welcome(3, 1, "run", SPEC, heartbeat_s=1.0, flush_ms=100.0, flush_tokens=4)
LIMITS = WorkerLimits()
A = TypeVar("A", bound=WorkerAction)


def lease(
    sample: int,
    epoch: int = 1,
    version: int = 7,
    accepted: Sequence[int] = (),
    most: int = 10,
    stop: tuple[int, ...] = (),
    purpose: str = "train",
) -> Lease:
    sampling = Sampling(most, stop_token_ids=stop)
    return Lease(
        sample,
        epoch,
        version,
        pack_tokens((1, 2)),
        pack_tokens(accepted),
        sampling,
        5,
        SampleKey(purpose, 0, sample, 0),
    )


class Talk:
    """A session with a clock; remembers what it asked for."""

    def __init__(self, limits: WorkerLimits = LIMITS) -> None:
        self.now = 100.0
        self.session = Session(ME, limits, self.now)
        self.log: list[WorkerAction] = []

    def do(self, event: WorkerEvent) -> list[WorkerAction]:
        actions = self.session.handle(event, self.now)
        self.log += actions
        return actions

    def hear(self, message: messages.ToWorker) -> list[WorkerAction]:
        return self.do(Received(message))

    def wait(self, seconds: float) -> list[WorkerAction]:
        """Let time pass, with a Tick at each deadline."""
        end, made = self.now + seconds, []
        while (due := self.session.next_deadline()) <= end and self.session.phase is not WorkerPhase.GONE:
            self.now = max(due, self.now)
            made += self.do(WorkerTick())
        self.now = end
        return made

    def made(self, sample: int, *tokens: int, finish: str | None = None) -> list[WorkerAction]:
        held = self.session.work.leases.find(sample)
        assert held is not None
        logprobs = tuple(-float(t) for t in tokens)
        return self.do(Generated((Delta(held.handle, tokens, logprobs, logprobs, finish),)))

    def joined(self, version: int = 7) -> Talk:
        self.do(Connected())
        self.hear(WELCOME)
        self.hear(messages.UseWeights(version, b"", ()))
        self.do(Loaded(version, b"root", 0.1, 0.1))
        self.log.clear()
        return self

    def assign(self, *leases: Lease) -> list[WorkerAction]:
        return self.hear(messages.Assign(leases))


def of(kind: type[A], actions: Iterable[WorkerAction]) -> list[A]:
    return [a for a in actions if isinstance(a, kind)]


def sent(actions: Iterable[WorkerAction]) -> list[messages.WorkerMessage]:
    return [a.message for a in of(SendMessage, actions)]


def chunks(actions: Iterable[WorkerAction]) -> list[Chunk]:
    return [c for m in sent(actions) if isinstance(m, messages.Chunks) for c in m.chunks]
