"""Where a daemon is reached, in the rendezvous file: written when it serves, defended against older daemons, given up to a newer one.

Nothing is protected by this: workers and trainers check the key, generations fence in the ledger. Owns the daemon's view of that file.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from scavenger import keys, ownership
from scavenger.config import DaemonSection
from scavenger.ledger.transaction import Generation


class Announcement:
    """Of one daemon, whose section says how others reach it."""

    def __init__(self, state_dir: Path, section: DaemonSection) -> None:
        self._state_dir, self._section = state_dir, section
        self._mine: keys.Rendezvous | None = None

    def newest(self) -> int:
        """The newest generation that was announced here, whatever ledger it had."""
        return ownership.announced(self._state_dir).generation

    def publish(self, public: str, port: int, generation: Generation) -> str:
        """Write the file. Returns the endpoint that it names."""
        listen = self._section.listen
        host = self._section.advertise or (socket.gethostname() if listen == "0.0.0.0" else listen)
        endpoint = f"tcp://{host}:{port}"
        self._mine = keys.Rendezvous(endpoint, public, int(generation), os.getpid(), socket.gethostname(), generation.uid)
        keys.write_rendezvous(self._state_dir, self._mine)
        return endpoint

    def defend(self) -> str:
        """An older daemon's announcement is replaced. Returns why this daemon has to end when a newer one has announced itself, or ""."""
        if self._mine is None:
            return ""
        announced, mine = self.newest(), self._mine.generation
        if announced < mine:
            keys.write_rendezvous(self._state_dir, self._mine)
        if announced <= mine:
            return ""
        why = f"another daemon owns this ledger now, or has another: generation {announced} was announced in {self._state_dir}"
        return f"{why}; this daemon's is {mine}"
