"""Do others wait longer because we harvest? The same jobs of theirs on a private, real Slurm, with and without the daemon.

    python -m benchmarks.harmless --trace earth_jobs_72h.csv.gz [--arms none,floor,daemon,peers] [--grace 0,10] [--hours 12] [--preempt qos]

Others' jobs are those of the trace that began in `--hours` from `--from-hour` on, thinned to the cluster's share of the trace's nodes (the
same ones in each arm, by `--seed`), their GPUs scaled to its nodes, their starts and durations divided by `--compress`. Arms:

    none    nobody harvests
    floor   what Slurm itself costs: preemptible one-GPU jobs that exit on TERM, always `--queued` of them in the queue
    daemon  the harvester of the daemon (driver, tracker, policy, Slurm's commands); its looks are divided by `--compress`,
            not below 1 s, and its RPC budget is multiplied by it
    peers   the daemon, and every `--same-tier-every`-th job of other users is in the harvest partition: Slurm never preempts us for it
    peers0  the same jobs in the same partitions, without a daemon
    ahead     the daemon, looking ahead for as long as GraceTime is, and no less than `--window`; meant for `--grace 60`, where a job that
            Slurm must preempt us for could wait for a minute (the goal: p99 grows by 5 s at most)
    beside  no trace: a job of somebody else that works for CPU and disk, with and without an engine on its node (`harmless_neighbour`)

`--preempt qos` has Slurm preempt by QOS (slurmdbd on a MariaDB of its own): others' QOS `normal` preempts ours, `scavenge`, which has the
GraceTime. The arms are the same; a same-tier job, in the harvest partition with QOS `normal`, may then preempt us as well.

What is light in it: the ledger and the router are lists, demand is unbounded, and an engine is the shipped job script around a shell loop
that leaves within 0.3 s of a TERM (exit 75, then `scontrol requeue`) or of being given back. GPUs are files that Slurm believes in.

What is distorted: time is compressed, and what Slurm takes to preempt is not. Jobs that come within `--compress` seconds of each other meet
here while the engines that make room for the first are still leaving; Slurm starts nothing on such a node, and the second goes elsewhere.

delay      from sbatch's return to the job's first line, of others' jobs that arrived in the window; of a job that began in `none` and not
           in this arm what it had waited by the end, so that a job kept out for ever is not one less to count
wasted     starts of engines that ended within a cold start (`--cold-start` / compress)
harvested  of idle GPU time in slices longer than a cold start (`harmless_measure`)
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import gzip
import json
import multiprocessing
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import harmless_neighbour
from benchmarks.harmless_measure import Stay, use
from benchmarks.harmless_report import HarmlessOutcome, Timeline, report
from scavenger.cluster.layout import ClusterLayout, PartitionLayout
from scavenger.cluster.model import JobSpec, JobState, PreemptMode
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm import runner
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.config import ClusterSection, DaemonConfig, DaemonSection, HarvestSection
from scavenger.harvest.execute.edges import LedgerWrites, RouterLink, Sources
from scavenger.harvest.execute.job_script import read_template
from scavenger.harvest.harvester import Harvester
from scavenger.ledger import records as rec
from scavenger.policy.fleet_size import Demand
from scavenger.router.core.events import IntentRevoked

HOUR_S = 3600.0
HARVESTED = ("daemon", "peers", "ahead")  # the arms in which the daemon's harvester plays
TRACE_NODES, TRACE_GPUS = 107, 8
WORKER_LINE = re.compile(r"^worker=\(.*\)$", re.MULTILINE)
ENGINE = """\
trap 'exit 75' TERM
exec 9<> <(:)
while [ ! -e "$1.drain" ]; do read -r -t 0.3 -u 9; done
exit 0
"""
THEIRS = """\
#!/bin/bash
echo "$EPOCHREALTIME $SLURM_JOB_NODELIST" > {path}
sleep {seconds:.2f}
echo "$EPOCHREALTIME" > {path}.end
"""
FLOOR = """\
#!/bin/bash
trap : TERM
echo "$SLURM_JOB_ID start $EPOCHREALTIME $SLURMD_NODENAME" >> {folder}/floor.log
srun --ntasks=1 --mpi=none --input=none bash {folder}/engine.sh {folder}/floor
echo "$SLURM_JOB_ID end $EPOCHREALTIME" >> {folder}/floor.log
"""


@dataclass(frozen=True, slots=True)
class OtherUsersJob:
    """Another user's job. `at_s`, `lasts_s`: compressed. `warm`: it ran already when the window began, and is not counted."""

    number: int
    at_s: float
    lasts_s: float
    nodes: int
    gpus_per_node: int
    warm: bool


@dataclass(slots=True)
class Seen:
    """One of their jobs as it went."""

    arrival: OtherUsersJob
    job_id: int = 0
    submitted: float = 0.0
    started: float = 0.0
    ended: float = 0.0
    where: tuple[str, ...] = ()
    failed: bool = False  # it began, should be over for 10 s, and never came to its last line


# ---------------------------------------------------------------- the trace


def arrivals(trace: Path, options: argparse.Namespace) -> list[OtherUsersJob]:
    """Others' jobs, in order. The choice of jobs depends on the trace and the seed alone."""
    rng = random.Random(options.seed)
    start, end = options.from_hour * HOUR_S, (options.from_hour + options.hours) * HOUR_S
    share, scale = options.nodes / TRACE_NODES, options.gpus / TRACE_GPUS
    found = []
    with gzip.open(trace, "rt") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        for number, row in enumerate(rows):
            chosen = rng.random() < share
            began, ended, gpus = float(row["t_start"]), float(row["t_end"]), int(row["gpus"])
            if not chosen or ended <= start or began >= end:
                continue
            nodes = min(options.nodes, -(-gpus // TRACE_GPUS))
            per_node = max(1, round(min(gpus, TRACE_GPUS) * scale))
            low = max(began, start)
            lasts = max(0.5, (ended - low) / options.compress)
            found.append(
                OtherUsersJob(number, (low - start) / options.compress, lasts, nodes, per_node, began < start)
            )
    return sorted(found, key=lambda one: (one.at_s, one.number))


# ---------------------------------------------------------------- one arm


class Counted(SlurmCluster):
    """Slurm's commands, counted by what they ask, and only what the harvester asks."""

    def __init__(self, env: dict[str, str]) -> None:
        super().__init__(env)
        self.asked: Counter[str] = Counter()

    def submit(self, spec: JobSpec) -> int:
        self.asked["sbatch"] += 1
        return super().submit(spec)

    def _command(self, argv: Sequence[str], cost: Mapping[str, int]) -> runner.Done:
        self.asked[
            " ".join(
                argv[:1]
                if argv[0] != "scontrol"
                else [argv[0], *(argument for argument in argv[1:] if argument[0] != "-")][:3]
            )
        ] += 1
        return super()._command(argv, cost)


class OtherUsers:
    """Submits their jobs on time and reads what became of them."""

    def __init__(
        self, sandbox: SlurmSandbox, folder: Path, plan: Sequence[OtherUsersJob], same_tier_every: int
    ) -> None:
        self.cluster, self.folder = SlurmCluster(sandbox.env), folder
        self.seen = [Seen(arrival) for arrival in plan]
        self._same_tier_every = same_tier_every

    def is_same_tier(self, one: Seen) -> bool:
        return (
            self._same_tier_every > 0
            and not one.arrival.warm
            and one.arrival.nodes == 1
            and one.arrival.number % self._same_tier_every == 0
        )

    def submit(self, one: Seen) -> None:
        arrival = one.arrival
        path = self.folder / f"{arrival.number}"
        spec = JobSpec(
            f"theirs{arrival.number}",
            "",
            "scavenge" if self.is_same_tier(one) else "normal",
            THEIRS.format(path=path, seconds=arrival.lasts_s),
            gpus=arrival.gpus_per_node,
            nodes=arrival.nodes,
            tasks=arrival.nodes,
            time_s=max(60.0, arrival.lasts_s * 2),
            requeue=False,
            workdir=str(self.folder),
        )
        one.job_id = self.cluster.submit(spec)
        one.submitted = time.time()

    async def replay(self, began: float, window_s: float) -> None:
        """Submit every job that arrives at its time, four at once at most; return when the window is over."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(4) as threads:
            running = []
            for one in (one for one in self.seen if not one.arrival.warm):
                await asyncio.sleep(max(0.0, began + one.arrival.at_s - time.time()))
                running.append(loop.run_in_executor(threads, self.submit, one))
            await asyncio.gather(*running)
        await asyncio.sleep(max(0.0, began + window_s - time.time()))

    def read(self, names: Sequence[str], now: float) -> None:
        from scavenger.cluster.slurm.text import expand

        for one in self.seen:
            path = self.folder / f"{one.arrival.number}"
            if path.exists() and (text := path.read_text().split()):
                one.started, one.where = (
                    float(text[0]),
                    tuple(name for name in expand(text[1]) if name in names),
                )
                done = Path(f"{path}.end")
                ended = done.read_text() if done.exists() else ""
                one.ended = float(ended) if ended else now
                one.failed = not ended and one.started + one.arrival.lasts_s + 10 < now


@dataclass
class RecordSink:
    """The harvester's ledger and router: lists, and files that tell an engine to leave."""

    state: Path
    records: list[rec.Record] = field(default_factory=list)

    async def commit(self, records: Sequence[rec.Record]) -> None:
        self.records.extend(records)

    def post(self, event: object) -> None:
        if isinstance(event, IntentRevoked):
            (self.state / "workers" / f"{event.intent_id}.key.drain").touch()

    def of(self, kind: type) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]


def everything(options: argparse.Namespace) -> Demand:
    return Demand(1, "bench", options.nodes * options.gpus, 1, "whatever is idle")


def harvest_qos(options: argparse.Namespace) -> str:
    return "scavenge" if options.preempt == "qos" else ""


def harvester(
    sandbox: SlurmSandbox,
    state: Path,
    sink: RecordSink,
    options: argparse.Namespace,
    window_s: float,
    demand: list[Demand],
    script: str = ENGINE,
) -> tuple[Harvester, Counted]:
    """`script`: what an engine is, for bash; its argument is a path, and `PATH.drain` tells it to leave."""
    (state / "workers").mkdir(parents=True)
    engine, template = state.parent / "engine.sh", state.parent / "job.j2"
    engine.write_text(script)
    text, found = WORKER_LINE.subn(f"worker=(bash {engine} {{{{ key | quote }}}})", read_template(None))
    assert found, "the shipped template has no line that begins with worker=("
    template.write_text(text)
    poll_s = max(1.0, 60.0 / options.compress)
    config = DaemonConfig(
        daemon=DaemonSection(state_dir=state),
        cluster=ClusterSection(
            poll_interval_s=poll_s,
            fast_poll_interval_s=max(1.0, 15.0 / options.compress),
            absent_s=2.0,
            min_poll_interval_s=min(5.0, poll_s),
            max_rpc_per_min=4.0 * options.compress,
        ),
        harvest=HarvestSection(
            max_engines=options.nodes * options.gpus,
            max_pending=options.pending,
            job_template=template,
            time_limit_s=4 * HOUR_S,
            other_users_window_s=window_s,
            same_tier_yield_s=options.same_tier_yield,
            fresh_after_s=max(3.0, 30.0 / options.compress),
            drain_before_s=1.0,
            min_runtime_s=600.0 / options.compress,
            cpus_per_engine=1,
            qos=harvest_qos(options),
        ),
    )
    cluster = Counted(sandbox.env)
    made: list[Harvester] = []

    def leases() -> dict[str, tuple[int, float]]:
        return {
            one.intent_id: (1, 0.0) for one in made[0].tracker.intents.values() if one.allocation is not None
        }

    made.append(
        Harvester(
            config,
            cluster,
            "feedbeef",
            LedgerWrites(sink.commit, sink.records.extend),
            RouterLink(
                post=sink.post,
                demand=lambda: demand,
                leases=leases,
                register=lambda *_: None,
                unregister=lambda *_: None,
            ),
            Sources(clock=time.time),
        )
    )
    return made[0], cluster


async def floor(sandbox: SlurmSandbox, folder: Path, queued: int, qos: str, stop: asyncio.Event) -> None:
    """Keep preemptible jobs in the queue that exit on TERM and do nothing else."""
    cluster = SlurmCluster(sandbox.env)
    (folder / "engine.sh").write_text(ENGINE)
    spec = JobSpec(
        "floor",
        "",
        "scavenge",
        FLOOR.format(folder=folder),
        gpus=1,
        time_s=4 * HOUR_S,
        workdir=str(folder),
        qos=qos,
    )
    while not stop.is_set():
        jobs = await asyncio.to_thread(lambda: cluster.view().jobs)
        pending = sum(job.state is JobState.PENDING and job.name == "floor" for job in jobs)
        for _ in range(queued - pending):
            await asyncio.to_thread(cluster.submit, spec)
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 1.0)


def floor_stays(folder: Path, ended: float) -> list[Stay]:
    """What the floor's jobs wrote of themselves; one that was killed is taken to have held its GPU until it began again."""
    path, open_, found = folder / "floor.log", dict[str, tuple[str, float]](), []
    for line in path.read_text().splitlines() if path.exists() else ():
        job, what, at, *node = line.split()
        if job in open_:
            where, since = open_.pop(job)
            found.append(Stay(where, 1, since, float(at)))
        if what == "start":
            open_[job] = (node[0], float(at))
    return found + [Stay(where, 1, since, ended) for where, since in open_.values()]


def layout(options: argparse.Namespace, grace_s: float) -> ClusterLayout:
    names = tuple(f"node{n}" for n in range(options.nodes))
    return ClusterLayout(
        nodes=names,
        gpus=options.gpus,
        kill_wait_s=5.0,
        message_timeout_s=5.0,
        qos=options.preempt == "qos",
        partitions=(
            PartitionLayout(name="normal", nodes=names, priority_tier=10),
            PartitionLayout(
                name="scavenge",
                nodes=names,
                priority_tier=1,
                preempt_mode=PreemptMode.REQUEUE,
                grace_s=grace_s,
            ),
        ),
    )


def run(
    arm: str, grace_s: float, plan: Sequence[OtherUsersJob], options: argparse.Namespace
) -> HarmlessOutcome:
    with (
        tempfile.TemporaryDirectory(prefix="harmless-") as folder,
        SlurmSandbox(layout(options, grace_s)) as sandbox,
    ):
        return asyncio.run(_run(arm, grace_s, plan, options, sandbox, Path(folder)))


def beside(options: argparse.Namespace) -> list[str]:
    """The slowdown of a neighbour, on one node."""
    one = argparse.Namespace(**{**vars(options), "nodes": 1})
    with tempfile.TemporaryDirectory(prefix="harmless-") as name, SlurmSandbox(layout(one, 0.0)) as sandbox:
        folder = Path(name)
        sink, demand = RecordSink(folder / "state"), [Demand(1, "bench", 1, 1, "one engine")]
        script = harmless_neighbour.engine_script(folder, options.copies)
        made, _ = harvester(sandbox, folder / "state", sink, one, options.window, demand, script)
        return asyncio.run(harmless_neighbour.replay(sandbox.env, folder, made, demand, sink.of, options))


async def _run(
    arm: str,
    grace_s: float,
    plan: Sequence[OtherUsersJob],
    options: argparse.Namespace,
    sandbox: SlurmSandbox,
    folder: Path,
) -> HarmlessOutcome:
    theirs = folder / "theirs"
    theirs.mkdir()
    other_users = OtherUsers(sandbox, theirs, plan, options.same_tier_every if arm.startswith("peers") else 0)
    sink, asked, stop = RecordSink(folder / "state"), Counter[str](), asyncio.Event()
    window_s = options.hours * HOUR_S / options.compress
    for one in other_users.seen:  # what ran before the window runs before anybody harvests
        if one.arrival.warm:
            await asyncio.to_thread(other_users.submit, one)
    await asyncio.sleep(3.0)
    await asyncio.to_thread(sandbox.check_nodes)  # a node that is out would count as idle and not harvested
    began = time.time()
    task: asyncio.Task[None] | None = None
    if arm == "floor":
        task = asyncio.create_task(floor(sandbox, folder, options.queued, harvest_qos(options), stop))
    elif arm in HARVESTED:
        ahead_s = max(options.window, grace_s) if arm == "ahead" else options.window
        made, cluster = harvester(sandbox, folder / "state", sink, options, ahead_s, [everything(options)])
        asked = cluster.asked
        task = asyncio.create_task(made.run(stop))
    await other_users.replay(began, window_s)
    ended = time.time()
    stop.set()
    if task is not None:
        await task
    await asyncio.to_thread(sandbox.check_nodes)
    names = sandbox.layout.nodes
    other_users.read(names, ended)
    if arm in HARVESTED and not asked:
        raise SystemExit(
            f"{arm}: no command of the harvester's was counted, so neither its requests nor its starts can be told"
        )
    return measure(arm, grace_s, other_users, sink, names, began, ended, options, dict(asked))


def measure(
    arm: str,
    grace_s: float,
    other_users: OtherUsers,
    sink: RecordSink,
    names: Sequence[str],
    began: float,
    ended: float,
    options: argparse.Namespace,
    asked: dict[str, int],
) -> HarmlessOutcome:
    theirs = [
        Stay(name, one.arrival.gpus_per_node, one.started, one.ended)
        for one in other_users.seen
        if one.started
        for name in one.where
    ]
    starts = {
        (allocation.intent_id, allocation.restart_count): allocation
        for allocation in sink.of(rec.AllocationStarted)
    }
    ends = {
        (allocation.intent_id, allocation.restart_count): allocation
        for allocation in sink.of(rec.AllocationEnded)
    }
    harvested_stays = [
        Stay(allocation.node, allocation.gpus, allocation.at, ends[key].at if key in ends else ended)
        for key, allocation in starts.items()
    ]
    ours = harvested_stays or floor_stays(other_users.folder.parent, ended)
    cold_s = options.cold_start / options.compress
    lived = [ends[key].at - allocation.at for key, allocation in starts.items() if key in ends]
    arrived = [one for one in other_users.seen if not one.arrival.warm]
    started = [one for one in arrived if one.started]
    timeline = Timeline(
        [replace(stay, start=stay.start - began, end=stay.end - began) for stay in theirs],
        [replace(stay, start=stay.start - began, end=stay.end - began) for stay in ours],
        [
            (one.arrival.number, one.submitted - began, one.arrival.nodes, one.arrival.gpus_per_node)
            for one in arrived
            if not one.started
        ],
        [(one.at - began, f"{one.action} {one.code}", one.reason) for one in sink.of(rec.Decision)],
    )
    return HarmlessOutcome(
        arm,
        grace_s,
        {
            one.arrival.number: max(0.0, one.started - one.submitted)
            for one in started
            if not other_users.is_same_tier(one)
        },
        {
            one.arrival.number: max(0.0, one.started - one.submitted)
            for one in started
            if other_users.is_same_tier(one)
        },
        sum(one.failed and not other_users.is_same_tier(one) for one in other_users.seen),
        use(theirs, ours, names, options.gpus, began, ended, cold_s),
        len(ours),
        sum(life < cold_s for life in lived),
        sum(end.reason == "preempted" for end in ends.values()),
        asked,
        (ended - began) / 60,
        dict(
            Counter(
                [f"{one.action} {one.code}" for one in sink.of(rec.Decision)]
                + [f"event {one.kind}" for one in sink.of(rec.Event)]
            )
        ),
        {
            one.arrival.number: ended - one.submitted
            for one in arrived
            if not one.started and not other_users.is_same_tier(one)
        },
        timeline,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, help="earth_jobs_72h.csv.gz; every arm but `beside` needs it")
    parser.add_argument("--arms", default="none,floor,daemon,peers0,peers")
    parser.add_argument("--grace", default="0,10", help="GraceTimes of the harvest partition, s")
    parser.add_argument(
        "--preempt",
        choices=("partition", "qos"),
        default="partition",
        help="PreemptType of the private Slurm",
    )
    parser.add_argument("--from-hour", type=float, default=9.0)
    parser.add_argument("--hours", type=float, default=12.0)
    parser.add_argument("--compress", type=float, default=120.0)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--gpus", type=int, default=8, help="a node")
    parser.add_argument("--cold-start", type=float, default=115.0, help="of an engine, s before compression")
    parser.add_argument("--window", type=float, default=2.0, help="other_users_window_s")
    parser.add_argument("--same-tier-yield", type=float, default=5.0, help="same_tier_yield_s")
    parser.add_argument("--same-tier-every", type=int, default=3)
    parser.add_argument("--pending", type=int, default=32, help="max_pending")
    parser.add_argument("--queued", type=int, default=8, help="jobs of the floor in the queue")
    parser.add_argument("--turns", type=int, default=6, help="of `beside`: as often an engine comes and goes")
    parser.add_argument("--turn-s", type=float, default=20.0, help="how long it is there, and away")
    parser.add_argument(
        "--copies", type=float, default=100.0, help="MB a second that the engine beside copies"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--together",
        type=int,
        default=1,
        help="arms played at once, each in a process and a private Slurm of its own",
    )
    parser.add_argument("--json", type=Path, default=None, help="write the figures there too")
    options = parser.parse_args()
    if "beside" in options.arms.split(","):
        print("\n".join(beside(options)), flush=True)
    options.arms = ",".join(arm for arm in options.arms.split(",") if arm != "beside")
    if not options.arms:
        return 0
    if options.trace is None:
        parser.error("--trace is needed")
    plan = arrivals(options.trace, options)
    new = [one for one in plan if not one.warm]
    print(
        f"{len(plan) - len(new)} jobs run, {len(new)} arrive in {options.hours * 60 / options.compress:.1f} min",
        flush=True,
    )
    outcomes = []
    try:
        with ProcessPoolExecutor(options.together, multiprocessing.get_context("spawn")) as processes:
            arms = [
                (arm, float(grace)) for grace in options.grace.split(",") for arm in options.arms.split(",")
            ]
            running = [processes.submit(run, arm, grace, plan, options) for arm, grace in arms]
            for (arm, grace), one in zip(arms, running, strict=True):
                outcomes.append(one.result())
                print(f"{arm}, GraceTime {grace:g} s: done", file=sys.stderr, flush=True)
    finally:  # an arm that fails takes nothing from those before it
        print("\n".join(report(outcomes)))
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(one) for one in outcomes]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
