"""The tokenizer of a run, from the file that its owner named.

Boundary: the web's child process imports this and no driver of a database, which takes ten times as long as the tokenizer itself.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import Protocol

from scavenger.errors import ConfigError

#: Of a tokenizer.json. The largest known have 35 MB.
MOST_BYTES = 256 << 20


class Decoder(Protocol):
    """What is asked of a tokenizer."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def load_tokenizer(path: str) -> Decoder:
    """The tokenizer of a run. Raises `ConfigError` when its file is gone, or is none: its path is the run's owner's to say; and without the
    package `tokenizers`, which a daemon does not need.
    """
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the package tokenizers, which makes text of token ids, is not installed",
            "pip install 'scavenger[text]'; or ask for ids: scavenger ledger tokens SAMPLE",
        ) from error
    try:
        opened = os.open(
            path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        )  # of a pipe nobody waits for the other end
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the run's tokenizer {path!r} is not there any more, or cannot be read",
            "put it back: completions are kept as token ids",
        ) from error
    try:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
            raise ConfigError(
                f"the run's tokenizer {path!r} is no file of at most {MOST_BYTES >> 20} MiB",
                "its run named something else; completions are kept as token ids",
            )
        with open(opened, "rb", closefd=False) as file:
            found_there: Decoder = Tokenizer.from_buffer(file.read(MOST_BYTES))
            return found_there
    finally:
        os.close(opened)
