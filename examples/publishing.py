"""Trainers of others before the daemon: a run that is opened, published to and closed, how an engine is built, and weights as bytes."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self
from urllib.request import Request, urlopen

import torch
from transformers import TrainerCallback

from scavenger.client import Client, Run
from scavenger.config import RunConfig
from scavenger.errors import ScavengerError, describe
from scavenger.protocol import messages
from scavenger.protocol.keys import read_rendezvous
from scavenger.weights import files
from scavenger.weights import manifest as manifests
from scavenger.weights.memory import Buffer
from scavenger.weights.source import WeightServer, serving_interface

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class DaemonRun(TrainerCallback):
    """One run of a daemon, for as long as a trainer has it. A trainer that fails, or is told to end, closes it with the reason.

    A step's order is what lets a killed trainer go on: weights are published, then the step is committed, then a checkpoint covers it.
    """

    def __init__(self, config: RunConfig, tokenizer: bytes) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._client = Client.connect(config.run.state_dir, config.run.key)
        self._source = WeightServer(
            serving_interface(config.weights.listen, read_rendezvous(config.run.state_dir).endpoint),
            config.weights.advertise,
        )
        self._run: Run | None = None
        self._version = 0
        self._root = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if self._run is not None:
                self._run.close_run(
                    "finished" if error is None else "failed", "" if error is None else describe(error)
                )
        except ScavengerError as also:
            print(f"the daemon was not told: {also}", file=sys.stderr)
        finally:
            self._source.close()
            self._client.close()

    @property
    def run(self) -> Run:
        assert self._run is not None, "training has not begun"
        return self._run

    def open(self, step: int) -> None:
        """`step`: that of the checkpoint which the trainer resumed from, or 0."""
        spec, tokenizer = engine_spec(self._config), str(self._config.model.path / "tokenizer.json")
        self._run = self._client.open_run(self._config, engine=spec, tokenizer=tokenizer, resume_step=step)

    def publish(self, step: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Give out a step's weights, every parameter under its name in the checkpoint."""
        self._version = self.run.next_version
        manifest, blob = pack_weights(parameters, self._version, self._config.weights.dtype, self._tokenizer)
        self._root = manifest.root
        self.run.publish(step, manifest, self._source.publish(manifest, blob))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.run.checkpoint(state.global_step, self._version, self._root, str(path))


def engine_spec(config: RunConfig) -> messages.EngineSpec:
    """What an engine is built from; weights come through `publish`."""
    engine, model = config.engine, config.model
    return messages.EngineSpec(
        engine.name,
        (model.path / "config.json").read_text(),
        "bfloat16" if torch.cuda.is_available() else "float32",
        engine.max_batch,
        model.context_length,
        engine.pace,
        engine.gpu_memory_share,
        engine.eager,
    )


def gateway_key(config: RunConfig, client: str) -> tuple[str, str]:
    """(endpoint, key) of this host's gateway of the run, for a program of that name."""
    announced = json.loads((config.run.out_dir / f"gateway.{socket.gethostname()}.json").read_text())
    asked = Request(
        f"{announced['endpoint']}/clients",
        json.dumps({"client": client}).encode(),
        {"Authorization": f"Bearer {announced['admin_key']}"},
    )
    with urlopen(asked, timeout=60) as answer:
        return announced["endpoint"], json.load(answer)["api_key"]


def pack_weights(
    parameters: Mapping[str, torch.Tensor], version: int, dtype: str, tokenizer: bytes
) -> tuple[manifests.Manifest, Buffer]:
    """The manifest and the bytes of a model's parameters, tied ones once; and its tokenizer.json, which engines need for stop texts."""
    shapes = {name: (dtype, tuple(value.shape)) for name, value in parameters.items()}
    beside = {files.TOKENIZER: (files.DTYPE, (len(tokenizer),))} if tokenizer else {}
    table = manifests.layout({**shapes, **beside})
    buffer = Buffer(sum(tensor.nbytes for tensor in table))
    for tensor in table:
        if files.is_file(tensor.name):
            buffer.view[tensor.offset : tensor.offset + tensor.nbytes] = tokenizer
            continue
        value = parameters[tensor.name].detach().to(DTYPES[dtype]).cpu().contiguous()
        buffer.view[tensor.offset : tensor.offset + tensor.nbytes] = memoryview(
            value.view(-1).view(torch.uint8).numpy()
        )
    size = manifests.chunk_nbytes_of(buffer.nbytes)
    return manifests.seal(version, table, manifests.hashes_of(buffer.view, size), chunk_nbytes=size), buffer
