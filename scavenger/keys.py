"""CURVE keys and the rendezvous file: how processes find the daemon and prove who they are.

Owns the files under `<state_dir>/keys`, `<state_dir>/workers` and `<state_dir>/rendezvous.json`; every one is mode 0600
and replaced atomically. Secrets never leave these files: not into argv, environment, comments, scripts or logs.

    keys/server.key        the daemon's key pair
    keys/uid               by what the daemon's jobs are known, once its key was changed (before that the key itself says it)
    keys/owner.key         the key pair of the user who ran `scavenger init` (trainer and reserved engines)
    keys/owners/NAME.pub   public keys that may own runs (`scavenger enroll`), one a line, the newest first; "was KEY": not any more
    workers/INTENT.key     minted for one harvested job, bound to its run; it dies with the job, so it is never changed

An owner's runs are recorded under the first key that the owner ever had, the last line of NAME.pub: whoever holds a newer one owns them.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import msgspec
import zmq
from blake3 import blake3

from scavenger.errors import AuthError, DaemonUnavailable

Z85_KEY_LENGTH = 40


class KeyPair(msgspec.Struct, frozen=True):
    """A CURVE key pair in Z85. `run` and `intent` bind a worker's key to what it was minted for."""

    public: str
    secret: str
    run: str = ""
    intent: str = ""

    def __repr__(self) -> str:  # a secret must not reach a log through a traceback
        return f"KeyPair(public={self.public!r})"


class Rendezvous(msgspec.Struct, frozen=True):
    """Where the present daemon listens. Reread at every reconnect; `generation` tells an old file from a new one."""

    endpoint: str
    server_key: str
    generation: int
    pid: int
    host: str
    uid: str = ""  # of the generation: a number may be used again after an older ledger was restored


def generate(run: str = "", intent: str = "") -> KeyPair:
    """A fresh pair from libzmq's random source."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode(), run, intent)


def write_private(path: Path, data: bytes) -> None:
    """Replace `path` atomically by a file that only its owner can read, durable before it is visible."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mkstemp makes 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _read_private(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO) or status.st_uid != os.getuid():
                raise AuthError(f"{path} can be read by others or belongs to another user", f"chmod 600 {path}")
            return file.read(16 * 1024)
    except FileNotFoundError as error:
        raise AuthError(f"{path} does not exist", "run `scavenger init` first, or name the right state directory") from error
    except PermissionError as error:
        raise AuthError(f"{path} cannot be read: {error.strerror}", "run as the user who owns the key") from error


def write_keypair(path: Path, pair: KeyPair) -> None:
    write_private(path, msgspec.json.encode(pair))


def read_keypair(path: Path) -> KeyPair:
    """Read a key pair. Raises `AuthError` when it is missing, readable by others, or not a key."""
    try:
        pair = msgspec.json.decode(_read_private(path), type=KeyPair)
    except msgspec.MsgspecError as error:
        raise AuthError(f"{path} is not a key file: {error}", "make a new one with `scavenger init`") from error
    if len(pair.public) != Z85_KEY_LENGTH or len(pair.secret) != Z85_KEY_LENGTH:
        raise AuthError(f"{path} does not hold a CURVE key pair", "make a new one with `scavenger init`")
    return pair


def write_rendezvous(state_dir: Path, rendezvous: Rendezvous) -> None:
    write_private(state_dir / "rendezvous.json", msgspec.json.encode(rendezvous))


def read_rendezvous(state_dir: Path) -> Rendezvous:
    """Where the daemon listens. Raises `DaemonUnavailable` when none has written the file yet."""
    path = state_dir / "rendezvous.json"
    if not path.exists():
        raise DaemonUnavailable(f"no daemon has announced itself in {path}", "start it: `scavenger daemon`")
    try:
        return msgspec.json.decode(_read_private(path), type=Rendezvous)
    except msgspec.MsgspecError as error:
        raise DaemonUnavailable(f"{path} is not a rendezvous file: {error}", "restart the daemon") from error


def owner_key_path(state_dir: Path) -> Path:
    return state_dir / "keys" / "owner.key"


def server_key_path(state_dir: Path) -> Path:
    return state_dir / "keys" / "server.key"


def worker_key_path(state_dir: Path, intent_id: str) -> Path:
    return state_dir / "workers" / f"{intent_id}.key"


def _owner_path(state_dir: Path, name: str) -> Path:
    if not name.replace("-", "").replace("_", "").isalnum():
        raise AuthError(f"{name!r} cannot name an owner", "use letters, digits, '-' and '_'")
    return state_dir / "keys" / "owners" / f"{name}.pub"


def _owner_keys(path: Path) -> list[tuple[str, bool]]:
    """(public key, whether it may connect) of one owner, the newest first."""
    lines = _read_private(path).decode("ascii", "replace").split("\n")
    found = [(line.removeprefix("was ").strip(), not line.startswith("was ")) for line in lines if line.strip()]
    if not found or any(len(key) != Z85_KEY_LENGTH for key, _ in found):
        raise AuthError(f"{path} does not hold CURVE public keys", "enroll the owner again: `scavenger enroll`")
    return found


def _write_owner(path: Path, owner_keys: list[tuple[str, bool]]) -> None:
    write_private(path, "".join(f"{'' if allowed else 'was '}{key}\n" for key, allowed in owner_keys).encode())


def enrolled_owners(state_dir: Path) -> dict[str, str]:
    """Public key of everybody who may own runs -> the key that the owner's runs are recorded under."""
    owners: dict[str, str] = {}
    for path in sorted((state_dir / "keys" / "owners").glob("*.pub")):
        found = _owner_keys(path)
        owners |= {key: found[-1][0] for key, allowed in found if allowed}
    return owners


def owner_names(state_dir: Path) -> dict[str, str]:
    """The key that an owner's runs are recorded under -> the name that the owner was enrolled under."""
    files = sorted((state_dir / "keys" / "owners").glob("*.pub"))
    return {_owner_keys(path)[-1][0]: path.stem for path in files}


def enroll(state_dir: Path, name: str, public: str) -> Path:
    """Allow `public` to own runs under `name`, and no other key. Returns the file; removing it revokes the permission."""
    path = _owner_path(state_dir, name)
    _write_owner(path, [(_checked(public), True)])
    return path


def _checked(public: str) -> str:
    if len(public) != Z85_KEY_LENGTH:
        raise AuthError(f"{public!r} is not a CURVE public key in Z85 (40 characters)", "pass the `public` of the owner's key")
    return public


# ---------------------------------------------------------------- changing keys


def add_owner_key(state_dir: Path, name: str, public: str) -> Path:
    """A further key for an enrolled owner: both may connect, and the runs are the same owner's. Repeating it changes nothing."""
    path = _owner_path(state_dir, name)
    found = _owner_keys(path)
    if public not in [key for key, _ in found]:
        _write_owner(path, [(_checked(public), True), *found])
    return path


def retire_owner_keys(state_dir: Path, name: str) -> int:
    """Only the newest key of the owner may connect from now on; live sessions of the others end. Returns how many were retired."""
    path = _owner_path(state_dir, name)
    (newest, _), *older = _owner_keys(path)
    _write_owner(path, [(newest, True), *((key, False) for key, _ in older)])
    return sum(allowed for _, allowed in older)


def rotate_owner(state_dir: Path, name: str) -> Path:
    """A new key pair for the owner whose key is `keys/owner.key`. Processes that read the old one go on with it until it is retired.

    The new key is enrolled before the file names it, so that a crash in between leaves a key that works.
    """
    path = owner_key_path(state_dir)
    if read_keypair(path).public not in [key for key, allowed in _owner_keys(_owner_path(state_dir, name)) if allowed]:
        raise AuthError(f"{path} is not a key of owner {name!r}", "name the owner as its file in keys/owners is called")
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
    uid = _read_private(path).decode("ascii", "replace").strip()
    if len(uid) != 8 or not set(uid) <= set("0123456789abcdef"):
        raise AuthError(f"{path} does not hold eight hex digits", "restore the file, or remove it: present jobs are then strangers")
    return uid


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
