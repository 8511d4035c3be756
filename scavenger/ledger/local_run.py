"""The ledger of a run that one process makes alone, without a daemon: `python -m trainer run.toml --local`.

Owns a small SQLite ledger in the run's folder, and a `scavenger.toml` beside it that leads every reading command there. What it records is
what a router would: runs, attempts, versions, groups, leases, chunks, ends, steps. One engine, which has every sample from its first token
to its last. Nothing is read back to go on: what an earlier attempt left open is superseded. A ledger that cannot be written is left,
which is said once, and the run goes on.

Boundary: the one way for a trainer's process to a ledger; it knows no engine and no training.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from scavenger import __version__
from scavenger.errors import LedgerError, LedgerRefused
from scavenger.ledger import data_decisions, queries, redaction, store
from scavenger.ledger import records as r
from scavenger.ledger.read import reader
from scavenger.ledger.write.writer import Writer
from scavenger.protocol.messages import (
    DataDecision,
    DoneSample,
    GroupSpec,
    SampleOutcome,
    TokenDifferences,
    token_count,
)
from scavenger.toml import dumps
from scavenger.weights import manifest as manifests
from scavenger.weights.manifest import Manifest

#: The configuration that names the ledger, and the ledger.
CONFIG, NAME = "scavenger.toml", "ledger.sqlite3"
#: Where it lies instead where the run's folder is on a network file system, which SQLite cannot use.
ELSEWHERE = Path("/var/tmp")
REMEDY = "remove it, or let its owner do so; or set run.out_dir to a local disk"
#: A step's records are written within so many seconds, or later, beside the next step.
WAIT_S = 30.0
LEFT_OPEN = "the attempt that generated it ended"
#: Of a try that neither finished nor failed: Ctrl-C, a signal.
TOLD_TO_END = "its process was told to end; the same command goes on"


def _url(folder: Path) -> str:
    """Raises `LedgerError` where no ledger can lie here."""
    try:
        store.refuse_network_file_system(folder)
        path = (folder / NAME).resolve()
    except LedgerRefused:
        digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
        path = _own(_own(ELSEWHERE / f"scavenger-{os.geteuid()}") / digest) / NAME  # no link is followed here
    return f"sqlite:///{path}"


def _own(folder: Path) -> Path:
    """`folder`, made if it is missing. Its name can be guessed, and everybody may write around it: raises `LedgerError` unless it is a
    folder of this user into which nobody else can put anything."""
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        seen = folder.lstat()
    except OSError as error:
        raise LedgerError(f"{folder} cannot be used for a ledger: {error.strerror}", REMEDY) from error
    if not stat.S_ISDIR(seen.st_mode):
        raise LedgerError(f"{folder} is a link or a file, so no ledger is put there", REMEDY)
    if seen.st_uid != os.geteuid():
        raise LedgerError(
            f"{folder} belongs to another user (uid {seen.st_uid}), so no ledger is put there", REMEDY
        )
    if seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise LedgerError(
            f"{folder} can be written by others, so no ledger is put there", f"chmod go-w {folder}"
        )
    return folder


class LocalLedger:
    """One attempt. `attempt`, `next_version`: those that follow in the ledger. `say`: a line for people."""

    def __init__(
        self,
        folder: Path,
        run: str,
        *,
        seed: int,
        config: str,
        engine: str,
        tokenizer: str,
        resume_step: int,
        host: str,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Raises `LedgerError` where there can be none."""
        self._folder, self._say, self._clock, self._name = folder, say, clock, run
        folder.mkdir(parents=True, exist_ok=True)
        url = _url(folder)
        store.upgrade(url)
        self._writer: Writer | None = Writer(url, host, os.getpid(), __version__, clock)
        self._writer.start()
        self._ticket = 0
        self._open: dict[int, r.GroupCreated] = {}  # groups that no step has taken, by id
        self._finished: dict[int, int] = {}  # their finished samples: accepted tokens, by id
        self._over = False
        snapshot = reader.read_snapshot(self._writer.engine)
        known = reader.run_by_name(self._writer.engine, run)
        self._group, self._sample = snapshot.next_group_id, snapshot.next_sample_id
        self._worker = snapshot.next_worker_id
        at, records = clock(), list[r.Record]()
        if known is None or known.seed != seed:
            self._run, self.attempt, self.next_version, last_step = snapshot.next_run_id, 1, 1, 0
            records.append(r.RunCreated(self._run, run, "", seed, config, engine, tokenizer, at))
        else:
            self._run, last_step = known.run_id, known.last_step
            self.attempt, self.next_version = known.attempt + 1, known.last_version + 1
            records += self._superseded(resume_step, snapshot.workers, at)
        found = reader.rows(self._writer.engine, queries.load("local_retries"), {"run_id": self._run}).rows
        self._retries = {(purpose, step, index): retry for purpose, step, index, retry in found}
        records.append(r.AttemptGranted(self._run, self.attempt, host, 0, resume_step, config, engine, at))
        if last_step != resume_step:
            records.append(r.StepsRewound(self._run, self.attempt, resume_step, at))
        records.append(
            r.WorkerJoined(
                self._worker,
                self._run,
                "reserved",
                "",
                f"local-{self.attempt}",
                0,
                0,
                host,
                1,
                engine,
                at,
                "0",
            )
        )
        self._write(records, wait=True)
        text = dumps({"daemon": {"state_dir": ".", "ledger": url}})
        (folder / CONFIG).write_text(
            f"# Written by `--local`: name it to read this try (scavenger samples -c ...).\n{text}"
        )

    def _superseded(self, resume_step: int, workers: Iterable[r.WorkerState], at: float) -> list[r.Record]:
        """What an attempt that was killed left open, and what lies after the checkpoint that this one starts from."""
        assert self._writer is not None
        records: list[r.Record] = []
        why = f"attempt {self.attempt} starts at step {resume_step}"
        for group in reader.replay_groups(self._writer.engine, self._run, resume_step):
            for sample in group.samples:
                if sample.lease is not None:
                    records.append(r.LeaseEnded(sample.sample_id, sample.epoch, why, sample.length, 0, at))
                records.append(
                    r.SampleEnded(sample.sample_id, "superseded", why, 0, 0, sample.reward, None, at)
                )
        mine = [worker.joined for worker in workers if worker.joined.run_id == self._run]
        records += [r.WorkerLeft(one.worker_id, "its process ended", False, 0, 0, 0, at) for one in mine]
        return records

    # ---------------------------------------------------------------- what happens

    def published(self, step: int, manifest: Manifest, nbytes: int) -> None:
        encoded = manifests.encode(manifest)
        self._write(
            [
                r.VersionPublished(
                    self._run,
                    manifest.version,
                    step,
                    self.attempt,
                    manifest.root,
                    encoded,
                    nbytes,
                    self._clock(),
                )
            ]
        )

    def submitted(self, step: int, version: int, spec: GroupSpec, purpose: str) -> tuple[int, int]:
        """A group and its samples, leased to the one engine. The group's id, and that of its first sample."""
        at, group, first = self._clock(), self._group, self._sample
        self._group, self._sample = group + 1, first + spec.n
        key = (purpose, step, spec.prompt_index)
        retry = self._retries.get(key, 0)
        self._retries[key] = retry + 1
        sampling = msgspec.json.encode(spec.sampling).decode()
        created = r.GroupCreated(
            group,
            self._run,
            purpose,
            step,
            spec.prompt_index,
            retry,
            version,
            spec.prompt,
            spec.n,
            first,
            sampling,
            spec.meta,
            at,
        )
        self._open[group] = created
        leases = [r.LeaseGranted(first + i, 1, self._worker, version, 0, at) for i in range(spec.n)]
        self._write([created, *leases])
        return group, first

    def finished(self, sample: DoneSample, version: int) -> None:
        at, length = self._clock(), token_count(sample.tokens)
        self._finished[sample.sample_id] = length
        chunk = r.ChunkAccepted(
            sample.sample_id,
            1,
            0,
            sample.tokens,
            sample.logprobs,
            sample.raw_logprobs,
            version,
            self._worker,
            at,
            sample.routing,
        )
        ended = r.LeaseEnded(sample.sample_id, 1, "finished", length, 0, at)
        self._write([chunk, ended, r.SampleFinished(sample.sample_id, sample.finish, length, at)])

    def delivered(self, group: int) -> None:
        self._write([r.GroupDelivered(group, self.attempt, self._clock())])

    def committed(
        self,
        step: int,
        version: int,
        outcomes: Sequence[SampleOutcome],
        metrics: Mapping[str, float],
        purpose: str,
        decisions: Sequence[DataDecision] = (),
        differences: Sequence[TokenDifferences] = (),
    ) -> None:
        """A step with its samples' ends and what was decided about its data, durable when this returns."""
        at = self._clock()
        ends: list[r.Record] = [
            r.SampleEnded(
                one.sample_id,
                one.outcome,
                redaction.reason(one.outcome, one.reason),
                step,
                self.attempt,
                one.reward,
                one.advantage,
                at,
                redaction.version(one.reward_version),
            )
            for one in outcomes
        ]
        for group, created in list(self._open.items()):
            if (created.purpose, created.step) == (purpose, step):
                del self._open[group]
                for place in range(created.n):
                    self._finished.pop(created.first_sample_id + place, None)
        text = msgspec.json.encode(redaction.metrics(metrics)).decode()
        self._write(
            [
                *ends,
                r.StepCommitted(self._run, step, purpose, self.attempt, version, text, at),
                *(data_decisions.row(self._name, step, one, at) for one in decisions),
                *(
                    r.DifferencesRecorded(
                        one.sample_id, step, self.attempt, len(one.values) // 2, one.mean, one.values
                    )
                    for one in differences
                ),
            ],
            wait=True,
        )

    def checkpointed(
        self, step: int, version: int, root: bytes, path: str, kept: Sequence[int] | None
    ) -> None:
        text = "" if kept is None else msgspec.json.encode(sorted(set(kept))).decode()
        self._write(
            [r.CheckpointRecorded(self._run, step, version, root, path, self._clock(), text)], wait=True
        )

    def ended(self, state: str, reason: str) -> None:
        """The run is over. `close` follows."""
        self._leave()
        if state == "finished":  # with fewer steps than an earlier attempt had begun
            self._write(self._left_over())
        self._over = True
        self._write([r.RunEnded(self._run, state, reason, self._clock())], wait=True)

    def _left_over(self) -> list[r.Record]:
        """Ends of samples that were superseded for a step which the run does not have any more."""
        if self._writer is None:
            return []
        at, why = self._clock(), "the run finished before this step"
        found = reader.rows(self._writer.engine, queries.load("local_left_over"), {"run_id": self._run}).rows
        return [r.SampleEnded(sample, "surplus", why, 0, 0, reward, None, at) for sample, reward in found]

    def close(self) -> None:
        """Nothing more comes. Without `ended` the try was stopped: no daemon waits for it, and the next attempt opens it again."""
        if not self._over:
            self.ended("stopped", TOLD_TO_END)
        if self._writer is not None and not self._writer.close():
            self._say(f"{self._folder / NAME} lacks the last of this try: {self._writer.reason}")
        self._writer = None

    # ---------------------------------------------------------------- writing

    def _leave(self) -> None:
        """The engine goes, and with it what no step has taken."""
        if not self._worker:
            return
        at, records, unfinished = self._clock(), list[r.Record](), 0
        for created in self._open.values():
            for sample in range(created.first_sample_id, created.first_sample_id + created.n):
                if sample not in self._finished:
                    unfinished += 1
                    records.append(r.LeaseEnded(sample, 1, LEFT_OPEN, 0, 0, at))
                records.append(r.SampleEnded(sample, "superseded", LEFT_OPEN, 0, 0, None, None, at))
        self._open.clear()
        records.append(r.WorkerLeft(self._worker, "drained", True, unfinished, 0, 0, at))
        self._worker = 0
        self._write(records, wait=True)

    def _write(self, records: Sequence[r.Record], *, wait: bool = False) -> None:
        """`wait`: until they are durable, `WAIT_S` at most."""
        writer = self._writer
        if writer is None:
            return
        self._ticket += 1
        if not records:
            return
        try:
            writer.submit(self._ticket, records)
            writer.go()
        except LedgerError as error:
            self._writer = None
            writer.close(drain=False, timeout=1.0)
            self._say(f"{self._folder / NAME} gets nothing more of this try: {error}")
            return
        deadline = time.monotonic() + WAIT_S
        while wait and writer.backlog and time.monotonic() < deadline:
            time.sleep(0.002)  # between two looks at the writer's thread
