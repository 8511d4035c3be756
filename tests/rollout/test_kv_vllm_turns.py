"""KV blocks that finished turns leave in vLLM: the turn behind one goes on from them on another engine, and says what it says without.

One pair of engines is started for all that needs them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from rollout.kv import KvMover
from scavenger.protocol import keys
from scavenger.protocol.messages import KvSource, SampleKey, Sampling
from scavenger.protocol.worker.events import (
    Delta,
    DropTurnKv,
    KeepKv,
    KeepOtherKv,
    KvLoaded,
    Request,
    TurnKvKept,
)

pytest.importorskip("torch", reason="the engines need the [trainer] extra")
kinds = pytest.importorskip("tests.rollout.kinds")
import torch  # noqa: E402  after the check that it is there

from rollout.engines.vllm.leaving import MOST_ANSWERS, LeavingKv, seal  # noqa: E402  needs torch
from tests.rollout import test_kv_vllm as moved  # noqa: E402  needs torch
from tests.rollout.test_asleep import Llm, engine_of  # noqa: E402  needs torch
from tests.rollout.test_engine_contract import finish  # noqa: E402  needs torch
from tests.rollout.test_kv import first, rest  # noqa: E402  needs torch

PROMPT = tuple(1 + place * 7 % 27 for place in range(70))
TOKENS = 27
LEFT = len(PROMPT) + TOKENS - 1  # tokens with entries: three blocks of 32
BEHIND = 20  # tokens of the turn behind
TOOL = (9, 2, 6, 5, 3, 5)
ROOT = b"r" * 32


def turn(handle: int, begins: int, said: tuple[int, ...] = ()) -> Request:
    """The first turn of an episode, by its first token; `said`: the second."""
    prompt = (begins, *PROMPT[1:], *said, *(TOOL if said else ()))
    most = BEHIND if said else TOKENS
    how = Sampling(most, 0.0)
    return Request(handle, prompt, (), most, how, 7, SampleKey("turn", 0, 1, 0), leaves_kv=not said)


class Side:
    """An engine, and what its worker has beside it."""

    def __init__(self, engine: Any, kind: Any, most_nbytes: int) -> None:
        self.engine = engine
        self.said: list[KvLoaded | TurnKvKept] = []
        self.mover = KvMover(
            engine,
            replace(kind.spec(), move_kv=True),
            "run",
            keys.generate(),
            "127.0.0.1",
            report=self.said.append,
            taken=lambda _event: None,
            on_fault=lambda fault: pytest.fail(str(fault)),
            clock=asyncio.get_running_loop().time,
            most_nbytes=most_nbytes,
        )
        self.mover.loaded(1, ROOT)

    async def _report(self, handle: int) -> KvLoaded | TurnKvKept:
        async with asyncio.timeout(60):
            while not self.said or self.said[-1].handle != handle:
                await asyncio.sleep(0.001)
        return self.said[-1]

    async def first_turn(self, handle: int, begins: int) -> tuple[int, ...]:
        """To its end; its blocks are kept, or it is said why not."""
        said: tuple[int, ...] = (await finish(self.engine, turn(handle, begins)))[handle].token_ids
        order = KeepKv(handle, LEFT, "history", of_turn=True)
        assert self.mover.expects(order)
        await self.mover.keep(order)
        await self._report(handle)
        return said

    def order(self, number: int) -> KvSource:
        return KvSource(self.mover.source, number, LEFT, 60.0)

    async def fetches(self, handle: int, order: KvSource) -> TurnKvKept:
        self.mover.keep_other(KeepOtherKv(handle, order, "history"))
        found = await self._report(handle)
        assert isinstance(found, TurnKvKept)
        return found

    async def next_turn(self, request: Request, order: KvSource) -> tuple[Delta, KvLoaded]:
        """It goes on from the blocks that its lease names, or is prefilled, as the worker does it."""
        request = dataclasses.replace(request, kv=order, history="history")
        assert self.mover.begins(request)
        found = await self.mover.fetched(request)
        assert not self.mover.is_over(request.handle)
        (loaded,) = (one for one in self.said if isinstance(one, KvLoaded) and one.handle == request.handle)
        return await rest(self.engine, request, found), loaded


@kinds.VLLM_ONLY_LONG
def test_the_next_turn_says_the_same_though_the_engine_of_the_last_left_during_the_tool_call(
    kind: Any,
) -> None:
    async def main() -> None:
        spec = replace(kind.spec(), move_kv=True)
        one, other = await kind.start(spec), await kind.start(spec)
        for engine in (one, other):
            await engine.load(1, kind.views)
        kept_nbytes = one.kv_tokens(LEFT) * one.kv_token_nbytes()
        assert one.kv_tokens(LEFT) == 96
        leaves, stays = Side(one, kind, 2 * kept_nbytes), Side(other, kind, 2 * kept_nbytes)

        said = await leaves.first_turn(1, 1)
        assert leaves.said[-1] == TurnKvKept(1, kept_nbytes, leaves.said[-1].seconds)
        # The tool works. The first engine is told to leave, and the other fetches what it keeps; then it is gone.
        leaves.mover.leave((1,))
        assert (await stays.fetches(31, leaves.order(1))).fault == ""
        async with asyncio.timeout(60):
            while leaves.mover.shelf.nbytes():  # its reader has all
                await asyncio.sleep(0.001)
        behind, loaded = await stays.next_turn(turn(2, 1, said), stays.order(31))
        assert (loaded.tokens, loaded.fault) == (96, "")
        assert behind.token_ids == (await finish(one, turn(3, 1, said)))[3].token_ids

        # Blocks that are damaged on their way, or in memory: prefilled.
        again = await stays.first_turn(4, 4)
        stays.mover.shelf._kept[4].data = memoryview(bytes(kept_nbytes))
        behind, loaded = await Side(one, kind, 2 * kept_nbytes).next_turn(turn(5, 4, again), stays.order(4))
        assert "hash" in loaded.fault
        assert behind.token_ids == (await finish(other, turn(6, 4, again)))[6].token_ids

        # What is kept is bounded: the oldest goes, and whoever comes for it prefills.
        for handle in (7, 8):
            latest = await stays.first_turn(handle, handle)
            assert stays.mover.shelf.nbytes() <= 2 * kept_nbytes
        assert not stays.mover.shelf.has(4)
        assert (await Side(one, kind, 2 * kept_nbytes).fetches(41, stays.order(4))).fault
        stays.mover.drop(DropTurnKv((7, 8)).numbers)
        assert stays.mover.shelf.nbytes() == 0
        assert len(latest) == TOKENS

        # Nothing is left of turns that nobody takes: neither memory here nor blocks there, for which a load would wait.
        held = one._moves._leaving
        await finish(one, turn(9, 9), turn(10, 10))
        assert len(held._files) == 2
        await one.abort([9])
        assert len(held._files) == 1
        await one.load(1, kind.views)
        assert held._files == {}
        assert await one.take_kv(10, LEFT) is None, "of other weights"
        left = await first(one, turn(11, 11), 2)
        await one.abort([11])
        assert held._files == {}
        assert len(left) >= 2
        for side in (leaves, stays):
            side.mover.close()
        for engine in (one, other):
            await engine.close()

    kind.run(main())


# ---------------------------------------------------------------- the memory files


async def never() -> None:
    raise AssertionError("it is sealed: nobody is asked")


def test_what_is_left_is_taken_once_the_file_is_sealed() -> None:
    async def main() -> None:
        leaving = LeavingKv()
        told = leaving.ask(1)
        assert os.stat(told["leave_path"]).st_ino == told["leave_inode"]
        assert not leaving.has(1), "it runs"
        leaving.finished(1, [7, 8, 9, 10])
        passes = 0

        async def answer() -> None:
            nonlocal passes
            passes += 1
            with open(told["leave_path"], "r+b", buffering=0) as file:
                file.write(b"abc" if passes == 1 else b"def")  # the first answer comes while half is there
                file.seek(0, os.SEEK_END)
                if passes == 2:
                    file.write(b"def")
                    seal(file.fileno())

        kv = await leaving.take(1, 3, 6, answer)
        assert kv is not None
        assert (kv.tokens, bytes(kv.data), passes) == ((7, 8, 9), b"defdef", 2)
        assert not leaving.has(1)
        assert not Path(told["leave_path"]).exists()

    asyncio.run(main())


@pytest.mark.parametrize(("tokens", "nbytes"), [(3, 9), (0, 0)])
def test_what_is_not_just_that_is_not_taken_and_freed(tokens: int, nbytes: int) -> None:
    async def main() -> None:
        leaving = LeavingKv()
        told = leaving.ask(1)
        leaving.finished(1, [7, 8, 9])
        with open(told["leave_path"], "r+b", buffering=0) as file:
            file.write(b"abcdef")
            seal(file.fileno())
        assert await leaving.take(1, tokens, nbytes, never) is None
        assert not leaving.has(1)
        assert not Path(told["leave_path"]).exists()

    asyncio.run(main())


def test_what_vllm_never_seals_is_not_waited_for_without_end() -> None:
    """It could not open the file; other orders to the engine wait behind the take."""

    async def main() -> None:
        leaving = LeavingKv()
        told = leaving.ask(1)
        leaving.finished(1, [7])
        with open(told["leave_path"], "r+b", buffering=0) as file:
            file.write(b"ab")  # as long as what is due, and perhaps not all of it written yet
        answers = 0

        async def answer() -> None:
            nonlocal answers
            answers += 1
            assert answers <= MOST_ANSWERS

        assert await leaving.take(1, 1, 2, answer) is None
        assert answers == MOST_ANSWERS
        assert not Path(told["leave_path"]).exists()

    asyncio.run(main())


def test_what_is_dropped_while_it_is_waited_for_is_not_taken() -> None:
    async def main() -> None:
        leaving = LeavingKv()
        told = leaving.ask(1)
        leaving.finished(1, [7])

        async def answer() -> None:
            leaving.drop_all()
            leaving.ask(1)

        assert await leaving.take(1, 1, 2, answer) is None
        assert not leaving.has(1)
        assert os.stat(told["leave_path"]).st_ino != told["leave_inode"], "another's is at its path now"
        leaving.drop_all()

    asyncio.run(main())


def test_a_turn_whose_tokens_were_wiped_leaves_nothing() -> None:
    """After another one met NaN its tokens are not known here any more, so that nothing could be said of its blocks."""

    class Running(Llm):
        goes_on = asyncio.Event()

        async def generate(self, *_args: object, **_how: object) -> AsyncIterator[Any]:
            await self.goes_on.wait()
            logprobs = SimpleNamespace(logprobs=[-1.0])
            yield SimpleNamespace(
                outputs=[SimpleNamespace(token_ids=[5], logprobs=logprobs, finish_reason="stop")]
            )

    async def main() -> None:
        engine = engine_of(Running())
        engine._usable, engine._blocks.token_nbytes, engine._blocks.block_tokens = True, 4, 32
        await engine.add(turn(1, 1))
        assert len(engine._blocks.leaving._files) == 1
        await engine._cleanse("2")
        Running.goes_on.set()
        assert (await engine.next())[0].finish == "stop"
        async with asyncio.timeout(20):  # a file that is waited for is never sealed here
            assert await engine.take_kv(1, 64) is None
        assert engine._blocks.leaving._files == {}

    asyncio.run(main())


# ---------------------------------------------------------------- inside vLLM


def ended(leaving: LeavingKv, handle: int = 1, why: str = "length", computed: int = 9) -> Any:
    """A request of ten tokens, as vLLM's scheduler has it when it is over."""
    return SimpleNamespace(
        request_id=str(handle),
        kv_transfer_params=leaving.ask(handle),
        get_finished_reason=lambda: why,
        num_tokens=10,
        num_computed_tokens=computed,
    )


def passed(mover: Any) -> None:
    """The next pass, from its scheduling to its end."""
    found = mover.build_connector_meta(SimpleNamespace(finished_req_ids=set()))
    mover._get_connector_metadata = lambda: found
    mover.start_load_kv(None)


@pytest.fixture
def mover(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = moved.connector(monkeypatch)
    for number, cache in enumerate(found._caches):
        cache += (torch.arange(8.0) + 10 * number)[:, None, None, None]
    return found


def taken(leaving: LeavingKv, handle: int = 1, tokens: int = 8) -> Any:
    leaving.finished(handle, range(10))
    return asyncio.run(leaving.take(handle, tokens, tokens * 2 * 2 * 3 * 4, never))


INSIDE = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]


def inside(test: Any) -> Any:
    for mark in INSIDE:
        test = mark(test)
    return test


@inside
def test_vllm_holds_the_blocks_of_a_finished_request_until_they_are_copied(mover: Any) -> None:
    leaving = LeavingKv()
    assert mover.request_finished(ended(leaving), [5, 3, 6]) == (True, None)
    assert mover.get_finished(set()) == (None, None)
    passed(mover)
    assert mover.get_finished({"1"}) == ({"1"}, None), "else vLLM would hold them for ever"
    assert mover.get_finished(set()) == (None, None), "it would free them twice"
    found = taken(leaving)
    assert found.tokens == tuple(range(8))
    entries = memoryview(found.data).cast("f").tolist()
    assert entries == [5.0] * 24 + [3.0] * 24 + [15.0] * 24 + [13.0] * 24


@inside
@pytest.mark.parametrize("why", ["abort", "error"])
def test_a_request_that_did_not_come_to_its_end_leaves_nothing(mover: Any, why: str) -> None:
    leaving = LeavingKv()
    assert mover.request_finished(ended(leaving, why=why), [5, 3, 6]) == (False, None)
    passed(mover)
    assert mover.get_finished(set()) == (None, None)
    leaving.drop_all()


@inside
@pytest.mark.parametrize(("computed", "blocks"), [(9, []), (5, [5, 3, 6])])
def test_a_request_that_vllm_preempted_leaves_nothing_and_its_taker_hears_of_it(
    mover: Any, computed: int, blocks: list[int]
) -> None:
    leaving = LeavingKv()
    assert mover.request_finished(ended(leaving, computed=computed), blocks) == (True, None)
    passed(mover)
    assert mover.get_finished(set()) == ({"1"}, None)
    assert taken(leaving) is None


@inside
def test_blocks_whose_engine_let_go_of_them_are_written_nowhere(mover: Any) -> None:
    leaving = LeavingKv()
    over = ended(leaving)
    mover.request_finished(over, [5, 3, 6])
    leaving.drop_all()
    told = leaving.ask(2)
    assert told["leave_path"] == over.kv_transfer_params["leave_path"], "another request's file is there now"
    passed(mover)
    assert mover.get_finished(set()) == ({"1"}, None)
    assert Path(told["leave_path"]).stat().st_size == 0
    leaving.drop_all()


@inside
def test_what_is_left_and_not_taken_is_bounded(mover: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout.engines.vllm import connector

    monkeypatch.setattr(connector, "MOST_NBYTES", 2 * 8 * 2 * 2 * 3 * 4)  # of two requests
    leaving = LeavingKv()
    for handle in (1, 2, 3):
        mover.request_finished(ended(leaving, handle), [5, 3, 6])
    passed(mover)
    assert mover.get_finished(set()) == ({"1", "2", "3"}, None)
    assert taken(leaving, 1) is not None
    assert taken(leaving, 3) is None, "there was no room"
    for handle in (4, 5):
        mover.request_finished(ended(leaving, handle), [5, 3, 6])
    passed(mover)
    assert taken(leaving, 4) is not None, "the first was taken: it counts no more"
    assert taken(leaving, 5) is None
    leaving.drop_all()


@inside
def test_a_request_that_leaves_blocks_and_brings_none_loads_none(mover: Any) -> None:
    leaving = LeavingKv()
    over = ended(leaving)
    assert mover.get_num_new_matched_tokens(over, 0) == (0, False)
    mover.update_state_after_alloc(over, None, 0)
    assert mover._asked == set()
    leaving.drop_all()
