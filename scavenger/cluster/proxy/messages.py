"""What the daemon and the processes that act on Slurm for it say to each other: one typed request and one reply a connection.

    role submit   Identify PutKey SubmitJob CancelJobs RequeueJob ReleaseJob ReadLog Tidy
    role view     Identify GetInfo GetView GetJobs GetAccounting

Each role decodes its own requests only: what the other one answers is no message to it. Owns the types and the bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from scavenger.cluster.model import Job, JobLife
from scavenger.cluster.requests import CancelJobs as CancelJobs
from scavenger.cluster.requests import DoneReply as DoneReply
from scavenger.cluster.requests import GetInfo as GetInfo
from scavenger.cluster.requests import GetView as GetView
from scavenger.cluster.requests import InfoReply as InfoReply
from scavenger.cluster.requests import ReleaseJob as ReleaseJob
from scavenger.cluster.requests import RequeueJob as RequeueJob
from scavenger.cluster.requests import SubmitJob as SubmitJob
from scavenger.cluster.requests import SubmitReply as SubmitReply
from scavenger.cluster.requests import ViewReply as ViewReply
from scavenger.protocol.keys import KeyPair

Role = Literal["submit", "view"]

MAX_REQUEST_BYTES = 1 << 20
#: A view of 100,000 jobs takes about 60 MB; role submit has nothing large to say.
MAX_REPLY_BYTES: Mapping[Role, int] = {"view": 512 << 20, "submit": 1 << 20}
#: A reply that counts more of one kind than this took no request: no command does, beside one for each job that it names.
MOST_RPC = 1000
#: Of a job's log, so much of its end is given.
LOG_BYTES = 64 * 1024

JOB_NAME = r"^scv-[a-z0-9-]{1,40}\Z"
JobName = Annotated[str, msgspec.Meta(pattern=JOB_NAME)]


class Identify(msgspec.Struct, frozen=True, tag=True):
    pass


class PutKey(msgspec.Struct, frozen=True, tag=True):
    """The key of one engine, before its job is submitted."""

    intent: JobName
    pair: KeyPair


class ReadLog(msgspec.Struct, frozen=True, tag=True):
    name: JobName


class Tidy(msgspec.Struct, frozen=True, tag=True):
    """Keep the keys and the logs of these jobs, and of others the newest logs within the bound."""

    live: tuple[JobName, ...]
    most_bytes: int


class GetJobs(msgspec.Struct, frozen=True, tag=True):
    pass


class GetAccounting(msgspec.Struct, frozen=True, tag=True):
    job_ids: tuple[int, ...]


class Identity(msgspec.Struct, frozen=True, tag=True):
    """Who is there. `folder`: of engines' keys and logs; "" in role view."""

    role: Role
    user: str
    folder: str = ""


class JobsReply(msgspec.Struct, frozen=True, tag=True):
    jobs: tuple[Job, ...]


class AccountingReply(msgspec.Struct, frozen=True, tag=True):
    lives: tuple[JobLife, ...]


class LogReply(msgspec.Struct, frozen=True, tag=True):
    end: bytes  # b"" where there is none


class FailedReply(msgspec.Struct, frozen=True, tag=True):
    """`kind`: which error it becomes again; `busy`: the request was not even read. `error_kind`: of `unavailable`."""

    kind: Literal["refused", "unavailable", "unknown", "busy"]
    cause: str
    remedy: str = ""
    error_kind: str = ""


SubmitRequest = Identify | PutKey | SubmitJob | CancelJobs | RequeueJob | ReleaseJob | ReadLog | Tidy
ViewRequest = Identify | GetInfo | GetView | GetJobs | GetAccounting
Request = SubmitRequest | ViewRequest
Reply = (
    Identity
    | InfoReply
    | ViewReply
    | JobsReply
    | AccountingReply
    | SubmitReply
    | LogReply
    | DoneReply
    | FailedReply
)


class ProxyAnswer(msgspec.Struct, frozen=True):
    """`rpc`: requests to slurmctld that it took, as `port.RpcCounter` counts them."""

    reply: Reply
    rpc: dict[str, int] = {}


def most_rpc(request: msgspec.Struct) -> int:
    """The bound of each count in a reply to it. Pure."""
    return MOST_RPC + (len(request.job_ids) if isinstance(request, CancelJobs) else 0)


submit_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(SubmitRequest)
view_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(ViewRequest)
answers = msgspec.msgpack.Decoder(ProxyAnswer)
