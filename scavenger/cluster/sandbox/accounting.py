"""Accounting for a private Slurm: slurmdbd on a MariaDB of its own, and two QOS of which one preempts the other.

Boundary: slurmdbd and its database; IO.

`normal`, every user's default, preempts `scavenge`, as docs/admin.md tells a site to set it up. Owns these two daemons' settings and the
accounts. They are started by the sandbox, which ends them; nothing is written outside its folder, and only 127.0.0.1 is listened on.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from scavenger.cluster.layout import ClusterLayout
from scavenger.cluster.sandbox.conf import SandboxLocation, grace_of
from scavenger.cluster.sandbox.ports import listens
from scavenger.cluster.slurm import runner
from scavenger.errors import ClusterError

INSTALL = "apt-get install -y --no-install-recommends slurmdbd slurm-wlm-mysql-plugin mariadb-server"
#: In the order in which they end, each once the one before is gone.
DAEMONS = ("slurmdbd", "mariadbd")
INSTALL_S, SACCTMGR_S = 60.0, 30.0
_BINARIES = ("mariadb-install-db", "mariadbd", "slurmdbd", "sacctmgr")
_DBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={site.dir}/run/munge.socket
DbdHost=localhost
DbdPort={dbd_port}
SlurmUser={site.user}
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={db_port}
StorageUser=slurm
StoragePass={password}
StorageLoc=slurm_acct_db
PluginDir={site.plugins}
PidFile={site.dir}/run/slurmdbd.pid
LogFile={site.dir}/log/slurmdbd.log
DebugLevel=info
"""


class AccountingHost(Protocol):
    """What of the sandbox is needed here."""

    layout: ClusterLayout
    dir: Path
    site: SandboxLocation
    env: dict[str, str]

    def spawn(self, name: str, *argv: str) -> None: ...
    def wait_for(self, what: str, deadline: float, condition: Callable[[], bool]) -> None: ...


def missing(path: str) -> str:
    """Why no accounting can be started here, in one line; empty when it can."""
    absent = [name for name in _BINARIES if shutil.which(name, path=path) is None]
    return f"no accounting can be started here: no {', '.join(absent)} on PATH" if absent else ""


def start(daemons: AccountingHost, deadline: float) -> None:
    """Start both daemons and make cluster, account, user and QOS. slurmctld starts after that: it looks for its cluster."""
    why = missing(daemons.env["PATH"])
    if why:
        raise ClusterError(why, INSTALL)
    site, password = daemons.site, secrets.token_hex(16)
    _database(daemons, password, deadline)
    conf = daemons.dir / "etc/slurmdbd.conf"
    conf.touch(mode=0o600)
    conf.write_text(
        _DBD_CONF.format(site=site, password=password, dbd_port=site.dbd_port, db_port=site.dbd_port + 1)
    )
    daemons.spawn("slurmdbd", "slurmdbd", "-D")
    daemons.wait_for("slurmdbd's port", deadline, lambda: listens(site.dbd_port))
    grace = grace_of(daemons.layout)
    for words in (
        ("add", "cluster", daemons.layout.cluster_name),
        ("add", "qos", "scavenge", "PreemptMode=requeue", f"GraceTime={grace}", "Priority=0"),
        ("modify", "qos", "normal", "set", "Preempt=scavenge", "Priority=10"),
        # on the whole cluster, so that root, who has an account from the start, may use both as well
        ("modify", "cluster", daemons.layout.cluster_name, "set", "QOS=normal,scavenge", "DefaultQOS=normal"),
        ("add", "account", "site", "Description=site", "Organization=site"),
        ("add", "user", site.user, "Account=site"),
    ):
        _run(daemons.env, SACCTMGR_S, "sacctmgr", "-i", *words)


def _database(daemons: AccountingHost, password: str, deadline: float) -> None:
    data, site = daemons.dir / "db", daemons.site
    data.mkdir(mode=0o700, exist_ok=True)
    first = daemons.dir / "etc/db.sql"
    first.touch(mode=0o600)
    # slurmdbd makes the database itself, but in vain with MariaDB's client library 3.4.10: a connection whose first attempt failed, for
    # want of the database, has lost its settings, and refuses every result ("exceeds maximum allowed number of columns (=0)").
    first.write_text(
        "CREATE DATABASE slurm_acct_db;\n"
        f"CREATE USER 'slurm'@'127.0.0.1' IDENTIFIED BY '{password}';\nGRANT ALL ON slurm_acct_db.* TO 'slurm'@'127.0.0.1';\n"
    )
    common = ("--no-defaults", f"--datadir={data}", f"--user={site.user}", "--innodb-log-file-size=8M")
    _run(
        daemons.env,
        INSTALL_S,
        "mariadb-install-db",
        *common,
        "--auth-root-authentication-method=normal",
        "--skip-test-db",
    )
    daemons.spawn(
        "mariadbd",
        "mariadbd",
        *common,
        f"--socket={daemons.dir}/run/db.sock",
        f"--pid-file={daemons.dir}/run/db.pid",
        "--bind-address=127.0.0.1",
        f"--port={site.dbd_port + 1}",
        "--skip-name-resolve",
        f"--init-file={first}",
        "--innodb-lock-wait-timeout=900",
        "--innodb-flush-log-at-trx-commit=0",
    )
    daemons.wait_for("MariaDB's port", deadline, lambda: listens(site.dbd_port + 1))


def _run(env: Mapping[str, str], timeout_s: float, *argv: str) -> None:
    """Raises `ClusterError` with the command's words, or that it gave no answer in time."""
    done = runner.asked(argv, env, timeout_s, cwd=os.sep)
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(argv)}: {(done.stderr or done.stdout).strip()[-500:]}")
