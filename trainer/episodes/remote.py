"""Rank 0's end of the socket to environment workers in jobs of their own: who has joined, who is lost, who may not join.

    worker's frames --> Sessions.heard  --+--> Tell(route, message)      back over the socket
    silence         --> Sessions.silent --+--> Happened(number, event)   to the pool: Joined, Ready, Played, Gone

A session is one connection of one worker, and its number is the pool's. A worker whose connection broke, or that was silent for `LEASE_S`,
has no session any more: what it says later is refused, and it joins again under another number. So no message is ever sent twice: one that
was lost with its connection is one of a lost worker, whose episodes are played again.

Where the pool listens, and the key pair that opens it, are in `out_dir/environment-workers.json` (mode 0600), for as long as the pool is
open. Each pool has keys of its own.

Boundary: `Sessions` is pure; `WorkerPort` owns the socket and its thread. Neither knows what an episode is.
"""

from __future__ import annotations

import contextlib
import math
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from scavenger import __version__
from scavenger.errors import AuthError, ConfigError, WireError
from scavenger.protocol import keys
from scavenger.protocol.messages.common import ENVIRONMENT_FILE, MAX_MESSAGE_BYTES
from trainer.episodes import wire

FILE = ENVIRONMENT_FILE
#: Messages that wait for one worker; one that does not read so many is lost.
SEND_QUEUE = 10_000
LINGER_MS = 2_000
#: Frames that are read before anything else is done.
MOST_AT_ONCE = 256


# ---------------------------------------------------------------- what joined and what is lost; pure


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker waits for its set-up. `name`: its host, and its job."""

    name: str


@dataclass(frozen=True, slots=True)
class Gone:
    """Its session is over. `failed`: an episode that it played may have caused that."""

    reason: str
    failed: bool


Event = Joined | wire.Ready | wire.Played | Gone


@dataclass(frozen=True, slots=True)
class Tell:
    route: bytes
    message: wire.ToRemote


@dataclass(frozen=True, slots=True)
class Happened:
    number: int
    event: Event


Action = Tell | Happened


@dataclass(slots=True)
class Session:
    number: int
    heard_at: float


class Sessions:
    """`most` sessions at once; each is lost after `lease_s` of silence. `number`: of the next one. Times in seconds."""

    def __init__(
        self,
        most: int,
        number: Callable[[], int],
        *,
        lease_s: float = wire.LEASE_S,
        most_bytes: int = MAX_MESSAGE_BYTES,
        release: str = __version__,
    ) -> None:
        self._most, self._number, self._lease_s, self._release = most, number, lease_s, release
        self._most_bytes = most_bytes
        self._by_route: dict[bytes, Session] = {}

    @property
    def routes(self) -> list[bytes]:
        return list(self._by_route)

    def route(self, number: int) -> bytes | None:
        return next((route for route, one in self._by_route.items() if one.number == number), None)

    def heard(self, route: bytes, frame: bytes, now: float) -> list[Action]:
        """A worker's frame. One that is no message ends its session."""
        one = self._by_route.get(route)
        try:
            if one is None:
                return self._join(route, wire.hello_of(frame), now)
            message = wire.from_remote(frame, self._most_bytes)
        except WireError as error:
            refused: list[Action] = [Tell(route, wire.Refused(error.cause[:1000], again=one is None))]
            return refused + (self.over(route, error.cause, failed=True) if one is not None else [])
        one.heard_at = now
        match message:
            case wire.Goodbye(reason=reason, failed=failed):
                return self.over(route, reason, failed=failed)
            case wire.Ready() | wire.Played():
                return [Happened(one.number, message)]
        return []  # Alive; or Hello a second time, which changes nothing

    def _join(self, route: bytes, hello: wire.Hello, now: float) -> list[Action]:
        if hello.release != self._release:
            why = f"this worker is of release {hello.release}, and the training job of {self._release}"
            return [Tell(route, wire.Refused(why, "start both from one installation"))]
        if len(self._by_route) >= self._most:
            why = f"{self._most} environment workers in jobs have joined (data.environment_jobs)"
            # One of them may be this very worker, whose connection broke, or one whose job ended: that is known `lease_s` later.
            return [
                Tell(route, wire.Refused(why, "end this job, or raise data.environment_jobs", again=True))
            ]
        number = self._number()
        self._by_route[route] = Session(number, now)
        return [Happened(number, Joined(f"{hello.host} job {hello.job}" if hello.job else hello.host))]

    def silent(self, now: float) -> list[Action]:
        """Workers whose lease has run out. Ask only after all that has come was heard."""
        late = [route for route, one in self._by_route.items() if now - one.heard_at > self._lease_s]
        why = f"it was silent for {self._lease_s:g} s"
        return [action for route in late for action in self.over(route, why, failed=True)]

    def over(self, route: bytes, reason: str, *, failed: bool) -> list[Action]:
        """Its session ends, where it has one."""
        one = self._by_route.pop(route, None)
        return [Happened(one.number, Gone(reason, failed))] if one is not None else []


# ---------------------------------------------------------------- the file


class WorkerAccess(msgspec.Struct, frozen=True):
    """How a worker joins. `arguments`: run.toml and what is laid over it, as its gateway takes them in `folder`; `python`: what plays."""

    endpoint: str
    server_key: str
    public: str
    secret: str
    run: str
    arguments: tuple[str, ...]
    folder: str
    python: str

    def __repr__(self) -> str:  # a secret must not reach a log through a traceback
        return f"WorkerAccess(endpoint={self.endpoint!r}, run={self.run!r})"


def access_in(file: Path) -> WorkerAccess | None:
    """None: no pool is open. Raises `AuthError` for a file that others could have written, or read."""
    try:
        return msgspec.json.decode(keys.read_private(file), type=WorkerAccess)
    except AuthError:
        if not file.exists():
            return None
        raise
    except msgspec.MsgspecError as error:
        raise AuthError(f"{file} is not what a training job wrote: {error}", "remove it") from error


# ---------------------------------------------------------------- the socket


@dataclass(frozen=True, slots=True)
class PortSettings:
    """Of a run. `most`: workers at once. `port` 0: the system chooses. `advertise`: what workers on other hosts connect to."""

    file: Path
    most: int
    run: str
    arguments: tuple[str, ...]
    folder: str
    python: str
    listen: str = "0.0.0.0"
    port: int = 0
    advertise: str = ""
    beat_s: float = wire.BEAT_S
    lease_s: float = wire.LEASE_S
    most_bytes: int = MAX_MESSAGE_BYTES


class _OneKey:
    """ZAP: the key pair of this pool's workers, and no other."""

    def __init__(self, public: str) -> None:
        self._public = public.encode()

    def callback(self, _domain: str, key: bytes) -> bool:
        return key == self._public


class WorkerPort:
    """Listens from its construction on. `post`: called from its thread with what happened; `number`: as `Sessions`.

    `tell`, `refuse` and `close` are for one thread, the pool's.
    """

    def __init__(
        self,
        settings: PortSettings,
        post: Callable[[int, Event], None],
        number: Callable[[], int],
        say: Callable[[str], None] = print,
    ) -> None:
        """Raises `ConfigError` where it cannot listen."""
        self._settings, self._post, self._say = settings, post, say
        self._sessions = Sessions(
            settings.most, number, lease_s=settings.lease_s, most_bytes=settings.most_bytes
        )
        server, worker = keys.generate(), keys.generate()
        self._context = zmq.Context()
        self._auth = ThreadAuthenticator(self._context)
        self._auth.start()
        self._auth.configure_curve_callback(domain="*", credentials_provider=_OneKey(worker.public))
        router = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.CURVE_SERVER, 1),
            (zmq.CURVE_PUBLICKEY, server.public.encode()),
            (zmq.CURVE_SECRETKEY, server.secret.encode()),
            (zmq.ROUTER_MANDATORY, 1),  # a connection that broke is an error, and not silence
            (zmq.SNDHWM, SEND_QUEUE),
            (zmq.MAXMSGSIZE, settings.most_bytes),
            (zmq.HANDSHAKE_IVL, 10_000),
            (zmq.LINGER, 0),
        ):
            router.setsockopt(option, value)
        try:
            port = _bound(router, settings)
        except ConfigError:
            router.close()
            self._auth.stop()
            self._context.term()
            raise
        host = settings.advertise or (
            socket.gethostname() if settings.listen == "0.0.0.0" else settings.listen
        )
        self.access = WorkerAccess(
            f"tcp://{host}:{port}",
            server.public,
            worker.public,
            worker.secret,
            settings.run,
            settings.arguments,
            settings.folder,
            settings.python,
        )
        self._announced = msgspec.json.encode(self.access)
        self._orders: queue.SimpleQueue[tuple[int, wire.ToRemote]] = queue.SimpleQueue()
        self._wake = self._context.socket(zmq.PUSH)
        woken = self._context.socket(zmq.PULL)
        woken.bind("inproc://wake")
        self._wake.connect("inproc://wake")
        self._closing = False
        self._thread = threading.Thread(
            target=self._serve, args=(router, woken), name="environment workers", daemon=True
        )
        self._thread.start()
        try:
            keys.write_private(settings.file, self._announced)
        except BaseException:  # no disk, or Ctrl-C: a port that no worker finds would keep listening
            self.close()
            raise

    def tell(self, number: int, message: wire.Setup | wire.Play) -> None:
        """To that worker; nothing where it is gone, which is told otherwise."""
        self._ordered(number, message)

    def refuse(self, number: int, refused: wire.Refused) -> None:
        """End its session."""
        self._ordered(number, refused)

    def _ordered(self, number: int, message: wire.ToRemote) -> None:
        self._orders.put((number, message))
        with contextlib.suppress(zmq.Again):  # it is awake already
            self._wake.send(b"", zmq.NOBLOCK)

    def close(self) -> None:
        """Let all workers go, and nobody join any more. Its file is removed, unless it is another pool's by now."""
        with contextlib.suppress(OSError):
            if self._settings.file.read_bytes() == self._announced:
                self._settings.file.unlink()
        self._closing = True
        with contextlib.suppress(zmq.Again):
            self._wake.send(b"", zmq.NOBLOCK)
        self._thread.join()
        self._wake.close(linger=0)
        self._auth.stop()
        self._context.term()

    # ---------------------------------------------------------------- its thread

    def _serve(self, router: zmq.Socket[bytes], woken: zmq.Socket[bytes]) -> None:
        linger = 0
        try:
            poller = zmq.Poller()
            poller.register(router, zmq.POLLIN)
            poller.register(woken, zmq.POLLIN)
            beat_at = time.monotonic()
            while not self._closing:
                poller.poll(max(0, math.ceil((beat_at - time.monotonic()) * 1000)))
                _drained(woken)
                came = _received(router)
                for route, frame in came:
                    self._do(router, self._sessions.heard(route, frame, time.monotonic()))
                self._carry_out(router)
                if time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + self._settings.beat_s
                    if len(came) < MOST_AT_ONCE:  # else this process was busy, and they were not silent
                        self._do(router, self._sessions.silent(time.monotonic()))
                    self._do(router, [Tell(route, wire.Alive()) for route in self._sessions.routes])
            self._do(router, [Tell(route, wire.Leave()) for route in self._sessions.routes])
            linger = LINGER_MS
        except zmq.ZMQError as error:  # the run goes on with its own workers
            self._say(f"environment workers in jobs are lost, and no further one joins: {error}")
            for route in self._sessions.routes:
                for action in self._sessions.over(route, str(error), failed=False):
                    assert isinstance(action, Happened)
                    self._post(action.number, action.event)
        finally:
            router.close(linger=linger)
            woken.close(linger=0)

    def _carry_out(self, router: zmq.Socket[bytes]) -> None:
        while True:
            try:
                number, message = self._orders.get_nowait()
            except queue.Empty:
                return
            route = self._sessions.route(number)
            if route is None:
                continue
            self._do(router, [Tell(route, message)])
            if isinstance(message, wire.Refused):
                self._do(router, self._sessions.over(route, message.reason, failed=False))

    def _do(self, router: zmq.Socket[bytes], actions: Sequence[Action]) -> None:
        left = list(actions)
        while left:
            match left.pop(0):
                case Tell(route=route, message=message):
                    try:
                        router.send_multipart([route, wire.encode(message)], zmq.NOBLOCK)
                    except (
                        zmq.ZMQError
                    ) as error:  # EHOSTUNREACH: the connection is gone; EAGAIN: it reads nothing
                        if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                            raise
                        left += self._sessions.over(route, "its connection is lost", failed=True)
                case Happened(number=number, event=event):
                    self._post(number, event)


def _bound(router: zmq.Socket[bytes], settings: PortSettings) -> int:
    try:
        router.bind(f"tcp://{socket.gethostbyname(settings.listen)}:{settings.port or '*'}")
    except (zmq.ZMQError, OSError) as error:
        raise ConfigError(
            f"environment workers cannot be listened for on {settings.listen} port {settings.port}: {error}",
            "see data.environment_port and weights.listen",
        ) from error
    bound = router.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return int(bound.rstrip(b"\0").rpartition(b":")[2])


def _received(router: zmq.Socket[bytes]) -> list[tuple[bytes, bytes]]:
    """What has come, a frame each, up to `MOST_AT_ONCE`; what has other parts is not of a worker."""
    found: list[tuple[bytes, bytes]] = []
    while len(found) < MOST_AT_ONCE and router.poll(0):
        parts = router.recv_multipart(zmq.NOBLOCK)
        if len(parts) == 2:
            found.append((parts[0], parts[1]))
    return found


def _drained(woken: zmq.Socket[bytes]) -> None:
    with contextlib.suppress(zmq.Again):
        while True:
            woken.recv(zmq.NOBLOCK)
