"""Commands of the pages that need another place than `Place`: an SSH server, a GPU, vLLM, the package index, the clone's own .venv.

Each is read from its page, and run with what stands for its placeholders.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.clusters import wait_for
from tests.ledger.examples import everything, written
from tests.pages import commands
from tests.pages.commands import ROOT
from tests.web.servers import serving

SBIN = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])


def run(
    text: str, *, env: Mapping[str, str] | None = None, cwd: Path = ROOT, timeout_s: float = 600.0
) -> str:
    done = subprocess.run(
        ["bash", "-ec", text],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout + done.stderr


def shown(page: str, begins: str) -> str:
    """The one command of a page that begins so, in a block or in its prose."""
    text = commands.read(page)
    (found,) = {
        one.text for one in [*commands.blocks(text), *commands.quoted(text)] if one.text.startswith(begins)
    }
    return found


# ---------------------------------------------------------------- a tunnel


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def sound(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def daemon_host(tmp_path: Path) -> Iterator[Path]:
    """A client's configuration in which `daemon-host` is an SSH server of the test's own, on 127.0.0.1, with keys of its own."""
    server = shutil.which("sshd", path=SBIN)
    if server is None or shutil.which("ssh-keygen") is None:
        pytest.skip("no SSH server here (Debian: openssh-server)")
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)],
            check=True,
            timeout=60,
        )
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # as its service does
    port = free_port()
    (tmp_path / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {tmp_path}/host\nAuthorizedKeysFile {tmp_path}/user.pub\n"
        "PermitRootLogin prohibit-password\nPasswordAuthentication no\nStrictModes no\nUsePAM no\nPidFile none\n"
    )
    public = " ".join((tmp_path / "host.pub").read_text().split()[:2])
    (tmp_path / "known").write_text(f"[127.0.0.1]:{port} {public}\n")
    client = tmp_path / "ssh_config"
    client.write_text(
        f"Host daemon-host\n HostName 127.0.0.1\n Port {port}\n User {getpass.getuser()}\n IdentityFile {tmp_path}/user\n"
        f" IdentitiesOnly yes\n UserKnownHostsFile {tmp_path}/known\n StrictHostKeyChecking yes\n"
    )
    with (tmp_path / "sshd.log").open("w") as log:
        process = subprocess.Popen([server, "-D", "-e", "-f", str(tmp_path / "sshd_config")], stderr=log)
        try:
            wait_for("the SSH server listens", lambda: process.poll() is not None or sound(port), 30)
            assert process.poll() is None, (tmp_path / "sshd.log").read_text()
            yield client
        finally:
            process.terminate()
            process.wait(30)


@contextmanager
def typed(text: str) -> Iterator[None]:
    """As at a desk: the shell over there stays until the block is left."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec {text}"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)
        assert process.stdin is not None
        process.stdin.close()


def status_of(port: int) -> int:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/", headers={"Host": "127.0.0.1:8765"})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_a_tunnel_leads_from_a_desk_to_the_port_of_the_web_pages(daemon_host: Path, tmp_path: Path) -> None:
    url, here = f"sqlite:///{tmp_path}/ledger.sqlite3", free_port()
    written(url, everything())
    text = shown("docs/web.md", "ssh -L 8765:127.0.0.1:")
    with serving(url, "a" * 43) as there:
        text = text.replace("-L 8765:", f"-L {here}:").replace(":8765 ", f":{there} ")
        with typed(text.replace("ssh ", f"ssh -F {daemon_host} ", 1)):
            wait_for("the tunnel is there", lambda: sound(here), 30)
            assert status_of(here) == 401, "the server's reply to one without its token"


def test_a_tunnel_leads_from_a_desk_to_the_socket_of_the_web_pages(daemon_host: Path, tmp_path: Path) -> None:
    state, here, there = tmp_path / "state", free_port(), tmp_path / "web.sock"
    state.mkdir(mode=0o700)
    written(f"sqlite:///{state}/ledger.sqlite3", everything())
    config = tmp_path / "scavenger.toml"
    config.write_text(f'[daemon]\nstate_dir = "{state}"\n')
    serve = shown("docs/web.md", "scavenger web --socket").replace("/var/lib/scavenger/web.sock", str(there))
    serve = serve.replace("scavenger web", f"{sys.executable} -m scavenger web --config {config}")
    text = shown("docs/web.md", "ssh -L 8765:/var/lib/").replace("/var/lib/scavenger/web.sock", str(there))
    text = text.replace("-L 8765:", f"-L {here}:")
    with typed(serve):
        wait_for("the socket is there", there.exists, 60)
        with typed(text.replace("ssh ", f"ssh -F {daemon_host} ", 1)):
            wait_for("the tunnel is there", lambda: sound(here), 30)
            assert status_of(here) == 200, "who may connect to the socket may read"


# ---------------------------------------------------------------- a GPU, vLLM


@pytest.mark.gpu
def test_the_driver_and_torch_know_the_gpu() -> None:
    assert "GPU" in run(shown("docs/recovery.md", "nvidia-smi -q -d "))
    assert run(shown("docs/gpu.md", "python -c").replace("python", sys.executable, 1)).strip()


@pytest.mark.gpu
def test_dcgm_s_diagnosis_runs() -> None:
    if shutil.which("dcgmi") is None:
        pytest.skip("no dcgmi here (NVIDIA's datacenter-gpu-manager)")
    assert "Diagnostic" in run(shown("docs/recovery.md", "dcgmi diag"))


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_the_engine_benchmark_compares_our_worker_with_bare_vllm() -> None:
    tiny = "--requests 4 --tokens 8 --batch 4 --rounds 1 --layers 1"
    said = run(f"{sys.executable} benchmarks/engine.py {tiny}")
    assert re.search(r"worker / bare: median \d", said)


# ---------------------------------------------------------------- the package index


@pytest.mark.long
@pytest.mark.timeout(900)
def test_what_a_gpu_s_extras_need_can_be_had_and_fits_together(tmp_path: Path) -> None:
    """Several GB of CUDA: pip resolves all of it by the index's metadata, and downloads and installs nothing."""
    report = tmp_path / "report.json"
    text = shown("docs/start.md", "pip install '.[trainer,vllm]'")
    dry = f"{sys.executable} -m pip install --dry-run --ignore-installed --only-binary :all: --quiet --report {report}"
    run(text.replace("pip install", dry, 1), cwd=ROOT, timeout_s=800.0)
    found = {
        one["metadata"]["name"].lower(): one["metadata"]["version"]
        for one in json.loads(report.read_text())["install"]
    }
    assert {"scavenger", "torch", "vllm", "transformers"} <= found.keys()


# ---------------------------------------------------------------- the clone


@pytest.fixture
def in_own_venv() -> None:
    if Path(sys.prefix).resolve() != ROOT / ".venv":
        pytest.skip("the scripts use the clone's own .venv; these tests run from another one")


def release() -> str:
    said = subprocess.run(
        [shutil.which("slurmctld", path=SBIN) or "slurmctld", "-V"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout
    (found,) = re.findall(r"[0-9]+\.[0-9]+(?=\.|$)", said.split()[1])[:1]
    return str(found)


#: What stands for minutes and hours of tests: one file of them.
ONE = "tests/test_lock.py"
CHOSEN = {
    "scripts/bootstrap --tests": ({}, ""),
    "scripts/test --long": ({"--long": f"--long {ONE}"}, "passed"),
    "scripts/test -m gpu": ({"-m gpu": "-m gpu tests/test_gpu_benchmark.py"}, "passed|skipped"),
    "scripts/test tests/system/test_preemption.py": ({"tests/system/test_preemption.py": ONE}, "passed"),
    "scripts/slurm-matrix --gate": (
        {"--gate": "--gate --logs {logs} {release} -- --collect-only"},
        "passed in",
    ),
    "scripts/slurm-matrix --suite 24.11": (
        {"24.11": "--logs {logs} {release} -- " + ONE},
        r"passed in .*\d+ passed",
    ),
    "scripts/slurm-matrix --pyslurm": (
        {"--pyslurm": "--pyslurm {clone} --logs {logs} {release} -- " + ONE},
        r"passed in .*\d+ passed",
    ),
}


@pytest.mark.long
@pytest.mark.slurm
@pytest.mark.accounting
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("text", CHOSEN)
def test_the_scripts_that_run_tests_run_those_that_are_chosen(
    in_own_venv: None, tmp_path: Path, text: str
) -> None:
    """`--pyslurm` is given a clone without any release: none is built, and the tests run all the same."""
    put, says = CHOSEN[text]
    clone, logs = tmp_path / "pyslurm.git", tmp_path / "logs"
    subprocess.run(["git", "init", "--quiet", "--bare", str(clone)], check=True, timeout=60)
    logs.mkdir()
    for name, value in put.items():
        text = text.replace(name, value.format(clone=clone, logs=logs, release=release()))
    env = {"SCAVENGER_SLURM_CACHE": str(tmp_path / "cache"), "SCAVENGER_REQUIRE": ""}
    said = run(text, env=env, timeout_s=1100.0)
    assert re.search(says, said), said[-2000:]
