"""`scavenger init --environment`, and what its check says of one: sandboxes, what is missing, and histories that do not go on."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from scavenger.config import read_run
from scavenger.errors import StartFinding
from tests.trainer.episodes.interpreters import needs_verifiers, python_with_verifiers
from tests.trainer.episodes.test_played import TEMPLATE
from tests.trainer.prepare.hand import NO_GPU, edit, refused
from trainer.prepare import __main__ as program
from trainer.prepare import check


def drafted(folder: Path, model: Path, environment: str, *more: str) -> Path:
    words = [f"--model={model}", f"--environment={environment}", "--engine=reference", "--gpus=0", *more]
    assert program.main(["draft", str(folder), *words]) == 0
    return folder / "run.toml"


@pytest.mark.sandbox
def test_agents_programs_are_in_sandboxes_where_this_machine_makes_them(
    own_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = drafted(tmp_path / "played", own_model, "my-env")
    assert read_run(run).data.sandbox == "bubblewrap"
    assert "data.sandbox = bubblewrap" in capsys.readouterr().out


def test_where_it_makes_none_the_file_says_why_and_a_built_in_environment_has_none(
    own_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    run = drafted(tmp_path / "played", own_model, "my-env")
    assert read_run(run).data.sandbox == "none"
    assert (
        "run as you, with your files. No sandbox on the machine of init: no program bwrap here.\n#sandbox"
        in run.read_text()
    )
    assert "no data.sandbox" in capsys.readouterr().out
    assert "init --check tells it" in run.read_text(), "its agent may have another name"
    run = drafted(tmp_path / "added", own_model, "builtin:calculator")
    assert not {"sandbox", "environment_args", "renderer"} & set(run.read_text().replace("#", "").split())


def test_a_python_without_the_gateway_s_packages_is_refused_before_anything_is_played(
    own_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    run = drafted(tmp_path / "played", own_model, "my-env")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    found = refused(run)["environment"]
    assert "has no uvicorn" in found
    assert "'WHEEL[gateway]', of a clone '.[gateway]'" in found


def test_only_what_needs_attention_is_reported() -> None:
    plain, box = {"agent": "subprocess", "judge": "apptainer"}, {"agent": "apptainer"}
    [told] = check.episode_warnings("none", plain, 2, 2, 5)
    assert "the programs of agent, such as a shell, run as you" in told
    assert check.episode_warnings("bubblewrap", plain, 2, 2, 5) == []
    assert check.episode_warnings("none", box, 1, 1, 5) == []
    assert check.episode_warnings("none", {}, 0, 2, 2) == [], "a built-in one, whose histories go on"
    [told] = check.episode_warnings("bubblewrap", plain, 1, 4, 4)
    assert told.startswith("LOOK, 4 rows of 4 turns, of 1 agent: the harness writes its history anew")


@pytest.mark.parametrize("plays", [check.ENVIRONMENT, check.EPISODES])
def test_no_try_is_proposed_that_a_run_with_episodes_refuses(plays: str) -> None:
    findings = [
        StartFinding(plays, note="6 tasks\nLOOK, 4 rows"),
        StartFinding(check.DAEMON, "there is no daemon"),
    ]
    said, fine = check.report(Path("/r/run.toml"), findings)
    assert not fine
    assert not any("--local" in line for line in said)
    assert said[1:3] == [f"  ok       {plays}: 6 tasks", "           LOOK, 4 rows"]


@needs_verifiers
@pytest.mark.timeout(600)
def test_the_check_reports_the_agents_and_its_warnings(
    own_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tests.trainer.episodes as episodes

    monkeypatch.setenv("PYTHONPATH", str(Path(str(episodes.__file__)).parent))
    monkeypatch.setattr("trainer.sandbox.box.fault_here", lambda: "none is wanted")
    edit(own_model / "tokenizer_config.json", chat_template=TEMPLATE)
    run = drafted(
        tmp_path / "played", own_model, "counting_env", f"--environment-python={python_with_verifiers()}"
    )
    text = run.read_text()
    args = '{ taskset = { turns = 3 }, agent = { harness = { id = "counting_env", anew = true } } }'
    run.write_text(text.replace("[data]\n", f"[data]\nenvironment_args = {args}\n"))
    [found] = [one for one in check.check(run, NO_GPU) if one.what == "environment"]
    assert found.problem == ""
    said, alone, anew = found.note.splitlines()
    assert said.startswith("6 tasks; agents: agent (subprocess); an episode with a stub model had 3 turns")
    assert "without a sandbox the programs of agent" in alone
    assert "3 rows of 3 turns, of 1 agent" in anew
