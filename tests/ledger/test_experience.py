"""A run's past comes out of the ledger as it was written, on both databases."""

from __future__ import annotations

import json

import pytest

from scavenger.errors import LedgerError
from scavenger.ledger import records as r
from scavenger.ledger import store
from scavenger.ledger.read import history
from scavenger.policy.history import Flush, LeaseInterval, RunHistory, WeightLoad
from scavenger.policy.predictive.policy import Predictive
from tests.ledger.examples import T0, consumed, moved_group, preempted, prologue, written

LOADED = r.Event("weights_loaded", 1, "worker 1", "version 1", '{"pull_s": 0.5, "load_s": 0.25}', T0 + 5)
DECIDED = r.Decision("window", "open", "sorting", "why", "{}", T0 + 6, "opened")


def read(url: str, *records: r.Record, after_step: int = 0, most_chunks: int = 1 << 40) -> RunHistory:
    written(url, [prologue(), [LOADED, *records], moved_group(), preempted(), consumed()])
    engine = store.open_readonly(url)
    try:
        return history.read(engine, "sorting", after_step, most_chunks)
    finally:
        engine.dispose()


def test_steps_answers_leases_chunks_and_lives_are_read(url: str) -> None:
    past = read(url)
    (step,) = past.steps
    assert (step.step, step.cap, step.submitted_at, step.committed_at, step.metrics) == (
        1,
        64,
        T0,
        T0 + 12,
        {"loss": 0.5},
    )
    assert [
        (a.sample_id, a.index, a.length, a.prompt_tokens, a.finish, a.state, a.worker_id)
        for a in step.completions
    ] == [(11, 0, 9, 3, "stop", "consumed", 2), (12, 1, 4, 3, "length", "consumed", 2)]
    assert past.spans[0] == LeaseInterval(11, 1, 1, 0, 5, T0 + 6, T0 + 8)
    assert past.flushes == (
        Flush(11, 1, 0, 3, T0 + 7),
        Flush(12, 2, 0, 4, T0 + 7),
        Flush(11, 1, 3, 2, T0 + 7.5),
        Flush(11, 2, 5, 4, T0 + 9.5),
    )
    lost, stays = past.lives
    assert (lost.worker_id, lost.left_at, lost.preempted, lost.loads) == (
        1,
        T0 + 8,
        True,
        (WeightLoad(T0 + 5, 1, 0.5, 0.25),),
    )
    assert (stays.worker_id, stays.kind, stays.left_at, stays.preempted) == (2, "reserved", None, False)
    assert past.policy == "standard"


def test_a_run_whose_window_was_decided_ran_under_the_predicting_policy(url: str) -> None:
    assert read(url, DECIDED).policy == "predictive"


def test_how_many_engines_a_policy_aimed_at_last_is_read_whatever_was_asked_for(url: str) -> None:
    """A merged tail had freed two of them, then the trainer was silent, so that none was asked for; then another policy decided."""
    policy = Predictive("sorting")
    policy._target = 7
    aimed = {"sized": dict(policy.sized_by())}
    told = [
        ("sorting", {"engines": 5, **aimed}),
        ("sorting", {"engines": 0, **aimed}),
        ("sorting", {"engines": 9}),
        ("other", {"engines": 1, "sized": {"target": 1.0}}),
    ]
    asked = [
        r.Decision("engines", "want", run, "why", json.dumps(by), T0 + 6 + i, "fleet")
        for i, (run, by) in enumerate(told)
    ]
    assert read(url, *asked).engines == 7


def test_a_run_that_never_said_how_many_engines_it_wants_has_no_number(url: str) -> None:
    assert read(url).engines is None


def test_only_steps_after_the_one_named_and_the_newest_chunks_are_read(url: str) -> None:
    past = read(url, most_chunks=2)
    assert [flush.at for flush in past.flushes] == [T0 + 7.5, T0 + 9.5]
    engine = store.open_readonly(url)
    try:
        assert history.read(engine, "sorting", 1).steps == ()
        with pytest.raises(LedgerError, match="no run 'nobody'"):
            history.read(engine, "nobody")
    finally:
        engine.dispose()
