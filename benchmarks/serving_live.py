"""A guest beside a real `vllm serve` on this machine: time within the objective with and without it, and slack used.

    python -m benchmarks.serving_live [--rounds 3] [--seconds 36] [--factor 2] [--load 0.3] [--burst 0.8] [--most 8] [--proxy]

One `vllm serve` gets open-loop Poisson arrivals (`open_loop.py`): most of a round at `--load` of what it can do at once, a burst of an
eighth of the round at `--burst`, and an eighth of silence. What it can do is measured first, then its objective: `--factor` times the p99s
of a round of the same kind that it has alone. Then each round plays the same arrivals three times, the order turning:

    alone   no guest
    guest   `scavenger guest` with that objective
    free    `scavenger guest` with an objective of an hour, which only a burst cuts: what a guest costs that nobody holds back

With `--proxy` all requests, of each arm and of the calibration, go through `scavenger guest-proxy`, whose page the guests read, five times
a second; what it adds to the service's latencies is told first.

Guests have vLLM engines, of a run without other engines, and of one model as large as the service's. Who is not in turn is stopped
(SIGSTOP). Latencies are the clients', from when a request was due.

Time within: seconds in which both p99s were within the objective; of the few requests of a second that is the slowest. Also requests whose
TTFT and mean TPOT were. Slack is counted in hindsight, as in `serving.py`: for each second of the round alone, how many samples would have
kept its p99s within, where the slowing of `--most` samples is what `free` was seen to cost, and in proportion below. Goal: at most 0.5
points of time lost, 60 % of the slack used.

What two cores cannot show: a GPU's kernels and memory shared by two processes. Here a guest takes a core, memory bandwidth, and what the
server's own processes leave of CPU time, by `nice`. Needs vLLM, on a machine without a GPU, and the extra `gateway`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import agents, open_loop
from benchmarks.open_loop import Asked, Reply
from scavenger.cluster import processes
from scavenger.demo.site import DemoSite
from scavenger.guest.service import PROXY_METRICS
from scavenger.policy.serving import Objective
from scavenger.simulate.serving import (
    Interference,
    Interval,
    ServedRequest,
    ServingOutcome,
    p99,
    requests_within,
    slack_samples,
    slack_used,
    windows_within,
)
from tests.system import guests, play

GOAL_LOST, GOAL_USED = 0.5, 0.6
START_S = 300.0
#: Of a guest that nobody holds back.
FREE = "ttft_p99=3600s tpot_p99=3600s"
TOKENS = (16, 48)
ARMS = ("alone", "guest", "free")


@dataclass(frozen=True, slots=True)
class Guest:
    """`name`: of its key. `pids`: its host's, its engine's and that one's children."""

    name: str
    pids: tuple[int, ...]


@dataclass(slots=True)
class Played:
    """One arm of a round. `tokens`: that the guest generated meanwhile. `load`: of the machine, one minute's, at its end."""

    outcome: ServingOutcome
    ttft_s: float
    tpot_s: float
    failed: int
    tokens: int
    load: float


def outcome_of(
    replies: Sequence[Reply], seconds: float, leases: Sequence[tuple[float, float]] = ()
) -> ServingOutcome:
    """A round by the second, as the simulation has it, so that both are counted by the same functions. A latency belongs to the second in
    which it ended. `leases`: from when to when the guest held a sample, in seconds of the round."""
    last = max([seconds, *(reply.ended_s for reply in replies)])
    out = ServingOutcome(intervals=[Interval(n + 1.0) for n in range(math.ceil(last))])

    def second(at: float) -> Interval:
        return out.intervals[min(int(at), len(out.intervals) - 1)]

    for reply in replies:
        if reply.first_s is None or reply.failed:  # never served whole: late without end
            second(reply.asked.at_s).ttfts.append(math.inf)
            out.requests.append(ServedRequest(reply.asked.at_s, math.inf, math.inf))
            continue
        at = reply.asked.at_s + reply.first_s
        second(at).ttfts.append(reply.first_s)
        for interval in out.intervals[int(reply.asked.at_s) + 1 : int(at)]:
            interval.waiting += 1  # a whole second
        for gap, tokens in reply.gaps:
            at += gap * tokens
            second(at).gaps.append((gap, tokens))
        took, made = sum(gap * n for gap, n in reply.gaps), sum(n for _, n in reply.gaps)
        out.requests.append(ServedRequest(reply.asked.at_s, reply.first_s, took / max(1, made)))
    for start, end in leases:
        for interval in out.intervals:
            interval.sample_s += max(0.0, min(end, interval.end_s) - max(start, interval.end_s - 1.0))
    return out


def p99s(out: ServingOutcome) -> tuple[float, float]:
    """TTFT and TPOT of the whole round, seconds."""
    ttft = p99([(one, 1) for interval in out.intervals for one in interval.ttfts])
    tpot = p99([gap for interval in out.intervals for gap in interval.gaps])
    return ttft or 0.0, tpot or 0.0


def phases(options: argparse.Namespace, capacity: float) -> list[tuple[float, float]]:
    eighth = options.seconds / 8
    low, high = options.load * capacity, options.burst * capacity
    return [(2 * eighth, low), (eighth, high), (3 * eighth, low), (eighth, 0.0), (eighth, low)]


def capacity(url: str, options: argparse.Namespace) -> float:
    """Requests a second of such a load that the service completes when all come at once."""
    asked = [
        Asked(0.0, one.prompt, one.tokens)
        for one in open_loop.poisson([(1.0, 4.0 * options.sequences)], seed=0, tokens=TOKENS)
    ]
    replies = asyncio.run(open_loop.play(url, asked))
    if failed := [reply.failed for reply in replies if reply.failed]:
        raise SystemExit(f"the service alone: {failed[0]}")
    return len(replies) / max(reply.ended_s for reply in replies)


def alone(url: str, rate: float, options: argparse.Namespace) -> tuple[float, float]:
    """p99 TTFT and TPOT of a round without a guest, seconds."""
    asked = open_loop.poisson(phases(options, rate), seed=0, tokens=TOKENS)
    return p99s(outcome_of(asyncio.run(open_loop.play(url, asked)), options.seconds))


@contextlib.contextmanager
def proxied(url: str, folder: Path) -> Iterator[str]:
    """The address of a proxy before the service."""
    argv = [sys.executable, "-m", "scavenger", "guest-proxy", "--service", url]
    with (
        (folder / "proxy.err").open("wb") as log,
        subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.match(r"serves (\S+);", line)
            if found is None:
                raise SystemExit(f"the proxy did not start: {(folder / 'proxy.err').read_text()[-1000:]}")
            yield found[1]
        finally:
            process.kill()


# ---------------------------------------------------------------- guests


@contextlib.contextmanager
def guest(
    site: DemoSite, url: str, name: str, objective: str, options: argparse.Namespace
) -> Iterator[Guest]:
    """A guest whose engine has held samples, and that is stopped."""
    log = site.dir / f"{name}.out"
    given = ["--engine", "vllm", "--most", str(options.most), *(("--poll", "0.2") if options.proxy else ())]
    with guests.hosted(site, url, log, *given, objective=objective, name=name) as process:
        pids: tuple[int, ...] = ()
        try:
            play.wait_for(
                f"the guest {name} to hold its samples",
                lambda: process.poll() is not None or guests.holds(site, name) > 0,
                START_S,
            )
            if process.poll() is not None:
                raise SystemExit(f"the guest {name} ended:\n{log.read_text()[-3000:]}")
            pids = (process.pid, *processes.descendants(process.pid, processes.snapshot()))
            processes.send(pids, signal.SIGSTOP)
            yield Guest(name, pids)
        finally:
            processes.send(pids, signal.SIGCONT)


@contextlib.contextmanager
def goes_on(one: Guest | None) -> Iterator[None]:
    pids = one.pids if one is not None else ()
    processes.send(pids, signal.SIGCONT)
    try:
        yield
    finally:
        processes.send(pids, signal.SIGSTOP)


def leases_of(site: DemoSite, name: str, start: float, end: float) -> list[tuple[float, float]]:
    """When the guest held a sample, in seconds from `start`, both of the wall clock."""
    rows = play.ask(
        site,
        "SELECT l.granted_at, l.ended_at FROM leases l JOIN workers w ON w.worker_id = l.worker_id "
        f"WHERE w.intent_id = 'guest-{name}' AND l.granted_at < {end} AND (l.ended_at IS NULL OR l.ended_at > {start})",
    )
    return [
        (max(granted, start) - start, min(end if ended is None else ended, end) - start)
        for granted, ended in rows
    ]


def tokens_of(site: DemoSite, name: str, start: float, end: float) -> int:
    rows = play.ask(
        site,
        "SELECT sum(c.n_tokens) FROM chunks c JOIN workers w ON w.worker_id = c.worker_id "
        f"WHERE w.intent_id = 'guest-{name}' AND c.at BETWEEN {start} AND {end}",
    )
    return int(rows[0][0] or 0) if rows else 0


# ---------------------------------------------------------------- rounds


def played(
    site: DemoSite, url: str, asked: Sequence[Asked], seconds: float, one: Guest | None = None
) -> Played:
    with goes_on(one):
        start = time.time()
        replies = asyncio.run(open_loop.play(url, asked))
        end = max(time.time(), start + seconds)
    leases, tokens = [], 0
    if one is not None:
        leases, tokens = leases_of(site, one.name, start, end), tokens_of(site, one.name, start, end)
    out = outcome_of(replies, seconds, leases)
    failed = sum(bool(reply.failed) for reply in replies)
    return Played(out, *p99s(out), failed, tokens, os.getloadavg()[0])


def within(one: Played, objective: Objective) -> float:
    """Share of the seconds in which the service was asked for anything."""
    good, seen = windows_within(one.outcome, objective, every=1)
    return good / max(1, seen)


@dataclass(slots=True)
class Totals:
    """Of each round: points of time, and of requests, lost; slack used; tokens."""

    lost: dict[str, list[float]] = field(default_factory=lambda: {"guest": [], "free": []})
    requests: dict[str, list[float]] = field(default_factory=lambda: {"guest": [], "free": []})
    tokens: dict[str, list[float]] = field(default_factory=lambda: {"guest": [], "free": []})
    rounds: list[Mapping[str, Played]] = field(default_factory=list)


def slowing(rounds: Sequence[Mapping[str, Played]], most: int) -> Interference:
    """What `most` samples that nobody held back were seen to cost: the larger of both p99s' ratios, in the median round."""
    ratios = [
        max(one["free"].ttft_s / one["alone"].ttft_s, one["free"].tpot_s / one["alone"].tpot_s)
        for one in rounds
    ]
    return Interference(0.0, max(0.0, statistics.median(ratios) - 1) / most)


def compare(
    site: DemoSite,
    url: str,
    objective: Objective,
    rate: float,
    those: Mapping[str, Guest],
    options: argparse.Namespace,
) -> Totals:
    totals = Totals()
    for number in range(1, options.rounds + 1):
        asked = open_loop.poisson(phases(options, rate), seed=number, tokens=TOKENS)
        turn = (number - 1) % len(ARMS)
        found = {
            arm: played(site, url, asked, options.seconds, those.get(arm))
            for arm in (*ARMS[turn:], *ARMS[:turn])
        }
        if found["alone"].failed:
            raise SystemExit(f"round {number}: the service alone failed {found['alone'].failed} requests")
        totals.rounds.append(found)
        for arm in ARMS:
            one = found[arm]
            print(
                f"round {number} {arm:5}: {len(one.outcome.requests)} requests, {one.failed} failed, "
                f"within {requests_within(one.outcome, objective):.1%}; seconds within {within(one, objective):.1%}; "
                f"p99 TTFT {1e3 * one.ttft_s:.0f} ms, TPOT {1e3 * one.tpot_s:.1f} ms; "
                f"{one.tokens} tokens of the guest; load {one.load:.1f}",
                flush=True,
            )
        for arm in ("guest", "free"):
            totals.lost[arm].append(100 * (within(found["alone"], objective) - within(found[arm], objective)))
            served = (requests_within(found[name].outcome, objective) for name in ("alone", arm))
            totals.requests[arm].append(100 * (next(served) - next(served)))
            totals.tokens[arm].append(found[arm].tokens)
    return totals


def spread(values: Sequence[float], form: str) -> str:
    low, middle, high = (format(one, form) for one in (min(values), statistics.median(values), max(values)))
    return f"median {middle}, spread {low} to {high}"


def tell(totals: Totals, objective: Objective, options: argparse.Namespace) -> bool:
    slowed = slowing(totals.rounds, options.most)
    print(
        f"{options.most} samples that nobody holds back slow the service {slowed.factor(options.most):.2f} times (p99)"
    )
    used = {
        arm: [
            slack_used(one[arm].outcome, slack_samples(one["alone"].outcome, objective, slowed, options.most))
            for one in totals.rounds
        ]
        for arm in ("guest", "free")
    }
    for arm in ("guest", "free"):
        print(
            f"{arm}: points of time lost: {spread(totals.lost[arm], '+.1f')}; of requests: {spread(totals.requests[arm], '+.2f')}; "
            f"slack used: {spread(used[arm], '.0%')}; tokens: {spread(totals.tokens[arm], '.0f')}"
        )
    ratio = [a / b for a, b in zip(totals.tokens["guest"], totals.tokens["free"], strict=True) if b]
    print(f"tokens, guest / free: {spread(ratio, '.2f') if ratio else 'none'}")
    # A median would hide a round in which the service was late.
    lost, share = statistics.fmean(totals.lost["guest"]), statistics.fmean(used["guest"])
    met = lost <= GOAL_LOST and share >= GOAL_USED
    print(
        f"goal, mean of the rounds: at most {GOAL_LOST} points of time lost, {GOAL_USED:.0%} of the slack used: "
        f"{'met' if met else 'missed'} ({lost:+.1f}, {share:.0%})"
    )
    return met


def unobtrusive(pid: int) -> None:
    """On a site the daemon is on another host than the service."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.setpriority(os.PRIO_PROCESS, int(task.name), 10)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=36.0, help="of a round and arm; more than a window of 30 s"
    )
    parser.add_argument("--factor", type=float, default=2.0, help="objective over the p99s alone")
    parser.add_argument("--load", type=float, default=0.3, help="of what the service can do")
    parser.add_argument("--burst", type=float, default=0.8)
    parser.add_argument("--proxy", action="store_true", help="the guest reads exact latencies from a proxy")
    parser.add_argument("--most", type=int, default=8, help="samples of the guest")
    parser.add_argument("--sequences", type=int, default=16, help="that the service runs at once")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    began = time.monotonic()
    sizes = argparse.Namespace(
        sessions=options.sequences, turns=1, tokens=112, hidden=options.hidden, layers=options.layers
    )
    with tempfile.TemporaryDirectory(prefix="scv-") as name, contextlib.ExitStack() as entered:
        folder, model = Path(name), Path(name) / "model"
        agents.write_model(model, sizes)
        service = entered.enter_context(agents.vllm_alone(model, folder, sizes))
        capacity(service.url, options)  # warm
        rate = capacity(service.url, options)
        url, told = service.url, service.url  # where requests go, and what the guests read
        ttft, tpot = alone(url, rate, options)
        if options.proxy:
            direct = f"{rate:.1f} requests/s at most, p99 TTFT {1e3 * ttft:.1f} ms, TPOT {1e3 * tpot:.2f} ms"
            url = entered.enter_context(proxied(service.url, folder))
            told = url + PROXY_METRICS
            rate = capacity(url, options)
            ttft, tpot = alone(url, rate, options)
            print(f"without the proxy: {direct}", flush=True)
        objective = Objective(options.factor * ttft, options.factor * tpot)
        text = f"ttft_p99={1e3 * options.factor * ttft:.3f}ms tpot_p99={1e3 * options.factor * tpot:.3f}ms"
        print(
            f"alone: {rate:.1f} requests/s at most; p99 TTFT {1e3 * ttft:.1f} ms, TPOT {1e3 * tpot:.2f} ms; objective {text}; "
            f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
            flush=True,
        )
        site = entered.enter_context(
            guests.supplied(folder / "site", model, context=128, tokens=96, most=options.most)
        )
        unobtrusive(site.daemon_pid)
        those = {
            arm: entered.enter_context(guest(site, told, arm, words, options))
            for arm, words in (("guest", text), ("free", FREE))
        }
        met = tell(compare(site, url, objective, rate, those, options), objective, options)
        print(f"{time.monotonic() - began:.0f} s in all")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
