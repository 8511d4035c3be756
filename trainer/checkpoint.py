"""Checkpoints: model and optimizer by torch.distributed.checkpoint in safetensors files, the rest in one JSON file.

Owns the folder `<out_dir>/checkpoints`. A checkpoint is complete when its folder has its final name: it is written under another
name, flushed, and renamed. Sharded tensors carry their offsets, so a resume may use another number of ranks. The trainer draws no
random numbers (see `model`), and its problems follow from the step, so neither a generator nor a cursor has more state than `step`.

An attempt that starts from an older checkpoint makes the newer ones another history: they are renamed to `step-N.abandoned-ATTEMPT`,
which nothing selects, and deleted once the attempt has written as many of its own as are kept.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import msgspec
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from scavenger.errors import ConfigError
from trainer.model import Learner

STATE_FILE = "trainer.json"
FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})")


class State(msgspec.Struct, frozen=True):
    """`version`/`root` (hex): the published weights of this checkpoint. `cursor`: training problems taken so far.

    `attempt`: the run's attempt that wrote it; 0 = written before attempts were noted.
    """

    step: int
    version: int
    root: str
    cursor: int
    seed: int
    updates_taken: int
    dtype: str
    attempt: int = 0
    format: int = FORMAT


def folder(out_dir: Path) -> Path:
    return out_dir / "checkpoints"


def name(step: int) -> str:
    return f"step-{step:08d}"


def partial(out_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written before it is complete."""
    return folder(out_dir) / f".{name(step)}.partial"


def prepare(out_dir: Path, step: int) -> Path:
    """Rank 0: an empty folder to write into."""
    path = partial(out_dir, step)
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)
    return path


def save_shards(learner: Learner, path: Path) -> None:
    """All ranks: write this rank's shards."""
    save(learner.state(), storage_writer=HuggingFaceStorageWriter(str(path), save_distributed=True))


def load_shards(learner: Learner, path: Path, updates_taken: int) -> None:
    """All ranks: read into the present shards, whatever the number of ranks that wrote them."""
    load(learner.state(), storage_reader=HuggingFaceStorageReader(str(path)))
    learner.set_updates_taken(updates_taken)


def complete(out_dir: Path, state: State, keep: int) -> Path:
    """Rank 0, after all shards are written: make the checkpoint durable and visible, then drop all but the newest `keep`.

    The one just written stays whatever its step is, and so do abandoned ones until `keep` of this attempt exist.
    """
    source, target = partial(out_dir, state.step), folder(out_dir) / name(state.step)
    (source / STATE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(state)) + b"\n")
    for path in [*source.iterdir(), source]:
        _sync(path)
    if target.exists():  # an earlier life of the run got as far; this one is as good and newer
        shutil.rmtree(target)
    source.rename(target)
    _sync(target.parent)
    kept = found(out_dir)
    others = [path for path in kept if path != target]
    surplus = others[: max(0, len(kept) - keep)]
    if sum(read_state(path).attempt == state.attempt for path in kept) >= keep:
        surplus += abandoned(out_dir)
    for old in surplus:
        shutil.rmtree(old)
    return target


def found(out_dir: Path) -> list[Path]:
    """Complete checkpoints of the present history, oldest step first."""
    named = [(int(match[1]), path) for path in folder(out_dir).glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(named) if (path / STATE_FILE).is_file()]


def abandoned(out_dir: Path) -> list[Path]:
    """Checkpoints of histories that a later attempt left behind."""
    return sorted(folder(out_dir).glob("step-*.abandoned-*"))


def abandon(out_dir: Path, step: int, start: Path | None, attempt: int) -> list[Path]:
    """Rank 0, once `attempt` was granted: set aside what lies after `step`, and another history's checkpoint of `step` itself.

    `start`: the checkpoint that the attempt started from, None for none. Returns the new names.
    """
    renamed = []
    for path in found(out_dir):
        own = start is not None and path.resolve() == start.resolve()
        if own or read_state(path).step < step:
            continue
        target = path.with_name(f"{path.name}.abandoned-{attempt}")
        if target.exists():  # without a ledger every attempt is the first
            shutil.rmtree(target)
        path.rename(target)
        renamed.append(target)
    if renamed:
        _sync(folder(out_dir))
    return renamed


def read_state(path: Path) -> State:
    """Raises `ConfigError` when `path` is not a complete checkpoint of this format."""
    try:
        state = msgspec.json.decode((path / STATE_FILE).read_bytes(), type=State)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} is not a complete checkpoint: {error}", "resume from another, or with --resume none") from error
    if state.format != FORMAT:
        raise ConfigError(f"{path} has checkpoint format {state.format}, this trainer reads {FORMAT}")
    return state


def select(out_dir: Path, resume: str) -> Path | None:
    """Which checkpoint to start from: "auto" (the newest complete one, if any), "none", or a folder."""
    if resume == "none":
        return None
    if resume == "auto":
        return next(reversed(found(out_dir)), None)
    return Path(resume)


def newest(out_dir: Path, most: int) -> Path | None:
    """The newest complete checkpoint of a step up to `most`."""
    return next((path for path in reversed(found(out_dir)) if read_state(path).step <= most), None)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
