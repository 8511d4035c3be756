"""What every user of the site reads of the daemon: nothing of another user's, and enough to see why there are no more engines."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from scavenger import toml
from scavenger.cli import show_status
from scavenger.client import Client
from scavenger.cluster.local.client import LocalServer
from scavenger.errors import AuthError, DaemonUnavailable
from scavenger.observe import public_status, status
from scavenger.observe.public_status import PublicHarvest, PublicStatus
from scavenger.observe.status import ClusterNow, Harvest
from scavenger.observe.training import TrainingJob
from scavenger.protocol import keys
from tests.clusters import wait_for
from tests.harvest.world import layout
from tests.observe.test_status import SEEN as OWN
from tests.test_daemon_start import running, site
from tests.test_flood import open_run
from tests.test_joining import U1, as_user

#: A run, a user, a job, a node, a path: in every text of the daemon's own status.
PLANTED = "planted-run of planted-user, job 4711 on planted-node, /planted/path"
HARVEST = Harvest(
    "scavenge",
    engines=3,
    gpus=6,
    waiting=2,
    draining=1,
    seen_at=990.0,
    idle=5,
    gpus_other_users=12,
    jobs_pending_other_users=4,
    stopped=PLANTED,
    concluded=PLANTED,
    set_up=PLANTED,
    polls_fail=PLANTED,
    unread=PLANTED,
    standby_jobs=1,
    connected=2,
    connected_gpus=4,
    polls_late=PLANTED,
    public="8 engines wanted, 3 run, 2 wait; max_engines = 8 is reached",
    drained=2,
)
SECRET = msgspec.structs.replace(
    OWN,
    host="planted-host",
    reason=PLANTED,
    ledger_reason=PLANTED,
    hidden=PLANTED,
    metrics="planted-host:1",
    harvest=HARVEST,
    training=(TrainingJob(PLANTED, 4711, PLANTED, PLANTED),),
    clusters=(ClusterNow("b", 1.0, PLANTED, False, HARVEST), ClusterNow("c", 0.0, "", False)),
)
SEEN = public_status.of(SECRET)


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that every user may enter."""
    made = Path(tempfile.mkdtemp(prefix="scv-public-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def ask(folder: Path) -> subprocess.CompletedProcess[str]:
    """`scavenger status` of a user who joined the site of `folder`, and has no configuration."""
    home = folder / "home"
    (home / ".config/scavenger").mkdir(parents=True, exist_ok=True)
    keys.write_private(home / ".config/scavenger/site", f"{folder / 'public'}\n".encode())
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SCAVENGER", "XDG"))}
    return subprocess.run(
        [sys.executable, "-m", "scavenger", "status"],
        cwd=home,
        env=env | {"HOME": str(home)},
        text=True,
        capture_output=True,
        timeout=60,
    )


def test_nothing_of_another_user_s_is_in_it_and_what_all_may_know_is(tmp_path: Path) -> None:
    public_status.write(tmp_path, SEEN)
    path = public_status.path(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    text = path.read_text()
    assert "planted" in msgspec.json.encode(SECRET).decode(), "else the next line cannot fail"
    assert "planted" not in text
    assert "4711" not in text
    assert public_status.read(tmp_path) == SEEN
    found = PublicHarvest("scavenge", 990.0, 5, 6, 12, 2, 1, 2, True, 2, True, True, HARVEST.public)
    assert SEEN.harvest == found
    assert [(one.name, one.harvest) for one in SEEN.clusters] == [("b", found), ("c", None)]
    said = "\n".join(public_status.lines(tmp_path, SEEN, 1002.0))
    assert "2 s old" in said
    assert "2 engines of all runs running, 1 starting, 2 pending" in said
    assert "seen 12 s ago: 5 GPUs idle, 6 harvested, 12 used by other users" in said
    assert "decided   8 engines wanted, 3 run, 2 wait; max_engines = 8 is reached" in said
    for word in ("STOPPED", "2 nodes drained", "SET-UP AT FAULT", "POLLS FAIL", "cluster   c: not heard yet"):
        assert word in said
    assert "NO DAEMON" not in said


def test_the_largest_one_is_read_whole(tmp_path: Path) -> None:
    """Also where a further cluster counts what no reader takes."""
    most = msgspec.structs.replace(
        HARVEST, partition='"' * 500, public="\u20ac\n" * 500, seen_at=1e300, idle=10**18, gpus=-1
    )
    clusters = tuple(ClusterNow(f"{n:032}", 1.0, "", False, most) for n in range(40))
    seen = public_status.of(msgspec.structs.replace(SECRET, harvest=most, clusters=clusters))
    public_status.write(tmp_path, seen)
    assert public_status.path(tmp_path).stat().st_size < 16 * 1024
    assert public_status.read(tmp_path) == seen
    assert len(seen.clusters) == public_status.MOST_CLUSTERS
    assert all(len(line) < 400 for line in public_status.lines(tmp_path, seen, 1000.0))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"\xff",
        b'{"x":' * 100_000,
        msgspec.json.encode(SEEN)[:-1],
        msgspec.json.encode(SEEN).replace(b'"gpus_idle":5', b'"gpus_idle":-5'),
        msgspec.json.encode(SEEN).replace(b'"gpus_idle":5', b'"gpus_idle":1e999'),
        msgspec.json.encode(SEEN).replace(b'"at":1000.0', b'"at":1e300'),
        msgspec.json.encode(SEEN).replace(b"SERVING", b"\\u001b[2J"),
        msgspec.json.encode(SEEN).replace(b"8 engines wanted", b"x" * 1000),
    ],
)
def test_a_file_that_is_no_public_status_is_one_error(tmp_path: Path, text: bytes) -> None:
    public_status.path(tmp_path).write_bytes(text)
    with pytest.raises(DaemonUnavailable, match="is no public status") as raised:
        public_status.read(tmp_path)
    assert "\n" not in raised.value.cause
    public_status.write_last(tmp_path, SEEN)
    assert public_status.read(tmp_path) == SEEN, "the daemon replaces it"


def test_what_is_no_file_and_what_others_may_write_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnavailable, match="no daemon has written"):
        public_status.read(tmp_path)
    public_status.path(tmp_path).mkdir()
    with pytest.raises(DaemonUnavailable, match="cannot be read"):
        public_status.read(tmp_path)
    public_status.path(tmp_path).rmdir()
    public_status.write(tmp_path, SEEN)
    public_status.path(tmp_path).chmod(0o666)
    with pytest.raises(AuthError, match="can be written by others"):
        public_status.read(tmp_path)


def test_a_hostile_sentence_drives_no_terminal(tmp_path: Path) -> None:
    assert SEEN.harvest is not None
    hostile = msgspec.structs.replace(SEEN.harvest, why="\x1b[2J\u202e", partition="\x9b")
    said = public_status.lines(tmp_path, msgspec.structs.replace(SEEN, harvest=hostile), 1000.0)
    assert not set("".join(said)) & set("\x1b\x9b\u202e")


@pytest.mark.parametrize(
    ("state", "at", "why"),
    [
        ("SERVING", 969.0, "SILENT for 31 s: the daemon may be down"),
        ("SERVING", 1031.0, "one of two clocks is wrong"),
        ("CLOSED", 1000.0, "CLOSED, since 1970-01-01 00:16:40 UTC"),
        ("SERVING", 971.0, ""),
    ],
)
def test_a_stale_file_says_that_the_daemon_may_be_down(
    tmp_path: Path, state: public_status.State, at: float, why: str
) -> None:
    seen = PublicStatus(at, 1, state, None)
    assert why in public_status.absent(seen, 1000.0)
    assert bool(why) == bool(public_status.absent(seen, 1000.0))
    first, *_, last = public_status.lines(tmp_path, seen, 1000.0)
    assert ("NO DAEMON SERVES" in first and why in first) == bool(why)
    assert "harvest.enabled = false" in last


def test_the_last_word_of_an_older_daemon_does_not_replace_a_newer_ones(tmp_path: Path) -> None:
    newer = msgspec.structs.replace(SEEN, generation=SEEN.generation + 1)
    public_status.write(tmp_path, newer)
    public_status.write_last(tmp_path, SEEN)
    assert public_status.read(tmp_path) == newer


def test_it_is_written_when_it_changed_and_now_and_then_and_a_folder_that_is_full_ends_nothing(
    tmp_path: Path,
) -> None:
    looks, writes = 0, set[float]()

    def look() -> PublicStatus:
        nonlocal looks
        if public_status.path(tmp_path).is_file():
            writes.add(public_status.read(tmp_path).at)
        looks += 1
        if looks == 12:
            stop.set()
        return msgspec.structs.replace(SEEN, at=float(looks), generation=3 + looks // 6)

    stop = asyncio.Event()
    asyncio.run(public_status.publish(tmp_path, look, stop, check_s=0.001, write_s=600.0))
    assert public_status.read(tmp_path).at == 12.0
    assert writes == {1.0, 6.0}, "the first, and the one at which the generation changed"
    looks, stop = 8, asyncio.Event()
    asyncio.run(public_status.publish(tmp_path, look, stop, check_s=0.001, write_s=0.0))
    assert {9.0, 10.0, 11.0} <= writes
    (tmp_path / "file").touch()
    looks, stop = 8, asyncio.Event()
    with capture_logs() as told:
        asyncio.run(public_status.publish(tmp_path / "file", look, stop, check_s=0.001, write_s=0.0))
    assert {one["event"] for one in told} == {"public status not written; tried again"}


def test_a_public_folder_that_hangs_does_not_keep_the_daemon_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, released = threading.Event(), threading.Event()

    def hang(public_dir: Path, seen: PublicStatus) -> None:
        begun.set()
        released.wait(60.0)

    monkeypatch.setattr(public_status, "write", hang)
    monkeypatch.setattr(public_status, "LEAST_S", 0.05)

    async def ended() -> bool:
        task = asyncio.create_task(public_status.publish(tmp_path, lambda: SEEN, asyncio.Event()))
        assert await asyncio.to_thread(begun.wait, 30.0)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=20.0)
        released.set()
        return bool(done)

    assert asyncio.run(ended())


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user: needs root")
def test_another_user_reads_it(folder: Path) -> None:
    public_status.write(folder, SEEN)

    def read() -> None:
        assert public_status.read(folder) == SEEN
        with pytest.raises(PermissionError):
            public_status.write(folder, SEEN)

    assert as_user(U1, read) == ""


def test_a_user_without_a_configuration_sees_why_a_real_daemon_starts_no_more(tmp_path: Path) -> None:
    stop_file = tmp_path / "stop"
    pace = {"poll_interval_s": 0.3, "fast_poll_interval_s": 0.2, "min_poll_interval_s": 0.0}
    with LocalServer(tmp_path / "cluster", layout()) as server:
        config = site(
            tmp_path,
            daemon={"public_dir": str(tmp_path / "public")},
            cluster=pace | {"backend": "local", "local_dir": str(server.dir), "max_rpc_per_min": 6000.0},
            harvest={"partition": "scavenge", "max_engines": 0, "stop_file": str(stop_file)},
            router={"policy": "standard"},
        )
        with running(config) as daemon:
            daemon.until("event=serving")
            with Client.connect(tmp_path / "state", connect_timeout_s=60.0) as client:
                open_run(client, "planted-run", harvest=True)
                told = tmp_path / "public" / public_status.FILE
                wait_for("the decision is told", lambda: told.exists() and "max_engines" in told.read_text())
                shown = ask(tmp_path)
                assert shown.returncode == 0, shown.stderr
                assert f"public    what {told} tells all users" in shown.stdout
                assert "decided   " in shown.stdout
                assert "max_engines = 0 is reached" in shown.stdout
                stop_file.write_text("planted-user wants the GPUs")
                wait_for("that it is stopped is told", lambda: '"stopped":true' in told.read_text())
                seen = public_status.read(told.parent)
                assert "STOPPED by the site's admin" in "\n".join(
                    public_status.lines(told.parent, seen, seen.at)
                )
            daemon.process.terminate()
            assert daemon.ended(30.0) == 0
    own = status.path(tmp_path / "state").read_text()
    assert "planted-user" in own
    assert "planted-run" in own
    assert "planted" not in told.read_text()
    shown = ask(tmp_path)
    assert shown.returncode == 1
    assert "NO DAEMON SERVES: CLOSED, since" in shown.stdout
    told.write_bytes(b"null")
    shown = ask(tmp_path)
    assert (shown.returncode, shown.stdout) == (1, "")
    assert "is no public status" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_which_of_the_two_a_user_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    absent, config, state = Path("absent.toml"), tmp_path / "scavenger.toml", tmp_path / "state"
    assert show_status._public_dir(absent, named=False) is None, "no site was joined"
    keys.note_site(tmp_path / "joined")
    assert show_status._public_dir(absent, named=False) == tmp_path / "joined"
    assert show_status._public_dir(absent, named=True) is None, "a mistaken name is an error"
    keys.init_state(state, "ada")
    config.write_text(toml.dumps({"daemon": {"state_dir": str(state), "public_dir": "public"}}))
    assert show_status._public_dir(config, named=True) is None, "the daemon's own user"
    status.write(state, OWN)
    assert show_status._public_dir(config, named=True) is None
    access = os.access  # for root every file can be read
    monkeypatch.setattr(os, "access", lambda path, mode: path != status.path(state) and access(path, mode))
    assert show_status._public_dir(config, named=True) == tmp_path / "public"
    monkeypatch.setattr(os, "access", lambda path, mode: path != config and access(path, mode))
    assert show_status._public_dir(config, named=True) == tmp_path / "joined"
