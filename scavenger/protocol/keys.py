"""CURVE keys and the rendezvous file: how processes find the daemon and prove who they are.

Owns the files under `<state_dir>/keys`, `<state_dir>/workers` and `<state_dir>/rendezvous.json`; every one is mode 0600 and replaced
atomically. `<public_dir>/rendezvous.json` says the same to users who may not enter the state directory (`key_requests`). Secrets never
leave these files: not into argv, environment, comments, scripts or logs.

    keys/server.key        the daemon's key pair
    keys/uid               by what the daemon's jobs are known, once its key was changed (before that the key itself says it)
    keys/owner.key         the key pair of the user who ran `scavenger init` (trainer and reserved engines)
    keys/joined/NAME       uid of an owner who was admitted as a user of the site (`daemon.key_requests`)
    keys/suspended/NAME    is there while no key of that owner is in force, because the user is not admitted any more
    keys/owners/NAME.pub   public keys that may own runs (`scavenger enroll`), one a line, the newest first, with when it came (Unix
                           seconds; releases before did not say); "was KEY CAME WENT": not any more
    keys/clusters/NAME.pub public key of the harvester of a further cluster (`scavenger keys cluster`)
    clusters/NAME/workers  the same as `workers`, of jobs on a further cluster
    workers/INTENT.key     minted for one harvested job, bound to its run; it dies with the job, so it is never changed

An owner's runs are recorded under the first key that the owner ever had, the last line of NAME.pub: the holder of a newer one owns them.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import zmq
from blake3 import blake3

from scavenger.errors import AuthError, DaemonUnavailable
from scavenger.parsing import MALFORMED
from scavenger.protocol.messages import GUEST_INTENT, LENT_INTENT

Z85_KEY_LENGTH = 40
_MOST_BYTES = 16 * 1024
#: Retired keys of an owner that are remembered, besides the first that the owner ever had.
RETIRED_KEPT = 32
#: A Unix user's name, as directories have them too; it becomes a file's.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}")
#: A further cluster's: a folder of the state directory, and a column of the ledger.
CLUSTER_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")


class KeyPair(msgspec.Struct, frozen=True):
    """A CURVE key pair in Z85. `run` and `intent` bind a worker's key to what it was minted for."""

    public: str
    secret: str
    run: str = ""
    intent: str = ""

    def __repr__(self) -> str:  # a secret must not reach a log through a traceback
        return f"KeyPair(public={self.public!r})"


class OwnerKey(msgspec.Struct, frozen=True):
    """A public key of an owner. `since`: Unix seconds, 0 = not known; `until`: when it was retired, None = it may connect."""

    public: str
    since: float = 0.0
    until: float | None = None

    @property
    def allowed(self) -> bool:
        return self.until is None


class Listed(msgspec.Struct, frozen=True):
    """A key as `scavenger keys list` shows it: nothing secret. `role`: daemon | owner | guest | cluster | worker.

    `since`: Unix seconds, 0 = not known.
    """

    role: str
    who: str
    public: str
    since: float
    state: str


class Rendezvous(msgspec.Struct, frozen=True):
    """Where the present daemon listens. Reread at every reconnect; `generation` tells an old file from a new one."""

    endpoint: str
    server_key: str
    generation: int
    pid: int
    host: str
    uid: str = ""  # of the generation: a number may be used again after an older ledger was restored
    clusters: str = ""  # where harvesters of further clusters dial in; "" = none may


def generate(run: str = "", intent: str = "") -> KeyPair:
    """A fresh pair from libzmq's random source."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode(), run, intent)


def secure(socket: zmq.Socket[Any], server_key: str, keypair: KeyPair) -> None:
    """Make it the client's end under CURVE, before it connects. Raises `zmq.ZMQError` for keys that are none."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keypair.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keypair.secret.encode())


_OWNER_KEY = "owner.key"
_JOIN = "`scavenger join PUBLIC_DIR` makes a key of your own (docs/site.md)"


def write_private(path: Path, data: bytes) -> None:
    """Replace `path` atomically by a file that only its owner can read, durable before it is visible."""
    _replace(path, data, 0o600)


def write_public(path: Path, data: bytes) -> None:
    """The same, readable by all: for what is no secret, and must come from the daemon's user."""
    _replace(path, data, 0o644)


def _replace(path: Path, data: bytes, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mkstemp makes 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = error.filename or str(path)  # a full disk's names none
        raise


def read_private(path: Path) -> bytes:
    """The bytes of a secret's file. Raises `AuthError` where it is another user's, or others can read it."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.getuid():
                raise AuthError(
                    f"{path} belongs to another user (uid {status.st_uid}, you are {os.getuid()})",
                    "have a key of your own: `scavenger join PUBLIC_DIR` (docs/site.md)",
                )
            if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise AuthError(f"{path} can be read by others", f"chmod 600 {path}")
            if status.st_size > _MOST_BYTES:
                raise AuthError(f"{path} has {status.st_size} bytes: it is no key file", "restore it")
            return file.read(_MOST_BYTES)
    except FileNotFoundError as error:
        raise AuthError(f"{path} does not exist", _how_to_get(path)) from error
    except PermissionError as error:
        theirs = f"of a site name its public folder (daemon.public_dir) instead of the daemon's state directory; {_JOIN}"
        remedy = theirs if path.name == _OWNER_KEY else "run as the user who owns the key"
        raise AuthError(f"{path} cannot be read: {error.strerror}", remedy) from error


def _how_to_get(path: Path) -> str:
    """What the user who looks for this key does. An owner's key may be of a site whose daemon is another user's."""
    if path.parent.name == "owners":
        return "`scavenger keys list` names the owners; `scavenger enroll NAME --public KEY` makes one"
    if path.name != _OWNER_KEY:
        return "run `scavenger init` first, or name the right state directory"
    folder = path.parent.parent
    if (folder / "requests").is_dir():
        return f"`scavenger join {folder}` makes a key of your own (docs/site.md)"
    return f"{_JOIN}; for a daemon of your own `scavenger init` makes one"


def absent_daemon(folder: Path) -> str:
    """What the user does where no daemon serves whose state directory, or public folder, is `folder`."""
    try:
        own = folder.stat().st_uid == os.getuid()
    except (FileNotFoundError, NotADirectoryError):
        return f"there is no folder {folder}: name the site's public folder (daemon.public_dir), or the daemon's state directory"
    except OSError:
        own = True
    return "start it: `scavenger daemon`" if own else "ask the site's admin whether the daemon runs"


def read_trusted(path: Path) -> bytes:
    """What the owner of `path` and its folder wrote, who may be another user. Raises `FileNotFoundError`; `AuthError` where yet another
    one could have written it.
    """
    try:
        with path.open("rb") as file:
            here, around = os.fstat(file.fileno()), path.parent.stat()
            mine = here.st_uid == os.getuid()
            for status, name in ((here, path), *(() if mine else ((around, path.parent),))):
                if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                    raise AuthError(f"{name} can be written by others", f"chmod go-w {name}")
            if not mine and around.st_uid not in (here.st_uid, 0):
                raise AuthError(
                    f"{path} belongs to uid {here.st_uid}, and its folder to uid {around.st_uid}",
                    "one of them is not the daemon's: ask the site's admin",
                )
            return file.read(16 * 1024)
    except PermissionError as error:
        remedy = "name the site's public folder (daemon.public_dir), not the daemon's state directory"
        raise AuthError(f"{path} cannot be read: {error.strerror}", remedy) from error


def write_keypair(path: Path, pair: KeyPair) -> None:
    write_private(path, msgspec.json.encode(pair))


def read_keypair(path: Path) -> KeyPair:
    """Read a key pair. Raises `AuthError` when it is missing, readable by others, or not a key."""
    try:
        pair = msgspec.json.decode(read_private(path), type=KeyPair)
    except MALFORMED as error:
        raise AuthError(
            f"{path} is not a key file: {error}", "make a new one with `scavenger init`"
        ) from error
    if len(pair.public) != Z85_KEY_LENGTH or len(pair.secret) != Z85_KEY_LENGTH:
        raise AuthError(f"{path} does not hold a CURVE key pair", "make a new one with `scavenger init`")
    return pair


def write_rendezvous(folder: Path, rendezvous: Rendezvous, *, public: bool = False) -> None:
    """In the state directory, or, `public`, where every user of the site may read it: it holds no secret."""
    write = write_public if public else write_private
    write(folder / "rendezvous.json", msgspec.json.encode(rendezvous))


def read_rendezvous(folder: Path) -> Rendezvous:
    """Where the daemon listens, from its state directory or its public folder. Raises `DaemonUnavailable` when none has written the file
    yet, `AuthError` where another user could have.
    """
    path = folder / "rendezvous.json"
    try:
        return msgspec.json.decode(read_trusted(path), type=Rendezvous)
    except FileNotFoundError as error:
        raise DaemonUnavailable(f"no daemon has announced itself in {path}", absent_daemon(folder)) from error
    except MALFORMED as error:
        raise DaemonUnavailable(f"{path} is not a rendezvous file: {error}", "restart the daemon") from error


def owner_key_path(state_dir: Path) -> Path:
    return state_dir / "keys" / _OWNER_KEY


def own_key_path(environ: Mapping[str, str] = os.environ) -> Path:
    """The key of the user who runs this, outside any state directory (`scavenger join`)."""
    base = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or Path.home()) / ".config"
    return Path(base) / "scavenger" / _OWNER_KEY


def note_site(public_dir: Path) -> None:
    """Remember the site that this user joined last."""
    write_private(own_key_path().with_name("site"), f"{public_dir}\n".encode())


def noted_site() -> str:
    """The public folder of the site that this user joined last, "" = none."""
    path = own_key_path().with_name("site")
    return read_private(path).decode("utf-8", "replace").strip() if path.exists() else ""


def key_path_for(folder: Path) -> Path:
    """The owner key that goes with a run's `run.state_dir`: the one in it, else the user's own."""
    beside = owner_key_path(folder)
    try:
        found = beside.exists()
    except PermissionError:  # another user's state directory
        found = False
    return beside if found or not own_key_path().exists() else own_key_path()


def server_key_path(state_dir: Path) -> Path:
    return state_dir / "keys" / "server.key"


def worker_key_path(state_dir: Path, intent_id: str) -> Path:
    return state_dir / "workers" / f"{intent_id}.key"


def _owner_path(state_dir: Path, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise AuthError(f"{name!r} cannot name an owner", "use letters, digits, '-', '_', '.' and '@'")
    return state_dir / "keys" / "owners" / f"{name}.pub"


def _owner_keys(path: Path) -> list[OwnerKey]:
    """The keys of one owner, the newest first."""
    lines = read_private(path).decode("ascii", "replace").split("\n")
    try:
        found = [_owner_key(line) for line in lines if line.strip()]
    except (ValueError, IndexError):
        found = []
    if not found or any(len(key.public) != Z85_KEY_LENGTH for key in found):
        raise AuthError(
            f"{path} does not hold CURVE public keys", "enroll the owner again: `scavenger enroll`"
        )
    return found


def _owner_key(line: str) -> OwnerKey:
    """One line of an owner's file: a key has no space in it. Raises `ValueError`, `IndexError` for another line."""
    words = line.removeprefix("was ").split()
    public, came, went = words[0], *(float(word) for word in (*words[1:3], *("0", "0")[len(words[1:3]) :]))
    return OwnerKey(public, came, went if line.startswith("was ") else None)


def _write_owner(path: Path, owner_keys: list[OwnerKey]) -> None:
    write_private(path, "".join(map(_line, _bounded(owner_keys))).encode())


def _bounded(owner_keys: list[OwnerKey]) -> list[OwnerKey]:
    """Without the oldest retired keys beyond `RETIRED_KEPT`; the first key stays, because runs are recorded under it."""
    retired = [key for key in owner_keys[:-1] if not key.allowed]
    dropped = {key.public for key in retired[RETIRED_KEPT:]}
    return [key for key in owner_keys if key.public not in dropped]


def _line(key: OwnerKey) -> str:
    came = f"{key.public} {key.since:.0f}"
    return f"{came}\n" if key.until is None else f"was {came} {key.until:.0f}\n"


#: Told the owner and why their file cannot be used.
Report = Callable[[str, AuthError], None]


def enrolled_owners(state_dir: Path, report: Report | None = None) -> dict[str, str]:
    """Public key of all who may own runs now -> the key that the owner's runs are recorded under. `report` as in `owner_keys`."""
    return {
        key.public: found[-1].public
        for name, found in owner_keys(state_dir, report).items()
        if not is_suspended(state_dir, name)
        for key in found
        if key.allowed
    }


def owner_keys(state_dir: Path, report: Report | None = None) -> dict[str, list[OwnerKey]]:
    """Every owner's keys, also those that were retired, the newest first. With `report` an owner whose file cannot be used is left out;
    without one such a file raises `AuthError`.
    """
    found: dict[str, list[OwnerKey]] = {}
    for path in sorted((state_dir / "keys" / "owners").glob("*.pub")):
        try:
            found[path.stem] = _owner_keys(path)
        except AuthError as error:
            if report is None:
                raise
            if path.exists():  # else it was removed just now
                report(path.stem, error)
    return found


def enroll(state_dir: Path, name: str, public: str) -> Path:
    """Allow `public` to own runs under `name`, and no other key. Returns the file; removing it revokes the permission."""
    path = _owner_path(state_dir, name)
    _write_owner(path, [OwnerKey(_checked(public), time.time())])
    return path


def _checked(public: str) -> str:
    if len(public) != Z85_KEY_LENGTH:
        raise AuthError(
            f"{public!r} is not a CURVE public key in Z85 (40 characters)",
            "pass the `public` of the owner's key",
        )
    return public


def lent_key_path(path: Path) -> Path:
    """Of whoever borrows slots of the engine whose own key file this is."""
    return path.with_name(f"{LENT_INTENT}{path.name}")


# ---------------------------------------------------------------- guests: engines in the job of an inference service


def _guest_path(state_dir: Path, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise AuthError(f"{name!r} cannot name a guest", "use letters, digits, '-', '_', '.' and '@'")
    return state_dir / "keys" / "guests" / f"{name}.pub"


def make_new(out: Path) -> KeyPair:
    """A fresh pair in the new file `out`, for an owner whom `scavenger enroll` or `keys add` is told of. Raises `AuthError`."""
    pair = generate()
    _write_new(out, msgspec.json.encode(pair))
    return pair


def invite_guest(state_dir: Path, name: str, run: str, out: Path) -> KeyPair:
    """A fresh pair for one engine of one run in the job of a service, written to the new file `out`. Its public half is kept; removing
    `keys/guests/NAME.pub` revokes it.

    Who was invited under this name before is not any more. Where `out` cannot be written, or exists, nothing changes: raises `AuthError`.
    """
    path, pair = _guest_path(state_dir, name), generate(run, f"{GUEST_INTENT}{name}")
    if not run or not run.isprintable() or " " in run:
        raise AuthError(f"{run!r} cannot name a run", "name the run as its run.toml does")
    return _admitted(pair, path, f"{pair.public} {run}\n", out)


def _admitted(pair: KeyPair, path: Path, line: str, out: Path) -> KeyPair:
    """The pair, in the new file `out`, and `line` with its public half in the daemon's file `path`: both or neither."""
    _write_new(out, msgspec.json.encode(pair))
    try:
        write_private(path, line.encode())
    except BaseException:
        out.unlink(missing_ok=True)  # a key that nobody accepts
        raise
    return pair


# ---------------------------------------------------------------- harvesters of further clusters


def _cluster_path(state_dir: Path, name: str) -> Path:
    if not CLUSTER_NAME.fullmatch(name):
        raise AuthError(
            f"{name!r} cannot name a cluster", "use lower-case letters, digits and '-', 32 at most"
        )
    return state_dir / "keys" / "clusters" / f"{name}.pub"


def cluster_dir(state_dir: Path, name: str) -> Path:
    """What the daemon keeps of a further cluster: keys of its engines, its limits, whether its admin stopped harvesting."""
    return state_dir / "clusters" / name


def admit_cluster(state_dir: Path, name: str, out: Path) -> KeyPair:
    """A fresh pair for the harvester of a further cluster, written to the new file `out`. Its public half is kept; removing
    `keys/clusters/NAME.pub` revokes it, and the same name again replaces it. Where `out` cannot be written, or exists, nothing changes:
    raises `AuthError`.
    """
    path, pair = _cluster_path(state_dir, name), generate()
    return _admitted(pair, path, f"{pair.public}\n", out)


def cluster_keys(state_dir: Path, report: Report | None = None) -> dict[str, str]:
    """The public key of each further cluster's harvester, by the cluster's name. `report` as in `owner_keys`."""
    found: dict[str, str] = {}
    for path in sorted((state_dir / "keys" / "clusters").glob("*.pub")):
        try:
            public = read_private(path).decode("ascii", "replace").strip()
            if len(public) != Z85_KEY_LENGTH or not CLUSTER_NAME.fullmatch(path.stem):
                raise AuthError(f"{path} is no cluster's file", "make it again: `scavenger keys cluster`")
            found[path.stem] = public
        except AuthError as error:
            if report is None:
                raise
            if path.exists():  # else it was removed just now
                report(path.stem, error)
    return found


def _write_new(path: Path, data: bytes) -> None:
    """A file of mode 0600 that was not there. Raises `AuthError`."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError as error:
        raise AuthError(f"{path} exists", "name a file that does not; no key was changed") from error
    except OSError as error:
        raise AuthError(
            f"{path} cannot be written: {error.strerror}", "name another file; no key was changed"
        ) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:  # Ctrl-C too: half a key would stay
        path.unlink(missing_ok=True)
        raise


def guest_keys(state_dir: Path, report: Report | None = None) -> dict[str, KeyPair]:
    """Of each guest, by name: the public key with its run and intent, no secret. `report` as in `owner_keys`."""
    found: dict[str, KeyPair] = {}
    for path in sorted((state_dir / "keys" / "guests").glob("*.pub")):
        try:
            words = read_private(path).decode("ascii", "replace").split()
            if len(words) != 2 or len(words[0]) != Z85_KEY_LENGTH:
                raise AuthError(
                    f"{path} is no guest's file", "invite the guest again: `scavenger keys guest`"
                )
            found[path.stem] = KeyPair(words[0], "", words[1], f"{GUEST_INTENT}{path.stem}")
        except AuthError as error:
            if report is None:
                raise
            if path.exists():  # else it was removed just now
                report(path.stem, error)
    return found


# ---------------------------------------------------------------- changing keys


def add_owner_key(state_dir: Path, name: str, public: str) -> Path:
    """A further key for an enrolled owner: both may connect, and the runs are the same owner's. Repeating it changes nothing; a key that
    was retired is never accepted again (`AuthError`).
    """
    path = _owner_path(state_dir, name)
    found = _owner_keys(path)
    if public in [key.public for key in found if not key.allowed]:
        raise AuthError(
            f"that key of owner {name!r} was retired", "make another one: `scavenger keys make FILE`"
        )
    if public not in [key.public for key in found]:
        _write_owner(path, [OwnerKey(_checked(public), time.time()), *found])
    return path


def retire_owner_keys(state_dir: Path, name: str) -> int:
    """Of the owner's accepted keys only the newest may connect from now on; live sessions of the others end. Returns how many were retired.

    Raises `AuthError` where none could be: whoever asks because a key leaked must learn that it is still accepted.
    """
    path = _owner_path(state_dir, name)
    found = _owner_keys(path)
    accepted = [key.public for key in found if key.allowed]
    if not accepted:
        raise AuthError(f"no key of owner {name!r} is accepted: none was retired", _how_back(state_dir, name))
    if len(accepted) == 1:
        raise AuthError(
            f"owner {name!r} has one accepted key, and its newest stays: none was retired",
            f"{_how_anew(state_dir, name, accepted[0])}; to lock the owner out at once: `scavenger keys retire {name} --all`",
        )
    retire_other_keys(state_dir, name, accepted[0])
    return len(accepted) - 1


def retire_all_owner_keys(state_dir: Path, name: str) -> tuple[int, str]:
    """No key of the owner may connect from now on; live sessions end. The runs stay the owner's. Returns how many were retired, and what
    lets the owner back. Raises `AuthError` where none was accepted.
    """
    accepted = sum(key.allowed for key in _owner_keys(_owner_path(state_dir, name)))
    if not accepted:
        raise AuthError(f"no key of owner {name!r} is accepted: none was retired", _how_back(state_dir, name))
    retire_other_keys(state_dir, name, "")
    return accepted, _how_back(state_dir, name)


def _how_anew(state_dir: Path, name: str, public: str) -> str:
    """How the owner of this accepted key comes to a newer one, and the older is retired."""
    if joined_uid(state_dir, name) is not None:
        return f"as {name}: `scavenger join PUBLIC_DIR --new`, which retires the older ones"
    if _in_owner_key(state_dir) == public:
        return f"`scavenger keys rotate-owner {name}` first, then retire"
    return f"`scavenger keys make FILE` and `scavenger keys add {name} --public KEY` first, then retire"


def _how_back(state_dir: Path, name: str) -> str:
    """How an owner without an accepted key gets one."""
    if joined_uid(state_dir, name) is not None:
        return f"as {name}, while [owners] admits that user: `scavenger join PUBLIC_DIR --new`"
    mine = _in_owner_key(state_dir)
    if mine and mine in [key.public for key in _owner_keys(_owner_path(state_dir, name))]:
        return f"`scavenger keys rotate-owner {name}`"
    return f"`scavenger keys make FILE`, then `scavenger keys add {name} --public KEY`"


def _in_owner_key(state_dir: Path) -> str:
    """The public key in `keys/owner.key`; "" where there is no such file."""
    path = owner_key_path(state_dir)
    return read_keypair(path).public if path.exists() else ""


def retire_other_keys(state_dir: Path, name: str, public: str) -> None:
    """Only `public` of the owner's keys may connect from now on."""
    path = _owner_path(state_dir, name)
    now = time.time()
    _write_owner(
        path,
        [
            key if key.public == public or not key.allowed else msgspec.structs.replace(key, until=now)
            for key in _owner_keys(path)
        ],
    )


# ---------------------------------------------------------------- owners who joined as users of the site


def joined_dir(state_dir: Path) -> Path:
    return state_dir / "keys" / "joined"


def note_joined(state_dir: Path, name: str, uid: int) -> None:
    _owner_path(state_dir, name)  # raises for what cannot be an owner's name
    write_private(joined_dir(state_dir) / name, f"{uid}\n".encode())


def joined_uid(state_dir: Path, name: str) -> int | None:
    """The uid with which this owner joined; None for one who did not. Raises `AuthError` for a note that cannot be read."""
    _owner_path(state_dir, name)
    path = joined_dir(state_dir) / name
    if not path.exists():
        return None
    text = read_private(path).decode("ascii", "replace").strip()
    if not text.isdigit():
        raise AuthError(f"{path} does not hold a uid", "remove it: the user joins again")
    return int(text)


def _suspended_path(state_dir: Path, name: str) -> Path:
    return state_dir / "keys" / "suspended" / name


def is_suspended(state_dir: Path, name: str) -> bool:
    return _suspended_path(state_dir, name).exists()


def suspend_owner(state_dir: Path, name: str) -> None:
    """No key of the owner is in force until `resume_owner`; live sessions end. None is retired."""
    write_private(_suspended_path(state_dir, name), b"")


def resume_owner(state_dir: Path, name: str) -> None:
    _suspended_path(state_dir, name).unlink(missing_ok=True)


# ---------------------------------------------------------------- new keys for old ones


def rotate_owner(state_dir: Path, name: str) -> Path:
    """A new key pair for the owner whose key is `keys/owner.key`. Processes that read the old one go on with it until it is retired.

    The new key is enrolled before the file names it, so that a crash in between leaves a key that works.
    """
    path = owner_key_path(state_dir)
    its = _owner_keys(_owner_path(state_dir, name))
    mine = read_keypair(path).public
    if mine not in [key.public for key in its]:
        owners = [
            who for who, found in owner_keys(state_dir).items() if mine in [key.public for key in found]
        ]
        newest = next((key.public for key in its if key.allowed), "")
        anew = _how_anew(state_dir, name, newest) if newest else _how_back(state_dir, name)
        raise AuthError(
            f"{path} is not a key of owner {name!r}, who keeps one elsewhere",
            f"{anew}{f'. The owner of that file: `scavenger keys rotate-owner {owners[0]}`' if owners else ''}",
        )
    fresh = generate()
    add_owner_key(state_dir, name, fresh.public)
    write_keypair(path, fresh)
    return path


def rotate_server(state_dir: Path) -> Path:
    """A new key pair for the daemon, in use from its next start. Who reconnects reads it from the rendezvous file.

    Its jobs are known by what the first key said: that is written down first.
    """
    path = server_key_path(state_dir)
    write_private(state_dir / "keys" / "uid", site_uid(state_dir, read_keypair(path).public).encode() + b"\n")
    write_keypair(path, generate())
    return path


def site_uid(state_dir: Path, server_public: str) -> str:
    """Eight hex digits that tell our jobs from another daemon's. They outlive a change of the daemon's key."""
    path = state_dir / "keys" / "uid"
    if not path.exists():
        return blake3(server_public.encode()).hexdigest()[:8]
    uid = read_private(path).decode("ascii", "replace").strip()
    if len(uid) != 8 or not set(uid) <= set("0123456789abcdef"):
        raise AuthError(
            f"{path} does not hold eight hex digits",
            "restore the file, or remove it: present jobs are then cancelled as orphaned",
        )
    return uid


def listed(state_dir: Path) -> list[Listed]:
    """Every key that this state directory knows, without anything secret. Raises `AuthError` for a file that cannot be believed."""
    path = server_key_path(state_dir)
    server = read_keypair(path).public
    found = [Listed("daemon", "", server, path.stat().st_mtime, _server_state(state_dir, server))]
    mine = _in_owner_key(state_dir)
    for name, its in owner_keys(state_dir).items():
        found += [
            Listed(
                "owner",
                name,
                key.public,
                key.since,
                _owner_state(key, key.public == mine, is_suspended(state_dir, name)),
            )
            for key in its
        ]
    found += [
        Listed(
            "guest",
            f"{pair.run} {pair.intent}",
            pair.public,
            _guest_path(state_dir, name).stat().st_mtime,
            "accepted",
        )
        for name, pair in guest_keys(state_dir).items()
    ]
    found += [
        Listed("cluster", name, public, _cluster_path(state_dir, name).stat().st_mtime, "accepted")
        for name, public in cluster_keys(state_dir).items()
    ]
    for file in sorted((*state_dir.glob("workers/*.key"), *state_dir.glob("clusters/*/workers/*.key"))):
        try:
            pair, since = read_keypair(file), file.stat().st_mtime
        except (AuthError, FileNotFoundError):
            if file.exists():
                raise
            continue  # its job ended meanwhile
        found.append(
            Listed(
                "worker",
                f"{pair.run} {pair.intent}".strip(),
                pair.public,
                since,
                "accepted while its job lives",
            )
        )
    return found


def _server_state(state_dir: Path, public: str) -> str:
    try:
        announced = read_rendezvous(state_dir)
    except DaemonUnavailable:
        return "no daemon has announced itself"
    return "in use" if announced.server_key == public else "in use from the daemon's next start"


def _owner_state(key: OwnerKey, in_owner_key: bool, suspended: bool) -> str:
    if key.until is not None:
        return f"retired at {_utc(key.until)}" if key.until else "retired"
    if suspended:
        return "suspended: [owners] does not admit the user"
    return "accepted, and in keys/owner.key" if in_owner_key else "accepted"


def _utc(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def shown(found: Iterable[Listed]) -> list[str]:
    """For a terminal: a heading and one line a key."""
    rows = [("role", "who", "since", "public key", "state")]
    rows += [
        (key.role, key.who or "-", _utc(key.since) if key.since else "not known", key.public, key.state)
        for key in found
    ]
    widths = [max(len(row[at]) for row in rows) for at in range(4)]
    return [
        "  ".join((*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]))
        for row in rows
    ]


def init_state(state_dir: Path, owner: str) -> list[Path]:
    """Make the server's and the owner's keys where they are missing; returns the files that were written."""
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    written = []
    for path in (server_key_path(state_dir), owner_key_path(state_dir)):
        if not path.exists():
            write_keypair(path, generate())
            written.append(path)
    if not (state_dir / "keys" / "owners" / f"{owner}.pub").exists():
        written.append(enroll(state_dir, owner, read_keypair(owner_key_path(state_dir)).public))
    return written
