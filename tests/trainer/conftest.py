"""A decoder small enough to build in a moment, as a Hugging Face folder, and rows to train it on."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM

from trainer import tiny
from trainer.loop import comm
from trainer.loop.ending import SIGNALS
from trainer.tasks import sort


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = tiny.model_config(hidden=32, layers=2) | {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    (folder / "config.json").write_text(json.dumps(config))
    sort.write_tokenizer(folder)
    state = torch.random.get_rng_state()
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    torch.random.set_rng_state(state)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
                * 0.05
            )
    save_file(
        {name: value.detach() for name, value in model.named_parameters()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    yield comm.join(comm.Solo())
    comm.disconnect()


@pytest.fixture
def rng() -> random.Random:
    return random.Random(7)


@pytest.fixture
def signals() -> Iterator[None]:
    """The trainer runs in this process: its handlers go with it, and its process group where it failed, as with its own process."""
    numbers = (*SIGNALS, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    comm.disconnect()
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
