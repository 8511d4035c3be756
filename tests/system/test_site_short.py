"""The site in CI: seven hosts, the shipped unit under systemd, two ranks on two hosts, engines on two more; the result of one host.

What lasts longer is in test_site_sandbox.py (faults), test_site_unit.py (systemd) and test_site_users.py (users).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scavenger.cluster.sandbox.hosts import SiteSandbox, wait_for
from tests.system import play
from tests.system.site_run import (
    ask_one,
    assert_hardened,
    result,
    start_daemon,
    start_deterministic,
    start_postgres,
    trained_on,
    unit,
)

#: The root file system is made once, in 5 to 8 minutes (scripts/site-sandbox); with it this takes 2 to 3.
pytestmark = [pytest.mark.site, pytest.mark.mpi, pytest.mark.timeout(1500)]


def test_a_run_over_seven_hosts_gives_the_result_of_one_host(
    small_site: SiteSandbox, small_model: Path, undisturbed: play.Result, tmp_path: Path
) -> None:
    head = small_site["head"]
    start_daemon(head, start_postgres(small_site["pg"]))
    assert_hardened(head)
    training = start_deterministic(small_site, small_model, steps=12)
    wait_for(
        "tokens of engines on both hosts that were trained on, and four steps",
        lambda: training.reached(4) and trained_on(head) == {"gpu1", "gpu2"},
        170,
    )
    ranks = head.run("squeue", "-h", "-j", training.job, "-o", "%N").strip()
    assert ranks == "train[1-2]", "a rank on each of two hosts"
    training.cut_short()
    found = result(head)
    assert found == play.as_long(undisturbed, found, small_model, tmp_path)
    left = "SELECT count(*) FROM workers WHERE left_at IS NULL AND kind = 'reserved'"
    wait_for("the end of the reserved engines", lambda: ask_one(head, left) == 0, 60)
    assert unit(head, "NRestarts") == "0"
