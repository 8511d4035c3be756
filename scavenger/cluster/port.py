"""The port through which everything else sees a cluster. Implemented by `slurm`, `pyslurm` and `local`."""

from __future__ import annotations

from typing import Protocol

from scavenger.cluster.model import ClusterInfo, ClusterView, Job, JobLife, JobSpec
from scavenger.cluster.rpc import RpcCounter


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
        """The jobs alone, as in `view`: the cheapest look."""
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
