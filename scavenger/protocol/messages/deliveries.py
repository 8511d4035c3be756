"""Several policies in one environment: what one run's episodes say is delivered to the trainer of another.

    trainer of the run that plays -> daemon    Deliver: a group's episodes are over; what the other policy said in them, and its rewards
    trainer of the other run -> daemon         WantDeliveries(step, count): so many groups for this step
    daemon -> trainer of the other run         DeliveredGroup, once it is durable; EpisodesOver when no further one comes
    trainer of the other run -> daemon         CommitStep.deliveries: what became of each

Every call may be repeated. A turn is delivered once: the daemon knows what it has of an episode by the episode's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Annotated

import msgspec

from scavenger.protocol.messages.common import (
    MAX_GROUP_SAMPLES,
    MAX_MESSAGE_BYTES,
    BoundedText,
    Count,
    Message,
    MessagePart,
    Positive,
    RunName,
)
from scavenger.protocol.messages.gateway import EpisodeName, Sha256

#: Rows and turns of one policy in one episode.
MAX_DELIVERED_ROWS, MAX_DELIVERED_TURNS = 4096, 4096
#: Groups that a trainer may want at once.
MAX_WANTED = 16384
Packed = Annotated[bytes, msgspec.Meta(max_length=MAX_MESSAGE_BYTES)]
Reward = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
#: What a turn may earn at most, or lose: sums of it are far within a float32, in which trainers have advantages.
MOST_TURN_REWARD = 1e9
#: Of a turn in a row, which has what untrained turns after it earned besides: at most `MAX_DELIVERED_TURNS` of them.
TurnReward = Annotated[float, msgspec.Meta(ge=-1e13, le=1e13)]


class RowTurn(MessagePart, frozen=True):
    """One turn of an episode, as a row trains it: its place among the episode's turns, from 0; how many of the row's trained tokens are
    its; and which part of the episode's reward the environment says it earned. `group`: the daemon's number of it, which the daemon says.
    """

    number: Count
    tokens: Positive
    reward: TurnReward
    group: Count = 0


#: The turns of one row, in the order of its trained tokens. Empty: the environment does not reward turns.
RowTurns = Annotated[tuple[RowTurn, ...], msgspec.Meta(max_length=MAX_DELIVERED_TURNS)]


def fault_of_turns(turns: Sequence[RowTurn], trained: int) -> str:
    """Why these are not the turns of a row that trains so many tokens; "" where they are, or where there are none."""
    if turns and sum(turn.tokens for turn in turns) != trained:
        return f"turns of {sum(turn.tokens for turn in turns)} tokens in a row that trains {trained}"
    return ""


def fault_of_numbers(rows: Iterable[Sequence[RowTurn]]) -> str:
    """Why rows are not of one episode's turns: each is in one of them, and all of them have theirs, or none has."""
    of_rows = [[turn.number for turn in turns] for turns in rows]
    numbers = [number for of_row in of_rows for number in of_row]
    if len(set(numbers)) != len(numbers):
        return "a turn is in two places"
    return "some rows have turns with rewards, and others none" if numbers and not all(of_rows) else ""


def turn_ends(
    prompt: bytes, completion: bytes, mask: bytes, turns: Sequence[RowTurn]
) -> list[tuple[RowTurn, bytes]]:
    """Of a row's turns each with the SHA-256 of the row's tokens up to the turn's end: of the prompt and completion of its sample."""
    trained = [at for at, one in enumerate(mask) if one] if mask else range(len(completion) // 4)
    read, upto, taken, found = sha256(prompt), 0, 0, []
    for turn in turns:
        taken += turn.tokens
        end = trained[taken - 1] + 1
        read.update(completion[4 * upto : 4 * end])
        upto = end
        found.append((turn, read.digest()))
    return found


class DeliveredRow(MessagePart, frozen=True):
    """One row to train. `prompt`, `completion`: token ids, packed int32. `mask`: a byte a token of `completion`, 1 where the policy said
    it; empty: all of them. `behaviour`: logprobs of those that it said, packed float32. `turns`: where the environment rewards turns.
    """

    prompt: Packed
    completion: Packed
    mask: Packed
    behaviour: Packed
    turns: RowTurns = ()


class EpisodeShare(MessagePart, frozen=True):
    """What one policy said in one episode, and its reward. `index`: of the episode in its group. `used`: requests (`OpenTurn.request`) of
    the turns that the rows are of.
    """

    episode: EpisodeName
    index: Count
    reward: Reward
    used: Annotated[tuple[Sha256, ...], msgspec.Meta(min_length=1, max_length=MAX_DELIVERED_TURNS)]
    rows: Annotated[tuple[DeliveredRow, ...], msgspec.Meta(min_length=1, max_length=MAX_DELIVERED_ROWS)]


class Deliver(Message, frozen=True):
    """Episodes of one group of this run's step are over: `policy`, another run, gets what it said in them. Answered by `Ok`."""

    policy: RunName
    step: Count
    prompt_index: Count
    shares: Annotated[tuple[EpisodeShare, ...], msgspec.Meta(min_length=1, max_length=MAX_GROUP_SAMPLES)]


class WantDeliveries(Message, frozen=True):
    """Up to `count` groups for `step`, those in `have` among them, which are here and not committed. Answered by `Ok`."""

    step: Positive
    count: Annotated[int, msgspec.Meta(ge=0, le=MAX_WANTED)]
    have: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_WANTED)] = ()


class DeliveredEpisode(MessagePart, frozen=True):
    """One delivery: `CommitStep.deliveries` names it by its id. `version`: the oldest weights that its turns are of."""

    delivery_id: Positive
    episode: EpisodeName
    index: Count
    reward: float
    version: Count
    rows: tuple[DeliveredRow, ...]


class DeliveredGroup(Message, frozen=True):
    """A group of another run's step, as this run's policy had a part in it. `group_id`: among deliveries."""

    group_id: Positive
    source: RunName
    step: Count
    prompt_index: Count
    episodes: tuple[DeliveredEpisode, ...]


class EpisodesOver(Message, frozen=True):
    """The run that plays the episodes has ended: no further delivery comes until it is opened again."""

    source: RunName
    reason: BoundedText
