"""What a fleet's idle GPUs would give, hand-computed, and what must hold over any fleet."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import synthetic
from scavenger.errors import ConfigError
from scavenger.simulate import presets
from scavenger.simulate.clock import Streams
from scavenger.simulate.fleet import FleetTrace, Occupation, from_deltas
from scavenger.simulate.survey import sources
from scavenger.simulate.survey import text as survey_report
from scavenger.simulate.survey import text as survey_text
from scavenger.simulate.survey.engines import Hour, SurveyedEngine, by_hour, replay, working_s
from scavenger.simulate.survey.survey import Observed, Question, SpeedUp, TraceSurvey, survey
from scavenger.simulate.survey.waits import Delayed, Timing, delayed
from tests.simulate.real import TRACES, needs_traces

DATA = Path(__file__).resolve().parents[1] / "data/simulate"
SPEC = presets.engine("Qwen3-8B", "H100")
NOW = 1_795_300_000.0
WHY = "nobody asked"


def fleet(*deltas: tuple[float, str, int], end_s: float = 7200.0, **initial: int) -> FleetTrace:
    return from_deltas("hand", end_s, dict.fromkeys(initial, 8), initial, deltas)


def asked(observed: Observed, **changes: object) -> TraceSurvey:
    ask = Question(SPEC, cold_start_s=40.0, notice_s=20.0)
    return survey(observed, replace(ask, **changes))  # type: ignore[arg-type]


# ---------------------------------------------------------------- which engines there would be


def test_engines_fill_whole_gaps_and_the_latest_goes_first() -> None:
    engines = replay(fleet((100.0, "a", 3), (500.0, "a", -2), (900.0, "a", -2), a=2, b=1), gpus=2)
    # a: 2 idle GPUs are an engine from 0; 3 more are another from 100, with one left over; at 500 the one left over is not enough for -2
    assert engines == (SurveyedEngine("a", 100.0, 500.0, True), SurveyedEngine("a", 0.0, 900.0, True))


def test_under_a_limit_a_lost_engine_starts_again_on_the_fullest_node_that_fits() -> None:
    engines = replay(fleet((300.0, "b", -2), a=8, b=2, c=4), gpus=2, most=1)
    # the smallest gap that fits is b's; then c's, then a's
    assert engines == (SurveyedEngine("b", 0.0, 300.0, True), SurveyedEngine("c", 300.0, 7200.0, False))


def test_what_ends_and_starts_at_one_instant_is_netted() -> None:
    assert replay(fleet((60.0, "a", -1), (60.0, "a", 1), a=1), gpus=1) == (
        SurveyedEngine("a", 0.0, 7200.0, False),
    )


@pytest.mark.parametrize(("gpus", "most"), [(0, None), (1, 0)])
def test_engines_without_gpus_or_without_engines_are_refused(gpus: int, most: int | None) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        replay(fleet(a=1), gpus, most)


@st.composite
def fleets(draw: st.DrawFn) -> FleetTrace:
    idle = {name: draw(st.integers(0, 8)) for name in ("a", "b", "c")}
    initial = dict(idle)
    deltas = []
    t_s = 0.0
    for _ in range(draw(st.integers(0, 25))):
        t_s += draw(st.sampled_from((0.0, 1.0, 30.0, 200.0)))
        node = draw(st.sampled_from(("a", "b", "c")))
        to = draw(st.integers(0, 8))
        if t_s > 0:
            deltas.append((t_s, node, to - idle[node]))
            idle[node] = to
    return from_deltas("drawn", t_s + 100.0, dict.fromkeys(initial, 8), initial, deltas)


@settings(max_examples=150, deadline=None)
@given(fleets(), st.integers(1, 4), st.sampled_from((None, 1, 3)))
def test_engines_never_hold_what_is_not_idle_and_leave_no_room_unused(
    drawn: FleetTrace, gpus: int, most: int | None
) -> None:
    engines = replay(drawn, gpus, most)
    times = sorted({0.0, *(change.t_s for change in drawn.changes)})
    for t_s in times:
        idle = dict(drawn.initial) | {
            change.node: change.idle for change in drawn.changes if change.t_s <= t_s
        }
        held = {
            node: sum(one.node == node and one.start_s <= t_s < one.end_s for one in engines) for node in idle
        }
        assert all(held[node] * gpus <= idle[node] for node in idle)
        if sum(held.values()) != most:
            assert all(idle[node] - held[node] * gpus < gpus for node in idle)
    assert all(one.lost == (one.end_s < drawn.end_s) for one in engines)
    assert all(one.start_s < one.end_s for one in engines)


# ---------------------------------------------------------------- by the hour


def test_engines_count_in_the_hours_in_which_they_work() -> None:
    engines = [
        SurveyedEngine("a", 0.0, 5400.0, True),
        SurveyedEngine("b", 3600.0, 7200.0, False),
        SurveyedEngine("c", 100.0, 140.0, True),
    ]
    # works from 600 s after its start: a 600-5400, b 4200-7200, c never. Time 0 is 10:00
    found = by_hour(engines, ready_s=600.0, end_s=7200.0, since=36_000.0, zone=UTC)
    # 10-11: a for 3000 of 3600 s; 11-12: a 1800 s, b 3000 s, and for the first 600 s a alone, so one at least
    assert found == (Hour(10, pytest.approx(3000 / 3600), 0), Hour(11, pytest.approx(4800 / 3600), 1))  # type: ignore[arg-type]
    assert working_s(engines, 600.0) == 4800 + 3000


def test_hours_are_the_site_s_and_days_are_averaged() -> None:
    one_day_of_two = [SurveyedEngine("a", 0.0, 3600.0, True)]
    found = by_hour(
        one_day_of_two, 0.0, 2 * 86_400.0, since=1800.0, zone=timezone(timedelta(hours=5, minutes=30))
    )
    # 00:30 UTC is 06:00 there
    assert len(found) == 24
    assert [hour.mean for hour in found if hour.mean] == [pytest.approx(0.5)]
    assert next(hour.hour for hour in found if hour.mean) == 6


# ---------------------------------------------------------------- what others wait


def test_the_bounds_are_slurm_s_arithmetic() -> None:
    defaults = Timing()
    assert (defaults.preemption_s(), defaults.hung_s()) == (5.0, 30 + 10)
    long_grace = Timing(grace_s=120.0, kill_wait_s=30.0, message_timeout_s=10.0)
    assert (long_grace.preemption_s(), long_grace.hung_s()) == (125.0, 120 + 30 + 30)


def test_jobs_concerned_start_where_and_when_an_engine_goes() -> None:
    jobs = [
        Occupation(0.0, 900.0, (("a", 4),)),  # was there from the start
        Occupation(300.0, 900.0, (("a", 2), ("b", 2))),  # takes two engines: one job
        Occupation(400.0, 900.0, (("c", 1),)),  # the engine there was younger than the daemon's look
        Occupation(500.0, 900.0, (("b", 1),)),  # nobody was there
    ]
    engines = [
        SurveyedEngine("a", 0.0, 300.0, True),
        SurveyedEngine("b", 0.0, 300.0, True),
        SurveyedEngine("c", 390.0, 400.0, True),
        SurveyedEngine("b", 0.0, 500.0, False),
    ]
    assert delayed(jobs, engines, (30.0, 0.0, 60.0), notice_s=20.0) == Delayed(1, 3, 30.0, 30.0)
    assert delayed(jobs, engines, (), notice_s=20.0) == Delayed(1, 3, None, None)


# ---------------------------------------------------------------- the answers together


def test_a_survey_hand_computed() -> None:
    # node a: one GPU idle throughout; another from 1000 to 1050 (in vain: 50 s, ready after 60) and from 2000 to 2600
    seen = fleet(
        (1000.0, "a", 1),
        (1050.0, "a", -1),
        (2000.0, "a", 1),
        (2600.0, "a", -1),
        (3000.0, "a", 1),
        (3010.0, "a", -1),
        a=1,
    )
    found = asked(Observed(seen))
    assert found.idle_gpu_h == pytest.approx((7200 + 50 + 600 + 10) / 3600)
    assert found.outlasting == pytest.approx((7200 + 600) / 7860)
    assert found.usable_gpu_h == pytest.approx((7200 - 60 + 600 - 60) / 3600)
    # the 10 s were gone before the daemon looked; of three starts one was in vain and one was preempted at work, in two hours
    assert (found.started, found.wasted, found.preemptions_per_h) == (3, 1, 0.5)
    assert found.wasted_starts == pytest.approx(1 / 3)
    assert found.typical_life_s == 540.0
    assert found.engines_mean == pytest.approx((7140 + 540) / 7200)
    assert found.delayed is None


def test_an_engine_that_still_starts_at_the_end_did_not_start_in_vain() -> None:
    found = asked(Observed(fleet((7160.0, "a", 1), a=0)))
    assert (found.started, found.wasted, found.preemptions_per_h, found.usable_gpu_h) == (1, 0, 0.0, 0.0)


def test_larger_engines_use_whole_gaps_only() -> None:
    found = asked(Observed(fleet(a=3, b=1)), spec=presets.engine("Qwen3-8B", "H100", 2))
    assert found.usable_gpu_h == pytest.approx(2 * (7200 - 60) / 3600)
    assert found.idle_gpu_h == pytest.approx(8.0)


def test_a_fleet_without_idle_gpus_has_answers_too() -> None:
    found = asked(Observed(fleet(a=0)))
    assert (found.idle_gpu_h, found.usable_gpu_h, found.started, found.wasted_starts, found.outlasting) == (
        0.0,
        0.0,
        0,
        0.0,
        0.0,
    )
    assert [hour.mean for hour in found.by_hour] == [0.0, 0.0]
    assert all(row.value for row in survey_text.rows(found, WHY))


def test_without_a_played_run_no_speed_up_is_printed() -> None:
    found = asked(Observed(fleet(a=4)))
    last = survey_text.rows(found, WHY)[-1]
    assert last.name == "expected speed-up, Qwen3-8B"
    assert not any(letter.isdigit() for letter in last.value + last.meaning)
    played = SpeedUp(1.84, 1.8, 1.88, 10_000.0, 18_400.0, "8 reserved H100, 10 seeds")
    row = survey_text.rows(found, played)[-1]
    assert row.value == "1.84x"
    assert row.meaning == "10,000 to 18,400 tokens/s; 95 % CI 1.80 to 1.88; 8 reserved H100, 10 seeds"


def test_a_short_period_is_said_to_tell_little() -> None:
    short, kept = survey_text.notes(asked(Observed(fleet(a=1), notes=("kept",))), "")
    assert short.startswith("it covers 2.0 h only")
    assert kept == "kept"
    played = SpeedUp(1.84, 1.8, 1.88, 10_000.0, 18_400.0, "a run", ("assumed: much",))
    assert survey_text.notes(asked(Observed(fleet(a=1, end_s=86_400.0), notes=("kept",))), played) == (
        "kept",
        "assumed: much",
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(45, "45 s"), (119, "119 s"), (120, "2 min"), (7200, "2.0 h"), (200_000, "2.3 days")],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert survey_text.duration(seconds) == text


def test_the_plot_s_owners_add_up_to_all_gpus_at_every_instant() -> None:
    found = asked(
        Observed(synthetic.generate(Streams(1), 6 * 3600.0)),
        spec=presets.engine("Qwen3-8B", "H100", 2),
        most=40,
    )
    series = survey_report.by_owner(found)
    lines = dict(series.by_owner)
    assert set(lines) == {"other users", "harvested", "starting", "idle"}
    for index in range(len(series.times_s)):
        values = [line[index] for line in lines.values()]
        assert sum(values) == found.gpus
        assert min(values) >= 0
    spans = [
        stop - start for start, stop in zip(series.times_s, [*series.times_s[1:], series.end_s], strict=True)
    ]
    working = sum(value * span for value, span in zip(lines["harvested"], spans, strict=True)) / 3600
    assert working == pytest.approx(found.usable_gpu_h)
    assert max(lines["harvested"]) <= 80


# ---------------------------------------------------------------- where it comes from


def test_a_real_dump_hand_computed() -> None:
    found = asked(sources.read_sacct(DATA / "sacct_22.05.txt", None, (), NOW), cold_start_s=1.0, notice_s=1.0)
    # 10 GPUs (4, 2 and 4 in use at most) over 29 s; jobs hold 1*2 + 4*3 + 1*1 + 1*1 + 1*2 + 4*14 + 4*3 + 4*9 + 1*3 GPU s of them
    assert (found.gpus, found.hours * 3600) == (10, pytest.approx(29.0))
    assert found.idle_gpu_h * 3600 == pytest.approx(290 - 125)
    assert found.delayed is not None
    assert found.delayed.usual_mean_s == pytest.approx((0 + 0 + 0 + 0 + 2 + 3 + 10 + 6 + 0) / 9)


def scontrol(tmp_path: Path, states: dict[str, str]) -> Path:
    path = tmp_path / "nodes.txt"
    lines = [
        f"NodeName={name} CPUAlloc=0 CPUTot=64 Gres=gpu:4 GresUsed=gpu:0 RealMemory=1000 AllocMem=0 State={state} Partitions=normal "
        "CfgTRES=cpu=64,gres/gpu=4 AllocTRES="
        for name, state in states.items()
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_nodes_may_be_chosen_by_gpu_and_partition(tmp_path: Path) -> None:
    path = scontrol(tmp_path, dict.fromkeys(("node0", "node1", "node2", "node3"), "IDLE"))
    text = path.read_text(encoding="utf-8").splitlines(keepends=True)
    text[3] = text[3].replace("gpu:4", "gpu:a100:4").replace("Partitions=normal", "Partitions=normal,big")
    path.write_text("".join(text), encoding="utf-8")

    def read(*only: str) -> Observed:
        return sources.read_sacct(DATA / "sacct_22.05.txt", path, (), NOW, sources.Only(*only))

    whole = read()
    assert (
        "the nodes have several types of GPU; --gpu-type takes one: there are 12 (no type), 4 a100"
        in whole.notes
    )
    assert read("a100") == read("", "big") == read("a100", "normal")
    one = read("a100")
    assert set(one.fleet.capacity) == {"node3"}
    # of node3's three jobs two started in the period; the dump's others are elsewhere
    assert [job.line for job in one.jobs] == [4, 8, 9]
    assert sorted(one.waits_s) == [0.0, 6.0, 10.0]
    assert not [note for note in one.notes if "several types" in note]
    with pytest.raises(ConfigError, match="no node has GPUs of type h100 in partition any") as caught:
        read("h100")
    assert "4 a100" in caught.value.remedy
    with pytest.raises(ConfigError, match="not known"):
        sources.read_sacct(DATA / "sacct_22.05.txt", None, (), NOW, sources.Only("a100"))


def test_nodes_that_are_down_now_are_in_use_since_their_last_job(tmp_path: Path) -> None:
    up = dict.fromkeys(("node0", "node1", "node2", "node3"), "IDLE")
    read = {
        name: sources.read_sacct(DATA / "sacct_22.05.txt", scontrol(tmp_path, states), (), NOW)
        for name, states in (
            ("up", up),
            ("down", up | {"node0": "DOWN", "node2": "IDLE+DRAIN", "node3": "DOWN"}),
        )
    }
    idle = {name: asked(one).idle_gpu_h * 3600 for name, one in read.items()}
    # node0 never had a job: 4 GPUs for 29 s; node2's last job ended 3 s after the start; on node3 a job still runs
    assert idle["up"] - idle["down"] == pytest.approx(4 * 29 + 4 * 26)
    assert any(
        "2 nodes are down or drained now" in note and "'node0', 'node2'" in note
        for note in read["down"].notes
    )
    assert len(read["down"].jobs) == len(read["up"].jobs)  # what is down is nobody's job


def test_a_partition_that_no_job_names_is_said() -> None:
    observed = sources.read_sacct(DATA / "sacct_22.05.txt", None, ("scavange",), NOW)
    assert "no job of the dump is in partition scavange" in observed.notes


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", r"dump.txt: the sacct dump is empty \(line 1\)"),
        (b"1|normal\n", "dump.txt: line 1 of the sacct dump cannot be read: 2 fields"),
        (b"\n\xff\xfe\n", "dump.txt: line 2 is no text"),
        (b"1|n|COMPLETED|5|9|4|1|a|gres/gpu=1|gres/gpu=1\n", "dump.txt: line 1 .* ends 5 s before it starts"),
        (
            b"1|n|COMPLETED|5|9|12|1|a|gres/gpu=1|gres/gpu=1\n2|n|COMPLETED|5|9|1795300400|1|a|gres/gpu=1|gres/gpu=1\n",
            "dump.txt: line 2 .*End of job 2 lies 400 s ahead",
        ),
        (
            b"1|n|COMPLETED|5|9|12|1|a|cpu=1|cpu=1\n2|n|COMPLETED|5|9|15|1|a|cpu=1|cpu=1\n",
            "dump.txt: no job among 2 held a GPU",
        ),
    ],
)
def test_a_dump_that_cannot_be_believed_names_file_line_and_remedy(
    tmp_path: Path, content: bytes, says: str
) -> None:
    path = tmp_path / "dump.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        sources.read_sacct(path, None, (), NOW)
    assert caught.value.remedy


def test_a_dump_that_is_cut_off_names_its_last_line(tmp_path: Path) -> None:
    path = tmp_path / "dump.txt"
    path.write_bytes((DATA / "sacct_22.05.txt").read_bytes()[:-3])
    with pytest.raises(ConfigError, match=r"dump\.txt: line \d+ is cut off"):
        sources.read_sacct(path, None, (), NOW)


def test_a_dump_of_ones_own_jobs_is_told_by_the_nodes(tmp_path: Path) -> None:
    states = dict.fromkeys(("node0", "node1", "node2", "node3"), "IDLE")
    nodes = scontrol(tmp_path, states)
    assert not any(
        sources.DOUBT in note for note in sources.read_sacct(DATA / "sacct_22.05.txt", nodes, (), NOW).notes
    )
    nodes.write_text(
        nodes.read_text(encoding="utf-8").replace("GresUsed=gpu:0", "GresUsed=gpu:4"), encoding="utf-8"
    )
    first = sources.read_sacct(DATA / "sacct_22.05.txt", nodes, (), NOW).notes[0]
    assert first.startswith(
        f"{sources.DOUBT}: by the nodes 16 GPUs are in use, and the dump's running jobs hold "
    )


def test_engines_that_no_node_can_carry_are_refused() -> None:
    with pytest.raises(ConfigError, match="no node has 16 GPUs, which an engine takes: the largest has 8"):
        asked(Observed(fleet(a=8)), spec=presets.engine("Qwen3-8B", "H100", 16))


def test_clocks_that_differ_a_little_are_borne() -> None:
    assert (
        sources.read_sacct(DATA / "sacct_22.05.txt", None, (), 1_795_258_867.0 - 200).since == 1_795_258_838.0
    )


def test_a_missing_file_and_nodes_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.txt cannot be read: No such file"):
        sources.read_sacct(tmp_path / "gone.txt", None, (), NOW)
    bad = tmp_path / "bad.txt"
    bad.write_text("hello\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"bad\.txt") as caught:
        sources.read_sacct(DATA / "sacct_22.05.txt", bad, (), NOW)
    assert "scontrol" in caught.value.remedy
    zipped = tmp_path / "dump.gz"
    zipped.write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match=r"dump\.gz cannot be read"):
        sources.read_sacct(zipped, None, (), NOW)


def test_a_node_with_more_gpus_than_any_has_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nodes.txt"
    line = "NodeName=%s CPUAlloc=0 CPUTot=64 Gres=gpu:1025 RealMemory=1 AllocMem=0 State=IDLE Partitions=p CfgTRES= AllocTRES=\n"
    path.write_text(line % "n1", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"nodes\.txt: node 'n1' has 1025 GPUs"):
        sources.read_sacct(DATA / "sacct_22.05.txt", path, (), NOW)
    path.write_text(line % "a\x1bc", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"nodes\.txt: a host's name cannot be 'a\\x1bc'"):
        sources.read_sacct(DATA / "sacct_22.05.txt", path, (), NOW)


def test_many_engines_on_many_nodes_are_placed_in_a_moment() -> None:
    names = [f"n{number}" for number in range(20_000)]
    assert (
        len(replay(fleet(**dict.fromkeys(names, 8)), gpus=2)) == 80_000
    )  # one look over all nodes each would take minutes


def test_traces_are_told_apart_by_their_columns() -> None:
    nodes = sources.read_trace(DATA / "nodes.csv", 8, "", Streams(0))
    jobs = sources.read_trace(DATA / "jobs.csv", 8, "", Streams(0))
    assert nodes.fleet.gpus > 0
    assert not nodes.jobs
    assert jobs.jobs
    with pytest.raises(ConfigError, match="no trace that is known"):
        sources.read_trace(DATA / "lengths.csv", 8, "", Streams(0))
    with pytest.raises(ConfigError, match="several sources"):
        sources.read_trace(DATA / "spot.csv", 8, "", Streams(0))


@needs_traces
def test_the_real_trace_gives_its_own_figures() -> None:
    found = asked(
        sources.read_trace(TRACES / "earth_node_idle_72h.csv.gz", 8, "", Streams(0)),
        cold_start_s=115.0,
        notice_s=60.0,
    )
    assert found.idle_mean == pytest.approx(165, abs=3)
    assert found.outlasting > 0.98
    assert 0.95 < found.usable_gpu_h / found.idle_gpu_h < found.outlasting
    # the README's hazard, .63 reclaims an idle GPU-hour, is of GPUs at any age; most of those come within minutes
    assert 0.2 < found.preemptions_per_h / found.engines_mean < 0.63
