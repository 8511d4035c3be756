"""What an engine generated that was set aside is masked, and the step is as if it had never been trained (I7)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from scavenger.protocol import messages
from tests.trainer.test_step import RecordedRun, comparable, make_config, play
from trainer.algorithms import agreement
from trainer.algorithms.scoring import SET_ASIDE, Scoring
from trainer.data.batching import Micro, TrainRow
from trainer.loop.step import Stepper, StepResult

WRONG = 7


class Reported(RecordedRun):
    """Every third sample was begun by worker 7 and ended by worker 8; the daemon says that 7 is wrong from report `after` on."""

    def __init__(self, seed: int, after: int) -> None:
        super().__init__(random.Random(seed))
        self.reports: list[messages.SpanSums] = []
        self.calls = 0
        self._after = after

    def _answer(self, step: int, version: int, spec: messages.GroupSpec) -> messages.GroupDone:
        made = super()._answer(step, version, spec)
        samples = []
        for sample in made.samples:
            count = messages.token_count(sample.tokens)
            spans = ((8, count),) if sample.sample_id % 3 or count < 2 else ((WRONG, 1), (8, count - 1))
            samples.append(msgspec.structs.replace(sample, spans=spans))
        return msgspec.structs.replace(made, samples=tuple(samples))

    def report_agreement(self, step: int, spans: Sequence[messages.SpanSums]) -> tuple[messages.Suspect, ...]:
        self.calls += 1
        self.reports += spans
        return (messages.Suspect(WRONG, "n7", "its numbers are wrong"),) if self.calls > self._after else ()


@pytest.mark.parametrize(
    "algorithm",
    [{}, {"updates_per_step": 3}, {"name": "reinforce++"}, {"name": "dapo", "dynamic_sampling": False}],
)
@pytest.mark.parametrize("after", [0, 2])
def test_a_step_whose_gradients_held_wrong_samples_ends_as_if_it_never_had_them(
    model_folder: Path,
    mesh: DeviceMesh,
    algorithm: dict[str, Any],
    after: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = make_config(model_folder, algorithm=algorithm)
    found, root = play(config, mesh, run := Reported(1, after))
    with monkeypatch.context() as patch:
        begin = Scoring.__init__

        def knowing(self: Scoring, *args: Any) -> None:
            begin(self, *args)
            self.suspects = {WRONG}

        patch.setattr(Scoring, "__init__", knowing)
        known, known_root = play(config, mesh, Reported(2, math.inf))  # type: ignore[arg-type]
    other, other_root = play(config, mesh, Reported(1, 10_000))
    assert root == known_root != other_root, "the weights are those of a step that never had them"
    assert found.outcomes == known.outcomes
    masked = [one for one in found.outcomes if one.outcome == "masked"]
    assert masked
    assert all(one.reason == SET_ASIDE.format(WRONG) for one in masked)
    assert {one.sample_id for one in found.outcomes} == {one.sample_id for one in other.outcomes}
    assert after == 0 or {one.worker_id for one in run.reports} == {WRONG, 8}
    assert found.metrics["engines_set_aside"] == 1
    assert found.metrics["samples_set_aside"] == len(masked)
    assert after == 0 or found.metrics["samples_retrained"] > 0, "else nothing was given up"
    assert known.metrics["samples_retrained"] == 0
    same = comparable(found) | comparable(known)
    counts = {"engines_set_aside", "samples_retrained", "micro_steps", "rounds"}
    assert {k: v for k, v in comparable(found).items() if k not in counts} == {
        k: v for k, v in same.items() if k not in counts
    }


def test_samples_of_steps_before_are_counted_and_what_comes_later_is_masked(
    model_folder: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(Scoring, "say", lambda _self, line: lines.append(line))
    steps: list[StepResult] = []
    run = Reported(1, 10_000)
    step = Stepper.step

    def three(self: Any, number: int, version: int, prompts: Any) -> StepResult:
        steps.append(step(self, number, version, prompts))
        run._after = 0
        steps.append(step(self, 2, version, prompts))
        steps.append(step(self, 3, version, prompts))
        return steps[-1]

    monkeypatch.setattr(Stepper, "step", three)
    play(make_config(model_folder), mesh, run)
    first, second, third = (one.metrics for one in steps)
    mine = {one.sample_id for one in run.reports if one.worker_id == WRONG}
    assert (first["engines_set_aside"], second["engines_set_aside"], third["engines_set_aside"]) == (0, 1, 0)
    assert second["samples_trained_before"] == len(mine) > 0
    assert third["samples_set_aside"] == second["samples_set_aside"] > 0
    assert third["samples_retrained"] == third["samples_trained_before"] == 0
    (line,) = lines
    assert line.startswith("LOOK: worker 7 on node n7 was set aside: its numbers are wrong.")


class Aged(Reported):
    """In step 2 a third of the samples is of the weights that it trains, a third of older ones, a third began with those."""

    def _answer(self, step: int, version: int, spec: messages.GroupSpec) -> messages.GroupDone:
        made = super()._answer(step, version, spec)
        samples = []
        for sample in made.samples:
            count = messages.token_count(sample.tokens)
            old, new = (1, 0), (2, step - 1)
            versions = (
                ((*new, count),)
                if step == 1 or sample.sample_id % 3 == 0
                else ((*old, count),)
                if sample.sample_id % 3 == 1 or count < 2
                else ((*old, 1), (*new, count - 1))
            )
            samples.append(msgspec.structs.replace(sample, versions=versions))
        return msgspec.structs.replace(made, samples=tuple(samples))


def test_only_what_the_trained_weights_generated_is_compared_with_the_trainer(
    model_folder: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older samples differ for their age. They were reported once: with steps in advance every engine was set aside in its turn."""
    run, step = Aged(1, 10_000), Stepper.step
    reported: list[set[int]] = []

    def two(self: Any, number: int, version: int, prompts: Any) -> StepResult:
        for one in (number, 2):
            run.reports.clear()
            found = step(self, one, version, prompts)
            reported.append({span.sample_id for span in run.reports})
        return found

    monkeypatch.setattr(Stepper, "step", two)
    config = make_config(
        model_folder,
        run={"deterministic": False},
        algorithm={"max_off_policy_steps": 1, "scale_by_std": False},
    )
    found, _ = play(config, mesh, run)
    first, second = reported
    assert {sample_id % 3 for sample_id in first} == {0, 1, 2}
    assert {sample_id % 3 for sample_id in second} == {0}
    assert {one.sample_id % 3 for one in found.outcomes if one.outcome == "consumed"} == {0, 1, 2}


def row(cuts: tuple[int, ...], proximal: Sequence[float], behaviour: Sequence[float]) -> TrainRow:
    return TrainRow(
        5,
        messages.pack_tokens([1]),
        messages.pack_tokens([2] * len(behaviour)),
        messages.pack_logprobs(behaviour),
        0.0,
        torch.tensor(proximal, dtype=torch.float64).numpy().tobytes(),
        cuts,
    )


def test_the_sums_of_a_span_are_those_of_its_tokens() -> None:
    one = row((1, 2), (-1.0, -2.0, -3.0), (-1.5, -1.5, -3.25))
    (first, second) = agreement.of_row(one)
    assert first[:3] == (1, 0.5, 0.5)
    assert second[:3] == (2, -0.25, 0.75)
    assert first[3] == pytest.approx(math.exp(0.5) - 1.5)
    assert second[3] == pytest.approx(math.exp(-0.5) + 0.5 - 1 + math.exp(0.25) - 1.25)
    unknown = row((), (-1.0,), (-1.0,))
    micro = Micro((one, unknown), 0)
    found = agreement.of_micro(micro, torch.tensor([0.5, -0.5, 0.25, 9.0]))
    assert found == {5: ()}, "ids are the same here: the last stands, of which nobody is known"
    assert agreement.of_row(unknown) == ()


def test_what_is_no_number_is_not_reported_and_what_is_too_large_is_cut() -> None:
    found = {1: ((2, math.nan, math.nan, math.nan), (1, -2e9, 2e9, math.inf))}
    (told,) = agreement.report(found, {1: ((3, 2), (4, 1))})
    assert told == messages.SpanSums(1, 4, 1, -1e9, 1e9, 1e9)
