"""Retention takes what no resume can want, only that, and nobody's accounting."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from scavenger.cli import samples
from scavenger.ledger import records as r
from scavenger.ledger import retention, store
from scavenger.ledger.read import reader
from scavenger.ledger.read.reports import check
from scavenger.ledger.retention import ChunkRow, Policy, RetainedRun, RetainedSample, limit, merge, plan
from tests.ledger.examples import T0, answer, chunk, group, routed, witness, written
from tests.ledger.histories import CHECKPOINTS, STEPS, answers, fetch, first_sample, keep, spoil, training

COMPACT, DROP = Policy("compact", 0), Policy("drop", 0)
RUN = RetainedRun(1, 1, 10, 8)
#: The steps that the older of the two kept checkpoints covers.
FINAL = (1, 2)


def sight(sample_id: int, state: str = "consumed", step: int = 3, **other: object) -> RetainedSample:
    plain = RetainedSample(
        sample_id, sample_id // 10, step, state, step if state != "superseded" else 0, 1, None, 100
    )
    return replace(plain, **other)  # type: ignore[arg-type]


def planned(samples: list[RetainedSample], run: RetainedRun = RUN, policy: Policy = COMPACT) -> list[int]:
    return [
        sample_id for portion in plan(run, samples, policy, T0) for sample_id in portion.record.sample_ids
    ]


@pytest.mark.parametrize(
    ("run", "policy", "last"),
    [
        (RUN, COMPACT, 8),
        (RUN, Policy("compact", 5), 5),
        (RUN, Policy("drop", 11), -1),
        (RUN, Policy("keep", 0), -1),
        (replace(RUN, final_step=-1), COMPACT, -1),
        (replace(RUN, last_step=4), COMPACT, 4),  # an attempt that resumed from before the kept checkpoints
    ],
)
def test_the_policy_reaches_to_the_oldest_kept_checkpoint_and_keeps_its_distance(
    run: RetainedRun, policy: Policy, last: int
) -> None:
    assert limit(run, policy) == last


@pytest.mark.parametrize("state", sorted(retention.FINAL_STATES))
def test_every_final_state_is_reduced(state: str) -> None:
    assert planned([sight(10, state), sight(11, state)]) == [10, 11]


@pytest.mark.parametrize(
    "other",
    [
        sight(11, "open"),
        sight(11, "complete"),
        sight(11, step=9),
        sight(11, ended_step=9),
        sight(11, "poisoned", taken=0),
    ],
)
def test_one_sample_that_may_be_wanted_keeps_its_whole_group(other: RetainedSample) -> None:
    assert planned([sight(10), other, sight(20)]) == [20]


def test_what_is_done_is_not_done_again_and_compacted_may_still_be_dropped() -> None:
    samples = [
        sight(10, contents="compacted"),
        sight(20, contents="dropped"),
        sight(30, contents="purged"),
        sight(40),
    ]
    assert planned(samples) == [40]
    assert planned(samples, policy=DROP) == [10, 40]


def test_portions_are_bounded_and_say_why() -> None:
    samples = [sight(10 * n, accepted_len=1000) for n in range(1, 400)]
    portions = list(plan(RUN, samples, COMPACT, T0))
    assert [i for p in portions for i in p.record.sample_ids] == [s.sample_id for s in samples]
    assert max(len(p.record.sample_ids) for p in portions) <= retention.PORTION_SAMPLES
    assert max(p.tokens for p in portions) <= retention.PORTION_TOKENS
    assert portions[0].reason == "step 3: the oldest kept checkpoint is of step 8, the run is at step 10"
    long = [sight(10, accepted_len=10**9), sight(20, accepted_len=10**9)]
    assert [p.record.sample_ids for p in plan(RUN, long, COMPACT, T0)] == [(10,), (20,)]


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=30), st.integers(0, 2**32))
def test_merged_rows_are_one_a_lease_and_hold_every_token(cuts: list[tuple[int, bool]], seed: int) -> None:
    rows, at, epoch = [], 0, 1
    for n, moves in cuts:
        c = chunk(7, epoch, at, n, worker_id=epoch)
        rows.append(
            ChunkRow(epoch, at, n, 1, epoch, T0 + at, c.tokens, c.logprobs, c.raw_logprobs, c.routing)
        )
        at, epoch = at + n, epoch + moves
    merged, problem = merge(rows, at)
    assert problem == ""
    assert b"".join(row.tokens for row in merged) == answer(7, at)
    assert b"".join(row.routing for row in merged) == routed(0, at)
    assert len(merged) == len({row.epoch for row in rows})
    for row in merged:
        mine = [x for x in rows if x.epoch == row.epoch]
        assert (row.start_len, row.n_tokens, row.at) == (
            mine[0].start_len,
            sum(x.n_tokens for x in mine),
            mine[-1].at,
        )
    # Any row that is gone, doubled or cut is noticed.
    victim = random.Random(seed).randrange(len(rows))
    for broken in (rows[:victim] + rows[victim + 1 :], rows[: victim + 1] + rows[victim:]):
        assert merge(broken, at)[0] == []
        assert merge(broken, at)[1]
    cut = replace(rows[victim], logprobs=rows[victim].logprobs[4:])
    assert "payloads" in merge([*rows[:victim], cut, *rows[victim + 1 :]], at)[1]


def replays(url: str) -> dict[int, tuple[r.OpenGroup, ...]]:
    """What a resume from each kept checkpoint reads."""
    engine = store.open_readonly(url)
    try:
        return {step: reader.replay_groups(engine, 1, step) for step in CHECKPOINTS[-2:]}
    finally:
        engine.dispose()


def snapshot(url: str) -> r.Snapshot:
    engine = store.open_readonly(url)
    try:
        return reader.read_snapshot(engine)
    finally:
        engine.dispose()


def said(url: str, step: int) -> list[tuple[int, ...]]:
    engine = store.open_readonly(url)
    try:
        return [row.tokens for row in reader.samples_of_step(engine, "sorting", step)]
    finally:
        engine.dispose()


def test_compaction_changes_no_token_no_report_and_nothing_that_a_resume_reads(url: str) -> None:
    written(url, training())
    steps = range(1, STEPS + 1)
    before = replays(url), snapshot(url), answers(url, ["sample_life"]), [said(url, step) for step in steps]
    assert keep(url, COMPACT) == 2 * len(FINAL) + 1  # and the evaluation of step 2
    assert (
        replays(url),
        snapshot(url),
        answers(url, ["sample_life"]),
        [said(url, step) for step in steps],
    ) == before
    assert check(url) == []
    rows = fetch(
        url,
        "SELECT sample_id, epoch, worker_id, start_len, n_tokens FROM chunks WHERE sample_id < 300 ORDER BY 1, 2",
    )
    assert rows[:3] == [(101, 1, 1, 0, 5), (101, 2, 2, 5, 4), (102, 1, 2, 0, 4)], "one row a lease"
    assert fetch(url, "SELECT count(*) FROM chunks WHERE sample_id BETWEEN 301 AND 302") == [(4,)], (
        "step 3 may be replayed"
    )
    assert keep(url, COMPACT) == 0


def test_dropping_takes_the_tokens_and_nothing_that_a_resume_from_a_kept_checkpoint_reads(url: str) -> None:
    written(url, training())
    before = replays(url), snapshot(url), answers(url, ["sample_life"])
    lengths = fetch(
        url,
        "SELECT sample_id, sum(n_tokens), max(at) FROM chunks GROUP BY sample_id, worker_id ORDER BY 1, 2",
    )
    keep(url, COMPACT)
    assert keep(url, DROP) == 2 * len(FINAL) + 1
    assert (replays(url), snapshot(url), answers(url, ["sample_life"])) == before
    assert (
        fetch(
            url,
            "SELECT sample_id, sum(n_tokens), max(at) FROM chunks GROUP BY sample_id, worker_id ORDER BY 1, 2",
        )
        == lengths
    )
    empty = fetch(url, "SELECT DISTINCT sample_id FROM chunks WHERE length(tokens) = 0 ORDER BY 1")
    assert empty == [(101,), (102,), (201,), (202,), (1002,)]
    assert check(url) == []
    assert said(url, 1) == [(), ()]


def test_what_a_resume_from_a_checkpoint_that_is_really_kept_needs_is_not_dropped(url: str) -> None:
    """The trainer keeps three where its configuration says two: the oldest is of step 1."""
    saved = {1: "[1]", 2: "[1,2]", 4: "[1,2,4]"}
    said_so = [
        [
            msgspec.structs.replace(x, kept=saved[x.step]) if isinstance(x, r.CheckpointRecorded) else x
            for x in portion
        ]
        for portion in training()
    ]
    written(url, said_so)
    assert keep(url, DROP) == 2  # step 1's
    assert fetch(url, "SELECT DISTINCT sample_id FROM chunks WHERE length(tokens) = 0 ORDER BY 1") == [
        (101,),
        (102,),
    ]
    # The next record says that those of steps 1 and 2 are about to be deleted.
    written(url, [[r.CheckpointRecorded(1, 4, 1, b"root", "/ckpt/4", T0 + 30, "[4]")]])
    keep(url, DROP)
    assert (201,) in fetch(url, "SELECT DISTINCT sample_id FROM chunks WHERE length(tokens) = 0")


@pytest.mark.parametrize("jsonl", [False, True])
def test_a_sample_s_lines_hold_no_control_characters(tmp_path: Path, jsonl: bool) -> None:
    words = tmp_path / "tokenizer.json"
    Tokenizer(WordLevel({"\x9b2J": 7, "eight": 8, "nine": 9}, unk_token="eight")).save(str(words))
    history = [
        msgspec.structs.replace(x, tokenizer=str(words))
        if isinstance(x, r.RunCreated)
        else msgspec.structs.replace(x, node="\x1b[2Jn3")
        if isinstance(x, r.WorkerJoined)
        else x
        for x in training()[0]
    ]
    other = f"sqlite:///{tmp_path}/other.sqlite3"
    written(other, [history, *training()[1:]])
    shown = list(samples.lines(other, "sorting", range(1, 2), None, "train", jsonl=jsonl))
    assert "n3" in shown[-1]
    assert all(line.isprintable() or "\ufffd" in line for line in shown)
    assert not {"\x1b", "\x9b"} & set("".join(shown))


def test_a_reader_is_told_why_a_sample_was_not_trained(sqlite_url: str, tmp_path: Path) -> None:
    words = tmp_path / "tokenizer.json"
    Tokenizer(WordLevel({"seven": 7, "eight": 8, "nine": 9}, unk_token="seven")).save(str(words))
    history = [
        msgspec.structs.replace(x, tokenizer=str(words)) if isinstance(x, r.RunCreated) else x
        for batch in training()
        for x in batch
    ]
    why = "zero variance: every reward is 0"
    first = next(x for x in history if isinstance(x, r.SampleEnded) and x.state == "consumed")
    history.append(msgspec.structs.replace(first, state="filtered", reason=why))
    written(sqlite_url, [history])
    said = list(
        samples.lines(sqlite_url, "sorting", range(first.step, first.step + 1), None, "train", jsonl=False)
    )
    assert [line.endswith(f"  ({why})") for line in said if " filtered " in line] == [True]
    assert not any(line.endswith(")") for line in said[1:] if " filtered " not in line)


def test_a_reader_is_told_what_became_of_an_answer(sqlite_url: str, tmp_path: Path) -> None:
    words = tmp_path / "tokenizer.json"
    Tokenizer(WordLevel({"seven": 7, "eight": 8, "nine": 9}, unk_token="seven")).save(str(words))
    history = training()
    history[0] = [
        msgspec.structs.replace(x, tokenizer=str(words)) if isinstance(x, r.RunCreated) else x
        for x in history[0]
    ]
    written(sqlite_url, history)
    keep(sqlite_url, DROP)
    prompt, first, second = samples.lines(sqlite_url, "sorting", range(1, 2), None, "train", jsonl=False)
    assert "seven eight nine" in prompt
    assert "(9 tokens, dropped)" in first
    assert "harvested@n3[0:5] > reserved@n0[5:9]" in first
    assert "(4 tokens, dropped)" in second
    told = [
        json.loads(line)
        for step in (1, 4)
        for line in samples.lines(sqlite_url, "sorting", range(step, step + 1), None, "train", jsonl=True)
    ]
    assert [(x["tokens"], x["contents"]) for x in told] == [(9, "dropped"), (4, "dropped"), (9, ""), (4, "")]


def test_a_group_whose_tokens_are_gone_never_equals_the_one_that_a_trainer_submits(url: str) -> None:
    """A resume from before the kept checkpoints: without its prompt the router has to supersede the group."""
    written(url, training())
    keep(url, DROP)
    engine = store.open_readonly(url)
    found = {
        state.created.step: state
        for state in reader.replay_groups(engine, 1, 0)
        if state.created.purpose == "train"
    }
    kept = reader.read_payloads(engine, [first_sample(4)])
    engine.dispose()
    assert [found[step].created.prompt == b"" for step in range(1, STEPS + 1)] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert kept[first_sample(4)][0] == answer(first_sample(4), 9)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (
            "DELETE FROM chunks WHERE sample_id = 101 AND start_len = 3",
            "tokens missing: a chunk begins at 5, not at 3",
        ),
        (
            "UPDATE chunks SET start_len = 2 WHERE sample_id = 101 AND start_len = 3",
            "tokens doubled: a chunk begins at 2, not at 3",
        ),
        ("DELETE FROM chunks WHERE sample_id = 101 AND start_len = 5", "5 tokens in its chunks, 9 accepted"),
        (
            "UPDATE chunks SET logprobs = '' WHERE sample_id = 101 AND start_len = 5",
            "the chunk at 5 has 4 tokens and payloads of [0, 16]",
        ),
    ],
)
def test_chunks_that_do_not_join_are_told_and_left_alone(url: str, damage: str, why: str) -> None:
    written(url, training())
    spoil(url, damage)
    left = fetch(url, "SELECT id, start_len FROM chunks WHERE sample_id = 101 ORDER BY id")
    keep(url, COMPACT)
    events = fetch(url, "SELECT subject, reason FROM events WHERE kind = 'chunks_do_not_join'")
    assert [subject for subject, _ in events] == ["sample 101"]
    assert str(events[0][1]).startswith(why)
    assert fetch(url, "SELECT id, start_len FROM chunks WHERE sample_id = 101 ORDER BY id") == left
    assert any("sample 101" in problem for problem in check(url))
    assert fetch(url, "SELECT contents FROM samples WHERE sample_id IN (101, 102) ORDER BY sample_id") == [
        (None,),
        ("compacted",),
    ]


def test_an_attempt_that_was_granted_since_keeps_what_it_may_want(url: str) -> None:
    written(url, training())
    planned_before = r.ContentsReduced(1, 1, (101, 102), "dropped", T0)
    with witness(url) as w:
        w.writer.submit(0, [r.AttemptGranted(1, 2, "h", 1, 0, "{}", "{}", T0), planned_before])
        w.wait_ticket(0)
        assert fetch(url, "SELECT count(*) FROM samples WHERE contents IS NOT NULL") == [(0,)]
        w.writer.submit(
            1,
            [
                r.ContentsReduced(1, 2, (101, 102), "dropped", T0),
                r.AttemptGranted(1, 3, "h", 1, 0, "{}", "{}", T0),
            ],
        )
        w.wait_ticket(1)
    assert fetch(url, "SELECT count(*) FROM samples WHERE contents = 'dropped'") == [(2,)]


def test_a_sample_in_flight_is_never_reduced_whatever_a_record_says(url: str) -> None:
    flight: list[r.Record] = [
        group(90, 901, 1, 6, 1),
        r.LeaseGranted(901, 1, 1, 1, 0, T0),
        chunk(901, 1, 0, 3, 1),
        chunk(901, 1, 3, 3, 1),
    ]
    written(url, [*training(), flight, [r.ContentsReduced(1, 1, (901,), "dropped", T0)]])
    assert fetch(url, "SELECT count(*), sum(length(tokens)) FROM chunks WHERE sample_id = 901") == [(2, 24)]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            "UPDATE samples SET contents = 'dropped' WHERE sample_id = 201",
            "sample 201: dropped or purged, but its tokens are there",
        ),
        (
            "UPDATE samples SET contents = 'compacted' WHERE sample_id = 101",
            "sample 101: payload differs from its tokens",
        ),
        (
            "UPDATE samples SET contents = NULL WHERE sample_id = 102",
            "sample 102: payload differs from its tokens",
        ),
        (
            "UPDATE chunks SET raw_logprobs = '' WHERE sample_id = 301",
            "sample 301: payload differs from its tokens",
        ),
        (
            "UPDATE samples SET contents = 'compacted' WHERE sample_id = 301",
            "compacted, but in several rows of one lease",
        ),
        ("UPDATE samples SET state = 'complete' WHERE sample_id = 101", "dropped before its end"),
        ("DELETE FROM chunks WHERE sample_id = 101", "accepted length differs from its chunks"),
        ("UPDATE chunks SET worker_id = 2 WHERE sample_id = 201 AND epoch = 1", "chunk outside its lease"),
        (
            "UPDATE groups SET prompt = '' WHERE group_id = 10",
            "groups without their prompt that were not purged: 1 row",
        ),
    ],
)
def test_the_check_names_what_retention_could_have_broken(sqlite_url: str, damage: str, said: str) -> None:
    written(sqlite_url, training())
    keep(sqlite_url, COMPACT)
    keep(
        sqlite_url, replace(DROP, steps=STEPS - 1)
    )  # step 1 is dropped, step 2 compacted, the others are as they came
    assert fetch(
        sqlite_url, "SELECT contents FROM samples WHERE sample_id IN (101, 201, 301) ORDER BY sample_id"
    ) == [("dropped",), ("compacted",), (None,)]
    assert check(sqlite_url) == []
    spoil(sqlite_url, damage)
    found = check(sqlite_url)
    assert any(said in problem for problem in found), found
