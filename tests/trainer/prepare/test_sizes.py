"""What a first run's engines get, from the model's sizes and the GPUs' memory; and that it fits, as the check sees it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scavenger.config import read_run
from scavenger.errors import ConfigError
from scavenger.sizing import engine as engines
from scavenger.sizing import fit
from scavenger.sizing.engine import PublishedSize
from scavenger.sizing.shape import ModelShape
from scavenger.sizing.training import TrainJob
from tests.trainer.prepare.hand import BIG, ROOT, change, edit, refused
from trainer.prepare import __main__ as program
from trainer.prepare import check, model, rows, sizes
from trainer.prepare import draft as drafts
from trainer.prepare.check import RequestedGpus
from trainer.prepare.sizes import SizingRequest

# huggingface.co/Qwen: Qwen3-0.6B, Qwen3-8B and Qwen3-32B, and meta-llama/Llama-3.1-70B: config.json
SMALL = ModelShape(596_000_000, 28, 1024, 3072, 151936, 16, 8, 128, tied=True, head_norms=True)
EIGHT = replace(BIG, heads=32, kv_heads=8, head_dim=128)
LARGE = ModelShape(32_800_000_000, 64, 5120, 25600, 151936, 64, 8, 128)
HUGE = ModelShape(70_600_000_000, 80, 8192, 28672, 128256, 64, 8, 128)


def asked(shape: ModelShape, gpus: int = 8, nodes: int = 2, gb: float = 80.0, **more: Any) -> SizingRequest:
    return replace(SizingRequest(shape, "vllm", gpus, nodes, gb, 512, 8192, 8704, 512), **more)


@pytest.mark.parametrize(
    ("kind", "gb"),
    [
        ("a100", 40),
        ("A100-40", 40),
        ("a100_80gb", 80),
        ("nvidia_a100-sxm4-80gb", 80),
        ("a100-80", 80),
        ("h100", 80),
        ("H200", 141),
        ("nvidia_h100_80gb_hbm3", 80),
        ("NVIDIA L40S", 48),
        ("l4", 24),
        ("gh200", 96),
        ("h100_1g.10gb", 10),
        ("h20", 96),
        ("mi300", 0),
    ],
)
def test_a_gpu_s_memory_is_known_by_its_type(kind: str, gb: float) -> None:
    assert engines.gpu_gb(kind) == gb


def test_a_token_takes_what_its_keys_and_values_do() -> None:
    assert engines.token_nbytes(EIGHT, 1) == 2 * 36 * 8 * 128 * 2
    assert engines.token_nbytes(EIGHT, 8) == engines.token_nbytes(EIGHT, 1), "8 heads are cut"
    assert engines.token_nbytes(replace(EIGHT, kv_heads=2), 8) == engines.token_nbytes(EIGHT, 1), (
        "2 heads are copied to 8 GPUs"
    )


def test_the_batch_is_what_fits_into_the_cache_of_its_expected_length() -> None:
    cache = engines.of_gpus(EIGHT, 1, 80.0, 0.8)
    assert cache.nbytes == 0.8 * 80e9 - 16e9 - engines.work_nbytes(EIGHT, 1)
    expected = engines.expected_tokens(512, 8192)
    assert expected == 512 + 4096
    fit = engines.batch(cache, expected, 512)
    assert fit * expected * cache.token <= cache.nbytes < (fit + 8) * expected * cache.token
    assert engines.batch(cache, expected, 16) == 16
    assert engines.batch(engines.of_gpus(EIGHT, 8, 141.0, 0.9), 100, 10_000) == engines.MOST_BATCH
    assert engines.batch(engines.of_gpus(EIGHT, 1, 20.0, 0.8), expected, 512) == 1, (
        "no room at all: the check refuses it"
    )


@pytest.mark.parametrize(
    ("shape", "gpus", "nodes", "gb", "each", "reserved"),
    [
        (SMALL, 8, 1, 80, 1, 8),
        (SMALL, 1, 1, 48, 1, 1),
        (EIGHT, 8, 2, 80, 1, 16),
        (EIGHT, 8, 1, 40, 1, 8),
        (LARGE, 8, 2, 80, 2, 8),
        (LARGE, 8, 2, 141, 1, 16),
        (HUGE, 8, 8, 80, 4, 16),
        (HUGE, 8, 2, 141, 4, 4),
    ],
)
def test_what_is_chosen_fits_and_reserved_engines_are_never_left_out(
    shape: ModelShape, gpus: int, nodes: int, gb: float, each: int, reserved: int
) -> None:
    chosen = sizes.choose(asked(shape, gpus, nodes, gb, node_gb=6000.0))
    assert (chosen.engine_gpus, chosen.reserved_gpus, chosen.reserved) == (each, each, reserved)
    job = TrainJob(
        gpus * nodes,
        gb,
        chosen.micro_tokens,
        chosen.checkpointing,
        shape.parameters,
        False,
        True,
        chosen.share,
        each,
        each,
        longest=8704,
        head_chunk=1024,
    )
    assert fit.problem(shape, job) == ("", "")
    assert fit.cache_problem(shape, job, 8704) == ("", "")
    assert 8 <= chosen.max_batch <= 512


FOURTEEN = ModelShape(14_800_000_000, 40, 5120, 17408, 151936, 40, 8, 128)


@pytest.mark.parametrize(
    ("shape", "nodes", "node_gb", "each", "reserved"),
    [
        (FOURTEEN, 1, 2000.0, 1, 8),
        (FOURTEEN, 1, 1024.0, 2, 4),  # 8 of them want 1.4 TB
        (FOURTEEN, 1, 0.0, 2, 4),  # nothing is known: 1.6 x 8 x 80 GB
        (FOURTEEN, 1, 780.0, 8, 1),
        (LARGE, 2, 1024.0, 8, 2),
    ],
)
def test_reserved_engines_are_wider_and_then_fewer_until_a_node_s_host_memory_holds_them(
    shape: ModelShape, nodes: int, node_gb: float, each: int, reserved: int
) -> None:
    chosen = sizes.choose(asked(shape, 8, nodes, node_gb=node_gb))
    assert (chosen.reserved_gpus, chosen.reserved) == (each, reserved)
    assert bool(chosen.why_reserved) == (chosen.reserved_gpus > chosen.engine_gpus)
    job = TrainJob(
        8 * nodes,
        80.0,
        chosen.micro_tokens,
        chosen.checkpointing,
        shape.parameters,
        False,
        True,
        chosen.share,
        chosen.engine_gpus,
        chosen.reserved_gpus,
        longest=8704,
        head_chunk=1024,
        per_node=8,
        reserved_workers=chosen.reserved,
    )
    assert fit.problem(shape, job) == ("", "")
    there = node_gb or 1024.0
    assert fit.asked_gib(shape, job) * 2**30 <= there * 1e9, "and what train.sbatch asks for is there"
    assert fit.host_problem(shape, job, there) == ("", "")
    narrower = replace(job, reserved_gpus=1, reserved_workers=8 * nodes)
    cause, remedy = fit.host_problem(shape, narrower, there)
    assert bool(cause) == (each > 1)
    if cause:
        found = fit.reserved_within(shape, narrower, there)
        assert found is not None
        assert f"reserved.gpus_per_engine = {found[0]}, reserved.workers = {found[1]}" in remedy


def test_a_node_that_holds_too_little_is_refused_whatever_the_script_asks_for() -> None:
    """32B on 8 GPUs of a node of 1 TB: Slurm would never start what asks for more."""
    job = TrainJob(
        8,
        80.0,
        8192,
        True,
        LARGE.parameters,
        False,
        True,
        0.9,
        2,
        8,
        8704,
        1024,
        per_node=8,
        reserved_workers=1,
    )
    gib = fit.asked_gib(LARGE, job)
    asked = gib * 2**30 / 1e9
    assert asked > 1024
    cause, remedy = fit.host_problem(LARGE, job, asked, 1024.0)
    assert "of host memory, and has 1,024 GB" in cause
    assert "lora.rank" in remedy
    assert fit.host_problem(LARGE, job, asked, 2000.0) == ("", "")
    cause, remedy = fit.host_problem(LARGE, job, 2500.0, 2000.0)
    assert "asks for 2,500 GB of host memory, and a node has 2,000 GB" in cause
    assert remedy == f"ask for --mem={gib}G"


def test_the_script_keeps_what_a_node_has_for_the_check() -> None:
    script = "#SBATCH --nodes=2\n#SBATCH --gpus-per-node=8\n#SBATCH --mem=900G\n# gpu-memory-gb=80\n# node-memory-gb=1024\n"
    found = check.gpus_of(script)
    assert (found.ranks, found.gb, found.node_has_gb) == (16, 80.0, 1024.0)
    assert found.node_gb == pytest.approx(900 * 2**30 / 1e9)


def test_what_does_not_fit_names_adapters_for_the_gpus_that_there_are() -> None:
    """A user of 8 GPUs who is told of 16 needs another way; lowering the micro-batch, which does not help, is not named."""
    job = TrainJob(8, 80.0, 16384, True, LARGE.parameters, False, True, 0.9, 2, 2, 8704, 1024)
    cause, remedy = fit.problem(LARGE, job)
    assert "a micro-batch does not fit" in cause
    assert "this fits: GPUs = 16; on these GPUs: lora.rank = 16" in remedy
    assert "micro_batch_tokens" not in remedy
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    tried = replace(job, lora_rank=16, targets=targets, trained=LARGE.adapters(16, targets))
    assert fit.trains(LARGE, tried)


@pytest.mark.parametrize(("gpus", "nodes", "gb"), [(2, 1, 80.0), (1, 1, 48.0), (3, 1, 80.0), (0, 1, 80.0)])
def test_where_nothing_fits_the_run_still_has_a_reserved_engine_on_the_gpus_of_a_node(
    gpus: int, nodes: int, gb: float
) -> None:
    chosen = sizes.choose(asked(HUGE, gpus, nodes, gb))
    assert chosen.reserved >= 1
    assert chosen.engine_gpus <= max(1, gpus)


def test_an_engine_gets_only_as_many_gpus_as_its_attention_heads_can_be_cut_into() -> None:
    assert sizes.choose(asked(replace(LARGE, heads=14))).engine_gpus == 2
    assert sizes.choose(asked(replace(HUGE, heads=14), nodes=8)).engine_gpus == 2, (
        "4 would not divide 14 heads"
    )


def test_a_small_gpu_gets_the_largest_micro_batch_that_fits() -> None:
    tight = asked(EIGHT, gpus=8, nodes=1, gb=30.0)
    assert sizes.choose(tight).micro_tokens == 12288, "half of 16,384 would not hold the longest sample"
    smaller = sizes.choose(replace(tight, gpu_gb=27.0)).micro_tokens
    assert smaller == 16384, "not even the longest sample fits: the check says so"


def test_an_engine_s_cpus_and_memory_grow_with_the_model_and_its_gpus() -> None:
    assert [
        engines.engine_cpus(PublishedSize(nbytes, 0), gpus)
        for nbytes, gpus in ((10**9, 1), (16 * 10**9, 1), (10**12, 8))
    ] == [4, 6, 15]
    found = sizes.choose(asked(EIGHT))
    assert found.cpus == engines.engine_cpus(PublishedSize(16 * 10**9, 0), 1)
    least = engines.engine_host_mb(PublishedSize(16 * 10**9, 0), "vllm", 1)
    assert least <= found.memory_mb < least + 1024
    assert found.memory_mb % 1024 == 0


def test_the_engine_is_vllm_but_for_a_tiny_model_without_a_gpu() -> None:
    found = [
        sizes.engine_for(parameters, gpus)
        for parameters, gpus in ((10**6, 0), (10**6, 1), (10**9, 0), (10**9, 8))
    ]
    assert found == ["reference", "vllm", "vllm", "vllm"]


def test_what_vllm_has_for_its_cache_on_a_cpu_is_what_is_counted() -> None:
    setup = pytest.importorskip("rollout.engines.vllm.setup", reason="the engines need the [trainer] extra")
    assert engines.CPU_NBYTES == setup.CPU_CACHE_NBYTES


# ---------------------------------------------------------------- the drafted files


def drafted(
    own_model: Path, data: Path, tmp_path: Path, shape: ModelShape, context: int, **wish: Any
) -> Path:
    """The run.toml of a large model that is not there: its facts are."""
    found = replace(
        model.read_facts(own_model),
        parameters=shape.parameters,
        vocabulary=shape.vocabulary,
        context=context,
        config={
            "hidden_size": shape.hidden,
            "num_hidden_layers": shape.layers,
            "intermediate_size": shape.inner,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
        },
    )
    made = drafts.RunOptions("r", tmp_path, 8, 2, 80.0, "p", "", "", "vllm", "py", tmp_path, 100)
    path = tmp_path / "run.toml"
    path.write_text(drafts.run_toml(found, rows.read_facts(data), replace(made, **wish)))
    return path


def test_a_draft_runs_vllm_with_completions_of_8k_and_says_where_each_number_comes_from(
    own_model: Path, data: Path, tmp_path: Path
) -> None:
    path = drafted(own_model, data, tmp_path, LARGE, 40960)
    config, text = read_run(path), path.read_text()
    assert (config.engine.name, config.sampling.max_tokens, config.model.context_length) == (
        "vllm",
        8192,
        8192 + 192,
    )
    assert (config.run.gpus_per_engine, config.reserved.gpus_per_engine, config.reserved.workers) == (2, 8, 2)
    why = re.search(
        r"# 8 engines of 2 GPUs want ([\d,]+) GB .* of 1,024: asleep, each keeps its weights there\nworkers = 2 ",
        text,
    )
    assert why is not None
    assert 1_400 < int(why[1].replace(",", "")) < 1_700
    cache = engines.of_gpus(LARGE, 2, 80.0, config.engine.gpu_memory_share)
    assert config.engine.max_batch == engines.batch(cache, 192 + 4096, 512)
    assert (
        f"a token takes 262 kB, a sample on average 4288 tokens (the prompt, half a completion): {cache.samples(4288)} fit."
        in text
    )
    assert "the fewest of 80 GB that hold weights and cache" in text
    mb = engines.engine_host_mb(PublishedSize(2 * LARGE.parameters, 0), "vllm", 2)
    assert f"#   cpus_per_engine = 9, memory_mb_per_engine = {-(-mb // 1024) * 1024}" in text


@pytest.mark.parametrize(
    ("limit", "answer", "why"),
    [
        (2048, 2048 - 192, "the model's own limit of 2048 less 192 for prompts"),
        (0, 8192, "of a completion at most; what is longer is cut"),
        (32768, 8192, "of a completion at most; what is longer is cut"),
    ],
)
def test_completions_are_8k_or_what_the_model_s_own_limit_leaves(
    limit: int, answer: int, why: str, own_model: Path, data: Path, tmp_path: Path
) -> None:
    path = drafted(own_model, data, tmp_path, EIGHT, limit)
    config = read_run(path)
    assert (config.sampling.max_tokens, config.model.context_length) == (answer, answer + 192)
    assert re.search(rf"^max_tokens = {answer} +# {re.escape(why)}$", path.read_text(), re.M)


def test_the_engine_and_the_memory_of_a_gpu_are_what_was_said_or_assumed_and_that_is_told(
    own_model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def made(name: str, *words: str) -> tuple[str, float, str]:
        folder = tmp_path / name
        assert program.main(["draft", str(folder), f"--model={own_model}", f"--data={data}", *words]) == 0
        said = capsys.readouterr().out
        script = (folder / "train.sbatch").read_text()
        return read_run(folder / "run.toml").engine.name, check.gpus_of(script).gb, said

    engine, gb, said = made("a", "--gpus=2")
    assert (engine, gb) == ("vllm", 80)
    assert "80 GB of memory a GPU" in said
    assert "harvest.cpus_per_engine = 4" in said
    engine, gb, said = made("b", "--gpus=2", "--gpu=H200")
    assert (engine, gb, "GB of memory a GPU" in said) == ("vllm", 141, False)
    _, gb, said = made("c", "--gpus=2", "--slurm-gpu=a100,l40s")
    assert gb == 40
    assert "as Slurm names its GPUs there" in said
    _, gb, said = made("d", "--gpus=2", "--slurm-gpu=strange")
    assert gb == 80
    assert "256 GB of host memory a node; --mem=" in said
    said = made("h", "--gpus=2", "--slurm-memory-mb=515000")[2]
    assert "540 GB of host memory a node; --mem=" in said
    assert "# node-memory-gb=540\n" in (tmp_path / "h" / "train.sbatch").read_text()
    assert "the smallest node of that partition, as Slurm says" in said
    said = made("j", "--gpus=2", "--node-memory-gb=4")[2]
    assert "LOOK: each training node needs " in said
    assert "and has 4 GB" in said
    assert "host memory a node" not in made("i", "--gpus=2", "--node-memory-gb=400")[2]
    assert made("e", "--gpus=2", "--gpu=H200", "--gpu-memory-gb=12")[1] == 12
    assert made("f", "--gpus=0")[0] == "reference"
    assert made("g", "--gpus=0", "--engine=vllm")[0] == "vllm"


@pytest.mark.parametrize(
    ("words", "cause"), [(["--gpu=mi300"], "--gpu mi300"), (["--engine=sglang"], "--engine sglang")]
)
def test_a_type_or_an_engine_that_is_not_known_is_refused(
    words: list[str],
    cause: str,
    own_model: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert program.main(["draft", str(tmp_path / "x"), f"--model={own_model}", f"--data={data}", *words]) == 2
    said = capsys.readouterr().err
    assert cause in said
    assert "remedy: " in said
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("example", "gpus"), [("gsm8k", 8), ("site", 2)])
def test_the_examples_engines_are_vllm_and_hold_their_batch_beside_the_trainer(
    example: str, gpus: int
) -> None:
    config = read_run(ROOT / "examples" / example / "run.toml")
    assert (config.engine.name, config.model.path.name) == ("vllm", "qwen3-0.6b")
    job = TrainJob(
        gpus,
        80.0,
        config.trainer.micro_batch_tokens,
        config.trainer.activation_checkpointing,
        SMALL.parameters,
        False,
        True,
        config.engine.gpu_memory_share,
        config.run.gpus_per_engine,
        config.reserved.gpus_per_engine,
        config.model.context_length,
    )
    assert fit.problem(SMALL, job) == ("", "")
    assert fit.cache_problem(SMALL, job, config.model.context_length) == ("", "")
    cache = engines.of_gpus(SMALL, 1, 80.0, config.engine.gpu_memory_share)
    prompt = config.model.context_length - config.sampling.max_tokens
    assert config.engine.max_batch <= cache.samples(
        engines.expected_tokens(prompt, config.sampling.max_tokens)
    )


# ---------------------------------------------------------------- the check


def memory_finding(run: Path, gpus: RequestedGpus) -> str:
    (found,) = [finding for finding in check.check(run, gpus) if finding.what == "memory of the GPUs"]
    assert not found.problem, found.problem
    return found.note


def lengthen(run: Path, completion: int) -> None:
    text = run.read_text()
    text = re.sub(r"^context_length = \d+", f"context_length = {completion + 64}", text, flags=re.M)
    run.write_text(re.sub(r"^max_tokens = \d+", f"max_tokens = {completion}", text, flags=re.M))


def test_a_check_counts_the_longest_sample_that_can_come(run: Path, own_model: Path) -> None:
    edit(own_model / "config.json", max_position_embeddings=1 << 20)
    lengthen(run, 1024)
    short = memory_finding(run, RequestedGpus(2, 2, 80.0))
    assert "for a micro-batch of 16,384 tokens" in short
    lengthen(run, 32768)
    long = memory_finding(run, RequestedGpus(2, 2, 80.0))
    assert "for a micro-batch of 32,773 tokens" in long, "the longest prompt has 5 tokens"
    found = fit.problem(
        EIGHT, TrainJob(16, 80.0, 16384, False, EIGHT.parameters, False, False, 0.9, 1, longest=131072)
    )
    assert "the longest sample, 131072 tokens and a micro-batch of its own, does not fit" in found[0]
    assert "lower sampling.max_tokens and model.context_length" in found[1]


def test_a_check_says_what_an_engine_s_cache_holds_and_refuses_one_that_holds_no_sample(
    run: Path, own_model: Path
) -> None:
    edit(own_model / "config.json", max_position_embeddings=1 << 20)
    change(run, 'name = "reference"', 'name = "vllm"')
    told = memory_finding(run, RequestedGpus(2, 2, 80.0))
    shape = drafts.shape_of(model.read_facts(own_model))
    cache = engines.of_gpus(shape, 1, 80.0, 0.9)
    assert (
        f"KV cache ({cache.nbytes / 1e9:.1f} GB) holds {cache.samples(37)} samples of the longest, 37 tokens"
        in told
    )
    assert "LOOK, engine.max_batch" not in told
    lengthen(run, 2048)
    few = (
        engines.work_nbytes(shape, 1) + 2 * shape.parameters + 4096 * cache.token
    ) / 0.9e9  # of 64 samples of a thousand tokens
    assert "LOOK, engine.max_batch = 64 is more than fits" in memory_finding(run, RequestedGpus(2, 2, few))
    found = refused(run, RequestedGpus(2, 2, 0.9 * few))["memory of the GPUs"]
    assert (
        "an engine (run.gpus_per_engine = 1) has 0.0 GB for its KV cache, and one sample of model.context_length = 2112 tokens"
        in found
    )
    assert "remedy: raise run.gpus_per_engine or engine.gpu_memory_share" in found


def test_gpus_that_the_attention_heads_cannot_be_cut_over_are_refused(run: Path) -> None:
    change(run, 'name = "reference"', 'name = "vllm"')
    text = run.read_text()
    run.write_text(
        re.sub(r"(\[reserved\]\nworkers = .*\n)gpus_per_engine = 1", r"\1gpus_per_engine = 4", text)
    )
    found = refused(run)["engine"]
    assert "reserved.gpus_per_engine = 4: the model has 2 attention heads" in found
    assert "set reserved.gpus_per_engine to one of 1, 2" in found


def test_the_host_s_part_of_a_drafted_run_s_engine_is_told_as_keys_of_the_daemon(
    run: Path, own_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert program.main(["host", str(run.parent)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"cpus_per_engine": 4, "memory_mb_per_engine": 3072}
    with pytest.raises(ConfigError):
        check.host_of(run.with_name("nothing.toml"))


@pytest.mark.parametrize(
    ("line", "gb"),
    [
        ("--mem=900G", 966.4),
        ("--mem 512000", 536.9),
        ("--mem=1T", 1099.5),
        ("--mem=0", 0.0),
        ("--mem-per-gpu=8G", 0.0),
    ],
)
def test_a_node_s_memory_is_read_as_slurm_reads_it(line: str, gb: float) -> None:
    assert check.gpus_of(f"#SBATCH --nodes=2\n#SBATCH {line}\n").node_gb == pytest.approx(gb, abs=0.1)


def test_a_check_counts_the_host_s_memory_and_refuses_a_job_that_asks_for_too_little(run: Path) -> None:
    change(run, 'name = "reference"', 'name = "vllm"')
    told = memory_finding(run, RequestedGpus(2, 2, 80.0))
    assert " GB of host memory on each training node" in told
    found = refused(run, RequestedGpus(2, 2, 80.0, node_gb=4.0))["memory of the GPUs"]
    assert "of host memory, and train.sbatch asks for 4 GB" in found
    assert "remedy: ask for --mem=" in found


def test_a_check_says_what_lies_on_the_gpu_where_most_does_and_how_large_a_micro_batch_could_be(
    run: Path,
) -> None:
    small = memory_finding(run, RequestedGpus(2, 2, 1.2))
    assert re.search(r"tokens, the largest that fits has [\d,]+, of 1\.2 GB on each of 2", small)
    assert re.search(
        r"\(load [\d.]+, generate [\d.]+, .*; (for|back)ward: .*(activations|output head) \d", small
    )


def test_the_check_counts_adapters_experts_and_exact_runs_as_they_are(
    run: Path, own_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_run(run)
    shape = drafts.shape_of(model.read_facts(own_model))
    plain = check.job_of(config, shape, RequestedGpus(2, 2, 80.0), 37)
    assert (plain.trained, plain.compute, plain.master) == (shape.parameters, 2, 4)
    change(run, "rank = 0 ", "rank = 4 ")
    adapted = check.job_of(read_run(run), shape, RequestedGpus(2, 2, 80.0), 37)
    assert adapted.trained == shape.adapters(4, adapted.targets) < shape.parameters
    assert len(adapted.targets) == 7
    change(run, "seed = 1", "seed = 1\ndeterministic = true")
    exact = check.job_of(read_run(run), shape, RequestedGpus(2, 2, 80.0), 37)
    assert exact.sample_tokens == plain.sample_tokens == config.model.context_length, "as vLLM is started"
    assert (exact.compute, exact.master, exact.head_chunk) == (8, 8, 0)
