"""JSON of five Slurm releases says the same; a document that does not say everything is no observation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from scavenger.cluster.model import Job, JobState
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm import json_output
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.errors import ClusterUnavailable
from tests.clusters import wait_for

DATA = Path(__file__).resolve().parents[1] / "data/slurm_json"
VERSIONS = ("22.05", "23.02", "23.11", "24.11", "25.05")


def text(version: str, kind: str) -> str:
    return (DATA / f"{version}-{kind}.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("version", VERSIONS)
def test_jobs_are_read_alike_from_every_release(version: str) -> None:
    jobs = json_output.parse_jobs(text(version, "jobs"))
    assert jobs == json_output.parse_jobs(text("22.05", "jobs"))
    assert [job.job_id for job in jobs] == [1, *[2] * 10, 3, 4, 5, 6], (
        "a pending array is as many jobs as it has tasks"
    )
    two, array, endless, failed, killed, held = (
        next(job for job in jobs if job.job_id == n) for n in range(1, 7)
    )
    assert (two.state, two.gpus, two.gpus_by_node, two.time_limit_s) == (
        JobState.RUNNING,
        4,
        (("node1", 2), ("node2", 2)),
        5400,
    )
    assert (two.comment, two.name, two.user) == ('c "d"\té|', "two nodes", "ada")
    assert (array.state, array.gpus, array.reason) == (JobState.PENDING, 4, "Resources")
    assert (endless.time_limit_s, endless.end_time, endless.gpus_by_node) == (
        float("inf"),
        0,
        (("node3", 1),),
    )
    assert (failed.state, failed.exit_code, killed.exit_code) == (JobState.FAILED, 3, 137)
    assert (held.reason, held.gpus) == ("JobHeldUser", 4)


@pytest.mark.parametrize("version", VERSIONS[2:])
def test_where_backfill_expects_a_waiting_job_is_read_from_the_releases_that_say_it(version: str) -> None:
    document = json.loads(text(version, "jobs"))
    document["jobs"][-1]["scheduled_nodes"] = "node[1-2]"
    assert json_output.parse_jobs(json.dumps(document))[-1].planned == ("node1", "node2")


@pytest.mark.parametrize("version", VERSIONS)
def test_nodes_are_read_alike_from_every_release(version: str) -> None:
    nodes = json_output.parse_nodes(text(version, "nodes"))
    assert nodes == json_output.parse_nodes(text("22.05", "nodes"))
    assert {node.name: (node.gpus, node.gpus_allocated, node.usable) for node in nodes} == {
        "node0": (4, 0, True),
        "node1": (4, 2, True),
        "node2": (4, 2, True),
        "node3": (4, 1, False),
    }
    assert nodes[3].states == {"mixed", "drain"}
    assert (nodes[1].gpu_type, nodes[1].cpus, nodes[1].partitions) == ("h100", 64, {"normal", "scavenge"})


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["jobs", "nodes"])
def test_a_document_that_is_cut_off_or_lacks_a_field_is_no_observation(version: str, kind: str) -> None:
    parse = json_output.parse_jobs if kind == "jobs" else json_output.parse_nodes
    whole = text(version, kind)
    for end in range(0, len(whole) - 2, 997):
        with pytest.raises(ClusterUnavailable):
            parse(whole[:end])
    document = json.loads(whole)
    needed = {
        "jobs": ("job_state", "nodes", "restart_cnt", "user_name"),
        "nodes": ("state", "gres_used", "alloc_cpus"),
    }[kind]
    for key in needed:
        lacking = {**document, kind: [{k: v for k, v in row.items() if k != key} for row in document[kind]]}
        with pytest.raises(ClusterUnavailable, match=key):
            parse(json.dumps(lacking))
        wrong = {**document, kind: [{**row, key: [[]]} for row in document[kind]]}
        with pytest.raises(ClusterUnavailable):
            parse(json.dumps(wrong))
    for bad in (
        {**document, "errors": [{"error": "down"}]},
        {"meta": {}},
        {**document, kind: {}},
        {**document, kind: [1]},
        [],
    ):
        with pytest.raises(ClusterUnavailable):
            parse(json.dumps(bad))


@pytest.mark.parametrize(
    ("states", "read", "holds"),
    [
        (["RUNNING", "COMPLETING"], JobState.RUNNING, True),
        (["PENDING", "REQUEUED"], JobState.PENDING, False),
        (["NODE_FAIL", "REQUEUED"], JobState.NODE_FAIL, False),
        (["PREEMPTED", "COMPLETING"], JobState.PREEMPTED, True),
    ],
)
def test_a_list_of_states_is_a_state_and_its_flags(states: list[str], read: JobState, holds: bool) -> None:
    document = json.loads(text("24.11", "jobs"))
    document["jobs"] = [{**document["jobs"][0], "job_state": states}]
    [job] = json_output.parse_jobs(json.dumps(document))
    assert (job.state, job.has_gpus_allocated) == (read, holds)


@pytest.mark.parametrize(
    ("version", "command"),
    [("22.05.8", "sinfo"), ("23.02.1", "scontrol"), ("24.11.5", "scontrol"), ("25.05.0", "scontrol")],
)
def test_the_command_that_has_nodes_in_json_is_asked(version: str, command: str) -> None:
    assert json_output.nodes_argv(version)[0] == command


@pytest.mark.slurm
def test_on_a_real_slurm_json_says_what_fields_say_for_one_request_less(slurm_sandbox: SlurmSandbox) -> None:
    fields, as_json = SlurmCluster(slurm_sandbox.env), SlurmCluster(slurm_sandbox.env, output="json")
    for argv in (
        ["-p", "scavenge", "-N", "2", "--gres=gpu:2"],
        ["-p", "scavenge", "-a", "0-5", "--gres=gpu:4"],
        ["-p", "normal", "-H"],
    ):
        slurm_sandbox.run("sbatch", "-o", "/dev/null", *argv, stdin="#!/bin/bash\nsleep 60\n")
    array = slurm_sandbox.run(
        "sbatch", "--parsable", "-p", "normal", "-H", "-a", "0-9", "-o", "/dev/null", stdin="#!/bin/bash\n"
    ).strip()
    slurm_sandbox.run("scancel", array)
    wait_for("two run", lambda: sum(job.state is JobState.RUNNING for job in fields.jobs()) >= 2)

    differences: list[str] = []

    def plain(job: Job) -> Job:
        job = replace(job, planned=())  # 22.05's JSON does not say it
        return (
            job if job.has_gpus_allocated or job.waits else replace(job, cpus=0)
        )  # of a job cancelled while it waited they count differently

    def alike() -> bool:
        one, other = fields.view(), as_json.view()
        differences[:] = sorted(
            map(str, {*one.nodes, *map(plain, one.jobs)} ^ {*other.nodes, *map(plain, other.jobs)})
        )
        return not differences and (one.partitions, len(one.jobs)) == (other.partitions, len(other.jobs))

    try:
        wait_for("both say the same, once nothing changes between them", alike, 10.0)
    except AssertionError as error:
        raise AssertionError(f"{error}: {differences[:4]}") from error
    before = as_json.rpc.total
    as_json.view()
    assert as_json.rpc.total - before == 3
