"""Key pairs of harvested jobs' workers: minted for one intent, let in, and shut out when its job is closed.

    minted -> written (before `sbatch`: the job reads the file) -> allowed -> dropped, with its file and an empty log

A daemon that starts lets those in again whose files its predecessor left, and removes the files of intents that the ledger has closed.

Owns who of the workers is let in, and the files `workers/INTENT.key`. Knows nothing of Slurm, and not why a job is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import structlog

from scavenger.harvest.execute.job_script import drop_empty_log
from scavenger.protocol import keys
from scavenger.router.core.events import Identity

log = structlog.get_logger()


class WorkerKeys:
    """`register` and `unregister` tell the daemon's key ring."""

    def __init__(
        self, state_dir: Path, register: Callable[[str, Identity], None], unregister: Callable[[str], None]
    ) -> None:
        self._state_dir, self._register, self._unregister = state_dir, register, unregister
        self._public: dict[str, str] = {}  # intent -> public key that we let in

    def write(self, pair: keys.KeyPair) -> None:
        """Put the pair where its job will read it. Blocks; raises `OSError`."""
        keys.write_keypair(keys.worker_key_path(self._state_dir, pair.intent), pair)

    def allow(self, pair: keys.KeyPair) -> None:
        """Let the pair's holder in, as the worker of its run and intent."""
        self._public[pair.intent] = pair.public
        self._register(pair.public, Identity("worker", pair.public, pair.run, pair.intent))

    def allow_again(self, intent_id: str) -> None:
        """Let in whom a previous daemon made a key for. Raises `AuthError` where its file is missing or cannot be used."""
        self.allow(keys.read_keypair(keys.worker_key_path(self._state_dir, intent_id)))

    def drop(self, intent_id: str) -> None:
        """A closed job's key opens nothing any more."""
        public = self._public.pop(intent_id, "")
        if public:
            self._unregister(public)
        self._drop_files(intent_id)

    def drop_stale(self, opened: Collection[str]) -> None:
        """Remove the files of every intent that is not in `opened`: a daemon that died did not get to it."""
        for path in sorted((self._state_dir / "workers").glob("scv-*.key")):
            if path.stem not in opened:
                self._drop_files(path.stem)

    def _drop_files(self, intent_id: str) -> None:
        try:
            keys.worker_key_path(self._state_dir, intent_id).unlink(missing_ok=True)
            drop_empty_log(self._state_dir, intent_id)
        except OSError as error:  # its key opens nothing; the next daemon's start tries again
            log.warning("a closed job's files stay", intent=intent_id, reason=str(error))
