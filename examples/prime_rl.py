"""prime-rl's orchestrator on harvested GPUs: rollouts through the run's gateway, its broadcast folders published by our client.

    scavenger gateway run.toml --port 8471 --logprobs-mode processed_logprobs &
    python examples/prime_rl.py run.toml --output-dir OUTPUTS/RUN --port 8472 -- rl @ rl.toml

How to, and what prime-rl's configuration must say: docs/your-trainer.md. The command runs with the gateway's key in `SCAVENGER_API_KEY`,
and the run is closed when it ends: "finished" where its exit code is 0. prime-rl's admin calls to an inference server come here:

    GET  /health, /v1/models    the run's model, by the path in run.toml
    GET  /metrics               nothing: there is no single server whose load it would be
    POST /pause, /resume        nothing is paused: engines take a version when it is there, and go on
    POST /update_weights        publishes a folder of safetensors, OUTPUT_DIR/broadcasts/step_N, and commits the steps up to N

All other calls are refused by name. One thread does everything, since our client belongs to one: while weights are published, others wait.
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import torch
from publishing import DaemonRun, gateway_key
from safetensors.torch import load_file

from scavenger.config import RunConfig, read_run
from scavenger.errors import ScavengerError, describe
from scavenger.weights import files

#: The name of this trainer at its gateway, and so of the episodes that its calls are turns of.
CLIENT = "prime-rl"
#: Where prime-rl finds the gateway's key: `api_key_var` of its client.
KEY_VARIABLE = "SCAVENGER_API_KEY"
#: How long the loop waits for a call (s), and how long a caller may take to send or read one (s); the bytes that a call may have.
TICK_S, CALL_S, MAX_CALL_BYTES = 0.5, 10.0, 65536
#: How long the command may take to end when this program is told to (s).
LEAVE_S = 30.0
_STEP = re.compile(r"step_(\d{1,9})", re.ASCII)
#: What prime-rl asks an inference server beside, and what to set instead.
REFUSED = {
    "/init_broadcaster": 'engines here are many and come later: set weight_broadcast.type = "filesystem"',
    "/load_lora_adapter": "engines take whole weights: train without [model.lora]",
    "/v1/unload_lora_adapter": "engines take whole weights: train without [model.lora]",
}


class NotServed(Exception):
    """A call that cannot be served: an HTTP status, and what to do."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Broadcasts(DaemonRun):
    """One run of a daemon, fed from prime-rl's folders. `folder`: where they appear."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        super().__init__(config, files.read_tokenizer(config.model.path))
        self._tied = bool(
            json.loads((config.model.path / "config.json").read_text()).get("tie_word_embeddings")
        )
        self._folder = folder.resolve()
        self._step: int | None = None

    def update(self, weight_dir: object) -> None:
        """Publish the weights of a folder. The first one opens the run, at the step that prime-rl starts from; the same one again is
        nothing. Raises `NotServed`, `ScavengerError`.
        """
        path, step = self._named(weight_dir)
        if self._step is None:
            self.open(step)
        elif step <= self._step:
            return
        version = self._version
        self.publish(step, self._read(path))
        for taken in range(step if self._step is None else self._step + 1, step + 1):
            if self._step is not None:
                self.run.commit(taken, version, [], {})
        self._step = step

    def poll(self) -> None:
        """Raises `ScavengerError` where the run was stopped."""
        if self._step is not None:
            self.run.poll(0.0)

    def _named(self, weight_dir: object) -> tuple[Path, int]:
        if not isinstance(weight_dir, str):
            raise NotServed(400, f"weight_dir: a folder. {REFUSED['/init_broadcaster']}")
        path = Path(weight_dir).resolve()
        step = _STEP.fullmatch(path.name)
        if step is None or path.parent != self._folder:
            raise NotServed(
                400,
                f"{weight_dir} is no step_N in {self._folder}: give prime-rl's output_dir as --output-dir",
            )
        return path, int(step[1])

    def _read(self, path: Path) -> dict[str, torch.Tensor]:
        """Every parameter under its name in the checkpoint. A tied head is its embedding, and has no name of its own."""
        if not (path / "STABLE").exists():
            raise NotServed(
                400, f"{path} is not whole: its STABLE is missing. {REFUSED['/init_broadcaster']}"
            )
        found: dict[str, torch.Tensor] = {}
        for part in sorted(path.glob("*.safetensors")):
            found |= load_file(part)
        if not found:
            raise NotServed(400, f"{path} holds no safetensors, which prime-rl's filesystem broadcast writes")
        if self._tied:
            found.pop("lm_head.weight", None)
        return found


class Facade(HTTPServer):
    """prime-rl's admin calls, on loopback and by the key of `CLIENT`. `fault`: why the run cannot go on."""

    def __init__(self, port: int, broadcasts: Broadcasts, model: str, context_length: int, key: str) -> None:
        super().__init__(("127.0.0.1", port), _Call)
        self.timeout = TICK_S
        self.broadcasts, self.key, self.fault = broadcasts, key, ""
        self.card = {"id": model, "object": "model", "owned_by": "scavenger", "max_model_len": context_length}

    def answer(self, method: str, path: str, body: Mapping[str, Any]) -> object:
        """What a call is answered with, as JSON. Raises `NotServed`, `ScavengerError`."""
        match method, path:
            case "GET", "/health":
                return {}
            case "GET", "/v1/models":
                return {"object": "list", "data": [self.card]}
            case "POST", "/pause" | "/resume":
                return {}
            case "POST", "/update_weights":
                self.broadcasts.update(body.get("weight_dir"))
                return {}
        if path in REFUSED:
            raise NotServed(400, f"{path}: {REFUSED[path]}")
        raise NotServed(404, f"{method} {path}: not here; generation is the gateway's")


class _Call(BaseHTTPRequestHandler):
    """One call of prime-rl."""

    server: Facade
    timeout = CALL_S

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: prime-rl logs its calls."""

    def _answer(self, method: str) -> None:
        path = self.path.partition("?")[0]
        try:
            given = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self.server.key.encode()):
                raise NotServed(401, f"not the key of {CLIENT!r}: set api_key_var = {KEY_VARIABLE!r}")
            if (method, path) == ("GET", "/metrics"):
                self._send(200, b"", "text/plain; version=0.0.4")
                return
            found = self.server.answer(method, path, self._body())
            self._send(200, json.dumps(found).encode())
        except NotServed as error:
            print(f"refused: {error}", file=sys.stderr)
            self._send(error.status, json.dumps({"error": {"message": str(error)}}).encode())
        except ScavengerError as error:
            self.server.fault = describe(error)
            self._send(400, json.dumps({"error": {"message": self.server.fault}}).encode())

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "0")
        if not length.isdecimal() or int(length) > MAX_CALL_BYTES:
            raise NotServed(413, f"a body of over {MAX_CALL_BYTES:,} bytes")
        try:
            found = json.loads(self.rfile.read(int(length)) or b"{}")
        except (ValueError, RecursionError) as error:
            raise NotServed(400, f"the body is no JSON: {error}") from None
        if not isinstance(found, dict):
            raise NotServed(400, "the body is no JSON object")
        return found

    def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def serve(facade: Facade, command: subprocess.Popen[bytes]) -> None:
    """Until the command has ended. Raises `SystemExit` where it failed, or the run cannot go on."""
    while command.poll() is None:
        facade.handle_request()
        facade.broadcasts.poll()
        if facade.fault:
            raise SystemExit(facade.fault)
    if command.returncode:
        raise SystemExit(f"the command ended with exit code {command.returncode}")


def end(command: subprocess.Popen[bytes]) -> None:
    """prime-rl's processes end with this one."""
    if command.poll() is not None:
        return
    command.terminate()
    try:
        command.wait(LEAVE_S)
    except subprocess.TimeoutExpired:
        command.kill()
        command.wait()


def _told_to_end(*_: object) -> None:
    raise SystemExit("told to end")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("config", type=Path, help="run.toml")
    parser.add_argument("--output-dir", type=Path, required=True, help="prime-rl's output_dir")
    parser.add_argument("--port", type=int, default=8472, help="for prime-rl's admin calls, on loopback")
    parser.add_argument("command", nargs="+", help="after --: what starts prime-rl")
    options = parser.parse_args(argv)
    config = read_run(options.config)
    _, key = gateway_key(config, CLIENT)
    signal.signal(signal.SIGTERM, _told_to_end)
    with Broadcasts(config, options.output_dir / "broadcasts") as broadcasts:
        model = config.model
        with Facade(options.port, broadcasts, str(model.path), model.context_length, key) as facade:
            command = subprocess.Popen(options.command, env=os.environ | {KEY_VARIABLE: key})
            try:
                serve(facade, command)
            finally:
                end(command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
