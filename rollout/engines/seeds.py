"""The seed of one lease, for engines that take a seed a request. Pure.

An engine's own generator starts over with each request, so a seed named by the sample alone would draw a moved sample's tokens from the
numbers that its first ones were drawn from; and without a seed every engine draws the same ones. A lease's seed is therefore a hash of the
run's seed, the sample's key and how many tokens were accepted before: no two leases share a stream, whichever engines serve them.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

from scavenger.wire import SampleKey

_PERSON = b"scavenger-lease1"  # names this construction; another one must use another name


def lease_seed(seed: int, key: SampleKey, accepted: int) -> int:
    """In [0, 2^63 - 1): what `torch.Generator.manual_seed` and every engine that we know take."""
    purpose = key.purpose.encode()
    # Length-prefixed text and fixed-width integers: two different keys never encode to the same bytes.
    data = struct.pack(">I", len(purpose)) + purpose + struct.pack(">qqqqq", seed, key.step, key.prompt, key.index, accepted)
    return int.from_bytes(blake2b(data, digest_size=8, person=_PERSON).digest(), "big") % (2**63 - 1)
