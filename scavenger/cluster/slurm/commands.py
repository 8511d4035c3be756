"""Pure: the argv of every Slurm command we run, and the parsing of what it prints.

Text that other users control (job names, comments) may hold anything, separators and newlines included. So `squeue` is
asked to end every field with a fresh random mark that no user could have put there, and each record with a second one;
the output is split on the marks alone. Everything is checked. A record that is short, long or truncated fails the
whole poll with `ClusterUnavailable`, because half a view is worse than none. So does a value that cannot be read in a
field that says whose job it is, its state, its nodes, or what it holds or waits for. In a field that only informs
(`_INFORMS`) such a value makes this field unknown in this record (`Unread`): a release that prints an exit code in
another way must not blind us. Slurm 22.05, 24.11 and 26.05 are read; their answers are recorded in tests/data/slurm.

Knows nothing of processes, clocks or environment variables. Times are asked for as Unix seconds (SLURM_TIME_FORMAT=%s).

Beside nodes and queue: reservations (what one means for harvested engines is `harvest`'s), the topology (optional: with topology/tree the
leaf switches name their nodes, with topology/block the blocks do) and accounting. `sacct -D` prints a row for each life of a job that was
requeued, where `sacct` alone and `squeue` know the last one only. A malformed record fails the observation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from operator import attrgetter

from scavenger.cluster.model import (
    ClusterInfo,
    Job,
    JobLife,
    JobSpec,
    Node,
    NodeHost,
    Partition,
    PreemptMode,
    Qos,
    Reservation,
    Unread,
)
from scavenger.cluster.slurm.text import (
    NOTHING,
    REMEMBERED,
    RequestedTres,
    expand,
    job_gpus,
    node_gpus,
    node_states,
    parse_duration,
    parse_preempt_mode,
    parse_state,
    planned,
    spread,
    text_or_empty,
)
from scavenger.errors import ClusterError, ClusterUnavailable

# squeue -O names. Order is ours; what users and plugins write comes last.
_JOB_FIELDS = (
    "JobID",
    "UserName",
    "Partition",
    "Account",
    "State",
    "RestartCnt",
    "NumNodes",
    "NumCPUs",
    "NumTasks",
    "PriorityLong",
    "SubmitTime",
    "EligibleTime",
    "StartTime",
    "EndTime",
    "TimeLimit",
    "exit_code",
    "tres-alloc",
    "tres-per-job",
    "tres-per-node",
    "tres-per-socket",
    "tres-per-task",
    "NodeList",
    "SchedNodes",
    "Reason",
    "Name",
    "Comment",
)
_NODE_KEYS = (
    "NodeName",
    "CPUAlloc",
    "CPUTot",
    "Gres",
    "RealMemory",
    "AllocMem",
    "State",
    "CfgTRES",
    "AllocTRES",
)
_NUMBER = re.compile(r"-?[0-9]{1,20}")
_SPACE = re.compile(r"\s")


# ---- argv -----------------------------------------------------------------------------------------------------------


def squeue_argv(mark: str) -> list[str]:
    """All jobs of all users, finished ones as long as Slurm lists them. `mark`: random letters and digits, fresh a call."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]{15,63}", mark):
        raise ValueError("the mark must be 16 to 64 letters and digits, a letter first")
    return [
        "squeue",
        "-h",
        "-a",
        "-r",
        "-t",
        "all",
        "-O",
        ",".join(f"{field}:{mark}" for field in _JOB_FIELDS),
    ]


def nodes_argv() -> list[str]:
    return ["scontrol", "-a", "-d", "-o", "show", "node"]


def partitions_argv() -> list[str]:
    return ["scontrol", "-a", "-o", "show", "partition"]


def config_argv() -> list[str]:
    return ["scontrol", "show", "config"]


def version_argv() -> list[str]:
    return ["scontrol", "--version"]  # like every one of them, it wants a slurm.conf even for this


def cancel_argv(job_ids: Sequence[int]) -> list[str]:
    return ["scancel", "--quiet", *(str(_positive("job id", job_id)) for job_id in job_ids)]


def requeue_argv(job_id: int) -> list[str]:
    return ["scontrol", "requeue", str(_positive("job id", job_id))]


def release_argv(job_id: int, node: str) -> list[str]:
    if not node or re.search(r"[\s,=]", node):
        raise ClusterError(f"{node!r} names no single node")
    return [
        "scontrol",
        "update",
        f"JobId={_positive('job id', job_id)}",
        "StartTime=now",
        f"ReqNodeList={_text('node', node)}",
    ]


def sbatch_argv(spec: JobSpec) -> list[str]:
    """`sbatch` for a script on stdin. `spec.gpus` is a node's share, as in `--gres`. Raises `ClusterError` on bad values."""
    for what, text in (("name", spec.name), ("partition", spec.partition)):
        if not text:
            raise ClusterError(f"a job needs a {what}")
    argv = [
        "sbatch",
        "--parsable",
        "--ignore-pbs",  # #PBS and #BSUB lines of a script are comments, as they look: 22.05, 24.11 and 26.05 know it
        f"--job-name={_text('name', spec.name)}",
        f"--partition={_text('partition', spec.partition)}",
        f"--comment={_text('comment', spec.comment)}",
        f"--nodes={_positive('nodes', spec.nodes)}",
        f"--ntasks={_positive('tasks', spec.tasks)}",
        f"--cpus-per-task={_positive('cpus_per_task', spec.cpus_per_task)}",
        "--requeue" if spec.requeue else "--no-requeue",
        "--open-mode=append",
        "--export=ALL",
        f"--output={_text('output', spec.output)}",
    ]
    if spec.gpus:
        kind = f"{_text('gpu_type', spec.gpu_type)}:" if spec.gpu_type else ""
        argv.append(f"--gres=gpu:{kind}{_positive('gpus', spec.gpus)}")
    if spec.memory_mb:
        argv.append(f"--mem={_positive('memory_mb', spec.memory_mb)}M")
    if spec.time_s:
        argv.append(f"--time={format_minutes(spec.time_s)}")
    if spec.time_min_s:
        argv.append(f"--time-min={format_minutes(spec.time_min_s)}")
    if spec.nice:
        argv.append(f"--nice={spec.nice}")
    if spec.begin_s > 0:
        argv.append(f"--begin=now+{math.ceil(spec.begin_s)}")
    lists = (("nodelist", spec.nodelist), ("exclude", spec.exclude))
    argv += [
        f"--{option}={','.join(_text(option, name) for name in names)}" for option, names in lists if names
    ]
    texts = (
        ("chdir", spec.workdir),
        ("account", spec.account),
        ("qos", spec.qos),
        ("wckey", spec.wckey),
        ("constraint", spec.constraint),
    )
    return argv + [f"--{option}={_text(option, value)}" for option, value in texts if value]


def job_environment(spec: JobSpec) -> dict[str, str]:
    """The variables the job asks for, checked: none may steer Slurm's own commands or an MPI launcher."""
    for key, value in spec.environment.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key) or "\0" in value:
            raise ClusterError(f"environment variable {key!r} is not a name, or its value holds a NUL")
        if key.startswith(("SLURM", "SBATCH", "SALLOC", "SQUEUE", "SCANCEL")):
            raise ClusterError(f"environment variable {key} would steer Slurm itself", "use another name")
    return dict(spec.environment)


def _text(what: str, value: str) -> str:
    if re.search(r"[\x00-\x1f\x7f]", value):
        raise ClusterError(f"{what} holds a control character: {value!r}")
    return value


def _positive(what: str, value: int) -> int:
    if value <= 0:
        raise ClusterError(f"{what} must be positive, not {value}")
    return value


def format_minutes(seconds: float) -> str:
    """Slurm's limits count whole minutes; rounded up, so that a job never gets less than it asked for."""
    return str(max(1, int(-(-seconds // 60))))


# ---- answers --------------------------------------------------------------------------------------------------------


def parse_submitted(stdout: str) -> int:
    """The id that `sbatch --parsable` prints ('123' or '123;cluster'). Raises `ClusterUnavailable` on anything else."""
    match = re.fullmatch(r"([0-9]+)(;[^\s;]+)?\s*", stdout)
    if match is None:
        raise ClusterUnavailable(f"sbatch printed no job id: {stdout[:200]!r}")
    return int(match[1])


def parse_version(stdout: str) -> str:
    """'22.05.8' from 'slurm-wlm 22.05.8' (Debian's) or 'slurm 24.11.1'. Raises `ClusterUnavailable` on anything else."""
    match = re.fullmatch(r"\S+ ([0-9]+\.[0-9]+[^\s]*)\s*", stdout)
    if match is None:
        raise ClusterUnavailable(f"scontrol --version printed no version: {stdout[:80]!r}")
    return match[1]


def parse_jobs(stdout: str, mark: str) -> tuple[Job, ...]:
    """Jobs from `squeue_argv(mark)`, sorted by id."""
    fields = stdout.split(mark)
    tail, count = fields.pop(), len(_JOB_FIELDS)
    if tail not in ("", "\n") or len(fields) % count:
        raise ClusterUnavailable(f"squeue's answer is truncated: {len(fields)} fields, {count} to a job")
    jobs = [_job_with_unknowns(fields[start : start + count]) for start in range(0, len(fields), count)]
    return tuple(sorted(jobs, key=attrgetter("job_id")))


def _job(values: Sequence[str]) -> Job:
    """One record of `_JOB_FIELDS`. A site has tens of thousands at each poll: no dict, and no words for errors that do not happen."""
    (
        number,
        user,
        partition,
        account,
        state_text,
        restarts,
        some_nodes,
        some_cpus,
        tasks,
        priority,
        submitted,
        eligible,
        started,
        ended,
        limit,
        status,
        allocated,
        per_job,
        per_node,
        per_socket,
        per_task,
        nodelist,
        scheduled,
        reason,
        name,
        comment,
    ) = values
    job_id = _integer(
        "squeue JobID", number.removeprefix("\n")
    )  # each record but the first begins with the last one's newline
    state, flags = parse_state(state_text)
    n_nodes = _of_job(job_id, "NumNodes", some_nodes.partition("-")[0])
    nodes = () if nodelist in NOTHING else tuple(expand(nodelist))
    gpus = job_gpus(
        RequestedTres(allocated, per_job, per_node, per_task, per_socket),
        n_nodes,
        _of_job(job_id, "NumTasks", tasks),
    )
    return Job(
        job_id=job_id,
        user=user,
        partition=partition,
        account=text_or_empty(account),
        state=state,
        flags=flags,
        reason=text_or_empty(reason),
        name=name,
        comment="" if comment == "(null)" else comment,
        nodes=nodes,
        gpus=gpus,
        gpus_by_node=spread(gpus, nodes),
        n_nodes=n_nodes,
        cpus=_of_job(job_id, "NumCPUs", some_cpus.partition("-")[0]),
        priority=_of_job(job_id, "Priority", priority),
        restart_count=_of_job(job_id, "RestartCnt", restarts),
        submit_time=_time(submitted),
        eligible_time=_time(eligible),
        start_time=_time(started),
        end_time=_time(ended),
        time_limit_s=parse_duration(limit),
        exit_code=_exit_code(status),
        planned=_plan(scheduled),
    )


def _job_with_unknowns(values: Sequence[str]) -> Job:
    """`_job`; what only informs and cannot be read is unknown. Raises `ClusterUnavailable` for all else."""
    try:
        return _job(values)
    except ClusterUnavailable:
        known, unread = list(values), list[Unread]()
        for field, (read, unknown) in _INFORMS.items():
            place = _JOB_FIELDS.index(field)
            try:
                read(values[place])
            except ClusterUnavailable:
                unread.append(Unread(field, values[place]))
                known[place] = unknown
        if not unread:
            raise
        job = _job(known)
        exit_code = None if "exit_code" in dict(unread) else job.exit_code
        return replace(job, unread=tuple(unread), exit_code=exit_code)


def _of_job(job_id: int, field: str, text: str) -> int:
    return (
        int(text)
        if text.isascii() and text.isdecimal() and len(text) < 19
        else _integer(f"squeue job {job_id} {field}", text)
    )


def parse_nodes(stdout: str) -> tuple[Node, ...]:
    """Nodes from `nodes_argv`, sorted by name."""
    return tuple(
        sorted(
            (_node(record) for record in _records("scontrol show node", "NodeName", stdout)),
            key=attrgetter("name"),
        )
    )


def _node(line: str) -> Node:
    row = _pairs(line, _NODE_KEYS, ("GresUsed", "Partitions"))
    name = _node_name(row["NodeName"])
    what = f"node {name!r}"
    states, strange = node_states("State", row["State"])
    gpus = node_gpus(row["Gres"], row.get("GresUsed"), row["CfgTRES"], row["AllocTRES"])
    memory_mb, allocated_mb, unread = _memory(row["RealMemory"], row["AllocMem"])
    parts = row.get("Partitions", "")
    return Node(
        name=name,
        states=states,
        partitions=frozenset(parts.split(",")) - {""},
        gpu_type=gpus.kind,
        gpus=gpus.total,
        gpus_allocated=gpus.used,
        cpus=_integer(f"{what} CPUTot", row["CPUTot"]),
        cpus_allocated=_integer(f"{what} CPUAlloc", row["CPUAlloc"]),
        memory_mb=memory_mb,
        memory_allocated_mb=allocated_mb,
        unread=(*strange, *gpus.unread, *unread),
    )


def parse_node_hosts(stdout: str) -> dict[str, NodeHost]:
    """Where each node lies, from `nodes_argv`. A node of which Slurm says neither name nor address is left out."""
    found = {}
    for record in _records("scontrol show node", "NodeName", stdout):
        words = _pairs(record, ("NodeName",), ("NodeHostName", "NodeAddr"))
        hostname, address = (_told(words.get(key, "")) for key in ("NodeHostName", "NodeAddr"))
        if hostname or address:
            found[_node_name(words["NodeName"])] = NodeHost(hostname, address)
    return found


def _told(text: str) -> str:
    return "" if text in NOTHING else text


def _node_name(text: str) -> str:
    names = expand(text)
    if len(names) != 1:
        raise ClusterUnavailable(f"scontrol show node: {text[:80]!r} names no single node")
    return names[0]


def _memory(real: str, allocated: str) -> tuple[int, int, tuple[Unread, ...]]:
    """A node's memory, what is allocated of it, both in MiB, and what of the two cannot be read.

    Then both are 0: nothing is asked of this node's memory, and it is left to Slurm.
    """
    if _NUMBER.fullmatch(real) and _NUMBER.fullmatch(allocated):
        return int(real), int(allocated), ()
    texts = (("RealMemory", real), ("AllocMem", allocated))
    return 0, 0, tuple(Unread(field, text) for field, text in texts if not _NUMBER.fullmatch(text))


def parse_partitions(stdout: str) -> tuple[Partition, ...]:
    """Partitions from `partitions_argv`, sorted by name."""
    records = _records("scontrol show partition", "PartitionName", stdout)
    parts = (replace(_partition(record), restricted=_restricted(record)) for record in records)
    return tuple(sorted(parts, key=lambda part: part.name))


def _partition(line: str) -> Partition:
    row = _pairs(
        line, ("PartitionName", "GraceTime", "MaxTime", "Nodes", "PriorityTier", "PreemptMode", "State")
    )
    what = f"partition {row['PartitionName']}"
    return Partition(
        name=row["PartitionName"],
        nodes=frozenset(() if row["Nodes"] in NOTHING else expand(row["Nodes"])),
        priority_tier=_integer(f"{what} PriorityTier", row["PriorityTier"]),
        preempt_mode=parse_preempt_mode(row["PreemptMode"]),
        grace_s=float(_integer(f"{what} GraceTime", row["GraceTime"])),
        max_time_s=parse_duration(row["MaxTime"]),
        up=row["State"] == "UP",
    )


def _restricted(line: str) -> bool:
    """Whether only named accounts, groups or QOS may use the partition."""
    allowed = _pairs(line, (), ("AllowGroups", "AllowAccounts", "AllowQos"))
    return any(value not in ("ALL", "") for value in allowed.values())


def parse_info(stdout: str, *, user: str, backend: str = "slurm") -> ClusterInfo:
    """What `scontrol show config` says about versions and preemption."""
    row = dict(re.findall(r"^(\S+) *= (.*?) *$", stdout, re.M))
    try:
        return ClusterInfo(
            name=row["ClusterName"],
            backend=backend,
            version=row["SLURM_VERSION"],
            preempt_type=row["PreemptType"],
            kill_wait_s=_seconds(row["KillWait"]),
            message_timeout_s=_seconds(row["MessageTimeout"]),
            user=user,
            plan_step_s=_plan_step_s(row.get("SchedulerParameters", "")),
            exempt_s=_exempt_s(row.get("PreemptExemptTime", "-1")),
            private=frozenset(row.get("PrivateData", "none").split(",")) - {"none"},
            accounting=row.get("AccountingStorageType", "").endswith("/slurmdbd"),
        )
    except KeyError as error:
        raise ClusterUnavailable(f"scontrol show config has no {error}") from error


def _exempt_s(text: str) -> float:
    return 0.0 if text == "-1" else parse_duration(text)


def _plan_step_s(text: str) -> float:
    found = re.search(r"\bbf_resolution=([0-9]+)", text, re.I)
    step_s = int(found[1]) if found is not None else 0
    return float(step_s) if 1 <= step_s <= 3600 else 60.0  # anything else Slurm does not take either


def _integer(what: str, text: str) -> int:
    value = text.strip()
    if not _NUMBER.fullmatch(value):
        raise ClusterUnavailable(f"{what} is not a number: {text[:100]!r}")
    return int(value)


def _seconds(text: str) -> float:
    match = re.match(r"([0-9]+) sec", text)
    if match is None:
        raise ClusterUnavailable(f"not a time in seconds: {text!r}")
    return float(match[1])


def _time(text: str) -> float:
    """Unix seconds; 0 when Slurm has none ('N/A', 'Unknown')."""
    if text.isascii() and text.isdecimal() and len(text) < 19:
        return float(text)
    return 0.0 if text in NOTHING else float(_integer("a time", text))


@lru_cache(REMEMBERED)
def _exit_code(text: str) -> int:
    """The shell's view (128 + signal) of what squeue prints: a wait status (22.05) or 'STATUS:SIGNAL' (24.11)."""
    if text in NOTHING:
        return 0
    first, colon, second = text.partition(":")
    status = _integer("exit_code", first)
    signum, code = (_integer("exit_code", second), status) if colon else (status & 0x7F, status >> 8 & 0xFF)
    if not (0 <= signum < 128 and 0 <= code < 256 and status >= 0):
        raise ClusterUnavailable(f"not an exit code: {text[:80]!r}")
    return 128 + signum if signum else code


def _plan(text: str) -> tuple[str, ...]:
    return () if text in NOTHING else planned(text)


#: What only informs: how each is read, and what stands for one that is not known (see `Job`).
#: No decision over GPUs, nodes or demand depends on them.
_INFORMS: dict[str, tuple[Callable[[str], object], str]] = {
    "PriorityLong": (partial(_integer, "squeue PriorityLong"), "0"),
    "SubmitTime": (_time, "N/A"),
    "EligibleTime": (_time, "N/A"),  # then it may start at once
    "StartTime": (_time, "N/A"),
    "EndTime": (_time, "N/A"),
    "TimeLimit": (parse_duration, "UNLIMITED"),
    "exit_code": (_exit_code, "N/A"),
    "SchedNodes": (_plan, "(null)"),
}


def _records(what: str, key: str, stdout: str) -> list[str]:
    """Each begins with its key on a line of its own: an admin's comment may hold newlines, and Slurm prints them as they are."""
    if not stdout.endswith("\n"):
        raise ClusterUnavailable(f"{what}: the answer is empty or truncated")
    return [record for record in re.split(rf"^(?={key}=)", stdout, flags=re.M) if record.strip()]


def _pairs(line: str, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, str]:
    """The first value of each key in a one-line record. Free text (OS, Reason, Comment) comes after or is not asked for."""
    found: dict[str, str] = {}
    for pair in line.split(" "):
        key, equals, value = pair.partition("=")
        if equals and (key in required or key in optional) and key not in found:
            found[key] = _SPACE.split(value, 1)[0]
    missing = [key for key in required if key not in found]
    if missing:
        raise ClusterUnavailable(f"a record has no {', '.join(missing)}: {line[:120]!r}")
    return found


_NO_RESERVATIONS = "No reservations in the system"


def reservations_argv() -> list[str]:
    return ["scontrol", "-a", "-o", "show", "reservation"]


def parse_reservations(stdout: str) -> tuple[Reservation, ...]:
    """Reservations that hold whole nodes or parts of them, by name. A floating one, or one of licences alone, has no nodes."""
    lines = [record for record in re.split(r"^(?=ReservationName=)", stdout, flags=re.M) if record.strip()]
    if not stdout.endswith("\n"):
        raise ClusterUnavailable("scontrol show reservation: the answer is empty or truncated")
    if any(line.startswith(_NO_RESERVATIONS) for line in lines):
        return ()
    return tuple(sorted((_reservation(line) for line in lines), key=lambda reservation: reservation.name))


def _reservation(line: str) -> Reservation:
    row = dict(
        reversed(re.findall(r"(?:^| )([A-Za-z]+)=(\S*)", line))
    )  # the first of each counts: a comment, last, may hold anything
    try:
        nodes = frozenset(expand(row["Nodes"])) if row["Nodes"] not in ("", "(null)") else frozenset[str]()
        start, end = float(int(row["StartTime"])), float(int(row["EndTime"]))
        return Reservation(row["ReservationName"], nodes, start, end, "MAINT" in row["Flags"].split(","))
    except (KeyError, ValueError) as error:
        raise ClusterUnavailable(
            f"a reservation's record cannot be read ({error}): {line[:120]!r}"
        ) from error


def topology_argv() -> list[str]:
    return ["scontrol", "show", "topology"]


def parse_topology(stdout: str) -> tuple[tuple[str, str], ...]:
    """(node, switch) in Slurm's order; a node keeps its first. Raises `ClusterUnavailable` on a malformed host list."""
    found: dict[str, str] = {}
    for line in stdout.splitlines():
        row = dict(re.findall(r"(\w+)=(\S*)", line))
        name = row.get("BlockName") or (row.get("SwitchName") if row.get("Level") == "0" else None)
        if name and row.get("Nodes", "(null)") != "(null)":
            for node in expand(row["Nodes"]):
                found.setdefault(node, name)
    return tuple(found.items())


_ACCOUNTING_FIELDS = (
    "JobIDRaw",
    "State",
    "Submit",
    "Start",
    "End",
    "NNodes",
    "NodeList",
    "AllocTRES",
    "JobName",
)
_NO_NODES = NOTHING | {"None assigned"}


def accounting_argv(job_ids: Sequence[int]) -> list[str]:
    """All lives of these jobs, however long ago (`-S`: a site's default may be today), without their steps."""
    if not job_ids or min(job_ids) <= 0:
        raise ValueError(f"not job ids: {job_ids!r}")
    ids = ",".join(str(job_id) for job_id in job_ids)
    return [
        "sacct",
        "-D",
        "-X",
        "-n",
        "-P",
        "-S",
        "1970-01-02",
        "-j",
        ids,
        "-o",
        ",".join(_ACCOUNTING_FIELDS),
    ]


def parse_accounting(stdout: str) -> tuple[JobLife, ...]:
    """Lives by job and start. Raises `ClusterUnavailable` on a record that is not as it was asked for."""
    lives = [_life(line) for line in stdout.split("\n") if line]
    return tuple(sorted(lives, key=lambda life: (life.job_id, life.submit_time, life.start_time)))


def _life(line: str) -> JobLife:
    values = line.split("|", len(_ACCOUNTING_FIELDS) - 1)
    if len(values) != len(_ACCOUNTING_FIELDS):
        raise ClusterUnavailable(f"sacct's answer is malformed: {line[:120]!r}")
    job_id, state, submit, start, end, n_nodes, nodes, tres, name = values
    if not (job_id.isascii() and job_id.isdecimal()):
        raise ClusterUnavailable(f"sacct's answer is malformed: not a job id: {job_id[:40]!r}")
    return JobLife(
        int(job_id),
        name,
        state.split(" ", 1)[0],
        _accounting_time(submit),
        _accounting_time(start),
        _accounting_time(end),
        () if nodes in _NO_NODES else tuple(expand(nodes)),
        job_gpus(
            RequestedTres(tres, "", "", "", ""),
            int(n_nodes) if n_nodes.isascii() and n_nodes.isdecimal() else 0,
            0,
        ),
    )


#: `sacctmgr show qos`: what decides, and then the limits.
_QOS_FIELDS = ("Name", "Preempt", "PreemptMode", "GraceTime", "PreemptExemptTime", "UsageFactor")
_QOS_LIMITS = ("MaxTRESPU", "MaxJobsPU", "MaxSubmitPU", "GrpTRES")
#: Of a QOS, "cluster" is that it has no mode of its own.
_QOS_MODES = {
    "": None,
    "cluster": None,
    "off": PreemptMode.OFF,
    "requeue": PreemptMode.REQUEUE,
    "cancel": PreemptMode.CANCEL,
    "suspend": PreemptMode.SUSPEND,
}


def qos_argv() -> list[str]:
    fields = ",".join(_QOS_FIELDS + _QOS_LIMITS)
    return ["sacctmgr", "--noheader", "--parsable2", "show", "qos", f"format={fields}"]


def parse_qos(stdout: str) -> tuple[Qos, ...]:
    """QOS from `qos_argv`, sorted by name. Raises `ClusterUnavailable` on no record (slurmdbd always has one), and on one that is not as it
    was asked for."""
    found = tuple(sorted(map(_qos, filter(None, stdout.split("\n"))), key=attrgetter("name")))
    if not found:
        raise ClusterUnavailable("sacctmgr shows no QOS")
    return found


def _qos(line: str) -> Qos:
    cells = line.split("|")
    if len(cells) != len(_QOS_FIELDS) + len(_QOS_LIMITS):
        raise ClusterUnavailable(f"sacctmgr's answer is malformed: {line[:120]!r}")
    name, preempts, mode, grace, exempt, factor, *limits = cells
    words = mode.lower().split(",")  # "gang" and "within" may stand beside a mode, and change none
    unknown = [word for word in words if word not in (*_QOS_MODES, "gang", "within")]
    if unknown or not name:
        raise ClusterUnavailable(f"sacctmgr's answer is malformed: QOS {name!r}, PreemptMode {mode[:40]!r}")
    return Qos(
        name,
        frozenset(word for word in preempts.split(",") if word),
        next((_QOS_MODES[word] for word in words if _QOS_MODES.get(word) is not None), None),
        parse_duration(grace or "0"),
        parse_duration(exempt) if exempt else None,
        float(factor) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", factor) else 1.0,
        tuple((key, value) for key, value in zip(_QOS_LIMITS, limits, strict=True) if value),
    )


def _accounting_time(text: str) -> float:
    if text in NOTHING:
        return 0.0
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ClusterUnavailable(f"sacct's answer is malformed: not a time: {text[:40]!r}")
    return float(text)
