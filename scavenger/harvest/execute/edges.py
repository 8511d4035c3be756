"""What the harvester reaches beside Slurm: the ledger, the router, its workers' key files, time and chance.

`WorkerKeys` owns the files `workers/INTENT.key` and which worker is let in: minted -> written (before `sbatch`: the job reads the file) ->
allowed -> dropped when the job is closed, with its file and an empty log. A daemon that starts lets those in again whose files its
predecessor left, and removes the files of intents that the ledger has closed.

Must not know what is decided, nor why.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from scavenger.cluster.proxy.client import EnginesUser
from scavenger.errors import AuthError
from scavenger.harvest.decide.actions import Submit
from scavenger.harvest.execute.job_script import drop_empty_log
from scavenger.ledger import records as rec
from scavenger.policy.fleet_size import Demand, EnvironmentDemand
from scavenger.protocol import keys
from scavenger.protocol.messages import LENT_INTENT
from scavenger.router.core.events import CondemnedEngine, PeerIdentity, RouterEvent, WorkerLife

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LedgerWrites:
    """How the harvester writes to the ledger. `commit` returns when its records are durable, `write` when they are queued.

    Both raise `Fenced` when another daemon has taken the ledger.
    """

    commit: Callable[[Sequence[rec.Record]], Awaitable[None]]
    write: Callable[[Sequence[rec.Record]], object]


@dataclass(frozen=True, slots=True)
class RouterLink:
    """What the harvester asks of the router, and what it reports to it and to its key ring.

    `leases`: for each connected worker, by intent: how many samples it generates, and since when it has none (Unix s). `lives`: the
    engines of our jobs that have registered. `condemned`: engines that were set aside, the newest last. `environments`: environment
    workers in jobs that runs let join. `register` lets in the worker with this public key, `unregister` no longer.
    """

    post: Callable[[RouterEvent], None]
    demand: Callable[[], Sequence[Demand]]
    leases: Callable[[], Mapping[str, tuple[int, float]]]
    register: Callable[[str, PeerIdentity], None]
    unregister: Callable[[str], None]
    lives: Callable[[], Sequence[WorkerLife]] = tuple
    condemned: Callable[[], Sequence[CondemnedEngine]] = tuple
    environments: Callable[[], Sequence[EnvironmentDemand]] = tuple


@dataclass(frozen=True, slots=True)
class FurtherClusterJobs:
    """What is different where the jobs are on a further cluster (`harvest.further`). `name`: the cluster's; `user`: its jobs'. `engines`:
    what lies in their folder there. `submit`: a job for an engine that was decided, by the ledger's uid and the intent; blocks."""

    name: str
    user: str
    engines: EnginesUser
    submit: Callable[[str, str, Submit], int]


@dataclass(frozen=True, slots=True)
class Sources:
    """Time and chance. `clock`: Unix s; `monotonic`: s; `draw`: uniform in [0, 1); `token`: 16 hex digits that name a new intent."""

    clock: Callable[[], float]
    monotonic: Callable[[], float] = time.monotonic
    draw: Callable[[], float] = random.random
    token: Callable[[], str] = lambda: secrets.token_hex(8)


class WorkerKeys:
    """The key files under `state_dir`, and what the daemon's key ring has of them. `engines_user`: where engines are another user's, which
    has a copy of its own; the daemon believes its own. `cluster`: the further one; "" = the daemon's."""

    def __init__(
        self, state_dir: Path, router: RouterLink, engines_user: EnginesUser | None = None, cluster: str = ""
    ) -> None:
        self._engines_user, self._cluster = engines_user, cluster
        self._state_dir, self._register, self._unregister = state_dir, router.register, router.unregister
        self._minted: dict[str, keys.KeyPair] = {}  # by intent that is not submitted yet
        self._public: dict[str, str] = {}  # intent -> public key that we let in
        self._before: dict[str, list[str]] = {}  # intent -> those of runs that its engine is about to leave

    def mint(self, run: str, intent_id: str) -> str:
        """Make the pair of a worker that is to come. Returns its public key."""
        pair = self._minted[intent_id] = keys.generate(run, intent_id)
        return pair.public

    def changed(self, intent_id: str) -> None:
        """The engine is there under its newest key: those before open nothing any more."""
        for public in self._before.pop(intent_id, ()):
            self._unregister(public)

    def write(self, intent_id: str) -> None:
        """Put the pair where its job will read it. Blocks; raises `OSError`, `ClusterError`."""
        pair = self._minted[intent_id]
        keys.write_keypair(keys.worker_key_path(self._state_dir, intent_id), pair)
        if self._engines_user is not None:
            self._engines_user.put_key(pair)

    def allow(self, intent_id: str) -> None:
        """Let the holder of a minted pair in, as the worker of its run and intent."""
        self._allow(self._minted.pop(intent_id))

    def _allow(self, pair: keys.KeyPair) -> None:
        if before := self._public.get(pair.intent, ""):
            self._before.setdefault(pair.intent, []).append(before)
        self._public[pair.intent] = pair.public
        self._register(pair.public, PeerIdentity("worker", pair.public, pair.run, pair.intent, self._cluster))

    def allow_again(self, intent_id: str, changed_to: str = "") -> None:
        """Let in whom a previous daemon made a key for. Raises `AuthError` where its file is missing or cannot be used. `changed_to`: the
        public key under which it is to work since it changed hands; another one is of a run that it has left."""
        pair = keys.read_keypair(keys.worker_key_path(self._state_dir, intent_id))
        if changed_to and pair.public != changed_to:
            raise AuthError("it was to change hands, and its key file is still that of the run before")
        self._allow(pair)

    def drop(self, intent_id: str) -> None:
        """A closed job's key opens nothing any more."""
        self._minted.pop(intent_id, None)
        self.changed(intent_id)
        public = self._public.pop(intent_id, "")
        if public:
            self._unregister(public)
        self._drop_files(intent_id)

    def drop_stale(self, opened: Collection[str]) -> None:
        """Remove the files of every intent that is not in `opened`: a daemon that died did not get to it."""
        folder = self._state_dir / "workers"
        # What was lent before this daemon began is over: it is decided afresh.
        for path in sorted([*folder.glob("scv-*.key"), *folder.glob(f"{LENT_INTENT}scv-*.key")]):
            if path.stem not in opened:
                self._drop_files(path.stem)

    def _drop_files(self, intent_id: str) -> None:
        try:
            keys.worker_key_path(self._state_dir, intent_id).unlink(missing_ok=True)
            if self._engines_user is None:
                drop_empty_log(self._state_dir, intent_id)
        except OSError as error:  # its key opens nothing; the next daemon's start tries again
            log.warning("a closed job's files stay", intent=intent_id, reason=str(error))
