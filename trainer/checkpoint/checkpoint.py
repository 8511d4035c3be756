"""Checkpoints: model and optimizer by torch.distributed.checkpoint in safetensors files, the rest in one JSON file.

Owns the folder `<out_dir>/checkpoints`: names, completeness, which are kept; `saving` writes into it. A checkpoint is complete when its
folder has its final name: it is written under another name, flushed, and renamed. One is deleted only after the ledger was told which
are kept. Sharded tensors carry their offsets, so a resume may use another number of ranks. The trainer draws no random numbers (see
`model`). The position in the data and the number of updates do not follow from `step`: `trainer.json` has both.

An attempt that starts from an older checkpoint makes the newer ones another history: they are renamed to `step-N.abandoned-ATTEMPT`,
which nothing selects, and deleted once the attempt has written as many of its own as are kept.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from scavenger.errors import ConfigError, StaleAttempt
from trainer.model.learner import Learner

STATE_FILE = "trainer.json"
FORMAT = 1
OTHER_CHECKPOINT = (
    "name an older one (--resume DIR; export: --checkpoint DIR), or start over with --resume none"
)
_NAME = re.compile(r"step-(\d{8,})")


class CheckpointState(msgspec.Struct, frozen=True):
    """`version`/`root` (hex): the published weights of this checkpoint. `cursor`: where the data goes on, the first
    prompt of no whole step.

    `attempt`: the run's attempt that wrote it; 0 = written before attempts were noted. `weights_dtype`: in which type the version was
    published, "" = written before that was noted. `owes_evaluation`: the one due at this step was not made. `adapters`: the version holds
    adapters alone. `data`: digest of the prompts in their order, "" = written before that was noted. `job`: Slurm's id of the job that
    wrote it, 0 = none, or written before that was noted. `tokenizer`: digest of the tokenizer.json that the version, or its base, holds
    beside the weights; "" = none. `run`: the run's name, "" = written before that was noted. `late`: positions before `cursor` of
    prompts that came too late for their step: the next one trains them. `base`: digest of the weights in model.path (`model.identity`),
    "" = written before that was noted.
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
    weights_dtype: str = ""
    owes_evaluation: bool = False
    adapters: bool = False
    data: str = ""
    job: int = 0
    tokenizer: str = ""
    run: str = ""
    late: tuple[int, ...] = ()
    base: str = ""


class Surplus(NamedTuple):
    """`kept`: steps of the checkpoints that stay, ascending. `going`: folders to delete."""

    kept: tuple[int, ...]
    going: tuple[Path, ...]


def folder(out_dir: Path) -> Path:
    return out_dir / "checkpoints"


def name(step: int) -> str:
    return f"step-{step:08d}"


def partial(out_dir: Path, step: int, attempt: int) -> Path:
    """Where an attempt writes the checkpoint of `step` before it is complete."""
    return folder(out_dir) / f".{name(step)}.attempt-{attempt}.partial"


def prepare(out_dir: Path, step: int, attempt: int) -> Path:
    """Rank 0: an empty folder to write into."""
    path = partial(out_dir, step, attempt)
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)
    return path


def sweep(out_dir: Path) -> None:
    """Rank 0, once an attempt was granted: delete what earlier lives were writing when they ended."""
    for path in folder(out_dir).glob(".step-*.partial"):
        shutil.rmtree(path)


def load_shards(learner: Learner, path: Path, updates_taken: int) -> None:
    """All ranks: read into the present shards, whatever the number of ranks that wrote them. Raises `ConfigError`, on all ranks alike."""
    state = learner.state_to_load()
    check_shapes(path, {name: tuple(value.shape) for name, value in state.items()})
    load(state, storage_reader=HuggingFaceStorageReader(str(path)))
    learner.set_updates_taken(updates_taken)


def check_shapes(path: Path, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `ConfigError` where a checkpoint's files cannot be read, or hold another model's tensors, or other adapters'.

    Those of the optimizer are looked at only if they are wanted.
    """
    try:
        read = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    except Exception as error:  # safetensors raises a class of its own, torch others
        raise ConfigError(f"the files in {path} cannot be read: {error}", OTHER_CHECKPOINT) from error
    stored: dict[str, Any] = dict(read)
    wrong = [
        name for name, shape in wanted.items() if name not in stored or tuple(stored[name].size) != shape
    ]
    wrong += [name for name in stored if name.startswith("model.") and name not in wanted]
    if wrong:
        raise ConfigError(
            f"{path} does not hold what this run trains, first: {wrong[0]}",
            "if model.path or [lora] of run.toml was changed, undo that, or choose another run.out_dir; "
            f"if not, files of the checkpoint are gone: {OTHER_CHECKPOINT}",
        )


def complete(out_dir: Path, state: CheckpointState) -> Path:
    """Rank 0, after all shards are written: make the checkpoint durable and visible. What `surplus` names is deleted later.

    Raises `StaleAttempt` when another trainer completed one of this step meanwhile: this attempt set all later ones aside when it began.
    """
    source, target = partial(out_dir, state.step, state.attempt), folder(out_dir) / name(state.step)
    (source / STATE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(state)) + b"\n")
    for path in [*source.iterdir(), source]:
        _sync(path)
    if (target / STATE_FILE).is_file():
        raise StaleAttempt(
            f"{target} was written by another trainer of this run, attempt {read_state(target).attempt}; this is attempt {state.attempt}",
            "end this job; only the newest trainer of a run goes on",
        )
    if target.exists():  # a deletion that was killed left it
        shutil.rmtree(target)
    source.rename(target)
    _sync(target.parent)
    return target


def disown(path: Path, attempt: int) -> Path:
    """Set aside a checkpoint that turned out to be of a history which was left; nothing resumes from it. Returns its new name."""
    target = path.with_name(f"{path.name}.abandoned-{attempt}")
    if target.exists():  # without a ledger every attempt is the first
        shutil.rmtree(target)
    path.rename(target)
    _sync(target.parent)
    return target


def surplus(out_dir: Path, newest: Path, keep: int) -> Surplus:
    """Which checkpoints stay, and which go once that was said: all but the newest `keep`.

    `newest`, the one just written, stays whatever its step is, and so do abandoned ones until `keep` of its attempt exist.
    """
    here, attempt = found(out_dir), read_state(newest).attempt
    older = [path for path in here if path != newest]
    going = older[: max(0, len(here) - keep)]
    staying = tuple(_step_of(path) for path in here if path not in going)
    if sum(_is_of(path, attempt) for path in here) >= keep:
        going += abandoned(out_dir)
    going += [
        path
        for path in folder(out_dir).glob("step-*")
        if _NAME.fullmatch(path.name) and not (path / STATE_FILE).is_file()
    ]
    return Surplus(staying, tuple(going))


def delete(paths: Sequence[Path]) -> None:
    """Rank 0, once the ledger knows that they are not kept. Their state goes first: what a crash leaves is no checkpoint, and surplus."""
    for path in paths:
        (path / STATE_FILE).unlink(missing_ok=True)
        shutil.rmtree(path)


def found(out_dir: Path) -> list[Path]:
    """Complete checkpoints of the present history, oldest step first."""
    named = [
        (int(match[1]), path)
        for path in folder(out_dir).glob("step-*")
        if (match := _NAME.fullmatch(path.name))
    ]
    return [path for _, path in sorted(named) if (path / STATE_FILE).is_file()]


def steps(out_dir: Path) -> list[int]:
    """Of the complete checkpoints of the present history."""
    return [_step_of(path) for path in found(out_dir)]


def _step_of(path: Path) -> int:
    """By the folder's name: a state that a disk has damaged must not keep a run from going on from another checkpoint."""
    return int(path.name.removeprefix("step-"))


def _is_of(path: Path, attempt: int) -> bool:
    try:
        return read_state(path).attempt == attempt
    except ConfigError:  # it is damaged: no attempt can go on from it
        return False


def abandoned(out_dir: Path) -> list[Path]:
    """Checkpoints of histories that a later attempt left behind."""
    return sorted(folder(out_dir).glob("step-*.abandoned-*"))


def abandon(out_dir: Path, step: int, start: Path | None, attempt: int) -> list[Path]:
    """Rank 0, once `attempt` was granted: set aside what lies after `step`, and another history's checkpoint of `step` itself.

    `start`: the checkpoint that the attempt started from, None for none. Returns the new names.
    """
    renamed = []
    for path in found(out_dir):
        is_start = start is not None and path.resolve() == start.resolve()
        if is_start or _step_of(path) < step:
            continue
        renamed.append(disown(path, attempt))
    return renamed


def read_state(path: Path) -> CheckpointState:
    """Raises `ConfigError` when `path` is not a complete checkpoint of this format."""
    try:
        state = msgspec.json.decode((path / STATE_FILE).read_bytes(), type=CheckpointState)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} is not a complete checkpoint: {error}", OTHER_CHECKPOINT) from error
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


def own(out_dir: Path, job: int) -> Path | None:
    """The newest complete checkpoint, if an earlier life of this Slurm job wrote it: what it was told to resume from lies behind that."""
    path = select(out_dir, "auto")
    return path if path is not None and job and read_state(path).job == job else None


def newest(out_dir: Path, most: int) -> Path | None:
    """The newest complete checkpoint of a step up to `most`."""
    return next((path for path in reversed(found(out_dir)) if _step_of(path) <= most), None)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
