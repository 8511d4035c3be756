"""Which nodes of a private Slurm are out, and what they say of it.

Owns the reading of `scontrol show node` for that, and the words of an error: the node, Slurm's state and reason, and the end of its
slurmd's log. Knows nothing of how daemons are started.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from scavenger.cluster import runner
from scavenger.cluster.commands import nodes_argv, parse_nodes
from scavenger.cluster.layout import Layout
from scavenger.errors import ClusterError, ClusterUnavailable

#: Last lines of a slurmd's log that an error quotes.
_LINES = 8
#: Nodes that an error quotes: where all are out, one says enough.
_QUOTED = 2
_REASON = re.compile(r" Reason=(.*?)(?: \[|$)")


class Daemons(Protocol):
    """What of the sandbox is needed here."""

    layout: Layout
    dir: Path
    env: dict[str, str]

    def wait_for(self, what: str, deadline: float, condition: Callable[[], bool]) -> None: ...


def out(shown: str, names: Sequence[str]) -> dict[str, str]:
    """Nodes of `names` where no job can start, and in what state and for what reason, from `scontrol show node`'s one-line records.

    Raises `ClusterUnavailable` on an answer that is cut off.
    """
    reasons = {line.split(None, 1)[0].removeprefix("NodeName="): _REASON.search(line) for line in shown.splitlines() if line.strip()}
    nodes = {node.name: node for node in parse_nodes(shown)}
    found = {}
    for name in names:
        node = nodes.get(name)
        if node is None:
            found[name] = "not listed"
        elif not node.usable:
            why = reasons[name]
            found[name] = "+".join(sorted(node.states)) + (f", {why[1]}" if why is not None else "")
    return found


def ask(env: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """`out` as Slurm has it now; every node where it does not answer, which is its state while it starts."""
    done = runner.asked(nodes_argv(), env, 20.0)
    try:
        return out(done.stdout, names)
    except ClusterUnavailable as error:
        return dict.fromkeys(names, runner.words(done) or error.cause)


def told(missing: Mapping[str, str], logs: Path) -> str:
    """One line a node, then the end of the logs of the first of them."""
    lines = [f"{name}: {words}" for name, words in sorted(missing.items())]
    for name in sorted(missing)[:_QUOTED]:
        lines.append(f"the end of {name}'s slurmd log:")
        lines += tail(logs, name)
    return "\n".join(lines)


def tail(logs: Path, name: str) -> list[str]:
    """The last lines that a node's slurmd wrote, to its log or, before that was open, to its output."""
    for path in (logs / f"slurmd.{name}.log", logs / f"slurmd.{name}.out"):
        if path.exists() and (lines := path.read_text(errors="replace").splitlines()):
            return [f"  {line}" for line in lines[-_LINES:]]
    return ["  (it wrote nothing)"]


def wait(daemons: Daemons, deadline: float) -> None:
    """Until a job could start on every node of the layout. Raises `ClusterError` with those that are out, and their slurmds' words."""
    names = daemons.layout.nodes
    try:
        daemons.wait_for("idle nodes", deadline, lambda: not ask(daemons.env, names))
    except ClusterError as error:
        raise ClusterError(f"{error.cause}\n{told(ask(daemons.env, names), daemons.dir / 'log')}") from error


def check(env: Mapping[str, str], names: Sequence[str], logs: Path) -> None:
    """Raises `ClusterError` when a node is out: what is measured on the rest says little of the whole."""
    if missing := ask(env, names):
        raise ClusterError(f"{len(missing)} of {len(names)} nodes are out:\n{told(missing, logs)}")
