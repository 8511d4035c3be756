"""What rank 0 and its launcher tell each other of the reserved engines' processes. Theory of operation:

    rank 0    --- Wanted(number, awake, end) --->    launcher        two files in a private folder of the launcher's node,
    rank 0    <-- Present(number, running)   ---     launcher        each replaced as a whole by the one process that writes it

The launcher owns the processes: it ends those in `end`, starts none before engines are to be awake for the first time (rank 0 has published
what they are to load) nor while they are to sleep, and repeats the number of the last
word that it acted upon. So what rank 0 reads under its own number is not older than what it asked for. Reads are bounded and typed:
what cannot be read is an error of this job, never an empty answer. Knows no engine and no daemon.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from scavenger.errors import ConfigError
from scavenger.protocol.messages.common import MAX_SLOTS, BoundedText, Slots

#: Names the folder to the ranks.
VARIABLE = "SCAVENGER_ENGINES"
MAX_BYTES = 4 * 1024 * 1024
_WANTED, _PRESENT = "wanted.json", "present.json"
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class RequestedEngines(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Engines are to be `awake`, or to sleep; the processes named `end` are to be ended, for `reason`.

    `ending`: the run is over, or about to be: engines end by themselves, and none is started again. Nothing was said: number 0, and no
    engine is started. Ranks that load their model take and give back memory of the same GPUs, and vLLM
    refuses to start where memory changes while it measures what is free.
    """

    number: _Number = 0
    awake: bool = False
    end: Slots = ()
    reason: BoundedText = ""
    ending: bool = False


class Present(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The launcher's `slots`, and the names (`reserved_name`) of the engines that have a process now, after it acted upon the word of this

    number.
    """

    number: _Number = 0
    slots: Slots = ()
    running: Slots = ()


T = TypeVar("T", RequestedEngines, Present)


class Launcher:
    """The launcher's end. It makes the folder, readable by its own user alone, and takes it away."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="scavenger-engines-"))
        self._said: Present | None = None

    def wanted(self) -> RequestedEngines:
        """Rank 0's last word. Raises `ConfigError`."""
        return _read(self.folder / _WANTED, RequestedEngines) or RequestedEngines()

    def say(self, present: Present) -> None:
        if present != self._said:
            _write(self.folder / _PRESENT, present)
            self._said = present

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class Engines:
    """Rank 0's end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._wanted = RequestedEngines()

    def want(self, awake: bool) -> None:
        """Engines may be started, or none shall be."""
        self._say(RequestedEngines(self._wanted.number + 1, awake))

    def end(self, names: tuple[str, ...], reason: str) -> None:
        """End these processes; none is started again before engines are to be awake."""
        self._say(RequestedEngines(self._wanted.number + 1, False, names[:MAX_SLOTS], reason))

    def run_ends(self) -> None:
        """The run is about to be closed: the daemon will let its engines go."""
        self._say(RequestedEngines(self._wanted.number + 1, False, ending=True))

    def present(self) -> Present | None:
        """What there is, as of what was said last; None: the launcher has not acted upon that yet. Raises `ConfigError`."""
        present = _read(self._folder / _PRESENT, Present)
        return present if present is not None and present.number == self._wanted.number else None

    def _say(self, wanted: RequestedEngines) -> None:
        self._wanted = wanted
        _write(self._folder / _WANTED, wanted)


def of_job(environ: Mapping[str, str]) -> Engines | None:
    """Rank 0's end, where a launcher on this node started it; None: another program starts the engines, and only it can end them."""
    folder = environ.get(VARIABLE)
    return Engines(Path(folder)) if folder and Path(folder).is_dir() else None


def _write(path: Path, what: RequestedEngines | Present) -> None:
    beside = path.with_suffix(".new")
    beside.write_bytes(msgspec.json.encode(what))
    os.replace(beside, path)


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    try:
        if len(data) > MAX_BYTES:
            raise msgspec.ValidationError(f"over {MAX_BYTES:,} bytes")
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        why = f"{path} is not what the launcher and rank 0 tell each other: {error}"
        raise ConfigError(why, "leave the folder to the training job") from error
