"""A model that is none, in the gateway's place: `init --check` plays one episode against it. It says the same few tokens to everything.

Boundary: an HTTP server on loopback, for one check.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

#: Under the distribution of a model that is none.
LOGPROB = -1.0


def answer_of(body: dict[str, Any], tokens: Sequence[int]) -> dict[str, Any]:
    """What the gateway would answer to a generate body, had the model said `tokens`."""
    most = int(body.get("sampling_params", {}).get("max_tokens") or len(tokens))
    said = list(tokens)[:most]
    content = [{"token": f"token_id:{token}", "token_id": token, "logprob": LOGPROB} for token in said]
    return {
        "request_id": "stub",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop" if len(said) == len(tokens) else "length",
                "token_ids": said,
                "logprobs": {"content": content},
                "weight_versions": [{"version": "0", "start": 0, "end": len(said)}],
            }
        ],
    }


@contextmanager
def stub_model(tokens: Sequence[int]) -> Iterator[str]:
    """Serve it; yields its endpoint."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length", "0"))))
            sent = json.dumps(answer_of(body, tokens)).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *args: Any) -> None:
            """The check has its own words."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, name="stub model", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
