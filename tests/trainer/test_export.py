"""A checkpoint as a Hugging Face folder: transformers reads the very weights that were published."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh

from scavenger.config import AlgorithmSection, LoraSection, OptimizerSection, RunConfig
from scavenger.errors import ConfigError, WeightsError
from scavenger.weights import files
from tests.trainer import published
from tests.trainer.published import whole
from tests.trainer.rows import make_group
from tests.trainer.test_local import ROOT, write_run
from trainer import export
from trainer.algorithms.rows import resolve
from trainer.checkpoint import checkpoint
from trainer.checkpoint.saving import Saver
from trainer.data.batching import Micro
from trainer.loop.comm import Solo
from trainer.loop.publish import Publisher
from trainer.loop.ranks import Ranks
from trainer.model.learner import Learner, load_model

OFF = LoraSection()


def config_of(folder: Path, model: Path, **more: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "r", "steps": 1, "state_dir": folder, "out_dir": folder},
            "model": {"path": model, "context_length": 24},
            "sampling": {"max_tokens": 8},
        }
        | more
    )


def trained(
    folder: Path, model: Path, mesh: DeviceMesh, lora: LoraSection = OFF, tokenizer: bytes = b""
) -> tuple[Learner, checkpoint.CheckpointState]:
    """A learner after one step, and its checkpoint in `folder`. `tokenizer`: published with its weights."""
    learner = Learner(
        model,
        mesh,
        recipe=resolve(AlgorithmSection(), 8),
        optimizer=OptimizerSection(lr=0.02),
        temperature=1.0,
        deterministic=False,
        lora=lora,
    )
    learner.train(Micro(tuple(row for number in range(3) for row in make_group(number)), 0))
    learner.update(12.0, lr=0.02)
    root = _root(learner, tokenizer)
    state = checkpoint.CheckpointState(
        1,
        3,
        root,
        3,
        0,
        1,
        "float32",
        1,
        weights_dtype="bfloat16",
        adapters=bool(lora.rank),
        tokenizer=files.digest(tokenizer),
    )
    saver = Saver()
    saver.begin(learner.state(), checkpoint.prepare(folder, 1, 1))
    saver.wait()
    checkpoint.complete(folder, state)
    return learner, state


def _root(learner: Learner, tokenizer: bytes) -> str:
    """Of what its trainer publishes."""
    ranks = Ranks(Solo(), learner, Publisher(published.Kept(), tokenizer=tokenizer))
    if ranks.trains_adapters:
        ranks.build_base(2)
    return ranks.build_version(3, "bfloat16").root.hex()


def test_an_export_is_the_published_version(model_folder: Path, mesh: DeviceMesh, tmp_path: Path) -> None:
    learner, state = trained(tmp_path, model_folder, mesh)
    told = export.export(config_of(tmp_path, model_folder), tmp_path / "out", "auto", "")
    assert told.endswith(f"root {state.root}, as published")
    model = load_model(tmp_path / "out", torch.bfloat16)
    for name, value in whole(learner).items():
        assert torch.equal(model.get_parameter(name), value.bfloat16())
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_masters_can_be_exported_in_their_own_type(
    model_folder: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    learner, _ = trained(tmp_path, model_folder, mesh)
    told = export.export(config_of(tmp_path, model_folder), tmp_path / "out", "auto", "float32")
    assert "not compared with what was published: its version was published in another type" in told
    model = load_model(tmp_path / "out", torch.float32)
    assert all(torch.equal(model.get_parameter(name), value) for name, value in whole(learner).items())


def test_adapters_are_merged(model_folder: Path, mesh: DeviceMesh, tmp_path: Path) -> None:
    learner, _ = trained(tmp_path, model_folder, mesh, LoraSection(rank=2, alpha=4.0))
    config = config_of(tmp_path, model_folder, lora={"rank": 2, "alpha": 4.0})
    told = export.export(config, tmp_path / "out", "auto", "float32", merged=True)
    assert told.endswith(", adapters and base as published")
    assert "the whole model, adapters merged, of step-00000001, " in told
    assert " tensors in float32, " in told
    model, base = load_model(tmp_path / "out", torch.float32), load_model(model_folder, torch.float32)
    assert all(torch.equal(model.get_parameter(name), value) for name, value in whole(learner).items())
    assert any(not torch.equal(base.get_parameter(name), value) for name, value in model.named_parameters())
    with pytest.raises(ConfigError, match=r"does not hold what this run trains(.|\n)*\[lora\]"):
        export.export(config_of(tmp_path, model_folder), tmp_path / "other", "auto", "")


@pytest.mark.parametrize("rank", [0, 2])
def test_weights_that_were_published_with_a_tokenizer_are_exported_and_compared_with_it(
    rank: int, model_folder: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_folder, model)
    tokenizer = files.read_tokenizer(model)
    lora = LoraSection(rank=rank, alpha=4.0)
    learner, state = trained(tmp_path, model, mesh, lora, tokenizer)
    assert state.root != _root(learner, b""), "the root covers it"
    config = config_of(tmp_path, model, lora={"rank": rank, "alpha": 4.0})
    told = export.export(config, tmp_path / "out", "auto", "", merged=True)
    assert told.endswith("as published")
    assert f"{len(whole(learner))} tensors" in told
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == whole(learner).keys()
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == tokenizer
    (model / "tokenizer.json").write_bytes(tokenizer + b" ")
    for merged in (True, False):
        with pytest.raises(WeightsError, match=r"model\.path is another model now"):
            export.export(config, tmp_path / "other", "auto", "", merged=merged)


def test_adapters_of_another_base_are_not_exported(
    model_folder: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    trained(tmp_path, model_folder, mesh, LoraSection(rank=2, alpha=4.0))
    other = tmp_path / "other"
    shutil.copytree(model_folder, other)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] += 1.0
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightsError, match="is another model now"):
        export.export(
            config_of(tmp_path, other, lora={"rank": 2, "alpha": 4.0}), tmp_path / "out", "auto", ""
        )
    with pytest.raises(WeightsError, match="published with"):  # another scale makes other weights
        export.export(
            config_of(tmp_path, model_folder, lora={"rank": 2, "alpha": 8.0}), tmp_path / "out", "auto", ""
        )
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_not_exported(model_folder: Path, mesh: DeviceMesh, tmp_path: Path) -> None:
    trained(tmp_path, model_folder, mesh)
    shard = next(checkpoint.found(tmp_path)[0].glob("*.safetensors"))
    with shard.open("r+b") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        data = bytearray(file.seek(start) and file.read())
        file.seek(start)
        file.write(bytes(byte ^ 1 for byte in data))
    with pytest.raises(WeightsError, match="published with"):
        export.export(config_of(tmp_path, model_folder), tmp_path / "out", "auto", "")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", ["", "bfloat16"])
def test_adapters_are_an_adapter_folder_that_peft_reads(
    dtype: str, model_folder: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    learner, _ = trained(tmp_path, model_folder, mesh, LoraSection(rank=2, alpha=4.0))
    config = config_of(tmp_path, model_folder, lora={"rank": 2, "alpha": 4.0})
    (tmp_path / "out").mkdir()
    told = export.export(config, tmp_path / "out", "auto", dtype, step=1)
    assert "an adapter folder (LoRA, rank 2, alpha 4), of step-00000001, " in told
    assert f" tensors in {dtype or 'float32'}, for {model_folder}" in told
    assert told.endswith("; as published")
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
    }
    assert not (tmp_path / "out" / "config.json").exists(), "it is no model"
    kinds = {value.dtype for value in load_file(tmp_path / "out" / "adapter_model.safetensors").values()}
    assert kinds == {torch.bfloat16 if dtype else torch.float32}
    base = load_model(model_folder, torch.float32)
    with_adapters = peft.PeftModel.from_pretrained(base, str(tmp_path / "out"))
    model = with_adapters.merge_and_unload()
    bound = 1e-2 if dtype else 1e-6
    for name, value in whole(learner).items():
        torch.testing.assert_close(model.get_parameter(name), value, rtol=bound, atol=bound)


def test_any_step_is_exported_and_one_that_is_not_kept_is_told(
    model_folder: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    trained(tmp_path / "x" / "local", model_folder, mesh)
    config = config_of(tmp_path / "x" / "local", model_folder)
    assert "the whole model, of step-00000001, " in export.export(
        config, tmp_path / "out", "auto", "", step=1
    )
    with pytest.raises(ConfigError, match=r"no complete checkpoint of step 7; there is 1\n"):
        export.export(config, tmp_path / "other", "auto", "", step=7)
    with pytest.raises(WeightsError, match="exists and is not an empty folder"):
        export.export(config, tmp_path / "out", "auto", "")
    with pytest.raises(ConfigError, match="a try with --local has some: add --local"):
        export.export(config_of(tmp_path / "x", model_folder), tmp_path / "other", "auto", "")


def test_a_damaged_checkpoint_hinders_no_choice_of_another_and_two_choices_are_refused(
    tmp_path: Path,
) -> None:
    good, bad = (checkpoint.folder(tmp_path) / checkpoint.name(step) for step in (4, 2))
    for path in (good, bad):
        path.mkdir(parents=True)
        (path / checkpoint.STATE_FILE).write_text("damaged")
    assert export.choose(tmp_path, "auto", 4) == good
    assert export.choose(tmp_path, str(good), None) == good
    with pytest.raises(ConfigError, match="there is 2, 4"):
        export.choose(tmp_path, "auto", 3)
    with pytest.raises(ConfigError, match=r"--step 2 and --checkpoint .* name two checkpoints"):
        export.choose(tmp_path, str(good), 2)


def test_the_command_says_what_is_missing(model_folder: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path, model_folder, steps=1, out="x")
    argv = [sys.executable, "-m", "scavenger", "checkpoint", "export", str(run), str(tmp_path / "out")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == ConfigError.exit_code
    assert "holds no complete checkpoint" in done.stderr
