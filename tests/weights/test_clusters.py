"""A version crosses a slow link to another cluster once: real processes, in network namespaces whose links are bounded by Linux."""

from __future__ import annotations

import os
import shutil

import pytest

from benchmarks.clusters import Hosts, site
from benchmarks.weights import MIB

ACROSS, INSIDE, NBYTES = 100.0, 2000.0, 48 * MIB
ALONE_S = NBYTES * 8 / (ACROSS * 1e6)  # one engine takes no less

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("tc") is None, reason="needs root and iproute2"
)


@pytest.mark.timeout(120)
def test_a_cluster_of_eight_engines_has_a_version_nearly_as_soon_as_one_would_and_it_crosses_once() -> None:
    with Hosts(2, INSIDE, ACROSS) as hosts, site(hosts, NBYTES, 4) as made:
        whole = made.version()
    assert whole.nbytes <= 1.05 * NBYTES
    assert whole.seconds <= 1.3 * ALONE_S


@pytest.mark.long
@pytest.mark.timeout(180)
def test_another_engine_crosses_where_the_first_is_lost_and_takes_what_the_others_have() -> None:
    with Hosts(2, INSIDE, ACROSS) as hosts, site(hosts, NBYTES, 4) as made:
        whole = made.version(lose=True)
        assert len(made.engines) == 7
        again = made.version()
    assert whole.nbytes <= 1.15 * NBYTES
    assert again.nbytes <= 1.05 * NBYTES, "as deltas, or whole where its cores are too few"
