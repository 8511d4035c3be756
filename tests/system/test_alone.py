"""Zero harvested workers is a normal state at any moment (I11): reserved engines wake within the step and finish it alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from scavenger.cluster.layout import demo_layout
from scavenger.cluster.local import LocalCluster
from scavenger.demo.site import Site, SiteOptions
from tests.system import play

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("how", ["killed, and their nodes are lost", "taken by others for good"])
def test_the_step_completes_when_harvested_engines_vanish_after_the_window(
    how: str, tmp_path: Path, small_model: Path, undisturbed: play.Result
) -> None:
    options = SiteOptions("local", tmp_path, demo_layout(grace_s=0.5, requeue_delay_s=0.2), observe_s=0.2, max_engines=3)
    with Site(options) as site:
        cluster = site.cluster
        assert isinstance(cluster, LocalCluster)
        # the window closes after one sample of sixteen: most of the step is then in flight at harvested engines
        run = play.write_run(
            site, small_model, run={"steps": 4}, engine={"max_batch": 4, "pace": 5.0}, reserved={"window": 0.06}
        )
        training = play.submit(site, run)
        step = play.wait_for("reserved engines asleep, harvested ones at work", lambda: _window_closed(site), 90)
        if how.startswith("killed"):
            for node in ("node1", "node2", "node3"):
                cluster.down_node(node)
        else:
            for node in ("node1", "node2", "node3"):
                site.submit_other(300, 4, node)
        play.finish(site, training)
        assert play.result(site) == undisturbed.until(4)
        woken = play.ask(
            site,
            "SELECT count(*) FROM leases l JOIN samples s ON s.sample_id = l.sample_id JOIN groups g ON g.group_id = s.group_id "
            f"JOIN workers w ON w.worker_id = l.worker_id WHERE w.kind = 'reserved' AND g.step = {step} AND l.start_len > 0",
        )
        assert woken[0][0] > 0, "no sample of the step went on at a reserved engine"


def _window_closed(site: Site) -> int:
    """The step whose reserved engine was put to sleep while harvested engines hold samples of it; 0 = none yet."""
    rows = play.ask(
        site,
        "SELECT g.step FROM leases l JOIN samples s ON s.sample_id = l.sample_id JOIN groups g ON g.group_id = s.group_id "
        "WHERE l.reason = 'reserved worker sleeps' AND g.step > (SELECT coalesce(max(step), 0) FROM steps WHERE purpose = 'train')",
    )
    return int(rows[-1][0]) if rows and play.busy(site) else 0
