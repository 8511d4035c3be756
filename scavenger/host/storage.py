"""Whether the daemon can write where it must, and the one error for a place where it cannot.

Owns that check and its words. A disk that is full may have room again without a change of the configuration, so the
exit status is not that of a configuration error: a service manager tries again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from pathlib import Path

from scavenger.errors import ConfigError, ScavengerError

#: What a daemon that starts must be able to write: an empty ledger takes a third of it.
LEAST_BYTES = 2**20
_REMEDIES = {
    errno.ENOSPC: "free space there, or give the file system more",
    errno.EDQUOT: "raise the daemon's user's quota there, or free some of it",
    errno.EFBIG: "raise the limit on a file's size (LimitFSIZE= in the unit, `ulimit -f`)",
    errno.EROFS: "mount it writable (under systemd: ReadWritePaths= of the unit; else the kernel mounts a failing disk read-only: dmesg)",
    errno.EIO: "look at the disk or its server (dmesg)",
    errno.ESTALE: "mount it again: its server was restarted",
    errno.ENOTCONN: "mount it again: its server is gone",
    errno.ETIMEDOUT: "see to its server",
}
_MAY_NOT = frozenset({errno.EACCES, errno.EPERM})
#: What says, of any call, that a file could not be written.
_NOT_WRITTEN = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})


class StorageError(ScavengerError):
    """Nothing can be written where the daemon keeps its state. It may pass by itself: exit status 1, and it is tried again."""


def explained(error: OSError, path: Path, what: str) -> ScavengerError:
    """The error for `what` (a key of scavenger.toml) at `path`, with what is free there."""
    why = error.strerror or str(error)
    if error.errno in _MAY_NOT:
        return ConfigError(
            f"{what}: {path} cannot be written: {why}",
            f"give the daemon's user write permission there ({what})",
        )
    remedy = _REMEDIES.get(error.errno or 0, "see to the file system")
    return StorageError(f"{what}: {path} cannot be written: {why} ({free_text(path)})", remedy)


def not_written(error: OSError) -> StorageError | None:
    """The error for a file that a command could not write, because its file system takes no more; None for any other error."""
    if error.errno not in _NOT_WRITTEN:
        return None
    path = Path(error.filename or ".").absolute()
    return StorageError(
        f"{path} cannot be written: {error.strerror} ({free_text(path)}): the command is not done",
        f"{_REMEDIES[error.errno]}, then give the command again",
    )


def is_about_storage(error: OSError) -> bool:
    """Whether it says that a file system cannot take what is written, rather than that something is wrong with us."""
    return error.errno in _REMEDIES


def free_text(path: Path) -> str:
    """What is free on the file system of `path`, or of what there is of it."""
    there = next((one for one in (path, *path.absolute().parents) if one.exists()), Path("/"))
    try:
        seen = os.statvfs(there)
    except OSError as error:
        return f"what is free is not known: {error.strerror}"
    return f"{seen.f_bavail * seen.f_frsize:,} bytes free, {seen.f_favail:,} files"


def require_writable(folder: Path, what: str, nbytes: int = LEAST_BYTES) -> None:
    """Write `nbytes` to a file of the folder, and remove it. Raises what `explained` gives."""
    try:
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=".scavenger-probe.")
        try:
            with os.fdopen(descriptor, "wb") as probe:
                probe.write(bytes(nbytes))
                probe.flush()
                os.fsync(probe.fileno())
        finally:
            with contextlib.suppress(OSError):
                os.unlink(name)
    except OSError as error:
        raise explained(error, folder, what) from error


def require_state_dir(folder: Path) -> None:
    """Raise `StorageError` when it is not there: it may be a file system that is not mounted yet."""
    if not folder.is_dir():
        raise StorageError(
            f"daemon.state_dir: there is no folder {folder}", "mount it, or make it with `scavenger init`"
        )
