"""Which cluster backend a configuration means, and whether its partition may be harvested at all.

Owns the choice and its explanation; the backends do the work.
"""

from __future__ import annotations

import re
import shutil
import socket

import structlog

from scavenger.cluster import partition_check as checks
from scavenger.cluster import reach
from scavenger.cluster.local.client import LocalCluster
from scavenger.cluster.model import ClusterInfo
from scavenger.cluster.port import Cluster
from scavenger.cluster.proxy import client
from scavenger.cluster.pyslurm.client import PyslurmCluster, unfit
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.config import DaemonConfig
from scavenger.errors import ClusterError, ClusterUnavailable, ConfigError
from scavenger.host import addresses

log = structlog.get_logger()


def backend(config: DaemonConfig) -> Cluster:
    """The cluster of this configuration. Raises `ConfigError` when it cannot be had, naming the remedy."""
    section = config.cluster
    if is_local(config):
        log.info(
            "backend",
            chosen="local",
            reason="cluster.local_dir is set" if section.backend == "auto" else 'backend = "local"',
        )
        return local(config)
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "no Slurm on this host: sbatch is not on PATH",
            "run this where sbatch works (a login node; perhaps `module load slurm` first). Without Slurm: "
            '`scavenger demo --backend local` to try it, or backend = "local" and local_dir in [cluster]',
        )
    commands = SlurmCluster(timeout_s=section.command_timeout_s, output=section.command_output)
    if section.submit_socket is not None or section.view_socket is not None:
        log.info(
            "backend",
            chosen="slurm",
            reason="cluster.submit_socket or view_socket is set: Slurm's commands, by processes of other users",
            jobs_of=client.jobs_user(config),
        )
        return client.over(config, commands)
    if section.backend == "slurm":
        log.info("backend", chosen="slurm", reason='backend = "slurm": Slurm\'s commands')
        return commands
    eyes, why_not = with_pyslurm(commands, section.command_timeout_s)
    if eyes is not None:
        log.info("backend", chosen="pyslurm", reason=f"pyslurm {eyes.start()} is that of this Slurm")
        return eyes
    if section.backend == "pyslurm":
        remedy = 'build the one for this Slurm (scripts/build-pyslurm), or set backend = "auto"'
        raise ConfigError(f'backend = "pyslurm": {why_not}', remedy)
    log.info("backend", chosen="slurm", reason=f"Slurm's commands, without pyslurm: {why_not}")
    return commands


def with_pyslurm(commands: SlurmCluster, timeout_s: float) -> tuple[PyslurmCluster | None, str]:
    """A backend whose pyslurm is that of this Slurm, was imported in its process and reads this site; or None, and why not."""
    try:
        why_not = unfit(commands.version())
    except ClusterError as error:
        why_not = f"the version of Slurm's commands is not known: {error.cause}"
    if why_not:
        return None, why_not
    cluster = PyslurmCluster(commands, timeout_s)
    try:
        cluster.start()
        why_not = cluster.unreadable()
    except ClusterUnavailable as error:
        why_not = error.cause
    if why_not:
        cluster.close()
        return None, why_not
    return cluster, ""


def is_local(config: DaemonConfig) -> bool:
    """Whether the configuration means a cluster of this machine's own processes, and no Slurm."""
    section = config.cluster
    return section.backend == "local" or (section.backend == "auto" and section.local_dir is not None)


def local(config: DaemonConfig) -> Cluster:
    """Raises `ConfigError` where no directory is named. Whether a server runs there shows at the first request."""
    section = config.cluster
    if section.local_dir is None:
        remedy = "name the directory of a running `python -m scavenger.cluster.local.client serve`"
        raise ConfigError('backend = "local" needs cluster.local_dir', remedy)
    return LocalCluster(section.local_dir, timeout_s=section.command_timeout_s)


def preflight(config: DaemonConfig, cluster: Cluster) -> None:
    """Refuse a harvest partition whose jobs could ever block others, and an address at which its nodes find no daemon.

    Raises `ConfigError`.
    """
    if config.harvest.enabled:
        if (engines := client.engines_user_of(config)) is not None:
            engines.check()
        harvest, info = config.harvest, answer(cluster)
        partitions = cluster.view().partitions
        checks.check(info, partitions, harvest.partition, harvest.qos)
        if not is_local(config):
            inside = next(part.nodes for part in partitions if part.name == harvest.partition)
            hosts = SlurmCluster(
                timeout_s=config.cluster.command_timeout_s, output=config.cluster.command_output
            ).node_hosts()
            here = socket.gethostname()
            d, own = config.daemon, addresses.own(host.address for host in hosts.values())
            others = reach.elsewhere(hosts, inside, here, own)
            reach.check(d.listen, d.advertise, here, others)
            if why := reach.doubted(d.listen, d.advertise, here, others):
                log.warning("daemon address", reason=why, remedy=f"without one: {reach.REMEDY}")


def answer(cluster: Cluster) -> ClusterInfo:
    """What the cluster says of itself. Raises `ConfigError` with a remedy where its commands cannot work on this host."""
    try:
        return cluster.info()
    except ClusterUnavailable:
        raise
    except ClusterError as error:
        remedy = "try `scontrol ping`: this needs a host with slurm.conf (or SLURM_CONF) and a controller that it reaches"
        raise ConfigError(
            f"the cluster's commands do not work on this host: {short(error.cause)}", error.remedy or remedy
        ) from error


def short(cause: str) -> str:
    """The last complaint of a command that says several, each after "error:" or "fatal:": the one that it gave up for."""
    return re.split(r"\b(?:error|fatal): ", cause)[-1].strip() or cause
