"""Opens one tokenizer.json in a process of its own, so that one on which the library fails ends this process and no engine.

A run publishes the file, and every engine of the run opens it. The library is native code: a file can make it abort, overflow its stack
when a tokenizer is dropped, or claim any amount of memory, and none of that can be caught. The engine (`stopping`) runs this file by its
path, writes the bytes to stdin, and takes them only if `PASSED` comes and the exit code is 0. Imports nothing of ours; knows no engine.

Boundary: a process under limits of memory, CPU time and time, given bytes that are not trusted.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import resource
import signal
import sys
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

PASSED = b"passed"
#: What one may take to be opened and tried: a file of 21 MB takes 2 s, and 64 MiB are the most.
CPU_S = 120
#: Of a run that borrows slots: the library holds the interpreter's lock while it opens a file, so all samples of the run whose engine it is
#: wait for as long.
BORROWED_CPU_S = 10
WALL_S = 300
#: Address space: the library takes up to 45 bytes for each byte of a file that is no attack.
BASE_NBYTES = 512 << 20
NBYTES_A_BYTE = 64
STACK_NBYTES = 2 << 20  # the engine opens it with 8 MiB
MOST_CHARACTERS = 4096  # of one token; the library goes as deep into its stack as a token is long
TRIED = 64  # tokens that are decoded: the first ones, and the longest
MOST_DECODERS = 16  # of a sequence; Llama's has 4


def _limit(which: int, most: int) -> None:
    hard = resource.getrlimit(which)[1]
    least = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(which, (least, hard))


def _try(data: bytes) -> None:
    """Open it, decode some tokens and drop it. Raises what the library raises, and `ValueError`."""
    tokenizer = Tokenizer.from_buffer(data)
    if tokenizer.decoder is not None:
        _refuse_unbounded(json.loads(tokenizer.decoder.__getstate__()))
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    longest = heapq.nlargest(TRIED, vocabulary, key=len)
    if longest and len(longest[0]) > MOST_CHARACTERS:
        raise ValueError(f"a token has {len(longest[0]):,} characters; {MOST_CHARACTERS:,} are the most")
    for token_id in {*heapq.nsmallest(TRIED, vocabulary.values()), *(vocabulary[one] for one in longest)}:
        stream = DecodeStream(skip_special_tokens=True)
        with contextlib.suppress(Exception):  # some tokens alone are no text; a panic is no `Exception`
            for _ in range(2):
                stream.step(tokenizer, token_id)


def _refuse_unbounded(decoder: dict[str, Any]) -> None:
    """What a decoder makes of tokens that follow each other cannot be tried out: there are too many of them. So it may search for texts
    alone, as a regular expression may take any time, and put none in their place that is longer. Raises `ValueError`."""
    left, seen = [decoder], 0
    while left:
        match one := left.pop():
            case {"type": "Sequence", "decoders": [*parts]}:
                left += parts
                seen += len(parts)
                if seen > MOST_DECODERS:
                    raise ValueError(f"it has {seen:,} decoders; {MOST_DECODERS} are the most")
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                if len(new) > len(old):
                    raise ValueError("a decoder replaces a text by a longer one")
            case {"type": "Replace"}:
                raise ValueError("a decoder searches with a regular expression")
            case {"type": "BPEDecoder", "suffix": ""} | {"type": "CTC", "word_delimiter_token": ""}:
                raise ValueError(f"a decoder {one['type']} puts a space before every character")


def main() -> None:
    """`sys.argv[1]`: CPU seconds that it may take."""
    # Slurm's notice is for the worker, which ends this process.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.alarm(WALL_S)
    data = sys.stdin.buffer.read()
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_CPU, int(sys.argv[1]))
    _limit(resource.RLIMIT_STACK, STACK_NBYTES)
    _limit(resource.RLIMIT_AS, BASE_NBYTES + NBYTES_A_BYTE * len(data))
    try:
        _try(data)  # the tokenizer is dropped in there
    except BaseException as error:
        _say(f"{type(error).__name__}: {error}".encode(errors="replace")[:500])
        raise
    _say(PASSED)


def _say(words: bytes) -> None:
    sys.stdout.buffer.write(words)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
