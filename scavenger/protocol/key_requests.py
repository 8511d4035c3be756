"""How a user of the site asks the daemon to accept a key: a file whose owner is the proof of who asks.

    <public_dir>/rendezvous.json      where the daemon listens             readable by all, written by the daemon's user alone
    <public_dir>/requests/            one file a request, mode 1733        every user may add a file, and list or change no other's
    <public_dir>/replies/UID.json     what became of the newest request    as rendezvous.json

The public half of a key is no secret. The owner of a file is: only that user, or root, can have made it on a file system whose clients are
trusted, as the homes of a cluster are. A reply repeats the request's nonce: an older one is never taken for it. Owns the names, the format
and both ends of the exchange; who may own runs the daemon decides.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
from collections import defaultdict
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec

from scavenger.errors import AuthError, ConfigError
from scavenger.protocol import keys

MOST_BYTES = 1024
#: Users whose requests are read at once, the oldest first; the others wait for the next time.
MOST_READ = 64
#: Entries of the folder that are looked through at once: what a user of the site leaves there takes no more of the daemon's time.
MOST_SCANNED = 10_000
#: A request is written under a name that begins so, and then renamed. One that is older than this was given up.
_UNFINISHED, UNFINISHED_S = ".", 300.0


class KeyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`only`: from now on no other key of this user is accepted. `nonce`: repeated in the reply."""

    public: Annotated[str, msgspec.Meta(pattern=r"\A[!-~]{40}\Z")]
    nonce: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
    only: bool = False


def new_request(public: str, *, only: bool = False) -> KeyRequest:
    return KeyRequest(public, secrets.token_hex(8), only)


class KeyReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`refused`: why the key is not accepted; "" where it is, as one of the owner `name`."""

    public: str
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
        (public_dir, 0o755),
        (requests_dir(public_dir), 0o1733),
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
            folder.chmod(mode)
        except OSError as error:
            raise ConfigError(
                f"daemon.public_dir: {folder}: {error.strerror}",
                "name a folder that the daemon's user can make, on a file system that all users see",
            ) from error


def take(public_dir: Path) -> list[tuple[int, KeyRequest]]:
    """The newest request of each user, with the uid of who made it.

    Every file is removed but those of users who wait for the next time, and those that are still being written. A folder stays: its user
    alone can empty it. What is no request is not answered.
    """
    asked: defaultdict[int, list[tuple[int, Path]]] = defaultdict(list)
    useless: list[Path] = []
    with os.scandir(requests_dir(public_dir)) as found:
        for entry in islice(found, MOST_SCANNED):
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue  # it is gone
            if stat.S_ISDIR(status.st_mode):
                continue
            path = Path(entry.path)
            if entry.name.startswith(_UNFINISHED) and time.time() - status.st_mtime < UNFINISHED_S:
                continue
            if entry.name.startswith(_UNFINISHED) or not stat.S_ISREG(status.st_mode):
                useless.append(path)
            else:
                asked[status.st_uid].append((status.st_mtime_ns, path))
    newest = [path for _, path in sorted(max(files) for files in asked.values())]
    requests = [request for request in map(_read, newest[:MOST_READ]) if request is not None]
    waiting = set(newest[MOST_READ:])
    for path in (*useless, *(path for files in asked.values() for _, path in files if path not in waiting)):
        with contextlib.suppress(OSError):
            path.unlink()
    return requests


def _read(path: Path) -> tuple[int, KeyRequest] | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_size > MOST_BYTES:
            return None  # a link would lend another user's name
        return status.st_uid, msgspec.json.decode(os.read(descriptor, MOST_BYTES), type=KeyRequest)
    except (msgspec.MsgspecError, OSError):
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
    except msgspec.MsgspecError as error:
        raise AuthError(f"{path} is no reply of a daemon: {error}", "ask the site's admin") from error
    return found if (found.public, found.nonce) == (request.public, request.nonce) else None
