"""Two policies of one environment, each a run with its own training job: both learn, and one goes on when the other's trainer is gone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scavenger.cluster.layout import demo_layout
from scavenger.demo.site import DemoSite, SiteOptions
from scavenger.ledger.read import reports
from tests.system import play

pytest.importorskip("starlette", reason="the extra `gateway`")
pytest.importorskip("uvicorn", reason="the extra `gateway`")
pytestmark = [pytest.mark.mpi, pytest.mark.long]

RUNS = ("proposer", "solver")
EXAMPLE = play.ROOT / "examples/proposer_solver"
DEADLINE_S = 8 * play.DEADLINE_S


def site_in(folder: Path) -> DemoSite:
    return DemoSite(
        SiteOptions("local", folder, demo_layout(grace_s=1.0), poll_interval_s=0.2, max_engines=4)
    )


def placed(site: DemoSite, name: str, **changes: str) -> Path:
    """The example's run.toml as it stands, in the site's folder; `changes`: lines in the place of others."""
    text = (EXAMPLE / f"{name}.toml").read_text()
    for key, value in {"state_dir": f'"{site.state_dir}"', **changes}.items():
        before = next(line for line in text.splitlines() if line.startswith(f"{key} = "))
        text = text.replace(before, f"{key} = {value}", 1)
    path = site.dir / f"{name}.toml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two") / "model"
    command = [sys.executable, "-m", "trainer.tiny", "make", "--task", "calculator", "--steps", "0", "--out"]
    subprocess.run([*command, str(folder)], check=True, cwd=play.ROOT)
    return folder


def steps_of(site: DemoSite, run: str) -> int:
    rows = play.ask(
        site,
        "SELECT max(t.step) FROM steps t JOIN runs r ON r.run_id = t.run_id"
        f" WHERE r.name = '{run}' AND t.purpose = 'train' AND t.rewound_by IS NULL",
    )
    return int(rows[0][0] or 0) if rows else 0


def rewards_of(site: DemoSite, run: str) -> list[float]:
    """The mean reward of each step."""
    return [
        float(value)
        for (value,) in play.ask(
            site,
            "SELECT json_extract(t.metrics, '$.reward') FROM steps t JOIN runs r ON r.run_id = t.run_id"
            f" WHERE r.name = '{run}' AND t.purpose = 'train' AND t.rewound_by IS NULL ORDER BY t.step",
        )
    ]


def open_run(site: DemoSite, run: str) -> bool:
    """It is open and its first weights are published: its policy answers."""
    query = f"SELECT 1 FROM weight_versions v JOIN runs r ON r.run_id = v.run_id WHERE r.name = '{run}'"
    return bool(play.ask(site, query))


def started(site: DemoSite, model: Path, **changes: str) -> tuple[int, int]:
    """Both training jobs: the solver's, and once its policy answers the proposer's."""
    shutil.copytree(model, site.dir / "model")
    solver = play.submit(site, placed(site, "solver", **changes), 1)
    play.wait_for("the solver's weights", lambda: open_run(site, "solver"), DEADLINE_S)
    return solver, play.submit(site, placed(site, "proposer", **changes), 1)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.timeout(1800)
def test_both_policies_learn(tmp_path: Path, model: Path) -> None:
    with site_in(tmp_path) as site:
        solver, proposer = started(site, model)
        play.finish(site, proposer, DEADLINE_S)
        play.finish(site, solver, DEADLINE_S)
        assert reports.check(site.ledger_url) == []
        for run in RUNS:
            rewards = rewards_of(site, run)
            assert mean(rewards[-5:]) > mean(rewards[:5]) + 0.2, (run, rewards)
        twice = play.ask(site, "SELECT group_id FROM delivered_turns GROUP BY group_id HAVING count(*) > 1")
        assert twice == []


@pytest.mark.timeout(1800)
def test_a_policy_goes_on_while_the_other_one_s_trainer_is_gone(tmp_path: Path, model: Path) -> None:
    with site_in(tmp_path) as site:
        solver, proposer = started(site, model, steps="30")
        play.wait_for("a step of both", lambda: min(steps_of(site, run) for run in RUNS) >= 2, DEADLINE_S)
        play.cut_short(site, solver)
        at, before = steps_of(site, "solver"), steps_of(site, "proposer")
        play.wait_for("the proposer's steps", lambda: steps_of(site, "proposer") >= before + 4, DEADLINE_S)
        assert steps_of(site, "solver") == at, "a trainer that is gone took a step"
        solver = play.submit(site, site.dir / "solver.toml", 1)
        play.wait_for("the solver's next step", lambda: steps_of(site, "solver") > at, DEADLINE_S)
        assert steps_of(site, "proposer") < 30, "the proposer had ended: nothing was shown"
        play.finish(site, proposer, DEADLINE_S)
        play.finish(site, solver, DEADLINE_S)
        assert reports.check(site.ledger_url) == []
        assert states_of(site) <= {"consumed", "filtered", "masked", "stale", "dropped"}


@pytest.mark.timeout(1200)
def test_a_run_without_steps_answers_as_it_is(tmp_path: Path, model: Path) -> None:
    with site_in(tmp_path) as site:
        shutil.copytree(model, site.dir / "model")
        solver = play.submit(site, placed(site, "solver", steps="0"), 1)
        play.wait_for("the solver's weights", lambda: open_run(site, "solver"), DEADLINE_S)
        proposer = play.submit(site, placed(site, "proposer", steps="4"), 1)
        play.finish(site, proposer, DEADLINE_S)
        play.finish(site, solver, DEADLINE_S)
        assert reports.check(site.ledger_url) == []
        assert (steps_of(site, "proposer"), steps_of(site, "solver")) == (4, 0)
        assert states_of(site) == {"served"}


def states_of(site: DemoSite) -> set[str]:
    return {str(state) for (state,) in play.ask(site, "SELECT DISTINCT state FROM deliveries")}
