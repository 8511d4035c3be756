"""What rank 0 and an environment worker say to each other, in length-prefixed MessagePack over pipes (`rewards.framed`).

    rank 0 -> worker   Setup once, then Play for each episode
    worker -> rank 0   Ready once, then Played for each episode, in the order in which they end

Boundary: the wire, so that a worker's interpreter needs nothing else of the trainer.
"""

from __future__ import annotations

import msgspec


class Sandbox(msgspec.Struct, frozen=True):
    """The boxes in which plain processes run. Limits as `trainer.sandbox.plan.Limits`; `readable`, `hidden`: paths."""

    memory_mb: int
    processes: int
    disk_mb: int
    output_mb: int
    cpu_s: float
    readable: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """Of a run. `arguments`, `renderer`: JSON. `seconds`, `turns`, `tokens`: of an agent in an episode at most, 0 = no bound."""

    environment: str
    arguments: str
    renderer: str
    model: str  # the model's folder
    name: str  # by which the gateway knows it
    context_length: int
    endpoint: str  # of the gateway
    on_divergence: str
    turns: int
    tokens: int
    seconds: float
    sandbox: Sandbox | None = None
    effects: str = "none"
    on_doubt: str = "fail"


class Play(msgspec.Struct, frozen=True, tag="play"):
    """Play one episode. `episode`, `key`: of the gateway. `task`: its place in the task set. `sampling`: by vLLM's names."""

    episode: str
    key: str
    task: int
    seed: int
    sampling: dict[str, float | int | list[str]]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The environment is loaded, or (`error`) it cannot be. `tasks`: how many, 0 = without end. `digest`: of tasks and environment."""

    tasks: int = 0
    digest: str = ""
    version: str = ""
    error: str = ""
    remedy: str = ""
    output: str = ""


class Branch(msgspec.Struct, frozen=True):
    """One row to train: as `trainer.data.batching.TrainRow`. `trained`: how many of its tokens are."""

    prompt: bytes
    completion: bytes
    mask: bytes
    behaviour: bytes
    trained: int


class Played(msgspec.Struct, frozen=True, tag="played"):
    """An episode is over. `error`: why it counts for nothing. `again`: why it must be played anew, under another name; `gone`: because the
    ledger has ended this one. `final`: nor is another try made of one that failed. `note`: what else was found, such as where it branched.

    `calls`: names of the model calls that it consists of; `versions`: of the weights that answered them, in the same order. `finish`:
    "length" where a limit ended it, else "stop".
    `stopped_by`: what ended an agent before its own end; a sandbox's limit is `sandbox:LIMIT`.
    """

    episode: str
    reward: float = 0.0
    parts: dict[str, float] = {}
    branches: tuple[Branch, ...] = ()
    calls: tuple[str, ...] = ()
    versions: tuple[int, ...] = ()
    finish: str = "stop"
    stopped_by: str = ""
    seconds: float = 0.0
    seconds_model: float = 0.0
    error: str = ""
    output: str = ""
    again: str = ""
    gone: bool = False
    final: bool = False
    note: str = ""


to_worker: msgspec.msgpack.Decoder[Setup | Play] = msgspec.msgpack.Decoder(Setup | Play)
to_trainer: msgspec.msgpack.Decoder[Ready | Played] = msgspec.msgpack.Decoder(Ready | Played)
