"""The chooser is a pure function of the seed, and a witness sees what is lost."""

from __future__ import annotations

from collections import Counter

import pytest

from scavenger.protocol.messages import pack_tokens
from tests.chaos.choose import FIRST, LAST, Process, plan, target
from tests.chaos.watch import Sightings

PARTS = {"daemon", "engine", "rank", "launcher", "rewards"}
THERE = [Process("engine", f"harvested node{n}", 10 + n, 1) for n in range(3)] + [
    Process("daemon", "daemon", 5, 1)
]


def test_a_seed_says_every_fault_and_another_seed_others() -> None:
    one = plan(3, 50, ("kill", "stop", "hole", "disk"), PARTS)
    assert one == plan(3, 50, ("disk", "hole", "stop", "kill"), sorted(PARTS))
    told = Counter(fault.kind + fault.part for fault in plan(3, 6, ("notice",), PARTS))
    assert told == {"noticeengine": 6}, "engines alone are told to leave"
    assert one != plan(4, 50, ("kill", "stop", "hole", "disk"), PARTS)
    assert Counter(fault.kind for fault in one) == {"kill": 50, "stop": 6, "hole": 6, "disk": 2}
    assert {fault.part for fault in one if fault.kind == "kill"} == PARTS
    assert [fault.number for fault in one] == list(range(1, 65))
    assert all(FIRST <= fault.at <= LAST for fault in one)
    assert [fault.at for fault in one] == sorted(fault.at for fault in one)


def test_few_kills_hit_different_parts_and_a_part_that_is_not_there_is_never_planned() -> None:
    assert {fault.part for fault in plan(0, 5, ("kill",), PARTS)} == PARTS
    assert {fault.part for fault in plan(0, 50, ("kill",), {"daemon"})} == {"daemon"}
    with pytest.raises(ValueError, match="unknown faults"):
        plan(0, 1, ("flood",), PARTS)


def test_a_target_depends_on_who_is_there_and_not_on_their_order() -> None:
    for fault in plan(1, 40, ("kill",), PARTS):
        chosen = target(fault, THERE)
        assert chosen == target(fault, THERE[::-1])
        assert chosen is None or chosen.part == fault.part
        assert target(fault, THERE, any_part=True) in THERE
        assert (chosen is None) == (fault.part not in ("engine", "daemon"))


def _witnessed() -> Sightings:
    seen = Sightings()
    seen.chunk(1, 7, 1, 0, pack_tokens([1, 2, 3]))
    seen.chunk(2, 7, 2, 3, pack_tokens([4, 5]))
    seen.length(7, 5, 2)
    return seen


def test_tokens_that_are_there_at_the_end_are_not_lost_however_their_chunks_are_cut() -> None:
    seen = _witnessed()
    seen.chunk(3, 7, 1, 0, pack_tokens([1, 2, 3, 4, 5]))  # compacted into one
    assert (seen.lost([(7, "consumed", pack_tokens([1, 2, 3, 4, 5, 6]))])[0], seen.wrong, seen.tokens) == (
        0,
        [],
        5,
    )


@pytest.mark.parametrize(
    ("final", "count"),
    [
        ([], 5),
        ([(7, "consumed", pack_tokens([1, 2, 3]))], 2),
        ([(7, "consumed", pack_tokens([1, 9, 3, 4, 5]))], 4),
        ([(7, "superseded", b"")], 0),
    ],
)
def test_tokens_that_were_seen_and_are_not_there_at_the_end_are_lost(
    final: list[tuple[int, str, bytes]], count: int
) -> None:
    assert _witnessed().lost(final)[0] == count


def test_an_older_epoch_a_gap_another_token_and_a_shorter_sample_are_seen_as_they_come() -> None:
    seen = _witnessed()
    seen.chunk(4, 7, 1, 5, pack_tokens([6]))
    seen.chunk(5, 7, 2, 9, pack_tokens([7]))
    seen.chunk(6, 7, 2, 1, pack_tokens([8]))
    seen.length(7, 4, 2)
    assert [line.partition(": ")[2] for line in seen.wrong] == [
        "epoch 1 added tokens at 5 after epoch 2 had",
        "a chunk begins at 9, 6 tokens were there",
        "other tokens at 1 under epoch 2 than before under 1",
        "4 tokens accepted, 5 before",
    ]
