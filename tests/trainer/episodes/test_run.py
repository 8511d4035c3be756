"""Episodes in the place of samples: lives, weights, outcomes; a scripted pool, gateway and daemon."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import msgspec
import pytest

from scavenger.errors import RewardError
from scavenger.ledger import redaction
from scavenger.protocol import messages
from scavenger.protocol.messages import named_request, pack_logprobs, pack_tokens
from trainer.episodes import wire
from trainer.episodes.run import (
    NOT_HEARD,
    Again,
    EpisodeRun,
    Keep,
    Lost,
    PlaySettings,
    Unheard,
    sampling_of,
    verdict,
)

HOW = messages.Sampling(8, 1.0, 1.0, 0, (0,))
ROOTS = ((0, 1, b"one"), (1, 2, b"two"), (1, 3, b"two"))


class Script:
    """Pool, gateway and daemon in one: what was played, ended and committed. `answer` says how an episode ends."""

    attempt, last_step, next_version, reserved_order = 1, 0, 4, 0
    versions = ROOTS
    losses = resumed = 0

    def __init__(self) -> None:
        self.fleet = messages.Fleet(0, 0, 0, 0, 0)
        self.asked: list[wire.Play] = []
        self.over: list[wire.Played] = []
        self.commits: list[tuple[int, tuple[messages.EpisodeOutcome, ...], dict[str, float]]] = []
        self.delivered: list[tuple[str, messages.EpisodeShare]] = []
        self.now = 0.0

    def begin(self, episode: str) -> str:
        return f"key of {episode}"

    def check(self) -> None: ...

    def play(self, ask: wire.Play) -> None:
        self.asked.append(ask)

    def poll(self, timeout_s: float) -> list[Any]:
        self.now += timeout_s if not self.over else 0.0
        over, self.over = self.over, []
        return over

    def deliver(
        self, policy: str, step: int, prompt_index: int, shares: Sequence[messages.EpisodeShare]
    ) -> None:
        self.delivered += [(policy, one) for one in shares]

    def clock(self) -> float:
        return self.now

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
    ) -> None:
        assert not outcomes
        self.commits.append((step, tuple(episodes), metrics))


def run_of(script: Script, **settings: Any) -> tuple[EpisodeRun, list[str]]:
    lines: list[str] = []
    chosen: dict[str, Any] = {"seed": 7, "retries": 1, "stops": False, "ahead": False, "version": "v"}
    given = PlaySettings(**chosen | settings)
    parts: Any = script
    return EpisodeRun(parts, parts, parts, given, lines.append, script.clock), lines


def group(index: int = 0, n: int = 2, task: int = 5) -> messages.GroupSpec:
    return messages.GroupSpec(index, b"", n, HOW, json.dumps({"task": task}))


def branch(*tokens: int) -> wire.Branch:
    return wire.Branch(
        pack_tokens([1]), pack_tokens(tokens), b"", pack_logprobs([-1.0] * len(tokens)), len(tokens)
    )


def done(
    name: str, reward: float = 1.0, version: int = 2, *branches: wire.Branch, **more: Any
) -> wire.Played:
    rows = branches or (branch(3, 4),)
    return wire.Played(name, reward, {"digits": reward}, rows, ("0.0", "0.1"), (version, version), **more)


def test_a_group_s_episodes_differ_in_name_and_seed_and_are_the_same_in_the_next_attempt() -> None:
    asked = []
    for _ in range(2):
        script = Script()
        run, _ = run_of(script)
        run.submit(2, 2, [group(3), group(4)])
        asked.append(script.asked)
    assert [one.episode for one in asked[0]] == [
        "train-2.3.0.0",
        "train-2.3.1.0",
        "train-2.4.0.0",
        "train-2.4.1.0",
    ]
    assert asked[0] == asked[1]
    assert len({one.seed for one in asked[0]}) == 4
    assert {one.task for one in asked[0]} == {5}
    assert asked[0][0].key == "key of train-2.3.0.0"


def test_a_group_comes_once_all_of_its_episodes_are_over_each_with_its_reward() -> None:
    script = Script()
    run, _ = run_of(script)
    (number,) = run.submit(2, 2, [group()])
    script.over = [done("train-2.0.1.0", 0.5)]
    assert run.poll(0.0) == []
    script.over = [done("train-2.0.0.0", 1.0, 2, branch(3, 4), branch(5))]
    (whole,) = run.poll(0.0)
    assert (whole.group_id, whole.step, whole.purpose) == (number, 2, "train")
    assert [(s.reward, s.reward_version, messages.token_count(s.tokens)) for s in whole.samples] == [
        (1.0, "v", 3),
        (0.5, "v", 2),
    ]
    rows = run.rows(whole.samples[0], 0.25, {})
    assert [(row.trained, row.others, row.advantage) for row in rows] == [(2, 1, 0.25), (1, 2, 0.25)]
    assert len({row.sample_id for row in rows}) == 2
    assert {row.whole for row in rows} == {whole.samples[0].sample_id}
    assert run.parts(whole.samples[1]) == {"digits": 0.5}


def test_what_is_committed_names_the_turns_that_a_step_took() -> None:
    script = Script()
    run, _ = run_of(script)
    run.submit(2, 2, [group()])
    script.over = [done("train-2.0.0.0", note="branched"), done("train-2.0.1.0", 0.0)]
    (whole,) = run.poll(0.0)
    outcomes = [
        messages.SampleOutcome(s.sample_id, "consumed", s.reward or 0.0, 0.5, "", "v") for s in whole.samples
    ]
    metrics: dict[str, float] = {}
    script.losses, script.resumed = 1, 3
    run.commit(2, 2, outcomes, metrics)
    ((step, episodes, told),) = script.commits
    assert (told["environment_workers_lost"], told["episodes_resumed"]) == (1.0, 3.0)
    assert step == 2
    assert [(one.episode, one.outcome, one.reward, one.reason) for one in episodes] == [
        ("train-2.0.0.0", "consumed", 1.0, "branched"),
        ("train-2.0.1.0", "consumed", 0.0, ""),
    ]
    assert episodes[0].used == (named_request("train-2.0.0.0", "0.0"), named_request("train-2.0.0.0", "0.1"))
    assert (told["turns_mean"], told["branches_mean"], told["episodes_branched"]) == (2.0, 1.0, 1.0)
    script.losses = 2
    run.commit(2, 2, [], metrics, "eval")
    told = script.commits[-1][2]
    assert (told["environment_workers_lost"], told["episodes_resumed"]) == (1.0, 0.0), "told twice"


def test_turns_that_are_rewarded_have_rows_and_outcomes_with_their_own_advantages() -> None:
    script = Script()
    run, _ = run_of(script)
    run.submit(2, 2, [group()])
    two = msgspec.structs.replace(
        branch(3, 4, 5), turns=(messages.RowTurn(0, 2, 0.25), messages.RowTurn(2, 1, 0.5))
    )
    other = msgspec.structs.replace(branch(6), turns=(messages.RowTurn(1, 1, -1.0),))
    script.over = [done("train-2.0.0.0", 1.0, 2, two, other), done("train-2.0.1.0", 0.0)]
    (whole,) = run.poll(0.0)
    assert [run.turn_rewards(one) for one in whole.samples] == [{0: 0.25, 1: -1.0, 2: 0.5}, {}]
    rows = run.rows(whole.samples[0], 0.5, {0: 0.5, 1: 0.75, 2: -2.0})
    assert [(row.turns, row.advantage) for row in rows] == [(((2, 0.5), (1, -2.0)), 0.5), (((1, 0.75),), 0.5)]
    (plain,) = run.rows(whole.samples[1], -0.5, {0: 9.0})
    assert (plain.turns, plain.advantage) == ((), -0.5), "its turns share"
    run.commit(
        2, 2, [messages.SampleOutcome(s.sample_id, "consumed", 1.0, 0.5, "", "v") for s in whole.samples], {}
    )
    ((_, (first, second), _),) = script.commits
    ends = [sha256(pack_tokens(said)).digest() for said in ([1, 3, 4], [1, 3, 4, 5], [1, 6])]
    expected = zip(ends, (0.25, 0.5, -1.0), (0.5, -2.0, 0.75), strict=True)
    assert first.turns == tuple(messages.TurnOutcome(*one) for one in expected)
    assert second.turns == ()


def test_turns_of_an_episode_that_is_not_trained_are_reported_with_its_advantage() -> None:
    script = Script()
    run, _ = run_of(script)
    run.submit(2, 2, [group(n=1)])
    one = msgspec.structs.replace(branch(3, 4), turns=(messages.RowTurn(0, 2, 0.25),))
    script.over = [done("train-2.0.0.0", 1.0, 2, one)]
    (whole,) = run.poll(0.0)
    run.rows(whole.samples[0], 0.5, {0: 9.0})  # before an engine of its group was set aside
    run.commit(2, 2, [messages.SampleOutcome(whole.samples[0].sample_id, "filtered", 1.0, 0.0)], {})
    ((_, (taken,), _),) = script.commits
    assert [(turn.reward, turn.advantage) for turn in taken.turns] == [(0.25, 0.0)]


def test_a_step_that_is_waited_for_says_every_30_s_how_far_it_is_and_a_quick_one_says_nothing() -> None:
    script = Script()
    run, lines = run_of(script)
    ids = run.submit(2, 2, [group(0), group(1)])
    run.submit(3, 2, [group(2)])  # in advance: the older step is the one that is waited for
    assert run.poll(29.5) == []
    script.now += 100.0  # the trainer's own work between two looks is no silence of the episodes
    run.poll(0.25)
    assert lines == []
    run.poll(0.25)
    assert lines == ["step 2: 0 of 4 episodes over"], "whose turns nobody has told yet"
    script.over = [done("train-2.0.0.0"), done("train-2.0.1.0"), done("train-2.1.0.0")]
    assert [whole.group_id for whole in run.poll(0.0)] == [ids[0]]
    run.poll(70.0)
    assert lines[1:] == ["step 2: 3 of 4 episodes over, 6 turns"] * 2
    run.commit(2, 2, [], {})
    run.poll(29.0)
    assert len(lines) == 3, "each step's waiting counts for itself"


def test_an_evaluation_that_is_waited_for_is_named_and_nothing_is_said_of_nothing() -> None:
    script = Script()
    run, lines = run_of(script)
    run.poll(100.0)
    run.submit(4, 2, [group()], "eval")
    run.poll(29.0)
    assert lines == []
    run.poll(1.0)
    assert lines == ["evaluation after step 4: 0 of 2 episodes over"]


def test_turns_of_other_weights_begin_another_life_and_equal_weights_do_not() -> None:
    script = Script()
    run, lines = run_of(script)
    run.submit(2, 3, [group(n=1)])
    script.over = [done("train-2.0.0.0", version=1)]
    assert run.poll(0.0) == []
    assert script.asked[-1].episode == "train-2.0.0.1"
    assert script.asked[-1].seed == script.asked[0].seed
    assert "answered by version 1, which is not the step's 3" in lines[0]
    script.over = [done("train-2.0.0.1", version=2)]  # the same root as version 3
    (whole,) = run.poll(0.0)
    run.commit(2, 3, [messages.SampleOutcome(whole.samples[0].sample_id, "consumed", 1.0, 0.5)], {})
    ((_, (taken, earlier), told),) = script.commits
    assert (taken.episode, taken.outcome, len(taken.used)) == ("train-2.0.0.1", "consumed", 2)
    assert (earlier.episode, earlier.outcome, earlier.used) == ("train-2.0.0.0", "masked", ())
    assert "answered by version 1" in earlier.reason, "the ledger has why it was begun anew"
    assert told["episodes_replayed"] == 1.0


def test_with_steps_in_advance_newer_weights_are_taken_and_older_ones_are_not() -> None:
    script = Script()
    run, _ = run_of(script, ahead=True)
    run.submit(2, 1, [group(n=1)])
    script.over = [done("train-2.0.0.0", version=3)]
    assert len(run.poll(0.0)) == 1
    run.submit(3, 2, [group(n=1)])
    script.over = [done("train-3.0.0.0", version=1)]
    assert run.poll(0.0) == []


@pytest.mark.parametrize("stops", [True, False])
def test_a_failing_environment_is_tried_again_and_then_stops_the_run_or_is_masked(stops: bool) -> None:
    script = Script()
    run, _ = run_of(script, stops=stops)
    run.submit(2, 2, [group(n=1)])
    script.over = [wire.Played("train-2.0.0.0", error="ToolError", output="secret words")]
    assert run.poll(0.0) == []
    script.over = [wire.Played("train-2.0.0.1", error="ToolError", output="secret words")]
    if stops:
        with pytest.raises(RewardError, match=r"train-2.0.0.1: failed: ToolError") as found:
            run.poll(0.0)
        assert "secret" not in str(found.value.cause), "what it said may quote a prompt"
        return
    (whole,) = run.poll(0.0)
    assert whole.samples[0].error == "failed: ToolError"
    run.commit(
        2, 2, [messages.SampleOutcome(whole.samples[0].sample_id, "masked", float("nan"), 0.0, "failed")], {}
    )
    ((_, (outcome, earlier), _),) = script.commits
    assert (outcome.episode, outcome.outcome, outcome.used) == ("train-2.0.0.1", "masked", ())
    assert (earlier.episode, earlier.outcome, earlier.reason) == ("train-2.0.0.0", "masked", "ToolError")


def test_an_episode_whose_budget_others_used_up_is_no_failure_and_what_they_said_is_delivered() -> None:
    script = Script()
    run, said = run_of(script, stops=True)
    run.submit(2, 2, [group()])
    other = wire.PolicyPart("s", 0.25, (branch(5),), ("0.0",))
    script.over = [
        wire.Played("train-2.0.0.0", stopped_by=wire.OVER_BUDGET, others=(other,)),
        done("train-2.0.1.0"),
    ]
    (whole,) = run.poll(0.0)
    unheard, heard = whole.samples
    assert (unheard.error, unheard.reward, heard.reward) == (NOT_HEARD, None, 1.0)
    assert whole.prompt == branch(3).prompt
    [(policy, share)] = script.delivered
    assert (policy, share.episode, share.reward, len(share.rows)) == ("s", "train-2.0.0.0", 0.25, 1)
    assert not any("again" in line for line in said), "it would spend its budget once more"
    masked = messages.SampleOutcome(unheard.sample_id, "masked", float("nan"), 0.0, NOT_HEARD)
    run.commit(2, 2, [masked], {})
    ((_, (outcome,), _),) = script.commits
    assert (outcome.outcome, outcome.used, outcome.reason) == ("masked", (), NOT_HEARD)
    assert redaction.is_known(NOT_HEARD)


def test_an_answer_for_an_earlier_life_is_nobody_s() -> None:
    script = Script()
    run, _ = run_of(script)
    run.submit(2, 2, [group(n=1)])
    script.over = [wire.Played("train-2.0.0.0", again="ended", gone=True), done("train-2.0.0.0")]
    assert run.poll(0.0) == []
    assert len(script.asked) == 2
    script.over = [done("train-2.0.0.1")]
    (whole,) = run.poll(0.0)
    run.commit(2, 2, [messages.SampleOutcome(whole.samples[0].sample_id, "consumed", 1.0, 0.5)], {})
    ((_, (taken,), _),) = script.commits
    assert taken.episode == "train-2.0.0.1", "what the ledger has ended is not named again"


def test_verdicts() -> None:
    fine = done("e")
    assert verdict(fine, "", 0, 0, 0) == Keep()
    assert verdict(fine, "old weights", 0, 0, 0) == Again("old weights", False)
    assert verdict(fine, "old weights", 8, 0, 0) == Lost("old weights, 9 times")
    failed = wire.Played("e", error="ToolError")
    assert verdict(failed, "ignored: it says nothing", 0, 0, 1) == Again("ToolError", True)
    assert verdict(failed, "", 1, 1, 1) == Lost("failed: ToolError")
    silent = msgspec.structs.replace(fine, branches=())
    assert verdict(silent, "", 0, 0, 0) == Lost("the model said nothing in it")
    spent = msgspec.structs.replace(silent, stopped_by=wire.OVER_BUDGET)
    assert verdict(spent, "", 0, 0, 3) == Unheard(NOT_HEARD)


def test_sampling_goes_by_vllm_s_names_and_leaves_out_what_is_off() -> None:
    assert sampling_of(HOW) == {"temperature": 1.0, "top_p": 1.0, "max_tokens": 8}
    more = messages.Sampling(8, 0.5, 0.9, 3, (0,), 2, ("END",))
    assert sampling_of(more) == {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 8,
        "top_k": 3,
        "min_tokens": 2,
        "stop": ["END"],
    }
