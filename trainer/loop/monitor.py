"""What a run tells people: the same entries to every sink, one protocol. Rank 0 only.

Owns the sinks. Two need nothing installed: one JSON line an entry in `metrics.jsonl`, and on standard output a progress display where
that is a terminal, else one plain line a step. Floats are written with all their digits, so two runs can be compared bit by bit.

Sinks that need an extra: TensorBoard (`[tensorboard]`), W&B (`[wandb]`) and MLflow (`[mlflow]`). A missing package is an error before
the run starts; a sink that fails later is left, aloud, and the run goes on. Keys are the services' own business (`wandb login`,
`MLFLOW_TRACKING_TOKEN`): none stands in run.toml.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from scavenger.config import RunConfig
from scavenger.errors import ConfigError, ScavengerError


def chosen(config: RunConfig, *, local: bool = False) -> list[Sink]:
    """The sinks that `[monitor]` asks for. `local`: of a try with `--local`. Raises `ConfigError`."""
    sinks: list[Sink] = []
    if config.monitor.tensorboard:
        sinks.append(TensorBoard(config.run.out_dir))
    if config.monitor.wandb != "off":
        sinks.append(WeightsAndBiases(config, tracked_name(config.run.name, local=local)))
    if config.monitor.mlflow:
        sinks.append(MLflow(config, tracked_name(config.run.name, local=local)))
    return sinks


def tracked_name(run: str, *, local: bool) -> str:
    """What W&B and MLflow know a run by. A try has one of its own: its steps begin at 1 again, and would lie among the run's."""
    return f"{run}-local" if local else run


#: Of run.toml, what W&B and MLflow never see: where our key lies, and what people pass to code of theirs, an API key perhaps.
WITHHELD: Any = {
    "run": {"key": True},
    "reward": {"options": True, "functions": {"__all__": {"options"}}},
    "data": {"chat_options": True, "environment_args": True},
}


class TensorBoard:
    """Scalars `train/NAME` and `eval/NAME` in `<out_dir>/tensorboard`. This life's first entry voids earlier ones' from there on."""

    name = "tensorboard"

    def __init__(self, out_dir: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "monitor.tensorboard needs tensorboard", "install it: pip install 'scavenger[tensorboard]'"
            ) from error
        self._make: Any = SummaryWriter
        self._folder = str(out_dir / self.name)
        self._writer: Any = None

    def write(self, entry: MonitorEntry) -> None:
        try:
            if self._writer is None:  # an evaluation's step was trained by an earlier life
                self._writer = self._make(self._folder, purge_step=entry.step + (entry.kind == "eval"))
            for name, value in entry.metrics.items():
                self._writer.add_scalar(f"{entry.kind}/{name}", value, entry.step, walltime=entry.at)
            self._writer.flush()
        except OSError as error:
            raise SinkFailed(f"tensorboard: {error}") from error

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """One W&B run for all attempts (its id is `name`); figures by our own step, so that a resumed run may repeat some."""

    name = "wandb"

    def __init__(self, config: RunConfig, name: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "monitor.wandb needs wandb", "install it: pip install 'scavenger[wandb]'"
            ) from error
        monitor, run = config.monitor, config.run
        self._failures = (OSError, wandb.errors.Error)
        try:
            self._run = wandb.init(
                project=monitor.wandb_project,
                entity=monitor.wandb_entity or None,
                id=name,
                name=name,
                dir=str(run.out_dir),
                mode=monitor.wandb,
                resume="allow",
                config=config.model_dump(mode="json", exclude=WITHHELD),
                settings=wandb.Settings(console="off"),
            )
        except self._failures as error:
            raise ConfigError(
                f"monitor.wandb: {error}", "log in with `wandb login`, or set it to offline or off"
            ) from error
        for kind in ("train", "eval"):
            self._run.define_metric(f"{kind}/*", step_metric="step")

    def write(self, entry: MonitorEntry) -> None:
        try:
            self._run.log(
                {"step": entry.step, "attempt": entry.attempt}
                | {f"{entry.kind}/{k}": v for k, v in entry.metrics.items()}
            )
        except self._failures as error:
            raise SinkFailed(f"wandb: {error}") from error

    def close(self) -> None:
        try:
            self._run.finish()
        except self._failures as error:
            raise SinkFailed(f"wandb: {error}") from error


class MLflow:
    """One MLflow run for all attempts, found by its tag `scavenger.run`. Its parameters are those that the first attempt began with.
    It is FINISHED after the run's last step, KILLED while a stopped run may be resumed.

    Source of the bounds: MLflow's REST API (100 parameters, 1,000 metrics a batch; 6,000 characters a value).
    """

    name = "mlflow"

    def __init__(self, config: RunConfig, name: str) -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
            from mlflow.exceptions import MlflowException
        except ImportError as error:
            raise ConfigError(
                "monitor.mlflow needs mlflow", "install it: pip install 'scavenger[mlflow]'"
            ) from error
        monitor, run = config.monitor, config.run
        self._metric: Any = Metric
        self._steps, self._step, self._was = run.steps, 0, "KILLED"
        self._failures = (OSError, MlflowException)
        try:
            self._client: Any = MlflowClient(tracking_uri=monitor.mlflow)
            experiment = self._client.get_experiment_by_name(monitor.mlflow_experiment)
            place = (
                experiment.experiment_id
                if experiment is not None
                else self._client.create_experiment(monitor.mlflow_experiment)
            )
            known = self._client.search_runs([place], f"tags.`scavenger.run` = '{name}'", max_results=1)
            if known:
                self._run, self._was = known[0].info.run_id, known[0].info.status
                self._client.update_run(self._run, status="RUNNING")
            else:
                begun = self._client.create_run(place, run_name=name, tags={"scavenger.run": name})
                self._run = begun.info.run_id
                flat = flattened(config.model_dump(mode="json", exclude=WITHHELD))
                values = [Param(key, str(value)[:6000]) for key, value in flat.items()]
                for first in range(0, len(values), 100):
                    self._client.log_batch(self._run, params=values[first : first + 100])
        except self._failures as error:
            raise ConfigError(
                f"monitor.mlflow = {monitor.mlflow}: {error}",
                "is it the URI of a tracking server (http://HOST:PORT), and does it reply?",
            ) from error

    def write(self, entry: MonitorEntry) -> None:
        now_ms = round(entry.at * 1000)
        named = {"attempt": float(entry.attempt)} | {
            f"{entry.kind}/{name}": value for name, value in entry.metrics.items()
        }
        try:
            self._client.log_batch(
                self._run,
                metrics=[self._metric(name, value, now_ms, entry.step) for name, value in named.items()],
            )
            self._step = max(self._step, entry.step)
        except self._failures as error:
            raise SinkFailed(f"mlflow: {error}") from error

    def close(self) -> None:
        try:
            self._client.set_terminated(self._run, status=self._status())
        except self._failures as error:
            raise SinkFailed(f"mlflow: {error}") from error

    def _status(self) -> str:
        if not self._step and self._was == "FINISHED":  # all steps were done before
            return self._was
        return "FINISHED" if 0 < self._steps <= self._step else "KILLED"


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat |= flattened(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat


@dataclass(frozen=True, slots=True)
class MonitorEntry:
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

    def write(self, entry: MonitorEntry) -> None:
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
            raise ConfigError(
                f"run.out_dir = {out_dir} cannot be written: {error}",
                "name a folder that this user may write to",
            ) from error

    def write(self, entry: MonitorEntry) -> None:
        more = {} if entry.version is None else {"version": entry.version, "phases": list(entry.phases)}
        line = {
            "kind": entry.kind,
            "step": entry.step,
            "attempt": entry.attempt,
            "at": entry.at,
            **entry.metrics,
            **more,
        }
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):  # what it still holds cannot be written either
                self._file.close()
            raise SinkFailed(f"{self.name}: {error}") from error

    def close(self) -> None:
        self._file.close()


#: A step's seconds by what they were spent on, in the order of a step, and the metrics that hold them.
SPENT_ON = {
    "generate": "seconds_seed",
    "wait": "seconds_wait",
    "reward": "seconds_reward",
    "train": "seconds_train",
    "update": "seconds_update",
    "publish": "seconds_publish",
    "checkpoint": "seconds_checkpoint",
}


def time_line(metrics: Mapping[str, float]) -> str:
    """How long a step took with all that followed it, and where that went; what shows as zero is left out."""
    spent = {what: metrics.get(name, 0.0) for what, name in SPENT_ON.items()}
    whole = metrics["seconds"] + spent["publish"] + spent["checkpoint"]
    spent["other"] = whole - sum(spent.values())
    digits = 1 if whole >= 10 else 2
    told = (f"{what} {value:.{digits}f}" for what, value in spent.items() if value >= 0.5 * 10**-digits)
    return f"{whole:.{digits}f} s ({', '.join(told) or 'no part of it long'})"


def _set_line(name: str, metrics: Mapping[str, float]) -> str:
    """Of one data set; `name` is "" or ends in "_"."""
    line = f"sampled {metrics[f'eval_{name}sampled']:.3f}, greedy {metrics[f'eval_{name}greedy']:.3f}"
    if f"eval_{name}pass_at_1" in metrics:
        line += f", solved {metrics[f'eval_{name}pass_at_1']:.1%}"
    return f"{name[:-1]}: {line}" if name else line


def as_line(entry: MonitorEntry, steps: int) -> str:
    """An entry as one line for people."""
    metrics = entry.metrics
    if entry.kind == "eval":
        names = [
            name.removeprefix("eval_").removesuffix("sampled") for name in metrics if name.endswith("sampled")
        ]
        return f"eval after step {entry.step}: {'; '.join(_set_line(name, metrics) for name in names)}"
    spread = f" +- {metrics['reward_std']:.3f}" if "reward_std" in metrics else ""
    return (
        f"step {entry.step}/{steps}  reward {metrics['reward']:.3f}{spread}  loss {metrics['loss']:+.6e}  "
        f"tokens {metrics['tokens']:.0f}  length {metrics['length_mean']:.1f}  moved {metrics['moves']:.0f}  {time_line(metrics)}"
        + (
            "  NOTHING TRAINED: rewards are alike within each group, masked, or filtered"
            if metrics.get("samples_trained") == 0
            else ""
        )
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

    def write(self, entry: MonitorEntry) -> None:
        self.say(as_line(entry, self._steps))

    def close(self) -> None:
        pass


class Terminal:
    """The same lines, above a bar of the steps."""

    name = "terminal"

    def __init__(self, steps: int, out: TextIO) -> None:
        self._steps = steps
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("reward {task.fields[reward]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(file=out, force_terminal=True, highlight=False, markup=False, soft_wrap=True),
        )
        self._task = self._bar.add_task("steps", total=steps, reward="-")
        self._bar.start()

    def say(self, line: str) -> None:
        """Raises `SinkFailed`."""
        try:
            self._bar.console.print(line)
        except OSError as error:
            raise SinkFailed(f"the terminal: {error}") from error

    def write(self, entry: MonitorEntry) -> None:
        self.say(as_line(entry, self._steps))
        if entry.kind == "train":
            self._bar.update(self._task, completed=entry.step, reward=f"{entry.metrics['reward']:.3f}")

    def close(self) -> None:
        self._bar.stop()


class Monitor:
    """All sinks of a run. `steps`: of the whole run. `more`: those that extras bring."""

    def __init__(
        self,
        out_dir: Path,
        *,
        steps: int,
        out: TextIO | None = None,
        more: Iterable[Sink] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        out = out or sys.stdout
        # Open MPI 5's mpirun gives ranks a terminal of its own, whatever its output is: the launcher knows (`launch`).
        terminal = out.isatty() and os.environ.get("TTY_COMPATIBLE") != "0"
        self._screen: Plain | Terminal = Terminal(steps, out) if terminal else Plain(steps, out)
        self._sinks: list[Sink] = [Jsonl(out_dir), self._screen, *more]
        self._clock = clock

    def say(self, line: str) -> None:
        """Tried again each time, also where the screen was left: what is said is rare, and a full disk may have room again."""
        try:
            self._screen.say(line)
        except SinkFailed as error:
            self._drop_sink(self._screen, error)

    def step(
        self, step: int, attempt: int, version: int, metrics: Mapping[str, float], phases: tuple[str, ...]
    ) -> None:
        self._write(MonitorEntry("train", step, attempt, self._clock(), metrics, version, phases))

    def evaluation(self, step: int, attempt: int, metrics: Mapping[str, float]) -> None:
        self._write(MonitorEntry("eval", step, attempt, self._clock(), metrics))

    def _write(self, entry: MonitorEntry) -> None:
        for sink in list(self._sinks):
            try:
                sink.write(entry)
            except SinkFailed as error:
                self._drop_sink(sink, error)

    def _drop_sink(self, sink: Sink, why: SinkFailed) -> None:
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
    """On standard error. Often it is the same full disk: then the message is lost, and the run goes on all the same."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
