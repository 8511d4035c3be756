"""The shape of a small test cluster as data: nodes, GPUs, partitions and how preemption behaves.

Owns the description that the private Slurm (`sandbox`) and the local backend (`local`) are both built from, so that one
layout means the same on either. Knows nothing of processes, files or Slurm's configuration syntax.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from scavenger.cluster.model import PreemptMode
from scavenger.errors import ConfigError

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,62}$")]
#: As in `gres.conf`: "h100", or a MIG slice, "1g.10gb".
GpuType = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]
#: RealMemory of a node: more than any test asks for.
MEMORY_MB = 1_000_000


class PartitionLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One partition. `grace_s` is what a preempted job is given; `max_time_s` 0 means no limit.

    `spread`: a job starts on the node with the most room (Slurm's LLN), so that neighbours are not lost together.
    """

    name: Name
    nodes: tuple[Name, ...]
    priority_tier: Count = 1
    preempt_mode: PreemptMode = PreemptMode.OFF
    grace_s: Seconds = 0.0
    max_time_s: Seconds = 0.0
    spread: bool = False


class NodeLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node that differs from the others (Slurm only)."""

    gpus: Count
    cpus: Annotated[int, msgspec.Meta(ge=2)]
    gpu_type: GpuType = "h100"
    memory_mb: Annotated[int, msgspec.Meta(ge=1)] = MEMORY_MB


class ClusterLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster of equal nodes, but for those in `unlike`. `requeue_delay_s` is how long a requeued job is kept from starting
    again (Slurm itself can go no lower than 6 s; the local backend takes any value)."""

    nodes: tuple[Name, ...]
    partitions: tuple[PartitionLayout, ...]
    gpus: Count = 4
    cpus: Annotated[int, msgspec.Meta(ge=2)] = 64
    gpu_type: GpuType = "h100"
    kill_wait_s: Annotated[float, msgspec.Meta(ge=1)] = 2.0
    message_timeout_s: Annotated[float, msgspec.Meta(ge=2)] = 3.0
    requeue_delay_s: Seconds = 6.0
    cluster_name: Name = "sandbox"
    backup: bool = False  # Slurm: a second slurmctld stands by, and takes over when the first one has been silent for a while
    qos: bool = False  # Slurm (not the local backend) preempts by QOS: `normal` preempts `scavenge`; takes slurmdbd and MariaDB
    accounting: bool = False  # Slurm: slurmdbd and the same two QOS, also where it preempts by partition

    shards: Count = 0  # Slurm: gres/shard of each GPU; 0 = the site has none
    prolog: str = ""  # Slurm: paths of programs that each slurmd runs before and after a job there; "" = none
    epilog: str = ""
    licenses: str = ""  # Slurm: as `Licenses` has it, "matlab:1"
    unlike: dict[Name, NodeLayout] = {}  # Slurm: nodes that differ
    settings: dict[str, str] = {}  # Slurm: lines of slurm.conf, in place of the sandbox's own

    @property
    def has_accounting(self) -> bool:
        return self.qos or self.accounting

    def node(self, name: str) -> NodeLayout:
        """What a node has."""
        return self.unlike.get(name) or NodeLayout(gpus=self.gpus, cpus=self.cpus, gpu_type=self.gpu_type)

    def check(self) -> ClusterLayout:
        """Return self, or raise `ConfigError` naming the partition that cannot be."""
        if unknown := sorted(self.unlike.keys() - set(self.nodes)):
            raise ConfigError(f"unlike: no nodes {unknown}", f"use {', '.join(self.nodes)}")
        if not self.nodes or len(set(self.nodes)) != len(self.nodes):
            raise ConfigError("a layout needs at least one node and distinct node names")
        names = [p.name for p in self.partitions]
        if not names or len(set(names)) != len(names):
            raise ConfigError("a layout needs at least one partition and distinct partition names")
        for part in self.partitions:
            unknown = sorted(set(part.nodes) - set(self.nodes))
            if unknown or not part.nodes:
                raise ConfigError(
                    f"partition {part.name}: unknown or no nodes {unknown}", f"use {', '.join(self.nodes)}"
                )
        return self


def demo_layout(
    *, nodes: int = 4, gpus: int = 4, cpus: int = 64, grace_s: float = 10.0, requeue_delay_s: float = 6.0
) -> ClusterLayout:
    """`reserved` on the first node; `normal` over the others, which takes its GPUs back from `scavenge`."""
    names = tuple(f"node{i}" for i in range(nodes))
    shared = names[1:] or names
    return ClusterLayout(
        nodes=names,
        gpus=gpus,
        cpus=cpus,
        requeue_delay_s=requeue_delay_s,
        partitions=(
            PartitionLayout(name="reserved", nodes=names[:1], priority_tier=100),
            PartitionLayout(name="normal", nodes=shared, priority_tier=10),
            PartitionLayout(
                name="scavenge",
                nodes=shared,
                priority_tier=1,
                preempt_mode=PreemptMode.REQUEUE,
                grace_s=grace_s,
                spread=True,
            ),
        ),
    ).check()


def decode_layout(text: str | bytes) -> ClusterLayout:
    """Parse a layout from JSON. Raises `ConfigError` with the field that does not fit."""
    try:
        return msgspec.json.decode(text, type=ClusterLayout).check()
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"layout: {error}", "see scavenger.cluster.layout.ClusterLayout for the fields"
        ) from error


def encode_layout(layout: ClusterLayout) -> str:
    return msgspec.json.encode(layout).decode()
