"""Several files laid over each other, and keys of the command line: what counts, and where it came from."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scavenger import config as configs
from scavenger.cli import samples
from scavenger.cli.main import app
from scavenger.config import RunConfig, read_daemon, read_run
from scavenger.errors import ConfigError
from trainer.__main__ import parse
from trainer.arguments import layers_among

RUN = """
[run]
name = "r"
steps = 3
state_dir = "state"
out_dir = "out"
[model]
path = "model"
context_length = 24
[sampling]
max_tokens = 8
[optimizer]
lr = 1e-5
betas = [0.5, 0.6]
"""
OVER = """
[optimizer]
lr = 2e-5
[data]
task = "jsonl"
path = "rows.jsonl"
[[eval.sets]]
name = "hard"
path = "hard.jsonl"
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "over.toml").write_text(OVER)
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def shown(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, ["config", "show", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def test_the_later_file_wins_key_by_key_and_the_command_line_over_all(run: Path, tmp_path: Path) -> None:
    over = tmp_path / "shared" / "over.toml"
    found = read_run(run, [over], ["optimizer.warmup_steps=7", "algorithm.name=gspo", "run.name=123"])
    assert (found.optimizer.lr, found.optimizer.betas, found.optimizer.warmup_steps) == (2e-5, (0.5, 0.6), 7)
    assert (found.algorithm.name, found.run.name) == ("gspo", "123"), (
        "text without quotes, also where it looks like a number"
    )
    assert read_run(run, [over], ["optimizer.lr=3e-5"]).optimizer.lr == 3e-5


def test_a_relative_path_is_relative_to_the_file_that_says_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    found = read_run(run, [tmp_path / "shared" / "over.toml"], ["run.out_dir=mine"])
    assert found.model.path == tmp_path / "model"
    assert found.data.path == tmp_path / "shared" / "rows.jsonl"
    assert [one.path for one in found.eval.sets] == [tmp_path / "shared" / "hard.jsonl"]
    assert found.run.out_dir == tmp_path / "here" / "mine"
    assert found.reward.path == tmp_path, "a default is relative to the first file"


def test_the_local_backend_s_folder_is_relative_to_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/scavenger.toml").write_text(
        '[daemon]\nstate_dir = "state"\n[cluster]\nbackend = "local"\nlocal_dir = "cluster"\n'
    )
    monkeypatch.chdir(tmp_path)
    found = read_daemon(Path("site/scavenger.toml"), sets=["cluster.poll_interval_s=5"])
    assert found.daemon.state_dir == tmp_path / "site/state"
    assert found.cluster.local_dir == tmp_path / "site/cluster"
    assert found.cluster.poll_interval_s == 5


@pytest.mark.parametrize(
    ("text", "section", "key", "value"),
    [
        ("sampling.stop_token_ids=[1, 2]", "sampling", "stop_token_ids", (1, 2)),
        ('sampling.stop=["a=b"]', "sampling", "stop", ("a=b",)),
        ("run.harvest=false", "run", "harvest", False),
        ("reward.options.pattern=[0-9]+", "reward", "options", {"pattern": "[0-9]+"}),
        ("reward.options={ depth = 2 }", "reward", "options", {"depth": 2}),
        ("reward.function=mine:judge", "reward", "function", "mine:judge"),
    ],
)
def test_a_value_is_toml_or_text(run: Path, text: str, section: str, key: str, value: object) -> None:
    assert getattr(getattr(read_run(run, sets=[text]), section), key) == value


def test_tables_of_one_key_are_filled_one_by_one(run: Path) -> None:
    assert read_run(run, sets=["reward.options.a=1", "reward.options.b=2"]).reward.options == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("algorithm", "sets no key"),
        ("learning_rate=3", "sets no key: write optimizer.lr"),
        ("lr=3", "sets no key: did you mean optimizer.lr?"),
        ("algorithm=1", "sets no key"),
        ("algorithm..name=1", "sets no key"),
        ("optimizer.learning_rate=1", "--set: unknown key 'optimizer.learning_rate': write optimizer.lr"),
        ("optimizer.lr=fast", "--set: optimizer.lr = 'fast': text where a number is wanted"),
        ("sampling.stop=a", "--set: sampling.stop = 'a': a list is wanted, as [...]"),
        (
            "data.sets.0.path=x",
            "--set: data.sets: a list is wanted, as [...]; its elements cannot be set one by one",
        ),
        ("sampling.max_tokens=24", "sampling.max_tokens must be below model.context_length"),
    ],
)
def test_what_cannot_be_is_refused_and_says_that_the_command_line_has_it(
    run: Path, text: str, told: str
) -> None:
    with pytest.raises(ConfigError) as error:
        read_run(run, sets=[text])
    assert told in error.value.cause
    assert "tuple" not in error.value.cause
    assert "quotes" not in error.value.cause, "there were none"


def test_an_error_names_the_file_that_has_the_key(run: Path, tmp_path: Path) -> None:
    over = tmp_path / "shared" / "over.toml"
    over.write_text("[optimizer]\nlrr = 1\n")
    with pytest.raises(ConfigError) as error:
        read_run(run, [over])
    assert error.value.cause == f"{over}: unknown key 'optimizer.lrr': did you mean optimizer.lr?"
    with pytest.raises(ConfigError, match=r"nowhere\.toml: No such file"):
        read_run(run, [tmp_path / "nowhere.toml"])


def test_a_daemon_s_files_stand_in_one_variable_with_a_colon_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "etc").mkdir()
    site, mine = tmp_path / "etc" / "site.toml", tmp_path / "mine.toml"
    site.write_text('[daemon]\nstate_dir = "state"\n[harvest]\npartition = "idle"\nmax_engines = 4\n')
    mine.write_text("[harvest]\nmax_engines = 2\n")
    both = Path(f"{site}:{mine}")
    found = read_daemon(both)
    assert (found.harvest.partition, found.harvest.max_engines) == ("idle", 2)
    assert found.daemon.state_dir == tmp_path / "etc" / "state"
    assert read_daemon(both, sets=["harvest.max_engines=9"]).harvest.max_engines == 9
    monkeypatch.setenv("SCAVENGER_CONFIG", str(both))
    said = shown("--origin", "--given")
    assert f"max_engines = 2     # {mine}" in said
    assert f'partition = "idle"  # {site}' in said
    odd = tmp_path / "a:b.toml"
    odd.write_text(site.read_text())
    assert read_daemon(odd).harvest.max_engines == 4, "a file may have a colon in its name"


def test_config_show_prints_every_key_as_toml_that_makes_the_same_run(run: Path, tmp_path: Path) -> None:
    over = tmp_path / "shared" / "over.toml"
    said = shown(run, "--over", over, "--set", "algorithm.name=gspo")
    (tmp_path / "elsewhere").mkdir()
    whole = tmp_path / "elsewhere" / "whole.toml"
    whole.write_text(said)
    assert read_run(whole) == read_run(run, [over], ["algorithm.name=gspo"])
    sections = tomllib.loads(said)
    assert sections.keys() == RunConfig.model_fields.keys()


def test_config_show_says_where_each_value_came_from_and_hides_a_password(run: Path, tmp_path: Path) -> None:
    over = tmp_path / "shared" / "over.toml"
    lines = shown(run, "--over", over, "--set", "algorithm.name=gspo", "--origin").splitlines()
    found = {line.split(" ")[0]: line.rpartition("  # ")[2] for line in lines if "  # " in line}
    assert (found["lr"], found["steps"], found["sets"]) == (str(over), str(run), str(over))
    assert (found["clip_norm"], found["#clip_low"]) == ("default", "default")
    assert 'name = "gspo"' in "\n".join(lines)
    run.write_text(RUN + "[reward]\noptions = { a = 1, b = 2 }\n")
    sets = ["--set", "reward.options.a=5", "--set", "reward.options.c=6"]
    lines = shown(run, *sets, "--origin", "--given").splitlines()
    assert [line.rpartition("  # ")[2] for line in lines if line.startswith("options")] == [f"{run}, --set"]
    path = tmp_path / "scavenger.toml"
    path.write_text('[daemon]\nstate_dir = "s"\nledger = "postgresql://me:secret@host/db"\n')
    said = shown(path)
    assert "secret" not in said
    assert "may hold a password" in said


def test_ranks_and_their_launcher_take_the_same_layers() -> None:
    arguments = [
        "--resume",
        "none",
        "--set",
        "algorithm.name=gspo",
        "--over=a.toml",
        "--set=run.steps=2",
        "--over",
        "b.toml",
    ]
    options = parse(["run.toml", *arguments])
    assert (options.over, options.set) == (
        [Path("a.toml"), Path("b.toml")],
        ["algorithm.name=gspo", "run.steps=2"],
    )
    assert layers_among(arguments) == (options.over, options.set)


def test_a_file_alone_is_read_as_ever(run: Path) -> None:
    assert configs.laid_over(RunConfig, run).document == tomllib.loads(RUN)


def test_a_try_is_shown_where_the_daemon_s_files_cannot_be_read_and_not_where_they_are_two(
    run: Path, tmp_path: Path
) -> None:
    """A name that is too long fails as a folder does that this user may not enter."""
    tried = tmp_path / "out" / "local" / "scavenger.toml"
    tried.parent.mkdir(parents=True)
    tried.touch()
    daemon = tmp_path / "scavenger.toml"
    daemon.touch()
    for named, place in (
        (daemon, daemon),
        (Path(f"{daemon}:{run}"), Path(f"{daemon}:{run}")),
        (Path(f"{daemon}:{tmp_path / 'none.toml'}"), tried),
        (tmp_path / ("x" * 300) / "scavenger.toml", tried),
    ):
        assert samples.place(str(run), named, local=False) == ("r", place)


def test_a_file_in_a_folder_that_may_not_be_looked_into_is_an_error_of_the_configuration(
    tmp_path: Path,
) -> None:
    """As root's own folder is to the daemon's user. A name that is too long fails in the same way for root too."""
    path = tmp_path / ("x" * 300) / "scavenger.toml"
    for words in (["doctor", "--config", str(path)], ["simulate", "--live", "--config", str(path)]):
        done = CliRunner().invoke(app, words)
        error = done.exception
        assert isinstance(error, ConfigError), error
        assert error.cause.endswith("File name too long")
        assert "a site's is its admin's: /etc/scavenger/scavenger.toml" in error.remedy
