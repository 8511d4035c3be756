"""One episode of the agent's demo, turn by turn: read from the ledger, and drawn as text.

Owns the choice of what is shown of it. The reading is by the queries under `sql/demo/`; `drawn` is pure.

Boundary: reads the ledger only; knows neither the environment nor how an episode is played.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from scavenger import resources
from scavenger.ledger import queries
from scavenger.ledger.read.prompts import whole_prompts
from scavenger.ledger.read.tokenizer import Decoder
from scavenger.printable import printable
from scavenger.protocol.messages import unpack_tokens


@dataclass(frozen=True, slots=True)
class EngineShare:
    """Tokens `start` to `end` of a completion, and who generated them. `end` None: nothing was accepted of it."""

    kind: str
    node: str
    start: int
    end: int | None


@dataclass(frozen=True, slots=True)
class DrawnTurn:
    """`heard`: what the environment said before it. Seconds: from the earlier turn's last token to this call, in the queue, in engines."""

    number: int
    heard: str
    said: str
    between_s: float | None
    queue_s: float | None
    model_s: float | None
    moves: int
    engines: tuple[EngineShare, ...]


@dataclass(frozen=True, slots=True)
class DrawnEpisode:
    name: str
    reward: float | None
    advantage: float | None
    turns: tuple[DrawnTurn, ...]


@dataclass(frozen=True, slots=True)
class EpisodeFigures:
    """`episodes`, `turns`: that were trained with; `one`: of them, None before there is any."""

    episodes: int
    turns: int
    one: DrawnEpisode | None


def read(engine: sa.Engine, tokenizer: Decoder) -> EpisodeFigures:
    """The figures of the training episodes, and one of these."""
    with engine.connect() as connection:
        episodes, turns = connection.execute(sa.text(resources.text("sql/demo/episodes.sql"))).one()
        rows = connection.execute(sa.text(resources.text("sql/demo/episode.sql"))).mappings().all()
        if not rows:
            return EpisodeFigures(episodes, turns, None)
        prompts = whole_prompts(connection, [row["group_id"] for row in rows])
        samples = [row["sample_id"] for row in rows]

        def named(text: str) -> list[tuple[Any, ...]]:
            statement = sa.text(text).bindparams(sa.bindparam("sample_ids", expanding=True))
            return [tuple(row) for row in connection.execute(statement, {"sample_ids": samples})]

        said: dict[int, bytes] = {}
        for sample_id, tokens in named(queries.load("turn_tokens")):
            said[sample_id] = said.get(sample_id, b"") + bytes(tokens)
        engines: dict[int, list[EngineShare]] = {}
        for sample_id, kind, node, start, end in named(resources.text("sql/demo/engines.sql")):
            engines.setdefault(sample_id, []).append(EngineShare(kind, node, start, end))
    drawn_turns = tuple(
        DrawnTurn(
            row["number"],
            _text(tokenizer, prompts[row["group_id"]][4 * row["prefix_len"] :]),
            _text(tokenizer, said.get(row["sample_id"], b"")),
            row["between_s"],
            row["queue_s"],
            row["model_s"],
            row["moves"],
            tuple(engines.get(row["sample_id"], ())),
        )
        for row in rows
    )
    first = rows[0]
    one = DrawnEpisode(first["episode"], first["reward"], first["advantage"], drawn_turns)
    return EpisodeFigures(episodes, turns, one)


def _text(tokenizer: Decoder, packed: bytes) -> str:
    return printable(tokenizer.decode(list(unpack_tokens(packed)), skip_special_tokens=True))


def drawn(episode: DrawnEpisode) -> str:
    """A line for what the environment said, and one for what the model said: when, and on which engines."""
    lines = [f"{episode.name}: reward {_number(episode.reward)}, advantage {_number(episode.advantage)}"]
    words = max(len(text) for turn in episode.turns for text in (turn.heard, turn.said))
    for index, turn in enumerate(episode.turns):
        waited = f"{turn.between_s:.2f} s until the next call" if index and turn.between_s is not None else ""
        lines.append(f"{'':>4}{'tool' if index else 'prompt':<8}{turn.heard:<{words}}  {waited}".rstrip())
        seconds = f"queue {_number(turn.queue_s)} s, model {_number(turn.model_s)} s"
        shares = " > ".join(
            f"{share.kind}@{share.node}[{share.start}:{share.end}]"
            for share in turn.engines
            if share.end is not None
        )
        moved = f"  moved {turn.moves}x" if turn.moves else ""
        lines.append(
            f"{turn.number:>3} {'model':<8}{turn.said:<{words}}  {seconds}  {shares}{moved}".rstrip()
        )
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
