"""The memory of each GPU that a training job's ranks and its reserved engines share: who took how much of it, and for what.

    take, give, hold  -->  account  -->  table        the same calls on every device

On CUDA the device itself keeps the account: torch's allocator knows what this process has reserved, `mem_get_info` what all processes
have, and taking too much fails by itself. Where there is no GPU, a file stands in for it, which SCAVENGER_GPU_ACCOUNT names: it has a
capacity, and every process that opens it writes down what it would hold of a GPU. Taking more than there is raises `OverCapacity` with the
tables of all parties, as an out-of-memory error would end the run on the day. Without that variable nothing is counted on a CPU.

Owns the file, its rows and their arithmetic. Imports nothing of ours, so that trainer and engines may share it. A row is a process's
(process id and start time) for one purpose on one GPU; rows of processes that are gone count no more, as their memory is free.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

#: Names the file. Those who share GPUs get it from the job's environment; engines of harvested jobs, which lie elsewhere, do not.
VARIABLE = "SCAVENGER_GPU_ACCOUNT"
#: On CUDA less than this, beyond what was held before any other came, is no other's: NCCL's buffers, a context that has grown.
_LEAST_OTHER = 1 << 30
_MAGIC = b"scvgpu01"
_HEADER = struct.Struct("<8sQ")  # and the capacity of each GPU
_ROW = struct.Struct("<qQq32s24sQQ")  # process id, its start, GPU, who, purpose, bytes, most bytes ever
_ROWS = 1024
_NBYTES = _HEADER.size + _ROWS * _ROW.size


class OverCapacity(MemoryError):
    """More was taken of a GPU than it has. The message holds the tables of all who share it."""


@dataclass(frozen=True, slots=True)
class Row:
    """`nbytes` of GPU `gpu`, held by process `pid` for one `purpose`; `most`: what it held for that at most."""

    gpu: int
    who: str
    pid: int
    purpose: str
    nbytes: int
    most: int


class Account(Protocol):
    """One process's view of the GPU that it computes on."""

    @property
    def counts(self) -> bool:
        """Whether calls of `take`, `give` and `hold` are needed: on CUDA the allocator counts."""
        ...

    @property
    def capacity(self) -> int:
        """Bytes of the GPU; 0 = nothing is known of any."""
        ...

    def take(self, purpose: str, nbytes: int) -> None:
        """Say that this process holds so many bytes more. Raises `OverCapacity`, and then it does not."""
        ...

    def give(self, purpose: str, nbytes: int) -> None: ...

    def hold(self, purpose: str, nbytes: int) -> None:
        """Say how much this process holds for a purpose in all. Raises `OverCapacity`, and then that is what it was."""
        ...

    def alone(self) -> None:
        """Say that no other process has come to this GPU yet: what it holds beyond `own` is no other's. The first call alone counts."""
        ...

    def own(self) -> int:
        """Bytes that this process holds."""
        ...

    def of_other_processes(self) -> int:
        """Bytes of this GPU that other processes hold now or, where known, their peak; 0 where none are seen."""
        ...

    def table(self) -> tuple[Row, ...]:
        """Who holds what of all GPUs that the account knows of."""
        ...


class Uncounted:
    """There is no GPU, and no file that stands for one."""

    counts = False
    capacity = 0

    def take(self, purpose: str, nbytes: int) -> None:
        pass

    def give(self, purpose: str, nbytes: int) -> None:
        pass

    def hold(self, purpose: str, nbytes: int) -> None:
        pass

    def alone(self) -> None:
        pass

    def own(self) -> int:
        return 0

    def of_other_processes(self) -> int:
        return 0

    def table(self) -> tuple[Row, ...]:
        return ()


class Cuda(Uncounted):
    """The GPU that torch has chosen. It does not say who holds what torch's allocator does not: contexts, NCCL's buffers, others' all.

    So others' is what came since this process was `alone`.
    """

    def __init__(self, gpu: int, who: str) -> None:
        self._gpu, self._who = gpu, who
        self._before: int | None = None  # held outside of torch's allocator, when no other process was there

    @property
    def capacity(self) -> int:  # type: ignore[override]  # read once more each time: MIG slices may differ
        return self._memory()[1]

    def alone(self) -> None:
        if self._before is None:
            self._before = self._outside()

    def own(self) -> int:
        import torch

        return torch.cuda.memory_reserved()

    def of_other_processes(self) -> int:
        found = self._outside() - (self._before or 0)
        return found if found >= _LEAST_OTHER else 0

    def table(self) -> tuple[Row, ...]:
        import torch

        own, others = self.own(), self._outside()
        most = torch.cuda.max_memory_reserved()
        return (
            Row(self._gpu, self._who, os.getpid(), "reserved by torch", own, most),
            Row(self._gpu, "others", 0, "and CUDA's contexts", others, others),
        )

    def _outside(self) -> int:
        """What is held of the GPU and not by torch's allocator here."""
        free, total = self._memory()
        return max(0, total - free - self.own())

    def _memory(self) -> tuple[int, int]:
        import torch

        free, total = torch.cuda.mem_get_info()
        return int(free), int(total)


class Shared:
    """A file that stands for GPUs of `capacity` bytes each (`create`), and this process's rows in it."""

    counts = True

    def __init__(self, path: Path, gpu: int, who: str) -> None:
        self._path, self._gpu, self._who = path, gpu, who
        self._pid, self._start = os.getpid(), started_at(os.getpid()) or 0
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        self._map = mmap.mmap(self._fd, _NBYTES)
        magic, self.capacity = _HEADER.unpack_from(self._map)
        if magic != _MAGIC:
            raise ValueError(f"{path} is no account of GPU memory")

    def take(self, purpose: str, nbytes: int) -> None:
        self._change(purpose, nbytes, add=True)

    def give(self, purpose: str, nbytes: int) -> None:
        self._change(purpose, -nbytes, add=True)

    def hold(self, purpose: str, nbytes: int) -> None:
        self._change(purpose, nbytes, add=False)

    def alone(self) -> None:
        pass  # each has its rows

    def own(self) -> int:
        with self._locked():
            return sum(row.nbytes for _, row in self._rows() if self._is_mine(row))

    def of_other_processes(self) -> int:
        with self._locked():
            self._drop_dead()
            return sum(row.most for _, row in self._rows() if row.gpu == self._gpu and row.pid != self._pid)

    def table(self) -> tuple[Row, ...]:
        with self._locked():
            self._drop_dead()
            return tuple(row for _, row in self._rows())

    def close(self) -> None:
        """Give all back."""
        with self._locked():
            for at, row in reversed(list(self._rows())):
                if self._is_mine(row):
                    self._clear(at)

    # ---------------------------------------------------------------- the file

    def _change(self, purpose: str, nbytes: int, *, add: bool) -> None:
        with self._locked():
            found = next(
                ((at, row) for at, row in self._rows() if self._is_mine(row) and row.purpose == purpose), None
            )
            before, most = (found[1].nbytes, found[1].most) if found is not None else (0, 0)
            after = before + nbytes if add else nbytes
            if after < 0:
                raise ValueError(f"{self._who} gives back {-nbytes} bytes of {purpose}, and holds {before}")
            if after > before:
                self._require(purpose, after - before)
            at = found[0] if found is not None else self._free_row()
            self._write(at, purpose, after, max(after, most))

    def _require(self, purpose: str, nbytes: int) -> None:
        """Raises `OverCapacity` where the GPU has not so many bytes left. That is kept beside the file, whatever becomes of the error."""
        if self._held() + nbytes <= self.capacity:
            return
        self._drop_dead()  # looked at only now: it takes a look at each process
        held = self._held()
        if held + nbytes <= self.capacity:
            return
        why = (
            f"GPU {self._gpu} has {self.capacity:,} bytes, of which {held:,} are held: {self._who} (process {self._pid}) wants {nbytes:,} "
            f"more for its {purpose}\n" + described([row for _, row in self._rows() if row.gpu == self._gpu])
        )
        with refusals(self._path).open("a") as log:
            log.write(why + "\n")
        raise OverCapacity(why)

    def _held(self) -> int:
        return sum(row.nbytes for _, row in self._rows() if row.gpu == self._gpu)

    def _is_mine(self, row: Row) -> bool:
        return (row.pid, row.gpu, row.who) == (self._pid, self._gpu, self._who)

    def _rows(self) -> Iterator[tuple[int, Row]]:
        for at in range(_HEADER.size, _NBYTES, _ROW.size):
            pid, _, gpu, who, purpose, nbytes, most = _ROW.unpack_from(self._map, at)
            if pid == 0:
                return  # rows are dense
            yield at, Row(gpu, _text(who), pid, _text(purpose), nbytes, most)

    def _free_row(self) -> int:
        last = _HEADER.size - _ROW.size
        for at, _ in self._rows():
            last = at
        if last + 2 * _ROW.size > _NBYTES:
            raise ValueError(f"{self._path} has no row left")
        return last + _ROW.size

    def _write(self, at: int, purpose: str, nbytes: int, most: int) -> None:
        who, what = self._who.encode()[:32], purpose.encode()[:24]
        _ROW.pack_into(self._map, at, self._pid, self._start, self._gpu, who, what, nbytes, most)

    def _clear(self, at: int) -> None:
        """The last row takes its place."""
        last = at
        for here, _ in self._rows():
            last = max(last, here)
        self._map[at : at + _ROW.size] = self._map[last : last + _ROW.size]
        self._map[last : last + _ROW.size] = bytes(_ROW.size)

    def _drop_dead(self) -> None:
        for at, row in reversed(list(self._rows())):
            start = _ROW.unpack_from(self._map, at)[1]
            if started_at(row.pid) != start:
                self._clear(at)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode()


def started_at(pid: int) -> int | None:
    """When a process started, in the kernel's ticks; None when it is gone: a zombie has given its memory back."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def described(rows: list[Row]) -> str:
    """One line a process."""
    lines = []
    for who, pid in dict.fromkeys((row.who, row.pid) for row in rows):
        mine = [row for row in rows if (row.who, row.pid) == (who, pid)]
        parts = ", ".join(f"{row.purpose} {row.nbytes:,}" for row in mine if row.nbytes) or "nothing"
        lines.append(f"  {who} (process {pid}): {sum(row.nbytes for row in mine):,} = {parts}")
    return "\n".join(lines)


def create(path: Path, capacity: int) -> Path:
    """Make a file that stands for GPUs of so many bytes each. A test that runs a job without GPUs names it in `VARIABLE`."""
    path.write_bytes(_HEADER.pack(_MAGIC, capacity).ljust(_NBYTES, b"\0"))
    return path


def refusals(path: Path) -> Path:
    """Where it is written who wanted more than there was."""
    return path.with_suffix(".refused")


def opened(environ: Mapping[str, str], gpu: int, who: str) -> Account:
    """The account of the GPU that this process computes on: its number among those of the job on this node."""
    if path := environ.get(VARIABLE):
        return Shared(Path(path), gpu, who)
    import torch

    return Cuda(gpu, who) if torch.cuda.is_available() else Uncounted()


def of_engine(environ: Mapping[str, str]) -> tuple[Account, ...]:
    """Of a reserved engine, one for each of its GPUs: its launcher says which engine it is, and on how many it computes."""
    slot = environ.get("SCAVENGER_SLOT", "0")
    words = environ.get("SCAVENGER_GPUS", "1")
    each = int(words) if words.isdigit() and int(words) else 1
    first = int(slot) * each if slot.isdigit() else 0
    return tuple(opened(environ, first + number, f"engine {slot}") for number in range(each))
