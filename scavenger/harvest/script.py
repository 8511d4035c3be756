"""The Slurm job around one engine's script. The script itself, and what a template may name, is `scavenger.jobscript`'s.

Owns how configuration, intent and submission become a `JobSpec`. It holds no secret and no address.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from scavenger import jobscript, keys, resources
from scavenger.cluster.model import JobSpec
from scavenger.config import DaemonConfig
from scavenger.errors import ConfigError
from scavenger.harvest.policy import Submit
from scavenger.harvest.sights import comment_of


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


def job_spec(config: DaemonConfig, template: str, backend: str, uid: str, intent_id: str, submit: Submit) -> JobSpec:
    """The job for one engine. Raises `ConfigError` when the template cannot be rendered."""
    harvest, state_dir = config.harvest, config.daemon.state_dir.resolve()
    kind: Literal["slurm", "local"] = "local" if backend == "local" else "slurm"
    local_dir = config.cluster.local_dir
    script = jobscript.JobScript(
        backend=kind,
        python=harvest.python or sys.executable,
        state_dir=str(state_dir),
        key=str(keys.worker_key_path(state_dir, intent_id)),
        run=submit.run,
        engine=submit.engine,
        omp_threads=harvest.cpus_per_engine,
        local_dir=str(local_dir.resolve()) if local_dir is not None else "",
    )
    return JobSpec(
        name=intent_id,
        comment=comment_of(uid, intent_id),
        partition=submit.partition,
        script=jobscript.render(template, script),
        gpus=submit.gpus,
        cpus_per_task=harvest.cpus_per_engine,
        memory_mb=harvest.memory_mb_per_engine,
        gpu_type=harvest.gpu_type,
        time_s=harvest.time_limit_s,
        requeue=True,
        nodelist=submit.nodelist,
        exclude=submit.exclude,
        output=str(log_path(state_dir, intent_id)),
        workdir=str(state_dir),
        account=harvest.account,
        qos=harvest.qos,
        constraint=harvest.constraint,
    )
