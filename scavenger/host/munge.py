"""MUNGE: a credential says which user of the site made it, as Slurm's own requests do. By its two commands, `munge` and `unmunge`.

Boundary: the site's munged; IO.

A credential is valid for munged's time to live (300 s) and for one decoding on each host: one that is used again is refused. `socket` names
munged's own where it is not the default.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

from scavenger.errors import AuthError

TIMEOUT_S = 10.0
_REMEDY = "see to munged on this host: `munge -n | unmunge`"


def credential(payload: str, socket: str = "") -> str:
    """A credential of this process's user over `payload`. Raises `AuthError`."""
    done = _run(["munge", *_of(socket)], payload)
    if done.returncode:
        raise AuthError(f"munge: {done.stderr.strip()[:200] or f'status {done.returncode}'}", _REMEDY)
    return done.stdout.strip()


def user_of(text: str, payload: str, socket: str = "") -> int:
    """The uid of who made this credential over `payload`. Raises `AuthError`: it is none, too old, used already, or over something else."""
    done = _run(["unmunge", "--numeric", "--keys=STATUS,UID", *_of(socket)], text)
    head, _, body = done.stdout.partition("\n\n")
    found = re.fullmatch(r"STATUS:\s+0\s+UID:\s+(\d{1,10})\s*", head)
    if done.returncode or found is None:
        said = (done.stderr.strip() or head or f"status {done.returncode}")[:200]
        raise AuthError(f"no credential of a user's: {said}", "ask again; then see to munged and the clocks")
    if body != payload:
        raise AuthError("the credential is over something else", "ask again")
    return int(found[1])


def _of(socket: str) -> Sequence[str]:
    return (f"--socket={socket}",) if socket else ()


def _run(argv: Sequence[str], text: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            argv, input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AuthError(f"{argv[0]}: {error}", _REMEDY) from error
