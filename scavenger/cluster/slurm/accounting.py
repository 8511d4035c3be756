"""Pure: the argv of `sacct` for the lives of jobs, and the parsing of what it prints.

`sacct -D` prints a row for each life of a job that was requeued, where `sacct` alone and `squeue` know the last one only. The name, which
users choose, comes last. Times are asked for as Unix seconds (SLURM_TIME_FORMAT=%s). Knows nothing of processes or clocks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from scavenger.cluster.model import JobLife
from scavenger.cluster.slurm.hostlist import expand
from scavenger.cluster.slurm.text import NOTHING, Asked, job_gpus
from scavenger.errors import ClusterUnavailable

_FIELDS = ("JobIDRaw", "State", "Submit", "Start", "End", "NNodes", "NodeList", "AllocTRES", "JobName")
_NO_NODES = NOTHING | {"None assigned"}


def argv(job_ids: Sequence[int]) -> list[str]:
    """All lives of these jobs, however long ago (`-S`: a site's default may be today), without their steps."""
    if not job_ids or min(job_ids) <= 0:
        raise ValueError(f"not job ids: {job_ids!r}")
    ids = ",".join(str(job_id) for job_id in job_ids)
    return ["sacct", "-D", "-X", "-n", "-P", "-S", "1970-01-02", "-j", ids, "-o", ",".join(_FIELDS)]


def parse(stdout: str) -> tuple[JobLife, ...]:
    """Lives by job and start. Raises `ClusterUnavailable` on a record that is not as it was asked for."""
    lives = [_life(line) for line in stdout.split("\n") if line]
    return tuple(sorted(lives, key=lambda life: (life.job_id, life.submit_time, life.start_time)))


def _life(line: str) -> JobLife:
    values = line.split("|", len(_FIELDS) - 1)
    if len(values) != len(_FIELDS):
        raise ClusterUnavailable(f"sacct's answer is malformed: {line[:120]!r}")
    job_id, state, submit, start, end, n_nodes, nodes, tres, name = values
    if not job_id.isdecimal():
        raise ClusterUnavailable(f"sacct's answer is malformed: not a job id: {job_id[:40]!r}")
    return JobLife(
        int(job_id),
        name,
        state.split(" ", 1)[0],
        _time(submit),
        _time(start),
        _time(end),
        () if nodes in _NO_NODES else tuple(expand(nodes)),
        job_gpus(Asked(tres, "", "", "", ""), int(n_nodes) if n_nodes.isdecimal() else 0, 0),
    )


def _time(text: str) -> float:
    if text in NOTHING:
        return 0.0
    if not re.fullmatch(r"\d{1,18}", text):
        raise ClusterUnavailable(f"sacct's answer is malformed: not a time: {text[:40]!r}")
    return float(text)
