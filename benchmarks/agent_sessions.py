"""Many open sessions of agents of which few are active: memory of each, and the latency of the active ones beside them.

    python benchmarks/agent_sessions.py [--open 10000] [--sessions 100] [--turns 4] [--tool-s 2] [--tokens 8] [--rounds 3]

A whole site on this machine: the daemon with its ledger in SQLite, a harvested worker with the reference engine, the gateway. `--sessions`
agents have `--turns` turns each, with `--tool-s` for a tool in between; that is a round. Rounds alone; then with all other sessions open,
each of which has had one turn and waits for its tool; then alone again, when those have ended. The time is from a turn's call to its last
token, so that it counts queueing too.

Prints the memory (proportional set size) that one open session takes of daemon and gateway, and the ratio of the median times, beside the
open ones and alone (goal: at most 1.2). "Alone" is the mean of before and after, so that a ledger that has grown counts for neither.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx2

from benchmarks.agents import OBSERVATION, START_S, Served, ours, write_model

GOAL_RATIO = 1.2
AT_ONCE = 50  # sessions that begin at a time


async def begin(http: httpx2.AsyncClient, served: Served, episode: str) -> dict[str, str]:
    """Headers with the key of a fresh episode."""
    admin = {"Authorization": f"Bearer {served.admin_key}"}
    asked = await http.post("/episodes", json={"episode": episode}, headers=admin)
    asked.raise_for_status()
    return {"Authorization": f"Bearer {asked.json()['api_key']}"}


async def end(http: httpx2.AsyncClient, headers: dict[str, str], episode: str) -> None:
    (await http.delete(f"/episodes/{episode}", headers=headers)).raise_for_status()


async def turn(
    http: httpx2.AsyncClient, headers: dict[str, str], said: Sequence[int], tokens: int
) -> tuple[list[int], float]:
    """The tokens of one turn, and the milliseconds that it took."""
    body = {
        "token_ids": list(said),
        "sampling_params": {"max_tokens": tokens, "temperature": 1.0, "ignore_eos": True},
    }
    began = time.monotonic()
    reply = await http.post("/inference/v1/generate", json=body, headers=headers)
    took = 1000 * (time.monotonic() - began)
    if reply.status_code != 200:
        raise SystemExit(f"the gateway: {reply.status_code} {reply.text[:500]}")
    made = list(reply.json()["choices"][0]["token_ids"])
    if len(made) != tokens:
        raise SystemExit(f"the gateway: {len(made)} tokens came where {tokens} were asked for")
    return made, took


def observation(number: int, at: int) -> list[int]:
    return [(number * 31 + at * 7 + i) % 16 for i in range(OBSERVATION)]


async def active(
    http: httpx2.AsyncClient, served: Served, options: argparse.Namespace, number: int
) -> list[float]:
    """One agent from its beginning to its end. Gives each turn's milliseconds."""
    episode = f"active-{number}"
    headers = await begin(http, served, episode)
    said: list[int] = []
    found = []
    for at in range(options.turns):
        said += observation(number, at)
        made, took = await turn(http, headers, said, options.tokens)
        said += made
        found.append(took)
        if at + 1 < options.turns:
            await asyncio.sleep(options.tool_s)  # the tool
    await end(http, headers, episode)
    return found


async def one_round(
    http: httpx2.AsyncClient, served: Served, options: argparse.Namespace, first: int
) -> float:
    """The median of its turns' milliseconds."""
    every = await asyncio.gather(*(active(http, served, options, first + i) for i in range(options.sessions)))
    return statistics.median(one for each in every for one in each)


async def opened(
    http: httpx2.AsyncClient, served: Served, options: argparse.Namespace, most: int
) -> dict[str, dict[str, str]]:
    """Sessions that had one turn: their keys, by episode."""
    found: dict[str, dict[str, str]] = {}
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with gate:
            episode = f"open-{number}"
            headers = await begin(http, served, episode)
            await turn(http, headers, observation(number, 0), options.tokens)
            found[episode] = headers

    await asyncio.gather(*(one(number) for number in range(most)))
    return found


def memory(pids: Sequence[int]) -> int:
    """Bytes of these processes, what they share divided among who shares it."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += 1024 * int(line.split()[1])
    return total


def of(served: Served, words: str) -> tuple[int, ...]:
    """Its processes whose command line has these words."""
    return tuple(
        pid
        for pid in served.pids
        if words in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    )


async def measured(served: Served, options: argparse.Namespace) -> int:
    daemon, gateway = of(served, "scavenger daemon"), of(served, "scavenger gateway")
    if not daemon or not gateway:
        raise SystemExit(f"no daemon or no gateway among the processes {served.pids}")
    limits = httpx2.Limits(max_connections=options.sessions, max_keepalive_connections=options.sessions)
    async with httpx2.AsyncClient(base_url=served.url, timeout=START_S, limits=limits) as http:
        number = 0

        async def rounds(name: str) -> list[float]:
            nonlocal number
            found = []
            for _ in range(options.rounds):
                found.append(await one_round(http, served, options, number))
                number += options.sessions
            print(
                f"{name}: median ms of a turn, by round: {', '.join(f'{ms:.1f}' for ms in found)}", flush=True
            )
            return found

        await rounds("warm")  # its ledger's first pages, its caches
        before = await rounds("alone")
        base = memory(daemon), memory(gateway)
        began, most = time.monotonic(), options.open - options.sessions
        waiting = await opened(http, served, options, most)
        took = time.monotonic() - began
        held = memory(daemon), memory(gateway)
        beside = await rounds(f"beside {most:,} open sessions")
        for episode, headers in waiting.items():
            await end(http, headers, episode)
        after = await rounds("alone again")
    alone = [(a + b) / 2 for a, b in zip(before, after, strict=True)]
    ratios = [there / bare for there, bare in zip(beside, alone, strict=True)]
    kb = [(there - bare) / most / 1000 for there, bare in zip(held, base, strict=True)]
    ratio = statistics.median(ratios)
    print(
        f"{most:,} sessions began in {took:.0f} s; each open one takes {kb[0]:.1f} kB of the daemon and {kb[1]:.1f} kB of the gateway\n"
        f"a turn of {options.sessions} active sessions, beside the open ones / alone: median {ratio:.3f}, spread {min(ratios):.3f} to "
        f"{max(ratios):.3f} (goal {GOAL_RATIO:g}: {'met' if ratio <= GOAL_RATIO else 'missed'})"
    )
    return 0 if ratio <= GOAL_RATIO else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--open", type=int, default=10_000, help="sessions in all, the active ones among them"
    )
    parser.add_argument("--sessions", type=int, default=100, help="those that are active")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tool-s", type=float, default=2.0)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--layers", type=int, default=1)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="scv-") as name:
        folder, model = Path(name), Path(name) / "model"
        write_model(model, options)
        with ours(model, folder, options, "reference") as served:
            return asyncio.run(measured(served, options))


if __name__ == "__main__":
    sys.exit(main())
