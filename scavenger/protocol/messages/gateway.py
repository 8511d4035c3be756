"""What a gateway and the daemon say to each other: a turn is asked for, its tokens are streamed, its episode ends.

A gateway's calls travel as a trainer's do (`Call`, `Reply`) under the key that owns the run, and name no attempt: a turn outlives its
trainer. Every call may be repeated; the daemon knows a turn by its `request`.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Annotated

import msgspec

from scavenger.protocol.messages.common import BoundedText, Count, Message, Positive, Sampling

#: Samples of one turn: the `n` of a caller.
MAX_TURN_SAMPLES = 64
#: Names an episode within its run.
EPISODE_PATTERN = r"\A[A-Za-z0-9][A-Za-z0-9_.-]{0,127}\Z"
EpisodeName = Annotated[str, msgspec.Meta(pattern=EPISODE_PATTERN)]
Sha256 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


def named_request(episode: str, name: str) -> bytes:
    """`OpenTurn.request` of a caller's request that has a name of its own within the episode."""
    return sha256(episode.encode() + b"\0name\0" + name.encode()).digest()


class OpenTurn(Message, frozen=True):
    """Generate `n` completions of `prompt` for an episode, or go on with the turn of that `request`. Answered by `TurnAccepted`.

    `request`: hash of the episode and of what names the caller's request: the same one is generated once. `content`: hash of all that
    was asked for; a request that comes again with another content is refused. `have`: tokens of each sample that the gateway has; the
    durable ones after them are sent at once, later ones as they become durable.
    """

    episode: EpisodeName
    request: Sha256
    content: Sha256
    prompt: bytes
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_TURN_SAMPLES)]
    sampling: Sampling
    have: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_TURN_SAMPLES)] = ()


class EndEpisode(Message, frozen=True):
    """The episode is over: its open turns are given up, and it takes no more."""

    episode: EpisodeName


class GatewayPing(Message, frozen=True):
    """Is the daemon there, and does it know the run? Answered by `Pong`."""


class TurnAccepted(Message, frozen=True):
    """The turn is in the ledger. `number` counts the turns of its episode from 1; `known`: it was asked for before.

    `prompt_sha256`, `prompt_tokens`: of what it is generated from, which a gateway that began anew may render differently.
    """

    turn_id: int
    number: Positive
    known: bool
    prompt_sha256: bytes
    prompt_tokens: Count


class TurnTokens(Message, frozen=True):
    """Durable tokens of one sample of a turn, from `offset` on. `finish` ends the sample; so does `error`, why it has no end.

    `version`: of the weights that generate it. Messages may be lost: a gateway that misses tokens repeats its `OpenTurn`.
    """

    request: Sha256
    sample_id: int
    index: Count
    offset: Count
    tokens: bytes
    logprobs: bytes
    raw_logprobs: bytes
    version: int
    finish: str = ""
    error: BoundedText | None = None
