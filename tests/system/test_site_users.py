"""Users of a site of containers: two train as themselves, and neither reaches the other."""

from __future__ import annotations

import itertools
import json
import re
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from scavenger.cluster.sandbox.hosts import BootedHost, SiteSandbox, wait_for
from scavenger.protocol.messages import reserved_name
from tests.system import play
from tests.system.site_run import (
    CLONE,
    CONFIG,
    DAEMON,
    ENGINES,
    PUBLIC,
    PYTHON,
    SCAVENGER,
    STATE,
    Training,
    as_scavenger,
    ask,
    ask_one,
    result,
    sorting,
    start_daemon,
    start_deterministic,
    start_postgres,
    steps_done,
    submit,
)

pytestmark = [pytest.mark.site, pytest.mark.mpi, pytest.mark.long, pytest.mark.timeout(1800)]


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
    jobs["u1"] = submit(head, "u1", "/shared/u1", sorting("of-u1", "/shared/u1", 12, PUBLIC))
    harvested = "SELECT count(*) FROM workers WHERE kind = 'harvested'"
    wait_for("an engine of the daemon's user works for u1's run", lambda: ask_one(head, harvested) > 0, 300)
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
    jobs["u2"] = submit(head, "u2", "/shared/u2", sorting("of-u2", "/shared/u2", 4, PUBLIC))
    for user, job in jobs.items():
        wait_for(
            f"the end of {user}'s training job",
            lambda job=job: not head.run("squeue", "-h", "-j", job, "-o", "%T", check=False).strip(),  # type: ignore[misc]
            600,
        )
        log = head.run("tail", "-n", "20", f"/shared/{user}/train.log", check=False)
        sql = f"SELECT last_step FROM runs WHERE name = 'of-{user}'"
        assert ask_one(head, sql) == (12 if user == "u1" else 4), log
    # What cannot be removed: the unit lets the daemon set no setgid bit, and the folder is made anew all the same.
    fill = f"for i in $(seq 10100); do mkdir -p {PUBLIC}/requests/$i/in; done"
    head.run("sh", "-c", fill, user="u2", timeout_s=300.0)
    wait_for("the folder is put aside", lambda: "full-" in head.run("ls", PUBLIC), 60)
    head.run(SCAVENGER, "join", PUBLIC, user="u1", env={"XDG_CONFIG_HOME": "/shared/u1/config"})
    listed = as_scavenger(head, SCAVENGER, "keys", "list")
    assert {"u1", "u2"} <= set(listed.split())
    assert "sound" in as_scavenger(head, SCAVENGER, "ledger", "check")


#: Processes of the daemon's user and of u2.
THEIRS = [7001, 7003]
AS_U1 = {"XDG_CONFIG_HOME": "/shared/u1/config", "PYTHONPATH": CLONE}


def attack(host: BootedHost, *words: str) -> dict[str, Any]:
    """What u1's program says that it got."""
    argv = (PYTHON, f"{CLONE}/tests/system/attacker.py", *words)
    return json.loads(host.run(*argv, user="u1", env=AS_U1, timeout_s=240.0))  # type: ignore[no-any-return]


def run_of_u2(site: SiteSandbox, model: Path, steps: int) -> Training:
    """The daemon, two users who joined, and u2's run with engines at work on two hosts."""
    head = site["head"]
    owners = (
        f'public_dir = "{PUBLIC}"\n[owners]\nproof = "munge"\nusers = ["u1"]\ngroups = ["7003"]\n[cluster]'
    )
    start_daemon(head, start_postgres(site["pg"]), DAEMON.replace("[cluster]", owners, 1))
    for user in ("u1", "u2"):
        folder = f"/shared/{user}"
        head.run("install", "-d", "-o", user, "-m", "0700", folder)
        head.run(SCAVENGER, "join", PUBLIC, user=user, env={"XDG_CONFIG_HOME": f"{folder}/config"})
    training = start_deterministic(site, model, steps, user="u2", folder="/shared/u2", state_dir=PUBLIC)
    wait_for("engines on both hosts", lambda: training.reached(2) and ask_one(head, ENGINES) == 2, 170)
    return training


def facts_of(head: BootedHost) -> dict[str, Any]:
    """What an attacker could at best have guessed of u2's run: ids as they are now."""
    leases = ask(
        head, "SELECT sample_id, epoch FROM leases WHERE ended_at IS NULL ORDER BY sample_id LIMIT 16"
    )
    engines = ask(head, "SELECT slot, session FROM workers WHERE kind = 'reserved' AND left_at IS NULL")
    step = steps_done(head)
    return {
        "run": "small",
        "leases": leases,
        "samples": [
            one for (one,) in ask(head, "SELECT sample_id FROM samples ORDER BY sample_id DESC LIMIT 40")
        ],
        "groups": [
            one for (one,) in ask(head, "SELECT group_id FROM groups ORDER BY group_id DESC LIMIT 10")
        ],
        "slots": [slot for slot, _session in engines],
        "engines": [reserved_name(slot, session) for slot, session in engines],
        "step": step + 1,
        "version": step,
        "job": ask_one(head, "SELECT job_id FROM workers WHERE kind = 'harvested' LIMIT 1"),
        "node": "gpu1",
        "uids": THEIRS,
    }


def seconds_of_steps(head: BootedHost, since: float) -> list[float]:
    """How long each step took that was committed after `since` (Unix seconds)."""
    at = [
        one
        for (one,) in ask(
            head, f"SELECT committed_at FROM steps WHERE committed_at > {since} ORDER BY committed_at"
        )
    ]
    return [later - earlier for earlier, later in itertools.pairwise(at)]


def test_an_attacker_with_an_account_gets_nothing_of_another_s_run_and_does_not_change_it(
    small_site: SiteSandbox, small_model: Path, undisturbed: play.Result, tmp_path: Path
) -> None:
    """As u1: its own accepted key, the real ids of u2's run, raw sockets, a shell on every host. u2's result is one host's."""
    head = small_site["head"]
    training = run_of_u2(small_site, small_model, 300)
    before = time.time()
    training.goes_on(4)
    facts = json.dumps(facts_of(head))

    posed = attack(head, "pose", PUBLIC, facts)
    assert len(posed) > 27
    assert posed.pop("OpenRun").startswith("refused: run 'small' belongs to another key")
    hellos = {name: posed.pop(name) for name in list(posed) if name.startswith("hello")}
    assert set(hellos.values()) == {"Rejected"}, hellos
    assert set(posed.values()) == {"not-owner"}, posed

    forged = attack(head, "forge", PUBLIC, facts)
    assert forged["got"] == []
    print(forged)
    for name in ("Attach", "SubmitGroups", "CommitStep", "RecordCheckpoint"):
        assert forged[f"mine: {name}"].startswith("refused"), (
            "what names u2's groups, samples, step or version"
        )
    raw = attack(head, "raw", PUBLIC)
    print(raw)
    assert raw["no CURVE"] == raw["a key that nobody accepted"] == "nothing"
    assert max(raw["garbage"], raw["half a greeting"]) <= 64

    for name in ("head", "train1", "train2", "gpu1", "gpu2"):
        seen = attack(small_site[name], "host", facts)
        print(name, seen)
        assert seen["got"] == [], name
        assert seen["processes"] > 0, f"there was something to attack on {name}"
        assert (seen["ports of weights"] > 0) == (name != "head")

    theirs = [
        STATE,
        CONFIG,
        "/shared/u2",
        "/shared/u2/run.toml",
        "/shared/u2/config/scavenger/owner.key",
        "/shared/u2/train.log",
    ]
    theirs += ["/home/scavenger/.pgpass", f"{PUBLIC}/requests", f"{STATE}/logs", "/var/lib/scavenger"]
    for path in theirs:
        assert not head.run(
            "sh", "-c", 'cat "$1"; [ ! -d "$1" ] || ls "$1"', "sh", path, user="u1", check=False
        ), path
    for job in {training.job, *head.run("squeue", "-h", "-p", "scavenge", "-o", "%A").split()}:
        for words in (
            ("scancel", job),
            ("scontrol", "hold", job),
            ("scontrol", "requeue", job),
            ("scontrol", "suspend", job),
        ):
            head.run(*words, user="u1", check=False)
    training.goes_on(2)
    calm = seconds_of_steps(head, before)

    began = time.time()
    flooded = threading.Thread(target=lambda: print(attack(head, "flood", PUBLIC, "40")))
    flooded.start()
    training.goes_on(4)
    flooded.join()
    busy = seconds_of_steps(head, began)
    print(f"seconds of u2's steps before the flood {calm}, in it {busy}")
    assert statistics.median(busy) <= 1.5 * statistics.median(calm) + 1.0

    training.cut_short()
    found = result(head)
    assert found == play.as_long(undisturbed, found, small_model, tmp_path)


#: Files that any user may read and that came after the host's boot.
_FRESH = (
    "find / /shared -xdev -type f -newermt \"$(ps -o etimes= -p 1 | tr -d ' ') seconds ago\" -readable "
    "-not -path '/proc/*' -not -path '/sys/*' 2>/dev/null"
)
_SCAN = """
import json, sys
from pathlib import Path
secrets, files, every = json.load(sys.stdin)
found = []
def look(where, data):
    found.extend(f"{name} in {where}" for name, one in secrets.items() if one.encode("latin-1") in data)
for folder in Path("/proc").glob("[0-9]*"):
    for part in ("cmdline", "environ"):
        try:
            look(folder / part, (folder / part).read_bytes())
        except OSError:
            pass
for name in files:
    try:
        look(name, Path(name).read_bytes())
    except OSError:
        pass
for pattern in every:
    for path in Path("/").glob(pattern):
        if path.is_file():
            look(path, path.read_bytes())
print(json.dumps([len(files), found]))
"""


def test_no_secret_of_a_live_site_is_in_an_argument_an_environment_a_log_or_a_readable_file(
    small_site: SiteSandbox, small_model: Path
) -> None:
    """Keys of the daemon, of owners and workers, MUNGE's key, and the passwords of both databases, on every host, while a run trains."""
    head = small_site["head"]
    training = run_of_u2(small_site, small_model, 300)
    training.goes_on()
    secrets = {"MUNGE's key": (small_site.folder / "munge.key").read_bytes()[:48].decode("latin-1")}
    config = (small_site.folder / "slurmdbd.conf").read_text()
    secrets["slurmdbd's password"] = re.findall(r"StoragePass=(\w+)", config)[0]
    secrets["the ledger's password"] = head.run("cat", "/home/scavenger/.pgpass").strip().rpartition(":")[2]
    for path in head.run("find", "/shared", "-name", "*.key").split():
        secrets[path] = json.loads(head.run("cat", path))["secret"]
    assert len(secrets) >= 3 + 5, "the server's, the daemon's user's, two owners' and two workers' keys"
    logs = ("var/log/**/*", "shared/scavenger/state/logs/*", "shared/u2/*", "shared/scavenger/state/*.json")
    for host in small_site.hosts.values():
        readable = host.run("sh", "-c", _FRESH, user="nobody", check=False).splitlines()
        journal = host.run("journalctl", "--no-pager", "-o", "export")
        assert not [name for name, one in secrets.items() if one in journal], host.name
        seen, found = json.loads(
            host.run("python3", "-c", _SCAN, text=json.dumps([secrets, readable, logs]), timeout_s=240.0)
        )
        assert found == [], host.name
        assert seen > 0, f"there is something to read on {host.name}"
    modes = head.run(
        "find", "/shared/scavenger", "/shared/u2/config", "-name", "*.key", "-printf", "%m\\n"
    ).split()
    assert set(modes) == {"600"}

    # sacct says which run and whose an engine is, after its job has ended too.
    training.cut_short()
    head.run("scancel", "-u", "scavenger", "-p", "scavenge", user="scavenger")
    argv = ("sacct", "-a", "-X", "-n", "-P", "-r", "scavenge", "-o", "JobName,User,Account,State,Comment")

    def told() -> list[list[str]]:
        lines = [line.split("|") for line in head.run(*argv).splitlines()]
        return [line for line in lines if line[3].startswith("CANCELLED")]

    wait_for("sacct to tell of the engines", lambda: len(told()) >= 2, 60)
    for name, user, account, _state, comment in told():
        assert name.startswith("scv-")
        assert (user, account) == ("scavenger", "scavenger")
        assert comment.endswith(",run=small,owner=u2")
