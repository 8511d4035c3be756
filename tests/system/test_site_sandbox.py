"""A whole run over nine hosts: systemd, Slurm with accounting, PostgreSQL, two training nodes and three GPU nodes, an address each.

What a site shares is one folder; nothing else is shared. Needs root on Debian, mmdebstrap and systemd-container; the root file system is
made once (`scripts/site-sandbox`).
"""

from __future__ import annotations

import os
import secrets
import subprocess
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from scavenger.cluster.sandbox.hosts import Host, SiteSandbox, wait_for

ROOT = Path(__file__).resolve().parents[2]
PYTHON, SCAVENGER = "/opt/scavenger/bin/python", "/opt/scavenger/bin/scavenger"
CONFIG = "/etc/scavenger/scavenger.toml"
STEPS = 80
PUBLIC = "/shared/scavenger/public"

pytestmark = [pytest.mark.site, pytest.mark.long, pytest.mark.timeout(1800)]

DAEMON = """\
[daemon]
state_dir = "/shared/scavenger/state"
ledger = "postgresql://scavenger@pg/scavenger"
listen = "0.0.0.0"
advertise = "head"
[cluster]
backend = "slurm"
poll_interval_s = 2.0
fast_poll_interval_s = 1.0
min_poll_interval_s = 0.5
max_rpc_per_min = 600
[router]
policy = "standard"
[harvest]
partition = "scavenge"
account = "scavenger"
max_engines = 3
max_gpus_per_node = 1
cpus_per_engine = 1
memory_mb_per_engine = 2000
time_limit_s = 3600.0
python = "/opt/scavenger/bin/python"
"""
RUN = """\
[run]
name = "{name}"
seed = 7
steps = {steps}
state_dir = "{state_dir}"
out_dir = "{folder}/out"
max_engines = 3
[model]
path = "{folder}/model"
context_length = 32
[data]
task = "sort"
prompts_per_step = 8
samples_per_prompt = 4
[sampling]
max_tokens = 7
[engine]
name = "reference"
max_batch = 4
pace = 10.0
[reward]
function = "trainer.tasks.sort:reward"
[reserved]
workers = 1
window = 0.25
wake_after_s = 2.0
[checkpoint]
every = 4
keep = 2
"""


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SiteSandbox]:
    """Marked with `needs("bindfs")`: the shared folder may hang."""
    marked = request.node.get_closest_marker("needs")
    needs = marked.args if marked is not None else ()
    made = subprocess.run(
        [ROOT / "scripts/site-sandbox", "--image"], capture_output=True, text=True, timeout=1200, check=False
    )
    assert made.returncode == 0, made.stderr[-2000:]
    base, may_hang = Path(made.stdout.split()[-1]), "bindfs" in needs
    with SiteSandbox(base, tmp_path / "site", may_hang=may_hang) as booted:
        yield booted
    assert not [one for one in booted.folder.glob("*/console") if _is_held(one)], "a container is left"


def _is_held(path: Path) -> bool:
    """Whether a process has this file open."""
    target = str(path)
    for one in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(one) == target:
                return True
        except OSError:  # the process ended, or its descriptor was closed
            continue
    return False


def as_scavenger(host: Host, *argv: str, check: bool = True, timeout_s: float = 300.0) -> str:
    env = {"SCAVENGER_CONFIG": CONFIG, "OMP_NUM_THREADS": "1"}
    return host.run(*argv, user="scavenger", env=env, check=check, timeout_s=timeout_s)


def start_postgres(host: Host) -> str:
    """PostgreSQL for the hosts of the site; the password of the ledger's role."""
    password = secrets.token_hex(16)
    folder = host.run("sh", "-c", "ls -d /etc/postgresql/*/main").strip()
    host.run("sh", "-c", f"echo \"listen_addresses='*'\" >> {folder}/postgresql.conf")
    host.run("sh", "-c", f"echo 'host all all 10.88.0.0/24 scram-sha-256' >> {folder}/pg_hba.conf")
    host.run("systemctl", "start", f"postgresql@{folder.split('/')[3]}-main")
    host.run("psql", "-c", f"CREATE ROLE scavenger LOGIN PASSWORD '{password}'", user="postgres")
    host.run("psql", "-c", "CREATE DATABASE scavenger OWNER scavenger", user="postgres")
    return password


def start_daemon(head: Host, password: str, config: str = DAEMON) -> None:
    """As docs/site.md says, with the unit that is shipped, its hardening on."""
    head.write(
        "/home/scavenger/.pgpass", f"pg:5432:scavenger:scavenger:{password}\n", mode="0600", owner="scavenger"
    )
    mine = ("install", "-d", "-o", "scavenger", "-g", "scavenger", "-m")
    head.run(*mine, "0755", "/shared/scavenger")
    head.run(*mine, "0700", "/shared/runs")
    head.run("install", "-d", "-o", "scavenger", "-g", "scavenger", "/etc/scavenger")
    as_scavenger(
        head,
        SCAVENGER,
        "init",
        "/shared/scavenger",
        "--site",
        "--ledger",
        "postgresql://scavenger@pg/scavenger",
    )
    drafted = tomllib.loads(head.run("cat", "/shared/scavenger/scavenger.toml"))
    harvest, wanted = drafted["harvest"], tomllib.loads(config)["harvest"]
    assert {key: harvest.get(key) for key in ("partition", "account")} == {
        key: wanted[key] for key in ("partition", "account")
    }, "Slurm was asked for what is set here; intervals and limits are the test's own"
    assert drafted["daemon"]["public_dir"] == PUBLIC
    head.write(CONFIG, config, mode="0600", owner="scavenger")
    head.write("/etc/systemd/system/scavenger.service", (ROOT / "scripts/scavenger.service").read_text())
    head.run("systemctl", "daemon-reload")
    head.run("systemctl", "start", "scavenger", timeout_s=120.0)


def submit(head: Host, user: str, folder: str, name: str, steps: int, state_dir: str, more: str = "") -> str:
    """A training job of this user over the two training hosts; its id. `more`: of run.toml."""
    written = RUN.format(steps=steps, name=name, folder=folder, state_dir=state_dir) + more
    head.write(f"{folder}/run.toml", written, mode="0600", owner=user)
    return head.run(
        "sbatch",
        "--parsable",
        "--partition=reserved",
        "--account=research",
        "--nodes=2",
        "--ntasks=2",
        "--gpus-per-node=1",
        f"--output={folder}/train.log",
        "/opt/scavenger-clone/scripts/train.sbatch",
        f"{folder}/run.toml",
        user=user,
        env={"SCAVENGER_PYTHON": PYTHON, "XDG_CONFIG_HOME": f"{folder}/config"},
    ).strip()


def steps_done(head: Host) -> int:
    sql = "SELECT coalesce(max(last_step), 0) FROM runs"
    return int(as_scavenger(head, PYTHON, "-c", _QUERY, sql))


_QUERY = """
import sys, psycopg
with psycopg.connect("postgresql://scavenger@pg/scavenger") as connection:
    print(connection.execute(sys.argv[1]).fetchone()[0])
"""


@dataclass
class Training:
    """A training job of the user scavenger, over the two training hosts."""

    head: Host
    job: str

    def state(self) -> str:
        return self.head.run("squeue", "-h", "-j", self.job, "-o", "%T", check=False).strip()

    def reached(self, step: int) -> bool:
        state = self.state()
        assert state or steps_done(self.head) >= step, (
            f"the training job is gone: {self.head.run('tail', '-n', '40', '/shared/runs/train.log', check=False)}"
        )
        return steps_done(self.head) >= step

    def goes_on(self, by: int = 1) -> float:
        """Seconds until it has taken so many more steps."""
        began, before = time.monotonic(), steps_done(self.head)
        wait_for(f"{by} more steps", lambda: self.reached(min(STEPS, before + by)), 300)
        return time.monotonic() - began

    def finishes(self) -> None:
        wait_for("all steps", lambda: self.reached(STEPS), 600)
        wait_for("the training job's end", lambda: not self.state(), 120)
        assert "sound" in as_scavenger(self.head, SCAVENGER, "ledger", "check")


def start_training(site: SiteSandbox, config: str = DAEMON, run: str = "") -> Training:
    """A whole run, from the daemon's start until an engine works on each of the three hosts. `run`: more of run.toml."""
    head = site["head"]
    start_daemon(head, start_postgres(site["pg"]), config)
    as_scavenger(head, PYTHON, "-m", "trainer.tiny", "make", "--out", "/shared/runs/model", timeout_s=600.0)
    training = Training(
        head, submit(head, "scavenger", "/shared/runs", "sorting", STEPS, "/shared/scavenger/state", run)
    )
    wait_for("two steps", lambda: training.reached(2), 300)
    engines = "SELECT count(DISTINCT node) FROM workers WHERE kind = 'harvested'"
    wait_for(
        "an engine on each of the three hosts",
        lambda: as_scavenger(head, PYTHON, "-c", _QUERY, engines).strip() == "3",
        300,
    )
    return training


def test_a_whole_run_over_nine_hosts_survives_cut_links_and_a_daemon_that_is_killed(
    site: SiteSandbox,
) -> None:
    training, head = start_training(site), site["head"]
    for name in (
        "gpu1",
        "head",
        "train2",
    ):  # each cut for longer than heartbeats take to be missed, then plugged in again
        site.link_down(name)
        time.sleep(15.0)  # the fault itself: how long the link is down
        site.link_up(name)
    training.goes_on()
    pid = head.run("systemctl", "show", "-p", "MainPID", "--value", "scavenger").strip()
    head.run("kill", "-KILL", pid)
    training.finishes()
    assert head.run("systemctl", "is-active", "scavenger").strip() == "active", "systemd started it again"
    assert head.run("systemctl", "show", "-p", "MainPID", "--value", "scavenger").strip() != pid


def test_a_run_survives_hosts_that_cannot_reach_one_another_crash_or_have_no_room_at_100_megabits(
    site: SiteSandbox,
) -> None:
    """Each fault lasts longer than `daemon.dead_s`; what it cost the run is printed."""
    training = start_training(site)
    for name in site.hosts:
        site.limit_rate(name, 100.0)
    cost = {"100 Mbit/s to every host": training.goes_on(2)}

    site.cut_off("gpu1", "head")
    time.sleep(15.0)  # the fault itself
    site.reconnect("gpu1", "head")
    cost["a GPU host that cannot reach the daemon for 15 s"] = training.goes_on(2)

    for name in ("train1", "train2"):
        site.cut_off("gpu2", name)
    time.sleep(15.0)  # the fault itself
    for name in ("train1", "train2"):
        site.reconnect("gpu2", name)
    cost["a GPU host that cannot reach the trainer for 15 s"] = training.goes_on(2)

    site["gpu1"].run("mount", "-t", "tmpfs", "-o", "size=64k", "none", "/tmp")
    site["gpu1"].run("dd", "if=/dev/zero", "of=/tmp/full", "bs=1k", check=False)
    cost["a GPU host whose /tmp is full"] = training.goes_on(2)

    site["gpu3"].crash()
    cost["a GPU host that crashed"] = training.goes_on(2)
    site.boot_again("gpu3")
    since = time.time()
    back = f"SELECT count(*) FROM workers WHERE node = 'gpu3' AND joined_at > {since}"
    wait_for(
        "an engine works on the host that is back",
        lambda: (
            training.reached(STEPS) or as_scavenger(training.head, PYTHON, "-c", _QUERY, back).strip() != "0"
        ),
        300,
    )
    training.finishes()
    print("\n".join(f"two more steps after {what}: {seconds:.0f} s" for what, seconds in cost.items()))


@pytest.mark.needs("bindfs")
def test_a_run_survives_a_shared_folder_that_hangs_for_half_a_minute(site: SiteSandbox) -> None:
    """As an NFS server does that restarts: the state directory, the model, the checkpoints and the job's log are on it."""
    training, head = start_training(site), site["head"]
    pid = head.run("systemctl", "show", "-p", "MainPID", "--value", "scavenger").strip()
    site.hang()
    time.sleep(30.0)  # the fault itself
    site.go_on()
    print(f"two more steps after a shared folder that hung for 30 s: {training.goes_on(2):.0f} s")
    training.finishes()
    assert head.run("systemctl", "show", "-p", "MainPID", "--value", "scavenger").strip() == pid


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
    """Slurm's own ports, the daemon's, the weights'; and between training hosts all. `doctor --submit` finds a port that is closed."""
    for name, rules in FIREWALLS.items():
        site.firewall(name, rules)
    config = DAEMON.replace("[cluster]", f"port = {DAEMON_PORT}\n[cluster]", 1)
    training = start_training(site, config, f"[weights]\nport = {WEIGHTS_PORT}\n")
    training.goes_on(2)
    site.firewall("head", "tcp dport 1 accept")  # connections that are there stay
    said = as_scavenger(training.head, SCAVENGER, "doctor", "--submit", check=False)
    assert f"head:{DAEMON_PORT} cannot be reached" in said
    site.firewall("head", FIREWALLS["head"])
    said = as_scavenger(training.head, SCAVENGER, "doctor", "--submit", check=False)
    assert "cannot be reached" not in said
    training.finishes()


#: As another user's process: everything that might be hers, and what the daemon says to calls for her run.
ATTACK = """
import sys
from pathlib import Path
from scavenger.client import Connection
from scavenger.protocol import messages
for path in sys.argv[2:]:
    try:
        Path(path).read_bytes() if not path.endswith("/") else list(Path(path).iterdir())
    except PermissionError:
        continue
    sys.exit(f"{path} can be read")
calls = [messages.Attach(sys.argv[1], ()), messages.Ping(), messages.CloseRun("stopped")]
with Connection.connect(Path("/shared/scavenger/public")) as connection:
    for call in calls:
        connection.send(sys.argv[1], 1, call)
        reply = None
        while reply is None:
            reply = connection.receive(30.0)
        print(type(call).__name__, getattr(getattr(reply, "body", reply), "code", reply))
"""


def test_two_users_train_as_themselves_and_neither_reaches_the_other(site: SiteSandbox) -> None:
    """docs/site.md, for researchers: `scavenger join`, then a job of their own. Engines read nothing of theirs: their folders are 0700."""
    head = site["head"]
    owners = (
        f'public_dir = "{PUBLIC}"\n[owners]\nproof = "munge"\nusers = ["u1"]\ngroups = ["7003"]\n[cluster]'
    )
    start_daemon(head, start_postgres(site["pg"]), DAEMON.replace("[cluster]", owners, 1))
    wait_for("the daemon announces itself", lambda: "rendezvous.json" in head.run("ls", PUBLIC), 60)
    jobs = {}
    for user in ("u1", "u2"):
        folder = f"/shared/{user}"
        env = {"XDG_CONFIG_HOME": f"{folder}/config"}
        head.run("install", "-d", "-o", user, "-m", "0700", folder)
        assert f"{user} may own runs here" in head.run(SCAVENGER, "join", PUBLIC, user=user, env=env)
        head.run(
            PYTHON,
            "-m",
            "trainer.tiny",
            "make",
            "--out",
            f"{folder}/model",
            user=user,
            env=env,
            timeout_s=600.0,
        )
    jobs["u1"] = submit(head, "u1", "/shared/u1", "of-u1", 12, PUBLIC)
    harvested = "SELECT count(*) FROM workers WHERE kind = 'harvested'"
    wait_for(
        "an engine of the daemon's user works for u1's run",
        lambda: int(as_scavenger(head, PYTHON, "-c", _QUERY, harvested)) > 0,
        300,
    )
    hers = (
        "/shared/u1/",
        "/shared/u1/run.toml",
        "/shared/u1/config/scavenger/owner.key",
        "/shared/scavenger/state/",
        "/shared/scavenger/state/keys/owner.key",
        CONFIG,
        f"{PUBLIC}/requests/",
    )
    comments = head.run("squeue", "-h", "-u", "scavenger", "-o", "%k").split()
    assert comments
    assert all(one.endswith(",run=of-u1,owner=u1") for one in comments), "whose GPUs they are"
    said = head.run(
        PYTHON, "-c", ATTACK, "of-u1", *hers, user="u2", env={"XDG_CONFIG_HOME": "/shared/u2/config"}
    )
    assert said.split() == ["Attach", "not-owner", "Ping", "not-owner", "CloseRun", "not-owner"]
    jobs["u2"] = submit(head, "u2", "/shared/u2", "of-u2", 4, PUBLIC)
    for user, job in jobs.items():
        wait_for(
            f"the end of {user}'s training job",
            lambda job=job: not head.run("squeue", "-h", "-j", job, "-o", "%T", check=False).strip(),  # type: ignore[misc]
            600,
        )
        log = head.run("tail", "-n", "20", f"/shared/{user}/train.log", check=False)
        sql = f"SELECT last_step FROM runs WHERE name = 'of-{user}'"
        assert int(as_scavenger(head, PYTHON, "-c", _QUERY, sql)) == (12 if user == "u1" else 4), log
    # What cannot be removed: the unit lets the daemon set no setgid bit, and the folder is made anew all the same.
    fill = f"for i in $(seq 10100); do mkdir -p {PUBLIC}/requests/$i/in; done"
    head.run("sh", "-c", fill, user="u2", timeout_s=300.0)
    wait_for("the folder is put aside", lambda: "full-" in head.run("ls", PUBLIC), 60)
    head.run(SCAVENGER, "join", PUBLIC, user="u1", env={"XDG_CONFIG_HOME": "/shared/u1/config"})
    listed = as_scavenger(head, SCAVENGER, "keys", "list")
    assert {"u1", "u2"} <= set(listed.split())
    assert "sound" in as_scavenger(head, SCAVENGER, "ledger", "check")
