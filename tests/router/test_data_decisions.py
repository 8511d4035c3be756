"""What a trainer decided about its data: in the ledger with the step's commit, once; and what an opened run is told of its pass rates."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest

from scavenger.ledger import records as rec
from scavenger.protocol.messages import CommitStep, DataDecision, Ok, RunOpened, SampleOutcome
from tests.router.harness import Bench, open_body, specs
from tests.router.memory_ledger import Ledger, StoredLedger
from tests.router.moves import W1, finish_all

REPLAY = DataDecision("replay", 2, 1, {"limit": 2.0, "a prompt's own words": 1.0, "oldest": math.nan}, (7, 9))
FILTER = DataDecision("filter", 3, 1, {"min_spread": 0.5})


def opened(tmp_path: Path) -> tuple[Bench, StoredLedger]:
    bench = Bench()
    bench.ledger = ledger = StoredLedger(f"sqlite:///{tmp_path / 'ledger.sqlite3'}")
    bench.open()
    bench.publish()
    bench.join(W1)
    return bench, ledger


def step_of(bench: Bench, step: int, rewards: list[list[float]], *decisions: DataDecision) -> None:
    """A step of groups of two samples with these rewards; NaN: masked."""
    bench.submit(step, groups=specs(len(rewards)))
    finish_all(bench, W1, bench.leases(W1))
    samples = sorted(
        (sample for group in bench.router.core.runs["r"].by_key.values() for sample in group.samples),
        key=lambda sample: (sample.group.prompt_index, sample.index),
    )
    outcomes = tuple(
        SampleOutcome(sample.id, "masked" if math.isnan(reward) else "consumed", reward, 0.0)
        for sample, reward in zip(samples, [one for of in rewards for one in of], strict=True)
    )
    body = CommitStep(step, 1, "train", outcomes, {}, decisions=decisions)
    for _ in range(2):
        assert bench.call(body) == Ok()


def test_what_was_decided_is_recorded_with_the_step_once_and_in_the_ledger_s_own_words(
    tmp_path: Path,
) -> None:
    bench, ledger = opened(tmp_path)
    step_of(bench, 1, [[1.0, 0.0]], FILTER, REPLAY)
    rows = [
        one
        for one in bench.ledger.log
        if isinstance(one, rec.Decision) and one.policy in ("filter", "replay")
    ]
    assert [(one.policy, one.code, one.subject, one.reason) for one in rows] == [
        ("filter", "filtered", "r", "step 1: 1 of 4 groups are not trained, by their rewards"),
        (
            "replay",
            "replayed",
            "r",
            "step 1: 2 of 3 groups of earlier steps that are kept are trained once more",
        ),
    ]
    inputs = json.loads(rows[1].inputs)
    assert inputs["groups"] == [7, 9]
    assert inputs["by"]["limit"] == 2.0
    assert len(inputs["by"]) == 2, "what is no number is left out"
    assert "words" not in rows[1].inputs, "a name that is none is a digest"
    ledger.close()


def test_an_opened_run_is_told_the_pass_rates_of_the_steps_that_it_goes_on_from(tmp_path: Path) -> None:
    bench, ledger = opened(tmp_path)
    step_of(bench, 1, [[1.0, 0.5], [0.0, math.nan]])
    step_of(bench, 2, [[1.0, 1.0], [math.nan, math.nan]])
    step_of(bench, 3, [[0.0, 0.0]])

    def told(resume: int, solved_at: float | None) -> tuple[tuple[int, int, int, int], ...]:
        body = msgspec.structs.replace(open_body(resume), solved_at=solved_at)
        reply = bench.call(body)
        bench.attempt += 1
        assert isinstance(reply, RunOpened)
        if solved_at is not None:
            assert Ledger.pass_rates(ledger, 1, resume, solved_at) == reply.pass_rates, "as the log has it"
        return reply.pass_rates

    assert told(3, 1.0) == ((3, 0, 0, 2), (2, 0, 2, 2), (1, 0, 1, 2), (1, 1, 0, 1))
    assert told(2, 0.5) == ((2, 0, 2, 2), (1, 0, 2, 2), (1, 1, 0, 1))
    assert told(2, None) == ()
    ledger.close()


def test_a_trainer_says_no_more_than_a_message_may_hold() -> None:
    many = DataDecision("filter", 0, 0, {str(number): 0.0 for number in range(17)})
    with pytest.raises(msgspec.ValidationError, match="length <= 16"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(many), type=DataDecision)
    with pytest.raises(msgspec.ValidationError, match="length <= 4"):
        msgspec.msgpack.decode(
            msgspec.msgpack.encode(CommitStep(1, 1, "train", (), {}, decisions=(FILTER,) * 5)),
            type=CommitStep,
        )
