"""The client without a daemon: it says so, and does not wait for ever."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from scavenger import config
from scavenger.client import Client, Run, _calls_of
from scavenger.errors import DaemonUnavailable, WireError
from scavenger.protocol import keys, messages
from scavenger.protocol.heartbeat import HeartbeatThread


def test_opening_a_run_gives_up_when_the_rendezvous_names_a_dead_daemon(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    keys.init_state(state_dir, "me")
    keys.write_rendezvous(
        state_dir, keys.Rendezvous("tcp://127.0.0.1:9", keys.generate().public, 1, 1, "here")
    )
    document = {
        "run": {"name": "r", "steps": 1, "state_dir": state_dir, "out_dir": tmp_path},
        "model": {"path": tmp_path, "context_length": 32},
        "sampling": {"max_tokens": 7},
    }
    run_config = config.parse(config.RunConfig, tmp_path, document)
    spec = messages.EngineSpec("reference", "{}", "float32", 4, 32)
    with (
        Client.connect(state_dir, connect_timeout_s=1.0) as client,
        pytest.raises(DaemonUnavailable, match="no daemon for 1 s"),
    ):
        client.open_run(run_config, engine=spec, tokenizer="", resume_step=0)


def test_a_submission_is_made_in_as_few_calls_as_hold_it_by_samples_and_by_bytes() -> None:
    large = [
        messages.GroupSpec(n, bytes(4 * 2**20), 2, messages.Sampling(8), "é" * n) for n in range(33)
    ]  # 132 MiB of prompts
    parts = _calls_of(large)
    assert [spec for part in parts for spec in part] == large
    sizes = [
        len(
            messages.encode(
                messages.Call(2**31, "r" * 64, 2**31, messages.SubmitGroups(2**31, 2**31, "train", part))
            )
        )
        for part in parts
    ]
    assert len(sizes) == 3
    assert max(sizes) > messages.MAX_MESSAGE_BYTES - 2 * 4 * 2**20
    many = [messages.GroupSpec(n, b"\1\0\0\0", 4096, messages.Sampling(8), "") for n in range(9)]
    assert [sum(spec.n for spec in part) for part in _calls_of(many)] == [messages.MAX_CALL_SAMPLES] * 2 + [
        4096
    ]
    assert _calls_of([]) == [()]
    alone = messages.GroupSpec(0, bytes(messages.MAX_MESSAGE_BYTES), 2, messages.Sampling(8), "")
    assert [len(part) for part in _calls_of([large[0], alone, large[1]])] == [1, 1, 1]
    with pytest.raises(WireError, match="over the limit of 67,108,864"):
        messages.encode(messages.Call(1, "r", 1, messages.SubmitGroups(1, 1, "train", (alone,))))


def test_a_group_that_comes_twice_is_handed_over_once() -> None:
    """An Attach has the daemon send again what was under way; the core counts on the client to know what it has."""
    run = Run(cast(Client, None), "r", cast(HeartbeatThread, None))
    group = messages.GroupDone(7, 1, 1, "train", 0, b"", "", ())
    run._take(group)
    run._take(group)
    assert run._arrived == [group]
    run._arrived = []  # as `poll` hands them over
    run._take(group)
    assert run._arrived == []
