"""The built-in environment with two agents: one proposes a digit, the other says the digit that follows it. Pure.

    proposer hears  ?7      says  3      paid 0.5 for a digit, and 1 where the solver's answer to it is right
    solver   hears  >3      says  4      paid 0.5 for a digit, and 1 for the right one: the next, and 0 after 9

Both are paid more as both learn: the proposer finds what the solver can answer, and the solver is asked that more often. A proposal that
is no digit ends the episode, in which the solver has no part then. Owns the tasks and both rewards. Needs no torch and no package
`verifiers`; its alphabet is the calculator's.

Boundary: the rules of the task, apart from who plays it.
"""

from __future__ import annotations

PROPOSER, SOLVER = "proposer", "solver"
AGENTS = (PROPOSER, SOLVER)
#: Tasks of the environment, which differ in the hint that the proposer hears.
TASKS = 4096
#: For a digit that is not right.
FORM = 0.5


def hint(task: int) -> str:
    """What the proposer hears."""
    return f"?{task % 10}"


def asked(proposal: str) -> str:
    """What the solver hears; "" where the proposal is no digit."""
    return f">{proposal}" if is_digit(proposal) else ""


def is_digit(said: str) -> bool:
    return len(said) == 1 and said in "0123456789"


def is_right(proposal: str, answer: str) -> bool:
    return is_digit(proposal) and answer == str((int(proposal) + 1) % 10)


def rewards(proposal: str, answer: str | None) -> dict[str, float]:
    """Of each agent that spoke. `answer`: None where the solver was not asked."""
    if answer is None:
        return {PROPOSER: 0.0}
    right = is_right(proposal, answer)
    return {PROPOSER: 1.0 if right else FORM, SOLVER: 1.0 if right else FORM * is_digit(answer)}
