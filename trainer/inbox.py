"""Completed groups in the order in which the loop wants them: those of a later step, which came early, wait here.

Owns nothing but that order. Whoever asks for a step's groups gets them, however they come; a group that nobody asked for is an error.
"""

from __future__ import annotations

from typing import Protocol

from scavenger import wire
from scavenger.errors import WireError


class Poll(Protocol):
    def poll(self, timeout_s: float) -> list[wire.GroupDone]: ...


class Inbox:
    """`expect` names what was submitted; `poll` gives each group once."""

    def __init__(self, run: Poll) -> None:
        self._run = run
        self._expected: dict[int, tuple[str, int]] = {}  # group id -> (purpose, step)
        self._early: list[wire.GroupDone] = []

    def expect(self, purpose: str, step: int, groups: tuple[int, ...]) -> None:
        self._expected |= dict.fromkeys(groups, (purpose, step))

    def poll(self, purpose: str, step: int, timeout_s: float) -> list[wire.GroupDone]:
        """Groups of this step that came; waits up to `timeout_s` for the first. Raises `WireError` for a group that nobody submitted."""
        wanted = (purpose, step)
        waits = not any(self._expected[group.group_id] == wanted for group in self._early)
        for group in self._run.poll(timeout_s if waits else 0.0):
            if group.group_id not in self._expected:
                raise WireError(f"group {group.group_id} of step {group.step} came while step {step} was under way")
            self._early.append(group)
        mine = [group for group in self._early if self._expected[group.group_id] == wanted]
        self._early = [group for group in self._early if self._expected[group.group_id] != wanted]
        for group in mine:
            del self._expected[group.group_id]
        return mine
