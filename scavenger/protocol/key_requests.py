"""How a user of the site asks the daemon to accept a key: a file that this user made in the requests folder is the proof of who asks.

    <public_dir>/rendezvous.json      where the daemon listens             readable by all, written by the daemon's user alone
    <public_dir>/requests/            one file a request, mode 3733        every user may add a file, and list or change no other's
    <public_dir>/replies/UID.json     what became of the newest request    as rendezvous.json
    <public_dir>/public-status.json   `observe.public_status`'s            as rendezvous.json

The owner of a file alone proves nothing: a user who may write in a folder may move files of others out of it, with their owner, and a file
that others may write has anybody's words. So the requests folder gives its group to what is made in it, which is the daemon's own: a file
that was moved there has another one and is no request, nor is one that its group or others may write. The daemon refuses users of that
group. Clients of the file system must be trusted, as those of a cluster's homes are. Where `owners.proof` is "munge" a request also bears a
MUNGE credential, which only a process of that user's can have made.

A reply repeats the request's nonce: an older one is never taken for it. It does not repeat the key: who knows another user's public key
could ask for it first. Owns the names, the format and both ends of the exchange; who may own runs the daemon decides.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import subprocess
import sys
import time
from collections import Counter, defaultdict
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
import structlog

from scavenger.errors import AuthError, ConfigError
from scavenger.parsing import MALFORMED
from scavenger.protocol import keys

MOST_BYTES = 2048
#: Users whose requests are read at once, the oldest first; the others wait for the next time.
MOST_READ = 64
#: Entries of the folder that are looked through at once: what a user of the site leaves there takes no more of the daemon's time.
MOST_SCANNED = 10_000
#: A request is written under a name that begins so, and then renamed. One that is older than this was given up, and so is one more of a
#: user than `MOST_UNFINISHED`, or one from the future.
_UNFINISHED, UNFINISHED_S, MOST_UNFINISHED = ".", 300.0, 16
#: Mode of the requests folder: all users may add, none may list, the sticky bit keeps files their owners', and they get its group.
_REQUESTS_MODE = 0o3733
#: Of the public folder. What is made in it inherits the setgid bit, which a hardened service may not set itself.
_PUBLIC_MODE = 0o2755

log = structlog.get_logger()


class KeyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`only`: from now on no other key of this user is accepted. `nonce`: repeated in the reply. `proof`: a MUNGE credential of the
    user's over `claim`, "" where the user's host has none."""

    public: Annotated[str, msgspec.Meta(pattern=r"\A[!-~]{40}\Z")]
    nonce: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
    only: bool = False
    proof: Annotated[str, msgspec.Meta(pattern=r"\A[ -~]{0,800}\Z")] = ""

    @property
    def claim(self) -> str:
        """What the user says, and a credential is made over."""
        return f"scavenger join {self.public} {self.nonce} {'only' if self.only else 'too'}"


def new_request(public: str, *, only: bool = False) -> KeyRequest:
    return KeyRequest(public, secrets.token_hex(8), only)


class KeyReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`refused`: why the key is not accepted; "" where it is, as one of the owner `name`. All users can read it."""

    nonce: str
    name: str
    refused: str = ""
    remedy: str = ""


def requests_dir(public_dir: Path) -> Path:
    return public_dir / "requests"


def reply_path(public_dir: Path, uid: int) -> Path:
    return public_dir / "replies" / f"{uid}.json"


# ---------------------------------------------------------------- the daemon's end


def make_public(public_dir: Path) -> None:
    """Make the folders, for the daemon's user. Raises `ConfigError` where another user could write in them."""
    for folder, mode in (
        (public_dir, _PUBLIC_MODE),
        (requests_dir(public_dir), _REQUESTS_MODE),
        (public_dir / "replies", 0o755),
    ):
        try:
            folder.mkdir(exist_ok=True)
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                raise ConfigError(
                    f"daemon.public_dir: {folder} is not a folder of the daemon's user",
                    f"remove it, or chown it to uid {os.geteuid()}: who owns it could pose as the daemon",
                )
            if status.st_gid != os.getegid():
                os.chown(folder, -1, os.getegid())
            if stat.S_IMODE(folder.stat().st_mode) != mode:
                folder.chmod(mode)
            if stat.S_IMODE(folder.stat().st_mode) != mode:
                raise ConfigError(
                    f"daemon.public_dir: {folder} cannot have the mode {mode:o}",
                    "name a folder on a file system that keeps the setgid and the sticky bit",
                )
        except OSError as error:
            raise ConfigError(
                f"daemon.public_dir: {folder}: {error.strerror}",
                f"as the daemon's user, outside its service: mkdir -p {folder}; chmod {mode:o} {folder}",
            ) from error


def take(public_dir: Path) -> list[tuple[int, KeyRequest]]:
    """The newest request of each user, with the uid of who made it.

    Every file is removed but those of users who wait for the next time, and those that are still being written; of folders those that are
    empty. Where so many entries stay that not all can be looked through, the folder is put aside and made anew. What is no request is not
    answered.
    """
    folder = requests_dir(public_dir)
    found = _Found(time.time(), folder.stat().st_gid)
    with os.scandir(folder) as entries:
        for entry in islice(entries, MOST_SCANNED):
            found.add(entry)
    newest = [path for _, path in sorted(max(files) for files in found.asked.values())]
    read = [_read(path, found.gid) for path in newest[:MOST_READ]]
    requests = [request for request in read if request is not None]
    if found.foreign or len(requests) < len(read):
        log.warning(
            "files in the requests folder are no requests",
            malformed=len(read) - len(requests),
            made_elsewhere_or_writable_by_others=found.foreign,
        )
    waiting = set(newest[MOST_READ:])
    removed = 0
    for path in (*found.useless, *(path for files in found.asked.values() for _, path in files)):
        if path not in waiting:
            with contextlib.suppress(OSError):
                path.rmdir() if path in found.folders else path.unlink()
                removed += 1
    if found.entries >= MOST_SCANNED and removed < MOST_SCANNED // 2:
        _put_aside(public_dir, found)
    return requests


class _Found:
    """What lies in the requests folder, whose group is `gid`, as it was looked through. `foreign`: files that no user made there alone."""

    def __init__(self, now: float, gid: int) -> None:
        self._now, self.gid, self.entries, self.foreign = now, gid, 0, 0
        self.asked: defaultdict[int, list[tuple[int, Path]]] = defaultdict(list)  # uid -> (time, file)
        self.useless: list[Path] = []
        self.folders: set[Path] = set()
        self.owners = Counter[int]()
        self._unfinished = Counter[int]()

    def add(self, entry: os.DirEntry[str]) -> None:
        self.entries += 1
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            return  # it is gone
        path, uid = Path(entry.path), status.st_uid
        self.owners[uid] += 1
        if stat.S_ISDIR(status.st_mode):
            self.folders.add(path)
        if entry.name.startswith(_UNFINISHED) and 0 <= self._now - status.st_mtime + 1 < UNFINISHED_S:
            self._unfinished[uid] += 1
            if self._unfinished[uid] <= MOST_UNFINISHED:
                return
        if entry.name.startswith(_UNFINISHED) or not stat.S_ISREG(status.st_mode):
            self.useless.append(path)
        elif not _is_made_here(status, self.gid):
            self.useless.append(path)
            self.foreign += 1
        else:
            self.asked[uid].append((status.st_mtime_ns, path))


def _put_aside(public_dir: Path, found: _Found) -> None:
    """Requests that lie in the folder are lost, and their users ask again. Who filled it cannot reach it any more."""
    aside = public_dir / f"full-{secrets.token_hex(4)}"
    uid, count = found.owners.most_common(1)[0]
    folder = requests_dir(public_dir)
    os.rename(folder, aside)
    aside.chmod(0o700)
    # The mode is given at its birth, by a process without a umask: the setgid bit is inherited, and a later chmod would have to name it.
    make = [sys.executable, "-c", "import os, sys; os.mkdir(sys.argv[1], 0o1733)", str(folder)]
    subprocess.run(make, umask=0, check=True, timeout=60.0)
    make_public(public_dir)
    log.error(
        "the requests folder was full and is made anew",
        entries_seen=found.entries,
        most_of_uid=uid,
        theirs=count,
        aside=str(aside),
        remedy=f"owners.deny keeps a user out; remove {aside}",
    )


def _is_made_here(status: os.stat_result, gid: int) -> bool:
    """Whether the file's owner made it in the folder of this group, and no other user can have written it."""
    return status.st_gid == gid and not status.st_mode & 0o022


def _read(path: Path, gid: int) -> tuple[int, KeyRequest] | None:
    """A request that its owner made in this folder, whose group is `gid`, and that no other user could write."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_size > MOST_BYTES:
            return None  # a link would lend another user's name
        if not _is_made_here(status, gid):
            return None
        return status.st_uid, msgspec.json.decode(os.read(descriptor, MOST_BYTES), type=KeyRequest)
    except (*MALFORMED, OSError):
        return None
    finally:
        os.close(descriptor)


def reply(public_dir: Path, uid: int, sent: KeyReply) -> None:
    keys.write_public(reply_path(public_dir, uid), msgspec.json.encode(sent))


# ---------------------------------------------------------------- the user's end


def require_site(public_dir: Path) -> None:
    """Raises `ConfigError` where no daemon takes requests."""
    if not requests_dir(public_dir).is_dir():
        raise ConfigError(
            f"{public_dir} is no site's public folder: it has no {requests_dir(public_dir).name}",
            "name daemon.public_dir of the site's scavenger.toml; ask the site's admin",
        )


def ask(public_dir: Path, request: KeyRequest) -> None:
    """Leave a request. Raises `ConfigError` where no daemon takes any."""
    path = requests_dir(public_dir) / f"{os.getuid()}-{request.nonce}"
    unfinished = path.with_name(_UNFINISHED + path.name)
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o644)  # whatever the umask: the daemon's user reads it
            file.write(msgspec.json.encode(request))
        os.rename(unfinished, path)  # the daemon reads no half of it
    except OSError as error:
        raise ConfigError(
            f"{path.parent}: {error.strerror}",
            "name the site's public folder (daemon.public_dir of its scavenger.toml); ask the site's admin",
        ) from error


def read_reply(public_dir: Path, uid: int, request: KeyRequest) -> KeyReply | None:
    """The reply to this request of the user's; None while there is none. Raises `AuthError` where another user could have written it."""
    path = reply_path(public_dir, uid)
    try:
        found = msgspec.json.decode(keys.read_trusted(path), type=KeyReply)
    except FileNotFoundError:
        return None
    except MALFORMED as error:
        raise AuthError(f"{path} is no reply of a daemon: {error}", "ask the site's admin") from error
    return found if found.nonce == request.nonce else None
