"""KV blocks that move from engine to engine: the tokens are what they are without, and what is not verified is prefilled.

vLLM's own: `test_kv_vllm.py`. A planted bug shows that a wrong block is seen in the tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from rollout import kv as moving
from rollout.engines.base import EngineHost, Kv
from rollout.kv import KvError, KvMover
from scavenger.protocol import keys, messages
from scavenger.protocol import kv as bound
from scavenger.protocol.kv import CHUNK_NBYTES, KvBinding
from scavenger.protocol.messages import KvSource, SampleKey, Sampling
from scavenger.protocol.worker.events import Delta, KeepKv, KeepOtherKv, KvLoaded, Request, TurnKvKept

torch = pytest.importorskip("torch", reason="the engines need the [trainer] extra")
models = pytest.importorskip("tests.rollout.models")
from rollout.engines.registry import builder  # noqa: E402  needs torch
from tests.rollout.test_engine_contract import finish  # noqa: E402  needs torch

TOKENS = 32
CUT = 12
TEXT = models.config_text()
ROOT = b"r" * 32


def asked(handle: int, accepted: tuple[int, ...] = ()) -> Request:
    left = TOKENS - len(accepted)
    return Request(
        handle, (3, 1, 4, 1, 5), accepted, left, Sampling(TOKENS, 0.9), 7, SampleKey("train", 0, handle, 0)
    )


@contextlib.asynccontextmanager
async def reference(seed: int = 5) -> AsyncIterator[Any]:
    engine = await builder("reference")(replace(models.spec(TEXT), move_kv=True), EngineHost("run"))
    await engine.load(1, models.views(models.plain_model(TEXT, seed=seed)))
    try:
        yield engine
    finally:
        await engine.close()


async def first(engine: Any, request: Request, count: int) -> tuple[int, ...]:
    """Begin a request, and return its first tokens; it still runs."""
    made: tuple[int, ...] = ()
    await engine.add(request)
    while len(made) < count:
        for delta in await engine.next():
            made += delta.token_ids if delta.handle == request.handle else ()
    return made


async def rest(engine: Any, request: Request, kv: Kv | None) -> Delta:
    """A request that comes with its blocks, to its end."""
    if kv is None:
        return (await finish(engine, request))[request.handle]
    await engine.add_with_kv(request, kv)
    parts: list[Delta] = []
    while not parts or parts[-1].finish is None:
        parts += [delta for delta in await engine.next() if delta.handle == request.handle]
    return Delta(
        request.handle,
        tuple(token for part in parts for token in part.token_ids),
        tuple(value for part in parts for value in part.logprobs),
        tuple(value for part in parts for value in part.raw_logprobs),
        parts[-1].finish,
    )


def test_a_sample_that_takes_its_blocks_along_makes_the_same_tokens() -> None:
    async def main() -> None:
        async with reference() as one, reference() as other:
            whole = (await finish(one, asked(1)))[1]
            made = await first(one, asked(2), CUT)
            blocks = await one.take_kv(2, 5 + CUT - 1)
            assert blocks is not None
            assert blocks.tokens == (3, 1, 4, 1, 5, *made[: CUT - 1])
            assert blocks.data.nbytes == len(blocks.tokens) * one.kv_token_nbytes()
            moved = await rest(other, asked(2, made[:CUT]), blocks)
            here = (await finish(one, asked(3)))[3]
            assert whole.token_ids != here.token_ids, "two samples differ"
            alone = (await finish(other, asked(2)))[2]
            assert made[:CUT] + moved.token_ids == alone.token_ids
            assert moved.logprobs == pytest.approx(alone.logprobs[CUT:], abs=1e-12)

    asyncio.run(main())


def test_blocks_of_another_sample_that_were_loaded_would_be_seen_in_the_tokens() -> None:
    """The control: an engine that loads what it should have refused makes other tokens, so the test above sees such a bug."""

    async def main() -> None:
        async with reference() as one:
            made = await first(one, asked(2), CUT)
            right = await one.take_kv(2, 5 + CUT - 1)
            assert right is not None
            wrong = Kv(right.tokens, memoryview(bytes(right.data.nbytes)))
            moved = await rest(one, asked(4, made[:CUT]), wrong)
            prefilled = (await finish(one, asked(4, made[:CUT])))[4]
            assert moved.token_ids != prefilled.token_ids

    asyncio.run(main())


def test_an_engine_that_was_given_other_bytes_than_its_cache_has_prefills() -> None:
    async def main() -> None:
        async with reference() as one:
            made = await first(one, asked(2), CUT)
            right = await one.take_kv(2, 5 + CUT - 1)
            assert right is not None
            expected = (await finish(one, asked(4, made[:CUT])))[4]
            for wrong in (Kv(right.tokens, right.data[:-8]), Kv(right.tokens[:-1], right.data)):
                assert (await rest(one, asked(4, made[:CUT]), wrong)).token_ids == expected.token_ids

    asyncio.run(main())


def test_an_engine_gives_no_blocks_that_it_has_not() -> None:
    async def main() -> None:
        async with reference() as one:
            await first(one, asked(2), CUT)
            assert await one.take_kv(2, 500) is None
            assert await one.take_kv(3, 1) is None
            await one.abort([2])
            assert await one.take_kv(2, 1) is None

    asyncio.run(main())


# ---------------------------------------------------------------- turns


def left_in(engine: Any) -> dict[int, Kv]:
    """What its finished requests left and nobody took."""
    found: dict[int, Kv] = engine._engine._decoder._left
    return found


async def finished(engine: Any, handle: int) -> tuple[tuple[int, ...], Kv]:
    """A turn to its end: what it said, and the blocks that it left."""
    said = (await finish(engine, dataclasses.replace(asked(handle), leaves_kv=True)))[handle].token_ids
    left = await engine.take_kv(handle, 5 + len(said) - 1)
    assert left is not None
    return said, left


def behind(handle: int, said: tuple[int, ...]) -> Request:
    """The next turn: all before, and what a tool answered."""
    return dataclasses.replace(asked(handle), prompt=(3, 1, 4, 1, 5, *said, 9, 2, 6, 5, 3, 5))


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_turn_that_goes_on_from_what_another_left_makes_the_same_tokens(elsewhere: bool) -> None:
    async def main() -> None:
        async with reference() as one, reference() as other:
            said, left = await finished(one, 1)
            assert left.tokens == (3, 1, 4, 1, 5, *said[:-1])
            engine = other if elsewhere else one
            beside = await first(engine, asked(7), 3)  # one runs already: its row is not touched
            brought = await rest(engine, behind(2, said), left)
            await engine.abort([7])
            alone = (await finish(other, behind(2, said)))[2]
            assert brought.token_ids == alone.token_ids
            assert brought.logprobs == pytest.approx(alone.logprobs, abs=1e-12)
            assert (await finish(other, asked(7)))[7].token_ids[:3] == beside

    asyncio.run(main())


def test_what_another_branch_left_would_be_seen_in_the_tokens() -> None:
    """The control: of as many tokens, under the tokens of the right one."""

    async def main() -> None:
        async with reference() as one:
            said, left = await finished(one, 1)
            other, branch = await finished(one, 2)
            assert len(other) == len(said)
            assert other != said
            wrong = await rest(one, behind(3, said), Kv(left.tokens, branch.data))
            assert wrong.token_ids != (await finish(one, behind(3, said)))[3].token_ids
            right = await rest(
                one, behind(3, said), branch
            )  # of other tokens than its prompt begins with: it is prefilled
            assert right.token_ids == (await finish(one, behind(3, said)))[3].token_ids

    asyncio.run(main())


def test_what_a_turn_left_is_there_until_it_is_taken_or_the_turn_is_forgotten() -> None:
    async def main() -> None:
        async with reference() as one:
            said, _ = await finished(one, 1)
            assert await one.take_kv(1, 5 + len(said) - 1) is None, "taken once"
            await finish(one, dataclasses.replace(asked(2), leaves_kv=True))
            assert len(left_in(one)) == 1
            await one.abort([2])
            assert left_in(one) == {}
            await finish(one, asked(3))
            assert left_in(one) == {}, "nobody asked for it"
            await finish(one, dataclasses.replace(asked(4), leaves_kv=True))
            await one.load(2, models.views(models.plain_model(TEXT, seed=6)))
            assert await one.take_kv(4, 5 + TOKENS - 1) is None, "of other weights"

    asyncio.run(main())


def test_turns_of_adapters_beside_their_base_go_on_from_what_one_left_of_the_same_version() -> None:
    pytest.importorskip("peft", reason="the adapters need the [lora] extra")
    from tests.rollout import kinds
    from tests.rollout.test_adapters_unmerged import Pulled
    from tests.rollout.test_engine_adapters import LORA

    async def main() -> None:
        kind = kinds.Reference()
        engine: Any = await kind.start(replace(kind.spec(), adapter_rank=LORA.rank, move_kv=True))
        trained = Pulled(kind)
        trained.step(1)
        await engine.load(2, trained.version(2))
        said, left = await finished(engine, 1)
        beside = await first(engine, asked(7), 3)
        brought = await rest(engine, behind(2, said), left)
        await engine.abort([7])
        alone = (await finish(engine, behind(2, said)))[2]
        assert brought.token_ids == alone.token_ids
        assert brought.logprobs == pytest.approx(alone.logprobs, abs=1e-12)
        assert (await finish(engine, asked(7)))[7].token_ids[:3] == beside
        again = (await finish(engine, dataclasses.replace(asked(4), leaves_kv=True)))[4].token_ids
        trained.step(2)
        await engine.load(3, trained.version(3))
        assert left_in(engine) == {}
        assert await engine.take_kv(4, 5 + len(again) - 1) is None, "of other adapters"
        await engine.close()

    asyncio.run(main())


def test_a_turn_that_ends_after_its_blocks_were_taken_and_before_it_is_aborted_leaves_nothing() -> None:
    async def main() -> None:
        async with reference() as one:
            said = await first(one, dataclasses.replace(asked(1), leaves_kv=True), 2)
            assert await one.take_kv(1, 5 + len(said) - 1) is not None
            while not any(delta.finish for delta in await one.next()):
                pass
            await one.abort([1])
            assert left_in(one) == {}

    asyncio.run(main())


# ---------------------------------------------------------------- from process to process


class Given:
    """An engine that gives out what the test says."""

    def __init__(self, data: bytes, tokens: tuple[int, ...]) -> None:
        self.data, self.tokens, self.layout = data, tokens, "given"
        self.may_give = asyncio.Event()
        self.may_give.set()

    def kv_layout(self) -> str:
        return self.layout

    def kv_tokens(self, tokens: int) -> int:
        return tokens

    def kv_token_nbytes(self) -> int:
        return len(self.data) // len(self.tokens)

    async def take_kv(self, _handle: int, _tokens: int) -> Kv | None:
        await self.may_give.wait()
        return Kv(self.tokens, memoryview(self.data))

    async def add_with_kv(self, request: Request, kv: Kv) -> None:
        raise AssertionError("this engine only gives blocks out")


class Pair:
    """A holder and a reader, each as a worker has it, and what the reader reported."""

    def __init__(self, nbytes: int = 3 * CHUNK_NBYTES + 80) -> None:
        tokens = tuple(range(20))
        self.engine = Given(bytes(range(20)) * (nbytes // 20), tokens)
        self.most_nbytes = 2 * len(self.engine.data)
        self.loaded: list[KvLoaded] = []
        self.kept: list[TurnKvKept] = []
        self.left: list[int] = []
        self.holder, self.reader = self._mover("run"), self._mover("run")
        for one in (self.holder, self.reader):
            one.loaded(1, ROOT)

    def _mover(self, run: str) -> KvMover:
        return KvMover(
            self.engine,
            models.spec(TEXT),
            run,
            keys.generate(),
            "127.0.0.1",
            report=self._said,
            taken=lambda event: self.left.append(event.left),
            on_fault=lambda fault: pytest.fail(str(fault)),
            clock=asyncio.get_running_loop().time,
            most_nbytes=self.most_nbytes,
        )

    def _said(self, event: KvLoaded | TurnKvKept) -> None:
        if isinstance(event, TurnKvKept):
            self.kept.append(event)
        else:
            self.loaded.append(event)

    async def reports(self, count: int) -> list[TurnKvKept]:
        """So many turns are kept, or are not."""
        while len(self.kept) < count:
            await asyncio.sleep(0.001)
        return self.kept

    def request(self, within_s: float = 30.0, source: messages.WeightSource | None = None) -> Request:
        order = KvSource(source or self.holder.source, 9, 20, within_s)
        return replace_kv(asked(1), tuple(range(20)), order)

    async def brought(self, request: Request) -> Kv | None:
        assert self.reader.begins(request)
        return await self.reader.fetched(request)

    def close(self) -> None:
        self.holder.close()
        self.reader.close()


def replace_kv(request: Request, prompt: tuple[int, ...], order: KvSource) -> Request:
    return dataclasses.replace(request, prompt=prompt, accepted=(99,), kv=order, history="history")


async def kept(pair: Pair) -> None:
    assert pair.holder.expects(KeepKv(9, 20, "history"))
    await pair.holder.keep(KeepKv(9, 20, "history"))
    async with asyncio.timeout(30):
        while pair.holder.shelf._kept[9].header is None:
            await asyncio.sleep(0.001)


def played(scene: Callable[[Pair], Any], nbytes: int = 3 * CHUNK_NBYTES + 80) -> None:
    async def main() -> None:
        pair = Pair(nbytes)
        try:
            await asyncio.wait_for(scene(pair), 60.0)
        finally:
            pair.close()

    asyncio.run(main())


def test_blocks_cross_from_process_to_process_and_their_holder_lets_go() -> None:
    async def scene(pair: Pair) -> None:
        await kept(pair)
        found = await pair.brought(pair.request())
        assert found == Kv(tuple(range(20)), memoryview(pair.engine.data))
        (loaded,) = pair.loaded
        assert (loaded.handle, loaded.tokens, loaded.nbytes, loaded.fault) == (
            1,
            20,
            len(pair.engine.data),
            "",
        )
        await asyncio.sleep(0)
        assert pair.holder.shelf.nbytes() == 0
        assert pair.left == [0]

    played(scene)


def test_a_reader_waits_for_what_its_holder_still_gives_out() -> None:
    """Its own, or another's before it: many leave at once, and are copied out one after the other."""

    async def scene(pair: Pair) -> None:
        pair.engine.may_give.clear()
        orders = [KeepKv(8, 20, "history"), KeepKv(9, 20, "history")]
        for order in orders:
            assert pair.holder.expects(order)

        async def keep() -> None:
            for order in orders:
                await pair.holder.keep(order)

        keeping = asyncio.create_task(keep())
        bringing = asyncio.create_task(pair.brought(pair.request()))
        while not pair.reader._fetching:
            await asyncio.sleep(0.001)
        pair.engine.may_give.set()
        await keeping
        assert await bringing is not None

    played(scene)


def test_blocks_that_are_late_are_not_waited_for() -> None:
    async def scene(pair: Pair) -> None:
        pair.engine.may_give.clear()
        assert pair.holder.expects(KeepKv(9, 20, "history"))
        keeping = asyncio.create_task(pair.holder.keep(KeepKv(9, 20, "history")))
        assert await pair.brought(pair.request(within_s=0.05)) is None
        assert "did not come within 0.050 s" in pair.loaded[0].fault
        pair.engine.may_give.set()
        await keeping

    played(scene)


@pytest.mark.parametrize(
    "what", ["absent", "corrupt", "short", "version", "root", "sample", "layout", "history", "holder"]
)
def test_blocks_that_are_not_just_those_are_refused(what: str) -> None:
    """Each with its reason, and the engine gets none of them."""
    reasons = {
        "absent": "no such blocks are kept here",
        "corrupt": "differs from its hash",
        "short": "the blocks have 40 bytes",
        "version": "of another version",
        "root": "of another root",
        "sample": "of another digest",
        "layout": "of another layout",
        "history": "of another history",
        "holder": "did not come within",
    }

    async def scene(pair: Pair) -> None:
        shelf, request = pair.holder.shelf, pair.request()
        if what == "sample":
            pair.engine.tokens = (*range(19), 5)
        if what != "absent":
            await kept(pair)
        if what == "corrupt":
            bad = bytearray(pair.engine.data)
            bad[2 * CHUNK_NBYTES + 1] ^= 1
            shelf._kept[9].data = memoryview(bytes(bad))
        elif what == "short":
            header = shelf._kept[9].header
            assert header is not None
            shelf._kept[9].frame = bound.encode_header(bound.header_of(header.binding, memoryview(bytes(40))))
        elif what == "version":
            pair.reader.loaded(2, ROOT)
        elif what == "root":
            pair.reader.loaded(1, b"s" * 32)
        elif what == "layout":
            pair.engine.layout = "other"
        elif what == "history":
            request = dataclasses.replace(request, history="restored")
        elif what == "holder":
            pair.holder.close()
            request = pair.request(within_s=0.3)
        assert await pair.brought(request) is None
        assert reasons[what] in pair.loaded[0].fault

    played(scene)


def test_a_lease_that_ends_while_its_blocks_are_on_their_way_begins_nothing() -> None:
    async def scene(pair: Pair) -> None:
        pair.engine.may_give.clear()
        assert pair.holder.expects(KeepKv(9, 20, "history"))
        keeping = asyncio.create_task(pair.holder.keep(KeepKv(9, 20, "history")))
        request = pair.request()
        assert pair.reader.begins(request)
        bringing = asyncio.create_task(pair.reader.fetched(request))
        pair.reader.forget([1])
        assert await bringing is None
        assert pair.reader.is_over(1)
        assert pair.loaded == []
        pair.engine.may_give.set()
        await keeping

    played(scene)


def test_what_was_let_go_of_before_its_turn_is_not_copied_out() -> None:
    async def scene(pair: Pair) -> None:
        order = KeepKv(9, 20, "history")
        assert pair.holder.expects(order)
        pair.holder.loaded(2, ROOT)
        pair.engine.may_give.clear()  # it would wait for ever
        await pair.holder.keep(order)

    played(scene)


def another(request: Request, handle: int) -> Request:
    return dataclasses.replace(request, handle=handle)


def test_what_comes_is_bounded_however_many_samples_bring_it() -> None:
    """Beyond the bound a sample is prefilled, and the daemon hears why; what was used, or is over, makes room."""

    async def scene(pair: Pair) -> None:
        nbytes = len(pair.engine.data)
        assert pair.most_nbytes == 2 * nbytes
        request = pair.request()
        assert pair.reader.begins(another(request, 1))
        assert pair.reader.begins(another(request, 2))
        assert not pair.reader.begins(another(request, 3))
        (said,) = pair.loaded
        assert (said.handle, said.nbytes) == (3, nbytes)
        assert "over the limit" in said.fault
        # One never comes, one comes and has its first tokens.
        assert await pair.reader.fetched(another(request, 2)) is None
        assert not pair.reader.is_over(2)
        await kept(pair)
        assert await pair.reader.fetched(another(request, 1)) is not None
        assert not pair.reader.is_over(1)
        assert pair.reader.begins(another(request, 4))
        assert not pair.reader.begins(another(request, 5)), "those of the first wait in the engine"
        pair.reader.used((1,))
        assert pair.reader.begins(another(request, 6))

    played(scene, 400)


def test_what_is_never_used_is_freed() -> None:
    """A lease that ends while its blocks come, or when they have come; and a load, with which every request ends."""

    async def scene(pair: Pair) -> None:
        request = pair.request()
        for ends in ("coming", "here", "loaded"):
            assert pair.reader.begins(another(request, 1))
            assert pair.reader.begins(another(request, 2)), ends
            await kept(pair)
            if ends == "coming":
                pair.reader.forget([1, 2])
            assert (await pair.reader.fetched(another(request, 1)) is None) == (ends == "coming")
            assert pair.reader.is_over(1) == (ends == "coming")
            assert await pair.reader.fetched(another(request, 2)) is None, "one reader has them"
            pair.reader.is_over(2)
            if ends == "here":
                pair.reader.forget([1, 2])
            elif ends == "loaded":
                pair.reader.loaded(1, ROOT)
            assert pair.reader._coming == {}, ends
            pair.holder.shelf.clear()

    played(scene, 400)


def test_a_lease_that_ends_while_its_blocks_wait_for_the_engine_frees_them() -> None:
    async def scene(pair: Pair) -> None:
        await kept(pair)
        assert await pair.brought(pair.request()) is not None
        pair.reader.forget([1])
        assert pair.reader.is_over(1)
        assert pair.reader._coming == {}

    played(scene, 400)


def test_what_is_kept_is_bounded_and_the_oldest_goes_first() -> None:
    shelf = moving.KvShelf(most_nbytes=100)
    assert shelf.expect(1, 60)
    assert shelf.expect(2, 40)
    assert not shelf.expect(3, 101)
    assert shelf.expect(4, 30)
    assert [shelf.has(number) for number in (1, 2, 3, 4)] == [False, True, False, True]
    assert shelf.nbytes() == 70


def test_blocks_in_this_process_are_checked_too() -> None:
    shelf = moving.KvShelf()
    binding = KvBinding("run", "history", 1, ROOT, b"m", "given", 2, bound.digest_of((1, 2)))
    shelf.expect(1, 8)
    shelf.put(1, binding, memoryview(b"12345678"))
    found = shelf.own(1)
    with pytest.raises(KvError, match="another version"):
        moving.checked(found, replace(binding, version=2), 8)
    assert moving.checked(found, binding, 8) == b"12345678"
    assert shelf.own(1) is None


# ---------------------------------------------------------------- what turns left

LEFT = KeepKv(9, 20, "history", of_turn=True)


async def left(pair: Pair) -> None:
    """The holder has finished a turn."""
    assert pair.holder.expects(LEFT)
    await pair.holder.keep(LEFT)
    (said,) = await pair.reports(1)
    assert (said.handle, said.nbytes, said.fault) == (9, len(pair.engine.data), "")


def longer(pair: Pair, handle: int = 1, tokens: tuple[int, ...] = tuple(range(20))) -> Request:
    """A turn whose prompt goes on behind what was left."""
    order = KvSource(pair.holder.source, 9, 20, 30.0)
    return another(replace_kv(asked(1), (*tokens, 7, 7, 7, 7), order), handle)


def test_several_turns_go_on_from_what_one_left() -> None:
    async def scene(pair: Pair) -> None:
        await left(pair)
        for handle in (1, 2):
            found = await pair.brought(longer(pair, handle))
            assert found == Kv(tuple(range(20)), memoryview(pair.engine.data)), "not of what came behind"
        assert pair.holder.shelf.nbytes() == len(pair.engine.data)
        assert pair.holder.shelf.taken().left == 0, "nobody waits for it"

    played(scene)


@pytest.mark.parametrize("other", [(*range(19), 5), (*range(10), 99, *range(11, 20))])
def test_what_another_branch_left_is_refused(other: tuple[int, ...]) -> None:
    """As many tokens, one of them another."""

    async def scene(pair: Pair) -> None:
        await left(pair)
        assert await pair.brought(longer(pair, tokens=other)) is None
        assert "of another digest" in pair.loaded[0].fault

    played(scene)


def test_an_engine_that_stays_keeps_what_one_that_leaves_had() -> None:
    """And gives it to the turn that goes on, which alone knows the tokens."""

    async def scene(pair: Pair) -> None:
        await left(pair)
        pair.holder.leave(())
        pair.reader.keep_other(KeepOtherKv(31, KvSource(pair.holder.source, 9, 20, 30.0), "history"))
        pair.holder.leave((9,))
        said = (await pair.reports(2))[1]
        assert (said.handle, said.fault) == (31, "")
        assert pair.holder.shelf.nbytes() == 0, "nobody else will come"
        assert pair.left[-1] == 0
        pair.holder.close()
        mine = dataclasses.replace(longer(pair), kv=KvSource(pair.reader.source, 31, 20, 1.0))
        assert await pair.brought(mine) == Kv(tuple(range(20)), memoryview(pair.engine.data))
        wrong = dataclasses.replace(mine, prompt=(5, *mine.prompt[1:]))
        assert await pair.brought(wrong) is None
        assert "of another digest" in pair.loaded[-1].fault

    played(scene)


@pytest.mark.parametrize("what", ["version", "layout", "history", "corrupt", "tokens", "room", "gone"])
def test_an_engine_keeps_no_other_s_that_are_not_of_its_kind(what: str) -> None:
    reasons = {
        "version": "of another version",
        "layout": "of another layout",
        "history": "of another history",
        "corrupt": "differs from its hash",
        "tokens": "of another tokens",
        "room": "are not kept here",
        "gone": "no such blocks",
    }

    async def scene(pair: Pair) -> None:
        await left(pair)
        tokens = 19 if what == "tokens" else 10_000_000 if what == "room" else 20
        if what == "version":
            pair.reader.loaded(2, ROOT)
        elif what == "layout":
            pair.engine.layout = "other"
        elif what == "corrupt":
            pair.holder.shelf._kept[9].data = memoryview(bytes(len(pair.engine.data)))
        elif what == "gone":
            pair.holder.drop((9,))
        history = "restored" if what == "history" else "history"
        order = KvSource(pair.holder.source, 9, tokens, 30.0)
        pair.reader.keep_other(KeepOtherKv(31, order, history))
        said = (await pair.reports(2))[1]
        assert reasons[what] in said.fault
        assert not pair.reader.shelf.has(31)

    played(scene)


def test_turns_make_room_before_samples_that_move() -> None:
    """The oldest first."""
    shelf = moving.KvShelf(300)
    assert shelf.expect(1, 100)
    assert shelf.expect(2, 100, of_turn=True)
    assert shelf.expect(3, 100, of_turn=True)
    assert shelf.expect(4, 100)
    assert [number for number in range(1, 5) if shelf.has(number)] == [1, 3, 4]
    assert shelf.taken().left == 2


def test_what_was_wanted_and_is_gone_is_not_waited_for() -> None:
    """Its reader was quicker than the daemon's word that it would come."""

    async def scene(pair: Pair) -> None:
        await left(pair)
        pair.holder.leave(())
        assert await pair.brought(longer(pair)) is not None
        pair.holder.leave((9,))
        assert pair.left[-1] == 0

    played(scene)


def test_a_turn_whose_blocks_the_engine_has_not_is_not_kept() -> None:
    async def scene(pair: Pair) -> None:
        async def nothing(_handle: int, _tokens: int) -> Kv | None:
            return None

        pair.engine.take_kv = nothing  # type: ignore[method-assign]  # as an engine that has none
        assert pair.holder.expects(LEFT)
        await pair.holder.keep(LEFT)
        (said,) = await pair.reports(1)
        assert "has not all of them" in said.fault

    played(scene)
