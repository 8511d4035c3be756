"""A trainer that is killed and started again, with `weights.spool_dir` and `weights.encrypt`: what it had published is read from disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from scavenger.demo.site import DemoSite, SiteOptions
from scavenger.ledger.read import reports
from scavenger.weights import manifest as manifests
from scavenger.weights import spool
from tests.system import play
from tests.system.test_faults import LAYOUT


def versions(folder: Path) -> dict[int, str]:
    """Spooled versions whose bytes are their manifests': number -> root."""
    found = {}
    for number in spool.Spool(folder).versions():
        manifest, blob = spool.read(folder / f"version-{number}")
        assert manifests.hashes_of(blob, manifest.chunk_nbytes) == manifest.chunk_hashes
        assert {shard.owner for shard in manifest.shards} <= {0, 1}
        found[number] = manifest.root.hex()
    return found


def _newest(site: DemoSite) -> int:
    return int(play.ask(site, "SELECT COALESCE(max(version), 0) FROM weight_versions")[0][0])


def _ended(site: DemoSite, job_id: int) -> bool:
    seen = play.job(site, job_id)
    return seen is None or (seen.state in play.ENDED and not seen.flags)


@pytest.mark.mpi
@pytest.mark.long
def test_a_joiner_loads_from_the_disk_while_the_trainer_is_gone_and_the_run_goes_on(
    tmp_path: Path, small_model: Path
) -> None:
    spool_dir = tmp_path / "spool"
    with DemoSite(
        SiteOptions("local", tmp_path / "site", LAYOUT, poll_interval_s=0.2, max_engines=1)
    ) as site:
        weights, engine = {"spool_dir": spool_dir, "encrypt": True}, {"max_batch": 4, "pace": 2.0}
        run = play.write_run(site, small_model, run={"max_engines": 1}, engine=engine, weights=weights)
        training = play.submit(site, run)
        harvested = (
            "SELECT w.job_id FROM workers w JOIN leases l ON l.worker_id = w.worker_id "
            "WHERE w.kind = 'harvested' AND w.left_at IS NULL"
        )
        play.wait_for("a harvested engine to generate", lambda: play.ask(site, harvested))
        play.wait_for(
            "the version that it generates with to be on disk",
            lambda: _newest(site) in versions(spool_dir / "small"),
        )
        site.cluster.cancel((training,))
        play.wait_for("the trainer to be gone", lambda: _ended(site, training))
        newest, here, done = _newest(site), versions(spool_dir / "small"), play.steps_done(site)
        assert newest in here, (
            f"step {done} ended while the trainer was being ended: its answers were too fast for this test"
        )
        roots = dict(play.ask(site, "SELECT version, root FROM weight_versions"))
        assert all(bytes(roots[number]).hex() == root for number, root in here.items())

        # The engine that there is goes; the next one finds neither a trainer nor another engine, only the disk.
        before = {row[0] for row in play.ask(site, "SELECT worker_id FROM workers")}
        for (job_id,) in set(play.ask(site, harvested)):
            site.cluster.requeue(job_id)
        joined = "SELECT subject FROM events WHERE kind = 'weights_loaded'"
        play.wait_for(
            "a joiner to load without a trainer",
            lambda: {int(subject.split()[1]) for (subject,) in play.ask(site, joined)} - before,
        )
        assert play.steps_done(site) == done, "no trainer came meanwhile"

        quick = play.write_run(
            site, small_model, run={"max_engines": 1}, engine={"max_batch": 4, "pace": 0.0}, weights=weights
        )
        play.finish(site, play.submit(site, quick), deadline_s=400.0)
        assert play.steps_done(site) == 4
        assert versions(spool_dir / "small")
        refused = play.ask(site, "SELECT reason FROM events WHERE kind = 'serving_refused'")
        assert refused == [], "whoever loaded from the disk serves on under CURVE"
        assert reports.check(site.ledger_url) == []
