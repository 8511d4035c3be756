"""One version of the weights on its way from its holders into an engine: pulled, verified, and cut into tensors.

The worker and the processes of an engine's further nodes fetch alike: each pulls by the weights plane, and hashes every byte against the
manifest before an engine sees it. Adapters bring their base with them.

Boundary: what a version that was pulled consists of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from rollout.engines.base import Weight
from scavenger.errors import WeightsError
from scavenger.protocol import messages
from scavenger.weights import files
from scavenger.weights import manifest as manifests
from scavenger.weights.engine_store import Store
from scavenger.weights.manifest import Manifest
from scavenger.weights.memory import Buffer
from scavenger.weights.pace import LEAST_NBYTES_PER_S, ByteRateLimit

#: Of the shape of a weight that an adapter can be kept beside: [out, in].
MATRIX_SIDES = 2


@dataclass(slots=True)
class Pulled:
    """A version whose every byte was verified, on its way into the engine."""

    weights: messages.UseWeights
    manifest: Manifest
    blob: Buffer
    base: tuple[Manifest, Buffer] | None  # what adapters are merged with
    pull_s: float
    verify_s: float
    chosen: str  # whole or as deltas, and why

    @property
    def nbytes(self) -> int:
        """Bytes that the engine reads to load it, its base's among them."""
        return self.manifest.total_nbytes + (self.base[0].total_nbytes if self.base is not None else 0)

    @property
    def of_base(self) -> Manifest:
        """The weights that adapters are kept beside; of a version without adapters, its own."""
        return self.base[0] if self.base is not None else self.manifest


@dataclass(frozen=True, slots=True)
class WeightsBound:
    """Most bytes that a run's versions take in the memory of another run's process: as much as the base that is there, and adapters of the
    engine's rank for each of its matrices. A tokenizer may come with either."""

    base_nbytes: int
    adapter_nbytes: int

    @classmethod
    def beside(cls, base: Manifest, rank: int) -> WeightsBound:
        sides = sum(sum(tensor.shape) for tensor in base.tensors if len(tensor.shape) == MATRIX_SIDES)
        tokenizer = files.MAX_TOKENIZER_NBYTES
        return cls(base.total_nbytes + tokenizer, rank * sides * max(manifests.ITEMSIZE.values()) + tokenizer)

    def refuse_larger(self, manifest: Manifest) -> None:
        """Raises `WeightsError`. `manifest`: of adapters, of their base, or of a version without adapters."""
        of, most = ("weights", self.base_nbytes)
        if manifest.adapter is not None:
            of, most = ("adapters", self.adapter_nbytes)
        if manifest.total_nbytes > most:
            raise WeightsError(
                f"version {manifest.version} has {manifest.total_nbytes:,} bytes of {of}, and slots that another run lends take {most:,}",
                "publish the base that both runs have, and adapters of lora.rank alone; or set run.share_engines = false",
            )


async def fetch(
    store: Store,
    weights: messages.UseWeights,
    pull_s: float,
    began: float,
    clock: Callable[[], float],
    bound: WeightsBound | None = None,
) -> Pulled:
    """All of the version, verified. Raises `WeightsError`; what arrived until then is kept for the next try. Nothing is asked for, and no
    memory taken, of what is larger than `bound`."""
    manifest, base, verify_s = manifests.decode(weights.manifest), None, 0.0
    if bound is not None:
        bound.refuse_larger(manifest)
        if weights.base is not None:
            bound.refuse_larger(manifests.decode(weights.base.manifest))
    if manifest.adapter is not None:
        base = await store.get_base(manifest, weights, pull_s)
        verify_s = store.verify_s
        weights = msgspec.structs.replace(weights, keep=(*weights.keep, base[0].version))
    blob = await store.get(manifest, weights, pull_s)
    return Pulled(weights, manifest, blob, base, clock() - began, verify_s + store.verify_s, store.chosen)


def longest_s(weights: messages.UseWeights, pull_s: float, pull_nbytes_per_s: float) -> float:
    """Seconds after which `fetch` has ended in any case: each of its pulls has `pull_s`, what its bytes earn, and what the node's bound
    takes."""
    blobs = [weights.manifest, weights.base.manifest if weights.base is not None else b""]
    sizes = [manifests.decode(blob).total_nbytes for blob in blobs if blob]
    bound = ByteRateLimit(pull_nbytes_per_s)
    return sum(pull_s + nbytes / LEAST_NBYTES_PER_S + bound.longest_s(nbytes) for nbytes in sizes)


def views(pulled: Pulled) -> list[Weight]:
    """All weights of the version: its own, or its base's with its adapters merged as they are read. Raises `EngineError`."""
    own = manifests.views_in(pulled.manifest, pulled.blob)
    if pulled.base is None:
        return [*own]
    from rollout.engines import merging  # needs torch, which the engine has loaded by now

    base, blob = pulled.base
    return merging.views(pulled.manifest, own, base, blob.view, blob)
