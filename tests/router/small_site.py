"""A small site in virtual time for policies: real simulated engines (`EngineBatch`), a trainer of whole groups, and one run's views.

Knows the true lengths and hands policies what a daemon would: lengths so far, facts. Everything is decided by the policy given; the window
too, or `window_s` where it decides none. As with the live trainer, reserved engines wake when no harvested one is left for a while.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from scavenger.policy import interface as seam
from scavenger.policy.interface import SampleView, StepView, WorkerView
from scavenger.simulate.decode import SimulatedEngine
from scavenger.simulate.sequences import EngineBatch, Finished, SimulatedRequest
from tests.plain_view import PlainView

BEAT_S = 2.0
PROMPT = 200
START_S = 60.0
WAKE_AFTER_S = 5.0


@dataclass
class Trainer:
    """Seconds a token, a round, to toggle and to finish; a round takes all that is ready once `round_groups` are."""

    token_s: float
    round_groups: int = 4
    sleep_s: float = 3.0
    wake_s: float = 3.0
    finish_s: float = 4.0
    round_s: float = 0.0


@dataclass
class Host:
    id: int
    kind: str
    batch: EngineBatch
    joined_at: float
    serves: bool = True
    leases: dict[int, float] = field(default_factory=dict)  # sample -> leased at
    last: tuple[float, dict[int, int]] = (0.0, {})


@dataclass
class Sample:
    id: int
    group: int
    index: int
    target: int
    tokens: int = 0
    moves: int = 0
    host: int = 0
    done: bool = False


@dataclass
class Result:
    """One step. `window_s`: for how long reserved engines generated."""

    seconds: float
    window_s: float
    moves: int
    tokens: int
    reasons: list[str]


class SmallSite:
    """Plays steps one after the other. `events`: (seconds into the step, +1 or -1) harvested engines that come or go."""

    def __init__(
        self,
        policy: seam.RouterPolicy,
        spec: SimulatedEngine,
        reserved: int,
        harvested: int,
        trainer: Trainer,
        cap: int,
        max_batch: int = 64,
    ) -> None:
        self.policy, self.spec, self.trainer, self.cap, self.max_batch = policy, spec, trainer, cap, max_batch
        self.now, self.step, self.next_id = 0.0, 0, 1
        self.gone_at = 0.0  # when the last harvested engine was lost
        self.hosts: dict[int, Host] = {}
        for kind in ["reserved"] * reserved + ["harvested"] * harvested:
            self._join(kind)

    def _join(self, kind: str) -> None:
        host = Host(self.next_id, kind, EngineBatch(self.spec, self.now), self.now)
        self.next_id += 1
        self.hosts[host.id] = host
        self._tell(seam.WorkerJoined(host.id, kind, f"n{host.id}", 1))
        self._tell(seam.WorkerReady(host.id, kind, f"n{host.id}", 1, self.step, True, START_S, 5.0, 55.0))

    def _tell(self, fact: seam.Fact) -> None:
        self.policy.observe(fact, self.now)

    # ---------------------------------------------------------------- one step

    def play(
        self, groups: list[list[int]], window_s: float = math.inf, events: tuple[tuple[float, int], ...] = ()
    ) -> Result:
        self.step += 1
        start = self.now
        self.samples: dict[int, Sample] = {}
        for group, lengths in enumerate(groups):
            for index, target in enumerate(lengths):
                sample_id = self.step * 100_000 + len(self.samples)
                self.samples[sample_id] = Sample(sample_id, self.step * 1000 + group, index, target)
        self.queue = sorted(self.samples)
        self.left = {self.step * 1000 + g: len(lengths) for g, lengths in enumerate(groups)}
        self.submitted, self.awake, self.awake_since, self.generated_s = start, True, start, 0.0
        self.moves, self.reasons = 0, list[str]()
        self.ready, self.round = list[int](), list[int]()  # groups: whole, and in the round under way
        self.trained, self.rounds, self.busy_until, self.train_from = 0, 0, start, math.inf
        self.size = (len(self.samples), len(groups))
        self._tell(seam.StepSubmitted(self.step, "train", *self.size))
        for host in self.hosts.values():
            host.serves = True
        todo = sorted(events)
        beat = start + BEAT_S
        self._ask(start + window_s)
        while self.trained < len(groups):
            closes = start + window_s if self.awake else math.inf
            timed = [beat, self.busy_until, self.train_from, closes, *(start + t for t, _ in todo[:1])]
            timed.append(self.gone_at + WAKE_AFTER_S)
            due = min(
                [t for t in timed if t > self.now] + [host.batch.next_time() for host in self.hosts.values()]
            )
            self.now = max(self.now, due)
            while todo and start + todo[0][0] <= self.now:
                self._fleet_event(todo.pop(0)[1])
            self._collect()
            if self.now >= beat:
                self._beat()
                beat = self.now + BEAT_S
            self._ask(start + window_s)
            self._train()
        if self.awake:
            self.generated_s += self.now - self.awake_since
        self.now += self.trainer.finish_s
        seconds = self.now - start
        train_s = (
            self.trainer.token_s * sum(s.target + PROMPT for s in self.samples.values())
            + self.trainer.round_s * self.rounds
        )
        metrics = {
            "seconds": seconds,
            "seconds_train": train_s,
            "seconds_update": self.trainer.finish_s,
            "seconds_wait": seconds - train_s,
            "rounds": float(self.rounds),
        }
        self._tell(seam.StepFinished(self.step, "train", metrics))
        assert all(s.done and s.tokens == s.target for s in self.samples.values()), "a token was lost"
        return Result(
            seconds, self.generated_s, self.moves, sum(s.target for s in self.samples.values()), self.reasons
        )

    # ---------------------------------------------------------------- what happens

    def _collect(self) -> None:
        for host in self.hosts.values():
            for happened in host.batch.advance(self.now):
                if isinstance(happened, Finished):
                    sample = self.samples[happened.key]
                    sample.tokens, sample.done, sample.host = happened.generated, True, 0
                    del host.leases[sample.id]
                    self.left[sample.group] -= 1
                    fact = seam.SampleFinished(
                        sample.id,
                        sample.group,
                        self.step,
                        sample.target,
                        PROMPT,
                        sample.target == self.cap,
                        host.id,
                        host.kind,
                        f"n{host.id}",
                    )
                    self._tell(fact)
                    if not self.left[sample.group]:
                        self.ready.append(sample.group)

    def _beat(self) -> None:
        for host in self.hosts.values():
            progress = host.batch.progress(self.now)
            for key, tokens in progress.items():
                self.samples[key].tokens = tokens
            before, held = host.last
            if progress and progress.keys() == held.keys() and host.batch.running == len(progress):
                made = sum(progress[k] - held[k] for k in progress)
                context = sum(PROMPT + (progress[k] + held[k]) / 2 for k in progress)
                if made:
                    self._tell(
                        seam.EngineProgress(
                            host.id,
                            host.kind,
                            f"n{host.id}",
                            1,
                            len(progress),
                            context,
                            made,
                            self.now - before,
                        )
                    )
            host.last = (self.now, progress)

    def _fleet_event(self, delta: int) -> None:
        if delta > 0:
            self._join("harvested")
            return
        host = max((h for h in self.hosts.values() if h.kind == "harvested"), key=lambda h: h.id)
        self._empty(host)
        del self.hosts[host.id]
        self.gone_at = self.now
        self._tell(
            seam.WorkerLost(
                host.id, host.kind, f"n{host.id}", 1, self.now - host.joined_at, True, "preempted"
            )
        )

    def _empty(self, host: Host) -> None:
        for key in list(host.leases):
            self._take(host, key)

    def _take(self, host: Host, key: int) -> None:
        sample = self.samples[key]
        sample.tokens = host.batch.remove(key, self.now)
        sample.host = 0
        del host.leases[key]
        self.queue.append(key)

    def _give(self, key: int, host: Host) -> None:
        sample = self.samples[key]
        assert host.serves
        assert len(host.leases) < self.max_batch
        self.queue.remove(key)
        sample.moves += sample.tokens > 0
        sample.host, host.leases[key] = host.id, self.now

    def _prefill(self, given: dict[int, list[int]]) -> None:
        for host_id, keys in given.items():
            requests = [
                SimulatedRequest(k, s.group, PROMPT, s.tokens, s.target)
                for k in keys
                for s in [self.samples[k]]
            ]
            self.hosts[host_id].batch.add(requests, self.now)

    def _train(self) -> None:
        if self.round and self.now >= self.busy_until:
            self.trained += len(self.round)
            self.round = []
        if self.awake or self.round or self.now < self.train_from or not self.ready:
            return
        if len(self.ready) >= self.trainer.round_groups or not any(self.left.values()):
            self.round, self.ready = self.ready, []
            tokens = sum(s.target + PROMPT for s in self.samples.values() if s.group in set(self.round))
            self.rounds += 1
            self.busy_until = self.now + self.trainer.round_s + self.trainer.token_s * tokens

    # ---------------------------------------------------------------- what is asked

    def view(self) -> PlainView:
        views = {
            s.id: SampleView(
                id=s.id,
                group_id=s.group,
                index=s.index,
                prompt_tokens=PROMPT,
                cap=self.cap,
                accepted=s.tokens,
                length=s.tokens,
                worker_id=s.host,
                leased_at=self.hosts[s.host].leases[s.id] if s.host else 0.0,
                moves=s.moves,
                done=s.done,
            )
            for s in self.samples.values()
        }
        done = sum(s.done for s in self.samples.values())
        workers = [
            WorkerView(
                id=h.id,
                kind=h.kind,
                node=f"n{h.id}",
                gpus=1,
                status="ready" if h.serves else "asleep",
                serves=h.serves,
                leases=len(h.leases),
                max_batch=self.max_batch,
                joined_at=h.joined_at,
            )
            for h in sorted(self.hosts.values(), key=lambda h: h.id)
        ]
        step = StepView(
            step=self.step,
            version=self.step,
            submitted_at=self.submitted,
            samples=self.size[0],
            finished=done,
            groups=self.size[1],
            delivered=sum(not n for n in self.left.values()),
            reserved_awake=self.awake,
        )
        queued = sorted(self.queue, key=lambda k: (not self.samples[k].tokens, k))
        return PlainView(
            "r", step, list(views.values()), [views[k] for k in queued], workers, max_batch=self.max_batch
        )

    def _ask(self, close_at: float) -> None:
        answer = self.policy.window(self.view(), self.now)
        close = answer.close if answer is not None else self.now >= close_at or not any(self.left.values())
        if answer is not None:
            self.reasons.append(answer.reason)
        if any(self.left.values()) and not any(h.kind == "harvested" for h in self.hosts.values()):
            close = not self.awake and self.now < self.gone_at + WAKE_AFTER_S
        if close == self.awake and any(h.kind == "reserved" for h in self.hosts.values()):
            self._toggle(not close)
        given: dict[int, list[int]] = {}
        if self.queue:
            for placement in self.policy.place(self.view(), self.now):
                self._give(placement.sample_id, self.hosts[placement.worker_id])
                given.setdefault(placement.worker_id, []).append(placement.sample_id)
        self._prefill(given)
        given = {}
        for move in self.policy.rebalance(self.view(), self.now):
            self._take(self.hosts[move.from_worker], move.sample_id)
            if move.to_worker and len(self.hosts[move.to_worker].leases) < self.max_batch:
                self._give(move.sample_id, self.hosts[move.to_worker])
                given.setdefault(move.to_worker, []).append(move.sample_id)
            self.moves += 1
            self.reasons.append(move.reason)
        self._prefill(given)

    def _toggle(self, awake: bool) -> None:
        self.awake = awake
        if not awake:
            self.generated_s += self.now - self.awake_since
        self.awake_since = self.now
        self.train_from = math.inf if awake else self.now + self.trainer.sleep_s
        for host in self.hosts.values():
            if host.kind == "reserved":
                self._empty(host)
                host.serves = awake
        self._tell(seam.WindowMoved(awake))
