"""How far trainer and engine are apart at each token: what a rank computes, which groups are kept, and what the daemon is told."""

from __future__ import annotations

import random
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from scavenger.protocol import messages
from tests.trainer import test_masks as masks
from tests.trainer.test_step import RecordedRun, make_config, play
from trainer.algorithms import differences
from trainer.data.batching import Micro, TrainRow


def floats(values: bytes) -> list[float]:
    return [float(x) for x in torch.frombuffer(bytearray(values), dtype=torch.float16)]


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_rank_s_differences_are_its_logprobs_at_the_step_s_start_less_the_engine_s(
    model_folder: Path, mesh: DeviceMesh, deterministic: bool
) -> None:
    """Of generated tokens alone, padded and packed; and where the proximal logprobs came before, of these."""
    learner = masks.learner_of(model_folder, mesh, deterministic=deterministic)
    rows = masks.rows(apart=False)
    width = max(row.tokens for row in rows) if deterministic else 0
    proximal = learner.proximal(Micro(rows, width))
    later = tuple(msgspec.structs.replace(row, proximal=proximal[row.sample_id]) for row in rows)
    for some in (rows, later):
        found = {one.sample_id: floats(one.difference) for one in learner.train(Micro(some, width))}
        learner.discard_gradients()
        for row in rows:
            trainer = torch.frombuffer(bytearray(proximal[row.sample_id]), dtype=torch.float64)
            engine = torch.frombuffer(bytearray(row.behaviour), dtype=torch.float32)
            wanted = (trainer - engine).tolist()
            assert found[row.sample_id] == pytest.approx(wanted, rel=1e-3, abs=1e-6)


def test_groups_are_chosen_by_the_seed_and_the_step_whatever_came_first() -> None:
    prompts = list(range(40))
    few = differences.first(3, 7, prompts, 4)
    assert differences.first(3, 7, reversed(prompts), 4) == few
    assert differences.first(3, 7, prompts, 20)[:4] == few
    assert differences.first(3, 8, prompts, 4) != few
    assert [differences.most(share, 40) for share in (0.0, 0.01, 0.1, 1.0)] == [0, 1, 4, 40]


@pytest.mark.parametrize(
    "algorithm",
    [{}, {"updates_per_step": 3}, {"name": "reinforce++"}, {"name": "dapo", "dynamic_sampling": False}],
)
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_a_step_tells_of_its_share_of_groups_in_any_order_of_arrival(
    model_folder: Path, mesh: DeviceMesh, algorithm: dict[str, Any], share: float
) -> None:
    config = make_config(model_folder, algorithm=algorithm, monitor={"token_differences": share})
    results = [play(config, mesh, RecordedRun(random.Random(seed)))[0] for seed in (1, 2)]
    one, other = ({apart.sample_id: apart.values for apart in result.differences} for result in results)
    assert one == other
    trained = {out.sample_id for out in results[0].outcomes if out.outcome == "consumed"}
    assert set(one) <= trained
    groups = {sample_id // 10 for sample_id in one}  # `RecordedRun` names them so
    assert {i for i in trained if i // 10 in groups} == set(one), "whole groups"
    most = differences.most(share, int(results[0].metrics["groups_asked"]))
    assert len(groups) <= most
    assert bool(groups) == bool(share)
    if share == 1.0:
        assert set(one) == trained
    assert results[0].metrics["tokens_compared"] == sum(len(values) // 2 for values in one.values())


def test_a_row_of_an_episode_tells_of_each_turn_that_it_trains_by_the_tokens_before_its_end() -> None:
    prompt, said = messages.pack_tokens([1, 2]), messages.pack_tokens([3, 4, 5, 6, 7, 8])
    mask = bytes([1, 1, 0, 1, 0, 1])
    row = TrainRow(5, prompt, said, bytes(16), 0.0, mask=mask, episode=9)
    values = torch.tensor([0.5, -1.0, 2.0, -0.25], dtype=torch.float16).numpy().tobytes()
    found = differences.of_row(row, values)
    assert [(one.sample_id, floats(one.values), one.mean) for one in found] == [
        (9, [0.5, -1.0], 0.75),
        (9, [2.0], 2.0),
        (9, [-0.25], 0.25),
    ]
    assert [one.turn for one in found] == [sha256(prompt + said[: 4 * n]).digest() for n in (2, 4, 6)]
    (whole,) = differences.of_row(msgspec.structs.replace(row, mask=b"", completion=said[:16]), values)
    assert whole.turn == sha256(prompt + said[:16]).digest()
    (plain,) = differences.of_row(TrainRow(5, prompt, said[:16], bytes(16), 0.0), values)
    assert (plain.sample_id, plain.turn, plain.mean) == (5, b"", 0.9375)


def test_a_difference_that_is_no_number_is_kept_and_is_in_no_mean() -> None:
    micro = Micro((TrainRow(1, b"", bytes(16), bytes(16), 0.0),), 0)
    found = torch.tensor([float("inf"), float("nan"), 1.0, -1e9])
    (values,) = differences.packed(micro, found)
    assert floats(values)[0] == differences.MOST
    assert floats(values)[3] == -differences.MOST
    mean = differences.mean(values)
    messages.decode_to_daemon(
        messages.encode(
            messages.Call(
                1,
                "r",
                1,
                messages.CommitStep(
                    1, 1, "train", (), {}, differences=(messages.TokenDifferences(1, values, mean),)
                ),
            )
        )
    )
    assert mean == pytest.approx((2 * differences.MOST + 1) / 3)


def test_whole_groups_are_told_of_as_far_as_a_message_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [
        [TrainRow(10 * group + i, b"", bytes(16), bytes(16), 0.0) for i in range(2)] for group in range(3)
    ]
    values = {row.sample_id: bytes(8) for group in groups for row in group}
    assert len(differences.reported(groups, values)) == 6
    monkeypatch.setattr(differences, "MAX_DIFFERENCES_BYTES", 39)
    assert [one.sample_id for one in differences.reported(groups, values)] == [0, 1, 10, 11]
    monkeypatch.setattr(differences, "MAX_CALL_SAMPLES", 3)
    assert [one.sample_id for one in differences.reported(groups, values)] == [0, 1]
