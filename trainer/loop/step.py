"""One training step on rank 0: submit, stream, train, update. Drives the train-step state machine; decides nothing.

Owns the step's groups between arrival and commit. Micro-steps run in the order in which groups come; what they sum to does not
depend on it (see `model`). With `updates_per_step` > 1 the first mini-batch streams; the others need logprobs of the step's start
(proximal), which are computed as their groups come, and are trained when the last has come. Algorithms whose advantages need the
whole batch ("barrier") do not stream: everything is trained when the last group has come.

Boundary: one step; checkpoints, evaluations and the run's end are `trainer/loop/run.py`'s.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from scavenger.config import RunConfig
from scavenger.errors import EngineError, StaleSamples, WireError
from scavenger.protocol import messages, reserved_memory, train_step
from scavenger.protocol.step_session import StepSession
from trainer.algorithms import agreement, differences
from trainer.algorithms.rows import DenominatorShare, denominator
from trainer.algorithms.scoring import Judged, ScoredGroup, Scoring, specs
from trainer.data import prefixes, replay
from trainer.data.batching import (
    Micro,
    TrainRow,
    balanced,
    mini_batch_alone,
    mini_batch_of,
    one_per_group,
    rounds,
    spread,
)
from trainer.data.group_filter import NO_FILTER
from trainer.data.prompts import PromptTask
from trainer.data.replay import KeptGroup
from trainer.engine_control import Engines
from trainer.loop.metrics import Capacity, Drafts, Seconds, TokenSources, summarise
from trainer.loop.ranks import Ranks
from trainer.loop.trainer_run import TrainerRun
from trainer.model.learner import RowStats, learning_rate

POLL_S = 0.1
#: While groups are being scored: scores that come do not end a poll for groups.
SCORED_POLL_S = 0.01
#: Between two questions whether late groups may be trained in a later step.
LATE_AGAIN_S = 1.0


class GroupSource(Protocol):
    def poll(self, timeout_s: float) -> list[messages.GroupDone]: ...


class Inbox:
    """`expect` names what was submitted; `poll` gives each group once. `came` is told of each as soon as it is here."""

    def __init__(
        self, run: GroupSource, came: Callable[[messages.GroupDone], None] = lambda group: None
    ) -> None:
        self._run = run
        self._came = came
        self._expected: dict[int, tuple[str, int]] = {}  # group id -> (purpose, step)
        self._early: list[messages.GroupDone] = []

    def expect(self, purpose: str, step: int, groups: tuple[int, ...]) -> None:
        self._expected |= dict.fromkeys(groups, (purpose, step))

    def waits_for(self, purpose: str, step: int) -> list[int]:
        """Groups of this step that were not given yet."""
        return sorted(group for group, of in self._expected.items() if of == (purpose, step))

    def poll(self, purpose: str, step: int, timeout_s: float) -> list[messages.GroupDone]:
        """Groups of this step that came; waits up to `timeout_s` for the first. Raises `WireError` for a group that was not submitted."""
        wanted = (purpose, step)
        waits = not any(self._expected[group.group_id] == wanted for group in self._early)
        for group in self._run.poll(timeout_s if waits else 0.0):
            if group.group_id not in self._expected:
                raise WireError(
                    f"group {group.group_id} of step {group.step} came while step {step} was under way"
                )
            self._came(group)
            self._early.append(group)
        mine = [group for group in self._early if self._expected[group.group_id] == wanted]
        self._early = [group for group in self._early if self._expected[group.group_id] != wanted]
        for group in mine:
            del self._expected[group.group_id]
        return mine


@dataclass(frozen=True, slots=True)
class StepResult:
    """`late`: indices of its prompts whose groups the next step trains. `decisions`: which groups were trained, and by what. `rewards`: of
    each group's usable samples, by the index of its prompt. `differences`: how far trainer and engine are apart at
    each token of some of the groups."""

    outcomes: tuple[messages.SampleOutcome, ...]
    metrics: dict[str, float]
    phase_log: tuple[str, ...]
    late: tuple[int, ...] = ()
    decisions: tuple[messages.DataDecision, ...] = ()
    differences: tuple[messages.TokenDifferences, ...] = ()
    rewards: Mapping[int, tuple[float, ...]] = field(default_factory=dict)


#: n -> the n prompts that follow in the data.
More = Callable[[int], Sequence[PromptTask]]


def _no_more(count: int) -> Sequence[PromptTask]:
    raise ValueError("this step has no data to replace prompts from")


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class _Kept:
    """A group that a step trained, as a later one would train it again. `versions`: of its samples, as in `DoneSample`."""

    kept: KeptGroup
    group: ScoredGroup
    versions: tuple[tuple[int, int, int], ...]


@dataclass(slots=True)
class _Aside:
    """What a step did about engines that were found wrong: how many there were; rows that were trained again, because the gradients held
    others of such engines; samples of earlier steps that were trained with tokens of them, and stay so."""

    engines: int = 0
    retrained: int = 0
    before: int = 0


@dataclass(slots=True)
class _Work:
    """One step under way."""

    step: int
    version: int
    more: More  # takes further prompts from the data
    width: int  # tokens of the longest row that may come
    mini_batch: dict[int, int]  # by prompt index
    submitted: set[int]  # ids of groups
    capacity: Capacity
    scored: dict[int, ScoredGroup] = field(default_factory=dict)  # by group id
    tokens: dict[int, int] = field(default_factory=dict)  # by group id, prompts included
    judged: dict[int, Judged] = field(default_factory=dict)  # by group id
    ready: list[ScoredGroup] = field(default_factory=list)  # wait for a round of micro-steps
    #: Rows of later mini-batches, by mini-batch and group, with their proximal logprobs.
    stash: dict[int, list[list[TrainRow]]] = field(default_factory=dict)
    stats: dict[int, RowStats] = field(default_factory=dict)  # by sample id
    #: By prompt and row: of the groups that `monitor.token_differences` keeps, as far as they were trained.
    apart: dict[int, dict[int, bytes]] = field(default_factory=dict)
    not_kept: set[int] = field(default_factory=set)  # prompts
    spans: dict[int, tuple[tuple[int, int], ...]] = field(
        default_factory=dict
    )  # by sample id: who generated it
    fresh: set[int] = field(default_factory=set)  # samples of the very weights that the step trains
    trained: list[int] = field(
        default_factory=list
    )  # ids of groups whose rows are in the gradients or in the stash
    prompt_of: dict[int, int] = field(default_factory=dict)  # group id -> index of its prompt
    prompt_of_row: dict[int, int] = field(default_factory=dict)  # row -> index of its group's prompt
    late: list[int] = field(default_factory=list)  # indices of prompts whose groups the next step trains
    replayed: list[ScoredGroup] = field(default_factory=list)  # of earlier steps
    late_asked_at: float = -math.inf  # when it was last asked whether a later step may train them
    aside: _Aside = field(default_factory=_Aside)
    seconds: Seconds = field(default_factory=Seconds)
    grad_norms: list[float] = field(default_factory=list)
    divisors: dict[int, float] = field(default_factory=dict)  # by mini-batch
    sources: TokenSources = field(default_factory=TokenSources)
    micro_steps: int = 0
    shared: int = 0  # tokens of prefixes that were computed for another sample
    rounds: int = 0  # of micro-steps, each over all groups that waited


class Stepper:
    """Runs the steps of one attempt. `reserved_awake` is what the reserved engines were last told.

    `safe_point` is called often while a step's groups come and are trained, never once its parameters begin to change.
    """

    def __init__(
        self,
        config: RunConfig,
        run: TrainerRun,
        ranks: Ranks,
        scoring: Scoring,
        sampling: messages.Sampling,
        safe_point: Callable[[], None] = _nothing,
        inbox: Inbox | None = None,
        engines: Engines | None = None,
    ) -> None:
        self._config = config
        self._engines = engines  # the launcher's, which owns their processes
        self._given_up: dict[str, str] = {}  # slots whose process is being ended, and why
        self._inbox = inbox or Inbox(run, scoring.begin)
        self._ahead: dict[int, _Work] = {}  # steps that were submitted and not begun
        self._run = run
        self._ranks = ranks
        self._scoring = scoring
        self._sampling = sampling
        self._safe_point = safe_point
        self._has_reserved = config.reserved.workers > 0
        self._trained_of: Counter[int] = Counter()  # worker -> samples of whole steps with tokens of it
        self._kept: dict[int, _Kept] = {}  # by group: what a later step may train again
        self._barrier = scoring.recipe.algorithm.streaming == "barrier"
        self.reserved_awake = False
        self._training_state_released = False  # engines were woken since training state was last asked back
        self._sleep_asked_at: float | None = None
        self._toggles: dict[str, float] = {}  # seconds of the last toggle each way, since they were last told
        self._drafts: Drafts | None = None  # once a step of a run whose engines speculate has begun

    def ask(self, step: int, version: int, prompts: Sequence[PromptTask], more: More = _no_more) -> None:
        """Have the samples of a step generated with `version`, or, asked for in advance, with newer ones as these are published.

        `more(n)`: the n prompts that follow in the data, for those that are replaced.
        """
        self._ahead[step] = self._submit(step, version, prompts, more)

    def step(
        self, step: int, version: int, prompts: Sequence[PromptTask], more: More = _no_more
    ) -> StepResult:
        """Generate with `version`, unless the step was asked for before; train, take the optimizer step. The commit is the caller's."""
        started = time.monotonic()
        if step not in self._ahead:
            self.ask(step, version, prompts, more=more)
        work = self._ahead.pop(step)
        work.capacity = self._capacity(started)
        if self._config.engine.speculation != "none" and self._drafts is None:
            self._drafts = Drafts(self._run.fleet)
        session = StepSession(
            self._plan(len(work.submitted)),
            self._run.fleet,
            self._memory(),
            reserved_awake=self.reserved_awake,
            now=time.monotonic(),
        )
        self._prepare_training(session.state)
        events = self._perform(work, session.state, session.first)
        while not session.finished:
            events.extend(self._observe(work, session, timeout_s=0.0 if events else POLL_S))
            actions = session.react(events.popleft(), time.monotonic())
            self._prepare_training(session.state)
            # At most one event: `TrainReady` ends a reaction. What was done is told before what was seen since.
            events.extendleft(self._perform(work, session.state, actions))
        return self._finish(work, session.state.log, started)

    def set_reserved(self, awake: bool) -> None:
        """Wake reserved engines, once this trainer gave back what it can of its memory; or have them sleep, and none started."""
        if not self._has_reserved:
            return
        started, held = time.monotonic(), 0
        if awake:
            held, self._training_state_released = self._ranks.release(), True
            if not self.reserved_awake:
                self._toggles["seconds_to_generating"] = time.monotonic() - started
        elif self.reserved_awake:
            self._ranks.note_engines()
            self._sleep_asked_at = started
        if self._engines is not None:
            self._engines.want(awake)
        self._run.set_reserved(awake, held)
        self.reserved_awake = awake

    def _prepare_training(self, state: train_step.StepState) -> None:
        """As soon as it is known that engines gave their memory back: bring training state to the GPUs, while groups are waited for."""
        if not self._training_state_released or state.phase not in (
            train_step.StepPhase.TRAIN,
            train_step.StepPhase.FINISH,
        ):
            return
        self._ranks.take_back()
        self._training_state_released = False
        if self._sleep_asked_at is not None:
            self._toggles["seconds_to_training"] = time.monotonic() - self._sleep_asked_at
            self._sleep_asked_at = None

    def _memory(self) -> reserved_memory.ReservedObservation:
        present = self._engines.present() if self._engines is not None else None
        return reserved_memory.observe(
            self._run.fleet, self._run.reserved_order, present, launched=self._engines is not None
        )

    def _tell_gone(self) -> reserved_memory.ReservedObservation | None:
        """Memory of reserved engines that are to sleep; None otherwise. Engines whose process exited are reported to the daemon."""
        if not self._has_reserved or self.reserved_awake:
            return None
        memory = self._memory()
        for name in memory.gone:
            self._run.end_reserved((name,), self._given_up.pop(name, "its process ended"))
        return memory

    def _end_engines(self, action: train_step.EndReserved) -> None:
        """Engines that have not given their memory back in time are ended. Raises `EngineError` where that cannot be, or did not help."""
        names = self._memory().ending
        if self._engines is None or action.again or not names:
            raise EngineError(
                f"reserved engines hold memory of the trainer's GPUs: {action.reason}",
                "end their processes where they were started, then start the training job again: it goes on from its checkpoint",
            )
        self._given_up |= dict.fromkeys(names, action.reason)
        self._engines.end(names, action.reason)

    # ---------------------------------------------------------------- before and during

    def _plan(self, groups: int) -> train_step.StepPlan:
        config = self._config
        return train_step.StepPlan(
            samples=groups * config.data.samples_per_prompt,
            groups=groups,
            window=config.reserved.window,
            wake_after_s=config.reserved.wake_after_s,
            harvest=config.run.harvest,
            reserved=self._has_reserved,
            round_groups=self._ranks.data_parallel,
            sleep_timeout_s=config.reserved.sleep_timeout_s,
            ahead=config.algorithm.max_off_policy_steps > 0,
        )

    def _capacity(self, now: float) -> Capacity:
        return Capacity(
            self._ranks.size, self._config.run.engine_gpus, self._config.reserved.gpus_per_engine, now
        )

    def _submit(self, step: int, version: int, prompts: Sequence[PromptTask], more: More) -> _Work:
        config = self._config
        capacity = self._capacity(time.monotonic())
        work = _Work(
            step,
            version,
            more,
            width=config.model.context_length,
            mini_batch={},
            submitted=set(),
            capacity=capacity,
        )
        if not self._scoring.recipe.dynamic:
            if all(
                prompt.tokens for prompt in prompts
            ):  # of an environment's task no length is known before it is played
                work.width = max(len(prompt.tokens) for prompt in prompts) + self._sampling.max_tokens
            work.mini_batch = mini_batch_of(
                config.run.seed, step, [one.index for one in prompts], config.algorithm.updates_per_step
            )
        self._submit_groups(work, prompts)
        return work

    def _submit_groups(self, work: _Work, prompts: Sequence[PromptTask]) -> None:
        config = self._config
        groups = specs(prompts, n=config.data.samples_per_prompt, sampling=self._sampling)
        ids = self._run.submit(work.step, work.version, groups)
        self._inbox.expect("train", work.step, ids)
        work.submitted |= set(ids)
        work.prompt_of |= dict(zip(ids, (prompt.index for prompt in prompts), strict=True))
        for prompt in prompts:
            alone = mini_batch_alone(
                config.run.seed, work.step, prompt.index, config.algorithm.updates_per_step
            )
            work.mini_batch.setdefault(prompt.index, alone)

    def _replace(self, work: _Work, arrived: Sequence[messages.GroupDone]) -> list[train_step.Event]:
        """Dynamic sampling (DAPO, arXiv 2503.14476, eq. 11): groups that compare nothing are replaced by the data's next prompts.

        So the step takes the shortest stretch of the data that holds as many informative groups as it wants. Which groups are trained
        follows from the data's order alone: taking the first that complete would favour short completions. None is surplus.
        """
        config = self._config
        most = int(self._scoring.recipe.dynamic_limit * config.data.prompts_per_step)
        flat = (
            sum(not work.scored[group.group_id].informative for group in arrived)
            if self._scoring.recipe.dynamic
            else 0
        )
        count = min(flat, most - len(work.submitted))
        if count <= 0:
            return []
        self._submit_groups(work, work.more(count))
        return [train_step.GroupsAdded(count, count * config.data.samples_per_prompt)]

    def _put_off(self, work: _Work, state: train_step.StepState) -> list[train_step.Event]:
        """With `on_late = "later"`, where all that came is trained: groups that the daemon lets the next step train are of that one now.

        The daemon is asked again every `LATE_AGAIN_S`: meanwhile others may have become whole."""
        later = self._ahead.get(work.step + 1)
        if self._config.algorithm.on_late != "later" or later is None or not state.waits_for_samples:
            return []
        if time.monotonic() < work.late_asked_at + LATE_AGAIN_S:
            return []
        work.late_asked_at = time.monotonic()
        groups = self._run.defer_late(work.step, self._inbox.waits_for("train", work.step))
        if not groups:
            return []
        self._inbox.expect("train", later.step, groups)
        for group in groups:
            prompt = work.prompt_of.pop(group)
            work.submitted.discard(group)
            work.mini_batch.pop(prompt, None)
            work.late.append(prompt)
            later.submitted.add(group)
            later.prompt_of[group] = prompt
            later.mini_batch[prompt] = mini_batch_alone(
                self._config.run.seed, later.step, prompt, self._config.algorithm.updates_per_step
            )
        later.width = max(later.width, work.width)
        return [train_step.GroupsDeferred(len(groups), len(groups) * self._config.data.samples_per_prompt)]

    def _perform(
        self, work: _Work, state: train_step.StepState, actions: Sequence[train_step.Action]
    ) -> deque[train_step.Event]:
        events: deque[train_step.Event] = deque()
        for action in actions:
            match action:
                case train_step.SleepReserved():
                    self.set_reserved(False)
                case train_step.WakeReserved():
                    self.set_reserved(True)
                case train_step.EndReserved():
                    self._end_engines(action)
                case train_step.TrainReady():
                    events.append(train_step.Trained(self._train_ready(work, state.ready_groups)))
                case train_step.FinishStep():
                    pass
        return events

    def _observe(self, work: _Work, session: StepSession, timeout_s: float) -> list[train_step.Event]:
        """What happened since the last look; a `StepTick` when it waited in vain: for samples, or for rewards once these are here."""
        self._safe_point()
        state, before = session.state, time.monotonic()
        scores = self._scoring.is_pending(work.submitted)
        most_s = SCORED_POLL_S if state.outstanding else 0.0
        arrived = self._inbox.poll("train", work.step, min(timeout_s, most_s) if scores else timeout_s)
        after = time.monotonic()
        if state.reserved_awake:
            work.seconds.seed += after - before
        else:
            work.seconds.wait += after - before
        work.capacity.observe(self._run.fleet, after)
        events = session.observe(self._run.fleet, self._tell_gone())
        for group in arrived:
            work.sources.add(group.samples, work.step)
            events.append(train_step.GroupsCompleted(1, len(group.samples), scoring=1))
        alone = scores and not arrived and not state.outstanding
        scored = self._scoring.take_scored(work.submitted, timeout_s if alone else 0.0)
        untrained = sum(not self._arrive(work, judged) for judged in scored)
        # GroupsAdded comes first: else the machine could finish before it knows of the replacements.
        events = self._replace(work, [judged.group for judged in scored]) + events
        if scored:
            events.append(train_step.GroupsScored(len(scored), untrained))
        if (scored or arrived) and self._config.algorithm.max_off_policy_steps:
            self._report_progress(work)
        work.seconds.reward += time.monotonic() - after
        if not events:
            events = self._put_off(work, state)
        # A `StepTick` from a poll that did not wait would keep the loop from ever waiting again.
        return events or ([train_step.StepTick()] if timeout_s else [])

    def _arrive(self, work: _Work, judged: Judged) -> bool:
        """Take in a group's rewards; True when it can be trained at once. Where advantages need the whole batch, it waits for that."""
        group = judged.group
        work.tokens[group.group_id] = sum(
            messages.token_count(group.prompt) + messages.token_count(sample.tokens)
            for sample in group.samples
        )
        work.judged[group.group_id] = judged
        work.spans |= {sample.sample_id: sample.spans for sample in group.samples}
        work.fresh |= {sample.sample_id for sample in group.samples if self._is_fresh(sample, work.step)}
        if self._barrier:
            return False
        (scored,) = self._scoring.settle([judged])
        work.scored[group.group_id] = scored
        if scored.rows:
            work.ready.append(scored)
        return bool(scored.rows)

    # ---------------------------------------------------------------- training

    def _rounds(self, work: _Work, groups: Sequence[Sequence[TrainRow]]) -> tuple[tuple[Micro, ...], ...]:
        """Micro-batches for as many context groups as there are; each has a budget for every rank of it."""
        trainer, at_once = self._config.trainer, self._ranks.data_parallel
        if self._config.run.deterministic:
            return rounds(one_per_group(groups, width=work.width), at_once)
        if trainer.share_prefixes:
            return prefixes.balanced(groups, budget=trainer.micro_batch_tokens, ranks=at_once)
        budget = trainer.micro_batch_tokens * trainer.context_parallel
        if trainer.packing:
            return balanced(groups, budget=budget, ranks=at_once)
        return rounds(spread(groups, budget=budget, ranks=at_once), at_once)

    def _train(
        self, work: _Work, groups: Sequence[Sequence[TrainRow]], safe_point: Callable[[], None] = _nothing
    ) -> None:
        for one_round in self._rounds(work, groups):
            safe_point()
            for stats in self._ranks.train(one_round):
                self._note_apart(work, stats)
                work.stats[stats.sample_id] = msgspec.structs.replace(stats, difference=b"")
            work.shared += sum(micro.shared for micro in one_round)
            work.micro_steps += 1

    def _note_apart(self, work: _Work, stats: RowStats) -> None:
        """Keep its differences where its group is, as far as is known by now, among those of the step that are kept."""
        share, prompt = self._config.monitor.token_differences, work.prompt_of_row.get(stats.sample_id)
        if not share or prompt is None or prompt in work.not_kept:
            return
        if prompt not in work.apart:
            # Prompts that take the place of others may come yet, and more groups be kept then.
            groups = len(work.submitted)
            if self._scoring.recipe.dynamic:
                limit = self._scoring.recipe.dynamic_limit * self._config.data.prompts_per_step
                groups = max(groups, int(limit))
            seed, known = self._config.run.seed, {*work.apart, prompt}
            kept = differences.first(seed, work.step, known, differences.most(share, groups))
            work.not_kept |= known - set(kept)
            work.apart = {one: work.apart.get(one, {}) for one in kept}
        if prompt in work.apart:
            work.apart[prompt][stats.sample_id] = stats.difference

    def _apart(self, work: _Work) -> tuple[messages.TokenDifferences, ...]:
        """What the daemon is told of the groups that are kept."""
        rows = {group.prompt_index: group.rows for group in work.scored.values()}
        values = {row: value for of_group in work.apart.values() for row, value in of_group.items()}
        count = differences.most(self._config.monitor.token_differences, len(work.submitted))
        kept = differences.first(self._config.run.seed, work.step, work.apart, count)
        return tuple(differences.reported([rows[prompt] for prompt in kept], values))

    def _train_ready(self, work: _Work, ready: int) -> int:
        """Micro-steps over the first `ready` groups that the machine knows of; returns how many. Deterministic: one round of them."""
        started = time.monotonic()
        count = min(ready, self._ranks.data_parallel) if self._config.run.deterministic else ready
        taken, work.ready = work.ready[:count], work.ready[count:]
        work.rounds += 1
        self._train_groups(work, taken)
        self._compare(work, taken)
        work.seconds.train += time.monotonic() - started
        self._report_progress(work)
        return len(taken)

    def _report_progress(self, work: _Work) -> None:
        """Of groups that were trained, or have nothing to train; with steps in advance also how many have their rewards: reserved engines
        generate for later steps while the trainer waits for the others'."""
        waiting = {group.group_id for group in work.ready}
        past = [tokens for group, tokens in work.tokens.items() if group not in waiting]
        seconds = work.seconds.train
        if not self._config.algorithm.max_off_policy_steps:
            self._run.trained(work.step, len(past), sum(past), seconds)
            return
        scored = len(work.judged)
        if self._barrier and scored < len(work.submitted):
            scored = 0  # none can be trained before the last one has its rewards
        self._run.trained(work.step, len(past), sum(past), seconds, scored, self._scoring.reward_s)

    def _train_groups(self, work: _Work, groups: Sequence[ScoredGroup]) -> None:
        """Add the gradients of those in the first mini-batch; keep the others for theirs."""
        work.trained += [group.group_id for group in groups]
        own = [group for group in groups if group.group_id in work.scored]  # and not of earlier steps
        work.prompt_of_row |= {row.sample_id: group.prompt_index for group in own for row in group.rows}
        first = [group.rows for group in groups if work.mini_batch[group.prompt_index] == 0]
        later = [group for group in groups if work.mini_batch[group.prompt_index] > 0]
        self._train(work, first, self._safe_point)
        if later:
            self._stash(work, later)

    def _is_fresh(self, sample: messages.DoneSample, step: int) -> bool:
        """Whether `step` trains the very weights that generated all of a sample's tokens. Where that is not known it is not."""
        if not self._config.algorithm.max_off_policy_steps:
            return True
        return bool(sample.versions) and all(of_step == step - 1 for _, of_step, _ in sample.versions)

    def _compare(self, work: _Work, groups: Sequence[ScoredGroup]) -> None:
        """Report how engines agree on what was just trained or stashed; mask what those generated that the daemon set aside.

        All rows of a step are reported before its first update: until then its gradients can be given up. What older weights generated
        differs from the trainer's for its age, and says nothing of an engine.
        """
        rows = {row.sample_id for group in groups for row in group.rows}
        found = {sample_id: work.stats[sample_id].agreement for sample_id in rows & work.stats.keys()}
        stashed = [row for mini_batch in work.stash.values() for of_group in mini_batch for row in of_group]
        found |= {row.sample_id: agreement.of_row(row) for row in stashed if row.sample_id in rows}
        fresh = {sample_id: one for sample_id, one in found.items() if sample_id in work.fresh}
        spans = agreement.report(fresh, work.spans)
        if not spans:
            return
        new = [
            one
            for one in self._run.report_agreement(work.step, spans)
            if one.worker_id not in self._scoring.suspects
        ]
        if new:
            self._mask(work, new)

    def _mask(self, work: _Work, suspects: Sequence[messages.Suspect]) -> None:
        """Take the samples of these workers out of the step. Where its gradients hold any of them, all are given up and made anew without:
        they are sums, and the advantages of a masked sample's group are others (I7)."""
        self._scoring.suspects |= {one.worker_id for one in suspects}
        changed = {}
        for group_id, judged in work.judged.items():
            masked = self._scoring.mask_suspects(judged)
            if masked is not judged:
                changed[group_id] = masked
        work.judged |= changed
        # With advantages over the whole batch one sample less changes all.
        scope = [work.judged[group_id] for group_id in (work.judged if self._barrier else changed)]
        scope.sort(key=lambda one: one.group.prompt_index)
        settled = (
            self._scoring.settle(scope)
            if self._barrier
            else [self._scoring.settle([one])[0] for one in scope]
        )
        anew = {group.group_id: group for group in settled}
        known = {*work.trained, *(group.group_id for group in work.ready)}
        # The filter had left these out; without the masked samples their rewards are within its bounds.
        back = [group for group in settled if group.rows and group.group_id not in known]
        work.scored |= anew
        work.ready = [anew.get(group.group_id, group) for group in work.ready]
        before = sum(self._trained_of.pop(one.worker_id, 0) for one in suspects)
        work.aside.engines += len(suspects)
        work.aside.before += before
        tainted = not anew.keys().isdisjoint(work.trained)
        for one in suspects:
            anew_too = ", and the gradients of the step are made anew without them" if tainted else ""
            self._scoring.say(
                f"LOOK: worker {one.worker_id} on node {one.node or 'unknown'} was set aside: {one.reason}. Samples that it took part in "
                f"are masked{anew_too}; of earlier steps {before} were trained"
            )
        if tainted:
            self._train_anew(work)
        if back:
            self._train_groups(work, back)
            self._compare(work, back)

    def _train_anew(self, work: _Work) -> None:
        """Give up the gradients of the step and train the groups that were trained, as they are now."""
        self._ranks.discard()
        groups = [work.scored[group_id] for group_id in work.trained]
        work.aside.retrained += sum(len(group.rows) for group in groups)
        work.trained.clear()
        work.stats.clear()
        work.apart.clear()
        work.not_kept.clear()
        work.prompt_of_row.clear()
        work.stash.clear()
        self._train_groups(work, groups)

    def _stash(self, work: _Work, groups: Sequence[ScoredGroup]) -> None:
        """Keep groups of later mini-batches, with logprobs under the step's first weights."""
        proximal: dict[int, bytes] = {}
        for one_round in self._rounds(work, [group.rows for group in groups]):
            proximal |= self._ranks.proximal(one_round)
        for group in groups:
            rows = [msgspec.structs.replace(row, proximal=proximal[row.sample_id]) for row in group.rows]
            work.stash.setdefault(work.mini_batch[group.prompt_index], []).append(rows)

    def _train_whole_batch(self, work: _Work) -> None:
        """The last group has come: advantages over the whole batch, in the order of the prompts, then the training that waited."""
        started = time.monotonic()
        judged = sorted(work.judged.values(), key=lambda one: one.group.prompt_index)
        scored = self._scoring.settle(judged)
        work.scored = {group.group_id: group for group in scored}
        work.ready = [group for group in scored if group.rows]
        work.seconds.reward += time.monotonic() - started
        while work.ready:
            self._train_ready(work, len(work.ready))

    def _finish(self, work: _Work, log: tuple[str, ...], started: float) -> StepResult:
        if self._barrier:
            self._train_whole_batch(work)
        decisions = [*self._filtered(work), *self._replay(work)]
        self._check_staleness(work)
        rate = learning_rate(self._config.optimizer, work.step, self._config.run.steps)
        self._update_mini_batches(work, rate)
        ordered = sorted(work.scored.values(), key=lambda group: group.prompt_index)
        metrics = self._metrics(work, ordered, rate, started)
        for sample_id in work.stats:
            self._trained_of.update({worker_id for worker_id, _ in work.spans.get(sample_id, ())})
        self._keep(work, ordered)
        apart = self._apart(work)
        metrics["tokens_compared"] = float(sum(len(one.values) // 2 for one in apart))
        outcomes = tuple(outcome for group in ordered for outcome in group.outcomes)
        rewards = {group.prompt_index: group.rewards for group in ordered}
        return StepResult(outcomes, metrics, log, tuple(work.late), tuple(decisions), apart, rewards)

    # ---------------------------------------------------------------- which groups

    def _filtered(self, work: _Work) -> list[messages.DataDecision]:
        """What `data.filter_*` took out of the step; nothing to say where there is no filter."""
        rule = self._scoring.rule
        if rule == NO_FILTER:
            return []
        out = sum(bool(group.outside) for group in work.scored.values())
        bounds = {"min_spread": rule.min_spread, "min_mean": rule.min_mean, "max_mean": rule.max_mean}
        inputs = {name: value for name, value in bounds.items() if value is not None}
        return [messages.DataDecision("filter", len(work.scored) - out, out, inputs)]

    def _replay(self, work: _Work) -> list[messages.DataDecision]:
        """Train groups of earlier steps once more, behind all of the step's own."""
        limit, most = self._config.data.replay_groups, self._config.algorithm.max_off_policy_steps
        if not limit:
            return []
        chosen = replay.choose(
            [one.kept for one in self._kept.values()],
            work.step,
            limit=limit,
            max_age=most,
            suspects=self._scoring.suspects,
        )
        started = time.monotonic()
        ages: list[int] = []
        for group_id in chosen.taken:
            one = self._kept.pop(group_id)
            group = one.group
            ages.append(one.kept.age(work.step))
            work.replayed.append(group)
            work.sources.add_ages(one.versions, work.step)
            seed, updates = self._config.run.seed, self._config.algorithm.updates_per_step
            work.mini_batch[group.prompt_index] = mini_batch_alone(
                seed, work.step, group.prompt_index, updates
            )
        self._train_groups(work, work.replayed)
        work.seconds.train += time.monotonic() - started
        left = (chosen.too_old, chosen.set_aside, chosen.beyond_limit)
        inputs = dict(zip(("too_old", "set_aside", "beyond_limit"), map(float, left), strict=True))
        inputs |= {"max_age": float(most), "limit": float(limit), "oldest": float(max(ages, default=0))}
        return [messages.DataDecision("replay", len(ages), sum(left), inputs, chosen.taken)]

    def _keep(self, work: _Work, ordered: Sequence[ScoredGroup]) -> None:
        """Keep of this step's groups what a later one may train again."""
        limit, most = self._config.data.replay_groups, self._config.algorithm.max_off_policy_steps
        if not limit:
            return
        for group in ordered:
            samples = work.judged[group.group_id].group.samples
            versions = tuple(span for sample in samples for span in sample.versions)
            if not group.rows or not versions:
                continue
            workers = frozenset(worker for sample in samples for worker, _ in sample.spans)
            signal = math.fsum(row.signal for row in group.rows) / len(group.rows)
            oldest = min(step for _, step, _ in versions)
            kept = KeptGroup(group.group_id, work.step, oldest, signal, workers)
            again = replace(group, outcomes=(), rewards=(), lengths=(), parts=())
            self._kept[group.group_id] = _Kept(kept, again, versions)
        left = replay.worth_keeping(
            [one.kept for one in self._kept.values()], work.step + 1, limit=limit, max_age=most
        )
        self._kept = {kept.group_id: self._kept[kept.group_id] for kept in left}

    def _check_staleness(self, work: _Work) -> None:
        """Raise `StaleSamples` where the samples are too far from the weights that train them; these are a whole step's yet."""
        algorithm = self._config.algorithm
        if not algorithm.max_staleness_kl:
            return
        rows = list(work.stats.values())
        k3 = math.fsum(row.mismatch_k3 for row in rows) / max(1, sum(row.tokens for row in rows))
        if k3 > algorithm.max_staleness_kl or math.isnan(k3):
            raise StaleSamples(
                f"step {work.step}: its samples are {k3:.3g} nats a token (k3) from the weights that train them, over "
                f"algorithm.max_staleness_kl = {algorithm.max_staleness_kl:g}; the step was not taken",
                f"lower optimizer.lr, or algorithm.max_off_policy_steps = {algorithm.max_off_policy_steps}, and start the training job "
                "again: it goes on from its checkpoint",
            )

    def _update_mini_batches(self, work: _Work, rate: float) -> None:
        """One optimizer step a mini-batch, in order; rows of later ones are trained with the parameters that the earlier ones left."""
        groups = (*work.scored.values(), *work.replayed)
        with_rows = {work.mini_batch[group.prompt_index] for group in groups if group.rows}
        for mini_batch in range(self._config.algorithm.updates_per_step):
            before = time.monotonic()
            self._train(work, work.stash.get(mini_batch, []))
            trained_at = time.monotonic()
            if mini_batch in with_rows:  # otherwise no row was trained: there is no gradient
                divisor = self._denominator(work, mini_batch)
                work.divisors[mini_batch] = divisor
                work.grad_norms.append(self._ranks.update(divisor, rate))
            work.seconds.train += trained_at - before
            work.seconds.update += time.monotonic() - trained_at

    def _metrics(
        self, work: _Work, ordered: Sequence[ScoredGroup], rate: float, started: float
    ) -> dict[str, float]:
        seconds = time.monotonic() - started
        metrics = summarise(ordered, work.stats, divisor=math.fsum(work.divisors.values()))
        metrics |= {
            "lr": rate,
            "updates": float(len(work.grad_norms)),
            "grad_norm": max(work.grad_norms, default=0.0),
            "groups_asked": float(len(work.submitted)),
            "groups_later": float(len(work.late)),
            "groups_outside": float(sum(bool(group.outside) for group in ordered)),
            "groups_replayed": float(len(work.replayed)),
            "micro_steps": float(work.micro_steps),
            **({"tokens_shared": float(work.shared)} if self._config.trainer.share_prefixes else {}),
            "rounds": float(work.rounds),
            "rewards_late": float(self._scoring.take_late()),
            "engines_set_aside": float(work.aside.engines),
            "samples_set_aside": float(self._set_aside(work)),
            "samples_retrained": float(work.aside.retrained),
            "samples_trained_before": float(work.aside.before),
            "seconds": seconds,
            "seconds_seed": work.seconds.seed,
            "seconds_wait": work.seconds.wait,
            "seconds_reward": work.seconds.reward,
            "seconds_train": work.seconds.train,
            "seconds_update": work.seconds.update,
        }
        toggles, self._toggles = self._toggles, {}
        metrics |= toggles
        if self._drafts is not None:
            metrics |= self._drafts.as_metrics(self._run.fleet)
        work.capacity.observe(self._run.fleet, time.monotonic())
        return metrics | work.sources.as_metrics(seconds) | work.capacity.as_metrics()

    def _set_aside(self, work: _Work) -> int:
        """Samples of the step that an engine took part in which was set aside, in this step or before."""
        suspects = self._scoring.suspects
        return sum(
            not suspects.isdisjoint(worker_id for worker_id, _ in spans) for spans in work.spans.values()
        )

    def _denominator(self, work: _Work, mini_batch: int) -> float:
        """The true denominator of a mini-batch, whose every row was trained.

        Groups filtered for zero variance count, unless dynamic sampling replaces them: their gradient is known to be zero and was merely
        not computed, so updates shrink as fewer groups have something to say. Samples without a reward do not count, nor, in some
        algorithms, tokens that a mask took out.
        """
        recipe, counted = self._scoring.recipe, DenominatorShare()
        for group in (*work.scored.values(), *work.replayed):
            if work.mini_batch[group.prompt_index] == mini_batch:
                counted += group.counted
                if not recipe.algorithm.masked_count:
                    kept: Counter[int] = Counter()  # by sample, over all of its rows
                    for row in group.rows:
                        kept[row.whole] += work.stats[row.sample_id].kept
                    counted += DenominatorShare(
                        -sum(tokens == 0 for tokens in kept.values()),
                        sum(kept.values()) - sum(row.trained for row in group.rows),
                    )
        return max(denominator(recipe, counted), 1.0)
