"""From the Debian package to the first harvested engine and the page of harm: an admin's first quarter of an hour, by docs/install.md.

Hosts are containers with systemd, and Slurm with slurmdbd runs over them (scripts/site-sandbox). The environment of engines and training
jobs is the image's own, shown where the page has one made: pip and its network are tests/test_install_page.py's affair. The users and the
partition of docs/admin.md are the image's, too.
"""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path

import pytest

from scavenger.cluster.sandbox.hosts import BootedHost, HostSpec, SiteSandbox, wait_for
from tests.system import site_run
from tests.system.test_deb import apt, block, build

pytestmark = [pytest.mark.site, pytest.mark.long, pytest.mark.timeout(2400)]

HOSTS = (
    HostSpec("ctl", 10, ("munge", "slurmctld", "mariadb", "slurmdbd")),
    HostSpec("train1", 21, ("munge", "slurmd")),
    HostSpec("gpu1", 31, ("munge", "slurmd")),
)
ENVIRONMENT = "/shared/opt/scavenger"
LEDGER = "/var/lib/scavenger/ledger.sqlite3"
AS_DAEMON = ("runuser", "-u", "scavenger", "--")


def package(folder: Path) -> Path:
    kept = os.environ.get("SCAVENGER_DEBS")
    if kept:
        return min(Path(kept, "trixie").glob("scavenger_*.deb"), key=lambda path: "-" in path.name)
    return build(folder, "trixie")


def prepare(site: SiteSandbox) -> None:
    """The environment where the page has it; on the daemon's host /opt/scavenger is empty, for the package."""
    shown = "mount --bind /opt/scavenger /opt/environment; mount --make-private /opt/environment"
    for host in site.hosts.values():
        host.run("sh", "-euc", f"mkdir -p /opt/environment {ENVIRONMENT.rpartition('/')[0]}; {shown}")
    site["ctl"].run("ln", "-s", "/opt/environment", ENVIRONMENT)
    site["ctl"].run("mount", "-t", "tmpfs", "-o", "mode=0755", "tmpfs", "/opt/scavenger")


def edit(host: BootedHost) -> None:
    """What the page has the admin set in the editor."""
    path = site_run.CONFIG
    drafted = host.run("cat", path)
    assert "python" not in drafted, "a value of the draft would be hidden"
    text = drafted.replace("[harvest]\n", f'[harvest]\npython = "{ENVIRONMENT}/bin/python"\n')
    host.write(
        path, text.replace("[owners]\n", '[owners]\nusers = ["u1"]\n'), mode="0640", owner="root:scavenger"
    )


def configure(host: BootedHost, commands: list[str]) -> None:
    """The page's commands on the daemon's host, as they stand; `editor` is played."""
    for command in commands:
        if command.startswith("editor "):
            said = host.run(*AS_DAEMON, "scavenger", "check-config", site_run.CONFIG)
            assert "engines' Python (WARNING: the daemon's, /opt/scavenger/bin/python" in said
            edit(host)
        elif "doctor" in command:
            said = host.run("bash", "-uc", command, timeout_s=300.0, check=False)
            assert "problem" not in said, said
            assert "a job of ours was given a GPU" in " ".join(said.split())
        else:
            said = host.run("bash", "-euc", command, timeout_s=300.0)
            if " init " in command:
                assert "harvest.python: an environment on the compute nodes" in said


def train(host: BootedHost, commands: list[str]) -> None:
    """The page's commands of the user; his `scavenger` by its module, because the image's script names /opt/scavenger."""
    host.run("install", "-d", "-o", "u1", "-m", "0700", "/shared/u1")
    by_module = [
        f"{ENVIRONMENT}/bin/python -m {command}" if command.startswith("scavenger ") else command
        for command in commands
    ]
    script = "cd /shared/u1; export USER=u1; " + "; ".join(by_module)
    host.run("bash", "-euc", script, user="u1", timeout_s=600.0)


def asked(host: BootedHost, sql: str) -> int:
    return int(host.run("sqlite3", "-readonly", LEDGER, sql).strip() or 0)


def page(host: BootedHost, path: str, token: str = "") -> str:
    """A page of `scavenger web`, or the status that refused it."""
    ask = (
        "import sys, urllib.request, urllib.error\n"
        "asked = urllib.request.Request('http://127.0.0.1:8765' + sys.argv[1], headers={'Authorization': sys.argv[2]})\n"
        "try: print(urllib.request.urlopen(asked, timeout=30).read().decode())\n"
        "except urllib.error.HTTPError as error: print(error.code)\n"
        "except urllib.error.URLError: print('closed')\n"
    )
    return host.run("python3", "-c", ask, path, f"Bearer {token}").strip()


def test_an_admin_comes_from_the_package_to_an_engine_and_to_who_waited(tmp_path: Path) -> None:
    made = package(tmp_path / "deb")
    with site_run.booted(tmp_path / "site", HOSTS) as site:
        host = site["ctl"]
        prepare(site)
        (site.shared / made.name).write_bytes(made.read_bytes())
        began = time.monotonic()
        said = apt(host, "install", f"/shared/{made.name}")
        assert "uid 7001" in said, "which one compute nodes need"
        _, *commands = block("Debian and Ubuntu", 3)
        configure(host, commands)
        wait_for("the daemon serves", lambda: site_run.unit(host, "ActiveState") == "active", 60)
        configured = time.monotonic() - began
        journal = host.run("journalctl", "-u", "scavenger", "-o", "cat")
        assert "mode is different" not in journal, "the unit and the package agree on /etc/scavenger"

        train(host, block("Debian and Ubuntu", 4))
        engines = "SELECT count(*) FROM workers WHERE kind = 'harvested'"
        wait_for("a harvested engine", lambda: asked(host, engines) > 0, 400)
        harvested = time.monotonic() - began
        assert "harvested" in host.run(*AS_DAEMON, "scavenger", "top", "--once", "--config", site_run.CONFIG)

        waited = site_run.others_wait(site, "gpu1")
        taken = "SELECT count(*) FROM v_gpu_allocations WHERE reason = 'preempted'"
        wait_for("the daemon saw it", lambda: asked(host, taken) > 0, 120)
        serving = [
            "systemd-run",
            "--unit=web",
            "--uid=scavenger",
            f"--setenv=SCAVENGER_CONFIG={site_run.CONFIG}",
        ]
        host.run(*serving, "scavenger", "web")
        wait_for("the pages are served", lambda: page(host, "/harm") == "401", 60)
        token = host.run(*shlex.split("cat /shared/scavenger/state/web.token")).strip()
        shown = page(host, "/harm", token)
        seen = time.monotonic() - began
        assert "engines that Slurm preempted for other users" in shown
        assert "u1-first" in shown, "whose GPU-hours they were"
        print(
            f"serving after {configured:.0f} s, an engine after {harvested:.0f} s, the page after {seen:.0f} s; a user who took "
            f"the GPUs back waited {waited:.1f} s"
        )
