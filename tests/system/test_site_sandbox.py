"""A whole run over nine hosts: systemd, Slurm with accounting, PostgreSQL, two training nodes and three GPU nodes, an address each.

What a site shares is one folder; nothing else is shared. Needs root on Debian, mmdebstrap and systemd-container; the root file system is
made once (`scripts/site-sandbox`).
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from scavenger.cluster.sandbox.hosts import SITE, SiteSandbox, wait_for
from tests.system.site_run import (
    DAEMON,
    PYTHON,
    SCAVENGER,
    STEPS,
    Training,
    as_scavenger,
    ask_one,
    others_wait,
    sorting,
    start_daemon,
    start_postgres,
    start_training,
    submit,
    unit,
)

pytestmark = [pytest.mark.site, pytest.mark.long, pytest.mark.timeout(1800)]


#: GraceTime and KillWait are 2 s here, an engine leaves within one, and srun itself takes a second or two.
OTHERS_WAIT_S = 15.0
HUNG_S = 30.0


def print_costs(told: dict[str, tuple[float, float]]) -> None:
    """For docs/site.md: how long a job of another user waited during each fault, and the run after it."""
    for fault, (waited, seconds) in told.items():
        print(f"{fault}: another user's job waited {waited:.0f} s, two more steps took {seconds:.0f} s")


def test_a_whole_run_over_nine_hosts_survives_cut_links_and_a_daemon_that_is_killed(
    site: SiteSandbox,
) -> None:
    training, head = start_training(site), site["head"]
    told = {"nothing": (others_wait(site, "gpu2"), training.goes_on(2))}
    for name in (
        "gpu1",
        "head",
        "train2",
    ):  # each cut for longer than heartbeats take to be missed, then plugged in again
        site.link_down(name)
        waited = others_wait(site, "gpu2")
        time.sleep(15.0)  # the fault itself: how long the link is down
        site.link_up(name)
        told[f"the link of {name} was down for 15 s"] = waited, training.goes_on(2)
    pid = unit(head, "MainPID")
    head.run("kill", "-KILL", pid)
    told["the daemon was killed"] = others_wait(site, "gpu2"), training.goes_on(2)
    print_costs(told)
    assert max(waited for waited, _ in told.values()) <= OTHERS_WAIT_S
    training.finishes()
    assert head.run("systemctl", "is-active", "scavenger").strip() == "active", "systemd started it again"
    assert unit(head, "MainPID") != pid


def test_a_run_survives_hosts_that_cannot_reach_one_another_crash_or_have_no_room_at_100_megabits(
    site: SiteSandbox,
) -> None:
    """Each fault lasts longer than `daemon.dead_s`; what it cost the run is printed."""
    training = start_training(site)
    for name in site.hosts:
        site.limit_rate(name, 100.0)
    costs = {"100 Mbit/s to every host": (others_wait(site, "gpu2"), training.goes_on(2))}

    site.cut_off("gpu1", "head")
    waited = others_wait(site, "gpu1")  # on that very host: Slurm reaches it
    time.sleep(15.0)  # the fault itself
    site.reconnect("gpu1", "head")
    costs["a GPU host could not reach the daemon for 15 s"] = waited, training.goes_on(2)

    for name in ("train1", "train2"):
        site.cut_off("gpu2", name)
    waited = others_wait(site, "gpu2")
    time.sleep(15.0)  # the fault itself
    for name in ("train1", "train2"):
        site.reconnect("gpu2", name)
    costs["a GPU host could not reach the trainer for 15 s"] = waited, training.goes_on(2)

    site["gpu1"].run("mount", "-t", "tmpfs", "-o", "size=64k", "none", "/tmp")
    site["gpu1"].run("dd", "if=/dev/zero", "of=/tmp/full", "bs=1k", check=False)
    costs["a GPU host's /tmp was full"] = others_wait(site, "gpu1"), training.goes_on(2)

    site["gpu3"].crash()
    costs["a GPU host crashed"] = others_wait(site, "gpu2"), training.goes_on(2)
    site.boot_again("gpu3")
    since = time.time()
    back = f"SELECT count(*) FROM workers WHERE node = 'gpu3' AND joined_at > {since}"
    wait_for(
        "an engine works on the host that is back",
        lambda: training.reached(STEPS) or ask_one(training.head, back) != 0,
        300,
    )
    training.finishes()
    print_costs(costs)
    assert max(waited for waited, _ in costs.values()) <= OTHERS_WAIT_S


@pytest.mark.needs("bindfs")
def test_a_run_survives_a_shared_folder_that_hangs_for_half_a_minute(site: SiteSandbox) -> None:
    """As an NFS server does that restarts: the state directory, the model, the checkpoints and the job's log are on it."""
    training, head = start_training(site), site["head"]
    pid = unit(head, "MainPID")
    with ThreadPoolExecutor(1) as pool:
        site.hang()
        waiting = pool.submit(others_wait, site, "gpu2")
        time.sleep(HUNG_S)  # the fault itself
        site.go_on()
        waited = waiting.result()
    print_costs({f"a shared folder hung for {HUNG_S:.0f} s": (waited, training.goes_on(2))})
    assert waited <= HUNG_S + OTHERS_WAIT_S, "no job ends while slurmstepd cannot write its log there"
    training.finishes()
    assert unit(head, "MainPID") == pid


def test_a_training_job_whose_hosts_cannot_reach_one_another_fails_within_seconds_with_the_reason(
    site: SiteSandbox,
) -> None:
    """Slurm's ports are open between them and nothing else is, as on a site that forgot the firewall of its training nodes."""
    head = site["head"]
    start_daemon(head, start_postgres(site["pg"]))
    as_scavenger(head, PYTHON, "-m", "trainer.tiny", "make", "--out", "/shared/runs/model", timeout_s=600.0)
    for name in ("train1", "train2"):
        site.firewall(name, "tcp dport 6818 accept")
    job = submit(head, "scavenger", "/shared/runs", sorting("alone", "/shared/runs", STEPS))
    training = Training(head, job)
    wait_for("the training job's start", lambda: training.state() == "RUNNING", 60)
    began = time.monotonic()
    wait_for("the training job's end", lambda: training.state() not in ("RUNNING", "COMPLETING"), 180)
    took = time.monotonic() - began
    said = head.run("cat", "/shared/runs/train.log")
    print(f"ended {took:.0f} s after its start\n{said[-1500:]}")
    assert "cannot reach one another" in said
    assert "open TCP between the nodes" in said
    assert took < 60.0
    assert ask_one(head, "SELECT count(*) FROM workers") == 0, "no engine was started for it"


def test_a_whole_run_at_one_gigabit_a_second(site: SiteSandbox) -> None:
    for name in site.hosts:
        site.limit_rate(name, 1000.0)
    site["train1"].run("iperf3", "-s", "-1", "-D")
    said = json.loads(site["gpu1"].run("iperf3", "-c", "train1", "-t", "3", "-J"))
    rate = said["end"]["sum_received"]["bits_per_second"]
    assert rate < 1.05e9
    began = time.monotonic()
    training = start_training(site)
    training.finishes()
    print(f"{rate / 1e6:.0f} Mbit/s by iperf3; all {STEPS} steps in {time.monotonic() - began:.0f} s")


GPU_HOSTS = [host.address for host in SITE if host.name.startswith("gpu")]
#: docs/admin.md, Firewall: what reaches each host besides replies.
DAEMON_PORT, WEIGHTS_PORT = 7700, 7800
FIREWALLS = {
    "ctl": "tcp dport 6817 accept",
    "dbd": "tcp dport 6819 accept",
    "pg": "tcp dport 5432 accept",
    "head": f"tcp dport {DAEMON_PORT} accept",
    **dict.fromkeys(
        ("train1", "train2"),
        f"tcp dport {{ 6818, {WEIGHTS_PORT}-{WEIGHTS_PORT + 1} }} accept; ip saddr {{ 10.88.0.21, 10.88.0.22 }} accept",
    ),
    **dict.fromkeys(("gpu1", "gpu2", "gpu3"), "tcp dport 6818 accept"),
}


@pytest.mark.needs("nft")
def test_a_run_behind_firewalls_that_let_only_the_documented_ports_through(site: SiteSandbox) -> None:
    """Slurm's own ports, the daemon's, the weights'; and between training hosts all. `doctor --submit` finds each port that is closed."""
    for name, rules in FIREWALLS.items():
        site.firewall(name, rules)
    config = DAEMON.replace("[cluster]", f"port = {DAEMON_PORT}\n[cluster]", 1)
    training = start_training(site, config, f"[weights]\nport = {WEIGHTS_PORT}\n")
    training.goes_on(2)
    weights = (f"train1:{WEIGHTS_PORT}", f"train2:{WEIGHTS_PORT}")
    asked = ("doctor", "--submit", *(word for at in weights for word in ("--reach", at)))
    # First, while the run trains: on a slow host four of these outlast it, and then nobody answers.
    said = " ".join(as_scavenger(training.head, SCAVENGER, *asked, check=False).split())  # lines are wrapped
    assert "cannot be reached" not in said
    assert "2 of 2 further ports answered" in said
    slurm_alone = FIREWALLS["train1"].replace(f", {WEIGHTS_PORT}-{WEIGHTS_PORT + 1}", "")
    # Connections that are there stay, so that the run goes on meanwhile.
    for name, rules, found in (
        ("head", "tcp dport 1 accept", f"head:{DAEMON_PORT} cannot be reached"),
        ("train1", slurm_alone, f"{weights[0]} cannot be reached"),
        (
            "ctl",
            f"ip saddr != {{ {', '.join(GPU_HOSTS)} }} tcp dport 6817 accept",
            "slurmctld: 10.88.0.10:6817",
        ),
    ):
        site.firewall(name, rules)
        said = " ".join(as_scavenger(training.head, SCAVENGER, *asked, check=False).split())
        site.firewall(name, FIREWALLS[name])
        assert found in said, f"closed on {name}"
    training.finishes()
