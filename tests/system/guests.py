"""`scavenger guest` as its owner starts it, and a run that always has samples for it. For tests and `benchmarks/serving_live.py`."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scavenger import toml
from scavenger.client import Run
from scavenger.cluster.layout import demo_layout
from scavenger.demo.site import DemoSite, SiteOptions
from scavenger.protocol import keys
from scavenger.weights.source import WeightServer
from tests.system import play, scripted

RUN = "small"
#: Prompts of one step, and samples of each: more than a guest generates in ten minutes.
PROMPTS, SAMPLES = 1024, 8


@contextmanager
def hosted(
    site: DemoSite,
    service_url: str,
    log: Path,
    *options: str,
    objective: str = "ttft_p99=500ms tpot_p99=60ms",
    name: str = "svc",
) -> Iterator[subprocess.Popen[bytes]]:
    """`scavenger guest` with a key of the run `small`; ended on leaving. `options`: more of its arguments."""
    key = site.dir / f"{name}.key"
    keys.invite_guest(site.state_dir, name, RUN, key)
    argv = [
        *(sys.executable, "-m", "scavenger", "guest", "--service", service_url, "--objective", objective),
        *("--daemon", str(site.state_dir), "--key", str(key), *options),
    ]
    with log.open("wb") as out, subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(30)


def said(log: Path) -> list[dict[str, Any]]:
    """The host's lines so far."""
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


def holds(site: DemoSite, name: str = "svc") -> int:
    """Leases that the guest holds now."""
    rows = play.ask(
        site,
        "SELECT count(*) FROM leases l JOIN workers w ON w.worker_id = l.worker_id "
        f"WHERE l.ended_at IS NULL AND w.left_at IS NULL AND w.intent_id = 'guest-{name}'",
    )
    return int(rows[0][0]) if rows else 0


@contextmanager
def supplied(folder: Path, model: Path, *, context: int, tokens: int, most: int) -> Iterator[DemoSite]:
    """A site that harvests nothing, and a run without engines that has one step of samples to give: whoever is a guest of it generates.

    `context`, `tokens`: of a sample at most. `most`: samples that an engine holds. A guest may be stopped for minutes without being dead.
    """
    patient = {"suspect_s": 600.0, "dead_s": 1200.0}
    options = SiteOptions("local", folder, demo_layout(grace_s=1.0), max_engines=0, daemon=patient)
    with DemoSite(options) as site, WeightServer() as source:
        document = play.run_document(
            site.state_dir,
            site.dir / "out",
            model,
            run={"deterministic": False, "max_engines": 1},
            engine={"name": "vllm", "max_batch": most},
            sampling={"max_tokens": tokens},
        )
        document["model"]["context_length"] = context
        run_toml = site.dir / "run.toml"
        run_toml.write_text(toml.dumps(document))
        with scripted.opened(run_toml) as run:
            version = scripted.publish(run, source, model, 0)
            scripted.submit(run, 1, version, prompts=PROMPTS, samples=SAMPLES, tokens=tokens)
            with _taken(run):
                yield site
            run.close_run("finished")


@contextmanager
def _taken(run: Run) -> Iterator[None]:
    """Take whole groups, as a trainer does, until the block is left."""
    over = threading.Event()

    def take() -> None:
        while not over.is_set():
            run.poll(0.5)

    with ThreadPoolExecutor(1, "trainer") as pool:
        taking = pool.submit(take)
        try:
            yield
        finally:
            over.set()
        taking.result()
