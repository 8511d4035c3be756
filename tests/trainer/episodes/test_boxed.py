"""Episodes whose agents are programs in sandboxes: real `verifiers`, real bubblewrap, a stub model. What one overdoes is its own end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scavenger.errors import ConfigError
from tests.gateway.conftest import write_model
from tests.trainer.episodes.interpreters import needs_verifiers, python_with_verifiers
from tests.trainer.episodes.test_played import TEMPLATE
from trainer.episodes import wire
from trainer.episodes.pool import EnvironmentPool
from trainer.episodes.stub import stub_model

pytestmark = [needs_verifiers, pytest.mark.sandbox, pytest.mark.timeout(600)]
ENVIRONMENT = "boxed_env"
WORDS = [40, 41, 42]
COMMANDS = {
    "fine": "touch done",
    "forks": "bomb() { bomb | bomb & }; touch done; bomb; sleep 1000",
    "floods": "touch done; yes",
    "fills": "touch done; i=0; while :; do i=$((i+1)); : > f$i; done",
    "hangs": "touch done; sleep 100000",
    "looks": "cat {secret} && touch done",
}


@pytest.fixture(autouse=True)
def found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    write_model(folder)
    for name, more in (
        ("config.json", {"model_type": "qwen3"}),
        ("tokenizer_config.json", {"chat_template": TEMPLATE}),
    ):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | more))
    return folder


@pytest.fixture
def endpoint() -> Iterator[str]:
    with stub_model(WORDS) as found:
        yield found


def setup(endpoint: str, model: Path, hidden: Path, seconds: float, **more: Any) -> wire.Setup:
    secret = hidden / "owner.key"
    commands = [command.replace("{secret}", str(secret)) for command in COMMANDS.values()]
    args = {"taskset": {"commands": commands}, "agent": {"harness": {"id": ENVIRONMENT}}}
    limits: dict[str, Any] = {
        "memory_mb": 512,
        "processes": 32,
        "disk_mb": 8,
        "output_mb": 1,
        "cpu_s": 1000.0,
    }
    box = wire.Sandbox(**limits | more, hidden=(str(hidden),))
    return wire.Setup(
        ENVIRONMENT,
        json.dumps(args),
        json.dumps({"name": "default"}),
        str(model),
        "r",
        4000,
        endpoint,
        "branch",
        0,
        0,
        seconds,
        box,
    )


def all_played(pool: EnvironmentPool, seconds: float = 300.0) -> dict[str, wire.Played]:
    for number, name in enumerate(COMMANDS):
        pool.play(wire.Play(name, "none", number, 1, {"temperature": 1.0, "max_tokens": 8}))
    found: dict[str, wire.Played] = {}
    deadline = time.monotonic() + seconds
    while len(found) < len(COMMANDS) and time.monotonic() < deadline:
        found |= {one.episode: one for one in pool.poll(0.5)}
    return found


def test_a_tool_that_forks_floods_fills_or_hangs_ends_its_own_episode_only(
    endpoint: str, model: Path, tmp_path: Path
) -> None:
    hidden = tmp_path / "out"
    hidden.mkdir()
    (hidden / "owner.key").write_text("secret")
    given = setup(endpoint, model, hidden, 40.0)
    with EnvironmentPool(given, python=Path(str(python_with_verifiers())), concurrency=8) as pool:
        found = all_played(pool)
        assert pool.losses == 0, "the worker itself is unharmed"
    assert {name: one.error for name, one in found.items() if one.error} == {"looks": "HarnessError"}, (
        found["fine"].output,
        found["looks"].output,
    )
    assert "No such file" in found["looks"].output
    assert {name: (one.reward, one.stopped_by) for name, one in found.items() if name != "looks"} == {
        "fine": (1.0, found["fine"].stopped_by),
        "forks": (0.0, "sandbox:processes"),
        "floods": (0.0, "sandbox:output"),
        "fills": (0.0, "sandbox:disk"),
        "hangs": (1.0, found["hangs"].stopped_by),
    }
    assert not found["fine"].stopped_by.startswith("sandbox")
    assert found["hangs"].finish == "length"
    assert found["hangs"].seconds >= 40.0
    for name in ("fine", "forks", "floods", "fills", "hangs"):
        assert sum(branch.trained for branch in found[name].branches) == len(WORDS), "what it said is trained"


def test_a_host_that_makes_no_box_is_told_before_the_run_starts(
    endpoint: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    given = setup(endpoint, model, tmp_path / "out", 60.0)
    with (
        pytest.raises(ConfigError, match="no program bwrap") as error,
        EnvironmentPool(given, python=Path(str(python_with_verifiers()))),
    ):
        pass
    assert 'data.sandbox = "none"' in error.value.remedy
