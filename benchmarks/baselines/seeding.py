"""What RLBoost and PolyRL share: a window in seconds that is corrected after each step, with a memo by the number of instances.

RLBoost (arXiv 2510.19225): after a step,  T_seed <- max(floor, T_seed + eta (t_wait_train - t_wait_remote)),  eta = 1/3, floor = 5 s, where
`t_wait_train` is how long training GPUs idled for responses and `t_wait_remote` how long remote instances idled at the step's end. Owns the
measuring of both from what a daemon hears. The window opens when the trainer wakes its engines, and is decided once a step.
"""

from __future__ import annotations

import math

from scavenger.policy.interface import (
    Fact,
    RunView,
    SampleFinished,
    StepFinished,
    StepSubmitted,
    WindowDecision,
    WindowMoved,
    WorkerLost,
    WorkerReady,
)


class Seeding:
    """`seed_s`: the window of the step under way. `steady`: the number of instances has not changed within it."""

    def __init__(
        self, eta: float, floor_s: float, first_s: float, ema: float = 0.0, memo: bool = True
    ) -> None:
        self._eta, self._floor_s, self._ema, self._use_memo = eta, floor_s, ema, memo
        self.seed_s = max(floor_s, first_s)
        self.memo: dict[int, float] = {}
        self.steady = True
        self.instances = 0
        self.train_s = self.remote_s = self.mean_instances = (
            0.0  # of the last step: computing; remote generation, and by how many
        )
        self._submitted_at = self._last_finish = 0.0
        self._instance_s, self._counted_at = 0.0, 0.0  # instances times seconds since the step was submitted
        self._at_last_finish = 0.0
        self._opened_at = 0.0
        self._over = False  # the step's window
        self._live: set[int] = set()

    def observe(self, fact: Fact, now: float) -> None:
        match fact:
            case WindowMoved(awake=True):
                self._opened_at = now
            case StepSubmitted():
                self._submitted_at = self._last_finish = self._opened_at = self._counted_at = now
                self._instance_s = self._at_last_finish = 0.0
                self._begin()
            case SampleFinished(kind="harvested"):
                self._last_finish, self._at_last_finish = (
                    now,
                    self._instance_s + len(self._live) * (now - self._counted_at),
                )
            case WorkerReady(kind="harvested", first=True, worker_id=worker_id):
                self._count(now)
                self._live.add(worker_id)
                self._changed()
            case WorkerLost(kind="harvested", worker_id=worker_id):
                self._count(now)
                self._live.discard(worker_id)
                self._changed()
            case StepFinished():
                self._learn(fact, now)

    def _begin(self) -> None:
        self.steady, self.instances, self._over = True, len(self._live), False
        if self._use_memo:
            self.seed_s = self.memo.get(self.instances, self.seed_s)

    def _count(self, now: float) -> None:
        self._instance_s += len(self._live) * (now - self._counted_at)
        self._counted_at = now

    def _changed(self) -> None:
        self.steady, self.instances = False, len(self._live)

    def _learn(self, fact: StepFinished, now: float) -> None:
        wait_train = fact.metrics.get("seconds_wait", 0.0)
        wait_remote = now - self._last_finish if self._live else 0.0
        self.train_s = fact.metrics.get("seconds_train", 0.0) + fact.metrics.get("seconds_update", 0.0)
        self.remote_s = self._last_finish - self._submitted_at
        self.mean_instances = self._at_last_finish / self.remote_s if self.remote_s else 0.0
        used = self.seed_s
        self.seed_s = max(self._floor_s, used + self._eta * (wait_train - wait_remote))
        if self.steady and self._use_memo:
            before = self.memo.get(self.instances, used)
            self.memo[self.instances] = self._ema * before + (1 - self._ema) * self.seed_s
            self.seed_s = self.memo[self.instances]

    def window(self, view: RunView, now: float) -> WindowDecision:
        until = self._opened_at + self.seed_s
        self._over = self._over or now >= until - 1e-6
        if self._over:
            return WindowDecision(True, f"T_seed = {self.seed_s:.1f} s is over, {self.instances} instances")
        return WindowDecision(False, f"T_seed = {self.seed_s:.1f} s with {self.instances} instances", until)

    def cap(self, reserved: int, most: int) -> tuple[int, str]:
        """N = (t_remote n + T_seed N_resv) / t_train: more instances than that would outrun the trainer (RLBoost's limit).

        All of the last step, n being the mean over t_remote: a limit by who is left of them would never let a fleet grow again.
        """
        if not self.train_s or not self.mean_instances:
            return most, "nothing was measured yet"
        limit = (self.remote_s * self.mean_instances + self.seed_s * reserved) / self.train_s
        parts = f"({self.remote_s:.0f} s x {self.mean_instances:.1f} + {self.seed_s:.0f} s x {reserved}) / {self.train_s:.0f} s"
        return min(most, math.ceil(limit)), f"{parts} = {limit:.1f}"
