"""What a job script asks Slurm for, as its #SBATCH lines say it. Pure: text in, one frozen struct out.

Boundary: the `#SBATCH` lines of a person's script; pure.

Owns which directives are read, which do not matter here, and that every other one is named: what was not read is never taken for its
default. Judges nothing.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from scavenger.cluster.slurm import text as slurm_text
from scavenger.errors import ClusterError

_SHORT = {
    "A": "account",
    "B": "extra-node-info",
    "C": "constraint",
    "D": "chdir",
    "F": "nodefile",
    "G": "gpus",
    "H": "hold",
    "J": "job-name",
    "L": "licenses",
    "M": "clusters",
    "N": "nodes",
    "O": "overcommit",
    "Q": "quiet",
    "S": "core-spec",
    "W": "wait",
    "a": "array",
    "b": "begin",
    "c": "cpus-per-task",
    "d": "dependency",
    "e": "error",
    "i": "input",
    "k": "no-kill",
    "m": "distribution",
    "n": "ntasks",
    "o": "output",
    "p": "partition",
    "q": "qos",
    "s": "oversubscribe",
    "t": "time",
    "v": "verbose",
    "w": "nodelist",
    "x": "exclude",
}
_READ = frozenset(
    {
        "partition",
        "nodes",
        "ntasks",
        "ntasks-per-node",
        "cpus-per-task",
        "gpus",
        "gpus-per-node",
        "gres",
        "time",
    }
)
#: They say neither where a job runs nor how large it is.
_BESIDE = frozenset(
    {
        "account",
        "acctg-freq",
        "begin",
        "bell",
        "chdir",
        "comment",
        "deadline",
        "dependency",
        "error",
        "export",
        "export-file",
        "hold",
        "input",
        "job-name",
        "kill-on-invalid-dep",
        "mail-type",
        "mail-user",
        "nice",
        "no-kill",
        "no-requeue",
        "open-mode",
        "output",
        "parsable",
        "priority",
        "profile",
        "propagate",
        "qos",
        "quiet",
        "requeue",
        "signal",
        "time-min",
        "verbose",
        "wait",
        "wait-all-nodes",
        "wckey",
    }
)
#: They only leave fewer nodes: what does not fit without them does not fit with them.
_NARROWS = frozenset(
    {
        "constraint",
        "contiguous",
        "exclude",
        "exclusive",
        "licenses",
        "mem",
        "mem-per-cpu",
        "mem-per-gpu",
        "nodefile",
        "nodelist",
        "reservation",
        "switches",
        "tmp",
    }
)


@dataclass(frozen=True, slots=True)
class Asks:
    """What a script asks for; "" and 0: it does not say. `gpus`: of each node. `total_gpus`: of --gpus, which Slurm spreads itself.

    `more_nodes`: `nodes` is the least, Slurm may take more. `unread`: directives that are not read here, `sized`: none of them may change
    the numbers.
    """

    partition: str
    nodes: int
    gpus: int
    gpu_type: str
    ranks: int
    cpus_per_rank: int
    time_s: float
    total_gpus: int = 0
    more_nodes: bool = False
    unread: tuple[str, ...] = ()
    sized: bool = True

    @property
    def all_gpus(self) -> int:
        """0 = not known, or none."""
        return 0 if not self.sized else self.total_gpus or (0 if self.more_nodes else self.nodes * self.gpus)


def asks_of(script: str) -> Asks:
    """Raises `ClusterError` where a line or a time cannot be read, as sbatch itself would."""
    return _Reading(dict(_directives(script))).asks()


def _directives(script: str) -> Iterator[tuple[str, str]]:
    """(long name, value) in order, as sbatch reads them: several to a line, with comments, and none after the first command."""
    for line in script.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            return
        if not line.startswith("#SBATCH"):
            continue
        try:
            words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
        except ValueError as error:
            raise ClusterError(
                f"{line.strip()!r} cannot be read: {error}", "close the quotes of that line"
            ) from error
        while words:
            word = words.pop(0)
            short = not word.startswith("--")
            name, attached, value = (
                (_SHORT.get(word[1:2], word[1:]), word[2:], word[2:]) if short else word[2:].partition("=")
            )
            if not attached and words and not words[0].startswith("-"):
                value = words.pop(0)
            yield name, value


class _Reading:
    """The directives of one script, and those that could not be read."""

    def __init__(self, found: dict[str, str]) -> None:
        self._found = found
        self._unread = {name for name in found if name not in _READ | _BESIDE}

    def asks(self) -> Asks:
        least, more = self._nodes()
        kind, gpus, total = self._gpus()
        ranks = self._ranks(least, max(1, total or least * gpus))
        more = more or ("nodes" not in self._found and (total > 0 or ("ntasks" in self._found and ranks > 1)))
        cpus = self._number("cpus-per-task", 1)
        partition = self._found.get("partition", "")
        self._unread |= {"partition"} if "," in partition else set()
        time_s = slurm_text.parse_duration(self._found["time"]) if "time" in self._found else 0.0
        sized = self._unread <= _NARROWS | {"partition"}
        return Asks(
            partition, least, gpus, kind, ranks, cpus, time_s, total, more, tuple(sorted(self._unread)), sized
        )

    def _number(self, name: str, otherwise: int) -> int:
        text = self._found.get(name, str(otherwise))
        if re.fullmatch(r"[1-9]\d*", text):
            return int(text)
        self._unread.add(name)
        return otherwise

    def _nodes(self) -> tuple[int, bool]:
        """(the least, whether Slurm may take more)"""
        match = re.fullmatch(r"([1-9]\d*)(?:-([1-9]\d*))?", self._found.get("nodes", "1"))
        if match is None:
            self._unread.add("nodes")
            return 1, True
        return int(match[1]), match[2] not in (None, match[1])

    def _ranks(self, nodes: int, otherwise: int) -> int:
        if "ntasks-per-node" not in self._found:
            return self._number("ntasks", otherwise)
        if "ntasks" in self._found or "nodes" not in self._found:
            self._unread.add("ntasks-per-node")  # beside --ntasks it is a limit, and it may mean more nodes
            return self._number("ntasks", otherwise)
        return nodes * self._number("ntasks-per-node", 1)

    def _gpus(self) -> tuple[str, int, int]:
        """(type, of each node, in all)"""
        said = [name for name in ("gpus-per-node", "gres", "gpus") if name in self._found]
        read = said[0] if said else ""
        self._unread |= set(said[1:])  # together they may say how many nodes there are to be
        text = self._found.get(read, "0")
        if read == "gres":
            own = [item for item in text.split(",") if re.match("gpu(:|$)", item)]
            text = (
                own[0].removeprefix("gpu").removeprefix(":") or "1" if len(own) == 1 else "" if own else "0"
            )
        match = re.fullmatch(r"(?:([A-Za-z_][\w.-]*):)?(\d+)", text)
        if match is None:
            self._unread.add(read)
            return "", 0, 0
        kind, count = match[1] or "", int(match[2])
        return (kind, 0, count) if read == "gpus" else (kind, count, 0)
