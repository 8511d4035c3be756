"""The ledger's only writer: a thread that commits what the daemon submits, many submissions in one transaction.

    submit(ticket, records) -> queue -> one transaction -> on_commit(ticket)

Owns the queue, the thread, retries and the writer's state; `transaction` owns what a transaction is, `faults` what an error means.
While a transaction runs, submissions gather for the next: that is the group commit. It needs no timer, except where engines are lost
together (`go`). Nothing is dropped, and nothing is acknowledged before its commit: a transaction that the database cannot take is tried
again, with growing pauses, until it can, and `backlog_bytes` tells the daemon to slow down. Callbacks run in the writer's thread
(`on_state` in that of `start` and `close` too) and must neither block nor call back into the writer.

Boundary: the thread; what it runs in a transaction is `transaction`.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
import structlog

from scavenger.backoff import backoff_s
from scavenger.errors import Fenced, LedgerError
from scavenger.ledger import restoring
from scavenger.ledger.faults import FINAL, REMEDIES, TRANSITIONS, WriterState, classify, explain, remedy
from scavenger.ledger.records import ChunkAccepted, LeaseEnded, LeaseGranted, LeaseMoved, Record
from scavenger.ledger.store import open_engine, sqlite_file
from scavenger.ledger.write.moves import QUIET_S, MoveLog
from scavenger.ledger.write.transaction import (
    NO_WRITER,
    Announced,
    Generation,
    commit_batch,
    grant_generation,
    open_connection,
)
from scavenger.ledger.write.wal import CHECKPOINT_BYTES, MAX_WAL_BYTES, WalWatch

__all__ = ["Backoff", "Writer", "WriterState"]

log = structlog.get_logger()

#: A transaction's size: large enough to amortise its sync, small enough that one takes a fraction of a second.
MAX_BATCH_BYTES = 16 * 1024 * 1024
#: How long at most (s) a submission that moves a lost engine's samples waits for those of other engines that were lost with it.
GATHER_S = 0.1

_LIMIT = 2**63
_FLAT_BYTES = 400
_LEASES = frozenset({LeaseGranted, LeaseEnded, LeaseMoved})


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses between tries of the same transaction: `first_s`, doubled each time up to `most_s`."""

    first_s: float = 0.05
    most_s: float = 5.0

    def pause_s(self, tries: int) -> float:
        return backoff_s(self.first_s, self.most_s, tries + 1)


def _ignore_commit(ticket: int) -> None:
    """The default of `on_commit`."""


def _ignore_state(state: WriterState, reason: str) -> None:
    """The default of `on_state`."""


@dataclass(frozen=True, slots=True)
class _Submission:
    ticket: int
    records: Sequence[Record]
    nbytes: int


class Writer:
    """See the module. `now` gives Unix seconds. `on_commit(ticket)`: that ticket and all before it are durable."""

    def __init__(
        self,
        url: str,
        host: str,
        pid: int,
        code_version: str,
        now: Callable[[], float],
        *,
        on_commit: Callable[[int], None] = _ignore_commit,
        on_state: Callable[[WriterState, str], None] = _ignore_state,
        backoff: Backoff = Backoff(),
        max_batch_bytes: int = MAX_BATCH_BYTES,
        announced: Announced = NO_WRITER,
        most_wal_bytes: int = MAX_WAL_BYTES,
        checkpoint_bytes: int = CHECKPOINT_BYTES,
    ) -> None:
        self.engine: sa.Engine = open_engine(url)
        self.wal = WalWatch(self.engine, sqlite_file(url), most_wal_bytes, checkpoint_bytes)
        self._identity = (host, pid, code_version)
        self._announced = announced
        self._now = now
        self._on_commit, self._on_state = on_commit, on_state
        self._backoff = backoff
        self._max_batch_bytes = max_batch_bytes

        self._changed = threading.Condition()  # guards what follows
        self._queue: deque[_Submission] = deque()
        self._backlog_records = 0
        self._backlog_bytes = 0
        self._last_ticket = self._complete = -1
        self._closing = False
        self._give_up = False
        self._state = WriterState.CLOSED
        self._reason = "not started"

        self._generation = Generation.of(0, "", "", restored=False, began="")
        self._batch = 0
        self._moves = MoveLog()
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------ for the daemon

    def start(self) -> Generation:
        """Take the ledger over and start writing; returns the new generation. Call once.

        Raises `LedgerError` when the ledger cannot be opened now or its schema is not current.
        """
        try:
            self._generation = grant_generation(self.engine, *self._identity, self._now(), self._announced)
        except sa.exc.DBAPIError as error:
            raise LedgerError(f"the ledger cannot be taken over: {explain(error)}", remedy(error)) from error
        if self._announced.note is not None:  # the history that it asks for is durable now
            restoring.end(self._announced.note)
        self._state, self._reason = WriterState.OK, ""
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)
        self._thread.start()
        return self._generation

    def submit(self, ticket: int, records: Sequence[Record]) -> None:
        """Queue `records` to become durable together; never waits for a disk. Tickets must grow. The list is copied.

        Raises `Fenced` or `LedgerError` once the writer has stopped, and `LedgerError` for a record that no database can hold.
        """
        records = tuple(records)
        nbytes = sum(map(weigh, records))
        with self._changed:
            if self._state in FINAL or self._closing:
                kind = Fenced if self._state is WriterState.FENCED else LedgerError
                raise kind(
                    f"the ledger's writer is {self._state}: {self._reason}", REMEDIES.get(self._state, "")
                )
            if ticket <= self._last_ticket:
                raise LedgerError(f"ticket {ticket} does not follow {self._last_ticket}")
            self._last_ticket = ticket
            self._queue.append(_Submission(ticket, records, nbytes))
            self._backlog_records += len(records)
            self._backlog_bytes += nbytes
            self._changed.notify_all()

    def go(self) -> None:
        """Everything that belongs together was submitted: do not wait for more moves."""
        with self._changed:
            self._complete = self._last_ticket
            self._changed.notify_all()

    @property
    def backlog(self) -> int:
        """Records submitted and not yet durable."""
        with self._changed:
            return self._backlog_records

    @property
    def backlog_bytes(self) -> int:
        """About how many bytes of memory the backlog takes."""
        with self._changed:
            return self._backlog_bytes

    @property
    def logged_moves(self) -> int:
        """Moves of samples that are durable in the log and not in `leases` and `samples` yet."""
        return len(self._moves)

    @property
    def wal_bytes(self) -> int:
        """The size of SQLite's write-ahead log after the last commit; 0 on PostgreSQL."""
        return self.wal.nbytes

    @property
    def state(self) -> WriterState:
        with self._changed:
            return self._state

    @property
    def reason(self) -> str:
        """Why the writer is in its state; "" when it is OK."""
        with self._changed:
            return self._reason

    @property
    def generation(self) -> int:
        """The number of the generation granted by `start`; 0 before."""
        return int(self._generation)

    @property
    def granted(self) -> Generation:
        """The generation granted by `start`, with its uid and its history."""
        return self._generation

    def close(self, drain: bool = True, timeout: float = 30.0) -> bool:
        """Stop the thread, after committing what is queued if `drain` and within `timeout` seconds. May be repeated.

        Returns whether everything submitted is durable. What is not was never acknowledged.
        """
        with self._changed:
            self._closing = True
            self._give_up = self._give_up or not drain
            self._changed.notify_all()
        deadline = time.monotonic() + timeout
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                with self._changed:
                    self._give_up = True
                    self._changed.notify_all()
                # Bounded too: a driver call ends by its own timeouts.
                self._thread.join(timeout)
        left = self.backlog
        self._enter(WriterState.CLOSED, "closed" if not left else f"closed with {left} records not written")
        self.engine.dispose()
        return left == 0

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        connection: sa.Connection | None = None
        try:
            while (work := self._next()) is not None:
                connection = self._write(connection, [record for item in work for record in item.records])
                if connection is None:
                    return
                if work:
                    self._acknowledge(work)
                if not self._check_wal(sum(item.nbytes for item in work)):
                    return
        except BaseException as error:
            self._enter(WriterState.FAILED, f"the writer's thread ended: {explain(error)}")
            raise
        finally:
            if connection is not None:
                connection.close()

    def _next(self) -> list[_Submission] | None:
        """Wait for work: all that is queued, up to a transaction's size. It stays in the queue until it is durable. None: stop.

        An empty list asks for a transaction that only folds logged moves.
        """
        with self._changed:
            while not self._queue and not self._closing:
                if not self._changed.wait(QUIET_S if self._moves else None):
                    return []
            self._gather()
            if self._give_up or not (self._queue or self._moves):
                return None
            work: list[_Submission] = []
            nbytes = 0
            for item in self._queue:
                if work and nbytes + item.nbytes > self._max_batch_bytes:
                    break
                work.append(item)
                nbytes += item.nbytes
            return work

    def _gather(self) -> None:
        """Engines are lost together: after the moves of one, wait for those of the others until `go`, `GATHER_S` at most. Holds the lock.

        A commit beside a busy event loop costs both several times what it costs alone. One commit for all moves brings the last samples to
        new engines sooner.
        """
        if self._queue and _moves_samples(self._queue[-1].records):
            self._changed.wait_for(lambda: self._closing or self._complete >= self._last_ticket, GATHER_S)

    def _write(self, connection: sa.Connection | None, records: Sequence[Record]) -> sa.Connection | None:
        """Commit `records`, however many tries it takes. None: the writer has stopped and they are not durable."""
        if not records and not self._moves:
            return connection if connection is not None else self._open()
        tries, plan = 0, self._moves.plan(records, self._now())
        while True:
            try:
                if connection is None:
                    connection = self._open()
                commit_batch(connection, self._generation, self._batch + 1, records, self._now(), plan)
            except (sa.exc.DBAPIError, LedgerError, OSError) as error:
                failure: BaseException = error
            except Exception as error:
                # A driver's own error, raised past SQLAlchemy (COPY does): anything else is a bug.
                if not hasattr(error, "sqlstate"):
                    raise
                failure = error
            else:
                self._batch += 1
                self._moves.done(plan, self._now())
                self._enter(WriterState.OK, "")
                return connection
            state = classify(failure)
            self._enter(state, explain(failure))
            # Never reuse a connection that saw an error: a new one starts from what the database holds.
            _discard(connection)
            connection = None
            if state in FINAL or not self._pause(self._backoff.pause_s(tries)):
                return None
            tries += 1

    def _open(self) -> sa.Connection:
        connection = open_connection(self.engine)
        self.wal.take_over(connection)
        return connection

    def _check_wal(self, nbytes: int) -> bool:
        """After a commit of `nbytes` was acknowledged. False: a sync failed, and no disk that does so is written again."""
        try:
            self.wal.after_commit(self._now(), nbytes)
        except (sa.exc.DBAPIError, sqlite3.Error) as error:
            state = classify(error)
            if state in FINAL:
                self._enter(state, explain(error))
                return False
            log.warning("ledger's log not written back; tried again", state=str(state), reason=explain(error))
        return True

    def _pause(self, pause_s: float) -> bool:
        """Wait before the next try; False when the writer should give up instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._give_up, pause_s)
            return not self._give_up

    def _acknowledge(self, work: Sequence[_Submission]) -> None:
        with self._changed:
            for item in work:
                self._queue.popleft()
                self._backlog_records -= len(item.records)
                self._backlog_bytes -= item.nbytes
        self._on_commit(work[-1].ticket)

    def _enter(self, state: WriterState, reason: str) -> None:
        with self._changed:
            if state is self._state or state not in TRANSITIONS[self._state]:
                return
            self._state, self._reason = state, reason
        self._on_state(state, reason)


def _moves_samples(records: Sequence[Record]) -> bool:
    """Whether a submission moves a lost engine's samples: those records come first in it."""
    return bool(records) and type(records[0]) is LeaseMoved


def _discard(connection: sa.Connection | None) -> None:
    if connection is not None:
        connection.invalidate()
        connection.close()


def weigh(record: Record) -> int:
    """About how many bytes a record takes in memory and in the ledger.

    Raises `LedgerError` for an integer that no database column holds. It is refused here, while the caller can still be told: once queued,
    no retry could ever write it.
    """
    if type(record) is ChunkAccepted:  # the hot one; its integers are the core's own
        return (
            _FLAT_BYTES
            + len(record.tokens)
            + len(record.logprobs)
            + len(record.raw_logprobs)
            + len(record.routing)
        )
    if type(record) in _LEASES:  # as many at once as a lost fleet had samples; the core's own integers too
        return _FLAT_BYTES
    size = _FLAT_BYTES
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if isinstance(value, (bytes, str)):
            size += len(value)
        elif isinstance(value, int) and not -_LIMIT <= value < _LIMIT:
            raise LedgerError(f"{type(record).__name__}.{name} = {value} does not fit into 64 bits")
    return size
