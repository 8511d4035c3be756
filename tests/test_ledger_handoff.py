"""A ledger on a node's disk follows its daemon to another node, and is never forgotten for an older one."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from scavenger.cli import main
from scavenger.config import DaemonConfig
from scavenger.daemon import ledger_handoff
from scavenger.daemon import main as daemon
from scavenger.daemon.ledger_handoff import Age, HandoffChoice
from scavenger.daemon.takeover import Manner
from scavenger.errors import ConfigError, LedgerError
from scavenger.ledger import store
from scavenger.ledger.records import Event
from scavenger.ledger.write.writer import Writer
from scavenger.protocol import keys
from tests.ledger.histories import fetch


@pytest.mark.parametrize(
    ("here", "carried", "announced", "choice"),
    [
        (Age(), Age(), 0, HandoffChoice.STAY),  # the first daemon of all
        (Age(3, 9), Age(), 3, HandoffChoice.STAY),  # it died here and comes back here
        (Age(3, 9), Age(3, 9), 3, HandoffChoice.STAY),  # it left well and comes back here
        (Age(), Age(3, 9), 3, HandoffChoice.TAKE),  # it left well and comes back elsewhere
        (Age(1, 4), Age(3, 9), 3, HandoffChoice.TAKE),  # back where it was long ago
        (Age(3, 8), Age(3, 9), 3, HandoffChoice.TAKE),
        (Age(4, 0), Age(3, 9), 3, HandoffChoice.STAY),  # restored here: another history begins beyond
        (Age(), Age(3, 9), 4, HandoffChoice.REFUSE),  # the fourth died elsewhere without a copy
        (Age(1, 4), Age(), 4, HandoffChoice.REFUSE),
        (Age(), Age(), 1, HandoffChoice.REFUSE),
    ],
)
def test_which_ledger_a_daemon_begins_with(
    here: Age, carried: Age, announced: int, choice: HandoffChoice
) -> None:
    assert ledger_handoff.choose(here, carried, announced) is choice


def site(tmp_path: Path, node: str) -> DaemonConfig:
    """The same shared state directory, with the ledger on a disk of this node."""
    ledger = f"sqlite:///{tmp_path / node / 'ledger.sqlite3'}"
    return DaemonConfig.model_validate({"daemon": {"state_dir": tmp_path / "state", "ledger": ledger}})


def lives(config: DaemonConfig, word: str) -> int:
    """A daemon's life: takes the ledger up, writes one event, announces itself, and ends."""
    ledger_handoff.take_up(config)
    store.upgrade(config.ledger_url)
    writer = Writer(config.ledger_url, "host", os.getpid(), "v", lambda: 1.0)
    generation = int(writer.start())
    writer.submit(1, [Event("word", 0, "", word, "{}", 1.0)])
    assert writer.close()
    rendezvous = keys.Rendezvous("tcp://h:1", "K" * 40, generation, os.getpid(), socket.gethostname(), "")
    keys.write_rendezvous(config.daemon.state_dir, rendezvous)
    return generation


def words(config: DaemonConfig) -> list[str]:
    return [
        row[0]
        for row in fetch(config.ledger_url, "SELECT reason FROM events WHERE kind = 'word' ORDER BY id")
    ]


def test_a_daemon_goes_on_elsewhere_with_all_that_it_wrote(tmp_path: Path) -> None:
    keys.init_state(tmp_path / "state", "ada")
    a, b = site(tmp_path, "a"), site(tmp_path, "b")
    assert lives(a, "first") == 1
    ledger_handoff.put_down(a, 1)
    assert (ledger_handoff.path_in(tmp_path / "state").stat().st_mode & 0o077) == 0, (
        "it holds prompts and completions"
    )
    assert lives(b, "second") == 2
    ledger_handoff.put_down(b, 2)
    assert lives(a, "third") == 3
    assert words(a) == ["first", "second", "third"]
    assert len(list((tmp_path / "a").glob("ledger.sqlite3.older-*"))) >= 1, "what was there is kept"


def test_a_daemon_that_died_elsewhere_without_a_copy_is_not_forgotten(tmp_path: Path) -> None:
    keys.init_state(tmp_path / "state", "ada")
    a, b = site(tmp_path, "a"), site(tmp_path, "b")
    lives(a, "first")
    with pytest.raises(ConfigError, match=rf"of generation 1, is on host {socket.gethostname()}"):
        lives(b, "second")
    assert not (tmp_path / "b").exists(), "nothing was begun"
    assert lives(a, "second") == 2, "on its own node it goes on"


def test_a_ledger_in_postgresql_is_not_carried(tmp_path: Path) -> None:
    config = DaemonConfig.model_validate({"daemon": {"state_dir": tmp_path, "ledger": "postgresql://u@db/x"}})
    assert ledger_handoff.take_up(config) is HandoffChoice.STAY
    ledger_handoff.put_down(config, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_copy_in_which_a_successor_has_begun_is_not_installed(tmp_path: Path) -> None:
    keys.init_state(tmp_path / "state", "ada")
    a = site(tmp_path, "a")
    lives(a, "first")
    ledger_handoff.put_down(a, 1)
    good = ledger_handoff.path_in(tmp_path / "state").read_bytes()
    assert lives(a, "second") == 2
    assert lives(a, "third") == 3, "between the second's end and its copy"
    with pytest.raises(LedgerError, match="it is of generation 3 by now, and the daemon that ended was 2"):
        ledger_handoff.put_down(a, 2)
    assert ledger_handoff.path_in(tmp_path / "state").read_bytes() == good
    assert [path.name for path in (tmp_path / "state").iterdir() if "carried" in path.name] == [
        ledger_handoff.FILE
    ], "nothing half made is left"


def test_a_daemon_says_which_generation_it_was_and_none_when_it_never_had_the_ledger(tmp_path: Path) -> None:
    keys.init_state(tmp_path, "ada")
    config = DaemonConfig.model_validate({"daemon": {"state_dir": tmp_path}, "harvest": {"enabled": False}})

    async def life() -> int | None:
        one = daemon.Daemon(config, None)
        serving = asyncio.create_task(one.run())
        while not (tmp_path / "rendezvous.json").exists() and not serving.done():
            await asyncio.sleep(0.01)
        one.stop.set()
        return await serving

    async def told_to_stop_while_it_waits() -> int | None:
        one = daemon.Daemon(config, None, Manner.STAND_BY)
        one.stop.set()
        return await one.run()

    assert asyncio.run(told_to_stop_while_it_waits()) is None
    assert asyncio.run(life()) == 1


@pytest.mark.parametrize(("granted", "put"), [(None, []), (7, [7])])
def test_only_who_had_the_ledger_puts_it_down(
    granted: int | None, put: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.init_state(tmp_path / "state", "ada")
    (tmp_path / "local").mkdir()
    path = tmp_path / "scavenger.toml"
    path.write_text(
        f'[daemon]\nstate_dir = "{tmp_path / "state"}"\n[harvest]\nenabled = false\n[cluster]\nbackend = "local"\n'
        f'local_dir = "{tmp_path / "local"}"\n'
    )

    class Cluster:
        def close(self) -> None:
            """Nothing is open."""

    def run(*args: Any, **more: Any) -> int | None:
        return granted

    seen: list[int] = []
    monkeypatch.setattr("scavenger.cluster.choose.backend", lambda settings: Cluster())
    monkeypatch.setattr("scavenger.cluster.choose.preflight", lambda settings, cluster: None)
    monkeypatch.setattr(daemon, "run", run)
    monkeypatch.setattr(ledger_handoff, "put_down", lambda settings, generation: seen.append(generation))
    done = CliRunner().invoke(main.app, ["daemon", "--config", str(path), "--carry"])
    assert (done.exit_code, done.exception) == (0, None)
    assert seen == put


def test_what_is_taken_up_is_never_readable_by_others_nor_written_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.init_state(tmp_path / "state", "ada")
    a, b = site(tmp_path, "a"), site(tmp_path, "b")
    lives(a, "first")
    ledger_handoff.put_down(a, 1)
    (tmp_path / "b").mkdir()
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    (tmp_path / "b" / ".ledger.sqlite3.partial").symlink_to(theirs)
    modes: list[int] = []
    copy = shutil.copyfileobj

    def watched(source: Any, target: Any, length: int = 0) -> None:
        modes.append(os.fstat(target.fileno()).st_mode & 0o777)
        copy(source, target, length)

    monkeypatch.setattr(shutil, "copyfileobj", watched)
    before = os.umask(0)
    try:
        assert ledger_handoff.take_up(b) is HandoffChoice.TAKE
    finally:
        os.umask(before)
    assert modes == [0o600]
    assert theirs.read_text() == "theirs"
    assert words(b) == ["first"]


def test_the_daemon_s_job_makes_its_files_for_its_user_alone(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\numask\nexit 2\n")  # 2: the job does not try again
    srun.chmod(0o755)
    script = Path(__file__).resolve().parents[1] / "scripts/scavenger.sbatch"
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1"}
    done = subprocess.run(
        ["bash", script, "scavenger.toml"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (2, "0077")
