"""Faults of a private Slurm, as a site has them: a node or a controller that is lost, hangs, or comes back."""

from __future__ import annotations

import re
import signal
import time

from scavenger.cluster import processes
from scavenger.cluster.sandbox import controllers
from scavenger.cluster.sandbox.sandbox import SlurmSandbox


def down_node(sandbox: SlurmSandbox, name: str) -> None:
    """Slurm takes the node for lost and requeues its jobs. Its slurmd lives: processes there get TERM, then KILL."""
    sandbox.run("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=sandbox")


def lose_node(sandbox: SlurmSandbox, name: str) -> None:
    """The node as if its power were cut: its jobs' processes are gone with no notice, then Slurm is told."""
    for job_id in sandbox.run(
        "squeue", "-h", "-a", "-w", name, "-t", "RUNNING,COMPLETING", "-o", "%A"
    ).split():
        kill_steps(sandbox, int(job_id))
    down_node(sandbox, name)


def resume_node(sandbox: SlurmSandbox, name: str) -> None:
    """Give a lost node back and wait until its slurmd has answered, about a second; no-op for one that is up."""
    deadline = time.monotonic() + 20
    while True:
        states = _node_states(sandbox, name)
        if {"down", "drain", "drained"} & states:
            sandbox.run("scontrol", "update", f"NodeName={name}", "State=RESUME")
        elif (
            states and not {"not_responding", "completing"} & states
        ):  # a lost job's end may set the node down once more
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"node {name} did not come back: {' '.join(sorted(states)) or 'no such node'}")
        time.sleep(0.05)


def _node_states(sandbox: SlurmSandbox, name: str) -> set[str]:
    """From scontrol: sinfo goes on showing the old state for a moment."""
    found = re.search(r"State=(\S+)", sandbox.run("scontrol", "show", "node", name))
    return {word.strip("*").lower() for word in found[1].split("+")} if found else set()


def kill_steps(sandbox: SlurmSandbox, job_id: int) -> tuple[int, ...]:
    """SIGKILL a job's processes and its slurmstepds; return their pids. Slurm notices later: `down_node` loses the node, too."""
    mine = re.compile(rf"slurmstepd: \[{job_id}\.")
    table = processes.snapshot()
    steps = [
        pid for pid in processes.descendants(sandbox.ready.pid, table) if mine.match(processes.title(pid))
    ]
    return processes.kill_trees(steps)


def freeze_controller(sandbox: SlurmSandbox) -> None:
    """SIGSTOP slurmctld: commands time out, as with a controller that hangs."""
    processes.send([sandbox.controller_pid], signal.SIGSTOP)


def thaw_controller(sandbox: SlurmSandbox) -> None:
    processes.send([sandbox.controller_pid], signal.SIGCONT)


def kill_and_hold(sandbox: SlurmSandbox) -> None:
    """SIGKILL the controller in charge, which stays down until `let_start`: as on a host that lost its power."""
    controllers.hold_path(sandbox.dir).touch()
    processes.send([sandbox.controller_pid], signal.SIGKILL)


def let_start(sandbox: SlurmSandbox) -> None:
    """Controllers that were held down start again. No-op when none is."""
    controllers.hold_path(sandbox.dir).unlink(missing_ok=True)
