"""The `scavenger ledger` commands: argument parsing and printing. Each command calls one function of `scavenger.ledger`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from scavenger import config
from scavenger.cli_options import DEFAULT_CONFIG, ConfigOption

app = typer.Typer(no_args_is_help=True, help="Read and check the ledger.")


@app.command("report")
def report_command(
    name: Annotated[str, typer.Argument(help="a report of sql/reports; `list` names them all")],
    fmt: Annotated[Literal["table", "csv", "json"], typer.Option("--format")] = "table",
    config_path: ConfigOption = DEFAULT_CONFIG,
) -> None:
    """Run one of the admin reports."""
    from scavenger.ledger import queries, reports

    if name == "list":
        for known in queries.report_names():
            print(f"{known:36} {queries.question(queries.load_report(known))}")
        return
    print(reports.report(config.read_daemon(config_path).ledger_url, name, fmt))


@app.command("check")
def check_command(config_path: ConfigOption = DEFAULT_CONFIG) -> None:
    """Audit the ledger: every reference, every offset, every sample delivered once."""
    from scavenger.ledger import reports

    problems = reports.check(config.read_daemon(config_path).ledger_url)
    for problem in problems:
        print(problem)
    print("the ledger is sound" if not problems else f"{len(problems)} problems")
    sys.exit(1 if problems else 0)


@app.command("backup")
def backup_command(
    target: Annotated[Path, typer.Argument(help="the file to write; must not exist")],
    config_path: ConfigOption = DEFAULT_CONFIG,
) -> None:
    """Copy the ledger while the daemon writes (SQLite: its online backup; PostgreSQL: pg_dump)."""
    from scavenger.ledger import backup

    backup.backup(config.read_daemon(config_path).ledger_url, target)
    print(f"wrote {target} ({target.stat().st_size:,} bytes)")


@app.command("restore")
def restore_command(
    source: Annotated[Path | None, typer.Argument(help="what `backup` wrote; without it the ledger was put back by other means")] = None,
    force: Annotated[bool, typer.Option("--force", help="although a daemon owns the ledger: it is fenced")] = False,
    config_path: ConfigOption = DEFAULT_CONFIG,
) -> None:
    """Put a backup in the ledger's place, and begin another history: everybody who knows the replaced one is fenced."""
    from scavenger import ownership

    settings = config.read_daemon(config_path)
    generation = ownership.restore_ledger(settings, source, force=force)
    print(f"the ledger begins another history after generation {generation}; next: scavenger daemon --config {config_path}")
