"""The messages between the harvester of a further cluster and the daemon. The harvester asks for work:

    harvester                                   daemon
    Ready(session, number, done, limits) ---->
                                         <----  Noted(rendezvous)          at once, each time
                                         <----  Ask(session, number, ...)  when there is work; else a `Ready` with the next number follows
    Busy(session, number)                ---->                             every `READY_S`, while Slurm's commands run
    AnswerPiece(session, number, ...)    ---->                             of the compressed answer, `WINDOW` bytes ahead at most
                                         <----  Received(number, upto)     at once, for each piece
    Leaving(session)                     ---->                             it was ended

One process at a time has a cluster's key: the daemon refuses another session until the one that has it leaves or is silent for `SILENT_S`.
An answer goes in pieces, so that over a slow link each is a sign of life.
An `Ask` counts only under the number of the harvester's last `Ready`: one that was under way for longer does nothing, so a request that the
daemon gave up on is not carried out later. `done` is the last number that was carried out: by it the daemon knows whether one without an
answer was. Owns the types and the bounds of bytes; knows no socket.
"""

from __future__ import annotations

import zlib
from typing import Annotated

import msgspec

from scavenger.cluster.proxy import messages as proxy
from scavenger.harvest.decide.actions import Submit
from scavenger.protocol.keys import Rendezvous

#: Seconds between two words of a harvester, and after which either end takes a silent other for gone.
READY_S = 3.0
SILENT_S = 15.0
#: libzmq's own, of the connection: any whole message counts.
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 2000, 10_000
#: Of one message to the harvester, and of one from it.
MAX_ASK_BYTES = 1 << 20
MAX_SENT_BYTES = 2 << 20
#: Of an answer, as it is and compressed: a view of 100,000 jobs takes about 60 MB, and a tenth of it compressed.
MAX_ANSWER_BYTES = 128 << 20
#: A piece crosses a link of 20 kB/s within `SILENT_S`; what is ahead keeps one of 10 MB/s and 100 ms busy.
PIECE_BYTES = 64 << 10
WINDOW_BYTES = 1 << 20
#: Of a `Ready`: limits, and drained nodes. The daemon's event loop reads limits, a tenth of a second for these.
MAX_READY_BYTES = 1 << 20
MAX_LIMITS_BYTES = 128 << 10
#: An answer that comes slower than this is given up, however many pieces it has (bytes/s).
LEAST_ANSWER_BYTES_PER_S = 16 << 10

#: Each is a file at the daemon.
MOST_DRAINED = 4096

#: What of [cluster] the daemon gets, and takes: how often it may ask. Of [harvest] all but what is a path, or is needed there alone.
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
Uid = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{8})?\Z")]
NodeName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,252}\Z")]


class SubmitEngine(msgspec.Struct, frozen=True, tag=True):
    """A job for one engine: what was decided, and by what the daemon knows its jobs (`uid`). The script is made there."""

    uid: Uid
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
    limits: Annotated[bytes, msgspec.Meta(max_length=MAX_LIMITS_BYTES)]
    stop: Text = ""
    process: Annotated[str, msgspec.Meta(max_length=300)] = ""  # its host and pid, for messages
    drained: Annotated[dict[NodeName, Text], msgspec.Meta(max_length=MOST_DRAINED)] = {}


class Busy(msgspec.Struct, frozen=True, tag=True):
    session: Session
    number: Number


class AnswerPiece(msgspec.Struct, frozen=True, tag=True):
    """Bytes from `offset` on of the `nbytes` of a compressed `ProxyAnswer`, which the asker decodes."""

    session: Session
    number: Number
    offset: Annotated[int, msgspec.Meta(ge=0, le=MAX_ANSWER_BYTES)]
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_ANSWER_BYTES)]
    data: Annotated[bytes, msgspec.Meta(min_length=1, max_length=PIECE_BYTES)]


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """This process ends: another one may have the key at once."""

    session: Session


class Noted(msgspec.Struct, frozen=True, tag=True):
    """Where the daemon listens now, for the engines there, and by what `uid` it knows its jobs there."""

    rendezvous: Rendezvous
    uid: Uid = ""


class Received(msgspec.Struct, frozen=True, tag=True):
    """Of the answer to this request, so many bytes are here; all of them too where nobody waits for it any more."""

    session: Session
    number: Number
    upto: Number


class Ask(msgspec.Struct, frozen=True, tag=True):
    session: Session
    number: Number
    request: Request


class Refused(msgspec.Struct, frozen=True, tag=True):
    reason: str


FromHarvester = Ready | Busy | AnswerPiece | Leaving
FromDaemon = Noted | Ask | Received | Refused
from_harvester: msgspec.msgpack.Decoder[FromHarvester] = msgspec.msgpack.Decoder(FromHarvester)
from_daemon: msgspec.msgpack.Decoder[FromDaemon] = msgspec.msgpack.Decoder(FromDaemon)


def packed(answer: proxy.ProxyAnswer) -> bytes:
    """An answer as its pieces carry it. Raises `ValueError` for one that may be over `MAX_ANSWER_BYTES`, compressed or not."""
    encoded = msgspec.msgpack.encode(answer)
    if len(encoded) > MAX_ANSWER_BYTES - PIECE_BYTES:  # what cannot be compressed grows by a little
        raise ValueError(
            f"an answer of {len(encoded)} bytes is more than the link takes ({MAX_ANSWER_BYTES})"
        )
    return zlib.compress(encoded, 1)


def unpacked(compressed: bytes | bytearray) -> proxy.ProxyAnswer:
    """Raises `parsing.MALFORMED` also for what unpacks to more than `MAX_ANSWER_BYTES`, of which no more than that is unpacked."""
    unpacking = zlib.decompressobj()
    try:
        encoded = unpacking.decompress(compressed, MAX_ANSWER_BYTES + 1)
    except zlib.error as error:
        raise msgspec.DecodeError(f"not compressed: {error}") from error
    if not unpacking.eof or unpacking.unused_data or len(encoded) > MAX_ANSWER_BYTES:
        raise msgspec.DecodeError(f"it is cut, or over {MAX_ANSWER_BYTES} bytes")
    return proxy.answers.decode(encoded)
