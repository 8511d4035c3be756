"""From what the ledger remembers of a run to the facts that its policy learned from: a restarted daemon's policies learn them again. Pure.

Engines' speeds are not written down; they follow from who held what and when tokens came (`rates`), within a flush. What the
ledger does not tell is learned anew, from the priors: toggles, and what the trainer had trained of the step under way. Decides nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scavenger.policy.history import Completion, EngineLifetime, Flush, LeaseInterval, RunHistory, Step
from scavenger.policy.interface import (
    EngineProgress,
    EnginesAsked,
    Fact,
    RouterPolicy,
    SampleFinished,
    StepFinished,
    StepSubmitted,
    WorkerJoined,
    WorkerLost,
    WorkerReady,
)

#: Steps and chunks that a restarted daemon reads again, of each run.
STEPS, CHUNKS = 8, 20_000
#: A measurement spans at least so long: flushes come in lumps.
LEAST_S = 0.5


@dataclass(frozen=True, slots=True)
class Rate:
    """From `at - seconds` to `at` an engine held `batch` samples on average, with `context` tokens together, and made `tokens`."""

    worker_id: int
    at: float
    batch: float
    context: float
    tokens: int
    seconds: float


def observe_all(policy: RouterPolicy, known: Sequence[tuple[float, Fact]]) -> None:
    """Have a policy observe facts, each at the time at which it became known."""
    for at, fact in known:
        policy.observe(fact, at)


def facts(history: RunHistory) -> list[tuple[float, Fact]]:
    """The facts of a recording and when they became known, in order."""
    lives = {life.worker_id: life for life in history.lives}
    found: list[tuple[float, Fact]] = []
    for step in history.steps:
        found += _of_step(step, lives)
    for life in history.lives:
        found += _of_life(life)
    for rate in rates(history):
        known = lives.get(rate.worker_id)
        if known is not None:
            batch = max(1, round(rate.batch))
            tokens = max(1, round(rate.tokens * batch / rate.batch))
            found.append(
                (
                    rate.at,
                    EngineProgress(
                        known.worker_id,
                        known.kind,
                        known.node,
                        known.gpus,
                        batch,
                        rate.context,
                        tokens,
                        rate.seconds,
                        known.bounded,
                    ),
                )
            )
    found.sort(key=lambda known: known[0])
    if history.engines is not None:  # last: all that is known went into it
        found.append((found[-1][0] if found else 0.0, EnginesAsked(history.engines)))
    return found


def _of_step(step: Step, lives: dict[int, EngineLifetime]) -> Iterator[tuple[float, Fact]]:
    yield (
        step.submitted_at,
        StepSubmitted(
            step.step, "train", len(step.completions), len({a.group_id for a in step.completions}), step.cap
        ),
    )
    for completion in step.completions:
        if completion.finished_at is not None:
            yield completion.finished_at, _finished(step, completion, lives.get(completion.worker_id))
    if step.committed_at is not None:
        yield step.committed_at, StepFinished(step.step, "train", step.metrics)


def _finished(step: Step, completion: Completion, life: EngineLifetime | None) -> SampleFinished:
    kind, node = (life.kind, life.node) if life is not None else ("", "")
    capped = completion.finish == "length"
    return SampleFinished(
        completion.sample_id,
        completion.group_id,
        step.step,
        completion.length,
        completion.prompt_tokens,
        capped,
        completion.worker_id,
        kind,
        node,
    )


def _of_life(life: EngineLifetime) -> Iterator[tuple[float, Fact]]:
    who = (life.worker_id, life.kind, life.node, life.gpus)
    yield life.joined_at, WorkerJoined(*who, life.bounded)
    for place, load in enumerate(life.loads):
        yield (
            load.at,
            WorkerReady(
                *who,
                load.version,
                place == 0,
                load.at - life.joined_at,
                load.pull_s,
                load.load_s,
                life.bounded,
            ),
        )
    if life.left_at is not None:
        lived_s = life.left_at - life.joined_at
        yield (life.left_at, WorkerLost(*who, lived_s, life.preempted, life.reason, bounded=life.bounded))


# ---------------------------------------------------------------- speeds


def rates(history: RunHistory) -> list[Rate]:
    """How fast engines were, from leases and the chunks that came under them."""
    prompts = {
        completion.sample_id: completion.prompt_tokens
        for step in history.steps
        for completion in step.completions
    }
    spans: dict[int, list[LeaseInterval]] = defaultdict(list)
    flushes: dict[int, list[Flush]] = defaultdict(list)
    for span in history.spans:
        spans[span.worker_id].append(span)
    for flush in history.flushes:
        flushes[flush.worker_id].append(flush)
    found = [
        rate
        for worker_id in sorted(flushes)
        for rate in _rates_of(worker_id, spans[worker_id], flushes[worker_id], prompts)
    ]
    return sorted(found, key=lambda rate: (rate.at, rate.worker_id))


@dataclass(slots=True)
class _Sum:
    """A stretch under way."""

    seconds: float = 0.0
    batch_s: float = 0.0
    context_s: float = 0.0
    tokens: int = 0


def _rates_of(
    worker_id: int, spans: Sequence[LeaseInterval], flushes: Sequence[Flush], prompts: dict[int, int]
) -> Iterator[Rate]:
    """One engine's. A stretch ends when it has lasted `LEAST_S` and the batch changes, or when nothing is held."""
    last = max(flush.at for flush in flushes)
    # At one time tokens come first, then leases end, then others begin: so the core wrote them down.
    moments: list[tuple[float, int, int, int]] = [
        (flush.at, 0, flush.sample_id, flush.tokens) for flush in flushes
    ]
    moments += [(min(span.ended_at or last, last), 1, span.sample_id, span.end_len) for span in spans]
    moments += [
        (span.granted_at, 2, span.sample_id, span.start_len) for span in spans if span.granted_at <= last
    ]
    held: dict[int, int] = {}  # sample -> tokens of context
    stretch, at = _Sum(), 0.0
    for now, what, sample_id, tokens in sorted(moments):
        if held:
            stretch.seconds += now - at
            stretch.batch_s += (now - at) * len(held)
            stretch.context_s += (now - at) * sum(held.values())
        at = now
        if what == 0:
            if sample_id in held:
                held[sample_id] += tokens
                stretch.tokens += tokens
            continue
        if what == 2:
            held[sample_id] = prompts.get(sample_id, 0) + tokens
        else:
            held.pop(sample_id, None)
        if stretch.seconds >= LEAST_S or not held:
            if stretch.seconds >= LEAST_S and stretch.tokens:
                mean = stretch.batch_s / stretch.seconds
                yield Rate(
                    worker_id, now, mean, stretch.context_s / stretch.seconds, stretch.tokens, stretch.seconds
                )
            stretch = _Sum()
