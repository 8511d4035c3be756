"""Random schedules for the router's core and the worker's session, wired without a network; everything comes from one seed.

`run(seed, ops)` plays a schedule, then calms the world and demands that every run takes its next step. A failure raises `Failed` with the
log of ops, which `play` takes and `shrink` shortens.
"""

from __future__ import annotations

import random

from tests.router import fleet
from tests.router.blocks import FATES
from tests.router.coverage import Coverage
from tests.router.drafts import BYTES_PER_S, FORGED
from tests.router.draw import draw, opening
from tests.router.fleet import Fleet
from tests.router.memory_ledger import Ledger
from tests.router.site import Op

#: Drafts that are wrong, late or another group's, by op, in schedules that have any.
DRAFTS = 0.15
#: KV blocks that are late, corrupt, of another version or sample, by op, in schedules in which any move.
WRONG_BLOCKS = 0.12
#: Engines that are told to leave, beside the others, in such schedules.
LEAVES = 0.03
#: Engines that change hands, by op, in schedules in which any do.
HANDS = 0.08


class Failed(AssertionError):
    """A schedule that broke an invariant, and the log that `play` takes."""

    def __init__(self, seed: int, log: list[Op], alone: bool, cause: BaseException) -> None:
        super().__init__(f"seed {seed} after {len(log)} ops: {type(cause).__name__}: {cause}")
        self.seed, self.log, self.alone, self.cause = seed, log, alone, cause


def run(
    seed: int,
    ops: int = 200,
    cover: Coverage | None = None,
    ledger: Ledger | None = None,
    *,
    ahead: int = 0,
    in_fleet: bool = False,
) -> Fleet:
    """Play one schedule, over a ledger in memory unless another is given; raises `Failed`. `ahead`: steps submitted in advance.
    `in_fleet`: several runs, a further cluster and guests besides."""
    rng = random.Random(seed)
    cover = cover or Coverage()
    world = Fleet(cover, ledger, ahead, switch=seed % 3 > 0, kv="keep" if ahead and seed % 2 else "recompute")
    alone = seed % 4 == 3
    # Numbers of their own: what is drawn besides is the same with drafts and without.
    drafts = random.Random(-seed) if seed % 7 == 5 else None
    fates = random.Random(-seed) if seed % 7 == 4 else None
    hands = random.Random(-seed) if seed % 7 == 3 and not in_fleet else None
    loans = random.Random(-2 - seed) if seed % 3 == 2 else None
    more = fleet.Trouble(random.Random(-1 - seed), loans) if in_fleet else None
    with cover.watching():
        try:
            begin, trouble = opening(rng), rng.choice((0.04, 0.08, 0.12, 0.2))
            if in_fleet:
                begin = fleet.opening(begin, random.Random(-seed))
            if drafts is not None:
                world.apply(["speculate", BYTES_PER_S])
            if fates is not None:
                world.apply(["move_kv"])
            for number in range(ops):
                world.apply(begin[number] if number < len(begin) else draw(world, rng, trouble))
                if drafts is not None and world.workers and drafts.random() < DRAFTS:
                    world.apply(["draft", drafts.choice(list(world.workers)), drafts.choice(list(FORGED))])
                if fates is not None and world.workers:
                    _move_blocks(world, fates)
                if hands is not None and world.incarnations:
                    _change_hands(world, hands)
                if more is not None and number >= len(begin):
                    more.befall(world)
            world.make_calm(alone)
            for worker in world.workers.values():
                world.note_drafts(worker)
        except Exception as error:
            raise Failed(seed, world.log, alone, error) from error
    cover.schedules += 1
    cover.handled += world.events
    cover.set_aside += len(world.truth.set_aside)
    return world


def _move_blocks(world: Fleet, rng: random.Random) -> None:
    """An engine is told to leave now and then, with its samples' blocks; and what the next reader finds is not always just these."""
    roll, name = rng.random(), rng.choice(list(world.workers))
    busy = [worker.name for worker in world.workers.values() if worker.requests]
    if roll < LEAVES and busy:
        world.apply(["term", rng.choice(busy)])
    elif roll < LEAVES + WRONG_BLOCKS:
        world.apply(["fate", name, rng.choice(FATES)])


def _change_hands(world: Fleet, rng: random.Random) -> None:
    """An engine goes on for another run now and then; a part of them is asked to leave on the way."""
    if rng.random() >= HANDS:
        return
    intent = rng.choice(list(world.incarnations))
    world.apply(["hands", intent, rng.choice(sorted(world.campaigns))])
    if rng.random() < 0.25:
        world.apply(["revoke", intent])


def play(log: list[Op], alone: bool = False, cover: Coverage | None = None) -> Fleet:
    """Play a log; raises what it raises."""
    cover = cover or Coverage()
    world = Fleet(cover)
    with cover.watching():
        for op in log:
            world.apply(op)
        if world.campaigns:
            world.make_calm(alone)
    return world
