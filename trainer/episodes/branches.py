"""From the graph of a played episode to rows to train. Pure: it reads nodes by what they have, and imports nothing of `verifiers`.

A node is one message with the tokens that it adds, which of them the model said (`mask`), and their logprobs. A branch is a path of nodes
from the first message to a last one: of a plain episode there is one. Where an agent wrote its history anew, several branches share
nodes; what a node says is trained in the first of them that has it, and nowhere else.

Boundary: the rule alone; the worker hands it what the package made.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

from trainer.episodes.wire import Branch


class Node(Protocol):
    """`verifiers.v1.MessageNode`, as far as rows need it. `logprobs`: one for each token that `mask` has."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def mask(self) -> Sequence[bool]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...


def rows_of(paths: Sequence[Sequence[Node]]) -> tuple[Branch, ...]:
    """A row for each path that has something new to train. Raises `ValueError` for nodes that do not fit together."""
    seen: set[int] = set()
    rows = []
    for path in paths:
        row = _row(path, seen)
        seen |= {id(node) for node in path}
        if row is not None:
            rows.append(row)
    return tuple(rows)


def _row(path: Sequence[Node], seen: set[int]) -> Branch | None:
    tokens, trained, behaviour = array("i"), bytearray(), array("f")
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
    )
