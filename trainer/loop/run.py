"""The run on rank 0, from its first version to its last step. Reads top-down.

    prompts --take--> ask(step, version) --> daemon --> groups --> score --> train --> publish --> commit --> [evaluate] --> [checkpoint]
                      ahead by up to                    |----- Stepper.step -----|                            where due      where due
                      `max_off_policy_steps`

A version published "at step s" is the weights after s optimizer steps; step s + 1 samples from it. The order at a step's end is what a
restart relies on: weights are published, then the step is committed, then perhaps evaluated, then perhaps a checkpoint of it is begun,
which is written while the next step runs and counts once it is complete (`saving`). A trainer killed in between starts from an older
checkpoint and publishes those weights as a new version; the daemon sees equal root hashes and delivers what was already generated. A
resume repeats nothing of the checkpoint's step. What was due there is finished first, or recorded as `owes_evaluation`.

A trainer that is told to end stops where it is within a step, whose gradients are dropped, and writes a checkpoint of the last whole
step: an attempt that goes on from it is given the step's samples again, with every token that there is. So does one that a reward
function or an engine stops.
Boundary: the whole run on rank 0.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from scavenger.config import RunConfig
from scavenger.errors import ConfigError, EngineError, RewardError, ScavengerError, StaleSamples, WeightsError
from scavenger.protocol import messages
from scavenger.weights.manifest import Manifest
from trainer.algorithms.scoring import Scoring, specs
from trainer.checkpoint import checkpoint
from trainer.checkpoint.saving import Checkpoints
from trainer.data import curriculum
from trainer.data.prompts import PromptSource, PromptTask
from trainer.engine_control import Engines
from trainer.loop.ending import Ending, EndRequested
from trainer.loop.metrics import Judgement, alarm, summarise_evaluation
from trainer.loop.monitor import Monitor
from trainer.loop.ranks import Ranks
from trainer.loop.step import SCORED_POLL_S, Inbox, Stepper
from trainer.loop.trainer_run import TrainerRun

POLL_S = 0.1
#: What stops a run before a step's first update: parameters are a whole step's then.
BETWEEN_UPDATES = (RewardError, EngineError, ConfigError, StaleSamples)


@dataclass(frozen=True, slots=True)
class RunStart:
    """Where this attempt starts: after `step` steps; `root` (hex) is what its weights must hash to ("" = unknown).

    `path`: the checkpoint that was loaded, None for none. `cursor`: where the data goes on, the first prompt of no
    whole step. `owes_evaluation`: the one after these steps was not made. `late`: positions of earlier prompts that the next step trains.
    `base`: digest of the weights in model.path, which this attempt's checkpoints note.
    """

    step: int = 0
    root: str = ""
    path: Path | None = None
    cursor: int = 0
    owes_evaluation: bool = False
    late: tuple[int, ...] = ()
    base: str = ""


@dataclass(frozen=True, slots=True)
class Settled:
    """The last whole step, and what a checkpoint of it says. `late`: positions of prompts before `cursor` that the next step trains."""

    step: int
    version: int
    root: bytes
    cursor: int
    owes_evaluation: bool
    late: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SubmittedStep:
    """A step whose samples were submitted: where its prompts begin in the data."""

    cursor: int
    prompts: list[PromptTask]


class Loop:
    """One attempt of one run."""

    def __init__(
        self,
        config: RunConfig,
        run: TrainerRun,
        ranks: Ranks,
        scoring: Scoring,
        prompts: PromptSource,
        sampling: messages.Sampling,
        monitor: Monitor,
        start: RunStart,
        ending: Ending | None = None,
        job_id: int = 0,
        engines: Engines | None = None,
    ) -> None:
        self._config = config
        self._run = run
        self._ranks = ranks
        self._scoring = scoring
        self._prompts = prompts
        self._sampling = sampling
        self._monitor = monitor
        self._start = start
        self._ending = ending or Ending()
        self._job_id = job_id
        self._checkpoints = Checkpoints(config.run.out_dir, config.checkpoint.keep, run, ranks)
        self._inbox = Inbox(run, scoring.begin)
        self._stepper = Stepper(config, run, ranks, scoring, sampling, self._safe_point, self._inbox, engines)
        self._asked: dict[int, SubmittedStep] = {}
        self._evaluations = prompts.evaluations
        self._root = b""  # of the version that was published last
        self._settled = Settled(start.step, -1, b"", start.cursor, owes_evaluation=False, late=start.late)
        self._late = start.late
        self._cursor = start.cursor
        data, self._rates = config.data, curriculum.PassRates()
        self._bounds = (
            curriculum.Bounds(data.curriculum_min, data.curriculum_max, data.curriculum_rest)
            if data.has_curriculum
            else None
        )
        self._choices: dict[int, list[curriculum.Choice]] = {}  # by step
        if self._bounds is not None:
            for index, step, passed, scored in sorted((at[1], at[0], *at[2:]) for at in run.pass_rates):
                self._rates.note(prompts.visit(index), step, passed, scored)

    def run(self) -> None:
        """Train to the last step. Raises what stops it, `EndRequested` once a checkpoint is written; the caller closes the run."""
        if self._ranks.trains_adapters:
            self._offer(self._start.step, self._ranks.build_base(self._run.next_version))
        version = self._publish(self._start.step)
        if self._start.root and self._root.hex() != self._start.root:
            raise WeightsError(
                "the checkpoint's weights are not those that were published from it",
                "resume from another checkpoint",
            )
        self._stepper.set_reserved(True)
        self._note_whole_step(
            self._start.step, version, owes_evaluation=self._start.step == 0 or self._start.owes_evaluation
        )
        try:
            self._train()
        except EndRequested:
            self._checkpoint_at_end()
            raise
        except BETWEEN_UPDATES:
            self._checkpoint_despite_error()
            raise

    def _train(self) -> None:
        steps = self._config.run.steps
        self._evaluate_if_owed()
        for step in range(self._start.step + 1, steps + 1):
            self._safe_point()
            for ahead in range(step, min(step + self._config.algorithm.max_off_policy_steps, steps) + 1):
                self._ask(ahead)
            asked = self._asked.pop(step)
            version = self._settled.version
            result = self._stepper.step(step, version, asked.prompts, partial(self._take, step))
            published, seconds = self._timed_publish(step)
            self._late = result.late
            metrics = result.metrics | {
                "seconds_publish": seconds,
                "seconds_checkpoint": self._checkpoints.take_seconds(),
            }
            decisions = (*self._chosen(step), *result.decisions)
            self._run.commit(
                step, version, result.outcomes, metrics, decisions=decisions, differences=result.differences
            )
            self._measure(step, result.rewards)
            self._monitor.step(step, self._run.attempt, version, metrics, result.phase_log)
            if warning := alarm(metrics, self._config.monitor.mismatch_alarm):
                self._monitor.say(f"step {step}: {warning}")
            due = step == steps or bool(self._config.eval.every and step % self._config.eval.every == 0)
            self._note_whole_step(step, published, owes_evaluation=due)
            self._evaluate_if_owed()
            if step % self._config.checkpoint.every == 0 or step == steps:
                self._checkpoint()
        self._checkpoints.finish()

    def _ask(self, step: int) -> None:
        """Have a step's samples generated, with the newest weights of the time, once. With `max_off_policy_steps` its turn comes before its
        step's."""
        if step not in self._asked:
            at = self._settled
            cursor, prompts = self._cursor, self._take(step, self._config.data.prompts_per_step)
            if step == self._start.step + 1:  # an earlier attempt's last step left them to this one
                prompts = [*prompts, *(one for at in self._start.late for one in self._prompts.take(at, 1))]
            self._asked[step] = SubmittedStep(cursor, prompts)
            self._stepper.ask(step, at.version, prompts, partial(self._take, step))

    def _safe_point(self) -> None:
        """Let a written checkpoint count; raise `EndRequested` if the trainer was told to end. Only while parameters are a whole step's."""
        self._checkpoints.advance()
        self._ending.check()

    def _note_whole_step(self, step: int, version: int, *, owes_evaluation: bool) -> None:
        # A resume asks again for what was asked in advance.
        cursor = min((asked.cursor for asked in self._asked.values()), default=self._cursor)
        self._settled = Settled(step, version, self._root, cursor, owes_evaluation, self._late)

    def _take(self, step: int, count: int) -> list[PromptTask]:
        """The next prompts of the data for `step`, but for those that the curriculum passes over."""
        if self._bounds is None:
            taken = self._prompts.take(self._cursor, count)
            self._cursor += count
            return taken
        until = step - 1 - self._config.algorithm.max_off_policy_steps
        choice = curriculum.choose(self._cursor, count, until, self._prompts.visit, self._rates, self._bounds)
        self._cursor = choice.cursor
        self._choices.setdefault(step, []).append(choice)
        return [one for position in choice.taken for one in self._prompts.take(position, 1)]

    def _chosen(self, step: int) -> list[messages.DataDecision]:
        """What the curriculum did for this step; nothing to say where there is none."""
        choices, data = self._choices.pop(step, []), self._config.data
        if not choices:
            return []
        easy, hard = (sum(getattr(one, name) for one in choices) for name in ("easy", "hard"))
        bounds = {"least": data.curriculum_min, "most": data.curriculum_max}
        inputs = {name: value for name, value in bounds.items() if value is not None}
        inputs |= {"easy": float(easy), "hard": float(hard), "rest": float(data.curriculum_rest)}
        inputs["until_step"] = float(max(0, step - 1 - self._config.algorithm.max_off_policy_steps))
        taken = sum(len(one.taken) for one in choices)
        return [messages.DataDecision("curriculum", taken, easy + hard, inputs)]

    def _measure(self, step: int, rewards: Mapping[int, tuple[float, ...]]) -> None:
        """Note the pass rates of a step that is committed: as the ledger has them for a later attempt."""
        if self._bounds is not None:
            at = self._config.data.curriculum_solved_at
            for index, of_group in rewards.items():
                self._rates.note(
                    self._prompts.visit(index), step, curriculum.passed(of_group, at), len(of_group)
                )

    # ---------------------------------------------------------------- weights

    def _publish(self, step: int) -> int:
        version = self._run.next_version
        made = self._ranks.build_version(version, self._config.weights.dtype)
        self._offer(step, made)
        self._root = made.root
        return version

    def _offer(self, step: int, made: Manifest) -> None:
        self._run.publish(step, made, *self._ranks.offer(made))

    def _timed_publish(self, step: int) -> tuple[int, float]:
        started = time.monotonic()
        return self._publish(step), time.monotonic() - started

    def _checkpoint(self) -> None:
        config, at = self._config, self._settled
        self._checkpoints.begin(
            checkpoint.CheckpointState(
                step=at.step,
                version=at.version,
                root=at.root.hex(),
                cursor=at.cursor,
                seed=config.run.seed,
                updates_taken=self._ranks.updates_taken,
                dtype="float64" if config.run.deterministic else "float32",
                attempt=self._run.attempt,
                weights_dtype=config.weights.dtype,
                owes_evaluation=at.owes_evaluation,
                late=at.late,
                adapters=self._ranks.trains_adapters,
                tokenizer=self._ranks.tokenizer,
                data=self._prompts.digest,
                job=self._job_id,
                run=config.run.name,
                base=self._start.base,
            )
        )

    def _checkpoint_at_end(self) -> None:
        """The trainer was told to end: a checkpoint of the last whole step, unless there is one, or it is the beginning."""
        self._checkpoints.finish()
        if self._start.step >= self._config.run.steps:
            return  # an evaluation alone: its weights are in the checkpoint that it began with
        if self._settled.step and self._settled.step not in checkpoint.steps(self._config.run.out_dir):
            self._checkpoint()
            self._checkpoints.finish()

    def _checkpoint_despite_error(self) -> None:
        """As `_checkpoint_at_end`; what goes wrong here is said, and does not hide why the run stops."""
        step = self._settled.step
        try:
            self._checkpoint_at_end()
        except (ScavengerError, OSError) as error:
            self._monitor.say(f"the weights after step {step} could not be saved: {error}")
        else:
            if step > self._start.step or step in checkpoint.steps(self._config.run.out_dir):
                self._monitor.say(
                    f"the weights after step {step} are saved; the next start goes on from there"
                )

    # ---------------------------------------------------------------- evaluation

    def _evaluate_if_owed(self) -> None:
        if self._settled.owes_evaluation:
            self._evaluate(self._settled.step, self._settled.version)
            self._settled = replace(self._settled, owes_evaluation=False)

    def _evaluation_groups(self) -> list[messages.GroupSpec]:
        """Prompts of all sets, `samples` completions each at temperature 1; behind them the same ones, one greedy completion each."""
        groups, sampling = [], self._sampling
        whole = sum(len(one.prompts) for one in self._evaluations)
        for mode, temperature, offset in (("sampled", 1.0, 0), ("greedy", 0.0, whole)):
            how = messages.Sampling(
                max_tokens=sampling.max_tokens,
                temperature=temperature,
                top_p=1.0,
                top_k=0,
                stop_token_ids=sampling.stop_token_ids,
                stop=sampling.stop,
            )
            for one in self._evaluations:
                n = one.samples if mode == "sampled" else 1
                mark = {"mode": mode} | ({"set": one.name} if one.name else {})
                groups += specs(one.prompts, n=n, sampling=how, offset=offset, mark=mark)
        return groups

    def _evaluate(self, step: int, version: int) -> None:
        """Held-out prompts through the same engines."""
        groups = self._evaluation_groups()
        if not groups:
            return
        started = time.monotonic()
        self._stepper.set_reserved(True)
        judge = self._scoring.version
        ids = self._run.submit(step, version, groups, "eval")
        self._inbox.expect("eval", step, ids)
        waiting = set(ids)
        found: dict[int, list[Judgement]] = {}
        scored: dict[int, tuple[Mapping[str, float], ...]] = {}
        outcomes: list[messages.SampleOutcome] = []
        while waiting:
            self._safe_point()
            self._inbox.poll("eval", step, SCORED_POLL_S if self._scoring.is_pending(waiting) else POLL_S)
            for one in self._scoring.take_scored(waiting):
                group, judged = one.group, one.samples
                waiting.remove(group.group_id)
                scored[group.prompt_index] = one.parts
                found[group.prompt_index] = [
                    Judgement(r, messages.token_count(s.tokens), s.finish == "length")
                    for s, r, why in judged
                    if not why
                ]
                for sample, reward, why in judged:
                    kind, by = ("masked", "") if why else ("evaluated", judge)
                    outcomes.append(
                        messages.SampleOutcome(sample.sample_id, kind, reward, 0.0, messages.words(why), by)
                    )
        metrics: dict[str, float] = {}
        whole = sum(len(one.prompts) for one in self._evaluations)
        for of_set in self._evaluations:
            indices = [task.index for task in of_set.prompts]
            metrics |= summarise_evaluation(
                [found[index] for index in indices],
                [found[whole + index] for index in indices],
                self._config.eval.solved_at,
                [parts for index in indices for parts in scored[index]],
                of_set.name,
            )
        metrics["seconds"] = time.monotonic() - started
        metrics["rewards_late"] = float(self._scoring.take_late())
        self._run.commit(step, version, outcomes, metrics, "eval")
        self._monitor.evaluation(step, self._run.attempt, metrics)
