"""Token ids to text, in a process of its own: a tokenizer's file is a run owner's, and may take for ever, all memory, or the process down.

    parent: texts.read(path, samples)  --JSON-->  python -m scavenger.web.texts  --JSON-->  texts

The child has bounds of memory and CPU time, and its texts are cut to length there. A server's children stay for the next page with the
same file (`Children`), since a Python that starts takes longer than the texts of a page; an export of thousands of pages has one
(`Child`). CPU time is bounded for each request.

Boundary: the process that a foreign file may end.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import errno
import functools
import json
import math
import os
import re
import resource
import selectors
import subprocess
import sys
import threading
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self

from scavenger.errors import ConfigError
from scavenger.ledger.read.tokenizer import load_tokenizer
from scavenger.printable import printable

#: Characters of one text; tokens whose probability is drawn, and characters of a piece.
MOST_TEXT, MOST_PIECES, MOST_PIECE = 6_000, 2_000, 200
#: Least probability of each level of the marks: a token below the last is of level 3.
LEVELS = (0.5, 0.1, 0.01)
#: Nats by which trainer and engine differ at each level of the other marks.
APART = (0.02, 0.1, 0.5)
#: Children that a server keeps while they have nothing to do, and for how long.
MOST_IDLE, IDLE_S = 3, 60.0
#: Tries with a tokenizer that its child does not survive: of an export so many, of a server so many and then one each `AGAIN_S`.
MOST_LOST, AGAIN_S = 2, 60.0
#: Tokenizers of which a server remembers that.
MOST_KNOWN = 1_000
#: Bytes of a child's reply. The largest that it makes, of a search or of a page of marked texts, is a quarter of it.
MOST_REPLY = 64 << 20
CPU_S, WALL_S, MEMORY = 10, 20.0, 2 << 30
_AROUND = 60
# -P: else modules of the folder that we run in come first.
_ARGV, _MANY = (sys.executable, "-P", "-m", "scavenger.web.texts"), "many"


class Piece(NamedTuple):
    """A token, or several that are a character together. `level`: of how unlikely it was, 0 to 3. `apart`: of how much likelier the trainer
    finds it than the engine, -3 to 3, 0 where that is little or not known. `title`: both in numbers."""

    text: str
    level: int
    apart: int
    title: str


#: Of a completion's first tokens: logprobs, and as many differences (trainer less engine), or none where they are not known.
Marked = tuple[Sequence[float], Sequence[float]]


class Lost(ConfigError):
    """A child ended, or took too long."""


class Ask(Protocol):
    """Gives the child's reply to a request. Raises `ConfigError` where the request's tokenizer cannot be used."""

    def __call__(self, request: dict[str, Any], /) -> Any: ...


def read(
    tokenizer: str,
    texts: Sequence[Sequence[int]],
    marked: Mapping[int, Marked] = MappingProxyType({}),
    ask: Ask | None = None,
    most: int = MOST_TEXT,
) -> tuple[list[str], dict[int, tuple[Piece, ...]], dict[int, str]]:
    """(a text for each of `texts`; by their places, pieces of those that are `marked`, and what follows these). All printable and cut: a
    text has `most` characters, and one more where it is longer.

    Raises `ConfigError` where the tokenizer cannot be used.
    """
    numbers = {str(at): [[_number(x) for x in some] for some in of] for at, of in marked.items()}
    request = {"tokenizer": tokenizer, "texts": list(map(_packed, texts)), "marked": numbers, "most": most}
    found = (ask or _asked)(request)
    pieces = {
        int(at): tuple(
            Piece(str(text), int(level), int(apart), str(said)) for text, level, apart, said in some
        )
        for at, some in found["pieces"].items()
    }
    rest = {int(at): str(text) for at, text in found["rest"].items()}
    return [str(text) for text in found["texts"]], pieces, rest


def containing(
    tokenizer: str, texts: Sequence[Sequence[int]], wanted: str, ask: Ask | None = None
) -> dict[int, str]:
    """The text around `wanted`, whatever the case, of each of `texts` that has it, by its place. Raises `ConfigError` as `read`."""
    found = (ask or _asked)({"tokenizer": tokenizer, "texts": list(map(_packed, texts)), "wanted": wanted})
    return {int(place): str(text) for place, text in found["found"].items()}


def probabilities(
    ids: Sequence[int],
    logprobs: Sequence[float],
    decode: Callable[[list[int]], str],
    differences: Sequence[float] = (),
) -> list[Piece]:
    """Of a completion. Tokens that are characters only together are one piece, with the least likely one's level, and that of the greatest
    difference."""
    pieces, held = [], list[tuple[int, float, float]]()
    for at, one in enumerate(zip(ids, logprobs, differences or [math.nan] * len(ids), strict=True), 1):
        held.append(one)
        text = decode([token for token, *_ in held])
        if text.endswith("\ufffd") and len(held) < 8 and at < len(ids):
            continue
        likely = [math.exp(min(0.0, logprob)) for _, logprob, _ in held if not math.isnan(logprob)]
        level = sum(min(likely, default=1.0) < bound for bound in LEVELS)
        said = ", ".join(f"{value:.3g}" for value in likely) or "not known"
        apart = [value for *_, value in held if not math.isnan(value)]
        most = max(apart, key=abs, default=0.0)
        if apart:
            said += f"; {', '.join(f'{value + 0.0:+.3g}' for value in apart)}"
        side = sum(abs(most) >= bound for bound in APART) * (-1 if most < 0 else 1)
        pieces.append(Piece(printable(text[:MOST_PIECE]), level, side, said))
        held = []
    return pieces


def _packed(ids: Sequence[int]) -> str:
    """A million ids as numbers of JSON take longer than what is made of them."""
    return base64.b64encode(array("i", ids).tobytes()).decode("ascii")


def _ids(packed: str) -> list[int]:
    ids = array("i")
    ids.frombytes(base64.b64decode(packed))
    return ids.tolist()


def _number(value: float) -> float | str:
    """JSON has no infinities."""
    return value if math.isfinite(value) else str(value)


def _asked(request: dict[str, Any]) -> Any:
    """By a child of its own."""
    try:
        done = subprocess.run(
            _ARGV, input=json.dumps(request).encode(), capture_output=True, timeout=WALL_S, check=False
        )
        reply = _parsed(done.stdout) if done.returncode == 0 else {}
    except (subprocess.TimeoutExpired, ValueError):
        reply = {}
    return _usable(request["tokenizer"], reply)


def _parsed(line: bytes) -> dict[str, Any]:
    """A child's reply. Raises `ValueError` where it is no object of JSON: something else wrote to the child's output."""
    reply = json.loads(line)
    if not isinstance(reply, dict):
        raise ValueError("the reply is no object")
    return reply


def _usable(tokenizer: str, reply: dict[str, Any]) -> dict[str, Any]:
    if "error" in reply or not reply:
        why = reply.get("error", f"it takes over {CPU_S} s or {MEMORY >> 30} GiB, or ends its process")
        raise (ConfigError if reply else Lost)(
            f"the run's tokenizer {' '.join(printable(tokenizer[:160]).split())} cannot be used: {why}",
            "put the run's tokenizer.json back: completions are kept as token ids",
        )
    return reply


class Child:
    """One child for many requests. A tokenizer that it could not use is not tried again, nor one with which it ended, or took too long,
    `MOST_LOST` times: each try may take `WALL_S`, and one may be lost to the host's load."""

    def __init__(self) -> None:
        self.started = 0
        self._lost: Counter[str] = Counter()
        self._process: subprocess.Popen[bytes] | None = None
        self._unusable: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def __del__(self) -> None:
        self.end()  # of a server that was dropped, not stopped

    def __call__(self, request: dict[str, Any], /) -> Any:
        tokenizer = request["tokenizer"]
        reply = self._unusable.get(tokenizer)
        if reply is None:
            reply = self._reply(json.dumps(request).encode() + b"\n")
            self._lost[tokenizer] += not reply
            if "error" in reply or self._lost[tokenizer] >= MOST_LOST:
                self._unusable[tokenizer] = reply
        return _usable(tokenizer, reply)

    def _reply(self, line: bytes) -> dict[str, Any]:
        """{} where the child ended or took too long; it is gone then."""
        if self._process is None:
            self.started += 1
            self._process = subprocess.Popen(
                [*_ARGV, _MANY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        try:
            return _parsed(_exchanged(self._process, line, time.monotonic() + WALL_S))
        except (TimeoutError, OSError, ValueError):
            self.end()
            return {}

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(OSError):  # what it did not read is lost with it
                self._process.communicate()
            self._process = None


@dataclasses.dataclass(eq=False)
class _Tried:
    """What became of the children of one tokenizer. `proven`: one had a reply, and none was lost; else one is tried at a time (`turn`)."""

    turn: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    proven: bool = False
    lost: int = 0
    lost_at: float = -math.inf

    def wait_s(self, now: float) -> float:
        """Seconds until it may be tried; 0 = now."""
        return max(0.0, self.lost_at + AGAIN_S - now) if self.lost >= MOST_LOST else 0.0


class Children:
    """Children that stay for a server's next page, each for one tokenizer's file as it is now: what one run's file does to its child is in
    no text of another. One that `MOST_LOST` children did not survive is tried once each `AGAIN_S`, whatever its file is by then: a try
    costs `CPU_S` and up to `MEMORY`, and whoever wrote it may write it anew. Of many threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock, self._closed = clock, threading.Lock(), False
        self._idle: list[tuple[object, Child, float]] = []  # the longest idle one first
        self._tried: OrderedDict[str, _Tried] = OrderedDict()
        self.started = 0

    def __call__(self, request: dict[str, Any], /) -> Any:
        tokenizer = request["tokenizer"]
        with self._lock:
            tried = self._tried.setdefault(tokenizer, _Tried())
            self._tried.move_to_end(tokenizer)
            while len(self._tried) > MOST_KNOWN:
                self._tried.popitem(last=False)
        with contextlib.nullcontext() if tried.proven else tried.turn:
            if wait_s := tried.wait_s(self._clock()):
                why = f"its process ended, or took too long, {tried.lost} times; it is tried again in {math.ceil(wait_s)} s"
                return _usable(tokenizer, {"error": why})
            try:
                reply = self._tell(request)
            except Lost:
                with self._lock:
                    tried.proven, tried.lost, tried.lost_at = False, tried.lost + 1, self._clock()
                raise
            tried.proven = not tried.lost
            return reply

    def _tell(self, request: dict[str, Any]) -> Any:
        key = _file(request["tokenizer"])
        with self._lock:
            at = next((at for at, (of, *_) in enumerate(self._idle) if of == key), None)
            child = self._idle.pop(at)[1] if at is not None else Child()
        before = child.started
        try:
            reply = child(request)
        except BaseException:  # its answer may still come, and would be taken for the next request's
            child.end()
            raise
        finally:
            with self._lock:
                self.started += child.started - before
        with self._lock:
            self._idle.append((key, child, self._clock()))
        self.tidy()
        return reply

    def tidy(self) -> None:
        """End those that are too many, or have had nothing to do for long."""
        with self._lock:
            since = self._clock() - IDLE_S
            keep = [] if self._closed else [one for one in self._idle if one[2] > since][-MOST_IDLE:]
            gone = [child for key, child, at in self._idle if (key, child, at) not in keep]
            self._idle = keep
        for child in gone:
            child.end()

    def close(self) -> None:
        self._closed = True
        self.tidy()


def _file(path: str) -> object:
    """Which file is there; nothing is opened."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return path, None
    return path, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _exchanged(process: subprocess.Popen[bytes], line: bytes, deadline: float) -> bytes:
    """Write a line and read one, at the child's pace. Raises `TimeoutError`; `OSError` where it does not read, or says more than
    `MOST_REPLY`; b"" once it ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    left, found = memoryview(line), bytearray()
    with selectors.DefaultSelector() as ready:
        os.set_blocking(process.stdin.fileno(), False)
        ready.register(process.stdin, selectors.EVENT_WRITE)
        ready.register(process.stdout, selectors.EVENT_READ)
        while not found.endswith(b"\n"):
            seen = ready.select(max(0.0, deadline - time.monotonic()))
            if not seen:
                raise TimeoutError
            for key, _ in seen:
                if key.fileobj is process.stdin:
                    left = left[os.write(process.stdin.fileno(), left) :]
                    if not left:
                        ready.unregister(process.stdin)
                else:
                    some = os.read(process.stdout.fileno(), 1 << 20)
                    if not some:
                        return b""
                    found += some
                    if len(found) > MOST_REPLY:
                        raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
    return bytes(found)


# ---------------------------------------------------------------- the child


def _bounded() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Where the host's memory ends the kernel takes this process, not the server or the daemon beside it.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")


def _bounded_cpu() -> None:
    """Of what comes from now on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = math.ceil(used.ru_utime + used.ru_stime) + CPU_S
    _, hard = resource.getrlimit(
        resource.RLIMIT_CPU
    )  # a login node's may be finite, and is not ours to raise
    resource.setrlimit(
        resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
    )


def _serve_many() -> None:
    for line in sys.stdin:
        _bounded_cpu()
        sys.stdout.write(json.dumps(_replied(json.loads(line))) + "\n")
        sys.stdout.flush()


#: The newest alone: a run's samples are read with one.
_load = functools.lru_cache(maxsize=1)(load_tokenizer)


def _replied(request: dict[str, Any]) -> dict[str, Any]:
    try:
        tokenizer = _load(request["tokenizer"])
    except ConfigError as error:
        return {"error": printable(error.cause)[:400]}
    except Exception as error:  # noqa: BLE001 - the file is a run's own, and the library raises bare exceptions
        return {"error": f"{type(error).__name__}: it is no tokenizer"}

    def decode(ids: list[int]) -> str:
        # A prompt's ids are its run's: a negative one is no token, and the library would not take it.
        known = ids if min(ids, default=0) >= 0 else [one for one in ids if one >= 0]
        return str(tokenizer.decode(known, skip_special_tokens=False))

    texts = list(map(_ids, request["texts"]))
    if "wanted" in request:
        pattern = re.compile(re.escape(request["wanted"]), re.IGNORECASE)
        hits = {}
        for place, ids in enumerate(texts):
            text = decode(ids)
            hit = pattern.search(text)
            if hit is not None:
                hits[place] = printable(text[max(0, hit.start() - _AROUND) : hit.end() + _AROUND][:MOST_TEXT])
        return {"found": hits}
    pieces, rest = dict[str, list[Piece]](), {}
    for at, some in request["marked"].items():
        logprobs, differences = ([float(x) for x in of[:MOST_PIECES]] for of in some)
        ids, n = texts[int(at)], len(logprobs)
        pieces[at] = probabilities(ids[:n], logprobs, decode, differences)
        left = max(0, MOST_TEXT - sum(len(piece.text) for piece in pieces[at]))
        after = printable(decode(ids[n:])[: left + 1]) if ids[n:] else ""
        rest[at] = after if len(after) <= left else f"{after[:left]}\u2026"
    return {
        "texts": [printable(decode(ids)[: request["most"] + 1]) for ids in texts],
        "pieces": pieces,
        "rest": rest,
    }


if __name__ == "__main__":
    _bounded()
    if _MANY in sys.argv[1:]:
        _serve_many()
    else:
        _bounded_cpu()
        sys.stdout.write(json.dumps(_replied(json.load(sys.stdin))))
