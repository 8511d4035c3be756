"""Faults in whole, real runs: nothing is lost, nothing hangs, the cause is named, and the result is that of the undisturbed run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scavenger.cluster.layout import demo_layout
from scavenger.cluster.model import JobState
from scavenger.demo.site import DemoSite, SiteOptions
from scavenger.errors import Fenced, LedgerHeld, Refused
from scavenger.harvest import limits as harvest_limits
from scavenger.ledger.read import reports
from scavenger.weights.source import WeightServer
from tests.chaos.faults import fill
from tests.system import killed_trainer, play, scripted

#: More than are played: the run is cut short when all of its faults were met.
STEPS = 500
LAYOUT = demo_layout(grace_s=1.0, requeue_delay_s=0.5)
#: Silence is believed soon, so that a stopped worker's samples move while the test looks on.
QUICK = {"heartbeat_s": 0.3, "suspect_s": 1.0, "dead_s": 2.5, "reconnect_s": 5.0}
OPEN_LEASES = (
    "SELECT l.sample_id, l.epoch, l.worker_id, s.accepted_len FROM leases l JOIN samples s ON s.sample_id = l.sample_id "
    "WHERE l.ended_at IS NULL AND s.accepted_len > l.start_len"
)


def _events(site: DemoSite, kind: str) -> list[tuple[str, str]]:
    """(subject, reason) of the ledger's events of a kind."""
    return play.ask(site, f"SELECT subject, reason FROM events WHERE kind = '{kind}' ORDER BY id")


def _daemon_log(site: DemoSite) -> str:
    return (site.dir / "daemon.log").read_text(errors="replace")


# ---------------------------------------------------------------- processes killed, replaced and stopped


@pytest.mark.mpi
@pytest.mark.timeout(480)  # each of its conditions has its own deadline
def test_a_killed_daemon_a_second_daemon_and_a_zombie_engine_change_nothing(
    tmp_path: Path, small_model: Path, undisturbed: play.Result
) -> None:
    options = SiteOptions("local", tmp_path, LAYOUT, poll_interval_s=0.2, max_engines=2, daemon=QUICK)
    with DemoSite(options) as site:
        # With a batch of 2 three engines need 3 rounds for a step's 16 samples at best, two need 4: each is of use.
        run = play.write_run(
            site,
            small_model,
            run={"steps": STEPS},
            engine={"max_batch": 2, "pace": 20.0},
            checkpoint={"every": 4},
        )
        training = play.submit(site, run)
        play.wait_for("samples in flight with tokens", lambda: play.busy(site))
        _kill_the_daemon(site)
        _start_a_second_daemon(site)
        _stop_an_engine_until_its_samples_are_elsewhere(site)
        after = play.steps_done(site) + 1
        play.wait_for("training to go on", lambda: play.steps_done(site) >= after)
        sent_away = play.ask(site, "SELECT at, reason FROM decisions WHERE action = 'drain'")
        shrunk = play.ask(site, "SELECT min(at) FROM decisions WHERE reason LIKE '%steps too many%'")[0][0]
        done = play.cut_short(site, training)
        harvest_limits.drain(site.state_dir, "the test", at_once=False)
        play.wait_for("our jobs to leave the queue", lambda: not play.jobs_left(site))
        found = play.result(site).until(done)
        assert found == play.as_long(undisturbed, found, small_model, tmp_path)
        # Two whole steps in which fewer would have done are a reason to shrink, from then on; a restart is none. Decisions that follow
        # one another within a second are not all recorded: one that stands by what is useful says that the fleet shrank before.
        stands = re.compile(r"(\d+) engines are useful, \1 asked for: over \d+%, but no more are useful")
        too_soon = [
            reason
            for at, reason in sent_away
            if (shrunk is None or at < shrunk) and not stands.search(reason)
        ]
        assert too_soon == [], "a restarted daemon sent engines away in mid-step"


def _lost_by_silence(site: DemoSite, worker: int) -> list[tuple[int, int]]:
    """(sample, epoch) that a silent worker lost, once it holds nothing any more; none if all of its samples had ended."""
    still = f"SELECT 1 FROM leases WHERE worker_id = {worker} AND ended_at IS NULL"
    play.wait_for("its leases to end", lambda: not play.ask(site, still))
    return play.ask(
        site, f"SELECT sample_id, epoch FROM leases WHERE worker_id = {worker} AND reason LIKE 'silent for%'"
    )


def _wait_until_elsewhere(site: DemoSite, sample: int, epoch: int) -> None:
    newest = f"SELECT max(epoch) FROM leases WHERE sample_id = {sample}"
    play.wait_for("its sample to be leased elsewhere", lambda: play.ask(site, newest)[0][0] > epoch)


def _kill_the_daemon(site: DemoSite) -> None:
    """SIGKILL with samples in flight: the workers come back under their leases, and every durable token is still there."""
    play.kill_daemon(site)
    before = play.ask(site, OPEN_LEASES)
    assert before, "no sample was in flight"
    [[killed_at]] = play.ask(site, "SELECT max(committed_at) FROM generations")
    site.start_daemon()

    def resumed() -> object:
        return (
            play.ask(site, f"SELECT sample_id, epoch FROM chunks WHERE at > {killed_at} ORDER BY id")
            if _settled(site, before)
            else []
        )

    after = play.wait_for("the leases of before to go on or to move", resumed)
    assert {(sample, epoch) for sample, epoch, _, _ in before} & set(after), (
        "no lease went on under its old epoch"
    )
    for sample, _, _, length in before:
        [[accepted]] = play.ask(site, f"SELECT accepted_len FROM samples WHERE sample_id = {sample}")
        assert accepted >= length, f"sample {sample} lost tokens"
    assert play.ask(site, "SELECT sum(regenerated) FROM samples") == [(0,)], (
        "workers keep what was not acknowledged"
    )


def _settled(site: DemoSite, leases: list[tuple[int, ...]]) -> bool:
    """Each of these samples has more tokens, or its lease has ended."""
    open_now = {(sample, epoch): length for sample, epoch, _, length in play.ask(site, OPEN_LEASES)}
    return all(open_now.get((sample, epoch), length + 1) > length for sample, epoch, _, length in leases)


def _start_a_second_daemon(site: DemoSite) -> None:
    """An admin's mistake is refused. Meant, the newer daemon takes the ledger, the older one ends, the run goes on with the newer."""
    argv = [sys.executable, "-m", "scavenger", "daemon", "--config", str(site.config_path)]
    refused = subprocess.run(
        argv, env=site.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
    )
    assert refused.returncode == LedgerHeld.exit_code, refused.stderr
    assert f"held by the daemon with pid {site.daemon_pid} on host" in refused.stderr
    with play.second_daemon(site) as first:
        assert first.wait(30) == Fenced.exit_code
    assert "another daemon owns this ledger now" in _daemon_log(site)
    assert "let only one daemon run on a ledger" in _daemon_log(site)


def _stop_an_engine_until_its_samples_are_elsewhere(site: DemoSite) -> None:
    """SIGSTOP: silence moves its samples. SIGCONT: what it still says is refused with a reason."""
    lost: list[tuple[int, int]] = []
    while (
        not lost
    ):  # the last samples of an engine may have ended just before it was stopped: then another one is
        worker, job = play.wait_for("an engine at work for this daemon", lambda: _at_work(site))[0]
        pid = play.engine_pid(site, job)
        os.kill(pid, signal.SIGSTOP)
        try:
            lost = _lost_by_silence(site, worker)
            if lost:
                _wait_until_elsewhere(site, *lost[0])
        finally:
            os.kill(pid, signal.SIGCONT)
    [[reason]] = play.wait_for("the zombie to be refused", lambda: _refusals(site))[:1]
    assert "moved on" in reason
    for sample, epoch in lost:
        [[last]] = play.ask(
            site, f"SELECT coalesce(max(at), 0) FROM chunks WHERE sample_id = {sample} AND epoch = {epoch}"
        )
        [[ended]] = play.ask(
            site, f"SELECT ended_at FROM leases WHERE sample_id = {sample} AND epoch = {epoch}"
        )
        assert last <= ended, f"sample {sample} took a chunk of its lost lease"


def _at_work(site: DemoSite) -> list[tuple[int, int]]:
    """(worker id, job id) of harvested engines that hold samples and have said something to the newest daemon."""
    assert play.ask(site, "SELECT 1 FROM runs WHERE state <> 'active'") == [], (
        f"the run ended too soon\n{play.logs(site)}"
    )
    [[since]] = play.ask(site, "SELECT max(started_at) FROM generations")
    heard = {
        worker for (worker,) in play.ask(site, f"SELECT DISTINCT worker_id FROM chunks WHERE at > {since}")
    }
    return [(worker, job) for worker, job, _ in play.busy(site) if worker in heard]


def _refusals(site: DemoSite) -> list[tuple[str]]:
    return [(reason,) for kind in ("stale_leases", "chunk_refused") for _, reason in _events(site, kind)]


# ---------------------------------------------------------------- the trainer killed; the disk full


@contextmanager
def _small_disk(where: Path, nbytes: int) -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a tmpfs")
    where.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes},mode=700", "tmpfs", str(where)],
        capture_output=True,
        text=True,
    )
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(where)], check=True)


@pytest.mark.mpi
def test_a_trainer_killed_before_its_commit_and_a_full_disk_change_nothing_without_any_harvested_engine(
    tmp_path: Path, small_model: Path, undisturbed: play.Result
) -> None:
    """`harvest.max_engines = 0` besides: harvesting is wished for, and there never is an engine."""
    options = SiteOptions("local", tmp_path, LAYOUT, poll_interval_s=0.2, max_engines=0)
    with _small_disk(tmp_path / "state", 16 << 20), DemoSite(options) as site:
        run = play.write_run(site, small_model, engine={"max_batch": 16, "pace": 40.0})
        python = str(killed_trainer.interpreter(tmp_path))
        training = play.submit(site, run, env={"SCAVENGER_PYTHON": python, killed_trainer.STEP: "4"})
        play.wait_for("the first step", lambda: play.steps_done(site) >= 1)
        _fill_the_disk_and_free_it(site)
        crashed = play.wait_for("the trainer to be killed", lambda: _over(site, training))
        assert crashed is JobState.FAILED
        assert play.steps_done(site) == 3
        versions = play.ask(site, "SELECT count(*) FROM weight_versions WHERE step = 4")
        assert versions == [(1,)], "step 4 was published and not committed"

        play.finish(site, play.submit(site, run))
        assert play.result(site) == undisturbed.until(4)
        _replayed(site)
        assert play.ask(site, "SELECT count(*) FROM workers WHERE kind = 'harvested'") == [(0,)]
        assert play.ask(site, "SELECT count(*) FROM jobs") == [(0,)]


def _over(site: DemoSite, job_id: int) -> JobState | None:
    seen = play.job(site, job_id)
    return seen.state if seen is not None and seen.state in play.ENDED and not seen.flags else None


def _fill_the_disk_and_free_it(site: DemoSite) -> None:
    ballast = site.state_dir / "ballast"
    fill(ballast)
    play.wait_for("the daemon to stall and say why", lambda: "STALLED_DISK_FULL" in _daemon_log(site))
    line = next(line for line in _daemon_log(site).splitlines() if "STALLED_DISK_FULL" in line)
    assert "SQLITE_FULL" in line
    assert "free space where the ledger lies" in line
    ballast.unlink()
    play.wait_for(
        "the daemon to go on by itself",
        lambda: "state=OK" in _daemon_log(site).partition("STALLED_DISK_FULL")[2],
    )


def _replayed(site: DemoSite) -> None:
    """I3: step 3 was committed after the checkpoint of step 2, so its samples were delivered again and not generated again."""
    assert play.ask(site, "SELECT attempt, resume_step FROM attempts ORDER BY attempt") == [(1, 0), (2, 2)]
    assert play.ask(site, "SELECT step, attempt FROM steps WHERE rewound_by = 2 AND purpose = 'train'") == [
        (3, 1)
    ]
    again = play.ask(
        site, "SELECT DISTINCT g.step FROM groups g WHERE g.version > g.created_version ORDER BY 1"
    )
    assert again == [(3,), (4,)], "steps 3 and 4 were adopted under the versions of the second attempt"
    reopened = play.ask(
        site,
        "SELECT count(DISTINCT e.sample_id) FROM sample_ends e JOIN samples s ON s.sample_id = e.sample_id "
        "JOIN groups g ON g.group_id = s.group_id WHERE e.state = 'reopened' AND e.attempt = 2 AND g.step = 3",
    )
    assert reopened == [(16,)]
    assert play.ask(site, "SELECT count(*) FROM groups WHERE purpose = 'train'") == [(16,)], (
        "no prompt was generated twice"
    )
    twice = "SELECT sample_id FROM sample_ends WHERE state = 'consumed' AND attempt = 2 GROUP BY sample_id HAVING count(*) > 1"
    assert play.ask(site, twice) == []


# ---------------------------------------------------------------- jobs that die at once


@pytest.mark.mpi
def test_job_scripts_that_die_at_once_everywhere_blame_no_node_and_the_run_completes_alone(
    tmp_path: Path, small_model: Path, undisturbed: play.Result
) -> None:
    template = tmp_path / "dies.sbatch.j2"
    template.write_text("#!/bin/bash\nexit 1\n")
    harvest = {"job_template": str(template), "backoff_s": 0.03, "quarantine_after": 2, "max_pending": 1}
    options = SiteOptions(
        "local", tmp_path / "site", LAYOUT, poll_interval_s=0.2, max_engines=2, harvest=harvest
    )
    with DemoSite(options) as site:
        run = play.write_run(site, small_model, engine={"max_batch": 16, "pace": 16.0})
        training = play.submit(site, run)
        play.wait_for("a node to be blamed", lambda: _events(site, "node_quarantined"), 60)
        play.wait_for(
            "the next one to show that it was not the node", lambda: _events(site, "node_released"), 60
        )
        play.finish(site, training)
        assert play.result(site) == undisturbed.until(4)
        assert play.ask(site, "SELECT count(*) FROM workers WHERE kind = 'harvested'") == [(0,)]
        [(_, why)] = _events(site, "node_quarantined")
        assert "2 engines died on it" in why
        assert "exit code 1" in why
        reasons = [reason for (reason,) in play.ask(site, "SELECT reason FROM decisions")]
        assert any("backs off" in reason and "died at once" in reason for reason in reasons)
        [(jobs,)] = play.ask(site, "SELECT count(*) FROM jobs")
        assert 3 <= jobs <= 20, (
            "each waits twice as long as the one before: 0.03 s, and 15 s before the tenth"
        )


# ---------------------------------------------------------------- an engine that makes no numbers


def test_an_engine_whose_numbers_are_not_finite_stops_the_run_with_the_sample_or_is_masked_and_counted(
    tmp_path: Path, small_model: Path
) -> None:
    with (
        DemoSite(SiteOptions("local", tmp_path, LAYOUT, poll_interval_s=0.2, max_engines=2)) as site,
        WeightServer() as source,
    ):
        shared = {"poison_after": 1, "max_engines": 1}
        with (
            scripted.opened(
                play.write_run(site, small_model, run={"name": "stops", "on_poison": "stop", **shared})
            ) as stops,
            scripted.opened(
                play.write_run(site, small_model, run={"name": "masks", "on_poison": "mask", **shared})
            ) as masks,
        ):
            waiting = {}
            for run in (stops, masks):
                version = scripted.publish(run, source, small_model, 0, broken=True)
                waiting[run.name] = scripted.submit(run, 1, version)
            with pytest.raises(Refused, match=r"sample \d+ failed 1 times.*not finite") as stopped:
                scripted.collect(stops, waiting["stops"])
            assert "scavenger samples stops --step 1" in str(stopped.value)
            assert 'on_poison = "mask"' in str(stopped.value)
            stops.close_run("failed", stopped.value.cause)

            groups = scripted.collect(masks, waiting["masks"])
            assert all(
                sample.error and "not finite" in sample.error for group in groups for sample in group.samples
            )
            mended = scripted.publish(masks, source, small_model, 1)
            scripted.commit(masks, 1, version, groups)
            groups = scripted.collect(masks, scripted.submit(masks, 2, mended))
            assert all(sample.error is None and sample.tokens for group in groups for sample in group.samples)
            scripted.commit(masks, 2, mended, groups)
            masks.close_run("finished")
        ended = "SELECT r.name, s.state, count(*) FROM samples s JOIN runs r ON r.run_id = s.run_id GROUP BY 1, 2 ORDER BY 1, 2"
        assert play.ask(site, ended)[:2] == [("masks", "consumed", 2), ("masks", "poisoned", 2)]
        assert any("not finite" in reason for _, reason in _events(site, "sample_failed"))
        assert play.ask(site, "SELECT state FROM runs ORDER BY run_id") == [("failed",), ("finished",)]
        assert reports.check(site.ledger_url) == []
