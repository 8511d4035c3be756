"""Users of a site of containers: two train as themselves, and neither reaches the other."""

from __future__ import annotations

import pytest

from scavenger.cluster.sandbox.hosts import SiteSandbox, wait_for
from tests.system.site_run import (
    CONFIG,
    DAEMON,
    PUBLIC,
    PYTHON,
    SCAVENGER,
    as_scavenger,
    ask_one,
    sorting,
    start_daemon,
    start_postgres,
    submit,
)

pytestmark = [pytest.mark.site, pytest.mark.long, pytest.mark.timeout(1800)]


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
