"""Which op comes next in a random schedule. Owns the odds: mostly work, often enough trouble; an op's numbers are drawn here."""

from __future__ import annotations

import random

from tests.router.engines import LIES
from tests.router.site import ORDERS, Op
from tests.router.world import World

NODES = ("n0", "n1", "n2", "n3")
REASONS = (
    ("PREEMPTED", False),
    ("NODE_FAIL", False),
    ("CANCELLED", False),
    ("FAILED", True),
    ("REQUEUED", False),
)


def opening(rng: random.Random) -> list[Op]:
    """How a schedule begins: with a run that has engines, and is somewhere in a step."""
    log: list[Op] = [["train", 1, "r", 0, False], ["serve", 2]]
    if rng.random() < 0.2:
        log.append(["train", 2, "q", 0, False])
    runs = [op[2] for op in log if op[0] == "train"]
    for name in range(10, 10 + rng.randint(1, 4)):
        log.append(["spawn", name, "harvested", rng.choice(runs), f"i{name}", rng.choice(NODES)])
    if rng.random() < 0.5:
        log.append(["spawn", 20, "reserved", rng.choice(runs), "0", "home"])
        if rng.random() < 0.5:
            log.append(["spawn", 22, "reserved", "r", "1", "home"])
    return [*log, ["serve", rng.randint(2, 8)]]


def draw(world: World, rng: random.Random, trouble: float = 0.12) -> Op:
    """The next op for a world in its present state. `trouble`: the share of ops that disturb."""
    if not world.trainers or not world.campaigns:
        return _train(world, rng)
    roll = rng.random()
    if roll < 0.09:
        return ["tick", rng.choice((0.1, 0.25, 0.5, 1.0, 2.0))]
    if roll < 0.25:
        return _disk(world, rng)
    if roll < 0.40:
        return _trainer(world, rng)
    if roll < 0.40 + trouble or not world.workers:
        return _trouble(world, rng)
    if roll > 0.98:
        return ["serve", rng.randint(1, 3)]
    return _worker(rng.choice(list(world.workers)), world, rng)


def _disk(world: World, rng: random.Random) -> Op:
    daemon = world.daemon
    if daemon.answers and rng.random() < 0.8:
        return ["answer"]
    if daemon.writes and (not daemon.reads or rng.random() < 0.7):
        return ["commit", rng.randint(1, len(daemon.writes))]
    return ["read"] if daemon.reads else ["answer"] if daemon.answers else ["tick", 0.1]


def _trainer(world: World, rng: random.Random) -> Op:
    name = rng.choice(list(world.trainers))
    roll = rng.random()
    if roll < 0.55:
        return ["move", name]
    if roll < 0.70:
        return ["act", name]
    if roll < 0.80:
        return ["up", name, rng.randint(1, 3)]
    if roll < 0.88:
        return ["down", name, rng.randint(1, 3)]
    if roll < 0.91:
        return ["checkpoint", name]
    if roll < 0.94:
        return ["toggle", name]
    return ["reserved", name, rng.random() < 0.4]


def _worker(name: int, world: World, rng: random.Random) -> Op:
    roll = rng.random()
    if roll < 0.45:
        return ["turn", name, rng.randint(1, 3)]
    if roll < 0.60:
        return ["do", name]
    if roll < 0.73:
        return ["up", name, rng.randint(1, 4)]
    if roll < 0.86:
        return ["down", name, rng.randint(1, 4)]
    if roll < 0.96:
        return ["gen", name, rng.randint(1, 3)]
    return ["lie", name, rng.randrange(len(LIES))]


TROUBLE = {
    "spawn": 16,
    "requeue": 5,
    "reserved": 4,
    "kill": 4,
    "term": 3,
    "die": 3,
    "stop": 3,
    "cont": 4,
    "cut": 4,
    "again": 4,
    "clock": 2,
    "trip": 5,
    "lose": 10,
    "twice": 5,
    "late": 6,
    "gone": 4,
    "revoke": 1,
    "crash": 3,
    "succeed": 1,
    "fence": 1,
    "fail": 2,
    "jump": 1,
    "train": 1,
    "restart": 3,
    "sleep": 3,
    "unordered": 6,
    "zombie": 3,
    "reconnect": 2,
    "close": 0.4,
    "run": 0.3,
}
_KINDS, _ODDS = tuple(TROUBLE), tuple(TROUBLE.values())


def _trouble(world: World, rng: random.Random) -> Op:
    kind = rng.choices(_KINDS, _ODDS)[0]
    workers, trainers = list(world.workers), list(world.trainers)
    if kind in ("spawn", "requeue", "reserved"):
        return _spawn(world, rng, kind)
    if kind in ("train", "run", "restart"):
        if kind == "restart":
            return ["tkill", rng.choice(trainers)]
        return _train(world, rng)
    if kind == "sleep":
        return ["reserved", rng.choice(trainers), False]
    if kind in ("gone", "revoke"):
        return _scheduler(world, rng, kind)
    if kind == "trip":
        workers = [n for n in workers if world.workers[n].todo] or workers
    if kind in ("kill", "term", "die", "stop", "cont", "trip"):
        stopped = [n for n in workers if world.workers[n].stopped]
        chosen = stopped if kind == "cont" and stopped else workers
        return [kind, rng.choice(chosen)] if chosen else ["tick", 0.25]
    if kind in ("lose", "twice"):
        way = rng.choice(("up", "down"))
        busy = [
            n
            for n in workers + trainers
            if (link := world._link(n)) is not None and (link.up if way == "up" else link.down)
        ]
        if not busy:
            return ["tick", 0.1]
        busy = (rng.random() < 0.7 and [n for n in busy if n in world.workers]) or busy
        return [kind, rng.choice(busy), way, *([rng.randint(1, 4)] if kind == "lose" else [])]
    return _other(world, rng, kind, workers, trainers)


def _other(world: World, rng: random.Random, kind: str, workers: list[int], trainers: list[int]) -> Op:
    match kind:
        case "cut" if workers:
            return ["cut", rng.choice(workers), rng.random() < 0.5]
        case "again" if workers:
            return ["again", rng.choice(workers), rng.randrange(12)]
        case "clock" if workers:
            return ["clock", rng.choice(workers), rng.choice((-3.0, 2.0, 5.0, 30.0))]
        case "late":
            old = [conn for conn, link in world.links.items() if link.old and link.up]
            return ["late", rng.choice(old)] if old else ["tick", 0.1]
        case "crash":
            return ["crash", rng.random() < 0.5]
        case "fail":
            return ["fail", rng.randint(1, 4)]
        case "jump":
            return ["jump", rng.choice((3.0, 6.0, 20.0, 60.0))]
        case "unordered":
            ordered = [
                n
                for n in workers
                if (link := world.workers[n].link) is not None
                and any(isinstance(m, ORDERS) for m in link.down)
            ]
            return ["unordered", rng.choice(ordered), rng.randrange(3)] if ordered else ["tick", 0.1]
        case "succeed" | "fence":
            return [kind]
        case "zombie":
            return [
                kind,
                rng.choice([n for n in trainers if world.trainers[n].phase == "commit"] or trainers),
            ]
        case "reconnect" | "close":
            return [kind, rng.choice(trainers)]
    return ["tick", 0.25]


def _spawn(world: World, rng: random.Random, kind: str) -> Op:
    name = max([0, *world.workers, *(i for i in world.trainers if i < 8000)]) + 1 + rng.randrange(2)
    name = world.conns * 10 + name  # never used before
    run = rng.choice(list(world.campaigns))
    if kind == "reserved":
        return ["spawn", name, "reserved", run, str(rng.randrange(2)), "home"]
    if kind == "requeue" and world.incarnations:
        intent = rng.choice(list(world.incarnations))
        _, run, node = world.incarnations[intent]
        return ["spawn", name, "harvested", run, intent, node]
    if sum(bool(w.intent) for w in world.workers.values()) >= 5:
        return ["tick", 0.1]
    return ["spawn", name, "harvested", run, f"i{name}", rng.choice(NODES)]


def _scheduler(world: World, rng: random.Random, kind: str) -> Op:
    if not world.incarnations:
        return ["tick", 0.1]
    intent = rng.choice(list(world.incarnations))
    if kind == "revoke":
        return ["revoke", intent]
    newest = world.incarnations[intent][0]
    reason, crashed = rng.choice(REASONS)
    return ["gone", intent, max(0, newest - rng.randrange(2)), reason, crashed]


def _train(world: World, rng: random.Random) -> Op:
    name = 7000 - world.conns
    run = "q" if "r" in world.campaigns and rng.random() < 0.3 else "r"
    back = rng.choice((0, 0, 0, 1, 2))
    return ["train", name, run, back, rng.random() < 0.3]
