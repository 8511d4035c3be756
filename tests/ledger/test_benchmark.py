"""The benchmark of the ledger runs, small, over the real parts; what it would print at full size is not judged here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_benchmark_measures_its_goals() -> None:
    argv = [sys.executable, str(ROOT / "benchmarks" / "ledger.py"), "--quick", "--database", "sqlite"]
    argv += ["--only", "ingest,latency,failover,restart"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "synchronous = 2 (FULL)" in done.stdout
    rows = [[cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines() if line.startswith("sqlite ")]
    medians = {row[1]: float(row[2].replace(",", "")) for row in rows}
    judged = [row[1] for row in rows if row[-1].endswith(("met", "MISSED"))]
    assert len(judged) == 4, judged
    for name in ("durable ingest", "CPU a chunk: router core", "CPU a chunk: writer thread", *judged):
        assert medians[name] > 0, name
