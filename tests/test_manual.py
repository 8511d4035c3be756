"""Manual pages and shell completion are made from the commands themselves, and say what those say."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from scavenger.cli import manual
from scavenger.cli.main import app

PAGES = manual.pages("2026-11-26")


def commands() -> dict[str, object]:
    group: Any = get_command(app)
    return {name: one for name, one in group.commands.items() if not one.hidden}


def test_every_command_has_a_page_with_all_its_options() -> None:
    assert {f"scavenger-{name}.1" for name in commands()} <= PAGES.keys()
    assert "scavenger-ledger-export.1" in PAGES, "and those of groups"
    for option in ("--take-over", "--standby", "--dry-run", "--new-ledger"):
        assert option.replace("-", "\\-") in PAGES["scavenger-daemon.1"]
    assert "die\\-with\\-stdin" not in PAGES["scavenger-daemon.1"], "a hidden option stays hidden"


def test_the_pages_are_the_same_twice_and_bear_the_given_date() -> None:
    assert manual.pages("2026-11-26") == PAGES
    assert all(" 2026-11-26 " in text.splitlines()[0] for text in PAGES.values())


def test_no_page_names_the_home_that_it_was_made_in() -> None:
    assert not [name for name, text in PAGES.items() if str(Path.home()) in text.replace("\\-", "-")]


@pytest.mark.parametrize(
    ("text", "safe"),
    [(".so /etc/passwd", "\\&.so /etc/passwd"), ("a\\fBb", "a\\efBb"), ("'br", "\\&'br"), ("a\n.b", "a .b")],
)
def test_no_text_is_taken_for_a_request_or_an_escape(text: str, safe: str) -> None:
    assert manual.escape(text) == safe


@pytest.mark.skipif(shutil.which("groff") is None, reason="no groff here")
def test_groff_finds_nothing_wrong() -> None:
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-Kutf8", "-ww"],
        input="".join(PAGES.values()),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "idle" in done.stdout


def in_bash(home: Path, script: str) -> str:
    """What bash says with a `scavenger` of this interpreter in PATH."""
    program = home / "bin/scavenger"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!{sys.executable}\nfrom scavenger.cli.main import main\nmain()\n")
    program.chmod(0o755)
    env = {**os.environ, "HOME": str(home), "PATH": f"{program.parent}:{os.environ['PATH']}"}
    env["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    done = subprocess.run(
        ["bash", "--norc", "-c", script], env=env, cwd=home, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


ASK = """
COMP_WORDS=(scavenger {words}) COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_scavenger_completion scavenger; printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    (tmp_path / "scavenger.bash").write_text(in_bash(tmp_path, "_SCAVENGER_COMPLETE=source_bash scavenger"))
    assert in_bash(tmp_path, "bash -n scavenger.bash") == ""
    typed = ("che", "drain --rea", "ledger up", "demo --backend s", "samples --sort ad")
    asked = "".join(ASK.format(words=words) for words in typed)
    assert in_bash(tmp_path, ". ./scavenger.bash" + asked).split() == [
        *("check-config", "checkpoint"),
        "--reason",
        "upgrade",
        "slurm",
        "advantage",
    ]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("demo --backend ''", "auto slurm local"),
        ("samples --purpose e", "eval"),
        ("samples --sort re", "reward"),
        (
            "samples --sort ''",
            "reward -reward advantage -advantage length -length finish -finish moves -moves",
        ),
        ("samples --finish ''", "stop length"),
        ("init --engine ''", "vllm reference"),
        ("doctor --engine r", "reference"),
        ("guest --engine v", "vllm"),
    ],
)
def test_the_words_that_an_option_takes_are_offered(words: str, offered: str) -> None:
    """By what the shells' scripts ask, as bash does."""
    given = shlex.split(words)
    asked = {
        "_SCAVENGER_COMPLETE": "complete_bash",
        "COMP_WORDS": f"scavenger {words}",
        "COMP_CWORD": str(len(given)),
    }
    assert CliRunner().invoke(app, env=asked, prog_name="scavenger").stdout.split() == offered.split()


def test_install_completion_writes_what_bash_reads_at_its_start(tmp_path: Path) -> None:
    pytest.importorskip("shellingham")
    in_bash(tmp_path, "scavenger --install-completion; true")
    written = (tmp_path / ".bash_completions/scavenger.sh").read_text()
    assert "complete -o default -F _scavenger_completion scavenger" in written
    assert ".bash_completions/scavenger.sh" in (tmp_path / ".bashrc").read_text()
    assert in_bash(tmp_path, ". ~/.bashrc" + ASK.format(words="enr")).split() == ["enroll"]


def in_shell(shell: str, home: Path, script: str) -> str:
    """What zsh or fish says to a script, as a user whose start-up files are in `home`."""
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    program = home / "bin/scavenger"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!{sys.executable}\nfrom scavenger.cli.main import main\nmain()\n")
    program.chmod(0o755)
    env = {
        **os.environ,
        "HOME": str(home),
        "ZDOTDIR": str(home),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        "SHELL": shutil.which(shell) or "",
        "TERM": "dumb",
    }
    done = subprocess.run(
        [shell, "-c", script], env=env, cwd=home, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


#: zsh answers a key on a terminal alone: a second one, in which a user types and presses Tab.
TAB_IN_ZSH = r"""
zmodload zsh/zpty
zpty -b typed 'zsh -i'
said=''
until_seen() {
  local part
  repeat 1200; do
    while zpty -r -t typed part; do said+=$part; done
    [[ $said == $~1 ]] && return 0
    sleep 0.1
  done
  print -r -- "not seen: $1, but $said"; return 1
}
zpty -w typed 'PS1=READY:'
until_seen '*READY:*READY:*' || exit 1
zpty -n -w typed $'scavenger enr\t'  # the first Tab of a session only loads what Typer wrote: zsh rings its bell
until_seen $'*enr*\a*' || exit 1
zpty -n -w typed $'\t'
until_seen '*scavenger enr*oll *' || exit 1  # between the two, the bell
zpty -d typed
print completed
"""


@pytest.mark.long
def test_zsh_completes_once_installed(tmp_path: Path) -> None:
    pytest.importorskip("shellingham")
    in_shell("zsh", tmp_path, "scavenger --install-completion; true")
    assert (tmp_path / ".zfunc/_scavenger").is_file()
    assert in_shell("zsh", tmp_path, TAB_IN_ZSH).strip() == "completed"


@pytest.mark.long
def test_fish_completes_once_installed(tmp_path: Path) -> None:
    pytest.importorskip("shellingham")
    in_shell("fish", tmp_path, "scavenger --install-completion; true")
    assert (tmp_path / ".config/fish/completions/scavenger.fish").is_file()
    for typed, wanted in (("che", ["check-config", "checkpoint"]), ("ledger up", ["upgrade"])):
        said = in_shell("fish", tmp_path, f"complete -C 'scavenger {typed}'")
        assert sorted(line.split("\t")[0] for line in said.splitlines()) == wanted
