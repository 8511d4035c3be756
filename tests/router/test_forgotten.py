"""What the core forgets is freed at once: the collector, which stops the daemon, has nothing of it to find."""

from __future__ import annotations

import gc

from scavenger.router.core.state import Group, Sample
from tests.router.moves import consumed_step


def alive() -> int:
    # by type(): isinstance asks each object for its __class__, which a deprecated one of torch's answers with a warning
    return sum(type(x) in (Group, Sample) for x in gc.get_objects())


def test_a_committed_step_s_samples_are_freed_without_the_collector() -> None:
    gc.collect()
    before = alive()
    gc.disable()
    try:
        bench = consumed_step()
        assert len(bench.router.core.samples) == 0
        assert alive() <= before, "others may end meanwhile"
    finally:
        gc.enable()
