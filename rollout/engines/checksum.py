"""A checksum of weights that survives how an engine stores them: fused, sliced over ranks, padded with zeros or packed for a kernel.

It is the sum, mod 2^64, of a hash of each element's bits, with zero hashing to zero. The elements of a fused tensor are those of its
parts, those of all ranks' slices are the tensor's, and padding adds nothing; so what the manifest names and what sits in the engine compare
without knowing the engine's layout. Blind to permutations inside one tensor, which no loader makes by accident in one tensor alone:
everything else (a stale, missing, doubled, cut or altered element) changes it. It adds up over rows too: what ranks of a training job find
of their own rows is together that of the whole. Knows torch; knows no engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import blake3
import msgspec
import torch
from torch import Tensor

MASK = (1 << 64) - 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SLICE = {"cpu": 1 << 18}  # elements hashed at a time: temporaries that stay in a core's cache
_MANY = 1 << 22  # elsewhere: they stay below some 100 MB
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
_OTHER = 0xC2B2AE3D27D4EB4F - (1 << 64)


@dataclass(frozen=True, slots=True)
class Sum:
    """Of one tensor, or of parts of it: the checksum, how many elements it covers, and whether each is a number. `value` says nothing where
    one is not: a kernel that is asked for its weights answers with NaN for more elements than those that are."""

    value: int
    numel: int
    finite: bool = True

    def __add__(self, other: Sum) -> Sum:
        return Sum((self.value + other.value) & MASK, self.numel + other.numel, self.finite and other.finite)

    def times(self, copies: int) -> Sum:
        return Sum(self.value * copies & MASK, self.numel * copies, self.finite)

    def agrees(self, other: Sum) -> bool:
        return self.finite == other.finite and (self.value == other.value or not self.finite)


NOTHING = Sum(0, 0)


def total(parts: Iterable[Sum]) -> Sum:
    return sum(parts, NOTHING)


def same(now: Mapping[str, Sum], then: Mapping[str, Sum]) -> bool:
    """Whether every tensor is what it was."""
    return now.keys() == then.keys() and all(of.agrees(then[name]) for name, of in now.items())


def checksum(tensor: Tensor) -> Sum:
    """The checksum of a tensor of any shape and device, floating (-0.0 counts as 0.0) or of bytes."""
    value, finite = 0, True
    flat = tensor.detach().reshape(-1)
    for part in torch.split(flat, _SLICE.get(flat.device.type, _MANY)):
        finite = finite and bool(torch.isfinite(part).all())
        bits = (part + 0.0).view(_BITS[part.element_size()]) if part.is_floating_point() else part
        mixed = bits.to(torch.int64, copy=True).mul_(_ODD)  # wraps, as all arithmetic on int64 does
        mixed.bitwise_xor_(mixed >> 29).mul_(_OTHER)
        value += int(mixed.bitwise_xor_(mixed >> 32).sum())
    return Sum(value & MASK, flat.numel(), finite)


def digest(sums: Mapping[str, Sum]) -> bytes:
    """One hash over the checksums of a version's tensors by the names under which it was published: 32 bytes that two sides can compare."""
    rows = [[name, of.value if of.finite else 0, of.numel, of.finite] for name, of in sorted(sums.items())]
    return blake3.blake3(msgspec.msgpack.encode(rows)).digest()


def sources(parameter: str, published: Iterable[str], packed: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The published tensors that an engine's parameter is made of. `packed`: fused module's name -> names of its parts."""
    known = set(published)
    if parameter in known:
        return (parameter,)
    for fused, parts in packed.items():
        names = tuple(parameter.replace(f".{fused}.", f".{part}.") for part in parts)
        if f".{fused}." in parameter and known.issuperset(names):
            return names
    return ()


def faults(
    published: Mapping[str, Sum],
    ranks: Sequence[Mapping[str, Sum]],
    packed: Mapping[str, Sequence[str]],
    tied: Mapping[str, str],
    copies: Mapping[str, int],
) -> list[str]:
    """What does not hold of an engine's parameters, in words; empty when each holds exactly what was published for it.

    `tied`: a name -> the one under which its tensor was published. `ranks`: by parameter, what each rank holds: slices, the whole (norms),
    a head that others hold too, or, of another stage's layers and another rank's experts, nothing. `copies`: on how many ranks each element
    of a tensor lies, if on more than one; those of an expert lie on one each, also of a bias on what ranks add up: the others have zeros in
    its place.
    """
    findings: list[str] = []
    parameters = dict.fromkeys(parameter for rank in ranks for parameter in rank)
    made_of = {name: sources(tied.get(name, name), published, packed) for name in parameters}
    holders = Counter(name for rank in ranks for name in {name for one in rank for name in made_of[one]})
    for parameter, names in made_of.items():
        if not names:
            findings.append(f"{parameter} is not made of published tensors")
            continue
        held = [rank[parameter] for rank in ranks if parameter in rank]
        # Tied embeddings lie on the first stage and on the last one, where they are two parameters.
        expected = total(
            published[name].times(copies.get(name, 1) * len(held) // holders[name]) for name in names
        )
        if not total(held).agrees(expected):
            findings.append(f"{parameter} does not hold {' + '.join(names)}")
    used = holders.keys()
    return findings + [f"{name} is held by no parameter" for name in sorted(published.keys() - used)]
