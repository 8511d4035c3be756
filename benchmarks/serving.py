"""A rollout engine beside an inference service, over real arrivals: time within the objective, and slack used. Simulated.

    python -m benchmarks.serving --traces DIR [--hours 1] [--interference light,heavy] [--objective 1.5,2] [--poll 1] [--proxy]

Arrivals, prompts and completions are of `output_lengths.csv.gz` in DIR: the Azure LLM inference trace 2023 (conversation, code) and
Mooncake's conversation trace. One engine of an 8B model on an H100 serves them (`simulate/serving.py`), of Azure's code every second and of
Mooncake every eighth: all of them are more than it can serve. The objective is so many times the p99 that the service has alone.

    alone       no guest
    idle only   as many samples as may be, while no request runs or waits
    static      always 4 samples, or 16
    threshold   as many as may be while the last interval's p99s were within the objective, none otherwise
    ours        policy/serving.py

`threshold` is what a rule without margin, hold and ceiling does. ROSE (arXiv 2605.06534) is not among them: of its text we had the abstract
and the introduction, not the rule.

How much a guest slows the service is assumed (`--interference`), not measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scavenger.policy import serving as policy
from scavenger.policy.serving import Objective, ServiceView, ServingDecision, ServingRules
from scavenger.simulate.csvfile import read_csv, rows
from scavenger.simulate.decode import SimulatedEngine
from scavenger.simulate.presets import H100, QWEN3_8B, VLLM_H100
from scavenger.simulate.serving import (
    BY_PROXY,
    BY_SERVER,
    Arrival,
    Budget,
    Interference,
    MetricsPage,
    ServingOutcome,
    p99,
    requests_within,
    serve,
    slack_samples,
    slack_used,
    windows_within,
)

FILE = "output_lengths.csv.gz"
#: Trace -> every how many'th request one engine serves.
TRACES = {"azure2023_conv": 1, "azure2023_code": 2, "mooncake_conversation": 8}
INTERFERENCE = {"light": Interference(0.05, 0.01), "heavy": Interference(0.2, 0.04)}
ENGINE = SimulatedEngine(QWEN3_8B, H100, VLLM_H100)
RULES = ServingRules()
Policy = Callable[[Objective], Budget]


def ours(objective: Objective) -> Budget:
    state = policy.begin(RULES, 0.0)

    def budget(view: ServiceView, now: float) -> ServingDecision:
        nonlocal state
        decision = policy.decide(state, view, objective, RULES, now)
        state = decision.state
        return decision

    return budget


def threshold(objective: Objective) -> Budget:
    def budget(view: ServiceView, _now: float) -> int:
        stated = [slack for slack in policy.slacks(view, objective) if slack is not None]
        return RULES.most if min(stated) > 0 else 0

    return budget


def idle_only(_objective: Objective) -> Budget:
    return lambda view, _now: 0 if view.running or view.waiting else RULES.most


def static(samples: int) -> Policy:
    return lambda _objective: lambda _view, _now: samples


POLICIES: dict[str, Policy] = {
    "alone": static(0),
    "idle only": idle_only,
    "static, 4": static(4),
    "static, 16": static(16),
    "threshold": threshold,
    "ours": ours,
}


def arrivals(path: Path, trace: str, every: int, hours: float) -> list[Arrival]:
    columns = ("source", "arrival_s", "prompt_tokens", "output_tokens")

    def parse(lines: Iterable[str]) -> list[Arrival]:
        return [
            Arrival(
                row.number("arrival_s"), row.whole("prompt_tokens", 1), max(1, row.whole("output_tokens"))
            )
            for row in rows(lines, columns)
            if row.text("source") == trace
        ]

    found = read_csv(path, parse)
    chosen = sorted(found, key=lambda one: one.at_s)[::every]
    return [one for one in chosen if one.at_s - chosen[0].at_s < hours * 3600.0]


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    windows: float
    requests: float
    used: float
    samples: float
    wakes: int
    cpu_s: float


def objective_of(alone: ServingOutcome, times: float) -> Objective:
    ttft = p99([(one, 1) for interval in alone.intervals for one in interval.ttfts])
    tpot = p99([gap for interval in alone.intervals for gap in interval.gaps])
    return Objective(times * ttft if ttft else None, times * tpot if tpot else None)


def played(
    asked: Sequence[Arrival],
    slowed: Interference,
    times: float,
    poll_s: float = 1.0,
    page: MetricsPage = BY_SERVER,
) -> tuple[Objective, list[Row]]:
    """The service alone, which gives the objective, and then with each policy's guest."""
    alone = serve(ENGINE, asked, slowed, POLICIES["alone"](Objective(1.0)), poll_s=poll_s)
    objective = objective_of(alone, times)
    slack = slack_samples(alone, objective, slowed, RULES.most, around=round(2 / poll_s))
    found = []
    for name, made in POLICIES.items():
        began = time.process_time()
        out = (
            alone
            if name == "alone"
            else serve(ENGINE, asked, slowed, made(objective), poll_s=poll_s, page=page)
        )
        good, seen = windows_within(out, objective, round(30 / poll_s))
        mean = sum(one.sample_s for one in out.intervals) / (len(out.intervals) * poll_s)
        used, spent = slack_used(out, slack, poll_s), time.process_time() - began
        found.append(Row(name, good / seen, requests_within(out, objective), used, mean, out.wakes, spent))
    return objective, found


def table(title: str, objective: Objective, found: Sequence[Row]) -> Iterator[str]:
    ttft, tpot = (1e3 * (value or 0.0) for value in (objective.ttft_p99_s, objective.tpot_p99_s))
    yield f"\n{title}: ttft_p99={ttft:.0f}ms tpot_p99={tpot:.0f}ms"
    yield "| guest | 30 s windows within | requests within | slack used | samples, mean | wakes |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for row in found:
        yield (
            f"| {row.name} | {row.windows:.1%} | {row.requests:.2%} | {row.used:.0%} | {row.samples:.1f} | {row.wakes} |"
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--interference", default="light,heavy")
    parser.add_argument("--objective", default="1.5,2", help="times the p99 that the service has alone")
    parser.add_argument("--poll", type=float, default=1.0, help="seconds")
    parser.add_argument(
        "--proxy", action="store_true", help="the guest reads scavenger guest-proxy's page, not the server's"
    )
    parser.add_argument("--sources", default=",".join(TRACES))
    given = parser.parse_args(argv)
    for trace in given.sources.split(","):
        asked = arrivals(given.traces / FILE, trace, TRACES[trace], given.hours)
        for name in given.interference.split(","):
            for times in given.objective.split(","):
                objective, found = played(
                    asked,
                    INTERFERENCE[name],
                    float(times),
                    given.poll,
                    BY_PROXY if given.proxy else BY_SERVER,
                )
                title = f"simulated, {trace}, {len(asked)} requests, {name} interference, {times} x alone"
                print("\n".join(table(title, objective, found)), flush=True)


if __name__ == "__main__":
    main()
