"""What the ledger remembers of a run's past: steps, completions, engines, and who generated what when. Pure data.

For who learns from it (`policy.warm_start`, after a restart) or plays it again (`simulate.replay.replay`).
Times in Unix s, lengths in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from scavenger.protocol.messages import GUEST_INTENT


class Completion(msgspec.Struct, frozen=True, gc=False):
    """One sample. `finished_at` None: it has no end yet. `state` as in `samples.state`; `worker_id` of its newest lease."""

    sample_id: int
    group_id: int
    prompt_index: int
    index: int
    prompt_tokens: int
    length: int
    finish: str
    state: str
    worker_id: int
    finished_at: float | None


class Step(msgspec.Struct, frozen=True):
    """A train step. `committed_at` None: it is under way, and has no metrics."""

    step: int
    cap: int  # tokens that a completion may have
    submitted_at: float
    committed_at: float | None
    metrics: Mapping[str, float]
    completions: tuple[Completion, ...]


class WeightLoad(msgspec.Struct, frozen=True, gc=False):
    at: float
    version: int
    pull_s: float
    load_s: float


class EngineLifetime(msgspec.Struct, frozen=True):
    """An engine. `left_at` None: it is here. `preempted`: others took its GPUs; else it was let go, or failed. `loads` in order."""

    worker_id: int
    kind: str
    intent_id: str
    incarnation: int
    node: str
    gpus: int
    joined_at: float
    left_at: float | None
    preempted: bool
    notice: bool
    reason: str
    loads: tuple[WeightLoad, ...]

    @property
    def bounded(self) -> bool:
        """As in `WorkerView`."""
        return self.intent_id.startswith(GUEST_INTENT)


class LeaseInterval(msgspec.Struct, frozen=True, gc=False):
    """A lease. `ended_at` None: it is open."""

    sample_id: int
    epoch: int
    worker_id: int
    start_len: int
    end_len: int
    granted_at: float
    ended_at: float | None


class Flush(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one sample that came at one time."""

    sample_id: int
    worker_id: int
    start_len: int
    tokens: int
    at: float


class RunHistory(msgspec.Struct, frozen=True):
    """A run's past. `config` and `engine`: JSON, as its trainer gave them."""

    name: str
    config: str
    engine: str
    steps: tuple[Step, ...]
    lives: tuple[EngineLifetime, ...]
    spans: tuple[LeaseInterval, ...]
    flushes: tuple[Flush, ...]
    policy: str = ""  # "predictive", "standard"; "" = no step was recorded
    engines: int | None = None  # harvested ones that its policy aimed at last; None: nothing tells
