"""What the trainer's process does besides training: refuse what cannot work, and end so that the run can go on."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trainer.__main__ as program
from scavenger import config as configs
from scavenger.config import RunConfig, read_run
from scavenger.errors import ConfigError, DaemonUnavailable, StaleSamples
from scavenger.ledger import store
from scavenger.ledger.read import reader
from scavenger.protocol import keys
from scavenger.weights.source import serving_interface
from tests.trainer.test_local import write_run
from trainer.checkpoint import checkpoint
from trainer.data.prompts import open_tokenizer, vocabulary
from trainer.local import LocalRun
from trainer.loop import step
from trainer.loop.comm import Solo
from trainer.loop.ending import SIGINT_EXIT, SIGNALS, SIGTERM_EXIT, Ending, EndRequested


def config(**weights: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "r", "steps": 1, "state_dir": "/state", "out_dir": "/out"},
            "model": {"path": "/model", "context_length": 24},
            "sampling": {"max_tokens": 8},
            "weights": weights,
        }
    )


@pytest.mark.parametrize(
    "weights",
    [
        {"listen": "127.0.0.1"},
        {"listen": "127.0.1.1"},
        {"listen": "localhost"},
        {"listen": "::1"},
        {"listen": "0.0.0.0", "advertise": "localhost"},
    ],
)
def test_weights_on_loopback_are_refused_where_the_daemon_is_elsewhere(weights: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r'set weights\.listen = "0\.0\.0\.0"'):
        program.check_reach(config(**weights), "login1", "node7")
    program.check_reach(config(**weights), "node7", "node7")


@pytest.mark.parametrize(
    "weights",
    [{}, {"listen": "0.0.0.0"}, {"listen": "10.0.0.7"}, {"listen": "0.0.0.0", "advertise": "node7-ib"}],
)
def test_weights_that_others_can_reach_are_accepted(weights: dict[str, str]) -> None:
    program.check_reach(config(**weights), "login1", "node7")


@pytest.mark.parametrize(
    ("listen", "endpoint", "interface"),
    [
        ("", "tcp://login1:5555", "0.0.0.0"),
        ("", "tcp://10.0.0.7:5555", "0.0.0.0"),
        ("", "tcp://127.0.0.1:5555", "127.0.0.1"),
        ("", "tcp://localhost:5555", "127.0.0.1"),
        ("10.0.0.8", "tcp://127.0.0.1:5555", "10.0.0.8"),
    ],
)
def test_who_can_reach_the_daemon_can_reach_the_weights(
    tmp_path: Path, listen: str, endpoint: str, interface: str
) -> None:
    assert serving_interface(listen, endpoint) == interface
    chosen = config(**({"listen": listen} if listen else {}))
    chosen = chosen.model_copy(update={"run": chosen.run.model_copy(update={"state_dir": tmp_path})})
    if not listen:
        with pytest.raises(DaemonUnavailable, match="no daemon has announced itself"):
            program.weights_source(chosen, Solo(), Ending())
        keys.write_rendezvous(tmp_path, keys.Rendezvous(endpoint, "k", 1, 1, "login1"))
        host = "127.0.0.1" if interface == "127.0.0.1" else socket.gethostname()
        with program.weights_source(chosen, Solo(), Ending()) as source:
            assert source.endpoint.startswith(f"tcp://{host}:")


def test_a_run_that_answers_in_another_s_episodes_names_its_vocabulary_and_when_it_is_done_no_remedy(
    model_folder: Path, tmp_path: Path
) -> None:
    alone = read_run(write_run(tmp_path, model_folder, steps=4, out="x"))
    data = alone.data.model_copy(update={"episodes_of": "proposer"})
    solver = alone.model_copy(update={"data": data})
    assert program.done_line(solver, 4) == "takes no more steps: 4 steps are done, run.steps = 4"
    assert program.done_line(alone, 4).startswith("nothing is left to train: 4 steps are done")
    assert program.engine_spec(alone).vocabulary == "", "its tokens are nobody else's"
    mine = open_tokenizer(model_folder)
    assert program.engine_spec(solver).vocabulary == vocabulary(mine)
    mine.add_tokens(["one more"])
    assert vocabulary(mine) != vocabulary(open_tokenizer(model_folder))


def test_a_run_s_toml_chooses_a_verifier_with_its_options(model_folder: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, model_folder, steps=1, out="x")
    text = path.read_text().replace(
        '"tests.trainer.digits:first_digits"',
        '"trainer.verifiers:regex"\noptions = { pattern = "= *([0-9]+)" }',
    )
    path.write_text(text + '[algorithm]\nname = "rloo"\nscale_by_std = true\n')
    config = read_run(path)
    with program._runner(config.reward) as runner:
        assert [runner.score("", said, {"answer": 12}) for said in ("5 = 5, 7 + 5 = 12", "12")] == [1.0, 0.0]
    with pytest.raises(ConfigError, match="rloo does not divide by a deviation"):
        program.make_learner(config, Solo())


def test_a_rank_does_not_start_a_run_that_could_stand_without_any_engine(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_run(tmp_path, model_folder, steps=1, out="x")
    path.write_text(path.read_text() + "[reserved]\nworkers = 0\n")
    monkeypatch.setattr(program, "connect", lambda poll_ms: pytest.fail("it went on"))
    assert program.main([str(path)]) == 2
    assert "remedy: in run.toml, set reserved.workers = 1 or more" in capsys.readouterr().err


def test_a_rank_on_another_host_serves_under_its_own_name_and_not_on_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there: Any = SimpleNamespace(rank=1, share=lambda frame: b"node1")
    monkeypatch.setattr(socket, "gethostname", lambda: "node2")
    with pytest.raises(
        ConfigError, match=r'reached from node2 alone, and rank 0 is on node1(.|\n)*"0.0.0.0"'
    ):
        program.weights_source(config(listen="127.0.0.1"), there, Ending())
    with program.weights_source(config(listen="0.0.0.0", advertise="front.node1"), there, Ending()) as source:
        assert source.endpoint.startswith("tcp://node2:")
    here: Any = SimpleNamespace(rank=0, share=lambda frame: frame)
    with program.weights_source(config(listen="0.0.0.0", advertise="front.node2"), here, Ending()) as source:
        assert source.endpoint.startswith("tcp://front.node2:")


def test_other_ranks_outlive_sigterm_until_rank_0_is_gone(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(
        program, "connect", lambda poll_ms: SimpleNamespace(rank=1, size=2, share=lambda frame: frame)
    )
    monkeypatch.setattr(program, "make_learner", lambda *args: None)
    monkeypatch.setattr(program, "watched", lambda *args: None)
    monkeypatch.setattr(
        program, "serve", lambda *args: seen.extend(signal.getsignal(number) for number in SIGNALS)
    )
    monkeypatch.setattr(program, "disconnect", lambda: None)
    before = [signal.getsignal(number) for number in SIGNALS]
    try:
        assert program.main([str(write_run(tmp_path, model_folder, steps=1, out="x"))]) == 0
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)
    assert seen == [signal.SIG_IGN] * 2


def ended(
    run_toml: Path,
    number: signal.Signals,
    purpose: str,
    step: int,
    monkeypatch: pytest.MonkeyPatch,
    code: int = SIGTERM_EXIT,
) -> bool:
    """A trainer that gets the signal when the first groups of that step, or evaluation, have come. Returns whether it closed the run."""
    poll, submit, closed = LocalRun.poll, LocalRun.submit, []
    of: dict[int, tuple[str, int]] = {}

    def submitted(
        self: LocalRun, at: int, version: int, groups: Any, purpose: str = "train"
    ) -> tuple[int, ...]:
        ids = submit(self, at, version, groups, purpose)
        of.update((group, (purpose, at)) for group in ids)
        return ids

    def polled(self: LocalRun, timeout_s: float) -> list[Any]:
        found = poll(self, timeout_s)
        if any(of[group.group_id] == (purpose, step) for group in found):
            os.kill(os.getpid(), number)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(LocalRun, "submit", submitted)
        patch.setattr(LocalRun, "poll", polled)
        patch.setattr(LocalRun, "close_run", lambda *args: closed.append(args))
        assert program.main([str(run_toml), "--local"]) == code
    return bool(closed)


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [entry for entry in entries if entry["kind"] == kind]


@pytest.mark.parametrize(
    ("number", "purpose", "step"),
    [(signal.SIGTERM, "train", 2), pytest.param(signal.SIGUSR1, "eval", 2, marks=pytest.mark.long)],
)
def test_a_trainer_told_to_end_within_a_step_goes_on_as_if_it_had_not_been(
    number: signal.Signals,
    purpose: str,
    step: int,
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    signals: None,
) -> None:
    """No checkpoint was due yet: the one it writes is of the last whole step. The resumed run ends bit by bit where one ends that nobody

    disturbed.
    """
    whole, path = (write_run(tmp_path, model_folder, steps=2, out=out) for out in ("whole", "x"))
    for run_toml in (whole, path):
        run_toml.write_text(run_toml.read_text().replace("every = 1", "every = 2"))
    assert program.main([str(whole), "--local"]) == 0
    assert not ended(path, number, purpose, step, monkeypatch), "the run stays open"
    assert f"{number.name}: the trainer ends; the run can be resumed" in capsys.readouterr().out
    last = step if purpose == "eval" else step - 1
    assert checkpoint.steps(tmp_path / "x" / "local") == [last]
    assert not list((tmp_path / "x" / "local" / "checkpoints").glob(".*"))
    assert program.main([str(path), "--local"]) == 0
    assert (
        f"resumed from {tmp_path / 'x' / 'local' / 'checkpoints' / checkpoint.name(last)}"
        in capsys.readouterr().out
    )
    ends = [checkpoint.read_state(checkpoint.found(tmp_path / out / "local")[-1]) for out in ("whole", "x")]
    assert ends[0].root == ends[1].root
    assert (ends[0].step, ends[0].cursor, ends[0].updates_taken) == (
        ends[1].step,
        ends[1].cursor,
        ends[1].updates_taken,
    )
    assert [entry["step"] for entry in lines(tmp_path / "x" / "local", "eval")] == [0, 2], (
        "each evaluation was made once"
    )
    assert (
        lines(tmp_path / "x" / "local", "eval")[-1]["eval_sampled"]
        == lines(tmp_path / "whole" / "local", "eval")[-1]["eval_sampled"]
    )


def test_a_trainer_told_to_end_before_its_first_step_leaves_no_checkpoint(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: None
) -> None:
    path = write_run(tmp_path, model_folder, steps=1, out="x")
    assert not ended(path, signal.SIGTERM, "eval", 0, monkeypatch)
    assert checkpoint.found(tmp_path / "x" / "local") == []


def state_of_try(out: Path) -> str:
    engine = store.open_readonly(configs.read_daemon(out / "local" / "scavenger.toml").ledger_url)
    ((state,),) = reader.rows(engine, "SELECT state FROM v_runs").rows
    engine.dispose()
    return str(state)


def test_ctrl_c_saves_the_whole_steps_of_a_local_try_and_ends_in_one_line(
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    signals: None,
) -> None:
    path = write_run(tmp_path, model_folder, steps=3, out="x")
    path.write_text(path.read_text().replace("every = 1", "every = 100"))
    assert not ended(path, signal.SIGINT, "train", 2, monkeypatch, SIGINT_EXIT), "the run stays open"
    said = capsys.readouterr()
    saved = tmp_path / "x" / "local" / "checkpoints" / checkpoint.name(1)
    assert (
        said.out.splitlines()[-1]
        == f"stopped by Ctrl-C; saved as {saved}: the same command goes on from there"
    )
    assert "Traceback" not in said.out + said.err
    assert state_of_try(tmp_path / "x") == "stopped"
    assert program.main([str(path), "--local"]) == 0
    told = capsys.readouterr().out
    assert f"resumed from {saved}, after step 1 (--resume none starts over)" in told
    assert state_of_try(tmp_path / "x") == "finished"


def test_ctrl_c_before_a_step_is_done_and_a_second_one_leave_no_traceback(
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    signals: None,
) -> None:
    path = write_run(tmp_path, model_folder, steps=1, out="x")
    assert not ended(path, signal.SIGINT, "eval", 0, monkeypatch, SIGINT_EXIT)
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .startswith("stopped by Ctrl-C before the first step was done")
    )
    ending = Ending()
    ending.note(signal.SIGINT, None)
    with pytest.raises(EndRequested):
        ending.check()
    with pytest.raises(KeyboardInterrupt):
        ending.note(signal.SIGINT, None)

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "make_learner", interrupted)
    assert program.main([str(path), "--local"]) == SIGINT_EXIT
    assert capsys.readouterr().err.splitlines() == ["stopped by Ctrl-C"]


RAISES_LATER = """
calls = 0
def reward(prompt, completion, meta):
    global calls
    calls += 1
    if calls > 24:  # an evaluation of 8 completions, a step of 12, and a third of the next
        raise RuntimeError("the judge is gone")
    return calls % 2
"""


def test_a_reward_beside_run_toml_that_raises_leaves_the_steps_before_it_saved(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], signals: None
) -> None:
    path = write_run(tmp_path, model_folder, steps=9, out="x")
    text = path.read_text().replace("every = 1", "every = 100")
    text = (
        text.replace("tests.trainer.digits:first_digits", "beside_run:reward")
        + "retries = 0\nprocesses = 1\n"
    )
    path.write_text(text)
    (tmp_path / "beside_run.py").write_text(RAISES_LATER)
    assert program.main([str(path), "--local"]) == 1
    said = capsys.readouterr()
    assert "it raised RuntimeError" in said.err
    done = [entry["step"] for entry in lines(tmp_path / "x" / "local", "train")]
    assert done, "a step was done"
    assert checkpoint.steps(tmp_path / "x" / "local") == [done[-1]]
    assert f"the weights after step {done[-1]} are saved; the next start goes on from there" in said.out


def test_a_run_whose_samples_are_too_stale_leaves_the_step_before_saved(
    model_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    signals: None,
) -> None:
    """When a step is too stale is `test_streaming.py`'s; here it is said of the second one."""
    path = write_run(tmp_path, model_folder, steps=3, out="x")
    path.write_text(path.read_text().replace("every = 1", "every = 100"))

    def second(self: step.Stepper, work: Any) -> None:
        if work.step == 2:
            raise StaleSamples("step 2: too far", "lower k")

    monkeypatch.setattr(step.Stepper, "_check_staleness", second)
    assert program.main([str(path), "--local"]) == 1
    said = capsys.readouterr()
    assert "step 2: too far" in said.err
    assert checkpoint.steps(tmp_path / "x" / "local") == [1]
    assert "the weights after step 1 are saved; the next start goes on from there" in said.out


def test_an_evaluation_alone_has_a_folder_of_its_own_checkpoint_and_reaches_no_tracker(
    model_folder: Path, tmp_path: Path
) -> None:
    """The run's `step-00000020` is not the try's, whose folder and history it would else be added to."""
    path = write_run(tmp_path, model_folder, steps=1, out="x")
    config = read_run(path)
    config = config.model_copy(
        update={"monitor": config.monitor.model_copy(update={"wandb": "online", "mlflow": "http://x"})}
    )
    made = [config.run.out_dir / "checkpoints", tmp_path / "run/checkpoints"]
    for folder in made:
        (folder / "step-00000020").mkdir(parents=True)
        (folder / "step-00000020" / checkpoint.STATE_FILE).write_text("{}")
    found = [program.evaluation_of(config, str(folder / "step-00000020")) for folder in made]
    assert {named for _, named in found} == {str((one / "step-00000020").resolve()) for one in made}
    assert len({one.run.out_dir for one, _ in found}) == 2
    assert all((one.monitor.wandb, one.monitor.mlflow) == ("off", "") for one, _ in found)


def test_a_local_try_is_another_run_to_a_tracker(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: None
) -> None:
    """Its steps begin at 1 again, and would lie among those of the run itself."""
    begun: list[str] = []

    class Error(Exception):
        """Ends the program before it trains."""

    def init(**more: Any) -> None:
        begun.append(more["id"])
        raise Error

    errors = SimpleNamespace(Error=Error)
    fake = SimpleNamespace(init=init, Settings=lambda **more: None, errors=errors)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    path = write_run(tmp_path, model_folder, steps=1, out="x")
    assert program.main([str(path), "--local", "--set", "monitor.wandb=offline"]) == ConfigError.exit_code
    assert begun == ["local-local"], "the run's name is local"


def test_a_curriculum_is_not_laid_over_other_prompts_of_the_same_run(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_run(write_run(tmp_path, model_folder, steps=1, out="x"))
    config = config.model_copy(update={"data": config.data.model_copy(update={"curriculum_max": 0.9})})
    state = checkpoint.CheckpointState(
        step=3, version=3, root="", cursor=9, seed=config.run.seed, updates_taken=3, dtype="float64",
        run=config.run.name, data="of other prompts",
    )  # fmt: skip
    monkeypatch.setattr(checkpoint, "read_state", lambda path: state)
    with pytest.raises(ConfigError, match=r"pass rates for data\.curriculum_\* are of the old ones"):
        program.restore(config, None, tmp_path, "of these", chosen=True)  # type: ignore[arg-type]  # refused before the ranks are asked
