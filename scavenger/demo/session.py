"""`scavenger demo`: a private Slurm, a daemon, a training job, and other users who take GPUs back every few seconds.

    make the model -> start the site -> submit the training job -> play the other users -> report

Owns the order of things and what is printed. The parts are the product's own: the demo only starts them and reads the ledger.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from rich.console import Console, RenderableType
from rich.live import Live

from scavenger import toml
from scavenger.cluster.error_kind import ErrorKind
from scavenger.cluster.layout import demo_layout
from scavenger.cluster.model import Job, JobState
from scavenger.cluster.sandbox.sandbox import missing_slurm
from scavenger.demo import agent, episode, metrics, report, training
from scavenger.demo.site import DemoSite, SiteOptions
from scavenger.errors import ClusterError, ClusterUnavailable, ScavengerError
from scavenger.host import packages
from scavenger.ledger import store
from scavenger.ledger.read.tokenizer import load_tokenizer

#: What needs the trainer's packages, before anything is booted.
TRAINS = "the demo trains a model"
REFRESH_S = 0.5
LINE_S = 5.0
RUN_NAME = "demo"


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """Sizes of the demo. `pace` mimics a large model's decode rate, so that preemption strikes in the middle of samples."""

    steps: int = 60
    seed: int = 0
    prompts_per_step: int = 32
    samples_per_prompt: int = 8
    eval_prompts: int = 256
    max_batch: int = 96
    pace: float = 4.0
    lr: float = 2e-4
    warmup_steps: int = 5
    window: float = 0.35
    deterministic: bool = True
    warm_up_steps: int | None = None  # of the model that is made; None: as many as its task needs


#: Of `--agent`: an episode has about four calls, each through relay, gateway and daemon.
AGENT_SETTINGS = DemoSettings(steps=24, prompts_per_step=16, eval_prompts=128, pace=8.0, lr=3e-4)


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """`preempt_every_s`: mean seconds between two jobs of other users; 0 = there are none. `agent`: episodes of several turns, whose
    environment workers are killed every `kill_every_s` seconds; 0: they are not.

    `time_limit_s`: for the training job to start, and from there for each of its steps: a slow machine takes long and is not stuck.
    """

    out: Path
    backend: str = "auto"
    grace_s: float = 2.0
    preempt_every_s: float = 5.0
    other_job_s: float = 4.0
    max_engines: int = 3
    time_limit_s: float = 420.0
    policy: str = "predictive"
    agent: bool = False
    kill_every_s: float = 20.0
    settings: DemoSettings = field(default_factory=DemoSettings)


@dataclass(frozen=True, slots=True)
class DemoArrival:
    """An ordinary job: `gpus` on `node` for `run_s`, submitted `at_s` after the start."""

    at_s: float
    node: str
    gpus: int
    run_s: float


def arrivals(
    nodes: Sequence[str], gpus_per_node: int, *, every_s: float, run_s: float, seed: int
) -> Iterator[DemoArrival]:
    """Pure: a million jobs of other users, on average one every `every_s` seconds, on one node after another.

    A job takes a whole node or all but one GPU of it, so that it preempts whatever runs there. It runs long enough that the engine
    has to come back elsewhere.
    """
    rng = random.Random(seed)
    at_s = 0.0
    for index in range(1_000_000):
        at_s += every_s * rng.uniform(0.6, 1.4)
        node = nodes[index % len(nodes)]
        yield DemoArrival(at_s, node, gpus_per_node - (rng.random() < 0.25), run_s * rng.uniform(0.7, 1.3))


@dataclass(slots=True)
class OtherUsersJobs:
    """Jobs of the other users and how long each waited for its GPUs."""

    arrivals: Iterator[DemoArrival]
    pending: DemoArrival
    submitted: dict[int, float] = field(default_factory=dict)
    waited: dict[int, float] = field(default_factory=dict)


def choose_backend(wanted: str, console: Console) -> str:
    """Slurm where it can be had; else the local backend, and one line says why."""
    why = missing_slurm()
    if wanted == "auto" and why:
        console.print(f"{why}; the demo runs on the local backend instead")
        return "local"
    return "slurm" if wanted == "auto" else wanted


def run(options: DemoOptions, console: Console) -> int:
    """Run the demo; returns the exit status. Leaves no process, job or port behind, also after Ctrl-C."""
    started = time.monotonic()
    packages.require_training(TRAINS)
    if options.agent:
        agent.check_packages()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    backend = choose_backend(options.backend, console)
    site_dir = out / time.strftime("run-%Y%m%d-%H%M%S")
    console.print(f"results go to {site_dir}")
    with made_for(options, site_dir) as model, Screen(console, options.settings.steps, started) as screen:
        seen, context = run_demo(options, backend, site_dir, model, screen)
    _report(options, site_dir, seen, context, screen.picture, console)
    return 0


def run_demo(
    options: DemoOptions, backend: str, site_dir: Path, model: DemoModel, screen: Screen
) -> tuple[metrics.DemoMetrics, report.Context]:
    """One run on a site of its own, from boot to the end of the training job; returns what the ledger says of it."""
    layout = demo_layout(grace_s=options.grace_s)
    screen.show(None, "booting the cluster, warming up the model")
    with DemoSite(
        SiteOptions(
            backend, site_dir, layout, max_engines=options.max_engines, router={"policy": options.policy}
        ),
        lambda phase: screen.show(None, phase),
    ) as site:
        model.wait(screen)
        job = site.submit_training(_write_run(options, site, model.path))
        other_users = _other_users(options, layout.nodes[1:], layout.gpus)
        killer = (
            agent.WorkerKiller(site.dir, options.kill_every_s)
            if options.agent and options.kill_every_s
            else None
        )
        _watch(options, site, job, other_users, screen, killer)
        engine = store.open_readonly(site.ledger_url)
        try:
            seen = metrics.read(engine)
            played = (
                episode.read(engine, load_tokenizer(str(model.path / "tokenizer.json")))
                if options.agent
                else None
            )
        finally:
            engine.dispose()
    waited = max(other_users.waited.values(), default=None) if other_users else None
    ledger = str(site.state_dir / "ledger.sqlite3")
    took_s = time.monotonic() - screen.started
    jobs = len(other_users.waited) if other_users else 0
    killed = killer.killed if killer else 0
    return seen, report.Context(backend, ledger, took_s, jobs, waited, options.grace_s, played, killed)


class Screen:
    """The live display on a terminal; elsewhere (a pipe, a log) a plain line every few seconds."""

    def __init__(self, console: Console, steps: int, started: float) -> None:
        self._console = console
        self._steps = steps
        self.started = started
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal else None
        self._printed_at = -LINE_S
        self.picture: RenderableType | None = (
            None  # the liveliest frame so far: most tokens in flight beside others' jobs
        )
        self._most = -1

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, seen: metrics.DemoMetrics | None, phase: str) -> None:
        elapsed_s = time.monotonic() - self.started
        frame = report.display(seen, elapsed_s=elapsed_s, phase=phase, steps=self._steps)
        if seen is not None and seen.gpus and min(seen.gpus[-1].other_users, seen.gpus[-1].harvested) > 0:
            liveliness = seen.now.tokens_in_flight + len(seen.trained()) * self._steps
            if liveliness > self._most:
                self._most, self.picture = liveliness, frame
        if self._live is not None:
            self._live.update(frame)
        elif elapsed_s - self._printed_at >= LINE_S:
            self._printed_at = elapsed_s
            text = report.line(seen, elapsed_s=elapsed_s, phase=phase, steps=self._steps)
            self._console.print(text, highlight=False, soft_wrap=True)


class DemoModel:
    """The demo's model, made by the trainer's own tool in a process of its own while the cluster boots."""

    def __init__(self, directory: Path, seed: int, task: str = "sort", steps: int | None = None) -> None:
        self.path = directory / "model"
        self._log = directory / "model.log"
        self._more = [f"--seed={seed}", f"--task={task}"] + ([] if steps is None else [f"--steps={steps}"])

    def __enter__(self) -> DemoModel:
        self._log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        argv = [sys.executable, "-m", "trainer.tiny", "make", "--out", str(self.path), *self._more]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def wait(self, screen: Screen) -> None:
        """Show how far it is until it is made."""
        while self._process.poll() is None:
            last_line = self._log.read_text(errors="replace").split("\n")[-2:-1]
            screen.show(
                None,
                f"the cluster is up; warming the model up: {last_line[0].split('  ')[0] if last_line else 'starting'}",
            )
            time.sleep(REFRESH_S)  # the display's frame rate
        if self._process.returncode != 0:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-10:])
            raise ScavengerError(f"the demo's model could not be made:\n{tail}", f"look at {self._log}")


def made_for(options: DemoOptions, site_dir: Path) -> DemoModel:
    """The model, as it is being made."""
    settings, task = options.settings, agent.TASK if options.agent else "sort"
    return DemoModel(site_dir, settings.seed, task, settings.warm_up_steps)


def _write_run(options: DemoOptions, site: DemoSite, model: Path) -> Path:
    document = run_document(
        options.settings,
        name=RUN_NAME,
        state_dir=site.state_dir,
        out_dir=site.dir / "out",
        model=model,
        max_engines=options.max_engines,
    )
    path = site.dir / "run.toml"
    path.write_text(toml.dumps(agent.changed(document) if options.agent else document))
    return path


def _other_users(options: DemoOptions, nodes: tuple[str, ...], gpus: int) -> OtherUsersJobs | None:
    if options.preempt_every_s <= 0:
        return None
    stream = arrivals(
        nodes, gpus, every_s=options.preempt_every_s, run_s=options.other_job_s, seed=options.settings.seed
    )
    return OtherUsersJobs(stream, next(stream))


def _watch(
    options: DemoOptions,
    site: DemoSite,
    job: int,
    other_users: OtherUsersJobs | None,
    screen: Screen,
    killer: agent.WorkerKiller | None = None,
) -> None:
    """Refresh the display, play the other users and kill environment workers until the run is finished.

    Raises `ScavengerError` as soon as it cannot be any more.
    """
    engine = store.open_readonly(site.ledger_url)
    trained_since: float | None = None
    deadline, following = Deadline(options.time_limit_s, time.monotonic()), training.Training(job)
    try:
        while True:
            now = time.monotonic()
            seen, run_state = _read(engine)
            if seen is not None and seen.trained() and trained_since is None:
                trained_since = (
                    now  # others arrive once training runs: before that there is nothing to take back
                )
            state, verdict = _observe(site, following, run_state, other_users, now)
            if verdict.done:
                return
            if verdict.failed:
                raise ScavengerError(*_died(verdict.failed, site.dir))
            if late := deadline.passed(state, len(seen.steps) if seen is not None else 0, now):
                raise ScavengerError(late, f"look at {_log_of_failure(site.dir)}")
            if other_users is not None and trained_since is not None:
                _arrive(site, other_users, now - trained_since)
            if killer is not None and trained_since is not None:
                killer.look(now, len(seen.steps) if seen is not None else 0)
            phase = "training while others take GPUs back" if trained_since else "starting the training job"
            screen.show(seen, verdict.phase or phase)
            time.sleep(max(0.0, REFRESH_S - (time.monotonic() - now)))  # the display's frame rate
    finally:
        engine.dispose()


def _died(why: str, folder: Path) -> tuple[str, str]:
    """Cause, with the last lines of the job's log, and remedy."""
    log = folder / "train.log"
    text = log.read_text(errors="replace") if log.is_file() else ""
    return f"{why}; the last lines of its log:\n{training.log_tail(text)}", f"the whole log: {log}"


class Deadline:
    """`limit_s` for the training job's wait, from `since` on, and for each step from when the job is first seen to run. Pure."""

    def __init__(self, limit_s: float, since: float) -> None:
        self._limit_s, self._since, self._started, self._steps = limit_s, since, False, 0

    def passed(self, state: JobState | None, steps: int, now: float) -> str:
        """What did not happen in time, given the job's state (None: not known) and how many steps and evaluations are done; "" while
        there is time."""
        if (state is JobState.RUNNING and not self._started) or steps > self._steps:
            self._started, self._since, self._steps = True, now, max(steps, self._steps)
        if now - self._since <= self._limit_s or state not in (None, JobState.PENDING, JobState.RUNNING):
            return ""
        if not self._started:
            return f"the training job did not start within {self._limit_s:.0f} s"
        return f"the training job took no step for {self._limit_s:.0f} s, after {self._steps}"


def _log_of_failure(folder: Path) -> Path:
    """The log to look at: the training job's, or while that has nothing in it the daemon's, or else their folder."""
    logs = (folder / "train.log", folder / "daemon.log")
    return next((log for log in logs if log.is_file() and log.stat().st_size), folder)


def _read(engine: sa.Engine) -> tuple[metrics.DemoMetrics | None, str]:
    """The figures, and the state of the run; (None, "") before the ledger has any."""
    try:
        return metrics.read(engine), metrics.run_state(engine)
    except sa.exc.OperationalError:  # the daemon has not made the tables yet, or holds a lock for a moment
        return None, ""


def _observe(
    site: DemoSite,
    following: training.Training,
    run_state: str,
    other_users: OtherUsersJobs | None,
    now: float,
) -> tuple[JobState | None, training.DemoProgress]:
    """The training job's state (None: not known) and what it means; notes when jobs of others got their GPUs."""
    try:
        jobs = site.cluster.jobs()
    except ClusterError as error:
        malformed = isinstance(error, ClusterUnavailable) and error.error_kind == ErrorKind.PARTIAL
        return None, following.unreadable(error.cause, now, malformed=malformed)
    seen_at = time.time()
    by_id: dict[int, Job] = {j.job_id: j for j in jobs}
    for job_id, at in (other_users.submitted if other_users else {}).items():
        seen = by_id.get(job_id)
        if (
            other_users is not None
            and seen is not None
            and job_id not in other_users.waited
            and seen.state is not JobState.PENDING
        ):
            # Slurm's own times have whole seconds; ours are finer but as late as the observation
            other_users.waited[job_id] = min(seen_at - at, max(0.0, seen.start_time + 1 - at))
    mine = by_id.get(following.job_id)
    return mine.state if mine is not None else None, following.observe(jobs, run_state, now)


def _arrive(site: DemoSite, other_users: OtherUsersJobs, elapsed_s: float) -> None:
    if other_users.pending.at_s > elapsed_s:
        return
    arrival = other_users.pending
    other_users.pending = next(other_users.arrivals)
    other_users.submitted[site.submit_other(arrival.run_s, arrival.gpus, arrival.node)] = time.time()


def _report(
    options: DemoOptions,
    site_dir: Path,
    seen: metrics.DemoMetrics,
    context: report.Context,
    frame: RenderableType | None,
    console: Console,
) -> None:
    page, steps = site_dir / "report.html", options.settings.steps
    subject = agent.SUBJECT if options.agent else "sorting digits"
    page.write_text(
        report.html(seen, context, "demo run", f"{steps} steps of GRPO on {subject}, on {context.backend}")
    )
    end = report.display(seen, elapsed_s=context.took_s, phase="the end of the run", steps=steps)
    with (site_dir / "display.txt").open("w", encoding="utf-8") as file:
        (site_dir / "display.svg").write_text(report.drawing(frame or end, file), encoding="utf-8")
    console.print()
    for name, value in report.summary(seen, context):
        console.print(f"  {name:<28} {value}", highlight=False, soft_wrap=True)
    console.print(
        f"\n  report  {page}\n  ledger  {context.ledger_path}\n\n  Three queries worth trying:",
        highlight=False,
        soft_wrap=True,
    )
    console.print(report.queries(context.ledger_path), highlight=False, soft_wrap=True)
    web = f"{Path(sys.executable).parent / 'scavenger'} web --config {site_dir / 'scavenger.toml'}"
    console.print(f"\n  The whole run in a browser (extra web):\n{web}", highlight=False, soft_wrap=True)
    if context.episodes is not None:
        if context.episodes.one is not None:
            console.print("\n  One episode, turn by turn:", highlight=False, soft_wrap=True)
            console.print(episode.drawn(context.episodes.one), highlight=False, markup=False, soft_wrap=True)
        return
    command = f"{Path(sys.executable).parent / 'scavenger'} samples {RUN_NAME} --step 3 --config {site_dir / 'scavenger.toml'}"
    console.print(f"\n  And what the model said in step 3:\n{command}", highlight=False, soft_wrap=True)


def run_document(
    settings: DemoSettings, *, name: str, state_dir: Path, out_dir: Path, model: Path, max_engines: int
) -> dict[str, dict[str, Any]]:
    """The `run.toml` of the demo. Pure."""
    return {
        "run": {
            "name": name,
            "seed": settings.seed,
            "steps": settings.steps,
            "state_dir": state_dir,
            "out_dir": out_dir,
            "deterministic": settings.deterministic,
            "max_engines": max_engines,
        },
        "model": {"path": model, "context_length": 32},
        "data": {
            "task": "sort",
            "prompts_per_step": settings.prompts_per_step,
            "samples_per_prompt": settings.samples_per_prompt,
        },
        "sampling": {"max_tokens": 7, "temperature": 1.0},
        "engine": {"name": "reference", "max_batch": settings.max_batch, "pace": settings.pace},
        "optimizer": {"lr": settings.lr, "warmup_steps": settings.warmup_steps, "betas": [0.9, 0.99]},
        "reserved": {"workers": 1, "window": settings.window, "wake_after_s": 2.0},
        "checkpoint": {"every": 20, "keep": 2},
        "eval": {"prompts": settings.eval_prompts},
        "weights": {"dtype": "float32"},
        "monitor": {"token_differences": 1.0},  # it is short, and to be looked at
    }
