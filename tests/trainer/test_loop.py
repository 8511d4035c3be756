"""The order of a run's durable acts, with everything but the loop scripted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from scavenger.config import RunConfig
from scavenger.protocol import messages
from tests.router.harness import root, started
from tests.router.moves import W1, finish_all
from trainer.algorithms.scoring import Judged
from trainer.checkpoint import checkpoint
from trainer.data.prompts import EvalPrompts, PromptTask
from trainer.loop import run

DONE = messages.DoneSample(1, 0, b"", b"", b"", "stop", 0)


class Killed(Exception):
    """Stands for SIGKILL: nothing after it happens."""


class Script:
    """Run, ranks, source, problems, scoring, stepper and monitor of one attempt; `acts` is what it did, `die_at` its last act."""

    version, digest = "judge", "problems"
    replaces = True
    trains_adapters, tokenizer = False, ""

    def __init__(self, attempt: int, die_at: tuple[str, int] | None = None) -> None:
        self.attempt, self.next_version, self.updates_taken = attempt, 1, 0
        self.acts: list[tuple[str, int]] = []
        self.told: list[
            tuple[Sequence[int] | None, list[int]]
        ] = []  # steps that each record said are kept, and those on disk then
        self.out_dir = Path()
        self.asked: list[tuple[int, int]] = []  # step, version
        self.taken: list[tuple[int, int]] = []  # of the data: position and count
        self.metrics: dict[str, float] = {}
        self.late: dict[int, tuple[int, ...]] = {}  # by step, places of prompts that the next one trains
        self.said: list[str] = []
        self._die_at = die_at
        self._waiting: list[Any] = []
        self._scored: list[Judged] = []

    def act(self, name: str, step: int) -> None:
        if (name, step) == self._die_at:
            raise Killed
        self.acts.append((name, step))

    def build_version(self, version: int, dtype: str) -> Any:
        return SimpleNamespace(version=version, root=b"\x01")

    def offer(self, manifest: Any) -> tuple[messages.WeightSource, ...]:
        return ()

    def publish(self, *args: Any) -> None:
        self.next_version += 1

    def save(self, path: Path) -> None:
        pass

    def is_saved(self) -> bool:
        return True

    def wait_saved(self) -> None:
        pass

    def set_reserved(self, awake: bool) -> None:
        pass

    evaluations: ClassVar = [EvalPrompts("", 1, (PromptTask(index=0, text="1", tokens=(1,), meta={}),))]

    def take(self, position: int, count: int) -> list[PromptTask]:
        self.taken.append((position, count))
        return []

    def ask(self, step: int, version: int, problems: Any, more: Any) -> None:
        self.asked.append((step, version))

    def step(self, step: int, version: int, problems: Any, more: Any) -> Any:
        if self.replaces:
            more(step)  # replaces as many prompts as its number
        return SimpleNamespace(
            metrics=self.metrics,
            outcomes=(),
            phase_log=(),
            late=self.late.get(step, ()),
            decisions=(),
            differences=(),
            rewards={},
        )

    def submit(
        self, step: int, version: int, groups: Sequence[messages.GroupSpec], purpose: str
    ) -> tuple[int, ...]:
        self._waiting = [
            messages.GroupDone(
                place, step, version, purpose, spec.prompt_index, spec.prompt, spec.meta, (DONE,)
            )
            for place, spec in enumerate(groups)
        ]
        return tuple(group.group_id for group in self._waiting)

    def poll(self, timeout_s: float) -> list[Any]:
        arrived, self._waiting = self._waiting, []
        return arrived

    def take_late(self) -> int:
        return 0

    def begin(self, group: Any) -> None:
        self._scored.append(Judged(group, tuple((sample, 1.0, "") for sample in group.samples)))

    def is_pending(self, groups: Any) -> bool:
        return bool(self._scored)

    def take_scored(self, groups: Any) -> list[Judged]:
        scored, self._scored = self._scored, []
        return scored

    def commit(
        self,
        step: int,
        version: int,
        outcomes: Any,
        metrics: Any,
        purpose: str = "train",
        decisions: Any = (),
        differences: Any = (),
    ) -> None:
        self.act(purpose, step)

    def checkpoint(
        self, step: int, version: int, root: bytes, path: str, kept: Sequence[int] | None = None
    ) -> None:
        self.act("checkpoint", step)
        self.told.append(
            (kept, [checkpoint.read_state(path).step for path in checkpoint.found(self.out_dir)])
        )


def attempt(
    out_dir: Path, script: Script, monkeypatch: pytest.MonkeyPatch, keep: int = 2, ahead: int = 0
) -> None:
    script.out_dir = out_dir
    config = RunConfig.model_validate(
        {
            "run": {"name": "r", "steps": 4, "state_dir": "/state", "out_dir": out_dir},
            "model": {"path": "/model", "context_length": 24},
            "sampling": {"max_tokens": 8},
            "checkpoint": {"every": 2, "keep": keep},
            "eval": {"every": 2, "prompts": 1},
            "algorithm": {"max_off_policy_steps": ahead},
        }
    )
    monkeypatch.setattr(run, "Stepper", lambda *args: script)
    path = checkpoint.select(out_dir, "auto")
    start = run.RunStart()
    if path:
        state = checkpoint.read_state(path)
        start = run.RunStart(state.step, "01", path, state.cursor, late=state.late)
    parts: Any = script
    monitor: Any = SimpleNamespace(
        step=lambda *args: None, evaluation=lambda *args: None, say=script.said.append
    )
    run.Loop(config, parts, parts, parts, parts, messages.Sampling(8, 1.0, 1.0, 0, ()), monitor, start).run()


@pytest.mark.parametrize("killed_at", [("eval", 4), ("checkpoint", 4)])
def test_a_trainer_killed_at_its_end_leaves_no_evaluation_out(
    killed_at: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, resumed = Script(1, killed_at), Script(2)
    with pytest.raises(Killed):
        attempt(tmp_path, killed, monkeypatch)
    attempt(tmp_path, resumed, monkeypatch)
    whole = [
        ("eval", 0),
        ("train", 1),
        ("train", 2),
        ("eval", 2),
        ("checkpoint", 2),
        ("train", 3),
        ("train", 4),
        ("eval", 4),
    ]
    assert killed.acts == whole[: len(killed.acts)]
    assert ("eval", 4) in killed.acts + resumed.acts
    durable = killed.acts + resumed.acts
    assert {act for act in durable if act[0] == "eval"} == {("eval", 0), ("eval", 2), ("eval", 4)}


def test_a_checkpoint_comes_after_all_that_is_due_at_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(7)
    attempt(tmp_path, script, monkeypatch)
    assert script.acts[-3:] == [("train", 4), ("eval", 4), ("checkpoint", 4)]
    assert [checkpoint.read_state(path).attempt for path in checkpoint.found(tmp_path)] == [7, 7]


def test_a_checkpoint_is_deleted_only_once_the_ledger_knows_that_it_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(1)
    attempt(tmp_path, script, monkeypatch, keep=1)
    assert script.told == [((2,), [2]), ((4,), [2, 4])]
    assert [checkpoint.read_state(path).step for path in checkpoint.found(tmp_path)] == [4]


def test_a_trainer_killed_before_that_was_recorded_has_deleted_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Killed):
        attempt(tmp_path, Script(1, ("checkpoint", 4)), monkeypatch, keep=1)
    assert [checkpoint.read_state(path).step for path in checkpoint.found(tmp_path)] == [2, 4]


@pytest.mark.parametrize("committed", [True, False])
def test_the_daemon_takes_an_evaluation_again_after_its_step_was_rewound(committed: bool) -> None:
    """Killed after the evaluation's commit, or with the evaluation under way: either way before the checkpoint of its step."""
    bench = started(n=1)
    finish_all(bench, W1, bench.join(W1))
    assert isinstance(bench.commit_step(1, [1]), messages.Ok)
    first = bench.submit(purpose="eval")
    assert isinstance(first, messages.Accepted)
    samples = [sample.id for sample in bench.router.core.groups[first.group_ids[0]].samples]
    if committed:
        finish_all(bench, W1, bench.leases(W1))
        assert isinstance(bench.commit_step(1, samples, outcome="evaluated", purpose="eval"), messages.Ok)
    bench.open(resume_step=0)
    assert isinstance(bench.publish(2, 0, root_of=1), messages.Ok)
    again = bench.submit(version=2, purpose="eval")
    assert isinstance(again, messages.Accepted)
    assert again.group_ids != first.group_ids
    bench.take(W1, messages.Assign)
    bench.say(W1, messages.WeightsLoaded(2, root(1)))
    finish_all(bench, W1, bench.leases(W1))
    samples = [sample.id for sample in bench.router.core.groups[again.group_ids[0]].samples]
    assert isinstance(
        bench.commit_step(1, samples, version=2, outcome="evaluated", purpose="eval"), messages.Ok
    )


def test_the_cursor_counts_replaced_prompts_and_a_resume_goes_on_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, resumed = Script(1, ("train", 4)), Script(2)
    with pytest.raises(Killed):
        attempt(tmp_path, whole, monkeypatch)
    attempt(tmp_path, resumed, monkeypatch)
    per_step = whole.taken[0][1]
    assert whole.taken[:4] == [(0, per_step), (per_step, 1), (per_step + 1, per_step), (2 * per_step + 1, 2)]
    assert checkpoint.read_state(checkpoint.found(tmp_path)[0]).cursor == 2 * per_step + 3
    assert resumed.taken[0] == (2 * per_step + 3, per_step)
    assert resumed.taken == whole.taken[4:]


def test_with_a_step_in_advance_its_samples_are_asked_for_before_the_step_before_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version v is that of v - 1 steps. A resumed run begins on policy again, and takes from the data what it had asked for in advance."""
    script, resumed = Script(1, ("train", 4)), Script(2)
    script.replaces = resumed.replaces = False
    with pytest.raises(Killed):
        attempt(tmp_path, script, monkeypatch, ahead=1)
    assert script.asked == [(1, 1), (2, 1), (3, 2), (4, 3)]
    per_step = script.taken[0][1]
    assert [position for position, _ in script.taken] == [0, per_step, 2 * per_step, 3 * per_step]
    assert checkpoint.read_state(checkpoint.found(tmp_path)[0]).cursor == 2 * per_step, (
        "of the steps that were trained"
    )
    attempt(tmp_path, resumed, monkeypatch, ahead=1)
    assert resumed.asked == [(3, 1), (4, 1)]
    assert resumed.taken == script.taken[2:]


def test_prompts_that_came_too_late_for_the_last_step_are_asked_for_again_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 2 left two prompts to step 3, of which no checkpoint has anything yet."""
    script, resumed = Script(1, ("train", 4)), Script(2)
    script.replaces = resumed.replaces = False
    script.late = {2: (1, 5), 3: (40,)}
    with pytest.raises(Killed):
        attempt(tmp_path, script, monkeypatch, ahead=1)
    assert checkpoint.read_state(checkpoint.found(tmp_path)[0]).late == (1, 5)
    attempt(tmp_path, resumed, monkeypatch, ahead=1)
    per_step = script.taken[0][1]
    assert resumed.taken == [(2 * per_step, per_step), (1, 1), (5, 1), (3 * per_step, per_step)]


@pytest.mark.parametrize(("k3", "lines"), [(0.5, 4), (1e-4, 0)])
def test_each_step_whose_engines_disagree_with_the_trainer_says_so(
    k3: float, lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(1)
    script.metrics = {"mismatch_k3": k3, "mismatch_p99": 0.7}
    attempt(tmp_path, script, monkeypatch)
    assert [line.partition(":")[0] for line in script.said] == [
        f"step {step}" for step in range(1, lines + 1)
    ]
