"""What every engine must hold, parametrised by engine (`tests.rollout.kinds`).

An engine that draws by itself and takes only a seed a request ("vllm") promises less: greedy answers, logprobs and distributions do not
change when a sample moves, its sampled tokens do. Each of its specs is an engine started anew, so the tests that need one of their own are
`long` for it."""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import time
from typing import TYPE_CHECKING, Any

import pytest

from rollout.engines.base import Engine
from scavenger.errors import EngineError
from scavenger.protocol.messages import EngineSpec, SampleKey, Sampling
from scavenger.protocol.worker.events import Delta, Request

torch = pytest.importorskip("torch", reason="the engines need the [trainer] extra")
models = pytest.importorskip("tests.rollout.models")
kinds = pytest.importorskip("tests.rollout.kinds")
if TYPE_CHECKING:
    from tests.rollout.kinds import Kind
else:
    Kind = kinds.Kind

GREEDY = Sampling(max_tokens=24, temperature=0.0)
RANDOM = Sampling(max_tokens=24)
#: Right draws are so rare by chance that a test of a distribution may refuse them. Wrong ones, of 20,000 samples, are rarer by far.
BY_CHANCE = 1e-6


async def loaded(kind: Kind, spec: EngineSpec | None = None, views: Any = None) -> Engine:
    engine = await kind.start(spec or kind.spec())
    await engine.load(1, kind.views if views is None else views)
    return engine


def same(kind: Kind, one: dict[int, Delta], other: dict[int, Delta]) -> None:
    """The same answers, their logprobs as close as two ways to compute them are."""
    assert {h: (d.token_ids, d.finish, d.error) for h, d in one.items()} == {
        h: (d.token_ids, d.finish, d.error) for h, d in other.items()
    }
    for handle, delta in one.items():
        for column in ("logprobs", "raw_logprobs"):
            assert getattr(delta, column) == pytest.approx(
                getattr(other[handle], column), abs=kind.close_logprobs
            )


def request(
    handle: int,
    sampling: Sampling = RANDOM,
    accepted: tuple[int, ...] = (),
    prompt: tuple[int, ...] | None = None,
) -> Request:
    key = SampleKey("train", 3, handle // 4, handle % 4)
    words = prompt if prompt is not None else tuple(1 + (handle * 7 + i) % 20 for i in range(3 + handle % 5))
    return Request(handle, words, accepted, sampling.max_tokens - len(accepted), sampling, 11, key)


async def finish(engine: Engine, *requests: Request, never: tuple[int, ...] = ()) -> dict[int, Delta]:
    """Everything that the engine makes of the requests, joined a request; nothing may come of the handles in `never`."""
    for r in requests:
        await engine.add(r)
    parts: dict[int, list[Delta]] = {r.handle: [] for r in requests}
    open_ = set(parts)
    while open_:
        for delta in await engine.next():
            if delta.finish or delta.error:
                open_.discard(delta.handle)
            assert len(delta.token_ids) == len(delta.logprobs) == len(delta.raw_logprobs)
            assert delta.handle not in never
            if delta.handle in parts:
                parts[delta.handle].append(delta)
    return {
        handle: Delta(
            handle,
            tuple(t for d in deltas for t in d.token_ids),
            tuple(x for d in deltas for x in d.logprobs),
            tuple(x for d in deltas for x in d.raw_logprobs),
            deltas[-1].finish,
            deltas[-1].error,
            b"".join(d.routing for d in deltas),
        )
        for handle, deltas in parts.items()
    }


@kinds.EVERY
@pytest.mark.parametrize(
    "sampling", [GREEDY, RANDOM, Sampling(24, 0.7, 0.9, 7)], ids=["greedy", "sampled", "truncated"]
)
def test_an_interrupted_and_moved_sample_equals_the_uninterrupted_one(kind: Kind, sampling: Sampling) -> None:
    async def main() -> None:
        engine = await loaded(kind)
        whole = (await finish(engine, request(1, sampling)))[1].token_ids
        assert len(whole) == 24
        assert len(set(whole)) > 1
        for cut in (1, 5, 23):
            other = await loaded(kind)
            moved = await finish(
                other, *(request(i, sampling) for i in range(2, 6)), request(1, sampling, whole[:cut])
            )
            if kind.draws_by_place or sampling is GREEDY:
                assert whole[:cut] + moved[1].token_ids == whole
            else:
                assert len(moved[1].token_ids) == 24 - cut
            await other.close()
        await engine.close()

    kind.run(main())


@kinds.EVERY
def test_tokens_do_not_depend_on_the_batch(kind: Kind) -> None:
    async def main() -> None:
        engine = await loaded(kind)
        alone = {i: (await finish(engine, request(i)))[i] for i in range(12)}
        together = await finish(engine, *(request(i) for i in range(12)))
        for i in range(12):
            assert alone[i].token_ids == together[i].token_ids
            for x, y in zip(alone[i].logprobs, together[i].logprobs, strict=True):
                assert abs(x - y) < kind.close_logprobs
        await engine.close()

    kind.run(main())


@kinds.EVERY_LONG
def test_tokens_do_not_depend_on_how_many_fit_at_once(kind: Kind) -> None:
    async def main() -> None:
        engine, narrow = await loaded(kind), await loaded(kind, kind.spec(max_batch=3))
        wide = await finish(engine, *(request(i) for i in range(12)))
        queued = await finish(narrow, *(request(i) for i in range(12)))
        assert [wide[i].token_ids for i in range(12)] == [queued[i].token_ids for i in range(12)]
        await engine.close()
        await narrow.close()

    kind.run(main())


@kinds.EVERY
def test_a_sample_is_named_by_seed_and_key_not_by_its_handle(kind: Kind) -> None:
    async def main() -> None:
        engine = await loaded(kind)
        first, second = (
            request(1),
            Request(99, *(getattr(request(1), f) for f in Request.__dataclass_fields__ if f != "handle")),
        )
        other = Request(7, first.prompt, (), 24, RANDOM, 12, first.key)
        made = await finish(engine, first, second, other)
        assert made[1].token_ids == made[99].token_ids != made[7].token_ids
        await engine.close()

    kind.run(main())


@pytest.mark.parametrize(
    ("kind", "model_type", "dtype", "tolerance"),
    [
        ("reference", "qwen3", "float64", 1e-5),
        ("reference", "qwen3", "float32", 1e-4),
        ("reference", "llama", "float64", 1e-5),
        ("reference", "llama", "float32", 1e-4),
        pytest.param("vllm", "qwen3", "float32", 1e-4, marks=kinds.QUIET),
        pytest.param("vllm", "llama", "float32", 1e-4, marks=[*kinds.QUIET, pytest.mark.long]),
    ],
    indirect=["kind"],
)
def test_logprobs_are_those_of_a_plain_forward(
    kind: Kind, model_type: str, dtype: str, tolerance: float
) -> None:
    text = kind.text(model_type, tie_word_embeddings=model_type == "qwen3")
    model = models.plain_model(text, seed=3)
    sampling = Sampling(24, 0.8, 0.95, 9)

    async def main() -> Delta:
        engine = await loaded(kind, kind.spec(text, dtype=dtype), models.views(model))
        head = (await finish(engine, *(request(i, sampling) for i in range(5))))[2].token_ids[:6]
        moved = (await finish(engine, request(2, sampling, head), request(9, sampling)))[2]
        await engine.close()
        return Delta(2, head + moved.token_ids, (0.0,) * 6 + moved.logprobs, (0.0,) * 6 + moved.raw_logprobs)

    made = kind.run(main())
    prompt = request(2).prompt
    logits = model(torch.tensor([prompt + made.token_ids])).logits[0, len(prompt) - 1 : -1].double()
    raw = torch.log_softmax(logits, -1)
    for i in range(6, 24):
        token = made.token_ids[i]
        assert made.raw_logprobs[i] == pytest.approx(float(raw[i, token]), abs=tolerance)
        scaled = logits[i] / 0.8
        kept = scaled.topk(9).indices
        probs = torch.softmax(scaled[kept], -1)
        nucleus = kept[probs.cumsum(-1) - probs < 0.95]
        assert token in nucleus.tolist()
        expected = torch.log_softmax(scaled[nucleus], -1)[nucleus.tolist().index(token)]
        assert made.logprobs[i] == pytest.approx(float(expected), abs=tolerance)


@kinds.EVERY
def test_weights_published_as_bfloat16_are_upcast_exactly(kind: Kind) -> None:
    published = models.plain_model(kind.text(), seed=2, dtype=torch.bfloat16)
    model = models.plain_model(kind.text(), seed=2)
    model.load_state_dict(published.state_dict())

    async def main() -> Delta:
        engine = await loaded(kind, views=models.views(published))
        made = (await finish(engine, request(1)))[1]
        await engine.close()
        return made

    made = kind.run(main())
    prompt = request(1).prompt
    logits = model.double()(torch.tensor([prompt + made.token_ids])).logits[0, len(prompt) - 1 : -1]
    raw = torch.log_softmax(logits, -1).gather(1, torch.tensor(made.token_ids)[:, None])[:, 0]
    assert made.raw_logprobs == pytest.approx(raw.tolist(), abs=1e-5)


@kinds.EVERY_LONG
def test_an_engine_may_compute_in_bfloat16(kind: Kind) -> None:
    published = models.plain_model(kind.text(), seed=2, dtype=torch.bfloat16)

    async def main() -> Delta:
        engine = await kind.start(kind.spec(dtype="bfloat16"))
        await engine.load(1, models.views(published))
        made = (await finish(engine, request(1), request(2)))[1]
        await engine.close()
        return made

    made = kind.run(main())
    assert len(made.token_ids) == 24
    assert all(math.isfinite(x) for x in made.logprobs)


@kinds.EVERY
def test_greedy_takes_the_arg_max_and_is_certain_of_it(kind: Kind) -> None:
    async def main() -> Delta:
        engine = await loaded(kind)
        made = (await finish(engine, request(0, GREEDY)))[0]
        await engine.close()
        return made

    made = kind.run(main())
    prompt = request(0).prompt
    logits = kind.model(torch.tensor([prompt + made.token_ids])).logits[0, len(prompt) - 1 : -1]
    assert tuple(logits.argmax(-1).tolist()) == made.token_ids
    assert made.logprobs == (0.0,) * 24
    assert all(x < 0 for x in made.raw_logprobs)


@kinds.EVERY
def test_a_stop_token_ends_the_sample_and_is_part_of_it(kind: Kind) -> None:
    async def main() -> None:
        engine = await loaded(kind)
        free = (await finish(engine, request(1)))[1].token_ids
        stop = free[9]
        made = (await finish(engine, request(1, Sampling(24, stop_token_ids=(stop,)))))[1]
        assert made.finish == "stop"
        assert made.token_ids == free[: free.index(stop) + 1]
        await engine.close()

    kind.run(main())


@kinds.EVERY
def test_one_budget_holds_over_all_leases(kind: Kind) -> None:
    async def main() -> None:
        engine = await loaded(kind)
        whole = (await finish(engine, request(1)))[1]
        rest = (await finish(engine, request(1, accepted=whole.token_ids[:20])))[1]
        assert (whole.finish, len(whole.token_ids), rest.finish, len(rest.token_ids)) == (
            "length",
            24,
            "length",
            4,
        )
        await engine.close()

    kind.run(main())


@kinds.EVERY
def test_an_aborted_request_is_never_heard_of_again(kind: Kind) -> None:
    async def main() -> None:
        engine = await loaded(kind)
        for i in range(4):
            await engine.add(request(i))
        await engine.next()
        waiting = asyncio.create_task(engine.next())
        await asyncio.sleep(0)
        await engine.abort([0, 2, 77])
        assert not {d.handle for d in await waiting} & {0, 2}
        first = await finish(engine, request(5), never=(0, 2))
        assert first[5].token_ids == (await finish(engine, request(5), never=(0, 2)))[5].token_ids
        await engine.abort([1, 3])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.next(), 0.05)
        await engine.close()

    kind.run(main())


@kinds.EVERY
def test_sleep_drops_requests_and_wake_brings_the_weights_back(kind: Kind) -> None:
    async def main() -> None:
        engine = await loaded(kind)
        before = await finish(engine, request(1))
        await engine.add(request(2))
        await engine.sleep()
        with pytest.raises(EngineError, match="asleep"):
            await engine.add(request(1))
        await engine.wake()
        same(kind, await finish(engine, request(1), never=(2,)), before)
        await engine.close()

    kind.run(main())


@kinds.EVERY
def test_weights_may_arrive_while_asleep(kind: Kind) -> None:
    async def main() -> None:
        engine, fresh = await loaded(kind), models.plain_model(kind.text(), seed=5)
        await engine.sleep()
        await engine.load(2, models.views(fresh))
        await engine.wake()
        other = await loaded(kind, views=models.views(fresh))
        same(kind, await finish(engine, request(1)), await finish(other, request(1)))
        await engine.close()
        await other.close()

    kind.run(main())


@kinds.EVERY
def test_new_weights_end_what_runs_and_rule_what_follows(kind: Kind) -> None:
    async def main() -> None:
        fresh = models.views(models.plain_model(kind.text(), seed=5))
        engine, other = await loaded(kind), await loaded(kind, views=fresh)
        old = (await finish(engine, request(1)))[1]
        await engine.add(request(2))
        await engine.next()
        await engine.load(2, fresh)
        new = (await finish(engine, request(1), never=(2,)))[1]
        assert old.token_ids != new.token_ids == (await finish(other, request(1)))[1].token_ids
        await engine.close()
        await other.close()

    kind.run(main())


@kinds.EVERY
def test_what_cannot_ever_fit_is_refused_with_its_lengths(kind: Kind) -> None:
    async def main() -> None:
        engine = await kind.start(kind.spec())
        with pytest.raises(EngineError, match="no weights"):
            await engine.add(request(1))
        await engine.load(1, kind.views)
        with pytest.raises(EngineError, match="120 tokens and 24 more exceed the context of 128"):
            await engine.add(request(1, prompt=(1,) * 120))
        with pytest.raises(EngineError, match="vocabulary of 29"):
            await engine.add(request(1, prompt=(29,)))
        with pytest.raises(EngineError, match="nothing to generate"):
            await engine.add(request(1, prompt=()))
        exact = (await finish(engine, request(1, prompt=(1,) * 104)))[1]
        assert len(exact.token_ids) == 24
        await engine.close()

    kind.run(main())


@kinds.EVERY
def test_weights_that_do_not_fit_are_refused_and_leave_none(kind: Kind) -> None:
    async def main() -> None:
        engine = await loaded(kind)
        wrong = models.views(models.plain_model(kind.text(vocab_size=31)))
        for bad, words in (
            (wrong, "not \\(29, 32\\)"),
            (kind.views[:-1], "1 weights are missing"),
            ([], "weights are missing"),
        ):
            with pytest.raises(EngineError, match=words):
                await engine.load(2, bad)
            with pytest.raises(EngineError, match="no weights"):
                await engine.add(request(1))
        await engine.load(3, kind.views)
        assert len((await finish(engine, request(1)))[1].token_ids) == 24
        await engine.close()

    kind.run(main())


@kinds.EVERY
def test_nan_weights_fail_each_request_and_not_the_engine(kind: Kind) -> None:
    async def main() -> None:
        engine = await loaded(kind)
        good = await finish(engine, request(1))
        sick = models.plain_model(kind.text())
        sick.get_input_embeddings().weight[:, 0] = torch.nan
        await engine.load(2, models.views(sick))
        made = await finish(engine, request(1), request(2))
        for delta in made.values():
            assert delta.error is not None
            assert "not finite" in delta.error
            assert delta.token_ids == ()
        await engine.load(3, kind.views)
        same(kind, await finish(engine, request(1)), good)
        await engine.close()

    kind.run(main())


@kinds.REFERENCE_ONLY
@pytest.mark.parametrize(
    "error", [IndexError("list index out of range"), KeyError("rope_type"), RuntimeError("out of memory")]
)
def test_whatever_the_model_raises_is_the_engine_s_failure(
    kind: Kind, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def main() -> None:
        engine = await loaded(kind)

        def fails(*_args: object) -> list[Delta]:
            raise error

        monkeypatch.setattr("rollout.engines.decoder.Decoder.step", fails)
        await engine.add(request(1))
        with pytest.raises(EngineError, match=type(error).__name__):
            await engine.next()
        await engine.close()

    kind.run(main())


@kinds.EVERY_LONG
def test_a_sample_with_nan_does_not_touch_its_neighbours(kind: Kind) -> None:
    async def main() -> None:
        sick = models.plain_model(kind.text(tie_word_embeddings=False))
        sick.get_input_embeddings().weight[28] = torch.nan  # only a prompt with token 28 meets it
        sick.get_output_embeddings().weight[28] = 0.0
        views = models.views(sick)
        engine = await loaded(kind, kind.spec(kind.text(tie_word_embeddings=False), max_batch=4), views)
        clean = {i: (await finish(engine, request(i, GREEDY)))[i] for i in range(4)}
        for _ in range(3):
            made = await finish(
                engine, request(9, GREEDY, prompt=(1, 2, 28, 4)), *(request(i, GREEDY) for i in range(4))
            )
            assert made.pop(9).error is not None
            assert {i: d.token_ids for i, d in made.items()} == {i: d.token_ids for i, d in clean.items()}
        await engine.close()

    kind.run(main())


@kinds.EVERY_LONG
def test_pace_bounds_each_samples_rate(kind: Kind) -> None:
    async def main() -> None:
        engine = await loaded(kind, kind.spec(pace=100.0))
        times: list[float] = []
        cpu, began = time.process_time(), time.monotonic()
        await engine.add(request(1))
        while len(times) < 24:
            if len(times) == 7:
                await engine.add(request(2))
            for delta in await engine.next():
                if delta.handle == 1:  # of a process that was stalled, one delta brings several tokens
                    times += [time.monotonic()] * len(delta.token_ids)
        gaps = [b - a for a, b in itertools.pairwise(times)]
        assert times[-1] - times[0] >= 23 * 0.01 * 0.95
        # none comes before its time, and they come one by one: a host that stalls the process makes a few come together, never most
        assert all(at - began >= n * 0.01 * 0.95 for n, at in enumerate(times))
        assert statistics.median(gaps) > 0.005
        assert time.process_time() - cpu < 0.8 * (time.monotonic() - began)
        assert engine.progress() >= 24
        await engine.close()

    kind.run(main())


@kinds.EVERY
def test_a_config_that_names_no_causal_lm_is_refused(kind: Kind) -> None:
    async def main() -> None:
        sliding = kind.text(layer_types=["sliding_attention"] * 2)
        for text in (
            "[]",
            "{",
            '{"model_type": "no-such"}',
            '{"vocab_size": 3}',
            *([sliding] if kind.draws_by_place else []),
        ):
            with pytest.raises(EngineError):
                await kind.start(kind.spec(text))
        with pytest.raises(EngineError, match="dtype"):
            await kind.start(kind.spec(dtype="int8"))

    kind.run(main())


@kinds.EVERY_LONG
def test_moved_samples_have_the_models_distribution(kind: Kind) -> None:
    """20,000 samples moved at random offsets, float32, no deterministic mode: tokens on either side of the move."""
    stats = pytest.importorskip("scipy.stats")
    vocab, length, count, prompt = 5, 4, 20_000, (2, 3)
    text = kind.text(vocab_size=vocab, num_hidden_layers=1)
    model = models.plain_model(text, seed=8, scale=2.0)
    how = Sampling(length)

    def ask(i: int, accepted: tuple[int, ...], upto: int) -> Request:
        return Request(
            i, prompt, accepted, upto - len(accepted), how, 5, SampleKey("train", 0, i // 8, i % 8)
        )

    async def main() -> list[tuple[int, tuple[int, ...]]]:
        spec = kind.spec(text, dtype="float32", max_batch=1024 if kind.draws_by_place else 128, context=16)
        engine = await loaded(kind, spec, models.views(model))
        cuts = [1 + (i * 7919) % (length - 1) for i in range(count)]
        heads = await finish(engine, *(ask(i, (), cuts[i]) for i in range(count)))
        tails = await finish(engine, *(ask(i, heads[i].token_ids, length) for i in reversed(range(count))))
        await engine.close()
        return [(cuts[i], heads[i].token_ids + tails[i].token_ids) for i in range(count)]

    samples = kind.run(main())
    texts = [
        tuple(int(d) for d in torch.unravel_index(torch.tensor(n), (vocab,) * length))
        for n in range(vocab**length)
    ]
    logits = model(torch.tensor([prompt + t for t in texts])).logits[:, 1:-1].double()
    logprobs = torch.log_softmax(logits, -1).gather(2, torch.tensor(texts)[:, :, None])[:, :, 0].sum(1)
    exact = {t: math.exp(float(x)) for t, x in zip(texts, logprobs, strict=True)}
    for cut in range(1, length):  # the pair of tokens on either side of a move at `cut`
        mine = [t[cut - 1 : cut + 1] for c, t in samples if c == cut]
        pairs = sorted({t[cut - 1 : cut + 1] for t in texts})
        expected = [
            len(mine) * sum(p for t, p in exact.items() if t[cut - 1 : cut + 1] == pair) for pair in pairs
        ]
        assert min(expected) > 5
        assert stats.chisquare([mine.count(pair) for pair in pairs], expected).pvalue > BY_CHANCE
    counts = [sum(1 for _, t in samples if t == text) for text in texts]
    expected = [count * exact[t] for t in texts]
    few = [i for i, e in enumerate(expected) if e < 5]
    rest = [i for i, e in enumerate(expected) if e >= 5]
    observed = [counts[i] for i in rest] + [sum(counts[i] for i in few)]
    assert (
        stats.chisquare(observed, [expected[i] for i in rest] + [sum(expected[i] for i in few)]).pvalue
        > BY_CHANCE
    )
