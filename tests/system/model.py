"""The model that the system tests and the chaos runs train."""

from __future__ import annotations

import json
from pathlib import Path


def write_small_model(path: Path, *, hidden: int = 32) -> None:
    """A random Qwen3 of two narrow layers (of `hidden` values) with the sorting task's tokenizer, in the folder `path`."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainer.tasks import sort
    from trainer.tiny import model_config

    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(model_config(hidden=hidden, layers=2)))
    sort.write_tokenizer(path)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(path, local_files_only=True), dtype=torch.float32
    )
    save_file(
        {name: value.detach().contiguous() for name, value in model.named_parameters()},
        path / "model.safetensors",
    )
