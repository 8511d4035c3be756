"""`scavenger demo --agent`: episodes with a tool are learnt while engines and environment workers are lost. Short, and the whole one."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from scavenger.demo import agent, episode, report, session
from scavenger.demo.metrics import DemoMetrics
from scavenger.ledger.read import reports
from tests.system import play

pytestmark = pytest.mark.mpi


def demo(folder: Path, settings: session.DemoSettings, **more: float) -> tuple[DemoMetrics, report.Context]:
    options = session.DemoOptions(folder, "local", agent=True, settings=settings, **more)  # type: ignore[arg-type]  # of several types
    screen = session.Screen(Console(file=io.StringIO()), settings.steps, time.monotonic())
    with session.made_for(options, folder / "site") as model:
        return session.run_demo(options, "local", folder / "site", model, screen)


def check_whole(found: DemoMetrics, context: report.Context, settings: session.DemoSettings) -> None:
    """Every episode was trained once, though engines and environment workers were lost, and the report shows it."""
    assert [s.step for s in found.trained()] == list(range(1, settings.steps + 1))
    assert context.episodes is not None
    assert (
        context.episodes.episodes == settings.steps * settings.prompts_per_step * settings.samples_per_prompt
    )
    assert found.moves.samples == context.episodes.turns
    lost = sum(s.metrics["environment_workers_lost"] for s in found.steps)
    assert 1 <= lost <= context.workers_killed  # one that died after the last step stands in none
    assert reports.check(f"sqlite:///{context.ledger_path}") == []
    one = context.episodes.one
    assert one is not None
    assert re.fullmatch(r"[0-9]{2}(\+[0-9]{2}){3}>", one.turns[0].heard)
    for before, turn in zip(one.turns, one.turns[1:], strict=False):
        assert turn.heard in {f"{display}>" for display in (before.said, "?", _sum(before.said))} - {
            f"{before.said}>"
        }
    text = episode.drawn(one)
    assert text.count("\n") == 2 * len(one.turns)
    told = dict(report.summary(found, context))["environment workers lost"]
    assert told.startswith(f"{lost:.0f} ({context.workers_killed} killed by the demo); ")
    page = report.html(found, context, "a run", "here")
    assert "One episode, turn by turn" in page
    assert one.name in page


def _sum(said: str) -> str:
    found = re.fullmatch(r"([0-9]{2})\+([0-9]{2})", said)
    return f"{int(found[1]) + int(found[2]):02d}" if found else "?"


@pytest.mark.timeout(900)
def test_episodes_go_on_while_environment_workers_are_killed(tmp_path: Path) -> None:
    settings = dataclasses.replace(
        session.AGENT_SETTINGS,
        steps=4,
        prompts_per_step=2,
        samples_per_prompt=4,
        eval_prompts=4,
        warm_up_steps=20,
    )
    found, context = demo(tmp_path, settings, kill_every_s=2.0, preempt_every_s=4.0, other_job_s=2.0)
    check_whole(found, context, settings)
    assert not agent.workers_in(tmp_path / "site")


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_a_small_model_learns_to_add_with_a_calculator(tmp_path: Path) -> None:
    """The demo's own sizes: accuracy on held-out tasks rises by .3 at least."""
    settings = session.AGENT_SETTINGS
    found, context = demo(tmp_path, settings)
    check_whole(found, context, settings)
    before, *_, after = (s.metrics["eval_sampled"] for s in found.evaluations())
    assert after - before >= 0.3, (before, after)
    assert context.workers_killed >= 3
    assert len(found.lost) >= 3
    assert found.moves.moved > 0


def test_only_the_workers_of_this_demo_s_folder_are_killed_and_never_the_last_one(tmp_path: Path) -> None:
    """Real processes with such a name, in two folders."""
    mine, other = tmp_path / "mine", tmp_path / "other"
    started = []
    for folder, count in ((mine, agent.WORKERS), (other, 1)):
        folder.mkdir()
        argv = [sys.executable, "-c", "import sys; sys.stdin.read()", agent.WORKER]
        started += [subprocess.Popen(argv, cwd=folder, stdin=subprocess.PIPE) for _ in range(count)]
    try:
        play.wait_for("their start", lambda: len(agent.workers_in(mine)) == agent.WORKERS, 30)
        killer = agent.WorkerKiller(mine, 10.0)
        killer.look(100.0, 3)
        killer.look(109.0, 4)
        assert killer.killed == 0
        killer.look(110.0, 4)
        play.wait_for("one to end", lambda: len(agent.workers_in(mine)) == agent.WORKERS - 1, 30)
        killer.look(130.0, 5)
        assert killer.killed == 1
        argv = [sys.executable, "-c", "import sys; sys.stdin.read()", agent.WORKER]
        started.insert(0, subprocess.Popen(argv, cwd=mine, stdin=subprocess.PIPE))
        play.wait_for("its successor", lambda: len(agent.workers_in(mine)) == agent.WORKERS, 30)
        killer.look(140.0, 4)
        killer.look(150.0, 4)
        assert killer.killed == 1, "no step was taken since"
        assert [one.poll() is None for one in started].count(True) == len(started) - 1
        assert started[-1].poll() is None
        os.kill(started[-1].pid, 0)
    finally:
        for one in started:
            one.kill()
            one.communicate()
