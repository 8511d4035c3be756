"""Groups that come before their step's turn."""

from __future__ import annotations

import pytest

from scavenger.errors import WireError
from scavenger.protocol import messages
from trainer.loop.step import Inbox


class Run:
    def __init__(self, *arrivals: list[int]) -> None:
        self._arrivals = list(arrivals)
        self.timeouts: list[float] = []

    def poll(self, timeout_s: float) -> list[messages.GroupDone]:
        self.timeouts.append(timeout_s)
        ids = self._arrivals.pop(0) if self._arrivals else []
        return [messages.GroupDone(group, 0, 0, "train", 0, b"", "{}", ()) for group in ids]


def ids(groups: list[messages.GroupDone]) -> list[int]:
    return [group.group_id for group in groups]


def test_each_step_gets_its_own_groups_whenever_they_come() -> None:
    run = Run([3, 1], [5, 4], [2])
    inbox = Inbox(run)
    inbox.expect("train", 1, (1, 2))
    inbox.expect("train", 2, (3, 4))
    inbox.expect("eval", 1, (5,))
    assert ids(inbox.poll("train", 1, 9.0)) == [1]
    assert ids(inbox.poll("train", 1, 9.0)) == []
    assert ids(inbox.poll("eval", 1, 9.0)) == [5]
    assert ids(inbox.poll("train", 1, 9.0)) == [2]
    assert ids(inbox.poll("train", 2, 9.0)) == [3, 4]
    assert run.timeouts == [9.0, 9.0, 0.0, 0.0, 0.0], "no waiting for what is here"


def test_a_group_that_nobody_submitted_and_one_that_comes_twice_are_errors() -> None:
    inbox = Inbox(Run([1], [1]))
    inbox.expect("train", 1, (1,))
    assert ids(inbox.poll("train", 1, 0.0)) == [1]
    with pytest.raises(WireError, match="group 1 of step 0 came while step 2"):
        inbox.poll("train", 2, 0.0)
