"""From a graph of messages to rows to train: masks, logprobs, and branches that share their beginning."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256

import msgspec
import pytest

from scavenger.errors import WireError
from scavenger.protocol import messages
from scavenger.protocol.messages import (
    MOST_TURN_REWARD,
    RowTurn,
    TurnOutcome,
    pack_tokens,
    unpack_logprobs,
    unpack_tokens,
)
from scavenger.protocol.messages.deliveries import MAX_DELIVERED_TURNS
from trainer.episodes import wire
from trainer.episodes.branches import rows_of
from trainer.episodes.run import said


@dataclass
class Node:
    token_ids: list[int]
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def asked(*tokens: int) -> Node:
    return Node(list(tokens), [False] * len(tokens))


def answered(*tokens: int, scaffold: int = 1) -> Node:
    """A message whose first `scaffold` tokens the template wrote, and the model the others; the logprob of token t is -t."""
    mask = [False] * scaffold + [True] * (len(tokens) - scaffold)
    return Node(list(tokens), mask, [-float(token) for token in tokens[scaffold:]])


def test_two_turns_are_one_row_in_which_only_what_the_model_said_is_trained() -> None:
    (row,) = rows_of([[asked(1, 2), answered(9, 3, 4), asked(5, 6), answered(9, 7)]])
    assert list(unpack_tokens(row.prompt)) == [1, 2, 9]
    assert list(unpack_tokens(row.completion)) == [3, 4, 5, 6, 9, 7]
    assert list(row.mask) == [1, 1, 0, 0, 0, 1]
    assert list(unpack_logprobs(row.behaviour)) == [-3, -4, -7]
    assert row.trained == 3
    assert list(unpack_tokens(said(row))) == [3, 4, 7]


def test_what_comes_after_the_last_answer_is_no_part_of_the_row() -> None:
    (row,) = rows_of([[asked(1), answered(9, 3), asked(5, 6)]])
    assert list(unpack_tokens(row.completion)) == [3]
    assert row.mask == b"", "a single answer needs no mask"


def test_branches_train_what_they_share_once() -> None:
    first, one, other = answered(9, 3, 4), answered(9, 5), answered(9, 6)
    rows = rows_of([[asked(1), first, asked(2), one], [asked(1), first, asked(8), other]])
    assert [list(unpack_logprobs(row.behaviour)) for row in rows] == [[-3, -4, -5], [-6]]
    assert list(unpack_tokens(rows[1].prompt)) == [1, 9, 3, 4, 8, 9], "what was trained before is context"
    assert sum(row.trained for row in rows) == 4


def test_a_branch_with_nothing_new_makes_no_row() -> None:
    path = [asked(1), answered(9, 3)]
    assert len(rows_of([path, [*path, asked(4)]])) == 1
    assert rows_of([[asked(1, 2)]]) == ()


@pytest.mark.parametrize(
    ("node", "what"),
    [
        (Node([1, 2], [False]), "2 tokens has a mask of 1"),
        (Node([1, 2], [False, True], []), "1 sampled tokens has 0 logprobs"),
        (Node([1], [True], [-1.0]), "nothing before it"),
    ],
)
def test_nodes_that_do_not_fit_together_are_refused(node: Node, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        rows_of([[node]])


# ---------------------------------------------------------------- turns that are rewarded


def test_a_row_says_which_of_its_tokens_are_of_which_turn_and_what_it_earned() -> None:
    one, two = answered(9, 3, 4), answered(9, 7)
    (row,) = rows_of([[asked(1, 2), one, asked(5, 6), two]], [one, two], [0.5, -1.0])
    assert row.turns == (RowTurn(0, 2, 0.5), RowTurn(1, 1, -1.0))


def test_turns_in_several_branches_keep_their_numbers_and_are_each_in_one_row() -> None:
    first, one, other = answered(9, 3, 4), answered(9, 5), answered(9, 6)
    rows = rows_of(
        [[asked(1), first, asked(2), other], [asked(1), first, asked(8), one]], [first, one, other], [1, 2, 3]
    )
    assert [row.turns for row in rows] == [(RowTurn(0, 2, 1), RowTurn(2, 1, 3)), (RowTurn(1, 1, 2),)]


def test_what_an_untrained_turn_earned_counts_to_the_turns_up_to_it() -> None:
    """It is in no branch that trains, or said nothing: what was earned from any trained turn on stays the same."""
    one, silent, two = answered(9, 3), answered(9), answered(9, 7)
    (row,) = rows_of([[asked(1), one, asked(5), two]], [one, silent, two], [1.0, 0.25, 4.0])
    assert row.turns == (RowTurn(0, 1, 1.25), RowTurn(2, 1, 4.0))


def test_what_was_earned_before_the_first_trained_turn_counts_to_it() -> None:
    silent, one, two = answered(9), answered(9, 3), answered(9, 7)
    (row,) = rows_of([[asked(1), one, asked(5), two]], [silent, one, two], [0.5, 1.0, 4.0])
    assert row.turns == (RowTurn(1, 1, 1.5), RowTurn(2, 1, 4.0))


@pytest.mark.parametrize(
    ("rewards", "what"),
    [
        ([1.0], "1 rewards for 2 turns"),
        ([1.0, 1.0, 1.0], "3 rewards for 2 turns"),
        ([1.0, float("nan")], "the reward of turn 2 is nan"),
        ([float("inf"), 1.0], "the reward of turn 1 is inf"),
        ([1.0, -1.1e9], "the reward of turn 2 is -1100000000.0"),
    ],
)
def test_rewards_are_one_finite_number_for_each_turn(rewards: list[float], what: str) -> None:
    one, two = answered(9, 3), answered(9, 7)
    with pytest.raises(ValueError, match=what):
        rows_of([[asked(1), one, asked(5), two]], [one, two], rewards)


def test_what_may_be_earned_at_most_is_read_again_by_those_who_get_it() -> None:
    """Also where it is added up over turns that no row trains."""
    one = answered(9, 3)
    silent = [Node([9]) for _ in range(MAX_DELIVERED_TURNS - 1)]
    rows = rows_of([[asked(1), one]], [one, *silent], [MOST_TURN_REWARD] * MAX_DELIVERED_TURNS)
    [turn] = rows[0].turns
    assert turn.reward == pytest.approx(MOST_TURN_REWARD * MAX_DELIVERED_TURNS)
    sent = wire.encode(wire.Played("e", 1.0, branches=rows))
    assert wire.to_trainer.decode(sent) == wire.Played("e", 1.0, branches=rows)
    outcome = TurnOutcome(bytes(32), turn.reward, 2e300)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(outcome), type=TurnOutcome) == outcome


def test_what_the_model_said_beside_all_turns_is_refused() -> None:
    one, two = answered(9, 3), answered(9, 7)
    with pytest.raises(ValueError, match="of no turn"):
        rows_of([[asked(1), one, asked(5), two]], [one], [1.0])


def test_the_ends_of_turns_are_those_of_their_samples() -> None:
    """A turn's sample has the whole conversation up to its last token."""
    one, two = answered(9, 3, 4), answered(9, 7)
    (row,) = rows_of([[asked(1, 2), one, asked(5, 6), two]], [one, two], [0.5, -1.0])
    ends = messages.turn_ends(row.prompt, row.completion, row.mask, row.turns)
    assert [end for _, end in ends] == [
        sha256(pack_tokens(said)).digest() for said in ([1, 2, 9, 3, 4], [1, 2, 9, 3, 4, 5, 6, 9, 7])
    ]


@pytest.mark.parametrize(
    "turns",
    [
        [(0, 2, 0.5)],  # too few tokens
        [(0, 2, 0.5), (1, 2, 0.5)],  # too many
        [(0, 2, 0.5), (0, 1, 0.5)],  # a turn twice
        [(0, 2, float("nan")), (1, 1, 0.5)],
        [(0, 2, float("inf")), (1, 1, 0.5)],
        [(0, 2, 1e301), (1, 1, 0.5)],
        [(-1, 2, 0.5), (1, 1, 0.5)],
        [(0, 3, 0.5), (1, 0, 0.5)],
        [(0, 2, 0.5), (1, 1, "much")],
    ],
)
def test_turns_that_cannot_be_are_no_message(turns: list[tuple[int, int, object]]) -> None:
    """What a worker says is decoded by rank 0: by its types, and by what fits together."""
    one, two = answered(9, 3, 4), answered(9, 7)
    rows = rows_of([[asked(1, 2), one, asked(5, 6), two]], [one, two], [0.5, -1.0])
    good = wire.Played("e", 1.0, branches=rows)
    assert wire.from_remote(wire.encode(good)) == good
    said = msgspec.to_builtins(good, builtin_types=(bytes,))
    said["branches"][0]["turns"] = [dict(zip(("number", "tokens", "reward"), t, strict=True)) for t in turns]
    with pytest.raises(WireError):
        wire.from_remote(msgspec.msgpack.encode(said))
