"""What of a policy's decisions is written down, so that the ledger explains a run and is not flooded by it. Pure.

    place, rebalance   one row for each answer: how many samples, where, and the first one's reason
    window, engines    one row when the answer is another one than before

Rows of each kind are bounded (`told.Budget`); what was left out is counted in the next row's `inputs`. Owns the codes and the words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from scavenger.harvest.autoscale import Benefit
from scavenger.ledger import records as rec
from scavenger.router.core import Core
from scavenger.router.policy import Move, Placement
from scavenger.router.state import Run
from scavenger.router.told import Budget

#: Moves of one answer that are named one by one.
NAMED = 16


class Code(StrEnum):
    """A decision in a word. Ledgers hold these and reports rely on them: they are added to, never renamed."""

    PLACED = "placed"
    MOVED = "moved"
    MERGED = "merged"  # moved so that engines may go: the step's tail
    OPENED = "opened"
    REOPENED = "reopened"  # within a step in which it had been closed
    CLOSED = "closed"
    ALL_DONE = "all_done"  # closed, since nothing is left to generate
    UNDECIDED = "undecided"  # the trainer's own rule decides
    FLEET = "fleet"


def placed(core: Core, run: Run, answers: Sequence[Placement]) -> None:
    """Samples were leased. A policy without reasons (`Standard`) has nothing to tell."""
    told = [answer for answer in answers if answer.reason]
    if told:
        by_worker = Counter(str(answer.worker_id) for answer in told)
        subject, why = _of_many([(answer.sample_id, answer.reason) for answer in told])
        bounded = sum(answer.most_tokens is not None for answer in told)
        _write(core, run, "placement", "lease", Code.PLACED, subject, why, samples=len(told), by_worker=dict(by_worker), bounded=bounded)


def moved(core: Core, run: Run, moves: Iterable[Move]) -> None:
    all_of = list(moves)
    if all_of:
        named = [[move.sample_id, move.from_worker, move.to_worker] for move in all_of[:NAMED]]
        subject, why = _of_many([(move.sample_id, move.reason) for move in all_of])
        code = Code.MERGED if all_of[0].merges else Code.MOVED
        _write(core, run, "rebalance", "move", code, subject, why, samples=len(all_of), moves=named)


def _of_many(reasons: Sequence[tuple[int, str]]) -> tuple[str, str]:
    """Subject and reason of one row for several samples."""
    sample_id, why = reasons[0]
    return f"sample {sample_id}", why if len(reasons) == 1 else f"{why} (and {len(reasons) - 1} more samples)"


def window(core: Core, run: Run, all_done: bool, inputs: Mapping[str, float]) -> None:
    """The policy says another thing of the window than before: `run.window`, by these figures."""
    told, said = run.told, run.window
    code = Code.UNDECIDED
    if said == "close":
        told.closed_in = run.newest
        code = Code.ALL_DONE if all_done else Code.CLOSED
    elif said == "open":
        code = Code.REOPENED if told.closed_in == run.newest else Code.OPENED
    _write(core, run, "window", said or "none", code, run.name, run.window_reason or "nobody decides", step=run.newest[1], by=dict(inputs))


def engines(core: Core, run: Run, number: int, reason: str, benefit: Benefit | None) -> None:
    """How many harvested engines the run could use; told when it is another number, with what the last of them is worth."""
    if number != run.told.engines:
        _write(core, run, "engines", "want", Code.FLEET, run.name, reason, engines=number, before=run.told.engines, by=benefit)
        run.told.engines = number


def _write(core: Core, run: Run, policy: str, action: str, code: Code, subject: str, reason: str, **inputs: Any) -> None:
    budget = run.told.budgets.setdefault(policy, Budget(at=core.now))
    if not budget.take(core.now):
        core.count("decisions_left_out")
        return
    inputs["run"] = run.name
    if budget.left_out:
        inputs["left_out"], budget.left_out = budget.left_out, 0
    core.record(rec.Decision(policy, action, subject, reason, msgspec.json.encode(inputs).decode(), core.now, code))
