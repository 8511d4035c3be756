"""What the pages say of completions: text, how likely each token was, a search; and a run's pages as one file."""

from __future__ import annotations

import html
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx2")

import psutil  # type: ignore[import-untyped]
import sqlalchemy as sa
from starlette.testclient import TestClient
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from typer.testing import CliRunner

from scavenger.cli.main import app as commands
from scavenger.errors import ConfigError, LedgerError
from scavenger.ledger import records as r
from scavenger.ledger import store
from scavenger.ledger.read.reader import reading
from scavenger.web import app as web
from scavenger.web import export, pages, questions, render, texts
from tests.ledger.examples import CONFIG, T0, chunk
from tests.top import sites as tops
from tests.web.sites import ledger, word

TOKEN = "t" * 32
T = TypeVar("T")
BEARER = {"Authorization": f"Bearer {TOKEN}"}


def test_a_token_s_mark_says_how_likely_it_was() -> None:
    logprobs = [math.log(p) for p in (1.0, 0.5, 0.49, 0.1, 0.05, 0.001)] + [-math.inf, math.nan]
    pieces = texts.probabilities(range(8), logprobs, lambda some: "".join(map(word, some)))
    assert [text for text, *_ in pieces] == [word(i) for i in range(8)]
    assert [one.level for one in pieces] == [0, 0, 1, 1, 2, 3, 3, 0]
    assert [one.title for one in pieces][1:4] == ["0.5", "0.49", "0.1"]
    assert pieces[-1].title == "not known"
    assert {one.apart for one in pieces} == {0}


def test_a_token_s_other_mark_says_how_far_trainer_and_engine_are_apart() -> None:
    differences = [0.0, 0.019, 0.02, -0.1, 0.5, -7.0, math.inf, math.nan]
    pieces = texts.probabilities(range(8), [0.0] * 8, lambda some: "".join(map(word, some)), differences)
    assert [one.apart for one in pieces] == [0, 0, 1, -2, 3, -3, 3, 0]
    assert pieces[3].title == "1; -0.1"
    assert pieces[-1].title == "1"
    whole = "\u20ac".encode()
    (one,) = texts.probabilities(
        list(whole), [0.0] * 3, lambda some: bytes(some).decode(errors="replace"), [0.01, -0.2, 0.1]
    )
    assert (one.apart, one.title) == (-2, "1, 1, 1; +0.01, -0.2, +0.1")


def test_tokens_that_are_characters_only_together_are_one_piece() -> None:
    whole = "a\u20acb".encode()  # the second character has three bytes
    pieces = texts.probabilities(
        list(whole), [-1.0, -2.0, -9.0, -2.0, -0.1], lambda some: bytes(some).decode(errors="replace")
    )
    assert [(one.text, one.level) for one in pieces] == [("a", 1), ("\u20ac", 3), ("b", 0)]
    cut = texts.probabilities(list(whole[:3]), [0.0] * 3, lambda some: bytes(some).decode(errors="replace"))
    assert [text for text, *_ in cut] == ["a", "\ufffd"], "the last one is shown though it is no character"


def test_a_sample_s_page_marks_its_tokens(tmp_path: Path) -> None:
    client = TestClient(web.make_app(ledger(tmp_path), TOKEN), headers=BEARER)
    said = client.get("/samples/11").text
    # Nine tokens of probability exp(-0.5), exp(-1.5), ..., of which the trainer's logprob is 0, +.25, -.5, +.75, ... from the engine's.
    found = re.findall(r'<span(?: class="([^"]*)")? title="([\d.]+); ([^"]+)">&lt;w(\d+)', said)
    marks = ["", "p1 u2", "p2 e3", "p2 u3", "p2 e3", "p3 u3", "p3 e3", "p3 u3", "p3 e3"]
    assert found == [
        (mark, f"{math.exp(-0.5 - i):.3g}", f"{(-1) ** (i + 1) * i / 4 + 0.0:+.3g}", str(11_000 + i))
        for i, mark in enumerate(marks)
    ]
    assert re.findall(r'value="(\w+)"( checked)?>', said) == [
        ("none", ""),
        ("likely", " checked"),
        ("apart", ""),
    ]
    other = client.get("/samples/91").text
    assert 'value="apart"' not in other, "of its tokens no difference is kept"
    assert "monitor.token_differences" in other


def test_a_group_s_page_marks_all_completions_as_far_as_a_page_holds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_MOST_MARKS", 10)
    client = TestClient(web.make_app(ledger(tmp_path), TOKEN), headers=BEARER)
    said = client.get("/groups/10").text
    assert re.findall(r'value="(\w+)"( checked)?>', said) == [
        ("none", " checked"),
        ("likely", ""),
        ("apart", ""),
    ]
    assert re.findall(r'title="[\d.]+(;)?[^>]*>&lt;w(\d+)', said) == [
        *((";", str(11_000 + i)) for i in range(5)),
        *(("", str(12_000 + i)) for i in range(4)),
    ]
    assert "&lt;w11005&gt;" in said, "what is not marked is shown all the same"
    assert said.count("&lt;w11001&gt;") == 1


def test_a_search_finds_the_newest_completions_that_have_the_text_whatever_its_case(tmp_path: Path) -> None:
    client = TestClient(web.make_app(ledger(tmp_path), TOKEN), headers=BEARER)
    hit = client.get("/runs/1/search", params={"q": "W11003>"}).text
    assert set(re.findall(r'href="/samples/(\d+)"', hit)) == {"11"}
    assert "&lt;w11003&gt;" in hit
    every = client.get("/runs/1/search", params={"q": "<w"}).text
    assert {"11", "12"} < set(re.findall(r'href="/samples/(\d+)"', every))
    none = client.get("/runs/1/search", params={"q": "<script>no such"}).text
    assert not re.findall(r'href="/samples/', none)
    assert 'value="&lt;script&gt;no such"' in none
    assert client.get("/runs/99/search?q=w").status_code == 404


def test_a_search_says_what_it_read(tmp_path: Path) -> None:
    client = TestClient(web.make_app(ledger(tmp_path), TOKEN), headers=BEARER)
    said = "searched were the first 6,000 tokens of each, 1,000,000 together; the SQL lists those samples"
    assert said in client.get("/runs/1/search", params={"q": "w11003"}).text
    assert said in client.get("/runs/1/search", params={"q": "no such"}).text
    assert said not in client.get("/runs/1/search").text, "nothing was looked for"


def test_the_process_that_makes_text_loads_no_driver_of_a_database() -> None:
    """It is started for each page of a group or a sample: with one it takes ten times as long."""
    code = "import sys, scavenger.web.texts; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    argv = [sys.executable, "-P", "-c", code]
    loaded = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    assert "scavenger" in loaded
    assert not {"sqlalchemy", "alembic", "msgspec", "zmq", "starlette", "typer"} & set(loaded)


def test_a_search_without_the_tokenizer_says_so(tmp_path: Path) -> None:
    url = ledger(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    client = TestClient(web.make_app(url, TOKEN), headers=BEARER)
    reply = client.get("/runs/1/search?q=w")
    assert reply.status_code == 503
    assert "tokenizer" in reply.text
    shown = client.get("/samples/11")
    assert shown.status_code == 200
    assert "ids:) 11000 11001" in shown.text


def bomb(path: Path) -> None:
    """A small file of which one token is 2^40 characters."""
    made = Tokenizer(WordLevel({"a": 11_000}, unk_token="a"))
    made.decoder = decoders.Sequence([decoders.Replace("a", "aa") for _ in range(40)])
    made.save(str(path))


def panic(path: Path) -> None:
    """One with which the library ends its process at once: it takes more of a text's end than there is."""
    made = Tokenizer(WordLevel({"a": 11_000}, unk_token="a"))
    made.decoder = decoders.Strip("a", 0, 100)
    made.save(str(path))


@pytest.mark.parametrize("what", ["fifo", "bomb", "garbage"])
def test_a_tokenizer_that_would_take_the_server_down_costs_a_bounded_time(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "WALL_S", 3.0)
    url, path = ledger(tmp_path), tmp_path / "tokenizer.json"
    path.unlink()
    if what == "fifo":
        os.mkfifo(path)
    elif what == "bomb":
        bomb(path)
    else:
        path.write_text("{")
    client = TestClient(web.make_app(url, TOKEN), headers=BEARER)
    began = time.monotonic()
    shown = client.get("/samples/11")
    assert time.monotonic() - began < 60
    assert shown.status_code == 200
    assert "ids:) 11000 11001" in shown.text
    assert client.get("/runs/1/search?q=w").status_code == 503


def test_a_long_sample_is_read_as_far_as_it_is_shown(tmp_path: Path) -> None:
    """Compaction makes one chunk of a sample."""
    records = [
        r.GroupCreated(70, 1, "train", 3, 0, 0, 1, b"\7\0\0\0", 2, 71, '{"max_tokens": 64}', "{}", T0),
        r.LeaseGranted(71, 1, 2, 1, 0, T0),
        chunk(71, 1, 0, 3 * texts.MOST_TEXT, 2),
    ]
    url = ledger(tmp_path, more=[records])
    engine = store.open_readonly(url)
    try:
        with reading(engine) as connection:
            known = pages._completions(connection, [71, 11], 1_000_000)
            assert [len(known[one]) for one in (71, 11)] == [texts.MOST_TEXT, 9]
            assert list(pages._completions(connection, [71, 11], texts.MOST_TEXT)) == [71], "no room is left"
    finally:
        engine.dispose()


def test_samples_however_long_are_read_as_far_as_they_are_shown_by_pages_and_searches(tmp_path: Path) -> None:
    """Of a group of 16 of a million tokens a page read 200 MB, and a search 2 GB; a hostile trainer trains one sample again and again."""
    n = 400_000
    records: list[r.Record] = [
        r.GroupCreated(70, 1, "train", 3, 0, 0, 1, bytes(4 * n), 4, 71, '{"max_tokens": 64}', "{}", T0)
    ]
    for sample in range(71, 75):
        records += [r.LeaseGranted(sample, 1, 2, 1, 0, T0), chunk(sample, 1, 0, n, 2)]
    records += [r.DifferencesRecorded(71, 3, attempt, n, 0.5, bytes(2 * n)) for attempt in range(1, 30)]
    url = ledger(tmp_path, more=[records])
    engine = store.open_readonly(url)
    try:
        with reading(engine) as connection:
            tracemalloc.start()
            try:
                found = pages.sample(connection, pages.Contents(), 71)
                group = pages.group(connection, pages.Contents(), 70)
                pages._completions(connection, [71, 72, 73, 74, 11], 1_000_000)
                _, most = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
    finally:
        engine.dispose()
    assert most < 8_000_000
    (text,) = [panel for panel in found.panels if panel.title == "Text"]
    assert len(text.texts[1].pieces) == texts.MOST_PIECES
    assert ";" in text.texts[1].pieces[-1].title, "the newest step's differences mark its first tokens"
    assert [len(one.pieces) for one in group.panels[1].texts] == [1_000] * 4
    (apart,) = [panel for panel in found.panels if panel.title.startswith("How far")]
    assert len(apart.body) == 20


def test_the_file_of_a_run_has_its_pages_and_no_link_that_leads_nowhere(tmp_path: Path) -> None:
    other: list[r.Record] = [
        r.RunCreated(2, "second", "owner", 17, CONFIG, "{}", "", T0 + 30),
        r.AttemptGranted(2, 1, "login1", 102, 0, CONFIG, "{}", T0 + 30),
    ]
    url, out = ledger(tmp_path, more=[other]), tmp_path / "run.html"
    shown = export.write(url, "sorting", out)
    assert out.stat().st_mode & 0o777 == 0o600
    text = out.read_text(encoding="utf-8")
    ids = set(map(html.unescape, re.findall(r'<main id="([^"]+)"', text)))
    assert ids == set(shown)
    assert ids >= {
        "/",
        "/compare?runs=2,1",
        "/harm",
        "/decisions",
        "/decisions/1",
        "/runs/1",
        "/runs/1/steps/1",
    }
    assert ids >= {"/samples/11", "/episodes/1", "/runs/1/evals/1", "/groups/90"}
    assert not ids & {"/groups/10", "/samples/12", "/samples/91"}, (
        "a turn's text is its episode's; they never moved"
    )
    assert "Pages of 3 samples that never moved" in text
    assert "--every-sample" in text
    assert text.count("&lt;w11003&gt;") == 1, "a text is in the file once"
    (said,) = [panel for panel in shown["/samples/11"].panels if panel.title == "Text"]
    assert [one.href for one in said.texts] == ["/episodes/1"]
    assert {
        len(text.split(one)) for one in set(re.findall(r'<pre id="q\d+"[^>]*>(.*?)</pre>', text, re.DOTALL))
    } == {2}, "each statement is printed once"
    every = export.write(url, "sorting", tmp_path / "every.html", every_sample=True)
    assert {path for path in every if path not in shown} == {"/samples/12", "/samples/91", "/samples/92"}
    assert "never moved" not in (tmp_path / "every.html").read_text(encoding="utf-8")
    assert next(iter(shown)) == "/runs/1", "the first one is what a reader sees first"
    # Each filter, and the bins that have samples, as pages of their own.
    at = "/runs/1/steps/1?only="
    narrowed = {path.removeprefix(at): page for path, page in shown.items() if path.startswith(at)}
    assert {name: [row[0].text for row in page.panels[0].body] for name, page in narrowed.items()} == {
        "moved": ["11"],
        "masked": [],
        "filtered": [],
        "all+rewards+equal": [],
        "cut+off": ["12"],
        "best": ["11", "12"],
        "worst": ["12", "11"],
        "all&bin=0": ["12"],
        "all&bin=19": ["11"],
    }
    assert "Not in this file: a search of the completions" in text
    links = list(map(html.unescape, re.findall(r'href="([^"]+)"', text)))
    assert {"#/runs/1/steps/1?only=all&bin=19", "#/runs/1/steps/1?only=moved", "#/decisions/1"} <= set(links)
    pres = set(re.findall(r'<pre id="(q\d+)"', text))
    assert {link.removeprefix("#") for link in links} <= ids | pres
    assert "<script" not in text
    assert "http" not in re.sub(r"http-equiv", "", text), "it loads nothing"
    assert "&lt;w11003&gt;" in text
    with pytest.raises(ConfigError, match="is there already"):
        export.write(url, "sorting", out)
    with pytest.raises(LedgerError, match="no run 'other'"):
        export.write(url, "other", tmp_path / "b.html")
    assert not (tmp_path / "b.html").exists()


def test_the_file_says_of_each_part_of_a_page_that_it_lacks(tmp_path: Path) -> None:
    """A page that the server shows has headings and columns that are not in the file; those are named, and it lacks no other."""
    url = ledger(tmp_path)
    shown = export.write(url, "sorting", tmp_path / "run.html", every_sample=True)
    text = (tmp_path / "run.html").read_text(encoding="utf-8")
    head = text[: text.index("<main")]
    told = {
        "Search the completions": "a search of the completions",
        "completion": "how each completion begins in the tables of samples",
        "The prompt&#39;s row: what the reward function received": "the row of an agent&#39;s prompt",
    }

    def parts(page: str) -> set[str]:
        return set(re.findall(r"<(?:h2|th)\b[^>]*>(.*?)</", page))

    lacks: set[str] = set()
    with TestClient(web.make_app(url, TOKEN), headers=BEARER) as client:
        for name, page in re.findall(r'<main id="([^"]*)">(.*?)</main>', text, re.DOTALL):
            live = client.get(html.unescape(name)).text
            if "?only=" not in name:  # there a filter's page has the samples alone
                lacks |= parts(live) - parts(page)
    assert len(shown) > 10
    assert lacks <= set(told), lacks - set(told)
    assert "completion" in lacks
    assert [name for name in lacks if told[name] not in head] == []


def test_an_error_that_speaks_of_what_a_ledger_has_not_ends_the_file() -> None:
    def fail(build: Callable[[sa.Connection], T], /) -> T:
        raise LedgerError("table runs has no column named x")

    room = export._Room(fail, {}, 100)
    with pytest.raises(LedgerError, match="no column"):
        room.take("/harm", pages.harm)


def test_an_episode_without_a_turn_keeps_no_file_from_being_written(tmp_path: Path) -> None:
    """An agent that has asked nothing yet: each run that trains has some."""
    shown = export.write(
        ledger(tmp_path, more=[[r.EpisodeBegun(2, 1, "fresh", T0 + 50)]]), "sorting", tmp_path / "run.html"
    )
    assert "/episodes/1" in shown
    assert "/episodes/2" not in shown
    assert [
        cell.text
        for panel in shown["/runs/1"].panels
        if panel.title == "Episodes"
        for cell in panel.body[0][:2]
    ] == ["2", "fresh"]


def test_one_process_reads_all_texts_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's file has thousands of pages with texts; a Python that starts takes half a second."""
    url, started = ledger(tmp_path), list[object]()
    popen = subprocess.Popen

    def counted(*arguments: Any, **options: Any) -> Any:
        started.append(arguments)
        return popen(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", counted)
    shown = export.write(url, "sorting", tmp_path / "x.html")
    assert {path for path in shown if path.startswith(("/groups", "/samples", "/episodes"))} > {"/groups/90"}
    assert "&lt;w11003&gt;" in (tmp_path / "x.html").read_text(encoding="utf-8")
    assert len(started) == 1


def test_a_child_for_many_survives_a_tokenizer_that_took_it_down_and_tries_it_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger(tmp_path)
    panic(tmp_path / "bomb.json")
    good, bad = str(tmp_path / "tokenizer.json"), str(tmp_path / "bomb.json")
    many = [11_000 + i % 9 for i in range(100_000)]  # more than a pipe holds, each way
    with texts.Child() as child:
        assert texts.read(good, [[11_000], many], {}, child) == texts.read(good, [[11_000], many])
        for _ in range(4):
            with pytest.raises(ConfigError, match="cannot be used"):
                texts.read(bad, [[11_000]], {}, child)
        assert child.started <= 3
        assert texts.read(good, [[11_000]], {}, child) == texts.read(good, [[11_000]])
        assert child._process is not None
        os.kill(child._process.pid, signal.SIGSTOP)  # as a host that is too busy
        monkeypatch.setattr(texts, "WALL_S", 3.0)
        with pytest.raises(ConfigError, match="or ends its process"):
            texts.read(good, [[11_000]], {}, child)
        monkeypatch.undo()
        assert texts.read(good, [[11_000]], {}, child) == texts.read(good, [[11_000]])


def test_a_file_is_read_by_one_connection_in_short_transactions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon's log cannot be written back during a transaction: after each page it ends."""
    opened, ended = list[object](), list[object]()
    make = store.open_readonly

    def counted(url: str, most_s: float | None = None) -> sa.Engine:
        engine = make(url, most_s)
        sa.event.listen(engine, "connect", lambda *said: opened.append(said))
        sa.event.listen(engine, "commit", ended.append)
        return engine

    monkeypatch.setattr(store, "open_readonly", counted)
    shown = export.write(ledger(tmp_path), "sorting", tmp_path / "x.html")
    assert len(opened) == 1
    assert len(ended) > len([path for path in shown if "only=" not in path])


def test_the_file_s_groups_and_samples_have_a_bound(tmp_path: Path) -> None:
    url = ledger(tmp_path)
    engine = store.open_readonly(url)
    try:
        with reading(engine) as connection:

            def ask_for(build: Callable[[sa.Connection], T]) -> T:
                return build(connection)

            some, more, every = (
                export.collected(ask_for, pages.Contents(), "sorting", most).pages
                for most in (0, 8_000, export.MOST_CHARS)
            )
    finally:
        engine.dispose()
    assert not [path for path in some if path.startswith(("/groups", "/samples"))]
    assert len(some) < len(more) < len(every)
    assert "/runs/1/steps/1" in some


@pytest.mark.parametrize("every_sample", [False, True])
def test_the_file_says_of_each_kind_of_page_how_many_are_missing_whenever_its_room_ends(
    tmp_path: Path, every_sample: bool
) -> None:
    """A count of what it came to would be too small where it did not come far: an agent's run said nothing of its episodes."""
    url = ledger(tmp_path)
    engine = store.open_readonly(url)
    try:
        with reading(engine) as connection:

            def ask_for(build: Callable[[sa.Connection], T]) -> T:
                return build(connection)

            none, whole = (
                export.collected(ask_for, pages.Contents(), "sorting", most, every_sample=every_sample)
                for most in (0, export.MOST_CHARS)
            )
    finally:
        engine.dispose()
    kinds = ("/groups/", "/episodes/", "/decisions/")
    there = [sum(path.startswith(kind) for path in whole.pages) for kind in kinds]
    assert min(there) > 0
    assert [missing for _, missing, _ in whole.missing] == [0] * len(whole.missing)
    assert "no page of" not in export.left_out(whole)
    said = export.left_out(none)
    groups, episodes, decisions = there
    assert (
        f"{groups} of {groups} groups, {episodes} of {episodes} episodes, 1 of 1 samples that moved" in said
    )
    assert f"{decisions} of {decisions} decisions that are listed, 2 of 2 filters of steps and eval" in said
    assert ("3 of 3 samples that never moved" in said) is every_sample
    assert none.not_moved == whole.not_moved == (0 if every_sample else 3)


def test_the_file_says_how_many_steps_and_evaluations_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "MOST_STEPS", 1)
    url = ledger(tmp_path, more=[[r.StepCommitted(1, 2, "train", 1, 1, '{"reward": 0.5}', T0 + 40)]])
    engine = store.open_readonly(url)
    try:
        with reading(engine) as connection:

            def ask_for(build: Callable[[sa.Connection], T]) -> T:
                return build(connection)

            found = export.collected(ask_for, pages.Contents(), "sorting", 0)
    finally:
        engine.dispose()
    assert {what: (missing, there) for what, missing, there in found.missing}["steps"] == (1, 2)
    assert "no page of 1 of 2 steps" in export.left_out(found)


def test_hostile_text_is_text_in_the_file_too(tmp_path: Path) -> None:
    url = ledger(tmp_path, evil=True)
    shown = export.write(url, tops.EVIL_STORED, tmp_path / "x.html")
    text = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert len(shown) > 3
    assert not set(text) & set("\x1b\x07\r\u202e\u2066")
    assert len(text) < 2_000_000


def test_the_command_writes_a_file(tmp_path: Path) -> None:
    ledger(tmp_path)
    given = ["web", "--config", str(tmp_path / "scavenger.toml"), "--export", str(tmp_path / "run.html")]
    refused = CliRunner().invoke(commands, given)
    assert isinstance(refused.exception, ConfigError)
    done = CliRunner().invoke(commands, [*given, "--run", "sorting"])
    assert done.exit_code == 0, done.output
    assert "pages" in done.output


def test_one_file_without_pages_is_a_page_too() -> None:
    assert "</html>" in "".join(render.one_file({}, "<b>", "<i>"))


def test_harm_counts_what_slurm_preempted_though_no_poll_saw_anybody_wait(tmp_path: Path) -> None:
    """A user who had his GPUs within a second is in no poll, and the page said `none`: tried on a new site."""
    begin = T0 + 5 * 86_400
    taken: list[r.Record] = []
    for n, notice, left, ended in (
        (41, True, 100.0, 102.0),
        (42, True, 203.0, 203.0),
        (43, False, 300.0, 299.0),
    ):
        taken += [
            r.JobIntended(f"j{n}", 1, "scavenge", 1, f"k{n}", begin),
            r.AllocationStarted(f"j{n}", 0, 900 + n, "gpu1", 1, begin + 1.0),
            r.WorkerJoined(n, 1, "harvested", f"j{n}", f"s{n}", 0, 900 + n, "gpu1", 1, "vllm", begin + 2.0),
            r.WorkerLeft(n, "preempted", notice, 1, 7, 0 if notice else 5, begin + left),
            r.AllocationEnded(f"j{n}", 0, "preempted", begin + ended),
        ]
    url = ledger(tmp_path, more=[taken])
    with reading(store.open_readonly(url)) as connection:
        (panel,) = [one for one in pages.harm(connection).panels if "Slurm preempted" in one.title]
    day = time.strftime("%Y-%m-%d", time.gmtime(begin))
    said = [cell if isinstance(cell, str) else cell.text for cell in panel.body[0]]
    assert said == [day, "3", "2", "1", "2", "21", "5"]


def test_an_engine_that_registered_again_is_preempted_once(tmp_path: Path) -> None:
    at = T0 + 5 * 86_400
    told: list[r.Record] = [
        r.JobIntended("j41", 1, "scavenge", 1, "k41", at),
        r.AllocationStarted("j41", 0, 941, "gpu1", 1, at + 1),
        r.WorkerJoined(41, 1, "harvested", "j41", "s41", 0, 941, "gpu1", 1, "vllm", at + 2),
        r.WorkerLeft(41, "the connection was lost", False, 1, 3, 4, at + 50),
        r.WorkerJoined(42, 1, "harvested", "j41", "s42", 0, 941, "gpu1", 1, "vllm", at + 60),
        r.WorkerLeft(42, "preempted", True, 1, 7, 0, at + 100),
        r.AllocationEnded("j41", 0, "preempted", at + 102),
    ]
    with reading(store.open_readonly(ledger(tmp_path, more=[told]))) as connection:
        (panel,) = [one for one in pages.harm(connection).panels if "Slurm preempted" in one.title]
    said = [cell if isinstance(cell, str) else cell.text for cell in panel.body[0]]
    assert said[1:] == ["1", "1", "2", "2", "7", "0"]


def test_a_server_s_child_stays_for_the_next_page_with_the_same_file_alone(tmp_path: Path) -> None:
    """A Python that starts takes longer than the texts of a page; what one run's file does to its child is in no text of another."""
    ledger(tmp_path)
    now, path = [0.0], tmp_path / "tokenizer.json"
    other = tmp_path / "other.json"
    other.write_bytes(path.read_bytes())
    children = texts.Children(lambda: now[0])

    def pids() -> list[int]:
        found = [child._process for _, child, _ in children._idle]
        return [process.pid for process in found if process is not None]

    try:
        for _ in range(3):
            assert texts.read(str(path), [[11_000]], {}, children)[0] == [word(11_000)]
        (first,) = pids()
        texts.read(str(other), [[11_000]], {}, children)
        assert pids()[0] == first
        assert len(pids()) == 2
        path.write_bytes(path.read_bytes().replace(b"<w11000>", b"<n11000>"))
        os.utime(path, ns=(1, 1))
        assert texts.read(str(path), [[11_000]], {}, children)[0] == ["<n11000>"], "the file of now"
        with pytest.raises(ConfigError):
            texts.read(str(tmp_path / "none.json"), [[11_000]], {}, children)
        assert len(pids()) == 3
        gone = [psutil.Process(pid) for pid in pids()]
        now[0] = texts.IDLE_S + 1
        children.tidy()
        assert pids() == []
        assert psutil.wait_procs(gone, timeout=30)[1] == []
    finally:
        children.close()
    texts.read(str(path), [[11_000]], {}, children)
    assert pids() == [], "of one that is closed none stays"


def test_a_server_tries_a_tokenizer_that_ends_its_child_twice_and_then_once_a_minute(tmp_path: Path) -> None:
    """Each try costs seconds of a core and up to 2 GiB, and a reader needs only to press F5."""
    ledger(tmp_path)
    good, bad = tmp_path / "tokenizer.json", tmp_path / "of\nevil.json"
    panic(bad)
    now = [0.0]
    children = texts.Children(lambda: now[0])

    def ask(path: Path) -> str:
        try:
            return texts.read(str(path), [[11_000]], {}, children)[0][0]
        except ConfigError as error:
            return error.cause

    def lost() -> int:
        return children.started

    try:
        first = [ask(bad) for _ in range(5)]
        assert lost() == texts.MOST_LOST
        assert "ends its process" in first[1]
        assert "tried again in 60 s" in first[2]
        assert "of evil.json" in first[2], "a message is one line, whatever the file is called"
        panic(bad)
        os.utime(bad, ns=(1, 1))
        assert "tried again" in ask(bad), "who wrote it may write it anew"
        assert ask(good) == word(11_000), "another run's is read meanwhile"
        before = lost()
        now[0] = texts.AGAIN_S
        assert ["tried again" in ask(bad) for _ in range(3)] == [False, True, True]
        assert lost() == before + 1
        now[0] *= 2
        bad.write_bytes(good.read_bytes())
        assert [ask(bad) for _ in range(3)] == [word(11_000)] * 3, "one that was mended is read"
    finally:
        children.close()


@pytest.mark.parametrize("said", ["[1, 2]", "7", '"words"', "[[1, 2]]", "null", "no JSON"])
def test_a_reply_that_is_no_object_is_a_child_lost_and_shows_no_text(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a child for one request, and of one for many: what a tokenizer's library prints may come first."""
    argv = (sys.executable, "-c", f"input(); print({said!r}, flush=True)")
    monkeypatch.setattr(texts, "_ARGV", argv)
    tokenizer = str(tmp_path / "tokenizer.json")
    with texts.Child() as child:
        for ask in (child, None):
            with pytest.raises(texts.Lost, match="ends its process"):
                texts.read(tokenizer, [[11_000]], {}, ask)


def test_readers_that_come_at_once_try_a_tokenizer_one_after_the_other(tmp_path: Path) -> None:
    bad = tmp_path / "bomb.json"
    panic(bad)
    children, refused = texts.Children(), list[str]()

    def ask() -> None:
        try:
            texts.read(str(bad), [[11_000]], {}, children)
        except ConfigError as error:
            refused.append(error.cause)

    many = [threading.Thread(target=ask) for _ in range(6)]
    try:
        for one in many:
            one.start()
        for one in many:
            one.join()
    finally:
        children.close()
    assert len(refused) == 6
    assert children.started == texts.MOST_LOST


def test_a_child_dies_before_the_server_where_memory_ends_and_says_no_more_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger(tmp_path)
    good = str(tmp_path / "tokenizer.json")
    with texts.Child() as child:
        texts.read(good, [[11_000]], {}, child)
        assert child._process is not None
        assert Path(f"/proc/{child._process.pid}/oom_score_adj").read_text() == "1000\n"
        monkeypatch.setattr(texts, "MOST_REPLY", 1_000)
        with pytest.raises(ConfigError, match="cannot be used"):
            texts.read(good, [[11_000] * 2_000], {}, child)
        assert child._process is None


def test_a_child_leaves_a_limit_of_the_host_as_it_is() -> None:
    code = "import resource as r; r.setrlimit(r.RLIMIT_CPU, (600, 600)); from scavenger.web import texts; texts._bounded_cpu(); "
    code += "print(*r.getrlimit(r.RLIMIT_CPU))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    soft, hard = map(int, said.split())
    assert hard == 600
    assert soft <= texts.CPU_S + 60


def test_an_id_that_no_tokenizer_knows_hides_no_other(tmp_path: Path) -> None:
    """A prompt's ids are its run's, and nobody has looked at them."""
    ledger(tmp_path)
    found = texts.read(str(tmp_path / "tokenizer.json"), [[-100, 11_000], [11_001]])
    assert found == texts.read(str(tmp_path / "tokenizer.json"), [[11_000], [11_001]])
