"""What was written is read back: snapshot, samples, reports, audit."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from scavenger.errors import LedgerError, LedgerUnavailable
from scavenger.ledger import records as r
from scavenger.ledger.read.reader import (
    final_step,
    join_chunks,
    read_payloads,
    read_snapshot,
    replay_groups,
    rows,
    run_by_name,
    samples_of_step,
)
from scavenger.ledger.read.reports import check
from scavenger.ledger.store import open_engine, open_readonly
from scavenger.protocol.messages import pack_logprobs, unpack_tokens
from tests.ledger.examples import (
    T0,
    answer,
    chunk,
    consumed,
    epilogue,
    everything,
    group,
    moved_group,
    preempted,
    prologue,
    routed,
    written,
)


def snapshot(url: str) -> r.Snapshot:
    engine = open_engine(url)
    try:
        return read_snapshot(engine)
    finally:
        engine.dispose()


def payloads(url: str, *sample_ids: int) -> dict[int, tuple[bytes, bytes, bytes, bytes]]:
    engine = open_engine(url)
    try:
        return read_payloads(engine, sample_ids)
    finally:
        engine.dispose()


def test_the_snapshot_of_an_empty_ledger_is_empty(url: str) -> None:
    written(url, [[]])
    assert snapshot(url) == r.Snapshot(1, 1, 1, 1, (), (), (), ())


def test_the_snapshot_gives_back_what_was_recorded(url: str) -> None:
    first = prologue()
    moving = moved_group()[:8]  # sample 11 has just been leased again, to worker 2
    written(url, [first, moving, preempted()])
    found = snapshot(url)
    assert (found.next_run_id, found.next_group_id, found.next_sample_id, found.next_worker_id) == (
        2,
        11,
        13,
        3,
    )
    (run,) = found.runs
    assert (run.created, run.versions) == (first[0], (first[2],))
    assert (run.attempt, run.resume_step, run.last_step) == (1, 0, 0)
    assert run.engine == '{"name": "reference", "max_batch": 4}'
    assert [worker.joined for worker in found.workers] == [first[9]]
    (job,) = found.jobs
    assert (job.intended, job.job_id, job.last_state, job.restart_count, job.allocation_open) == (
        first[3],
        501,
        "PENDING",
        1,
        False,
    )
    (only,) = found.groups
    assert (only.created, only.version) == (moving[0], 1)
    a, b = only.samples
    assert (a.sample_id, a.index, a.state, a.epoch, a.moves, a.lease) == (11, 0, "open", 2, 1, (2, 2, 1))
    assert (a.length, b.length) == (5, 4)
    assert (b.sample_id, b.index, b.state, b.epoch, b.moves, b.lease) == (12, 1, "open", 1, 0, (1, 2, 1))


def test_the_order_of_chunks_on_disk_does_not_matter(url: str) -> None:
    many = [chunk(11, 1, offset, 3, 1) for offset in range(0, 30, 3)]
    written(url, [prologue(), [group(10, 11, 1, 1, 1), r.LeaseGranted(11, 1, 1, 1, 0, T0), *reversed(many)]])
    assert snapshot(url).groups[0].samples[0].length == 30
    assert payloads(url, 11)[11][0] == answer(11, 30)


def test_groups_are_read_until_a_kept_checkpoint_covers_them(url: str) -> None:
    history: list[list[r.Record]] = [prologue()]
    for step in range(1, 7):
        history += [moved_group(step * 10, step * 10 + 1, step), consumed(step * 10, step * 10 + 1, step)]
        if step % 2 == 0:
            history.append([r.CheckpointRecorded(1, step, 1, b"root", f"/ckpt/{step}", T0)])
    written(url, history)
    found = snapshot(url)  # checkpoints of steps 2, 4 and 6, of which the newest two are kept
    assert [g.created.step for g in found.groups] == [5, 6]
    assert [c.step for c in found.runs[0].checkpoints] == [2, 4, 6]
    assert [(s.state, s.reward, s.ended_step, s.length) for s in found.groups[0].samples] == [
        ("consumed", 1.0, 5, 9),
        ("consumed", 0.25, 5, 4),
    ]
    engine = open_engine(url)
    assert [g.created.step for g in replay_groups(engine, 1, 2)] == [3, 4, 5, 6]
    engine.dispose()


def test_a_restarted_daemon_reads_on_from_the_oldest_checkpoint_that_is_really_kept(url: str) -> None:
    history: list[list[r.Record]] = [prologue()]
    for step in range(1, 7):
        history += [moved_group(step * 10, step * 10 + 1, step), consumed(step * 10, step * 10 + 1, step)]
        if step % 2 == 0:
            kept = str(list(range(2, step + 1, 2)))
            history.append([r.CheckpointRecorded(1, step, 1, b"root", f"/ckpt/{step}", T0, kept)])
    written(url, history)
    found = snapshot(url)  # the configuration says that two are kept
    assert [c.kept for c in found.runs[0].checkpoints] == ["[2]", "[2, 4]", "[2, 4, 6]"]
    assert [g.created.step for g in found.groups] == [3, 4, 5, 6]


def test_a_reopened_sample_is_complete_again_and_keeps_its_reward(url: str) -> None:
    written(url, [prologue(), moved_group(), consumed(), epilogue()[:7]])
    (only,) = snapshot(url).groups
    assert only.version == 3
    assert [(s.state, s.reward, s.ended_step, s.finish) for s in only.samples] == [
        ("complete", 1.0, 0, "stop"),
        ("complete", 0.25, 0, "length"),
    ]


def poisoned(attempt: int = 1) -> list[r.Record]:
    """Both samples of group 10 are given up."""
    ends: list[r.Record] = [
        r.SampleEnded(i, "poisoned", "failed 3 times", 0, attempt, None, None, T0 + 11) for i in (11, 12)
    ]
    return [group(10, 11, 2, 1, 1), *ends]


def test_a_group_of_poisoned_samples_is_read_until_its_step_is_taken_and_again_when_that_is_rewound(
    url: str,
) -> None:
    written(url, [prologue(), poisoned()])
    (only,) = snapshot(url).groups
    assert [(s.state, s.ended_attempt, s.reason) for s in only.samples] == [
        ("poisoned", 1, "failed 3 times")
    ] * 2
    written(url, [[r.StepCommitted(1, 1, "train", 1, 1, "{}", T0 + 12)]])
    assert snapshot(url).groups == ()
    written(url, [[r.StepsRewound(1, 2, 0, T0 + 20)]])
    assert len(snapshot(url).groups) == 1


def test_the_newest_take_that_was_given_up_is_known_for_each_prompt(url: str) -> None:
    def superseded(sample: int) -> r.Record:
        return r.SampleEnded(sample, "superseded", "", 0, 0, None, None, T0 + 11)

    groups = [
        group(10, 11, 1, 1, 1),
        superseded(11),
        group(20, 21, 1, 1, 1, retry=1),
        superseded(21),
        group(30, 31, 1, 1, 1, retry=2),
    ]
    written(url, [prologue(), groups])
    assert snapshot(url).retries == ((1, "train", 1, 0, 1),)


def test_a_resume_from_before_the_kept_checkpoints_is_read_from_there(url: str) -> None:
    saved = [r.CheckpointRecorded(1, step, 1, b"root", f"/ckpt/{step}", T0 + 12) for step in (1,)]
    written(url, [prologue(), moved_group(), consumed(), saved])
    assert snapshot(url).groups == ()
    written(
        url, [[r.StepsRewound(1, 2, 0, T0 + 20), r.CheckpointRecorded(1, 1, 1, b"root", "/ckpt/1", T0 + 21)]]
    )
    assert [g.created.group_id for g in snapshot(url).groups] == [10]


def test_ended_runs_are_in_the_snapshot_without_their_groups_and_manifests(url: str) -> None:
    """Somebody may resume one: its name, attempts and version numbers must not be given out again."""
    written(url, everything())
    found = snapshot(url)
    assert (found.groups, found.workers, found.jobs) == ((), (), ())
    (run,) = found.runs
    assert run.ended
    assert run.created.name == "sorting"
    assert [v.version for v in run.versions] == [1, 2, 3]
    assert not any(v.manifest for v in run.versions)
    assert found.next_sample_id == 62


@pytest.mark.parametrize(
    ("config", "steps", "final"),
    [
        ('{"checkpoint": {"keep": 2}}', [2, 4, 6], 4),
        ('{"checkpoint": {"keep": 9}}', [2, 4], 2),
        ("{}", [2, 4, 6], 2),
        ("", [], -1),
        ('{"checkpoint": {"keep": 1}}', [4, 4, 2], 4),
    ],
)
def test_consumption_is_final_up_to_the_oldest_kept_checkpoint(
    config: str, steps: list[int], final: int
) -> None:
    assert final_step(config, [(step, "") for step in steps]) == final


@pytest.mark.parametrize(
    ("saved", "final"),
    [
        ([(20, "[20]"), (40, "[20,40]"), (60, "[40,60]")], 40),
        (
            [(20, "[20]"), (40, "[20,40]"), (60, "[20,40,60]")],
            20,
        ),  # three are kept, whatever the configuration says
        ([(20, "[20]"), (60, "[40,60]")], 40),  # of step 40 the trainer was killed before it could record it
        ([(20, ""), (40, ""), (60, "[60]")], 60),
        ([(20, "[20]"), (40, ""), (60, "")], 40),  # an older trainer goes on
        ([(20, "[20]"), (40, "[20,40]"), (40, "[40]")], 40),  # recorded twice: the later counts
    ],
)
def test_a_trainer_that_says_which_checkpoints_are_kept_is_believed(
    saved: list[tuple[int, str]], final: int
) -> None:
    assert final_step('{"checkpoint": {"keep": 2}}', saved) == final


@pytest.mark.parametrize(
    ("offsets", "complaint"),
    [
        ([(0, 3), (4, 2)], "tokens are missing"),
        ([(0, 3), (2, 2)], "chunks overlap"),
        ([(0, 3)], "3 tokens in its chunks, 6 accepted"),
    ],
)
def test_chunks_that_do_not_join_are_an_error_that_names_the_sample(
    offsets: list[tuple[int, int]], complaint: str
) -> None:
    pieces = [(start, bytes(4 * n), bytes(4 * n), bytes(4 * n), b"") for start, n in offsets]
    with pytest.raises(LedgerError, match=f"sample 77: .*{complaint}"):
        join_chunks(77, pieces, 6)


def test_a_chunk_whose_tokens_have_not_the_same_routing_is_an_error() -> None:
    with pytest.raises(LedgerError, match="sample 77: the chunk at 0 has not the same routing"):
        join_chunks(77, [(0, bytes(8), bytes(8), bytes(8), b"abc")], 2)


def test_tokens_of_named_samples_are_read_with_their_logprobs(url: str) -> None:
    """A sample without tokens has an empty payload, one without a row is not in the answer; any number may be named."""
    written(url, [prologue(), moved_group(), [group(20, 21, 1, 2, 1)]])
    found = payloads(url, 12, 11, 21, 99, *range(1000, 2500))
    assert sorted(found) == [11, 12, 21]
    assert found[11][0] == answer(11, 9)
    assert found[11][1] == found[11][2] == pack_logprobs(-0.5 - i for i in range(9))
    assert found[11][3] == routed(0, 9)
    assert (found[12][0], found[21]) == (answer(12, 4), (b"", b"", b"", b""))
    assert payloads(url) == {}


def test_tokens_that_do_not_add_up_to_the_sample_s_length_are_an_error_that_names_it(url: str) -> None:
    written(url, [prologue(), moved_group()])
    engine = open_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("DELETE FROM chunks WHERE sample_id = 11 AND start_len = 3"))
    engine.dispose()
    with pytest.raises(
        LedgerError, match=r"sample 11: tokens are missing.*\n.*scavenger ledger check"
    ) as caught:
        payloads(url, 11, 12)
    assert not isinstance(caught.value, LedgerUnavailable)
    assert list(payloads(url, 12)) == [12]


def test_a_snapshot_reads_no_chunks(url: str) -> None:
    """A restart with millions of chunks must not wait for them: it does not even look whether they are there."""
    written(url, [prologue(), moved_group()])
    before = snapshot(url)
    engine = open_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("DELETE FROM chunks"))
    engine.dispose()
    assert snapshot(url) == before
    assert [s.length for s in before.groups[0].samples] == [9, 4]


def test_a_ledger_that_cannot_be_read_for_the_moment_is_told_from_one_that_is_broken(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.sqlite3'}"
    written(url, [prologue(), moved_group()])
    path = tmp_path / "ledger.sqlite3"
    away = path.rename(tmp_path / "away")
    engine = open_engine(url)  # makes an empty file, which is no ledger
    path.unlink()
    with pytest.raises(LedgerUnavailable, match="look at the disk"):
        read_payloads(engine, [11])
    away.rename(path)
    assert list(read_payloads(engine, [11])) == [11]
    path.write_bytes(b"not a database" * 1000)
    with pytest.raises(LedgerError, match="cannot be read") as caught:
        read_payloads(engine, [11])
    assert not isinstance(caught.value, LedgerUnavailable)
    engine.dispose()


def test_samples_of_a_step_say_what_they_are_and_who_generated_them(url: str) -> None:
    written(url, [prologue(), moved_group(), preempted(), consumed()])
    engine = open_readonly(url)
    a, b = samples_of_step(engine, "sorting", 1)
    assert a.prompt == (7, 8, 9)
    assert a.tokens == unpack_tokens(answer(11, 9))
    assert (a.reward, a.advantage, a.finish, a.state, a.moves, a.regenerated) == (
        1.0,
        0.7,
        "stop",
        "consumed",
        1,
        2,
    )
    assert [(s.node, s.kind, s.job_id, s.start_len, s.end_len) for s in a.leases] == [
        ("n3", "harvested", 501, 0, 5),
        ("n0", "reserved", 100, 5, 9),
    ]
    assert (b.finish, b.moves, len(b.logprobs)) == ("length", 0, 4)
    assert samples_of_step(engine, "sorting", 1, group=0) == (a, b)
    assert samples_of_step(engine, "sorting", 1, group=1) == ()
    assert samples_of_step(engine, "sorting", 2) == ()
    with pytest.raises(LedgerError, match="no run called"):
        samples_of_step(engine, "other", 1)
    engine.dispose()


def test_a_run_is_found_by_its_name(url: str) -> None:
    written(url, everything())
    engine = open_readonly(url)
    found = run_by_name(engine, "sorting")
    assert found is not None
    assert (found.state, found.attempt, found.last_step, found.last_version, found.seed) == (
        "finished",
        2,
        1,
        3,
        17,
    )
    assert run_by_name(engine, "other") is None
    assert rows(engine, "SELECT name FROM runs WHERE run_id = :run", {"run": 1}).rows == (("sorting",),)
    engine.dispose()


def test_a_sound_ledger_has_no_problems(url: str) -> None:
    written(url, everything())
    assert check(url) == []


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("DELETE FROM chunks WHERE sample_id = 11 AND start_len = 3", "tokens missing"),
        ("UPDATE chunks SET start_len = 2 WHERE sample_id = 11 AND start_len = 3", "tokens doubled"),
        ("UPDATE chunks SET epoch = 7 WHERE sample_id = 12", "chunk outside its lease"),
        ("UPDATE samples SET accepted_len = 8 WHERE sample_id = 11", "accepted length differs"),
        ("UPDATE samples SET state = 'complete' WHERE sample_id = 12", "without an end"),
        ("UPDATE steps SET rewound_by = NULL", "more than one surviving step"),
        ("UPDATE steps SET rewound_by = 3", "a step that did not survive"),
        (
            "UPDATE samples SET state = 'superseded' WHERE sample_id = 12",
            "superseded and not generated again",
        ),
        ("DELETE FROM groups", "samples without their group"),
        ("UPDATE leases SET ended_at = NULL WHERE epoch = 2", "leases still open"),
        ("DELETE FROM alembic_version", "schema is at revision none"),
    ],
)
def test_the_audit_finds_damage(url: str, damage: str, problem: str) -> None:
    written(url, everything())
    engine = open_engine(url)
    with engine.begin() as connection:
        assert connection.execute(sa.text(damage)).rowcount
    engine.dispose()
    assert any(problem in line for line in check(url)), check(url)


def test_of_each_open_job_its_newest_allocation_is_known_and_the_engines_that_none_tells_of(url: str) -> None:
    """So that a restarted daemon goes on where the ledger ends, not at its own start."""

    def job(intent: str, job_id: int) -> list[r.Record]:
        return [r.JobIntended(intent, 1, "scavenge", 1, "key", 100.0), r.JobSubmitted(intent, job_id, 101.0)]

    def engine(worker_id: int, intent: str, incarnation: int, at: float) -> r.Record:
        return r.WorkerJoined(
            worker_id, 1, "harvested", intent, f"s{worker_id}", incarnation, 7, "n2", 1, "reference", at
        )

    written(
        url,
        [
            [
                *job("waits", 1),
                r.JobObserved("waits", 1, "PENDING", "", "", "", 0, 160.0),
                *job("holds", 2),
                r.AllocationStarted("holds", 0, 2, "n1", 1, 110.0),
                r.AllocationEnded("holds", 0, "preempted", 120.0),
                r.AllocationStarted("holds", 1, 2, "n3", 1, 130.0),
                r.JobObserved("holds", 2, "RUNNING", "COMPLETING", "", "n3", 2, 150.0),
                *job("unseen", 3),
                r.JobObserved("unseen", 3, "PENDING", "", "", "", 0, 105.0),
                engine(1, "unseen", 0, 140.0),
                r.WorkerLeft(1, "told to go", True, 0, 0, 0, 155.0),
                engine(2, "holds", 0, 112.0),
                engine(3, "holds", 1, 135.0),
                r.ClusterPolled(0, 0, 0, 0, 0, 0, 170.0),
            ]
        ],
    )
    opened = open_engine(url)
    try:
        jobs = {one.intended.intent_id: one for one in read_snapshot(opened).jobs}
    finally:
        opened.dispose()
    waits, holds, unseen = jobs["waits"], jobs["holds"], jobs["unseen"]
    assert (waits.allocation_open, waits.last_allocation, waits.free_since, waits.lives) == (
        False,
        -1,
        160.0,
        (),
    )
    # its restart count has grown already, and its GPUs are not free yet
    assert (
        holds.allocation_open,
        holds.last_allocation,
        holds.allocated_since,
        holds.node,
        holds.restart_count,
    ) == (True, 1, 130.0, "n3", 2)
    assert holds.lives == (r.EngineLife(1, "n2", 135.0, 135.0),)
    assert (unseen.last_allocation, unseen.free_since) == (-1, 105.0)
    assert unseen.lives == (r.EngineLife(0, "n2", 140.0, 155.0),)
    assert {one.polled_at for one in jobs.values()} == {170.0}


def test_waits_training_jobs_and_quarantines_that_have_not_ended_are_handed_on(url: str) -> None:
    open_ones: list[r.Record] = [
        r.OtherUserWaits(901, "eve", "gpu", 1, T0, T0 + 1, T0 + 2, harvested_gpus=2),
        r.TrainingJobStarted(1, 101, "ann", 2, 8, T0 + 3, "physics"),
        r.NodeQuarantined("n9", "dies", T0 + 900, T0 + 4),
    ]
    written(url, [*everything(), open_ones])
    found = snapshot(url)
    assert (found.waits, found.training_jobs) == ((open_ones[0],), (open_ones[1],))
    assert found.quarantined == (("", "n9"),)
