"""How a training job's ranks are divided: replicas of the model, the shards of each, and the ranks that train the same samples together.

    rank = replica * shards + shard        rank = data_rank * context + place        all counted from 0

Ranks follow one another on a node, so a replica is made of whole nodes where its ranks fill them, and the ranks of one context group lie on
one node where `context_parallel` divides a node's ranks. Layers are gathered and gradients scattered within a replica, over all its ranks;
gradients are then summed over the replicas, whose parameters so stay the same, bit by bit. The ranks of a context group train the same
micro-batch, each a piece of its tokens (`context`). What leaves the trainer leaves the first replica: the others hold nothing else.

`Division` is arithmetic, and what `init --check` asks; `Mesh` has the groups of torch.distributed and one rank's place in them. Knows no
model, no batch and no MPI.
Boundary: the ranks' division; its first half needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scavenger.config import TrainerSection
from scavenger.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Division:
    """`ranks` in all, `replicas` of the model, `context` ranks for each sample."""

    ranks: int
    replicas: int = 1
    context: int = 1

    @property
    def shards(self) -> int:
        """Ranks of one replica: into so many pieces parameters, gradients and optimizer state are cut."""
        return self.ranks // self.replicas

    @property
    def data_parallel(self) -> int:
        """Micro-batches that are trained at once, each by a context group."""
        return self.ranks // self.context

    def __str__(self) -> str:
        parts = [f"{self.shards} rank{'s' * (self.shards > 1)} share the model"]
        parts += [f"{self.replicas} replicas of it"] if self.replicas > 1 else []
        parts += [f"{self.context} ranks share each sample"] if self.context > 1 else []
        return ", ".join(parts)


def divide(ranks: int, trainer: TrainerSection) -> Division:
    """Raises `ConfigError` where so many ranks cannot be divided so."""
    replicas, context = trainer.replicas, trainer.context_parallel
    if ranks % replicas:
        raise ConfigError(
            f"trainer.replicas = {replicas} does not divide the training job's {ranks} rank(s)",
            f"set it to {_divisors(ranks)}, or start another number of ranks",
        )
    if ranks // replicas % context:
        raise ConfigError(
            f"trainer.context_parallel = {context} does not divide the {ranks // replicas} rank(s) of each replica",
            f"set it to {_divisors(ranks // replicas)}, or start another number of ranks",
        )
    return Division(ranks, replicas, context)


def check_heads(heads: int, context: int) -> None:
    """Raises `ConfigError` where a model's attention heads cannot be dealt out to the ranks of a context group."""
    if heads % context:
        raise ConfigError(
            f"trainer.context_parallel = {context}: the model has {heads} attention heads, which {context} ranks cannot share equally",
            f"set it to {_divisors(heads)}",
        )


def _divisors(number: int) -> str:
    found = [str(one) for one in range(1, number + 1) if number % one == 0]
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
        #: Of FSDP2: one side, or replicas by shards.
        self.sharding: DeviceMesh = world
        if division.replicas > 1:
            sides = (division.replicas, division.shards)
            self.sharding = init_device_mesh(self.device_type, sides, mesh_dim_names=("replica", "shard"))
        #: The ranks that train the same samples as this one; None where it is alone.
        self.context_group: Any = None
        if division.context > 1:
            sides = (division.data_parallel, division.context)
            mesh = init_device_mesh(self.device_type, sides, mesh_dim_names=("data", "context"))
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
        return self.sharding.get_group("shard") if self.division.replicas > 1 else self.sharding.get_group()

    @property
    def publishes(self) -> bool:
        """Whether this rank's shards are those that leave the trainer."""
        return self.rank < self.shards

    @property
    def place(self) -> int:
        """Which piece of each sample's tokens this rank has."""
        return self.rank % self.division.context
