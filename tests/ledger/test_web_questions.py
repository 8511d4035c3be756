"""The statements of `scavenger web` on both databases: what a reader copies is what the page was made of."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa

from scavenger.errors import LedgerError
from scavenger.ledger import records as r
from scavenger.ledger import schema, store
from scavenger.ledger.read import contents
from scavenger.ledger.read.reader import reading
from scavenger.protocol.messages import unpack_tokens
from scavenger.top import feed
from scavenger.web import charts, pages, questions, steps
from scavenger.web.panels import Page, Panel, ask
from scavenger.web.questions import filled
from tests.ledger.examples import (
    CONFIG,
    T0,
    an_episode,
    chunk,
    consumed,
    evaluated,
    everything,
    moved_group,
    preempted,
    prologue,
    written,
)


class _NoContents(pages.Contents):
    def read(
        self, connection: sa.Connection, sample_ids: Sequence[int], tokenizer: str, *, added: bool = False
    ) -> list[pages.Read]:
        return [pages.Read("", f"text of {one}") for one in sample_ids]


def test_each_page_is_the_same_on_both_databases_and_its_sql_runs_as_copied(url: str) -> None:
    written(url, [*everything()[:4], evaluated(), *everything()[4:]])
    engine, contents = store.open_readonly(url), _NoContents()
    try:
        with reading(engine) as c:
            shown = {
                "overview": pages.overview(c),
                "run": pages.run(c, 1),
                "step": steps.step(c, 1, 1, "best", 0),
                "evaluation": steps.evaluation(c, 1, 1, "best", 0),
                "group": pages.group(c, contents, 10),
                "sample": pages.sample(c, contents, 11),
                "episode": pages.episode(c, contents, 1),
                "compare": pages.compare(c, [1]),
                "changed": steps.changed(c, 1, 2, 1),
                "harm": pages.harm(c),
                "decisions": pages.decisions(c),
                "decision": pages.decision(c, 1),
            }
            for groups, first in ((questions.GROUPS, 10), (questions.EVALUATION_GROUPS, 90)):
                listed = ask(c, filled(groups, run_id=1, step=1, most=9))
                assert [(row["kind"], row["id"], row["episode_id"]) for row in listed] == [
                    ("group", first, int(first == 10)),
                    ("sample", first + 1, int(first == 10)),
                    ("sample", first + 2, int(first == 10)),
                ]
            for name, page in shown.items():
                assert all(panel.sql or panel.search for panel in page.panels), (
                    f"a panel of {name} has no SQL"
                )
                for panel in page.panels:
                    for statement in filter(str.strip, panel.sql.split(";\n\n")):
                        assert ":" not in "".join(
                            line for line in statement.splitlines() if not line.startswith("--")
                        ), "no parameter is left"
                        ask(c, statement)
                assert any(panel.body or panel.texts for panel in page.panels), name
            assert ("1", "/runs/1") in {
                (cell.text, cell.href) for cell in shown["overview"].panels[0].body[0]
            }
            moved = shown["sample"].panels[1].charts[0]
            assert [bar.tone for bar in moved.bars] == list(range(len(moved.bars))), "a colour for each epoch"
            assert len(moved.bars) >= 2, "the sample moved"
    finally:
        engine.dispose()


def test_of_what_is_long_the_beginning_is_read_on_both_databases(url: str) -> None:
    apart = [r.DifferencesRecorded(11, 1, n, 9, 0.5, bytes([n]) * 18) for n in (1, 2)]
    written(url, [*everything()[:4], evaluated(), *everything()[4:], apart])
    engine = store.open_readonly(url)
    try:
        with reading(engine) as c:
            whole, some = (contents.recorded(c, [11, 12], most) for most in (1_000, 5))
            assert len(whole[11].tokens) == 4 * 9
            for sample, row in whole.items():
                assert not row.why
                assert some[sample] == row._replace(
                    tokens=row.tokens[:20], logprobs=row.logprobs[:20], differences=row.differences[:10]
                )
            assert whole[11].differences == bytes([2]) * 18, "of the newest step"
            prompt = contents.prompts(c, [90], 1_000, added=False)[90]
            assert len(prompt) > 4
            for added in (False, True):
                assert contents.prompts(c, [90], 1, added=added) == {90: prompt[:4]}
            tokens = pages._completions(c, [11, 12], 1_000)
            assert tokens[11] == list(unpack_tokens(whole[11].tokens))
            (kept,) = ask(c, filled(questions.KEPT, run_id=1))
            assert set(kept) == {"groups", "moved", "unmoved", "episodes"}
            assert feed._ledger(c).steps[1], "what `top` asks is bounded in the same way"
    finally:
        engine.dispose()


def statements(page: Page) -> list[str]:
    parts = [one.strip().rstrip(";\n") for panel in page.panels for one in panel.sql.split(";\n\n")]
    return [f"{one};" for one in parts if one]


def test_what_a_reader_copies_runs_unchanged_in_sqlite3_and_psql(url: str, tmp_path: Path) -> None:
    """The programs themselves: they expand variables, and take a statement for what ends it."""
    written(url, everything())
    engine, contents = store.open_readonly(url), _NoContents()
    try:
        with reading(engine) as c:
            shown = [
                pages.overview(c),
                pages.run(c, 1),
                pages.compare(c, [1]),
                steps.step(c, 1, 1, "best", 0),
                steps.evaluation(c, 1, 1, "best", 0),
                steps.changed(c, 1, 2, 1),
                pages.group(c, contents, 10),
                pages.sample(c, contents, 11),
                pages.episode(c, contents, 1),
                pages.harm(c),
                pages.decisions(c),
                pages.decision(c, 1),
            ]
            asked = list(dict.fromkeys(one for page in shown for one in statements(page)))
            rows = [len(ask(c, one)) for one in asked]
    finally:
        engine.dispose()
    # A line after each statement's rows, so that they can be counted.
    script = "".join(f"{one}\nSELECT 'end of one';\n" for one in asked)
    parts = sa.make_url(url)
    if parts.get_backend_name() == "sqlite":
        argv = ["sqlite3", "-readonly", "-bail", "-cmd", ".mode quote", str(parts.database)]
    else:
        plain = parts.set(drivername="postgresql").render_as_string(hide_password=False)
        argv = [
            "psql",
            "--no-psqlrc",
            "--quiet",
            "--tuples-only",
            "--no-align",
            "--set=ON_ERROR_STOP=1",
            plain,
        ]
    if shutil.which(argv[0]) is None:
        pytest.skip(f"{argv[0]} is not installed")
    done = subprocess.run(argv, input=script, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    counted, n = [], 0
    for line in done.stdout.splitlines():
        if line.strip("'") == "end of one":
            counted.append(n)
            n = 0
        elif line:
            n += 1
    assert len(asked) > 20
    assert counted == rows


def table(panel: Panel) -> list[dict[str, str]]:
    return [dict(zip(panel.head, (cell.text for cell in row), strict=True)) for row in panel.body]


def test_a_step_says_where_each_gpu_s_seconds_went(url: str) -> None:
    """Sample 11 was on engine 1 from 6 s to 8 s, when it left, and on engine 2 from 9 s; sample 12 on engine 2 from 6 s to 10 s."""
    written(url, [prologue(), moved_group(), preempted(), consumed()])
    engine = store.open_readonly(url)
    try:
        with reading(engine) as c:
            shown = {panel.title: panel for panel in steps.step(c, 1, 1).panels}
    finally:
        engine.dispose()
    panel = shown["Where each GPU's seconds went"]
    assert [list(row.values()) for row in table(panel)] == [
        ["2", "reserved", "n0", "1", "6", "4", "2", "8"],
        ["1", "harvested", "n3", "1", "2", "2", "0", "5"],
    ]
    assert "6.0 s" in panel.note
    drawn = panel.charts[0].bars
    assert [bar.tone for bar in drawn] == [5, 0, 5, 0]
    assert round(drawn[1].width / drawn[0].width, 2) == 0.67


def waits_of(url: str, *clusters: str) -> tuple[Panel, Panel]:
    """The panels of the page Harm on waits by day, and on hours by account, where each cluster had a wait of its own."""
    waits = [
        r.OtherUserWaits(900 + n, "bob", "gpu", 4, T0, T0, T0 + 1, harvested_gpus=1, cluster=name)
        for n, name in enumerate(clusters)
    ]
    written(url, [prologue(), waits])
    engine = store.open_readonly(url)
    try:
        with reading(engine) as c:
            shown = pages.harm(c).panels
    finally:
        engine.dispose()
    (by_day,) = [one for one in shown if "and partition" in one.title]
    (by_account,) = [one for one in shown if one.title == "GPU-hours given, by user and account"]
    return by_day, by_account


def test_waits_on_several_clusters_are_told_apart(url: str) -> None:
    by_day, _ = waits_of(url, "north", "north")
    assert by_day.title.startswith("By day, cluster and partition")
    said = [
        (row["cluster"], row["partition"], row["waits with us"], row["waits without us"])
        for row in table(by_day)
    ]
    assert said == [("the daemon's own", "gpu", "0", "1"), ("north", "gpu", "2", "0")]


def test_of_one_cluster_no_column_names_it_and_the_hours_have_their_account(url: str) -> None:
    by_day, by_account = waits_of(url)
    assert by_day.title.startswith("By day and partition")
    assert "cluster" not in by_day.head
    assert "v_other_users_waits" in by_day.sql
    (row,) = table(by_account)
    assert (row["owner"], row["account"], row["runs"]) == ("owner", "physics", "1")
    assert "v_training_jobs" in by_account.sql, "what a reader copies has the account"


def test_prompts_that_came_before_are_found_and_those_that_changed_most_stand_first(url: str) -> None:
    second = [*moved_group(20, 21, 2, 1), *consumed(20, 21, 2)]
    other = r.GroupCreated(40, 1, "train", 2, 0, 0, 1, b"\1\0\0\0", 1, 41, '{"max_tokens": 64}', "{}", T0)
    better = [
        msgspec.structs.replace(one, reward=1.0) if isinstance(one, r.SampleEnded) else one for one in second
    ]
    written(url, [prologue(), moved_group(), consumed(), [*better, other]])
    engine = store.open_readonly(url)
    try:
        with reading(engine) as c:
            before = steps.step(c, 1, 2).panels[-1]
            found = table(steps.changed(c, 1, 2, 1).panels[0])
            assert steps.changed(c, 1, 2, 7).panels[0].body == ()
            with pytest.raises(LedgerError, match="no run 9"):
                steps.changed(c, 9, 2, 1)
    finally:
        engine.dispose()
    assert table(before) == [{"since step": "1", "purpose": "train", "prompts": "1"}]
    assert before.body[0][0].href == "/runs/1/steps/2/since/1"
    assert [(one["group then"], one["group now"], one["change"]) for one in found] == [("10", "20", "0.375")]


def test_a_step_s_parts_follow_one_another_and_runs_are_compared_by_step() -> None:
    (drawn,) = steps.parts(
        {"seconds_seed": 4.0, "seconds_to_training": 1.0, "seconds_train": 2.0, "seconds_publish": 2.0}
    )
    seed, sleep, train, publish = drawn.bars
    assert sleep.x == train.x == seed.x + seed.width, "engines go to sleep while it trains"
    assert publish.x == train.x + train.width
    assert publish.width == train.width == seed.width / 2
    assert steps.parts({"seconds": 4.0}) == ()
    both = charts.compared(
        "reward", [("1 a", [(1, 0.0), (3, 1.0)]), ("2 b", [(2, 0.5), (3, math.nan)])], "step"
    )
    assert [tone for _, tone in both.lines] == [0, 1]
    assert both.lines[1][0].startswith(f"{charts.LEFT + (charts.WIDTH - charts.LEFT - charts.RIGHT) / 2}")
    assert charts.compared("reward", [("1 a", [])], "step").lines == (("", 0),)


#: The samples of step 1 that each filter keeps, in its order: 11 moved, 12 was cut off, and 71 is masked.
KEPT = {
    "all": ["11", "12", "71"],
    "moved": ["11"],
    "masked": ["71"],
    "filtered": [],
    "all rewards equal": [],
    "cut off": ["12"],
    "best": ["11", "12", "71"],
    "worst": ["12", "11", "71"],
}


def test_each_filter_keeps_what_it_says(url: str) -> None:
    written(url, [prologue(), moved_group(), preempted(), consumed(), masked()])
    assert KEPT.keys() == steps.FILTERS.keys()
    shown = asked_of(url, *(lambda c, name=name: steps.step(c, 1, 1, name) for name in KEPT))  # type: ignore[misc]
    for (name, expected), page in zip(KEPT.items(), shown, strict=True):
        panel = panels(page)["Samples"]
        assert ids(panel) == expected, name
        assert [title for title, _, on in panel.choices if on] == [name]


def test_only_numbers_are_filled_in() -> None:
    with pytest.raises(TypeError):
        filled(questions.RUN, run_id="1; DROP TABLE runs")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        filled(questions.RUN, run_id=float("inf"))


# ---------------------------------------------------------------- what each page says, word for word


def asked_of(url: str, *builds: Callable[[sa.Connection], Page]) -> list[Page]:
    engine = store.open_readonly(url)
    try:
        with reading(engine) as c:
            return [build(c) for build in builds]
    finally:
        engine.dispose()


def panels(page: Page) -> dict[str, Panel]:
    return {panel.title: panel for panel in page.panels}


def ids(panel: Panel) -> list[str]:
    return [row["sample id"] for row in table(panel)]


def test_two_runs_of_the_overview_have_one_time_axis_and_a_preemption_is_a_mark(url: str) -> None:
    def committed(run: int, step: int, at: float) -> r.Record:
        return r.StepCommitted(run, step, "train", 1, 1, '{"reward": 0.5, "seconds_wait": 3}', at)

    other: list[r.Record] = [
        r.RunCreated(2, "other", "owner", 17, CONFIG, "{}", "", T0 + 30),
        r.AttemptGranted(2, 1, "login1", 102, 0, CONFIG, "{}", T0 + 30),
        committed(1, 1, T0 + 40),
        committed(2, 1, T0 + 40),
        committed(2, 2, T0 + 100),
    ]
    written(url, [prologue(), moved_group(), preempted(), other])
    overview, of_run = asked_of(url, pages.overview, lambda c: pages.run(c, 1))
    first, second = panels(overview)["sorting"], panels(overview)["other"]
    assert [chart.label for chart in first.charts] == ["reward", "seconds waiting in a step"]
    (at_40,) = [x for x, _ in first.charts[0].dots]
    assert [x for x, _ in second.charts[0].dots] == [at_40, charts.WIDTH - charts.RIGHT]
    width = charts.WIDTH - charts.LEFT - charts.RIGHT
    assert at_40 == round(charts.LEFT + width * 0.4, 1)
    ((x, said),) = first.charts[0].marks
    assert x == round(charts.LEFT + width * 0.08, 1), "it left 8 s after the axis began"
    assert "harvested engine on n3 left, goodbye; allocation preempted" in said
    assert "1 samples, 5 tokens salvaged, 2 regenerated" in said
    assert second.charts[0].marks == ()
    assert [title for _, title in panels(of_run)["Metrics"].charts[0].marks] == [said]
    (left,) = table(panels(of_run)["Engines that left"])
    assert (left["allocation ended"], left["salvaged"], left["regenerated"]) == ("preempted", "5", "2")


def test_metrics_come_in_the_order_in_which_they_are_looked_at() -> None:
    names = [
        "kl",
        "loss",
        "reward_std",
        "seconds",
        "eval_cut_fraction",
        "eval_sampled",
        "eval_greedy",
        "length_mean",
        "reward",
        "reward_format",
        "abc",
        "reward_answer",
    ]
    assert pages.ordered(names) == [
        "reward",
        "eval_greedy",
        "eval_sampled",
        "eval_cut_fraction",
        "length_mean",
        "reward_answer",
        "reward_format",
        "seconds",
        "loss",
        "abc",
        "kl",
        "reward_std",
    ]


def test_the_longest_number_of_an_axis_has_room() -> None:
    """With letters that are two thirds of their height wide."""
    numbers = (-1.234e-05, -123456.7, 1.79e30, -1.79e30)
    longest = max(len(charts.number(one)) for one in numbers)
    assert 8 * longest <= charts.LEFT - 6
    assert 8 * charts.MOST_NAME <= charts.NAMES - 8


def test_metrics_are_drawn_smoothed_beside_the_measured() -> None:
    """Each value's share is .2 of its line, corrected as the first ones have none before them."""
    assert charts.smoothed([0.0, 1.0]) == pytest.approx([0.0, 0.2 / 0.36])
    assert charts.smoothed([4.0] * 5) == pytest.approx([4.0] * 5)
    drawn = charts.series("reward", [(0, 0.0), (1, 1.0), (2, 0.0)], (), 0, 2)
    assert drawn.smooth
    assert drawn.smooth != drawn.raw


def test_a_bar_of_the_histogram_leads_to_the_samples_of_its_bin_and_to_no_other(url: str) -> None:
    written(url, everything())
    (every,) = asked_of(url, lambda c: steps.step(c, 1, 1))
    bars = panels(every)["Rewards"].charts[0].bars
    assert [bar.href for bar in bars] == [f"/runs/1/steps/1?only=all&bin={i}" for i in range(20)]
    binned = asked_of(url, *(lambda c, i=i: steps.step(c, 1, 1, "all", i) for i in range(20)))  # type: ignore[misc]
    assert [ids(panels(page)["Samples"]) for page in binned] == [["12"], *([[]] * 18), ["11"]]
    assert [int(bar.title.split(": ")[1].split()[0]) for bar in bars] == [1, *([0] * 18), 1]


def copies(url: str, table: str, of: str, n: int, changed: dict[str, str]) -> None:
    """So many copies of a row, in each of which the `changed` columns are of its number `n.i`, from 0."""
    engine = store.open_engine(url)
    columns = [one.name for one in schema.metadata.tables[table].columns]
    try:
        with engine.begin() as c:
            c.exec_driver_sql(
                f"WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {n - 1}) INSERT INTO {table} "
                f"({', '.join(columns)}) SELECT {', '.join(changed.get(one, f'o.{one}') for one in columns)} FROM n, {table} o WHERE o.{of}"
            )
    finally:
        engine.dispose()


def test_every_reward_of_a_step_is_in_a_bin_however_many_there_are_but_of_what_was_generated_again(
    url: str,
) -> None:
    """6,000 rewards below 6, beside 0.25 and 1; and as many from 6 on of samples that were superseded."""
    written(url, everything())
    for first, state, least in ((1_000, "consumed", 0), (10_000, "superseded", 6)):
        own = {"sample_id": f"{first} + n.i", "state": f"'{state}'", "reward": f"{least} + n.i / 1000.0"}
        copies(url, "samples", "sample_id = 12", 6_000, own)
    (every,) = asked_of(url, lambda c: steps.step(c, 1, 1))
    drawn = panels(every)["Rewards"].charts[0]
    counts = [int(bar.title.split(": ")[1].split()[0]) for bar in drawn.bars]
    assert (sum(counts), min(counts), max(counts)) == (6_002, 300, 301)
    assert [one.text for one in drawn.labels][1:] == ["0", "5.999"]
    (last,) = asked_of(url, lambda c: steps.step(c, 1, 1, "best", 19))
    assert [row["reward"] for row in table(panels(last)["Samples"])][:2] == ["5.999", "5.998"]
    assert {row["state"] for row in table(panels(last)["Samples"])} == {"consumed"}


def test_each_lease_of_a_step_counts_however_many_there_are_and_what_is_not_listed_is_said(url: str) -> None:
    """20,500 leases more of engine 2, of one token each, from 10.5 s to 11 s; and 204 engines more."""
    written(url, [prologue(), moved_group(), preempted(), consumed()])
    granted = f"{T0 + 10.5} + n.i / 41000.0"
    leased = {"epoch": "100 + n.i", "granted_at": granted, "ended_at": f"{granted} + 0.01"}
    copies(url, "leases", "sample_id = 12", 20_500, leased | {"start_len": "0", "end_len": "1"})
    copies(url, "workers", "worker_id = 2", 204, {"worker_id": "1000 + n.i", "session": "'m' || n.i"})
    (page,) = asked_of(url, lambda c: steps.step(c, 1, 1))
    panel = panels(page)["Where each GPU's seconds went"]
    (of_two,) = [row for row in table(panel) if row["engine"] == "2"]
    assert list(of_two.values())[4:] == ["6", "4.51", "1.49", "20,508"]
    assert "6.0 s" in panel.note, "it was drawn to its commit"
    assert panel.note.endswith("; drawn are the first 24 of 206 engines; listed are 200")
    assert len({bar.y for bar in panel.charts[0].bars}) == 24


def test_a_long_run_says_what_is_left_out_draws_what_is_there_and_leads_to_what_is_older(url: str) -> None:
    """604 steps more, the last of them 6,000 s after the run began, with as many evaluations; and 250 engines that left."""
    written(url, [prologue(), moved_group(), preempted(), consumed()])
    for first, purpose in ((1_000, "train"), (3_000, "eval")):
        at = {"committed_at": f"{T0} + 10.0 * n.i", "purpose": f"'{purpose}'", "metrics": "'{\"reward\": 1}'"}
        copies(
            url,
            "steps",
            "step = 1 AND o.purpose = 'train'",
            604,
            {"id": f"{first} + n.i", "step": "2 + n.i", **at},
        )
    copies(
        url,
        "workers",
        "worker_id = 1",
        250,
        {"worker_id": "1000 + n.i", "session": "'m' || n.i", "left_at": f"{T0} + n.i"},
    )
    newest, older = asked_of(
        url, lambda c: pages.run(c, 1), lambda c: pages.run(c, 1, by_step=True, before=106)
    )
    shown = panels(newest)
    assert shown["Steps"].note == "the newest 500 of 605"
    assert (
        "steps: the newest 500 of 605; a red line is an engine that left, of these the newest 200 of 251"
        in shown["Metrics"].note
    )
    assert "the newest 500 of 604" in shown["Evaluations"].note
    assert shown["Engines that left"].note == "the newest 200 of 251"
    assert len(shown["Steps"].body) == 500
    assert shown["Metrics"].charts[0].raw.startswith(f"{charts.LEFT},"), "from the oldest step that is drawn"
    assert shown["Metrics"].choices[2:] == (("older", "/runs/1?before=106", False),)
    rest = panels(older)
    assert [rest["Steps"].body[i][1].text for i in (0, -1)] == ["105", "1"]
    assert rest["Steps"].note == "105 of 605"
    assert [path for _, path, _ in rest["Metrics"].choices] == [
        "/runs/1?before=106",
        "/runs/1?by=step&before=106",
        "/runs/1?by=step",
    ]


def test_every_run_can_be_reached_however_many_there_are(url: str) -> None:
    """50 runs more, of which 25 are open."""
    written(url, [prologue()])
    state = "CASE WHEN n.i < 25 THEN 'active' ELSE 'finished' END"
    copies(url, "runs", "run_id = 1", 50, {"run_id": "100 + n.i", "name": "'r' || n.i", "state": state})
    seen: list[str] = []
    path, before = "/", questions.NO_STEP
    while path:
        (page,) = asked_of(url, lambda c, before=before: pages.overview(c, before))  # type: ignore[misc]
        seen += [row["run id"] for row in table(page.panels[0])]
        path = next((to for name, to, _ in page.panels[0].choices if name == "older"), "")
        before = int(path.partition("=")[2] or 0)
    numbers = [*range(124, 99, -1), 1, *range(149, 124, -1)]
    assert seen == list(map(str, numbers)), "each once, the open ones first"


def test_a_comparison_goes_on_without_a_run_that_is_gone_and_says_so(url: str) -> None:
    written(url, everything())
    (page,) = asked_of(url, lambda c: pages.compare(c, [77, 1]))
    assert [row["run id"] for row in table(panels(page)["Runs"])] == ["1"]
    assert panels(page)["Runs"].note == "the ledger has no run 77: purged, or never there"
    with pytest.raises(LedgerError, match="no run 77"):
        asked_of(url, lambda c: pages.compare(c, [77, 78]))


def test_an_engine_of_a_further_cluster_is_named_with_it(url: str) -> None:
    far = [
        msgspec.structs.replace(one, cluster="north") if isinstance(one, r.WorkerJoined) else one
        for one in prologue()
    ]
    written(url, [far, moved_group(), preempted(), consumed()])
    of_run, of_step, of_sample = asked_of(
        url,
        lambda c: pages.run(c, 1),
        lambda c: steps.step(c, 1, 1),
        lambda c: pages.sample(c, _NoContents(), 11),
    )
    for page, title in (
        (of_run, "Engines that left"),
        (of_step, "Where each GPU's seconds went"),
        (of_sample, "Engines"),
    ):
        assert "north/n3" in {row["node"] for row in table(panels(page)[title])}, title


def test_a_group_a_sample_and_a_decision_say_what_is_known_of_them(url: str) -> None:
    written(url, everything())
    contents = _NoContents()
    of_group, of_sample, of_decision = asked_of(
        url,
        lambda c: pages.group(c, contents, 10),
        lambda c: pages.sample(c, contents, 11),
        lambda c: pages.decision(c, 1),
    )
    assert [(one.title, one.facts, one.body) for one in panels(of_group)["Completions"].texts] == [
        ("sample 11", "consumed; stop; reward 1, advantage 0.7; 9 tokens; 1 moves", "text of 11"),
        ("sample 12", "consumed; length; reward 0.25, advantage -0.7; 4 tokens; 0 moves", "text of 12"),
    ]
    assert [bar.title for bar in panels(of_sample)["Engines"].charts[0].bars] == [
        "epoch 1, version 1: tokens 0 to 5, 2 regenerated; worker left",
        "epoch 2, version 1: tokens 5 to 9, 0 regenerated; finished",
    ]
    (inputs,) = panels(of_decision)["Inputs"].texts
    assert json.loads(inputs.body) == {"idle": 5}


def test_a_step_of_agents_lists_its_episodes_in_the_place_of_its_samples(url: str) -> None:
    """Two turns of 9 and 4 tokens, of which the step took the first episode's; the other episode led to nothing."""
    begun, turn, *_ = an_episode()
    assert isinstance(turn, r.TurnBegun)
    of_turns = [
        msgspec.structs.replace(one, purpose="turn", prompt_index=one.group_id)
        if isinstance(one, r.GroupCreated)
        else one
        for one in [*moved_group(), *moved_group(20, 21)]
    ]
    other = [
        r.EpisodeBegun(2, 1, "sorting-2", T0 + 20),
        msgspec.structs.replace(turn, group_id=20, episode_id=2, request=b"\7" * 32),
    ]
    surplus = [r.SampleEnded(i, "surplus", "", 0, 0, None, None, T0 + 12) for i in (21, 22)]
    written(url, [prologue(), of_turns, [begun, turn, *other], preempted(), surplus, consumed()])
    step, evaluation = asked_of(url, lambda c: steps.step(c, 1, 1), lambda c: steps.evaluation(c, 1, 1))
    shown = panels(step)
    assert {"Rewards", "Samples"}.isdisjoint(shown), "they would be empty"
    (row,) = table(shown["Episodes"])
    assert [row[name] for name in ("episode id", "name", "state", "reward", "turns", "tokens", "moves")] == [
        "1",
        "sorting-1",
        "consumed",
        "1",
        "1",
        "13",
        "1",
    ]
    assert shown["Episodes"].body[0][0].href == "/episodes/1"
    assert len(shown["Episodes"].charts) == 1
    assert shown["Where each GPU's seconds went"].body, "engines that said its turns"
    assert "Episodes" not in panels(evaluation)


def test_an_episode_says_before_each_turn_what_was_added_and_how_long_it_took(url: str) -> None:
    """Turn 2 goes on from sample 11, which was finished 10 s after the start: 3 + 9 tokens, and two new ones 15 s later."""
    second: list[r.Record] = [
        r.GroupCreated(80, 1, "turn", 1, 0, 0, 1, b"\1\0\0\0\2\0\0\0", 1, 81, '{"max_tokens": 64}', "{}", T0),
        r.TurnBegun(80, 1, 1, 2, b"\4" * 32, b"\5" * 32, 11, 12, 14, b"\6" * 32, T0 + 25),
    ]
    begun = [one for one in an_episode() if not isinstance(one, r.EpisodeEnded)]
    written(url, [prologue(), moved_group(), preempted(), consumed(), [*begun, *second]])
    (page,) = asked_of(url, lambda c: pages.episode(c, _NoContents(), 1))
    assert page.title == "Episode 1: sorting-1 of run sorting, step 1, reward 1"
    (facts,) = table(panels(page)["Episode"])
    assert [facts[name] for name in ("run", "name", "state", "step", "reward")] == [
        "sorting",
        "sorting-1",
        "open",
        "1",
        "1",
    ]
    said = [(one.title, one.facts) for one in panels(page)["Turn by turn"].texts]
    assert said[0] == ("before turn 1: task, tools and agent", "3 of 3 prompt tokens are new")
    assert said[-2:] == [
        ("before turn 2: task, tools and agent", "2 of 14 prompt tokens are new; 15 s after the turn before"),
        ("turn 2, sample 81", "0 tokens; open; reward -"),
    ]


def test_an_episode_that_no_step_took_is_titled_by_its_name_and_run_alone(url: str) -> None:
    written(url, [prologue(), moved_group(), preempted(), an_episode()])
    (page,) = asked_of(url, lambda c: pages.episode(c, _NoContents(), 1))
    assert page.title == "Episode 1: sorting-1 of run sorting"


def test_an_episode_names_the_tools_of_each_turn_their_seconds_and_which_have_no_answer(url: str) -> None:
    second: list[r.Record] = [
        r.GroupCreated(80, 1, "turn", 1, 0, 0, 1, b"\1\0\0\0", 1, 81, '{"max_tokens": 64}', "{}", T0),
        r.TurnBegun(80, 1, 1, 2, b"\4" * 32, b"\5" * 32, 11, 12, 13, b"\6" * 32, T0 + 20.9),
        r.ToolAsked(3, 1, 1, "1.ab.0", "issue.close", b"\3" * 16, T0 + 20.95),
    ]
    written(url, [prologue(), moved_group(), preempted(), consumed(), [*an_episode(), *second]])
    (page,) = asked_of(url, lambda c: pages.episode(c, _NoContents(), 1))
    assert [
        (row["turn"], row["tool"], row["state"], row["seconds"], row["answer bytes"])
        for row in table(panels(page)["Tool calls"])
    ] == [
        ("1", "mail.send", "answered", "0.5", "14"),
        ("1", "mail.send", "unknown", "-", "-"),
        ("2", "issue.close", "unknown", "-", "-"),
    ]
    said = {one.title: one.facts for one in panels(page)["Turn by turn"].texts}
    assert "called" not in said["turn 1, sample 11"], "the turn's last sample says it"
    assert said["turn 1, sample 12"].endswith(
        "; then called mail.send 0.5 s, mail.send not answered (unknown)"
    )
    assert said["turn 2, sample 81"].endswith("; then called issue.close not answered (unknown)")


def test_a_run_s_evaluations_are_drawn_and_lead_to_their_samples(url: str) -> None:
    written(url, [prologue(), moved_group(), preempted(), consumed(), evaluated()])
    contents = _NoContents()
    of_run, of_step, of_eval, of_group = asked_of(
        url,
        lambda c: pages.run(c, 1),
        lambda c: steps.step(c, 1, 1),
        lambda c: steps.evaluation(c, 1, 1),
        lambda c: pages.group(c, contents, 90),
    )
    panel = panels(of_run)["Evaluations"]
    (row,) = table(panel)
    assert (row["pass@1"], row["reward"], row["step"]) == ("0.5", "0.5", "1")
    assert [cell.href for cell in panel.body[0] if cell.href] == ["/runs/1/evals/1"]
    assert [chart.label for chart in panel.charts] == ["evaluation: reward", "evaluation: pass@1"]
    assert [len(chart.dots) for chart in panel.charts] == [1, 1]
    assert ids(panels(of_step)["Samples"]) == ["11", "12"], "a step's samples are those it trained"
    assert ids(panels(of_eval)["Samples"]) == ["91", "92"]
    assert {one["metric"]: one["value"] for one in table(panels(of_eval)["Metrics"])}["pass@1"] == "0.5"
    assert panels(of_eval)["Rewards"].charts[0].bars[0].href == "/runs/1/evals/1?only=all&bin=0"
    assert ("Evaluation after step 1", "/runs/1/evals/1") in of_group.above
    only = asked_of(url, lambda c: steps.evaluation(c, 1, 1, "cut off"))[0]
    assert ids(panels(only)["Samples"]) == ["92"]


def test_a_sample_says_how_far_trainer_and_engine_differed_in_its_step(url: str) -> None:
    metrics = '{"mismatch_k3": 0.0125, "mismatch_p99": 0.25, "mismatch_max": 1.5, "loss": 1}'
    *ends, committed = consumed()
    assert isinstance(committed, r.StepCommitted)
    learned = [*ends, msgspec.structs.replace(committed, metrics=metrics)]
    written(url, [prologue(), moved_group(), preempted(), learned, evaluated()])
    contents = _NoContents()
    trained, held_out = asked_of(
        url, lambda c: pages.sample(c, contents, 11), lambda c: pages.sample(c, contents, 91)
    )
    panel = panels(trained)["How far trainer and engine differed"]
    assert [(one["metric"], one["nats"]) for one in table(panel)] == [
        ("mismatch_k3", "0.0125"),
        ("mismatch_p99", "0.25"),
        ("mismatch_max", "1.5"),
    ]
    assert {row["of"].partition(":")[0] for row in table(panel)} == {"step 1's tokens"}
    assert "of the share of groups that monitor.token_differences names" in panel.note
    nothing = panels(held_out)["How far trainer and engine differed"]
    assert (nothing.body, nothing.empty) == ((), "no step that learned from it says so")


def test_a_sample_s_own_difference_is_shown_with_its_step_s_and_each_attempt_has_one(url: str) -> None:
    apart = [r.DifferencesRecorded(11, 1, attempt, 9, 0.25 * attempt, bytes(18)) for attempt in (1, 2)]
    written(url, [prologue(), moved_group(), preempted(), consumed(), apart])
    (page,) = asked_of(url, lambda c: pages.sample(c, _NoContents(), 11))
    panel = panels(page)["How far trainer and engine differed"]
    assert [tuple(one.values()) for one in table(panel)] == [
        ("mean", "0.25", "this sample's 9 tokens, step 1"),
        ("mean", "0.5", "this sample's 9 tokens, step 1"),
    ]
    assert panel.note == ""


def test_harm_has_the_waits_by_day_and_one_by_one_and_the_gpu_hours_of_each_user(url: str) -> None:
    """Bob could have started from 3 s on and did at 9 s; one GPU of ours was there for 4 s of them. We had a GPU from 3 s to 9 s."""
    without: list[r.Record] = []
    for job_id, waited in ((901, 2.0), (902, 4.0)):
        without += [
            r.OtherUserWaits(job_id, "eve", "gpu", 1, T0, T0, T0 + 1),
            r.OtherUserWaited(job_id, T0, "started", T0 + waited, 0, 0.0, T0 + waited),
        ]
    written(url, [*everything(), without])
    (page,) = asked_of(url, pages.harm)
    found = [table(panel) for panel in page.panels]
    (day,) = found[1]
    assert day == {
        "day utc": "2026-09-21",
        "partition": "gpu",
        "waits with us": "1",
        "mean s with us": "6",
        "longest s with us": "6",
        "waits without us": "2",
        "mean s without us": "3",
        "longest s without us": "4",
        "still waiting": "0",
        "harvested gpu hours meanwhile": "0.0011",
    }
    (wait,) = found[2]
    assert (wait["submitted at"], wait["started at"]) == ("2026-09-21 14:13:22", "2026-09-21 14:13:29")
    assert (wait["user name"], wait["outcome"], wait["waited s"]) == ("bob", "started", "6")
    (given,) = found[-1]
    assert (given["owner"], given["run"], given["gpu hours"]) == ("owner", "sorting", "0.0017")


def test_harm_of_a_ledger_that_saw_no_cluster_says_so_once(url: str) -> None:
    written(url, [prologue()[:1]])
    (page,) = asked_of(url, pages.harm)
    (panel,) = page.panels
    assert "A try with --local is so" in panel.empty


def masked() -> list[r.Record]:
    """A sample of step 1 that its verifier could not score."""
    return [
        r.GroupCreated(70, 1, "train", 1, 5, 0, 1, b"\1\0\0\0", 1, 71, '{"max_tokens": 64}', "{}", T0),
        r.LeaseGranted(71, 1, 2, 1, 0, T0 + 6),
        chunk(71, 1, 0, 4, 2),
        r.LeaseEnded(71, 1, "finished", 4, 0, T0 + 10),
        r.SampleFinished(71, "stop", 4, T0 + 10),
        r.SampleEnded(71, "masked", "the verifier failed", 1, 1, None, None, T0 + 12),
    ]


def test_an_episode_of_two_policies_names_whose_turns_are_where(url: str) -> None:
    """Run 2 plays the episode, and run 1 answered in it for an agent."""
    played = [
        msgspec.structs.replace(r_one, run_id=2, name="player")
        for r_one in prologue()
        if isinstance(r_one, r.RunCreated)
    ]
    parts = [
        msgspec.structs.replace(one, source_run_id=2) if isinstance(one, r.Delivered) else one
        for one in an_episode()
    ]
    of_player = [r.EpisodeBegun(2, 2, "sorting-1", T0 + 20), r.EpisodeBegun(3, 2, "another", T0 + 20)]
    written(url, [*everything()[:6], [*played, *parts, *of_player]])
    engine = store.open_readonly(url)
    try:
        with reading(engine) as c:
            found = ask(c, filled(questions.POLICIES, episode_id=1, most=9))
            assert found == ask(c, filled(questions.POLICIES, episode_id=2, most=9)), "from either part"
            page = pages.episode(c, _NoContents(), 1)
    finally:
        engine.dispose()
    assert [(row["run"] == "player", row["turns"], row["state"]) for row in found] == [
        (False, 1, "dropped"),
        (True, 0, None),
    ]
    assert "Policies" in [panel.title for panel in page.panels]
