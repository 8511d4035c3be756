"""Each check of `scavenger doctor`, with each of its outcomes, on a recorded site with one thing changed."""

from __future__ import annotations

import re
from dataclasses import replace

import msgspec
import pytest

from scavenger.cluster.preemption_notice import notice
from scavenger.doctor import findings
from scavenger.doctor.facts import ASSOCIATION_LIMITS, CommandOutput, SiteFacts, SiteRequirements
from scavenger.doctor.findings import Level, SiteFinding
from scavenger.doctor.rules import limits, preemption, run
from scavenger.doctor.rules import site as rules_site
from tests.doctor.site import AT, DATA, NAMES, WANTED, qos_lines, site

OK, WARNING, PROBLEM, UNKNOWN = Level.OK, Level.WARNING, Level.PROBLEM, Level.UNKNOWN
NO_MEMORY = {"nodes": ("RealMemory=1000000", "RealMemory=1")}
ACCOUNTS = {"partitions": ("AllowAccounts=ALL", "AllowAccounts=ml,bio")}
BARE = "node=n1\nstate_dir=ok\ngpu=ok\npython=ok\nslurmctld=ok\nstep=ok\nport=ok\nrequeue=ok\n"
NO_TORCH = "engine.reference=/opt/python cannot import torch: ModuleNotFoundError: No module named 'torch'\n"
NO_VLLM = "engine.vllm=/opt/python cannot import vllm: OSError: libcudart.so.13\n"
SEEN = (
    "node=n1\nstate_dir=ok\ngpu=ok\npython=ok\nengine.reference=ok\nengine.vllm=ok\nslurmctld=ok\nstep=ok\n"
)


def elsewhere(nodes: str) -> str:
    """The recorded nodes, each on a host of its own."""
    return re.sub(
        r"NodeName=(\w+)(.*?)NodeAddr=\S+ NodeHostName=\S+",
        r"NodeName=\1\2NodeAddr=10.0.0.1 NodeHostName=\1",
        nodes,
    )


DBD = {"AccountingStorageType": "accounting_storage/slurmdbd"}
BY_QOS = {**DBD, "PreemptType": "preempt/qos"}
ELSEWHERE = site(answers={"nodes": CommandOutput(elsewhere((DATA / "nodes.txt").read_text()))})
QOS_LOW = replace(WANTED, qos="low")
ENFORCED = {**DBD, "AccountingStorageEnforce": "associations,limits"}
LOW = "low||cluster|00:00:00||0.000000||||"
BOUND = "low||cluster|00:00:00||0.000000|gres/gpu=64|||"
NORMAL = "normal|low|cluster|00:00:00||1.000000||||"


def accounts(*rows: str, default: str = "ours") -> dict[str, CommandOutput]:
    """'ACCOUNT USER PARENT' and limits, '-' for nothing, as sacctmgr prints associations."""
    lines = []
    for row in rows:
        account, user, parent, *limits = row.split()
        told = dict(limit.split("=", 1) for limit in limits)
        named = [account, user.strip("-"), parent.strip("-")]
        lines.append("|".join([*named, *(told.get(limit, "") for limit in ASSOCIATION_LIMITS)]))
    return {
        "associations": CommandOutput("\n".join(lines) + "\n"),
        "engines admin": CommandOutput(f"scavenger|{default}|None\n"),
    }


TREE = ("root - -", "science - root GrpTRES=gres/gpu=8", "ours - science", "ours scavenger -")


def found(name: str, facts: SiteFacts, wanted: SiteRequirements = WANTED) -> SiteFinding:
    (one,) = [one for one in run.judge(facts, wanted) if one.check == name]
    return one


CASES = [
    # version
    ("version", site(), WANTED, OK, "22.05.8"),
    (
        "version",
        site({"SLURM_VERSION": "21.08.1"}, replace={"client": ("22.05.8", "21.08.1")}),
        WANTED,
        WARNING,
        "older than 22.05",
    ),
    (
        "version",
        site(replace={"client": ("22.05.8", "24.11.3")}),
        WANTED,
        PROBLEM,
        "newer than the controller's",
    ),
    # queue
    ("queue", site(), WANTED, OK, "14 jobs and 4 nodes of Slurm 22.05.8 are read"),
    (
        "queue",
        site(replace={"queue": ("RUNNING", "ASLEEP")}),
        WANTED,
        PROBLEM,
        "Slurm 22.05.8 says of its queue",
    ),
    ("queue", site(replace={"queue": ("RUNNING", "ASLEEP")}), WANTED, PROBLEM, "ASLEEP"),
    ("queue", site(answers={"queue": CommandOutput("half a record")}), WANTED, PROBLEM, "truncated"),
    ("queue", site(answers={"queue": CommandOutput(error="squeue: it hangs")}), WANTED, UNKNOWN, "it hangs"),
    # pyslurm
    ("pyslurm", site(), WANTED, OK, "not installed"),
    ("pyslurm", site(pyslurm="22.5.3"), WANTED, OK, "matches"),
    ("pyslurm", site(pyslurm="25.11.0"), WANTED, WARNING, "does not match"),
    ("pyslurm", site({"SLURM_VERSION": "24.11.3"}, pyslurm="24.11.0"), WANTED, OK, "reads this site"),
    (
        "pyslurm",
        site({"SLURM_VERSION": "25.11.3"}, pyslurm="25.11.0", pyslurm_unfit="pyslurm 25.11.0 has no node"),
        WANTED,
        WARNING,
        "Slurm's commands instead: pyslurm 25.11.0 has no node",
    ),
    # clock
    ("clock", site(asked_at=AT + 2), WANTED, OK, "agree"),
    ("clock", site(asked_at=AT - 60), WANTED, WARNING, "-60 s off"),
    ("clock", site(asked_at=AT + 600), WANTED, PROBLEM, "+600 s off"),
    # preemption
    (
        "preemption",
        site(
            replace={
                "partitions": (
                    "Nodes=node[1-3] PriorityJobFactor=1 PriorityTier=1 ",
                    "Nodes=node[1-3] PriorityTier=2 ",
                )
            }
        ),
        replace(WANTED, partition="scavenge"),
        PROBLEM,
        "not below that of",
    ),
    (
        "preemption",
        site(replace={"partitions": ("PartitionName=normal ", "PartitionName=scavenge9 PriorityTier=0 ")}),
        replace(WANTED, partition="scavenge9"),
        PROBLEM,
        "not preemptible",
    ),
    ("preemption", site({"PreemptType": "preempt/none"}), WANTED, PROBLEM, "preempts nothing"),
    ("preemption", site(BY_QOS, answers=qos_lines(LOW, NORMAL)), QOS_LOW, OK, "QOS 'low' decides"),
    # preempt mode
    ("preempt mode", site(), WANTED, OK, "keeps its id"),
    (
        "preempt mode",
        site(replace={"partitions": ("PreemptMode=REQUEUE", "PreemptMode=CANCEL")}),
        WANTED,
        WARNING,
        "never come back",
    ),
    (
        "preempt mode",
        site(replace={"partitions": ("PreemptMode=REQUEUE", "PreemptMode=SUSPEND")}),
        WANTED,
        PROBLEM,
        "memory",
    ),
    (
        "preempt mode",
        site(replace={"partitions": ("PreemptMode=REQUEUE", "PreemptMode=OFF")}),
        WANTED,
        PROBLEM,
        "not preempted at all",
    ),
    (
        "preempt mode",
        site(BY_QOS, answers=qos_lines(LOW.replace("cluster", "cancel"), NORMAL)),
        QOS_LOW,
        WARNING,
        "CANCEL",
    ),
    # exempt time
    ("exempt time", site(), WANTED, OK, "first second"),
    ("exempt time", site({"PreemptExemptTime": "00:10:00"}), WANTED, PROBLEM, "600 s"),
    ("exempt time", site({"PreemptExemptTime": "-1"}), WANTED, OK, "first second"),
    (
        "exempt time",
        site(BY_QOS, answers=qos_lines("low||cluster|00:00:00|00:05:00|0||||", NORMAL)),
        QOS_LOW,
        PROBLEM,
        "300 s",
    ),
    # notice, and the bound on a hung worker
    ("notice", site(), WANTED, OK, "SIGKILL 10 s later"),
    (
        "notice",
        site({"KillWait": "1 sec"}),
        replace(WANTED, partition="scavenge0"),
        WARNING,
        "SIGKILL 1 s later",
    ),
    ("notice", site({"KillWait": "30 sec", "MessageTimeout": "10 sec"}), WANTED, OK, "SIGKILL 40 s later"),
    (
        "notice",
        site(BY_QOS, answers=qos_lines(LOW.replace("00:00:00", "00:01:00"), NORMAL)),
        QOS_LOW,
        OK,
        "60 s later",
    ),
    ("hung worker", site(), WANTED, OK, "42 s at most"),
    (
        "hung worker",
        site(replace={"partitions": ("GraceTime=10", "GraceTime=600")}),
        WANTED,
        WARNING,
        "632 s at most",
    ),
    # requeue
    ("requeue", site(), WANTED, OK, "JobRequeue=1"),
    ("requeue", site({"JobRequeue": "0"}), WANTED, OK, "--requeue, which overrides"),
    ("requeue", site({"RequeueExitHold": "60-80,142"}), WANTED, PROBLEM, "[75]"),
    ("requeue delay", site(), WANTED, OK, "after 6 s"),
    ("requeue delay", site({"AuthInfo": "(null)"}), WANTED, WARNING, "after 121 s"),
    ("requeue delay", site({"AuthInfo": "cred_expire=x"}), WANTED, UNKNOWN, "no number"),
    # qos
    ("qos", site(), WANTED, OK, "no slurmdbd"),
    ("qos", site(DBD, answers=qos_lines(LOW, NORMAL)), WANTED, WARNING, "harvest.qos is empty"),
    ("qos", site(BY_QOS, answers=qos_lines(LOW, NORMAL)), WANTED, PROBLEM, "harvest.qos is empty"),
    ("qos", site(BY_QOS, answers=qos_lines(LOW, NORMAL)), QOS_LOW, OK, "UsageFactor=0"),
    (
        "qos",
        site({**BY_QOS, "AccountingStorageEnforce": "associations"}, answers=qos_lines(BOUND, NORMAL)),
        QOS_LOW,
        WARNING,
        "MaxTRESPU=gres/gpu=64; AccountingStorageEnforce has no `limits`, so Slurm enforces none",
    ),
    (
        "qos",
        site({**BY_QOS, "AccountingStorageEnforce": "limits,qos"}, answers=qos_lines(BOUND, NORMAL)),
        QOS_LOW,
        OK,
        "MaxTRESPU=gres/gpu=64; UsageFactor=0",
    ),
    (
        "qos",
        site(BY_QOS, answers=qos_lines(LOW, NORMAL)),
        replace(WANTED, qos="lower"),
        PROBLEM,
        "no QOS 'lower'",
    ),
    (
        "qos",
        site(BY_QOS, answers=qos_lines(LOW, NORMAL.replace("low", ""))),
        QOS_LOW,
        PROBLEM,
        "no QOS may preempt",
    ),
    (
        "qos",
        site(BY_QOS, answers=qos_lines(LOW, NORMAL, "long||cluster|00:00:00||1||||")),
        QOS_LOW,
        WARNING,
        "long may not",
    ),
    (
        "qos",
        site(BY_QOS, answers=qos_lines(LOW.replace("0.0000", "1.0000"), NORMAL)),
        QOS_LOW,
        WARNING,
        "UsageFactor=1",
    ),
    (
        "qos",
        site(BY_QOS, answers={"qos": CommandOutput(error="sacctmgr: slurmdbd is down")}),
        QOS_LOW,
        UNKNOWN,
        "slurmdbd is down",
    ),
    # account limits
    ("account limits", site(), WANTED, OK, "no slurmdbd"),
    ("account limits", site({**DBD, "AccountingStorageEnforce": "none"}), WANTED, OK, "none of an account"),
    (
        "account limits",
        site(ENFORCED, answers=accounts(*TREE)),
        WANTED,
        OK,
        "GrpTRES=gres/gpu=8 of account science",
    ),
    (
        "account limits",
        site(
            ENFORCED, answers=accounts(*TREE, "theirs - science", "theirs ann -", "far - root", "far bob -")
        ),
        WANTED,
        WARNING,
        "GrpTRES=gres/gpu=8 of account science is also that of ann, whose jobs",
    ),
    (
        "account limits",
        site(ENFORCED, answers=accounts(*TREE, "ours ann - MaxJobs=1")),
        replace(WANTED, account="ours"),
        WARNING,
        "that of ann",
    ),
    (
        "account limits",
        site(
            ENFORCED,
            answers=accounts("root - -", "ours - root", "ours scavenger - MaxSubmit=2", "ours ann -"),
        ),
        WANTED,
        OK,
        "MaxSubmit=2 of scavenger",
    ),
    (
        "account limits",
        site(ENFORCED, answers=accounts("root - -", "ours - root", "ours scavenger -")),
        WANTED,
        OK,
        "account ours has no limit",
    ),
    (
        "account limits",
        site(ENFORCED, answers=accounts(*TREE)),
        replace(WANTED, account="x"),
        PROBLEM,
        "not in account 'x'",
    ),
    (
        "account limits",
        site(ENFORCED, answers=accounts("root - -", default="")),
        WANTED,
        PROBLEM,
        "not in account ''",
    ),
    (
        "account limits",
        site(ENFORCED, answers={**accounts(*TREE), "associations": CommandOutput(error="slurmdbd is down")}),
        WANTED,
        UNKNOWN,
        "slurmdbd is down",
    ),
    (
        "account limits",
        site(ENFORCED, answers={**accounts(*TREE), "associations": CommandOutput("what?\n")}),
        WANTED,
        UNKNOWN,
        "printed 'what?'",
    ),
    # private data
    ("private data", site(), WANTED, OK, "visible"),
    ("private data", site({"PrivateData": "cloud,usage"}), WANTED, OK, "visible"),
    ("private data", site({"PrivateData": "jobs,usage"}), WANTED, WARNING, "hides jobs of other users"),
    ("private data", site({"PrivateData": "reservations"}), WANTED, WARNING, "once one has begun"),
    ("private data", site({"PrivateData": "jobs,nodes"}), WANTED, PROBLEM, "does not start"),
    (
        "private data",
        site({"PrivateData": "jobs"}, answers={"admin": CommandOutput("scavenger|Operator\n")}),
        WANTED,
        OK,
        "scavenger is Operator",
    ),
    (
        "private data",
        site({"PrivateData": "jobs"}, answers={"admin": CommandOutput("scavenger-view|Operator\n")}),
        replace(WANTED, viewer="scavenger-view"),
        OK,
        "shows it to the daemon alone",
    ),
    # engines' user
    ("engines' user", site(), WANTED, OK, "this user's own"),
    ("engines' user", site(), replace(WANTED, shared=True), WARNING, "can read its keys and ledger"),
    (
        "engines' user",
        site(),
        replace(WANTED, shared=True, user="scavenger-engines", daemon_user="scavenger"),
        OK,
        "the daemon as scavenger: they cannot read",
    ),
    (
        "engines' user",
        site(answers={"engines admin": CommandOutput("scavenger-engines|Administrator\n")}),
        replace(WANTED, user="scavenger-engines", daemon_user="scavenger"),
        WARNING,
        "may cancel every job",
    ),
    # gpus
    ("gpus", site({"AccountingStorageTRES": "cpu,mem,gres/gpu"}), WANTED, OK, "12 GPUs"),
    ("gpus", site(), WANTED, WARNING, "lacks gres/gpu"),
    ("gpus", site(), replace(WANTED, gpu_type="a100"), PROBLEM, "its GPU types: h100"),
    ("gpus", site(), replace(WANTED, partition="nowhere"), UNKNOWN, "no partition nowhere"),
    # partition limits
    ("partition limits", site(), WANTED, OK, "is up"),
    (
        "partition limits",
        site(replace={"partitions": ("MaxTime=UNLIMITED", "MaxTime=00:30:00")}),
        WANTED,
        PROBLEM,
        "30 min",
    ),
    (
        "partition limits",
        site(replace={"partitions": ("State=UP", "State=DOWN")}),
        WANTED,
        PROBLEM,
        "State=DOWN",
    ),
    ("partition limits", site(replace=ACCOUNTS), WANTED, PROBLEM, "AllowAccounts=ml,bio"),
    ("partition limits", site(replace=ACCOUNTS), replace(WANTED, account="ml"), OK, "is up"),
    (
        "partition limits",
        site(replace={"partitions": ("ReqResv=NO", "ReqResv=YES")}),
        WANTED,
        PROBLEM,
        "ReqResv=YES",
    ),
    ("partition limits", site(), replace(WANTED, partition="nowhere"), UNKNOWN, "no partition nowhere"),
    # the others
    ("enforce limits", site({"EnforcePartLimits": "ALL"}), WANTED, OK, "refused when it is submitted"),
    ("enforce limits", site(), WANTED, WARNING, "stays pending"),
    ("exclusive nodes", site(), WANTED, OK, "shared"),
    (
        "exclusive nodes",
        site(replace={"partitions": ("OverSubscribe=NO", "OverSubscribe=EXCLUSIVE")}),
        WANTED,
        WARNING,
        "whole node",
    ),
    ("exclusive nodes", site({"SelectType": "select/linear"}), WANTED, WARNING, "select/linear"),
    # 26.05 prints this one word in the place of ExclusiveUser and ExclusiveTopo, also where OverSubscribe=EXCLUSIVE was set
    (
        "exclusive nodes",
        site(replace={"partitions": ("ExclusiveUser=NO", "Exclusive=NO")}),
        WANTED,
        OK,
        "shared",
    ),
    (
        "exclusive nodes",
        site(replace={"partitions": ("ExclusiveUser=NO", "Exclusive=NODE")}),
        WANTED,
        WARNING,
        "Exclusive=NODE",
    ),
    ("shape", site(), replace(WANTED, cpus=16, memory_mb=250000), OK, "within"),
    ("shape", site(), replace(WANTED, cpus=17), OK, "its GPU's share instead, 16 CPUs on "),
    ("shape", site(), replace(WANTED, cpus=17, pinned=False), WARNING, "strand GPUs"),
    ("shape", site(), replace(WANTED, memory_mb=250001), WARNING, "get no engine"),
    (
        "shape",
        site({"SelectTypeParameters": "CR_CORE"}, replace=NO_MEMORY),
        replace(WANTED, memory_mb=8000),
        OK,
        "8000 MiB",
    ),
    (
        "shape",
        site({"SelectTypeParameters": "CR_CORE_MEMORY"}),
        WANTED,
        OK,
        "1 CPU and its GPUs' share of a node's memory",
    ),
    (
        "shape",
        site({"SelectTypeParameters": "CR_CORE_MEMORY"}, replace=NO_MEMORY),
        WANTED,
        PROBLEM,
        "whole node's memory",
    ),
    ("shape", site({"SelectTypeParameters": "CR_CORE"}, replace=NO_MEMORY), WANTED, OK, "the default memory"),
    ("shape", site(), replace(WANTED, partition="nowhere"), UNKNOWN, "no partition nowhere"),
    ("shape", site(replace={"nodes": ("Gres=gpu:h100:4", "Gres=(null)")}), WANTED, UNKNOWN, "shows GPUs"),
    ("rate limit", site(), WANTED, OK, "no rl_enable"),
    ("rate limit", site(), WANTED, OK, "2 commands, 4 requests, every 60 s"),
    ("rate limit", site({"SlurmctldParameters": "rl_enable"}), WANTED, OK, "120 RPCs a minute"),
    ("rate limit", site({"SlurmctldParameters": "rl_enable,rl_bucket_size=4"}), WANTED, WARNING, "4 at once"),
    (
        "rate limit",
        site({"SlurmctldParameters": "rl_enable,rl_refill_period=30"}),
        WANTED,
        WARNING,
        "4 RPCs a minute",
    ),
    ("job purge", site(), WANTED, OK, "MinJobAge=300"),
    ("job purge", site({"MinJobAge": "10 sec"}), WANTED, WARNING, "not seen"),
    ("mpi", site(), WANTED, OK, "pmix"),
    (
        "mpi",
        site(answers={"mpi": CommandOutput("MPI plugin types are...\n\tnone\n\tpmi2\n")}),
        WANTED,
        WARNING,
        "mpirun",
    ),
    (
        "daemon address",
        site(),
        replace(WANTED, host="head", listen="127.0.0.1"),
        OK,
        "all of them on this host",
    ),
    ("daemon address", ELSEWHERE, replace(WANTED, host="head"), OK, "at head, to 3 nodes on other hosts"),
    (
        "daemon address",
        ELSEWHERE,
        replace(WANTED, host="head", listen="127.0.0.1"),
        PROBLEM,
        "daemon.listen = '127.0.0.1'",
    ),
    (
        "daemon address",
        ELSEWHERE,
        replace(WANTED, host="head", advertise="localhost"),
        PROBLEM,
        "daemon.advertise = 'localhost'",
    ),
    (
        "daemon address",
        ELSEWHERE,
        replace(WANTED, host="head", listen="127.0.0.1", advertise="gateway"),
        WARNING,
        "a proxy or a tunnel must take them",
    ),
    (
        "daemon address",
        replace(ELSEWHERE, own_addresses=frozenset({"10.0.0.1"})),
        replace(WANTED, host="head", listen="127.0.0.1"),
        OK,
        "all of them on this host",
    ),
    ("compute node", site(), WANTED, UNKNOWN, "not tried"),
    (
        "compute node",
        site(probe=CommandOutput(error="job 7 was PENDING")),
        WANTED,
        PROBLEM,
        "job 7 was PENDING",
    ),
    (
        "compute node",
        site(probe=CommandOutput(error="job 7 was PENDING", remedy="ask again")),
        WANTED,
        UNKNOWN,
        "job 7 was PENDING",
    ),
    ("compute node", site(probe=CommandOutput(SEEN + "port=ok\nrequeue=ok\n")), WANTED, OK, "on n1"),
    (
        "compute node",
        site(probe=CommandOutput(SEEN + "port=h:1 cannot be reached\n")),
        WANTED,
        PROBLEM,
        "port: h:1",
    ),
    ("compute node", site(probe=CommandOutput(BARE + NO_TORCH + NO_VLLM)), WANTED, PROBLEM, "import torch"),
    ("compute node", site(probe=CommandOutput(BARE)), WANTED, PROBLEM, "did not say whether"),
    (
        "compute node",
        site(probe=CommandOutput(BARE + "engine.reference=ok\n" + NO_VLLM)),
        WANTED,
        OK,
        "engine vllm: /opt/python cannot import vllm: OSError: libcudart.so.13",
    ),
    (
        "compute node",
        site(probe=CommandOutput(BARE + NO_VLLM)),
        replace(WANTED, engine="vllm"),
        PROBLEM,
        "on n1, engine vllm: /opt/python cannot import vllm",
    ),
    (
        "compute node",
        site(probe=CommandOutput(BARE + "engine.reference=ok\n" + NO_VLLM)),
        replace(WANTED, engine="vllm"),
        PROBLEM,
        "cannot import vllm",
    ),
    (
        "compute node",
        site(
            probe=CommandOutput(SEEN.replace("ctld=ok", "ctld=ctl:6817: refused") + "port=ok\nrequeue=ok\n")
        ),
        WANTED,
        PROBLEM,
        "slurmctld: ctl:6817: refused",
    ),
    (
        "compute node",
        site(probe=CommandOutput(SEEN + "port=ok\nrequeue=ok\nreach t1:7=ok\nreach t2:7=t2:7 cannot\n")),
        WANTED,
        PROBLEM,
        "on n1, t2:7 cannot be reached",
    ),
    (
        "compute node",
        site(probe=CommandOutput(SEEN + "port=ok\nrequeue=ok\nreach t1:7=ok\nreach t2:7=refused\n")),
        WANTED,
        OK,
        "1 of 2 further ports answered, t2:7 refused",
    ),
]


def test_an_import_that_is_missing_is_told_once_with_what_installs_it() -> None:
    one = found("compute node", site(probe=CommandOutput(BARE + NO_TORCH + NO_VLLM)))
    assert "scavenger[trainer]" in one.remedy
    assert "scavenger[vllm]" in one.remedy
    broken = BARE.replace("python=ok", "python=No module named 'scavenger'")
    one = found("compute node", site(probe=CommandOutput(broken)))
    assert "engine" not in one.observed, "without our own package nothing else is said of that Python"


def test_imports_that_took_too_long_are_not_called_missing() -> None:
    slow = "engine.reference=its imports took longer than 120 s\n"
    one = found("compute node", site(probe=CommandOutput(BARE + slow)))
    assert (one.level, "took longer" in one.observed) == (PROBLEM, True)
    assert "ask again" in one.remedy
    assert "install" not in one.remedy
    one = found("compute node", site(probe=CommandOutput(BARE + slow + NO_VLLM)))
    assert "ask again" in one.remedy
    assert "scavenger[vllm]" in one.remedy
    ours = BARE.replace("python=ok", "python=its imports took longer than 120 s")
    one = found("compute node", site(probe=CommandOutput(ours)))
    assert "ask again" in one.remedy
    assert "install" not in one.remedy


IDS = [f"{case[0]}-{case[3]}-{number}" for number, case in enumerate(CASES)]


@pytest.mark.parametrize(("name", "facts", "wanted", "level", "text"), CASES, ids=IDS)
def test_a_check_s_outcome(
    name: str, facts: SiteFacts, wanted: SiteRequirements, level: Level, text: str
) -> None:
    one = found(name, facts, wanted)
    assert one.level is level, one
    assert text in one.observed, one
    assert one.remedy or level is OK, "what is not well has a remedy"


def test_preemption_by_partition_is_well_where_ours_is_below_all_others() -> None:
    alone = site(
        replace={
            "partitions": (
                "PartitionName=scavenge0 AllowGroups",
                "PartitionName=scavenge0 PriorityTier=2 AllowGroups",
            )
        }
    )
    assert found("preemption", alone).level is OK


def test_every_check_has_at_least_two_outcomes_here_and_its_own_name() -> None:
    for name, rule in run.RULES:
        assert len({case[3] for case in CASES if case[0] == name}) >= 2, name
        assert (
            rule in vars(rules_site).values()
            or rule in vars(limits).values()
            or rule in vars(preemption).values()
        )
    assert {case[0] for case in CASES} == {name for name, _ in run.RULES}


def test_a_site_that_answers_nothing_is_unknown_in_every_line_and_never_well() -> None:
    silent = SiteFacts({name: CommandOutput(error="scontrol gave no answer within 20 s") for name in NAMES})
    assert {one.level for one in run.judge(silent, WANTED)} == {UNKNOWN}
    assert findings.exit_code(run.judge(silent, WANTED)) == 1


def test_a_setting_that_this_slurm_does_not_have_is_unknown_and_not_its_default() -> None:
    one = found("requeue", site({"JobRequeue": None}))
    assert (one.level, "no JobRequeue" in one.observed) == (UNKNOWN, True)


def test_exit_codes_are_the_worst_finding_s() -> None:
    def code(*levels: Level) -> int:
        return findings.exit_code([SiteFinding("x", level, "y") for level in levels])

    assert [code(OK), code(OK, WARNING), code(OK, UNKNOWN), code(WARNING, PROBLEM, OK), code()] == [
        0,
        1,
        1,
        2,
        0,
    ]


def test_json_has_what_the_lines_have() -> None:
    told = run.judge(site(), WANTED)
    read = msgspec.json.decode(findings.as_json(told))
    assert read["exit_code"] == findings.exit_code(told)
    assert [one["check"] for one in read["findings"]] == [name for name, _ in run.RULES]
    text = "\n".join(findings.lines(told))
    assert all(one["check"] in text for one in read["findings"])
    assert all(len(line) <= 120 for line in findings.lines(told))


@pytest.mark.parametrize(("grace_s", "least_s", "most_s"), [(0, 30, 40), (10, 40, 100), (60, 60, 120)])
def test_the_notice_with_slurm_s_defaults(grace_s: float, least_s: float, most_s: float) -> None:
    """KillWait=30, MessageTimeout=10: without grace KILL comes after KillWait, with it after the longer of both and a check of limits."""
    got = notice(grace_s, 30, 10)
    assert (got.least_s, got.most_s) == (least_s, most_s)


def test_operator_rights_are_named_last_where_jobs_are_hidden() -> None:
    """Of the daemon's user, and of the engines': whoever got out of one would be an operator."""
    one = found("private data", site({"PrivateData": "jobs,usage"}), WANTED)
    told = [
        one.remedy.index(word)
        for word in ("out of PrivateData", "AllowAccounts", "cluster.view_socket", "coordinator", "operator")
    ]
    assert told == sorted(told)
    assert "adminlevel=operator" not in one.remedy
    assert "cancel every job" in one.remedy


def test_slurmctld_is_reached_by_the_address_of_slurm_conf() -> None:
    assert site().controllers == ("127.0.0.1:28151",)
    assert site(
        {"SlurmctldHost[0]": "ctl", "SlurmctldHost[1]": "spare(10.0.0.2)", "SlurmctldPort": "6817-6818"}
    ).controllers == ("ctl:6817", "10.0.0.2:6817")


def test_an_account_that_slurmctld_does_not_know_yet_has_a_remedy() -> None:
    said = "the test job could not be run: sbatch: error: Invalid account or account/partition combination specified"
    one = found("compute node", site(probe=CommandOutput(error=said)), replace(WANTED, user="scavenger"))
    assert one.level is PROBLEM
    assert "sacctmgr show assoc user=scavenger" in one.remedy
    assert "scontrol reconfigure" in one.remedy
