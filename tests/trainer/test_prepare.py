"""`scavenger init`: what a run's files say, and that everything which would stop it is told before a job is submitted."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scavenger import keys
from scavenger.cluster.sandbox import SlurmSandbox
from scavenger.config import read_run
from scavenger.errors import ConfigError, Finding
from scavenger.weights import rdma
from trainer.prepare import __main__ as program
from trainer.prepare import check, memory, model, rows, weights
from trainer.prepare.check import Gpus
from trainer.prepare.memory import Job, Shape, Version

ROOT = Path(__file__).resolve().parents[2]
NO_GPU = Gpus(1, 0, 0.0)


@pytest.fixture
def own_model(model_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}{n + 1}>", "answer": str(n), "level": 1}) + "\n" for n in range(40)))
    return path


@pytest.fixture
def site(tmp_path: Path) -> Path:
    state = tmp_path / "state"
    keys.init_state(state, "owner")
    pair = keys.generate()
    keys.write_rendezvous(state, keys.Rendezvous("tcp://127.0.0.1:1", pair.public, 1, 1, "login1"))
    return state


def draft(folder: Path, model: Path, data: Path, *more: str) -> int:
    return program.main(["draft", str(folder), f"--model={model}", f"--data={data}", "--engine=reference", "--gpus=2", *more])


@pytest.fixture
def run(tmp_path: Path, own_model: Path, data: Path, site: Path) -> Path:
    assert draft(tmp_path / "my-run", own_model, data, f"--state-dir={site}") == 0
    return tmp_path / "my-run" / "run.toml"


def change(run: Path, old: str, new: str) -> None:
    text = run.read_text()
    assert text.count(old) == 1, old
    run.write_text(text.replace(old, new))


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))


def refused(run: Path, gpus: Gpus = NO_GPU) -> dict[str, str]:
    return {finding.what: finding.problem for finding in check.check(run, gpus) if finding.problem}


# ---------------------------------------------------------------- what is written


def test_the_files_of_a_new_run_can_be_submitted_as_they_are(run: Path, own_model: Path, data: Path) -> None:
    config = read_run(run)
    assert (config.run.name, config.model.path, config.data.path, config.data.task) == ("my-run", own_model, data, "jsonl")
    assert (config.data.prompt_field, config.data.answer_field, config.data.chat) == ("question", "answer", False)
    assert (config.reward.function, config.reserved.workers, config.weights.listen) == ("trainer.verifiers:math", 2, "0.0.0.0")
    assert config.model.context_length == 64
    assert config.sampling.max_tokens == 32
    assert "#stop_token_ids = [1]" in run.read_text()
    script = run.with_name("train.sbatch")
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert check.gpus_of(script.read_text()) == Gpus(2, 2, 80.0)
    findings = list(check.check(run, check.gpus_of(script.read_text())))
    assert [finding.problem for finding in findings] == [""] * 12
    assert not any(finding.skipped for finding in findings)


def test_what_was_assumed_is_told_once_with_where_to_change_it(
    own_model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft(tmp_path / "one", own_model, data)
    block = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    told = "\n".join(block)
    for words in ("--partition=reserved", "80 GB", "no --account", "run.state_dir", "model.context_length = 64", "reward.function = "):
        assert sum(words in line for line in block) == 1, (words, told)
    assert "GPUs a node" not in told, "--gpus was given"
    assert all("train.sbatch" in line or "run.toml" in line for line in block)
    assert max(map(len, block)) <= 140
    made = read_run(tmp_path / "one" / "run.toml")
    size = f"{made.data.prompts_per_step} x {made.data.samples_per_prompt}"
    assert f"{made.run.steps} steps of {size} answers, lr {made.optimizer.lr:g} ".replace("e-0", "e-") in told
    (days,) = re.findall(r"^#SBATCH --time=(\d+)-00:00:00$", (tmp_path / "one" / "train.sbatch").read_text(), re.M)
    assert f"no --account, no --qos, {days} days " in told
    draft(tmp_path / "two", own_model, data, "--partition=gold", "--gpu-memory-gb=40", f"--state-dir={tmp_path}", "--reward=a:b")
    told = capsys.readouterr().out
    for words in ("--partition=", "GB of memory", "run.state_dir", "reward.function"):
        assert words not in told


def test_existing_files_are_never_overwritten_without_force(
    run: Path, own_model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.write_text("mine")
    assert draft(run.parent, own_model, data) == 2
    assert run.read_text() == "mine"
    assert "--force" in capsys.readouterr().err
    run.unlink()
    script = run.with_name("train.sbatch")
    script.write_text("mine")
    assert draft(run.parent, own_model, data) == 2
    assert (run.exists(), script.read_text()) == (False, "mine")
    assert draft(run.parent, own_model, data, "--force") == 0
    assert "[model]" in run.read_text()


def test_a_chat_model_gets_its_template_its_end_tokens_and_no_thoughts(own_model: Path, data: Path, tmp_path: Path) -> None:
    (own_model / "chat_template.jinja").write_text("{% if enable_thinking %}9{% endif %}{{ messages[-1].content }}")
    edit(own_model / "generation_config.json", eos_token_id=[1, 0])
    facts = model.look(own_model)
    assert (facts.end, facts.end_source, facts.model_type) == ((1, 0), "generation_config.json", "qwen3")
    assert draft(tmp_path / "chatty", own_model, data) == 0
    config = read_run(tmp_path / "chatty" / "run.toml")
    assert (config.data.chat, config.data.chat_options) == (True, {"enable_thinking": False})
    assert "boxed" in config.data.system


def test_columns_are_found_or_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "q", "solution": "ab", "extra": 1}\n')
    found = rows.look(path)
    assert (found.prompt_field, found.answer_field, found.mathematics) == ("question", "solution", False)
    path.write_text('{"q": "1 + 1", "a": "2"}\n')
    with pytest.raises(ConfigError, match=r"which column is the prompt\? There is 'q', 'a'") as error:
        rows.look(path)
    assert "--prompt-field" in error.value.remedy
    found = rows.look(path, "q", "a")
    assert (found.prompt_field, found.answer_field, found.mathematics) == ("q", "a", True)
    with pytest.raises(ConfigError, match="no column 'z'"):
        rows.look(path, "z", "a")


def test_a_folder_with_splits_is_read_by_split(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "main").mkdir()
    for name in ("train-00000-of-00001", "test-00000-of-00001"):
        parquet.write_table(arrow.table({"question": [name], "answer": ["x #### 1"]}), tmp_path / "main" / f"{name}.parquet")
    found = rows.look(tmp_path)
    assert (found.task, found.mathematics) == ("parquet", True)
    assert found.path == str(tmp_path / "main" / "train*.parquet")
    assert found.held_out == str(tmp_path / "main" / "test*.parquet")
    assert found.rows[0]["question"].startswith("train")


@pytest.mark.parametrize(
    ("train", "test", "problems"), [(1, 0, 0), (2, 0, 1), (40, 0, 8), (220, 0, 44), (5000, 0, 256), (40, 30, 30), (40, 300, 256)]
)
def test_a_new_run_holds_out_no_more_problems_than_there_are(tmp_path: Path, train: int, test: int, problems: int) -> None:
    for name, count in (("train", train), ("test", test)):
        (tmp_path / f"{name}.jsonl").write_text('{"question": "1", "answer": "1"}\n' * count)
    found = rows.look(tmp_path)
    assert (found.problems, bool(found.held_out)) == (problems, bool(test))


@pytest.mark.parametrize("nothing", ["nothing.jsonl", "empty"])
def test_data_that_is_not_there_is_told(nothing: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"data\.path"):
        rows.look(tmp_path / nothing)


# ---------------------------------------------------------------- the model's folder


def test_a_wrong_model_path_is_refused_and_what_needs_it_is_skipped(run: Path, own_model: Path) -> None:
    change(run, f'path = "{own_model}"', 'path = "/nowhere/qwen"')
    findings = {finding.what: finding for finding in check.check(run, Gpus(1, 1, 80.0))}
    assert "there is no folder /nowhere/qwen" in findings["model"].problem
    assert "remedy: give the folder of a Hugging Face model" in findings["model"].problem
    assert {what for what, finding in findings.items() if finding.skipped} == {
        "tokenizer", "data and prompts", "reward", "adapters", "engine", "memory of the GPUs", "weights",
    }  # fmt: skip
    assert not findings["daemon and keys"].problem


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _shard_lost(folder: Path) -> None:
    edit(folder / "model.safetensors.index.json", weight_map={"a": "model-00001-of-00002.safetensors"})


def _pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


def _own_code(folder: Path) -> None:
    edit(folder / "config.json", auto_map={"AutoModelForCausalLM": "x.Y"})


def _other_config(folder: Path) -> None:
    edit(folder / "config.json", hidden_size=48)


def _more_layers(folder: Path) -> None:
    edit(folder / "config.json", num_hidden_layers=3)


def _strange(folder: Path) -> None:
    edit(folder / "config.json", model_type="nothing-known")


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (_no_config, "holds no config.json"),
        (_shard_lost, "lacks model-00001-of-00002.safetensors"),
        (_pointer, "is no safetensors file"),
        (_own_code, "brings its own code"),
        (_other_config, "are of two models: model.embed_tokens.weight has the shape (16, 32) there, not (16, 48)"),
        (_more_layers, "is not in the weight files"),
        (_strange, "config.json cannot be used"),
    ],
)
def test_a_folder_that_is_no_whole_model_is_refused(run: Path, own_model: Path, spoil: Any, cause: str) -> None:
    spoil(own_model)
    assert cause in refused(run)["model"]
    assert "remedy: " in refused(run)["model"]


# ---------------------------------------------------------------- where it goes


def test_an_out_dir_that_cannot_be_written_or_is_too_small_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.parent / "file").write_text("")
    change(run, 'out_dir = "out"', 'out_dir = "file/out"')
    assert "file: it is no folder" in refused(run)["out_dir and figures"]
    change(run, 'out_dir = "file/out"', 'out_dir = "new/out"')
    assert "out_dir and figures" not in refused(run)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100_000))
    assert "0.0 GB are free\n  remedy: name a file system with more room" in refused(run)["out_dir and figures"]
    assert not (run.parent / "new").exists(), "a check writes nothing"


@pytest.mark.parametrize(("name", "value"), [("tensorboard", "true"), ("wandb", '"offline"')])
def test_figures_for_a_package_that_is_not_there_are_refused(run: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked, package=None: None if asked == name else real(asked, package))
    run.write_text(run.read_text() + f"[monitor]\n{name} = {value}\n")
    assert f'pip install ".[{name}]"' in refused(run)["out_dir and figures"]


# ---------------------------------------------------------------- tokenizer, data, reward


def _many_tokens(folder: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({f"w{i}": i for i in range(100)} | {"<eos>": 100}, unk_token="w0")).save(str(folder / "tokenizer.json"))


def _broken(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (_many_tokens, "the tokenizer does not match the model"),
        (_broken, "tokenizer.json"),
        (lambda folder: edit(folder / "generation_config.json", eos_token_id=15), "token 15 is to end an answer"),
        (lambda folder: edit(folder / "generation_config.json", eos_token_id=4), "the tokenizer ends texts with '<eos>' (token 1)"),
    ],
)
def test_a_tokenizer_of_another_model_is_refused(run: Path, own_model: Path, spoil: Any, cause: str) -> None:
    spoil(own_model)
    found = refused(run)["tokenizer"]
    assert cause in found
    assert "remedy: " in found


def test_a_missing_column_is_named_with_those_that_are_there(run: Path) -> None:
    change(run, 'answer_field = "answer"', 'answer_field = "solution"')
    found = refused(run)["data and prompts"]
    assert "no 'solution'; there is 'question', 'answer', 'level'" in found
    assert "remedy: set data.answer_field" in found


def test_overlong_prompts_are_told_with_their_rows(run: Path, data: Path) -> None:
    with data.open("a") as file:
        file.write(json.dumps({"question": "1" * 50, "answer": "1"}) + "\n")
    found = refused(run)["data and prompts"]
    assert "1 of 41 prompts do not have 1 to 32 tokens: row 40 has 50" in found
    assert 'data.on_overlong = "drop"' in found
    change(run, 'on_overlong = "stop"', 'on_overlong = "drop"')
    (said,) = [finding.note for finding in check.check(run, NO_GPU) if finding.what == "data and prompts"]
    assert "they are left out" in said


RAISES = 'def f(prompt, answer, meta):\n    return float(meta["no such column"])\n'
NAN = 'def f(prompt, answer, meta):\n    return float("nan")\n'
SAME = "def f(prompt, answer, meta):\n    return 1.0\n"


@pytest.mark.parametrize(
    ("source", "cause"),
    [(RAISES, "KeyError"), (NAN, "nan"), ("import nothing_there\n", "reward.function"), ("g = 1\n", "reward.function")],
)
def test_a_reward_function_that_cannot_work_is_refused(
    run: Path, source: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use(run, source, tmp_path, monkeypatch)
    assert cause in refused(run)["reward"]


def _use(run: Path, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_rewards.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    change(run, '"trainer.verifiers:math"', '"their_rewards:f"')


def test_a_reward_that_cannot_tell_answers_apart_is_pointed_at(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _use(run, SAME, tmp_path, monkeypatch)
    (said,) = [finding for finding in check.check(run, NO_GPU) if finding.what == "reward"]
    assert not said.problem
    assert "LOOK" in said.note


def test_a_reward_function_sees_the_prompt_as_it_will_in_the_run(
    run: Path, own_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_model / "chat_template.jinja").write_text("<eos>{{ messages[-1].content }}<eos>")
    change(run, "chat = false", "chat = true")
    _use(run, "def f(prompt, answer, meta):\n    assert prompt and '<eos>' not in prompt\n    return len(answer)\n", tmp_path, monkeypatch)
    assert "reward" not in refused(run)


# ---------------------------------------------------------------- GPUs, engine, daemon


BIG = Shape(8_000_000_000, 36, 4096, 12288, 151936)
FITS = Job(16, 80.0, 8192, True, BIG.parameters, False, False, 0.9, 1)


@pytest.mark.parametrize(
    ("changes", "cause", "remedy"),
    [
        ({"ranks": 1}, "too big for the GPUs: 128.0 GB of weights", "train on 3 GPUs or more"),
        ({"ranks": 8, "micro_tokens": 65536}, "a micro-batch does not fit", "lower trainer.micro_batch_tokens"),
        ({"checkpointing": False, "micro_tokens": 32768}, "a micro-batch does not fit", "activation_checkpointing = true"),
        ({"engine_share": 0.2}, "too little is left for its cache", "raise run.gpus_per_engine"),
        ({"reserved": True}, "shares its GPU with the trainer", "engine.gpu_memory_share = 0.83"),
        ({"reserved": True, "ranks": 2, "micro_tokens": 512}, "do not fit on one GPU", "reserved.workers = 0"),
        ({"reference": True, "ranks": 2}, "too big for the GPUs: 80.0 GB", "lora.rank"),
    ],
)
def test_what_does_not_fit_is_told_with_its_figures(changes: dict[str, Any], cause: str, remedy: str) -> None:
    assert memory.problem(BIG, FITS) == ("", "")
    found = memory.problem(BIG, replace(FITS, **changes))
    assert cause in found[0]
    assert remedy in found[1]


def test_a_model_too_big_for_the_job_s_gpus_is_refused(run: Path) -> None:
    assert "memory of the GPUs" not in refused(run, Gpus(2, 2, 80.0))
    assert "remedy: " in refused(run, Gpus(2, 2, 0.0001))["memory of the GPUs"]


def test_what_a_draft_chooses_for_a_large_model_fits(own_model: Path, data: Path, tmp_path: Path) -> None:
    from trainer.prepare import draft as drafts

    large = replace(
        model.look(own_model), parameters=BIG.parameters, vocabulary=BIG.vocabulary,
        config={"hidden_size": BIG.hidden, "num_hidden_layers": BIG.layers, "intermediate_size": BIG.inner},
    )  # fmt: skip
    wish = drafts.Wish("r", tmp_path, 8, 2, 80.0, "p", "", "", "vllm", "py", tmp_path, 100)
    path = tmp_path / "run.toml"
    path.write_text(drafts.run_toml(large, rows.look(data), wish))
    config = read_run(path)
    job = replace(
        FITS, ranks=16, micro_tokens=config.trainer.micro_batch_tokens, checkpointing=config.trainer.activation_checkpointing,
        reserved=True, engine_share=config.engine.gpu_memory_share, engine_gpus=config.run.gpus_per_engine,
    )  # fmt: skip
    assert memory.problem(drafts.shape_of(large), job) == ("", "")


def test_an_engine_that_is_not_installed_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(run, 'name = "reference"', 'name = "vllm"')
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else real(name))
    assert 'pip install ".[vllm]"' in refused(run)["engine"]


# ---------------------------------------------------------------- adapters and weights


def settled(run: Path, section: str, lines: str) -> None:
    """Add keys to a section of the drafted file."""
    change(run, f"[{section}]\n", f"[{section}]\n{lines}\n")


def weights_told(run: Path, nodes: int = 1, at_hand: Path | None = None) -> str:
    """What the check of the weights alone says: its note, or cause and remedy."""
    config = read_run(run)
    try:
        return weights.check(config, model.look(config.model.path), nodes, at_hand)
    except ConfigError as error:
        return f"REFUSED {error}"


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("lm_head", "lm_head is the output head, whose weight many models share with the embeddings; set lora.rank = 0"),
        ("embed_tokens", "embed_tokens is Embedding, no linear layer"),
        ("input_layernorm", "no linear layer"),
        ("c_attn", "no layer of 'c_attn' is in the model"),
        ("proj", "no layer of 'proj' is in the model"),
    ],
)
def test_an_adapter_that_no_layer_can_have_is_refused_before_the_job(run: Path, target: str, why: str) -> None:
    change(run, "rank = 0  ", f'targets = ["q_proj", "{target}"]\nrank = 4')
    with pytest.raises(ConfigError, match=f"lora.targets: {target} cannot have an adapter: ") as found:
        weights.check_adapters(read_run(run))
    assert why in found.value.cause
    assert found.value.remedy == "name linear layers inside the decoder: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"


def test_adapters_and_their_base_are_among_the_checks(run: Path) -> None:
    change(run, "rank = 0  ", 'targets = ["q_proj", "down_proj"]\nrank = 4')
    findings = {finding.what: finding for finding in check.check(run, NO_GPU)}
    assert findings["adapters"].note == "rank 4 beside 4 layers"
    assert "on a base of 0 MiB" in findings["weights"].note
    assert not any(finding.problem for finding in findings.values())
    change(run, '"q_proj"', '"lm_head"')
    assert refused(run).keys() == {"adapters"}


def test_a_spool_that_cannot_be_written_is_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = tmp_path / "spool"
    settled(run, "weights", f'spool_dir = "{spool}"')
    assert "REFUSED" not in weights_told(run)
    assert not spool.exists(), "looked at, not made"
    spool.write_text("a file")
    assert f"REFUSED weights.spool_dir = '{spool}': {spool} is no folder" in weights_told(run)
    assert "remedy: name a folder that engines and all ranks see and may write" in weights_told(run)
    spool.unlink()
    spool.mkdir()
    may = os.access  # whoever runs this may be root, who may all
    monkeypatch.setattr(os, "access", lambda path, mode: path != spool and may(path, mode))
    assert f"{spool} cannot be written by this user" in weights_told(run)


def test_a_spool_without_room_for_three_versions_is_refused_with_both_figures(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(run, "weights", f'spool_dir = "{tmp_path}"')
    parameters = model.look(read_run(run).model.path).parameters
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=6 * parameters - 1))
    assert "REFUSED" in weights_told(run)
    assert "is to hold 3 versions of" in weights_told(run)
    (tmp_path / "my-run" / "version-1").mkdir(parents=True)
    (tmp_path / "my-run" / "version-1" / "weights.bin").write_bytes(b"x")  # goes when a newer one comes
    assert "REFUSED" not in weights_told(run)


def test_weights_that_engines_could_not_fetch_are_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(run, 'listen = "0.0.0.0"', 'listen = "127.0.0.1"\nnixl = true')
    assert 'remedy: set weights.listen = "0.0.0.0"' in weights_told(run, nodes=2)
    monkeypatch.setattr(rdma, "installed", lambda: False)
    assert 'pip install ".[nixl]"' in weights_told(run)
    monkeypatch.setattr(rdma, "installed", lambda: True)
    assert "REFUSED" not in weights_told(run)


def test_an_engine_s_job_with_too_little_memory_for_the_model_is_refused(run: Path, site: Path, tmp_path: Path) -> None:
    toml = tmp_path / "site.toml"

    def told(given: int, state: Path = site) -> str:
        toml.write_text(f'[daemon]\nstate_dir = "{state}"\n[harvest]\nmemory_mb_per_engine = {given}\n')
        return weights_told(run, at_hand=toml)

    least = memory.engine_host_mb(weights.version_of(read_run(run), model.look(read_run(run).model.path)), "reference", 0)
    assert f"{toml}: harvest.memory_mb_per_engine = {least - 1}, and this run's jobs need {least} at least" in told(least - 1)
    assert "remedy: set harvest.memory_mb_per_engine = 3072 there" in told(least - 1)
    assert "LOOK whether that does" in told(least)
    assert told(4096).endswith(f"{toml} gives it 4,096")
    assert "it gets its GPUs' share of a node" in told(0)
    assert "was not found from here" in told(1, tmp_path / "another"), "another site's says nothing of this run"
    assert "was not found from here" in weights_told(run)


def test_the_daemon_s_configuration_is_this_shell_s_or_the_run_s_own(
    run: Path, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = tmp_path / "site.toml"
    toml.write_text(f'[daemon]\nstate_dir = "{site}"\n[harvest]\nmemory_mb_per_engine = 1\n')
    monkeypatch.setenv("SCAVENGER_CONFIG", str(toml))
    assert "memory_mb_per_engine = 1, and" in refused(run)["weights"]
    monkeypatch.delenv("SCAVENGER_CONFIG")
    change(run, "#[daemon]\n#embedded = true", f'[daemon]\nconfig = "{toml}"\nembedded = true')
    assert "memory_mb_per_engine = 1, and" in weights_told(run)


@pytest.mark.parametrize(
    ("version", "gpus", "gb"),
    [(Version(16 * 10**9, 0), 1, 56.8), (Version(16 * 10**9, 0), 0, 53.6), (Version(16 * 10**9, 16 * 10**9), 1, 40.8)],
    ids=["8B", "8B without what GPUs add", "8B under adapters"],
)
def test_what_an_engine_s_host_must_hold_of_a_model_of_8_billion_weights(version: Version, gpus: int, gb: float) -> None:
    assert memory.engine_host_mb(version, "vllm", gpus) * 2**20 / 1e9 == pytest.approx(gb, abs=0.1)


def test_a_daemon_that_was_never_started_is_told(run: Path, site: Path) -> None:
    shutil.rmtree(site)
    assert "there is no folder" in refused(run)["daemon and keys"]


def test_a_run_with_a_daemon_of_its_own_needs_none_before_it_starts(run: Path, site: Path, tmp_path: Path) -> None:
    (site / "rendezvous.json").unlink()
    assert refused(run).keys() == {"daemon and keys"}
    toml = tmp_path / "scavenger.toml"
    toml.write_text(f'[daemon]\nstate_dir = "{site}"\n')
    change(run, "#[daemon]\n#embedded = true", f'[daemon]\nconfig = "{toml}"\nembedded = true')
    assert refused(run) == {}
    toml.write_text(f'[daemon]\nstate_dir = "{site}"\nlisten = "0.0.0.0"\nadvertise = "login1"\n')
    assert "take daemon.advertise out" in refused(run)["daemon and keys"], "engines would look for it on a host that it is not on"
    toml.write_text(f'[daemon]\nstate_dir = "{site}"\nadvertise = "login1"\n[cluster]\nlocal_dir = "{tmp_path}"\n')
    assert refused(run) == {}
    toml.write_text('[daemon]\nstate_dir = "/another"\n')
    assert "name one directory in both" in refused(run)["daemon and keys"]


def test_a_wrong_key_in_the_file_ends_the_check(run: Path) -> None:
    change(run, "[optimizer]", "[optimizer]\nspeed = 1")
    (finding,) = check.check(run, NO_GPU)
    assert "unknown key 'optimizer.speed'" in finding.problem
    assert check.told(run, [finding])[1] is False
    assert check.told(run, [Finding("x")])[1] is True


# ---------------------------------------------------------------- the command


def command(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "scavenger", "init", *words]
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def test_init_writes_and_checks_a_run_and_says_what_is_wrong(
    own_model: Path, data: Path, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "scavenger.toml").write_text(f'[daemon]\nstate_dir = "{site}"\n')
    words = ("--model", "model", "--data", "data.jsonl", "--gpus", "0", "--engine", "reference", "--reward", "mine:f")
    made = command("a-run", *words, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert read_run(tmp_path / "a-run" / "run.toml").run.state_dir == site
    (tmp_path / "a-run" / "mine.py").write_text(RAISES)
    bad = command("a-run", "--check", cwd=tmp_path)
    assert (bad.returncode, bad.stdout.count("ok  "), bad.stdout.count("REFUSED")) == (2, 10, 1), bad.stdout + bad.stderr
    assert "reward function mine:f failed 1 times: it raised KeyError" in bad.stdout


def test_half_a_run_and_no_run_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert "both --model and --data" in command("x", "--model", "m", cwd=tmp_path).stderr
    nothing = command("--check", cwd=tmp_path)
    assert nothing.returncode == 2
    assert "holds no run.toml" in nothing.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slurm
def test_slurm_takes_the_job_script(own_model: Path, data: Path, tmp_path: Path, slurm_sandbox: SlurmSandbox) -> None:
    folder = tmp_path / "a folder" / "my-run"
    assert draft(folder, own_model, data, "--gpus=1") == 0
    argv = ["sbatch", "--test-only", str(folder / "train.sbatch")]
    said = subprocess.run(argv, env=slurm_sandbox.env, capture_output=True, text=True, timeout=60, check=False)
    assert said.returncode == 0, said.stderr
    assert "partition reserved" in said.stderr
