"""A whole run on a real Slurm whose hosts' clocks are five minutes apart: engines' ahead of the daemon's, the training job's behind it.

All hosts of these tests are one machine: Python's clock is moved in the processes of the training job and of the engines.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from scavenger.cluster.layout import demo_layout
from scavenger.demo.site import DemoSite, SiteOptions
from tests.system import play

APART_S = 300
pytestmark = [pytest.mark.slurm, pytest.mark.mpi, pytest.mark.long]
#: libfaketime would move Slurm's commands too, but its `clock_nanosleep` fails in Python 3.11.
MOVED = """
import time
def _moved(real, by):
    return lambda *args: real(*args) + by
time.time, time.time_ns = _moved(time.time, {by_s}), _moved(time.time_ns, {by_s} * 10**9)
"""


def moved_python(folder: Path, by_s: int) -> Path:
    """An interpreter whose wall clock, and that of all Python that it starts, is off."""
    modules = folder / f"clock{by_s:+d}"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text(MOVED.format(by_s=by_s))
    path = folder / f"python{by_s:+d}"
    path.write_text(
        f'#!/bin/sh\nexport PYTHONPATH="{modules}${{PYTHONPATH:+:$PYTHONPATH}}"\nexec {sys.executable} "$@"\n'
    )
    path.chmod(0o755)
    said = subprocess.run([path, "-c", "import time; print(time.time())"], capture_output=True, check=True)
    assert abs(float(said.stdout) - time.time() - by_s) < 30, "its clock is moved"
    return path


@pytest.mark.timeout(900)
@pytest.mark.parametrize("engines_s", [APART_S, -APART_S], ids=["engines ahead", "engines behind"])
def test_clocks_five_minutes_apart_change_nothing(
    engines_s: int, tmp_path: Path, small_model: Path, undisturbed: play.Result
) -> None:
    options = SiteOptions(
        "slurm",
        tmp_path,
        demo_layout(grace_s=10.0),
        poll_interval_s=0.5,
        max_engines=3,
        harvest={"python": str(moved_python(tmp_path, engines_s))},
        router={"policy": "standard"},
    )
    with DemoSite(options) as site:
        run = play.write_run(
            site,
            small_model,
            run={"steps": 60},
            engine={"max_batch": 4, "pace": 10.0},
            checkpoint={"every": 4},
            reserved={"wake_after_s": 20.0},
        )
        training = play.submit(site, run, env={"SCAVENGER_PYTHON": str(moved_python(tmp_path, -engines_s))})
        busy = play.wait_for("harvested engines at work", lambda: play.busy(site), 240)
        play.wait_for("a step with them", lambda: play.steps_done(site) >= 1)
        others = {site.submit_other(0.5, 4, node) for _, _, node in busy}
        step = play.steps_done(site)
        play.wait_for("the engines to be preempted", lambda: _left(site))
        play.wait_for("training to go on", lambda: play.steps_done(site) >= step + 2)
        play.wait_for("engines to be back", lambda: play.busy(site), 240)
        done = play.cut_short(site, training)
        assert others
        found = play.result(site).until(done)
        assert found == play.as_long(undisturbed, found, small_model, tmp_path)
        lost = play.ask(site, "SELECT worker_id, notice, regenerated, reason FROM workers WHERE left_at > 0")
        preempted = [row for row in lost if row[1]]
        assert preempted, lost
        assert all(regenerated == 0 for _, _, regenerated, _ in preempted), preempted
        # Times in the ledger are the daemon's and Slurm's: none of an engine's or a trainer's clock.
        first, last = play.ask(site, "SELECT min(at), max(at) FROM events")[0]
        spans = play.ask(site, "SELECT min(joined_at), max(coalesce(left_at, joined_at)) FROM workers")
        spans += play.ask(
            site, "SELECT min(started_at), max(coalesce(ended_at, started_at)) FROM allocations"
        )
        for began, ended in spans:
            assert first - 60 <= began <= ended <= last + 60


def _left(site: DemoSite) -> bool:
    return bool(play.ask(site, "SELECT 1 FROM workers WHERE left_at > 0 AND kind = 'harvested'"))
