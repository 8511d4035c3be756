"""A resume from before the oldest kept checkpoint meets samples whose tokens are gone: they are generated again, never delivered."""

from __future__ import annotations

import msgspec
import pytest

from scavenger.ledger import records as rec
from scavenger.protocol.messages import Accepted, GroupDone
from tests.router.harness import Bench
from tests.router.moves import consumed_step


def dropped(state: rec.OpenGroup) -> rec.OpenGroup:
    """As `ledger.read.reader` gives such a group."""
    return msgspec.structs.replace(state, created=msgspec.structs.replace(state.created, prompt=b""))


@pytest.mark.parametrize("restarted", [False, True])
def test_a_group_whose_tokens_are_gone_is_superseded_and_generated_again(
    monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    bench = consumed_step()
    history, snapshot = bench.ledger.history, bench.ledger.snapshot
    monkeypatch.setattr(
        bench.ledger, "history", lambda run_id, after: tuple(map(dropped, history(run_id, after)))
    )
    bench.open(resume_step=0)
    if restarted:
        found = snapshot()
        there = msgspec.structs.replace(found, groups=tuple(map(dropped, found.groups)))
        monkeypatch.setattr(bench.ledger, "snapshot", lambda: there)
        bench.restart()
        bench.attach()
    bench.publish(
        2, root_of=1
    )  # the very same weights: with its tokens the group would be delivered as it is
    answer = bench.submit(version=2)
    assert isinstance(answer, Accepted)
    assert answer.group_ids != (1,)
    assert bench.take(1, GroupDone) == []
    assert [bench.ledger.samples[i].state for i in (1, 2)] == ["superseded", "superseded"]
    assert takes(bench) == [0, 1]


def takes(bench: Bench) -> list[int]:
    return [group.retry for group in bench.ledger.groups.values()]
