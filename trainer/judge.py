"""A judge model as a reward: `[reward] function = "trainer.judge:reward"`, for any server with OpenAI's chat completions.

Owns the request, its retries with back-off, and how a score is read from the reply. How many are under way at once is
`reward.concurrency`, and `reward.timeout_s` bounds a call with all its retries. The key comes from a file of mode 0600 and goes into a
header alone: the options, which are in this process's arguments, name the file.
"""

from __future__ import annotations

import functools
import re
import stat
from pathlib import Path
from typing import Any

import httpx2
import tenacity

from scavenger.errors import ConfigError
from trainer.verifiers import prepared

TEMPLATE = """Rate the answer to the task from 0 (useless or wrong) to 10 (complete and right).

Task:
{prompt}

Answer:
{answer}

Reason briefly, then end with a line "Score: N"."""
SCORE = r"Score:\s*(-?\d+(?:\.\d+)?)"
#: What a server says that may take the request later.
LATER = (408, 425, 429, 500, 502, 503, 504)
MOST_WAIT_S = 30.0
#: Of a reply that is quoted in the trainer's log.
QUOTED = 200


class Unavailable(Exception):
    """The server wants the request later: after `after_s`, if it said so."""

    def __init__(self, said: str, after_s: float | None) -> None:
        super().__init__(said)
        self.after_s = after_s


def _key(file: str) -> str:
    """The key's text. Raises `ConfigError` where others may read it, or it cannot be read."""
    remedy = "write the judge's key alone into a file of mode 0600, and name that in reward.options.key_file"
    try:
        mode, text = stat.S_IMODE(Path(file).stat().st_mode), Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the judge's key file {file} cannot be read: {type(error).__name__}", remedy
        ) from error
    if mode & 0o077:
        raise ConfigError(
            f"the judge's key file {file} has mode {mode:04o}: others may read it", f"chmod 600 {file}"
        )
    if not text or not text.isascii() or not text.isprintable():
        raise ConfigError(f"the judge's key file {file} does not hold one key", remedy)
    return text


def _open(
    *, url: str, model: str, key_file: str = "", template: str = TEMPLATE, pattern: str = SCORE, **_: object
) -> str:
    """What is wrong with the options is told before the run starts."""
    try:
        found = httpx2.URL(url)
        plain = found.scheme in ("http", "https") and bool(found.host)
    except httpx2.InvalidURL:
        plain = False
    if not plain or found.userinfo or found.query:
        remedy = "write the address before /chat/completions; a key goes into key_file"
        raise ConfigError("reward.options.url is not http(s)://HOST[:PORT]/PATH", remedy)
    try:
        template.format(prompt="", answer="", reference="")
    except (LookupError, ValueError, AttributeError) as error:
        remedy = "use {prompt}, {answer}, {reference}; write {{ for {"
        raise ConfigError(f"reward.options.template cannot be filled in: {error!r}", remedy) from error
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ConfigError(f"reward.options.pattern is no regular expression: {error}") from error
    if groups != 1:
        raise ConfigError(f"reward.options.pattern has {groups} groups", "put ( ) around the number alone")
    if key_file:
        _key(key_file)
    return ""


@functools.lru_cache(maxsize=1)
def _client() -> httpx2.AsyncClient:
    """One for all calls of this process, which are of one event loop. `reward.timeout_s` is the only deadline."""
    return httpx2.AsyncClient(
        timeout=None, limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64)
    )


def _wait(backoff_s: float) -> Any:
    grown = tenacity.wait_exponential_jitter(initial=backoff_s, max=MOST_WAIT_S, jitter=backoff_s)

    def wait(state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        asked = error.after_s if isinstance(error, Unavailable) else None
        return grown(state) if asked is None else min(asked, MOST_WAIT_S)

    return wait


async def _ask(url: str, body: dict[str, Any], key_file: str) -> str:
    headers = {"Authorization": f"Bearer {_key(key_file)}"} if key_file else {}
    reply = await _client().post(url.rstrip("/") + "/chat/completions", json=body, headers=headers)
    if reply.status_code in LATER:
        after = reply.headers.get("Retry-After", "")
        raise Unavailable(
            f"the judge replied {reply.status_code}", float(after) if after.isdecimal() else None
        )
    if not reply.is_success:
        raise ValueError(f"the judge replied {reply.status_code}: {reply.text[:QUOTED]}")
    content = reply.json()["choices"][0]["message"]["content"]
    if not isinstance(content, str):
        raise ValueError("the judge's reply has no text")
    return content


@prepared(_open)
async def reward(
    prompt: str,
    completion: str,
    meta: dict[str, Any],
    *,
    url: str,
    model: str,
    key_file: str = "",
    template: str = TEMPLATE,
    pattern: str = SCORE,
    scale: float = 10.0,
    max_tokens: int = 1024,
    temperature: float = 0.0,
    attempts: int = 6,
    backoff_s: float = 0.5,
) -> float:
    """The judge's score, from 0 to `scale`, as 0 to 1. Raises `ValueError` where the reply has none or one out of that range.

    `pattern`: its last match's group is the score. `attempts`: for a server that cannot be reached, is busy or fails.
    """
    said = template.format(prompt=prompt, answer=completion, reference=meta.get("answer", ""))
    body = {
        "model": model,
        "messages": [{"role": "user", "content": said}],
        "max_tokens": max_tokens,
        "temperature": temperature,
    }
    retrying = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type((Unavailable, httpx2.TransportError)),
        stop=tenacity.stop_after_attempt(attempts),
        wait=_wait(backoff_s),
        reraise=True,
    )
    reply: str = await retrying(_ask, url, body, key_file)
    found = re.findall(pattern, reply)
    if not found:
        raise ValueError(f"the judge's reply has no score: {reply[-QUOTED:]!r}")
    score = float(found[-1])
    if not 0 <= score <= scale:
        raise ValueError(f"the judge's score {score:g} is not within 0 and {scale:g}")
    return score / scale
