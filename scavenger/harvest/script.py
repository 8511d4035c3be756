"""The Slurm job around one engine's script. The script itself, and what a template may name, is `scavenger.jobscript`'s.

Owns how configuration, intent and submission become a `JobSpec`. It holds no secret and no address.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Literal

from scavenger import __version__, jobscript, keys, resources
from scavenger.cluster.model import JobSpec
from scavenger.config import DaemonConfig
from scavenger.errors import ConfigError
from scavenger.harvest.policy import Submit
from scavenger.harvest.sights import comment_of
from scavenger.harvest.spares import BEGIN_S


def read_template(path: Path | None) -> str:
    """The text of a site's job template, or of the shipped one. Raises `ConfigError` when it cannot be read."""
    if path is None:
        return resources.text(jobscript.TEMPLATE)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"harvest.job_template = {str(path)!r}: {error}", f"start from the shipped {jobscript.TEMPLATE}") from error


def log_path(state_dir: Path, intent_id: str) -> Path:
    """Where the job's output goes; each incarnation appends."""
    return state_dir.resolve() / "logs" / f"{intent_id}.log"


def time_limit_s(config: DaemonConfig, intent_id: str) -> float:
    """The job's time limit: the configured one less a part of `time_stagger` of it that its intent draws.

    Engines that started together would end together, and a run would lose them all at once.
    """
    drawn = int.from_bytes(hashlib.sha256(intent_id.encode()).digest()[:4], "big") / 2**32
    return config.harvest.time_limit_s * (1 - config.harvest.time_stagger * drawn)


def job_spec(config: DaemonConfig, template: str, backend: str, uid: str, intent_id: str, submit: Submit) -> JobSpec:
    """The job for one engine. Raises `ConfigError` when the template cannot be rendered."""
    harvest, state_dir = config.harvest, config.daemon.state_dir.resolve()
    kind: Literal["slurm", "local"] = "local" if backend == "local" else "slurm"
    local_dir = config.cluster.local_dir
    cpus = submit.cpus or harvest.cpus_per_engine
    limit_s = time_limit_s(config, intent_id)
    if submit.most_s > 0:
        limit_s = min(limit_s, max(60.0, submit.most_s // 60 * 60))  # the command rounds up, and a reservation does not wait
    time_min_s = harvest.time_min_s * limit_s / harvest.time_limit_s
    script = jobscript.JobScript(
        backend=kind,
        python=harvest.python or sys.executable,
        state_dir=str(state_dir),
        key=str(keys.worker_key_path(state_dir, intent_id)),
        run=submit.run,
        engine=submit.engine,
        omp_threads=cpus,
        local_dir=str(local_dir.resolve()) if local_dir is not None else "",
        container=harvest.container,
        leave=harvest.leave,
        code=__version__,
        pull_mb_per_s=harvest.pull_mb_per_s,
    )
    return JobSpec(
        name=intent_id,
        comment=comment_of(uid, intent_id),
        partition=submit.partition,
        script=jobscript.render(template, script),
        gpus=submit.gpus,
        cpus_per_task=cpus,
        memory_mb=submit.memory_mb or harvest.memory_mb_per_engine,
        gpu_type=harvest.gpu_type,
        time_s=limit_s,
        time_min_s=time_min_s if time_min_s < limit_s else 0.0,
        requeue=True,
        nice=harvest.nice,
        begin_s=BEGIN_S if submit.spare else 0.0,
        nodelist=submit.nodelist,
        exclude=submit.exclude,
        output=str(log_path(state_dir, intent_id)),
        workdir=str(state_dir),
        account=harvest.account,
        qos=harvest.qos,
        wckey=harvest.wckey,
        constraint=harvest.constraint,
    )


def drop_empty_log(state_dir: Path, intent_id: str) -> None:
    """A closed job that wrote nothing leaves no log."""
    log_file = log_path(state_dir, intent_id)
    if log_file.exists() and log_file.stat().st_size == 0:
        log_file.unlink(missing_ok=True)
