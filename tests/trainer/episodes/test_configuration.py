"""What a run's file may say of an environment, its tasks in their order, and a check's stub model. Without `verifiers`."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from scavenger.config import RunConfig
from scavenger.errors import ConfigError
from trainer.data.prompts import TaskSet, TaskStream
from trainer.episodes.opening import opened, setup_of
from trainer.episodes.stub import answer_of, stub_model
from trainer.episodes.worker import check_version, settings_of


def config(data: dict[str, Any], **sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "r", "steps": 2, "state_dir": "/s", "out_dir": "/o"},
            "model": {"path": "/m", "context_length": 64},
            "sampling": {"max_tokens": 8},
            "data": data,
            **sections,
        }
    )


@pytest.mark.parametrize(
    ("data", "sections", "why"),
    [
        ({"environment": "e", "task": "jsonl", "path": "/x"}, {}, "leave out task, path and sets"),
        ({"environment_workers": 2}, {}, "environment_workers is of an environment"),
        ({"episode_turns": 2}, {}, "episode_turns is of an environment"),
        ({"sandbox": "bubblewrap"}, {}, "sandbox is of an environment"),
        ({"environment": "e", "on_doubt": "tell"}, {}, "on_doubt is of effects"),
        ({"environment": "e", "effects": "external", "on_divergence": "restart"}, {}, "asks its tools anew"),
        ({"environment": "e"}, {"reward": {"function": "a:b"}}, "leave out reward.function"),
        ({"environment": "e"}, {"eval": {"path": "/x"}}, "held-out tasks are the task set's own"),
        (
            {"environment": "e"},
            {"algorithm": {"on_length": "overlong-shape", "overlong_buffer_tokens": 2}},
            "is of single completions",
        ),
        ({"environment": "e"}, {"algorithm": {"router_replay": True}}, "turns carry no experts"),
    ],
)
def test_what_does_not_go_with_an_environment_is_refused(
    data: dict[str, Any], sections: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        config(data, **sections)


def test_a_worker_is_told_the_run_s_limits() -> None:
    found = setup_of(
        config({"environment": "e", "environment_args": {"a": 1}, "episode_turns": 3, "episode_s": 9}),
        "http://here",
    )
    assert (found.environment, json.loads(found.arguments), found.turns, found.seconds) == (
        "e",
        {"a": 1},
        3,
        9.0,
    )
    assert (found.endpoint, found.on_divergence, found.context_length) == ("http://here", "branch", 64)


def test_a_sandbox_sees_neither_the_run_s_folders_nor_keys() -> None:
    assert setup_of(config({"environment": "e"}), "http://here").sandbox is None
    found = setup_of(
        config(
            {
                "environment": "e",
                "sandbox": "bubblewrap",
                "episode_s": 9,
                "sandbox_disk_mb": 3,
                "sandbox_readable": ["/data"],
            }
        ),
        "http://here",
    ).sandbox
    assert found is not None
    assert (found.disk_mb, found.cpu_s, found.readable) == (3, 9.0, ("/data",))
    assert {"/s", "/o", str(Path.home() / ".config" / "scavenger")} <= set(found.hidden)


def test_a_local_try_is_refused_with_what_to_do() -> None:
    with (
        pytest.raises(ConfigError, match="--local has no daemon") as found,
        opened(config({"environment": "e"}), ["run.toml"], local=True),
    ):
        pass
    assert "--check" in found.value.remedy


def test_tasks_are_shuffled_each_epoch_and_those_held_out_are_never_trained_on() -> None:
    stream = TaskStream(TaskSet(6, "d"), 3, 2)
    held = {stream.held_out(i)[1]["task"] for i in range(2)}
    epochs = [[stream.train(4 * epoch + i)[1]["task"] for i in range(4)] for epoch in range(3)]
    assert all(sorted(epoch) == sorted(set(range(6)) - held) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    again = TaskStream(TaskSet(6, "d"), 3, 2)
    assert [again.train(i) for i in range(12)] == [stream.train(i) for i in range(12)]


def test_a_resume_is_held_to_the_same_tasks() -> None:
    one = TaskStream(TaskSet(6, "d"), 3, 2).digest()
    assert one == TaskStream(TaskSet(6, "d"), 3, 2).digest()
    others = [
        TaskStream(TaskSet(6, "x"), 3, 2),
        TaskStream(TaskSet(6, "d"), 4, 2),
        TaskStream(TaskSet(6, "d"), 3, 1),
    ]
    assert one not in {stream.digest() for stream in others}


def test_a_task_set_without_end_is_taken_in_its_order() -> None:
    stream = TaskStream(TaskSet(0, "d"), 3, 0)
    assert [stream.train(i)[1]["task"] for i in (0, 1, 10**6)] == [0, 1, 10**6]
    with pytest.raises(ConfigError, match="cannot be held out"):
        TaskStream(TaskSet(0, "d"), 3, 1)
    with pytest.raises(ConfigError, match="leaves none to train on"):
        TaskStream(TaskSet(2, "d"), 3, 2)


@pytest.mark.parametrize(
    ("version", "why"), [(None, "no verifiers"), ("0.1.14", "another API"), ("0.5.0", "another API")]
)
def test_other_releases_of_the_package_are_refused(version: str | None, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as found:
        check_version(version)
    assert "data.environment_python" in found.value.remedy or "another" in str(found.value)
    check_version("0.4.0")
    check_version("0.4.7")


def test_the_task_set_is_the_environment_s_name() -> None:
    assert settings_of("e", {"taskset": {"split": "x"}, "id": "best-of-n"}) == {
        "taskset": {"split": "x", "id": "e"},
        "id": "best-of-n",
    }
    with pytest.raises(ConfigError, match="is not that of"):
        settings_of("e", {"taskset": {"id": "other"}})


def test_the_stub_model_answers_as_the_gateway_does() -> None:
    asked = {"token_ids": [1], "sampling_params": {"max_tokens": 2}}
    with stub_model([5, 6, 7]) as endpoint:
        request = urllib.request.Request(
            f"{endpoint}/inference/v1/generate",
            json.dumps(asked).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            found = json.loads(answer.read())
    assert found == answer_of(asked, [5, 6, 7])
    [choice] = found["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == ([5, 6], "length")
    assert [one["token"] for one in choice["logprobs"]["content"]] == ["token_id:5", "token_id:6"]


def test_an_interpreter_is_named_relative_to_the_run_s_file(tmp_path: Path) -> None:
    from scavenger.config import read_run

    path = tmp_path / "run.toml"
    path.write_text(
        '[run]\nname="r"\nsteps=1\nstate_dir="s"\nout_dir="o"\n[model]\npath="m"\ncontext_length=64\n[sampling]\nmax_tokens=8\n'
        '[data]\nenvironment="e"\nenvironment_python="envs/bin/python"\nsandbox_readable=["tools", "/data"]\n'
    )
    assert read_run(path).data.sandbox_readable == (tmp_path / "tools", Path("/data"))
    assert read_run(path).data.environment_python == tmp_path / "envs/bin/python"
    assert read_run(path, (), [f"data.environment_python={sys.executable}"]).data.environment_python == Path(
        sys.executable
    )
