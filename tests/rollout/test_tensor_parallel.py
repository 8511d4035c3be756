"""An engine over several GPUs: from the job's GPUs to vLLM's tensor-parallel ranks, and what each rank then holds.

The ranks are vLLM's own, on this CPU: two processes that exchange through shared memory or gloo instead of NCCL. Nothing is mocked; what
is not seen without GPUs is NCCL, CUDA graphs and memory shares.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from rollout.engines.base import EngineHost
from scavenger.errors import EngineError
from scavenger.sizing import engine as engine_sizes
from scavenger.sizing.shape import of_config

torch = pytest.importorskip("torch", reason="the engines need the [trainer] extra")
pytest.importorskip("peft", reason="the adapters need the [lora] extra")
models = pytest.importorskip("tests.rollout.models")
kinds = pytest.importorskip("tests.rollout.kinds")
from rollout.engines.vllm import setup  # noqa: E402  needs torch, as all that follows
from tests.rollout.test_engine_adapters import Trained  # noqa: E402
from tests.rollout.test_engine_contract import GREEDY, finish, request  # noqa: E402

if TYPE_CHECKING:
    from tests.rollout.kinds import Kind
else:
    Kind = kinds.Kind


@pytest.mark.parametrize("gpus", [1, 4])
@pytest.mark.parametrize("gpu", [True, False])
def test_all_of_the_job_s_gpus_are_one_engine_s_ranks(gpus: int, gpu: bool, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        program = importlib.import_module(
            "rollout.__main__"
        )  # sets a handler for SIGTERM that is not for this process
    finally:
        signal.signal(signal.SIGTERM, before)
    argv = ["--state-dir", "/s", "--key", "/k", "--kind", "harvested", "--run", "run"]
    me = program.identity(
        program._arguments(argv), {"SCAVENGER_GPUS": str(gpus)}
    )  # as the job script counts its devices
    spec = models.spec(name="vllm", dtype="float32")
    _, _, config = setup.checked_config(spec)
    chosen = setup.arguments(spec, EngineHost(me.run, me.gpus), tmp_path, config, gpu)
    assert chosen["tensor_parallel_size"] == gpus
    assert chosen.get("distributed_executor_backend") == (None if gpu else "uni" if gpus == 1 else "mp")


class Wide(kinds.Vllm):  # type: ignore[misc, name-defined]  # of a module that is imported only where torch is: Any
    """vLLM pads a vocabulary to 64 rows and cuts that: of fewer tokens the second rank would hold padding alone, which no version names."""

    def text(self, model_type: str = "qwen3", **changes: Any) -> str:
        found: str = super().text(model_type, **{"vocab_size": 100} | changes)
        return found


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(900)
def test_two_ranks_hold_their_slices_and_answer_as_one_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout.engines.vllm import engine as vllm

    kind: Any = Wide()
    trained = Trained(kind)
    padded = of_config(json.loads(kind.text()) | {"vocab_size": 128})

    async def answers(gpus: int) -> list[Any]:
        engine = await vllm.build(kind.spec(), EngineHost("run", gpus))
        said: list[Any] = []
        verify = engine._verify
        monkeypatch.setattr(
            engine, "_verify", lambda version, told: (said.append(told), verify(version, told))
        )
        made = []
        try:
            for seed in (0, 1, 2):
                if seed:
                    trained.step(seed)
                await engine.load(seed + 1, trained.merged_by_engine() if seed else kind.views)
                found = await finish(engine, *(request(i, GREEDY) for i in range(4)))
                made.append({handle: delta.token_ids for handle, delta in found.items()})
            assert [len(told) for told in said] == [gpus] * 3, "each rank was asked what it holds"
            if gpus == 2:
                whole = sum(view.nbytes for view in kind.views)
                base, adapters = [[one.read_nbytes / whole for one in told] for told in (said[0], said[1])]
                assert max(base) < 0.55
                assert sum(base) == pytest.approx(1.0, abs=0.03), "both have the norms"
                assert max(adapters) < 0.6, "of base and adapters, each merges what it keeps"
                fused = "model.layers.0.self_attn.qkv_proj.weight"
                assert said[0][0].held[fused] != said[0][1].held[fused], "the ranks hold different slices"
                swapped = [said[0][0], said[0][1]._replace(held=said[0][0].held)]
                with pytest.raises(EngineError, match="does not sit in the engine as published"):
                    verify(9, swapped)
            assert engine.info().gpus == gpus
            taken = await engine._llm.collective_rpc("scavenger_bytes_taken")
            assert len(taken) == gpus
            said_nbytes = engine_sizes.weight_nbytes(padded, gpus, 4)
            assert all(one["weights"] == pytest.approx(said_nbytes, rel=0.1) for one in taken), (
                taken,
                said_nbytes,
            )
        finally:
            await engine.close()
        return made

    one, two = asyncio.run(answers(1)), asyncio.run(answers(2))
    assert one == two
    assert one[0] != one[1] != one[2]


class OneHead(Wide):
    """One key-value head, which both ranks hold."""

    def text(self, model_type: str = "qwen3", **changes: Any) -> str:
        found: str = super().text(model_type, **{"num_key_value_heads": 1} | changes)
        return found


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", ["", '{"pipeline_parallel_size": 2}'], ids=["head", "stages"])
def test_a_head_that_both_ranks_hold_and_stages_are_loaded_and_verified(options: str) -> None:
    """vLLM generates nothing over stages on a CPU: there only loads are compared."""
    from rollout.engines.vllm import engine as vllm

    kind: Any = OneHead()
    trained = Trained(kind)
    spec = msgspec.structs.replace(kind.spec(), options=options)

    async def answers(gpus: int) -> list[Any]:
        engine = await vllm.build(spec if gpus > 1 else kind.spec(), EngineHost("run", gpus))
        made = []
        try:
            for version in (1, 2):
                if version == 2:
                    trained.step(1)
                views = trained.merged_by_engine() if version == 2 else kind.views
                digest = await engine.load(version, views, summed=True)
                assert version == 1 or digest == trained.digest()
                if not options:
                    found = await finish(engine, *(request(i, GREEDY) for i in range(4)))
                    made.append({handle: delta.token_ids for handle, delta in found.items()})
        finally:
            await engine.close()
        return made

    assert (asyncio.run(answers(1)) if not options else []) == asyncio.run(answers(2))
