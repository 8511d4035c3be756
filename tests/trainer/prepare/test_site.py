"""Before a job is submitted: what does not fit the GPUs, the engines' jobs or the daemon is refused with its figures."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scavenger.config import read_run
from scavenger.errors import StartFinding
from scavenger.sizing import engine, fit
from scavenger.sizing.engine import PublishedSize
from tests.trainer.prepare.hand import BIG, FITS, NO_GPU, change, refused, weights_told
from trainer.prepare import check, model, rows, weights
from trainer.prepare.check import RequestedGpus

STAYS = {"reserved": True, "offload": "never"}


@pytest.mark.parametrize(
    ("changes", "cause", "remedy"),
    [
        ({"ranks": 1}, "too big for the GPUs: 128.0 GB of weights", "train on 3 GPUs or more"),
        (
            {"ranks": 8, "micro_tokens": 65536},
            "a micro-batch does not fit",
            "lower trainer.micro_batch_tokens",
        ),
        (
            {"checkpointing": False, "micro_tokens": 32768},
            "a micro-batch does not fit",
            "activation_checkpointing = true",
        ),
        ({"engine_share": 0.2}, "too little is left for its cache", "raise run.gpus_per_engine"),
        (STAYS, "shares its GPU with the trainer", "engine.gpu_memory_share = 0.83"),
        (STAYS, 'trainer.offload = "never"', 'trainer.offload = "auto"'),
        (STAYS | {"ranks": 2, "micro_tokens": 512}, "do not fit on one GPU", "train on more GPUs"),
        (STAYS | {"ranks": 2, "micro_tokens": 512}, "do not fit on one GPU", 'set trainer.offload = "auto"'),
        (
            {"reserved": True, "engine_share": 0.96},
            "a reserved engine takes 76.8 GB of a GPU",
            "engine.gpu_memory_share = 0.94 or lower",
        ),
        (
            {"reserved": True, "engine_share": 0.2, "engine_gpus": 2},
            "and the model's weights take 16.0 GB of each",
            "gpus_per_engine = 2",
        ),
        ({"reference": True, "ranks": 2}, "too big for the GPUs: 80.0 GB", "lora.rank"),
    ],
)
def test_what_does_not_fit_is_told_with_its_figures(changes: dict[str, Any], cause: str, remedy: str) -> None:
    assert fit.problem(BIG, FITS) == ("", "")
    found = fit.problem(BIG, replace(FITS, **changes))
    assert cause in found[0]
    assert remedy in found[1]


def test_states_that_leave_the_gpu_take_host_memory_and_no_room_of_a_reserved_engine() -> None:
    tight = replace(FITS, reserved=True, ranks=2, micro_tokens=512)
    states = fit.need(BIG, tight).states
    assert states + 0.9 * 80 > fit.need(BIG, tight).usable
    for mode, problem, host, share in (
        ("auto", False, states, 0.9),
        ("always", False, states, 0.9),
        ("never", True, 0.0, 0.2),
    ):
        job = replace(tight, offload=mode)  # type: ignore[arg-type]
        assert bool(fit.problem(BIG, job)[0]) is problem
        assert fit.offloaded_gb(BIG, job) == host
        assert fit.share_beside(BIG, job) == share
    roomy = replace(FITS, reserved=True, ranks=64)
    assert fit.offloaded_gb(BIG, roomy) == 0.0, "both fit"
    assert fit.offloaded_gb(BIG, replace(roomy, offload="always")) > 0.0
    assert fit.offloaded_gb(BIG, replace(tight, reserved=False)) == 0.0


def test_a_check_takes_trainer_offload_as_the_run_says_it_and_tells_the_host_memory(run: Path) -> None:
    change(run, 'name = "reference"', 'name = "vllm"')
    tight = RequestedGpus(2, 2, 3.0)
    (told,) = [one.note for one in check.check(run, tight) if one.what == "memory of the GPUs"]
    assert "wait in pinned host memory" not in told, "both fit"
    change(run, "[trainer]\n", '[trainer]\noffload = "always"\n')
    (told,) = [one.note for one in check.check(run, tight) if one.what == "memory of the GPUs"]
    assert "while reserved engines generate, " in told
    assert " GB of states wait in pinned host memory on each training node" in told


def test_a_reserved_engine_of_several_gpus_holds_a_model_that_one_cannot(run: Path) -> None:
    beside = replace(FITS, reserved=True, engine_share=0.2, engine_gpus=2, reserved_gpus=2)
    assert fit.problem(BIG, beside) == ("", "")
    change(
        run,
        "gpus_per_engine = 1                 # of each, on",
        "gpus_per_engine = 4                 # of each, on",
    )
    found = refused(run, RequestedGpus(2, 2, 80.0))["reserved engines"]
    assert "reserved.gpus_per_engine = 4, and train.sbatch asks for 2 GPUs a node" in found


def test_a_run_without_a_reserved_engine_is_refused_and_no_remedy_leads_there(run: Path) -> None:
    (report,) = [finding.note for finding in check.check(run, NO_GPU) if finding.what == "reserved engines"]
    assert report == "2 of 1 GPU each: the run goes on without a harvested engine"
    change(run, "workers = 2 ", "workers = 0 ")
    found = refused(run)
    assert list(found) == ["reserved engines"]
    assert (
        "reserved.workers = 0 in run my-run: while no GPU is idle nothing generates"
        in found["reserved engines"]
    )
    assert "set reserved.workers = 1 or more" in found["reserved engines"]
    change(run, "#harvest = false", "harvest = false")
    assert "run.harvest = false needs reserved.workers >= 1" in refused(run)["run.toml"]


@pytest.mark.parametrize(
    "changes",
    [
        {"ranks": 2, "offload": "never"},
        {"engine_share": 0.2},
        {"engine_gpus": 4, "engine_share": 0.2},
        {"ranks": 16, "offload": "never"},
        {"engine_share": 0.96},
    ],
)
def test_what_keeps_a_reserved_engine_from_fitting_is_never_mended_by_leaving_it_out(
    changes: dict[str, Any],
) -> None:
    cause, remedy = fit.problem(BIG, replace(FITS, reserved=True, micro_tokens=512, **changes))
    assert cause
    assert "reserved.workers" not in remedy


def test_a_model_too_big_for_the_job_s_gpus_is_refused(run: Path) -> None:
    assert "memory of the GPUs" not in refused(run, RequestedGpus(2, 2, 80.0))
    assert "remedy: " in refused(run, RequestedGpus(2, 2, 0.0001))["memory of the GPUs"]


def test_what_a_draft_chooses_for_a_large_model_fits(own_model: Path, data: Path, tmp_path: Path) -> None:
    from trainer.prepare import draft as drafts

    large = replace(
        model.read_facts(own_model),
        parameters=BIG.parameters,
        vocabulary=BIG.vocabulary,
        config={"hidden_size": BIG.hidden, "num_hidden_layers": BIG.layers, "intermediate_size": BIG.inner},
    )
    wish = drafts.RunOptions("r", tmp_path, 8, 2, 80.0, "p", "", "", "vllm", "py", tmp_path, 100)
    path = tmp_path / "run.toml"
    path.write_text(drafts.run_toml(large, rows.read_facts(data), wish))
    config = read_run(path)
    job = replace(
        FITS,
        ranks=16,
        micro_tokens=config.trainer.micro_batch_tokens,
        checkpointing=config.trainer.activation_checkpointing,
        reserved=True,
        engine_share=config.engine.gpu_memory_share,
        engine_gpus=config.run.gpus_per_engine,
    )
    assert fit.problem(drafts.shape_of(large), job) == ("", "")


def test_an_engine_that_is_not_installed_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(run, 'name = "reference"', 'name = "vllm"')
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else real(name))
    assert "with its extra vllm" in refused(run)["engine"]


@pytest.mark.parametrize(
    ("version", "gpus", "gb"),
    [
        (PublishedSize(16 * 10**9, 0), 1, 40.8),
        (PublishedSize(16 * 10**9, 0), 0, 37.6),
        (PublishedSize(16 * 10**9, 16 * 10**9), 1, 24.8),
    ],
    ids=["8B", "8B without what GPUs add", "8B under adapters"],
)
def test_what_an_engine_s_host_must_hold_of_a_model_of_8_billion_weights(
    version: PublishedSize, gpus: int, gb: float
) -> None:
    assert engine.engine_host_mb(version, "vllm", gpus) * 2**20 / 1e9 == pytest.approx(gb, abs=0.1)


def test_an_engine_s_job_with_too_little_memory_for_the_model_is_refused(
    run: Path, site: Path, tmp_path: Path
) -> None:
    toml = tmp_path / "site.toml"

    def report(given: int, state: Path = site) -> str:
        toml.write_text(f'[daemon]\nstate_dir = "{state}"\n[harvest]\nmemory_mb_per_engine = {given}\n')
        return weights_told(run, at_hand=toml)

    least = engine.engine_host_mb(
        weights.version_of(read_run(run), model.read_facts(read_run(run).model.path)), "reference", 0
    )
    assert (
        f"{toml}: harvest.memory_mb_per_engine = {least - 1}, and this run's jobs need {least} at least"
        in report(least - 1)
    )
    assert "remedy: set harvest.memory_mb_per_engine = 3072 there" in report(least - 1)
    assert "LOOK whether that does" in report(least)
    assert report(4096).endswith(f"{toml} gives it 4,096")
    assert "it gets its GPUs' share of a node" in report(0)
    assert "was not found from here" in report(1, tmp_path / "another"), (
        "another site's says nothing of this run"
    )
    assert "was not found from here" in weights_told(run)


def test_a_vllm_engine_s_job_with_too_few_cpus_is_pointed_at(run: Path, site: Path, tmp_path: Path) -> None:
    toml = tmp_path / "site.toml"

    def report(cpus: int, memory_mb: int) -> str:
        cores = f"cpus_per_engine = {cpus}\nmemory_mb_per_engine = {memory_mb}\n"
        toml.write_text(f'[daemon]\nstate_dir = "{site}"\n[harvest]\n{cores}')
        return weights_told(run, at_hand=toml)

    assert "LOOK" not in report(1, 0), "the reference engine computes in one process"
    change(run, 'name = "reference"', 'name = "vllm"')
    for memory_mb in (0, 8192):
        assert report(3, memory_mb).endswith("LOOK: harvest.cpus_per_engine = 3, and a vLLM engine wants 4")
        assert "LOOK" not in report(4, memory_mb)


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


def test_a_daemon_that_was_never_started_is_told(run: Path, site: Path) -> None:
    shutil.rmtree(site)
    assert "there is no folder" in refused(run)["daemon and keys"]
    said, fine = check.report(run, list(check.check(run, NO_GPU)))
    assert (said[-1], fine) == (
        f"a try needs neither daemon nor keys: python -m trainer {run} --local",
        False,
    )
    change(run, "lr = ", "lr = -")
    assert "a try" not in check.report(run, list(check.check(run, NO_GPU)))[0][-1], "nor would a try start"


def test_a_run_with_a_daemon_of_its_own_needs_none_before_it_starts(
    run: Path, site: Path, tmp_path: Path
) -> None:
    (site / "rendezvous.json").unlink()
    assert refused(run).keys() == {"daemon and keys"}
    toml = tmp_path / "scavenger.toml"
    toml.write_text(f'[daemon]\nstate_dir = "{site}"\n')
    change(run, "#[daemon]\n#embedded = true", f'[daemon]\nconfig = "{toml}"\nembedded = true')
    assert refused(run) == {}
    toml.write_text(f'[daemon]\nstate_dir = "{site}"\nlisten = "0.0.0.0"\nadvertise = "login1"\n')
    assert "take daemon.advertise out" in refused(run)["daemon and keys"], (
        "engines would look for it on a host that it is not on"
    )
    toml.write_text(
        f'[daemon]\nstate_dir = "{site}"\nadvertise = "login1"\n[cluster]\nlocal_dir = "{tmp_path}"\n'
    )
    assert refused(run) == {}
    toml.write_text('[daemon]\nstate_dir = "/another"\n')
    assert "name one directory in both" in refused(run)["daemon and keys"]


def test_a_wrong_key_in_the_file_ends_the_check(run: Path) -> None:
    change(run, "[optimizer]", "[optimizer]\nspeed = 1")
    (finding,) = check.check(run, NO_GPU)
    assert "unknown key 'optimizer.speed'" in finding.problem
    assert check.report(run, [finding])[1] is False
    assert check.report(run, [StartFinding("x")])[1] is True


def test_an_out_dir_that_cannot_be_written_or_is_too_small_is_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.parent / "file").write_text("")
    change(run, 'out_dir = "out"', 'out_dir = "file/out"')
    assert "file: it is no folder" in refused(run)["out_dir and figures"]
    change(run, 'out_dir = "file/out"', 'out_dir = "new/out"')
    assert "out_dir and figures" not in refused(run)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100_000))
    assert (
        "0.0 GB are free\n  remedy: name a file system with more room" in refused(run)["out_dir and figures"]
    )
    assert not (run.parent / "new").exists(), "a check writes nothing"


@pytest.mark.parametrize(("name", "value"), [("tensorboard", "true"), ("wandb", '"offline"')])
def test_figures_for_a_package_that_is_not_there_are_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda asked, package=None: None if asked == name else real(asked, package),
    )
    run.write_text(run.read_text() + f"[monitor]\n{name} = {value}\n")
    assert f"pip install 'scavenger[{name}]'" in refused(run)["out_dir and figures"]
