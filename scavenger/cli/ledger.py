"""The `scavenger ledger` commands: argument parsing and printing. Each command calls one function of `scavenger.ledger`.

Boundary: one subcommand.
"""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from scavenger import config
from scavenger.cli.options import DEFAULT_CONFIG, ConfigOption
from scavenger.printable import amount

if TYPE_CHECKING:
    from scavenger.ledger.maintain.purge import Contents

app = typer.Typer(no_args_is_help=True, help="Read, check and keep the ledger.")


@app.command("report")
def report_command(
    name: Annotated[str, typer.Argument(help="a report of sql/reports; `list` names them all")] = "list",
    fmt: Annotated[Literal["table", "csv", "json"], typer.Option("--format", help="of the rows")] = "table",
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="how many of the newest rows, of a report that has no end"),
    ] = None,
    since: Annotated[
        str, typer.Option("--since", help="none from before: 24h, 7d, 2026-09-01, 2026-09-01T12:00 (UTC)")
    ] = "",
    until: Annotated[
        str, typer.Option("--until", help="only from before: as --since; 1h ago, or a date (its midnight)")
    ] = "",
    config_path: ConfigOption = DEFAULT_CONFIG,
) -> None:
    """Run one of the admin reports. Those that have no end show their newest 1,000 rows, or what --limit, --since and --until say."""
    from scavenger.ledger import queries
    from scavenger.ledger.read import reports

    if name == "list":
        for known in queries.report_names():
            print(f"{known:36} {queries.question(queries.load_report(known))}")
        return
    now = time.time()
    after, before = (_moment(said, now) if said else None for said in (since, until))
    if after is not None and before is not None and before <= after:
        raise typer.BadParameter(f"--until {until} is not after --since {since}")
    width = reports.FOLDED if sys.stdout.isatty() else None  # a program that reads on wants a row a line
    print(reports.report(config.read_daemon(config_path).ledger_url, name, fmt, limit, after, before, width))


def _moment(said: str, now: float) -> float:
    """Unix seconds of a time, or of so long before `now`."""
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}.get(said[-1:])
    try:
        if unit is not None:
            return max(0.0, now - float(said[:-1]) * unit)
        at = datetime.fromisoformat(said)
    except ValueError as error:
        raise typer.BadParameter(f"{said!r} is no time: 24h, 7d, 2026-09-01 or 2026-09-01T12:00") from error
    return max(0.0, (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp())


@app.command("tokens")
def tokens_command(
    sample: Annotated[int, typer.Argument(help="the sample's id")],
    fmt: Annotated[
        Literal["ids", "text", "json"], typer.Option("--format", help="json has prompt and logprobs too")
    ] = "ids",
    config_path: ConfigOption = DEFAULT_CONFIG,
) -> None:
    """Print one sample's tokens."""
    from scavenger.ledger.read import tokens

    print(tokens.show(config.read_daemon(config_path).ledger_url, sample, fmt), end="")


@app.command("check")
def check_command(config_path: ConfigOption = DEFAULT_CONFIG) -> None:
    """Audit the ledger: every reference, every offset, every sample delivered once, every GPU that was held."""
    from scavenger.ledger.read import reports

    problems = reports.check(config.read_daemon(config_path).ledger_url)
    for problem in problems:
        print(problem)
    print("the ledger is sound" if not problems else amount(len(problems), "problem"))
    sys.exit(1 if problems else 0)


@app.command("upgrade")
def upgrade_command(config_path: ConfigOption = DEFAULT_CONFIG) -> None:
    """Bring the tables up to this release; a daemon of an older one that still runs is fenced and stops."""
    from scavenger.ledger import store

    before, after = store.upgrade(config.read_daemon(config_path).ledger_url)
    if before == after:
        print(f"the schema is at revision {after} already")
    else:
        fenced = "; a daemon that ran on it stops at its next commit" if before else ""
        print(f"the schema was brought from revision {before or 'none'} to {after}{fenced}")


@app.command("vacuum")
def vacuum_command(config_path: ConfigOption = DEFAULT_CONFIG) -> None:
    """Give free space back: SQLite with the daemon stopped, PostgreSQL beside it."""
    from scavenger.ledger.maintain import vacuum

    done = vacuum.vacuum(config.read_daemon(config_path).ledger_url)
    print(f"{done.before:,} bytes before, {done.after:,} after")


@app.command("export")
def export_command(
    out: Annotated[Path, typer.Option("--out", help="a new or empty folder")],
    run: Annotated[
        str | None, typer.Option("--run", help="the newest run of this name; without it, everything")
    ] = None,
    contents: Annotated[bool, typer.Option("--contents", help="with tokens, logprobs and prompts")] = False,
    fmt: Annotated[Literal["jsonl", "csv"], typer.Option("--format", help="of each file")] = "jsonl",
    config_path: ConfigOption = DEFAULT_CONFIG,
) -> None:
    """Write the accounting as one file a table."""
    from scavenger.ledger.maintain import export

    done = export.export(config.read_daemon(config_path).ledger_url, out, run, contents=contents, fmt=fmt)
    for table, rows in sorted(done.rows.items()):
        print(f"{table:18} {rows:>12,} {'row' if rows == 1 else 'rows'}")


@app.command("purge")
def purge_command(
    run: Annotated[str, typer.Option("--run", help="the newest run of this name; it must have ended")],
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    config_path: ConfigOption = DEFAULT_CONFIG,
) -> None:
    """Delete a run's contents (tokens, logprobs, prompts) for good and keep its accounting."""
    from scavenger.ledger.maintain import purge

    url = config.read_daemon(config_path).ledger_url
    found = purge.survey(url, run)
    if found.gone:
        print(f"run {run!r} ({found.run_id}) {found.gone} and holds nothing")
        return
    print(f"run {run!r} ({found.run_id}) holds {_describe(found)}")
    if not yes and not typer.confirm("delete them for good?"):
        print("nothing was deleted")
        sys.exit(1)
    print(f"deleted {_describe(purge.purge(url, run))}; `scavenger ledger vacuum` gives the space back")


def _describe(found: Contents) -> str:
    return (
        f"{found.tokens:,} tokens of {found.samples:,} samples in {found.chunks:,} chunks, and {found.groups:,} prompts: "
        f"{found.nbytes:,} bytes"
    )


@app.command("backup")
def backup_command(
    target: Annotated[Path, typer.Argument(help="the file to write; must not exist")],
    config_path: ConfigOption = DEFAULT_CONFIG,
) -> None:
    """Copy the ledger while the daemon writes (SQLite: its online backup; PostgreSQL: pg_dump)."""
    from scavenger.ledger.maintain import backup

    backup.backup(config.read_daemon(config_path).ledger_url, target)
    print(f"wrote {target} ({target.stat().st_size:,} bytes)")


@app.command("restore")
def restore_command(
    source: Annotated[
        Path | None,
        typer.Argument(help="what `backup` wrote; without it the ledger was put back by other means"),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="although a daemon owns the ledger: it is fenced")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    config_path: ConfigOption = DEFAULT_CONFIG,
) -> None:
    """Put a backup in the ledger's place, and begin another history: every daemon and trainer of the replaced one is fenced."""
    from scavenger.daemon import ownership
    from scavenger.ledger.maintain import backup

    settings = config.read_daemon(config_path)
    if source is not None:
        found = backup.survey(settings.ledger_url, source)
        print(
            f"{source} is a backup from {found.taken}; it replaces the ledger of {config_path}, with all that came after it"
        )
        if found.lost:
            print(f"runs that are in the ledger and not in the backup: {', '.join(found.lost)}")
        if found.lost is None:
            print(
                "which runs are in the ledger and not in the backup is not known: the ledger cannot be read"
            )
        if not found.keeps:
            print(
                "no copy of the replaced ledger is kept; for one, stop here and run `scavenger ledger backup FILE` first"
            )
        if not yes and not typer.confirm("replace the ledger?"):
            print("nothing was replaced")
            sys.exit(1)
    done = ownership.restore_ledger(settings, source, force=force)
    if done.kept is not None:
        print(
            f"the replaced ledger is kept as {done.kept}: delete it when it is not needed; it holds prompts and completions"
        )
    print(
        f"the ledger begins another history after generation {done.generation}; next: start the daemon (systemctl start scavenger, or "
        f"by hand: scavenger daemon --config {config_path})"
    )
