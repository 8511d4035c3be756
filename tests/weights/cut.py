"""A holder's death at a chosen byte."""

from __future__ import annotations

import contextlib
import socket
import threading

from scavenger.protocol import messages


class Cut:
    """Between a receiver and a holder: passes so many of the holder's bytes, whatever they are, then is gone as if that had been killed."""

    def __init__(self, source: messages.WeightSource, after: int) -> None:
        host, _, port = source.endpoint.removeprefix("tcp://").rpartition(":")
        self._to, self._left = (host, int(port)), after
        self._lock = threading.Lock()
        self._server = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = [self._server]
        self.address = messages.WeightSource(
            f"tcp://127.0.0.1:{self._server.getsockname()[1]}", source.server_key, source.token
        )
        self.gone = False
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # its end
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(self._to)
                with self._lock:
                    self._open += [near, far]
                    if self.gone:
                        break
                for args in ((near, far, False), (far, near, True)):
                    self._threads.append(threading.Thread(target=self._pass, args=args))
                    self._threads[-1].start()
        self._kill()

    def _pass(self, source: socket.socket, to: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):  # the other half ended
            while data := source.recv(1 << 16):
                with self._lock:
                    if counted:
                        data, over = data[: self._left], len(data) >= self._left
                        self._left -= len(data)
                    else:
                        over = False
                to.sendall(data)
                if over:
                    self._kill()

    def _kill(self) -> None:
        with self._lock:
            self.gone = True
            for sock in self._open:
                with contextlib.suppress(OSError):  # ended already
                    sock.shutdown(socket.SHUT_RDWR)
                sock.close()

    def __enter__(self) -> Cut:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._kill()
        for thread in self._threads:
            thread.join()
