"""An episode that has had its budget ends well: through the relay, before a real gateway and daemon with a scripted engine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest

from scavenger.gateway import identity
from tests.gateway.conftest import SECRET, LiveGateway, restarted_with, worker
from tests.gateway.conftest import live as live  # the fixture
from tests.trainer.episodes.test_builtin import config, ids
from tests.trainer.episodes.test_relay import Life, lived
from trainer.episodes import builtin, wire
from trainer.episodes.opening import setup_of
from trainer.episodes.relay import Relay, is_budget_spent
from trainer.episodes.stub import answer_of
from trainer.tasks import calculator, proposer_solver


def test_a_call_beyond_the_budget_is_refused_once_and_for_good_and_its_agent_is_ended_first(
    live: LiveGateway,
) -> None:
    async def agent(life: Life) -> tuple[httpx2.Response, list[str], list[tuple[str, int]]]:
        ended: list[str] = []
        life.relay.agent(life.playing, "a", stop=ended.append)
        first = await life.tokens(5, 6)
        await life.tokens(5, 6, *first, 7)
        assert not ended
        return await life.ask(9), ended, life.playing.taken()

    with restarted_with(live, budget_turns=2), worker(live.daemon):
        answer, ended, taken = lived(live, agent)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "budget_exceeded")
        assert "data.budget_turns = 2" in answer.json()["error"]["message"]
        assert ended == ["budget"]
        assert taken == [("0.0", 1), ("0.1", 1)]
        assert live.count("turns") == 2
        again, ended, _ = lived(live, agent)
        assert (again.status_code, ended) == (400, ["budget"]), "played again, it ends where it did"
        assert live.count("turns") == 2


def test_any_client_of_the_gateway_has_what_is_left_and_then_a_status_that_is_not_tried_again(
    live: LiveGateway,
) -> None:
    with restarted_with(live, budget_tokens=11), worker(live.daemon):
        whole, rest = (live.generate(request_id=name)["choices"][0] for name in "ab")
        assert (len(whole["token_ids"]), len(rest["token_ids"]), rest["finish_reason"]) == (8, 3, "length")
        body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 8}, "request_id": "c"}
        refused = live.post("/inference/v1/generate", body)
        assert is_budget_spent(refused.status_code, refused.text)
        assert live.generate(request_id="a")["choices"][0]["token_ids"] == whole["token_ids"]


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (200, "{}"),
        (400, "no JSON"),
        (400, "[]"),
        (400, '{"error": "x"}'),
        (400, '{"error": {"type": "invalid"}}'),
    ],
)
def test_no_other_answer_is_taken_for_it(status: int, text: str) -> None:
    assert not is_budget_spent(status, text)


def play(setup: wire.Setup) -> wire.Played:
    """One episode of a built-in environment, in this process."""

    async def run() -> wire.Played:
        relay = Relay(setup.endpoint, "r", 64)
        player = builtin.BuiltIn(setup, relay)
        async with relay.serving(), player.serving():
            playing = relay.begin("e", identity.episode_key(SECRET, "e"), "branch")
            return await player.play(wire.Play("e", playing.key, 0, 7, {"max_tokens": 8}), playing)

    return asyncio.run(run())


def test_a_built_in_environment_rewards_what_was_said_until_then(live: LiveGateway, tmp_path: Path) -> None:
    folder = tmp_path / "calculator"
    folder.mkdir()
    calculator.write_tokenizer(folder)
    with restarted_with(live, budget_turns=2), worker(live.daemon):
        played = play(setup_of(config(folder), str(live.http.base_url)))
    assert (played.error, played.reward, played.finish, played.stopped_by) == ("", 0.0, "length", "budget")
    assert played.calls == ("0.0", "0.1")
    assert sum(row.trained for row in played.branches) == 16


@contextmanager
def refusing_after(calls: int, tokens: list[int]) -> Iterator[str]:
    """A stand-in for gateway and model: it says `tokens` to so many calls, and refuses the next as the gateway does."""
    left = iter(range(calls))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            said: dict[str, Any] = answer_of(body, tokens)
            refused = next(left, None) is None
            sent = json.dumps({"error": {"type": "budget_exceeded"}} if refused else said).encode()
            self.send_response(400 if refused else 200)
            self.send_header("content-length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_agent_whose_turn_it_no_longer_is_has_no_part(tmp_path: Path) -> None:
    calculator.write_tokenizer(tmp_path)
    with refusing_after(1, ids("3", ended=False)) as endpoint:
        other = {proposer_solver.SOLVER: {"run": "s"}}
        played = play(
            setup_of(config(tmp_path, environment="builtin:proposer-solver", policies=other), endpoint)
        )
    assert (played.error, played.finish, played.stopped_by, played.others) == ("", "length", "budget", ())
    assert (played.calls, played.parts) == (("0.0",), {"reward_proposer": 0.0})


def test_an_episode_in_which_no_agent_of_the_run_had_a_turn_is_no_failure(tmp_path: Path) -> None:
    calculator.write_tokenizer(tmp_path)
    other = {proposer_solver.PROPOSER: {"run": "s"}}
    with refusing_after(1, ids("3", ended=False)) as endpoint:
        played = play(
            setup_of(config(tmp_path, environment="builtin:proposer-solver", policies=other), endpoint)
        )
    assert (played.error, played.branches, played.calls, played.stopped_by) == ("", (), (), "budget")
    [part] = played.others
    assert (part.run, part.reward, part.calls) == ("s", 0.0, ("0.0",))
