"""Whoever reaches the daemon's port without a key takes neither its descriptors nor its engines."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from scavenger.client import Client
from scavenger.cluster.local.client import LocalServer
from scavenger.cluster.model import JobState
from scavenger.config import RunConfig
from scavenger.host import descriptors
from scavenger.observe import status
from scavenger.protocol import keys, messages
from scavenger.protocol.messages import EngineSpec, GroupSpec, Sampling, WeightSource
from scavenger.router.edge.handshakes import limits_for
from scavenger.weights import manifest as manifests
from tests.clusters import wait_for
from tests.harvest.world import layout
from tests.ledger.histories import fetch
from tests.test_daemon_start import running, site

FLOOD, DESCRIPTORS = 1500, 1024
#: More than libzmq's own queue of 100, few enough for `select`.
AT_ONCE = 400
#: The daemon alone has few descriptors; the test needs one for each connection.
LIMITED = (
    f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, "
    f"{DESCRIPTORS}))\nfrom scavenger.cli.main import main\nmain()"
)


@contextmanager
def many_descriptors(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        pytest.skip(f"this user may have {hard} files open, the test needs {count}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def flooded(address: tuple[str, int], count: int = FLOOD) -> Iterator[list[socket.socket]]:
    """`count` connections that say nothing."""
    opened: list[socket.socket] = []
    try:
        for _ in range(count):
            one = socket.socket()
            opened.append(one)
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                one.connect(address)
        yield opened
    finally:
        for one in opened:
            one.close()


def limited(config: Path) -> tuple[str, ...]:
    return (sys.executable, "-c", LIMITED, "daemon", "--config", str(config))


def open_run(client: Client, name: str, *, harvest: bool) -> None:
    """A run with samples to generate, so that engines are wanted where it may have any."""
    document = {
        "run": {"name": name, "steps": 1, "state_dir": "/s", "out_dir": "/o", "harvest": harvest},
        "model": {"path": "/m", "context_length": 24},
        "sampling": {"max_tokens": 8},
    }
    engine = EngineSpec("reference", "{}", "float32", 1, 24)
    run = client.open_run(RunConfig.model_validate(document), engine=engine, tokenizer="/m", resume_step=0)
    manifest, _ = manifests.build(1, {"w": ("float32", (4,), memoryview(bytes(16)))})
    run.publish(0, manifest, WeightSource("tcp://127.0.0.1:1", "", b"token"))
    prompt = b"".join(number.to_bytes(4, "little") for number in (1, 2, 3))
    run.submit(1, 1, [GroupSpec(index, prompt, 4, Sampling(8)) for index in range(4)])


def endpoint(folder: Path) -> tuple[str, int]:
    host, _, port = keys.read_rendezvous(folder / "state").endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


@pytest.fixture
def site_of_ours(tmp_path: Path) -> Iterator[LocalServer]:
    with LocalServer(tmp_path / "cluster", layout()) as server:
        yield server


def test_a_flood_of_connections_without_a_key_drains_nothing_and_a_trainer_still_registers(
    tmp_path: Path, site_of_ours: LocalServer
) -> None:
    template = tmp_path / "sleeps.sh"
    template.write_text("#!/bin/bash\nexec sleep 600\n")
    config = site(
        tmp_path,
        daemon={"trainer_silent_s": 300.0},
        cluster={
            "backend": "local",
            "local_dir": str(site_of_ours.dir),
            "poll_interval_s": 1.0,
            "fast_poll_interval_s": 0.5,
            "min_poll_interval_s": 0.0,
            "max_rpc_per_min": 6000.0,
        },
        harvest={
            "partition": "scavenge",
            "max_engines": 2,
            "job_template": str(template),
            "stop_file": str(tmp_path / "stop"),
            "same_tier_yield_s": 5.0,
            "sees_all_jobs": True,
        },
        router={"policy": "standard"},
    )
    cluster = site_of_ours.cluster()

    def engines() -> set[int]:
        return {job.job_id for job in cluster.view().jobs if job.state is JobState.RUNNING}

    with many_descriptors(FLOOD + 200), running(config, argv=limited(config)) as daemon:
        daemon.until("event=serving")
        with Client.connect(tmp_path / "state", connect_timeout_s=60.0) as first:
            open_run(first, "first", harvest=True)
            wait_for("its engines run", lambda: len(engines()) == 2)
            before = engines()
            with flooded(endpoint(tmp_path)):
                began = time.monotonic()
                with Client.connect(tmp_path / "state", connect_timeout_s=60.0) as second:
                    open_run(second, "second", harvest=False)
                registered_s = time.monotonic() - began
                # A connection is ended once it was accepted and told of: for a moment more of them are open.
                wait_for(
                    "the daemon has ended what is too many, and what it needs for itself is left",
                    lambda: (
                        (now := status.read(tmp_path / "state")).ended_connections > FLOOD // 2
                        and 0 < now.open_files < DESCRIPTORS - 200
                        and now.harvest is not None
                    ),
                    timeout_s=150.0,
                )
                seen = status.read(tmp_path / "state")
                assert seen.open_files_limit == DESCRIPTORS
                assert seen.harvest is not None
                assert (seen.harvest.stopped, seen.harvest.unread) == ("", "")
            assert engines() == before
            assert registered_s < 30.0
        assert "Too many open files" not in daemon.stderr
        events = fetch(f"sqlite:///{tmp_path}/state/ledger.sqlite3", "SELECT kind FROM events")
        assert ("harvest_stopped",) not in events
        daemon.process.terminate()
        assert daemon.ended() == 0


def test_connections_that_come_at_once_wait_for_a_busy_daemon(tmp_path: Path) -> None:
    """The kernel finishes as many as the queue holds; others would try again seconds later, each time after twice as long."""
    most = int(Path("/proc/sys/net/core/somaxconn").read_text())
    if most < AT_ONCE:
        pytest.skip(f"net.core.somaxconn = {most} here, the test needs {AT_ONCE}")
    with running(site(tmp_path)) as daemon:
        daemon.until("event=serving")
        os.kill(daemon.process.pid, signal.SIGSTOP)  # nothing is accepted
        try:
            with flooded(endpoint(tmp_path), AT_ONCE) as opened:
                wait_for(
                    "all are connected", lambda: len(select.select([], opened, [], 0)[1]) == AT_ONCE, 10.0
                )
        finally:
            os.kill(daemon.process.pid, signal.SIGCONT)
        with Client.connect(tmp_path / "state", connect_timeout_s=60.0) as client:
            open_run(client, "after", harvest=False)


def test_one_owners_connections_leave_room_for_another_s(tmp_path: Path) -> None:
    """Each says one thing, with a key that is accepted, and then nothing."""
    config = site(tmp_path)
    hers = keys.generate()
    keys.enroll(tmp_path / "state", "bob", hers.public)
    keys.write_keypair(tmp_path / "bob.key", hers)
    most = limits_for(DESCRIPTORS, descriptors.reserved(DESCRIPTORS)).per_owner
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4 * most)
    with many_descriptors(16 * most), running(config, argv=limited(config)) as daemon:
        daemon.until("event=serving")
        here = keys.read_rendezvous(tmp_path / "state")
        mine = keys.read_keypair(keys.owner_key_path(tmp_path / "state"))
        opened: list[zmq.Socket[bytes]] = []
        try:
            for _ in range(most + 20):
                one = context.socket(zmq.DEALER)
                opened.append(one)
                keys.secure(one, here.server_key, mine)
                one.setsockopt(zmq.RECONNECT_IVL, -1)  # who is ended stays so
                one.connect(here.endpoint)
                one.send(messages.encode(messages.Call(1, "none", 0, messages.Ping())))
                one.poll(
                    1000
                )  # a reply, where it is not ended: as many at once from one address are too many for another reason
            daemon.until("an owner has too many connections")
            with Client.connect(tmp_path / "state", tmp_path / "bob.key", connect_timeout_s=60.0) as bob:
                open_run(bob, "bobs", harvest=False)
            wait_for(
                "no more than so many are left",
                lambda: most <= status.read(tmp_path / "state").open_files < most + 100,
                60.0,
            )
        finally:
            context.destroy(linger=0)
        with Client.connect(tmp_path / "state", connect_timeout_s=60.0) as client:
            open_run(client, "after", harvest=False)
