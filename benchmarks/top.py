"""CPU seconds of one refresh of `scavenger top` on a ledger of 100,000 samples, and of what it consists. Goal: under .5 s.

    python benchmarks/top.py [--samples 100000] [--repeats 5]

Two SQLite ledgers: all samples in flight at 100 engines (the worst: a step so large), and the same number over 100 steps of which the last
is in flight. One sample in twenty lost its engine once. A refresh reads the ledger through a new read-only connection, builds the view and
draws the first page. The status is of 100 engines on 1,000 nodes.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Not this file's folder: a benchmark in it has the name of a package.
sys.path[:] = [str(ROOT), *(place for place in sys.path if Path(place).resolve() != ROOT / "benchmarks")]

import msgspec  # noqa: E402  after the path, as all that follows

from benchmarks import ledger_history as history  # noqa: E402
from scavenger import config, toml  # noqa: E402
from scavenger.ledger import store  # noqa: E402
from scavenger.observe import status  # noqa: E402
from scavenger.observe.fleet import EngineNow, NodeGpus, RunNow  # noqa: E402
from scavenger.top import text, view  # noqa: E402
from scavenger.top.feed import SiteFeed  # noqa: E402

GOAL_S = 0.5
ENGINES, NODES, STEPS, TOKENS = 100, 1_000, 100, 32
EVENTS = 20_000

#: Of every ledger: samples that moved, and what else a long life leaves.
AGED = (
    "UPDATE samples SET epoch = 2, moves = 1 WHERE sample_id % 20 = 0",
    "UPDATE leases SET ended_at = granted_at + 1, end_len = 8, reason = 'preempted' WHERE sample_id % 20 = 0",
    """INSERT INTO leases (sample_id, epoch, worker_id, version, start_len, end_len, regenerated, reason, granted_at)
       SELECT sample_id, 2, worker_id % 100 + 1, 1, 8, 0, 0, '', granted_at + 2 FROM leases WHERE sample_id % 20 = 0""",
    f"""INSERT INTO events (kind, run_id, subject, reason, detail, at)
       WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {EVENTS})
       SELECT CASE WHEN i % 10 THEN 'weights_loaded' ELSE 'chunk_refused' END, 1, 'worker ' || i, 'why', '{{}}', i FROM n""",
    f"""INSERT INTO decisions (policy, action, subject, reason, inputs, at, code)
       WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {EVENTS})
       SELECT CASE WHEN i % 5 THEN 'router' ELSE 'harvest' END, 'none', 'i' || i, 'why', '{{"decision": "why"}}', i, '' FROM n""",
)
#: Steps before the last are over.
STEPPED = (
    f"UPDATE groups SET step = group_id * {STEPS} / (SELECT max(group_id) + 1 FROM groups) + 1",
    f"""UPDATE samples SET state = 'consumed', reward = .5, finished_at = 1, ended_at = 1, ended_attempt = 1,
        ended_step = (SELECT step FROM groups WHERE groups.group_id = samples.group_id)
        WHERE group_id IN (SELECT group_id FROM groups WHERE step < {STEPS})""",
    """UPDATE leases SET ended_at = granted_at + 3, end_len = 32, reason = 'finished' WHERE ended_at IS NULL
        AND sample_id IN (SELECT sample_id FROM samples WHERE state = 'consumed')""",
    f"UPDATE runs SET last_step = {STEPS - 1}",
    f"""INSERT INTO steps (run_id, purpose, step, attempt, version, metrics, committed_at)
        WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {STEPS - 1})
        SELECT 1, 'train', i, 1, 1, '{{"reward": 0.5, "seconds": 60, "seconds_wait": 3}}', i FROM n""",
)


def ledger(folder: Path, samples: int, *, stepped: bool) -> SiteFeed:
    """A feed of a ledger with a status beside it."""
    state = folder / "state"
    url = f"sqlite:///{state / 'ledger.sqlite3'}"
    history.write(url, samples, TOKENS)
    engine = store.open_engine(url)
    try:
        with engine.connect() as connection, connection.begin():
            for statement in (*AGED, *(STEPPED if stepped else ())):
                connection.exec_driver_sql(statement)
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("ANALYZE")
    finally:
        engine.dispose()
    now = time.time()
    harvest = status.Harvest("scavenge", ENGINES, ENGINES, 0, 0, now, 9, 9, 9, "", "max_engines is reached")
    nodes = tuple(
        NodeGpus(f"n{n}", other_users=n % 8, harvested=n < ENGINES, idle=7 - n % 8) for n in range(NODES)
    )
    engines = tuple(
        EngineNow(n, "bench", "harvested", f"n{n}", 1, n, "ready", 1, 60, 900.0, 9_000, 60_000, now, 600.0)
        for n in range(1, ENGINES + 1)
    )
    seen = status.Status(now, 1, "h", 1, now, "OK", "", 0, 0, 0, 0, 0, 0, 0, 0, 0)
    run = RunNow("bench", "train", STEPS, "train", 1_000, 1_000, 0, STEPS - 1, 1, now, now)
    held = msgspec.structs.replace(harvest, nodes=nodes)
    status.write(state, msgspec.structs.replace(seen, harvest=held, engines=engines, runs=(run,)))
    path = folder / "scavenger.toml"
    path.write_text(toml.dumps({"daemon": {"state_dir": str(state)}}))
    return SiteFeed(config.read_daemon(path))


def cpu(do: Callable[[], object], repeats: int) -> tuple[float, float, float]:
    """CPU seconds of this process: median, least, most."""
    do()
    found = []
    for _ in range(repeats):
        began = time.process_time()
        do()
        found.append(time.process_time() - began)
    return statistics.median(found), min(found), max(found)


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--samples", type=int, default=100_000)
    options.add_argument("--repeats", type=int, default=5)
    given = options.parse_args()
    missed = False
    for name, stepped in (("all in flight", False), (f"over {STEPS} steps", True)):
        with tempfile.TemporaryDirectory(prefix="scv-top-") as folder:
            feed = ledger(Path(folder), given.samples, stepped=stepped)
            inputs = feed.read()
            if inputs.ledger is None or not inputs.ledger.samples:
                raise SystemExit(f"the ledger was not read: {inputs.no_ledger}")
            shown = view.build(inputs)

            def refresh(feed: SiteFeed = feed) -> None:
                text.once(view.build(feed.read()), 200, 50)

            def draw(shown: view.View = shown) -> None:
                text.once(shown, 200, 50)

            parts: dict[str, Callable[[], object]] = {
                "read": feed.read,
                "build": functools.partial(view.build, inputs),
                "draw": draw,
                "refresh": refresh,
            }
            for part, do in parts.items():
                median, least, most = cpu(do, given.repeats)
                goal = ""
                if part == "refresh":
                    met = median <= GOAL_S
                    missed = missed or not met
                    goal = f"  goal {GOAL_S} s: {'met' if met else 'MISSED'}"
                print(
                    f"{given.samples:,} samples {name}: {part:<8} {median:.3f} s CPU ({least:.3f} to {most:.3f}){goal}",
                    flush=True,
                )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
