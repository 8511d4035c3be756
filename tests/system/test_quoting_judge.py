"""A whole run whose reward function quotes answers as it fails: the trainer's log has them, the ledger's readers do not. Real processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sqlalchemy as sa

from scavenger.cluster.model import JobState
from scavenger.demo.site import DemoSite, SiteOptions
from scavenger.ledger.maintain import purge
from tests.ledger import test_roles as roles
from tests.ledger.test_privacy import naming, said
from tests.private_postgres import PrivatePostgres
from tests.system import play

pytestmark = [pytest.mark.mpi, pytest.mark.postgres, pytest.mark.long]

SECRET = "SWORDFISH"
SHARED = {"steps": 1, "harvest": False}


def played(site: DemoSite, model: Path, name: str, on_error: str) -> JobState:
    """A run of one step, from its submission to the end of its job."""
    reward = {"function": "tests.system.rewards:quotes", "retries": 0, "on_reward_error": on_error}
    run = {"name": name, "out_dir": site.dir / f"out-{name}", **SHARED}
    job_id = play.submit(site, play.write_run(site, model, run=run, reward=reward))

    def ended() -> JobState | None:
        seen = play.job(site, job_id)
        return seen.state if seen is not None and seen.state in play.ENDED and not seen.flags else None

    state: JobState = play.wait_for("the training job", ended)
    return state


def test_a_judge_s_words_stay_in_the_trainer_s_log(tmp_path: Path, small_model: Path) -> None:
    with PrivatePostgres() as postgres:
        with DemoSite(SiteOptions("local", tmp_path, poll_interval_s=0.2, ledger=postgres.url)) as site:
            assert played(site, small_model, "masks", "mask") is JobState.COMPLETED, play.logs(site)
            assert played(site, small_model, "stops", "stop") is JobState.FAILED, play.logs(site)
            states = play.ask(
                site,
                "SELECT r.name, r.state, count(*) FROM runs r JOIN samples s USING (run_id) GROUP BY 1, 2 ORDER BY 1",
            )
            logs = "\n".join(path.read_text(errors="replace") for path in tmp_path.rglob("*.log"))
        assert [row[:2] for row in states] == [("masks", "finished"), ("stops", "failed")]
        assert (
            logs.count(
                f"is masked: reward function tests.system.rewards:quotes failed 1 times: it raised ValueError: {SECRET}"
            )
            == 16
        )
        assert re.search(rf"error: sample \d+: reward function .*it raised ValueError: {SECRET}", logs), (
            "what ended the other run"
        )
        assert naming(postgres.url, "table", SECRET) == []

        ledger = roles.Site(sa.make_url(postgres.url))
        done = ledger.grant()
        assert (done.returncode, done.stderr) == (0, "")
        seen = said(ledger.url("scavenger_read"), "view")
        assert (
            "reward function tests.system.rewards:quotes failed 1 times: it raised ValueError"
            in seen["v_runs"]
        )
        assert [name for name, text in seen.items() if SECRET in text] == []
        for name in ("masks", "stops"):
            purge.purge(postgres.url, name)
        assert naming(postgres.url, "table", SECRET) == []
