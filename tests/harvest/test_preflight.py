"""A partition whose jobs would be in others' way is refused, with what to do about it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from scavenger.cluster.model import ClusterInfo, Partition, PreemptMode
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


def test_preemption_by_qos_needs_a_qos_of_ours() -> None:
    check(replace(INFO, preempt_type="preempt/qos"), PARTITIONS, "scavenge", "scavenger")


def test_a_qos_of_ours_may_have_an_exempt_time_of_its_own() -> None:
    check(replace(INFO, exempt_s=3600.0), PARTITIONS, "scavenge", "scavenger")


@pytest.mark.parametrize(
    ("value", "exempt_s"), [("-1", 0.0), ("00:00:00", 0.0), ("01:00:00", 3600.0), ("1-00:00:00", 86400.0)]
)
def test_slurm_s_exempt_time_is_read(value: str, exempt_s: float) -> None:
    config = (Path(__file__).parents[1] / "data/doctor/config.txt").read_text()
    told = re.sub(r"^(PreemptExemptTime *=).*$", rf"\1 {value}", config, flags=re.M)
    assert parse_info(told, user="scavenger").exempt_s == exempt_s
