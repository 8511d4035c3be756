"""The client without a daemon: it says so, and does not wait for ever."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from scavenger import config, keys, wire
from scavenger.client import Client, KeepAlive, Run
from scavenger.errors import DaemonUnavailable


def test_opening_a_run_gives_up_when_the_rendezvous_names_a_dead_daemon(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    keys.init_state(state_dir, "me")
    keys.write_rendezvous(state_dir, keys.Rendezvous("tcp://127.0.0.1:9", keys.generate().public, 1, 1, "here"))
    document = {
        "run": {"name": "r", "steps": 1, "state_dir": state_dir, "out_dir": tmp_path},
        "model": {"path": tmp_path, "context_length": 32},
        "sampling": {"max_tokens": 7},
    }
    run_config = config.parse(config.RunConfig, tmp_path, document)
    spec = wire.EngineSpec("reference", "{}", "float32", 4, 32)
    with Client.connect(state_dir, give_up_s=1.0) as client, pytest.raises(DaemonUnavailable, match="no daemon for 1 s"):
        client.open_run(run_config, engine=spec, tokenizer="", resume_step=0)


def test_a_group_that_comes_twice_is_handed_over_once() -> None:
    """An Attach has the daemon send again what was under way; the core counts on the client to know what it has."""
    run = Run(cast(Client, None), "r", cast(KeepAlive, None))
    group = wire.GroupDone(7, 1, 1, "train", 0, b"", "", ())
    run._take(group)
    run._take(group)
    assert run._arrived == [group]
    run._arrived = []  # as `poll` hands them over
    run._take(group)
    assert run._arrived == []
