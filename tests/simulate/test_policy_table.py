"""The table of policies: its segments are six, its intervals are Student's, a gap is closed in parts."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks import policies
from scavenger.simulate.policies.registry import CONTENDERS


def result(tokens_per_s: float) -> policies.Result:
    return policies.Result(tokens_per_s, 1.0, 1.0, 1, 0, 0, 0, 0.0)


def test_six_segments_are_fixed_and_the_last_of_each_trace_is_its_most_volatile() -> None:
    described = json.loads(policies.SEGMENTS.read_text())
    by_trace: dict[str, list[int]] = {}
    for one in described["segments"]:
        by_trace.setdefault(one["trace"], []).append(one["reclaimed"])
    assert sorted(map(len, by_trace.values())) == [3, 3]
    assert all(reclaimed == sorted(reclaimed) for reclaimed in by_trace.values())
    assert described["length_s"] == 7200


def test_a_confidence_interval_is_students() -> None:
    assert policies.interval([1.0, 3.0]) == f"2.00 ± {12.706:.2f}"
    assert policies.interval([2000.0] * 10) == "2,000 ± 0"
    assert policies.interval([1.5]) == "1.50"


def test_the_gap_is_closed_by_what_lies_between_colocated_and_the_clairvoyant() -> None:
    found = {"colocated": result(10.0), "ours": result(19.0), "clairvoyant": result(20.0)}
    assert policies.gap_closed(found) == pytest.approx(0.9)
    assert math.isnan(policies.gap_closed(found | {"clairvoyant": result(10.05)})), "there was nothing to gain"


def test_a_table_has_a_row_for_each_cell_and_ratios_are_taken_seed_by_seed() -> None:
    units = [policies.Unit("s", "m", 4, seed) for seed in range(2)]
    found = {unit: {"ours": result(20.0 * (unit.seed + 1)), "rlboost": result(10.0 * (unit.seed + 1))} for unit in units}
    *_, row = policies.rows(found, ["rlboost", "ours"])
    assert row.endswith("| 2.00 ± 0.00 |")
    assert row.startswith("| s | m | 4 | 2 | ")


def test_every_compared_policy_is_known() -> None:
    assert set(policies.COMPARED) - {"clairvoyant"} <= CONTENDERS.keys()
