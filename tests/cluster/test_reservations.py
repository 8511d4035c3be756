"""Slurm's reservations, from lines that 22.05.8 printed; and on a private Slurm."""

from __future__ import annotations

import time

import pytest

from scavenger.cluster.model import Reservation
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm import commands
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.errors import ClusterUnavailable

MAINTENANCE = (
    "ReservationName=maint1 StartTime=1795292613 EndTime=1795299813 Duration=02:00:00 Nodes=node[1-2] NodeCnt=2 CoreCnt=128 "
    "Features=(null) PartitionName=(null) Flags=MAINT,IGNORE_JOBS,SPEC_NODES TRES=cpu=128 Users=root Groups=(null) "
    "Accounts=(null) Licenses=(null) State=INACTIVE BurstBuffer=(null) Watts=n/a MaxStartDelay=(null)\n"
)
COURSE = (
    "ReservationName=course StartTime=1795289193 EndTime=1795296393 Duration=02:00:00 Nodes=node0 NodeCnt=1 CoreCnt=64 Features=(null) "
    "PartitionName=reserved Flags= TRES=cpu=64 Users=root Groups=(null) Accounts=(null) Licenses=(null) State=INACTIVE BurstBuffer=(null) "
    "Watts=n/a MaxStartDelay=(null)\n"
)


def test_reservations_are_read_by_name() -> None:
    assert commands.parse_reservations(MAINTENANCE + COURSE) == (
        Reservation("course", frozenset({"node0"}), 1795289193.0, 1795296393.0),
        Reservation("maint1", frozenset({"node1", "node2"}), 1795292613.0, 1795299813.0, maintenance=True),
    )
    assert commands.parse_reservations("No reservations in the system\n") == ()
    assert commands.parse_reservations(COURSE.replace("Nodes=node0", "Nodes="))[0].nodes == frozenset()
    evil = COURSE.rstrip("\n") + " Comment=moved from\nthe old Nodes=node9 EndTime=1\n"
    assert commands.parse_reservations(evil + MAINTENANCE) == commands.parse_reservations(
        COURSE + MAINTENANCE
    ), "later releases print a comment"


@pytest.mark.parametrize(
    "text",
    [
        "",
        COURSE.rstrip("\n"),
        COURSE.replace("EndTime=1795296393 ", ""),
        COURSE.replace("1795289193", "Unknown"),
    ],
)
def test_half_an_answer_is_none(text: str) -> None:
    with pytest.raises(ClusterUnavailable):
        commands.parse_reservations(text)


@pytest.mark.slurm
def test_a_reservation_of_a_real_slurm_is_in_the_view(slurm_sandbox: SlurmSandbox) -> None:
    name = f"r{time.monotonic_ns()}"
    asked = ("starttime=now+60minutes", "duration=120", "user=root", "flags=maint,ignore_jobs", "nodes=node1")
    slurm_sandbox.run("scontrol", "create", "reservation", f"reservationname={name}", *asked)
    try:
        found = {one.name: one for one in SlurmCluster(slurm_sandbox.env).view().reservations}
    finally:
        slurm_sandbox.run("scontrol", "delete", f"reservationname={name}")
    assert found[name].nodes == {"node1"}
    assert found[name].maintenance
    assert 3000 < found[name].start - time.time() < 4200
