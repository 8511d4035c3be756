"""How answers of Slurm's commands, and their absence, become trouble with a name; with stand-ins for the commands."""

from __future__ import annotations

import os
import pwd
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scavenger.cluster.error_kind import ErrorKind
from scavenger.cluster.model import JobSpec, Node, Partition, PreemptMode
from scavenger.cluster.slurm.backend import PartitionCache, SlurmCluster
from scavenger.errors import ClusterError, ClusterUnavailable, SubmitUnknown


def site(folder: Path, timeout_s: float = 20.0, **commands: str) -> SlurmCluster:
    """A cluster whose commands are these shell scripts."""
    for name, body in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    return SlurmCluster({"PATH": os.pathsep.join([str(folder), os.environ["PATH"]])}, timeout_s)


@pytest.mark.parametrize(
    ("words", "error_kind"),
    [
        ("slurm_load_jobs error: Rate limit exceeded, please retry momentarily", ErrorKind.RATE_LIMITED),
        ("slurm_load_jobs error: Slurm backup controller in standby mode", ErrorKind.FAILING_OVER),
        ("slurm_load_jobs error: Protocol authentication error", ErrorKind.AUTH),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", ErrorKind.DOWN),
    ],
)
def test_a_complaint_is_named(tmp_path: Path, words: str, error_kind: ErrorKind) -> None:
    with pytest.raises(ClusterUnavailable) as caught:
        site(tmp_path, squeue=f"echo '{words}' >&2; exit 1").jobs()
    assert caught.value.error_kind == error_kind
    assert words in caught.value.cause


def test_a_refusal_is_no_trouble_that_passes(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="Access/permission denied") as caught:
        site(tmp_path, squeue="echo 'slurm_load_jobs error: Access/permission denied' >&2; exit 1").jobs()
    assert not isinstance(caught.value, ClusterUnavailable)


def test_a_command_that_a_signal_ends_is_trouble_that_passes(tmp_path: Path) -> None:
    """Its own memory limit, or a signal to all processes of a terminal: Slurm has refused nothing."""
    with pytest.raises(ClusterUnavailable, match="squeue was ended by SIGTERM") as caught:
        site(tmp_path, squeue="kill -TERM $$").jobs()
    assert caught.value.error_kind == ErrorKind.BACKEND


def test_a_signal_to_our_process_group_reaches_no_command(tmp_path: Path) -> None:
    """Ctrl-C ends the daemon in order, and does not make a look of its last moment fail."""
    said = tmp_path / "group"
    site(tmp_path, squeue=f"ps -o pgid= -p $$ > {said}").jobs()
    assert int(said.read_text()) != os.getpgrp()


def test_a_directory_of_users_that_fails_is_trouble_that_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An LDAP that is away has no entry for anybody."""

    def unknown(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(ClusterUnavailable, match=f"uid {os.getuid()}, and this host knows no such user"):
        site(tmp_path, scontrol="echo 'SLURM_VERSION = 24.11.5'").info()


@pytest.mark.parametrize(
    ("said", "error_kind"),
    [("", ErrorKind.NO_REPLY), ("squeue: error: Munge encode failed: Failed to access", ErrorKind.AUTH)],
)
def test_what_a_slow_command_had_said_by_then_names_the_trouble(
    tmp_path: Path, said: str, error_kind: ErrorKind
) -> None:
    with pytest.raises(ClusterUnavailable, match="gave no answer within") as caught:
        site(tmp_path, timeout_s=0.5, squeue=f"echo '{said}' >&2; exec sleep 60").jobs()
    assert caught.value.error_kind == error_kind
    assert said in caught.value.cause


def test_an_answer_that_is_none_is_partial_and_a_lost_submission_unknown(tmp_path: Path) -> None:
    cluster = site(
        tmp_path, squeue="echo hello", sbatch="echo 'Socket timed out on send/recv operation' >&2; exit 1"
    )
    with pytest.raises(ClusterUnavailable) as caught:
        cluster.jobs()
    assert caught.value.error_kind == ErrorKind.PARTIAL
    with pytest.raises(SubmitUnknown):
        cluster.submit(JobSpec(name="n", comment="c", partition="p", script="#!/bin/sh\n"))
    assert cluster.rpc.counts() == {"job_info": 1, "partition_info": 1, "submit": 1}, (
        "what failed was sent, and counts"
    )
    killed = site(tmp_path, sbatch="kill -9 $$")  # by the host's memory, perhaps after it had asked
    with pytest.raises(SubmitUnknown):
        killed.submit(JobSpec(name="n", comment="c", partition="p", script="#!/bin/sh\n"))


@pytest.mark.parametrize(
    ("said", "version"), [("slurm-wlm 22.05.8", "22.05.8"), ("slurm 24.11.0-0rc1", "24.11.0-0rc1")]
)
def test_the_commands_tell_their_version(tmp_path: Path, said: str, version: str) -> None:
    assert site(tmp_path, scontrol=f"echo {said}").version() == version
    with pytest.raises(ClusterUnavailable, match="no version"):
        site(tmp_path, scontrol="echo usage").version()


def test_partitions_are_remembered_for_a_while_and_not_longer_than_they_agree_with_the_nodes() -> None:
    now, asked = [0.0], []
    n1 = Node("n1", frozenset({"idle"}), frozenset(), "", 0, 0, 1, 0, 1, 0)
    both, one = (
        Partition("p", frozenset(names), 1, PreemptMode.OFF, 0.0, 0.0) for names in (("n1", "n2"), ("n1",))
    )
    kept, answers = PartitionCache(300.0, lambda: now[0]), [both, one, both]

    def ask() -> tuple[Partition, ...]:
        asked.append(now[0])
        return (answers[len(asked) - 1],)

    n2 = Node("n2", frozenset({"idle"}), frozenset(), "", 0, 0, 1, 0, 1, 0)
    assert kept.agreeing((n1, n2), ask) == (both,)
    now[0] = 299.0
    assert kept.agreeing((n1, n2), ask) == (both,)
    assert asked == [0.0]
    assert kept.agreeing((n1,), ask) == (one,), "a node was taken out of the configuration"
    now[0] = 600.0
    with pytest.raises(ClusterUnavailable, match="leaves out n2") as caught:
        kept.agreeing((n1,), ask)
    assert caught.value.error_kind == ErrorKind.PARTIAL
    assert asked == [0.0, 299.0, 600.0]


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open nothing more."""
    lowest_free = os.dup(0)
    os.close(lowest_free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_command_that_cannot_be_started_is_trouble_that_passes_and_a_submission_that_never_was(
    tmp_path: Path,
) -> None:
    cluster = site(tmp_path, squeue="exit 0", sbatch=f"touch {tmp_path}/ran")
    with (
        no_descriptors(),
        pytest.raises(ClusterUnavailable, match="squeue cannot be started: Too many open files") as caught,
    ):
        cluster.jobs()
    assert caught.value.error_kind == ErrorKind.BACKEND
    with no_descriptors(), pytest.raises(ClusterError, match="sbatch cannot be started") as refused:
        cluster.submit(JobSpec(name="n", comment="c", partition="p", script="#!/bin/sh\n"))
    assert not isinstance(refused.value, ClusterUnavailable | SubmitUnknown), "there is no job to look for"
    assert not (tmp_path / "ran").exists()
    assert cluster.jobs() == ()
