"""What bubblewrap is asked for: mounts in their order, releases that it takes, the system calls that a box refuses."""

from __future__ import annotations

import itertools
import struct
from pathlib import PurePosixPath

import pytest

from scavenger.errors import ConfigError
from trainer.sandbox import filter as seccomp
from trainer.sandbox.plan import Limits, Plan, arguments, candidates, check_version, environment, mounts


def test_a_hidden_folder_is_empty_though_it_lies_in_one_that_is_readable() -> None:
    plan = Plan(Limits(), ("/p/you/code", "/p/you/code/out/data"), ("/p/you/code/out", "/p/you/keys"))
    found = mounts(plan, {path: path for path in ("/usr", *plan.readable, *plan.hidden)})
    assert found == [
        ("--ro-bind", "/usr"),
        ("--ro-bind", "/p/you/code"),
        ("--tmpfs", "/p/you/code/out"),
        ("--ro-bind", "/p/you/code/out/data"),
    ], "what is in no bound folder is not there anyway"


def test_a_folder_of_the_run_cannot_be_made_readable() -> None:
    plan = Plan(Limits(), ("/p/out",), ("/p/out",))
    with pytest.raises(ConfigError, match="which no box may see"):
        mounts(plan, {"/p/out": "/p/out"})


def test_a_link_to_a_readable_folder_is_a_link_so_that_what_is_hidden_has_no_second_name() -> None:
    plan = Plan(Limits(), ("/data/proj", "/data/proj/sub", "/code/link"), ("/data/proj/out", "/gpfs/code"))
    real = {path: path.replace("/data", "/gpfs/data") for path in ("/data/proj", "/data/proj/sub")}
    real |= {"/data/proj/out": "/gpfs/data/proj/out", "/bin": "/usr/bin", "/usr": "/usr"}
    assert mounts(plan, real) == [
        ("--symlink", "/usr/bin", "/bin"),
        ("--ro-bind", "/usr"),
        ("--symlink", "/gpfs/data/proj", "/data/proj"),
        ("--ro-bind", "/usr/bin"),
        ("--ro-bind", "/gpfs/data/proj"),
        ("--tmpfs", "/gpfs/data/proj/out"),
        ("--ro-bind", "/gpfs/data/proj/sub"),
    ], "what lies behind a link needs none of its own"
    with pytest.raises(ConfigError, match="/code/link is a folder of the run"):
        mounts(plan, {"/code/link": "/gpfs/code", "/gpfs/code": "/gpfs/code"})


def test_nothing_of_the_host_is_writable_and_there_is_no_network() -> None:
    plan = Plan(Limits(disk_mb=7), ("/data",))
    argv = arguments(
        plan, {"/usr": "/usr", "/data": "/data"}, ["program"], filter_fd=3, passwd_fd=4, group_fd=5
    )
    assert "--bind" not in argv
    assert [argv[at : at + 3] for at, one in enumerate(argv) if one == "--dev-bind"] == [
        ["--dev-bind", "/dev/full", "/dev/zero"]
    ]
    assert "--unshare-all" in argv
    assert "--share-net" not in argv
    assert ("--size", str(7 << 20)) in list(itertools.pairwise(argv))
    last = [place for place, one in enumerate(argv) if one == "--remount-ro"][-1]
    assert argv[last + 1] == "/", "the root itself, once everything has its place"
    assert argv[-2:] == ["--", "program"]


def test_no_folder_of_private_keys_is_among_what_every_box_reads() -> None:
    plan = Plan(Limits())
    bound = {one[-1] for one in mounts(plan, {path: path for path in candidates(plan)})}
    for key in (
        "/etc/ssl/private/host.key",
        "/etc/pki/tls/private/host.key",
        "/etc/pki/entitlement/1.pem",
        "/etc/munge/munge.key",
    ):
        assert not bound & {str(parent) for parent in PurePosixPath(key).parents}
    assert "/etc/ssl/certs" in bound


@pytest.mark.parametrize("said", ["bubblewrap 0.4.1", "bubblewrap 0.7.0", "", "what"])
def test_a_release_that_bounds_no_disk_is_refused(said: str) -> None:
    with pytest.raises(ConfigError, match="cannot bound") as found:
        check_version(said)
    assert "0.8" in found.value.remedy


def test_later_releases_are_taken() -> None:
    check_version("bubblewrap 0.8.0\n")
    check_version("bubblewrap 0.11.0")


def test_a_box_has_none_of_its_owner_s_secrets() -> None:
    found = environment(
        {"PATH": "/x", "OPENAI_API_KEY": "k", "HF_TOKEN": "t", "SCAVENGER_KEY": "s", "HOME": "/root"}
    )
    assert found["PATH"] == "/x"
    assert not {"OPENAI_API_KEY", "HF_TOKEN", "SCAVENGER_KEY"} & found.keys()
    assert found["HOME"] == "/tmp/home"


def verdict(machine: str, audit: int, number: int, *arguments: int) -> int:
    """The program's answer, by a machine of the five instructions that it has."""
    data = struct.pack("=IIQ6Q", number, audit, 0, *arguments, *[0] * (6 - len(arguments)))
    code = list(struct.iter_unpack("=HBBI", seccomp.program(machine)))
    at, loaded = 0, 0
    while True:
        what, yes, no, k = code[at]
        at += 1
        if what == 0x06:
            return int(k)
        if what == 0x20:
            [loaded] = struct.unpack_from("=I", data, k)
        elif what == 0x54:
            loaded &= k
        else:
            taken = loaded == k if what == 0x15 else loaded >= k
            at += yes if taken else no


@pytest.mark.parametrize("machine", sorted(seccomp.REFUSED))
def test_the_filter_refuses_what_its_table_names_and_nothing_else(machine: str) -> None:
    audit, refused = seccomp.REFUSED[machine]
    numbers = dict.fromkeys(refused.values(), seccomp.ENOSYS)
    numbers |= dict.fromkeys(seccomp.UNSUPPORTED[machine].values(), seccomp.EOPNOTSUPP)
    sockets = {seccomp.CHECKED_ARGUMENTS[machine][name] for name in ("socket", "socketpair")}
    for number in range(600):
        wanted = numbers.get(number, seccomp.ALLOW)
        assert verdict(machine, audit, number, int(number in sockets)) == wanted, number
    assert verdict(machine, audit, seccomp.X32 + 1) == seccomp.ENOSYS
    assert verdict(machine, audit ^ 1, 1) == seccomp.KILL


@pytest.mark.parametrize("machine", sorted(seccomp.REFUSED))
def test_the_filter_refuses_shared_memory_without_a_file_and_sockets_past_the_box_s_network(
    machine: str,
) -> None:
    audit, _ = seccomp.REFUSED[machine]
    numbers = seccomp.CHECKED_ARGUMENTS[machine]
    shared, private, validate, anonymous, fixed = 0x01, 0x02, 0x03, 0x20, 0x10
    for flags in (
        shared | anonymous,
        validate | anonymous,
        shared | anonymous | fixed,
        1 << 40 | shared | anonymous,
    ):
        assert verdict(machine, audit, numbers["mmap"], 0, 4096, 3, flags) == seccomp.EPERM
    for flags in (shared, validate, private | anonymous, private | anonymous | fixed):
        assert verdict(machine, audit, numbers["mmap"], 0, 4096, 3, flags) == seccomp.ALLOW
    for call in (numbers["socket"], numbers["socketpair"]):
        found = {
            family for family in range(64) if verdict(machine, audit, call, family, 1, 0) == seccomp.ALLOW
        }
        assert found == {1, 2, 10, 16}
        assert verdict(machine, audit, call, 40, 1, 0) == seccomp.EAFNOSUPPORT, "AF_VSOCK"
        assert verdict(machine, audit, call, 16, 3, 15) == seccomp.EAFNOSUPPORT, (
            "netlink beside NETLINK_ROUTE"
        )
