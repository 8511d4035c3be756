"""The subprocess runtime of `verifiers` within a sandbox: what it runs, reads and writes is in a box (`trainer.sandbox`).

    make_runtime(SubprocessConfig())  ->  one box for each runtime: an agent's, or a tool server's of its own
    run, open_process, run_background ->  processes in it
    host_url, expose                  ->  the model's endpoint and tool servers, by loopback ports: all that it reaches
    prepare_uv_script                 ->  outside: a harness's own program and its packages, which no model wrote, need the network

`installed` puts it in the place of the package's own class, which is chosen by the name "subprocess": there is no other door.

Boundary: between the package's contract (`verifiers.v1.runtimes.base.Runtime`) and boxes. Imported by an environment worker alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import sysconfig
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from scavenger.errors import ConfigError
from trainer.episodes import wire
from trainer.sandbox import box as boxes
from trainer.sandbox import plan as plans
from trainer.sandbox.box import Box, BoxEnded, Running
from trainer.sandbox.plan import Limits, Plan

READ = 64 << 10
#: Between asking a process to end and ending it.
TERMINATE_S = 5.0
#: The folder of this package.
ROOT = Path(__file__).resolve().parents[2]
_LOOPBACK = re.compile(r"127\.0\.0\.1|localhost", re.ASCII)


def plan_of(limits: Limits, readable: tuple[str, ...], hidden: tuple[str, ...], home: Path) -> Plan:
    """The box of this interpreter: its own paths are readable, and so are programs that `verifiers` made with uv.

    Of the interpreter's paths those are left out that hold the home or are hidden. Raises `ConfigError` where `readable` names such a one.
    """
    scripts = home / ".cache" / "verifiers" / "runtimes" / "scripts"
    cache = Path(
        os.environ.get("UV_CACHE_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "uv"
    )
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local/share")
    pythons = Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or data / "uv/python")
    for folder in (scripts, cache / "environments-v2", pythons):  # bound before anything is in them
        folder.mkdir(parents=True, exist_ok=True)
    installed_in = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()}
    # Started from a clone, this package lies in a folder with much else, often the run's. A box needs its own program of it.
    mine = installed_in | {path for path in sys.path if path and not _same(path, str(ROOT))}
    mine |= {str(boxes.PROGRAM.parent), str(scripts), str(cache / "environments-v2"), str(pythons)}
    mine.add(str(home / ".local/bin"))
    if held := [path for path in readable if _holds(path, home)]:
        raise ConfigError(
            f"data.sandbox_readable: {held[0]} is a home or holds one, which no box may see",
            "name the folders in it that programs need",
        )
    covered = tuple(sorted({os.path.realpath(path) for path in (*hidden, str(home))}))
    kept = {
        os.path.abspath(path)
        for path in mine
        if os.path.isdir(path) and not _holds(path, home) and os.path.realpath(path) not in covered
    }
    return Plan(limits, tuple(sorted(kept | {os.path.abspath(path) for path in readable})), covered)


def _holds(path: str, home: Path) -> bool:
    """Whether a folder is a home or above one, by whatever name: links and bind mounts are followed."""
    places = [home.resolve(), Path("/home"), Path("/root"), Path("/tmp")]  # a box has a /tmp of its own
    return any(_same(path, str(each)) for place in places for each in (place, *place.parents))


def _same(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


class Boxed:
    """What became of the boxes of agents, by their runtime's name: the rollout's id."""

    def __init__(self) -> None:
        self.ended: dict[str, BoxEnded] = {}

    def of(self, rollouts: list[str]) -> BoxEnded | None:
        """The limit that one of these agents reached; forgets them."""
        found = [self.ended.pop(rollout) for rollout in rollouts if rollout in self.ended]
        return found[0] if found else None


async def checked(plan: Plan) -> str:
    """bubblewrap's program, which makes a box of this plan. Raises `ConfigError`."""
    program = boxes.found()
    box = Box(plan, program)
    await box.start()
    try:
        done = await box.run([sys.executable, "-c", "import verifiers"], {})
        if done.exit_code:
            raise ConfigError(
                "data.sandbox: this interpreter does not work in a box",
                "name what it needs in data.sandbox_readable",
                quoted=done.stderr.decode(errors="replace")[-2000:],
            )
    finally:
        await box.stop()
    return program


def installed(plan: Plan, program: str) -> Boxed:
    """From now on, every subprocess runtime of this process is a box. Raises `ConfigError` where the package chooses another class."""
    from verifiers.v1 import runtimes

    noted = Boxed()
    made = _runtime_class(plan, program, noted)
    vars(runtimes)["SubprocessRuntime"] = made
    if runtimes._runtime_cls(runtimes.SubprocessConfig()) is not made:
        raise ConfigError(
            "data.sandbox: this release of verifiers chooses runtimes otherwise",
            'pip install "verifiers==0.4.0" for data.environment_python',
        )
    return noted


def _runtime_class(plan: Plan, program: str, noted: Boxed) -> type[Any]:
    from verifiers.v1.errors import SandboxError
    from verifiers.v1.runtimes.base import ProgramResult, RuntimeProcess
    from verifiers.v1.runtimes.subprocess import SubprocessRuntime

    class Process(RuntimeProcess):  # type: ignore[misc]
        """A live process of a box, by its streams."""

        def __init__(self, running: Running) -> None:
            self._running = running
            self._stdin: asyncio.StreamWriter | None = None
            self.stdout, self.stderr = _stream(running.stdout_fd), _stream(running.stderr_fd)

        async def write(self, data: bytes) -> None:
            if self._stdin is None:
                loop = asyncio.get_running_loop()
                transport, protocol = await loop.connect_write_pipe(
                    asyncio.streams.FlowControlMixin, os.fdopen(self._running.stdin_fd, "wb", 0)
                )
                self._stdin = asyncio.StreamWriter(transport, protocol, None, loop)
            self._stdin.write(data)
            await self._stdin.drain()

        async def wait(self) -> int:
            code: int = await _said(self._running.wait())
            return code

        async def poll(self) -> int | None:
            return self._running.exit_code

        async def terminate(self) -> None:
            with contextlib.suppress(BoxEnded, OSError):
                await self._running.signal(signal.SIGTERM)

        async def kill(self) -> None:
            with contextlib.suppress(BoxEnded, OSError):
                await self._running.signal(signal.SIGKILL)

    async def _said(awaited: Any) -> Any:
        """The package's error for what happened in the box."""
        try:
            return await awaited
        except (BoxEnded, OSError) as error:
            raise SandboxError(str(error)) from error

    class BoxRuntime(SubprocessRuntime):  # type: ignore[misc]
        """The contract's runtime, in a box."""

        def __init__(self, config: Any, name: str | None = None) -> None:
            super().__init__(config, name)
            # What is not an agent's, such as a tool server of the whole run, has no end but its owner's.
            mine = (
                plan
                if name is not None
                else replace(plan, limits=replace(plan.limits, cpu_s=0.0, seconds=0.0))
            )
            self._box = Box(mine, program)
            self._outside = SubprocessRuntime(config, f"{self.name}-outside")
            self._ports: set[int] = set()

        async def start(self) -> None:
            await self._box.start()
            self.info.id = plans.WORK

        async def _ready(self) -> Box:
            for port in sorted(self._ports):
                await self._box.let_reach(port)
            self._ports.clear()
            return self._box

        async def run(self, argv: list[str], env: dict[str, str]) -> Any:
            async def ran() -> Any:
                done = await (await self._ready()).run(argv, self.process_env(env))
                out, err = (data.decode(errors="replace") for data in (done.stdout, done.stderr))
                return ProgramResult(exit_code=done.exit_code, stdout=out, stderr=err)

            return await self._noted(ran())

        async def open_process(self, argv: list[str], env: dict[str, str]) -> Any:
            async def opened() -> Any:
                return Process(await (await self._ready()).start_process(argv, self.process_env(env)))

            return await self._noted(opened())

        async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
            async def begun() -> None:
                box = await self._ready()
                empty = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                written = await box.opened(log, "write")
                try:
                    await box.start_process(argv, self.process_env(env), stdin=empty, output=written)
                finally:
                    os.close(empty)
                    os.close(written)

            await self._noted(begun())

        async def prepare_uv_script(
            self, script: str | bytes, env: dict[str, str] | None = None, *, activate: bool = True
        ) -> list[str]:
            if self._outside.workdir is None:
                await self._outside.start()
            prepared: list[str] = await self._outside.prepare_uv_script(script, env, activate=activate)
            return prepared

        async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
            data: bytes = await self._noted(self._box.read(path, max_bytes))
            return data

        async def write(self, path: str, data: bytes) -> None:
            await self._noted(self._box.write(path, data))

        async def _noted(self, awaited: Any) -> Any:
            try:
                return await _said(awaited)
            except SandboxError as error:
                if isinstance(error.__cause__, BoxEnded) and error.__cause__.limit:
                    noted.ended[self.name] = error.__cause__
                raise

        def host_url(self, url: str) -> str:
            """A service of the host's loopback is reached under its own port, once a process starts."""
            parts = urlsplit(url)
            if parts.port and _LOOPBACK.fullmatch(parts.hostname or ""):
                self._ports.add(parts.port)
            return url

        async def expose(self, port: int) -> str:
            return f"http://127.0.0.1:{await _said(self._box.reach(port))}"

        async def teardown(self) -> None:
            await self._box.stop()
            await self._outside.teardown()

        def cleanup(self) -> None:
            self._box.kill()
            self._outside.cleanup()

    return BoxRuntime


async def _stream(fd: int) -> AsyncIterator[bytes]:
    """What comes of a pipe. Its reader takes as much as it likes at its own pace."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0)
    )
    try:
        while data := await reader.read(READ):
            yield data
    finally:
        transport.close()


def limits_of(told: wire.Sandbox, seconds: float) -> Limits:
    """Of an agent's box that ends with its episode, `seconds` long at most."""
    return Limits(told.memory_mb, told.processes, told.disk_mb, told.output_mb, told.cpu_s, seconds)
