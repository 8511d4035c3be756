"""An engine over several nodes of one job: which of them this process is on, and how they find each other. Pure.

    job script: srun, one process a node  --SLURM_PROCID--> place 0: the worker (`rollout.worker`); the others: `rollout.headless`

The first node's process is the worker: it speaks to the daemon, samples come and go there. The others hold their share of the model and
compute as vLLM's core on the first node says (vLLM's own executor over several nodes, without Ray). They know the first node by its address
and by the job's key, which all of them read from the same file.

Owns these facts and vLLM's arguments that follow from them. `node_link` carries what the processes say to each other.

Boundary: facts of the job's nodes; pure.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scavenger.errors import ConfigError

#: Where the first node's process may listen: below what the kernel gives out by itself. A few for each job, as another may be there.
FIRST_PORT, PORTS, TRIED = 20_000, 12_000, 8
_REMEDY = "the job script starts one process a node: srun --nodes=N --ntasks=N --ntasks-per-node=1"


@dataclass(frozen=True, slots=True)
class JobNode:
    """One node of a job whose engine spans `nodes`. `place` 0 is the first. `first`: its address. `ports`: where its process may listen."""

    place: int
    nodes: int
    first: str
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineNodes:
    """What vLLM is told of an engine's nodes. `port`: of its own exchange, on the first node."""

    nodes: int
    place: int
    address: str
    port: int

    def arguments(self) -> dict[str, Any]:
        """As vLLM's `--nnodes --node-rank --master-addr --master-port` are spelled in Python."""
        return {
            "nnodes": self.nodes,
            "node_rank": self.place,
            "master_addr": self.address,
            "master_port": self.port,
            "distributed_executor_backend": "mp",
        }


def ports_of(job_id: int, restart_count: int) -> tuple[int, ...]:
    """Where this incarnation's first node may listen. Those of neighbouring jobs are others."""
    start = (job_id * 7 + restart_count) * TRIED
    return tuple(FIRST_PORT + (start + number) % PORTS for number in range(TRIED))


def of_environment(nodes: int, environment: Mapping[str, str]) -> JobNode:
    """Which node of its job this process is on, as srun says. Raises `ConfigError` where it does not say, or says something else."""
    started, place = (_count(environment, name) for name in ("SLURM_NTASKS", "SLURM_PROCID"))
    if started != nodes or place >= nodes:
        raise ConfigError(
            f"process {place} of {started} of an engine of {nodes} nodes: there is one on each node", _REMEDY
        )
    first = environment.get("SLURM_LAUNCH_NODE_IPADDR", "")
    try:
        ipaddress.IPv4Address(first)
    except ValueError:
        raise ConfigError(
            f"SLURM_LAUNCH_NODE_IPADDR={first!r} is no IPv4 address of the job's first node", _REMEDY
        ) from None
    restarts = _count(environment, "SCAVENGER_RESTART_COUNT")
    return JobNode(place, nodes, first, ports_of(_count(environment, "SCAVENGER_JOB_ID"), restarts))


def _count(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name}={text!r} is not a number", _REMEDY)
    return int(text)
