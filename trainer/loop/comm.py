"""How ranks talk: frames of bytes over MPI, no pickle. Tensors move by torch.distributed, which `join` sets up.

Owns the launcher check and the waiting; frames need no torch, which only `join` and `disconnect` import.
Rank 0 alone waits for samples; the
other ranks look for a frame and sleep `idle_poll_s` between looks, because MPI's blocking receive spins on a whole core. One thread a
rank (the main one) calls MPI, and never while the rank is inside a torch collective.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from scavenger.errors import ConfigError
from trainer import reach

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

COMMAND_TAG, RESULT_TAG = 1, 2
_RESULT_POLL_S = 0.0005
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


def _nothing() -> None:
    """No rank is watched."""


class Comm(Protocol):
    """The world as a rank sees it."""

    rank: int
    size: int

    def send(self, frames: Sequence[bytes]) -> None:
        """Rank 0: give rank r its frame r (its own entry is skipped)."""
        ...

    def receive(self, check: Callable[[], None] = _nothing) -> bytes:
        """Other ranks: wait for the next frame from rank 0. `check` is called first, and while it waits; what it raises ends that."""
        ...

    def reply(self, frame: bytes) -> None:
        """Other ranks: answer the last frame."""
        ...

    def replies(self) -> list[bytes]:
        """Rank 0: one answer of each other rank, in rank order."""
        ...

    def share(self, frame: bytes) -> bytes:
        """All ranks: rank 0's frame."""
        ...

    def abort(self, code: int) -> None:
        """End the whole job at once with this status: other ranks may wait in a collective."""
        ...


class Solo:
    """A world of one, without MPI."""

    rank, size = 0, 1

    def send(self, frames: Sequence[bytes]) -> None:
        pass

    def receive(self, check: Callable[[], None] = _nothing) -> bytes:
        raise RuntimeError("a world of one has no rank to receive from")

    def reply(self, frame: bytes) -> None:
        raise RuntimeError("a world of one has no rank to reply to")

    def replies(self) -> list[bytes]:
        return []

    def share(self, frame: bytes) -> bytes:
        return frame

    def abort(self, code: int) -> None:
        raise SystemExit(code)


class MpiComm:
    """`Comm` over mpi4py's buffer calls."""

    def __init__(self, idle_poll_s: float) -> None:
        from mpi4py import MPI  # initialises MPI: only a rank of a launched job may import it

        self._mpi = MPI
        self._world = MPI.COMM_WORLD
        self._idle_poll_s = idle_poll_s
        self.rank: int = self._world.Get_rank()
        self.size: int = self._world.Get_size()

    def send(self, frames: Sequence[bytes]) -> None:
        for rank in range(1, self.size):
            self._world.Send([frames[rank], self._mpi.BYTE], dest=rank, tag=COMMAND_TAG)

    def receive(self, check: Callable[[], None] = _nothing) -> bytes:
        return self._take(0, COMMAND_TAG, self._idle_poll_s, check)

    def reply(self, frame: bytes) -> None:
        self._world.Send([frame, self._mpi.BYTE], dest=0, tag=RESULT_TAG)

    def replies(self) -> list[bytes]:
        return [self._take(rank, RESULT_TAG, _RESULT_POLL_S) for rank in range(1, self.size)]

    def share(self, frame: bytes) -> bytes:
        if self.rank == 0:
            self.send([frame] * self.size)
            return frame
        return self.receive()

    def abort(self, code: int) -> None:
        self._world.Abort(code)

    def check_reach(self) -> None:
        """All ranks, once, first of all: raises `ConfigError` where ranks do not reach one another."""
        reach.check_mpi(self._mpi, self._world, reach.LIMIT_S)
        reach.check_tcp(self)

    def _take(self, source: int, tag: int, poll_s: float, check: Callable[[], None] = _nothing) -> bytes:
        status = self._mpi.Status()
        check()
        while not self._world.Iprobe(source=source, tag=tag, status=status):
            time.sleep(poll_s)
            check()
        frame = bytearray(status.Get_count(self._mpi.BYTE))
        self._world.Recv([frame, self._mpi.BYTE], source=source, tag=tag)
        return bytes(frame)


def expected_size(environ: Mapping[str, str]) -> tuple[int, str]:
    """How many ranks the launcher said it starts, and which variable says so. (1, "") outside any launcher."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        if value := environ.get(name):
            return int(value), name
    return 1, ""


def check_size(size: int, environ: Mapping[str, str]) -> None:
    """Refuse a world that is not what was launched: a launcher and an MPI library of different make silently run N worlds of one."""
    expected, name = expected_size(environ)
    if size != expected:
        raise ConfigError(
            f"MPI sees a world of {size} rank(s), but {name} says {expected}",
            "launcher and MPI library must be of one make: start with that library's mpirun, or with `srun --mpi=pmix` if it was built "
            "with PMIx (MPICH: `--mpi=pmi2`); inside an allocation start `python -m trainer` through one of them, never by itself",
        )


def connect(idle_poll_ms: float) -> Comm:
    """This rank's world. Raises `ConfigError` when the launcher started more ranks than MPI sees.

    Ranks that do not reach one another end the job.
    """
    if expected_size(os.environ)[1] == "":
        return Solo()
    comm = MpiComm(idle_poll_ms / 1000)
    check_size(comm.size, os.environ)
    if comm.size > 1:
        try:
            comm.check_reach()
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            comm.abort(error.exit_code)  # the other ranks may wait for this one
    return comm


def join(comm: Comm) -> DeviceMesh:
    """Set torch.distributed up for the same ranks: NCCL where there are GPUs, gloo elsewhere. Returns the data-parallel mesh.

    Rank 0 takes a port that the system gives and tells the others over MPI; 127.0.0.1 when all share a host.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
    from torch.distributed.device_mesh import init_device_mesh

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(local_rank() % torch.cuda.device_count())
    store: Any
    if comm.size == 1:
        store = HashStore()
    else:
        host = _meeting_host(comm)
        master = (
            TCPStore(host, 0, comm.size, is_master=True, wait_for_workers=False) if comm.rank == 0 else None
        )
        port = comm.share(str(master.port).encode() if master is not None else b"").decode()
        store = master if master is not None else TCPStore(host, int(port), comm.size, is_master=False)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=comm.rank, world_size=comm.size, timeout=COLLECTIVE_TIMEOUT
    )
    return init_device_mesh(device, (comm.size,), mesh_dim_names=("data",))


def disconnect() -> None:
    """Undo `join`."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _meeting_host(comm: Comm) -> str:
    """Where rank 0 listens, known to all ranks; also keeps gloo on the loopback interface when all ranks share a host."""
    mine = socket.gethostname().encode()
    if comm.rank == 0:
        together = all(host == mine for host in comm.replies())
        host = comm.share(b"127.0.0.1" if together else mine).decode()
    else:
        comm.reply(mine)
        host = comm.share(b"").decode()
    if host == "127.0.0.1":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return host


def local_rank() -> int:
    """Which of its host's ranks this one is, from 0, as the launcher says it; 0 where it says nothing."""
    # Slurm's comes last: within a job, mpirun's ranks inherit that of the batch script.
    for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"):
        if value := os.environ.get(name):
            return int(value)
    return 0
