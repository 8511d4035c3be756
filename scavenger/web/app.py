"""The web server of `scavenger web`: who may read, which page a path names, and the news of the ledger.

All viewers share one poller and one cache: a page is asked of the ledger once for each change, whoever reads it. The ledger is opened anew
for each page, so a daemon may go, come back, or have its ledger replaced.

Boundary: starlette is imported here and nowhere else in this folder, and uvicorn in `connections`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hmac
import math
import os
import re
import resource
import secrets
import shlex
import socket
import stat
import time
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import sqlalchemy as sa
from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scavenger.asyncio_helpers import HungUp, listening_socket, unless_gone
from scavenger.errors import AuthError, ConfigError, NotInLedger, ScavengerError, describe
from scavenger.ledger.read.reader import connected
from scavenger.printable import printable
from scavenger.protocol import keys
from scavenger.web import pages, questions, render, steps, texts
from scavenger.web.connections import Server
from scavenger.web.panels import Page, Panel, ask

HERE = Path(__file__).parent
COOKIE = "scavenger_web"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    # No page of elsewhere has this one's window, or can tell from an image of it whether it is there.
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
MOST_CACHED, MOST_VIEWERS = 64, 100
#: Pages that are built at a time, each in a thread; of them those of a kind that may take long: a run's tokenizer is its owner's.
MOST_BUILT, MOST_OF = 16, {"search": 2, "texts": 6}
#: The same of one run: its tokenizer, however slow, leaves places to the texts of other runs.
MOST_OF_A_RUN = {"search": 1, "texts": 2}
#: A cookie's life, and how many there are at once: of older ones the token is asked again.
SESSION_S, MOST_SESSIONS = 12 * 3600.0, 1_000
#: Names of this host in an address.
LOOPBACK = frozenset({"", "localhost", "127.0.0.1", "[::1]"})
#: How the paths of our own pages begin: no prefix begins so, since a proxy may strip it and nobody could tell the two apart.
OWN = frozenset({"runs", "compare", "groups", "samples", "episodes", "harm", "decisions", "live", "static"})
#: Characters that a reader may search for.
MOST_WANTED = 200
_MOST_ID = 2**62
_T = TypeVar("_T")


def read_token(path: Path) -> str:
    """The token in `path`, made where there is none. Raises `AuthError` where it is another user's, others can read it, or it is none."""
    if not path.exists():
        keys.write_private(path, secrets.token_urlsafe(32).encode())
    if (owner := path.stat().st_uid) != os.getuid():
        raise AuthError(
            f"{path} belongs to another user (uid {owner}, you are {os.getuid()})",
            "run it as that user (as root: runuser -u scavenger -- scavenger web), or name a --token-file of your own",
        )
    token = keys.read_private(path).decode("utf-8", "replace").strip()
    if not re.fullmatch(r"[A-Za-z0-9._~-]{20,}", token):
        raise AuthError(
            f"{path} holds no token of 20 letters, digits and ._~- or more",
            f"remove {path}: a new one is made",
        )
    return token


class Guard:
    """Lets nobody in without the token, and gives every reply its headers. `token` None: the socket's file mode guards."""

    def __init__(self, app: ASGIApp, token: str | None, prefix: str, hosts: frozenset[str]) -> None:
        self._app, self._token, self._prefix, self._hosts = app, token, prefix, hosts
        self._sessions: OrderedDict[str, float] = OrderedDict()  # cookie: until when (monotonic)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        path = scope["path"]
        if self._prefix and not path.startswith(f"{self._prefix}/"):  # the proxy took it away
            path = self._prefix + ("/" if path == self._prefix else path)
        scope = {**scope, "path": path, "root_path": self._prefix}

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message.setdefault("headers", []).extend(
                    (name.lower().encode(), value.encode()) for name, value in HEADERS.items()
                )
            await send(message)

        request = Request(scope)
        app = self._app
        if _of_elsewhere(request):
            app = PlainTextResponse("403: asked for by a page of elsewhere\n", 403)
        elif self._token is None:
            # A socket is this user's, but a browser may be led to it under another's name, whose pages could then read it.
            if _host(request) not in self._hosts:
                app = PlainTextResponse("421: not by this name: scavenger web --host NAME\n", 421)
        else:
            given = request.query_params.get("token")
            if given is not None and _same(given, self._token):
                app = self._welcome(request)
            elif not self._known(request):
                app = PlainTextResponse("401: no token\n", 401, {"WWW-Authenticate": "Bearer"})
        await app(scope, receive, with_headers)

    def _known(self, request: Request) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _same(given, self._token or ""):
            return True
        given = request.cookies.get(COOKIE, "")
        return self._sessions.get(given, -math.inf) > time.monotonic()

    def _welcome(self, request: Request) -> Response:
        """The same page without the token in its address, and a cookie."""
        rest = [(name, value) for name, value in request.query_params.multi_items() if name != "token"]
        # A path, not an address: two slashes at its start would name another host.
        path = "/" + str(request.scope["path"]).lstrip("/\\")
        reply = RedirectResponse(f"{path}?{urlencode(rest)}" if rest else path, 303)
        session = secrets.token_urlsafe(32)
        self._sessions[session] = time.monotonic() + SESSION_S
        while len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)
        reply.set_cookie(
            COOKIE,
            session,
            max_age=int(SESSION_S),
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",  # a proxy of this host says so
            path=self._prefix or "/",
        )
        return reply


def _host(request: Request) -> str:
    """The name by which it was asked for, without the port."""
    return re.sub(r":[0-9]+$", "", request.headers.get("host", "").lower())


def _of_elsewhere(request: Request) -> bool:
    """Whether a browser asks on behalf of another page, one of another port of this host too: nobody reads it, but it costs a search.

    A link that a reader follows is none; a frame, a WebSocket and what a page has prefetched are. Programs say nothing of it.
    """
    said = request.headers
    if "upgrade" in said or "prefetch" in said.get("sec-purpose", ""):
        return True
    followed = (said.get("sec-fetch-mode"), said.get("sec-fetch-dest", "document")) == (
        "navigate",
        "document",
    )
    return said.get("sec-fetch-site") in ("cross-site", "same-site") and not followed


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())


@dataclasses.dataclass(eq=False)
class _Building:
    """A page that is being built, for all who ask until the ledger changes. `reads_since`: `Site._forgotten` when it began to read the
    ledger; None while it waits for a thread, or for the one `before`, which reads what was there before a change. `waiting`: readers."""

    before: _Building | None
    reads_since: int | None = None
    task: asyncio.Task[str] | None = None
    waiting: int = 0


class Site:
    """Pages of one ledger, each read at most once between two changes. For one event loop; the ledger is read in threads.

    However many wait for a page, one thread builds it and the others wait without one. `MOST_BUILT` pages are built at a time, of a
    kind that may take long `MOST_OF` of them, and `MOST_OF_A_RUN` of one run: so searches, be they ever so many, leave threads to all
    other pages, and a run whose tokenizer is slow keeps no other run's pages waiting.
    """

    def __init__(self, url: str, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._url, self.interval_s, self._clock = url, interval_s, clock
        self._cache: OrderedDict[str, tuple[float, str]] = OrderedDict()
        self._building: dict[str, _Building] = {}
        self._threads = ThreadPoolExecutor(MOST_BUILT, "page")
        self._any = asyncio.Semaphore(MOST_BUILT)
        self._of = {kind: asyncio.Semaphore(most) for kind, most in MOST_OF.items()}
        # Of a kind and a run; who waits or builds there holds it.
        self._of_run = weakref.WeakValueDictionary[tuple[str, int], asyncio.Semaphore]()
        self._forgotten = 0
        self._children = texts.Children()
        self.contents = pages.Contents(self._children)
        self.viewers = 0
        self.changes = 0
        self.changed = asyncio.Condition()
        self.closing = False

    async def page(
        self,
        key: str,
        build: Callable[[sa.Connection], str],
        *,
        of: str = "",
        run_of: Callable[[sa.Connection], int] | None = None,
    ) -> str:
        """The HTML of a page. Raises `LedgerError`. `of`: its kind, where it may take seconds: it keeps none of another kind waiting, and
        none of another run than its own (`run_of`)."""
        held = self._cache.get(key)
        if held is not None and self._clock() - held[0] < self.interval_s:
            return held[1]
        current = self._building.get(key)
        if current is None or current.reads_since not in (None, self._forgotten):
            current = self._building[key] = _Building(current)
            current.task = asyncio.create_task(self._build(key, build, of, run_of, current))
            # Of a page that fails once all have gone asyncio would print what others wrote.
            current.task.add_done_callback(lambda done: done.cancelled() or done.exception())
        # Whoever waits for it may go: once begun it is built to the end, for the others.
        assert current.task is not None
        current.waiting += 1
        try:
            return await asyncio.shield(current.task)
        finally:
            current.waiting -= 1

    async def _build(
        self,
        key: str,
        build: Callable[[sa.Connection], str],
        of: str,
        run_of: Callable[[sa.Connection], int] | None,
        this: _Building,
    ) -> str:
        try:
            if this.before is not None and this.before.task is not None:
                await asyncio.wait([this.before.task])  # one page takes one thread
            async with await self._places(of, run_of), self._any:
                if not this.waiting:
                    return ""  # all who asked have gone: nobody gets it, and it is not kept
                this.reads_since, began = self._forgotten, self._clock()
                built = await self._read(build)
            if this.reads_since == self._forgotten:  # else it may be of before the change
                self._cache[key] = (began, built)
                self._cache.move_to_end(key)
                while len(self._cache) > MOST_CACHED:
                    self._cache.popitem(last=False)
            return built
        finally:
            this.before = None
            if self._building.get(key) is this:
                del self._building[key]

    async def _places(
        self, of: str, run_of: Callable[[sa.Connection], int] | None
    ) -> contextlib.AsyncExitStack:
        """A place among the pages of its kind, once there is one; first among those of its run, so that who waits there takes no other."""
        async with contextlib.AsyncExitStack() as places:
            if run_of is not None and of in MOST_OF_A_RUN:
                async with self._any:
                    run = await self._read(run_of)
                own = self._of_run.setdefault((of, run), asyncio.Semaphore(MOST_OF_A_RUN[of]))
                await places.enter_async_context(own)
            if of in self._of:
                await places.enter_async_context(self._of[of])
            return places.pop_all()

    async def _read(self, ask: Callable[[sa.Connection], _T]) -> _T:
        """In a thread, by a connection of its own."""

        def read() -> _T:
            with connected(self._url) as connection:
                return ask(connection)

        return await asyncio.get_running_loop().run_in_executor(self._threads, read)

    def pulse(self) -> tuple[Any, ...] | None:
        """Differs after each transaction of the writer; None where the ledger cannot be read."""
        try:
            with connected(self._url) as connection:
                return tuple(ask(connection, questions.filled(questions.PULSE))[0].values())
        except (ScavengerError, OSError):
            return None

    async def poll(self) -> None:
        """Tell the viewers of changes, and ask nothing while there are none. Does not return."""
        last = None
        while True:
            if self.viewers:
                now = await asyncio.to_thread(self.pulse)
                if now != last:
                    last = now
                    self.forget()
                    async with self.changed:
                        self.changes += 1
                        self.changed.notify_all()
            self._children.tidy()
            await asyncio.sleep(self.interval_s)

    def changed_since(self, seen: int) -> bool:
        return self.closing or self.changes != seen

    async def close(self) -> None:
        """Let every viewer's connection end."""
        self.closing = True
        async with self.changed:
            self.changed.notify_all()

    def stop(self) -> None:
        """Begin no page more; the process waits for those that are being built."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._children.close()

    def forget(self) -> None:
        """The ledger has changed: keep no page of before."""
        self._cache.clear()
        self._forgotten += 1


def _number(request: Request, name: str, default: int) -> int:
    """A number of the query string; `default` for what is none."""
    given = request.query_params.get(name, "")
    return min(int(given), _MOST_ID) if given.isascii() and given.isdigit() and len(given) < 20 else default


def _runs(request: Request) -> list[int]:
    """Numbers of runs to compare, each once, in their order."""
    given = request.query_params.get("runs", "")[:200].split(",")
    found = [int(one) for one in given if one.isascii() and one.isdigit() and len(one) < 19]
    return list(dict.fromkeys(found))[: questions.MOST_COMPARED]


def _path(request: Request) -> str:
    return str(request.scope["path"])


def _only(request: Request) -> str:
    given = request.query_params.get("only", "all")
    return given if given in steps.FILTERS else "all"


def _bin(request: Request) -> int:
    return _number(request, "bin", -1)


def _by_step(request: Request) -> bool:
    return request.query_params.get("by") == "step"


def _before(request: Request) -> int:
    return _number(request, "before", questions.NO_STEP)


def _wanted(request: Request) -> str:
    return request.query_params.get("q", "")[:MOST_WANTED]


def _own_run(request: Request, connection: sa.Connection) -> int:
    return int(request.path_params["run"])


class _IdConvertor(Convertor[int]):
    """A whole number that a database holds: longer ones are no path of ours."""

    regex = "(?:0|[1-9][0-9]{0,17})"  # one path for each

    def convert(self, value: str) -> int:
        return int(value)

    def to_string(self, value: int) -> str:
        return str(value)


register_url_convertor("id", _IdConvertor())


def make_app(
    url: str, token: str | None, *, interval_s: float = 5.0, root_path: str = "", hosts: Iterable[str] = ()
) -> Starlette:
    """The application. `root_path`: the prefix under which a proxy serves it, as "/scavenger"; the proxy may strip it or not.

    `hosts`: names by which it may be asked for beside this host's own, where there is no token.
    """
    site = Site(url, interval_s)
    prefix = root_path.rstrip("/")
    views = _Views(site, prefix)

    async def live(request: Request) -> Response:
        return _Live(site)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(site.poll())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            site.stop()

    # The guard stands outermost: what it refuses no route has seen.
    app = Starlette(
        routes=[
            *_of_runs(views),
            *_of_samples(views),
            *_of_the_site(views),
            Route("/live", live),
            Mount("/static", StaticFiles(directory=HERE / "static")),
        ],
        lifespan=lifespan,
        exception_handlers={
            404: views.no_page,
            Exception: lambda q, e: PlainTextResponse("500: not shown\n", 500, HEADERS),
        },
        middleware=[
            Middleware(Guard, token=token, prefix=prefix, hosts=LOOPBACK | frozenset(map(str.lower, hosts)))
        ],
    )
    app.router.redirect_slashes = False
    app.state.site = site
    return app


_Endpoint = Callable[[Request], Awaitable[Response]]


@dataclasses.dataclass(frozen=True)
class _Views:
    """What answers for the pages of a site that is served below `prefix`."""

    site: Site
    prefix: str

    def show(
        self,
        key: Callable[[Request], str],
        build: Callable[[Request, sa.Connection], Page],
        *,
        of: str = "",
        run_of: Callable[[Request, sa.Connection], int] | None = None,
    ) -> _Endpoint:
        """`key`: what tells its pages apart; `of`, `run_of`: as of `Site.page`."""

        async def endpoint(request: Request) -> Response:
            here = self._here(request)
            try:
                html = await unless_gone(
                    request.receive,
                    self.site.page(
                        key(request),
                        lambda connection: render.served(build(request, connection), self.prefix, here),
                        of=of,
                        run_of=functools.partial(run_of, request) if run_of else None,
                    ),
                )
            except HungUp:
                return Response()  # nobody reads it
            except OSError as error:
                return _not_shown(describe(error), 503, self.prefix, here)
            except ScavengerError as error:
                code = 404 if isinstance(error, NotInLedger) else 503
                said = f"{error.cause}; {error.remedy}" if error.remedy else error.cause
                return _not_shown(said, code, self.prefix, here)
            return HTMLResponse(html)

        return endpoint

    async def no_page(self, request: Request, error: Exception) -> Response:
        here = self._here(request)
        return _not_shown(f"{here[:200]} is the address of no page", 404, self.prefix, here)

    def _here(self, request: Request) -> str:
        return str(request.scope["path"]).removeprefix(self.prefix) or "/"


def _of_runs(views: _Views) -> list[Route]:
    """All runs, one with its steps and evaluations, and what is searched for or compared in them."""
    contents = views.site.contents

    def scored(build: Callable[..., Page]) -> _Endpoint:
        """Of a step or an evaluation, whose samples a reader filters."""
        return views.show(
            lambda q: f"{_path(q)} {_only(q)} {_bin(q)}",
            lambda q, c: build(c, q.path_params["run"], q.path_params["step"], _only(q), _bin(q), contents),
            of="texts",
            run_of=_own_run,
        )

    return [
        Route("/", views.show(lambda q: f"/ {_before(q)}", lambda q, c: pages.overview(c, _before(q)))),
        Route(
            "/runs/{run:id}",
            views.show(
                lambda q: f"{_path(q)} {_by_step(q)} {_before(q)}",
                lambda q, c: pages.run(c, q.path_params["run"], by_step=_by_step(q), before=_before(q)),
            ),
        ),
        Route("/runs/{run:id}/steps/{step:id}", scored(steps.step)),
        Route("/runs/{run:id}/evals/{step:id}", scored(steps.evaluation)),
        Route(
            "/runs/{run:id}/steps/{step:id}/since/{since:id}",
            views.show(
                _path,
                lambda q, c: steps.changed(
                    c, q.path_params["run"], q.path_params["step"], q.path_params["since"]
                ),
            ),
        ),
        Route(
            "/compare", views.show(lambda q: f"compare {_runs(q)}", lambda q, c: pages.compare(c, _runs(q)))
        ),
        Route(
            "/runs/{run:id}/search",
            views.show(
                lambda q: f"search {q.path_params['run']} {_wanted(q)}",
                lambda q, c: pages.search(c, contents, q.path_params["run"], _wanted(q)),
                of="search",
                run_of=_own_run,
            ),
        ),
    ]


def _of_samples(views: _Views) -> list[Route]:
    """What shows whole texts: of a group, a sample, an episode."""

    def read(
        name: str,
        build: Callable[[sa.Connection, pages.Contents, int], Page],
        run_of: Callable[[sa.Connection, int], int],
    ) -> Route:
        shown = views.show(
            _path,
            lambda q, c: build(c, views.site.contents, q.path_params[name]),
            of="texts",
            run_of=lambda q, c: run_of(c, q.path_params[name]),
        )
        return Route(f"/{name}s/{{{name}:id}}", shown)

    return [
        read("group", pages.group, pages.run_of_group),
        read("sample", pages.sample, pages.run_of_sample),
        read("episode", pages.episode, pages.run_of_episode),
    ]


def _of_the_site(views: _Views) -> list[Route]:
    def before(q: Request) -> int:
        return _number(q, "before", _MOST_ID)

    return [
        Route("/harm", views.show(_path, lambda q, c: pages.harm(c))),
        Route(
            "/decisions",
            views.show(lambda q: f"decisions {before(q)}", lambda q, c: pages.decisions(c, before(q))),
        ),
        Route("/decisions/{id:id}", views.show(_path, lambda q, c: pages.decision(c, q.path_params["id"]))),
    ]


def _not_shown(why: str, code: int, prefix: str, here: str) -> Response:
    """A page that says what was not found or not read, with a link to all runs. `why` may have others' text."""
    title = "Not found" if code == 404 else "Not shown"
    shown = Page(title, (Panel("Why", empty=printable(why)[:2_000]),), (("Runs", "/"),))
    return HTMLResponse(render.served(shown, prefix, here), code)


class _Live(StreamingResponse):
    """News for one viewer, counted from its first moment to its last: of many that come at once no more are let in than may be."""

    def __init__(self, site: Site) -> None:
        super().__init__(_news(site), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        self._site = site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._site.viewers >= MOST_VIEWERS:
            full = PlainTextResponse("503: too many viewers\n", 503, {"Retry-After": "30"})
            await full(scope, receive, send)
            return
        self._site.viewers += 1  # nothing was awaited since it was looked at
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._site.viewers -= 1


async def _news(site: Site) -> AsyncIterator[str]:
    """Server-sent events: how many changes there were, one for each change, and a comment every 20 s that keeps proxies from closing
    the connection."""
    seen = site.changes
    yield f"event: now\ndata: {seen}\n\n"
    while True:
        try:
            async with asyncio.timeout(20), site.changed:
                await site.changed.wait_for(functools.partial(site.changed_since, seen))
        except TimeoutError:
            yield ": still here\n\n"
            continue
        if site.closing:
            return
        seen = site.changes
        yield f"event: changed\ndata: {seen}\n\n"


def _unix_socket(path: Path) -> socket.socket:
    """A listening socket that only this user may connect to. Raises `ConfigError` where one serves already, or something else is there."""
    if path.exists():
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"{path} is there and no socket", "give another --socket")
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except OSError:
                _remove(path)
            else:
                raise ConfigError(f"{path} is served already", "give another --socket")
    made = socket.socket(socket.AF_UNIX)
    try:
        made.bind(str(path))
        path.chmod(0o600)  # before listen: until then nobody can connect
        made.listen(64)
    except OSError as error:
        made.close()
        raise ConfigError(
            f"{path} cannot be listened on: {error.strerror or error}", "give another --socket"
        ) from error
    return made


def _remove(path: Path) -> None:
    """A socket that nobody serves. Raises `ConfigError` where it is another user's."""
    try:
        path.unlink()
    except OSError as error:
        raise ConfigError(f"{path} cannot be removed: {error.strerror}", "give another --socket") from error


def address_command(where: str, token_file: Path) -> str:
    """A command that prints the address with its token. Pure."""
    return f'echo "{where}?token=$(cat {shlex.quote(str(token_file.absolute()))})"'


def serve(
    url: str,
    *,
    port: int,
    unix: Path | None,
    token_file: Path,
    interval_s: float,
    root_path: str,
    hosts: Iterable[str] = (),
) -> None:
    """Serve until SIGTERM or SIGINT. Raises `ConfigError`, `AuthError`.

    `unix`: listen there, with no token, in place of `port` of 127.0.0.1 (0: the system chooses).
    """
    if unix is not None:
        token, listening = None, _unix_socket(unix)
        ours = unix.lstat().st_ino
        print(f"serves {unix}", flush=True)
    else:
        token = read_token(token_file)
        try:
            listening = listening_socket(
                "127.0.0.1", port
            )  # before it is said: who reads the address may open it at once
        except OSError as error:
            raise ConfigError(f"port {port} is not free: {error.strerror}", "give another --port") from error
        where = f"http://127.0.0.1:{listening.getsockname()[1]}{root_path.rstrip('/')}/"
        # The token itself is printed by whoever runs that: what a terminal or a journal keeps of us has no secret.
        print(f"serves {where}; open once what this prints: {address_command(where, token_file)}", flush=True)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # connections that say nothing take one each
    app = make_app(url, token, interval_s=interval_s, root_path=root_path, hosts=hosts)
    try:
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises again what ended it
            Server(app, app.state.site.close).run(sockets=[listening])
    finally:
        listening.close()
        if unix is not None and unix.exists() and unix.lstat().st_ino == ours:  # no successor's
            unix.unlink(missing_ok=True)
