"""A release of another wire protocol replaces the daemon while a run trains: the engines leave, and others of the new release come."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from scavenger.demo.site import DemoSite, SiteOptions
from scavenger.harvest import limits as harvest_limits
from scavenger.protocol.messages import PROTOCOL
from tests.system import play

pytestmark = [pytest.mark.slurm, pytest.mark.mpi, pytest.mark.long]


def _older_release(folder: Path) -> Path:
    """This release as another of an earlier protocol would be, installed elsewhere."""
    for name in ("scavenger", "rollout", "trainer", "scripts", "tests", "sql"):
        shutil.copytree(play.ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "data"))
    common = folder / "scavenger/protocol/messages/common.py"
    text = common.read_text()
    assert f"PROTOCOL = {PROTOCOL}" in text
    common.write_text(text.replace(f"PROTOCOL = {PROTOCOL}", f"PROTOCOL = {PROTOCOL - 1}"))
    return folder


def test_a_new_release_replaces_the_daemon_while_a_run_trains(
    tmp_path: Path, small_model: Path, undisturbed: play.Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = _older_release(tmp_path / "old")
    installed = tmp_path / "installed"  # what a site's engines start from: its release is replaced in place
    installed.symlink_to(old)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncd /\nexport PYTHONPATH={installed}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # `-m` looks here first
    monkeypatch.setenv("PYTHONPATH", str(installed))
    options = SiteOptions(
        "slurm",
        tmp_path / "site",
        max_engines=2,
        harvest={"python": str(python)},
        router={"policy": "standard"},
    )
    with DemoSite(options) as site:
        assert site.env["PYTHONPATH"] == str(installed)
        run = play.write_run(
            site,
            small_model,
            run={"steps": 60},
            engine={"max_batch": 3, "pace": 3.0},
            reserved={"wake_after_s": 30.0},
        )
        training = play.submit(site, run, env={"PYTHONPATH": str(installed), "SCAVENGER_PYTHON": str(python)})
        play.wait_for("two engines at work", lambda: len(play.busy(site)) == 2)
        first = play.busy(site)
        site.daemon.terminate()
        site.end_daemon(site.daemon)
        installed.unlink()
        installed.symlink_to(play.ROOT)
        site.start_daemon()
        play.wait_for(
            "engines of the new release at work",
            lambda: (
                len(now := play.busy(site)) == 2 and not {w for w, _, _ in now} & {w for w, _, _ in first}
            ),
        )
        left = play.ask(
            site,
            "SELECT worker_id, regenerated FROM workers WHERE left_at > 0 AND kind = 'harvested' ORDER BY worker_id",
        )
        assert left == [(worker, 0) for worker, _, _ in first], (
            "they left once, and nothing was generated again"
        )
        after = play.steps_done(site) + 2
        play.wait_for("training to go on", lambda: play.steps_done(site) >= after)
        done = play.cut_short(site, training)
        harvest_limits.drain(site.state_dir, "the test", at_once=False)
        play.wait_for("our jobs to leave the queue", lambda: not play.jobs_left(site))
        found = play.result(site).until(done)
        assert found == play.as_long(undisturbed, found, small_model, tmp_path)
        assert f"protocol {PROTOCOL - 1}: this daemon speaks {PROTOCOL}" in play.logs(site, 400), (
            "the reserved engine was started again, from what is installed now"
        )
