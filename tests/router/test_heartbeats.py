"""A trainer that computes for long is not silent, a daemon that cannot commit is not away, and vanished peers are forgotten."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scavenger import client as clients
from scavenger.client import Client
from scavenger.errors import DaemonUnavailable
from scavenger.protocol import heartbeat, keys, messages
from scavenger.router.core.events import PeerIdentity
from scavenger.router.edge import server as servers
from tests.router.edge import LiveDaemon, Peer, ScriptedWorker, hello
from tests.router.harness import specs, started
from tests.router.test_edge import check_groups, collect, eventually, open_run, publish


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[LiveDaemon]:
    with LiveDaemon(tmp_path / "state") as live:
        yield live


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(heartbeat, "RECONNECT_AFTER_S", 0.5)
    monkeypatch.setattr(clients, "MIN_TIMEOUT_S", 0.5)


# ---------------------------------------------------------------- the core


def test_a_ping_aside_is_life_of_the_present_attempt_from_any_connection_of_its_owner() -> None:
    bench = started()
    run = bench.router.core.runs["r"]
    bench.now += 50
    assert bench.call(messages.Ping(aside=True), conn=70) == messages.Pong(1)
    assert run.trainer.seen_at == bench.now
    assert run.trainer.conn == 1
    bench.now += 50
    stranger = bench.call(messages.Ping(aside=True), conn=71, who=PeerIdentity("owner", "another-key"))
    old = bench.call(messages.Ping(aside=True), conn=70, attempt=0)
    assert [getattr(answer, "code", "") for answer in (stranger, old)] == ["not-owner", "stale"]
    assert run.trainer.seen_at == bench.now - 50
    bench.call(messages.Ping(), conn=70)
    assert len(bench.take(70, messages.HelloAgain)) == 1, "a trainer's own socket learns that it must attach"


# ---------------------------------------------------------------- over sockets


def test_a_trainer_that_makes_no_call_for_long_is_seen_all_the_while(daemon: LiveDaemon, quick: None) -> None:
    with Client.connect(daemon.state_dir) as client:
        run = open_run(client, daemon)
        publish(run, 1)

        def seen() -> tuple[float, int | None]:
            state = daemon.server.router.core.runs["r"]
            return state.trainer.seen_at, state.trainer.conn

        before, conn = seen()
        eventually(lambda: seen()[0] > before + 0.5)
        assert seen()[1] == conn
        daemon.stop()
        daemon.start()
        after = time.time()
        eventually(lambda: seen()[0] > after + 0.3)
        assert seen()[1] is None, "the second socket attaches nothing"
        run.submit(1, 1, specs(1))
        assert client.generation == 2
        (thread,) = client._alive
        assert thread.is_alive()
    assert not thread.is_alive()


def test_a_fenced_trainer_stops_saying_that_it_lives(daemon: LiveDaemon, quick: None) -> None:
    with Client.connect(daemon.state_dir) as old, Client.connect(daemon.state_dir) as new:
        open_run(old, daemon)
        open_run(new, daemon)
        eventually(lambda: not old._alive[0].is_alive())
        assert new._alive[0].is_alive()


def test_a_client_waits_for_a_daemon_that_answers_and_cannot_commit(
    daemon: LiveDaemon, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = ScriptedWorker(daemon.state_dir, daemon.worker_key("j"), "s")
    client = Client.connect(daemon.state_dir, connect_timeout_s=1.0)
    with (
        client,
        sqlite3.connect(
            daemon.state_dir / "ledger.sqlite3", isolation_level=None, check_same_thread=False
        ) as intruder,
    ):
        run = open_run(client, daemon)
        publish(run, 1)
        run.submit(1, 1, specs(2))
        worker.start()
        found = collect(run, 2)
        intruder.execute("BEGIN IMMEDIATE")  # as a full disk would: nothing is committed
        over = threading.Event()

        def go_on() -> None:
            over.set()
            intruder.execute("ROLLBACK")

        timer = threading.Timer(4.0, go_on)
        timer.start()
        run.commit(1, 1, check_groups(found), {})
        assert over.is_set(), "it waited for what was in the way"
        timer.join()
        worker.halt.set()
        worker.join(10)
    intruder.close()
    assert capsys.readouterr().out.count("answers but cannot commit") == 1


def test_a_run_is_opened_when_the_ledger_takes_it_however_late(daemon: LiveDaemon, quick: None) -> None:
    with (
        Client.connect(daemon.state_dir, connect_timeout_s=0.7) as client,
        sqlite3.connect(
            daemon.state_dir / "ledger.sqlite3", isolation_level=None, check_same_thread=False
        ) as intruder,
    ):
        intruder.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(2.5, lambda: intruder.execute("ROLLBACK"))
        timer.start()
        assert open_run(client, daemon).attempt >= 1
        timer.join()
    intruder.close()


def test_a_client_gives_up_on_a_daemon_that_is_gone(daemon: LiveDaemon, quick: None) -> None:
    with Client.connect(daemon.state_dir, connect_timeout_s=1.0) as client:
        run = open_run(client, daemon)
        daemon.stop()
        with pytest.raises(DaemonUnavailable, match="start it"):
            publish(run, 1)


def test_peers_that_vanished_are_forgotten_and_those_at_work_are_not(
    daemon: LiveDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "SWEEP_S", 0.3)
    with Client.connect(daemon.state_dir) as client, Peer(daemon.state_dir, daemon.worker_key("j")) as worker:
        run = open_run(client, daemon)
        for alive in client._alive:
            alive.stop()
        worker.say(hello("s"))
        worker.await_kind(messages.Welcome)
        with Peer(daemon.state_dir, keys.read_keypair(keys.owner_key_path(daemon.state_dir))) as passing:
            passing.say(messages.Call(1, "r", 0, messages.Ping()))
            assert isinstance(passing.hear_trainer(), messages.Reply)
        assert len(daemon.server._conns) == 4
        monkeypatch.setattr(servers, "FORGET_S", 0.0)
        eventually(lambda: len(daemon.server._conns) == 2)
        assert len(daemon.server._routes) == 2
        publish(run, 1)
        worker.await_kind(messages.UseWeights)
