"""Why there are no more engines, as every user of the site may read it: no name of a run, an owner, a job or a node."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scavenger.cluster.model import JobState
from scavenger.harvest.decide.actions import BlackoutTime, HarvestCode, HarvestLimits, OurJob
from scavenger.harvest.decide.decide import decide
from scavenger.harvest.decide.public_reason import NAMELESS, WORDS
from scavenger.policy.fleet_size import Demand
from tests.harvest.flat_limits import limits_with
from tests.harvest.views import SHARED, job, node, ours, view

NOW = 1000.0
WANTED = Demand(1, "planted-run", 4, 1, "planted-run has 4 planted prompts", owner="planted-owner")
LIMITS = limits_with("scavenge", max_engines=8, max_pending=4)
WAITS = OurJob("scv-0000000000000001", 1, 4711, 1, True)
LATE = BlackoutTime(NOW - 1.0, NOW + 99.0, "planted-owner shows the demo")


@pytest.mark.parametrize(
    ("code", "demand", "limits"),
    [
        (HarvestCode.STALE_VIEW, WANTED, limits_with(LIMITS, stale_s=-1.0)),
        (HarvestCode.NO_DEMAND, replace(WANTED, engines=0), LIMITS),
        (HarvestCode.NOT_ENCRYPTED, WANTED, replace(LIMITS, beyond_link=True)),
        (HarvestCode.MAX_ENGINES, WANTED, limits_with(LIMITS, max_engines=0)),
        (HarvestCode.MAX_GPUS, WANTED, limits_with(LIMITS, max_gpus=0)),
        (HarvestCode.MAX_PENDING, WANTED, limits_with(LIMITS, max_pending=0)),
        (HarvestCode.MAX_PER_USER, WANTED, limits_with(LIMITS, max_gpus_per_user=0)),
        (HarvestCode.MAX_PER_OWNER, replace(WANTED, owner_gpus=0), LIMITS),
        (HarvestCode.PREEMPTIONS, WANTED, limits_with(LIMITS, max_preemptions_per_hour=0)),
        (HarvestCode.PARTITION_DOWN, WANTED, replace(LIMITS, partition="other")),
        (
            HarvestCode.BACKOFF,
            WANTED,
            limits_with(LIMITS, not_before=NOW + 1.0, not_before_reason="sbatch refused planted-run"),
        ),
        (HarvestCode.BLACKOUT, WANTED, replace(LIMITS, blackouts=(LATE,))),
        (HarvestCode.STOPPED, WANTED, limits_with(LIMITS, stop="planted-user: scavenger drain")),
        (HarvestCode.HIDDEN, WANTED, limits_with(LIMITS, hidden="planted-user sees no job", blind=True)),
        (
            HarvestCode.QUARANTINE,
            WANTED,
            limits_with(LIMITS, quarantined=tuple((name, "planted fault") for name in SHARED)),
        ),
        (HarvestCode.HEADROOM, WANTED, limits_with(LIMITS, headroom_gpus=12)),
        (HarvestCode.PER_NODE, WANTED, limits_with(LIMITS, max_gpus_per_node=0)),
    ],
)
def test_the_reason_that_all_may_read_has_no_name(
    code: HarvestCode, demand: Demand, limits: HarvestLimits
) -> None:
    decision = decide(view(NOW, [], [node(name) for name in SHARED]), [demand], [], limits, NOW)
    assert decision.code is code
    why = decision.public.split("; ")[-1]
    assert why == WORDS.get(code, why)
    assert not any(word in decision.public for word in ("planted", *SHARED))
    if code in NAMELESS:
        assert why in decision.reason, "it is status's own"
    elif code not in (HarvestCode.HEADROOM, HarvestCode.PER_NODE, HarvestCode.NOT_ENCRYPTED):
        assert any(word in decision.reason for word in ("planted", *SHARED)), "else this shows nothing"


def test_a_job_that_slurm_holds_back_is_not_named() -> None:
    listed = ours(WAITS.intent_id, 4711, JobState.PENDING, reason="QOSMaxGRESPerUser")
    cluster = view(NOW, [listed, job(5)], [node(name) for name in SHARED])
    decision = decide(cluster, [WANTED], [WAITS], LIMITS, NOW)
    assert decision.code is HarvestCode.ACCOUNT_LIMIT
    assert "4711" in decision.reason
    assert decision.public.endswith(WORDS[HarvestCode.ACCOUNT_LIMIT])
    assert "4711" not in decision.public


def test_every_code_that_ends_a_decision_has_words() -> None:
    codes = list(HarvestCode)
    ends = {*codes[: codes.index(HarvestCode.WANTED)]} - {HarvestCode.MAX_ENVIRONMENTS}
    assert ends | {HarvestCode.STOPPED} == WORDS.keys() | NAMELESS
    assert WORDS.keys().isdisjoint(NAMELESS)
