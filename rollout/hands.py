"""A worker process that changes hands: one run's worker after another around one engine, which forgets each run before the next begins.

    RolloutWorker of run A --EndWorker(hands_to)--> the key file says run B --Engine.forget--> RolloutWorker of run B

Nothing of a worker outlives it but its engine: session, weights, KV blocks, connection and key are made anew. Owns the order: no key of
the next run is used before the engine has forgotten the last one. Knows no message.

Boundary: the process between two runs; IO.
"""

from __future__ import annotations

import asyncio
import gc
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import structlog

from rollout.worker import KeptEngine, Options, RolloutWorker
from scavenger.errors import AuthError, EngineError, ScavengerError, describe
from scavenger.protocol.keys import KeyPair, read_keypair
from scavenger.protocol.worker.events import EXIT_DRAINED, EXIT_ENGINE_FAILED, EndWorker

#: How long a key file may still be the old one after the daemon wrote the new: shared file systems show it late.
KEY_S = 30.0
ASK_AGAIN_S = 0.2
_log = structlog.get_logger(__name__)
#: Makes the worker of one run: `RolloutWorker`, but in tests.
NewWorker = Callable[[Options, KeptEngine | None], RolloutWorker]


def _new_worker(options: Options, kept: KeptEngine | None) -> RolloutWorker:
    return RolloutWorker(options, kept=kept)


async def work(
    options: Options,
    key: Path,
    *,
    between: Callable[[], None] = lambda: None,
    new_worker: NewWorker = _new_worker,
) -> EndWorker:
    """Work for one run after the other; returns how the last worker ended. `key`: the key file. `between`: called when a worker has ended
    and the next has not begun: nobody listens to signals then."""
    kept: KeptEngine | None = None
    while True:
        worker = new_worker(options, kept)
        end = await worker.run()
        between()
        kept = worker.kept
        if not end.hands_to or kept is None:
            return end  # at once: its GPUs are wanted
        del worker
        gc.collect()  # tasks and callbacks refer to each other: what it held would stay for a while
        began = time.monotonic()
        try:
            pair = await _next_key(key, end.hands_to)
            await kept.engine.forget(pair.run)
        except EngineError as error:
            await kept.engine.close()
            return EndWorker(EXIT_ENGINE_FAILED, describe(error))
        except ScavengerError as error:
            await kept.engine.close()
            return EndWorker(EXIT_DRAINED, f"it could not change hands: {describe(error)}")
        _log.info(
            "worker.changed_hands",
            run_before=options.identity.run,
            run=pair.run,
            forget_s=round(time.monotonic() - began, 3),
        )
        options = _options_for(options, pair, began)


def _options_for(options: Options, pair: KeyPair, began: float) -> Options:
    identity = replace(options.identity, run=pair.run, session=secrets.token_hex(16))
    return replace(options, keypair=pair, identity=identity, started_at=began)


async def _next_key(path: Path, public_key: str) -> KeyPair:
    """The pair with this public key. Raises `AuthError` where the file does not have it in time."""
    by = time.monotonic() + KEY_S
    while (pair := read_keypair(path)).public != public_key:
        if time.monotonic() >= by:
            raise AuthError(f"{path} does not have the key of the run to work for after {KEY_S:g} s")
        await asyncio.sleep(ASK_AGAIN_S)
    return pair
