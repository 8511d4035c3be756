"""What runs whose samples are episodes have in common: what they say to the daemon as any other run does, and the rows of an episode.

Boundary: calls passed on unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from scavenger.protocol import messages
from scavenger.weights.manifest import Manifest
from trainer.data.batching import TrainRow
from trainer.loop.trainer_run import TrainerRun


class Daemon(TrainerRun, Protocol):
    """`scavenger.client.Run`: what the loop asks of any run, and what episodes add."""

    @property
    def versions(self) -> tuple[tuple[int, int, bytes], ...]: ...
    def deliver(
        self, policy: str, step: int, prompt_index: int, shares: Sequence[messages.EpisodeShare]
    ) -> None: ...
    def commit(
        self,
        step: int,
        version: int,
        outcomes: Sequence[messages.SampleOutcome],
        metrics: dict[str, float],
        purpose: str = "train",
        episodes: Sequence[messages.EpisodeOutcome] = (),
        decisions: Sequence[messages.DataDecision] = (),
        differences: Sequence[messages.TokenDifferences] = (),
        deliveries: Sequence[messages.DeliveryOutcome] = (),
    ) -> None: ...
    def want_deliveries(self, step: int, count: int) -> None: ...
    def take_deliveries(self) -> list[messages.DeliveredGroup]: ...
    @property
    def episodes_over(self) -> str: ...


class EpisodeRow(Protocol):
    """One row to train of an episode: `messages.DeliveredRow` or `wire.Branch`."""

    @property
    def prompt(self) -> bytes: ...
    @property
    def completion(self) -> bytes: ...
    @property
    def mask(self) -> bytes: ...
    @property
    def behaviour(self) -> bytes: ...
    @property
    def turns(self) -> Sequence[messages.RowTurn]: ...


def turn_rewards_of(parts: Sequence[EpisodeRow]) -> dict[int, float]:
    """By number, what each turn of an episode earned; empty where its environment does not reward turns."""
    return {turn.number: turn.reward for part in parts for turn in part.turns}


class PassingRun:
    """Of the loop's `TrainerRun` what `run` answers itself."""

    def __init__(self, run: Daemon) -> None:
        self._run = run
        self._next_row = 1

    def _rows_of(
        self, parts: Sequence[EpisodeRow], episode: int, advantage: float, of_turns: Mapping[int, float]
    ) -> tuple[TrainRow, ...]:
        """The rows of an episode. Their turns share its advantage, but for those in `of_turns`, which have their own. Each row knows how
        many tokens the others train: 4 bytes of logprobs each.
        """
        first, self._next_row = self._next_row, self._next_row + len(parts)
        whole = sum(len(part.behaviour) // 4 for part in parts)
        return tuple(
            TrainRow(
                number,
                part.prompt,
                part.completion,
                part.behaviour,
                advantage,
                mask=part.mask,
                episode=episode,
                others=whole - len(part.behaviour) // 4,
                turns=tuple((turn.tokens, of_turns.get(turn.number, advantage)) for turn in part.turns),
            )
            for number, part in enumerate(parts, first)
        )

    @property
    def attempt(self) -> int:
        return self._run.attempt

    @property
    def last_step(self) -> int:
        return self._run.last_step

    @property
    def next_version(self) -> int:
        return self._run.next_version

    @property
    def fleet(self) -> messages.Fleet:
        return self._run.fleet

    @property
    def reserved_order(self) -> int:
        return self._run.reserved_order

    @property
    def pass_rates(self) -> tuple[tuple[int, int, int, int], ...]:
        return self._run.pass_rates

    def publish(self, step: int, manifest: Manifest, *sources: messages.WeightSource) -> None:
        self._run.publish(step, manifest, *sources)

    def set_reserved(self, awake: bool, bytes_held: int = 0) -> None:
        self._run.set_reserved(awake, bytes_held)

    def end_reserved(self, names: Sequence[str], reason: str) -> None:
        self._run.end_reserved(names, reason)

    def trained(
        self, step: int, groups: int, tokens: int, seconds: float, scored: int = -1, reward_s: float = 0.0
    ) -> None:
        self._run.trained(step, groups, tokens, seconds, scored, reward_s)

    def defer_late(self, step: int, groups: Sequence[int]) -> tuple[int, ...]:
        return self._run.defer_late(step, groups)

    def report_agreement(self, step: int, spans: Sequence[messages.SpanSums]) -> tuple[messages.Suspect, ...]:
        """Nobody knows yet which engine said which turn."""
        return ()

    def checkpoint(
        self, step: int, version: int, root: bytes, path: str, kept: Sequence[int] | None = None
    ) -> None:
        self._run.checkpoint(step, version, root, path, kept)

    def close_run(self, state: str, reason: str = "") -> None:
        self._run.close_run(state, reason)
