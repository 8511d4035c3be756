"""One chaos run: a whole site, a real run on it, and faults at the planned moments until the run is finished or makes no progress.

Owns the loop, and what stands in for people and units around the parts: a daemon that ended is started again (systemd), a training job
that ended otherwise than completed is submitted again (`sbatch --requeue`), PostgreSQL that was killed is started again. Ends everything
that it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scavenger.cluster.layout import demo_layout
from scavenger.cluster.model import JobState
from scavenger.demo.site import DemoSite, SiteOptions
from scavenger.errors import ClusterError, ClusterUnavailable
from tests.chaos.audit import Agents, Audit, audit
from tests.chaos.choose import Planned, Process, plan, target
from tests.chaos.faults import FullDisk, Hole, Lasting, Stopped, StoppedDaemon, StoppedTrainer
from tests.chaos.parts import is_there, observe
from tests.chaos.proxy import HOST, Proxy
from tests.chaos.watch import Watcher
from tests.private_postgres import PrivatePostgres
from tests.system import agents, play

CHECK_INTERVAL_S = 0.05
#: Silence is believed soon, so that a stopped engine's samples move within the run; many deaths are expected of every node.
QUICK = {"heartbeat_s": 0.3, "suspect_s": 1.0, "dead_s": 2.5, "reconnect_s": 5.0}
PATIENT = {"quarantine_after": 100_000, "backoff_s": 0.02}
STUCK_S = 150.0
#: How long a fault waits for a process of its part; then it takes another part.
MISSING_S = 10.0
DISK_NBYTES = 96 << 20
LOCAL_PARTS = ("daemon", "engine", "rank", "launcher", "rewards")
#: Without the training job: an episode of a step that its successor takes anew has another name, and so other random numbers.
EPISODE_PARTS = ("daemon", "engine", "gateway", "environment")


@dataclass(frozen=True)
class Options:
    """What a chaos run is asked for. The fault `disk` mounts a small file system for the state directory (needs root).

    `local_parts`: those of them that run with any backend and database; none named: all that the run has. `off_policy`: the run's
    `algorithm.max_off_policy_steps`. `episodes`: the run's samples are episodes, whose tool has these `data.effects`; "" = they are not.
    """

    dir: Path
    seed: int = 0
    kills: int = 50
    steps: int = 12
    kinds: Collection[str] = ("kill",)
    backend: str = "local"
    database: str = "sqlite"
    local_parts: Collection[str] = ()
    pace: float = 10.0
    deadline_s: float = 1200.0
    off_policy: int = 0
    episodes: str = ""
    move_kv: bool = False

    @property
    def parts(self) -> set[str]:
        found = set(self.local_parts or (EPISODE_PARTS if self.episodes else LOCAL_PARTS))
        if self.database == "postgres":
            found |= {"postgres", "backend"}
        return found | ({"slurmctld"} if self.backend == "slurm" else set())


@dataclass
class Outcome:
    """What came of it. `done` counts what was hit; `own_ends` are ends of a daemon that no fault explains."""

    audit: Audit
    done: Counter[str]
    left: int
    own_ends: list[str]
    wall_s: float

    @property
    def sound(self) -> bool:
        return self.audit.sound and not self.left and not self.own_ends


class Chaos:
    """See the module. `say` gets a line for each thing that is done."""

    def __init__(self, options: Options, model: Path, say: Callable[[str], None]) -> None:
        self.options = options
        self.model = model
        self.say = say
        self.plan = list(plan(options.seed, options.kills, options.kinds, options.parts))
        self.done: Counter[str] = Counter()
        self.own_ends: list[str] = []
        self._lasting: list[Lasting] = []
        self._expected: set[int] = set()  # pids of daemons that a fault ended, or will
        self._began = time.monotonic()
        self._due_at = 0.0
        self._daemon_at = self._postgres_at = 0.0
        self._job = 0

    # ---------------------------------------------------------------- from beginning to end

    def play(self, reference: play.Result) -> Outcome:
        """Start everything, hurt it, wait for the run's end, audit. Raises AssertionError when it does not get there."""
        options, self._began = self.options, time.monotonic()
        options.dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        with ExitStack() as stack:
            if "disk" in options.kinds:
                stack.enter_context(small_disk(options.dir / "state", DISK_NBYTES))
            self.postgres = stack.enter_context(PrivatePostgres()) if options.database == "postgres" else None
            self.site = stack.enter_context(DemoSite(self._site_options()))
            self.proxy = stack.enter_context(Proxy(self.site.state_dir))
            self.tool = stack.enter_context(agents.ToolServer().serving())
            self.run_toml = self._write_run()
            self.tokens = sum(len(data) // 4 for data in reference.tokens.values())
            self.watcher = stack.enter_context(Watcher(self.site.ledger_url))
            stack.callback(self._end_faults)
            try:
                self._daemon = self.site.daemon
                self._job = self._submit()
                self._loop()
                self._settle()
                found = audit(self.site, self.watcher, reference, options.off_policy, self.agents())
            except AssertionError as error:
                raise AssertionError(f"{error}\n{self._logs()}") from error
            return Outcome(found, self.done, len(self.plan), self.own_ends, time.monotonic() - self._began)

    def _write_run(self) -> Path:
        options = self.options
        run = {"steps": options.steps, "poison_after": 100_000, "deterministic": not options.off_policy}
        engine: dict[str, Any] = {"max_batch": 8 if options.off_policy else 4, "pace": options.pace}
        if options.move_kv:
            engine["move_kv"] = True
        reserved = {"wake_after_s": 1.0}
        if options.episodes:
            self._environment = agents.plain(self.model, self.tool, self.site.dir)
            data = {"effects": options.episodes}
            data |= {"on_doubt": "tell"} if options.episodes == "external" else {}
            return agents.write_run(
                self.site, self._environment, run=run, engine=engine, reserved=reserved, data=data
            )
        ahead = {"max_off_policy_steps": options.off_policy, "kv": "keep"} if options.off_policy else {}
        return play.write_run(
            self.site, self.model, run=run, engine=engine, reserved=reserved, algorithm=ahead
        )

    def _submit(self) -> int:
        if self.options.episodes:
            return agents.submit(self.site, self.run_toml, self._environment)
        return play.submit(self.site, self.run_toml)

    def agents(self) -> Agents | None:
        """What the audit is to know of a run with episodes; None: it has none."""
        if not self.options.episodes:
            return None
        hurt = any(not name.endswith((" daemon", " gateway", " environment")) for name in self.done)
        return Agents(self.tool, self.options.episodes == "external", hurt)

    def _site_options(self) -> SiteOptions:
        return SiteOptions(
            self.options.backend,
            self.options.dir,
            demo_layout(grace_s=1.0, requeue_delay_s=0.5),
            poll_interval_s=0.2,
            max_engines=2,
            daemon={**QUICK, "advertise": HOST},
            harvest=PATIENT,
            ledger=self.postgres.url if self.postgres is not None else "",
        )

    def _loop(self) -> None:
        while not self._completed():
            self._tend()
            self._lasting = [fault for fault in self._lasting if not self._ended(fault)]
            self._strike()
            self._watch()
            time.sleep(CHECK_INTERVAL_S)  # between two looks

    def _settle(self) -> None:
        """Nothing is hurt any more; what is left to write is written and our jobs leave."""
        self._end_faults()

        def settled() -> bool:
            self._tend()
            return play.ask(self.site, "SELECT count(*) FROM runs WHERE state = 'finished'") == [
                (1,)
            ] and not play.jobs_left(self.site)

        play.wait_for("the run to be finished and its jobs to leave", settled, 60)
        self.watcher.look()

    def _ended(self, fault: Lasting) -> bool:
        if not fault.over():
            return False
        fault.end()
        self.say(f"{self._clock()} over: {type(fault).__name__}")
        return True

    def _end_faults(self) -> None:
        for fault in self._lasting:
            fault.end()
        self._lasting = []

    # ---------------------------------------------------------------- those who look after the parts

    def _tend(self) -> None:
        now = time.monotonic()
        if self.postgres is not None and now >= self._postgres_at:
            self.postgres.tend()
        if self._daemon.poll() is not None:
            if self._daemon_at == 0.0:
                self._daemon_at = now + self._pause_after(self._daemon)
            if now >= self._daemon_at:
                self.site.end_daemon(self._daemon)  # closes its pipe
                # Beside a stalled one that still holds the ledger: its successor was killed before it had it, and this one takes over.
                held = any(
                    isinstance(lasting, StoppedDaemon) and not lasting.superseded()
                    for lasting in self._lasting
                )
                self._daemon, self._daemon_at = (
                    self.site.spawn_daemon(*(["--take-over"] if held else [])),
                    0.0,
                )
        if why := self._job_lost():
            # a killed slurmctld refuses while it starts: then it is tried again at the next look
            with contextlib.suppress(ClusterError, ClusterUnavailable):
                self._job = self._submit()
                self.say(f"{self._clock()} the training job {why}; submitted again as {self._job}")

    def _job_lost(self) -> str:
        """Why a person would submit the training job again; "" while it goes on, is complete, or nobody can tell."""
        try:
            job = next((job for job in self.site.cluster.view().jobs if job.job_id == self._job), None)
        except ClusterUnavailable:
            return ""
        if job is None:  # a slurmctld that is killed within seconds of sbatch has not saved it
            return "is unknown to the cluster"
        ended = job.state in play.ENDED and not job.flags and job.state is not JobState.COMPLETED
        return f"ended as {job.state}" if ended else ""

    def _pause_after(self, daemon: subprocess.Popen[bytes]) -> float:
        """Seconds until the daemon is started again. One that ended by itself after it had served is a finding."""
        if daemon.pid in self._expected:
            return 0.0
        announced = any(daemon.pid == pid for (pid,) in play.ask(self.site, "SELECT pid FROM generations"))
        words = f"a daemon ended by itself with status {daemon.returncode}"
        self.say(f"{self._clock()} {words}{'' if announced else ' before it served'}")
        if announced:
            self.own_ends.append(words)
        return 0.5

    def _completed(self) -> bool:
        job = play.job(self.site, self._job)
        return job is not None and job.state is JobState.COMPLETED and not job.flags

    def _watch(self) -> None:
        now = time.monotonic()
        for part in (self.watcher, self.proxy):
            assert part.failure is None, f"{type(part).__name__} failed: {part.failure!r}"
        silent = now - max(self.watcher.progress_at, self._began)
        assert silent < STUCK_S, (
            f"no token was committed for {silent:.0f} s; faults that go on: {self._lasting}"
        )
        assert now - self._began < self.options.deadline_s, (
            f"the run is not finished after {self.options.deadline_s:g} s"
        )

    # ---------------------------------------------------------------- faults

    def _strike(self) -> None:
        """Do the next fault when its moment has come and somebody is there to be hit."""
        if not self.plan or self.watcher.tokens < self.plan[0].at * self.tokens:
            return
        now, fault = time.monotonic(), self.plan[0]
        self._due_at = self._due_at or now + fault.delay_s
        if now < self._due_at:
            return
        process = None
        if fault.kind != "disk":
            there = [p for p in observe(self.site, self.run_toml, self.postgres) if self._may(fault, p)]
            process = target(fault, there, any_part=now > self._due_at + MISSING_S)
            if process is None:
                return
        self._perform(fault, process)
        self.plan.pop(0)
        self._due_at = 0.0

    def _may(self, fault: Planned, process: Process) -> bool:
        """A zombie or a hole needs a part that can be one, and one that is not one already."""
        if process.part == "slurmctld":
            return self._saved()
        if fault.kind == "kill":
            return True
        if fault.kind == "stop" and process.part == "daemon":
            return self.site.serving and not any(
                isinstance(lasting, StoppedDaemon) for lasting in self._lasting
            )
        if fault.kind == "hole" and any(isinstance(lasting, Hole) for lasting in self._lasting):
            return False
        if process.part == "rank" and any(isinstance(lasting, StoppedTrainer) for lasting in self._lasting):
            return False
        # of the ranks only the first one talks to the daemon
        return process.part == "engine" or (
            process.part == "rank" and (fault.kind == "stop" or process.name == "rank 0")
        )

    def _saved(self) -> bool:
        """Whether slurmctld has written down all jobs. An id that it forgets it gives again; the node on which the first one runs is then
        drained ("Duplicate jobid") and the second one held, which an admin has to mend, and no fault of ours."""
        try:
            newest = max((job.submit_time for job in self.site.cluster.view().jobs), default=0.0)
        except ClusterUnavailable:
            return False
        saved = self.site.sandbox.dir / "state/job_state"
        return saved.exists() and saved.stat().st_mtime > newest + 1.0

    def _perform(self, fault: Planned, process: Process | None) -> None:
        part = process.part if process is not None else "disk"
        self._log(fault, process)
        self.done[f"{fault.kind} {part}" if part != "disk" else "disk full"] += 1
        if process is None:
            self._lasting.append(FullDisk(self.site, fault.away_s))
        elif fault.kind == "notice":
            if is_there(process):
                os.kill(process.pid, signal.SIGTERM)
        elif fault.kind == "hole":
            self._lasting.append(Hole(self.proxy, process, fault.away_s, fault.coin))
        elif fault.kind == "stop" and part == "daemon":
            self._expected.add(process.pid)
            self._lasting.append(StoppedDaemon(self.site, self._daemon))
            self._daemon = self.site.spawn_daemon("--take-over")
        elif (
            fault.kind == "stop"
            and process.name == "rank 0"
            and fault.coin
            and self.options.backend == "local"
        ):
            self._lasting.append(StoppedTrainer(self.site, process, self._job))
            self._job = self._submit()
            self.say(f"{self._clock()} beside it the training job was submitted again as {self._job}")
        elif fault.kind == "stop":
            self._lasting.append(Stopped(self.site, process, fault.away_s))
        else:
            self._kill(fault, process)

    def _kill(self, fault: Planned, process: Process) -> None:
        now = time.monotonic()
        if process.part == "daemon":
            self._expected.add(process.pid)
            self._daemon_at = now + fault.away_s / 4
        if process.part == "postgres":
            assert self.postgres is not None
            self.postgres.kill()
            self._postgres_at = now + fault.away_s / 2
        elif is_there(process):
            os.kill(process.pid, signal.SIGKILL)

    def _log(self, fault: Planned, process: Process | None) -> None:
        progress = self.watcher.tokens / self.tokens
        name = (
            f"{process.part}: {process.name} (pid {process.pid})"
            if process is not None
            else "the state directory's disk"
        )
        self.say(f"{self._clock()} {progress:5.0%} #{fault.number} {fault.kind} {name}")
        with (self.options.dir / "faults.jsonl").open("a") as file:
            entry = {"at": time.time(), "progress": round(progress, 4), **asdict(fault), "target": name}
            file.write(json.dumps(entry) + "\n")

    def _clock(self) -> str:
        return f"{time.monotonic() - self._began:7.1f} s"

    def _logs(self) -> str:
        parts = [play.logs(self.site)]
        if self.postgres is not None:
            parts.append(f"---- postgres\n{self.postgres.tail(40)}")
        return "\n".join(parts)


@contextlib.contextmanager
def small_disk(where: Path, nbytes: int) -> Iterator[None]:
    """A file system of its own, of that size. Raises AssertionError where none may be mounted."""
    where.mkdir(parents=True, exist_ok=True)
    argv: Sequence[str] = ["mount", "-t", "tmpfs", "-o", f"size={nbytes},mode=700", "tmpfs", str(where)]
    mounted = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert mounted.returncode == 0, (
        f"no tmpfs can be mounted here ({mounted.stderr.strip()}): leave `disk` out of --faults"
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(where)], check=True)
