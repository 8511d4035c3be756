"""Open-loop load of an inference server: requests come when they come, whether or not earlier ones are done.

    asked = poisson([(15.0, 4.0), (5.0, 12.0)], seed=1)      # 15 s of 4 requests a second, then 5 s of 12
    replies = asyncio.run(play("http://127.0.0.1:8000", asked))

Arrivals are a Poisson process whose rate is constant within a phase; the same seed gives the same requests. Each goes to vLLM's
`/inference/v1/generate` as token ids, and its reply is streamed. A latency counts from the moment at which the request was due: what the
sender itself is late by is in it. Kept here, and not `vllm bench serve`, because that has one rate a process, and its start takes longer
than a round.

Owns the requests and their latencies. Judges nothing.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx2

#: Of the token ids in a prompt; every vocabulary has these.
IDS = 16
#: A reply that takes longer than this has failed.
REPLY_S = 120.0
#: Between two looks at whether it is over.
LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Asked:
    """`at_s`: seconds from the beginning. `tokens`: that are generated, neither more nor fewer."""

    at_s: float
    prompt: tuple[int, ...]
    tokens: int


@dataclass(slots=True)
class Reply:
    """`first_s`: from when the request was due to its first tokens. `gaps`: (seconds a token, tokens) of each later part.

    `ended_s`: when it was over, from the beginning. `failed`: why it is no whole reply, or "".
    """

    asked: Asked
    first_s: float | None = None
    gaps: list[tuple[float, int]] = field(default_factory=list)
    ended_s: float = 0.0
    failed: str = ""


def poisson(
    phases: Sequence[tuple[float, float]],
    seed: int,
    *,
    prompt: tuple[int, int] = (16, 48),
    tokens: tuple[int, int] = (16, 48),
) -> list[Asked]:
    """Arrivals in order of time. `phases`: (seconds, requests a second), one after the other. `prompt`, `tokens`: the fewest, the most."""
    chance = random.Random(seed)
    found, start = [], 0.0
    for seconds, rate in phases:
        at = start
        while rate > 0 and (at := at + chance.expovariate(rate)) < start + seconds:
            ids = tuple(chance.randrange(IDS) for _ in range(chance.randint(*prompt)))
            found.append(Asked(at, ids, chance.randint(*tokens)))
        start += seconds
    return found


async def play(url: str, asked: Sequence[Asked], over: threading.Event | None = None) -> list[Reply]:
    """Ask all of it, each when it is due, and wait for the replies, which are in the order of `asked`. `over`: set by another thread,
    nothing more is asked."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=REPLY_S, limits=limits, trust_env=False) as http:
        began = time.monotonic()
        under_way: list[asyncio.Task[Reply]] = []
        for one in asked:
            while (early_s := began + one.at_s - time.monotonic()) > 0 and not _set(over):
                await asyncio.sleep(min(early_s, LOOK_S) if over is not None else early_s)  # until it is due
            if _set(over):
                break
            under_way.append(asyncio.create_task(_one(http, one, began)))
        return list(await asyncio.gather(*under_way))


def _set(over: threading.Event | None) -> bool:
    return over is not None and over.is_set()


async def _one(http: httpx2.AsyncClient, asked: Asked, began: float) -> Reply:
    reply = Reply(asked)
    try:
        await asyncio.wait_for(_ask(http, reply, began), REPLY_S)
    except (httpx2.HTTPError, TimeoutError) as error:
        reply.failed = f"{type(error).__name__}: {error}"
    reply.ended_s = time.monotonic() - began
    return reply


async def _ask(http: httpx2.AsyncClient, reply: Reply, began: float) -> None:
    asked, last, count = reply.asked, began + reply.asked.at_s, 0
    sampling = {"max_tokens": asked.tokens, "temperature": 1.0, "ignore_eos": True}
    body = {"model": "", "token_ids": asked.prompt, "stream": True, "sampling_params": sampling}
    async with http.stream("POST", "/inference/v1/generate", json=body) as answer:
        if answer.status_code != httpx2.codes.OK:
            reply.failed = f"{answer.status_code} {(await answer.aread())[:200]!r}"
            return
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            part = json.loads(line[6:])
            if "error" in part:
                reply.failed = str(part["error"])[:200]
                return
            made = sum(len(choice.get("token_ids") or ()) for choice in part["choices"])
            if not made:
                continue
            now = time.monotonic()
            if reply.first_s is None:
                reply.first_s = now - last
            else:
                reply.gaps.append(((now - last) / made, made))
            last, count = now, count + made
    if count != asked.tokens:
        reply.failed = f"{count} tokens came where {asked.tokens} were asked for"
