"""The link to a further cluster: who may link, what crosses it, what becomes of a request when it breaks, and what bounds it there."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import secrets
import socket
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from scavenger.cluster import job_logs
from scavenger.cluster.local.client import LocalServer
from scavenger.cluster.model import ClusterView, Job, JobState, Node, Partition, PreemptMode
from scavenger.cluster.port import Cluster, OneThread
from scavenger.cluster.proxy import messages as proxy
from scavenger.config import ClusterSection, DaemonConfig, DaemonSection, HarvestSection
from scavenger.daemon import clusters
from scavenger.daemon.enrolment import Enrolment
from scavenger.errors import (
    AuthError,
    ClusterError,
    ClusterUnavailable,
    ConfigError,
    DaemonUnavailable,
    SubmitUnknown,
)
from scavenger.harvest import limits
from scavenger.harvest.decide.actions import HarvestCode, Submit
from scavenger.harvest.execute.edges import LedgerWrites, RouterLink
from scavenger.harvest.further import link, plausible, process
from scavenger.harvest.further import messages as wire
from scavenger.harvest.further.link import ClusterLink, LinkedCluster, LinkLine
from scavenger.harvest.track.node_health import Health, HealthRules
from scavenger.ledger import records as rec
from scavenger.policy.fleet_size import Demand, without
from scavenger.protocol import keys
from scavenger.router.core.events import IntentRevoked, WorkerLife
from scavenger.router.edge.keyring import KeyRing
from tests.clusters import wait_for
from tests.harvest.world import FAST, SLEEPS, World, layout, running, spec, until

UID = "feedbeef"
#: JSON, or none, that is not of the type that a file should have.
WRONG_JSON = [
    b"null",
    b"[]",
    b"{}",
    b"",
    b"\xff",
    b'{"user": "\xff"}',
    b'{"user":' * 100_000,
    b'{"user": 1e999}',
]
ENGINE = Submit(1, "run", "scavenge", 1, "one is useful")


@dataclass
class Ends:
    """The daemon's end, bound, and a key that it takes."""

    link: ClusterLink
    server: keys.KeyPair
    pair: keys.KeyPair
    port: int

    @property
    def where(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"


@contextmanager
def linked(silent_s: float = 5.0) -> Iterator[Ends]:
    server, pair = keys.generate(), keys.generate()
    made = ClusterLink(server, silent_s=silent_s)
    made.admit({pair.public: "b"})
    try:
        port = made.bind("127.0.0.1", 0)
        made.announce(keys.Rendezvous("tcp://127.0.0.1:1", server.public, 3, 1, "here"))
        yield Ends(made, server, pair, port)
    finally:
        made.close()


class Scripted:
    """A harvester that says what a test has it say."""

    def __init__(self, ends: Ends, pair: keys.KeyPair | None = None) -> None:
        self.context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self.context.socket(zmq.DEALER)
        keys.secure(self.socket, ends.server.public, pair or ends.pair)
        self.monitor = self.socket.get_monitor_socket()
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(ends.where)

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close(linger=0)
        self.context.term()

    def say(self, message: msgspec.Struct) -> None:
        self.socket.send(msgspec.msgpack.encode(message))

    def answer(self, asked: wire.Ask, reply: Any, counts: Any = None) -> None:
        self.answer_bytes(asked, wire.packed(proxy.ProxyAnswer(reply, counts or {})))

    def answer_bytes(self, asked: wire.Ask, compressed: bytes) -> None:
        """Of one piece."""
        self.say(wire.AnswerPiece(asked.session, asked.number, 0, len(compressed), compressed))

    def ready(self, number: int, done: int = 0, session: str = "a" * 16, **more: Any) -> None:
        self.say(wire.Ready(session, number, done, **{"cluster": "b", "user": "u", "limits": b"{}", **more}))

    def hears(self, kind: type[Any]) -> Any:
        """The next message of this kind."""
        while self.socket.poll(10_000):
            message = wire.from_daemon.decode(self.socket.recv())
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} came")

    def event(self, wanted: int) -> None:
        while self.monitor.poll(10_000):
            if recv_monitor_message(self.monitor)["event"] == wanted:
                return
        raise AssertionError(f"the socket saw no event {wanted}")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def asks(pool: ThreadPoolExecutor, ends: Ends, timeout_s: float = 20.0) -> Future[int]:
    cluster = LinkedCluster(LinkLine(ends.link, "b", timeout_s))
    return pool.submit(cluster.submit_engine, UID, "scv-1", ENGINE)


def is_heard(ends: Ends) -> bool:
    return ends.link.ready("b")[0] is not None


# ---------------------------------------------------------------- who may link


def test_a_key_that_was_not_given_never_gets_through_the_handshake() -> None:
    with linked() as ends, Scripted(ends, keys.generate()) as stranger:
        stranger.ready(1)
        stranger.event(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        assert not is_heard(ends)


def test_a_revoked_key_says_nothing_any_more_over_a_link_that_is_up() -> None:
    with linked() as ends, Scripted(ends) as there:
        there.ready(1)
        assert there.hears(wire.Noted).rendezvous.generation == 3
        ends.link.admit({})
        there.ready(2)
        assert "revoked" in there.hears(wire.Refused).reason
        ready, _ = ends.link.ready("b")
        assert ready is not None
        assert ready.number == 1


def test_a_revoked_key_is_asked_nothing_any_more(pool: ThreadPoolExecutor) -> None:
    """What is asked of it next may be to take an engine's key."""
    with linked() as ends, Scripted(ends) as there:
        there.ready(1)
        there.hears(wire.Noted)
        sent = asks(pool, ends)
        there.hears(wire.Ask)
        waits = asks(pool, ends)
        wait_for("the other one waits", lambda: len(ends.link._peers["b"].waiting) == 1)
        ends.link.admit({})
        with pytest.raises(SubmitUnknown, match="key of its harvester was removed"):
            sent.result(20)
        for one in (waits, asks(pool, ends)):
            with pytest.raises(ClusterError, match="was removed") as never:
                one.result(20)
            assert not isinstance(never.value, SubmitUnknown)


def test_a_key_of_one_cluster_is_not_taken_for_another_s() -> None:
    with linked() as ends, Scripted(ends) as there:
        there.ready(1, cluster="c")
        assert "of cluster b, and not of c" in there.hears(wire.Refused).reason
        assert not is_heard(ends)


def test_a_cluster_s_key_is_made_listed_renewed_and_revoked(tmp_path: Path) -> None:
    state = tmp_path / "state"
    keys.init_state(state, "ada")
    said: list[Any] = []
    enrolment = Enrolment(state, "s" * 40, KeyRing(), said.extend, time.time, {})
    first = keys.admit_cluster(state, "b", tmp_path / "b.key")
    assert keys.read_keypair(tmp_path / "b.key") == first
    with pytest.raises(AuthError, match="exists"):
        keys.admit_cluster(state, "b", tmp_path / "b.key")
    with pytest.raises(AuthError, match="cannot name a cluster"):
        keys.admit_cluster(state, "../b", tmp_path / "c.key")
    enrolment.read()
    assert enrolment.clusters == {first.public: "b"}
    assert [(one.role, one.who) for one in keys.listed(state) if one.role == "cluster"] == [("cluster", "b")]
    second = keys.admit_cluster(state, "b", tmp_path / "new.key")
    enrolment.read()
    assert enrolment.clusters == {second.public: "b"}
    (state / "keys/clusters/b.pub").unlink()
    enrolment.read()
    assert enrolment.clusters == {}
    told = [
        (one.kind, one.subject) for one in said if isinstance(one, rec.Event) and "cluster b" in one.reason
    ]
    assert told == [
        ("key_added", first.public),
        ("key_revoked", first.public),
        ("key_added", second.public),
        ("key_revoked", second.public),
    ]


# ---------------------------------------------------------------- what crosses it


def test_what_is_malformed_is_dropped_and_the_link_goes_on() -> None:
    with linked() as ends, Scripted(ends) as there:
        for garbage in (
            b"\xc1",
            b"",
            msgspec.msgpack.encode({"type": "Ready", "session": "a" * 16, "number": -1}),
            msgspec.msgpack.encode(
                wire.Ready(
                    "a" * 16, 1, 0, "b", "u", b"", drained={"n": "x" * 1001}
                )  # what a node's reason may not be
            ),
            msgspec.msgpack.encode(wire.Ready("a" * 16, 1, 0, "b", "u", b"x" * (wire.MAX_READY_BYTES + 1))),
        ):
            there.socket.send(garbage)
        there.ready(7)
        there.hears(wire.Noted)
        ready, _ = ends.link.ready("b")
        assert ready is not None
        assert ready.number == 7


def test_drained_nodes_are_few_as_each_is_a_file_at_the_daemon() -> None:
    many = wire.Ready("a" * 16, 1, 0, "b", "u", b"", drained={f"n{i}": "" for i in range(5000)})
    with pytest.raises(msgspec.ValidationError, match="length"):
        wire.from_harvester.decode(msgspec.msgpack.encode(many))


def test_a_message_over_the_bound_ends_its_connection_and_is_never_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "MAX_SENT_BYTES", 4096)
    with linked() as ends, Scripted(ends) as there:
        there.ready(1)
        there.hears(wire.Noted)
        there.socket.send(msgspec.msgpack.encode(wire.Ready("a" * 16, 2, 0, "b", "u", b"x" * 5000)))
        there.event(zmq.EVENT_DISCONNECTED)
        ready, _ = ends.link.ready("b")
        assert ready is not None
        assert ready.number == 1


def test_an_answer_that_is_malformed_is_no_answer(pool: ThreadPoolExecutor) -> None:
    with linked() as ends, Scripted(ends) as there:
        there.ready(1)
        there.hears(wire.Noted)
        view = pool.submit(LinkedCluster(LinkLine(ends.link, "b", 20.0)).view)
        asked = there.hears(wire.Ask)
        there.answer_bytes(asked, zlib.compress(msgspec.msgpack.encode({"reply": 1})))
        with pytest.raises(ClusterUnavailable, match="malformed"):
            view.result(20)


SIZES = {"cpus": 1, "cpus_allocated": 0, "memory_mb": 1, "memory_allocated_mb": 0}
DEEP = b"\x91" * 100_000 + b"\x90"


def test_bytes_that_no_decoder_takes_end_neither_the_link_nor_the_daemon(
    pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """Text that is not UTF-8, and nesting without end, are no `DecodeError` to msgspec."""
    head = {"type": "AnswerPiece", "session": "a" * 16, "number": 1}
    fields = b"".join(msgspec.msgpack.encode(part) for item in head.items() for part in item)
    with linked() as ends, Scripted(ends) as there:
        there.socket.send(b"\x84" + fields + msgspec.msgpack.encode("data") + DEEP)
        named = msgspec.msgpack.encode(wire.Ready("a" * 16, 1, 0, "b", "uu", b"{}"))
        there.socket.send(named.replace(b"uu", b"\xff\xff"))
        there.ready(7)
        there.hears(wire.Noted)
        view = pool.submit(LinkedCluster(LinkLine(ends.link, "b", 20.0)).view)
        asked = there.hears(wire.Ask)
        failed = msgspec.msgpack.encode(proxy.ProxyAnswer(proxy.FailedReply("refused", "uu")))
        there.answer_bytes(asked, zlib.compress(failed.replace(b"uu", b"\xff\xff")))
        with pytest.raises(ClusterUnavailable, match="malformed"):
            view.result(20)
    limits_of_it = '{"cluster": {"x": ' + "[" * 100_000 + "]" * 100_000 + '}, "harvest": {}}'
    with pytest.raises(ConfigError, match="limits of cluster b cannot be read"):
        clusters.config_of(site_of(tmp_path), "b", clusters.ReportedLimits("u", limits_of_it))


@pytest.mark.parametrize(
    ("node", "job"),
    [
        ({"gpus": 2**32 - 1}, {}),  # decisions go over them one by one, on the daemon's event loop
        ({"memory_mb": 2**64 - 1}, {}),
        ({}, {"submit_time": float("nan")}),  # the ledger refuses it, and with it all
        ({}, {"eligible_time": float("inf")}),
        ({}, {"gpus_by_node": (("n", 2**32 - 1), ("n", 2**32 - 1)), "gpus": 2**32 - 1}),
        ({}, {"priority": 2**64 - 1}),
        ({}, {"time_limit_s": float("nan")}),
    ],
)
def test_a_view_that_no_cluster_has_is_no_view(
    pool: ThreadPoolExecutor, node: dict[str, Any], job: dict[str, Any]
) -> None:
    nodes = Node(
        "n", frozenset({"idle"}), frozenset({"p"}), "", **{"gpus": 8, "gpus_allocated": 0, **SIZES, **node}
    )
    jobs = Job(1, "ada", "p", JobState.PENDING, **{"time_limit_s": float("inf"), **job})
    partition = Partition("p", frozenset({"n"}), 1, PreemptMode.REQUEUE, 0.0, float("inf"))
    view = ClusterView(1.0, (nodes,), (jobs,), (partition,))
    honest = replace(view, nodes=(replace(nodes, gpus=8, memory_mb=1),), jobs=())
    assert plausible.fault(honest) == ""
    with linked() as ends, Scripted(ends) as there:
        there.ready(1)
        there.hears(wire.Noted)
        asking = pool.submit(LinkedCluster(LinkLine(ends.link, "b", 20.0)).view)
        asked = there.hears(wire.Ask)
        there.answer(asked, proxy.ViewReply(view))
        with pytest.raises(ClusterUnavailable, match="of no cluster"):
            asking.result(20)


def test_a_script_does_not_cross_it() -> None:
    with linked() as ends:
        cluster = LinkedCluster(LinkLine(ends.link, "b", 20.0))
        with pytest.raises(ClusterError, match="takes no job script"):
            cluster.submit(spec())


# ---------------------------------------------------------------- what becomes of a request


def test_one_that_was_not_carried_out_is_asked_again_and_one_whose_answer_is_lost_is_unknown(
    pool: ThreadPoolExecutor,
) -> None:
    with linked() as ends, Scripted(ends) as there:
        there.ready(1)
        there.hears(wire.Noted)
        submission = asks(pool, ends)
        assert there.hears(wire.Ask).number == 1
        there.ready(2)  # it came too late
        assert there.hears(wire.Ask).number == 2
        there.say(wire.Busy("a" * 16, 2))
        there.ready(3, done=2)
        with pytest.raises(SubmitUnknown, match="its answer was lost"):
            submission.result(20)
        again = asks(pool, ends)
        asked = there.hears(wire.Ask)
        assert asked.number == 3
        there.answer(asked, proxy.SubmitReply(12), {"submit": 1})
        assert again.result(20) == 12


class Slow:
    """A link of so many bytes a second from the harvester to the daemon: a relay with little memory, in a thread."""

    def __init__(self, port: int, nbytes_per_s: float) -> None:
        self._to, self._rate, self.carried = port, nbytes_per_s, 0
        self._listener = socket.socket()
        self._sockets = [self._listener]
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                there, _ = self._listener.accept()
                self._sockets.append(there)
                here = socket.create_connection(("127.0.0.1", self._to))
                self._sockets.append(here)
                for ends in ((there, here, self._rate), (here, there, 0.0)):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, rate: float) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(8 << 10):
                if rate:
                    time.sleep(len(data) / rate)  # this is the link's rate
                    self.carried += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):  # a thread that waits at it is woken, and lets go of it
                one.shutdown(socket.SHUT_RDWR)
            one.close()


class Crowded(process.SiteRole):
    """On a cluster with this many jobs beside its own."""

    others: tuple[Job, ...] = ()

    def _answer(self, request: wire.Request) -> proxy.ProxyAnswer:
        answer = super()._answer(request)
        if isinstance(answer.reply, proxy.ViewReply):
            view = replace(answer.reply.view, jobs=(*answer.reply.view.jobs, *self.others))
            return proxy.ProxyAnswer(proxy.ViewReply(view), answer.rpc)
        return answer


@pytest.mark.parametrize(
    ("jobs", "nbytes_per_s", "silent_s"),
    [(30_000, 3e5, 1.0), pytest.param(100_000, 1e5, wire.SILENT_S, marks=pytest.mark.long)],
)
@pytest.mark.timeout(180)
def test_a_large_answer_crosses_a_slow_link_and_each_piece_is_a_sign_of_life(
    tmp_path: Path,
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    jobs: int,
    nbytes_per_s: float,
    silent_s: float,
) -> None:
    monkeypatch.setattr(wire, "HEARTBEAT_TIMEOUT_MS", int(min(10.0, silent_s) * 1000))
    monkeypatch.setattr(wire, "HEARTBEAT_MS", int(min(2.0, silent_s / 4) * 1000))
    for folder in ("far", "public"):
        (tmp_path / folder).mkdir(mode=0o700)
    stop = threading.Event()
    with LocalServer(tmp_path / "cluster", layout()) as slurm, linked(silent_s=silent_s) as ends:
        slow = Slow(ends.port, nbytes_per_s)
        there = keys.Rendezvous(
            "tcp://127.0.0.1:1", ends.server.public, 3, 1, "here", "", f"tcp://127.0.0.1:{slow.port}"
        )
        keys.write_rendezvous(tmp_path / "public", there)
        ends.link.announce(there)
        role = Crowded(site_of(tmp_path / "far"), slurm.cluster())
        role.others = tuple(
            Job(n, "ada", "p", JobState.PENDING, name=secrets.token_hex(20), time_limit_s=60.0)
            for n in range(1000, 1000 + jobs)
        )
        loop = process.HarvesterLoop(
            "b", role, ends.pair, tmp_path / "public", ready_s=0.1, silent_s=silent_s
        )
        thread = threading.Thread(target=loop.run, args=(stop,))
        thread.start()
        try:
            wait_for("it is linked", lambda: ends.link.up("b"))
            before = slow.carried
            # What waits is never so long without a piece, though all of them take longer.
            view = LinkedCluster(LinkLine(ends.link, "b", 2 * silent_s)).view()
            carried = slow.carried - before
        finally:
            stop.set()
            thread.join()
            slow.close()
        assert len(view.jobs) >= jobs
        encoded = len(msgspec.msgpack.encode(view))
        assert carried < encoded / 3, "it is compressed"
        assert carried / nbytes_per_s > 1.2 * silent_s, "longer than silence may last"


def test_what_unpacks_to_more_than_the_bound_is_malformed_and_is_not_unpacked() -> None:
    with pytest.raises(msgspec.DecodeError, match="over"):
        wire.unpacked(zlib.compress(bytes(wire.MAX_ANSWER_BYTES + 1), 9))
    for cut in (b"", b"x", wire.packed(proxy.ProxyAnswer(proxy.DoneReply()))[:-1]):
        with pytest.raises(msgspec.DecodeError):
            wire.unpacked(cut)


def test_a_piece_that_is_missing_ends_the_answer_and_one_that_comes_twice_does_not(
    pool: ThreadPoolExecutor,
) -> None:
    whole = wire.packed(proxy.ProxyAnswer(proxy.SubmitReply(12)))
    with linked() as ends, Scripted(ends) as there:

        def piece(asked: wire.Ask, start: int, stop: int) -> int:
            there.say(wire.AnswerPiece(asked.session, asked.number, start, len(whole), whole[start:stop]))
            return int(there.hears(wire.Received).upto)

        there.ready(1)
        there.hears(wire.Noted)
        good = asks(pool, ends)
        asked = there.hears(wire.Ask)
        assert piece(asked, 0, 4) == piece(asked, 0, 4) == 4
        assert piece(asked, 4, len(whole)) == len(whole)
        assert good.result(20) == 12
        there.ready(2, done=1)
        bad = asks(pool, ends)
        asked = there.hears(wire.Ask)
        assert piece(asked, 4, 8) == len(whole), "the rest need not be sent"
        with pytest.raises(SubmitUnknown, match="is missing"):
            bad.result(20)


def test_an_answer_that_trickles_in_is_given_up_however_often_a_piece_comes(pool: ThreadPoolExecutor) -> None:
    with linked() as ends, Scripted(ends) as there:
        there.ready(1)
        there.hears(wire.Noted)
        slow = asks(pool, ends, 0.5)
        asked, sent, began = there.hears(wire.Ask), 0, time.monotonic()
        while not slow.done():
            there.say(wire.AnswerPiece(asked.session, asked.number, sent, 1 << 20, b"x"))
            assert there.hears(wire.Received)
            sent += 1
            assert time.monotonic() - began < 10.0, f"{sent} bytes came, and it is waited for"
        with pytest.raises(SubmitUnknown, match="did not answer within"):
            slow.result(20)


class Late(Future[Any]):
    """Its answer comes at the very moment at which the wait for it ends."""

    def result(self, timeout: float | None = None) -> Any:
        found = super().result(20.0)
        if timeout is not None:
            raise TimeoutError
        return found


def test_an_answer_that_comes_as_the_wait_for_it_ends_is_taken(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a job that was submitted counts as refused, and nobody looks for it."""
    made = link._Pending
    monkeypatch.setattr(link, "_Pending", lambda request: made(request, Late()))
    with linked() as ends, Scripted(ends) as there:
        there.ready(1)
        there.hears(wire.Noted)
        submission = asks(pool, ends, 0.2)
        asked = there.hears(wire.Ask)
        there.answer(asked, proxy.SubmitReply(12))
        assert submission.result(20) == 12


def test_a_process_that_was_started_anew_leaves_its_submission_unknown(pool: ThreadPoolExecutor) -> None:
    with linked() as ends, Scripted(ends) as there:
        there.ready(1)
        there.hears(wire.Noted)
        submission = asks(pool, ends)
        there.hears(wire.Ask)
        ends.link._peers["b"].lease_until = 0.0  # as if it had been silent for long
        there.ready(1, session="b" * 16)
        with pytest.raises(SubmitUnknown, match="started anew"):
            submission.result(20)


def test_of_two_processes_with_one_key_the_first_goes_on_and_the_second_waits(
    pool: ThreadPoolExecutor,
) -> None:
    """Until the first leaves, or is silent: then it, should it come back, is the second."""
    with linked(silent_s=1.0) as ends, Scripted(ends) as first, Scripted(ends) as second:
        first.ready(1, process="head1, pid 7")
        first.hears(wire.Noted)
        second.ready(1, session="b" * 16, process="head2, pid 8")
        refused = second.hears(wire.Refused)
        assert "another process has the key of cluster b (head1, pid 7)" in refused.reason
        submission = asks(pool, ends)
        asked = first.hears(wire.Ask)
        second.answer(wire.Ask("b" * 16, 1, asked.request), proxy.SubmitReply(13))
        first.answer(asked, proxy.SubmitReply(12))
        assert submission.result(20) == 12
        first.say(wire.Leaving("a" * 16))
        wait_for("it left", lambda: not ends.link.up("b"), 10.0)
        second.ready(2, session="b" * 16)
        second.hears(wire.Noted)
        first.ready(2)
        first.hears(wire.Refused)
        wait_for("the second is silent", lambda: not ends.link.up("b"), 10.0)
        first.ready(3)
        first.hears(wire.Noted)


def test_after_the_daemon_s_restart_the_process_that_had_the_key_has_it() -> None:
    with linked() as ends, Scripted(ends) as second, Scripted(ends) as first:
        ends.link.expect("b", "a" * 16)
        second.ready(1, session="b" * 16)
        assert "from before the daemon started" in second.hears(wire.Refused).reason
        assert not is_heard(ends)
        first.ready(9)
        first.hears(wire.Noted)


def test_silence_is_no_answer_and_what_was_not_sent_did_not_happen(pool: ThreadPoolExecutor) -> None:
    with linked(silent_s=0.3) as ends:
        with pytest.raises(ClusterError, match="has not dialled in") as never:
            asks(pool, ends).result(20)
        assert not isinstance(never.value, SubmitUnknown | ClusterUnavailable), "there is no job to look for"
        with Scripted(ends) as there:
            there.ready(1)
            there.hears(wire.Noted)
            sent, waits = asks(pool, ends), None
            there.hears(wire.Ask)
            waits = asks(pool, ends)
            with pytest.raises(SubmitUnknown, match="not heard"):
                sent.result(20)
            with pytest.raises(ClusterError, match="not heard") as unsent:
                waits.result(20)
            assert not isinstance(unsent.value, SubmitUnknown)
            with pytest.raises(ClusterUnavailable, match="has not been heard for"):
                LinkedCluster(LinkLine(ends.link, "b", 20.0)).view()


# ---------------------------------------------------------------- what bounds it there


def bounds(config: DaemonConfig, **more: Any) -> Any:
    return limits.limits_of(config, Health(HealthRules(3, 60.0, 1.0)), 0.0, 1000.0, user="u", **more)


def site_of(folder: Path, **harvest: Any) -> DaemonConfig:
    return DaemonConfig(
        daemon=DaemonSection(state_dir=folder),
        cluster=ClusterSection(backend="local", local_dir=folder),
        harvest=HarvestSection(**harvest),
    )


def ours(job_id: int, state: JobState = JobState.RUNNING, gpus: int = 1) -> Job:
    return Job(job_id, "u", "scavenge", state, name="scv-x", gpus=gpus)


@pytest.mark.parametrize(
    ("harvest", "more", "here", "started", "why"),
    [
        ({}, {}, (), {}, ""),
        ({"max_engines": 2}, {}, (ours(1),), {}, ""),
        ({"max_engines": 2}, {}, (ours(1), ours(2)), {}, "engine 3, and harvest.max_engines = 2"),
        ({"max_engines": 2}, {}, (ours(1),), {1: 1}, ""),
        ({"max_engines": 2}, {}, (ours(1),), {2: 1}, "engine 3"),
        ({"max_gpus": 4}, {}, (ours(1, gpus=3),), {}, ""),
        ({"max_gpus": 4}, {}, (ours(1, gpus=4),), {}, "5 GPUs, and harvest.max_gpus = 4"),
        ({"max_pending": 1}, {}, (ours(1, JobState.PENDING),), {}, "harvest.max_pending"),
        ({"partition": "night"}, {}, (), {}, "is not harvest.partition = 'night'"),
        ({}, {"stop": limits.Stop("the stop file there: no")}, (), {}, "the stop file there: no"),
        (
            {"blackout": [{"start": "1970-01-01T00:00:00Z", "end": "1970-01-02T00:00:00Z"}]},
            {},
            (),
            {},
            "a blackout is on",
        ),
        ({"schedule": [{"days": "Thu", "hours": "0-8", "max_engines": 0}]}, {}, (), {}, "max_engines = 0"),
    ],
)
def test_the_limits_of_the_cluster_itself_hold_whatever_the_daemon_asks_for(
    tmp_path: Path, harvest: Any, more: Any, here: Any, started: Any, why: str
) -> None:
    found = process.refusal(ENGINE, bounds(site_of(tmp_path, **harvest), **more), here, started, 1000.0)
    assert why in found if why else not found, found


def test_a_drained_node_gets_no_engine(tmp_path: Path) -> None:
    wanted = Submit(1, "run", "scavenge", 1, "", nodelist=("n1",))
    drained = bounds(site_of(tmp_path), drained={"n1": "a fan"})
    assert process.refusal(wanted, drained, (), {}, 1000.0) == "node n1 is drained here"


def test_only_engines_jobs_are_cancelled_and_jobs_are_submitted_as_its_own_file_says(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir(mode=0o700)
    template = tmp_path / "job.j2"
    template.write_text(SLEEPS)
    with LocalServer(tmp_path / "cluster", layout()) as slurm:
        far, site = site_of(tmp_path / "far", job_template=template, standby_jobs=0), slurm.cluster()
        far = far.model_copy(update={"cluster": far.cluster.model_copy(update={"local_dir": slurm.dir})})
        role = process.SiteRole(far, site)
        theirs = site.submit(spec(gpus=1))
        started = role.answer(wire.SubmitEngine(UID, f"scv-{'0' * 16}", ENGINE)).reply
        assert isinstance(started, proxy.SubmitReply)
        role.answer(proxy.GetView())
        assert role.answer(proxy.CancelJobs((theirs, started.job_id))).reply == proxy.DoneReply()
        assert isinstance(role.answer(proxy.ReleaseJob(theirs, "node1")).reply, proxy.FailedReply)
        wait_for("the engine's job ends", lambda: ends(site, started.job_id))
        [job] = [job for job in site.jobs() if job.job_id == theirs]
        assert job.state in (JobState.PENDING, JobState.RUNNING)
        limits.drain(tmp_path / "far", "a course", at_once=False)
        refused = role.answer(wire.SubmitEngine(UID, "scv-2", ENGINE)).reply
        assert isinstance(refused, proxy.FailedReply)
        assert "a course" in refused.cause
        assert role.stop().startswith("drain scavenger drain there: a course")


def test_two_daemons_harvesters_of_one_unix_user_leave_each_other_s_jobs_and_folders_alone(
    tmp_path: Path,
) -> None:
    template = tmp_path / "job.j2"
    template.write_text(SLEEPS)
    roles: list[process.SiteRole] = []
    with LocalServer(tmp_path / "cluster", layout()) as slurm:
        for name in ("one", "two"):
            (tmp_path / name).mkdir(mode=0o700)
            far = site_of(tmp_path / name, job_template=template, standby_jobs=0, max_engines=1)
            far = far.model_copy(update={"cluster": far.cluster.model_copy(update={"local_dir": slurm.dir})})
            roles.append(process.SiteRole(far, slurm.cluster()))
        started = [
            role.answer(wire.SubmitEngine(uid, f"scv-{'0' * 15}{n}", ENGINE)).reply
            for n, (role, uid) in enumerate(zip(roles, (UID, "0" * 8), strict=True))
        ]
        jobs = [one.job_id for one in started if isinstance(one, proxy.SubmitReply)]
        assert len(jobs) == 2, "each has its own max_engines"
        for role in roles:
            role.answer(proxy.GetView())
        assert roles[0].answer(proxy.CancelJobs(tuple(jobs))).reply == proxy.DoneReply()
        wait_for("its own ends", lambda: ends(slurm.cluster(), jobs[0]))
        [other] = [job for job in slurm.cluster().jobs() if job.job_id == jobs[1]]
        assert other.state in (JobState.PENDING, JobState.RUNNING)
    with (
        process.sole(tmp_path / "one", "of cluster b"),
        pytest.raises(ConfigError, match=r"another harvester has it \(of cluster b; "),
        process.sole(tmp_path / "one", "of cluster c"),
    ):
        pass
    with process.sole(tmp_path / "one", "of cluster c"), process.sole(tmp_path / "two", "of cluster b"):
        pass


def ends(site: Cluster, job_id: int) -> bool:
    return all(job.job_id != job_id or job.state is JobState.CANCELLED for job in site.jobs())


def test_what_a_harvester_says_names_no_file_of_the_daemon_s_host_and_cannot_hurry_it(tmp_path: Path) -> None:
    own = site_of(tmp_path / "own")
    honest = msgspec.json.decode(process.limits_json(site_of(tmp_path / "b", max_engines=7)))
    assert clusters.config_of(own, "b", remembered(honest)).harvest.max_engines == 7
    honest["harvest"] |= {"job_template": "/etc/shadow", "stop_file": "/etc/shadow", "python": "/bin/sh"}
    honest["cluster"] |= {
        "submit_socket": "/run/x",
        "local_dir": "/",
        "poll_interval_s": 1e-9,
        "command_timeout_s": 1e9,
    }
    found = clusters.config_of(own, "b", remembered(honest))
    assert found.harvest.job_template is None
    assert found.harvest.python == own.harvest.python
    assert found.harvest.stop_file == own.daemon.state_dir / "drain"
    assert found.cluster.submit_socket is found.cluster.local_dir is None
    assert found.cluster.poll_interval_s == clusters.LEAST_POLL_S
    assert found.cluster.command_timeout_s == clusters.MOST_COMMAND_S
    honest["harvest"]["max_engines"] = "many"
    with pytest.raises(ConfigError, match="limits of cluster b cannot be read"):
        clusters.config_of(own, "b", remembered(honest))


def test_limits_that_are_long_are_remembered_over_a_restart(tmp_path: Path) -> None:
    """A calendar of blackouts has more bytes than a key's file may."""
    spans = [
        {"start": f"2035-01-{day:02}T08:00:00", "end": f"2035-01-{day:02}T09:00:00", "reason": "cooling" * 90}
        for day in range(1, 29)
    ]
    limits = process.limits_json(site_of(tmp_path / "b", blackout=spans))
    assert len(limits) > 16 * 1024

    async def play() -> None:
        own = site_of(tmp_path / "own")
        pair, nothing = keys.generate(), RouterLink(*cast(Any, [lambda *_: []] * 6))

        async def commit(_records: Any) -> None:
            raise AssertionError

        def made() -> clusters.FurtherClusters:
            writes = LedgerWrites(commit, lambda _records: None)
            return clusters.FurtherClusters(own, pair, UID, writes, lambda _: nothing, time.time, dict)

        first, again = made(), made()
        await first._take_limits("b", clusters.ReportedLimits("u", limits.decode()))
        again.restore(cast(Any, SimpleNamespace(jobs=(), waits=(), quarantined=())))
        assert again.clusters["b"].reported == first.clusters["b"].reported
        first.close()
        again.close()

    asyncio.run(play())


@pytest.mark.parametrize("text", WRONG_JSON)
def test_what_is_remembered_of_a_cluster_and_is_not_what_was_written_is_a_fault_of_that_cluster(
    tmp_path: Path, text: bytes
) -> None:
    own = site_of(tmp_path / "own")
    folder = keys.cluster_dir(own.daemon.state_dir, "b")
    folder.mkdir(mode=0o700, parents=True)
    (folder / clusters.LIMITS).write_bytes(text)

    async def play() -> None:
        made = clusters_of(own)
        made.restore(cast(Any, SimpleNamespace(jobs=(), waits=(), quarantined=())))
        [shown] = made.status(time.time())
        assert shown.fault
        made.close()

    asyncio.run(play())


@pytest.mark.parametrize("text", WRONG_JSON)
def test_a_copy_of_where_the_daemon_is_that_is_none_is_said_to_be_none(tmp_path: Path, text: bytes) -> None:
    """A harvester looks again soon: it may be half copied."""
    (tmp_path / "rendezvous.json").write_bytes(text)
    with pytest.raises(DaemonUnavailable, match="is not a rendezvous file"):
        keys.read_rendezvous(tmp_path)


def test_limits_that_are_no_limits_are_read_once_and_those_that_change_all_the_time_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, read = clusters.config_of, []

    def counted(own: DaemonConfig, name: str, reported: clusters.ReportedLimits) -> DaemonConfig:
        read.append(reported.limits)
        return real(own, name, reported)

    monkeypatch.setattr(clusters, "config_of", counted)
    many = json.dumps({"cluster": {}, "harvest": {"blackout": [{}] * 20_000}})

    async def play() -> None:
        made = clusters_of(site_of(tmp_path / "own"))
        for text in ("null", *(["[]"] * 3), "null", many):
            with pytest.raises(ConfigError, match="of cluster b cannot be read") as caught:
                await made._take_limits("b", clusters.ReportedLimits("u", text))
            assert len(caught.value.cause) < 2 * clusters.MOST_FAULT
        assert read == ["null"], "the second before is not over"
        made._read_at.clear()
        for _ in range(3):
            with pytest.raises(ConfigError):
                await made._take_limits("b", clusters.ReportedLimits("u", many))
        assert read == ["null", many]
        made.close()

    asyncio.run(play())


def test_limits_that_cannot_be_written_down_are_read_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = process.limits_json(site_of(tmp_path / "b")).decode()
    real, read = clusters.config_of, []

    def counted(own: DaemonConfig, name: str, reported: clusters.ReportedLimits) -> DaemonConfig:
        read.append(name)
        return real(own, name, reported)

    def full(_path: Path, _content: bytes) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    async def play() -> None:
        made = clusters_of(site_of(tmp_path / "own"))
        monkeypatch.setattr(clusters, "config_of", counted)
        with monkeypatch.context() as disk:
            disk.setattr(keys, "write_private", full)
            for _ in range(3):
                with pytest.raises(OSError, match="no space left"):
                    await made._take_limits("b", clusters.ReportedLimits("u", limits))
            assert len(read) == 1
        made._read_at.clear()
        await made._take_limits("b", clusters.ReportedLimits("u", limits))
        assert "b" in made.clusters
        made.close()

    asyncio.run(play())


def test_limits_that_are_too_long_for_the_link_are_said_where_they_are(tmp_path: Path) -> None:
    spans = [
        {"start": f"20{year}-01-01T08:00:00", "end": f"20{year}-01-01T09:00:00", "reason": "r" * 4000}
        for year in range(35, 80)
    ]
    site = site_of(tmp_path / "b", blackout=spans)
    with pytest.raises(ConfigError, match="the daemon takes 131072"):
        process.limits_json(site)


def test_the_link_has_a_port_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="port and clusters_port are both 7470"):
        DaemonSection(state_dir=tmp_path, port=7470, clusters_port=7470)


def test_a_port_for_other_clusters_is_not_on_loopback(tmp_path: Path) -> None:
    for listen in ("127.0.0.1", "::1", "localhost"):
        with pytest.raises(ValueError, match="reached from this host alone"):
            DaemonSection(state_dir=tmp_path, listen=listen, clusters_port=7470)
    DaemonSection(state_dir=tmp_path, listen="127.0.0.1", advertise="head.example", clusters_port=7470)
    DaemonSection(state_dir=tmp_path, clusters_port=0)


def test_a_link_whose_thread_died_ends_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its service manager starts another; engines go on meanwhile."""

    def breaks(*_: Any) -> None:
        raise MemoryError("planted")

    async def play() -> None:
        nothing = RouterLink(*cast(Any, [lambda *_: []] * 6))

        async def commit(_records: Any) -> None:
            raise AssertionError

        writes = LedgerWrites(commit, lambda _records: None)
        made = clusters.FurtherClusters(
            site_of(tmp_path), keys.generate(), UID, writes, lambda _: nothing, time.time, dict
        )
        monkeypatch.setattr(made.link, "_give_up_silent", breaks)
        made.link.expect("b", "a" * 16)
        monkeypatch.setattr(threading, "excepthook", lambda _args: None)
        made.link.bind("127.0.0.1", 0)
        with pytest.raises(RuntimeError, match="links to further clusters ended"):
            await asyncio.wait_for(made.run(asyncio.Event()), 20)
        made.close()

    asyncio.run(play())


def clusters_of(own: DaemonConfig) -> clusters.FurtherClusters:
    """Of a daemon that never runs. Called on an event loop."""
    nothing = RouterLink(*cast(Any, [lambda *_: []] * 6))

    async def commit(_records: Any) -> None:
        raise AssertionError

    writes = LedgerWrites(commit, lambda _records: None)
    return clusters.FurtherClusters(own, keys.generate(), UID, writes, lambda _: nothing, time.time, dict)


def remembered(sections: Any) -> clusters.ReportedLimits:
    return clusters.ReportedLimits("u", msgspec.json.encode(sections).decode())


def test_clusters_share_the_demand_and_their_records_and_nodes_are_told_apart() -> None:
    wants = [Demand(1, "run", 3, 1, "3 are useful"), Demand(2, "other", 1, 1, "1 is useful")]
    left = without(wants, {1: 2, 2: 4, 7: 1})
    assert [(one.engines, one.reason) for one in left] == [
        (1, "3 are useful; 2 of 3 are on other clusters"),
        (0, "1 is useful; 1 of 1 are on other clusters"),
    ]
    polled = rec.ClusterPolled(1, 2, 3, 4, 5, 6, 7.0)
    sick, well = rec.NodeQuarantined("n1", "why", 2.0, 1.0), rec.NodeReleased("n1", 3.0)
    decided = rec.Decision("harvest", "none", "", "no run is open", "{}", 1.0)
    died = rec.EngineDied("n1", 1, "scv-1", 7, 0, 1, "FAILED", 2.0, 3.0)
    found: list[Any] = clusters.tagged([polled, sick, well, decided, died, rec.Heartbeat(1.0)], "b")
    assert [one.cluster for one in found[:5]] == ["b"] * 5
    assert [one.node for one in (found[1], found[2], found[4])] == ["n1"] * 3
    assert found[5] == rec.Heartbeat(1.0)
    intents = [
        rec.OpenIntent(
            rec.JobIntended(f"scv-{n}", 1, "p", 1, "k", 1.0, cluster=c), 7, "RUNNING", 0, "n1", True
        )
        for n, c in enumerate(("", "b", "c"))
    ]
    waits = [rec.OtherUserWaits(5, "u", "p", 1, 1.0, 1.0, 1.0, cluster=c) for c in ("b", "")]
    snapshot: Any = SimpleNamespace(
        jobs=intents, waits=waits, quarantined=(("", "n1"), ("b", "n1"), ("bb", "n2"))
    )
    assert clusters.of_cluster(snapshot, "") == ((intents[0],), (waits[1],), ("n1",))
    assert clusters.of_cluster(snapshot, "b") == ((intents[1],), (waits[0],), ("n1",))
    assert clusters.uid_of(UID, "b") != clusters.uid_of(UID, "c") != UID


def test_clusters_that_hang_leave_the_threads_that_all_share() -> None:
    """The daemon's own stop files are read in one of these."""

    async def play() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        entered, go_on, stop = threading.Event(), threading.Event(), asyncio.Event()

        def hangs(_live: Any) -> None:
            entered.set()
            go_on.wait(20)

        thread = OneThread("logs")
        watching = asyncio.create_task(job_logs.watch(hangs, tuple, stop, call=thread.call))
        try:
            await until("it hangs", entered.is_set)
            assert await asyncio.wait_for(loop.run_in_executor(None, lambda: 1), 5) == 1
        finally:
            go_on.set()
            stop.set()
            await watching
            thread.close()

    asyncio.run(play())


def test_engines_that_wait_for_other_users_are_started_on_another_cluster_meanwhile(tmp_path: Path) -> None:
    """A preempted job may wait for days for its GPUs, while another cluster's are idle."""
    (tmp_path / "own").mkdir(mode=0o700)
    with LocalServer(tmp_path / "cluster", layout()) as slurm:
        world = World(slurm.cluster(), slurm.dir, tmp_path / "own")
        world.want(2)

        async def play() -> None:
            made = world.harvester(fresh_after_s=1.0)
            async with running(made, cancel=True):
                await until("they run", lambda: len(world.jobs(JobState.RUNNING)) == 2)
                await until("they count", lambda: made.claimed() == {1: 2})
                theirs = [world.site.submit(spec()) for _ in range(2)]
                await until("they wait", lambda: len(world.of(rec.AllocationEnded)) == 2)
                await until("others may start them", lambda: not made.claimed())
                assert len(world.jobs(JobState.PENDING)) == 2
                world.site.cancel(tuple(theirs))
                await until("they run again", lambda: made.claimed() == {1: 2})

        asyncio.run(play())


# ---------------------------------------------------------------- all of it, on a local cluster


class There:
    """The process there, in a thread, which is ended and started as the process is."""

    def __init__(self, config: DaemonConfig, server: LocalServer, pair: keys.KeyPair, folder: Path) -> None:
        self.config, self._server, self._pair, self._folder = config, server, pair, folder
        self._stop, self._thread = threading.Event(), threading.Thread()

    def start(self) -> None:
        role = process.SiteRole(self.config, self._server.cluster(), lambda: self.config)
        loop = process.HarvesterLoop("b", role, self._pair, self._folder, ready_s=0.1, silent_s=2.0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=loop.run, args=(self._stop,))
        self._thread.start()

    def end(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()


@asynccontextmanager
async def daemon_of(
    world: World, own: DaemonConfig, server: keys.KeyPair, names: Callable[[], dict[str, str]], public: Path
) -> AsyncIterator[clusters.FurtherClusters]:
    """What the daemon has of further clusters, running; it announces itself in `public`."""

    async def commit(records: Any) -> None:
        world.said.extend(records)

    made: clusters.FurtherClusters

    def lives() -> list[WorkerLife]:
        return []

    def leases() -> dict[str, tuple[int, float]]:
        return {
            one.intent_id: (0, 0.0)
            for further in made.clusters.values()
            for one in further.harvester.tracker.intents.values()
            if one.allocation is not None
        }

    def forget(key: str) -> None:
        world.allowed.pop(key, None)

    def router(_name: str) -> RouterLink:
        return RouterLink(
            world.said.append, lambda: world.demand, leases, world.allowed.__setitem__, forget, lives
        )

    made = clusters.FurtherClusters(
        own, server, UID, LedgerWrites(commit, world.said.extend), router, time.time, names
    )
    stop = asyncio.Event()
    port = made.link.bind("127.0.0.1", 0)
    there = keys.Rendezvous("tcp://127.0.0.1:1", server.public, 1, 1, "here", "", f"tcp://127.0.0.1:{port}")
    keys.write_rendezvous(public, there)
    made.link.announce(there)
    task = asyncio.create_task(made.run(stop))
    try:
        yield made
    finally:
        stop.set()
        await made.shutdown(cancel=False)
        made.close()
        await task


def test_a_link_that_breaks_and_comes_back_loses_no_job_and_its_admin_has_the_last_word(
    tmp_path: Path,
) -> None:
    for folder in ("own", "public", "far"):
        (tmp_path / folder).mkdir(mode=0o700)
    template = tmp_path / "job.j2"
    template.write_text(SLEEPS)
    server, pair = keys.generate(), keys.generate()
    names = {pair.public: "b"}
    own = site_of(tmp_path / "own")
    with LocalServer(tmp_path / "cluster", layout()) as slurm:
        far = DaemonConfig(
            daemon=DaemonSection(state_dir=tmp_path / "far"),
            cluster=ClusterSection.model_validate(
                {
                    "backend": "local",
                    "local_dir": slurm.dir,
                    "absent_s": 0.3,
                    "command_timeout_s": 5.0,
                    **FAST,
                }
            ),
            harvest=HarvestSection(standby_jobs=0, job_template=template, max_engines=2, backoff_s=0.1),
        )
        there = There(far, slurm, pair, tmp_path / "public")
        world = World(slurm.cluster(), slurm.dir, tmp_path / "own")
        world.want(5)

        async def play() -> None:
            async with daemon_of(world, own, server, lambda: names, tmp_path / "public") as made:
                there.start()
                await until(
                    "the decision says why a run that does not encrypt has no engine there",
                    lambda: (
                        (HarvestCode.NOT_ENCRYPTED, "b")
                        in {(d.code, d.cluster) for d in world.of(rec.Decision)}
                    ),
                )
                assert not world.of(rec.JobIntended)
                world.want(5, encrypts=True)
                await until(
                    "as many engines run as its limit", lambda: len(world.jobs(JobState.RUNNING)) == 2
                )
                await until("they are known", lambda: len(world.of(rec.AllocationStarted)) == 2)
                assert {one.cluster for one in world.of(rec.JobIntended)} == {"b"}
                assert made.engines_of_others("") == {1: 2}
                assert made.engines_of_others("b") == {}
                first = {job.job_id: job.name for job in world.jobs()}
                assert {path.stem for path in (tmp_path / "far/workers").glob("*.key")} >= set(first.values())
                assert keys.read_rendezvous(tmp_path / "far").server_key == server.public
                # The link breaks; one job ends meanwhile, and nobody concludes anything.
                there.end()
                made.link._silent_s = 0.5
                await until("polls fail", lambda: made.clusters["b"].harvester.polls_fail)
                gone = min(first)
                world.site.cancel((gone,))
                polls = len(world.events("cluster_unavailable"))
                await until(
                    "they go on failing", lambda: len(world.events("cluster_unavailable")) > polls + 1
                )
                assert not world.of(rec.JobEnded)
                assert not world.of(IntentRevoked)
                [shown] = made.status(time.time())
                assert shown.heard_at
                assert shown.harvest is not None
                assert "not been heard" in shown.harvest.polls_fail
                made.link._silent_s = 5.0
                there.start()
                await until("the end is noticed", lambda: world.of(rec.JobEnded))
                assert [one.intent_id for one in world.of(rec.JobEnded)] == [first.pop(gone)]
                await until("one takes its place", lambda: len(world.jobs(JobState.RUNNING)) == 2)
                now = {job.job_id: job.name for job in world.jobs()}
                assert first.items() <= now.items(), "the other one went on"
                # Its admin lowers a limit, drains, and resumes there: it holds here.
                limits.drain(tmp_path / "far", "a course", at_once=True)
                await until("all leave", lambda: not world.jobs())
                assert any("a course" in event.reason for event in world.events("harvest_stopped"))
                there.config = far.model_copy(
                    update={"harvest": far.harvest.model_copy(update={"max_engines": 1})}
                )
                limits.resume(tmp_path / "far")
                await until("one is back", lambda: len(world.jobs(JobState.RUNNING)) == 1)
                assert made.clusters["b"].harvester.config.harvest.max_engines == 1
                await until("it is known", lambda: len(world.of(rec.AllocationStarted)) == 4)
                # The key is removed: engines there are asked to leave, though nothing can be asked of Slurm.
                names.clear()
                await until(
                    "it is asked to leave",
                    lambda: "key" in "".join(e.reason for e in world.of(IntentRevoked)),
                )
                assert made.status(time.time())[0].revoked
            world.site.cancel(tuple(job.job_id for job in world.jobs()))

        try:
            asyncio.run(play())
        finally:
            there.end()
        wait_for("nothing is left", lambda: not world.jobs())
