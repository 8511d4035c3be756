"""A model folder with a small tokenizer and a chat template, and a live gateway before a real daemon edge and scripted workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from scavenger.client import Client, Run
from scavenger.gateway import identity
from scavenger.gateway.link import Link
from scavenger.gateway.prompts import ModelFolder
from scavenger.protocol import keys
from tests.router.edge import LiveDaemon, ScriptedWorker
from tests.router.harness import SPEC
from tests.router.test_edge import open_run, publish

SECRET = b"s" * identity.SECRET_BYTES
#: What a token decodes to: one character each, so that every sequence of tokens is a text.
CHARACTERS = "".join(chr(code) for code in range(33, 33 + 94)) + " \n~é"
#: One more token, which no text is tokenised to: a model may say it all the same.
PAIR = "xy"
TEMPLATE = (
    "{% if tools %}[{{ tools | tojson }}]{% endif %}{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}"
    "{% for c in m.get('tool_calls', []) %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}"
    "{% if m['role'] != 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def write_model(folder: Path, template: str = TEMPLATE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {text: i for i, text in enumerate(("<e>", *dict.fromkeys(CHARACTERS), PAIR))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<e>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["<e>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 128, "eos_token_id": 0}))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<e>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> ModelFolder:
    return ModelFolder(write_model(tmp_path / "model"), ())


@dataclass
class LiveGateway:
    """A gateway on a loopback port, of run "r" of a live daemon."""

    daemon: LiveDaemon
    run: Run
    http: httpx2.Client
    gateway: Any

    def key(self, episode: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {identity.episode_key(SECRET, episode)}"}

    def post(self, path: str, body: Any, episode: str = "e", **headers: str) -> httpx2.Response:
        return self.http.post(path, json=body, headers=self.key(episode) | headers)

    def generate(
        self, episode: str = "e", *, request_id: str | None = None, **sampling: Any
    ) -> dict[str, Any]:
        body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 8, "logprobs": 1} | sampling}
        answer = self.post("/inference/v1/generate", body | {"request_id": request_id}, episode)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def count(self, table: str) -> int:
        return int(str(self.daemon.query(f"SELECT count(*) FROM {table}")[0][0]))


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveGateway]:
    with LiveDaemon(tmp_path / "state") as daemon, contextlib.ExitStack() as leaving:
        client = leaving.enter_context(Client.connect(daemon.state_dir))
        run = open_run(client, daemon)
        publish(run, 1)
        yield leaving.enter_context(served(daemon, run, write_model(tmp_path / "model")))


@contextlib.contextmanager
def restarted_with(live: LiveGateway, **data: Any) -> Iterator[Run]:
    """The run's next training job, with these keys of its `[data]`; the gateway stays."""
    with Client.connect(live.daemon.state_dir) as client:
        run = open_run(client, live.daemon, **data)
        publish(run, 1)
        yield run


@contextlib.contextmanager
def served(daemon: LiveDaemon, run: Run, folder: Path) -> Iterator[LiveGateway]:
    """A gateway in a thread of its own."""
    pytest.importorskip("starlette", reason="the extra `gateway`")
    uvicorn = pytest.importorskip("uvicorn", reason="the extra `gateway`")
    from scavenger.gateway.app import Gateway, make_app, server_config

    ready = threading.Event()
    found: dict[str, Any] = {}

    async def serve() -> None:
        pair = keys.read_keypair(keys.owner_key_path(daemon.state_dir))
        gateway = found["gateway"] = Gateway(
            Link(daemon.state_dir, pair, "r"), ModelFolder(folder, ()), "r", SPEC.context_length, SECRET
        )
        config = server_config(make_app(gateway), port=0, timeout_graceful_shutdown=1)
        server = found["server"] = uvicorn.Server(config)
        task = asyncio.create_task(server.serve())
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        if not task.done():
            found["port"] = server.servers[0].sockets[0].getsockname()[1]
        ready.set()
        await task

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="gateway")
    thread.start()
    try:
        assert ready.wait(30)
        with httpx2.Client(base_url=f"http://127.0.0.1:{found['port']}", timeout=60) as http:
            yield LiveGateway(daemon, run, http, found["gateway"])
    finally:
        found["server"].should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@contextlib.contextmanager
def worker(
    daemon: LiveDaemon, name: str = "w", pace: float = 0.01, run: str = "r"
) -> Iterator[ScriptedWorker]:
    """A worker at work."""
    made = ScriptedWorker(daemon.state_dir, daemon.worker_key(f"job-{name}", run), name, pace, run)
    made.start()
    try:
        yield made
    finally:
        made.halt.set()
        made.join(30)
