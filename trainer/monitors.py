"""Sinks that need an extra: TensorBoard (`[tensorboard]`) and W&B (`[wandb]`).

Owns what is theirs: imports, names, and what may go wrong. A missing package is an error before the run starts; a sink that fails later is
left, aloud, and the run goes on. W&B's key is W&B's own business (`wandb login`): none stands in run.toml.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scavenger.config import RunConfig
from scavenger.errors import ConfigError
from trainer.monitor import Entry, Sink, SinkFailed


def chosen(config: RunConfig) -> list[Sink]:
    """The sinks that `[monitor]` asks for. Raises `ConfigError`."""
    sinks: list[Sink] = []
    if config.monitor.tensorboard:
        sinks.append(TensorBoard(config.run.out_dir))
    if config.monitor.wandb != "off":
        sinks.append(WeightsAndBiases(config))
    return sinks


#: Of run.toml, what W&B never sees: where our key lies, and what people pass to code of theirs, an API key perhaps.
WITHHELD: Any = {"run": {"key"}, "reward": {"options"}, "data": {"chat_options"}}


class TensorBoard:
    """Scalars `train/NAME` and `eval/NAME` in `<out_dir>/tensorboard`. This life's first entry voids earlier ones' from there on."""

    name = "tensorboard"

    def __init__(self, out_dir: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("monitor.tensorboard needs tensorboard", 'install it: pip install ".[tensorboard]" in a clone') from error
        self._make: Any = SummaryWriter
        self._folder = str(out_dir / self.name)
        self._writer: Any = None

    def write(self, entry: Entry) -> None:
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
    """One W&B run for all attempts (its id is `run.name`); figures by our own step, so that a resumed run may repeat some."""

    name = "wandb"

    def __init__(self, config: RunConfig) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("monitor.wandb needs wandb", 'install it: pip install ".[wandb]" in a clone') from error
        monitor, run = config.monitor, config.run
        self._failures = (OSError, wandb.errors.Error)
        try:
            self._run = wandb.init(
                project=monitor.wandb_project, entity=monitor.wandb_entity or None, id=run.name, name=run.name, dir=str(run.out_dir),
                mode=monitor.wandb, resume="allow", config=config.model_dump(mode="json", exclude=WITHHELD),
                settings=wandb.Settings(console="off"),
            )  # fmt: skip
        except self._failures as error:
            raise ConfigError(f"monitor.wandb: {error}", "log in with `wandb login`, or set it to offline or off") from error
        for kind in ("train", "eval"):
            self._run.define_metric(f"{kind}/*", step_metric="step")

    def write(self, entry: Entry) -> None:
        try:
            self._run.log({"step": entry.step, "attempt": entry.attempt} | {f"{entry.kind}/{k}": v for k, v in entry.metrics.items()})
        except self._failures as error:
            raise SinkFailed(f"wandb: {error}") from error

    def close(self) -> None:
        try:
            self._run.finish()
        except self._failures as error:
            raise SinkFailed(f"wandb: {error}") from error
