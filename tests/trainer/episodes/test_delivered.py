"""A run whose steps are filled from another run's episodes: what it wants, what it gives to the loop, and when it is over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from scavenger.protocol import messages
from scavenger.protocol.messages import pack_logprobs, pack_tokens
from trainer.episodes.delivered import DeliveredRun, EpisodesOver

HOW = messages.Sampling(8)


class Script:
    """The daemon: what was wanted and committed; `groups` come with the next poll."""

    attempt, last_step, next_version, reserved_order = 1, 0, 4, 0

    def __init__(self) -> None:
        self.fleet = messages.Fleet(0, 0, 0, 0, 0)
        self.wanted: list[tuple[int, int]] = []
        self.groups: list[messages.DeliveredGroup] = []
        self.commits: list[tuple[int, tuple[messages.DeliveryOutcome, ...]]] = []
        self.episodes_over = ""
        self.polls = 0

    def want_deliveries(self, step: int, count: int) -> None:
        self.wanted.append((step, count))

    def take_deliveries(self) -> list[messages.DeliveredGroup]:
        found, self.groups = self.groups, []
        return found

    def poll(self, timeout_s: float) -> list[Any]:
        self.polls += 1
        return []

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
        deliveries: Sequence[messages.DeliveryOutcome] = (),
    ) -> None:
        assert not outcomes
        assert not episodes
        self.commits.append((step, tuple(deliveries)))


def opened() -> tuple[Script, DeliveredRun]:
    script = Script()
    given: Any = script
    return script, DeliveredRun(given, "v")


def specs(count: int, first: int = 0) -> list[messages.GroupSpec]:
    return [messages.GroupSpec(first + i, b"", 2, HOW, "{}") for i in range(count)]


def delivered(first: int, rewards: Sequence[float], version: int = 1) -> messages.DeliveredGroup:
    row = messages.DeliveredRow(
        pack_tokens([1]), pack_tokens([2, 3, 4]), b"\1\0\1", pack_logprobs([-1.0, -2.0])
    )
    episodes = tuple(
        messages.DeliveredEpisode(first + i, f"e{first + i}", i, reward, version, (row,))
        for i, reward in enumerate(rewards)
    )
    return messages.DeliveredGroup(first, "r", 1, 0, episodes)


def outcome(sample: messages.DoneSample, kind: str = "consumed") -> messages.SampleOutcome:
    return messages.SampleOutcome(sample.sample_id, kind, sample.reward or 0.0, 0.5)


def test_what_is_delivered_fills_what_was_asked_for_and_trains_what_the_policy_said() -> None:
    script, run = opened()
    first, second = run.submit(1, 1, specs(2))
    script.groups = [delivered(7, [1.0, 0.0])]
    [group] = run.poll(0.0)
    assert (group.group_id, group.step, [s.reward for s in group.samples]) == (first, 1, [1.0, 0.0])
    assert [list(messages.unpack_tokens(s.tokens)) for s in group.samples] == [[2, 4], [2, 4]]
    [row] = run.rows(group.samples[0], 0.25, {})
    assert (row.advantage, bytes(row.mask), row.trained) == (0.25, b"\1\0\1", 2)
    assert script.wanted == [(1, 2)]
    script.groups = [delivered(9, [0.5, 0.5])]
    [group] = run.poll(0.0)
    assert group.group_id == second


def test_delivered_turns_that_are_rewarded_have_their_own_advantages() -> None:
    script, run = opened()
    run.submit(1, 1, specs(1))
    group = delivered(7, [1.0, 0.0])
    one = group.episodes[0]
    turns = (messages.RowTurn(0, 1, 0.5), messages.RowTurn(1, 1, 0.25))
    row = msgspec.structs.replace(one.rows[0], turns=turns)
    rewarded = msgspec.structs.replace(one, rows=(row,))
    script.groups = [msgspec.structs.replace(group, episodes=(rewarded, group.episodes[1]))]
    [came] = run.poll(0.0)
    assert [run.turn_rewards(sample) for sample in came.samples] == [{0: 0.5, 1: 0.25}, {}]
    [trained] = run.rows(came.samples[0], 0.25, {0: 0.25, 1: -1.0})
    assert trained.turns == ((1, 0.25), (1, -1.0))
    run.commit(1, 1, [outcome(came.samples[0]), outcome(came.samples[1], "masked")], {})
    [(_, said)] = script.commits
    assert [[(turn.number, turn.advantage) for turn in one.turns] for one in said] == [
        [(0, 0.25), (1, -1.0)],
        [],
    ]


def test_turns_of_a_delivery_that_is_not_trained_have_its_advantage() -> None:
    script, run = opened()
    run.submit(1, 1, specs(1))
    group = delivered(7, [1.0])
    rows = (msgspec.structs.replace(group.episodes[0].rows[0], turns=(messages.RowTurn(3, 2, 0.5),)),)
    script.groups = [
        msgspec.structs.replace(group, episodes=(msgspec.structs.replace(group.episodes[0], rows=rows),))
    ]
    [came] = run.poll(0.0)
    run.rows(came.samples[0], 0.25, {3: -1.0})
    run.commit(1, 1, [outcome(came.samples[0], "filtered")], {})
    [(_, (said,))] = script.commits
    assert said.turns == (messages.TurnAdvantage(3, said.advantage),)


def test_a_group_in_which_the_policy_had_less_part_is_filled_up_and_one_with_more_is_cut() -> None:
    script, run = opened()
    run.submit(1, 1, specs(2))
    script.groups = [delivered(1, [1.0]), delivered(2, [1.0, 0.5, 0.25])]
    few, many = run.poll(0.0)
    assert [s.error is None for s in few.samples] == [True, False]
    assert [s.sample_id for s in many.samples] == [2, 3]
    taken = [outcome(s) for s in (few.samples[0], *many.samples)]
    run.commit(1, 1, [*taken, outcome(few.samples[1], "masked")], {})
    [(step, outcomes)] = script.commits
    assert (step, [(o.sample_id, o.outcome) for o in outcomes]) == (
        1,
        [(1, "consumed"), (2, "consumed"), (3, "consumed"), (4, "filtered")],
    )


def test_steps_ahead_are_wanted_one_after_another() -> None:
    script, run = opened()
    run.submit(1, 1, specs(1))
    run.submit(2, 1, specs(1, 1))
    assert script.wanted == [(1, 1)]
    script.groups = [delivered(1, [1.0, 0.0])]
    [group] = run.poll(0.0)
    assert script.wanted == [(1, 1), (2, 2)], "one is here, one more is for step 2"
    run.commit(1, 1, [outcome(s) for s in group.samples], {})
    assert script.wanted[-1] == (2, 1)


def test_the_end_of_the_other_run_ends_a_step_that_cannot_be_filled_and_nothing_before() -> None:
    script, run = opened()
    run.submit(1, 1, specs(1))
    script.groups, script.episodes_over = [delivered(1, [1.0, 0.0])], "run 'r' has ended"
    assert len(run.poll(0.0)) == 1
    run.submit(2, 1, specs(1, 1))
    with pytest.raises(EpisodesOver, match="has ended"):
        run.poll(0.0)


def test_a_run_that_takes_no_further_step_answers_until_the_other_one_ends() -> None:
    script, run = opened()

    def check() -> None:
        if script.polls == 3:
            script.episodes_over = "run 'r' has ended"

    assert run.serve(check) == "run 'r' has ended"
    assert script.wanted == [(1, 0)]
