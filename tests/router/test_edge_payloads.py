"""The daemon's edge with tokens that are in the ledger only: real sockets, a real ledger, and a memory bound of nothing."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from scavenger.client import Client, Run
from scavenger.errors import LedgerError, LedgerUnavailable
from scavenger.protocol import messages
from tests.router.edge import LiveDaemon, Peer, hello
from tests.router.harness import SOURCE, chunk_of, payload, root, specs
from tests.router.test_edge import check_groups, collect, eventually, open_run, publish


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[LiveDaemon]:
    with LiveDaemon(tmp_path / "state", payload_bytes=0) as live:
        yield live
        live.readable.set()


def leased(
    daemon: LiveDaemon, run: Run, worker: Peer, session: str, prompts: int = 1
) -> list[messages.Lease]:
    """A worker that registered, loaded version 1 and holds every sample."""
    worker.say(hello(session))
    worker.await_kind(messages.UseWeights)
    worker.say(messages.WeightsLoaded(1, root(1)))
    assign = worker.await_kind(messages.Assign)
    assert isinstance(assign, messages.Assign)
    assert len(assign.leases) == prompts
    return list(assign.leases)


def flush(worker: Peer, lease: messages.Lease, offset: int, n: int, finish: str | None = None) -> None:
    worker.say(messages.Chunks((chunk_of(lease.sample_id, lease.epoch, 1, offset, n, finish),)))


def acked(worker: Peer, length: int) -> None:
    while True:
        ack = worker.await_kind(messages.Ack)
        assert isinstance(ack, messages.Ack)
        if any(held.length == length for held in ack.durable):
            return


def test_a_moved_sample_and_a_delivered_group_bring_tokens_that_were_evicted(daemon: LiveDaemon) -> None:
    first, second = daemon.worker_key("a"), daemon.worker_key("b")
    with (
        Client.connect(daemon.state_dir) as client,
        Peer(daemon.state_dir, first) as a,
        Peer(daemon.state_dir, second) as b,
    ):
        run = open_run(client, daemon)
        publish(run, 1)
        run.submit(1, 1, specs(1, 1))
        (lease,) = leased(daemon, run, a, "a")
        flush(a, lease, 0, 5)
        acked(a, 5)
        assert daemon.server.router.core.payloads.start(lease.sample_id) is None  # type: ignore[attr-defined]
        a.say(messages.Goodbye("SIGTERM", True))
        (moved,) = leased(daemon, run, b, "b")
        assert (moved.epoch, moved.accepted) == (2, payload(lease.sample_id, 0, 5)[0])
        flush(b, moved, 5, 3, "length")
        check_groups(collect(run, 1))
    assert daemon.server.pipeline.reads == 2


def test_a_resend_of_evicted_tokens_is_compared_before_it_is_believed(daemon: LiveDaemon) -> None:
    with Client.connect(daemon.state_dir) as client, Peer(daemon.state_dir, daemon.worker_key("a")) as a:
        run = open_run(client, daemon)
        publish(run, 1)
        run.submit(1, 1, specs(1, 1))
        (lease,) = leased(daemon, run, a, "a")
        flush(a, lease, 0, 4)
        acked(a, 4)
        flush(a, lease, 0, 4)
        acked(a, 4)
        assert daemon.query("SELECT count(*) FROM events WHERE kind = 'resend_differs'") == [(0,)]
        wrong = msgspec.structs.replace(
            chunk_of(lease.sample_id, 1, 1, 0, 4), tokens=messages.pack_tokens([90, 91, 92, 93])
        )
        a.say(messages.Chunks((wrong,)))
        revoke = a.await_kind(messages.Revoke)
        assert isinstance(revoke, messages.Revoke)
        assert revoke.leases == ((lease.sample_id, 1),)
        again = a.await_kind(messages.Assign)
        assert isinstance(again, messages.Assign)
        assert again.leases[0].accepted == payload(lease.sample_id, 0, 4)[0]
    assert daemon.server.pipeline.reads == 3


def test_messages_keep_their_order_while_tokens_are_read_and_others_do_not_wait(daemon: LiveDaemon) -> None:
    """A worker's flush waits for the disk: its later ones wait behind it, it is not silent, and the trainer is answered."""
    with Client.connect(daemon.state_dir) as client, Peer(daemon.state_dir, daemon.worker_key("a")) as a:
        run = open_run(client, daemon)
        publish(run, 1)
        run.submit(1, 1, specs(1, 1))
        (lease,) = leased(daemon, run, a, "a")
        flush(a, lease, 0, 4)
        acked(a, 4)
        daemon.readable.clear()
        flush(a, lease, 2, 4)  # two of these are known, and not in memory
        flush(a, lease, 6, 2, "length")
        a.say(messages.Goodbye("SIGTERM", True))
        (worker,) = daemon.server.router.core.workers.values()
        eventually(lambda: daemon.server.pipeline.waiting_bytes > 0)
        heard = worker.last_seen
        a.say(messages.Heartbeat((), 0, 1))
        eventually(lambda: worker.last_seen > heard)
        assert daemon.server.router.core.samples[lease.sample_id].accepted == 4
        publish(run, 2, 1)
        assert not any(isinstance(m, messages.GoodbyeAck) for m in [a.hear(0.2)])
        daemon.readable.set()
        a.await_kind(messages.GoodbyeAck)
        check_groups(collect(run, 1))
    assert daemon.query("SELECT start_len, n_tokens FROM chunks ORDER BY start_len") == [
        (0, 4),
        (4, 2),
        (6, 2),
    ]
    assert daemon.server.pipeline.waiting_bytes == 0


def test_a_trainer_s_messages_keep_their_order_behind_a_group_that_is_read(daemon: LiveDaemon) -> None:
    with Client.connect(daemon.state_dir) as client, Peer(daemon.state_dir, daemon.worker_key("a")) as a:
        run = open_run(client, daemon)
        publish(run, 1)
        run.submit(1, 1, specs(1, 1))
        (lease,) = leased(daemon, run, a, "a")
        daemon.read_errors = [LedgerUnavailable("the ledger is away for a moment")]
        daemon.readable.clear()
        flush(a, lease, 0, 8, "length")
        eventually(lambda: daemon.server.pipeline.reads == 1)
        client.send("r", run.attempt, messages.PublishVersion(2, 1, root(2), b"manifest", (SOURCE,)))
        eventually(lambda: daemon.query("SELECT count(*) FROM weight_versions") == [(2,)])
        while (early := client.receive(0.2)) is not None:
            assert isinstance(early, messages.Fleet), "it overtook the group"
        daemon.readable.set()
        told: list[messages.ToTrainer | None] = []
        while not told or isinstance(told[-1], messages.GroupDone):
            message = client.receive(5)
            told += [message] if not isinstance(message, messages.Fleet) else []
        assert [type(m) for m in told] == [messages.GroupDone, messages.Reply]
        assert told[0].samples[0].tokens == payload(lease.sample_id, 0, 8)[0]  # type: ignore[union-attr]
        assert daemon.read_errors == [], "it was asked again by itself"


def test_a_restart_serves_before_any_chunk_is_read_and_delivers_what_the_ledger_has(
    daemon: LiveDaemon,
) -> None:
    with Client.connect(daemon.state_dir) as client, Peer(daemon.state_dir, daemon.worker_key("a")) as a:
        run = open_run(client, daemon)
        publish(run, 1)
        run.submit(1, 1, specs(2, 1))
        leases = leased(daemon, run, a, "a", 2)
        flush(a, leases[0], 0, 8, "length")
        flush(a, leases[1], 0, 3)
        acked(a, 3)
        daemon.kill()
        daemon.readable.clear()  # no token can be read: the daemon serves all the same
        daemon.start()
        a.reconnect()
        a.say(hello("a", loaded_version=1, held=(messages.Held(leases[1].sample_id, 1, 3),)))
        a.await_kind(messages.Welcome)
        flush(a, leases[1], 3, 5, "length")
        acked(a, 8)
        daemon.readable.set()
        check_groups(collect(run, 2, 30))
    assert daemon.query("SELECT count(*) FROM leases") == [(2,)]


def test_a_ledger_that_lost_tokens_ends_the_daemon_with_the_sample_s_number(tmp_path: Path) -> None:
    daemon = LiveDaemon(tmp_path / "state", payload_bytes=0)
    daemon.may_fail = True
    daemon.start()
    try:
        with (
            Client.connect(daemon.state_dir, connect_timeout_s=1.0) as client,
            Peer(daemon.state_dir, daemon.worker_key("a")) as a,
        ):
            run = open_run(client, daemon)
            publish(run, 1)
            run.submit(1, 1, specs(1, 1))
            (lease,) = leased(daemon, run, a, "a")
            flush(a, lease, 0, 4)
            acked(a, 4)
            with closing(
                sqlite3.connect(daemon.state_dir / "ledger.sqlite3", isolation_level=None)
            ) as vandal:
                vandal.execute("DELETE FROM chunks")
            flush(a, lease, 0, 4)
            eventually(lambda: daemon.error is not None)
    finally:
        daemon.stop()
    assert isinstance(daemon.error, LedgerError)
    assert f"sample {lease.sample_id}: 0 tokens in its chunks, 4 accepted" in daemon.error.cause
