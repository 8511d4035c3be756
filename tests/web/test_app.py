"""`scavenger web` by HTTP: who may read, that what others wrote is text, and what many viewers cost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sqlite3
import subprocess
import threading
import time
import tracemalloc
from collections.abc import Callable, MutableMapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx2")

import sqlalchemy as sa
from starlette.routing import Mount, Route
from starlette.testclient import TestClient
from typer.testing import CliRunner

from scavenger.cli.main import app as commands
from scavenger.errors import AuthError, ConfigError, LedgerError
from scavenger.ledger import records as r
from scavenger.ledger import store
from scavenger.ledger.read.reader import reading
from scavenger.web import app as web
from scavenger.web import charts, pages, questions, texts
from scavenger.web.panels import Page, ask
from tests.ledger.examples import T0
from tests.top import sites
from tests.web.sites import ledger

TOKEN = "t" * 32
BEARER = {"Authorization": f"Bearer {TOKEN}"}
PATHS = (
    "/",
    "/runs/1",
    "/runs/1/steps/1",
    "/runs/1/steps/1?only=moved&bin=0",
    "/runs/1/evals/1",
    "/groups/10",
    "/runs/1/search?q=w",
    "/samples/11",
    "/episodes/1",
    "/compare?runs=1",
    "/runs/1/steps/2/since/1",
    "/harm",
    "/decisions",
    "/decisions/1",
)
#: What the HTML of a page may be changed by, beside what drives a terminal.
EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{ 7*7 }}</pre>" + sites.EVIL_STORED


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    return TestClient(web.make_app(ledger(tmp_path), TOKEN), headers=BEARER)


def asked(path: str) -> dict[str, Any]:
    """A request as the server hands it to the application."""
    return {
        "type": "http",
        "method": "GET",
        "path": path,
        "query_string": b"",
        "headers": [(b"authorization", BEARER["Authorization"].encode())],
    }


class _Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_every_page_is_drawn_and_every_link_of_ours_leads_somewhere(client: TestClient) -> None:
    todo, seen = ["/"], set[str]()
    while todo:
        path = todo.pop()
        seen.add(path)
        reply = client.get(path)
        assert reply.status_code == 200, (path, reply.text)
        for tag, attributes in _Tags(reply.text).tags:
            href = attributes.get("href") or ""
            if tag == "a" and href.startswith("/") and href not in seen and href not in todo:
                todo.append(href)
    for path in (
        "/runs/1",
        "/runs/1/steps/1",
        "/runs/1/evals/1",
        "/groups/10",
        "/samples/11",
        "/samples/92",
        "/harm",
        "/decisions/1",
        "/episodes/1",
    ):
        assert path in seen, path


def test_a_viewer_without_the_token_gets_401_and_nothing_else(tmp_path: Path) -> None:
    client = TestClient(web.make_app(ledger(tmp_path), TOKEN))
    for path in (*PATHS, "/static/web.js", "/live", "/nowhere", "/?token=wrong", "/?token=%ff"):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": f"{web.COOKIE}={TOKEN}"}):
            reply = client.get(path, headers=headers)
            assert (reply.status_code, reply.text) == (401, "401: no token\n"), path


def test_the_token_in_an_address_becomes_a_cookie_and_leaves_the_address(tmp_path: Path) -> None:
    client = TestClient(web.make_app(ledger(tmp_path), TOKEN, root_path="/sc"))
    for path in (
        "/sc/decisions?before=9&token=",
        "/decisions?before=9&token=",
    ):  # a proxy strips the prefix or not
        client.cookies.clear()
        reply = client.get(path + TOKEN, follow_redirects=False)
        assert (reply.status_code, reply.headers["location"]) == (303, "/sc/decisions?before=9")
        cookie = reply.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert "Path=/sc" in cookie
        assert "Max-Age=43200" in cookie
        assert TOKEN not in cookie
        assert client.get("/sc/decisions").status_code == 200
    elsewhere = client.get(f"//elsewhere.example/x?token={TOKEN}", follow_redirects=False)
    assert re.match(r"/[^/]", elsewhere.headers["location"])


def test_behind_a_prefix_every_address_has_it(tmp_path: Path) -> None:
    client = TestClient(web.make_app(ledger(tmp_path), TOKEN, root_path="/sc/"), headers=BEARER)
    for path in PATHS:
        for asked in (path, "/sc" + path):
            reply = client.get(asked)
            assert reply.status_code == 200, asked
            for tag, attributes in _Tags(reply.text).tags:
                for name in ("href", "src"):
                    given = attributes.get(name)
                    assert not given or given.startswith(("/sc/", "#")), (asked, tag, given)


@pytest.mark.parametrize("root_path", ["/runs", "/static/", "/decisions/of"])
def test_a_prefix_that_begins_as_a_page_of_ours_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root_path: str
) -> None:
    """A proxy may strip it: then /runs/1 would be both run 1 and the page /1."""
    monkeypatch.setattr(web, "serve", lambda *_, **__: None)
    given = ["web", "--config", str(sites.site(tmp_path)), "--root-path", root_path]
    refused = CliRunner().invoke(commands, given)
    assert isinstance(refused.exception, ConfigError), refused.output
    assert "begins as a page of ours" in refused.exception.cause


def test_the_names_that_no_prefix_begins_with_are_those_of_all_routes(tmp_path: Path) -> None:
    routes = web.make_app(ledger(tmp_path), TOKEN).routes
    paths = [route.path for route in routes if isinstance(route, Route | Mount)]
    assert len(paths) == len(routes)
    assert {path.split("/")[1] for path in paths} - {""} == web.OWN


def test_an_error_that_speaks_of_what_a_ledger_has_not_is_no_page_that_is_not_there(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(connection: object) -> Page:
        raise LedgerError("table runs has no column named x")

    monkeypatch.setattr(pages, "harm", fail)
    assert client.get("/harm").status_code == 503


def test_hostile_text_is_text_on_every_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "EVIL_STORED", EVIL)
    client = TestClient(web.make_app(ledger(tmp_path, evil=True), TOKEN), headers=BEARER)
    known = {
        "html",
        "head",
        "meta",
        "title",
        "link",
        "script",
        "body",
        "a",
        "header",
        "strong",
        "nav",
        "button",
        "main",
    }
    known |= {
        "p",
        "h1",
        "h2",
        "h3",
        "section",
        "div",
        "details",
        "summary",
        "pre",
        "figure",
        "figcaption",
        "svg",
        "line",
    }
    known |= {
        "polyline",
        "circle",
        "rect",
        "text",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "span",
        "article",
    }
    known |= {"form", "label", "input"}
    said = ""
    for path in PATHS:
        reply = client.get(path)
        assert reply.status_code == 200, path
        tags = _Tags(reply.text).tags
        assert {tag for tag, _ in tags} <= known, path
        assert sum(tag == "script" for tag, _ in tags) == 1, path
        assert not [
            name for _, attributes in tags for name in attributes if name.startswith("on") or name == "style"
        ]
        assert not set(reply.text) & set("\x1b\x07\r\u202e\u2066"), "no control character"
        assert len(reply.text) < 400_000, path
        assert reply.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        said += reply.text
    assert "&lt;script&gt;alert(1)" in said
    assert "{{ 7*7 }}" in said


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/runs/99", 404),
        ("/samples/99", 404),
        ("/groups/99", 404),
        ("/decisions/99", 404),
        ("/episodes/99", 404),
        ("/runs/99/steps/1", 404),
        ("/runs/99/evals/1", 404),
        (f"/runs/{10**30}", 404),
        (f"/runs/{'9' * 5_000}", 404),
        ("/runs/x", 404),
        ("/nowhere", 404),
        ("/static/../app.py", 404),
        ("/compare?runs=99", 404),
        ("/runs/99/steps/2/since/1", 404),
        (f"/compare?runs=1,,x,{'9' * 100},1", 200),
        (f"/decisions?before={'9' * 100}", 200),
        ("/decisions?before=x", 200),
        ("/runs/1/steps/1?only=x&bin=99", 200),
    ],
)
def test_what_is_not_there_is_said(client: TestClient, path: str, code: int) -> None:
    reply = client.get(path)
    assert reply.status_code == code
    if code == 404:
        assert "<h1>Not found</h1>" in reply.text
        assert '<a href="/">Runs</a>' in reply.text, "a way back"


def test_an_address_of_no_page_is_named_as_text_and_only_to_who_may_read(tmp_path: Path) -> None:
    made = web.make_app(ledger(tmp_path), TOKEN, root_path="/sc")
    reply = TestClient(made, headers=BEARER).get("/sc/no<b>page")
    assert "/no&lt;b&gt;page is the address of no page" in reply.text
    assert '<a href="/sc/">Runs</a>' in reply.text
    assert TestClient(made).get("/sc/no-page").status_code == 401


def test_a_ledger_that_is_away_is_said_and_returns(tmp_path: Path) -> None:
    url = ledger(tmp_path)
    client = TestClient(web.make_app(url, TOKEN, interval_s=0.0), headers=BEARER)
    file = tmp_path / "state" / "ledger.sqlite3"
    file.rename(tmp_path / "away")
    reply = client.get("/")
    assert reply.status_code == 503
    assert "there is no ledger at" in reply.text
    (tmp_path / "away").rename(file)
    assert client.get("/").status_code == 200


def _sql(file: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(file)) as own:
        own.execute(statement)
        own.commit()


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    "replace",
    [
        lambda file: file.write_bytes(b"x" * 100_000),
        lambda file: file.write_bytes(b""),
        _truncate,
        _folder,
        _pipe,
        lambda file: _sql(file, "INSERT INTO alembic_version VALUES ('0001')"),
        lambda file: _sql(file, "UPDATE alembic_version SET version_num = '9999'"),
    ],
    ids=["garbage", "empty", "half", "folder", "pipe", "two revisions", "a later release's"],
)
def test_a_ledger_that_is_replaced_beneath_the_server_is_said_and_ends_nothing(
    tmp_path: Path, replace: Callable[[Path], object]
) -> None:
    url = ledger(tmp_path)
    app = web.make_app(url, TOKEN, interval_s=0.0)
    client = TestClient(app, headers=BEARER)
    assert client.get("/").status_code == 200
    file = tmp_path / "state" / "ledger.sqlite3"
    whole = file.read_bytes()
    replace(file)
    reply = client.get("/")
    assert reply.status_code == 503
    assert "Not shown" in reply.text
    assert app.state.site.pulse() is None
    file.rmdir() if file.is_dir() else file.unlink()
    for rest in file.parent.glob("ledger.sqlite3-*"):
        rest.unlink()
    file.write_bytes(whole)
    assert client.get("/").status_code == 200
    assert app.state.site.pulse() is not None


def test_a_ledger_that_is_locked_is_said_and_read_again(tmp_path: Path) -> None:
    app = web.make_app(ledger(tmp_path), TOKEN, interval_s=0.0)
    client = TestClient(app, headers=BEARER)
    file = tmp_path / "state" / "ledger.sqlite3"
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as own:
        own.execute("PRAGMA locking_mode = EXCLUSIVE")
        own.execute("BEGIN EXCLUSIVE")
        own.execute("CREATE TABLE own (x)")
        reply = client.get("/")
        assert reply.status_code == 503
        assert "locked" in reply.text
        assert app.state.site.pulse() is None
        own.execute("ROLLBACK")
    assert client.get("/").status_code == 200


@pytest.mark.parametrize(
    ("path", "table", "column", "value"),
    [
        ("/", "runs", "created_at", "'yesterday'"),
        ("/runs/1", "steps", "committed_at", "x'00'"),
        ("/runs/1", "runs", "name", "x'ff'"),
        ("/runs/1/steps/1", "samples", "reward", "'much'"),
        ("/runs/1/steps/1", "samples", "accepted_len", "'long'"),
        ("/samples/11", "leases", "granted_at", "'then'"),
        ("/samples/11", "chunks", "tokens", "'packed'"),
        ("/groups/10", "chunks", "logprobs", str(2**60)),
        ("/groups/10", "groups", "prompt", "7"),
        ("/runs/1/search?q=w", "chunks", "tokens", "7"),
        ("/decisions", "decisions", "at", "'now'"),
        ("/decisions/1", "decisions", "inputs", "x'ff'"),
    ],
)
def test_a_value_of_another_type_than_its_column_is_named(
    tmp_path: Path, path: str, table: str, column: str, value: str
) -> None:
    """SQLite keeps any value in any column; a page of such a row is not shown, and every other one is."""
    url = ledger(tmp_path)
    client = TestClient(web.make_app(url, TOKEN, interval_s=0.0), headers=BEARER)
    assert client.get(path).status_code == 200
    with contextlib.closing(sqlite3.connect(tmp_path / "state" / "ledger.sqlite3")) as writer, writer:
        writer.execute(f"UPDATE {table} SET {column} = {value}")
    reply = client.get(path)
    # A prompt that cannot be read is said in its place.
    assert reply.status_code == (200 if column == "prompt" else 503)
    assert f"in a column {column}, which is of" in reply.text
    assert client.get("/harm").status_code == 200


def test_twenty_viewers_cost_one_set_of_queries(tmp_path: Path) -> None:
    now = [0.0]
    site = web.Site(ledger(tmp_path), 5.0, lambda: now[0])
    asked: list[None] = []

    def build(connection: object) -> str:
        asked.append(None)
        return ""

    async def play() -> None:
        await asyncio.gather(*(site.page("/", build) for _ in range(20)))
        assert len(asked) == 1
        now[0] = 5.0
        await site.page("/", build)

    asyncio.run(play())
    assert len(asked) == 2, "what is old is asked again"


def test_viewers_are_told_of_a_change_and_one_poller_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = web.Site(ledger(tmp_path), 0.01)
    pulses = iter(range(1_000_000))
    monkeypatch.setattr(site, "pulse", lambda: (next(pulses) // 3,))

    async def play() -> list[str]:
        poller = asyncio.create_task(site.poll())
        site.viewers = 20  # as many replies of `/live`
        viewers = [web._news(site) for _ in range(20)]
        heard = [await anext(viewer) for viewer in viewers]
        async with asyncio.timeout(60):
            heard += [await anext(viewer) for viewer in viewers]
        for viewer in viewers:
            await viewer.aclose()  # type: ignore[attr-defined]
        poller.cancel()
        return heard

    heard = asyncio.run(play())
    assert heard[:20] == ["event: now\ndata: 0\n\n"] * 20
    assert all(one.startswith("event: changed\n") for one in heard[20:])


def test_a_token_that_others_can_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "web.token"
    made = web.read_token(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert web.read_token(path) == made
    path.chmod(0o640)
    with pytest.raises(AuthError, match="can be read by others"):
        web.read_token(path)
    path.chmod(0o600)
    with monkeypatch.context() as patched:  # in place of root, who may read the daemon's file
        patched.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
        with pytest.raises(AuthError, match="belongs to another user") as caught:
            web.read_token(path)
        assert "runuser -u scavenger -- scavenger web" in caught.value.remedy
    for wrong in ("short", "\u043f\u0430\u0440\u043e\u043b\u044c" * 4, "twelve and twelve more"):
        path.write_text(wrong, encoding="utf-8")
        with pytest.raises(AuthError, match="20 letters, digits"):
            web.read_token(path)


def test_no_module_of_the_folder_that_it_runs_in_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write there would run code as the server's user."""
    for name in ("tokenizers", "json"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="cannot be used"):
        texts._asked({"tokenizer": str(tmp_path / "none.json"), "texts": []})
    assert not (tmp_path / "ran").exists()


def test_the_socket_is_this_users_only(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with web._unix_socket(path):
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(ConfigError, match="served already"):
            web._unix_socket(path)
    web._unix_socket(path).close()  # what a killed one left is taken over


def test_a_cookie_opens_no_later_server_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = ledger(tmp_path)
    client = TestClient(web.make_app(url, TOKEN))
    client.get(f"/?token={TOKEN}")
    assert client.get("/").status_code == 200
    session = client.cookies[web.COOKIE]
    assert TestClient(web.make_app(url, TOKEN), cookies={web.COOKIE: session}).get("/").status_code == 401
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + web.SESSION_S + 1)
    assert client.get("/").status_code == 401


def test_a_socket_is_asked_by_its_names_only(tmp_path: Path) -> None:
    """Else a page of elsewhere could lead the browser to it under its own name, and read it."""
    app = web.make_app(ledger(tmp_path), None, hosts=["Scavenger.example.org"])
    for host, code in (
        ("localhost:8765", 200),
        ("127.0.0.1", 200),
        ("[::1]:8765", 200),
        ("scavenger.example.org", 200),
        ("evil.example", 421),
        ("localhost.evil.example:80", 421),
    ):
        assert TestClient(app).get("/", headers={"Host": host}).status_code == code, host


def test_a_page_of_elsewhere_makes_a_browser_ask_nothing(tmp_path: Path) -> None:
    """An image on any page could make a socket's server search, and one of another port of this host has the cookie too."""
    url = ledger(tmp_path)
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    ours = {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}
    for token in (None, TOKEN):
        client = TestClient(web.make_app(url, token), headers=BEARER, base_url="http://localhost")
        for site in ("cross-site", "same-site"):
            asked = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors"}
            for path in ("/runs/1/search?q=w", "/live", "/static/web.js"):
                assert client.get(path, headers=asked).status_code == 403, (token, path)
        for asked in (
            link | {"Sec-Fetch-Dest": "iframe"},
            {"Upgrade": "websocket", "Connection": "upgrade", "Origin": "http://localhost:1"},
            {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate", "Sec-Purpose": "prefetch;prerender"},
        ):
            assert client.get("/runs/1/search?q=w", headers=asked).status_code == 403, (token, asked)
        for asked in (link, link | {"Sec-Fetch-Dest": "document"}, ours, {}):
            reply = client.get("/", headers=asked)
            assert reply.status_code == 200
            assert reply.headers["cross-origin-resource-policy"] == "same-origin"
            assert reply.headers["cross-origin-opener-policy"] == "same-origin"


def test_the_cookie_is_for_tls_alone_where_the_proxy_has_it(tmp_path: Path) -> None:
    app = web.make_app(ledger(tmp_path), TOKEN)
    for base, secure in (("https://site.example", True), ("http://localhost", False)):
        reply = TestClient(app, base_url=base).get(f"/?token={TOKEN}", follow_redirects=False)
        assert ("Secure" in reply.headers["set-cookie"]) is secure


def test_of_many_viewers_that_come_at_once_no_more_are_let_in_than_may_be(tmp_path: Path) -> None:
    """All are accepted before the first reply begins, as when they connect in one moment; some are gone again before theirs begins."""
    app = web.make_app(ledger(tmp_path), TOKEN)
    over, let_in, refused = asyncio.Event(), [], []

    async def viewer(number: int) -> None:
        async def receive() -> dict[str, object]:
            if number % 2 == 0:
                await over.wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                (let_in if message["status"] == 200 else refused).append(number)
            await asyncio.sleep(0)

        await app(asked("/live"), receive, send)

    async def play() -> None:
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for number in range(3 * web.MOST_VIEWERS):
                group.create_task(viewer(number))
            while len(let_in) + len(refused) < 2 * web.MOST_VIEWERS:
                await asyncio.sleep(0)
            over.set()
        assert app.state.site.viewers == 0

    asyncio.run(play())
    assert len(let_in) <= web.MOST_VIEWERS
    assert len(refused) == 2 * web.MOST_VIEWERS


class _Slow:
    """A page that is built once `go_on` is set."""

    def __init__(self) -> None:
        self.begun, self.go_on, self.times = threading.Event(), threading.Event(), 0

    def __call__(self, connection: object) -> str:
        self.times += 1
        self.begun.set()
        assert self.go_on.wait(60)
        return f"build {self.times}"


def test_a_page_that_takes_long_keeps_no_other_one_waiting(tmp_path: Path) -> None:
    """However many wait for it, and however often the ledger changes meanwhile."""
    site, slow = web.Site(ledger(tmp_path), 5.0), _Slow()

    async def play() -> None:
        waiting = []
        async with asyncio.timeout(60):
            for _ in range(3):
                waiting += [asyncio.create_task(site.page("/slow", slow)) for _ in range(2 * web.MOST_BUILT)]
                await asyncio.to_thread(slow.begun.wait, 60)
                site.forget()
                assert await site.page("/", lambda connection: "shown") == "shown"
            assert slow.times == 1
            assert site.pulse() is not None
            slow.go_on.set()
            said = await asyncio.gather(*waiting)
        assert set(said[: 2 * web.MOST_BUILT]) == {"build 1"}
        assert set(said[2 * web.MOST_BUILT :]) == {"build 2"}, (
            "who came after the change saw what was before it"
        )
        assert await site.page("/slow", slow) == "build 2"

    asyncio.run(play())


def test_sixty_readers_of_a_slow_page_take_no_thread_from_another_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the application: Starlette has 40 threads for what is no coroutine."""
    app, slow = web.make_app(ledger(tmp_path), TOKEN), _Slow()

    def run(connection: object, run_id: int, *, by_step: bool, before: int) -> Page:
        return Page(slow(connection), ())

    monkeypatch.setattr(pages, "run", run)

    async def get(path: str) -> int:
        told: list[int] = []

        first = iter([True])

        async def receive() -> dict[str, object]:
            if not next(first, False):
                await asyncio.Event().wait()  # a viewer that stays
            return {"type": "http.request", "body": b""}

        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                told.append(message["status"])

        await app(asked(path), receive, send)
        return told[0]

    async def play() -> None:
        waiting = [asyncio.create_task(get("/runs/1")) for _ in range(60)]
        try:
            await asyncio.to_thread(slow.begun.wait, 60)
            async with asyncio.timeout(20):
                assert await get("/decisions") == 200
                assert await get("/static/web.js") == 200
        finally:
            slow.go_on.set()
        assert await asyncio.gather(*waiting) == [200] * 60

    asyncio.run(play())


def test_pages_with_texts_however_many_leave_places_to_other_pages(tmp_path: Path) -> None:
    """Each of them waits for a process with a tokenizer, which is the run owner's: it may take all the seconds that it has."""
    site, slow = web.Site(ledger(tmp_path), 5.0), _Slow()

    async def play() -> None:
        texts = [
            asyncio.create_task(site.page(f"/samples/{i}", slow, of="texts"))
            for i in range(3 * web.MOST_BUILT)
        ]
        async with asyncio.timeout(60):
            await asyncio.to_thread(slow.begun.wait, 60)
            assert await site.page("/", lambda connection: "shown") == "shown"
            assert slow.times <= web.MOST_OF["texts"]
            slow.go_on.set()
            await asyncio.gather(*texts)

    asyncio.run(play())


@pytest.mark.parametrize("kind", ["texts", "search"])
def test_a_run_whose_tokenizer_is_slow_keeps_no_text_of_another_run_waiting(
    tmp_path: Path, kind: str
) -> None:
    """However many of its pages are asked for: a step's page has texts, and is the one that a reader wants first."""
    site, slow, many = web.Site(ledger(tmp_path), 5.0), _Slow(), web.MOST_OF[kind] + 2

    async def play() -> None:
        of_slow = [
            asyncio.create_task(site.page(f"/slow/{i}", slow, of=kind, run_of=lambda connection: 1))
            for i in range(many)
        ]
        async with asyncio.timeout(60):
            await asyncio.to_thread(slow.begun.wait, 60)
            other = site.page("/other", lambda connection: "shown", of=kind, run_of=lambda connection: 2)
            assert await other == "shown"
            assert slow.times <= web.MOST_OF_A_RUN[kind]
            slow.go_on.set()
            await asyncio.gather(*of_slow)
        assert slow.times == many
        assert not site._of_run, "a run that nobody waits for is forgotten"

    asyncio.run(play())


@pytest.mark.parametrize(
    "path",
    ["/runs/1/steps/1", "/runs/1/evals/1", "/runs/1/search?q=n", "/groups/10", "/samples/11", "/episodes/1"],
)
def test_the_pages_with_texts_are_counted_for_their_run(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, counted = web.make_app(ledger(tmp_path), TOKEN), list[int]()
    read = app.state.site._read

    async def seen(ask: Callable[[sa.Connection], Any]) -> Any:
        found = await read(ask)
        if isinstance(found, int):
            counted.append(found)
        return found

    monkeypatch.setattr(app.state.site, "_read", seen)
    assert TestClient(app, headers=BEARER).get(path).status_code == 200
    assert counted == [1]


def test_a_page_whose_readers_have_gone_before_its_turn_is_not_built(tmp_path: Path) -> None:
    site, slow = web.Site(ledger(tmp_path), 5.0), _Slow()
    most = web.MOST_OF["search"]

    async def play() -> None:
        searches = [
            asyncio.create_task(site.page(f"search {i}", slow, of="search")) for i in range(most + 20)
        ]
        async with asyncio.timeout(60):
            await asyncio.to_thread(slow.begun.wait, 60)
            for one in searches[most:]:
                one.cancel()
            await asyncio.gather(*searches[most:], return_exceptions=True)
            slow.go_on.set()
            await asyncio.gather(*searches[:most])
            assert await site.page("search after", lambda connection: "found", of="search") == "found"
        assert slow.times == most

    asyncio.run(play())


def test_an_error_of_ours_has_the_headers_of_every_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "harm", lambda connection: 1 / 0)
    app = web.make_app(ledger(tmp_path), TOKEN)
    reply = TestClient(app, headers={"Authorization": f"Bearer {TOKEN}"}, raise_server_exceptions=False).get(
        "/harm"
    )
    assert reply.status_code == 500
    assert {name.lower(): value for name, value in web.HEADERS.items()}.items() <= dict(reply.headers).items()


def test_a_number_has_one_path(client: TestClient) -> None:
    assert client.get("/samples/11").status_code == 200
    assert client.get("/samples/0011").status_code == 404


def test_what_was_read_before_a_change_is_not_kept(tmp_path: Path) -> None:
    site, slow = web.Site(ledger(tmp_path), 5.0), _Slow()

    async def play() -> None:
        waiting = asyncio.create_task(site.page("/slow", slow))
        await asyncio.to_thread(slow.begun.wait, 60)
        site.forget()
        slow.go_on.set()
        assert await waiting == "build 1"
        assert await site.page("/slow", lambda connection: "of after it") == "of after it"

    asyncio.run(play())


def test_searches_however_many_leave_threads_to_other_pages(tmp_path: Path) -> None:
    site, slow = web.Site(ledger(tmp_path), 5.0), _Slow()

    async def play() -> None:
        searches = [
            asyncio.create_task(site.page(f"search {i}", slow, of="search"))
            for i in range(3 * web.MOST_BUILT)
        ]
        async with asyncio.timeout(60):
            await asyncio.to_thread(slow.begun.wait, 60)
            assert await site.page("/", lambda connection: "shown") == "shown"
            assert slow.times <= web.MOST_OF["search"]
            slow.go_on.set()
            assert len(await asyncio.gather(*searches)) == 3 * web.MOST_BUILT

    asyncio.run(play())


def test_a_page_that_fails_fails_for_all_who_wait_and_is_asked_again(tmp_path: Path) -> None:
    site = web.Site(ledger(tmp_path), 5.0)

    def fail(connection: object) -> str:
        raise LedgerError("it is locked", "wait")

    async def play() -> None:
        said = await asyncio.gather(*(site.page("/", fail) for _ in range(3)), return_exceptions=True)
        assert all(isinstance(one, LedgerError) for one in said)
        assert await site.page("/", lambda connection: "shown") == "shown"

    asyncio.run(play())


def test_the_poller_outlives_a_ledger_that_cannot_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = ledger(tmp_path)
    site = web.Site(url, 0.01)
    assert site.pulse() is not None

    def stale(url: str) -> object:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(store, "open_readonly", stale)
    assert site.pulse() is None
    client = TestClient(web.make_app(url, TOKEN), headers=BEARER)
    assert client.get("/").status_code == 503


def test_a_metric_hides_no_column_and_many_metrics_cost_little(tmp_path: Path) -> None:
    metrics = {"step": 77.0, "attempt": 9.0, "committed_at": 5.0, "reward": 0.25}
    many = {f"m{i}": 1.0 for i in range(20_000)}
    steps: list[r.Record] = [
        r.StepCommitted(1, 50, "train", 1, 1, json.dumps(metrics), T0 + 50),
        r.StepCommitted(1, 51, "train", 1, 1, json.dumps(many), T0 + 51),
    ]
    client = TestClient(web.make_app(ledger(tmp_path, more=[steps]), TOKEN), headers=BEARER)
    began = time.monotonic()
    said = client.get("/runs/1").text
    assert time.monotonic() - began < 20
    assert 'href="/runs/1/steps/50"' in said
    assert "/steps/77" not in said
    assert len(said) < 400_000


def test_metrics_of_a_run_however_many_are_read_as_far_as_a_page_draws_them_and_it_says_so(
    tmp_path: Path,
) -> None:
    """As an older release's ledger may have them: 13 MB of one run, and a step with more than is read of one."""
    wide = {"reward": 0.25, **{f"{'m' * 40}{i}": 1.0 for i in range(1_250)}}
    most = max(len(json.dumps(wide)), 60_000)
    steps: list[r.Record] = [
        r.StepCommitted(1, 50 + i, purpose, 1, 1, json.dumps(wide), T0 + 50 + i)
        for i in range(200)
        for purpose in ("train", "eval")
    ]
    steps.append(r.StepCommitted(1, 400, "train", 1, 1, json.dumps(wide | {"m" * 70_000: 1.0}), T0 + 400))
    url = ledger(tmp_path, more=[steps])
    engine = store.open_readonly(url)
    try:
        with reading(engine) as connection:
            for sql, there in ((questions.STEPS, 202), (questions.EVALUATIONS, 201)):
                found = ask(
                    connection,
                    questions.filled(sql, run_id=1, before=questions.NO_STEP, most=questions.MOST_STEPS),
                )
                said = [len(row["metrics"]) for row in found]
                assert len(said) == there
                assert questions.MOST_RUN_METRICS - most < sum(said) < questions.MOST_RUN_METRICS + 500
                assert [row["cut"] for row in found] == [int(n <= 2) for n in said], "the newest are read"
    finally:
        engine.dispose()
    client = TestClient(web.make_app(url, TOKEN), headers=BEARER)
    cut = len([n for n in said if n <= 2])
    for path, times in (("/", 1), ("/runs/1", 2), ("/compare?runs=1", 1)):
        shown = client.get(path).text
        assert len(re.findall(r"metrics of \d+ of 20[12] steps are left out", shown)) == times, path
    assert f"metrics of {cut} of 201 steps" in client.get("/runs/1").text
    assert "metrics of 1 of 1 step are left out" in client.get("/runs/1/steps/400").text
    assert "left out" not in client.get("/runs/1/steps/249").text


def test_a_line_of_ten_megabytes_is_shown_as_its_beginning(tmp_path: Path) -> None:
    big = "<b>\x1b[2J" + "w" * 10_000_000
    more: list[r.Record] = [
        r.Decision(big, "none", big, big, json.dumps({"decision": big}), T0 + 60, "code"),
        r.Event("note", 1, big, big, "{}", T0 + 60),
        r.StepCommitted(1, 50, "train", 1, 1, json.dumps({"reward": 1.0, big: 1.0}), T0 + 60),
        r.RunEnded(1, "failed", big, T0 + 61),
    ]
    client = TestClient(web.make_app(ledger(tmp_path, more=[more]), TOKEN), headers=BEARER)
    newest = re.findall(r'href="(/decisions/\d+)"', client.get("/decisions").text)[0]
    for path in ("/", "/runs/1", "/runs/1/steps/50", "/decisions", newest):
        began = time.monotonic()
        reply = client.get(path)
        assert time.monotonic() - began < 20, path
        assert (reply.status_code, "\x1b" in reply.text) == (200, False), path
        assert len(reply.text) < 400_000, path
        assert ("&lt;b&gt;" in reply.text) is (path != "/runs/1/steps/50"), path


def test_inputs_of_a_decision_however_large_are_read_as_far_as_they_are_shown(tmp_path: Path) -> None:
    """What is deep and wide takes a thousand times its own characters with one value a line."""
    deep = "[" * 900 + ",".join(["1"] * 50_000) + "]" * 900
    more: list[r.Record] = [
        r.Decision("p", "none", "s", "r", inputs, T0 + 60, "code")
        for inputs in (json.dumps({"x": "y" * 20_000_000}), deep, '{"small": [1]}', "no JSON")
    ]
    url = ledger(tmp_path, more=[more])
    client = TestClient(web.make_app(url, TOKEN), headers=BEARER)
    with reading(store.open_readonly(url)) as connection:
        big, wide, small, none = (
            row["id"] for row in ask(connection, "SELECT id FROM v_decisions WHERE policy = 'p'")
        )
        tracemalloc.start()
        try:
            shown = {number: pages.decision(connection, number) for number in (big, wide, small, none)}
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert most < 15_000_000
    notes = {number: page.panels[1].note for number, page in shown.items()}
    assert notes[big] == "their beginning: 20,000,009 characters are recorded"
    assert notes[wide].startswith("their beginning: 101,799 ")
    assert not notes[small]
    assert not notes[none]
    for number in shown:
        said = client.get(f"/decisions/{number}").text
        assert len(said) < 400_000
        assert notes[number] in said
    assert "&#34;small&#34;: [\n    1\n  ]" in client.get(f"/decisions/{small}").text
    assert "no JSON" in client.get(f"/decisions/{none}").text


def test_a_reward_at_the_end_of_what_a_double_holds_is_no_bin(tmp_path: Path) -> None:
    most = 1.7976931348623157e308
    assert charts.bins([most]) == []
    assert charts.bins([0.0, most]) == []


def test_bins_hold_each_reward_once() -> None:
    values = [-1.0] * 3 + [0.0] * 2 + [0.1] + [1.0] * 4 + [float("nan")] * 9
    assert sum(n for *_, n in charts.bins(values)) == 10
    assert charts.bins([0.5] * 7)[0][2] == 7
    assert charts.bins([]) == []
    assert sum(n for *_, n in charts.bins([1.0, 1.0 + 2**-52])) == 2


def test_the_command_that_is_printed_shows_the_address_with_the_token(tmp_path: Path) -> None:
    token = tmp_path / "it's my $HOME" / "web.token"
    token.parent.mkdir()
    token.write_text("secret\n")
    command = web.address_command("http://127.0.0.1:1/", token)
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "http://127.0.0.1:1/?token=secret\n"
    assert "secret" not in command
