"""A rank whose source of weights fails ends its job, whichever rank it is and whatever it waits for; rank 0 closes the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scavenger.errors import WeightsError
from tests.trainer.test_local import write_run
from trainer import __main__ as program
from trainer.launch import environment
from trainer.local import LocalRun
from trainer.loop.ending import Ending, EndRequested

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.mpi
def test_a_rank_that_ignores_sigterm_and_waits_for_rank_0_ends_the_job_when_its_source_fails(
    model_folder: Path, tmp_path: Path
) -> None:
    run_toml = write_run(tmp_path, model_folder, steps=1, out="x")
    run_toml.write_text(
        run_toml.read_text().replace("[weights]", '[weights]\nlisten = "127.0.0.1"\nencrypt = true')
    )
    environ = environment(os.environ, root=os.geteuid() == 0) | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    rank = [sys.executable, str(Path(__file__).with_name("source_fault_program.py")), str(run_toml)]
    done = subprocess.run(
        ["mpirun", "-n", "2", *rank], env=environ, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 1, done.stderr[-2000:]
    assert "error: the encrypted weights source cannot serve any more: ZMQError" in done.stderr
    assert "Traceback" not in done.stderr.partition("error: the encrypted")[2]


def test_rank_0_ends_while_it_waits_for_samples_when_its_source_fails_and_closes_the_run_as_failed(
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    signals: None,
) -> None:
    """No engine can load what it published, so nothing comes."""
    made: list[Ending] = []
    closed: list[tuple[object, ...]] = []

    def kept() -> Ending:
        made.append(Ending())
        return made[-1]

    def poll(self: LocalRun, timeout_s: float) -> list[object]:
        made[0].fail(WeightsError("the source is gone"))  # as a thread of the source's does
        return []

    monkeypatch.setattr(program, "Ending", kept)
    monkeypatch.setattr(LocalRun, "poll", poll)
    monkeypatch.setattr(LocalRun, "close_run", lambda _self, *how: closed.append(how))
    assert (
        program.main([str(write_run(tmp_path, model_folder, steps=1, out="x")), "--local"])
        == WeightsError.exit_code
    )
    assert closed == [("failed", "the source is gone")]
    assert "error: the source is gone" in capsys.readouterr().err


def test_the_first_fault_is_raised_and_before_a_signal_s_wish() -> None:
    ending = Ending()
    ending.check()
    ending.note(15, None)
    with pytest.raises(EndRequested):
        ending.check()
    for cause in ("first", "second"):
        ending.fail(WeightsError(cause))
    with pytest.raises(WeightsError, match="first"):
        ending.check()
