"""Renders the batch script of a harvested engine. Pure: text in, text out.

Owns what a job template may name. A template sees no secret and no address: only where the worker finds its own key file and the
daemon's state directory. Every value reaches the script through the `quote` filter.
"""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from typing import Literal

import jinja2

from scavenger.errors import ConfigError

TEMPLATE = "scripts/rollout.sbatch.j2"


@dataclass(frozen=True, slots=True)
class JobScript:
    """The template's variables. `key` and `state_dir` are paths on the cluster's shared file system; `local_dir` is the local
    backend's directory (unused on Slurm). `engine` is imported while the daemon is asked, whose answer decides what is built.
    `container`: what stands before the engine's command, or "". `leave`: what the job does on Slurm's notice. `code`: the release that is
    to run, "" for any. `pull_mb_per_s`: what all harvested engines on a node may fetch of weights together; 0 for no bound."""

    backend: Literal["slurm", "local"]
    python: str
    state_dir: str
    key: str
    run: str
    engine: str
    omp_threads: int = 1
    local_dir: str = ""
    container: str = ""
    leave: Literal["requeue", "wait"] = "requeue"
    code: str = ""
    pull_mb_per_s: float = 0.0


def _quote(value: object) -> str:
    text = str(value)
    if "\0" in text or "\n" in text or "\r" in text:
        raise ConfigError(f"{text!r} cannot stand in a job script", "use a name or path on one line")
    return shlex.quote(text)


def _words(value: object) -> str:
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
    environment.filters["words"] = _words
    try:
        script = environment.from_string(template).render(dataclasses.asdict(job))
    except jinja2.TemplateError as error:
        raise ConfigError(f"the job template cannot be rendered: {error}", f"compare it with {TEMPLATE}") from error
    if not script.startswith("#!"):
        raise ConfigError("the job template does not begin with #!", "its first line names the interpreter: #!/bin/bash")
    return script
