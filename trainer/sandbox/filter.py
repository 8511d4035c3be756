"""The system calls that a box refuses, as a classic BPF program for seccomp(2). Pure.

    another architecture's call        -> the process is killed: its numbers mean other calls
    one of `REFUSED`                   -> ENOSYS, so that programs do without, as on an older kernel
    one of `UNSUPPORTED`               -> EOPNOTSUPP, as of a file system that has no such thing
    memory that is shared and no file  -> EPERM
    a socket of another family         -> EAFNOSUPPORT: the box's network has UNIX and Internet sockets, and tells of its interfaces
    anything else                      -> allowed

Refused is what takes memory that no limit of a box counts (anonymous files, System V memory, queues and semaphores, a process's pages in
a pipe, which stay when it drops them, attributes and access lists of files), and what only widens the kernel's surface: io_uring, BPF,
keys, new mounts. Debuggers work within a box. Pages of shared memory without a file stay when a
process drops them (MADV_DONTNEED), so nothing that is read of processes shows them. AF_VSOCK knows no network of a box's own.

Boundary: numbers of two architectures, from the kernel's tables; installs nothing.
"""

from __future__ import annotations

import struct

#: By architecture: its name for seccomp (AUDIT_ARCH_*), and the refused calls by their numbers there.
REFUSED: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {
            "shmget": 29,
            "semget": 64,
            "msgget": 68,
            "mount": 165,
            "add_key": 248,
            "request_key": 249,
            "keyctl": 250,
            "memfd_create": 319,
            "vmsplice": 278,
            "bpf": 321,
            "perf_event_open": 298,
            "userfaultfd": 323,
            "io_uring_setup": 425,
            "io_uring_enter": 426,
            "io_uring_register": 427,
            "open_tree": 428,
            "move_mount": 429,
            "fsopen": 430,
            "memfd_secret": 447,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "msgget": 186,
            "semget": 190,
            "shmget": 194,
            "mount": 40,
            "add_key": 217,
            "request_key": 218,
            "keyctl": 219,
            "memfd_create": 279,
            "vmsplice": 75,
            "bpf": 280,
            "perf_event_open": 241,
            "userfaultfd": 282,
            "io_uring_setup": 425,
            "io_uring_enter": 426,
            "io_uring_register": 427,
            "open_tree": 428,
            "move_mount": 429,
            "fsopen": 430,
            "memfd_secret": 447,
        },
    ),
}
#: By architecture: calls that set what a file has beside its bytes.
UNSUPPORTED: dict[str, dict[str, int]] = {
    "x86_64": {"setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "setxattrat": 463},
    "aarch64": {"setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "setxattrat": 463},
}
#: By architecture: calls whose arguments are looked at.
CHECKED_ARGUMENTS: dict[str, dict[str, int]] = {
    "x86_64": {"mmap": 9, "socket": 41, "socketpair": 53},
    "aarch64": {"mmap": 222, "socket": 198, "socketpair": 199},
}
#: x86-64's second table of the same numbers (x32) has this bit.
X32 = 0x40000000
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in struct seccomp_data


def argument(place: int) -> int:
    """The offset of an argument's lower half in struct seccomp_data: both architectures are little-endian."""
    return 16 + 8 * place


#: Of mmap's flags. MAP_SHARED_VALIDATE has the first bit too, MAP_PRIVATE has not.
MAP_SHARED, MAP_ANONYMOUS = 0x01, 0x20
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK, NETLINK_ROUTE = 1, 2, 10, 16, 0
ALLOW, KILL = 0x7FFF0000, 0x80000000
_ERROR = 0x00050000
ENOSYS, EPERM, EAFNOSUPPORT, EOPNOTSUPP = _ERROR | 38, _ERROR | 1, _ERROR | 97, _ERROR | 95
_NEXT = ""


def program(machine: str) -> bytes:
    """`machine`: as `os.uname().machine`. Raises `KeyError` for one without a table."""
    audit, refused = REFUSED[machine]
    checked = CHECKED_ARGUMENTS[machine]
    # (what, number, where to if so, where to if not); a place's name stands alone.
    code: list[str | tuple[int, int, str, str]] = [
        (_LOAD, _ARCHITECTURE, _NEXT, _NEXT),
        (_EQUAL, audit, _NEXT, "kill"),
        (_LOAD, _NUMBER, _NEXT, _NEXT),
        (_AT_LEAST, X32, "unknown", _NEXT),
        *((_EQUAL, number, "unknown", _NEXT) for number in sorted(refused.values())),
        *((_EQUAL, number, "unsupported", _NEXT) for number in sorted(UNSUPPORTED[machine].values())),
        (_EQUAL, checked["mmap"], "memory", _NEXT),
        (_EQUAL, checked["socket"], "socket", _NEXT),
        (_EQUAL, checked["socketpair"], "socket", "allow"),
        "memory",
        (_LOAD, argument(3), _NEXT, _NEXT),
        (_AND, MAP_SHARED | MAP_ANONYMOUS, _NEXT, _NEXT),
        (_EQUAL, MAP_SHARED | MAP_ANONYMOUS, "denied", "allow"),
        "socket",
        (_LOAD, argument(0), _NEXT, _NEXT),
        *((_EQUAL, family, "allow", _NEXT) for family in (AF_UNIX, AF_INET, AF_INET6)),
        (_EQUAL, AF_NETLINK, _NEXT, "family"),
        (_LOAD, argument(2), _NEXT, _NEXT),
        (_EQUAL, NETLINK_ROUTE, "allow", "family"),
    ]
    for place, answer in (
        ("allow", ALLOW),
        ("kill", KILL),
        ("unknown", ENOSYS),
        ("unsupported", EOPNOTSUPP),
        ("denied", EPERM),
        ("family", EAFNOSUPPORT),
    ):
        code += [place, (_RETURN, answer, _NEXT, _NEXT)]
    return _assembled(code)


def _assembled(code: list[str | tuple[int, int, str, str]]) -> bytes:
    """As the kernel reads it: a jump is the count of instructions that it passes over."""
    places: dict[str, int] = {}
    lines: list[tuple[int, int, str, str]] = []
    for one in code:
        if isinstance(one, str):
            places[one] = len(lines)
        else:
            lines.append(one)
    return b"".join(
        struct.pack("=HBBI", what, *(places[to] - at - 1 if to != _NEXT else 0 for to in (yes, no)), number)
        for at, (what, number, yes, no) in enumerate(lines)
    )
