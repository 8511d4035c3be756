"""What one owner's runs may hold together."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from scavenger.cluster.model import JobState
from scavenger.config.site import OwnersSection
from scavenger.harvest.decide.decide import (
    DrainKind,
    HarvestCode,
    HarvestDecision,
    OurJob,
    Submit,
    allot,
    decide,
)
from scavenger.harvest.harvester import Harvester
from scavenger.ledger import records as rec
from scavenger.policy.fleet_size import Demand, within_owners
from tests.harvest.test_yielding import LIMITS, NOW, engine, listed
from tests.harvest.views import view
from tests.harvest.world import World, running, until


def demand(run_id: int, owner: str, engines: int, gpus: int = 1) -> Demand:
    return Demand(run_id, f"run-{run_id}", engines, gpus, "useful", owner=owner)


def test_an_owners_engines_are_dealt_to_the_runs_that_have_fewest() -> None:
    asked = [demand(1, "ada", 9), demand(2, "ada", 2, gpus=2), demand(3, "bob", 50)]
    owners = OwnersSection(max_gpus=7, max_gpus_of={"bob": 100})
    given_ = within_owners(asked, owners.most_gpus)
    assert [want.engines for want in given_] == [3, 2, 50], "1 + 2, 1 + 2, then one more of one GPU"
    assert given_[0].reason == "useful; its owner may have 3 of 9 (owners.max_gpus)"
    assert [want.reason for want in given_[1:]] == ["useful", "useful"]
    assert [want.owner_gpus for want in given_] == [7, 7, 100], "whoever submits counts those that leave"
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


def played(*leaving: OurJob, most: int | None = 2, engines: int = 2) -> HarvestDecision:
    """Ada's run 1 wants engines and has those that leave; bob's run 2 wants two."""
    asked = [demand(1, "ada", engines), demand(2, "bob", 2)]
    wanted = within_owners(asked, lambda owner: most if owner == "ada" else None)
    return decide(view(NOW, [listed(one) for one in leaving]), wanted, list(leaving), LIMITS, NOW)


def submitted(decision: HarvestDecision) -> dict[str, int]:
    return Counter(action.owner for action in decision.actions if isinstance(action, Submit))


def test_engines_that_leave_count_against_their_owners_limit_and_stop_no_other_owner() -> None:
    leaving = [engine(n, owner="ada", drain_kind=DrainKind.DRAINING, asked_at=NOW) for n in (1, 2)]
    assert submitted(played()) == {"ada": 2, "bob": 2}
    assert submitted(played(*leaving)) == {"bob": 2}
    assert submitted(played(leaving[0])) == {"ada": 1, "bob": 2}
    assert submitted(played(*leaving, most=None)) == {"ada": 2, "bob": 2}


def test_engines_of_a_run_that_ended_count_too_and_the_decision_says_why_nothing_begins() -> None:
    left = [
        replace(engine(n, owner="ada", drain_kind=DrainKind.DRAINING, asked_at=NOW), run_id=9) for n in (1, 2)
    ]
    wanted = within_owners([demand(1, "ada", 2)], lambda _: 2)
    decision = decide(view(NOW, [listed(one) for one in left]), wanted, left, LIMITS, NOW)
    assert (submitted(decision), decision.code) == ({}, HarvestCode.MAX_PER_OWNER)
    assert "owner ada has 2 of 2 GPUs (owners.max_gpus; draining ones count)" in decision.reason


def test_the_limit_is_in_force_in_a_harvester_and_changes_live(world: World) -> None:
    def limited(harvester: Harvester, most: int) -> None:
        owners = OwnersSection(max_gpus=most)
        public = world.state_dir.parent / "public"
        daemon = harvester.config.daemon.model_copy(update={"public_dir": public})
        harvester.reconfigure(harvester.config.model_copy(update={"owners": owners, "daemon": daemon}))

    async def play() -> None:
        world.demand = [demand(1, "ada", 3), demand(2, "ada", 3)]
        harvester = world.harvester(max_pending=4)
        limited(harvester, 2)
        async with running(harvester, cancel=True):
            await until("two run", lambda: len(world.of(rec.AllocationStarted)) == 2)
            polls = len(world.of(rec.ClusterPolled))
            await until("it goes on", lambda: len(world.of(rec.ClusterPolled)) > polls + 5)
            assert len(world.jobs()) == 2
            assert {one.run_id for one in world.of(rec.JobIntended)} == {1, 2}, "the runs share it"
            limited(harvester, 3)
            await until("a third runs", lambda: len(world.jobs(JobState.RUNNING)) == 3)

    asyncio.run(play())


def test_an_owner_of_many_runs_gets_no_more_than_one_of_a_single_run() -> None:
    many = [demand(n, "ada", 4) for n in range(1, 5)]
    assert allot([*many, demand(5, "bob", 9)], 6) == {1: 1, 2: 1, 3: 1, 4: 0, 5: 3}
    assert allot([*many, demand(5, "bob", 1)], 6) == {1: 2, 2: 1, 3: 1, 4: 1, 5: 1}
    assert allot([*many, demand(5, "bob", 9)], 6, most_gpus=2) == {1: 1, 2: 0, 3: 0, 4: 0, 5: 1}


def test_an_engine_that_fits_no_node_takes_nobodys_turn() -> None:
    asked = [*(demand(n, "ada", 4, gpus=64) for n in range(1, 5)), demand(5, "bob", 2)]
    decision = decide(view(NOW), asked, [], LIMITS, NOW)
    assert submitted(decision) == {"bob": 2}
    alone = decide(view(NOW), asked[:1], [], LIMITS, NOW)
    assert "no node of partition scavenge has the 64 GPUs of an engine" in alone.reason


#: Engines of the run "broken" die at once, on whichever node.
DIES = """#!/bin/bash
# {{ key | quote }}
[ {{ run | quote }} = broken ] && exit 70
trap 'exit 0' TERM
while :; do sleep 0.05; done
"""


def test_an_owners_broken_run_neither_quarantines_nodes_nor_holds_up_another_owner(world: World) -> None:
    async def play() -> None:
        world.demand = [Demand(1, "broken", 2, 1, "useful", owner="ada")]
        async with running(world.harvester(DIES, backoff_s=0.2, quarantine_after=1, max_pending=4)):
            await until("its engines die on both nodes", lambda: len(world.events("engine_died")) >= 3)
            world.demand.append(Demand(2, "fine", 2, 1, "useful", owner="bob"))
            await until("the other's work", lambda: len(of_run(world, 2)) == 2)

    asyncio.run(play())
    ended = {event.subject for event in world.events("node_released")}
    assert {event.subject for event in world.events("node_quarantined")} <= ended, (
        "at most until the second node"
    )


def of_run(world: World, run_id: int) -> list[rec.AllocationStarted]:
    its = {intended.intent_id for intended in world.of(rec.JobIntended) if intended.run_id == run_id}
    return [one for one in world.of(rec.AllocationStarted) if one.intent_id in its]
