"""A worker process that changes to a run of another model: nothing of the first engine lies beside the second."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout import processes, worker
from rollout.engines.base import Engine, EngineHost
from rollout.engines.registry import builder
from scavenger.protocol import messages
from scavenger.protocol.messages import EngineSpec, Lease, SampleKey, Sampling, pack_tokens
from scavenger.protocol.worker.events import EXIT_DRAINED, EXIT_ENGINE_FAILED
from scavenger.weights import manifest as manifests
from tests.rollout.stage import Scripted
from tests.rollout.test_worker_hands import BEAT_S, Scene

torch = pytest.importorskip("torch", reason="the engines need the [trainer] extra")
models = pytest.importorskip("tests.rollout.models")

#: No other tensor has a side of so many entries by chance.
WIDE = 40
FIRST = models.config_text(hidden_size=WIDE, num_hidden_layers=3)
SECOND = models.config_text("llama", vocab_size=37, num_key_value_heads=4)
PROMPT = (3, 14, 15, 9, 26, 5)
LENGTH = 12


def greedy(model: Any) -> list[int]:
    """What the model says after the prompt: transformers' own forward passes, without a cache."""
    tokens = list(PROMPT)
    for _ in range(LENGTH):
        with torch.inference_mode():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def wide_tensors() -> list[tuple[int, ...]]:
    """Shapes of all tensors in this process that only the first model has. What is garbage counts: its memory is not free."""
    found = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    return [tuple(one.shape) for one in found if WIDE in one.shape]


class Models(Scene):
    """Runs with a real engine each. `beside`: of each build, which of the engines before were still there, and their tensors."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.made: list[weakref.ref[Engine]] = []
        self.beside: list[tuple[list[Engine], list[tuple[int, ...]]]] = []

    async def build(self, spec: EngineSpec, host: EngineHost) -> Any:
        tensors = wide_tensors()
        self.beside.append(([one for ref in self.made if (one := ref()) is not None], tensors))
        engine = await builder("reference")(spec, host)
        self.made.append(weakref.ref(engine))
        return engine

    async def generated(self, run: str, worker_id: int, text: str, seed: int) -> tuple[list[int], list[int]]:
        """What the engine generates for a run of this model, and what transformers does."""
        hello = await self.daemon.expect(messages.WorkerHello)
        assert (hello.run, hello.held, hello.loaded_version) == (run, (), -1)
        spec = models.spec(text, max_batch=2 + worker_id)
        self.daemon.send(messages.Welcome(worker_id, 1, run, spec, BEAT_S, 20.0, 2, relay=True))
        model = models.plain_model(text, seed)
        due = greedy(model.to(torch.float64))
        manifest, blob = models.weights(models.plain_model(text, seed), version=worker_id)
        source = self.source.publish(manifest, blob)
        self.daemon.send(messages.UseWeights(worker_id, manifests.encode(manifest), (source,)))
        await self.daemon.expect(messages.WeightsLoaded)
        key, sampling = SampleKey("train", 0, 1, 0), Sampling(LENGTH, temperature=0.0)
        self.daemon.send(
            messages.Assign((Lease(1, 1, worker_id, pack_tokens(PROMPT), b"", sampling, 0, key),))
        )
        return await self.daemon.tokens(1, LENGTH), due


def played(path: Path, scene: Callable[[Any], Awaitable[None]], stage: type[Scene] = Models) -> None:
    async def main() -> None:
        one = stage(path)
        try:
            await scene(one)
        finally:
            one.close()

    asyncio.run(main())


def test_a_run_of_another_model_gets_its_own_tokens_and_nothing_of_the_first_is_left(tmp_path: Path) -> None:
    async def scene(stage: Models) -> None:
        found, due = await stage.generated("run", 1, FIRST, 1)
        assert found == due
        assert wide_tensors(), "the search finds nothing at all"
        await stage.change()
        stage.daemon.send(messages.GoodbyeAck())
        first = weakref.ref(stage.workers[0])
        stage.workers.clear()
        found, due = await stage.generated("theirs", 2, SECOND, 2)
        assert found == due
        assert stage.beside[1] == ([], []), "the first engine lay beside the second"
        gc.collect()
        assert first() is None
        assert wide_tensors() == []
        stage.daemon.send(messages.Drain("surplus"))
        await stage.daemon.expect(messages.Goodbye)
        stage.daemon.send(messages.GoodbyeAck())
        end = await stage.process
        assert (end.code, end.hands_to) == (EXIT_DRAINED, "")

    played(tmp_path, scene)


# ---------------------------------------------------------------- processes of an engine


@contextmanager
def holds(device: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process below this one that has the device open."""
    script = "import sys; f = open(sys.argv[1]); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script, str(device)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            yield child
        finally:
            child.kill()


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "gpu0"
    path.touch()
    monkeypatch.setattr(processes, "DEVICES", (str(path),))
    return path


def test_a_process_that_holds_a_gpu_is_found_and_waited_for(device: Path) -> None:
    async def main(child: subprocess.Popen[bytes]) -> None:
        assert child.pid in processes.below(os.getpid())
        assert processes.with_gpus(processes.below(os.getpid())) == [child.pid]
        with processes.watched([child.pid]) as held:
            assert not await processes.gone(held, 0.01)
            child.kill()
            assert await processes.gone(held, 60.0)
            assert processes.with_gpus([child.pid]) == []

    with holds(device) as child:
        asyncio.run(main(child))


def test_one_that_has_ended_does_not_keep_the_loop_busy_while_another_is_waited_for(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, ended = list[int](), processes._ended

    def counted(pidfd: int, event: asyncio.Event) -> None:
        heard.append(pidfd)
        ended(pidfd, event)

    async def main(first: subprocess.Popen[bytes], other: subprocess.Popen[bytes]) -> None:
        with processes.watched([first.pid, other.pid]) as held:
            waiting = asyncio.create_task(processes.gone(held, 60.0))
            first.kill()
            for _ in range(1000):  # passes of the loop behind the first one's end
                await asyncio.sleep(0 if heard else 0.01)
            assert heard == held[:1]
            other.kill()
            assert await waiting
            assert heard == held

    monkeypatch.setattr(processes, "_ended", counted)
    with holds(device) as first, holds(device) as other:
        asyncio.run(main(first, other))


@pytest.mark.parametrize("ends", [True, False])
def test_no_engine_is_built_beside_one_whose_processes_hold_the_gpu(
    tmp_path: Path, device: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    with holds(device) as child:

        async def close(self: Scripted) -> None:
            self.calls.append("close")
            if ends:
                child.kill()

        monkeypatch.setattr(Scripted, "close", close)
        monkeypatch.setattr(worker, "GPU_FREE_S", 60.0 if ends else 0.01)

        async def scene(stage: Scene) -> None:
            await stage.serve("run", 1, 3)
            await stage.change()
            stage.daemon.send(messages.GoodbyeAck())
            other = models.spec(FIRST)
            if ends:
                await stage.serve("theirs", 2, 1, other)
                assert child.poll() is not None
                return
            hello = await stage.daemon.expect(messages.WorkerHello)
            assert hello.run == "theirs"
            stage.daemon.send(messages.Welcome(2, 1, "theirs", other, BEAT_S, 20.0, 8, relay=True))
            end = await stage.process
            assert end.code == EXIT_ENGINE_FAILED
            assert "hold a GPU" in end.reason
            assert len(stage.engines) == 1

        played(tmp_path, scene, Scene)
