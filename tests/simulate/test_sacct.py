"""A site's accounting dump becomes its idle GPUs; one that is empty, unreadable or skewed names its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from scavenger.cluster.model import JobState
from scavenger.cluster.slurm.commands import parse_nodes
from scavenger.errors import ConfigError
from scavenger.simulate import sacct
from scavenger.simulate.sacct import COMMAND, FIELDS, capacity_of, fleet_of, parse

DUMP = Path(__file__).resolve().parents[1] / "data/simulate/sacct.txt"
LINES = DUMP.read_text(encoding="utf-8").splitlines(keepends=True)
CAPACITY = {"gpu01": 8, "gpu02": 8, "gpu03": 4, "cpu1": 0}
T0 = 1_700_000_000.0
GOOD = "101|normal|COMPLETED|1700000000|1700000010|1700000600|1|gpu01|gres/gpu=4,node=1|gres/gpu=4"


def with_field(field: str, value: str) -> str:
    cells = GOOD.split("|")
    cells[FIELDS.index(field)] = value
    return "|".join(cells)


def test_the_command_asks_for_every_field_and_every_life_of_a_job_in_unix_time() -> None:
    assert COMMAND.startswith("SLURM_TIME_FORMAT=%s sacct -a -X -D -P -n ")
    assert ",".join(FIELDS) in COMMAND
    assert not {"JobName", "Comment", "User"} & set(FIELDS)  # nothing that a user can write


def test_a_dump_is_read_as_slurm_writes_it() -> None:
    jobs = parse(LINES)
    assert [job.line for job in jobs] == list(range(1, 10))
    first, both, preempted, again, cancelled, pending, cpu, _, uneven = jobs
    assert (first.job_id, first.state, first.submit, first.start, first.end) == (
        "101",
        JobState.COMPLETED,
        T0,
        T0 + 10,
        T0 + 600,
    )
    assert (both.nodes, both.gpus, both.requested_gpus) == (
        ("gpu01", "gpu02"),
        8,
        8,
    )  # only the typed count is there
    assert (preempted.gpus, preempted.state) == (4, JobState.PREEMPTED)  # typed and plain: counted once
    assert (again.job_id, again.state, again.end) == ("103", JobState.RUNNING, None)
    assert (cancelled.state, cancelled.start, cancelled.nodes) == (JobState.CANCELLED, None, ())
    assert (pending.start, pending.end, pending.requested_gpus, pending.gpus) == (None, None, 32, 0)
    assert (cpu.gpus, uneven.gpus, uneven.nodes) == (0, 1, ("gpu01", "gpu02"))


def test_the_fleet_is_what_the_jobs_leave_from_the_first_end_to_the_last_time() -> None:
    dump = fleet_of(parse(LINES), CAPACITY)
    # since: 101's end, the earliest; what had ended before that the dump may lack. until: 108's end
    assert (dump.since, dump.fleet.end_s) == (T0 + 600, 900.0)
    assert dict(dump.fleet.capacity) == {"gpu01": 8, "gpu02": 8, "gpu03": 4}
    # at 600: 102 holds 4 + 4; 103 takes 4 of gpu01 at 700 until 900, when 107 takes 3; 108 has 1 of gpu01 at 950
    assert dict(dump.fleet.initial) == {"gpu01": 4, "gpu02": 4, "gpu03": 4}
    assert [(change.t_s, change.node, change.delta) for change in dump.fleet.changes] == [
        (100.0, "gpu01", -4),
        (300.0, "gpu01", 1),
        (350.0, "gpu01", -1),
        (600.0, "gpu01", 4),
        (600.0, "gpu02", 4),
        (700.0, "gpu02", -4),
    ]
    assert any("1 jobs hold" in note for note in dump.notes)
    assert any("down" in note for note in dump.notes)


def test_a_dump_of_a_real_slurm_with_a_preempted_requeued_job_is_read_whole() -> None:
    # Slurm 22.05.8 with slurmdbd: COMMAND over jobs that completed, failed, were preempted and requeued, suspended, cancelled; an array; a
    # job whose name held '|' and a newline
    jobs = parse((DUMP.parent / "sacct_22.05.txt").read_text(encoding="utf-8").splitlines(keepends=True))
    assert [job.state for job in jobs if job.job_id == "5"] == [JobState.PREEMPTED, JobState.RUNNING]
    assert {job.state for job in jobs} >= {
        JobState.COMPLETED,
        JobState.FAILED,
        JobState.SUSPENDED,
        JobState.PENDING,
        JobState.CANCELLED,
    }
    dump = fleet_of(jobs, {f"node{index}": 4 for index in range(4)})
    # node3: the preempted job until 14, who preempted it from that second to 17, the requeued job again from 20
    assert [(change.t_s, change.delta) for change in dump.fleet.changes if change.node == "node3"] == [
        (17.0, 4),
        (20.0, -4),
    ]
    ours = fleet_of(jobs, {f"node{index}": 4 for index in range(4)}, ignore_partitions=["scavenge"])
    assert [(change.t_s, change.delta) for change in ours.fleet.changes if change.node == "node3"] == [
        (14.0, -4),
        (17.0, 4),
    ]


def test_our_own_jobs_count_as_idle() -> None:
    dump = fleet_of(parse(LINES), CAPACITY, ignore_partitions=("scavenge",))
    assert [(change.t_s, change.delta) for change in dump.fleet.changes if change.node == "gpu02"] == [
        (600.0, 4)
    ]
    assert any("2 jobs in scavenge" in note for note in dump.notes)


def test_without_the_nodes_the_most_in_use_is_taken_and_said() -> None:
    dump = fleet_of(parse(LINES))
    assert dict(dump.fleet.capacity) == {"gpu01": 8, "gpu02": 4}
    assert any("most ever in use" in note for note in dump.notes)


def test_a_period_may_be_given() -> None:
    dump = fleet_of(parse(LINES), CAPACITY, since=T0 + 800, until=T0 + 2000)
    assert (dump.fleet.end_s, dict(dump.fleet.initial)["gpu01"]) == (1200.0, 0)


def test_the_nodes_come_from_scontrol() -> None:
    line = (
        "NodeName=gpu01 CPUAlloc=0 CPUTot=64 Gres=gpu:a100:8 GresUsed=gpu:a100:0 RealMemory=1000 AllocMem=0 State=IDLE "
        "Partitions=normal CfgTRES=cpu=64,gres/gpu=8 AllocTRES=\n"
    )
    assert capacity_of(parse_nodes(line)) == {"gpu01": 8}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "line 1"),
        ("\n\n", "line 1"),
        ("nonsense\n", "line 1 .*1 fields instead of 10"),
        (f"{GOOD}\n{GOOD[:60]}", "line 2"),
        ("|".join(FIELDS), "line 1 .*a header"),
        (with_field("JobIDRaw", "101.batch"), "line 1 .*a job step"),
        (with_field("JobIDRaw", "101_4"), "line 1 .*not a job id"),
        (with_field("State", "DANCING"), "line 1 .*unknown job state"),
        (with_field("State", ""), "line 1 .*unknown job state"),
        (with_field("Start", "2023-11-14T22:13:30"), "line 1 .*not in Unix seconds"),
        (with_field("Submit", "Unknown"), "line 1 .*never submitted"),
        (with_field("End", "Unknown"), "line 1 .*has no end"),
        (with_field("NodeList", "gpu[01-"), "line 1 .*malformed host"),
        (with_field("NodeList", "None assigned"), "line 1 .*no node"),
        (with_field("NodeList", "n[1-100000][1-100000]"), "line 1 .*more than 100,000 names"),
        (with_field("NodeList", f"n[{'9' * 5000}]"), "line 1 .*malformed host range"),
        (with_field("NodeList", "gpu01\x1bc"), r"line 1 .*cannot be printed.*gpu01\\x1bc"),
        (with_field("JobIDRaw", "²"), "line 1 .*not a job id"),
        (with_field("Submit", "²"), "line 1 .*not in Unix seconds"),
        (with_field("Submit", "9" * 5000), "line 1 .*not in Unix seconds"),
        (with_field("AllocTRES", "gres/gpu=²,node=1"), "line 1 .*not a number of GPUs: 'gres/gpu=²'"),
        (with_field("ReqTRES", f"gres/gpu:h100={'9' * 5000}"), "line 1 .*not a number of GPUs"),
        (f"{GOOD}\n{with_field('AllocTRES', 'gres/gpu=1000000000')}", "line 2 .*1000000000 GPUs on 1 nodes"),
        (f"{GOOD}\n{with_field('End', '1700000009')}", "line 2 .*ends 1 s before it starts"),
        (f"{GOOD}\n{with_field('Start', '1699999990')}", "line 2 .*starts 10 s before it is submitted"),
    ],
)
def test_a_dump_that_is_empty_unreadable_or_skewed_names_its_line_and_the_remedy(
    line: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse(line.splitlines(keepends=True))
    assert caught.value.remedy


def test_a_time_of_another_age_is_refused_and_named() -> None:
    with pytest.raises(ConfigError, match=r"line 2 .*job 1 lies 19,676 days before the dump's end"):
        fleet_of(parse([GOOD, "1|normal|COMPLETED|5|9|60|1|gpu02|gres/gpu=4|gres/gpu=4"]))


def test_a_node_with_more_gpus_than_any_has_is_named_with_its_largest_job() -> None:
    lines = [with_field("AllocTRES", "gres/gpu=1000"), with_field("AllocTRES", "gres/gpu=1024")]
    with pytest.raises(ConfigError, match=r"line 2 .*2024 GPUs of node 'gpu01' were in use at once"):
        fleet_of(parse(lines), until=T0 + 3600, since=T0)


def test_a_dump_of_more_places_than_memory_holds_names_the_line_that_is_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sacct, "_MAX_NODE_ENTRIES", 2)
    with pytest.raises(ConfigError, match="line 3 of the sacct dump is one too many") as caught:
        parse([GOOD] * 5)
    assert caught.value.remedy == "take fewer days"


def test_nodes_that_hold_more_than_they_have_are_skewed_too() -> None:
    with pytest.raises(ConfigError, match="line 2: at 0 s node 'gpu01' would hold 8 of its 4"):
        fleet_of(parse(LINES), CAPACITY | {"gpu01": 4, "gpu02": 4}, since=T0 + 50)


def test_a_dump_beyond_its_stated_end_names_its_line() -> None:
    with pytest.raises(ConfigError, match=r"line 4 .* after its end at 1700001250"):
        fleet_of(parse(LINES), CAPACITY, until=T0 + 1250)


def test_jobs_on_nodes_that_were_not_given_name_their_line() -> None:
    with pytest.raises(ConfigError, match=r"line 2 .*'gpu02' is not among"):
        fleet_of(parse(LINES), {"gpu01": 8})
    with pytest.raises(ConfigError, match=r"line 1 .*4 GPUs on nodes without"):
        fleet_of(parse(LINES), {"gpu01": 0, "gpu02": 8, "cpu1": 0})


def test_a_job_over_nodes_with_and_without_gpus_holds_them_where_they_are() -> None:
    line = "7|normal|COMPLETED|1|5|90|2|cpu1,gpu01|gres/gpu=8,node=2|gres/gpu=8\n8|normal|COMPLETED|1|1|2|1|cpu1|cpu=1|cpu=1\n"
    dump = fleet_of(parse(line.splitlines(keepends=True)), CAPACITY)
    assert dump.occupations[0].gpus_by_node == (("gpu01", 8),)


def test_accounting_without_gpus_says_what_to_set() -> None:
    lines = [line.replace("gres/gpu", "gres/mps") for line in LINES]
    with pytest.raises(ConfigError, match="no job among 9 held a GPU") as caught:
        fleet_of(parse(lines), CAPACITY)
    assert "AccountingStorageTRES" in caught.value.remedy


def test_ignoring_everything_is_no_lack_of_accounting() -> None:
    with pytest.raises(ConfigError, match="no job outside normal held a GPU") as caught:
        fleet_of(parse([GOOD]), until=T0 + 900, ignore_partitions=["normal"], since=T0)
    assert "fewer partitions" in caught.value.remedy


def test_a_dump_over_no_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="covers no time"):
        fleet_of(parse([GOOD]), CAPACITY)


def test_it_is_documented_as_it_is() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/simulate.md").read_text(encoding="utf-8")
    assert COMMAND in page
    assert sacct.NODES_COMMAND in page
