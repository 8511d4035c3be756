"""`scavenger environment-worker`: play a run's episodes in a job of its own, beside the training job. Argument parsing.

Boundary: one subcommand. The program is the trainer's, which nothing here imports: it is started by its name.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from scavenger import config
from scavenger.cli.options import OverOption, SetOption
from scavenger.errors import ConfigError
from scavenger.protocol.messages import environment_file

PROGRAM = "trainer.episodes.remote_worker"


def environment_worker(
    run: Annotated[Path, typer.Argument(help="the run's run.toml")],
    wait_s: Annotated[
        float,
        typer.Option("--wait", min=0.0, help="seconds without a training job of the run after which it ends"),
    ] = 600.0,
    over: OverOption = None,
    sets: SetOption = None,
) -> None:
    """Play episodes of a run on this host, as a job of its own. Runs until it is stopped, or no training job comes.

    Exit codes: 69 no training job came, 72 the environment does not work here, 75 told to leave, 78 refused.
    """
    found = config.read_run(run, over or (), sets or ())
    if not found.data.environment_jobs:
        raise ConfigError(
            f"{run}: data.environment_jobs = 0: no environment worker in a job of its own may join",
            "set data.environment_jobs to how many may, and start the training job again",
        )
    file = environment_file(str(found.run.out_dir.absolute()))
    argv = [sys.executable, "-m", PROGRAM, file, "--wait", str(wait_s)]
    sys.stdout.flush()
    os.execv(sys.executable, argv)
