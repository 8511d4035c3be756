"""The `scavenger checkpoint` commands. What reads a checkpoint needs torch, so it is the trainer's, in a process of its own.

Boundary: one subcommand.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Checkpoints of a run.")


@app.callback()
def _group() -> None:
    """A group, though it has one command yet."""


@app.command("export")
def export(
    run: Annotated[Path, typer.Argument(help="run.toml")],
    out: Annotated[Path, typer.Argument(help="the new folder")],
    checkpoint: Annotated[
        str, typer.Option(help="a checkpoint's folder; auto = the newest of run.out_dir")
    ] = "auto",
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float32 or float64; default: weights.dtype of the run")
    ] = "",
) -> None:
    """Write a checkpoint as a Hugging Face folder, checked against the version that was published from it."""
    argv = [
        sys.executable,
        "-m",
        "trainer.export",
        str(run),
        str(out),
        f"--checkpoint={checkpoint}",
        f"--dtype={dtype}",
    ]
    raise typer.Exit(subprocess.run(argv, stdin=subprocess.DEVNULL, check=False).returncode)
