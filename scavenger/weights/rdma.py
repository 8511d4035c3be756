"""Weights by NIXL: a receiver reads the holder's memory itself, by RDMA where the network has it, else by whatever UCX finds.

Owns the process's NIXL agents and what of its memory others may read; the extra `nixl`. Knows no version. A peer with an agent's metadata
can read exactly what was exposed with it, so it is given to those alone who proved to know a version's token. Bytes go in the clear, and
are checked like all others: a read that meets memory which is being written again has a wrong hash.
"""

from __future__ import annotations

import functools
import importlib.util
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import structlog

from scavenger.errors import WeightsError
from scavenger.weights.memory import Buffer

BACKEND = "UCX"
_log = structlog.get_logger(__name__)
_REMEDY = "install it on both sides: pip install 'scavenger[nixl]'"


def installed() -> bool:
    return importlib.util.find_spec("nixl") is not None


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


class Agent:
    """Thread-safe. Raises `WeightsError` where NIXL is not installed or does not start."""

    def __init__(self) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise WeightsError(f"NIXL cannot be imported: {error}", _REMEDY) from error
        self._lock = threading.Lock()
        try:
            self._agent: Any = nixl_agent(
                f"scavenger-{secrets.token_hex(8)}", nixl_agent_config(backends=[BACKEND])
            )
        except Exception as error:
            raise WeightsError(f"NIXL does not start: {type(error).__name__}: {error}", _REMEDY) from error
        self._exposed: weakref.WeakKeyDictionary[Buffer, Any] = weakref.WeakKeyDictionary()
        self._over: deque[Any] = deque()  # registrations that are no longer needed
        self._stuck: list[memoryview] = []  # what NIXL would not let go of, and may still write

    def expose(self, buffer: Buffer, ranges: Iterable[tuple[int, int]]) -> tuple[bytes, int]:
        """Let these bytes of a buffer be read from elsewhere, until it goes. Returns the metadata for a reader, and where byte 0 lies.

        Raises `WeightsError` where NIXL will not.
        """
        with self._lock:
            self._deregister()  # first: new memory may lie where the old did
            base = address_of(buffer.view)
            known = self._exposed.get(buffer)
            pieces = [(base + start, stop - start, 0, "") for start, stop in ranges]
            try:
                if known is None:
                    known = self._exposed[buffer] = self._agent.register_memory(pieces, "DRAM")
                    weakref.finalize(buffer, self._forget, known)
                return self._agent.get_partial_agent_metadata(known, True, [BACKEND]), base
            except Exception as error:
                raise WeightsError(
                    f"NIXL cannot lend this memory: {type(error).__name__}: {error}", _REMEDY
                ) from error

    def _forget(self, registered: Any) -> None:
        """Waits for nothing: a collector calls it wherever it likes, also in a thread that has the lock. Then the next call deregisters."""
        self._over.append(registered)
        if self._lock.acquire(blocking=False):
            try:
                self._deregister()
            finally:
                self._lock.release()

    def _deregister(self) -> None:  # under the lock
        while self._over:
            try:
                self._agent.deregister_memory(self._over.popleft())
            except Exception as error:  # noqa: BLE001 - NIXL's own have no class in common; what failed before must stay the reason
                _log.warning("weights.nixl_not_deregistered", reason=f"{type(error).__name__}: {error}")

    def meet(self, metadata: bytes) -> str:
        """Load a holder's agent metadata; returns that agent's name. Raises `OSError`."""
        with self._lock:
            try:
                return str(self._agent.add_remote_agent(metadata).decode())
            except Exception as error:
                raise ConnectionError(f"NIXL cannot use the holder's metadata: {error}") from error

    def own(self, view: memoryview) -> Any:
        """Register memory of this process as a target of reads. Returns what `disown` takes. Raises `OSError`."""
        with self._lock:
            self._deregister()
            try:
                return self._agent.register_memory([(address_of(view), len(view), 0, "")], "DRAM")
            except Exception as error:
                raise ConnectionError(
                    f"NIXL cannot use this process's memory: {type(error).__name__}: {error}"
                ) from error

    def disown(self, registered: Any) -> None:
        """Deregister what `own` returned. An error of NIXL is logged."""
        self._over.append(registered)
        with self._lock:
            self._deregister()

    def read(
        self, peer: str, remote: int, into: memoryview, timeout_s: float, ended: Callable[[], bool]
    ) -> None:
        """Fill `into` from the peer's memory at `remote`. Raises `OSError` when it fails, takes longer, or `ended` says so."""
        handle, until, pause_s, released = None, time.monotonic() + timeout_s, 1e-5, True
        try:
            with self._lock:
                here = self._agent.get_xfer_descs([(address_of(into), len(into), 0)], "DRAM")
                there = self._agent.get_xfer_descs([(remote, len(into), 0)], "DRAM")
                handle = self._agent.initialize_xfer("READ", here, there, peer)
                state = self._agent.transfer(handle)
            while state == "PROC":
                if ended():
                    raise ConnectionResetError("closed")
                if time.monotonic() >= until:
                    raise TimeoutError(f"no chunk for {timeout_s:g} s")
                time.sleep(pause_s)  # between two polls: NIXL sends no event when it is done
                pause_s = min(pause_s * 2, 1e-3)
                with self._lock:
                    state = self._agent.check_xfer_state(handle)
        except OSError:
            raise
        except Exception as error:
            raise ConnectionError(f"NIXL: {type(error).__name__}: {error}") from error
        finally:
            if handle is not None:
                released = self._release(handle, into)
        if state != "DONE" or not released:
            raise ConnectionError(
                f"NIXL: the transfer ended as {state}{'' if released else ' and cannot be released'}"
            )

    def _release(self, handle: Any, into: memoryview) -> bool:
        """End a transfer. One that cannot be ended may write yet, so its memory stays for good: it is never reused."""
        try:
            with self._lock:
                self._agent.release_xfer_handle(handle)
        except Exception as error:  # noqa: BLE001 - as above
            self._stuck.append(into)
            _log.warning("weights.nixl_not_released", reason=f"{type(error).__name__}: {error}")
            return False
        return True


@functools.cache
def shared(role: str) -> Agent:
    """This process's agent for "serve" or "read", made when it is first wanted: one cannot read from itself. Raises as `Agent` does."""
    return Agent()
