"""What is left of an episode's budget: turns, tokens and seconds, over all its agents and policies. Pure.

    OpenTurn -> `tokens_left_for` -> the tokens that each of its samples may have, or why the turn is not made

A turn has at most the tokens that were left when it was asked for. Turns that are open at once do not wait for each other: together they
may have more. A turn that was given up for weights that are gone counts nothing, since nobody had it. What another policy had stays spent
when its run ends before the episode does (`EpisodeSpent`).

Boundary: a rule of `turns`; it changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from scavenger.protocol.messages import Denied
from scavenger.router.core.state import EpisodeBudget, EpisodeSpent, Group


def spent_by(groups: Iterable[Group], before: EpisodeSpent) -> EpisodeSpent:
    """What these turns had, whole or not, and what was spent `before`."""
    turns = list(groups)
    tokens = sum(sample.accepted for group in turns for sample in group.samples)
    return EpisodeSpent(before.turns + len(turns), before.tokens + tokens)


def tokens_left_for(
    budget: EpisodeBudget, name: str, spent: EpisodeSpent, age_s: float, n: int, asked: int
) -> int | Denied:
    """Of `asked` tokens those that each of the `n` samples of a new turn may have.

    `spent`: by the turns of the episode `name` so far. `age_s`: seconds since it began. `Denied` "budget": no turn is made any more.
    """
    if budget.turns and spent.turns >= budget.turns:
        return _used_up(name, "turns", f"{budget.turns}")
    if budget.seconds and age_s >= budget.seconds:
        return _used_up(name, "s", f"{budget.seconds:g}")
    if not budget.tokens:
        return asked
    left = budget.tokens - spent.tokens
    if left <= 0:
        return _used_up(name, "tokens", f"{budget.tokens}")
    if left < n:
        why = f"{n} samples, and {left} tokens are left of the budget of episode {name!r}"
        return Denied("invalid", why, "ask for fewer")
    return min(asked, left // n)


def _used_up(name: str, key: str, most: str) -> Denied:
    why = f"episode {name!r} has used up its budget, data.budget_{key} = {most}"
    return Denied("budget", why, "end the episode, or raise the budget of the run")
