"""The Debian package under a running systemd, beside a real Slurm: installed, configured, started, upgraded, removed, purged.

By the commands of docs/install.md, on Debian 12 and 13: hosts are containers over root file systems without a trace of ours
(tests/system/deb_site.sh), and see no network. `SCAVENGER_DEBS`: a folder with packages that are built already, in bookworm/ and trixie/.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import scavenger
from scavenger.cluster.sandbox.hosts import BootedHost, SiteSandbox, wait_for
from tests.system.site_run import BARE_HOSTS, bare_system, unit

pytestmark = [pytest.mark.site, pytest.mark.long, pytest.mark.timeout(2400)]

ROOT = Path(__file__).resolve().parents[2]
MAX_INSTALLED_KIB = 150_000_000 // 1024
#: What Debian's own programs note on a host's disk as they run.
NOTED = (
    r"^/(proc|sys|dev|run|tmp|shared|var/(log|cache|tmp|spool|backups|lib/(systemd|dpkg|apt|private|slurm))"
    r"|etc/\.|etc/[a-z]*-$)"
)
AS_USER = ("runuser", "-u", "scavenger", "--", "scavenger")


def block(heading: str, number: int) -> list[str]:
    """Commands of a block of docs/install.md, without what is said of them."""
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    section = re.split(rf"^## {heading}$", page, flags=re.MULTILINE)[1].split("\n## ")[0]
    lines = re.findall(r"^```\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[number].splitlines()
    return [re.split(r"\s+# ", line)[0] for line in lines]


def build(folder: Path, release: str, *options: str) -> Path:
    argv = [str(ROOT / "scripts/build-deb"), "--output", str(folder), *options]
    if f"VERSION_CODENAME={release}" not in Path("/etc/os-release").read_text():
        argv += ["--release", release]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    print(done.stderr.splitlines()[-1])
    return Path(done.stdout.strip())


@pytest.fixture(scope="module", params=["bookworm", "trixie"])
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def packages(release: str, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The release, and its next build."""
    kept = os.environ.get("SCAVENGER_DEBS")
    if kept:
        found = sorted(
            Path(kept, release).glob("scavenger_*.deb"), key=lambda path: ("-" in path.name, path.name)
        )
        assert len(found) == 2, f"{kept}/{release} is to hold a package and its revision 2"
        return found
    folder = tmp_path_factory.mktemp("debs")
    return [build(folder, release), build(folder, release, "--revision", "2")]


def field(package: Path, name: str) -> str:
    argv = ["dpkg-deb", "--field", str(package), name]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


@pytest.fixture
def hosts(release: str, packages: list[Path], tmp_path: Path) -> Iterator[SiteSandbox]:
    with SiteSandbox(bare_system(release), tmp_path / "site", BARE_HOSTS) as booted:
        for package in packages:
            (booted.shared / package.name).write_bytes(package.read_bytes())
        yield booted


def paths(host: BootedHost) -> set[str]:
    """All files, folders and links of the host's own disk, but for `NOTED`."""
    found = host.run("sh", "-c", f"find / -xdev | grep -Ev '{NOTED}'", timeout_s=300.0).splitlines()
    assert "/etc/passwd" in found
    return set(found)


def apt(host: BootedHost, *words: str) -> str:
    return host.run("apt-get", "-y", *words, env={"DEBIAN_FRONTEND": "noninteractive"}, timeout_s=300.0)


def installs(host: BootedHost, package: Path) -> str:
    return apt(host, "install", f"/shared/{package.name}")


def with_file(command: str, path: str) -> list[str]:
    """The words of a page's command, with this path where it has FILE."""
    return [path if word == "FILE" else word for word in command.split()]


def serves(host: BootedHost, before: str = "0") -> Callable[[], bool]:
    return lambda: unit(host, "ActiveState") == "active" and unit(host, "MainPID") not in (before, "0")


def test_it_is_installed_started_upgraded_removed_and_purged_without_a_trace(
    hosts: SiteSandbox, packages: list[Path]
) -> None:
    first, second = packages
    size = int(field(first, "Installed-Size"))
    assert size < MAX_INSTALLED_KIB
    host = hosts["ctl"]
    before, accounts = paths(host), host.run("getent", "passwd")
    installing, *setting_up = block("Debian and Ubuntu", 3)
    assert installing.split()[:2] == ["apt-get", "install"]

    began = time.monotonic()
    said = installs(host, first)
    took = time.monotonic() - began
    assert "scavenger init" in said, "what comes next is told"
    assert host.run("scavenger", "version").strip() == scavenger.__version__ == field(first, "Version")
    assert unit(host, "ActiveState") == "inactive", "nothing starts before it is configured"
    assert host.run("stat", "-c", "%a %U:%G", "/etc/scavenger").strip() == "750 root:scavenger"
    assert host.run("stat", "-c", "%a %U:%G", "/var/lib/scavenger").strip() == "700 scavenger:scavenger"
    assert "--node" in host.run("man", "scavenger-drain", env={"MANPAGER": "cat", "MANWIDTH": "80"})
    assert host.run("bash", "-c", COMPLETE).split() == ["check-config", "checkpoint"]
    assert host.run("dpkg", "--verify", "scavenger") == "", "every file is as it was packed"
    assert host.run("find", "/opt/scavenger", "-name", "torch*") == ""

    for command in setting_up:
        # no environment of engines is here: test_deb_first_engine.py goes on to one
        if not command.startswith("editor ") and "doctor" not in command:
            host.run("bash", "-euc", command, timeout_s=120.0)
    assert serves(host)(), "systemctl enable --now returns when it serves"
    pid = unit(host, "MainPID")
    assert host.run("ps", "-o", "user=", "-p", pid).strip() == "scavenger"
    host.run(*AS_USER, "status", env=CONFIG)  # exit code 1 when none serves
    configured = host.run("cat", "/etc/scavenger/scavenger.toml")
    assert "scavenge" in host.run(*AS_USER, "doctor", env=CONFIG, check=False)

    saved = "/var/lib/scavenger/before-upgrade.ledger"
    host.run(*with_file(block("Debian and Ubuntu", 5)[0], saved), timeout_s=120.0)
    began = time.monotonic()
    installs(host, second)
    wait_for("the upgraded daemon serves", serves(host, pid), 60)
    upgraded = time.monotonic() - began
    assert host.run("dpkg-query", "-W", "-f", "${Version}", "scavenger") == field(second, "Version")
    assert host.run("cat", "/etc/scavenger/scavenger.toml") == configured
    assert "sound" in host.run(*AS_USER, "ledger", "check", env=CONFIG)

    going_back = block("Debian and Ubuntu", 6)
    assert going_back[1].split() == ["apt-get", "install", "--allow-downgrades", "./OLD.deb"]
    for command in going_back:
        if command == going_back[1]:
            apt(host, "install", "--allow-downgrades", f"/shared/{first.name}")
            assert unit(host, "ActiveState") == "inactive", (
                "a stopped daemon is not started before its ledger is back"
            )
        else:
            host.run(*with_file(command, saved), timeout_s=120.0)
    assert serves(host)()
    assert host.run("dpkg-query", "-W", "-f", "${Version}", "scavenger") == field(first, "Version")
    events = (*AS_USER, "ledger", "report", "events", "--format", "csv")
    wait_for("the restored history has begun", lambda: "history_began" in host.run(*events, env=CONFIG), 60)

    remove, purge = block("Debian and Ubuntu", 7)
    apt(host, *remove.split()[1:])
    assert unit(host, "ActiveState") == "inactive"
    assert host.run("pgrep", "-u", "scavenger", check=False) == ""
    host.run("test", "-e", "/var/lib/scavenger/ledger.sqlite3")
    said = apt(host, *purge.split()[1:])
    (told,) = [line for line in said.splitlines() if line.startswith("scavenger: left in place: ")]
    roots = ("/etc/scavenger", "/var/lib/scavenger")
    assert {path for path in paths(host) - before if not path.startswith(roots)} == set()
    assert all(root in told for root in roots)
    assert "scavenger" in host.run("getent", "passwd", "scavenger"), "whose files are left"

    # What was left is taken away by hand; a package that was never configured takes all with it.
    host.run("rm", "-r", *roots)
    installs(host, second)
    apt(host, *purge.split()[1:])
    assert paths(host) - before == set()
    assert host.run("getent", "passwd") == accounts
    print(f"{size / 1024:.0f} MiB; installed in {took:.0f} s, upgraded and serving in {upgraded:.0f} s")


def test_a_user_that_the_admin_made_keeps_its_uid_and_stays(hosts: SiteSandbox, packages: list[Path]) -> None:
    host = hosts["train1"]
    made = "useradd --system --uid 990 --user-group --home-dir /var/lib/scavenger scavenger"
    host.run(*made.split())
    mine = host.run("getent", "passwd", "scavenger")
    installs(host, packages[0])
    host.run("dpkg-reconfigure", "scavenger")
    assert host.run("stat", "-c", "%u", "/var/lib/scavenger").strip() == "990"
    apt(host, "purge", "scavenger")
    assert host.run("getent", "passwd", "scavenger") == mine


def test_lmod_loads_the_module(hosts: SiteSandbox, packages: list[Path]) -> None:
    host = hosts["gpu1"]
    installs(host, packages[0])
    module = (ROOT / "examples/modules/scavenger.lua").read_text()
    host.run("mkdir", "-p", "/srv/modules/scavenger")
    host.write(f"/srv/modules/scavenger/{scavenger.__version__}.lua", module)
    assert host.run("bash", "-c", MODULE).split() == ["/opt/scavenger/bin/scavenger", scavenger.__version__]


CONFIG = {"SCAVENGER_CONFIG": "/etc/scavenger/scavenger.toml"}
COMPLETE = """\
. /usr/share/bash-completion/bash_completion
. /usr/share/bash-completion/completions/scavenger
COMP_WORDS=(scavenger che) COMP_CWORD=1
_scavenger_completion scavenger
printf '%s\\n' "${COMPREPLY[@]}"
"""
MODULE = """\
. /etc/profile.d/lmod.sh
module use /srv/modules
module load scavenger
command -v scavenger
scavenger version
"""
