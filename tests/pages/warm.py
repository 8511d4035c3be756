"""`scavenger` without its start: a process that has loaded the program forks for each command that a page has.

    bash -> bin/scavenger (`client`) --arguments, folder, environment, descriptors--> `serve` -> fork -> scavenger.cli.main

A command's start is a second of CPU time, a hundred of them are too many for the gate. What runs is the program itself, with its own
arguments, in a process of its own that ends when its client does. Owns nothing else.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.reserved import die_with_parent

#: Loaded by their commands when they run.
LOADED = (
    "scavenger.cli.main",
    "scavenger.daemon",
    "scavenger.daemon.check_config",
    "scavenger.doctor",
    "scavenger.ledger.read.reports",
    "scavenger.ledger.read.tokens",
    "scavenger.ledger.maintain",
    "scavenger.top.feed",
    "scavenger.web.export",
    "scavenger.simulate",
)
CLIENT = """#!{python} -IS
import array, json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as there:
    there.connect({path!r})
    signal.signal(signal.SIGTERM, lambda *_: there.shutdown(socket.SHUT_WR))
    asked = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    there.sendmsg([len(asked).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
    there.sendall(asked)
    said = there.recv(1)
sys.exit(said[0] if said else 70)
"""


@contextmanager
def warmed(path: Path, program: Path) -> Iterator[None]:
    """Serve at the socket `path`; `program` becomes the command."""
    program.write_text(CLIENT.format(python=sys.executable, path=str(path)))
    program.chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.pages.warm", str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        assert server.stdout.readline() == b"ready\n"
        yield
    finally:
        server.stdin.close()
        server.wait(30)
        server.stdout.close()


def _serve(path: str) -> None:
    for name in LOADED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(16)
        os.write(1, b"ready\n")
        parent = os.getppid()
        listening.settimeout(1.0)
        while os.getppid() == parent and not _over():
            with contextlib.suppress(TimeoutError):
                there, _ = listening.accept()
                if os.fork() == 0:
                    listening.close()
                    _handle(there)
                there.close()
    _end_daemon(Path(path).parent)


def _end_daemon(root: Path) -> None:
    """The daemon that the page's `systemctl` started: it is nobody's child, and the tests may have been killed."""
    with contextlib.suppress(OSError, ValueError):
        pid = int((root / "daemon.pid").read_text())
        if str(root).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGTERM)


def _over() -> bool:
    import select

    return bool(select.select([0], [], [], 0)[0])


def _handle(there: socket.socket) -> None:
    """One process for the command, whose end this one tells; both end with the client."""
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    there.settimeout(None)
    head, given, _, _ = socket.recv_fds(there, 4, 3)
    asked = b""
    while len(asked) < int.from_bytes(head, "big"):
        asked += there.recv(1 << 16)
    argv, folder, environ = json.loads(asked)
    child = os.fork()
    if child == 0:
        there.close()
        _become(argv, folder, environ, given)

    def watch() -> None:
        with contextlib.suppress(OSError):
            there.recv(1)
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, number)
            threading.Event().wait(30)  # for what it does at its end

    for one in given:
        os.close(one)
    threading.Thread(target=watch, daemon=True).start()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(OSError):
        there.sendall(bytes([code if code >= 0 else 128 - code]))
    os._exit(0)


def _become(argv: list[str], folder: str, environ: dict[str, str], given: list[int]) -> None:
    die_with_parent()
    os.setsid()
    for place, one in enumerate(given):
        os.dup2(one, place)
        os.close(one)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = ["scavenger", *argv]
    sys.modules["__main__"].__package__ = ""  # else it is named after this module
    code = 1
    try:
        sys.modules["scavenger.cli.main"].main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        code = 130
    except BaseException:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1])
