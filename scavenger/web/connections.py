"""Bounds on what a connection may take of the web server before it has shown a token: time, memory and file descriptors.

    opened --HEAD_S--> a whole request --the reply, read within STALLED_S--> again

uvicorn waits for a request for ever, and each byte of one begins its waiting anew. Here a request's head has a time of its own, and of the
connections that wait for one the oldest gives way to a new one: a viewer sends its request at once.

Boundary: what uvicorn does with a socket, and it is imported here and nowhere else in this folder; knows no page.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

#: Seconds for a request's head, from the connection or the reply before it.
HEAD_S = 10.0
#: Seconds in which a viewer that has more than asyncio's buffer (64 KiB) to read takes nothing of it.
STALLED_S = 60.0
#: Connections without a request at a time; each holds 64 KiB at most.
MOST_WAITING = 256


class Connection(H11Protocol):
    """uvicorn's connection with these bounds. `waiting_since`: the loop's time, None while a request is answered."""

    waiting_since: float | None = None
    _head: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn narrows the type, too
        super().connection_made(transport)
        self._wait()
        waiting = [
            one for one in self.connections if isinstance(one, Connection) and one.waiting_since is not None
        ]
        if len(waiting) > MOST_WAITING:
            min(waiting, key=_since).end()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._asked()
        self._taken()

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._asked()

    def on_response_complete(self) -> None:
        # Before uvicorn's, which may begin the next request that has come already.
        self._wait()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._taken()

    def end(self) -> None:
        """Close it, once what it was sent is read."""
        self._asked()
        self.transport.close()
        if self._stalled is None and self.transport.get_write_buffer_size():
            # asyncio waits for the rest to be sent, for ever, and says nothing of it below 64 KiB
            self._stalled = self.loop.call_later(STALLED_S, self.transport.abort)

    def _wait(self) -> None:
        self._asked()
        self.waiting_since = self.loop.time()
        self._head = self.loop.call_later(HEAD_S, self.end)

    def _asked(self) -> None:
        self.waiting_since = None
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _taken(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


def _since(one: Any) -> float:
    return float(one.waiting_since or 0.0)


class Server(uvicorn.Server):
    """Serves `app` to sockets that listen. `before_end` lets the viewers' connections end, which would otherwise be open when it stops."""

    def __init__(self, app: Any, before_end: Callable[[], Awaitable[None]]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                access_log=False,  # an address may hold the token
                log_level="error",  # of what is no HTTP there would be a line each
                server_header=False,
                timeout_graceful_shutdown=1,
                timeout_keep_alive=60,  # `HEAD_S` is what ends one: at 5 s a page that is renewed every 5 s would meet its end
                http=Connection,
                ws="none",
            )
        )
        self._before_end = before_end

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._before_end()
        await super().shutdown(sockets)
