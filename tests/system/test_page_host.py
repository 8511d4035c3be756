"""Commands of the pages that make and remove users, units and folders of a host, on a host that systemd runs: a container.

One host over a root file system without a trace of ours (tests/system/deb_site.sh): what is made there is seen by nobody else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scavenger.cluster.sandbox.hosts import BootedHost, SiteSandbox
from scavenger.errors import ClusterUnavailable
from tests.pages import commands
from tests.system.site_run import BARE_HOSTS, bare_system

pytestmark = [pytest.mark.site, pytest.mark.long, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BootedHost]:
    folder = tmp_path_factory.mktemp("host") / "site"
    with SiteSandbox(bare_system("bookworm"), folder, BARE_HOSTS) as booted:
        yield booted["train1"]


def shown(page: str, begins: str) -> str:
    """The one command of a page that begins so."""
    (text,) = {one.text for one in commands.blocks(commands.read(page)) if one.text.startswith(begins)}
    return text


def types(host: BootedHost, text: str) -> str:
    return host.run("bash", "-ec", text)


def test_users_of_daemon_engines_and_view_are_made_and_removed(host: BootedHost) -> None:
    types(host, shown("docs/site.md", "useradd --system --uid 990"))
    types(host, shown("docs/site.md", "useradd --system --uid 991"))
    types(host, shown("docs/site.md", "useradd --system --user-group --no-create-home"))
    assert host.run("id", "-un", "991").strip() == "scavenger-engines"
    assert host.run("stat", "-c", "%U", "/var/lib/scavenger-engines").strip() == "scavenger-engines"
    assert host.run("getent", "passwd", "scavenger-view").split(":")[5] == "/"
    types(host, shown("docs/admin.md", "userdel scavenger"))
    with pytest.raises(ClusterUnavailable, match="no such user"):
        host.run("id", "scavenger")


def test_the_unit_is_removed_and_systemd_forgets_it(host: BootedHost) -> None:
    unit = "/etc/systemd/system/scavenger.service"
    host.write(unit, (ROOT / "scripts/scavenger.service").read_text())
    host.run("systemctl", "daemon-reload")
    state = ("systemctl", "show", "scavenger", "-p", "LoadState", "--value")
    assert host.run(*state).strip() == "loaded"
    types(host, shown("docs/admin.md", f"rm {unit}"))
    assert host.run(*state).strip() == "not-found"


def test_the_folders_are_removed_and_no_other(host: BootedHost) -> None:
    text = shown("docs/admin.md", "rm -r ")
    folders = text.split()[2:]
    for folder in folders:
        host.run("mkdir", "-p", f"{folder}/within", f"{folder}.kept")
    types(host, text)
    left = types(host, "ls -d /*/scavenger* /*/*/scavenger* 2>/dev/null || true").split()
    assert {f"{folder}.kept" for folder in folders} <= set(left)
    assert not set(folders) & set(left)


def test_modules_of_a_site_are_loaded(host: BootedHost) -> None:
    """With Lmod, and modules of those names that set what such modules set."""
    for name, file in (("python", "3.11.lua"), ("openmpi", "5.lua")):
        host.run("mkdir", "-p", f"/srv/site-modules/{name}")
        host.write(f"/srv/site-modules/{name}/{file}", f'prepend_path("PATH", "/opt/{name}/bin")\n')
    loading = shown("docs/start.md", "module load")
    said = types(
        host, f'. /etc/profile.d/lmod.sh\nmodule use /srv/site-modules\n{loading}\nprintf %s "$PATH"'
    )
    assert said.split(":")[:2] == ["/opt/openmpi/bin", "/opt/python/bin"]
