"""A command starts at once: it loads what it needs, and nothing of what only other commands need."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: What took two thirds of a second of each command when all of them loaded it.
HEAVY = {"sqlalchemy", "alembic", "starlette", "uvicorn", "textual", "torch", "numpy", "opentelemetry"}


@pytest.mark.parametrize(
    "command", [["--help"], ["status", "--help"], ["web", "--help"], ["ledger", "--help"]]
)
def test_the_command_line_loads_no_library_of_single_commands(command: list[str]) -> None:
    code = (
        "import sys\nfrom scavenger.cli.main import app\n"
        f"app({command!r}, standalone_mode=False)\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.strip().strip("[]").replace("'", "").split(", "))
    assert "typer" in loaded
    assert not loaded & HEAVY
