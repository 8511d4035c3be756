"""Reports are questions that both databases answer alike, through us, through `sqlite3` and through `psql`."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import pytest
import sqlalchemy as sa
import typer
from typer.testing import CliRunner

from scavenger import resources
from scavenger.cli.ledger import _moment
from scavenger.cli.ledger import app as cli
from scavenger.errors import LedgerError
from scavenger.ledger import queries
from scavenger.ledger import records as r
from scavenger.ledger.read.reports import FOLDED, report
from tests.conftest import lacks
from tests.ledger.examples import T0, came_back, everything, group, moved_group, prologue, written

DAY_S = 86_400
MIDNIGHT = T0 - T0 % DAY_S + DAY_S


def history() -> list[list[r.Record]]:
    """Everything, and a hold of two GPUs that begins six hours before midnight and ends twelve after."""
    return [
        *everything(),
        [
            r.AllocationStarted("i2", 0, 502, "n4", 2, MIDNIGHT - 6 * 3600),
            r.AllocationEnded("i2", 0, "node_fail", MIDNIGHT + 12 * 3600),
        ],
    ]


def answers(url: str, name: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(report(url, name, "json"))["rows"]
    return found


def outside(url: str, name: str) -> list[list[str]]:
    """The same file, run by the database's own program."""
    path = str(resources.path(f"sql/reports/{name}.sql"))
    if url.startswith("sqlite"):
        argv = ["sqlite3", "-readonly", "-csv", "-cmd", f".read {path}", url.removeprefix("sqlite:///")]
    else:
        parsed = sa.make_url(url)
        conninfo = f"host={parsed.query['host']} user={parsed.username} dbname={parsed.database}"
        argv = ["psql", "-X", "-q", "-t", "--csv", "-v", "ON_ERROR_STOP=1", "-f", path, conninfo]
    missing = lacks(argv[0])
    if missing:
        pytest.skip(missing)
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return list(csv.reader(io.StringIO(done.stdout)))


@pytest.mark.parametrize("name", queries.report_names())
def test_a_report_states_its_question_first(name: str) -> None:
    sql = queries.load_report(name)
    assert sql.startswith("-- ")
    assert "?" in queries.question(sql)
    assert ("--since" in queries.question(sql)) == queries.is_bounded(sql), (
        "its reader has the command's options"
    )
    assert '"bounds"' not in queries.question(sql)
    assert sql.rstrip().endswith(";")
    assert sql.count(";") - sum(line.count(";") for line in sql.splitlines() if line.startswith("--")) == 1


def test_reports_run_unchanged_in_the_databases_own_programs(url: str) -> None:
    written(url, history())
    for name in queries.report_names():
        ours = list(csv.reader(io.StringIO(report(url, name, "csv"))))[1:]
        theirs = outside(url, name)
        assert len(ours) == len(theirs), name
        for mine, other in zip(ours, theirs, strict=True):
            assert len(mine) == len(other), name


def test_gpu_hours_are_cut_at_midnight(url: str) -> None:
    written(url, history())
    found = [row for row in answers(url, "harvested_gpu_hours_by_day") if row["node"] == "n4"]
    assert [(row["day_utc"], row["gpu_hours"], row["allocations"]) for row in found] == [
        ("2026-09-21", 12, 1),
        ("2026-09-22", 24, 1),
    ]


def test_days_are_named_as_the_calendar_names_them(sqlite_url: str) -> None:
    days = {
        "1970-01-01": 0,
        "1999-12-31": 10956,
        "2000-02-29": 11016,
        "2000-03-01": 11017,
        "2024-02-29": 19782,
        "2026-12-31": 20818,
    }
    holds = [r.AllocationStarted(f"i{n}", 0, n, "n", 1, n * DAY_S + 3600.0) for n in days.values()]
    ends = [r.AllocationEnded(f"i{n}", 0, "preempted", n * DAY_S + 7200.0) for n in days.values()]
    written(sqlite_url, [[*holds, *ends]])
    assert [row["day_utc"] for row in answers(sqlite_url, "harvested_gpu_hours_by_day")] == sorted(days)


def test_preemptions_and_lost_engines_count_tokens(url: str) -> None:
    written(url, history())
    lost = [row for row in answers(url, "preemptions") if row["job_id"] == 501]
    assert [
        (p["reason"], p["notice"], p["samples_in_flight"], p["tokens_salvaged"], p["tokens_regenerated"])
        for p in lost
    ] == [("preempted", "notice", 1, 5, 2)]
    (engine,) = answers(url, "lost_engines")
    assert (engine["allocation_end_reason"], engine["notice"], engine["most_regenerated_of_one_sample"]) == (
        "preempted",
        "notice",
        2,
    )
    (cause,) = answers(url, "lost_engines_by_cause")
    assert (
        cause["allocation_end_reason"],
        cause["engines"],
        cause["tokens_salvaged"],
        cause["tokens_regenerated"],
    ) == ("preempted", 1, 5, 2)


def test_an_engine_that_came_back_to_its_gpus_is_one_preemption(url: str) -> None:
    written(url, [prologue(), came_back()])
    (one,) = answers(url, "preemptions")
    assert (one["notice"], one["samples_in_flight"], one["tokens_salvaged"]) == ("notice", 2, 7)
    (release,) = answers(url, "gpu_release")
    assert (release["worker_id"], release["notice"], float(str(release["kept_s"]))) == (3, "notice", 2.0)


def test_the_rewards_and_moves_of_a_run(url: str) -> None:
    written(url, history())
    (step,) = answers(url, "reward_per_step")
    assert (
        step["step"],
        step["attempt"],
        step["samples"],
        step["consumed"],
        step["mean_reward"],
        step["moved"],
    ) == (1, 2, 2, 2, 0.625, 1)
    (moved,) = answers(url, "moved_samples")
    assert (moved["samples"], moved["moved"], moved["moved_percent"], moved["most_moves"]) == (3, 1, 33.3, 1)
    assert answers(url, "exactly_once") == []
    assert [row["reason"] for row in answers(url, "decisions_with_reasons")] == ["5 idle GPUs, demand for 1"]


def test_what_the_harvester_did_and_what_befell_the_site_are_not_drowned_by_what_runs_do_each_second(
    url: str,
) -> None:
    loaded = [r.Event("weights_loaded", 1, "worker 1", f"version {n}", "{}", T0 + n) for n in range(3)]
    placed = [
        r.Decision("placement", "lease", "sample 1", "to the emptiest engine", "{}", T0 + n) for n in range(3)
    ]
    ours = [
        r.Decision("harvest", "submit", "i1", "1 GPU idle", "{}", T0 + 5, "wanted"),
        r.Decision("harvest", "none", "", "no run is open", "{}", T0 + 6, "no_run"),
        r.Event("harvest_stopped", 0, "scavenge", "scavenger drain: ada", "{}", T0 + 7),
    ]
    written(url, [*everything(), [*loaded, *placed, *ours]])
    told = answers(url, "harvest_decisions")
    assert [(row["action"], row["subject"], row["job_id"], row["code"]) for row in told[-2:]] == [
        ("submit", "i1", 501, "wanted"),
        ("none", "", None, "no_run"),
    ]
    assert "placed" not in {row["code"] for row in told}
    assert len(told) == sum(row["policy"] == "harvest" for row in answers(url, "decisions_with_reasons")) >= 2
    kinds = [row["kind"] for row in answers(url, "site_events")]
    assert kinds[-1] == "harvest_stopped"
    assert kinds == [row["kind"] for row in answers(url, "events") if row["kind"] != "weights_loaded"]


def test_the_life_of_a_sample_is_told_in_order(url: str) -> None:
    written(url, history())
    life = answers(url, "sample_life")
    assert {row["sample_id"] for row in life} == {11}
    assert [row["what"] for row in life] == [
        "prompt submitted",
        "leased",
        "tokens accepted",
        "lease ended",
        "leased",
        "tokens accepted",
        "lease ended",
        "complete",
        "consumed",
        "step committed",
        "weights published",
        "reopened",
        "group delivered",
        "consumed",
        "step committed",
        "checkpoint written",
    ]
    detail = {row["what"]: (row["who"], row["detail"]) for row in reversed(life)}  # the first of each
    assert detail["prompt submitted"] == (
        "sorting",
        "train step 1, prompt 0, retry 0, sample 0 of 2 in group 10, version 1",
    )
    assert detail["leased"] == ("harvested worker 1 on n3", "epoch 1 after 0 tokens, version 1, job 501")
    assert [(row["who"], row["detail"]) for row in life if row["what"] == "tokens accepted"] == [
        ("reference on n3", "epoch 1, 5 tokens in 2 chunks, version 1"),
        ("reference on n0", "epoch 2, 4 tokens in 1 chunks, version 1"),
    ]
    assert detail["complete"] == ("stop", "9 tokens")
    assert re.fullmatch(
        r"step 1, attempt 1, reward 1(\.0+)?, advantage 0\.70*", str(detail["consumed"][1])
    )  # each database's own digits
    assert [(row["who"], row["detail"]) for row in life if row["what"] == "step committed"] == [
        ("undone by attempt 2", "step 1, attempt 1, on version 1"),
        ("survives", "step 1, attempt 2, on version 1"),
    ]
    assert detail["weights published"] == ("", "version 2 of step 1, attempt 1")
    assert detail["checkpoint written"] == ("survives", "step 1, /ckpt/1")


def test_what_is_in_flight_is_told_by_run_and_worker(url: str) -> None:
    written(url, [prologue(), moved_group()[:8]])
    (row,) = answers(url, "in_flight_by_run_and_worker")
    assert (row["run"], row["worker_id"], row["node"], row["samples"], row["accepted_tokens"]) == (
        "sorting",
        2,
        "n0",
        2,
        9,
    )


def test_a_table_shows_its_question_and_dates(url: str) -> None:
    written(url, history())
    text = report(url, "preemptions")
    assert text.lstrip().startswith("Which harvested jobs lost their GPUs")
    assert "2026-09-21 14:13:29" in text
    assert "2 rows" in text


def test_an_unknown_report_or_format_is_refused_with_the_choice(url: str) -> None:
    written(url, [[]])
    with pytest.raises(LedgerError, match="preemptions"):
        report(url, "../ledger/next_ids")
    with pytest.raises(LedgerError, match="table, csv, json"):
        report(url, "preemptions", "xml")  # type: ignore[arg-type]


def test_reports_without_an_end_show_their_newest_rows_and_others_when_asked(url: str) -> None:
    names = {
        "episodes",
        "events",
        "site_events",
        "decisions_with_reasons",
        "harvest_decisions",
        "gpus_by_owner_over_time",
        "other_users_waits",
    }
    assert {name for name in queries.report_names() if queries.is_bounded(queries.load_report(name))} == names
    many = 1_200
    written(
        url,
        [
            [prologue()[0], r.EpisodeBegun(1, 1, "e", T0)],
            [
                record
                for n in range(many)
                for record in (
                    r.Event("k", 0, f"{n}", "", "{}", T0 + n),
                    r.Decision("harvest", "a", f"{n}", "r", "{}", T0 + n),
                    r.ClusterPolled(n, 0, 0, 0, 0, 0, T0 + n),
                    r.OtherUserWaits(n, "u", "gpu", 1, T0, T0, T0 + n, harvested_gpus=1),
                    group(n, n, 1, 0, 1, purpose="turn"),
                    r.TurnBegun(n, 1, 1, n + 1, b"r" * 32, b"c" * 32, 0, 0, 3, b"p" * 32, T0 + n),
                )
            ],
        ],
    )
    for name in names:

        def shown(*bounds: float | None, of: str = name) -> list[int]:
            rows = json.loads(report(url, of, "json", *bounds))["rows"]  # type: ignore[arg-type]
            columns = ("subject", "gpus_idle", "job_id", "sample_id")
            return [int(next(row[column] for column in columns if column in row)) for row in rows]

        assert shown() == list(range(many - 1000, many)), name
        assert len(outside(url, name)) == 1000, "the file alone is bounded too"
        assert shown(3) == [many - 3, many - 2, many - 1]
        assert shown(5000) == list(range(many))
        assert shown(None, T0 + many - 10.5) == list(range(many - 10, many))
        assert shown(4, T0 + many - 10.5) == list(range(many - 4, many))
        assert shown(None, None, T0 + 3) == [0, 1, 2], (
            "the newest of what was before, not before of the newest"
        )
        assert shown(2, T0 + 4, T0 + 9) == [7, 8]
    with pytest.raises(LedgerError, match="--limit, --since and --until are for decisions_with_reasons"):
        report(url, "preemptions", "table", 3)
    with pytest.raises(LedgerError, match="--limit, --since and --until are for"):
        report(url, "preemptions", until=T0)


def test_a_report_of_a_span_is_asked_for_on_the_command_line(tmp_path: Path, sqlite_url: str) -> None:
    written(sqlite_url, [[r.Event("k", 0, f"{n}", "", "{}", T0 + n) for n in range(5)]])
    config = tmp_path / "reader.toml"
    config.write_text(f'[daemon]\nstate_dir = "{tmp_path}"\nledger = "{sqlite_url}"\n')
    asked = ["report", "events", "--format", "json", "--config", str(config)]

    def at(second: float) -> str:
        return datetime.fromtimestamp(T0 + second, UTC).isoformat()

    done = CliRunner().invoke(cli, [*asked, "--since", at(1), "--until", at(3)])
    assert [row["subject"] for row in json.loads(done.stdout)["rows"]] == ["1", "2"]
    refused = CliRunner().invoke(cli, [*asked, "--since", at(3), "--until", at(1)])
    assert refused.exit_code == 2
    assert "is not after" in refused.output


def test_a_piped_table_has_a_line_for_each_row_and_a_terminal_s_is_folded(
    tmp_path: Path, sqlite_url: str
) -> None:
    reason = " ".join(f"word{n}" for n in range(60))
    written(sqlite_url, [[r.Event("k", 0, "s", reason, "{}", T0)]])
    config = tmp_path / "reader.toml"
    config.write_text(f'[daemon]\nstate_dir = "{tmp_path}"\nledger = "{sqlite_url}"\n')
    piped = CliRunner().invoke(cli, ["report", "events", "--config", str(config)]).stdout
    assert any(reason in line for line in piped.splitlines())
    folded = report(sqlite_url, "events", width=FOLDED)
    assert max(map(len, folded.splitlines())) <= FOLDED
    assert "word59" in folded


def test_a_time_is_a_date_in_utc_or_so_long_ago() -> None:
    said = {
        "90s": 999_910.0,
        "24h": 913_600.0,
        "7d": 395_200.0,
        "1970-01-02": 86_400.0,
        "1970-01-02T01:00": 90_000.0,
    }
    said |= {"1970-01-02T01:00+01:00": 86_400.0, "1970-01-02T01:00Z": 90_000.0}
    assert {text: _moment(text, 1_000_000.0) for text in said} == said
    for nonsense in ("d", "yesterday", "24", "1e400d x"):
        with pytest.raises(typer.BadParameter, match="is no time"):
            _moment(nonsense, 0.0)


def test_reports_lie_where_an_admin_looks_for_them() -> None:
    assert Path(resources.path("sql/reports")).is_dir()
    assert len(queries.report_names()) >= 10


@pytest.mark.parametrize("format", ["table", "csv"])
def test_what_an_engine_says_does_not_drive_the_terminal_of_who_reads_a_report(
    tmp_path: Path, format: Literal["table", "csv"]
) -> None:
    url = f"sqlite:///{tmp_path}/ledger.sqlite3"
    said = "\x1b]0;title\x07\x1b[2J\x9b2J\u202e質問\tok"
    written(url, [*everything(), [r.Event("weights_failed", 0, "worker 1", said, "{}", T0)]])
    shown = report(url, "events", format)
    assert "質問" in shown
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(shown)
    assert any(row.get("reason") == said for row in answers(url, "events")), "JSON says it exactly"
