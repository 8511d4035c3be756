"""The vLLM engine beyond the contract: seeds, life and death of its core, and the worker as the process that it is, with a real daemon."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import psutil
import pytest
from msgspec.structs import replace

from rollout.engines.base import Engine
from scavenger.client import Client
from scavenger.config import RunConfig
from scavenger.errors import EngineError
from scavenger.protocol import keys, messages
from scavenger.protocol.messages import (
    GroupSpec,
    Lease,
    SampleKey,
    Sampling,
    pack_tokens,
    unpack_logprobs,
    unpack_tokens,
)
from scavenger.protocol.worker.events import EXIT_ENGINE_FAILED, EXIT_PREEMPTED, Request
from scavenger.weights import manifest as manifests
from scavenger.weights.source import WeightServer
from tests.rollout.daemon import FakeDaemon
from tests.router.edge import LiveDaemon

torch = pytest.importorskip("torch", reason="the engines need the [trainer] extra")
models = pytest.importorskip("tests.rollout.models")
kinds = pytest.importorskip("tests.rollout.kinds")
from tests.rollout.test_engine_contract import finish, loaded, request  # noqa: E402  needs torch

if TYPE_CHECKING:
    from rollout.engines.vllm.setup import CPU_BLOCK
    from tests.rollout.kinds import Kind
else:
    CPU_BLOCK = pytest.importorskip("rollout.engines.vllm.setup").CPU_BLOCK
    Kind = kinds.Kind
PATIENCE_S = 300.0  # for an engine to start on a busy machine
M = TypeVar("M", bound=messages.Message)
ROOT = Path(__file__).resolve().parents[2]


def sibling(index: int, accepted: tuple[int, ...] = (), most: int = 24) -> Request:
    how = Sampling(most)
    return Request(index, (3, 1, 2), accepted, most - len(accepted), how, 11, SampleKey("train", 3, 0, index))


def forward(model: Any, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> Any:
    """Log-probabilities `[len(tokens), vocab]` of a plain transformers pass."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double()
    return torch.log_softmax(logits, -1)


# ---------------------------------------------------------------- sampling


@kinds.VLLM_ONLY
def test_siblings_differ_whichever_engine_serves_them(kind: Kind) -> None:
    async def main() -> None:
        engines = [await loaded(kind) for _ in range(2)]
        made = [(await finish(engines[i % 2], sibling(i)))[i].token_ids for i in range(8)]
        assert len(set(made)) == 8
        for engine in engines:
            await engine.close()

    kind.run(main())


@kinds.VLLM_ONLY_LONG
def test_siblings_on_8_fresh_engines_differ(kind: Kind) -> None:
    from rollout.engines.base import EngineHost
    from rollout.engines.vllm import engine as vllm

    async def main() -> None:
        made = []
        for i in range(8):  # one after another: each is another process, none knows of the others
            engine = await vllm.build(kind.spec(), EngineHost("run"))
            await engine.load(1, kind.views)
            made.append((await finish(engine, sibling(i)))[i].token_ids)
            await engine.close()
        assert len(set(made)) == 8

    kind.run(main())


@kinds.VLLM_ONLY
def test_a_move_draws_anew_and_its_logprobs_are_the_model_s_before_and_after_it_and_a_swap(
    kind: Kind,
) -> None:
    fresh = models.plain_model(kind.text(), seed=5)

    async def main() -> None:
        engine, other = await loaded(kind), await loaded(kind)
        whole = (await finish(engine, sibling(1)))[1]
        head = whole.token_ids[:7]
        moved = (await finish(other, sibling(1, head)))[1]
        assert moved.token_ids != whole.token_ids[7:], (
            "the generator started over, or went on as if nothing had happened"
        )
        assert moved.token_ids[:7] != head, (
            "the moved sample repeats the numbers that its first tokens were drawn from"
        )
        _agree(kind.model, head + moved.token_ids, whole.logprobs[:7] + moved.logprobs)
        await other.load(2, models.views(fresh))
        swapped = (await finish(other, sibling(1, head)))[1]
        _agree(fresh, head + swapped.token_ids, swapped.logprobs, start=7)
        await engine.close()
        await other.close()

    kind.run(main())


def _agree(model: Any, tokens: tuple[int, ...], logprobs: tuple[float, ...], start: int = 0) -> None:
    exact = forward(model, (3, 1, 2), tokens).gather(1, torch.tensor(tokens)[:, None])[start:, 0]
    assert max(abs(a - b) for a, b in zip(exact.tolist(), logprobs, strict=True)) <= 1e-4


@kinds.VLLM_ONLY
def test_prompts_that_are_together_longer_than_a_pass_are_computed_in_parts(kind: Kind) -> None:
    """vLLM's CPU engine ended: it takes the draw of a part back from a generator that cannot."""
    prompts = [tuple(1 + (7 * n + i) % 20 for i in range(30)) for n in range(3)]

    async def main() -> None:
        parts = replace(kind.spec(), options='{"max_num_batched_tokens": 32}')
        engine = await loaded(kind, parts)
        made = await finish(engine, *(request(n, Sampling(8), prompt=p) for n, p in enumerate(prompts)))
        for n, prompt in enumerate(prompts):
            exact = forward(kind.model, prompt, made[n].token_ids)
            chosen = exact.gather(1, torch.tensor(made[n].token_ids)[:, None])[:, 0].tolist()
            assert made[n].logprobs == pytest.approx(chosen, abs=1e-4)
        await engine.close()

    kind.run(main())


@kinds.VLLM_ONLY
def test_no_stop_token_is_drawn_before_min_tokens_of_the_whole_sample(kind: Kind) -> None:
    async def main() -> None:
        engine = await loaded(kind)
        stops = tuple(range(15))  # half of the vocabulary: a free sample ends at once
        how = Sampling(24, stop_token_ids=stops, min_tokens=12)
        made = await finish(
            engine, *(request(i, how) for i in range(6)), request(7, how, accepted=(20,) * 10)
        )
        for delta in (made[i] for i in range(6)):
            assert not set(delta.token_ids[:11]) & set(stops)
            assert delta.finish == "stop"
        assert not set(made[7].token_ids[:1]) & set(stops)
        assert len(made[7].token_ids) < 14
        await engine.close()

    kind.run(main())


@kinds.VLLM_ONLY
def test_what_a_cache_kept_over_new_weights_is_used_by_samples_begun_before_them_alone(kind: Kind) -> None:
    """`algorithm.kv = "keep"`: entries of old weights serve who goes on; an evaluation is of its version alone."""
    fresh = models.plain_model(kind.text(), seed=5)
    prompt = tuple(1 + i % 20 for i in range(2 * CPU_BLOCK))

    async def main() -> None:
        engine = await loaded(kind, msgspec.structs.replace(kind.spec(), keep_cache=True))
        vllm, cached = engine._engine.bare, {}  # type: ignore[attr-defined]  # below what finds stop texts
        generate = vllm._llm.generate

        async def watched(*args: Any, **how: Any) -> AsyncIterator[Any]:
            async for output in generate(*args, **how):
                cached[output.request_id] = output.num_cached_tokens
                yield output

        async def of(
            handle: int, begun: int, accepted: tuple[int, ...] = (), history: str = "h"
        ) -> tuple[int, Any]:
            asked = Request(
                handle,
                prompt,
                accepted,
                8,
                Sampling(8 + len(accepted)),
                11,
                SampleKey("train", 3, 0, 0),
                begun,
                history,
            )
            made = (await finish(engine, asked))[handle]
            before = accepted + made.token_ids
            gap = forward(fresh, prompt, before)[len(accepted) :].gather(1, torch.tensor([made.token_ids]).T)
            return cached[str(vllm._serial)], (gap[:, 0] - torch.tensor(made.raw_logprobs)).abs().max()

        vllm._llm.generate = watched
        try:
            await of(1, 1)
            await engine.load(2, models.views(fresh))
            assert [(await of(n, begun))[0] for n, begun in ((2, 2), (3, -1))] == [0, 0], "begun now"
            found, gap = await of(4, 1, (3, 1, 2))
            assert found >= CPU_BLOCK
            assert gap > 0.01, (
                "its logprobs are those that it was sampled by: of old entries under new weights"
            )
            found, _ = await of(6, 1, (3, 1, 2), history="another")
            assert found == 0, "version 1 of another history of the ledger is another one"
            found, gap = await of(5, -1, (3, 1, 2))
            assert gap < kind.close_logprobs, "whose entries are of the new weights"
        finally:
            del vllm._llm.generate
            await engine.close()

    kind.run(main())


@kinds.VLLM_ONLY
def test_it_says_how_many_tokens_its_cache_holds(kind: Kind) -> None:
    async def main() -> None:
        engine = await loaded(kind)
        info = engine.info()
        assert (info.max_batch, info.context_length, info.vocab_size) == (16, 128, 29)
        assert 16 * 128 <= info.cache_tokens <= 17 * 128
        await engine.close()

    kind.run(main())


# ---------------------------------------------------------------- life and death


@kinds.VLLM_ONLY
@pytest.mark.parametrize("busy", [True, False])
def test_the_death_of_the_core_is_noticed_at_once(kind: Kind, busy: bool) -> None:
    async def main() -> None:
        engine = await loaded(kind)
        waiting = asyncio.create_task(_until_it_dies(engine, busy))
        await asyncio.sleep(0)
        (core,) = engine._engine.bare._core.pids.values()  # type: ignore[attr-defined]
        began = time.monotonic()
        os.kill(core, signal.SIGKILL)
        with pytest.raises(EngineError, match=rf"core \(process {core}\) ended by itself"):
            await waiting
        assert time.monotonic() - began < 2.0
        with pytest.raises(EngineError):
            await engine.load(2, kind.views)
        await engine.close()

    kind.run(main())


async def _until_it_dies(engine: Engine, busy: bool) -> None:
    if busy:
        await engine.add(request(1, Sampling(100)))
    while True:
        await engine.next()


def core_of(worker: int) -> psutil.Process:
    (core,) = [
        c for c in psutil.Process(worker).children(recursive=True) if "EngineCore" in " ".join(c.cmdline())
    ]
    return core


def eventually(what: str, condition: Callable[[], object], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.02)  # between two looks at the condition


def command(state_dir: Path, key: Path) -> tuple[list[str], dict[str, str]]:
    argv = [sys.executable, "-m", "rollout", "--state-dir", str(state_dir), "--key", str(key)]
    argv += ["--kind", "harvested", "--run", "r", "--engine", "vllm"]
    return argv, {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SCAVENGER_GPUS": "1"}


@asynccontextmanager
async def worker_process(state_dir: Path, pair: keys.KeyPair) -> AsyncIterator[asyncio.subprocess.Process]:
    key = state_dir / "worker.key"
    keys.write_keypair(key, pair)
    argv, environment = command(state_dir, key)
    with open(state_dir / "worker.log", "ab") as log:
        started = await asyncio.create_subprocess_exec(*argv, env=environment, stderr=log, stdout=log)
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


SERVER, ME = keys.generate(), keys.generate()


async def hear(daemon: FakeDaemon, worker: asyncio.subprocess.Process, kind: type[M]) -> M:
    """The next message of a kind; fails with the worker's log as soon as the worker is gone."""
    message, gone = asyncio.create_task(daemon.expect(kind, PATIENCE_S)), asyncio.create_task(worker.wait())
    await asyncio.wait((message, gone), return_when=asyncio.FIRST_COMPLETED)
    gone.cancel()
    assert message.done(), f"the worker ended with {worker.returncode}"
    return message.result()


def _lease(sample: int, version: int, how: Sampling) -> messages.Assign:
    return messages.Assign(
        (Lease(sample, 1, version, pack_tokens((3, 1, 2)), b"", how, 11, SampleKey("train", 3, 0, sample)),)
    )


def _greedy(model: Any, tokens: list[int]) -> bool:
    return forward(model, (3, 1, 2), tuple(tokens)).argmax(-1).tolist() == tokens


@kinds.VLLM_ONLY
def test_the_worker_refuses_a_bad_version_swaps_weights_mid_flight_and_leaves_in_time(
    kind: Kind, tmp_path: Path
) -> None:
    fresh = models.plain_model(kind.text(), seed=5)
    wrong = models.plain_model(kind.text(vocab_size=31))

    async def main() -> None:
        with FakeDaemon(tmp_path, SERVER, {ME.public}) as daemon, WeightServer(keep=4) as source:

            def use(version: int, model: Any) -> None:
                manifest, blob = models.weights(model, version)
                daemon.send(
                    messages.UseWeights(
                        version, manifests.encode(manifest), (source.publish(manifest, blob),)
                    )
                )

            async with worker_process(tmp_path, ME) as worker:
                await hear(daemon, worker, messages.WorkerHello)
                daemon.send(messages.Welcome(1, 1, "r", kind.spec(context=500, pace=100.0), 0.5, 20.0, 8))
                use(1, wrong)
                failed = await hear(daemon, worker, messages.WeightsFailed)
                assert (failed.version, "not (29, 32)" in failed.reason) == (1, True)
                use(2, kind.model)
                assert (await hear(daemon, worker, messages.WeightsLoaded)).version == 2
                daemon.send(_lease(1, 2, Sampling(400, temperature=0.0)))
                old = await daemon.tokens(1, 20, PATIENCE_S)
                use(3, fresh)
                assert (await hear(daemon, worker, messages.WeightsLoaded)).version == 3
                daemon.inbox.clear()
                daemon.send(_lease(2, 3, Sampling(24, temperature=0.0)))
                new = await daemon.tokens(2, 24, PATIENCE_S)
                assert _greedy(kind.model, old[:20])
                assert _greedy(fresh, new)
                assert not _greedy(kind.model, new)
                daemon.send(_lease(3, 3, Sampling(400)))
                await daemon.tokens(3, 10, PATIENCE_S)
                core = core_of(worker.pid)
                began = time.monotonic()
                os.kill(core.pid, signal.SIGTERM)  # as Slurm does, to every process of the step
                worker.send_signal(signal.SIGTERM)
                goodbye = await daemon.expect(messages.Goodbye)
                assert (goodbye.notice, goodbye.failed) == (True, False)
                assert await worker.wait() == EXIT_PREEMPTED
                assert time.monotonic() - began < 2.0
                eventually("the core to go with its worker", lambda: not core.is_running(), 5.0)

    asyncio.run(main())


@kinds.VLLM_ONLY_LONG
def test_a_worker_that_is_killed_takes_its_core_along(kind: Kind, tmp_path: Path) -> None:
    async def main() -> None:
        with FakeDaemon(tmp_path, SERVER, {ME.public}) as daemon, WeightServer() as source:
            async with worker_process(tmp_path, ME) as worker:
                await hear(daemon, worker, messages.WorkerHello)
                daemon.send(messages.Welcome(1, 1, "r", kind.spec(), 0.5, 20.0, 8))
                manifest, blob = models.weights(kind.model)
                daemon.send(
                    messages.UseWeights(1, manifests.encode(manifest), (source.publish(manifest, blob),))
                )
                await hear(daemon, worker, messages.WeightsLoaded)
                core = core_of(worker.pid)
                worker.kill()
                await worker.wait()
                eventually("the core to go with its worker", lambda: not core.is_running(), 5.0)

    asyncio.run(main())


# ---------------------------------------------------------------- with a real daemon


@contextmanager
def a_run(daemon: LiveDaemon, spec: messages.EngineSpec) -> Iterator[Any]:
    config = RunConfig.model_validate(
        {
            "run": {
                "name": "r",
                "seed": 11,
                "steps": 3,
                "state_dir": daemon.state_dir,
                "out_dir": daemon.state_dir / "out",
            },
            "model": {"path": daemon.state_dir, "context_length": spec.context_length},
            "engine": {"name": "vllm"},
            "sampling": {"max_tokens": 24},
        }
    )
    with Client.connect(daemon.state_dir) as client:
        yield client.open_run(config, engine=spec, tokenizer="", resume_step=0)


@kinds.VLLM_ONLY
def test_a_group_comes_through_the_real_worker_and_daemon_and_a_killed_core_ends_the_worker(
    kind: Kind, tmp_path: Path
) -> None:
    spec = messages.EngineSpec("vllm", kind.text(), "float32", 16, 128)

    async def main() -> None:
        with LiveDaemon(tmp_path / "state") as daemon, a_run(daemon, spec) as run, WeightServer() as source:
            async with worker_process(daemon.state_dir, daemon.worker_key("j")) as worker:
                manifest, blob = models.weights(kind.model)
                run.publish(1, manifest, source.publish(manifest, blob))
                run.submit(1, 1, [GroupSpec(0, pack_tokens((3, 1, 2)), 4, Sampling(24))])
                deadline, done = time.monotonic() + PATIENCE_S, []
                while not done:
                    assert time.monotonic() < deadline, (daemon.state_dir / "worker.log").read_text()
                    assert worker.returncode is None
                    done = await asyncio.to_thread(run.poll, 1.0)
                samples = done[0].samples
                answers = [tuple(unpack_tokens(s.tokens)) for s in samples]
                assert len(set(answers)) == 4
                for sample, tokens in zip(samples, answers, strict=True):
                    assert (len(tokens), sample.finish) == (24, "length")
                    _agree(kind.model, tokens, tuple(unpack_logprobs(sample.logprobs)))
                core_of(worker.pid).kill()
                assert await asyncio.wait_for(worker.wait(), 10.0) == EXIT_ENGINE_FAILED
                assert "ended by itself" in (daemon.state_dir / "worker.log").read_text()
                eventually("the ledger to say why", lambda: _said(daemon, "ended by itself"), 10.0)

    asyncio.run(main())


def _said(daemon: LiveDaemon, words: str) -> bool:
    return any(
        words in str(value)
        for row in daemon.query("SELECT * FROM workers") + daemon.query("SELECT * FROM events")
        for value in row
    )
