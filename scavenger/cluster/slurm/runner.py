"""Runs one of Slurm's commands: the only place that does, for the backend, for the doctor and for `scavenger init --check`.

Owns the process, its deadline, and the difference between no answer and a refusal: no answer is raised here, what a command said with its
exit status is returned. Only the environment differs between callers, and that is theirs. What is run and how it is read is in `commands`.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence

from scavenger.cluster.error_kind import CLOCK_REMEDY, ErrorKind, about_clocks, error_kind_of
from scavenger.errors import AccessDenied, ClusterError, ClusterUnavailable

#: How long a command that was killed is waited for.
END_S = 5.0
#: Slurm's word on nodes or partitions that PrivateData hides: of jobs and reservations it just leaves those of others out.
_DENIED = re.compile(r"slurm_load_\w+.*Access/permission denied")
_SEE_ALL = (
    "take `nodes` and `partitions` out of PrivateData in slurm.conf: without them nobody but an operator sees which GPUs are idle "
    "(docs/site.md, Who may see the queue)"
)

Done = subprocess.CompletedProcess[str]


class NotStarted(ClusterUnavailable):
    """There was no process, no memory or no descriptor left for a command: it never ran, and Slurm knows nothing of it."""


def run(
    argv: Sequence[str], env: Mapping[str, str], timeout_s: float, *, stdin: str = "", cwd: str | None = None
) -> Done:
    """Raises `subprocess.TimeoutExpired`, for callers to whom it means more than no answer; else as `asked`."""
    try:
        # errors=replace: others' job names need not be UTF-8, and must not blind us
        process = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            cwd=cwd,
            # Ctrl-C in a terminal goes to the whole group: it is for the daemon, which lets a command end or ends it itself
            process_group=0,
        )
    except FileNotFoundError as error:
        remedy = """install Slurm's commands, or set cluster.backend = "local\""""
        raise ClusterError(f"there is no {argv[0]} on this host's PATH", remedy) from error
    except OSError as error:
        remedy = "raise this user's limits of processes and open files (ulimit -u, -n)"
        raise NotStarted(
            f"{argv[0]} cannot be started: {error.strerror}", remedy, error_kind=ErrorKind.BACKEND
        ) from error
    try:
        out, err = process.communicate(stdin, timeout=timeout_s)
    except OSError as error:
        raise ClusterUnavailable(
            f"{argv[0]} gave no answer: {error.strerror}", error_kind=ErrorKind.BACKEND
        ) from error
    finally:
        _end(process)
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


def asked(argv: Sequence[str], env: Mapping[str, str], timeout_s: float, *, cwd: str | None = None) -> Done:
    """What a command answered, whatever its exit status. Raises `ClusterError` where there is no answer."""
    try:
        done = run(argv, env, timeout_s, cwd=cwd)
    except subprocess.TimeoutExpired as error:
        raise _late(argv[0], timeout_s, error.stderr) from error
    if done.returncode < 0:  # by whatever ended it, not by Slurm: it may answer the next time
        ended_by = signal.Signals(-done.returncode).name
        raise ClusterUnavailable(f"{argv[0]} was ended by {ended_by}", error_kind=ErrorKind.BACKEND)
    return done


def words(done: Done) -> str:
    """A failed command's complaint, in one line."""
    return " ".join(done.stderr.split()) or f"exit status {done.returncode}"


def failure(command: str, complaint: str) -> ClusterError:
    """Of a command that ended with a status: `ClusterUnavailable` where Slurm did not answer it, else it was refused, `AccessDenied` where
    this user may not see what it asks for."""
    error_kind = error_kind_of(complaint)
    said = f"{command}: {explained(complaint)}"
    remedy = CLOCK_REMEDY if about_clocks(complaint) else ""
    if error_kind is None and _DENIED.search(complaint):
        return AccessDenied(said, _SEE_ALL)
    if error_kind is None:
        return ClusterError(said, remedy)
    return ClusterUnavailable(said, remedy, error_kind=error_kind)


def explained(complaint: str) -> str:
    """The complaint, with what it means where that is a clock."""
    clocks = about_clocks(complaint)
    return f"{complaint} ({clocks})" if clocks else complaint


def _end(process: subprocess.Popen[str]) -> None:
    """Leave no command behind, and do not wait for one that the kernel holds (a file system that hangs): Python reaps it later."""
    if process.poll() is None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=END_S)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _late(command: str, timeout_s: float, stderr: bytes | str | None) -> ClusterUnavailable:
    """What it complained of before its time was over says more than that it was slow: with munge down it tries for seconds."""
    said = stderr.decode(errors="replace") if isinstance(stderr, bytes) else stderr or ""
    complaint = " ".join(said.split())
    cause = f"{command} gave no answer within {timeout_s:g} s" + (
        f": {complaint[-300:]}" if complaint else ""
    )
    return ClusterUnavailable(cause, error_kind=error_kind_of(complaint) or ErrorKind.NO_REPLY)
