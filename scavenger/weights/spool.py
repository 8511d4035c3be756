"""Versions on disk. They can be read while no process holds them (the trainer restarts), and `scavenger weights export` reads them.

Owns the folder `weights.spool_dir`: one folder a version, complete or absent. Knows no socket and no tensor. The reader verifies every
byte; the folder's permissions alone say who may read it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from scavenger.errors import WeightsError
from scavenger.protocol import messages
from scavenger.weights import manifest as manifests
from scavenger.weights.manifest import Manifest
from scavenger.weights.memory import Buffer

MANIFEST, BLOB = "manifest.msgpack", "weights.bin"
SCHEME = "file://"
_log = structlog.get_logger(__name__)


OTHER_RANKS_S = 120.0  # how long rank 0 waits for what other ranks write
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class SpoolShare:
    """What one of several ranks writes of a version. `mark` is the same on all of them and another for each version that is written."""

    mark: str
    rank: int
    ranks: int
    ranges: Sequence[tuple[int, int]]


def alone(manifest: Manifest) -> SpoolShare:
    """The share of a process that writes the whole version alone."""
    return SpoolShare(secrets.token_hex(8), 0, 1, [(0, manifest.total_nbytes)])


class Spool:
    """The newest `keep` versions of one run below `folder`, which all ranks see. Each writes its share into one file; rank 0 ends it."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self._folder = folder
        self._keep = keep
        self._writing: threading.Thread | None = None

    def ready(self) -> bool:
        """Whether no write is under way. A version that comes during a write is not spooled."""
        return self._writing is None or not self._writing.is_alive()

    def put(self, manifest: Manifest, buffer: Buffer, share: SpoolShare) -> messages.WeightSource:
        """Write this share of the version beside what the caller goes on with.

        Returns where it will be: who looks before finds nothing, and looks again. What cannot be written is told in the log.
        """
        if not self.ready():  # rank 0 was, and gave up waiting for this one
            _log.error(
                "weights.not_spooled",
                version=manifest.version,
                rank=share.rank,
                reason="an earlier version is still being written",
            )
            return self._address(manifest.version)
        self._writing = threading.Thread(
            target=self._write, args=(manifest, buffer, share), name="weights-spool"
        )
        self._writing.start()
        return self._address(manifest.version)

    def _address(self, version: int) -> messages.WeightSource:
        return messages.WeightSource(
            f"{SCHEME}{(self._folder / f'version-{version}' / BLOB).resolve()}", "", b""
        )

    def _write(self, manifest: Manifest, buffer: Buffer, share: SpoolShare) -> None:
        try:
            self.write(manifest, buffer.view, share)
        except WeightsError as error:
            _log.error("weights.not_spooled", version=manifest.version, reason=str(error))

    def wait(self) -> None:
        """Wait for the write that is under way."""
        if self._writing is not None:
            self._writing.join()

    def write(
        self, manifest: Manifest, blob: memoryview, share: SpoolShare | None = None
    ) -> messages.WeightSource:
        """Write the version, then delete older ones. Returns where readers that see this filesystem find it. Raises `WeightsError`."""
        share = share or alone(manifest)
        part = self._folder / f".part-{manifest.version}-{share.mark}"
        try:
            part.mkdir(parents=True, exist_ok=True)
            self._write_share(part / BLOB, manifest, blob, share)
            if share.rank == 0:
                self._end(part, manifest, share)
        except OSError as error:
            cause = f"version {manifest.version} cannot be written to {self._folder}: {error}"
            if share.rank:
                with contextlib.suppress(OSError):  # then rank 0 finds out when its time is over
                    (part / f"failed-{share.rank}").write_text(str(error))
            else:
                shutil.rmtree(part, ignore_errors=True)
            raise WeightsError(cause, "see weights.spool_dir") from error
        return self._address(manifest.version)

    def _write_share(self, path: Path, manifest: Manifest, blob: memoryview, share: SpoolShare) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.ftruncate(fd, manifest.total_nbytes)
            for start, stop in share.ranges:
                while start < stop:
                    start += os.pwrite(fd, blob[start:stop], start)
            os.fsync(fd)
        finally:
            os.close(fd)
        if share.rank:
            (path.parent / f"rank-{share.rank}").touch()

    def _end(self, part: Path, manifest: Manifest, share: SpoolShare) -> None:
        """Rank 0: the version is complete when all ranks have written. Raises `OSError`."""
        for left in self._folder.glob(".part-*"):  # by a trainer that was killed
            if left != part:
                shutil.rmtree(left, ignore_errors=True)
        marks = [part / f"rank-{rank}" for rank in range(1, share.ranks)]
        deadline = time.monotonic() + OTHER_RANKS_S
        while not all(mark.exists() for mark in marks):
            for failed in part.glob("failed-*"):
                raise OSError(f"{failed.name.replace('failed-', 'rank ')}: {failed.read_text()}")
            if time.monotonic() >= deadline:
                missing = ", ".join(mark.name for mark in marks if not mark.exists())
                raise TimeoutError(f"no share of {missing} within {OTHER_RANKS_S:g} s")
            time.sleep(
                _POLL_S
            )  # between two looks at the folder: nothing else tells what other hosts wrote there
        for mark in marks:
            mark.unlink()
        with (part / MANIFEST).open("wb") as file:
            file.write(manifests.encode(manifest))
            file.flush()
            os.fsync(file.fileno())
        final = self._folder / f"version-{manifest.version}"
        if final.exists():  # an older attempt's, which never told the ledger of it
            self._remove(final)
        part.rename(final)
        self._clean()

    def _clean(self) -> None:
        """Delete surplus versions. The version just written is complete, so a failure here is only logged; the next write tries again."""
        try:
            for old in self._surplus():
                self._remove(self._folder / f"version-{old}")
        except OSError as error:
            _log.warning("weights.not_cleaned", folder=str(self._folder), reason=str(error))

    def _remove(self, folder: Path) -> None:
        """Rename first, then delete: a kill in between leaves no version without its manifest. Raises `OSError`."""
        gone = self._folder / f".part-old-{secrets.token_hex(8)}"
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
        if gone.exists():  # a file that another host still has open, on NFS: the next version tries again
            _log.warning("weights.not_removed", was=folder.name, folder=str(gone))

    def _surplus(self) -> list[int]:
        """All but the newest versions and what their adapters are merged with; and what has no manifest, whose deletion was cut short."""
        here, broken = {}, []
        for version in self._numbered():
            path = self._folder / f"version-{version}" / MANIFEST
            try:
                here[version] = manifests.named(path.read_bytes())
            except (FileNotFoundError, NotADirectoryError):
                broken.append(version)
            except (
                OSError
            ) as error:  # the disk's trouble, perhaps for a moment: it is left alone, and stands for nothing
                _log.warning("weights.unreadable", path=str(path), reason=str(error))
        newest = [*here][-self._keep :]
        bases = {here[version][1] for version in newest} - {b""}
        needed = {
            root: version for version, (root, _) in here.items() if root in bases
        }  # of equal ones the newest
        return broken + [
            version for version in here if version not in newest and version not in needed.values()
        ]

    def versions(self) -> list[int]:
        """The complete versions, oldest first."""
        return [
            version
            for version in self._numbered()
            if (self._folder / f"version-{version}" / MANIFEST).exists()
        ]

    def _numbered(self) -> list[int]:
        found = []
        for path in self._folder.glob("version-*"):
            with contextlib.suppress(ValueError):
                found.append(int(path.name.removeprefix("version-")))
        return sorted(found)


def read(folder: Path) -> tuple[Manifest, memoryview]:
    """A spooled version: its manifest, checked, and its bytes, not checked yet. Raises `WeightsError`."""
    try:
        manifest = manifests.decode((folder / MANIFEST).read_bytes())
        with (folder / BLOB).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            blob = (
                memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if size else memoryview(b"")
            )
    except OSError as error:
        raise WeightsError(
            f"{folder} is no spooled version: {error}", "give <weights.spool_dir>/<run.name>/version-N"
        ) from error
    if size != manifest.total_nbytes:
        raise WeightsError(
            f"{folder / BLOB} has {size} bytes, its manifest names {manifest.total_nbytes}",
            "use another version",
        )
    return manifest, blob
