"""A recorded run of the demo is played again: its step times come out within the goal, from machines fitted to other steps."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from scavenger.cli.simulate import app
from scavenger.errors import ConfigError, SimulationError
from scavenger.ledger import store
from scavenger.ledger.read import history
from scavenger.policy.history import EngineLifetime, RunHistory, Step
from scavenger.simulate.replay.fit import fit, trained_groups
from scavenger.simulate.replay.replay import Replay, live_s, replay, whole_steps

DATA = Path(__file__).parents[1] / "data/simulate/demo_ledger.gz"
GOAL = 0.20


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve steps of 6 prompts x 4 answers on the local backend, others taking GPUs; tokens and keys are blanked."""
    path = tmp_path_factory.mktemp("replay") / "ledger.sqlite3"
    path.write_bytes(gzip.decompress(DATA.read_bytes()))
    store.upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="module")
def run_history(ledger: Path) -> RunHistory:
    engine = store.open_readonly(f"sqlite:///{ledger}")
    try:
        return history.read(engine, "demo")
    finally:
        engine.dispose()


@pytest.fixture(scope="module")
def played(run_history: RunHistory) -> Replay:
    return replay(run_history)


def slower(run_history: RunHistory, name: str, factor: float) -> RunHistory:
    """The same run with one of the trainer's figures multiplied, in the fitted steps only."""
    steps = [
        msgspec.structs.replace(step, metrics={**step.metrics, name: factor * step.metrics[name]})
        if at % 2 == 0
        else step
        for at, step in enumerate(run_history.steps)
    ]
    return msgspec.structs.replace(run_history, steps=tuple(steps))


def test_the_step_times_of_a_live_run_are_predicted_within_the_goal(played: Replay) -> None:
    assert len(played.pairs) == 12
    assert [pair.fitted for pair in played.pairs[:4]] == [True, False, True, False]
    assert played.policy == "predictive"
    assert played.median_error <= GOAL
    assert abs(played.total_error) <= GOAL
    assert played.median_error < played.guess_error, "it knows more than a mean"


def test_only_the_fitted_steps_say_what_machines_cost(run_history: RunHistory, played: Replay) -> None:
    """The steps that are predicted may say what they like of themselves: the play does not change."""
    steps = tuple(
        step
        if at % 2 == 0
        else msgspec.structs.replace(step, metrics={**step.metrics, "seconds": 1e3, "seconds_train": 1e3})
        for at, step in enumerate(run_history.steps)
    )
    lied = replay(msgspec.structs.replace(run_history, steps=steps))
    assert [pair.replayed_s for pair in lied.pairs] == [pair.replayed_s for pair in played.pairs]
    assert lied.median_error > 0.5, "and the error says so"


def test_machines_that_cost_more_make_longer_steps(run_history: RunHistory, played: Replay) -> None:
    longer = replay(slower(run_history, "seconds_update", 10.0))
    extra = 9 * played.machines.update_s
    for pair, before in zip(longer.pairs[1:], played.pairs[1:], strict=True):
        assert pair.replayed_s == pytest.approx(before.replayed_s + extra, abs=0.6)


def test_no_play_is_shorter_than_its_longest_answer_and_its_training(
    run_history: RunHistory, played: Replay
) -> None:
    spec = played.machines.engines["harvested"]
    for pair, step in zip(played.pairs, whole_steps(run_history), strict=True):
        longest = max(answer.length for answer in step.completions)
        assert pair.replayed_s >= longest * spec.step_s(1, 1.0) * 0.99 + played.machines.update_s


def test_the_fit_reads_the_trainer_s_own_figures(run_history: RunHistory) -> None:
    steps = whole_steps(run_history)
    machines = fit(run_history, {steps[0].step})
    (first,) = [step for step in steps if step.step == steps[0].step]
    tokens = sum(
        a.length + a.prompt_tokens for a in first.completions if a.prompt_index in trained_groups(first)
    )
    assert machines.train_token_s == pytest.approx(first.metrics["seconds_train"] / tokens)
    assert machines.update_s == pytest.approx(first.metrics["seconds_update"])
    assert machines.ranks == 2
    assert live_s(first) == pytest.approx(first.metrics["seconds"] + first.metrics["seconds_publish"])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda r: msgspec.structs.replace(r, steps=r.steps[:3]), "3 whole steps"),
        (lambda r: msgspec.structs.replace(r, flushes=()), "0 stretches of work"),
        (
            lambda r: msgspec.structs.replace(r, steps=(shorter(r.steps[0]), *r.steps[1:])),
            "steps of several sizes",
        ),
        (
            lambda r: msgspec.structs.replace(
                r, steps=tuple(msgspec.structs.replace(s, metrics={}) for s in r.steps)
            ),
            "'seconds_train'",
        ),
    ],
)
def test_a_recording_that_tells_too_little_is_refused_with_its_reason(
    run_history: RunHistory, change: object, what: str
) -> None:
    assert callable(change)
    with pytest.raises(ConfigError, match=what):
        replay(change(run_history))


def shorter(step: Step) -> Step:
    return msgspec.structs.replace(step, completions=step.completions[:-1])


def harvested_only(
    run_history: RunHistory, lost_s: float, *, notice: bool, another: bool = True
) -> RunHistory:
    """One harvested engine, taken so long before the third step ended; another comes with the fourth."""
    steps = whole_steps(run_history)
    config = json.loads(run_history.config)
    config.setdefault("reserved", {})["workers"] = 0
    load = next(life.loads[0] for life in run_history.lives if life.loads)
    first, second = [life for life in run_history.lives if life.kind == "harvested"][:2]

    def lived(life: EngineLifetime, at: float, left_at: float | None) -> EngineLifetime:
        loads = [msgspec.structs.replace(load, at=at + 0.5)]
        loads += [
            msgspec.structs.replace(load, at=step.submitted_at + 0.3, version=number)
            for number, step in enumerate(steps[1:], 2)
            if step.submitted_at > at
        ]
        return msgspec.structs.replace(
            life, joined_at=at, left_at=left_at, reason="preempted", notice=notice, loads=tuple(loads)
        )

    ended_at = steps[2].committed_at
    assert ended_at is not None
    lives = [lived(first, steps[0].submitted_at, ended_at - lost_s)]
    if another:
        lives.append(lived(second, steps[3].submitted_at + 0.1, None))
    return msgspec.structs.replace(run_history, config=json.dumps(config), lives=tuple(lives))


@pytest.mark.parametrize("notice", [True, False])
def test_a_step_that_loses_its_engine_before_it_is_done_goes_on_with_the_next_one(
    run_history: RunHistory, notice: bool
) -> None:
    kept = replay(harvested_only(run_history, 0.0, notice=notice)).pairs
    lost = replay(harvested_only(run_history, 1.5, notice=notice)).pairs
    assert len(lost) == 12
    steps = whole_steps(run_history)
    # ready 0.6 s into the fourth step, counted from the third's beginning
    assert lost[2].replayed_s > steps[3].submitted_at + 0.6 - steps[2].submitted_at
    assert kept[2].replayed_s < lost[2].replayed_s < kept[2].replayed_s + 4.0
    assert [pair.replayed_s for pair in lost[4:]] == pytest.approx(
        [pair.replayed_s for pair in kept[4:]], abs=0.3
    )


def test_a_play_without_any_engine_left_says_so_and_ends(run_history: RunHistory) -> None:
    with pytest.raises(SimulationError, match="step 3 is played slower than it was: its last engine is lost"):
        replay(harvested_only(run_history, 1.5, notice=True, another=False))


def test_a_step_without_end_is_told(run_history: RunHistory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scavenger.simulate.replay.replay._ReplayedSite._stuck", lambda self: False)
    with pytest.raises(SimulationError, match=r"step 3 has been played for \d+ s and took 3\.7 s"):
        replay(harvested_only(run_history, 1.5, notice=True))


def test_the_command_prints_each_step_and_the_error(ledger: Path, played: Replay) -> None:
    done = CliRunner().invoke(app, ["replay", str(ledger)])
    assert done.exit_code == 0, done.output
    assert f"{played.median_error:.1%}" in done.output
    assert f"{played.pairs[3].replayed_s:.2f}" in done.output


def test_a_pair_s_error_is_relative_to_what_was(played: Replay) -> None:
    assert replace(played.pairs[0], live_s=10.0, replayed_s=12.0).error == pytest.approx(0.2)
