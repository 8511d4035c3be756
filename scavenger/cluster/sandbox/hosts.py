"""A site of containers on this machine: a systemd, Slurm daemons, an address, users and a /tmp of its own in each. Debian, root.

    scripts/site-sandbox             boots it and prints one line of JSON; end of input or a signal stops it, and nothing is left

    ctl      slurmctld                        head     where the daemon goes
    dbd      slurmdbd on MariaDB              pg       PostgreSQL
    train1-2 reserved nodes                   gpu1-3   nodes of the preemptible partition
    /shared  one folder that all hosts see; nothing else is shared

The hosts are containers of systemd-nspawn over one root file system (`scripts/site-sandbox` makes it); what a host writes lies in memory
and goes with it. They live in namespaces of their own (mounts, network, processes), so a `SIGKILL` of the owner ends all of it, and the
bridge and its addresses are invisible from outside. Their GPUs are links to a character device: Slurm allocates them, and no
job computes on them.

Boundary: several hosts, for scripts/site-sandbox and the tests; `sandbox` is a Slurm on one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from scavenger.errors import ClusterUnavailable

NET, BRIDGE = "10.88.0", "scv0"
BOOT_S = 120.0
GPUS = 4
#: Accounts of the image: the daemon's own, and two researchers'.
USERS = {"scavenger": 7001, "u1": 7002, "u2": 7003}


@dataclass(frozen=True, slots=True)
class HostSpec:
    """One host of the site: the last byte of its address, and the units that run on it besides systemd's own."""

    name: str
    number: int
    units: tuple[str, ...]

    @property
    def address(self) -> str:
        return f"{NET}.{self.number}"


SITE = (
    HostSpec("ctl", 10, ("munge", "slurmctld")),
    HostSpec("dbd", 11, ("munge", "mariadb", "slurmdbd")),
    HostSpec("head", 12, ("munge",)),
    HostSpec("pg", 13, ("postgresql",)),
    HostSpec("train1", 21, ("munge", "slurmd")),
    HostSpec("train2", 22, ("munge", "slurmd")),
    HostSpec("gpu1", 31, ("munge", "slurmd")),
    HostSpec("gpu2", 32, ("munge", "slurmd")),
    HostSpec("gpu3", 33, ("munge", "slurmd")),
)
#: The same with fewer hosts, where seconds count: slurmdbd beside slurmctld, and two hosts to harvest.
SMALL_SITE = (
    HostSpec("ctl", 10, ("munge", "slurmctld", "mariadb", "slurmdbd")),
    *(host for host in SITE if host.name not in ("ctl", "dbd", "gpu3")),
)
#: Units of the image that a host masks unless it is named for them.
_UNITS = ("munge", "mariadb", "postgresql", "slurmctld", "slurmd", "slurmdbd")

_SLURM_CONF = """\
ClusterName=site
SlurmctldHost=ctl({net}.10)
SlurmUser=slurm
AuthType=auth/munge
AuthInfo=cred_expire=5
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
GresTypes=gpu
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=2
MessageTimeout=5
SlurmdTimeout=30
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
{accounting}
{nodes}
PartitionName=scavenge Nodes={gpu_nodes} PriorityTier=1 PreemptMode=REQUEUE GraceTime=2 Default=YES AllowAccounts=scavenger
PartitionName=normal Nodes={gpu_nodes} PriorityTier=10 PreemptMode=OFF
PartitionName=reserved Nodes={reserved_nodes} PriorityTier=10 PreemptMode=OFF
"""
_ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={database}
AccountingStorageTRES=gres/gpu
AccountingStoreFlags=job_comment
AccountingStorageEnforce=associations
JobAcctGatherType=jobacct_gather/linux"""
_SLURMDBD_CONF = """\
AuthType=auth/munge
DbdHost={host}
SlurmUser=slurm
PidFile=/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StoragePass={password}
StorageLoc=slurm_acct_db
"""


def _nodes(prefix: str, site: Iterable[HostSpec] = SITE) -> list[HostSpec]:
    return [host for host in site if host.name.startswith(prefix)]


def slurm_conf(site: Sequence[HostSpec] = SITE) -> str:
    """`slurm.conf` of the site, with accounting where it has a host for it. Pure."""
    lines = [
        f"NodeName={host.name} NodeAddr={host.address} CPUs=8 RealMemory=64000 Gres=gpu:h100:{GPUS}"
        for host in site
        if "slurmd" in host.units
    ]
    database = next((host.address for host in site if "slurmdbd" in host.units), "")
    return _SLURM_CONF.format(
        net=NET,
        accounting=_ACCOUNTING.format(database=database)
        if database
        else "AccountingStorageType=accounting_storage/none",
        nodes="\n".join(lines),
        gpu_nodes=",".join(host.name for host in _nodes("gpu", site)),
        reserved_nodes=",".join(host.name for host in _nodes("train", site)),
    )


def cgroup_conf(release: str) -> str:
    """`cgroup.conf` for this release of Slurm, without a use of cgroups: 22.05 knows no `disabled`, and needs none. Pure."""
    return "CgroupAutomount=no\n" if release.startswith("22.") else "CgroupPlugin=disabled\n"


def hosts_file(site: Iterable[HostSpec] = SITE) -> str:
    """`/etc/hosts` of every host. Pure."""
    return "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in site)


def die_with_parent() -> None:
    """For a child between fork and exec: Linux kills it when its parent ends, however that ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)


def wait_for(what: str, condition: Callable[[], object], timeout_s: float) -> float:
    """Poll until the condition holds; the seconds that it took. Raises `ClusterUnavailable` naming what was waited for."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > timeout_s:
            raise ClusterUnavailable(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(0.2)  # between two polls of a condition
    return time.monotonic() - started


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


class BootedHost:
    """A booted host. `link_up` and `link_down` are its network cable."""

    def __init__(self, spec: HostSpec, process: subprocess.Popen[bytes], namespaces: int) -> None:
        self.spec, self._process, self._namespaces = spec, process, namespaces

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def init_pid(self) -> int:
        """The pid of the host's init as this machine sees it. Raises `ClusterUnavailable` before it is there."""
        # nsenter -> (its child in the process namespace) systemd-nspawn -> init
        at = [self._process.pid]
        for _ in range(2):
            at = [child for pid in at for child in _children(pid)]
        if not at:
            raise ClusterUnavailable(f"host {self.name} is not up")
        return at[0]

    def command(
        self, argv: Sequence[str], user: str = "root", env: dict[str, str] | None = None
    ) -> list[str]:
        """The command that runs `argv` on this host as `user`, in a login-like environment."""
        words = ["nsenter", "-t", str(self.init_pid()), "-m", "-u", "-i", "-n", "-p", "-C", "--"]
        if user != "root":
            words += ["runuser", "-u", user, "--"]
        home = "/root" if user == "root" else f"/home/{user}"
        given = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": home,
            "LANG": "C.UTF-8",
        }
        pairs = [f"{key}={value}" for key, value in (given | (env or {})).items()]
        return [*words, "env", "-i", *pairs, *argv]

    def run(
        self,
        *argv: str,
        user: str = "root",
        env: dict[str, str] | None = None,
        text: str = "",
        timeout_s: float = 120.0,
        check: bool = True,
    ) -> str:
        """Run a command there; its output. Raises `ClusterUnavailable` with what it said when it fails."""
        done = subprocess.run(
            self.command(argv, user, env),
            input=text,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode:
            said = done.stderr.strip() or done.stdout.strip()
            raise ClusterUnavailable(
                f"{self.name}: {' '.join(argv)[:200]}: status {done.returncode}: {said[-2000:]}"
            )
        return done.stdout

    def write(self, path: str, text: str, *, mode: str = "0644", owner: str = "root") -> None:
        """Write a file there."""
        self.run(
            "sh",
            "-c",
            'umask 077; cat > "$1"; chown "$3" "$1"; chmod "$2" "$1"',
            "sh",
            path,
            mode,
            owner,
            text=text,
        )

    def crash(self) -> None:
        """Cut its power: every process ends at once, and nothing is written any more."""
        os.kill(self.init_pid(), signal.SIGKILL)
        self._process.wait(20)

    def stop(self) -> None:
        """Cut its power, as `crash` does, whatever state it is in: what it wrote goes with it anyway."""
        if not self.alive:
            return
        with contextlib.suppress(ClusterUnavailable, ProcessLookupError):  # it has not come up, or is ending
            os.kill(self.init_pid(), signal.SIGKILL)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class SiteSandbox:
    """The whole site, as a context manager. `base`: the root file system; `folder`: where its configuration and logs go.

    `may_hang`: the shared folder is served by a process, as NFS is by a server, which `hang` stops and `go_on` lets continue.
    """

    def __init__(
        self, base: Path, folder: Path, site: Sequence[HostSpec] = SITE, *, may_hang: bool = False
    ) -> None:
        self.base, self.folder, self.site = base, folder, tuple(site)
        self.shared, self.may_hang = folder / "shared", may_hang
        self.hosts: dict[str, BootedHost] = {}
        self._owner: subprocess.Popen[bytes] | None = None
        self._server: subprocess.Popen[bytes] | None = None  # of the shared folder
        self._inside = 0  # pid of the namespaces' first process
        self._lock = -1  # a shared one on the root file system, while hosts run over it

    def __getitem__(self, name: str) -> BootedHost:
        return self.hosts[name]

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Boot every host; returns when Slurm's nodes are idle. Raises `ClusterUnavailable`."""
        needs = {"systemd-nspawn": "systemd-container"} | ({"bindfs": "bindfs"} if self.may_hang else {})
        missing = [package for program, package in needs.items() if shutil.which(program) is None]
        if os.geteuid() != 0 or missing:
            raise ClusterUnavailable(
                f"a site of containers needs root and {', '.join(needs)}",
                f"apt-get install {' '.join(missing or needs.values())}, as root",
            )
        self._lock_base()
        self._write_configuration()
        self._open_namespaces()
        if self.may_hang:
            self._serve_shared()
        for spec in self.site:
            self.hosts[spec.name] = self._boot(spec)
        for host in self.hosts.values():
            wait_for(f"{host.name} has booted", lambda host=host: _has_booted(host), BOOT_S)  # type: ignore[misc]
        if self._database():
            self._start_accounting()
        self._start_slurm()

    def stop(self) -> None:
        """Cut the power of all hosts and end the namespaces, with all that is in them."""
        self.go_on()
        for host in self.hosts.values():
            host.stop()
        self.hosts = {}
        if self._owner is not None:
            self._owner.kill()
            self._owner.wait()
            self._owner = None
        if self._server is not None:
            self._server.kill()  # its child ended with the namespaces
            self._server.wait()
            self._server = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _lock_base(self) -> None:
        """Keep scripts/site-sandbox from changing the root file system under the hosts. Raises `ClusterUnavailable`."""
        self._lock = os.open(f"{self.base}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ClusterUnavailable(
                f"the root file system {self.base} is being made by another process", "wait for it"
            ) from None

    def boot_again(self, name: str) -> None:
        """Boot a host that crashed; what it wrote to its own disk is gone. Returns when Slurm's daemon runs there."""
        before = self.hosts[name]
        assert not before.alive
        host = self.hosts[name] = self._boot(before.spec)
        wait_for(f"{name} has booted", lambda: _has_booted(host), BOOT_S)
        if "slurmd" in host.spec.units:
            host.run("systemctl", "restart", "slurmd")

    # ---------------------------------------------------------------- the shared folder

    def hang(self) -> None:
        """Let every access to the shared folder wait, on all hosts."""
        os.kill(self._server_pid(), signal.SIGSTOP)

    def go_on(self) -> None:
        """End what `hang` began."""
        if self._server is not None:
            for pid in (self._server_pid(), self._server.pid):  # nsenter stops itself with its child
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _serve_shared(self) -> None:
        served = self.folder / "served"
        served.mkdir(exist_ok=True)
        served.chmod(0o1777)
        argv = [*self._inside_argv(), "bindfs", "-f", "-o", "dev", str(served), str(self.shared)]
        self._server = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
        wait_for(
            "the shared folder is served",
            lambda: str(self.shared) in Path(f"/proc/{self._inside}/mounts").read_text(),
            10,
        )

    def _server_pid(self) -> int:
        """As this machine sees it: nsenter's only child."""
        if self._server is None:
            raise ClusterUnavailable("the shared folder is this machine's own: SiteSandbox(may_hang=True)")
        return next(iter(_children(self._server.pid)), self._server.pid)

    # ---------------------------------------------------------------- the network

    def firewall(self, name: str, rules: str) -> None:
        """Let through to this host what nft's `rules` of the chain `input` accept, and what belongs to it; "" = everything."""
        text = "flush ruleset\n"
        if rules:
            kept = 'ct state established,related accept; iif "lo" accept; meta l4proto icmp accept'
            chain = f"type filter hook input priority 0; policy drop; {kept}; {rules}"
            text += f"table inet site {{\nchain input {{ {chain}; }}\n}}\n"
        argv = ["nsenter", "-t", str(self.hosts[name].init_pid()), "-n", "nft", "-f", "-"]
        done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise ClusterUnavailable(f"nft: {done.stderr.strip()}")

    def cut_off(self, name: str, other: str) -> None:
        """Drop all that this host sends to that one; each still reaches all other hosts."""
        self.hosts[name].run("ip", "route", "add", "blackhole", f"{self.hosts[other].spec.address}/32")

    def reconnect(self, name: str, other: str) -> None:
        self.hosts[name].run("ip", "route", "del", "blackhole", f"{self.hosts[other].spec.address}/32")

    def link_down(self, name: str) -> None:
        """Pull the host's network cable."""
        self._ip("link", "set", self._cable(name), "down")

    def link_up(self, name: str) -> None:
        """Plug it in again."""
        self._ip("link", "set", self._cable(name), "up")

    def limit_rate(self, name: str, megabits_per_s: float) -> None:
        """Bound what reaches this host, and what it sends, each in megabits a second; 0 = no bound."""
        for device, run in ((self._cable(name), self._inside_run), ("host0", self.hosts[name].run)):
            run("tc", "qdisc", "del", "dev", device, "root", check=False)
            if megabits_per_s:
                limit = f"rate {megabits_per_s:g}mbit burst 256kb latency 200ms"
                run("tc", "qdisc", "add", "dev", device, "root", "tbf", *limit.split())

    def _cable(self, name: str) -> str:
        return f"vb-{self._machine(name)}"[:15]

    def _ip(self, *words: str) -> str:
        return self._inside_run("ip", *words)

    # ---------------------------------------------------------------- namespaces and hosts

    def _machine(self, name: str) -> str:
        return f"scv-{name}"

    def _inside_argv(self) -> list[str]:
        return ["nsenter", "-t", str(self._inside), "-m", "-n", "-p", "--"]

    def _inside_run(self, *argv: str, check: bool = True) -> str:
        done = subprocess.run(
            [*self._inside_argv(), *argv], capture_output=True, text=True, timeout=60, check=False
        )
        if check and done.returncode:
            raise ClusterUnavailable(f"{' '.join(argv)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def _open_namespaces(self) -> None:
        apart = "unshare --mount --net --pid --fork --kill-child --mount-proc --propagation private sleep infinity"
        self._owner = subprocess.Popen(
            apart.split(),
            stdin=subprocess.DEVNULL,
            preexec_fn=die_with_parent,  # one system call; no lock of ours is taken in it
        )
        owner = self._owner
        wait_for("the namespaces are there", lambda: owner.poll() is not None or _children(owner.pid), 10)
        if owner.poll() is not None:
            raise ClusterUnavailable(
                "unshare failed: this machine allows no namespaces of its own",
                "run as root, with CAP_SYS_ADMIN",
            )
        self._inside = _children(owner.pid)[0]
        wait_for("they are apart", lambda: os.readlink(f"/proc/{self._inside}/exe").endswith("sleep"), 10)
        # nspawn keeps notes there, which are nothing to this machine.
        self._inside_run("mkdir", "-p", "/run/systemd")
        self._inside_run("mount", "-t", "tmpfs", "tmpfs", "/run/systemd")
        self._ip("link", "set", "lo", "up")
        self._ip("link", "add", BRIDGE, "type", "bridge")
        self._ip("addr", "add", f"{NET}.1/24", "dev", BRIDGE)
        self._ip("link", "set", BRIDGE, "up")

    def _write_configuration(self) -> None:
        made = self.folder
        made.mkdir(parents=True, exist_ok=True)
        self.shared.mkdir(exist_ok=True)
        self.shared.chmod(0o1777)
        (made / "slurm.conf").write_text(slurm_conf(self.site))
        (made / "gres.conf").write_text(f"Name=gpu Type=h100 File=/dev/scvgpu[0-{GPUS - 1}]\n")
        (made / "cgroup.conf").write_text(cgroup_conf(self._slurm_release()))
        (made / "gpus.conf").write_text("".join(f"L /dev/scvgpu{i} - - - - /dev/null\n" for i in range(GPUS)))
        (made / "hosts").write_text(hosts_file(self.site))
        key = made / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        os.chown(key, *self._ids("munge"))
        password = secrets.token_hex(16)
        database = made / "slurmdbd.conf"
        database.write_text(_SLURMDBD_CONF.format(host=self._database(), password=password))
        database.chmod(0o600)
        os.chown(database, *self._ids("slurm"))
        self._password = password

    def _database(self) -> str:
        """The host of slurmdbd; "" = none."""
        return next((spec.name for spec in self.site if "slurmdbd" in spec.units), "")

    def _slurm_release(self) -> str:
        """Such as 24.11.5, of the image."""
        argv = ["chroot", str(self.base), "slurmd", "-V"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise ClusterUnavailable(
                f"the root file system {self.base} has no slurmd: {done.stderr.strip()}",
                "make it anew: scripts/site-sandbox --remake",
            )
        return done.stdout.split()[-1]

    def _ids(self, user: str) -> tuple[int, int]:
        """User and group id of an account of the image."""
        for line in (self.base / "etc/passwd").read_text().splitlines():
            name, _, uid, gid, *_ = line.split(":")
            if name == user:
                return int(uid), int(gid)
        raise ClusterUnavailable(
            f"the root file system {self.base} has no user {user}",
            "make it anew: scripts/site-sandbox --remake",
        )

    def _boot(self, spec: HostSpec) -> BootedHost:
        own = self.folder / spec.name
        own.mkdir(exist_ok=True)
        (own / "host0.network").write_text(
            f"[Match]\nName=host0\n[Network]\nAddress={spec.address}/24\nLinkLocalAddressing=no\n"
        )
        (own / "hostname").write_text(f"{spec.name}\n")  # the image's own would win over --hostname
        binds = {
            own / "host0.network": "/etc/systemd/network/10-host0.network",
            own / "hostname": "/etc/hostname",
            self.folder / "hosts": "/etc/hosts",
            self.folder / "slurm.conf": "/etc/slurm/slurm.conf",
            self.folder / "gres.conf": "/etc/slurm/gres.conf",
            self.folder / "cgroup.conf": "/etc/slurm/cgroup.conf",
            self.folder / "munge.key": "/etc/munge/munge.key",
            self.folder / "gpus.conf": "/etc/tmpfiles.d/scvgpus.conf",
        }
        if "slurmdbd" in spec.units:
            binds[self.folder / "slurmdbd.conf"] = "/etc/slurm/slurmdbd.conf"
        # Slurm's daemons are started in their order, once what they need is there.
        masked = [unit for unit in _UNITS if unit not in spec.units]
        argv = [
            "systemd-nspawn",
            "-q",
            "-b",
            "-D",
            str(self.base),
            "--volatile=overlay",
            f"--hostname={spec.name}",
        ]
        argv += [
            f"--machine={self._machine(spec.name)}",
            "--register=no",
            "--keep-unit",
            f"--network-bridge={BRIDGE}",
        ]
        argv += [
            f"--bind={self.shared}:/shared",
            *(f"--bind-ro={source}:{target}" for source, target in binds.items()),
        ]
        argv += [f"--bind-ro=/dev/null:/etc/systemd/system/{unit}.service" for unit in masked]
        console = (own / "console").open("wb")
        process = subprocess.Popen(
            [*self._inside_argv(), *argv],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        console.close()
        return BootedHost(spec, process, self._inside)

    # ---------------------------------------------------------------- Slurm

    def _start_accounting(self) -> None:
        host = self.hosts[self._database()]
        host.run("systemctl", "start", "mariadb", timeout_s=BOOT_S)
        wait_for("MariaDB answers", lambda: "1" in host.run("mariadb", "-e", "SELECT 1", check=False), BOOT_S)
        statements = (
            "CREATE DATABASE slurm_acct_db",
            f"CREATE USER 'slurm'@'localhost' IDENTIFIED BY '{self._password}'",
            "GRANT ALL ON slurm_acct_db.* TO 'slurm'@'localhost'",
        )
        host.run("mariadb", text=";\n".join(statements) + ";\n")
        host.run("systemctl", "restart", "slurmdbd")
        wait_for(
            "slurmdbd answers",
            lambda: "Cluster" in host.run("sacctmgr", "show", "cluster", check=False),
            BOOT_S,
        )
        host.run("sacctmgr", "-i", "add", "cluster", "site", check=False)
        for account, users in (("scavenger", ("scavenger",)), ("research", ("u1", "u2"))):
            host.run(
                "sacctmgr", "-i", "add", "account", account, f"Description={account}", "Organization=site"
            )
            for user in (*users, *(() if account == "scavenger" else ("scavenger", "root"))):
                host.run("sacctmgr", "-i", "add", "user", user, f"Account={account}")

    def _start_slurm(self) -> None:
        controller = self.hosts["ctl"]
        controller.run("systemctl", "restart", "slurmctld")
        for host in self.hosts.values():
            if "slurmd" in host.spec.units:
                host.run("systemctl", "restart", "slurmd")
        nodes = sum("slurmd" in spec.units for spec in self.site)

        def are_idle() -> bool:
            return controller.run("sinfo", "-h", "-N", "-o", "%N %T", check=False).count(" idle") >= nodes

        wait_for(f"{nodes} nodes are idle", are_idle, BOOT_S)


def _has_booted(host: BootedHost) -> bool:
    if not host.alive:
        raise ClusterUnavailable(
            f"host {host.name} ended as it booted", "see its console in the site's folder"
        )
    try:
        said = host.run("systemctl", "is-system-running", check=False, timeout_s=20.0)
        addresses = host.run("ip", "-br", "addr", check=False, timeout_s=20.0)
    except (ClusterUnavailable, subprocess.TimeoutExpired):
        return False
    return said.strip() in ("running", "degraded") and host.spec.address in addresses


def main() -> None:
    """Boot the site over the root file system that is named first, and stop it when the input ends or a signal comes."""
    base = Path(sys.argv[1])
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(tempfile.mkdtemp(prefix="scv-site-"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        with SiteSandbox(base, folder) as site:
            told = {
                "folder": str(folder),
                "shared": str(site.shared),
                "hosts": {
                    name: {"address": host.spec.address, "pid": host.init_pid()}
                    for name, host in site.hosts.items()
                },
                "enter": "nsenter -a -t PID",
            }
            print(json.dumps(told), flush=True)
            sys.stdin.read()
    except KeyboardInterrupt:
        pass
    finally:
        if len(sys.argv) <= 2:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
