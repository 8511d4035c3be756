from __future__ import annotations

import os
from pathlib import Path

from scavenger.doctor import collect
from scavenger.doctor.facts import CommandOutput


def command(folder: Path, name: str, script: str) -> dict[str, str]:
    """An environment in which a command is this shell script."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_a_warning_beside_an_empty_answer_is_not_the_answer(tmp_path: Path) -> None:
    env = command(tmp_path, "squeue", "echo 'ld.so: object cannot be preloaded: ignored' >&2")
    assert collect.ask(["squeue", "-h"], env, 30.0) == CommandOutput("")


def test_the_mpi_kinds_are_read_from_stderr_where_an_older_srun_prints_them(tmp_path: Path) -> None:
    env = command(tmp_path, "srun", "echo 'srun: pmi2' >&2")
    assert collect.ask(collect.QUESTIONS["mpi"], env, 30.0).text == "srun: pmi2\n"


def test_the_words_of_a_command_that_failed_are_its_error(tmp_path: Path) -> None:
    env = command(tmp_path, "squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    found = collect.ask(["squeue", "-h"], env, 30.0)
    assert (found.text, found.error) == ("", "squeue -h: Unable to contact slurm controller")
