"""Zero harvested workers is a normal state at any moment (I11): reserved engines wake within the step and finish it alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from scavenger.cluster.layout import demo_layout
from scavenger.cluster.local.client import LocalCluster
from scavenger.demo.site import DemoSite, SiteOptions
from tests.system import play

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("how", ["killed, and their nodes are lost", "taken by others for good"])
def test_the_step_completes_when_harvested_engines_vanish_after_the_window(
    how: str, tmp_path: Path, small_model: Path, undisturbed: play.Result
) -> None:
    options = SiteOptions(
        "local", tmp_path, demo_layout(grace_s=0.5, requeue_delay_s=0.2), poll_interval_s=0.2, max_engines=2
    )
    with DemoSite(options) as site:
        cluster = site.cluster
        assert isinstance(cluster, LocalCluster)
        # the window closes as soon as a harvested engine is ready: all of the step is then in flight at harvested engines
        run = play.write_run(
            site,
            small_model,
            run={"steps": 80},
            engine={"max_batch": 8, "pace": 3.0},
            reserved={"window": 0.0},
        )
        training = play.submit(site, run)
        step = play.wait_for("reserved engines asleep, harvested ones at work", lambda: _window_closed(site))
        if how.startswith("killed"):
            for node in ("node1", "node2", "node3"):
                cluster.down_node(node)
        else:
            for node in ("node1", "node2", "node3"):
                site.submit_other(300, 4, node)
        play.wait_for("the step to be completed", lambda: play.steps_done(site) >= step)
        done = play.cut_short(site, training)
        found = play.result(site).until(done)
        assert found == play.as_long(undisturbed, found, small_model, tmp_path)
        woken = play.ask(
            site,
            "SELECT count(*) FROM leases l JOIN samples s ON s.sample_id = l.sample_id JOIN groups g ON g.group_id = s.group_id "
            f"JOIN workers w ON w.worker_id = l.worker_id WHERE w.kind = 'reserved' AND g.step = {step} AND l.start_len > 0",
        )
        assert woken[0][0] > 0, "no sample of the step went on at a reserved engine"


def _window_closed(site: DemoSite) -> int:
    """The step of which only harvested engines hold samples, two at least that have just begun; 0 = none yet."""
    held = play.ask(
        site,
        "SELECT g.step, w.kind, s.accepted_len FROM leases l JOIN samples s ON s.sample_id = l.sample_id "
        "JOIN groups g ON g.group_id = s.group_id JOIN workers w ON w.worker_id = l.worker_id "
        "WHERE l.ended_at IS NULL AND g.step > (SELECT coalesce(max(step), 0) FROM steps WHERE purpose = 'train')",
    )
    begun = [step for step, kind, length in held if kind == "harvested" and 1 <= length <= 8]
    return int(begun[0]) if len(begun) >= 2 and all(kind == "harvested" for _, kind, _ in held) else 0
