"""The web server as `scavenger web` runs it, in a thread of a test."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from scavenger.web import app as web
from scavenger.web.connections import Server


@contextmanager
def serving(url: str, token: str | None, *, port: int = 0, interval_s: float = 5.0) -> Iterator[int]:
    """Its port of 127.0.0.1. `port`: 0, or that of a server that ended."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(128)
        app = web.make_app(url, token, interval_s=interval_s)
        server = Server(app, app.state.site.close)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()
