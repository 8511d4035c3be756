"""What a run tells people: the same entries to every sink, one protocol. Rank 0 only.

Owns the sinks that need nothing installed: one JSON line an entry in `metrics.jsonl`, and on standard output a progress display where
that is a terminal, else one plain line a step. TensorBoard and W&B are in `monitors`. Floats are written with all their digits, so two
runs can be compared bit by bit.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from scavenger.errors import ConfigError, ScavengerError


@dataclass(frozen=True, slots=True)
class Entry:
    """A step's figures ("train") or an evaluation's ("eval"). `at`: Unix seconds."""

    kind: str
    step: int
    attempt: int
    at: float
    metrics: Mapping[str, float]
    version: int | None = None
    phases: tuple[str, ...] = ()


class SinkFailed(ScavengerError):
    """A sink cannot be written to any more. The run goes on without it, and says so."""


class Sink(Protocol):
    name: str

    def write(self, entry: Entry) -> None:
        """Raises `SinkFailed`."""

    def close(self) -> None:
        """Raises `SinkFailed` or `OSError`."""


class Jsonl:
    """Appends to `<out_dir>/metrics.jsonl`: a resumed run goes on in the same file, its attempt tells the lives apart."""

    name = "metrics.jsonl"

    def __init__(self, out_dir: Path) -> None:
        try:
            out_dir.mkdir(parents=True, exist_ok=True)
            self._file = (out_dir / self.name).open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"run.out_dir = {out_dir} cannot be written: {error}", "name a folder that this user may write to") from error

    def write(self, entry: Entry) -> None:
        more = {} if entry.version is None else {"version": entry.version, "phases": list(entry.phases)}
        line = {"kind": entry.kind, "step": entry.step, "attempt": entry.attempt, "at": entry.at, **entry.metrics, **more}
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):  # what it still holds cannot be written either
                self._file.close()
            raise SinkFailed(f"{self.name}: {error}") from error

    def close(self) -> None:
        self._file.close()


def told(entry: Entry, steps: int) -> str:
    """An entry as one line for people."""
    metrics = entry.metrics
    if entry.kind == "eval":
        return f"eval after step {entry.step}: sampled {metrics['eval_sampled']:.3f}, greedy {metrics['eval_greedy']:.3f}"
    return (
        f"step {entry.step}/{steps}  reward {metrics['reward']:.3f}  loss {metrics['loss']:+.6e}  tokens {metrics['tokens']:.0f}  "
        f"length {metrics['length_mean']:.1f}  moved {metrics['moves']:.0f}  {metrics['seconds']:.1f} s "
        f"(wait {metrics['seconds_wait']:.1f}, train {metrics['seconds_train']:.1f}, publish {metrics['seconds_publish']:.2f})"
        + ("  NOTHING TRAINED: rewards are alike within each group, or masked" if metrics.get("samples_trained") == 0 else "")
    )


class Plain:
    """One line an entry, for a log file."""

    name = "log"

    def __init__(self, steps: int, out: TextIO) -> None:
        self._steps = steps
        self._out = out

    def say(self, line: str) -> None:
        """Raises `SinkFailed`."""
        try:
            print(line, file=self._out, flush=True)
        except OSError as error:
            raise SinkFailed(f"standard output: {error}") from error

    def write(self, entry: Entry) -> None:
        self.say(told(entry, self._steps))

    def close(self) -> None:
        pass


class Terminal:
    """The same lines, above a bar of the steps."""

    name = "terminal"

    def __init__(self, steps: int, out: TextIO) -> None:
        self._steps = steps
        self._bar = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("reward {task.fields[reward]}"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
            console=Console(file=out, force_terminal=True, highlight=False, markup=False, soft_wrap=True),
        )  # fmt: skip
        self._task = self._bar.add_task("steps", total=steps, reward="-")
        self._bar.start()

    def say(self, line: str) -> None:
        """Raises `SinkFailed`."""
        try:
            self._bar.console.print(line)
        except OSError as error:
            raise SinkFailed(f"the terminal: {error}") from error

    def write(self, entry: Entry) -> None:
        self.say(told(entry, self._steps))
        if entry.kind == "train":
            self._bar.update(self._task, completed=entry.step, reward=f"{entry.metrics['reward']:.3f}")

    def close(self) -> None:
        self._bar.stop()


class Monitor:
    """All sinks of a run. `steps`: of the whole run. `more`: those that extras bring."""

    def __init__(
        self, out_dir: Path, *, steps: int, out: TextIO | None = None, more: Iterable[Sink] = (), clock: Callable[[], float] = time.time
    ) -> None:
        out = out or sys.stdout
        self._screen: Plain | Terminal = Terminal(steps, out) if out.isatty() else Plain(steps, out)
        self._sinks: list[Sink] = [Jsonl(out_dir), self._screen, *more]
        self._clock = clock

    def say(self, line: str) -> None:
        """Tried again each time, also where the screen was left: what is said is rare, and a full disk may have room again."""
        try:
            self._screen.say(line)
        except SinkFailed as error:
            self._leave(self._screen, error)

    def step(self, step: int, attempt: int, version: int, metrics: Mapping[str, float], phases: tuple[str, ...]) -> None:
        self._write(Entry("train", step, attempt, self._clock(), metrics, version, phases))

    def evaluation(self, step: int, attempt: int, metrics: Mapping[str, float]) -> None:
        self._write(Entry("eval", step, attempt, self._clock(), metrics))

    def _write(self, entry: Entry) -> None:
        for sink in list(self._sinks):
            try:
                sink.write(entry)
            except SinkFailed as error:
                self._leave(sink, error)

    def _leave(self, sink: Sink, why: SinkFailed) -> None:
        if sink not in self._sinks:
            return  # left, and said so, before
        self._sinks.remove(sink)
        line = f"{sink.name} gets nothing more of this run: {why}"
        if sink is self._screen:
            _last_resort(line)
        else:
            self.say(line)

    def close(self) -> None:
        for sink in self._sinks:
            try:
                sink.close()
            except (OSError, SinkFailed) as error:
                _last_resort(f"{sink.name} may lack the last figures of this run: {error}")


def _last_resort(line: str) -> None:
    """On standard error. Often it is the same full disk: then nobody can be told, and the run goes on all the same."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
