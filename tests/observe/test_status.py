"""What the daemon says of itself, and what a reader makes of it."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from scavenger import daemon, keys, toml
from scavenger.cli import app
from scavenger.config import DaemonConfig
from scavenger.errors import DaemonUnavailable
from scavenger.observe import status
from scavenger.observe.status import Status

SEEN = Status(
    1000.0, 3, "login1", 77, 100.0, "OK", "", 12, 2**20, 3 * 2**20, 4, 5, 6 * 2**20, 512 * 2**20, 7, 8
)  # fmt: skip


async def until_written(state_dir: Path) -> Status:
    async with asyncio.timeout(20):
        while not status.path(state_dir).exists():
            await asyncio.sleep(0.01)
    return status.read(state_dir)


def test_figures_are_in_a_private_file_and_now_and_then_in_the_log(tmp_path: Path) -> None:
    looks: list[Status] = []

    def look() -> Status:
        looks.append(msgspec.structs.replace(SEEN, backlog_records=len(looks)))
        if len(looks) == 4:
            stop.set()
        return looks[-1]

    stop = asyncio.Event()
    with capture_logs() as told:
        asyncio.run(status.tell(tmp_path, look, stop, write_s=0.001, log_s=0.0))
    assert status.read(tmp_path) == looks[-1]
    assert stat.S_IMODE(status.path(tmp_path).stat().st_mode) == 0o600
    assert [entry["backlog_records"] for entry in told if entry["event"] == "status"] == [0, 1, 2, 3]
    assert {"wal_bytes", "wal_written_back", "wal_blocked", "payload_evictions", "payload_reads", "ledger_state"} <= told[0].keys()


def test_a_file_that_cannot_be_written_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = asyncio.Event()
    tries = 0

    def full(path: Path, data: bytes) -> None:
        nonlocal tries
        tries += 1
        if tries == 2:
            stop.set()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(keys, "write_private", full)
    with capture_logs() as told:
        asyncio.run(status.tell(tmp_path, lambda: SEEN, stop, write_s=0.001))
    assert tries == 2
    assert all("No space left" in entry["reason"] for entry in told)


def test_the_terminal_sees_the_figures_and_how_old_they_are() -> None:
    text = "\n".join(status.lines(SEEN, 1001.0))
    for said in ("generation 3, pid 77 on login1", "12 records (1.0 MiB) not durable", "3.0 MiB (SQLite's)", "written back 4 times"):
        assert said in text
    for said in ("prevented by a reader 5 times", "6.0 MiB of 512.0 MiB", "7 samples evicted", "8 reads back"):
        assert said in text
    assert "old" not in text
    assert "these figures are 500 s old: it stopped, or hangs" in "\n".join(status.lines(SEEN, 1500.0))
    ill = msgspec.structs.replace(SEEN, ledger_state="DISK_FULL", ledger_reason="database or disk is full")
    assert "DISK_FULL (database or disk is full)" in "\n".join(status.lines(ill, 1001.0))


def test_without_a_daemon_the_remedy_is_named(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnavailable, match="scavenger daemon"):
        status.read(tmp_path)
    status.path(tmp_path).write_text('{"at": 1}')
    with pytest.raises(DaemonUnavailable, match="cannot be read"):
        status.read(tmp_path)


def test_a_daemon_at_work_tells_of_its_ledger(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    keys.init_state(state_dir, "ada")
    document = {"daemon": {"state_dir": str(state_dir)}, "harvest": {"enabled": False}}
    config = tmp_path / "scavenger.toml"
    config.write_text(toml.dumps(document))

    async def play() -> Status:
        served = daemon.Daemon(DaemonConfig.model_validate(document), None)
        running = asyncio.create_task(served.run())
        try:
            return await until_written(state_dir)
        finally:
            served.stop.set()
            await running

    told = asyncio.run(play())
    assert (told.generation, told.ledger_state, told.payload_bound_bytes) == (1, "OK", 512 * 2**20)
    assert told.started_at <= told.at
    said = CliRunner().invoke(app, ["status", "--config", str(config)])
    assert said.exit_code == 0
    assert "generation 1" in said.output
