"""Rewards one after the other against the pool, and what they add to a step whose groups come while others are generated.

    python benchmarks/rewards.py [--rounds 5] [--scale 0.1] [--completions 1024] [--processes 32]

A reward here waits and computes nothing, as one that asks a server does; so more processes than CPUs are of use. First `--compared` rewards
of 0.5 s through one `RewardRunner`, one after the other, and through the pool; pairs in one run, their ratio with median and spread. Then
a step of 60 s in which `--completions` completions come evenly, in groups of 8, each reward 1 s: how much longer than the step does it
take until the last reward is there? `--scale` shortens all seconds; 1 is the real size. Processes are started before the clock.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scavenger.config import RewardSection
from trainer.algorithms.reward_pool import RewardPool, open_pool
from trainer.algorithms.rewards import Reward, RewardRunner

GOAL = 0.05
STEP_S, CALL_S, COMPARED_S = 60.0, 1.0, 0.5
GROUP = 8


def reward(prompt: str, completion: str, meta: dict[str, Any]) -> float:
    time.sleep(meta["seconds"])
    return float(len(completion))


def opened(processes: int) -> RewardPool:
    return open_pool(RewardSection(function="benchmarks.rewards:reward", processes=processes, timeout_s=60.0))


def in_turn(runner: RewardRunner, calls: int, seconds: float) -> float:
    began = time.monotonic()
    for _ in range(calls):
        runner.score("", "a", {"seconds": seconds})
    return time.monotonic() - began


def pooled(pool: RewardPool, calls: int, seconds: float) -> float:
    began = time.monotonic()
    wait(pool.submit("", ["a"] * calls, {"seconds": seconds}))
    return time.monotonic() - began


def step(pool: RewardPool, completions: int, step_s: float, call_s: float) -> float:
    """Seconds from the step's begin to its last reward; its last group comes after `step_s`."""
    futures: list[Future[Reward]] = []
    began, groups = time.monotonic(), completions // GROUP
    for group in range(groups):
        time.sleep(max(0.0, began + step_s * (group + 1) / groups - time.monotonic()))  # generation
        futures += pool.submit("", ["a"] * GROUP, {"seconds": call_s})
    wait(futures)
    assert all(future.result().value == 1.0 for future in futures)
    return time.monotonic() - began


def resident_mb(pool: RewardPool) -> list[float]:
    """Of each process of the pool."""
    found = []
    for runner in pool._lanes[0]._runners:
        if runner._process is not None:
            pages = int(Path(f"/proc/{runner._process.pid}/statm").read_text().split()[1])
            found.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
    return found


def spread(values: Sequence[float], form: str) -> str:
    return f"median {statistics.median(values):{form}}, spread {min(values):{form}} to {max(values):{form}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=0.1)
    parser.add_argument("--compared", type=int, default=32)
    parser.add_argument("--completions", type=int, default=1024)
    parser.add_argument("--processes", type=int, default=32)
    options = parser.parse_args()
    root = str(Path(__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    ratios, added = [], []
    with (
        opened(options.processes) as pool,
        RewardRunner("benchmarks.rewards:reward", timeout_s=60.0, retries=0) as runner,
    ):
        pooled(pool, 4 * options.processes, 0.5)  # every process is started
        megabytes = resident_mb(pool)
        print(
            f"{len(megabytes)} processes of {statistics.median(megabytes):.0f} MiB, pages that they share included"
        )
        for number in range(options.rounds):
            before = in_turn(runner, options.compared, COMPARED_S * options.scale)
            after = pooled(pool, options.compared, COMPARED_S * options.scale)
            ratios.append(before / after)
            print(
                f"round {number}: {options.compared} rewards, in turn {before:.2f} s, pool {after:.3f} s: {ratios[-1]:.1f} times"
            )
        for number in range(options.rounds):
            whole = step(pool, options.completions, STEP_S * options.scale, CALL_S * options.scale)
            added.append(whole / (STEP_S * options.scale) - 1)
            plain = STEP_S * options.scale
            print(
                f"round {number}: {options.completions} rewards in a step of {plain:g} s: {whole:.3f} s, {added[-1]:+.2%}"
            )
    print(f"one after the other / pool: {spread(ratios, '.1f')}")
    judged = "met" if statistics.median(added) < GOAL else "missed"
    print(f"added to a step: {spread(added, '.2%')}; goal below {GOAL:.0%}: {judged}")


if __name__ == "__main__":
    main()
