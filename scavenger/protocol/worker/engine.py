"""What a worker's session asks of its engine and gets back: one request a lease, new tokens in order. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from scavenger.protocol.messages import SampleKey, Sampling


@dataclass(frozen=True, slots=True)
class Request:
    """One lease's work: go on after `prompt + accepted` until a stop token or until `max_new_tokens` more were sampled.

    `handle` is the worker's own id for the lease. `seed` and `key` name the sample's random stream. An engine with draws of its own
    ("reference") draws the token at position p (0 = first answer token, whichever lease produced it) from (seed, key, p) alone; one
    that only takes a seed a request ("vllm") is given one for (seed, key, number of accepted tokens): `seeds.lease_seed`.
    """

    handle: int
    prompt: tuple[int, ...]
    accepted: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    seed: int
    key: SampleKey


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one request, in order. Equal lengths: `token_ids[i]` was drawn with

    `logprobs[i]`      under the sampling distribution (after temperature, top-k, top-p), and
    `raw_logprobs[i]`  under the raw model (temperature 1, no truncation).

    `finish` is "stop" (the last token is the sampled stop token), "length", or None while it goes on. `error` ends the
    request without a finish: the tokens are refused and the sample is generated elsewhere.
    """

    handle: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    raw_logprobs: tuple[float, ...]
    finish: str | None = None
    error: str | None = None
