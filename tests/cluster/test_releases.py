"""Slurm 22.05, 24.11 and 26.05, as recorded (`record`), are read to one model; what cannot be read is unknown, and never a free GPU.

What the Slurm of this machine prints is held to the same model.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from scavenger.cluster.model import Job, JobFlag, JobState, Node, Unread
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm import commands, json_output
from scavenger.cluster.slurm.backend import SlurmCluster, agree
from scavenger.errors import ClusterUnavailable
from tests.cluster import record
from tests.cluster.record import MARK, plain

DATA = Path(__file__).resolve().parents[1] / "data/slurm"
RELEASES = ("22.05", "24.11", "26.05")
COMMENT = "a|b %i 'q' = é"
#: Name, state, flags, nodes, GPUs, restarts, exit code.
SCENE = [
    *[("array", JobState.PENDING, (), (), 1, 0, 0)] * 4,
    ("cancelled-running", JobState.CANCELLED, (), ("node1",), 1, 0, 143),
    ("cancelled-waiting", JobState.CANCELLED, (), (), 4, 0, 0),
    ("completed", JobState.COMPLETED, (), ("node1",), 0, 0, 0),
    ("completing", "ends", (JobFlag.COMPLETING,), ("node2",), 1, 0, 0),
    ("failed", JobState.FAILED, (), ("node1",), 0, 0, 3),
    ("killed", JobState.FAILED, (), ("node1",), 0, 0, 137),
    ("preempted", JobState.PENDING, (), (), 3, 1, 0),
    ("preemptor", JobState.RUNNING, (), ("node3",), 2, 0, 0),
    ("two-nodes", JobState.RUNNING, (), ("node1", "node2"), 4, 0, 0),
    ("waiting", JobState.PENDING, (), (), 9, 0, 0),
]
#: By node: usable, GPUs, GPUs that Slurm counts as taken.
NODES = {"node0": (False, 4, 0), "node1": (True, 4, 2), "node2": (True, 4, 2), "node3": (True, 4, 2)}


def text(release: str, file: str) -> str:
    return (DATA / release / file).read_text(encoding="utf-8")


def jobs_of(release: str, kind: str) -> tuple[Job, ...]:
    return (
        json_output.parse_jobs(text(release, "jobs.json"))
        if kind == "json"
        else commands.parse_jobs(text(release, "jobs.txt"), MARK)
    )


def nodes_of(release: str, kind: str) -> tuple[Node, ...]:
    return (
        json_output.parse_nodes(text(release, "nodes.json"))
        if kind == "json"
        else commands.parse_nodes(text(release, "nodes.txt"))
    )


def all_of_it(jobs: Iterable[Job]) -> list[tuple[object, ...]]:
    return sorted((plain(job) for job in jobs), key=str)


@pytest.mark.parametrize("kind", ["fields", "json"])
@pytest.mark.parametrize("release", RELEASES)
def test_the_scene_is_read_alike_from_every_release(release: str, kind: str) -> None:
    jobs = jobs_of(release, kind)
    short = [
        (name, state, flags, nodes, gpus, restarts, code)
        for name, _, _, state, flags, nodes, gpus, _, _, restarts, _, _, code, *_ in all_of_it(jobs)
    ]
    assert short == sorted(SCENE, key=str)
    assert all_of_it(jobs) == all_of_it(jobs_of("22.05", "fields"))
    two = next(job for job in jobs if job.name == "two-nodes")
    assert (two.comment, two.time_limit_s, two.gpus_by_node) == (COMMENT, 5400, (("node1", 2), ("node2", 2)))
    assert [job.reason for job in jobs if job.name in ("waiting", "preempted")] == ["BeginTime", "Resources"]
    assert not any(job.unread for job in jobs)


@pytest.mark.parametrize("kind", ["fields", "json"])
@pytest.mark.parametrize("release", RELEASES)
def test_the_nodes_are_read_alike_from_every_release(release: str, kind: str) -> None:
    nodes = nodes_of(release, kind)
    assert {node.name: (node.usable, node.gpus, node.gpus_allocated) for node in nodes} == NODES
    assert not any(node.unread for node in nodes)
    # a plan of backfill comes and goes between two moments
    bare = [replace(node, states=node.states - {"planned"}) for node in nodes]
    assert bare == [replace(node, states=node.states - {"planned"}) for node in nodes_of("22.05", "fields")]


@pytest.mark.parametrize("release", RELEASES)
def test_what_changes_seldom_is_read_alike_from_every_release(release: str) -> None:
    assert commands.parse_partitions(text(release, "partitions.txt")) == commands.parse_partitions(
        text("22.05", "partitions.txt")
    )
    assert commands.parse_reservations(text(release, "reservations.txt")) == ()
    info = commands.parse_info(text(release, "config.txt"), user="u")
    assert info.version == commands.parse_version(text(release, "version.txt"))
    assert info.version.startswith(release)
    assert replace(info, version="") == replace(
        commands.parse_info(text("22.05", "config.txt"), user="u"), version=""
    )


@pytest.mark.slurm
def test_the_slurm_of_this_machine_says_of_the_scene_what_the_recorded_ones_say(
    slurm_sandbox: SlurmSandbox,
) -> None:
    record.play(slurm_sandbox)
    now = record.texts(slurm_sandbox)
    names = {name for name, *_ in SCENE}
    for jobs in (commands.parse_jobs(now["jobs.txt"], MARK), json_output.parse_jobs(now["jobs.json"])):
        # A busy machine may take longer than KillWait to deliver a SIGTERM: then it is SIGKILL that ended the job.
        here = [
            replace(job, exit_code=143) if (job.name, job.exit_code) == ("cancelled-running", 137) else job
            for job in jobs
            if job.name in names
        ]
        recorded = {
            str(one).replace("'root'", repr(here[0].user)) for one in all_of_it(jobs_of("22.05", "fields"))
        }
        assert {str(one) for one in all_of_it(here)} == recorded
    for nodes in (commands.parse_nodes(now["nodes.txt"]), json_output.parse_nodes(now["nodes.json"])):
        assert {node.name: (node.usable, node.gpus, node.gpus_allocated) for node in nodes} == NODES


# ---- what cannot be read --------------------------------------------------------------------------------------------


def recorded_site(folder: Path, release: str, **changed: str) -> SlurmCluster:
    """A cluster whose commands print what was recorded; `changed`: other texts, by file ('jobs')."""
    for file in ("jobs", "nodes", "partitions", "reservations", "config", "version"):
        (folder / f"{file}.txt").write_text(changed.get(file, text(release, f"{file}.txt")), encoding="utf-8")
    scripts = {
        "squeue": f'for last; do :; done\nexec sed "s/{MARK}/${{last##*:}}/g" {folder}/jobs.txt',
        "scontrol": 'case "$*" in\n'
        + "".join(
            f"*{key}*) exec cat {folder}/{file}.txt;;\n"
            for key, file in (
                ("reservation", "reservations"),
                ("partition", "partitions"),
                ("node", "nodes"),
                ("config", "config"),
                ("version", "version"),
            )
        )
        + "esac\nexit 1",
    }
    for name, body in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    return SlurmCluster({"PATH": os.pathsep.join([str(folder), os.environ["PATH"]])})


def with_field(jobs: str, field: str, change: Callable[[str], str]) -> str:
    """The text of all jobs, one field of each changed."""
    place, count = commands._JOB_FIELDS.index(field), len(commands._JOB_FIELDS)
    fields = jobs.split(MARK)
    for start in range(0, len(fields) - 1, count):
        fields[start + place] = change(fields[start + place])
    return MARK.join(fields)


@pytest.mark.parametrize("release", RELEASES)
def test_a_field_that_only_informs_and_cannot_be_read_is_told_once_and_the_poll_goes_on(
    tmp_path: Path, release: str
) -> None:
    cluster = recorded_site(
        tmp_path, release, jobs=with_field(text(release, "jobs.txt"), "exit_code", lambda code: f"<{code}>")
    )
    with capture_logs() as logs:
        first, second = cluster.view(), cluster.view()
    assert [node.idle_gpus for node in first.nodes] == [0, 2, 1, 2]
    assert {job.exit_code for job in first.jobs} == {None}
    assert {job.unread[0].field for job in second.jobs} == {"exit_code"}
    assert [
        (line["event"], line["release"], line["field"], line["value"][0])
        for line in logs
        if line["log_level"] == "warning"
    ] == [("field_not_read", text(release, "version.txt").split()[-1], "exit_code", "<")]


@pytest.mark.parametrize("field", commands._INFORMS)
def test_each_field_that_only_informs_may_be_unknown(field: str) -> None:
    whole = commands.parse_jobs(text("24.11", "jobs.txt"), MARK)
    read = commands.parse_jobs(with_field(text("24.11", "jobs.txt"), field, lambda _: "{}"), MARK)
    assert {job.unread for job in read} == {(Unread(field, "{}"),)}
    assert [(job.job_id, job.state, job.gpus, job.nodes) for job in read] == [
        (job.job_id, job.state, job.gpus, job.nodes) for job in whole
    ]
    if field == "TimeLimit":
        assert {job.time_limit_s for job in read} == {float("inf")}


@pytest.mark.parametrize("key", json_output._INFORMS)
def test_each_field_of_json_that_only_informs_may_be_missing_or_unreadable(key: str) -> None:
    document = json.loads(text("26.05", "jobs.json"))
    whole = json_output.parse_jobs(text("26.05", "jobs.json"))
    rows = document["jobs"]
    read = json_output.parse_jobs(json.dumps({**document, "jobs": [{**row, key: [[]]} for row in rows]}))
    assert {one.field for job in read for one in job.unread} == {key}
    assert [(job.job_id, job.state, job.gpus, job.nodes) for job in read] == [
        (job.job_id, job.state, job.gpus, job.nodes) for job in whole
    ]
    if key != "scheduled_nodes":  # which 22.05 does not have
        gone = json_output.parse_jobs(
            json.dumps({**document, "jobs": [{k: v for k, v in row.items() if k != key} for row in rows]})
        )
        assert {one for job in gone for one in job.unread} == {Unread(key, "")}


@pytest.mark.parametrize(
    ("found", "changed", "field"),
    [
        ("GresUsed=gpu:h100:2(IDX:0-1)", "GresUsed=gpu|h100|2", "GresUsed"),
        ("GresUsed=gpu:h100:2(IDX:0-1)", "GresUsed=N/A", "GresUsed"),
        ("GresUsed=gpu:h100:2(IDX:0-1)", "GresUsed=gpu:h100(IDX:0-1)", "GresUsed"),
        ("GresUsed=gpu:h100:2(IDX:0-1)", "Used=2", "GresUsed"),
        ("Gres=gpu:h100:4", "Gres=gpu*h100*4", "Gres"),
        ("State=MIXED", "State=WARMING", "State"),
        ("State=MIXED", "State=mixed", "State"),
    ],
)
def test_a_node_that_cannot_be_read_has_nothing_idle_and_the_others_have_what_they_had(
    found: str, changed: str, field: str
) -> None:
    lines = text("26.05", "nodes.txt").splitlines(keepends=True)
    assert lines[1].count(f" {found} ") + lines[1].count(f" {found}+PLANNED ") == 1
    nodes = commands.parse_nodes(
        "".join([lines[0], lines[1].replace(f" {found}", f" {changed}"), *lines[2:]])
    )
    assert [node.idle_gpus for node in nodes] == [0, 0, 2, 2]
    assert [unread.field for unread in nodes[1].unread] == [field]
    assert not any(node.unread for node in nodes if node.name != "node1")


def test_gpus_that_the_site_tracks_are_known_without_gres_used() -> None:
    line = (
        text("26.05", "nodes.txt").splitlines(keepends=True)[1].replace(" GresUsed=gpu:h100:2(IDX:0-1) ", " ")
    )
    tracked = re.sub(r"CfgTRES=\S+", "CfgTRES=cpu=64,gres/gpu=4", line)
    (busy,) = commands.parse_nodes(re.sub(r"AllocTRES=\S*", "AllocTRES=cpu=1,gres/gpu=3", tracked))
    (idle,) = commands.parse_nodes(re.sub(r"AllocTRES=\S*", "AllocTRES=", tracked))
    assert (busy.idle_gpus, idle.idle_gpus, busy.unread) == (1, 4, ())


def test_a_node_of_json_without_any_state_has_nothing_idle() -> None:
    document = json.loads(text("26.05", "nodes.json"))
    (node,) = json_output.parse_nodes(
        json.dumps({**document, "nodes": [{**document["nodes"][1], "state": []}]})
    )
    assert (node.idle_gpus, node.unread) == (0, (Unread("state", ""),))


def test_memory_that_cannot_be_read_is_left_to_slurm() -> None:
    line = text("26.05", "nodes.txt").splitlines(keepends=True)[1]
    (node,) = commands.parse_nodes(re.sub(r"AllocMem=\d+", "AllocMem=2.5G", line))
    assert (node.memory_mb, node.memory_allocated_mb, node.idle_gpus) == (0, 0, 2)
    assert node.unread == (Unread("AllocMem", "2.5G"),)


# ---- damage of any kind ---------------------------------------------------------------------------------------------

# Nothing that makes one valid word of Slurm's out of another: no letter or digit, no separator of lists, no blank.
JUNK = "?!;|{}[]()<>\"'`~$&^*@#\\%=\0é²\u0663"
WORDS = ("?", "{'set': True, 'number': 3}", "[1, 2]", "<nil>", "1:2:3:4:5")
#: Words that a later release may have: letters and digits, as this one's own.
LATER = ("ASLEEP", "Warming2", "gpuset", "IDLE+FROZEN", "tenth", "x1y2")
damage = st.one_of(
    st.tuples(st.text(JUNK, min_size=1, max_size=3), st.floats(0, 1)),  # inserted at this share of the text
    st.tuples(st.sampled_from(WORDS), st.none()),  # instead of the text
)
#: Where a word stands in the place of another, any is a value: a job's id, its user, its tasks and CPUs, and these texts.
FREE = frozenset({"UserName", "Partition", "Account", "Reason", "Name", "Comment", "NodeList", "SchedNodes"})


def damaged(value: str, how: tuple[str, float | None]) -> str:
    junk, share = how
    if share is None:
        return junk
    at = round(share * len(value))
    return value[:at] + junk + value[at:]


def demand(jobs: Iterable[Job]) -> Counter[tuple[object, ...]]:
    """What jobs hold and wait for, each by its id and nodes."""
    return Counter(
        (
            job.job_id,
            job.has_gpus_allocated,
            job.nodes if job.has_gpus_allocated else job.n_nodes,
            job.gpus,
            job.cpus,
            job.restart_count,
        )
        for job in jobs
        if job.has_gpus_allocated or job.waits
    )


def idle(nodes: Iterable[Node], jobs: Iterable[Job]) -> dict[str, int]:
    return {node.name: node.idle_gpus for node in agree(tuple(nodes), jobs, frozenset())}


@given(st.sampled_from(RELEASES), st.integers(0, 13), st.sampled_from(commands._JOB_FIELDS), damage)
@example("22.05", 3, "JobID", ("\u0663", 1.0))  # a digit to `int`, none of Slurm's
@example("22.05", 6, "tres-per-node", ("²", 1.0))
@example("24.11", 0, "exit_code", ("?", None))
@example("26.05", 11, "tres-per-node", ("(", 0.8))
def test_a_damaged_queue_is_the_named_error_or_loses_nobody_s_demand(
    release: str, row: int, field: str, how: tuple[str, float | None]
) -> None:
    whole = text(release, "jobs.txt")
    fields = whole.split(MARK)
    place = row * len(commands._JOB_FIELDS) + commands._JOB_FIELDS.index(field)
    fields[place] = damaged(fields[place], how)
    try:
        jobs = commands.parse_jobs(MARK.join(fields), MARK)
    except ClusterUnavailable:
        assert field not in commands._INFORMS, "what only informs must not blind us"
        return
    before = commands.parse_jobs(whole, MARK)
    assert demand(jobs) == demand(before)
    nodes = nodes_of(release, "fields")
    assert idle(nodes, jobs) == idle(nodes, before)


@given(st.sampled_from(RELEASES), st.data())
def test_damaged_nodes_are_the_named_error_or_have_no_more_idle_gpus(
    release: str, data: st.DataObject
) -> None:
    whole = text(release, "nodes.txt")
    tokens = re.split(r"(\s)", whole)
    at = data.draw(st.sampled_from([index for index, token in enumerate(tokens) if token.strip()]))
    key, equals, value = tokens[at].partition("=")
    part = data.draw(st.sampled_from(["value", "token", "gone"]))
    if part == "gone":
        tokens[at] = ""
    else:
        how = data.draw(damage)
        tokens[at] = (
            f"{key}{equals}{damaged(value, how)}" if part == "value" and equals else damaged(tokens[at], how)
        )
    try:
        nodes = commands.parse_nodes("".join(tokens))
    except ClusterUnavailable:
        return
    before, now = idle(nodes_of(release, "fields"), ()), idle(nodes, ())
    assert all(count <= before.get(name, 0) for name, count in now.items()), (tokens[at], now)


@given(st.sampled_from(RELEASES), st.sampled_from(["jobs", "nodes"]), st.data())
def test_a_cut_answer_is_the_named_error_or_whole_records(
    release: str, kind: str, data: st.DataObject
) -> None:
    whole = text(release, f"{kind}.txt")
    end = data.draw(st.integers(0, len(whole)))
    try:
        if kind == "jobs":
            left = demand(commands.parse_jobs(whole[:end], MARK))
            assert left <= demand(jobs_of(release, "fields"))
        else:
            now, before = idle(commands.parse_nodes(whole[:end]), ()), idle(nodes_of(release, "fields"), ())
            assert now.items() <= before.items()
    except ClusterUnavailable:
        pass


WRONG: list[Any] = [
    {},
    [[]],
    [["x"]],
    {"set": True},
    {"set": True, "infinite": True, "number": 0},
    "?",
    True,
    -1,
    1.5,
    {"id": {}},
]


@given(st.sampled_from(RELEASES), st.sampled_from(["jobs", "nodes"]), st.sampled_from(WRONG), st.data())
def test_json_of_another_shape_is_the_named_error_or_invents_nothing(
    release: str, kind: str, wrong: object, data: st.DataObject
) -> None:
    document = json.loads(text(release, f"{kind}.json"))
    row = data.draw(st.sampled_from(document[kind]))
    key = data.draw(st.sampled_from(sorted(row)))
    row[key] = wrong
    try:
        if kind == "jobs":
            jobs, before = json_output.parse_jobs(json.dumps(document)), jobs_of(release, "json")
            assert demand(jobs) == demand(before), key
        else:
            now, free = (
                idle(json_output.parse_nodes(json.dumps(document)), ()),
                idle(nodes_of(release, "json"), ()),
            )
            assert sum(now.values()) <= sum(free.values()), key
    except ClusterUnavailable:
        assert key not in json_output._INFORMS


# ---------------------------------------------------------------- what a release that nobody has seen may print


def gpus_of(jobs: Iterable[Job]) -> Counter[tuple[object, ...]]:
    """`demand`, whatever the nodes are called."""
    return Counter((job.job_id, job.gpus, job.cpus) for job in jobs if job.has_gpus_allocated or job.waits)


@given(
    st.sampled_from(RELEASES),
    st.integers(0, 13),
    st.sampled_from([field for field in commands._JOB_FIELDS if field != "JobID"]),
    st.sampled_from(LATER),
    st.booleans(),
)
@example("26.05", 0, "tres-per-node", "gpuset", False)
@example("24.11", 11, "tres-alloc", "x1y2", False)
@example("24.11", 12, "NumNodes", "tenth", True)
@example("22.05", 13, "State", "ASLEEP", False)
def test_a_word_of_a_later_release_is_the_named_error_or_loses_nobody_s_demand(
    release: str, row: int, field: str, word: str, appended: bool
) -> None:
    whole = text(release, "jobs.txt")
    fields = whole.split(MARK)
    place = row * len(commands._JOB_FIELDS) + commands._JOB_FIELDS.index(field)
    if field.startswith("tres-"):
        appended = False  # gres/gpu:3g.20gb is one GPU of that type: so would a number with letters be
    fields[place] = fields[place] + word if appended else word
    before = commands.parse_jobs(whole, MARK)
    try:
        jobs = commands.parse_jobs(MARK.join(fields), MARK)
    except ClusterUnavailable as error:
        assert field not in commands._INFORMS, "what only informs must not blind us"
        assert field not in FREE - {"NodeList", "SchedNodes"}, "any word is a value there"
        assert word in f"{error}", "the value is named"  # noqa: PT017  other words are read
        return
    assert gpus_of(jobs) == gpus_of(before)
    if field == "NodeList":
        return  # any word may be a node's name: what its GPUs are is then what the node itself says
    assert demand(jobs) == demand(before)
    nodes = nodes_of(release, "fields")
    now, free = idle(nodes, jobs), idle(nodes, before)
    assert all(count <= free[name] for name, count in now.items())


@given(st.sampled_from(RELEASES), st.integers(0, len(commands._JOB_FIELDS)), st.sampled_from(LATER))
def test_a_new_column_of_the_queue_is_the_named_error(release: str, at: int, word: str) -> None:
    """Also where as many fields come as whole records would have: 25 jobs with one more each."""
    count = len(commands._JOB_FIELDS)
    fields = text(release, "jobs.txt").split(MARK)[:-1]
    rows = [fields[start : start + count] for start in range(0, len(fields), count)]
    rows = [list(rows[n % len(rows)]) for n in range(count)]
    for n, row in enumerate(rows):
        row[0] = ("\n" if n else "") + row[0].strip()
        row.insert(at, word)
    with pytest.raises(ClusterUnavailable):
        commands.parse_jobs(MARK.join([*(field for row in rows for field in row), "\n"]), MARK)


@given(st.sampled_from(RELEASES), st.data())
def test_a_word_or_a_column_of_a_later_release_frees_no_gpu_of_a_node(
    release: str, data: st.DataObject
) -> None:
    tokens = re.split(r"(\s)", text(release, "nodes.txt"))
    # a node of another name is another node
    pairs = [n for n, token in enumerate(tokens) if "=" in token and not token.startswith("NodeName=")]
    at, word = data.draw(st.sampled_from(pairs)), data.draw(st.sampled_from(LATER))
    key, _, value = tokens[at].partition("=")
    if data.draw(st.booleans()):
        new = f"{word}={word}"
        tokens[at] = f"{tokens[at]} {new}"
        same = True
    else:
        tokens[at] = f"{key}={value if data.draw(st.booleans()) else ''}{word}"
        same = False
    before = idle(nodes_of(release, "fields"), ())
    try:
        now = idle(commands.parse_nodes("".join(tokens)), ())
    except ClusterUnavailable:
        assert not same, "a column more is none of our business"
        return
    assert now == before if same else all(n <= before.get(name, 0) for name, n in now.items()), tokens[at]


@given(st.sampled_from(RELEASES), st.sampled_from(["jobs", "nodes"]), st.data())
def test_a_missing_or_a_new_key_of_json_is_the_named_error_or_invents_nothing(
    release: str, kind: str, data: st.DataObject
) -> None:
    document = json.loads(text(release, f"{kind}.json"))
    row = data.draw(st.sampled_from(document[kind]))
    key = data.draw(st.sampled_from(sorted(row)))
    how = data.draw(st.sampled_from(["gone", "word", "words", "new"]))
    if how == "gone":
        del row[key]
    elif how == "new":
        row["of_tomorrow"] = {"set": True, "number": 3}
    else:
        word = data.draw(st.sampled_from(LATER))
        row[key] = word if how == "word" else [word]
    try:
        if kind == "jobs":
            jobs, before = json_output.parse_jobs(json.dumps(document)), jobs_of(release, "json")
            assert gpus_of(jobs) == gpus_of(before) or (how == "word" and key == "job_id"), key
        else:
            now, free = (
                idle(json_output.parse_nodes(json.dumps(document)), ()),
                idle(nodes_of(release, "json"), ()),
            )
            assert sum(now.values()) <= sum(free.values()), key
    except ClusterUnavailable:
        assert how != "new", "a key more is none of our business"
        assert key not in json_output._INFORMS


@pytest.mark.parametrize("key", ["job_id", "job_state", "tres_alloc_str", "node_count", "cpus"])
@pytest.mark.parametrize("release", RELEASES)
def test_a_key_of_json_that_safety_needs_and_that_is_gone_everywhere_stops_the_poll(
    release: str, key: str
) -> None:
    document = json.loads(text(release, "jobs.json"))
    assert any(key in row for row in document["jobs"])
    for row in document["jobs"]:
        row.pop(key, None)
    before = jobs_of(release, "json")
    try:
        jobs = json_output.parse_jobs(json.dumps(document))
    except ClusterUnavailable as error:
        assert key in f"{error}"  # noqa: PT017  another key may say the same
        return
    assert gpus_of(jobs) == gpus_of(before), "or another key says the same"
