"""The training job's program, whose rank 0 SIGKILL ends in the middle of a step: `interpreter` makes what takes SCAVENGER_PYTHON's place.

Ranks run this module in the place of `trainer`: a step is published, and its commit ends the process.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

STEP = "SCAVENGER_TEST_KILLED_AT"


def interpreter(folder: Path) -> Path:
    """A script that starts this module where Python is asked for `-m trainer`, and Python itself otherwise."""
    made = folder / "python-of-a-killed-trainer"
    python = shlex.quote(sys.executable)
    made.write_text(
        f'#!/bin/sh\n[ "$1 $2" != "-m trainer" ] || {{ shift 2; set -- -m {__name__} "$@"; }}\nexec {python} "$@"\n'
    )
    made.chmod(0o755)
    return made


def main() -> int:
    from scavenger.client import Run
    from trainer.__main__ import main as train

    commit, killed_at = Run.commit, int(os.environ[STEP])

    def killed(run: Run, step: int, *rest: Any, **more: Any) -> Any:
        if step == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return commit(run, step, *rest, **more)

    Run.commit = killed  # type: ignore[method-assign, assignment]
    return train()


if __name__ == "__main__":
    sys.exit(main())
