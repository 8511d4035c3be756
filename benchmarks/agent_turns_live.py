"""Prefill tokens that agents' turns cost two real engines, by how they are routed: always elsewhere, always back to their cache, ours.

    python -m benchmarks.agent_turns_live [--rounds 5] [--episodes 12] [--turns 6] [--slots 4] [--tool-s 1]

A whole site on this machine: the daemon with its ledger in SQLite, two harvested workers with vLLM, each of `--slots` samples at a time and
with the prefix cache that it has by default, and the gateway. In each round every routing plays the same episodes, one routing after the
other: `--episodes` agents of `--turns` turns, `--tool-s` (mean) for a tool in between. Lengths are drawn as in `agent_turns`, which plays
the same in simulation, but shorter; no two episodes begin alike. The routings take turns in who comes first. Ours is the router as it is;
the others take the place of its one decision (`agent_turns_daemon`).

The tokens are vLLM's own count (`agent_turns_engine`): of each prompt what its prefix cache did not have. All prompts must have been
counted, and both engines must have lived through the round. Printed are, by routing, medians with the least and the most over the rounds:
tokens computed, of the tokens of all prompts; turns that ran on the engine of the turn before them (in the ledger); and ratios to ours of
the same round of tokens computed and of seconds from a turn's call to its last token, mean and 95th percentile. Needs vLLM, with or
without a GPU, and the extra `gateway`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import httpx2

from benchmarks import agent_turns_daemon, agent_turns_engine
from benchmarks.agent_sessions import begin, end, turn
from benchmarks.agent_turns import ROUTINGS, SIGMA, spread
from benchmarks.agents import START_S, Served, gateway_of, write_random_model
from scavenger import toml
from scavenger.cluster.layout import demo_layout
from scavenger.demo.site import DemoSite, SiteOptions
from scavenger.weights.source import WeightServer
from tests.system import play, scripted

ENGINES = 2
#: Tokens of a first prompt, of a completion and of what a tool replies (means; the last two are lognormal).
SYSTEM, COMPLETION, OBSERVATION = 512, 24, 112
HIDDEN, LAYERS = 256, 4
VOCABULARY = 16
COUNTED_S = 30.0
#: On a machine that does other things too an engine is not dead because it is slow.
PATIENT = {"suspect_s": 60.0, "dead_s": 120.0}
OURS = "ours"
#: Of an episode's turns in their order: the engines that had them.
_ENGINES_OF = """
SELECT e.name, u.number, l.worker_id FROM turns u JOIN episodes e ON e.episode_id = u.episode_id
JOIN samples s ON s.group_id = u.group_id JOIN leases l ON l.sample_id = s.sample_id ORDER BY e.name, u.number, l.epoch
"""


class Planned(NamedTuple):
    """A turn: tokens that come before it, tokens that it makes, seconds of the tool after it."""

    new: int
    made: int
    tool_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one routing in one round. `back`: the share of later turns that ran on the engine of the turn before."""

    prompts: int
    computed: int
    back: float
    mean_s: float
    p95_s: float


def plan(options: argparse.Namespace, seed: int) -> list[list[Planned]]:
    """The turns of each episode."""
    dice = random.Random(seed)

    def drawn(mean: float) -> int:
        return max(1, round(mean * dice.lognormvariate(-(SIGMA**2) / 2, SIGMA)))

    return [
        [
            Planned(
                drawn(OBSERVATION) if at else SYSTEM, drawn(COMPLETION), dice.expovariate(1 / options.tool_s)
            )
            for at in range(options.turns)
        ]
        for _ in range(options.episodes)
    ]


def longest(plans: Sequence[Sequence[Sequence[Planned]]]) -> int:
    """Tokens of the longest episode."""
    return max(sum(one.new + one.made for one in turns) for episodes in plans for turns in episodes)


# ---------------------------------------------------------------- the site


class Site:
    """Two engines behind a gateway, whose turns are routed as asked."""

    def __init__(self, site: DemoSite, served: Served, counters: Path, folder: Path) -> None:
        self.site, self.served, self._counters, self._folder = site, served, counters, folder

    def route(self, name: str) -> None:
        agent_turns_daemon.choose(self._folder, name)

    def counted(self) -> list[agent_turns_engine.Prompts]:
        return agent_turns_engine.read(self._counters)

    def engines(self) -> list[int]:
        return [worker for worker, _, _ in play.workers(self.site)]

    def engines_of(self, prefix: str) -> dict[str, list[int]]:
        """By episode whose name begins so, the engine that ended each of its turns."""
        found: dict[str, dict[int, int]] = {}
        for name, number, worker in play.ask(self.site, _ENGINES_OF):
            if name.startswith(prefix):
                found.setdefault(name, {})[number] = worker
        return {name: [by_turn[number] for number in sorted(by_turn)] for name, by_turn in found.items()}


@contextlib.contextmanager
def opened(folder: Path, options: argparse.Namespace, context: int) -> Iterator[Site]:
    """The site of two engines, of which none has started yet."""
    model, counters = folder / "model", folder / "counters"
    write_random_model(model, HIDDEN, LAYERS, context)
    counters.mkdir()
    (folder / "site").mkdir(mode=0o700)
    agent_turns_daemon.choose(folder / "site", OURS)
    site_options = SiteOptions(
        "local",
        folder / "site",
        demo_layout(grace_s=5.0),
        max_engines=ENGINES,
        daemon=PATIENT,
        harvest={"python": str(agent_turns_engine.python(counters))},
        daemon_module="benchmarks.agent_turns_daemon",
    )
    with DemoSite(site_options) as site, WeightServer() as source:
        document = play.run_document(
            site.state_dir,
            site.dir / "out",
            model,
            run={"name": "agents", "deterministic": False, "max_engines": ENGINES},
            engine={"name": "vllm", "max_batch": options.slots},
        )
        document["model"]["context_length"] = context
        run_toml = site.dir / "run.toml"
        run_toml.write_text(toml.dumps(document))
        with scripted.opened(run_toml) as run:
            scripted.publish(run, source, model, 0)
            with gateway_of(site, run_toml) as served:
                yield Site(site, served, counters, site.dir)
            run.close_run("finished")


# ---------------------------------------------------------------- a round


async def agent(http: httpx2.AsyncClient, served: Served, name: str, turns: Sequence[Planned]) -> list[float]:
    """One episode. Gives each turn's seconds."""
    headers = await begin(http, served, name)
    tokens = random.Random(name)
    said: list[int] = []
    found = []
    for at, planned in enumerate(turns):
        said += [tokens.randrange(VOCABULARY) for _ in range(planned.new)]
        made, took_ms = await turn(http, headers, said, planned.made)
        said += made
        found.append(took_ms / 1000)
        if at + 1 < len(turns):
            await asyncio.sleep(planned.tool_s)  # the tool
    await end(http, headers, name)
    return found


async def all_agents(served: Served, prefix: str, episodes: Sequence[Sequence[Planned]]) -> list[float]:
    limits = httpx2.Limits(max_connections=len(episodes), max_keepalive_connections=len(episodes))
    async with httpx2.AsyncClient(base_url=served.url, timeout=START_S, limits=limits) as http:
        found = await asyncio.gather(
            *(agent(http, served, f"{prefix}{number}", turns) for number, turns in enumerate(episodes))
        )
    return [seconds for each in found for seconds in each]


def prompt_tokens(episodes: Sequence[Sequence[Planned]]) -> int:
    """Of all turns: each one's prompt is all before it."""
    total = 0
    for turns in episodes:
        before = 0
        for planned in turns:
            total += before + planned.new
            before += planned.new + planned.made
    return total


def played(site: Site, routing: str, number: int, episodes: Sequence[Sequence[Planned]]) -> Outcome:
    """One routing plays one round."""
    prefix = f"{routing}-{number}-".replace(" ", "-")
    site.route(routing)
    workers, before = site.engines(), site.counted()
    seconds = sorted(asyncio.run(all_agents(site.served, prefix, episodes)))
    due = prompt_tokens(episodes) + sum(one.tokens for one in before)
    play.wait_for(
        "vLLM's count of all prompts", lambda: sum(one.tokens for one in site.counted()) >= due, COUNTED_S
    )
    after = site.counted()
    if site.engines() != workers or len(after) != ENGINES or len(workers) != ENGINES:
        why = play.ask(site.site, "SELECT worker_id, reason FROM workers WHERE left_at IS NOT NULL")
        raise SystemExit(
            f"round {number}, {routing}: an engine was lost or came ({workers}, {site.engines()}): {why}"
        )
    later, back = 0, 0
    for engines in site.engines_of(prefix).values():
        later += len(engines) - 1
        back += sum(one == other for one, other in itertools.pairwise(engines))
    return Outcome(
        sum(one.tokens for one in after) - sum(one.tokens for one in before),
        sum(one.computed for one in after) - sum(one.computed for one in before),
        back / max(1, later),
        statistics.fmean(seconds),
        seconds[math.ceil(0.95 * len(seconds)) - 1],
    )


def warm_up(site: Site, options: argparse.Namespace, context: int) -> None:
    """Until both engines have had turns, and then a round that is not counted: the router has measured what a prefill takes."""
    until = time.monotonic() + START_S
    asked = 0
    while sum(one.tokens > 0 for one in site.counted()) < ENGINES:
        if time.monotonic() > until:
            raise SystemExit(f"{ENGINES} engines did not start within {START_S:g} s: {site.counted()}")
        asked += 1
        one_turn = [[Planned(SYSTEM, 8, 0.0)]] * options.episodes
        asyncio.run(all_agents(site.served, f"start-{asked}-", one_turn))
        time.sleep(1.0)  # between two looks at a condition
    episodes = plan(options, 0)
    assert longest([episodes]) <= context
    played(site, OURS, 0, episodes)


def measured(folder: Path, options: argparse.Namespace) -> dict[str, list[Outcome]]:
    """The outcomes of each routing, round by round."""
    plans = [plan(options, number) for number in range(options.rounds + 1)]
    context = longest(plans) + 1
    names = list(ROUTINGS)
    found: dict[str, list[Outcome]] = {name: [] for name in names}
    with opened(folder, options, context) as site:
        warm_up(site, options, context)
        for number in range(1, options.rounds + 1):
            first = number % len(names)
            for name in (*names[first:], *names[:first]):
                found[name].append(one := played(site, name, number, plans[number]))
                print(
                    f"round {number}, {name}: {one.computed:,} of {one.prompts:,} prompt tokens computed, {one.back:.0%} of later turns "
                    f"went back, {one.mean_s:.3f} s a turn, p95 {one.p95_s:.3f} s",
                    flush=True,
                )
    return found


def table(found: Mapping[str, Sequence[Outcome]]) -> str:
    """By routing medians with the least and the most over the rounds."""
    base = found[OURS]
    lines = [
        f"{'':>18}  {'computed of prompts':>20}  {'went back':>20}  {'computed, of ours':>20}  {'turn, mean of ours':>20}  "
        f"{'turn, p95 of ours':>20}"
    ]
    for name, some in found.items():
        pairs = list(zip(some, base, strict=True))
        cells = [
            spread([one.computed / one.prompts for one in some]),
            spread([one.back for one in some]),
            spread([one.computed / ref.computed for one, ref in pairs]),
            spread([one.mean_s / ref.mean_s for one, ref in pairs]),
            spread([one.p95_s / ref.p95_s for one, ref in pairs]),
        ]
        lines.append(f"{name:>18}  " + "  ".join(f"{cell:>20}" for cell in cells))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> dict[str, list[Outcome]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=12)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--tool-s", type=float, default=1.0)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="scv-") as name:
        found = measured(Path(name), options)
    print(
        f"{ENGINES} engines of {options.slots} slots, {options.episodes} episodes of {options.turns} turns, {options.rounds} rounds; "
        "median [least, most]"
    )
    print(table(found))
    return found


if __name__ == "__main__":
    main()
    sys.exit(0)
