"""`scavenger join`: a user of the site makes a key and asks the daemon to accept it. Owns the arguments, the wait and what is printed.

Boundary: the command of a user who is not the daemon's.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from scavenger.errors import AuthError, DaemonUnavailable
from scavenger.protocol import key_requests, keys

_POLL_S = 0.5


def join(
    public_dir: Annotated[Path, typer.Argument(help="the site's public folder; its admin names it")],
    new: Annotated[
        bool, typer.Option("--new", help="make another key, and let no older one of yours connect any more")
    ] = False,
    wait_s: Annotated[float, typer.Option("--wait", min=0.0, help="seconds to wait for the answer")] = 30.0,
) -> None:
    """Ask the site's daemon to accept your key, so that you can own runs. Makes the key where you have none."""
    key_requests.require_site(public_dir)
    path = keys.own_key_path()
    fresh = new or not path.exists()
    pair = keys.generate() if fresh else keys.read_keypair(path)
    there = path.with_name(path.name + ".new") if new else path
    if fresh:
        keys.write_keypair(there, pair)
    key_requests.ask(public_dir, key_requests.KeyRequest(pair.public, only=new))
    given = _answer(public_dir, pair.public, wait_s)
    if given.refused:
        raise AuthError(given.refused, given.remedy)
    if new:
        os.replace(there, path)  # not before: who is refused keeps the key that is accepted
    keys.note_site(public_dir.resolve())
    print(f"{given.name} may own runs here, with {path}")
    print(
        f'in run.toml: [run] state_dir = "{public_dir.resolve()}"; `scavenger init` writes it so from now on'
    )


def _answer(public_dir: Path, public: str, wait_s: float) -> key_requests.KeyAnswer:
    by = time.monotonic() + wait_s
    while True:
        given = key_requests.read_answer(public_dir, os.getuid())
        if given is not None and given.public == public:
            return given
        if time.monotonic() >= by:
            raise DaemonUnavailable(
                f"no answer within {wait_s:g} s: the request waits in {key_requests.requests_dir(public_dir)}",
                "ask the site's admin whether the daemon runs; then join again",
            )
        time.sleep(_POLL_S)
