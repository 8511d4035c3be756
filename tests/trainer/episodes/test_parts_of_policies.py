"""What rank 0 is told of an episode of `verifiers` whose agents are of several runs. Traces stand in by the attributes that are read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from scavenger.protocol.messages import RowTurn
from trainer.episodes.naming import Call
from trainer.episodes.relay import Playing
from trainer.episodes.worker import result_of
from trainer.sandbox.box import BoxEnded


def trace(agent: str, reward: float, tokens: list[int], *, trains: bool = True, **info: Any) -> Any:
    """One agent's: a question of one token, and an answer."""
    asked = SimpleNamespace(token_ids=[1], mask=[False], logprobs=[], sampled=False)
    said = SimpleNamespace(
        token_ids=tokens, mask=[True] * len(tokens), logprobs=[-1.0] * len(tokens), sampled=True
    )
    return SimpleNamespace(
        agent=SimpleNamespace(name=agent, trainable=trains),
        nodes=[asked, said],
        branches=[SimpleNamespace(nodes=[asked, said], trainable=True)],
        info=info,
        reward=reward,
        rewards={},
        metrics={},
        stop_condition=None,
        is_truncated=False,
        is_timeout=False,
    )


def playing() -> Playing:
    """Three agents asked once each; another run answered for the second and the third."""
    made = Playing("e", "key", "branch", policies={1: "s", 2: "s"})
    for agent in range(3):
        made.calls.answered(Call(agent, 0))
        made.versions[agent, 0] = 4 + agent
    return made


def test_each_run_has_the_rows_calls_and_mean_reward_of_its_own_agents() -> None:
    episode = SimpleNamespace(
        traces=[trace("proposer", 0.5, [2]), trace("solver", 1.0, [3, 4]), trace("checker", 0.0, [5])]
    )
    policies = {"solver": "s", "checker": "s"}
    found = result_of("e", episode, playing(), policies=policies)
    assert (found.reward, found.calls, found.versions) == (0.5, ("0.0",), (4,))
    [other] = found.others
    assert (other.run, other.reward, other.calls) == ("s", 0.5, ("1.0", "2.0"))
    assert [branch.trained for branch in other.branches] == [2, 1]


def test_an_episode_of_a_policy_without_a_reward_fails_and_names_the_run() -> None:
    episode = SimpleNamespace(traces=[trace("proposer", 0.5, [2]), trace("solver", float("nan"), [3])])
    assert "'s'" in result_of("e", episode, playing(), policies={"solver": "s"}).error


def test_an_episode_in_which_no_agent_of_this_run_trains_fails() -> None:
    episode = SimpleNamespace(traces=[trace("solver", 1.0, [3])])
    assert result_of("e", episode, playing(), policies={"solver": "s"}).error == "no agent of it trains"


def test_agents_of_this_run_whose_turn_did_not_come_have_no_rows_and_the_others_theirs() -> None:
    """Where others used up the episode's budget, its environment may not even begin them."""
    was = playing()
    was.calls.taken = {place: call for place, call in was.calls.taken.items() if place[0]}
    was.end_over_budget(1)
    found = result_of("e", SimpleNamespace(traces=[trace("solver", 1.0, [3])]), was, policies={"solver": "s"})
    assert (found.error, found.reward, found.branches, found.calls) == ("", 0.0, (), ())
    assert (found.finish, found.stopped_by) == ("length", "budget")
    [other] = found.others
    assert (other.run, other.reward, len(other.branches)) == ("s", 1.0, 1)


def test_the_rewards_of_turns_go_to_the_run_of_their_agent() -> None:
    """`Trace.info` is the environment's: `turn_rewards` there has one number for each turn."""
    proposer, solver = trace("proposer", 0.5, [2]), trace("solver", 1.0, [3, 4], turn_rewards=[1])
    found = result_of("e", SimpleNamespace(traces=[proposer, solver]), playing(), policies={"solver": "s"})
    assert found.branches[0].turns == ()
    assert found.others[0].branches[0].turns == (RowTurn(0, 2, 1.0),)


@pytest.mark.parametrize(
    "said", [[0.5, 0.5], [], [True], ["1"], 1.0, None, {"0": 1.0}, [float("nan")], [10**400]]
)
def test_rewards_of_turns_that_are_not_one_number_for_each_are_refused(said: Any) -> None:
    with pytest.raises(ValueError, match="turn"):
        result_of("e", SimpleNamespace(traces=[trace("a", 0.5, [2], turn_rewards=said)]), playing())


def test_agents_that_share_a_reward_cannot_have_their_turns_rewarded() -> None:
    both = [trace("a", 0.5, [2], turn_rewards=[0.5]), trace("b", 0.5, [3], turn_rewards=[0.5])]
    with pytest.raises(ValueError, match=r"2 agents share one reward: give each a policy"):
        result_of("e", SimpleNamespace(traces=both), playing())


def test_what_a_sandbox_ended_has_no_reward_of_which_turns_could_have_parts() -> None:
    one = trace("a", 0.5, [2], turn_rewards=[0.5])
    found = result_of("e", SimpleNamespace(traces=[one]), playing(), BoxEnded("memory", ""))
    assert (found.reward, found.branches[0].turns) == (0.0, ())


def test_seconds_in_which_several_calls_are_under_way_count_each_and_as_one_wait() -> None:
    was, now = playing(), iter([1.0, 2.0, 5.0, 6.0, 6.0, 10.0, 11.0, 11.0])
    with was.timed(lambda: next(now)), was.timed(lambda: next(now)):  # 1 to 6, and 2 to 5
        pass
    with was.timed(lambda: next(now)):  # 10 to 11
        pass
    assert (was.seconds, was.seconds_waited) == (3.0 + 5.0 + 1.0, 5.0 + 1.0)
