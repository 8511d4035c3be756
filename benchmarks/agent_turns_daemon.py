"""`python -m benchmarks.agent_turns_daemon daemon --config FILE ...`: the daemon, whose router places turns as a file beside FILE says.

What `python -m scavenger` does, but for the one decision: of the routings of `agent_turns` that one is asked which the file `routing`
names at the moment. So one site with the same two engines plays all of them. Only `agent_turns_live` and tests start it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.agent_turns import ROUTINGS
from scavenger.cli.main import main
from scavenger.policy import affinity
from scavenger.policy.affinity import Engine, Placed, Speeds, Waiting


def choose(folder: Path, name: str) -> None:
    """From the next placement on, the daemon whose configuration lies in the folder routes so."""
    fresh = folder / "routing.new"
    fresh.write_text(name)
    fresh.rename(folder / "routing")  # it is read while it is written


def route_as_written(folder: Path) -> None:
    """Have every router of this process route so."""

    def place(waiting: Iterable[Waiting], engines: Iterable[Engine], speeds: Speeds) -> Iterator[Placed]:
        return ROUTINGS[(folder / "routing").read_text()](waiting, engines, speeds)

    setattr(affinity, "place", place)  # noqa: B010  mypy refuses to assign to a function of a module


if __name__ == "__main__":
    route_as_written(Path(sys.argv[sys.argv.index("--config") + 1]).parent)
    main()
