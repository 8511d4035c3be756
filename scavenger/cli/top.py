"""`scavenger top`: nodes, runs, engines, samples and decisions, live in a terminal. Argument parsing and printing.

Boundary: one subcommand; what it shows needs parts that other commands do not load.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from typing import Annotated

import typer

from scavenger import config
from scavenger.cli.options import DEFAULT_CONFIG, ConfigOption, number
from scavenger.errors import ConfigError
from scavenger.printable import escaped

#: Columns of a line in a pipe or a file: nothing is cut, so that a search finds it.
_UNCUT = 10_000


def top(
    config_path: ConfigOption = DEFAULT_CONFIG,
    once: Annotated[bool, typer.Option("--once", help="print one screen, and end")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="with --once: as JSON, for scripts")] = False,
    demo: Annotated[
        bool, typer.Option("--demo", help="a simulated site: needs no daemon and no configuration")
    ] = False,
    interval: Annotated[float, number("--interval", "seconds between two refreshes", least=0.5)] = 2.0,
) -> None:
    """Watch nodes, runs, engines, samples and decisions in the terminal. Reads the status file and the ledger; asks Slurm nothing.

    Also of a daemon that is stopped. Needs the extra `top`, but for --once.
    """
    if as_json and not once:
        raise ConfigError("--json is of one moment", "write scavenger top --once --json")
    from scavenger.top.feed import Feed, SiteFeed
    from scavenger.top.recorded import RecordedFeed

    feed: Feed = RecordedFeed(time.time) if demo else SiteFeed(config.read_daemon(config_path))
    if not once:
        try:
            from scavenger.top import app
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "textual":
                raise
            remedy = "pip install 'scavenger[top]', or use scavenger top --once"
            raise ConfigError("scavenger top needs textual, which is not installed", remedy) from error
        app.run(feed, interval_s=interval)
        return
    import msgspec

    from scavenger.top import text, view

    shown = view.build(feed.read())
    if as_json:
        print(
            escaped(
                json.dumps(msgspec.to_builtins(shown, str_keys=True), ensure_ascii=False, allow_nan=False)
            )
        )
    else:
        size = shutil.get_terminal_size((_UNCUT, 24))  # the second of these where there is no terminal
        for line in text.once(shown, size.columns, size.lines - 1):
            print(line.plain.rstrip())
    if len(shown.problems) == 2:  # neither status nor ledger
        sys.exit(1)
