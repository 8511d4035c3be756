"""The processes of a chaos run, found by what they were started with: every command line names the site's own folder."""

from __future__ import annotations

import os
from pathlib import Path

from scavenger.cluster import processes
from scavenger.demo.site import DemoSite
from tests.chaos.choose import Process
from tests.private_postgres import PrivatePostgres


def argv(pid: int) -> list[str]:
    """A process's arguments; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except (FileNotFoundError, ProcessLookupError):
        return []


def variable(pid: int, name: str) -> str:
    """A variable of the environment that a process was started with; "" when there is none."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return next(
        (
            e.partition(b"=")[2].decode(errors="replace")
            for e in entries
            if e.startswith(name.encode() + b"=")
        ),
        "",
    )


def observe(site: DemoSite, run_toml: Path, postgres: PrivatePostgres | None) -> list[Process]:
    """Everything of the site that may be killed now."""
    table = processes.snapshot()
    found: list[Process] = []

    def add(part: str, name: str, pid: int) -> None:
        if pid in table and table[pid].state != "Z":
            found.append(Process(part, name, pid, table[pid].start))

    commands = {pid: argv(pid) for pid in table}
    python = {
        pid: words
        for pid, words in commands.items()
        if os.path.basename(words[0] if words else "").startswith("python")
    }
    for pid, words in python.items():
        module = words[2] if words[1:2] == ["-m"] and len(words) > 2 else ""
        if module == "rollout" and str(site.state_dir) in words:
            job, slot = variable(pid, "SCAVENGER_JOB_ID"), variable(pid, "SCAVENGER_SLOT")
            add(
                "engine",
                f"{words[words.index('--kind') + 1]} {variable(pid, 'SCAVENGER_NODE') or slot} job {job or '-'}",
                pid,
            )
        elif module == "trainer" and str(run_toml) in words:
            add(
                "rank",
                f"rank {variable(pid, 'OMPI_COMM_WORLD_RANK') or variable(pid, 'PMIX_RANK') or '0'}",
                pid,
            )
        elif module == "trainer.launch" and str(run_toml) in words:
            add("launcher", "launcher", pid)
        elif module == "scavenger" and words[3:4] == ["gateway"] and str(run_toml) in words:
            add("gateway", "gateway", pid)
    ranks = {process.pid for process in found if process.part == "rank"}
    for pid, words in python.items():
        if words[1:3] == ["-m", "trainer.algorithms.reward_worker"] and table[pid].ppid in ranks:
            add("rewards", "reward worker", pid)
        elif "trainer.episodes.worker" in words and table[pid].ppid in ranks:
            add("environment", "environment worker", pid)
    add("daemon", f"daemon of generation {site.generation} or later", site.daemon_pid)
    if postgres is not None:
        add("postgres", "postmaster", postgres.pid)
        for pid in postgres.backends():
            add("backend", "backend", pid)
    if site.options.backend == "slurm":
        add("slurmctld", "slurmctld", site.sandbox.controller_pid)
    return found


def is_there(process: Process) -> bool:
    """Whether it is still that process, and not another under the same pid."""
    now = processes.read_proc(process.pid)
    return now is not None and now.start == process.start and now.state != "Z"
