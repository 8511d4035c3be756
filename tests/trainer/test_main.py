"""What the trainer's process does besides training: refuse what cannot work, and end so that the run can go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trainer.__main__ as program
from scavenger.config import RunConfig, read_run
from scavenger.errors import ConfigError
from tests.trainer.test_local import ROOT, write_run


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
    "weights", [{}, {"listen": "127.0.1.1"}, {"listen": "localhost"}, {"listen": "::1"}, {"listen": "0.0.0.0", "advertise": "localhost"}]
)
def test_weights_on_loopback_are_refused_where_the_daemon_is_elsewhere(weights: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r'set weights\.listen = "0\.0\.0\.0"'):
        program.check_reach(config(**weights), "login1", "node7")
    program.check_reach(config(**weights), "node7", "node7")


@pytest.mark.parametrize("weights", [{"listen": "0.0.0.0"}, {"listen": "10.0.0.7"}, {"listen": "0.0.0.0", "advertise": "node7-ib"}])
def test_weights_that_others_can_reach_are_accepted(weights: dict[str, str]) -> None:
    program.check_reach(config(**weights), "login1", "node7")


def test_a_run_s_toml_chooses_a_verifier_with_its_options(model_folder: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, model_folder, steps=1, out="x")
    text = path.read_text().replace(
        '"tests.trainer.test_local:first_digits"', '"trainer.verifiers:regex"\noptions = { pattern = "= *([0-9]+)" }'
    )
    path.write_text(text + '[algorithm]\nname = "rloo"\nscale_by_std = true\n')
    config = read_run(path)
    with program._runner(config.reward) as runner:
        assert [runner.score("", said, {"answer": 12}) for said in ("5 = 5, 7 + 5 = 12", "12")] == [1.0, 0.0]
    with pytest.raises(ConfigError, match="rloo does not divide by a deviation"):
        program.make_learner(config, program.Solo())


def test_other_ranks_outlive_sigterm_until_rank_0_is_gone(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(program, "connect", lambda poll_ms: SimpleNamespace(rank=1, size=2))
    monkeypatch.setattr(program, "make_learner", lambda *args: None)
    monkeypatch.setattr(program, "serve", lambda *args: seen.append(signal.getsignal(signal.SIGTERM)))
    monkeypatch.setattr(program, "leave", lambda: None)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert program.main([str(write_run(tmp_path, model_folder, steps=1, out="x"))]) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIG_IGN]


def test_a_trainer_that_is_terminated_closes_nothing(model_folder: Path, tmp_path: Path) -> None:
    """SIGTERM while samples are outstanding: the run stays open, to be resumed."""
    script = f"""
import os, signal, sys
from trainer import __main__ as program
from trainer.local import LocalRun
LocalRun.poll = lambda self, timeout_s: os.kill(os.getpid(), signal.SIGTERM)
LocalRun.close_run = lambda self, state, reason="": open({str(tmp_path / "closed")!r}, "w").close()
sys.exit(program.main(sys.argv[1:]))
"""
    environ: dict[str, Any] = dict(os.environ) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    argv = [sys.executable, "-c", script, str(write_run(tmp_path, model_folder, steps=1, out="x")), "--local"]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert not (tmp_path / "closed").exists()
