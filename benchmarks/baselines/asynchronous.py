"""Asynchronous trainers as their code admits, cancels and takes samples: prime-rl, verl's fully asynchronous trainer, AReaL. Pure.

The unit is a group of siblings. All three train groups that are whole, none decides by a forecast. What each does, by its code:

    PrimeRL   a number of samples in flight, refilled as each one ends (a permit is an episode, not a group: `Dispatcher.fill_inflight`);
              nothing more begins while a batch more than the one in training is whole (`TARGET_LAG` = 1, `update_dispatch_gate`). A group
              is thrown away, with its tokens, where it began more than `max_off_policy_steps` (8) versions before those that would train
              it: in flight with each new version (`Dispatcher.on_version_pending`), and when it becomes whole (`TrainSink._drop_stale`,
              which "is the hard guarantee": no group is trained beyond the bound).
              `src/prime_rl/orchestrator`, github.com/PrimeIntellect-ai/prime-rl at 559b44772. There the number in flight follows the
              pressure on the KV cache (`concurrency.py`); here it is given, and the best of several counts. Left out, in its favour: the
              pool grows by a tenth in 5 s at most (`admission_budget`), an overload cancels the youngest groups, engines pause for an
              update, and a group's siblings go to one client.
    Verl      a counter of samples of the present version: once it is int(required * (1 + staleness_threshold) *
              trigger_parameter_sync_step) nothing more begins; a new version sets it to what is in flight and queued (`on_full` "wait").
              "drop" is what its queue does where that does not hold it back: it has as many places, and loses its oldest sample to the
              newest (`MessageQueue.put_sample`). In that code the counter, which a new version sets to no less than the queue holds, keeps
              the queue from ever being full: "drop" is no setting of its, but what a system without the counter does.
              `verl/experimental/fully_async_policy`, github.com/volcengine/verl at b178a3cd5. Left out, in its favour: at most 16 groups
              in flight for a server, and the wait of all engines while weights are synchronised. It synchronises after each
              step here; its default is every fourth (`trigger_parameter_sync_step`).
    AReaL     capacity = min(max_concurrent - running, (max_staleness + version + 1) * batch - (accepted + running)); of what is whole, the
              groups that began first are trained first.
              `areal/infra/staleness_manager.py`, `workflow_executor.py`, github.com/inclusionAI/AReaL at 4aef98d8d. Its default
              `max_concurrent`, one batch, is left out, in its favour; so is that new groups are queued only while the trainer waits
              for a batch (`active_submit_and_wait`), and that a request goes on at the server it began at.

Knows no engine and no time: `asynchronous_run` plays them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Counts:
    """Groups: `running` on engines or before them; `queued`: whole, not trained; `accepted`: whole, ever, those thrown away left out.
    `begun`: since the present version was there. `version`: optimizer steps taken. `batch`: of one step. `samples`: on engines or before
    them; of one group: `siblings`. `training`: a step is trained now."""

    version: int
    running: int
    queued: int
    accepted: int
    begun: int
    batch: int
    samples: int = 0
    siblings: int = 1
    training: bool = False

    @property
    def collected(self) -> int:
        """The version that trains the batch that is collected now."""
        return self.version + int(self.training) + self.queued // self.batch


class Queued(NamedTuple):
    """A whole group. Numbers grow in the order in which groups began. `began`: with which version."""

    group: int
    began: int


class Waiting(Protocol):
    """A sample that waits for an engine: its place in its group, and how many tokens it has."""

    @property
    def group(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def generated(self) -> int: ...


class Rule(Protocol):
    """`prefills`: whether engines prefill what they hold again once they have new weights. `chunk_tokens`: after so many a sample goes
    back to the queue, and goes on without a prefill; 0: it stays."""

    @property
    def chunk_tokens(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def prefills(self) -> bool: ...

    def admit(self, counts: Counts) -> int:
        """How many groups may begin now."""

    def pick(self, waiting: Sequence[Waiting], longest: Mapping[int, int]) -> int:
        """An engine has a slot: the place of the sample that gets it. `longest`: of each group in flight, its longest
        completion that ended."""

    def cancel(self, ages: Mapping[int, int], counts: Counts) -> Sequence[int]:
        """There is a new version. `ages`: of each group in flight, the versions that came since it began, this one included. Returns those
        that are thrown away."""

    def too_old(self, began: int, counts: Counts) -> bool:
        """A group became whole, and is not among the queued of `counts`: whether it is thrown away."""

    def first(self, queued: Sequence[Queued]) -> Sequence[Queued]:
        """A batch is whole. The queued groups, came in this order, in the order in which they are trained."""

    def overflow(self, counts: Counts) -> int:
        """A group became whole: how many of the oldest queued ones are thrown away."""


@dataclass(frozen=True, slots=True)
class PrimeRL:
    """`in_flight`: samples; `max_off_policy_steps`, `max_async_level`: the configuration's, with their defaults."""

    in_flight: int
    max_off_policy_steps: int = 8
    max_async_level: int = 1
    name: str = "prime-rl"
    prefills: bool = False
    chunk_tokens: int = 0

    def pick(self, waiting: Sequence[Waiting], longest: Mapping[int, int]) -> int:
        return 0

    def admit(self, counts: Counts) -> int:
        if counts.queued >= self.max_async_level * counts.batch:
            return 0
        return max(
            0, -(-(self.in_flight - counts.samples) // counts.siblings)
        )  # a last group that the permits hold in part begins whole

    def cancel(self, ages: Mapping[int, int], counts: Counts) -> Sequence[int]:
        ahead = int(
            counts.queued >= counts.batch
        )  # that batch is collected: the next one trains a version later
        return sorted(group for group, age in ages.items() if age + ahead > self.max_off_policy_steps)

    def too_old(self, began: int, counts: Counts) -> bool:
        return counts.collected - began > self.max_off_policy_steps

    def first(self, queued: Sequence[Queued]) -> Sequence[Queued]:
        return queued

    def overflow(self, counts: Counts) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Verl:
    """`staleness_threshold`: a share of a batch. `sync_steps`: optimizer steps between two versions, one in the play."""

    staleness_threshold: float
    on_full: str = "wait"
    sync_steps: int = 1
    prefills: bool = True
    chunk_tokens: int = 0

    @property
    def name(self) -> str:
        return f"verl ({self.on_full})"

    def max_required(self, batch: int) -> int:
        return int(batch * (self.staleness_threshold + 1) * self.sync_steps)

    def pick(self, waiting: Sequence[Waiting], longest: Mapping[int, int]) -> int:
        return 0

    def admit(self, counts: Counts) -> int:
        most = self.max_required(counts.batch)
        if self.on_full == "drop":
            return max(0, most - counts.running)
        return max(0, most - counts.begun)

    def cancel(self, ages: Mapping[int, int], counts: Counts) -> Sequence[int]:
        return ()

    def too_old(self, began: int, counts: Counts) -> bool:
        return False

    def first(self, queued: Sequence[Queued]) -> Sequence[Queued]:
        return queued

    def overflow(self, counts: Counts) -> int:
        return max(0, counts.queued - self.max_required(counts.batch)) if self.on_full == "drop" else 0


@dataclass(frozen=True, slots=True)
class AReaL:
    """`max_concurrent`: groups in flight."""

    max_staleness: int
    max_concurrent: int
    name: str = "AReaL"
    prefills: bool = True
    chunk_tokens: int = 0

    def pick(self, waiting: Sequence[Waiting], longest: Mapping[int, int]) -> int:
        return 0

    def admit(self, counts: Counts) -> int:
        staleness = (self.max_staleness + counts.version + 1) * counts.batch - (
            counts.accepted + counts.running
        )
        return max(0, min(max(1, self.max_concurrent) - counts.running, staleness))

    def cancel(self, ages: Mapping[int, int], counts: Counts) -> Sequence[int]:
        return ()

    def too_old(self, began: int, counts: Counts) -> bool:
        return False

    def first(self, queued: Sequence[Queued]) -> Sequence[Queued]:
        return sorted(queued, key=lambda one: one.group)

    def overflow(self, counts: Counts) -> int:
        return 0
