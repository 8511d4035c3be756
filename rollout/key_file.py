"""A key file that the daemon writes anew while this process runs: waited for, as shared file systems show it late.

Boundary: one file; IO.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from scavenger.errors import AuthError
from scavenger.protocol.keys import KeyPair, read_keypair

ASK_AGAIN_S = 0.2


async def read_when_there(path: Path, public_key: str, within_s: float) -> KeyPair:
    """The pair with this public key. Raises `AuthError` where the file does not have it in time."""
    by = time.monotonic() + within_s
    while True:
        fault = None
        try:
            pair = read_keypair(path)
        except AuthError as error:
            fault = error
        else:
            if pair.public == public_key:
                return pair
        if time.monotonic() >= by:
            cause = f"{path} does not have the key of the run to work for after {within_s:g} s"
            raise AuthError(cause) from fault
        await asyncio.sleep(ASK_AGAIN_S)
