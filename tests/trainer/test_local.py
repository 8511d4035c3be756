"""The whole loop in one process: engine, rewards, training, evaluation, checkpoints."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from scavenger import config as configs
from scavenger.cli.main import app as commands
from scavenger.ledger import store
from scavenger.ledger.read import reader, reports
from scavenger.weights import files
from tests.trainer.test_step import TIMES
from trainer import export
from trainer.__main__ import main
from trainer.checkpoint import checkpoint
from trainer.local import alone

ROOT = Path(__file__).resolve().parents[2]
RUN = """
[run]
name = "local"
steps = {steps}
state_dir = "state"
out_dir = "{out}"
deterministic = true
[model]
path = "{model}"
context_length = 24
[data]
prompts_per_step = 3
samples_per_prompt = 4
[sampling]
max_tokens = 8
[weights]
dtype = "float64"
[checkpoint]
every = 1
[eval]
prompts = 4
[reward]
function = "tests.trainer.digits:first_digits"
"""


def write_run(folder: Path, model: Path, *, steps: int, out: str, more: str = "") -> Path:
    path = folder / f"{out}.toml"
    path.write_text(RUN.format(steps=steps, out=out, model=model) + more)
    return path


def run_local(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: torch.distributed, threads and signals are the process's."""
    environ = dict(os.environ) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    argv = [sys.executable, "-m", "trainer", str(path), "--local", *arguments]
    return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=240, check=False)


def metrics(folder: Path, out: str, *, of_try: bool = True) -> list[dict[str, Any]]:
    where = folder / out / "local" if of_try else folder / out
    return [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "more", ["", pytest.param("[lora]\nrank = 2\n", marks=pytest.mark.long)], ids=["all", "lora"]
)
def test_two_steps_run_in_one_process_and_a_resumed_run_repeats_the_second(
    more: str, model_folder: Path, tmp_path: Path
) -> None:
    done = run_local(write_run(tmp_path, model_folder, steps=2, out="whole", more=more))
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout
    whole = metrics(tmp_path, "whole")
    assert [(entry["kind"], entry["step"]) for entry in whole] == [
        ("eval", 0),
        ("train", 1),
        ("train", 2),
        ("eval", 2),
    ]
    assert whole[1]["tokens"] > 0
    assert whole[1]["reward_min"] <= whole[1]["reward"] <= whole[1]["reward_max"]
    assert whole[0]["seconds"] > 0
    log = tmp_path / "whole" / "local" / "samples.jsonl"
    assert log.stat().st_mode & 0o777 == 0o600
    kept = [json.loads(line) for line in log.read_text().splitlines()]
    assert {(one["purpose"], one["step"]) for one in kept} == {
        ("eval", 0),
        ("train", 1),
        ("train", 2),
        ("eval", 2),
    }
    assert len({one["group"] for one in kept if one["step"] == 1}) == 3, "one in 3 // 2"
    assert all(one["prompt"] and one["reward"] is not None and one["tokens"] > 0 for one in kept)
    assert [path.name for path in checkpoint.found(tmp_path / "whole" / "local")] == [
        "step-00000001",
        "step-00000002",
    ]

    first = checkpoint.found(tmp_path / "whole" / "local")[0]
    done = run_local(
        write_run(tmp_path, model_folder, steps=2, out="resumed", more=more), "--resume", str(first)
    )
    assert done.returncode == 0, done.stderr
    assert "after step 1" in done.stdout
    again = metrics(tmp_path, "resumed")
    assert [(entry["kind"], entry["step"]) for entry in again] == [("train", 2), ("eval", 2)]
    timing = {"at", "version", "phases", *(name for name in whole[2] if name.startswith(TIMES))}
    same = [
        {name: value for name, value in entry.items() if name not in timing} for entry in (whole[2], again[0])
    ]
    assert same[0] == same[1]
    roots = [
        checkpoint.read_state(checkpoint.found(tmp_path / out / "local")[-1]).root
        for out in ("whole", "resumed")
    ]
    assert roots[0] == roots[1]


@pytest.mark.parametrize(
    "more", ["", pytest.param("[lora]\nrank = 2\n", marks=pytest.mark.long)], ids=["all", "lora"]
)
def test_stop_texts_that_a_resumed_run_begins_with_end_its_samples_and_the_checkpoint_is_exported(
    more: str, model_folder: Path, tmp_path: Path
) -> None:
    """From then on a version holds the tokenizer: its root is another than the one that the older checkpoint names."""
    path = write_run(tmp_path, model_folder, steps=1, out="x", more=more)
    assert run_local(path).returncode == 0
    before = checkpoint.read_state(checkpoint.found(tmp_path / "x" / "local")[-1])
    path = write_run(tmp_path, model_folder, steps=2, out="x", more=more)
    path.write_text(path.read_text().replace("max_tokens = 8", 'max_tokens = 8\nstop = ["1", "23", "5"]'))
    done = run_local(path)
    assert done.returncode == 0, done.stderr
    assert "after step 1" in done.stdout
    log = (tmp_path / "x" / "local" / "samples.jsonl").read_text().splitlines()
    texts = [one["completion"] for one in map(json.loads, log) if one["step"] == 2]
    assert any("1" in text or "5" in text for text in texts)
    assert all(not set("15") & set(text[:-1]) for text in texts), texts
    after = checkpoint.read_state(checkpoint.found(tmp_path / "x" / "local")[-1])
    assert (before.step, before.tokenizer, after.step) == (1, "", 2)
    assert after.tokenizer == files.digest((model_folder / "tokenizer.json").read_bytes())
    config = configs.read_run(path)
    config = config.model_copy(
        update={"run": config.run.model_copy(update={"out_dir": tmp_path / "x" / "local"})}
    )
    told = export.export(config, tmp_path / "out", "auto", "")
    assert told.endswith("as published")
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.long
def test_a_try_with_steps_in_advance_trains_each_on_policy_and_says_so_and_tells_its_drafts(
    model_folder: Path, tmp_path: Path
) -> None:
    """Its engine loads weights between any two steps, and forgets what it holds then: samples of a later step wait for their turn."""
    path = write_run(tmp_path, model_folder, steps=3, out="x")
    path.write_text(path.read_text().replace("deterministic = true", "deterministic = false"))
    done = run_local(path, "--set", "algorithm.max_off_policy_steps=2", "--set", "engine.speculation=group")
    assert done.returncode == 0, done.stderr
    assert "max_off_policy_steps = 2 does nothing in a try" in done.stdout
    trained = [entry for entry in metrics(tmp_path, "x") if entry["kind"] == "train"]
    assert [(entry["step"], entry["staleness_max"]) for entry in trained] == [(1, 0.0), (2, 0.0), (3, 0.0)]
    assert all(entry["tokens_drafted"] >= entry["tokens_accepted"] >= 0 for entry in trained)
    assert all(entry["tokens_per_verification"] >= 1 for entry in trained)


def test_a_run_that_is_done_says_so_when_it_is_started_again(model_folder: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, model_folder, steps=1, out="done")
    assert run_local(path).returncode == 0
    again = run_local(path)
    assert (
        again.returncode,
        "nothing is left to train: 1 steps are done, run.steps = 1" in again.stdout,
    ) == (0, True)
    assert [(entry["kind"], entry["step"]) for entry in metrics(tmp_path, "done")] == [
        ("eval", 0),
        ("train", 1),
        ("eval", 1),
    ]


def test_a_try_is_kept_and_a_second_one_says_that_it_goes_on(model_folder: Path, tmp_path: Path) -> None:
    """What `scavenger samples`, `top`, `web` and every other reading command show of it, by the configuration in its folder."""
    path = write_run(tmp_path, model_folder, steps=1, out="x")
    first = run_local(path)
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines()[-1].startswith("finished: 1 steps")
    path = write_run(tmp_path, model_folder, steps=2, out="x")
    again = run_local(path)
    assert again.returncode == 0, again.stderr
    assert "after step 1 (--resume none starts over)" in again.stdout
    assert f"scavenger samples {path} --local" in again.stdout
    assert f"scavenger web -c {tmp_path}/x/local/scavenger.toml" in again.stdout
    url = configs.read_daemon(tmp_path / "x" / "local" / "scavenger.toml").ledger_url
    assert reports.check(url) == []
    engine = store.open_readonly(url)
    rows = [reader.samples_of_step(engine, "local", step) for step in (1, 2)]
    run = reader.run_by_name(engine, "local")
    engine.dispose()
    assert [len(of_step) for of_step in rows] == [12, 12]
    assert all(row.tokens and row.reward is not None for of_step in rows for row in of_step)
    assert run is not None
    assert (run.state, run.attempt, run.last_step) == ("finished", 2, 2)
    assert [entry["attempt"] for entry in metrics(tmp_path, "x")] == [1, 1, 1, 2, 2]
    # Of one group a step, by default: each token's difference of the trainer's logprob from its one engine's, which has the same weights.
    apart = reader.rows(
        store.open_readonly(url),
        "SELECT d.step, d.attempt, s.group_id, s.accepted_len, d.n_tokens, d.mean, d.differences FROM token_differences d "
        "JOIN samples s ON s.sample_id = d.sample_id WHERE s.state = 'consumed' ORDER BY d.id",
    ).rows
    assert {(row[0], row[1]) for row in apart} == {(1, 1), (2, 2)}
    assert len({row[2] for row in apart}) == 2
    assert all(row[3] == row[4] == len(row[6]) // 2 for row in apart)
    assert all(row[5] < 1e-3 for row in apart)
    given = ["--config", str(tmp_path / "x" / "local" / "scavenger.toml")]
    live = CliRunner().invoke(commands, ["top", *given, "--once", "--json"])
    assert live.exit_code == 0, live.output
    (seen,) = json.loads(live.stdout)["runs"]
    assert (seen["name"], seen["last_step"]) == ("local", 2)
    if importlib.util.find_spec("jinja2") is not None:
        shown = tmp_path / "run.html"
        done = CliRunner().invoke(commands, ["web", *given, "--export", str(shown), "--run", "local"])
        assert done.exit_code == 0, done.output
        text = shown.read_text(encoding="utf-8")
        assert "<h1>Run local</h1>" in text
        assert all(
            f'<main id="/runs/1/{page}">' in text for page in ("steps/1", "steps/2", "evals/0", "evals/2")
        )
        assert f'<main id="/groups/{rows[1][0].group_id}">' in text


def test_a_missing_model_is_an_error_with_its_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(write_run(tmp_path, tmp_path / "nowhere", steps=1, out="x")), "--local"]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_a_checkpoint_is_evaluated_without_training_and_the_try_stays_as_it_was(
    model_folder: Path, tmp_path: Path
) -> None:
    path = write_run(tmp_path, model_folder, steps=2, out="x")
    assert run_local(path, "--set", "eval.every=1").returncode == 0
    before = metrics(tmp_path, "x")
    done = run_local(path, "--evaluate", "--resume", str(tmp_path / "x/local/checkpoints/step-00000001"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("evaluated, nothing was trained")
    found = metrics(tmp_path / "x/local/evaluate", "step-00000001", of_try=False)
    own = [one for one in before if (one["kind"], one["step"]) == ("eval", 1)]
    assert [_figures(one) for one in found] == [_figures(one) for one in own], "a deterministic run"
    assert metrics(tmp_path, "x") == before
    assert checkpoint.steps(tmp_path / "x/local") == [1, 2]


def _figures(entry: dict[str, Any]) -> dict[str, Any]:
    own = (*TIMES, "attempt", "version", "time", "at")
    return {name: value for name, value in entry.items() if not name.startswith(own)}


def test_an_evaluation_alone_wants_held_out_prompts_and_one_process(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path, model_folder, steps=1, out="x")
    with pytest.raises(SystemExit):
        main([str(path), "--evaluate"])
    assert "--evaluate needs --local" in capsys.readouterr().err
    done = run_local(path, "--evaluate")
    assert (done.returncode, "there is no checkpoint in" in done.stderr) == (2, True)
    done = run_local(path, "--evaluate", "--resume", "none", "--set", "eval.prompts=0")
    assert (done.returncode, "no held-out prompts" in done.stderr) == (2, True)


def test_two_tries_at_once_are_refused_before_either_loses_anything(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path, model_folder, steps=1, out="x")
    with alone(tmp_path / "x/local"):
        assert main([str(path), "--local"]) == 2
    said = capsys.readouterr().err
    assert f"another try runs in {tmp_path}/x/local (process {os.getpid()} on " in said
    assert "--set run.out_dir=OTHER" in said
    with alone(tmp_path / "x/local"):  # the first one has ended
        pass


def test_a_try_without_its_engine_ends_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name))
    path = write_run(tmp_path, tmp_path / "no-model", steps=1, out="x", more='[engine]\nname = "vllm"\n')
    assert (
        main([str(path), "--local", "--set", "run.deterministic=false", "--set", "weights.dtype=float32"])
        == 2
    )
    said = capsys.readouterr().err
    assert f"{sys.executable} has no vLLM" in said
    assert "--set engine.name=reference" in said
