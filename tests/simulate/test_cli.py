"""`scavenger simulate` as an admin meets it: its help, its figures, its errors."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from scavenger import toml
from scavenger.cli import main, simulate_run
from scavenger.cluster import choose
from scavenger.cluster.model import ClusterInfo, ClusterView, JobSpec, Node, Partition, PreemptMode
from scavenger.errors import ClusterError, ConfigError
from scavenger.harvest.limits import drain
from scavenger.simulate import play, presets
from scavenger.simulate.calibrate import error_of, load
from scavenger.simulate.decode import Efficiency
from scavenger.simulate.sacct import COMMAND, NODES_COMMAND

DATA = Path(__file__).resolve().parents[1] / "data/simulate"
DUMP = DATA / "sacct_22.05.txt"


def simulate(*argv: str | Path, columns: int = 200) -> Result:
    return CliRunner().invoke(
        main.app, ["simulate", *map(str, argv)], env=dict(os.environ) | {"COLUMNS": str(columns)}
    )


def shown(*argv: str | Path) -> str:
    done = simulate(*argv)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def test_the_help_has_the_exact_commands_on_lines_of_their_own() -> None:
    lines = [line.strip() for line in simulate("--help", columns=80).output.splitlines()]
    assert COMMAND in lines
    assert NODES_COMMAND in lines
    assert "--ignore-partition" in " ".join(lines)


def test_without_anything_it_shows_its_help() -> None:
    assert COMMAND in simulate().output


def test_a_dump_is_answered(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    text = shown("--sacct", DUMP, "--timezone", "UTC", "--html", page)
    assert "10 GPUs on 3 nodes, 29 s from 2026-11-21 11:00 to 2026-11-21 11:01 UTC" in text
    rows = {line[:32].strip(): line[32:] for line in text.splitlines()}
    # (290 - 125) GPU s idle of 290: see test_survey.py
    assert rows["idle"].split() == ["0.05", "GPU-hours", "5.7", "of", "10", "GPUs", "on", "average", "(57%)"]
    assert rows["other users wait longer"].startswith("5 s at most")
    assert rows["should an engine hang"].startswith("40 s at most")
    assert rows["expected speed-up, Qwen3-8B"].startswith("not computed")
    assert "note: nodes and their GPUs are the most ever in use" in text
    assert "what idle GPUs could give" in page.read_text(encoding="utf-8")


def test_slurm_s_settings_and_the_engine_change_the_answers() -> None:
    text = shown(
        "--sacct",
        DUMP,
        "--grace",
        "60",
        "--kill-wait",
        "2",
        "--cold-start",
        "1",
        "--notice",
        "1",
        "--gpus-per-engine",
        "2",
        "--engines",
        "1",
        "--model",
        "qwen3-14b",
        "--gpu",
        "h200",
        "--ignore-partition",
        "scavenge",
    )
    assert "65 s at most" in text
    assert "92 s at most" in text
    assert "cold start of Qwen3-14B on 2 x H200" in text
    assert "(at most 1)" in text
    assert "2 jobs in scavenge count as idle" in text


def test_a_trace_is_answered() -> None:
    assert "the source has no dates" in shown("--trace", DATA / "nodes.csv")


@pytest.mark.parametrize(
    "argv",
    [
        ["--live", "--sacct", "x"],
        ["--trace", "x", "--sacct", "y"],
        ["--engines", "3"],
        ["--live", "--html", "x"],
    ],
)
def test_one_source_is_given(argv: list[str]) -> None:
    done = simulate(*argv)
    assert done.exit_code == 2
    assert "Invalid value" in done.output


def test_errors_are_told_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "dump.txt"
    empty.touch()
    monkeypatch.setattr("sys.argv", ["scavenger", "simulate", "--sacct", str(empty)])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == ConfigError.exit_code
    told = capsys.readouterr().err
    assert "the sacct dump is empty (line 1)" in told
    assert COMMAND in told


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--sacct", DUMP, "--timezone", "Europe/Atlantis"], "no time zone 'Europe/Atlantis'"),
        (["--sacct", DUMP, "--model", "GPT-9"], "no preset for the model 'GPT-9'"),
        (["--sacct", DUMP, "--html", "/nowhere/x.html"], "/nowhere/x.html cannot be written"),
    ],
)
def test_what_cannot_be_done_names_its_cause(argv: list[str | Path], says: str) -> None:
    done = simulate(*argv)
    assert isinstance(done.exception, ConfigError)
    assert says in done.exception.cause


# ---------------------------------------------------------------- calibrate


def measured(tmp_path: Path) -> Path:
    """Points of an engine whose bandwidth share is 60 %, compute share 40 % and overhead 3 ms."""
    truth = Efficiency(0.6, 0.4, 3e-3, 0.55)
    spec = presets.engine("Qwen3-8B", "H100", efficiency=truth)
    points = [
        {"batch": batch, "context": context, "tokens_per_s": spec.tokens_per_s(batch, context)}
        for batch, context in ((1, 500), (8, 2000), (64, 2000), (256, 10), (512, 10), (1024, 10))
    ]
    path = tmp_path / "points.json"
    path.write_text(json.dumps(points), encoding="utf-8")
    return path


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    ("run", "option"),
    [
        ((), "--cold-start"),
        ((), "--notice"),
        ((), "--grace"),
        ((), "--kill-wait"),
        ((), "--message-timeout"),
        (("run.toml",), "--from"),
        (("run.toml",), "--sigma"),
        (("run.toml",), "--capped-share"),
        (("run.toml",), "--correlation"),
    ],
)
def test_every_number_is_finite(run: tuple[str, ...], option: str, value: str) -> None:
    done = simulate(*run, "--sacct", DUMP, "--reserved-gpus", "1", option, value)
    assert done.exit_code == 2, done.output
    assert f"'{option}'" in done.output


def test_calibrate_finds_prints_and_writes_the_constants(tmp_path: Path) -> None:
    out = tmp_path / "constants.toml"
    text = shown("calibrate", measured(tmp_path), "--model", "Qwen3-8B", "--gpu", "H100", "--out", out)
    assert "60.0% of the peak" in text
    assert "40.0% of the peak" in text
    assert "3.000 ms" in text
    spec = presets.engine("Qwen3-8B", "H100")
    found = load(out.read_text(encoding="utf-8"), spec)
    assert (found.bandwidth, found.decode_compute, found.overhead_s) == pytest.approx((0.6, 0.4, 3e-3))
    with pytest.raises(ConfigError, match=r"not for .*Qwen3-14B"):
        load(out.read_text(encoding="utf-8"), presets.engine("Qwen3-14B", "H100"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("[efficiency]", "[efficient]"), "are not both there"),
        (("overhead_s = ", "overhead = "), "has not exactly the numbers .*overhead, overhead_s"),
        (("memory_share = 0.9", "memory_share = true"), "a value is no number"),
        (("[fit]", "[fit"), "not TOML"),
        (("memory_share = 0.9", "memory_share = nan"), "memory_share = nan is no share"),
        (("memory_share = 0.9", "memory_share = 1.5"), "memory_share = 1.5 is no share"),
        (("memory_share = 0.9", "memory_share = -3.0"), "memory_share = -3 is no share"),
        (("overhead_s = ", "overhead_s = 99"), "overhead_s = .* is no time of a step"),
    ],
)
def test_constants_that_were_tampered_with_are_refused(
    tmp_path: Path, change: tuple[str, str], says: str
) -> None:
    out = tmp_path / "constants.toml"
    shown("calibrate", measured(tmp_path), "--model", "Qwen3-8B", "--gpu", "H100", "--out", out)
    text = out.read_text(encoding="utf-8")
    assert change[0] in text
    with pytest.raises(ConfigError, match=says):
        load(text.replace(*change), presets.engine("Qwen3-8B", "H100"))


def test_a_fit_that_is_none_is_said_and_not_written(tmp_path: Path) -> None:
    points, out = tmp_path / "points.json", tmp_path / "constants.toml"
    points.write_text("[[1, 100, 10], [8, 100, 1000], [16, 100, 20], [32, 5000, 90000]]", encoding="utf-8")
    done = simulate("calibrate", points, "--model", "Qwen3-8B", "--gpu", "H100", "--out", out)
    assert "this is no fit" in done.output
    assert isinstance(done.exception, ConfigError)
    assert not out.exists()


def test_the_error_of_a_fit_is_read_back() -> None:
    assert error_of("[fit]\nrms_error = 0.03\n") == 0.03
    assert error_of("[fit]\nrms_error = nan\n") is error_of("fit = 1\n") is error_of("") is None


def test_the_usual_policies_are_named_in_the_help() -> None:
    assert ",".join(play.USUAL) == simulate_run.USUAL


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--trace", DATA / "nodes.csv", "--nodes", "n.txt"), "go with --sacct"),
        (("--trace", DATA / "nodes.csv", "--ignore-partition", "p"), "go with --sacct"),
        (("--sacct", DUMP, "--source", "x"), "goes with --trace"),
    ],
)
def test_options_that_do_not_apply_are_refused(options: tuple[str | Path, ...], says: str) -> None:
    for command in ((), ("run.toml",)):
        done = simulate(*command, *options, "--reserved-gpus", "1")
        assert done.exit_code == 2
        assert says in done.output


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_played(tmp_path: Path) -> None:
    for command in ((), ("nosuch.toml",)):
        done = simulate(
            *command,
            "--sacct",
            tmp_path / "none.txt",
            "--reserved-gpus",
            "1",
            "--html",
            tmp_path / "no" / "x.html",
        )
        assert isinstance(done.exception, ConfigError)
        assert "x.html cannot be written" in done.exception.cause


# ---------------------------------------------------------------- live


class ReadOnly:
    """A cluster that can be looked at. Anything else fails the test."""

    def __init__(self) -> None:
        self.closed = False

    def info(self) -> ClusterInfo:
        return ClusterInfo("hand", "fake", "1.0", "preempt/partition_prio", 30.0, 10.0, "admin")

    def view(self) -> ClusterView:
        nodes = tuple(
            Node(f"n{i}", frozenset({"idle"}), frozenset({"normal"}), "h100", 8, 5 * i, 64, 0, 1, 0)
            for i in range(2)
        )
        normal = Partition("normal", frozenset({"n0", "n1"}), 10, PreemptMode.OFF, 0.0, 1e9)
        return ClusterView(4e9, nodes, (), (normal,))  # in the future: never too old

    def close(self) -> None:
        self.closed = True

    def submit(self, spec: JobSpec) -> int:
        raise AssertionError("submitted")

    def cancel(self, job_ids: tuple[int, ...]) -> None:
        raise AssertionError("cancelled")

    def requeue(self, job_id: int) -> None:
        raise AssertionError("requeued")


def test_live_only_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cluster = ReadOnly()
    monkeypatch.setattr(choose, "backend", lambda settings: cluster)
    monkeypatch.chdir(tmp_path)  # no scavenger.toml there
    text = shown("--live", "--partition", "idle", "--gpus-per-engine", "2")
    rows = {line[:25].strip(): line[25:].strip() for line in text.splitlines()}
    assert rows["GPUs idle now"].startswith("11")
    assert rows["engines that fit now"].startswith("5")
    assert rows["the policy would submit"].startswith("2")
    assert "max_pending = 2 is reached" in text
    assert "There is no partition 'idle' yet" in text
    assert "the daemon's defaults" in text
    assert COMMAND in text
    assert cluster.closed
    assert list(tmp_path.iterdir()) == []


def test_live_looks_with_the_limits_of_a_daemon_that_was_told_to_stop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(choose, "backend", lambda settings: ReadOnly())
    (tmp_path / "state").mkdir()
    drain(tmp_path / "state", "maintenance on Monday", at_once=False)
    config = tmp_path / "scavenger.toml"
    config.write_text(toml.dumps({"daemon": {"state_dir": tmp_path / "state"}}))
    text = shown("--live", "--partition", "idle", "--config", config)
    assert "maintenance on Monday" in text
    rows = {line[:25].strip(): line[25:].strip() for line in text.splitlines()}
    assert rows["the policy would submit"].startswith("0")


class Mute(ReadOnly):
    """Slurm's commands are here, and no cluster is."""

    def info(self) -> ClusterInfo:
        raise ClusterError(
            "scontrol: scontrol: error: DNS SRV lookup failed scontrol: fatal: Could not establish a configuration source"
        )


def test_live_without_a_cluster_says_so_in_a_line_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cluster = Mute()
    monkeypatch.setattr(choose, "backend", lambda settings: cluster)
    monkeypatch.chdir(tmp_path)
    done = simulate("--live")
    assert isinstance(done.exception, ConfigError)
    assert (
        done.exception.cause
        == "the cluster's commands do not work on this host: Could not establish a configuration source"
    )
    assert "scontrol ping" in done.exception.remedy
    assert cluster.closed


def test_a_configuration_that_was_named_must_exist(tmp_path: Path) -> None:
    done = simulate("--live", "--config", tmp_path / "none.toml")
    assert isinstance(done.exception, ConfigError)
    assert "none.toml" in done.exception.cause


def test_an_option_of_an_earlier_release_is_refused_with_what_to_write() -> None:
    done = simulate("--sacct", DUMP, "--sched-interval", "30")
    assert done.exit_code == 2
    assert "--sched-interval is gone: the bound no longer depends on it; leave it out" in done.output
    assert "--sched-interval" not in simulate("--help").output
    wide = dict(os.environ) | {"COLUMNS": "200"}
    done = CliRunner().invoke(main.app, ["daemon", "--dry-run", "--looks", "2"], env=wide)
    assert done.exit_code == 2
    assert "--looks is gone: write --polls" in done.output
