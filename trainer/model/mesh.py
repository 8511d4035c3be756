"""How a training job's ranks are divided: replicas of the model, the shards of each, and the ranks that train the same samples together or
cut each layer.

    rank = replica * shards + shard        shard = row * tensor + slice        rank = (data_rank * context + place) * tensor + slice

All are counted from 0. Ranks follow one another on a node, so a replica is made of whole nodes where its ranks fill them, and the ranks of
one tensor group, or of one context group, lie on one node where `tensor_parallel`, or its product with `context_parallel`, divides a node's
ranks. Layers are gathered and gradients scattered within a replica, over all its ranks of one slice; gradients are then summed over the
replicas, whose parameters so stay the same, bit by bit. The ranks of a tensor group compute the same tokens, each with its slice of every
layer (`tensor_parallel`). Those of a context group train the same micro-batch, each a piece of its tokens (`context`). What leaves the
trainer leaves the first replica: the others hold nothing else.

`Division` is arithmetic, and what `init --check` asks; `Mesh` has the groups of torch.distributed and one rank's place in them. Knows no
model, no batch and no MPI.
Boundary: the ranks' division; its first half needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scavenger.config import TrainerSection
from scavenger.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


#: The mesh dimension of the ranks that cut each layer.
TENSOR = "tp"


@dataclass(frozen=True, slots=True)
class Division:
    """`ranks` in all, `replicas` of the model, `context` ranks (or tensor groups) for each sample, `tensor` ranks for each layer."""

    ranks: int
    replicas: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def shards(self) -> int:
        """Ranks of one replica: into so many pieces parameters, gradients and optimizer state are cut."""
        return self.ranks // self.replicas

    @property
    def together(self) -> int:
        """Ranks that train the same micro-batch."""
        return self.context * self.tensor

    @property
    def data_parallel(self) -> int:
        """Micro-batches that are trained at once."""
        return self.ranks // self.together

    def __str__(self) -> str:
        parts = [f"{self.shards} ranks share the model" if self.shards > 1 else "1 rank has the model"]
        parts += [f"{self.replicas} replicas of it"] if self.replicas > 1 else []
        parts += [f"{self.context} ranks share each sample"] if self.context > 1 and self.tensor == 1 else []
        parts += [f"{self.tensor} ranks cut each layer"] if self.tensor > 1 else []
        parts += [f"{self.together} ranks share each sample"] if self.context > 1 and self.tensor > 1 else []
        return ", ".join(parts)


def divide(ranks: int, trainer: TrainerSection) -> Division:
    """Raises `ConfigError` where so many ranks cannot be divided so."""
    replicas, context, tensor = trainer.replicas, trainer.context_parallel, trainer.tensor_parallel
    if ranks % replicas:
        raise ConfigError(
            f"trainer.replicas = {replicas} does not divide the training job's {ranks} rank(s)",
            f"set it to {_divisors(ranks)}, or start another number of ranks",
        )
    each = ranks // replicas
    if each % tensor:
        raise ConfigError(
            f"trainer.tensor_parallel = {tensor} does not divide the {each} rank(s) of each replica",
            f"set it to {_divisors(each)}, or start another number of ranks",
        )
    if each // tensor % context:
        groups = "rank(s)" if tensor == 1 else f"groups of {tensor} ranks (trainer.tensor_parallel)"
        raise ConfigError(
            f"trainer.context_parallel = {context} does not divide the {each // tensor} {groups} of each replica",
            f"set it to {_divisors(each // tensor)}, or start another number of ranks",
        )
    return Division(ranks, replicas, context, tensor)


def check_heads(heads: int, context: int, tensor: int = 1) -> None:
    """Raises `ConfigError` where a model's attention heads, of which a rank has one of `tensor` parts, cannot be dealt out to the ranks of
    a context group."""
    if heads // tensor % context:
        of = f"{heads} attention heads" + (
            f", {heads // tensor} on each rank of a tensor group" if tensor > 1 else ""
        )
        raise ConfigError(
            f"trainer.context_parallel = {context}: the model has {of}, which {context} ranks cannot share equally",
            f"set it to {_divisors(heads // tensor)}",
        )


def check_slices(heads: int, kv_heads: int, vocabulary: int, tensor: int) -> None:
    """Raises `ConfigError` where a model's heads or its vocabulary cannot be cut into so many equal slices."""
    counts = {"attention heads": heads, "key-value heads": kv_heads, "entries in its vocabulary": vocabulary}
    for what, count in counts.items():
        if count % tensor:
            all_fit = [
                number for number in range(1, tensor) if not any(one % number for one in counts.values())
            ]
            raise ConfigError(
                f"trainer.tensor_parallel = {tensor}: the model has {count:,} {what}, which {tensor} ranks cannot share equally",
                f"set it to {_listed(all_fit)}",
            )


def check_nodes(per_node: int, tensor: int) -> None:
    """Raises `ConfigError` where a tensor group would lie over two nodes: its ranks speak to one another several times a layer."""
    if per_node % tensor:
        raise ConfigError(
            f"trainer.tensor_parallel = {tensor} does not divide the {per_node} rank(s) of each node: ranks that cut a layer share one",
            f"set it to {_divisors(per_node)}, or start another number of ranks on each node",
        )


def _divisors(number: int) -> str:
    return _listed([one for one in range(1, number + 1) if number % one == 0])


def _listed(numbers: Sequence[int]) -> str:
    found = [str(one) for one in numbers]
    return " or ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)


class Mesh:
    """One rank's place. Made by all ranks together, of a mesh of all of them with one side."""

    def __init__(self, world: DeviceMesh, division: Division) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        if world.size() != division.ranks:
            raise ValueError(f"{division.ranks} ranks are divided, and the mesh has {world.size()}")
        self.division = division
        self.device_type = world.device_type
        self.rank = int(world.get_rank())
        replicas, tensor = division.replicas, division.tensor
        #: Of FSDP2: one side, or replicas by shards.
        self.sharding: DeviceMesh = world
        #: The ranks that cut each layer with this one; None where each has whole layers.
        self.tensor: DeviceMesh | None = None
        self._replica = world
        if replicas > 1:
            sides: tuple[int, ...] = (replicas, division.shards)
            self.sharding = self._replica = init_device_mesh(
                self.device_type, sides, mesh_dim_names=("replica", "shard")
            )
        if tensor > 1:
            sides = (replicas, division.shards // tensor, tensor)
            mesh = init_device_mesh(self.device_type, sides, mesh_dim_names=("replica", "shard", TENSOR))
            self.tensor = mesh[TENSOR]
            self.sharding = mesh["replica", "shard"] if replicas > 1 else mesh["shard"]
        #: The ranks that train the same samples as this one, of the same slice; None where it is alone.
        self.context_group: Any = None
        if division.context > 1:
            sides = (division.data_parallel, division.context, tensor)
            mesh = init_device_mesh(self.device_type, sides, mesh_dim_names=("data", "context", "slice"))
            self.context_group = mesh.get_group("context")

    @property
    def shards(self) -> int:
        return self.division.shards

    @property
    def shard(self) -> int:
        """Which part of every parameter this rank has."""
        return self.rank % self.shards

    @property
    def shard_group(self) -> Any:
        """The ranks of this rank's replica."""
        return self._replica.get_group("shard") if self.division.replicas > 1 else self._replica.get_group()

    @property
    def publishes(self) -> bool:
        """Whether this rank's shards are those that leave the trainer."""
        return self.rank < self.shards

    @property
    def place(self) -> int:
        """Which piece of each sample's tokens this rank has."""
        return self.rank // self.division.tensor % self.division.context
