"""The shipped unit under a running systemd, while a run trains: start, watchdog, reload, crash and restart, a bad file, stop."""

from __future__ import annotations

from pathlib import Path

import pytest

from scavenger.cluster.sandbox.hosts import BootedHost, SiteSandbox, wait_for
from tests.system import play
from tests.system.site_run import (
    CONFIG,
    DAEMON,
    Training,
    assert_hardened,
    result,
    start_daemon,
    start_deterministic,
    start_postgres,
    trained_on,
    unit,
)

pytestmark = [pytest.mark.site, pytest.mark.mpi, pytest.mark.long, pytest.mark.timeout(1800)]


def engines(head: BootedHost) -> set[str]:
    """Jobs of engines that run."""
    argv = ("squeue", "-h", "-p", "scavenge", "-t", "RUNNING", "-o", "%A")
    return set(head.run(*argv).split())


def is_served_anew(head: BootedHost, pid: str) -> bool:
    return unit(head, "ActiveState") == "active" and unit(head, "MainPID") not in (pid, "0")


def journal(head: BootedHost) -> str:
    return head.run("journalctl", "-u", "scavenger", "--no-pager", "-o", "cat")


def goes_on_with(head: BootedHost, training: Training, jobs: set[str]) -> None:
    """The daemon that serves now has these engines, and the run goes on."""
    training.goes_on()
    assert jobs <= engines(head), "they were adopted: none was cancelled, none submitted in its place"


def test_the_unit_is_restarted_by_its_watchdog_and_after_a_crash_reloads_and_stops_and_the_result_is_the_same(
    small_site: SiteSandbox, small_model: Path, undisturbed: play.Result, tmp_path: Path
) -> None:
    head = small_site["head"]
    start_daemon(head, start_postgres(small_site["pg"]))
    assert_hardened(head)
    training = start_deterministic(small_site, small_model, steps=200)
    wait_for("two engines", lambda: training.reached(1) and len(engines(head)) == 2, 170)
    jobs, pid = engines(head), unit(head, "MainPID")

    head.run("kill", "-STOP", pid)
    hung = wait_for("a stopped daemon is started again", lambda: is_served_anew(head, pid), 120)
    assert "Watchdog timeout" in journal(head)
    assert unit(head, "NRestarts") == "1"
    goes_on_with(head, training, jobs)
    assert_hardened(head)

    pid = unit(head, "MainPID")
    head.write(
        CONFIG,
        DAEMON.replace("max_engines = 3", "max_engines = 1").replace(
            'listen = "0.0.0.0"', 'listen = "0.0.0.0"\nport = 7999'
        ),
        mode="0600",
        owner="scavenger",
    )
    head.run("systemctl", "reload", "scavenger")
    wait_for("one engine is drained for the new limit", lambda: len(engines(head)) == 1, 90)
    assert unit(head, "MainPID") == pid
    assert "daemon.port" in journal(head), "what needs a restart is named"
    head.write(CONFIG, DAEMON, mode="0600", owner="scavenger")
    head.run("systemctl", "reload", "scavenger")
    wait_for("an engine more again", lambda: len(engines(head)) == 2, 120)
    jobs = engines(head)

    head.run("kill", "-KILL", pid)
    crashed = wait_for("a killed daemon is started again", lambda: is_served_anew(head, pid), 60)
    goes_on_with(head, training, jobs)

    head.run("systemctl", "stop", "scavenger", timeout_s=90.0)
    assert (unit(head, "ActiveState"), unit(head, "ExecMainStatus")) == ("inactive", "0")
    assert jobs <= engines(head), "they stay for the next daemon"
    head.write(CONFIG, DAEMON + "no_such_key = 1\n", mode="0600", owner="scavenger")
    head.run("systemctl", "start", "scavenger", check=False, timeout_s=90.0)
    assert (unit(head, "ActiveState"), unit(head, "ExecMainStatus")) == ("failed", "2")
    assert unit(head, "NRestarts") == "0", "a restart would not mend it"
    assert "no_such_key" in journal(head)
    head.write(CONFIG, DAEMON, mode="0600", owner="scavenger")
    head.run("systemctl", "start", "scavenger", timeout_s=90.0)
    goes_on_with(head, training, jobs)

    wait_for("tokens of engines that were trained on", lambda: training.reached(1) and trained_on(head), 120)
    training.cut_short()
    found = result(head)
    assert found == play.as_long(undisturbed, found, small_model, tmp_path)
    print(f"served again after a hang: {hung:.0f} s; after a kill: {crashed:.0f} s; {max(found.steps)} steps")
