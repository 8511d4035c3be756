"""A site as one fleet: engines of several runs that change hands, a further cluster behind a link that is cut, guests of services.

Ops besides a `World`'s: `fleet` (which runs' weights may cross a link), `beyond` (a job on a further cluster), `part` and `meet` (its link
is cut, and returns), `pass` (time), `invite` (a guest), `bound` (what its host leaves it), `other_run` (an engine speaks of a sample of
another run), `lend` and `lend_over` (an engine lends slots to another run, and that ends). `Trouble` draws them. What is checked besides:
`Fleet.apply`, `Fleet._hear` and `Fleet._audit`, and `apart`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import msgspec

from scavenger.protocol.messages import (
    GUEST_INTENT,
    LENT_INTENT,
    Chunk,
    Chunks,
    GoodbyeAck,
    Held,
    Message,
    SampleFailed,
    WorkerMessage,
    Yielded,
)
from scavenger.protocol.worker import events as ev
from scavenger.router.core.events import IntentRevoked, PeerIdentity, SlotsLent
from scavenger.router.core.state import Sample, Worker
from scavenger.router.core.transitions import SampleStatus, WorkerStatus
from scavenger.router.edge.pipeline import checked
from tests.router.engines import SimWorker, finish_at, payload
from tests.router.links import Link
from tests.router.site import Op
from tests.router.trainers import SimTrainer
from tests.router.world import World

CLUSTER = "north"
#: Of three runs one encrypts no weights: its engines beyond a link are to leave, and none that changes hands there serves it.
ENCRYPTED = ("r", "p")
#: What an engine says of a sample that another run's engine has: who has a key of one run, and knows or guesses the rest.
SAID = ("next tokens", "tokens again", "a heartbeat with it", "it gives it back", "it failed")
#: Heartbeats after which an engine knows which loan is ordered: with the first one the daemon hears of it, and its order comes by the next.
HEARD = 3


class Fleet(World):
    """See the module."""

    parted: dict[str, float]  # clusters whose link is cut, and since when
    cluster_of: dict[str, str]  # job -> its further cluster
    met: Counter[str]  # what happened, for tests that demand that it did

    def __init__(self, *args: object, **named: object) -> None:
        super().__init__(*args, **named)  # type: ignore[arg-type]  # a World's own
        self.parted, self.cluster_of, self.met = {}, {}, self.cover.fleet
        self.loans = dict[str, tuple[int, int]]()  # job -> the borrower's name, and the daemon that lends
        self.borrowers = dict[int, int]()  # lender -> its last borrower, by name

    def on_fleet(self, encrypted: list[str]) -> None:
        """Runs that begin from now on let their weights cross a link, if they are among these."""
        self.truth.apart.encrypted = set(encrypted)

    def on_train(self, name: int, run: str, back: int, other: bool) -> None:
        super().on_train(name, run, back, other)
        self.campaigns[run].encrypt = run in self.truth.apart.encrypted

    # ---- a further cluster

    def on_beyond(self, name: int, run: str, intent: str, node: str) -> None:
        """A job of a further cluster starts."""
        self.cluster_of[intent] = CLUSTER
        self.on_spawn(name, "harvested", run, intent, node)

    def _who(self, worker: SimWorker) -> PeerIdentity:
        if worker.intent.startswith(LENT_INTENT):
            return PeerIdentity("worker", _lent_key(worker.name), worker.run, worker.intent)
        return replace(super()._who(worker), cluster=self.cluster_of.get(worker.intent, ""))

    def _beyond(self) -> list[SimWorker]:
        return [worker for worker in self.workers.values() if worker.intent in self.cluster_of]

    def _is_cut(self, link: Link | None) -> bool:
        return link is not None and link.who.cluster in self.parted

    def on_part(self) -> None:
        """The link is cut: what is said on either side waits."""
        if CLUSTER not in self.parted and self._beyond():
            self.parted[CLUSTER] = self.daemon.now
            self.met["link cut"] += 1

    def on_meet(self, kept: bool) -> None:
        """The link returns. `kept`: what was under way arrives, also over connections that were given up meanwhile."""
        since = self.parted.pop(CLUSTER, None)
        if since is None:
            return
        core = self.daemon.router.core
        known = {worker.process.session: worker for worker in core.workers.values()}
        for worker in self._beyond():
            found = known.get(worker.identity.session)
            state = "given up" if found is None else "suspect" if found.suspect else "there"
            self.met[f"link returns, engine {state}"] += 1
        if not kept:
            for link in [link for link in self.links.values() if link.who.cluster == CLUSTER]:
                link.up.clear()
                link.down.clear()
                if not link.old and link.generation == self.daemon.generation:
                    self._rebind(link)

    def on_pass(self, seconds: int) -> None:
        """Time passes, in which whoever can works."""
        for _ in range(seconds):
            self._calm_moment(1, 1.0)

    def on_up(self, name: int, most: int) -> None:
        if not self._is_cut(self._link(name)):
            super().on_up(name, most)

    def on_down(self, name: int, most: int) -> None:
        if not self._is_cut(self._link(name)):
            super().on_down(name, most)

    def on_late(self, conn: int) -> None:
        if not self._is_cut(self.links.get(conn)):
            super().on_late(conn)

    # ---- guests

    def on_invite(self, name: int, run: str, node: str) -> None:
        """A service's owner starts a guest: no job of ours, and asleep until its host leaves it something."""
        if name in self.workers or run not in self.campaigns:
            return
        me = ev.WorkerIdentity(
            "harvested", run, f"s{name}", 0, name, node, 1, "reference", "0", 1, guest=True
        )
        self.workers[name] = SimWorker(name, me, f"{GUEST_INTENT}{name}", self.daemon.now, self.cover.phase)

    def on_bound(self, name: int, leases: int) -> None:
        """Its host leaves a guest so many samples from now on."""
        worker = self.workers.get(name)
        if worker is not None and worker.identity.guest and not worker.stopped:
            fell = f"bound falls to {min(leases, 1)}, {'at work' if worker.requests else 'idle'}"
            self.met[fell if leases < (worker.session.work.lease_limit or 0) else "bound rises"] += 1
            worker.feed(ev.Bounded(leases))
            self._bury(worker)

    # ---- engines that lend slots

    def on_lend(self, name: int, intent: str, run: str, slots: int) -> None:
        """The daemon has a job's engine lend slots to another run; the borrower will have this name."""
        job = self.incarnations.get(intent)
        if job is None or run not in self.campaigns or job[1] == run:
            return
        if self.loans.get(intent, (0, -1))[1] == self.daemon.generation:
            return  # it lends already; what a daemon before this one lent is over
        self.loans[intent] = name, self.daemon.generation
        self.met["lent"] += 1
        self.daemon.handle(SlotsLent(intent, _lent_key(name), run, slots, f"samples of run {run} wait"))

    def on_lend_over(self, intent: str) -> None:
        """The loan ends: its borrower is to leave, and no worker comes under its key."""
        if (loan := self.loans.pop(intent, None)) is None:
            return
        borrower = self.workers.get(loan[0])
        if borrower is not None:
            self.met[f"a loan ends, its borrower {'at work' if borrower.requests else 'idle'}"] += 1
        self.daemon.handle(IntentRevoked(f"{LENT_INTENT}{intent}", "the lender's samples wait"))
        self.daemon.handle(SlotsLent(intent, "", "", 0, "the loan is over"))

    def _is_over(self, worker: SimWorker) -> bool:
        if not worker.intent.startswith(LENT_INTENT):
            return super()._is_over(worker)
        loan = self.loans.get(worker.intent.removeprefix(LENT_INTENT))
        return loan != (worker.name, self.daemon.generation)

    def _lend(self) -> None:
        """What a process that lends does by itself: a borrower begins, leaves before the next one, and dies with the process."""
        for name, borrower in list(self.borrowers.items()):
            lender = self.workers.get(name)
            if lender is None or lender.left is not None:
                self.met["a lender ends, its borrower there"] += borrower in self.workers
                self.on_kill(borrower)
                del self.borrowers[name]
            elif borrower in self.workers and (
                lender.session.leaving
                or lender.lends is None
                or lender.lends.public_key != _lent_key(borrower)
            ):
                self.workers[borrower].feed(ev.Terminate("the lender takes its slots back"))
                self._bury(self.workers[borrower])
        for lender in list(self.workers.values()):
            order = lender.lends
            if order is None or not order.public_key or lender.session.leaving:
                continue
            name = int(order.public_key.removeprefix(LENT_INTENT))
            before = self.borrowers.get(lender.name)
            if before != name and before not in self.workers:
                me = replace(lender.identity, run=order.run, session=f"s{name}", guest=True)
                made = SimWorker(name, me, f"{LENT_INTENT}{lender.intent}", self.daemon.now, self.cover.phase)
                self.workers[name], self.borrowers[lender.name] = made, name
                made.feed(ev.Bounded(order.slots))

    def _all_serve(self) -> bool:
        """Nor does an engine that lends what this daemon did not order have to hear of it, which heartbeats tell."""
        return super()._all_serve() and not any(
            has != due and found.heartbeat.acks < HEARD for _, found, has, due in self._orders()
        )

    def _audit(self) -> None:
        super()._audit()
        for worker, _, has, due in self._orders():
            assert has == due, f"engine {worker.name} knows of loan {has!r}, and was told of {due!r}"

    def _orders(self) -> Iterator[tuple[SimWorker, Worker, str, str]]:
        """Each engine that is ready, here and as the daemon has it, with the loan that it knows of, and the one that it was told of."""
        known = {worker.process.session: worker for worker in self.daemon.router.core.workers.values()}
        for worker in self.workers.values():
            found = known.get(worker.identity.session)
            if found is not None and found.status is WorkerStatus.READY:
                yield worker, found, worker.session.work.lends, found.loan.public_key

    # ---- what must hold

    def apply(self, op: Op) -> None:
        """Let one thing happen, after which no guest generates more than its host leaves it."""
        super().apply(op)
        self._lend()
        for worker in self.workers.values():
            bound = worker.session.work.lease_limit
            assert bound is None or len(worker.requests) <= bound, (
                f"guest {worker.name} generates {len(worker.requests)} samples, beyond its bound of {bound}"
            )

    def _hear(self, peer: SimWorker | SimTrainer, message: Message) -> None:
        """Who is to change hands, and lost nothing on the way, lost none of its tokens when its goodbye is acknowledged."""
        ending = peer.session._ending if isinstance(peer, SimWorker) else None
        if isinstance(message, GoodbyeAck) and ending is not None and ending.hands_to:
            assert isinstance(peer, SimWorker)
            whole = peer.link is not None and not peer.link.lossy
            for held in peer.session.work.held() if whole else ():
                self._kept(peer, held, ending.reason)
        super()._hear(peer, message)

    def _kept(self, worker: SimWorker, held: Held, reason: str) -> None:
        """`reason`: of the change of hands. A lease that ended before, for another one, is none that it brought."""
        ended = self.truth.ended.get((held.sample_id, held.epoch))
        if ended is None or ended.reason != reason:
            return
        self.met["left in mid-sample"] += 1
        assert ended.length >= held.length, (
            f"sample {held.sample_id}: of {held.length} tokens the engine's change of hands left {ended.length}"
        )

    def on_other_run(self, name: int, said: int, which: int) -> None:
        """An engine speaks of a sample that an engine of another run has: nothing comes of it."""
        worker, core = self.workers.get(name), self.daemon.router.core
        link = worker.link if worker is not None else None
        if worker is None or link is None or self._is_cut(link) or link.generation != self.daemon.generation:
            return
        theirs = [
            sample
            for sample in core.samples.values()
            if sample.status is SampleStatus.LEASED and sample.group.run.name != worker.run
        ]
        if not theirs:
            return
        sample = theirs[which % len(theirs)]
        before = _state_of(sample)
        self.daemon.handle(checked(link.conn, _from_another_run(SAID[said], worker, sample)))
        if link.conn in core.by_conn:
            self.met[f"another run's engine: {SAID[said]}"] += 1
        assert _state_of(sample) == before, (
            f"sample {sample.id} of run {sample.group.run.name}: {SAID[said]}, said an engine of run {worker.run}, "
            f"and {before} became {_state_of(sample)}"
        )

    # ---- the end

    def make_calm(self, alone: bool) -> None:
        self.on_meet(True)
        for name in [name for name, worker in self.workers.items() if worker.identity.guest]:
            self.on_bound(name, 2)
        super().make_calm(alone)


def _lent_key(name: int) -> str:
    return f"{LENT_INTENT}{name}"


def _state_of(sample: Sample) -> tuple[object, ...]:
    return sample.status, sample.epoch, sample.worker_id, sample.accepted, sample.reported, sample.failures


def _from_another_run(said: str, worker: SimWorker, sample: Sample) -> WorkerMessage:
    held = Held(sample.id, sample.epoch, sample.accepted + 1)
    match said:
        case "next tokens":
            return Chunks((_chunk(sample, sample.accepted),))
        case "tokens again":
            return Chunks((_chunk(sample, max(0, sample.accepted - 1)),))
        case "a heartbeat with it":
            beat = worker.session.work.heartbeat(worker.session.progress, 0.0)
            return msgspec.structs.replace(beat, held=(*beat.held, held))
        case "it gives it back":
            return Yielded((held,))
        case "it failed":
            return SampleFailed(sample.id, sample.epoch, "no memory")
    raise AssertionError(said)


def _chunk(sample: Sample, offset: int) -> Chunk:
    """The one right token at a place: nothing but the engine's run says that it is to be refused."""
    tokens, logprobs, raw = (part[4 * offset : 4 * offset + 4] for part in payload(sample.id))
    finish = finish_at(sample.id, offset + 1)
    return Chunk(sample.id, sample.epoch, offset, sample.lease_version, tokens, logprobs, raw, finish)


# ---------------------------------------------------------------- drawn


#: Odds of an op, by op of the schedule.
HANDS, REVOKED, BOUND, STRANGER, BEYOND, INVITE, PART = 0.06, 0.15, 0.08, 0.06, 0.05, 0.03, 0.04
LEND, LEND_OVER, LEND_OVER_AT_WORK = 0.12, 0.02, 0.2  # in schedules in which engines lend at all
#: How long a link is cut, seconds: engines beyond are suspect after 4 s, and given up after 12 s.
CUT_S = (1.0, 3.0, 6.0, 10.0, 15.0, 25.0)
#: While it is cut: seconds in which the others work.
MEANWHILE = 0.25
MOST_BEYOND, MOST_GUESTS = 3, 2
NODES = ("n0", "n1")  # of the same names as the daemon's own


def opening(begin: list[Op], rng: random.Random) -> list[Op]:
    """A fleet's first ops, before and after those of any schedule."""
    runs = ["q", "p"] if rng.random() < 0.4 else ["q"]
    known = {op[2] for op in begin if op[0] == "train"}
    more = [["train", 2 + n, run, 0, False] for n, run in enumerate(runs) if run not in known]
    beyond = [["beyond", 30 + n, "r", f"i{30 + n}", NODES[n]] for n in range(rng.randint(1, 2))]
    guest: list[Op] = [["invite", 35, rng.choice(["r", *runs]), "service"], ["bound", 35, rng.randint(0, 3)]]
    return [["fleet", list(ENCRYPTED)], *more, *begin[:1], ["serve", 2], *beyond, *guest, *begin[1:]]


class Trouble:
    """Draws what befalls a fleet besides. Numbers of its own: what is drawn otherwise is the same with it and without."""

    def __init__(self, rng: random.Random, loans: random.Random | None = None) -> None:
        """`loans`: draws those; None: there are none."""
        self._rng, self._loans = rng, loans
        self._until = 0.0  # the link is cut until then

    def befall(self, world: Fleet) -> None:
        """What happens besides, after one op."""
        rng = self._rng
        self._link(world)
        if world.incarnations and rng.random() < HANDS:
            intent = rng.choice(list(world.incarnations))
            world.apply(["hands", intent, rng.choice(sorted(world.campaigns))])
            if rng.random() < REVOKED:
                world.apply(["revoke", intent])
        guests = [name for name, worker in world.workers.items() if worker.identity.guest]
        if guests and rng.random() < BOUND:
            world.apply(["bound", rng.choice(guests), rng.choice((0, 0, 1, 2, 4))])
        if world.workers and rng.random() < STRANGER:
            world.apply(
                ["other_run", rng.choice(list(world.workers)), rng.randrange(len(SAID)), rng.randrange(8)]
            )
        self._spawn(world, guests)
        if self._loans is not None:
            self._lend(world, self._loans)

    def _lend(self, world: Fleet, rng: random.Random) -> None:
        at_work = [
            intent
            for intent, (name, _) in world.loans.items()
            if name in world.workers and world.workers[name].requests
        ]
        if world.loans and rng.random() < (LEND_OVER_AT_WORK if at_work else LEND_OVER):
            world.apply(["lend_over", rng.choice(at_work or list(world.loans))])
        if world.incarnations and rng.random() < LEND:
            name = 500_002 + 10 * len(world.log)
            intent, run = rng.choice(list(world.incarnations)), rng.choice(sorted(world.campaigns))
            world.apply(["lend", name, intent, run, rng.randint(1, 2)])

    def _link(self, world: Fleet) -> None:
        rng = self._rng
        if world.parted:
            if world.daemon.now >= self._until:
                world.apply(["meet", rng.random() < 0.5])
            elif rng.random() < MEANWHILE:
                world.apply(["pass", 2])
        elif rng.random() < PART:
            self._until = world.daemon.now + rng.choice(CUT_S)
            world.apply(["part"])

    def _spawn(self, world: Fleet, guests: list[int]) -> None:
        rng, name = self._rng, 500_000 + 10 * len(world.log)  # never used before
        if not world.campaigns:
            return
        run = rng.choice(sorted(world.campaigns))
        if len(world._beyond()) < MOST_BEYOND and rng.random() < BEYOND:
            world.apply(["beyond", name, run, f"i{name}", rng.choice(NODES)])
        if len(guests) < MOST_GUESTS and rng.random() < INVITE:
            world.apply(["invite", name + 1, run, "service"])
            world.apply(["bound", name + 1, rng.randint(0, 3)])
