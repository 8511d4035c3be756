"""Background tasks that cannot fail in silence: nobody awaits them, so whatever ends one is told as it ends.

Owns the log line of an unforeseen error. Must not know what a task does, or what its error means: the caller's handler does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import structlog

from scavenger.errors import ScavengerError, describe

_log = structlog.get_logger(__name__)


def spawn(work: Coroutine[object, object, None], on_error: Callable[[str], None]) -> asyncio.Task[None]:
    """Run beside the others. `on_error` gets the reason if it raises, whatever it raises; not if it is cancelled.

    The reason goes to the ledger, so it is free of what an engine may have quoted; that is in the log.
    """

    def ended(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if (
            not isinstance(error, ScavengerError) or error.quoted
        ):  # a bug, ours or a library's: it keeps its traceback
            _log.error("task.failed", exc_info=error)
        on_error(describe(error))

    task = asyncio.create_task(work)
    task.add_done_callback(ended)
    return task
