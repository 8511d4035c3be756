"""Real boxes of bubblewrap: what a program in one can do, and that what it overdoes ends its box and nothing else."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from scavenger.errors import ConfigError
from trainer.sandbox import box as boxes
from trainer.sandbox.box import Box, BoxEnded, Done, found
from trainer.sandbox.plan import Limits, Plan

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(240)]
READABLE = tuple(
    sorted({os.path.realpath(sys.prefix), sys.prefix, sys.base_prefix, str(boxes.PROGRAM.parent)})
)
SMALL = Limits(memory_mb=256, processes=24, disk_mb=8, output_mb=1, cpu_s=60, seconds=200)


@asynccontextmanager
async def a_box(limits: Limits = SMALL, hidden: tuple[str, ...] = (), *more: str) -> AsyncIterator[Box]:
    box = Box(Plan(limits, (*READABLE, *more), hidden), found())
    await box.start()
    try:
        yield box
    finally:
        await box.stop()


def python(text: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", textwrap.dedent(text)]


def shell(text: str) -> list[str]:
    return ["bash", "-c", text]


def done(argv: list[str], limits: Limits = SMALL, hidden: tuple[str, ...] = (), *more: str) -> Done:
    async def ran() -> Done:
        async with a_box(limits, hidden, *more) as box:
            return await box.run(argv, {})

    return asyncio.run(ran())


def test_a_program_runs_with_its_output_its_exit_code_and_its_environment() -> None:
    async def ran() -> list[Done]:
        async with a_box() as box:
            return [
                await box.run(shell("echo out; echo err >&2; echo $A; pwd; exit 3"), {"A": "b"}),
                await box.run(["no-such-program"], {}),
                await box.run(shell("kill -9 $$"), {}),
            ]

    first, missing, killed = asyncio.run(ran())
    assert (first.exit_code, first.stdout, first.stderr) == (3, b"out\nb\n/tmp/work\n", b"err\n")
    assert missing.exit_code == 127
    assert killed.exit_code == -9


def test_a_program_that_ends_before_its_owner_hears_of_its_start_has_ended_and_its_box_has_not() -> None:
    async def ran() -> list[int]:
        async with a_box() as box:
            starting = asyncio.create_task(box.start_process(["sh", "-c", "exit 3"], {}, stdin=0, output=2))
            await asyncio.sleep(0)  # it is asked for
            time.sleep(1.0)  # of a host that is busy elsewhere: start and end are heard at once
            codes = [await (await starting).wait()]
            codes.append((await box.run(["true"], {})).exit_code)
            assert not box._exits, "nothing is kept of programs that ended"
            return codes

    assert asyncio.run(ran()) == [3, 0]


def test_a_box_sees_no_home_no_key_and_writes_nothing_of_the_host(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "open").write_text("open")
    (tmp_path / "code" / "out").mkdir()
    (tmp_path / "code" / "out" / "gateway.json").write_text("admin key")
    secret = tmp_path / "owner.key"
    secret.write_text("secret")
    code = tmp_path / "code"
    said = done(
        shell(
            f"cat {secret}; cat {code}/out/gateway.json; cat /etc/shadow; ls -A ~; cat {code}/open; "
            f"for f in /x /usr/x /etc/x /dev/x {code}/x {code}/out/x; do touch $f; done"
        ),
        SMALL,
        (str(code / "out"),),
        str(code),
    )
    assert said.stdout == b"open", said.stdout
    assert said.stderr.count(b"No such file") == 3
    assert said.stderr.count(b"Read-only file system") == 6
    assert sorted(path.name for path in code.iterdir()) == ["open", "out"]


def test_a_box_has_no_network_but_its_own_loopback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as host:
        port = host.getsockname()[1]
        said = done(
            python(
                f"""
                import socket
                for there in (("127.0.0.1", {port}), ("192.0.2.1", 80)):
                    try:
                        socket.create_connection(there, 5)
                        print("reached")
                    except OSError as error:
                        print(error.strerror)
                print([name for _, name in socket.if_nameindex()])
                """
            )
        )
    assert said.stdout.decode().split("\n")[:3] == ["Connection refused", "Network is unreachable", "['lo']"]


def test_a_program_cannot_end_stop_or_leave_its_box() -> None:
    said = done(
        shell(
            "kill -9 1; kill -STOP 1; unshare -Ur true || echo held; mount -t tmpfs x /tmp 2>/dev/null || echo held; echo on"
        )
    )
    assert said.stdout == b"held\nheld\non\n"


def test_no_secret_of_the_owner_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by environment, arguments, descriptors or other processes' memory; root's box, as root's processes, does not either."""
    monkeypatch.setenv("OPENAI_API_KEY", "hush-hush")
    monkeypatch.setenv("SCAVENGER_KEY", "hush-hush")
    with open(tmp_path / "ledger.sqlite3", "w+b", buffering=0) as ledger:
        ledger.write(b"hush-hush")
        os.set_inheritable(ledger.fileno(), True)
        said = done(
            python(
                """
                import glob, os
                found, tried = [], 0
                names = [*glob.glob("/proc/[0-9]*/environ"), *glob.glob("/proc/[0-9]*/cmdline"), *glob.glob("/proc/[0-9]*/mem")]
                names += [*glob.glob("/proc/*/fd/*"), *glob.glob("/proc/*/cwd/*"), *glob.glob("/proc/*/root/etc/*")]
                for name in [*names, "/etc/shadow", "/etc/gshadow", "/proc/kcore", "/proc/kmsg", "/dev/mem", "/dev/kmsg"]:
                    tried += 1
                    try:
                        with open(os.open(name, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                            found += [name] if b"hush" + b"-hush" in (file.read(1 << 20) or b"") or "shadow" in name else []
                            found += [name] if name in ("/proc/kcore", "/proc/kmsg", "/dev/mem", "/dev/kmsg") else []
                    except OSError:
                        pass
                for place in ("/etc/ssl/private", "/etc/pki/tls/private", "/run", "/var/lib", "/sys", "/boot", "/etc/munge"):
                    found += [place] if os.path.exists(place) else []
                print(found, tried > 5)
                """
            )
        )
    assert said.stdout == b"[] True\n", said


def test_no_file_of_the_kernel_can_be_written() -> None:
    """A box of root's has root's number outside: only mounts keep it from them."""
    said = done(
        python(
            """
            import os
            names = ("sys/kernel/core_pattern", "sys/vm/drop_caches", "sys/net/core/somaxconn", "sysrq-trigger")
            for name in (f"/proc/{name}" for name in names):
                try:
                    os.close(os.open(name, os.O_WRONLY))
                    print(name)
                except OSError:
                    pass
            print(open("/proc/sys/kernel/ostype").read(), end="")
            """
        )
    )
    assert (said.exit_code, said.stdout, said.stderr) == (0, b"Linux\n", b"")


def test_a_program_that_hides_in_a_session_of_its_own_ends_with_its_box() -> None:
    """Forked twice, deaf to signals, its streams closed."""

    async def ran() -> None:
        async with a_box() as box:
            hidden = "trap '' HUP TERM INT; exec sleep 87654"
            await box.run(shell(f'(setsid bash -c "{hidden}" </dev/null >/dev/null 2>&1 &) ; true'), {})
            await until(lambda: any(runs(b"87654", path) for path in Path("/proc").glob("[0-9]*/cmdline")))
        assert not any(runs(b"87654", path) for path in Path("/proc").glob("[0-9]*/cmdline"))

    asyncio.run(ran())


def test_a_stopped_command_hangs_no_longer_than_its_box_may() -> None:
    async def ran() -> float:
        began = time.monotonic()
        async with a_box(Limits(256, 24, 8, 1, 0, 2)) as box:
            with pytest.raises(BoxEnded) as over:
                await box.run(shell("kill -STOP $$"), {})
            assert over.value.limit == "seconds"
        return time.monotonic() - began

    assert asyncio.run(ran()) < 60


def test_a_box_that_opens_many_connections_takes_none_of_its_owner_s_others() -> None:
    """Each one costs the owner two descriptors: a flood is cut off, and other boxes go on."""

    async def ran() -> tuple[bytes, bytes, int]:
        most, held = 0, []  # type: ignore[var-annotated]

        async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal most
            held.append(writer)
            # The server is this process too: its own ends, of cut connections until it sees that, are not the owner's.
            own = sum(one.get_extra_info("socket").fileno() >= 0 for one in held)
            most = max(most, len(os.listdir("/proc/self/fd")) - own)
            writer.write((await reader.readline()).upper())
            writer.close()

        async with a_box() as bad, a_box() as beside:
            server = await asyncio.start_server(hold, "127.0.0.1", 0, backlog=1000)
            port = server.sockets[0].getsockname()[1]
            before = len(os.listdir("/proc/self/fd"))
            await bad.let_reach(port)
            await beside.let_reach(port)
            flood = f"""
                import socket
                held = []
                for _ in range(300):
                    one = socket.create_connection(("127.0.0.1", {port}), 30)
                    held.append(one)
                cut = 0
                for one in held:
                    one.settimeout(2)
                    try:
                        cut += one.recv(1) == b""
                    except TimeoutError:
                        break
                    except ConnectionError:
                        cut += 1
                print("flooded", flush=True)
                import time
                time.sleep(1000)
                """
            running = await bad.start_process(python(flood), {})
            with os.fdopen(running.stdout_fd, "rb") as out:
                first = await asyncio.to_thread(out.readline)
                talk = f"exec 3<>/dev/tcp/127.0.0.1/{port}; echo hello >&3; cat <&3"
                said = (await beside.run(shell(talk), {})).stdout
            os.close(running.stdin_fd)
            os.close(running.stderr_fd)
            server.close()
            for writer in held:
                writer.transport.abort()
            return first, said, most - before

    first, said, descriptors = asyncio.run(ran())
    assert first == b"flooded\n"
    assert said == b"HELLO\n"
    assert descriptors < 3 * boxes.MOST_CONNECTIONS + 50


OVER: dict[str, list[str]] = {
    "processes": shell("bomb() { bomb | bomb & }; bomb; sleep 100"),
    "output": shell("yes"),
    "memory": python(
        """
        import os, time
        for _ in range(4):
            if not os.fork():
                held = bytearray(100 << 20)
                held[::4096] = bytes(len(held[::4096]))
                time.sleep(100)
        time.sleep(100)
        """
    ),
    "page tables": python(
        """
        import ctypes, mmap, time
        size = 500 << 30
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        only_read, private, anonymous, unreserved = mmap.PROT_READ, 0x02, 0x20, 0x4000
        at = libc.mmap(None, ctypes.c_size_t(size), only_read, private | anonymous | unreserved, -1, 0)
        libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(size), mmap.MADV_NOHUGEPAGE)
        for place in range(at, at + size, 2 << 20):
            ctypes.c_char.from_address(place).value
        time.sleep(100)
        """
    ),
    "first thread": python(
        """
        import ctypes, os, threading, time
        def hold():
            while open("/proc/self/stat").read().split()[2] != "Z":  # /proc/self is the process
                time.sleep(0.01)
            held = bytearray(100 << 20)
            held[::4096] = b"x" * len(held[::4096])
            time.sleep(100)
        for _ in range(4):
            if not os.fork():
                threading.Thread(target=hold).start()
                ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
        time.sleep(100)
        """
    ),
    "disk": python(
        """
        import os
        for i in range(10 ** 7):
            os.close(os.open(f"/tmp/{i}", os.O_CREAT))
        """
    ),
    "sockets": python(
        """
        import os, socket, time
        for _ in range(4):
            if not os.fork():
                held = [socket.socketpair() for _ in range(400)]
                time.sleep(100)
        time.sleep(100)
        """
    ),
    "cpu": shell("while :; do :; done"),
    "seconds": shell("sleep 100"),
}


@pytest.mark.parametrize("limit", sorted(OVER))
def test_what_a_program_overdoes_ends_its_box_with_the_reason_and_no_other(limit: str) -> None:
    limits = {"cpu": Limits(256, 24, 8, 1, 0.5, 0), "seconds": Limits(256, 24, 8, 1, 0, 1)}

    async def ran() -> tuple[str, Done]:
        async with a_box(limits.get(limit, SMALL)) as bad, a_box() as beside:
            quiet = asyncio.create_task(beside.run(shell("sleep 1; echo fine"), {}))
            with pytest.raises(BoxEnded) as over:
                await bad.run(OVER[limit], {})
            with pytest.raises(BoxEnded):
                await bad.run(["true"], {})
            return over.value.limit, await quiet

    found_limit, beside = asyncio.run(ran())
    memory = {"sockets", "page tables", "first thread"}
    assert found_limit == ("memory" if limit in memory else limit)
    assert beside.stdout == b"fine\n"


def test_one_process_that_takes_too_much_memory_or_disk_is_told_and_its_box_goes_on() -> None:
    async def ran() -> list[Done]:
        async with a_box() as box:
            return [
                await box.run(python("bytearray(1 << 30)"), {}),
                await box.run(shell("head -c 20000000 /dev/zero > /tmp/one"), {}),
                await box.run(shell("for i in 1 2 3; do head -c 7000000 /dev/zero > /dev/shm/$i; done"), {}),
                await box.run(python("import os; os.memfd_create('x')"), {}),
                await box.run(shell("rm /tmp/one /dev/shm/*; echo on"), {}),
            ]

    memory, disk, shared, hidden, after = asyncio.run(ran())
    assert memory.stderr.rstrip().endswith(b"MemoryError")
    assert b"File too large" in disk.stderr or b"No space" in disk.stderr
    assert b"No space" in shared.stderr
    assert b"Function not implemented" in hidden.stderr, "memory that no limit counts"
    assert after.stdout == b"on\n"


def test_shared_memory_that_no_limit_counts_is_refused_and_what_programs_commonly_share_works() -> None:
    """Its pages stay when a process drops them, so no look at processes finds them."""
    said = done(
        python(
            """
            import mmap, socket
            with open("/dev/zero", "r+b", buffering=0) as zero:
                assert zero.read(3) == bytes(3)
                for shared in (lambda: mmap.mmap(-1, 1 << 20), lambda: mmap.mmap(zero.fileno(), 1 << 20)):
                    try:
                        held = shared()
                        held.write(bytes(1 << 20))
                        held.madvise(mmap.MADV_DONTNEED)
                        print("taken")
                    except OSError as error:
                        print(error.strerror)
            for family in (socket.AF_VSOCK, socket.AF_PACKET, socket.AF_ALG):
                try:
                    socket.socket(family, socket.SOCK_STREAM)
                    print("opened")
                except OSError as error:
                    print(error.strerror)
            mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).write(b"x")
            socket.socketpair()
            from multiprocessing import Array, Pool, shared_memory
            numbers = Array("i", 4)
            def add(one):
                with numbers.get_lock():
                    numbers[one] += 1
                return one
            from multiprocessing import get_context
            with get_context("fork").Pool(2) as pool:
                print(sum(pool.map(add, range(4))), list(numbers))
            one = shared_memory.SharedMemory(create=True, size=4096)
            one.buf[0] = 7
            other = shared_memory.SharedMemory(one.name)
            print(other.buf[0])
            other.close()
            one.unlink()
            """
        )
    )
    refused = ["Operation not permitted", "No such device", *["Address family not supported by protocol"] * 3]
    assert said.stdout.decode().splitlines() == [*refused, "6 [1, 1, 1, 1]", "7"], said.stderr


def test_what_the_kernel_holds_for_a_box_past_its_limits_is_refused() -> None:
    """Pages in a pipe outlive their process's mapping, a huge one in each slot; a file's access list has up to 64 KiB beside the disk."""
    said = done(
        python(
            """
            import ctypes, os, shutil, struct
            libc = ctypes.CDLL(None, use_errno=True)
            page = ctypes.create_string_buffer(4096)
            class Vector(ctypes.Structure):
                _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
            reads, writes = os.pipe()
            print(libc.vmsplice(writes, ctypes.byref(Vector(ctypes.addressof(page), 4096)), 1, 0),
                  os.strerror(ctypes.get_errno()))
            open("/tmp/a", "w").close()
            one = [(tag, 6, who) for tag, who in ((1, -1), (2, 1000), (4, -1), (16, -1), (32, -1))]
            access = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in one)
            for name, value in (("system.posix_acl_access", access), ("user.a", b"x")):
                try:
                    os.setxattr("/tmp/a", name, value)
                    print("set")
                except OSError as error:
                    print(error.strerror)
            shutil.copy2("/tmp/a", "/tmp/b")
            """
        )
    )
    refused = ["-1 Function not implemented", *["Operation not supported"] * 2]
    assert said.stdout.decode().splitlines() == refused, said.stderr
    assert done(shell("cd /tmp; touch a; cp -a a b; install -m 600 a c; ls")).stdout.split()[:2] == [
        b"a",
        b"b",
    ]


def test_a_command_that_is_given_up_is_ended_with_its_children() -> None:
    async def ran() -> None:
        async with a_box() as box:
            task = asyncio.create_task(box.run(shell("sleep 1000 & sleep 1000; echo never"), {}))
            while b"sleep" not in (await box.run(shell("cat /proc/[0-9]*/comm"), {})).stdout:
                await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            deadline = time.monotonic() + 60
            while b"sleep" in (await box.run(shell("cat /proc/[0-9]*/comm"), {})).stdout:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)

    asyncio.run(ran())


def test_a_box_ends_with_its_owner(tmp_path: Path) -> None:
    """The owner is killed: bubblewrap, process 1 and what ran are gone."""
    program = tmp_path / "owner.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import asyncio, os
            from trainer.sandbox.box import Box, found
            from trainer.sandbox.plan import Limits, Plan
            async def main():
                box = Box(Plan(Limits(), {READABLE!r}), found())
                await box.start()
                await box.start_process(["sleep", "98765"], {{}}, stdin=0, output=2)
                print(box._process.pid, flush=True)
                await asyncio.Event().wait()
            asyncio.run(main())
            """
        )
    )

    async def ran() -> None:
        owner = await asyncio.create_subprocess_exec(
            sys.executable, str(program), stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
        )
        assert owner.stdout is not None
        pid = int(await owner.stdout.readline())
        owner.kill()
        await owner.wait()
        await until(lambda: not Path(f"/proc/{pid}").exists())
        await until(lambda: not any(runs(b"98765", path) for path in Path("/proc").glob("[0-9]*/cmdline")))

    asyncio.run(ran())


def runs(word: bytes, path: Path) -> bool:
    try:
        return path.read_bytes().endswith(b"\0" + word + b"\0")
    except OSError:
        return False


async def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def test_files_are_those_of_the_box() -> None:
    async def ran() -> None:
        async with a_box() as box:
            await box.write("sub/one", b"12345")
            assert await box.read("/tmp/work/sub/one") == b"12345"
            assert await box.read("sub/one", 3) == b"123"
            await box.run(shell("ln -s /etc/passwd link; mkfifo pipe"), {})
            assert (await box.read("link")).startswith(b"agent:"), "a link means what it means in the box"
            for path, why in (("pipe", "no plain file"), ("/tmp", "no plain file"), ("none", "No such file")):
                with pytest.raises(OSError, match=why):
                    await box.read(path)
            with pytest.raises(OSError, match=r"Read-only|Permission denied|No such"):
                await box.write("/usr/x", b"")
            with pytest.raises(OSError, match=r"No space|too large"):
                await box.write("big", bytes(20 << 20))

    asyncio.run(ran())


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write((await reader.readline()).upper())
    await writer.drain()
    writer.close()


def test_a_box_reaches_the_one_port_that_it_is_given_and_is_reached_at_its_own() -> None:
    async def ran() -> None:
        async with a_box() as box:
            server = await asyncio.start_server(echo, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            await box.let_reach(port)
            talk = f"exec 3<>/dev/tcp/127.0.0.1/{port}; echo hello >&3; cat <&3"
            assert (await box.run(shell(talk), {})).stdout == b"HELLO\n"
            server.close()
            served = """
                import socket
                with socket.create_server(("127.0.0.1", 7777)) as server:
                    print("ready", flush=True)
                    while True:
                        one, _ = server.accept()
                        one.sendall(one.recv(100)[::-1])
                        one.close()
                """
            running = await box.start_process(python(served), {})
            with os.fdopen(running.stdout_fd, "rb") as out:
                assert await asyncio.to_thread(out.readline) == b"ready\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", await box.reach(7777))
            writer.write(b"abc")
            assert await reader.read() == b"cba"
            writer.close()
            os.close(running.stdin_fd)
            os.close(running.stderr_fd)

    asyncio.run(ran())


def test_a_host_without_user_namespaces_says_what_to_do(tmp_path: Path) -> None:
    refused = tmp_path / "bwrap"
    refused.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    refused.chmod(0o755)

    async def ran() -> None:
        await Box(Plan(SMALL, READABLE), str(refused)).start()

    with pytest.raises(ConfigError, match="makes no box") as error:
        asyncio.run(ran())
    assert "No permissions" in error.value.quoted
    assert 'data.sandbox = "none"' in error.value.remedy
