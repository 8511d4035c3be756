"""`scavenger join`: a user of the site makes a key and asks the daemon to accept it. Owns the arguments, the wait and what is printed.

Boundary: the command of a user who is not the daemon's.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from scavenger.errors import AuthError, DaemonUnavailable
from scavenger.host import munge
from scavenger.protocol import key_requests, keys

_POLL_S = 0.5


def join(
    public_dir: Annotated[Path, typer.Argument(help="the site's public folder; its admin names it")],
    new: Annotated[
        bool, typer.Option("--new", help="make another key, and let no older one of yours connect any more")
    ] = False,
    wait_s: Annotated[float, typer.Option("--wait", min=0.0, help="seconds to wait for the reply")] = 30.0,
) -> None:
    """Ask the site's daemon to accept your key, so that you can own runs. Makes the key where you have none."""
    key_requests.require_site(public_dir)
    path, pending = keys.own_key_path(), keys.own_key_path().with_name("owner.key.new")
    if (
        pending.exists()
    ):  # an earlier `--new` had no reply: the daemon may have accepted that key, and no other, meanwhile
        new, pair = True, keys.read_keypair(pending)
    elif new or not path.exists():
        pair = keys.generate()
        keys.write_keypair(pending if new else path, pair)
    else:
        pair = keys.read_keypair(path)
    request = _proved(key_requests.new_request(pair.public, only=new))
    key_requests.ask(public_dir, request)
    reply = _wait(public_dir, request, wait_s)
    if reply.refused:
        pending.unlink(missing_ok=True)
        raise AuthError(reply.refused, reply.remedy)
    if new:
        os.replace(pending, path)  # not before: a user who is refused keeps the key that is accepted
    keys.note_site(public_dir.resolve())
    print(f"{reply.name} may own runs here, with {path}")
    print(
        f'in run.toml: [run] state_dir = "{public_dir.resolve()}"; `scavenger init` writes it so from now on'
    )


def _proved(request: key_requests.KeyRequest) -> key_requests.KeyRequest:
    """With a MUNGE credential, where this host can make one. A daemon that asks for it says so where there is none."""
    try:
        return msgspec.structs.replace(request, proof=munge.credential(request.claim))
    except AuthError:
        return request


def _wait(public_dir: Path, request: key_requests.KeyRequest, wait_s: float) -> key_requests.KeyReply:
    by = time.monotonic() + wait_s
    while True:
        found = key_requests.read_reply(public_dir, os.getuid(), request)
        if found is not None:
            return found
        if time.monotonic() >= by:
            raise DaemonUnavailable(
                f"no reply within {wait_s:g} s: the request waits in {key_requests.requests_dir(public_dir)}",
                "ask the site's admin whether the daemon runs; then join again",
            )
        time.sleep(_POLL_S)
