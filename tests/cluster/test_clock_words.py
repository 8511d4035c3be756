"""What Slurm says to a host whose clock is far off names no clock: our error does, with the remedy."""

from __future__ import annotations

import pytest

from scavenger.cluster.error_kind import CLOCK_REMEDY, ErrorKind
from scavenger.cluster.slurm import runner
from scavenger.doctor import collect
from scavenger.errors import ClusterUnavailable


@pytest.mark.parametrize(
    ("complaint", "kind", "said"),
    [
        (
            "slurm_load_jobs error: Zero Bytes were transmitted or received",
            ErrorKind.NO_REPLY,
            "this host's clock is over 300 s off the controller's",
        ),
        ("Munge decode failed: Expired credential", ErrorKind.AUTH, "clocks are over 300 s apart"),
        ("Munge decode failed: Rewound credential", ErrorKind.AUTH, "is ahead of the other's"),
    ],
)
def test_a_refused_credential_is_told_as_a_clock_that_is_off(
    complaint: str, kind: ErrorKind, said: str
) -> None:
    failed = runner.failure("squeue", complaint)
    assert isinstance(failed, ClusterUnavailable)
    assert (failed.error_kind, failed.remedy) == (kind, CLOCK_REMEDY)
    assert failed.cause.startswith(f"squeue: {complaint} (")
    assert said in failed.cause


def test_other_complaints_stand_as_they_are() -> None:
    assert runner.explained("Invalid account") == "Invalid account"
    assert runner.failure("sbatch", "Invalid account").remedy == ""


def test_doctor_says_it_too() -> None:
    words = "slurm_load_ctl_conf error: Zero Bytes were transmitted or received"
    answer = collect.ask(["sh", "-c", f"echo '{words}' >&2; exit 1"], {"PATH": "/usr/bin:/bin"}, 20.0)
    assert "clock is over 300 s off" in answer.error
    assert answer.remedy == CLOCK_REMEDY
