"""Ports are taken, not looked for: nobody else gets one of them, in this process or another, until they are given back."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from scavenger.cluster.sandbox import ports
from scavenger.errors import ClusterError

TAKES = (
    "import sys\nfrom scavenger.cluster.sandbox.ports import take_ports\n"
    "taken = take_ports(19)\nprint(taken.first, flush=True)\nsys.stdin.read()\n"
)


def of(taken: ports.Ports) -> set[int]:
    return set(range(taken.first, taken.first + taken.count))


def test_two_that_look_at_the_same_moment_get_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ports look free to both, as they do before any daemon listens, and both begin to look at the same place."""
    monkeypatch.setattr(ports, "in_use", lambda _port: False)
    with ports.take_ports(19) as one, ports.take_ports(19) as other, ports.take_ports(3) as third:
        assert not of(one) & of(other)
        assert not of(third) & (of(one) | of(other))
        first = one.first
    with ports.take_ports(19) as again:
        assert again.first == first, "given back"


def test_processes_that_start_together_get_different_ports_and_one_that_is_killed_gives_its_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    argv = [sys.executable, "-c", TAKES]
    started = [
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    try:
        firsts = [int(process.stdout.readline()) for process in started if process.stdout is not None]
        taken = [set(range(first, first + 19)) for first in firsts]
        everybodys = set[int]().union(*taken)
        assert len(everybodys) == 3 * 19
        monkeypatch.setattr(
            "os.getpid", lambda: started[0].pid
        )  # this process begins to look where the first one did
        with ports.take_ports(19) as here:
            assert not of(here) & everybodys
        started[0].kill()
        started[0].wait()
        with ports.take_ports(19) as here:
            assert here.first == firsts[0]
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_a_port_that_somebody_listens_on_is_not_in_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    with ports.take_ports(4) as free:
        first = free.first
    with socket.socket() as theirs:
        theirs.bind(("127.0.0.1", first + 3))
        theirs.listen()
        with ports.take_ports(4) as other:
            assert first + 3 not in of(other)


@pytest.mark.parametrize(
    "used", [lambda _port: True, lambda port: port % 7 == 0], ids=["all", "every seventh"]
)
def test_where_none_are_left_it_is_said(monkeypatch: pytest.MonkeyPatch, used: Callable[[int], bool]) -> None:
    monkeypatch.setattr(ports, "in_use", used)
    with pytest.raises(ClusterError, match="no 8 consecutive free TCP ports between 20000 and 32000"):
        ports.take_ports(8)
    monkeypatch.setattr(ports, "in_use", lambda _port: False)
    with ports.take_ports(8) as whole:
        assert whole.first + 8 <= ports.HIGHEST, "what was looked at is free again"
