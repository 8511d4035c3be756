"""Real engines against the real trainer: one with a flipped bit, or one that is too warm, is found; none of the others ever is.

Engines compute in bfloat16 and the trainer in float32, so that healthy ones differ from it as they do on GPUs. The bit is flipped after the
load, where no checksum looks any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh

from rollout.engines import decoder
from rollout.engines import sampling as sampling_module
from rollout.engines.decoder import Decoder
from scavenger.config import AlgorithmSection, OptimizerSection
from scavenger.policy.agreement import DEFAULT_RULES, AgreementSpan, SpanWindow, SuspectWorker
from scavenger.protocol import messages
from scavenger.protocol.messages import EngineSpec, SampleKey, Sampling
from scavenger.protocol.worker.events import Request
from scavenger.weights import manifest as manifests
from trainer.algorithms import agreement
from trainer.algorithms.rows import resolve
from trainer.data.batching import Micro, TrainRow
from trainer.model.learner import Learner

ENGINES, TOKENS = 5, 24
RANDOM = Sampling(TOKENS)


@pytest.fixture(scope="module")
def sharp_model(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """The small model with its weights scaled up, so that its distribution is far from uniform."""
    folder = tmp_path_factory.mktemp("sharp")
    for path in model_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    scaled = {
        name: value * (4.0 if "embed" in name else 6.0) if value.dim() == 2 else value
        for name, value in tensors.items()
    }
    save_file(scaled, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def learner(sharp_model: Path, mesh: DeviceMesh) -> Learner:
    return Learner(
        sharp_model,
        mesh,
        recipe=resolve(AlgorithmSection(), TOKENS),
        optimizer=OptimizerSection(),
        temperature=1.0,
        deterministic=False,
    )


def engine(folder: Path) -> Decoder:
    """One that has loaded the model as it would be published, in bfloat16."""
    text = (folder / "config.json").read_text()
    tensors = {}
    for name, value in load_file(folder / "model.safetensors").items():
        data = value.to(torch.bfloat16).contiguous()
        tensors[name] = ("bfloat16", tuple(data.shape), memoryview(data.view(torch.uint8).numpy().tobytes()))
    manifest, blob = manifests.build(1, tensors)
    made = Decoder(EngineSpec("reference", text, "bfloat16", 16, 64))
    made.load(manifests.views(manifest, blob))
    return made


def flip(made: Decoder, name: str, at: tuple[int, int], bit: int) -> None:
    """Flip a bit of one weight: 14 to 7 are bfloat16's exponent, 6 to 0 its fraction."""
    weight = dict(made._model.named_parameters())[name]
    with torch.inference_mode():
        weight.view(torch.int16)[at] ^= 1 << bit


def samples(made: Decoder, first: int, count: int) -> Iterator[TrainRow]:
    """What an engine completes `count` prompts with."""
    rows: dict[int, tuple[list[int], list[float]]] = {i: ([], []) for i in range(first, first + count)}
    prompts = {i: tuple(1 + (i * 7 + k) % 10 for k in range(3 + i % 5)) for i in rows}
    joining = [Request(i, prompts[i], (), TOKENS, RANDOM, 7, SampleKey("train", 1, i, 0)) for i in rows]
    open_ones = set(rows)
    while open_ones:
        for delta in made.step(joining, ()):
            assert delta.error is None, delta.error
            rows[delta.handle][0].extend(delta.token_ids)
            rows[delta.handle][1].extend(delta.logprobs)
            if delta.finish:
                open_ones.discard(delta.handle)
        joining = []
    for i, (tokens, logprobs) in rows.items():
        packed = messages.pack_tokens(tokens)
        yield TrainRow(
            i,
            messages.pack_tokens(prompts[i]),
            packed,
            messages.pack_logprobs(logprobs),
            0.0,
            cuts=(len(tokens),),
        )


def spans(learner: Learner, worker: int, rows: list[TrainRow]) -> list[AgreementSpan]:
    proximal = learner.proximal(Micro(tuple(rows), max(row.tokens for row in rows)))
    done = [msgspec.structs.replace(row, proximal=proximal[row.sample_id]) for row in rows]
    return [AgreementSpan(row.sample_id, worker, *agreement.of_row(row)[0]) for row in done]


def play(
    learner: Learner, folder: Path, spoil: Callable[[Decoder], None], most: int = 96
) -> tuple[list[SuspectWorker], int]:
    """The first verdicts, and how many samples of each engine had been trained; engine 0 is spoilt."""
    engines, window = [engine(folder) for _ in range(ENGINES)], SpanWindow(DEFAULT_RULES)
    spoil(engines[0])
    for first in range(0, most, 8):
        found = []
        for worker, made in enumerate(engines):
            found += spans(learner, worker, list(samples(made, 10_000 * worker + first, 8)))
        window.add(1, found)
        if verdicts := window.judge():
            return verdicts, first + 8
    return [], most


def test_engines_that_compute_in_bfloat16_are_all_healthy(learner: Learner, sharp_model: Path) -> None:
    assert play(learner, sharp_model, lambda made: None) == ([], 96)


def grown(made: Decoder, name: str) -> None:
    """Flip one bit of an exponent: the first weight of some size becomes sixteen times as large."""
    weight = dict(made._model.named_parameters())[name]
    at = next(
        (row, column)
        for row, values in enumerate(weight.tolist())
        for column, value in enumerate(values)
        if 0.0625 <= abs(value) < 0.125
    )
    before = float(weight[at])
    flip(made, name, at, 9)
    assert float(weight[at]) == 16 * before


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.self_attn.o_proj.weight",
        "model.embed_tokens.weight",
    ],
)
def test_one_flipped_bit_of_one_weight_is_found(learner: Learner, sharp_model: Path, name: str) -> None:
    verdicts, trained = play(learner, sharp_model, lambda made: grown(made, name))
    assert [one.worker_id for one in verdicts] == [0]
    assert trained <= 48, trained


def test_a_temperature_of_1_2_in_place_of_1_is_found(
    learner: Learner, sharp_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It draws from another distribution than the trainer's, and says so by the logprobs that it records."""
    draw, spoilt = sampling_module.draw, []

    def spoil(made: Decoder) -> None:
        step = made.step

        def warm(*args: object) -> object:
            with monkeypatch.context() as patch:
                patch.setattr(decoder, "draw", too_warm)
                return step(*args)  # type: ignore[arg-type]

        spoilt.append(made)
        made.step = warm  # type: ignore[method-assign, assignment]

    def too_warm(logits: torch.Tensor, sampling: list[Sampling], *more: object) -> object:
        return draw(logits, [msgspec.structs.replace(one, temperature=1.2) for one in sampling], *more)  # type: ignore[arg-type]

    verdicts, trained = play(learner, sharp_model, spoil)
    assert [one.worker_id for one in verdicts] == [0]
    assert trained <= 48, trained
