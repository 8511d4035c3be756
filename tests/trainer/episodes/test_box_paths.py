"""What of the host a box reads: not the folder that the job was started in, no home, no hidden folder by another name."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from scavenger.errors import ConfigError
from trainer.episodes import wire
from trainer.episodes.boxed import plan_of
from trainer.episodes.pool import ROOT, EnvironmentPool
from trainer.sandbox.box import Box, found
from trainer.sandbox.plan import Limits, Plan, mounts

SMALL = Limits(memory_mb=256, processes=24, disk_mb=8, output_mb=1, cpu_s=60, seconds=200)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home that HOME names by a link, as on many clusters, and caches of uv elsewhere."""
    real = tmp_path / "gpfs" / "u"
    (real / ".ssh").mkdir(parents=True)
    (real / ".ssh" / "id").write_text("secret")
    link = tmp_path / "home"
    link.symlink_to(real)
    for name in ("UV_CACHE_DIR", "UV_PYTHON_INSTALL_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    return link


def bound(plan: Plan) -> set[str]:
    there = {path for path in (*plan.readable, *plan.hidden) if os.path.exists(path)}
    return {
        one[-1]
        for one in mounts(plan, {path: os.path.realpath(path) for path in there})
        if one[0] == "--ro-bind"
    }


def said(plan: Plan, command: str) -> tuple[bytes, bytes]:
    async def ran() -> tuple[bytes, bytes]:
        box = Box(plan, found())
        await box.start()
        try:
            done = await box.run(["bash", "-c", command], {})
            return done.stdout, done.stderr
        finally:
            await box.stop()

    return asyncio.run(ran())


def test_a_home_among_python_s_paths_is_not_bound_though_home_is_a_link(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (home, home.resolve(), home.resolve().parent):
        monkeypatch.setattr(sys, "path", [*sys.path, str(path)])
    assert not bound(plan_of(SMALL, (), (), home)) & {str(home.resolve()), str(home.resolve().parent)}


@pytest.mark.parametrize("which", ["", "gpfs", "gpfs/u", "home"])
def test_a_home_or_what_holds_it_cannot_be_made_readable(which: str, home: Path) -> None:
    path = str(home.parent / which)
    with pytest.raises(ConfigError, match="is a home or holds one, which no box may see") as error:
        plan_of(SMALL, (path,), (), home)
    assert path in error.value.cause


def test_the_clone_that_the_trainer_is_of_is_not_bound(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job is often started in it: .env, data and runs lie beside the package."""
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    assert str(ROOT) not in bound(plan_of(SMALL, (), (), home))


def test_a_hidden_folder_among_python_s_paths_is_left_out_and_no_setting_is_blamed(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(keys)])
    assert str(keys) not in bound(plan_of(SMALL, (), (str(keys),), home))
    with pytest.raises(ConfigError, match=r"data\.sandbox_readable: .*keys is a folder of the run"):
        bound(plan_of(SMALL, (str(keys),), (str(keys),), home))


@pytest.mark.sandbox
@pytest.mark.timeout(240)
def test_what_is_hidden_cannot_be_read_by_a_link_to_the_folder_around_it(home: Path, tmp_path: Path) -> None:
    project, link = tmp_path / "disk" / "proj", tmp_path / "proj"
    (project / "out").mkdir(parents=True)
    (project / "out" / "key").write_text("secret")
    (project / "open").write_text("open")
    link.symlink_to(project)
    plan = plan_of(SMALL, (str(link),), (str(link / "out"),), home)
    out, err = said(
        plan, f"cat {link}/open {link}/out/key {project}/out/key {home}/.ssh/id {home.resolve()}/.ssh/id"
    )
    assert out == b"open"
    assert err.count(b"No such file") == 4, err


@pytest.mark.parametrize("packages", ["", os.pathsep])
def test_the_folder_that_a_job_is_started_in_is_not_among_a_worker_s_packages(
    packages: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real worker, which looks for blake3: not there, nor by an empty entry of PYTHONPATH."""
    taken = tmp_path / "taken"
    (tmp_path / "blake3.py").write_text(f"open({str(taken)!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", packages)
    setup = wire.Setup("no-env", "{}", "{}", "/model", "r", 64, "http://127.0.0.1:1", "branch", 0, 0, 60.0)
    with pytest.raises(ConfigError), EnvironmentPool(setup):
        pass
    assert not taken.exists()
