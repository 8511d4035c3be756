"""Which cluster backend a configuration means, and whether its partition may be harvested at all.

Owns the choice and its explanation; the backends do the work.
"""

from __future__ import annotations

import re
import shutil

import structlog

from scavenger.cluster.local import LocalCluster
from scavenger.cluster.model import ClusterInfo
from scavenger.cluster.port import Cluster
from scavenger.cluster.slurm import SlurmCluster
from scavenger.config import DaemonConfig
from scavenger.errors import ClusterError, ClusterUnavailable, ConfigError
from scavenger.harvest import preflight as checks

log = structlog.get_logger()


def backend(config: DaemonConfig) -> Cluster:
    """The cluster of this configuration. Raises `ConfigError` when it cannot be had, naming the remedy."""
    wanted = config.cluster.backend
    slurm = shutil.which("sbatch") is not None
    if wanted == "auto":
        wanted = "local" if config.cluster.local_dir is not None else "slurm"
        log.info("backend", chosen=wanted, reason="cluster.local_dir is set" if wanted == "local" else "no cluster.local_dir is set")
    if wanted == "slurm":
        if not slurm:
            raise ConfigError(
                "no Slurm on this host: sbatch is not on PATH",
                'run the daemon on a login node, or set backend = "local" and local_dir in [cluster]',
            )
        return SlurmCluster(timeout_s=config.cluster.command_timeout_s)
    if config.cluster.local_dir is None:
        remedy = "name the directory of a running `python -m scavenger.cluster.local serve`"
        raise ConfigError('backend = "local" needs cluster.local_dir', remedy)
    return LocalCluster(config.cluster.local_dir, timeout_s=config.cluster.command_timeout_s)


def preflight(config: DaemonConfig, cluster: Cluster) -> None:
    """Refuse a harvest partition whose jobs could ever block others. Raises `ConfigError`."""
    if config.harvest.enabled:
        harvest, info = config.harvest, answer(cluster)
        checks.check(info, cluster.view().partitions, harvest.partition, harvest.qos)


def answer(cluster: Cluster) -> ClusterInfo:
    """What the cluster says of itself. Raises `ConfigError` with a remedy where its commands cannot work on this host."""
    try:
        return cluster.info()
    except ClusterUnavailable:
        raise
    except ClusterError as error:
        remedy = "try `scontrol ping`: this needs a host with slurm.conf (or SLURM_CONF) and a controller that it reaches"
        raise ConfigError(f"the cluster's commands do not work on this host: {_short(error.cause)}", error.remedy or remedy) from error


def _short(cause: str) -> str:
    """The last complaint of a command that says several, each after "error:" or "fatal:": the one that it gave up for."""
    return re.split(r"\b(?:error|fatal): ", cause)[-1].strip() or cause
