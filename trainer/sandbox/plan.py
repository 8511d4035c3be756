"""What a box may do to its host, and the arguments of bubblewrap that hold it to that. Pure.

    root        read-only: the system's programs and libraries, the interpreter, and what the run names
    writable    /tmp (the work folder and HOME are in it) and /dev/shm: in memory, of bounded size, gone with the box
    hidden      everything else: homes, keys, the run's own folders
    network     none but a loopback of its own
    processes   of its own; they end with the box, and the box with its owner

Limits of one process are resource limits, those of all together are watched by the box's process 1 (`inside.py`): bubblewrap makes no
control groups, which batch jobs can rarely make either.

Boundary: paths and numbers in, arguments out; what exists is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from scavenger.errors import ConfigError

#: The first release with `--size` and `--disable-userns`.
OLDEST = (0, 8, 0)
#: Of the system: programs, libraries, and what programs read of /etc. No account but the box's own, no secrets: /etc/ssl and /etc/pki have
#: private keys beside certificates, which a box of root's could read.
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
ETC = [
    "alternatives",
    "bash.bashrc",
    "ca-certificates",
    "crypto-policies",
    "inputrc",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.conf",
    "localtime",
    "mime.types",
    "pki/ca-trust",
    "pki/tls/cert.pem",
    "pki/tls/certs",
    "pki/tls/openssl.cnf",
    "profile",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
]
HOME, WORK, TMP, SHARED = "/tmp/home", "/tmp/work", "/tmp", "/dev/shm"
#: Who a box's processes are, to themselves.
UID = GID = 1000
#: Variables that a box has of its owner's; programs that it starts get others from whoever starts them.
PASSED = (
    "HF_DATASETS_OFFLINE",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "LANG",
    "LC_ALL",
    "PATH",
    "PYTHONPATH",
    "TZ",
    "UV_CACHE_DIR",
    "UV_PYTHON_INSTALL_DIR",
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one box. `cpu_s`: CPU seconds of all its processes; `seconds`: from its start; 0 = no bound. `output_mb`: of one command."""

    memory_mb: int = 2048
    processes: int = 128
    disk_mb: int = 512
    output_mb: int = 16
    cpu_s: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """`readable`: paths that are bound read-only, under their names. `hidden`: folders that are empty in the box, though within those."""

    limits: Limits
    readable: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()


def check_version(said: str) -> None:
    """`said`: of `bwrap --version`. Raises `ConfigError` for a release that cannot bound a box."""
    words = said.split()
    try:
        found = tuple(int(part) for part in words[-1].split("."))
    except (IndexError, ValueError):
        found = ()
    if found < OLDEST:
        raise ConfigError(
            f"bubblewrap {words[-1] if words else ''} cannot bound what a box writes".replace("  ", " "),
            'install bubblewrap 0.8 or later, or set data.sandbox = "none"',
        )


def mounts(plan: Plan, real: Mapping[str, str]) -> list[tuple[str, ...]]:
    """(option, path) or ("--symlink", target, path), parents before what lies in them. `real`: of the paths that exist, without links.

    Folders are bound where they really are, and a path that leads there by links becomes a link: so a hidden folder, which is covered where
    it really is, has no second name. Raises `ConfigError` where a path is to be read and hidden at once.
    """
    named = [path for path in (*SYSTEM, *(f"/etc/{name}" for name in ETC), *plan.readable) if path in real]
    hidden = {real.get(path, path) for path in plan.hidden}
    if both := sorted(path for path in plan.readable if real.get(path, path) in hidden):
        raise ConfigError(
            f"data.sandbox_readable: {both[0]} is a folder of the run or of the daemon, which no box may see",
            "name a folder beside it",
        )
    bound = {real[path] for path in named}
    covered = {real[path] for path in plan.hidden if path in real and _within(real[path], bound)}
    found: list[tuple[str, ...]] = [("--ro-bind", path) for path in bound]
    found += [("--tmpfs", path) for path in covered]
    made: set[str] = set()
    for path in sorted(set(named), key=_depth):
        above = next((str(each) for each in PurePosixPath(path).parents if str(each) in bound | covered), "")
        # Within a folder that is bound the link is there already; behind another link, too.
        if path != real[path] and (not above or above in covered) and not _within(path, made):
            found.append(("--symlink", real[path], path))
            made.add(path)
    return sorted(found, key=lambda one: _depth(one[-1]))


def _depth(path: str) -> tuple[int, str]:
    return len(PurePosixPath(path).parts), path


def candidates(plan: Plan) -> list[str]:
    """Paths of which `mounts` wants to know whether they exist, and where they really are."""
    return [*SYSTEM, *(f"/etc/{name}" for name in ETC), *plan.readable, *plan.hidden]


def _within(path: str, folders: Iterable[str]) -> bool:
    parents = {str(parent) for parent in PurePosixPath(path).parents}
    return any(folder in parents for folder in folders)


def arguments(
    plan: Plan,
    real: Mapping[str, str],
    program: Sequence[str],
    *,
    filter_fd: int,
    passwd_fd: int,
    group_fd: int,
) -> list[str]:
    """After `bwrap`. `real`: as of `mounts`. `program` is process 1. The descriptors: seccomp program, account, group."""
    disk, shared = plan.limits.disk_mb << 20, min(64, plan.limits.disk_mb) << 20
    argv = [
        "--unshare-all",
        "--unshare-user",
        "--disable-userns",
        "--die-with-parent",
        "--new-session",
        "--as-pid-1",
    ]
    argv += ["--cap-drop", "ALL", "--uid", str(UID), "--gid", str(GID), "--hostname", "box", "--clearenv"]
    argv += ["--proc", "/proc", "--dev", "/dev", "--size", str(shared), "--perms", "1777", "--tmpfs", SHARED]
    # bubblewrap covers what it may write itself; a file of /proc/sys is also writable to whoever is root outside, whatever the box says.
    argv += ["--ro-bind", "/proc/sys", "/proc/sys"]
    # Of /dev/zero there are shared mappings, which are memory without a file that no limit counts. /dev/full reads as it, and has none.
    argv += ["--dev-bind", "/dev/full", "/dev/zero", "--remount-ro", "/dev"]
    argv += ["--size", str(disk), "--perms", "1777", "--tmpfs", TMP, "--dir", HOME, "--dir", WORK]
    empty = []
    for option, *paths in mounts(plan, real):
        if option == "--ro-bind":
            argv += [option, *paths, *paths]
        elif option == "--symlink":
            argv += [option, *paths]
        else:
            argv += ["--size", "65536", option, *paths]
            empty += paths
    for path in empty:  # once what lies in them has its place
        argv += ["--remount-ro", path]
    argv += ["--ro-bind-data", str(passwd_fd), "/etc/passwd", "--ro-bind-data", str(group_fd), "/etc/group"]
    argv += ["--symlink", TMP, "/var/tmp", "--remount-ro", "/", "--chdir", WORK]
    return [*argv, "--seccomp", str(filter_fd), "--", *program]


def account() -> bytes:
    """/etc/passwd of a box."""
    return f"agent:x:{UID}:{GID}::{HOME}:/bin/sh\n".encode()


def group() -> bytes:
    """/etc/group of a box."""
    return f"agent:x:{GID}:\n".encode()


def environment(owner: Mapping[str, str]) -> dict[str, str]:
    """What every process of a box has, of its owner's `owner`."""
    kept = {name: owner[name] for name in PASSED if name in owner}
    return {
        "PATH": "/usr/bin:/bin",
        **kept,
        "HOME": HOME,
        "TMPDIR": TMP,
        "USER": "agent",
        "LOGNAME": "agent",
        "TERM": "dumb",
    }
