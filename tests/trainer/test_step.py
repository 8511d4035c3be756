"""A step over recorded groups that arrive in any order, from a fleet that comes and goes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch.distributed.device_mesh import DeviceMesh

from scavenger.config import RunConfig
from scavenger.errors import EngineError, RewardError, RewardTimeout
from scavenger.protocol import messages
from scavenger.weights.manifest import Manifest
from tests.trainer import published
from tests.trainer.published import Kept
from tests.trainer.step_prompts import of_step
from trainer.algorithms.rows import resolve
from trainer.algorithms.scoring import Scoring
from trainer.data.prompts import PromptSource, open_tokenizer
from trainer.engine_control import Engines, Present
from trainer.loop import step as stepping
from trainer.loop.comm import Solo
from trainer.loop.publish import Publisher
from trainer.loop.ranks import Ranks
from trainer.loop.step import Stepper, StepResult
from trainer.model.learner import Learner

SAMPLING = messages.Sampling(8, stop_token_ids=(1,))


def make_config(model: Path, **sections: dict[str, Any]) -> RunConfig:
    base: dict[str, dict[str, Any]] = {
        "run": {"name": "r", "steps": 3, "state_dir": "s", "out_dir": "o", "deterministic": True},
        "model": {"path": model, "context_length": 24},
        "sampling": {"max_tokens": 8},
        "data": {"prompts_per_step": 6, "samples_per_prompt": 4},
        "reserved": {"workers": 1, "wake_after_s": 0.01},
        "algorithm": {},
        "reward": {},
        "optimizer": {"lr": 1e-3},
    }
    return RunConfig.model_validate(
        {name: base.get(name, {}) | sections.get(name, {}) for name in base.keys() | sections.keys()}
    )


NAME = messages.reserved_name("0", "session")
ASLEEP = messages.Fleet(0, 0, 0, 0, 0, asleep=(NAME,), bytes_held=512)
HOLDS = messages.Fleet(0, 0, 0, 0, 0, holding=(NAME,))


class RecordedRun:
    """Answers each submit with the same made-up answers; hands them out in an order that `draw` gives, while `harvested` changes."""

    def __init__(
        self, draw: random.Random, harvested: Sequence[int] = (1,), error: str | None = None
    ) -> None:
        self.attempt, self.last_step, self.next_version = 1, 0, 1
        self.pass_rates: tuple[tuple[int, int, int, int], ...] = ()
        self.fleet = messages.Fleet(harvested[0], 1, 0, 0, 0)
        self._draw = draw
        self._harvested = list(harvested)
        self._error = error
        self._groups: list[messages.GroupDone] = []
        self.told: list[bool] = []
        self.reserved_order = 0
        self.memory = [
            ASLEEP
        ]  # what is said, poll by poll, once reserved engines are to sleep; the last goes on
        self.ended: list[tuple[str, str]] = []
        self.progress: list[tuple[int, int, int]] = []

    def submit(
        self, step: int, version: int, groups: Sequence[messages.GroupSpec], purpose: str = "train"
    ) -> tuple[int, ...]:
        self._groups = [self._answer(step, version, spec) for spec in groups]
        ids = tuple(group.group_id for group in self._groups)
        self._draw.shuffle(self._groups)
        return ids

    def _answer(self, step: int, version: int, spec: messages.GroupSpec) -> messages.GroupDone:
        made = random.Random(spec.prompt_index)
        samples = []
        for index in range(spec.n):
            count = made.randint(1, 8)
            tokens = messages.pack_tokens([made.randrange(1, 13) for _ in range(count)])
            logprobs = messages.pack_logprobs([made.uniform(-4, -2) for _ in range(count)])
            error = self._error if index == 0 else None
            number = spec.prompt_index * 10 + index
            samples.append(
                messages.DoneSample(
                    number, index, tokens, logprobs, logprobs, "stop", made.randint(0, 1), error=error
                )
            )
        return messages.GroupDone(
            100 + spec.prompt_index,
            step,
            version,
            "train",
            spec.prompt_index,
            spec.prompt,
            spec.meta,
            tuple(made.sample(samples, spec.n)),
        )

    def hear_the_fleet(self) -> None:
        """What comes with each poll of the daemon: `fleet` is of now."""
        harvested = self._harvested.pop(0) if len(self._harvested) > 1 else self._harvested[0]
        asked_to_sleep = self.told[-1:] == [False]
        memory = self.memory.pop(0) if asked_to_sleep and len(self.memory) > 1 else self.memory[0]
        if self.told[-1:] == [True]:
            memory = messages.Fleet(0, 0, 0, 0, 0, holding=(NAME,))
        self.fleet = msgspec.structs.replace(
            memory, harvested=harvested, reserved_awake=1, order=self.reserved_order
        )

    def poll(self, timeout_s: float) -> list[messages.GroupDone]:
        self.hear_the_fleet()
        somebody = self.fleet.harvested > 0 or self.told[-1:] == [True]
        count = self._draw.randint(0, 2) if somebody else 0
        taken, self._groups = self._groups[:count], self._groups[count:]
        return taken

    def set_reserved(self, awake: bool, bytes_held: int = 0) -> None:
        self.told.append(awake)
        self.reserved_order += 1

    def end_reserved(self, names: Sequence[str], reason: str) -> None:
        self.ended += [(name, reason) for name in names]
        self.memory = [ASLEEP]

    def trained(
        self, step: int, groups: int, tokens: int, seconds: float, scored: int = -1, reward_s: float = 0.0
    ) -> None:
        self.progress.append((step, groups, tokens))

    def defer_late(self, step: int, groups: Sequence[int]) -> tuple[int, ...]:
        return ()

    def report_agreement(self, step: int, spans: Sequence[messages.SpanSums]) -> tuple[messages.Suspect, ...]:
        return ()

    def publish(self, step: int, manifest: Manifest, *sources: messages.WeightSource) -> None: ...
    def commit(
        self,
        step: int,
        version: int,
        outcomes: Sequence[messages.SampleOutcome],
        metrics: dict[str, float],
        purpose: str = "train",
        *,
        decisions: Sequence[messages.DataDecision] = (),
        differences: Sequence[messages.TokenDifferences] = (),
    ) -> None: ...
    def checkpoint(
        self, step: int, version: int, root: bytes, path: str, kept: Sequence[int] | None = None
    ) -> None: ...
    def close_run(self, state: str, reason: str = "") -> None: ...


class LengthReward:
    """Longer is better, except that the group of problem 2 is worth nothing."""

    version = "length"

    def score(self, prompt: str, completion: str, meta: dict[str, Any]) -> float:
        return 0.0 if meta["answer"] == WORTHLESS else float(len(completion))


class NoReward:
    version = "none"

    def score(self, prompt: str, completion: str, meta: dict[str, Any]) -> float:
        raise RewardError("no judge")


WORTHLESS = ""


class Processes(Engines):
    """A launcher that ends at once what it is told to, and has one engine's process, in slot "0", until then."""

    def __init__(self) -> None:
        self.said: list[tuple[bool, tuple[str, ...], str]] = []
        self.runs = True

    def want(self, awake: bool) -> None:
        self.said.append((awake, (), ""))

    def end(self, names: tuple[str, ...], reason: str) -> None:
        self.said.append((False, names, reason))
        self.runs = False

    def present(self) -> Present:
        return Present(slots=("0",), running=(NAME,) if self.runs else ())


def play(
    config: RunConfig, mesh: DeviceMesh, run: RecordedRun, scorer: Any = None, engines: Engines | None = None
) -> tuple[StepResult, str]:
    global WORTHLESS
    tokenizer = open_tokenizer(config.model.path)
    prompts = of_step(PromptSource(config, tokenizer), 1)
    WORTHLESS = prompts[2].meta["answer"]
    learner = Learner(
        config.model.path,
        mesh,
        recipe=resolve(config.algorithm, 8),
        optimizer=config.optimizer,
        temperature=1.0,
        deterministic=config.run.deterministic,
        trainer=config.trainer,
    )
    ranks = Ranks(Solo(), learner, Publisher(Kept()))
    scoring = Scoring(
        scorer or LengthReward(), tokenizer, config.reward, config.algorithm, lambda line: None, 8
    )
    result = Stepper(config, run, ranks, scoring, SAMPLING, engines=engines).step(1, 1, prompts)
    manifest, _ = published.build_version(1, learner, "float64")
    return result, manifest.root.hex()


#: Figures that hold a time.
TIMES = ("seconds", "gpu_hours", "tokens_per_s")


def comparable(result: StepResult) -> dict[str, float]:
    return {name: value for name, value in result.metrics.items() if not name.startswith(TIMES)}


@pytest.mark.parametrize("updates", [1, 3])
def test_arrival_order_and_fleet_change_neither_losses_nor_weights(
    model_folder: Path, mesh: DeviceMesh, updates: int
) -> None:
    config = make_config(model_folder, algorithm={"updates_per_step": updates})
    fleets = [(1,), (0,), (6, 6, 0, 0, 0, 2, 0), (2, 2, 2, 0)]
    results = [
        play(config, mesh, RecordedRun(random.Random(seed), harvested))
        for seed, harvested in enumerate(fleets)
    ]
    first, root = results[0]
    assert first.metrics["groups_filtered"] == 1
    assert first.metrics["updates"] == updates
    assert {outcome.outcome for outcome in first.outcomes} == {"consumed", "filtered"}
    for other, other_root in results[1:]:
        assert other_root == root
        assert other.outcomes == first.outcomes
        assert comparable(other) == comparable(first)


def test_the_daemon_is_told_how_far_the_step_is_trained_filtered_groups_included(
    model_folder: Path, mesh: DeviceMesh
) -> None:
    run = RecordedRun(random.Random(0))
    result, _ = play(make_config(model_folder), mesh, run)
    groups, tokens = [at[1] for at in run.progress], [at[2] for at in run.progress]
    assert {at[0] for at in run.progress} == {1}
    assert groups == sorted(groups)
    assert tokens == sorted(tokens)
    assert groups[-1] == 6
    assert tokens[-1] > result.metrics["tokens"], "prompts count"
    assert len(tokens) == result.metrics["rounds"] <= result.metrics["micro_steps"]


class LateRun(RecordedRun):
    """One group of step 1 comes once the daemon has put it off."""

    def __init__(self, draw: random.Random, allowed: bool) -> None:
        super().__init__(draw)
        self.allowed, self.asked = allowed, 0
        self._made: list[messages.GroupDone] = []

    def submit(
        self, step: int, version: int, groups: Sequence[messages.GroupSpec], purpose: str = "train"
    ) -> tuple[int, ...]:
        made = [self._answer(step, version, spec) for spec in groups]
        self._made += made
        return tuple(group.group_id for group in made)

    def poll(self, timeout_s: float) -> list[messages.GroupDone]:
        self.hear_the_fleet()
        held = next((group for group in self._made if group.step == 1), None)
        given = [group for group in self._made if group is not held or self.asked > 2]
        self._made = [group for group in self._made if group not in given]
        return given

    def defer_late(self, step: int, groups: Sequence[int]) -> tuple[int, ...]:
        self.asked += 1
        if not self.allowed:
            return ()
        self._made = [msgspec.structs.replace(one, step=2) for one in self._made]
        self.asked = 3
        return tuple(groups)


@pytest.mark.parametrize("allowed", [True, False])
def test_a_group_that_comes_late_is_trained_in_the_next_step_where_the_daemon_says_so(
    model_folder: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    monkeypatch.setattr(stepping, "LATE_AGAIN_S", 0.0)
    config = make_config(
        model_folder,
        run={"name": "r", "steps": 2, "state_dir": "s", "out_dir": "o", "deterministic": False},
        algorithm={"max_off_policy_steps": 1, "on_late": "later"},
        reserved={"workers": 0},
    )
    tokenizer, run = open_tokenizer(config.model.path), LateRun(random.Random(0), allowed)
    learner = Learner(
        config.model.path,
        mesh,
        recipe=resolve(config.algorithm, 8),
        optimizer=config.optimizer,
        temperature=1.0,
        deterministic=False,
        trainer=config.trainer,
    )
    scoring = Scoring(LengthReward(), tokenizer, config.reward, config.algorithm, lambda line: None, 8)
    stepper = Stepper(config, run, Ranks(Solo(), learner, Publisher(Kept())), scoring, SAMPLING)
    prompts = PromptSource(config, tokenizer)
    for step in (1, 2):
        stepper.ask(step, 1, of_step(prompts, step))
    first, second = stepper.step(1, 1, of_step(prompts, 1)), stepper.step(2, 1, of_step(prompts, 2))
    each = len(of_step(prompts, 1)) * 4
    late = 4 if allowed else 0
    assert [len(first.outcomes), len(second.outcomes)] == [each - late, each + late]
    assert len({one.sample_id for one in (*first.outcomes, *second.outcomes)}) == 2 * each, "none is dropped"
    assert (len(first.late), second.late) == (int(allowed), ())
    assert first.metrics["groups_later"] == int(allowed)
    assert run.asked == 3, "it is asked again while it may not"


def test_reserved_engines_finish_the_step_when_the_harvested_die_after_the_window(
    model_folder: Path, mesh: DeviceMesh
) -> None:
    """I11, with the gradients of groups trained before the wake kept."""
    calm, calm_root = play(make_config(model_folder), mesh, RecordedRun(random.Random(3)))
    run = RecordedRun(random.Random(3), (2, 2, 2, 0))
    result, root = play(make_config(model_folder, reserved={"window": 0.1, "wake_after_s": 0.01}), mesh, run)
    assert run.told == [True, False, True, False]
    assert any(line.startswith("train -> wake: no harvested engine") for line in result.phase_log)
    assert (root, result.outcomes, comparable(result)) == (calm_root, calm.outcomes, comparable(calm))


def test_training_state_returns_once_engines_have_acknowledged_and_both_ways_of_the_toggle_are_told(
    model_folder: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `policy.predictive.learned` reads them: the seconds from the order to sleep until it may train, and those of giving back."""
    run, order = RecordedRun(random.Random(3), (2, 2, 2, 0)), list[str]()
    run.memory = [HOLDS] * 5 + [ASLEEP]
    for name in ("release", "note_engines", "take_back", "train"):
        real = getattr(Ranks, name)

        def noted(ranks: Ranks, *args: Any, name: str = name, real: Any = real) -> Any:
            order.append(name)
            if name == "take_back":
                assert not run.fleet.holding, "an engine holds its memory"
            return real(ranks, *args)

        monkeypatch.setattr(Ranks, name, noted)
    config = make_config(
        model_folder, reserved={"window": 0.1, "wake_after_s": 0.01}, trainer={"offload": "always"}
    )
    result, _ = play(config, mesh, run)
    assert run.told == [True, False, True, False]
    toggles = [name for name in order if name != "train"]
    assert toggles == ["release", "note_engines", "take_back"] * 2
    assert "train" not in order[: order.index("take_back")]
    assert 0 < result.metrics["seconds_to_generating"] < result.metrics["seconds"]
    assert 0 < result.metrics["seconds_to_training"] < result.metrics["seconds"]


def test_nothing_is_trained_until_the_daemon_says_that_every_reserved_engine_sleeps(
    model_folder: Path, mesh: DeviceMesh
) -> None:
    calm, calm_root = play(make_config(model_folder), mesh, RecordedRun(random.Random(3)))
    run = RecordedRun(random.Random(3))
    late, polls, trained = 20, [0], run.trained
    run.memory = [HOLDS] * late + [ASLEEP]
    poll = run.poll

    def counting(timeout_s: float) -> list[messages.GroupDone]:
        polls[0] += run.told[-1:] == [False]
        return poll(timeout_s)

    def training(
        step: int, groups: int, tokens: int, seconds: float, scored: int = -1, reward_s: float = 0.0
    ) -> None:
        assert polls[0] >= late, "an engine holds its memory"
        trained(step, groups, tokens, seconds, scored, reward_s)

    run.poll, run.trained = counting, training  # type: ignore[method-assign]
    result, root = play(make_config(model_folder), mesh, run)
    assert run.progress
    assert [line.split(":")[0] for line in result.phase_log] == [
        "seed -> sleep",
        "sleep -> train",
        "train -> finish",
    ]
    assert (root, result.outcomes, comparable(result)) == (calm_root, calm.outcomes, comparable(calm))


def test_an_engine_that_does_not_fall_asleep_is_ended_and_the_daemon_told_before_anything_is_trained(
    model_folder: Path, mesh: DeviceMesh
) -> None:
    run, processes = RecordedRun(random.Random(3)), Processes()
    run.memory = [HOLDS]
    result, _ = play(
        make_config(model_folder, reserved={"sleep_timeout_s": 0.05}), mesh, run, engines=processes
    )
    why = f"no acknowledgement within 0.05 s of being told to sleep: {NAME}"
    assert processes.said == [(True, (), ""), (False, (), ""), (False, (NAME,), why)]
    assert run.ended == [(NAME, why)]
    assert f"sleep: ended: {why}" in result.phase_log


def test_an_engine_that_others_started_cannot_be_ended_which_stops_the_run(
    model_folder: Path, mesh: DeviceMesh
) -> None:
    run = RecordedRun(random.Random(3))
    run.memory = [HOLDS]
    with pytest.raises(
        EngineError, match=r"no acknowledgement within 0\.05 s of being told to sleep: 0\.session"
    ):
        play(make_config(model_folder, reserved={"sleep_timeout_s": 0.05}), mesh, run)
    assert not run.progress


def test_several_updates_differ_from_one_and_clip(model_folder: Path, mesh: DeviceMesh) -> None:
    _, one = play(make_config(model_folder), mesh, RecordedRun(random.Random(0)))
    thrice = make_config(model_folder, algorithm={"updates_per_step": 3}, optimizer={"lr": 0.05})
    result, three = play(thrice, mesh, RecordedRun(random.Random(0)))
    assert one != three
    assert result.metrics["clip_fraction"] > 0


def test_packed_training_agrees_with_group_by_group_to_rounding(model_folder: Path, mesh: DeviceMesh) -> None:
    exact, _ = play(make_config(model_folder), mesh, RecordedRun(random.Random(0)))
    packed, _ = play(
        make_config(model_folder, run={"deterministic": False}, trainer={"micro_batch_tokens": 64}),
        mesh,
        RecordedRun(random.Random(1)),
    )
    assert packed.metrics["loss"] == pytest.approx(exact.metrics["loss"], rel=1e-4)
    assert packed.metrics["grad_norm"] == pytest.approx(exact.metrics["grad_norm"], rel=1e-5)


def test_the_denominator_counts_every_usable_answer_token(model_folder: Path, mesh: DeviceMesh) -> None:
    result, _ = play(make_config(model_folder), mesh, RecordedRun(random.Random(0)))
    assert result.metrics["tokens"] == pytest.approx(result.metrics["length_mean"] * 24)
    assert result.metrics["tokens_trained"] < result.metrics["tokens"]


def test_a_poisoned_sample_is_masked_with_its_reason_and_the_rest_trained(
    model_folder: Path, mesh: DeviceMesh
) -> None:
    result, _ = play(make_config(model_folder), mesh, RecordedRun(random.Random(0), error="killed 3 engines"))
    masked = [outcome for outcome in result.outcomes if outcome.outcome == "masked"]
    assert len(masked) == 6
    assert all(
        "killed 3 engines" in outcome.reason and outcome.advantage == 0.0 and outcome.reward != outcome.reward
        for outcome in masked
    )
    assert result.metrics["samples"] == 18


class LateReward:
    """Like `LengthReward`, but no answer of one token is judged within the deadline."""

    version = "late"

    def score(self, prompt: str, completion: str, meta: dict[str, Any]) -> float:
        reward = LengthReward().score(prompt, completion, meta)
        if len(completion) > 3:
            raise RewardTimeout("no reward within 1 s")
        return reward + 1.0


def test_an_answer_that_a_verifier_could_not_judge_in_time_has_a_reward_of_0_and_is_counted(
    model_folder: Path, mesh: DeviceMesh
) -> None:
    result, _ = play(make_config(model_folder), mesh, RecordedRun(random.Random(0)), LateReward())
    rewards = [outcome.reward for outcome in result.outcomes if outcome.outcome in {"consumed", "filtered"}]
    assert 0 < rewards.count(0.0) < len(rewards)
    assert result.metrics["rewards_late"] == rewards.count(0.0)


def test_a_reward_error_stops_the_run_unless_it_is_masked(model_folder: Path, mesh: DeviceMesh) -> None:
    with pytest.raises(RewardError):
        play(make_config(model_folder), mesh, RecordedRun(random.Random(0)), NoReward())
    result, _ = play(
        make_config(model_folder, reward={"on_reward_error": "mask"}),
        mesh,
        RecordedRun(random.Random(0)),
        NoReward(),
    )
    assert {outcome.outcome for outcome in result.outcomes} == {"masked"}
    assert (result.metrics["updates"], result.metrics["tokens"]) == (0.0, 0.0)
