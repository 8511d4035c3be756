"""An environment worker without the package `verifiers`: its own agent and task, the trainer's own process, relay, names and records.

    for each turn: relay /inference/v1/generate  (token ids, as `TrainClient` asks)
                   relay /tools/…  tools/call    (JSON-RPC, as MCP asks), whose answer the next turn begins with

Stands in for a `verifiers` environment where the tests' machine has none; `test_agents.py` plays a real one, too, where there is one.
The task: say even digits. Started as `data.environment_python`, by `agents.write_interpreter`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx2

from trainer.episodes import branches, wire, worker
from trainer.episodes.boxed import Boxed
from trainer.episodes.relay import SESSION, Playing, Relay

#: The sorting task's tokens (`trainer.tasks.sort`): padding, the end, ten digits, and what ends a prompt.
FIRST_DIGIT, ASK = 2, 12
TASKS, DIGITS = 64, 6
EVEN = {FIRST_DIGIT + digit for digit in range(0, 10, 2)}


@dataclass(frozen=True)
class Message:
    """As `branches.Node`."""

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]

    @classmethod
    def said_by_others(cls, tokens: list[int]) -> Message:
        return cls(tokens, [False] * len(tokens), [])


def prompt_of(task: int) -> list[int]:
    digest = hashlib.sha256(f"plain/{task}".encode()).digest()
    return [FIRST_DIGIT + byte % 10 for byte in digest[:DIGITS]] + [ASK]


class PlainAgent:
    """`worker.Player`. Arguments of the environment: `turns`, and `tool`, the address of a JSON-RPC server."""

    def __init__(self, setup: wire.Setup, relay: Relay, boxed: Boxed | None) -> None:
        assert boxed is None
        self._relay = relay
        self._arguments: dict[str, Any] = json.loads(setup.arguments)

    def ready(self) -> wire.Ready:
        return wire.Ready(TASKS, hashlib.sha256(b"plain").hexdigest()[:32], "plain@1")

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with httpx2.AsyncClient(timeout=None) as self._http:
            yield

    async def play(self, ask: wire.Play, playing: Playing) -> wire.Played:
        rollout = f"{ask.episode}-agent"
        self._relay.agent(playing, rollout)
        tool = self._relay.tool(rollout, "scales", str(self._arguments["tool"]))
        path = [Message.said_by_others(prompt_of(ask.task))]
        for turn in range(int(self._arguments["turns"])):
            if turn:
                path.append(Message.said_by_others(await self._weighed(tool, ask, turn, path[-1].token_ids)))
            body = {
                "token_ids": [token for message in path for token in message.token_ids],
                "sampling_params": {**ask.sampling, "logprobs": 1},
            }
            answer = await self._http.post(
                f"{self._relay.base_url}/inference/v1/generate", json=body, headers={SESSION: rollout}
            )
            if answer.status_code != 200:
                raise RuntimeError(f"the model: {answer.status_code} {answer.text[:500]}")
            choice = answer.json()["choices"][0]
            tokens = list(choice["token_ids"])
            logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
            path.append(Message(tokens, [True] * len(tokens), logprobs))
        said = [token for message in path if message.mask[0] for token in message.token_ids]
        taken = playing.taken()
        return wire.Played(
            ask.episode,
            sum(token in EVEN for token in said) / len(said),
            {"said": float(len(said))},
            branches.rows_of([path]),
            tuple(call for call, _ in taken),
            tuple(version for _, version in taken),
        )

    async def _weighed(self, tool: str, ask: wire.Play, turn: int, said: list[int]) -> list[int]:
        """What the tool says of an answer, as the next prompt."""
        arguments = {"episode": ask.episode, "turn": turn, "said": said}
        params = {"name": "weigh", "arguments": arguments}
        body = {"jsonrpc": "2.0", "id": turn, "method": "tools/call", "params": params}
        answer = await self._http.post(tool, json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"the tool: {answer.status_code} {answer.text[:500]}")
        result = answer.json()["result"]
        if result.get("isError"):  # in doubt: the agent is told so
            return [ASK]
        return [FIRST_DIGIT + int(result["content"][0]["text"]), ASK]


if __name__ == "__main__":
    sys.exit(worker.main(PlainAgent))
