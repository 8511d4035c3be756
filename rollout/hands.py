"""A worker process that changes hands: one run's worker after another around one engine, which forgets each run before the next begins.

    RolloutWorker of run A --EndWorker(hands_to)--> the key file says run B --Engine.forget--> RolloutWorker of run B

Nothing of a worker outlives it but its engine: session, weights, KV blocks, connection and key are made anew. Owns the order: no key of
the next run is used before the engine has forgotten the last one. Knows no message.

Boundary: the process between two runs; IO.
"""

from __future__ import annotations

import gc
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import structlog

from rollout.key_file import read_when_there
from rollout.worker import KeptEngine, Options, RolloutWorker
from scavenger.errors import EngineError, ScavengerError, describe
from scavenger.protocol.keys import KeyPair
from scavenger.protocol.worker.events import EXIT_DRAINED, EXIT_ENGINE_FAILED, EndWorker

#: How long a key file may still be the old one after the daemon wrote the new: shared file systems show it late.
KEY_S = 30.0
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
        kept = None  # nobody else holds an engine that the worker may replace
        end = await worker.run()
        between()
        kept = worker.kept
        if not end.hands_to or kept is None:
            return end  # at once: its GPUs are wanted
        del worker
        gc.collect()  # tasks and callbacks refer to each other: what it held would stay for a while
        began = time.monotonic()
        try:
            pair = await read_when_there(key, end.hands_to, KEY_S)
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
