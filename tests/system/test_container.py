"""Engines in containers on a real Slurm: they work, leave on notice and come back. With each runtime that is installed here."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scavenger.demo.site import DemoSite, SiteOptions
from scavenger.harvest import limits as harvest_limits
from tests.system import play

pytestmark = [pytest.mark.slurm, pytest.mark.mpi, pytest.mark.containers, pytest.mark.long]

#: A path that exists in the image only: an engine that was started outside of it has no Python.
PYTHON = Path("/engine/python")


def _image(folder: Path) -> list[Path]:
    """An image as a folder: a marker, empty places for the host's files, and the Python's name. Returns what has to be mounted."""
    for name in ("dev", "etc", "home", "mnt", "proc", "run", "sys", "tmp", "var", "var/tmp"):
        (folder / name).mkdir(parents=True)
    for name in ("hosts", "passwd", "group", "resolv.conf", "nsswitch.conf", "localtime"):
        (folder / "etc" / name).touch()
    for name in ("bin", "lib", "lib64", "sbin"):  # Debian's are links into /usr
        (folder / name).symlink_to(f"usr/{name}")
    (folder / PYTHON.parent.name).mkdir()
    (folder / str(PYTHON)[1:]).write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / str(PYTHON)[1:]).chmod(0o755)
    needed = (folder, Path(__file__), Path(sys.executable), Path(sys.executable).resolve())
    tops = sorted({Path("/usr"), *(Path("/", path.parts[1]) for path in needed)} - {Path("/tmp")})
    for top in tops:
        (folder / top.name).mkdir()
    return tops


def _charliecloud(image: Path, mounts: list[Path]) -> str:
    return " ".join(["ch-run", *(f"--bind={top}" for top in mounts), str(image), "--"])


def _apptainer(image: Path, mounts: list[Path]) -> str:
    return f"apptainer exec --userns --no-home --bind {','.join(map(str, mounts))} {image}"


@pytest.mark.parametrize(("runtime", "command"), [("ch-run", _charliecloud), ("apptainer", _apptainer)])
def test_engines_in_containers_leave_on_notice_and_come_back(
    tmp_path: Path,
    small_model: Path,
    undisturbed: play.Result,
    runtime: str,
    command: Callable[[Path, list[Path]], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("USER", raising=False)  # as for a daemon that no login has started
    if shutil.which(runtime) is None:
        pytest.skip(f"no {runtime} here")
    image = tmp_path / "image"
    container = command(image, _image(image))
    options = SiteOptions(
        "slurm",
        tmp_path / "site",
        max_engines=2,
        harvest={"container": container, "python": str(PYTHON)},
        router={"policy": "standard"},
    )
    with DemoSite(options) as site:
        run = play.write_run(
            site,
            small_model,
            run={"steps": 60},
            engine={"max_batch": 3, "pace": 3.0},
            reserved={"wake_after_s": 30.0},
        )
        training = play.submit(site, run)
        play.wait_for("two engines at work", lambda: len(play.busy(site)) == 2)
        first = play.busy(site)
        others = [site.submit_other(2.0, 4, node) for _, _, node in first]
        gone = "SELECT worker_id, notice, regenerated FROM workers WHERE left_at > 0 ORDER BY worker_id"
        play.wait_for("both to leave", lambda: len(play.ask(site, gone)) == 2)
        assert play.ask(site, gone) == [(worker, True, 0) for worker, _, _ in first]
        for other in others:
            play.finish(site, other)
        jobs = {job for _, job, _ in first}
        play.wait_for(
            "their jobs to be at work again", lambda: {job for _, job, _ in play.busy(site)} == jobs
        )
        play.wait_for("a step that they took part in", lambda: play.steps_done(site) >= 2)
        done = play.cut_short(site, training)
        harvest_limits.drain(site.state_dir, "the test", at_once=False)
        play.wait_for("our jobs to leave the queue", lambda: not play.jobs_left(site))
        found = play.result(site).until(done)
        assert found == play.as_long(undisturbed, found, small_model, tmp_path)
