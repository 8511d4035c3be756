"""Episodes of a whole run, while engines, gateways and environment workers are lost: the same tokens, rewards and losses as without."""

from __future__ import annotations

import os
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from scavenger.cluster.layout import demo_layout
from scavenger.demo.site import DemoSite, SiteOptions
from tests.chaos.choose import Process
from tests.chaos.parts import is_there, observe
from tests.system import agents, play
from tests.trainer.episodes import test_whole_run
from tests.trainer.episodes.interpreters import needs_verifiers, python_with_verifiers
from tests.trainer.episodes.test_whole_run import write_talker

pytest.importorskip("starlette", reason="the extra `gateway`")
pytest.importorskip("uvicorn", reason="the extra `gateway`")
pytestmark = pytest.mark.mpi


@dataclass
class Losses:
    """Takes away engines, gateways and environment workers of a run that is under way, each while it works, and counts them."""

    site: DemoSite
    run_toml: Path
    taken: set[int] = field(default_factory=set)  # workers
    killed: Counter[str] = field(default_factory=Counter)

    def some(self, engines: int, others: int) -> None:
        """One after another, until it was so many engines, gateways and environment workers; those that are killed have begun to work."""
        while len(self.taken) < engines or not self._moved():
            for worker, _job, node in play.wait_for("an engine at work", self._at_work, agents.DEADLINE_S):
                self.taken.add(worker)
                self.site.submit_other(0.3, 4, node)
            self._one_of_each(others)
        while min(self.killed["gateway"], self.killed["environment"]) < others:
            self._one_of_each(others)

    def _at_work(self) -> list[tuple[int, int, str]]:
        return [one for one in play.busy(self.site) if one[0] not in self.taken]

    def _moved(self) -> bool:
        return play.ask(self.site, "SELECT count(*) FROM samples WHERE moves > 0")[0][0] > 0

    def _one_of_each(self, most: int) -> None:
        for part in ("environment", "gateway"):
            if self.killed[part] < most:
                self._kill(part)

    def _kill(self, part: str) -> None:
        before = _turns(self.site)
        victim: Process = play.wait_for(
            f"a process of part {part}", lambda: self._of(part), agents.DEADLINE_S
        )
        os.kill(victim.pid, signal.SIGKILL)
        play.wait_for("its end", lambda: not is_there(victim))
        self.killed[part] += 1
        # Its successor works when turns come that were not there: one that is killed while it starts would prove nothing.
        play.wait_for("another turn", lambda: _turns(self.site) > before, agents.DEADLINE_S)

    def _of(self, part: str) -> Process | None:
        return next((one for one in observe(self.site, self.run_toml, None) if one.part == part), None)


def _turns(site: DemoSite) -> int:
    rows = play.ask(site, "SELECT count(*) FROM turns")
    return int(rows[0][0]) if rows else 0


def _disturbed(
    folder: Path, environment: agents.Environment, *, engines: int, others: int, steps: int
) -> play.Result:
    options = SiteOptions(
        "local",
        folder,
        demo_layout(grace_s=1.0, requeue_delay_s=0.5),
        poll_interval_s=0.2,
        max_engines=2,
        router={"policy": "standard"},
    )
    with DemoSite(options) as site:
        # longer than any machine takes until what is to be seen has been seen, then cut short
        run = agents.write_run(site, environment, run={"steps": 80}, engine={"max_batch": 2, "pace": 8.0})
        training = agents.submit(site, run, environment)
        losses = Losses(site, run)
        losses.some(engines, others)
        wanted = max(steps, play.steps_done(site) + 1)
        play.wait_for("a step after all of it", lambda: play.steps_done(site) >= wanted, agents.DEADLINE_S)
        done = play.cut_short(site, training)
        log = (site.dir / "train.log").read_text()
        assert log.count("an environment worker ended") >= others
        assert log.count("the run's gateway ended") >= others
        assert play.ask(site, "SELECT name FROM episodes WHERE name NOT LIKE '%.0'") == [], (
            "episodes had other lives: what was generated of them was lost"
        )
        return agents.result(site).until(done)


@pytest.mark.timeout(900)
def test_losses_of_engines_gateways_and_environment_workers_change_no_token_and_no_loss(
    tmp_path: Path, small_model: Path
) -> None:
    with agents.ToolServer().serving() as tool:
        environment = agents.plain(small_model, tool, tmp_path)
        found = _disturbed(tmp_path / "a", environment, engines=1, others=1, steps=1)
        assert found == agents.undisturbed(environment, tmp_path / "b", max(found.steps))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_losses_change_no_token_and_no_loss(tmp_path: Path, small_model: Path) -> None:
    with agents.ToolServer().serving() as tool:
        environment = agents.plain(small_model, tool, tmp_path)
        found = _disturbed(tmp_path / "a", environment, engines=8, others=6, steps=6)
        assert found == agents.undisturbed(environment, tmp_path / "b", max(found.steps))


@needs_verifiers
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_losses_change_nothing_of_episodes_of_verifiers(tmp_path: Path) -> None:
    turns = {"taskset": {"tasks": 8, "turns": agents.TURNS}}
    environment = agents.Environment(
        write_talker(tmp_path / "model"),
        test_whole_run.ENVIRONMENT,
        {**turns, "agent": {"harness": {"id": test_whole_run.ENVIRONMENT, "pause": 0.2}}},
        Path(str(python_with_verifiers())),
        256,
        Path(test_whole_run.__file__).parent,
    )
    found = _disturbed(tmp_path / "a", environment, engines=3, others=2, steps=2)
    assert found == agents.undisturbed(environment, tmp_path / "b", max(found.steps))
