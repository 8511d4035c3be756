"""Which samples' contents may be compacted or dropped, and what their chunks become. Pure.

Owns the rule (I3): a group is left alone while a resume from any kept checkpoint may deliver it again, while one of its samples is in
flight, and until its run has taken `steps` further optimizer steps. It knows no database: `keeper` reads the samples and submits the
portions, `compaction` carries one out in the writer's transaction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from scavenger.ledger.records import ContentsReduced

#: States in which a sample takes no more tokens. "complete" is not one: it is delivered yet, or again.
FINAL_STATES = frozenset(
    {"consumed", "filtered", "masked", "evaluated", "served", "surplus", "superseded", "poisoned"}
)
#: From what (`samples.contents`) each policy may go on to its own result.
BECOMES: dict[str, frozenset[str | None]] = {
    "compacted": frozenset({None}),
    "dropped": frozenset({None, "compacted"}),
}
#: One transaction's share: the writer is held up for a few hundredths of a second.
PORTION_SAMPLES = 64
PORTION_TOKENS = 131_072


@dataclass(frozen=True, slots=True)
class Policy:
    """The daemon's `[ledger]` section."""

    retention: Literal["keep", "compact", "drop"]
    steps: int

    @property
    def to(self) -> str:
        """What `samples.contents` will say."""
        return {"compact": "compacted", "drop": "dropped"}.get(self.retention, "")


@dataclass(frozen=True, slots=True)
class RetainedRun:
    """A run as the ledger has it. `final_step`: the step up to which consumption is final, -1 for none (`reader.final_step`)."""

    run_id: int
    attempt: int
    last_step: int
    final_step: int


@dataclass(frozen=True, slots=True)
class RetainedSample:
    """A sample of a step. `taken`: whether a surviving step (or evaluation) of its group's number exists."""

    sample_id: int
    group_id: int
    step: int
    state: str
    ended_step: int
    taken: int  # 0 | 1
    contents: str | None
    accepted_len: int


@dataclass(frozen=True, slots=True)
class Portion:
    """One transaction's work and why it may be done."""

    record: ContentsReduced
    tokens: int
    reason: str


def limit(run: RetainedRun, policy: Policy) -> int:
    """The last step whose groups the policy applies to; -1 for none."""
    if policy.retention == "keep":
        return -1
    return max(-1, min(run.final_step, run.last_step - policy.steps))


def plan(
    run: RetainedRun, samples: Iterable[RetainedSample], policy: Policy, now: float
) -> Iterator[Portion]:
    """Portions of the samples whose group is final and old enough and whose contents are not yet as the policy wants them."""
    bound = limit(run, policy)
    groups: dict[int, list[RetainedSample]] = defaultdict(list)
    for sample in samples:
        groups[sample.group_id].append(sample)
    ready = [
        s
        for members in groups.values()
        if _settled(members, bound)
        for s in members
        if s.contents in BECOMES[policy.to]
    ]
    why = f"step {{}}: the oldest kept checkpoint is of step {run.final_step}, the run is at step {run.last_step}"
    for part in _portions(ready):
        record = ContentsReduced(run.run_id, run.attempt, tuple(s.sample_id for s in part), policy.to, now)
        yield Portion(record, sum(s.accepted_len for s in part), why.format(part[0].step))


def _settled(group: Sequence[RetainedSample], bound: int) -> bool:
    """Whether no trainer may ask for any sample of the group again. They go together: a group is read back as a whole."""
    return all(
        s.step <= bound
        and s.ended_step <= bound
        and s.state in FINAL_STATES
        and (s.state != "poisoned" or s.taken)
        for s in group
    )


def _portions(samples: Sequence[RetainedSample]) -> Iterator[list[RetainedSample]]:
    part: list[RetainedSample] = []
    tokens = 0
    for sample in samples:
        if part and (len(part) == PORTION_SAMPLES or tokens + sample.accepted_len > PORTION_TOKENS):
            yield part
            part, tokens = [], 0
        part.append(sample)
        tokens += sample.accepted_len
    if part:
        yield part


# ---------------------------------------------------------------- what chunks become


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """One row of `chunks` without its id and sample."""

    epoch: int
    start_len: int
    n_tokens: int
    version: int
    worker_id: int
    at: float
    tokens: bytes
    logprobs: bytes
    raw_logprobs: bytes
    routing: bytes = b""


def merge(rows: Sequence[ChunkRow], length: int) -> tuple[list[ChunkRow], str]:
    """A sample's rows, in the order of their offsets, as one row for each lease; and what is wrong with them ("" = nothing).

    One a lease and not one a sample: who generated which token under which version stays a fact of this table, and sums over it
    give the same answers. The time is that of the lease's last chunk.
    """
    at = 0
    for row in rows:
        if row.start_len != at:
            return (
                [],
                f"{'tokens missing' if row.start_len > at else 'tokens doubled'}: a chunk begins at {row.start_len}, not at {at}",
            )
        sizes = {len(row.tokens), len(row.logprobs), len(row.raw_logprobs)}
        if sizes not in ({4 * row.n_tokens}, {0}):
            return [], f"the chunk at {at} has {row.n_tokens} tokens and payloads of {sorted(sizes)} bytes"
        if len(row.routing) % row.n_tokens:
            return [], f"the chunk at {at} has {row.n_tokens} tokens and {len(row.routing)} bytes of routing"
        at += row.n_tokens
    if at != length:
        return [], f"{at} tokens in its chunks, {length} accepted"
    leases: dict[tuple[int, int, int], list[ChunkRow]] = {}
    for row in rows:
        leases.setdefault((row.epoch, row.version, row.worker_id), []).append(row)
    merged = [_one(group) for group in leases.values()]
    if any(a.start_len + a.n_tokens != b.start_len for a, b in pairwise(merged)):
        return [], "chunks of two leases alternate"
    return merged, ""


def _one(rows: Sequence[ChunkRow]) -> ChunkRow:
    first = rows[0]
    return ChunkRow(
        first.epoch,
        first.start_len,
        sum(row.n_tokens for row in rows),
        first.version,
        first.worker_id,
        max(row.at for row in rows),
        b"".join(row.tokens for row in rows),
        b"".join(row.logprobs for row in rows),
        b"".join(row.raw_logprobs for row in rows),
        b"".join(row.routing for row in rows),
    )
