"""`scavenger init`: what a run's files say, and the command."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.config import read_run
from scavenger.errors import ConfigError
from scavenger.sizing import fit, phases
from scavenger.sizing.training import GB
from tests.trainer.prepare.hand import RAISES, ROOT, draft, edit, refused
from trainer.prepare import __main__ as prepare
from trainer.prepare import check, model, rows
from trainer.prepare.check import RequestedGpus
from trainer.prepare.draft import shape_of


def test_the_files_of_a_new_run_can_be_submitted_as_they_are(run: Path, own_model: Path, data: Path) -> None:
    config = read_run(run)
    assert (config.run.name, config.model.path, config.data.path, config.data.task) == (
        "my-run",
        own_model,
        data,
        "jsonl",
    )
    assert (config.data.prompt_field, config.data.answer_field, config.data.chat) == (
        "question",
        "answer",
        False,
    )
    assert (config.reward.function, config.reserved.workers, config.weights.listen) == (
        "trainer.verifiers:math",
        2,
        "",
    )
    assert config.model.context_length == 64
    assert config.sampling.max_tokens == 32
    assert "#stop_token_ids = [1]" in run.read_text()
    script = run.with_name("train.sbatch")
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert replace(check.gpus_of(script.read_text()), node_gb=0.0) == RequestedGpus(2, 2, 80.0)
    findings = list(check.check(run, check.gpus_of(script.read_text())))
    assert [finding.problem for finding in findings] == [""] * 14
    assert not any(finding.skipped for finding in findings)


def test_what_was_assumed_is_told_once_with_where_to_change_it(
    own_model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft(tmp_path / "one", own_model, data)
    block = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    told = "\n".join(block)
    for words in (
        "--partition=reserved",
        "80 GB",
        "no --account",
        "run.state_dir",
        "model.context_length = 64",
        "reward.function = ",
    ):
        assert sum(words in line for line in block) == 1, (words, told)
    assert "GPUs a node" not in told, "--gpus was given"
    assert all(re.match("  (train.sbatch|run.toml|scavenger.toml) ", line) for line in block)
    assert max(map(len, block)) <= 140
    made = read_run(tmp_path / "one" / "run.toml")
    size = f"{made.data.prompts_per_step} x {made.data.samples_per_prompt}"
    (rate,) = re.findall(rf"{made.run.steps} steps of {size} completions, lr (\S+) ", told)
    assert float(rate) == made.optimizer.lr
    script = (tmp_path / "one" / "train.sbatch").read_text()
    assert "\n#SBATCH --signal=B:USR1@180\n" in script, "else the time limit ends it without a checkpoint"
    (days,) = re.findall(
        r"^#SBATCH --time=(\d+)-00:00:00$", (tmp_path / "one" / "train.sbatch").read_text(), re.M
    )
    assert f"no --account, no --qos, {days} days " in told
    draft(
        tmp_path / "two",
        own_model,
        data,
        "--partition=gold",
        "--gpu-memory-gb=40",
        f"--state-dir={tmp_path}",
        "--reward=a:b",
    )
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


def test_a_chat_model_gets_its_template_its_end_tokens_and_no_thoughts(
    own_model: Path, data: Path, tmp_path: Path
) -> None:
    (own_model / "chat_template.jinja").write_text(
        "{% if enable_thinking %}9{% endif %}{{ messages[-1].content }}"
    )
    edit(own_model / "generation_config.json", eos_token_id=[1, 0])
    facts = model.read_facts(own_model)
    assert (facts.end, facts.end_source, facts.model_type) == ((1, 0), "generation_config.json", "qwen3")
    assert draft(tmp_path / "chatty", own_model, data) == 0
    config = read_run(tmp_path / "chatty" / "run.toml")
    assert (config.data.chat, config.data.chat_options) == (True, {"enable_thinking": False})
    assert "boxed" in config.data.system


@pytest.mark.parametrize(
    ("answers", "chat", "function"),
    [
        ("12", False, "exact"),
        ("12", True, "math"),
        ("so it is #### 12", False, "math"),
        ("$x^2$", False, "math"),
    ],
)
def test_without_math_verify_the_reward_is_one_that_is_there_or_its_extra_is_named(
    own_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    answers: str,
    chat: bool,
    function: str,
) -> None:
    """A newcomer's first run was given a reward that his Python lacked, and `--check` said so after he had changed the rest."""
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "math_verify" else there(name)
    )
    if chat:
        (own_model / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}>", "answer": answers}) + "\n" for n in range(10)))
    assert draft(tmp_path / "first", own_model, path) == 0
    told = capsys.readouterr().out
    assert read_run(tmp_path / "first" / "run.toml").reward.function == f"trainer.verifiers:{function}"
    assert ("by the letter: no math-verify here" in told) is (function == "exact")
    assert ("LOOK: trainer.verifiers:math needs math-verify" in told) is (function == "math")
    assert ("pip install 'scavenger[math]'" in told) is (function == "math")
    assert draft(tmp_path / "own", own_model, path, "--reward=mine:reward") == 0
    assert "math-verify" not in capsys.readouterr().out


def test_columns_are_found_or_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "q", "solution": "ab", "extra": 1}\n')
    found = rows.read_facts(path)
    assert (found.prompt_field, found.answer_field, found.mathematics) == ("question", "solution", False)
    path.write_text('{"q": "1 + 1", "a": "2"}\n')
    with pytest.raises(ConfigError, match=r"which column is the prompt\? There is 'q', 'a'") as error:
        rows.read_facts(path)
    assert "--prompt-field" in error.value.remedy
    found = rows.read_facts(path, "q", "a")
    assert (found.prompt_field, found.answer_field, found.mathematics) == ("q", "a", True)
    with pytest.raises(ConfigError, match="no column 'z'"):
        rows.read_facts(path, "z", "a")
    path.write_text('{"": "1>"}\n')
    with pytest.raises(ConfigError, match="no column with a name"):
        rows.read_facts(path, "z", "")


def test_what_ones_own_reward_function_receives_is_told_and_where_its_module_goes(
    own_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = tmp_path / "a.jsonl", tmp_path / "run"
    path.write_text('{"question": "1>", "solution": "1", "hint": "x\\u001b"}\n' * 10)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # as `python -m` does with the folder it is called in
    (tmp_path / "mine.py").write_text("raise SystemExit('it is not imported')")
    assert draft(folder, own_model, path, "--reward=mine:score") == 0
    told = capsys.readouterr().out
    assert "reward: score(prompt: str, completion: str, meta: dict) -> float" in told
    assert (
        "meta has 'solution', 'hint', 'answer' (the column 'solution'), 'row' (the row's number, from 0)\n"
        in told
    )
    assert f"there is no module mine yet: write it as {folder / 'mine.py'}" in told
    (tmp_path / "mine.py").rename(folder / "mine.py")
    assert draft(folder, own_model, path, "--reward=mine:score", "--force") == 0
    told = capsys.readouterr().out
    assert ("meta has 'solution'" in told, "no module" in told) == (True, False)
    for installed in ("json:loads", "trainer.judge:reward"):
        assert draft(folder, own_model, path, f"--reward={installed}", "--force") == 0
        told = capsys.readouterr().out
        assert ("meta has" in told, "no module" in told) == (installed == "json:loads", False)


def test_a_run_on_rows_without_answers_is_drafted_once_its_reward_is_named(
    own_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"prompt": "{n}>"}}\n' for n in range(10)))
    assert rows.read_facts(path).answer_field == ""
    assert draft(tmp_path / "refused", own_model, path) == 2
    told = capsys.readouterr().err
    assert "no column looks like answers" in told
    assert "there is 'prompt'" in told
    assert "--reward MODULE:FUNCTION" in told
    assert draft(tmp_path / "judged", own_model, path, "--reward", "trainer.judge:reward") == 0
    out = capsys.readouterr().out
    assert "prompts in 'prompt', no answers" in out
    assert "rows have no answers" in out
    text = (tmp_path / "judged" / "run.toml").read_text()
    assert "answer_field" not in read_run(tmp_path / "judged" / "run.toml").data.model_fields_set
    assert "what the reward verifies against" not in text


def test_a_folder_with_splits_is_read_by_split(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "main").mkdir()
    for name in ("train-00000-of-00001", "test-00000-of-00001"):
        parquet.write_table(
            arrow.table({"question": [name], "answer": ["x #### 1"]}), tmp_path / "main" / f"{name}.parquet"
        )
    found = rows.read_facts(tmp_path)
    assert (found.task, found.mathematics) == ("parquet", True)
    assert found.path == str(tmp_path / "main" / "train*.parquet")
    assert found.held_out == str(tmp_path / "main" / "test*.parquet")
    assert found.rows[0]["question"].startswith("train")


@pytest.mark.parametrize(
    ("train", "test", "eval_prompts"),
    [(1, 0, 0), (2, 0, 1), (40, 0, 8), (220, 0, 44), (5000, 0, 256), (40, 30, 30), (40, 300, 256)],
)
def test_a_new_run_holds_out_no_more_problems_than_there_are(
    tmp_path: Path, train: int, test: int, eval_prompts: int
) -> None:
    for name, count in (("train", train), ("test", test)):
        (tmp_path / f"{name}.jsonl").write_text('{"question": "1", "answer": "1"}\n' * count)
    found = rows.read_facts(tmp_path)
    assert (found.eval_prompts, bool(found.held_out)) == (eval_prompts, bool(test))


@pytest.mark.parametrize("nothing", ["nothing.jsonl", "empty"])
def test_data_that_is_not_there_is_told(nothing: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"data\.path"):
        rows.read_facts(tmp_path / nothing)


def command(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "scavenger", "init", *words]
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def test_init_writes_and_checks_a_run_and_says_what_is_wrong(
    own_model: Path, data: Path, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "scavenger.toml").write_text(f'[daemon]\nstate_dir = "{site}"\n')
    words = (
        "--model",
        "model",
        "--data",
        "data.jsonl",
        "--gpus",
        "0",
        "--engine",
        "reference",
        "--reward",
        "mine:f",
    )
    made = command("a-run", *words, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert read_run(tmp_path / "a-run" / "run.toml").run.state_dir == site
    (tmp_path / "a-run" / "mine.py").write_text(RAISES)
    bad = command("a-run", "--check", cwd=tmp_path)
    assert (bad.returncode, bad.stdout.count("ok  "), bad.stdout.count("REFUSED")) == (2, 13, 1), (
        bad.stdout + bad.stderr
    )
    assert "reward function mine:f failed 1 times: it raised KeyError" in bad.stdout


def test_half_a_run_and_no_run_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert "both --model and --data" in command("x", "--model", "m", cwd=tmp_path).stderr
    nothing = command("--check", cwd=tmp_path)
    assert nothing.returncode == 2
    assert "holds no run.toml" in nothing.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_script_asks_for_the_memory_that_the_check_counts(
    own_model: Path, data: Path, tmp_path: Path
) -> None:
    """Without it Slurm's default counts, of which nothing is known here."""
    folder = tmp_path / "run"
    assert draft(folder, own_model, data, "--gpus=2", "--gpu-memory-gb=80") == 0
    script = folder / "train.sbatch"
    (gib,) = re.findall(r"^#SBATCH --mem=(\d+)G$", script.read_text(), re.M)
    asked = check.gpus_of(script.read_text())
    config, facts = read_run(folder / "run.toml"), model.read_facts(own_model)
    job = check.job_of(config, shape_of(facts), asked, config.model.context_length)
    assert fit.host_problem(shape_of(facts), job, asked.node_gb) == ("", "")
    assert int(gib) == fit.asked_gib(shape_of(facts), job)
    least = phases.node_nbytes(shape_of(facts), job) / GB
    assert fit.host_problem(shape_of(facts), job, 0.99 * least)[0]
    assert draft(tmp_path / "none", own_model, data, "--gpus=0") == 0
    assert "--mem" not in (tmp_path / "none" / "train.sbatch").read_text()


@pytest.mark.slurm
def test_slurm_takes_the_job_script(
    own_model: Path, data: Path, tmp_path: Path, slurm_sandbox: SlurmSandbox
) -> None:
    folder = tmp_path / "a folder" / "my-run"
    assert draft(folder, own_model, data, "--gpus=1") == 0
    argv = ["sbatch", "--test-only", str(folder / "train.sbatch")]
    said = subprocess.run(
        argv, env=slurm_sandbox.env, capture_output=True, text=True, timeout=60, check=False
    )
    assert said.returncode == 0, said.stderr
    assert "partition reserved" in said.stderr


def test_a_run_on_an_environment_names_it_in_the_place_of_files(
    own_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tmp_path / "played"), f"--model={own_model}", "--environment=my-env", "--gpus=0"]
    assert prepare.main(["draft", *words, "--environment-python=/envs/bin/python"]) == 0
    text = (tmp_path / "played" / "run.toml").read_text()
    config = read_run(tmp_path / "played" / "run.toml")
    assert (config.data.environment, str(config.data.environment_python)) == ("my-env", "/envs/bin/python")
    assert (config.data.path, config.data.episode_turns, config.data.on_divergence) == (None, 16, "branch")
    assert (config.eval.prompts, config.eval.path) == (0, None)
    assert "trained on my-env" in text
    told = capsys.readouterr().out
    assert "data.environment = my-env" in told
    assert "; no chat template\n" in told
    assert "--local" not in told + text  # which an environment's run refuses
    assert "prompt_field" not in told
    assert max(len(line) for line in told.splitlines() if line.startswith("  ")) <= 140
    assert prepare.main(["draft", str(tmp_path / "again"), *words[1:]]) == 0
    assert "#environment_python" in (tmp_path / "again" / "run.toml").read_text()


def test_paths_of_the_options_are_the_working_folder_s_and_a_python_that_is_not_there_is_a_finding(
    own_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "envs").symlink_to(tmp_path / "elsewhere")
    words = [
        f"--model={own_model.name}",
        "--environment=my-env",
        "--environment-python=envs/python",
        "--gpus=0",
    ]
    assert prepare.main(["draft", "played", *words, "--engine=reference", "--state-dir=site/state"]) == 0
    path = tmp_path / "played" / "run.toml"
    config, text = read_run(path), path.read_text()
    assert config.run.state_dir == tmp_path / "site/state"
    assert f'environment_python = "{tmp_path}/envs/python"' in text, (
        "as it was said: a venv's Python is a link"
    )
    assert prepare.main(["tiny", "first", "--state-dir=site/state", "--gpus=0"]) == 0
    assert read_run(tmp_path / "first" / "run.toml").run.state_dir == tmp_path / "site/state"
    found = refused(path)["environment"]
    assert found.startswith(f"data.environment_python: there is no {tmp_path}/envs/python\n")
    assert "name the Python of a venv with scavenger[verifiers]" in found
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "python").write_text("")
    assert f"{tmp_path}/envs/python cannot be started: Permission denied" in refused(path)["environment"]
