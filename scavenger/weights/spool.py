"""Versions on disk: what can be read when no process holds it (a trainer that restarts), and what `scavenger weights export` reads.

Owns the folder `weights.spool_dir`: one folder a version, complete or absent. Knows no socket and no tensor. The reader verifies every
byte; the folder's permissions alone say who may read it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import threading
from pathlib import Path

import structlog

from scavenger import wire
from scavenger.errors import WeightsError
from scavenger.weights import manifest as manifests
from scavenger.weights.manifest import Manifest
from scavenger.weights.memory import Buffer

MANIFEST, BLOB = "manifest.msgpack", "weights.bin"
SCHEME = "file://"
_log = structlog.get_logger(__name__)


class Spool:
    """The newest `keep` versions of one run below `folder`."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self._folder = folder
        self._keep = keep
        self._writing: threading.Thread | None = None

    def put(self, manifest: Manifest, buffer: Buffer) -> wire.WeightSource:
        """Write the version beside what the caller goes on with; one that comes while another is being written is left out.

        Returns where it will be: who looks before finds nothing, and looks again. What cannot be written is told in the log.
        """
        if self._writing is None or not self._writing.is_alive():
            self._writing = threading.Thread(target=self._write, args=(manifest, buffer), name="weights-spool")
            self._writing.start()
        return self._address(manifest.version)

    def _address(self, version: int) -> wire.WeightSource:
        return wire.WeightSource(f"{SCHEME}{(self._folder / f'version-{version}' / BLOB).resolve()}", "", b"")

    def _write(self, manifest: Manifest, buffer: Buffer) -> None:
        try:
            self.write(manifest, buffer.view)
        except WeightsError as error:
            _log.error("weights.not_spooled", version=manifest.version, reason=str(error))

    def wait(self) -> None:
        """Until what is being written is written."""
        if self._writing is not None:
            self._writing.join()

    def write(self, manifest: Manifest, blob: memoryview) -> wire.WeightSource:
        """Write the version, then delete older ones. Returns where readers that see this filesystem find it. Raises `WeightsError`."""
        final = self._folder / f"version-{manifest.version}"
        part = self._folder / f".part-{manifest.version}-{os.getpid()}"
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            for name, data in ((BLOB, blob), (MANIFEST, manifests.encode(manifest))):
                with (part / name).open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            if final.exists():  # an older attempt's, which never told the ledger of it
                shutil.rmtree(final)
            part.rename(final)
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            cause = f"version {manifest.version} cannot be written to {self._folder}: {error}"
            raise WeightsError(cause, "see weights.spool_dir") from error
        for old in self.versions()[: -self._keep]:
            shutil.rmtree(self._folder / f"version-{old}", ignore_errors=True)
        return self._address(manifest.version)

    def versions(self) -> list[int]:
        """What is complete, oldest first."""
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
            blob = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if size else memoryview(b"")
    except OSError as error:
        raise WeightsError(f"{folder} is no spooled version: {error}", "give <weights.spool_dir>/version-N") from error
    if size != manifest.total_nbytes:
        raise WeightsError(f"{folder / BLOB} has {size} bytes, its manifest names {manifest.total_nbytes}", "use another version")
    return manifest, blob
