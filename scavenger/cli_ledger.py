"""The `scavenger ledger` commands: argument parsing and printing. Each command calls one function of `scavenger.ledger`."""

from __future__ import annotations

import sys
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
