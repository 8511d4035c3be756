"""Fleets: what they check, how they are cut, what jobs leave, and the statistics by hand and against the real trace's README."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scavenger.errors import ConfigError
from scavenger.simulate.clock import Streams
from scavenger.simulate.fleet import (
    FleetChange,
    FleetTrace,
    Occupation,
    from_deltas,
    from_occupations,
    most_used,
)
from scavenger.simulate.fleet_stats import idle_time_outlasting, measure, slices, weighted_quantile
from scavenger.simulate.survey import sources
from scavenger.simulate.traces import (
    parse_jobs,
    parse_nodes,
    parse_spot,
    parse_virtual_clusters,
    read_jobs,
    read_nodes,
    read_spot,
    read_virtual_clusters,
)
from tests.simulate.real import TRACES, needs_traces

DATA = Path(__file__).resolve().parents[1] / "data/simulate"
HOURS_72 = 72 * 3600.0


def sample() -> FleetTrace:
    return read_nodes(DATA / "nodes.csv", gpus_per_node=8, end_s=400.0)


def idle_at(fleet: FleetTrace, t_s: float) -> dict[str, int]:
    idle = dict(fleet.initial)
    for change in fleet.changes:
        if change.t_s <= t_s:
            idle[change.node] = change.idle
    return idle


def test_the_node_trace_is_read_as_it_is_written() -> None:
    fleet = sample()
    assert (fleet.gpus, dict(fleet.initial), fleet.end_s) == (16, {"a-00": 0, "a-01": 8}, 400.0)
    assert fleet.changes[:3] == (
        FleetChange(60.0, "a-00", 2, 2),
        FleetChange(90.5, "a-00", 1, 3),
        FleetChange(90.5, "a-01", -8, 0),
    )
    assert list(fleet.levels()) == [
        (0.0, 60.0, 8),
        (60.0, 90.5, 10),
        (90.5, 120.0, 3),
        (120.0, 300.0, 1),
        (300.0, 400.0, 9),
    ]
    assert "nodes.csv" in fleet.origin
    assert "simulated placement" in fleet.origin


def test_the_jobs_behind_a_trace_leave_the_same_gpus() -> None:
    jobs = read_jobs(DATA / "jobs.csv")
    assert jobs[0] == Occupation(0.0, 60.0, (("a-00", 2),), line=3)
    fleet = from_occupations("jobs", jobs, {"a-00": 8, "a-01": 8}, 400.0)
    assert list(fleet.levels()) == list(sample().levels())
    assert most_used(jobs) == {"a-00": 8, "a-01": 8}


def test_the_virtual_clusters_are_read_with_what_queues_for_them() -> None:
    found = read_virtual_clusters(DATA / "vcs.csv", end_s=200.0)
    assert dict(found.fleet.capacity) == {"vcA": 64, "vcB": 48}
    assert found.fleet.changes == (FleetChange(120.0, "vcA", -6, 0),)
    assert found.pending == ((0.0, "vcA", 0), (0.0, "vcB", 16), (60.0, "vcB", 8), (120.0, "vcA", 8))


def test_spot_instances_come_and_go_whole_and_which_goes_is_drawn_by_the_seed() -> None:
    def read(seed: int) -> FleetTrace:
        return read_spot(DATA / "spot.csv", "east", 2, Streams(seed).stream("spot"), end_s=400.0)

    fleet = read(1)
    assert list(fleet.levels()) == [(0.0, 100.0, 6), (100.0, 200.0, 8), (200.0, 300.0, 2), (300.0, 400.0, 4)]
    assert set(fleet.capacity.values()) == {2}
    assert {change.delta for change in fleet.changes} == {2, -2}
    assert read(1) == fleet
    assert any(read(seed).changes != fleet.changes for seed in range(2, 9))
    with pytest.raises(ConfigError, match=r"\['east', 'west'\]"):
        read_spot(DATA / "spot.csv", "north", 2, Streams(1).stream("spot"))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("60.0,a-00,2,2", "60.0,a-00,3,2", "line 6.*had 0 idle"),
        ("60.0,a-00,2,2", "60.0,a-07,2,2", "line 6.*no row at t = 0"),
        ("120.0,a-00,1,-2", "80.0,a-00,1,-2", "line 9.*between"),
        ("300.0,a-01,8,8", "500.0,a-01,8,8", "line 10.*between"),
        ("60.0,a-00,2,2", "60.0,a-00,9,9", "line 6.*more than 8"),
        ("60.0,a-00,2,2", "60.0,a-00,2", "line 6.*3 columns"),
        ("60.0,a-00,2,2", "nan,a-00,2,2", "line 6.*finite"),
        ("60.0,a-00,2,2", "60.0,a-00,two,2", "line 6.*whole number of idle_gpus"),
        ("idle_gpus,delta", "idle,delta", "line 3.*no column idle_gpus"),
    ],
)
def test_a_wrong_node_trace_names_its_line(old: str, new: str, says: str) -> None:
    text = (DATA / "nodes.csv").read_text(encoding="utf-8")
    assert old in text
    with pytest.raises(ConfigError, match=says):
        parse_nodes(text.replace(old, new, 1).splitlines(keepends=True), 8, 400.0)


def test_wrong_lines_of_the_other_traces_are_named() -> None:
    head = "t_start,t_end,vc,gpus,placement\n"
    for line in ("0,5,a,2,a-00:1", "5,0,a,1,a-00:1", "0,5,a,1,a-00", "0,5,a,0,a-00:0"):
        with pytest.raises(ConfigError, match="line 2"):
            parse_jobs([head, line])
    with pytest.raises(ConfigError, match="line 3"):
        parse_virtual_clusters(
            ["t_seconds,vc,idle_gpus,total_gpus,pending_gpus\n", "0,a,1,8,0\n", "5,a,1,16,0\n"], 9.0
        )
    with pytest.raises(ConfigError, match="line 3"):
        parse_spot(
            ["source,target,t_seconds,available_instances\n", "e,2,5,1\n", "e,2,4,2\n"],
            "e",
            1,
            Streams(0).stream("x"),
        )


NODE_HEAD, JOB_HEAD = "t_seconds,node,idle_gpus,delta\n", "t_start,t_end,vc,gpus,placement\n"
SPOT_HEAD = "source,target,t_seconds,available_instances\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (NODE_HEAD + "0,a,4,0\n1e13,a,3,-1\n", r"line 3: t_seconds is 1e\+13 s .* over 10 years"),
        (NODE_HEAD + "0,a,4,0\n1e300,a,3,-1\n", r"line 3: t_seconds is 1e\+300 s"),
        (NODE_HEAD + "0,a,4,0\n5,a,²,-1\n", "line 3: no whole number of idle_gpus"),
        (NODE_HEAD + f"0,a,4,0\n5,a,{'9' * 5000},-1\n", "line 3: no whole number of idle_gpus"),
        (NODE_HEAD + f"0,a,4,0\n5,{'a' * 200_000},4,0\n", "line 3 is no CSV: field larger"),
        (NODE_HEAD + "5,a\x1bc,4,0\n", r"line 2: 'a\\x1bc' has no row at t = 0"),
        (JOB_HEAD + "0,5,a,1,a-00:²\n", "line 2: no placement"),
        (JOB_HEAD + "0,5,a,1025,a-00:1025\n", "line 2: GPUs of a node: 1025"),
        (JOB_HEAD + "0,1e13,a,1,a-00:1\n", "line 2: t_end is"),
        (
            SPOT_HEAD + "x,2,0,2\nx,2,86400,300000000\n",
            "line 3: available_instances: 300000000, and at most 100,000",
        ),
        (SPOT_HEAD + "x,300000000,0,2\n", "line 2: target: 300000000"),
        (SPOT_HEAD + "x,2,0,2\nx,2,1e13,1\n", "line 3: t_seconds is"),
        (
            SPOT_HEAD + "".join(f"x,9,{t},{100_000 * (t % 2)}\n" for t in range(200)),
            "line 28: GPUs that come and go so far: 20800000",
        ),
    ],
)
def test_a_trace_that_no_cluster_wrote_names_its_line_before_it_fills_the_memory(
    tmp_path: Path, text: str, says: str
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"trace\.csv: {says}") as caught:
        sources.read_trace(path, 8, "", Streams(0))
    assert "\x1b" not in str(caught.value)


def test_a_trace_that_is_cut_off_names_its_last_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(NODE_HEAD + "0,a,4,0\n60,a,3,-1\n120,a,1,-", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 4 has no end"):
        sources.read_trace(path, 8, "", Streams(0))


def test_columns_and_sources_are_quoted(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    for text in ("t\x1bc,b\n1,2\n", SPOT_HEAD + "x\x1bc,2,0,2\ny,2,0,2\n"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"\\x1bc"):
            sources.read_trace(path, 8, "", Streams(0))


def test_a_fleet_beyond_what_one_machine_keeps_is_refused() -> None:
    with pytest.raises(ConfigError, match="hand: 1024000 GPUs that change hands 0 times; at most 1,000,000"):
        from_deltas(
            "hand", 9.0, {str(node): 1024 for node in range(1000)}, {str(node): 0 for node in range(1000)}, ()
        )


def test_a_segment_begins_with_the_state_of_its_start() -> None:
    part = sample().segment(90.5, 210.0)
    assert dict(part.initial) == {"a-00": 3, "a-01": 0}
    assert part.changes == (FleetChange(29.5, "a-00", -2, 1), FleetChange(209.5, "a-01", 8, 8))
    for wrong in ((-1.0, 10.0), (0.0, 401.0), (10.0, 0.0)):
        with pytest.raises(ConfigError, match="no segment"):
            sample().segment(*wrong)


def test_some_nodes_of_a_fleet_are_a_fleet() -> None:
    part = sample().only(["a-01"])
    assert (part.gpus, [change.delta for change in part.changes]) == (8, [-8, 8])
    with pytest.raises(ConfigError, match="a-09"):
        sample().only(["a-09"])


@pytest.mark.parametrize(
    ("initial", "changes", "says"),
    [
        ({"a": 9}, (), "9 idle GPUs of 8"),
        ({"b": 1}, (), "without a capacity"),
        ({"a": 1}, (FleetChange(1.0, "a", -2, -1),), "-1 idle"),
        ({"a": 1}, (FleetChange(1.0, "a", 1, 3),), "follows 1 idle"),
        ({"a": 1}, (FleetChange(2.0, "a", 1, 2), FleetChange(1.0, "a", 1, 3)), "out of order"),
        ({"a": 1}, (FleetChange(11.0, "a", 1, 2),), "after the end"),
        ({"a": 1}, (FleetChange(1.0, "z", 1, 2),), "follows None"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused(
    initial: dict[str, int], changes: tuple[FleetChange, ...], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        FleetTrace("made up", 10.0, {"a": 8}, initial, changes)


def test_jobs_that_hold_more_than_a_node_has_are_named() -> None:
    jobs = [Occupation(0.0, 100.0, (("a", 5),), line=7), Occupation(50.0, 60.0, (("a", 4),), line=9)]
    with pytest.raises(ConfigError, match="line 9: at 50 s node 'a' would hold 9 of its 8 GPUs"):
        from_occupations("jobs", jobs, {"a": 8}, 100.0)
    with pytest.raises(ConfigError, match="line 7: node 'a'"):
        from_occupations("jobs", jobs, {"b": 8}, 100.0)


def test_a_job_may_start_the_second_another_ends() -> None:
    jobs = [
        Occupation(50.0, 100.0, (("a", 8),)),
        Occupation(0.0, 50.0, (("a", 8),)),
        Occupation(20.0, 20.0, (("a", 8),)),
    ]
    fleet = from_occupations("jobs", jobs, {"a": 8}, 100.0)
    assert (dict(fleet.initial), fleet.changes) == ({"a": 0}, ())  # nobody could have used that instant


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 10), st.sampled_from("ab"), st.integers(1, 3)),
        max_size=12,
    )
)
def test_idle_gpus_are_what_running_jobs_leave_at_any_time(plan: list[tuple[int, int, str, int]]) -> None:
    jobs = [
        Occupation(float(start), float(start + length), ((node, gpus),)) for start, length, node, gpus in plan
    ]
    fleet = from_occupations("jobs", jobs, {"a": 40, "b": 40}, 25.0)
    for t_s in np.arange(0.5, 25.0):
        for node in "ab":
            held = sum(
                job.gpus for job in jobs if job.gpus_by_node[0][0] == node and job.start_s <= t_s < job.end_s
            )
            assert idle_at(fleet, float(t_s))[node] == 40 - held
    most = most_used(jobs)
    for node, count in most.items():
        here = [job for job in jobs if job.gpus_by_node[0][0] == node]
        assert count == max(
            sum(job.gpus for job in here if job.start_s <= t_s < job.end_s) for t_s in range(31)
        )


def test_slices_take_the_latest_idle_gpu_first() -> None:
    fleet = from_deltas(
        "made up",
        100.0,
        {"a": 4},
        {"a": 1},
        [(10.0, "a", 1), (20.0, "a", 1), (50.0, "a", -2), (90.0, "a", -1)],
    )
    found = [(one.start_s, one.end_s, one.whole) for one in slices(fleet)]
    assert found == [(20.0, 50.0, True), (10.0, 50.0, True), (0.0, 90.0, False)]
    assert idle_time_outlasting(fleet, 35.0) == pytest.approx((40 + 90) / 160)


def test_statistics_by_hand() -> None:
    fleet = from_deltas(
        "made up",
        3600.0,
        {"a": 2, "b": 2},
        {"a": 2, "b": 0},
        [(900.0, "a", -2), (1800.0, "b", 1), (2700.0, "b", -1)],
    )
    found = measure(fleet)
    assert found.idle_mean == pytest.approx((2 * 900 + 1 * 900) / 3600)
    assert (found.idle_p50, found.idle_max) == (0.0, 2)
    assert (found.reclaims_per_h, found.reclaimed_gpus_per_h) == (2.0, 3.0)
    assert found.hazard_per_gpu_h == pytest.approx(3 / 0.75)
    assert found.whole_node_share == pytest.approx(2 / 3)
    assert (found.slice_p50_s, found.slice_mean_s) == (900.0, 900.0)
    assert found.by_idle_on_node == {1: pytest.approx(1 / 3), 2: pytest.approx(2 / 3)}
    # three slices of 900 s: what is left at a random instant is uniform up to that
    assert found.residual_p50_s == pytest.approx(450.0)


def test_weighted_quantiles_weigh() -> None:
    assert weighted_quantile(np.array([3.0, 1.0, 2.0]), np.array([1.0, 1.0, 8.0]), 0.5) == 2.0
    assert weighted_quantile(np.array([3.0, 1.0]), np.array([1.0, 9.0]), 0.95) == 3.0


@needs_traces
def test_the_real_node_trace_has_the_statistics_of_its_readme() -> None:
    fleet = read_nodes(TRACES / "earth_node_idle_72h.csv.gz", 8, HOURS_72)
    found = measure(fleet)
    assert (len(fleet.capacity), fleet.gpus) == (107, 856)
    assert (round(found.reclaims_per_h), round(found.reclaimed_gpus_per_h)) == (35, 105)
    assert [round(p) for p in (found.hourly_p10, found.hourly_p50, found.hourly_p90)] == [15, 96, 211]
    assert (round(found.slice_p50_s), round(found.slice_p90_s), round(found.slice_mean_s)) == (
        260,
        8467,
        3214,
    )
    assert {limit: round(share, 2) for limit, share in found.ended_within.items()} == {
        60: 0.29,
        300: 0.53,
        900: 0.70,
        3600: 0.85,
    }
    assert round(found.hazard_per_gpu_h, 2) == 0.63
    assert round(found.by_idle_on_node[8], 2) == 0.74
    assert round(sum(found.by_idle_on_node[count] for count in (5, 6, 7)), 2) == 0.12


@needs_traces
def test_the_real_jobs_leave_the_idle_gpus_of_the_node_trace() -> None:
    nodes = read_nodes(TRACES / "earth_node_idle_72h.csv.gz", 8, HOURS_72)
    jobs = from_occupations("jobs", read_jobs(TRACES / "earth_jobs_72h.csv.gz"), nodes.capacity, HOURS_72)
    assert jobs.initial == nodes.initial
    assert measure(jobs).idle_mean == pytest.approx(measure(nodes).idle_mean, rel=1e-4)
    for t_s in np.linspace(1000.05, HOURS_72, 20):
        assert idle_at(jobs, float(t_s)) == idle_at(nodes, float(t_s))


@needs_traces
def test_the_real_virtual_clusters_have_the_statistics_of_their_readme() -> None:
    found = read_virtual_clusters(TRACES / "earth_vc_idle_72h.csv.gz", HOURS_72)
    idle = measure(found.fleet)
    assert (len(found.fleet.capacity), found.fleet.gpus) == (16, 856)
    assert [
        round(v) for v in (idle.idle_mean, idle.idle_p5, idle.idle_p50, idle.idle_p95, idle.idle_max)
    ] == [165, 112, 152, 264, 290]


@needs_traces
def test_the_real_spot_trace_has_the_losses_of_its_readme() -> None:
    fleet = read_spot(
        TRACES / "spot_bamboo.csv.gz",
        "bamboo/p2-xlarge-2020-11-20-to-2020-11-23",
        1,
        Streams(0).stream("spot"),
    )
    assert fleet.gpus == 16
    assert measure(fleet).hazard_per_gpu_h == pytest.approx(0.125, abs=0.02)
