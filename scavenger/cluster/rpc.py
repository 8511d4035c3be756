"""How many requests we sent to the controller, by what they asked for. One plain counter that status and metrics may read at any time.

What counts is what slurmctld sees (`sdiag`), not how often we ran a command: `scontrol show node` and `squeue` ask for the partitions too.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

#: What one run of a command costs, as `sdiag` on a real 22.05 counted it; a test counts again on the Slurm at hand.
NODES: Mapping[str, int] = {"node_info": 1, "partition_info": 1}
PARTITIONS: Mapping[str, int] = {"partition_info": 1}
JOBS: Mapping[str, int] = {"job_info": 1, "partition_info": 1}
JOBS_JSON: Mapping[str, int] = {"job_info": 1}
RESERVATIONS: Mapping[str, int] = {"reservation_info": 1}
CONFIG: Mapping[str, int] = {"build_info": 1}
TOPOLOGY: Mapping[str, int] = {"topo_info": 1}
SUBMIT: Mapping[str, int] = {"submit": 1}
REQUEUE: Mapping[str, int] = {"requeue": 1}
UPDATE: Mapping[str, int] = {"update_job": 1}


class RpcCounter:
    """Written by the cluster's thread, read by anybody. Only grows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, cost: Mapping[str, int]) -> None:
        with self._lock:
            self._counts.update(cost)

    def counts(self) -> dict[str, int]:
        """By request: 'job_info', 'node_info', 'partition_info', 'reservation_info', 'build_info', 'submit', 'kill', 'requeue',
        'update_job'."""
        with self._lock:
            return dict(self._counts)

    @property
    def total(self) -> int:
        with self._lock:
            return self._counts.total()
