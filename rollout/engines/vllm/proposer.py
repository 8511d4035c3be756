"""Siblings as drafts inside vLLM: what its `custom_class` proposer calls after each pass. vLLM verifies by its own rejection sampling.

Runs in vLLM's own process. vLLM 0.32 gives a proposer the sampled tokens and its table of tokens, not which request a row is: that our
extension tells it (`attach`). Requests are named by `request_name`, which says their group. A draft has no distribution of its own, so
vLLM accepts a drafted token with its probability under the model and else draws from the rest, which leaves the model's distribution.

Boundary: code that runs inside vLLM's own processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from rollout.engines.speculation.groups import DraftTokens, group_of
from rollout.engines.speculation.speculator import Speculator
from scavenger.protocol.messages import SampleKey
from scavenger.protocol.worker.events import Speculated

#: As `speculative_config` names it.
PATH = "rollout.engines.vllm.proposer.GroupProposer"
#: Group, its prompt where it may be new, index of the sample, offset, tokens: as `Groups.hear`.
Heard = tuple[str, Sequence[int] | None, int, int, Sequence[int]]
MAX_DRAFT = 8  # vLLM keeps room for so many more tokens of each request


class Named(NamedTuple):
    """What a request's name says: its group, its place there, and how many tokens its group's prompt has."""

    group: str
    place: int
    prompt: int


def request_name(serial: int, key: SampleKey, prompt: Sequence[int]) -> str:
    """A name in vLLM for a request; `serial` tells apart those of one sample. vLLM appends "-" and letters of its own."""
    return f"{serial}.{group_name(key, prompt)}.{key.index}.{len(prompt)}"


def group_name(key: SampleKey, prompt: Sequence[int]) -> str:
    """What names a sample's group in vLLM."""
    return blake2b(repr(group_of(key, prompt)).encode(), digest_size=12).hexdigest()


def named(request: str) -> Named | None:
    """What `request_name` said; None for a name that it did not make."""
    parts = request.partition("-")[0].split(".")
    if len(parts) != 4 or not (parts[2].isdecimal() and parts[3].isdecimal()):
        return None
    return Named(parts[1], int(parts[2]), int(parts[3]))


class GroupProposer:
    """vLLM makes it with its configuration and calls `load_model` and `propose`."""

    def __init__(self, vllm_config: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        self._context_length = int(vllm_config.model_config.max_model_len)
        self._speculator = Speculator(max_draft=MAX_DRAFT, padded=False)
        self._clock = clock
        self._runner: Any = None
        self._lengths: dict[str, int] = {}  # of each running request, the tokens that the speculator knows
        self._drafts: dict[Hashable, DraftTokens] = {}  # that the pass under way verifies
        self._positions = 0
        self._began: float | None = None  # when the last drafts were made; None: nothing has run since

    @property
    def total(self) -> Speculated:
        """What speculation did so far."""
        return self._speculator.total

    def attach(self, runner: Any) -> None:
        """vLLM's model runner, whose table of running requests says whose each row is (`input_batch.req_ids`)."""
        self._runner = runner

    def hear(self, said: Sequence[Heard], over: Sequence[str]) -> None:
        """What siblings said on other engines; and groups, by their names, that need it no more."""
        for group, prompt, index, offset, tokens in said:
            self._speculator.hear(group, prompt, index, offset, tokens)
        for group in over:
            self._speculator.drop(group)

    def forget(self) -> None:
        """Drop all that is known of a run's samples, and how well their drafts did."""
        self._speculator = Speculator(max_draft=MAX_DRAFT, padded=False)
        self._lengths, self._drafts = {}, {}
        self._positions, self._began = 0, None

    def load_model(self, *_args: Any, **_kwargs: Any) -> None:
        """There is no model to load: vLLM's CPU runner asks every proposer."""

    def propose(
        self, sampled: Sequence[Sequence[int]], lengths: Any, tokens: Any, **_others: Any
    ) -> list[list[int]]:
        """A draft of each row, perhaps empty. `sampled`: what the pass that ended made of each row; `lengths` `[rows]` and `tokens` `[rows,
        context]`: of each, all tokens so far, these among them."""
        if self._runner is None:
            return [[] for _ in sampled]
        now, running = self._clock(), list(self._runner.input_batch.req_ids)
        requests = running[: len(sampled)]
        self._learn(requests, sampled, now)
        for gone in self._lengths.keys() - set(running):
            self._speculator.leave(gone)
            del self._lengths[gone]
        rests = self._speculator.rests(len(requests))
        room: dict[Hashable, int] = dict.fromkeys(requests, 0) if rests else {}
        for row, (request, made) in enumerate(zip(requests, sampled, strict=True)):
            length = int(lengths[row])
            if made and not rests and self._follow(request, tokens[row], length):
                room[request] = self._context_length - length - 1
        self._drafts = dict(self._speculator.propose(room).drafts) if room else {}
        self._positions = len(room) + sum(len(draft.tokens) for draft in self._drafts.values())
        self._began = self._clock() if room else None
        none = DraftTokens()
        return [list(self._drafts.get(request, none).tokens) for request in requests]

    def _learn(self, requests: Sequence[str], sampled: Sequence[Sequence[int]], now: float) -> None:
        """What became of the drafts of the last call, and how long the pass took."""
        if self._began is not None and {r for r, made in zip(requests, sampled, strict=True) if made} <= set(
            self._lengths
        ):  # a pass that also prefills says nothing of those that decode
            self._speculator.passed(self._positions, now - self._began)
        for request, made in zip(requests, sampled, strict=True):
            draft = self._drafts.get(request)
            if draft is not None and made:
                self._speculator.verified(draft, min(len(made) - 1, len(draft.tokens)))

    def _follow(self, request: str, row: Any, length: int) -> bool:
        """Take the tokens of a request that are new here. False for one whose name says no group."""
        known = self._lengths.get(request)
        if known is None:
            name = named(request)
            if name is None:
                return False
            prompt = [int(token) for token in row[: name.prompt]]
            said = [int(token) for token in row[name.prompt : length]]  # what was heard of it is counted once
            self._speculator.enter(request, name.group, name.place, prompt, said)
        else:
            self._speculator.extend(request, [int(token) for token in row[known:length]])
        self._lengths[request] = length
        return True


def expand(
    output: Any, given: Any, ends: Any, replace_from: float, replace_to: float, _most: int = 0
) -> None:
    """`vllm.v1.sample.rejection_sampler.expand_kernel` without Triton: `given[i]` for each place of `output` from `ends[i - 1]` to
    `ends[i]`, with one value replaced.

    vLLM 0.32's own for CPUs (`vllm/utils/cpu_triton_utils.py`, `_expand_kernel_impl`) casts both tensors to int64 and writes into the
    copy. A request's temperature and top-p stay what the memory held, so that all but greedy requests come out wrong.
    """
    start = 0
    for i, end in enumerate(ends.tolist()):
        value = given[i]
        output[start:end] = replace_to if value == replace_from else value
        start = end


def put_right_without_triton() -> None:
    """Register `expand` where vLLM registers its own, which is vLLM's way to give a platform other kernels."""
    from vllm.triton_utils import HAS_TRITON
    from vllm.triton_utils.dispatcher import register_kernels

    if not HAS_TRITON:
        register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": expand})
