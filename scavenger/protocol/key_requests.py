"""How a user of the site asks the daemon to accept a key: a file whose owner is the proof of who asks.

    <public_dir>/rendezvous.json      where the daemon listens             readable by all, written by the daemon's user alone
    <public_dir>/requests/            one file a request, mode 1733        anybody may add a file, nobody else may list or change it
    <public_dir>/answers/UID.json     what became of the newest request    as rendezvous.json

The public half of a key is no secret. The owner of a file is: only that user, or root, can have made it on a file system whose clients are
trusted, as the homes of a cluster are. Owns the names, the format and both ends of the exchange; who may own runs the daemon decides.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from scavenger.errors import AuthError, ConfigError
from scavenger.protocol import keys

MOST_BYTES = 1024
#: Requests that are read at once; the others wait for the next time.
MOST_READ = 64


class KeyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`only`: from now on no other key of this user is accepted."""

    public: Annotated[str, msgspec.Meta(pattern=r"\A[!-~]{40}\Z")]
    only: bool = False


class KeyAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`refused`: why the key is not accepted; "" where it is, as one of the owner `name`."""

    public: str
    name: str
    refused: str = ""
    remedy: str = ""


def requests_dir(public_dir: Path) -> Path:
    return public_dir / "requests"


def answer_path(public_dir: Path, uid: int) -> Path:
    return public_dir / "answers" / f"{uid}.json"


# ---------------------------------------------------------------- the daemon's end


def make_public(public_dir: Path) -> None:
    """Make the folders, for the daemon's user. Raises `ConfigError` where somebody else could write in them."""
    for folder, mode in (
        (public_dir, 0o755),
        (requests_dir(public_dir), 0o1733),
        (public_dir / "answers", 0o755),
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


def take(public_dir: Path) -> Iterator[tuple[int, KeyRequest]]:
    """Requests with the uid of who made each; every file is removed. What is no request, or no file of its own, is not answered."""
    with os.scandir(requests_dir(public_dir)) as found:
        names = [entry.name for entry, _ in zip(found, range(MOST_READ), strict=False)]
    for name in names:
        path = requests_dir(public_dir) / name
        request = _read(path)
        try:
            path.unlink()
        except OSError:  # a folder, say: it harms nothing, and stays
            continue
        if request is not None:
            yield request


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


def answer(public_dir: Path, uid: int, given: KeyAnswer) -> None:
    keys.write_public(answer_path(public_dir, uid), msgspec.json.encode(given))


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
    path = requests_dir(public_dir) / f"{os.getuid()}-{secrets.token_hex(8)}"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o644)  # whatever the umask: the daemon's user reads it
            file.write(msgspec.json.encode(request))
    except OSError as error:
        raise ConfigError(
            f"{path.parent}: {error.strerror}",
            "name the site's public folder (daemon.public_dir of its scavenger.toml); ask the site's admin",
        ) from error


def read_answer(public_dir: Path, uid: int) -> KeyAnswer | None:
    """The answer to this user's newest request; None while there is none. Raises `AuthError` where it may be somebody else's word."""
    path = answer_path(public_dir, uid)
    try:
        return msgspec.json.decode(keys.read_trusted(path), type=KeyAnswer)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise AuthError(f"{path} is no answer of a daemon: {error}", "ask the site's admin") from error
