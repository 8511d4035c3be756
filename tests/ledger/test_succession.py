"""A second daemon does not end the first unasked; a daemon that ended, died or fell silent is succeeded without anybody's help."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from structlog.testing import capture_logs

from scavenger import toml
from scavenger.config import DaemonConfig
from scavenger.daemon import main as daemons
from scavenger.daemon import ownership, takeover
from scavenger.daemon.takeover import SILENT_S, WATCH_S, HolderVerdict, Manner, Sign, TakeoverWatch
from scavenger.errors import Fenced, LedgerHeld
from scavenger.ledger import store
from scavenger.ledger.faults import WriterState
from scavenger.ledger.records import Heartbeat, Record
from scavenger.ledger.write.transaction import Generation
from scavenger.protocol import keys
from tests.ledger.conftest import new_database
from tests.ledger.examples import WAIT_S, witness
from tests.ledger.histories import fetch
from tests.test_daemon_start import running, site

HERE, ELSEWHERE = Sign("here", 1000.0, gone=False, here=True), Sign("there", 1000.0, gone=False, here=False)


def verdict(watch: TakeoverWatch, sign: Sign | None, now: float, monotonic: float) -> HolderVerdict:
    return watch.poll([sign] if sign is not None else [], now, monotonic)[0]


# ---------------------------------------------------------------- the decision


@pytest.mark.parametrize("manner", list(Manner))
def test_what_nobody_holds_and_what_a_dead_process_holds_is_taken_at_once(manner: Manner) -> None:
    assert verdict(TakeoverWatch(manner), None, 1000.0, 0.0) is HolderVerdict.TAKE
    assert (
        verdict(TakeoverWatch(manner), Sign("here", 1000.0, gone=True, here=True), 1000.0, 0.0)
        is HolderVerdict.TAKE
    )


def test_a_daemon_at_work_on_this_host_is_left_alone_unless_told_otherwise() -> None:
    assert verdict(TakeoverWatch(), HERE, 1000.0 + SILENT_S - 1, 0.0) is HolderVerdict.REFUSE
    assert verdict(TakeoverWatch(Manner.TAKE_OVER), HERE, 1000.0, 0.0) is HolderVerdict.TAKE
    assert verdict(TakeoverWatch(Manner.STAND_BY), HERE, 1000.0, 0.0) is HolderVerdict.WAIT
    assert verdict(TakeoverWatch(), HERE, 1000.0 + SILENT_S, 0.0) is HolderVerdict.TAKE, "it hangs"


def test_another_hosts_daemon_is_refused_for_when_its_heartbeat_is_seen_and_succeeded_when_none_comes() -> (
    None
):
    watch = TakeoverWatch()
    assert verdict(watch, ELSEWHERE, 1010.0, 0.0) is HolderVerdict.WAIT
    assert verdict(watch, Sign("there", 1005.0, gone=False, here=False), 1011.0, 1.0) is HolderVerdict.REFUSE
    watch = TakeoverWatch()
    for second in range(int(SILENT_S) - 10):
        assert verdict(watch, ELSEWHERE, 1010.0 + second, 0.0 + second) is HolderVerdict.WAIT
    assert verdict(watch, ELSEWHERE, 1000.0 + SILENT_S, SILENT_S - 10) is HolderVerdict.TAKE


def test_a_clock_that_is_wrong_makes_no_daemon_dead_or_immortal() -> None:
    behind, ahead = TakeoverWatch(), TakeoverWatch()
    assert verdict(behind, ELSEWHERE, 9000.0, 0.0) is HolderVerdict.WAIT
    assert (
        verdict(behind, Sign("there", 1005.0, gone=False, here=False), 9005.0, 5.0) is HolderVerdict.REFUSE
    ), "it lives, by a slow clock"
    assert verdict(ahead, ELSEWHERE, 10.0, 0.0) is HolderVerdict.WAIT
    assert verdict(ahead, ELSEWHERE, 10.0 + SILENT_S, SILENT_S) is HolderVerdict.TAKE, (
        "it is dead, and its clock was fast"
    )
    assert (
        verdict(behind, Sign("there", 1005.0, gone=False, here=False), 9005.0 + WATCH_S, 5.0 + WATCH_S)
        is HolderVerdict.TAKE
    )


def test_a_daemon_standing_by_waits_while_the_other_lives_and_goes_on_after_it() -> None:
    watch = TakeoverWatch(Manner.STAND_BY)
    for n in range(100):
        assert (
            verdict(watch, Sign("there", 1000.0 + n, gone=False, here=False), 1000.0 + n, float(n))
            is HolderVerdict.WAIT
        )
    assert (
        verdict(watch, Sign("there", 1099.0, gone=False, here=False), 1099.0 + SILENT_S, 99.0 + SILENT_S)
        is HolderVerdict.TAKE
    )


def test_one_of_two_holders_is_enough_to_wait_or_refuse() -> None:
    dead = Sign("dead", 0.0, gone=True, here=True)
    assert TakeoverWatch().poll([dead, HERE], 1000.0, 0.0)[0::2] == (HolderVerdict.REFUSE, HERE)
    assert TakeoverWatch(Manner.STAND_BY).poll([HERE, dead], 1000.0, 0.0)[0::2] == (HolderVerdict.WAIT, HERE)


# ---------------------------------------------------------------- who is there


def test_a_process_that_took_a_dead_daemons_number_is_not_that_daemon() -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            started = ownership.process_started(other.pid)
            assert started is not None
            assert abs(started - time.time()) < 5.0
            host = socket.gethostname()
            assert ownership.LedgerHolder(host, other.pid, started - 500.0, started - 100.0).gone
            assert not ownership.LedgerHolder(host, other.pid, started + 0.5, started + 100.0).gone
            assert not ownership.LedgerHolder("elsewhere", 2**22, 0.0).gone, "of another host nobody can tell"
        finally:
            other.kill()
    assert ownership.process_started(other.pid) is None
    assert ownership.LedgerHolder(socket.gethostname(), other.pid, started + 0.5, started + 100.0).gone
    assert ownership.LedgerHolder(socket.gethostname(), os.getpid(), 0.0, 2e9).gone, (
        "a restarted container's daemon has the number of before"
    )


# ---------------------------------------------------------------- daemons


def config_of(tmp_path: Path, url: str) -> DaemonConfig:
    keys.init_state(tmp_path / "state", "ada")
    document: dict[str, dict[str, object]] = {
        "daemon": {"state_dir": str(tmp_path / "state"), "ledger": url},
        "harvest": {"enabled": False},
    }
    (tmp_path / "scavenger.toml").write_text(toml.dumps(document))
    return DaemonConfig.model_validate(document)


RUN = """
import sys
from pathlib import Path
from scavenger.cli.main import main
from scavenger.cluster import choose

class Nobody:
    def close(self): pass

choose.backend = lambda settings: Nobody()
sys.argv = ["scavenger", "daemon", "--config", *sys.argv[1:]]
main()
"""


class Started:
    """`scavenger daemon` in a process of its own, with what it says."""

    def __init__(self, tmp_path: Path, *options: str) -> None:
        argv = [sys.executable, "-c", RUN, str(tmp_path / "scavenger.toml"), *options]
        self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self._said: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self._said.append(line)
                self._changed.notify_all()
        with self._changed:
            self._said.append("(end)")
            self._changed.notify_all()

    @property
    def said(self) -> str:
        return "".join(self._said)

    def until(self, words: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: words in self.said or "(end)" in self.said, WAIT_S), (
                self.said
            )
            assert words in self.said, self.said

    def ended(self) -> int:
        code = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        return code


@contextmanager
def started(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Starts daemons, and ends them."""
    made: list[Started] = []

    def start(*options: str) -> Started:
        made.append(Started(tmp_path, *options))
        return made[-1]

    try:
        yield start
    finally:
        for one in made:
            one.process.kill()
            one.process.wait()
            assert one.process.stderr is not None
            one._reader.join()
            one.process.stderr.close()


@pytest.mark.parametrize(
    "url", ["sqlite", pytest.param("postgres", marks=(pytest.mark.postgres, pytest.mark.long))], indirect=True
)
def test_a_second_daemon_is_refused_a_killed_one_is_succeeded_at_once_and_taking_over_is_asked_for(
    tmp_path: Path, url: str
) -> None:
    config_of(tmp_path, url)
    with started(tmp_path) as start:
        first = start()
        first.until("serving")
        second, waiting = start(), start("--standby")
        assert second.ended() == LedgerHeld.exit_code == 4, second.said
        told = rf"by the daemon with pid {first.process.pid} on host {socket.gethostname()}, there since 2\S+ \S+ UTC, last heartbeat 2"
        assert re.search(told, second.said), second.said
        for remedy in (f"kill -TERM {first.process.pid}", "--take-over", "--standby"):
            assert remedy in second.said
        assert first.process.poll() is None
        assert fetch(url, "SELECT count(*) FROM generations") == [(1,)], "it wrote nothing"

        waiting.until("standing by")
        first.process.send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        waiting.until("serving")
        assert time.monotonic() - killed_at < SILENT_S / 2, (
            "nobody waits for the heartbeat of a process that is gone"
        )
        assert "its process is gone" in waiting.said

        third = start("--take-over")
        third.until("serving")
        assert f'held_by="the daemon with pid {waiting.process.pid}' in third.said
        assert waiting.ended() == Fenced.exit_code, waiting.said
        third.process.terminate()
        assert third.ended() == 0, third.said
        assert fetch(url, "SELECT count(*) FROM generations WHERE superseded_at IS NULL") == [(0,)], (
            "it gave the ledger back"
        )


class EndedWriter:
    """As much of a server as `_announce` asks for: its writer has ended, and its report of that has not come yet."""

    async def commit(self, records: Sequence[Record]) -> None:
        raise Fenced("the ledger's writer is fenced", "stop this daemon")


def test_a_daemon_whose_first_commit_fails_is_not_announced(tmp_path: Path) -> None:
    config = config_of(tmp_path, f"sqlite:///{tmp_path}/ledger.db")
    granted = Generation.of(1, "a", "b", restored=False, began="")

    async def announce() -> None:
        daemon = daemons.Daemon(config, None)
        server: Any = EndedWriter()
        await daemon._announce(server, "key", 1, granted)

    with pytest.raises(Fenced, match="is fenced"):
        asyncio.run(announce())
    assert ownership.announced(config.daemon.state_dir).generation == 0


def test_a_fault_of_one_file_keeps_no_other_from_being_checked_and_has_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = daemons.Daemon(config_of(tmp_path, f"sqlite:///{tmp_path}/ledger.db"), None)
    checked: list[str] = []

    def fails(name: str) -> Callable[[], None]:
        def check() -> None:
            checked.append(name)
            raise OSError(name)

        return check

    monkeypatch.setattr(daemon, "_enrolment", SimpleNamespace(read=fails("owners")), raising=False)
    monkeypatch.setattr(daemon, "_defend_rendezvous", fails("rendezvous"))
    monkeypatch.setattr(daemon, "_ownership", SimpleNamespace(claim=fails("daemon.lock")), raising=False)
    with capture_logs() as logged:
        daemon._check_files()
    assert checked == ["owners", "rendezvous", "daemon.lock"]
    for name, entry in zip(checked, logged, strict=True):
        assert entry["reason"] == name
        assert name in entry["event"]


async def serve_until(config: DaemonConfig, condition: Callable[[daemons.Daemon], bool]) -> None:
    daemon = daemons.Daemon(config, None)
    serving = asyncio.create_task(daemon.run())
    async with asyncio.timeout(WAIT_S):
        while not await asyncio.to_thread(condition, daemon):
            assert not serving.done(), await serving
            await asyncio.sleep(0.02)
    daemon.stop.set()
    await serving


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with shorter times."""
    for module, name, value in (
        (takeover, "SILENT_S", 1.0),
        (takeover, "WATCH_S", 0.3),
        (daemons, "CHECK_INTERVAL_S", 0.05),
        (daemons, "BEAT_S", 0.05),
    ):
        monkeypatch.setattr(module, name, value)


def test_another_hosts_daemon_that_beats_is_left_alone_and_one_that_fell_silent_is_succeeded(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    config = config_of(tmp_path, url)
    store.upgrade(url)
    with witness(url) as other:  # a writer of host "host"
        beating = threading.Event()

        def beat() -> None:
            for ticket in range(1, 100_000):
                if beating.wait(0.05):
                    return
                other.writer.submit(ticket, [Heartbeat(time.time())])

        heart = threading.Thread(target=beat)
        heart.start()
        try:
            with pytest.raises(LedgerHeld, match="pid 1 on host host,") as refused:
                asyncio.run(serve_until(config, lambda _: False))
        finally:
            beating.set()
            heart.join()
        assert "--take-over" in refused.value.remedy
        hosts = "SELECT host FROM generations ORDER BY generation DESC"
        asyncio.run(serve_until(config, lambda _: fetch(url, hosts) == [(socket.gethostname(),), ("host",)]))
        other.writer.submit(200_000, [Heartbeat(time.time())])
        other.wait_state(WriterState.FENCED)


def test_an_idle_daemon_shows_that_it_lives(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    seen: set[float] = set()

    def beats(_: daemons.Daemon) -> bool:
        seen.update(at for (at,) in fetch(url, "SELECT committed_at FROM generations"))
        return len(seen) > 3

    config = config_of(tmp_path, url)
    store.upgrade(url)
    asyncio.run(serve_until(config, beats))


# ---------------------------------------------------------------- a database that goes away


@pytest.mark.postgres
def test_a_database_that_drops_the_connection_while_a_daemon_reads_it_at_its_start_is_asked_again(
    tmp_path: Path, postgres: sa.URL
) -> None:
    """As when PostgreSQL restarts just then: the daemon is its ledger's writer already, and must not end by itself."""
    url = new_database(postgres)
    store.upgrade(url)
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    with (
        engine.connect() as other,
        engine.connect().execution_options(isolation_level="READ COMMITTED") as locker,
    ):
        lock = locker.begin()
        locker.exec_driver_sql("LOCK TABLE samples IN ACCESS EXCLUSIVE MODE")
        with running(site(tmp_path, daemon={"ledger": url})) as daemon:
            waits = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
            until = time.monotonic() + WAIT_S
            while (reader := other.exec_driver_sql(waits).scalar()) is None:
                assert time.monotonic() < until, daemon.stderr
                time.sleep(0.05)  # between two looks at what the server is doing
            other.execute(sa.text("SELECT pg_terminate_backend(:pid)"), {"pid": reader})
            daemon.until("waiting for the ledger")
            lock.rollback()
            daemon.until("event=serving")
            daemon.process.send_signal(signal.SIGTERM)
            assert daemon.ended() == 0
    engine.dispose()
