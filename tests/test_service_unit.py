"""The units in scripts/ are taken by systemd, and it calls them well hardened."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import typer

from scavenger import toml
from scavenger.cli import main as cli
from scavenger.cluster import processes
from scavenger.cluster.layout import demo_layout
from scavenger.cluster.model import JobSpec
from scavenger.cluster.proxy import client
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.errors import LedgerError
from scavenger.protocol import keys
from tests.clusters import wait_for
from tests.ledger.histories import fetch
from tests.proxies import listens

UNIT = Path(__file__).resolve().parents[1] / "scripts/scavenger.service"
PROXIES = tuple(UNIT.with_name(f"scavenger-slurm-{role}.service") for role in ("submit", "view"))
HARVESTER = UNIT.with_name("scavenger-harvester.service")
every_unit = pytest.mark.parametrize("unit", [UNIT, *PROXIES, HARVESTER], ids=lambda path: path.stem)
MOST_EXPOSURE = 2.0


@pytest.fixture
def analyze() -> str:
    found = shutil.which("systemd-analyze")
    if found is None:
        pytest.skip("systemd-analyze is not installed here (Debian: apt-get install systemd)")
    return found


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


@every_unit
def test_systemd_finds_nothing_wrong_with_the_unit(analyze: str, tmp_path: Path, unit: Path) -> None:
    # verify looks for the program, which is not installed where tests run
    copy = tmp_path / unit.name
    text = unit.read_text()
    command = {UNIT: "daemon", HARVESTER: "harvester"}.get(unit, "slurm-proxy")
    assert f"/opt/scavenger/bin/scavenger {command}" in text
    copy.write_text(text.replace("/opt/scavenger/bin/scavenger", sys.executable))
    done = run(analyze, "verify", "--man=no", str(copy))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_misspelt_line_would_be_found(analyze: str, tmp_path: Path) -> None:
    copy = tmp_path / "scavenger.service"
    copy.write_text(
        UNIT.read_text()
        .replace("/opt/scavenger/bin/scavenger", sys.executable)
        .replace("ProtectClock=yes", "ProtectClok=yes")
    )
    assert "ProtectClok" in run(analyze, "verify", "--man=no", str(copy)).stderr


@every_unit
def test_the_unit_s_exposure_is_low(analyze: str, unit: Path) -> None:
    done = run(analyze, "security", "--offline=true", "--no-pager", str(unit))
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze has no --offline (it came with 250)")
    match = re.search(r"Overall exposure level for \S+: (\d+\.\d+)", done.stdout)
    assert match is not None, done.stdout + done.stderr
    assert float(match[1]) <= MOST_EXPOSURE


def test_the_unit_keeps_what_the_daemon_relies_on() -> None:
    settings = dict(
        line.split("=", 1) for line in UNIT.read_text().splitlines() if re.match(r"^[A-Z]\w+=", line)
    )
    assert settings["Type"] == "notify"
    assert settings["WatchdogSec"].isdigit(), "the daemon pings three times in that"
    assert settings["ExecReload"].endswith("-HUP $MAINPID")
    assert settings["StateDirectory"] == "scavenger"
    assert settings["RestartPreventExitStatus"] == "2 4", (
        "a refused configuration or a fenced daemon is not started again"
    )
    assert {"AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK"} == set(
        settings["RestrictAddressFamilies"].split()
    ), "munge, slurmctld, workers"


@pytest.mark.parametrize("unit", PROXIES, ids=lambda path: path.stem)
def test_the_units_of_other_users_start_the_command_as_it_is(unit: Path) -> None:
    text = unit.read_text().replace("\\\n", " ")
    settings = dict(line.split("=", 1) for line in text.splitlines() if re.match(r"^[A-Z]\w+=", line))
    _, *argv = settings["ExecStart"].split()
    given = dict(zip(argv[1::2], argv[2::2], strict=True))
    known = {name for one in slurm_proxy_options() for name in one.opts}
    assert argv[0] == "slurm-proxy"
    assert set(given) <= known
    assert given["--socket"] == f"/run/{settings['RuntimeDirectory']}/socket"
    assert given["--role"] in unit.stem
    assert settings["User"] != given["--allow-user"] == settings["SupplementaryGroups"]
    if "--dir" in given:
        assert settings["ReadWritePaths"] == f"-{given['--dir']}"


def slurm_proxy_options() -> list[Any]:
    commands: dict[str, Any] = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    return list(commands["slurm-proxy"].params)


# ---------------------------------------------------------------- what the filter lets through


def calls_in(analyze: str, group: str) -> set[str]:
    """The system calls of one of systemd's groups, and of the groups in it."""
    found: set[str] = set()
    for line in run(analyze, "syscall-filter", "--no-pager", group).stdout.splitlines()[1:]:
        name = line.strip()
        if name.startswith("@"):
            found |= calls_in(analyze, name)
        elif name and not name.startswith("#"):
            found.add(name)
    return found


@pytest.mark.long
@pytest.mark.slurm
def test_the_daemon_and_slurm_s_commands_need_no_system_call_that_the_unit_refuses(
    analyze: str, tmp_path: Path
) -> None:
    """A refused call may abort a library. Traced: a daemon that looks at a real Slurm, from its start to its end."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed here")
    lines = re.findall(r"^SystemCallFilter=(.*)$", UNIT.read_text(), re.M)
    assert [line[0] for line in lines] == ["@", "~"]
    allowed = {call for group in lines[0].split() for call in calls_in(analyze, group)}
    refused = {call for group in lines[1].removeprefix("~").split() for call in calls_in(analyze, group)}
    assert {"read", "openat"} <= allowed
    assert {"chown", "setuid"} <= refused
    keys.init_state(tmp_path / "state", "ada")
    document: dict[str, Any] = {
        "daemon": {"state_dir": tmp_path / "state"},
        "cluster": {"backend": "slurm", "poll_interval_s": 1.0},
        "prometheus": {"listen": "127.0.0.1:0"},
    }
    (tmp_path / "scavenger.toml").write_text(toml.dumps(document))
    with SlurmSandbox(demo_layout(nodes=2, gpus=1)) as sandbox:
        program = [sys.executable, "-m", "scavenger", "daemon", "-c", str(tmp_path / "scavenger.toml")]
        argv = [strace, "-f", "-c", "-o", str(tmp_path / "calls"), *program]
        daemon = subprocess.Popen(
            argv, env={**sandbox.env, "PYTHONPATH": str(UNIT.parents[1])}, stdin=subprocess.DEVNULL
        )
        looked = f"sqlite:///{tmp_path}/state/ledger.sqlite3"
        try:
            wait_for(
                "it looked at Slurm", lambda: ledger_has(looked, "SELECT count(*) FROM cluster_polls"), 200
            )
            os.kill(keys.read_rendezvous(tmp_path / "state").pid, signal.SIGTERM)
            assert daemon.wait(60) == 0
        finally:
            if daemon.poll() is None:
                os.kill(keys.read_rendezvous(tmp_path / "state").pid, signal.SIGKILL)
                daemon.wait(30)
    used = {line.split()[-1] for line in (tmp_path / "calls").read_text().splitlines()[2:-2]}
    if os.geteuid() == 0:
        used -= {"fchown"}  # SQLite gives its files the owner of the database, as root only
    assert "epoll_wait" in used
    assert used - allowed == set()
    assert used & refused == set()


#: As `scavenger slurm-proxy`, which this user may not be: it is the daemon's.
PROXY = """
import sys
from pathlib import Path
from scavenger.cli import slurm_proxy
from scavenger.cluster.proxy import server
server.check_separate = lambda allowed, uid: None
role, socket, user, folder = sys.argv[1:]
slurm_proxy.slurm_proxy(role, Path(socket), user, Path(folder) if role == "submit" else None, None, 20.0)
"""


@pytest.mark.long
@pytest.mark.slurm
def test_the_processes_of_other_users_need_no_system_call_that_their_units_refuse(
    analyze: str, tmp_path: Path
) -> None:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed here")
    user = getpass.getuser()
    with SlurmSandbox(demo_layout(nodes=2, gpus=1)) as sandbox, tempfile.TemporaryDirectory() as short:
        for unit in PROXIES:
            lines = re.findall(r"^SystemCallFilter=~?(.*)$", unit.read_text(), re.M)
            allowed, refused = (
                {c for group in line.split() for c in calls_in(analyze, group)} for line in lines
            )
            role, socket, calls = unit.stem.rpartition("-")[2], Path(short) / unit.stem, tmp_path / unit.stem
            engines = Path(short).resolve() / "engines"
            engines.mkdir(mode=0o700, exist_ok=True)
            program = [sys.executable, "-c", PROXY, role, str(socket), user, str(engines)]
            env = {**sandbox.env, "PYTHONPATH": str(UNIT.parents[1])}
            traced = subprocess.Popen([strace, "-f", "-c", "-o", str(calls), *program], env=env)
            try:
                wait_for("it listens", partial(listens, socket), 60)
                line = client.ProxyLine("submit" if role == "submit" else "view", socket, user, 20.0)
                asks = client.ProxyCluster(SlurmCluster(sandbox.env), line, line, user)
                if role == "submit":
                    account = client.EnginesUser(line, engines)
                    account.put_key(keys.generate("run", "scv-a"))
                    log = str(engines / "logs/scv-a.log")
                    script = "#!/bin/bash\nsleep 9\n"
                    job = asks.submit(
                        JobSpec("scv-a", "", "scavenge", script, output=log, workdir=str(engines))
                    )
                    account.tidy((), 2**20)
                    asks.cancel((job,))
                else:
                    assert len(asks.view().nodes) == 2
                    assert asks.info().user == user
            finally:
                for pid in processes.descendants(traced.pid, processes.snapshot()):
                    os.kill(pid, signal.SIGTERM)
                traced.wait(30)
            used = {row.split()[-1] for row in calls.read_text().splitlines()[2:-2]}
            assert "accept4" in used
            assert used - allowed == set()
            assert used & refused == set()


def ledger_has(url: str, sql: str) -> bool:
    try:
        return bool(fetch(url, sql)[0][0])
    except (LedgerError, sa.exc.DBAPIError):
        return False  # its tables are not there yet


# ---------------------------------------------------------------- for a user without an admin

USER_UNIT = UNIT.with_name("scavenger-user.service")


def test_systemd_finds_nothing_wrong_with_the_user_s_unit(analyze: str, tmp_path: Path) -> None:
    copy = tmp_path / "scavenger.service"
    copy.write_text(USER_UNIT.read_text().replace("%h/scavenger/bin/scavenger", sys.executable))
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    argv = [analyze, "--user", "verify", "--man=no", str(copy)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_user_s_daemon_starts_and_is_reloaded_under_systemd(tmp_path: Path) -> None:
    """With a running `systemd --user`, as on a login node. Its unit is a transient one, so that nothing of the user's is touched."""
    asked = shutil.which("systemd-run") and run("systemctl", "--user", "is-system-running")
    if not asked or asked.stdout.strip() not in ("running", "degraded"):
        why = asked.stdout.strip() or asked.stderr.strip() if asked else "systemd is not installed"
        pytest.skip(f"no systemd --user runs here: {why}")
    keys.init_state(tmp_path / "state", "ada")
    cluster, state_dir = {"backend": "local", "local_dir": tmp_path}, {"state_dir": tmp_path / "state"}
    document: dict[str, Any] = {"daemon": state_dir, "cluster": cluster, "harvest": {"enabled": False}}
    (tmp_path / "scavenger.toml").write_text(toml.dumps(document))
    unit = f"scavenger-test-{os.getpid()}.service"
    properties = ["Type=notify", "NotifyAccess=main", "WatchdogSec=60", "ExecReload=/bin/kill -HUP $MAINPID"]
    argv = [
        "systemd-run",
        "--user",
        f"--unit={unit}",
        "--collect",
        *(f"--property={one}" for one in properties),
    ]
    program = [sys.executable, "-m", "scavenger", "daemon", "--config", str(tmp_path / "scavenger.toml")]
    argv += [f"--setenv=PYTHONPATH={UNIT.parents[1]}", *program]
    try:
        started = run(*argv)  # returns when the daemon said that it is ready
        assert started.returncode == 0, started.stderr
        assert keys.read_rendezvous(tmp_path / "state").generation == 1
        assert run("systemctl", "--user", "reload", unit).returncode == 0
    finally:
        run("systemctl", "--user", "stop", unit)
