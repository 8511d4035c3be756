"""Rewards beside training: many at once, taken in when they are there, whatever one of them does."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

from scavenger.config import RewardSection
from scavenger.errors import ConfigError, RewardError
from scavenger.protocol import messages, train_step
from tests.trainer.test_step import LengthReward, RecordedRun, comparable, make_config, play
from trainer.algorithms import scoring
from trainer.algorithms.reward_pool import RewardPool, default_processes, open_pool
from trainer.algorithms.rewards import Reward, RewardRequest, RewardRunner
from trainer.loop.step import POLL_S

FUNCTIONS = '''
import os, time
def meets(prompt, completion, meta):
    """A barrier of `meta["of"]` processes: opens only when so many are inside."""
    open(os.path.join(meta["folder"], completion), "w").close()
    while len(os.listdir(meta["folder"])) < meta["of"]:
        time.sleep(0.005)
    return float(completion)
def length(prompt, completion, meta):
    return len(completion)
def hangs(prompt, completion, meta):
    if completion == "hangs":
        time.sleep(600)
    if completion == "raises":
        raise RuntimeError("no such judge")
    return len(completion)
'''
FUNCTIONS += """
import asyncio, sys
from trainer.verifiers import whole_group
inside = set()
class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("nor can this be said")
def named_b_c(prompt, completion, meta):
    return {"b_c": 1.0}
def named_c(prompt, completion, meta):
    return {"c": 1.0}
def vast(prompt, completion, meta):
    return {"a": 1e308, "b": 1e308 if completion == "both" else 0.0}
async def meets_async(prompt, completion, meta):
    inside.add(completion)
    while len(inside) < meta["of"]:
        await asyncio.sleep(0.005)
    return float(completion)
async def troubles(prompt, completion, meta):
    if completion == "blocks":
        time.sleep(600)
    if completion == "dies":
        os._exit(3)
    if completion == "hangs":
        await asyncio.sleep(600)
    if completion == "raises":
        raise RuntimeError("no such judge")
    if completion == "cancelled":
        raise asyncio.CancelledError
    if completion == "unspeakable":
        raise Unspeakable
    if completion == "forks" and os.fork() == 0:
        return -1.0
    await asyncio.sleep(0.01)
    return len(completion)
@whole_group
def rank(prompt, completions, meta):
    return [float(sorted(completions).index(completion)) for completion in completions]
@whole_group
async def few(prompt, completions, meta):
    return [0.0]
def rubric(prompt, completion, meta):
    return {"right": float(completion == "good"), "short": 1.0 / len(completion)}
def badly_named(prompt, completion, meta):
    return {"what " + completion: 1.0}
"""
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pooled.py").write_text(FUNCTIONS)
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(root)]))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


def pool(name: str, **more: Any) -> RewardPool:
    return open_pool(
        RewardSection.model_validate(
            {"function": f"pooled:{name}", "timeout_s": 30.0, "retries": 0, "processes": 2} | more
        )
    )


def test_as_many_are_scored_at_once_as_there_are_processes(tmp_path: Path) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    with pool("meets", processes=8) as rewards:
        futures = rewards.submit("", [str(n) for n in range(8)], {"folder": str(folder), "of": 8})
        assert [future.result(DEADLINE_S).value for future in futures] == [float(n) for n in range(8)]


def test_one_that_hangs_and_one_that_raises_fail_alone_and_no_process_is_lost_to_them() -> None:
    with pool("hangs", timeout_s=1.0) as rewards:
        hung, raised, *good = rewards.submit("", ["hangs", "raises", "a", "bb", "ccc"], {})
        assert [future.result(DEADLINE_S).value for future in good] == [1.0, 2.0, 3.0]
        with pytest.raises(RewardError, match="no reward within 1 s"):
            hung.result(DEADLINE_S)
        with pytest.raises(RewardError, match="RuntimeError: no such judge"):
            raised.result(DEADLINE_S)
        assert [future.result(DEADLINE_S).value for future in rewards.submit("", ["a"] * 4, {})] == [1.0] * 4


def test_calls_of_an_earlier_step_go_first(tmp_path: Path) -> None:
    order: list[str] = []
    with pool("meets", processes=1) as rewards:
        wall = tmp_path / "wall"
        wall.mkdir()
        rewards.submit(
            "", ["0"], {"folder": str(wall), "of": 2}
        )  # keeps the process busy until everything is in the queue
        later = rewards.submit("", ["2"], {"folder": str(wall), "of": 0}, step=2)
        sooner = rewards.submit("", ["1"], {"folder": str(wall), "of": 0}, step=1)
        for name, (future,) in (("later", later), ("sooner", sooner)):
            future.add_done_callback(lambda _, name=name: order.append(name))  # type: ignore[misc]
        (wall / "open").touch()
        later[0].result(DEADLINE_S)
    assert order == ["sooner", "later"]


def test_a_pool_that_closes_ends_what_hangs_and_fails_what_waits() -> None:
    with pool("hangs", processes=1, timeout_s=600.0) as rewards:
        futures = rewards.submit("", ["hangs", "a"], {})
    for future in futures:
        with pytest.raises(RewardError):
            future.result(DEADLINE_S)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rewards-")]


def test_async_calls_are_under_way_together_in_one_process() -> None:
    with pool("meets_async", concurrency=40) as rewards:
        futures = rewards.submit("", [str(n) for n in range(40)], {"of": 40})
        assert [future.result(DEADLINE_S).value for future in futures] == [float(n) for n in range(40)]


class StillReads(threading.Thread):
    """A reader that has told everybody of the process's end, and has not ended itself yet."""

    def is_alive(self) -> bool:
        return True

    def join(self, timeout: float | None = None) -> None:
        pass


def test_a_call_that_finds_its_process_gone_is_made_in_a_new_one() -> None:
    with RewardRunner("pooled:troubles", timeout_s=30.0, retries=0) as runner:
        assert runner.score("", "aa", {}) == 2.0
        process, reader = runner._process, runner._reader
        assert process is not None
        assert reader is not None
        process.kill()
        process.wait()
        reader.join()
        runner._reader = StillReads()
        [parts] = runner._call_beside(
            RewardRequest("", ("aaa",), "{}"), alone=True
        )  # as one that is made again alone
        assert sum(parts.values()) == 3.0, "without a retry: the call did not end it"


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("blocks", "no reward within 1 s"),
        ("hangs", "no reward within 1 s"),
        ("dies", "the reward process ended"),
        ("raises", "RuntimeError: no such judge"),
        ("cancelled", "it raised CancelledError"),
        ("unspeakable", "it raised Unspeakable"),
    ],
)
def test_whatever_an_async_call_does_the_others_get_their_rewards(bad: str, why: str) -> None:
    with pool("troubles", concurrency=8, timeout_s=1.0) as rewards:
        answers = ["a" * n for n in range(1, 7)]
        first, culprit, *more = rewards.submit("", ["x", bad, *answers], {})
        with pytest.raises(RewardError, match=why):
            culprit.result(DEADLINE_S)
        assert [future.result(DEADLINE_S).value for future in (first, *more)] == [
            1.0,
            1.0,
            2.0,
            3.0,
            4.0,
            5.0,
            6.0,
        ]
        assert rewards.score("", "again", {}) == 5.0


def test_a_fork_that_returns_from_an_async_call_gives_no_second_answer() -> None:
    with pool("troubles") as rewards:
        assert [rewards.score("", "forks", {}) for _ in range(10)] == [5.0] * 10


def test_a_function_of_a_whole_group_sees_all_its_answers_at_once() -> None:
    with pool("rank") as rewards:
        first, second = rewards.submit("", ["b", "c", "a"], {}), rewards.submit("", ["z"], {})
        assert [future.result(DEADLINE_S).value for future in [*first, *second]] == [1.0, 2.0, 0.0, 0.0]
    with pool("few") as rewards, pytest.raises(RewardError, match="it gave 1 rewards for 2 completions"):
        rewards.submit("", ["a", "b"], {})[1].result(DEADLINE_S)


def test_a_dict_is_weighed_part_by_part() -> None:
    with pool("rubric", weights={"right": 1.0, "short": 0.5}) as rewards:
        good, bad = (future.result(DEADLINE_S) for future in rewards.submit("", ["good", "no"], {}))
        weighed = rewards.version
    assert (good.value, good.parts) == (1.125, {"right": 1.0, "short": 0.25})
    assert (bad.value, bad.parts) == (0.25, {"right": 0.0, "short": 0.5})
    with pool("rubric") as rewards:
        assert rewards.score("", "good", {}) == 1.25
        assert rewards.version != weighed, "other weights are another reward"
    with (
        pool("rubric", weights={"right": 1.0}) as rewards,
        pytest.raises(RewardError, match=r"without a weight in reward\.weights: short"),
    ):
        rewards.score("", "good", {})
    with pool("badly_named") as rewards, pytest.raises(RewardError, match="not 1 to 32 parts"):
        rewards.score("", "said", {})


@pytest.mark.parametrize(("said", "weight"), [("both", 1.0), ("one", 10.0)])
def test_a_sum_that_is_no_finite_number_fails_its_completion_alone(said: str, weight: float) -> None:
    """Each part is finite; what they add up to is not. It would be a gradient that is no number."""
    with (
        pool("vast", weights={"a": weight, "b": 1.0}) as rewards,
        pytest.raises(RewardError, match="weighted sum is no finite number"),
    ):
        rewards.score("", said, {})


def test_a_process_that_cannot_be_started_fails_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*args: object, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("trainer.algorithms.rewards.subprocess.Popen", none_left)
    with (
        pytest.raises(RewardError, match="cannot be started: Resource temporarily unavailable"),
        pool("length"),
    ):
        pass


SEVERAL = [
    {"function": "pooled:length", "weight": 0.5},
    {"function": "pooled:rank", "name": "place", "weight": -1.0},
    {"function": "pooled:rubric", "weight": 2.0},
]


def several(functions: Sequence[dict[str, Any]]) -> RewardPool:
    return open_pool(RewardSection.model_validate({"functions": functions, "retries": 0, "processes": 1}))


def test_several_functions_are_weighed_into_one_reward_each_with_a_metric(
    model_folder: Path, mesh: DeviceMesh
) -> None:
    with several(SEVERAL) as rewards:
        good, longer = (future.result(DEADLINE_S) for future in rewards.submit("", ["good", "goodness"], {}))
        result, _ = play(make_config(model_folder), mesh, RecordedRun(random.Random(0)), rewards)
        version = rewards.version
    assert good.parts == {"length": 4.0, "place": 0.0, "rubric_right": 1.0, "rubric_short": 0.25}
    assert (good.value, longer.value) == (2.0 - 0.0 + 2.5, 4.0 - 1.0 + 0.25)
    spread = {"reward_std", "reward_min", "reward_max"}
    metrics = {
        name: value
        for name, value in result.metrics.items()
        if name.startswith("reward_") and name not in spread
    }
    assert spread <= result.metrics.keys()
    assert set(metrics) == {"reward_length", "reward_place", "reward_rubric_right", "reward_rubric_short"}
    assert metrics["reward_place"] <= 1.5, "places of four, of which some are alike"
    assert result.metrics["reward"] == pytest.approx(
        0.5 * metrics["reward_length"]
        - metrics["reward_place"]
        + 2 * (metrics["reward_rubric_right"] + metrics["reward_rubric_short"])
    )
    with several([*SEVERAL[:2], SEVERAL[2] | {"weight": 3.0}]) as rewards:
        assert rewards.version != version


def test_two_parts_of_one_name_are_refused_and_none_is_lost() -> None:
    """ "a" with a part "b_c", and "a_b" with "c": one metric's name."""
    functions = [{"function": "pooled:named_b_c", "name": "a"}, {"function": "pooled:named_c", "name": "a_b"}]
    with (
        several(functions) as rewards,
        pytest.raises(RewardError, match="two parts of the reward are called 'a_b_c'"),
    ):
        rewards.score("", "x", {})


def test_one_function_of_several_that_fails_fails_the_completion() -> None:
    with several([SEVERAL[0], {"function": "pooled:hangs"}]) as rewards:
        bad, good = rewards.submit("", ["raises", "fine"], {})
        with pytest.raises(RewardError, match="pooled:hangs failed 1 times"):
            bad.result(DEADLINE_S)
        assert good.result(DEADLINE_S).value == 6.0


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"function": "a:b", "functions": [{"function": "a:c"}]}, "in the place of function and options"),
        ({"functions": [{"function": "a:c"}, {"function": "b:c"}]}, "two are named 'c'"),
    ],
)
def test_a_list_of_functions_that_cannot_be_meant_is_refused(section: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        RewardSection.model_validate(section)


def test_a_function_that_cannot_be_imported_is_told_before_any_call() -> None:
    with pytest.raises(ConfigError, match=r"reward\.function"), pool("missing"):
        pass


def test_there_are_as_many_processes_as_the_job_has_cpus_on_the_node_and_no_more_than_eight() -> None:
    assert default_processes({"SLURM_CPUS_ON_NODE": "3"}) == 3
    assert default_processes({"SLURM_CPUS_ON_NODE": "96"}) == 8
    assert default_processes({}) == min(8, len(os.sched_getaffinity(0)))


# ---------------------------------------------------------------- the step


class Held:
    """A scorer whose rewards come when the test says so."""

    version = "held"

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Reward], Reward]] = []

    def score(self, prompt: str, completion: str, meta: dict[str, Any]) -> float:
        raise AssertionError("it is not waited for")

    def submit(
        self, prompt: str, completions: Sequence[str], meta: dict[str, Any], step: int = 0
    ) -> list[Future[Reward]]:
        futures: list[Future[Reward]] = [Future() for _ in completions]
        rewards = [Reward(LengthReward().score(prompt, completion, meta)) for completion in completions]
        self.waiting += zip(futures, rewards, strict=True)
        return futures


class HeldRun(RecordedRun):
    """Gives a group a poll. `first_last`: the first one's rewards come once four are trained; else rewards come by lot."""

    def __init__(self, held: Held, *, first_last: bool, seed: int = 0) -> None:
        super().__init__(random.Random(seed))
        self.held, self.first_last, self.lot = held, first_last, random.Random(seed)
        self.kept: list[tuple[Future[Reward], Reward]] = []

    def poll(self, timeout_s: float) -> list[messages.GroupDone]:
        self.hear_the_fleet()
        if self.first_last and not self.kept and self.held.waiting:
            self.kept, self.held.waiting = self.held.waiting[:4], self.held.waiting[4:]
        self.lot.shuffle(self.held.waiting)
        for future, reward in self.held.waiting:
            future.set_result(reward)
        self.held.waiting = []
        taken, self._groups = self._groups[:1], self._groups[1:]
        return taken

    def trained(
        self, step: int, groups: int, tokens: int, seconds: float, scored: int = -1, reward_s: float = 0.0
    ) -> None:
        super().trained(step, groups, tokens, seconds, scored, reward_s)
        if groups >= 4 and self.kept:
            self.held.waiting, self.kept, self.first_last = self.kept, [], False


def test_groups_are_trained_while_another_waits_for_its_rewards(model_folder: Path, mesh: DeviceMesh) -> None:
    held = Held()
    run = HeldRun(held, first_last=True)
    result, root = play(make_config(model_folder), mesh, run, held)
    assert not run.first_last, "four were trained before it had its rewards"
    plain, plain_root = play(make_config(model_folder), mesh, RecordedRun(random.Random(0)))
    assert (root, comparable(result)) == (plain_root, comparable(plain))


def test_a_step_that_waits_for_rewards_does_not_spin(model_folder: Path, mesh: DeviceMesh) -> None:
    held = Held()

    class Burst(RecordedRun):
        """Gives all groups at once; rewards come after twenty polls."""

        polls = 0

        def poll(self, timeout_s: float) -> list[messages.GroupDone]:
            self.hear_the_fleet()
            self.polls += 1
            if self.polls == 20:
                for future, reward in held.waiting:
                    future.set_result(reward)
            taken, self._groups = self._groups, []
            return taken

    started = time.monotonic()
    play(make_config(model_folder), mesh, Burst(random.Random(0)), held)
    # Ten of its polls wait, each a hair less than it was asked to; one that spins is through in a fifth of a second.
    assert time.monotonic() - started > 9 * POLL_S


@pytest.mark.parametrize("algorithm", [{}, {"updates_per_step": 3}, {"name": "reinforce++"}])
def test_the_order_in_which_rewards_come_changes_nothing(
    model_folder: Path, mesh: DeviceMesh, algorithm: dict[str, Any]
) -> None:
    config = make_config(model_folder, algorithm=algorithm)
    results = []
    for seed in range(3):
        held = Held()
        results.append(play(config, mesh, HeldRun(held, first_last=False, seed=seed), held))
    for result, root in results[1:]:
        assert root == results[0][1]
        assert result.outcomes == results[0][0].outcomes
        assert comparable(result) == comparable(results[0][0])


def test_a_real_pool_gives_what_the_function_gives(model_folder: Path, mesh: DeviceMesh) -> None:
    with pool("length") as rewards:
        pooled, root = play(make_config(model_folder), mesh, RecordedRun(random.Random(1)), rewards)

    class Plain:
        version = rewards.version

        def score(self, prompt: str, completion: str, meta: dict[str, Any]) -> float:
            return float(len(completion))

    plain, plain_root = play(make_config(model_folder), mesh, RecordedRun(random.Random(2)), Plain())
    assert (root, pooled.outcomes, comparable(pooled)) == (plain_root, plain.outcomes, comparable(plain))


def test_reserved_engines_generate_for_later_steps_while_rewards_are_waited_for() -> None:
    """With steps in advance, for as long as the daemon says so; on policy they would have nothing to generate."""
    plan = train_step.StepPlan(
        samples=8, groups=2, window=0.5, wake_after_s=1.0, harvest=True, reserved=True, ahead=True
    )
    opened = train_step.WindowDecided(train_step.SeedWindowState.OPEN, "rewards are slow")
    step, _ = train_step.begin(plan, harvested=1, reserved_awake=True, now=0.0)
    step, _ = train_step.react(step, opened, 0.5)
    step, actions = train_step.react(step, train_step.GroupsCompleted(2, 8, scoring=2), 1.0)
    assert (step.phase, actions) == (train_step.StepPhase.SEED, ()), "their GPUs would idle"
    step, actions = train_step.react(
        step, train_step.WindowDecided(train_step.SeedWindowState.CLOSED, "the first are there"), 30.0
    )
    assert [type(action) for action in actions] == [train_step.SleepReserved]
    step, _ = train_step.react(step, train_step.ReservedAsleep(1, 0), 31.0)
    step, actions = train_step.react(step, opened, 32.0)
    assert [type(action) for action in actions] == [train_step.WakeReserved]
    step, actions = train_step.react(step, train_step.GroupsScored(2), 60.0)
    assert [type(action) for action in actions] == [train_step.SleepReserved], (
        "nothing is waited for any more"
    )


def test_the_daemon_is_told_how_many_groups_have_their_rewards_and_how_long_these_take(
    model_folder: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(scoring, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    told: list[tuple[int, float]] = []
    held = Held()

    class Slow(HeldRun):
        """Rewards take 5 s each; the trainer looks at them another 100 s later."""

        def poll(self, timeout_s: float) -> list[messages.GroupDone]:
            clock[0] += 5.0
            taken = super().poll(timeout_s)
            clock[0] += 100.0
            return taken

        def trained(
            self, step: int, groups: int, tokens: int, seconds: float, scored: int = -1, reward_s: float = 0.0
        ) -> None:
            super().trained(step, groups, tokens, seconds, scored, reward_s)
            told.append((scored, reward_s))

    config = make_config(
        model_folder,
        run={"name": "r", "steps": 3, "state_dir": "s", "out_dir": "o", "deterministic": False},
        algorithm={"max_off_policy_steps": 1},
    )
    play(config, mesh, Slow(held, first_last=False), held)
    scored = [one for one, _ in told]
    assert scored == sorted(scored)
    assert (scored[0], scored[-1]) == (0, 6)
    assert {seconds for _, seconds in told} == {0.0, 5.0}, "from its arrival until its last reward came"
    told.clear()
    play(make_config(model_folder), mesh, Slow(held, first_last=False), held)
    assert set(told) == {(-1, 0.0)}, "on policy it is not asked"


def test_no_reserved_engine_is_woken_for_samples_that_only_wait_for_rewards() -> None:
    plan = train_step.StepPlan(samples=8, groups=2, window=0.5, wake_after_s=1.0, harvest=True, reserved=True)
    step, _ = train_step.begin(plan, harvested=2, reserved_awake=True, now=0.0)
    step, _ = train_step.react(step, train_step.GroupsCompleted(2, 8, scoring=2), 1.0)
    step, _ = train_step.react(step, train_step.ReservedAsleep(1, 0), 1.5)
    step, actions = train_step.react(step, train_step.FleetChanged(0, 1), 2.0)
    step, actions = train_step.react(step, train_step.StepTick(), 60.0)
    assert (step.phase, actions) == (train_step.StepPhase.TRAIN, ())
    step, actions = train_step.react(step, train_step.GroupsScored(1), 61.0)
    assert [type(action) for action in actions] == [train_step.TrainReady], (
        "the other's rewards are not waited for"
    )
    step, _ = train_step.react(step, train_step.Trained(1), 62.0)
    step, actions = train_step.react(step, train_step.GroupsScored(1, untrained=1), 63.0)
    assert step.phase is train_step.StepPhase.FINISH
    with pytest.raises(ValueError, match="0 groups wait for rewards"):
        train_step.react(
            train_step.begin(plan, harvested=2, reserved_awake=True, now=0.0)[0],
            train_step.GroupsScored(1),
            1.0,
        )
