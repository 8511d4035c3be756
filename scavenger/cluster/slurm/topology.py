"""Pure: which node hangs at which switch, from `scontrol show topology`. Optional everywhere: most sites configure none.

With topology/tree the leaf switches (Level=0) name their nodes; with topology/block the blocks do. Anything else says nothing of nodes.
"""

from __future__ import annotations

import re

from scavenger.cluster.slurm import hostlist


def argv() -> list[str]:
    return ["scontrol", "show", "topology"]


def parse(stdout: str) -> tuple[tuple[str, str], ...]:
    """(node, switch) in the order told; a node keeps its first. Raises `ClusterUnavailable` on a malformed host list."""
    found: dict[str, str] = {}
    for line in stdout.splitlines():
        row = dict(re.findall(r"(\w+)=(\S*)", line))
        name = row.get("BlockName") or (row.get("SwitchName") if row.get("Level") == "0" else None)
        if name and row.get("Nodes", "(null)") != "(null)":
            for node in hostlist.expand(row["Nodes"]):
                found.setdefault(node, name)
    return tuple(found.items())
