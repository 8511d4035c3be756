"""A whole demo's events, as its daemon's core was given them, make an equal core again."""

from __future__ import annotations

import functools
import io
import json
import time
from pathlib import Path

import pytest
from rich.console import Console

from scavenger.demo import session, site

pytestmark = [pytest.mark.slurm, pytest.mark.mpi]


class _Made(session.DemoModel):
    """A model that is there already."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def wait(self, screen: session.Screen) -> None:
        pass


@pytest.mark.timeout(400)
def test_the_events_of_a_whole_demo_make_an_equal_core(
    tmp_path: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = functools.partial(site.SiteOptions, daemon_module="tests.system.recorded_daemon")
    monkeypatch.setattr(session, "SiteOptions", recorded)
    settings = session.DemoSettings(steps=8, prompts_per_step=8, samples_per_prompt=4, eval_prompts=8)
    options = session.DemoOptions(tmp_path, "slurm", preempt_every_s=4.0, other_job_s=2.0, settings=settings)
    screen = session.Screen(Console(file=io.StringIO()), settings.steps, time.monotonic())
    metrics, _ = session.run_demo(options, "slurm", tmp_path / "site", _Made(small_model), screen)
    assert len(metrics.trained()) == settings.steps
    found = json.loads((tmp_path / "site/replayed.json").read_text())
    assert found["equal"], found
    assert found["events"] > 500
    assert {"HelloReceived", "WorkerSent", "TrainerCalled", "Committed", "CoreTick"} <= set(found["kinds"])
