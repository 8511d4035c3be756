"""Environments that are built in: `data.environment = "builtin:calculator"`, and `"builtin:proposer-solver"` with two agents. For the
demo, examples and tests: no package `verifiers` is needed.

They take the way of every other environment: a worker's process, the relay, the gateway, calls that have names. A conversation is token
ids throughout: what the model said goes on as it was generated, and only what the environment adds is tokenised. Their tools run in this
process and change nothing outside it.

Boundary: one model call after another; what an environment says is `trainer.tasks`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from blake3 import blake3
from tokenizers import Tokenizer

from scavenger.errors import ConfigError
from trainer.episodes import branches, wire
from trainer.episodes.relay import SESSION, Playing, Relay, is_budget_spent
from trainer.episodes.wire import OVER_BUDGET
from trainer.tasks import calculator, proposer_solver

#: Of each environment its agents.
AGENTS = {"calculator": ("agent",), "calculator-steps": ("agent",), "proposer-solver": proposer_solver.AGENTS}


def is_built_in(environment: str) -> bool:
    return environment.startswith(wire.BUILT_IN)


def check(setup: wire.Setup) -> None:
    """Raises `ConfigError` where a built-in environment is unknown, or has settings that mean nothing to it."""
    if not is_built_in(setup.environment):
        return
    agents = AGENTS.get(setup.environment.removeprefix(wire.BUILT_IN))
    if agents is None:
        known = ", ".join(f'"{wire.BUILT_IN}{name}"' for name in AGENTS)
        raise ConfigError(
            f"{setup.environment!r} is not built in", f"name one of {known}, or a package of verifiers"
        )
    refuse_unknown_agents(setup, agents)
    for key, there in (
        ("environment_args", json.loads(setup.arguments) != {}),
        ("renderer", json.loads(setup.renderer) != {}),
        ("sandbox", setup.sandbox is not None),
        ("effects", setup.effects != "none"),
    ):
        if there:
            why = (
                "its tool is a function of the worker's own"
                if key in ("sandbox", "effects")
                else "it has no such settings"
            )
            raise ConfigError(
                f"data.{key} does not go with {setup.environment!r}: {why}", f"leave data.{key} out"
            )


def refuse_unknown_agents(setup: wire.Setup, agents: Sequence[str]) -> None:
    """Raises `ConfigError` where `data.policies` names an agent that the environment does not have."""
    if unknown := sorted(set(setup.policies) - set(agents)):
        known = ", ".join(agents)
        raise ConfigError(
            f"data.policies names {unknown[0]!r}, which is no agent of {setup.environment!r}",
            f"its agents are: {known}",
        )


@dataclass(frozen=True, slots=True)
class _Node:
    """One message, as rows need it."""

    token_ids: Sequence[int]
    mask: Sequence[bool]
    logprobs: Sequence[float] = ()


@dataclass(slots=True)
class _Conversation:
    """What was said so far. `tokens`: all of it. `generated`: how many of them the model said. `turns`: the model's nodes, `words` their
    texts.
    """

    nodes: list[_Node] = field(default_factory=list)
    turns: list[_Node] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    generated: int = 0
    truncated: bool = False

    def heard(self, token_ids: Sequence[int]) -> None:
        self.nodes.append(_Node(token_ids, [False] * len(token_ids)))
        self.tokens += token_ids

    def said(self, token_ids: Sequence[int], logprobs: Sequence[float], words: str) -> None:
        self.turns.append(_Node(token_ids, [True] * len(token_ids), logprobs))
        self.nodes.append(self.turns[-1])
        self.words.append(words)
        self.tokens += token_ids
        self.generated += len(token_ids)


class _Failed(Exception):
    """The model did not answer a call."""


class _Spent(Exception):
    """The episode has used up its budget."""


class BuiltIn:
    """A `worker.Player`."""

    def __init__(self, setup: wire.Setup, relay: Relay) -> None:
        """Raises `ConfigError` for a model whose tokenizer cannot be read or lacks the environment's characters."""
        self._setup, self._relay = setup, relay
        path = Path(setup.model) / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises nothing narrower
            raise ConfigError(
                f"{path} cannot be read: {error}", "name a model with a tokenizer.json"
            ) from error
        self._steps = (
            setup.environment.removeprefix(wire.BUILT_IN) == "calculator-steps"
        )  # turns have rewards
        self._task: Any = proposer_solver if setup.environment.endswith("proposer-solver") else calculator
        text = calculator.prompt(calculator.task(0))
        if self._tokenizer.decode(self._encoded(text)).replace(" ", "") != text:
            raise ConfigError(
                f"{path} has no tokens for {text!r}",
                "name another model: python -m trainer.tiny make --task calculator",
            )
        # A connection a call: one that the relay closes for idleness may be closed just as the next call takes it.
        unbounded = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx2.AsyncClient(timeout=None, limits=unbounded)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with self._http:
            yield

    def ready(self) -> wire.Ready:
        source = Path(self._task.__file__).read_bytes()
        version = f"{self._setup.environment}@{blake3(source).hexdigest(8)}"
        return wire.Ready(self._task.TASKS, blake3(version.encode()).hexdigest(16), version)

    async def play(self, ask: wire.Play, playing: Playing) -> wire.Played:
        """One episode, from its prompt to its reward. Raises nothing but what ends this process."""
        try:
            if self._task is proposer_solver:
                return await self._two_agents(ask, playing)
            return await self._played(ask, playing)
        except (_Failed, httpx2.HTTPError, TimeoutError, ValueError) as error:
            return wire.Played(ask.episode, error=type(error).__name__.lstrip("_"), output=str(error))

    async def _played(self, ask: wire.Play, playing: Playing) -> wire.Played:
        rollout, talk = uuid.uuid4().hex, _Conversation()
        self._relay.agent(playing, rollout)
        try:
            async with asyncio.timeout(self._setup.seconds):
                over = await self._to_the_end(calculator.task(ask.task), ask, rollout, talk)
        except TimeoutError:
            over = calculator.Ended(0.0, "timeout")
        taken, reward, rewards = playing.taken(), over.reward, None
        if self._steps:
            rewards = calculator.step_rewards(calculator.task(ask.task), talk.words)
            reward = math.fsum(rewards)
        return wire.Played(
            ask.episode,
            reward,
            {"answered": float(not over.why), "tool_calls": float(len(taken) - (not over.why))},
            branches.rows_of([talk.nodes], talk.turns, rewards),
            tuple(call for call, _ in taken),
            tuple(version for _, version in taken),
            "length" if talk.truncated or over.why else "stop",
            over.why,
        )

    async def _two_agents(self, ask: wire.Play, playing: Playing) -> wire.Played:
        """One turn of each: rows, calls and rewards by the run that answers for the agent."""
        talks: dict[str, _Conversation] = {}

        async def said(agent: str, text: str) -> str | None:
            """None: the episode has used up its budget, and the agent no part in it."""
            rollout, talk = uuid.uuid4().hex, talks.setdefault(agent, _Conversation())
            self._relay.agent(playing, rollout, self._setup.policies.get(agent, ""))
            talk.heard(self._encoded(text))
            try:
                return await self._turn(ask, rollout, talk, most=1)
            except _Spent:
                del talks[agent]
                return None

        async with asyncio.timeout(self._setup.seconds):
            proposal = await said(proposer_solver.PROPOSER, proposer_solver.hint(ask.task)) or ""
            question = proposer_solver.asked(proposal)
            answer = await said(proposer_solver.SOLVER, question) if question else None
        rewards = proposer_solver.rewards(proposal, answer)
        parts = {
            policy: _part(policy, self._setup, talks, rewards, playing)
            for policy in ("", *_others(self._setup))
        }
        mine = parts.pop("")
        if mine is None and not playing.stopped_by:
            return wire.Played(ask.episode, error="no agent of this run spoke")
        taken = playing.taken()
        return wire.Played(
            ask.episode,
            mine.reward if mine is not None else 0.0,
            {f"reward_{agent}": reward for agent, reward in sorted(rewards.items())},
            mine.branches if mine is not None else (),
            mine.calls if mine is not None else (),
            tuple(version for _, version in taken),
            "length" if playing.stopped_by else "stop",
            playing.stopped_by,
            others=tuple(part for part in parts.values() if part is not None),
        )

    async def _to_the_end(
        self, terms: tuple[int, ...], ask: wire.Play, rollout: str, talk: _Conversation
    ) -> calculator.Ended:
        limits, turn = self._setup, 0
        talk.heard(self._encoded(calculator.prompt(terms)))
        while True:
            turn += 1
            try:
                text = await self._turn(ask, rollout, talk)
            except _Spent:
                return calculator.Ended(0.0, OVER_BUDGET)
            reply = calculator.replied(terms, turn, text)
            if isinstance(reply, calculator.Ended):
                return reply
            if turn == limits.turns:
                return calculator.Ended(0.0, "max_turns")
            if limits.tokens and talk.generated >= limits.tokens:
                return calculator.Ended(0.0, "max_output_tokens")
            talk.heard(self._encoded(reply.text))
            if len(talk.tokens) >= limits.context_length:
                return calculator.Ended(0.0, "context_length")

    async def _turn(self, ask: wire.Play, rollout: str, talk: _Conversation, most: int = 0) -> str:
        """What the model says next, `most` tokens where that is not 0. Raises `_Failed`."""
        room = most or self._setup.context_length - len(talk.tokens)
        most = min(int(ask.sampling.get("max_tokens") or room), room)  # type: ignore[arg-type]  # a whole number: the run checked it
        body: dict[str, Any] = {
            "token_ids": talk.tokens,
            "sampling_params": {**ask.sampling, "max_tokens": most, "logprobs": 1},
        }
        reply = await self._http.post(
            f"{self._relay.base_url}/inference/v1/generate", json=body, headers={SESSION: rollout}
        )
        if is_budget_spent(reply.status_code, reply.text):
            raise _Spent
        if reply.status_code != 200:
            raise _Failed(f"the model's endpoint answered {reply.status_code}: {reply.text[:500]}")
        [choice] = reply.json()["choices"]
        logprobs = [float(one["logprob"]) for one in choice["logprobs"]["content"]]
        text = str(self._tokenizer.decode(choice["token_ids"])).replace(" ", "")
        talk.said(choice["token_ids"], logprobs, text)
        talk.truncated |= choice["finish_reason"] == "length"
        return text

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _others(setup: wire.Setup) -> list[str]:
    """The other runs that answer for agents."""
    return sorted(set(setup.policies.values()))


def _part(
    policy: str,
    setup: wire.Setup,
    talks: dict[str, _Conversation],
    rewards: dict[str, float],
    playing: Playing,
) -> wire.PolicyPart | None:
    """What the agents of one run said, and the mean of their rewards; None where none of them spoke. `policy` "": of this run."""
    mine = [agent for agent in talks if setup.policies.get(agent, "") == policy]
    if not mine:
        return None
    return wire.PolicyPart(
        policy or setup.name,
        sum(rewards[agent] for agent in mine) / len(mine),
        branches.rows_of([talks[agent].nodes for agent in mine]),
        tuple(call for call, _ in playing.taken(policy)),
    )
