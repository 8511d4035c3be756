"""`router.share_prompts`: an engine that keeps prefixes prefills a prompt once for all samples of it that come to it."""

from __future__ import annotations

from collections import Counter

import pytest

from scavenger.router.core.state import RouterLimits
from tests.router.harness import Bench, specs
from tests.router.moves import W1, W2


def spread(*, share: bool) -> list[Counter[int]]:
    """Two groups of four meet two engines of four slots: how many of each group each engine has."""
    bench = Bench(limits=RouterLimits(share_prompts=share))
    bench.open()
    bench.publish()
    for conn in (W1, W2):
        bench.join(conn)
    bench.submit(groups=specs(2, 4))
    found = [Counter(lease.key.prompt for lease in bench.leases(conn)) for conn in (W1, W2)]
    assert [sum(counts.values()) for counts in found] == [4, 4]
    return found


@pytest.mark.parametrize(("share", "groups"), [(True, 1), (False, 2)])
def test_the_samples_of_a_prompt_meet_on_one_engine_where_the_site_asks_for_it(
    share: bool, groups: int
) -> None:
    assert [len(counts) for counts in spread(share=share)] == [groups, groups]
