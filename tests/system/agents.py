"""Runs whose samples are episodes, for the system tests and `scripts/chaos`: the environment, its tool, and what the ledger has of them."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from scavenger import toml
from scavenger.cluster.layout import demo_layout
from scavenger.demo.site import DemoSite, SiteOptions
from scavenger.ledger.read import reports
from tests.system import play

DEADLINE_S = 4 * play.DEADLINE_S
TURNS, TOKENS = 3, 6
#: Of a prompt, three completions and two answers of the tool.
CONTEXT = 40


class ToolServer:
    """A tool with effects outside, in the test's own process: it notes whatever it is asked, and answers by what it is asked alone.

    `takes_s`: until it answers.
    """

    def __init__(self, takes_s: float = 0.0) -> None:
        self.asked: list[dict[str, Any]] = []
        self.takes_s = takes_s
        self.url = ""

    @contextlib.contextmanager
    def serving(self) -> Iterator[ToolServer]:
        asked, takes_s = self.asked, self.takes_s

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                arguments = body["params"]["arguments"]
                asked.append(arguments)
                time.sleep(takes_s)
                weight = (sum(arguments["said"]) + arguments["turn"]) % 10
                result = {"content": [{"type": "text", "text": str(weight)}]}
                data = json.dumps({"jsonrpc": "2.0", "id": body["id"], "result": result}).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # who asked was killed
                    self.wfile.write(data)

            def log_message(self, *_: object) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{server.server_address[1]}/mcp"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="tool")
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def twice(self) -> list[tuple[str, int]]:
        """(episode, turn) of calls that came more than once."""
        counted = Counter((one["episode"], one["turn"]) for one in self.asked)
        return sorted(call for call, count in counted.items() if count > 1)


def write_interpreter(path: Path) -> Path:
    """A `data.environment_python` whose environment worker is `plain_agent`. What it is asked to run stays in its arguments."""
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tests.system.plain_agent "$@"\n')
    path.chmod(0o755)
    return path


@dataclass(frozen=True)
class Environment:
    """What is played, on which model. `args`: of `data.environment_args`; `folder`: where its module is found."""

    model: Path
    name: str
    args: Mapping[str, Any]
    python: Path
    context_length: int
    folder: Path | None = None

    @property
    def env(self) -> dict[str, str]:
        """Of the training job."""
        found = [play.ROOT, *([self.folder] if self.folder is not None else [])]
        return {"PYTHONPATH": os.pathsep.join(map(str, found))}


def plain(model: Path, tool: ToolServer, folder: Path) -> Environment:
    """`plain_agent`, on the small model of the system tests."""
    python = write_interpreter(folder / "python-of-environments")
    return Environment(model, "plain", {"turns": TURNS, "tool": tool.url}, python, CONTEXT)


def write_run(site: DemoSite, environment: Environment, **overrides: Mapping[str, Any]) -> Path:
    """A run in the site's folder, as `play.write_run`: 2 tasks x 3 episodes of 3 turns, two environment workers."""
    document = play.run_document(site.state_dir, site.dir / "out", environment.model)
    del document["reward"]
    document["model"]["context_length"] = environment.context_length
    document["sampling"]["max_tokens"] = TOKENS
    document["data"] = {
        "environment": environment.name,
        "environment_args": environment.args,
        "renderer": {"name": "default"},
        "environment_python": environment.python,
        "environment_workers": 2,
        "prompts_per_step": 2,
        "samples_per_prompt": 3,
    }
    for section, keys in overrides.items():
        document.setdefault(section, {}).update(keys)
    tables = {name: document["data"].pop(name) for name in ("environment_args", "renderer")}
    path = site.dir / "run.toml"
    path.write_text(
        toml.dumps(document) + "".join(f"\n[data.{name}]\n{_lines(table)}" for name, table in tables.items())
    )
    return path


def _lines(table: Mapping[str, Any]) -> str:
    return "".join(f"{key} = {_inline(value)}\n" for key, value in table.items())


def _inline(value: Any) -> str:
    """TOML of one line; `toml.dumps` knows no tables in tables."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_inline(one)}" for key, one in value.items()) + " }"
    return json.dumps(value)


#: Turns of the episodes that steps took, with their tokens. `name`: PURPOSE-STEP.PROMPT.INDEX.LIFE.
_TURNS = """
SELECT e.name, u.number, s.sample_index, c.start_len, c.tokens
FROM samples s JOIN turns u ON u.group_id = s.group_id
JOIN episodes e ON e.episode_id = u.episode_id
JOIN chunks c ON c.sample_id = s.sample_id
WHERE s.state IN ('consumed', 'filtered') AND e.name LIKE 'train-%'
ORDER BY s.sample_id, c.start_len
"""


def place_of(episode: str) -> tuple[int, int, int]:
    """(step, prompt, index) of an episode's name, whichever its life."""
    step, prompt, index, _ = episode.partition("-")[2].split(".")
    return int(step), int(prompt), int(index)


def result_of(url: str) -> play.Result:
    """As `play.result_of`: tokens by (step, prompt, index, turn) of the episodes that were trained."""
    assert reports.check(url) == []
    return play.Result(tokens_of(url), play.steps_of(url))


def tokens_of(url: str) -> dict[tuple[int, ...], bytes]:
    """Of each episode that was trained, the tokens of its turns. Raises `AssertionError` where two lives of one were."""
    raw: dict[tuple[int, int, int], dict[int, bytes]] = {}
    lives: dict[tuple[int, int, int], str] = {}
    for name, number, sample_index, start, data in play.ask_ledger(url, _TURNS):
        place = place_of(name)
        assert lives.setdefault(place, name) == name, f"two lives of episode {place} were trained"
        assert sample_index == 0
        turns = raw.setdefault(place, {})
        assert len(turns.get(number, b"")) == 4 * start, f"turn {number} of {name} has a gap at {start}"
        turns[number] = turns.get(number, b"") + data
    return {
        (*place, turn): data
        for place, turns in raw.items()
        for turn, (_, data) in enumerate(sorted(turns.items()))
    }


def result(site: DemoSite) -> play.Result:
    assert play.over_capacity(site) == ""
    return result_of(site.ledger_url)


def undisturbed(environment: Environment, folder: Path, steps: int) -> play.Result:
    """As `play.undisturbed`, with episodes."""
    options = SiteOptions("local", folder, demo_layout(grace_s=1.0), poll_interval_s=0.2)
    with DemoSite(options) as site:
        run = write_run(site, environment, run={"harvest": False, "steps": steps}, engine={"max_batch": 16})
        play.finish(site, submit(site, run, environment), DEADLINE_S)
        return result(site)


def submit(site: DemoSite, run: Path, environment: Environment) -> int:
    """One rank: what a step adds up is the same with any number, and its processes start sooner."""
    return play.submit(site, run, 1, environment.env)
