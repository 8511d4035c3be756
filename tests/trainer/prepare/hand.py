"""What the tests of `scavenger init` do to a drafted run, and what its check says then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scavenger.config import read_run
from scavenger.errors import ConfigError
from scavenger.sizing.shape import ModelShape
from scavenger.sizing.training import TrainJob
from trainer.prepare import __main__ as program
from trainer.prepare import check, model, weights
from trainer.prepare.check import RequestedGpus

ROOT = Path(__file__).resolve().parents[3]
NO_GPU = RequestedGpus(1, 0, 0.0)
RAISES = 'def f(prompt, completion, meta):\n    return float(meta["no such column"])\n'
BIG = ModelShape(8_000_000_000, 36, 4096, 12288, 151936)
FITS = TrainJob(16, 80.0, 8192, True, BIG.parameters, False, False, 0.9, 1)


def draft(folder: Path, model: Path, data: Path, *more: str) -> int:
    return program.main(
        ["draft", str(folder), f"--model={model}", f"--data={data}", "--engine=reference", "--gpus=2", *more]
    )


def change(run: Path, old: str, new: str) -> None:
    text = run.read_text()
    assert text.count(old) == 1, old
    run.write_text(text.replace(old, new))


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))


def refused(run: Path, gpus: RequestedGpus = NO_GPU) -> dict[str, str]:
    return {finding.what: finding.problem for finding in check.check(run, gpus) if finding.problem}


def weights_told(run: Path, nodes: int = 1, at_hand: Path | None = None) -> str:
    """What the check of the weights alone says: its note, or cause and remedy."""
    config = read_run(run)
    try:
        return weights.check(config, model.read_facts(config.model.path), nodes, at_hand)
    except ConfigError as error:
        return f"REFUSED {error}"
