"""A partition whose jobs would be in others' way is refused, with what to do about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scavenger.cluster.model import ClusterInfo, Partition, PreemptMode
from scavenger.errors import ConfigError
from scavenger.harvest.preflight import check
from tests.harvest.views import INFO, PARTITIONS

NORMAL, RESERVED, SCAVENGE = PARTITIONS


def test_the_demo_partition_passes() -> None:
    check(INFO, PARTITIONS, "scavenge")
    check(INFO, [NORMAL, RESERVED, replace(SCAVENGE, preempt_mode=PreemptMode.CANCEL)], "scavenge")


def test_only_up_partitions_on_the_same_nodes_count() -> None:
    check(INFO, [replace(NORMAL, priority_tier=1, up=False), replace(RESERVED, priority_tier=0), SCAVENGE], "scavenge")


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
    ],
)
def test_what_would_block_others_is_refused(info: ClusterInfo, partitions: list[Partition], qos: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        check(info, partitions, "scavenge", qos)
    assert error.value.remedy


def test_preemption_by_qos_needs_a_qos_of_ours() -> None:
    check(replace(INFO, preempt_type="preempt/qos"), PARTITIONS, "scavenge", "scavenger")
