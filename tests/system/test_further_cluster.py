"""One daemon, its own cluster and a further one: the harvester's process of that one is killed and comes back, and nothing is lost.

Both clusters, the daemon, the process, the engines and the trainer are real.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scavenger import toml
from scavenger.cluster.layout import demo_layout
from scavenger.cluster.local.client import LocalCluster, LocalServer
from scavenger.cluster.model import JobState
from scavenger.cluster.port import Cluster
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.demo.site import DemoSite, SiteOptions
from scavenger.observe import status
from scavenger.protocol import keys
from tests.system import play

FAST = {
    "poll_interval_s": 0.5,
    "fast_poll_interval_s": 0.3,
    "min_poll_interval_s": 0.0,
    "max_rpc_per_min": 60_000.0,
    "absent_s": 2.0,
}


@dataclass
class There:
    """The further cluster, and the process that harvests it."""

    folder: Path
    cluster: Cluster
    env: Mapping[str, str]
    argv: tuple[str, ...]
    process: subprocess.Popen[bytes] | None = None

    @property
    def state_dir(self) -> Path:
        return self.folder / "state"

    def start(self) -> None:
        with (self.folder / "harvester.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.argv, env=dict(self.env), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def log(self) -> str:
        return (self.folder / "harvester.log").read_text()[-4000:]


@contextmanager
def further(site: DemoSite, folder: Path, backend: str, **harvest: Any) -> Iterator[There]:
    """A second cluster of the same kind, with a harvester's configuration and key of its own."""
    folder.mkdir()
    with contextlib.ExitStack() as held:
        cluster: Cluster
        section: dict[str, Any] = {"backend": backend, **FAST}
        env = {**os.environ, "PYTHONPATH": str(play.ROOT)}
        if backend == "slurm":
            sandbox = held.enter_context(SlurmSandbox(demo_layout(grace_s=1.0)))
            cluster, env = SlurmCluster(sandbox.env), {**sandbox.env, "PYTHONPATH": str(play.ROOT)}
        else:
            held.enter_context(LocalServer(folder / "cluster", demo_layout(grace_s=1.0)))
            cluster, section["local_dir"] = LocalCluster(folder / "cluster"), str(folder / "cluster")
        config, key = folder / "scavenger.toml", folder / "b.key"
        (folder / "state").mkdir(mode=0o700)
        limits = {"partition": "scavenge", "max_engines": 2, "time_limit_s": 1800.0, "placement": "slurm"}
        config.write_text(
            toml.dumps(
                {
                    "daemon": {"state_dir": str(folder / "state")},
                    "cluster": section,
                    "harvest": limits | harvest,
                }
            )
        )
        keys.admit_cluster(site.state_dir, "b", key)
        argv = ["harvester", "--cluster", "b", "--daemon", str(site.state_dir), "--key", str(key)]
        there = There(
            folder, cluster, env, (sys.executable, "-m", "scavenger", *argv, "--config", str(config))
        )
        there.start()
        held.callback(there.kill)
        yield there


def told(site: DemoSite) -> status.ClusterNow | None:
    """What `scavenger status` would say of the further cluster."""
    with contextlib.suppress(Exception):
        return next((one for one in status.read(site.state_dir).clusters if one.name == "b"), None)
    return None


def engines(site: DemoSite, cluster: str) -> list[tuple[int, int]]:
    """(worker id, job id) of engines of one cluster's jobs that are here."""
    return play.ask(
        site,
        "SELECT w.worker_id, w.job_id FROM workers w JOIN jobs j ON j.intent_id = w.intent_id"
        f" WHERE w.left_at IS NULL AND j.cluster = '{cluster}' ORDER BY w.worker_id",
    )


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["local", pytest.param("slurm", marks=pytest.mark.slurm)])
def test_a_harvester_that_is_killed_and_comes_back_loses_nothing_and_doubles_nothing(
    tmp_path: Path, small_model: Path, undisturbed: play.Result, backend: str
) -> None:
    options = SiteOptions(
        backend,
        tmp_path / "site",
        demo_layout(grace_s=1.0),
        max_engines=1,
        daemon={"clusters_port": 0},
        router={"policy": "standard"},
    )
    with DemoSite(options) as site, further(site, tmp_path / "b", backend) as there:
        run = play.write_run(
            site,
            small_model,
            run={"steps": 60, "max_engines": 3},
            engine={"pace": 25.0, "max_batch": 4},
            weights={"encrypt": True},
        )
        job = play.submit(site, run)
        try:
            play.wait_for("an engine on each cluster", lambda: engines(site, "") and engines(site, "b"))
        except AssertionError as error:
            raise AssertionError(f"{error}\n{there.log()}\n{play.logs(site)}") from error
        play.wait_for("two there", lambda: len(engines(site, "b")) == 2)
        before = engines(site, "b")
        there.kill()
        # They go on without it: no poll says that their jobs ended.
        done = play.steps_done(site)
        play.wait_for(
            "the link is seen to be down",
            lambda: (seen := told(site)) and seen.harvest and seen.harvest.polls_fail,
        )
        play.wait_for("the run goes on", lambda: play.steps_done(site) >= done + 2)
        assert engines(site, "b") == before
        # One of them ends meanwhile: the daemon hears of it from the engine at once, of the job when the link is back.
        ended = before[0][1]
        there.cluster.cancel((ended,))
        play.wait_for("its engine left", lambda: len(engines(site, "b")) == 1)
        open_jobs = "SELECT job_id FROM jobs WHERE cluster = 'b' AND ended_at IS NULL"
        assert (ended,) in play.ask(site, open_jobs)
        there.start()
        play.wait_for("its job is seen to have ended", lambda: (ended,) not in play.ask(site, open_jobs))
        play.wait_for("another took its place", lambda: len(engines(site, "b")) == 2)
        assert before[1] in engines(site, "b"), "the other one went on"
        # The daemon is killed too, and listens elsewhere afterwards: harvester and engines find it.
        there_now = {number for _, number in engines(site, "b")}
        play.kill_daemon(site)
        site.start_daemon()
        play.wait_for("the link is back", lambda: (seen := told(site)) and seen.heard_at and seen.harvest)
        done = play.steps_done(site)
        play.wait_for("the run goes on", lambda: play.steps_done(site) >= done + 2)
        # An engine finds the daemon's new port by the harvester's file, which may be after two steps of others.
        play.wait_for(
            "its engines are back", lambda: {number for _, number in engines(site, "b")} == there_now
        )
        done = play.cut_short(site, job)
        found = play.result(site)
        assert done >= 4
        longer = play.as_long(undisturbed, found, small_model, tmp_path / "m")
        assert found.tokens == longer.tokens
        # Each intent is one job there, and each job has one intent.
        rows = play.ask(site, "SELECT intent_id, job_id FROM jobs WHERE cluster = 'b' AND job_id > 0")
        names = dict(rows)
        assert len(names) == len(rows) == len({number for _, number in rows}) == 3
        seen = [one for one in there.cluster.view().jobs if one.name.startswith("scv-")]
        assert {(one.name, one.job_id) for one in seen} == set(names.items())
        assert play.ask(site, "SELECT count(*) FROM jobs WHERE cluster = '' AND job_id > 0") == [(1,)]
        play.wait_for(
            "nothing is left",
            lambda: (
                not [
                    one
                    for one in there.cluster.view().jobs
                    if one.state in (JobState.PENDING, JobState.RUNNING)
                ]
            ),
        )
