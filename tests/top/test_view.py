"""What `scavenger top` makes of status and ledger, without a terminal."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import shutil
import subprocess
import tracemalloc
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from scavenger import config
from scavenger.cli.main import app
from scavenger.errors import ScavengerError
from scavenger.ledger import records as r
from scavenger.observe import status
from scavenger.top import recorded, text, view
from scavenger.top.feed import SiteFeed
from scavenger.top.view import Gpus, Inputs, LedgerFacts, NodeView, View, build, clean, why_not_more
from scavenger.web import texts
from tests.ledger.examples import T0, chunk
from tests.top.sites import EVIL, hostile, records, site, status_of
from tests.web.sites import tokenizer
from tests.web.test_contents import panic

NOW = T0 + 30


def feed(path: Path, now: float = NOW) -> SiteFeed:
    return SiteFeed(config.read_daemon(path), lambda: now)


@pytest.fixture
def served(tmp_path: Path) -> SiteFeed:
    path = site(tmp_path)
    status.write(tmp_path / "state", status_of(NOW - 3))
    return feed(path)


def test_who_may_not_write_to_the_state_directory_may_not_drain(
    served: SiteFeed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served.may_not_drain() == ""
    with (
        monkeypatch.context() as patched
    ):  # in place of another user: tests may run as root, who may write anywhere
        patched.setattr(os, "access", lambda path, mode: path != tmp_path / "state" or not mode & os.W_OK)
        assert "may not write to" in served.may_not_drain()
        with pytest.raises(ScavengerError, match="nothing was drained"):
            served.drain("node1", off=False)
    shutil.rmtree(tmp_path / "state")
    assert "is not on this host" in served.may_not_drain()


def test_a_serving_daemon_and_its_ledger_make_one_view(served: SiteFeed) -> None:
    seen = build(served.read())
    assert (seen.daemon, seen.status_age_s, seen.poll_age_s, seen.problems) == ("SERVING", 3.0, 10.0, ())
    assert "Slurm polled 10 s ago" in text.head(seen, 80).plain
    assert seen.why_not_more == "max_engines = 2 is reached"
    assert seen.gpus == Gpus(4, 2, 2, 1, 3, 4)
    assert [node.engines for node in seen.nodes] == [1, 1, 1, 0]

    (run,) = seen.runs
    assert (run.step, run.last_step, run.phase, run.samples_open) == (2, 1, "wake", 20)
    assert (run.waits, run.reward, run.staleness_mean) == (0.25, 0.5, 0.25)
    assert (run.tokens_per_s_harvested, run.tokens_per_s_reserved) == (1800.0, 900.0)
    assert (run.step_tokens_harvested, run.step_tokens_reserved) == (8000.0, 2000.0)
    assert run.engine_versions == {0: 1, 1: 2}
    assert run.training_job == "job 100 RUNNING"

    engine = {one.worker_id: one for one in seen.engines}[3]
    assert (engine.kv_use, engine.life_s, engine.behind, engine.samples) == (0.5, 750.0, 1, 30)
    assert {one.worker_id: one.kv_use for one in seen.engines}[2] is None, "it does not know its cache"


def test_where_each_sample_went_and_what_was_kept_is_told_newest_first(served: SiteFeed) -> None:
    seen = build(served.read())
    assert [event.at for event in seen.events] == sorted((event.at for event in seen.events), reverse=True)
    told = [event.text for event in seen.events if event.kind == "moved"]
    assert (
        "sample 21 went on at engine 2 on n0 with 5 tokens kept, 2 to generate again (step 2; engine 1: worker left)"
        in told
    )
    assert "sample 31 waits for an engine with 0 tokens kept (step 2; engine 2: worker left)" in told
    (lost,) = [event for event in seen.events if event.kind == "preempted"]
    assert "5 tokens kept, 2 to generate again, 1 samples in flight, with notice" in lost.text
    assert any(event.kind == "step" and "reward 0.500" in event.text for event in seen.events)
    assert {"chunk_refused"} <= {event.kind for event in seen.events}
    assert [sample.sample_id for sample in seen.samples][:2] != []
    assert {sample.state for sample in seen.samples} >= {"open", "complete", "consumed"}


def test_a_stopped_daemon_s_ledger_is_enough(tmp_path: Path) -> None:
    seen = build(feed(site(tmp_path)).read())
    assert "no daemon has run with" in seen.daemon
    assert seen.why_not_more.startswith(
        "no daemon's status is here; its last decision: max_engines = 2 is reached; "
    )
    assert seen.gpus == Gpus(4, 2, 2, 0, 3, 4), "of the last poll"
    assert (seen.nodes, seen.poll_age_s, seen.jobs_pending_other_users) == ((), 5.0, 5)
    (run,) = seen.runs
    assert (run.step, run.phase, run.reward, run.tokens_per_s_harvested) == (1, "", 0.5, None)
    (engine,) = seen.engines
    assert (engine.worker_id, engine.samples, engine.tokens_per_s) == (2, 1, None)
    assert "200 harvested + 50 reserved (last step)" in "\n".join(
        line.plain for line in text.overview(seen, 120, 30)
    )


def test_a_status_without_a_ledger_is_enough_too(tmp_path: Path) -> None:
    path = site(tmp_path)
    status.write(tmp_path / "state", status_of(NOW - 3))
    for file in (tmp_path / "state").glob("ledger*"):
        file.unlink()
    seen = build(feed(path).read())
    assert seen.daemon == "SERVING"
    assert "there is no ledger at" in seen.problems[0]
    assert (len(seen.nodes), len(seen.engines), [run.step for run in seen.runs]) == (4, 3, [2])
    assert any("there is no ledger" in line.plain for line in text.once(seen, 200, 24))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"stopped": "scavenger drain: ada"}, "harvesting is stopped by scavenger drain: ada"),
        ({"set_up": "no torch"}, "engines cannot start: no torch"),
        ({"polls_fail": "no answer"}, "polls of Slurm fail: no answer"),
        ({"unread": "EIO"}, "it is not known whether harvesting is stopped: EIO"),
        ({"concluded": ""}, "max_engines = 2 is reached"),  # of the ledger
    ],
)
def test_what_stops_harvesting_comes_before_the_decision_s_reason(
    tmp_path: Path, said: dict[str, str], why: str
) -> None:
    path, serving = site(tmp_path), status_of(NOW - 3)
    assert serving.harvest is not None
    changed = msgspec.structs.replace(serving, harvest=msgspec.structs.replace(serving.harvest, **said))
    status.write(tmp_path / "state", changed)
    assert build(feed(path).read()).why_not_more == why


def test_a_daemon_that_fell_silent_is_not_taken_for_one_that_serves(tmp_path: Path) -> None:
    path = site(tmp_path)
    status.write(tmp_path / "state", status_of(NOW - 500))
    seen = build(feed(path).read())
    assert seen.daemon.startswith("SILENT for 500 s")
    assert [one.tokens_per_s for one in seen.engines] == [None], "the ledger's engines, no old rates"
    assert seen.runs[0].phase == ""
    assert len(seen.nodes) == 4, "as it last saw them"


# ---------------------------------------------------------------- text of others


def strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [found for pair in value.items() for one in pair for found in strings(one)]
    return [found for one in value for found in strings(one)] if isinstance(value, list | tuple) else []


def harmless(told: str) -> bool:
    return told.isprintable() or all(c.isprintable() or c in "\ufffd …" for c in told)


@pytest.mark.parametrize("of_daemon", [True, False])
def test_hostile_words_in_every_field_are_one_line_of_text(tmp_path: Path, of_daemon: bool) -> None:
    path = site(tmp_path, hostile())
    if of_daemon:
        status.write(tmp_path / "state", status_of(NOW - 3, evil=True))
    reader = feed(path)
    seen = build(reader.read())
    told = strings(msgspec.to_builtins(seen, str_keys=True))
    assert sum("[bold red]" in one for one in told) > 8, "markup is text"
    for one in told:
        assert harmless(one), repr(one)
        assert len(one) <= view.MOST_CHARS
    for width, height in ((80, 24), (200, 50)):
        for line in text.once(seen, width, height):
            assert harmless(line.plain), repr(line.plain)
            assert cell_len(line.plain) <= width
            assert all(span.style in {"", *STYLES} for span in line.spans), "no style of theirs"
    for lines in (reader.sample(11), reader.decision(1), reader.node(hostile_node(seen))):
        assert all(harmless(line.plain) for line in lines)


STYLES = {"bold", "bold red", "not bold", "red", "cyan", "bold yellow", "dim"} | {
    colour for _, colour, _ in text.SIGNS.values()
}


def hostile_node(seen: View) -> str:
    return next((event.node for event in seen.events if event.node), "x")


def test_a_text_is_cleaned_and_cut() -> None:
    assert clean(None) == ""
    assert clean(" a\tb\r\nc ") == "a b c"
    assert "\x1b" not in clean(EVIL)
    assert len(clean("x" * 10_000_000)) == view.MOST_CHARS
    assert clean("\ud83d").encode() == b"?"
    assert view.shown("    def f():\tx", 99) == "    def f():    x", "code keeps its shape"


@pytest.mark.parametrize(
    "metrics", ["", "[]", "{", "null", '{"reward": "x"}', '{"reward": 1e999}', "[" * 99_999]
)
def test_metrics_that_mean_nothing_leave_the_figures_open(tmp_path: Path, metrics: str) -> None:
    inputs = feed(site(tmp_path)).read()
    assert inputs.ledger is not None
    steps = {1: [{"step": 1, "version": 1, "attempt": 1, "metrics": metrics, "committed_at": T0}]}
    seen = build(dataclasses.replace(inputs, ledger=dataclasses.replace(inputs.ledger, steps=steps)))
    assert (seen.runs[0].reward, seen.runs[0].waits, seen.runs[0].rewards) == (None, None, ())


# ---------------------------------------------------------------- layout


def node(name: str, **gpus: int) -> NodeView:
    return NodeView(name, Gpus(**gpus), 0, "")


def test_the_map_has_a_sign_for_every_gpu() -> None:
    nodes = [
        node("a", harvested=2, idle=1),
        node("bb", other_users=3, draining=1),
        node("c", out=2, reserved=1),
    ]
    assert [line.plain for line in text.node_map(nodes, 80, 4)] == ["a  ##.   bb oood  c  Rxx"]
    assert [line.plain for line in text.node_map(nodes, 9, 4)] == ["a  ##.", "bb oood", "c  Rxx"]
    assert text.signs(Gpus(harvested=20, idle=3)).plain.split() == ["#20", ".3"]


def test_a_map_that_does_not_fit_puts_nodes_that_look_alike_together() -> None:
    nodes = [node(f"gpu{n:04}", harvested=8) for n in range(900)]
    nodes += [node(f"cpu{n}", other_users=n % 7, idle=8 - n % 7) for n in range(100)]
    lines = [line.plain for line in text.node_map(nodes, 80, 5)]
    assert lines[0].startswith("  900 x ########  gpu0000")
    assert len(lines) == 5
    assert lines[-1].startswith("and ")
    assert all(cell_len(line) <= 80 for line in lines)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (40, 10), (20, 6)])
def test_a_screen_fits_its_terminal(served: SiteFeed, width: int, height: int) -> None:
    lines = text.once(build(served.read()), width, height)
    assert len(lines) <= max(height, 9)
    assert all(cell_len(line.plain) <= width for line in lines)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, "-"),
        (0, "0 s"),
        (99, "99 s"),
        (600, "10 min"),
        (7200, "2.0 h"),
        (1e6, "11.6 d"),
        (math.inf, "-"),
    ],
)
def test_ages_in_words(seconds: float | None, said: str) -> None:
    assert text.age(seconds) == said


def test_nothing_at_all_is_said_as_such() -> None:
    seen = build(Inputs(NOW, no_daemon="no daemon has run with x", no_ledger="the ledger is not read: y"))
    assert seen.problems == ("no daemon has run with x", "the ledger is not read: y")
    assert "no daemon's status is here" in seen.why_not_more
    assert text.once(seen, 80, 24)


# ---------------------------------------------------------------- the recorded site


def test_the_demo_plays_the_same_each_time_and_shows_everything() -> None:
    at = 1_000_000.0
    first, again = (build(recorded.play(200, at)) for _ in range(2))
    assert first == again
    assert {event.kind for event in first.events} >= {"preempted", "moved", "step"}
    assert first.engines
    assert first.samples
    assert first.decisions
    assert {sign for line in text.node_map(first.nodes, 200, 9) for sign in line.plain} >= set("R#o.x")
    later = build(recorded.play(260, at))
    assert later.runs[0].last_step > first.runs[0].last_step
    drained = build(recorded.play(260, at, {0: "mine"}))
    assert {one.name: one.gpus.harvested for one in drained.nodes}["gpu01"] == 0


def test_the_demo_s_samples_end_with_their_step() -> None:
    """After an hour too: an engine holds what it has slots for, and what moved to it."""
    for until in (150, 3600, 3611, 3617):
        ledger = recorded.play(until, 0.0).ledger
        assert ledger is not None
        steps = {row["step"] for row in ledger.samples[1]}
        assert steps == {until // recorded.STEP_S + 1}
        (run,) = build(recorded.play(until, 0.0)).runs
        assert len(ledger.samples[1]) <= run.samples_open <= run.samples == recorded.STEP_SAMPLES


def test_the_demo_s_feed_plays_each_second_once_and_changes_nothing_that_it_gave() -> None:
    clock = iter([0.0, 60.0, 61.0, 3600.0])
    feed = recorded.RecordedFeed(lambda: next(clock))
    first = feed.read()
    kept = copy.deepcopy(first)
    later = [feed.read() for _ in range(2)]
    assert first == kept
    played = [recorded.play(recorded.BEFORE_S + second, -recorded.BEFORE_S) for second in (60, 61, 3600)]
    assert [first, *later] == played


# ---------------------------------------------------------------- the command

#: The fields of `--once --json`, which scripts rely on: added to, never renamed within a schema.
FIELDS = {
    "": "schema at daemon host generation status_age_s ledger_age_s partition polled_at poll_age_s jobs_pending_other_users stopped"
    " why_not_more gpus nodes runs engines samples events decisions problems",
    "gpus": "reserved other_users harvested draining idle out",
    "nodes": "name gpus engines why",
    "runs": "run_id name state reason step last_step purpose phase phase_reason samples samples_open groups_trained attempt version"
    " engine_versions step_s waits staleness_mean staleness_max reward rewards tokens_per_s_reserved tokens_per_s_harvested"
    " step_tokens_reserved step_tokens_harvested training_job trainer_silent_s",
    "engines": "worker_id run kind node gpus job_id state samples tokens_per_s kv_use version behind life_s age_s",
    "samples": "sample_id run step group state tokens moves reward worker_id node",
    "events": "at kind run text sample_id node",
    "decisions": "id at policy action subject code reason node cluster",
}


def command(*words: str) -> Any:
    return CliRunner().invoke(app, ["top", "--once", *words])


def test_once_prints_json_of_a_fixed_schema(tmp_path: Path) -> None:
    path = site(tmp_path, hostile())
    status.write(tmp_path / "state", status_of(NOW - 3, evil=True))
    done = command("--json", "--config", str(path))
    assert done.exit_code == 0, done.output
    assert harmless(done.output.strip())
    found = json.loads(done.output)
    assert found["schema"] == 1
    for name, names in FIELDS.items():
        one = found if not name else found[name] if name == "gpus" else found[name][0]
        assert set(one) == set(names.split()), name
    assert found == json.loads(json.dumps(found, allow_nan=False)), "no NaN"


def test_once_prints_a_screen_and_neither_source_is_an_error(tmp_path: Path) -> None:
    assert "Why not more engines now:" in command("--demo").output
    path = tmp_path / "scavenger.toml"
    path.write_text(f'[daemon]\nstate_dir = "{tmp_path / "nothing"}"\n')
    done = command("--config", str(path))
    assert done.exit_code == 1
    assert "there is no ledger at" in done.output


def test_once_cuts_no_line_in_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    folder = tmp_path / ("deep" * 50)
    path = tmp_path / "scavenger.toml"
    path.write_text(f'[daemon]\nstate_dir = "{folder}"\n')
    assert f"no daemon has run with {folder}; start it" in command("--config", str(path)).output
    monkeypatch.setenv("COLUMNS", "80")
    assert str(folder) not in command("--config", str(path)).output, "as wide as it is told"


def test_a_ledger_that_saw_no_cluster_is_said_to_be_of_a_try() -> None:
    nothing = LedgerFacts(at=NOW)
    assert why_not_more(Inputs(NOW, None, "no daemon", nothing, "")).startswith(
        "this ledger has seen no cluster: a try (`--local`) uses this machine alone"
    )
    polled = LedgerFacts(at=NOW, poll={"at": NOW})
    assert "no daemon's status is here" in why_not_more(Inputs(NOW, None, "no daemon", polled, ""))


def test_json_is_refused_without_once(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["top", "--json", "--demo"])
    assert "write scavenger top --once --json" in str(done.exception)


def test_reading_writes_nothing_and_asks_slurm_nothing(
    served: SiteFeed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = subprocess.Popen.__init__

    def refuse(self: Any, argv: Any, *args: Any, **more: Any) -> None:
        assert tuple(argv) == texts._ARGV, "no process is started but the one that makes text"
        begin(self, argv, *args, **more)

    monkeypatch.setattr("subprocess.Popen.__init__", refuse)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "state").iterdir()}
    build(served.read())
    served.sample(21)
    served.node("n3")
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "state").iterdir()}
    # SQLite's log may be opened, and is empty; the ledger itself stays as it was.
    assert {name: at for name, at in after.items() if "-" not in name} == {
        name: at for name, at in before.items() if "-" not in name
    }


def test_single_things_in_detail(served: SiteFeed) -> None:
    said = "\n".join(line.plain for line in served.sample(21))
    assert "epoch 1: engine 1 harvested on n3, job 501, version 1, tokens 0 to 5; worker left" in said
    assert "epoch 2: engine 2 reserved on n0" in said
    assert "no text" in said, "its tokenizer is not there, and the ids are"
    assert "21000" in said
    said = "\n".join(line.plain for line in served.node("n3"))
    assert "job 501 (restart 0), 1 GPUs for 6 s: preempted" in said
    said = "\n".join(line.plain for line in served.node("n7"))
    assert "engine died: FAILED" in said
    assert "quarantined: 3 engines died on it" in said
    said = "\n".join(line.plain for line in served.decision(2))
    assert '"decision": "max_engines = 2 is reached"' in said


def test_a_row_however_large_costs_a_refresh_and_a_detail_a_bounded_memory(tmp_path: Path) -> None:
    deep = "[" * 900 + ",".join(["1"] * 50_000) + "]" * 900  # with a value a line 90 MB
    big = "x" * 20_000_000
    more: list[r.Record] = [
        r.Decision("harvest", "none", "", "r", json.dumps({"decision": "d", "x": big}), T0 + 60, "c"),
        r.Decision("harvest", "none", "", "r", deep, T0 + 61, "c"),
        r.StepCommitted(1, 50, "train", 1, 1, json.dumps({"reward": 1.0, big: 1.0}), T0 + 60),
    ]
    seen = feed(site(tmp_path, [*records(), more]))
    tracemalloc.start()
    try:
        build(seen.read())
        details = [seen.decision(number) for number in (2, 3)]
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 15_000_000
    assert all(sum(map(len, one)) < 50_000 for one in details)
    assert "decision" in "".join(line.plain for line in details[0])


@pytest.mark.parametrize(("evil", "most_tokens"), [(True, 32_000), (False, 32_000), (False, 100)])
def test_a_sample_s_text_is_made_elsewhere_and_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evil: bool, most_tokens: int
) -> None:
    """The tokenizer is its run's: it ends the process that reads it, and this one stays. A short text of many tokens is cut, too."""
    monkeypatch.setattr("scavenger.top.feed._MOST_TOKENS", most_tokens)
    path = tokenizer(tmp_path, 120_000)
    if evil:
        panic(path)
    n = 40_000
    own: list[r.Record] = [
        msgspec.structs.replace(one, tokenizer=str(path)) if isinstance(one, r.RunCreated) else one
        for one in records()[0]
    ]
    long: list[r.Record] = [
        r.GroupCreated(
            70,
            1,
            "train",
            3,
            0,
            0,
            1,
            array("i", [11_000] * n).tobytes(),
            2,
            71,
            '{"max_tokens": 64}',
            "{}",
            T0,
        ),
        r.LeaseGranted(71, 1, 2, 1, 0, T0),
        chunk(71, 1, 0, n, 2),
    ]
    said = [line.plain for line in feed(site(tmp_path, [own, *records()[1:], long])).sample(71)]
    assert sum(map(len, said)) < 220_000
    at = said.index("completion")
    if evil:
        assert "cannot be used" in said[at + 1]
        assert "ids [" in said[at + 1]
    else:
        assert said[at + 1].startswith("<w71000> <w71001>")
        assert "has all of the completion" in said[-1]
