"""`samples.jsonl`: prompts and completions of some groups of each step, in the run's own folder, for its owner to read.

The ledger has all of them, and belongs to the daemon's user. Owns the file; knows nothing of training.

Boundary: a file of its own, beside `monitor`, which never sees a completion.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from tokenizers import Tokenizer

from scavenger.protocol import messages
from trainer.algorithms.scoring import Judged

NAME = "samples.jsonl"


class SampleLog:
    """`every`: one group in so many, by the prompt's place in the data, for each purpose; a purpose that is not there has none. Which
    groups they are does not depend on how long their completions are. `say`: a line for people.

    The file is the user's alone (0600). One that cannot be written is left, which is said once, and the run goes on.
    """

    def __init__(
        self, out_dir: Path, every: Mapping[str, int], tokenizer: Tokenizer, say: Callable[[str], None]
    ) -> None:
        self._path, self._every, self._tokenizer, self._say = out_dir / NAME, dict(every), tokenizer, say

    def write(self, judged: Judged) -> None:
        group = judged.group
        every = self._every.get(group.purpose, 0)
        if not every or group.prompt_index % every:
            return
        prompt = self._text(group.prompt)
        lines = [
            json.dumps(
                {
                    "purpose": group.purpose,
                    "step": group.step,
                    "version": group.version,
                    "group": group.prompt_index,
                    "sample": sample.sample_id,
                    "index": sample.index,
                    "prompt": prompt,
                    "completion": self._text(sample.tokens),
                    "tokens": messages.token_count(sample.tokens),
                    "finish": sample.finish,
                    "reward": None if math.isnan(reward) else reward,
                    "masked": why,
                },
                ensure_ascii=False,
            )
            for sample, reward, why in judged.samples
        ]
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write("\n".join(lines) + "\n")
        except OSError as error:
            self._every = {}
            self._say(f"{self._path} gets nothing more of this run: {error}")

    def _text(self, tokens: bytes) -> str:
        text: str = self._tokenizer.decode(list(messages.unpack_tokens(tokens)), skip_special_tokens=False)
        return text


def one_in(groups: int, train: int, evaluation: int) -> dict[str, int]:
    """`SampleLog`'s `every` for about `groups` of the `train` groups of a step, and of the `evaluation` groups of an evaluation."""
    of = {"train": train, "eval": evaluation}
    return {purpose: max(1, count // groups) for purpose, count in of.items()} if groups else {}
