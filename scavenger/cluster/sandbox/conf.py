"""Pure: Slurm's configuration text for a private cluster, built from a `ClusterLayout`.

Owns the choice of every Slurm setting of the sandbox. Knows nothing of processes; writes no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scavenger.cluster.layout import ClusterLayout, PartitionLayout


@dataclass(frozen=True, slots=True)
class SandboxLocation:
    """Where a sandbox lives: its folder, host name, user, plugin folder and first of `1 + nodes` consecutive ports; with accounting
    slurmdbd's port, and the next one is the database's."""

    dir: str
    host: str
    user: str
    plugins: str
    port: int
    dbd_port: int = 0


def cred_expire_s(layout: ClusterLayout) -> int:
    """Slurm holds a requeued job back for `cred_expire + 1` seconds.

    Values below 5 are refused by every daemon, which then silently use 120 (measured on 22.05), so 6 s is the floor.
    """
    return max(5, _ceil(layout.requeue_delay_s) - 1)


_GLOBAL = """\
ClusterName={layout.cluster_name}
{controllers}
SlurmctldPort={site.port}
SlurmUser={site.user}
SlurmdUser={site.user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={site.dir}/run/munge.socket,cred_expire={cred_expire}
PluginDir={site.plugins}
StateSaveLocation={site.dir}/state
SlurmdSpoolDir={site.dir}/spool/%n
TmpFS={site.dir}/tmp/%n
SlurmctldPidFile={site.dir}/run/slurmctld.pid
SlurmdPidFile={site.dir}/run/slurmd.%n.pid
SlurmctldLogFile={site.dir}/log/slurmctld.log
SlurmdLogFile={site.dir}/log/slurmd.%n.log
SlurmctldDebug=info
SlurmdDebug=info
LogTimeFormat=iso8601_ms
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
{accounting}
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes={gres_types}
{licenses}
{programs}
SlurmdParameters=config_overrides
ReturnToService=1
JobRequeue=1
KillWait={kill_wait}
MessageTimeout={message_timeout}
MinJobAge=300
SlurmctldTimeout={controller_timeout}
SlurmdTimeout=60
InactiveLimit=0
PreemptType=preempt/{preempt}
PreemptMode=REQUEUE
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
PriorityType=priority/basic
"""
#: Hostnames of the controllers where there are two: each listens on its own host's address only, and so their port may be the same.
CONTROLLER_HOSTS = ("127.0.0.1", "127.0.0.2")
_TWO_CONTROLLERS = "\n".join(
    [*(f"SlurmctldHost={host}" for host in CONTROLLER_HOSTS), "CommunicationParameters=NoCtldInAddrAny"]
)
#: The backup takes over when the first controller was silent for so long.
TAKEOVER_S = 8
_ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={site.dbd_port}
AccountingStoragePass={site.dir}/run/munge.socket
AccountingStorageTRES=gres/gpu
AccountingStorageEnforce=associations,limits,qos"""


def slurm_conf(layout: ClusterLayout, site: SandboxLocation) -> str:
    """`slurm.conf` for this layout. Grace and waits are whole seconds in Slurm: fractions are rounded up."""
    head = _GLOBAL.format(
        layout=layout,
        site=site,
        cred_expire=cred_expire_s(layout),
        kill_wait=_ceil(layout.kill_wait_s),
        message_timeout=_ceil(layout.message_timeout_s),
        preempt="qos" if layout.qos else "partition_prio",
        controllers=_TWO_CONTROLLERS if layout.backup else f"SlurmctldHost={site.host}(127.0.0.1)",
        controller_timeout=TAKEOVER_S if layout.backup else 30,
        gres_types="gpu,shard" if layout.shards else "gpu",
        licenses=f"Licenses={layout.licenses}" if layout.licenses else "",
        programs="\n".join(
            f"{key}={path}" for key, path in (("Prolog", layout.prolog), ("Epilog", layout.epilog)) if path
        ),
        accounting=_ACCOUNTING.format(site=site)
        if layout.has_accounting
        else "AccountingStorageType=accounting_storage/none",
    )
    nodes = [_node(layout, site, i, name) for i, name in enumerate(layout.nodes)]
    parts = [_partition(part, default=part.name == layout.partitions[0].name) for part in layout.partitions]
    return _with(head, layout.settings) + "\n".join(nodes + parts) + "\n"


def _with(head: str, settings: Mapping[str, str]) -> str:
    """The lines of a site in place of our own: Slurm complains of a setting that is there twice."""
    own = [line for line in head.splitlines() if line.partition("=")[0] not in settings]
    return "\n".join([*own, *(f"{key}={value}" for key, value in settings.items())]) + "\n"


def _node(layout: ClusterLayout, site: SandboxLocation, i: int, name: str) -> str:
    node = layout.node(name)
    sockets, cores = (2, node.cpus // 2) if node.cpus % 2 == 0 else (1, node.cpus)
    gres = f" Gres=gpu:{node.gpu_type}:{node.gpus}" if node.gpus else ""
    if layout.shards and node.gpus:
        gres += f",shard:{node.gpus * layout.shards}"
    return (
        f"NodeName={name} NodeHostname={site.host} NodeAddr=127.0.0.1 Port={site.port + 1 + i} CPUs={node.cpus} "
        f"Boards=1 SocketsPerBoard={sockets} CoresPerSocket={cores} ThreadsPerCore=1 RealMemory={node.memory_mb}{gres} "
        "State=UNKNOWN"
    )


def grace_of(layout: ClusterLayout) -> int:
    """GraceTime of the QOS that is preempted: where QOS preempt, that of the partitions says nothing."""
    return max((_ceil(part.grace_s) for part in layout.partitions), default=0)


def gres_conf(layout: ClusterLayout, site: SandboxLocation) -> str:
    """`gres.conf`: Slurm stats each File, and a link to a character device is one."""
    lines = ["AutoDetect=off"]
    for name in layout.nodes:
        node = layout.node(name)
        if node.gpus:
            files = (
                f"{site.dir}/dev/nvidia[0-{node.gpus - 1}]" if node.gpus > 1 else f"{site.dir}/dev/nvidia0"
            )
            lines.append(f"NodeName={name} Name=gpu Type={node.gpu_type} File={files}")
        if node.gpus and layout.shards:
            lines.append(f"NodeName={name} Name=shard Count={node.gpus * layout.shards}")
    return "\n".join(lines) + "\n"


def _partition(part: PartitionLayout, *, default: bool) -> str:
    limit = f"{_ceil(part.max_time_s / 60)}" if part.max_time_s else "INFINITE"
    return (
        f"PartitionName={part.name} Nodes={','.join(part.nodes)} Default={'YES' if default else 'NO'} "
        f"MaxTime={limit} DefaultTime={limit if part.max_time_s else 60} PriorityTier={part.priority_tier} "
        f"PreemptMode={part.preempt_mode} GraceTime={_ceil(part.grace_s)} LLN={'YES' if part.spread else 'NO'} State=UP"
    )


def _ceil(value: float) -> int:
    return int(-(-value // 1))
