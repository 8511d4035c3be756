"""Records what a real Slurm's commands print of one scene, for `tests/data/slurm`, to be read on machines without that release.

`python -m tests.cluster.record DIR` boots a private Slurm of the release at hand, plays the scene and writes into DIR. Texts are as printed
but for the mark, which is `MARK`; of JSON documents only the fields that we read are kept, of the configuration only the lines.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from scavenger.cluster.model import Job, JobFlag, JobState
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm import commands, json_output, runner
from scavenger.cluster.slurm.backend import SlurmCluster
from tests.clusters import layout_for_tests, wait_for

MARK = "xRECORDEDRECORDED"
_SLEEP = "sleep 300"
_JOB_KEYS = (
    "job_id",
    "job_state",
    "nodes",
    "node_count",
    "cpus",
    "tasks",
    "tres_alloc_str",
    "tres_per_job",
    "tres_per_node",
    "tres_per_task",
    "tres_per_socket",
    "gres_detail",
    "exit_code",
    "state_reason",
    "state_description",
    "restart_cnt",
    "priority",
    "submit_time",
    "eligible_time",
    "start_time",
    "end_time",
    "time_limit",
    "scheduled_nodes",
    "array_task_string",
    "comment",
    "user_name",
    "name",
    "partition",
    "account",
)
_NODE_KEYS = (
    "name",
    "state",
    "state_flags",
    "gres",
    "gres_used",
    "tres",
    "tres_used",
    "cpus",
    "alloc_cpus",
    "real_memory",
    "alloc_memory",
    "partitions",
)
_CONFIG = re.compile(
    r"^(?:ClusterName|SLURM_VERSION|PreemptType|KillWait|MessageTimeout|SchedulerParameters|PrivateData) *=.*\n",
    re.M,
)


def play(sandbox: SlurmSandbox) -> None:
    """The scene: on nodes node1 to node3 jobs that hold, wait for and have given back GPUs, each named after what it is; node0 drains."""
    cluster = SlurmCluster(sandbox.env)

    def submit(name: str, partition: str, script: str, *options: str) -> str:
        argv = ("sbatch", "--parsable", "-o", "/dev/null", "-J", name, "-p", partition, *options)
        return sandbox.run(*argv, stdin=f"#!/bin/bash\n{script}\n").strip()

    def is_now(name: str, state: JobState, *flags: JobFlag) -> None:
        def found() -> bool:
            return any(
                job.name == name and job.state is state and job.flags >= set(flags) for job in cluster.jobs()
            )

        wait_for(f"{name} is {state} {' '.join(flags)}".rstrip(), found)

    sandbox.run("scontrol", "update", "NodeName=node0", "State=DRAIN", "Reason=a new fan")
    submit("completed", "normal", "true")
    submit("failed", "normal", "exit 3")
    submit("killed", "normal", "kill -9 $$")
    is_now("completed", JobState.COMPLETED)
    is_now("failed", JobState.FAILED)
    is_now("killed", JobState.FAILED)
    submit(
        "two-nodes",
        "normal",
        _SLEEP,
        "-N",
        "2",
        "-w",
        "node[1-2]",
        "--gres=gpu:h100:2",
        "-t",
        "90",
        "--comment=a|b %i 'q' = é",
    )
    submit("preempted", "scavenge0", _SLEEP, "-w", "node3", "--gres=gpu:3")
    is_now("two-nodes", JobState.RUNNING)
    is_now("preempted", JobState.RUNNING)
    submit("preemptor", "normal", _SLEEP, "-w", "node3", "--gres=gpu:2")
    is_now("preemptor", JobState.RUNNING)
    is_now("preempted", JobState.PENDING)
    submit("waiting", "normal", _SLEEP, "-N", "3", "--gres=gpu:3", "--priority=900")
    submit("array", "normal", _SLEEP, "-H", "-a", "0-3", "--gres=gpu:1")
    sandbox.run("scancel", submit("cancelled-waiting", "normal", _SLEEP, "-H", "--gres=gpu:4"))
    stopped = submit("cancelled-running", "normal", _SLEEP, "-w", "node1", "--gres=gpu:1")
    is_now("cancelled-running", JobState.RUNNING)
    sandbox.run("scancel", stopped)
    is_now("cancelled-running", JobState.CANCELLED)
    ready = sandbox.dir / "completing.ready"  # a SIGTERM that came before the trap would end it
    stubborn = submit(
        "completing",
        "normal",
        f"trap '' TERM; touch {shlex.quote(str(ready))}; while :; do sleep 1; done",
        "-w",
        "node2",
        "--gres=gpu:1",
    )
    is_now("completing", JobState.RUNNING)
    wait_for("the job to ignore SIGTERM", ready.exists)
    sandbox.run("scancel", "--full", stubborn)
    is_now("completing", JobState.RUNNING, JobFlag.COMPLETING)


def texts(sandbox: SlurmSandbox) -> dict[str, str]:
    """What each command prints now, by file name."""
    env = {**sandbox.env, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C.UTF-8"}

    def said(*argv: str) -> str:
        done = runner.asked(argv, env, 20.0)
        assert done.returncode == 0, (argv, done.stderr)
        return done.stdout

    version = said(*commands.version_argv())
    return {
        "jobs.txt": said(*commands.squeue_argv(MARK)),
        "jobs.json": _kept(said(*json_output.jobs_argv()), "jobs", _JOB_KEYS),
        "nodes.txt": said(*commands.nodes_argv()),
        "nodes.json": _kept(
            said(*json_output.nodes_argv(commands.parse_version(version))), "nodes", _NODE_KEYS
        ),
        "partitions.txt": said(*commands.partitions_argv()),
        "reservations.txt": said(*commands.reservations_argv()),
        "config.txt": "".join(_CONFIG.findall(said(*commands.config_argv()))),
        "version.txt": version,
    }


def _kept(document: str, key: str, fields: tuple[str, ...]) -> str:
    whole: Mapping[str, Any] = msgspec.json.decode(document)
    rows = [{field: row[field] for field in fields if field in row} for row in whole[key]]
    return (
        msgspec.json.format(msgspec.json.encode({key: rows, "errors": whole["errors"]}), indent=1).decode()
        + "\n"
    )


def plain(job: Job) -> tuple[object, ...]:
    """What every release must say of a job of the scene: no id, no time but whether there is one, no words of a reason."""
    times = tuple(
        at > 0
        for at in (
            job.submit_time,
            job.start_time if job.has_gpus_allocated else 1,
            job.end_time if job.has_gpus_allocated else 1,
        )
    )
    state = (
        "ends" if JobFlag.COMPLETING in job.flags else job.state
    )  # JSON also says what it was, or will be; squeue's field does not
    return (
        job.name,
        job.user,
        job.partition,
        state,
        tuple(sorted(job.flags)),
        job.nodes,
        job.gpus,
        job.gpus_by_node,
        job.n_nodes,
        job.restart_count,
        job.comment,
        job.time_limit_s,
        job.exit_code,
        times,
        job.unread,
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    with SlurmSandbox(layout_for_tests()) as booted:
        play(booted)
        for file, text in texts(booted).items():
            (folder / file).write_text(text, encoding="utf-8")
