"""A trainer behind a link on which a group takes longer than a daemon may be silent, and submissions that are over a call's bound."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from scavenger import client as clients
from scavenger.client import Client
from scavenger.errors import Refused
from scavenger.protocol import keys, messages
from tests.router.edge import LiveDaemon, ScriptedWorker
from tests.router.harness import specs
from tests.router.test_edge import check_groups, collect, open_run, publish

PIECE = 4096


class SlowLink:
    """A proxy before the daemon's port, on which each connection carries `rate` bytes a second to its client."""

    def __init__(self, port: int, rate: float) -> None:
        self._port, self._rate = port, rate
        self.halt = threading.Event()
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> SlowLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.halt.set()
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(10)
            assert not thread.is_alive()
        for one in self._open:
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # shut down: the test is over
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self.connections += 1
                self._open += [near, far]
                for args in ((near, far, False), (far, near, True)):
                    thread = threading.Thread(target=self._carry, args=args)
                    self._threads.append(thread)
                    thread.start()

    def _carry(self, source: socket.socket, sink: socket.socket, slow: bool) -> None:
        with contextlib.suppress(OSError):  # either side is gone
            while data := source.recv(PIECE):
                if slow and self.halt.wait(len(data) / self._rate):
                    break
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def scripted(daemon: LiveDaemon) -> Iterator[ScriptedWorker]:
    """A worker that is ended whatever happens."""
    worker = ScriptedWorker(daemon.state_dir, daemon.worker_key("j"), "s")
    try:
        yield worker
    finally:
        worker.halt.set()
        if worker.ident is not None:
            worker.join(10)
    assert worker.error is None


def test_a_group_that_takes_longer_than_a_daemon_may_be_silent_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(clients, "MIN_TIMEOUT_S", 0.4)
    with LiveDaemon(tmp_path / "state", payload_bytes=2**24) as daemon:
        here = keys.read_rendezvous(daemon.state_dir)
        port = int(here.endpoint.rsplit(":", 1)[1])
        with (
            SlowLink(port, rate=200_000) as link,
            Client.connect(daemon.state_dir) as first,
            scripted(daemon) as worker,
        ):
            publish(open_run(first, daemon), 1)
            worker.start()
            slow = msgspec.structs.replace(here, endpoint=f"tcp://127.0.0.1:{link.port}")
            keys.write_rendezvous(daemon.state_dir, slow)
            with Client.connect(daemon.state_dir) as client:
                run = open_run(client, daemon)
                publish(run, 2)
                long = tuple(
                    msgspec.structs.replace(spec, meta="m" * 240_000) for spec in specs(2)
                )  # 1.2 s each
                run.submit(1, 2, long)
                found = collect(run, 2, timeout_s=30)
                run.commit(1, 2, check_groups(found), {})
                assert 3 <= link.connections < 9
    assert "a large group over a slow link" in capsys.readouterr().out


def test_a_submission_over_a_calls_bound_is_made_in_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "MAX_CALL_SAMPLES", 6)
    with (
        LiveDaemon(tmp_path / "state") as daemon,
        Client.connect(daemon.state_dir) as client,
        scripted(daemon) as worker,
    ):
        run = open_run(client, daemon)
        publish(run, 1)
        before = client._next_id
        ids = run.submit(1, 1, specs(8, 2))
        assert client._next_id == before + 3
        assert len(set(ids)) == 8
        assert daemon.server.router.core.runs["r"].progress.samples == 16
        worker.start()
        found = collect(run, 8)
        run.commit(1, 1, check_groups(found), {})
        with pytest.raises(Refused, match="names a prompt twice"):
            run.submit(2, 1, (*specs(8, 2), specs(1)[0]))
    assert daemon.query("SELECT state, count(*) FROM samples GROUP BY state") == [("consumed", 16)]
