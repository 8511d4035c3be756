"""Engines that ended before they could work: is the set-up at fault, which every node has alike, or one node? Pure.

A Python without torch, a state directory that is not mounted or an address that leads nowhere ends every engine, wherever it starts.
So such an end is held against a node only when an engine of the same run that started elsewhere, after the first of them there, has
worked: then the node lacks what others have. Until then no node is blamed, and `doubted` nodes are tried last.

Owns the exit codes and their words, and that evidence. What is done about it is `node_health`'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

#: Exit codes of a worker (`scavenger.protocol.worker.events`) that say that it could not begin, and what each means.
NO_DAEMON = 69
CANNOT_BEGIN: Mapping[int, str] = {
    NO_DAEMON: "no daemon answered it",
    70: "its engine could not be built",
    72: "what it needs is missing or cannot be read there",
}
REMEDIES: Mapping[int, str] = {
    NO_DAEMON: "let compute nodes reach the daemon: daemon.listen, daemon.advertise and daemon.port; `scavenger doctor --submit` tries it",
    70: "mend what the job's log names; `scavenger doctor --submit` tries the engines' imports on a compute node",
    72: "mend what the job's log names; `scavenger doctor --submit` tries the paths and the engines' Python on a compute node",
}
#: What concerns the engines of every run.
OF_ALL_RUNS = frozenset({NO_DAEMON, 72})


@dataclass(frozen=True, slots=True)
class FailedStart:
    """An engine that ended before it could work, by its own word."""

    intent_id: str
    run_id: int
    job_id: int
    node: str
    code: int
    lived_s: float

    @property
    def words(self) -> str:
        where = f" on {self.node}" if self.node else ""
        return f"job {self.job_id}{where} after {self.lived_s:.0f} s: {CANNOT_BEGIN[self.code]} (exit code {self.code})"


@dataclass(slots=True)
class _OnNode:
    """Ends of one run's engines on one node. `held_back`: those that are charged to no node or owner yet. Unix seconds."""

    first_at: float
    last_at: float
    held_back: list[float] = field(default_factory=list)


class SetUps:
    """The evidence. `memory_s`: ends that are older say nothing any more."""

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._failed: dict[tuple[int, str], _OnNode] = {}  # by run and node
        self._worked: dict[
            int, dict[str, float]
        ] = {}  # by run: node -> when the last that worked there had started

    def failed(self, node: str, run_id: int, now: float) -> list[float]:
        """One more. Returns the ends that are the node's own doing; none while nothing shows that other nodes do better."""
        one = self._failed.get((run_id, node))
        if one is None or now - one.last_at > self._memory_s:
            one = self._failed[run_id, node] = _OnNode(now, now)
        one.last_at = now
        one.held_back.append(now)
        elsewhere = [at for name, at in self._worked.get(run_id, {}).items() if name != node]
        if max(elsewhere, default=-math.inf) < one.first_at:
            return []
        held, one.held_back = one.held_back, []
        return held

    def worked(self, node: str, run_id: int, started_at: float) -> None:
        """An engine of this run that started then, on this node, has loaded weights or holds leases."""
        at = self._worked.setdefault(run_id, {})
        at[node] = max(at.get(node, -math.inf), started_at)
        failed = self._failed.get((run_id, node))
        if failed is not None and started_at >= failed.last_at:
            del self._failed[run_id, node]

    def doubted(self, now: float) -> frozenset[str]:
        """Nodes on which engines could not start, and none has since."""
        return frozenset(
            node for (_, node), one in self._failed.items() if node and now - one.last_at <= self._memory_s
        )
