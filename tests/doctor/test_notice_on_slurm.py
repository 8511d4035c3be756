"""What `doctor.rules.preemption` promises holds on a real Slurm: how soon SIGKILL comes, and for how long a
process that ignores SIGTERM stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from scavenger.cluster.layout import ClusterLayout, PartitionLayout
from scavenger.cluster.model import JobSpec, JobState, PreemptMode
from scavenger.cluster.preemption_notice import notice
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm.backend import SlurmCluster
from tests.clusters import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.long]

#: Ignores SIGTERM; says when it came, and again and again that it lives.
STUBBORN = """#!/bin/bash
srun python3 -c '
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: print(time.time(), file=open("{folder}/term", "a"), flush=True))
while True:
    print(time.time(), file=open("{folder}/alive", "a"), flush=True)
    time.sleep(0.05)
'
"""
KILL_WAIT_S, MESSAGE_TIMEOUT_S = 3.0, 4.0
#: Slurm counts whole seconds; and a busy machine is late, as it is to start the others' job.
EARLY_S, LATE_S = 1.0, 6.0


@pytest.mark.parametrize("grace_s", [0.0, 2.0])
def test_a_process_that_ignores_sigterm_stays_as_long_as_was_said(grace_s: float, tmp_path: Path) -> None:
    nodes = ("node0",)
    low = PartitionLayout(
        name="scavenge", nodes=nodes, priority_tier=1, preempt_mode=PreemptMode.REQUEUE, grace_s=grace_s
    )
    layout = ClusterLayout(
        nodes=nodes,
        gpus=1,
        kill_wait_s=KILL_WAIT_S,
        message_timeout_s=MESSAGE_TIMEOUT_S,
        partitions=(PartitionLayout(name="normal", nodes=nodes, priority_tier=10), low),
    )
    with SlurmSandbox(layout) as sandbox:
        cluster = SlurmCluster(sandbox.env)
        cluster.submit(JobSpec("ours", "", "scavenge", STUBBORN.format(folder=tmp_path), gpus=1, workdir="/"))
        wait_for("it runs", (tmp_path / "alive").exists, 60)
        theirs = cluster.submit(
            JobSpec("theirs", "", "normal", "#!/bin/bash\nsleep 60\n", gpus=1, workdir="/")
        )

        def started() -> bool:
            return any(job.job_id == theirs and job.state is JobState.RUNNING for job in cluster.view().jobs)

        observed = notice(grace_s, KILL_WAIT_S, MESSAGE_TIMEOUT_S)
        wait_for("others have the GPU", started, observed.most_s + 60)
        (begin,) = (job.start_time for job in cluster.view().jobs if job.job_id == theirs)
    first_term = float((tmp_path / "term").read_text().splitlines()[0])
    lived_s = float((tmp_path / "alive").read_text().rpartition("\n")[0].splitlines()[-1]) - first_term
    assert lived_s >= observed.least_s - EARLY_S, (lived_s, observed)
    assert lived_s <= observed.most_s + LATE_S, (lived_s, observed)
    assert begin - first_term <= observed.most_s + LATE_S, (begin - first_term, observed)
    print(
        f"grace {grace_s:g}: SIGKILL {lived_s:.1f} s after SIGTERM, others {begin - first_term:.1f} s after it; said {observed}"
    )
