"""From the graph of a played episode to rows to train. Pure: it reads nodes by what they have, and imports nothing of `verifiers`.

A node is one message with the tokens that it adds, which of them the model said (`mask`), and their logprobs. A branch is a path of nodes
from the first message to a last one: of a plain episode there is one. Where an agent wrote its history anew, several branches share
nodes; what a node says is trained in the first of them that has it, and nowhere else. Where the environment rewards turns, a row says
which of its tokens are of which turn.

Boundary: the rule alone; the worker hands it what the package made.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Protocol

from scavenger.protocol.messages import MOST_TURN_REWARD, RowTurn
from trainer.episodes.wire import Branch


class Node(Protocol):
    """`verifiers.v1.MessageNode`, as far as rows need it. `logprobs`: one for each token that `mask` has."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def mask(self) -> Sequence[bool]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...


def rows_of(
    paths: Sequence[Sequence[Node]], turns: Sequence[Node] = (), rewards: Sequence[float] | None = None
) -> tuple[Branch, ...]:
    """A row for each path that has something new to train. `turns`: the episode's, in their order, and `rewards` of each; None: the
    environment does not reward turns. Raises `ValueError` for nodes that do not fit together."""
    earned = {} if rewards is None else _earned(paths, turns, rewards)
    seen: set[int] = set()
    rows = []
    for path in paths:
        row = _row(path, seen, earned)
        seen |= {id(node) for node in path}
        if row is not None:
            rows.append(row)
    return tuple(rows)


def _earned(
    paths: Sequence[Sequence[Node]], turns: Sequence[Node], rewards: Sequence[float]
) -> dict[int, tuple[int, float]]:
    """By the node's id: its turn's number, and its reward. What a turn earned that no row trains counts to the trained one before it, or to
    the first one: so what was earned from any later trained turn on is the same.

    Raises `ValueError` for rewards that are not one number for each turn.
    """
    if len(rewards) != len(turns):
        raise ValueError(
            f"{len(rewards)} rewards for {len(turns)} turns: give one for each turn of the episode"
        )
    in_rows = {id(node) for path in paths for node in path if any(node.mask)}
    found: dict[int, tuple[int, float]] = {}
    last: int | None = None
    before = 0.0  # what was earned before the first trained turn
    for number, (node, reward) in enumerate(zip(turns, rewards, strict=True)):
        if not abs(reward) <= MOST_TURN_REWARD:  # neither is NaN
            raise ValueError(
                f"the reward of turn {number + 1} is {reward}: give a number between -{MOST_TURN_REWARD:g} and {MOST_TURN_REWARD:g}"
            )
        if id(node) in in_rows:
            found[id(node)] = number, reward + (before if last is None else 0.0)
            last = id(node)
        elif last is not None:
            found[last] = found[last][0], found[last][1] + reward
        else:
            before += reward
    return found


def _row(path: Sequence[Node], seen: set[int], earned: Mapping[int, tuple[int, float]]) -> Branch | None:
    tokens, trained, behaviour = array("i"), bytearray(), array("f")
    turns = []
    for node in path:
        said = [bool(one) for one in node.mask]
        if len(said) != len(node.token_ids):
            raise ValueError(f"a message of {len(node.token_ids)} tokens has a mask of {len(said)}")
        if len(node.logprobs) != sum(said):
            raise ValueError(f"a message of {sum(said)} sampled tokens has {len(node.logprobs)} logprobs")
        tokens.extend(node.token_ids)
        if id(node) in seen:
            trained += bytes(len(said))
        else:
            trained += bytes(said)
            behaviour.extend(node.logprobs)
            if earned and any(said):
                if id(node) not in earned:
                    raise ValueError("the model said something that is of no turn")
                number, reward = earned[id(node)]
                turns.append(RowTurn(number, sum(said), reward))
    first, last = trained.find(1), trained.rfind(1)
    if first < 0:
        return None
    if first == 0:
        raise ValueError("the model's first token has nothing before it")
    inside = bytes(trained[first : last + 1])
    return Branch(
        prompt=tokens[:first].tobytes(),
        completion=tokens[first : last + 1].tobytes(),
        mask=b"" if all(inside) else inside,
        behaviour=behaviour.tobytes(),
        trained=len(behaviour),
        turns=tuple(turns),
    )
