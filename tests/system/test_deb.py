"""The Debian package under a running systemd, beside a real Slurm: installed, configured, started, upgraded, removed, purged."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from scavenger.cluster.sandbox.hosts import BootedHost, HostSpec, SiteSandbox, wait_for
from tests.system.site_run import unit

pytestmark = [pytest.mark.site, pytest.mark.long, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
MAX_INSTALLED_MB = 150
HOSTS = (
    HostSpec("ctl", 10, ("munge", "slurmctld")),
    HostSpec("train1", 21, ("munge", "slurmd")),
    HostSpec("gpu1", 31, ("munge", "slurmd")),
)
CONFIG = """\
[daemon]
state_dir = "/shared/scavenger/state"
ledger = "sqlite:////var/lib/scavenger/ledger.sqlite3"
listen = "0.0.0.0"
advertise = "ctl"
[cluster]
backend = "slurm"
poll_interval_s = 2.0
min_poll_interval_s = 0.5
max_rpc_per_min = 600
[harvest]
partition = "scavenge"
max_engines = 1
cpus_per_engine = 1
memory_mb_per_engine = 2000
python = "/opt/scavenger/bin/python"
"""


def build(folder: Path, *options: str) -> Path:
    argv = [ROOT / "scripts/build-deb", "--output", folder, *options]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The release, and its next build. `SCAVENGER_DEBS`: a folder that has both already."""
    kept = os.environ.get("SCAVENGER_DEBS")
    if kept:
        return sorted(Path(kept).glob("scavenger_*.deb"), key=lambda path: ("-" in path.name, path.name))
    folder = tmp_path_factory.mktemp("debs")
    return [build(folder), build(folder, "--revision", "2")]


def field(package: Path, name: str) -> str:
    return subprocess.run(
        ["dpkg-deb", "--field", package, name], capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[SiteSandbox]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scavenger-deb"
    made = subprocess.run(
        ["bash", ROOT / "tests/system/deb_site.sh"],
        env={**os.environ, "root": str(ROOT), "cache": str(cache)},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert made.returncode == 0, made.stderr[-2000:]
    with SiteSandbox(Path(made.stdout.split()[-1]), tmp_path / "site", HOSTS) as booted:
        yield booted


def paths(host: BootedHost) -> set[str]:
    """All files, folders and links of the host's own disk, but what Debian's own programs note there as they run."""
    noted = r"^/(proc|sys|dev|run|tmp|shared|var/(log|cache|lib/(systemd|dpkg|apt|private|slurm)|tmp|spool|backups)|etc/\.|etc/[a-z]*-$)"
    return set(
        host.run("sh", "-c", f"find / -xdev | grep -Ev '{noted}' | sort", timeout_s=300.0).splitlines()
    )


def is_active(host: BootedHost, before: str = "0") -> bool:
    return unit(host, "ActiveState") == "active" and unit(host, "MainPID") not in (before, "0")


def test_the_package_is_installed_started_upgraded_removed_and_purged_without_a_trace(
    hosts: SiteSandbox, packages: list[Path]
) -> None:
    first, second = packages
    assert int(field(first, "Installed-Size")) < MAX_INSTALLED_MB * 1024
    host = hosts["ctl"]
    for package in packages:
        (hosts.shared / package.name).write_bytes(package.read_bytes())
    before = paths(host)
    accounts = host.run("getent", "passwd")

    said = host.run("apt-get", "install", "-y", "--no-download", f"/shared/{first.name}", timeout_s=300.0)
    assert "write /etc/scavenger/scavenger.toml" in said
    assert host.run("scavenger", "version").strip() == field(first, "Version")
    assert unit(host, "ActiveState") == "inactive", "nothing starts before it is configured"
    assert host.run("stat", "-c", "%a %U:%G", "/etc/scavenger").strip() == "750 root:scavenger"
    assert "scavenger-drain" in host.run("man", "scavenger-drain", env={"MANPAGER": "cat", "MANWIDTH": "80"})
    completed = host.run("bash", "-c", COMPLETE)
    assert "check-config" in completed.split()
    assert host.run("dpkg", "--verify", "scavenger") == "", "every file is as it was packed"

    host.run("install", "-d", "-o", "scavenger", "-g", "scavenger", "-m", "0755", "/shared/scavenger")
    host.write("/etc/scavenger/scavenger.toml", CONFIG, mode="0640", owner="root:scavenger")
    as_user = ("runuser", "-u", "scavenger", "--", "scavenger")
    host.run(*as_user, "check-config", "/etc/scavenger/scavenger.toml")
    doctor = host.run(*as_user, "doctor", "--config", "/etc/scavenger/scavenger.toml", check=False)
    assert "scavenge" in doctor
    host.run("systemctl", "enable", "--now", "scavenger", timeout_s=120.0)
    assert is_active(host)
    pid = unit(host, "MainPID")
    assert host.run("ps", "-o", "user=", "-p", pid).strip() == "scavenger"
    host.run(*as_user, "status", "--config", "/etc/scavenger/scavenger.toml")

    host.run("apt-get", "install", "-y", "--no-download", f"/shared/{second.name}", timeout_s=300.0)
    assert host.run("dpkg-query", "-W", "-f", "${Version}", "scavenger") == field(second, "Version")
    wait_for("the upgraded daemon serves", lambda: is_active(host, pid), 60)
    assert host.run("cat", "/etc/scavenger/scavenger.toml") == CONFIG

    host.run("apt-get", "remove", "-y", "scavenger", timeout_s=300.0)
    assert unit(host, "ActiveState") == "inactive"
    assert host.run("pgrep", "-u", "scavenger", check=False) == ""
    host.run("test", "-e", "/var/lib/scavenger/ledger.sqlite3")
    said = host.run("apt-get", "purge", "-y", "scavenger", timeout_s=300.0)
    (told,) = [line for line in said.splitlines() if line.startswith("scavenger: left in place: ")]
    left = paths(host) - before
    roots = ("/etc/scavenger", "/var/lib/scavenger")
    assert {path for path in left if not path.startswith(roots)} == set()
    assert all(root in told for root in roots)
    assert "scavenger" in host.run("getent", "passwd", "scavenger"), "whose files are left"

    # What was left is taken away by hand; a package that was never configured takes all with it.
    host.run("rm", "-r", *roots)
    host.run("apt-get", "install", "-y", "--no-download", f"/shared/{second.name}", timeout_s=300.0)
    host.run("apt-get", "purge", "-y", "scavenger", timeout_s=300.0)
    assert paths(host) - before == set()
    assert host.run("getent", "passwd") == accounts


def test_a_user_that_the_admin_made_keeps_its_uid_and_stays(hosts: SiteSandbox, packages: list[Path]) -> None:
    host, (first, _) = hosts["train1"], packages
    (hosts.shared / first.name).write_bytes(first.read_bytes())
    host.run(
        "useradd", "--system", "--uid", "990", "--user-group", "--home-dir", "/var/lib/scavenger", "scavenger"
    )
    mine = host.run("getent", "passwd", "scavenger")
    host.run("apt-get", "install", "-y", "--no-download", f"/shared/{first.name}", timeout_s=300.0)
    host.run("dpkg-reconfigure", "scavenger")
    assert host.run("stat", "-c", "%u", "/var/lib/scavenger").strip() == "990"
    host.run("apt-get", "purge", "-y", "scavenger", timeout_s=300.0)
    assert host.run("getent", "passwd", "scavenger") == mine


COMPLETE = """\
. /usr/share/bash-completion/completions/scavenger
COMP_WORDS=(scavenger che) COMP_CWORD=1
_scavenger_completion scavenger
printf '%s\\n' "${COMPREPLY[@]}"
"""
