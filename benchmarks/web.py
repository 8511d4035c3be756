"""Seconds and bytes of each page of `scavenger web` on a ledger of 100,000 samples, and what 20 viewers cost.

    python benchmarks/web.py [--samples 100000] [--repeats 5] [--viewers 20] [--follow-s 300] [--browser]

Goals: 1 s and 1 MB a page, 2 % of a core for the viewers.

The ledger is `benchmarks/top.py`'s, over 100 steps, in SQLite; the run has a tokenizer. Completions have 32 tokens, those of the newest
2,000 samples 500, so that a search reads a million tokens, and those of the episode too; of these each token has a difference.
A page is asked of a real server by HTTP, each time anew: the server's cache is off (`interval_s` 0). With `--browser` a real Chromium
opens it, and the time is until its load event. Then `--viewers` viewers follow the run's page for `--follow-s` seconds, each as a browser
does: a connection for news, and the page again at each change, and with `--browser` one of them is Chromium; the ledger changes once a
second. The share is the CPU time of the server's process, which is not the daemon's, over that time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# Not this file's folder: a benchmark in it has the name of a package.
sys.path[:] = [str(ROOT), *(place for place in sys.path if Path(place).resolve() != ROOT / "benchmarks")]

import httpx2  # noqa: E402  after the path, as all that follows
import psutil  # type: ignore[import-untyped]  # noqa: E402
import sqlalchemy as sa  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402

from benchmarks import top  # noqa: E402
from scavenger.ledger import store  # noqa: E402
from scavenger.protocol.messages import pack_logprobs, pack_tokens  # noqa: E402

if TYPE_CHECKING:
    from playwright.sync_api import Page

GOAL_S, GOAL_BYTES, GOAL_SHARE = 1.0, 1_000_000, 0.02
VOCABULARY, LONG, SEARCHED = 1_000, 500, 2_000
#: Ten turns of 16 samples, each of which goes on from the first one of the turn before and called 20 tools: more than the page shows.
EPISODE = (
    "INSERT INTO episodes (episode_id, run_id, name, state, reason, begun_at, worker) VALUES (1, 1, 'bench', 'open', '', 1, '')",
    """INSERT INTO turns (group_id, episode_id, run_id, number, request, content, begun_at, parent_id, prefix_len, prompt_tokens,
                          prompt_sha256)
       SELECT group_id, 1, 1, group_id, x'00', x'00', group_id,
              CASE WHEN group_id = 1 THEN 0 ELSE (SELECT p.first_sample_id FROM groups p WHERE p.group_id = g.group_id - 1) END,
              (group_id - 1) * (length(prompt) / 4 + 32), group_id * (length(prompt) / 4) + (group_id - 1) * 32, x'00'
       FROM groups g WHERE group_id BETWEEN 1 AND 10""",
    """INSERT INTO tool_calls (call_id, episode_id, run_id, call, tool, asker, answer, asked_at, answered_at)
       WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 200)
       SELECT i, 1, 1, 'c' || i, 'mail.send', x'00', x'00', 1 + i / 20.0, 1.5 + i / 20.0 FROM n""",
)


def ledger(folder: Path, samples: int) -> str:
    """Its URL."""
    top.ledger(folder, samples, stepped=True)
    url = f"sqlite:///{folder / 'state' / 'ledger.sqlite3'}"
    tokenizer = folder / "tokenizer.json"
    Tokenizer(WordLevel({f"w{i} ": i for i in range(VOCABULARY)}, unk_token="w0 ")).save(str(tokenizer))
    engine = store.open_engine(url)
    try:
        with engine.connect() as connection, connection.begin():
            connection.exec_driver_sql(f"UPDATE runs SET tokenizer = '{tokenizer}'")
            for statement in EPISODE:
                connection.exec_driver_sql(statement)
            lengthen(connection, [*range(samples - SEARCHED + 1, samples + 1), *range(1, 161), samples // 2])
    finally:
        engine.dispose()
    return url


def lengthen(connection: sa.Connection, sample_ids: Iterable[int]) -> None:
    """Give these samples `LONG` tokens in one chunk each, with logprobs and differences."""
    draw = random.Random(1)
    for sample_id in sample_ids:
        tokens = pack_tokens(draw.randrange(VOCABULARY) for _ in range(LONG))
        logprobs = pack_logprobs(-draw.random() * draw.choice((0.0, 0.3, 4.0)) for _ in range(LONG))
        apart = struct.pack(f"<{LONG}e", *(draw.gauss(0.0, 0.08) for _ in range(LONG)))
        mine = (sample_id,)
        connection.exec_driver_sql("DELETE FROM chunks WHERE sample_id = ?", mine)
        connection.exec_driver_sql(
            "INSERT INTO chunks (sample_id, epoch, start_len, n_tokens, version, worker_id, at, tokens, logprobs, raw_logprobs) "
            "VALUES (?, 1, 0, ?, 1, 1, 1, ?, ?, ?)",
            (sample_id, LONG, tokens, logprobs, logprobs),
        )
        connection.exec_driver_sql(
            "UPDATE samples SET accepted_len = ? WHERE sample_id = ?", (LONG, sample_id)
        )
        connection.exec_driver_sql(
            "INSERT INTO token_differences (sample_id, step, attempt, n_tokens, mean, differences) VALUES (?, 1, 1, ?, 0.06, ?)",
            (sample_id, LONG, apart),
        )


@contextlib.contextmanager
def served(folder: Path, interval_s: float) -> Iterator[tuple[httpx2.Client, int]]:
    """A client that is let in, and the server's pid."""
    code = "import sys; from pathlib import Path; from scavenger.web import app; app.serve(sys.argv[1], port=0, unix=None, "
    code += "token_file=Path(sys.argv[2]), interval_s=float(sys.argv[3]), root_path='')"
    url = f"sqlite:///{folder / 'state' / 'ledger.sqlite3'}"
    argv = [sys.executable, "-c", code, url, str(folder / "web.token"), str(interval_s)]
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[1].rstrip(";")
        bearer = {"Authorization": f"Bearer {(folder / 'web.token').read_text().strip()}"}
        with httpx2.Client(base_url=address, headers=bearer, timeout=60.0) as client:
            yield client, process.pid
    finally:
        process.terminate()
        process.wait(30)


def paths(samples: int) -> dict[str, str]:
    last = top.STEPS - 1
    return {
        "runs": "/",
        "a run": "/runs/1",
        "a step": f"/runs/1/steps/{last}",
        "a step, best first": f"/runs/1/steps/{last}?only=best",
        "changed since": f"/runs/1/steps/{last}/since/1",
        "runs compared": "/compare?runs=1",
        "a group": f"/groups/{samples // 8 - 1}",
        "a sample": f"/samples/{samples // 2}",
        "an episode": "/episodes/1",
        "a search": "/runs/1/search?q=w17",
        "harm": "/harm",
        "decisions": "/decisions",
        "a decision": "/decisions/1",
    }


@contextlib.contextmanager
def chromium(client: httpx2.Client) -> Iterator[Page]:
    """A page of a real browser that is let in."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Root in a container has no user namespaces: Chromium's own sandbox cannot be had there.
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        bearer = {"Authorization": client.headers["Authorization"]}
        try:
            yield browser.new_context(base_url=str(client.base_url), extra_http_headers=bearer).new_page()
        finally:
            browser.close()


def opened(page: Page, path: str) -> float:
    """Seconds until the page's load event."""
    began = time.monotonic()
    reply = page.goto(path, wait_until="load", timeout=60_000)
    took = time.monotonic() - began
    if reply is None or not reply.ok:
        raise SystemExit(f"{path}: Chromium got {reply and reply.status}")
    return took


def requested(client: httpx2.Client, path: str) -> float:
    began = time.monotonic()
    client.get(path).raise_for_status()
    return time.monotonic() - began


def viewer(client: httpx2.Client, failed: list[BaseException], over: threading.Event) -> None:
    """Follows the run's page as a browser does, until the server ends."""
    try:
        with client.stream("GET", "/live") as news:
            for line in news.iter_lines():
                if line.startswith("data:"):
                    client.get("/runs/1").raise_for_status()
    except (httpx2.HTTPError, OSError) as error:
        if not over.is_set():
            failed.append(error)


class Followed(NamedTuple):
    """`share`: of a core, of the server. `renewed`: how often a browser's page renewed itself; `complaints`: what its console said."""

    share: float
    changes: int
    renewed: int
    complaints: list[str]


def follow(folder: Path, viewers: int, seconds: float, *, browser: bool) -> Followed:
    """Have the run's page followed while its ledger changes once a second. `browser`: one of the viewers is a real one."""
    engine = store.open_engine(f"sqlite:///{folder / 'state' / 'ledger.sqlite3'}")
    renewed, complaints = list[str](), list[str]()
    try:
        with served(folder, 5.0) as (client, pid), contextlib.ExitStack() as shown:
            client.get("/runs/1").raise_for_status()
            page = shown.enter_context(chromium(client)) if browser else None
            failed: list[BaseException] = []
            over = threading.Event()
            watching = [
                threading.Thread(target=viewer, args=(client, failed, over)) for _ in range(viewers - browser)
            ]
            for one in watching:
                one.start()
            if page is not None:
                opened(page, "/runs/1")
                page.on("console", lambda said: complaints.append(said.text))
                page.on("pageerror", lambda error: complaints.append(str(error)))
                page.on(
                    "response", lambda reply: renewed.append(reply.url) if "/runs/1" in reply.url else None
                )
            process = psutil.Process(pid)
            before, changes, due = sum(process.cpu_times()[:2]), 0, time.monotonic()
            end = due + seconds
            while time.monotonic() < end:
                with engine.connect() as connection, connection.begin():
                    connection.exec_driver_sql("UPDATE generations SET batch = batch + 1")
                changes, due = changes + 1, due + 1.0
                left = max(0.0, due - time.monotonic())  # the load is one change a second
                if page is not None:
                    page.wait_for_timeout(1000 * left)  # what the browser reports is heard meanwhile
                else:
                    time.sleep(left)
            share = (sum(process.cpu_times()[:2]) - before) / seconds
            complaints = list(complaints)  # of the time, not of the end
            shown.close()
            over.set()
            process.terminate()
            for one in watching:
                one.join()
            if failed:
                raise SystemExit(f"a viewer was left: {failed[0]!r}")
            return Followed(share, changes, len(renewed), complaints)
    finally:
        engine.dispose()


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--samples", type=int, default=100_000)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--viewers", type=int, default=20)
    options.add_argument("--follow-s", type=float, default=300.0)
    options.add_argument("--browser", action="store_true")
    given = options.parse_args()
    missed = False
    with tempfile.TemporaryDirectory(prefix="scv-web-") as name:
        folder = Path(name)
        ledger(folder, given.samples)
        with served(folder, 0.0) as (client, _), contextlib.ExitStack() as shown:
            page = shown.enter_context(chromium(client)) if given.browser else None
            for what, path in paths(given.samples).items():
                # The first page imports and compiles: it is asked for once before.
                size = len(client.get(path).raise_for_status().content)
                took = [
                    opened(page, path) if page is not None else requested(client, path)
                    for _ in range(given.repeats)
                ]
                met = statistics.median(took) <= GOAL_S and size <= GOAL_BYTES
                missed = missed or not met
                print(
                    f"{given.samples:,} samples: {what:<20} {statistics.median(took):.3f} s ({min(took):.3f} to {max(took):.3f}), "
                    f"{size:,} bytes  goal {GOAL_S:g} s, {GOAL_BYTES:,} bytes: {'met' if met else 'MISSED'}",
                    flush=True,
                )
        if given.viewers:
            found = follow(folder, given.viewers, given.follow_s, browser=given.browser)
            met = found.share <= GOAL_SHARE
            missed = missed or not met
            print(
                f"{given.viewers} viewers for {given.follow_s:g} s, {found.changes} changes: {found.share:.2%} of a core  "
                f"goal {GOAL_SHARE:.0%}: {'met' if met else 'MISSED'}"
            )
            if given.browser:
                # It looks for changes every 5 s.
                met = found.renewed >= given.follow_s / 5 * 0.8 and not found.complaints
                missed = missed or not met
                print(
                    f"Chromium among them: its page renewed itself {found.renewed} times, {len(found.complaints)} complaints of its "
                    f"console {found.complaints[:3]}  goal: with each look, none: {'met' if met else 'MISSED'}"
                )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
