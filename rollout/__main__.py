"""`python -m rollout --state-dir DIR --key FILE --kind harvested|reserved --run NAME`: one worker process.

Owns argv, the environment and the exit code (table in `scavenger.protocol.worker.events`). The job script sets SCAVENGER_JOB_ID,
SCAVENGER_RESTART_COUNT, SCAVENGER_NODE and SCAVENGER_GPUS; the training job's launcher sets SCAVENGER_SLOT, a reserved engine's place in
its job, and SCAVENGER_SESSION. Nothing secret is in argv or the environment.
"""

from __future__ import annotations

import os
import signal
import time

STARTED_AT = time.monotonic()


def leave_at_notice() -> None:
    """While there is nothing to say goodbye to, SIGTERM means: leave now, and come back."""
    signal.signal(signal.SIGTERM, lambda _number, _frame: os._exit(75))


leave_at_notice()

import argparse  # noqa: E402  after the handler, as all that follows: imports take seconds, and a notice may come within them
import asyncio  # noqa: E402
import secrets  # noqa: E402
import socket  # noqa: E402
import sys  # noqa: E402
from collections.abc import Coroutine, Mapping, Sequence  # noqa: E402
from dataclasses import replace  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import NoReturn, TypeVar  # noqa: E402

import structlog  # noqa: E402

from rollout import hands  # noqa: E402
from rollout.headless import HeadlessNode, HeadlessOptions  # noqa: E402
from rollout.nodes import of_environment  # noqa: E402
from rollout.worker import Options  # noqa: E402
from scavenger import __version__  # noqa: E402
from scavenger.errors import ConfigError, ScavengerError  # noqa: E402
from scavenger.protocol import keys  # noqa: E402
from scavenger.protocol.keys import KeyPair, read_keypair  # noqa: E402
from scavenger.protocol.worker.events import (  # noqa: E402
    EXIT_CANNOT_START,
    EXIT_ENGINE_FAILED,
    EXIT_REFUSED,
    WorkerIdentity,
)

T = TypeVar("T")


class AnotherRelease(ConfigError):
    """The job was submitted for another release than this one."""


class _Parser(argparse.ArgumentParser):
    """Unknown arguments come from a daemon of another release. The worker exits as refused, which counts against no node; 2 would."""

    def error(self, message: str) -> NoReturn:
        remedy = (
            f"harvest.python names the Python of the daemon's release; {sys.executable} has {__version__}"
        )
        self.exit(EXIT_REFUSED, f"rollout: {message}\n  remedy: {remedy}\n")


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="python -m rollout", description="One preemptible rollout worker.")
    parser.add_argument(
        "--state-dir", type=Path, required=True, help="where the daemon's rendezvous file lies"
    )
    parser.add_argument("--key", type=Path, required=True, help="this worker's CURVE key pair, mode 0600")
    parser.add_argument("--kind", choices=("harvested", "reserved"), required=True)
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--engine", default="reference", help="engine to import ahead of the daemon's answer")
    parser.add_argument(
        "--slot", help="which reserved engine of its training job this is (default: SCAVENGER_SLOT)"
    )
    parser.add_argument(
        "--code",
        default="",
        help="the release that this job was submitted for: any other refuses (default: none does)",
    )
    parser.add_argument(
        "--pull-mb-per-s",
        type=float,
        default=0.0,
        help="what this user's engines on a node may fetch together; 0: any",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        default=1,
        help="nodes of this job that are one engine; srun starts one process on each",
    )
    parser.add_argument(
        "--guest",
        action="store_true",
        help="bounded by the process that started it, which writes how many samples it may hold to its standard input",
    )
    parser.add_argument(
        "--memory-share",
        type=float,
        default=0.0,
        help="of its GPU's memory, of a guest; 0: what the run says",
    )
    arguments = parser.parse_args(argv)
    if arguments.nodes > 1 and arguments.kind != "harvested":
        parser.error("--nodes is for harvested engines: a reserved one lies on one node")
    if arguments.guest and (arguments.kind != "harvested" or arguments.nodes > 1):
        parser.error("--guest is for harvested engines on one node")
    if not 0 <= arguments.memory_share <= 1:
        parser.error("--memory-share lies between 0 and 1")
    if arguments.slot and arguments.kind != "reserved":
        parser.error("--slot is for reserved engines: a harvested one is known by its job")
    return arguments


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"{name}={text!r} is not a number", "the job script sets it")
    return int(text)


def identity(arguments: argparse.Namespace, environment: Mapping[str, str]) -> WorkerIdentity:
    """Who this process is. Raises `ConfigError`."""
    reserved = arguments.kind == "reserved"
    slot = arguments.slot if arguments.slot is not None else environment.get("SCAVENGER_SLOT", "")
    return WorkerIdentity(
        kind=arguments.kind,
        run=arguments.run,
        session=_session(environment) if reserved else secrets.token_hex(16),
        incarnation=_number(environment, "SCAVENGER_RESTART_COUNT", 0),
        job_id=_number(environment, "SCAVENGER_JOB_ID", 0),
        node=environment.get("SCAVENGER_NODE") or socket.gethostname(),
        gpus=_number(environment, "SCAVENGER_GPUS", 1) * arguments.nodes,
        engine=arguments.engine,
        code_version=__version__,
        pid=os.getpid(),
        jitter=secrets.randbelow(1 << 20) / (1 << 20),
        # Harvested jobs may inherit the variable from the submitting process: only a reserved engine has a slot.
        slot=slot if reserved else "",
        guest=arguments.guest,
    )


def _of_key(me: WorkerIdentity, keypair: KeyPair) -> WorkerIdentity:
    """A harvested job works for the run of its key: its script names the one that it was submitted for, and it may have changed hands."""
    return replace(me, run=keypair.run) if me.kind == "harvested" and keypair.run else me


def _session(environment: Mapping[str, str]) -> str:
    """The launcher knows the session of each process that it starts. Raises `ConfigError`."""
    session = environment.get("SCAVENGER_SESSION") or secrets.token_hex(16)
    if len(session) != 32 or set(session) - set("0123456789abcdef"):
        raise ConfigError(
            f"SCAVENGER_SESSION={session!r} is no session", "the training job's launcher sets it"
        )
    return session


def _configure_log() -> None:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"]),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _run(work: Coroutine[object, object, T]) -> T:
    # Not asyncio.run: that waits for threads, and the import or the forward pass in them may take longer than we have.
    return asyncio.new_event_loop().run_until_complete(work)


def check_code(wanted: str) -> None:
    """Raises `AnotherRelease` unless this is the release that the job was submitted for.

    Another one may have been installed while the job waited, and no run may be generated by two releases unnoticed.
    """
    if wanted and wanted != __version__:
        raise AnotherRelease(
            f"this job was submitted for release {wanted}, and {sys.executable} has release {__version__}",
            "restart the daemon after an upgrade; harvest.python names the Python of one release. The daemon submits a fresh job",
        )


def main(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run one worker; returns its exit code."""
    arguments = _arguments(argv)
    _configure_log()
    try:
        check_code(arguments.code)
        here = of_environment(arguments.nodes, environment) if arguments.nodes > 1 else None
        keypair = read_keypair(arguments.key)
        if here is not None and here.place > 0:
            node = environment.get("SLURMD_NODENAME") or socket.gethostname()
            return _run(
                HeadlessNode(HeadlessOptions(here, keypair, node, arguments.pull_mb_per_s * 1e6)).run()
            )
        options = Options(
            state_dir=arguments.state_dir,
            keypair=keypair,
            identity=_of_key(identity(arguments, environment), keypair),
            pull_nbytes_per_s=arguments.pull_mb_per_s * 1e6,
            started_at=STARTED_AT,
            here=here,
            memory_share=arguments.memory_share,
            lent_key=keys.lent_key_path(arguments.key) if arguments.kind == "harvested" else None,
        )
        end = _run(hands.work(options, arguments.key, between=leave_at_notice))
    except ScavengerError as error:
        print(f"rollout: {error}", file=sys.stderr)
        # Only another release is no node's fault. A key that cannot be read may lie on a file system that only this node has not mounted.
        return EXIT_REFUSED if isinstance(error, AnotherRelease) else EXIT_CANNOT_START
    structlog.get_logger(__name__).info("worker.left", code=end.code, reason=end.reason)
    if end.remedy or end.code == EXIT_ENGINE_FAILED:
        print(f"rollout: {end.reason}" + (f"\n  remedy: {end.remedy}" if end.remedy else ""), file=sys.stderr)
    return end.code


def _exit(code: int) -> NoReturn:
    # The engine's thread may be in a forward pass whose result is not needed: no interpreter shutdown, no join.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _exit(main(sys.argv[1:], os.environ))
