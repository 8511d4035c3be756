"""A partition whose jobs would be in others' way is refused, with what to do about it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from scavenger.cluster.model import ClusterInfo, Partition, PreemptMode, Qos
from scavenger.cluster.partition_check import check
from scavenger.cluster.slurm.commands import parse_info
from scavenger.errors import ConfigError
from tests.harvest.views import INFO, PARTITIONS

NORMAL, RESERVED, SCAVENGE = PARTITIONS


def test_the_demo_partition_passes() -> None:
    check(INFO, PARTITIONS, "scavenge")
    check(INFO, [NORMAL, RESERVED, replace(SCAVENGE, preempt_mode=PreemptMode.CANCEL)], "scavenge")


def test_only_up_partitions_on_the_same_nodes_count() -> None:
    check(
        INFO,
        [replace(NORMAL, priority_tier=1, up=False), replace(RESERVED, priority_tier=0), SCAVENGE],
        "scavenge",
    )


@pytest.mark.parametrize(
    ("info", "partitions", "qos", "said"),
    [
        (INFO, [NORMAL], "", "no such partition"),
        (INFO, [NORMAL, replace(SCAVENGE, nodes=frozenset())], "", "no nodes"),
        (INFO, [NORMAL, replace(SCAVENGE, preempt_mode=PreemptMode.OFF)], "", "not preemptible"),
        (INFO, [NORMAL, replace(SCAVENGE, preempt_mode=PreemptMode.SUSPEND)], "", "keeps its GPU memory"),
        (replace(INFO, preempt_type="preempt/none"), PARTITIONS, "", "preempts nothing"),
        (replace(INFO, preempt_type="(null)"), PARTITIONS, "", "preempts nothing"),
        (INFO, [replace(NORMAL, priority_tier=1), SCAVENGE], "", "not below that of normal"),
        (INFO, [NORMAL, replace(SCAVENGE, priority_tier=11)], "", "not below that of normal"),
        (replace(INFO, preempt_type="preempt/qos"), PARTITIONS, "", "harvest.qos is empty"),
        (replace(INFO, exempt_s=3600.0), PARTITIONS, "", "PreemptExemptTime = 3600 s"),
    ],
)
def test_what_would_block_others_is_refused(
    info: ClusterInfo, partitions: list[Partition], qos: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        check(info, partitions, "scavenge", qos)
    assert error.value.remedy


LOW, ABOVE, BESIDE = Qos("low", frozenset()), Qos("normal", frozenset({"low"})), Qos("long", frozenset())


def by_qos(*qos: Qos, preempt_type: str = "preempt/qos", exempt_s: float = 0.0) -> ClusterInfo:
    return replace(INFO, preempt_type=preempt_type, exempt_s=exempt_s, accounting=True, qos=qos)


@pytest.mark.parametrize(
    "info",
    [
        by_qos(LOW, ABOVE, BESIDE),
        by_qos(replace(LOW, preempt_mode=PreemptMode.CANCEL), ABOVE),
        by_qos(replace(LOW, exempt_s=0.0), ABOVE, exempt_s=3600.0),
        by_qos(replace(LOW, exempt_s=0.0), preempt_type="preempt/partition_prio", exempt_s=3600.0),
        replace(by_qos(), qos=None, exempt_s=3600.0),  # slurmdbd does not reply: not known, not refused
    ],
)
def test_a_qos_that_another_may_preempt_passes(info: ClusterInfo) -> None:
    check(info, PARTITIONS, "scavenge", "low")


@pytest.mark.parametrize(
    ("info", "said"),
    [
        (by_qos(ABOVE), "'low'.* has no such QOS"),
        (by_qos(LOW, BESIDE), "no QOS of cluster .* may preempt it"),
        (by_qos(replace(LOW, preempts=frozenset({"low"}))), "no QOS of cluster .* may preempt it"),
        (by_qos(replace(LOW, preempt_mode=PreemptMode.SUSPEND), ABOVE), "'low' suspends"),
        (by_qos(replace(LOW, preempt_mode=PreemptMode.OFF), ABOVE), "'low' is not preemptible"),
        (by_qos(replace(LOW, exempt_s=60.0), ABOVE), "QOS low has PreemptExemptTime = 60 s"),
        (by_qos(LOW, ABOVE, exempt_s=60.0), "cluster .* has PreemptExemptTime = 60 s"),
        (by_qos(ABOVE, preempt_type="preempt/partition_prio"), "has no such QOS"),
    ],
)
def test_a_qos_that_would_be_in_others_way_is_refused(info: ClusterInfo, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        check(info, PARTITIONS, "scavenge", "low")
    assert error.value.remedy


def test_where_slurm_preempts_by_partition_the_mode_of_a_qos_says_nothing() -> None:
    qos = replace(LOW, preempt_mode=PreemptMode.SUSPEND)
    check(by_qos(qos, ABOVE, preempt_type="preempt/partition_prio"), PARTITIONS, "scavenge", "low")


@pytest.mark.parametrize(
    ("value", "exempt_s"), [("-1", 0.0), ("00:00:00", 0.0), ("01:00:00", 3600.0), ("1-00:00:00", 86400.0)]
)
def test_slurm_s_exempt_time_is_read(value: str, exempt_s: float) -> None:
    config = (Path(__file__).parents[1] / "data/doctor/config.txt").read_text()
    told = re.sub(r"^(PreemptExemptTime *=).*$", rf"\1 {value}", config, flags=re.M)
    assert parse_info(told, user="scavenger").exempt_s == exempt_s
