"""The endpoint before a real daemon: who gets in, what is answered twice, what a flood and a restart of the daemon do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from scavenger.asyncio_helpers import listening_socket
from scavenger.client import Client
from scavenger.config import AgentPolicy
from scavenger.gateway import app, dialects, identity
from tests.gateway.conftest import SECRET, LiveGateway, restarted_with, served, worker, write_model
from tests.router.harness import SPEC, token
from tests.router.test_edge import config_of, eventually, publish

ADMIN = {"Authorization": f"Bearer {identity.admin_key(SECRET)}"}
BODY = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 8, "logprobs": 1}}


def events(live: LiveGateway, path: str, body: dict[str, Any], episode: str = "e") -> list[dict[str, Any]]:
    """The events of a streamed answer; the last is [DONE]."""
    with live.http.stream("POST", path, json=body | {"stream": True}, headers=live.key(episode)) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


# ---------------------------------------------------------------- vLLM's endpoint


def test_generate_answers_in_vllm_s_shape(live: LiveGateway) -> None:
    with worker(live.daemon):
        answer = live.generate(n=2, request_id="mine")
    samples = [
        int(str(row[0])) for row in live.daemon.query("SELECT sample_id FROM samples ORDER BY sample_id")
    ]
    for choice, sample_id in zip(answer["choices"], samples, strict=True):
        assert choice["token_ids"] == [token(sample_id, i) for i in range(8)]
        assert choice["finish_reason"] == "length"
        assert choice["weight_versions"] == [{"version": "1", "start": 0, "end": 8}]
        logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
        assert logprobs == [-0.25 - t for t in choice["token_ids"]], "the raw model's, as vLLM's are"
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 16, "total_tokens": 19}
    assert answer["request_id"] == "mine"
    protocol = pytest.importorskip("vllm.entrypoints.scale_out.token_in_token_out.protocol")
    read = protocol.GenerateTokensResponse.model_validate(answer)
    assert read.choices[0].logprobs.content[0].token_id == answer["choices"][0]["token_ids"][0]


def test_a_streamed_answer_adds_up_to_the_whole_one_and_is_the_same_turn(live: LiveGateway) -> None:
    with worker(live.daemon):
        parts = events(live, "/inference/v1/generate", BODY | {"return_token_ids": True})
        whole = live.generate()
    tokens = [t for part in parts for choice in part["choices"] for t in choice["token_ids"]]
    assert tokens == whole["choices"][0]["token_ids"]
    assert [p["prompt_token_ids"] for p in parts][:1] == [[5, 6, 7]]
    assert [c["finish_reason"] for p in parts for c in p["choices"]][-1] == "length"
    assert (live.count("turns"), live.count("samples")) == (1, 1)


def test_openai_s_own_client_works_by_base_url(live: LiveGateway) -> None:
    openai = pytest.importorskip("openai")
    key = identity.episode_key(SECRET, "e")
    with (
        worker(live.daemon),
        openai.OpenAI(base_url=f"{str(live.http.base_url).rstrip(chr(47))}/v1", api_key=key) as client,
    ):
        said = [{"role": "user", "content": "hi"}]
        whole = client.chat.completions.create(model="r", messages=said, max_tokens=6, n=2, logprobs=True)
        parts = list(
            client.chat.completions.create(
                model="r", messages=said, max_tokens=6, n=2, logprobs=True, stream=True
            )
        )
    streamed = {0: "", 1: ""}
    for part in parts:
        for choice in part.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == {c.index: c.message.content for c in whole.choices}
    assert len(whole.choices[0].logprobs.content) == 6
    assert live.count("turns") == 1


# ---------------------------------------------------------------- once


def test_a_request_that_is_asked_many_times_at_once_is_generated_once(live: LiveGateway) -> None:
    answers: list[dict[str, Any]] = []
    asking = [threading.Thread(target=lambda: answers.append(live.generate())) for _ in range(8)]
    for one in asking:
        one.start()
    eventually(lambda: live.count("turns"))
    with worker(live.daemon):
        for one in asking:
            one.join(60)
    assert len(answers) == 8
    assert len({json.dumps(a["choices"]) for a in answers}) == 1
    assert (live.count("turns"), live.count("samples")) == (1, 1)


def test_names_tell_equal_requests_apart_and_a_name_that_is_used_twice_is_refused(live: LiveGateway) -> None:
    with worker(live.daemon):
        live.generate(request_id="a")
        live.generate(request_id="b")
        again = live.post("/inference/v1/generate", BODY, **{"X-Request-Id": "a"})
        other = live.post("/inference/v1/generate", BODY | {"token_ids": [1]}, **{"Idempotency-Key": "a"})
        live.generate(seed=1)
    assert again.status_code == 200
    assert other.status_code == 409
    assert live.count("turns") == 3


def test_a_caller_that_hangs_up_finds_its_turn_again(live: LiveGateway) -> None:
    with worker(live.daemon, pace=0.05):
        with live.http.stream(
            "POST", "/inference/v1/generate", json=BODY | {"stream": True}, headers=live.key("e")
        ) as answer:
            next(answer.iter_lines())
        eventually(lambda: not live.gateway.calls)
        assert not live.gateway.link.open_turns
        assert len(live.generate()["choices"][0]["token_ids"]) == 8
    assert live.count("turns") == 1


def test_a_daemon_that_is_killed_in_the_middle_only_takes_time(live: LiveGateway) -> None:
    with worker(live.daemon, pace=0.2):
        found: list[Any] = []
        asking = threading.Thread(target=lambda: found.append(events(live, "/inference/v1/generate", BODY)))
        asking.start()
        eventually(lambda: live.count("chunks"))
        live.daemon.kill()
        live.daemon.start()
        asking.join(60)
    [parts] = found
    tokens = [t for part in parts for choice in part["choices"] for t in choice["token_ids"]]
    assert tokens == [token(1, i) for i in range(8)]
    assert live.count("turns") == 1


def test_an_episode_of_a_run_that_was_closed_stays_over_when_the_run_opens_again(live: LiveGateway) -> None:
    with worker(live.daemon):
        live.generate()
    live.run.close_run("failed", "its trainer ended")
    live.daemon.kill()
    live.daemon.start()
    with restarted_with(live), worker(live.daemon, "w2"):
        assert live.post("/inference/v1/generate", BODY).status_code == 410
        live.generate("another")
    assert live.daemon.query("SELECT name, state FROM episodes ORDER BY episode_id") == [
        ("e", "stopped"),
        ("another", "open"),
    ]


def test_a_gateway_that_begins_anew_answers_from_the_ledger(live: LiveGateway, tmp_path: Path) -> None:
    with worker(live.daemon):
        before = live.generate()
    with served(live.daemon, live.run, write_model(tmp_path / "model")) as second:
        assert second.generate()["choices"] == before["choices"]
    assert live.count("turns") == 1


def test_the_end_of_an_answer_waits_for_the_disk(live: LiveGateway) -> None:
    with worker(live.daemon):
        live.generate(request_id="warm")
        answered = threading.Event()
        held = live.daemon.server.committed
        waiting: list[int] = []
        live.daemon.server.committed = waiting.append  # type: ignore[method-assign, assignment]
        asking = threading.Thread(target=lambda: (live.generate(), answered.set()))
        asking.start()
        eventually(lambda: waiting)
        assert not answered.wait(1.0), "answered before its commit was known"
        live.daemon.server.committed = held  # type: ignore[method-assign]
        live.daemon.loop.call_soon_threadsafe(lambda: held(max(waiting)))
        asking.join(60)
        assert answered.is_set()


# ---------------------------------------------------------------- keys and bounds


def test_an_episode_s_key_reaches_its_episode_only(
    live: LiveGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scavenger.gateway.app.REFUSED_S", 0.0)
    made = live.http.post("/episodes", json={"episode": "mine"}, headers=ADMIN)
    assert made.json() == {"episode": "mine", "api_key": identity.episode_key(SECRET, "mine")}
    forged = [
        "-",
        identity.admin_key(SECRET),
        identity.episode_key(b"t" * 32, "e"),
        identity.episode_key(SECRET, "e").replace("ep.e.", "ep.f."),
        "ep..",
        "ep.e.",
        "é" * 9000,
    ]
    for key in forged:
        headers = {b"Authorization": f"Bearer {key}".encode()}
        for path in ("/inference/v1/generate", "/v1/chat/completions"):
            assert live.http.post(path, json=BODY, headers=headers).status_code == 401, key[:80]
        assert live.http.get("/v1/models", headers=headers).status_code == 401
    for path in ("/episodes", "/episodes/e"):
        method = "POST" if path == "/episodes" else "DELETE"
        for key in ("-", identity.episode_key(SECRET, "other")):
            answer = live.http.request(method, path, headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == 401
    assert live.count("turns") == 0


def test_one_episode_s_answers_are_not_another_s(live: LiveGateway) -> None:
    with worker(live.daemon):
        mine, theirs = live.generate("mine", request_id="a"), live.generate("theirs", request_id="a")
    assert mine["choices"] != theirs["choices"]
    assert live.count("episodes") == 2


def test_an_ended_episode_takes_no_request(live: LiveGateway) -> None:
    with worker(live.daemon):
        live.generate()
        assert live.http.delete("/episodes/e", headers=live.key("e")).status_code == 200
        assert live.post("/inference/v1/generate", BODY).status_code == 410
    assert live.daemon.query("SELECT state FROM episodes") == [("ended",)]


def test_a_flood_is_refused_alone(live: LiveGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scavenger.gateway.app.MAX_EPISODE_CALLS", 2)
    asking = [
        threading.Thread(target=lambda i=i: live.generate("flood", request_id=str(i))) for i in range(2)
    ]
    for one in asking:
        one.start()
    eventually(lambda: live.gateway.calls.get("flood") == 2)
    refused = live.post("/inference/v1/generate", BODY, "flood")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    with worker(live.daemon):
        live.generate("calm")
        for one in asking:
            one.join(60)
    eventually(lambda: not live.gateway.calls)


def test_a_body_beyond_the_bound_is_not_read(live: LiveGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scavenger.gateway.app.MAX_BODY_BYTES", 1000)
    answer = live.post("/inference/v1/generate", {"token_ids": [1] * 1000})
    assert answer.status_code == 413
    for data in (b"", b"[]", b"{", b"\xff", b"[" * 900):
        answer = live.http.post("/inference/v1/generate", content=data, headers=live.key("e"))
        assert answer.status_code == 400, data
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_flood_is_refused_before_its_bodies_are_read(
    live: LiveGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scavenger.gateway.app.MAX_EPISODE_CALLS", 1)
    monkeypatch.setattr("scavenger.gateway.app.BODY_S", 1.0)
    key, url = identity.episode_key(SECRET, "slow"), live.http.base_url
    with socket.create_connection((url.host, url.port), 30) as slow:
        slow.sendall(
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {key}\r\n"
            "Content-Length: 100\r\n\r\n{".encode()
        )
        eventually(lambda: live.gateway.calls.get("slow") == 1)
        assert live.post("/v1/chat/completions", {"not": "parsed"}, "slow").status_code == 429
        assert slow.recv(4096).startswith(b"HTTP/1.1 408")
    eventually(lambda: not live.gateway.calls)


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1%s}' % (b"0" * 400),
        b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "%s"}}]}]}'
        % (b"[" * 100_000),
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    ],
)
def test_json_that_cannot_be_served_is_the_caller_s_error(live: LiveGateway, body: bytes) -> None:
    answer = live.http.post("/v1/chat/completions", content=body, headers=live.key("e"))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_fault_of_the_gateway_has_openai_s_shape(
    live: LiveGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live.gateway.conversations, "prompt", lambda *_: 1 / 0)
    answer = live.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert not live.gateway.calls


def test_a_prompt_that_fills_the_context_is_refused(live: LiveGateway) -> None:
    body: dict[str, Any] = {"token_ids": [1] * 64, "sampling_params": {}}
    assert live.post("/inference/v1/generate", body).status_code == 400
    body = {"token_ids": [1] * 60, "sampling_params": {"max_tokens": 5}}
    assert live.post("/inference/v1/generate", body).status_code == 400


def test_health_and_models(live: LiveGateway) -> None:
    eventually(lambda: live.http.get("/health").status_code == 200)
    [card] = live.http.get("/v1/models", headers=live.key("e")).json()["data"]
    assert (card["id"], card["max_model_len"]) == ("r", 64)


def test_a_refusal_by_the_daemon_has_its_status(live: LiveGateway) -> None:
    live.run.close_run("finished")
    answer = live.post("/inference/v1/generate", BODY)
    assert answer.status_code == 400
    assert "the run has ended" in answer.json()["error"]["message"]


# ---------------------------------------------------------------- callers that leave, dawdle or flood


def test_a_caller_that_leaves_a_whole_answer_gives_its_place_back(
    live: LiveGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No engine is there yet: a caller with a short patience asks again and again, and is never its own flood."""
    monkeypatch.setattr("scavenger.gateway.app.MAX_EPISODE_CALLS", 2)
    for path, body in (
        ("/inference/v1/generate", BODY),
        ("/inference/v1/generate", BODY | {"stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        for _ in range(4):
            with (
                httpx2.Client(base_url=live.http.base_url, timeout=0.3) as hasty,
                pytest.raises(httpx2.TimeoutException),
            ):
                hasty.post(path, json=body, headers=live.key("e"))
            eventually(lambda: not live.gateway.calls)
    assert not live.gateway.link.open_turns
    assert not live.gateway.bodies
    with worker(live.daemon):
        assert len(live.generate()["choices"][0]["token_ids"]) == 8
    assert live.count("turns") == 2


def test_an_unknown_path_and_method_are_told_in_openai_s_shape(live: LiveGateway) -> None:
    for method, path, status in (("POST", "/v1/responses", 404), ("GET", "/v1/chat/completions", 405)):
        answer = live.http.request(method, path, headers=live.key("e"))
        assert answer.status_code == status
        error = answer.json()["error"]
        assert (error["type"], error["code"], path in error["message"]) == (
            "invalid_request_error",
            status,
            True,
        )


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nX-"])
def test_headers_that_do_not_come_cost_a_connection_for_a_while_only(
    live: LiveGateway, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr("scavenger.gateway.app.HEADERS_S", 0.5)
    url = live.http.base_url
    with socket.create_connection((url.host, url.port), 30) as slow:
        slow.sendall(sent)
        assert slow.recv(4096) == b"", "closed"


def test_a_connection_that_waits_for_its_answer_is_left_alone(
    live: LiveGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scavenger.gateway.app.HEADERS_S", 0.2)
    found: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: found.append(live.generate()))
    asking.start()
    time.sleep(1.0)
    with worker(live.daemon):
        asking.join(60)
    assert len(found) == 1


def test_headers_are_bounded(live: LiveGateway) -> None:
    from scavenger.gateway.app import MAX_HEADER_BYTES

    url = live.http.base_url
    with socket.create_connection((url.host, url.port), 30) as flood:
        flood.sendall(b"GET /health HTTP/1.1\r\nHost: h\r\nX-Long: " + b"a" * (MAX_HEADER_BYTES + 1))
        assert flood.recv(4096).startswith(b"HTTP/1.1 400")


def test_bodies_are_bounded_by_the_context(live: LiveGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scavenger.gateway.app.LEAST_BODY_BYTES", 100)
    monkeypatch.setattr("scavenger.gateway.app.BODY_BYTES_A_TOKEN", 4)
    assert live.gateway.max_body == 4 * 64
    assert live.post("/inference/v1/generate", {"token_ids": [1] * 200}).status_code == 413


def test_the_bodies_of_one_episode_are_bounded_together(
    live: LiveGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scavenger.gateway.app.LEAST_BODY_BYTES", 100)
    monkeypatch.setattr("scavenger.gateway.app.BODY_BYTES_A_TOKEN", 2)
    monkeypatch.setattr("scavenger.gateway.app.MAX_EPISODE_BODIES", 1)
    assert live.gateway.max_body == 128
    asking = threading.Thread(target=lambda: live.generate("big", request_id="a"))
    asking.start()
    eventually(lambda: live.gateway.bodies.get("big"))
    refused = live.post("/inference/v1/generate", BODY | {"request_id": "b"}, "big")
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
    with worker(live.daemon):
        live.generate("small", request_id="c")
        asking.join(60)
    eventually(lambda: not live.gateway.bodies)


def test_of_one_episode_s_requests_one_at_a_time_is_rendered(
    live: LiveGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rendering has a few threads for everybody: one episode takes one of them."""
    now, most, honest = [0], [0], live.gateway.conversations.prompt

    def slow(episode: str, chat: Any) -> list[int]:
        if episode == "flood":
            now[0] += 1
            most[0] = max(most[0], now[0])
            time.sleep(0.1)
            now[0] -= 1
        return list(honest(episode, chat))

    monkeypatch.setattr(live.gateway.conversations, "prompt", slow)

    def ask(episode: str, number: int) -> None:
        body = {"messages": [{"role": "user", "content": str(number)}], "max_tokens": 2}
        with httpx2.Client(base_url=live.http.base_url, timeout=60) as client:
            assert (
                client.post("/v1/chat/completions", json=body, headers=live.key(episode)).status_code == 200
            )

    with worker(live.daemon):
        asking = [threading.Thread(target=ask, args=("flood", i)) for i in range(10)]
        for one in asking:
            one.start()
        ask("calm", 1)
        for one in asking:
            one.join(60)
    assert most == [1]
    eventually(lambda: not live.gateway.calls)
    assert not live.gateway.turnstiles


def test_a_costly_caller_rests(live: LiveGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    from scavenger.gateway.app import REST_FROM_S, Caller

    monkeypatch.setattr("scavenger.gateway.app.REST", 1.0)
    gateway = live.gateway

    async def seconds(cost: float) -> float:
        """From one piece of a caller's work to its next, which is of another call: it rests between its calls too."""
        caller = Caller(f"{cost:g}", False)
        with gateway.counted(caller):
            async with gateway.in_turn(caller) as work:
                work.cost = cost
        began = time.monotonic()
        with gateway.counted(caller):
            async with gateway.in_turn(caller):
                return time.monotonic() - began

    async def all_three() -> list[float]:
        return await asyncio.gather(*(seconds(cost) for cost in (REST_FROM_S, 1.0, 2.0)))

    cheap, costly, costlier = asyncio.run(all_three())
    assert cheap < 0.9 < costly < 1.9 < costlier
    assert not gateway.calls


def test_a_large_body_is_parsed_beside_the_loop(live: LiveGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, where = dialects.parse_chat, []

    def parsed(*given: Any) -> Any:
        where.append(threading.current_thread().name)
        return honest(*given)

    monkeypatch.setattr(dialects, "parse_chat", parsed)
    for nbytes in (10, 40_000):
        body = {"messages": [{"role": "user", "content": "a" * nbytes}], "n": 0}
        assert live.post("/v1/chat/completions", body).status_code == 400
    assert where[0] == "gateway"
    assert where[1] != "gateway"


def test_a_large_answer_of_a_tool_is_checked_beside_the_loop(
    live: LiveGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, where = app._check_answer, []

    def checked(data: bytes) -> None:
        where.append(threading.current_thread().name)
        honest(data)

    monkeypatch.setattr(app, "_check_answer", checked)
    for content in (b"{", b"[" * 40_000):
        path = "/episodes/e/tools/a/answer"
        assert live.http.put(path, content=content, headers=live.key("e")).status_code == 400
    assert where[0] == "gateway"
    assert where[1] != "gateway"


def test_of_one_episode_s_large_bodies_a_few_are_read_at_a_time(
    live: LiveGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others stay in their connections: they take no memory, and no time of the loop, and none is refused for the sum of them."""
    honest, go, at_once, statuses = dialects.parse_chat, threading.Event(), [0], []

    class Watched(dict[str, int]):
        def __setitem__(self, label: str, nbytes: int) -> None:
            at_once.append(nbytes)
            super().__setitem__(label, nbytes)

    def parsed(*given: Any) -> Any:
        go.wait(60)
        return honest(*given)

    monkeypatch.setattr(dialects, "parse_chat", parsed)
    live.gateway.bodies = Watched()
    content = b'{"n":0,"messages":[{"role":"user","content":"%s"}]}' % (b"a" * 900_000)

    def ask() -> None:
        with httpx2.Client(base_url=live.http.base_url, timeout=60) as client:
            answer = client.post("/v1/chat/completions", content=content, headers=live.key("flood"))
            statuses.append(answer.status_code)

    asking = [threading.Thread(target=ask) for _ in range(16)]
    for one in asking:
        one.start()
    eventually(lambda: live.gateway.calls.get("flood") == 16)
    eventually(lambda: live.gateway.bodies.get("flood", 0) >= app.MAX_LARGE_BODIES * len(content))
    with worker(live.daemon):
        live.generate("calm")
    go.set()
    for one in asking:
        one.join(60)
    assert statuses == [400] * 16
    assert max(at_once) <= app.MAX_LARGE_BODIES * len(content)
    eventually(lambda: not live.gateway.calls)
    assert not live.gateway.large
    assert not live.gateway.bodies


def test_a_body_that_comes_slowly_holds_up_no_small_one(live: LiveGateway) -> None:
    address = live.http.base_url.host, live.http.base_url.port
    key = live.key("e")["Authorization"]
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: {key}\r\n"
    declared, chunked = b"Content-Length: 100000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n186a0\r\n"
    with contextlib.ExitStack() as leaving, worker(live.daemon):
        for number in range(app.MAX_LARGE_BODIES):
            slow = leaving.enter_context(socket.create_connection(address))
            slow.sendall(head.encode() + (chunked if number else declared) + b" " * 50_000)
        eventually(lambda: "e" in live.gateway.large and live.gateway.large["e"].locked())
        live.generate()
    eventually(lambda: not live.gateway.large)


@pytest.mark.parametrize(
    ("part", "refused"),
    [
        (b"[]", "65,536 lists and objects"),
        (b'{"a":"[]"}', "65,536 lists and objects"),
        (b'"[\\""', "values"),
        (b"7", "values"),
        (b'"' + b'[{\\"\\\\,' * 110_000 + b'"', ""),
    ],
)
def test_a_body_that_would_hold_the_interpreter_is_refused_before_it_is_parsed(
    live: LiveGateway, monkeypatch: pytest.MonkeyPatch, part: bytes, refused: str
) -> None:
    count = max(1, 900_000 // (len(part) + 1))
    content = b'{"n":0,"token_ids":[1],"a":[' + b",".join([part] * count) + b"]}"
    parsed: list[int] = []
    honest = app._parsed
    monkeypatch.setattr(app, "_parsed", lambda data: parsed.append(len(data)) or honest(data))
    answer = live.http.post("/inference/v1/generate", content=content, headers=live.key("e"))
    assert answer.status_code == 400
    assert bool(parsed) == (not refused)
    if refused:
        assert refused in answer.json()["error"]["message"]


def test_a_large_table_is_an_answer_of_a_tool() -> None:
    app._check_answer(b"[" + b",".join([b"[1,2]"] * 170_000) + b"]")
    for cut in (b"[" + b"[]," * 170_000, b'["\xff",' + b",".join([b"[]"] * 170_000) + b"]"):
        with pytest.raises(dialects.BadRequest):
            app._check_answer(cut)


def test_an_answer_s_body_does_not_wait_for_the_receipt_of_its_headers() -> None:
    """That wait is 40 ms, in each answer on a connection that is kept."""

    async def delays() -> int:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def took(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with listening_socket("127.0.0.1", 0) as listening:
            async with await asyncio.start_server(took, sock=listening):
                _, writer = await asyncio.open_connection(*listening.getsockname())
                found = await asyncio.wait_for(accepted, 30)
                writer.close()
                return found

    assert asyncio.run(delays())


def test_who_has_no_key_waits_for_that_word(live: LiveGateway) -> None:
    from scavenger.gateway.app import REFUSED_S

    began = time.monotonic()
    assert live.http.get("/v1/models").status_code == 401
    assert time.monotonic() - began >= REFUSED_S


def test_a_gateway_that_ends_in_mid_stream_costs_a_retry(live: LiveGateway, tmp_path: Path) -> None:
    with worker(live.daemon, pace=0.2):
        leaving = contextlib.ExitStack()
        first = leaving.enter_context(served(live.daemon, live.run, write_model(tmp_path / "model")))
        with (
            httpx2.Client(base_url=first.http.base_url, timeout=60) as client,
            client.stream(
                "POST", "/inference/v1/generate", json=BODY | {"stream": True}, headers=live.key("e")
            ) as answer,
        ):
            lines = answer.iter_lines()
            begun = json.loads(next(line for line in lines if line).removeprefix("data: "))
            tokens = begun["choices"][0]["token_ids"]
            leaving.close()
        again = live.generate()
    assert 0 < len(tokens) < 8
    assert again["choices"][0]["token_ids"][: len(tokens)] == tokens
    assert (live.count("turns"), live.count("samples")) == (1, 1)


# ---------------------------------------------------------------- conversations


def test_a_conversation_goes_on_from_the_tokens_of_its_answers(live: LiveGateway) -> None:
    ask = {"max_tokens": 5, "return_token_ids": True}
    said: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
    with worker(live.daemon):
        first = live.post("/v1/chat/completions", ask | {"messages": said}).json()
        [choice] = first["choices"]
        said += [choice["message"], {"role": "user", "content": "b"}]
        second = live.post("/v1/chat/completions", ask | {"messages": said}).json()
        known = first["prompt_token_ids"] + choice["token_ids"]
        rewritten = [said[0], {"role": "assistant", "content": "?"}, said[2]]
        branch = live.post("/v1/chat/completions", ask | {"messages": rewritten}).json()
    assert second["prompt_token_ids"][: len(known)] == known
    assert branch["prompt_token_ids"][: len(known)] != known
    conversations = live.gateway.conversations
    assert (conversations.continued, conversations.rendered) == (1, 2)


def test_an_idle_caller_costs_the_daemon_no_slot(live: LiveGateway) -> None:
    """Between its turns an episode holds no lease."""
    with worker(live.daemon) as one:
        live.generate(request_id="a")
        eventually(lambda: not one.leases)
        core = live.daemon.server.router.core
        assert not core.runs["r"].turns.open
        assert not core.runs["r"].leased


def test_two_gateways_follow_one_turn(live: LiveGateway, tmp_path: Path) -> None:
    with served(live.daemon, live.run, write_model(tmp_path / "model")) as second:
        answers: list[Any] = []
        asking = [threading.Thread(target=lambda g=g: answers.append(g.generate())) for g in (live, second)]
        for one in asking:
            one.start()
        eventually(lambda: all(one.gateway.link.open_turns for one in (live, second)))  # both have asked
        with worker(live.daemon):
            for one in asking:
                one.join(60)
    assert answers[0]["choices"] == answers[1]["choices"]
    assert live.count("turns") == 1


def test_a_request_before_the_daemon_is_there_waits_for_it(live: LiveGateway) -> None:
    with worker(live.daemon) as one:
        eventually(lambda: one.loaded == 1)
        live.daemon.kill()
        found: list[httpx2.Response] = []
        asking = threading.Thread(target=lambda: found.append(live.post("/inference/v1/generate", BODY)))
        asking.start()
        eventually(lambda: live.gateway.link.open_turns)
        live.daemon.start()
        asking.join(60)
    assert found[0].status_code == 200


# ---------------------------------------------------------------- another run answers for an agent


def test_an_agent_is_answered_by_the_run_that_is_named_and_by_no_run_that_is_not(live: LiveGateway) -> None:
    """One daemon, one owner, and a second run that takes this one's episodes."""
    daemon = live.daemon
    config = config_of(daemon.state_dir)
    section = config.run.model_copy(update={"name": "s"})
    other = config.model_copy(
        update={"run": section, "data": config.data.model_copy(update={"episodes_of": "r"})}
    )
    mine = config.model_copy(
        update={"data": config.data.model_copy(update={"policies": {"solver": AgentPolicy(run="s")}})}
    )
    with Client.connect(daemon.state_dir) as client, Client.connect(daemon.state_dir) as again:
        run = client.open_run(other, engine=SPEC, tokenizer="", resume_step=0)
        publish(run, 1)
        publish(again.open_run(mine, engine=SPEC, tokenizer="", resume_step=0), 1)
        live.gateway.policies = frozenset({"s", "t"})
        with worker(daemon, "of-s", run="s"), worker(daemon, "of-r"):
            answers = [
                live.post("/inference/v1/generate", BODY, **headers).status_code
                for headers in ({}, {"X-Scavenger-Policy": "s"}, {"X-Scavenger-Policy": "s"})
            ]
        assert answers == [200, 200, 200]
        named = "SELECT r.name FROM turns t JOIN runs r ON r.run_id = t.run_id ORDER BY t.group_id"
        assert daemon.query(named) == [("r",), ("s",)], "each is generated once, by its own run"
        absent = live.post("/inference/v1/generate", BODY, **{"X-Scavenger-Policy": "t"})
        assert (absent.status_code, "'t'" in absent.text) == (400, True)
        unnamed = live.post("/inference/v1/generate", BODY, **{"X-Scavenger-Policy": "x"})
        assert (unnamed.status_code, "data.policies names: s, t" in unnamed.text) == (403, True)
