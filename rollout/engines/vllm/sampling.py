"""What a request is in vLLM's terms, and what vLLM's output says in ours: a lease's seed, sampling parameters, a chunk of tokens. Pure.

Boundary: between our protocol and vLLM's own types.
"""

from __future__ import annotations

import math
import struct
from hashlib import blake2b
from typing import Any

from scavenger.errors import EngineError, describe
from scavenger.protocol.messages import SampleKey
from scavenger.protocol.worker.events import Delta, Request

_SEED_PERSON = b"scavenger-lease1"  # names this construction; another one must use another name


def lease_seed(seed: int, key: SampleKey, accepted: int) -> int:
    """The seed of one lease, in [0, 2^63 - 1), as `torch.Generator.manual_seed` takes it. `accepted`: tokens accepted before. Pure.

    vLLM's generator starts over with each request. With one seed per sample, a moved sample's next tokens would be drawn from the numbers
    of its first ones; without a seed, every engine would draw the same. So the seed is a hash of the run's seed, the sample's key and
    `accepted`, and no two leases share a stream.
    """
    purpose = key.purpose.encode()
    # Length-prefixed text and fixed-width integers: two different keys never encode to the same bytes.
    data = (
        struct.pack(">I", len(purpose))
        + purpose
        + struct.pack(">qqqqq", seed, key.step, key.prompt, key.index, accepted)
    )
    return int.from_bytes(blake2b(data, digest_size=8, person=_SEED_PERSON).digest(), "big") % (2**63 - 1)


def params_of(request: Request) -> Any:
    """vLLM's sampling parameters of what is left of a sample. Budgets are less what is accepted; the seed is the lease's own.

    Raises `EngineError` for those that vLLM does not take.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    how, accepted = request.sampling, len(request.accepted)
    least = max(0, how.min_tokens - accepted)
    # Where nothing is scaled, cut or forbidden the sampling distribution is the model's, and one logprob is both.
    plain = how.top_p == 1 and how.top_k == 0 and least == 0 and how.temperature in (0, 1)
    try:
        return SamplingParams(
            n=1,
            temperature=how.temperature,
            top_p=how.top_p if how.temperature > 0 else 1.0,
            top_k=how.top_k if how.temperature > 0 else 0,
            seed=lease_seed(request.seed, request.key, accepted),
            max_tokens=request.max_new_tokens,
            min_tokens=min(least, request.max_new_tokens),
            stop_token_ids=list(how.stop_token_ids),
            ignore_eos=True,  # what ends a sample is the run's list, not the config's
            logprobs=0 if plain else 1,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
    except Exception as error:  # of whatever type this release of vLLM refuses them with
        raise EngineError(
            f"vLLM does not take temperature {how.temperature}, top_p {how.top_p}, top_k {how.top_k}: {describe(error)}",
            "temperature must be 0 to 2, top_p above 0",
            quoted=str(error),
        ) from error


def delta_of(handle: int, answer: Any, position: int, *, greedy: bool, raw_column: bool) -> Delta | None:
    """What a chunk of vLLM's output says; None when nothing. A logprob that is not finite ends the request there."""
    ids, found = answer.token_ids, answer.logprobs
    finish = answer.finish_reason
    if finish == "abort":
        return None  # by us: no consumer is left
    if finish is not None and finish not in ("stop", "length"):
        return Delta(handle, (), (), (), error=f"vLLM ended the request: {finish}")
    if not ids:
        return Delta(handle, (), (), (), finish) if finish else None
    width = 2 if raw_column else 1
    used = found.logprobs[::width]
    raw = found.logprobs[1::2] if raw_column else used
    bad = next(
        (
            i
            for i, (x, y) in enumerate(zip(used, raw, strict=True))
            if not (math.isfinite(x) and math.isfinite(y))
        ),
        None,
    )
    if bad is not None:
        return Delta(
            handle, (), (), (), error=f"the logits at answer position {position + bad} are not finite"
        )
    if greedy:
        used = [0.0] * len(ids)  # certain of the arg max
    return Delta(handle, tuple(ids), tuple(used), tuple(raw), finish)
