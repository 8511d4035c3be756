"""Nothing is trained beside an engine that has its memory: whole runs on a GPU that two cannot use at once (`shared_gpu`)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scavenger.cluster.layout import demo_layout
from scavenger.cluster.local.client import LocalCluster
from scavenger.demo.site import Site, SiteOptions
from tests.system import play, shared_gpu

pytestmark = pytest.mark.mpi


def environment(folder: Path, sleep: str) -> dict[str, str]:
    return {
        "SCAVENGER_PYTHON": str(shared_gpu.python(folder)),
        shared_gpu.PATH: str(folder / "gpu"),
        shared_gpu.SLEEP: sleep,
    }


def test_training_begins_when_an_engine_that_falls_asleep_slowly_has_acknowledged_it(
    tmp_path: Path, small_model: Path, undisturbed: play.Result
) -> None:
    with Site(SiteOptions("local", tmp_path, demo_layout(grace_s=1.0), poll_interval_s=0.2)) as site:
        run = play.write_run(site, small_model, run={"harvest": False, "steps": 2}, engine={"max_batch": 16})
        play.finish(site, play.submit(site, run, env=environment(tmp_path, "1.5")))
        found = play.result(site)
    said = shared_gpu.written(tmp_path / "gpu")
    assert not [line for line in said if "taken" in line], said
    assert said.count("life 0 of the engine gives the GPU back") >= 2, said
    assert [line for line in said if line == "the trainer has the GPU"], said
    assert found == undisturbed.until(2)


def test_an_engine_that_never_acknowledges_is_ended_with_the_reason_and_the_run_goes_on(
    tmp_path: Path, small_model: Path, undisturbed: play.Result
) -> None:
    """Harvested engines finish the step, which is trained once the hanging process is gone; without them, another takes its place."""
    options = SiteOptions(
        "local",
        tmp_path,
        demo_layout(grace_s=1.0),
        poll_interval_s=0.2,
        max_engines=2,
        router={"policy": "standard"},
    )
    with Site(options) as site:
        run = play.write_run(
            site,
            small_model,
            run={"steps": 80},
            engine={"max_batch": 8, "pace": 4.0},
            reserved={"window": 0.0, "sleep_timeout_s": 3.0, "wake_after_s": 1.0},
        )
        training = play.submit(site, run, env=environment(tmp_path, "never,0.0"))
        log = tmp_path / "gpu"
        play.wait_for("a step beside which it hung", lambda: play.steps_done(site) >= 1)
        cluster = site.cluster
        assert isinstance(cluster, LocalCluster)
        for node in ("node1", "node2", "node3"):
            cluster.down_node(node)
        slept = "life 1 of the engine gives the GPU back"
        play.wait_for("another engine, woken, and then asleep", lambda: slept in shared_gpu.written(log))
        step = play.steps_done(site) + 1
        play.wait_for("one step more", lambda: play.steps_done(site) >= step)
        done = play.cut_short(site, training)
        found = play.result(site).until(done)
        (ended,) = play.ask(site, "SELECT subject, reason FROM events WHERE kind = 'reserved_ended'")
        left = play.ask(site, "SELECT reason FROM workers WHERE kind = 'reserved' ORDER BY worker_id LIMIT 1")
    said = shared_gpu.written(log)
    assert not [line for line in said if "taken" in line], said
    first = said.index("the trainer has the GPU")
    assert said[:first] == ["life 0 of the engine has the GPU", "life 0 of the engine is told to sleep"], said
    assert re.fullmatch(r"no acknowledgement within 3 s of being told to sleep: 0\.[0-9a-f]{12}", ended[1]), (
        ended
    )
    assert left[0][0] == ended[1]
    assert found == play.as_long(undisturbed, found, small_model, tmp_path)
