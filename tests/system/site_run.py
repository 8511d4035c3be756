"""A run on the site of containers, as docs/site.md and docs/admin.md have it: what the tests named `test_site_*` share."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scavenger import toml
from scavenger.cluster.sandbox.hosts import SITE, BootedHost, HostSpec, SiteSandbox, wait_for
from tests.system import play

ROOT = Path(__file__).resolve().parents[2]
CLONE = "/opt/scavenger-clone"
PYTHON, SCAVENGER = "/opt/scavenger/bin/python", "/opt/scavenger/bin/scavenger"
CONFIG = "/etc/scavenger/scavenger.toml"
LEDGER = "postgresql://scavenger@pg/scavenger"
STATE, PUBLIC = "/shared/scavenger/state", "/shared/scavenger/public"
STEPS = 80
#: Of hosts without a trace of ours: one that trains, and one with a GPU.
BARE_HOSTS = (
    HostSpec("ctl", 10, ("munge", "slurmctld")),
    HostSpec("train1", 21, ("munge", "slurmd")),
    HostSpec("gpu1", 31, ("munge", "slurmd")),
)
#: How many hosts have, or had, an engine of ours.
ENGINES = "SELECT count(DISTINCT node) FROM workers WHERE kind = 'harvested'"

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


@contextlib.contextmanager
def booted(
    folder: Path, hosts: Sequence[HostSpec] = SITE, *, may_hang: bool = False
) -> Iterator[SiteSandbox]:
    """The site, with its root file system made first where there is none; nothing of it is left afterwards."""
    made = subprocess.run(
        [ROOT / "scripts/site-sandbox", "--image"], capture_output=True, text=True, timeout=1200, check=False
    )
    assert made.returncode == 0, made.stderr[-2000:]
    with SiteSandbox(Path(made.stdout.split()[-1]), folder, hosts, may_hang=may_hang) as site:
        yield site
    assert not [one for one in folder.glob("*/console") if _is_held(one)], "a container is left"
    assert str(folder) not in Path("/proc/self/mounts").read_text(), "a mount is left"


def bare_system(release: str) -> Path:
    """A root file system of Debian without a trace of ours (tests/system/deb_site.sh), made where it is not there yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scavenger-deb"
    made = subprocess.run(
        ["bash", str(ROOT / "tests/system/deb_site.sh"), release],
        env={**os.environ, "root": str(ROOT), "cache": str(cache)},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert made.returncode == 0, made.stderr[-2000:]
    return Path(made.stdout.split()[-1])


def _is_held(path: Path) -> bool:
    """Whether a process has this file open."""
    target = str(path)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process ended
            for descriptor in os.listdir(process / "fd"):
                with contextlib.suppress(OSError):  # it was closed
                    if os.readlink(process / "fd" / descriptor) == target:
                        return True
    return False


def as_scavenger(host: BootedHost, *argv: str, check: bool = True, timeout_s: float = 300.0) -> str:
    env = {"SCAVENGER_CONFIG": CONFIG, "OMP_NUM_THREADS": "1"}
    return host.run(*argv, user="scavenger", env=env, check=check, timeout_s=timeout_s)


def start_postgres(host: BootedHost) -> str:
    """PostgreSQL for the hosts of the site; the password of the ledger's role."""
    password = secrets.token_hex(16)
    folder = host.run("sh", "-c", "ls -d /etc/postgresql/*/main").strip()
    host.run("sh", "-c", f"echo \"listen_addresses='*'\" >> {folder}/postgresql.conf")
    host.run("sh", "-c", f"echo 'host all all 10.88.0.0/24 scram-sha-256' >> {folder}/pg_hba.conf")
    host.run("systemctl", "start", f"postgresql@{folder.split('/')[3]}-main")
    statement = f"CREATE ROLE scavenger LOGIN PASSWORD '{password}'"
    host.run("psql", text=statement + ";\n", user="postgres")  # not in its arguments, which the journal keeps
    host.run("psql", "-c", "CREATE DATABASE scavenger OWNER scavenger", user="postgres")
    return password


def start_daemon(head: BootedHost, password: str, config: str = DAEMON) -> None:
    """As docs/site.md says, with the unit that is shipped, its hardening on."""
    head.write(
        "/home/scavenger/.pgpass", f"pg:5432:scavenger:scavenger:{password}\n", mode="0600", owner="scavenger"
    )
    mine = ("install", "-d", "-o", "scavenger", "-g", "scavenger", "-m")
    head.run(*mine, "0755", "/shared/scavenger")
    head.run(*mine, "0700", "/shared/runs")
    head.run("install", "-d", "-o", "scavenger", "-g", "scavenger", "/etc/scavenger")
    as_scavenger(head, SCAVENGER, "init", "/shared/scavenger", "--site", "--ledger", LEDGER)
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


def submit(head: BootedHost, user: str, folder: str, run: str, env: dict[str, str] | None = None) -> str:
    """A training job of this user over the two training hosts, of the run.toml `run`; its id."""
    head.write(f"{folder}/run.toml", run, mode="0600", owner=user)
    return head.run(
        "sbatch",
        "--parsable",
        "--partition=reserved",
        "--account=research",
        "--nodes=2",
        "--ntasks=2",
        "--gpus-per-node=1",
        f"--output={folder}/train.log",
        f"{CLONE}/scripts/train.sbatch",
        f"{folder}/run.toml",
        user=user,
        env={"SCAVENGER_PYTHON": PYTHON, "XDG_CONFIG_HOME": f"{folder}/config", **(env or {})},
    ).strip()


def sorting(name: str, folder: str, steps: int, state_dir: str = STATE, more: str = "") -> str:
    """The run.toml of a run that learns to sort. `more`: of it."""
    return RUN.format(steps=steps, name=name, folder=folder, state_dir=state_dir) + more


def ask(head: BootedHost, sql: str) -> list[list[Any]]:
    """Rows of the ledger."""
    return json.loads(as_scavenger(head, PYTHON, "-c", _QUERY, LEDGER, sql))  # type: ignore[no-any-return]


def ask_one(head: BootedHost, sql: str) -> Any:
    """The only value of the only row."""
    return ask(head, sql)[0][0]


def steps_done(head: BootedHost) -> int:
    return int(ask_one(head, "SELECT coalesce(max(last_step), 0) FROM runs"))


_QUERY = """
import json, sys, psycopg
with psycopg.connect(sys.argv[1]) as connection:
    print(json.dumps(connection.execute(sys.argv[2]).fetchall()))
"""


def unit(host: BootedHost, name: str) -> str:
    """A property of the daemon's unit."""
    return host.run("systemctl", "show", "-p", name, "--value", "scavenger").strip()


@dataclass
class Training:
    """A training job of the user scavenger, over the two training hosts."""

    head: BootedHost
    job: str
    steps: int = STEPS

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
        wait_for(f"{by} more steps", lambda: self.reached(min(self.steps, before + by)), 300)
        return time.monotonic() - began

    def cut_short(self) -> None:
        """Cancel it, for runs that are longer than what is to happen in them."""
        self.head.run("scancel", self.job, check=False)
        wait_for("the training job's end", lambda: not self.state(), 120)

    def finishes(self) -> None:
        wait_for("all steps", lambda: self.reached(self.steps), 600)
        wait_for("the training job's end", lambda: not self.state(), 120)
        assert "sound" in as_scavenger(self.head, SCAVENGER, "ledger", "check")


def start_training(site: SiteSandbox, config: str = DAEMON, run: str = "") -> Training:
    """A whole run, from the daemon's start until an engine works on each of the three hosts. `run`: more of run.toml."""
    head = site["head"]
    start_daemon(head, start_postgres(site["pg"]), config)
    as_scavenger(head, PYTHON, "-m", "trainer.tiny", "make", "--out", "/shared/runs/model", timeout_s=600.0)
    made = sorting("sorting", "/shared/runs", STEPS, more=run)
    training = Training(head, submit(head, "scavenger", "/shared/runs", made))
    wait_for("two steps", lambda: training.reached(2), 300)
    wait_for("an engine on each of the three hosts", lambda: ask_one(head, ENGINES) == 3, 300)
    return training


def others_wait(site: SiteSandbox, node: str) -> float:
    """Seconds until a job of u2's for all GPUs of this host, of which an engine may have one, has run its `true`."""
    began = time.monotonic()
    argv = ("srun", "-p", "normal", "--account=research", "-w", node, "--gres=gpu:4", "-t", "5", "true")
    site["ctl"].run(*argv, user="u2", timeout_s=300.0)
    return time.monotonic() - began


def start_deterministic(
    site: SiteSandbox,
    model: Path,
    steps: int,
    *,
    user: str = "scavenger",
    folder: str = "/shared/runs",
    state_dir: str = STATE,
) -> Training:
    """The run of `play.undisturbed`, over the two training hosts, and so slow that engines join before its end."""
    head, here = site["head"], Path(folder)
    shutil.copytree(model, site.shared / here.name / "model")
    head.run("chown", "-R", f"{user}:{user}", f"{folder}/model")
    document = play.run_document(
        Path(state_dir), here / "out", here / "model", run={"steps": steps}, engine={"pace": 6.0}
    )
    job = submit(head, user, folder, toml.dumps(document), env={"PYTHONPATH": CLONE})
    return Training(head, job, steps)


def trained_on(head: BootedHost) -> set[str]:
    """The hosts whose harvested engines generated tokens that were trained on."""
    sql = (
        "SELECT DISTINCT w.node FROM chunks c JOIN workers w ON w.worker_id = c.worker_id JOIN samples s "
        "ON s.sample_id = c.sample_id WHERE w.kind = 'harvested' AND s.state IN ('consumed', 'filtered')"
    )
    return {node for (node,) in ask(head, sql)}


def result(head: BootedHost) -> play.Result:
    """As `play.result`, of the site's ledger; read there, where its password is."""
    said = as_scavenger(head, "env", f"PYTHONPATH={CLONE}", PYTHON, "-c", _RESULT, LEDGER)
    told = json.loads(said)
    tokens: dict[tuple[int, ...], bytes] = {
        (step, prompt, index): bytes.fromhex(data) for (step, prompt, index), data in told["tokens"]
    }
    return play.Result(tokens, {step: (reward, loss) for step, (reward, loss) in told["steps"]})


_RESULT = """
import json, sys
from tests.system import play
found = play.result_of(sys.argv[1])
tokens = [(key, data.hex()) for key, data in found.tokens.items()]
print(json.dumps({"tokens": tokens, "steps": list(found.steps.items())}))
"""


def assert_hardened(head: BootedHost) -> None:
    """The daemon runs as its user, with what the shipped unit forbids forbidden, as the kernel sees it."""
    told = dict(
        line.split(":", 1) for line in head.run("cat", f"/proc/{unit(head, 'MainPID')}/status").splitlines()
    )
    seen = {key: told[key].split()[0] for key in ("Uid", "NoNewPrivs", "Seccomp", "CapEff", "CapBnd")}
    none = "0" * 16
    assert seen == {"Uid": "7001", "NoNewPrivs": "1", "Seccomp": "2", "CapEff": none, "CapBnd": none}
    said = head.run(
        "nsenter", "-t", unit(head, "MainPID"), "-m", "sh", "-c", "touch /opt/x; ls /tmp", check=False
    )
    assert said.strip() == "", "a /tmp of its own"
    assert not head.run("sh", "-c", "ls /opt/x || :").strip(), "nothing but its own folders can be written"
