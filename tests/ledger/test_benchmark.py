"""The benchmark of the ledger runs, small, over the real parts. At this size on a busy machine it may miss a goal, but not by far."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


#: A rate may be this share of its goal, a time this multiple of its own: a commit or a statement for each chunk is far outside.
LEAST_SHARE, MOST_MULTIPLE = 1 / 50, 10.0
MOST_CPU_US = 150.0  # of all parts together, for a chunk of 32 tokens; 27 when this was written
GOALS = {
    "durable ingest",
    "commit latency p99, at half that load",
    "160 samples of 2 dead engines leased again, p99",
    "restart, 400 samples, 40,000 tokens",
}


def test_a_small_run_of_the_benchmark_judges_every_goal_and_is_in_reach_of_each() -> None:
    argv = [sys.executable, str(ROOT / "benchmarks" / "ledger.py"), "--quick", "--database", "sqlite"]
    argv += ["--only", "ingest,latency,failover,restart"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "synchronous = 2 (FULL)" in done.stdout
    rows = [
        [cell.strip() for cell in line.split("|")]
        for line in done.stdout.splitlines()
        if line.startswith("sqlite ")
    ]
    verdicts = {
        row[1]: re.fullmatch(r"([\d.e+-]+) of (at least|at most) .*: (met|MISSED)", row[-1])
        for row in rows
        if row[-1]
    }
    assert verdicts.keys() == GOALS
    for what, verdict in verdicts.items():
        assert verdict is not None, what
        share, kind = float(verdict[1]), verdict[2]
        assert share >= LEAST_SHARE if kind == "at least" else 0 < share <= MOST_MULTIPLE, (
            f"{what}: {verdict[0]}"
        )
    costs = {
        row[1].removeprefix("CPU a chunk: "): float(row[2])
        for row in rows
        if row[1].startswith("CPU a chunk: ")
    }
    assert {"generator", "router core", "writer thread"} < costs.keys()
    assert all(cost > 0 for cost in costs.values()), costs
    assert costs["all together"] < MOST_CPU_US
