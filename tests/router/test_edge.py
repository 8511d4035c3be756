"""The daemon's edge over real CURVE sockets: who gets in, what garbage does, and a client that rides out a daemon's death."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from scavenger.client import Client, Run
from scavenger.config import RunConfig
from scavenger.errors import AuthError, DaemonUnavailable, Refused, StaleAttempt
from scavenger.protocol import keys, messages
from scavenger.weights import manifest as manifests
from tests.router.edge import LiveDaemon, Peer, ScriptedWorker, hello
from tests.router.harness import SOURCE, SPEC, payload, root, specs


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[LiveDaemon]:
    with LiveDaemon(tmp_path / "state") as live:
        yield live


def config_of(state_dir: Path, **data: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {
                "name": "r",
                "steps": 3,
                "state_dir": state_dir,
                "out_dir": state_dir / "out",
                "max_engines": 4,
            },
            "model": {"path": state_dir, "context_length": 64},
            "sampling": {"max_tokens": 8},
            "data": data,
        }
    )


def open_run(client: Client, daemon: LiveDaemon, resume_step: int = 0, **data: Any) -> Run:
    """`data`: keys of the run's `[data]`."""
    config = config_of(daemon.state_dir, **data)
    return client.open_run(config, engine=SPEC, tokenizer="", resume_step=resume_step)


def publish(run: Run, version: int, step: int = 0) -> None:
    """A version whose root is the harness's: its bytes are of no interest here."""
    run.call(body := messages.PublishVersion(version, step, root(version), b"manifest", (SOURCE,)))
    run._published[version] = body


def eventually(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


# ---------------------------------------------------------------- who gets in


def test_a_key_that_was_never_allowed_does_not_get_past_the_handshake(daemon: LiveDaemon) -> None:
    with Peer(daemon.state_dir, keys.generate("r", "j")) as stranger:
        with contextlib.suppress(zmq.Again):  # refused before it could speak
            stranger.socket.send(messages.encode(hello("s")), zmq.NOBLOCK)
        assert stranger.monitor.poll(5000)
        event = parse_monitor_message(stranger.monitor.recv_multipart())
        assert event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        assert event["value"] == 400
        assert stranger.hear(0.2) is None
    assert daemon.server.router.core.workers == {}


def test_a_trainer_whose_key_is_refused_gives_up_and_says_so(daemon: LiveDaemon) -> None:
    stranger = Client(daemon.state_dir, keys.generate("owner"), connect_timeout_s=0.5)
    try:
        stranger.reconnect()
        with pytest.raises(DaemonUnavailable, match=r"no daemon for 0\.5 s: it does not accept this key"):
            open_run(stranger, daemon)
    finally:
        stranger.close()


def test_a_call_that_nobody_takes_is_not_waited_for(daemon: LiveDaemon) -> None:
    """A refused key's connection may end before the call is said. Which comes first is a race; a socket that was never connected is not."""
    with Client.connect(daemon.state_dir) as client:
        client._drop(linger_ms=0)
        client._socket = deaf = client._made(keys.read_rendezvous(daemon.state_dir))
        run = open_run(client, daemon)
        assert run.attempt == 1
        assert client._socket is not deaf, "the silence had it said again on a new connection"


def test_the_wrong_server_key_gets_no_connection_either(daemon: LiveDaemon, tmp_path: Path) -> None:
    known = keys.read_rendezvous(daemon.state_dir)
    keys.write_rendezvous(
        tmp_path / "fake", msgspec.structs.replace(known, server_key=keys.generate().public)
    )
    with Peer(tmp_path / "fake", daemon.worker_key("j")) as peer:
        peer.say(hello("s"))
        assert peer.hear(0.5) is None


def test_a_revoked_key_is_refused_on_its_live_connection_and_sent_nothing_more(daemon: LiveDaemon) -> None:
    pair = daemon.worker_key("j")
    with Client.connect(daemon.state_dir) as client, Peer(daemon.state_dir, pair) as worker:
        run = open_run(client, daemon)
        worker.say(hello("s"))
        worker.await_kind(messages.Welcome)
        daemon.keyring.revoke(pair.public)
        publish(run, 1)
        worker.say(messages.Heartbeat((), 0, -1))
        answer = worker.await_kind(messages.Rejected)
        assert isinstance(answer, messages.Rejected)
        assert "revoked" in answer.reason
        assert worker.hear(0.3) is None, "no weights, no leases"


def test_a_workers_key_cannot_act_as_a_trainer(daemon: LiveDaemon) -> None:
    with Peer(daemon.state_dir, daemon.worker_key("j")) as worker:
        worker.say(messages.Call(1, "r", 0, messages.Ping()))
        answer = worker.hear_trainer()
        assert isinstance(answer, messages.Reply)
        assert isinstance(answer.body, messages.Denied)
        assert answer.body.code == "not-owner"


def test_a_worker_cannot_join_another_run_than_its_keys(daemon: LiveDaemon) -> None:
    with (
        Client.connect(daemon.state_dir) as client,
        Peer(daemon.state_dir, daemon.worker_key("j", run="mine")) as worker,
    ):
        open_run(client, daemon)
        worker.say(hello("s"))
        answer = worker.hear()
        assert isinstance(answer, messages.Rejected)
        assert "another run" in answer.reason


# ---------------------------------------------------------------- what no peer should send


def big(nbytes: int) -> bytes:
    return messages.encode(hello("s", code_version="x" * nbytes))


@pytest.mark.parametrize(
    ("frame", "reason", "retry"),
    [
        (b"\xff\xfe garbage", "not a message of protocol", False),
        (b"", "not a message of protocol", False),
        (msgspec.msgpack.encode({"type": "NoSuchMessage"}), "not a message of protocol", False),
        (big(messages.MAX_HELLO_BYTES), "over the limit of 65,536", True),
        (messages.encode(hello("s", job_id=2**63)), "values that cannot be", False),
    ],
    ids=["garbage", "empty", "unknown", "oversized", "overflow"],
)
def test_what_no_peer_should_send_is_refused_recorded_and_survived(
    daemon: LiveDaemon, frame: bytes, reason: str, retry: bool
) -> None:
    with Client.connect(daemon.state_dir) as client, Peer(daemon.state_dir, daemon.worker_key("j")) as bad:
        run = open_run(client, daemon)
        bad.say(frame)
        answer = bad.hear()
        assert isinstance(answer, messages.Rejected)
        assert reason in answer.reason
        assert answer.retry is retry
        eventually(lambda: any(reason in str(row[0]) for row in daemon.query("SELECT reason FROM events")))
        publish(run, 1)  # the daemon goes on
        bad.say(hello("again"))
        bad.await_kind(messages.Welcome)


def test_one_key_does_not_fill_the_ledger_with_its_garbage(daemon: LiveDaemon) -> None:
    with Client.connect(daemon.state_dir) as client, Peer(daemon.state_dir, daemon.worker_key("j")) as bad:
        run = open_run(client, daemon)
        for _ in range(350):
            bad.say(b"garbage")
        eventually(lambda: daemon.server.router.core.counters.get("garbage") == 350)
        with Peer(daemon.state_dir, daemon.worker_key("k")) as other:
            other.say(b"garbage of another")
            eventually(lambda: daemon.server.router.core.counters.get("garbage") == 351)
        publish(run, 1)  # the daemon goes on, and what was written before this is durable
        rows = daemon.query(
            "SELECT subject, count(*) FROM events WHERE kind = 'garbage' GROUP BY subject ORDER BY 2"
        )
        assert [count for _, count in rows] == [1, 101]  # the first hundred and the 200th


def test_a_frame_over_the_transports_limit_costs_its_sender_the_connection_and_nobody_else(
    daemon: LiveDaemon,
) -> None:
    with Client.connect(daemon.state_dir) as client, Peer(daemon.state_dir, daemon.worker_key("j")) as bad:
        run = open_run(client, daemon)
        bad.say(b"x" * (messages.MAX_MESSAGE_BYTES + 1))
        publish(run, 1)
        assert bad.hear(0.2) is None


def test_a_call_with_numbers_that_no_ledger_holds_is_refused(daemon: LiveDaemon) -> None:
    with Client.connect(daemon.state_dir) as client:
        run = open_run(client, daemon)
        with pytest.raises(Refused, match="64 bits"):
            run.call(messages.RecordCheckpoint(2**63, 1, b"", ""))
        publish(run, 1)


def test_frames_of_another_pattern_are_ignored(daemon: LiveDaemon) -> None:
    with Client.connect(daemon.state_dir) as client, Peer(daemon.state_dir, daemon.worker_key("j")) as odd:
        odd.socket.send_multipart([b"a", b"b", b"c"])
        open_run(client, daemon)


# ---------------------------------------------------------------- the client


def collect(run: Run, groups: int, timeout_s: float = 60.0) -> list[messages.GroupDone]:
    found: list[messages.GroupDone] = []
    deadline = time.monotonic() + timeout_s
    while len(found) < groups:
        assert time.monotonic() < deadline, f"{len(found)} of {groups} groups came"
        found += run.poll(0.1)
    return found


def check_groups(found: list[messages.GroupDone]) -> list[messages.SampleOutcome]:
    """Every sample has its own tokens, and comes once."""
    ids = [s.sample_id for g in found for s in g.samples]
    assert len(ids) == len(set(ids))
    for group in found:
        for sample in group.samples:
            assert (sample.tokens, sample.logprobs, sample.raw_logprobs) == payload(sample.sample_id, 0, 8)[
                :3
            ]
    return [messages.SampleOutcome(i, "consumed", 1.0, 0.5) for i in ids]


@pytest.fixture
def fleet(daemon: LiveDaemon) -> Iterator[list[ScriptedWorker]]:
    workers = [ScriptedWorker(daemon.state_dir, daemon.worker_key(f"j{i}"), f"s{i}") for i in range(3)]
    yield workers
    for worker in workers:
        worker.halt.set()
    for worker in workers:
        if worker.ident is not None:
            worker.join(10)
        assert worker.error is None


def test_a_run_from_opening_to_close(daemon: LiveDaemon, fleet: list[ScriptedWorker]) -> None:
    with Client.connect(daemon.state_dir) as client:
        run = open_run(client, daemon)
        assert (run.attempt, run.next_version, run.last_step) == (1, 1, 0)
        publish(run, 1)
        for worker in fleet:
            worker.start()
        for step in (1, 2):
            ids = run.submit(step, 1, specs(4, 2))
            found = collect(run, 4)
            assert sorted(g.group_id for g in found) == sorted(ids)
            run.commit(step, 1, check_groups(found), {"loss": 0.5})
        with pytest.raises(Refused, match="prompt 0 has 60 tokens"):
            run.submit(3, 1, [messages.GroupSpec(0, messages.pack_tokens([1] * 60), 2, messages.Sampling(8))])
        run.close_run("finished")
    assert daemon.query("SELECT state, count(*) FROM samples GROUP BY state") == [("consumed", 16)]


@pytest.mark.parametrize("how", ["stopped", "killed", "same port"])
def test_a_daemon_restarted_in_mid_step_loses_and_repeats_nothing(
    daemon: LiveDaemon, fleet: list[ScriptedWorker], how: str
) -> None:
    with Client.connect(daemon.state_dir) as client:
        run = open_run(client, daemon)
        publish(run, 1)
        run.submit(1, 1, specs(8, 4))
        for worker in fleet:
            worker._pace = 0.05
            worker.start()
        found = collect(run, 2)
        daemon.stop() if how == "stopped" else daemon.kill()
        daemon.start(
            same_port=how == "same port"
        )  # sockets then connect again by themselves, unasked and unannounced
        found += collect(run, 8 - len(found), 30)
        run.commit(1, 1, check_groups(found), {})
        run.commit(1, 1, check_groups(found), {})
        assert client.generation == 2
    assert daemon.query("SELECT state, count(*) FROM samples GROUP BY state") == [("consumed", 32)]
    assert daemon.query("SELECT sample_id FROM sample_ends GROUP BY sample_id HAVING count(*) > 1") == []


def test_a_disk_that_stands_still_delays_everything_and_loses_nothing(
    daemon: LiveDaemon, fleet: list[ScriptedWorker]
) -> None:
    with Client.connect(daemon.state_dir) as client:
        run = open_run(client, daemon)
        publish(run, 1)
        run.submit(1, 1, specs(4, 2))
        with sqlite3.connect(daemon.state_dir / "ledger.sqlite3", isolation_level=None) as intruder:
            intruder.execute(
                "BEGIN IMMEDIATE"
            )  # the writer waits for this lock as it would for space on the disk
            for worker in fleet:
                worker.start()
            deadline = time.monotonic() + 5.5  # longer than a client waits before it connects again
            while time.monotonic() < deadline:
                assert run.poll(0.1) == []
            intruder.execute("ROLLBACK")
        intruder.close()
        run.commit(1, 1, check_groups(collect(run, 4)), {})
    assert daemon.query("SELECT state, count(*) FROM samples GROUP BY state") == [("consumed", 8)]
    assert daemon.query("SELECT count(*) FROM workers WHERE left_at IS NOT NULL") == [(0,)]


def test_an_older_trainer_is_fenced_by_a_newer_one(daemon: LiveDaemon) -> None:
    with Client.connect(daemon.state_dir) as old, Client.connect(daemon.state_dir) as new:
        first = open_run(old, daemon)
        assert open_run(new, daemon).attempt == 2
        with pytest.raises(StaleAttempt, match="attempt 1 of run 'r' was fenced"):
            publish(first, 1)


def test_a_trainer_that_computes_for_long_keeps_its_connection(
    daemon: LiveDaemon, fleet: list[ScriptedWorker]
) -> None:
    with Client.connect(daemon.state_dir) as client:
        run = open_run(client, daemon)
        publish(run, 1)
        run.submit(1, 1, specs(2, 2))
        fleet[0].start()
        eventually(lambda: daemon.query("SELECT count(*) FROM groups WHERE delivered_attempt = 1") == [(2,)])
        before, client.timeout.heard_at = client._socket, time.monotonic() - 60
        check_groups(collect(run, 2))
        assert client._socket is before


def test_a_client_without_a_daemon_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(AuthError, match="scavenger init"):
        Client.connect(tmp_path)
    keys.init_state(tmp_path, "me")
    with pytest.raises(DaemonUnavailable, match="scavenger daemon"):
        Client.connect(tmp_path)
    client = Client(tmp_path, keys.read_keypair(keys.owner_key_path(tmp_path)), connect_timeout_s=0.5)
    with pytest.raises(DaemonUnavailable, match="scavenger daemon"):
        client.reconnect()
    client.close()


def test_a_manifest_travels_to_the_workers_unchanged(daemon: LiveDaemon) -> None:
    data = memoryview(bytes(range(16)))
    made, _ = manifests.build(1, {"w": ("float32", (2, 2), data)})
    with Client.connect(daemon.state_dir) as client, Peer(daemon.state_dir, daemon.worker_key("j")) as worker:
        run = open_run(client, daemon)
        run.publish(0, made, SOURCE)
        worker.say(hello("s"))
        order = worker.await_kind(messages.UseWeights)
        assert isinstance(order, messages.UseWeights)
        assert manifests.decode(order.manifest).root == made.root
        assert order.sources == (SOURCE,)
