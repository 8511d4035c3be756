"""What the site's Slurm would say of a run's train.sbatch, told before it is submitted: the last part of `scavenger init --check`.

Owns the reading of the script's directives, and what of Slurm's answers contradicts them. Submits nothing: `sbatch --test-only` is Slurm's
own word on the whole script. Where no Slurm answers nothing is claimed, and that is said.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scavenger.cluster import commands, slurm_text
from scavenger.cluster.choose import short
from scavenger.cluster.model import Node, Partition
from scavenger.errors import ClusterError

DEADLINE_S = 20.0
DIRECTIVE = re.compile(r"^#SBATCH\s+--([a-z-]+)(?:[= ]+(\S+))?", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Asks:
    """What a script asks for; "" and 0: it does not say. `gpus`: of each node."""

    partition: str
    nodes: int
    gpus: int
    gpu_type: str
    ranks: int
    cpus_per_rank: int
    time_s: float


@dataclass(frozen=True, slots=True)
class Finding:
    """`problem`: cause and remedy by line, "" where all is well. `note`: what was seen, or why nothing was."""

    what: str
    problem: str = ""
    note: str = ""
    skipped: bool = False


def asks_of(script: str) -> Asks:
    """Pure. Raises `ClusterError` where a time cannot be read."""
    found = dict(DIRECTIVE.findall(script))
    gpus = found.get("gpus-per-node") or re.sub(r"^.*?gpu(?=:|$)", "", found.get("gres", "").partition(",")[0]).lstrip(":")
    kind, _, number = gpus.rpartition(":")
    nodes = _number(found.get("nodes", "1").partition("-")[0], 1)
    count = _number(number or kind, 0)
    return Asks(
        found.get("partition", ""), nodes, count, kind if number.isdigit() else "", _number(found.get("ntasks", ""), max(1, nodes * count)),
        _number(found.get("cpus-per-task", ""), 1), slurm_text.parse_duration(found["time"]) if "time" in found else 0.0,
    )  # fmt: skip


def _number(text: str, otherwise: int) -> int:
    return int(text) if text.isdigit() else otherwise


def judge(asks: Asks, reserved: int, partitions: Sequence[Partition], nodes: Sequence[Node]) -> Finding:
    """Pure. The first thing for which the job could never start, or would not run as run.toml says. `reserved`: run.toml's engines."""
    problem = _of_run(asks, reserved)
    part = next((part for part in partitions if part.name == asks.partition), None)
    if not problem and asks.partition and part is None:
        has = ", ".join(sorted(part.name for part in partitions)) or "none"
        problem = f"--partition={asks.partition}: this cluster has no such partition\nremedy: in train.sbatch, name one of: {has}"
    if not problem and part is not None:
        problem = _of_partition(asks, part, [node for node in nodes if part.name in node.partitions])
    if problem:
        return Finding("train.sbatch", problem)
    where = f"partition {asks.partition}" if asks.partition else "Slurm's default partition"
    below = [other.name for other in partitions if part and other.nodes & part.nodes and other.priority_tier > part.priority_tier]
    why = f"; LOOK: jobs of {', '.join(sorted(below))} may preempt it, and it goes on from its newest checkpoint" if below else ""
    return Finding("train.sbatch", note=f"{where}, {asks.nodes} x {asks.gpus} GPUs, {asks.ranks} ranks{why}")


def _of_run(asks: Asks, reserved: int) -> str:
    gpus = asks.nodes * asks.gpus
    if gpus and asks.ranks > gpus:
        return f"--ntasks={asks.ranks}, and {gpus} GPUs: each rank needs one of its own\nremedy: in train.sbatch, --ntasks={gpus}"
    if gpus and reserved > gpus:
        return (
            f"reserved.workers = {reserved}, and train.sbatch asks for {gpus} GPUs: each reserved engine needs one\n"
            f"remedy: reserved.workers = {gpus} in run.toml, or more GPUs in train.sbatch"
        )
    return ""


def _of_partition(asks: Asks, part: Partition, inside: Sequence[Node]) -> str:
    if not part.up:
        return f"partition {part.name} is down: nothing starts there\nremedy: ask its admin, or name another in train.sbatch"
    if asks.time_s > part.max_time_s:
        return (
            f"--time asks for {asks.time_s / 3600:g} h, partition {part.name} allows {part.max_time_s / 3600:g} h\n"
            "remedy: a shorter --time in train.sbatch; the job puts itself back and goes on from its newest checkpoint"
        )
    kind = f"gpu:{asks.gpu_type}" if asks.gpu_type else "GPUs"
    fitting = [node for node in inside if node.gpus >= asks.gpus and (not asks.gpus or asks.gpu_type in ("", node.gpu_type))]
    if len(fitting) < asks.nodes:
        has = Counter((node.gpus, node.gpu_type or "without a type") for node in inside)
        have = "; ".join(f"{count} nodes of {gpus} ({kind})" for (gpus, kind), count in sorted(has.items())) or "no nodes"
        return (
            f"--nodes={asks.nodes} with {asks.gpus} {kind} each: partition {part.name} has {len(fitting)} such nodes ({have})\n"
            "remedy: --nodes and --gpus-per-node in train.sbatch, and --ntasks with them; reserved.workers in run.toml"
        )
    cpus = asks.cpus_per_rank * -(-asks.ranks // asks.nodes)
    if sum(node.cpus >= cpus for node in fitting) < asks.nodes:
        most = max(node.cpus for node in fitting)
        return f"{cpus} CPUs a node, and those of {part.name} have {most}\nremedy: a lower --cpus-per-task in train.sbatch"
    return ""


def look(script: Path, reserved: int) -> Iterator[Finding]:
    """Ask Slurm, without submitting anything."""
    if not script.is_file():
        yield Finding("train.sbatch", note="there is none here: not looked at", skipped=True)
        return
    try:
        asks = asks_of(script.read_text(encoding="utf-8"))
    except ClusterError as error:
        yield Finding("train.sbatch", f"{error.cause}\nremedy: --time as Slurm writes it, 2-00:00:00")
        return
    try:
        partitions, nodes = commands.parse_partitions(_ask(commands.partitions_argv())), commands.parse_nodes(_ask(commands.nodes_argv()))
    except ClusterError as error:
        problem = _of_run(asks, reserved)
        yield Finding("train.sbatch", problem, "" if problem else f"not held against Slurm: {short(error.cause)}", not problem)
        return
    found = judge(asks, reserved, partitions, nodes)
    yield found
    if not found.problem:
        yield _tested(script)


def _tested(script: Path) -> Finding:
    """Slurm's own word: accounts, QOS, limits, and whatever its plugins refuse."""
    try:
        said = _ask(["sbatch", "--test-only", str(script)])
    except ClusterError as error:
        cause = short(error.cause)
        return Finding("sbatch --test-only", f"Slurm would refuse train.sbatch: {cause}\nremedy: change what it names in train.sbatch")
    return Finding("sbatch --test-only", note=" ".join(said.split()).removeprefix("sbatch: ")[:200])


def _ask(argv: Sequence[str]) -> str:
    """As the user's own sbatch would run: in this environment. Raises `ClusterError`."""
    try:
        done = subprocess.run(
            argv, env=os.environ | {"LC_ALL": "C.UTF-8"}, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace",
            timeout=DEADLINE_S, check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise ClusterError(f"there is no {argv[0]} on this host's PATH") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{argv[0]} gave no answer within {DEADLINE_S:g} s") from error
    if done.returncode:
        raise ClusterError(" ".join(done.stderr.split()) or f"{argv[0]} ended with status {done.returncode}")
    return done.stdout or done.stderr
