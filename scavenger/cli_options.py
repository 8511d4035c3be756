"""Options that several commands of `scavenger` share. It knows no command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="the daemon's scavenger.toml", envvar="SCAVENGER_CONFIG")]
DEFAULT_CONFIG = Path("scavenger.toml")
