"""The Slurm job around one engine's script. The script itself, and what a template may name, is `scavenger.harvest.execute.job_script`'s.

Owns how configuration, intent and submission become a `JobSpec`. It holds no secret and no address.

Renders the batch script of a harvested engine. Pure: text in, text out.

Owns what a job template may name. A template sees no secret and no address: only where the worker finds its own key file and the
daemon's state directory. Every value reaches the script through the `quote` filter.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jinja2

from scavenger import __version__, resources
from scavenger.cluster.model import JobSpec
from scavenger.config import DaemonConfig
from scavenger.errors import ConfigError
from scavenger.harvest.decide.actions import Submit, comment_of
from scavenger.harvest.decide.standby import BEGIN_S
from scavenger.protocol import keys

TEMPLATE = "scripts/rollout.sbatch.j2"


@dataclass(frozen=True, slots=True)
class JobScript:
    """The template's variables. `key` and `state_dir` (where the daemon announces itself: its public folder for engines
    of another user) are paths on the cluster's shared file system;
    `local_dir` is the local backend's directory (unused on Slurm). `engine` is imported while the daemon is
    asked, whose answer decides what is built. `container`: what stands before the engine's command, or "".
    `after_drain`: what the job does on Slurm's notice. `code`: the release that is to run, "" for any.
    `pull_mb_per_s`: what all harvested engines on a node may fetch of weights together; 0 for no bound. `nodes`: of the
    engine; its command runs once on each. `environment`: by which file an environment worker, which is in the engine's place, joins its
    run; "": it is an engine."""

    backend: Literal["slurm", "local"]
    python: str
    state_dir: str
    key: str
    run: str
    engine: str
    omp_threads: int = 1
    local_dir: str = ""
    container: str = ""
    after_drain: Literal["requeue", "wait"] = "requeue"
    code: str = ""
    pull_mb_per_s: float = 0.0
    nodes: int = 1
    environment: str = ""


def _quote(value: object) -> str:
    text = str(value)
    if "\0" in text or "\n" in text or "\r" in text:
        raise ConfigError(f"{text!r} cannot stand in a job script", "use a name or path on one line")
    return shlex.quote(text)


def shell_words(value: object) -> str:
    """A command line of the configuration as the shell's words, each quoted: nothing in it is run or expanded."""
    try:
        return " ".join(_quote(word) for word in shlex.split(str(value)))
    except ValueError as error:
        raise ConfigError(f"{value!r} cannot be split into words: {error}", "close its quotes") from error


def render(template: str, job: JobScript) -> str:
    """The whole batch script. Raises `ConfigError` when the template cannot be rendered or names a variable that does not exist."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
        # A shell says ${#array[@]}; Jinja's own {# would begin a comment there.
        comment_start_string="{##",
        comment_end_string="##}",
    )
    environment.filters["quote"] = _quote
    environment.filters["words"] = shell_words
    try:
        script = environment.from_string(template).render(dataclasses.asdict(job))
    except jinja2.TemplateError as error:
        raise ConfigError(
            f"the job template cannot be rendered: {error}", f"compare it with {TEMPLATE}"
        ) from error
    if not script.startswith("#!"):
        raise ConfigError(
            "the job template does not begin with #!", "its first line names the interpreter: #!/bin/bash"
        )
    return script


def read_template(path: Path | None) -> str:
    """The text of a site's job template, or of the shipped one. Raises `ConfigError` when it cannot be read."""
    if path is None:
        return resources.text(TEMPLATE)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"harvest.job_template = {str(path)!r}: {error}", f"start from the shipped {TEMPLATE}"
        ) from error


def log_path(state_dir: Path, intent_id: str) -> Path:
    """Where the job's output goes; each incarnation appends."""
    return state_dir.resolve() / "logs" / f"{intent_id}.log"


def time_limit_s(config: DaemonConfig, intent_id: str) -> float:
    """The job's time limit: the configured one less a part of `time_stagger` of it that its intent draws.

    Engines that started together would end together, and a run would lose them all at once.
    """
    drawn = int.from_bytes(hashlib.sha256(intent_id.encode()).digest()[:4], "big") / 2**32
    return config.harvest.time_limit_s * (1 - config.harvest.time_stagger * drawn)


def job_spec(
    config: DaemonConfig, template: str, backend: str, uid: str, intent_id: str, submit: Submit
) -> JobSpec:
    """The job for one engine. Raises `ConfigError` when the template cannot be rendered."""
    harvest, home = config.harvest, config.engines_home
    there = config.daemon.state_dir if config.cluster.submit_socket is None else config.daemon.public_dir
    assert there is not None  # by the configuration
    kind: Literal["slurm", "local"] = "local" if backend == "local" else "slurm"
    if kind == "local" and submit.nodes > 1:
        raise ConfigError(
            f"an engine of {submit.nodes} nodes for run {submit.run}: the local backend starts a job's processes on one",
            "use Slurm, or set run.nodes_per_engine = 1",
        )
    local_dir = config.cluster.local_dir
    cpus = submit.cpus or harvest.cpus_per_engine
    limit_s = time_limit_s(config, intent_id)
    if submit.most_s > 0:
        limit_s = min(
            limit_s, max(60.0, submit.most_s // 60 * 60)
        )  # the command rounds up, and a reservation does not wait
    time_min_s = harvest.time_min_s * limit_s / harvest.time_limit_s
    script = JobScript(
        backend=kind,
        python=harvest.python or sys.executable,
        state_dir=str(there.resolve()),
        key=str(keys.worker_key_path(home, intent_id)),
        run=submit.run,
        engine=submit.engine,
        omp_threads=cpus,
        local_dir=str(local_dir.resolve()) if local_dir is not None else "",
        container="" if submit.environment else harvest.container,
        after_drain=harvest.after_drain,
        code=__version__,
        pull_mb_per_s=harvest.pull_mb_per_s,
        nodes=submit.nodes,
        environment=submit.environment,
    )
    return JobSpec(
        name=intent_id,
        comment=comment_of(uid, intent_id, submit.run, submit.owner, harvest.contact),
        partition=submit.partition,
        script=render(template, script),
        gpus=submit.gpus,
        nodes=submit.nodes,
        tasks=submit.nodes,
        cpus_per_task=cpus,
        memory_mb=submit.memory_mb or harvest.memory_mb_per_engine,
        gpu_type="" if submit.environment else harvest.gpu_type,
        time_s=limit_s,
        time_min_s=time_min_s if time_min_s < limit_s else 0.0,
        requeue=True,
        nice=harvest.nice,
        begin_s=BEGIN_S if submit.standby else 0.0,
        nodelist=submit.nodelist,
        exclude=submit.exclude,
        output=str(log_path(home, intent_id)),
        workdir=str(home),
        account=of_owner(harvest.account, submit.owner),
        qos=harvest.qos,
        wckey=of_owner(harvest.wckey, submit.owner),
        constraint=harvest.constraint,
    )


def of_owner(pattern: str, owner: str) -> str:
    """An account or wckey with the owner's name for `{owner}`; "" where it asks for an owner and the run has none."""
    return pattern.replace("{owner}", owner) if owner or "{owner}" not in pattern else ""


def drop_empty_log(state_dir: Path, intent_id: str) -> None:
    """A closed job that wrote nothing leaves no log."""
    log_file = log_path(state_dir, intent_id)
    if log_file.exists() and log_file.stat().st_size == 0:
        log_file.unlink(missing_ok=True)
