"""How long the harvester's own work takes on a large site.

    python -m benchmarks.scale policy  [--nodes 10000] [--jobs 100000]     the pure decision alone, goal 200 ms
    python -m benchmarks.scale cycle   [--nodes 1000]  [--pending 10000]   one observation and decision on a private Slurm, goal 1 s
    python -m benchmarks.scale rest    [--nodes 1000]  [--minutes 12]      a daemon with nothing to do: goals 1 % of a core, 2 RPCs a minute

`policy` makes a full queue (a third of the jobs run, the rest wait, half of these for GPUs that other users' jobs or ours have) with
hundreds of engines of ours, and asks `harvest.decide.decide` some times: the least and the median, in CPU time of this process. Every job
that waits has waited long enough for us to leave: the most work that such a site can make. `cycle` starts a real
slurmctld whose nodes are CLOUD nodes (they cost nothing and never run anything), fills its queue with jobs of other users that wait, and
times `Cluster.view`, the tracker and the decision apart, as the daemon does them; and what of that was CPU time, of this process and of the
Slurm commands that it ran, which a busy machine does not change. Both look for garbage as seldom as the daemon (`daemon.process.tune`).
`rest` starts `scavenger daemon` beside such a controller, as a site would, and asks the kernel for its CPU time and the controller
(`sdiag`) for the requests that it got meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pwd
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from scavenger import toml
from scavenger.cluster.layout import ClusterLayout, PartitionLayout
from scavenger.cluster.model import ClusterView, Job, JobState, Node, Partition, PreemptMode
from scavenger.cluster.sandbox import conf as sandbox_conf
from scavenger.cluster.sandbox import sandbox
from scavenger.cluster.sandbox.ports import listens, take_ports
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.daemon import process
from scavenger.harvest.decide.actions import (
    Caps,
    HarvestLimits,
    Headroom,
    JobLimits,
    JobPlacement,
    OurJob,
    YieldLimits,
)
from scavenger.harvest.decide.decide import decide
from scavenger.harvest.decide.free_capacity import gpu_use
from scavenger.harvest.track.node_health import HealthRules
from scavenger.harvest.track.tracker import Tracker, TrackerRules
from scavenger.policy.fleet_size import Demand
from scavenger.protocol import keys

ROOT = Path(__file__).resolve().parents[1]
NOW = 1000.0
LIMITS = HarvestLimits(
    "scavenge",
    Caps(max_engines=4000, max_pending=32),
    headroom=Headroom(per_node=1),
    job=JobLimits(drain_before_s=30.0),
    yielding=YieldLimits(window_s=120.0),
    placement=JobPlacement(pin=True),
    user="scavenger",
)
DEMAND = [Demand(1, "bench", 4000, 1, "whatever is idle")]


# ---------------------------------------------------------------- the policy alone


def busy_site(nodes: int, jobs: int, seed: int) -> tuple[ClusterView, list[OurJob]]:
    """An eighth of the nodes idle, the others full; 2 % of what runs is ours. Partitions overlap; jobs of up to 2,000 nodes wait."""
    rng = random.Random(seed)
    names = [f"n{n:05}" for n in range(nodes)]
    made, found, ours = [], [], []
    job_id = 0
    for name in names:
        used = idle = 0 if rng.random() < 7 / 8 else 8
        while used < 8:
            mine = rng.random() < 0.02
            gpus = 1 if mine else min(rng.choice((1, 2, 4)), 8 - used)
            used, job_id = used + gpus, job_id + 1
            user, partition = ("scavenger", "scavenge") if mine else (f"u{job_id % 300}", "normal")
            found.append(
                Job(
                    job_id,
                    user,
                    partition,
                    JobState.RUNNING,
                    nodes=(name,),
                    gpus=gpus,
                    gpus_by_node=((name, gpus),),
                    cpus=gpus,
                )
            )
            if mine:
                ours.append(
                    OurJob(
                        f"scv-{job_id:016x}", 1, job_id, gpus, False, name, connected=True, leases=job_id % 5
                    )
                )
        held = 0 if idle else 8
        made.append(
            Node(
                name,
                frozenset({"mixed"}),
                frozenset({"normal", "scavenge"}),
                "h100",
                8,
                held,
                128,
                held * 8,
                1_000_000,
                0,
            )
        )
    while len(found) < jobs:
        job_id += 1
        wide = rng.choice((1, 1, 1, 2, 4, 16, 64, 2000))
        found.append(
            Job(
                job_id,
                f"u{job_id % 300}",
                rng.choice(("normal", "large", "normal,large")),
                JobState.PENDING,
                n_nodes=wide,
                reason=rng.choice(
                    ("Resources", "Priority", "Priority", "Dependency", "QOSMaxGRESPerUser", "BeginTime")
                ),
                gpus=wide * rng.choice((1, 2, 4, 8)),
                cpus=wide * 8,
                priority=rng.randrange(10**6),
                submit_time=rng.random() * NOW,
                start_time=rng.choice((0.0, NOW + 50, NOW + 1000)),
            )
        )
    partitions = (
        Partition("normal", frozenset(names), 10, PreemptMode.OFF, 0.0, 1e9),
        Partition("large", frozenset(names[: nodes // 2]), 20, PreemptMode.OFF, 0.0, 1e9),
        Partition("scavenge", frozenset(names), 1, PreemptMode.REQUEUE, 0.0, 1e9),
    )
    return ClusterView(NOW, tuple(made), tuple(found), partitions), ours


def time_policy(nodes: int, jobs: int, repeat: int, seed: int) -> None:
    view, ours = busy_site(nodes, jobs, seed)
    running = sum(job.state is JobState.RUNNING for job in view.jobs)
    took = []
    waited = tuple((job.job_id, 0.0) for job in view.jobs if job.waits)  # long enough
    limits = replace(LIMITS, yielding=replace(LIMITS.yielding, could_start_since=waited))
    process.tune()
    for _ in range(repeat):
        before = time.process_time()
        decision = decide(view, DEMAND, ours, limits, NOW)
        took.append(1000 * (time.process_time() - before))
    print(
        f"{len(view.nodes):,} nodes, {len(view.jobs):,} jobs ({len(view.jobs) - running:,} wait), {len(ours)} engines of ours"
    )
    print(f"decide: {min(took):.0f} ms least, {statistics.median(took):.0f} ms median of {repeat}")
    print(f"{len(decision.actions)} actions, {decision.code}")


# ---------------------------------------------------------------- a whole cycle on a real controller


def cloud_conf(base: Path, nodes: int, port: int) -> str:
    """The sandbox's `slurm.conf` with CLOUD nodes in place of its own."""
    names = ("node0",)
    layout = ClusterLayout(
        nodes=names,
        gpus=8,
        partitions=(
            PartitionLayout(name="normal", nodes=names, priority_tier=10),
            PartitionLayout(name="scavenge", nodes=names, priority_tier=1, preempt_mode=PreemptMode.REQUEUE),
        ),
    )
    plugins = next(path for path in sandbox._PLUGINS if os.path.isdir(path))
    site = sandbox_conf.SandboxLocation(
        str(base), os.uname().nodename.split(".")[0], pwd.getpwuid(os.getuid()).pw_name, plugins, port
    )
    every = f"cloud[1-{nodes}]"
    node = f"NodeName={every} CPUs=64 RealMemory=1000000 Gres=gpu:h100:8 State=CLOUD"
    text = re.sub(r"^NodeName=.*$", node, sandbox_conf.slurm_conf(layout, site), flags=re.MULTILINE)
    text = text.replace("Nodes=node0", f"Nodes={every}").replace(
        "bf_interval=1", "bf_interval=30,bf_max_job_test=100"
    )
    cloud = (
        "ResumeProgram=/bin/true",
        "SuspendProgram=/bin/true",
        "SuspendTime=INFINITE",
        "PrivateData=cloud",
    )
    return "\n".join([*cloud, "MaxJobCount=200000", "MaxArraySize=100001", text])


@contextlib.contextmanager
def controller(nodes: int) -> Iterator[dict[str, str]]:
    """A real slurmctld with CLOUD nodes; gives the environment of its commands."""
    base = Path(tempfile.mkdtemp(prefix="scale-"))
    children: list[subprocess.Popen[bytes]] = []
    ports = take_ports(2)
    try:
        for name in ("etc", "run", "log", "state", "munge"):
            (base / name).mkdir()
        key = base / "munge/munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        port = ports.first
        conf = base / "etc/slurm.conf"
        conf.write_text(cloud_conf(base, nodes, port))
        (base / "etc/gres.conf").write_text("AutoDetect=off\n")
        env = {
            **sandbox.slurm_environment(os.environ),
            "SLURM_CONF": str(conf),
            "PATH": sandbox._search_path(),
        }
        run, munge = base / "run", base / "munge"
        argv = [
            "munged",
            "--foreground",
            "--force",
            f"--key-file={munge}/munge.key",
            f"--socket={run}/munge.socket",
            f"--pid-file={run}/munged.pid",
            f"--log-file={base}/log/munged.log",
            f"--seed-file={munge}/munge.seed",
        ]
        _start(children, argv, env, base)
        _wait("munged", lambda: (run / "munge.socket").exists())
        _start(children, ["slurmctld", "-D", "-c", "-f", str(conf)], env, base)
        _wait("slurmctld", lambda: listens(port))
        yield env
    finally:
        for child in reversed(children):
            child.kill()
            child.wait()
        ports.close()
        shutil.rmtree(base)


def time_cycle(nodes: int, pending: int, repeat: int) -> None:
    with controller(nodes) as env:
        fill(env, nodes, pending)
        measure_cycle(SlurmCluster(env, timeout_s=60.0), repeat)


def _start(children: list[subprocess.Popen[bytes]], argv: list[str], env: dict[str, str], base: Path) -> None:
    binary = shutil.which(argv[0], path=env["PATH"])
    if binary is None:
        raise SystemExit(f"{argv[0]} is not installed: {sandbox.INSTALL}")
    with (base / "log" / f"{argv[0]}.out").open("wb") as log:
        children.append(
            subprocess.Popen([binary, *argv[1:]], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        )


def _wait(what: str, ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not ready():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} does not answer after 60 s")
        time.sleep(0.05)  # between two looks at the condition


def fill(env: dict[str, str], nodes: int, pending: int) -> None:
    """Others' jobs: one array for more GPUs than there are, so that all of it waits, and one that needs every node."""
    shape = ["--gres=gpu:8", f"--nodes={nodes}", "--exclusive"]
    for argv in (shape, [f"--array=1-{pending - 1}", "--gres=gpu:2", "--begin=now+1hour"]):
        subprocess.run(
            ["sbatch", "--partition=normal", "--output=/dev/null", "--time=60", *argv],
            env=env,
            input="#!/bin/bash\nsleep 60\n",
            text=True,
            check=True,
            capture_output=True,
            cwd="/tmp",
        )


def measure_cycle(cluster: SlurmCluster, repeat: int) -> None:
    tracker = Tracker(TrackerRules("feedbeef", "scavenger", 30.0, HealthRules(3, 600.0, 5.0)))
    views, decisions, cpu = [], [], []
    process.tune()
    for _ in range(repeat):
        spent, before = _cpu_s(), time.perf_counter()
        view = cluster.view()
        views.append(time.perf_counter() - before)
        before = time.perf_counter()
        tracker.observe(view, view.observed_at)
        gpu_use(view, "scavenge", tracker.job_ids(), view.observed_at)
        decision = decide(view, DEMAND, tracker.jobs({}), LIMITS, view.observed_at)
        decisions.append(time.perf_counter() - before)
        cpu.append(_cpu_s() - spent)
    both = [a + b for a, b in zip(views, decisions, strict=True)]
    waits = sum(job.waits for job in view.jobs)
    print(
        f"{len(view.nodes):,} nodes, {len(view.jobs):,} jobs ({waits:,} wait); {len(decision.actions)} actions, {decision.code}"
    )
    for what, took in (
        ("observation", views),
        ("decision", decisions),
        ("cycle", both),
        ("CPU of a cycle", cpu),
    ):
        print(
            f"{what}: {1000 * min(took):.0f} ms least, {1000 * statistics.median(took):.0f} ms median of {repeat}"
        )


# ---------------------------------------------------------------- a daemon with nothing to do


def measure_rest(nodes: int, pending: int, minutes: float) -> bool:
    """Whether both goals are met. The daemon's settings are the shipped ones: an observation every 60 s, at rest every 120 s."""
    with controller(nodes) as env, tempfile.TemporaryDirectory(prefix="rest-") as name:
        fill(env, nodes, pending)
        folder = Path(name)
        keys.init_state(folder / "state", "owner")
        config = folder / "scavenger.toml"
        config.write_text(toml.dumps({"daemon": {"state_dir": str(folder / "state")}}))
        argv = [sys.executable, "-m", "scavenger", "daemon", "--config", str(config), "--die-with-stdin"]
        with (folder / "daemon.log").open("wb") as log:
            daemon = subprocess.Popen(argv, env=env, cwd=ROOT, stdin=subprocess.PIPE, stdout=log, stderr=log)
        try:
            _wait(
                "the daemon", settled(lambda: received(env), least=received(env) + 4)
            )  # its first look asks four things
            counted, spent, began = received(env), process_cpu_s(daemon.pid), time.monotonic()
            time.sleep(60.0 * minutes)  # what is measured is a length of time
            if daemon.poll() is not None:
                raise SystemExit(f"the daemon ended:\n{(folder / 'daemon.log').read_text()[-2000:]}")
            took = time.monotonic() - began
            core = (process_cpu_s(daemon.pid) - spent) / took
            rpcs = (received(env) - counted) * 60.0 / took
        finally:
            daemon.terminate()
            daemon.wait()
    print(
        f"{nodes:,} nodes, {pending:,} jobs wait, {took / 60:.1f} min; the daemon and the commands that it ran:"
    )
    print(f"CPU: {core:.2%} of a core, goal 1 %: {'met' if core < 0.01 else 'MISSED'}")
    print(
        f"requests to slurmctld, as sdiag counts: {rpcs:.2f} a minute, goal 2: {'met' if rpcs <= 2.0 else 'MISSED'}"
    )
    return core < 0.01 and rpcs <= 2.0


def settled(count: Callable[[], int], least: int, quiet_s: float = 10.0) -> Callable[[], bool]:
    """Whether `count` has come to `least` and has stayed for so long: what a start asks for is not rest."""
    last, since = -1, time.monotonic()

    def ready() -> bool:
        nonlocal last, since
        if (now := count()) != last:
            last, since = now, time.monotonic()
        return now >= least and time.monotonic() - since > quiet_s

    return ready


def received(env: dict[str, str]) -> int:
    """Requests that the controller has had, but for sdiag's own and what its own parts tell it."""
    output = subprocess.run(["sdiag"], env=env, text=True, check=True, capture_output=True).stdout
    by_type = output.partition("statistics by message type")[2].partition("statistics by user")[0]
    counts = re.findall(r"(REQUEST_\w+) *\( *\d+\) count:(\d+)", by_type)
    return sum(int(count) for kind, count in counts if kind != "REQUEST_STATS_INFO")


def process_cpu_s(pid: int) -> float:
    """CPU seconds of a process and of the children it has waited for (proc(5), fields 14 to 17)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def _cpu_s() -> float:
    """CPU time of this process and of the commands that it has waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("policy", "cycle", "rest"))
    parser.add_argument("--nodes", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--pending", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.what == "policy":
        time_policy(options.nodes or 10_000, options.jobs, options.repeat, options.seed)
    elif options.what == "rest":
        return 0 if measure_rest(options.nodes or 1000, options.pending, options.minutes) else 1
    else:
        time_cycle(options.nodes or 1000, options.pending, options.repeat)
    return 0


if __name__ == "__main__":
    sys.exit(main())
