"""A user ends what is ours, at any moment: a cancelled job stays cancelled, and Ctrl-C leaves nothing behind."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scavenger import toml
from scavenger.cluster import processes
from scavenger.cluster.layout import demo_layout
from scavenger.cluster.model import JobState
from scavenger.demo.site import DemoSite, SiteOptions, daemon_document
from scavenger.ledger.read import reports
from scavenger.weights.source import WeightServer
from tests.system import play, scripted


@pytest.mark.slurm
def test_on_slurm_a_cancelled_engine_is_replaced_and_stays_cancelled_and_a_daemon_that_is_refused_beside_it_disturbs_nothing(
    tmp_path: Path, small_model: Path
) -> None:
    options = SiteOptions("slurm", tmp_path, demo_layout(grace_s=2.0), poll_interval_s=0.3, max_engines=1)
    with DemoSite(options) as site, WeightServer() as source:
        run_toml = play.write_run(site, small_model, run={"name": "cancelled"}, engine={"pace": 2.5})
        with scripted.opened(run_toml) as run:
            version = scripted.publish(run, source, small_model, 0)
            waiting = scripted.submit(
                run, 1, version, samples=16, tokens=20
            )  # four at a time: 32 s of one engine's work
            [engine] = play.wait_for("an engine at work", lambda: play.busy(site), 60)
            _partitions_in_the_way(site)
            assert play.wait_for("an engine at work", lambda: play.busy(site), 60) == [engine], (
                "it never stopped"
            )
            job = engine[1]
            site.cluster.cancel((job,))
            groups = scripted.collect(run, waiting)
            scripted.commit(run, 1, version, groups)
            run.close_run("finished")
        leases = play.ask(
            site, "SELECT sample_id, epoch, worker_id, start_len, end_len, reason FROM leases ORDER BY 1, 2"
        )
        moves = [sample.moves for group in groups for sample in group.samples]
        cut = {sample for sample, *_, reason in leases if reason != "finished"}
        assert 1 <= len(cut) <= 4, leases
        # A sample that was cut before its first token has not moved.
        assert (len(moves), max(moves)) in ((16, 0), (16, 1)), leases
        assert moves.count(1) <= len(cut), leases
        _lost_no_more_than_promised(site, len(cut))
        play.wait_for("our jobs to leave the queue", lambda: not play.jobs_left(site), 60)
        was = play.job(site, job)
        assert was is None or (was.state, was.restart_count) == (JobState.CANCELLED, 0)
        kinds = play.ask(site, "SELECT DISTINCT kind FROM events")
        assert ("engine_died",) not in kinds, "being cancelled is no crash"
        assert play.ask(site, "SELECT count(*) FROM jobs") == [(2,)]
        assert reports.check(site.ledger_url) == []


def _lost_no_more_than_promised(site: DemoSite, cut: int) -> None:
    """An engine that said goodbye lost nothing. One that Slurm killed first (a busy machine) lost a flush interval at most:

    at a pace of 2.5 tokens a second that is one token of each sample that it had.
    """
    [(lost, noticed)] = play.ask(
        site,
        "SELECT coalesce(sum(regenerated), 0), min(notice) FROM workers WHERE kind = 'harvested' AND regenerated + salvaged > 0",
    )
    assert lost <= (0 if noticed else cut), (lost, noticed, cut)
    assert play.ask(site, "SELECT sum(regenerated) FROM samples") == [(lost,)]


def _partitions_in_the_way(site: DemoSite) -> None:
    """Daemons of other configurations are refused while ours harvests: each says why and ends, and none touches what runs."""
    refused = {"normal": "is not preemptible (PreemptMode=OFF)", "scavange": "has no such partition"}
    starting = {}
    for partition in refused:
        document = daemon_document(site.options, site.dir / "other-state", None)
        document["harvest"]["partition"] = partition
        path = site.dir / f"{partition}.toml"
        path.write_text(toml.dumps(document))
        argv = [sys.executable, "-m", "scavenger", "daemon", "--config", str(path)]
        starting[partition] = subprocess.Popen(
            argv,
            env=site.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    try:
        for partition, process in starting.items():
            _, told = process.communicate(timeout=60)
            assert (process.returncode, "Traceback" in told) == (2, False), told
            assert f"harvest.partition = '{partition}'" in told
            assert refused[partition] in told
    finally:
        for process in starting.values():
            process.kill()
            process.wait()


# ---------------------------------------------------------------- Ctrl-C

#: `scavenger demo` with a model that is there already: making one takes longer than all else here.
DEMO = """
import sys
from pathlib import Path
from scavenger.cli.main import main
from scavenger.demo import session

class Given:
    path = Path(sys.argv.pop())
    def __init__(self, directory, seed): pass
    def __enter__(self): return self
    def __exit__(self, *exc): pass
    def wait(self, screen): pass

session.Model = Given
main()
"""


@pytest.fixture
def own_tmp() -> Iterator[Path]:
    """A folder for everything that a demo leaves or starts: its name marks the processes."""
    path = Path(tempfile.mkdtemp(prefix="scv-"))
    yield path
    shutil.rmtree(path)


def _processes_of(mark: str) -> dict[int, str]:
    """Every process that names the folder on its command line or got it from its parent's environment."""
    here = os.getpid()
    return {
        pid: processes.title(pid)
        for pid, proc in processes.snapshot().items()
        if pid != here
        and proc.state != "Z"
        and (mark in processes.title(pid) or processes.has_variable(pid, f"TMPDIR={mark}"))
    }


def _ledger(own_tmp: Path) -> Path | None:
    return next(iter(own_tmp.glob("out/run-*/state/ledger.sqlite3")), None)


def _interrupt(own_tmp: Path, model: Path, backend: str, at: float | None) -> None:
    """Start the demo, press Ctrl-C `at` seconds after its first act (None: when harvested engines have joined), look at what is left."""
    argv = [
        sys.executable,
        "-c",
        DEMO,
        "demo",
        "--out",
        str(own_tmp / "out"),
        "--backend",
        backend,
        "--steps",
        "30",
        str(model),
    ]
    env = {**os.environ, "TMPDIR": str(own_tmp), "OMP_NUM_THREADS": "1"}
    log = own_tmp / "demo.log"
    with log.open("wb") as output:
        demo = subprocess.Popen(
            argv,
            env=env,
            cwd=play.ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        begun = _joined if at is None else _began
        play.wait_for("the moment", lambda: begun(own_tmp) or demo.poll() is not None, every_s=0.01)
        if at is not None:
            time.sleep(at)  # the moment is the test's subject
        assert demo.poll() is None, log.read_text(errors="replace")[-2000:]
        os.killpg(demo.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
        code = demo.wait(90)
    finally:
        if demo.poll() is None:
            demo.kill()
            demo.wait()
    said = log.read_text(errors="replace")
    assert code == 130, said[-2000:]
    assert "stopped; nothing is left running" in said
    assert "Traceback" not in said, said
    assert _processes_of(str(own_tmp)) == {}, f"left after a Ctrl-C at {at} s on {backend}"
    assert not list(own_tmp.glob("slurm-sandbox-*"))


def _began(own_tmp: Path) -> bool:
    return (own_tmp / "out").exists()


def _joined(own_tmp: Path) -> bool:
    import sqlite3

    path = _ledger(own_tmp)
    if path is None:
        return False
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        return bool(connection.execute("SELECT 1 FROM workers WHERE kind = 'harvested'").fetchone())
    except sqlite3.OperationalError:  # no tables yet
        return False
    finally:
        connection.close()


def test_ctrl_c_at_a_random_moment_leaves_nothing(own_tmp: Path, small_model: Path) -> None:
    """Another moment each time: the assertions name it."""
    _interrupt(own_tmp, small_model, "local", random.uniform(0.0, 6.0))


@pytest.mark.slurm
def test_ctrl_c_while_engines_work_on_slurm_leaves_nothing(own_tmp: Path, small_model: Path) -> None:
    _interrupt(own_tmp, small_model, "slurm", None)
