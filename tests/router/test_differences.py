"""How far trainer and engine are apart at each token comes with a step's commit, and is recorded as often as the step is: once."""

from __future__ import annotations

import json
import math
from hashlib import sha256

import msgspec
import pytest

from scavenger.errors import WireError
from scavenger.ledger import records as rec
from scavenger.ledger import redaction
from scavenger.protocol.messages import (
    MAX_METRICS,
    MAX_TEXT,
    Call,
    CommitStep,
    Denied,
    EpisodeOutcome,
    Ok,
    SampleOutcome,
    TokenDifferences,
    decode_to_daemon,
    encode,
)
from scavenger.router.core import steps
from tests.router.harness import Bench, specs
from tests.router.test_episodes_committed import PROMPT, ask, took
from tests.router.test_episodes_committed import opened as with_episodes

W1 = 11


def recorded(bench: Bench) -> list[tuple[int, int, int, bytes]]:
    found = [one for one in bench.ledger.log if isinstance(one, rec.DifferencesRecorded)]
    return [(one.sample_id, one.step, one.attempt, one.differences) for one in found]


def whole_step(lengths: tuple[int, ...] = (8, 5)) -> tuple[Bench, list[int]]:
    bench = Bench()
    bench.open()
    bench.publish()
    bench.join(W1)
    bench.submit(1, groups=specs(1, len(lengths)))
    leases = bench.leases(W1)
    for lease, length in zip(leases, lengths, strict=True):
        bench.chunk(W1, lease, 0, length, finish="stop")
    return bench, [lease.sample_id for lease in leases]


def commit(samples: list[int], *differences: TokenDifferences) -> CommitStep:
    outcomes = tuple(SampleOutcome(sample, "consumed", 1.0, 0.5) for sample in samples)
    return CommitStep(1, 1, "train", outcomes, {}, differences=differences)


def test_differences_are_recorded_with_the_step_that_is_committed_once() -> None:
    bench, (a, b) = whole_step()
    body = commit([a, b], TokenDifferences(b, b"ab" * 5, 0.25), TokenDifferences(a, b"cd" * 8, 0.5))
    assert [bench.call(body) for _ in range(2)] == [Ok(), Ok()]
    assert recorded(bench) == [(b, 1, 1, b"ab" * 5), (a, 1, 1, b"cd" * 8)]
    assert not bench.events("differences_left_out")


def test_what_fits_no_sample_of_the_step_is_left_out_and_an_event_says_how_much() -> None:
    bench, (a, b) = whole_step()
    wrong = (
        TokenDifferences(a, b"ab" * 7, 0.0),  # another length
        TokenDifferences(99, b"ab" * 8, 0.0),  # no sample of it
        TokenDifferences(b, b"ab" * 5, 0.0),
        TokenDifferences(b, b"cd" * 5, 0.0),  # said twice
    )
    assert bench.call(commit([a, b], *wrong)) == Ok(), "a step does not fail for a figure"
    assert recorded(bench) == [(b, 1, 1, b"ab" * 5)]
    (event,) = bench.events("differences_left_out")
    assert (event.subject, event.reason.split(" name")[0]) == ("step 1", "3 of 4")


def test_of_one_step_no_more_is_kept_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample's fit, and together they would fill the ledger: a message holds four times as much as a step may."""
    monkeypatch.setattr(steps, "MAX_DIFFERENCES_BYTES", 2 * 12)
    bench, (a, b, c) = whole_step((8, 5, 4))
    said = [TokenDifferences(one, b"ab" * n, 0.0) for one, n in ((a, 8), (b, 5), (c, 4))]
    assert bench.call(commit([a, b, c], *said)) == Ok()
    assert recorded(bench) == [(a, 1, 1, b"ab" * 8), (c, 1, 1, b"ab" * 4)]
    (event,) = bench.events("differences_left_out")
    assert event.reason.startswith("1 of 3 ")


@pytest.mark.parametrize(("name", "most"), [("m", 2_000), ("/" + "\u20ac" * 3_000, 1_200)])
def test_a_step_s_metrics_are_kept_as_far_as_readers_read_them(name: str, most: int) -> None:
    bench, (a, b) = whole_step()
    said = {f"{name}{i}": -1.2345678901234567e-300 for i in range(4_000)} | {"nan": math.nan}
    body = msgspec.structs.replace(commit([a, b]), metrics=said)
    assert bench.call(body) == Ok(), "a step does not fail for a figure"
    (kept,) = [one.metrics for one in bench.ledger.log if isinstance(one, rec.StepCommitted)]
    assert redaction.MOST_METRICS - 200 < len(kept) <= redaction.MOST_METRICS
    assert most < (n := len(json.loads(kept)))
    (event,) = bench.events("metrics_left_out")
    assert (event.subject, event.reason.split(" of")[0]) == ("step 1", str(4_000 - n))


def test_metrics_without_a_bound_are_no_message() -> None:
    def frame(said: dict[str, float]) -> bytes:
        return encode(Call(1, "r", 1, CommitStep(1, 1, "train", (), said)))

    most = {f"m{i}": 0.0 for i in range(MAX_METRICS - 1)} | {"m" * MAX_TEXT: 0.0}
    decode_to_daemon(frame(most))
    for said in (most | {"one": 0.0, "more": 0.0}, {"m" * (MAX_TEXT + 1): 0.0}):
        with pytest.raises(WireError):
            decode_to_daemon(frame(said))


def test_a_fenced_trainer_records_none() -> None:
    bench, (a, b) = whole_step()
    bench.open()
    body = commit([a, b], TokenDifferences(a, b"ab" * 8, 0.5))
    refused = bench.call(body, attempt=1)
    assert isinstance(refused, Denied)
    assert refused.code == "stale"
    assert recorded(bench) == []


def test_a_step_that_is_taken_again_by_a_later_attempt_has_its_own() -> None:
    bench, (a, b) = whole_step()
    bench.call(commit([a, b], TokenDifferences(a, b"ab" * 8, 0.5)))
    bench.open()
    bench.publish(2, root_of=1)
    bench.submit(1, 2, groups=specs(1, 2))
    bench.attach(wants=(1,))
    assert bench.call(commit([a, b], TokenDifferences(a, b"cd" * 8, 0.5))) == Ok()
    assert recorded(bench) == [(a, 1, 1, b"ab" * 8), (a, 1, 2, b"cd" * 8)]


def of_turn(bench: Bench, sample_id: int, values: bytes) -> TokenDifferences:
    tokens = bench.ledger.samples[sample_id].tokens
    return TokenDifferences(7, values, 0.5, sha256(PROMPT + tokens).digest())


def test_an_episode_s_turn_is_named_by_its_tokens() -> None:
    bench = with_episodes()
    kept, left = ask(bench, "0.0").sample_id, ask(bench, "0.1").sample_id
    taken = msgspec.structs.replace(
        took("e", "0.0"),
        differences=(
            of_turn(bench, kept, b"ab" * 8),
            of_turn(bench, left, b"cd" * 8),  # the step did not take that turn
            TokenDifferences(7, b"ab" * 8, 0.0, sha256(PROMPT).digest()),
            TokenDifferences(7, b"ab" * 8, 0.0),
        ),
    )
    for _ in range(2):
        assert bench.call(CommitStep(1, 1, "train", (), {}, (taken,))) == Ok()
    assert recorded(bench) == [(kept, 1, 1, b"ab" * 8)]
    (event,) = bench.events("differences_left_out")
    assert event.reason.startswith("3 of 4 ")


def test_an_evaluation_has_none() -> None:
    bench = with_episodes()
    sample = ask(bench, "0.0", "of-eval").sample_id
    taken = EpisodeOutcome("of-eval", "evaluated", 1.0, 0.0, used=took("of-eval", "0.0").used)
    taken = msgspec.structs.replace(taken, differences=(of_turn(bench, sample, b"ab" * 8),))
    assert bench.call(CommitStep(1, 1, "eval", (), {}, (taken,))) == Ok()
    assert recorded(bench) == []


@pytest.mark.parametrize(
    "wrong",
    [
        TokenDifferences(1, b"", 0.0),
        TokenDifferences(1, b"ab", -1.0),
        TokenDifferences(1, b"ab", float("nan")),
        TokenDifferences(1, b"ab", 0.0, bytes(33)),
    ],
)
def test_a_difference_that_cannot_be_is_no_message(wrong: TokenDifferences) -> None:
    frame = encode(Call(1, "r", 1, CommitStep(1, 1, "train", (), {}, differences=(wrong,))))
    with pytest.raises(WireError):
        decode_to_daemon(frame)
