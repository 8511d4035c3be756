"""Router replay: engines tell which experts a token went to, and the trainer sends it to the same ones.

The reference engine and vLLM are asked on this CPU; models are made in place. What is not seen without GPUs: vLLM's experts there.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from rollout.engines.base import EngineHost
from scavenger.errors import ConfigError, EngineError
from scavenger.protocol import engine_options
from scavenger.sizing.shape import of_config

torch = pytest.importorskip("torch", reason="the engines need the [trainer] extra")
models = pytest.importorskip("tests.rollout.models")
kinds = pytest.importorskip("tests.rollout.kinds")
from rollout.engines import routing  # noqa: E402  needs torch, as all that follows
from rollout.engines.registry import builder  # noqa: E402
from rollout.engines.vllm import setup  # noqa: E402
from tests.rollout.test_engine_contract import GREEDY, RANDOM, finish, request  # noqa: E402
from tests.rollout.test_experts import QUIET, model_of, text_of, views_of  # noqa: E402
from trainer.model.replay import Replay  # noqa: E402

if TYPE_CHECKING:
    from scavenger.protocol.messages import EngineSpec

LAYERS, CHOSEN = 2, 2
WIDTH = LAYERS * CHOSEN


def spec_of(name: str, kind: str) -> EngineSpec:
    spec: EngineSpec = models.spec(text_of(kind), dtype="float32", name=name)
    return replace(spec, routing=WIDTH)


def chosen_by(model: Any, tokens: tuple[int, ...]) -> Any:
    """What transformers' own routers choose at each position: [positions, layers, k], ascending."""
    found: list[Any] = []
    hooks = [
        router.register_forward_hook(lambda _m, _i, output: found.append(output[2]))
        for router in routing.routers(model)
    ]
    model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1).sort(-1).values


def told(rows: bytes) -> Any:
    return (
        torch.frombuffer(bytearray(rows), dtype=torch.uint8).long().view(-1, LAYERS, CHOSEN).sort(-1).values
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("reference", "qwen3_moe"),
        pytest.param("vllm", "qwen3_moe", marks=QUIET),
        pytest.param("vllm", "gpt_oss", marks=[*QUIET, pytest.mark.long]),
    ],
)
def test_an_engine_tells_the_experts_that_transformers_chooses_also_of_a_sample_that_moved(
    name: str, kind: str
) -> None:
    model = model_of(kind)

    async def main() -> None:
        engine = await builder(name)(spec_of(name, kind), EngineHost("run"))
        try:
            await engine.load(1, views_of(model))
            asked = [request(i, GREEDY if i % 2 else RANDOM) for i in range(6)]
            asked.append(request(6, GREEDY, accepted=(5, 9, 2, 7)))
            made = await finish(engine, *asked)
            for one in asked:
                delta = made[one.handle]
                given = one.prompt + one.accepted
                exact = chosen_by(model, given + delta.token_ids)[len(given) - 1 : -1]
                assert len(delta.routing) == WIDTH * len(delta.token_ids)
                assert torch.equal(told(delta.routing), exact), f"request {one.handle}"
            assert len({made[i].routing for i in range(6)}) > 1
        finally:
            await engine.close()

    asyncio.run(main())


def test_without_the_key_no_engine_says_anything() -> None:
    async def main() -> None:
        engine = await builder("reference")(
            replace(spec_of("reference", "qwen3_moe"), routing=0), EngineHost()
        )
        await engine.load(1, views_of(model_of("qwen3_moe")))
        made = await finish(engine, request(0))
        assert made[0].routing == b""
        await engine.close()

    asyncio.run(main())


def test_an_engine_refuses_a_width_that_is_not_its_model_s() -> None:
    async def started() -> None:
        await builder("reference")(replace(spec_of("reference", "qwen3_moe"), routing=3), EngineHost())

    with pytest.raises(EngineError, match="3 bytes of expert routing"):
        asyncio.run(started())


@pytest.mark.parametrize(
    "options", [{"pipeline_parallel_size": 2}, {"speculative_config": {"method": "ngram"}}]
)
def test_vllm_is_not_started_where_it_would_not_tell(options: dict[str, Any], tmp_path: Any) -> None:
    spec = replace(spec_of("vllm", "qwen3_moe"), options=engine_options.encode(options))
    _, _, config = setup.checked_config(spec)
    with pytest.raises(EngineError, match="does not tell which experts"):
        setup.arguments(spec, EngineHost("run", 2), tmp_path, config, gpu=False)
    plain = spec_of("vllm", "qwen3_moe")
    with pytest.raises(EngineError, match=r"set engine\.eager"):
        setup.arguments(plain, EngineHost("run"), tmp_path, config, gpu=True)
    assert setup.arguments(replace(plain, eager=True), EngineHost("run"), tmp_path, config, gpu=True)[
        "enforce_eager"
    ]


# ---------------------------------------------------------------- the trainer's side


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_replayed_choices_are_the_recorded_ones_and_own_ones_change_nothing(kind: str) -> None:
    model = model_of(kind)
    tokens = (3, 1, 4, 1, 5, 9, 2, 6)
    plain = model(torch.tensor([tokens])).logits
    own = chosen_by(model, tokens)
    replay = Replay(model)
    assert replay.width == WIDTH == of_config(model.config.to_dict()).routing_nbytes
    at = torch.arange(2, 8)
    rows = torch.frombuffer(bytearray(b"".join(routing.pack(own[at], 4))), dtype=torch.uint8).view(6, WIDTH)
    replay.use(rows, at, len(tokens))
    assert torch.allclose(model(torch.tensor([tokens])).logits, plain, atol=1e-6)
    other = (own + 1) % 4  # the experts that were chosen nowhere among them
    moved = torch.frombuffer(bytearray(b"".join(routing.pack(other[at], 4))), dtype=torch.uint8)
    replay.use(moved.view(6, WIDTH), at, len(tokens))
    forced = chosen_by(model, tokens)
    assert torch.equal(forced[2:], other[2:].sort(-1).values)
    assert torch.equal(forced[:2, 0], own[:2, 0]), "positions that were not recorded choose by themselves"
    assert not torch.allclose(model(torch.tensor([tokens])).logits, plain, atol=1e-3)
    replay.off()
    assert torch.equal(model(torch.tensor([tokens])).logits, plain)


def test_scores_of_replayed_experts_have_gradients_of_the_router() -> None:
    model = model_of("qwen3_moe").requires_grad_(True)
    replay = Replay(model)
    tokens = (3, 1, 4, 1, 5)
    at = torch.arange(1, 5)
    rows = torch.zeros(4, WIDTH, dtype=torch.uint8)
    rows[:, 1::2] = 3  # experts 0 and 3
    replay.use(rows, at, len(tokens))
    model(torch.tensor([tokens])).logits[0, 1:].square().sum().backward()
    for router in routing.routers(model):
        one: Any = router
        assert float(one.weight.grad.abs().sum()) > 0


def test_rows_of_another_model_are_refused() -> None:
    replay = Replay(model_of("qwen3_moe"))
    at = torch.arange(2)
    with pytest.raises(EngineError, match="came with no routing"):
        replay.use(None, at, 4)
    with pytest.raises(EngineError, match="bytes a token are due"):
        replay.use(torch.zeros(2, WIDTH + 1, dtype=torch.uint8), at, 4)
    with pytest.raises(EngineError, match="names expert 9, the model has 4"):
        replay.use(torch.full((2, WIDTH), 9, dtype=torch.uint8), at, 4)
    with pytest.raises(ConfigError, match="has no experts"):
        Replay(models.plain_model(models.config_text()))


def test_many_experts_take_two_bytes_each() -> None:
    chosen = torch.tensor([[[1, 300]]])
    assert routing.pack(chosen, 512) == [b"\x01\x00\x2c\x01"]
    assert routing.pack(chosen.clamp(max=9), 256) == [b"\x01\x09"]
