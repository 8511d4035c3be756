"""An engine of one run generates samples of another in one batch, and is killed at it: each run's result is the one that it has alone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from scavenger import toml
from scavenger.cluster.layout import demo_layout
from scavenger.demo.site import DemoSite, SiteOptions
from scavenger.ledger.read import reports
from scavenger.protocol import keys
from tests.system import play

pytest.importorskip("peft", reason="the adapters need the [lora] extra")
pytestmark = [pytest.mark.mpi, pytest.mark.long]

DEADLINE_S = 4 * play.DEADLINE_S
#: Each run by its seed. Hers has few samples, so that its engine has slots to spare; his has more than his reserved engine takes.
SEEDS = {"hers": 7, "his": 8}
DATA = {"hers": {"prompts_per_step": 2, "samples_per_prompt": 2}, "his": {}}
LORA = {"rank": 2, "alpha": 4.0, "serve": "unmerged"}
#: Of a borrower's worker.
BORROWS = "w.intent_id LIKE 'guest-lent-scv-%'"


def site_in(folder: Path) -> DemoSite:
    layout = demo_layout(grace_s=1.0, requeue_delay_s=0.5)
    return DemoSite(
        SiteOptions("local", folder, layout, poll_interval_s=0.3, max_engines=1, harvest={"lend_slots": 4})
    )


def submitted(site: DemoSite, model: Path, name: str, key: Path | None) -> int:
    run: dict[str, object] = {
        "name": name,
        "seed": SEEDS[name],
        "steps": 1000,
        "max_engines": 1,
        "share_engines": True,
    }
    run |= {"key": key} if key is not None else {}
    document = play.run_document(
        site.state_dir,
        site.dir / f"out-{name}",
        model,
        run=run,
        data=DATA[name],
        engine={"max_batch": 8, "pace": 6.0},
        lora=LORA,
        reserved={"window": 0.1},
    )
    path = site.dir / f"{name}.toml"
    path.write_text(toml.dumps(document))
    return play.submit(site, path, 1)


def alone(model: Path, folder: Path, name: str, steps: int) -> play.Result:
    """The run by one reserved engine, with nobody beside it."""
    options = SiteOptions("local", folder, demo_layout(grace_s=1.0), poll_interval_s=0.3)
    with DemoSite(options) as site:
        run = {"seed": SEEDS[name], "steps": steps, "harvest": False}
        run_toml = play.write_run(site, model, run=run, data=DATA[name], engine={"max_batch": 16}, lora=LORA)
        play.finish(site, play.submit(site, run_toml, 1), DEADLINE_S)
        return play.result(site)


def borrowed(site: DemoSite, more_than: int = 0) -> int:
    """Samples of his that were trained, and of which a borrower generated tokens; 0 until there are more."""
    ((count,),) = play.ask(
        site,
        "SELECT count(DISTINCT s.sample_id) FROM workers w JOIN chunks c ON c.worker_id = w.worker_id "
        f"JOIN samples s ON s.sample_id = c.sample_id WHERE s.state = 'consumed' AND {BORROWS}",
    )
    return int(count) if count > more_than else 0


def borrowing(site: DemoSite) -> list[tuple[int]]:
    """Jobs in whose engine a borrower has a sample with tokens and without an end."""
    return play.ask(
        site,
        "SELECT DISTINCT w.job_id FROM workers w JOIN leases l ON l.worker_id = w.worker_id AND l.ended_at IS NULL "
        f"JOIN samples s ON s.sample_id = l.sample_id WHERE w.left_at IS NULL AND s.accepted_len > l.start_len AND {BORROWS}",
    )


def crossed(site: DemoSite) -> int:
    """Chunks that a worker of one run made for a sample of the other."""
    ((count,),) = play.ask(
        site,
        "SELECT count(*) FROM chunks c JOIN workers w ON w.worker_id = c.worker_id JOIN samples s ON s.sample_id = c.sample_id "
        "JOIN groups g ON g.group_id = s.group_id WHERE w.run_id <> g.run_id",
    )
    return int(count)


@pytest.mark.timeout(3600)
def test_samples_of_two_runs_in_one_engine_and_its_death_in_between(
    tmp_path: Path, small_model: Path
) -> None:
    with site_in(tmp_path / "site") as site:
        pair = keys.generate()
        his_key = site.dir / "his.key"
        keys.write_keypair(his_key, pair)
        keys.enroll(site.state_dir, "bob", pair.public)
        jobs = [submitted(site, small_model, "hers", None)]
        play.wait_for("her engine", lambda: play.workers(site), DEADLINE_S)
        jobs.append(submitted(site, small_model, "his", his_key))
        before = play.wait_for("samples of his from her engine", lambda: borrowed(site), DEADLINE_S)
        ((job,),) = play.wait_for("a borrower at work", lambda: borrowing(site), DEADLINE_S)
        os.kill(play.engine_pid(site, job), signal.SIGKILL)
        play.wait_for("samples of his from her next engine", lambda: borrowed(site, before + 16), DEADLINE_S)
        for job in jobs:
            play.cut_short(site, job)
        assert play.over_capacity(site) == ""
        assert reports.check(site.ledger_url) == []
        assert crossed(site) == 0
        lent = play.ask(site, "SELECT reason FROM decisions WHERE code = 'lent' AND action = 'lend_slots'")
        assert len(lent) >= 2
        assert all("of an engine of run hers are lent to run his" in reason for (reason,) in lent)
        found = {name: play.result_of(site.ledger_url, name) for name in SEEDS}
    for name, result in found.items():
        steps = max(result.steps)
        assert result.until(steps) == alone(small_model, tmp_path / name, name, steps)
