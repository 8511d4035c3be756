"""An engine's running batch over time: who decodes, who waits, and when the next thing happens. Computed between events, never stepped.

All running sequences gain one token a step, so one step counter serves them all: a sequence ends when the counter reaches the value known
when it joined. What changes the batch (a finish, a full cache, a prefill, a caller's `add` or `remove`) starts a new `Stretch`.

    waiting --fits--> joining (prefilled; decoding stalls) --> running --target reached--> Finished
       ^------------- preempted: KV dropped, prefilled again ----|

As vLLM does it: prefills go first, siblings share their prompt's KV on one engine, a full cache preempts the latest to join. Owns one
engine's batch. Knows nothing of leases, workers or why a sample is here; times are given by the caller and never go back.

Boundary: one engine between two events; it knows no site.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator

import msgspec

from scavenger.errors import EngineError
from scavenger.simulate.decode import DecodeCurve, SimulatedEngine, Stretch
from scavenger.simulate.speculation import NO_DRAFT

# Kept free when something is admitted beside others, so that a preempted sequence does not come back at once (vLLM's watermark).
WATERMARK = 0.01
_TOLERANCE = 1e-6  # steps: what float sums of step counts may be off by


class SimulatedRequest(msgspec.Struct, frozen=True, gc=False):
    """A sample to decode here. `generated`: tokens it brings along. `target`: generated tokens at which it ends (the engine's alone).
    `cached`: of its prompt and those tokens, how many are in the engine's KV cache yet.
    """

    key: int
    prompt: int
    prompt_tokens: int
    generated: int
    target: int
    cached: int = 0

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or not 0 <= self.generated < self.target:
            raise ValueError(
                f"sample {self.key}: {self.prompt_tokens} prompt tokens, {self.generated} of {self.target} generated"
            )


class Finished(msgspec.Struct, frozen=True, gc=False):
    time_s: float
    key: int
    generated: int


class Preempted(msgspec.Struct, frozen=True, gc=False):
    """The cache was full: the sample waits here, keeps its tokens, and its KV is computed again."""

    time_s: float
    key: int
    generated: int


class Joined(msgspec.Struct, frozen=True, gc=False):
    """Their prefill is done; they decode from now."""

    time_s: float
    keys: tuple[int, ...]


Happening = Finished | Preempted | Joined


class _Running(msgspec.Struct, frozen=True, gc=False):
    """`last_step`: at which it has all its tokens."""

    request: SimulatedRequest
    joined_step: float
    last_step: float


class EngineBatch:
    """One engine's sequences. Call `advance(now)` when `next_time()` is due, or at any time; other methods do so by themselves.

    An engine whose memory changes (training state comes or goes) is empty then: make a new batch for its new `spec`.
    """

    def __init__(self, spec: SimulatedEngine, now: float = 0.0) -> None:
        self.spec = spec
        self._capacity = spec.kv_capacity
        self._curves: dict[int, DecodeCurve] = {}  # by batch: the same few come again and again
        self._speculated: DecodeCurve | None = None  # of the batch as it is, where the engine speculates
        self._said: Counter[int] = Counter()  # prompt -> its samples that ended, here or as it was told
        self._draft = NO_DRAFT
        self.passes = self.verified_tokens = 0.0  # with drafts, of a sample: how many, and what they made
        self.decoded_tokens = 0
        self.prefilled_tokens = 0
        self.prefill_s = 0.0
        self.preemptions = 0
        self._since = now  # when the step counter was `_step`
        self._step = 0.0
        self._running: dict[int, _Running] = {}
        self._ends: list[tuple[float, int]] = []  # (last step, key), stale entries included
        self._residents: Counter[int] = Counter()  # prompt -> sequences here whose KV builds on it
        self._context = 0.0  # tokens read a step: prompts counted for each sequence
        self._stored = 0.0  # tokens in the cache: prompts counted once
        self._waiting: deque[SimulatedRequest] = deque()
        self._joining: list[SimulatedRequest] = []
        self._joined_at = math.inf
        self._due: float | None = None
        self._unread: list[Happening] = []

    @property
    def size(self) -> int:
        """Samples here in any state."""
        return len(self._running) + len(self._joining) + len(self._waiting)

    @property
    def room(self) -> int:
        """Tokens for which the KV cache has room beside the samples here."""
        return max(0, int(self._capacity - self._stored))

    @property
    def running(self) -> int:
        return len(self._running)

    def __contains__(self, key: int) -> bool:
        not_running = (*self._joining, *self._waiting) if self._joining or self._waiting else ()
        return key in self._running or any(request.key == key for request in not_running)

    def is_running(self, key: int) -> bool:
        """Whether a sample is here and prefilled."""
        return key in self._running

    def next_time(self) -> float:
        """When `advance` will have something to say; infinity when nothing runs."""
        return self._since if self._unread else self._next_internal()

    def advance(self, now: float) -> list[Happening]:
        """All that happened until `now`, in order, since it was last asked."""
        self._catch_up(now)
        happened, self._unread = self._unread, []
        return happened

    def add(self, requests: Iterable[SimulatedRequest], now: float) -> None:
        """Give the engine samples; those of one call are prefilled together. Raises `EngineError` for one that could never fit."""
        coming = list(requests)
        if len({request.key for request in coming}) < len(coming):
            raise ValueError(f"samples {sorted(request.key for request in coming)}: one comes twice")
        late = {request.key for request in (*self._joining, *self._waiting)}
        for request in coming:
            if request.key in self._running or request.key in late:
                raise ValueError(f"sample {request.key} is here already")
            if request.prompt_tokens + request.target > self._capacity:
                raise EngineError(
                    f"a sample of {request.prompt_tokens} + {request.target} tokens; the engine has KV for {self._capacity}",
                    "cap the completions, or give the engine more GPUs",
                )
        self._rebase(now)
        self._waiting.extend(coming)
        self._admit()

    def remove(self, key: int, now: float) -> int:
        """Take a sample away and return its generated tokens; the step in progress is lost. Raises `KeyError` when it is not here."""
        self._rebase(now)
        generated = self._remove(key)
        self._admit()
        return generated

    def generated(self, key: int, now: float) -> int:
        """A sample's generated tokens at `now`."""
        self._catch_up(now)
        if key in self._running:
            return self._tokens_of(self._running[key], self._step_at(now))
        for request in (*self._joining, *self._waiting):
            if request.key == key:
                return request.generated
        raise KeyError(key)

    def progress(self, now: float) -> dict[int, int]:
        """Generated tokens of every sample here at `now`."""
        self._catch_up(now)
        step = self._step_at(now)
        tokens = {request.key: request.generated for request in (*self._waiting, *self._joining)}
        floor = math.floor
        for (
            key,
            one,
        ) in self._running.items():  # `_tokens_of`, written out: every heartbeat asks it of every sample
            request = one.request
            so_far, most = request.generated + floor(step - one.joined_step + _TOLERANCE), request.target - 1
            tokens[key] = so_far if so_far < most else most
        return tokens

    def sibling_ended(self, prompt: int, now: float) -> None:
        """A sample of this prompt ended on another engine, and what it said is here for drafts."""
        if self.spec.acceptance is None:
            return
        self._rebase(now)
        self._said[prompt] += 1
        self._speculated = None

    def stored_tokens(self, now: float) -> float:
        """Tokens of KV in the cache at `now`."""
        self._catch_up(now)
        return self._stored + len(self._running) * (self._step_at(now) - self._step)

    # ---- the step counter ----

    def _stretch(self) -> Stretch:
        size = len(self._running)
        if self.spec.acceptance is not None:
            if self._speculated is None:
                self._speculated, self._draft = self.spec.token_curve(size, self._context, self._siblings())
            return Stretch(self._speculated, size, self._context)
        if size not in self._curves:
            self._curves[size] = self.spec.curve(size)
        return Stretch(self._curves[size], size, self._context)

    def _siblings(self) -> float:
        """Of a running sample's siblings, how many ended, on average."""
        said = self._said
        return sum(said[one.request.prompt] for one in self._running.values()) / max(1, len(self._running))

    def _stretch_s(self, steps: float) -> float:
        return self._stretch().seconds(steps) if self._running else math.inf

    def _steps_left(self) -> float:
        """Steps until the first sequence ends or the next step would not fit the cache."""
        if not self._running:
            return math.inf
        return max(0.0, min(self._end_of_first() - self._step, self._steps_that_fit()))

    def _end_of_first(self) -> float:
        ends, running = self._ends, self._running
        while ends:
            step, key = ends[0]
            one = running.get(key)
            if one is not None and one.last_step == step:
                return step
            heapq.heappop(ends)
        raise AssertionError("running sequences without an end")

    def _steps_that_fit(self) -> float:
        return math.floor((self._capacity - self._stored) / len(self._running) + _TOLERANCE)

    def _step_at(self, now: float) -> float:
        if self._joining or not self._running:
            return self._step
        return self._step + self._stretch().steps(now - self._since)

    def _tokens_of(self, one: _Running, step: float) -> int:
        tokens = one.request.generated + math.floor(step - one.joined_step + _TOLERANCE)
        return min(tokens, one.request.target - 1)  # at the target it would have finished

    def _go_on(self, steps: float, now: float) -> None:
        """`steps` steps were done by `now`."""
        if self._speculated is not None and self._draft.length:
            self.verified_tokens += steps * len(self._running)
            self.passes += steps * len(self._running) / self._draft.tokens
        self._step += steps
        self._context += steps * len(self._running)
        self._stored += steps * len(self._running)
        self._since = now
        self._due = None

    def _rebase(self, now: float) -> None:
        self._catch_up(now)
        self._go_on(self._step_at(now) - self._step, now)

    # ---- what happens ----

    def _catch_up(self, now: float) -> None:
        if now < self._since:
            raise ValueError(f"the engine is at {self._since} s, asked for {now} s")
        while (due := self._due if self._due is not None else self._next_internal()) <= now:
            if self._joining:
                self._join(due)
                continue
            self._go_on(self._steps_left(), due)
            if self._end_of_first() - self._step <= _TOLERANCE:
                self._finish(due)
            else:
                self._preempt(due)

    def _next_internal(self) -> float:
        """When the batch changes by itself next."""
        if self._due is None:
            self._due = (
                self._joined_at if self._joining else self._since + self._stretch_s(self._steps_left())
            )
        return self._due

    def _finish(self, now: float) -> None:
        while self._running and self._end_of_first() - self._step <= _TOLERANCE:
            key = self._ends[0][1]
            target = self._running[key].request.target
            self._remove(key, whole=True)
            self._unread.append(Finished(now, key, target))
        self._admit()

    def _preempt(self, now: float) -> None:
        """The latest to join goes first in the queue. One alone always fits: `add` made sure."""
        key = next(reversed(self._running))
        request = self._running[key].request
        generated = self._remove(key)
        self._waiting.appendleft(
            SimulatedRequest(key, request.prompt, request.prompt_tokens, generated, request.target)
        )
        self.preemptions += 1
        self._unread.append(Preempted(now, key, generated))
        self._admit()

    def _remove(self, key: int, whole: bool = False) -> int:
        """Take a sequence out of whatever state it is in; returns its tokens. `whole`: it has reached its target."""
        self._due = None
        one = self._running.pop(key, None)
        if one is not None:
            self._speculated = None
            self._said[one.request.prompt] += whole and self.spec.acceptance is not None
            exact = self._step - one.joined_step
            tokens = one.request.target if whole else self._tokens_of(one, self._step)
            self.decoded_tokens += tokens - one.request.generated
            self._context -= one.request.prompt_tokens + one.request.generated + exact
            self._stored -= one.request.generated + exact
            self._release_prompt(one.request)
            if not self._running and not self._joining:
                self._context = self._stored = 0.0  # no rounding error outlives a batch
            return tokens
        for queue in (self._joining, self._waiting):
            for request in queue:
                if request.key == key:
                    queue.remove(request)
                    if queue is self._joining:
                        self._stored -= request.generated
                        self._release_prompt(request)
                    return request.generated
        raise KeyError(key)

    def _release_prompt(self, request: SimulatedRequest) -> None:
        self._residents[request.prompt] -= 1
        if not self._residents[request.prompt]:
            del self._residents[request.prompt]
            self._stored -= request.prompt_tokens

    def _admit(self) -> None:
        """Begin the prefill of all that fit, when none is under way. The queue is served in order."""
        if self._joining:
            return
        parts = []
        while self._waiting and self._fits(self._waiting[0]):
            request = self._waiting.popleft()
            shared = self._residents[request.prompt] > 0
            self._residents[request.prompt] += 1
            prompt = request.prompt_tokens if shared else 0
            cached = max(prompt, request.cached)
            # with all of it cached, at least its last token goes through the model
            parts.append((max(1, request.generated + request.prompt_tokens - cached), cached))
            self._stored += request.generated + request.prompt_tokens - prompt
            self._joining.append(request)
        if parts:
            self.prefilled_tokens += sum(new for new, _ in parts)
            seconds = self.spec.prefill_many_s(parts)
            self.prefill_s += seconds
            self._joined_at = self._since + seconds
        self._due = None

    def _fits(self, request: SimulatedRequest) -> bool:
        here = len(self._running) + len(self._joining)
        if here >= self.spec.max_sequences:
            return False
        prompt = 0 if self._residents[request.prompt] else request.prompt_tokens
        watermark = WATERMARK * self._capacity if here else 0.0
        return self._stored + request.generated + prompt + here + 1 + watermark <= self._capacity

    def _join(self, now: float) -> None:
        self._since, self._joined_at, self._due = now, math.inf, None
        joined, self._joining = self._joining, []
        self._speculated = None
        for request in joined:
            one = _Running(request, self._step, self._step + request.target - request.generated)
            self._running[request.key] = one
            heapq.heappush(self._ends, (one.last_step, request.key))
            self._context += request.prompt_tokens + request.generated
        if joined:
            self._unread.append(Joined(now, tuple(request.key for request in joined)))
        self._admit()

    def __iter__(self) -> Iterator[int]:
        """Keys of all samples here: running in the order they joined, then joining, then waiting."""
        yield from self._running
        yield from (request.key for request in (*self._joining, *self._waiting))
