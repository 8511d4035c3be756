"""A tiny MPI world: `mpirun -n N python -m trainer.world_probe N LIMIT_S` exits 0 where N ranks are one world.

Each rank exchanges a byte with rank 0 and with its neighbours. Knows no torch: it starts in the time that Python and
MPI take. Exit codes: `mpi_settings.NO_MPI`, `WRONG_SIZE`, `UNREACHABLE`; the last also where MPI itself hangs, `LIMIT_S`
seconds after it was asked for.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Sequence

from trainer import reach
from trainer.mpi_settings import NO_MPI, UNREACHABLE, WRONG_SIZE


def _end(words: str, code: int) -> None:
    """At once, without MPI_Finalize: it may hang, and a launcher ends the other ranks of one that ended so."""
    print(words, file=sys.stderr, flush=True)
    os._exit(code)


def main(argv: Sequence[str]) -> int:
    expected, limit_s, host = int(argv[0]), float(argv[1]), socket.gethostname()
    words = f"MPI on {host} did not start, or did not end, within {limit_s:g} s"
    late = threading.Timer(limit_s, _end, (words, UNREACHABLE))
    late.daemon = True
    late.start()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        _end(f"{type(error).__name__} on {host}: {error}", NO_MPI)
    world = MPI.COMM_WORLD
    if world.Get_size() != expected:
        size = world.Get_size()
        _end(
            f"a world of {size} and not of {expected}: launcher and MPI library are of different makes",
            WRONG_SIZE,
        )
    try:
        missing = reach.exchange(MPI, world, 0.8 * limit_s)
    except MPI.Exception as error:
        _end(f"rank {world.Get_rank()} on {host}: {error}", UNREACHABLE)
    if missing:
        _end(reach.unheard(world.Get_rank(), host, missing, 0.8 * limit_s), UNREACHABLE)
    MPI.Finalize()
    late.cancel()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
