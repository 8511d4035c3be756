"""An agent's calls on a real site: engines and the daemon are killed under it, and it sees the answers of a run without that."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from typing import Any

import httpx2
import pytest

from scavenger import toml
from scavenger.cluster.layout import demo_layout
from scavenger.demo.site import DemoSite, SiteOptions
from scavenger.ledger.read import reports
from scavenger.protocol.messages import unpack_logprobs, unpack_tokens
from scavenger.weights.source import WeightServer
from tests.system import play, scripted

pytest.importorskip("starlette", reason="the extra `gateway`")
pytest.importorskip("uvicorn", reason="the extra `gateway`")
#: As in `test_faults`: silence is believed soon.
QUICK = {"heartbeat_s": 0.3, "suspect_s": 1.0, "dead_s": 2.5, "reconnect_s": 5.0}
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{{ '>' if m['role'] == 'user' else '<eos>' }}{% endfor %}"
)
TURNS, CHOICES, TOKENS = 8, 2, 16
EPISODE = "sorting-1"


@dataclass
class Agent:
    """An agent that knows a URL and a key."""

    http: httpx2.Client
    key: str

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx2.Response:
        return self.http.post(path, json=body, headers={"Authorization": f"Bearer {self.key}", **headers})

    def chat(self, said: list[dict[str, str]], **more: Any) -> dict[str, Any]:
        body = {
            "messages": said,
            "n": CHOICES,
            "max_tokens": TOKENS,
            "logprobs": True,
            "return_token_ids": True,
        }
        answer = self.post("/v1/chat/completions", body | more)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def streamed(self, said: list[dict[str, str]], seen: threading.Event) -> dict[int, list[int]]:
        """Token ids of each choice, as they come; `seen` is set at the first."""
        body = {
            "messages": said,
            "n": CHOICES,
            "max_tokens": TOKENS,
            "logprobs": True,
            "return_token_ids": True,
        }
        headers = {"Authorization": f"Bearer {self.key}"}
        found: dict[int, list[int]] = {}
        with self.http.stream(
            "POST", "/v1/chat/completions", json=body | {"stream": True}, headers=headers
        ) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                part = json.loads(line[6:])
                assert "error" not in part, part
                for choice in part["choices"]:
                    tokens = found.setdefault(choice["index"], [])
                    tokens += choice.get("token_ids", [])
                    if tokens:
                        seen.set()
        return found


@contextlib.contextmanager
def gateway(run_toml: Path) -> Iterator[dict[str, str]]:
    """A gateway of the run in a process of its own; gives what it announces."""
    announced = run_toml.parent / "out" / run_toml.stem / "gateway.json"
    announced.unlink(missing_ok=True)
    log = run_toml.parent / f"gateway-{run_toml.stem}.log"
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "scavenger", "gateway", str(run_toml)],
            stdout=file,
            stderr=file,
            env={**os.environ, "PYTHONPATH": str(play.ROOT)},
        )
    try:

        def there() -> bool:
            assert process.poll() is None, log.read_text()
            return announced.exists()

        play.wait_for("the gateway", there)
        yield json.loads(announced.read_text())
    finally:
        process.terminate()
        assert process.wait(20) in (0, -signal.SIGTERM), log.read_text()


@contextlib.contextmanager
def agent_of(gateway: dict[str, str], episode: str = EPISODE) -> Iterator[Agent]:
    with httpx2.Client(base_url=gateway["endpoint"], timeout=play.DEADLINE_S) as http:
        asked = http.post(
            "/episodes",
            json={"episode": episode},
            headers={"Authorization": f"Bearer {gateway['admin_key']}"},
        )
        assert asked.status_code == 200, asked.text
        yield Agent(http, asked.json()["api_key"])


def write_run(site: DemoSite, model: Path, name: str) -> Path:
    document = play.run_document(
        site.state_dir,
        site.dir / "out" / name,
        model,
        run={"name": name},
        engine={"max_batch": 1, "pace": 6.0},
    )
    document["model"]["context_length"] = 512
    path = site.dir / f"{name}.toml"
    path.write_text(toml.dumps(document))
    return path


def question(number: int) -> dict[str, str]:
    return {"role": "user", "content": f"{7 * number + 3:03d}{number}51"}


def answer_of(reply: dict[str, Any]) -> list[tuple[list[int], str, list[float]]]:
    """Tokens, end and logprobs of each choice."""
    return [
        (c["token_ids"], c["finish_reason"], [one["logprob"] for one in c["logprobs"]["content"]])
        for c in reply["choices"]
    ]


def conversation(agent: Agent, faults: dict[int, Any]) -> tuple[list[Any], list[dict[str, str]]]:
    """Eight turns; `faults`: what is done while a turn is streamed."""
    said: list[dict[str, str]] = []
    answers = []
    for number in range(TURNS):
        said.append(question(number))
        streamed: dict[int, list[int]] = {}
        if number in faults:
            seen = threading.Event()
            reader = threading.Thread(target=lambda: streamed.update(agent.streamed(said, seen)))  # noqa: B023
            reader.start()
            assert seen.wait(play.DEADLINE_S), "no token came"
            faults[number]()
            reader.join(play.DEADLINE_S)
            assert not reader.is_alive(), "the stream did not go on"
        reply = agent.chat(said)
        if streamed:
            assert streamed == {c["index"]: c["token_ids"] for c in reply["choices"]}
        answers.append((reply["prompt_token_ids"], answer_of(reply)))
        said.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
    return answers, said


def kill_an_engine(site: DemoSite) -> None:
    [(_, job, _), *_] = play.wait_for("an engine in the middle of a sample", lambda: play.busy(site))
    os.kill(play.engine_pid(site, job), signal.SIGKILL)


def replace_the_daemon(site: DemoSite) -> None:
    play.kill_daemon(site)
    site.start_daemon()


def tokens_in_ledger(site: DemoSite) -> int:
    return int(play.ask(site, "SELECT coalesce(sum(n_tokens), 0) FROM chunks")[0][0])


@pytest.mark.timeout(480)
def test_an_agent_sees_no_killed_engine_and_no_killed_daemon_and_nothing_is_generated_twice(
    tmp_path: Path, small_model: Path
) -> None:
    model = copytree(small_model, tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    options = SiteOptions(
        "local",
        tmp_path,
        demo_layout(grace_s=1.0, requeue_delay_s=0.5),
        poll_interval_s=0.2,
        max_engines=2,
        daemon=QUICK,
    )
    found = {}
    with DemoSite(options) as site, WeightServer() as source:
        for name, faults in (
            ("undisturbed", {}),
            ("killed", {2: lambda: kill_an_engine(site), 5: lambda: replace_the_daemon(site)}),
        ):
            run_toml = write_run(site, model, name)
            with (
                scripted.opened(run_toml) as run,
                gateway(run_toml) as announced,
                agent_of(announced) as agent,
            ):
                scripted.publish(run, source, model, 0)
                found[name], said = conversation(agent, faults)
                before = tokens_in_ledger(site)
                again = agent.chat(said[:-1])
                assert answer_of(again) == found[name][-1][1], "the same request, answered from the ledger"
                assert tokens_in_ledger(site) == before
                with gateway(run_toml) as second, agent_of(second) as there:  # one that knows nothing of it
                    assert answer_of(there.chat(said[:-1])) == found[name][-1][1]
                    assert tokens_in_ledger(site) == before
                assert _ledger_has(site, name) == [answers for _, answers in found[name]]
                run.close_run("finished")
        assert found["killed"] == found["undisturbed"]
        lost = "SELECT count(*) FROM workers WHERE notice = 0 AND samples > 0"
        assert play.ask(site, lost)[0][0] >= 1, "no engine died with a sample"
        assert reports.check(site.ledger_url) == []


def _ledger_has(site: DemoSite, run: str) -> list[list[tuple[list[int], str, list[float]]]]:
    """What the ledger has of the episode, turn by turn: tokens, end, raw logprobs of each sample."""
    rows = play.ask(
        site,
        "SELECT u.number, s.sample_index, s.finish, c.tokens, c.raw_logprobs FROM turns u "
        "JOIN episodes e ON e.episode_id = u.episode_id JOIN runs r ON r.run_id = e.run_id "
        "JOIN samples s ON s.group_id = u.group_id JOIN chunks c ON c.sample_id = s.sample_id "
        f"WHERE r.name = '{run}' AND e.name = '{EPISODE}' ORDER BY u.number, s.sample_index, c.start_len",
    )
    made: dict[tuple[int, int], tuple[list[int], str, list[float]]] = {}
    for number, index, finish, tokens, logprobs in rows:
        entry = made.setdefault((number, index), ([], finish, []))
        entry[0].extend(unpack_tokens(tokens))
        entry[2].extend(unpack_logprobs(logprobs))
    return [[made[number, index] for index in range(CHOICES)] for number in range(1, TURNS + 1)]
