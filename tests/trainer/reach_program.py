"""One MPI rank of a test: `mpirun -n 3 python reach_program.py mute|lost|well`.

Rank 2 is mute, or has a host name that does not resolve.
"""

from __future__ import annotations

import socket
import sys
import time

from mpi4py import MPI

from trainer import reach
from trainer.loop import comm

what, rank = sys.argv[1], MPI.COMM_WORLD.Get_rank()
if what == "mute":
    reach.LIMIT_S = 2.0
    if rank == 2:
        time.sleep(100)  # its launcher ends it, long before
if what == "lost":
    name = "n2.invalid" if rank == 2 else f"n{rank}"
    known = reach.connects

    def connects(host: str, port: int, limit_s: float = 5.0) -> str:
        return known(host if host.endswith(".invalid") else "127.0.0.1", port, limit_s)

    socket.gethostname = lambda: name
    reach.connects = connects
comm.connect(20.0)
print("met", flush=True)
MPI.Finalize()
