"""What the daemon says of itself, and what a reader makes of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pwd
import stat
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

from scavenger import toml
from scavenger.cli.main import app
from scavenger.cluster.local.client import LocalServer
from scavenger.config import DaemonConfig
from scavenger.daemon import main
from scavenger.errors import DaemonUnavailable, Fenced
from scavenger.harvest.decide.actions import DrainKind, OurJob
from scavenger.ledger import store
from scavenger.ledger.records import Event
from scavenger.ledger.write.transaction import grant_generation
from scavenger.observe import status
from scavenger.observe.status import Harvest, Status
from scavenger.protocol import keys

SEEN = Status(
    1000.0, 3, "login1", 77, 100.0, "OK", "", 12, 2**20, 3 * 2**20, 4, 5, 6 * 2**20, 512 * 2**20, 7, 8
)


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
        asyncio.run(status.publish(tmp_path, look, stop, write_s=0.001, log_s=0.0))
    assert status.read(tmp_path) == looks[-1]
    assert stat.S_IMODE(status.path(tmp_path).stat().st_mode) == 0o600
    assert [entry["backlog_records"] for entry in told if entry["event"] == "status"] == [0, 1, 2, 3]
    assert {
        "wal_bytes",
        "wal_written_back",
        "wal_blocked",
        "payload_evictions",
        "payload_reads",
        "ledger_state",
    } <= told[0].keys()


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
        asyncio.run(status.publish(tmp_path, lambda: SEEN, stop, write_s=0.001))
    assert tries == 2
    assert all("No space left" in entry["reason"] for entry in told)


def test_the_terminal_sees_the_figures_and_how_old_they_are() -> None:
    text = "\n".join(status.lines(SEEN, 1001.0))
    for said in (
        "generation 3, pid 77 on login1",
        "12 records (1.0 MiB) not durable",
        "3.0 MiB (SQLite's)",
        "written back 4 times",
    ):
        assert said in text
    assert "moves" not in text
    assert "10,000 are durable and not yet in what reports read" in "\n".join(
        status.lines(msgspec.structs.replace(SEEN, logged_moves=10_000), 1001.0)
    )
    for said in (
        "prevented by a reader 5 times",
        "6.0 MiB of 512.0 MiB",
        "7 samples evicted",
        "8 reads back",
    ):
        assert said in text
    assert "old" not in text
    assert "NO DAEMON SERVES" not in text
    silent = status.lines(SEEN, 1500.0)
    assert (
        silent[0] == "NO DAEMON SERVES: SILENT for 500 s: it stopped, or hangs; the figures are its last ones"
    )
    assert silent[2].startswith(
        "ledger    was OK at 1970-01-01 00:16:40 UTC; 12 records (1.0 MiB) not durable then"
    )
    assert "it hangs;" in status.lines(SEEN, 1500.0, True)[0]
    ill = msgspec.structs.replace(SEEN, ledger_state="DISK_FULL", ledger_reason="database or disk is full")
    assert "DISK_FULL (database or disk is full)" in "\n".join(status.lines(ill, 1001.0))


def test_engines_drain_and_jobs_that_have_left_do_not() -> None:
    """Seen: "9 of them draining" beside five engines. Four had gone, and Slurm had not let go of their jobs."""
    leaving = [job(n, False, DrainKind.DRAINING) for n in range(2)] + [job(2, False, DrainKind.CANCELLED)]
    left = [job(n, True, DrainKind.DRAINING) for n in range(3, 6)] + [job(6, True, DrainKind.CANCELLED)]
    staying = [job(7, False), job(8, False), job(9, True), replace(job(10, True), standby=True)]
    assert status.counted([*leaving, *left, *staying]) == status.JobCounts(
        engines=5, gpus=10, waiting=1, standby_jobs=1, draining=3
    )


def test_where_owners_share_it_says_who_has_how_much() -> None:
    """The most first. What waits or is one owner's alone is not told."""
    held = [replace(job(n, n == 4), owner="chem" if n else "math") for n in range(5)]
    owners = status.of_owners(held)
    assert owners == (status.OwnerGpus("chem", 3, 6), status.OwnerGpus("math", 1, 2))
    assert status.of_owners(held[1:]) == ()
    assert status.of_owners([*held[1:], job(5, False)]) == (), "of a run that has not been heard of yet"
    seen = msgspec.structs.replace(SEEN, harvest=msgspec.structs.replace(HELD, owners=owners))
    assert "owners    chem 3 on 6 GPUs, math 1 on 2 GPUs" in status.lines(seen, 1004.0, True)


def job(number: int, waits: bool, kind: DrainKind = DrainKind.NO) -> OurJob:
    return OurJob(f"scv-{number:016x}", 1, 100 + number, 2, waits, drain_kind=kind)


HELD = Harvest("scavenge", 2, 4, 1, 1, 990.0, 8, 16, 3, "", "max_engines = 2 is reached")


def test_the_terminal_sees_what_is_harvested_who_stopped_it_and_what_a_dead_daemon_left() -> None:
    text = "\n".join(status.lines(msgspec.structs.replace(SEEN, harvest=HELD), 1001.0))
    for said in (
        "harvest   partition scavenge: 2 engines hold 4 GPUs, 1 of them draining, 1 job of ours waits",
        "slurm     seen 11 s ago: 8 GPUs idle, 16 used by other users; 3 jobs of other users wait for GPUs there",
        "decided   max_engines = 2 is reached",
    ):
        assert said in text
    assert "STOPPED" not in text
    assert "scancel" not in text
    spare = msgspec.structs.replace(SEEN, harvest=msgspec.structs.replace(HELD, standby_jobs=4))
    assert "1 job of ours waits and 4 are standby jobs" in "\n".join(status.lines(spare, 1001.0))
    stopped = msgspec.structs.replace(HELD, stopped="scavenger drain: ada: a talk")
    unread = msgspec.structs.replace(
        stopped, stopped="", unread="the stop file (/x) cannot be read: Input/output error"
    )
    assert "NOT KNOWN whether it is stopped: the stop file (/x) cannot be read" in "\n".join(
        status.lines(msgspec.structs.replace(SEEN, harvest=unread), 1001.0)
    )
    unseen = msgspec.structs.replace(
        HELD,
        polls_fail="3 polls of Slurm 27.05.1 in a row failed, the last: squeue State: 'ASLEEP' is not known",
    )
    assert (
        "          POLLS FAIL: 3 polls of Slurm 27.05.1 in a row failed, the last: squeue State: 'ASLEEP'"
        in ("\n".join(status.lines(msgspec.structs.replace(SEEN, harvest=unseen), 1001.0)))
    )
    failing = msgspec.structs.replace(HELD, set_up="engines cannot start, 3 in a row")
    assert "          SET-UP AT FAULT: engines cannot start, 3 in a row" in status.lines(
        msgspec.structs.replace(SEEN, harvest=failing), 1001.0
    )
    drained = {"gpu2": "gpu2 is drained by scavenger drain --node: cables", "gpu9": "gpu9 is drained"}
    closed = status.closed_nodes({"gpu3": "3 engines died on it"}, drained, {"gpu2", "gpu3"})
    said_of_nodes = status.lines(
        msgspec.structs.replace(SEEN, harvest=msgspec.structs.replace(HELD, closed=closed)), 1001.0
    )
    assert [line.strip() for line in said_of_nodes if "NO ENGINE" in line] == [
        "NO ENGINE: gpu2 is drained by scavenger drain --node: cables",
        "NO ENGINE: gpu3 is quarantined: 3 engines died on it",
        "NO ENGINE: gpu9 is drained (NO NODE HAS THIS NAME in Slurm)",
    ]
    assert status.closed_nodes({}, drained, None) == tuple(drained.values()), "not polled yet"
    many = {f"gpu{i:02}": "died" for i in range(status.CLOSED_SHOWN + 2)}
    assert status.closed_nodes(many, {}, set(many))[-1] == "and 2 nodes more"
    assert "STOPPED by scavenger drain: ada: a talk" in "\n".join(
        status.lines(msgspec.structs.replace(SEEN, harvest=stopped), 1001.0)
    )
    late = msgspec.structs.replace(
        HELD, polls_late="118 s since the last whole poll where 66 s were promised: why"
    )
    assert "          BEHIND: 118 s since the last whole poll where 66 s" in "\n".join(
        status.lines(msgspec.structs.replace(SEEN, harvest=late), 1001.0)
    )
    died = "\n".join(status.lines(msgspec.structs.replace(SEEN, harvest=HELD), 1001.0, False))
    assert "2 engines held 4 GPUs" in died
    assert "scancel -u $USER -p scavenge" in died
    not_polled = msgspec.structs.replace(SEEN, harvest=msgspec.structs.replace(HELD, seen_at=0.0))
    assert "slurm     not seen yet" in status.lines(not_polled, 1001.0)
    assert "scavenge" not in "\n".join(status.lines(SEEN, 1001.0)), (
        "one that does not harvest says nothing of it"
    )


def test_the_log_tells_what_is_harvested_when_it_changed(tmp_path: Path) -> None:
    stop, looks = (
        asyncio.Event(),
        iter([HELD, msgspec.structs.replace(HELD, idle=7), msgspec.structs.replace(HELD, engines=1, gpus=2)]),
    )

    def look() -> Status:
        harvest = next(looks)
        if harvest.engines == 1:
            stop.set()
        return msgspec.structs.replace(SEEN, harvest=harvest)

    with capture_logs() as told:
        asyncio.run(status.publish(tmp_path, look, stop, write_s=0.001))
    assert [
        (entry["engines"], entry["gpus"], entry["because"]) for entry in told if entry["event"] == "harvest"
    ] == [(2, 4, "max_engines = 2 is reached"), (1, 2, "max_engines = 2 is reached")]


def test_a_daemon_that_ended_or_died_does_not_serve() -> None:
    assert status.absent(SEEN, 1001.0, True) == status.absent(SEEN, 1001.0, None) == ""
    assert "DIED: no process 77 is left on login1" in status.absent(SEEN, 1001.0, False)
    ended = msgspec.structs.replace(
        SEEN, state="FENCED", reason="another daemon owns this ledger now", stopped_at=1000.5
    )
    # Its number may have been given to another process.
    assert (
        status.absent(ended, 1001.0, True)
        == "FENCED (another daemon owns this ledger now), stopped at 1970-01-01 00:16:40 UTC"
    )


def test_postgres_has_no_log_of_sqlites() -> None:
    text = "\n".join(status.lines(msgspec.structs.replace(SEEN, database="postgresql"), 1001.0))
    assert "SQLite" not in text
    assert "payloads" in text


def test_the_last_word_of_an_older_daemon_does_not_replace_a_newer_ones(tmp_path: Path) -> None:
    status.write(tmp_path, msgspec.structs.replace(SEEN, generation=4))
    status.write_last(tmp_path, msgspec.structs.replace(SEEN, state="FENCED"))
    assert (status.read(tmp_path).generation, status.read(tmp_path).state) == (4, "SERVING")
    status.write_last(tmp_path, msgspec.structs.replace(SEEN, generation=4, state="CLOSED"))
    assert status.read(tmp_path).state == "CLOSED"


def test_a_write_that_is_cancelled_is_over_before_the_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()
    write = status.write

    def slow(state_dir: Path, seen: Status) -> None:
        begun.set()
        assert go.wait(20)
        write(state_dir, seen)

    async def play() -> None:
        monkeypatch.setattr(status, "write", slow)
        telling = asyncio.create_task(status.publish(tmp_path, lambda: SEEN, asyncio.Event()))
        await asyncio.to_thread(begun.wait, 20)
        telling.cancel()
        asyncio.get_running_loop().call_later(0.05, go.set)
        with pytest.raises(asyncio.CancelledError):
            await telling
        assert status.path(tmp_path).exists()

    asyncio.run(play())


def test_without_a_daemon_the_remedy_is_named(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnavailable, match="scavenger daemon"):
        status.read(tmp_path)


@pytest.mark.parametrize(
    "text", [b'{"at": 1}', b"null", b"[]", b"", b"\xff", b'{"host": "\xff"}', b'{"x":' * 100_000]
)
def test_a_file_that_is_no_status_is_said_to_be_none_and_a_daemon_that_ends_replaces_it(
    tmp_path: Path, text: bytes
) -> None:
    status.path(tmp_path).write_bytes(text)
    with pytest.raises(DaemonUnavailable, match="cannot be read"):
        status.read(tmp_path)
    status.write_last(tmp_path, SEEN)
    assert status.read(tmp_path) == SEEN


@pytest.mark.parametrize("at", [1e18, -1e18, 1e300])
def test_a_status_of_a_time_that_is_none_is_shown_all_the_same(at: float) -> None:
    told = msgspec.structs.replace(SEEN, started_at=at, at=at)
    assert "no time" in "\n".join(status.lines(told, 1.0, False))


def play_daemon(tmp_path: Path, *, fenced: bool) -> tuple[Status, Status, Result, Result]:
    """A daemon's life on a ledger of its own: its status while it serves and after, and the command's answers then."""
    state_dir, config = tmp_path / "state", tmp_path / "scavenger.toml"
    keys.init_state(state_dir, "ada")
    document: dict[str, dict[str, Any]] = {
        "daemon": {"state_dir": str(state_dir)},
        "harvest": {"enabled": False},
    }
    config.write_text(toml.dumps(document))
    settings = DaemonConfig.model_validate(document)

    def ask() -> Result:
        return CliRunner().invoke(app, ["status", "--config", str(config)])

    async def play() -> tuple[Status, Result]:
        served = main.Daemon(settings, None)
        running = asyncio.create_task(served.run())
        try:
            seen = await until_written(state_dir)
            # The command runs in the daemon's own process here, so the process that it looks for is there.
            return seen, await asyncio.to_thread(ask)
        finally:
            if fenced:
                store_engine = store.open_engine(settings.ledger_url)
                grant_generation(store_engine, "elsewhere", 1, "v", time.time())
                store_engine.dispose()
                served.server.write([Event("noticed", 0, "", "", "{}", time.time())])
            else:
                served.stop.set()
            with pytest.raises(Fenced) if fenced else contextlib.nullcontext():
                async with asyncio.timeout(20):
                    await running

    serving, while_serving = asyncio.run(play())
    return serving, status.read(state_dir), while_serving, ask()


def test_a_daemon_tells_of_its_ledger_and_of_its_end(tmp_path: Path) -> None:
    serving, last, then, after = play_daemon(tmp_path, fenced=False)
    assert (serving.generation, serving.ledger_state, serving.payload_bound_bytes) == (1, "OK", 512 * 2**20)
    assert serving.started_at <= serving.at
    assert (serving.state, serving.stopped_at, serving.database) == ("SERVING", None, "sqlite")
    assert then.exit_code == 0, then.output
    assert "generation 1" in then.output
    assert last.state == last.ledger_state == "CLOSED"
    assert last.stopped_at is not None
    assert after.exit_code == 1
    assert "NO DAEMON SERVES: CLOSED, stopped at" in after.output


def test_a_directory_of_users_that_fails_while_the_daemon_runs_ends_no_poll(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop asks LDAP for nobody: one that is away has no entry for anybody, and one that is slow stops the loop."""
    keys.init_state(tmp_path / "state", "ada")
    pace = {"poll_interval_s": 0.2, "fast_poll_interval_s": 0.1, "min_poll_interval_s": 0.0}
    document: dict[str, dict[str, Any]] = {
        "daemon": {"state_dir": str(tmp_path / "state")},
        "cluster": pace | {"max_rpc_per_min": 60_000.0},
    }

    def unknown(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    with LocalServer(tmp_path / "local") as server:
        served = main.Daemon(DaemonConfig.model_validate(document), server.cluster())

        async def play() -> None:
            running = asyncio.create_task(served.run())
            async with asyncio.timeout(20):
                while served.harvester is None:
                    assert not running.done(), running.result()
                    await asyncio.sleep(0.01)
                monkeypatch.setattr(pwd, "getpwuid", unknown)
                seen = set[float]()
                while len(seen) < 4:
                    assert not running.done(), running.result()
                    if served.harvester.view is not None:
                        seen.add(served.harvester.view.observed_at)
                    await asyncio.sleep(0.01)
                served.stop.set()
                await running

        asyncio.run(play())


@pytest.mark.parametrize(
    ("sole_user", "consequence"), [(True, "only when Slurm preempts them"), (False, "nothing is harvested")]
)
def test_a_daemon_that_may_not_see_others_jobs_says_that_it_yields_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sole_user: bool, consequence: str
) -> None:
    state_dir, config = tmp_path / "state", tmp_path / "scavenger.toml"
    keys.init_state(state_dir, "ada")
    document: dict[str, dict[str, Any]] = {
        "daemon": {"state_dir": str(state_dir)},
        "harvest": {"sole_user": sole_user},
    }
    config.write_text(toml.dumps(document))
    with LocalServer(tmp_path / "local") as server:
        cluster = server.cluster()
        public = cluster.info()
        monkeypatch.setattr(cluster, "info", lambda: dataclasses.replace(public, private=frozenset({"jobs"})))
        served = main.Daemon(DaemonConfig.model_validate(document), cluster)

        async def play() -> None:
            running = asyncio.create_task(served.run())
            async with asyncio.timeout(20):
                while served.harvester is None or not served.harvester.stop_state.hidden:
                    assert not running.done(), running.result()
                    await asyncio.sleep(0.01)
                served.stop.set()
                await running

        asyncio.run(play())
    last = status.read(state_dir)
    assert (bool(last.hidden), last.blind) == (True, not sole_user)
    (line,) = [
        line
        for line in status.lines(msgspec.structs.replace(last, state="SERVING"), last.at, True)
        if line.startswith("yielding")
    ]
    assert "OFF: PrivateData hides jobs" in line
    assert consequence in line
    assert "yielding  was OFF" in CliRunner().invoke(app, ["status", "--config", str(config)]).output
    assert not any("yielding" in line for line in status.lines(SEEN, SEEN.at, True)), (
        "it is said only where it is so"
    )


def test_a_fenced_daemon_says_so_at_its_end(tmp_path: Path) -> None:
    _, last, _, after = play_daemon(tmp_path, fenced=True)
    assert last.state == "FENCED"
    assert "generation 1 of the ledger is over" in last.reason
    assert after.exit_code == 1
    assert "NO DAEMON SERVES: FENCED" in after.output
    assert "ledger    OK" not in after.output


@pytest.mark.parametrize(
    ("engines", "gpus", "connected", "connected_gpus"),
    [(0, 0, 2, 2), (4, 4, 0, 0)],
    ids=["started since", "left since"],
)
def test_between_two_polls_it_says_what_was_held_then_and_who_is_connected_now(
    engines: int, gpus: int, connected: int, connected_gpus: int
) -> None:
    """It said 0 GPUs for minutes while two engines worked, and 4 for 14 s after all had left."""
    held = msgspec.structs.replace(
        HELD, engines=engines, gpus=gpus, connected=connected, connected_gpus=connected_gpus
    )
    seen = msgspec.structs.replace(SEEN, at=1002.0, harvest=held)
    line = status.lines(seen, 1004.0, True)[1]
    assert f"{engines} engines held {gpus} GPUs at the last poll, 14 s ago; " in line
    assert f"connected 2 s ago: {connected} engines on {connected_gpus} GPUs" in line


def test_where_slurm_and_engines_agree_it_says_it_once() -> None:
    seen = msgspec.structs.replace(SEEN, harvest=msgspec.structs.replace(HELD, connected=2, connected_gpus=4))
    assert "2 engines hold 4 GPUs, 1 of them draining, 1 job of" in status.lines(seen, 1004.0, True)[1]


def test_one_engine_on_one_gpu_is_said_in_the_singular() -> None:
    one = msgspec.structs.replace(HELD, engines=1, gpus=1, draining=0, waiting=0, standby_jobs=1)
    line = status.lines(msgspec.structs.replace(SEEN, harvest=one), 1004.0, True)[1]
    assert "1 engine holds 1 GPU, 0 jobs of ours wait and 1 is a standby job" in line


def test_the_terminal_says_when_descriptors_are_few_and_when_strangers_were_cut_off() -> None:
    few = msgspec.structs.replace(SEEN, open_files=900, open_files_limit=1024)
    assert "900 of 1,024 files open, FEW ARE LEFT: raise the limit" in "\n".join(status.lines(few, 1001.0))
    cut = msgspec.structs.replace(
        SEEN, open_files=90, open_files_limit=65536, ended_connections=1400, unproven_connections=96
    )
    said = "\n".join(status.lines(cut, 1001.0))
    assert "90 of 65,536 files open; 1,400 connections without a key ended, 96 there" in said
    assert "sockets" not in "\n".join(status.lines(SEEN, 1001.0))


def test_what_trainer_and_engines_hold_of_the_gpus_that_they_share_is_shown() -> None:
    shared = status.SharedGpus("r", True, 3 * 2**30, 2**20, asleep=1, holding=2)
    found = status.lines(msgspec.structs.replace(SEEN, gpu_memory=(shared,)), 1001.0)
    assert (
        "memory    run r: reserved engines are to generate; 2 hold their memory, 1 sleep with 1.0 MiB; the ranks kept 3,072.0 MiB "
        "when they last had engines woken"
    ) in found


def test_the_time_that_engines_made_nothing_at_a_change_of_version_is_shown() -> None:
    pauses = (status.WeightsPause("r", 3, 1.25, 4.0), status.WeightsPause("s", 1, 2.0, 2.0))
    found = status.lines(msgspec.structs.replace(SEEN, weights_pauses=pauses), 1001.0)
    said = "from the last token under one version to the first under the next"
    assert f"weights   run r: {said}, 1.2 s, 4.0 s at most (3 engines, each its last time)" in found
    assert f"weights   run s: {said}, 2.0 s, 2.0 s at most (1 engine, each its last time)" in found


def test_what_engines_drafted_is_shown() -> None:
    drafts = (status.Speculation("r", 12_000, 9_000, 4_500, 700),)
    found = status.lines(msgspec.structs.replace(SEEN, speculation=drafts), 1001.0)
    assert (
        "drafts    run r: 9,000 of 12,000 tokens accepted in 4,500 verifications, 3.00 tokens each; 700 "
        "siblings' tokens sent between engines" in found
    )
