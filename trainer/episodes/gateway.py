"""The gateway that a run's episodes call: one that runs on this host already, or one that the training job starts and keeps alive.

`python -m trainer.episodes.gateway ARGUMENTS` is `scavenger ARGUMENTS` that ends with its parent: a rank forks nothing by itself.

Boundary: a process and two HTTP calls.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx2

from scavenger.errors import ConfigError, DaemonUnavailable
from scavenger.host import packages
from trainer.reserved import die_with_parent

#: What rows need: the logprobs under the distribution that tokens were drawn from.
LOGPROBS = "processed_logprobs"
START_S = 300.0  # its Python alone took 95 s on a busy machine
ENDING_S = 15.0


@dataclass(frozen=True, slots=True)
class Announced:
    """What a gateway's file says."""

    endpoint: str
    admin_key: str
    logprobs: str


def announced(out_dir: Path) -> Announced | None:
    """Of this host's gateway; None: none has announced itself."""
    try:
        found = json.loads((out_dir / f"gateway.{socket.gethostname()}.json").read_bytes())
        return Announced(found["endpoint"], found["admin_key"], found.get("logprobs", ""))
    except (OSError, ValueError, KeyError, AttributeError):
        return None


def refuse_missing() -> None:
    """Raises `ConfigError` where this Python cannot run a gateway."""
    packages.require_gateway("data.environment: its episodes call a gateway beside the trainer")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RunGateway:
    """`arguments`: run.toml, and what is laid over it. Use as a context manager; `endpoint` is known at once, and answers once the run is
    open (`wait`).

    With `out_dir` None it is of its caller's own, in `folder`: no other one is looked for, it announces itself to nobody, and episodes are
    begun elsewhere.
    """

    def __init__(
        self,
        out_dir: Path | None,
        arguments: Sequence[str],
        say: Callable[[str], None] = print,
        folder: Path | None = None,
    ) -> None:
        self._out_dir, self._arguments, self._say, self._folder = out_dir, list(arguments), say, folder
        self._process: subprocess.Popen[bytes] | None = None
        self._http = httpx2.Client(timeout=60.0)
        self._starts = 0
        self.endpoint = self._admin_key = ""

    def __enter__(self) -> Self:
        there = announced(self._out_dir) if self._out_dir is not None else None
        if there is not None and there.logprobs == LOGPROBS and self._answers(there.endpoint):
            self.endpoint, self._admin_key = there.endpoint, there.admin_key
            self._say(f"episodes call the gateway that runs here: {self.endpoint}")
            return self
        refuse_missing()
        self.endpoint = f"http://127.0.0.1:{_free_port()}"
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def wait(self) -> None:
        """Until it answers. Raises `ConfigError` where it ends instead, `DaemonUnavailable` where it does not come."""
        deadline = time.monotonic() + START_S
        while not self._is_up():
            if self._process is not None and self._process.poll() is not None:
                raise ConfigError(
                    f"the run's gateway ended with status {self._process.returncode}",
                    "look at its words in the training job's log",
                )
            if time.monotonic() > deadline:
                raise DaemonUnavailable(
                    f"the run's gateway at {self.endpoint} did not answer for {START_S:g} s",
                    "look at the daemon: `scavenger status`",
                )
            time.sleep(0.1)  # a process's start cannot be waited for otherwise
        found = announced(self._out_dir) if self._out_dir is not None else None
        self._admin_key = found.admin_key if found is not None else ""  # of all gateways of a run the same

    def check(self) -> None:
        """Start it again, at the same place, where it ended: callers ask again."""
        if self._process is not None and self._process.poll() is not None:
            self._say(f"the run's gateway ended with status {self._process.returncode}: started again")
            self._start()

    def begin(self, episode: str) -> str:
        """The key of an episode."""
        answer = self._asked("POST", "/episodes", {"episode": episode})
        return str(answer["api_key"])

    def _asked(self, method: str, path: str, body: dict[str, str] | None) -> dict[str, str]:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(httpx2.TransportError):
                headers = {"Authorization": f"Bearer {self._admin_key}"}
                answer = self._http.request(method, f"{self.endpoint}{path}", json=body, headers=headers)
                if answer.status_code == 200:
                    return dict(answer.json())
                if answer.status_code not in (429, 503):
                    raise ConfigError(
                        f"the run's gateway answered {method} {path} with {answer.status_code}",
                        "end other gateways of this run, and start the training job again",
                        quoted=answer.text,
                    )
            if time.monotonic() > deadline:
                raise DaemonUnavailable(
                    f"the run's gateway at {self.endpoint} is away", "look at the training job's log"
                )
            self.check()
            time.sleep(0.2)

    def _start(self) -> None:
        self._starts += 1
        port = self.endpoint.rpartition(":")[2]
        argv = [sys.executable, "-m", "trainer.episodes.gateway", "gateway", *self._arguments]
        argv += ["--port", port, "--logprobs-mode", LOGPROBS]
        argv += ["--no-announce"] if self._out_dir is None else []
        self._process = subprocess.Popen(argv, cwd=self._folder)

    @property
    def starts(self) -> int:
        """How often it was started."""
        return self._starts

    def _is_up(self) -> bool:
        there = self._out_dir is None or announced(self._out_dir) is not None
        return self._answers(self.endpoint) and there

    def _answers(self, endpoint: str) -> bool:
        with contextlib.suppress(httpx2.HTTPError):
            return self._http.get(f"{endpoint}/health", timeout=5.0).status_code == 200
        return False


if __name__ == "__main__":
    die_with_parent()
    os.execv(sys.executable, [sys.executable, "-m", "scavenger", *sys.argv[1:]])
