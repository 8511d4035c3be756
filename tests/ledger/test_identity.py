"""One state directory has one ledger: another one, or a fresh one, is not begun in silence."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scavenger.cli import main
from scavenger.config import DaemonConfig
from scavenger.daemon import main as daemons
from scavenger.errors import LedgerRefused
from scavenger.ledger import identity, store
from scavenger.ledger.identity import LedgerNote, compare
from scavenger.ledger.maintain import backup
from tests.ledger.examples import WAIT_S
from tests.ledger.histories import fetch
from tests.ledger.test_succession import config_of


def serve(config: DaemonConfig, *, new_ledger: bool = False) -> None:
    """A daemon that starts, serves and ends."""

    async def play() -> None:
        daemon = daemons.Daemon(config, None)
        daemon.new_ledger = new_ledger
        serving = asyncio.create_task(daemon.run())
        async with asyncio.timeout(WAIT_S):
            while not (config.daemon.state_dir / "status.json").exists() and not serving.done():
                await asyncio.sleep(0.02)
        daemon.stop.set()
        await serving

    (config.daemon.state_dir / "status.json").unlink(missing_ok=True)
    asyncio.run(play())


def renamed(config: DaemonConfig, url: str) -> DaemonConfig:
    return config.model_copy(update={"daemon": config.daemon.model_copy(update={"ledger": url})})


def test_what_is_the_same_ledger_and_what_is_not() -> None:
    note = LedgerNote("1:h:7:5.0", "/old", 0.0)
    assert compare(None, 0, "", "/new") == ""
    assert compare(None, 3, "1:h:7:5.0", "/new") == "", "a state directory of before this was written"
    assert "daemons up to generation 3" in compare(None, 3, "", "/new")
    assert compare(note, 3, "1:h:7:5.0", "/moved") == ""
    assert "was at /old" in compare(note, 3, "1:h:8:6.0", "/new")
    assert "no daemon has written in it" in compare(note, 0, "", "/new")


def test_another_ledger_and_a_fresh_one_are_refused_and_nothing_is_written(tmp_path: Path, url: str) -> None:
    config = config_of(tmp_path, url)
    serve(config)
    note = identity.read(config.daemon.state_dir)
    assert note is not None
    assert note.identity == identity.identity_of(url) != ""
    elsewhere = f"sqlite:///{tmp_path}/slipped.sqlite3"
    with pytest.raises(LedgerRefused, match="no daemon has written in it") as refused:
        serve(renamed(config, elsewhere))
    assert refused.value.exit_code == 2
    assert note.url in refused.value.cause
    assert "--new-ledger" in refused.value.remedy
    assert not (tmp_path / "slipped.sqlite3").exists()
    serve(config)
    assert fetch(url, "SELECT count(*) FROM generations") == [(2,)]


def test_a_ledger_that_is_gone_is_not_begun_anew_unless_that_is_meant(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.sqlite3"
    config = config_of(tmp_path, url)
    serve(config)
    for path in tmp_path.glob("ledger.sqlite3*"):
        path.unlink()
    with pytest.raises(LedgerRefused):
        serve(config)
    identity.path_in(config.daemon.state_dir).unlink()
    with pytest.raises(LedgerRefused, match="daemons up to generation 1"):
        serve(config)
    serve(config, new_ledger=True)
    serve(config)
    assert fetch(url, "SELECT count(*) FROM generations") == [(2,)]


def test_a_copy_elsewhere_and_a_restored_backup_are_the_same_ledger(tmp_path: Path) -> None:
    url, moved = f"sqlite:///{tmp_path}/ledger.sqlite3", f"sqlite:///{tmp_path}/moved.sqlite3"
    config = config_of(tmp_path, url)
    serve(config)
    backup.backup(url, tmp_path / "copy")
    (tmp_path / "moved.sqlite3").write_bytes((tmp_path / "copy").read_bytes())
    serve(renamed(config, moved))
    note = identity.read(config.daemon.state_dir)
    assert note is not None
    assert note.url == f"{tmp_path}/moved.sqlite3", "where it is now"


def test_who_restores_another_ledger_s_backup_means_it(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    serve(config_of(other, f"sqlite:///{other}/ledger.sqlite3"))
    backup.backup(f"sqlite:///{other}/ledger.sqlite3", tmp_path / "copy")
    url = f"sqlite:///{tmp_path}/ledger.sqlite3"
    config = config_of(tmp_path, url)
    serve(config)
    argv = ["ledger", "restore", str(tmp_path / "copy"), "--config", str(tmp_path / "scavenger.toml")]
    done = CliRunner().invoke(main.app, argv, input="y\n")
    assert done.exit_code == 0, (done.output, done.exception)
    serve(config)


def test_a_damaged_note_is_an_error_with_its_remedy(tmp_path: Path) -> None:
    config = config_of(tmp_path, f"sqlite:///{tmp_path}/ledger.sqlite3")
    identity.path_in(config.daemon.state_dir).write_text("{")
    with pytest.raises(LedgerRefused, match="is damaged"):
        serve(config)


def test_a_ledger_in_memory_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "file_system_of", lambda _: "tmpfs")
    assert "the next boot loses it" in store.volatile("sqlite:////somewhere/l.sqlite3")
    assert store.volatile("postgresql://u@h/d") == ""
    monkeypatch.setattr(store, "file_system_of", lambda _: "ext4")
    assert store.volatile("sqlite:////somewhere/l.sqlite3") == ""
