"""Writes checkpoints one after another until somebody kills it: `kill_program.py OUT LIVES SEED`.

Each life is a child of this process, which has torch imported already: it resumes from the newest checkpoint, checks every value of it, and
writes on; this process kills it with SIGKILL at a random moment of a random one of its first writes. Prints the step that each life found.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from trainer.checkpoint import checkpoint
from trainer.checkpoint.saving import Checkpoints, Saver
from trainer.loop import comm

VALUES = 1 << 20  # of each of two tensors: 8 MB a checkpoint, so that most of a life is writing


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"model.a": torch.full((VALUES,), float(step)), "exp_avg.a": torch.full((VALUES,), float(-step))}


def resume(out: Path) -> int:
    """The newest checkpoint's step, every value of which is right; 0 without one."""
    path = checkpoint.select(out, "auto")
    if path is None:
        return 0
    step = checkpoint.read_state(path).step
    found = tensors(0)
    load(found, storage_reader=HuggingFaceStorageReader(str(path)))
    for name, value in tensors(step).items():
        assert torch.equal(found[name], value), f"{path}: {name}"
    return step


def live(out: Path, began: int) -> None:
    comm.join(comm.Solo())
    step, saver = resume(out), Saver()
    checkpoint.sweep(out)
    print(step, flush=True)
    os.write(began, b"x")
    run: Any = SimpleNamespace(checkpoint=lambda *args: None)
    values = tensors(step)
    ranks: Any = SimpleNamespace(
        save=lambda path: saver.begin(values, path), is_saved=saver.is_written, wait_saved=saver.wait
    )
    checkpoints = Checkpoints(out, 2, run, ranks)
    while True:
        step += 1
        for name, value in tensors(step).items():
            values[name].copy_(
                value
            )  # in place, as an optimizer does, perhaps while the one before is still written
        checkpoints.begin(checkpoint.CheckpointState(step, step, "00", 0, 0, step, "float32", 1))
        os.write(began, b"x")


def main(out: Path, lives: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(lives):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            live(out, writer)
        os.close(writer)
        for _ in range(rng.randrange(1, 5)):
            assert os.read(reader, 1), "the life ended by itself"
        os.close(reader)
        time.sleep(rng.random() * 0.1)  # the random moment
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, (
            "it was to be killed, not to fail"
        )
    comm.join(comm.Solo())
    print(resume(out), flush=True)
    comm.disconnect()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
