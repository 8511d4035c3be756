"""A ledger on a node's disk follows its daemon to another node, and is never forgotten for an older one."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from scavenger import carrying, keys
from scavenger.carrying import Age, Choice
from scavenger.config import DaemonConfig
from scavenger.errors import ConfigError
from scavenger.ledger import store
from scavenger.ledger.records import Event
from scavenger.ledger.writer import Writer
from tests.ledger.histories import fetch


@pytest.mark.parametrize(
    ("here", "carried", "announced", "choice"),
    [
        (Age(), Age(), 0, Choice.STAY),  # the first daemon of all
        (Age(3, 9), Age(), 3, Choice.STAY),  # it died here and comes back here
        (Age(3, 9), Age(3, 9), 3, Choice.STAY),  # it left well and comes back here
        (Age(), Age(3, 9), 3, Choice.TAKE),  # it left well and comes back elsewhere
        (Age(1, 4), Age(3, 9), 3, Choice.TAKE),  # back where it was long ago
        (Age(3, 8), Age(3, 9), 3, Choice.TAKE),
        (Age(4, 0), Age(3, 9), 3, Choice.STAY),  # restored here: another history begins beyond
        (Age(), Age(3, 9), 4, Choice.REFUSE),  # the fourth died elsewhere without a copy
        (Age(1, 4), Age(), 4, Choice.REFUSE),
        (Age(), Age(), 1, Choice.REFUSE),
    ],
)
def test_which_ledger_a_daemon_begins_with(here: Age, carried: Age, announced: int, choice: Choice) -> None:
    assert carrying.choose(here, carried, announced) is choice


def site(tmp_path: Path, node: str) -> DaemonConfig:
    """The same shared state directory, with the ledger on a disk of this node."""
    ledger = f"sqlite:///{tmp_path / node / 'ledger.sqlite3'}"
    return DaemonConfig.model_validate({"daemon": {"state_dir": tmp_path / "state", "ledger": ledger}})


def lives(config: DaemonConfig, word: str) -> int:
    """A daemon's life: takes the ledger up, writes one event, announces itself, and ends."""
    carrying.take_up(config)
    store.upgrade(config.ledger_url)
    writer = Writer(config.ledger_url, "host", os.getpid(), "v", lambda: 1.0)
    generation = int(writer.start())
    writer.submit(1, [Event("word", 0, "", word, "{}", 1.0)])
    assert writer.close()
    rendezvous = keys.Rendezvous("tcp://h:1", "K" * 40, generation, os.getpid(), socket.gethostname(), "")
    keys.write_rendezvous(config.daemon.state_dir, rendezvous)
    return generation


def words(config: DaemonConfig) -> list[str]:
    return [row[0] for row in fetch(config.ledger_url, "SELECT reason FROM events WHERE kind = 'word' ORDER BY id")]


def test_a_daemon_goes_on_elsewhere_with_all_that_it_wrote(tmp_path: Path) -> None:
    keys.init_state(tmp_path / "state", "ada")
    a, b = site(tmp_path, "a"), site(tmp_path, "b")
    assert lives(a, "first") == 1
    carrying.put_down(a)
    assert (carrying.path_in(tmp_path / "state").stat().st_mode & 0o077) == 0, "it holds prompts and answers"
    assert lives(b, "second") == 2
    carrying.put_down(b)
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
    assert carrying.take_up(config) is Choice.STAY
    carrying.put_down(config)
    assert list(tmp_path.iterdir()) == []
