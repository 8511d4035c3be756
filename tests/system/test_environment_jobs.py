"""Environment workers that the daemon harvests: another user's job takes one back in mid-episode, and nothing changes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scavenger.cluster.layout import demo_layout
from scavenger.cluster.model import JobSpec
from scavenger.demo.site import DemoSite, SiteOptions
from tests.system import agents, play

pytest.importorskip("starlette", reason="the extra `gateway`")
pytest.importorskip("uvicorn", reason="the extra `gateway`")
pytestmark = [pytest.mark.mpi, pytest.mark.long]

CPUS, OF_ONE = 16, 6
#: In mid-episode: others go on with at least one.
TAKEN_BACK = re.compile(
    r"the environment worker on (\S+) job (\d+) is gone \(.*\): others go on with its ([1-9]\d*) episodes"
)


def write_python(path: Path) -> Path:
    """The daemon's `harvest.python`: this clone's code, in whatever environment a scheduler starts jobs."""
    path.write_text(f'#!/bin/sh\nPYTHONPATH={play.ROOT} exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path


def environment_jobs(site: DemoSite) -> list[tuple[str, str, int]]:
    """(state, node, GPUs) of those that are open."""
    sql = "SELECT last_state, node, gpus FROM v_jobs WHERE kind = 'environment' AND ended_at IS NULL ORDER BY intent_id"
    return play.ask(site, sql)


def other_user(site: DemoSite, node: str) -> int:
    """An ordinary job of another user, which needs most CPUs of the node, and no GPU."""
    spec = JobSpec(
        name="other",
        comment="",
        partition="normal",
        script="#!/bin/bash\nexec sleep 3\n",
        cpus_per_task=CPUS - 2,
        requeue=False,
        nodelist=(node,),
        workdir=str(site.dir),
        output="/dev/null",
    )
    return site.cluster.submit(spec)


@pytest.mark.parametrize("backend", [pytest.param("slurm", marks=pytest.mark.slurm), "local"])
@pytest.mark.timeout(1500)
def test_an_environment_worker_that_is_taken_back_in_mid_episode_changes_no_token_and_no_loss(
    backend: str, tmp_path: Path, small_model: Path
) -> None:
    with agents.ToolServer().serving() as tool:
        environment = agents.plain(small_model, tool, tmp_path)
        options = SiteOptions(
            backend,
            tmp_path / "a",
            demo_layout(nodes=3, gpus=1, cpus=CPUS, grace_s=5.0),
            poll_interval_s=0.3,
            max_engines=1,
            harvest={
                "max_environment_workers": 2,
                "environment_cpus": OF_ONE,
                "environment_memory_mb": 512,
                "max_pending": 4,
                "python": str(write_python(tmp_path / "python-of-jobs")),
            },
            router={"policy": "standard"},
        )
        with DemoSite(options) as site:
            run = agents.write_run(
                site,
                environment,
                run={"steps": 80},
                engine={"max_batch": 4, "pace": 8.0},
                data={"environment_jobs": 2, "environment_workers": 1, "environment_concurrency": 2},
            )
            training = agents.submit(site, run, environment)
            log = site.dir / "train.log"
            play.wait_for("a training job that lets workers join", log.exists, agents.DEADLINE_S)
            try:
                play.wait_for(
                    "two environment workers",
                    lambda: log.read_text().count("an environment worker joined") >= 2,
                    agents.DEADLINE_S,
                )
                assert [gpus for _, _, gpus in environment_jobs(site)] == [0, 0]
                in_a_job = "SELECT 1 FROM v_episodes WHERE worker LIKE '% job %'"
                play.wait_for(
                    "an episode that a job played", lambda: play.ask(site, in_a_job), agents.DEADLINE_S
                )
                while not TAKEN_BACK.search(log.read_text()):
                    running = play.wait_for(
                        "an environment worker in a job",
                        lambda: [node for state, node, _ in environment_jobs(site) if state == "RUNNING"],
                        agents.DEADLINE_S,
                    )
                    theirs = other_user(site, running[0])
                    play.finish(site, theirs, agents.DEADLINE_S)
                joined = log.read_text().count("an environment worker joined")
                play.wait_for(
                    "one that came back",
                    lambda: (
                        log.read_text().count("an environment worker joined") > joined
                        or len(environment_jobs(site)) == 2
                    ),
                    agents.DEADLINE_S,
                )
                wanted = play.steps_done(site) + 1
                play.wait_for("a step after that", lambda: play.steps_done(site) >= wanted, agents.DEADLINE_S)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{play.logs(site)}") from error
            done = play.cut_short(site, training)
            found = agents.result(site).until(done)
            assert play.ask(site, "SELECT name FROM episodes WHERE name NOT LIKE '%.0'") == []
            played = {
                row[0] for row in play.ask(site, "SELECT DISTINCT worker FROM v_episodes WHERE worker <> ''")
            }
            assert any(" job " in name for name in played), played
            assert any(" job " not in name for name in played), played
            codes = {
                row[0] for row in play.ask(site, "SELECT code FROM v_decisions WHERE policy = 'environment'")
            }
            assert codes
            play.wait_for(
                "no environment worker without its training job", lambda: not environment_jobs(site)
            )
        assert found == agents.undisturbed(environment, tmp_path / "b", max(found.steps))


@pytest.mark.timeout(900)
def test_one_that_its_user_starts_by_hand_joins_and_leaves(tmp_path: Path, small_model: Path) -> None:
    with agents.ToolServer().serving() as tool:
        environment = agents.plain(small_model, tool, tmp_path)
        options = SiteOptions("local", tmp_path / "a", demo_layout(grace_s=1.0), poll_interval_s=0.3)
        with DemoSite(options) as site:
            run = agents.write_run(
                site,
                environment,
                run={"steps": 80, "harvest": False},
                engine={"max_batch": 16},
                data={"environment_jobs": 1, "environment_workers": 1, "environment_concurrency": 2},
            )
            training = agents.submit(site, run, environment)
            environ = site.env | environment.env | {"SLURM_JOB_ID": "4242", "SLURMD_NODENAME": "cn7"}
            argv = [sys.executable, "-m", "scavenger", "environment-worker", str(run)]
            with (site.dir / "by-hand.log").open("wb") as log:
                started = subprocess.Popen(argv, env=environ, stdout=log, stderr=log)
            try:
                played = "SELECT 1 FROM v_episodes WHERE worker = 'cn7 job 4242'"
                play.wait_for("an episode of its own", lambda: play.ask(site, played), agents.DEADLINE_S)
                started.terminate()
                assert started.wait(60) == 75
                gone = "the environment worker on cn7 job 4242 is gone (it was told to leave)"
                play.wait_for("its goodbye", lambda: gone in (site.dir / "train.log").read_text())
            except AssertionError as error:
                raise AssertionError(f"{error}\n{play.logs(site)}") from error
            finally:
                started.kill()
                started.wait()
            play.cut_short(site, training)
