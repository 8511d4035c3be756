"""The requests of `port.Cluster` as messages, for whoever asks over a socket: the local backend and the processes that act on Slurm.

Owns the types that both protocols have; what else each says, and how failures are said, is its own. Knows no socket and no bound of bytes.
Boundary: shared by two protocols, which know nothing of one another.
"""

from __future__ import annotations

import msgspec

from scavenger.cluster.model import ClusterInfo, ClusterView, JobId, JobSpec


class GetInfo(msgspec.Struct, frozen=True, tag=True):
    pass


class GetView(msgspec.Struct, frozen=True, tag=True):
    pass


class SubmitJob(msgspec.Struct, frozen=True, tag=True):
    spec: JobSpec


class CancelJobs(msgspec.Struct, frozen=True, tag=True):
    job_ids: tuple[int, ...]


class RequeueJob(msgspec.Struct, frozen=True, tag=True):
    job_id: int


class ReleaseJob(msgspec.Struct, frozen=True, tag=True):
    job_id: int
    node: str


class InfoReply(msgspec.Struct, frozen=True, tag=True):
    info: ClusterInfo


class ViewReply(msgspec.Struct, frozen=True, tag=True):
    view: ClusterView


class SubmitReply(msgspec.Struct, frozen=True, tag=True):
    job_id: JobId


class DoneReply(msgspec.Struct, frozen=True, tag=True):
    pass
