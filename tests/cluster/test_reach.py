"""A daemon that announces each host's own address to nodes of other hosts is refused, with what to do about it."""

from __future__ import annotations

import socket

import pytest

from scavenger.cluster import reach
from scavenger.cluster.model import NodeHost
from scavenger.cluster.slurm import commands
from scavenger.errors import ConfigError
from scavenger.host import addresses

NODES = frozenset({"gpu1", "gpu2", "login1"})
HOSTS = {name: NodeHost(name, f"10.0.0.{n}") for n, name in enumerate(sorted(NODES))}
PRIVATE = {name: NodeHost("somewhere.example", "127.0.0.1") for name in NODES}  # several slurmd of one host


def test_nodes_of_other_hosts_are_told_by_name_or_address() -> None:
    assert reach.elsewhere(HOSTS, NODES, "login1.cluster.example") == ["gpu1", "gpu2"]
    assert reach.elsewhere(PRIVATE, NODES, "login1") == [], "slurmctld finds them on its own loopback"
    assert reach.elsewhere({"node1": NodeHost("login1", "10.0.0.9")}, {"node1"}, "login1") == []
    other_name = {"linux0": NodeHost("linux0", "10.0.0.7")}
    assert reach.elsewhere(other_name, {"linux0"}, "login1") == ["linux0"]
    assert reach.elsewhere(other_name, {"linux0"}, "login1", {"10.0.0.7"}) == [], "an address of this host"
    assert reach.elsewhere({}, NODES, "login1") == [], "nothing is known of them"
    assert reach.elsewhere(HOSTS, {"gpu2"}, "login1") == ["gpu2"], "of the partition alone"


@pytest.mark.parametrize(
    ("listen", "advertise", "said"),
    [
        ("127.0.0.1", "", "daemon.listen = '127.0.0.1' is each host's own address, and gpu1 and 1 more"),
        ("localhost", "", "daemon.listen = 'localhost'"),
        ("0.0.0.0", "localhost", "daemon.advertise = 'localhost'"),
        ("0.0.0.0", "127.0.1.1", "daemon.advertise = '127.0.1.1'"),
        ("127.1", "", "daemon.listen = '127.1'"),
        ("0.0.0.0", "0x7f.1", "daemon.advertise = '0x7f.1'"),
        ("0.0.0.0", "2130706433", "daemon.advertise = '2130706433'"),
        ("10.1", "", ""),
        ("127.0.0.1", "login1", ""),
        ("0.0.0.0", "", ""),
        ("0.0.0.0", "login1-ib", ""),
        ("10.0.0.2", "", ""),
    ],
)
def test_a_loopback_address_is_refused_where_nodes_are_elsewhere(
    listen: str, advertise: str, said: str
) -> None:
    others = reach.elsewhere(HOSTS, NODES, "login1")
    assert said in reach.unreachable(listen, advertise, "login1", others)
    assert bool(reach.unreachable(listen, advertise, "login1", others)) == bool(said)
    assert reach.unreachable(listen, advertise, "login1", []) == "", "a private Slurm on one host"
    if said:
        with pytest.raises(ConfigError) as refused:
            reach.check(listen, advertise, "login1", others)
        assert 'listen = "0.0.0.0"' in refused.value.remedy


@pytest.mark.parametrize("listen", ["127.0.0.1", "localhost", "127.1"])
def test_a_daemon_behind_a_proxy_is_doubted_and_not_refused(listen: str) -> None:
    others = reach.elsewhere(HOSTS, NODES, "login1")
    said = reach.doubted(listen, "gateway", "login1", others)
    assert f"daemon.listen = {listen!r} binds this host's loopback alone" in said
    assert "connect to gateway, where a proxy or a tunnel must take them to the daemon" in said
    reach.check(listen, "gateway", "login1", others)
    assert reach.doubted(listen, "gateway", "login1", []) == "", "a private Slurm on one host"
    assert reach.doubted(listen, "127.0.0.1", "login1", others) == "", "that is refused"
    assert reach.doubted("0.0.0.0", "gateway", "login1", others) == ""


def test_addresses_of_this_host_are_known_as_such() -> None:
    asked = ["127.0.0.1", "192.0.2.77", "198.51.100.1", "no address", "", "127.1", "::1", "2001:db8::1"]
    assert addresses.own(asked) - {"::1"} == {"127.0.0.1"}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        try:
            udp.connect(("192.0.2.77", 9))
        except OSError:
            pytest.skip("this host has no network but loopback")
        outward = udp.getsockname()[0]
    assert addresses.own([outward]) == {outward}


def test_what_scontrol_says_of_a_node_s_host_is_read() -> None:
    line = (
        "NodeName=gpu1 Arch=x86_64 NodeAddr=10.0.0.4 NodeHostName=gpu1.example Version=24.11 "
        "Comment=NodeAddr=127.0.0.1\nNodeName=gpu2 NodeAddr=(null) NodeHostName=(null)\n"
    )
    assert commands.parse_node_hosts(line) == {"gpu1": NodeHost("gpu1.example", "10.0.0.4")}
