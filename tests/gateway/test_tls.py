"""The gateway as a process of its own, over TLS: beyond loopback there is no other way."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from scavenger.client import Client
from tests.clusters import wait_for
from tests.gateway.conftest import worker, write_model
from tests.router.edge import LiveDaemon
from tests.router.test_edge import open_run, publish

pytest.importorskip("starlette", reason="the extra `gateway`")
pytest.importorskip("uvicorn", reason="the extra `gateway`")
ROOT = Path(__file__).resolve().parents[2]
RUN = """
[run]
name = "r"
steps = 1
state_dir = "{state_dir}"
out_dir = "out"
[model]
path = "model"
context_length = 128
[data]
task = "sort"
prompts_per_step = 1
samples_per_prompt = 2
[sampling]
max_tokens = 8
[engine]
name = "reference"
[optimizer]
lr = 1e-3
"""


@pytest.fixture
def run_toml(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    (tmp_path / "out").mkdir()
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(state_dir=tmp_path / "state"))
    return path


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """Of 127.0.0.1, signed by itself, and its key."""
    made, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run([*argv, *names, "-keyout", str(key), "-out", str(made)], check=True, capture_output=True)
    return made, key


def started(run_toml: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "scavenger", "gateway", str(run_toml), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@contextlib.contextmanager
def gateway(run_toml: Path, *options: str) -> Iterator[dict[str, str]]:
    """What it announces."""
    announced = run_toml.parent / "out" / f"gateway.{socket.gethostname()}.json"
    process = started(run_toml, *options)

    def there() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return announced.exists()

    try:
        wait_for("the gateway", there)
        yield json.loads(announced.read_text())
    finally:
        process.terminate()
        said, _ = process.communicate(timeout=30)
        assert process.returncode in (0, -signal.SIGTERM), said


def test_an_episode_is_served_to_who_trusts_its_certificate(
    run_toml: Path, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    trusting = ssl.create_default_context(cafile=str(certificate[0]))
    options = ("--tls-cert", str(certificate[0]), "--tls-key", str(certificate[1]))
    with LiveDaemon(tmp_path / "state") as daemon, Client.connect(daemon.state_dir) as client:
        publish(open_run(client, daemon), 1)
        with worker(daemon), gateway(run_toml, *options) as found:
            endpoint = found["endpoint"]
            assert endpoint.startswith("https://127.0.0.1:")
            with httpx2.Client(base_url=endpoint, verify=trusting, timeout=60) as http:
                admin = {"Authorization": f"Bearer {found['admin_key']}"}
                key = http.post("/episodes", json={"episode": "e"}, headers=admin).json()["api_key"]
                body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 8}}
                mine = {"Authorization": f"Bearer {key}"}
                answer = http.post("/inference/v1/generate", json=body, headers=mine)
                assert answer.status_code == 200, answer.text
                assert len(answer.json()["choices"][0]["token_ids"]) == 8
            with pytest.raises(httpx2.ConnectError), httpx2.Client(base_url=endpoint) as stranger:
                stranger.get("/health")
            with pytest.raises(httpx2.HTTPError), httpx2.Client() as plain:
                plain.get(endpoint.replace("https", "http") + "/health")


def test_beyond_loopback_it_is_refused_without_a_certificate(run_toml: Path, tmp_path: Path) -> None:
    with LiveDaemon(tmp_path / "state"):
        process = started(run_toml, "--host", "0.0.0.0")
        said, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "in the clear" in said
    assert "--tls-cert" in said
