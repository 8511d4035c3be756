"""What the trainer says that engines must hold of a version of adapters: checksums of its own merge, made by every rank of its own rows.

Owns which rows are merged again for each version and which are known already. Knows no engine, daemon or MPI: `ranks` carries the sums to
rank 0, the manifest states their digest (`manifest.Manifest.merged`), engines compare it with what sits in them (I8).

Nothing is gathered but A, which is rank x in: row i of W0 + scale * B A needs row i of W0 and of B, which FSDP2 gives to one rank, and the
checksum of a tensor is the sum of those of its rows. Weights without an adapter never change: they are summed once.
"""

from __future__ import annotations

import torch

from rollout.engines import checksum
from rollout.engines.checksum import Sum
from trainer.model.learner import Learner


class MergedSums:
    """One rank's share, for all versions of a run."""

    def __init__(self) -> None:
        self._still: dict[torch.dtype, dict[str, Sum]] = {}  # of what has no adapter

    def of(self, learner: Learner, dtype: torch.dtype) -> dict[str, Sum]:
        """Of this rank's rows of every weight as engines are to hold it, rounded to `dtype`. A collective."""
        found: dict[str, Sum] = {}
        for name, rows in learner.merged_rows():
            found[name] = found.get(name, checksum.NOTHING) + checksum.checksum(rows.to(dtype))
        if dtype not in self._still:
            unmerged = [name for name in learner.shapes(base=True) if name not in found]
            still = learner.shards(unmerged, base=True)
            self._still[dtype] = {name: checksum.checksum(rows.to(dtype)) for name, rows in still}
        return found | self._still[dtype]


def digest(shares: list[dict[str, Sum]]) -> bytes:
    """Of what all ranks found together."""
    return checksum.digest({name: checksum.total(share[name] for share in shares) for name in shares[0]})
