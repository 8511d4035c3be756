"""A drafted run with a model, data and a site of its own, to be spoilt."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from scavenger.protocol import keys
from tests.trainer.prepare.hand import draft


@pytest.fixture
def own_model(model_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text(
        "".join(
            json.dumps({"question": f"{n}{n + 1}>", "answer": str(n), "level": 1}) + "\n" for n in range(40)
        )
    )
    return path


@pytest.fixture
def site(tmp_path: Path) -> Path:
    state = tmp_path / "state"
    keys.init_state(state, "owner")
    pair = keys.generate()
    keys.write_rendezvous(state, keys.Rendezvous("tcp://127.0.0.1:1", pair.public, 1, 1, "login1"))
    return state


@pytest.fixture
def run(tmp_path: Path, own_model: Path, data: Path, site: Path) -> Path:
    assert draft(tmp_path / "my-run", own_model, data, f"--state-dir={site}") == 0
    return tmp_path / "my-run" / "run.toml"
