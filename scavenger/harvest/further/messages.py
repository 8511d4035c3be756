"""What the harvester of a further cluster and the daemon say to each other. The harvester asks for work:

    harvester                                   daemon
    Ready(session, number, done, limits) ---->
                                         <----  Noted(rendezvous)          at once, each time
                                         <----  Ask(session, number, ...)  when there is work; else a `Ready` with the next number follows
    Busy(session, number)                ---->                             every `READY_S`, while Slurm's commands run
    Answered(session, number, answer)    ---->

An `Ask` counts only under the number of the harvester's last `Ready`: one that was under way for longer does nothing, so a request that the
daemon gave up on is not carried out later. `done` is the last number that was carried out: by it the daemon knows whether one without an
answer was. Owns the types and the bounds of bytes; knows no socket.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from scavenger.cluster.proxy import messages as proxy
from scavenger.harvest.decide.actions import Submit
from scavenger.protocol.keys import Rendezvous

#: Seconds between two words of a harvester, and after which either end takes a silent other for gone.
READY_S = 3.0
SILENT_S = 15.0
#: Of one message to the harvester, and of one from it: a view of 100,000 jobs takes about 60 MB.
MAX_ASK_BYTES = 1 << 20
MAX_ANSWER_BYTES = 128 << 20
#: Of a `Ready`: limits, and drained nodes.
MAX_READY_BYTES = 1 << 20

#: Each is a file at the daemon.
MOST_DRAINED = 4096

#: What of [cluster] the daemon is told, and takes: how often it may ask. Of [harvest] all but what is a path, or is needed there alone.
CLUSTER_KEYS = frozenset(
    {
        "poll_interval_s",
        "fast_poll_interval_s",
        "min_poll_interval_s",
        "max_rpc_per_min",
        "absent_s",
        "command_timeout_s",
    }
)
HARVEST_KEYS_THERE = frozenset(
    {"enabled", "job_template", "stop_file", "logs_mb", "python", "container", "contact"}
)

Session = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Text = Annotated[str, msgspec.Meta(max_length=1000)]
NodeName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,252}\Z")]


class SubmitEngine(msgspec.Struct, frozen=True, tag=True):
    """A job for one engine: what was decided, and by what the daemon knows its jobs (`uid`). The script is made there."""

    uid: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{8}\Z")]
    intent: proxy.JobName
    engine: Submit


Request = (
    proxy.Identify
    | proxy.GetInfo
    | proxy.GetView
    | proxy.GetJobs
    | proxy.GetAccounting
    | proxy.PutKey
    | proxy.CancelJobs
    | proxy.RequeueJob
    | proxy.ReleaseJob
    | proxy.ReadLog
    | proxy.Tidy
    | SubmitEngine
)


class Ready(msgspec.Struct, frozen=True, tag=True):
    """`cluster`: as its key is named. `user`: of the jobs there. `limits`: [cluster] and [harvest] of its configuration, as JSON. `stop`:
    as a stop file says it; "" = its admin did not stop harvesting. `drained`: nodes that its admin drained, and why."""

    session: Session
    number: Number
    done: Number
    cluster: Annotated[str, msgspec.Meta(max_length=32)]
    user: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    limits: bytes
    stop: Text = ""
    drained: Annotated[dict[NodeName, Text], msgspec.Meta(max_length=MOST_DRAINED)] = {}


class Busy(msgspec.Struct, frozen=True, tag=True):
    session: Session
    number: Number


class Answered(msgspec.Struct, frozen=True, tag=True):
    """`answer`: a `ProxyAnswer`, decoded by who asked."""

    session: Session
    number: Number
    answer: msgspec.Raw


class Noted(msgspec.Struct, frozen=True, tag=True):
    """Where the daemon listens now, for the engines there."""

    rendezvous: Rendezvous


class Ask(msgspec.Struct, frozen=True, tag=True):
    session: Session
    number: Number
    request: Request


class Refused(msgspec.Struct, frozen=True, tag=True):
    reason: str


#: What decoders raise for bytes that are no message. `ValidationError` is a `DecodeError`; text need not be UTF-8, nor nesting bounded.
MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

from_harvester: msgspec.msgpack.Decoder[Ready | Busy | Answered] = msgspec.msgpack.Decoder(
    Ready | Busy | Answered
)
from_daemon: msgspec.msgpack.Decoder[Noted | Ask | Refused] = msgspec.msgpack.Decoder(Noted | Ask | Refused)
