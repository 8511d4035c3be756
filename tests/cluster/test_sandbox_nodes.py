"""A node of a private Slurm that is out is named, with Slurm's words and its slurmd's."""

from __future__ import annotations

from pathlib import Path

import pytest

from scavenger.cluster.sandbox import sandbox
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.errors import ClusterError, ClusterUnavailable
from tests import slurm_faults


def shown(name: str, state: str, more: str = "") -> str:
    return (
        f"NodeName={name} Arch=x86_64 CPUAlloc=0 CPUTot=64 Gres=gpu:h100:4 GresUsed=gpu:h100:0(IDX:N/A) RealMemory=1000000 AllocMem=0"
        f" State={state} Partitions=normal CfgTRES=cpu=64,mem=1000000M AllocTRES={more}\n"
    )


def test_nodes_that_are_out_have_their_state_and_reason() -> None:
    reasons = (
        " Reason=Kill task failed [root@2026-11-22T04:00]",
        " Reason=Not responding [slurm@2026-11-22T04:00]",
    )
    text = "".join(
        [
            shown("node0", "IDLE"),
            shown("node1", "MIXED+PLANNED"),
            shown("node2", "IDLE+DRAIN", reasons[0]),
            shown("node3", "DOWN*", reasons[1]),
            shown("node4", "UNKNOWN"),
        ]
    )
    assert sandbox.out(text, [f"node{n}" for n in range(6)]) == {
        "node2": "drain+idle, Kill task failed",
        "node3": "down+not_responding, Not responding",
        "node4": "unknown",
        "node5": "not listed",
    }
    with pytest.raises(ClusterUnavailable):
        sandbox.out(text[:-1], ["node0"])


def test_the_error_ends_with_the_log_of_the_nodes_slurmd(tmp_path: Path) -> None:
    (tmp_path / "slurmd.node2.log").write_text("".join(f"line {n}\n" for n in range(20)))
    text = sandbox.describe_missing({"node2": "unknown", "node3": "unknown", "node4": "unknown"}, tmp_path)
    assert text.startswith("node2: unknown\nnode3: unknown\nnode4: unknown\n")
    assert text.count("slurmd log:") == 2
    assert "line 12" in text
    assert "line 11" not in text
    assert text.endswith("(it wrote nothing)")


@pytest.mark.slurm
def test_a_sandbox_names_the_node_that_is_out(slurm_sandbox: SlurmSandbox) -> None:
    slurm_sandbox.check_nodes()
    slurm_faults.down_node(slurm_sandbox, "node2")
    with pytest.raises(
        ClusterError,
        match=r"1 of 4 nodes are out:\nnode2: down, sandbox\nthe end of node2's slurmd log:\n  \S+",
    ):
        slurm_sandbox.check_nodes()
    slurm_faults.resume_node(slurm_sandbox, "node2")
    slurm_sandbox.check_nodes()
