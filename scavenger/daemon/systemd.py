"""What the daemon tells the service manager that started it: ready, alive, reloading, stopping. sd_notify(3), without its library.

Owns the socket of `NOTIFY_SOCKET` and the rhythm of the watchdog. A ping is a promise that the daemon works, so it is sent only when
`turns`, which the router's own loop moves, is another number than at the last ping: a loop that hangs, or a router whose tick ended, is
killed by the manager and started again. Without a manager all of this does nothing. Knows no router.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping

import structlog

from scavenger.asyncio_helpers import within

log = structlog.get_logger()


class Notifier:
    """`environ`: where NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID are; they are of this process, so children must not inherit them."""

    def __init__(self, environ: Mapping[str, str], pid: int) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) if address else None
        )
        if self._socket is not None:
            self._socket.setblocking(False)  # a manager that reads nothing must not stop the loop
        usec = environ.get("WATCHDOG_USEC", "")
        mine = environ.get("WATCHDOG_PID", str(pid)) == str(pid)
        #: Seconds within which the manager wants to hear from us; 0: it does not.
        self.watchdog_s = int(usec) / 1e6 if usec.isdigit() and mine and self._socket is not None else 0.0

    def say(self, **fields: str) -> None:
        """One message, e.g. `say(READY="1", STATUS="serving")`. One that cannot be sent is logged and lost."""
        if self._socket is None:
            return
        text = "\n".join(f"{name}={value.replace(chr(10), ' ')}" for name, value in fields.items())
        try:
            self._socket.sendto(text.encode(), self._address)
        except OSError as error:
            log.warning("the service manager was not told", what=",".join(fields), reason=str(error))

    def ready(self, status: str) -> None:
        self.say(READY="1", STATUS=status)

    def waiting(self, status: str, seconds: float) -> None:
        """Not ready yet, and for a reason: the start may take `seconds` more from now."""
        self.say(EXTEND_TIMEOUT_USEC=str(int(seconds * 1e6)), STATUS=status)

    def reloading(self) -> None:
        self.say(RELOADING="1", MONOTONIC_USEC=str(time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000))

    def stopping(self, status: str) -> None:
        self.say(STOPPING="1", STATUS=status)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def watch(self, turns: Callable[[], int], stop: asyncio.Event) -> None:
        """Ping until `stop`, three times in the manager's patience, and only if `turns` moved since the last ping."""
        if not self.watchdog_s:
            return
        last = None
        while not stop.is_set():
            now = turns()
            if now != last:
                last = now
                self.say(WATCHDOG="1")
            else:
                log.error(
                    "the router's loop did not turn; the service manager is not told that all is well",
                    turns=now,
                )
            await within(stop, self.watchdog_s / 3)
