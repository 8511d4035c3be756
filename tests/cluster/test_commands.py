"""Slurm's commands are built from fields, and what they print is read completely or not at all."""

from __future__ import annotations

import tracemalloc

import pytest

from scavenger.cluster.model import JobFlag, JobSpec, JobState, PreemptMode
from scavenger.cluster.slurm import commands
from scavenger.cluster.slurm import text as slurm_text
from scavenger.cluster.slurm.text import expand
from scavenger.errors import ClusterError, ClusterUnavailable

M = "xMARKMARKMARKMARK"
NODE = (
    "NodeName=node1 Arch=x86_64 CoresPerSocket=32  CPUAlloc=1 CPUEfctv=64 CPUTot=64 CPULoad=0.04 "
    "AvailableFeatures=(null) ActiveFeatures=(null) Gres=gpu:h100:4(S:0-1) GresDrain=N/A GresUsed=gpu:h100:2(IDX:0-1) "
    "NodeAddr=127.0.0.1 NodeHostName=h Port=24425 Version=22.05.8 OS=Linux 6.1 #1 SMP PREEMPT_DYNAMIC @0  "
    "RealMemory=1000000 AllocMem=512 FreeMem=23712 Sockets=2 Boards=1 State=MIXED+DRAIN ThreadsPerCore=1 TmpDisk=0 "
    "Weight=1 Owner=N/A MCS_label=N/A Partitions=reserved,scavenge  BootTime=1 SlurmdStartTime=1 LastBusyTime=1 "
    "CfgTRES=cpu=64,mem=1000000M,billing=64 AllocTRES=cpu=1 CapWatts=n/a Reason=bad Gres=gpu:9 [root@x]\n"
)
PARTITION = (
    "PartitionName=scavenge AllowGroups=ALL Default=YES QoS=N/A DefaultTime=01:00:00 GraceTime=5 Hidden=NO "
    "MaxTime=1-00:00:00 Nodes=node[0-3] PriorityJobFactor=1 PriorityTier=1 RootOnly=NO OverSubscribe=NO "
    "PreemptMode=REQUEUE State=UP TotalCPUs=256 TotalNodes=4 TRES=cpu=256\n"
)
CONFIG = (
    "Configuration data as of 1\nClusterName             = fake\nKillWait                = 30 sec\n"
    "MessageTimeout          = 10 sec\nPreemptType             = preempt/partition_prio\n"
    "SLURM_VERSION           = 22.05.8\nSlurmctldHost[0]        = h(127.0.0.1)\n"
)
JOB = {
    "JobID": "7",
    "UserName": "ada",
    "Partition": "scavenge",
    "Account": "physics",
    "State": "RUNNING",
    "RestartCnt": "2",
    "NumNodes": "2",
    "NumCPUs": "2",
    "NumTasks": "2",
    "PriorityLong": "4294901758",
    "SubmitTime": "1795242303",
    "EligibleTime": "1795242303",
    "StartTime": "1795242304",
    "EndTime": "1795245904",
    "TimeLimit": "1:00:00",
    "exit_code": "0",
    "tres-alloc": "cpu=2,node=2,billing=2",
    "tres-per-job": "N/A",
    "tres-per-node": "gres:gpu:4",
    "tres-per-socket": "N/A",
    "tres-per-task": "N/A",
    "NodeList": "node[1-2]",
    "SchedNodes": "(null)",
    "Reason": "None",
    "Name": "n",
    "Comment": "c",
}


def squeue(*jobs: dict[str, str]) -> str:
    return "".join("".join(value + M for value in {**JOB, **job}.values()) + "\n" for job in jobs)


def test_a_job_is_read_in_full() -> None:
    (job,) = commands.parse_jobs(squeue({}), M)
    assert (job.job_id, job.user, job.partition, job.state, job.flags) == (
        7,
        "ada",
        "scavenge",
        JobState.RUNNING,
        set(),
    )
    assert (job.gpus, job.gpus_by_node, job.nodes) == (8, (("node1", 4), ("node2", 4)), ("node1", "node2"))
    assert (job.restart_count, job.time_limit_s, job.start_time, job.reason) == (2, 3600, 1795242304, "")
    assert job.account == "physics"


@pytest.mark.parametrize("none", ["(null)", "", "N/A"])
def test_a_job_without_an_account_has_none(none: str) -> None:
    (job,) = commands.parse_jobs(squeue({"Account": none}), M)
    assert job.account == ""


def test_where_backfill_expects_a_waiting_job_is_read() -> None:
    (job,) = commands.parse_jobs(squeue({"State": "PENDING", "NodeList": "", "SchedNodes": "node[1-2,7]"}), M)
    assert (job.planned, job.nodes, job.gpus_by_node) == (("node1", "node2", "node7"), (), ())


def test_no_job_at_all_is_an_empty_queue() -> None:
    assert commands.parse_jobs("", M) == ()


@pytest.mark.parametrize(
    "evil", ["a\nb", "a|b", "%i", "\n8\n", "", " ", "x" * 5000, "8xMARKMARKMARKMAR", "é\u2028\x85"]
)
def test_what_users_write_cannot_break_or_forge_a_record(evil: str) -> None:
    jobs = commands.parse_jobs(squeue({"Name": evil, "Comment": evil}, {"JobID": "8"}), M)
    assert [(job.job_id, job.comment) for job in jobs] == [(7, evil), (8, "c")]


def test_a_truncated_or_malformed_queue_is_no_observation() -> None:
    whole = squeue({}, {"JobID": "8"})
    # every cut but the ones that leave whole records
    boundary = {0, len(squeue({})), len(squeue({})) - 1, len(whole) - 1}
    for end in set(range(len(whole))) - boundary:
        with pytest.raises(ClusterUnavailable):
            commands.parse_jobs(whole[:end], M)
    for bad in (
        {"JobID": "x"},
        {"State": "PONDERING"},
        {"NumTasks": "?"},
        {"NodeList": "node[1-"},
        {"RestartCnt": "?"},
    ):
        with pytest.raises(ClusterUnavailable):
            commands.parse_jobs(squeue(bad), M)


@pytest.mark.parametrize("state", list(JobState))
def test_every_state_is_read(state: JobState) -> None:
    assert slurm_text.parse_state(state) == (state, frozenset())


@pytest.mark.parametrize("flag", list(JobFlag))
def test_every_flag_is_read_and_stands_for_a_state_of_its_own(flag: JobFlag) -> None:
    state, flags = slurm_text.parse_state(flag)
    assert flags == {flag}
    ends = {JobState.COMPLETED, JobState.FAILED, JobState.NODE_FAIL, JobState.PREEMPTED}
    assert state not in ends  # a flag alone never says that a job is over
    assert slurm_text.parse_state(f"COMPLETED,{flag}") == (JobState.COMPLETED, {flag})


@pytest.mark.parametrize(
    ("fields", "gpus"),
    [
        ({"tres-alloc": "cpu=2,gres/gpu=6,gres/gpu:h100=6"}, 6),
        ({"tres-per-node": "N/A", "tres-per-job": "gres:gpu:3"}, 3),
        ({"tres-per-node": "gres:gpu:h100:2"}, 4),
        ({"tres-per-node": "gres:gpu"}, 2),
        ({"tres-per-node": "gres:gpu:a:1,gres:gpu:b:2,gres:shard:7"}, 6),
        ({"tres-per-node": "N/A", "tres-per-task": "gres:gpu:1"}, 2),
        ({"tres-per-node": "N/A"}, 0),
        ({"tres-per-node": "gres:gpu:2080ti:2"}, 4),
        ({"tres-per-node": "gres:gpu:2080ti"}, 2),
        ({"tres-per-node": "gres/gpu:3090=4"}, 8),
    ],
)
def test_gpus_are_counted_from_the_allocation_or_from_what_was_asked(
    fields: dict[str, str], gpus: int
) -> None:
    assert commands.parse_jobs(squeue(fields), M)[0].gpus == gpus


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30:00", 1800),
        ("1:00:00", 3600),
        ("2-03:04:05", 183845),
        ("1-00", 86400),
        ("5", 300),
        ("0:30", 30),
        ("UNLIMITED", float("inf")),
        ("NOT_SET", 0),
        ("N/A", 0),
        ("Partition_Limit", 0),
        ("INVALID", 0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert slurm_text.parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        ("0", 0),
        ("256", 1),
        ("768", 3),
        ("15", 143),
        ("9", 137),
        ("N/A", 0),
        ("0:0", 0),
        ("3:0", 3),
        ("0:9", 137),
        ("0:15", 143),
    ],
)
def test_exit_codes_are_the_shells(raw: str, code: int) -> None:
    assert commands.parse_jobs(squeue({"exit_code": raw}), M)[0].exit_code == code


def test_a_node_is_read_whatever_its_free_text_holds() -> None:
    (node,) = commands.parse_nodes(NODE)
    assert (node.name, node.gpu_type, node.gpus, node.gpus_allocated) == ("node1", "h100", 4, 2)
    assert (node.cpus, node.cpus_allocated, node.memory_mb, node.memory_allocated_mb) == (64, 1, 1000000, 512)
    assert node.partitions == {"reserved", "scavenge"}
    evil = (
        NODE.rstrip("\n") + " Comment=new dimm\n State=IDLE Gres=gpu:9\n\n"
    )  # 22.05.8 prints a comment's newlines as they are
    other = NODE.replace("NodeName=node1", "NodeName=node2")
    assert commands.parse_nodes(evil + other) == commands.parse_nodes(NODE + other)


def test_a_node_without_gpus_and_one_without_partitions_are_nodes() -> None:
    bare = NODE.replace("Gres=gpu:h100:4(S:0-1)", "Gres=(null)").replace(
        "GresUsed=gpu:h100:2(IDX:0-1)", "GresUsed=gpu:0"
    )
    (node,) = commands.parse_nodes(bare.replace("Partitions=reserved,scavenge ", ""))
    assert (node.gpus, node.gpus_allocated, node.partitions) == (0, 0, frozenset())


def test_a_truncated_node_list_is_no_observation() -> None:
    for text in ("", NODE[:-1], NODE + NODE[:200], NODE[:300] + "\n"):
        with pytest.raises(ClusterUnavailable):
            commands.parse_nodes(text)


@pytest.mark.parametrize(
    ("text", "states", "usable"),
    [
        ("IDLE", {"idle"}, True),
        ("MIXED", {"mixed"}, True),
        ("DOWN*", {"down", "not_responding"}, False),
        ("IDLE+DRAIN", {"idle", "drain"}, False),
        ("IDLE*", {"idle", "not_responding"}, False),
        ("IDLE~", {"idle", "powered_down"}, False),
        ("DOWN+NOT_RESPONDING", {"down", "not_responding"}, False),
        ("IDLE-", {"idle", "planned"}, True),
        ("IDLE+PLANNED", {"idle", "planned"}, True),
        ("MAINT$", {"maint"}, False),
    ],
)
def test_node_states_and_their_marks(text: str, states: set[str], usable: bool) -> None:
    (node,) = commands.parse_nodes(NODE.replace("State=MIXED+DRAIN", f"State={text}"))
    assert (node.states, node.usable) == (states, usable)


def test_a_partition_is_read() -> None:
    (part,) = commands.parse_partitions(PARTITION)
    assert (part.name, part.priority_tier, part.preempt_mode, part.grace_s) == (
        "scavenge",
        1,
        PreemptMode.REQUEUE,
        5,
    )
    assert (part.nodes, part.max_time_s, part.up) == ({"node0", "node1", "node2", "node3"}, 86400, True)
    gang = commands.parse_partitions(
        PARTITION.replace("REQUEUE", "GANG,SUSPEND").replace("State=UP", "State=DRAIN")
    )[0]
    assert (gang.preempt_mode, gang.up) == (PreemptMode.SUSPEND, False)


def test_the_configuration_is_read() -> None:
    info = commands.parse_info(CONFIG, user="ada")
    assert (info.name, info.version, info.kill_wait_s, info.message_timeout_s) == ("fake", "22.05.8", 30, 10)
    with pytest.raises(ClusterUnavailable, match="KillWait"):
        commands.parse_info(CONFIG.replace("KillWait", "Other"), user="ada")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ["a"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,2],m", ["n08", "n09", "n10", "n2", "m"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("n[1]-ib", ["n1-ib"]),
    ],
)
def test_host_lists(text: str, names: list[str]) -> None:
    assert expand(text) == names


ABSURD_LISTS = {
    "a product": "n[1-100000][1-100000]",
    "one part after the other": "n[" + ",".join(["1-90000"] * 50_000) + "]",
    "digits": f"n[{'9' * 5000}]",
    "other digits": "n[²]",
    "Arabic digits": "n[\u0661-\u0663]",
    "brackets": "n" + "[1]" * 5000,
    "a name": "n" * 300,
    "a long name by many": f"{'n' * 300}[1-100000]",
    "items": ",".join(["n[1-99999]"] * 1000),
}


@pytest.mark.parametrize("text", ABSURD_LISTS.values(), ids=ABSURD_LISTS)
def test_a_host_list_that_no_cluster_has_is_refused_before_it_is_built(text: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ClusterUnavailable, match="host"):
            expand(text)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("digits", ["9" * 5000, "\u0663" * 5000], ids=["ASCII", "Arabic"])
def test_numbers_that_no_counter_can_hold_are_no_observation(digits: str) -> None:
    for read in (slurm_text.parse_duration, slurm_text.count_tasks, slurm_text.count_gpus):
        with pytest.raises(ClusterUnavailable):
            read(digits if read is not slurm_text.count_gpus else f"gpu:{digits}")
    assert slurm_text.parse_tres(f"cpu={digits},gres/gpu=²,node=1") == {"node": 1}
    with pytest.raises(ClusterUnavailable, match="not a number"):
        commands.parse_jobs(squeue({"NumCPUs": digits}), M)


@pytest.mark.parametrize("text", ["n[1-", "n]1[", "n[3-1]", "n[a-b]", "a,,b", "n[0-99999999]"])
def test_malformed_host_lists_are_no_observation(text: str) -> None:
    with pytest.raises(ClusterUnavailable):
        expand(text)


def spec(**changes: object) -> JobSpec:
    fields: dict[str, object] = {
        "name": "n",
        "comment": "c",
        "partition": "p",
        "script": "#!/bin/sh\n",
    } | changes
    return JobSpec(**fields)  # type: ignore[arg-type]


def test_options_are_built_from_fields_and_the_environment_is_not_among_them() -> None:
    argv = commands.sbatch_argv(
        spec(
            gpus=2,
            gpu_type="h100",
            time_s=90,
            memory_mb=512,
            nice=10,
            nodelist=("a", "b"),
            exclude=("c",),
            account="acc",
            environment={"KEY": "secret"},
            comment="a 'b' $(c)",
        )
    )
    assert {
        "--gres=gpu:h100:2",
        "--time=2",
        "--mem=512M",
        "--nice=10",
        "--nodelist=a,b",
        "--exclude=c",
        "--account=acc",
        "--requeue",
        "--parsable",
        "--ignore-pbs",
        "--open-mode=append",
        "--comment=a 'b' $(c)",
    } <= set(argv)
    assert "secret" not in " ".join(argv)
    assert "--no-requeue" in commands.sbatch_argv(spec(requeue=False))
    assert "--begin=now+91" in commands.sbatch_argv(spec(begin_s=90.5))


def test_a_job_is_released_to_one_node_by_one_command() -> None:
    assert commands.release_argv(7, "n1") == [
        "scontrol",
        "update",
        "JobId=7",
        "StartTime=now",
        "ReqNodeList=n1",
    ]
    for bad in ("", "n1,n2", "n1 Priority=9", "n=1", "n\n1"):
        with pytest.raises(ClusterError):
            commands.release_argv(7, bad)


@pytest.mark.parametrize(
    "bad",
    [{"partition": ""}, {"name": ""}, {"comment": "a\nb"}, {"nodes": 0}, {"gpus": -1}, {"output": "a\0b"}],
)
def test_a_specification_that_slurm_would_misread_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ClusterError):
        commands.sbatch_argv(spec(**bad))


@pytest.mark.parametrize("name", ["SLURM_CONF", "SBATCH_PARTITION", "A B", "1A", ""])
def test_variables_that_would_steer_slurm_are_refused(name: str) -> None:
    with pytest.raises(ClusterError):
        commands.job_environment(spec(environment={name: "x"}))


def test_the_submitted_id_is_read_or_refused() -> None:
    assert commands.parse_submitted("123\n") == commands.parse_submitted("123;cluster\n") == 123
    for bad in ("", "Submitted batch job 123\n", "12 3\n"):
        with pytest.raises(ClusterUnavailable):
            commands.parse_submitted(bad)


@pytest.mark.parametrize(
    ("text", "step_s"),
    [
        ("", 60),
        ("(null)", 60),
        ("defer,bf_interval=5", 60),
        ("bf_interval=5,bf_resolution=600", 600),
        ("bf_resolution=0", 60),
    ],
)
def test_the_steps_in_which_backfill_counts_are_read(text: str, step_s: float) -> None:
    stdout = f"{CONFIG}SchedulerParameters     = {text}\n"
    assert commands.parse_info(stdout, user="u").plan_step_s == step_s


@pytest.mark.parametrize(
    ("gres", "used", "tracked", "allocated", "gpus_used"),
    [
        ("gpu:h100:4,shard:h100:16", "gpu:h100:1(IDX:3),shard:h100:0(IDX:N/A)", "", "", 1),
        ("gpu:h100:4,shard:h100:16", "gpu:h100:1(IDX:3),shard:h100:5(IDX:0-1)", "", "", 3),
        ("gpu:h100:4,shard:16", "gpu:h100:0(IDX:N/A),shard:5(4/4,0/4,1/4,0/4)", "", "", 2),
        ("gpu:2,mps:200", "gpu:0(IDX:N/A),mps:150(IDX:0,1)", "", "", 2),
        ("gpu:2,shard:8", None, "cpu=8,gres/gpu=2,gres/shard=8", "cpu=1,gres/shard=5", 2),
        ("gpu:2,shard:8", None, "cpu=8,gres/gpu=2,gres/shard=8", "cpu=1,gres/gpu=1,gres/shard=1", 2),
    ],
)
def test_a_gpu_of_which_a_share_is_in_use_is_not_idle(
    gres: str, used: str | None, tracked: str, allocated: str, gpus_used: int
) -> None:
    found = slurm_text.node_gpus(gres, used, tracked, allocated)
    assert (found.used, found.unread) == (gpus_used, ())


def test_shares_of_unknown_gpus_leave_none_idle() -> None:
    found = slurm_text.node_gpus("gpu:h100:2,shard:8", "gpu:h100:0(IDX:N/A),shard:3", "", "")
    assert (found.used, [one.field for one in found.unread]) == (2, ["GresUsed"])


@pytest.mark.parametrize(
    "text", ["gres:shard:8", "gres/shard:8", "gres/shard=8", "gres:mps:50", "gres:shard:h100:2"]
)
def test_a_job_that_asks_for_a_share_counts_as_one_gpu_on_each_node(text: str) -> None:
    assert slurm_text.job_gpus(slurm_text.RequestedTres("cpu=2,node=2", "", text, "", ""), 2, 2) == 2
    assert (
        slurm_text.job_gpus(slurm_text.RequestedTres("cpu=2,node=2", "", "gres:craynetwork:4", "", ""), 2, 2)
        == 0
    )
