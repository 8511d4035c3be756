"""Slurm through its commands: the only place that runs them.

Owns processes, deadlines and the reading of exit statuses. What is run and how it is read is in `commands`. An
observation is three commands whatever the number of jobs.
"""

from __future__ import annotations

import os
import pwd
import re
import secrets
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from scavenger.cluster import commands
from scavenger.cluster.model import ClusterInfo, ClusterView, JobSpec
from scavenger.errors import ClusterError, ClusterUnavailable, SubmitUnknown

# No answer, or a broken one: the controller may be back later.
_UNAVAILABLE = re.compile(r"Unable to contact slurm controller|Connection (refused|reset)|Socket timed out|timed out|"
                          r"Zero Bytes|Communication connection failure|Transport endpoint|backup controller|"
                          r"temporarily unable|Munge|Protocol authentication|Header lengths", re.I)
# sbatch sent its request and then lost the answer: the job may exist.
_ANSWER_LOST = re.compile(r"Socket timed out|Zero Bytes|timed out|Unexpected message|Transport endpoint|"
                          r"Connection reset|Header lengths", re.I)
_GONE = re.compile(r"Invalid job id|already complet(ed|ing)|Job/step already", re.I)
_STEERING = ("SLURM", "SBATCH", "SALLOC", "SQUEUE", "SINFO", "SCANCEL", "SCONTROL")
_JOB_BASE = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "SLURM_CONF")
_CANCEL_BATCH = 500


class SlurmCluster:
    """`port.Cluster` over Slurm's commands.

    `env` is the environment for them (default: this process's, without what an outer Slurm job left in it). `rpc_counts`
    counts the commands run, by name, so that the load we put on the controller can be seen.
    """

    def __init__(self, env: Mapping[str, str] | None = None, timeout_s: float = 20.0) -> None:
        inherited = os.environ if env is None else env
        self._env = {key: value for key, value in inherited.items()
                     if not key.startswith(_STEERING) or key == "SLURM_CONF"}
        self._env["SLURM_TIME_FORMAT"] = "%s"
        self._env["LC_ALL"] = "C.UTF-8"
        self._timeout_s = timeout_s
        self.rpc_counts: Counter[str] = Counter()

    def info(self) -> ClusterInfo:
        return commands.parse_info(self._ask(commands.config_argv()), user=pwd.getpwuid(os.getuid()).pw_name)

    def view(self) -> ClusterView:
        # nodes first: a GPU taken between two commands then shows an owner in the queue; the other order would show a
        # busy GPU that nobody holds
        nodes = commands.parse_nodes(self._ask(commands.nodes_argv()))
        partitions = commands.parse_partitions(self._ask(commands.partitions_argv()))
        mark = "x" + secrets.token_hex(12)  # a leading digit would be read as a width
        jobs = commands.parse_jobs(self._ask(commands.squeue_argv(mark)), mark)
        known = {node.name for node in nodes}
        lost = sorted({name for part in partitions for name in part.nodes} - known)
        if lost:
            raise ClusterUnavailable(f"scontrol show node left out {', '.join(lost[:5])}")
        return ClusterView(observed_at=time.time(), nodes=nodes, jobs=jobs, partitions=partitions)

    def submit(self, spec: JobSpec) -> int:
        argv = commands.sbatch_argv(spec)
        # the job's environment is what we say and a plain base: nothing of the daemon's own leaks into it
        env = {key: self._env[key] for key in _JOB_BASE if key in self._env} | commands.job_environment(spec)
        try:
            done = self._run(argv, env=env, stdin=spec.script)
        except subprocess.TimeoutExpired as error:
            raise SubmitUnknown(f"sbatch gave no answer within {self._timeout_s:.0f} s") from error
        if done.returncode != 0:
            words = _words(done)
            if _ANSWER_LOST.search(words):
                raise SubmitUnknown(f"sbatch: {words}")
            raise _failure("sbatch", words)
        try:
            return commands.parse_submitted(done.stdout)
        except ClusterUnavailable as error:
            raise SubmitUnknown(error.cause) from error

    def cancel(self, job_ids: tuple[int, ...]) -> None:
        for start in range(0, len(job_ids), _CANCEL_BATCH):
            done = self._command(commands.cancel_argv(job_ids[start:start + _CANCEL_BATCH]))
            real = [line for line in done.stderr.splitlines() if line.strip() and not _GONE.search(line)]
            if done.returncode != 0 and real:
                raise _failure("scancel", " ".join(real))

    def requeue(self, job_id: int) -> None:
        self._ask(commands.requeue_argv(job_id))

    def close(self) -> None:
        """Nothing is held between calls."""

    def _ask(self, argv: Sequence[str]) -> str:
        done = self._command(argv)
        if done.returncode != 0:
            raise _failure(argv[0], _words(done))
        return done.stdout

    def _command(self, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        try:
            return self._run(argv, env=self._env)
        except subprocess.TimeoutExpired as error:
            raise ClusterUnavailable(f"{argv[0]} gave no answer within {self._timeout_s:.0f} s") from error

    def _run(self, argv: Sequence[str], *, env: Mapping[str, str], stdin: str = "") -> subprocess.CompletedProcess[str]:
        self.rpc_counts[argv[0]] += 1
        try:
            # errors=replace: others' job names need not be UTF-8, and must not blind us
            return subprocess.run(argv, env=env, input=stdin, capture_output=True, encoding="utf-8", errors="replace",
                                  timeout=self._timeout_s, check=False)
        except FileNotFoundError as error:
            raise ClusterError(f"no {argv[0]} on PATH", "install Slurm's commands, or set cluster.backend = \"local\"") from error


def _words(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join(done.stderr.split()) or f"exit status {done.returncode}"


def _failure(command: str, words: str) -> ClusterError:
    kind = ClusterUnavailable if _UNAVAILABLE.search(words) else ClusterError
    return kind(f"{command}: {words}")
