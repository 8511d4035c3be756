"""How `scavenger simulate` prints: rows of name, value and meaning, tables, progress, files. It knows no command and computes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from scavenger.errors import ConfigError
from scavenger.simulate import comparison
from scavenger.simulate.comparison import Prices, RunPolicy, SimulationResult
from scavenger.simulate.report import html
from scavenger.simulate.survey.text import TableRow


def console() -> Console:
    """Standard output; as wide as the terminal."""
    return Console(highlight=False)


def busy(what: str) -> AbstractContextManager[object]:
    """A spinner on standard error during long work."""
    return Console(stderr=True, highlight=False).status(escape(what))


def print_rows(screen: Console, rows: Iterable[TableRow]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=False, max_width=30)
    table.add_column(style="bold", justify="left", max_width=26)
    table.add_column(style="dim", overflow="fold")
    for row in rows:
        table.add_row(Text(row.name), Text(row.value), Text(row.meaning))
    screen.print(table)


def print_hours(screen: Console, hours: Iterable[tuple[str, str, str, str]]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("hour", no_wrap=True)
    table.add_column("engines at work", no_wrap=True)
    table.add_column("mean", justify="right", no_wrap=True)
    table.add_column("90 % of the time at least", justify="right")
    for hour, bar, mean, mostly in hours:
        table.add_row(hour, bar, mean, mostly)
    screen.print(table)


def print_table(
    screen: Console, columns: Iterable[str], cells: Iterable[Iterable[str]], left: int = 0
) -> None:
    """The first `left` columns to the left, the others, numbers, to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", no_wrap=True)
    for row in cells:
        table.add_row(*row)
    screen.print(table)


def check_writable(path: Path | None) -> None:
    """Raise before long work where its result could not be written."""
    if path is not None and (not path.absolute().parent.is_dir() or path.is_dir()):
        raise ConfigError(f"{path} cannot be written", "give a file in a folder that exists and is yours")


def write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}", "give a path in a folder that exists and is yours"
        ) from error


def run_all(run_policy: RunPolicy, policies: Sequence[str], seeds: int) -> tuple[SimulationResult, ...]:
    """Every policy with every seed, one after the other, with a bar for each policy on standard error."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    results = []
    with Progress(*columns, console=Console(stderr=True, highlight=False)) as progress:
        tasks = {policy: progress.add_task(policy, total=float(seeds), start=False) for policy in policies}
        for policy, task in tasks.items():
            progress.start_task(task)
            for seed in range(seeds):

                def shown(share: float, task: TaskID = task, seed: int = seed) -> None:
                    progress.update(task, completed=seed + share)

                results.append(run_policy(policy, seed, shown))
                shown(1.0)
    return tuple(results)


def print_comparison(
    screen: Console,
    results: Sequence[SimulationResult],
    prices: Prices,
    subtitle: str,
    notes: Sequence[str],
    page: Path | None,
) -> None:
    """The table of what was played, its notes, and the report where a path was given."""
    columns, cells = comparison.table(results, prices)
    screen.print(Text(subtitle, style="bold"))
    print_table(screen, columns, cells, left=1)
    summary = (f"{policy.name}: {policy.note}" for policy in comparison.policy_metrics(results, prices))
    for note in (*summary, *comparison.verdict(results), prices.summary(), *notes):
        screen.print(f"note: {note}", markup=False)
    if page is not None:
        write(page, html(comparison.report(results, prices, subtitle, (), notes)))
        screen.print(f"wrote {page}", markup=False)
