"""Names of calls, and what a call is when the environment answered otherwise than it did."""

from __future__ import annotations

import pytest

from trainer.episodes.naming import MOST_BRANCHES, Branch, Call, Calls, End


def play(calls: Calls, agents: list[int]) -> list[str]:
    """What these agents' calls are named, in this order."""
    names = []
    for agent in agents:
        call = calls.next(agent)
        calls.answered(call)
        names.append(call.name)
    return names


def test_calls_are_counted_by_agent_and_named_alike_when_they_are_played_again() -> None:
    order = [0, 0, 1, 0, 1]
    assert play(Calls(), order) == ["0.0", "0.1", "1.0", "0.2", "1.1"]
    assert play(Calls(), order) == play(Calls(), order)
    assert set(play(Calls(), [0, 1, 0, 1, 0])) == set(play(Calls(), order)), "whichever agent asked first"


def test_from_a_branch_on_all_of_the_agent_s_calls_are_the_branch_s() -> None:
    calls = Calls()
    play(calls, [0, 1])
    call = calls.next(0)
    found = calls.conflict(call, "branch")
    assert isinstance(found, Branch)
    assert "call 0.1" in found.reason
    call = calls.branched(call)
    calls.answered(call)
    assert call.name == "0.1~1"
    assert play(calls, [0, 1]) == ["0.2~1", "1.1"], "another agent goes on as it was"
    assert [one.name for _, one in sorted(calls.taken.items())] == ["0.0", "0.1~1", "0.2~1", "1.0", "1.1"]


def test_a_third_life_passes_the_second_one_s_branch_and_makes_the_next() -> None:
    calls = Calls()
    call = calls.next(0)
    assert [(call := calls.branched(call)).name for _ in range(3)] == ["0.0~1", "0.0~2", "0.0~3"]


@pytest.mark.parametrize(("setting", "again"), [("restart", True), ("fail", False)])
def test_other_settings_end_the_episode_and_say_why(setting: str, again: bool) -> None:
    found = Calls().conflict(Call(0, 4), setting)  # type: ignore[arg-type]
    assert isinstance(found, End)
    assert found.again is again
    assert "answered otherwise than before at call 0.4" in found.reason


def test_an_environment_that_never_says_the_same_twice_ends() -> None:
    assert isinstance(Calls().conflict(Call(0, 1, MOST_BRANCHES - 2), "branch"), Branch)
    found = Calls().conflict(Call(0, 1, MOST_BRANCHES - 1), "branch")
    assert isinstance(found, End)
    assert not found.again
