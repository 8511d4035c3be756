"""`scavenger simulate replay`: argument parsing and printing. It calls `scavenger.simulate.replay`, which plays the run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scavenger.errors import LedgerError

if TYPE_CHECKING:
    from scavenger.ledger.recording import Recording


def replay_command(
    ledger: Annotated[str, typer.Argument(metavar="LEDGER", help="an SQLite file, or the URL in daemon.ledger; it is only read")],
    run: Annotated[str, typer.Option("--run", help="the run's name; not needed where the ledger has one run")] = "",
    policy: Annotated[str, typer.Option("--policy", help="predictive or standard; default: the one that it ran under")] = "",
    ranks: Annotated[int, typer.Option("--ranks", min=0, help="of the trainer; 0: as a deterministic run's steps tell")] = 0,
) -> None:
    """Play a run of the past again from its ledger: its step times as the simulator has them, beside what they were.

    Machines are fitted to every other step; the error is that of the steps in between.
    """
    from scavenger import cli_tables
    from scavenger.simulate import replay_text
    from scavenger.simulate.replay import replay

    if policy not in ("", "predictive", "standard"):
        raise typer.BadParameter(f"{policy!r}: one of predictive, standard", param_hint="--policy")
    with cli_tables.busy(f"reading {ledger}"):
        recording = _read(ledger, run)
    with cli_tables.busy(f"playing {len(recording.steps)} steps"):
        found = replay(recording, policy, ranks)
    console = cli_tables.console()
    console.print(f"run {recording.name}, policy {found.policy}", style="bold", markup=False)
    columns, cells = replay_text.steps(found)
    cli_tables.print_table(console, columns, cells)
    cli_tables.print_rows(console, replay_text.rows(found))


def _read(ledger: str, run: str) -> Recording:
    from scavenger.ledger import experience, store
    from scavenger.ledger.reader import rows

    engine = store.open_readonly(ledger if "://" in ledger else f"sqlite:///{Path(ledger).absolute()}", store.MAINTENANCE_S)
    try:
        names = [name for (name,) in rows(engine, "SELECT DISTINCT name FROM runs ORDER BY name").rows]
        if not run and len(names) != 1:
            raise LedgerError(f"the ledger has {len(names)} runs: {', '.join(names) or 'none'}", "name one with --run")
        return experience.read(engine, run or names[0])
    finally:
        engine.dispose()
