"""Which launcher and settings the ranks get: the decision, on what real libraries print;
and the tiny world, under a real mpirun."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from trainer import launch, mpi_settings, reach
from trainer.mpi_settings import (
    NO_MPI,
    UNREACHABLE,
    WRONG_SIZE,
    GiveUp,
    HostFault,
    Library,
    MpiChoice,
    MpiSettings,
    Trial,
    Try,
)

OPEN_MPI_4 = "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n"
OPEN_MPI_5 = "mpirun (Open MPI) 5.0.7\n\nReport bugs to https://www.open-mpi.org/community/help/\n"
LIBRARY_5 = "Open MPI v5.0.7, package: Debian OpenMPI, ident: 5.0.7, repo rev: v5.0.7, Feb 14, 2025"
HYDRA = """HYDRA build details:
    Version:                                 4.0.2
    Release Date:                            Thu Apr  7 12:34:45 CDT 2022
    CC:                              gcc -Wdate-time -D_FORTIFY_SOURCE=2 -Wl,-z,relro
    Process Manager:                         pmi
"""
MPICH = "MPICH Version:      4.2.3\nMPICH Release date: Thu Oct  3 09:51:43 AM CDT 2024\nMPICH ABI:          16:2:4\n"
INTEL = (
    "Intel(R) MPI Library for Linux* OS, Version 2021.12 Build 20240213 (id: 4f55822)\nCopyright 2003-2024.\n"
)


@pytest.mark.parametrize(
    ("text", "make", "version"),
    [
        (OPEN_MPI_4, "Open MPI", (4, 1, 4)),
        (OPEN_MPI_5, "Open MPI", (5, 0, 7)),
        (LIBRARY_5, "Open MPI", (5, 0, 7)),
        (HYDRA, "MPICH", (4, 0, 2)),
        (MPICH, "MPICH", (4, 2, 3)),
        (INTEL, "Intel MPI", (2021, 12)),
        ("", "", ()),
    ],
)
def test_a_library_is_known_by_what_it_prints(text: str, make: str, version: tuple[int, ...]) -> None:
    assert mpi_settings.library(text) == Library(make, version)


def chosen(
    text: str, *trials: Trial, launchers: tuple[str, ...] = ("srun", "mpirun")
) -> Try | MpiChoice | GiveUp:
    return mpi_settings.decide(mpi_settings.library(text), launchers, 2, trials)


LISTED = "MPI plugin types are...\n\tpmix\n\tnone\n\tcray_shasta\n\tpmi2\nspecific pmix plugin versions available: pmix_v4\n"


@pytest.mark.parametrize(
    ("text", "listed", "named", "expected"),
    [
        (OPEN_MPI_5, LISTED, "", ["pmix", "pmi2"]),
        (MPICH, LISTED, "", ["pmi2", "pmix"]),
        (INTEL, LISTED, "", ["pmi2", "pmix"]),
        ("", LISTED, "", ["pmix", "pmi2"]),
        (OPEN_MPI_5, "MPI plugin types are...\n\tnone\n\tpmi2\n", "", ["pmi2"]),
        (OPEN_MPI_5, "srun: fatal: no configuration", "", []),
        (OPEN_MPI_5, LISTED, "pmix_v3", ["pmix_v3"]),
    ],
)
def test_srun_is_tried_with_the_interface_that_the_library_speaks(
    text: str, listed: str, named: str, expected: list[str]
) -> None:
    found = mpi_settings.srun_launchers(mpi_settings.library(text), listed, named)
    assert found == tuple(f"srun --mpi={kind}" for kind in expected)


def test_open_mpi_4_is_tried_with_tcp_first_and_5_with_nothing_set() -> None:
    four, five = chosen(OPEN_MPI_4), chosen(OPEN_MPI_5)
    assert isinstance(four, Try)
    assert four.settings.environ["OMPI_MCA_btl"] == "self,tcp"
    assert isinstance(five, Try)
    assert not five.settings.environ


@pytest.mark.parametrize("text", [HYDRA, INTEL, ""])
def test_what_is_not_open_mpi_gets_none_of_its_settings(text: str) -> None:
    first = chosen(text)
    assert first == Try("srun", MpiSettings("its own settings"))
    assert isinstance(chosen(text, Trial("srun", first.settings, WRONG_SIZE, "a world of 1")), Try)


def test_open_mpi_5_that_finds_no_route_to_its_own_node_pairs_addresses_by_weight() -> None:
    first = chosen(OPEN_MPI_5, launchers=("mpirun",))
    assert isinstance(first, Try)
    failed = Trial("mpirun", first.settings, 14, "unreachable")
    second = chosen(OPEN_MPI_5, failed, launchers=("mpirun",))
    assert isinstance(second, Try)
    assert second.settings.environ["OMPI_MCA_reachable"] == "weighted"
    used = chosen(OPEN_MPI_5, failed, Trial("mpirun", second.settings, 0), launchers=("mpirun",))
    assert isinstance(used, MpiChoice)
    assert used.settings == second.settings
    assert used.reason == (
        "2 ranks met under mpirun of Open MPI 5.0.7 with TCP alone, addresses paired by weight "
        "(mpirun with its own choice of transport: unreachable)"
    )


def test_a_launcher_that_starts_worlds_of_one_is_tried_once_whatever_the_transport() -> None:
    first = chosen(OPEN_MPI_4)
    assert isinstance(first, Try)
    second = chosen(OPEN_MPI_4, Trial("srun", first.settings, WRONG_SIZE, "a world of 1 and not of 2"))
    assert isinstance(second, Try)
    assert second.launcher == "mpirun"


def test_where_a_host_drops_connections_one_trial_is_enough() -> None:
    library, launchers, silent = (
        mpi_settings.library(OPEN_MPI_5),
        ("srun", "mpirun"),
        {"node2": HostFault.DROPS, "node3": HostFault.UNREACHABLE},
    )
    first = mpi_settings.decide(library, launchers, 2, (), silent)
    assert isinstance(first, Try), "a port range of their own may be open"
    for code, words in ((None, "did not end within 20 s"), (UNREACHABLE, "rank 0 heard nothing")):
        failed = Trial(first.launcher, first.settings, code, words)
        given_up = mpi_settings.decide(library, launchers, 2, (failed,), silent)
        assert isinstance(given_up, GiveUp)
        assert (
            "cannot reach one another: from this host, node2 (TCP connections to it are dropped), node3 (it is unreachable); "
            in given_up.reason
        )
        assert words in given_up.reason
        assert "open TCP between the nodes" in given_up.remedy
    met = Trial(first.launcher, first.settings, 0)
    assert isinstance(mpi_settings.decide(library, launchers, 2, (met,), silent), MpiChoice)


@pytest.mark.parametrize("code", [WRONG_SIZE, 14, launch.NOT_STARTED])
def test_a_trial_that_says_nothing_of_the_network_is_followed_by_the_next_where_hosts_are_silent(
    code: int,
) -> None:
    """A launcher of another make starts worlds of one: the next one's may meet on ports of their own."""
    library, silent = mpi_settings.library(OPEN_MPI_5), {"node2": HostFault.DROPS}
    first = mpi_settings.decide(library, ("srun", "mpirun"), 2, (), silent)
    assert isinstance(first, Try)
    trial = Trial(first.launcher, first.settings, code, "its words")
    following = mpi_settings.decide(library, ("srun", "mpirun"), 2, (trial,), silent)
    assert isinstance(following, Try)
    assert following.launcher == ("mpirun" if code == WRONG_SIZE else "srun")


def test_a_launcher_that_cannot_be_started_did_not_run_into_its_deadline() -> None:
    code, words = launch._tried(["/no/such/mpirun"], os.environ, 1.0)
    assert (code, words) == (launch.NOT_STARTED, "/no/such/mpirun: No such file or directory")


def test_a_host_that_refuses_is_there_and_one_that_says_nothing_is_silent() -> None:
    """A listener whose queue is full drops what comes next, as a firewall does."""
    with contextlib.ExitStack() as kept:
        full = kept.enter_context(socket.create_server(("127.0.0.2", 0), backlog=0))
        port = full.getsockname()[1]
        for _ in range(8):
            waiting = kept.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        hosts = ("127.0.0.1", "127.0.0.2")
        assert reach.silent_hosts(hosts, (port,), 0.5) == {"127.0.0.2": HostFault.DROPS}
        assert reach.silent_hosts(hosts, (port, 1), 0.5) == {}, "it refuses at another"
        assert reach.silent_hosts(("no-such-host.invalid",), (port,), 0.5) == {}
        assert reach.silent_hosts((), (port,), 0.5) == {}


def test_a_host_without_a_route_is_unreachable_and_not_called_a_firewall_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_route(address: tuple[str, int], timeout: float) -> socket.socket:
        if address == ("mixed", 2):
            raise TimeoutError
        raise OSError(errno.EHOSTUNREACH if address[1] == 1 else errno.ENETUNREACH, "no route")

    monkeypatch.setattr(socket, "create_connection", no_route)
    found = reach.silent_hosts(("away", "mixed"), (1, 2), 0.5)
    assert found == {"away": HostFault.UNREACHABLE, "mixed": HostFault.DROPS}


def test_a_host_is_tried_at_ports_that_the_system_gives() -> None:
    """A site that opens a range between its nodes gives that range to the system, too."""
    draw = random.Random(1)
    for system in (reach.system_ports(), "50000 50999\n", "32768\t60999", "40000 40003"):
        first, last = map(int, system.split())
        ports = reach.tried_ports(system, draw)
        assert len(set(ports)) == len(ports) == min(reach.TRIED_PORTS, last - first + 1)
        assert all(first <= port <= last for port in ports)
    eighth = (60999 - 32768) / 8
    spread = reach.tried_ports("32768 60999", draw)
    assert [int((port - 32768) / (eighth + 1)) for port in spread] == list(range(8)), (
        "wherever a part is open"
    )
    assert spread != reach.tried_ports("32768 60999", draw)


def test_when_no_candidate_is_left_each_one_s_words_are_told() -> None:
    trials: list[Trial] = []
    while isinstance(step := chosen(OPEN_MPI_5, *trials), Try):
        code = UNREACHABLE if step.launcher == "srun" else None
        trials.append(Trial(step.launcher, step.settings, code, f"word {len(trials)}"))
    assert len(trials) == 6
    assert isinstance(step, GiveUp)
    assert step.reason.startswith(
        "2 ranks cannot reach one another by MPI (Open MPI 5.0.7): srun with its own choice"
    )
    assert all(f"word {n}" in step.reason for n in range(6))
    assert "SCAVENGER_MPI" in step.remedy
    alike = [Trial(trial.launcher, trial.settings, trial.code, "unreachable") for trial in trials[:3]]
    told = mpi_settings._describe(alike)
    assert told.startswith(
        "srun with its own choice of transport or TCP alone, addresses paired by weight or TCP alone: "
    )
    assert told.count("unreachable") == 1


def test_without_an_mpi_library_nothing_else_is_tried() -> None:
    first = chosen(OPEN_MPI_5)
    assert isinstance(first, Try)
    absent = chosen(OPEN_MPI_5, Trial("srun", first.settings, NO_MPI, "ImportError: libmpi.so.40"))
    assert isinstance(absent, GiveUp)
    assert absent.reason == "ranks cannot load MPI: ImportError: libmpi.so.40"


def test_everybody_exchanges_a_byte_with_rank_0_and_its_neighbours() -> None:
    for size in range(2, 9):
        pairs = {(rank, other) for rank in range(size) for other in reach.partners(rank, size)}
        assert pairs == {(other, rank) for rank, other in pairs}, "what is sent is received"
        assert all((0, rank) in pairs for rank in range(1, size))
    assert reach.partners(3, 8) == (0, 2, 4)


def test_who_cannot_be_connected_to_is_told_with_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert reach.connects("127.0.0.1", port) == ""
    assert reach.connects("127.0.0.1", port) == f"127.0.0.1:{port}: Connection refused"
    assert "n1.invalid:7: " in reach.connects("n1.invalid", 7)


PROGRAM = Path(__file__).with_name("reach_program.py")


def under_mpirun(*argv: str) -> subprocess.CompletedProcess[str]:
    environ = launch.environment(os.environ, root=True)
    program = ["mpirun", "-n", "3", sys.executable, *argv]
    return subprocess.run(program, env=environ, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.mpi
def test_the_tiny_world_meets_or_says_why_not() -> None:
    pytest.importorskip("mpi4py")
    met = under_mpirun("-m", "trainer.world_probe", "3", "30")
    assert met.returncode == 0, met.stderr
    other = under_mpirun("-m", "trainer.world_probe", "4", "30")
    assert other.returncode == WRONG_SIZE
    assert "a world of 3 and not of 4" in other.stderr


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("what", "words"),
    [
        (
            "mute",
            r"error: rank [01] on \S+ exchanged nothing by MPI with rank 2 within 2 s\n  remedy: is TCP open",
        ),
        (
            "lost",
            r"by TCP: rank 1 on n1\S* cannot reach rank 2 at n2.invalid:\d+: .*\n  remedy: each node's host name",
        ),
        ("well", ""),
    ],
)
def test_ranks_that_do_not_reach_one_another_end_in_time_and_say_which(what: str, words: str) -> None:
    pytest.importorskip("mpi4py")
    done = under_mpirun(str(PROGRAM), what)
    if not words:
        assert (done.returncode, done.stdout.count("met")) == (0, 3), done.stderr
        return
    assert done.returncode == 2, done.stderr
    assert re.search(words, done.stderr), done.stderr
    assert "met" not in done.stdout
