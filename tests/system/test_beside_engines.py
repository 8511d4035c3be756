"""Nothing is trained beside an engine that has its memory: whole runs on GPUs that have no room for both (`play.GPU_NBYTES`)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scavenger.cluster.layout import demo_layout
from scavenger.cluster.local.client import LocalCluster
from scavenger.demo.site import DemoSite, SiteOptions
from tests.system import faulty, play

pytestmark = pytest.mark.mpi


def test_training_begins_when_an_engine_that_falls_asleep_slowly_has_acknowledged_it(
    tmp_path: Path, small_model: Path, undisturbed: play.Result
) -> None:
    with DemoSite(SiteOptions("local", tmp_path, demo_layout(grace_s=1.0), poll_interval_s=0.2)) as site:
        run = play.write_run(site, small_model, run={"harvest": False, "steps": 2}, engine={"max_batch": 16})
        play.finish(site, play.submit(site, run, env=faulty.environment(tmp_path, sleep="1.5")))
        found = play.result(site)
        (first, *_) = metrics = play.ask(
            site, "SELECT metrics FROM steps WHERE purpose = 'train' ORDER BY step"
        )
    assert faulty.written(tmp_path).count("life 0 of the engine gives the GPU back") >= 2
    assert found == undisturbed.until(2)
    for (text,) in metrics:
        assert json.loads(text)["seconds_to_training"] >= 1.5, "as the daemon's policy learns it"
    assert json.loads(first[0])["seconds_to_generating"] > 0


def test_whoever_trains_without_waiting_for_the_acknowledgement_fails_the_run(
    tmp_path: Path, small_model: Path
) -> None:
    """The old behaviour, planted: to have told engines to sleep was enough."""
    with DemoSite(SiteOptions("local", tmp_path, demo_layout(grace_s=1.0), poll_interval_s=0.2)) as site:
        run = play.write_run(site, small_model, run={"harvest": False, "steps": 2}, engine={"max_batch": 16})
        env = faulty.environment(tmp_path, sleep="20.0", trainer="impatient")
        with pytest.raises(AssertionError, match="the training job ended as FAILED"):
            play.finish(site, play.submit(site, run, env=env))
        why = play.over_capacity(site)
        log = (site.dir / "train.log").read_text()
    assert re.search(
        r"GPU 0 has [\d,]+ bytes, of which [\d,]+ are held: rank 0 \(process \d+\) wants", why
    ), why
    assert re.search(r"  engine 0 \(process \d+\): [\d,]+ = weights [\d,]+, cache [\d,]+", why), why
    assert re.search(r"  rank 0 \(process \d+\): [\d,]+ = ", why), why
    assert "OverCapacity" in log


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
        # The trainer ends it before the daemon takes it for dead.
        daemon={"dead_s": 60.0, "reconnect_s": 70.0},
    )
    with DemoSite(options) as site:
        run = play.write_run(
            site,
            small_model,
            run={"steps": 80},
            engine={"max_batch": 8, "pace": 4.0},
            reserved={"window": 0.0, "sleep_timeout_s": 10.0, "wake_after_s": 1.0},
        )
        training = play.submit(site, run, env=faulty.environment(tmp_path, sleep="never,0.0"))
        play.wait_for("a step beside which it hung", lambda: play.steps_done(site) >= 1)
        cluster = site.cluster
        assert isinstance(cluster, LocalCluster)
        for node in ("node1", "node2", "node3"):
            cluster.down_node(node)
        slept = "life 1 of the engine gives the GPU back"
        play.wait_for("another engine, woken, and then asleep", lambda: slept in faulty.written(tmp_path))
        step = play.steps_done(site) + 1
        play.wait_for("one step more", lambda: play.steps_done(site) >= step)
        done = play.cut_short(site, training)
        found = play.result(site).until(done)
        (ended,) = play.ask(site, "SELECT subject, reason FROM events WHERE kind = 'reserved_ended'")
        left = play.ask(site, "SELECT reason FROM workers WHERE kind = 'reserved' ORDER BY worker_id LIMIT 1")
    assert faulty.written(tmp_path)[0] == "life 0 of the engine is told to sleep"
    assert re.fullmatch(
        r"no acknowledgement within 10 s of being told to sleep: 0\.[0-9a-f]{12}", ended[1]
    ), ended
    assert left[0][0] == ended[1]
    assert found == play.as_long(undisturbed, found, small_model, tmp_path)
