"""A ledger with a tokenizer of its own, for the tests of what the web pages say of completions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from scavenger import config
from scavenger.ledger import records as r
from tests.ledger.examples import an_episode, apart, evaluated
from tests.top import sites


def word(token: int) -> str:
    return f"<w{token}>"


def tokenizer(folder: Path, most: int = 40_000) -> Path:
    """Writes one whose token 7 is `<w7>`."""
    made = Tokenizer(WordLevel({word(i): i for i in range(most)}, unk_token=word(0)))
    made.pre_tokenizer = Whitespace()
    path = folder / "tokenizer.json"
    made.save(str(path))
    return path


def hostile_episode() -> list[r.Record]:
    """Its name, its tools and their calls are what somebody else chooses."""
    x = sites.EVIL_STORED
    return [
        msgspec.structs.replace(one, name=x)
        if isinstance(one, r.EpisodeBegun)
        else msgspec.structs.replace(one, call=f"{i}{x}", tool=x)
        if isinstance(one, r.ToolAsked)
        else one
        for i, one in enumerate(an_episode())
    ]


def ledger(folder: Path, *, evil: bool = False, more: Sequence[list[r.Record]] = ()) -> str:
    """Its URL."""
    differences: list[r.Record] = [r.DifferencesRecorded(11, 1, 1, 9, 0.5, apart(9))]
    own = [*sites.records(), an_episode(), evaluated(), differences]
    if evil:
        own = [*sites.hostile(), hostile_episode()]
    records = [*own, *more]
    path = str(tokenizer(folder))
    named = [
        [
            msgspec.structs.replace(one, tokenizer=path)
            if isinstance(one, r.RunCreated) and not evil
            else one
            for one in some
        ]
        for some in records
    ]
    return config.read_daemon(sites.site(folder, named)).ledger_url
