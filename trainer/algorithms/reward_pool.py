"""Scores completions beside training: threads of rank 0 that wait for processes of the reward function, so that its loop never does.

Owns the queue of calls and who makes them; `RewardRunner` owns one process each, with its deadline, retries and containment. A call of an
earlier step goes first, then the older one. Results are futures: who asked takes them when they are there, and nothing depends on the
order in which they come (I7).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from blake3 import blake3

from scavenger.config import RewardSection
from scavenger.errors import ConfigError, RewardError, RewardTimeout
from trainer.algorithms.rewards import Parts, Reward, RewardRunner

#: Processes of a function unless the run says how many.
MOST_DEFAULT_PROCESSES = 8
#: What threads have to end in once their processes are killed.
JOIN_S = 10.0
#: Functions that compare a completion with a column, the one that their option `field` names.
VERIFIERS = tuple(f"trainer.verifiers:{name}" for name in ("exact", "regex", "math"))
#: The step of what ends a thread: before every other.
_END = -1


def default_processes(environ: Mapping[str, str] = os.environ) -> int:
    """As many as the job has CPUs on this node, at most 8. Slurm's word counts: rank 0 may be bound to one CPU of them."""
    granted = environ.get("SLURM_CPUS_ON_NODE", "")
    cpus = int(granted) if granted.isdecimal() else len(os.sched_getaffinity(0))
    return max(1, min(MOST_DEFAULT_PROCESSES, cpus))


@dataclass(frozen=True, slots=True)
class PendingReward:
    """Completions that wait for their rewards: one, or a group's where the function rewards groups."""

    prompt: str
    completions: tuple[str, ...]
    meta: dict[str, Any]
    result: Future[tuple[Parts, ...]]


class Lane:
    """One reward function: up to `processes` processes, or for an `async def` one, with `concurrency` calls under way.

    `name`: of its part of the reward, "" where there is no other function. `weights`: of the parts of a dict; empty = 1 each.
    """

    def __init__(
        self,
        make: Callable[[], RewardRunner],
        processes: int,
        concurrency: int = 1,
        *,
        name: str = "",
        weight: float = 1.0,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self.name, self.weight, self.weights = name, weight, dict(weights or {})
        self._make = make
        self._processes = processes
        self._concurrency = concurrency
        self._queue: queue.PriorityQueue[tuple[int, int, PendingReward | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._runners = [make()]
        self._threads: list[threading.Thread] = []
        self._closed = False

    @property
    def version(self) -> str:
        return self._runners[0].version

    def open(self) -> None:
        """Start the first process: what is wrong with the function is known before the run is. The others start with work."""
        first = self._runners[0].__enter__()
        if first.concurrent:
            each = [first] * self._concurrency
        else:
            self._runners += [self._make() for _ in range(self._processes - 1)]
            each = self._runners
        self._threads = [
            threading.Thread(target=self._work, args=(runner,), name=f"rewards-{number}", daemon=True)
            for number, runner in enumerate(each)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, prompt: str, completions: Sequence[str], meta: dict[str, Any], step: int
    ) -> list[tuple[Future[tuple[Parts, ...]], int]]:
        """Of each completion the call that scores it, and which of the call's scores is its own."""
        together = (
            [tuple(completions)]
            if self._runners[0].whole_group and completions
            else [(completion,) for completion in completions]
        )
        calls = [PendingReward(prompt, some, meta, Future()) for some in together]
        for call in calls:
            self._queue.put((step, next(self._numbers), call))
        return [(call.result, place) for call in calls for place in range(len(call.completions))]

    def weigh(self, scores: Parts) -> dict[str, tuple[float, float]]:
        """(value, weight) of each part by its metric's name; that of a lone function's plain number is ""."""
        if self.weights and (strange := [key for key in scores if key and key not in self.weights]):
            cause = f"the reward has a part without a weight in reward.weights: {strange[0]}"
            raise RewardError(cause, "give it one there: 0 if it is only to be seen")
        return {
            "_".join(word for word in (self.name, key) if word): (
                value,
                self.weight * (self.weights.get(key, 1.0) if key else 1.0),
            )
            for key, value in scores.items()
        }

    def close(self) -> None:
        """End every process, whatever it is at. Calls that were not made fail."""
        self._closed = True
        for runner in self._runners:
            runner.stop()
        for _ in self._threads:
            self._queue.put((_END, next(self._numbers), None))
        for thread in self._threads:
            thread.join(JOIN_S)
        for runner in self._runners:
            runner.close()
        while not self._queue.empty():
            if (call := self._queue.get()[2]) is not None:
                call.result.set_exception(RewardError("the trainer ended first"))

    def _work(self, runner: RewardRunner) -> None:
        """A thread's life: make the calls one after the other, each in the process of its runner."""
        while (call := self._queue.get()[2]) is not None:
            try:
                call.result.set_result(runner.call(call.prompt, call.completions, call.meta))
            except BaseException as error:  # noqa: BLE001  the caller that asked for the reward raises it
                call.result.set_exception(error)


class RewardPool:
    """The functions of a run, whose weighted sum is the reward. Use as a context manager; `submit` and `score` are of one thread."""

    def __init__(self, lanes: Sequence[Lane], version: str = "") -> None:
        self._lanes = lanes
        self._named = version

    def __enter__(self) -> RewardPool:
        with contextlib.ExitStack() as stack:
            for lane in self._lanes:
                stack.callback(lane.close)
                lane.open()
            stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for lane in self._lanes:
            lane.close()

    @property
    def version(self) -> str:
        """Of all that the reward follows from: the functions with their weights. The user's own name for it, if there is one."""
        first = self._lanes[0]
        if self._named or (len(self._lanes) == 1 and not first.weights):
            return self._named or first.version
        follows = json.dumps(
            [(lane.name, lane.weight, lane.version, sorted(lane.weights.items())) for lane in self._lanes]
        )
        return f"{first.version if len(self._lanes) == 1 else 'several'}+{blake3(follows.encode()).hexdigest()[:16]}"

    def submit(
        self, prompt: str, completions: Sequence[str], meta: dict[str, Any], step: int = 0
    ) -> list[Future[Reward]]:
        """A reward for each completion; of a future, `RewardError` where there is none, `ConfigError` where no process could be started."""
        asked = [lane.submit(prompt, completions, meta, step) for lane in self._lanes]
        return [self._sum([of_lane[place] for of_lane in asked]) for place in range(len(completions))]

    def score(self, prompt: str, completion: str, meta: dict[str, Any]) -> float:
        """One reward, waited for."""
        return self.submit(prompt, [completion], meta)[0].result().value

    def _sum(self, asked: Sequence[tuple[Future[tuple[Parts, ...]], int]]) -> Future[Reward]:
        """What is there once every function's call is done."""
        result: Future[Reward] = Future()
        left = iter(range(len(asked) - 1, -1, -1))
        lock = threading.Lock()

        def done(_: object) -> None:
            with lock:
                last = next(left) == 0
            if last:
                try:
                    result.set_result(self._reward(asked))
                except BaseException as error:  # noqa: BLE001  the caller that asked for the reward raises it
                    result.set_exception(error)

        for future, _ in asked:
            future.add_done_callback(done)
        return result

    def _reward(self, asked: Sequence[tuple[Future[tuple[Parts, ...]], int]]) -> Reward:
        parts: dict[str, tuple[float, float]] = {}
        late: RewardTimeout | None = None
        for lane, (future, place) in zip(self._lanes, asked, strict=True):
            try:
                weighed = lane.weigh(future.result()[place])
            except RewardTimeout as error:
                late, weighed = error, lane.weigh({"": 0.0})
            if twice := sorted(parts.keys() & weighed.keys()):
                raise RewardError(
                    f"two parts of the reward are called {twice[0]!r}",
                    "give one of the functions another name",
                )
            parts |= weighed
        try:
            value = math.fsum(value * weight for value, weight in parts.values())
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            said = ", ".join(
                f"{name or 'reward'} {part:g} x {weight:g}" for name, (part, weight) in parts.items()
            )
            raise RewardError(
                f"the rewards' weighted sum is no finite number: {said}",
                'fix the function, or set reward.on_reward_error = "mask" to leave such samples out',
            )
        return Reward(value, {name: value for name, (value, _) in sorted(parts.items()) if name}, late)


def refuse_missing(reward: RewardSection, meta: Mapping[str, Any]) -> None:
    """Raises `ConfigError` where a function of `trainer.verifiers` compares with a column that the row `meta` lacks."""
    chosen = [(one.function, one.options) for one in reward.functions] or [(reward.function, reward.options)]
    for function, options in chosen:
        field = options.get("field", "answer")
        if function in VERIFIERS and meta.get(str(field)) is None:
            there = ", ".join(
                repr(name) for name, value in meta.items() if name != "row" and value is not None
            )
            raise ConfigError(
                f"{function} compares with the column {field!r}, and the rows have {there or 'no column beside the prompt'}",
                "name the column in data.answer_field (or in the function's option `field`), or choose another reward.function",
            )


def open_pool(
    reward: RewardSection, *, retries: int | None = None, processes: int | None = None
) -> RewardPool:
    """The pool that `[reward]` describes. `retries` and `processes`: other than the run's."""

    def maker(function: str, options: Mapping[str, Any]) -> Callable[[], RewardRunner]:
        return lambda: RewardRunner(
            function,
            timeout_s=reward.timeout_s,
            retries=reward.retries if retries is None else retries,
            options=options,
            memory_gb=reward.memory_gb,
            start_timeout_s=reward.start_timeout_s,
            folder=reward.path,
        )

    most = processes or reward.processes or default_processes()
    lanes = [
        Lane(
            maker(one.function, one.options),
            most,
            reward.concurrency,
            name=one.part,
            weight=one.weight,
            weights=reward.weights,
        )
        for one in reward.functions
    ] or [Lane(maker(reward.function, reward.options), most, reward.concurrency, weights=reward.weights)]
    return RewardPool(lanes, reward.version)
