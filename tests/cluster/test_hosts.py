"""The site of containers: its configuration, which is pure; and that a machine which cannot have it says why."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from scavenger.cluster.sandbox import hosts
from scavenger.errors import ClusterUnavailable


def test_every_node_of_slurm_is_a_host_with_an_address_of_its_own() -> None:
    text = hosts.slurm_conf()
    nodes = [host for host in hosts.SITE if "slurmd" in host.units]
    assert len({host.address for host in hosts.SITE}) == len(hosts.SITE)
    for host in nodes:
        assert f"NodeName={host.name} NodeAddr={host.address} " in text
    assert "PartitionName=scavenge Nodes=gpu1,gpu2,gpu3 PriorityTier=1 PreemptMode=REQUEUE" in text
    assert "PartitionName=reserved Nodes=train1,train2 " in text
    assert "AccountingStorageType=accounting_storage/slurmdbd" in text


def test_a_site_without_a_database_host_has_no_accounting() -> None:
    site = [host for host in hosts.SITE if host.name != "dbd"]
    assert "AccountingStorageType=accounting_storage/none" in hosts.slurm_conf(site)
    assert " dbd" not in hosts.hosts_file(site)


@pytest.mark.parametrize(
    ("release", "said"), [("22.05.8", "CgroupAutomount=no\n"), ("24.11.5", "CgroupPlugin=disabled\n")]
)
def test_each_release_of_slurm_is_told_in_its_words_to_leave_cgroups_alone(release: str, said: str) -> None:
    assert hosts.cgroup_conf(release) == said


def test_a_user_who_is_not_root_is_told_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterUnavailable, match="needs root and systemd-nspawn"):
        hosts.SiteSandbox(tmp_path, tmp_path / "site").start()
    assert not (tmp_path / "site").exists(), "nothing was made"


def test_the_small_site_keeps_its_accounting_on_the_controller_s_host() -> None:
    text = hosts.slurm_conf(hosts.SMALL_SITE)
    assert "AccountingStorageHost=10.88.0.10\n" in text
    assert "PartitionName=scavenge Nodes=gpu1,gpu2 " in text


def test_a_root_file_system_that_is_being_made_boots_no_site(tmp_path: Path) -> None:
    site = hosts.SiteSandbox(tmp_path / "base", tmp_path / "site")
    with (tmp_path / "base.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ClusterUnavailable, match="is being made"):
            site._lock_base()
    site.stop()
    site._lock_base()
    site.stop()
