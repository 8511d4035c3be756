"""Connections that prove no key are bounded, per address and in all, and none that is quick is ended for them."""

from __future__ import annotations

import resource
import subprocess
import sys

from scavenger.host import descriptors
from scavenger.router.edge.handshakes import (
    ADDRESS_SHARE,
    GRACE_S,
    MOST,
    HandshakeLimits,
    Handshakes,
    limits_for,
)

LIMITS = HandshakeLimits(in_all=8, per_address=3, last_fd=900)


def test_one_address_too_many_ends_its_oldest_and_leaves_others_alone() -> None:
    table = Handshakes(LIMITS)
    assert [table.accepted(fd, "a", 0.0) for fd in (10, 11, 12)] == [(), (), ()]
    assert table.accepted(20, "b", 0.1) == ()
    assert table.accepted(13, "a", GRACE_S) == (10,)
    assert 20 in table
    assert len(table) == 4


def test_within_its_grace_no_connection_is_ended_for_a_newer_one() -> None:
    table = Handshakes(LIMITS)
    for fd in (10, 11, 12):
        table.accepted(fd, "a", 0.0)
    assert table.accepted(13, "a", GRACE_S - 0.1) == (13,)
    assert 13 not in table
    assert table.accepted(14, "a", GRACE_S) == (10,)


def test_many_addresses_are_bounded_in_all() -> None:
    table = Handshakes(LIMITS)
    for n in range(8):
        assert table.accepted(10 + n, f"host{n}", 0.0) == ()
    assert table.accepted(30, "host30", GRACE_S) == (10,)
    assert len(table) == LIMITS.in_all


def test_who_proved_a_key_or_left_counts_no_more() -> None:
    table = Handshakes(LIMITS)
    for fd in range(10, 100):
        assert table.accepted(fd, "a", 0.0) == ()
        table.forget(fd)
    assert len(table) == 0
    table.accepted(10, "a", 0.0)
    assert table.accepted(10, "b", 1.0) == (), "the number of a connection that is gone"
    assert len(table) == 1


def test_an_owner_has_so_many_connections_and_no_more_until_one_is_gone() -> None:
    table = Handshakes(HandshakeLimits(in_all=8, per_address=8, last_fd=900, per_owner=2))

    def connects(fd: int, owner: str) -> bool:
        assert table.accepted(fd, "a", 0.0) == ()
        return table.proved(fd, owner)

    assert [connects(fd, "ada") for fd in (10, 11, 12)] == [True, True, False]
    assert connects(13, "bob"), "another owner"
    table.forget(10)
    assert connects(14, "ada")
    assert not connects(15, "ada")
    assert connects(11, "ada"), "the number of one of hers that is gone"


def test_the_daemon_s_own_descriptors_are_no_connection_s() -> None:
    table = Handshakes(LIMITS)
    assert table.accepted(900, "a", 0.0) == (900,)
    table.accepted(10, "b", 0.0)
    assert table.accepted(901, "a", GRACE_S) == (10,), "an old one that proved nothing makes room"


def test_limits_leave_the_reserve_and_grow_with_what_is_allowed() -> None:
    small, large = (
        limits_for(1024, descriptors.reserved(1024)),
        limits_for(65536, descriptors.reserved(65536)),
    )
    assert small.last_fd == 1024 - 256
    assert small.in_all == small.last_fd // 2
    assert large.in_all == MOST
    assert large.per_address == MOST // ADDRESS_SHARE
    tiny = limits_for(64, descriptors.reserved(64))
    assert tiny.in_all + descriptors.reserved(64) < 64


def test_the_soft_limit_is_raised_to_the_hard_one_and_little_is_warned_of() -> None:
    program = (
        "import resource\nfrom scavenger.host import descriptors\nresource.setrlimit(resource.RLIMIT_NOFILE, (256, 2048))\n"
        "print(descriptors.raise_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE), descriptors.now().used > 2)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "2048 2048 2048 True"
    assert "few open files" in done.stdout + done.stderr
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= descriptors.limit()
