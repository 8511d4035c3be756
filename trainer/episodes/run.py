"""Rank 0: episodes in the place of samples. `EpisodeRun` is a run to the loop: groups go in, whole groups come out, a step is committed.

    submit(group of task t)  -> n episodes, each with its name and key --> pool --> environment workers --> gateway --> engines
    poll                     <- a group once its n episodes are over: an episode is one sample, whose reward came with it
    commit(outcomes)         -> the daemon: outcomes of episodes, with the turns that they consist of; they end

An episode is named by what it is of, `PURPOSE-STEP.PROMPT.INDEX.LIFE`, in every attempt of a trainer. So one that is asked for
again, after a lost worker or a restart of the whole job, finds its turns in the ledger, and none is generated twice. Where that cannot be
(the ledger has ended it, its turns are of other weights than the step's, its setting says restart), it has another life, under another
name; the step's commit ends the earlier one too, with the reason.

Boundary: between the loop and all that plays.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from scavenger.config import RunConfig
from scavenger.errors import RewardError
from scavenger.protocol import messages
from scavenger.weights.manifest import Manifest
from trainer.data.batching import TrainRow
from trainer.episodes import wire
from trainer.episodes.passing import Daemon, PassingRun, turn_rewards_of
from trainer.episodes.wire import OVER_BUDGET

#: Why an episode has no row of this run's; `scavenger.ledger.redaction` knows it.
NOT_HEARD = "the episode's budget was used up before an agent of this run spoke"
#: Between two looks at the daemon while episodes are waited for.
LOOK_S = 0.25
#: Seconds of waiting between two lines that say how far a step's episodes are.
TELL_S = 30.0
#: Lives of one episode that end for no fault of its environment's.
MOST_LIVES = 8


class Pool(Protocol):
    """`trainer.episodes.pool.EnvironmentPool`."""

    @property
    def losses(self) -> int: ...
    @property
    def resumed(self) -> int: ...
    def play(self, ask: wire.Play) -> None: ...
    def poll(self, timeout_s: float) -> list[wire.Played]: ...


class Gateway(Protocol):
    """`trainer.episodes.gateway.RunGateway`."""

    def begin(self, episode: str) -> str: ...
    def check(self) -> None: ...


# ---------------------------------------------------------------- what becomes of an episode that is over


@dataclass(frozen=True, slots=True)
class Keep:
    """It is a sample of its group."""


@dataclass(frozen=True, slots=True)
class Again:
    """It is played anew, as another life. `failed`: its environment failed, which counts."""

    reason: str
    failed: bool


@dataclass(frozen=True, slots=True)
class Lost:
    """It is a sample without a reward."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unheard:
    """It is a sample without a reward, and no failure: its budget was used up before an agent of this run spoke. What agents of other runs
    said in it counts.
    """

    reason: str


def verdict(
    played: wire.Played, wrong_weights: str, lives: int, failures: int, retries: int
) -> Keep | Again | Lost | Unheard:
    """What becomes of an episode that is over. `wrong_weights`: why its turns are not the step's. `lives`, `failures`: before this one.

    A failure is tried again, unless it is final, as a reward function's is (`reward.retries`). Other lives end for reasons of ours, and
    there is a bound to them too: an episode that never comes to its end holds up its step.
    """
    why = played.again or ("" if played.error else wrong_weights)
    if why:
        return Again(why, False) if lives < MOST_LIVES else Lost(f"{why}, {lives + 1} times")
    if played.error and played.final:
        return Lost(f"failed: {played.error}")
    if played.error:
        return Again(played.error, True) if failures < retries else Lost(f"failed: {played.error}")
    if not played.branches and played.stopped_by == OVER_BUDGET:
        return Unheard(NOT_HEARD)
    if not played.branches:
        return Lost("the model said nothing in it")
    return Keep()


# ---------------------------------------------------------------- how far a step is


def progress_line(purpose: str, step: int, over: int, episodes: int, turns: int) -> str:
    """For people, of a step whose episodes are waited for. `turns`: of the episodes that are `over`, which alone have told theirs. Pure."""
    what = f"step {step}" if purpose == "train" else f"evaluation after step {step}"
    counted = f", {turns} turns" if over else ""
    return f"{what}: {over} of {episodes} episodes over{counted}"


# ---------------------------------------------------------------- the run


@dataclass(slots=True)
class _Episode:
    """One episode of a group, over its lives. `earlier`: names of those that are over, and why. `lost`: why it is a sample without a
    reward.
    """

    id: int
    group: _Group
    index: int
    lives: int = 0
    failures: int = 0
    earlier: list[tuple[str, str]] = field(default_factory=list)
    played: wire.Played | None = None
    lost: str = ""
    advantages: Mapping[int, float] = field(
        default_factory=dict
    )  # of rewarded turns, as the step trains them

    @property
    def name(self) -> str:
        group = self.group
        return f"{group.purpose}-{group.step}.{group.spec.prompt_index}.{self.index}.{self.lives}"

    @property
    def over(self) -> bool:
        return self.played is not None or bool(self.lost)


@dataclass(slots=True)
class _Group:
    id: int
    purpose: str
    step: int
    version: int
    spec: messages.GroupSpec
    episodes: list[_Episode] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PlaySettings:
    """`seed`: of the run. `ahead`: a step's turns may be of newer weights than it was asked for with."""

    seed: int
    retries: int
    stops: bool  # at an episode that failed
    ahead: bool
    version: str  # of what gives the rewards

    @classmethod
    def of(cls, config: RunConfig, version: str) -> PlaySettings:
        return cls(
            config.run.seed,
            config.reward.retries,
            config.reward.on_reward_error == "stop",
            config.algorithm.max_off_policy_steps > 0,
            version,
        )


class EpisodeRun(PassingRun):
    """See the module. The loop's `TrainerRun`, and scoring's `Episodes`."""

    def __init__(
        self,
        run: Daemon,
        pool: Pool,
        gateway: Gateway,
        settings: PlaySettings,
        say: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(run)
        self._pool, self._gateway, self._settings, self._say = pool, gateway, settings, say
        self._clock, self._waited_s = clock, 0.0  # since the last commit, or the last line of progress
        self._roots = {version: root for _, version, root in run.versions}
        self._next_group = self._next_episode = 1
        self._by_name: dict[str, _Episode] = {}  # under way
        self._episodes: dict[int, _Episode] = {}  # not committed
        self._done: list[messages.GroupDone] = []
        self._looked_at = 0.0
        self._lost_before = (0, 0)  # workers and episodes that the last commit told of

    def publish(self, step: int, manifest: Manifest, *sources: messages.WeightSource) -> None:
        super().publish(step, manifest, *sources)
        self._roots[manifest.version] = manifest.root

    # ---------------------------------------------------------------- played

    def submit(
        self, step: int, version: int, groups: Sequence[messages.GroupSpec], purpose: str = "train"
    ) -> tuple[int, ...]:
        """Have the episodes of these groups played. `meta` names the task."""
        ids = []
        for spec in groups:
            group = _Group(self._next_group, purpose, step, version, spec)
            self._next_group += 1
            ids.append(group.id)
            for index in range(spec.n):
                episode = _Episode(self._next_episode, group, index)
                self._next_episode += 1
                group.episodes.append(episode)
                self._episodes[episode.id] = episode
                self._play(episode)
        return tuple(ids)

    def poll(self, timeout_s: float) -> list[messages.GroupDone]:
        """Groups whose every episode is over; waits up to `timeout_s` for the first. Raises `RewardError` where a failed one stops the
        run.
        """
        now = self._clock()
        deadline = now + timeout_s
        while True:
            before, left = now, deadline - now
            for played in self._pool.poll(0.0 if self._done else max(0.0, min(left, LOOK_S))):
                self._over(played)
            now = self._clock()
            if now - self._looked_at > LOOK_S:
                self._looked_at = now
                self._run.poll(0.0)  # what it brings is of attempts that had no environment
                self._gateway.check()
            self._tell_progress(now - before)
            if self._done or now >= deadline:
                done, self._done = self._done, []
                return done

    def _tell_progress(self, waited_s: float) -> None:
        """Every `TELL_S` seconds of waiting say how far the oldest step is that lacks episodes: an agent's episode takes minutes."""
        self._waited_s = self._waited_s + waited_s if self._by_name else 0.0
        if self._waited_s < TELL_S:
            return
        self._waited_s = 0.0
        step, purpose = min((one.group.step, one.group.purpose) for one in self._by_name.values())
        mine = [
            one for one in self._episodes.values() if (one.group.step, one.group.purpose) == (step, purpose)
        ]
        turns = sum(len(one.played.calls) for one in mine if one.played is not None)
        self._say(progress_line(purpose, step, sum(one.over for one in mine), len(mine), turns))

    def _play(self, episode: _Episode) -> None:
        name, spec = episode.name, episode.group.spec
        self._by_name[name] = episode
        task = int(msgspec.json.decode(spec.meta)["task"])
        seed = self._settings.seed * 1_000_003 + spec.prompt_index * 1_009 + episode.index
        self._pool.play(wire.Play(name, self._gateway.begin(name), task, seed, sampling_of(spec.sampling)))

    def _over(self, played: wire.Played) -> None:
        episode = self._by_name.pop(played.episode, None)
        if episode is None or episode.over:
            return
        if played.output:
            self._say(f"episode {played.episode}: {played.error}\n{played.output}")
        if played.note:
            self._say(f"episode {played.episode}: {played.note}")
        found = verdict(
            played,
            self._wrong_weights(episode.group, played),
            episode.lives,
            episode.failures,
            self._settings.retries,
        )
        match found:
            case Keep():
                episode.played = played
            case Again(reason=reason, failed=failed):
                self._say(f"episode {played.episode} is played again: {reason}")
                if not played.gone:
                    episode.earlier.append((played.episode, reason))
                episode.lives += 1
                episode.failures += failed
                self._play(episode)
            case Unheard(reason=reason):
                episode.played, episode.lost = played, reason
            case Lost(reason=reason):
                if self._settings.stops:
                    raise RewardError(
                        f"episode {played.episode}: {reason}",
                        'mend the environment, or set reward.on_reward_error = "mask" to leave such episodes out',
                        quoted=played.output,
                    )
                episode.lost = reason
        if all(one.over for one in episode.group.episodes):
            self._deliver(episode.group)
            self._done.append(self._whole(episode.group))

    def _deliver(self, group: _Group) -> None:
        """What other runs' policies said in the group's episodes goes to their trainers. Of an evaluation nothing is trained."""
        if group.purpose != "train":
            return
        for policy, shares in shares_of(group.episodes).items():
            self._run.deliver(policy, group.step, group.spec.prompt_index, shares)

    def _wrong_weights(self, group: _Group, played: wire.Played) -> str:
        """Why the turns are not of the step's weights; "" where they are."""
        wanted = {self._roots.get(group.version)}
        if self._settings.ahead:
            wanted |= {root for version, root in self._roots.items() if version >= group.version}
        for call, version in zip(played.calls, played.versions, strict=True):
            if self._roots.get(version) not in wanted:
                return (
                    f"call {call} was answered by version {version}, which is not the step's {group.version}"
                )
        return ""

    def _whole(self, group: _Group) -> messages.GroupDone:
        kept = [one.played for one in group.episodes if one.played is not None and one.played.branches]
        return messages.GroupDone(
            group.id,
            group.step,
            group.version,
            group.purpose,
            group.spec.prompt_index,
            kept[0].branches[0].prompt if kept else b"",
            group.spec.meta,
            tuple(self._sample(one) for one in group.episodes),
        )

    def _sample(self, episode: _Episode) -> messages.DoneSample:
        """The episode as one sample: all that the model said in it, one turn after another."""
        played = episode.played
        if played is None or episode.lost:
            return messages.DoneSample(
                episode.id, episode.index, b"", b"", b"", "stop", 0, error=episode.lost
            )
        tokens = b"".join(said(branch) for branch in played.branches)
        logprobs = b"".join(branch.behaviour for branch in played.branches)
        return messages.DoneSample(
            episode.id,
            episode.index,
            tokens,
            logprobs,
            logprobs,
            played.finish,
            0,
            reward=played.reward,
            reward_version=self._settings.version,
        )

    # ---------------------------------------------------------------- as scoring's episodes

    def rows(
        self, sample: messages.DoneSample, advantage: float, of_turns: Mapping[int, float]
    ) -> tuple[TrainRow, ...]:
        episode = self._episodes[sample.sample_id]
        assert episode.played is not None
        episode.advantages = of_turns
        return self._rows_of(episode.played.branches, sample.sample_id, advantage, of_turns)

    def turn_rewards(self, sample: messages.DoneSample) -> Mapping[int, float]:
        played = self._episodes[sample.sample_id].played
        return turn_rewards_of(played.branches) if played is not None else {}

    def parts(self, sample: messages.DoneSample) -> Mapping[str, float]:
        played = self._episodes[sample.sample_id].played
        return played.parts if played is not None else {}

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
        """Record that the step was taken with these episodes. They end, and so do their earlier lives, each with its reason."""
        mine = [self._episodes[outcome.sample_id] for outcome in outcomes]
        apart: dict[int, list[messages.TokenDifferences]] = {}
        for one in differences:
            apart.setdefault(one.sample_id, []).append(one)
        ended = [
            taken
            for outcome, episode in zip(outcomes, mine, strict=True)
            for taken in outcomes_of(
                outcome,
                episode.name,
                episode.played,
                episode.earlier,
                apart.get(episode.id, ()),
                episode.advantages,
            )
        ]
        figures = metrics_of([one.played for one in mine if one.played is not None], mine)
        metrics |= figures | self._lost_since()
        self._run.commit(step, version, (), metrics, purpose, ended, decisions)
        self._waited_s = 0.0
        for episode in mine:
            del self._episodes[episode.id]

    def _lost_since(self) -> dict[str, float]:
        """Environment workers that were lost since the last commit, and the episodes that went on elsewhere."""
        (workers, episodes), now = self._lost_before, (self._pool.losses, self._pool.resumed)
        self._lost_before = now
        return {
            "environment_workers_lost": float(now[0] - workers),
            "episodes_resumed": float(now[1] - episodes),
        }


def said(branch: wire.Branch) -> bytes:
    """The trained tokens of a row, packed."""
    if not branch.mask:
        return branch.completion
    tokens = branch.completion
    return b"".join(tokens[4 * i : 4 * i + 4] for i, one in enumerate(branch.mask) if one)


def sampling_of(how: messages.Sampling) -> dict[str, float | int | list[str]]:
    """By vLLM's names. The model's stop tokens are the gateway's to add."""
    found: dict[str, float | int | list[str]] = {
        "temperature": how.temperature,
        "top_p": how.top_p,
        "max_tokens": how.max_tokens,
    }
    found |= {"top_k": how.top_k} if how.top_k else {}
    found |= {"min_tokens": how.min_tokens} if how.min_tokens else {}
    return found | ({"stop": list(how.stop)} if how.stop else {})


def shares_of(episodes: Sequence[_Episode]) -> dict[str, list[messages.EpisodeShare]]:
    """By the name of another run: what its policy said in the episodes that count."""
    found: dict[str, list[messages.EpisodeShare]] = {}
    for episode in episodes:
        for part in episode.played.others if episode.played is not None else ():
            if not part.branches or not part.calls:
                continue
            requests = tuple(messages.named_request(episode.name, call, part.run) for call in part.calls)
            rows = tuple(
                messages.DeliveredRow(one.prompt, one.completion, one.mask, one.behaviour, one.turns)
                for one in part.branches
            )
            share = messages.EpisodeShare(episode.name, episode.index, part.reward, requests, rows)
            found.setdefault(part.run, []).append(share)
    return dict(sorted(found.items()))


def outcomes_of(
    outcome: messages.SampleOutcome,
    name: str,
    played: wire.Played | None,
    earlier: Sequence[tuple[str, str]] = (),
    differences: Sequence[messages.TokenDifferences] = (),
    advantages: Mapping[int, float] | None = None,
) -> list[messages.EpisodeOutcome]:
    """What the daemon is told of one episode and of its earlier lives, which led to nothing. `advantages`: of its turns, by number, where
    they were rewarded and trained.
    """
    calls = played.calls if played is not None else ()
    reason = outcome.reason or (played.note if played is not None else "")
    return [
        messages.EpisodeOutcome(
            name,
            outcome.outcome,
            outcome.reward,
            outcome.advantage,
            messages.words(reason),
            outcome.reward_version,
            tuple(messages.named_request(name, call) for call in calls),
            played.worker[:512] if played is not None else "",
            tuple(differences),
            turns_of(outcome, played, advantages or {}),
        ),
        *(
            messages.EpisodeOutcome(life, "masked", math.nan, 0.0, messages.words(why))
            for life, why in earlier
        ),
    ]


def turns_of(
    outcome: messages.SampleOutcome, played: wire.Played | None, advantages: Mapping[int, float]
) -> tuple[messages.TurnOutcome, ...]:
    """Of the turns that were rewarded what each earned, and its advantage: the episode's where the step did not train it."""
    own = advantages if outcome.outcome == "consumed" else {}
    return tuple(
        messages.TurnOutcome(end, turn.reward, own.get(turn.number, outcome.advantage))
        for row in (played.branches if played is not None else ())
        for turn, end in messages.turn_ends(row.prompt, row.completion, row.mask, row.turns)
    )


def metrics_of(played: Sequence[wire.Played], episodes: Sequence[Any]) -> dict[str, float]:
    """Figures of a step's episodes."""
    if not played:
        return {}
    count = len(played)
    return {
        "turns_mean": sum(len(one.calls) for one in played) / count,
        "turns_max": float(max(len(one.calls) for one in played)),
        "branches_mean": sum(len(one.branches) for one in played) / count,
        "episodes_replayed": float(sum(one.lives for one in episodes)),
        "episodes_branched": float(sum(bool(one.note) for one in played)),
        "seconds_episode": math.fsum(one.seconds for one in played) / count,
        "seconds_episode_model": math.fsum(one.seconds_model for one in played) / count,
        "seconds_episode_rest": math.fsum(one.seconds_rest for one in played) / count,
    }
