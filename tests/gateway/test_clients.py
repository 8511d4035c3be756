"""A program with one key: `/v1/completions`, keys in a URL, and the episodes that its calls become turns of."""

from __future__ import annotations

import base64
import threading
from typing import Any

import httpx2
import pytest

from scavenger.gateway import dialects, identity, series
from scavenger.gateway.dialects import BadRequest
from scavenger.gateway.series import Series
from scavenger.protocol.messages import CommitStep, SampleOutcome
from tests.gateway.conftest import SECRET, LiveGateway, worker
from tests.gateway.test_app import ADMIN
from tests.router.harness import token
from tests.router.test_edge import eventually

KEY = identity.client_key(SECRET, "trl")
BEARER = {"Authorization": f"Bearer {KEY}"}
#: As TRL's asynchronous trainer asks (1.16, experimental/async_grpo/async_rollout_worker.py).
BODY: dict[str, Any] = {
    "model": "/models/m",
    "prompt": [5, 6, 7],
    "max_tokens": 8,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "repetition_penalty": 1.0,
    "n": 1,
    "return_token_ids": True,
    "logprobs": 0,
    "seed": 2**63 - 1,
}


def complete(live: LiveGateway, **change: Any) -> dict[str, Any]:
    answer = live.http.post("/v1/completions", json=BODY | change, headers=BEARER)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_completions_answer_in_vllm_s_shape(live: LiveGateway) -> None:
    with worker(live.daemon):
        answer = complete(live, n=2, skip_special_tokens=False)
        plain = complete(live, n=2, logprobs=None, return_token_ids=None)
    for choice, sample_id in zip(answer["choices"], (1, 2), strict=True):
        assert choice["token_ids"] == [token(sample_id, i) for i in range(8)]
        assert choice["logprobs"]["token_logprobs"] == [-0.25 - t for t in choice["token_ids"]]
        assert choice["text"] == "".join(choice["logprobs"]["tokens"])
        assert choice["finish_reason"] == "length"
        assert choice["prompt_token_ids"] == [5, 6, 7]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 16, "total_tokens": 19}
    assert plain["choices"][0]["token_ids"] is plain["choices"][0]["logprobs"] is None
    assert live.count("turns") == 2, "who asks for no logprobs asks for something else"


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # vLLM's and torch's own, at its import
def test_vllm_reads_what_is_asked_and_answered(live: LiveGateway) -> None:
    from vllm.entrypoints.openai.completion import protocol

    asked = protocol.CompletionRequest.model_validate(BODY)
    assert asked.logprobs == 0
    with worker(live.daemon):
        answer = complete(live)
    read = protocol.CompletionResponse.model_validate(answer).choices[0]
    assert read.token_ids == answer["choices"][0]["token_ids"]
    assert read.logprobs.token_logprobs == answer["choices"][0]["logprobs"]["token_logprobs"]


def test_a_body_as_trl_sends_it_and_what_it_leaves_out() -> None:
    request, prompt = dialects.parse_completion(BODY, 128)
    assert (prompt, request.max_tokens, request.logprobs) == ((5, 6, 7), 8, True)
    assert dialects.parse_completion({"prompt": [1]}, 128)[0].max_tokens == 16, "as OpenAI and vLLM have it"


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "a text"},
        {"prompt": []},
        {"prompt": [[1, 2]]},
        {"prompt": [128]},
        {"prompt": {"a": 1}},
        {"stream": True},
        {"suffix": "x"},
        {"echo": True},
        {"logprobs": 5},
        {"logprobs": True},
        {"max_tokens": 0},
        {"repetition_penalty": 1.1},
        {"best_of": 2},
        {"anything": 1},
    ],
)
def test_completions_that_cannot_be_served_are_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=next(iter(change))):
        dialects.parse_completion(BODY | change, 128)


def test_a_client_s_key_is_had_for_the_admin_s_and_begins_no_episode(live: LiveGateway) -> None:
    made = live.http.post("/clients", json={"client": "trl"}, headers=ADMIN)
    assert made.json() == {"client": "trl", "api_key": KEY}
    for body in ({}, {"client": ""}, {"client": "a b"}, {"client": 5}, {"client": "x" * 65}):
        assert live.http.post("/clients", json=body, headers=ADMIN).status_code == 400
    forged = (
        "cl..",
        identity.client_key(b"t" * 32, "trl"),
        KEY.replace("cl.trl.", "ep.trl."),
        KEY.replace("cl.trl.", "cl.other."),
        identity.episode_key(SECRET, "trl").replace("ep.", "cl."),
    )
    for key in forged:
        answer = live.http.post("/v1/completions", json=BODY, headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 401, key
    for method, path in (("POST", "/episodes"), ("POST", "/clients"), ("DELETE", "/episodes/trl")):
        assert live.http.request(method, path, headers=BEARER).status_code == 401
    asked = {"tool": "t", "asker": "0" * 32}
    assert live.http.put("/episodes/trl/tools/c", json=asked, headers=BEARER).status_code == 403
    assert live.count("episodes") == 0


def test_a_key_in_a_url_is_taken_as_clients_send_it(live: LiveGateway) -> None:
    url = f"http://trl:{KEY}@{live.http.base_url.host}:{live.http.base_url.port}"
    assert httpx2.get(f"{url}/v1/models").json()["data"][0]["max_model_len"] == 64
    assert httpx2.get(f"{url}/v1/models".replace(KEY, KEY + "x")).status_code == 401


@pytest.mark.parametrize(
    ("header", "key"),
    [
        ("Bearer k", "k"),
        ("bearer  k ", "k"),
        (f"Basic {base64.b64encode(b'a:k:l').decode()}", "k:l"),
        (f"Basic {base64.b64encode(b'a').decode()}", ""),
        (f"Basic {base64.b64encode(bytes([255, 58, 255])).decode()}", ""),
        ("Basic é", ""),
        ("Basic ?", ""),
        ("Digest k", ""),
        ("", ""),
    ],
)
def test_what_key_a_header_holds(header: str, key: str) -> None:
    assert identity.bearer_of(header) == key


def test_a_client_s_calls_share_an_episode_and_the_older_ones_end(
    live: LiveGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(series, "CALLS", 2)
    with worker(live.daemon):
        first = complete(live, seed=0)
        for seed in range(1, 5):
            complete(live, seed=seed)
        again = complete(live, seed=4)
    assert again["choices"] != first["choices"]
    assert live.count("turns") == 5, "the last was asked for twice"
    eventually(lambda: live.daemon.query("SELECT count(*) FROM episodes WHERE state = 'ended'") == [(1,)])
    rows = live.daemon.query(
        "SELECT e.state, count(*) FROM episodes e JOIN turns t ON t.episode_id = e.episode_id "
        "GROUP BY e.episode_id ORDER BY e.episode_id"
    )
    assert rows == [("ended", 2), ("open", 2), ("open", 1)]
    eventually(lambda: not live.gateway.ending)


def test_calls_beyond_an_episode_s_bound_run_and_a_client_has_its_own(
    live: LiveGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scavenger.gateway.app.MAX_EPISODE_CALLS", 1)
    monkeypatch.setattr("scavenger.gateway.app.MAX_CLIENT_CALLS", 3)
    asking = [threading.Thread(target=lambda i=i: complete(live, seed=i)) for i in range(3)]
    for one in asking:
        one.start()
    eventually(lambda: live.gateway.calls.get("client trl") == 3)
    refused = live.http.post("/v1/completions", json=BODY, headers=BEARER)
    assert refused.status_code == 429
    assert "this client" in refused.json()["error"]["message"]
    with worker(live.daemon):
        for one in asking:
            one.join(60)
    eventually(lambda: not live.gateway.calls)


def test_a_series_keeps_what_may_be_repeated_and_what_runs() -> None:
    one = Series("c", "s")
    running = one.join("slow")
    for number in range(3 * series.CALLS):
        episode = one.join(str(number))
        over = one.leave(episode)
        assert running not in over, "a call is in it"
    assert one.join(str(3 * series.CALLS - 1)) == episode, "a repeated call joins its own"
    assert running not in one.leave(episode)
    assert running in one.leave(running)
    assert one.join("0") != running, "its episode is over: this is another call"


# ---------------------------------------------------------------- a trainer that names none of them


def test_a_step_is_taken_with_what_others_asked_for(live: LiveGateway) -> None:
    """The trainer behind a client names no sample: its steps are recorded all the same, and its older weights let go."""
    with worker(live.daemon):
        complete(live)
        live.run.commit(1, 1, [], {"reward": 0.5})
        live.run.commit(1, 1, [], {"reward": 0.5})  # its answer was lost
    assert live.daemon.query("SELECT step, metrics FROM steps") == [(1, '{"reward":0.5}')]
    assert live.daemon.query("SELECT state FROM samples") == [("complete",)], "no step of its own ends it"


def test_a_step_of_which_nothing_was_asked_for_is_refused(live: LiveGateway) -> None:
    from scavenger.errors import Refused

    with pytest.raises(Refused, match="never submitted"):
        live.run.commit(1, 1, [], {})
    with worker(live.daemon):
        complete(live)
    for body in (
        CommitStep(1, 1, "train", (SampleOutcome(1, "consumed", 1.0, 0.0),), {}),
        CommitStep(1, 1, "eval", (SampleOutcome(9, "evaluated", 1.0, 0.0),), {}),
    ):
        with pytest.raises(Refused, match="never submitted"):
            live.run.call(body)


def test_a_client_s_sessions_draw_for_themselves(live: LiveGateway) -> None:
    """As `verifiers` asks for a group of rollouts: one body, and a rollout's id in the header. A repeated call finds its turn."""
    body = {
        "token_ids": [5, 6, 7],
        "sampling_params": {"max_tokens": 4, "logprobs": 1, "routed_experts_prompt_start": 2},
        "cache_salt": "0",
    }

    def ask(session: str, headers: dict[str, str] = BEARER) -> int:
        named = headers | ({"X-Session-ID": session} if session else {})
        return live.http.post("/inference/v1/generate", json=body, headers=named).status_code

    with worker(live.daemon):
        assert [ask(session) for session in ("a", "b", "a", "")] == [200] * 4
        assert live.count("turns") == 3
        assert ask("s" * 257) == 400
        made = live.http.post("/episodes", json={"episode": "one"}, headers=ADMIN).json()["api_key"]
        own = {"Authorization": f"Bearer {made}"}
        assert [ask(session, own) for session in ("a", "b")] == [200] * 2
    assert live.count("turns") == 4, "an episode is one session"
