"""Plays a whole run on a `DemoSite` for the system tests. The engines, the trainer, the daemon and the cluster are the real ones."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from rollout.engines import account
from scavenger import toml
from scavenger.cluster import processes
from scavenger.cluster.layout import demo_layout
from scavenger.cluster.model import Job, JobState
from scavenger.demo.site import DemoSite, SiteOptions
from scavenger.errors import ClusterUnavailable
from scavenger.ledger import store
from scavenger.ledger.read import reports

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 170.0
ENDED = (
    JobState.COMPLETED,
    JobState.FAILED,
    JobState.CANCELLED,
    JobState.TIMEOUT,
    JobState.OUT_OF_MEMORY,
    JobState.NODE_FAIL,
)


@dataclass(frozen=True)
class Result:
    """What must not depend on who generated what: tokens by (step, prompt, index), and (reward, loss) by step, as the ledger has them.

    Of a run with episodes, tokens by (step, prompt, index, turn).
    """

    tokens: dict[tuple[int, ...], bytes]
    steps: dict[int, tuple[str, str]]

    def until(self, last: int) -> Result:
        """The first steps of it: a longer run starts as a shorter one."""
        assert last in self.steps
        return Result(
            {k: v for k, v in self.tokens.items() if k[0] <= last},
            {k: v for k, v in self.steps.items() if k <= last},
        )


def wait_for(
    what: str, condition: Callable[[], object], deadline_s: float = DEADLINE_S, every_s: float = 0.1
) -> Any:
    """Poll until the condition is true and return its value; fail naming what was waited for."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {deadline_s:g} s for {what}"
        time.sleep(every_s)  # between two looks at a condition
    return value


def run_document(
    state_dir: Path, out_dir: Path, model: Path, **overrides: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """A small deterministic run: 4 prompts x 4 samples, up to 20 tokens each, two ranks."""
    document: dict[str, dict[str, Any]] = {
        "run": {
            "name": "small",
            "seed": 7,
            "steps": 4,
            "state_dir": state_dir,
            "out_dir": out_dir,
            "deterministic": True,
            "max_engines": 8,
        },
        "model": {"path": model, "context_length": 32},
        "data": {"task": "sort", "prompts_per_step": 4, "samples_per_prompt": 4},
        "sampling": {"max_tokens": 20},
        "engine": {"name": "reference", "max_batch": 4, "pace": 0.0},
        "reward": {"function": "tests.system.rewards:even_share"},
        "optimizer": {"lr": 1e-3},
        "reserved": {"workers": 1, "window": 0.25, "wake_after_s": 1.0},
        "checkpoint": {"every": 2, "keep": 2},
        "weights": {"dtype": "float32"},
    }
    for section, keys in overrides.items():
        document.setdefault(section, {}).update(keys)
    return document


def write_run(site: DemoSite, model: Path, **overrides: Mapping[str, Any]) -> Path:
    """`run_document` in the site's folder."""
    path = site.dir / "run.toml"
    path.write_text(toml.dumps(run_document(site.state_dir, site.dir / "out", model, **overrides)))
    return path


#: Bytes of a stand-in for the GPU that a rank of the small run shares with a reserved engine, by the number of ranks: more than either
#: takes, and less than both (`account`). Other runs are counted, and have room.
GPU_NBYTES = {1: 4_800_000, 2: 4_200_000}
ROOMY = 10**12


def submit(site: DemoSite, run_toml: Path, ranks: int = 2, env: Mapping[str, str] | None = None) -> int:
    """Each job gets an account of its GPUs' memory: whoever trains beside an engine that is awake fails the run (`result`)."""
    run = tomllib.loads(run_toml.read_text())
    small = run["run"].get("deterministic", False) and run["model"]["context_length"] <= 32
    small = small and run["data"]["samples_per_prompt"] <= 4  # a group is one micro-batch
    number = len(list(site.dir.glob("gpu-*.account")))
    gpu = account.create(site.dir / f"gpu-{number}.account", GPU_NBYTES.get(ranks, ROOMY) if small else ROOMY)
    environ = {"PYTHONPATH": str(ROOT), account.VARIABLE: str(gpu)} | dict(env or {})
    return site.submit_training(run_toml, ranks=ranks, env=environ)


def over_capacity(site: DemoSite) -> str:
    """Who wanted more of a GPU's memory than there was, and who had it; "" = nobody did."""
    return "\n".join(path.read_text() for path in sorted(site.dir.glob("gpu-*.refused")))


@contextlib.contextmanager
def second_daemon(site: DemoSite) -> Iterator[subprocess.Popen[bytes]]:
    """Have another daemon take over the same state, which becomes the site's; gives the first one, and ends it on leaving."""
    first = site.daemon
    try:
        site.start_daemon("--take-over")
        yield first
    finally:
        site.end_daemon(first)


def engine_pid(site: DemoSite, job_id: int) -> int:
    """The engine's process of a job on the local backend, of this site: another test's has jobs of the same numbers."""
    mark = f"SCAVENGER_JOB_ID={job_id}"
    table = processes.snapshot()
    found = [
        pid
        for pid in table
        if processes.has_variable(pid, mark)
        and " -m rollout " in (title := processes.title(pid))
        and str(site.state_dir) in title
    ]
    # A program that the engine is about to start is a copy of the engine until it runs.
    engines = [pid for pid in found if table[pid].ppid not in found]
    assert len(engines) == 1, f"job {job_id} has the engines {engines}"
    return engines[0]


def kill_daemon(site: DemoSite) -> None:
    """SIGKILL, and wait until it is gone."""
    site.daemon.kill()
    site.end_daemon(site.daemon)


def job(site: DemoSite, job_id: int) -> Job | None:
    try:
        return next((j for j in site.cluster.view().jobs if j.job_id == job_id), None)
    except ClusterUnavailable:
        return None


def finish(site: DemoSite, job_id: int, deadline_s: float = DEADLINE_S) -> None:
    """Wait until the training job has ended, and fail with its log unless it completed."""

    def ended() -> Job | None:
        seen = job(site, job_id)
        return seen if seen is not None and seen.state in ENDED and not seen.flags else None

    try:
        seen = wait_for("the training job", ended, deadline_s)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{logs(site)}") from error
    assert seen.state is JobState.COMPLETED, f"the training job ended as {seen.state}\n{logs(site)}"


def cut_short(site: DemoSite, job_id: int) -> int:
    """Cancel the training job, and give the last step that it completed (of several runs, the last of any).

    For runs that are longer than anything that is to happen in them, however slow the machine is.
    """
    site.cluster.cancel((job_id,))

    def ended() -> bool:
        seen = job(site, job_id)
        return seen is None or (seen.state in ENDED and not seen.flags)

    wait_for("the cancelled training job to be gone", ended)
    return steps_done(site)


def undisturbed(model: Path, folder: Path, steps: int) -> Result:
    """One reserved engine alone, nobody preempted, on the local backend."""
    options = SiteOptions("local", folder, demo_layout(grace_s=1.0), poll_interval_s=0.2)
    with DemoSite(options) as site:
        run = write_run(site, model, run={"harvest": False, "steps": steps}, engine={"max_batch": 16})
        finish(site, submit(site, run))
        return result(site)


def as_long(undisturbed_run: Result, found: Result, model: Path, folder: Path) -> Result:
    """As many steps of an undisturbed run as `found` has; played anew where a slow machine came further than that one."""
    done = max(found.steps)
    return (
        undisturbed_run if done in undisturbed_run.steps else undisturbed(model, folder / "longer", done)
    ).until(done)


def logs(site: DemoSite, lines: int = 40) -> str:
    """The ends of the logs, for a failure's message."""
    parts = []
    for path in sorted(
        [*site.dir.glob("*.log"), *site.dir.glob("*.refused"), *site.dir.glob("state/logs/*")]
    )[-8:]:
        tail = path.read_text(errors="replace").splitlines()[-lines:]
        parts.append(f"---- {path.name}\n" + "\n".join(tail))
    return "\n".join(parts)


def ask(site: DemoSite, sql: str) -> list[tuple[Any, ...]]:
    """Rows of a query on the site's ledger; none while the daemon has not made its tables."""
    return ask_ledger(site.ledger_url, sql)


def ask_ledger(url: str, sql: str) -> list[tuple[Any, ...]]:
    engine = store.open_readonly(url)
    try:
        with engine.connect() as connection:
            return [tuple(row) for row in connection.execute(sa.text(sql))]
    except sa.exc.OperationalError:
        return []
    finally:
        engine.dispose()


def steps_done(site: DemoSite) -> int:
    rows = ask(site, "SELECT max(step) FROM steps WHERE purpose = 'train' AND rewound_by IS NULL")
    return int(rows[0][0] or 0) if rows else 0


def workers(site: DemoSite, kind: str = "harvested") -> list[tuple[int, int, str]]:
    """(worker id, job id, node) of the workers that are here."""
    return ask(
        site,
        f"SELECT worker_id, job_id, node FROM workers WHERE left_at IS NULL AND kind = '{kind}' ORDER BY worker_id",
    )


def busy(site: DemoSite, kind: str = "harvested") -> list[tuple[int, int, str]]:
    """(worker id, job id, node) of workers that hold a sample with tokens and without an end."""
    return ask(
        site,
        "SELECT DISTINCT w.worker_id, w.job_id, w.node FROM workers w JOIN leases l ON l.worker_id = w.worker_id AND l.ended_at IS NULL "
        f"JOIN samples s ON s.sample_id = l.sample_id WHERE w.left_at IS NULL AND w.kind = '{kind}' AND s.accepted_len > l.start_len "
        "ORDER BY w.worker_id",
    )


def result(site: DemoSite) -> Result:
    """Tokens, rewards and losses of the steps that survived; and the audits: the ledger must be sound, and GPUs were never overfull."""
    assert over_capacity(site) == ""
    return result_of(site.ledger_url)


def result_of(url: str, run: str = "") -> Result:
    """The same of a ledger that may be another host's. Nothing was consumed twice: neither a step nor a sample is there twice. `run`: of
    this one alone, where the site has several."""
    assert reports.check(url) == []
    tokens: dict[tuple[int, ...], bytes] = {}
    rows = ask_ledger(
        url,
        "SELECT g.step, g.prompt_index, s.sample_index, c.start_len, c.tokens FROM samples s JOIN groups g ON g.group_id = s.group_id "
        f"{_run_of('g', run)}JOIN chunks c ON c.sample_id = s.sample_id WHERE g.purpose = 'train' "
        "AND s.state IN ('consumed', 'filtered') ORDER BY s.sample_id, c.start_len",
    )
    for step, prompt, index, start, data in rows:
        key = (step, prompt, index)
        assert len(tokens.get(key, b"")) == 4 * start, f"sample {key} has a gap at {start}"
        tokens[key] = tokens.get(key, b"") + data
    return Result(tokens, steps_of(url, run))


def _run_of(table: str, run: str) -> str:
    return f"JOIN runs r ON r.run_id = {table}.run_id AND r.name = '{run}' " if run else ""


def steps_of(url: str, run: str = "") -> dict[int, tuple[str, str]]:
    """(reward, loss) of the steps that survived."""
    found = ask_ledger(
        url,
        f"SELECT t.step, t.metrics FROM steps t {_run_of('t', run)}WHERE t.purpose = 'train' AND t.rewound_by IS NULL ORDER BY t.step",
    )
    steps = {}
    for step, text in found:
        metrics = json.loads(text)
        assert step not in steps, f"step {step} survives twice"
        steps[step] = (f"{metrics['reward']:.9f}", f"{metrics['loss']:.9f}")
    return steps


def jobs_left(site: DemoSite) -> list[Job]:
    """Jobs of ours that the queue still holds."""
    return [
        j
        for j in site.cluster.view().jobs
        if j.partition == "scavenge" and j.state in (JobState.PENDING, JobState.RUNNING)
    ]
