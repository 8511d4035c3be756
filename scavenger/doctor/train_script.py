"""Whether the site's Slurm would take a run's train.sbatch, checked before it is submitted: the last part of `scavenger init --check`.

Owns what of Slurm's answers contradicts the script's directives (`directives` reads them). Submits nothing: `sbatch --test-only` is Slurm's
own word on the whole script. Where no Slurm answers nothing is claimed, and that is said.

Boundary: a question to Slurm (`sbatch --test-only`); nothing is submitted.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scavenger.cluster.choose import short
from scavenger.cluster.model import Node, Partition, PreemptMode
from scavenger.cluster.slurm import commands, runner
from scavenger.cluster.slurm.directives import Asks, asks_of
from scavenger.errors import ClusterError, ClusterUnavailable, StartFinding

DEADLINE_S = 20.0


class _Refused(ClusterError):
    """Slurm answered a command with a refusal."""


def judge(
    asks: Asks,
    reserved: int,
    partitions: Sequence[Partition],
    nodes: Sequence[Node],
    preempts_by: str,
    each: int = 1,
) -> StartFinding:
    """Pure. The first thing for which the job could never start, or would not run as run.toml says. `reserved`: run.toml's engines,
    of `each` GPUs.

    `preempts_by`: `ClusterInfo.preempts_by`. Directives that are not read make it a finding that was skipped, unless there is a problem.
    """
    problem = _of_run(asks, reserved, each)
    part = next((part for part in partitions if part.name == asks.partition), None)
    if not problem and asks.partition and part is None and "partition" not in asks.unread:
        has = ", ".join(sorted(part.name for part in partitions)) or "none"
        problem = f"--partition={asks.partition}: this cluster has no such partition\nremedy: in train.sbatch, name one of: {has}"
    if not problem and part is not None:
        problem = _of_partition(asks, part) or _of_nodes(
            asks, part, [node for node in nodes if part.name in node.partitions]
        )
    if problem:
        return StartFinding("train.sbatch", problem)
    where = f"partition {asks.partition}" if asks.partition else "Slurm's default partition"
    unread = f"; not read here: {', '.join(f'--{name}' for name in asks.unread)}" if asks.unread else ""
    note = f"{where}, {_size(asks)}{unread}{_preempted(part, partitions, preempts_by)}"
    return StartFinding("train.sbatch", note=note, skipped=bool(asks.unread))


def _size(asks: Asks) -> str:
    if not asks.sized:
        return "of a size that is not known"
    each = f"{asks.nodes}{' or more' if asks.more_nodes else ''} x {asks.gpus} GPUs"
    return f"{f'{asks.total_gpus} GPUs in all' if asks.total_gpus else each}, {asks.ranks} ranks"


def _preempted(part: Partition | None, partitions: Sequence[Partition], preempts_by: str) -> str:
    """Who may preempt the job, where partitions tell that."""
    if preempts_by == "qos":
        return "; Slurm preempts by QOS here: whose jobs may preempt it no PriorityTier tells, `sacctmgr show qos` does"
    if preempts_by != "partition_prio" or part is None or part.preempt_mode is PreemptMode.OFF:
        return ""
    above = [
        other.name
        for other in partitions
        if other.nodes & part.nodes and other.priority_tier > part.priority_tier
    ]
    return (
        f"; LOOK: jobs of {', '.join(sorted(above))} may preempt it, and it goes on from its newest checkpoint"
        if above
        else ""
    )


def _of_run(asks: Asks, reserved: int, each: int) -> str:
    gpus = asks.all_gpus
    if gpus and asks.ranks > gpus:
        return f"--ntasks={asks.ranks}, and {gpus} GPUs: each rank needs one of its own\nremedy: in train.sbatch, --ntasks={gpus}"
    if gpus and reserved and each > (asks.gpus or gpus):
        return (
            f"reserved.gpus_per_engine = {each}, and train.sbatch asks for {asks.gpus or gpus} GPUs a node: an engine lies on one node\n"
            f"remedy: --gpus-per-node={each} in train.sbatch, or a lower reserved.gpus_per_engine in run.toml"
        )
    fit = asks.gpus // each * asks.nodes if asks.gpus and not asks.more_nodes else gpus // each
    if gpus and reserved > fit:
        wants = "one" if each == 1 else f"{each} of one node"
        return (
            f"reserved.workers = {reserved}, and train.sbatch asks for {gpus} GPUs: each reserved engine needs {wants}\n"
            f"remedy: reserved.workers = {fit} in run.toml, or more GPUs in train.sbatch"
        )
    return ""


def _of_partition(asks: Asks, part: Partition) -> str:
    if not part.up:
        return f"partition {part.name} is down: nothing starts there\nremedy: ask its admin, or name another in train.sbatch"
    if asks.time_s > part.max_time_s:
        return (
            f"--time asks for {asks.time_s / 3600:g} h, partition {part.name} allows {part.max_time_s / 3600:g} h\n"
            "remedy: a shorter --time in train.sbatch; the job puts itself back and goes on from its newest checkpoint"
        )
    return ""


def _of_nodes(asks: Asks, part: Partition, inside: Sequence[Node]) -> str:
    if not asks.sized:
        return ""
    kind = f"gpu:{asks.gpu_type}" if asks.gpu_type else "GPUs"
    each = asks.gpus or min(1, asks.total_gpus)  # of --gpus Slurm gives each node one at least
    fitting = [
        node for node in inside if node.gpus >= each and (not each or asks.gpu_type in ("", node.gpu_type))
    ]
    has = Counter((node.gpus, node.gpu_type or "without a type") for node in inside)
    have = (
        "; ".join(f"{count} nodes of {gpus} ({kind})" for (gpus, kind), count in sorted(has.items()))
        or "no nodes"
    )
    if len(fitting) < asks.nodes:
        return (
            f"--nodes={asks.nodes} with {each} {kind} each: partition {part.name} has {len(fitting)} such nodes ({have})\n"
            "remedy: --nodes and --gpus-per-node in train.sbatch, and --ntasks with them; reserved.workers in run.toml"
        )
    if sum(node.gpus for node in fitting) < asks.total_gpus:
        return f"--gpus={asks.total_gpus}: partition {part.name} has fewer {kind} ({have})\nremedy: a lower --gpus in train.sbatch"
    cpus = 0 if asks.more_nodes else asks.cpus_per_rank * -(-asks.ranks // asks.nodes)
    if sum(node.cpus >= cpus for node in fitting) < asks.nodes:
        most = max(node.cpus for node in fitting)
        return f"{cpus} CPUs a node, and those of {part.name} have {most}\nremedy: a lower --cpus-per-task in train.sbatch"
    return ""


def check(script: Path, reserved: int, each: int = 1) -> Iterator[StartFinding]:
    """Ask Slurm, without submitting anything. `reserved` engines of `each` GPUs are to fit beside the ranks."""
    if not script.is_file():
        yield StartFinding("train.sbatch", note="there is none here: not checked", skipped=True)
        return
    try:
        asks = asks_of(script.read_text(encoding="utf-8"))
    except ClusterError as error:
        remedy = error.remedy or "--time as Slurm writes it, 2-00:00:00"
        yield StartFinding("train.sbatch", f"{error.cause}\nremedy: {remedy}")
        return
    try:
        preempts_by = commands.parse_info(_ask(commands.config_argv()), user="").preempts_by
        partitions, nodes = (
            commands.parse_partitions(_ask(commands.partitions_argv())),
            commands.parse_nodes(_ask(commands.nodes_argv())),
        )
    except ClusterError as error:
        problem = _of_run(asks, reserved, each)
        yield StartFinding(
            "train.sbatch",
            problem,
            "" if problem else f"not held against Slurm: {short(error.cause)}",
            not problem,
        )
        return
    found = judge(asks, reserved, partitions, nodes, preempts_by, each)
    yield found
    if not found.problem:
        yield _tested(script)


@dataclass(frozen=True, slots=True)
class GpuNodes:
    """What Slurm says of the nodes in a partition that have enough GPUs. `types`: GRES types as Slurm names them, sorted; `memory_mb`: of
    the smallest node whose memory the site stated, 0 = not known."""

    types: tuple[str, ...] = ()
    memory_mb: int = 0


#: A node with less was not measured: Slurm's default is 1.
_STATED_MB = 1024


def gpu_nodes(partition: str, gpus: int = 1) -> GpuNodes:
    """Of nodes with so many GPUs at least. Nothing where no Slurm answers."""
    try:
        nodes = commands.parse_nodes(_ask(commands.nodes_argv()))
    except ClusterError:
        return GpuNodes()
    found = [node for node in nodes if partition in node.partitions and node.gpus >= max(1, gpus)]
    types = tuple(sorted({node.gpu_type for node in found if node.gpu_type}))
    return GpuNodes(types, min((n.memory_mb for n in found if n.memory_mb >= _STATED_MB), default=0))


def _tested(script: Path) -> StartFinding:
    """Slurm's own word: accounts, QOS, limits, and whatever its plugins refuse. No answer is no refusal."""
    what = "sbatch --test-only"
    try:
        observed = _ask(["sbatch", "--test-only", str(script)])
    except _Refused as refused:
        return StartFinding(
            what,
            f"Slurm would refuse train.sbatch: {short(refused.cause)}\nremedy: change what it names in train.sbatch",
        )
    except ClusterError as error:
        return StartFinding(what, note=f"not asked: {short(error.cause)}", skipped=True)
    return StartFinding(what, note=" ".join(observed.split()).removeprefix("sbatch: ")[:200])


def _ask(argv: Sequence[str]) -> str:
    """As the user's own sbatch would run: in this environment. Raises `_Refused`, or another `ClusterError` where Slurm did not answer."""
    done = runner.asked(argv, os.environ | {"LC_ALL": "C.UTF-8"}, DEADLINE_S)
    if done.returncode == 0:
        return done.stdout or done.stderr
    failed = runner.failure(argv[0], runner.words(done))
    raise failed if isinstance(failed, ClusterUnavailable) else _Refused(failed.cause)
