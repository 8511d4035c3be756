"""A trainer that is killed and started again, with `weights.spool_dir` and `weights.encrypt`: what it had published is read from disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scavenger.cluster.model import JobState
from scavenger.demo.site import Site, SiteOptions
from scavenger.ledger import reports
from scavenger.weights import manifest as manifests
from scavenger.weights import spool
from tests.system import play
from tests.system.test_faults import LAYOUT

CRASH_AT = 2


def versions(folder: Path) -> dict[int, str]:
    """Spooled versions whose bytes are their manifests': number -> root."""
    found = {}
    for number in spool.Spool(folder).versions():
        manifest, blob = spool.read(folder / f"version-{number}")
        assert manifests.hashes_of(blob, manifest.chunk_nbytes) == manifest.chunk_hashes
        assert {shard.owner for shard in manifest.shards} <= {0, 1}
        found[number] = manifest.root.hex()
    return found


@pytest.mark.mpi
@pytest.mark.long
def test_a_joiner_loads_from_the_disk_while_the_trainer_is_gone_and_the_run_goes_on(tmp_path: Path, small_model: Path) -> None:
    spool_dir = tmp_path / "spool"
    with Site(SiteOptions("local", tmp_path / "site", LAYOUT, observe_s=0.2, max_engines=1)) as site:
        run = play.write_run(site, small_model, run={"max_engines": 1}, weights={"spool_dir": spool_dir, "encrypt": True})
        training = play.submit(site, run, env={"SCAVENGER_TEST_CRASH": f"between-publish-and-commit:{CRASH_AT}"})

        def over() -> JobState | None:
            seen = play.job(site, training)
            return seen.state if seen is not None and seen.state in play.ENDED and not seen.flags else None

        assert play.wait_for("the trainer to be killed", over) is JobState.FAILED
        told = dict(play.ask(site, "SELECT version, root FROM weight_versions"))
        here = versions(spool_dir / "small")
        assert here, "what a killed trainer was writing is left out, what it had written stays"
        assert all(bytes(told[number]).hex() == root for number, root in here.items())

        # The engine that there is goes; the next one finds neither a trainer nor another engine, only the disk.
        before = {row[0] for row in play.ask(site, "SELECT worker_id FROM workers")}
        for (job_id,) in play.ask(site, "SELECT job_id FROM workers WHERE kind = 'harvested' AND left_at IS NULL"):
            site.cluster.requeue(job_id)
        joined = "SELECT subject FROM events WHERE kind = 'weights_loaded'"
        play.wait_for(
            "a joiner to load without a trainer",
            lambda: {int(subject.split()[1]) for (subject,) in play.ask(site, joined)} - before,
        )
        assert play.steps_done(site) == CRASH_AT - 1, "no trainer came meanwhile"

        play.finish(site, play.submit(site, run))
        assert play.steps_done(site) == 4
        assert versions(spool_dir / "small")
        refused = play.ask(site, "SELECT reason FROM events WHERE kind = 'serving_refused'")
        assert refused == [], "whoever loaded from the disk serves on under CURVE"
        assert reports.check(site.ledger_url) == []
        for log in (site.state_dir / "logs").glob("*"):
            for line in log.read_text(errors="replace").splitlines():
                if line.startswith("{") and "weights.clear_source" in line:
                    raise AssertionError(json.loads(line))
