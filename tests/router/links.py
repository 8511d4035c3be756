"""Connections without a network: two queues that keep their order, as ZeroMQ's do. Messages wait in them until an op delivers, loses or
repeats them; a connection that was given up keeps what was under way, which may still arrive: late, and behind newer connections.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from scavenger.protocol.messages import Message
from scavenger.router.core.events import PeerIdentity


@dataclass(eq=False)
class Link:
    """`conn`: the daemon's number for it. `old`: its peer has a newer one."""

    conn: int
    who: PeerIdentity
    generation: int  # of the daemon at its other end
    up: deque[Message] = field(default_factory=deque)
    down: deque[Message] = field(default_factory=deque)
    old: bool = False
    lossy: bool = False  # chunks were lost on it
