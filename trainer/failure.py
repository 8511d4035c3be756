"""Why a launched program ended, in one line, out of what it wrote to standard error.

And the thread that passes that on and keeps the end of it.

Owns the patterns of launchers' and libraries' own words. `cause` is pure.
Boundary: patterns of other programs' error texts; `cause` is pure.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from typing import IO

KEPT_BYTES = 16384
_PIPE_BYTES = 1 << 16
#: A launcher's words and ours: cause and remedy. The first that is found counts.
_KNOWN = (
    (
        r"unable to reach each\s+other|returned \"Unreachable\"|MPI processes? (?:is|are) unreachable",
        "MPI finds that ranks cannot reach one another",
        "is TCP open between the nodes? set the OMPI_MCA_* variables that this network needs, or unset OMPI_MCA_btl",
    ),
    (
        r"not enough slots available",
        "mpirun has fewer slots than ranks",
        "ask Slurm for as many tasks as ranks (--ntasks)",
    ),
    (
        r"error while loading shared libraries: ([^:\s]+)|(\S*libmpi\S*): cannot open shared object|(cannot load MPI library)",
        "a shared library is missing: {0}",
        "install the MPI library that mpi4py was built for, on every node of the job",
    ),
    (
        r"No module named '?(mpi4py|trainer|torch)",
        "the ranks' Python has no module {0}",
        "set SCAVENGER_PYTHON to the interpreter in which Scavenger is installed",
    ),
    (
        r"unable to find the specified executable|execve\(\):? (\S+): No such file",
        "the ranks' program was not found on a node",
        "SCAVENGER_PYTHON must name an interpreter that every node has",
    ),
)
_KILLED = re.compile(r"exited on signal (\d+)|task \S+: (Killed|Segmentation fault|Bus error|Aborted)")
_EXCEPTION = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Failure)\b.*", re.M)
_NOISE = re.compile(
    r"^(?:[-=*\s]*|srun: .*|slurmstepd.*|mpirun .*|prterun .*|\[[^\]]*\].*|.*job is now going to abort.*)$"
)


def cause(text: str, code: int) -> str:
    """One line, remedy included. `text`: the end of what ranks and launcher wrote.

    `code`: status, negative for a signal.
    """
    if own := _own(text.splitlines()):
        return own
    for pattern, words, remedy in _KNOWN:
        if found := re.search(pattern, text):
            what = next((group for group in found.groups() if group), "")
            return f"{words.format(what)}; remedy: {remedy}"
    if raised := _EXCEPTION.findall(text):
        return str(raised[-1]).strip()
    if name := _killer(text, code):
        return f"a rank was killed ({name}); remedy: `sacct -j JOBID` and `dmesg` on its node tell whether memory ran out"
    lines = [line.strip() for line in text.splitlines() if not _NOISE.match(line)]
    return lines[-1] if lines else f"status {code}, and nothing on standard error"


def _own(lines: list[str]) -> str:
    """The trainer's last own error, or its watchdog's; "" where it reported none."""
    for place in range(len(lines) - 1, -1, -1):
        if lines[place].startswith(("error: ", "watchdog: ")):
            remedy = [line.strip() for line in lines[place + 1 : place + 2] if line.startswith("  remedy: ")]
            return "; ".join([lines[place].removeprefix("error: "), *remedy])
    return ""


def _killer(text: str, code: int) -> str:
    """The signal that ended a rank; "" for none."""
    if code < 0:
        return _signal(-code)
    found = _KILLED.search(text)
    return "" if found is None else _signal(int(found[1])) if found[1] else found[2]


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class StderrTail:
    """Passes a child's standard error on to ours as it comes, and keeps the end of it."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe, self._kept = pipe, b""
        self._thread = threading.Thread(target=self._run, name="stderr", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while data := os.read(self._pipe.fileno(), _PIPE_BYTES):
            self._kept = (self._kept + data)[-KEPT_BYTES:]
            try:
                sys.stderr.buffer.write(data)
                sys.stderr.flush()
            except OSError:
                continue  # our log's disk is full: the ranks must not wait for that
        self._pipe.close()

    def text(self, wait_s: float = 2.0) -> str:
        """The end of it, once the child is gone.

        A process of its own that holds the pipe longer is not waited for.
        """
        self._thread.join(wait_s)
        return self._kept.decode(errors="replace")
