"""vLLM's core, which is a process of its own: calls to it and to all of its ranks, and its death.

Owns the core's processes and the engine's first fault: after it no call is answered, and each raises it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from scavenger.errors import EngineError, describe

CALL_S = 300.0  # what one call to all ranks may take


class Core:
    """Of one `AsyncLLM`. `on_fault` is called at the first fault, and at each one after it."""

    def __init__(self, llm: Any, on_fault: Callable[[], None]) -> None:
        self.fault: EngineError | None = None
        self.pids: dict[int, int] = {}  # of its processes, by their pidfds
        self._llm = llm
        self._on_fault = on_fault
        self._faulted = asyncio.Event()

    def watch(self) -> None:
        """Hear of its processes' deaths from now on."""
        loop = asyncio.get_running_loop()
        for process in self._llm.engine_core.resources.engine_manager.processes:
            # Of our own: vLLM closes the process's sentinel when it notices first, and would leave calls unanswered.
            pidfd = os.pidfd_open(process.pid)
            self.pids[pidfd] = process.pid
            loop.add_reader(pidfd, self._died, pidfd)

    async def rpc(self, method: str, *given: object) -> Any:
        """Call a method of `worker.Extension` on all ranks; a list with what each one returned."""
        return await self.call(self._llm.collective_rpc(method, CALL_S, given))

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        """Compute nothing until `resume`. `mode`: "keep" requests, or "abort" them."""
        await self.call(self._llm.pause_generation(mode=mode, clear_cache=clear_cache))

    async def resume(self) -> None:
        await self.call(self._llm.resume_generation())

    async def call(self, call: Coroutine[Any, Any, Any]) -> Any:
        """What it raises means that the engine cannot go on; so does the core's death, after which none is answered."""
        answer, death = asyncio.ensure_future(call), asyncio.ensure_future(self._faulted.wait())
        try:
            await asyncio.wait((answer, death), return_when=asyncio.FIRST_COMPLETED)
            if self.fault is not None:
                raise self.fault
            return await answer
        except EngineError:
            raise
        except Exception as error:
            raise failed(error) from error
        finally:
            answer.cancel()
            death.cancel()

    def fail(self, error: EngineError) -> None:
        if self.fault is None:
            self.fault = error
        self._faulted.set()
        self._on_fault()

    def kill(self) -> None:
        """End its processes at once."""
        loop = asyncio.get_running_loop()
        for pidfd, pid in self.pids.items():
            loop.remove_reader(pidfd)
            os.close(pidfd)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.pids.clear()

    def _died(self, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        pid = self.pids.pop(pidfd)
        cause = f"vLLM's core (process {pid}) ended by itself"
        self.fail(EngineError(cause, "its last words are in the worker's log"))


def failed(error: BaseException) -> EngineError:
    """What vLLM raised, as the worker tells it."""
    if isinstance(error, EngineError):
        return error
    return EngineError(f"vLLM failed: {describe(error)}", quoted=str(error))
