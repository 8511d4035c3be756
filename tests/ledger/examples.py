"""A small, consistent history with every kind of record, and a writer that a test can wait for."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

from scavenger.ledger import records as r
from scavenger.ledger.read.reader import rows
from scavenger.ledger.store import open_engine, upgrade
from scavenger.ledger.write.writer import Backoff, Writer, WriterState
from scavenger.protocol.messages import pack_logprobs, pack_tokens

CONFIG = json.dumps({"checkpoint": {"keep": 2}})
T0 = 1_790_000_000.0
WAIT_S = 30.0


def chunk(
    sample_id: int, epoch: int, offset: int, n: int, worker_id: int, version: int = 1, at: float = T0
) -> r.ChunkAccepted:
    """`n` tokens whose ids say where they belong."""
    tokens = pack_tokens(sample_id * 1000 + offset + i for i in range(n))
    logprobs = pack_logprobs(-0.5 - offset - i for i in range(n))
    routing = routed(offset, n)
    return r.ChunkAccepted(
        sample_id, epoch, offset, tokens, logprobs, logprobs, version, worker_id, at, routing
    )


def routed(offset: int, n: int) -> bytes:
    """Three bytes a token that say its place."""
    return bytes(part for i in range(offset, offset + n) for part in (i % 256, 1, 2))


def apart(n: int) -> bytes:
    """Differences of so many tokens: a quarter of a nat more with each, one below zero and the next above."""
    return struct.pack(f"<{n}e", *((-1) ** (i + 1) * i / 4 for i in range(n)))


def answer(sample_id: int, n: int) -> bytes:
    """The tokens that `chunk` gives a sample from the start."""
    return pack_tokens(sample_id * 1000 + i for i in range(n))


def group(
    group_id: int, first: int, n: int, step: int, version: int, retry: int = 0, purpose: str = "train"
) -> r.GroupCreated:
    return r.GroupCreated(
        group_id,
        1,
        purpose,
        step,
        group_id % 10,
        retry,
        version,
        pack_tokens([7, 8, 9]),
        n,
        first,
        '{"max_tokens": 64}',
        "{}",
        T0,
    )


def prologue() -> list[r.Record]:
    """A run with an attempt, two versions, one harvested and one reserved worker."""
    return [
        r.RunCreated(
            1, "sorting", "owner", 17, CONFIG, '{"name": "reference"}', "/models/tokenizer.json", T0
        ),
        r.AttemptGranted(1, 1, "login1", 100, 0, CONFIG, '{"name": "reference", "max_batch": 4}', T0),
        r.VersionPublished(1, 1, 0, 1, b"root1", b"manifest1", 4096, T0),
        r.JobIntended("i1", 1, "scavenge", 1, "key1", T0, "n3"),
        r.JobSubmitted("i1", 501, T0 + 1),
        r.JobObserved("i1", 501, "PENDING", "", "Priority", "", 0, T0 + 2),
        r.JobObserved("i1", 501, "RUNNING", "", "", "n3", 0, T0 + 3),
        r.AllocationStarted("i1", 0, 501, "n3", 1, T0 + 3),
        r.WorkerJoined(1, 1, "harvested", "i1", "s1", 0, 501, "n3", 1, "reference", T0 + 4),
        r.WorkerJoined(2, 1, "reserved", "", "s2", 0, 100, "n0", 1, "reference", T0 + 4),
        r.ClusterPolled(5, 1, 6, 4, 0, 0, T0 + 5),
        r.TrainingJobStarted(1, 100, "ann", 1, 2, T0 - 10, "physics"),
        r.OtherUserWaits(900, "bob", "gpu", 4, T0 + 2, T0 + 3, T0 + 5),
        r.Decision("harvest", "submit", "i1", "5 idle GPUs, demand for 1", '{"idle": 5}', T0),
        r.Event("chunk_refused", 1, "sample 11", "stale epoch 1", "{}", T0 + 5),
    ]


def came_back() -> list[r.Record]:
    """Worker 1 is silent for too long and given up; its process goes on, joins again as worker 3, and is preempted."""
    return [
        r.WorkerLeft(1, "silent for 12 s", False, 0, 0, 0, T0 + 19),
        r.WorkerJoined(3, 1, "harvested", "i1", "s3", 0, 501, "n3", 1, "reference", T0 + 20),
        r.WorkerLeft(3, "SIGTERM", True, 2, 7, 0, T0 + 50),
        r.AllocationEnded("i1", 0, "preempted", T0 + 52),
    ]


def moved_group(group_id: int = 10, first: int = 11, step: int = 1, version: int = 1) -> list[r.Record]:
    """A group of two: the first sample loses worker 1 after 5 tokens and is finished by worker 2; then both are consumed."""
    a, b = first, first + 1
    return [
        group(group_id, first, 2, step, version),
        r.LeaseGranted(a, 1, 1, version, 0, T0 + 6),
        r.LeaseGranted(b, 1, 2, version, 0, T0 + 6),
        chunk(a, 1, 0, 3, 1, version, T0 + 7),
        chunk(b, 1, 0, 4, 2, version, T0 + 7),
        chunk(a, 1, 3, 2, 1, version, T0 + 7.5),
        r.LeaseEnded(a, 1, "worker left", 5, 2, T0 + 8),
        r.LeaseGranted(a, 2, 2, version, 5, T0 + 9),
        chunk(a, 2, 5, 4, 2, version, T0 + 9.5),
        r.LeaseEnded(a, 2, "finished", 9, 0, T0 + 10),
        r.SampleFinished(a, "stop", 9, T0 + 10),
        r.LeaseEnded(b, 1, "finished", 4, 0, T0 + 10),
        r.SampleFinished(b, "length", 4, T0 + 10),
    ]


def preempted() -> list[r.Record]:
    """Worker 1 goes with notice; its job is requeued."""
    return [
        r.WorkerLeft(1, "goodbye", True, 1, 5, 2, T0 + 8),
        r.JobObserved("i1", 501, "PENDING", "REQUEUED", "BeginTime", "", 1, T0 + 9),
        r.AllocationEnded("i1", 0, "preempted", T0 + 9),
        r.AllocationCorrected("i1", 0, "n3", 1, T0 + 3, T0 + 9, "preempted", T0 + 10),
        r.OtherUserWaited(900, T0 + 2, "started", T0 + 9, 1, 4.0, T0 + 9),
        r.EngineDied("n7", 1, "i1", 501, 1, 70, "FAILED (NonZeroExitCode) after 2 s", 2.0, T0 + 10),
        r.NodeQuarantined("n7", "3 engines died on it", T0 + 610, T0 + 10),
        r.NodeReleased("n7", T0 + 12),
        r.TrainingJobEnded(1, 100, T0 + 12),
    ]


def consumed(
    group_id: int = 10, first: int = 11, step: int = 1, attempt: int = 1, at: float = T0 + 11
) -> list[r.Record]:
    """The group is delivered at `at`; a second later its step is committed."""
    return [
        r.GroupDelivered(group_id, attempt, at),
        r.SampleEnded(first, "consumed", "", step, attempt, 1.0, 0.7, at + 1),
        r.SampleEnded(first + 1, "consumed", "", step, attempt, 0.25, -0.7, at + 1),
        r.StepCommitted(1, step, "train", attempt, 1, '{"loss": 0.5}', at + 1),
    ]


def epilogue() -> list[r.Record]:
    """A checkpoint, a lost attempt that replays step 1, its end, and the kinds that are left."""
    return [
        r.VersionPublished(1, 2, 1, 1, b"root2", b"manifest2", 4096, T0 + 13),
        r.StepsRewound(1, 2, 0, T0 + 20),
        r.AttemptGranted(1, 2, "login2", 101, 0, CONFIG, '{"name": "reference"}', T0 + 20),
        r.VersionPublished(1, 3, 0, 2, b"root1", b"manifest1", 4096, T0 + 20),
        r.SampleReopened(11, 2, T0 + 20),
        r.SampleReopened(12, 2, T0 + 20),
        r.GroupAdopted(10, 3, T0 + 21),
        r.GroupDeferred(10, 1, T0 + 21),
        *consumed(attempt=2, at=T0 + 21),
        r.DifferencesRecorded(11, 1, 2, 9, 0.5, apart(9)),
        r.CheckpointRecorded(1, 1, 3, b"root3", "/ckpt/1", T0 + 22),
        r.JobChangedHands("i0", 1, "key0", 1, T0, T0 + 22),  # of a job that a restored ledger does not have
        r.JobEnded("i1", "CANCELLED", "no demand", T0 + 23),
        r.WorkerLeft(2, "drained", True, 0, 0, 0, T0 + 23),
        r.RunEnded(1, "finished", "", T0 + 24),
        r.ContentsReduced(1, 2, (12,), "compacted", T0 + 25),
        r.Heartbeat(T0 + 26),
    ]


def moved_at_once() -> list[r.Record]:
    """A sample is taken from one worker and leased to another in one event; then its run is over."""
    return [
        group(60, 61, 1, 2, 3),
        r.LeaseGranted(61, 1, 1, 3, 0, T0 + 23),
        r.LeaseMoved(61, 1, "node lost", 0, 1, 2, 3, T0 + 23.5),
        r.LeaseEnded(61, 2, "surplus", 0, 0, T0 + 24),
        r.SampleEnded(61, "surplus", "the run is over", 0, 0, None, None, T0 + 24),
    ]


def evaluated() -> list[r.Record]:
    """The evaluation after step 1: two completions of a held-out prompt, of which the first is right."""
    ended: list[r.Record] = []
    for sample, finish, reward in ((91, "stop", 1.0), (92, "length", 0.0)):
        ended += [
            r.LeaseGranted(sample, 1, 2, 1, 0, T0 + 13),
            chunk(sample, 1, 0, 4, 2, at=T0 + 13.5),
            r.LeaseEnded(sample, 1, "finished", 4, 0, T0 + 14),
            r.SampleFinished(sample, finish, 4, T0 + 14),
            r.SampleEnded(sample, "evaluated", "", 1, 1, reward, 0.0, T0 + 15),
        ]
    metrics = '{"reward": 0.5, "pass@1": 0.5, "seconds": 3.0}'
    return [
        group(90, 91, 2, 1, 1, purpose="eval"),
        *ended,
        r.StepCommitted(1, 1, "eval", 1, 1, metrics, T0 + 15),
    ]


def everything() -> list[list[r.Record]]:
    """The whole history, as the submissions of a daemon."""
    return [prologue(), moved_group(), preempted(), consumed(), epilogue(), moved_at_once(), an_episode()]


def an_episode() -> list[r.Record]:
    """An episode of which the first group is a turn, begun and ended."""
    return [
        r.EpisodeBegun(1, 1, "sorting-1", T0 + 20),
        r.TurnBegun(
            10, 1, 1, 1, b"\1" * 32, b"\2" * 32, 0, 0, 3, sha256(pack_tokens([7, 8, 9])).digest(), T0 + 20
        ),
        r.TurnSampleFinished(11, sha256(pack_tokens([7, 8, 9]) + answer(11, 9)).digest()),
        r.TurnRewarded(10, 0.25),
        r.ToolAsked(1, 1, 1, "0.ab.0", "mail.send", b"\3" * 16, T0 + 20.25),
        r.ToolAnswered(1, b'{"content":[]}', T0 + 20.75),
        r.ToolAsked(2, 1, 1, "0.ab.1", "mail.send", b"\3" * 16, T0 + 20.5),
        r.Delivered(1, 1, 1, 1, 1, 1, 0, 0, 0.5, 1, b"\x90", "due", "", T0 + 20.8),
        r.TurnDelivered(10, 1, 1),
        r.DeliveryTaken(1, "consumed", "", 1, 1, 0.25, T0 + 20.9),
        r.DeliveredTurnTaken(10, -0.5),
        r.DeliveryReopened(1, 2, T0 + 20.95),
        r.DeliveryEnded(1, "dropped", "the run finished", T0 + 21),
        r.EpisodeSpent(1, 2, 17),
        r.EpisodeEnded(1, "ended", "its gateway ended it", T0 + 21),
    ]


class Witness:
    """A writer with what it reported, and conditions to wait for."""

    def __init__(self, url: str, now: Callable[[], float] = time.time, **options: Any) -> None:
        self.acked: list[int] = []
        self.states: list[tuple[WriterState, str]] = []
        self._changed = threading.Condition()
        self.writer = Writer(
            url,
            "host",
            1,
            "test",
            now,
            on_commit=self._acked,
            on_state=self._state,
            backoff=Backoff(first_s=0.01, most_s=0.05),
            **options,
        )

    def _acked(self, ticket: int) -> None:
        with self._changed:
            self.acked.append(ticket)
            self._changed.notify_all()

    def _state(self, state: WriterState, reason: str) -> None:
        with self._changed:
            self.states.append((state, reason))
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S), (self.acked, self.states)

    def wait_ticket(self, ticket: int) -> None:
        self.wait(lambda: bool(self.acked) and self.acked[-1] >= ticket)

    def wait_state(self, state: WriterState) -> None:
        self.wait(lambda: bool(self.states) and self.states[-1][0] is state)


@contextmanager
def witness(url: str, **options: Any) -> Iterator[Witness]:
    """A started writer; closed at the end, without draining."""
    found = Witness(url, **options)
    found.writer.start()
    try:
        yield found
    finally:
        found.writer.close(drain=False, timeout=10)


def written(url: str, submissions: Sequence[Sequence[r.Record]]) -> None:
    """Make the ledger hold these submissions."""
    upgrade(url)
    with witness(url) as w:
        for ticket, records in enumerate(submissions):
            w.writer.submit(ticket, records)
        w.wait(lambda: bool(w.states) or (bool(w.acked) and w.acked[-1] == len(submissions) - 1))
        assert not w.states, w.states


def event(n: int, size: int = 0) -> r.Event:
    return r.Event("test", 0, str(n), "x" * size, "{}", float(n))


def subjects(url: str) -> list[int]:
    """The events in the ledger, in the order of their rows."""
    engine = open_engine(url)
    try:
        return [
            int(subject)
            for (subject,) in rows(engine, "SELECT subject FROM events WHERE kind = 'test' ORDER BY id").rows
        ]
    finally:
        engine.dispose()
