"""What both conversations share: the protocol's version and bounds, the bases of all structs, and the parts of messages.

Knows neither the messages of workers nor those of trainers.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from scavenger.protocol.engine_options import MAX_CHARS

#: The one protocol: a peer of another number is refused, and told to run the daemon's release.
PROTOCOL = 5
#: So begins the intent of a key that was made for an engine beside an inference service (`scavenger keys guest`).
GUEST_INTENT = "guest-"
#: So go on those of engines in slots that another run's engine lends: behind it the intent of that engine's job.
LENT_INTENT = f"{GUEST_INTENT}lent-"
#: Bytes of expert routing that a token may have (`protocol.routing`).
MAX_ROUTING = 4096
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
#: Samples of one group, and of one SubmitGroups. The daemon makes them in one go, and serves no other process meanwhile.
MAX_GROUP_SAMPLES = 4096
MAX_CALL_SAMPLES = 16384
#: Workers in turn that generated one sample, as its trainer is told; and spans of one report on their agreement.
MAX_SPANS = 64
#: Versions that one sample may have tokens of, each named once a change: a moved sample has a few.
MAX_VERSIONS = 256
MAX_SPAN_SUMS = 16384
#: Of one message with siblings' tokens: how many, and of how many samples in a row.
MAX_SIBLING_TOKENS = 16384
MAX_SIBLING_PIECES = 1024
#: Leases of which one message offers the KV blocks.
MAX_KV_OFFERS = 4096
#: Seconds for which a worker keeps what it was told of a group's siblings after its last sample of the group is over.
KEEP_SIBLINGS_S = 10.0
#: Stop texts of one sample: they travel with each lease.
MAX_STOPS = 64
#: A model's config.json and a run.toml: the daemon keeps both for as long as it knows the run.
MAX_CONFIG_CHARS = 1 << 20
#: What an unauthenticated or unregistered peer may send at most.
MAX_HELLO_BYTES = 64 * 1024


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=False, gc=False):
    """Base of all messages: immutable, tagged by class name; unknown fields of a newer peer are ignored."""


class MessagePart(msgspec.Struct, frozen=True, gc=False):
    """Base of what messages are made of."""


RUN_NAME_PATTERN = r"\A[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z"
RunName = Annotated[str, msgspec.Meta(pattern=RUN_NAME_PATTERN)]
#: The same, or "" for none.
OtherRun = Annotated[str, msgspec.Meta(pattern=r"\A([A-Za-z0-9][A-Za-z0-9_.-]{0,63})?\Z")]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Nbytes = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
#: Of what only grows for as long as a process lives.
Total = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
#: What a worker does with its GPU's memory.
Memory = Literal["awake", "falling-asleep", "asleep", "waking"]
#: Where an engine's drafts come from.
Speculation = Literal["none", "group"]
#: Which of its job's reserved engines a worker is.
Slot = Annotated[str, msgspec.Meta(max_length=256)]
#: Reserved engines that one message names at most.
MAX_SLOTS = 4096
Slots = Annotated[tuple[Slot, ...], msgspec.Meta(max_length=MAX_SLOTS)]


Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
MAX_TEXT = 4096
BoundedText = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Digest = Annotated[bytes, msgspec.Meta(max_length=64)]
#: The bounds keep NaN out too, because no comparison with NaN is true.
Rate = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Sampling(MessagePart, frozen=True):
    """How tokens are drawn. `max_tokens` is the budget of the whole sample, over all its leases. `top_k` 0 = off.

    Before `min_tokens` tokens of the sample no stop token is drawn and no stop text ends it. `stop`: texts of which the first to appear in
    the completion ends it, with the token that completes it.
    """

    max_tokens: Positive
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 1.0
    top_p: Share = 1.0
    top_k: Count = 0
    stop_token_ids: Annotated[tuple[int, ...], msgspec.Meta(max_length=1024)] = ()
    min_tokens: Count = 0
    stop: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=256)], ...], msgspec.Meta(max_length=MAX_STOPS)
    ] = ()


class EngineSpec(MessagePart, frozen=True):
    """What a worker needs to build its engine, besides weights. `model_config` is the text of a Hugging Face config.json."""

    name: RunName
    model_config: Annotated[str, msgspec.Meta(max_length=MAX_CONFIG_CHARS)]
    dtype: str
    max_batch: Positive
    context_length: Positive
    pace: Rate = 0.0  # tokens a second and sample at most; 0 = as fast as it goes
    memory_share: Share = 0.9  # of a GPU's memory
    eager: bool = False  # no compilation and no CUDA graphs
    options: Annotated[str, msgspec.Meta(max_length=MAX_CHARS)] = ""  # of vLLM (`engine_options`), as JSON
    #: Bytes of each token that say which experts it went to (`protocol.routing`); 0 = engines do not report it.
    routing: Annotated[int, msgspec.Meta(ge=0, le=MAX_ROUTING)] = 0
    adapter_rank: Count = 0  # of adapters that it keeps beside their base; 0 = it merges them
    keep_cache: bool = (
        False  # of the KV cache, over a load of weights; what is found in it is by `Lease.begun_version`
    )
    speculation: Speculation = "none"  # "group": what a sample's siblings said are its drafts
    move_kv: bool = (
        False  # it gives out the KV blocks of samples that leave it, and loads what other engines give
    )
    #: Digest of the tokens by their ids, of runs that share episodes: one's tokens are the other's prompts. "" = not known.
    vocabulary: Annotated[str, msgspec.Meta(max_length=64)] = ""
    shared: bool = False  # the run allows samples of others in one batch with its own (`run.share_engines`)

    @property
    def shareable(self) -> bool:
        """Whether samples of another run may be in one batch with this run's: it allows it, adapters lie beside their base, and nothing
        that one sample left is found by another."""
        finds = self.speculation != "none" or self.move_kv or self.keep_cache or bool(self.routing)
        return self.shared and self.adapter_rank > 0 and not finds


class WeightSource(MessagePart, frozen=True):
    """Where the bytes of a version lie. `token` opens exactly this version to a reader that proves to know it.

    `endpoint`: "tcp://host:port", under CURVE where `server_key` is given, else in the clear; or "file://path" on a filesystem that both
    see. `local`: "machine:name" of the holder's local socket, for readers on the same machine. `complete`: False while the holder has only
    a part of the version, and tells readers which. `last`: an engine on the reader's node, or of its cluster, fetches the version for all
    of them; this source is for when that one delivers nothing, for `after_s` seconds where the source is on another cluster.
    """

    endpoint: BoundedText
    server_key: BoundedText
    token: Annotated[bytes, msgspec.Meta(max_length=64)]
    local: BoundedText = ""
    complete: bool = True
    nixl: bool = False  # its memory may be read by NIXL
    last: bool = False
    after_s: Annotated[float, msgspec.Meta(ge=0.0, le=3600.0)] = 0.0


class KvSource(MessagePart, frozen=True):
    """Where KV blocks of a sample, or of what its prompt begins with, lie: `number` names them to their holder. They are of the first
    `tokens` tokens. `within_s`: when they have not come
    by then the tokens are prefilled."""

    source: WeightSource
    number: Count
    tokens: Count
    within_s: Rate


# ---------------------------------------------------------------- daemon -> worker or trainer, before a session


class Rejected(Message, frozen=True):
    """The hello was not accepted: the worker prints both and exits, unless `retry`."""

    reason: str
    remedy: str
    retry: bool = False


class HelloAgain(Message, frozen=True):
    """The daemon does not know this connection (it was restarted, or declared the worker dead): register again, same session."""

    reason: str


def reserved_name(slot: str, session: str) -> str:
    """What the daemon, the trainer and its launcher call one process of a reserved engine: its slot and the start of its session.

    Two processes of one slot have different names, so that a message of one is never taken for the other's.
    """
    return f"{slot[:240]}.{session[:12]}"


#: In a run's `out_dir`: how environment workers in jobs join its trainer (mode 0600).
ENVIRONMENT_FILE = "environment-workers.json"


def environment_file(out_dir: str) -> str:
    """Its path; "" where `out_dir` is not absolute: another process could not find it."""
    return f"{out_dir.rstrip('/')}/{ENVIRONMENT_FILE}" if out_dir.startswith("/") else ""


def words(text: str) -> str:
    """`text` cut to what a message's reason may hold."""
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
