"""The daemon and its service manager: READY, WATCHDOG, RELOADING and STOPPING on a real NOTIFY_SOCKET, and only when they are true."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from scavenger import toml
from scavenger.daemon.systemd import Notifier
from scavenger.observe import status
from scavenger.protocol import keys


class Manager:
    """The service manager's end: a datagram socket, as systemd binds one."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.heard: list[dict[str, str]] = []

    def listen(self, timeout_s: float) -> dict[str, str]:
        self.socket.settimeout(timeout_s)
        text = self.socket.recv(4096).decode()
        self.heard.append(dict(line.split("=", 1) for line in text.splitlines()))
        return self.heard[-1]

    def until(self, key: str, timeout_s: float = 90.0) -> dict[str, str]:
        deadline = time.monotonic() + timeout_s
        while True:
            message = self.listen(max(0.01, deadline - time.monotonic()))
            if key in message:
                return message


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(str(tmp_path / "notify"))
    yield made
    made.socket.close()


def configured(tmp_path: Path) -> Path:
    """A scavenger.toml for a daemon that harvests nothing: its local backend need not run."""
    keys.init_state(tmp_path / "state", "ada")
    document: dict[str, Any] = {
        "daemon": {"state_dir": tmp_path / "state"},
        "cluster": {"backend": "local", "local_dir": tmp_path / "cluster"},
        "harvest": {"enabled": False},
        "prometheus": {"listen": "127.0.0.1:0"},
    }
    path = tmp_path / "scavenger.toml"
    path.write_text(toml.dumps(document))
    return path


@contextlib.contextmanager
def daemon(
    tmp_path: Path, manager: Manager, *options: str, watchdog_s: float = 1.0
) -> Iterator[subprocess.Popen[bytes]]:
    """`scavenger daemon` as systemd starts it. It is killed at the end if it still runs."""
    config = (
        configured(tmp_path) if not (tmp_path / "scavenger.toml").exists() else tmp_path / "scavenger.toml"
    )
    env = {
        **os.environ,
        "NOTIFY_SOCKET": manager.socket.getsockname(),
        "WATCHDOG_USEC": str(int(watchdog_s * 1e6)),
        "SCAVENGER_LOG_FORMAT": "json",
    }
    with (tmp_path / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "scavenger", "daemon", "--config", str(config), *options],
            env=env,
            stdin=subprocess.DEVNULL,
            stderr=log,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)


def test_a_daemon_says_when_it_is_ready_alive_and_reloading_and_a_hung_one_says_nothing(
    tmp_path: Path, manager: Manager
) -> None:
    with daemon(tmp_path, manager) as process:
        ready = manager.until("READY")
        assert "serving at tcp://" in ready["STATUS"]
        assert not any("WATCHDOG" in message for message in manager.heard), (
            "nothing is alive before it is ready"
        )
        manager.until("WATCHDOG")
        manager.until("WATCHDOG")

        text = (tmp_path / "scavenger.toml").read_text()
        (tmp_path / "scavenger.toml").write_text(
            text.replace("enabled = false", "enabled = false\nmax_engines = 9\nquarantine_after = 7")
        )
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        process.send_signal(signal.SIGHUP)
        assert int(manager.until("RELOADING")["MONOTONIC_USEC"]) >= before
        assert "1 keys changed, 1 need a restart" in manager.until("READY")["STATUS"]

        (tmp_path / "scavenger.toml").write_text("not toml")
        process.send_signal(signal.SIGHUP)
        manager.until("RELOADING")
        assert "refused" in manager.until("READY")["STATUS"]

        seen = status.read(tmp_path / "state")
        with urllib.request.urlopen(f"http://{seen.metrics}/metrics", timeout=10) as answer:
            metrics = answer.read().decode()
        assert "scavenger_generation 1.0" in metrics
        assert "scavenger_ledger_ok 1.0" in metrics

        process.send_signal(signal.SIGSTOP)
        with contextlib.suppress(TimeoutError):  # what was under way when it stopped
            while True:
                manager.listen(0.2)
        with pytest.raises(TimeoutError):  # longer than the watchdog's patience
            manager.listen(1.2)
        process.send_signal(signal.SIGCONT)

        process.send_signal(signal.SIGTERM)
        manager.until("STOPPING")
        assert process.wait(20) == 0
    log = (tmp_path / "log").read_text()
    assert "harvest.max_engines: 4 -> 9" in log
    assert "harvest.quarantine_after: 3 -> 7" in log
    engine = sa.create_engine(f"sqlite:///{tmp_path}/state/ledger.sqlite3")
    with engine.connect() as connection:
        told = (
            connection.execute(sa.text("SELECT kind FROM events WHERE kind LIKE 'config%' ORDER BY rowid"))
            .scalars()
            .all()
        )
    engine.dispose()
    assert told == ["config_reloaded", "config_refused"]


@pytest.mark.long
def test_a_daemon_that_stands_by_asks_for_time_and_is_ready_when_it_takes_over(
    tmp_path: Path, manager: Manager
) -> None:
    first = Manager(str(tmp_path / "first"))
    with daemon(tmp_path, first) as serving:
        first.until("READY")
        with daemon(tmp_path, manager, "--standby") as stop_state:
            asked = manager.until("EXTEND_TIMEOUT_USEC")
            assert int(asked["EXTEND_TIMEOUT_USEC"]) >= 30e6, "more than it waits until it asks again"
            assert "waiting for another daemon" in asked["STATUS"]
            assert not any("READY" in message for message in manager.heard)
            serving.send_signal(signal.SIGTERM)
            manager.until("READY")
            assert stop_state.poll() is None
    first.socket.close()


def test_a_router_that_does_not_turn_is_not_called_alive(manager: Manager) -> None:
    """The event loop runs, the router's own loop does not: no ping."""
    environ = {"NOTIFY_SOCKET": manager.socket.getsockname(), "WATCHDOG_USEC": "150000"}
    turns = 0

    async def play() -> int:
        nonlocal turns
        notifier, stop = Notifier(environ, os.getpid()), asyncio.Event()
        watching = asyncio.create_task(notifier.watch(lambda: turns, stop))
        for turn in (1, 2, 3):
            turns = turn
            await asyncio.to_thread(manager.until, "WATCHDOG", 5.0)
        pings = len(manager.heard)
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(manager.listen, 0.5)
        stop.set()
        await watching
        notifier.close()
        return pings

    assert asyncio.run(play()) >= 3


def test_an_abstract_socket_is_reached_and_a_watchdog_of_another_process_is_not_ours(tmp_path: Path) -> None:
    name = f"@scavenger-test-{os.getpid()}"
    manager = Manager(name)
    notifier = Notifier({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}, os.getpid())
    notifier.ready("well\nREADY=0")
    assert manager.listen(1.0) == {"READY": "1", "STATUS": "well READY=0"}, (
        "a status cannot smuggle in a field"
    )
    assert notifier.watchdog_s == 0
    notifier.close()
    manager.socket.close()


def test_without_a_manager_nothing_is_said_and_one_that_went_away_ends_nothing(tmp_path: Path) -> None:
    Notifier({}, 1).ready("well")
    gone = Notifier({"NOTIFY_SOCKET": str(tmp_path / "nobody")}, 1)
    gone.ready("well")
    gone.close()
    gone.ready("well")
