"""The judge against a real server of chat completions on a loopback socket."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from scavenger.config import RewardSection
from scavenger.errors import ConfigError, RewardError
from trainer.algorithms.reward_pool import RewardPool, open_pool

KEY = "sk-not-to-be-seen"
TOGETHER = 6
DEADLINE_S = 60.0


class Judge(ThreadingHTTPServer):
    """Rates an answer by its length. The answer says what else: `busy` and `down` are refused twice, `alone` gets no score."""

    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.met = threading.Barrier(TOGETHER)
        self.asked: Counter[str] = Counter()
        self.inside = self.most = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Judge

    def do_POST(self) -> None:
        judge = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = body["messages"][0]["content"].rpartition("|")[2]
        with judge.lock:
            judge.asked[answer] += 1
            judge.inside += 1
            judge.most = max(judge.most, judge.inside)
        try:
            if answer.startswith("meet"):
                judge.met.wait(DEADLINE_S)
            self.answer(answer, judge.asked[answer], body)
        finally:
            with judge.lock:
                judge.inside -= 1

    def answer(self, answer: str, times: int, body: dict[str, Any]) -> None:
        if (
            self.path != "/v1/chat/completions"
            or self.headers.get("Authorization") != f"Bearer {KEY}"
            or body["model"] != "rater"
        ):
            return self.reply(401, f"not you: {answer}")
        if answer == "busy" and times <= 2:
            return self.reply(429, "", after="0")
        if answer == "down" and times <= 2:
            return self.close_connection_now()
        said = "no opinion" if answer == "alone" else f"Score: 11 was said first. Score: {len(answer)}"
        return self.reply(200, json.dumps({"choices": [{"message": {"role": "assistant", "content": said}}]}))

    def close_connection_now(self) -> None:
        self.connection.close()
        self.close_connection = True

    def reply(self, status: int, text: str, after: str = "") -> None:
        self.send_response(status)
        if after:
            self.send_header("Retry-After", after)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None: ...
    def finish(self) -> None:
        with contextlib.suppress(OSError):  # closed on purpose
            super().finish()


@pytest.fixture
def judge() -> Iterator[Judge]:
    with Judge() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "judge.key"
    path.touch(mode=0o600)
    path.write_text(KEY + "\n")
    return path


def pool(judge: Judge, key: Path, **more: Any) -> RewardPool:
    options = {
        "url": judge.url,
        "model": "rater",
        "key_file": str(key),
        "template": "{prompt}|{answer}",
        "backoff_s": 0.01,
    }
    section = {"function": "trainer.judge:reward", "timeout_s": 30.0, "retries": 0, "concurrency": TOGETHER}
    return open_pool(RewardSection.model_validate(section | {"options": options | more}))


def test_calls_are_under_way_together_and_no_more_than_allowed(judge: Judge, key: Path) -> None:
    with pool(judge, key) as rewards:
        futures = rewards.submit("", [f"meet{n}" for n in range(2 * TOGETHER)], {})
        assert [future.result(DEADLINE_S).value for future in futures] == [0.5] * 10 + [0.6] * 2
    assert judge.most == TOGETHER


@pytest.mark.parametrize("answer", ["busy", "down"])
def test_a_server_that_is_busy_or_gone_is_asked_again(judge: Judge, key: Path, answer: str) -> None:
    with pool(judge, key) as rewards:
        assert rewards.score("", answer, {}) == 0.4
    assert judge.asked[answer] == 3
    judge.asked.clear()
    with pool(judge, key, attempts=2) as rewards, pytest.raises(RewardError):
        rewards.score("", answer, {})
    assert judge.asked[answer] == 2


@pytest.mark.parametrize(
    ("answer", "why"), [("alone", "has no score"), ("x" * 11, "11 is not within 0 and 10")]
)
def test_a_reply_without_a_usable_score_is_an_error_not_a_reward_of_zero(
    judge: Judge, key: Path, answer: str, why: str
) -> None:
    with pool(judge, key) as rewards, pytest.raises(RewardError, match=why):
        rewards.score("", answer, {})


def test_the_key_is_in_no_argument_no_environment_and_no_message(judge: Judge, key: Path) -> None:
    with pool(judge, key) as rewards:
        assert rewards.score("", "fine", {}) == 0.4
        process = rewards._lanes[0]._runners[0]._process
        assert process is not None
        shown = [Path(f"/proc/{process.pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
        assert not [text for text in shown if KEY.encode() in text]
        key.write_text(KEY + "-changed")
        with pytest.raises(RewardError, match="the judge replied 401: not you") as refused:
            rewards.score("", "fine", {})
        assert KEY not in str(refused.value)
        assert KEY not in rewards.version


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"url": "http://me:secret@host/v1"}, r"reward\.options\.url is not"),
        ({"url": "host:80"}, r"reward\.options\.url is not"),
        (
            {"template": "{question}"},
            r"reward\.options\.template cannot be filled in: KeyError\('question'\)",
        ),
        ({"pattern": "[0-9]+"}, r"reward\.options\.pattern has 0 groups"),
        ({"key_file": "/nowhere/key"}, "/nowhere/key cannot be read: FileNotFoundError"),
        ({"modle": "x"}, "unexpected keyword argument 'modle'"),
    ],
)
def test_options_that_cannot_work_are_told_before_the_run(
    judge: Judge, key: Path, more: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why), pool(judge, key, **more):
        pass


def test_a_key_that_others_may_read_is_refused(judge: Judge, key: Path) -> None:
    key.chmod(0o640)
    with pytest.raises(ConfigError, match="has mode 0640: others may read it"), pool(judge, key):
        pass
