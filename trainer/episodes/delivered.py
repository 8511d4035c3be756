"""Rank 0 of a run whose steps are filled from another run's episodes: `DeliveredRun` is a run to the loop.

    submit(groups of step t) -> so many groups are wanted --> daemon
    poll                     <- DeliveredGroup, in the place of the next group that was asked for: an episode is one sample
    commit(outcomes)         -> the daemon: what became of each delivery

A group has as many samples as the run's groups have. Where the policy had no part in some of its episodes, samples are without a reward;
episodes beyond that number are left out.

What is asked for has no prompts of its own: whatever the other run plays next fills it, where its weights are young enough for the step.
When that run ends, and the step under way cannot be filled, `EpisodesOver` ends this one too. A run that has taken its steps, or takes
none, answers for its agent until then (`serve`).

Boundary: between the loop and the daemon.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scavenger.client import Run
from scavenger.config import RunConfig
from scavenger.errors import ConfigError
from scavenger.protocol import messages
from trainer.data.batching import TrainRow
from trainer.data.prompts import TaskSet
from trainer.episodes.opening import EpisodeScorer
from trainer.episodes.passing import Daemon, PassingRun, turn_rewards_of
from trainer.loop.ending import EndRequested

#: Between two looks at what came, and at whether this trainer was told to end.
LOOK_S = 0.25
#: Why an episode is not trained of which the group has enough; `scavenger.ledger.redaction` knows it.
OVER = "over data.samples_per_prompt"


class EpisodesOver(EndRequested):
    """The run that plays the episodes has ended. Its words are the daemon's."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A group that the loop asked for, and that nothing was delivered for yet."""

    id: int
    step: int
    version: int
    spec: messages.GroupSpec


class DeliveredRun(PassingRun):
    """See the module. The loop's `TrainerRun`, and scoring's `Episodes`. `version`: of what gives the rewards."""

    def __init__(self, run: Daemon, version: str) -> None:
        super().__init__(run)
        self._version = version
        self._next_group = 1
        self._asked: list[_Asked] = []  # in the order of their steps
        self._here: dict[int, messages.DeliveredEpisode] = {}  # by delivery: not committed
        self._groups: dict[int, frozenset[int]] = {}  # filled groups -> their deliveries, likewise
        self._beyond: dict[
            int, tuple[int, ...]
        ] = {}  # filled groups -> their deliveries that no sample is of
        self._advantages: dict[
            int, Mapping[int, float]
        ] = {}  # by delivery: of rewarded turns, as the step trains them
        self._next_empty = -1
        self._came: list[messages.DeliveredGroup] = []  # in no group yet
        self._wanted: tuple[int, int] | None = None

    # ---------------------------------------------------------------- delivered

    def submit(
        self, step: int, version: int, groups: Sequence[messages.GroupSpec], purpose: str = "train"
    ) -> tuple[int, ...]:
        """Want as many groups for the step. Their prompts are the other run's."""
        ids = tuple(range(self._next_group, self._next_group + len(groups)))
        self._next_group += len(groups)
        self._asked += [_Asked(id_, step, version, spec) for id_, spec in zip(ids, groups, strict=True)]
        self._asked.sort(
            key=lambda one: one.step
        )  # one that replaces another comes before those of later steps
        self._want()
        return ids

    def poll(self, timeout_s: float) -> list[messages.GroupDone]:
        """Groups that were delivered; waits up to `timeout_s` for the first. Raises `EpisodesOver`."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._run.poll(max(0.0, min(deadline - time.monotonic(), LOOK_S)))
            self._came += self._run.take_deliveries()
            done = []
            while self._came and self._asked:
                done.append(self._fill(self._came.pop(0)))
            if done:
                self._want()
                return done
            if self._run.episodes_over and self._asked:
                raise EpisodesOver(self._run.episodes_over)
            if time.monotonic() >= deadline:
                return []

    def serve(self, check: Callable[[], None]) -> str:
        """Answer for the agent, and take nothing, until the run that plays has ended. Why it did. `check` raises what ends this trainer."""
        self._run.want_deliveries(max(1, self._run.last_step + 1), 0)
        while not self._run.episodes_over:
            check()
            self._run.poll(LOOK_S)
        return self._run.episodes_over

    def _want(self) -> None:
        """For the earliest step that lacks groups, as many as it lacks: what comes for a later one may be too old for it by then."""
        if not self._asked:
            return
        step = self._asked[0].step
        wanted = step, len(self._groups) + sum(one.step == step for one in self._asked)
        if wanted != self._wanted:
            self._wanted = wanted
            self._run.want_deliveries(*wanted)

    def _fill(self, group: messages.DeliveredGroup) -> messages.GroupDone:
        """What was delivered, in the place of the next group that was asked for."""
        asked = self._asked.pop(0)
        episodes = sorted(group.episodes, key=lambda one: (one.index, one.delivery_id))
        taken, beyond = episodes[: asked.spec.n], episodes[asked.spec.n :]
        self._here |= {one.delivery_id: one for one in taken}
        self._groups[asked.id] = frozenset(one.delivery_id for one in taken)
        self._beyond[asked.id] = tuple(one.delivery_id for one in beyond)
        empty = (self._empty(place) for place in range(len(taken), asked.spec.n))
        return messages.GroupDone(
            asked.id,
            asked.step,
            asked.version,
            "train",
            asked.spec.prompt_index,
            episodes[0].rows[0].prompt,
            asked.spec.meta,
            (*(self._sample(place, one) for place, one in enumerate(taken)), *empty),
        )

    def _empty(self, place: int) -> messages.DoneSample:
        """An episode in which the policy had no part. Its id is below 0: no delivery's."""
        self._next_empty -= 1
        return messages.DoneSample(
            self._next_empty, place, b"", b"", b"", "stop", 0, error="this run's policy had no part in it"
        )

    def _sample(self, place: int, one: messages.DeliveredEpisode) -> messages.DoneSample:
        """The episode as one sample: all that this run's policy said in it."""
        tokens = b"".join(said(row) for row in one.rows)
        logprobs = b"".join(row.behaviour for row in one.rows)
        return messages.DoneSample(
            one.delivery_id,
            place,
            tokens,
            logprobs,
            logprobs,
            "stop",
            0,
            reward=one.reward,
            reward_version=self._version,
        )

    def defer_late(self, step: int, groups: Sequence[int]) -> tuple[int, ...]:
        """What is late is another run's episodes, which come when they come."""
        return ()

    # ---------------------------------------------------------------- as scoring's episodes

    def rows(
        self, sample: messages.DoneSample, advantage: float, of_turns: Mapping[int, float]
    ) -> tuple[TrainRow, ...]:
        self._advantages[sample.sample_id] = of_turns
        return self._rows_of(self._here[sample.sample_id].rows, sample.sample_id, advantage, of_turns)

    def turn_rewards(self, sample: messages.DoneSample) -> Mapping[int, float]:
        return turn_rewards_of(self._here[sample.sample_id].rows)

    def parts(self, sample: messages.DoneSample) -> Mapping[str, float]:
        return {}

    # ---------------------------------------------------------------- committed

    def commit(
        self,
        step: int,
        version: int,
        outcomes: Sequence[messages.SampleOutcome],
        metrics: dict[str, float],
        purpose: str = "train",
        decisions: Sequence[messages.DataDecision] = (),
        differences: Sequence[messages.TokenDifferences] = (),
    ) -> None:
        """Record that the step was taken with these deliveries. Token differences are not kept of them."""
        mine = [self._outcome(one) for one in outcomes if one.sample_id > 0]
        taken = {one.sample_id for one in mine}
        over = [id_ for id_, of_group in self._groups.items() if of_group <= taken]
        beyond = [
            messages.DeliveryOutcome(delivery, "filtered", 0.0, 0.0, OVER)
            for id_ in over
            for delivery in self._beyond.pop(id_)
        ]
        behind = [version - self._here[one.sample_id].version for one in mine]
        metrics |= {"versions_behind": sum(behind) / len(behind)} if behind else {}
        self._run.commit(step, version, (), metrics, purpose, (), decisions, (), [*mine, *beyond])
        for delivery in taken:
            del self._here[delivery]
            self._advantages.pop(delivery, None)
        for id_ in over:
            del self._groups[id_]
        self._want()

    def _outcome(self, one: messages.SampleOutcome) -> messages.DeliveryOutcome:
        """With the advantage of each turn that was rewarded: its own where the step trained it, else the episode's."""
        own = self._advantages.get(one.sample_id, {}) if one.outcome == "consumed" else {}
        return messages.DeliveryOutcome(
            one.sample_id,
            one.outcome,
            one.reward,
            one.advantage,
            one.reason,
            one.reward_version,
            tuple(
                messages.TurnAdvantage(turn.number, own.get(turn.number, one.advantage))
                for row in self._here[one.sample_id].rows
                for turn in row.turns
            ),
        )


def said(row: messages.DeliveredRow) -> bytes:
    """The trained tokens of a row, packed."""
    if not row.mask:
        return row.completion
    return b"".join(row.completion[4 * i : 4 * i + 4] for i, one in enumerate(row.mask) if one)


@dataclass(frozen=True, slots=True)
class Opened:
    """As `opening.Opened`: in place of tasks and of a reward function. `attach`: the run, once it is open."""

    config: RunConfig
    tasks: TaskSet
    scorer: EpisodeScorer

    def attach(self, run: object) -> DeliveredRun:
        assert isinstance(run, Run)
        return DeliveredRun(run, self.scorer.version)


def opened(config: RunConfig, *, local: bool = False) -> Opened:
    """Raises `ConfigError` with `local`: there is no daemon that could deliver."""
    if local:
        raise ConfigError(
            "data.episodes_of: episodes come from another run by way of the daemon, and --local has none",
            "start the run as any other",
        )
    source = f"episodes-of-{config.data.episodes_of}"
    return Opened(config, TaskSet(0, source), EpisodeScorer(config.reward.version or source))
