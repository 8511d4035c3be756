"""`sacct -D` as lives of jobs, from what Slurm 22.05 printed."""

from __future__ import annotations

import pytest

from scavenger.cluster.model import JobLife, PreemptMode
from scavenger.cluster.slurm import commands
from scavenger.errors import ClusterUnavailable

#: A preempted life whose processes had to be killed lost its start; job 3 was cancelled while it waited; a user wrote job 4's name.
PRINTED = """\
1|PREEMPTED|1795392563|Unknown|1795392566|1|node1|billing=1,cpu=1,gres/gpu=2,node=1|scv-000000000000000a
1|CANCELLED by 0|1795392571|1795392577|Unknown|2|node[1-2]|billing=2,cpu=2,gres/gpu=4,node=2|scv-000000000000000a
3|CANCELLED by 0|1795391301|None|1795391312|1|None assigned||scv-000000000000000b
4|COMPLETED|1795391305|1795391305|1795391312|1|node2|cpu=1|a|b
"""


def test_each_life_of_a_requeued_job_is_a_row() -> None:
    first, second, waited, theirs = commands.parse_accounting(PRINTED)
    name = "scv-000000000000000a"
    assert first == JobLife(1, name, "PREEMPTED", 1795392563.0, 0.0, 1795392566.0, ("node1",), 2)
    assert second == JobLife(1, name, "CANCELLED", 1795392571.0, 1795392577.0, 0.0, ("node1", "node2"), 4)
    assert (waited.nodes, waited.start_time, waited.gpus) == ((), 0.0, 0)
    assert theirs.name == "a|b"
    assert commands.parse_accounting("") == ()


@pytest.mark.parametrize(
    "printed",
    ["1|PREEMPTED|17", PRINTED.replace("1|PRE", "x|PRE"), PRINTED.replace("1795392566", "yesterday")],
)
def test_an_answer_that_is_not_as_it_was_asked_for_is_none(printed: str) -> None:
    with pytest.raises(ClusterUnavailable, match="sacct's answer is malformed"):
        commands.parse_accounting(printed)


def test_it_is_asked_for_all_lives_however_long_ago() -> None:
    argv = commands.accounting_argv((7, 9))
    assert argv[:2] == ["sacct", "-D"]
    assert argv[argv.index("-S") + 1] < "1971"
    assert argv[argv.index("-j") + 1] == "7,9"
    for nonsense in ((), (0,), (-3,)):
        with pytest.raises(ValueError, match="not job ids"):
            commands.accounting_argv(nonsense)


@pytest.mark.parametrize(("kind", "there"), [("slurmdbd", True), ("none", False), ("filetxt", False)])
def test_the_configuration_says_whether_there_is_accounting(kind: str, there: bool) -> None:
    config = f"""\
AccountingStorageType   = accounting_storage/{kind}
ClusterName             = c
KillWait                = 30 sec
MessageTimeout          = 10 sec
PreemptType             = preempt/partition_prio
SLURM_VERSION           = 22.05.8
"""
    assert commands.parse_info(config, user="u").accounting is there


def test_the_qos_of_slurmdbd_are_read() -> None:
    assert commands.qos_argv()[:2] == ["sacctmgr", "--noheader"]
    low, normal = commands.parse_qos(
        "normal|low,lower|cluster|00:00:00||1.000000||||\n"
        "low||cancel,gang|00:01:00|00:05:00|0.000000|gres/gpu=4|||cpu=9\n"
    )
    assert (normal.preempts, normal.preempt_mode, normal.exempt_s) == ({"low", "lower"}, None, None)
    assert (low.preempt_mode, low.grace_s, low.exempt_s, low.usage_factor) == (
        PreemptMode.CANCEL,
        60.0,
        300.0,
        0.0,
    )
    assert low.limits == (("MaxTRESPU", "gres/gpu=4"), ("GrpTRES", "cpu=9"))


def test_no_qos_at_all_is_no_answer() -> None:
    with pytest.raises(ClusterUnavailable, match="no QOS"):
        commands.parse_qos("\n")


@pytest.mark.parametrize("line", ["low|normal", "||cluster|||||||", "low||sometimes|00:00:00||1||||"])
def test_a_qos_that_is_not_as_it_was_asked_for_is_refused(line: str) -> None:
    with pytest.raises(ClusterUnavailable, match="sacctmgr's answer is malformed"):
        commands.parse_qos(line + "\n")
