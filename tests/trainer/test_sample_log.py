"""Which groups of a run's steps its owner finds in `samples.jsonl`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scavenger.protocol import messages
from trainer.algorithms.scoring import Judged
from trainer.loop.sample_log import SampleLog, one_in


class Letters:
    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, tokens))


def judged(index: int, step: int = 1, purpose: str = "train", reward: float = 1.0) -> Judged:
    text = messages.pack_tokens(map(ord, "hé"))
    sample = messages.DoneSample(index, 0, text, b"", b"", "length", 0)
    group = messages.GroupDone(index, step, 1, purpose, index, text, "{}", (sample,))
    return Judged(group, ((sample, reward, "" if reward == reward else "no reward"),))


def log(folder: Path, groups: int, said: list[str] | None = None) -> SampleLog:
    tokenizer: Any = Letters()
    return SampleLog(folder, one_in(groups, 8, 4), tokenizer, (said if said is not None else []).append)


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()]


def test_each_step_has_about_as_many_groups_wherever_in_the_data_it_begins(tmp_path: Path) -> None:
    kept = log(tmp_path, 2)
    for index in range(24):  # three steps of eight prompts
        kept.write(judged(index, index // 8 + 1))
    for index in range(4):
        kept.write(judged(index, 3, "eval"))
    found = read(tmp_path)
    assert [(one["purpose"], one["step"], one["group"]) for one in found] == [
        *(("train", n // 8 + 1, n) for n in range(0, 24, 4)),
        ("eval", 3, 0),
        ("eval", 3, 2),
    ]
    assert (found[0]["prompt"], found[0]["completion"], found[0]["tokens"]) == ("hé", "hé", 2)


def test_a_masked_sample_has_its_reason_and_no_reward(tmp_path: Path) -> None:
    log(tmp_path, 8).write(judged(0, reward=float("nan")))
    assert [(one["reward"], one["masked"]) for one in read(tmp_path)] == [(None, "no reward")]


@pytest.mark.parametrize("groups", [0, 1])
def test_no_group_is_kept_unless_asked_for_and_a_folder_that_is_gone_is_said_once(
    tmp_path: Path, groups: int
) -> None:
    said: list[str] = []
    kept = log(tmp_path / "gone", groups, said)
    kept.write(judged(0))
    kept.write(judged(0))
    assert len(said) == groups
    assert all("gets nothing more of this run" in line for line in said)
