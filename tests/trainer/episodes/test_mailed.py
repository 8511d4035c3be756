"""Tools of a real MCP server of `verifiers`, called by its own client through a real worker, gateway and daemon: each is asked once."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from scavenger.gateway import identity
from tests.gateway.conftest import SECRET, LiveGateway, worker
from tests.gateway.conftest import live as live  # the fixture
from tests.router.harness import SPEC
from tests.trainer.episodes.interpreters import needs_verifiers, python_with_verifiers
from tests.trainer.episodes.test_played import found_by_name as found_by_name  # fixtures
from tests.trainer.episodes.test_played import model as model
from trainer.episodes import wire
from trainer.episodes.pool import EnvironmentPool

pytestmark = [needs_verifiers, pytest.mark.timeout(600)]
ENVIRONMENT, TURNS = "mail_env", 2
SANDBOX = wire.Sandbox(2048, 128, 64, 4, 600.0)


def setup(
    live: LiveGateway,
    model: Path,
    outbox: Path,
    *,
    effects: str = "external",
    on_doubt: str = "fail",
    mail: dict[str, Any] | None = None,
    sandbox: wire.Sandbox | None = None,
    **harness: Any,
) -> wire.Setup:
    tool = {"outbox": str(outbox), **(mail or {})}
    args = {
        "taskset": {"turns": TURNS, "task": {"mail": tool}},
        "agent": {"harness": {"id": ENVIRONMENT, **harness}},
    }
    return wire.Setup(
        ENVIRONMENT,
        json.dumps(args),
        json.dumps({"name": "default"}),
        str(model),
        "r",
        SPEC.context_length,
        str(live.http.base_url),
        "branch",
        0,
        0,
        120.0,
        sandbox,
        effects,
        on_doubt,
    )


def played(live: LiveGateway, given: wire.Setup, losses: int) -> wire.Played:
    with worker(live.daemon), EnvironmentPool(given, python=Path(str(python_with_verifiers()))) as pool:
        sampling: dict[str, float | int | list[str]] = {"temperature": 1.0, "max_tokens": 4}
        pool.play(wire.Play("e", identity.episode_key(SECRET, "e"), 0, 1, sampling))
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            for one in pool.poll(1.0):
                assert pool.losses == losses
                return one
    raise AssertionError("the episode came to no end")


def calls(live: LiveGateway) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in live.daemon.query("SELECT tool, state FROM v_tool_calls ORDER BY call_id")]


def lines(outbox: Path) -> list[str]:
    return outbox.read_text(encoding="utf-8").splitlines()


def test_an_episode_that_is_played_again_sends_no_mail_twice(
    live: LiveGateway, model: Path, tmp_path: Path
) -> None:
    outbox = tmp_path / "outbox"
    one = played(live, setup(live, model, outbox, die_once=str(tmp_path / "died")), 1)
    assert (one.error, one.reward) == ("", 1.0), one.output
    assert lines(outbox) == ["turn 0", "turn 1"]
    assert calls(live) == [("mail.send", "answered")] * 2
    assert live.count("turns") == TURNS, "no turn was generated twice either"


def test_without_the_setting_the_same_episode_sends_its_first_mail_again(
    live: LiveGateway, model: Path, tmp_path: Path
) -> None:
    """What the setting is for: the other tests of this file can fail."""
    outbox = tmp_path / "outbox"
    played(live, setup(live, model, outbox, effects="none", die_once=str(tmp_path / "died")), 1)
    assert lines(outbox)[:2] == ["turn 0", "turn 0"]
    assert calls(live) == []


@pytest.mark.parametrize("on_doubt", ["fail", "tell"])
def test_a_mail_whose_answer_is_lost_with_its_worker_is_not_sent_again(
    on_doubt: str, live: LiveGateway, model: Path, tmp_path: Path
) -> None:
    outbox, hung = tmp_path / "outbox", str(tmp_path / "hung")
    given = setup(live, model, outbox, on_doubt=on_doubt, mail={"hang_once": hung}, die_when=hung)
    one = played(live, given, 1)
    if on_doubt == "fail":
        assert "not asked again" in one.error
        assert one.final
        assert lines(outbox) == ["turn 0"]
        assert calls(live) == [("mail.send", "asked")]
    else:
        assert (one.error, one.reward) == ("", 1.0), one.output
        assert lines(outbox) == ["turn 0", "turn 1"]
        assert calls(live) == [("mail.send", "answered")] * 2


@pytest.mark.sandbox
def test_a_tool_server_in_a_sandbox_is_reached_by_its_agent_and_recorded(
    live: LiveGateway, model: Path, tmp_path: Path
) -> None:
    given = setup(live, model, Path("/tmp/work/outbox"), sandbox=SANDBOX)
    one = played(live, given, 0)
    assert (one.error, one.reward) == ("", 1.0), one.output
    assert calls(live) == [("mail.send", "answered")] * 2
