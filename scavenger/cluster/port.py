"""The port through which everything else sees a cluster. Implemented by `slurm`, `pyslurm` and `local`.

Beside it what every caller needs to ask it: the count of requests, and the thread that keeps blocking calls off an event loop.

What counts as a request is what slurmctld sees (`sdiag`), not how often we ran a command: `scontrol show node` and `squeue` ask for the
partitions too.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, Protocol, TypeVar

from scavenger.cluster.model import ClusterInfo, ClusterView, Job, JobLife, JobSpec

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
KILL = "kill"  # one for each job of a cancellation
#: All kinds of requests that are counted.
REQUESTS = frozenset({KILL}).union(
    *(NODES, PARTITIONS, JOBS, RESERVATIONS, CONFIG, TOPOLOGY, SUBMIT, REQUEUE, UPDATE)
)


class RpcCounter:
    """Written by the cluster's thread, read by any thread. Only grows."""

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


class Cluster(Protocol):
    """A scheduler seen from outside. Blocking calls: the daemon runs them in a thread of its own, never on its event loop.

    Every method raises `ClusterUnavailable` when the scheduler did not answer or answered with a partial or malformed
    record, and `ClusterError` when it refused, with the scheduler's own words. None of them returns a partial answer.
    """

    @property
    def rpc(self) -> RpcCounter:
        """Requests sent to a Slurm controller so far. May be read from any thread."""
        ...

    def info(self) -> ClusterInfo:
        """Version, preemption type and the waits that bound how long a hung job delays others."""
        ...

    def view(self) -> ClusterView:
        """Nodes, jobs and partitions in one observation (finished jobs may be listed for a while)."""
        ...

    def jobs(self) -> tuple[Job, ...]:
        """The jobs alone, as in `view`: the cheapest poll."""
        ...

    def submit(self, spec: JobSpec) -> int:
        """Submit one job and return its id.

        Raises `SubmitUnknown` when no answer came: look for `spec.comment` in later views before submitting again.
        """
        ...

    def cancel(self, job_ids: tuple[int, ...]) -> None:
        """Cancel jobs, pending or running. Unknown or finished ids are no error."""
        ...

    def requeue(self, job_id: int) -> None:
        """Put a running job of ours back into the queue under the same id; its restart count grows by one."""
        ...

    def release(self, job_id: int, node: str) -> None:
        """Let a waiting job of ours begin now, and on this node only, whatever was said of either when it was submitted."""
        ...

    def accounting(self, job_ids: tuple[int, ...]) -> tuple[JobLife, ...]:
        """Every life of these jobs as the accounting database has it. Where `info().accounting` is false there is none to ask: ()."""
        ...

    def close(self) -> None:
        """Release sockets and helper processes. The cluster and its jobs go on."""
        ...


P = ParamSpec("P")
R = TypeVar("R")


class OneThread:
    """One thread for calls that block, on Slurm's commands and on files beside them: one after the other, in the order asked for."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a blocking call in the thread. Raises what it raises."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Take no more calls. The one under way is not waited for: a command may hang."""
        self._pool.shutdown(wait=False)
