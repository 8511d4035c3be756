"""A daemon that cannot start says why in one error, and its exit status tells a service manager whether to try again."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scavenger import toml
from scavenger.config import read_daemon
from scavenger.daemon import check_config
from scavenger.errors import ConfigError, Fenced, ScavengerError
from scavenger.host import listening
from scavenger.host.storage import StorageError
from scavenger.protocol import keys

ROOT = Path(__file__).resolve().parents[1]
WAIT_S = 90.0


def site(folder: Path, **sections: dict[str, Any]) -> Path:
    """A state directory with keys, and a scavenger.toml for a daemon that harvests nothing. Returns the file."""
    keys.init_state(folder / "state", "ada")
    document: dict[str, Any] = {
        "cluster": {"backend": "local", "local_dir": str(folder)},
        "harvest": {"enabled": False},
        **sections,
        "daemon": {"state_dir": str(folder / "state")} | sections.get("daemon", {}),
    }
    path = folder / "scavenger.toml"
    path.write_text(toml.dumps(document))
    return path


def test_a_check_names_owners_whom_nobody_has_enrolled(tmp_path: Path) -> None:
    path = site(tmp_path, owners={"users": ["bob"]}, daemon={"public_dir": str(tmp_path / "public")})
    path.write_text(path.read_text() + "[owners.share_of]\nada = 7\nbob = 2\nmth = 3\n")

    def note() -> str:
        return next(
            found.note for found in check_config.check(read_daemon(path)) if found.what == "owners by name"
        )

    assert note().startswith("WARNING: no owner has the name mth (owners.share_of):")
    path.write_text(path.read_text().replace("mth = 3\n", ""))
    assert note() == ""


class Running:
    """`scavenger daemon` as a process of its own, and its standard error."""

    def __init__(self, config: Path, *options: str, argv: tuple[str, ...] = ()) -> None:
        program = argv or (sys.executable, "-m", "scavenger", "daemon", "--config", str(config), *options)
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            program, env=env, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            for line in stderr:
                with self._changed:
                    self._lines.append(line)
                    self._changed.notify_all()
        with self._changed:
            self._lines.append("(end)")
            self._changed.notify_all()

    @property
    def stderr(self) -> str:
        return "".join(self._lines)

    @property
    def error(self) -> str:
        """What was printed for the user, without the log."""
        return "".join(line for line in self._lines if not line.startswith("timestamp=")).removesuffix(
            "(end)"
        )

    def until(self, words: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: words in self.stderr or "(end)" in self.stderr, WAIT_S), (
                self.stderr
            )
            assert words in self.stderr, self.stderr

    def ended(self, within_s: float = WAIT_S) -> int:
        try:
            code = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it still runs after {within_s:g} s, and printed:\n{self.stderr}")
        self._reader.join(WAIT_S)
        return code


@contextmanager
def running(config: Path, *options: str, argv: tuple[str, ...] = ()) -> Iterator[Running]:
    daemon = Running(config, *options, argv=argv)
    try:
        yield daemon
    finally:
        if daemon.process.poll() is None:
            daemon.process.kill()
        daemon.process.wait()
        daemon._reader.join(WAIT_S)


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


# ---------------------------------------------------------------- ports


@pytest.mark.parametrize("key", ["daemon.port", "prometheus.listen"])
def test_a_port_in_use_ends_the_daemon_at_once_with_one_error_and_status_2(tmp_path: Path, key: str) -> None:
    with taken_port() as port:
        sections: dict[str, Any] = (
            {"daemon": {"port": port}}
            if key == "daemon.port"
            else {"prometheus": {"listen": f"127.0.0.1:{port}"}}
        )
        with running(site(tmp_path, **sections)) as daemon:
            assert daemon.ended(30.0) == ConfigError.exit_code == 2
        assert daemon.error.startswith("scavenger: ")
        assert "Traceback" not in daemon.stderr
        assert f"127.0.0.1:{port}" in daemon.error
        assert "the port is in use" in daemon.error
        assert key in daemon.error
        assert "scavenger.toml" in daemon.error
    assert not (tmp_path / "state/ledger.sqlite3").exists(), "nothing was written before it was known"


@pytest.mark.parametrize(
    ("listen", "words"),
    [("192.0.2.1", "Cannot assign requested address"), ("no-such-host.invalid", "no-such-host.invalid")],
)
def test_an_address_that_is_not_this_host_s_is_one_error(tmp_path: Path, listen: str, words: str) -> None:
    with running(site(tmp_path, daemon={"listen": listen})) as daemon:
        code = daemon.ended(30.0)
    assert words in daemon.error
    assert "Traceback" not in daemon.stderr
    assert code == (1 if "looked up now" in daemon.error else 2), daemon.error


def test_a_port_that_is_taken_between_the_check_and_the_bind_does_not_hang_the_daemon(tmp_path: Path) -> None:
    """The check before the ledger is taken finds it free; libzmq's own bind then fails."""
    program = "from scavenger.host import listening\nlistening.require_free = lambda *_: None\nfrom scavenger.cli.main import main\nmain()"
    with taken_port() as port:
        config = site(tmp_path, daemon={"port": port})
        with running(
            config, argv=(sys.executable, "-c", program, "daemon", "--config", str(config))
        ) as daemon:
            assert daemon.ended(30.0) == 2
        assert "the port is in use" in daemon.error
        assert "Traceback" not in daemon.stderr


def test_a_daemon_that_takes_over_on_one_host_waits_for_the_other_s_ports(tmp_path: Path) -> None:
    with taken_port() as port, taken_port() as metrics:
        pass
    config = site(tmp_path, daemon={"port": port}, prometheus={"listen": f"127.0.0.1:{metrics}"})
    with running(config) as first:
        first.until("serving")
        with running(config, "--take-over") as second:
            second.until("event=serving")
            assert first.ended() == Fenced.exit_code
            second.process.terminate()
            assert second.ended() == 0


def test_what_may_pass_by_itself_is_tried_again() -> None:
    def status(error: OSError) -> int:
        return listening.refused(listening.ROUTER, "host", 1, error).exit_code

    assert status(OSError(98, "Address already in use")) == 2
    assert status(OSError(13, "Permission denied")) == 2
    assert status(OSError(24, "Too many open files")) == ScavengerError.exit_code == 1
    assert status(socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")) == 1
    assert status(socket.gaierror(socket.EAI_NONAME, "Name or service not known")) == 2


# ---------------------------------------------------------------- disks


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """A file system of its own at `folder`, without a byte to spare."""
    folder.mkdir(parents=True, exist_ok=True)
    argv = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    mounted = subprocess.run(argv, capture_output=True, text=True, check=False) if os.geteuid() == 0 else None
    if mounted is None or mounted.returncode:
        pytest.skip(
            f"no file system can be mounted here: {mounted.stderr.strip() if mounted else 'not root'}"
        )
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(bytes(4096)):
            pass
    assert os.statvfs(folder).f_bavail == 0


@pytest.mark.parametrize("key", ["daemon.state_dir", "daemon.ledger"])
def test_a_full_disk_is_one_error_with_what_is_free_and_is_tried_again(tmp_path: Path, key: str) -> None:
    folder = tmp_path / ("state" if key == "daemon.state_dir" else "ledger")
    with full_disk(folder):
        daemon = {"ledger": f"sqlite:///{folder}/l.sqlite3"} if key == "daemon.ledger" else {}
        config = site(tmp_path, daemon=daemon)
        fill(folder)
        with running(config) as started:
            assert started.ended() == StorageError.exit_code == 1, (
                "systemd starts it again: RestartPreventExitStatus=2 4"
            )
        assert started.error.startswith(
            f"scavenger: {key}: {folder} cannot be written: No space left on device (0 bytes free"
        )
        assert "remedy: free space there" in started.error
        assert "Traceback" not in started.stderr
        (folder / "filler").unlink()
        with running(config) as again:
            again.until("event=serving")
            again.process.terminate()
            assert again.ended() == 0


def test_a_limit_on_the_size_of_files_is_one_error_too(tmp_path: Path) -> None:
    config = site(tmp_path)
    program = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\nfrom scavenger.cli.main import main\nmain()"
    with running(config, argv=(sys.executable, "-c", program, "daemon", "--config", str(config))) as daemon:
        assert daemon.ended() == 1
    assert "File too large" in daemon.error
    assert "LimitFSIZE" in daemon.error
    assert "Traceback" not in daemon.stderr


def test_a_disk_that_fills_up_after_the_check_is_one_error_too(tmp_path: Path) -> None:
    """Whatever file it is that cannot be written first."""
    config = site(tmp_path)
    program = "from scavenger.host import storage\nstorage.require_writable = lambda *_: None\n"
    program += "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\nfrom scavenger.cli.main import main\nmain()"
    with running(config, argv=(sys.executable, "-c", program, "daemon", "--config", str(config))) as daemon:
        assert daemon.ended() == 1
    assert "File too large" in daemon.error
    assert "Traceback" not in daemon.stderr


# ---------------------------------------------------------------- exit status


def scavenger(*argv: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-m", "scavenger", *argv]
    return subprocess.run(
        program,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


@pytest.mark.parametrize(
    "ledger", ["mysql://u@h/d", "sqlite:///:memory:", "sqlite:///relative.sqlite3", "no url"]
)
@pytest.mark.parametrize(
    "command",
    [["daemon"], ["ledger", "report", "runs"], ["ledger", "backup", "/tmp/never-written"]],
    ids=" ".join,
)
def test_a_ledger_that_can_be_none_is_status_2_in_every_command(
    tmp_path: Path, ledger: str, command: list[str]
) -> None:
    config = site(tmp_path, daemon={"ledger": ledger})
    done = scavenger(*command, "--config", str(config))
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "remedy" in done.stderr


def test_what_only_a_person_can_mend_is_status_2_and_what_may_pass_is_1(tmp_path: Path) -> None:
    config = site(tmp_path)
    state, key = tmp_path / "state", tmp_path / "state/keys/server.key"
    key.chmod(0o644)
    assert scavenger("daemon", "--config", str(config)).returncode == 2
    key.unlink()
    assert scavenger("daemon", "--config", str(config)).returncode == 2
    state.rename(tmp_path / "elsewhere")
    done = scavenger("daemon", "--config", str(config))
    assert done.returncode == 1, "it may be mounted later"
    assert f"there is no folder {state}" in done.stderr
    config.write_text("[daemon]\nstate_dir = 7\n")
    for command in (["daemon"], ["status"], ["drain"], ["keys", "list"], ["check-config"]):
        named = [str(config)] if command == ["check-config"] else ["--config", str(config)]
        assert scavenger(*command, *named).returncode == 2, command


def test_a_relative_state_dir_is_relative_to_its_file(tmp_path: Path) -> None:
    path = tmp_path / "scavenger.toml"
    path.write_text('[daemon]\nstate_dir = "state"\n')
    assert read_daemon(path).daemon.state_dir == tmp_path / "state"
    assert read_daemon(path).ledger_url == f"sqlite:///{tmp_path}/state/ledger.sqlite3"
