"""What a gateway and the daemon say to each other: a turn is asked for, its tokens are streamed, its episode ends.

Tools with effects outside are asked once: `AskTool` is durable before one is asked, `AnswerTool` before its answer is shown.

A gateway's calls travel as a trainer's do (`Call`, `Reply`) under the key that owns the run, and name no attempt: a turn outlives its
trainer. Every call may be repeated; the daemon knows a turn by its `request`.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Annotated, Literal

import msgspec

from scavenger.protocol.messages.common import BoundedText, Count, Message, OtherRun, Positive, Sampling

#: Samples of one turn: the `n` of a caller.
MAX_TURN_SAMPLES = 64
#: Names an episode within its run.
EPISODE_PATTERN = r"\A[A-Za-z0-9][A-Za-z0-9_.-]{0,127}\Z"
EpisodeName = Annotated[str, msgspec.Meta(pattern=EPISODE_PATTERN)]
#: Names a call of a tool within its episode: of what the agent asked, and how often it had asked that before.
CALL_PATTERN = r"\A[A-Za-z0-9][A-Za-z0-9_.~-]{0,127}\Z"
CallName = Annotated[str, msgspec.Meta(pattern=CALL_PATTERN)]
#: Bytes of a tool's answer.
MAX_ANSWER_BYTES = 1 << 20
#: A gateway's error type of a call whose episode has used up its budget.
BUDGET_SPENT = "budget_exceeded"
Sha256 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


def named_request(episode: str, name: str, policy: str = "") -> bytes:
    """`OpenTurn.request` of a caller's request that has a name of its own within the episode. `policy`: as in `OpenTurn`."""
    whose = b"\0policy\0" + policy.encode() if policy else b""
    return sha256(episode.encode() + whose + b"\0name\0" + name.encode()).digest()


class OpenTurn(Message, frozen=True):
    """Generate `n` completions of `prompt` for an episode, or go on with the turn of that `request`. Answered by `TurnAccepted`.

    `request`: hash of the episode and of what names the caller's request: the same one is generated once. `content`: hash of all that
    was asked for; a request that comes again with another content is refused. `have`: tokens of each sample that the gateway has; the
    durable ones after them are sent at once, later ones as they become durable. `policy`: another run of this owner's whose weights
    answer; "": the run's own.
    """

    episode: EpisodeName
    request: Sha256
    content: Sha256
    prompt: bytes
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_TURN_SAMPLES)]
    sampling: Sampling
    have: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_TURN_SAMPLES)] = ()
    policy: OtherRun = ""


class EndEpisode(Message, frozen=True):
    """The episode is over: its open turns are given up, and it takes no more."""

    episode: EpisodeName


class AskTool(Message, frozen=True):
    """An agent is about to ask a tool whose effects are outside. Answered by `ToolState`.

    `asker`: random, of one life of the environment worker: its own repeat is no second call. `tool`: its name, for people.
    """

    episode: EpisodeName
    call: CallName
    tool: BoundedText
    asker: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class AnswerTool(Message, frozen=True):
    """What the tool answered. The first answer that comes is the call's: it is in the reply, `ToolState`, whatever this one is."""

    episode: EpisodeName
    call: CallName
    answer: Annotated[bytes, msgspec.Meta(max_length=MAX_ANSWER_BYTES)]


class ToolState(Message, frozen=True):
    """What the ledger has of a call. `new`: ask the tool now, this once. `open`: somebody else asked it, and no answer is known.
    `answered`: with this `answer`.
    """

    state: Literal["new", "open", "answered"]
    answer: bytes = b""


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
