"""The `scavenger checkpoint` commands. What reads a checkpoint needs torch, so it is the trainer's, in a process of its own.

Boundary: one subcommand.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from scavenger.cli.options import OverOption, SetOption

app = typer.Typer(no_args_is_help=True, help="Checkpoints of a run.")


@app.callback()
def _group() -> None:
    """A group, though it has one command yet."""


@app.command("export")
def export(
    run: Annotated[Path, typer.Argument(help="run.toml")],
    out: Annotated[Path, typer.Argument(help="a new or an empty folder")],
    checkpoint: Annotated[
        str, typer.Option(help="a checkpoint's folder; auto = the newest of run.out_dir")
    ] = "auto",
    dtype: Annotated[
        str,
        typer.Option(
            help="bfloat16, float32 or float64; default: weights.dtype of the run, of adapters the type that they are trained in"
        ),
    ] = "",
    step: Annotated[int | None, typer.Option(min=1, help="the checkpoint of this step")] = None,
    merged: Annotated[
        bool, typer.Option("--merged", help="a run of adapters: the whole model with them merged")
    ] = False,
    local: Annotated[bool, typer.Option("--local", help="the checkpoints of a try with --local")] = False,
    over: OverOption = None,
    sets: SetOption = None,
) -> None:
    """Write a checkpoint as a Hugging Face folder, checked against the version that was published from it.

    A run of adapters ([lora]) becomes an adapter folder, as peft and vLLM read them."""
    argv = [
        sys.executable,
        "-m",
        "trainer.export",
        str(run),
        str(out),
        f"--checkpoint={checkpoint}",
        f"--dtype={dtype}",
        *([] if step is None else [f"--step={step}"]),
        *(["--merged"] if merged else []),
        *(["--local"] if local else []),
        *(f"--over={path}" for path in over or ()),
        *(f"--set={text}" for text in sets or ()),
    ]
    raise typer.Exit(subprocess.run(argv, stdin=subprocess.DEVNULL, check=False).returncode)
