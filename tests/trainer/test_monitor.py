"""What people see of a run: files, lines, a terminal, TensorBoard and W&B, and the figures in them."""

from __future__ import annotations

import errno
import importlib.util
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scavenger.config import RunConfig
from scavenger.errors import ConfigError
from scavenger.protocol import messages
from trainer.algorithms import mismatch
from trainer.loop.metrics import Capacity, Drafts, TokenSources, alarm, effective_fraction, summarise
from trainer.loop.monitor import (
    Monitor,
    MonitorEntry,
    SinkFailed,
    TensorBoard,
    WeightsAndBiases,
    as_line,
    chosen,
)
from trainer.model.learner import RowStats

METRICS = {
    "reward": 0.25,
    "loss": 0.1 + 0.2,
    "tokens": 12.0,
    "length_mean": 3.0,
    "moves": 1.0,
    "seconds": 2.0,
    "seconds_wait": 1.0,
    "seconds_train": 0.5,
    "seconds_publish": 0.1,
}
EVAL = {"eval_sampled": 0.5, "eval_greedy": 0.75}

needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="the extra [tensorboard] is not installed"
)
needs_mlflow = pytest.mark.skipif(
    importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed: pip install mlflow"
)
needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="the extra [wandb] is not installed"
)


class Screen(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def write(monitor: Monitor, first: int = 1) -> None:
    monitor.step(first, 1, 7, METRICS, ("seed", "train"))
    monitor.evaluation(first, 1, EVAL)
    monitor.close()


def config(out_dir: Path, **monitor: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "r", "steps": 4, "state_dir": out_dir, "out_dir": out_dir},
            "model": {"path": "/model", "context_length": 24},
            "sampling": {"max_tokens": 8},
            "monitor": monitor,
        }
    )


def test_a_step_that_trained_nothing_says_so(tmp_path: Path) -> None:
    lines = []
    for trained in (0.0, 8.0):
        monitor = Monitor(tmp_path, steps=4, out=(out := Screen(terminal=False)))
        monitor.step(1, 1, 7, METRICS | {"samples_trained": trained}, ())
        monitor.close()
        lines.append(out.getvalue())
    assert ["NOTHING TRAINED" in line for line in lines] == [True, False]


def test_a_folder_that_cannot_be_written_is_an_error_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.out_dir = .*file/out cannot be written: .*\n.*remedy"):
        Monitor(tmp_path / "file" / "out", steps=4, out=Screen(terminal=False))


@pytest.mark.parametrize("terminal", [False, True])
def test_a_log_gets_one_plain_line_an_entry_and_the_file_every_digit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    """Also where a launcher that writes to a log gives its ranks a terminal."""
    if terminal:
        monkeypatch.setenv("TTY_COMPATIBLE", "0")
    out = Screen(terminal)
    write(Monitor(tmp_path, steps=4, out=out, clock=lambda: 5.0))
    assert out.getvalue().splitlines() == [
        "step 1/4  reward 0.250  loss +3.000000e-01  tokens 12  length 3.0  moved 1  2.10 s "
        "(wait 1.00, train 0.50, publish 0.10, other 0.50)",
        "eval after step 1: sampled 0.500, greedy 0.750",
    ]
    write(Monitor(tmp_path, steps=4, out=out, clock=lambda: 6.0), first=2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0] == {
        "kind": "train",
        "step": 1,
        "attempt": 1,
        "at": 5.0,
        **METRICS,
        "version": 7,
        "phases": ["seed", "train"],
    }
    assert lines[0]["loss"] == 0.1 + 0.2
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("train", 1),
        ("eval", 1),
        ("train", 2),
        ("eval", 2),
    ], "appended"


def test_a_step_s_line_says_where_its_seconds_went_rewards_included() -> None:
    spent = {"seed": 3.0, "wait": 0.0, "reward": 4.0, "train": 2.0, "update": 0.5, "checkpoint": 1.0}
    metrics = METRICS | {f"seconds_{what}": value for what, value in spent.items()} | {"seconds": 9.5}
    line = as_line(MonitorEntry("train", 1, 1, 0.0, metrics | {"reward_std": 0.5}), 4)
    assert "  reward 0.250 +- 0.500  " in line
    assert line.endswith(
        "10.6 s (generate 3.0, reward 4.0, train 2.0, update 0.5, publish 0.1, checkpoint 1.0)"
    )


def test_an_evaluation_s_line_names_each_data_set() -> None:
    metrics = {"eval_sampled": 0.5, "eval_greedy": 0.75, "eval_pass_at_1": 0.25}
    metrics |= {"eval_code_sampled": 0.1, "eval_code_greedy": 0.2}
    line = as_line(MonitorEntry("eval", 3, 1, 0.0, metrics), 4)
    assert (
        line
        == "eval after step 3: sampled 0.500, greedy 0.750, solved 25.0%; code: sampled 0.100, greedy 0.200"
    )


def test_a_terminal_gets_the_lines_and_a_bar_of_the_steps(tmp_path: Path) -> None:
    out = Screen(terminal=True)
    write(Monitor(tmp_path, steps=4, out=out))
    assert "step 1/4  reward 0.250" in out.getvalue()
    assert "1/4" in out.getvalue().rpartition("\n")[0].rpartition("eval after")[2], "the bar stands below"
    assert "\x1b[?25h" in out.getvalue(), "the cursor is shown again"


def test_a_sink_that_fails_is_left_aloud_and_the_run_goes_on(tmp_path: Path) -> None:
    class Full:
        name = "full"
        entries = 0

        def write(self, entry: MonitorEntry) -> None:
            self.entries += 1
            raise SinkFailed("no space left")

        def close(self) -> None:
            raise AssertionError("it was left")

    out, full = Screen(terminal=False), Full()
    write(Monitor(tmp_path, steps=4, out=out, more=[full]))
    assert full.entries == 1
    assert "full gets nothing more of this run: no space left" in out.getvalue()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


class Full(io.StringIO):
    """On a disk without room, as long as `full`."""

    full = True

    def flush(self) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        self.flush()
        super().close()


def test_a_full_disk_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Screen(terminal=False)
    monitor = Monitor(tmp_path, steps=4, out=out)
    file = Full()
    monitor._sinks[0]._file.close()  # type: ignore[attr-defined]
    monkeypatch.setattr(monitor._sinks[0], "_file", file)
    write(monitor)
    file.full = False
    assert out.getvalue().count("metrics.jsonl gets nothing more of this run: metrics.jsonl: [Errno 28]") == 1
    assert "eval after step 1" in out.getvalue()

    log = Full()
    monitor = Monitor(tmp_path / "more", steps=4, out=log)
    monitor.say("hello")
    write(monitor)
    log.full = False
    assert (
        capsys.readouterr().err.count("log gets nothing more of this run: standard output: [Errno 28]") == 1
    )
    assert len((tmp_path / "more" / "metrics.jsonl").read_text().splitlines()) == 2, "the other sinks go on"


def test_a_sink_that_cannot_be_closed_ends_no_run_and_the_others_are_closed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    closed: list[str] = []

    class Stale:
        def __init__(self, name: str, error: Exception | None) -> None:
            self.name, self._error = name, error

        def write(self, entry: MonitorEntry) -> None:
            """Taken."""

        def close(self) -> None:
            if self._error is not None:
                raise self._error
            closed.append(self.name)

    more = [
        Stale("a", OSError(errno.ESTALE, "Stale file handle")),
        Stale("b", SinkFailed("the service ended")),
        Stale("c", None),
    ]
    write(Monitor(tmp_path, steps=4, out=Screen(terminal=False), more=more))
    said = capsys.readouterr().err
    assert "a may lack the last figures of this run: [Errno 116]" in said
    assert "b may lack the last figures of this run: the service ended" in said
    assert closed == ["c"]


def test_what_is_not_asked_for_is_not_imported_and_what_is_missing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen(config(tmp_path)) == []
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    for monitor, extra in (
        ({"tensorboard": True}, "tensorboard"),
        ({"wandb": "offline"}, "wandb"),
        ({"mlflow": "http://127.0.0.1:5000"}, "mlflow"),
    ):
        with pytest.raises(ConfigError, match=rf"pip install .*\[{extra}\]"):
            chosen(config(tmp_path, **monitor))


def test_w_and_b_is_told_no_key_and_nothing_that_is_passed_to_others_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Any] = {}
    run = SimpleNamespace(define_metric=lambda *args, **more: None)
    errors = SimpleNamespace(Error=RuntimeError)
    fake = SimpleNamespace(
        init=lambda **more: told.update(more) or run, Settings=lambda **more: None, errors=errors
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    plain = config(tmp_path, wandb="offline").model_dump(exclude_unset=True)
    judged = {
        "reward": {"function": "judge:reward", "options": {"api_key": "SECRET-1"}},
        "data": {"chat_options": {"token": "SECRET-2"}},
    }
    environment = {
        "data": {"environment": "a-task-set", "environment_args": {"judge": {"api_key": "SECRET-3"}}}
    }
    for more in (environment, judged):
        chosen(RunConfig.model_validate({**plain, **more}))
        text = json.dumps(told["config"])
        assert "SECRET" not in text
        assert "owner.key" not in text
        assert "a-task-set" in text or "judge:reward" in text
        assert told["config"]["data"]["samples_per_prompt"] == 8


def test_w_and_b_gets_steps_of_ours_and_its_failures_leave_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the calls that we make of it; `test_w_and_b_offline` is against the real one."""
    logged: list[dict[str, Any]] = []

    class Error(Exception):
        pass

    def log(values: dict[str, Any]) -> None:
        if values["step"] == 3:
            raise Error("the service ended")
        logged.append(values)

    run = SimpleNamespace(
        log=log, define_metric=lambda *args, **more: None, finish=lambda: logged.append({"finished": True})
    )
    fake = SimpleNamespace(
        init=lambda **more: run, Settings=lambda **more: None, errors=SimpleNamespace(Error=Error)
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    sink = WeightsAndBiases(config(tmp_path, wandb="offline"), "r")
    sink.write(MonitorEntry("train", 2, 1, 0.0, {"reward": 0.5}))
    with pytest.raises(SinkFailed, match="the service ended"):
        sink.write(MonitorEntry("train", 3, 1, 0.0, {"reward": 0.5}))
    sink.close()
    assert logged == [{"step": 2, "attempt": 1, "train/reward": 0.5}, {"finished": True}]


@needs_tensorboard
def test_tensorboard_holds_every_figure_and_a_resume_voids_what_came_after_its_checkpoint(
    tmp_path: Path,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, last, reward in (
        (1, 4, 0.1),
        (3, 4, 0.9),
    ):  # a life of four steps; one that resumed after step 2
        sink = TensorBoard(tmp_path)
        for step in range(first, last + 1):
            sink.write(MonitorEntry("train", step, 1, float(step), {"reward": reward}))
        sink.write(MonitorEntry("eval", last, 1, float(last), EVAL))
        sink.close()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(one.step, pytest.approx(one.value)) for one in found.Scalars("train/reward")] == [
        (1, 0.1),
        (2, 0.1),
        (3, 0.9),
        (4, 0.9),
    ]
    assert {tag for tag in found.Tags()["scalars"] if tag.startswith("eval/")} == {
        "eval/eval_sampled",
        "eval/eval_greedy",
    }


@needs_wandb
def test_w_and_b_offline(tmp_path: Path) -> None:
    """The real one, without a network: its file holds our figures and our configuration, and no key's path."""
    import wandb

    sink = chosen(config(tmp_path, wandb="offline"))[0]
    sink.write(MonitorEntry("train", 1, 1, 0.0, METRICS))
    sink.write(MonitorEntry("eval", 1, 1, 0.0, EVAL))
    sink.close()
    wandb.teardown()  # as the end of the process does
    data = next(tmp_path.glob("wandb/offline-run-*/*.wandb")).read_bytes()
    wanted = [*(f"train/{name}" for name in METRICS), *(f"eval/{name}" for name in EVAL), "context_length"]
    assert [name for name in wanted if name.encode() not in data] == []
    assert b"owner.key" not in data


# MLflow's own tables, with the SQLAlchemy of constraints.txt.
@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
@needs_mlflow
def test_mlflow_has_one_run_for_all_attempts_and_no_secret(tmp_path: Path) -> None:
    """The real one, on a database of its own; a tracking server is the same code behind HTTP."""
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    plain = config(tmp_path, mlflow=uri).model_dump(exclude_unset=True)
    plain["run"]["steps"] = 3
    client, ended = MlflowClient(tracking_uri=uri), []
    secret = {"reward": {"function": "judge:reward", "options": {"api_key": "SECRET-1"}}}
    for attempt, steps in ((1, (1, 2)), (2, (2, 3)), (3, ())):
        (sink,) = chosen(RunConfig.model_validate({**plain, **secret}))
        for step in steps:
            sink.write(MonitorEntry("train", step, attempt, float(step), {"reward": step + attempt / 10}))
        sink.close()
        (run,) = client.search_runs([client.get_experiment_by_name("scavenger").experiment_id])
        ended.append(run.info.status)
    assert ended == ["KILLED", "FINISHED", "FINISHED"], "the first was stopped before its last step"
    assert run.data.params["reward.function"] == "judge:reward"
    assert "SECRET" not in str(run.to_dictionary())
    assert "owner.key" not in str(run.to_dictionary())
    history = client.get_metric_history(run.info.run_id, "train/reward")
    assert [(one.step, one.value) for one in history] == [(1, 1.1), (2, 2.1), (2, 2.2), (3, 3.2)]
    chosen(config(tmp_path, mlflow=uri), local=True)[0].close()
    names = [one.data.tags["scavenger.run"] for one in client.search_runs([run.info.experiment_id])]
    assert sorted(names) == ["r", "r-local"], "a local try is another run"


@needs_mlflow
def test_an_mlflow_server_that_does_not_reply_is_an_error_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"monitor\.mlflow = nowhere://x"):
        chosen(config(tmp_path, mlflow="nowhere://x"))


def sample(
    tokens: int,
    reserved: int,
    harvested: int,
    lost: int = 0,
    moves: int = 0,
    versions: tuple[tuple[int, int, int], ...] = (),
) -> messages.DoneSample:
    packed = messages.pack_tokens([0] * tokens)
    return messages.DoneSample(
        1,
        0,
        packed,
        b"",
        b"",
        "stop",
        moves,
        by_reserved=reserved,
        by_harvested=harvested,
        regenerated=lost,
        versions=versions,
    )


def test_tokens_are_counted_by_who_generated_them() -> None:
    sources = TokenSources()
    sources.add([sample(10, 10, 0), sample(8, 3, 5, lost=4, moves=1)], step=5)
    sources.add([sample(6, 0, 2)], step=5)  # the daemon was restarted within it
    as_metrics = sources.as_metrics(seconds=2.0)
    assert {
        name: as_metrics[f"tokens_{name}"] for name in ("reserved", "harvested", "unknown", "wasted")
    } == {"reserved": 13.0, "harvested": 7.0, "unknown": 4.0, "wasted": 4.0}
    assert (as_metrics["tokens_per_s_reserved"], as_metrics["tokens_per_s_harvested"]) == (6.5, 3.5)
    assert (as_metrics["staleness_mean"], as_metrics["staleness_max"], as_metrics["moves"]) == (0.0, 0.0, 1.0)
    assert "staleness_mixed" not in as_metrics, "every step on policy: there is nothing to mix"


def test_the_age_of_a_steps_tokens_is_counted_by_token_and_its_mixture_by_sample() -> None:
    """Step 5 is trained by the weights after 4 steps. Version 3 has those after 2, version 5 those after 4."""
    sources = TokenSources()
    sources.add(
        [sample(10, 10, 0, versions=((3, 2, 6), (5, 4, 4))), sample(5, 0, 5, versions=((5, 4, 5),))], step=5
    )
    as_metrics = sources.as_metrics(seconds=1.0)
    names = ("staleness_mean", "staleness_max", "staleness_versions", "staleness_mixed")
    assert [as_metrics[name] for name in names] == [pytest.approx(12 / 15), 2.0, 2.0, 0.5]


def drafted(drafted: int, accepted: int, verifications: int) -> messages.Fleet:
    return messages.Fleet(1, 0, 0, 0, 0, drafted=drafted, accepted=accepted, verifications=verifications)


def test_a_step_tells_what_its_engines_drafted_since_the_one_before() -> None:
    drafts = Drafts(drafted(100, 50, 20))
    names = ("tokens_drafted", "tokens_accepted", "tokens_per_verification")
    for fleet, expected in (
        (drafted(160, 80, 30), [60.0, 30.0, 4.0]),
        (drafted(160, 80, 30), [0.0, 0.0, 1.0]),
        (drafted(8, 2, 4), [8.0, 2.0, 1.5]),  # the daemon began anew
    ):
        as_metrics = drafts.as_metrics(fleet)
        assert [as_metrics[name] for name in names] == expected


def test_the_effective_share_of_tokens_is_kong_s_and_1_where_all_count_alike() -> None:
    """(sum w)^2 / (n sum w^2): of weights 1, 1, 2 it is 16 / 18; of equal ones 1; of one that outweighs all others nearly 1 / n."""

    def row(*weights: float) -> RowStats:
        count, squares = len(weights), sum(weight**2 for weight in weights)
        return RowStats(
            0, count, count, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, weight=sum(weights), weight_squares=squares
        )

    assert effective_fraction([row(1.0, 1.0), row(2.0)]) == pytest.approx(16 / 18)
    assert effective_fraction([row(0.7, 0.7), row(0.7)]) == pytest.approx(1.0)
    assert effective_fraction([row(1e6, 1e-6, 1e-6, 1e-6)]) == pytest.approx(0.25, rel=1e-6)
    assert effective_fraction([]) == 0.0


@pytest.mark.parametrize("not_numbers", [0, 5])
def test_what_99_percent_do_not_exceed_is_never_above_the_greatest_whatever_is_no_number(
    not_numbers: int,
) -> None:
    """All differences but NaN are 0.3, whose bin ends at 0.32: neither that edge nor a NaN may stand above the greatest."""
    difference = torch.tensor([0.3] * 95 + [float("nan")] * not_numbers, dtype=torch.float64)
    of_row = torch.zeros(len(difference), dtype=torch.int64)
    row = RowStats(
        0,
        len(difference),
        len(difference),
        *(0.0,) * 4,
        mismatch_max=float(mismatch.largest(difference, of_row, 1)),
        truncated=0.0,
        mismatch_bins=tuple(mismatch.binned(difference, of_row, 1)[0].tolist()),
    )
    found = summarise([], {0: row}, divisor=1.0)
    assert found["mismatch_p99"] == found["mismatch_max"] == pytest.approx(0.3)
    assert found["mismatch_nan"] == not_numbers
    assert ("of 5 tokens no number" in alarm(found | {"mismatch_k3": float("nan")}, 0.02)) == bool(
        not_numbers
    )


def test_gpu_hours_follow_the_fleet() -> None:
    capacity = Capacity(ranks=2, gpus_per_engine=4, gpus_per_reserved=2, now=100.0)
    capacity.observe(messages.Fleet(0, 1, 0, 0, 0), 100.0 + 900)
    capacity.observe(messages.Fleet(3, 0, 1, 0, 0), 100.0 + 3600)
    assert capacity.as_metrics() == {
        "gpu_hours_trainer": 2.0,
        "gpu_hours_reserved": 0.5,
        "gpu_hours_harvested": 9.0,
    }


def test_engines_that_disagree_with_the_trainer_are_told_of_from_the_limit_on() -> None:
    found = alarm({"mismatch_k3": 0.03, "mismatch_p99": 0.4}, 0.02)
    assert found.startswith("LOOK: ")
    assert "k3 = 0.03 a token, 99 % within 0.4 nats; monitor.mismatch_alarm = 0.02" in found
    assert alarm({"mismatch_k3": 0.02}, 0.02) == ""
    assert alarm({"mismatch_k3": 5.0}, 0.0) == ""
    assert alarm({"mismatch_k3": float("nan")}, 0.02)
