"""A site's scavenger.toml, as `scavenger init` writes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from scavenger import config
from scavenger.cli import init as cli_init
from scavenger.cli import main
from scavenger.doctor import train_script
from scavenger.protocol import keys


def test_a_site_s_file_is_its_user_s_alone_and_leaves_the_backend_to_be_found(tmp_path: Path) -> None:
    url = "postgresql://scavenger:secret@db/scavenger"
    done = CliRunner().invoke(main.app, ["init", str(tmp_path / "site"), "--ledger", url])
    assert (done.exit_code, done.exception) == (0, None)
    path = tmp_path / "site" / "scavenger.toml"
    assert path.stat().st_mode & 0o777 == 0o600, "it holds the ledger's password"
    read = config.read_daemon(path)
    assert (read.ledger_url, read.cluster.backend, read.harvest.partition) == (url, "auto", "scavenge")


def init(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(main.app, ["init", *map(str, words)], terminal_width=200)
    return done.exit_code, done.output + (str(done.exception) if done.exception else "")


def test_what_a_site_s_file_assumes_is_told_with_its_keys_and_what_was_said_is_not(tmp_path: Path) -> None:
    code, said = init(tmp_path / "a")
    assert code == 0
    keys = (
        "harvest.partition = 'scavenge'",
        "daemon.listen = '0.0.0.0'",
        "daemon.ledger = ''",
        "harvest.account",
        "harvest.max_engines =",
    )
    assert [key for key in keys if key not in said] == [], said
    code, said = init(tmp_path / "b", "--partition", "scavenge", "--ledger", "sqlite:////var/tmp/x.sqlite3")
    assert (code, "harvest.partition" in said, "daemon.ledger" in said, "daemon.listen" in said) == (
        0,
        False,
        False,
        True,
    ), said


def test_a_file_that_is_there_is_not_left_in_silence_when_options_say_otherwise(tmp_path: Path) -> None:
    assert init(tmp_path, "--partition", "idle")[0] == 0
    path = tmp_path / "scavenger.toml"
    before = path.read_bytes()
    code, said = init(tmp_path, "--partition", "scavenge", "--ledger", "postgresql://me:secret@db/x")
    assert code != 0
    assert "--partition was not applied (harvest.partition = 'idle' there); --ledger was not applied" in said
    assert "change harvest.partition, daemon.ledger in it" in said
    assert "secret" not in said
    assert path.read_bytes() == before
    code, said = init(tmp_path, "--partition", "idle")
    assert (code, f"left {path} as it is" in said) == (0, True), "it says what was asked for already"
    assert init(tmp_path)[0] == 0


def test_an_option_that_would_do_nothing_is_refused(tmp_path: Path) -> None:
    for words, named in (
        (["--gpus", "4", "--reward", "my:f"], "--gpus, --reward is of a run"),
        (["--check", "--partition", "x"], "--partition changes nothing of a run that is checked"),
        (["--model", "m", "--data", "d", "--ledger", "x"], "--ledger is of a site's scavenger.toml"),
    ):
        code, said = init(tmp_path / "new", *words)
        assert code == 2, said
        assert named in " ".join(said.replace("│", " ").split()), said
        assert not (tmp_path / "new").exists()


def test_a_daemon_s_host_is_announced_by_the_name_that_it_has_where_it_runs(tmp_path: Path) -> None:
    init(tmp_path / "any")
    assert config.read_daemon(tmp_path / "any" / "scavenger.toml").daemon.advertise == ""
    init(tmp_path / "one", "--listen", "10.0.0.7")
    assert config.read_daemon(tmp_path / "one" / "scavenger.toml").daemon.advertise != ""


def test_a_site_s_file_beside_a_run_gives_its_engines_jobs_what_the_run_s_model_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def prepare(words: list[str], folder: Path, *, quiet: bool = False) -> str:
        asked.append((words, quiet))
        return '{"cpus_per_engine": 6, "memory_mb_per_engine": 56320}'

    monkeypatch.setattr(cli_init, "_prepare", prepare)
    assert init(tmp_path / "alone")[0] == 0
    assert asked == []
    (tmp_path / "run.toml").write_text("")
    code, said = init(tmp_path, "--partition", "idle")
    assert (code, asked) == (0, [(["host", str(tmp_path)], True)]), said
    harvest = config.read_daemon(tmp_path / "scavenger.toml").harvest
    assert (harvest.partition, harvest.cpus_per_engine, harvest.memory_mb_per_engine) == ("idle", 6, 56320)


def test_slurm_names_the_gpus_of_the_partition_unless_the_user_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[list[str]] = []
    monkeypatch.setattr(cli_init, "_prepare", lambda words, folder, quiet=False: told.append(words) or "")
    gold = train_script.GpuNodes(("a100", "h100"), 515000)
    nodes: dict[str, train_script.GpuNodes] = {"gold": gold}
    monkeypatch.setattr(
        train_script, "gpu_nodes", lambda partition, gpus: nodes.get(partition, train_script.GpuNodes())
    )
    monkeypatch.chdir(tmp_path)
    for words, expected in (
        (["--partition", "gold"], ["--slurm-gpu=a100,h100", "--slurm-memory-mb=515000"]),
        ([], []),
        (["--partition", "gold", "--gpu", "h200"], ["--gpu=h200", "--slurm-memory-mb=515000"]),
        (["--partition", "gold", "--gpu-memory-gb", "40"], ["--slurm-memory-mb=515000"]),
        (["--partition", "gold", "--gpus", "0"], []),
    ):
        assert init(tmp_path / "run", "--model", "m", "--data", "d", *words)[0] == 0
        assert [word for word in told[-1] if word.startswith(("--slurm-", "--gpu="))] == expected
    monkeypatch.setenv("SCAVENGER_BACKEND", "local")
    assert init(tmp_path / "run", "--model", "m", "--data", "d", "--partition", "gold")[0] == 0
    assert not any(word.startswith("--slurm-gpu") for word in told[-1]), (
        "Slurm knows nothing of the local backend's nodes"
    )


@pytest.mark.parametrize(("local", "refused"), [(False, True), (True, True), (False, False)])
def test_a_check_holds_train_sbatch_against_slurm_and_ends_with_what_either_part_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: bool, refused: bool
) -> None:
    """The trainer's part runs in a process of its own; here it is only whether it refused."""
    asked = []
    monkeypatch.setattr(
        cli_init, "_checked", lambda folder, memory, over, sets: asked.append(folder) is None and not refused
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    if local:
        monkeypatch.setenv("SCAVENGER_BACKEND", "local")
    (tmp_path / "run.toml").write_text(
        '[run]\nname = "r"\nsteps = 1\nstate_dir = "state"\nout_dir = "out"\n'
        '[model]\npath = "m"\ncontext_length = 64\n[sampling]\nmax_tokens = 8\n[reserved]\nworkers = 2\n'
    )
    script = "#SBATCH --partition=reserved\n#SBATCH --gpus-per-node={}\n"
    (tmp_path / "train.sbatch").write_text(script.format(2))
    code, said = init(tmp_path, "--check")
    assert (code, len(asked)) == (2 if refused else 0, 1), said
    assert ("local backend" if local else "there is no scontrol") in said
    (tmp_path / "train.sbatch").write_text(script.format(1))
    code, said = init(tmp_path, "--check")
    assert (code, "REFUSED" in said) == (2 if refused or not local else 0, not local), said


def test_the_daemon_s_configuration_at_hand_may_be_two_files_or_one_that_this_user_may_not_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is too long fails as a folder does that this user may not enter."""
    site, mine = tmp_path / "site.toml", tmp_path / "mine.toml"
    site.write_text(f'[daemon]\nstate_dir = "{tmp_path}/state"\n')
    mine.write_text('[cluster]\nbackend = "local"\n')
    monkeypatch.setenv("SCAVENGER_CONFIG", f"{site}:{mine}")
    assert cli_init._known_state_dir() == str(tmp_path / "state")
    assert cli_init._is_local(None)
    monkeypatch.setattr(keys, "noted_site", lambda: "/joined")
    monkeypatch.setenv("SCAVENGER_CONFIG", str(tmp_path / ("x" * 300) / "scavenger.toml"))
    assert cli_init._known_state_dir() == "/joined"
    assert not cli_init._is_local(None)
