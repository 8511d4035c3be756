"""The built-in task: put six digits in ascending order. "305712>" is answered by "012357" and the end token.

Owns the prompts, their split into training and held-out ones, the character tokenizer and the reward. Needs no torch, so the
reward's process starts at once. A prompt depends on (seed, index) alone: order, restarts and ranks change nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import blake3
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

DIGITS = 6
PAD, EOS = "<pad>", "<eos>"
ALPHABET = (PAD, EOS, *"0123456789>")
#: One prompt in this many is held out: never trained on, whatever the seed.
HELD_OUT_SHARE = 16


def is_held_out(digits: str) -> bool:
    return blake3.blake3(digits.encode()).digest()[0] % HELD_OUT_SHARE == 0


def prompt_task(seed: int, index: int, *, held_out: bool = False) -> tuple[str, dict[str, Any]]:
    """The prompt's text and its metadata (`answer`) of prompt `index` of the stream that `seed` names."""
    split = "held-out" if held_out else "train"
    attempt = 0
    while True:
        digest = blake3.blake3(f"sort/{split}/{seed}/{index}/{attempt}".encode()).digest()
        digits = f"{int.from_bytes(digest[:16], 'little') % 10**DIGITS:0{DIGITS}d}"
        if is_held_out(digits) is held_out:
            return f"{digits}>", {"answer": "".join(sorted(digits))}
        attempt += 1


def reward(prompt: str, completion: str, meta: dict[str, Any]) -> float:
    """1 for exactly the sorted digits, 0 otherwise."""
    return 1.0 if completion == meta["answer"] else 0.0


def closeness(prompt: str, completion: str, meta: dict[str, Any]) -> float:
    """Between 0 and 1: the share of places that hold the right digit. A model that knows nothing gets some of it, and can learn from it."""
    answer = str(meta["answer"])
    right = sum(said == wanted for said, wanted in zip(completion, answer, strict=False))
    return right / max(len(answer), len(completion))


def characters(alphabet: tuple[str, ...]) -> Tokenizer:
    """One token a character; the first two are padding and the end of a completion."""
    made = Tokenizer(models.WordLevel({token: i for i, token in enumerate(alphabet)}, unk_token=PAD))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([PAD, EOS])
    return made


def write_characters(folder: Path, alphabet: tuple[str, ...]) -> None:
    """`tokenizer.json` and the little that Hugging Face's loaders want beside it."""
    characters(alphabet).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "pad_token": PAD}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def tokenizer() -> Tokenizer:
    """Of this task."""
    return characters(ALPHABET)


def write_tokenizer(folder: Path) -> None:
    """Of this task."""
    write_characters(folder, ALPHABET)
