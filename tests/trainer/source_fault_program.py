"""A trainer of two ranks whose rank 1 loses its source of weights: `mpirun -n 2 python source_fault_program.py run.toml`.

Rank 1 is that of `python -m trainer`, without a model: it serves its share, ignores SIGTERM and waits for commands. Rank 0 waits for ever,
as for samples of engines that cannot load. What fails is the library under rank 1's CURVE socket, once rank 1 is idle.
"""

from __future__ import annotations

import sys
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from scavenger.config import RunConfig
from trainer import __main__ as program
from trainer.loop.comm import Comm
from trainer.loop.ending import Ending
from trainer.loop.watchdog import Here

WAITS = threading.Event()


class Told(Here):
    @contextmanager
    def at(self, doing: str, *, idle: bool = False, command: bool = False) -> Iterator[None]:
        with super().at(doing, idle=idle, command=command):
            if idle:
                WAITS.set()
            yield


class Failing(zmq.Poller):
    def poll(self, timeout: int | float | None = None) -> list[tuple[Any, int]]:
        if WAITS.wait(0.02):
            raise zmq.ZMQError(zmq.ENOTSOCK)
        return super().poll(0)


def lead(config: RunConfig, comm: Comm, options: Namespace) -> int:
    with program.weights_source(config, comm, Ending()):
        comm.replies()
    return 0


def main(argv: list[str]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "lead", lead)
        patch.setattr(program, "make_learner", lambda *_: None)
        patch.setattr(program, "watched", lambda *_: Told())
        patch.setattr("scavenger.weights.source_zmq.zmq.Poller", Failing)
        return program.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
