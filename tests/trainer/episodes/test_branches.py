"""From a graph of messages to rows to train: masks, logprobs, and branches that share their beginning."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from scavenger.protocol.messages import unpack_logprobs, unpack_tokens
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
