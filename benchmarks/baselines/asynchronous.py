"""Asynchronous trainers as their code admits, cancels and takes samples: prime-rl, verl's fully asynchronous trainer, AReaL. Pure.

The unit is a group of siblings. All three train the groups that are whole first, in the order of their arrival, and none decides by a
forecast. What each does:

    PrimeRL   a fixed number in flight, refilled as they end. With each new version every group in flight is a step older; one that is more
              than `max_off_policy_steps` (8) old is cancelled, and its tokens are thrown away. Whole groups wait for the trainer, at most
              `max_async_level` batches of them (1), then nothing more begins.
              `orchestrator/scheduler.py`, later `orchestrator/dispatcher.py` (`max_off_policy_steps`, `on_new_version`, `fill_inflight`),
              github.com/PrimeIntellect-ai/prime-rl
    Verl      a counter of samples of the present version: once it is int(required * (1 + staleness_threshold) *
              trigger_parameter_sync_step) nothing more begins; a new version sets it to what is in flight and queued. `on_full`: "wait" as
              that, or "drop": nothing waits, and the queue, of as many places, loses its oldest sample to the newest.
              `experimental/fully_async_policy` (`set_max_required_samples`, `reset_staleness`, `message_queue.put_sample`),
              github.com/volcengine/verl
    AReaL     capacity = min(max_concurrent - running, (max_staleness + version + 1) * batch - (accepted + running)).
              `infra/staleness_manager.py` (`get_capacity`), github.com/inclusionAI/AReaL

Knows no engine and no time: `asynchronous_run` plays them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Counts:
    """Groups: `running` on engines or before them; `queued`: whole, not trained; `accepted`: whole, ever, those thrown away left out.
    `begun`: since the present version was there. `version`: optimizer steps taken. `batch`: of one step."""

    version: int
    running: int
    queued: int
    accepted: int
    begun: int
    batch: int


class Rule(Protocol):
    """`prefills`: whether engines prefill what they hold again once they have new weights."""

    @property
    def name(self) -> str: ...

    @property
    def prefills(self) -> bool: ...

    def admit(self, counts: Counts) -> int:
        """How many groups may begin now."""

    def cancel(self, ages: Mapping[int, int]) -> Sequence[int]:
        """There is a new version. `ages`: of each group in flight, the versions that came since it began, this one included. Returns those
        that are thrown away."""

    def overflow(self, counts: Counts) -> int:
        """A group became whole: how many of the oldest queued ones are thrown away."""


@dataclass(frozen=True, slots=True)
class PrimeRL:
    """`in_flight`: groups; `max_off_policy_steps`, `max_async_level`: the configuration's, with their defaults."""

    in_flight: int
    max_off_policy_steps: int = 8
    max_async_level: int = 1
    name: str = "prime-rl"
    prefills: bool = False

    def admit(self, counts: Counts) -> int:
        if counts.queued >= self.max_async_level * counts.batch:
            return 0
        return max(0, self.in_flight - counts.running)

    def cancel(self, ages: Mapping[int, int]) -> Sequence[int]:
        return sorted(group for group, age in ages.items() if age > self.max_off_policy_steps)

    def overflow(self, counts: Counts) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Verl:
    """`staleness_threshold`: a share of a batch. `sync_steps`: optimizer steps between two versions, one in the play."""

    staleness_threshold: float
    on_full: str = "wait"
    sync_steps: int = 1
    prefills: bool = True

    @property
    def name(self) -> str:
        return f"verl ({self.on_full})"

    def max_required(self, batch: int) -> int:
        return int(batch * (self.staleness_threshold + 1) * self.sync_steps)

    def admit(self, counts: Counts) -> int:
        most = self.max_required(counts.batch)
        if self.on_full == "drop":
            return max(0, most - counts.running)
        return max(0, most - counts.begun)

    def cancel(self, ages: Mapping[int, int]) -> Sequence[int]:
        return ()

    def overflow(self, counts: Counts) -> int:
        return max(0, counts.queued - self.max_required(counts.batch)) if self.on_full == "drop" else 0


@dataclass(frozen=True, slots=True)
class AReaL:
    """`max_concurrent`: groups in flight."""

    max_staleness: int
    max_concurrent: int
    name: str = "AReaL"
    prefills: bool = True

    def admit(self, counts: Counts) -> int:
        staleness = (self.max_staleness + counts.version + 1) * counts.batch - (
            counts.accepted + counts.running
        )
        return max(0, min(max(1, self.max_concurrent) - counts.running, staleness))

    def cancel(self, ages: Mapping[int, int]) -> Sequence[int]:
        return ()

    def overflow(self, counts: Counts) -> int:
        return 0
