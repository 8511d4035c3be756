"""A user of the site who is not the daemon's asks to own runs. Real uids, by processes that become them: needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from scavenger import toml
from scavenger.cli.init import _known_state_dir, _name_is_free
from scavenger.cli.join import join
from scavenger.client import Connection
from scavenger.config.site import OwnersSection
from scavenger.daemon.key_requests import (
    CHECK_S,
    GONE_S,
    MOST_KEYS,
    KeyRequests,
    User,
    UserDirectory,
    admission,
    refusal,
)
from scavenger.errors import AuthError, ConfigError, DaemonUnavailable, Refused, ScavengerError
from scavenger.host import munge
from scavenger.protocol import key_requests, keys, messages
from scavenger.protocol.key_requests import KeyRequest, new_request

U1, U2, NOBODY = 61_001, 61_002, 65_534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users: needs root")


def as_user(uid: int, work: Callable[[], object]) -> str:
    """What went wrong in a process of that user that does this, "" = nothing. It has no other rights than that user's."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = ""
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            os.umask(0o077)
            work()
        except ScavengerError as error:
            said = f"{type(error).__name__}: {error}"
        except BaseException:  # noqa: BLE001  whatever it is, this process must not go on as a test
            said = traceback.format_exc()
        os.write(writing, said.encode()[:4000] or b"")
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        said = file.read().decode()
    os.waitpid(child, 0)
    return said


@pytest.fixture
def site() -> Iterator[Path]:
    """A folder that every user may enter."""
    folder = Path(tempfile.mkdtemp(prefix="scv-join-"))
    folder.chmod(0o755)
    for uid in (U1, U2, NOBODY):
        (folder / f"home-{uid}").mkdir(mode=0o700)
        os.chown(folder / f"home-{uid}", uid, uid)
    yield folder
    shutil.rmtree(folder)


OF_GROUPS = OwnersSection(groups=("ml", "70"))


class Site:
    """A daemon's end, polled by hand. `users`: the site's directory."""

    def __init__(self, folder: Path, owners: OwnersSection = OF_GROUPS, munge_socket: str = "") -> None:
        self.public, self.state = folder / "public", folder / "state"
        keys.init_state(self.state, "scavenger")
        key_requests.make_public(self.public)
        self.users: dict[int, User] = {
            U1: User(U1, "u1", frozenset({7, 70})),
            U2: User(U2, "u2", frozenset({70})),
        }
        self.groups = {"ml": 7, "nogroup": 65_534, "other": 9}
        self.now = 0.0
        self.requests = KeyRequests(
            self.state,
            self.public,
            owners,
            lambda: self.now,
            UserDirectory(lambda uid: self.users.get(uid), lambda name: self.groups.get(name)),
            munge_socket,
        )
        self.last = KeyRequest("k" * 40, "0" * 16)

    def ask(self, uid: int, public: str, *, only: bool = False) -> None:
        self.last = request = new_request(public, only=only)
        assert as_user(uid, lambda: key_requests.ask(self.public, request)) == ""

    def answered(self, uid: int) -> key_requests.KeyReply:
        self.requests.send(self.requests.poll())
        found = key_requests.read_reply(self.public, uid, self.last)
        assert found is not None
        return found

    def join(self, uid: int, *, only: bool = False) -> str:
        """A fresh key of that user, accepted."""
        public = keys.generate().public
        self.ask(uid, public, only=only)
        assert self.answered(uid).refused == ""
        return public

    def check(self) -> dict[str, str]:
        """The keys in force, once it was checked who is admitted."""
        self.now += CHECK_S
        self.requests.poll()
        return keys.enrolled_owners(self.state)


@pytest.fixture
def daemon(site: Path) -> Site:
    return Site(site)


def test_a_member_of_a_group_is_enrolled_under_the_unix_name_and_a_stranger_is_told_whom_to_ask(
    daemon: Site,
) -> None:
    mine = keys.generate().public
    daemon.ask(U1, mine)
    assert daemon.answered(U1) == key_requests.KeyReply(daemon.last.nonce, "u1")
    assert keys.enrolled_owners(daemon.state)[mine] == mine
    daemon.ask(NOBODY, keys.generate().public)
    given = daemon.answered(NOBODY)
    assert ("knows no user 65534" in given.refused, "site's admin" in given.remedy) == (True, True)
    daemon.users[NOBODY] = User(NOBODY, "nobody", frozenset({65_534}))
    daemon.ask(NOBODY, keys.generate().public)
    assert daemon.answered(NOBODY).refused == "nobody may not own runs"
    assert set(keys.owner_keys(daemon.state)) == {"scavenger", "u1"}
    assert not list(key_requests.requests_dir(daemon.public).iterdir()), "every request was taken"


def test_no_user_can_speak_for_another(daemon: Site, site: Path) -> None:
    hers = keys.generate().public
    daemon.ask(U2, hers)
    assert daemon.answered(U2).refused == ""
    folder = key_requests.requests_dir(daemon.public)
    evil = keys.generate().public
    letter = site / f"home-{U2}" / "letter"  # a file of u2's that u1 can read

    def write_letter() -> None:
        letter.parent.chmod(0o755)
        letter.write_bytes(b'{"public":"%s","nonce":"%s","only":true}' % (evil.encode(), b"0" * 16))
        letter.chmod(0o644)

    assert as_user(U2, write_letter) == ""

    def attack() -> None:
        (folder / "soft").symlink_to(letter)
        with contextlib.suppress(PermissionError):  # where the kernel protects hard links
            os.link(letter, folder / "hard")
        os.mkfifo(folder / "fifo")
        (folder / "large").write_bytes(b" " * 100_000)
        (folder / "folder").mkdir()
        (folder / "nonsense").write_text('{"public": 7}')
        with pytest.raises(PermissionError):
            list(folder.iterdir())
        with pytest.raises(PermissionError):
            (daemon.public / "rendezvous.json").write_text("{}")
        with pytest.raises(PermissionError):
            key_requests.reply_path(daemon.public, U2).write_text("{}")

    assert as_user(U1, attack) == ""
    daemon.ask(U1, hers)  # her public key is no secret
    assert daemon.answered(U1).refused == "the key is another owner's"
    assert evil not in keys.enrolled_owners(daemon.state)
    assert keys.enrolled_owners(daemon.state)[hers] == hers
    assert not list(folder.iterdir())


@pytest.mark.parametrize("mode", [0o644, 0o664])
def test_a_file_of_anothers_that_was_moved_there_is_no_request(daemon: Site, site: Path, mode: int) -> None:
    """Whoever may write in a folder moves others' files out of it: the owner stays, the words may be anybody's."""
    mine, hers = daemon.join(U2), keys.generate().public
    shared = site / "shared"
    shared.mkdir()
    shared.chmod(0o777)

    def copies() -> None:
        (shared / "copy").write_bytes(
            b'{"public":"%s","nonce":"%s","only":true}' % (hers.encode(), b"0" * 16)
        )
        (shared / "copy").chmod(mode)

    assert as_user(U2, copies) == ""
    request = key_requests.requests_dir(daemon.public) / "moved"
    daemon.ask(U2, mine)
    os.utime(shared / "copy", (time.time() + 60.0,) * 2)
    assert as_user(U1, lambda: os.rename(shared / "copy", request)) == ""
    assert request.stat().st_uid == U2
    assert daemon.answered(U2).refused == "", "her own request, though it is the older one"
    assert (hers in keys.enrolled_owners(daemon.state), mine in keys.enrolled_owners(daemon.state)) == (
        False,
        True,
    )
    assert not request.exists()


@pytest.mark.parametrize("text", [b"null", b'{"public": "\xff"}', b"\xff", b"[" * 2000])
def test_a_request_that_is_none_of_its_kind_is_not_answered(daemon: Site, text: bytes) -> None:
    folder = key_requests.requests_dir(daemon.public)

    def writes() -> None:
        (folder / "nonsense").write_bytes(text)

    assert as_user(U2, writes) == ""
    assert daemon.requests.poll() == []
    assert not list(folder.iterdir())


def test_a_request_that_others_may_write_is_none(daemon: Site) -> None:
    folder = key_requests.requests_dir(daemon.public)

    def writes() -> None:
        (folder / "loose").write_bytes(
            b'{"public":"%s","nonce":"%s"}' % (keys.generate().public.encode(), b"0" * 16)
        )
        (folder / "loose").chmod(0o666)

    assert as_user(U2, writes) == ""
    assert daemon.requests.poll() == []


def test_a_user_of_the_daemons_own_group_may_not_join(daemon: Site) -> None:
    daemon.users[U1] = User(U1, "u1", frozenset({7, os.getegid()}))
    daemon.ask(U1, keys.generate().public)
    reply = daemon.answered(U1)
    assert ("under which the daemon runs" in reply.refused, "a group of its own" in reply.remedy) == (
        True,
        True,
    )


@pytest.fixture
def munged(site: Path) -> Iterator[str]:
    """A munged of this test's own: its socket."""
    program = shutil.which("munged", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if program is None:
        pytest.skip("no munged here: apt-get install munge")
    folder = site / "munge"
    folder.mkdir(mode=0o755)
    keys.write_private(folder / "key", os.urandom(1024))
    files = [
        f"--{what}={folder / what}" for what in ("key-file", "socket", "pid-file", "log-file", "seed-file")
    ]
    files[0] = f"--key-file={folder / 'key'}"
    process = subprocess.Popen([program, "--foreground", "--force", *files], stderr=subprocess.DEVNULL)
    try:
        until(lambda: (folder / "socket").exists())
        yield str(folder / "socket")
    finally:
        process.terminate()
        process.wait(30)


def test_a_request_is_proved_by_a_credential_of_the_users_own(site: Path, munged: str) -> None:
    daemon = Site(site, OwnersSection(users=("u1", "u2"), proof="munge"), munged)

    def asked(uid: int, made_by: int | None, of: KeyRequest | None = None) -> str:
        """What is replied to a request of `uid`'s with a credential that this user made, over its claim or another request's."""
        daemon.last = request = new_request(keys.generate().public)
        proof = site / f"proof-{request.nonce}"
        proof.touch()
        proof.chmod(0o666)
        if made_by is not None:
            claim = (of or request).claim
            assert as_user(made_by, lambda: proof.write_text(munge.credential(claim, munged)) and None) == ""
        daemon.last = request = msgspec.structs.replace(request, proof=proof.read_text())
        assert as_user(uid, lambda: key_requests.ask(daemon.public, request)) == ""
        return daemon.answered(uid).refused

    assert asked(U1, U1) == ""
    assert "no MUNGE credential" in asked(U1, None)
    assert "another user's" in asked(U1, U2)
    assert "over something else" in asked(U1, U1, new_request("k" * 40))
    used = daemon.last = msgspec.structs.replace(new_request("q" * 40), proof="")
    proof = munge.credential(used.claim, munged)
    assert munge.user_of(proof, used.claim, munged) == os.geteuid()
    with pytest.raises(AuthError, match="no credential of a user's"):
        munge.user_of(proof, used.claim, munged)
    with pytest.raises(AuthError, match="no credential of a user's"):
        munge.user_of("MUNGE:nonsense:", used.claim, munged)
    with pytest.raises(AuthError, match="munge"):
        munge.credential("x", f"{munged}-nowhere")


def test_nobody_learns_the_key_that_another_asked_for_and_nobody_has_the_daemons(daemon: Site) -> None:
    hers = keys.generate().public
    daemon.users[U2] = User(U2, "u2", frozenset())
    daemon.ask(U2, hers)
    assert daemon.answered(U2).refused == "u2 may not own runs"
    assert hers not in key_requests.reply_path(daemon.public, U2).read_text()
    daemon.ask(U1, keys.read_keypair(keys.server_key_path(daemon.state)).public)
    assert daemon.answered(U1).refused == "the key is the daemon's"


def test_a_new_key_can_retire_the_lost_one_and_a_retired_key_never_comes_back(daemon: Site) -> None:
    lost, fresh = keys.generate().public, keys.generate().public
    daemon.ask(U1, lost)
    daemon.answered(U1)
    daemon.ask(U1, fresh, only=True)
    assert daemon.answered(U1).refused == ""
    owners = keys.enrolled_owners(daemon.state)
    assert (lost in owners, owners[fresh]) == (False, lost), "the runs stay the owner's"
    daemon.ask(U1, lost)
    assert daemon.answered(U1).refused == "the key was retired"
    for _ in range(MOST_KEYS - 1):
        daemon.ask(U1, keys.generate().public)
        assert daemon.answered(U1).refused == ""
    daemon.ask(U1, keys.generate().public)
    assert "none may be added" in daemon.answered(U1).refused


def test_a_user_who_leaves_the_group_is_suspended_and_one_whom_nobody_knows_just_now_is_not(
    daemon: Site,
) -> None:
    mine, hers = daemon.join(U1), daemon.join(U2)
    known = dict(daemon.users)
    daemon.users.clear()
    assert {mine, hers} <= set(daemon.check())
    daemon.users |= known | {U1: User(U1, "u1", frozenset({7}))}
    del daemon.groups["ml"]  # the directory of groups is away
    assert {mine, hers} <= set(daemon.check())
    daemon.ask(U1, keys.generate().public)
    assert "does not know a group" in daemon.answered(U1).refused
    daemon.groups["ml"] = 8  # and back: u1 is not in it
    assert (mine in daemon.check(), hers in daemon.check()) == (False, True)
    assert {one.state for one in keys.listed(daemon.state) if one.who == "u1"} == {
        "suspended: [owners] does not admit the user"
    }
    daemon.users[U1] = known[U1]
    assert mine in daemon.check(), "the user's keys are in force again, as they were"
    daemon.requests.reconfigure(OwnersSection(users=("u1",)))
    daemon.requests.poll()
    assert hers not in keys.enrolled_owners(daemon.state), "the configuration was changed"
    daemon.requests.reconfigure(OwnersSection(users=("u1", "u2"), groups=("70",), deny=("u1",)))
    daemon.requests.poll()
    owners = keys.enrolled_owners(daemon.state)
    assert (mine in owners, hers in owners) == (False, True)
    daemon.ask(U1, mine)
    assert daemon.answered(U1).refused == "u1 may not own runs"


def test_a_user_who_is_denied_or_long_unknown_is_suspended_also_when_the_account_is_gone(
    daemon: Site,
) -> None:
    public = daemon.join(U1)
    del daemon.users[U1]
    assert public in daemon.check(), "the directory may be away"
    daemon.now += GONE_S
    assert public not in daemon.check()
    daemon.users[U1] = User(U1, "u1", frozenset({7}))
    assert public in daemon.check()
    del daemon.users[U1]
    daemon.requests.reconfigure(OwnersSection(groups=("ml",), deny=("u1",)))
    assert public not in daemon.check(), "deny asks no directory"


def test_a_file_that_is_broken_or_gone_is_nobody_elses_affair(daemon: Site) -> None:
    for uid in (U1, U2):
        daemon.join(uid)
    (daemon.state / "keys/owners/u1.pub").unlink()
    (keys.joined_dir(daemon.state) / "a").write_text("not a uid")
    (daemon.state / "keys/owners/broken.pub").write_text("x" * 100_000)
    (daemon.state / "keys/owners/broken.pub").chmod(0o600)
    daemon.users[U2] = User(U2, "u2", frozenset())
    daemon.users[U1] = User(U1, "u1", frozenset())
    daemon.now += CHECK_S
    daemon.requests.poll()
    said: list[str] = []
    owners = keys.enrolled_owners(daemon.state, lambda name, error: said.append(f"{name}: {error.cause}"))
    assert [
        owner for owner in owners.values() if owner not in keys.enrolled_owners(daemon.state, print)
    ] == []
    assert set(keys.owner_keys(daemon.state, lambda *_: None)) == {"scavenger", "u2"}
    assert keys.is_suspended(daemon.state, "u2")
    assert "100000 bytes: it is no key file" in said[0]
    daemon.users[U1] = User(U1, "u1", frozenset({7}))
    daemon.join(U1)


def test_many_new_keys_neither_lose_the_first_nor_break_the_file(daemon: Site) -> None:
    first = daemon.join(U1)
    for _ in range(keys.RETIRED_KEPT + 20):
        newest = daemon.join(U1, only=True)
    assert keys.enrolled_owners(daemon.state)[newest] == first
    assert len(keys.owner_keys(daemon.state)["u1"]) == keys.RETIRED_KEPT + 2
    assert (daemon.state / "keys/owners/u1.pub").stat().st_size < 4096


def test_a_name_that_was_enrolled_by_hand_is_not_taken_over(daemon: Site) -> None:
    keys.enroll(daemon.state, "u1", keys.generate().public)
    daemon.ask(U1, keys.generate().public)
    assert daemon.answered(U1).refused == "an owner u1 was enrolled by hand"
    daemon.join(U2)
    daemon.users[NOBODY] = User(NOBODY, "u2", frozenset({70}))  # the name was given to another account
    daemon.ask(NOBODY, keys.generate().public)
    assert "was another user" in daemon.answered(NOBODY).refused


def test_one_users_files_hold_up_no_other_user(daemon: Site) -> None:
    """Folders that cannot be removed, unfinished files and many requests: the newest of each user is read."""
    folder = key_requests.requests_dir(daemon.public)

    def crowd() -> None:
        for n in range(100):
            (folder / f"folder-{n}" / "in").mkdir(parents=True)
            (folder / f"empty-{n}").mkdir()
            (folder / f"many-{n}").write_bytes(b"{}")
            (folder / f".unfinished-{n}").write_bytes(b"")
        (folder / ".of-tomorrow").write_bytes(b"")
        os.utime(folder / ".of-tomorrow", (time.time() + 86_400.0,) * 2)

    assert as_user(U2, crowd) == ""
    daemon.join(U1)
    left = {one.name for one in folder.iterdir() if not one.name.startswith("folder-")}
    assert len(left) == key_requests.MOST_UNFINISHED
    assert all(name.startswith(".unfinished-") for name in left)
    for name in left:
        os.utime(folder / name, (1.0, 1.0))
    daemon.requests.poll()
    assert not [one for one in folder.iterdir() if not one.name.startswith("folder-")]


def test_a_folder_that_somebody_filled_with_what_cannot_be_removed_is_made_anew(
    daemon: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_requests, "MOST_SCANNED", 40)
    folder = key_requests.requests_dir(daemon.public)

    def fill() -> None:
        for n in range(60):
            (folder / f"folder-{n}" / "in").mkdir(parents=True)

    assert as_user(U2, fill) == ""
    daemon.requests.poll()
    assert not list(folder.iterdir())
    daemon.join(U1)
    [aside] = daemon.public.glob("full-*")
    assert "PermissionError" in as_user(U2, lambda: list(aside.iterdir()))


def test_a_reply_to_an_earlier_request_is_never_taken_for_this_ones(daemon: Site) -> None:
    public = daemon.join(U1)
    earlier = daemon.last
    daemon.users[U1] = User(U1, "u1", frozenset())
    daemon.ask(U1, public)
    assert key_requests.read_reply(daemon.public, U1, daemon.last) is None
    assert key_requests.read_reply(daemon.public, U1, earlier) is not None
    assert daemon.answered(U1).refused == "u1 may not own runs"


@pytest.mark.parametrize(
    ("owners", "gids", "admitted"),
    [
        (OwnersSection(users=("u1",)), set(), True),
        (OwnersSection(users=("u1",), deny=("u1",)), set(), False),
        (OwnersSection(groups=("ml",)), {7}, True),
        (OwnersSection(groups=("ml",)), {8}, False),
        (OwnersSection(groups=("70",)), {70}, True),
        (OwnersSection(groups=("away",)), {7}, None),
        (OwnersSection(groups=("away", "ml")), {7}, True),
        (OwnersSection(groups=("away",), deny=("u1",)), {7}, False),
        (OwnersSection(), {7}, False),
    ],
)
def test_who_is_admitted(owners: OwnersSection, gids: set[int], admitted: bool | None) -> None:
    assert admission(User(U1, "u1", frozenset(gids)), owners, {"ml": 7}.get) is admitted


def test_a_request_is_refused_with_what_to_do() -> None:
    mine, other = keys.OwnerKey("a" * 40), keys.OwnerKey("b" * 40)
    full = [keys.OwnerKey(f"{n:040}") for n in range(MOST_KEYS)]
    request = new_request(mine.public)
    assert refusal("u1", request, {}, joined=False) == ("", "")
    assert refusal("u1", request, {"u1": [mine]}, joined=True) == ("", "")
    for known, joined, why in (
        ({"u1": [mine]}, False, "enrolled by hand"),
        ({"u1": [other], "u2": [mine]}, True, "another owner's"),
        ({"u1": [keys.OwnerKey(mine.public, 1.0, 2.0)]}, True, "retired"),
        ({"u1": full}, True, "none may be added"),
    ):
        said, remedy = refusal("u1", request, known, joined=joined)
        assert (why in said, bool(remedy)) == (True, True)
    assert refusal("u1", new_request(mine.public, only=True), {"u1": full}, joined=True) == ("", "")


def test_a_folder_in_which_somebody_else_could_write_is_refused(site: Path) -> None:
    public = site / "public"
    public.mkdir()
    os.chown(public, U1, U1)
    with pytest.raises(ConfigError, match="not a folder of the daemon's user"):
        key_requests.make_public(public)
    here = keys.Rendezvous("tcp://h:1", "k" * 40, 1, 1, "h", "u")
    os.chown(public, 0, 0)
    keys.write_rendezvous(public, here, public=True)
    path = public / "rendezvous.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644

    def read() -> None:
        assert keys.read_rendezvous(public) == here

    assert as_user(U1, read) == ""
    public.chmod(0o777)
    assert "can be written by others" in as_user(U1, read)
    public.chmod(0o755)
    os.chown(path, U2, U2)
    assert as_user(U1, read) == "", "of root's folder: root put it there"
    os.chown(public, U1, U1)
    assert "belongs to uid 61002" in as_user(NOBODY, read)


def test_a_user_joins_a_daemon_that_runs_and_connects_to_it(site: Path) -> None:
    """The whole way, with the host's own directory of users: `nobody` joins by name, then by a group that it is not in."""
    keys.init_state(site / "state", "scavenger")
    config: dict[str, dict[str, object]] = {
        "daemon": {"state_dir": str(site / "state"), "public_dir": str(site / "public")},
        "owners": {"users": ["nobody"]},
        "harvest": {"enabled": False},
    }
    path = site / "scavenger.toml"
    path.write_text(toml.dumps(config))
    process = subprocess.Popen(
        [sys.executable, "-m", "scavenger", "daemon", "--config", path], stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: (site / "public" / "rendezvous.json").exists())
        os.environ["XDG_CONFIG_HOME"] = str(site / f"home-{NOBODY}")
        assert as_user(NOBODY, lambda: join(site / "public", new=False, wait_s=30.0)) == ""
        key = site / f"home-{NOBODY}" / "scavenger" / "owner.key"
        assert (key.stat().st_uid, stat.S_IMODE(key.stat().st_mode)) == (NOBODY, 0o600)

        def call() -> None:
            with Connection.connect(site / "public") as connection:
                connection.send("none", 0, messages.Ping())
                until(lambda: connection.receive(0.2) is not None)

        assert as_user(NOBODY, call) == "", "the daemon answers, whatever it says of that run"
        before = key.read_bytes()
        assert as_user(NOBODY, lambda: join(site / "public", new=True, wait_s=30.0)) == ""
        assert key.read_bytes() != before
        assert as_user(NOBODY, lambda: note_is(site / "public")) == ""
        assert as_user(NOBODY, call) == ""
        path.write_text(toml.dumps(config | {"owners": {"groups": ["root"]}}))
        process.send_signal(signal.SIGHUP)
        until(lambda: keys.read_keypair(key_of(key)).public not in keys.enrolled_owners(site / "state"))
        assert "nobody may not own runs" in as_user(NOBODY, lambda: join(site / "public", wait_s=30.0))
        path.write_text(toml.dumps(config))
        process.send_signal(signal.SIGHUP)
        until(lambda: keys.read_keypair(key_of(key)).public in keys.enrolled_owners(site / "state"))
        assert as_user(NOBODY, lambda: join(site / "public", wait_s=30.0)) == "", "not the refusal of before"
    finally:
        os.environ.pop("XDG_CONFIG_HOME", None)
        process.terminate()
        assert process.wait(30) == 0
    os.environ["XDG_CONFIG_HOME"] = str(site / f"home-{NOBODY}")
    try:
        assert "no reply within 0 s" in as_user(NOBODY, lambda: join(site / "public", new=True, wait_s=0.0))
        pending = key.with_name("owner.key.new")
        assert pending.exists(), "the daemon may accept it later: it is asked about again"
        public = keys.read_keypair(key_of(pending)).public
        again = KeyRequests(site / "state", site / "public", OwnersSection(users=("nobody",)), time.time)
        again.send(again.poll())
        assert public in keys.enrolled_owners(site / "state")
        threading.Timer(1.0, lambda: again.send(again.poll())).start()
        assert as_user(NOBODY, lambda: join(site / "public", wait_s=30.0)) == ""
        assert (keys.read_keypair(key_of(key)).public, pending.exists()) == (public, False)
    finally:
        os.environ.pop("XDG_CONFIG_HOME", None)


def test_a_second_user_s_run_of_one_name_is_refused_before_anything_is_submitted(site: Path) -> None:
    """Found on a site of two users: both called theirs `tiny`, and the second one's training job ended after it had waited for its GPUs."""
    keys.init_state(site / "state", "scavenger")
    key_requests.make_public(site / "public")
    path = site / "scavenger.toml"
    owners = {}
    for uid, name in ((U1, "u1"), (U2, "u2"), (NOBODY, "")):
        pair = keys.generate()
        owner_key = site / f"home-{uid}" / "owner.key"
        keys.write_keypair(owner_key, pair)
        os.chown(owner_key, uid, uid)
        owners[uid] = owner_key
        if name:
            keys.enroll(site / "state", name, pair.public)
    config: dict[str, dict[str, object]] = {
        "daemon": {"state_dir": str(site / "state"), "public_dir": str(site / "public")},
        "harvest": {"enabled": False},
    }
    path.write_text(toml.dumps(config))

    def check(uid: int, name: str = "tiny") -> list[str]:
        """What `scavenger init --check` says of that user's run, and whether it lets the run be submitted."""
        folder = site / f"home-{uid}" / "run"
        folder.mkdir(exist_ok=True)
        os.chown(folder, uid, uid)
        (folder / "run.toml").write_text(Path("examples/site/run.toml").read_text())
        sets = [f"run.name={name}", f"run.state_dir={site / 'public'}", f"run.key={owners[uid]}"]
        out = folder / "out"

        def work() -> None:
            with out.open("w") as file, contextlib.redirect_stdout(file):
                print("fine" if _name_is_free(folder, [], sets) else "refused")

        assert as_user(uid, work) == ""
        return out.read_text().splitlines()

    process = subprocess.Popen(
        [sys.executable, "-m", "scavenger", "daemon", "--config", path], stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: (site / "public" / "rendezvous.json").exists())
        assert check(U1) == ["  ok       run.name: tiny, nobody has it yet", "fine"]

        def train(uid: int) -> None:
            with Connection.connect(site / "public", owners[uid]) as connection:
                open_run(connection, "tiny")

        assert as_user(U1, lambda: train(U1)) == ""
        assert check(U1) == ["  ok       run.name: tiny, your run of that name goes on", "fine"]
        assert check(U2)[:-2] == [
            "  REFUSED  run.name",
            "           another user of this site has a run 'tiny': names of runs are the site's",
        ]
        assert 'set run.name = "' in check(U2)[-2]
        assert check(U2)[-1] == "refused"
        assert check(U2, "u2-tiny")[-1] == "fine"
        stranger = check(NOBODY)
        assert stranger[1] == "           the daemon does not accept this key"
        assert "scavenger join PUBLIC_DIR" in stranger[2]
        assert stranger[-1] == "refused"
        assert "names of runs are the site's" in as_user(U2, lambda: train(U2)), "the job itself says so too"
    finally:
        process.terminate()
        assert process.wait(30) == 0
    began = time.monotonic()
    assert "was not asked" in check(U2)[0], "a daemon that is away is no fault of the run's"
    assert time.monotonic() - began < 120, "a client waits ten minutes"


def open_run(connection: Connection, name: str) -> None:
    """As a trainer does. Raises `Refused`."""
    engine = messages.EngineSpec("reference", "{}", "float32", 4, 64)
    body = messages.OpenRun(messages.PROTOCOL, name, 1, "{}", engine, "", False, 0, 1, 0, "host", 0)
    connection.send(name, 0, body)
    while not isinstance(reply := connection.receive(30.0), messages.Reply):
        assert reply is not None, "the daemon is silent"  # else it tells of its engines first
    if isinstance(reply.body, messages.Denied):
        raise Refused(reply.body.reason, reply.body.remedy)


def key_of(path: Path) -> Path:
    """The key, where root may read it as its own."""
    copy = path.parent.parent.parent / "copy.key"
    keys.write_private(copy, path.read_bytes())
    return copy


def note_is(public_dir: Path) -> None:
    assert _known_state_dir() == str(public_dir.resolve()), "`scavenger init` knows the site"


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    by = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < by, "not in time"
        time.sleep(0.1)  # between two polls of a condition


def test_owners_without_a_public_folder_are_refused(tmp_path: Path) -> None:
    from scavenger import config

    path = tmp_path / "scavenger.toml"
    path.write_text(toml.dumps({"daemon": {"state_dir": "state"}, "owners": {"users": ["u1"]}}))
    with pytest.raises(ConfigError, match=r"needs daemon\.public_dir"):
        config.read_daemon(path)
    with pytest.raises((AuthError, DaemonUnavailable)):
        keys.read_rendezvous(tmp_path)


def test_joining_a_folder_that_is_no_site_leaves_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with pytest.raises(ConfigError, match="is no site's public folder"):
        join(tmp_path)
    assert not (tmp_path / "config").exists()


def test_a_user_whose_daemon_is_another_s_is_told_what_this_user_can_do(site: Path) -> None:
    """None of these remedies is the admin's: who joins a site makes no state directory, and starts no daemon there."""
    keys.init_state(site / "state", "scavenger")
    key_requests.make_public(site / "public")

    def connect(folder: Path) -> str:
        def work() -> None:
            os.environ["XDG_CONFIG_HOME"] = str(site / f"home-{U1}")
            Connection.connect(folder).close()

        return as_user(U1, work)

    public = site / "public"
    not_joined = connect(public)
    assert f"`scavenger join {public}` makes a key of your own" in not_joined
    (site / "state").chmod(0o755)
    of_the_daemon = connect(site / "state")
    assert (
        "name its public folder (daemon.public_dir) instead of the daemon's state directory" in of_the_daemon
    )
    nowhere = connect(site / "none")
    assert "`scavenger join PUBLIC_DIR` makes a key of your own" in nowhere
    os.chown(site / f"home-{U1}", U1, U1)
    key = site / f"home-{U1}" / "scavenger" / "owner.key"
    keys.write_keypair(key, keys.generate())
    for path in (key, key.parent):
        os.chown(path, U1, U1)
    away = connect(public)
    assert "no daemon has announced itself" in away
    assert "ask the site's admin whether the daemon runs" in away
    for said in (not_joined, of_the_daemon, away):
        assert "scavenger daemon" not in said
        assert "scavenger init" not in said
    with pytest.raises(DaemonUnavailable, match="start it: `scavenger daemon`"):
        keys.read_rendezvous(site / "state")  # by the daemon's own user
