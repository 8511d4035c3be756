"""What Slurm says of its switches becomes who is near whom; a site without a topology says nothing."""

from __future__ import annotations

import pytest

from scavenger.cluster.slurm import commands
from scavenger.errors import ClusterUnavailable

TREE = """SwitchName=s0 Level=0 LinkSpeed=1 Nodes=node[01-03]
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=node04,gpu[7,9]
SwitchName=top Level=1 LinkSpeed=1 Nodes=node[01-04],gpu[7,9] Switches=s[0-1]
"""
BLOCK = """BlockName=b1 BlockIndex=0 Nodes=node[1-2] BlockSize=2
BlockName=b2 BlockIndex=1 Nodes=node[3-4] BlockSize=2
AggregatedBlock=b[1-2] BlockIndex=2 Nodes=node[1-4] BlockSize=4
"""


def test_nodes_hang_at_their_leaf_switch() -> None:
    found = commands.parse_topology(TREE)
    assert found == (
        ("node01", "s0"),
        ("node02", "s0"),
        ("node03", "s0"),
        ("node04", "s1"),
        ("gpu7", "s1"),
        ("gpu9", "s1"),
    )


def test_a_block_is_as_good_as_a_switch() -> None:
    assert commands.parse_topology(BLOCK) == (
        ("node1", "b1"),
        ("node2", "b1"),
        ("node3", "b2"),
        ("node4", "b2"),
    )


@pytest.mark.parametrize(
    "text", ["", "No topology information available\n", "SwitchName=s0 Level=0 LinkSpeed=1 Nodes=(null)\n"]
)
def test_no_topology_says_nothing(text: str) -> None:
    assert commands.parse_topology(text) == ()


def test_half_a_host_list_is_no_answer() -> None:
    with pytest.raises(ClusterUnavailable):
        commands.parse_topology("SwitchName=s0 Level=0 Nodes=node[1-\n")
