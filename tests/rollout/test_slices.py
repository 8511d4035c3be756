"""Which part of a tensor a rank keeps, as its loaders say it, and which part each rank answers for."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the engines need the [trainer] extra")
from rollout.engines import slices  # noqa: E402  needs torch

SHAPES = {"rows": (8, 6), "columns": (8, 6), "expert": (3, 4, 5), "norm": (7,), "turned": (4, 6), "unread": (2, 2)}  # fmt: skip


def test_what_loaders_read_is_found_whatever_they_make_of_a_tensor_first() -> None:
    given = slices.meta(SHAPES, torch.float32)
    into = torch.empty(64, device="meta", dtype=torch.bfloat16)
    with slices.Reads(given) as reads:
        into[:24].view(4, 6).copy_(given["rows"].narrow(0, 4, 4))
        into[:16].view(8, 2).copy_(given["columns"].chunk(3, 1)[1])
        into[:16].view(8, 2).copy_(given["columns"].chunk(3, 1)[1])  # again: it is one part
        into[:10].view(2, 5).copy_(given["expert"][1][2:])
        into[:7].copy_(given["norm"])
        into[:12].view(3, 4).copy_(given["turned"].t()[1:4])
        given["unread"].narrow(0, 1, 1).t()
    assert reads.boxes == {
        "rows": [((4, 8), (0, 6))],
        "columns": [((0, 8), (2, 4))],
        "expert": [((1, 2), (2, 4), (0, 5))],
        "norm": [((0, 7),)],
        "turned": [((0, 4), (1, 4))],
    }


def test_what_is_read_in_another_form_counts_as_the_whole() -> None:
    given = slices.meta(SHAPES, torch.float32)
    with slices.Reads(given) as reads:
        given["rows"][::2].clone()  # every other row is no box
        torch.cat([given["columns"][:1], given["columns"][:1]])
        given["norm"][:0].clone()
    assert reads.boxes == {"rows": [((0, 8), (0, 6))], "columns": [((0, 1), (0, 6))]}


@pytest.mark.parametrize(
    ("shape", "kept", "copies"),
    [
        ((8, 6), [[((0, 4), (0, 6))], [((4, 8), (0, 6))]], 1),
        ((8, 6), [[((0, 8), (0, 3))], [((0, 8), (3, 6))]], 1),
        ((7,), [[((0, 7),)]] * 3, 3),
        ((2, 5), [[((0, 2), (0, 5))]] * 4, 4),  # more ranks than rows
        ((4, 5), [[((0, 2), (0, 5))]] * 2 + [[((2, 4), (0, 5))]] * 2, 2),  # two heads, each on two ranks
        ((), [[()], [()]], 2),
        ((6, 2), [[], [((0, 6), (0, 2))]], 1),  # the layers of another stage
        ((6, 2), [[((0, 4), (0, 2))], [((2, 6), (0, 2))]], 1),  # overlapping: the first answers for all of it
        ((6, 2), [[((0, 1), (0, 2))], [((2, 6), (0, 2))]], 1),  # nobody has the second row
        ((6, 2), [[((0, 2), (0, 2)), ((4, 6), (0, 2))], [((2, 4), (0, 2))]], 1),
    ],
)
def test_each_element_is_answered_for_by_one_rank(
    shape: tuple[int, ...], kept: list[list[slices.Box]], copies: int
) -> None:
    counted = torch.zeros(shape)
    found = slices.shares(shape, kept)
    assert len(found) == len(kept)
    for boxes in found:
        for box in boxes:
            slices.cut(counted, box).add_(1)
    assert counted.eq(1).all(), counted
    assert slices.copies(shape, kept) == copies


def test_a_rank_answers_for_what_it_keeps_and_ranks_that_keep_the_same_part_it() -> None:
    rows, columns = [((0, 2), (0, 6))], [((0, 4), (3, 6))]
    assert slices.shares((4, 6), [rows, [((2, 4), (0, 6))]]) == [rows, [((2, 4), (0, 6))]]
    assert slices.shares((4, 6), [[((0, 4), (0, 3))], columns]) == [[((0, 4), (0, 3))], columns]
    assert slices.shares((5,), [[((0, 5),)]] * 2) == [[((0, 2),)], [((2, 5),)]]
    assert slices.shares((4, 6), [rows, rows]) == [[((0, 4), (0, 6))], []], (
        "nobody has the rest: it will be missed"
    )


def test_a_tensor_that_nobody_keeps_is_nobody_s() -> None:
    assert slices.shares((2, 2), [[], []]) == [[], []]
    assert slices.copies((2, 2), [[], []]) == 1
