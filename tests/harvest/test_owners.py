"""What one owner's runs may hold together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scavenger.config.site import OwnersSection
from scavenger.policy.fleet_size import Demand, within_owners


def demand(run_id: int, owner: str, engines: int, gpus: int = 1) -> Demand:
    return Demand(run_id, f"run-{run_id}", engines, gpus, "useful", owner=owner)


def test_an_owners_engines_are_dealt_to_the_runs_that_have_fewest() -> None:
    asked = [demand(1, "ada", 9), demand(2, "ada", 2, gpus=2), demand(3, "bob", 50)]
    owners = OwnersSection(max_gpus=7, max_gpus_of={"bob": 100})
    given_ = within_owners(asked, owners.most_gpus)
    assert [want.engines for want in given_] == [3, 2, 50], "1 + 2, 1 + 2, then one more of one GPU"
    assert given_[0].reason == "useful; its owner may have 3 of 9 (owners.max_gpus)"
    assert given_[1:] == asked[1:]
    assert within_owners(asked, OwnersSection().most_gpus) == asked
    assert [d.engines for d in within_owners(asked, OwnersSection(max_gpus_of={"ada": 0}).most_gpus)] == [
        0,
        0,
        50,
    ]


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 12), st.integers(1, 8)), max_size=6),
    st.integers(0, 20),
)
def test_no_owner_holds_more_and_nothing_that_fits_is_withheld(
    runs: list[tuple[str, int, int]], most: int
) -> None:
    asked = [demand(number, *run) for number, run in enumerate(runs)]
    found = within_owners(asked, lambda owner: most if owner == "a" else None)
    hers = [(want, was) for want, was in zip(found, asked, strict=True) if was.owner == "a"]
    left = most - sum(want.engines * want.gpus_per_engine for want, _ in hers)
    assert left >= 0
    assert all(want.engines == was.engines or want.gpus_per_engine > left for want, was in hers)
    assert [want for want in found if want.owner == "b"] == [was for was in asked if was.owner == "b"]
