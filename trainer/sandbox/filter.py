"""The system calls that a box refuses, as a classic BPF program for seccomp(2). Pure.

    another architecture's call        -> the process is killed: its numbers mean other calls
    one of `REFUSED`                   -> ENOSYS, so that programs do without, as on an older kernel
    anything else                      -> allowed

Refused is what takes memory that no limit of a box counts (anonymous files, System V memory, queues and semaphores), and what only
widens the kernel's surface: io_uring, BPF, keys, new mounts. Debuggers work within a box.

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
#: x86-64's second table of the same numbers (x32) has this bit.
X32 = 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
ALLOW, KILL, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050000 | 38


def program(machine: str) -> bytes:
    """`machine`: as `os.uname().machine`. Raises `KeyError` for one without a table."""
    audit, refused = REFUSED[machine]
    numbers = sorted(refused.values())
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, len(numbers) + 1, 0, X32),  # to ENOSYS
    ]
    code += [(_EQUAL, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]
    code += [(_RETURN, 0, 0, ALLOW), (_RETURN, 0, 0, ENOSYS)]
    return b"".join(struct.pack("=HBBI", *one) for one in code)
