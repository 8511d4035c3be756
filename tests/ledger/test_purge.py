"""A purge takes what was said and keeps what it cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from scavenger.cli.main import app
from scavenger.errors import LedgerError
from scavenger.ledger import records as r
from scavenger.ledger import store
from scavenger.ledger.maintain import purge
from scavenger.ledger.read import reader, tokens
from scavenger.ledger.read.reports import check
from scavenger.ledger.retention import Policy
from tests.ledger.examples import CONFIG, T0, answer, apart, chunk, group, witness, written
from tests.ledger.histories import answers, config, ended, fetch, first_sample, keep, spoil, training

#: The contents of `training`: each step has three chunks and one; the rest are two evaluations and what was superseded.
TOKENS, SAMPLES, PROMPTS = 5 * 13 + 2 * 4 + 2, 5 * 2 + 2 + 1, 5 + 2 + 1


def other_run() -> list[r.Record]:
    return [
        r.RunCreated(2, "reversal", "owner", 17, CONFIG, "{}", "", T0),
        r.AttemptGranted(2, 1, "login1", 100, 0, CONFIG, "{}", T0),
        r.VersionPublished(2, 1, 0, 1, b"root", b"manifest", 4096, T0),
        r.WorkerJoined(3, 2, "reserved", "", "s3", 0, 100, "n0", 1, "reference", T0),
        r.GroupCreated(
            5000, 2, "train", 1, 0, 0, 1, b"\7\0\0\0", 1, 5001, "{}", '{"answer": "a secret"}', T0
        ),
        r.LeaseGranted(5001, 1, 3, 1, 0, T0),
        chunk(5001, 1, 0, 5, 3),
    ]


#: Ids and two logprobs of four bytes each, and the examples' experts.
TOKEN_NBYTES = 4 * 3 + 3


def contents(url: str, run_id: int) -> tuple[object, ...]:
    (row,) = fetch(
        url,
        "SELECT sum(length(c.tokens) + length(c.logprobs) + length(c.raw_logprobs) + length(c.routing)), min(length(g.prompt)), "
        "max(length(g.meta)) "
        f"FROM chunks c JOIN samples s ON s.sample_id = c.sample_id JOIN groups g ON g.group_id = s.group_id WHERE s.run_id = {run_id}",
    )
    return row


def test_a_purge_takes_every_token_and_prompt_and_no_report_answers_otherwise(url: str) -> None:
    written(url, [*training(), ended(), other_run()])
    before, theirs = answers(url), contents(url, 2)
    assert contents(url, 1) == (TOKENS * TOKEN_NBYTES, 12, 2)
    taken = purge.purge(url, "sorting", lambda: T0 + 1000)
    assert (taken.tokens, taken.samples, taken.groups, taken.nbytes) == (
        TOKENS,
        SAMPLES,
        PROMPTS,
        TOKENS * TOKEN_NBYTES + PROMPTS * (12 + 2),
    )
    assert contents(url, 1) == (0, 0, 0)
    assert contents(url, 2) == theirs, "the other run's stay"
    assert answers(url) == before
    assert check(url) == []
    assert fetch(url, "SELECT purged_at FROM runs ORDER BY run_id") == [(T0 + 1000,), (None,)]
    assert purge.purge(url, "sorting").tokens == 0, "again, and there is nothing left"
    assert fetch(url, "SELECT DISTINCT run_id, purged_prompt_tokens FROM groups ORDER BY 1") == [
        (1, 3),
        (2, None),
    ]


def test_what_retention_made_is_purged_as_well(url: str) -> None:
    written(url, [*training(), ended()])
    keep(url, Policy("compact", 0))
    keep(url, Policy("drop", 4))
    before = answers(url)
    assert purge.purge(url, "sorting").samples == SAMPLES - 2
    assert answers(url) == before
    assert check(url) == []
    assert fetch(url, "SELECT DISTINCT contents FROM samples") == [("purged",)]


@pytest.mark.parametrize("reopened", [False, True])
def test_an_active_run_is_not_purged(url: str, reopened: bool) -> None:
    again = [[*ended(), r.AttemptGranted(1, 2, "h", 1, 4, CONFIG, "{}", T0)]] if reopened else []
    written(url, [*training(), *again])
    before = contents(url, 1)
    with pytest.raises(LedgerError, match=r"'sorting' is active(.|\n)*let it end"):
        purge.purge(url, "sorting")
    assert contents(url, 1) == before


def test_a_run_that_is_opened_again_under_a_purge_keeps_what_is_left(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The purge goes in portions and asks in each; what it took already is gone for the attempt, which generates it again."""
    written(url, [*training(), ended()])
    monkeypatch.setattr(purge, "PORTION_GROUPS", 2)
    patiently, count = purge._patiently, 0

    def opened_after_two(engine: sa.Engine, work: Callable[[sa.Connection], object]) -> object:
        nonlocal count
        count += 1
        if count == 3:
            with witness(url) as w:
                w.writer.submit(0, [r.AttemptGranted(1, 2, "h", 1, 4, CONFIG, "{}", T0)])
                w.wait_ticket(0)
        return patiently(engine, work)

    monkeypatch.setattr(purge, "_patiently", opened_after_two)
    with pytest.raises(LedgerError, match="is active"):
        purge.purge(url, "sorting")
    assert check(url) == []
    engine = store.open_readonly(url)
    left = {state.created.group_id: state.created.prompt for state in reader.replay_groups(engine, 1, 0)}
    engine.dispose()
    assert {group_id: prompt != b"" for group_id, prompt in left.items()} == {
        10: False,
        20: False,
        30: False,
        40: True,
        50: True,
        1020: True,
        1050: True,
    }


def test_the_check_tells_what_a_purge_left_behind(url: str) -> None:
    written(url, [*training(), ended()])
    purge.purge(url, "sorting", lambda: T0 + 1000)
    spoil(url, "UPDATE samples SET contents = NULL WHERE sample_id = 101")
    assert any("run 1 sample 101: left behind by a purge of its run" in problem for problem in check(url))


def test_what_an_attempt_generates_after_a_purge_is_sound(url: str) -> None:
    written(url, [*training(), ended()])
    purge.purge(url, "sorting", lambda: T0 + 1000)
    new = r.GroupCreated(2000, 1, "train", 6, 1, 0, 1, b"\7\0\0\0", 1, 2001, "{}", "", T0 + 2000)
    with witness(url) as w:
        w.writer.submit(0, [r.AttemptGranted(1, 2, "h", 1, 4, CONFIG, "{}", T0 + 2000), new])
        w.writer.submit(1, [r.LeaseGranted(2001, 1, 2, 1, 0, T0), chunk(2001, 1, 0, 5, 2)])
        w.wait_ticket(1)
    assert check(url) == []


def test_the_command_asks_first_and_prints_what_it_deleted(sqlite_url: str, tmp_path: Path) -> None:
    written(sqlite_url, [*training(), ended()])
    argv = ["ledger", "purge", "--run", "sorting", "--config", str(config(tmp_path, sqlite_url))]
    held = f"{TOKENS} tokens of {SAMPLES} samples in 25 chunks, and {PROMPTS} prompts: {TOKENS * TOKEN_NBYTES + PROMPTS * 14:,} bytes"
    refused = CliRunner().invoke(app, argv, input="n\n")
    assert refused.exit_code == 1
    assert held in refused.output
    assert "nothing was deleted" in refused.output
    assert contents(sqlite_url, 1) == (TOKENS * TOKEN_NBYTES, 12, 2)
    done = CliRunner().invoke(app, [*argv, "--yes"])
    assert (done.exit_code, f"deleted {held}" in done.output) == (0, True), done.output
    assert contents(sqlite_url, 1) == (0, 0, 0)
    purge.purge(sqlite_url, "sorting", lambda: T0 + 1000)
    again = CliRunner().invoke(app, argv)  # it asks nothing: there is nothing to delete
    assert (again.exit_code, again.output) == (
        0,
        "run 'sorting' (1) was purged at 2026-09-21 14:30:00 UTC and holds nothing\n",
    )
    with pytest.raises(LedgerError, match="9 tokens of sample 101 were purged at 2026-09-21 14:30:00 UTC"):
        tokens.show(sqlite_url, 101)


def test_nothing_of_the_contents_is_left_in_sqlite_s_file(sqlite_url: str) -> None:
    """Short payloads lie in a page among others, long ones in pages of their own: both are overwritten."""
    long = chunk(7001, 1, 0, 4000, 1)
    fat: list[r.Record] = [
        group(7000, 7001, 1, 9, 1),
        r.LeaseGranted(7001, 1, 1, 1, 0, T0),
        long,
        r.LeaseEnded(7001, 1, "x", 4000, 0, T0),
        r.SampleEnded(7001, "surplus", "x", 0, 0, None, None, T0),
    ]
    written(sqlite_url, [*training(), fat, ended()])
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    said = [answer(102, 4), answer(301, 3), long.tokens[:64], long.tokens[-64:], long.logprobs[8000:8064]]
    assert all(text in path.read_bytes() for text in said)
    purge.purge(sqlite_url, "sorting")
    left = b"".join(
        file.read_bytes() for file in path.parent.iterdir()
    )  # no daemon runs: its log has gone into the file
    assert [text in left for text in said] == [False] * len(said)


def test_an_unknown_run_is_refused(sqlite_url: str) -> None:
    written(sqlite_url, [[group(1, 1, 1, 1, 1)]])
    with pytest.raises(LedgerError, match="no run called 'sortin'"):
        purge.survey(sqlite_url, "sortin")


def test_differences_of_tokens_go_with_the_tokens(url: str) -> None:
    """And what they add up to stays, as the accounting does."""
    first, last = first_sample(1), first_sample(5)
    said = [
        r.DifferencesRecorded(sample, step, 1, 9, 0.5, apart(9)) for sample, step in ((first, 1), (last, 5))
    ]
    written(url, [*training(), list(said), ended()])
    asked = "SELECT sample_id, n_tokens, mean, length(differences) FROM token_differences ORDER BY sample_id"
    before = fetch(url, asked)
    assert [row[0] for row in before] == [first, last]
    assert all(row[3] == 2 * row[1] for row in before)
    assert check(url) == []
    keep(url, Policy("drop", 4))
    assert [row[3] for row in fetch(url, asked)] == [0, 2 * before[1][1]], "the oldest step's were dropped"
    purge.purge(url, "sorting")
    assert [row[:3] for row in fetch(url, asked)] == [row[:3] for row in before]
    assert [row[3] for row in fetch(url, asked)] == [0, 0]
    assert check(url) == []
